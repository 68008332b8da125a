//! The order of what waits: who passes whom, what that adds to a wait, and what first tokens teach.

use super::*;
use crate::schedule::cost::wait;
use crate::schedule::learnt::Learnt;
use crate::schedule::load::{GOES_ON_MAX, Moment, Newcomer};
use crate::schedule::passing::Passing;
use crate::schedule::turn::STRETCH;

/// A decision with this turn, by which so many tokens are computed in as many milliseconds.
fn sent(turn_ms: u64, tokens: u32) -> Decision {
    let decision = chosen(&request(4), &PrefixMatch::default(), &fleet(1));
    let parts = Prediction { prefill_us: u64::from(tokens) * 1_000, ..decision.parts };
    Decision { turn: Timestamp(turn_ms * 1_000), recompute_tokens: tokens, parts, ..decision }
}

/// How long a request of this turn waits, in milliseconds, and how many it passes.
fn waits(load: &Load, turn_ms: u64) -> (u64, u64) {
    // It adds its own prefill, a microsecond, to the waiting of each.
    let newcomer =
        Newcomer { turn: Timestamp(turn_ms * 1_000), by_right: None, transfer_us: 0, prefill_us: 1 };
    let wait = wait((&ROUND, 1.0), load, &newcomer, TOLD);
    (wait.us / 1_000, wait.delays_us)
}

fn with_order(mut fleet: Fleet) -> Fleet {
    for instance in fleet.instances().to_vec() {
        fleet.put_instance(Instance { orders: true, ..instance });
    }
    fleet
}

#[test]
fn a_request_waits_for_earlier_turns_and_for_what_is_begun() {
    let mut load = Load::default();
    for (turn_ms, tokens) in [(900, 300), (500, 100), (100, 20)] {
        load.record(&sent(turn_ms, tokens), TOLD);
    }
    // The first to come is begun, whatever its turn is.
    assert_eq!(
        [50, 100, 600, 1_000].map(|turn| waits(&load, turn)),
        [(300, 2), (320, 1), (420, 0), (420, 0)]
    );
    // Of that a hundred tokens are left: those that come behind it in the order are whole.
    let load = Load::reported(220, 0, 0).after(&load, NOW);
    assert_eq!([50, 600].map(|turn| waits(&load, turn)), [(100, 2), (220, 0)]);
    // It is done, and the next in the order is begun.
    let load = Load::reported(110, 0, 0).after(&load, NOW);
    assert_eq!([50, 200, 600].map(|turn| waits(&load, turn)), [(10, 1), (10, 1), (110, 0)]);
    let load = Load::reported(0, 0, 0).after(&load, NOW);
    assert_eq!(waits(&load, 1), (0, 0));
}

#[test]
fn what_nobody_sent_from_here_may_come_before() {
    let mut load = Load::default();
    load.record(&sent(500, 100), TOLD);
    load.record(&sent(900, 100), TOLD);
    // As many tokens again of others, as dear as these.
    let load = Load::reported(400, 0, 0).after(&load, NOW);
    assert_eq!(waits(&load, 600), (100 + 200, 1));
    let mut full = Load::default();
    (0..1_000).for_each(|turn| full.record(&sent(turn, 10), TOLD));
    assert_eq!(full.tokens_ahead(), 10_000);
    assert_eq!(waits(&full, 5_000), (10_000, 0), "those that are not remembered count");
}

#[test]
fn a_shorter_prompt_has_the_earlier_turn_until_the_longer_has_waited_long_enough() {
    let fleet = with_order(fleet(1));
    let turn = |blocks: u32, at: Timestamp| {
        let fleet = &mut fleet.clone();
        let instance = *fleet.instance(InstanceId(1)).unwrap();
        fleet.put_instance(Instance { reported_at: at, ..instance });
        choose(&request(blocks), &PrefixMatch::default(), fleet, at).unwrap().turn
    };
    let (long, short) = (turn(1_000, NOW), turn(10, NOW));
    assert!(short < long);
    // Their prefill differs by 990 blocks of a millisecond.
    let meanwhile = |ms: u64| NOW.after(Duration::from_millis(ms));
    let difference_ms = 990 * u64::from(STRETCH);
    assert!(turn(10, meanwhile(difference_ms - 1)) < long);
    assert!(turn(10, meanwhile(difference_ms + 1)) > long, "nothing that comes later passes it");
    let in_order_of_coming = choose(&request(1_000), &PrefixMatch::default(), &super::fleet(1), NOW).unwrap();
    assert_eq!(in_order_of_coming.turn, NOW);
}

