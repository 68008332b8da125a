//! Queue order: overtaking, its effect on waits, and corrections learned from first tokens.

use super::*;
use crate::schedule::fairness::priority_deadline::DEADLINE_STRETCH;
use crate::schedule::fleet::load::{EXTRAPOLATION_MAX, LoadInstant, Newcomer};
use crate::schedule::predict::cost::queue_wait;
use crate::schedule::predict::overtaking::OvertakingModel;
use crate::schedule::predict::ttft_bias::TtftBias;

/// A decision with this deadline that computes this many tokens in as many milliseconds.
fn decision_with(priority_deadline_ms: u64, tokens: u32) -> Decision {
    let decision = chosen(&request(4), &PrefixMatch::default(), &fleet(1));
    let parts = Prediction { prefill_us: u64::from(tokens) * 1_000, ..decision.uncorrected };
    Decision {
        priority_deadline: Timestamp(priority_deadline_ms * 1_000),
        recompute_tokens: tokens,
        uncorrected: parts,
        ..decision
    }
}

/// Wait of a request with this deadline in milliseconds, and the number of requests it overtakes.
fn wait_and_overtaken(load: &Load, priority_deadline_ms: u64) -> (u64, u64) {
    // It delays each by its own prefill, a microsecond.
    let newcomer = Newcomer {
        priority_deadline: Timestamp(priority_deadline_ms * 1_000),
        unprioritized_deadline: None,
        transfer_us: 0,
        prefill_us: 1,
    };
    let wait = queue_wait(&ROUND, 1.0, load, &newcomer, JUST_REPORTED);
    (wait.us / 1_000, wait.delay_to_others_us)
}

fn with_ordered_queues(mut fleet: Fleet) -> Fleet {
    for instance in fleet.instances().to_vec() {
        fleet.put_instance(Instance { orders_by_deadline: true, ..instance });
    }
    fleet
}

#[test]
fn waits_for_earlier_deadlines_and_started_requests() {
    let mut load = Load::default();
    for (priority_deadline_ms, tokens) in [(900, 300), (500, 100), (100, 20)] {
        load.record(&decision_with(priority_deadline_ms, tokens), JUST_REPORTED);
    }
    // The first one to arrive has started, regardless of its deadline.
    assert_eq!(
        [50, 100, 600, 1_000].map(|turn| wait_and_overtaken(&load, turn)),
        [(300, 2), (320, 1), (420, 0), (420, 0)]
    );
    // A hundred tokens of it remain: later ones in the order are whole.
    let load = Load::reported(220, 0, 0).carry_over(&load, NOW);
    assert_eq!([50, 600].map(|turn| wait_and_overtaken(&load, turn)), [(100, 2), (220, 0)]);
    // It is done, and the next in the order has started.
    let load = Load::reported(110, 0, 0).carry_over(&load, NOW);
    assert_eq!([50, 200, 600].map(|turn| wait_and_overtaken(&load, turn)), [(10, 1), (10, 1), (110, 0)]);
    let load = Load::reported(0, 0, 0).carry_over(&load, NOW);
    assert_eq!(wait_and_overtaken(&load, 1), (0, 0));
}

#[test]
fn unknown_requests_may_run_before() {
    let mut load = Load::default();
    load.record(&decision_with(500, 100), JUST_REPORTED);
    load.record(&decision_with(900, 100), JUST_REPORTED);
    // As many tokens of unknown requests, as expensive as these.
    let load = Load::reported(400, 0, 0).carry_over(&load, NOW);
    assert_eq!(wait_and_overtaken(&load, 600), (100 + 200, 1));
    let mut full = Load::default();
    (0..1_000).for_each(|turn| full.record(&decision_with(turn, 10), JUST_REPORTED));
    assert_eq!(full.tokens_ahead(), 10_000);
    assert_eq!(wait_and_overtaken(&full, 5_000), (10_000, 0), "forgotten requests still count");
}

