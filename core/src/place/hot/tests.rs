//! Heat and proposals: situations by hand, and whatever is used whenever against what bounds them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::id::{Epoch, Tier};

const BLOCK: u64 = 1_000;
const BLOCK_TOKENS: u32 = 16;
const SEGMENT: usize = 16;
const SEGMENT_BYTES: u64 = BLOCK * SEGMENT as u64;

/// Blocks of a prompt with this number.
fn prompt(number: u8, segments: usize) -> Vec<BlockHash> {
    (0..segments * SEGMENT)
        .map(|at| {
            let mut bytes = [number; 16];
            bytes[8..].copy_from_slice(&(at as u64).to_be_bytes());
            BlockHash(bytes)
        })
        .collect()
}

/// Nodes that are all alike. Number 1 holds everything, unless it is said what it has lost.
#[derive(Default)]
struct World {
    takes_not: BTreeSet<NodeId>,
    held: BTreeMap<NodeId, BTreeSet<BlockHash>>,
    lost: BTreeSet<BlockHash>,
}

impl World {
    fn hold(&mut self, node: u32, hashes: &[BlockHash]) {
        self.held.entry(NodeId(node)).or_default().extend(hashes);
    }
}

impl Places for World {
    fn takes(&self, node: NodeId) -> bool {
        !self.takes_not.contains(&node)
    }

    fn holders(&self, block: BlockHash) -> SmallVec<[Holder; 4]> {
        let others = self.held.iter().filter(|(_, held)| held.contains(&block)).map(|(node, _)| *node);
        let all = (!self.lost.contains(&block)).then_some(NodeId(1)).into_iter().chain(others);
        all.map(|node| Holder { node, epoch: Epoch(1), tier: Tier::Dram }).collect()
    }

    fn block_bytes(&self, _: NodeId) -> u64 {
        BLOCK
    }

    /// A segment takes 160 us; from a node with a higher number a little more.
    fn copy_us(&self, holder: &Holder, blocks: u64, block_tokens: u32) -> f64 {
        (blocks * u64::from(block_tokens)) as f64 * 0.625 + f64::from(holder.node.0 - 1)
    }
}

fn rules() -> HotRules {
    HotRules {
        decay: Duration::from_secs(60),
        bytes_per_second: SEGMENT_BYTES,
        burst_bytes: 8 * SEGMENT_BYTES,
        segments_max: 64,
    }
}

fn used<'a>(hashes: &'a [BlockHash], destination: u32, saved_us: &'a [f64]) -> Use<'a> {
    Use {
        destination: NodeId(destination),
        tenant: TenantId(3),
        category: Category::default(),
        block_tokens: BLOCK_TOKENS,
        parent: None,
        first_offset_blocks: 0,
        hashes,
        saved_us,
    }
}

fn at(seconds: u64) -> Timestamp {
    Timestamp(seconds * 1_000_000)
}

/// A use in which each block saves this.
fn warm(hot: &mut Hot, hashes: &[BlockHash], destination: u32, each_us: f64, now: Timestamp) {
    hot.used(&used(hashes, destination, &vec![each_us; hashes.len()]), now);
}

fn propose(hot: &mut Hot, world: &World, now: Timestamp) -> Option<Proposal> {
    hot.propose(world, 1, now).pop()
}

fn copied(hot: &mut Hot, proposal: &Proposal, now: Timestamp) {
    hot.ended(proposal, CopyEnd::Copied, (proposal.run.hashes.len(), proposal.bytes), now);
}

#[test]
fn what_is_read_from_afar_again_and_again_is_proposed_from_its_head_on_and_once() {
    let (mut hot, world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 3));
    // Each use saves 80 us of a segment.
    warm(&mut hot, &hashes, 2, 5.0, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)), None, "one use does not pay for it");
    warm(&mut hot, &hashes, 2, 5.0, at(1));
    warm(&mut hot, &hashes, 2, 5.0, at(2));
    let proposal = propose(&mut hot, &world, at(2)).unwrap();
    assert_eq!((proposal.source.node, proposal.destination), (NodeId(1), NodeId(2)));
    assert_eq!((proposal.run.hashes.clone(), proposal.run.tenant), (hashes.clone(), TenantId(3)));
    assert_eq!((proposal.bytes, proposal.run.first_offset_blocks), (3 * SEGMENT_BYTES, 0));
    assert!(proposal.gain_us > 0.0 && proposal.gain_us < 3.0 * 80.0);
    assert_eq!(propose(&mut hot, &world, at(3)), None, "it is under way");
    copied(&mut hot, &proposal, at(3));
    assert_eq!(propose(&mut hot, &world, at(3)), None, "and there is nothing left to save");
    // The index does not show it: somebody was mistaken, and it is not done over and over.
    for second in 4..33 {
        warm(&mut hot, &hashes, 2, 50.0, at(second));
        assert_eq!(propose(&mut hot, &world, at(second)), None, "{second}");
    }
    assert!(propose(&mut hot, &world, at(34)).is_some());
}

