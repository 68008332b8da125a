//! From the arguments of `replay` to its report: read, start or join a cluster, drive, write.

use std::path::PathBuf;
use std::sync::Arc;

use kv_core::id::TenantId;
use kv_core::schedule::HardwareProfile;
use kvfleet_proto::tls::Identity;
use tokio_util::sync::CancellationToken;

use super::drive::{Drive, Pace};
use super::faults::Faults;
use super::measure::Measured;
use super::prepare::{Reading, Workload, prepare};
use super::progress::Progress;
use super::serve::Server;
use super::watch::Watch;
use crate::args::{Capacity, Fault, ReplayArgs};
use crate::cluster::{Cluster, LAYERS, NodeCapacity, Shape, manifest};
use crate::connect::{Connection, client};
use crate::process::stop_requested;
use crate::report::{self, Config, Report, Subject};

/// Blocks a node has room for beyond what the trace needs when capacity is unbounded: a block may lie
/// on two nodes after a kill, and the tail of a running save needs room beside what is there.
const UNBOUNDED_SPARE_BLOCKS: u64 = 4096;

/// What a replay leaves: its report and the files written.
#[derive(Debug)]
pub struct Outcome {
    /// Everything that was measured, added up.
    pub report: Report,
    /// `report.json` and plots.
    pub files: Vec<PathBuf>,
}

impl Outcome {
    /// Whether every request ended and every byte was right.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.report.wrong_bytes == 0 && self.report.requests_failed == 0 && !self.report.interrupted
    }
}

/// Runs a replay to its end, or to Ctrl-C.
pub async fn run(args: &ReplayArgs) -> anyhow::Result<Outcome> {
    check(args)?;
    let workload = prepare(&Reading {
        path: &args.trace,
        format: args.format,
        lenient: args.lenient,
        limit: args.limit,
        block_tokens: args.block_tokens,
        tenant: args.tenant,
        layers: LAYERS,
    })?;
    let stop = stop_on_signal();
    let (measured, shape) = if args.connect.cluster.is_empty() {
        on_own_cluster(args, &workload, &stop).await?
    } else {
        let connection = Connection::open(&args.connect)?;
        let measured = drive(args, &workload, (connection.routers, connection.identity), None, &stop).await?;
        (measured, None)
    };
    let subject = subject(args, &workload, shape.as_ref());
    let report = Report::new(subject, &measured);
    let files = match &args.report {
        Some(directory) => report::write(directory, &report, &measured)?,
        None => vec![],
    };
    Ok(Outcome { report, files })
}

/// What only makes sense together.
fn check(args: &ReplayArgs) -> anyhow::Result<()> {
    let foreign = !args.connect.cluster.is_empty();
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
    Ok(())
}

/// A token that is cancelled at the first SIGINT or SIGTERM; a second one ends the process at once, and
/// the children with it.
fn stop_on_signal() -> CancellationToken {
    let stop = CancellationToken::new();
    let token = stop.clone();
    tokio::spawn(async move {
        if stop_requested(false).await.is_ok() {
            token.cancel();
            eprintln!("stopping: the report covers what has ended (again to stop at once)");
        }
        if stop_requested(false).await.is_ok() {
            std::process::exit(130);
        }
    });
    stop
}

async fn on_own_cluster(
    args: &ReplayArgs,
    workload: &Workload,
    stop: &CancellationToken,
) -> anyhow::Result<(Measured, Option<Shape>)> {
    let shape = shape(args, workload)?;
    let mut cluster = tokio::select! {
        cluster = Cluster::start(shape.clone()) => cluster?,
        () = stop.cancelled() => return Ok((Measured { interrupted: true, ..Measured::default() }, Some(shape))),
    };
    let target = (cluster.router_addresses(), cluster.identity()?);
    let measured = drive(args, workload, target, Some(&mut cluster), stop).await;
    let crashed = cluster.crashed();
    cluster.stop().await;
    let mut measured = measured?;
    for child in crashed {
        measured.errors.insert(child, 1);
    }
    Ok((measured, Some(shape)))
}

