//! What nodes report and what they are told: announcements, heartbeats, statistics and directives.
//!
//! Not here: the streams that carry it (`announce.rs`) and joins (`admin.rs`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Timestamp};
use kvfleet_proto::pb;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::anti_entropy::AntiEntropy;
use crate::fleet_reuse_stats::FleetReuseStats;
use crate::ingest::Ingest;
use crate::liveness::SilenceTracker;

/// The receivers of reports from nodes, and the directives for them.
pub(crate) struct NodeIntake {
    silence: Arc<Mutex<SilenceTracker>>,
    /// One per shard; the first belongs to shard 1.
    ingests: Vec<Ingest>,
    anti_entropy: Arc<AntiEntropy>,
    /// Directives that every node must respect, newest version.
    directives: watch::Receiver<Arc<pb::Directives>>,
    reuse_stats: FleetReuseStats,
}

impl NodeIntake {
    pub(crate) fn new(
        silence: Arc<Mutex<SilenceTracker>>,
        ingests: Vec<Ingest>,
        anti_entropy: Arc<AntiEntropy>,
        directives: watch::Receiver<Arc<pb::Directives>>,
        reuse_stats: FleetReuseStats,
    ) -> NodeIntake {
        NodeIntake { silence, ingests, anti_entropy, directives, reuse_stats }
    }

    /// Records a message of a node under `epoch`.
    pub(super) fn record_heard(&self, node: NodeId, epoch: Epoch, now: Timestamp) {
        self.silence.lock().record_heard(node, epoch, now);
    }

    /// Time since the node's last message under `epoch`.
    pub(super) fn silence_of(&self, node: NodeId, epoch: Epoch, now: Timestamp) -> Option<Duration> {
        self.silence.lock().silence_of(node, epoch, now)
    }

    /// Queue of a shard's announcements; `None` for the control group, which takes none.
    pub(super) fn ingest(&self, group: u16) -> Option<&Ingest> {
        self.ingests.get(usize::from(group.checked_sub(1)?))
    }

    /// The comparison of what nodes have with what the index lists.
    pub(super) fn anti_entropy(&self) -> &AntiEntropy {
        &self.anti_entropy
    }

    /// Directives that every node must respect, newest version.
    pub(super) fn directives(&self) -> &watch::Receiver<Arc<pb::Directives>> {
        &self.directives
    }

    /// Reuse statistics of nodes and of the fleet.
    pub(super) fn reuse_stats(&self) -> &FleetReuseStats {
        &self.reuse_stats
    }
}
