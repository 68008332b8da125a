//! What decodes at an instance: room in GPU memory, time between tokens, and whose limits keep a request away.

use proptest::prelude::*;

use super::properties::{alone, requests};
use super::*;

/// Tokens that GPU memory holds here.
const KV: u64 = 10_000;

fn busy(running: u32, kv_tokens: u64) -> Load {
    Load::reported(0, running, 0).with_decoding(Decoding {
        kv_tokens_max: KV,
        kv_tokens,
        ..Decoding::default()
    })
}

fn asking(blocks: u32, output_tokens: u32, tbt_max_us: u64) -> RouteRequest {
    RouteRequest { output_tokens, tbt_max_us, ..request(blocks) }
}

fn on(load: Load, request: &RouteRequest) -> Candidate {
    chosen(request, &PrefixMatch::default(), &with_load(fleet(1), 1, load)).candidates[0]
}

#[test]
fn room_in_gpu_memory_is_waited_for() {
    let request = asking(100, 100, 0);
    for (load, room_us) in [
        // It fits, or nothing is known of room.
        (busy(10, KV - 1_100), 0),
        (Load::reported(0, 10, 0), 0),
        // Half of its 1,100 tokens are missing: 5.5 % of the time that 256 tokens take.
        (busy(10, KV - 550), 15_529),
        (busy(10, KV), 31_158),
        // More than there is of it cannot be held.
        (busy(10, u64::MAX), 31_158),
    ] {
        assert_eq!(on(load, &request).parts.room_us, room_us, "{load:?}");
    }
    // What is larger than all of it waits for all that runs, and no longer.
    let huge = on(busy(10, KV), &asking(5_000, 100, 0));
    assert_eq!(huge.parts.room_us, 284_060);
    let reasons = chosen(&request, &PrefixMatch::default(), &with_load(fleet(1), 1, busy(10, KV))).reasons;
    assert!(reasons.contains(&Reason::WaitsForRoom { room_us: 31_158 }), "{reasons:?}");
}

#[test]
fn what_was_sent_since_the_report_takes_room() {
    let (mut fleet, request) = (with_load(fleet(1), 1, busy(3, KV / 2)), asking(100, 100, 0));
    let mut waits = Vec::new();
    for id in 0..8 {
        let request = RouteRequest { request: RequestId(id), ..request };
        let decision = chosen(&request, &PrefixMatch::default(), &fleet);
        waits.push(decision.parts.queue_us + decision.parts.room_us);
        fleet.record(&decision, NOW);
    }
    // Each computes for 101 ms and more, in which little room comes free.
    assert!(waits.is_sorted(), "{waits:?}");
    // A report that counts the first of them as running has its room in what is held.
    let known = *fleet.instance(InstanceId(1)).unwrap();
    let later = Load::reported(7_500, 4, 7)
        .with_decoding(Decoding { kv_tokens: KV / 2 + 1_100, ..known.load.decoding });
    fleet.put_instance(Instance { load: later, reported_at: NOW, ..known });
    let again = chosen(&request, &PrefixMatch::default(), &fleet).parts;
    assert!(again.queue_us + again.room_us <= waits[7] + 101_000, "{again:?} {waits:?}");
}

#[test]
fn tokens_come_further_apart_the_more_decode_and_while_prompts_are_computed() {
    assert_eq!(on(Load::default(), &asking(1, 10, 0)).parts.tbt_us, 1_010);
    assert_eq!(on(busy(9, 0), &asking(1, 10, 0)).parts.tbt_us, 1_100);
    // No more decode at once than have room: those that wait make it no slower.
    let mut full = busy(5, KV);
    full.waiting = 1_000;
    let of = on(full, &asking(100, 100, 0)).parts.tbt_us;
    assert!((1_060..1_200).contains(&of), "{of}");
    // A prompt of a second, computed beside those that decode: in each of their 256 steps comes a part of it.
    let candidate = on(busy(9, 0), &asking(1_000, 10, 0));
    assert_eq!((candidate.parts.tbt_us, candidate.others_tbt_us), (1_100, 1_100 + 3_911));
    // No step holds more of it than the engine says.
    let small = busy(9, 0).with_decoding(Decoding { chunk_tokens: 10, ..Decoding::default() });
    assert_eq!(on(small, &asking(1_000, 10, 0)).others_tbt_us, 1_100 + 1_000);
}

