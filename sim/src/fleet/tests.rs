//! One instance by hand, equal runs, and what every request gets whoever routes.
#![allow(clippy::unwrap_used)]

use kv_core::schedule::PROFILES;

use super::*;
use crate::generate::{Generator, Kind, Spec};
use crate::routers::admitting::{Admitting, Threshold};
use crate::routers::{
    BASELINES, Draw, Knowledge, Led, Limits, PRODUCTION, by_name, capacity, compare, goodput, regret,
};
use crate::trace::Request;

mod fair;

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

fn served(trace: &[Request], instances: u32, router: &str) -> Report {
    let setup = Setup { plane: Plane::Pool, ..Setup::new(instances, H100, 512) };
    run(&Workload::new(trace, 1), &setup, by_name(router, 1).unwrap().as_mut())
}

fn generated(requests: u64) -> Workload {
    let spec = Spec { block_tokens: 512, ..Spec::new(Kind::ALL[0], 3, requests) };
    Workload::new(&Generator::new(spec).collect::<Vec<_>>(), 1)
}

#[test]
fn one_request_takes_its_prefill_and_its_steps() {
    let report = served(&[request(0, &[1, 2], 1_000, 3)], 1, PRODUCTION);
    let ttft_ns = H100.step_ns + H100.prefill_ns(0, 1_000);
    assert_eq!((report.served[0].ttft_ns, report.served[0].computed_tokens), (ttft_ns, 1_000));
    let decode_ns = H100.step_ns + H100.step_ns_per_running;
    assert_eq!((report.ended_ns, report.between_tokens), (ttft_ns + 2 * decode_ns, 2));
    assert_eq!(report.between_ns, 2 * decode_ns);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_what_decodes() {
    let long = request(0, &(0..20).collect::<Vec<_>>(), 10_000, 1);
    let chunks = [(0, 4_096), (4_096, 4_096), (8_192, 1_808)];
    let alone: u64 = chunks.iter().map(|(context, new)| H100.step_ns + H100.prefill_ns(*context, *new)).sum();
    assert_eq!(served(std::slice::from_ref(&long), 1, PRODUCTION).served[0].ttft_ns, alone);
    // Another has its first token out and decodes: each chunk takes longer by what it adds.
    let first = request(0, &[100], 400, 1_000);
    let late = Request { arrival_us: 100_000, ..long };
    let report = served(&[first, late], 1, PRODUCTION);
    let beside = report.served.iter().find(|served| served.nth == 1).unwrap().ttft_ns;
    let least = alone + 3 * H100.step_ns_per_running;
    let step_ns = H100.step_ns + H100.step_ns_per_running;
    assert!((least..=least + step_ns).contains(&beside), "{beside} is not {least} and a part of a step");
}

/// The production scheduler, with what it knew of the first instance's load at each request.
#[derive(Default)]
struct Watching(Led, Vec<(u64, u64)>);

impl Router for Watching {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let load = view.load(InstanceId(0));
        self.1.push((load.queue_tokens, load.routed_tokens));
        self.0.route(ask, view)
    }
}

#[test]
fn a_report_says_nothing_of_a_request_that_is_on_its_way_and_comes_when_it_is_said_to() {
    let prompt = |at_ms: u64, tokens: u32| request(at_ms * 1_000, &[at_ms], tokens, 1);
    let workload = Workload::new(&[prompt(0, 20_000), prompt(100, 700), prompt(200, 300)], 1);
    let known = |report_ms: u64| {
        let reports_ns = vec![vec![report_ms * 1_000_000]];
        let setup = Setup::stand_ins((1, 1), H100, true, (1_000, 0));
        let setup = Setup { reports_ns, delivery_ns: 50_000_000, ..setup };
        let mut router = Watching::default();
        assert_eq!(run(&workload, &setup, &mut router).served.len(), 3);
        router.1
    };
    // The long one takes a second, and is told of until its end.
    assert_eq!(known(120), [(0, 0), (0, 20_000), (20_000, 0)], "the second is not there before 150 ms");
    assert_eq!(known(160), [(0, 0), (0, 20_000), (20_700, 0)]);
    assert_eq!(known(210), [(0, 0), (0, 20_000), (0, 20_700)]);
}

