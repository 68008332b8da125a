//! Guarantees against the costs of reordering and admission: a long prompt waits no longer than ADR
//! 0062 says, and a tenant with little demand is served beside one that floods.
//!
//! Prompts are distinct here, so that work is only their compute time. Not here: means and
//! percentiles (`lab/src/routers/compare.rs`).

use kv_core::id::TenantId;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Multiple of its own prefill during which a request may be passed (ADR 0062), plus a quarter for
/// prediction errors.
const PASSING_FACTOR_MAX: f64 = 4.0 * 1.25;

/// Time to compute a prompt alone on an instance, in nanoseconds.
fn unloaded_ns(tokens: u32) -> u64 {
    let chunk = FleetSetup::new(1, H100, 512).batch.chunk_tokens;
    let chunks = (0..tokens).step_by(chunk as usize).map(|from| (from, chunk.min(tokens - from)));
    chunks.map(|(from, new)| H100.step_ns + H100.prefill_ns(from.into(), new.into())).sum()
}

/// Requests with lengths from `draw`, at `load` times the capacity of one instance.
fn offered_trace(
    chance: &mut ChaCha8Rng,
    (requests, load): (u64, f64),
    mut draw: impl FnMut(&mut ChaCha8Rng) -> u32,
) -> Vec<Request> {
    let tokens: Vec<u32> = (0..requests).map(|_| draw(chance)).collect();
    let mean_ns = tokens.iter().map(|tokens| unloaded_ns(*tokens) as f64).sum::<f64>() / requests as f64;
    let mut at_us = 0.0;
    let one = |(nth, tokens): (u64, u32)| {
        at_us += -(1.0 - chance.random::<f64>()).ln() * mean_ns / load / 1e3;
        let blocks: Vec<u64> = (0..u64::from(tokens.div_ceil(512))).map(|at| nth << 20 | at).collect();
        request(at_us as u64, &blocks, tokens, 1)
    };
    (0..).zip(tokens).map(one).collect()
}

/// Nineteen of twenty prompts are short; the others are about thirty times as long.
fn mostly_short(chance: &mut ChaCha8Rng) -> u32 {
    if chance.random::<f64>() < 0.95 {
        chance.random_range(500..2_000)
    } else {
        chance.random_range(20_000..60_000)
    }
}

/// Time of each request's first token, its instance, and its TTFT.
fn first_token_times(trace: &[Request], (instances, orders): (u32, bool)) -> Vec<(u64, u32, u64)> {
    let setup = FleetSetup { uses_priority_deadlines: orders, ..FleetSetup::new(instances, H100, 512) };
    let report = run(&Workload::new(trace, 1), &setup, &mut Production::default());
    assert_eq!(report.served.len(), trace.len(), "no request may be rejected");
    let mut all = vec![(0, 0, 0); trace.len()];
    for served in report.served {
        let out_ns = trace[served.nth].arrival_us * 1_000 + served.ttft_ns;
        all[served.nth] = (out_ns, served.instance, served.ttft_ns);
    }
    all
}

