//! Whatever the path does, the total is at most 1.02 times recomputing, nothing is computed twice, and nothing
//! runs without the slices it needs.

use super::world::{Arrival, Doing, Job, Outcome, Path, Trace, order};
use super::*;
use proptest::prelude::*;

/// A second of compute in all: what the engine's lateness is small beside, as in production.
const RECOMPUTE_NS: u64 = 1_000_000_000;

/// A job of `blocks` even blocks; `new_share` of the time in percent is the new tokens'.
fn job(blocks: u32, layers: u32, new_share: u64, arrive: Arrive) -> Job {
    let layer_ns = RECOMPUTE_NS / u64::from(layers);
    let new_layer_ns = layer_ns * new_share / 100;
    let block_layer_ns = (layer_ns - new_layer_ns) / u64::from(blocks.max(1));
    Job {
        costs: Costs { block_layer_ns: vec![block_layer_ns; blocks as usize], new_layer_ns, layers },
        slice_bytes: vec![1_000; layers as usize],
        arrive,
        bytes_per_s: 10_000_000,
        decision_ns: 500,
        late_ns: 50_000,
    }
}

#[test]
fn a_path_that_gives_nothing_costs_a_fiftieth_at_most() {
    for arrive in [Arrive::ByLayer, Arrive::ByBlock] {
        let job = Job { bytes_per_s: 100_000_000, ..job(300, 32, 10, arrive) };
        let outcome = job.check(job.run(&mut Trace::new(Vec::new())));
        assert_eq!(outcome.computed_blocks, 300);
        assert!(outcome.idle_ns > 0, "it waits for the first byte at all");
    }
}

#[test]
fn a_path_that_is_known_to_be_gone_is_not_waited_for() {
    for arrive in [Arrive::ByLayer, Arrive::ByBlock] {
        let job = job(64, 32, 10, arrive);
        let mut race = job.race();
        (0..64).for_each(|block| race.lost(block));
        let outcome = job.run_from(race, 0, &mut Trace::new(Vec::new()));
        assert_eq!(outcome.idle_ns, 0);
        assert!(outcome.total_ns <= RECOMPUTE_NS + 1_000_000);
    }
}

/// Slices in some order, a number of them at some moment of each thing that the engine does, as the script says.
struct Scripted {
    order: std::vec::IntoIter<(u32, u32)>,
    script: Vec<(u8, u8)>,
    step: usize,
    /// What the engine began to do last, and how many slices come in it still, and when.
    seen: Option<(Doing, u64)>,
    left: u64,
    at_ns: u64,
}

impl Scripted {
    fn new(order: Vec<(u32, u32)>, script: Vec<(u8, u8)>) -> Scripted {
        Scripted { order: order.into_iter(), script, step: 0, seen: None, left: 0, at_ns: 0 }
    }
}

impl Path for Scripted {
    fn next(&mut self, doing: Doing, _: &Race, now_ns: u64, until_ns: u64) -> Option<Arrival> {
        if self.seen != Some((doing, until_ns)) {
            self.seen = Some((doing, until_ns));
            let (count, place) = self.script[self.step % self.script.len()];
            self.step += 1;
            // None in half of all cases, else few or many.
            self.left = match count {
                0..=127 => 0,
                128..=240 => u64::from(count) - 127,
                _ => 1 << (count - 236),
            };
            self.at_ns = now_ns + (until_ns - now_ns) * u64::from(place) / 255;
        }
        self.left = self.left.checked_sub(1)?;
        let (block, layers) = self.order.next()?;
        Some(Arrival { at_ns: self.at_ns.max(now_ns), block, layers })
    }
}

