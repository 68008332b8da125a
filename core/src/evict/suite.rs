//! The behaviour suite that every policy passes, and the notation of the policies' own tests. Public
//! for policies of other crates.
//!
//! Not here: which block a given policy prefers (each policy's tests), and the generator of random
//! numbers (the caller's).

#![allow(clippy::unwrap_used)]

use super::{BlockKey, BlockTraits, Policy};
use crate::id::{Category, RequestKind, Timestamp};
use std::collections::BTreeSet;

/// Length of generated sequences of calls: enough to fill a small tier several times.
pub const CALLS_MAX: usize = 200;

/// One call to a policy.
#[derive(Clone, Debug)]
enum PolicyCall {
    Insert(u32, BlockTraits),
    MoveIn(u32, BlockTraits),
    Access(u32, BlockTraits),
    Settle(u32, BlockTraits),
    Remove(u32),
    Park(u32),
    Wait(u64),
    Refit,
    /// Evicts the victim while every key with a set bit is protected.
    Evict(u64),
    /// Asks for a victim and whether to admit this block for it; then inserts the block or reports
    /// it absent.
    Admit(u32, BlockTraits),
}

impl PolicyCall {
    /// The call that two numbers mean. The first chooses call and key, the second has the rest.
    fn decode([choice, rest]: [u64; 2]) -> PolicyCall {
        let key = ((choice >> 32) % 48) as u32;
        let traits = BlockTraits {
            category: Category {
                kind: RequestKind::from_u8((rest % 7) as u8),
                conversation_turn: (rest >> 8) as u8 % 12,
            },
            offset_blocks: (rest >> 16) as u32 % 20,
            bytes: 4096,
            is_partial: rest >> 40 & 1 == 1,
            fingerprint: (rest >> 48) % 96,
        };
        match choice % 21 {
            0..=3 => PolicyCall::Insert(key, traits),
            4 => PolicyCall::MoveIn(key, traits),
            5..=8 => PolicyCall::Access(key, traits),
            9 => PolicyCall::Settle(key, traits),
            10 => PolicyCall::Remove(key),
            11..=12 => PolicyCall::Park(key),
            13..=14 => PolicyCall::Wait(rest % 90_000_000),
            15 => PolicyCall::Refit,
            16..=18 => PolicyCall::Evict(rest),
            _ => PolicyCall::Admit(key, traits),
        }
    }
}

/// The victims of a run, for comparison.
#[derive(Debug, PartialEq, Eq)]
struct VictimTrace(Vec<Option<BlockKey>>);

