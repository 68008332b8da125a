//! Sends prefetch windows to nodes several times a second, with one call per node.
//!
//! A node that does not answer delays no other node, and gets the newest window as soon as it does.
//! Not here: the contents of a window (`mod.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::HASH_BYTES;
use kv_core::id::{NodeId, Timestamp};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::transport::Channel;

use super::{QueuedRequests, WindowEntry};
use crate::clock::Clock;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::raft::network::Peers;

/// Interval between two checks of the queue; a prefetch takes a node longer than that.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(100);

/// Time after which an unchanged window is sent again: nodes forget it after two seconds.
const REPEAT_AFTER: Duration = Duration::from_secs(1);

/// Timeout of a node's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Task that publishes the windows.
pub(crate) struct WindowPublisher {
    pub(crate) router: u64,
    pub(crate) queued: Arc<Mutex<QueuedRequests>>,
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    pub(crate) clock: Clock,
    pub(crate) metrics: Metrics,
}

/// Last window sent to one node.
struct SentWindow {
    at: Option<Instant>,
    version: u64,
    is_empty: bool,
    /// Control address of the node; the channel is kept while it stays the same.
    address: String,
    channel: Channel,
    call: Arc<Mutex<CallState>>,
}

/// State of the last call to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CallState {
    #[default]
    Answered,
    Pending,
    Failed,
}

impl WindowPublisher {
    /// Runs until cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut tick = tokio::time::interval(PUBLISH_INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut sent: BTreeMap<NodeId, SentWindow> = BTreeMap::new();
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            if sent.is_empty() && self.queued.lock().is_empty() {
                continue;
            }
            self.publish(&mut sent);
        }
    }

    fn publish(&self, sent: &mut BTreeMap<NodeId, SentWindow>) {
        let now = self.clock.now();
        let (mut windows, version) = self.queued.lock().windows(now);
        // A node without reads gets one empty window and is then forgotten.
        sent.retain(|node, told| windows.contains_key(node) || !told.is_empty);
        for node in sent.keys() {
            windows.entry(*node).or_default();
        }
        let addresses = self.addresses();
        for (node, window) in windows {
            let Some(address) = addresses.get(&node) else {
                sent.remove(&node);
                continue;
            };
            let Some(told) = self.sent_window(sent, node, address) else { continue };
            let call = *told.call.lock();
            let is_old = told.at.is_none_or(|at| at.elapsed() >= REPEAT_AFTER);
            let is_news = told.version != version || call == CallState::Failed || is_old;
            if !is_news || call == CallState::Pending {
                continue;
            }
            (told.at, told.version, told.is_empty) = (Some(Instant::now()), version, window.is_empty());
            self.send(told, to_request(self.router, &window, now));
        }
    }

    /// The node's last window, with a channel to its current address.
    fn sent_window<'a>(
        &self,
        sent: &'a mut BTreeMap<NodeId, SentWindow>,
        node: NodeId,
        address: &str,
    ) -> Option<&'a mut SentWindow> {
        if sent.get(&node).is_none_or(|known| known.address != address) {
            let channel = self.peers.node_channel(address).ok()?;
            let (address, call) = (address.to_owned(), Arc::default());
            sent.insert(node, SentWindow { at: None, version: 0, is_empty: true, address, channel, call });
        }
        sent.get_mut(&node)
    }

    /// Control addresses of live nodes.
    fn addresses(&self) -> BTreeMap<NodeId, String> {
        let control = self.groups.control().published.read();
        let live = control.index.nodes().filter(|state| state.live);
        live.map(|state| (state.record.node, state.record.control_address.clone())).collect()
    }

    fn send(&self, sent: &SentWindow, window: pb::SetWindowRequest) {
        let (channel, call, metrics) = (sent.channel.clone(), Arc::clone(&sent.call), self.metrics.clone());
        *call.lock() = CallState::Pending;
        let blocks: usize = window.waiting.iter().map(|one| one.blocks.len() / HASH_BYTES).sum();
        tokio::spawn(async move {
            let mut request = Request::new(window);
            request.set_timeout(ANSWER_TIMEOUT);
            let mut node = NodeControlClient::new(channel);
            let asked = node.set_window(request);
            // The request's own timeout does not cover connecting.
            let answered =
                tokio::time::timeout(ANSWER_TIMEOUT, asked).await.is_ok_and(|answer| answer.is_ok());
            metrics.record_window(answered, blocks);
            *call.lock() = if answered { CallState::Answered } else { CallState::Failed };
        });
    }
}

fn to_request(router: u64, window: &[WindowEntry], now: Timestamp) -> pb::SetWindowRequest {
    let request = |entry: &WindowEntry| pb::WaitingRequest {
        blocks: convert::hashes_to_bytes(&entry.blocks),
        starts_after_ms: u64::try_from(entry.starts.since(now).as_millis()).unwrap_or(u64::MAX),
    };
    pb::SetWindowRequest { router, waiting: window.iter().map(request).collect() }
}
