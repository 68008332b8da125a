//! Waiting time, and what recording a decision does.

use super::*;
use crate::schedule::cost::queue_us;

#[test]
fn waiting_time_is_prefill_steps_and_running_requests() {
    let load = |queue_tokens, running, waiting, routed_tokens, routed| Load {
        queue_tokens,
        running,
        waiting,
        routed_tokens,
        routed,
    };
    for (load, us) in [
        (Load::default(), 0),
        (load(10, 0, 0, 0, 0), 1_000),
        (load(10, 0, 2, 0, 0), 3_000),
        (load(10, 5, 2, 0, 0), 3_050),
        (load(10, 5, 2, 10, 1), 5_050),
        (load(u64::MAX, u32::MAX, u32::MAX, u64::MAX, u32::MAX), u64::MAX / 1_000),
    ] {
        assert_eq!(queue_us(&ROUND, &load), us, "{load:?}");
    }
}

#[test]
fn recording_counts_what_must_be_computed_and_nothing_else() {
    let fleet = fleet(1);
    let decision = chosen(&request(4), &prefix(&[(3, &[(1, Tier::Dram)])]), &fleet);
    let mut load = Load::reported(100, 2, 3);
    record(&mut load, &decision);
    record(&mut load, &decision);
    assert_eq!(load, Load { routed_tokens: 20, routed: 2, ..Load::reported(100, 2, 3) });
    let mut full = Load { routed: u32::MAX, routed_tokens: u64::MAX, ..Load::default() };
    record(&mut full, &decision);
    assert_eq!((full.routed, full.routed_tokens), (u32::MAX, u64::MAX));
}

#[test]
fn choosing_changes_nothing() {
    let fleet = fleet(3);
    let before = format!("{fleet:?}");
    chosen(&request(4), &prefix(&[(4, &[(2, Tier::Ssd)])]), &fleet);
    assert_eq!(format!("{fleet:?}"), before);
}

#[test]
fn recorded_requests_spread_over_equal_instances() {
    let mut fleet = fleet(4);
    let mut count = [0u32; 5];
    for id in 0..40 {
        let request = RouteRequest { request: RequestId(id), ..request(4) };
        let decision = chosen(&request, &PrefixMatch::default(), &fleet);
        count[decision.instance.0 as usize] += 1;
        record(fleet.load_mut(decision.instance).unwrap(), &decision);
    }
    assert_eq!(count, [0, 10, 10, 10, 10]);
}

#[test]
fn a_report_replaces_what_was_routed() {
    let mut fleet = fleet(2);
    let decision = chosen(&request(40), &PrefixMatch::default(), &fleet);
    record(fleet.load_mut(decision.instance).unwrap(), &decision);
    assert_ne!(chosen(&request(40), &PrefixMatch::default(), &fleet).instance, decision.instance);
    *fleet.load_mut(decision.instance).unwrap() = Load::reported(0, 0, 0);
    assert_eq!(chosen(&request(40), &PrefixMatch::default(), &fleet).instance, decision.instance);
}
