//! One instance checked by hand, reproducible runs, and guarantees to requests.
//!
//! Not here: routers of other systems on the fleet (`lab/tests/fleet.rs`).
#![allow(clippy::unwrap_used)]

use kv_core::schedule::PROFILES;

use super::*;
use crate::generate::{TraceGenerator, TraceSpec, TrafficKind};
use crate::routers::{AdmittingRouter, LeastLoaded, PRODUCTION, Production, ReplayedDecisions, capacity};
use crate::trace::Request;

mod fairness;

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

fn served_by(trace: &[Request], instances: u32, router: &mut dyn Router) -> FleetReport {
    let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..FleetSetup::new(instances, H100, 512) };
    run(&Workload::new(trace, 1), &setup, router)
}

fn served(trace: &[Request], instances: u32) -> FleetReport {
    served_by(trace, instances, &mut Production::default())
}

fn generated(requests: u64) -> Workload {
    let spec = TraceSpec { block_tokens: 512, ..TraceSpec::new(TrafficKind::ALL[0], 3, requests) };
    Workload::new(&TraceGenerator::new(spec).collect::<Vec<_>>(), 1)
}

#[test]
fn one_request_takes_its_prefill_and_its_steps() {
    let report = served(&[request(0, &[1, 2], 1_000, 3)], 1);
    let ttft_ns = H100.step_ns + H100.prefill_ns(0, 1_000);
    assert_eq!((report.served[0].ttft_ns, report.served[0].computed_tokens), (ttft_ns, 1_000));
    let decode_ns = H100.step_ns + H100.step_ns_per_running;
    assert_eq!((report.ended_ns, report.between_tokens), (ttft_ns + 2 * decode_ns, 2));
    assert_eq!(report.between_ns, 2 * decode_ns);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_decoding_requests() {
    let long = request(0, &(0..20).collect::<Vec<_>>(), 10_000, 1);
    let chunks = [(0, 4_096), (4_096, 4_096), (8_192, 1_808)];
    let alone: u64 = chunks.iter().map(|(context, new)| H100.step_ns + H100.prefill_ns(*context, *new)).sum();
    assert_eq!(served(std::slice::from_ref(&long), 1).served[0].ttft_ns, alone);
    // Another request has its first token and decodes: each chunk takes longer by its share.
    let first = request(0, &[100], 400, 1_000);
    let late = Request { arrival_us: 100_000, ..long };
    let report = served(&[first, late], 1);
    let beside = report.served.iter().find(|served| served.nth == 1).unwrap().ttft_ns;
    let least = alone + 3 * H100.step_ns_per_running;
    let step_ns = H100.step_ns + H100.step_ns_per_running;
    assert!((least..=least + step_ns).contains(&beside), "{beside} must be {least} plus part of a step");
}

/// The production scheduler, with its recorded knowledge of the first instance's load at each
/// request.
#[derive(Default)]
struct LoadRecorder(ReplayedDecisions, Vec<(u64, u64)>);

impl Router for LoadRecorder {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let load = view.load(InstanceId(0));
        self.1.push((load.queue_tokens, load.routed_tokens));
        self.0.route(ask, view)
    }
}

#[test]
fn reports_exclude_undelivered_requests_and_follow_the_schedule() {
    let prompt = |at_ms: u64, tokens: u32| request(at_ms * 1_000, &[at_ms], tokens, 1);
    let workload = Workload::new(&[prompt(0, 20_000), prompt(100, 700), prompt(200, 300)], 1);
    let known = |report_ms: u64| {
        let reports_ns = vec![vec![report_ms * 1_000_000]];
        let setup = FleetSetup::mock_engines(1, 1, H100, true, 1_000, 0);
        let setup = FleetSetup { reports_ns, delivery_ns: 50_000_000, ..setup };
        let mut router = LoadRecorder::default();
        assert_eq!(run(&workload, &setup, &mut router).served.len(), 3);
        router.1
    };
    // The long prompt takes a second, and is reported until its end.
    assert_eq!(known(120), [(0, 0), (0, 20_000), (20_000, 0)], "the second request arrives at 150 ms");
    assert_eq!(known(160), [(0, 0), (0, 20_000), (20_700, 0)]);
    assert_eq!(known(210), [(0, 0), (0, 20_000), (0, 20_700)]);
}

