//! Prefill model: its three coefficients are learned from first tokens, even from a profile of
//! other machines.
//!
//! Not here: waiting and transfer (`queue_order.rs`), and one instance relative to others
//! (`relative_speed.rs`).

use super::*;

/// Deterministic random numbers.
struct SampleRandom(u64);

impl SampleRandom {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

const TOKENS: u32 = 16;

/// Blocks of prompts of up to four thousand tokens, and of a hundred thousand.
const SHORT: u64 = 256;
const LONG: u64 = 6_400;

/// Sends `count` requests of up to `most` blocks, some of them resident, one after the other to an
/// instance with the speed `truth`, and learns from each. Returns predicted and observed TTFT of
/// each.
fn serve_requests(
    (fleet, truth): (&mut Fleet, &HardwareProfile),
    count: u64,
    most: u64,
    draws: &mut SampleRandom,
) -> Vec<(f64, f64)> {
    let served = |nth: u64| {
        let now = NOW.after(Duration::from_millis(500 * nth));
        let blocks = 1 + draws.below(most) as u32;
        let request = RouteRequest {
            request: RequestId(nth),
            blocks,
            block_tokens: TOKENS,
            input_tokens: blocks * TOKENS,
            ..request(blocks)
        };
        let resident =
            [ResidentPrefix { instance: InstanceId(1), blocks: draws.below(u64::from(blocks)) as u32 }];
        fleet.put_instance(Instance { reported_at: now, ..instance(1) });
        let held = PrefixLocations { matched: &PrefixMatch::default(), resident: &resident, in_flight: &[] };
        let decision = choose(&request, held, fleet, now).unwrap();
        let PromptWork { context_tokens, new_tokens } = decision.uncorrected.prompt;
        // Up to a fifth more or less at random.
        let noise = 0.8 + draws.below(401) as f64 / 1_000.0;
        let ns: u64 = truth.prompt_ns(context_tokens.into(), new_tokens.into()).into_iter().sum();
        let ttft_us = (ns as f64 * noise / 1e3) as u64;
        fleet.record(&decision, now);
        fleet.observe_first_token(decision.instance, &decision.uncorrected, ttft_us, now);
        (decision.predicted.ttft_us() as f64, ttft_us as f64)
    };
    (0..count).map(served).collect()
}

/// Median relative error, and relative error of the sum.
fn error(served: &[(f64, f64)]) -> (f64, f64) {
    let mut off: Vec<f64> = served.iter().map(|(predicted, came)| (predicted / came - 1.0).abs()).collect();
    off.sort_by(f64::total_cmp);
    let predicted: f64 = served.iter().map(|(predicted, _)| predicted).sum();
    let came: f64 = served.iter().map(|(_, came)| came).sum();
    (off[off.len() / 2], predicted / came - 1.0)
}

#[test]
fn wrong_profile_is_corrected_within_two_hundred_requests() {
    let [h100, a100, laptop] =
        ["h100-8b", "a100-8b", "laptop-emulated"].map(|name| HardwareProfile::by_name(name).unwrap());
    // A model nine times as large on eight such machines, with much engine overhead per step.
    let large = HardwareProfile { prompt_step_ns: 45_000_000, ..h100.with_prefill_factors([1.0, 1.6, 0.7]) };
    for (told, truth) in [(laptop, h100), (h100, laptop), (h100, large), (laptop, a100), (h100, h100)] {
        let (mut fleet, mut draws) = (one_of(told), SampleRandom(7));
        let all = serve_requests((&mut fleet, &truth), 600, SHORT, &mut draws);
        let ((off, bias), (_, later)) = (error(&all[200..400]), error(&all[400..]));
        println!(
            "{} for {}: {off:.3} {bias:+.3} {later:+.3} {:?}",
            told.name,
            truth.name,
            fleet.prefill_model.factors()
        );
        assert!(off < 0.15 && bias.abs() < 0.05 && later.abs() < 0.05);
    }
}

#[test]
fn attention_follows_common_factor_until_long_prompts() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    let truth = h100.with_prefill_factors([3.0, 3.0, 6.0]);
    let (mut fleet, mut draws) = (one_of(h100), SampleRandom(7));
    serve_requests((&mut fleet, &truth), 400, SHORT, &mut draws);
    let [_, _, by_short] = fleet.prefill_model.factors();
    assert!((2.0..6.0).contains(&by_short), "{:?}", fleet.prefill_model.factors());
    let all = serve_requests((&mut fleet, &truth), 800, LONG, &mut draws);
    let ((soon, _), (off, bias)) = (error(&all[..20]), error(&all[400..]));
    let [_, _, by_long] = fleet.prefill_model.factors();
    assert!((4.8..7.2).contains(&by_long), "{:?}", fleet.prefill_model.factors());
    assert!(soon < 0.4 && off < 0.15 && bias.abs() < 0.05, "{soon} {off} {bias}");
}

