//! The node that is started, and its configuration.
//!
//! Not here: the measurements (the parent module).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use kv_core::id::{BlockHash, Category, LeaseId, RequestId, TenantId};
use kvfleet_net::tls::Role;
use kvfleet_node::{Node, NodeConfig};
use kvfleet_transport::{BlockService, FetchAnswer, FetchRequest, Progress, RequestContext};
use tokio::runtime::{Builder, Runtime};

use crate::get::certificates;

/// Payload of a block, so that its record is a page.
pub(super) const BLOCK_BYTES: u64 = 3 << 10;

/// The node's configuration for its blocks.
pub(super) fn config(dir: &Path, blocks: u64) -> NodeConfig {
    let mut config = NodeConfig {
        dram_blocks: Some(1024),
        ssd_blocks: Some(blocks),
        block_bytes: BLOCK_BYTES,
        data_dir: dir.join("data"),
        // Every block stays: no moves during the measurement.
        watermark_high: 1.0,
        watermark_low: 1.0,
        scrub_bytes_per_second: 0,
        ..NodeConfig::default()
    };
    config.identity.layers = 1;
    config
}

/// The hash of a block by its number, uniform in both halves, as real hashes are.
pub(super) fn hash(number: u64) -> BlockHash {
    let low = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    BlockHash::from_words(low.rotate_left(29).wrapping_mul(0xD6E8_FEB8_6659_FD93), low)
}

/// A node that was started on existing blocks.
pub(super) struct StartedNode {
    runtime: Runtime,
    node: Node,
    blocks: Arc<dyn BlockService>,
    registry: prometheus::Registry,
    config: NodeConfig,
}

impl StartedNode {
    /// Starts the node.
    pub(super) fn start(dir: &Path, blocks: u64) -> anyhow::Result<StartedNode> {
        let mut config = config(dir, blocks);
        config.tls = certificates(dir, &Role::Node(None))?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let registry = prometheus::Registry::new();
        let node = runtime.block_on(Node::start(config.clone(), &registry))?;
        let blocks = node.blocks();
        Ok(StartedNode { runtime, node, blocks, registry, config })
    }

    /// Whether the node serves a block.
    pub(super) fn has(&mut self, number: u64) -> anyhow::Result<bool> {
        let asker = RequestContext {
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
        let request =
            FetchRequest { context: asker, epoch, first_offset_blocks: 0, hashes, deadline, progress };
        self.runtime.block_on(async {
            let mut reply = self.blocks.fetch(request).await;
            if !matches!(reply.answer, FetchAnswer::Hit { .. }) {
                return Ok(false);
            }
            let frame = reply.frames.next().await.context("a promised block is missing")?;
            ensure!(frame.bytes.len() == self.config.frame_bytes_max(), "wrong block length");
            self.blocks.release(LeaseId(1)).await;
            Ok(true)
        })
    }

    /// Number of SSD blocks in the node's metrics.
    pub(super) fn count(&mut self) -> anyhow::Result<u64> {
        // The metrics refresh at least once a second.
        self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(1_500)).await });
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "kvfleet_node_blocks");
        let metrics = family.context("no kvfleet_node_blocks metric")?.get_metric();
        let is_ssd = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value().eq_ignore_ascii_case("ssd"))
        };
        let metric = metrics.iter().find(is_ssd).context("no SSD tier in the metric")?;
        Ok(metric.get_gauge().get_value() as u64)
    }

    /// Stops the node.
    pub(super) fn close(self) {
        self.runtime.block_on(self.node.shutdown());
    }
}
