//! The ordered list of ownership changes for the index, with neighbours merged into runs.
//!
//! Not here: when and to whom they are sent (`kvfleet-node`'s announce).

use std::collections::BTreeMap;

use crate::id::{BlockHash, Tier};
use crate::index::command::{Change, DropCause};

/// Collects changes in order. Only the newest one grows, so the order of events is kept.
#[derive(Debug, Default)]
pub struct ChangeLog {
    changes: Vec<Change>,
}

impl ChangeLog {
    /// A block became readable.
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

    /// A block went to another tier.
    pub fn moved(&mut self, block: BlockHash, from: Tier, to: Tier) {
        if let Some(Change::Moved { blocks, from: last_from, to: last_to }) = self.changes.last_mut()
            && (*last_from, *last_to) == (from, to)
        {
            blocks.push(block);
            return;
        }
        self.changes.push(Change::Moved { blocks: vec![block], from, to });
    }

    /// A block's copy is gone.
    pub fn dropped(&mut self, block: BlockHash, tier: Tier, cause: DropCause) {
        if let Some(Change::Dropped { blocks, tier: last_tier, cause: last_cause }) = self.changes.last_mut()
            && (*last_tier, *last_cause) == (tier, cause)
        {
            blocks.push(block);
            return;
        }
        self.changes.push(Change::Dropped { blocks: vec![block], tier, cause });
    }

    /// Whether nothing was collected since the last [`Self::take`].
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Hands out what was collected.
    pub fn take(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }
}

/// One readable block, for a full announcement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    pub(super) hash: BlockHash,
    pub(super) parent: Option<BlockHash>,
    pub(super) offset_blocks: u32,
    pub(super) tier: Tier,
}

/// Everything held as `Stored` runs, parents before children, in an order that depends on the blocks alone.
pub(super) fn full(mut standing: Vec<Standing>) -> Vec<Change> {
    standing.sort_unstable_by_key(|block| (block.offset_blocks, block.hash));
    let mut children: BTreeMap<(BlockHash, Tier), Vec<usize>> = BTreeMap::new();
    for (position, block) in standing.iter().enumerate() {
        if let Some(parent) = block.parent {
            children.entry((parent, block.tier)).or_default().push(position);
        }
    }
    let mut log = ChangeLog::default();
    let mut told = vec![false; standing.len()];
    for start in 0..standing.len() {
        let mut next = Some(start);
        while let Some(position) = next {
            if told[position] {
                break;
            }
            told[position] = true;
            let block = standing[position];
            log.stored(block.parent, block.hash, block.tier);
            next = children
                .get(&(block.hash, block.tier))
                .and_then(|all| all.iter().copied().find(|&child| !told[child]));
        }
    }
    log.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    fn standing(number: u8, parent: Option<u8>, offset_blocks: u32, tier: Tier) -> Standing {
        Standing { hash: hash(number), parent: parent.map(hash), offset_blocks, tier }
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
    fn two_roots_are_two_runs() {
        let mut log = ChangeLog::default();
        log.stored(None, hash(1), Tier::Dram);
        log.stored(None, hash(2), Tier::Dram);
        assert_eq!(log.take().len(), 2);
    }

    #[test]
    fn an_event_between_keeps_the_order() {
        let mut log = ChangeLog::default();
        log.dropped(hash(1), Tier::Ssd, DropCause::Room);
        log.stored(None, hash(1), Tier::Ssd);
        log.dropped(hash(1), Tier::Ssd, DropCause::Room);
        log.moved(hash(2), Tier::Dram, Tier::Ssd);
        log.moved(hash(3), Tier::Dram, Tier::Ssd);
        log.moved(hash(3), Tier::Ssd, Tier::Dram);
        assert_eq!(log.take().len(), 5);
    }

    #[test]
    fn full_announcement_runs_down_each_branch_once() {
        let all = vec![
            standing(4, Some(2), 2, Tier::Dram),
            standing(3, Some(2), 2, Tier::Dram),
            standing(2, Some(1), 1, Tier::Dram),
            standing(1, None, 0, Tier::Dram),
            standing(9, Some(8), 5, Tier::Ssd),
        ];
        let changes = full(all);
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
    fn a_loop_in_claimed_parents_ends() {
        let all = vec![standing(1, Some(2), 0, Tier::Dram), standing(2, Some(1), 1, Tier::Dram)];
        let told: usize = full(all)
            .iter()
            .map(|change| match change {
                Change::Stored { blocks, .. } => blocks.len(),
                _ => 0,
            })
            .sum();
        assert_eq!(told, 2);
    }
}
