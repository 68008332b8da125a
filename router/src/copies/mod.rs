//! Copies between nodes that this router orders: for draining nodes and hot prefixes.
//!
//! Ephemeral state: a restarted router knows of draining nodes only after their next report. Not
//! here: the destination of a run (`crate::server::evacuate`), and the copy itself
//! (`kvfleet-node`).

pub(crate) mod draining;
pub(crate) mod hot;

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{Epoch, IdentityDigest, NodeId};
use kv_core::index::Index;
use kv_core::place::copies::{BlockRun, CopyOutcome};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tonic::Request;
use tonic::transport::Channel;

use crate::metrics::Metrics;
use crate::raft::network::Peers;

/// Concurrent copies of this router over all nodes: each holds a call open while it runs.
pub(crate) const COPIES_MAX: usize = 64;

/// Time for a node's answer beyond the copy's own limit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Cached connections to nodes.
const CHANNELS_MAX: usize = 1_024;

/// One copy: its blocks, source, target and limits.
#[derive(Clone, Debug)]
pub(crate) struct CopyOrder {
    pub(crate) run: BlockRun,
    pub(crate) source: NodeId,
    pub(crate) source_epoch: Epoch,
    pub(crate) source_address: String,
    pub(crate) target: NodeId,
    pub(crate) target_address: String,
    pub(crate) identity: IdentityDigest,
    pub(crate) bytes_max: u64,
    pub(crate) time_limit: Duration,
}

impl CopyOrder {
    /// Builds the order under the weights in force. `None` if a node is unknown or none has joined
    /// yet.
    pub(crate) fn new(
        control: &Index,
        run: BlockRun,
        source: NodeId,
        source_epoch: Epoch,
        target: NodeId,
        bytes_max: u64,
        within: Duration,
    ) -> Option<CopyOrder> {
        Some(CopyOrder {
            run,
            source,
            source_epoch,
            source_address: control.node(source)?.record.data_address.clone(),
            target,
            target_address: control.node(target)?.record.control_address.clone(),
            identity: control.identity()?.with_generation(control.generation()),
            bytes_max,
            time_limit: within,
        })
    }
}

/// Result of a copy; `blocks` counts from the start of the run.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyResult {
    pub(crate) end: Option<CopyOutcome>,
    pub(crate) blocks: usize,
    pub(crate) stored_bytes: u64,
    pub(crate) visible_at: Option<pb::AnnouncePosition>,
}

/// Sends copy orders to nodes.
pub(crate) struct CopyDispatcher {
    peers: Peers,
    metrics: Metrics,
    channels: Mutex<BTreeMap<String, Channel>>,
    in_flight: Semaphore,
    pub(crate) draining: Mutex<draining::DrainingNodes>,
}

impl CopyDispatcher {
    pub(crate) fn new(peers: Peers, metrics: Metrics) -> CopyDispatcher {
        let in_flight = Semaphore::new(COPIES_MAX);
        CopyDispatcher { peers, metrics, channels: Mutex::default(), in_flight, draining: Mutex::default() }
    }

    /// Copies that may start now.
    pub(crate) fn available_slots(&self) -> usize {
        self.in_flight.available_permits()
    }

    /// Orders a copy and waits for its result. Dropping the future cancels the copy.
    pub(crate) async fn copy(&self, order: &CopyOrder) -> CopyResult {
        let result = match self.in_flight.try_acquire() {
            Ok(_place) => self.send(order).await,
            Err(_) => CopyResult { end: Some(CopyOutcome::Queue), ..CopyResult::default() },
        };
        if let Some(end) = result.end {
            self.metrics.record_copy(end, result.stored_bytes);
            tracing::debug!(
                from = %order.source, to = %order.target, end = end.name(), blocks = result.blocks, "a copy ended"
            );
        }
        result
    }

    async fn send(&self, order: &CopyOrder) -> CopyResult {
        let lost = CopyResult { end: Some(CopyOutcome::TargetLost), ..CopyResult::default() };
        let Some(channel) = self.channel(&order.target_address) else { return lost };
        let request = pb::CopyBlocksRequest {
            run: Some(convert::run_to_pb(&order.run)),
            source: order.source.0,
            source_epoch: order.source_epoch.0,
            source_address: order.source_address.clone(),
            identity: order.identity.0.to_vec(),
            bytes_max: order.bytes_max,
            within_ms: u64::try_from(order.time_limit.as_millis()).unwrap_or(u64::MAX),
        };
        let mut node = NodeControlClient::new(channel);
        // The request's own timeout does not cover connecting.
        let answered =
            tokio::time::timeout(order.time_limit + ANSWER_TIMEOUT, node.copy_blocks(Request::new(request)))
                .await;
        match answered {
            Ok(Ok(reply)) => {
                let reply = reply.into_inner();
                let blocks = (reply.stored_blocks as usize).saturating_add(reply.present_blocks as usize);
                CopyResult {
                    // A later release may have more end codes.
                    end: Some(CopyOutcome::from_number(reply.end).unwrap_or(CopyOutcome::TargetLost)),
                    blocks: blocks.min(order.run.hashes.len()),
                    stored_bytes: reply.stored_bytes,
                    visible_at: reply.visible_at,
                }
            }
            // The node drains or stops, or its release does not copy.
            Ok(Err(status)) => {
                tracing::debug!(node = %order.target, %status, "a node rejected a copy");
                lost
            }
            Err(_) => lost,
        }
    }

    fn channel(&self, address: &str) -> Option<Channel> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(address) {
            return Some(channel.clone());
        }
        let channel = self.peers.node_channel(address).ok()?;
        if channels.len() >= CHANNELS_MAX {
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        Some(channel)
    }
}
