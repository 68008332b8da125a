//! Frames move together in DRAM, so that no size class keeps slabs half empty that another one needs.
//!
//! Only what the book cannot see is done here: where in the arena a block's bytes lie, and whether anybody reads them.
//! A frame that is read stays where it is. Not here: which slab is emptied (`arena`), and which block gives way
//! (`kv_core::tier`).

use std::sync::Arc;

use bytes::Bytes;
use kv_core::evict::BlockKey;

use super::Store;

/// Bytes that are moved at once: some milliseconds of copying, during which nobody is answered. One frame may exceed it.
const PACK_BYTES_MAX: usize = 8 << 20;

/// A block's bytes in DRAM, which knows whether anybody reads them: [`Bytes`] do not tell how many copies there are.
#[derive(Clone, Debug)]
pub(super) struct Held(Arc<Bytes>);

impl Held {
    /// Of bytes that nobody else has.
    fn new(bytes: Bytes) -> Held {
        Held(Arc::new(bytes))
    }

    /// For a reader, without copying. It counts as one until its last clone is gone.
    pub(super) fn lend(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes, when nobody reads them.
    fn unread(&self) -> Option<&Bytes> {
        (Arc::strong_count(&self.0) == 1).then_some(&*self.0)
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.0
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
