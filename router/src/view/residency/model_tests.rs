//! A naive model of GPU residency against the real one under random reports; then a reporter over a
//! channel that loses, repeats and reorders.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::Tier;
use proptest::prelude::*;

use super::*;

const CHAINS: u8 = 3;
const CHAIN_BLOCKS: u8 = 8;

/// Blocks `from..to` of a chain. Chains 0 and 1 share a tag and differ from their first block on.
pub(super) fn chain(number: u8, blocks: std::ops::Range<u8>) -> Vec<BlockHash> {
    blocks
        .map(|offset| {
            let mut bytes = [0; _];
            (bytes[0], bytes[1], bytes[2]) = (number / 2 + 1, number, offset + 1);
            BlockHash(bytes)
        })
        .collect()
}

pub(super) fn stored(number: u8, blocks: std::ops::Range<u8>) -> Change {
    let parent = blocks.start.checked_sub(1).map(|before| chain(number, before..before + 1)[0]);
    Change::Stored { parent, blocks: chain(number, blocks), tier: Tier::Gpu }
}

pub(super) fn dropped(number: u8, blocks: std::ops::Range<u8>) -> Change {
    Change::Dropped { blocks: chain(number, blocks), tier: Tier::Gpu, cause: Default::default() }
}

/// One instance of the naive model.
#[derive(Clone, Debug)]
struct NaiveInstance {
    epoch: u64,
    next: u64,
    last: u64,
    heard: u64,
    moved: u64,
    blocks: BTreeSet<BlockHash>,
}

#[derive(Default)]
struct NaiveResidency {
    known: BTreeMap<u32, NaiveInstance>,
    looked: u64,
}

fn change_all(blocks: &mut BTreeSet<BlockHash>, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Stored { blocks: more, .. } => blocks.extend(more),
            Change::Dropped { blocks: gone, .. } => blocks.retain(|block| !gone.contains(block)),
            _ => blocks.clear(),
        }
    }
}

impl NaiveResidency {
    fn hear(&mut self, id: u32, epoch: u64, now: u64) -> Option<&mut NaiveInstance> {
        let fresh =
            NaiveInstance { epoch, next: 1, last: 0, heard: now, moved: now, blocks: BTreeSet::new() };
        let one = self.known.entry(id).or_insert_with(|| fresh.clone());
        if one.epoch < epoch {
            *one = fresh;
        }
        if one.epoch > epoch {
            return None;
        }
        if now - one.heard >= 2_000 && now - self.looked <= 750 && !one.blocks.is_empty() {
            one.blocks.clear();
            (one.next, one.moved) = (1, now);
        }
        one.heard = now;
        Some(one)
    }

    fn take(&mut self, id: u32, epoch: u64, batch: &Batch, now: u64) -> &'static str {
        let Some(one) = self.hear(id, epoch, now) else { return "outdated" };
        if batch.seq < one.next {
            return "duplicate";
        }
        if batch.seq > one.last {
            if one.next > one.last {
                one.moved = now;
            }
            one.last = batch.seq;
        }
        let is_full = batch.changes.first() == Some(&Change::Cleared);
        if batch.seq != one.next && !is_full {
            return "gap";
        }
        change_all(&mut one.blocks, &batch.changes);
        (one.next, one.moved) = (batch.seq + 1, now);
        "applied"
    }

    fn conclude(&mut self, id: u32, epoch: u64, last: u64, now: u64) {
        if let Some(one) = self.hear(id, epoch, now) {
            if one.next > one.last {
                one.moved = now;
            }
            one.last = one.last.max(last);
        }
    }

    fn started(&mut self, id: u32, epoch: u64, now: u64) {
        if self.known.get(&id).is_some_and(|one| one.epoch < epoch) {
            self.hear(id, epoch, now);
        }
    }

    fn look(&mut self, now: u64) {
        let late = now - self.looked > 750;
        self.looked = now;
        for one in self.known.values_mut() {
            if late {
                (one.heard, one.moved) = (now, now);
            }
            let silent = now - one.heard >= 2_000;
            let unrepaired = one.next <= one.last && now - one.moved >= 2_000;
            if !one.blocks.is_empty() && (silent || unrepaired) {
                one.blocks.clear();
                (one.next, one.moved) = (1, now);
            }
        }
        self.known.retain(|_, one| now - one.heard < 600_000);
    }

    /// (instance, leading blocks, uncertain) of instances that are not silent.
    fn resident(&self, hashes: &[BlockHash], now: u64) -> Vec<(u32, u64, bool)> {
        let of = |(id, one): (&u32, &NaiveInstance)| {
            let blocks = hashes.iter().take_while(|hash| one.blocks.contains(hash)).count() as u64;
            (blocks > 0 && now - one.heard < 2_000).then_some((*id, blocks, one.next <= one.last))
        };
        self.known.iter().filter_map(of).collect()
    }
}

