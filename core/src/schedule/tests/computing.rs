//! What first tokens teach of computing: its three coefficients, also where the profile is of other machines.
//!
//! Not here: what they teach of waiting and transfer (`turns.rs`), and of one instance beside others (`speed.rs`).

use super::*;

/// Draws that are the same each time.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

const TOKENS: u32 = 16;

/// Blocks of prompts of up to four thousand tokens, and of a hundred thousand.
const SHORT: u64 = 256;
const LONG: u64 = 6_400;

/// Requests of up to so many blocks, some of them held, one after the other at an instance that is as fast as `truth` says; each told at once. What was predicted and what came, of each.
fn served(
    (fleet, truth): (&mut Fleet, &HardwareProfile),
    count: u64,
    most: u64,
    draws: &mut Draws,
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
        let resident = [Resident { instance: InstanceId(1), blocks: draws.below(u64::from(blocks)) as u32 }];
        fleet.put_instance(Instance { reported_at: now, ..instance(1) });
        let held = Held { matched: &PrefixMatch::default(), resident: &resident, coming: &[] };
        let decision = choose(&request, held, fleet, now).unwrap();
        let Prompt { context_tokens, new_tokens } = decision.parts.prompt;
        // A fifth more or less, whatever it was.
        let noise = 0.8 + draws.below(401) as f64 / 1_000.0;
        let ns: u64 = truth.prompt_ns(context_tokens.into(), new_tokens.into()).into_iter().sum();
        let ttft_us = (ns as f64 * noise / 1e3) as u64;
        fleet.record(&decision, now);
        fleet.first_token(decision.instance, &decision.parts, ttft_us, now);
        (decision.predicted.ttft_us() as f64, ttft_us as f64)
    };
    (0..count).map(served).collect()
}

/// Median of how far off they are, as a share of what came, and by how much all together.
fn error(served: &[(f64, f64)]) -> (f64, f64) {
    let mut off: Vec<f64> = served.iter().map(|(predicted, came)| (predicted / came - 1.0).abs()).collect();
    off.sort_by(f64::total_cmp);
    let predicted: f64 = served.iter().map(|(predicted, _)| predicted).sum();
    let came: f64 = served.iter().map(|(_, came)| came).sum();
    (off[off.len() / 2], predicted / came - 1.0)
}

#[test]
fn a_profile_of_other_machines_is_unlearnt_within_two_hundred_requests() {
    let [h100, a100, laptop] =
        ["h100-8b", "a100-8b", "laptop-emulated"].map(|name| HardwareProfile::by_name(name).unwrap());
    // A model nine times as large on eight of them, with much engine around each step.
    let large = HardwareProfile { prompt_step_ns: 45_000_000, ..h100.with_prompts([1.0, 1.6, 0.7]) };
    for (told, truth) in [(laptop, h100), (h100, laptop), (h100, large), (laptop, a100), (h100, h100)] {
        let (mut fleet, mut draws) = (one_of(told), Draws(7));
        let all = served((&mut fleet, &truth), 600, SHORT, &mut draws);
        let ((off, bias), (_, later)) = (error(&all[200..400]), error(&all[400..]));
        println!(
            "{} for {}: {off:.3} {bias:+.3} {later:+.3} {:?}",
            told.name,
            truth.name,
            fleet.computing.factors()
        );
        assert!(off < 0.15 && bias.abs() < 0.05 && later.abs() < 0.05);
    }
}

#[test]
fn attention_is_believed_to_be_off_as_all_is_until_long_prompts_tell() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    let truth = h100.with_prompts([3.0, 3.0, 6.0]);
    let (mut fleet, mut draws) = (one_of(h100), Draws(7));
    served((&mut fleet, &truth), 400, SHORT, &mut draws);
    let [_, _, by_short] = fleet.computing.factors();
    assert!((2.0..6.0).contains(&by_short), "{:?}", fleet.computing.factors());
    let all = served((&mut fleet, &truth), 800, LONG, &mut draws);
    let ((soon, _), (off, bias)) = (error(&all[..20]), error(&all[400..]));
    let [_, _, by_long] = fleet.computing.factors();
    assert!((4.8..7.2).contains(&by_long), "{:?}", fleet.computing.factors());
    assert!(soon < 0.4 && off < 0.15 && bias.abs() < 0.05, "{soon} {off} {bias}");
}

