//! The ordered list of ownership changes for the index, with consecutive blocks merged into runs.
//!
//! Not here: the time and receiver of announcements (`kvfleet-node`'s announce).

use std::collections::BTreeMap;

use crate::id::{BlockHash, Tier};
use crate::index::command::{Change, DropCause};

/// Collects changes in order. Only the last run grows, so the order of events is kept.
#[derive(Debug, Default)]
pub struct ChangeLog {
    changes: Vec<Change>,
}

impl ChangeLog {
    /// Records that a block became readable.
    pub fn stored(&mut self, parent: Option<BlockHash>, block: BlockHash, tier: Tier) {
        if let Some(Change::Stored { blocks, tier: last_tier, .. }) = self.changes.last_mut()
            && *last_tier == tier
            && parent.is_some()
            && blocks.last().copied() == parent
        {
            blocks.push(block);
            return;
        }
        self.changes.push(Change::Stored { parent, blocks: vec![block], tier });
    }

    /// Records that a block moved to another tier.
    pub fn moved(&mut self, block: BlockHash, from: Tier, to: Tier) {
        if let Some(Change::Moved { blocks, from: last_from, to: last_to }) = self.changes.last_mut()
            && (*last_from, *last_to) == (from, to)
        {
            blocks.push(block);
            return;
        }
        self.changes.push(Change::Moved { blocks: vec![block], from, to });
    }

    /// Records that a block's copy is gone.
    pub fn dropped(&mut self, block: BlockHash, tier: Tier, cause: DropCause) {
        if let Some(Change::Dropped { blocks, tier: last_tier, cause: last_cause }) = self.changes.last_mut()
            && (*last_tier, *last_cause) == (tier, cause)
        {
            blocks.push(block);
            return;
        }
        self.changes.push(Change::Dropped { blocks: vec![block], tier, cause });
    }

    /// Whether no change was recorded since the last [`Self::take`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Takes the recorded changes.
    pub fn take(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }
}

/// One readable block, for a full announcement.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadableBlock {
    pub(super) hash: BlockHash,
    pub(super) parent: Option<BlockHash>,
    pub(super) offset_blocks: u32,
    pub(super) tier: Tier,
}

/// All blocks as `Stored` runs, parents before children. The order depends on the blocks alone.
pub(super) fn full_announcement(mut blocks: Vec<ReadableBlock>) -> Vec<Change> {
    blocks.sort_unstable_by_key(|block| (block.offset_blocks, block.hash));
    let mut children: BTreeMap<(BlockHash, Tier), Vec<usize>> = BTreeMap::new();
    for (position, block) in blocks.iter().enumerate() {
        if let Some(parent) = block.parent {
            children.entry((parent, block.tier)).or_default().push(position);
        }
    }
    let mut log = ChangeLog::default();
    let mut emitted = vec![false; blocks.len()];
    for start in 0..blocks.len() {
        let mut next = Some(start);
        while let Some(position) = next {
            if emitted[position] {
                break;
            }
            emitted[position] = true;
            let block = blocks[position];
            log.stored(block.parent, block.hash, block.tier);
            next = children
                .get(&(block.hash, block.tier))
                .and_then(|all| all.iter().copied().find(|&child| !emitted[child]));
        }
    }
    log.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; _])
    }

    fn readable(number: u8, parent: Option<u8>, offset_blocks: u32, tier: Tier) -> ReadableBlock {
        ReadableBlock { hash: hash(number), parent: parent.map(hash), offset_blocks, tier }
    }

    #[test]
    fn a_prefix_becomes_one_run() {
        let mut log = ChangeLog::default();
        log.stored(None, hash(1), Tier::Dram);
        log.stored(Some(hash(1)), hash(2), Tier::Dram);
        log.stored(Some(hash(2)), hash(3), Tier::Dram);
        let expected =
            Change::Stored { parent: None, blocks: vec![hash(1), hash(2), hash(3)], tier: Tier::Dram };
        assert_eq!(log.take(), vec![expected]);
        assert!(log.is_empty());
    }

    #[test]
    fn two_roots_make_two_runs() {
        let mut log = ChangeLog::default();
        log.stored(None, hash(1), Tier::Dram);
        log.stored(None, hash(2), Tier::Dram);
        assert_eq!(log.take().len(), 2);
    }

    #[test]
    fn interleaved_events_keep_their_order() {
        let mut log = ChangeLog::default();
        log.dropped(hash(1), Tier::Ssd, DropCause::Capacity);
        log.stored(None, hash(1), Tier::Ssd);
        log.dropped(hash(1), Tier::Ssd, DropCause::Capacity);
        log.moved(hash(2), Tier::Dram, Tier::Ssd);
        log.moved(hash(3), Tier::Dram, Tier::Ssd);
        log.moved(hash(3), Tier::Ssd, Tier::Dram);
        assert_eq!(log.take().len(), 5);
    }

    #[test]
    fn full_announcement_lists_each_branch_once() {
        let all = vec![
            readable(4, Some(2), 2, Tier::Dram),
            readable(3, Some(2), 2, Tier::Dram),
            readable(2, Some(1), 1, Tier::Dram),
            readable(1, None, 0, Tier::Dram),
            readable(9, Some(8), 5, Tier::Ssd),
        ];
        let changes = full_announcement(all);
        assert_eq!(
            changes,
            vec![
                Change::Stored { parent: None, blocks: vec![hash(1), hash(2), hash(3)], tier: Tier::Dram },
                Change::Stored { parent: Some(hash(2)), blocks: vec![hash(4)], tier: Tier::Dram },
                Change::Stored { parent: Some(hash(8)), blocks: vec![hash(9)], tier: Tier::Ssd },
            ]
        );
    }

    #[test]
    fn full_announcement_ends_on_a_parent_cycle() {
        let all = vec![readable(1, Some(2), 0, Tier::Dram), readable(2, Some(1), 1, Tier::Dram)];
        let emitted: usize = full_announcement(all)
            .iter()
            .map(|change| match change {
                Change::Stored { blocks, .. } => blocks.len(),
                _ => 0,
            })
            .sum();
        assert_eq!(emitted, 2);
    }
}
