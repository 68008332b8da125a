//! Decoding at an instance: KV capacity, time between tokens, and limits that keep a request away.

use proptest::prelude::*;

use super::properties::{alone, requests};
use super::*;

/// KV capacity in these tests, in tokens.
const KV: u64 = 10_000;

fn busy(running: u32, kv_tokens: u64) -> Load {
    Load::reported(0, running, 0).with_decode_report(DecodeReport {
        kv_tokens_max: KV,
        kv_tokens,
        ..DecodeReport::default()
    })
}

fn decode_request(blocks: u32, output_tokens: u32, tbt_max_us: u64) -> RouteRequest {
    RouteRequest { output_tokens, tbt_max_us, ..request(blocks) }
}

fn candidate_with(load: Load, request: &RouteRequest) -> Candidate {
    chosen(request, &PrefixMatch::default(), &with_load(fleet(1), 1, load)).candidates[0]
}

#[test]
fn waits_for_kv_capacity() {
    let request = decode_request(100, 100, 0);
    for (load, room_us) in [
        // It fits, or the capacity is unknown.
        (busy(10, KV - 1_100), 0),
        (Load::reported(0, 10, 0), 0),
        // Half of its 1,100 tokens do not fit: 5.5 % of the time that 256 tokens take.
        (busy(10, KV - 550), 15_529),
        (busy(10, KV), 31_158),
        // The held part is capped at the capacity.
        (busy(10, u64::MAX), 31_158),
    ] {
        assert_eq!(candidate_with(load, &request).uncorrected.kv_wait_us, room_us, "{load:?}");
    }
    // A request above the capacity waits for everything that runs, and no longer.
    let huge = candidate_with(busy(10, KV), &decode_request(5_000, 100, 0));
    assert_eq!(huge.uncorrected.kv_wait_us, 284_060);
    let reasons = chosen(&request, &PrefixMatch::default(), &with_load(fleet(1), 1, busy(10, KV))).reasons;
    assert!(reasons.contains(&Reason::WaitsForKvCapacity { kv_wait_us: 31_158 }), "{reasons:?}");
}

#[test]
fn requests_sent_since_report_take_kv_capacity() {
    let (mut fleet, request) = (with_load(fleet(1), 1, busy(3, KV / 2)), decode_request(100, 100, 0));
    let mut waits = Vec::new();
    for id in 0..8 {
        let request = RouteRequest { request: RequestId(id), ..request };
        let decision = chosen(&request, &PrefixMatch::default(), &fleet);
        waits.push(decision.uncorrected.queue_us + decision.uncorrected.kv_wait_us);
        fleet.record(&decision, NOW);
    }
    // Each computes for at least 101 ms, during which little capacity frees up.
    assert!(waits.is_sorted(), "{waits:?}");
    // A report that counts the first of them as running includes its KV capacity.
    let known = *fleet.instance(InstanceId(1)).unwrap();
    let later = Load::reported(7_500, 4, 7)
        .with_decode_report(DecodeReport { kv_tokens: KV / 2 + 1_100, ..known.load.decode });
    fleet.put_instance(Instance { load: later, reported_at: NOW, ..known });
    let again = chosen(&request, &PrefixMatch::default(), &fleet).uncorrected;
    assert!(again.queue_us + again.kv_wait_us <= waits[7] + 101_000, "{again:?} {waits:?}");
}

#[test]
fn tbt_grows_with_running_requests_and_prefill() {
    assert_eq!(candidate_with(Load::default(), &decode_request(1, 10, 0)).uncorrected.tbt_us, 1_010);
    assert_eq!(candidate_with(busy(9, 0), &decode_request(1, 10, 0)).uncorrected.tbt_us, 1_100);
    // No more requests decode at once than fit: waiting ones do not slow decoding.
    let mut full = busy(5, KV);
    full.waiting = 1_000;
    let of = candidate_with(full, &decode_request(100, 100, 0)).uncorrected.tbt_us;
    assert!((1_060..1_200).contains(&of), "{of}");
    // A prompt of a second beside decoding requests: a part of it is in each of their 256 steps.
    let candidate = candidate_with(busy(9, 0), &decode_request(1_000, 10, 0));
    assert_eq!((candidate.uncorrected.tbt_us, candidate.others_tbt_us), (1_100, 1_100 + 3_911));
    // No step holds more of it than the engine reports.
    let small = busy(9, 0).with_decode_report(DecodeReport { chunk_tokens: 10, ..DecodeReport::default() });
    assert_eq!(candidate_with(small, &decode_request(1_000, 10, 0)).others_tbt_us, 1_100 + 1_000);
}