#[test]
fn shorter_prompt_overtakes_until_the_deadline() {
    let fleet = with_ordered_queues(fleet(1));
    let turn = |blocks: u32, at: Timestamp| {
        let fleet = &mut fleet.clone();
        let instance = *fleet.instance(InstanceId(1)).unwrap();
        fleet.put_instance(Instance { reported_at: at, ..instance });
        choose(&request(blocks), &PrefixMatch::default(), fleet, at).unwrap().priority_deadline
    };
    let (long, short) = (turn(1_000, NOW), turn(10, NOW));
    assert!(short < long);
    // Their prefill differs by 990 blocks of a millisecond.
    let meanwhile = |ms: u64| NOW.after(Duration::from_millis(ms));
    let difference_ms = 990 * u64::from(DEADLINE_STRETCH);
    assert!(turn(10, meanwhile(difference_ms - 1)) < long);
    assert!(turn(10, meanwhile(difference_ms + 1)) > long, "later requests do not overtake it");
    let in_order_of_coming = choose(&request(1_000), &PrefixMatch::default(), &super::fleet(1), NOW).unwrap();
    assert_eq!(in_order_of_coming.priority_deadline, NOW);
}

#[test]
fn overtaken_requests_add_to_the_cost() {
    // The first instance has two long waiting requests that it would overtake; the second has a
    // short one before it.
    let mut fleet = with_ordered_queues(fleet(2));
    let at = |instance: u32, decision: Decision| Decision { instance: InstanceId(instance), ..decision };
    for priority_deadline_ms in [1, 1_000_000, 2_000_000] {
        fleet.record(&at(1, decision_with(priority_deadline_ms, 1)), NOW);
    }
    fleet.record(&at(2, decision_with(1, 40)), NOW);
    let decision = chosen(&request(3), &PrefixMatch::default(), &fleet);
    let candidate = |id: u32| *decision.candidates.iter().find(|one| one.instance == InstanceId(id)).unwrap();
    let (one, two) = (candidate(1), candidate(2));
    let prefill_us = one.uncorrected.prefill_us;
    let later_us = DecodeForecast::for_request(&request(3), &fleet, NOW).future_delay_us(prefill_us);
    assert!(later_us < prefill_us / 100, "little was sent: {later_us}");
    assert_eq!((one.delay_to_others_us, two.delay_to_others_us), (2 * prefill_us + later_us, later_us));
    assert!(one.predicted.ttft_us() < two.predicted.ttft_us());
    assert_eq!(decision.instance == InstanceId(1), one.cost_us() <= two.cost_us());
    // With less before it, the second is better for all together.
    let instance = *fleet.instance(InstanceId(2)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(5, 0, 0), ..instance });
    assert_eq!(chosen(&request(3), &PrefixMatch::default(), &fleet).instance, InstanceId(2));
}

#[test]
fn later_requests_count_in_the_cost() {
    let mut fleet = with_ordered_queues(fleet(2));
    let idle = fleet.instances().to_vec();
    // The first has six of ten blocks in GPU memory and eight milliseconds of work ahead; the
    // second is idle and computes all of them.
    let choice = |fleet: &mut Fleet| {
        idle.iter().for_each(|instance| fleet.put_instance(*instance));
        fleet.record(&Decision { instance: InstanceId(1), ..decision_with(1, 8) }, NOW);
        let resident = [ResidentPrefix { instance: InstanceId(1), blocks: 6 }];
        let held = PrefixLocations { matched: &PrefixMatch::default(), resident: &resident, in_flight: &[] };
        choose(&request(10), held, fleet, NOW).unwrap()
    };
    let seldom = choice(&mut fleet);
    assert_eq!(seldom.instance, InstanceId(2), "requests are rare: {:?}", seldom.candidates);
    // Requests take two thirds of all time.
    for nth in 0..6_000u64 {
        let instance = InstanceId(1 + (nth % 2) as u32);
        fleet.record(&Decision { instance, ..decision_with(1, 100) }, Timestamp(NOW.0 + nth * 75_000));
    }
    let busy = choice(&mut fleet);
    assert_eq!(busy.instance, InstanceId(1), "{:?}", busy.candidates);
    let [near, free] =
        [1, 2].map(|id| *busy.candidates.iter().find(|one| one.instance == InstanceId(id)).unwrap());
    assert!(near.ttft_us() > free.ttft_us());
    // Twice its prefill: two requests are before an instance that is busy two thirds of the time.
    let expected = 2 * free.uncorrected.prefill_us;
    assert!(
        free.delay_to_others_us.abs_diff(expected) < expected / 20,
        "{} for {expected}",
        free.delay_to_others_us
    );
}

