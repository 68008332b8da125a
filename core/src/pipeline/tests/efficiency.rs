//! That it also waits where that pays: what a rule that always recomputes would fail.

use super::world::{Arrival, Job, Outcome, Source, Trace, order};
use super::*;

const LAYERS: u32 = 32;
const BLOCKS: u32 = 100;
const BLOCK_BYTES: u64 = 32_000;

/// A job whose history takes `hist_ns` to compute and `load_ns` to load, in front of a millisecond a layer of
/// new tokens.
fn job(hist_ns: u64, load_ns: u64, arrive: Arrive) -> Job {
    let layer_ns = hist_ns / u64::from(BLOCKS * LAYERS);
    Job {
        costs: Costs {
            block_layer_ns: vec![layer_ns; BLOCKS as usize],
            new_layer_ns: COMPUTE_NS / u64::from(LAYERS),
            layers: LAYERS,
        },
        slice_bytes: vec![1_000; LAYERS as usize],
        arrive,
        bytes_per_s: u64::try_from(
            u128::from(BLOCK_BYTES * u64::from(BLOCKS)) * 1_000_000_000 / u128::from(load_ns),
        )
        .unwrap(),
        decision_ns: 200,
        late_ns: 10_000,
    }
}

const COMPUTE_NS: u64 = 32_000_000;

/// The whole history, evenly over `load_ns` from `from_ns` on.
fn steady(comes: Arrive, load_ns: u64, from_ns: u64) -> Vec<Arrival> {
    let all = order(comes, BLOCKS, LAYERS);
    let count = all.len() as u64;
    let at = |position: u64| from_ns + load_ns * (position + 1) / count;
    (0..).zip(all).map(|(position, (block, layers))| Arrival { at_ns: at(position), block, layers }).collect()
}

fn run(job: &Job, arrivals: Vec<Arrival>) -> Outcome {
    job.check(job.run(&mut Trace::new(arrivals)))
}

/// The same from a source that leaves out what is computed already.
fn run_with(job: &Job, load_ns: u64) -> Outcome {
    job.check(job.run(&mut Source::new(order(Arrive::ByLayer, BLOCKS, LAYERS), load_ns)))
}

#[test]
fn layers_that_come_as_expected_take_the_longer_of_load_and_compute_and_one_layer_of_each() {
    for quarters in [1, 2, 3, 4, 5, 6, 8, 12, 16] {
        let load_ns = COMPUTE_NS * quarters / 4;
        for hist in [4, 10, 50] {
            let job = job(COMPUTE_NS * hist, load_ns, Arrive::ByLayer);
            let outcome = run_with(&job, load_ns);
            let longer_ns = load_ns.max(COMPUTE_NS);
            let layers_ns = (load_ns + COMPUTE_NS) / u64::from(LAYERS);
            assert!(
                outcome.total_ns <= (longer_ns + layers_ns) * 101 / 100,
                "load {quarters}/4, history {hist}: {} of the longer, {outcome:?}",
                outcome.total_ns as f64 / longer_ns as f64
            );
            if quarters <= 4 {
                assert_eq!(outcome.computed_blocks, 0, "nothing is computed that comes in time");
            }
        }
    }
}

#[test]
fn loading_and_computing_the_tail_together_beats_either() {
    // Loading and computing the history take the same time: half of it each way.
    let job = job(4 * COMPUTE_NS, 4 * COMPUTE_NS, Arrive::ByLayer);
    let outcome = run_with(&job, 4 * COMPUTE_NS);
    assert!(outcome.total_ns < COMPUTE_NS * 3, "{outcome:?}");
    assert!((30..60).contains(&outcome.computed_blocks), "{outcome:?}");
}

#[test]
fn blocks_that_come_whole_are_waited_for_where_that_is_sooner() {
    for (load_share, waits) in [(10, true), (30, true), (60, true), (90, true), (120, false), (1_000, false)]
    {
        let hist_ns = COMPUTE_NS * 10;
        let load_ns = hist_ns * load_share / 100;
        let job = job(hist_ns, load_ns, Arrive::ByBlock);
        let outcome = run(&job, steady(Arrive::ByBlock, load_ns, 0));
        let best_ns = load_ns.min(hist_ns) + COMPUTE_NS;
        assert_eq!(outcome.computed_blocks == 0, waits, "{load_share} %: {outcome:?}");
        assert!(outcome.total_ns * 100 <= best_ns * 103, "{load_share} %: {outcome:?}, {best_ns} can be had");
    }
}