#[test]
fn request_goes_where_its_tbt_limit_is_met() {
    // The first instance only decodes; the second also has prompts to compute.
    let fleet = with_load(with_load(fleet(2), 1, busy(200, 0)), 2, Load::reported(2_000, 3, 1));
    let of = |tbt_max_us| chosen(&decode_request(4, 100, tbt_max_us), &PrefixMatch::default(), &fleet);
    assert_eq!(of(0).instance, InstanceId(1), "the shortest wait");
    let limited = of(2_000);
    assert_eq!(limited.instance, InstanceId(2));
    assert!(limited.reasons.contains(&Reason::TbtLimit { own: 1, others: 0 }), "{:?}", limited.reasons);
    assert_eq!(limited.candidates[1].broken_limit, Some(BrokenLimit::Own));
    let nowhere = of(1);
    assert_eq!(
        (nowhere.instance, nowhere.candidates[0].broken_limit),
        (InstanceId(1), Some(BrokenLimit::Own))
    );
}

#[test]
fn long_prompt_avoids_instances_with_tbt_limits() {
    let mut fleet = with_load(fleet(2), 2, Load::reported(500, 0, 1));
    let limited = chosen(&decode_request(4, 1_000, 1_500), &PrefixMatch::default(), &fleet);
    assert_eq!(limited.instance, InstanceId(1));
    fleet.record(&limited, NOW);
    let known = *fleet.instance(InstanceId(1)).unwrap();
    fleet.put_instance(Instance { load: busy(1, 100), reported_at: NOW, ..known });
    let long = chosen(&decode_request(1_000, 10, 0), &PrefixMatch::default(), &fleet);
    assert_eq!(long.instance, InstanceId(2), "{:?}", long.candidates);
    assert!(long.reasons.contains(&Reason::TbtLimit { own: 0, others: 1 }), "{:?}", long.reasons);
    assert_eq!(long.candidates[1].broken_limit, Some(BrokenLimit::Others));
    // After its predicted end, no request with a limit decodes there.
    let later = NOW.after(Duration::from_secs(10));
    (1..=2).for_each(|n| {
        fleet.put_instance(Instance { reported_at: later, ..*fleet.instance(InstanceId(n)).unwrap() });
    });
    let long = choose(&decode_request(1_000, 10, 0), &PrefixMatch::default(), &fleet, later).unwrap();
    assert_eq!(long.instance, InstanceId(1));
}

#[test]
fn reported_step_times_correct_the_profile() {
    let mut fleet = fleet(2);
    // Steps take three times the profile's time on the first instance, and exactly that on the
    // second.
    for nth in 1..400_u64 {
        let at = NOW.after(Duration::from_millis(200 * nth));
        for (n, times) in [(1, 3), (2, 1)] {
            let decoding =
                DecodeReport { tbt_us: times * 1_100, kv_tokens_max: KV, ..DecodeReport::default() };
            let load = Load::reported(0, 10, 0).with_decode_report(decoding);
            fleet.put_instance(Instance { load, reported_at: at, ..instance(n) });
        }
    }
    fleet.limits.report_stale_after = Duration::from_secs(1_000);
    let now = NOW.after(Duration::from_secs(80));
    let of = |now| {
        let decision = choose(&decode_request(1, 10, 0), &PrefixMatch::default(), &fleet, now).unwrap();
        let mut all: Vec<_> =
            decision.candidates.iter().map(|one| (one.instance.0, one.uncorrected.tbt_us)).collect();
        all.sort_unstable();
        [all[0].1, all[1].1]
    };
    let [slow, fast] = of(now);
    assert!((3_000..3_500).contains(&slow) && (1_000..1_250).contains(&fast), "{slow} {fast}");
    let [slow, fast] = of(now.after(Duration::from_secs(120)));
    assert_eq!(slow, fast, "after a long silence both count as average");
    assert!(fleet.step_factors(now)[0] > 1.2);
}

