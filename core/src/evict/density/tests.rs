//! Tests of the policy as a whole: learned statistics decide the victims.

#![allow(clippy::unwrap_used)]

use super::super::suite;
use super::resident_block::{END, SHARED};
use super::*;
use crate::id::{Category, RequestKind};
use std::collections::BTreeMap;

const SECOND: u64 = 1_000_000;

#[test]
fn keeps_the_contract() {
    suite::policy_suite(|| Box::new(Density::new()));
}

/// A small tier that calls the policy like the tier book: new blocks of a request are inserted,
/// then all are used from tail to head.
struct MockTier {
    policy: Density,
    capacity: usize,
    keys: BTreeMap<u64, BlockKey>,
    blocks: BTreeMap<BlockKey, u64>,
    free: Vec<BlockKey>,
    /// Whether admission is asked before an eviction.
    asks_admission: bool,
}

impl MockTier {
    fn new(capacity: usize) -> Self {
        let free = (0..capacity as u32).rev().map(BlockKey).collect();
        MockTier {
            policy: Density::new(),
            capacity,
            keys: Default::default(),
            blocks: Default::default(),
            free,
            asks_admission: false,
        }
    }

    /// Serves a request for these blocks, the last partly filled if `open`; returns the length of
    /// the hit prefix.
    fn serve(&mut self, at_s: f64, kind: RequestKind, turn: u8, blocks: &[u64], open: bool) -> usize {
        let now = Timestamp((at_s * 1e6) as u64);
        self.policy.refit(now);
        let traits = |offset: usize| BlockTraits {
            category: Category { kind, conversation_turn: turn },
            offset_blocks: offset as u32,
            bytes: 1,
            is_partial: open && offset + 1 == blocks.len(),
            fingerprint: (blocks[offset] + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        let hits = blocks.iter().take_while(|block| self.keys.contains_key(block)).count();
        let held: Vec<bool> = blocks.iter().map(|block| self.keys.contains_key(block)).collect();
        for (offset, &block) in blocks.iter().enumerate().filter(|&(offset, _)| !held[offset]) {
            let names = &self.blocks;
            let key = self.free.pop().or_else(|| {
                let key = self.policy.victim(now, &|key| blocks.contains(&names[&key]))?;
                if self.asks_admission && !self.policy.admits(traits(offset), key, now) {
                    return None;
                }
                self.policy.remove(key);
                Some(key)
            });
            let Some(key) = key else { break };
            if let Some(left) = self.blocks.insert(key, block) {
                self.keys.remove(&left);
            }
            self.keys.insert(block, key);
            self.policy.insert(key, traits(offset), now);
        }
        for (offset, block) in blocks.iter().enumerate().rev() {
            let Some(&key) = self.keys.get(block) else {
                self.policy.note_absent(traits(offset), now);
                continue;
            };
            match held[offset] {
                true => self.policy.access(key, traits(offset), now),
                false => self.policy.settle(key, traits(offset), now),
            }
        }
        assert!(self.policy.len() <= self.capacity);
        hits
    }

    fn holds(&self, block: u64) -> bool {
        self.keys.contains_key(&block)
    }
}

#[test]
fn a_partly_filled_tail_leaves_before_older_whole_blocks() {
    let mut tier = MockTier::new(6);
    tier.serve(0.0, RequestKind::Text, 1, &[1, 2, 3], false);
    tier.serve(1.0, RequestKind::Text, 1, &[4, 5, 6], true);
    tier.serve(2.0, RequestKind::Text, 1, &[7], false);
    assert!(!tier.holds(6) && tier.holds(3));
}

#[test]
fn the_tail_of_a_session_leaves_before_its_head() {
    let mut tier = MockTier::new(6);
    tier.serve(0.0, RequestKind::Text, 1, &[1, 2, 3], false);
    tier.serve(1.0, RequestKind::Text, 2, &[1, 2, 3, 4, 5], false);
    tier.serve(2.0, RequestKind::Text, 1, &[7, 8, 9], false);
    assert!(tier.holds(1) && tier.holds(2) && tier.holds(3) && !tier.holds(4) && !tier.holds(5));
}

#[test]
fn untrained_policy_evicts_the_longest_unused() {
    let mut tier = MockTier::new(3);
    for (at_s, block) in [1, 2, 3, 1, 4, 5].into_iter().enumerate() {
        tier.serve(at_s as f64, RequestKind::Text, 1, &[block], false);
    }
    assert!(tier.holds(1) && tier.holds(4) && tier.holds(5));
}

/// Sessions of one kind return long after their eviction, those of another never.
fn serve_returning_sessions(tier: &mut MockTier) {
    for session in 0..400_u64 {
        let at_s = session as f64;
        let block = 10 + 10 * session;
        tier.serve(at_s, RequestKind::Text, 1, &[block, block + 1], false);
        tier.serve(at_s + 0.3, RequestKind::File, 1, &[block + 2, block + 3], false);
        if let Some(before) = session.checked_sub(20) {
            let block = 10 + 10 * before;
            tier.serve(at_s + 0.6, RequestKind::Text, 2, &[block, block + 1, block + 4], false);
        }
    }
}

#[test]
fn uses_after_eviction_are_learned() {
    // Capacity for 10 s of traffic: returning blocks are resident only if the policy prefers them.
    let mut tier = MockTier::new(60);
    serve_returning_sessions(&mut tier);
    let held = |offset: u64| (380..400).filter(|session| tier.holds(10 + 10 * session + offset)).count();
    assert!(held(0) >= 15, "{} sessions that return are held", held(0));
    assert!(held(2) <= 5, "{} sessions that do not return are held", held(2));
}

#[test]
fn ghosts_are_bounded_by_residents() {
    let mut tier = MockTier::new(64);
    for at in 0..20_000_u64 {
        tier.serve(at as f64, RequestKind::Text, 1, &[at * 2, at * 2 + 1], false);
    }
    assert!(tier.policy.ghosts.capacity() <= 64 * ghosts::PER_RESIDENT);
    let links = size_of::<u32>() * 2 + size_of::<bool>();
    assert!(size_of::<ResidentBlock>() + links + ghosts::PER_RESIDENT * size_of::<u64>() <= 64);
}

#[test]
fn a_prompt_shared_by_sessions_outlives_their_own_blocks() {
    let mut tier = MockTier::new(40);
    for session in 0..200_u64 {
        let own = 1000 + 10 * session;
        let blocks: Vec<u64> = (0..4).chain(own..own + 9).collect();
        tier.serve(session as f64 * 7.0, RequestKind::Api, 0, &blocks, false);
    }
    let own: Vec<u64> = (5000..5036).collect();
    tier.serve(1401.0, RequestKind::Api, 0, &own, false);
    assert!((0..4).all(|block| tier.holds(block)));
}

#[test]
fn sessions_and_forks_are_inferred() {
    let mut tier = MockTier::new(40);
    tier.serve(0.0, RequestKind::Text, 0, &[1, 2, 3, 100], true);
    tier.serve(9.0, RequestKind::Text, 0, &[1, 2, 3, 4, 5, 101], true);
    tier.policy.finish_request();
    let resident = |tier: &MockTier, block| tier.policy.links.data(tier.keys[&block]);
    assert!(!resident(&tier, 1).has(SHARED) && resident(&tier, 4).turn == 2);
    assert!(resident(&tier, 5).has(END) && !resident(&tier, 3).has(END));
    tier.serve(12.0, RequestKind::Text, 0, &[1, 2, 8], false);
    tier.policy.finish_request();
    assert!(resident(&tier, 2).has(SHARED) && !resident(&tier, 3).has(SHARED));
    assert_eq!(resident(&tier, 8).turn, 1);
}

#[test]
fn newest_leaves_if_reuse_comes_late() {
    // Sessions arrive every second and return after exactly 60 s; capacity is 30 s of them.
    let mut tier = MockTier::new(60);
    let mut hits = 0;
    for at in 0..3000_u64 {
        tier.serve(at as f64, RequestKind::Text, 1, &[at * 2, at * 2 + 1], false);
        if let Some(before) = at.checked_sub(60) {
            hits += tier.serve(at as f64 + 0.5, RequestKind::Text, 2, &[before * 2, before * 2 + 1], false);
        }
    }
    assert!(hits > 600, "{hits} of 5880");
}

#[test]
fn blocks_before_a_shared_block_are_shared() {
    let mut tier = MockTier::new(40);
    tier.serve(0.0, RequestKind::Api, 1, &[1, 2, 3, 50], false);
    tier.serve(1.0, RequestKind::Api, 1, &[1, 2, 3, 60], false);
    // Block 1 leaves, and its ghost is lost.
    let key = tier.keys.remove(&1).unwrap();
    tier.policy.remove(key);
    tier.blocks.remove(&key);
    tier.free.push(key);
    tier.policy.run_deferred();
    tier.policy.ghosts = Ghosts::default();
    tier.policy.open_waits = OpenWaits::new();
    for &key in tier.keys.values() {
        tier.policy.open_waits.begin(tier.policy.links.data(key).class);
    }
    tier.serve(2.0, RequestKind::Api, 1, &[1, 2, 3, 70], false);
    tier.policy.finish_request();
    assert!(tier.policy.links.data(tier.keys[&1]).has(SHARED));
    assert!(!tier.policy.links.data(tier.keys[&70]).has(SHARED));
}

#[test]
fn blocks_of_one_request_are_one_observation() {
    let classes = ReuseClasses::default();
    let class = |kind| ReuseClasses::coarse(kind, 1);
    let (few, many, never) = (class(RequestKind::Text), class(RequestKind::File), class(RequestKind::Search));
    let mut evidence = Evidence::new();
    for class in [few, many, never] {
        (0..1000).for_each(|_| evidence.add_exposure(class, 0, 100 * SECOND));
    }
    // 500 blocks reused by one request, and by 500 requests.
    (0..500).for_each(|_| evidence.add_reuse(few, 3 * SECOND));
    evidence.add_cluster(few, 500);
    (0..500).for_each(|_| evidence.add_reuse(many, 3 * SECOND));
    (0..500).for_each(|_| evidence.add_cluster(many, 1));
    let mut tables = ClassTables::new();
    evidence.fit(&classes, &mut tables);
    let worth = |class: ReuseClass| f64::from(tables.values[class.index()][bands::band(2 * SECOND)]);
    assert!(worth(many) > 2.0 * worth(few) && worth(few) > worth(never), "{} {}", worth(many), worth(few));
}

/// While another request holds the same blocks, each is parked as soon as it is reported.
#[test]
fn parked_blocks_are_judged_with_their_request() {
    let serve = |parks: bool| {
        let mut policy = Density::new();
        let blocks = 20_u32;
        for round in 0..30_u64 {
            let now = Timestamp(round * 10 * SECOND);
            for offset in (0..blocks).rev() {
                let traits = BlockTraits {
                    offset_blocks: offset,
                    fingerprint: u64::from(offset + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    ..BlockTraits::default()
                };
                match round {
                    0 => policy.insert(BlockKey(offset), traits, now),
                    _ => policy.access(BlockKey(offset), traits, now),
                }
                if parks && round > 0 {
                    policy.park(BlockKey(offset));
                }
            }
            policy.finish_request();
            assert_eq!(policy.len(), blocks as usize);
        }
        let ends = (0..blocks).filter(|&key| policy.links.data(BlockKey(key)).has(END)).count();
        assert_eq!(policy.victim(Timestamp(300 * SECOND), &|_| false).is_none(), parks);
        (ends, format!("{:?}", policy.evidence))
    };
    let alone = serve(false);
    assert_eq!(alone.0, 1, "only the tail ends the prefix");
    assert_eq!(serve(true), alone);
}

/// Deferred ghost work has the same counts and victims as immediate work.
#[test]
fn deferred_work_equals_immediate_work() {
    let serve = |at_once: bool| {
        let (mut policy, mut victims, mut state) = (Density::new(), Vec::new(), 11_u64);
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let mut now = Timestamp(0);
        for step in 0..40_000 {
            let key = BlockKey(random(64) as u32);
            let traits = BlockTraits {
                category: Category {
                    kind: RequestKind::from_u8(random(4) as u8),
                    conversation_turn: random(4) as u8,
                },
                offset_blocks: random(20) as u32,
                is_partial: random(8) == 0,
                fingerprint: (random(300) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                ..BlockTraits::default()
            };
            match random(16) {
                0 => now = Timestamp(now.0 + random(90 * SECOND / 100)),
                1 => policy.refit(now),
                2 => policy.access(key, traits, now),
                3 => policy.settle(key, traits, now),
                4 => policy.park(key),
                5 => policy.remove(key),
                6 => now = Timestamp(now.0 + 1),
                7..11 => policy.insert(key, traits, now),
                11 => policy.note_absent(traits, now),
                _ => {
                    let victim = policy.victim(now, &|key| key.0 % 5 == step % 5);
                    victims.push(victim);
                    victim.into_iter().for_each(|key| policy.remove(key));
                }
            }
            if at_once {
                policy.run_deferred();
            }
        }
        policy.run_deferred();
        assert!(policy.ghosts.capacity() > 64 && victims.iter().flatten().count() > 5_000);
        (victims, format!("{:?}", policy.evidence))
    };
    assert_eq!(serve(false), serve(true));
}

/// One prompt of four blocks every second, with calls of eight blocks each that never repeat.
fn prompt_and_calls(tier: &mut MockTier, from_s: u64, to_s: u64) -> usize {
    let mut hits = 0;
    for second in from_s..to_s {
        let own = 1000 + second * 10;
        let blocks: Vec<u64> = (1..=4).chain(own..own + 8).collect();
        hits += tier.serve(second as f64, RequestKind::Api, 1, &blocks, false);
    }
    hits
}

#[test]
fn one_time_blocks_do_not_evict_reused_ones() {
    let mut tier = MockTier { asks_admission: true, ..MockTier::new(6) };
    prompt_and_calls(&mut tier, 0, 300);
    let calls = |tier: &MockTier| (1000..9000).filter(|&block| tier.holds(block)).collect::<Vec<_>>();
    let before = calls(&tier);
    assert!((1..=4).all(|block| tier.holds(block)) && before.len() <= 2, "{before:?}");
    // A call far larger than the tier changes no residency of the prompt.
    tier.serve(300.5, RequestKind::Api, 1, &(2000..2100).collect::<Vec<_>>(), false);
    assert!((1..=4).all(|block| tier.holds(block)));
}

#[test]
fn rejected_block_is_admitted_after_reuse() {
    let mut tier = MockTier { asks_admission: true, ..MockTier::new(6) };
    prompt_and_calls(&mut tier, 0, 300);
    // A second prompt, used ten times as often, replaces the first, which is no longer used.
    let mut found = 0;
    for step in 0..600 {
        found =
            tier.serve(300.0 + f64::from(step) / 10.0, RequestKind::Api, 1, &[5001, 5002, 5003, 5004], false);
    }
    assert_eq!(found, 4);
}

#[test]
fn absent_blocks_leave_ghosts() {
    let mut policy = Density::new();
    let traits = |offset: u32| BlockTraits {
        category: Category { kind: RequestKind::Text, conversation_turn: 1 },
        offset_blocks: offset,
        fingerprint: (u64::from(offset) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        ..BlockTraits::default()
    };
    policy.insert(BlockKey(0), traits(0), Timestamp(0));
    let tell = |policy: &mut Density, second: u64| {
        let now = Timestamp(second * SECOND);
        (1..4).rev().for_each(|offset| policy.note_absent(traits(offset), now));
        policy.access(BlockKey(0), traits(0), now);
        policy.finish_request();
        policy.run_deferred();
        [1, 2, 3].map(|offset| policy.ghosts.find(traits(offset).fingerprint, now).unwrap().0)
    };
    let first = tell(&mut policy, 1);
    assert!(first.iter().all(|memory| memory.uses == 1) && first[2].is_end && !first[1].is_end);
    let second = tell(&mut policy, 2);
    assert!(second.iter().all(|memory| memory.uses == 2), "{second:?}");
    assert_eq!(policy.len(), 1);
}
