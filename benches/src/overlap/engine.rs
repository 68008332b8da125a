//! An engine that burns time instead of computing: a loop whose turns were counted before, so that a layer is
//! an amount of work and not of time. What it does next it is told by the rules of production.
//!
//! Not here: where slices come from (`source.rs`).

use std::hint::black_box;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use kv_core::pipeline::{Costs, Next, Race};

use super::source::{Source, There};

/// Turns of the loop by which its speed is known: some 20 ms.
const CALIBRATION_TURNS: u64 = 20_000_000;

/// The loop, and how many turns of it are a nanosecond here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engine {
    turns_per_ns: f64,
}

impl Engine {
    /// Counts how fast this machine is: the fastest of a few times, which nobody disturbed.
    pub(crate) fn calibrated() -> Engine {
        let time = || {
            let begun = Instant::now();
            turn(CALIBRATION_TURNS);
            begun.elapsed()
        };
        let fastest = (0..10).map(|_| time()).min().unwrap_or(Duration::MAX);
        Engine { turns_per_ns: CALIBRATION_TURNS as f64 / fastest.as_nanos() as f64 }
    }

    /// Work of so many nanoseconds on an undisturbed machine.
    pub(crate) fn compute(&self, ns: u64) {
        turn((ns as f64 * self.turns_per_ns) as u64);
    }

    /// Everything computed and nothing fetched, a layer at a time.
    pub(crate) fn recompute(&self, costs: &Costs) -> Duration {
        let begun = Instant::now();
        (0..costs.layers).for_each(|_| self.compute(costs.recompute_ns() / u64::from(costs.layers)));
        begun.elapsed()
    }

    /// Runs a job beside a source: the time from its turn to its end.
    pub(crate) fn run(&self, costs: &Costs, mut race: Race, source: &Source) -> Duration {
        let begun = Instant::now();
        let now_ns = || u64::try_from(source.origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        take(&mut race, &source.there, now_ns());
        race.begin(now_ns());
        source.begin();
        loop {
            take(&mut race, &source.there, now_ns());
            match race.next(now_ns()) {
                Next::Layer { .. } => {
                    source.leave_out(race.pass());
                    let pass: u64 = race.pass().map(|block| costs.block_layer_ns[block as usize]).sum();
                    self.compute(pass + costs.new_layer_ns);
                }
                Next::CatchUp { blocks, layers } => {
                    source.leave_out(blocks.iter().copied());
                    let one: u64 = blocks.iter().map(|block| costs.block_layer_ns[*block as usize]).sum();
                    self.compute(one * u64::from(layers));
                }
                Next::Wait { until_ns } => {
                    let wait = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
                    match source.there.recv_timeout(wait) {
                        Ok(there) => arrived(&mut race, there, now_ns()),
                        Err(RecvTimeoutError::Timeout) => {}
                        // Nothing comes any more: a source that hung would not say so, one that ended does.
                        Err(RecvTimeoutError::Disconnected) => {
                            (0..costs.block_layer_ns.len() as u32).for_each(|block| race.lost(block));
                        }
                    }
                }
                Next::Done => break,
            }
        }
        begun.elapsed()
    }
}

fn take(race: &mut Race, there: &Receiver<There>, now_ns: u64) {
    there.try_iter().for_each(|slice| arrived(race, slice, now_ns));
}

fn arrived(race: &mut Race, there: There, now_ns: u64) {
    race.arrived(there.block, there.layer + 1, now_ns);
}

/// Work that a compiler cannot leave out and a processor cannot do side by side.
fn turn(turns: u64) {
    let mut word = black_box(0x9E37_79B9_7F4A_7C15u64);
    for _ in 0..turns {
        word = black_box(word.rotate_left(5) ^ 0xE703_7ED1_A0B4_28DB);
    }
    black_box(word);
}
