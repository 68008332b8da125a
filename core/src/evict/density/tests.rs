//! Tests of the policy as a whole: what it learns decides who leaves.

#![allow(clippy::unwrap_used)]

use super::super::suite;
use super::resident::{END, SHARED};
use super::*;
use crate::id::{Category, RequestKind};
use std::collections::BTreeMap;

const SECOND: u64 = 1_000_000;

#[test]
fn keeps_the_contract() {
    suite::policy_suite(|| Box::new(Density::new()));
}

/// A tier of a few blocks told as the book tells it: a request's new blocks come in, then all are touched from
/// tail to head.
struct Tier {
    policy: Density,
    room: usize,
    keys: BTreeMap<u64, BlockKey>,
    blocks: BTreeMap<BlockKey, u64>,
    free: Vec<BlockKey>,
    /// Whether the policy is asked before a block leaves for another.
    weighs: bool,
}

impl Tier {
    fn new(room: usize) -> Self {
        let free = (0..room as u32).rev().map(BlockKey).collect();
        Tier {
            policy: Density::new(),
            room,
            keys: Default::default(),
            blocks: Default::default(),
            free,
            weighs: false,
        }
    }

    /// Serves a request for these blocks, the last partly filled if said so; gives the leading ones found.
    fn serve(&mut self, at_s: f64, kind: RequestKind, turn: u8, blocks: &[u64], open: bool) -> usize {
        let now = Timestamp((at_s * 1e6) as u64);
        self.policy.refit(now);
        let traits = |offset: usize| BlockTraits {
            category: Category { kind, turn },
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
                if self.weighs && !self.policy.admits(traits(offset), key, now) {
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
                self.policy.pass(traits(offset), now);
                continue;
            };
            match held[offset] {
                true => self.policy.access(key, traits(offset), now),
                false => self.policy.settle(key, traits(offset), now),
            }
        }
        assert!(self.policy.len() <= self.room);
        hits
    }

    fn holds(&self, block: u64) -> bool {
        self.keys.contains_key(&block)
    }
}

#[test]
fn a_partly_filled_tail_leaves_before_older_whole_blocks() {
    let mut tier = Tier::new(6);
    tier.serve(0.0, RequestKind::Text, 1, &[1, 2, 3], false);
    tier.serve(1.0, RequestKind::Text, 1, &[4, 5, 6], true);
    tier.serve(2.0, RequestKind::Text, 1, &[7], false);
    assert!(!tier.holds(6) && tier.holds(3));
}

#[test]
fn the_tail_of_a_session_leaves_before_its_head() {
    let mut tier = Tier::new(6);
    tier.serve(0.0, RequestKind::Text, 1, &[1, 2, 3], false);
    tier.serve(1.0, RequestKind::Text, 2, &[1, 2, 3, 4, 5], false);
    tier.serve(2.0, RequestKind::Text, 1, &[7, 8, 9], false);
    assert!(tier.holds(1) && tier.holds(2) && tier.holds(3) && !tier.holds(4) && !tier.holds(5));
}

#[test]
fn who_knows_nothing_evicts_the_longest_unused() {
    let mut tier = Tier::new(3);
    for (at_s, block) in [1, 2, 3, 1, 4, 5].into_iter().enumerate() {
        tier.serve(at_s as f64, RequestKind::Text, 1, &[block], false);
    }
    assert!(tier.holds(1) && tier.holds(4) && tier.holds(5));
}