#[test]
fn a_request_goes_where_its_own_limit_is_kept() {
    // The first has nothing to do but to decode; the second has prompts to compute.
    let fleet = with_load(with_load(fleet(2), 1, busy(200, 0)), 2, Load::reported(2_000, 3, 1));
    let of = |tbt_max_us| chosen(&asking(4, 100, tbt_max_us), &PrefixMatch::default(), &fleet);
    assert_eq!(of(0).instance, InstanceId(1), "the shortest wait");
    let limited = of(2_000);
    assert_eq!(limited.instance, InstanceId(2));
    assert!(limited.reasons.contains(&Reason::Paced { own: 1, others: 0 }), "{:?}", limited.reasons);
    assert_eq!(limited.candidates[1].breaks, Some(Breaks::Own));
    let nowhere = of(1);
    assert_eq!((nowhere.instance, nowhere.candidates[0].breaks), (InstanceId(1), Some(Breaks::Own)));
}

#[test]
fn a_long_prompt_goes_where_nobody_decodes_who_has_a_limit() {
    let mut fleet = with_load(fleet(2), 2, Load::reported(500, 0, 1));
    let limited = chosen(&asking(4, 1_000, 1_500), &PrefixMatch::default(), &fleet);
    assert_eq!(limited.instance, InstanceId(1));
    fleet.record(&limited, NOW);
    let known = *fleet.instance(InstanceId(1)).unwrap();
    fleet.put_instance(Instance { load: busy(1, 100), reported_at: NOW, ..known });
    let long = chosen(&asking(1_000, 10, 0), &PrefixMatch::default(), &fleet);
    assert_eq!(long.instance, InstanceId(2), "{:?}", long.candidates);
    assert!(long.reasons.contains(&Reason::Paced { own: 0, others: 1 }), "{:?}", long.reasons);
    assert_eq!(long.candidates[1].breaks, Some(Breaks::Others));
    // When it has ended by what was predicted, nobody has a limit there any more.
    let later = NOW.after(Duration::from_secs(10));
    (1..=2).for_each(|n| {
        fleet.put_instance(Instance { reported_at: later, ..*fleet.instance(InstanceId(n)).unwrap() });
    });
    let long = choose(&asking(1_000, 10, 0), &PrefixMatch::default(), &fleet, later).unwrap();
    assert_eq!(long.instance, InstanceId(1));
}

#[test]
fn reported_step_times_correct_what_the_profile_says() {
    let mut fleet = fleet(2);
    // Steps take three times what the profile says on the first, and what it says on the second.
    for nth in 1..400_u64 {
        let at = NOW.after(Duration::from_millis(200 * nth));
        for (n, times) in [(1, 3), (2, 1)] {
            let decoding = Decoding { tbt_us: times * 1_100, kv_tokens_max: KV, ..Decoding::default() };
            let load = Load::reported(0, 10, 0).with_decoding(decoding);
            fleet.put_instance(Instance { load, reported_at: at, ..instance(n) });
        }
    }
    fleet.limits.report_stale_after = Duration::from_secs(1_000);
    let now = NOW.after(Duration::from_secs(80));
    let of = |now| {
        let decision = choose(&asking(1, 10, 0), &PrefixMatch::default(), &fleet, now).unwrap();
        let mut all: Vec<_> =
            decision.candidates.iter().map(|one| (one.instance.0, one.parts.tbt_us)).collect();
        all.sort_unstable();
        [all[0].1, all[1].1]
    };
    let [slow, fast] = of(now);
    assert!((3_000..3_500).contains(&slow) && (1_000..1_250).contains(&fast), "{slow} {fast}");
    let [slow, fast] = of(now.after(Duration::from_secs(120)));
    assert_eq!(slow, fast, "long silent, they are taken for like all others");
    assert!(fleet.step_factors(now)[0] > 1.2);
}

