//! Tells nodes what waiting requests need: some times a second, each node by itself.
//!
//! A node that does not answer keeps no other waiting, and is told the newest as soon as it does. Not here: what is told (`mod.rs`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{NodeId, Timestamp};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::transport::Channel;

use super::{Waits, Wanted};
use crate::clock::Clock;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::raft::network::Peers;

/// Between two looks at what waits. Prefetching takes a node longer than that.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A window that has not changed is said again: nodes forget it after two seconds.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Time for one answer of a node.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// What the telling is done with.
pub(crate) struct Teller {
    pub(crate) router: u64,
    pub(crate) waits: Arc<Mutex<Waits>>,
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    pub(crate) clock: Clock,
    pub(crate) metrics: Metrics,
}

/// What one node was told.
struct Told {
    at: Option<Instant>,
    version: u64,
    is_empty: bool,
    /// Where it is called, over one connection as long as that stays the same.
    address: String,
    channel: Channel,
    call: Arc<Mutex<Call>>,
}

/// Whether a call is on its way, and whether the one before failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Call {
    #[default]
    Answered,
    Open,
    Failed,
}

impl Teller {
    /// Runs until cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut tick = tokio::time::interval(TELL_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut told: BTreeMap<NodeId, Told> = BTreeMap::new();
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            if told.is_empty() && self.waits.lock().is_empty() {
                continue;
            }
            self.look(&mut told);
        }
    }

    fn look(&self, told: &mut BTreeMap<NodeId, Told>) {
        let now = self.clock.now();
        let (mut windows, version) = self.waits.lock().windows(now);
        // Of whom nothing is wanted any more hears so once, and is forgotten.
        told.retain(|node, told| windows.contains_key(node) || !told.is_empty);
        for node in told.keys() {
            windows.entry(*node).or_default();
        }
        let addresses = self.addresses();
        for (node, window) in windows {
            let Some(address) = addresses.get(&node) else {
                told.remove(&node);
                continue;
            };
            let Some(told) = self.entry(told, node, address) else { continue };
            let call = *told.call.lock();
            let is_old = told.at.is_none_or(|at| at.elapsed() >= AGAIN_AFTER);
            let is_news = told.version != version || call == Call::Failed || is_old;
            if !is_news || call == Call::Open {
                continue;
            }
            (told.at, told.version, told.is_empty) = (Some(Instant::now()), version, window.is_empty());
            self.tell(told, message(self.router, &window, now));
        }
    }

    /// What a node was told, with a connection to where it is now.
    fn entry<'a>(
        &self,
        told: &'a mut BTreeMap<NodeId, Told>,
        node: NodeId,
        address: &str,
    ) -> Option<&'a mut Told> {
        if told.get(&node).is_none_or(|known| known.address != address) {
            let channel = self.peers.channel(address).ok()?;
            let (address, call) = (address.to_owned(), Arc::default());
            told.insert(node, Told { at: None, version: 0, is_empty: true, address, channel, call });
        }
        told.get_mut(&node)
    }

    /// Where live nodes are called.
    fn addresses(&self) -> BTreeMap<NodeId, String> {
        let control = self.groups.control().published.read();
        let live = control.index.nodes().filter(|state| state.live);
        live.map(|state| (state.record.node, state.record.control_address.clone())).collect()
    }

    fn tell(&self, told: &Told, window: pb::SetWindowRequest) {
        let (channel, call, metrics) = (told.channel.clone(), Arc::clone(&told.call), self.metrics.clone());
        *call.lock() = Call::Open;
        let blocks: usize = window.waiting.iter().map(|one| one.blocks.len() / 16).sum();
        tokio::spawn(async move {
            let mut request = Request::new(window);
            request.set_timeout(ANSWER_MAX);
            let mut node = NodeControlClient::new(channel);
            let asked = node.set_window(request);
            // A connection that does not come about has no time of its own.
            let answered = tokio::time::timeout(ANSWER_MAX, asked).await.is_ok_and(|answer| answer.is_ok());
            metrics.window_told(answered, blocks);
            *call.lock() = if answered { Call::Answered } else { Call::Failed };
        });
    }
}

fn message(router: u64, window: &[Wanted], now: Timestamp) -> pb::SetWindowRequest {
    let request = |wanted: &Wanted| pb::WaitingRequest {
        blocks: convert::hashes_to_bytes(&wanted.blocks),
        starts_after_ms: u64::try_from(wanted.starts.since(now).as_millis()).unwrap_or(u64::MAX),
    };
    pb::SetWindowRequest { router, waiting: window.iter().map(request).collect() }
}
