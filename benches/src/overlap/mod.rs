//! Layers that are loaded, computed and saved concurrently, under the production rules. An emulated
//! prefill runs beside a path of a set rate, against the longer of load and compute. Failing paths
//! are compared with recomputation, and saves run beside compute over real paths to a real node.
//!
//! Not here: the emulated engine (`overlap/engine.rs`), the emulated path (`overlap/source.rs`),
//! saves (`overlap/saving.rs`).

mod engine;
mod saving;
mod source;

use std::cell::Cell;
use std::time::Duration;

use benches::{BenchRow, Better, Outcome, outcome, side_by_side};
use kv_core::pipeline::{ArrivalOrder, ComputeCosts, LoadComputeOverlap, Preload, PreloadWork};

use crate::Effort;
pub(crate) use engine::EmulatedEngine;
use source::{Source, SourceFault, SourcePlan};

pub(crate) const ABOUT: &str = "a prefill of 32 layers by a calibrated loop, beside a thread that copies the \
    slices of 64 history blocks at a set rate; a token's history loads 12.5 times as fast as it is computed. \
    Compute runs a layer when its slices are loaded, and waits or recomputes as the rules decide; from the \
    first byte, or from the job's turn behind another job, to the last layer. Saves: 32 blocks of 512 KiB \
    per job to a node of this process; compute sleeps, except in the rows with a busy processor";

/// Layers of the model, and blocks of the history.
const LAYERS: u32 = 32;
const BLOCKS: u32 = 64;
/// Bytes of a slice: small, so that the copy costs little and the path keeps its set rate.
const SLICE_BYTES: u32 = 2 << 10;
/// Compute time of the new tokens.
const COMPUTE_MS: u64 = 64;
/// Time to compute a token over time to load it: 40 µs against 3.2 µs, 128 KiB at 40 GB/s.
const COMPUTE_OVER_LOAD: f64 = 12.5;
/// Time to recompute everything if the path fails.
const RECOMPUTE_MS: u64 = 640;

/// A job: its costs, and the load of its history.
struct PrefillJob {
    costs: ComputeCosts,
    work: PreloadWork,
    load: Duration,
}

impl PrefillJob {
    /// A job with these times for loading, computing new tokens, and computing the history.
    fn new(load_ns: u64, compute_ns: u64, hist_ns: u64) -> PrefillJob {
        let cells = u64::from(LAYERS * BLOCKS);
        let costs = ComputeCosts {
            block_layer_ns: vec![hist_ns / cells; BLOCKS as usize],
            new_layer_ns: compute_ns / u64::from(LAYERS),
            layers: LAYERS,
        };
        let bytes = cells * u64::from(SLICE_BYTES);
        let bytes_per_s = u128::from(bytes) * 1_000_000_000 / u128::from(load_ns.max(1));
        let work = PreloadWork {
            bytes_per_s: u64::try_from(bytes_per_s).unwrap_or(u64::MAX),
            load_ns_per_token: load_ns,
            hist_tokens: 1,
            prefill_ns_per_token: compute_ns,
            new_tokens: 1,
        };
        PrefillJob { costs, work, load: Duration::from_nanos(load_ns) }
    }

    fn source_plan(&self, buffer_bytes_max: u64, arrive: ArrivalOrder, fault: SourceFault) -> SourcePlan {
        let plan = Preload::new(self.work, &[SLICE_BYTES; LAYERS as usize], BLOCKS, buffer_bytes_max);
        SourcePlan { plan, blocks: BLOCKS, slice_bytes: SLICE_BYTES, arrive, load: self.load, fault }
    }

