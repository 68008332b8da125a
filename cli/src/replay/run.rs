//! From the arguments of `replay` to its report: read, start or join a cluster, drive, write.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::id::TenantId;
use kvfleet_proto::tls::Identity;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::carried::Carried;
use super::drive::{Drive, Pace};
use super::faults::Faults;
use super::measure::Measured;
use super::prepare::{Reading, Workload, prepare};
use super::progress::Progress;
use super::serve::Server;
use super::watch::Watch;
use crate::args::{Capacity, Fault, ReplayArgs, ShapeArgs};
use crate::calls::{RouterCalls, explain};
use crate::cluster::{Cluster, LAYERS, NodeCapacity, Shape};
use crate::connect::Connection;
use crate::process::Stop;
use crate::report::{self, Config, Report, Subject};

/// Blocks a node has room for beyond what the trace needs when capacity is unbounded: a block may lie
/// on two nodes after a kill, and the tail of a running save needs room beside what is there.
const UNBOUNDED_SPARE_BLOCKS: u64 = 4096;

/// What a replay leaves: its report and the files written.
#[derive(Debug)]
pub struct Outcome {
    /// Everything that was measured, added up.
    pub report: Report,
    written: anyhow::Result<Vec<PathBuf>>,
}

impl Outcome {
    /// Whether every request ended, every byte was right, and all that was asked for was done and measured.
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

    /// `report.json` and plots, or why they could not be written.
    pub fn files(&self) -> anyhow::Result<&[PathBuf]> {
        self.written.as_deref().map_err(|error| anyhow::anyhow!("{error:#}"))
    }
}

/// Runs a replay to its end, or until it is asked to stop.
pub async fn run(args: &ReplayArgs, stop: &Stop) -> anyhow::Result<Outcome> {
    check(args)?;
    let Some(workload) = read(args, stop).await? else { anyhow::bail!("stopped before the trace was read") };
    let stop = stop.token();
    let (measured, shape) = match args.target.connect() {
        None => on_own_cluster(args, &workload, stop).await?,
        Some(connect) => {
            let connection = Connection::open(&connect)?;
            until_answered(connection.all()?, stop).await?;
            let target = (connection.routers, connection.identity);
            (drive(args, &workload, target, None, stop).await?, None)
        }
    };
    if let Some(why) = measured.refused.as_ref().filter(|_| measured.samples.is_empty()) {
        anyhow::bail!("{why}");
    }
    let report = Report::new(subject(args, &workload, shape.as_ref(), &measured), &measured);
    let written = match &args.report {
        Some(directory) => report::write(directory, &report, &measured),
        None => Ok(vec![]),
    };
    Ok(Outcome { report, written })
}

