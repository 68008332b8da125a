//! Whatever the path does, the total is at most 1.02 times recomputing, no layer task is computed
//! twice, and none runs without its slices.

use super::world::{
    EngineActivity, JobOutcome, SliceArrival, SlicePath, TestJob, TracePath, arrival_sequence,
};
use super::*;
use proptest::prelude::*;

/// A second of compute in all, so that the engine's wake-up delay is small beside it, as in
/// production.
const RECOMPUTE_NS: u64 = 1_000_000_000;

/// A job of `blocks` equal blocks; the new tokens take `new_share` percent of the time.
fn job(blocks: u32, layers: u32, new_share: u64, arrive: ArrivalOrder) -> TestJob {
    let layer_ns = RECOMPUTE_NS / u64::from(layers);
    let new_layer_ns = layer_ns * new_share / 100;
    let block_layer_ns = (layer_ns - new_layer_ns) / u64::from(blocks.max(1));
    TestJob {
        costs: ComputeCosts { block_layer_ns: vec![block_layer_ns; blocks as usize], new_layer_ns, layers },
        slice_bytes: vec![1_000; layers as usize],
        arrival_order: arrive,
        bytes_per_s: 10_000_000,
        decision_ns: 500,
        late_ns: 50_000,
    }
}

#[test]
fn silent_path_costs_at_most_two_percent() {
    for arrive in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
        let job = TestJob { bytes_per_s: 100_000_000, ..job(300, 32, 10, arrive) };
        let outcome = job.check(job.run(&mut TracePath::new(Vec::new())));
        assert_eq!(outcome.computed_blocks, 300);
        assert!(outcome.idle_ns > 0, "it waits for the first byte");
    }
}

#[test]
fn lost_path_is_not_waited_for() {
    for arrive in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
        let job = job(64, 32, 10, arrive);
        let mut race = job.overlap();
        (0..64).for_each(|block| race.mark_lost(block));
        let outcome = job.run_from(race, 0, &mut TracePath::new(Vec::new()));
        assert_eq!(outcome.idle_ns, 0);
        assert!(outcome.total_ns <= RECOMPUTE_NS + 1_000_000);
    }
}

/// A scripted path: slices in some order, several of them at some moment during each action of the
/// engine.
struct ScriptedPath {
    order: std::vec::IntoIter<(u32, u32)>,
    script: Vec<(u8, u8)>,
    step: usize,
    /// The engine's last action, the slices that still arrive during it, and when.
    last_seen: Option<(EngineActivity, u64)>,
    slices_left: u64,
    at_ns: u64,
}

impl ScriptedPath {
    fn new(order: Vec<(u32, u32)>, script: Vec<(u8, u8)>) -> ScriptedPath {
        ScriptedPath { order: order.into_iter(), script, step: 0, last_seen: None, slices_left: 0, at_ns: 0 }
    }
}

impl SlicePath for ScriptedPath {
    fn next(
        &mut self,
        doing: EngineActivity,
        _: &LoadComputeOverlap,
        now_ns: u64,
        until_ns: u64,
    ) -> Option<SliceArrival> {
        if self.last_seen != Some((doing, until_ns)) {
            self.last_seen = Some((doing, until_ns));
            let (count, place) = self.script[self.step % self.script.len()];
            self.step += 1;
            // None in half of all cases, else few or many.
            self.slices_left = match count {
                0..=127 => 0,
                128..=240 => u64::from(count) - 127,
                _ => 1 << (count - 236),
            };
            self.at_ns = now_ns + (until_ns - now_ns) * u64::from(place) / 255;
        }
        self.slices_left = self.slices_left.checked_sub(1)?;
        let (block, layers) = self.order.next()?;
        Some(SliceArrival { at_ns: self.at_ns.max(now_ns), block, layers })
    }
}

