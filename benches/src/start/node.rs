//! The node that is started, and its configuration.
//!
//! Not here: what is timed (the parent module).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use kv_core::id::{BlockHash, Category, LeaseId, RequestId, TenantId};
use kvfleet_node::{Node, NodeConfig};
use kvfleet_transport::{Asker, BlockService, FetchAnswer, FetchRequest, Progress};
use tokio::runtime::{Builder, Runtime};

use crate::get::certificates;

/// Payload of a block, so that its record is a page.
pub(super) const BLOCK_BYTES: u64 = 3 << 10;

/// The node's configuration, as far as its blocks are concerned.
pub(super) fn config(dir: &Path, blocks: u64) -> NodeConfig {
    let mut config = NodeConfig {
        dram_blocks: Some(1024),
        ssd_blocks: Some(blocks),
        block_bytes: BLOCK_BYTES,
        data_dir: dir.join("data"),
        // All of them stay: nothing is moved while the clock runs.
        watermark_high: 1.0,
        watermark_low: 1.0,
        scrub_bytes_per_second: 0,
        ..NodeConfig::default()
    };
    config.identity.layers = 1;
    config
}

/// The hash of a block by its number, uniform in both halves, as real ones are.
pub(super) fn hash(number: u64) -> BlockHash {
    let low = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&low.rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93).to_le_bytes());
    hash[8..].copy_from_slice(&low.to_le_bytes());
    BlockHash(hash)
}

/// A node that was started on blocks.
pub(super) struct Served {
    runtime: Runtime,
    node: Node,
    blocks: Arc<dyn BlockService>,
    registry: prometheus::Registry,
    config: NodeConfig,
}

impl Served {
    /// Starts it.
    pub(super) fn start(dir: &Path, blocks: u64) -> anyhow::Result<Served> {
        let mut config = config(dir, blocks);
        config.tls = certificates(dir)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let registry = prometheus::Registry::new();
        let node = runtime.block_on(Node::start(config.clone(), &registry))?;
        let blocks = node.blocks();
        Ok(Served { runtime, node, blocks, registry, config })
    }

    /// Whether a block is handed out.
    pub(super) fn has(&mut self, number: u64) -> anyhow::Result<bool> {
        let asker = Asker {
            request: RequestId(number),
            lease: LeaseId(1),
            tenant: TenantId(0),
            identity: self.config.identity.manifest().digest(),
            category: Category::default(),
            traceparent: String::new(),
            class: None,
        };
        let (epoch, deadline, hashes) = (Default::default(), Duration::from_secs(10), vec![hash(number)]);
        let progress = Progress::default();
        let request = FetchRequest { asker, epoch, first_offset_blocks: 0, hashes, deadline, progress };
        self.runtime.block_on(async {
            let mut reply = self.blocks.fetch(request).await;
            if !matches!(reply.answer, FetchAnswer::Hit { .. }) {
                return Ok(false);
            }
            let frame = reply.frames.next().await.context("a block that was promised does not come")?;
            ensure!(frame.bytes.len() == self.config.frame_bytes_max(), "a block of another length");
            self.blocks.release(LeaseId(1)).await;
            Ok(true)
        })
    }

    /// Blocks that the node has on its SSD, as its metrics say.
    pub(super) fn count(&mut self) -> anyhow::Result<u64> {
        // Numbers are brought up to date once a second at least.
        self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(1_500)).await });
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "kvfleet_node_blocks");
        let metrics = family.context("no such metric")?.get_metric();
        let is_ssd = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value().eq_ignore_ascii_case("ssd"))
        };
        let metric = metrics.iter().find(is_ssd).context("no such tier")?;
        Ok(metric.get_gauge().get_value() as u64)
    }

    /// Stops the node.
    pub(super) fn close(self) {
        self.runtime.block_on(self.node.shutdown());
    }
}