#[test]
fn the_delay_of_decoding_by_a_prompt_is_independent_of_chunk_size() {
    let (tokens, decoders) = (400, 10);
    let decoding = |nth: u64| request(nth * 1_000, &[100 + nth], 400, tokens);
    let all: Vec<_> = (0..decoders).map(decoding).collect();
    let long = request(1_000_000, &(0..20).collect::<Vec<_>>(), 10_000, 1);
    let with: Vec<_> = all.iter().cloned().chain([long]).collect();
    let whole_ns = H100.prefill_ns(0, 10_000) as f64;
    for chunk_tokens in [128, 512, 2_048, 8_192] {
        let mean_ns = |trace: &[Request]| {
            let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..FleetSetup::new(1, H100, 512) };
            let setup = FleetSetup { batch: BatchLimits { chunk_tokens, ..setup.batch }, ..setup };
            let report = run(&Workload::new(trace, 1), &setup, &mut Production::default());
            let theirs = report.ended.iter().filter(|(nth, _)| (*nth as u64) < decoders);
            theirs.map(|(_, tbt_ns)| *tbt_ns as f64).sum::<f64>() / decoders as f64
        };
        // Each later token is delayed by this much on average per request, the quantity that a
        // limit applies to.
        let slower_ns = mean_ns(&with) - mean_ns(&all);
        let foreseen_ns = whole_ns / f64::from(tokens);
        assert!(
            (slower_ns / foreseen_ns - 1.0).abs() < 0.1,
            "{chunk_tokens}: {slower_ns}, predicted {foreseen_ns}"
        );
    }
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
fn shorter_waiting_prompts_start_first_only_with_priority_deadlines() {
    let workload = Workload::new(&prompts_behind_a_long_one(), 1);
    let order = |orders: bool, router: &mut dyn Router| {
        let setup = FleetSetup {
            uses_priority_deadlines: orders,
            fetch_scope: FetchScope::Pool,
            ..FleetSetup::new(1, H100, 512)
        };
        let report = run(&workload, &setup, router);
        report.served.iter().map(|served| served.nth).collect::<Vec<_>>()
    };
    assert_eq!(order(true, &mut Production::default()), [0, 2, 1]);
    assert_eq!(order(false, &mut Production::default()), [0, 1, 2]);
    assert_eq!(order(true, &mut LeastLoaded), [0, 1, 2], "it sets no deadlines");
}

#[test]
fn a_burst_with_a_shared_prefix_computes_it_only_a_few_times() {
    let shared: Vec<u64> = (0..20).collect();
    let prompt = |nth: u64| {
        let ids: Vec<u64> = shared.iter().copied().chain([1_000 + nth]).collect();
        request(nth * 500, &ids, 21 * 512, 1)
    };
    let burst: Vec<Request> = (0..32).map(prompt).collect();
    let computed = |router: &mut dyn Router| {
        let report = served_by(&burst, 8, router);
        report.served.iter().map(|served| u64::from(served.computed_tokens)).sum::<u64>()
    };
    let (whole, own) = (21 * 512, 512);
    // At most once on each instance; nodes have no blocks before the first prompt is done.
    let most = 8 * whole + 24 * own;
    let own_tokens = computed(&mut Production::default());
    assert!(own_tokens <= most, "{own_tokens} tokens of {most}");
    assert!(computed(&mut LeastLoaded) >= most, "a router without that knowledge computes it as often");
}

#[test]
fn a_prefix_in_gpu_memory_is_not_computed_again() {
    let again = request(2_000_000, &[1, 2, 3], 1_500, 1);
    let report = served(&[request(0, &[1, 2], 1_024, 1), again], 1);
    assert_eq!(report.served[1].computed_tokens, 1_500 - 1_024);
    assert_eq!(report.fetched_blocks, 0);
    assert_eq!(report.served[1].ttft_ns, H100.step_ns + H100.prefill_ns(1_024, 476));
    // Known when it was sent, so predicted.
    assert_eq!(report.served[1].predicted_ns / 1_000, report.served[1].ttft_ns.div_ceil(1_000));
}