#[test]
fn wait_grows_by_the_overtaking_share() {
    let mut passing = OvertakingModel::default();
    assert_eq!(passing.expected_delay_us(1_000_000, 5_000_000), 0, "no data yet");
    // A request of 100 ms each 200 ms on one instance: half of its time.
    for nth in 0..3_000u64 {
        passing.record(100_000, 1, Timestamp(nth * 200_000));
    }
    let long = passing.expected_delay_us(1_000_000, 5_000_000);
    assert!((900_000..1_100_000).contains(&long), "{long}");
    assert_eq!(passing.expected_delay_us(1_000_000, 10_000), 0, "shorter requests never came");
    // Only requests that arrive before its deadline overtake it.
    let most = 200_000 * u64::from(DEADLINE_STRETCH) / 2;
    let bound = passing.expected_delay_us(1_000_000, 200_000);
    assert!((most * 9 / 10..=most * 11 / 10).contains(&bound), "{bound} of {most}");
    passing.record(100_000, 4, Timestamp(3_000 * 200_000));
    assert!(passing.expected_delay_us(1_000_000, 5_000_000) < long, "four share it");
}

#[test]
fn first_tokens_correct_each_part() {
    let mut learnt = TtftBias::default();
    let parts = |at: u64| Prediction {
        queue_us: at % 7 * 300_000,
        transfer_us: at % 5 * 20_000,
        prefill_us: 50_000 + at % 11 * 100_000,
        overtaking_us: 0,
        ..Prediction::default()
    };
    let came = |parts: &Prediction| 2 * parts.queue_us + 3 * parts.transfer_us + parts.prefill_us / 2;
    (0..2_000).for_each(|at| learnt.observe(&parts(at), came(&parts(at))));
    let (mut told, mut seen) = (0, 0);
    for at in 2_000..2_385 {
        told += learnt.apply(&parts(at), NOW).ttft_us();
        seen += came(&parts(at));
    }
    assert!(told.abs_diff(seen) * 50 < seen, "{told} for {seen}");
    let [queue, transfer, prefill, _] = learnt.factors();
    assert!((1.9..2.1).contains(&queue) && (0.4..0.7).contains(&prefill), "{:?}", learnt.factors());
    // For the part with the least data the prior counts longest.
    assert!((1.2..3.0).contains(&transfer), "{transfer}");
}

#[test]
fn few_or_invalid_first_tokens_teach_little() {
    let mut learnt = TtftBias::default();
    let parts = Prediction {
        queue_us: 10_000,
        transfer_us: 0,
        prefill_us: 20_000,
        overtaking_us: 0,
        ..Prediction::default()
    };
    learnt.observe(&parts, 60_000);
    assert!(learnt.factors().iter().all(|factor| (1.0..1.1).contains(factor)), "{:?}", learnt.factors());
    for _ in 0..1_000 {
        learnt.observe(&parts, u64::MAX);
        learnt.observe(&Prediction::default(), 1);
        learnt.observe(&Prediction { queue_us: u64::MAX, ..parts }, 1);
        learnt.observe(&parts, 0);
    }
    assert!(learnt.factors().iter().all(|factor| (0.0..=4.0).contains(factor)), "{:?}", learnt.factors());
}

#[test]
fn overtaken_requests_affect_only_the_overtaking_factor() {
    let factors = |times: u64| {
        let mut learnt = TtftBias::default();
        let parts = |at: u64| Prediction {
            queue_us: (100_000 + at % 7 * 50_000) / times,
            transfer_us: 0,
            prefill_us: (50_000 + at % 11 * 100_000) / times,
            overtaking_us: at % 11 * 10_000 / times,
            ..Prediction::default()
        };
        // Each tenth waits five times as long; all others come as predicted.
        let came = |at: u64| {
            let alone = Prediction { overtaking_us: 0, ..parts(at) };
            if at.is_multiple_of(10) { 6 * alone.ttft_us() } else { alone.ttft_us() }
        };
        (0..4_000).for_each(|at| learnt.observe(&parts(at), came(at)));
        learnt.factors()
    };
    // Shorter times count as much.
    for times in [1, 20] {
        let [queue, _, prefill, passed] = factors(times);
        assert!([queue, prefill].iter().all(|factor| (0.9..1.15).contains(factor)), "{queue} {prefill}");
        assert!(passed > 2.0, "{passed} with times divided by {times}");
    }
}

