//! A node in a process of its own over its network path, as its peers are in theirs: what is fetched is leased, comes from its DRAM
//! tier and is verified; beside the same path in front of blocks that lie ready in one process.
//!
//! Not here: peers (`benches/peers/host`), and paths without a node (the parent module).

use std::sync::Arc;

use anyhow::ensure;
use benches::{Better, Row, Spent, outcome, spend};
use kv_core::id::Epoch;
use kvfleet_proto::tls::{Identity, TlsFiles};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{Dialer, FetchAnswer, FetchRequest, Path, Progress};
use tokio::runtime::Runtime;

use super::{BoxFuture, Ours, PATIENCE, RATES, RUN_BYTES, SHAPES, Shape, Side, TLS, share};
use crate::Effort;
use crate::serving::{SIZES, Serving, Size, asker, identity};

/// Which shapes: those that peers have.
const PEER_SHAPES: [&str; 3] =
    ["GET 64 KiB, 1 in flight", "GET 1 MiB, 1 in flight", "GET 64 KiB, 64 in flight"];

/// Fetches by many tasks, each under a lease of its own.
struct OfNode {
    path: Arc<dyn Path>,
    size: Size,
    in_flight: u64,
}

impl Side for OfNode {
    fn fetch(&self, at: u64) -> BoxFuture<'_, anyhow::Result<()>> {
        Box::pin(async move {
            let hash = self.size.hash((at % u64::from(self.size.blocks)) as u32);
            let request = FetchRequest {
                asker: asker(1 + at % self.in_flight),
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
    identities: &(Identity, Identity),
) -> anyhow::Result<Vec<Row>> {
    let name = |shape: &Shape| format!("{}, {TLS}, of a node", shape.name);
    let wanted =
        SHAPES.iter().filter(|shape| PEER_SHAPES.contains(&shape.name) && effort.wants(&name(shape)));
    let wanted: Vec<&Shape> = wanted.collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let dir = tempfile::tempdir()?;
    let serving = Serving::start(dir.path())?;
    let [ca, cert, key] = ["ca.pem", "cert.pem", "key.pem"].map(|file| dir.path().join(file));
    let own = TlsFiles { ca, cert, key }.load()?;
    let dialer = TcpDialer::new(&own, TcpConfig::default());
    let mut rows = Vec::new();
    for shape in wanted {
        let path = runtime.block_on(dialer.dial(serving.address.clone()))?;
        let Some(size) = SIZES.into_iter().find(|size| size.payload_bytes == shape.block_bytes) else {
            continue;
        };
        let in_flight = shape.in_flight as u64;
        let of_node: Arc<dyn Side> = Arc::new(OfNode { path, size, in_flight });
        let ready: Arc<dyn Side> =
            Arc::new(runtime.block_on(Ours::start_tls(&identities.0, &identities.1, shape))?);
        rows.extend(compare(effort, runtime, &serving, (shape, &name(shape)), [&of_node, &ready])?);
    }
    serving.stop()?;
    Ok(rows)
}

fn compare(
    effort: &Effort,
    runtime: &Runtime,
    serving: &Serving,
    (shape, name): (&Shape, &str),
    [of_node, ready]: [&Arc<dyn Side>; 2],
) -> anyhow::Result<Vec<Row>> {
    let (bytes, at_once) = (shape.fetch_bytes(), shape.in_flight as u64);
    let fetches = effort.scaled(RUN_BYTES).div_ceil(bytes * at_once) * at_once;
    let timed = |side: &Arc<dyn Side>| -> anyhow::Result<Spent> {
        let before = serving.cpu_time()?;
        let (done, mut spent) = spend(|| runtime.block_on(share(side, fetches, shape.in_flight)));
        done?;
        // Both ends count; the node's process does nothing in the other side's turn.
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
        // The first finds no cache warm and no window open.
        if run > 0 {
            runs.push(pair);
        }
    }
    let rows = RATES.map(|(unit, rate)| {
        let of = |spent: &Spent| rate(spent, fetches * bytes);
        let pairs: Vec<_> = runs.iter().map(|(ours, theirs)| (of(ours), of(theirs))).collect();
        let peer = "the same path without a node, in one process";
        Row::new("network", name, unit, peer, Better::Higher, outcome(&pairs))
    });
    Ok(rows.into())
}
