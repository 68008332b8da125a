//! Waiting time, and recording of decisions.

use super::*;
use crate::schedule::fleet::load::Newcomer;
use crate::schedule::predict::cost::queue_wait;

/// Time until the work ahead of a request that comes now is done.
fn queue_us(profile: &HardwareProfile, load: &Load) -> u64 {
    queue_wait(
        profile,
        1.0,
        load,
        &Newcomer { priority_deadline: NOW, unprioritized_deadline: None, transfer_us: 0, prefill_us: 0 },
        JUST_REPORTED,
    )
    .us
}

#[test]
fn wait_is_prefill_steps_and_running_requests() {
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
fn recording_counts_tokens_to_compute_only() {
    let fleet = fleet(1);
    let decision = chosen(&request(4), &prefix(&[(3, &[(1, Tier::Dram)])]), &fleet);
    let reported = Load::reported(100, 2, 3).carry_over(&Load::default(), NOW);
    let mut load = reported;
    load.record(&decision, JUST_REPORTED);
    load.record(&decision, JUST_REPORTED);
    assert_eq!(load, Load { routed_tokens: 20, routed: 2, queue: load.queue, ..reported });
    // Reported tokens of unknown requests count like known ones: 100 tokens beside 20.
    let last = Newcomer {
        priority_deadline: Timestamp(u64::MAX),
        unprioritized_deadline: None,
        transfer_us: 0,
        prefill_us: 0,
    };
    let ahead = load.forecast(&last, JUST_REPORTED).unwrap();
    assert_eq!((ahead.work_us, ahead.known_requests), (6 * 2 * decision.uncorrected.prefill_us, 2));
    let mut full = Load { routed: u32::MAX, routed_tokens: u64::MAX, ..Load::default() };
    full.record(&decision, JUST_REPORTED);
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
fn report_replaces_routed_load() {
    let mut fleet = fleet(2);
    let decision = chosen(&request(40), &PrefixMatch::default(), &fleet);
    fleet.record(&decision, NOW);
    assert_ne!(chosen(&request(40), &PrefixMatch::default(), &fleet).instance, decision.instance);
    *fleet.load_mut(decision.instance).unwrap() = Load::reported(0, 0, 0);
    assert_eq!(chosen(&request(40), &PrefixMatch::default(), &fleet).instance, decision.instance);
}

/// A decision with this many tokens to compute in this time.
fn decision_with(recompute_tokens: u32, prefill_us: u64) -> Decision {
    let decision = chosen(&request(4), &PrefixMatch::default(), &fleet(1));
    let parts = Prediction { prefill_us, ..decision.uncorrected };
    Decision { recompute_tokens, uncorrected: parts, ..decision }
}

#[test]
fn waiting_tokens_take_time_of_last_sent_requests() {
    let mut load = Load::default();
    for (tokens, us) in [(1_000, 100_000), (100_000, 50_000_000), (2_000, 300_000)] {
        load.record(&decision_with(tokens, us), JUST_REPORTED);
    }
    let reported = |tokens| Load::reported(tokens, 0, 0).carry_over(&load, NOW);
    for (tokens, us) in [
        (0, 0),
        (1_000, 150_000),
        (2_000, 300_000),
        // The long one is half done.
        (52_000, 300_000 + 25_000_000),
        (103_000, 300_000 + 50_000_000 + 100_000),
        // Other routers send there too: their prompts count like ours.
        (206_000, 2 * (300_000 + 50_000_000 + 100_000)),
    ] {
        assert_eq!(queue_us(&ROUND, &reported(tokens)), us, "{tokens} tokens");
    }
    // Until the next report, routed work waits too.
    let mut since = reported(2_000);
    since.record(&decision_with(500, 70_000), JUST_REPORTED);
    assert_eq!(since.tokens_ahead(), 2_500);
    assert_eq!(queue_us(&ROUND, &since), 370_000);
}

#[test]
fn empty_requests_do_not_evict_others() {
    let mut load = Load::default();
    load.record(&decision_with(1_000, 500_000), JUST_REPORTED);
    (0..100).for_each(|_| load.record(&decision_with(0, 1_000), JUST_REPORTED));
    assert_eq!(queue_us(&ROUND, &Load::reported(1_000, 0, 0).carry_over(&load, NOW)), 500_000);
    (0..100).for_each(|_| load.record(&decision_with(u32::MAX, u64::MAX), JUST_REPORTED));
    let most = queue_us(&ROUND, &Load::reported(u64::MAX, u32::MAX, u32::MAX).carry_over(&load, NOW));
    assert!(most > u64::MAX / 2_000, "{most}");
}

#[test]
fn report_keeps_sent_requests() {
    let mut fleet = fleet(1);
    let instance = *fleet.instance(InstanceId(1)).unwrap();
    fleet.record(&decision_with(1_000, 500_000), NOW);
    fleet.put_instance(Instance { load: Load::reported(1_000, 0, 0), ..instance });
    assert_eq!(queue_us(&ROUND, &fleet.instance(InstanceId(1)).unwrap().load), 500_000);
}

/// Work of instance 1 over that of instance 2 after a burst of `count` requests, if instance 1
/// joined at this time.
fn joiner_work_ratio(joined_at: Option<Timestamp>, count: u64) -> f64 {
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
fn burst_does_not_flood_a_joiner() {
    let ago = |ms: u64| Some(Timestamp(NOW.0 - ms * 1_000));
    let [new, half, settled, old] =
        [ago(0), ago(5_000), ago(10_000), None].map(|joined_at| joiner_work_ratio(joined_at, 90));
    assert!(new <= 0.15, "{new}");
    assert!((0.35..0.6).contains(&half), "{half}");
    assert!((0.9..1.1).contains(&settled) && settled == old, "{settled} {old}");
}

#[test]
fn joint_start_and_settled_instances_are_unaffected() {
    let mut all = fleet(3);
    (1..=3).for_each(|n| all.put_instance(Instance { joined_at: Some(NOW), ..instance(n) }));
    let request = request(4);
    assert_eq!(
        chosen(&request, &PrefixMatch::default(), &all),
        chosen(&request, &PrefixMatch::default(), &fleet(3))
    );
    // One restarts: its recorded requests are dropped, and the costs of others stay.
    let mut fleet = fleet(3);
    fleet.record(&Decision { instance: InstanceId(1), ..decision_with(1_000, 500_000) }, NOW);
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
fn filtered_instance_does_not_trigger_slow_start() {
    let ramps = |first: Instance, eligible: InstanceFilter<'_>| {
        let mut fleet = fleet(3);
        fleet.put_instance(first);
        (2..=3).for_each(|n| fleet.put_instance(Instance { joined_at: Some(NOW), ..instance(n) }));
        let decision = choose_filtered(&request(4), &PrefixMatch::default(), eligible, &fleet, NOW).unwrap();
        decision.candidates.iter().filter(|one| one.slow_start_us > 0).count()
    };
    let all = InstanceFilter::default();
    assert_eq!(ramps(instance(1), all), 2, "it is settled and may be chosen");
    assert_eq!(ramps(Instance { reported_at: Timestamp(0), ..instance(1) }, all), 0, "its report is stale");
    let full = Load::reported(QUEUE_TOKENS_MAX + 1, 0, 0);
    assert_eq!(ramps(Instance { load: full, ..instance(1) }, all), 0, "its queue is full");
    let without = InstanceFilter { excluded: &[InstanceId(1)], ..all };
    assert_eq!(ramps(instance(1), without), 0, "the caller excluded it");
}

#[test]
fn slow_start_is_reported_if_decisive() {
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
            "least cost of 3 instances (TTFT, delay to others, slow start, stale reports), next best \
             {margin_us} us more"
        )
    };
    // It would take 5 ms there, and counts as ten times as much.
    let spared = "instance-1 would cost less, but joined recently: 45000 us are added to its cost";
    assert_eq!(reasons([10, 20]), (2, vec![least(1_000), spared.to_owned()]));
    let joined = "it joined recently: 45000 us are added to its cost";
    assert_eq!(reasons([1_000, 2_000]), (1, vec![least(55_000), joined.to_owned()]));
    let equal =
        "equal cost on 2 instances (TTFT, delay to others, slow start, stale reports), spread by request";
    let (chosen, said) = reasons([10, 10]);
    assert_ne!(chosen, 1);
    assert_eq!(said, [equal, spared]);
    // If it would not be chosen anyway, no reason mentions it.
    assert_eq!(reasons([0, 1_000]).1[1], "no live node holds the first block");
}

#[test]
fn in_time_candidate_beats_cheaper_late_one() {
    // An idle instance takes 5 ms. Instance 1 joined recently, which adds to its cost; instance 2
    // has 20 ms of work.
    let mut fleet = with_load(fleet(2), 2, Load::reported(200, 0, 0));
    fleet.put_instance(Instance { joined_at: Some(NOW), ..instance(1) });
    let nothing = prefix(&[]);
    let within = |ttft_max_us| chosen(&RouteRequest { ttft_max_us, ..request(4) }, &nothing, &fleet);
    let late = |decision: &Decision| {
        let late = |reason: &Reason| matches!(reason, Reason::TtftLimit { .. }).then_some(*reason);
        (decision.instance.0, decision.reasons.iter().find_map(late))
    };
    assert_eq!(late(&within(0)), (2, None));
    assert_eq!(late(&within(25_000)), (2, None), "it meets the limit there");
    assert_eq!(late(&within(10_000)), (1, Some(Reason::TtftLimit { late: 1 })));
    assert_eq!(late(&within(1_000)), (2, None), "none meets the limit, and the candidates say so");
    assert!(within(1_000).candidates.iter().all(|candidate| candidate.is_late));
}
