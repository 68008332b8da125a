//! Eviction: the policy trait that chooses which block leaves a tier next. One file per policy.
//!
//! A policy sees keys, times and categories. It never sees locks, I/O, block contents or metrics.
//! Not here: *when* to evict (that is [`crate::tier`]), and policies that are only compared with
//! these (`lab/src/evict/`).

mod bands;
pub mod density;
mod heads;
pub mod lru;
mod prefetch_hints;
pub mod queue;
pub mod reuse_prob;
pub mod reuse_stats;
pub mod suite;
pub mod workload;

use crate::id::{Category, Timestamp};
use reuse_stats::ReuseStats;

/// Dense number of a resident block, assigned by the tier: small and reused after removal, so that
/// a policy can index plain vectors. The two largest numbers are reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub u32);

/// Properties of a block that a policy may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockTraits {
    /// Request type and turn of the request that touched it last.
    pub category: Category,
    /// Position of the block in its prefix, in blocks.
    pub offset_blocks: u32,
    /// Stored size in bytes.
    pub bytes: u32,
    /// Whether it is the last, partly filled block of the request: no longer prompt continues
    /// through it.
    pub is_partial: bool,
    /// Stable identity of the block across evictions, for policies with ghosts
    /// ([`BlockHash::fingerprint`](crate::id::BlockHash::fingerprint)). Two blocks may share one.
    pub fingerprint: u64,
}

/// An eviction policy over the blocks resident in one tier.
///
/// Contract, checked by the policy suite: `insert` and `insert_moved` take a new key; `access`,
/// `settle` and `remove` take a present one and ignore an absent one. `victim` returns a present
/// block that `spared` does not protect, and does not remove it. Asked again at once, it returns
/// the same block, though internal queues may have moved. Equal calls give equal victims.
pub trait Policy: Send {
    /// Name on the command line and in metrics.
    fn name(&self) -> &'static str;

    /// A block became resident.
    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp);

    /// A request with these traits used a resident block. Called once per block and request, from
    /// the tail of the prefix to its head.
    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp);

    /// The request that inserted the block ended. Called instead of `access` for the blocks it
    /// inserted, in the same order from tail to head. It assigns their queue position and is not
    /// another use.
    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.access(key, traits, now);
    }

    /// A block became resident without a use: it came from another tier by demotion or prefetch. A
    /// policy that learns from uses must not count it.
    fn insert_moved(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.insert(key, traits, now);
    }

    /// The resident block is now held: until its next `insert`, `access` or `settle` it is no
    /// victim. The default leaves it in its queue, where `spared` protects it; then a victim search
    /// costs a step per held block.
    fn park(&mut self, _key: BlockKey) {}

    /// A resident block left the tier, for any reason.
    fn remove(&mut self, key: BlockKey);

    /// The block to evict next among those that `spared` does not protect (leased, pinned, moving).
    /// `None` if all are protected.
    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey>;

    /// Whether an absent block of the running request is worth the space of `victim`, the block
    /// that [`Self::victim`] just returned. Changes no state. The default admits every block.
    fn admits(&mut self, _newcomer: BlockTraits, _victim: BlockKey, _now: Timestamp) -> bool {
        true
    }

    /// A block of the current request is not resident: it was not admitted ([`Self::admits`]) or is
    /// in another tier. Called among `access` and `settle`, in the same order from tail to head. A
    /// policy that learns counts it as a use if it remembers the block.
    fn note_absent(&mut self, _traits: BlockTraits, _now: Timestamp) {}

    /// Probability, 0 to 1, that a block moved in from another tier is used before it leaves again.
    /// 0 if it is worth less than `victim`, which was just returned and would leave for it. `None`
    /// means that space is free. Changes no state. The default is 1.
    fn reuse_prob_if_moved_in(
        &mut self,
        _mover: BlockTraits,
        _victim: Option<BlockKey>,
        _now: Timestamp,
    ) -> f64 {
        1.0
    }

    /// Like [`Self::reuse_prob_if_moved_in`], for a resident block that stays until the policy
    /// evicts it.
    fn reuse_prob_if_kept(&mut self, _resident: BlockKey, _now: Timestamp) -> f64 {
        1.0
    }

    /// Background work: refits curves, ages counters. Called about once a second.
    fn refit(&mut self, _now: Timestamp) {}

    /// Reuse statistics of each category for the fleet: own observations only, without those of the
    /// fleet. Empty for a policy that does not learn.
    fn reuse_stats(&mut self, _now: Timestamp) -> ReuseStats {
        ReuseStats::default()
    }

    /// Replaces the reuse statistics of the whole fleet. They stand in for own observations, which
    /// outweigh them as they accumulate ([`reuse_stats::FLEET_REQUESTS_MAX`]). Ignored by a policy
    /// that does not learn.
    fn set_fleet_stats(&mut self, _fleet: &ReuseStats, _now: Timestamp) {}

    /// Number of resident blocks, parked ones included.
    fn len(&self) -> usize;

    /// Whether no block is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The policies that a node can run, in display order.
pub const NAMES: [&str; 3] = ["lru", "workload", "density"];

/// What to do about a name that is not in [`NAMES`].
pub const UNKNOWN_NAME_REMEDY: &str =
    "choose one of lru, workload, density; baselines for comparison are in kvfleet-lab only";

/// The default policy of a node. Not clearly below the best baseline of the literature from 5 % of
/// the blocks on (`docs/measurements/policies.md`).
pub const DEFAULT: &str = "density";

/// A new policy with this name; `None` for a name that is not in [`NAMES`]. `seed` is for
/// randomised policies; no present one uses it.
#[must_use]
pub fn by_name(name: &str, _seed: u64) -> Option<Box<dyn Policy>> {
    Some(match name {
        "lru" => Box::new(lru::Lru::new()),
        "workload" => Box::new(workload::Workload::new()),
        "density" => Box::new(density::Density::new()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gives_the_policy_of_that_name() {
        for name in NAMES {
            assert_eq!(by_name(name, 0).map(|policy| policy.name()), Some(name));
        }
        for unknown in ["LRU", "arc", "tinylfu", "workload-share"] {
            assert!(by_name(unknown, 0).is_none(), "{unknown}");
        }
        assert!(NAMES.contains(&DEFAULT) && UNKNOWN_NAME_REMEDY.contains(&NAMES.join(", ")));
    }
}