pub(super) fn at(ms: u64) -> Timestamp {
    Timestamp(0).after(Duration::from_millis(1_000_000 + ms))
}

fn seen(residency: &Residency, hashes: &[BlockHash], now: Timestamp) -> Vec<(u32, u64, bool)> {
    let all = residency.resident(hashes, now).into_iter();
    all.map(|one| (one.instance.0, one.blocks, one.uncertain)).collect()
}

#[derive(Clone, Debug)]
enum ReportAct {
    /// A batch at this distance from the expected number.
    Batch {
        instance: u32,
        epoch: u64,
        ahead: i64,
        changes: Vec<Change>,
    },
    Conclude {
        instance: u32,
        epoch: u64,
        ahead: i64,
    },
    Started {
        instance: u32,
        epoch: u64,
    },
    Wait {
        ms: u64,
    },
    Look,
}

fn change() -> impl Strategy<Value = Change> {
    let blocks = (0..CHAINS, 0..CHAIN_BLOCKS, 1..=CHAIN_BLOCKS)
        .prop_map(|(number, from, len)| (number, from..(from + len).min(CHAIN_BLOCKS)));
    prop_oneof![
        6 => blocks.clone().prop_map(|(number, blocks)| stored(number, blocks)),
        3 => blocks.prop_map(|(number, blocks)| dropped(number, blocks)),
        1 => Just(Change::Cleared),
    ]
}

