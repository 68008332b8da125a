//! Numbers, gaps, restarts and lies, against what the soft plane answers afterwards.
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

struct Bench {
    rank: Rank,
    residency: Arc<RwLock<Residency>>,
    registry: Registry,
    clock: Clock,
}

impl Bench {
    fn new() -> Bench {
        let (clock, registry) = (Clock::start(), Registry::new());
        let residency = Arc::new(RwLock::new(Residency::new(1_000, clock.now())));
        let manifest = IdentityManifest { block_tokens: 16, ..IdentityManifest::default() };
        let tenants = Tenants { manifest, by_salt: [].into(), without_salt: [0; 32] };
        let metrics = EngineMetrics::register(&registry).unwrap().of(INSTANCE);
        let teller = Teller::new(Arc::clone(&residency), INSTANCE, clock, UnixClock::start());
        let rank = Rank::new((Dialect::Vllm, 0), Aliases::new(Arc::new(tenants)), teller, metrics);
        Bench { rank, residency, registry, clock }
    }

    fn hear_blocks(&mut self, count: u64) {
        for number in 0..count {
            assert_eq!(self.rank.hear(&block(number)), Wants::Nothing);
        }
    }

    /// Of the blocks of tokens 0 to 159, how many the plane says are there.
    fn resident(&self) -> u64 {
        let standings = self.residency.read().resident(&ten_blocks(), self.clock.now());
        standings.first().map_or(0, |standing| standing.blocks)
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

/// The message that stores the block of this number, from 0.
fn block(number: u64) -> Message {
    let tokens: Vec<u32> = (16 * number as u32..16 * (number as u32 + 1)).collect();
    let parent = number.checked_sub(1);
    message(number, &batch(0, &[stored(&[number], parent, &tokens)]))
}

fn message(number: u64, payload: &[u8]) -> Message {
    Message { number, payload: payload.to_vec().into() }
}

#[test]
fn messages_in_order_are_what_the_plane_answers() {
    let mut bench = Bench::new();
    for number in 0..10 {
        assert_eq!(bench.rank.hear(&block(number)), Wants::Nothing);
        assert_eq!(bench.resident(), number + 1);
    }
    assert_eq!(bench.rank.hear(&block(9)), Wants::Nothing, "said twice");
    bench.rank.hear(&message(10, &batch(0, &[removed(&[3])])));
    assert_eq!(bench.resident(), 3);
    bench.rank.hear(&message(11, &batch(0, &[cleared()])));
    assert_eq!(bench.resident(), 0);
    assert_eq!(bench.count("kvfleet_engine_messages_total", "applied"), 12.0);
}

#[test]
fn a_gap_that_a_replay_fills_loses_nothing_though_it_overtakes_what_is_on_its_way() {
    let mut bench = Bench::new();
    bench.hear_blocks(3);
    assert_eq!(bench.rank.hear(&block(6)), Wants::Replay { from: 2 });
    assert_eq!(bench.resident(), 3, "what was said goes on counting");
    bench.rank.replay_begins();
    (2..10).for_each(|number| assert_eq!(bench.rank.replay(&block(number)), Goes::On));
    assert_eq!(bench.rank.replay_ends(), Goes::On);
    bench.rank.hear_after_replay(&block(6));
    (7..10).for_each(|number| assert_eq!(bench.rank.hear(&block(number)), Wants::Nothing));
    assert_eq!(bench.resident(), 10);
    assert_eq!(bench.count("kvfleet_engine_gaps_total", "filled"), 1.0);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 0.0);
}

#[test]
fn a_replay_with_a_hole_is_asked_for_again_from_what_counts() {
    let mut bench = Bench::new();
    bench.hear_blocks(3);
    bench.rank.replay_begins();
    assert_eq!([2, 3].map(|number| bench.rank.replay(&block(number))), [Goes::On; 2]);
    assert_eq!(bench.rank.replay(&block(7)), Goes::Again);
    assert_eq!((bench.resident(), bench.rank.last()), (4, Some(3)));
    bench.rank.replay_begins();
    (3..8).for_each(|number| assert_eq!(bench.rank.replay(&block(number)), Goes::On));
    assert_eq!(bench.resident(), 8);
}

#[test]
fn a_gap_that_nothing_fills_leaves_what_is_said_and_proved_again() {
    let mut bench = Bench::new();
    bench.hear_blocks(5);
    let mut behind_the_third = block(3);
    behind_the_third.number = 9;
    bench.rank.hear(&behind_the_third);
    bench.rank.hear_after_replay(&behind_the_third);
    assert_eq!(bench.resident(), 4, "the first three are before it");
    assert_eq!(bench.count("kvfleet_engine_gaps_total", "lost"), 1.0);
    let mut next = block(5);
    next.number = 10;
    assert_eq!(bench.rank.hear(&next), Wants::Nothing);
    assert_eq!(bench.resident(), 6);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 0.0);
}

