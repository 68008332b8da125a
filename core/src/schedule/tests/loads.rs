//! Waiting time, and what recording a decision does.

use super::*;
use crate::schedule::cost::wait;
use crate::schedule::load::Newcomer;

/// Until work that is ahead of a request that comes now is done.
fn queue_us(profile: &HardwareProfile, load: &Load) -> u64 {
    wait((profile, 1.0), load, &Newcomer { turn: NOW, by_right: None, transfer_us: 0, prefill_us: 0 }, TOLD)
        .us
}

#[test]
fn waiting_time_is_prefill_steps_and_running_requests() {
    let load = |queue_tokens, running, waiting, routed_tokens, routed| Load {
        queue_tokens,
        running,
        waiting,
        routed_tokens,
        routed,
        ..Load::default()
    };
    for (load, us) in [
        (Load::default(), 0),
        (load(10, 0, 0, 0, 0), 1_000),
        (load(10, 0, 2, 0, 0), 3_000),
        (load(10, 5, 2, 0, 0), 3_150),
        (load(10, 5, 2, 10, 1), 5_200),
        (load(u64::MAX, u32::MAX, u32::MAX, u64::MAX, u32::MAX), u64::MAX / 1_000),
    ] {
        assert_eq!(queue_us(&ROUND, &load), us, "{load:?}");
    }
}

#[test]
fn recording_counts_what_must_be_computed_and_nothing_else() {
    let fleet = fleet(1);
    let decision = chosen(&request(4), &prefix(&[(3, &[(1, Tier::Dram)])]), &fleet);
    let reported = Load::reported(100, 2, 3).after(&Load::default(), NOW);
    let mut load = reported;
    load.record(&decision, TOLD);
    load.record(&decision, TOLD);
    assert_eq!(load, Load { routed_tokens: 20, routed: 2, sent: load.sent, ..reported });
    // What the report tells of nobody knows is taken for like ours: 100 tokens beside 20.
    let last = Newcomer { turn: Timestamp(u64::MAX), by_right: None, transfer_us: 0, prefill_us: 0 };
    let ahead = load.ahead(&last, TOLD).unwrap();
    assert_eq!((ahead.work_us, ahead.known), (6 * 2 * decision.parts.prefill_us, 2));
    let mut full = Load { routed: u32::MAX, routed_tokens: u64::MAX, ..Load::default() };
    full.record(&decision, TOLD);
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
        fleet.record(&decision, NOW);
    }
    assert_eq!(count, [0, 10, 10, 10, 10]);
}

#[test]
fn a_report_replaces_what_was_routed() {
    let mut fleet = fleet(2);
    let decision = chosen(&request(40), &PrefixMatch::default(), &fleet);
    fleet.record(&decision, NOW);
    assert_ne!(chosen(&request(40), &PrefixMatch::default(), &fleet).instance, decision.instance);
    *fleet.load_mut(decision.instance).unwrap() = Load::reported(0, 0, 0);
    assert_eq!(chosen(&request(40), &PrefixMatch::default(), &fleet).instance, decision.instance);
}

/// A decision by which so many tokens are computed in this time.
fn computing(recompute_tokens: u32, prefill_us: u64) -> Decision {
    let decision = chosen(&request(4), &PrefixMatch::default(), &fleet(1));
    let parts = Prediction { prefill_us, ..decision.parts };
    Decision { recompute_tokens, parts, ..decision }
}

#[test]
fn tokens_that_wait_take_what_was_predicted_for_the_requests_sent_last() {
    let mut load = Load::default();
    for (tokens, us) in [(1_000, 100_000), (100_000, 50_000_000), (2_000, 300_000)] {
        load.record(&computing(tokens, us), TOLD);
    }
    let reported = |tokens| Load::reported(tokens, 0, 0).after(&load, NOW);
    for (tokens, us) in [
        (0, 0),
        (1_000, 150_000),
        (2_000, 300_000),
        // The long one is half done.
        (52_000, 300_000 + 25_000_000),
        (103_000, 300_000 + 50_000_000 + 100_000),
        // Others send there too: their prompts are taken for like ours.
        (206_000, 2 * (300_000 + 50_000_000 + 100_000)),
    ] {
        assert_eq!(queue_us(&ROUND, &reported(tokens)), us, "{tokens} tokens");
    }
    // Until the next report, what is routed waits too.
    let mut since = reported(2_000);
    since.record(&computing(500, 70_000), TOLD);
    assert_eq!(since.tokens_ahead(), 2_500);
    assert_eq!(queue_us(&ROUND, &since), 370_000);
}

