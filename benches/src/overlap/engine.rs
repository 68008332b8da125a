//! An engine that burns time instead of computing: a calibrated loop, so that a layer is an amount
//! of work and not of time. The production rules decide its next step.
//!
//! Not here: the source of slices (`source.rs`).

use std::hint::black_box;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kv_core::pipeline::{ComputeCosts, LoadComputeOverlap, NextAction};

use super::source::{LoadedSlice, Source};

/// Loop iterations for the calibration: some 20 ms.
const CALIBRATION_ITERATIONS: u64 = 20_000_000;

/// The loop, and its iterations per nanosecond on this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EmulatedEngine {
    iterations_per_ns: f64,
}

impl EmulatedEngine {
    /// Measures the machine's speed: the fastest of several undisturbed runs.
    pub(crate) fn calibrated() -> EmulatedEngine {
        let time = || {
            let begun = Instant::now();
            spin(CALIBRATION_ITERATIONS);
            begun.elapsed()
        };
        let fastest = (0..10).map(|_| time()).min().unwrap_or(Duration::MAX);
        EmulatedEngine { iterations_per_ns: CALIBRATION_ITERATIONS as f64 / fastest.as_nanos() as f64 }
    }

    /// Work of `ns` nanoseconds on an undisturbed machine.
    pub(crate) fn compute(&self, ns: u64) {
        spin((ns as f64 * self.iterations_per_ns) as u64);
    }

    /// Computes everything without any load, layer by layer.
    pub(crate) fn recompute(&self, costs: &ComputeCosts) -> Duration {
        let begun = Instant::now();
        (0..costs.layers).for_each(|_| self.compute(costs.recompute_ns() / u64::from(costs.layers)));
        begun.elapsed()
    }

    /// Runs a job beside a source; returns the time from its turn to its end.
    pub(crate) fn run(
        &self,
        costs: &ComputeCosts,
        mut race: LoadComputeOverlap,
        source: &Source,
    ) -> Duration {
        let begun = Instant::now();
        let now_ns = || u64::try_from(source.origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        take_slices(&mut race, &source.slices, now_ns());
        race.begin(now_ns());
        source.begin();
        loop {
            take_slices(&mut race, &source.slices, now_ns());
            match race.next(now_ns()) {
                NextAction::Layer { .. } => {
                    source.skip_blocks(race.wave());
                    let pass: u64 = race.wave().map(|block| costs.block_layer_ns[block as usize]).sum();
                    self.compute(pass + costs.new_layer_ns);
                }
                NextAction::CatchUp { blocks, layers } => {
                    source.skip_blocks(blocks.iter().copied());
                    let one: u64 = blocks.iter().map(|block| costs.block_layer_ns[*block as usize]).sum();
                    self.compute(one * u64::from(layers));
                }
                NextAction::Wait { until_ns } => {
                    let wait = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
                    match source.slices.recv_timeout(wait) {
                        Ok(there) => slice_arrived(&mut race, there, now_ns()),
                        Err(RecvTimeoutError::Timeout) => {}
                        // No slice will come. A source that hangs does not disconnect; one that
                        // ended does.
                        Err(RecvTimeoutError::Disconnected) => {
                            (0..costs.block_layer_ns.len() as u32).for_each(|block| race.mark_lost(block));
                        }
                    }
                }
                NextAction::Done => break,
            }
        }
        begun.elapsed()
    }
}

fn take_slices(race: &mut LoadComputeOverlap, there: &Receiver<LoadedSlice>, now_ns: u64) {
    there.try_iter().for_each(|slice| slice_arrived(race, slice, now_ns));
}

fn slice_arrived(race: &mut LoadComputeOverlap, there: LoadedSlice, now_ns: u64) {
    race.slices_arrived(there.block, there.layer + 1, now_ns);
}

/// Work that a compiler cannot remove and a processor cannot run in parallel.
fn spin(turns: u64) {
    let mut word = black_box(0x9E37_79B9_7F4A_7C15u64);
    for _ in 0..turns {
        word = black_box(word.rotate_left(5) ^ 0xE703_7ED1_A0B4_28DB);
    }
    black_box(word);
}