#[test]
fn invalid_third_of_samples_moves_little() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    for nonsense_us in [1, 3_600_000_000, u64::MAX] {
        let (mut fleet, mut draws) = (one_of(h100), SampleRandom(7));
        serve_requests((&mut fleet, &h100), 100, SHORT, &mut draws);
        let mut all = Vec::new();
        for _ in 0..500 {
            let prompt = PromptWork { context_tokens: 0, new_tokens: 2_000 };
            fleet.observe_first_token(
                InstanceId(1),
                &Prediction { prompt, ..Prediction::default() },
                nonsense_us,
                NOW,
            );
            all.extend(serve_requests((&mut fleet, &h100), 2, SHORT, &mut draws));
        }
        let ((off, bias), factors) = (error(&all[200..]), fleet.prefill_model.factors());
        println!("{nonsense_us}: {off:.3} {bias:+.3} {factors:.3?}");
        assert!(off < 0.25 && bias.abs() < 0.25);
    }
}

#[test]
fn learned_speed_decides_fetch_or_recompute() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    let mut fleet = one_of(h100);
    // 131,072 bytes a token at 1 GB/s are 131 µs a token; computing takes 40 µs by the profile and
    // 400 µs in truth.
    fleet.set_nodes(vec![LiveNode {
        remote_stats: link_speeds(Some(PathSpeed { latency_ns: 0, bytes_per_s: 1_000_000_000 }), [None; 3]),
        ..live(2)
    }]);
    let fetched = |fleet: &Fleet| {
        let now = fleet.instances()[0].reported_at;
        let request = RouteRequest { block_tokens: TOKENS, input_tokens: 64 * TOKENS, ..request(64) };
        choose(&request, &prefix(&[(64, &[(2, Tier::Dram)])]), fleet, now).unwrap().fetch_blocks
    };
    assert_eq!(fetched(&fleet), 0);
    let truth = h100.with_prefill_factors([10.0; 3]);
    serve_requests((&mut fleet, &truth), 200, SHORT, &mut SampleRandom(7));
    assert_eq!(fetched(&fleet), 64);
}

fn one_of(profile: HardwareProfile) -> Fleet {
    let mut fleet = Fleet::new(profile);
    fleet.put_instance(instance(1));
    fleet
}

#[test]
fn text_prefill_factor_applies_to_text_only() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    let mut fleet = one_of(h100);
    let chosen = |fleet: &mut Fleet, nth: u64, is_text: bool| {
        let now = NOW.after(Duration::from_millis(500 * nth));
        fleet.put_instance(Instance { reported_at: now, ..instance(1) });
        let request = RouteRequest { request: RequestId(nth), is_untokenized: is_text, ..request(64) };
        choose(&request, &PrefixMatch::default(), fleet, now).unwrap()
    };
    for nth in 0..400 {
        let decision = chosen(&mut fleet, nth, true);
        let now = NOW.after(Duration::from_millis(500 * nth));
        fleet.record(&decision, now);
        fleet.observe_first_token(
            decision.instance,
            &decision.uncorrected,
            2 * decision.uncorrected.prefill_us,
            now,
        );
    }
    let times =
        |decision: &Decision| decision.predicted.prefill_us as f64 / decision.uncorrected.prefill_us as f64;
    let [text, known] = [true, false].map(|is_text| times(&chosen(&mut fleet, 400, is_text)));
    assert!((1.5..=2.05).contains(&text), "{text}");
    assert_eq!(known, 1.0, "the number of computed tokens is known");
}
