//! Times to live: blocks of a group that were not used for long leave, whether room is wanted or not (Kareto).
//!
//! A block's group is in its hash (`BlockHash::group`), so nobody has to be believed and nothing kept for it. The time
//! counts from the end of the last request that used the block; a start of the node counts as a use. What is held stays,
//! and so does what a waiting request needs. Not here: which group has which time (a directive), and how it is chosen.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::book::Book;
use super::numbers::Left;
use crate::evict::BlockKey;
use crate::id::{GroupId, Timestamp};
use crate::index::command::DropCause;

/// Blocks dropped in one call at most: less than a millisecond of the task that owns the book. Called every 20 ms, that is
/// 51,200 blocks a second.
pub const EXPIRED_BLOCKS_MAX: usize = 1024;

/// The blocks of one group that may go, and when they may.
#[derive(Debug)]
struct Row {
    span: Duration,
    /// By the end of the last use.
    blocks: BTreeSet<(Timestamp, BlockKey)>,
}

/// The rows of all groups with a time to live.
#[derive(Debug, Default)]
pub(super) struct TtlRows {
    rows: BTreeMap<GroupId, Row>,
    /// The group to begin with at the next call: one with much to drop must not keep the others waiting.
    next: GroupId,
}

impl TtlRows {
    /// Lists a block, if its group has a time to live.
    pub(super) fn insert(&mut self, group: GroupId, last_use: Option<Timestamp>, key: BlockKey) {
        if let (Some(row), Some(last_use)) = (self.rows.get_mut(&group), last_use) {
            row.blocks.insert((last_use, key));
        }
    }

    pub(super) fn remove(&mut self, group: GroupId, last_use: Option<Timestamp>, key: BlockKey) {
        if let (Some(row), Some(last_use)) = (self.rows.get_mut(&group), last_use) {
            row.blocks.remove(&(last_use, key));
        }
    }

    /// Whether the group has a time to live.
    pub(super) fn has(&self, group: GroupId) -> bool {
        self.rows.contains_key(&group)
    }

    /// What is listed of a group.
    #[cfg(test)]
    pub(super) fn listed(&self, group: GroupId) -> Vec<(Timestamp, BlockKey)> {
        self.rows.get(&group).map(|row| row.blocks.iter().copied().collect()).unwrap_or_default()
    }

    /// The longest unused block whose time is over, of the first group from `from` on that has one.
    fn overdue(&self, from: GroupId, now: Timestamp) -> Option<(GroupId, BlockKey)> {
        self.rows.range(from..).find_map(|(group, row)| {
            let (last_use, key) = row.blocks.first()?;
            // A clock that was set back makes blocks younger, never older.
            (now.0 >= last_use.after(row.span).0).then_some((*group, *key))
        })
    }
}

impl Book {
    /// Replaces the times to live. What is over is dropped by [`Self::expire_blocks`].
    pub fn set_ttls(&mut self, ttls: impl IntoIterator<Item = (GroupId, Duration)>) {
        let before = std::mem::take(&mut self.ttls.rows);
        let mut before: BTreeMap<GroupId, Row> = before.into_iter().collect();
        let mut is_fresh = false;
        for (group, span) in ttls {
            let known = before.remove(&group).map(|row| row.blocks);
            is_fresh |= known.is_none();
            self.ttls.rows.insert(group, Row { span, blocks: known.unwrap_or_default() });
        }
        if is_fresh {
            self.relist();
        }
    }

    /// Groups with a time to live.
    #[must_use]
    pub fn ttl_groups(&self) -> usize {
        self.ttls.rows.len()
    }

    /// Drops blocks whose group's time is over, at most [`EXPIRED_BLOCKS_MAX`] of them. Returns how many.
    pub fn expire_blocks(&mut self, now: Timestamp) -> usize {
        // What is yet to be marked as pinned may not go.
        if self.pins.is_beginning() {
            return 0;
        }
        let mut dropped = 0;
        let mut from = self.ttls.next;
        let mut is_second_turn = false;
        while dropped < EXPIRED_BLOCKS_MAX {
            match self.ttls.overdue(from, now) {
                Some((group, key)) => {
                    from = group;
                    self.expire_block(key);
                    dropped += 1;
                }
                None if is_second_turn => break,
                None => (from, is_second_turn) = (GroupId(0), true),
            }
        }
        self.ttls.next = GroupId(from.0.wrapping_add(1));
        dropped
    }

    fn expire_block(&mut self, key: BlockKey) {
        if let Some(tier) = self.slab.get(key).and_then(|entry| entry.place) {
            self.shelf_mut(tier).stats.expired_blocks += 1;
        }
        self.count_left(key, Left::Ttl);
        self.drop_block(key, DropCause::Ttl);
    }
}
