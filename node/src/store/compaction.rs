//! Compaction of DRAM: moves frames together, so that no size class keeps half-empty slabs that
//! another class needs.
//!
//! Only facts unknown to the book are handled here: a block's position in the arena, and whether
//! readers hold its bytes. A frame with readers stays in place. Not here: the choice of the slab
//! (`arena`) and of victims (`kv_core::tier`).

use std::cell::Cell;
use std::sync::Arc;

use bytes::Bytes;
use kv_core::evict::BlockKey;

use super::Store;

/// Bytes moved in one call: some milliseconds of copying, while no request is answered. A single
/// frame may exceed it.
const COMPACT_BYTES_MAX: usize = 8 << 20;

/// A block's bytes in DRAM that counts their readers; [`Bytes`] does not expose its reference
/// count.
pub(super) struct DramBlock(Box<DramBlockInner>);

struct DramBlockInner {
    bytes: Bytes,
    /// Each shared copy holds a reference.
    readers: Arc<()>,
    /// Bytes that readers clone, so that sharing only counts references; created for the first
    /// reader.
    shared: Cell<Option<Bytes>>,
}

/// The bytes that all readers share.
struct ReaderBytes {
    bytes: Bytes,
    _mark: Arc<()>,
}

impl AsRef<[u8]> for ReaderBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl std::fmt::Debug for DramBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl DramBlock {
    /// From bytes without other references.
    fn new(bytes: Bytes) -> DramBlock {
        DramBlock(Box::new(DramBlockInner { bytes, readers: Arc::new(()), shared: Cell::new(None) }))
    }

    /// Shares the bytes with a reader, without copying. Counts as shared until its last clone is
    /// dropped.
    pub(super) fn share(&self) -> Bytes {
        let DramBlockInner { bytes, readers: mark, shared: lent } = &*self.0;
        let new = || Bytes::from_owner(ReaderBytes { bytes: bytes.clone(), _mark: Arc::clone(mark) });
        let own = lent.take().unwrap_or_else(new);
        let copy = own.clone();
        lent.set(Some(own));
        copy
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.0.bytes.len()
    }

    /// The bytes, if no reader holds them.
    fn unshared(&self) -> Option<&Bytes> {
        // Drop our own reference first; the next reader gets a new one.
        self.0.shared.take();
        (Arc::strong_count(&self.0.readers) == 1).then_some(&self.0.bytes)
    }
}

impl Store {
    /// Stores a block's bytes, which must have no other references.
    pub(super) fn store_dram(&mut self, key: BlockKey, bytes: Bytes) {
        self.parts.arena.set_owner(&bytes, key.0);
        self.locations_mut(key).dram = Some(DramBlock::new(bytes));
    }

    /// Empties slabs while too few are empty. Does a bounded amount; the next call continues.
    pub(super) fn compact(&mut self) {
        let mut moved_bytes = 0;
        loop {
            let rows = &self.locations;
            let unread = |owner: u32| rows.get(owner as usize)?.dram.as_ref()?.unshared();
            let Some(owners) = self.parts.arena.start_vacating(unread) else { return };
            for owner in owners {
                if moved_bytes >= COMPACT_BYTES_MAX {
                    return;
                }
                let Some(held) = self.locations.get_mut(owner as usize).and_then(|row| row.dram.as_mut())
                else {
                    continue;
                };
                let Some(moved) = held.unshared().and_then(|bytes| self.parts.arena.copy_elsewhere(bytes))
                else {
                    // No free slot; saves may have taken it meanwhile.
                    return self.parts.arena.cancel_vacating();
                };
                moved_bytes += moved.len();
                *held = DramBlock::new(moved);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_shared_until_the_last_copy_is_dropped() {
        let held = DramBlock::new(Bytes::from_static(b"block"));
        assert!(held.unshared().is_some());
        let (first, second) = (held.share(), held.share());
        let copy = second.clone();
        drop((first, second));
        assert!(held.unshared().is_none(), "one clone is still held");
        let later = held.share();
        drop(copy);
        assert!(held.unshared().is_none(), "bytes shared later are still held");
        assert_eq!(&later[..], b"block");
        drop(later);
        assert!(held.unshared().is_some());
    }
}
