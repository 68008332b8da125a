//! Prefixes of models whose layers do not all need the same of the past.
//!
//! A hybrid model has component groups, each with hashes of its own for the same prompt: full attention
//! and latent attention need every block of the prefix, a sliding window the last few, a recurrent layer
//! the state at the end alone. A node can resume a prompt after n blocks when it holds what each
//! component needs of n blocks. Not here: which groups a model has (its identity manifest says), and
//! prefixes that several nodes hold together (`lookup.rs`).

use std::collections::BTreeMap;

use super::Index;
use super::store::At;
use crate::id::{BlockHash, NodeId};

/// What a component needs of a prefix of n blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Every block: full attention, and latent attention, which compresses blocks but drops none.
    Whole,
    /// The last so many blocks, or all when there are fewer: a sliding window. Zero counts as one, because
    /// the block that is continued is always needed.
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
    /// Hashes of its blocks in prefix order.
    pub hashes: &'a [BlockHash],
}

/// Blocks `from..to` of a prompt, held by one node.
type Stretch = (u32, u32);

impl Need {
    /// The most blocks, `most` or fewer, of which these stretches have what is needed. Stretches are in
    /// prefix order and do not touch.
    fn longest(self, stretches: &[Stretch], most: u32) -> u32 {
        let serves = |&(from, to): &Stretch| {
            let to = to.min(most);
            let needed = match self {
                Need::Whole => to,
                Need::Window { blocks } => blocks.max(1).min(to),
                Need::Last => 1,
            };
            (from < to && to - from >= needed).then_some(to)
        };
        stretches.iter().filter_map(serves).max().unwrap_or(0)
    }
}

impl Index {
    /// For each live node that can resume the prompt at all, after how many blocks at most, by ascending
    /// node. Blocks of a component past the shortest one do not count. Costs a probe per run and one per
    /// block that nobody holds.
    #[must_use]
    pub fn resumable(&self, components: &[Component<'_>]) -> Vec<(NodeId, u32)> {
        let most = components.iter().map(|one| one.hashes.len()).min().unwrap_or(0).min(u32::MAX as usize);
        let held: Vec<_> = components.iter().map(|one| self.stretches(&one.hashes[..most])).collect();
        let Some(nodes) = held.first().map(|first| first.keys().copied()) else { return Vec::new() };
        let reach = |node: NodeId| {
            let mut blocks = most as u32;
            // Each component may shorten what another one found; when none does, all agree.
            loop {
                let before = blocks;
                for (component, held) in components.iter().zip(&held) {
                    let stretches = held.get(&node).map_or(&[][..], Vec::as_slice);
                    blocks = component.need.longest(stretches, blocks);
                }
                if blocks == before {
                    return blocks;
                }
            }
        };
        nodes.map(|node| (node, reach(node))).filter(|(_, blocks)| *blocks > 0).collect()
    }

    /// Which blocks of a prompt each live node holds, in prefix order, neighbours joined.
    fn stretches(&self, hashes: &[BlockHash]) -> BTreeMap<NodeId, Vec<Stretch>> {
        let mut found: BTreeMap<NodeId, Vec<Stretch>> = BTreeMap::new();
        let mut end = hashes.len() as u32;
        // From the end, because a hash stands for the blocks before it in its run.
        while let Some(last) = end.checked_sub(1) {
            let Some(at) = self.store.find(hashes[last as usize]) else {
                end = last;
                continue;
            };
            let first = self.first_in_run(at, &hashes[..end as usize]);
            self.add_stretches(at, (first, end), &mut found);
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

    /// Where the part of a prompt that lies in one run with its last block begins: as far back as blocks
    /// are listed there, because one that was dropped may be back in another run.
    fn first_in_run(&self, last: At, hashes: &[BlockHash]) -> u32 {
        let end = hashes.len() as u32;
        let most = end.min(last.offset + 1);
        let is_listed = |step: &u32| {
            let at = At { offset: last.offset - step, ..last };
            self.store.is_listed(at, hashes[(end - 1 - step) as usize])
        };
        end - (0..most).take_while(is_listed).count() as u32
    }

    fn add_stretches(&self, last: At, (from, end): Stretch, found: &mut BTreeMap<NodeId, Vec<Stretch>>) {
        // Offset of a position of the prompt in the run, less that position.
        let shift = i64::from(last.offset) + 1 - i64::from(end);
        for hold in self.store.runs.get(last.run).holds() {
            let Some(holder) = self.nodes.holder(hold) else { continue };
            let position = |offset: u16| (i64::from(offset) - shift).clamp(from.into(), end.into()) as u32;
            let (first, to) = (position(hold.from), position(hold.to));
            if first < to {
                found.entry(holder.node).or_default().push((first, to));
            }
        }
    }
}
