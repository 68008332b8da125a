//! Routers of other systems on the fleet in virtual time, and comparisons of all routers.
//!
//! Not here: the fleet under the production scheduler (`sim/src/fleet/tests/`).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_core::schedule::{HardwareProfile, PROFILES};
use kvfleet_lab::routers::{
    BASELINES, Knowledge, LatencyLimits, LoadDraw, ThresholdRouter, by_name, compare, goodput, oracle_gap,
};
use kvfleet_sim::fleet::{BatchLimits, FleetReport, FleetSetup, Workload, run};
use kvfleet_sim::generate::{TraceGenerator, TraceSpec, TrafficKind};
use kvfleet_sim::routers::{AdmittingRouter, FetchScope, PRODUCTION, Router, capacity};
use kvfleet_sim::trace::Request;

const H100: HardwareProfile = PROFILES[0];

fn request(arrival_us: u64, blocks: &[u64], input_tokens: u32, output_tokens: u32) -> Request {
    Request {
        arrival_us,
        input_tokens,
        output_tokens,
        block_tokens: 512,
        blocks: blocks.to_vec(),
        ..Request::default()
    }
}

fn generated(requests: u64) -> Workload {
    let spec = TraceSpec { block_tokens: 512, ..TraceSpec::new(TrafficKind::ALL[0], 3, requests) };
    Workload::new(&TraceGenerator::new(spec).collect::<Vec<_>>(), 1)
}

/// A long prompt, followed by a second long one and a shorter one.
fn prompts_behind_a_long_one() -> [Request; 3] {
    let prompt = |arrival_us, first: u64, blocks: u64| {
        let ids: Vec<u64> = (first..first + blocks).collect();
        request(arrival_us, &ids, blocks as u32 * 512, 1)
    };
    [prompt(0, 0, 40), prompt(1_000, 100, 40), prompt(2_000, 200, 2)]
}

#[test]
fn other_routers_set_no_priority_deadlines() {
    let workload = Workload::new(&prompts_behind_a_long_one(), 1);
    for name in BASELINES {
        let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..FleetSetup::new(1, H100, 512) };
        let report = run(&workload, &setup, by_name(name, 1).unwrap().as_mut());
        let order: Vec<_> = report.served.iter().map(|served| served.nth).collect();
        assert_eq!(order, [0, 1, 2], "{name}");
    }
}

/// Long answers to prompts of two thousand tokens, more than an instance can output in time at
/// once.
fn long_answers(requests: u64) -> Workload {
    let spec = TraceSpec { block_tokens: 512, ..TraceSpec::new(TrafficKind::ALL[0], 3, requests) };
    let longer = |request: Request| Request { output_tokens: request.output_tokens * 8, ..request };
    Workload::new(&TraceGenerator::new(spec).map(longer).collect::<Vec<_>>(), 1)
}

#[test]
fn without_a_pool_an_instance_uses_only_its_own_node() {
    let blocks: Vec<u64> = (0..40).collect();
    let trace = [0, 5_000_000, 10_000_000].map(|at| request(at, &blocks, 20_480, 1));
    let own = |router: &str| {
        run(&Workload::new(&trace, 1), &FleetSetup::new(2, H100, 512), by_name(router, 1).unwrap().as_mut())
    };
    let computed =
        |report: FleetReport| report.served.iter().map(|served| served.computed_tokens).collect::<Vec<_>>();
    assert_eq!(computed(own("round-robin")), [20_480, 20_480, 1]);
    assert_eq!(computed(own("local-prefix")), [20_480, 1, 1]);
    assert_eq!(computed(own(PRODUCTION)), [20_480, 1, 1]);
    // Mooncake transfers the longest prefix to an instance without it.
    let busy = [
        request(0, &blocks, 20_480, 1),
        request(1_000_000, &[90], 500, 1),
        request(5_000_000, &blocks, 20_480, 1),
    ];
    assert_eq!(
        run(
            &Workload::new(&busy, 1),
            &FleetSetup::new(2, H100, 512),
            by_name("mooncake", 1).unwrap().as_mut()
        )
        .served[2]
            .computed_tokens,
        1
    );
}

#[test]
fn equal_arguments_give_equal_reports_and_every_request_is_served_once() {
    let workload = generated(600);
    let setup = FleetSetup::new(4, H100, 512);
    for name in BASELINES.iter().chain([&PRODUCTION]) {
        let once = run(&workload, &setup, by_name(name, 7).unwrap().as_mut());
        let again = run(&workload, &setup, by_name(name, 7).unwrap().as_mut());
        assert_eq!(once, again, "{name}");
        let mut served: Vec<_> = once.served.iter().map(|served| served.nth).collect();
        served.sort_unstable();
        assert!(
            served.iter().copied().eq(0..workload.len()),
            "{name} served {} of {}",
            served.len(),
            workload.len()
        );
        assert!(
            once.served
                .iter()
                .all(|served| served.computed_tokens >= 1 && served.computed_tokens <= served.input_tokens)
        );
    }
}

#[test]
fn comparisons_are_complete_and_reproducible() {
    let workload = generated(400);
    let setup = FleetSetup::new(2, H100, 512);
    let capacity = capacity(&workload, &setup);
    let compared = compare(&workload, &setup, 0.5, capacity, &LoadDraw::all(3, 1));
    assert_eq!(compared.baselines.len(), BASELINES.len());
    let (mean, p90) = compared.ratios();
    assert!(mean > 0.0 && mean.is_finite() && p90 > 0.0 && p90.is_finite());
    assert!(compared.baselines.is_sorted_by(|one, other| one.ttft.mean_ms <= other.ttft.mean_ms));
    let all: Vec<_> = compared.all_ratios().collect();
    assert_eq!((all.len(), all[0]), (3, compared.ratios()), "the load itself comes first");
    assert!(all[1] != all[0] && all[2] != all[1], "other rates, other runs: {all:?}");
    let below = [LoadDraw { rate: 0.99, seed: 2 }];
    assert_eq!(compare(&workload, &setup, 0.5, capacity, &below).ratios(), all[1]);
}