#[test]
fn requests_that_compute_nothing_do_not_push_out_those_that_do() {
    let mut load = Load::default();
    load.record(&computing(1_000, 500_000), TOLD);
    (0..100).for_each(|_| load.record(&computing(0, 1_000), TOLD));
    assert_eq!(queue_us(&ROUND, &Load::reported(1_000, 0, 0).after(&load, NOW)), 500_000);
    (0..100).for_each(|_| load.record(&computing(u32::MAX, u64::MAX), TOLD));
    let most = queue_us(&ROUND, &Load::reported(u64::MAX, u32::MAX, u32::MAX).after(&load, NOW));
    assert!(most > u64::MAX / 2_000, "{most}");
}

#[test]
fn a_report_keeps_what_was_sent() {
    let mut fleet = fleet(1);
    let instance = *fleet.instance(InstanceId(1)).unwrap();
    fleet.record(&computing(1_000, 500_000), NOW);
    fleet.put_instance(Instance { load: Load::reported(1_000, 0, 0), ..instance });
    assert_eq!(queue_us(&ROUND, &fleet.instance(InstanceId(1)).unwrap().load), 500_000);
}

/// What instance 1 has in hand at most, over what instance 2 has, while so many requests come at once, when 1 joined at this time.
fn taken_by_a_joiner(joined_at: Option<Timestamp>, count: u64) -> f64 {
    let mut fleet = fleet(3);
    fleet.put_instance(Instance { joined_at, ..instance(1) });
    let mut taken = [0u32; 4];
    for id in 0..count {
        let request = RouteRequest { request: RequestId(id), ..request(40) };
        let decision = chosen(&request, &PrefixMatch::default(), &fleet);
        taken[decision.instance.0 as usize] += decision.recompute_tokens;
        fleet.record(&decision, NOW);
    }
    f64::from(taken[1]) / f64::from(taken[2])
}

#[test]
fn a_burst_does_not_bury_who_has_just_joined() {
    let ago = |ms: u64| Some(Timestamp(NOW.0 - ms * 1_000));
    let [new, half, settled, old] =
        [ago(0), ago(5_000), ago(10_000), None].map(|joined_at| taken_by_a_joiner(joined_at, 90));
    assert!(new <= 0.15, "{new}");
    assert!((0.35..0.6).contains(&half), "{half}");
    assert!((0.9..1.1).contains(&settled) && settled == old, "{settled} {old}");
}

#[test]
fn where_all_join_at_once_and_for_those_that_are_there_nothing_changes() {
    let mut all = fleet(3);
    (1..=3).for_each(|n| all.put_instance(Instance { joined_at: Some(NOW), ..instance(n) }));
    let request = request(4);
    assert_eq!(
        chosen(&request, &PrefixMatch::default(), &all),
        chosen(&request, &PrefixMatch::default(), &fleet(3))
    );
    // One starts again: what is sent to it starts anew, and the others cost what they cost.
    let mut fleet = fleet(3);
    fleet.record(&Decision { instance: InstanceId(1), ..computing(1_000, 500_000) }, NOW);
    let before = chosen(&request, &PrefixMatch::default(), &fleet);
    fleet.put_instance(Instance { joined_at: Some(NOW), ..instance(1) });
    let after = chosen(&request, &PrefixMatch::default(), &fleet);
    for id in [2, 3].map(InstanceId) {
        let of = |decision: &Decision| *decision.candidates.iter().find(|one| one.instance == id).unwrap();
        assert_eq!(of(&before), of(&after));
    }
    assert_eq!(queue_us(&ROUND, &fleet.instance(InstanceId(1)).unwrap().load), 0);
}

