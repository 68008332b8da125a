//! Heat and proposals: cases by hand, and random uses against the limits.
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
        .map(|at| BlockHash::from_words(u64::from_le_bytes([number; _]), (at as u64).swap_bytes()))
        .collect()
}

/// Equal nodes. Number 1 holds every block except those in `lost`.
#[derive(Default)]
struct TestReplicas {
    refusing: BTreeSet<NodeId>,
    held: BTreeMap<NodeId, BTreeSet<BlockHash>>,
    lost: BTreeSet<BlockHash>,
}

impl TestReplicas {
    fn hold(&mut self, node: u32, hashes: &[BlockHash]) {
        self.held.entry(NodeId(node)).or_default().extend(hashes);
    }
}

impl ReplicaView for TestReplicas {
    fn accepts_blocks(&self, node: NodeId) -> bool {
        !self.refusing.contains(&node)
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

fn limits() -> ReplicationLimits {
    ReplicationLimits {
        decay: Duration::from_secs(60),
        bytes_per_second: SEGMENT_BYTES,
        burst_bytes: 8 * SEGMENT_BYTES,
        segments_max: 64,
    }
}

fn remote_use<'a>(hashes: &'a [BlockHash], destination: u32, saved_us: &'a [f64]) -> RemoteUse<'a> {
    RemoteUse {
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

/// A use with this saving for each block.
fn record_uniform_use(
    hot: &mut HotPrefixes,
    hashes: &[BlockHash],
    destination: u32,
    each_us: f64,
    now: Timestamp,
) {
    hot.record_use(&remote_use(hashes, destination, &vec![each_us; hashes.len()]), now);
}

fn propose(hot: &mut HotPrefixes, world: &TestReplicas, now: Timestamp) -> Option<Proposal> {
    hot.propose(world, 1, now).pop()
}

fn finish_copied(hot: &mut HotPrefixes, proposal: &Proposal, now: Timestamp) {
    hot.finish(proposal, CopyOutcome::Copied, proposal.run.hashes.len(), proposal.bytes, now);
}

#[test]
fn repeated_remote_reads_are_proposed_once_from_the_head() {
    let (mut hot, world, hashes) = (HotPrefixes::new(limits(), at(0)), TestReplicas::default(), prompt(1, 3));
    // Each use saves 80 us of a segment.
    record_uniform_use(&mut hot, &hashes, 2, 5.0, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)), None, "one use does not pay for a copy");
    record_uniform_use(&mut hot, &hashes, 2, 5.0, at(1));
    record_uniform_use(&mut hot, &hashes, 2, 5.0, at(2));
    let proposal = propose(&mut hot, &world, at(2)).unwrap();
    assert_eq!((proposal.source.node, proposal.destination), (NodeId(1), NodeId(2)));
    assert_eq!((proposal.run.hashes.clone(), proposal.run.tenant), (hashes.clone(), TenantId(3)));
    assert_eq!((proposal.bytes, proposal.run.first_offset_blocks), (3 * SEGMENT_BYTES, 0));
    assert!(proposal.gain_us > 0.0 && proposal.gain_us < 3.0 * 80.0);
    assert_eq!(propose(&mut hot, &world, at(3)), None, "it is in flight");
    finish_copied(&mut hot, &proposal, at(3));
    assert_eq!(propose(&mut hot, &world, at(3)), None, "no saving is left");
    // The index does not show it: some report was wrong, and the copy is not retried constantly.
    for second in 4..33 {
        record_uniform_use(&mut hot, &hashes, 2, 50.0, at(second));
        assert_eq!(propose(&mut hot, &world, at(second)), None, "{second}");
    }
    assert!(propose(&mut hot, &world, at(34)).is_some());
}

#[test]
fn heat_decays_with_its_time_constant() {
    let (mut hot, world, hashes) = (HotPrefixes::new(limits(), at(0)), TestReplicas::default(), prompt(1, 1));
    record_uniform_use(&mut hot, &hashes, 2, 20.0, at(0));
    // 320 us decay to the 160 that a copy takes in ln 2 time constants, 41.6 s.
    assert!(propose(&mut hot.clone(), &world, at(41)).is_some());
    assert_eq!(propose(&mut hot, &world, at(42)), None);
}

#[test]
fn shared_prefix_is_proposed_without_rare_tails() {
    let (mut hot, world) = (HotPrefixes::new(limits(), at(0)), TestReplicas::default());
    let shared = prompt(1, 2);
    for number in 0..8 {
        let all = [shared.clone(), prompt(100 + number, 2)].concat();
        record_uniform_use(&mut hot, &all, 2, 5.0, at(u64::from(number)));
    }
    assert_eq!(propose(&mut hot, &world, at(8)).unwrap().run.hashes, shared);
}

#[test]
fn no_proposal_after_a_gap_at_the_destination() {
    let (mut hot, mut world, hashes) =
        (HotPrefixes::new(limits(), at(0)), TestReplicas::default(), prompt(1, 3));
    let saved = vec![50.0; 2 * SEGMENT];
    let behind = RemoteUse {
        parent: Some(hashes[SEGMENT - 1]),
        first_offset_blocks: SEGMENT as u32,
        ..remote_use(&hashes[SEGMENT..], 2, &saved)
    };
    hot.record_use(&behind, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)), None);
    world.hold(2, &hashes[..SEGMENT]);
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!((proposal.run.hashes.len(), proposal.run.first_offset_blocks), (2 * SEGMENT, 16));
    assert_eq!(proposal.run.parent, behind.parent);
    // For a partly held segment, the missing blocks count.
    let mut hot = HotPrefixes::new(limits(), at(0));
    let saved: Vec<f64> = (0..SEGMENT).map(|at| if at < 12 { 0.0 } else { 50.0 }).collect();
    hot.record_use(&remote_use(&hashes[..SEGMENT], 2, &saved), at(0));
    assert_eq!(propose(&mut hot, &TestReplicas::default(), at(0)).unwrap().gain_us, 4.0 * 50.0 - 160.0);
    // A run that begins within a segment counts from the next one.
    let mut hot = HotPrefixes::new(limits(), at(0));
    let saved = vec![50.0; 3 * SEGMENT - 3];
    hot.record_use(&RemoteUse { first_offset_blocks: 3, ..remote_use(&hashes[3..], 2, &saved) }, at(0));
    assert_eq!(hot.len(), 2);
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.first_offset_blocks, 16);
}