fn acts() -> impl Strategy<Value = Vec<ReportAct>> {
    let ahead = || prop_oneof![6 => Just(0i64), 1 => Just(-1i64), 2 => 1..4i64];
    let epoch = || prop_oneof![1 => Just(1u64), 8 => Just(2u64), 1 => Just(3u64)];
    let act = prop_oneof![
        12 => (1..4u32, epoch(), ahead(), prop::collection::vec(change(), 0..3)).prop_map(
            |(instance, epoch, ahead, changes)| ReportAct::Batch { instance, epoch, ahead, changes }),
        4 => (1..4u32, epoch(), ahead()).prop_map(
            |(instance, epoch, ahead)| ReportAct::Conclude { instance, epoch, ahead }),
        1 => (1..4u32, epoch()).prop_map(|(instance, epoch)| ReportAct::Started { instance, epoch }),
        4 => prop_oneof![8 => 0..700u64, 1 => 0..3_000u64, 1 => Just(600_000u64)].prop_map(|ms| ReportAct::Wait { ms }),
        3 => Just(ReportAct::Look),
    ];
    prop::collection::vec(act, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    /// Failing cases are shrunk and printed by proptest with their seed.
    #[test]
    fn residency_equals_the_naive_model(acts in acts()) {
        let (mut residency, mut model, mut now) = (Residency::new(1_000, at(0)), NaiveResidency::default(), 0);
        for act in acts {
            match act {
                ReportAct::Batch { instance, epoch, ahead, changes } => {
                    let next = residency.status(InstanceId(instance), at(now)).map_or(1, |one| one.seq + 1);
                    let batch = Batch { seq: next.saturating_add_signed(ahead), changes };
                    let expected = model.take(instance, epoch, &batch, now);
                    let taken = residency.apply_batch(InstanceId(instance), epoch, batch, at(now)).unwrap();
                    let taken = match taken {
                        BatchOutcome::Applied { unlisted } => { prop_assert_eq!(unlisted, 0); "applied" }
                        BatchOutcome::Duplicate => "duplicate",
                        BatchOutcome::Gap => "gap",
                        BatchOutcome::Outdated { .. } => "outdated",
                    };
                    prop_assert_eq!(taken, expected);
                }
                ReportAct::Conclude { instance, epoch, ahead } => {
                    let last = residency.status(InstanceId(instance), at(now)).map_or(0, |one| one.seq);
                    let last = last.saturating_add_signed(ahead);
                    model.conclude(instance, epoch, last, now);
                    residency.finish_report(InstanceId(instance), epoch, last, at(now)).unwrap();
                }
                ReportAct::Started { instance, epoch } => {
                    model.started(instance, epoch, now);
                    residency.observe_start(InstanceId(instance), epoch, at(now));
                }
                ReportAct::Wait { ms } => now += ms,
                ReportAct::Look => {
                    model.look(now);
                    while residency.sweep(at(now)).more {}
                }
            }
            for number in 0..CHAINS {
                let hashes = chain(number, 0..CHAIN_BLOCKS);
                prop_assert_eq!(seen(&residency, &hashes, at(now)), model.resident(&hashes, now));
            }
            let held: u64 = residency.statuses(at(now)).iter().map(|one| one.blocks).sum();
            prop_assert_eq!(held, model.known.values().map(|one| one.blocks.len() as u64).sum::<u64>());
            prop_assert_eq!(residency.reporters.len(), model.known.len());
        }
    }

    /// For any losses, repetitions, delays and router restarts: a reporter that follows the replies
    /// catches up after a few reports over a working channel.
    #[test]
    fn a_reporter_that_follows_the_replies_catches_up(
        steps in prop::collection::vec((prop::collection::vec(change(), 1..3), 0..8u8, 0..300u64), 0..60),
        kept in 1..20usize,
    ) {
        let (mut residency, mut now) = (Residency::new(1_000, at(0)), 0);
        let mut engine = BTreeSet::new();
        let mut log: Vec<Batch> = Vec::new();
        let mut next = 1;
        let settle = (0..6).map(|_| (Vec::new(), 0, 50));
        for (changes, luck, ms) in steps.into_iter().chain(settle) {
            now += ms;
            if !changes.is_empty() {
                change_all(&mut engine, &changes);
                log.push(Batch { seq: log.last().map_or(0, |last| last.seq) + 1, changes });
            }
            let last = log.last().map_or(0, |batch| batch.seq);
            let oldest = log.len().saturating_sub(kept);
            if log.get(oldest).is_some_and(|batch| batch.seq > next) {
                // The requested batches are gone: send everything under the newest number.
                let all: Vec<_> = engine.iter().copied().collect();
                let store = |block: &BlockHash| {
                    Change::Stored { parent: None, blocks: vec![*block], tier: Tier::Gpu }
                };
                let changes = [Change::Cleared].into_iter().chain(all.iter().map(store)).collect();
                log.push(Batch { seq: last + 1, changes });
                next = last + 1;
            }
            let last = log.last().map_or(0, |batch| batch.seq);
            let mut sent: Vec<_> = log.iter().filter(|batch| batch.seq >= next).cloned().collect();
            match luck {
                5 => continue,
                6 => sent.reverse(),
                7 => { residency = Residency::new(1_000, at(now)); }
                4 => { sent = sent.iter().chain(&sent).cloned().collect(); }
                3 => { sent.pop(); }
                _ => {}
            }
            for batch in sent {
                residency.apply_batch(InstanceId(1), 9, batch, at(now)).unwrap();
            }
            let status = residency.finish_report(InstanceId(1), 9, last, at(now)).unwrap().unwrap();
            next = status.seq + 1;
            prop_assert_eq!(status.uncertain, next <= last);
            while residency.sweep(at(now)).more {}
        }
        for number in 0..CHAINS {
            let hashes = chain(number, 0..CHAIN_BLOCKS);
            let held = hashes.iter().take_while(|hash| engine.contains(hash)).count() as u64;
            let expected = if held > 0 { vec![(1, held, false)] } else { vec![] };
            prop_assert_eq!(seen(&residency, &hashes, at(now)), expected);
        }
    }
}
