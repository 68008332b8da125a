//! What is promised to those who pay for order and for admission: a long prompt waits no longer than 0062 says, and a tenant that asks for
//! little has it beside one that floods.
//!
//! Prompts have nothing in common here, so that work is only what they take to compute. Not here: means and percentiles
//! (`crate::routers::compare`).

use kv_core::id::TenantId;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// Times its own prefill that a request lets others pass (0062), and a quarter more for what predictions are off.
const STRETCH: f64 = 4.0 * 1.25;

/// From the begin to the end of a prompt that has an instance for itself, in nanoseconds.
fn alone_ns(tokens: u32) -> u64 {
    let chunk = Setup::new(1, H100, 512).batch.chunk_tokens;
    let chunks = (0..tokens).step_by(chunk as usize).map(|from| (from, chunk.min(tokens - from)));
    chunks.map(|(from, new)| H100.step_ns + H100.prefill_ns(from.into(), new.into())).sum()
}

/// So many requests with tokens as `draw` has them, of which `load` times as much comes as so many instances get through.
fn offered(
    chance: &mut ChaCha8Rng,
    (requests, load): (u64, f64),
    mut draw: impl FnMut(&mut ChaCha8Rng) -> u32,
) -> Vec<Request> {
    let tokens: Vec<u32> = (0..requests).map(|_| draw(chance)).collect();
    let mean_ns = tokens.iter().map(|tokens| alone_ns(*tokens) as f64).sum::<f64>() / requests as f64;
    let mut at_us = 0.0;
    let one = |(nth, tokens): (u64, u32)| {
        at_us += -(1.0 - chance.random::<f64>()).ln() * mean_ns / load / 1e3;
        let blocks: Vec<u64> = (0..u64::from(tokens.div_ceil(512))).map(|at| nth << 20 | at).collect();
        request(at_us as u64, &blocks, tokens, 1)
    };
    (0..).zip(tokens).map(one).collect()
}

/// Nineteen of twenty are short, and one is thirty times as long.
fn mostly_short(chance: &mut ChaCha8Rng) -> u32 {
    if chance.random::<f64>() < 0.95 {
        chance.random_range(500..2_000)
    } else {
        chance.random_range(20_000..60_000)
    }
}

/// When the first token of each was out, where, and after how long.
fn firsts(trace: &[Request], (instances, orders): (u32, bool)) -> Vec<(u64, u32, u64)> {
    let setup = Setup { orders, ..Setup::new(instances, H100, 512) };
    let report = run(&Workload::new(trace, 1), &setup, by_name(PRODUCTION, 1).unwrap().as_mut());
    assert_eq!(report.served.len(), trace.len(), "nobody is turned away");
    let mut all = vec![(0, 0, 0); trace.len()];
    for served in report.served {
        let out_ns = trace[served.nth].arrival_us * 1_000 + served.ttft_ns;
        all[served.nth] = (out_ns, served.instance, served.ttft_ns);
    }
    all
}

#[test]
fn beyond_capacity_nobody_waits_for_more_than_was_there_and_comes_within_its_stretch() {
    for seed in 1..=3 {
        println!("seed {seed}");
        let trace = offered(&mut ChaCha8Rng::seed_from_u64(seed), (1_500, 1.3), mostly_short);
        let (by_turn, by_coming) = (firsts(&trace, (1, true)), firsts(&trace, (1, false)));
        let work: Vec<u64> = trace.iter().map(|one| alone_ns(one.input_tokens)).collect();
        let (mut left_ns, mut before_ns, mut passed) = (0_u64, 0, 0);
        let mut longest = [0_u64; 3];
        for (nth, one) in trace.iter().enumerate() {
            let at_ns = one.arrival_us * 1_000;
            // What was there and is not computed, and this one.
            left_ns = left_ns.saturating_sub(at_ns - before_ns) + work[nth];
            before_ns = at_ns;
            let until_ns = at_ns + (STRETCH * work[nth] as f64) as u64;
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
            "{passed} were passed; mean {} ms, {} ms in order of coming; longest wait of a long prompt {} ms and {} ms",
            mean(&by_turn),
            mean(&by_coming),
            turn_ns / 1_000_000,
            coming_ns / 1_000_000
        );
        assert!(passed > 10, "there is an order: {passed}");
        assert!(mean(&by_turn) * 5 < mean(&by_coming) * 4, "it is worth something");
        // Of a long one, beyond what it would have waited for anyway: those that come within its stretch, of which there are 1.3 instances' worth, and a quarter more by
        // chance.
        let most_ns = coming_ns + (1.3 * 1.25 * STRETCH * work_ns as f64) as u64;
        assert!(turn_ns <= most_ns, "{turn_ns} of {most_ns}");
    }
}

#[test]
fn in_a_fleet_beyond_capacity_nobody_is_passed_by_who_came_behind_its_stretch() {
    let seed = 4;
    println!("seed {seed}");
    let trace = offered(&mut ChaCha8Rng::seed_from_u64(seed), (2_000, 4.0 * 1.3), mostly_short);
    let all = firsts(&trace, (4, true));
    let mut passes = 0;
    for (nth, one) in trace.iter().enumerate() {
        let until_us = one.arrival_us + (STRETCH * alone_ns(one.input_tokens) as f64 / 1e3) as u64;
        for (later, other) in trace.iter().enumerate().skip(nth + 1) {
            let is_before = all[later].1 == all[nth].1 && all[later].0 < all[nth].0;
            passes += usize::from(is_before);
            assert!(!is_before || other.arrival_us <= until_us, "{later} passed {nth}, seed {seed}");
        }
    }
    assert!(passes > 100, "there is an order: {passes}");
}