#[test]
fn first_request_has_no_extra_weight() {
    for first_ms in [1, 100, 60_000] {
        let mut learnt = TtftBias::default();
        let parts = |prefill_ms: u64, passed_ms: u64| Prediction {
            prefill_us: prefill_ms * 1_000,
            overtaking_us: passed_ms * 1_000,
            ..Prediction::default()
        };
        learnt.observe(&parts(first_ms, 0), first_ms * 1_000);
        // Each tenth waits a second longer: in sum twice the predicted overtaking delay.
        let came_ms = |at: u64| if at.is_multiple_of(10) { 1_100 } else { 100 };
        (0..600).for_each(|at| learnt.observe(&parts(100, 50), 1_000 * came_ms(at)));
        let [.., passed] = learnt.factors();
        assert!((1.5..=2.1).contains(&passed), "{passed} after a first one of {first_ms} ms");
    }
}

#[test]
fn instance_progresses_between_reports() {
    let later = |ms: u64| NOW.after(Duration::from_millis(ms));
    let waits = |load: &Load, priority_deadline_ms: u64, ms: u64| {
        let newcomer = Newcomer {
            priority_deadline: Timestamp(priority_deadline_ms * 1_000),
            unprioritized_deadline: None,
            transfer_us: 0,
            prefill_us: 1,
        };
        let wait =
            queue_wait(&ROUND, 1.0, load, &newcomer, LoadInstant { now: later(ms), reported_at: later(ms) });
        (wait.us / 1_000, wait.delay_to_others_us)
    };
    let mut load = Load::default();
    for (priority_deadline_ms, tokens) in [(900, 300), (500, 100), (700, 50)] {
        load.record(&decision_with(priority_deadline_ms, tokens), JUST_REPORTED);
    }
    assert_eq!([0, 200, 299].map(|ms| waits(&load, 1, ms)), [(300, 2), (100, 2), (1, 2)]);
    // The first is done and the second has started, so it is no longer overtaken.
    assert_eq!([301, 399].map(|ms| waits(&load, 1, ms)), [(99, 1), (1, 1)]);
    assert_eq!(waits(&load, 1, 10_000), (0, 0));
    let told = Load::reported(100, 0, 0).carry_over(&load, later(380));
    assert_eq!(waits(&told, 1, 380), (20, 1), "the first is done, and the step has run for a while");
}

/// Wait of an urgent newcomer in milliseconds, after reports (time, remaining tokens) on a prompt
/// of 300 ms with steps of this many tokens.
fn remaining_ms(chunk_tokens: u32, reports: &[(u64, u64)]) -> u64 {
    let later = |ms: u64| NOW.after(Duration::from_millis(ms));
    let mut load = Load::default();
    load.record(&decision_with(900, 300), JUST_REPORTED);
    let mut now = NOW;
    for (ms, tokens) in reports {
        now = later(*ms);
        let decoding = DecodeReport { chunk_tokens, ..DecodeReport::default() };
        load = Load::reported(*tokens, 0, 0).with_decode_report(decoding).carry_over(&load, now);
    }
    let newcomer = Newcomer {
        priority_deadline: Timestamp(0),
        unprioritized_deadline: None,
        transfer_us: 0,
        prefill_us: 1,
    };
    queue_wait(&ROUND, 1.0, &load, &newcomer, LoadInstant { now, reported_at: now }).us / 1_000
}

#[test]
fn report_without_progress_reverts_at_most_one_step() {
    // If a prompt is one step, all of it stays open until the end; the same with the default chunk
    // size of an engine that reports none.
    for chunk_tokens in [300, u32::MAX, 0] {
        let left = |reports: &[(u64, u64)]| remaining_ms(chunk_tokens, reports);
        assert_eq!([left(&[(60, 300)]), left(&[(60, 300), (290, 300)])], [240, 10], "{chunk_tokens}");
    }
    // In steps of 100, the first should end after 100.
    assert_eq!(remaining_ms(100, &[(60, 300)]), 240);
    assert_eq!(remaining_ms(100, &[(60, 300), (100, 300)]), 200);
}