/// What is told of an answer for which this was predicted.
fn told(parts: &Prediction, tbt_us: u64, limit_us: u64) -> Paced<'_> {
    Paced { parts, predicted_us: parts.tbt_us, tokens: 0, tbt_us, limit_us }
}

#[test]
fn observed_times_between_tokens_correct_predictions() {
    let mut fleet = fleet(1);
    let parts = on(Load::default(), &asking(1, 10, 0)).parts;
    let paced = told(&parts, 2 * parts.tbt_us, 0);
    (0..2_000).for_each(|_| fleet.ended(Category::default(), 40, paced, NOW));
    let decision = chosen(&asking(1, 0, 0), &PrefixMatch::default(), &fleet);
    assert!((1.6..=2.0).contains(&fleet.learnt.tbt_factor(NOW)), "{}", fleet.learnt.tbt_factor(NOW));
    assert!(decision.predicted.tbt_us > decision.parts.tbt_us * 8 / 5);
    assert!((40..48).contains(&decision.pacing.output_tokens), "{:?}", decision.pacing);
}

#[test]
fn the_more_answers_break_their_limit_the_less_of_it_newcomers_use() {
    let mut fleet = fleet(1);
    let request = RouteRequest { tbt_max_us: 4_000, ..asking(1, 10, 0) };
    let first = chosen(&request, &PrefixMatch::default(), &fleet);
    fleet.record(&first, NOW);
    let within = |fleet: &Fleet| chosen(&request, &PrefixMatch::default(), fleet).pacing.beside;
    let all = within(&fleet).expect("one with a limit decodes there");
    assert_eq!((all.within_us, all.limit_us), (4_000, 4_000));
    let parts = first.parts;
    let paced = |tbt_us, limit_us| told(&parts, tbt_us, limit_us);
    // Without a limit, or one that was not to be kept, nothing is learnt of it.
    let nothing = [paced(4_001, 0), paced(0, 4_000), paced(4_001, parts.tbt_us / 2)];
    nothing.into_iter().for_each(|paced| fleet.ended(Category::default(), 0, paced, NOW));
    assert_eq!(within(&fleet).map(|beside| beside.within_us), Some(4_000));
    (0..8).for_each(|_| fleet.ended(Category::default(), 0, paced(4_001, 4_000), NOW));
    let less = within(&fleet).expect("as before");
    assert!(less.within_us < 3_990, "{less:?}");
    assert_eq!(less.limit_us, 4_000);
    // As much is kept of the newcomer's own.
    assert_eq!(chosen(&request, &PrefixMatch::default(), &fleet).pacing.kept_us, 4_000 - less.within_us);
}

#[test]
fn answers_that_a_rush_slows_teach_also_once_it_is_known_of() {
    let mut fleet = fleet(1);
    let parts = on(Load::default(), &asking(1, 10, 0)).parts;
    let limit_us = 2 * parts.tbt_us;
    // By now all that decodes is known to take nearly four times as long as it was decided by.
    (0..2_000).for_each(|_| fleet.ended(Category::default(), 40, told(&parts, 4 * parts.tbt_us, 0), NOW));
    assert!(fleet.learnt.at(NOW).tbt_us(parts.tbt_us) > limit_us);
    fleet.ended(Category::default(), 40, told(&parts, 3 * parts.tbt_us, limit_us), NOW);
    let part = fleet.margin().part(NOW);
    assert!(part < 1.0, "it was decided that it would be kept");
    // What was let in although it would not is no news.
    let trial = Paced { predicted_us: limit_us + 1, ..told(&parts, 3 * parts.tbt_us, limit_us) };
    fleet.ended(Category::default(), 40, trial, NOW);
    assert!((fleet.margin().part(NOW) - part).abs() < 1e-12);
}