#[test]
fn a_long_prompt_slows_those_that_decode_by_all_of_it_in_whatever_chunks_it_is_computed() {
    let (tokens, decoders) = (400, 10);
    let decoding = |nth: u64| request(nth * 1_000, &[100 + nth], 400, tokens);
    let all: Vec<_> = (0..decoders).map(decoding).collect();
    let long = request(1_000_000, &(0..20).collect::<Vec<_>>(), 10_000, 1);
    let with: Vec<_> = all.iter().cloned().chain([long]).collect();
    let whole_ns = H100.prefill_ns(0, 10_000) as f64;
    for chunk_tokens in [128, 512, 2_048, 8_192] {
        let mean_ns = |trace: &[Request]| {
            let setup = Setup { plane: Plane::Pool, ..Setup::new(1, H100, 512) };
            let setup = Setup { batch: Batch { chunk_tokens, ..setup.batch }, ..setup };
            let report = run(&Workload::new(trace, 1), &setup, by_name(PRODUCTION, 1).unwrap().as_mut());
            let theirs = report.ended.iter().filter(|(nth, _)| (*nth as u64) < decoders);
            theirs.map(|(_, tbt_ns)| *tbt_ns as f64).sum::<f64>() / decoders as f64
        };
        // Each of their tokens but the first comes by so much later, on the mean of a request: what a limit is about.
        let slower_ns = mean_ns(&with) - mean_ns(&all);
        let foreseen_ns = whole_ns / f64::from(tokens);
        assert!((slower_ns / foreseen_ns - 1.0).abs() < 0.1, "{chunk_tokens}: {slower_ns} for {foreseen_ns}");
    }
}

/// Prompts behind a long one: a longer and then a shorter.
fn behind_a_long_one() -> [Request; 3] {
    let prompt = |arrival_us, first: u64, blocks: u64| {
        let ids: Vec<u64> = (first..first + blocks).collect();
        request(arrival_us, &ids, blocks as u32 * 512, 1)
    };
    [prompt(0, 0, 40), prompt(1_000, 100, 40), prompt(2_000, 200, 2)]
}

#[test]
fn the_shorter_of_those_that_wait_is_begun_first_and_in_order_of_coming_where_no_order_is_kept() {
    let workload = Workload::new(&behind_a_long_one(), 1);
    let order = |orders: bool, router: &str| {
        let setup = Setup { orders, plane: Plane::Pool, ..Setup::new(1, H100, 512) };
        let report = run(&workload, &setup, by_name(router, 1).unwrap().as_mut());
        report.served.iter().map(|served| served.nth).collect::<Vec<_>>()
    };
    assert_eq!(order(true, PRODUCTION), [0, 2, 1]);
    assert_eq!(order(false, PRODUCTION), [0, 1, 2]);
    for router in BASELINES {
        assert_eq!(order(true, router), [0, 1, 2], "{router} has no order of its own");
    }
}

#[test]
fn a_burst_of_prompts_that_begin_alike_computes_their_prefix_a_few_times_and_not_for_each() {
    let shared: Vec<u64> = (0..20).collect();
    let prompt = |nth: u64| {
        let ids: Vec<u64> = shared.iter().copied().chain([1_000 + nth]).collect();
        request(nth * 500, &ids, 21 * 512, 1)
    };
    let burst: Vec<Request> = (0..32).map(prompt).collect();
    let computed = |router: &str| {
        let report = served(&burst, 8, router);
        report.served.iter().map(|served| u64::from(served.computed_tokens)).sum::<u64>()
    };
    let (whole, own) = (21 * 512, 512);
    // At most once on each instance; nodes have nothing before the first of them is done.
    let most = 8 * whole + 24 * own;
    assert!(computed(PRODUCTION) <= most, "{} tokens of {most}", computed(PRODUCTION));
    assert!(computed("least-loaded") >= most, "who knows nothing of it computes it as often");
}