#[test]
fn late_step_is_assumed_to_take_as_long_again() {
    let left = |at: &[u64]| remaining_ms(100, &at.iter().map(|ms| (*ms, 300)).collect::<Vec<_>>());
    // Regardless of the number of reports; a hanging instance looks as if it had not started.
    assert_eq!([left(&[110]), left(&[130]), left(&[60, 120, 130]), left(&[150])], [210, 230, 230, 250]);
    assert_eq!([left(&[200]), left(&[200, 400]), left(&[200, 400, 5_000])], [300; 3]);
    // Also if it is the only work and should have ended long ago.
    let left = |at: &[u64]| remaining_ms(u32::MAX, &at.iter().map(|ms| (*ms, 300)).collect::<Vec<_>>());
    assert_eq!(
        [left(&[330]), left(&[330, 400]), left(&[700]), left(&[400, 800, 5_000])],
        [30, 100, 300, 300]
    );
    // After it has ended, the next one is not late.
    assert_eq!(remaining_ms(100, &[(150, 300), (170, 200), (200, 200)]), 170);
}

#[test]
fn new_step_started_after_the_previous_report() {
    assert_eq!(remaining_ms(100, &[(20, 300), (120, 200)]), 180);
    // Sooner than predicted, and later.
    assert_eq!(remaining_ms(100, &[(90, 300), (95, 200)]), 200);
    assert_eq!(remaining_ms(100, &[(200, 300), (250, 200)]), 200);
    // The prediction alone would give it 65 ms of progress, more than the time since the previous
    // report.
    assert_eq!(remaining_ms(100, &[(90, 300), (95, 270)]), 265);
}

#[test]
fn request_waiting_for_blocks_yields() {
    let mut load = Load::default();
    let fetching = |priority_deadline_ms, tokens, transfer_ms: u64| {
        let decision = decision_with(priority_deadline_ms, tokens);
        let parts = Prediction { transfer_us: transfer_ms * 1_000, ..decision.uncorrected };
        Decision { uncorrected: parts, ..decision }
    };
    load.record(&fetching(1, 10, 50), JUST_REPORTED);
    let ahead = |transfer_ms: u64, prefill_ms: u64, priority_deadline_ms: u64| {
        let (transfer_us, prefill_us) = (transfer_ms * 1_000, prefill_ms * 1_000);
        let turn = Timestamp(priority_deadline_ms * 1_000);
        let wait = queue_wait(
            &ROUND,
            1.0,
            &load,
            &Newcomer { priority_deadline: turn, unprioritized_deadline: None, transfer_us, prefill_us },
            JUST_REPORTED,
        );
        (wait.us / 1_000, wait.delay_to_others_us / 1_000)
    };
    // A request without a transfer starts at once, regardless of its deadline, and the first waits
    // for the rest of it.
    assert_eq!([ahead(0, 20, 9), ahead(0, 80, 9)], [(0, 0), (0, 30)]);
    // If both have their blocks at the same time, deadlines count.
    assert_eq!([ahead(50, 80, 9), ahead(50, 80, 0)], [(60, 0), (50, 80)]);
    // Later, and by then only the first has started.
    assert_eq!(ahead(55, 80, 0), (60, 0));
    assert_eq!(ahead(100, 80, 0), (100, 0));
}

#[test]
fn silent_instance_progresses_for_two_report_intervals() {
    let mut fleet = fleet(2);
    let later = |ms: u64| NOW.after(Duration::from_millis(ms));
    let to = |instance| Decision { instance: InstanceId(instance), ..decision_with(1, 5_000) };
    let queue_ms = |fleet: &Fleet, ms: u64| {
        let decision = choose(&request(4), &PrefixMatch::default(), fleet, later(ms)).unwrap();
        [1, 2].map(|id| {
            let one = decision.candidates.iter().find(|one| one.instance == InstanceId(id)).unwrap();
            one.uncorrected.queue_us / 1_000
        })
    };
    (1..=2).for_each(|id| fleet.record(&to(id), NOW));
    let most_ms = EXTRAPOLATION_MAX.as_millis() as u64;
    assert_eq!(queue_ms(&fleet, most_ms), [5_000 - most_ms; 2]);
    // The second keeps reporting; for the first, no progress is assumed that late.
    let second = *fleet.instance(InstanceId(2)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(3_500, 0, 0), reported_at: later(1_500), ..second });
    fleet.record(&to(1), later(1_600));
    assert_eq!(queue_ms(&fleet, 1_800), [10_000 - most_ms, 3_200]);
    // The next report restores it.
    let first = *fleet.instance(InstanceId(1)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(8_100, 0, 0), reported_at: later(1_900), ..first });
    assert_eq!(queue_ms(&fleet, 1_900)[0], 8_100);
    assert_eq!(queue_ms(&fleet, 2_000)[0], 8_000);
}

