//! Numbers, gaps, restarts and inconsistencies, checked against the resulting residency.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_core::id::{BlockHash, InstanceId};
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use parking_lot::RwLock;
use prometheus::Registry;

use super::*;
use crate::clock::{Clock, UnixClock};
use crate::engines::metrics::EngineMetrics;
use crate::engines::tenants::Tenants;
use crate::engines::tests::{batch, batch_at, cleared, removed, stored};
use crate::view::residency::Residency;

const INSTANCE: InstanceId = InstanceId(7);

struct RankBench {
    rank: RankState,
    residency: Arc<RwLock<Residency>>,
    registry: Registry,
    clock: Clock,
}

impl RankBench {
    fn new() -> RankBench {
        let (clock, registry) = (Clock::start(), Registry::new());
        let residency = Arc::new(RwLock::new(Residency::new(1_000, clock.now())));
        let manifest = IdentityManifest { block_tokens: 16, ..IdentityManifest::default() };
        let tenants = Tenants {
            manifest,
            secrets_by_salt: [].into(),
            salts_by_tenant: [].into(),
            default_secret: [0; 32],
        };
        let metrics = EngineMetrics::register(&registry).unwrap().for_rank(INSTANCE);
        let reporter = ResidencyReporter::new(Arc::clone(&residency), INSTANCE, clock, UnixClock::start());
        let rank = RankState::new(Dialect::Vllm, 0, Aliases::new(Arc::new(tenants)), reporter, metrics);
        RankBench { rank, residency, registry, clock }
    }

    fn hear_blocks(&mut self, count: u64) {
        for number in 0..count {
            assert_eq!(self.rank.receive(&block(number)), NextStep::Continue);
        }
    }

    /// Number of leading resident blocks of tokens 0 to 159.
    fn resident(&self) -> u64 {
        let statuses = self.residency.read().resident(&ten_blocks(), self.clock.now());
        statuses.first().map_or(0, |status| status.blocks)
    }

    fn count(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let metrics = family.into_iter().flat_map(|family| family.get_metric());
        let has = |metric: &&prometheus::proto::Metric| {
            label.is_empty() || metric.get_label().iter().any(|pair| pair.value() == label)
        };
        metrics
            .filter(has)
            .map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value())
            .sum()
    }
}

fn ten_blocks() -> Vec<BlockHash> {
    let manifest = IdentityManifest { block_tokens: 16, ..IdentityManifest::default() };
    PrefixHasher::new(&manifest, &[0; 32]).blocks(&(0..160).collect::<Vec<_>>())
}

/// The message that stores the block with this number, counted from 0.
fn block(number: u64) -> EngineMessage {
    let tokens: Vec<u32> = (16 * number as u32..16 * (number as u32 + 1)).collect();
    let parent = number.checked_sub(1);
    message(number, &batch(0, &[stored(&[number], parent, &tokens)]))
}

fn message(number: u64, payload: &[u8]) -> EngineMessage {
    EngineMessage { number, payload: payload.to_vec().into() }
}

#[test]
fn messages_in_order_are_applied() {
    let mut bench = RankBench::new();
    for number in 0..10 {
        assert_eq!(bench.rank.receive(&block(number)), NextStep::Continue);
        assert_eq!(bench.resident(), number + 1);
    }
    assert_eq!(bench.rank.receive(&block(9)), NextStep::Continue, "repeated");
    bench.rank.receive(&message(10, &batch(0, &[removed(&[3])])));
    assert_eq!(bench.resident(), 3);
    bench.rank.receive(&message(11, &batch(0, &[cleared()])));
    assert_eq!(bench.resident(), 0);
    assert_eq!(bench.count("kvfleet_engine_messages_total", "applied"), 12.0);
}

