//! A cluster of real processes at twice the rate at which it answers 256 concurrent requests. A
//! node and the leading router are killed during the run. Rows cover node memory, answered requests
//! and the remaining throughput.
//!
//! Not here: the replay itself (`kvfleet replay`), which also verifies every byte, and its
//! invocation (`replay.rs`).

use std::path::Path;

use anyhow::{Context, ensure};
use benches::{BenchRow, Better, outcome};
use serde::Deserialize;

use crate::Effort;
use crate::replay::Program;

pub(crate) const ABOUT: &str = "kvfleet replay of generated consumer traffic on three nodes of 128 MiB DRAM \
    and 256 MiB SSD, blocks of 64 KiB: first the throughput with 256 concurrent requests, taken as the \
    capacity, then arrivals at twice that rate, up to 4,096 at a time, while a node (30 %) and the leading \
    router (60 %) are killed";

/// Requests of each half.
const REQUESTS: u64 = 1_000;
/// Arrival rate over the throughput with 256 concurrent requests. The cluster may sustain more; the
/// last row shows it.
const OVERLOAD: f64 = 2.0;
/// Options of both halves. Few concurrent saves are allowed, so that tiers dominate a node's
/// memory.
const SHAPE: &[&str] = &[
    "--block-bytes=64KiB",
    "--dram=128MiB",
    "--ssd=256MiB",
    "--set=node.save_inflight_bytes=67108864",
    "--no-sequential",
];
const SEED: u64 = 2_026;

/// The used fields of a report.
#[derive(Deserialize)]
struct OverloadReport {
    requests: u64,
    requests_ended: u64,
    requests_per_s: f64,
    wrong_bytes: u64,
    memory: Vec<MemoryReport>,
}

#[derive(Deserialize)]
struct MemoryReport {
    peak_bytes: u64,
    bytes_max: Option<u64>,
}

impl OverloadReport {
    /// Memory and limit in MiB of the process with the highest ratio of the two.
    fn fullest(&self) -> anyhow::Result<(f64, f64)> {
        const MIB: f64 = (1 << 20) as f64;
        let bounded = self.memory.iter().filter_map(|memory| {
            let most = memory.bytes_max? as f64;
            Some((memory.peak_bytes as f64 / MIB, most / MIB))
        });
        let fullest = bounded.max_by(|left, right| (left.0 / left.1).total_cmp(&(right.0 / right.1)));
        fullest.context("the report has no memory of a node")
    }

    fn answered_percent(&self) -> f64 {
        100.0 * self.requests_ended as f64 / self.requests as f64
    }
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let program = Program::find("overload")?;
    let (mut memory, mut answered, mut carried) = (Vec::new(), Vec::new(), Vec::new());
    for seed in (SEED..).take(effort.runs) {
        eprintln!("overload: seed {seed}");
        let dir = tempfile::tempdir()?;
        let trace = dir.path().join("requests.jsonl");
        program.generate("consumer", effort.scaled(REQUESTS), seed, &trace)?;
        let capacity =
            replay(&program, &trace, &dir.path().join("capacity"), &["--concurrency=256".to_owned()])?;
        let times = OVERLOAD * capacity.requests_per_s / arrivals_per_s(&trace)?;
        let over = [
            format!("--speed={times}x"),
            "--concurrency=4096".to_owned(),
            "--kill=node:1@30%".to_owned(),
            "--kill=router-leader@60%".to_owned(),
        ];
        let over = replay(&program, &trace, &dir.path().join("overload"), &over)?;
        memory.push(over.fullest()?);
        answered.push((over.answered_percent(), 100.0));
        carried.push((over.requests_per_s, capacity.requests_per_s));
    }
    let row = |name: &str, unit: &str, peer: &str, better, pairs: &[(f64, f64)]| {
        BenchRow::new("overload", name, unit, peer, better, outcome(pairs))
    };
    Ok(vec![
        row("peak memory of the fullest node", "MiB", "its bound; 1.1 is the limit", Better::Lower, &memory),
        row("requests answered, two kills on the way", "%", "limit: 100 %", Better::Higher, &answered),
        row(
            "requests answered per second, last one included",
            "1/s",
            "capacity, no kills",
            Better::Higher,
            &carried,
        ),
    ])
}

fn replay(
    program: &Program,
    trace: &Path,
    folder: &Path,
    options: &[String],
) -> anyhow::Result<OverloadReport> {
    let shape = SHAPE.iter().map(|option| (*option).to_owned());
    let report: OverloadReport = program.replay(trace, folder, shape.chain(options.iter().cloned()))?;
    ensure!(report.wrong_bytes == 0, "{} wrong bytes", report.wrong_bytes);
    Ok(report)
}

/// Requests of a trace per second of arrival time.
fn arrivals_per_s(trace: &Path) -> anyhow::Result<f64> {
    #[derive(Deserialize)]
    struct TraceLine {
        timestamp: f64,
    }
    let text = std::fs::read_to_string(trace)?;
    let lines: Vec<TraceLine> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let (first, last) = (lines.first().context("an empty trace")?, lines.last().context("an empty trace")?);
    let span_s = last.timestamp - first.timestamp;
    ensure!(span_s > 0.0, "all requests of the trace arrive at once");
    Ok(lines.len() as f64 / span_s)
}