#[test]
fn overloaded_waits_are_bounded_by_queue_and_passing_window() {
    for seed in 1..=3 {
        println!("seed {seed}");
        let trace = offered_trace(&mut ChaCha8Rng::seed_from_u64(seed), (1_500, 1.3), mostly_short);
        let (by_turn, by_coming) =
            (first_token_times(&trace, (1, true)), first_token_times(&trace, (1, false)));
        let work: Vec<u64> = trace.iter().map(|one| unloaded_ns(one.input_tokens)).collect();
        let (mut left_ns, mut before_ns, mut passed) = (0_u64, 0, 0);
        let mut longest = [0_u64; 3];
        for (nth, one) in trace.iter().enumerate() {
            let at_ns = one.arrival_us * 1_000;
            // The remaining work of earlier requests, and this one.
            left_ns = left_ns.saturating_sub(at_ns - before_ns) + work[nth];
            before_ns = at_ns;
            let until_ns = at_ns + (PASSING_FACTOR_MAX * work[nth] as f64) as u64;
            let within = trace[nth + 1..].iter().take_while(|later| later.arrival_us * 1_000 <= until_ns);
            let passing_ns: u64 = within.zip(&work[nth + 1..]).map(|(_, work)| work).sum();
            let most_ns = left_ns + passing_ns + H100.step_ns;
            let (_, _, ttft_ns) = by_turn[nth];
            assert!(ttft_ns <= most_ns, "request {nth}, seed {seed}: {ttft_ns} of {most_ns} ns at most");
            passed += usize::from(ttft_ns > left_ns + H100.step_ns);
            if one.input_tokens >= 20_000 {
                longest =
                    [longest[0].max(ttft_ns), longest[1].max(by_coming[nth].2), longest[2].max(work[nth])];
            }
        }
        let mean =
            |all: &[(u64, u32, u64)]| all.iter().map(|one| one.2).sum::<u64>() / all.len() as u64 / 1_000_000;
        let [turn_ns, coming_ns, work_ns] = longest;
        println!(
            "{passed} were passed; mean {} ms, {} ms in order of arrival; longest wait of a long prompt {} \
             ms and {} ms",
            mean(&by_turn),
            mean(&by_coming),
            turn_ns / 1_000_000,
            coming_ns / 1_000_000
        );
        assert!(passed > 10, "reordering must occur: {passed}");
        assert!(mean(&by_turn) * 5 < mean(&by_coming) * 4, "reordering must lower the mean");
        // A long prompt may additionally wait for requests that arrive inside its passing window:
        // 1.3 instances' worth, and a quarter more for random variation.
        let most_ns = coming_ns + (1.3 * 1.25 * PASSING_FACTOR_MAX * work_ns as f64) as u64;
        assert!(turn_ns <= most_ns, "{turn_ns} of {most_ns}");
    }
}

#[test]
fn no_request_is_passed_by_one_after_its_passing_window() {
    let seed = 4;
    println!("seed {seed}");
    let trace = offered_trace(&mut ChaCha8Rng::seed_from_u64(seed), (2_000, 4.0 * 1.3), mostly_short);
    let all = first_token_times(&trace, (4, true));
    let mut passes = 0;
    for (nth, one) in trace.iter().enumerate() {
        let until_us =
            one.arrival_us + (PASSING_FACTOR_MAX * unloaded_ns(one.input_tokens) as f64 / 1e3) as u64;
        for (later, other) in trace.iter().enumerate().skip(nth + 1) {
            let is_before = all[later].1 == all[nth].1 && all[later].0 < all[nth].0;
            passes += usize::from(is_before);
            assert!(!is_before || other.arrival_us <= until_us, "{later} passed {nth}, seed {seed}");
        }
    }
    assert!(passes > 100, "reordering must occur: {passes}");
}

/// Each tenant's work served in time and offered, as shares of the fleet's capacity.
fn served_by_tenant(workload: &Workload, instances: u32, tenants: &[u32]) -> [(f64, f64); 2] {
    const LIMIT_US: u64 = 5_000_000;
    let limits: Vec<_> = (0..workload.len()).map(|_| (LIMIT_US, 0)).collect();
    let mut router = AdmittingRouter::new(limits.into());
    let report = run(workload, &FleetSetup::new(instances, H100, 512), &mut router);
    let whole = f64::from(instances) * workload.last_ns() as f64;
    let in_time = report.within_limits(|_| (LIMIT_US, u64::MAX));
    let work = |nth: usize| unloaded_ns(workload.requests[nth].input_tokens) as f64 / whole;
    [1, 2].map(|tenant| {
        let of =
            |all: &mut dyn Iterator<Item = usize>| all.filter(|nth| tenants[*nth] == tenant).map(work).sum();
        (of(&mut in_time.iter().copied()), of(&mut (0..workload.len())))
    })
}

