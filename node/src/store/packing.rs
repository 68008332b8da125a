//! Frames move together in DRAM, so that no size class keeps slabs half empty that another one needs.
//!
//! Only what the book cannot see is done here: where in the arena a block's bytes lie, and whether anybody reads them.
//! A frame that is read stays where it is. Not here: which slab is emptied (`arena`), and which block gives way
//! (`kv_core::tier`).

use std::cell::Cell;
use std::sync::Arc;

use bytes::Bytes;
use kv_core::evict::BlockKey;

use super::Store;

/// Bytes that are moved at once: some milliseconds of copying, during which nobody is answered. One frame may exceed it.
const PACK_BYTES_MAX: usize = 8 << 20;

/// A block's bytes in DRAM, which knows whether anybody reads them: [`Bytes`] do not tell how many copies there are.
pub(super) struct Held(Box<Inner>);

struct Inner {
    bytes: Bytes,
    /// Each of what was lent has a share in it.
    mark: Arc<()>,
    /// What readers get copies of, so that lending is no more than counting; made for the first.
    lent: Cell<Option<Bytes>>,
}

/// What readers have, together.
struct Lent {
    bytes: Bytes,
    _mark: Arc<()>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Held {
    /// Of bytes that nobody else has.
    fn new(bytes: Bytes) -> Held {
        Held(Box::new(Inner { bytes, mark: Arc::new(()), lent: Cell::new(None) }))
    }

    /// For a reader, without copying. It counts as one until its last clone is gone.
    pub(super) fn lend(&self) -> Bytes {
        let Inner { bytes, mark, lent } = &*self.0;
        let new = || Bytes::from_owner(Lent { bytes: bytes.clone(), _mark: Arc::clone(mark) });
        let own = lent.take().unwrap_or_else(new);
        let copy = own.clone();
        lent.set(Some(own));
        copy
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.0.bytes.len()
    }

    /// The bytes, when nobody reads them.
    fn unread(&self) -> Option<&Bytes> {
        // Our own share goes first; the next reader gets a new one.
        self.0.lent.take();
        (Arc::strong_count(&self.0.mark) == 1).then_some(&self.0.bytes)
    }
}

impl Store {
    /// Keeps a block's bytes, which nobody else may have.
    pub(super) fn keep(&mut self, key: BlockKey, bytes: Bytes) {
        self.parts.arena.set_owner(&bytes, key.0);
        self.row(key).dram = Some(Held::new(bytes));
    }

    /// Empties slabs while there are too few empty ones; some of it, and the next call goes on.
    pub(super) fn pack(&mut self) {
        let mut moved_bytes = 0;
        loop {
            let rows = &self.rows;
            let unread = |owner: u32| rows.get(owner as usize)?.dram.as_ref()?.unread();
            let Some(owners) = self.parts.arena.vacate(unread) else { return };
            for owner in owners {
                if moved_bytes >= PACK_BYTES_MAX {
                    return;
                }
                let Some(held) = self.rows.get_mut(owner as usize).and_then(|row| row.dram.as_mut()) else {
                    continue;
                };
                let Some(moved) = held.unread().and_then(|bytes| self.parts.arena.moved(bytes)) else {
                    // No slot, which saves may have taken meanwhile.
                    return self.parts.arena.stay();
                };
                moved_bytes += moved.len();
                *held = Held::new(moved);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_until_the_last_copy_of_the_last_loan_is_gone() {
        let held = Held::new(Bytes::from_static(b"block"));
        assert!(held.unread().is_some());
        let (first, second) = (held.lend(), held.lend());
        let copy = second.clone();
        drop((first, second));
        assert!(held.unread().is_none(), "a copy is left");
        let later = held.lend();
        drop(copy);
        assert!(held.unread().is_none(), "what was lent since is left");
        assert_eq!(&later[..], b"block");
        drop(later);
        assert!(held.unread().is_some());
    }
}
