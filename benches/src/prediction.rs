//! How far the first tokens that routers predict are off, on a cluster of real processes.
//!
//! Not here: the replay itself (`kvfleet replay`), how it is called (`replay.rs`), and what is learnt (`kv_core::schedule`).

use anyhow::Context;
use benches::{Better, Row, outcome};
use serde::Deserialize;

use crate::Effort;
use crate::replay::Program;

pub(crate) const ABOUT: &str = "kvfleet replay of generated business traffic on four nodes and four instances that take half the time of their profile to compute, at some 70 % of what they \
     get through: until the first token as routers predicted it, against what instances measured, behind the first 200 requests; each run has a seed of its own";

/// Requests, of which the first 200 are not judged.
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
/// The first one.
const SEED: u64 = 1;
/// Most that predictions may be off, in the middle and in sum.
const MEDIAN_PERCENT: f64 = 15.0;
const BIAS_PERCENT: f64 = 5.0;

#[derive(Deserialize)]
struct Report {
    prediction: Option<Prediction>,
}

#[derive(Deserialize)]
struct Prediction {
    median: f64,
    bias: f64,
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let program = Program::find("prediction")?;
    let (mut median, mut bias) = (Vec::new(), Vec::new());
    for seed in (SEED..).take(effort.runs) {
        eprintln!("prediction: seed {seed}");
        let dir = tempfile::tempdir()?;
        let trace = dir.path().join("requests.jsonl");
        // Fewer than routers learn from are none to judge.
        let requests = if effort.quick { REQUESTS / 2 } else { REQUESTS };
        program.generate(("business", requests, seed), &trace)?;
        let shape = SHAPE.iter().map(|option| (*option).to_owned());
        let report: Report = program.replay(&trace, &dir.path().join("report"), shape)?;
        let prediction = report.prediction.context("the report says nothing of predictions")?;
        median.push((100.0 * prediction.median, MEDIAN_PERCENT));
        bias.push((100.0 * prediction.bias.abs(), BIAS_PERCENT));
    }
    let row = |name, peer, pairs: &[(f64, f64)]| {
        Row::new("prediction", name, "%", peer, Better::Lower, outcome(pairs))
    };
    Ok(vec![
        row("off by, median of requests", "limit: 15 %", &median),
        row("off in sum, either way", "limit: 5 %", &bias),
    ])
}
