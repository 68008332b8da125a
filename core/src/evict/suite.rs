//! The behaviour suite every policy passes, and the notation its own tests are written in.
//!
//! Not here: which block a given policy prefers (each policy's tests).

#![allow(clippy::unwrap_used)]

use super::{BlockKey, BlockTraits, Policy};
use crate::id::{Category, RequestKind, Timestamp};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// One call to a policy.
#[derive(Clone, Debug)]
enum Act {
    Insert(u32, BlockTraits),
    MoveIn(u32, BlockTraits),
    Access(u32, BlockTraits),
    Settle(u32, BlockTraits),
    Remove(u32),
    Park(u32),
    Wait(u64),
    Refit,
    /// Ask for a victim while every key with a set bit is spared, and evict it.
    Evict(u64),
    /// Ask for a victim and whether it should leave for this block; if so the block comes in, and is passed if not.
    Admit(u32, BlockTraits),
}

fn any_traits() -> impl Strategy<Value = BlockTraits> {
    let fields = (0..7_u8, 0..12_u8, 0..20_u32, any::<bool>(), 0..96_u64);
    fields.prop_map(|(kind, turn, offset_blocks, is_partial, fingerprint)| BlockTraits {
        category: Category { kind: RequestKind::from_u8(kind), turn },
        offset_blocks,
        bytes: 4096,
        is_partial,
        fingerprint,
    })
}

fn any_act() -> impl Strategy<Value = Act> {
    let key = 0..48_u32;
    prop_oneof![
        4 => (key.clone(), any_traits()).prop_map(|(key, traits)| Act::Insert(key, traits)),
        1 => (key.clone(), any_traits()).prop_map(|(key, traits)| Act::MoveIn(key, traits)),
        4 => (key.clone(), any_traits()).prop_map(|(key, traits)| Act::Access(key, traits)),
        1 => (key.clone(), any_traits()).prop_map(|(key, traits)| Act::Settle(key, traits)),
        1 => key.clone().prop_map(Act::Remove),
        2 => key.prop_map(Act::Park),
        2 => (0..90_000_000_u64).prop_map(Act::Wait),
        1 => Just(Act::Refit),
        3 => any::<u64>().prop_map(Act::Evict),
        2 => (0..48_u32, any_traits()).prop_map(|(key, traits)| Act::Admit(key, traits)),
    ]
}

/// What a policy did, so that two of a kind can be compared.
#[derive(Debug, PartialEq, Eq)]
struct Trail(Vec<Option<BlockKey>>);

/// Runs `acts` and checks every answer against the plain set of resident keys.
fn run(policy: &mut dyn Policy, acts: &[Act]) -> Trail {
    let (mut resident, mut parked) = (BTreeSet::new(), BTreeSet::new());
    let mut now = Timestamp(0);
    let mut trail = Vec::new();
    for act in acts {
        match *act {
            Act::Insert(key, traits) => {
                policy.insert(BlockKey(key), traits, now);
                resident.insert(BlockKey(key));
                parked.remove(&BlockKey(key));
            }
            Act::MoveIn(key, traits) => {
                policy.moved_in(BlockKey(key), traits, now);
                resident.insert(BlockKey(key));
                parked.remove(&BlockKey(key));
            }
            Act::Access(key, traits) => {
                policy.access(BlockKey(key), traits, now);
                parked.remove(&BlockKey(key));
            }
            Act::Settle(key, traits) => {
                policy.settle(BlockKey(key), traits, now);
                parked.remove(&BlockKey(key));
            }
            Act::Remove(key) => {
                policy.remove(BlockKey(key));
                resident.remove(&BlockKey(key));
                parked.remove(&BlockKey(key));
            }
            Act::Park(key) => {
                policy.park(BlockKey(key));
                if resident.contains(&BlockKey(key)) {
                    parked.insert(BlockKey(key));
                }
            }
            Act::Wait(micros) => now.0 += micros,
            Act::Refit => policy.refit(now),
            Act::Evict(spared) => {
                let victim = checked_victim(policy, &resident, &parked, now, spared);
                if let Some(key) = victim {
                    policy.remove(key);
                    resident.remove(&key);
                }
                trail.push(victim);
            }
            Act::Admit(key, newcomer) => {
                let gone = checked_admits(policy, &resident, &parked, now, newcomer);
                trail.push(gone);
                let Some(victim) = gone else {
                    policy.pass(newcomer, now);
                    continue;
                };
                policy.remove(victim);
                resident.remove(&victim);
                policy.insert(BlockKey(key), newcomer, now);
                resident.insert(BlockKey(key));
                parked.remove(&BlockKey(key));
            }
        }
        assert_eq!(policy.len(), resident.len());
        assert_eq!(policy.is_empty(), resident.is_empty());
    }
    // Whatever was held is let go in the end, or it could not leave.
    for key in parked {
        policy.settle(key, BlockTraits::default(), now);
    }
    trail.extend(drain(policy, now).into_iter().map(Some));
    assert_eq!(trail.iter().rev().take(resident.len()).flatten().count(), resident.len());
    Trail(trail)
}

fn checked_victim(
    policy: &mut dyn Policy,
    resident: &BTreeSet<BlockKey>,
    parked: &BTreeSet<BlockKey>,
    now: Timestamp,
    spared: u64,
) -> Option<BlockKey> {
    let is_spared = |key: BlockKey| spared >> (key.0 % 64) & 1 == 1 || parked.contains(&key);
    let victim = policy.victim(now, &is_spared);
    match victim {
        Some(key) => assert!(resident.contains(&key) && !is_spared(key), "{key:?} may not leave"),
        None => assert!(resident.iter().all(|&key| is_spared(key)), "somebody could have left"),
    }
    assert_eq!(policy.victim(now, &is_spared), victim, "asking changes nothing");
    victim
}