#[test]
fn a_filled_gap_loses_no_block() {
    let mut bench = RankBench::new();
    bench.hear_blocks(3);
    assert_eq!(bench.rank.receive(&block(6)), NextStep::Replay { from: 2 });
    assert_eq!(bench.resident(), 3, "earlier blocks still count");
    bench.rank.begin_replay();
    (2..10).for_each(|number| assert_eq!(bench.rank.receive_replayed(&block(number)), ReplayStep::Continue));
    assert_eq!(bench.rank.end_replay(), ReplayStep::Continue);
    bench.rank.receive_after_replay(&block(6));
    (7..10).for_each(|number| assert_eq!(bench.rank.receive(&block(number)), NextStep::Continue));
    assert_eq!(bench.resident(), 10);
    assert_eq!(bench.count("kvfleet_engine_gaps_total", "filled"), 1.0);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 0.0);
}

#[test]
fn a_replay_with_a_hole_is_retried() {
    let mut bench = RankBench::new();
    bench.hear_blocks(3);
    bench.rank.begin_replay();
    assert_eq!([2, 3].map(|number| bench.rank.receive_replayed(&block(number))), [ReplayStep::Continue; 2]);
    assert_eq!(bench.rank.receive_replayed(&block(7)), ReplayStep::Retry);
    assert_eq!((bench.resident(), bench.rank.last()), (4, Some(3)));
    bench.rank.begin_replay();
    (3..8).for_each(|number| assert_eq!(bench.rank.receive_replayed(&block(number)), ReplayStep::Continue));
    assert_eq!(bench.resident(), 8);
}

#[test]
fn an_unfilled_gap_leaves_stored_and_proved_blocks() {
    let mut bench = RankBench::new();
    bench.hear_blocks(5);
    let mut behind_the_third = block(3);
    behind_the_third.number = 9;
    bench.rank.receive(&behind_the_third);
    bench.rank.receive_after_replay(&behind_the_third);
    assert_eq!(bench.resident(), 4, "the first three are its ancestors");
    assert_eq!(bench.count("kvfleet_engine_gaps_total", "lost"), 1.0);
    let mut next = block(5);
    next.number = 10;
    assert_eq!(bench.rank.receive(&next), NextStep::Continue);
    assert_eq!(bench.resident(), 6);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 0.0);
}

#[test]
fn a_replay_that_begins_after_the_gap_is_ambiguous() {
    let mut bench = RankBench::new();
    bench.hear_blocks(3);
    bench.rank.receive(&block(8));
    bench.rank.begin_replay();
    let mut first_kept = block(0);
    first_kept.number = 7;
    assert_eq!(bench.rank.receive_replayed(&first_kept), ReplayStep::Restart);
    assert_eq!((bench.resident(), bench.rank.last()), (0, None));
    bench.rank.begin_replay();
    assert_eq!(bench.rank.receive_replayed(&first_kept), ReplayStep::Continue);
    assert_eq!(bench.rank.receive_replayed(&block(8)), ReplayStep::Continue);
    bench.rank.receive_after_replay(&block(8));
    assert_eq!(bench.resident(), 1);
}

#[test]
fn a_restarted_engine_has_only_new_blocks() {
    let mut bench = RankBench::new();
    bench.hear_blocks(5);
    // A new connection that no replay confirms.
    bench.rank.connected();
    bench.rank.confirm(false);
    assert_eq!(bench.resident(), 0);
    let other = message(0, &batch(0, &[stored(&[1], None, &(500..516).collect::<Vec<_>>())]));
    assert_eq!(bench.rank.receive(&other), NextStep::Continue);
    assert_eq!(bench.resident(), 0);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 1.0);
    let mut back = block(0);
    back.number = 1;
    bench.rank.receive(&back);
    assert_eq!(bench.resident(), 1);
}

#[test]
fn decreasing_numbers_mean_another_process() {
    let mut bench = RankBench::new();
    bench.hear_blocks(5);
    let other = message(0, &batch(0, &[cleared()]));
    assert_eq!(bench.rank.receive(&other), NextStep::Continue);
    assert_eq!((bench.resident(), bench.rank.last()), (0, Some(0)));
}

