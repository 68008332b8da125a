//! Which block leaves a tier next: the policy trait. One file per policy beside this one.
//!
//! A policy sees keys, times and categories. It never sees locks, I/O, bytes or metrics, and it does
//! not decide *when* to evict (that is [`crate::tier`]).

use crate::id::{Category, Timestamp};

/// Dense number of a resident block, given by the tier book: small, reused after removal, so that a
/// policy can keep its links in plain vectors.
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
}

/// An eviction policy over the blocks resident in one tier.
///
/// Contract, held by `tests::policy_suite`: `insert` of a new key, `access` and `remove` of a present
/// one; `victim` names a present, unspared block or nothing, and does not remove it.
pub trait Policy: Send {
    /// Name as written on the command line and in metrics.
    fn name(&self) -> &'static str;

    /// A block became resident.
    fn insert(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp);

    /// A resident block was used by a request with these traits.
    fn access(&mut self, key: BlockKey, traits: BlockTraits, now: Timestamp);

    /// A resident block left the tier, for whatever reason.
    fn remove(&mut self, key: BlockKey);

    /// The block that should leave next among those that `spared` does not hold (leased, pinned,
    /// moving). `None` when every block is spared.
    fn victim(&mut self, now: Timestamp, spared: &dyn Fn(BlockKey) -> bool) -> Option<BlockKey>;

    /// Background work: refit curves, age counters. Called about once a second.
    fn refit(&mut self, _now: Timestamp) {}

    /// Number of resident blocks.
    fn len(&self) -> usize;

    /// Whether no block is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