#[test]
fn a_prefix_on_another_node_is_fetched_if_that_is_faster() {
    let blocks: Vec<u64> = (0..40).collect();
    let trace = [request(0, &blocks, 20_480, 1), request(5_000_000, &blocks, 20_480, 1)];
    let sent = [0, 1].map(|instance| Some(InstanceId(instance)));
    let report = served_by(&trace, 2, &mut ReplayedDecisions::following(sent.into()));
    let [first, second] = &report.served[..] else { panic!("{report:?}") };
    assert_eq!((first.instance, second.instance, report.fetched_blocks), (0, 1, 40));
    assert_eq!(second.computed_tokens, 1, "the last token is always computed");
    let lane = H100.dram.through(H100.network);
    let moved = H100.stream_ns(lane, 512) * 40 + lane.latency_ns;
    assert_eq!(second.ttft_ns, moved + H100.step_ns + H100.prefill_ns(20_479, 1));
    assert!(second.ttft_ns < first.ttft_ns / 5);
    // The production scheduler sends it to the instance that has the prefix.
    assert_eq!(served(&trace, 2).fetched_blocks, 0);
}

#[test]
fn memory_keeps_running_blocks_and_evicts_the_least_recently_used() {
    let prompt = |ids: &[u8]| ids.iter().map(|id| kv_core::id::BlockHash([*id; _])).collect();
    let prompts: Vec<std::sync::Arc<[_]>> = vec![prompt(&[1, 2]), prompt(&[1, 3]), prompt(&[4, 5, 6])];
    let mut memory = GpuMemory::new(512, 4, prompts.into());
    assert_eq!(memory.admit(0, 1_024, 1), Some(0), "two blocks, and one for the output");
    memory.on_computed(0);
    assert_eq!(memory.admit(1, 1_024, 1), None, "two of four blocks are needed, one is left");
    memory.on_end(0);
    assert_eq!(memory.admit(1, 1_024, 1), Some(512));
    memory.on_computed(1);
    memory.take_changes();
    memory.on_end(1);
    assert_eq!((memory.admit(2, 1_536, 1), memory.used_share()), (Some(0), 1.0));
    let gone = memory.take_changes();
    let of = |id: u8| kv_core::id::BlockHash([id; _]);
    // The tail of a prefix is evicted before its head, and the older prefix first.
    assert_eq!(
        gone,
        [Change::Dropped {
            blocks: vec![of(2), of(3), of(1)],
            tier: kv_core::id::Tier::Gpu,
            cause: Default::default()
        }]
    );
    // Larger than the whole memory: it runs alone.
    memory.on_end(2);
    assert_eq!(memory.admit(0, 1_024, 9_000), Some(0));
    memory.on_computed(0);
    memory.on_end(0);
    assert_eq!(memory.used_share(), 0.0);
}

#[test]
fn one_long_prompt_at_the_end_does_not_make_a_fleet_slower() {
    // Requests a tenth of a second apart with distinct prompts; the last prompt has this length.
    let of = |last_tokens: u32| {
        let tokens = |nth: u64| if nth == 399 { last_tokens } else { 2_000 };
        let one =
            |nth: u64| request(nth * 100_000, &[3 * nth + 1, 3 * nth + 2, 3 * nth + 3], tokens(nth), 10);
        let trace: Vec<Request> = (0..400).map(one).collect();
        capacity(&Workload::new(&trace, 1), &FleetSetup::new(2, H100, 512))
    };
    let (without, with) = (of(2_000), of(100_000));
    assert!(
        without > 10.0 && (0.95..1.05).contains(&(with / without)),
        "{with} instead of {without} per second"
    );
}

#[test]
fn lookahead_predicts_the_actual_first_tokens() {
    let workload = generated(60);
    let setup = FleetSetup { gpu_blocks: 200, ..FleetSetup::new(1, H100, 512) };
    let memory = GpuMemory::new(workload.block_tokens, setup.gpu_blocks, workload.prompts());
    let engine = Engine::new(H100, setup.batch, memory);
    // Nodes hold no blocks and there are no priority deadlines, so the requests alone determine the
    // result.
    let setup = FleetSetup { node_blocks: (0, 0), uses_priority_deadlines: false, ..setup };
    let report = run(&workload, &setup, &mut Production::default());
    let come = workload.requests.iter().enumerate().map(|(nth, request)| {
        let job = EngineJob {
            nth,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            fetched_tokens: 0,
            resident_tokens: 0,
            ready_ns: request.arrival_ns,
            priority_deadline: Timestamp(request.arrival_ns / 1_000),
        };
        (request.arrival_ns, job)
    });
    let mut foreseen = Vec::new();
    lookahead::first_tokens(&engine, &come.collect::<Vec<_>>(), 0, |nth, at_ns| foreseen.push((nth, at_ns)));
    let observed: Vec<_> = report
        .served
        .iter()
        .map(|served| (served.nth, workload.requests[served.nth].arrival_ns + served.ttft_ns))
        .collect();
    assert_eq!(report.fetched_blocks, 0);
    assert_eq!(foreseen, observed);
}

