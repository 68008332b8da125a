//! Small standing jobs of a router: nodes into the fleet view, numbers into metrics, a snapshot when the log
//! grows large.
//!
//! Not here: liveness and ingest, which decide something.

use std::sync::Arc;
use std::time::Duration;

use kv_core::schedule::LiveNode;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::raft::handle::Consensus;
use crate::view::fleet::FleetView;
use crate::view::published::Published;

/// How often the block counts of nodes (the ring's load) and the gauges are taken anew.
const REFRESH_EVERY: Duration = Duration::from_millis(250);

/// Bytes of log in memory that call for a snapshot before the entry count does: entries can be a
/// megabyte each, and the whole log since the last purge is in memory.
const LOG_BYTES_MAX: u64 = 256 << 20;

/// Weight of a node in the ring; all alike until nodes announce a size.
const NODE_WEIGHT: u32 = 1;

/// What the jobs work on.
pub(crate) struct Background {
    pub(crate) published: Arc<Published>,
    pub(crate) fleet: Arc<FleetView>,
    pub(crate) consensus: Consensus,
    pub(crate) metrics: Metrics,
    pub(crate) log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
}

impl Background {
    /// Runs until cancelled: at every change of membership at once, otherwise regularly.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut rules = self.published.rules_changes();
        let mut tick = tokio::time::interval(REFRESH_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !stop.is_cancelled() {
            self.refresh_nodes();
            tokio::select! {
                _ = rules.changed() => {}
                _ = tick.tick() => self.regularly().await,
                () = stop.cancelled() => return,
            }
        }
    }

    /// Brings the live nodes of the index into the fleet.
    pub(crate) fn refresh_nodes(&self) {
        let replica = self.published.read();
        let live = replica.index.nodes().filter(|state| state.live).map(|state| LiveNode {
            node: state.record.node,
            epoch: state.epoch,
            weight: NODE_WEIGHT,
            blocks: state.blocks,
            link: None,
        });
        self.fleet.set_nodes(live.collect());
    }

    async fn regularly(&self) {
        let (applied_index, copies) = {
            let replica = self.published.read();
            let live = replica.index.nodes().filter(|state| state.live);
            (replica.applied_index(), live.map(|state| state.blocks).sum())
        };
        let standing = self.consensus.standing();
        self.metrics.standing(applied_index, standing.term, self.consensus.is_leader());
        let log_bytes = (self.log_bytes)();
        self.metrics.sizes(log_bytes, copies);
        if log_bytes > LOG_BYTES_MAX && standing.snapshot_index < applied_index {
            self.consensus.snapshot_now().await;
        }
    }
}