#[test]
fn what_was_learnt_of_times_between_tokens_is_forgotten_while_no_request_ends() {
    let parts = Prediction { tbt_us: 10_000, ..Prediction::default() };
    let at = |s| NOW.after(Duration::from_secs(s));
    for (times, twice) in [(2, 20_000), (4, 40_000)] {
        let mut learnt = Learnt::default();
        (0..2_000).for_each(|_| learnt.observe_tbt(&parts, twice, NOW));
        let off = |learnt: &Learnt, s| learnt.tbt_factor(at(s)) - 1.0;
        let fresh = off(&learnt, 0);
        assert!(fresh > 0.9 * f64::from(times - 1), "{fresh}");
        let [soon, later, much_later] = [1, 300, 3_000].map(|s| off(&learnt, s) / fresh);
        assert!(soon > 0.99 && (0.49..0.51).contains(&later) && much_later < 0.01, "{later} {much_later}");
        assert!((off(&learnt, 0) - fresh).abs() < 1e-9, "a clock that stands still forgets nothing");
        let applied = learnt.apply(&parts, at(300)).tbt_us as f64;
        assert!((applied / 1e4 - 1.0 - fresh / 2.0).abs() < 0.01, "{applied}");
        // One that ends as predicted after an hour counts for more than all before it.
        let mut again = learnt;
        (0..20).for_each(|_| again.observe_tbt(&parts, 10_000, at(3_600)));
        assert!(off(&again, 3_600).abs() < 0.01, "{}", off(&again, 3_600));
        // One of an earlier time takes nothing back, nor does it make what was learnt any older.
        learnt.observe_tbt(&parts, twice, Timestamp(0));
        assert!((off(&learnt, 0) - fresh).abs() < 0.01);
    }
}

#[test]
fn a_fleet_that_was_too_slow_lets_in_again_and_learns_that_it_is_not() {
    let (mut fleet, request) = (fleet(1), asking(1, 10, 2_000));
    let parts = on(Load::default(), &request).parts;
    // For an hour everything took four times as long; then nobody came for a while.
    let paced = told(&parts, 4 * parts.tbt_us, 0);
    (0..2_000).for_each(|_| fleet.ended(Category::default(), 40, paced, NOW));
    let decide = |fleet: &Fleet| chosen(&request, &PrefixMatch::default(), fleet);
    let admit =
        |decision: &Decision| Admission::default().admit(&Offer::of(decision, (TenantId(1), 0), None), NOW);
    let mut needed = 0;
    while decide(&fleet).predicted.tbt_us > 2_000 {
        let slow = decide(&fleet);
        assert_eq!(admit(&slow), Ok(()), "nobody is there");
        fleet.record(&slow, NOW);
        assert!(admit(&decide(&fleet)).is_err(), "one at a time");
        // It ends, and was as fast as the profile says.
        let paced = told(&slow.parts, slow.parts.tbt_us, 0);
        fleet.ended(Category::default(), 40, paced, NOW);
        fleet.put_instance(instance(1));
        needed += 1;
        assert!(needed < 1_000);
    }
    assert!(needed > 10, "{needed}");
    let hopeless = chosen(&asking(1, 10, 60), &PrefixMatch::default(), &fleet);
    assert!(admit(&hopeless).is_err(), "nothing that could be learnt keeps that limit");
}

#[test]
fn a_request_may_decode_where_its_limit_is_kept_or_nothing_is_known() {
    let fleet = with_load(fleet(2), 1, busy(200, 0));
    let ask = |n, limit_us, now| fleet.may_decode((InstanceId(n), true), limit_us, now);
    assert_eq!((ask(1, 0, NOW), ask(1, 3_000, NOW), ask(2, 1_010, NOW)), (Ok(3_000), Ok(3_000), Ok(1_010)));
    assert_eq!(ask(1, 2_800, NOW), Ok(3_000), "computed already: a little too slow is better than nothing");
    let (tbt_us, no) = ask(1, 1_500, NOW).unwrap_err();
    assert!(tbt_us == 3_000 && matches!(no.reason, RejectReason::TooSlow { .. }), "{no}");
    assert_eq!(no.retry_after, Duration::from_millis(384), "half of what decodes has to end");
    assert_eq!((ask(9, 1, NOW), ask(1, 1, NOW.after(Duration::from_secs(9)))), (Ok(0), Ok(0)));
    assert_eq!(ask(2, 100, NOW), Ok(1_010), "alone");
    assert!(ask(2, 60, NOW).is_err(), "less than a sixteenth of what the profile says");
    let one_more = with_load(fleet, 2, Load { waiting: 1, ..busy(1, 0) });
    assert!(one_more.may_decode((InstanceId(2), true), 100, NOW).is_err());
}

