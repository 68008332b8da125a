//! Times to live: drops a group's blocks that stayed unused too long, even if there is free space
//! (Kareto).
//!
//! A block's group is part of its hash (`BlockHash::group`), so it needs no trust and no storage.
//! The time counts from the end of the last request that used the block; a start of the node counts
//! as a use. Held blocks and blocks in the window stay. Not here: the choice and distribution of
//! the times (a directive).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::book::Book;
use super::counters::RemovalReason;
use crate::evict::BlockKey;
use crate::id::{Timestamp, TtlGroupId};
use crate::index::command::DropCause;

/// Blocks dropped in one call at most: less than a millisecond of the task that owns the book,
/// called every 20 ms.
pub const EXPIRED_BLOCKS_MAX: usize = 1024;

/// Time to live of one group, and its blocks that may expire.
#[derive(Debug)]
struct TtlGroup {
    span: Duration,
    /// By the end of the last use.
    blocks: BTreeSet<(Timestamp, BlockKey)>,
}

/// All groups with a time to live.
#[derive(Debug, Default)]
pub(super) struct TtlIndex {
    groups: BTreeMap<TtlGroupId, TtlGroup>,
    /// Group at which the next call begins, so that one large group does not starve the others.
    next: TtlGroupId,
}

impl TtlIndex {
    /// Lists a block, if its group has a time to live.
    pub(super) fn insert(&mut self, group: TtlGroupId, last_use: Option<Timestamp>, key: BlockKey) {
        if let (Some(row), Some(last_use)) = (self.groups.get_mut(&group), last_use) {
            row.blocks.insert((last_use, key));
        }
    }

    pub(super) fn remove(&mut self, group: TtlGroupId, last_use: Option<Timestamp>, key: BlockKey) {
        if let (Some(row), Some(last_use)) = (self.groups.get_mut(&group), last_use) {
            row.blocks.remove(&(last_use, key));
        }
    }

    /// Whether the group has a time to live.
    pub(super) fn has(&self, group: TtlGroupId) -> bool {
        self.groups.contains_key(&group)
    }

    /// All listed blocks of a group.
    #[cfg(test)]
    pub(super) fn listed(&self, group: TtlGroupId) -> Vec<(Timestamp, BlockKey)> {
        self.groups.get(&group).map(|row| row.blocks.iter().copied().collect()).unwrap_or_default()
    }

    /// The longest unused expired block of the first such group, starting at `from`.
    fn overdue(&self, from: TtlGroupId, now: Timestamp) -> Option<(TtlGroupId, BlockKey)> {
        self.groups.range(from..).find_map(|(group, row)| {
            let (last_use, key) = row.blocks.first()?;
            // A clock that was set back makes blocks younger, never older.
            (now.0 >= last_use.after(row.span).0).then_some((*group, *key))
        })
    }
}

impl Book {
    /// Replaces the times to live. [`Self::expire_blocks`] drops the expired blocks.
    pub fn set_ttls(&mut self, ttls: impl IntoIterator<Item = (TtlGroupId, Duration)>) {
        let before = std::mem::take(&mut self.ttls.groups);
        let mut before: BTreeMap<TtlGroupId, TtlGroup> = before.into_iter().collect();
        let mut is_fresh = false;
        for (group, span) in ttls {
            let known = before.remove(&group).map(|row| row.blocks);
            is_fresh |= known.is_none();
            self.ttls.groups.insert(group, TtlGroup { span, blocks: known.unwrap_or_default() });
        }
        if is_fresh {
            self.relist();
        }
    }

    /// Number of groups with a time to live.
    #[must_use]
    pub fn ttl_groups(&self) -> usize {
        self.ttls.groups.len()
    }

    /// Drops expired blocks, at most [`EXPIRED_BLOCKS_MAX`]. Returns the number of blocks dropped.
    pub fn expire_blocks(&mut self, now: Timestamp) -> usize {
        // A block that is about to be marked as pinned may not be dropped.
        if self.pins.has_pending_begins() {
            return 0;
        }
        let mut dropped = 0;
        let mut from = self.ttls.next;
        let mut has_wrapped = false;
        while dropped < EXPIRED_BLOCKS_MAX {
            match self.ttls.overdue(from, now) {
                Some((group, key)) => {
                    from = group;
                    self.expire_block(key);
                    dropped += 1;
                }
                None if has_wrapped => break,
                None => (from, has_wrapped) = (TtlGroupId(0), true),
            }
        }
        self.ttls.next = TtlGroupId(from.0.wrapping_add(1));
        dropped
    }

    fn expire_block(&mut self, key: BlockKey) {
        if let Some(tier) = self.slab.get(key).and_then(|entry| entry.assigned_tier) {
            self.tier_state_mut(tier).stats.expired_blocks += 1;
        }
        self.count_removal(key, RemovalReason::Ttl);
        self.drop_block(key, DropCause::Ttl);
    }
}