/// Work of each tenant's requests that were in time, and of all that it asked for, as shares of what the fleet could do meanwhile.
fn served_by_tenant(workload: &Workload, instances: u32, tenants: &[u32]) -> [(f64, f64); 2] {
    const LIMIT_US: u64 = 5_000_000;
    let limits: Vec<_> = (0..workload.len()).map(|_| (LIMIT_US, 0)).collect();
    let mut router = Admitting::new(limits.into());
    let report = run(workload, &Setup::new(instances, H100, 512), &mut router);
    let whole = f64::from(instances) * workload.last_ns() as f64;
    let in_time = report.in_time(|_| (LIMIT_US, u64::MAX));
    let work = |nth: usize| alone_ns(workload.requests[nth].input_tokens) as f64 / whole;
    [1, 2].map(|tenant| {
        let of =
            |all: &mut dyn Iterator<Item = usize>| all.filter(|nth| tenants[*nth] == tenant).map(work).sum();
        (of(&mut in_time.iter().copied()), of(&mut (0..workload.len())))
    })
}

#[test]
fn a_tenant_has_what_it_asks_for_up_to_its_share_beside_one_that_floods() {
    const INSTANCES: u32 = 2;
    let seed = 5;
    println!("seed {seed}");
    // What the first tenant asks for, as a part of what the fleet can do, and at least has of that in time; its share is a half. The other asks for twice of all.
    for (asked, least) in [(0.3, 0.9), (0.8, 0.5)] {
        let chance = &mut ChaCha8Rng::seed_from_u64(seed);
        let all = asked + 2.0;
        let mut tenants = Vec::new();
        let trace = offered(chance, (4_000, f64::from(INSTANCES) * all), |chance| {
            tenants.push(if chance.random::<f64>() * all < asked { 1 } else { 2 });
            chance.random_range(1_000..8_000)
        });
        let workload = Workload::new(&trace, 1);
        let own = workload.of_tenants(|nth| TenantId(tenants[nth]));
        let [(first, first_asked), (flood, _)] = served_by_tenant(&own, INSTANCES, &tenants);
        let [(together, _), _] = served_by_tenant(&workload, INSTANCES, &tenants);
        println!(
            "asked {first_asked:.2}: has {first:.2}, and {together:.2} where tenants are not told apart; the flood has {flood:.2}"
        );
        assert!((asked * 0.9..asked * 1.1).contains(&first_asked));
        assert!(first >= least * first_asked, "{first} of {first_asked}");
        assert!(first + flood > 0.8, "what one does not ask for the other has: {first} and {flood}");
        assert!(together < 0.8 * first, "without tenants who floods has most: {together}");
    }
}

/// Mean and longest time to first token of two tenants without limits, in milliseconds.
fn waits_by_tenant(workload: &Workload, instances: u32, tenants: &[u32]) -> [(u64, u64); 2] {
    let mut router = by_name(PRODUCTION, 1).unwrap();
    let report = run(workload, &Setup::new(instances, H100, 512), router.as_mut());
    assert_eq!(report.served.len(), workload.len(), "nobody is turned away");
    [1, 2].map(|tenant| {
        let of = report.served.iter().filter(|served| tenants[served.nth] == tenant);
        let all: Vec<u64> = of.map(|served| served.ttft_ns / 1_000_000).collect();
        (all.iter().sum::<u64>() / all.len() as u64, all.iter().copied().max().unwrap_or_default())
    })
}

#[test]
fn without_limits_a_tenant_that_asks_for_little_does_not_wait_behind_one_that_floods() {
    const INSTANCES: u32 = 4;
    for seed in 6..9 {
        let chance = &mut ChaCha8Rng::seed_from_u64(seed);
        let mut tenants = Vec::new();
        // One asks for a fifth of what the fleet can do, the other for as much again as it can.
        let trace = offered(chance, (3_000, f64::from(INSTANCES) * 1.7), |chance| {
            tenants.push(if chance.random::<f64>() * 1.7 < 0.2 { 1 } else { 2 });
            chance.random_range(1_000..8_000)
        });
        let workload = Workload::new(&trace, 1);
        let own = workload.of_tenants(|nth| TenantId(tenants[nth]));
        let [little, flood] = waits_by_tenant(&own, INSTANCES, &tenants);
        let [together, flood_together] = waits_by_tenant(&workload, INSTANCES, &tenants);
        println!(
            "seed {seed}: {little:?} ms beside {flood:?}, where tenants are not told apart {together:?} and {flood_together:?}"
        );
        // It waits for what is under way, a third of a second at most, and for those of the others that come within the stretch of what is served next.
        assert!(little.0 < 700, "{little:?}");
        assert!(together.0 > 10 * little.0, "it would have waited: {together:?}");
        // Who floods waits for what it sent, and for an eighth more.
        assert!(flood.0 * 100 < flood_together.0 * 125, "{flood:?} for {flood_together:?}");
    }
}