#[test]
fn heat_fades_with_its_time_constant() {
    let (mut hot, world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 1));
    warm(&mut hot, &hashes, 2, 20.0, at(0));
    // 320 us fade to the 160 that a copy takes in ln 2 time constants, 41.6 s.
    assert!(propose(&mut hot.clone(), &world, at(41)).is_some());
    assert_eq!(propose(&mut hot, &world, at(42)), None);
}

#[test]
fn what_is_shared_goes_and_what_few_read_behind_it_does_not() {
    let (mut hot, world) = (Hot::new(rules(), at(0)), World::default());
    let shared = prompt(1, 2);
    for number in 0..8 {
        let all = [shared.clone(), prompt(100 + number, 2)].concat();
        warm(&mut hot, &all, 2, 5.0, at(u64::from(number)));
    }
    assert_eq!(propose(&mut hot, &world, at(8)).unwrap().run.hashes, shared);
}

#[test]
fn behind_a_gap_nothing_is_proposed_until_the_destination_has_what_comes_before() {
    let (mut hot, mut world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 3));
    let saved = vec![50.0; 2 * SEGMENT];
    let behind = Use {
        parent: Some(hashes[SEGMENT - 1]),
        first_offset_blocks: SEGMENT as u32,
        ..used(&hashes[SEGMENT..], 2, &saved)
    };
    hot.used(&behind, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)), None);
    world.hold(2, &hashes[..SEGMENT]);
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!((proposal.run.hashes.len(), proposal.run.first_offset_blocks), (2 * SEGMENT, 16));
    assert_eq!(proposal.run.parent, behind.parent);
    // Of a segment that begins at the destination, what is missing counts.
    let mut hot = Hot::new(rules(), at(0));
    let saved: Vec<f64> = (0..SEGMENT).map(|at| if at < 12 { 0.0 } else { 50.0 }).collect();
    hot.used(&used(&hashes[..SEGMENT], 2, &saved), at(0));
    assert_eq!(propose(&mut hot, &World::default(), at(0)).unwrap().gain_us, 4.0 * 50.0 - 160.0);
    // A run that begins within a segment counts from the next one on.
    let mut hot = Hot::new(rules(), at(0));
    let saved = vec![50.0; 3 * SEGMENT - 3];
    hot.used(&Use { first_offset_blocks: 3, ..used(&hashes[3..], 2, &saved) }, at(0));
    assert_eq!(hot.len(), 2);
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.first_offset_blocks, 16);
}

#[test]
fn a_copy_that_failed_is_tried_again_later_and_gives_its_budget_back() {
    let (mut hot, world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 8));
    warm(&mut hot, &hashes, 2, 500.0, at(0));
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!(proposal.bytes, 8 * SEGMENT_BYTES, "all of the budget");
    let other = prompt(2, 1);
    warm(&mut hot, &other, 2, 500.0, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)), None, "nothing is left of it");
    hot.ended(&proposal, CopyEnd::SourceBusy, (0, 0), at(0));
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.hashes, other);
    assert_eq!(propose(&mut hot, &world, at(29)), None);
    assert_eq!(propose(&mut hot, &world, at(31)).unwrap().run.hashes, hashes);
}

#[test]
fn what_came_of_a_copy_that_broke_off_counts_and_bytes_are_those_that_came() {
    let (mut hot, mut world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 8));
    warm(&mut hot, &hashes, 2, 500.0, at(0));
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    // Frames are a little larger than blocks.
    let came = (3 * SEGMENT + 2, 4 * SEGMENT_BYTES);
    hot.ended(&proposal, CopyEnd::SourceLost, came, at(0));
    world.hold(2, &hashes[..came.0]);
    let next = propose(&mut hot, &world, at(31)).unwrap();
    assert_eq!(next.run.hashes, hashes[3 * SEGMENT..]);
    hot.ended(&next, CopyEnd::Copied, (next.run.hashes.len(), 9 * SEGMENT_BYTES), at(31));
    warm(&mut hot, &prompt(2, 1), 2, 500.0, at(31));
    assert_eq!(propose(&mut hot, &world, at(32)), None, "more came than was reckoned: that is made up for");
    assert!(propose(&mut hot, &world, at(33)).is_some());
}

#[test]
fn the_destination_that_saves_most_comes_first_and_none_that_takes_nothing_or_has_it() {
    let (mut hot, mut world, hashes) = (Hot::new(rules(), at(0)), World::default(), prompt(1, 1));
    for (destination, each_us) in [(1, 900.0), (2, 20.0), (3, 30.0)] {
        warm(&mut hot, &hashes, destination, each_us, at(0));
    }
    let destinations = |hot: &Hot, world: &World| {
        let all = hot.clone().propose(world, 9, at(0));
        all.iter().map(|proposal| (proposal.source.node.0, proposal.destination.0)).collect::<Vec<_>>()
    };
    assert_eq!(destinations(&hot, &world), [(1, 3), (1, 2)], "node 1 has it");
    world.takes_not.insert(NodeId(3));
    assert_eq!(destinations(&hot, &world), [(1, 2)]);
    world.hold(4, &hashes);
    world.lost.extend(&hashes);
    assert_eq!(destinations(&hot, &world), [(4, 1), (4, 2)], "from whoever has it now");
    world.held.clear();
    assert_eq!(destinations(&hot, &world), [], "nobody has it any more");
}

