//! Heat and proposals: situations by hand, and whatever is used whenever against what bounds them.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BLOCK: u64 = 1_000;

/// Blocks of a prompt with this number.
fn prompt(number: u8, segments: usize) -> Vec<BlockHash> {
    (0..segments * SEGMENT_BLOCKS)
        .map(|at| {
            let mut bytes = [number; 16];
            bytes[8..].copy_from_slice(&(at as u64).to_le_bytes());
            BlockHash(bytes)
        })
        .collect()
}

/// Nodes that are all alike; of each the last blocks of the segments that it holds.
#[derive(Default)]
struct World {
    dead: BTreeSet<NodeId>,
    held: BTreeMap<NodeId, BTreeSet<BlockHash>>,
    displaced_us_per_byte: f64,
}

impl Places for World {
    fn is_live(&self, node: NodeId, epoch: Epoch) -> bool {
        self.takes(node) && epoch == Epoch(1)
    }

    fn takes(&self, node: NodeId) -> bool {
        !self.dead.contains(&node)
    }

    fn holds(&self, node: NodeId, block: BlockHash) -> bool {
        self.held.get(&node).is_some_and(|held| held.contains(&block))
    }

    fn bytes_of(&self, blocks: usize) -> u64 {
        BLOCK * blocks as u64
    }

    fn copy_us(&self, _: NodeId, _: NodeId, bytes: u64) -> f64 {
        bytes as f64 / 100.0
    }

    fn displaced_us(&self, _: NodeId, bytes: u64) -> f64 {
        bytes as f64 * self.displaced_us_per_byte
    }
}

const SEGMENT_BYTES: u64 = BLOCK * SEGMENT_BLOCKS as u64;

fn rules() -> HotRules {
    HotRules {
        decay: Duration::from_secs(60),
        bytes_per_second: SEGMENT_BYTES,
        burst_bytes: 8 * SEGMENT_BYTES,
        segments_max: 64,
    }
}

fn used(hashes: &[BlockHash], destination: u32, saved_us_per_block: f64) -> Use<'_> {
    Use {
        source: (NodeId(1), Epoch(1)),
        destination: NodeId(destination),
        tenant: TenantId(3),
        category: Category::default(),
        parent: None,
        first_offset_blocks: 0,
        hashes,
        saved_us_per_block,
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * 1_000_000)
}

#[test]
fn what_is_read_from_afar_again_and_again_is_proposed_from_its_head_on_and_once() {
    let (mut hot, world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 3));
    // A segment costs 160 us to copy, and each use saves 80 of it.
    hot.used(&used(&hashes, 2, 5.0), at(0));
    assert_eq!(hot.propose(&world, at(0)), None, "one use does not pay for it");
    hot.used(&used(&hashes, 2, 5.0), at(1));
    hot.used(&used(&hashes, 2, 5.0), at(2));
    let proposal = hot.propose(&world, at(2)).unwrap();
    assert_eq!((proposal.source, proposal.destination), ((NodeId(1), Epoch(1)), NodeId(2)));
    assert_eq!((proposal.run.hashes.clone(), proposal.run.tenant), (hashes.clone(), TenantId(3)));
    assert_eq!((proposal.bytes, proposal.run.first_offset_blocks), (3 * SEGMENT_BYTES, 0));
    assert!(proposal.gain_us > 0.0 && proposal.gain_us < 3.0 * 80.0);
    assert_eq!(hot.propose(&world, at(3)), None, "it is under way");
    hot.ended(&proposal, CopyEnd::Copied, proposal.bytes, at(3));
    assert_eq!(hot.propose(&world, at(3)), None, "and there is nothing left to save");
}

#[test]
fn heat_fades_and_what_others_would_lose_counts_against_it() {
    let (mut hot, hashes) = (Hot::new(rules(), at(0)), prompt(1, 1));
    let mut world = World::default();
    for second in 0..3 {
        hot.used(&used(&hashes, 2, 5.0), at(second));
    }
    assert_eq!(hot.clone().propose(&world, at(90)), None, "long ago");
    world.displaced_us_per_byte = 0.01;
    assert_eq!(hot.clone().propose(&world, at(3)), None, "what would leave is worth as much");
    world.displaced_us_per_byte = 0.0;
    assert!(hot.propose(&world, at(3)).is_some());
}

#[test]
fn what_is_shared_goes_and_what_few_read_behind_it_does_not() {
    let (mut hot, world) = (Hot::new(rules(), at(0)), World::default());
    let shared = prompt(1, 2);
    for number in 0..8 {
        let all = [shared.clone(), prompt(100 + number, 2)].concat();
        hot.used(&used(&all, 2, 5.0), at(u64::from(number)));
    }
    assert_eq!(hot.propose(&world, at(8)).unwrap().run.hashes, shared);
}