#[test]
fn slower_instances_are_predicted_correctly_and_get_less_work() {
    // Two of four compute as slowly as an older GPU generation, without any configuration of that.
    let workload = generated(3_000);
    let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..FleetSetup::new(4, H100, 512) };
    let alike = FleetSetup { slower: (0..4).map(|instance| (instance, 2.9)).collect(), ..setup.clone() };
    let per_s = capacity(&workload, &alike);
    let setup = FleetSetup { slower: vec![(2, 2.9), (3, 2.9)], ..setup };
    let report = run(&workload.at_rate(1.5 * per_s), &setup, &mut Production::default());
    // After the router's learning phase.
    let of = |slow: bool| {
        let served = report.served.iter().skip(1_000).filter(|served| (served.instance >= 2) == slow);
        served.fold((0.0, 0.0, 0_u32), |(predicted, observed, count), served| {
            (predicted + served.predicted_ns as f64, observed + served.ttft_ns as f64, count + 1)
        })
    };
    let [fast, slow] = [of(false), of(true)];
    let [fast_off, slow_off] = [fast, slow].map(|(predicted, observed, _)| predicted / observed);
    println!(
        "predicted over observed: {fast_off:.2} for fast instances, {slow_off:.2} for slow ones; {} and {} \
         requests, mean {} ms",
        fast.2,
        slow.2,
        report.ttft().mean_ms
    );
    assert!((0.75..1.25).contains(&fast_off) && (0.75..1.25).contains(&slow_off), "{fast_off} {slow_off}");
    assert!(fast.2 > slow.2, "{} {}", fast.2, slow.2);
}

#[test]
fn a_joining_instance_gets_a_growing_share() {
    // A prompt of 0.22 s every 80 ms keeps three instances busy, and then a fourth joins.
    let trace: Vec<Request> = (0..480).map(|nth| request(nth * 80_000, &[], 5_000, 1)).collect();
    let workload = Workload::new(&trace, 1);
    let join_ns = 10_000_000_000;
    let setup = FleetSetup { joins: vec![(3, join_ns)], ..FleetSetup::new(4, H100, 512) };
    let report = run(&workload, &setup, &mut Production::default());
    assert_eq!(report.served.len(), trace.len());
    // The joiner's share of requests that arrived in this range of seconds after its join.
    let share = |from_s: u64, to_s: u64| {
        let at = |served: &&ServedRequest| workload.requests[served.nth].arrival_ns;
        let span = join_ns + from_s * 1_000_000_000..join_ns + to_s * 1_000_000_000;
        let all: Vec<_> = report.served.iter().filter(|served| span.contains(&at(served))).collect();
        all.iter().filter(|served| served.instance == 3).count() as f64 / all.len() as f64
    };
    let before = report.served.iter().filter(|one| workload.requests[one.nth].arrival_ns < join_ns);
    assert_eq!(before.filter(|one| one.instance == 3).count(), 0);
    let [first, second, after] = [share(0, 3), share(3, 10), share(10, 20)];
    assert!(first < 0.2 && first <= second && second <= after + 0.02, "{first} {second} {after}");
    assert!((0.2..0.3).contains(&after), "{after}");
}

fn recorded_run(trace: &[Request], setup: &FleetSetup) -> (FleetReport, ReplayedDecisions) {
    let mut router = ReplayedDecisions::recording();
    let report = run(&Workload::new(trace, 1), setup, &mut router);
    (report, router)
}