/// The observation of an answer with this prediction.
fn observation(parts: &Prediction, tbt_us: u64, limit_us: u64) -> DecodeObservation<'_> {
    DecodeObservation { uncorrected: parts, predicted_us: parts.tbt_us, tokens: 0, tbt_us, limit_us }
}

#[test]
fn observed_tbt_corrects_predictions() {
    let mut fleet = fleet(1);
    let parts = candidate_with(Load::default(), &decode_request(1, 10, 0)).uncorrected;
    let paced = observation(&parts, 2 * parts.tbt_us, 0);
    (0..2_000).for_each(|_| fleet.observe_completion(Category::default(), 40, paced, NOW));
    let decision = chosen(&decode_request(1, 0, 0), &PrefixMatch::default(), &fleet);
    assert!((1.6..=2.0).contains(&fleet.ttft_bias.tbt_factor(NOW)), "{}", fleet.ttft_bias.tbt_factor(NOW));
    assert!(decision.predicted.tbt_us > decision.uncorrected.tbt_us * 8 / 5);
    assert!((40..48).contains(&decision.decode.output_tokens), "{:?}", decision.decode);
}

#[test]
fn violations_increase_the_slo_margin() {
    let mut fleet = fleet(1);
    let request = RouteRequest { tbt_max_us: 4_000, ..decode_request(1, 10, 0) };
    let first = chosen(&request, &PrefixMatch::default(), &fleet);
    fleet.record(&first, NOW);
    let within = |fleet: &Fleet| chosen(&request, &PrefixMatch::default(), fleet).decode.neighbours;
    let all = within(&fleet).expect("a request with a limit decodes there");
    assert_eq!((all.allowed_us, all.limit_us), (4_000, 4_000));
    let parts = first.uncorrected;
    let paced = |tbt_us, limit_us| observation(&parts, tbt_us, limit_us);
    // An answer without a limit, or with one that it was not expected to meet, teaches nothing.
    let nothing = [paced(4_001, 0), paced(0, 4_000), paced(4_001, parts.tbt_us / 2)];
    nothing.into_iter().for_each(|paced| fleet.observe_completion(Category::default(), 0, paced, NOW));
    assert_eq!(within(&fleet).map(|beside| beside.allowed_us), Some(4_000));
    (0..8).for_each(|_| fleet.observe_completion(Category::default(), 0, paced(4_001, 4_000), NOW));
    let less = within(&fleet).expect("as before");
    assert!(less.allowed_us < 3_990, "{less:?}");
    assert_eq!(less.limit_us, 4_000);
    // The same margin applies to the newcomer's own limit.
    assert_eq!(
        chosen(&request, &PrefixMatch::default(), &fleet).decode.slo_margin_us,
        4_000 - less.allowed_us
    );
}

#[test]
fn answers_slowed_by_a_burst_still_teach() {
    let mut fleet = fleet(1);
    let parts = candidate_with(Load::default(), &decode_request(1, 10, 0)).uncorrected;
    let limit_us = 2 * parts.tbt_us;
    // By now decoding is known to take nearly four times as long as at decision time.
    (0..2_000).for_each(|_| {
        fleet.observe_completion(Category::default(), 40, observation(&parts, 4 * parts.tbt_us, 0), NOW);
    });
    assert!(fleet.ttft_bias.factors_at(NOW).corrected_tbt_us(parts.tbt_us) > limit_us);
    fleet.observe_completion(Category::default(), 40, observation(&parts, 3 * parts.tbt_us, limit_us), NOW);
    let part = fleet.slo_margin().usable_share(NOW);
    assert!(part < 1.0, "the prediction had met the limit");
    // An answer admitted against its prediction teaches nothing.
    let trial =
        DecodeObservation { predicted_us: limit_us + 1, ..observation(&parts, 3 * parts.tbt_us, limit_us) };
    fleet.observe_completion(Category::default(), 40, trial, NOW);
    assert!((fleet.slo_margin().usable_share(NOW) - part).abs() < 1e-12);
}