    fn race(&self, arrive: ArrivalOrder) -> LoadComputeOverlap {
        LoadComputeOverlap::new(
            self.costs.clone(),
            &[SLICE_BYTES; LAYERS as usize],
            arrive,
            self.work.bytes_per_s,
            0,
        )
    }
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let engine = EmulatedEngine::calibrated();
    let mut rows = Vec::new();
    for load in [0.25, 0.5, 1.0, 2.0, 4.0] {
        rows.extend(overlap(effort, engine, load));
    }
    for load in [2.0, 4.0] {
        rows.extend(buffers(effort, engine, load));
    }
    for share in [15, 30] {
        rows.extend(saving::rows(effort, engine, share)?);
    }
    for (name, arrive, fault) in FAILURES {
        rows.extend(failure(effort, engine, name, *arrive, *fault));
    }
    anyhow::ensure!(!rows.is_empty(), "no row name contains the --only text");
    Ok(rows)
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn row(name: &str, unit: &str, peer: &str, outcome: Outcome) -> BenchRow {
    BenchRow::new("overlap", name, unit, peer, Better::Lower, outcome)
}

/// A job that loads `load` times as long as it computes its new tokens.
fn job(effort: &Effort, load: f64) -> PrefillJob {
    let compute_ns = effort.scaled(COMPUTE_MS) * 1_000_000;
    let load_ns = (compute_ns as f64 * load) as u64;
    PrefillJob::new(load_ns, compute_ns, (load_ns as f64 * COMPUTE_OVER_LOAD) as u64)
}

/// From the first byte to the last layer, with no preload.
fn overlap(effort: &Effort, engine: EmulatedEngine, load: f64) -> Option<BenchRow> {
    let name = format!("prefill beside its load, load {load} of compute");
    if !effort.is_selected(&name) {
        return None;
    }
    let job = job(effort, load);
    let sending = job.source_plan(0, ArrivalOrder::ByLayer, SourceFault::None);
    let ours = || {
        let source = Source::start(&sending);
        milliseconds(engine.run(&job.costs, job.race(ArrivalOrder::ByLayer), &source))
    };
    let theirs = || {
        let source = Source::start(&sending);
        source.begin();
        let begun = source.origin;
        source.wait();
        let loaded = begun.elapsed();
        let begun = std::time::Instant::now();
        (0..LAYERS).for_each(|_| engine.compute(job.costs.new_layer_ns));
        milliseconds(loaded.max(begun.elapsed()))
    };
    Some(row(
        &name,
        "ms",
        "limit 1.1: the longer of load and compute",
        side_by_side(effort.runs, ours, theirs),
    ))
}

/// From the job's turn to its end, after a job that ran until every buffer was full.
fn buffers(effort: &Effort, engine: EmulatedEngine, load: f64) -> Vec<BenchRow> {
    let job = job(effort, load);
    let sized = job.source_plan(u64::MAX, ArrivalOrder::ByLayer, SourceFault::None);
    let layer_bytes = u64::from(BLOCKS * SLICE_BYTES);
    let none = job.source_plan(0, ArrivalOrder::ByLayer, SourceFault::None);
    let one = job.source_plan(layer_bytes, ArrivalOrder::ByLayer, SourceFault::None);
    let most = Cell::new(0u64);
    let behind = |sending: &SourcePlan| {
        let source = Source::start(sending);
        // The previous job, long enough to fill the largest buffer.
        let ahead = job.work.load_ns().saturating_sub(job.work.compute_ns()) + job.costs.new_layer_ns;
        engine.compute(ahead * 11 / 10);
        let ran = engine.run(&job.costs, job.race(ArrivalOrder::ByLayer), &source);
        most.set(most.get().max(source.ahead_bytes()));
        milliseconds(ran)
    };
    let layers = sized.plan.buffer_layers();
    let name = format!("behind another job, load {load} of compute, {layers} layers of buffer");
    let mut rows = Vec::new();
    if !effort.is_selected(&name) {
        return rows;
    }
    let compute = || {
        let begun = std::time::Instant::now();
        (0..LAYERS).for_each(|_| engine.compute(job.costs.new_layer_ns));
        milliseconds(begun.elapsed())
    };
    let pair = |theirs: &dyn Fn() -> f64| side_by_side(effort.runs, || behind(&sized), theirs);
    rows.push(row(&name, "ms", "no buffer", pair(&|| behind(&none))));
    rows.push(row(&name, "ms", "one layer of buffer", pair(&|| behind(&one))));
    rows.push(row(&name, "ms", "limit 1.1: compute alone", pair(&compute)));
    let kib = |bytes: u64| bytes as f64 / 1024.0;
    let bytes = outcome(&[(kib(most.get()), kib(sized.plan.buffer_bytes()))]);
    rows.push(row(&format!("{name}: peak bytes loaded ahead"), "KiB", "limit 1: its size", bytes));
    rows
}

const FAILURES: &[(&str, ArrivalOrder, SourceFault)] = &[
    ("at 1 % of its rate, by layer", ArrivalOrder::ByLayer, SourceFault::Slow(100.0)),
    ("at 1 % of its rate, by block", ArrivalOrder::ByBlock, SourceFault::Slow(100.0)),
    ("silent from the first byte", ArrivalOrder::ByLayer, SourceFault::Silent { after: 0 }),
    ("silent after a third, by layer", ArrivalOrder::ByLayer, SourceFault::Silent { after: THIRD }),
    ("silent after a third, by block", ArrivalOrder::ByBlock, SourceFault::Silent { after: THIRD }),
    ("cut after a third, by layer", ArrivalOrder::ByLayer, SourceFault::Disconnect { after: THIRD }),
    ("cut after a third, by block", ArrivalOrder::ByBlock, SourceFault::Disconnect { after: THIRD }),
    (
        "all but the last slice",
        ArrivalOrder::ByLayer,
        SourceFault::Silent { after: (LAYERS * BLOCKS) as usize - 1 },
    ),
];

/// A third of all slices.
const THIRD: usize = (LAYERS * BLOCKS) as usize / 3;

/// A failing path, against recomputing everything.
fn failure(
    effort: &Effort,
    engine: EmulatedEngine,
    name: &str,
    arrive: ArrivalOrder,
    fault: SourceFault,
) -> Option<BenchRow> {
    let name = format!("path {name}");
    if !effort.is_selected(&name) {
        return None;
    }
    let recompute_ns = effort.scaled(RECOMPUTE_MS) * 1_000_000;
    let job = PrefillJob::new(recompute_ns / 10, recompute_ns / 10, recompute_ns - recompute_ns / 10);
    let sending = job.source_plan(0, arrive, fault);
    let ours = || {
        let source = Source::start(&sending);
        milliseconds(engine.run(&job.costs, job.race(arrive), &source))
    };
    let theirs = || milliseconds(engine.recompute(&job.costs));
    Some(row(&name, "ms", "limit 1.02: recomputing all", side_by_side(effort.runs, ours, theirs)))
}