#[test]
fn overload_rejects_requests_and_serves_the_others_in_time() {
    let workload = generated(300);
    let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..FleetSetup::new(2, H100, 512) };
    let capacity = capacity(&workload, &setup);
    let limits = LatencyLimits::Equal { ttft_ms: 2_000, tbt_ms: 100 };
    let goodput = goodput(&workload, &setup, 3.0, capacity, limits, &LoadDraw::all(2, 1)).unwrap();
    let production = &goodput.production;
    assert!(production.rejected > 0.0, "{production:?}");
    assert!(
        production.in_time + production.rejected > 0.97,
        "admitted requests must be in time: {production:?}"
    );
    assert!(production.long_in_time > 0.0, "long prompts must get their share: {production:?}");
    assert_eq!(goodput.baselines.len(), BASELINES.len());
    let best = &goodput.baselines[0];
    assert!(goodput.baselines.iter().all(|one| one.in_time <= best.in_time), "the best is first");
    assert!((goodput.ratio() - production.in_time / best.in_time).abs() < 1e-9);
    assert!(goodput.ratio() > 0.9, "{production:?} against {best:?}");
    let all: Vec<_> = goodput.all_ratios().collect();
    assert_eq!((all.len(), all[0].0), (2, goodput.ratio()));
    assert!(all[1].0 > 0.9, "{all:?}");
    // Ratios of counts may be equal in two draws, but other results are not.
    let second = [LoadDraw { rate: 1.01, seed: 2 }];
    let second = kvfleet_lab::routers::goodput(&workload, &setup, 3.0, capacity, limits, &second).unwrap();
    let ratios = (second.ratio(), second.ratio_by_ttft().unwrap_or_default());
    assert_eq!(ratios, all[1]);
    assert_ne!(second.production, *production);
}

#[test]
fn oracle_gap_separates_levels_of_knowledge_reproducibly() {
    let workload = generated(300);
    let setup = FleetSetup::new(2, H100, 512);
    let capacity = capacity(&workload, &setup);
    let draws = LoadDraw::all(2, 1);
    let once = oracle_gap(&workload, &setup, 0.9, capacity, 8, &draws).unwrap();
    assert_eq!(Some(&once), oracle_gap(&workload, &setup, 0.9, capacity, 8, &draws).as_ref());
    assert_eq!(once.drawn.len(), 1);
    assert_eq!(once.knowing.iter().map(|one| one.knowledge).collect::<Vec<_>>(), Knowledge::ALL);
    let [first, .., last] = &once.knowing[..] else { panic!("{once:?}") };
    let lost = once.lost.delay + once.lost.prediction + once.lost.greed;
    assert!((lost - (1.0 - last.ttft.mean_ms / first.ttft.mean_ms)).abs() < 1e-9, "{once:?}");
    // Without delays in the baseline, staleness costs nothing, and without a window the future has
    // no value.
    let fresh = oracle_gap(&workload, &setup.with_fresh_state(), 0.9, capacity, 0, &draws[..1]).unwrap();
    assert_eq!((fresh.lost.delay, fresh.lost.greed), (0.0, 0.0));
    assert!(fresh.knowing[0].ttft.mean_ms > 0.0);
}

#[test]
fn rejections_keep_inter_token_limits_under_decode_load() {
    let workload = long_answers(400).at_rate(7.0);
    let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..FleetSetup::new(2, H100, 512) };
    let setup = FleetSetup { batch: BatchLimits { chunk_tokens: 512, ..setup.batch }, ..setup };
    // The limit is reached when about sixty requests decode at once; memory allows twice as many.
    let (ttft_max_us, tbt_max_us) = (10_000_000, 12_000);
    let in_time = |router: &mut dyn Router| {
        let report = run(&workload, &setup, router);
        let slow = report.ended.iter().filter(|(_, tbt_ns)| *tbt_ns > tbt_max_us * 1_000).count();
        let in_time = report.within_limits(|_| (ttft_max_us, tbt_max_us)).len();
        (in_time, slow as f64 / report.ended.len() as f64, report.rejected)
    };
    let of_all = |tbt_max_us| Arc::from(vec![(ttft_max_us, tbt_max_us); workload.len()]);
    let [(kept, slow, rejected), (ignored, ..)] =
        [tbt_max_us, 0].map(|tbt_max_us| in_time(&mut AdmittingRouter::new(of_all(tbt_max_us))));
    assert!(rejected > 40 && slow < 0.15, "{rejected} rejected, {slow} too slow");
    assert!(kept * 10 > ignored * 11, "{kept} in time, and {ignored} without an inter-token limit");
    // The same counts for another router that uses these predictions with a threshold.
    let other = |pace: f64| ThresholdRouter {
        inner: by_name("least-loaded", 1).unwrap(),
        limits: of_all(tbt_max_us),
        shares: [1.0, pace],
    };
    let [(paced, ..), (others, ..)] = [1.0, f64::INFINITY].map(|pace| in_time(&mut other(pace)));
    assert!(kept * 10 > others * 11 && paced * 10 > others * 11, "{kept} and {paced}, and {others} without");
}
