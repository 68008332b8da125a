//! Runs `replay` from its arguments to its report.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::id::TenantId;
use kvfleet_net::tls::Identity;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::drive::{ReplayDrive, ReplayPace};
use super::faults::Faults;
use super::measure::ReplayMeasurements;
use super::prepare::{TraceSource, Workload, load_workload};
use super::progress::Progress;
use super::serve::RequestDriver;
use super::traffic::ReplayTraffic;
use super::watch::FailureWatch;
use crate::args::{Capacity, FaultSpec, ReplayArgs, ShapeArgs};
use crate::calls::{RouterCalls, explain};
use crate::cluster::{ClusterShape, LAYERS, LocalCluster, NodeCapacity};
use crate::connect::Connection;
use crate::process::Stop;
use crate::report::{self, Config, Report, ReportSubject};

/// Blocks of capacity per node beyond what the trace needs, if capacity is unbounded: a block may
/// be on two nodes after a kill, and a running save needs space beside the stored blocks.
const UNBOUNDED_SPARE_BLOCKS: u64 = 4096;

/// The result of a replay: its report and the files written.
#[derive(Debug)]
pub struct Outcome {
    /// The report built from all measurements.
    pub report: Report,
    written: anyhow::Result<Vec<PathBuf>>,
}

impl Outcome {
    /// Whether every request succeeded, all bytes were right, and everything requested was done and
    /// measured.
    #[must_use]
    pub fn is_good(&self) -> bool {
        let report = &self.report;
        report.wrong_bytes == 0
            && report.wrong_blocks == 0
            && report.requests_failed == 0
            && !report.interrupted
            && report.refused.is_none()
            && report.crashed.is_empty()
            && !report.memory.iter().any(|memory| memory.is_over)
            && report.faults_not_done.is_empty()
            && report.faults_not_measured.is_empty()
    }

    /// `report.json` and plots, or the error that prevented writing them.
    pub fn files(&self) -> anyhow::Result<&[PathBuf]> {
        self.written.as_deref().map_err(|error| anyhow::anyhow!("{error:#}"))
    }
}

/// Runs a replay until it ends or is stopped.
pub async fn run_replay(args: &ReplayArgs, stop: &Stop) -> anyhow::Result<Outcome> {
    validate(args)?;
    let Some(workload) = read_workload(args, stop).await? else {
        anyhow::bail!("stopped before the trace was read")
    };
    let stop = stop.token();
    let (measured, shape) = match args.target.connect() {
        None => on_own_cluster(args, &workload, stop).await?,
        Some(connect) => {
            let connection = Connection::open(&connect)?;
            wait_for_router(connection.all()?, stop).await?;
            (drive(args, &workload, connection.routers, connection.identity, None, stop).await?, None)
        }
    };
    if let Some(why) = measured.refused.as_ref().filter(|_| measured.samples.is_empty()) {
        anyhow::bail!("{why}");
    }
    let report = Report::new(report_subject(args, &workload, shape.as_ref(), &measured), &measured);
    let written = match &args.report {
        Some(directory) => report::write(directory, &report, &measured),
        None => Ok(vec![]),
    };
    Ok(Outcome { report, written })
}

/// Reads the trace on a blocking thread, because a long one takes a while and signals must be
/// handled.
async fn read_workload(args: &ReplayArgs, stop: &Stop) -> anyhow::Result<Option<Workload>> {
    let args = args.clone();
    let reading = tokio::task::spawn_blocking(move || {
        load_workload(&TraceSource {
            path: &args.trace,
            format: args.format,
            lenient: args.lenient,
            limit: args.limit,
            block_tokens: args.block_tokens,
            tenant: args.tenant,
            layers: LAYERS,
        })
    });
    tokio::select! {
        workload = reading => workload?.map(Some),
        _ = stop.requested() => Ok(None),
    }
}

/// Fails if no router of the cluster answers, before every request fails on it.
async fn wait_for_router(routers: Vec<RouterCalls>, stop: &CancellationToken) -> anyhow::Result<()> {
    let ask = |router: RouterCalls| async move {
        router.status().await.map(|_| ()).map_err(|status| explain(&router.address, &status))
    };
    let mut asks: JoinSet<Result<(), String>> = routers.into_iter().map(ask).collect();
    let mut problems = vec![];
    let answered = async {
        while let Some(asked) = asks.join_next().await {
            match asked? {
                Ok(()) => return Ok(()),
                Err(problem) => problems.push(problem),
            }
        }
        problems.sort();
        anyhow::bail!("{}", problems.join("\n  "))
    };
    tokio::select! {
        answered = answered => answered,
        // The caller checks for the stop as well and reports it.
        () = stop.cancelled() => Ok(()),
    }
}