#[test]
fn tbt_factor_decays_without_finished_requests() {
    let parts = Prediction { tbt_us: 10_000, ..Prediction::default() };
    let at = |s| NOW.after(Duration::from_secs(s));
    for (times, twice) in [(2, 20_000), (4, 40_000)] {
        let mut learnt = TtftBias::default();
        (0..2_000).for_each(|_| learnt.observe_tbt(&parts, twice, NOW));
        let off = |learnt: &TtftBias, s| learnt.tbt_factor(at(s)) - 1.0;
        let fresh = off(&learnt, 0);
        assert!(fresh > 0.9 * f64::from(times - 1), "{fresh}");
        let [soon, later, much_later] = [1, 300, 3_000].map(|s| off(&learnt, s) / fresh);
        assert!(soon > 0.99 && (0.49..0.51).contains(&later) && much_later < 0.01, "{later} {much_later}");
        assert!((off(&learnt, 0) - fresh).abs() < 1e-9, "a clock that stands still decays nothing");
        let applied = learnt.apply(&parts, at(300)).tbt_us as f64;
        assert!((applied / 1e4 - 1.0 - fresh / 2.0).abs() < 0.01, "{applied}");
        // An answer that ends as predicted after an hour outweighs all earlier ones.
        let mut again = learnt;
        (0..20).for_each(|_| again.observe_tbt(&parts, 10_000, at(3_600)));
        assert!(off(&again, 3_600).abs() < 0.01, "{}", off(&again, 3_600));
        // An observation with an older time neither reverts nor ages the learned value.
        learnt.observe_tbt(&parts, twice, Timestamp(0));
        assert!((off(&learnt, 0) - fresh).abs() < 0.01);
    }
}

#[test]
fn recovered_fleet_admits_trials_and_relearns() {
    let (mut fleet, request) = (fleet(1), decode_request(1, 10, 2_000));
    let parts = candidate_with(Load::default(), &request).uncorrected;
    // For an hour everything took four times as long; then no request came for a while.
    let paced = observation(&parts, 4 * parts.tbt_us, 0);
    (0..2_000).for_each(|_| fleet.observe_completion(Category::default(), 40, paced, NOW));
    let decide = |fleet: &Fleet| chosen(&request, &PrefixMatch::default(), fleet);
    let admit = |decision: &Decision| {
        Admission::default().admit(&AdmissionRequest::of(decision, TenantId(1), 0, None), NOW)
    };
    let mut needed = 0;
    while decide(&fleet).predicted.tbt_us > 2_000 {
        let slow = decide(&fleet);
        assert_eq!(admit(&slow), Ok(()), "the instance is idle");
        fleet.record(&slow, NOW);
        assert!(admit(&decide(&fleet)).is_err(), "one at a time");
        // It ends, and was as fast as the profile says.
        let paced = observation(&slow.uncorrected, slow.uncorrected.tbt_us, 0);
        fleet.observe_completion(Category::default(), 40, paced, NOW);
        fleet.put_instance(instance(1));
        needed += 1;
        assert!(needed < 1_000);
    }
    assert!(needed > 10, "{needed}");
    let hopeless = chosen(&decode_request(1, 10, 60), &PrefixMatch::default(), &fleet);
    assert!(admit(&hopeless).is_err(), "no learnable step time meets that limit");
}

#[test]
fn admits_decode_if_limit_is_met_or_unknown() {
    let fleet = with_load(fleet(2), 1, busy(200, 0));
    let ask = |n, limit_us, now| fleet.admit_decode(InstanceId(n), true, limit_us, now);
    assert_eq!((ask(1, 0, NOW), ask(1, 3_000, NOW), ask(2, 1_010, NOW)), (Ok(3_000), Ok(3_000), Ok(1_010)));
    assert_eq!(ask(1, 2_800, NOW), Ok(3_000), "computed already: slightly too slow is accepted");
    let (tbt_us, no) = ask(1, 1_500, NOW).unwrap_err();
    assert!(tbt_us == 3_000 && matches!(no.reason, RejectReason::TooSlow { .. }), "{no}");
    assert_eq!(no.retry_after, Duration::from_millis(384), "half of the decoding requests must end");
    assert_eq!((ask(9, 1, NOW), ask(1, 1, NOW.after(Duration::from_secs(9)))), (Ok(0), Ok(0)));
    assert_eq!(ask(2, 100, NOW), Ok(1_010), "alone");
    assert!(ask(2, 60, NOW).is_err(), "below every learnable step time");
    let one_more = with_load(fleet, 2, Load { waiting: 1, ..busy(1, 0) });
    assert!(one_more.admit_decode(InstanceId(2), true, 100, NOW).is_err());
}