#[test]
fn whom_a_request_would_pass_counts_against_an_instance() {
    // On the first, two long ones wait that it would pass; on the second a short one is before it.
    let mut fleet = with_order(fleet(2));
    let at = |instance: u32, decision: Decision| Decision { instance: InstanceId(instance), ..decision };
    for turn_ms in [1, 1_000_000, 2_000_000] {
        fleet.record(&at(1, sent(turn_ms, 1)), NOW);
    }
    fleet.record(&at(2, sent(1, 40)), NOW);
    let decision = chosen(&request(3), &PrefixMatch::default(), &fleet);
    let candidate = |id: u32| *decision.candidates.iter().find(|one| one.instance == InstanceId(id)).unwrap();
    let (one, two) = (candidate(1), candidate(2));
    let prefill_us = one.parts.prefill_us;
    let later_us = Climate::of(&request(3), &fleet, NOW).later_us(prefill_us);
    assert!(later_us < prefill_us / 100, "hardly anything was sent: {later_us}");
    assert_eq!((one.delays_us, two.delays_us), (2 * prefill_us + later_us, later_us));
    assert!(one.predicted.ttft_us() < two.predicted.ttft_us());
    assert_eq!(decision.instance == InstanceId(1), one.cost_us() <= two.cost_us());
    // With less before it, the second is better for all together.
    let instance = *fleet.instance(InstanceId(2)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(5, 0, 0), ..instance });
    assert_eq!(chosen(&request(3), &PrefixMatch::default(), &fleet).instance, InstanceId(2));
}

#[test]
fn who_comes_later_pays_for_what_is_computed_now() {
    let mut fleet = with_order(fleet(2));
    let idle = fleet.instances().to_vec();
    // The first has six of ten blocks in GPU memory, and eight milliseconds of work before the rest; the second is free, and computes them all.
    let choice = |fleet: &mut Fleet| {
        idle.iter().for_each(|instance| fleet.put_instance(*instance));
        fleet.record(&Decision { instance: InstanceId(1), ..sent(1, 8) }, NOW);
        let resident = [Resident { instance: InstanceId(1), blocks: 6 }];
        let held = Held { matched: &PrefixMatch::default(), resident: &resident, coming: &[] };
        choose(&request(10), held, fleet, NOW).unwrap()
    };
    let seldom = choice(&mut fleet);
    assert_eq!(seldom.instance, InstanceId(2), "hardly anybody comes: {:?}", seldom.candidates);
    // Two thirds of all time are taken by what comes.
    for nth in 0..6_000u64 {
        let instance = InstanceId(1 + (nth % 2) as u32);
        fleet.record(&Decision { instance, ..sent(1, 100) }, Timestamp(NOW.0 + nth * 75_000));
    }
    let busy = choice(&mut fleet);
    assert_eq!(busy.instance, InstanceId(1), "{:?}", busy.candidates);
    let [near, free] =
        [1, 2].map(|id| *busy.candidates.iter().find(|one| one.instance == InstanceId(id)).unwrap());
    assert!(near.ttft_us() > free.ttft_us());
    // Twice as long as it takes: two are before an instance that is busy for two thirds of the time.
    let expected = 2 * free.parts.prefill_us;
    assert!(free.delays_us.abs_diff(expected) < expected / 20, "{} for {expected}", free.delays_us);
}

#[test]
fn a_wait_is_longer_by_the_share_of_those_who_pass() {
    let mut passing = Passing::default();
    assert_eq!(passing.lengthening_us(1_000_000, 5_000_000), 0, "nothing is known yet");
    // A request of 100 ms each 200 ms on one instance: half of its time.
    for nth in 0..3_000u64 {
        passing.sent(100_000, 1, Timestamp(nth * 200_000));
    }
    let long = passing.lengthening_us(1_000_000, 5_000_000);
    assert!((900_000..1_100_000).contains(&long), "{long}");
    assert_eq!(passing.lengthening_us(1_000_000, 10_000), 0, "shorter ones than these do not come");
    // It is passed only by those that come before its turn.
    let most = 200_000 * u64::from(STRETCH) / 2;
    let bound = passing.lengthening_us(1_000_000, 200_000);
    assert!((most * 9 / 10..=most * 11 / 10).contains(&bound), "{bound} of {most}");
    passing.sent(100_000, 4, Timestamp(3_000 * 200_000));
    assert!(passing.lengthening_us(1_000_000, 5_000_000) < long, "four share it");
}

