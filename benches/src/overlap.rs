//! Layers that are loaded, computed and saved side by side, with the rules of production: an emulated prefill
//! beside a path of a set rate, against the longer of load and compute, against recomputing when the path
//! fails; and saving beside computing, over real paths to a real node.
//!
//! Not here: the engine that burns time (`overlap/engine.rs`), the path that is emulated (`overlap/source.rs`), saves (`overlap/saving.rs`).

mod engine;
mod saving;
mod source;

use std::cell::Cell;
use std::time::Duration;

use benches::{Better, Outcome, Row, outcome, side_by_side};
use kv_core::pipeline::{Arrive, Costs, Preload, PreloadWork, Race};

use crate::Effort;
pub(crate) use engine::Engine;
use source::{Fault, Sending, Source};

pub(crate) const ABOUT: &str = "a prefill of 32 layers by a loop of counted turns, beside a thread that copies the slices of \
     64 history blocks at a set rate; a token's history loads 12.5 times as fast as it is computed. Compute runs a \
     layer when its slices are there, and waits or recomputes as the rules say; from the first byte to the last \
     layer, or from the job's turn behind another job. Saves: 32 blocks of 512 KiB a job to a node of this process, compute sleeps unless it is said to keep a processor busy";

/// Layers of the model, and blocks of the history.
const LAYERS: u32 = 32;
const BLOCKS: u32 = 64;
/// Bytes of a slice: small, so that copying costs the path nothing and its rate is what was set.
const SLICE_BYTES: u32 = 2 << 10;
/// Compute of the new tokens.
const COMPUTE_MS: u64 = 64;
/// Time to compute a token over time to load it: 40 µs against 3.2 µs, 128 KiB at 40 GB/s.
const COMPUTE_OVER_LOAD: f64 = 12.5;
/// All of recomputing, where the path fails.
const RECOMPUTE_MS: u64 = 640;

/// A job: what it costs, and how its history would be loaded.
struct Job {
    costs: Costs,
    work: PreloadWork,
    load: Duration,
}

impl Job {
    /// Loading takes `load_ns`, new tokens `compute_ns`, and computing the history `hist_ns`.
    fn new(load_ns: u64, compute_ns: u64, hist_ns: u64) -> Job {
        let cells = u64::from(LAYERS * BLOCKS);
        let costs = Costs {
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
        Job { costs, work, load: Duration::from_nanos(load_ns) }
    }

    fn sending(&self, buffer_bytes_max: u64, arrive: Arrive, fault: Fault) -> Sending {
        let plan = Preload::new(self.work, &[SLICE_BYTES; LAYERS as usize], BLOCKS, buffer_bytes_max);
        Sending { plan, blocks: BLOCKS, slice_bytes: SLICE_BYTES, arrive, load: self.load, fault }
    }

    fn race(&self, arrive: Arrive) -> Race {
        Race::new(self.costs.clone(), &[SLICE_BYTES; LAYERS as usize], arrive, self.work.bytes_per_s, 0)
    }
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let engine = Engine::calibrated();
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
    anyhow::ensure!(!rows.is_empty(), "no row has this in its name");
    Ok(rows)
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn row(name: &str, unit: &str, peer: &str, outcome: Outcome) -> Row {
    Row::new("overlap", name, unit, peer, Better::Lower, outcome)
}

/// A job of which loading takes `load` times as long as computing its new tokens.
fn job(effort: &Effort, load: f64) -> Job {
    let compute_ns = effort.scaled(COMPUTE_MS) * 1_000_000;
    let load_ns = (compute_ns as f64 * load) as u64;
    Job::new(load_ns, compute_ns, (load_ns as f64 * COMPUTE_OVER_LOAD) as u64)
}

/// From the first byte to the last layer, nothing loaded ahead.
fn overlap(effort: &Effort, engine: Engine, load: f64) -> Option<Row> {
    let name = format!("prefill beside its load, load {load} of compute");
    if !effort.wants(&name) {
        return None;
    }
    let job = job(effort, load);
    let sending = job.sending(0, Arrive::ByLayer, Fault::None);
    let ours = || {
        let source = Source::start(&sending);
        milliseconds(engine.run(&job.costs, job.race(Arrive::ByLayer), &source))
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

/// From the job's turn to its end, behind a job that computed so long that every buffer was full.
fn buffers(effort: &Effort, engine: Engine, load: f64) -> Vec<Row> {
    let job = job(effort, load);
    let sized = job.sending(u64::MAX, Arrive::ByLayer, Fault::None);
    let layer_bytes = u64::from(BLOCKS * SLICE_BYTES);
    let none = job.sending(0, Arrive::ByLayer, Fault::None);
    let one = job.sending(layer_bytes, Arrive::ByLayer, Fault::None);
    let most = Cell::new(0u64);
    let behind = |sending: &Sending| {
        let source = Source::start(sending);
        // The job ahead, as long as it takes to fill the largest buffer.
        let ahead = job.work.load_ns().saturating_sub(job.work.compute_ns()) + job.costs.new_layer_ns;
        engine.compute(ahead * 11 / 10);
        let ran = engine.run(&job.costs, job.race(Arrive::ByLayer), &source);
        most.set(most.get().max(source.ahead_bytes()));
        milliseconds(ran)
    };
    let layers = sized.plan.buffer_layers();
    let name = format!("behind another job, load {load} of compute, {layers} layers of buffer");
    let mut rows = Vec::new();
    if !effort.wants(&name) {
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
    rows.push(row(&format!("{name}: loaded ahead at most"), "KiB", "limit 1: its size", bytes));
    rows
}

const FAILURES: &[(&str, Arrive, Fault)] = &[
    ("at 1 % of its rate, by layer", Arrive::ByLayer, Fault::Slow(100.0)),
    ("at 1 % of its rate, by block", Arrive::ByBlock, Fault::Slow(100.0)),
    ("silent from the first byte", Arrive::ByLayer, Fault::Silent { after: 0 }),
    ("silent after a third, by layer", Arrive::ByLayer, Fault::Silent { after: THIRD }),
    ("silent after a third, by block", Arrive::ByBlock, Fault::Silent { after: THIRD }),
    ("cut after a third, by layer", Arrive::ByLayer, Fault::Cut { after: THIRD }),
    ("cut after a third, by block", Arrive::ByBlock, Fault::Cut { after: THIRD }),
    ("all but the last slice", Arrive::ByLayer, Fault::Silent { after: (LAYERS * BLOCKS) as usize - 1 }),
];

/// A third of all slices.
const THIRD: usize = (LAYERS * BLOCKS) as usize / 3;

/// A path that fails, against recomputing all.
fn failure(effort: &Effort, engine: Engine, name: &str, arrive: Arrive, fault: Fault) -> Option<Row> {
    let name = format!("path {name}");
    if !effort.wants(&name) {
        return None;
    }
    let recompute_ns = effort.scaled(RECOMPUTE_MS) * 1_000_000;
    let job = Job::new(recompute_ns / 10, recompute_ns / 10, recompute_ns - recompute_ns / 10);
    let sending = job.sending(0, arrive, fault);
    let ours = || {
        let source = Source::start(&sending);
        milliseconds(engine.run(&job.costs, job.race(arrive), &source))
    };
    let theirs = || milliseconds(engine.recompute(&job.costs));
    Some(row(&name, "ms", "limit 1.02: recomputing all", side_by_side(effort.runs, ours, theirs)))
}