/// Jobs of uneven blocks, and an order of slices: by layer, by block, from the tail, or from two sources in turn.
fn jobs() -> impl Strategy<Value = (Job, Vec<(u32, u32)>)> {
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
        let cell = |weight: u64| RECOMPUTE_NS / u64::from(layers) * weight / whole;
        let arrive = if by_layer { Arrive::ByLayer } else { Arrive::ByBlock };
        let job = Job {
            costs: Costs {
                block_layer_ns: weights.iter().map(|weight| cell(*weight)).collect(),
                new_layer_ns: cell(new + 1),
                layers,
            },
            slice_bytes: (0..layers).map(|layer| 100 + layer * 37 % 900).collect(),
            arrive,
            bytes_per_s,
            decision_ns: 500,
            late_ns: 50_000,
        };
        let blocks = job.blocks();
        let order = match kind {
            0 | 1 => order(Arrive::ByLayer, blocks, layers),
            2 => order(Arrive::ByBlock, blocks, layers),
            3 => {
                order(Arrive::ByBlock, blocks, layers).into_iter().map(|(b, l)| (blocks - 1 - b, l)).collect()
            }
            _ => {
                let all = order(Arrive::ByBlock, blocks, layers);
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
    fn no_path_makes_it_slower_than_recomputing(
        (job, order) in jobs(),
        script in prop::collection::vec(any::<(u8, u8)>(), 1..40),
    ) {
        job.check(job.run(&mut Scripted::new(order, script)));
    }

    #[test]
    fn no_trace_makes_it_slower_than_recomputing(
        (job, order) in jobs(),
        // Rate in slices for all of recomputing, then one silence somewhere, and whether anything comes behind it.
        pace in 1u64..20_000,
        silence in (0usize..400, 0u64..RECOMPUTE_NS),
        dies in any::<bool>(),
    ) {
        let gap_ns = RECOMPUTE_NS / pace;
        let at_ns = |at: usize| at as u64 * gap_ns + if at >= silence.0 { silence.1 } else { 0 };
        let all = order.iter().enumerate().take_while(|(at, _)| !dies || *at < silence.0);
        let trace = all.map(|(at, (block, layers))| Arrival { at_ns: at_ns(at), block: *block, layers: *layers });
        job.check(job.run(&mut Trace::new(trace.collect())));
    }
}

/// Two blocks of two layers, and each slice early, late, at a moment that matters, or never: every such trace.
#[test]
fn every_trace_of_a_small_job_stays_below_its_bound() {
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
    for arrive in [Arrive::ByLayer, Arrive::ByBlock] {
        for (new_share, rate) in [(0, 0), (0, 1 << 40), (1, 4_000), (50, 1 << 40), (98, 4_000)] {
            let job = Job { bytes_per_s: rate, ..job(2, 2, new_share, arrive) };
            for trace in 0..moments.len().pow(4) {
                let at = |slice: u32| moments[trace / moments.len().pow(slice) % moments.len()];
                let slices = [(0, 1), (0, 2), (1, 1), (1, 2)];
                let all = (0..).zip(slices).map(|(slice, (block, layers))| Arrival {
                    at_ns: at(slice),
                    block,
                    layers,
                });
                job.check(job.run(&mut Trace::new(all.filter(|arrival| arrival.at_ns < u64::MAX).collect())));
                runs += 1;
            }
        }
    }
    println!("{runs} traces");
}

/// Brings one slice at the end of each wait, and nothing while anything is computed: as much hope as a path can
/// give for as little.
struct Hope(std::vec::IntoIter<(u32, u32)>);

impl Path for Hope {
    fn next(&mut self, doing: Doing, _: &Race, _: u64, until_ns: u64) -> Option<Arrival> {
        let (block, layers) = (doing == Doing::Waiting && until_ns > 0).then(|| self.0.next()).flatten()?;
        Some(Arrival { at_ns: until_ns, block, layers })
    }
}

#[test]
fn hope_is_not_paid_for_twice() {
    for (arrive, comes) in [Arrive::ByLayer, Arrive::ByBlock]
        .into_iter()
        .flat_map(|a| [(a, Arrive::ByLayer), (a, Arrive::ByBlock)])
    {
        for blocks in [1, 7, 64, 300] {
            let job = job(blocks, 32, 5, arrive);
            job.check(job.run(&mut Hope(order(comes, blocks, 32).into_iter())));
        }
    }
}

#[test]
fn all_but_the_last_slices_are_as_good_as_none_and_cost_no_more() {
    for arrive in [Arrive::ByLayer, Arrive::ByBlock] {
        let job = job(64, 32, 5, arrive);
        let all_but = |missing: u32| {
            let first = (0..64).map(|block| Arrival { at_ns: 0, block, layers: 32 - missing });
            job.check(job.run(&mut Trace::new(first.collect())))
        };
        let outcomes: Vec<Outcome> = (1..=32).map(all_but).collect();
        assert!(outcomes.iter().all(|outcome| outcome.computed_blocks == 64));
        let one = (0..64).map(|block| Arrival { at_ns: 0, block, layers: 32 - u32::from(block == 63) });
        let outcome = job.check(job.run(&mut Trace::new(one.collect())));
        assert_eq!(outcome.computed_blocks, 1, "one slice of one block costs that block");
        assert!(outcome.total_ns < RECOMPUTE_NS / 10, "{outcome:?}");
    }
}

#[test]
fn a_silence_is_not_idled_longer_than_what_is_missing_takes() {
    // All of it came but one block, which takes 0.3 % of all.
    let job = job(300, 32, 10, Arrive::ByBlock);
    let trace = (0..299).map(|block| Arrival { at_ns: 0, block, layers: 32 });
    let outcome = job.check(job.run(&mut Trace::new(trace.collect())));
    let block_ns = job.costs.block_layer_ns[299] * 32;
    assert!(outcome.idle_ns <= block_ns + 2 * job.late_ns, "{outcome:?} for a block of {block_ns}");
    assert_eq!(outcome.computed_blocks, 1);
}

#[test]
fn arrivals_that_make_no_sense_change_nothing() {
    let job = job(4, 4, 10, Arrive::ByLayer);
    let (mut odd, mut plain) = (job.race(), job.race());
    plain.arrived(1, 4, 5);
    for (block, layers) in [(1, 4), (1, 2), (9, 1), (1, 400), (u32::MAX, u32::MAX), (2, 0)] {
        odd.arrived(block, layers, 5);
    }
    odd.lost(17);
    odd.lost(1);
    assert_eq!(format!("{odd:?}"), format!("{plain:?}"));
    odd.lost(2);
    odd.lost(2);
    odd.arrived(2, 4, 6);
    let rest = [0, 3].map(|block| Arrival { at_ns: 1, block, layers: 4 });
    let mut race = odd;
    assert!(matches!(race.next(6), Next::Wait { .. }));
    rest.iter().for_each(|arrival| race.arrived(arrival.block, arrival.layers, 7));
    assert_eq!(race.next(8), Next::Layer { layer: 0 });
    assert_eq!(race.pass().count(), 0, "what was lost and came is here");
}
