//! Frames move together in DRAM, so that no size class keeps slabs half empty that another one needs.
//!
//! Only what the book cannot see is done here: where in the arena a block's bytes lie. Readers of bytes that moved keep
//! those they have. Not here: which slab is emptied (`arena`), and which block gives way (`kv_core::tier`).

use bytes::Bytes;
use kv_core::evict::BlockKey;

use super::Store;

/// Bytes that are moved at once, at least one slab's: some milliseconds of copying, during which nobody is answered.
const PACK_BYTES_MAX: usize = 8 << 20;

impl Store {
    /// Keeps a block's bytes, in a slab that may stay.
    pub(super) fn keep(&mut self, key: BlockKey, bytes: Bytes) {
        let leaves = self.parts.arena.set_owner(&bytes, key.0);
        let bytes = if leaves { self.moved(&bytes).unwrap_or(bytes) } else { bytes };
        self.row(key).dram = Some(bytes);
    }

    /// Empties slabs while there are too few empty ones.
    pub(super) fn pack(&mut self) {
        let mut moved_bytes = 0;
        while moved_bytes < PACK_BYTES_MAX
            && let Some(owners) = self.parts.arena.vacate()
        {
            for key in owners.into_iter().map(BlockKey) {
                // Bytes that a key had before, and that readers still hold, name it too.
                let Some(bytes) =
                    self.row(key).dram.clone().filter(|bytes| self.parts.arena.is_leaving(bytes))
                else {
                    continue;
                };
                let Some(moved) = self.moved(&bytes) else { return };
                moved_bytes += moved.len();
                self.row(key).dram = Some(moved);
            }
        }
    }

    /// A copy in another slab. Without a slot for it, which saves may have taken meanwhile, the whole slab stays.
    fn moved(&self, bytes: &Bytes) -> Option<Bytes> {
        let moved = self.parts.arena.moved(bytes);
        if moved.is_none() {
            self.parts.arena.stay(bytes);
        }
        moved
    }
}