/// Rejects arguments that do not fit together and problems that would show only after hours.
fn validate(args: &ReplayArgs) -> anyhow::Result<()> {
    let is_external = args.target.connect().is_some();
    if is_external && (!args.kill.is_empty() || !args.restart.is_empty()) {
        anyhow::bail!("--kill and --restart need a cluster of this command's own: leave out --cluster");
    }
    if args.limit == Some(0) {
        anyhow::bail!("--limit 0 leaves nothing to serve: give at least 1");
    }
    for fault in args.kill.iter().chain(&args.restart) {
        ClusterShape::check_target(&args.shape, fault.target)
            .map_err(|problem| anyhow::anyhow!("{fault}: {problem}"))?;
    }
    args.report.as_deref().map_or(Ok(()), check_writable)
}

/// Creates the report directory and a temporary file in it.
fn check_writable(directory: &Path) -> anyhow::Result<()> {
    let tried = std::fs::create_dir_all(directory).and_then(|()| tempfile::tempfile_in(directory));
    tried.map(|_| ()).map_err(|cause| {
        anyhow::anyhow!("cannot write into {}: {cause}; choose another --report", directory.display())
    })
}

async fn on_own_cluster(
    args: &ReplayArgs,
    workload: &Workload,
    stop: &CancellationToken,
) -> anyhow::Result<(ReplayMeasurements, Option<ClusterShape>)> {
    let shape = shape(&args.shape, args.fetch_floor_ms, workload)?;
    let mut cluster = tokio::select! {
        cluster = LocalCluster::start(shape.clone()) => cluster?,
        () = stop.cancelled() => {
            let measurements = ReplayMeasurements { interrupted: true, ..ReplayMeasurements::default() };
            return Ok((measurements, Some(shape)));
        }
    };
    let (routers, identity) = (cluster.router_addresses(), cluster.identity()?);
    let measured = drive(args, workload, routers, identity, Some(&mut cluster), stop).await;
    let (crashed, memory) = (cluster.all_crashes(), cluster.peak_memory());
    let carried = ReplayTraffic::collect(&cluster).await;
    cluster.stop().await;
    Ok((ReplayMeasurements { crashed, memory: memory?, traffic: carried?, ..measured? }, Some(shape)))
}

async fn drive(
    args: &ReplayArgs,
    workload: &Workload,
    routers: Vec<String>,
    identity: Identity,
    cluster: Option<&mut LocalCluster>,
    stop: &CancellationToken,
) -> anyhow::Result<ReplayMeasurements> {
    let watch = Arc::new(FailureWatch::default());
    let time_scale = cluster.as_ref().map_or(1.0, |cluster| cluster.shape().predicted_time_scale());
    let server = RequestDriver::new(
        routers,
        identity,
        args.seed,
        TenantId(args.tenant),
        workload.block_tokens,
        Arc::clone(&watch),
        time_scale,
    )?;
    let drive = ReplayDrive {
        requests: Arc::clone(&workload.requests),
        server: Arc::new(server),
        pace: ReplayPace { concurrency: concurrency(args), speed: args.speed },
        faults: Faults::plan(&args.kill, &args.restart, workload.requests.len(), &watch),
        progress: Progress::new(workload.requests.len(), args.quiet),
        stop: stop.clone(),
    };
    Ok(drive.run(cluster).await)
}

/// With bounded capacity, evictions depend on the order of requests, so they run in trace order.
fn is_sequential(args: &ReplayArgs) -> bool {
    let bounded = args.target.connect().is_none() && dram(&args.shape) != Capacity::Unbounded;
    args.sequential || (bounded && !args.no_sequential)
}

fn concurrency(args: &ReplayArgs) -> usize {
    if is_sequential(args) { 1 } else { usize::from(args.concurrency) }
}

/// Unbounded unless given; also if only the SSD size is given.
fn dram(args: &ShapeArgs) -> Capacity {
    args.dram.unwrap_or(Capacity::Unbounded)
}

fn capacity(args: &ShapeArgs, workload: &Workload) -> anyhow::Result<NodeCapacity> {
    let blocks = |capacity: Capacity| {
        let spare = if capacity == Capacity::Unbounded { UNBOUNDED_SPARE_BLOCKS } else { 0 };
        spare + capacity.blocks_per_node(workload.unique_blocks, args.nodes, args.block_bytes)
    };
    let capacity = NodeCapacity {
        dram_blocks: blocks(dram(args)),
        ssd_blocks: blocks(args.ssd.unwrap_or(Capacity::None)),
    };
    if capacity.dram_blocks == 0 {
        anyhow::bail!("--dram {} leaves no room for one block per node: give more", dram(args));
    }
    Ok(capacity)
}