#[test]
fn who_cannot_be_chosen_is_no_instance_that_is_there_for_longer() {
    let ramps = |first: Instance, eligible: Eligible<'_>| {
        let mut fleet = fleet(3);
        fleet.put_instance(first);
        (2..=3).for_each(|n| fleet.put_instance(Instance { joined_at: Some(NOW), ..instance(n) }));
        let decision = choose_among(&request(4), &PrefixMatch::default(), eligible, &fleet, NOW).unwrap();
        decision.candidates.iter().filter(|one| one.ramp_us > 0).count()
    };
    let all = Eligible::default();
    assert_eq!(ramps(instance(1), all), 2, "it is there for longer, and open");
    assert_eq!(ramps(Instance { reported_at: Timestamp(0), ..instance(1) }, all), 0, "it fell silent");
    let full = Load::reported(QUEUE_TOKENS_MAX + 1, 0, 0);
    assert_eq!(ramps(Instance { load: full, ..instance(1) }, all), 0, "its queue is full");
    let without = Eligible { without: &[InstanceId(1)], ..all };
    assert_eq!(ramps(instance(1), without), 0, "it is left out");
}

#[test]
fn what_counts_against_a_joiner_is_told_where_it_mattered() {
    let reasons = |tokens: [u64; 2]| {
        let mut fleet = fleet(3);
        fleet.put_instance(Instance { joined_at: Some(NOW), ..instance(1) });
        let fleet = with_load(
            with_load(fleet, 2, Load::reported(tokens[0], 0, 0)),
            3,
            Load::reported(tokens[1], 0, 0),
        );
        let decision = chosen(&request(4), &PrefixMatch::default(), &fleet);
        let said = decision.reasons[..2].iter().map(Reason::to_string).collect::<Vec<_>>();
        (decision.instance.0, said)
    };
    let least = |margin_us: u64| {
        format!(
            "least cost of 3 instances (TTFT, what others wait longer, slow starts, silence), next best {margin_us} us more"
        )
    };
    // It would take 5 ms there, and counts as ten times as much.
    let spared = "instance-1 would cost less and joined of late: 45000 us count against it";
    assert_eq!(reasons([10, 20]), (2, vec![least(1_000), spared.to_owned()]));
    let joined = "it joined of late: 45000 us count against it";
    assert_eq!(reasons([1_000, 2_000]), (1, vec![least(55_000), joined.to_owned()]));
    let equal =
        "equal cost on 2 instances (TTFT, what others wait longer, slow starts, silence), spread by request";
    let (chosen, said) = reasons([10, 10]);
    assert_ne!(chosen, 1);
    assert_eq!(said, [equal, spared]);
    // Where it would not be chosen all the same, nothing is told of it.
    assert_eq!(reasons([0, 1_000]).1[1], "no live node holds the first block");
}

#[test]
fn who_is_in_time_goes_before_who_costs_less() {
    // Alone it takes 5 ms at either. Instance 1 joined of late, which counts against it; at instance 2 there are 20 ms of work.
    let mut fleet = with_load(fleet(2), 2, Load::reported(200, 0, 0));
    fleet.put_instance(Instance { joined_at: Some(NOW), ..instance(1) });
    let nothing = prefix(&[]);
    let within = |ttft_max_us| chosen(&RouteRequest { ttft_max_us, ..request(4) }, &nothing, &fleet);
    let late = |decision: &Decision| {
        let late = |reason: &Reason| matches!(reason, Reason::InTime { .. }).then_some(*reason);
        (decision.instance.0, decision.reasons.iter().find_map(late))
    };
    assert_eq!(late(&within(0)), (2, None));
    assert_eq!(late(&within(25_000)), (2, None), "it is in time there");
    assert_eq!(late(&within(10_000)), (1, Some(Reason::InTime { late: 1 })));
    assert_eq!(late(&within(1_000)), (2, None), "nobody is, and it is told so");
    assert!(within(1_000).candidates.iter().all(|candidate| candidate.is_late));
}
