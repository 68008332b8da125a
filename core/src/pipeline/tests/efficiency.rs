//! Waiting where it pays off: cases that a rule of always recomputing would fail.

use super::world::{JobOutcome, SliceArrival, SourcePath, TestJob, TracePath, arrival_sequence};
use super::*;

const LAYERS: u32 = 32;
const BLOCKS: u32 = 100;
const BLOCK_BYTES: u64 = 32_000;

/// A job with a history that takes `hist_ns` to compute and `load_ns` to load, and with new tokens
/// of a millisecond a layer.
fn job(hist_ns: u64, load_ns: u64, arrive: ArrivalOrder) -> TestJob {
    let layer_ns = hist_ns / u64::from(BLOCKS * LAYERS);
    TestJob {
        costs: ComputeCosts {
            block_layer_ns: vec![layer_ns; BLOCKS as usize],
            new_layer_ns: COMPUTE_NS / u64::from(LAYERS),
            layers: LAYERS,
        },
        slice_bytes: vec![1_000; LAYERS as usize],
        arrival_order: arrive,
        bytes_per_s: u64::try_from(
            u128::from(BLOCK_BYTES * u64::from(BLOCKS)) * 1_000_000_000 / u128::from(load_ns),
        )
        .unwrap(),
        decision_ns: 200,
        late_ns: 10_000,
    }
}

const COMPUTE_NS: u64 = 32_000_000;

/// The whole history, evenly over `load_ns` from `from_ns`.
fn steady(comes: ArrivalOrder, load_ns: u64, from_ns: u64) -> Vec<SliceArrival> {
    let all = arrival_sequence(comes, BLOCKS, LAYERS);
    let count = all.len() as u64;
    let at = |position: u64| from_ns + load_ns * (position + 1) / count;
    (0..)
        .zip(all)
        .map(|(position, (block, layers))| SliceArrival { at_ns: at(position), block, layers })
        .collect()
}

fn run(job: &TestJob, arrivals: Vec<SliceArrival>) -> JobOutcome {
    job.check(job.run(&mut TracePath::new(arrivals)))
}

/// Same, from a source that skips blocks that are computed already.
fn run_with(job: &TestJob, load_ns: u64) -> JobOutcome {
    job.check(job.run(&mut SourcePath::new(arrival_sequence(ArrivalOrder::ByLayer, BLOCKS, LAYERS), load_ns)))
}

#[test]
fn expected_arrival_takes_max_of_load_and_compute_plus_a_layer() {
    for quarters in [1, 2, 3, 4, 5, 6, 8, 12, 16] {
        let load_ns = COMPUTE_NS * quarters / 4;
        for hist in [4, 10, 50] {
            let job = job(COMPUTE_NS * hist, load_ns, ArrivalOrder::ByLayer);
            let outcome = run_with(&job, load_ns);
            let longer_ns = load_ns.max(COMPUTE_NS);
            let layers_ns = (load_ns + COMPUTE_NS) / u64::from(LAYERS);
            assert!(
                outcome.total_ns <= (longer_ns + layers_ns) * 101 / 100,
                "load {quarters}/4, history {hist}: {} of the longer, {outcome:?}",
                outcome.total_ns as f64 / longer_ns as f64
            );
            if quarters <= 4 {
                assert_eq!(outcome.computed_blocks, 0, "no block is computed that arrives in time");
            }
        }
    }
}

#[test]
fn overlapping_load_and_tail_compute_beats_either() {
    // Loading and computing the history take the same time: half of it each way.
    let job = job(4 * COMPUTE_NS, 4 * COMPUTE_NS, ArrivalOrder::ByLayer);
    let outcome = run_with(&job, 4 * COMPUTE_NS);
    assert!(outcome.total_ns < COMPUTE_NS * 3, "{outcome:?}");
    assert!((30..60).contains(&outcome.computed_blocks), "{outcome:?}");
}

#[test]
fn whole_blocks_are_awaited_if_faster() {
    for (load_share, waits) in [(10, true), (30, true), (60, true), (90, true), (120, false), (1_000, false)]
    {
        let hist_ns = COMPUTE_NS * 10;
        let load_ns = hist_ns * load_share / 100;
        let job = job(hist_ns, load_ns, ArrivalOrder::ByBlock);
        let outcome = run(&job, steady(ArrivalOrder::ByBlock, load_ns, 0));
        let best_ns = load_ns.min(hist_ns) + COMPUTE_NS;
        assert_eq!(outcome.computed_blocks == 0, waits, "{load_share} %: {outcome:?}");
        assert!(
            outcome.total_ns * 100 <= best_ns * 103,
            "{load_share} %: {outcome:?}, the best is {best_ns}"
        );
    }
}