#[test]
fn pair_limits_apply_to_the_decode_instance() {
    // The first only prefills, and the others decode; the second decodes for many.
    let mut fleet = with_load(fleet(3), 2, busy(200, 0));
    for (n, role) in [(1, InstanceRole::Prefill), (2, InstanceRole::Decode), (3, InstanceRole::Both)] {
        fleet.set_placement(InstanceId(n), Placement { role, ..Placement::default() });
    }
    let request = decode_request(4, 100, 2_500);
    let held = PrefixMatch::default();
    let among = |ids: &[u32]| {
        let ids: Vec<_> = ids.iter().copied().map(InstanceId).collect();
        let eligible = InstanceFilter { candidates: Some(&ids), ..InstanceFilter::default() };
        choose_filtered(&request, &held, eligible, &fleet, NOW).unwrap()
    };
    let slow = among(&[1, 2]);
    assert_eq!(slow.handover.map(|handover| handover.instance), Some(InstanceId(2)));
    assert_eq!((slow.candidates[0].broken_limit, slow.uncorrected.tbt_us), (Some(BrokenLimit::Own), 3_010));
    let kept = among(&[1, 2, 3]);
    assert_eq!((kept.candidates[0].broken_limit, kept.uncorrected.tbt_us), (None, 1_010));
    let mut sent = fleet.clone();
    sent.record(&slow, NOW);
    let limited = |n| sent.instance(InstanceId(n)).unwrap().load.tightest_limit.limit_at(NOW);
    assert_eq!([limited(1), limited(2)], [None, Some(2_500)], "where it decodes");
}

#[test]
fn existing_steps_are_not_added_prefill_time() {
    let sent = |running: u32, chunk_tokens: u32| {
        let load = busy(running, 0);
        let load = load.with_decode_report(DecodeReport { chunk_tokens, ..load.decode });
        let mut fleet = with_load(fleet(1), 1, load);
        let decision = chosen(&decode_request(100, 100, 0), &PrefixMatch::default(), &fleet);
        let Decision { recompute_tokens: tokens, uncorrected: Prediction { prefill_us, .. }, .. } = decision;
        let added_us = fleet.added_prefill_us(&fleet.instances()[0], prefill_us, tokens, NOW);
        fleet.record(&decision, NOW);
        (prefill_us - added_us, added_us, fleet.overtaking().prefill_share(NOW))
    };
    // A step of 200 requests takes three milliseconds, and the prompt has 1,000 tokens.
    assert_eq!(sent(200, 250).0, 4 * 3_000);
    assert_eq!(sent(200, 0).0, 1_000 * 3_000 / 8_192, "the default chunk size");
    assert_eq!(sent(0, 250).0, 0, "no steps run anyway");
    let [(_, all_us, all), (_, added_us, share)] = [sent(0, 250), sent(200, 250)];
    assert!(
        (share / all - added_us as f64 / all_us as f64).abs() < 1e-9,
        "it counts with its added time only"
    );
    assert_eq!(sent(200, 1).1, 0, "never negative");
}

#[test]
fn caller_limit_is_floored_by_router_limit() {
    let kept = |tbt_kept_us, limit_us| {
        let mut fleet = fleet(1);
        fleet.limits.tbt_limit_floor_us = tbt_kept_us;
        fleet.record(&chosen(&decode_request(4, 100, limit_us), &PrefixMatch::default(), &fleet), NOW);
        fleet.instance(InstanceId(1)).unwrap().load.tightest_limit.limit_at(NOW)
    };
    assert_eq!([kept(0, 0), kept(0, 1), kept(0, 1_500)], [None, Some(1), Some(1_500)]);
    assert_eq!([kept(2_000, 0), kept(2_000, 1), kept(2_000, 3_000)], [None, Some(2_000), Some(3_000)]);
}