#[test]
fn a_prefix_in_gpu_memory_is_not_computed_again() {
    let again = request(2_000_000, &[1, 2, 3], 1_500, 1);
    let report = served(&[request(0, &[1, 2], 1_024, 1), again], 1, PRODUCTION);
    assert_eq!(report.served[1].computed_tokens, 1_500 - 1_024);
    assert_eq!(report.fetched_blocks, 0);
    assert_eq!(report.served[1].ttft_ns, H100.step_ns + H100.prefill_ns(1_024, 476));
    // Known before it was sent, so predicted.
    assert_eq!(report.served[1].predicted_ns / 1_000, report.served[1].ttft_ns.div_ceil(1_000));
}

#[test]
fn a_prefix_at_another_node_is_fetched_or_computed_whichever_is_faster() {
    let blocks: Vec<u64> = (0..40).collect();
    let trace = [request(0, &blocks, 20_480, 1), request(5_000_000, &blocks, 20_480, 1)];
    let report = served(&trace, 2, "round-robin");
    let [first, second] = &report.served[..] else { panic!("{report:?}") };
    assert_eq!((first.instance, second.instance, report.fetched_blocks), (0, 1, 40));
    assert_eq!(second.computed_tokens, 1, "the last token is always computed");
    let lane = H100.dram.through(H100.network);
    let moved = H100.stream_ns(lane, 512) * 40 + lane.latency_ns;
    assert_eq!(second.ttft_ns, moved + H100.step_ns + H100.prefill_ns(20_479, 1));
    assert!(second.ttft_ns < first.ttft_ns / 5);
    // The production scheduler sends it to where it is.
    assert_eq!(served(&trace, 2, PRODUCTION).fetched_blocks, 0);
}

#[test]
fn without_a_pool_an_instance_has_what_its_own_node_has() {
    let blocks: Vec<u64> = (0..40).collect();
    let trace = [0, 5_000_000, 10_000_000].map(|at| request(at, &blocks, 20_480, 1));
    let own = |router: &str| {
        run(&Workload::new(&trace, 1), &Setup::new(2, H100, 512), by_name(router, 1).unwrap().as_mut())
    };
    let computed =
        |report: Report| report.served.iter().map(|served| served.computed_tokens).collect::<Vec<_>>();
    assert_eq!(computed(own("round-robin")), [20_480, 20_480, 1]);
    assert_eq!(computed(own("local-prefix")), [20_480, 1, 1]);
    assert_eq!(computed(own(PRODUCTION)), [20_480, 1, 1]);
    // Mooncake's moves the longest prefix to where it is not.
    let busy = [
        request(0, &blocks, 20_480, 1),
        request(1_000_000, &[90], 500, 1),
        request(5_000_000, &blocks, 20_480, 1),
    ];
    assert_eq!(
        run(&Workload::new(&busy, 1), &Setup::new(2, H100, 512), by_name("mooncake", 1).unwrap().as_mut())
            .served[2]
            .computed_tokens,
        1
    );
}

#[test]
fn memory_keeps_what_runs_and_drops_what_was_used_longest_ago() {
    let prompt = |ids: &[u8]| ids.iter().map(|id| kv_core::id::BlockHash([*id; 16])).collect();
    let prompts: Vec<std::sync::Arc<[_]>> = vec![prompt(&[1, 2]), prompt(&[1, 3]), prompt(&[4, 5, 6])];
    let mut memory = Memory::new(512, 4, prompts.into());
    assert_eq!(memory.admit(0, 1_024, 1), Some(0), "two blocks and one for what it says");
    memory.computed(0);
    assert_eq!(memory.admit(1, 1_024, 1), None, "two of four are needed, one is left");
    memory.ended(0);
    assert_eq!(memory.admit(1, 1_024, 1), Some(512));
    memory.computed(1);
    memory.take_changes();
    memory.ended(1);
    assert_eq!((memory.admit(2, 1_536, 1), memory.in_use()), (Some(0), 1.0));
    let gone = memory.take_changes();
    let of = |id: u8| kv_core::id::BlockHash([id; 16]);
    // The tail of a prefix goes before its head, and the older prefix first.
    assert_eq!(
        gone,
        [Change::Dropped {
            blocks: vec![of(2), of(3), of(1)],
            tier: kv_core::id::Tier::Gpu,
            cause: Default::default()
        }]
    );
    // Larger than all of it: alone, it runs.
    memory.ended(2);
    assert_eq!(memory.admit(0, 1_024, 9_000), Some(0));
    memory.computed(0);
    memory.ended(0);
    assert_eq!(memory.in_use(), 0.0);
}