#[test]
fn late_arrivals_are_used() {
    let hist_ns = COMPUTE_NS * 20;
    for comes in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
        for silence_share in [2, 5, 10, 20, 40] {
            let load_ns = hist_ns / 20;
            let job = job(hist_ns, load_ns, comes);
            let silence_ns = job.recompute_ns() * silence_share / 100;
            let outcome = run(&job, steady(comes, load_ns, silence_ns));
            // Layers computed during the silence count, and the layers above are new tokens only.
            let best_ns = silence_ns + load_ns + COMPUTE_NS;
            let layer_ns = job.recompute_ns() / u64::from(LAYERS);
            assert!(
                outcome.total_ns <= best_ns + 2 * layer_ns,
                "{comes:?}, silent for {silence_share} %: {outcome:?}, {best_ns} with foresight"
            );
        }
    }
}

#[test]
fn slowdown_is_noticed_within_a_few_half_lives() {
    let hist_ns = COMPUTE_NS * 20;
    let load_ns = hist_ns / 10;
    let job = job(hist_ns, load_ns, ArrivalOrder::ByBlock);
    let all = steady(ArrivalOrder::ByBlock, load_ns, 0);
    let (half, rest) = all.split_at(all.len() / 2);
    let from_ns = rest[0].at_ns;
    let slowed = |arrival: &SliceArrival| SliceArrival {
        at_ns: from_ns + (arrival.at_ns - from_ns) * 100,
        ..*arrival
    };
    let foresight_ns = load_ns / 2 + hist_ns / 2 + COMPUTE_NS;
    for rest in [rest.iter().map(slowed).collect(), Vec::new()] {
        let outcome = run(&job, [half, &rest[..]].concat());
        assert!(outcome.total_ns <= foresight_ns + job.recompute_ns() / 10, "{outcome:?}, {foresight_ns}");
    }
}

#[test]
fn load_and_compute_end_together_after_a_slowdown() {
    let job = job(10 * COMPUTE_NS, COMPUTE_NS, ArrivalOrder::ByLayer);
    let mut source = SourcePath::new(arrival_sequence(ArrivalOrder::ByLayer, BLOCKS, LAYERS), COMPUTE_NS);
    source.slow_down(COMPUTE_NS / 2, 8);
    let outcome = job.check(job.run(&mut source));
    // Half of the load remains, which now takes four computes; computing it with the rest takes ten
    // and a half. A quarter of the blocks is computed.
    assert!(outcome.total_ns < COMPUTE_NS * 4, "{outcome:?}, 3.5 with foresight");
    assert!((15..35).contains(&outcome.computed_blocks), "{outcome:?}");
}

#[test]
fn first_byte_latency_costs_no_more_than_itself() {
    let load_ns = COMPUTE_NS * 9 / 10;
    let job = job(20 * COMPUTE_NS, load_ns, ArrivalOrder::ByLayer);
    let latency_ns = job.recompute_ns() / 100;
    let outcome = run(&job, steady(ArrivalOrder::ByLayer, load_ns, latency_ns));
    assert_eq!(outcome.computed_blocks, 0, "{outcome:?}");
    assert!(outcome.total_ns <= latency_ns + COMPUTE_NS * 11 / 10, "{outcome:?}");
}

#[test]
fn preloaded_layers_are_free_and_earlier_silence_is_ignored() {
    let (load_ns, hist, turn_ns) = (COMPUTE_NS * 2, 50, 1_000_000_000_000);
    let job = job(COMPUTE_NS * hist, load_ns, ArrivalOrder::ByLayer);
    // Half of it is loaded before, into a buffer of the formula's size; then no slice is requested
    // until the start.
    let mut race =
        LoadComputeOverlap::new(job.costs.clone(), &job.slice_bytes, job.arrival_order, job.bytes_per_s, 0);
    let all = steady(ArrivalOrder::ByLayer, load_ns, 0);
    let (before, after) = all.split_at(all.len() / 2);
    before.iter().for_each(|arrival| race.slices_arrived(arrival.block, arrival.layers, arrival.at_ns));
    race.begin(turn_ns);
    let first = before.iter().map(|arrival| SliceArrival { at_ns: 0, ..*arrival });
    let rest =
        after.iter().map(|arrival| SliceArrival { at_ns: turn_ns + arrival.at_ns - COMPUTE_NS, ..*arrival });
    let outcome = job.check(job.run_from(race, turn_ns, &mut TracePath::new(first.chain(rest).collect())));
    let layer_ns = COMPUTE_NS / u64::from(LAYERS);
    assert!(outcome.total_ns <= COMPUTE_NS + 2 * layer_ns, "{outcome:?}");
    assert_eq!(outcome.computed_blocks, 0);
}