#[test]
fn of_equals_what_one_node_alone_holds_goes_first() {
    let mut world = World::default();
    let (both, alone) = (prompt(1, 1), prompt(2, 1));
    world.hold(3, &both);
    let mut hot = Hot::new(rules(), at(0));
    for hashes in [&both, &alone] {
        warm(&mut hot, hashes, 2, 20.0, at(0));
    }
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.hashes, alone);
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.hashes, both);
}

#[test]
fn a_node_that_takes_no_copies_rests_and_others_do_not() {
    let (mut hot, world) = (Hot::new(rules(), at(0)), World::default());
    for number in 1..4 {
        warm(&mut hot, &prompt(number, 1), 2, 90.0, at(0));
        warm(&mut hot, &prompt(number, 1), 3, 50.0, at(0));
    }
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!(proposal.destination, NodeId(2));
    hot.ended(&proposal, CopyEnd::Worth, (0, 0), at(0));
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!(proposal.destination, NodeId(2), "another prefix may be worth more");
    hot.ended(&proposal, CopyEnd::Queue, (0, 0), at(0));
    assert_eq!(propose(&mut hot, &world, at(29)).unwrap().destination, NodeId(3));
    assert_eq!(propose(&mut hot, &world, at(30)).unwrap().destination, NodeId(2));
}

#[test]
fn what_saves_nothing_or_no_number_is_not_counted() {
    let (mut hot, hashes) = (Hot::new(rules(), at(0)), prompt(1, 2));
    for saved in [0.0, -5.0, f64::NAN, f64::INFINITY, f64::MAX] {
        warm(&mut hot, &hashes, 2, saved, at(0));
    }
    warm(&mut hot, &hashes[..SEGMENT - 1], 2, 5.0, at(0));
    hot.used(&used(&hashes, 2, &[5.0; 3]), at(0));
    hot.used(&used(&[], 2, &[]), at(0));
    hot.used(
        &Use { first_offset_blocks: u32::MAX, block_tokens: 0, ..used(&hashes, 2, &vec![0.0; hashes.len()]) },
        at(0),
    );
    assert!(hot.is_empty());
    // Whoever cuts a prompt otherwise does not change what is known of it, and heat never stands still.
    warm(&mut hot, &hashes, 2, 5.0, at(0));
    let other = Use { block_tokens: 512, ..used(&hashes[SEGMENT - 1..SEGMENT], 2, &[1e9]) };
    hot.used(&other, at(0));
    assert_eq!(propose(&mut hot.clone(), &World::default(), at(0)), None);
    for _ in 0..3 {
        warm(&mut hot, &hashes, 2, f64::MAX / 20.0, at(0));
    }
    assert_eq!(propose(&mut hot, &World::default(), at(60 * 800)), None);
}

#[test]
fn blocks_of_many_tokens_are_segments_by_themselves() {
    assert_eq!([1, 16, 64, 512, u32::MAX, 0].map(segment_blocks), [16, 16, 4, 1, 1, 16]);
}

proptest! {
    #[test]
    fn whatever_is_used_the_budget_and_the_memory_hold_and_only_who_takes_is_named(
        steps in prop::collection::vec((0u8..40, 1usize..5, 1u32..12, 0u64..4_000, 0.0f64..400.0, 0u8..4), 1..150),
        takes_not in prop::collection::btree_set(1u32..12, 0..4),
        most in 0usize..4,
    ) {
        let rules = HotRules { segments_max: 32, ..rules() };
        let world = World { takes_not: takes_not.into_iter().map(NodeId).collect(), ..World::default() };
        let mut hot = Hot::new(rules, Timestamp(0));
        let (mut now, mut spent) = (Timestamp(0), 0.0);
        for (number, segments, destination, wait_ms, saved, then) in steps {
            now = now.after(Duration::from_millis(wait_ms));
            warm(&mut hot, &prompt(number, segments), destination, saved, now);
            prop_assert!(hot.len() <= 32);
            let proposals = hot.propose(&world, most, now);
            prop_assert!(proposals.len() <= most);
            for proposal in proposals {
                prop_assert!(world.takes(proposal.destination) && proposal.gain_us > 0.0);
                prop_assert!(proposal.source.node == NodeId(1) && proposal.destination != NodeId(1));
                prop_assert_eq!(proposal.bytes, BLOCK * proposal.run.hashes.len() as u64);
                spent += proposal.bytes as f64;
                // What failed gives back what it did not use.
                let (end, used) = match then {
                    0 => (CopyEnd::Full, 0),
                    1 => (CopyEnd::SourceLost, proposal.bytes / 2),
                    _ => (CopyEnd::Copied, proposal.bytes),
                };
                let allowed = rules.burst_bytes as f64
                    + now.0 as f64 / 1e6 * rules.bytes_per_second as f64;
                prop_assert!(spent <= allowed + 1.0, "{} of {}", spent, allowed);
                spent -= (proposal.bytes - used) as f64;
                hot.ended(&proposal, end, ((used / BLOCK) as usize, used), now);
            }
        }
    }
}