#[test]
fn reordered_messages_are_replayed() {
    let mut bench = RankBench::new();
    let replay = |bench: &mut RankBench| {
        bench.rank.begin_replay();
        (0..3)
            .for_each(|number| assert_eq!(bench.rank.receive_replayed(&block(number)), ReplayStep::Continue));
        assert_eq!(bench.rank.end_replay(), ReplayStep::Continue);
    };
    bench.hear_blocks(1);
    assert_eq!(bench.rank.receive(&block(2)), NextStep::Replay { from: 0 });
    replay(&mut bench);
    bench.rank.receive_after_replay(&block(2));
    assert_eq!(bench.resident(), 3);
    // Numbers of one connection increase, so this is another process until a replay shows its
    // messages.
    assert_eq!(bench.rank.receive(&block(1)), NextStep::Replay { from: 0 });
    assert_eq!((bench.resident(), bench.rank.last()), (0, None));
    replay(&mut bench);
    bench.rank.receive_after_replay(&block(1));
    assert_eq!((bench.resident(), bench.rank.last()), (3, Some(2)));
    assert_eq!(bench.rank.receive(&block(3)), NextStep::Continue);
    assert_eq!(bench.resident(), 4);
    let counts = ["filled", "lost"].map(|outcome| bench.count("kvfleet_engine_gaps_total", outcome));
    assert_eq!((counts, bench.count("kvfleet_engine_restarts_total", "")), ([2.0, 0.0], 1.0));
}

#[test]
fn reordered_messages_without_a_replay_leave_later_blocks() {
    let mut bench = RankBench::new();
    bench.hear_blocks(1);
    for number in [2, 1] {
        assert_eq!(bench.rank.receive(&block(number)), NextStep::Replay { from: 0 });
        bench.rank.receive_after_replay(&block(number));
        assert_eq!(bench.resident(), 0, "the ancestors of message {number} are unproved");
    }
    assert_eq!(bench.count("kvfleet_engine_unmapped_blocks_total", "orphan"), 2.0);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 1.0);
    for (number, of) in [(2, 0), (3, 1)] {
        let again = EngineMessage { number, ..block(of) };
        assert_eq!(bench.rank.receive(&again), NextStep::Continue);
        assert_eq!(bench.resident(), of + 1);
    }
}

#[test]
fn the_lag_metric_ignores_replays() {
    let mut bench = RankBench::new();
    let made = |number, ago_s: f64| {
        let now_s = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        message(number, &batch_at(now_s - ago_s, 0, &[cleared()]))
    };
    let lag = |bench: &RankBench| bench.count("kvfleet_engine_lag_seconds", "7");
    let first = made(0, 1_000.0);
    bench.rank.receive(&first);
    let before = lag(&bench);
    assert!((999.9..1_060.0).contains(&before), "{before}");
    // Replayed messages are late because they were lost.
    bench.rank.begin_replay();
    assert_eq!(
        [first, made(1, 5_000.0)].map(|message| bench.rank.receive_replayed(&message)),
        [ReplayStep::Continue; 2]
    );
    assert_eq!(lag(&bench), before);
    bench.rank.receive(&made(2, 10.0));
    let after = lag(&bench);
    assert!((9.9..70.0).contains(&after), "{after}");
    bench.rank.receive(&message(3, &batch_at(f64::NAN, 0, &[cleared()])));
    assert_eq!((lag(&bench), bench.rank.last()), (after, Some(3)), "an invalid time is ignored");
}

#[test]
fn a_replay_without_our_last_message_reveals_a_restart() {
    for other in [None, Some(message(4, &batch(0, &[cleared()])))] {
        let mut bench = RankBench::new();
        bench.hear_blocks(5);
        bench.rank.begin_replay();
        let step = match &other {
            Some(other) => bench.rank.receive_replayed(other),
            None => bench.rank.end_replay(),
        };
        assert_eq!((step, bench.resident(), bench.rank.last()), (ReplayStep::Restart, 0, None));
        assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 1.0);
    }
    let mut bench = RankBench::new();
    bench.hear_blocks(5);
    bench.rank.connected();
    bench.rank.begin_replay();
    bench.rank.receive_replayed(&block(4));
    assert_eq!(bench.rank.end_replay(), ReplayStep::Continue);
    bench.rank.confirm(true);
    assert_eq!(
        (bench.resident(), bench.rank.last()),
        (5, Some(4)),
        "the same process has sent no message since"
    );
}