#[test]
fn what_comes_late_is_used() {
    let hist_ns = COMPUTE_NS * 20;
    for comes in [Arrive::ByLayer, Arrive::ByBlock] {
        for silence_share in [2, 5, 10, 20, 40] {
            let load_ns = hist_ns / 20;
            let job = job(hist_ns, load_ns, comes);
            let silence_ns = job.recompute_ns() * silence_share / 100;
            let outcome = run(&job, steady(comes, load_ns, silence_ns));
            // What was computed in the silence stands, and the layers above it are new tokens only.
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
fn a_path_that_becomes_slow_or_silent_in_the_middle_is_noticed_within_a_few_half_lives() {
    let hist_ns = COMPUTE_NS * 20;
    let load_ns = hist_ns / 10;
    let job = job(hist_ns, load_ns, Arrive::ByBlock);
    let all = steady(Arrive::ByBlock, load_ns, 0);
    let (half, rest) = all.split_at(all.len() / 2);
    let from_ns = rest[0].at_ns;
    let slowed = |arrival: &Arrival| Arrival { at_ns: from_ns + (arrival.at_ns - from_ns) * 100, ..*arrival };
    let foresight_ns = load_ns / 2 + hist_ns / 2 + COMPUTE_NS;
    for rest in [rest.iter().map(slowed).collect(), Vec::new()] {
        let outcome = run(&job, [half, &rest[..]].concat());
        assert!(outcome.total_ns <= foresight_ns + job.recompute_ns() / 10, "{outcome:?}, {foresight_ns}");
    }
}

#[test]
fn load_and_compute_end_together_when_a_path_becomes_slow_in_the_middle() {
    let job = job(10 * COMPUTE_NS, COMPUTE_NS, Arrive::ByLayer);
    let mut source = Source::new(order(Arrive::ByLayer, BLOCKS, LAYERS), COMPUTE_NS);
    source.slow_down(COMPUTE_NS / 2, 8);
    let outcome = job.check(job.run(&mut source));
    // Half a load is left, which takes four computes now, or ten and a half to be computed with the rest: a
    // quarter of the blocks is.
    assert!(outcome.total_ns < COMPUTE_NS * 4, "{outcome:?}, 3.5 with foresight");
    assert!((15..35).contains(&outcome.computed_blocks), "{outcome:?}");
}

#[test]
fn a_first_byte_that_takes_its_time_costs_no_more_than_that() {
    let load_ns = COMPUTE_NS * 9 / 10;
    let job = job(20 * COMPUTE_NS, load_ns, Arrive::ByLayer);
    let latency_ns = job.recompute_ns() / 100;
    let outcome = run(&job, steady(Arrive::ByLayer, load_ns, latency_ns));
    assert_eq!(outcome.computed_blocks, 0, "{outcome:?}");
    assert!(outcome.total_ns <= latency_ns + COMPUTE_NS * 11 / 10, "{outcome:?}");
}

#[test]
fn what_was_loaded_before_its_turn_costs_no_time_and_silence_before_it_says_nothing() {
    let (load_ns, hist, turn_ns) = (COMPUTE_NS * 2, 50, 1_000_000_000_000);
    let job = job(COMPUTE_NS * hist, load_ns, Arrive::ByLayer);
    // Half of it before, into a buffer of the formula's size; then nothing is asked for until the turn.
    let mut race = Race::new(job.costs.clone(), &job.slice_bytes, job.arrive, job.bytes_per_s, 0);
    let all = steady(Arrive::ByLayer, load_ns, 0);
    let (before, after) = all.split_at(all.len() / 2);
    before.iter().for_each(|arrival| race.arrived(arrival.block, arrival.layers, arrival.at_ns));
    race.begin(turn_ns);
    let first = before.iter().map(|arrival| Arrival { at_ns: 0, ..*arrival });
    let rest =
        after.iter().map(|arrival| Arrival { at_ns: turn_ns + arrival.at_ns - COMPUTE_NS, ..*arrival });
    let outcome = job.check(job.run_from(race, turn_ns, &mut Trace::new(first.chain(rest).collect())));
    let layer_ns = COMPUTE_NS / u64::from(LAYERS);
    assert!(outcome.total_ns <= COMPUTE_NS + 2 * layer_ns, "{outcome:?}");
    assert_eq!(outcome.computed_blocks, 0);
}

#[test]
fn a_silence_in_the_middle_costs_about_as_long_as_it_is() {
    for (load, silence_share) in [(4, 1), (4, 2), (4, 4), (2, 1), (2, 3), (1, 2)] {
        let (load_ns, hist) = (COMPUTE_NS * load, 12 * load);
        let job = job(COMPUTE_NS * hist, load_ns, Arrive::ByLayer);
        let silence_ns = job.recompute_ns() * silence_share / 64;
        for at in 1..8 {
            let mut source = Source::new(order(Arrive::ByLayer, BLOCKS, LAYERS), load_ns);
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
fn what_came_before_its_turn_and_is_told_at_once_says_nothing_of_the_rate() {
    let load_ns = COMPUTE_NS * 4;
    let job = job(COMPUTE_NS * 50, load_ns, Arrive::ByLayer);
    let turn_ns = job.recompute_ns();
    let mut race = Race::new(job.costs.clone(), &job.slice_bytes, job.arrive, job.bytes_per_s, 0);
    (0..BLOCKS).for_each(|block| race.arrived(block, 1, turn_ns));
    race.begin(turn_ns);
    let mut all = steady(Arrive::ByLayer, load_ns, turn_ns);
    all.iter_mut().take(BLOCKS as usize).for_each(|arrival| arrival.at_ns = 0);
    let outcome = job.check(job.run_from(race, turn_ns, &mut Trace::new(all)));
    assert!(outcome.total_ns <= load_ns * 11 / 10, "{outcome:?}");
}

#[test]
fn a_turn_that_comes_late_finds_the_rate_that_was_known() {
    let turn_ns = 1_000_000_000_000;
    for arrive in [Arrive::ByLayer, Arrive::ByBlock] {
        let job = job(COMPUTE_NS * 20, COMPUTE_NS, arrive);
        let mut race = Race::new(job.costs.clone(), &job.slice_bytes, arrive, job.bytes_per_s, 0);
        race.begin(turn_ns);
        assert!(matches!(race.next(turn_ns), Next::Wait { .. }), "nothing was asked for, so nothing is late");
        assert_eq!(race.pass().count(), 0);
    }
}

#[test]
fn the_rate_halves_in_silence_and_comes_back() {
    let mut rate = Rate::new(1_000_000_000, 1_000, 0);
    assert!((999..=1_000).contains(&rate.time_ns(1_000, 0)));
    for half_lives in 1..20 {
        let ns = rate.time_ns(1_000, half_lives * 1_000);
        let expected = 1_000u64 << half_lives;
        assert!(ns.abs_diff(expected) <= expected / 100, "{half_lives}: {ns}");
    }
    assert_eq!(rate.time_ns(0, u64::MAX), 0);
    assert_eq!(rate.time_ns(1, u64::MAX), u64::MAX, "nothing comes");
    rate.resume(50_000);
    assert!((999..=1_000).contains(&rate.time_ns(1_000, 50_000)), "nobody had asked");
    // Ten times as fast for ten half-lives.
    (50_000..60_000).step_by(10).for_each(|now| rate.arrived(100, now));
    let ns = rate.time_ns(1_000, 60_000);
    assert!((98..=102).contains(&ns), "{ns}");
}

#[test]
fn costs_add_up_to_the_profiles_prefill() {
    let profile = crate::schedule::HardwareProfile::by_name("h100-8b").unwrap();
    let costs = Costs::of(&profile, 500, 16, 1_000, 32);
    let whole = profile.prefill_ns(0, 9_000);
    assert!(costs.recompute_ns().abs_diff(whole) < whole / 1_000, "{} {whole}", costs.recompute_ns());
    assert!(costs.block_layer_ns.is_sorted(), "later blocks look back on more");
    assert_eq!(costs.deadline_ns(0), costs.recompute_ns() + costs.recompute_ns() / WAIT_SHARE);
    let (longer_ns, wait_ns) = (costs.recompute_ns(), costs.wait_ns(0));
    assert_eq!([costs.wait_ns(wait_ns / 4), costs.wait_ns(longer_ns)], [wait_ns, longer_ns * GRAINS]);
}
