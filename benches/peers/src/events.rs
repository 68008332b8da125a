//! The order of announcements and removals: many open chains interleave, as concurrent requests do.
//!
//! Not here: how a side applies an event (`side/`, one file each).

use std::collections::VecDeque;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::chains::{Chains, SEED, Shape};

/// Blocks per event.
const EVENT_BLOCKS: u32 = 16;
/// Chains that grow or shrink concurrently: eight per node.
const OPEN_CHAINS: usize = 512;

/// Effect of an event on its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The node now holds the blocks.
    Store,
    /// The node drops the blocks. The last block comes first, as caches free them.
    Remove,
}

/// Consecutive blocks of one chain on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) node: u32,
    pub(crate) chain: u32,
    pub(crate) start_blocks: u32,
    pub(crate) len_blocks: u32,
}

impl Event {
    /// The event's blocks in one kind of hash.
    pub(crate) fn of<'hashes, T>(&self, hashes: &'hashes [T]) -> &'hashes [T] {
        &hashes[self.start_blocks as usize..(self.start_blocks + self.len_blocks) as usize]
    }

    /// The block before the event's first block.
    pub(crate) fn parent<T: Copy>(&self, hashes: &[T]) -> Option<T> {
        let before = self.start_blocks.checked_sub(1)?;
        Some(hashes[before as usize])
    }
}

/// Events for every block of every chain on each of its nodes, once.
pub(crate) fn events(shape: Shape, action: Action) -> Vec<Event> {
    let mut pairs: Vec<(u32, u32)> =
        (0..shape.chains).flat_map(|chain| shape.nodes(chain).map(move |node| (chain, node))).collect();
    pairs.shuffle(&mut ChaCha8Rng::seed_from_u64(SEED + action as u64));
    let mut waiting = pairs.into_iter().map(|pair| (pair, 0));
    let mut open: VecDeque<_> = waiting.by_ref().take(OPEN_CHAINS).collect();
    let mut events = Vec::new();
    while let Some(((chain, node), turn)) = open.pop_front() {
        let turns = shape.chain_blocks.div_ceil(EVENT_BLOCKS);
        let place = if action == Action::Store { turn } else { turns - 1 - turn };
        let start_blocks = place * EVENT_BLOCKS;
        let len_blocks = EVENT_BLOCKS.min(shape.chain_blocks - start_blocks);
        events.push(Event { node, chain, start_blocks, len_blocks });
        let next = if turn + 1 < turns { Some(((chain, node), turn + 1)) } else { waiting.next() };
        open.extend(next);
    }
    events
}

/// Chains in random order, so that caches cannot predict the next one.
pub(crate) fn shuffled(chains: &Chains, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..chains.shape.chains).collect();
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(SEED ^ seed));
    order
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const SHAPE: Shape = Shape { chains: 600, chain_blocks: 50, holders: 4 };

    #[test]
    fn parents_are_stored_first_and_removed_last() {
        for action in [Action::Store, Action::Remove] {
            let mut seen = HashSet::new();
            for event in events(SHAPE, action) {
                let range = event.start_blocks..event.start_blocks + event.len_blocks;
                for block in range {
                    assert!(seen.insert((event.node, event.chain, block)));
                }
                let before = event.start_blocks.checked_sub(1).map(|block| (event.node, event.chain, block));
                let was_before = before.is_none_or(|block| seen.contains(&block));
                assert!(was_before == (action == Action::Store) || before.is_none());
            }
            assert_eq!(seen.len() as u64, SHAPE.entries());
        }
    }

    #[test]
    fn interleaves_open_chains() {
        let chains: HashSet<_> = events(SHAPE, Action::Store)[..OPEN_CHAINS]
            .iter()
            .map(|event| (event.chain, event.node))
            .collect();
        assert_eq!(chains.len(), OPEN_CHAINS);
    }
}
