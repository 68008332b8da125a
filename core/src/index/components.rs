//! Prefixes of models with layers that need different parts of the past.
//!
//! A hybrid model has component groups, each with its own hashes for the same prompt. Full and
//! latent attention need every block of the prefix, a sliding window the last few, a recurrent
//! layer only the final state. A node can resume a prompt after n blocks if it holds what each
//! component needs of n blocks. Not here: which groups a model has (its identity manifest says so),
//! and prefixes that several nodes hold together (`lookup.rs`).

use std::collections::BTreeMap;

use super::Index;
use super::store::RunPosition;
use crate::id::{BlockHash, NodeId};

/// What a component needs of a prefix of n blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Every block: full attention, and latent attention, which compresses blocks but drops none.
    Whole,
    /// The last `blocks` blocks, or all if there are fewer: a sliding window. Zero counts as one,
    /// because the block that is continued is always needed.
    Window {
        /// Blocks that the window reaches into, the partly covered one included.
        blocks: u32,
    },
    /// The last block, which carries the state after it: recurrent layers.
    Last,
}

/// The blocks of one component group of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Component<'a> {
    /// What the group needs.
    pub need: Need,
    /// Hashes of the group's blocks in prefix order.
    pub hashes: &'a [BlockHash],
}

/// Blocks `from..to` of a prompt, held by one node.
type HeldRange = (u32, u32);

impl Need {
    /// The longest prefix of at most `most` blocks that these ranges satisfy. Ranges are in prefix
    /// order and do not touch.
    fn longest_satisfied(self, ranges: &[HeldRange], most: u32) -> u32 {
        let serves = |&(from, to): &HeldRange| {
            let to = to.min(most);
            let needed = match self {
                Need::Whole => to,
                Need::Window { blocks } => blocks.max(1).min(to),
                Need::Last => 1,
            };
            (from < to && to - from >= needed).then_some(to)
        };
        ranges.iter().filter_map(serves).max().unwrap_or(0)
    }
}

impl Index {
    /// Each live node that can resume the prompt, with the most blocks it can resume after, by
    /// ascending node. Blocks of a component past the shortest component do not count. Costs one
    /// probe per run and one per block without a holder.
    #[must_use]
    pub fn resumable(&self, components: &[Component<'_>]) -> Vec<(NodeId, u32)> {
        let most = components.iter().map(|one| one.hashes.len()).min().unwrap_or(0).min(u32::MAX as usize);
        let held: Vec<_> = components.iter().map(|one| self.held_ranges(&one.hashes[..most])).collect();
        let Some(nodes) = held.first().map(|first| first.keys().copied()) else { return Vec::new() };
        let reach = |node: NodeId| {
            let mut blocks = most as u32;
            // Each component may shorten the result of another; when none does, all agree.
            loop {
                let before = blocks;
                for (component, held) in components.iter().zip(&held) {
                    let stretches = held.get(&node).map_or(&[][..], Vec::as_slice);
                    blocks = component.need.longest_satisfied(stretches, blocks);
                }
                if blocks == before {
                    return blocks;
                }
            }
        };
        nodes.map(|node| (node, reach(node))).filter(|(_, blocks)| *blocks > 0).collect()
    }

    /// Ranges of a prompt's blocks that each live node holds, in prefix order, adjacent ranges
    /// merged.
    fn held_ranges(&self, hashes: &[BlockHash]) -> BTreeMap<NodeId, Vec<HeldRange>> {
        let mut found: BTreeMap<NodeId, Vec<HeldRange>> = BTreeMap::new();
        let mut end = hashes.len() as u32;
        // From the end, because a hash covers the blocks before it in its run.
        while let Some(last) = end.checked_sub(1) {
            let Some(at) = self.store.find(hashes[last as usize]) else {
                end = last;
                continue;
            };
            let first = self.first_of_run(at, &hashes[..end as usize]);
            self.add_held_ranges(at, (first, end), &mut found);
            end = first;
        }
        for stretches in found.values_mut() {
            stretches.sort_unstable();
            stretches.dedup_by(|next, before| {
                let joins = before.1 >= next.0;
                before.1 = if joins { before.1.max(next.1) } else { before.1 };
                joins
            });
        }
        found
    }

    /// Start of the part of a prompt that lies in the same run as its last block. Goes back only
    /// over listed blocks, because a dropped block may be listed again in another run.
    fn first_of_run(&self, last: RunPosition, hashes: &[BlockHash]) -> u32 {
        let end = hashes.len() as u32;
        let most = end.min(last.offset + 1);
        let is_listed = |step: &u32| {
            let at = RunPosition { offset: last.offset - step, ..last };
            self.store.is_listed(at, hashes[(end - 1 - step) as usize])
        };
        end - (0..most).take_while(is_listed).count() as u32
    }

    fn add_held_ranges(
        &self,
        last: RunPosition,
        (from, end): HeldRange,
        found: &mut BTreeMap<NodeId, Vec<HeldRange>>,
    ) {
        // Offset of a position of the prompt in the run, less that position.
        let shift = i64::from(last.offset) + 1 - i64::from(end);
        for hold in self.store.runs.get(last.run).extents() {
            let Some(holder) = self.nodes.holder(hold) else { continue };
            let position = |offset: u16| (i64::from(offset) - shift).clamp(from.into(), end.into()) as u32;
            let (first, to) = (position(hold.from), position(hold.to));
            if first < to {
                found.entry(holder.node).or_default().push((first, to));
            }
        }
    }
}