/// Jobs with unequal blocks, and an order of slices: by layer, by block, from the tail, or
/// alternating between two sources.
fn jobs() -> impl Strategy<Value = (TestJob, Vec<(u32, u32)>)> {
    let parts = (
        prop::collection::vec(0u64..1_000, 0..24),
        0u64..4_000,
        1u32..17,
        any::<bool>(),
        0u8..5,
        prop::sample::select(vec![0u64, 1_000, 1_000_000, 1_000_000_000_000]),
    );
    parts.prop_map(|(weights, new, layers, by_layer, kind, bytes_per_s)| {
        let whole: u64 = weights.iter().sum::<u64>() + new + 1;
        let task_ns = |weight: u64| RECOMPUTE_NS / u64::from(layers) * weight / whole;
        let arrive = if by_layer { ArrivalOrder::ByLayer } else { ArrivalOrder::ByBlock };
        let job = TestJob {
            costs: ComputeCosts {
                block_layer_ns: weights.iter().map(|weight| task_ns(*weight)).collect(),
                new_layer_ns: task_ns(new + 1),
                layers,
            },
            slice_bytes: (0..layers).map(|layer| 100 + layer * 37 % 900).collect(),
            arrival_order: arrive,
            bytes_per_s,
            decision_ns: 500,
            late_ns: 50_000,
        };
        let blocks = job.blocks();
        let order = match kind {
            0 | 1 => arrival_sequence(ArrivalOrder::ByLayer, blocks, layers),
            2 => arrival_sequence(ArrivalOrder::ByBlock, blocks, layers),
            3 => arrival_sequence(ArrivalOrder::ByBlock, blocks, layers)
                .into_iter()
                .map(|(b, l)| (blocks - 1 - b, l))
                .collect(),
            _ => {
                let all = arrival_sequence(ArrivalOrder::ByBlock, blocks, layers);
                let (near, far) = all.split_at(all.len() / 2);
                let pairs = near.iter().zip(far).flat_map(|(near, far)| [*far, *near]);
                pairs.chain(far[near.len()..].iter().copied()).collect()
            }
        };
        (job, order)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn no_scripted_path_is_slower_than_recomputing(
        (job, order) in jobs(),
        script in prop::collection::vec(any::<(u8, u8)>(), 1..40),
    ) {
        job.check(job.run(&mut ScriptedPath::new(order, script)));
    }

    #[test]
    fn no_trace_is_slower_than_recomputing(
        (job, order) in jobs(),
        // Rate in slices per recompute time, then one silence somewhere, and whether slices follow
        // it.
        pace in 1u64..20_000,
        silence in (0usize..400, 0u64..RECOMPUTE_NS),
        dies in any::<bool>(),
    ) {
        let gap_ns = RECOMPUTE_NS / pace;
        let at_ns = |at: usize| at as u64 * gap_ns + if at >= silence.0 { silence.1 } else { 0 };
        let all = order.iter().enumerate().take_while(|(at, _)| !dies || *at < silence.0);
        let trace = all.map(|(at, (block, layers))| SliceArrival { at_ns: at_ns(at), block: *block, layers: *layers });
        job.check(job.run(&mut TracePath::new(trace.collect())));
    }
}

/// Two blocks of two layers, and each slice early, late, at a critical moment, or never: every such
/// trace.
#[test]
fn every_small_trace_stays_within_the_bound() {
    let wait_ns = RECOMPUTE_NS / WAIT_SHARE;
    let moments = [
        0,
        1,
        wait_ns - 1,
        wait_ns,
        wait_ns + 1,
        RECOMPUTE_NS / 4,
        RECOMPUTE_NS * 2 / 3,
        RECOMPUTE_NS,
        u64::MAX,
    ];
    let mut runs = 0u32;
    for arrive in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
        for (new_share, rate) in [(0, 0), (0, 1 << 40), (1, 4_000), (50, 1 << 40), (98, 4_000)] {
            let job = TestJob { bytes_per_s: rate, ..job(2, 2, new_share, arrive) };
            for trace in 0..moments.len().pow(4) {
                let at = |slice: u32| moments[trace / moments.len().pow(slice) % moments.len()];
                let slices = [(0, 1), (0, 2), (1, 1), (1, 2)];
                let all = (0..).zip(slices).map(|(slice, (block, layers))| SliceArrival {
                    at_ns: at(slice),
                    block,
                    layers,
                });
                job.check(
                    job.run(&mut TracePath::new(all.filter(|arrival| arrival.at_ns < u64::MAX).collect())),
                );
                runs += 1;
            }
        }
    }
    println!("{runs} traces");
}

/// Delivers one slice at the end of each wait, and none while the engine computes: the longest
/// total wait for the fewest slices.
struct TeasingPath(std::vec::IntoIter<(u32, u32)>);

impl SlicePath for TeasingPath {
    fn next(
        &mut self,
        doing: EngineActivity,
        _: &LoadComputeOverlap,
        _: u64,
        until_ns: u64,
    ) -> Option<SliceArrival> {
        let (block, layers) =
            (doing == EngineActivity::Waiting && until_ns > 0).then(|| self.0.next()).flatten()?;
        Some(SliceArrival { at_ns: until_ns, block, layers })
    }
}

#[test]
fn teasing_path_stays_within_the_bound() {
    for (arrive, comes) in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock]
        .into_iter()
        .flat_map(|a| [(a, ArrivalOrder::ByLayer), (a, ArrivalOrder::ByBlock)])
    {
        for blocks in [1, 7, 64, 300] {
            let job = job(blocks, 32, 5, arrive);
            job.check(job.run(&mut TeasingPath(arrival_sequence(comes, blocks, 32).into_iter())));
        }
    }
}

