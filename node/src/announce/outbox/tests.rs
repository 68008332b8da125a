//! The outbox against a model of the index: with any losses and repetitions, both end up equal.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use super::*;
use kv_core::id::Tier;
use proptest::prelude::*;

fn hash(number: u64) -> BlockHash {
    BlockHash::from_words(number, 0)
}

fn stored(numbers: std::ops::Range<u64>) -> Change {
    let parent = numbers.start.checked_sub(1).map(hash);
    Change::Stored { parent, blocks: numbers.map(hash).collect(), tier: Tier::Dram }
}

fn joined() -> Outbox {
    let mut outbox = Outbox::default();
    outbox.joined(Epoch(1), Vec::new());
    outbox
}

#[test]
fn nothing_is_kept_before_the_first_epoch() {
    let mut outbox = Outbox::default();
    outbox.push(vec![stored(0..5)]);
    assert_eq!(outbox.next_batch(), None);
    assert_eq!(outbox.position(), None);
}

#[test]
fn changes_pushed_before_a_batch_is_taken_share_its_number() {
    let mut outbox = joined();
    outbox.push(vec![stored(0..1)]);
    assert_eq!(outbox.position(), Some((Epoch(1), Seq(1))));
    outbox.push(vec![stored(5..6)]);
    assert_eq!(outbox.position(), Some((Epoch(1), Seq(1))));
    assert_eq!(outbox.next_batch().unwrap().changes.len(), 2);
    outbox.push(vec![stored(7..8)]);
    assert_eq!(outbox.position(), Some((Epoch(1), Seq(2))));
}

#[test]
fn unacknowledged_batches_are_sent_again_on_a_new_stream() {
    let mut outbox = joined();
    outbox.push(vec![stored(0..1)]);
    let first = outbox.next_batch().unwrap();
    outbox.push(vec![stored(1..2)]);
    let second = outbox.next_batch().unwrap();
    outbox.ack(first.seq);
    outbox.restart();
    assert_eq!(outbox.next_batch(), Some(second));
    assert_eq!(outbox.next_batch(), None);
}

#[test]
fn busy_leader_gets_the_batch_again() {
    let mut outbox = joined();
    outbox.push(vec![stored(0..1)]);
    let batch = outbox.next_batch().unwrap();
    outbox.rewind_to(batch.seq);
    assert_eq!(outbox.next_batch(), Some(batch));
}

#[test]
fn large_changes_are_split_into_batches_that_chain() {
    let mut outbox = joined();
    outbox.push(vec![stored(0..40_000)]);
    let mut next = 0;
    while let Some(batch) = outbox.next_batch() {
        for change in batch.changes {
            let Change::Stored { parent, blocks, .. } = change else { panic!("not stored") };
            assert!(blocks.len() <= BATCH_BLOCKS_MAX);
            assert_eq!(parent, next_parent(next));
            next += blocks.len() as u64;
        }
    }
    assert_eq!(next, 40_000);
}

fn next_parent(next: u64) -> Option<BlockHash> {
    next.checked_sub(1).map(hash)
}

#[test]
fn overflow_is_discarded_and_reannounced_without_reusing_numbers() {
    let mut outbox = joined();
    outbox.push(vec![stored(0..10)]);
    let sent = outbox.next_batch().unwrap();
    for start in 0..30 {
        outbox.push(vec![stored(start * 10_000..(start + 1) * 10_000)]);
    }
    assert!(outbox.stale());
    outbox.restart();
    let again = outbox.next_batch().unwrap();
    assert_eq!((again.seq, again.changes.len()), (sent.seq, 0), "a sent number may only be resent empty");
    outbox.refill(vec![stored(0..300_000)]);
    let fresh = outbox.next_batch().unwrap();
    assert_eq!(fresh.seq, Seq(2));
    assert_eq!(fresh.changes[0], Change::Cleared);
}

#[test]
fn resync_keeps_promised_numbers() {
    let mut outbox = joined();
    for start in 0..5 {
        outbox.push(vec![stored(start..start + 1)]);
        outbox.position();
        outbox.next_batch();
    }
    outbox.resync(Seq(2), vec![stored(0..5)]);
    let numbers: Vec<u64> = std::iter::from_fn(|| outbox.next_batch()).map(|batch| batch.seq.0).collect();
    assert_eq!(numbers, vec![2, 3, 4, 5]);
}