/// The shape of the cluster that serves a workload.
pub(super) fn shape(
    args: &ShapeArgs,
    fetch_floor_ms: u64,
    workload: &Workload,
) -> anyhow::Result<ClusterShape> {
    let watermarks = args.watermarks.map_or((1.0, 1.0), |marks| (marks.high, marks.low));
    Ok(ClusterShape {
        block_tokens: workload.block_tokens,
        layers: LAYERS,
        capacity: capacity(args, workload)?,
        watermarks: Some(watermarks),
        fetch_floor_ms,
        ..ClusterShape::from_args(args)?
    })
}

fn report_subject(
    args: &ReplayArgs,
    workload: &Workload,
    shape: Option<&ClusterShape>,
    measured: &ReplayMeasurements,
) -> ReportSubject {
    let texts = |faults: &[FaultSpec]| faults.iter().map(ToString::to_string).collect();
    let capacity = shape.map(|shape| shape.capacity);
    let is_own = shape.is_some();
    // The shape of an external cluster is unknown.
    let known = |text: String| if is_own { text } else { String::new() };
    let config = Config {
        trace: args.trace.display().to_string(),
        trace_requests: workload.requests.len() as u64,
        unique_blocks: workload.unique_blocks,
        skipped_lines: workload.skipped.values().sum(),
        skipped_lines_by_reason: workload.skipped.clone(),
        block_tokens: workload.block_tokens,
        block_bytes: if is_own { args.shape.block_bytes } else { 0 },
        routers: if is_own { args.shape.routers } else { 0 },
        nodes: if is_own { args.shape.nodes } else { 0 },
        instances: if is_own { args.shape.instances } else { 0 },
        dram: known(dram(&args.shape).to_string()),
        ssd: known(args.shape.ssd.unwrap_or(Capacity::None).to_string()),
        dram_blocks_per_node: capacity.map_or(0, |capacity| capacity.dram_blocks),
        ssd_blocks_per_node: capacity.map_or(0, |capacity| capacity.ssd_blocks),
        policy: known(args.shape.policy.clone()),
        watermarks: known(args.shape.watermarks.map_or("1:1".to_owned(), |marks| marks.to_string())),
        concurrency: concurrency(args) as u64,
        sequential: is_sequential(args),
        speed: args.speed.to_string(),
        time_scale: if is_own { args.shape.time_scale } else { 0.0 },
        transport: known(args.shape.transport.to_string()),
        tenant: args.tenant,
        kill: texts(&args.kill),
        restart: texts(&args.restart),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let profiles: Vec<_> = measured.profiles.iter().map(String::as_str).collect();
    let profile = if profiles.is_empty() { known(args.shape.profile.clone()) } else { profiles.join(", ") };
    ReportSubject { config, seed: args.seed, profile }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::cluster::PeakMemory;

    fn outcome(measured: &ReplayMeasurements) -> Outcome {
        let subject = ReportSubject { config: Config::default(), seed: 1, profile: String::new() };
        Outcome { report: Report::new(subject, measured), written: Ok(vec![]) }
    }

    #[test]
    fn any_deviation_fails_the_replay() {
        use super::super::measure::RequestSample;
        assert!(outcome(&ReplayMeasurements::default()).is_good());
        let text = || vec!["x".to_owned()];
        let sampled = |sample| ReplayMeasurements { samples: vec![sample], ..ReplayMeasurements::default() };
        let peak = |peak_bytes, bytes_max| PeakMemory { process: "node-1".into(), peak_bytes, bytes_max };
        let within = vec![peak(110, Some(100)), peak(u64::MAX, None)];
        assert!(outcome(&ReplayMeasurements { memory: within, ..ReplayMeasurements::default() }).is_good());
        let bad = [
            ReplayMeasurements { failed: 1, ..ReplayMeasurements::default() },
            ReplayMeasurements { interrupted: true, ..ReplayMeasurements::default() },
            ReplayMeasurements { refused: Some("x".into()), ..ReplayMeasurements::default() },
            ReplayMeasurements { crashed: text(), ..ReplayMeasurements::default() },
            ReplayMeasurements { memory: vec![peak(111, Some(100))], ..ReplayMeasurements::default() },
            ReplayMeasurements { faults_not_done: text(), ..ReplayMeasurements::default() },
            ReplayMeasurements { faults_not_measured: text(), ..ReplayMeasurements::default() },
            sampled(RequestSample { wrong_bytes: 1, ..RequestSample::default() }),
            sampled(RequestSample { wrong_blocks: 1, ..RequestSample::default() }),
        ];
        for measured in bad {
            assert!(!outcome(&measured).is_good(), "{measured:?}");
        }
    }
}
