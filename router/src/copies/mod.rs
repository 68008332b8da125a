//! Copies between nodes by this router's word: which nodes drain, what is hot, and telling one node to copy from another.
//!
//! Soft state: a router that starts knows of no node that drains before that says so again. Not here: where a run goes
//! (`crate::server::evacuate`), and what a node does with it (`kvfleet-node`).

pub(crate) mod draining;
pub(crate) mod hot;

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{Epoch, IdentityDigest, NodeId};
use kv_core::index::Index;
use kv_core::place::copies::{BlockRun, CopyEnd};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tonic::Request;
use tonic::transport::Channel;

use crate::metrics::Metrics;
use crate::raft::network::Peers;

/// Copies that this router has under way at once, at all nodes together: each is a call that is open for as long as it takes.
pub(crate) const COPIES_MAX: usize = 64;

/// Time for an answer of a node beyond what the copy may take.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// Connections to nodes that are kept.
const CHANNELS_MAX: usize = 1_024;

/// From where to where, and what.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) run: BlockRun,
    pub(crate) source: (NodeId, Epoch),
    pub(crate) source_address: String,
    pub(crate) target: NodeId,
    pub(crate) target_address: String,
    pub(crate) identity: IdentityDigest,
    pub(crate) bytes_max: u64,
    pub(crate) within: Duration,
}

impl Order {
    /// What a node is to copy from another, under the weights in force; nothing while either is not known, or before the first node joined.
    pub(crate) fn new(
        control: &Index,
        run: BlockRun,
        source: (NodeId, Epoch),
        target: NodeId,
        (bytes_max, within): (u64, Duration),
    ) -> Option<Order> {
        Some(Order {
            run,
            source,
            source_address: control.node(source.0)?.record.data_address.clone(),
            target,
            target_address: control.node(target)?.record.control_address.clone(),
            identity: control.identity()?.of_generation(control.generation()),
            bytes_max,
            within,
        })
    }
}

/// What came of it: blocks are the first of the run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copied {
    pub(crate) end: Option<CopyEnd>,
    pub(crate) blocks: usize,
    pub(crate) stored_bytes: u64,
    pub(crate) visible_at: Option<pb::Seen>,
}

/// Tells nodes to copy.
pub(crate) struct Copies {
    peers: Peers,
    metrics: Metrics,
    channels: Mutex<BTreeMap<String, Channel>>,
    under_way: Semaphore,
    pub(crate) draining: Mutex<draining::Draining>,
}

impl Copies {
    pub(crate) fn new(peers: Peers, metrics: Metrics) -> Copies {
        let under_way = Semaphore::new(COPIES_MAX);
        Copies { peers, metrics, channels: Mutex::default(), under_way, draining: Mutex::default() }
    }

    /// How many more may be under way now.
    pub(crate) fn places_left(&self) -> usize {
        self.under_way.available_permits()
    }

    /// Has a run copied and waits for what came of it. Whoever does not wait ends it.
    pub(crate) async fn copy(&self, order: &Order) -> Copied {
        let copied = match self.under_way.try_acquire() {
            Ok(_place) => self.tell(order).await,
            Err(_) => Copied { end: Some(CopyEnd::Queue), ..Copied::default() },
        };
        if let Some(end) = copied.end {
            self.metrics.copied(end, copied.stored_bytes);
            tracing::debug!(
                from = %order.source.0, to = %order.target, end = end.name(), blocks = copied.blocks, "a copy ended"
            );
        }
        copied
    }

    async fn tell(&self, order: &Order) -> Copied {
        let lost = Copied { end: Some(CopyEnd::TargetLost), ..Copied::default() };
        let Some(channel) = self.channel(&order.target_address) else { return lost };
        let request = pb::CopyBlocksRequest {
            run: Some(convert::run_to_pb(&order.run)),
            source: order.source.0.0,
            source_epoch: order.source.1.0,
            source_address: order.source_address.clone(),
            identity: order.identity.0.to_vec(),
            bytes_max: order.bytes_max,
            within_ms: u64::try_from(order.within.as_millis()).unwrap_or(u64::MAX),
        };
        let mut node = NodeControlClient::new(channel);
        // A connection that does not come about has no time of its own.
        let answered =
            tokio::time::timeout(order.within + ANSWER_MAX, node.copy_blocks(Request::new(request))).await;
        match answered {
            Ok(Ok(reply)) => {
                let reply = reply.into_inner();
                let blocks = (reply.stored_blocks as usize).saturating_add(reply.present_blocks as usize);
                Copied {
                    // A later release may know more ends.
                    end: Some(CopyEnd::from_number(reply.end).unwrap_or(CopyEnd::TargetLost)),
                    blocks: blocks.min(order.run.hashes.len()),
                    stored_bytes: reply.stored_bytes,
                    visible_at: reply.visible_at,
                }
            }
            // One that drains or stops, or of a release that copies nothing.
            Ok(Err(status)) => {
                tracing::debug!(node = %order.target, %status, "a node copies nothing");
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
        let channel = self.peers.channel(address).ok()?;
        if channels.len() >= CHANNELS_MAX {
            channels.clear();
        }
        channels.insert(address.to_owned(), channel.clone());
        Some(channel)
    }
}