#[test]
fn an_unreadable_message_invalidates_residency() {
    let mut bench = RankBench::new();
    bench.hear_blocks(3);
    for (number, payload) in [(3, &b""[..]), (4, b"\xc1"), (5, b"\x93\x00\xdd\xff\xff\xff\xff\x00")] {
        assert_eq!(bench.rank.receive(&message(number, payload)), NextStep::Continue);
        assert_eq!(bench.resident(), 0);
    }
    let mut next = block(0);
    next.number = 6;
    bench.rank.receive(&next);
    assert_eq!(bench.resident(), 1);
    assert_eq!(bench.count("kvfleet_engine_messages_total", "unreadable"), 3.0);
}

#[test]
fn a_message_of_another_rank_is_ignored() {
    let mut bench = RankBench::new();
    bench.rank.receive(&message(0, &batch(1, &[stored(&[0], None, &(0..16).collect::<Vec<_>>())])));
    assert_eq!(bench.resident(), 0);
    assert_eq!(bench.count("kvfleet_engine_messages_total", "other_rank"), 1.0);
}

#[test]
fn a_reported_start_counts_until_a_replay_refutes_it() {
    let mut bench = RankBench::new();
    bench.hear_blocks(5);
    // A load report says that the instance restarted: its blocks are invalidated.
    let later = UnixClock::start().now_ms() * 1_000 + 60_000_000;
    bench.residency.write().observe_start(INSTANCE, later, bench.clock.now());
    for _ in 0..2 {
        bench.rank.keepalive();
        assert_eq!((bench.resident(), bench.rank.is_unconfirmed()), (0, true));
    }
    bench.rank.begin_replay();
    bench.rank.receive_replayed(&block(4));
    bench.rank.end_replay();
    bench.rank.confirm(true);
    assert_eq!((bench.resident(), bench.rank.is_unconfirmed()), (5, false));
    // The same, with the next message as the first sign.
    bench.residency.write().observe_start(INSTANCE, later + 1, bench.clock.now());
    bench.rank.receive(&block(5));
    assert_eq!((bench.resident(), bench.rank.is_unconfirmed()), (0, true));
    bench.rank.confirm(false);
    assert_eq!((bench.resident(), bench.rank.is_unconfirmed()), (0, false));
}

#[test]
fn lost_residency_is_reported_again() {
    let mut bench = RankBench::new();
    bench.hear_blocks(5);
    *bench.residency.write() = Residency::new(1_000, bench.clock.now());
    bench.rank.keepalive();
    assert_eq!(bench.resident(), 5);
    *bench.residency.write() = Residency::new(1_000, bench.clock.now());
    bench.rank.receive(&block(5));
    assert_eq!(bench.resident(), 6);
}

#[test]
fn blocks_above_the_limit_are_counted() {
    let mut bench = RankBench::new();
    *bench.residency.write() = Residency::new(3, bench.clock.now());
    bench.hear_blocks(5);
    assert_eq!((bench.resident(), bench.count("kvfleet_engine_unmapped_blocks_total", "no_room")), (3, 2.0));
}

#[test]
fn large_messages_are_reported_in_batches() {
    let mut bench = RankBench::new();
    let mut events = Vec::new();
    for _ in 0..7 {
        events.push(stored(&[1], None, &(0..16).collect::<Vec<_>>()));
        events.push(removed(&[1]));
    }
    bench.rank.receive(&message(0, &batch(0, &events)));
    assert_eq!(bench.resident(), 0);
}