#[test]
fn first_tokens_teach_by_what_each_part_is_off() {
    let mut learnt = Learnt::default();
    let parts = |at: u64| Prediction {
        queue_us: at % 7 * 300_000,
        transfer_us: at % 5 * 20_000,
        prefill_us: 50_000 + at % 11 * 100_000,
        passed_us: 0,
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
    // Of which little comes, the belief in the profile counts longest.
    assert!((1.2..3.0).contains(&transfer), "{transfer}");
}

#[test]
fn a_few_first_tokens_teach_little_and_nonsense_not_more() {
    let mut learnt = Learnt::default();
    let parts = Prediction {
        queue_us: 10_000,
        transfer_us: 0,
        prefill_us: 20_000,
        passed_us: 0,
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
fn few_that_are_passed_make_no_other_look_late_and_count_in_sum() {
    let factors = |times: u64| {
        let mut learnt = Learnt::default();
        let parts = |at: u64| Prediction {
            queue_us: (100_000 + at % 7 * 50_000) / times,
            transfer_us: 0,
            prefill_us: (50_000 + at % 11 * 100_000) / times,
            passed_us: at % 11 * 10_000 / times,
            ..Prediction::default()
        };
        // Each tenth waits another five times as long; all others come as predicted.
        let came = |at: u64| {
            let alone = Prediction { passed_us: 0, ..parts(at) };
            if at.is_multiple_of(10) { 6 * alone.ttft_us() } else { alone.ttft_us() }
        };
        (0..4_000).for_each(|at| learnt.observe(&parts(at), came(at)));
        learnt.factors()
    };
    // Where all of it is shorter they count as much.
    for times in [1, 20] {
        let [queue, _, prefill, passed] = factors(times);
        assert!([queue, prefill].iter().all(|factor| (0.9..1.15).contains(factor)), "{queue} {prefill}");
        assert!(passed > 2.0, "{passed} where all is {times} times shorter");
    }
}

#[test]
fn the_first_request_of_all_says_no_more_of_the_usual_time_than_others() {
    for first_ms in [1, 100, 60_000] {
        let mut learnt = Learnt::default();
        let parts = |prefill_ms: u64, passed_ms: u64| Prediction {
            prefill_us: prefill_ms * 1_000,
            passed_us: passed_ms * 1_000,
            ..Prediction::default()
        };
        learnt.observe(&parts(first_ms, 0), first_ms * 1_000);
        // Each tenth waits a second longer: of all together twice what is predicted of those who pass.
        let came_ms = |at: u64| if at.is_multiple_of(10) { 1_100 } else { 100 };
        (0..600).for_each(|at| learnt.observe(&parts(100, 50), 1_000 * came_ms(at)));
        let [.., passed] = learnt.factors();
        assert!((1.5..=2.1).contains(&passed), "{passed} after a first one of {first_ms} ms");
    }
}

#[test]
fn between_two_reports_an_instance_goes_on() {
    let later = |ms: u64| NOW.after(Duration::from_millis(ms));
    let waits = |load: &Load, turn_ms: u64, ms: u64| {
        let newcomer =
            Newcomer { turn: Timestamp(turn_ms * 1_000), by_right: None, transfer_us: 0, prefill_us: 1 };
        let wait = wait((&ROUND, 1.0), load, &newcomer, Moment { now: later(ms), reported_at: later(ms) });
        (wait.us / 1_000, wait.delays_us)
    };
    let mut load = Load::default();
    for (turn_ms, tokens) in [(900, 300), (500, 100), (700, 50)] {
        load.record(&sent(turn_ms, tokens), TOLD);
    }
    assert_eq!([0, 200, 299].map(|ms| waits(&load, 1, ms)), [(300, 2), (100, 2), (1, 2)]);
    // The first is over and the second begun, which nobody passes any more.
    assert_eq!([301, 399].map(|ms| waits(&load, 1, ms)), [(99, 1), (1, 1)]);
    assert_eq!(waits(&load, 1, 10_000), (0, 0));
    let told = Load::reported(100, 0, 0).after(&load, later(380));
    assert_eq!(waits(&told, 1, 380), (20, 1), "what was over is, and the step has run for a while");
}

/// What a newcomer that goes first waits for, in milliseconds, after reports of what is left of a prompt of 300 ms, at these times and in steps of so many tokens.
fn left_ms(chunk_tokens: u32, reports: &[(u64, u64)]) -> u64 {
    let later = |ms: u64| NOW.after(Duration::from_millis(ms));
    let mut load = Load::default();
    load.record(&sent(900, 300), TOLD);
    let mut now = NOW;
    for (ms, tokens) in reports {
        now = later(*ms);
        let decoding = Decoding { chunk_tokens, ..Decoding::default() };
        load = Load::reported(*tokens, 0, 0).with_decoding(decoding).after(&load, now);
    }
    let newcomer = Newcomer { turn: Timestamp(0), by_right: None, transfer_us: 0, prefill_us: 1 };
    wait((&ROUND, 1.0), &load, &newcomer, Moment { now, reported_at: now }).us / 1_000
}

#[test]
fn a_report_that_nothing_is_done_takes_back_no_more_than_the_step_that_runs() {
    // Where a prompt is one step, none of it is done until all of it is: so with the chunks of an engine that does not say how many tokens they have.
    for chunk_tokens in [300, u32::MAX, 0] {
        let left = |reports: &[(u64, u64)]| left_ms(chunk_tokens, reports);
        assert_eq!([left(&[(60, 300)]), left(&[(60, 300), (290, 300)])], [240, 10], "{chunk_tokens}");
    }
    // In steps of 100, the first should be over after 100.
    assert_eq!(left_ms(100, &[(60, 300)]), 240);
    assert_eq!(left_ms(100, &[(60, 300), (100, 300)]), 200);
}

#[test]
fn a_step_that_is_late_is_taken_to_be_late_for_as_long_again() {
    let left = |at: &[u64]| left_ms(100, &at.iter().map(|ms| (*ms, 300)).collect::<Vec<_>>());
    // However many reports say so; one that hangs looks as if it had not begun.
    assert_eq!([left(&[110]), left(&[130]), left(&[60, 120, 130]), left(&[150])], [210, 230, 230, 250]);
    assert_eq!([left(&[200]), left(&[200, 400]), left(&[200, 400, 5_000])], [300; 3]);
    // Also where it is all that there is, and should have been over long ago.
    let left = |at: &[u64]| left_ms(u32::MAX, &at.iter().map(|ms| (*ms, 300)).collect::<Vec<_>>());
    assert_eq!(
        [left(&[330]), left(&[330, 400]), left(&[700]), left(&[400, 800, 5_000])],
        [30, 100, 300, 300]
    );
    // Once it is over, the next one is not late.
    assert_eq!(left_ms(100, &[(150, 300), (170, 200), (200, 200)]), 170);
}

#[test]
fn what_runs_since_a_step_that_ended_began_behind_the_report_before() {
    assert_eq!(left_ms(100, &[(20, 300), (120, 200)]), 180);
    // Sooner than predicted, and later.
    assert_eq!(left_ms(100, &[(90, 300), (95, 200)]), 200);
    assert_eq!(left_ms(100, &[(200, 300), (250, 200)]), 200);
    // By what was predicted it would run for 65 ms, and that is longer than since the report before.
    assert_eq!(left_ms(100, &[(90, 300), (95, 270)]), 265);
}

#[test]
fn who_waits_for_blocks_lets_others_go_first() {
    let mut load = Load::default();
    let fetching = |turn_ms, tokens, transfer_ms: u64| {
        let decision = sent(turn_ms, tokens);
        let parts = Prediction { transfer_us: transfer_ms * 1_000, ..decision.parts };
        Decision { parts, ..decision }
    };
    load.record(&fetching(1, 10, 50), TOLD);
    let ahead = |transfer_ms: u64, prefill_ms: u64, turn_ms: u64| {
        let (transfer_us, prefill_us) = (transfer_ms * 1_000, prefill_ms * 1_000);
        let turn = Timestamp(turn_ms * 1_000);
        let wait =
            wait((&ROUND, 1.0), &load, &Newcomer { turn, by_right: None, transfer_us, prefill_us }, TOLD);
        (wait.us / 1_000, wait.delays_us / 1_000)
    };
    // Whatever its turn is, who needs nothing begins at once, and the first waits for what is left of it.
    assert_eq!([ahead(0, 20, 9), ahead(0, 80, 9)], [(0, 0), (0, 30)]);
    // What both need is there at the same time: then turns count.
    assert_eq!([ahead(50, 80, 9), ahead(50, 80, 0)], [(60, 0), (50, 80)]);
    // Later, and nothing is begun by then but the first.
    assert_eq!(ahead(55, 80, 0), (60, 0));
    assert_eq!(ahead(100, 80, 0), (100, 0));
}

#[test]
fn who_falls_silent_goes_on_for_two_reports_and_no_longer() {
    let mut fleet = fleet(2);
    let later = |ms: u64| NOW.after(Duration::from_millis(ms));
    let to = |instance| Decision { instance: InstanceId(instance), ..sent(1, 5_000) };
    let queue_ms = |fleet: &Fleet, ms: u64| {
        let decision = choose(&request(4), &PrefixMatch::default(), fleet, later(ms)).unwrap();
        [1, 2].map(|id| {
            let one = decision.candidates.iter().find(|one| one.instance == InstanceId(id)).unwrap();
            one.parts.queue_us / 1_000
        })
    };
    (1..=2).for_each(|id| fleet.record(&to(id), NOW));
    let most_ms = GOES_ON_MAX.as_millis() as u64;
    assert_eq!(queue_ms(&fleet, most_ms), [5_000 - most_ms; 2]);
    // The second goes on telling; of what is sent to the first, nothing is begun that late.
    let second = *fleet.instance(InstanceId(2)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(3_500, 0, 0), reported_at: later(1_500), ..second });
    fleet.record(&to(1), later(1_600));
    assert_eq!(queue_ms(&fleet, 1_800), [10_000 - most_ms, 3_200]);
    // With the next report it is believed again.
    let first = *fleet.instance(InstanceId(1)).unwrap();
    fleet.put_instance(Instance { load: Load::reported(8_100, 0, 0), reported_at: later(1_900), ..first });
    assert_eq!(queue_ms(&fleet, 1_900)[0], 8_100);
    assert_eq!(queue_ms(&fleet, 2_000)[0], 8_000);
}

#[test]
fn what_was_begun_as_blocks_came_waits_by_turn_after_a_report_that_nothing_is_done() {
    let mut load = Load::default();
    for (turn_ms, transfer_ms, tokens) in [(100, 0, 200), (50, 5, 10), (20, 205, 10)] {
        let decision = sent(turn_ms, tokens);
        let parts = Prediction { transfer_us: transfer_ms * 1_000, ..decision.parts };
        load.record(&Decision { parts, ..decision }, TOLD);
    }
    // All three are begun by then, by their blocks: 100, 50, 20. The first is 15 ms late, so it takes 15 more.
    let later = NOW.after(Duration::from_millis(215));
    let told = Load::reported(220, 0, 0).after(&load, later);
    let waits = |turn_ms: u64| {
        let newcomer =
            Newcomer { turn: Timestamp(turn_ms * 1_000), by_right: None, transfer_us: 0, prefill_us: 1 };
        let wait = wait((&ROUND, 1.0), &told, &newcomer, Moment { now: later, reported_at: later });
        (wait.us / 1_000, wait.delays_us)
    };
    assert_eq!([10, 30, 60].map(waits), [(15, 2), (25, 1), (35, 0)]);
}

#[test]
fn a_choice_that_ttft_would_not_have_made_says_so() {
    // On the first, two long ones wait that it would pass; on the second a short one is before it.
    let mut fleet = with_order(fleet(2));
    let at = |instance: u32, decision: Decision| Decision { instance: InstanceId(instance), ..decision };
    for turn_ms in [1, 1_000_000, 2_000_000] {
        fleet.record(&at(1, sent(turn_ms, 1)), NOW);
    }
    fleet.record(&at(2, sent(1, 3)), NOW);
    let decision = chosen(&request(3), &PrefixMatch::default(), &fleet);
    let [best, next] = [0, 1].map(|nth| decision.candidates[nth]);
    assert_eq!(best.instance, InstanceId(2));
    assert!(best.predicted.ttft_us() > next.predicted.ttft_us());
    let margin_us = next.cost_us() - best.cost_us();
    assert_eq!(decision.reasons[0], Reason::LeastCost { others: 1, margin_us });
    assert_eq!(
        decision.reasons[0].to_string(),
        format!(
            "least cost of 2 instances (TTFT, what others wait longer, slow starts, silence), next best {margin_us} us more"
        )
    );
}

#[test]
fn who_leads_and_who_asks_to_goes_before_others() {
    let ordered = Instance { orders: true, ..instance(1) };
    let (s, late) = (Duration::from_secs, Timestamp(1_000_000_000_000));
    let turn = |lead, priority| turn_of(&ordered, Standing { lead, priority }, 1_000_000, late);
    // Four times its prefill of a second.
    assert_eq!(turn(s(0), 0), late.after(s(4)));
    assert_eq!(turn(s(3), 0), late.after(s(1)));
    assert_eq!(turn(s(0), -3), late.after(s(34)));
    assert_eq!(turn(s(7), 5).after(s(37)), late.after(s(4)));
    assert_eq!(turn_of(&ordered, Standing { lead: s(9), priority: 1 }, 0, Timestamp(7)), Timestamp(0));
    assert_eq!(turn_of(&instance(1), Standing { lead: s(7), priority: 1 }, 9, NOW), NOW, "it keeps no order");
}
