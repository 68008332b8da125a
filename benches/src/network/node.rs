//! A node in a separate process over its network path: blocks are leased, come from its DRAM tier
//! and are verified. The peer is the same path in front of blocks in memory, in one process.
//!
//! Not here: other systems (`benches/peers/host`), and paths without a node (the parent module).

use std::sync::Arc;

use anyhow::ensure;
use benches::{BenchRow, Better, TimeSpent, measure_time, outcome};
use kv_core::id::Epoch;
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_node::TlsSection;
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{Dialer, FetchAnswer, FetchRequest, Path, Progress};
use tokio::runtime::Runtime;

use super::{
    BoxFuture, FetchShape, FetchSide, OwnPath, PATIENCE, RATES, RUN_BYTES, SHAPES, TLS, fetch_concurrently,
};
use crate::Effort;
use crate::get::certificates;
use crate::node_process::{NodeProcess, SIZES, SizeClass, asker, identity};

/// Shapes that other systems' benches have too.
const PEER_SHAPES: [&str; 3] =
    ["GET 64 KiB, 1 in flight", "GET 1 MiB, 1 in flight", "GET 64 KiB, 64 in flight"];

/// Fetches by many tasks, each under a separate lease.
struct NodeFetch {
    path: Arc<dyn Path>,
    size: SizeClass,
    in_flight: u64,
}

impl FetchSide for NodeFetch {
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(async move {
            let hash = self.size.hash((at % u64::from(self.size.blocks)) as u32);
            let request = FetchRequest {
                context: asker(1 + at % self.in_flight),
                epoch: Epoch::default(),
                first_offset_blocks: 0,
                hashes: vec![hash],
                deadline: PATIENCE,
                progress: Progress::default(),
            };
            let mut is_verified = false;
            let answer = self
                .path
                .fetch(request, &mut |frame| is_verified = frame.verify(identity(), hash).is_ok())
                .await?;
            ensure!(matches!(answer, FetchAnswer::Hit { .. }), "expected a hit, got {answer:?}");
            ensure!(is_verified, "a block was not verified");
            Ok(())
        })
    }
}

/// Rows of a node beside the same path without one.
pub(super) fn rows(
    effort: &Effort,
    runtime: &Runtime,
    server: &Identity,
    client: &Identity,
) -> anyhow::Result<Vec<BenchRow>> {
    let name = |shape: &FetchShape| format!("{}, {TLS}, of a node", shape.name);
    let wanted =
        SHAPES.iter().filter(|shape| PEER_SHAPES.contains(&shape.name) && effort.is_selected(&name(shape)));
    let wanted: Vec<&FetchShape> = wanted.collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let dir = tempfile::tempdir()?;
    let serving = NodeProcess::start(dir.path())?;
    let TlsSection { ca, cert, key } = certificates(dir.path(), &Role::Instance(None))?;
    let own = TlsFiles { ca, cert, key }.load()?;
    let dialer = TcpDialer::new(&own, TcpConfig::default());
    let mut rows = Vec::new();
    for shape in wanted {
        let path = runtime.block_on(dialer.dial(serving.address.clone()))?;
        let Some(size) = SIZES.into_iter().find(|size| size.payload_bytes == shape.block_bytes) else {
            continue;
        };
        let in_flight = shape.in_flight as u64;
        let of_node: Arc<dyn FetchSide> = Arc::new(NodeFetch { path, size, in_flight });
        let ready: Arc<dyn FetchSide> =
            Arc::new(runtime.block_on(OwnPath::start_tls(server, client, shape))?);
        rows.extend(compare(effort, runtime, &serving, shape, &name(shape), [&of_node, &ready])?);
    }
    serving.stop()?;
    Ok(rows)
}

fn compare(
    effort: &Effort,
    runtime: &Runtime,
    serving: &NodeProcess,
    shape: &FetchShape,
    name: &str,
    [of_node, ready]: [&Arc<dyn FetchSide>; 2],
) -> anyhow::Result<Vec<BenchRow>> {
    let (bytes, at_once) = (shape.fetch_bytes(), shape.in_flight as u64);
    let fetches = effort.scaled(RUN_BYTES).div_ceil(bytes * at_once) * at_once;
    let timed = |side: &Arc<dyn FetchSide>| -> anyhow::Result<TimeSpent> {
        let before = serving.cpu_time()?;
        let (done, mut spent) =
            measure_time(|| runtime.block_on(fetch_concurrently(side, fetches, shape.in_flight)));
        done?;
        // Both ends count; the node's process idles during the other side's turn.
        spent.cpu += serving.cpu_time()?.saturating_sub(before);
        Ok(spent)
    };
    let mut runs = Vec::new();
    for run in 0..=effort.runs {
        let pair = if run % 2 == 0 {
            let first = timed(of_node)?;
            (first, timed(ready)?)
        } else {
            let first = timed(ready)?;
            (timed(of_node)?, first)
        };
        // The first run warms caches and opens windows.
        if run > 0 {
            runs.push(pair);
        }
    }
    let rows = RATES.map(|(unit, rate)| {
        let of = |spent: &TimeSpent| rate(spent, fetches * bytes);
        let pairs: Vec<_> = runs.iter().map(|(ours, theirs)| (of(ours), of(theirs))).collect();
        let peer = "the same path without a node, in one process";
        BenchRow::new("network", name, unit, peer, Better::Higher, outcome(&pairs))
    });
    Ok(rows.into())
}