#[test]
fn blocks_without_last_slice_cost_no_more_than_recomputing() {
    for arrive in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
        let job = job(64, 32, 5, arrive);
        let all_but = |missing: u32| {
            let first = (0..64).map(|block| SliceArrival { at_ns: 0, block, layers: 32 - missing });
            job.check(job.run(&mut TracePath::new(first.collect())))
        };
        let outcomes: Vec<JobOutcome> = (1..=32).map(all_but).collect();
        assert!(outcomes.iter().all(|outcome| outcome.computed_blocks == 64));
        let one = (0..64).map(|block| SliceArrival { at_ns: 0, block, layers: 32 - u32::from(block == 63) });
        let outcome = job.check(job.run(&mut TracePath::new(one.collect())));
        assert_eq!(outcome.computed_blocks, 1, "one slice of one block costs that block");
        assert!(outcome.total_ns < RECOMPUTE_NS / 10, "{outcome:?}");
    }
}

#[test]
fn silence_is_idled_no_longer_than_missing_compute() {
    // All blocks arrived except one, which takes 0.3 % of the total.
    let job = job(300, 32, 10, ArrivalOrder::ByBlock);
    let trace = (0..299).map(|block| SliceArrival { at_ns: 0, block, layers: 32 });
    let outcome = job.check(job.run(&mut TracePath::new(trace.collect())));
    let block_ns = job.costs.block_layer_ns[299] * 32;
    assert!(outcome.idle_ns <= block_ns + 2 * job.late_ns, "{outcome:?} for a block of {block_ns}");
    assert_eq!(outcome.computed_blocks, 1);
}

#[test]
fn invalid_arrivals_have_no_effect() {
    let job = job(4, 4, 10, ArrivalOrder::ByLayer);
    let (mut odd, mut plain) = (job.overlap(), job.overlap());
    plain.slices_arrived(1, 4, 5);
    for (block, layers) in [(1, 4), (1, 2), (9, 1), (1, 400), (u32::MAX, u32::MAX), (2, 0)] {
        odd.slices_arrived(block, layers, 5);
    }
    odd.mark_lost(17);
    odd.mark_lost(1);
    assert_eq!(format!("{odd:?}"), format!("{plain:?}"));
    odd.mark_lost(2);
    odd.mark_lost(2);
    odd.slices_arrived(2, 4, 6);
    let rest = [0, 3].map(|block| SliceArrival { at_ns: 1, block, layers: 4 });
    let mut race = odd;
    assert!(matches!(race.next(6), NextAction::Wait { .. }));
    rest.iter().for_each(|arrival| race.slices_arrived(arrival.block, arrival.layers, 7));
    assert_eq!(race.next(8), NextAction::Layer { layer: 0 });
    assert_eq!(race.wave().count(), 0, "a block that was lost and then arrived counts as arrived");
}
