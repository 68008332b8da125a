//! Plans against brute force: every number of tokens is tried as the end of the fetch, with times worked
//! out anew from the sources, in exact fractions of a nanosecond where it matters.

use proptest::prelude::*;

use super::*;

/// Cost in µs of fetching `cut` tokens by the plan that fetches everything, and computing the rest.
fn cost_of_cut(request: &RouteRequest, profile: &HardwareProfile, legs: &[(Lane, u64)], cut: u64) -> f64 {
    let (mut transfer_ns, mut left) = (0.0, cut);
    for &(lane, tokens) in legs {
        let moved = left.min(tokens);
        if moved > 0 {
            transfer_ns += lane.latency_ns as f64;
            transfer_ns += (moved * profile.kv_bytes_per_token) as f64 * 1e9 / lane.bytes_per_s as f64;
        }
        left -= moved;
    }
    let (all, cut) = (f64::from(request.input_tokens), cut as f64);
    let pairs = (all * all - cut * cut) / 2.0;
    let prefill_ns = profile.prefill_ns_per_token as f64 * (all - cut)
        + profile.prefill_ps_per_token_context as f64 * pairs / 1e3
        + profile.step_ns as f64;
    (transfer_ns + prefill_ns) / 1e3
}

/// The way of a block of this tier over a link, said once more and not by the profile: what lies on a GPU is copied to
/// the node's DRAM before it travels, so all three take their time and the narrowest sets the rate.
fn way(profile: &HardwareProfile, tier: Tier, link: Lane) -> Lane {
    let legs = match tier {
        Tier::Gpu => vec![profile.gpu, profile.dram, link],
        Tier::Dram => vec![profile.dram, link],
        Tier::Ssd => vec![profile.ssd, link],
    };
    Lane {
        latency_ns: legs.iter().map(|lane| lane.latency_ns).sum(),
        bytes_per_s: legs.iter().map(|lane| lane.bytes_per_s).min().unwrap(),
    }
}

fn ways() -> impl Strategy<Value = Lane> {
    (0u64..2_000_000, 100_000u64..100_000_000)
        .prop_map(|(latency_ns, bytes_per_s)| Lane { latency_ns, bytes_per_s })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// One run a node, alternating so that every run is its own source; no instance has a node.
    #[test]
    fn no_cut_at_any_token_beats_the_plan(
        runs in prop::collection::vec((1u32..6, ways(), prop::sample::select(Tier::ALL.to_vec())), 0..6),
        tiers in (ways(), ways(), ways()),
        tail in 0u32..25,
        linear in 1_000u64..200_000,
        quadratic in 0u64..5_000_000,
    ) {
        let profile = HardwareProfile {
            prefill_ns_per_token: linear,
            prefill_ps_per_token_context: quadratic,
            gpu: tiers.0,
            dram: tiers.1,
            ssd: tiers.2,
            ..ROUND
        };
        let mut fleet = Fleet::new(profile);
        fleet.put_instance(Instance { node: None, ..instance(1) });
        fleet.set_nodes((1u32..).zip(&runs).map(|(n, run)| LiveNode { afar: lanes(Some(run.1), [None; 3]), ..live(n) }).collect());
        let held: u32 = runs.iter().map(|run| run.0).sum();
        let holders: Vec<_> = (1u32..).zip(&runs).map(|(n, run)| (run.0, vec![(n, run.2)])).collect();
        let matched = prefix(&holders.iter().map(|(len, at)| (*len, at.as_slice())).collect::<Vec<_>>());
        let blocks = held + tail.div_ceil(BLOCK_TOKENS);
        let input_tokens = held * BLOCK_TOKENS + tail;
        let request = RouteRequest { input_tokens, ..request(blocks) };
        let decision = chosen(&request, &matched, &fleet);
        let leg = |&(len, link, tier): &(u32, Lane, Tier)| (way(&profile, tier, link), u64::from(len * BLOCK_TOKENS));
        let legs: Vec<_> = runs.iter().map(leg).collect();
        let ours = decision.predicted.ttft_us() as f64;
        for cut in 0..=u64::from(held * BLOCK_TOKENS) {
            let theirs = cost_of_cut(&request, &profile, &legs, cut);
            // Both of our parts are rounded up to whole microseconds, each leg to a nanosecond.
            prop_assert!(ours <= theirs + 2.1, "cut at {cut} tokens: {theirs} µs, planned {ours} µs");
        }
        let planned = cost_of_cut(&request, &profile, &legs, u64::from(decision.fetch_blocks * BLOCK_TOKENS));
        prop_assert!((ours - planned).abs() <= 2.1, "predicted {ours} µs, worked out {planned} µs");
    }
}
