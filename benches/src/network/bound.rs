//! Memory under load: what a node keeps for fetches under way, by its own account, beside its bound, while far more is asked for at once.
//!
//! Not here: what a client keeps (`overlap.rs`, `prefill.rs`), and all memory of a process (`overload.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use benches::{Better, Row, outcome};
use kv_core::id::Epoch;
use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::tls::TlsFiles;
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{Dialer, FetchAnswer, FetchRequest, Path, Progress};
use prometheus::Registry;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::PATIENCE;
use crate::Effort;
use crate::get::certificates;
use crate::serving::{SIZES, Size, asker, identity, save};

const NAME: &str = "bytes under way at a node, 64 fetches of 4 x 4 MiB at once, at most";

/// Of which a fetch of the bench takes a quarter: a node grants half of its bound to each class at least.
const BOUND_BYTES: u64 = 128 << 20;

const AT_ONCE: u64 = 64;
const BLOCKS: u32 = 4;

/// How often the account is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// The row, if it is wanted.
pub(super) fn rows(effort: &Effort, runtime: &Runtime) -> anyhow::Result<Option<Row>> {
    if !effort.wants(NAME) {
        return Ok(None);
    }
    let dir = tempfile::tempdir()?;
    let size = SIZES[2];
    let mut config = NodeConfig {
        dram_bytes: 256 << 20,
        block_bytes: size.payload_bytes.into(),
        fetch_inflight_bytes: BOUND_BYTES,
        data_dir: dir.path().join("data"),
        tls: certificates(dir.path())?,
        ..NodeConfig::default()
    };
    config.identity.layers = crate::serving::LAYERS;
    let files = config.tls.clone();
    let tls = TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?;
    let dialer = TcpDialer::new(&tls, TcpConfig::default());
    let mut pairs = Vec::new();
    for _ in 0..effort.runs {
        // A node that has sent nothing yet: its first fetches are those that find no measure of a frame.
        let (config, registry) = (config.clone(), Registry::new());
        let node = runtime.block_on(Node::start(config, &registry))?;
        for number in 0..BLOCKS {
            runtime.block_on(save(&*node.blocks(), size, number))?;
        }
        let path = runtime.block_on(dialer.dial(node.data_addr().to_string()))?;
        let most = watched(&registry, || runtime.block_on(all(&path, size)))?;
        runtime.block_on(node.shutdown());
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        pairs.push((mib(most), mib(BOUND_BYTES as f64)));
    }
    Ok(Some(Row::new("network", NAME, "MiB", "limit 1: its bound", Better::Lower, outcome(&pairs))))
}

/// The most that the account said meanwhile.
fn watched(registry: &Registry, load: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut most = 0.0_f64;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(under_way(registry));
                std::thread::sleep(LOOK_EVERY);
            }
            most
        });
        let done = load();
        is_over.store(true, Ordering::Relaxed);
        let most = watching.join().ok().context("the account cannot be read")?;
        done?;
        ensure!(most > 0.0, "nothing was seen under way");
        Ok(most)
    })
}

fn under_way(registry: &Registry) -> f64 {
    let families = registry.gather();
    let of = families.iter().filter(|family| family.name() == "kvfleet_node_class_under_way_bytes");
    of.flat_map(|family| family.get_metric()).map(|metric| metric.get_gauge().get_value()).sum()
}

/// Many fetches at a time; those that are told to come again do.
async fn all(path: &Arc<dyn Path>, size: Size) -> anyhow::Result<()> {
    let mut tasks = JoinSet::new();
    for number in 0..AT_ONCE {
        let path = Arc::clone(path);
        tasks.spawn(async move {
            loop {
                let request = FetchRequest {
                    asker: asker(1 + number),
                    epoch: Epoch::default(),
                    first_offset_blocks: 0,
                    hashes: (0..BLOCKS).map(|number| size.hash(number)).collect(),
                    deadline: PATIENCE,
                    progress: Progress::default(),
                };
                let mut came = 0;
                let answer = path
                    .fetch(request, &mut |frame| {
                        let hash = frame.hash;
                        came += u32::from(frame.verify(identity(), hash).is_ok());
                    })
                    .await?;
                match answer {
                    FetchAnswer::Busy { retry_after } => tokio::time::sleep(retry_after).await,
                    FetchAnswer::Hit { .. } if came == BLOCKS => return anyhow::Ok(()),
                    other => anyhow::bail!("expected {BLOCKS} blocks, got {came} and {other:?}"),
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}