#[test]
fn a_tenant_gets_its_share_beside_a_flooding_one() {
    const INSTANCES: u32 = 2;
    let seed = 5;
    println!("seed {seed}");
    // The first tenant's demand as a share of the capacity, and the fraction of it that must be
    // served in time; its fair share is a half. The other demands twice the capacity.
    for (asked, least) in [(0.3, 0.9), (0.8, 0.5)] {
        let chance = &mut ChaCha8Rng::seed_from_u64(seed);
        let all = asked + 2.0;
        let mut tenants = Vec::new();
        let trace = offered_trace(chance, (4_000, f64::from(INSTANCES) * all), |chance| {
            tenants.push(if chance.random::<f64>() * all < asked { 1 } else { 2 });
            chance.random_range(1_000..8_000)
        });
        let workload = Workload::new(&trace, 1);
        let own = workload.with_tenants(|nth| TenantId(tenants[nth]));
        let [(first, first_asked), (flood, _)] = served_by_tenant(&own, INSTANCES, &tenants);
        let [(together, _), _] = served_by_tenant(&workload, INSTANCES, &tenants);
        println!(
            "demand {first_asked:.2}: served {first:.2}, and {together:.2} without tenants; the flooding \
             tenant has {flood:.2}"
        );
        assert!((asked * 0.9..asked * 1.1).contains(&first_asked));
        assert!(first >= least * first_asked, "{first} of {first_asked}");
        assert!(
            first + flood > 0.8,
            "capacity unused by one tenant must go to the other: {first} and {flood}"
        );
        assert!(together < 0.8 * first, "without tenants the flooding one must dominate: {together}");
    }
}

/// Mean and longest time to first token of two tenants without limits, in milliseconds.
fn waits_by_tenant(workload: &Workload, instances: u32, tenants: &[u32]) -> [(u64, u64); 2] {
    let mut router = Production::default();
    let report = run(workload, &FleetSetup::new(instances, H100, 512), &mut router);
    assert_eq!(report.served.len(), workload.len(), "no request may be rejected");
    [1, 2].map(|tenant| {
        let of = report.served.iter().filter(|served| tenants[served.nth] == tenant);
        let all: Vec<u64> = of.map(|served| served.ttft_ns / 1_000_000).collect();
        (all.iter().sum::<u64>() / all.len() as u64, all.iter().copied().max().unwrap_or_default())
    })
}

#[test]
fn a_light_tenant_does_not_wait_behind_a_flooding_one() {
    const INSTANCES: u32 = 4;
    for seed in 6..9 {
        let chance = &mut ChaCha8Rng::seed_from_u64(seed);
        let mut tenants = Vec::new();
        // One demands a fifth of the capacity, the other one and a half times of it.
        let trace = offered_trace(chance, (3_000, f64::from(INSTANCES) * 1.7), |chance| {
            tenants.push(if chance.random::<f64>() * 1.7 < 0.2 { 1 } else { 2 });
            chance.random_range(1_000..8_000)
        });
        let workload = Workload::new(&trace, 1);
        let own = workload.with_tenants(|nth| TenantId(tenants[nth]));
        let [little, flood] = waits_by_tenant(&own, INSTANCES, &tenants);
        let [together, flood_together] = waits_by_tenant(&workload, INSTANCES, &tenants);
        println!(
            "seed {seed}: {little:?} ms beside {flood:?}; without tenants {together:?} and {flood_together:?}"
        );
        // It waits for running work, at most a third of a second, and for other requests inside the
        // passing window of the next one.
        assert!(little.0 < 700, "{little:?}");
        assert!(together.0 > 10 * little.0, "without tenants it would wait: {together:?}");
        // The flooding tenant waits for its own requests, and a bounded addition.
        assert!(flood.0 * 100 < flood_together.0 * 125, "{flood:?} for {flood_together:?}");
    }
}