/// Sessions of one kind come back long after they were evicted, those of another never do.
fn returning(tier: &mut Tier) {
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
fn uses_after_a_block_left_are_counted_so_that_it_may_stay_next_time() {
    // Room for 10 s of what comes: nothing that comes back is resident any more unless it is preferred.
    let mut tier = Tier::new(60);
    returning(&mut tier);
    let held = |offset: u64| (380..400).filter(|session| tier.holds(10 + 10 * session + offset)).count();
    assert!(held(0) >= 15, "{} sessions that will come back are held", held(0));
    assert!(held(2) <= 5, "{} sessions that will not are held", held(2));
}

#[test]
fn what_is_remembered_is_bounded_by_what_was_resident() {
    let mut tier = Tier::new(64);
    for at in 0..20_000_u64 {
        tier.serve(at as f64, RequestKind::Text, 1, &[at * 2, at * 2 + 1], false);
    }
    assert!(tier.policy.ghosts.capacity() <= 64 * ghosts::PER_RESIDENT);
    let links = size_of::<u32>() * 2 + size_of::<bool>();
    assert!(size_of::<Resident>() + links + ghosts::PER_RESIDENT * size_of::<u64>() <= 64);
}

#[test]
fn a_prompt_shared_by_sessions_outlives_their_own_blocks() {
    let mut tier = Tier::new(40);
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
fn a_session_is_told_from_a_fork_where_no_turn_is_stated() {
    let mut tier = Tier::new(40);
    tier.serve(0.0, RequestKind::Text, 0, &[1, 2, 3, 100], true);
    tier.serve(9.0, RequestKind::Text, 0, &[1, 2, 3, 4, 5, 101], true);
    tier.policy.close_run();
    let resident = |tier: &Tier, block| tier.policy.links.about(tier.keys[&block]);
    assert!(!resident(&tier, 1).has(SHARED) && resident(&tier, 4).turn == 2);
    assert!(resident(&tier, 5).has(END) && !resident(&tier, 3).has(END));
    tier.serve(12.0, RequestKind::Text, 0, &[1, 2, 8], false);
    tier.policy.close_run();
    assert!(resident(&tier, 2).has(SHARED) && !resident(&tier, 3).has(SHARED));
    assert_eq!(resident(&tier, 8).turn, 1);
}

#[test]
fn where_every_use_takes_its_time_the_newest_leaves_and_the_waiting_stay() {
    // Sessions come every second, and back after just 60 s; there is room for 30 s of them.
    let mut tier = Tier::new(60);
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
fn blocks_before_a_shared_one_are_shared_even_if_they_came_back_unknown() {
    let mut tier = Tier::new(40);
    tier.serve(0.0, RequestKind::Api, 1, &[1, 2, 3, 50], false);
    tier.serve(1.0, RequestKind::Api, 1, &[1, 2, 3, 60], false);
    // Block 1 leaves and is forgotten.
    let key = tier.keys.remove(&1).unwrap();
    tier.policy.remove(key);
    tier.blocks.remove(&key);
    tier.free.push(key);
    tier.policy.catch_up();
    tier.policy.ghosts = Ghosts::default();
    tier.policy.alive = Alive::new();
    for &key in tier.keys.values() {
        tier.policy.alive.begin(tier.policy.links.about(key).class);
    }
    tier.serve(2.0, RequestKind::Api, 1, &[1, 2, 3, 70], false);
    tier.policy.close_run();
    assert!(tier.policy.links.about(tier.keys[&1]).has(SHARED));
    assert!(!tier.policy.links.about(tier.keys[&70]).has(SHARED));
}

#[test]
fn blocks_of_one_request_are_one_observation() {
    let classes = Classes::default();
    let class = |kind| Classes::coarse(kind, 1);
    let (few, many, never) = (class(RequestKind::Text), class(RequestKind::File), class(RequestKind::Search));
    let mut evidence = Evidence::new();
    for class in [few, many, never] {
        (0..1000).for_each(|_| evidence.exposed(class, 0, 100 * SECOND));
    }
    // 500 blocks used again by one request, and by 500.
    (0..500).for_each(|_| evidence.reused(few, 3 * SECOND));
    evidence.clustered(few, 500);
    (0..500).for_each(|_| evidence.reused(many, 3 * SECOND));
    (0..500).for_each(|_| evidence.clustered(many, 1));
    let mut tables = Tables::new();
    evidence.fit(&classes, &mut tables);
    let worth = |class: Class| f64::from(tables.values[class.at()][bands::band(2 * SECOND)]);
    assert!(worth(many) > 2.0 * worth(few) && worth(few) > worth(never), "{} {}", worth(many), worth(few));
}

/// While another request holds the same blocks, each is parked as soon as it was told.
#[test]
fn what_others_hold_is_judged_with_the_rest_of_its_request() {
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
            policy.close_run();
            assert_eq!(policy.len(), blocks as usize);
        }
        let ends = (0..blocks).filter(|&key| policy.links.about(BlockKey(key)).has(END)).count();
        assert_eq!(policy.victim(Timestamp(300 * SECOND), &|_| false).is_none(), parks);
        (ends, format!("{:?}", policy.evidence))
    };
    let alone = serve(false);
    assert_eq!(alone.0, 1, "only the tail ends the prefix");
    assert_eq!(serve(true), alone);
}

/// What is remembered is looked up late, but as of its time: who does it at once counts the same and names the same.
#[test]
fn what_is_put_off_is_counted_as_if_done_at_once() {
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
                category: Category { kind: RequestKind::from_u8(random(4) as u8), turn: random(4) as u8 },
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
                11 => policy.pass(traits, now),
                _ => {
                    let victim = policy.victim(now, &|key| key.0 % 5 == step % 5);
                    victims.push(victim);
                    victim.into_iter().for_each(|key| policy.remove(key));
                }
            }
            if at_once {
                policy.catch_up();
            }
        }
        policy.catch_up();
        assert!(policy.ghosts.capacity() > 64 && victims.iter().flatten().count() > 5_000);
        (victims, format!("{:?}", policy.evidence))
    };
    assert_eq!(serve(false), serve(true));
}