async fn drive(
    args: &ReplayArgs,
    workload: &Workload,
    (routers, identity): (Vec<String>, Identity),
    cluster: Option<&mut Cluster>,
    stop: &CancellationToken,
) -> anyhow::Result<Measured> {
    let watch = Arc::new(Watch::default());
    let server = Server {
        client: client(&routers, &identity)?,
        identity,
        digest: manifest(workload.block_tokens, LAYERS).digest(),
        tenant: TenantId(args.tenant),
        block_tokens: workload.block_tokens,
        profile: HardwareProfile::by_name(&args.shape.profile).unwrap_or_default(),
        watch: Arc::clone(&watch),
        instances: parking_lot::Mutex::default(),
    };
    let drive = Drive {
        requests: &Arc::new(workload.requests.clone()),
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
    let bounded = args.connect.cluster.is_empty() && dram(args) != Capacity::Unbounded;
    args.sequential || (bounded && !args.no_sequential)
}

fn concurrency(args: &ReplayArgs) -> usize {
    if is_sequential(args) { 1 } else { usize::from(args.concurrency) }
}

/// Unbounded unless said otherwise; with only an SSD size given, DRAM is still unbounded.
fn dram(args: &ReplayArgs) -> Capacity {
    args.shape.dram.unwrap_or(Capacity::Unbounded)
}

fn capacity(args: &ReplayArgs, workload: &Workload) -> anyhow::Result<NodeCapacity> {
    let blocks = |capacity: Capacity| {
        let spare = if capacity == Capacity::Unbounded { UNBOUNDED_SPARE_BLOCKS } else { 0 };
        spare + capacity.blocks_per_node(workload.unique_blocks, args.shape.nodes, args.shape.block_bytes)
    };
    let capacity = NodeCapacity {
        dram_blocks: blocks(dram(args)),
        ssd_blocks: blocks(args.shape.ssd.unwrap_or(Capacity::None)),
    };
    if capacity.dram_blocks == 0 {
        anyhow::bail!("--dram {} leaves no room for one block per node: give more", dram(args));
    }
    Ok(capacity)
}

fn shape(args: &ReplayArgs, workload: &Workload) -> anyhow::Result<Shape> {
    let watermarks = args.shape.watermarks.map_or((1.0, 1.0), |marks| (marks.high, marks.low));
    Ok(Shape {
        block_tokens: workload.block_tokens,
        layers: LAYERS,
        capacity: capacity(args, workload)?,
        watermarks: Some(watermarks),
        fetch_floor_ms: args.fetch_floor_ms,
        seed: args.seed,
        ..Shape::from_args(&args.shape)?
    })
}

fn subject(args: &ReplayArgs, workload: &Workload, shape: Option<&Shape>) -> Subject {
    let texts = |faults: &[Fault]| faults.iter().map(ToString::to_string).collect();
    let capacity = shape.map(|shape| shape.capacity);
    let own = shape.is_some();
    // What a cluster of someone else is made of is not ours to claim.
    let known = |text: String| if own { text } else { String::new() };
    let config = Config {
        trace: args.trace.display().to_string(),
        trace_requests: workload.requests.len() as u64,
        unique_blocks: workload.unique_blocks,
        skipped_lines: workload.skipped_lines,
        block_tokens: workload.block_tokens,
        block_bytes: if own { args.shape.block_bytes } else { 0 },
        routers: if own { args.shape.routers } else { 0 },
        nodes: if own { args.shape.nodes } else { 0 },
        instances: if own { args.shape.instances } else { 0 },
        dram: known(dram(args).to_string()),
        ssd: known(args.shape.ssd.unwrap_or(Capacity::None).to_string()),
        dram_blocks_per_node: capacity.map_or(0, |capacity| capacity.dram_blocks),
        ssd_blocks_per_node: capacity.map_or(0, |capacity| capacity.ssd_blocks),
        policy: known(args.shape.policy.clone()),
        watermarks: known(args.shape.watermarks.map_or("1:1".to_owned(), |marks| marks.to_string())),
        concurrency: concurrency(args) as u64,
        sequential: is_sequential(args),
        speed: args.speed.to_string(),
        tenant: args.tenant,
        kill: texts(&args.kill),
        restart: texts(&args.restart),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    Subject { config, seed: args.seed, profile: args.shape.profile.clone() }
}
