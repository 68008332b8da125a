//! A node's memory under load: the bytes in flight by its own metric, beside its limit, with many
//! more requested at once.
//!
//! Not here: a client's memory (`overlap.rs`, `prefill.rs`), and a process's total memory
//! (`overload.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use benches::{BenchRow, Better, outcome};
use kv_core::id::Epoch;
use kvfleet_net::tls::{Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{Dialer, FetchAnswer, FetchRequest, Path, Progress};
use prometheus::Registry;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::PATIENCE;
use crate::Effort;
use crate::get::certificates;
use crate::node_process::{SIZES, SizeClass, asker, identity, save};

const NAME: &str = "peak bytes in flight at a node, 64 fetches of 4 x 4 MiB at once";

/// The node's limit. A fetch of this bench takes a quarter of each class's share: every class gets
/// at least half of the limit.
const BOUND_BYTES: u64 = 128 << 20;

const AT_ONCE: u64 = 64;
const BLOCKS: u32 = 4;

/// Sampling interval of the metric.
const SAMPLE_INTERVAL: Duration = Duration::from_micros(200);

/// The row, if selected.
pub(super) fn rows(effort: &Effort, runtime: &Runtime) -> anyhow::Result<Option<BenchRow>> {
    if !effort.is_selected(NAME) {
        return Ok(None);
    }
    let dir = tempfile::tempdir()?;
    let size = SIZES[2];
    let mut config = NodeConfig {
        dram_bytes: 256 << 20,
        block_bytes: size.payload_bytes.into(),
        fetch_inflight_bytes: BOUND_BYTES,
        data_dir: dir.path().join("data"),
        tls: certificates(dir.path(), &Role::Node(None))?,
        ..NodeConfig::default()
    };
    config.identity.layers = crate::node_process::LAYERS;
    let files = certificates(dir.path(), &Role::Instance(None))?;
    let tls = TlsFiles { ca: files.ca, cert: files.cert, key: files.key }.load()?;
    let dialer = TcpDialer::new(&tls, TcpConfig::default());
    let mut pairs = Vec::new();
    for _ in 0..effort.runs {
        // A new node each time: its first fetches have no measured frame size yet.
        let (config, registry) = (config.clone(), Registry::new());
        let node = runtime.block_on(Node::start(config, &registry))?;
        for number in 0..BLOCKS {
            runtime.block_on(save(&*node.blocks(), size, number))?;
        }
        let path = runtime.block_on(dialer.dial(node.data_addr().to_string()))?;
        let most = peak_in_flight(&registry, || runtime.block_on(fetch_all(&path, size)))?;
        runtime.block_on(node.shutdown());
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        pairs.push((mib(most), mib(BOUND_BYTES as f64)));
    }
    Ok(Some(BenchRow::new("network", NAME, "MiB", "limit 1: its bound", Better::Lower, outcome(&pairs))))
}

/// The maximum of the metric during `load`.
fn peak_in_flight(registry: &Registry, load: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut most = 0.0_f64;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(in_flight_bytes(registry));
                std::thread::sleep(SAMPLE_INTERVAL);
            }
            most
        });
        let done = load();
        is_over.store(true, Ordering::Relaxed);
        let most = watching.join().ok().context("the sampling thread panicked")?;
        done?;
        ensure!(most > 0.0, "no bytes were in flight");
        Ok(most)
    })
}

fn in_flight_bytes(registry: &Registry) -> f64 {
    let families = registry.gather();
    let of = families.iter().filter(|family| family.name() == "kvfleet_node_class_in_flight_bytes");
    of.flat_map(|family| family.get_metric()).map(|metric| metric.get_gauge().get_value()).sum()
}

/// Runs all fetches concurrently; busy answers are retried.
async fn fetch_all(path: &Arc<dyn Path>, size: SizeClass) -> anyhow::Result<()> {
    let mut tasks = JoinSet::new();
    for number in 0..AT_ONCE {
        let path = Arc::clone(path);
        tasks.spawn(async move {
            loop {
                let request = FetchRequest {
                    context: asker(1 + number),
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