#[test]
fn started_requests_wait_by_deadline_after_a_report_without_progress() {
    let mut load = Load::default();
    for (priority_deadline_ms, transfer_ms, tokens) in [(100, 0, 200), (50, 5, 10), (20, 205, 10)] {
        let decision = decision_with(priority_deadline_ms, tokens);
        let parts = Prediction { transfer_us: transfer_ms * 1_000, ..decision.uncorrected };
        load.record(&Decision { uncorrected: parts, ..decision }, JUST_REPORTED);
    }
    // All three have started by then in order of their blocks: 100, 50, 20. The first is 15 ms
    // late, so it takes 15 more.
    let later = NOW.after(Duration::from_millis(215));
    let told = Load::reported(220, 0, 0).carry_over(&load, later);
    let waits = |priority_deadline_ms: u64| {
        let newcomer = Newcomer {
            priority_deadline: Timestamp(priority_deadline_ms * 1_000),
            unprioritized_deadline: None,
            transfer_us: 0,
            prefill_us: 1,
        };
        let wait = queue_wait(&ROUND, 1.0, &told, &newcomer, LoadInstant { now: later, reported_at: later });
        (wait.us / 1_000, wait.delay_to_others_us)
    };
    assert_eq!([10, 30, 60].map(waits), [(15, 2), (25, 1), (35, 0)]);
}

#[test]
fn cost_based_choice_is_reported() {
    // The first instance has two long waiting requests that it would overtake; the second has a
    // short one before it.
    let mut fleet = with_ordered_queues(fleet(2));
    let at = |instance: u32, decision: Decision| Decision { instance: InstanceId(instance), ..decision };
    for priority_deadline_ms in [1, 1_000_000, 2_000_000] {
        fleet.record(&at(1, decision_with(priority_deadline_ms, 1)), NOW);
    }
    fleet.record(&at(2, decision_with(1, 3)), NOW);
    let decision = chosen(&request(3), &PrefixMatch::default(), &fleet);
    let [best, next] = [0, 1].map(|nth| decision.candidates[nth]);
    assert_eq!(best.instance, InstanceId(2));
    assert!(best.predicted.ttft_us() > next.predicted.ttft_us());
    let margin_us = next.cost_us() - best.cost_us();
    assert_eq!(decision.reasons[0], Reason::LeastCost { others: 1, margin_us });
    assert_eq!(
        decision.reasons[0].to_string(),
        format!(
            "least cost of 2 instances (TTFT, delay to others, slow start, stale reports), next best \
             {margin_us} us more"
        )
    );
}

#[test]
fn lead_and_priority_shift_the_deadline() {
    let ordered = Instance { orders_by_deadline: true, ..instance(1) };
    let (s, late) = (Duration::from_secs, Timestamp(1_000_000_000_000));
    let turn =
        |lead, priority| priority_deadline(&ordered, QueuePriority { lead, priority }, 1_000_000, late);
    // Four times its prefill of a second.
    assert_eq!(turn(s(0), 0), late.after(s(4)));
    assert_eq!(turn(s(3), 0), late.after(s(1)));
    assert_eq!(turn(s(0), -3), late.after(s(34)));
    assert_eq!(turn(s(7), 5).after(s(37)), late.after(s(4)));
    assert_eq!(
        priority_deadline(&ordered, QueuePriority { lead: s(9), priority: 1 }, 0, Timestamp(7)),
        Timestamp(0)
    );
    assert_eq!(
        priority_deadline(&instance(1), QueuePriority { lead: s(7), priority: 1 }, 9, NOW),
        NOW,
        "it does not order its queue"
    );
}