/// Runs `acts` and checks every answer against the plain set of resident keys.
fn check_calls(policy: &mut dyn Policy, acts: &[PolicyCall]) -> VictimTrace {
    let (mut resident, mut parked) = (BTreeSet::new(), BTreeSet::new());
    let mut now = Timestamp(0);
    let mut trail = Vec::new();
    for act in acts {
        match *act {
            PolicyCall::Insert(key, traits) => {
                policy.insert(BlockKey(key), traits, now);
                resident.insert(BlockKey(key));
                parked.remove(&BlockKey(key));
            }
            PolicyCall::MoveIn(key, traits) => {
                policy.insert_moved(BlockKey(key), traits, now);
                resident.insert(BlockKey(key));
                parked.remove(&BlockKey(key));
            }
            PolicyCall::Access(key, traits) => {
                policy.access(BlockKey(key), traits, now);
                parked.remove(&BlockKey(key));
            }
            PolicyCall::Settle(key, traits) => {
                policy.settle(BlockKey(key), traits, now);
                parked.remove(&BlockKey(key));
            }
            PolicyCall::Remove(key) => {
                policy.remove(BlockKey(key));
                resident.remove(&BlockKey(key));
                parked.remove(&BlockKey(key));
            }
            PolicyCall::Park(key) => {
                policy.park(BlockKey(key));
                if resident.contains(&BlockKey(key)) {
                    parked.insert(BlockKey(key));
                }
            }
            PolicyCall::Wait(micros) => now.0 += micros,
            PolicyCall::Refit => policy.refit(now),
            PolicyCall::Evict(spared) => {
                let victim = checked_victim(policy, &resident, &parked, now, spared);
                if let Some(key) = victim {
                    policy.remove(key);
                    resident.remove(&key);
                }
                trail.push(victim);
            }
            PolicyCall::Admit(key, newcomer) => {
                let gone = checked_admits(policy, &resident, &parked, now, newcomer);
                trail.push(gone);
                let Some(victim) = gone else {
                    policy.note_absent(newcomer, now);
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
    // Parked blocks are released first, so that every block can leave.
    for key in parked {
        policy.settle(key, BlockTraits::default(), now);
    }
    trail.extend(drain(policy, now).into_iter().map(Some));
    assert_eq!(trail.iter().rev().take(resident.len()).flatten().count(), resident.len());
    VictimTrace(trail)
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
        Some(key) => assert!(resident.contains(&key) && !is_spared(key), "{key:?} must not be evicted"),
        None => assert!(resident.iter().all(|&key| is_spared(key)), "a block could have been evicted"),
    }
    assert_eq!(policy.victim(now, &is_spared), victim, "victim must be repeatable");
    victim
}

/// The block that the policy would evict for a newcomer.
fn checked_admits(
    policy: &mut dyn Policy,
    resident: &BTreeSet<BlockKey>,
    parked: &BTreeSet<BlockKey>,
    now: Timestamp,
    newcomer: BlockTraits,
) -> Option<BlockKey> {
    let victim = checked_victim(policy, resident, parked, now, 0)?;
    let admits = policy.admits(newcomer, victim, now);
    assert_eq!(policy.admits(newcomer, victim, now), admits, "admits must be repeatable");
    check_reuse_probs(policy, now, newcomer, victim);
    assert_eq!(policy.victim(now, &|key| parked.contains(&key)), Some(victim), "admits must keep the victim");
    admits.then_some(victim)
}

/// Checks that reuse probabilities are within 0 to 1 and repeatable.
fn check_reuse_probs(policy: &mut dyn Policy, now: Timestamp, mover: BlockTraits, victim: BlockKey) {
    let asked: Vec<f64> = (0..2)
        .flat_map(|_| {
            let into = [
                policy.reuse_prob_if_moved_in(mover, None, now),
                policy.reuse_prob_if_moved_in(mover, Some(victim), now),
            ];
            [into[0], into[1], policy.reuse_prob_if_kept(victim, now)]
        })
        .collect();
    assert!(asked.iter().all(|chance| (0.0..=1.0).contains(chance)), "{asked:?}");
    assert!(
        asked[0] >= asked[1],
        "a block that stays longer must be at least as likely to be used: {asked:?}"
    );
    assert_eq!(asked[..3], asked[3..], "probabilities must be repeatable");
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

/// Checks the contract of [`Policy`] in fixed situations.
///
/// # Panics
/// If the policy breaks the contract.
pub fn check_situations(make: fn() -> Box<dyn Policy>) {
    empty_policy_has_no_victim(make().as_mut());
    absent_blocks_are_ignored(make().as_mut());
    keys_are_reused_after_removal(make().as_mut());
    protected_blocks_are_no_victims(make().as_mut());
}

/// Checks the contract of [`Policy`] on one sequence of calls, each given by two random numbers.
///
/// # Panics
/// If the policy breaks the contract.
pub fn check_sequence(make: fn() -> Box<dyn Policy>, numbers: &[[u64; 2]]) {
    let calls: Vec<PolicyCall> = numbers.iter().copied().map(PolicyCall::decode).collect();
    let first = check_calls(make().as_mut(), &calls);
    assert_eq!(first, check_calls(make().as_mut(), &calls), "equal calls give equal victims: {calls:?}");
}

/// Checks a policy against the contract of [`Policy`].
#[cfg(test)]
pub(super) fn policy_suite(make: fn() -> Box<dyn Policy>) {
    use proptest::prelude::*;
    check_situations(make);
    proptest!(|(numbers in prop::collection::vec(any::<[u64; 2]>(), 0..CALLS_MAX))| {
        check_sequence(make, &numbers);
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

fn protected_blocks_are_no_victims(policy: &mut dyn Policy) {
    for key in 0..100 {
        policy.insert(BlockKey(key), BlockTraits::default(), Timestamp(0));
    }
    assert_eq!(policy.victim(Timestamp(1), &|_| true), None);
    assert_eq!(policy.victim(Timestamp(1), &|key| key.0 != 42), Some(BlockKey(42)));
    assert_eq!(policy.len(), 100);
}

/// Plays a script, one microsecond a word, and returns the keys in eviction order. Words: `+K`
/// insert, `-K` remove, `useK`, `settleK`. All blocks share a category; the offset of a block is
/// its key.
///
/// # Panics
/// If the script has another word.
pub fn eviction_order(policy: &mut dyn Policy, script: &str) -> Vec<u32> {
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
            panic!("unknown script word: {word}");
        }
    }
    drain(policy, now).into_iter().map(|key| key.0).collect()
}
