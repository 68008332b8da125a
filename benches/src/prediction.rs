//! Errors of the routers' TTFT predictions, on a cluster of real processes.
//!
//! Not here: the replay itself (`kvfleet replay`), its invocation (`replay.rs`), and the learning
//! (`kv_core::schedule`).

use anyhow::Context;
use benches::{BenchRow, Better, outcome};
use serde::Deserialize;

use crate::Effort;
use crate::replay::Program;

pub(crate) const ABOUT: &str = "kvfleet replay of generated business traffic on four nodes and four \
    instances that compute at twice the speed of their profile, at some 70 % load: TTFT as the routers \
    predicted it, against the instances' measurements, after the first 200 requests; each run has its own \
    seed";

/// Requests; the first 200 are not judged.
const REQUESTS: u64 = 500;
const SHAPE: &[&str] = &[
    "--time-scale=0.5",
    "--speed=0.35x",
    "--nodes=4",
    "--instances=4",
    "--concurrency=64",
    "--block-bytes=4KiB",
    "--no-sequential",
];
/// Seed of the first run.
const SEED: u64 = 1;
/// Limits of the median error and of the bias.
const MEDIAN_PERCENT: f64 = 15.0;
const BIAS_PERCENT: f64 = 5.0;

#[derive(Deserialize)]
struct PredictionReport {
    prediction: Option<Prediction>,
}

#[derive(Deserialize)]
struct Prediction {
    median: f64,
    bias: f64,
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let program = Program::find("prediction")?;
    let (mut median, mut bias) = (Vec::new(), Vec::new());
    for seed in (SEED..).take(effort.runs) {
        eprintln!("prediction: seed {seed}");
        let dir = tempfile::tempdir()?;
        let trace = dir.path().join("requests.jsonl");
        // With fewer requests than routers learn from, there is no prediction to judge.
        let requests = if effort.quick { REQUESTS / 2 } else { REQUESTS };
        program.generate("business", requests, seed, &trace)?;
        let shape = SHAPE.iter().map(|option| (*option).to_owned());
        let report: PredictionReport = program.replay(&trace, &dir.path().join("report"), shape)?;
        let prediction = report.prediction.context("the report has no predictions")?;
        median.push((100.0 * prediction.median, MEDIAN_PERCENT));
        bias.push((100.0 * prediction.bias.abs(), BIAS_PERCENT));
    }
    let row = |name, peer, pairs: &[(f64, f64)]| {
        BenchRow::new("prediction", name, "%", peer, Better::Lower, outcome(pairs))
    };
    Ok(vec![
        row("error, median of requests", "limit: 15 %", &median),
        row("bias, absolute", "limit: 5 %", &bias),
    ])
}