#[test]
fn send_window_bounds_unacknowledged_batches() {
    let mut outbox = joined();
    for start in 0..100 {
        outbox.push(vec![stored(start..start + 1)]);
        outbox.next_batch();
    }
    assert_eq!(outbox.next_batch(), None);
    outbox.ack(Seq(1));
    assert!(outbox.next_batch().is_some());
}

#[test]
fn no_batch_is_sent_between_a_fence_and_the_next_join() {
    let mut outbox = joined();
    outbox.push(vec![stored(0..1)]);
    outbox.fenced();
    outbox.push(vec![stored(1..2)]);
    assert_eq!(outbox.next_batch(), None);
    outbox.joined(Epoch(2), vec![stored(0..2)]);
    assert_eq!(outbox.next_batch().unwrap().seq, Seq(1));
}

#[derive(Clone, Debug)]
enum OutboxOp {
    Store(u64),
    Drop(u64),
    Send,
    Lose,
    Reconnect,
    Gap,
    Pile,
}

fn op() -> impl Strategy<Value = OutboxOp> {
    prop_oneof![
        6 => (0u64..50).prop_map(OutboxOp::Store),
        3 => (0u64..50).prop_map(OutboxOp::Drop),
        6 => Just(OutboxOp::Send),
        1 => Just(OutboxOp::Lose),
        1 => Just(OutboxOp::Reconnect),
        1 => Just(OutboxOp::Gap),
        1 => Just(OutboxOp::Pile),
    ]
}

/// An index that applies batches in order, and requests a resync as the real one does.
#[derive(Default)]
struct IndexReplica {
    next: u64,
    blocks: BTreeSet<BlockHash>,
}

impl IndexReplica {
    fn apply(&mut self, batch: &AnnounceBatch, outbox: &mut Outbox, everything: &BTreeSet<u64>) {
        if batch.seq.0 > self.next {
            outbox.resync(Seq(self.next), full(everything));
            return;
        }
        if batch.seq.0 == self.next {
            self.next += 1;
            for change in &batch.changes {
                match change {
                    Change::Stored { blocks, .. } => self.blocks.extend(blocks),
                    Change::Dropped { blocks, .. } => blocks.iter().for_each(|block| {
                        self.blocks.remove(block);
                    }),
                    Change::Moved { .. } => {}
                    Change::Cleared => self.blocks.clear(),
                }
            }
        }
        outbox.ack(Seq(self.next - 1));
    }
}

fn full(everything: &BTreeSet<u64>) -> Vec<Change> {
    everything.iter().map(|number| stored(*number..number + 1)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn index_and_node_agree_in_the_end(ops in prop::collection::vec(op(), 1..200)) {
        let mut outbox = joined();
        let mut replica = IndexReplica { next: 1, ..IndexReplica::default() };
        let mut held = BTreeSet::new();
        for op in ops {
            match op {
                OutboxOp::Store(number) if held.insert(number) => outbox.push(vec![stored(number..number + 1)]),
                OutboxOp::Drop(number) if held.remove(&number) => outbox.push(vec![Change::Dropped {
                    blocks: vec![hash(number)], tier: Tier::Dram, cause: Default::default() }]),
                OutboxOp::Send => if let Some(batch) = outbox.next_batch() {
                    replica.apply(&batch, &mut outbox, &held);
                },
                OutboxOp::Lose => { outbox.next_batch(); }
                OutboxOp::Reconnect => outbox.restart(),
                OutboxOp::Gap => { outbox.position(); }
                OutboxOp::Pile => outbox.discard_queued(),
                OutboxOp::Store(_) | OutboxOp::Drop(_) => {}
            }
        }
        let promised = outbox.position();
        outbox.restart();
        loop {
            if outbox.stale() {
                outbox.refill(full(&held));
            }
            let Some(batch) = outbox.next_batch() else { break };
            replica.apply(&batch, &mut outbox, &held);
        }
        let expected: BTreeSet<BlockHash> = held.iter().map(|number| hash(*number)).collect();
        prop_assert_eq!(&replica.blocks, &expected);
        if let Some((_, seq)) = promised {
            prop_assert!(replica.next > seq.0, "promised {} was never sent", seq);
        }
    }
}