/// Whom the policy would let go for a newcomer.
fn checked_admits(
    policy: &mut dyn Policy,
    resident: &BTreeSet<BlockKey>,
    parked: &BTreeSet<BlockKey>,
    now: Timestamp,
    newcomer: BlockTraits,
) -> Option<BlockKey> {
    let victim = checked_victim(policy, resident, parked, now, 0)?;
    let admits = policy.admits(newcomer, victim, now);
    assert_eq!(policy.admits(newcomer, victim, now), admits, "asking changes nothing");
    check_prospects(policy, now, newcomer, victim);
    assert_eq!(policy.victim(now, &|key| parked.contains(&key)), Some(victim), "nor the victim");
    admits.then_some(victim)
}

/// What a policy says of chances is one, and the same when it is asked again.
fn check_prospects(policy: &mut dyn Policy, now: Timestamp, mover: BlockTraits, victim: BlockKey) {
    let asked: Vec<f64> = (0..2)
        .flat_map(|_| {
            let into = [policy.prospect(mover, None, now), policy.prospect(mover, Some(victim), now)];
            [into[0], into[1], policy.prospect_of(victim, now)]
        })
        .collect();
    assert!(asked.iter().all(|chance| (0.0..=1.0).contains(chance)), "{asked:?}");
    assert!(asked[0] >= asked[1], "who stays longer is used as likely at least: {asked:?}");
    assert_eq!(asked[..3], asked[3..], "asking changes nothing");
}

/// Evicts everything, in the policy's order.
fn drain(policy: &mut dyn Policy, now: Timestamp) -> Vec<BlockKey> {
    let mut order = Vec::new();
    while let Some(key) = policy.victim(now, &|_| false) {
        policy.remove(key);
        order.push(key);
    }
    assert!(policy.is_empty());
    order
}

/// Holds a policy to the contract of [`Policy`].
pub(super) fn policy_suite(make: fn() -> Box<dyn Policy>) {
    empty_policy_has_no_victim(make().as_mut());
    absent_blocks_are_ignored(make().as_mut());
    keys_are_reused_after_removal(make().as_mut());
    everything_spared_is_no_victim(make().as_mut());
    proptest!(|(acts in prop::collection::vec(any_act(), 0..200))| {
        let first = run(make().as_mut(), &acts);
        prop_assert_eq!(first, run(make().as_mut(), &acts), "equal calls give equal victims");
    });
}

fn empty_policy_has_no_victim(policy: &mut dyn Policy) {
    assert!(policy.is_empty());
    assert_eq!(policy.victim(Timestamp(0), &|_| false), None);
    policy.refit(Timestamp(1_000_000_000));
}

fn absent_blocks_are_ignored(policy: &mut dyn Policy) {
    let traits = BlockTraits::default();
    policy.access(BlockKey(3), traits, Timestamp(1));
    policy.settle(BlockKey(3), traits, Timestamp(1));
    policy.remove(BlockKey(3));
    assert!(policy.is_empty());
    assert_eq!(policy.victim(Timestamp(1), &|_| false), None);
}

fn keys_are_reused_after_removal(policy: &mut dyn Policy) {
    for round in 0..5 {
        policy.insert(BlockKey(7), BlockTraits::default(), Timestamp(round));
        policy.insert(BlockKey(7), BlockTraits::default(), Timestamp(round));
        assert_eq!(policy.len(), 1);
        assert_eq!(policy.victim(Timestamp(round), &|_| false), Some(BlockKey(7)));
        policy.remove(BlockKey(7));
        assert!(policy.is_empty());
    }
}

fn everything_spared_is_no_victim(policy: &mut dyn Policy) {
    for key in 0..100 {
        policy.insert(BlockKey(key), BlockTraits::default(), Timestamp(0));
    }
    assert_eq!(policy.victim(Timestamp(1), &|_| true), None);
    assert_eq!(policy.victim(Timestamp(1), &|key| key.0 != 42), Some(BlockKey(42)));
    assert_eq!(policy.len(), 100);
}

/// Plays a script, one microsecond a word, and says in which order the blocks then leave. Words: `+K`
/// insert, `-K` remove, `useK`, `settleK`; every block is of one category and its offset is its key.
pub(super) fn eviction_order(policy: &mut dyn Policy, script: &str) -> Vec<u32> {
    let mut now = Timestamp(0);
    for word in script.split_whitespace() {
        now.0 += 1;
        let number = |prefix: &str| word.strip_prefix(prefix).map(|key| key.parse::<u32>().unwrap());
        let traits = |key: u32| BlockTraits { offset_blocks: key, ..BlockTraits::default() };
        if let Some(key) = number("+") {
            policy.insert(BlockKey(key), traits(key), now);
        } else if let Some(key) = number("-") {
            policy.remove(BlockKey(key));
        } else if let Some(key) = number("use") {
            policy.access(BlockKey(key), traits(key), now);
        } else if let Some(key) = number("settle") {
            policy.settle(BlockKey(key), traits(key), now);
        } else {
            panic!("no such word: {word}");
        }
    }
    drain(policy, now).into_iter().map(|key| key.0).collect()
}
