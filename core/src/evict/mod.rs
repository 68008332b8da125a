//! Which block leaves a tier next: the policy trait. One file per policy beside this one.
//!
//! A policy sees keys, times and categories. It never sees locks, I/O, what blocks hold or metrics, and it does
//! not decide *when* to evict (that is [`crate::tier`]).

mod ahead;
pub mod arc;
mod bands;
pub mod density;
mod departed;
pub mod fifo;
pub mod gdsf;
mod heads;
pub mod lfu;
pub mod lru;
pub(crate) mod queue;
mod ranked;
pub mod reuse_prob;
pub mod s3fifo;
mod sketch;
pub mod statistics;
pub mod tinylfu;
pub mod workload;

#[cfg(test)]
mod suite;

use crate::id::{Category, Timestamp};
use statistics::Statistics;

/// Dense number of a resident block, given by the tier book: small, reused after removal, so that a
/// policy can keep its links in plain vectors. The two largest numbers are not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub u32);

/// What a policy may know about a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockTraits {
    /// Request type and turn of the request that touched it last.
    pub category: Category,
    /// Position of the block in its prefix, in blocks.
    pub offset_blocks: u32,
    /// Stored size in bytes.
    pub bytes: u32,
    /// Whether it is the last block of the request and only partly filled: no longer prompt goes through it.
    pub is_partial: bool,
    /// Equal for the same block whenever it is resident, for policies that remember what left
    /// ([`BlockHash::fingerprint`](crate::id::BlockHash::fingerprint)). Two blocks may have the same one.
    pub fingerprint: u64,
}

/// An eviction policy over the blocks resident in one tier.
///
/// Contract, held by the policy suite that every policy's tests run: `insert` and `moved_in` of a new key, `access`,
/// `settle` and `remove` of a present one (of an absent one they do nothing); `victim` names a present,
/// unspared block or nothing, does not remove it, and names the same when asked again at once, though its hand may
/// have moved on while it looked; equal calls give equal victims.
pub trait Policy: Send {
    /// Name as written on the command line and in metrics.
    fn name(&self) -> &'static str;

    /// A block became resident.
    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp);

    /// A resident block was used by a request with these traits. Called once per block and request, from
    /// the tail of the prefix to its head.
    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp);

    /// The request that brought the block ended. Called instead of `access` for the blocks it inserted, in
    /// the same order from tail to head: it gives them their place, but it is not another use.
    fn settle(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.access(key, traits, now);
    }

    /// A block became resident, and not by a use: it came from another tier, because it left that or before anybody asked
    /// for it. For a policy that learns from uses, that is none.
    fn moved_in(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp) {
        self.insert(key, traits, now);
    }

    /// Something holds the resident block from now on: until its next `insert`, `access` or `settle` it is
    /// no victim and need not be walked past. Without an implementation it stays where it is, and `spared`
    /// keeps it; then a victim costs a step per held block in front of it.
    fn park(&mut self, _key: BlockKey) {}

    /// A resident block left the tier, for whatever reason.
    fn remove(&mut self, key: BlockKey);

    /// The block that should leave next among those that `spared` does not hold (leased, pinned,
    /// moving). `None` when every block is spared.
    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey>;

    /// Whether a block of the running request that is not here is worth the room of `victim`, which was just named and
    /// would leave for it. Changes nothing. A policy that does not weigh newcomers lets all of them in.
    fn admits(&mut self, _newcomer: BlockTraits, _victim: BlockKey, _now: Timestamp) -> bool {
        true
    }

    /// A block of the request that is told is not resident: it was not let in ([`Self::admits`]), or is in another tier.
    /// Called in its place among `access` and `settle`, in the same order from tail to head: for a policy that learns from
    /// uses, this is one if it knows the block, and the next may be one.
    fn pass(&mut self, _traits: BlockTraits, _now: Timestamp) {}

    /// How likely, 0 to 1, a block that would come from another tier is used before it would leave this one again: 0 if
    /// it is worth less than `victim`, which was just named and would leave for it. Without a victim there is room, and
    /// nobody leaves.
    /// Changes nothing. A policy that does not know takes everybody for certain to be used.
    fn prospect(&mut self, _mover: BlockTraits, _victim: Option<BlockKey>, _now: Timestamp) -> f64 {
        1.0
    }

    /// The same of a resident block that stays until the policy names it.
    fn prospect_of(&mut self, _resident: BlockKey, _now: Timestamp) -> f64 {
        1.0
    }

    /// Background work: refit curves, age counters. Called about once a second.
    fn refit(&mut self, _now: Timestamp) {}

    /// What was seen of each category, for the fleet: own observations only, none that it was told of. Nothing from a
    /// policy that does not learn.
    fn statistics(&mut self, _now: Timestamp) -> Statistics {
        Statistics::default()
    }

    /// What the whole fleet saw, in place of what was said before: it stands in for own observations, which prevail as
    /// they come ([`statistics::TOLD_REQUESTS`]). A policy that does not learn has no use for it.
    fn inform(&mut self, _fleet: &Statistics, _now: Timestamp) {}

    /// Number of resident blocks.
    fn len(&self) -> usize;

    /// Whether no block is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The names [`by_name`] knows, in the order they are listed to a person.
pub const NAMES: [&str; 12] = [
    "fifo",
    "lru",
    "lfu",
    "s3fifo",
    "gdsf",
    "arc",
    "tinylfu",
    "workload",
    "workload-share",
    "workload-posterior",
    "workload-aged",
    "density",
];

/// The policies of others, to be compared with.
pub const BASELINES: [&str; 7] = ["fifo", "lru", "lfu", "s3fifo", "gdsf", "arc", "tinylfu"];

/// The policy of a node that is told nothing else: at 5 % of the blocks and more never clearly
/// below the best of [`BASELINES`] (`docs/POLICIES.md`).
pub const DEFAULT: &str = "density";

/// A fresh policy with this name, or nothing when no policy has it. `seed` feeds the policies that draw;
/// none of the present ones does.
#[must_use]
pub fn by_name(name: &str, _seed: u64) -> Option<Box<dyn Policy>> {
    Some(match name {
        "fifo" => Box::new(fifo::Fifo::new()),
        "lru" => Box::new(lru::Lru::new()),
        "lfu" => Box::new(lfu::Lfu::new()),
        "s3fifo" => Box::new(s3fifo::S3Fifo::new()),
        "gdsf" => Box::new(gdsf::Gdsf::new()),
        "arc" => Box::new(arc::Arc::new()),
        "tinylfu" => Box::new(tinylfu::TinyLfu::new()),
        "density" => Box::new(density::Density::new()),
        _ => return Some(Box::new(workload::Workload::by_name(name)?)),
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
        assert!(by_name("LRU", 0).is_none());
        assert!(BASELINES.iter().chain([&DEFAULT]).all(|name| NAMES.contains(name)));
    }
}
