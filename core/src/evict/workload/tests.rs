//! Tests of the workload-aware policy: the paper's order, compared with a model that sorts all
//! blocks.

#![allow(clippy::unwrap_used)]

use super::super::suite;
use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SECOND: u64 = 1_000_000;

fn traits(kind: RequestKind, turn: u8, offset_blocks: u32) -> BlockTraits {
    BlockTraits {
        category: Category { kind, conversation_turn: turn },
        offset_blocks,
        ..BlockTraits::default()
    }
}

fn text(offset_blocks: u32) -> BlockTraits {
    traits(RequestKind::Text, 1, offset_blocks)
}

#[test]
fn keeps_the_contract() {
    suite::policy_suite(|| Box::new(Workload::new()));
    suite::policy_suite(|| Box::new(Workload::with_model("share", WorthModel::Share)));
    suite::policy_suite(|| Box::new(Workload::with_model("posterior", WorthModel::Posterior)));
    suite::policy_suite(|| Box::new(Workload::with_model("aged", WorthModel::Aged)));
}

#[test]
fn within_a_category_the_longest_unused_leaves_first() {
    assert_eq!(suite::eviction_order(&mut Workload::new(), "+1 +2 +3 use1 +4 use2"), [3, 1, 4, 2]);
}

#[test]
fn parked_block_keeps_its_data() {
    let mut policy = Workload::new();
    for key in 0..3 {
        policy.insert(BlockKey(key), text(key), Timestamp(u64::from(key)));
    }
    policy.park(BlockKey(0));
    assert_eq!((policy.len(), policy.victim(Timestamp(5), &|_| false)), (3, Some(BlockKey(1))));
    policy.settle(BlockKey(0), text(0), Timestamp(5));
    assert_eq!(policy.victim(Timestamp(5), &|_| false), Some(BlockKey(1)));
    policy.park(BlockKey(1));
    policy.remove(BlockKey(1));
    assert_eq!((policy.len(), policy.victim(Timestamp(5), &|_| false)), (2, Some(BlockKey(2))));
}

#[test]
fn simultaneous_blocks_leave_from_the_tail() {
    for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]] {
        let mut policy = Workload::new();
        for offset in order {
            policy.insert(BlockKey(offset), text(offset), Timestamp(5));
        }
        for expected in [4, 3, 2, 1, 0] {
            let victim = policy.victim(Timestamp(9), &|_| false).unwrap();
            assert_eq!(victim, BlockKey(expected), "inserted as {order:?}");
            policy.remove(victim);
        }
    }
}

#[test]
fn two_requests_at_one_instant_are_merged_by_offset() {
    let mut policy = Workload::new();
    for request in 0..2 {
        for offset in (0..50).rev() {
            policy.insert(BlockKey(request * 50 + offset), text(offset), Timestamp(5));
        }
    }
    for round in 0..100 {
        let victim = policy.victim(Timestamp(9), &|_| false).unwrap();
        assert_eq!(victim.0 % 50, 49 - round / 2);
        policy.remove(victim);
    }
}

#[test]
fn before_the_first_fit_an_idle_api_block_leaves_before_an_idle_chat_block() {
    let mut policy = Workload::new();
    policy.insert(BlockKey(0), text(0), Timestamp(0));
    policy.insert(BlockKey(1), traits(RequestKind::Api, 1, 0), Timestamp(60 * SECOND));
    assert_eq!(policy.victim(Timestamp(200 * SECOND), &|_| false), Some(BlockKey(1)));
    // Right after its use the API block is worth more than a chat block that is idle for three
    // minutes.
    assert_eq!(policy.victim(Timestamp(60 * SECOND), &|_| false), Some(BlockKey(0)));
}

/// Uses a block of each kind every `every` seconds, then fits.
fn trained_policy(intervals: &[(RequestKind, u64)]) -> Workload {
    let mut policy = Workload::new();
    for (key, &(kind, every)) in intervals.iter().enumerate() {
        policy.clock = Timestamp(0);
        let key = BlockKey(key as u32);
        policy.insert(key, traits(kind, 1, 0), Timestamp(0));
        for at in 1..1000 {
            policy.access(key, traits(kind, 1, 0), Timestamp(at * every * SECOND));
        }
        policy.remove(key);
    }
    policy.refit(policy.clock);
    policy
}

#[test]
fn the_fit_learns_the_reuse_interval_of_each_category() {
    let policy = trained_policy(&[(RequestKind::Text, 20), (RequestKind::Search, 300)]);
    let interval = |kind| policy.curve(Category { kind, conversation_turn: 1 }).interval_us();
    assert!((interval(RequestKind::Text) - 20e6).abs() < 1.0);
    assert!((interval(RequestKind::Search) - 300e6).abs() < 1.0);
    let unseen = policy.curve(Category { kind: RequestKind::Text, conversation_turn: 2 }).interval_us();
    assert!(
        (20e6..=300e6).contains(&unseen),
        "an unseen turn takes the interval of all categories, {unseen}"
    );
}

