//! The map from block to holders: one open-addressing table, one probe per block.
//!
//! Holds that no longer count stay behind until the sweep passes them, a bounded number of places per
//! command; readers skip them, so nobody can tell. Not here: what counts (`nodes.rs`) and the order
//! in which blocks are written down (`snapshot.rs`): the order of this table means nothing.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::holders::{Held, Holders, TierSet};
use crate::id::BlockHash;

/// Odd multiplier that spreads what two halves of a hash have in common (2^64 over the golden ratio).
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Where a hash starts its probe. Block hashes are uniform already; the multiplication only guards
/// against hashes made up by hand (counters in tests), and the table needs no seed: two replicas may
/// order their blocks differently without anyone noticing.
fn probe_start(hash: BlockHash) -> u64 {
    let whole = u128::from_le_bytes(hash.0);
    let folded = (whole as u64) ^ ((whole >> 64) as u64).rotate_left(32);
    let product = u128::from(folded) * u128::from(SPREAD);
    (product as u64) ^ (product >> 64) as u64
}

#[derive(Clone, Debug)]
struct Indexed {
    hash: BlockHash,
    holders: Holders,
}

/// Tiers of one hold before and after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Changed {
    pub(super) before: TierSet,
    pub(super) after: TierSet,
}

/// What a change does to the tiers of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiers {
    pub(super) gone: TierSet,
    pub(super) added: TierSet,
    /// Whether a copy that was not there may be added.
    pub(super) may_list: bool,
}

/// Blocks and their holders, with the holds that are only waiting for the sweep.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockTable {
    table: HashTable<Indexed>,
    /// Holds in the table, stale ones included.
    holds: u64,
    /// Next place the sweep looks at.
    sweep_at: usize,
}

impl BlockTable {
    /// Holds in the table, stale ones included.
    pub(super) fn holds(&self) -> u64 {
        self.holds
    }

    /// Blocks in the table, those with only stale holds included.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Makes room for this many more blocks.
    pub(super) fn reserve(&mut self, blocks: usize) {
        self.table.reserve(blocks, |block| probe_start(block.hash));
    }

    /// Holds on a block, stale ones included.
    pub(super) fn find(&self, hash: BlockHash) -> Option<&[Held]> {
        let block = self.table.find(probe_start(hash), |block| block.hash == hash)?;
        Some(block.holders.as_slice())
    }

    /// Every block with its holds, stale ones included, in no meaningful order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (BlockHash, &[Held])> {
        self.table.iter().map(|block| (block.hash, block.holders.as_slice()))
    }

    /// Takes tiers from the hold of `slot` on a block and adds others. Stale holds on the block go on the
    /// way. Nothing when the block would have to be listed and may not.
    pub(super) fn change(
        &mut self,
        hash: BlockHash,
        slot: u16,
        Tiers { gone, added, may_list }: Tiers,
        incarnations: &[u32],
    ) -> Option<Changed> {
        let &incarnation = incarnations.get(usize::from(slot))?;
        let spot =
            self.table.entry(probe_start(hash), |block| block.hash == hash, |block| probe_start(block.hash));
        let mut spot = match spot {
            Entry::Vacant(spot) => {
                let after = added;
                if !after.is_empty() {
                    if !may_list {
                        return None;
                    }
                    let held = Held { incarnation, slot, tiers: after };
                    spot.insert(Indexed { hash, holders: Holders::One(held) });
                    self.holds += 1;
                }
                return Some(Changed { before: TierSet::NONE, after });
            }
            Entry::Occupied(spot) => spot,
        };
        let holders = &mut spot.get_mut().holders;
        self.holds -= holders.as_slice().len() as u64;
        holders.retain(|held| held.is_current(incarnations));
        let before = holders.tiers(slot);
        let is_refused = before.is_empty() && !added.is_empty() && !may_list;
        let after = if is_refused { before } else { before.changed(gone, added) };
        holders.put(Held { incarnation, slot, tiers: after });
        let left = holders.as_slice().len() as u64;
        self.holds += left;
        if left == 0 {
            spot.remove();
        }
        (!is_refused).then_some(Changed { before, after })
    }

    /// Frees stale holds in the next `places` places of the table.
    pub(super) fn sweep(&mut self, places: usize, incarnations: &[u32]) {
        let all = self.table.num_buckets();
        for _ in 0..places.min(all) {
            if self.sweep_at >= all {
                self.sweep_at = 0;
            }
            if let Ok(mut spot) = self.table.get_bucket_entry(self.sweep_at) {
                let holders = &mut spot.get_mut().holders;
                self.holds -= holders.retain(|held| held.is_current(incarnations)) as u64;
                if holders.as_slice().is_empty() {
                    spot.remove();
                }
            }
            self.sweep_at += 1;
        }
    }

    /// Frees every hold of a slot, stale or not: needed once in 2^32 incarnations of the slot.
    pub(super) fn forget_slot(&mut self, slot: u16) {
        let holds = &mut self.holds;
        self.table.retain(|block| {
            *holds -= block.holders.retain(|held| held.slot != slot) as u64;
            !block.holders.as_slice().is_empty()
        });
    }
}