#[test]
fn silence_costs_about_its_own_length() {
    for (load, silence_share) in [(4, 1), (4, 2), (4, 4), (2, 1), (2, 3), (1, 2)] {
        let (load_ns, hist) = (COMPUTE_NS * load, 12 * load);
        let job = job(COMPUTE_NS * hist, load_ns, ArrivalOrder::ByLayer);
        let silence_ns = job.recompute_ns() * silence_share / 64;
        for at in 1..8 {
            let mut source =
                SourcePath::new(arrival_sequence(ArrivalOrder::ByLayer, BLOCKS, LAYERS), load_ns);
            source.fall_silent(load_ns * at / 8, silence_ns);
            let outcome = job.check(job.run(&mut source));
            let best_ns = load_ns + silence_ns + COMPUTE_NS / u64::from(LAYERS);
            assert!(
                outcome.total_ns <= best_ns + job.recompute_ns() / 16,
                "load {load}, silent for {silence_share}/64 at {at}/8: {outcome:?}, {best_ns} with foresight"
            );
        }
    }
}

#[test]
fn arrivals_before_the_start_do_not_affect_the_rate() {
    let load_ns = COMPUTE_NS * 4;
    let job = job(COMPUTE_NS * 50, load_ns, ArrivalOrder::ByLayer);
    let turn_ns = job.recompute_ns();
    let mut race =
        LoadComputeOverlap::new(job.costs.clone(), &job.slice_bytes, job.arrival_order, job.bytes_per_s, 0);
    (0..BLOCKS).for_each(|block| race.slices_arrived(block, 1, turn_ns));
    race.begin(turn_ns);
    let mut all = steady(ArrivalOrder::ByLayer, load_ns, turn_ns);
    all.iter_mut().take(BLOCKS as usize).for_each(|arrival| arrival.at_ns = 0);
    let outcome = job.check(job.run_from(race, turn_ns, &mut TracePath::new(all)));
    assert!(outcome.total_ns <= load_ns * 11 / 10, "{outcome:?}");
}

#[test]
fn late_start_uses_the_prior_rate() {
    let turn_ns = 1_000_000_000_000;
    for arrive in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
        let job = job(COMPUTE_NS * 20, COMPUTE_NS, arrive);
        let mut race =
            LoadComputeOverlap::new(job.costs.clone(), &job.slice_bytes, arrive, job.bytes_per_s, 0);
        race.begin(turn_ns);
        assert!(
            matches!(race.next(turn_ns), NextAction::Wait { .. }),
            "no slice was requested, so none is late"
        );
        assert_eq!(race.wave().count(), 0);
    }
}

#[test]
fn rate_halves_in_silence_and_recovers() {
    let mut rate = ArrivalRate::new(1_000_000_000, 1_000, 0);
    assert!((999..=1_000).contains(&rate.time_ns(1_000, 0)));
    for half_lives in 1..20 {
        let ns = rate.time_ns(1_000, half_lives * 1_000);
        let expected = 1_000u64 << half_lives;
        assert!(ns.abs_diff(expected) <= expected / 100, "{half_lives}: {ns}");
    }
    assert_eq!(rate.time_ns(0, u64::MAX), 0);
    assert_eq!(rate.time_ns(1, u64::MAX), u64::MAX, "no byte arrives");
    rate.resume(50_000);
    assert!((999..=1_000).contains(&rate.time_ns(1_000, 50_000)), "no byte was requested");
    // Ten times as fast for ten half-lives.
    (50_000..60_000).step_by(10).for_each(|now| rate.add_bytes(100, now));
    let ns = rate.time_ns(1_000, 60_000);
    assert!((98..=102).contains(&ns), "{ns}");
}

#[test]
fn costs_sum_to_the_profile_prefill() {
    let profile = crate::schedule::HardwareProfile::by_name("h100-8b").unwrap();
    let costs = ComputeCosts::of(&profile, 500, 16, 1_000, 32);
    let whole = profile.prefill_ns(0, 9_000);
    assert!(costs.recompute_ns().abs_diff(whole) < whole / 1_000, "{} {whole}", costs.recompute_ns());
    assert!(costs.block_layer_ns.is_sorted(), "later blocks have more context");
    assert_eq!(costs.deadline_ns(0), costs.recompute_ns() + costs.recompute_ns() / WAIT_SHARE);
    let (longer_ns, wait_ns) = (costs.recompute_ns(), costs.wait_ns(0));
    assert_eq!([costs.wait_ns(wait_ns / 4), costs.wait_ns(longer_ns)], [wait_ns, longer_ns * WAIT_TICKS]);
}