#[test]
fn of_a_pair_limits_count_where_it_goes_on() {
    // The first computes prompts, and the others go on; the second decodes for many.
    let mut fleet = with_load(fleet(3), 2, busy(200, 0));
    for (n, role) in [(1, Role::Prefill), (2, Role::Decode), (3, Role::Both)] {
        fleet.set_part(InstanceId(n), Part { role, ..Part::default() });
    }
    let request = asking(4, 100, 2_500);
    let held = PrefixMatch::default();
    let among = |ids: &[u32]| {
        let ids: Vec<_> = ids.iter().copied().map(InstanceId).collect();
        let eligible = Eligible { among: Some(&ids), ..Eligible::default() };
        choose_among(&request, &held, eligible, &fleet, NOW).unwrap()
    };
    let slow = among(&[1, 2]);
    assert_eq!(slow.handover.map(|handover| handover.instance), Some(InstanceId(2)));
    assert_eq!((slow.candidates[0].breaks, slow.parts.tbt_us), (Some(Breaks::Own), 3_010));
    let kept = among(&[1, 2, 3]);
    assert_eq!((kept.candidates[0].breaks, kept.parts.tbt_us), (None, 1_010));
    let mut sent = fleet.clone();
    sent.record(&slow, NOW);
    let limited = |n| sent.instance(InstanceId(n)).unwrap().load.strictest.at(NOW);
    assert_eq!([limited(1), limited(2)], [None, Some(2_500)], "where it decodes");
}

#[test]
fn steps_that_there_are_anyway_are_no_time_that_prompts_add() {
    let sent = |running: u32, chunk_tokens: u32| {
        let load = busy(running, 0);
        let load = load.with_decoding(Decoding { chunk_tokens, ..load.decoding });
        let mut fleet = with_load(fleet(1), 1, load);
        let decision = chosen(&asking(100, 100, 0), &PrefixMatch::default(), &fleet);
        let Decision { recompute_tokens: tokens, parts: Prediction { prefill_us, .. }, .. } = decision;
        let added_us = fleet.added_us(&fleet.instances()[0], prefill_us, tokens, NOW);
        fleet.record(&decision, NOW);
        (prefill_us - added_us, added_us, fleet.passing().share(NOW))
    };
    // A step of 200 takes three milliseconds, and the prompt has 1,000 tokens.
    assert_eq!(sent(200, 250).0, 4 * 3_000);
    assert_eq!(sent(200, 0).0, 1_000 * 3_000 / 8_192, "what engines are set to that do not say");
    assert_eq!(sent(0, 250).0, 0, "nobody has them anyway");
    let [(_, all_us, all), (_, added_us, share)] = [sent(0, 250), sent(200, 250)];
    assert!((share / all - added_us as f64 / all_us as f64).abs() < 1e-9, "it counts as what it adds");
    assert_eq!(sent(200, 1).1, 0, "no less than nothing");
}

#[test]
fn no_callers_limit_keeps_others_away_by_more_than_the_routers_own() {
    let kept = |tbt_kept_us, limit_us| {
        let mut fleet = fleet(1);
        fleet.limits.tbt_kept_us = tbt_kept_us;
        fleet.record(&chosen(&asking(4, 100, limit_us), &PrefixMatch::default(), &fleet), NOW);
        fleet.instance(InstanceId(1)).unwrap().load.strictest.at(NOW)
    };
    assert_eq!([kept(0, 0), kept(0, 1), kept(0, 1_500)], [None, Some(1), Some(1_500)]);
    assert_eq!([kept(2_000, 0), kept(2_000, 1), kept(2_000, 3_000)], [None, Some(2_000), Some(3_000)]);
}