#[test]
fn late_block_of_a_quick_category_leaves_first() {
    let mut policy = trained_policy(&[(RequestKind::Text, 20), (RequestKind::Search, 300)]);
    let start = policy.clock;
    policy.insert(BlockKey(0), traits(RequestKind::Search, 1, 0), start);
    policy.insert(BlockKey(1), traits(RequestKind::Text, 1, 0), start);
    let later = start.after(Duration::from_secs(400));
    assert_eq!(policy.victim(later, &|_| false), Some(BlockKey(1)));
}

#[test]
fn a_fit_waits_for_a_minute() {
    let mut policy = Workload::new();
    policy.insert(BlockKey(0), text(0), Timestamp(0));
    for at in 1..=1000 {
        policy.access(BlockKey(0), text(0), Timestamp(at * 1000));
    }
    let interval = |policy: &Workload| policy.curve(text(0).category).interval_us();
    policy.refit(Timestamp(59 * SECOND));
    assert!((interval(&policy) - 373e6).abs() < 1.0);
    policy.refit(Timestamp(60 * SECOND));
    assert!((interval(&policy) - 1e3).abs() < 1.0);
}

#[test]
fn settling_is_not_a_reuse() {
    let mut policy = Workload::new();
    for key in 0..10_000 {
        policy.insert(BlockKey(key), text(key), Timestamp(u64::from(key) * 1000));
        policy.settle(BlockKey(key), text(key), Timestamp(u64::from(key) * 1000 + 500));
    }
    policy.refit(Timestamp(120 * SECOND));
    assert!((policy.curve(text(0).category).interval_us() - 373e6).abs() < 1.0);
}

#[test]
fn backward_clock_keeps_the_order() {
    let mut policy = Workload::new();
    policy.insert(BlockKey(1), text(1), Timestamp(100));
    policy.insert(BlockKey(2), text(0), Timestamp(40));
    assert_eq!(policy.victim(Timestamp(10), &|_| false), Some(BlockKey(1)));
    policy.remove(BlockKey(1));
    assert_eq!(policy.victim(Timestamp(10), &|_| false), Some(BlockKey(2)));
}

#[test]
fn late_turns_share_a_queue_and_a_category_never_overflows() {
    for kind in RequestKind::ALL {
        assert_eq!(
            queue_index(Category { kind, conversation_turn: 7 }),
            queue_index(Category { kind, conversation_turn: 255 })
        );
    }
    let last = queue_index(Category { kind: RequestKind::Thinking, conversation_turn: 255 });
    assert_eq!(last + 1, CATEGORIES);
    assert_eq!(last + 1, Workload::new().observed.len());
}

/// The policy as the paper states it: scan every block, take the lowest `(probability, −offset)`.
#[derive(Default)]
struct SortedModel(BTreeMap<u32, (BlockTraits, u64)>);

impl SortedModel {
    /// Ranks by the log probability, which sorts like the probability.
    fn rank(&self, policy: &Workload, key: u32, now: u64) -> (f64, i64) {
        let (traits, last_use) = &self.0[&key];
        let chance = policy.curve(traits.category).ln_reuse_prob(now - last_use);
        (chance, -i64::from(traits.offset_blocks))
    }
}

proptest! {
    #[test]
    fn the_victim_is_the_lowest_of_all_blocks(
        acts in prop::collection::vec((0..40_u32, 0..7_u8, 0..10_u8, 0..6_u32, 0..3_u8, 0..30_000_000_u64), 1..150),
        spared in any::<u64>(),
    ) {
        let (mut policy, mut model, mut now) = (Workload::new(), SortedModel::default(), 0);
        for (key, kind, turn, offset, act, wait) in acts {
            // Half of the calls come at the same instant, like the blocks of a request.
            now += wait * (wait & 1);
            let traits = traits(RequestKind::from_u8(kind), turn, offset);
            match act {
                0 => policy.insert(BlockKey(key), traits, Timestamp(now)),
                1 if model.0.contains_key(&key) => policy.access(BlockKey(key), traits, Timestamp(now)),
                1 => continue,
                _ => {
                    policy.remove(BlockKey(key));
                    model.0.remove(&key);
                    continue;
                }
            }
            model.0.insert(key, (traits, now));
        }
        let may_leave = |key: u32| spared >> key & 1 == 0;
        let victim = policy.victim(Timestamp(now), &|key| !may_leave(key.0));
        let lowest = model.0.keys().filter(|&&key| may_leave(key)).map(|&key| model.rank(&policy, key, now))
            .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        prop_assert_eq!(victim.map(|key| model.rank(&policy, key.0, now)), lowest);
    }
}