/// Reads the trace beside the signals: a long one takes a while.
async fn read(args: &ReplayArgs, stop: &Stop) -> anyhow::Result<Option<Workload>> {
    let args = args.clone();
    let reading = tokio::task::spawn_blocking(move || {
        prepare(&Reading {
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

/// Refuses a cluster of which no router answers, before every request is tried on it in vain.
async fn until_answered(routers: Vec<RouterCalls>, stop: &CancellationToken) -> anyhow::Result<()> {
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
        // What comes next sees the stop too, and reports it.
        () = stop.cancelled() => Ok(()),
    }
}

/// What only makes sense together, and what would be noticed only after hours.
fn check(args: &ReplayArgs) -> anyhow::Result<()> {
    let foreign = args.target.connect().is_some();
    if foreign && (!args.kill.is_empty() || !args.restart.is_empty()) {
        anyhow::bail!("--kill and --restart need a cluster of this command's own: leave out --cluster");
    }
    if args.limit == Some(0) {
        anyhow::bail!("--limit 0 leaves nothing to serve: give at least 1");
    }
    for fault in args.kill.iter().chain(&args.restart) {
        Shape::check_target(&args.shape, fault.target)
            .map_err(|problem| anyhow::anyhow!("{fault}: {problem}"))?;
    }
    args.report.as_deref().map_or(Ok(()), check_writable)
}

/// Makes the report's directory and tries a file in it, which goes again at once.
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
) -> anyhow::Result<(Measured, Option<Shape>)> {
    let shape = shape(&args.shape, args.fetch_floor_ms, workload)?;
    let mut cluster = tokio::select! {
        cluster = Cluster::start(shape.clone()) => cluster?,
        () = stop.cancelled() => return Ok((Measured { interrupted: true, ..Measured::default() }, Some(shape))),
    };
    let target = (cluster.router_addresses(), cluster.identity()?);
    let measured = drive(args, workload, target, Some(&mut cluster), stop).await;
    let (crashed, memory) = (cluster.ever_crashed(), cluster.peak_memory());
    let carried = Carried::of(&cluster).await;
    cluster.stop().await;
    Ok((Measured { crashed, memory: memory?, carried: carried?, ..measured? }, Some(shape)))
}

async fn drive(
    args: &ReplayArgs,
    workload: &Workload,
    (routers, identity): (Vec<String>, Identity),
    cluster: Option<&mut Cluster>,
    stop: &CancellationToken,
) -> anyhow::Result<Measured> {
    let watch = Arc::new(Watch::default());
    let time_scale = cluster.as_ref().map_or(1.0, |cluster| cluster.shape().predicted_time_scale());
    let of = (args.seed, TenantId(args.tenant), workload.block_tokens);
    let server = Server::new((routers, identity), of, Arc::clone(&watch), time_scale)?;
    let drive = Drive {
        requests: Arc::clone(&workload.requests),
        server: Arc::new(server),
        pace: Pace { concurrency: concurrency(args), speed: args.speed },
        faults: Faults::plan(&args.kill, &args.restart, workload.requests.len(), &watch),
        progress: Progress::new(workload.requests.len(), args.quiet),
        stop: stop.clone(),
    };
    Ok(drive.run(cluster).await)
}

/// Bounded capacity makes what is evicted depend on the order, so the trace's own order is kept there.
fn is_sequential(args: &ReplayArgs) -> bool {
    let bounded = args.target.connect().is_none() && dram(&args.shape) != Capacity::Unbounded;
    args.sequential || (bounded && !args.no_sequential)
}

fn concurrency(args: &ReplayArgs) -> usize {
    if is_sequential(args) { 1 } else { usize::from(args.concurrency) }
}

/// Unbounded unless said otherwise; with only an SSD size given, DRAM is still unbounded.
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

/// The cluster that serves a workload.
pub(super) fn shape(args: &ShapeArgs, fetch_floor_ms: u64, workload: &Workload) -> anyhow::Result<Shape> {
    let watermarks = args.watermarks.map_or((1.0, 1.0), |marks| (marks.high, marks.low));
    Ok(Shape {
        block_tokens: workload.block_tokens,
        layers: LAYERS,
        capacity: capacity(args, workload)?,
        watermarks: Some(watermarks),
        fetch_floor_ms,
        ..Shape::from_args(args)?
    })
}

fn subject(args: &ReplayArgs, workload: &Workload, shape: Option<&Shape>, measured: &Measured) -> Subject {
    let texts = |faults: &[Fault]| faults.iter().map(ToString::to_string).collect();
    let capacity = shape.map(|shape| shape.capacity);
    let own = shape.is_some();
    // What a cluster of someone else is made of is not ours to claim.
    let known = |text: String| if own { text } else { String::new() };
    let config = Config {
        trace: args.trace.display().to_string(),
        trace_requests: workload.requests.len() as u64,
        unique_blocks: workload.unique_blocks,
        skipped_lines: workload.skipped.values().sum(),
        skipped_lines_by_reason: workload.skipped.clone(),
        block_tokens: workload.block_tokens,
        block_bytes: if own { args.shape.block_bytes } else { 0 },
        routers: if own { args.shape.routers } else { 0 },
        nodes: if own { args.shape.nodes } else { 0 },
        instances: if own { args.shape.instances } else { 0 },
        dram: known(dram(&args.shape).to_string()),
        ssd: known(args.shape.ssd.unwrap_or(Capacity::None).to_string()),
        dram_blocks_per_node: capacity.map_or(0, |capacity| capacity.dram_blocks),
        ssd_blocks_per_node: capacity.map_or(0, |capacity| capacity.ssd_blocks),
        policy: known(args.shape.policy.clone()),
        watermarks: known(args.shape.watermarks.map_or("1:1".to_owned(), |marks| marks.to_string())),
        concurrency: concurrency(args) as u64,
        sequential: is_sequential(args),
        speed: args.speed.to_string(),
        time_scale: if own { args.shape.time_scale } else { 0.0 },
        transport: known(args.shape.transport.to_string()),
        tenant: args.tenant,
        kill: texts(&args.kill),
        restart: texts(&args.restart),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let profiles: Vec<_> = measured.profiles.iter().map(String::as_str).collect();
    let profile = if profiles.is_empty() { known(args.shape.profile.clone()) } else { profiles.join(", ") };
    Subject { config, seed: args.seed, profile }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::cluster::PeakMemory;

    fn outcome(measured: &Measured) -> Outcome {
        let subject = Subject { config: Config::default(), seed: 1, profile: String::new() };
        Outcome { report: Report::new(subject, measured), written: Ok(vec![]) }
    }

    #[test]
    fn whatever_is_not_as_it_must_be_is_not_good() {
        use super::super::measure::Sample;
        assert!(outcome(&Measured::default()).is_good());
        let text = || vec!["x".to_owned()];
        let sampled = |sample| Measured { samples: vec![sample], ..Measured::default() };
        let peak = |peak_bytes, bytes_max| PeakMemory { process: "node-1".into(), peak_bytes, bytes_max };
        let within = vec![peak(110, Some(100)), peak(u64::MAX, None)];
        assert!(outcome(&Measured { memory: within, ..Measured::default() }).is_good());
        let bad = [
            Measured { failed: 1, ..Measured::default() },
            Measured { interrupted: true, ..Measured::default() },
            Measured { refused: Some("x".into()), ..Measured::default() },
            Measured { crashed: text(), ..Measured::default() },
            Measured { memory: vec![peak(111, Some(100))], ..Measured::default() },
            Measured { faults_not_done: text(), ..Measured::default() },
            Measured { faults_not_measured: text(), ..Measured::default() },
            sampled(Sample { wrong_bytes: 1, ..Sample::default() }),
            sampled(Sample { wrong_blocks: 1, ..Sample::default() }),
        ];
        for measured in bad {
            assert!(!outcome(&measured).is_good(), "{measured:?}");
        }
    }
}