#[test]
fn failed_copy_is_retried_later_and_refunds_its_budget() {
    let (mut hot, world, hashes) = (HotPrefixes::new(limits(), at(0)), TestReplicas::default(), prompt(1, 8));
    record_uniform_use(&mut hot, &hashes, 2, 500.0, at(0));
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!(proposal.bytes, 8 * SEGMENT_BYTES, "all of the budget");
    let other = prompt(2, 1);
    record_uniform_use(&mut hot, &other, 2, 500.0, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)), None, "the budget is used up");
    hot.finish(&proposal, CopyOutcome::SourceBusy, 0, 0, at(0));
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.hashes, other);
    assert_eq!(propose(&mut hot, &world, at(29)), None);
    assert_eq!(propose(&mut hot, &world, at(31)).unwrap().run.hashes, hashes);
}

#[test]
fn partial_copy_counts_its_blocks_and_bytes() {
    let (mut hot, mut world, hashes) =
        (HotPrefixes::new(limits(), at(0)), TestReplicas::default(), prompt(1, 8));
    record_uniform_use(&mut hot, &hashes, 2, 500.0, at(0));
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    // Frames are slightly larger than blocks.
    let (blocks, bytes) = (3 * SEGMENT + 2, 4 * SEGMENT_BYTES);
    hot.finish(&proposal, CopyOutcome::SourceLost, blocks, bytes, at(0));
    world.hold(2, &hashes[..blocks]);
    let next = propose(&mut hot, &world, at(31)).unwrap();
    assert_eq!(next.run.hashes, hashes[3 * SEGMENT..]);
    hot.finish(&next, CopyOutcome::Copied, next.run.hashes.len(), 9 * SEGMENT_BYTES, at(31));
    record_uniform_use(&mut hot, &prompt(2, 1), 2, 500.0, at(31));
    assert_eq!(
        propose(&mut hot, &world, at(32)),
        None,
        "more bytes came than planned, and the budget makes up for it"
    );
    assert!(propose(&mut hot, &world, at(33)).is_some());
}

#[test]
fn best_destination_comes_first_without_refusing_or_holding_ones() {
    let (mut hot, mut world, hashes) =
        (HotPrefixes::new(limits(), at(0)), TestReplicas::default(), prompt(1, 1));
    for (destination, each_us) in [(1, 900.0), (2, 20.0), (3, 30.0)] {
        record_uniform_use(&mut hot, &hashes, destination, each_us, at(0));
    }
    let destinations = |hot: &HotPrefixes, world: &TestReplicas| {
        let all = hot.clone().propose(world, 9, at(0));
        all.iter().map(|proposal| (proposal.source.node.0, proposal.destination.0)).collect::<Vec<_>>()
    };
    assert_eq!(destinations(&hot, &world), [(1, 3), (1, 2)], "node 1 has it");
    world.refusing.insert(NodeId(3));
    assert_eq!(destinations(&hot, &world), [(1, 2)]);
    world.hold(4, &hashes);
    world.lost.extend(&hashes);
    assert_eq!(destinations(&hot, &world), [(4, 1), (4, 2)], "from its current holder");
    world.held.clear();
    assert_eq!(destinations(&hot, &world), [], "no holder is left");
}

#[test]
fn single_holder_wins_a_tie() {
    let mut world = TestReplicas::default();
    let (both, alone) = (prompt(1, 1), prompt(2, 1));
    world.hold(3, &both);
    let mut hot = HotPrefixes::new(limits(), at(0));
    for hashes in [&both, &alone] {
        record_uniform_use(&mut hot, hashes, 2, 20.0, at(0));
    }
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.hashes, alone);
    assert_eq!(propose(&mut hot, &world, at(0)).unwrap().run.hashes, both);
}