#[test]
fn a_replay_that_begins_behind_the_gap_cannot_tell_whose_it_is() {
    let mut bench = Bench::new();
    bench.hear_blocks(3);
    bench.rank.hear(&block(8));
    bench.rank.replay_begins();
    let mut first_kept = block(0);
    first_kept.number = 7;
    assert_eq!(bench.rank.replay(&first_kept), Goes::FromStart);
    assert_eq!((bench.resident(), bench.rank.last()), (0, None));
    bench.rank.replay_begins();
    assert_eq!(bench.rank.replay(&first_kept), Goes::On);
    assert_eq!(bench.rank.replay(&block(8)), Goes::On);
    bench.rank.hear_after_replay(&block(8));
    assert_eq!(bench.resident(), 1);
}

#[test]
fn an_engine_that_began_anew_has_what_it_says_from_then_on() {
    let mut bench = Bench::new();
    bench.hear_blocks(5);
    // Another connection, and no replay shows whose it is.
    bench.rank.connected();
    bench.rank.asked(false);
    assert_eq!(bench.resident(), 0);
    let other = message(0, &batch(0, &[stored(&[1], None, &(500..516).collect::<Vec<_>>())]));
    assert_eq!(bench.rank.hear(&other), Wants::Nothing);
    assert_eq!(bench.resident(), 0);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 1.0);
    let mut back = block(0);
    back.number = 1;
    bench.rank.hear(&back);
    assert_eq!(bench.resident(), 1);
}

#[test]
fn numbers_that_go_back_are_another_process() {
    let mut bench = Bench::new();
    bench.hear_blocks(5);
    let other = message(0, &batch(0, &[cleared()]));
    assert_eq!(bench.rank.hear(&other), Wants::Nothing);
    assert_eq!((bench.resident(), bench.rank.last()), (0, Some(0)));
}

#[test]
fn messages_that_change_places_are_heard_anew_from_a_replay() {
    let mut bench = Bench::new();
    let replay = |bench: &mut Bench| {
        bench.rank.replay_begins();
        (0..3).for_each(|number| assert_eq!(bench.rank.replay(&block(number)), Goes::On));
        assert_eq!(bench.rank.replay_ends(), Goes::On);
    };
    bench.hear_blocks(1);
    assert_eq!(bench.rank.hear(&block(2)), Wants::Replay { from: 0 });
    replay(&mut bench);
    bench.rank.hear_after_replay(&block(2));
    assert_eq!(bench.resident(), 3);
    // Numbers of one connection rise, so this is another process until a replay has told what it has.
    assert_eq!(bench.rank.hear(&block(1)), Wants::Replay { from: 0 });
    assert_eq!((bench.resident(), bench.rank.last()), (0, None));
    replay(&mut bench);
    bench.rank.hear_after_replay(&block(1));
    assert_eq!((bench.resident(), bench.rank.last()), (3, Some(2)));
    assert_eq!(bench.rank.hear(&block(3)), Wants::Nothing);
    assert_eq!(bench.resident(), 4);
    let counts = ["filled", "lost"].map(|outcome| bench.count("kvfleet_engine_gaps_total", outcome));
    assert_eq!((counts, bench.count("kvfleet_engine_restarts_total", "")), ([2.0, 0.0], 1.0));
}

#[test]
fn messages_that_change_places_without_a_replay_leave_what_is_said_from_then_on() {
    let mut bench = Bench::new();
    bench.hear_blocks(1);
    for number in [2, 1] {
        assert_eq!(bench.rank.hear(&block(number)), Wants::Replay { from: 0 });
        bench.rank.hear_after_replay(&block(number));
        assert_eq!(bench.resident(), 0, "message {number} is behind a block that nobody knows to be there");
    }
    assert_eq!(bench.count("kvfleet_engine_left_out_blocks_total", "orphan"), 2.0);
    assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 1.0);
    for (number, of) in [(2, 0), (3, 1)] {
        let again = Message { number, ..block(of) };
        assert_eq!(bench.rank.hear(&again), Wants::Nothing);
        assert_eq!(bench.resident(), of + 1);
    }
}

#[test]
fn how_late_the_last_live_message_came_is_shown_whatever_a_replay_brings() {
    let mut bench = Bench::new();
    let made = |number, ago_s: f64| {
        let now_s = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        message(number, &batch_at(now_s - ago_s, 0, &[cleared()]))
    };
    let lag = |bench: &Bench| bench.count("kvfleet_engine_lag_seconds", "7");
    let first = made(0, 1_000.0);
    bench.rank.hear(&first);
    let before = lag(&bench);
    assert!((999.9..1_060.0).contains(&before), "{before}");
    // What a replay brings is late because it was lost.
    bench.rank.replay_begins();
    assert_eq!([first, made(1, 5_000.0)].map(|message| bench.rank.replay(&message)), [Goes::On; 2]);
    assert_eq!(lag(&bench), before);
    bench.rank.hear(&made(2, 10.0));
    let after = lag(&bench);
    assert!((9.9..70.0).contains(&after), "{after}");
    bench.rank.hear(&message(3, &batch_at(f64::NAN, 0, &[cleared()])));
    assert_eq!((lag(&bench), bench.rank.last()), (after, Some(3)), "a time that is none is no time");
}