#[test]
fn equal_arguments_give_equal_reports_and_every_request_is_served_once() {
    let workload = generated(600);
    let setup = Setup::new(4, H100, 512);
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
fn a_point_is_the_same_for_all_but_who_routes() {
    let workload = generated(400);
    let setup = Setup::new(2, H100, 512);
    let capacity = capacity(&workload, &setup, 1);
    let compared = compare(&workload, &setup, (0.5, capacity), &Draw::all(3, 1));
    assert_eq!(compared.baselines.len(), BASELINES.len());
    let (mean, p90) = compared.ratios();
    assert!(mean > 0.0 && mean.is_finite() && p90 > 0.0 && p90.is_finite());
    assert!(compared.baselines.is_sorted_by(|one, other| one.ttft.mean_ms <= other.ttft.mean_ms));
    let all: Vec<_> = compared.all_ratios().collect();
    assert_eq!((all.len(), all[0]), (3, compared.ratios()), "the load itself comes first");
    assert!(all[1] != all[0] && all[2] != all[1], "other rates, other runs: {all:?}");
    let below = [Draw { rate: 0.99, seed: 2 }];
    assert_eq!(compare(&workload, &setup, (0.5, capacity), &below).ratios(), all[1]);
}

#[test]
fn one_long_prompt_at_the_end_does_not_make_a_fleet_slower() {
    // Requests a tenth of a second apart without anything in common, the last of so many tokens.
    let of = |last_tokens: u32| {
        let tokens = |nth: u64| if nth == 399 { last_tokens } else { 2_000 };
        let one =
            |nth: u64| request(nth * 100_000, &[3 * nth + 1, 3 * nth + 2, 3 * nth + 3], tokens(nth), 10);
        let trace: Vec<Request> = (0..400).map(one).collect();
        capacity(&Workload::new(&trace, 1), &Setup::new(2, H100, 512), 1)
    };
    let (without, with) = (of(2_000), of(100_000));
    assert!(without > 10.0 && (0.95..1.05).contains(&(with / without)), "{with} of {without} a second");
}

#[test]
fn where_more_is_offered_than_is_served_requests_are_turned_away_and_the_others_are_in_time() {
    let workload = generated(300);
    let setup = Setup { plane: Plane::Pool, ..Setup::new(2, H100, 512) };
    let capacity = capacity(&workload, &setup, 1);
    let limits = Limits::Equal { ttft_ms: 2_000, tbt_ms: 100 };
    let goodput = goodput(&workload, &setup, (3.0, capacity), limits, &Draw::all(2, 1)).unwrap();
    let production = &goodput.production;
    assert!(production.rejected > 0.0, "{production:?}");
    assert!(production.in_time + production.rejected > 0.97, "what is let in is in time: {production:?}");
    assert!(production.long_in_time > 0.0, "long prompts have their part: {production:?}");
    assert_eq!(goodput.baselines.len(), BASELINES.len());
    let best = &goodput.baselines[0];
    assert!(goodput.baselines.iter().all(|one| one.in_time <= best.in_time), "the best is first");
    assert!((goodput.ratio() - production.in_time / best.in_time).abs() < 1e-9);
    assert!(goodput.ratio() > 0.9, "{production:?} against {best:?}");
    let all: Vec<_> = goodput.all_ratios().collect();
    assert_eq!((all.len(), all[0].0), (2, goodput.ratio()));
    assert!(all[1].0 > 0.9, "{all:?}");
    // Ratios of counts may well be the same in two draws: what else comes of them is not.
    let second = [Draw { rate: 1.01, seed: 2 }];
    let second = crate::routers::goodput(&workload, &setup, (3.0, capacity), limits, &second).unwrap();
    let ratios = (second.ratio(), second.ratio_by_ttft().unwrap_or_default());
    assert_eq!(ratios, all[1]);
    assert_ne!(second.production, *production);
}

#[test]
fn what_is_foreseen_of_an_instance_is_what_comes() {
    let workload = generated(60);
    let setup = Setup { gpu_blocks: 200, ..Setup::new(1, H100, 512) };
    let memory = Memory::new(workload.block_tokens, setup.gpu_blocks, workload.prompts());
    let engine = Engine::new(H100, setup.batch, memory);
    // Nodes hold nothing and nobody keeps an order, so that a request is all that there is to know.
    let setup = Setup { node_blocks: (0, 0), orders: false, ..setup };
    let mut router = by_name(PRODUCTION, 1).unwrap();
    let report = run(&workload, &setup, router.as_mut());
    let come = workload.requests.iter().enumerate().map(|(nth, request)| {
        let job = Job {
            nth,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            fetched_tokens: 0,
            resident_tokens: 0,
            ready_ns: request.arrival_ns,
            turn: Timestamp(request.arrival_ns / 1_000),
        };
        (request.arrival_ns, job)
    });
    let mut foreseen = Vec::new();
    ahead::firsts(&engine, &come.collect::<Vec<_>>(), 0, |nth, at_ns| foreseen.push((nth, at_ns)));
    let observed: Vec<_> = report
        .served
        .iter()
        .map(|served| (served.nth, workload.requests[served.nth].arrival_ns + served.ttft_ns))
        .collect();
    assert_eq!(report.fetched_blocks, 0);
    assert_eq!(foreseen, observed);
}

#[test]
fn better_knowledge_is_told_apart_and_is_the_same_each_time() {
    let workload = generated(300);
    let setup = Setup::new(2, H100, 512);
    let capacity = capacity(&workload, &setup, 1);
    let draws = Draw::all(2, 1);
    let once = regret(&workload, &setup, (0.9, capacity), 8, &draws).unwrap();
    assert_eq!(Some(&once), regret(&workload, &setup, (0.9, capacity), 8, &draws).as_ref());
    assert_eq!(once.drawn.len(), 1);
    assert_eq!(once.knowing.iter().map(|one| one.knowledge).collect::<Vec<_>>(), Knowledge::ALL);
    let [first, .., last] = &once.knowing[..] else { panic!("{once:?}") };
    let lost = once.lost.delay + once.lost.prediction + once.lost.greed;
    assert!((lost - (1.0 - last.ttft.mean_ms / first.ttft.mean_ms)).abs() < 1e-9, "{once:?}");
    // Where nothing is old as it is, staleness costs nothing, and without a window there is nothing to come.
    let fresh = regret(&workload, &setup.fresh(), (0.9, capacity), 0, &draws[..1]).unwrap();
    assert_eq!((fresh.lost.delay, fresh.lost.greed), (0.0, 0.0));
    assert!(fresh.knowing[0].ttft.mean_ms > 0.0);
}

#[test]
fn an_instance_of_a_slower_kind_is_predicted_as_it_is_and_given_less() {
    // Two of four compute as slowly as another generation of GPUs does, and nobody says so.
    let workload = generated(3_000);
    let setup = Setup { plane: Plane::Pool, ..Setup::new(4, H100, 512) };
    let alike = Setup { slower: (0..4).map(|instance| (instance, 2.9)).collect(), ..setup.clone() };
    let per_s = capacity(&workload, &alike, 1);
    let setup = Setup { slower: vec![(2, 2.9), (3, 2.9)], ..setup };
    let report = run(&workload.at_rate(1.5 * per_s), &setup, by_name(PRODUCTION, 1).unwrap().as_mut());
    // Behind what a router has to learn first.
    let of = |slow: bool| {
        let served = report.served.iter().skip(1_000).filter(|served| (served.instance >= 2) == slow);
        served.fold((0.0, 0.0, 0_u32), |(predicted, observed, count), served| {
            (predicted + served.predicted_ns as f64, observed + served.ttft_ns as f64, count + 1)
        })
    };
    let [fast, slow] = [of(false), of(true)];
    let [fast_off, slow_off] = [fast, slow].map(|(predicted, observed, _)| predicted / observed);
    println!(
        "predicted over observed: {fast_off:.2} of the fast ones, {slow_off:.2} of the slow ones; {} and {} requests, mean {} ms",
        fast.2,
        slow.2,
        report.ttft().mean_ms
    );
    assert!((0.75..1.25).contains(&fast_off) && (0.75..1.25).contains(&slow_off), "{fast_off} {slow_off}");
    assert!(fast.2 > slow.2, "{} {}", fast.2, slow.2);
}

#[test]
fn who_joins_in_mid_run_is_given_a_growing_share_and_all_of_it_in_the_end() {
    // A prompt of 0.22 s each 80 ms: three instances are busy with that, and then a fourth joins.
    let trace: Vec<Request> = (0..480).map(|nth| request(nth * 80_000, &[], 5_000, 1)).collect();
    let workload = Workload::new(&trace, 1);
    let join_ns = 10_000_000_000;
    let setup = Setup { joins: vec![(3, join_ns)], ..Setup::new(4, H100, 512) };
    let report = run(&workload, &setup, by_name(PRODUCTION, 1).unwrap().as_mut());
    assert_eq!(report.served.len(), trace.len());
    // Of what came in a span of seconds since it joined, the share that the joiner served.
    let share = |from_s: u64, to_s: u64| {
        let at = |served: &&Served| workload.requests[served.nth].arrival_ns;
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

fn led_run(trace: &[Request], setup: &Setup) -> (Report, Led) {
    let mut router = Led::alone();
    let report = run(&Workload::new(trace, 1), setup, &mut router);
    (report, router)
}

#[test]
fn stand_ins_keep_nothing_in_gpu_memory_say_one_token_and_save_what_they_computed() {
    let blocks: Vec<u64> = (0..8).collect();
    let prompt =
        |arrival_us, more: u64| request(arrival_us, &[&blocks[..], &[100 + more]].concat(), 9 * 512, 400);
    let trace = [prompt(0, 0), prompt(60_000_000, 1), prompt(120_000_000, 2)];
    let setup = Setup { first: 1, ..Setup::stand_ins((2, 2), H100, true, (1_000, 0)) };
    let (report, router) = led_run(&trace, &setup);
    assert_eq!(report.between_tokens, 0, "nothing is said behind the first token");
    let decided: Vec<&Decision> = router.decided.iter().flatten().collect();
    assert!(decided.iter().all(|decision| decision.resident_blocks == 0 && decision.instance.0 >= 1));
    let [first, second, third] = &report.served[..] else { panic!("{report:?}") };
    assert_eq!((first.fetched, second.instance), ([[0; 3]; 2], first.instance));
    let dram = kv_core::id::Tier::Dram as usize;
    assert_eq!(
        (second.fetched[0][dram], third.fetched[0][dram]),
        (8, 8),
        "the common blocks, from their own node"
    );
    // Sent elsewhere, it fetches from the other's node and leaves no copy of that at its own.
    let elsewhere = InstanceId(3 - first.instance);
    let mut led = Led::to(vec![None, Some(elsewhere), Some(elsewhere)]);
    let report = run(&Workload::new(&trace, 1), &setup, &mut led);
    let others: Vec<u32> = report.served.iter().map(|served| served.fetched[1][dram]).collect();
    assert_eq!(others, [0, 8, 8]);
    let own = led.decided[1].as_ref().unwrap().instance;
    assert_eq!(own.0, first.instance, "it says where it would have gone");
}

#[test]
fn compute_that_takes_no_time_teaches_nothing_and_what_takes_time_does_with_the_next_report() {
    let trace: Vec<Request> = (0..40).map(|nth| request(nth * 50_000, &[nth], 400, 1)).collect();
    let predicted = |takes_time: bool, report_every_ns: u64| {
        let setup = Setup { report_every_ns, ..Setup::stand_ins((1, 1), H100, takes_time, (100, 0)) };
        let (report, router) = led_run(&trace, &setup);
        assert_eq!(report.served.len(), 40);
        let last = router.decided[39].clone().unwrap();
        (last.parts.prefill_us, last.predicted.prefill_us, report.served[0].ttft_ns)
    };
    let (parts, learnt, ttft_ns) = predicted(false, 1_000_000);
    assert_eq!((learnt, ttft_ns), (parts, 0));
    let (.., ttft_ns) = predicted(true, 1_000_000);
    assert_eq!(ttft_ns, H100.step_ns + H100.prefill_ns(0, 400));
}

#[test]
fn instances_without_a_node_of_their_own_save_at_others() {
    let trace: Vec<Request> = (0..30).map(|nth| request(nth * 1_000_000, &[nth], 512, 1)).collect();
    let setup = Setup { first: 1, ..Setup::stand_ins((3, 2), H100, false, (1_000, 0)) }.fresh();
    let (report, router) = led_run(&trace, &setup);
    assert_eq!(report.served.len(), 30);
    for decision in router.decided.iter().flatten() {
        let save_to = decision.save_to.unwrap().node.0;
        assert!((1..=2).contains(&save_to), "{decision:?}");
        assert!(decision.instance.0 == 3 || save_to == decision.instance.0, "{decision:?}");
    }
    assert!(report.served.iter().any(|served| served.instance == 3));
}

/// Long answers to prompts of two thousand tokens, more than an instance can say in time at once.
fn talkative(requests: u64) -> Workload {
    let spec = Spec { block_tokens: 512, ..Spec::new(Kind::ALL[0], 3, requests) };
    let longer = |request: Request| Request { output_tokens: request.output_tokens * 8, ..request };
    Workload::new(&Generator::new(spec).map(longer).collect::<Vec<_>>(), 1)
}

#[test]
fn times_between_tokens_and_waits_for_room_are_predicted() {
    let workload = talkative(600);
    // Half of what decodes at once at this rate has room.
    let setup = Setup { plane: Plane::Pool, gpu_blocks: 200, ..Setup::new(2, H100, 512) };
    let report = run(&workload.at_rate(2.5), &setup, by_name(PRODUCTION, 1).unwrap().as_mut());
    let (median, bias) = report.pace_error(100);
    assert!(median < 0.15 && bias.abs() < 0.15, "times between tokens: {median} {bias}");
    let (median, bias) = report.prediction_error(100);
    assert!(report.ttft().mean_ms > 1_000.0, "room is waited for: {:?}", report.ttft());
    assert!(median < 0.15 && bias.abs() < 0.4, "first tokens: {median} {bias}");
}

#[test]
fn where_decoding_is_what_binds_limits_between_tokens_are_kept_by_turning_away() {
    let workload = talkative(400).at_rate(7.0);
    let setup = Setup { plane: Plane::Pool, ..Setup::new(2, H100, 512) };
    let setup = Setup { batch: Batch { chunk_tokens: 512, ..setup.batch }, ..setup };
    // As many as that are apart where some sixty decode at once; twice as many have room.
    let (ttft_max_us, tbt_max_us) = (10_000_000, 12_000);
    let in_time = |router: &mut dyn Router| {
        let report = run(&workload, &setup, router);
        let slow = report.ended.iter().filter(|(_, tbt_ns)| *tbt_ns > tbt_max_us * 1_000).count();
        let in_time = report.in_time(|_| (ttft_max_us, tbt_max_us)).len();
        (in_time, slow as f64 / report.ended.len() as f64, report.rejected)
    };
    let of_all = |tbt_max_us| std::sync::Arc::from(vec![(ttft_max_us, tbt_max_us); workload.len()]);
    let [(kept, slow, rejected), (ignored, ..)] =
        [tbt_max_us, 0].map(|tbt_max_us| in_time(&mut Admitting::new(of_all(tbt_max_us))));
    assert!(rejected > 40 && slow < 0.15, "{rejected} turned away, {slow} too slow");
    assert!(kept * 10 > ignored * 11, "{kept} in time, and {ignored} without a limit between tokens");
    // The same counts for another router that looks at what this one predicts, and not at less.
    let other = |pace: f64| Threshold {
        inner: by_name("least-loaded", 1).unwrap(),
        limits: of_all(tbt_max_us),
        shares: [1.0, pace],
    };
    let [(paced, ..), (others, ..)] = [1.0, f64::INFINITY].map(|pace| in_time(&mut other(pace)));
    assert!(kept * 10 > others * 11 && paced * 10 > others * 11, "{kept} and {paced}, and {others} without");
}