#[test]
fn partial_record_counts_only_believed_tokens() {
    // A claim of four thousand million tokens, while ten are believed; its time matches no profile.
    let told = chosen(&decode_request(4, 100, 1), &PrefixMatch::default(), &fleet(1));
    let parts = Prediction { prefill_us: 1_000 * u64::from(u32::MAX), ..told.uncorrected };
    let pacing = DecodePrediction { kv_tokens: u32::MAX, ..told.decode };
    let told = Decision { recompute_tokens: u32::MAX, uncorrected: parts, decode: pacing, ..told };
    let mut fleet = fleet(1);
    fleet.record_partial(&told, 10, NOW);
    let load = fleet.instance(InstanceId(1)).unwrap().load;
    assert_eq!((load.routed, load.routed_tokens, load.tightest_limit.limit_at(NOW)), (1, 10, None));
    assert_eq!(fleet.lengths().mean_kv_tokens(), Some(10.0));
    let per_token_us = fleet.lengths().prompt_us_per_token(&ROUND);
    assert!((per_token_us - 100.0).abs() < 1e-6, "{per_token_us}");
    assert!(fleet.overtaking().prefill_share(NOW) < 1e-3, "{}", fleet.overtaking().prefill_share(NOW));
    let next = chosen(&decode_request(4, 100, 0), &PrefixMatch::default(), &fleet);
    assert!(next.uncorrected.queue_us <= 10_000, "{:?}", next.uncorrected);
    // An honest decision counts as it is, except for its limit.
    let honest = chosen(&decode_request(4, 100, 1_500), &PrefixMatch::default(), &fleet);
    let [mut part, mut whole] = [fleet.clone(), fleet];
    part.record_partial(&honest, honest.recompute_tokens, NOW);
    whole.record(&Decision { decode: DecodePrediction { limit_us: 0, ..honest.decode }, ..honest }, NOW);
    assert_eq!(part.instances(), whole.instances());
    assert_eq!(part.lengths().mean_kv_tokens(), whole.lengths().mean_kv_tokens());
}

fn loads() -> impl Strategy<Value = Load> {
    let decoding = (0u64..400_000, 0u64..500_000, 0u32..20_000);
    (decoding, 0u32..300, 0u32..50, 0u64..100_000).prop_map(
        |((kv_tokens_max, kv_tokens, chunk_tokens), running, waiting, queue_tokens)| {
            let decoding = DecodeReport { kv_tokens_max, kv_tokens, tbt_us: 0, chunk_tokens };
            Load::reported(queue_tokens, running, waiting).with_decode_report(decoding)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn more_decoding_is_never_predicted_faster(
        request in requests(), load in loads(), more in (1u32..100, 0u64..50_000),
    ) {
        let of = |load: Load| {
            let fleet = alone(&fleet(1), Instance { load, ..instance(1) });
            choose(&request, &PrefixMatch::default(), &fleet, NOW).unwrap().candidates[0]
        };
        let decoding = DecodeReport { kv_tokens: load.decode.kv_tokens + more.1, ..load.decode };
        let fuller = Load { running: load.running + more.0, ..load }.with_decode_report(decoding);
        let [less, more] = [of(load), of(fuller)];
        prop_assert!(less.uncorrected.tbt_us <= more.uncorrected.tbt_us, "{less:?} {more:?}");
        prop_assert!(less.others_tbt_us <= more.others_tbt_us);
        prop_assert!(less.uncorrected.ttft_us() <= more.uncorrected.ttft_us());
    }

    #[test]
    fn limit_is_broken_only_if_no_instance_meets_it(
        request in requests(), loads in prop::collection::vec(loads(), 1..8), limit in 500u64..20_000,
    ) {
        let request = RouteRequest { tbt_max_us: limit, ..request };
        let mut fleet = fleet(loads.len() as u32);
        for (n, load) in (1..).zip(&loads) {
            *fleet.load_mut(InstanceId(n)).unwrap() = *load;
        }
        let decision = choose(&request, &PrefixMatch::default(), &fleet, NOW).unwrap();
        let keeps = decision.candidates.iter().any(|candidate| candidate.predicted.tbt_us <= limit);
        prop_assert_eq!(decision.predicted.tbt_us <= limit, keeps);
        // A request with positive priority gets all of its limit.
        let offer = AdmissionRequest::of(&decision, TenantId(1), 1, None);
        match Admission::default().admit(&offer, NOW) {
            Ok(()) => prop_assert!(keeps || decision.decode.is_trial),
            Err(Rejection { reason, retry_after }) => {
                prop_assert!(!keeps && matches!(reason, RejectReason::TooSlow { .. }), "{reason}");
                prop_assert!(retry_after >= Duration::from_millis(100), "the retry hint has a minimum");
            }
        }
    }
}