#[test]
fn of_a_decision_that_is_believed_in_part_nothing_counts_for_more() {
    // Ten tokens of which it has four thousand million; what they take is of no profile.
    let told = chosen(&asking(4, 100, 1), &PrefixMatch::default(), &fleet(1));
    let parts = Prediction { prefill_us: 1_000 * u64::from(u32::MAX), ..told.parts };
    let pacing = Pacing { kv_tokens: u32::MAX, ..told.pacing };
    let told = Decision { recompute_tokens: u32::MAX, parts, pacing, ..told };
    let mut fleet = fleet(1);
    fleet.record_part(&told, 10, NOW);
    let load = fleet.instance(InstanceId(1)).unwrap().load;
    assert_eq!((load.routed, load.routed_tokens, load.strictest.at(NOW)), (1, 10, None));
    assert_eq!(fleet.lengths().held(), Some(10.0));
    let per_token_us = fleet.lengths().prompt_us_per_token(&ROUND);
    assert!((per_token_us - 100.0).abs() < 1e-6, "{per_token_us}");
    assert!(fleet.passing().share(NOW) < 1e-3, "{}", fleet.passing().share(NOW));
    let next = chosen(&asking(4, 100, 0), &PrefixMatch::default(), &fleet);
    assert!(next.parts.queue_us <= 10_000, "{:?}", next.parts);
    // An honest one counts as it is, but for its limit.
    let honest = chosen(&asking(4, 100, 1_500), &PrefixMatch::default(), &fleet);
    let [mut part, mut whole] = [fleet.clone(), fleet];
    part.record_part(&honest, honest.recompute_tokens, NOW);
    whole.record(&Decision { pacing: Pacing { limit_us: 0, ..honest.pacing }, ..honest }, NOW);
    assert_eq!(part.instances(), whole.instances());
    assert_eq!(part.lengths().held(), whole.lengths().held());
}

fn decodings() -> impl Strategy<Value = Load> {
    let decoding = (0u64..400_000, 0u64..500_000, 0u32..20_000);
    (decoding, 0u32..300, 0u32..50, 0u64..100_000).prop_map(
        |((kv_tokens_max, kv_tokens, chunk_tokens), running, waiting, queue_tokens)| {
            let decoding = Decoding { kv_tokens_max, kv_tokens, tbt_us: 0, chunk_tokens };
            Load::reported(queue_tokens, running, waiting).with_decoding(decoding)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn more_that_decodes_is_never_predicted_to_be_faster(
        request in requests(), load in decodings(), more in (1u32..100, 0u64..50_000),
    ) {
        let of = |load: Load| {
            let fleet = alone(&fleet(1), Instance { load, ..instance(1) });
            choose(&request, &PrefixMatch::default(), &fleet, NOW).unwrap().candidates[0]
        };
        let decoding = Decoding { kv_tokens: load.decoding.kv_tokens + more.1, ..load.decoding };
        let fuller = Load { running: load.running + more.0, ..load }.with_decoding(decoding);
        let [less, more] = [of(load), of(fuller)];
        prop_assert!(less.parts.tbt_us <= more.parts.tbt_us, "{less:?} {more:?}");
        prop_assert!(less.others_tbt_us <= more.others_tbt_us);
        prop_assert!(less.parts.ttft_us() <= more.parts.ttft_us());
    }

    #[test]
    fn a_limit_is_broken_only_where_no_instance_keeps_it(
        request in requests(), loads in prop::collection::vec(decodings(), 1..8), limit in 500u64..20_000,
    ) {
        let request = RouteRequest { tbt_max_us: limit, ..request };
        let mut fleet = fleet(loads.len() as u32);
        for (n, load) in (1..).zip(&loads) {
            *fleet.load_mut(InstanceId(n)).unwrap() = *load;
        }
        let decision = choose(&request, &PrefixMatch::default(), &fleet, NOW).unwrap();
        let keeps = decision.candidates.iter().any(|candidate| candidate.predicted.tbt_us <= limit);
        prop_assert_eq!(decision.predicted.tbt_us <= limit, keeps);
        // One that goes before others has all of its limit.
        let offer = Offer::of(&decision, (TenantId(1), 1), None);
        match Admission::default().admit(&offer, NOW) {
            Ok(()) => prop_assert!(keeps || decision.pacing.is_trial),
            Err(Rejection { reason, retry_after }) => {
                prop_assert!(!keeps && matches!(reason, RejectReason::TooSlow { .. }), "{reason}");
                prop_assert!(retry_after >= Duration::from_millis(100), "it says when to come again");
            }
        }
    }
}