#[test]
fn behind_a_gap_nothing_is_proposed_until_the_destination_has_what_comes_before() {
    let (mut hot, mut world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 3));
    let behind = Use {
        parent: Some(hashes[SEGMENT_BLOCKS - 1]),
        first_offset_blocks: SEGMENT_BLOCKS as u32,
        ..used(&hashes[SEGMENT_BLOCKS..], 2, 50.0)
    };
    hot.used(&behind, at(0));
    assert_eq!(hot.propose(&world, at(0)), None);
    world.held.entry(NodeId(2)).or_default().insert(hashes[SEGMENT_BLOCKS - 1]);
    let proposal = hot.propose(&world, at(0)).unwrap();
    assert_eq!((proposal.run.hashes.len(), proposal.run.first_offset_blocks), (2 * SEGMENT_BLOCKS, 16));
    assert_eq!(proposal.run.parent, behind.parent);
    // A run that begins within a segment counts from the next one on.
    let mut hot = Hot::new(rules(), at(0));
    hot.used(&Use { first_offset_blocks: 3, ..used(&hashes[3..], 2, 50.0) }, at(0));
    assert_eq!(hot.len(), 2);
    assert_eq!(hot.propose(&world, at(0)).unwrap().run.first_offset_blocks, 16);
}

#[test]
fn a_copy_that_failed_is_tried_again_later_and_gives_its_budget_back() {
    let (mut hot, world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 8));
    hot.used(&used(&hashes, 2, 500.0), at(0));
    let proposal = hot.propose(&world, at(0)).unwrap();
    assert_eq!(proposal.bytes, 8 * SEGMENT_BYTES, "all of the budget");
    let other = prompt(2, 1);
    hot.used(&used(&other, 2, 500.0), at(0));
    assert_eq!(hot.propose(&world, at(0)), None, "nothing is left of it");
    hot.ended(&proposal, CopyEnd::SourceBusy, 0, at(0));
    assert_eq!(hot.propose(&world, at(0)).unwrap().run.hashes, other);
    assert_eq!(hot.propose(&world, at(29)), None);
    assert_eq!(hot.propose(&world, at(31)).unwrap().run.hashes, hashes);
}

#[test]
fn the_hottest_destination_comes_first_and_none_that_is_gone() {
    let (mut hot, mut world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 1));
    hot.used(&used(&hashes, 2, 20.0), at(0));
    hot.used(&used(&hashes, 3, 30.0), at(0));
    hot.used(&used(&hashes, 1, 900.0), at(0));
    assert_eq!(hot.clone().propose(&world, at(0)).unwrap().destination, NodeId(3));
    world.dead.insert(NodeId(3));
    assert_eq!(hot.clone().propose(&world, at(0)).unwrap().destination, NodeId(2));
    world.dead.insert(NodeId(1));
    assert_eq!(hot.propose(&world, at(0)), None, "the source is gone");
}

#[test]
fn what_saves_nothing_or_no_number_is_not_counted() {
    let (mut hot, hashes) = (Hot::new(rules(), at(0)), prompt(1, 2));
    for saved in [0.0, -5.0, f64::NAN, f64::INFINITY] {
        hot.used(&used(&hashes, 2, saved), at(0));
    }
    hot.used(&used(&hashes[..SEGMENT_BLOCKS - 1], 2, 5.0), at(0));
    assert!(hot.is_empty());
}

proptest! {
    #[test]
    fn whatever_is_used_the_budget_and_the_memory_hold_and_only_live_nodes_are_named(
        steps in prop::collection::vec((0u8..40, 1usize..5, 1u32..12, 0u64..4_000, 0.0f64..400.0, 0u8..4), 1..150),
        dead in prop::collection::btree_set(1u32..12, 0..4),
    ) {
        let rules = HotRules { segments_max: 32, ..rules() };
        let world = World { dead: dead.into_iter().map(NodeId).collect(), ..World::default() };
        let mut hot = Hot::new(rules, Timestamp(0));
        let (mut now, mut spent) = (Timestamp(0), 0.0);
        for (number, segments, destination, wait_ms, saved, then) in steps {
            now = now.after(Duration::from_millis(wait_ms));
            let hashes = prompt(number, segments);
            let source = (NodeId(1 + u32::from(number) % 11), Epoch(1));
            hot.used(&Use { source, ..used(&hashes, destination, saved) }, now);
            prop_assert!(hot.len() <= 32);
            while let Some(proposal) = hot.propose(&world, now) {
                prop_assert!(world.takes(proposal.destination) && world.takes(proposal.source.0));
                prop_assert!(proposal.source.0 != proposal.destination && proposal.gain_us > 0.0);
                prop_assert_eq!(proposal.bytes, BLOCK * proposal.run.hashes.len() as u64);
                spent += proposal.bytes as f64;
                // What failed gives back what it did not use.
                let (end, used) = match then {
                    0 => (CopyEnd::Full, 0),
                    1 => (CopyEnd::SourceLost, proposal.bytes / 2),
                    _ => (CopyEnd::Copied, proposal.bytes),
                };
                spent -= (proposal.bytes - used) as f64;
                hot.ended(&proposal, end, used, now);
                let allowed = rules.burst_bytes as f64
                    + now.0 as f64 / 1e6 * rules.bytes_per_second as f64;
                prop_assert!(spent <= allowed + 1.0, "{} of {}", spent, allowed);
            }
        }
    }
}