#[test]
fn refusing_node_cools_down_and_others_do_not() {
    let (mut hot, world) = (HotPrefixes::new(limits(), at(0)), TestReplicas::default());
    for number in 1..4 {
        record_uniform_use(&mut hot, &prompt(number, 1), 2, 90.0, at(0));
        record_uniform_use(&mut hot, &prompt(number, 1), 3, 50.0, at(0));
    }
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!(proposal.destination, NodeId(2));
    hot.finish(&proposal, CopyOutcome::Worth, 0, 0, at(0));
    let proposal = propose(&mut hot, &world, at(0)).unwrap();
    assert_eq!(proposal.destination, NodeId(2), "another prefix may be worth more");
    hot.finish(&proposal, CopyOutcome::Queue, 0, 0, at(0));
    assert_eq!(propose(&mut hot, &world, at(29)).unwrap().destination, NodeId(3));
    assert_eq!(propose(&mut hot, &world, at(30)).unwrap().destination, NodeId(2));
}

#[test]
fn use_without_finite_saving_is_ignored() {
    let (mut hot, hashes) = (HotPrefixes::new(limits(), at(0)), prompt(1, 2));
    for saved in [0.0, -5.0, f64::NAN, f64::INFINITY, f64::MAX] {
        record_uniform_use(&mut hot, &hashes, 2, saved, at(0));
    }
    record_uniform_use(&mut hot, &hashes[..SEGMENT - 1], 2, 5.0, at(0));
    hot.record_use(&remote_use(&hashes, 2, &[5.0; 3]), at(0));
    hot.record_use(&remote_use(&[], 2, &[]), at(0));
    hot.record_use(
        &RemoteUse {
            first_offset_blocks: u32::MAX,
            block_tokens: 0,
            ..remote_use(&hashes, 2, &vec![0.0; hashes.len()])
        },
        at(0),
    );
    assert!(hot.is_empty());
    // A use with other block boundaries changes no known segment, and heat stays finite.
    record_uniform_use(&mut hot, &hashes, 2, 5.0, at(0));
    let other = RemoteUse { block_tokens: 512, ..remote_use(&hashes[SEGMENT - 1..SEGMENT], 2, &[1e9]) };
    hot.record_use(&other, at(0));
    assert_eq!(propose(&mut hot.clone(), &TestReplicas::default(), at(0)), None);
    for _ in 0..3 {
        record_uniform_use(&mut hot, &hashes, 2, f64::MAX / 20.0, at(0));
    }
    assert_eq!(propose(&mut hot, &TestReplicas::default(), at(60 * 800)), None);
}

#[test]
fn large_blocks_are_segments_by_themselves() {
    assert_eq!([1, 16, 64, 512, u32::MAX, 0].map(segment_blocks), [16, 16, 4, 1, 1, 16]);
}

proptest! {
    #[test]
    fn proposals_respect_budget_memory_and_refusals(
        steps in prop::collection::vec((0u8..40, 1usize..5, 1u32..12, 0u64..4_000, 0.0f64..400.0, 0u8..4), 1..150),
        takes_not in prop::collection::btree_set(1u32..12, 0..4),
        most in 0usize..4,
    ) {
        let rules = ReplicationLimits { segments_max: 32, ..limits() };
        let world = TestReplicas { refusing: takes_not.into_iter().map(NodeId).collect(), ..TestReplicas::default() };
        let mut hot = HotPrefixes::new(rules, Timestamp(0));
        let (mut now, mut spent) = (Timestamp(0), 0.0);
        for (number, segments, destination, wait_ms, saved, then) in steps {
            now = now.after(Duration::from_millis(wait_ms));
            record_uniform_use(&mut hot, &prompt(number, segments), destination, saved, now);
            prop_assert!(hot.len() <= 32);
            let proposals = hot.propose(&world, most, now);
            prop_assert!(proposals.len() <= most);
            for proposal in proposals {
                prop_assert!(world.accepts_blocks(proposal.destination) && proposal.gain_us > 0.0);
                prop_assert!(proposal.source.node == NodeId(1) && proposal.destination != NodeId(1));
                prop_assert_eq!(proposal.bytes, BLOCK * proposal.run.hashes.len() as u64);
                spent += proposal.bytes as f64;
                // A failed copy returns its unused budget.
                let (end, used) = match then {
                    0 => (CopyOutcome::Full, 0),
                    1 => (CopyOutcome::SourceLost, proposal.bytes / 2),
                    _ => (CopyOutcome::Copied, proposal.bytes),
                };
                let allowed = rules.burst_bytes as f64
                    + now.0 as f64 / 1e6 * rules.bytes_per_second as f64;
                prop_assert!(spent <= allowed + 1.0, "{} of {}", spent, allowed);
                spent -= (proposal.bytes - used) as f64;
                hot.finish(&proposal, end, (used / BLOCK) as usize, used, now);
            }
        }
    }
}