#[test]
fn mock_engines_keep_no_blocks_and_output_one_token() {
    let blocks: Vec<u64> = (0..8).collect();
    let prompt =
        |arrival_us, more: u64| request(arrival_us, &[&blocks[..], &[100 + more]].concat(), 9 * 512, 400);
    let trace = [prompt(0, 0), prompt(60_000_000, 1), prompt(120_000_000, 2)];
    let setup = FleetSetup { first: 1, ..FleetSetup::mock_engines(2, 2, H100, true, 1_000, 0) };
    let (report, router) = recorded_run(&trace, &setup);
    assert_eq!(report.between_tokens, 0, "no token follows the first one");
    let decided: Vec<&Decision> = router.decisions.iter().flatten().collect();
    assert!(decided.iter().all(|decision| decision.resident_blocks == 0 && decision.instance.0 >= 1));
    let [first, second, third] = &report.served[..] else { panic!("{report:?}") };
    assert_eq!((first.fetched, second.instance), ([[0; 3]; 2], first.instance));
    let dram = kv_core::id::Tier::Dram as usize;
    assert_eq!(
        (second.fetched[0][dram], third.fetched[0][dram]),
        (8, 8),
        "the common blocks, from their own node"
    );
    // Sent elsewhere, it fetches from the other's node and leaves no copy at its own.
    let elsewhere = InstanceId(3 - first.instance);
    let mut led = ReplayedDecisions::following(vec![None, Some(elsewhere), Some(elsewhere)]);
    let report = run(&Workload::new(&trace, 1), &setup, &mut led);
    let others: Vec<u32> = report.served.iter().map(|served| served.fetched[1][dram]).collect();
    assert_eq!(others, [0, 8, 8]);
    let own = led.decisions[1].as_ref().unwrap().instance;
    assert_eq!(own.0, first.instance, "its own decision must be recorded");
}

#[test]
fn timeless_compute_does_not_change_predictions() {
    let trace: Vec<Request> = (0..40).map(|nth| request(nth * 50_000, &[nth], 400, 1)).collect();
    let predicted = |takes_time: bool, report_every_ns: u64| {
        let setup =
            FleetSetup { report_every_ns, ..FleetSetup::mock_engines(1, 1, H100, takes_time, 100, 0) };
        let (report, router) = recorded_run(&trace, &setup);
        assert_eq!(report.served.len(), 40);
        let last = router.decisions[39].clone().unwrap();
        (last.uncorrected.prefill_us, last.predicted.prefill_us, report.served[0].ttft_ns)
    };
    let (parts, learnt, ttft_ns) = predicted(false, 1_000_000);
    assert_eq!((learnt, ttft_ns), (parts, 0));
    let (.., ttft_ns) = predicted(true, 1_000_000);
    assert_eq!(ttft_ns, H100.step_ns + H100.prefill_ns(0, 400));
}

#[test]
fn instances_without_an_own_node_save_to_others() {
    let trace: Vec<Request> = (0..30).map(|nth| request(nth * 1_000_000, &[nth], 512, 1)).collect();
    let setup =
        FleetSetup { first: 1, ..FleetSetup::mock_engines(3, 2, H100, false, 1_000, 0) }.with_fresh_state();
    let (report, router) = recorded_run(&trace, &setup);
    assert_eq!(report.served.len(), 30);
    for decision in router.decisions.iter().flatten() {
        let save_to = decision.save_to.unwrap().node.0;
        assert!((1..=2).contains(&save_to), "{decision:?}");
        assert!(decision.instance.0 == 3 || save_to == decision.instance.0, "{decision:?}");
    }
    assert!(report.served.iter().any(|served| served.instance == 3));
}

/// Long answers to prompts of two thousand tokens, more than an instance can output in time at
/// once.
fn long_answers(requests: u64) -> Workload {
    let spec = TraceSpec { block_tokens: 512, ..TraceSpec::new(TrafficKind::ALL[0], 3, requests) };
    let longer = |request: Request| Request { output_tokens: request.output_tokens * 8, ..request };
    Workload::new(&TraceGenerator::new(spec).map(longer).collect::<Vec<_>>(), 1)
}

#[test]
fn inter_token_latency_and_memory_waits_are_predicted() {
    let workload = long_answers(600);
    // Memory for half of the requests that decode at once at this rate.
    let setup =
        FleetSetup { fetch_scope: FetchScope::Pool, gpu_blocks: 200, ..FleetSetup::new(2, H100, 512) };
    let report = run(&workload.at_rate(2.5), &setup, &mut Production::default());
    let (median, bias) = report.tbt_prediction_error(100);
    assert!(median < 0.15 && bias.abs() < 0.15, "inter-token latency: {median} {bias}");
    let (median, bias) = report.ttft_prediction_error(100);
    assert!(report.ttft().mean_ms > 1_000.0, "requests must wait for memory: {:?}", report.ttft());
    assert!(median < 0.15 && bias.abs() < 0.4, "first tokens: {median} {bias}");
}
