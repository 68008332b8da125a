//! Plans against brute force: every number of tokens is tried as the end of the fetch, with times
//! computed again from the sources.

use proptest::prelude::*;

use super::*;

/// Cost in µs of fetching `cut` tokens by the plan that fetches everything, and computing the rest.
fn cost_of_cut(
    request: &RouteRequest,
    profile: &HardwareProfile,
    legs: &[(PathSpeed, u64)],
    cut: u64,
) -> f64 {
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

/// Speed of reading a block of this tier over a link, independent of the profile's code: GPU blocks
/// are copied to the node's DRAM before they travel. So all three latencies add up and the
/// narrowest sets the rate.
fn block_speed(profile: &HardwareProfile, tier: Tier, link: PathSpeed) -> PathSpeed {
    let steps = match tier {
        Tier::Gpu => vec![profile.gpu, profile.dram, link],
        Tier::Dram => vec![profile.dram, link],
        Tier::Ssd => vec![profile.ssd, link],
    };
    PathSpeed {
        latency_ns: steps.iter().map(|lane| lane.latency_ns).sum(),
        bytes_per_s: steps.iter().map(|lane| lane.bytes_per_s).min().unwrap(),
    }
}

fn path_speeds() -> impl Strategy<Value = PathSpeed> {
    (0u64..2_000_000, 100_000u64..100_000_000)
        .prop_map(|(latency_ns, bytes_per_s)| PathSpeed { latency_ns, bytes_per_s })
}

/// Least time in ns to the end of these runs over all choices of one holder for each, by
/// enumeration.
fn least_ns(runs: &[(u32, Vec<(u32, Tier)>)], profile: &HardwareProfile, links: &[PathSpeed; 4]) -> f64 {
    let mut all: Vec<(Option<(u32, Tier)>, f64)> = vec![(None, 0.0)];
    for (len, holders) in runs {
        let tokens = u64::from(len * BLOCK_TOKENS);
        let further = all.iter().flat_map(|&(last, ns)| {
            holders.iter().map(move |&(node, tier)| {
                let lane = block_speed(profile, tier, links[node as usize - 1]);
                let stream = (tokens * profile.kv_bytes_per_token) as f64 * 1e9 / lane.bytes_per_s as f64;
                let latency = if last == Some((node, tier)) { 0 } else { lane.latency_ns };
                (Some((node, tier)), ns + latency as f64 + stream)
            })
        });
        all = further.collect();
    }
    all.into_iter().map(|(_, ns)| ns).fold(f64::INFINITY, f64::min)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// One run per node, alternating so that every run is its own source; no instance has a node.
    #[test]
    fn no_cut_beats_the_plan(
        runs in prop::collection::vec((1u32..6, path_speeds(), prop::sample::select(Tier::ALL.to_vec())), 0..6),
        tiers in (path_speeds(), path_speeds(), path_speeds()),
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
        let node = |n, speed| LiveNode { remote_stats: link_speeds(Some(speed), [None; 3]), ..live(n) };
        fleet.set_nodes((1u32..).zip(&runs).map(|(n, run)| node(n, run.1)).collect());
        let held: u32 = runs.iter().map(|run| run.0).sum();
        let holders: Vec<_> = (1u32..).zip(&runs).map(|(n, run)| (run.0, vec![(n, run.2)])).collect();
        let matched = prefix(&holders.iter().map(|(len, at)| (*len, at.as_slice())).collect::<Vec<_>>());
        let blocks = held + tail.div_ceil(BLOCK_TOKENS);
        let input_tokens = held * BLOCK_TOKENS + tail;
        let request = RouteRequest { input_tokens, ..request(blocks) };
        let decision = chosen(&request, &matched, &fleet);
        let leg = |&(len, link, tier): &(u32, PathSpeed, Tier)| {
            (block_speed(&profile, tier, link), u64::from(len * BLOCK_TOKENS))
        };
        let legs: Vec<_> = runs.iter().map(leg).collect();
        let ours = decision.predicted.ttft_us() as f64;
        for cut in 0..=u64::from(held * BLOCK_TOKENS) {
            let theirs = cost_of_cut(&request, &profile, &legs, cut);
            // Both of our parts are rounded up to whole microseconds, each source to a nanosecond.
            prop_assert!(ours <= theirs + 2.1, "cut at {cut} tokens: {theirs} µs, planned {ours} µs");
        }
        let planned = cost_of_cut(&request, &profile, &legs, u64::from(decision.fetch_blocks * BLOCK_TOKENS));
        prop_assert!((ours - planned).abs() <= 2.1, "predicted {ours} µs, computed {planned} µs");
    }

    /// Each run is held by some of four nodes; no instance has a node.
    #[test]
    fn no_choice_of_sources_beats_the_plan(
        runs in prop::collection::vec(
            (1u32..6, prop::collection::btree_map(1u32..5, prop::sample::select(Tier::ALL.to_vec()), 1..5)), 0..5),
        links in prop::array::uniform4(path_speeds()),
        tail in 0u32..25,
        linear in 1_000u64..200_000,
        number in any::<u64>(),
    ) {
        let profile = HardwareProfile { prefill_ns_per_token: linear, ..ROUND };
        let runs: Vec<(u32, Vec<(u32, Tier)>)> =
            runs.into_iter().map(|(len, holders)| (len, holders.into_iter().collect())).collect();
        let mut fleet = Fleet::new(profile);
        fleet.put_instance(Instance { node: None, ..instance(1) });
        let node = |n: u32| LiveNode { remote_stats: link_speeds(Some(links[n as usize - 1]), [None; 3]), ..live(n) };
        fleet.set_nodes((1..=4).map(node).collect());
        let matched = prefix(&runs.iter().map(|(len, at)| (*len, at.as_slice())).collect::<Vec<_>>());
        let held: u32 = runs.iter().map(|run| run.0).sum();
        let input_tokens = held * BLOCK_TOKENS + tail;
        let blocks = held + tail.div_ceil(BLOCK_TOKENS);
        let request = RouteRequest { input_tokens, request: RequestId(number), ..request(blocks) };
        let decision = chosen(&request, &matched, &fleet);
        let ours = decision.predicted.ttft_us() as f64;
        for end in 0..=runs.len() {
            let there: u32 = runs[..end].iter().map(|run| run.0).sum();
            let prefill_ns = f64::from(input_tokens - there * BLOCK_TOKENS) * linear as f64 + profile.step_ns as f64;
            let theirs = (least_ns(&runs[..end], &profile, &links) + prefill_ns) / 1e3;
            prop_assert!(ours <= theirs + 2.1, "to the end of {end} runs: {theirs} µs, planned {ours} µs");
        }
        // The prediction equals the sum over the sources, each counted once.
        let mut fetched = 0;
        let mut transfer_ns = 0.0;
        for source in &decision.sources {
            prop_assert_eq!(source.start_blocks, fetched);
            fetched += source.len_blocks;
            let lane = block_speed(&profile, source.tier, links[source.node.0 as usize - 1]);
            let bytes = u64::from(source.len_blocks * BLOCK_TOKENS) * profile.kv_bytes_per_token;
            transfer_ns += lane.latency_ns as f64 + bytes as f64 * 1e9 / lane.bytes_per_s as f64;
        }
        prop_assert_eq!(fetched, decision.fetch_blocks);
        let transfer = decision.predicted.transfer_us as f64;
        prop_assert!((transfer - transfer_ns / 1e3).abs() <= 1.1, "{transfer} µs, computed {transfer_ns} ns");
    }
}