/// One prompt of four blocks every second, and calls of eight blocks each of which nobody asks again.
fn prompt_and_calls(tier: &mut Tier, from_s: u64, to_s: u64) -> usize {
    let mut hits = 0;
    for second in from_s..to_s {
        let own = 1000 + second * 10;
        let blocks: Vec<u64> = (1..=4).chain(own..own + 8).collect();
        hits += tier.serve(second as f64, RequestKind::Api, 1, &blocks, false);
    }
    hits
}

#[test]
fn what_is_asked_for_once_is_not_let_in_for_what_is_asked_for_again() {
    let mut tier = Tier { weighs: true, ..Tier::new(6) };
    prompt_and_calls(&mut tier, 0, 300);
    let calls = |tier: &Tier| (1000..9000).filter(|&block| tier.holds(block)).collect::<Vec<_>>();
    let before = calls(&tier);
    assert!((1..=4).all(|block| tier.holds(block)) && before.len() <= 2, "{before:?}");
    // A call that is far larger than the tier changes nothing.
    tier.serve(300.5, RequestKind::Api, 1, &(2000..2100).collect::<Vec<_>>(), false);
    assert!((1..=4).all(|block| tier.holds(block)));
}

#[test]
fn who_was_turned_away_and_comes_again_is_let_in() {
    let mut tier = Tier { weighs: true, ..Tier::new(6) };
    prompt_and_calls(&mut tier, 0, 300);
    // Another prompt, asked for ten times as often, takes the place of the first, which nobody asks for any more.
    let mut found = 0;
    for step in 0..600 {
        found =
            tier.serve(300.0 + f64::from(step) / 10.0, RequestKind::Api, 1, &[5001, 5002, 5003, 5004], false);
    }
    assert_eq!(found, 4);
}

#[test]
fn what_is_passed_is_remembered_as_what_leaves() {
    let mut policy = Density::new();
    let traits = |offset: u32| BlockTraits {
        category: Category { kind: RequestKind::Text, turn: 1 },
        offset_blocks: offset,
        fingerprint: (u64::from(offset) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        ..BlockTraits::default()
    };
    policy.insert(BlockKey(0), traits(0), Timestamp(0));
    let tell = |policy: &mut Density, second: u64| {
        let now = Timestamp(second * SECOND);
        (1..4).rev().for_each(|offset| policy.pass(traits(offset), now));
        policy.access(BlockKey(0), traits(0), now);
        policy.close_run();
        policy.catch_up();
        [1, 2, 3].map(|offset| policy.ghosts.find(traits(offset).fingerprint, now).unwrap().0)
    };
    let first = tell(&mut policy, 1);
    assert!(first.iter().all(|memory| memory.uses == 1) && first[2].is_end && !first[1].is_end);
    let second = tell(&mut policy, 2);
    assert!(second.iter().all(|memory| memory.uses == 2), "{second:?}");
    assert_eq!(policy.len(), 1);
}