#[test]
fn a_third_of_nonsense_moves_nothing_far() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    for nonsense_us in [1, 3_600_000_000, u64::MAX] {
        let (mut fleet, mut draws) = (one_of(h100), Draws(7));
        served((&mut fleet, &h100), 100, SHORT, &mut draws);
        let mut all = Vec::new();
        for _ in 0..500 {
            let prompt = Prompt { context_tokens: 0, new_tokens: 2_000 };
            fleet.first_token(
                InstanceId(1),
                &Prediction { prompt, ..Prediction::default() },
                nonsense_us,
                NOW,
            );
            all.extend(served((&mut fleet, &h100), 2, SHORT, &mut draws));
        }
        let ((off, bias), factors) = (error(&all[200..]), fleet.computing.factors());
        println!("{nonsense_us}: {off:.3} {bias:+.3} {factors:.3?}");
        assert!(off < 0.25 && bias.abs() < 0.25);
    }
}

#[test]
fn what_was_learnt_decides_what_is_fetched() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    let mut fleet = one_of(h100);
    // 131,072 bytes a token at 1 GB/s are 131 µs a token, where computing takes 40 of them by the profile and 400 really.
    fleet.set_nodes(vec![LiveNode {
        afar: lanes(Some(Lane { latency_ns: 0, bytes_per_s: 1_000_000_000 }), [None; 3]),
        ..live(2)
    }]);
    let fetched = |fleet: &Fleet| {
        let now = fleet.instances()[0].reported_at;
        let request = RouteRequest { block_tokens: TOKENS, input_tokens: 64 * TOKENS, ..request(64) };
        choose(&request, &prefix(&[(64, &[(2, Tier::Dram)])]), fleet, now).unwrap().fetch_blocks
    };
    assert_eq!(fetched(&fleet), 0);
    let truth = h100.with_prompts([10.0; 3]);
    served((&mut fleet, &truth), 200, SHORT, &mut Draws(7));
    assert_eq!(fetched(&fleet), 64);
}

fn one_of(profile: HardwareProfile) -> Fleet {
    let mut fleet = Fleet::new(profile);
    fleet.put_instance(instance(1));
    fleet
}

#[test]
fn what_text_takes_longer_is_learnt_of_text_and_predicted_of_text_alone() {
    let h100 = HardwareProfile::by_name("h100-8b").unwrap();
    let mut fleet = one_of(h100);
    let chosen = |fleet: &mut Fleet, nth: u64, is_text: bool| {
        let now = NOW.after(Duration::from_millis(500 * nth));
        fleet.put_instance(Instance { reported_at: now, ..instance(1) });
        let request = RouteRequest { request: RequestId(nth), is_text, ..request(64) };
        choose(&request, &PrefixMatch::default(), fleet, now).unwrap()
    };
    for nth in 0..400 {
        let decision = chosen(&mut fleet, nth, true);
        let now = NOW.after(Duration::from_millis(500 * nth));
        fleet.record(&decision, now);
        fleet.first_token(decision.instance, &decision.parts, 2 * decision.parts.prefill_us, now);
    }
    let times = |decision: &Decision| decision.predicted.prefill_us as f64 / decision.parts.prefill_us as f64;
    let [text, known] = [true, false].map(|is_text| times(&chosen(&mut fleet, 400, is_text)));
    assert!((1.5..=2.05).contains(&text), "{text}");
    assert_eq!(known, 1.0, "of which it is known how many tokens are computed");
}