#[test]
fn a_restart_shows_in_a_replay_that_does_not_know_our_last_message() {
    for other in [None, Some(message(4, &batch(0, &[cleared()])))] {
        let mut bench = Bench::new();
        bench.hear_blocks(5);
        bench.rank.replay_begins();
        let goes = match &other {
            Some(other) => bench.rank.replay(other),
            None => bench.rank.replay_ends(),
        };
        assert_eq!((goes, bench.resident(), bench.rank.last()), (Goes::FromStart, 0, None));
        assert_eq!(bench.count("kvfleet_engine_restarts_total", ""), 1.0);
    }
    let mut bench = Bench::new();
    bench.hear_blocks(5);
    bench.rank.connected();
    bench.rank.replay_begins();
    bench.rank.replay(&block(4));
    assert_eq!(bench.rank.replay_ends(), Goes::On);
    bench.rank.asked(true);
    assert_eq!(
        (bench.resident(), bench.rank.last()),
        (5, Some(4)),
        "the same process has said nothing since"
    );
}

#[test]
fn what_cannot_be_read_voids_what_was_said_and_ends_nothing() {
    let mut bench = Bench::new();
    bench.hear_blocks(3);
    for (number, payload) in [(3, &b""[..]), (4, b"\xc1"), (5, b"\x93\x00\xdd\xff\xff\xff\xff\x00")] {
        assert_eq!(bench.rank.hear(&message(number, payload)), Wants::Nothing);
        assert_eq!(bench.resident(), 0);
    }
    let mut next = block(0);
    next.number = 6;
    bench.rank.hear(&next);
    assert_eq!(bench.resident(), 1);
    assert_eq!(bench.count("kvfleet_engine_messages_total", "unreadable"), 3.0);
}

#[test]
fn a_message_of_another_rank_is_not_ours() {
    let mut bench = Bench::new();
    bench.rank.hear(&message(0, &batch(1, &[stored(&[0], None, &(0..16).collect::<Vec<_>>())])));
    assert_eq!(bench.resident(), 0);
    assert_eq!(bench.count("kvfleet_engine_messages_total", "other_rank"), 1.0);
}

#[test]
fn a_start_that_somebody_else_tells_of_is_believed_until_a_replay_shows_the_same_process() {
    let mut bench = Bench::new();
    bench.hear_blocks(5);
    // A load report says that the instance started since: what was told is void there.
    let later = UnixClock::start().now_ms() * 1_000 + 60_000_000;
    bench.residency.write().started(INSTANCE, later, bench.clock.now());
    for _ in 0..2 {
        bench.rank.is_there();
        assert_eq!((bench.resident(), bench.rank.is_doubted()), (0, true));
    }
    bench.rank.replay_begins();
    bench.rank.replay(&block(4));
    bench.rank.replay_ends();
    bench.rank.asked(true);
    assert_eq!((bench.resident(), bench.rank.is_doubted()), (5, false));
    // And with the next message as the first word.
    bench.residency.write().started(INSTANCE, later + 1, bench.clock.now());
    bench.rank.hear(&block(5));
    assert_eq!((bench.resident(), bench.rank.is_doubted()), (0, true));
    bench.rank.asked(false);
    assert_eq!((bench.resident(), bench.rank.is_doubted()), (0, false));
}

#[test]
fn what_the_plane_lost_is_told_again() {
    let mut bench = Bench::new();
    bench.hear_blocks(5);
    *bench.residency.write() = Residency::new(1_000, bench.clock.now());
    bench.rank.is_there();
    assert_eq!(bench.resident(), 5);
    *bench.residency.write() = Residency::new(1_000, bench.clock.now());
    bench.rank.hear(&block(5));
    assert_eq!(bench.resident(), 6);
}

#[test]
fn blocks_without_room_in_the_plane_are_counted() {
    let mut bench = Bench::new();
    *bench.residency.write() = Residency::new(3, bench.clock.now());
    bench.hear_blocks(5);
    assert_eq!((bench.resident(), bench.count("kvfleet_engine_left_out_blocks_total", "no_room")), (3, 2.0));
}

#[test]
fn blocks_that_come_and_go_in_one_message_are_told_bit_by_bit() {
    let mut bench = Bench::new();
    let mut events = Vec::new();
    for _ in 0..7 {
        events.push(stored(&[1], None, &(0..16).collect::<Vec<_>>()));
        events.push(removed(&[1]));
    }
    bench.rank.hear(&message(0, &batch(0, &events)));
    assert_eq!(bench.resident(), 0);
}
