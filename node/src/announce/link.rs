//! The task that keeps this node registered: it joins through the control group's leader, streams
//! heartbeats and applies directives. While no router answers, the node keeps serving.
//!
//! Not here: announcements. Each shard of the index has its own stream (`shard`), started by this
//! task with the first epoch.

use std::sync::Arc;
use std::time::Duration;

use kv_core::evict::reuse_stats::ReuseStats;
use kv_core::id::{BlockHash, Epoch, Generation, PinId, TTL_GROUPS, TenantId, TtlGroupId};
use kv_core::index::command::{NodeRecord, PinKind};
use kv_core::tier::{PinDirective, PinExpiry};
use kvfleet_net::tls;
use kvfleet_proto::convert;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::pb::{self, announce_reply, announce_request};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use super::router_selector::RouterSelector;
use super::session::{CALL_TIMEOUT, LoggedTrouble, STREAM_BUFFER, StreamEnd, connect, stream_end};
use super::shard::ShardStream;
use crate::store::{SharedState, StoreHandle, StoreRequest};

/// Heartbeat interval. A router fences a node after 800 ms of silence: eight heartbeats may be lost
/// before that.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);

/// Queue length for fenced epochs; one is enough, because all shards report the same epoch.
const FENCES_MAX: usize = 1;

/// The Raft group of nodes, pins, quotas and times to live; shards are counted from 1.
const CONTROL: u16 = 0;

/// Inputs of the link task.
pub(crate) struct RouterLink {
    pub(crate) record: NodeRecord,
    /// Its digest is in the record.
    pub(crate) manifest: pb::Manifest,
    pub(crate) routers: Vec<String>,
    pub(crate) identity: tls::Identity,
    pub(crate) store: StoreHandle,
    /// The current registration; `None` before a join and after a fence.
    pub(crate) registration: watch::Sender<Option<Registration>>,
    /// Cancelled to make the node leave the cluster before it stops.
    pub(crate) leave_requested: CancellationToken,
}

/// Timeout of a leave request to one router.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Rounds of leave requests over all routers: the second one finds a leader that was being elected.
const LEAVE_ROUNDS: usize = 3;

/// An epoch of this node, and the number of shards it announces to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) epoch: Epoch,
    pub(crate) shards: u16,
}

/// Registration and stream state between connections.
struct LinkSession {
    link: Arc<RouterLink>,
    router_selector: RouterSelector,
    registration: watch::Sender<Option<Registration>>,
    directives_version: u64,
    /// Reuse statistics to send. Each message contains all of them, with its own number.
    reuse_stats: watch::Receiver<Arc<ReuseStats>>,
    reuse_stats_seq: u64,
    /// First epoch of this process.
    first_epoch: Option<Epoch>,
    joined_at: Option<Instant>,
    /// Epochs fenced by a shard's leader.
    fences: mpsc::Receiver<Epoch>,
    fence_sender: mpsc::Sender<Epoch>,
    shards: JoinSet<()>,
}

impl RouterLink {
    /// Runs until `stop`, or until the node has left.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let (leaving, life) = (self.leave_requested.clone(), self.registration.clone());
        let link = Arc::new(self);
        let seek = RouterSelector::new(&link.routers);
        let (to_fence, fences) = mpsc::channel(FENCES_MAX);
        let shards = JoinSet::new();
        let seen = link.shared().reuse_stats.subscribe();
        let mut session = LinkSession {
            link,
            router_selector: seek,
            registration: life,
            directives_version: 0,
            reuse_stats: seen,
            reuse_stats_seq: 0,
            first_epoch: None,
            joined_at: None,
            fences,
            fence_sender: to_fence,
            shards,
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = leaving.cancelled() => {
                // Stop announcing first: a shard would answer that the epoch is over, and the node
                // would join again.
                session.shards.abort_all();
                // stopped; the routers notice the silence instead
                let _ = stop.run_until_cancelled(session.leave()).await;
            }
            () = session.run() => {}
        }
    }

    pub(super) fn shared(&self) -> &Arc<SharedState> {
        &self.store.shared
    }

    /// A message on a stream of this node.
    pub(super) fn request(
        &self,
        group: u16,
        epoch: Epoch,
        body: announce_request::Body,
    ) -> pb::AnnounceRequest {
        pb::AnnounceRequest {
            node: self.record.node.0,
            epoch: epoch.0,
            group: group.into(),
            body: Some(body),
        }
    }

    /// Applies the routers' directives. Returns their version.
    pub(super) async fn apply_directives(&self, directives: pb::Directives) -> u64 {
        let mut pins: Vec<PinDirective> = Vec::with_capacity(directives.pins.len());
        for pin in &directives.pins {
            match convert::hashes_from_bytes("pins.blocks", &pin.blocks) {
                Ok(blocks) => pins.push(pin_directive(pin, blocks)),
                Err(cause) => tracing::error!(pin = pin.pin, %cause, "a pin of the routers is unreadable"),
            }
        }
        let quotas = directives.quotas.iter().map(|quota| (TenantId(quota.tenant), quota.bytes)).collect();
        let ttls = ttls_of_groups(&directives.ttls);
        // Fails only while the node stops.
        let _ = self.store.send(StoreRequest::Directives { pins, quotas, ttls }).await;
        directives.version
    }

    /// Applies the fleet's reuse statistics. A router of another release may send a form that
    /// cannot be read.
    async fn apply_fleet_stats(&self, fleet: &pb::Statistics) {
        match convert::statistics_from_pb(fleet) {
            // Fails only while the node stops.
            Ok(fleet) => drop(self.store.send(StoreRequest::SetFleetReuseStats { fleet }).await),
            Err(cause) => tracing::debug!(%cause, "the fleet's reuse statistics cannot be read"),
        }
    }
}

fn pin_directive(pin: &pb::PinnedBlocks, blocks: Vec<BlockHash>) -> PinDirective {
    let kind = if pin.soft { PinKind::Soft } else { PinKind::Hard };
    let left = Duration::from_millis(pin.left_ms);
    let end = pin.ends_ms.map(|ends_ms| PinExpiry { ends_ms, remaining: left });
    PinDirective { pin: PinId(pin.pin), kind, blocks: blocks.into(), end }
}

/// Times to live of valid groups. Routers of earlier builds accepted any number as a group, and may
/// have stored some.
fn ttls_of_groups(ttls: &[pb::GroupTtl]) -> Vec<(TtlGroupId, Duration)> {
    let known = ttls.iter().filter(|ttl| ttl.group < TTL_GROUPS);
    known.map(|ttl| (TtlGroupId(ttl.group), Duration::from_millis(ttl.ttl_ms))).collect()
}

impl LinkSession {
    async fn run(&mut self) {
        let mut said = LoggedTrouble::default();
        while let Some((address, wait)) = self.router_selector.next_router() {
            sleep(wait).await;
            match self.run_connection(&address).await {
                StreamEnd::Leader(leader) => self.router_selector.set_leader_hint(&leader),
                StreamEnd::Fenced | StreamEnd::Rejoined => {
                    self.fenced();
                    self.router_selector.set_leader_hint(&address);
                }
                StreamEnd::Refused(cause) => {
                    said.refused(&address, cause);
                    continue;
                }
                StreamEnd::Lost(cause) => {
                    said.lost(CONTROL, &address, &cause);
                    continue;
                }
            }
            said.found();
        }
    }

    fn epoch(&self) -> Option<Epoch> {
        self.registration.borrow().map(|life| life.epoch)
    }

    fn fenced(&mut self) {
        let lived = self.joined_at.map_or(Duration::MAX, |joined| joined.elapsed());
        let epoch = self.epoch();
        match self.router_selector.fenced(lived) {
            Some(rivals) => tracing::error!(
                node = self.link.record.node.0,
                ?epoch,
                in_a_row = rivals,
                "the routers end this node's epochs as soon as it joins: another process probably runs with the \
                 same id; give each node an id of its own",
            ),
            None => {
                tracing::warn!(?epoch, "the routers ended this node's epoch; joining again");
            }
        }
        self.link.shared().outboxes.lock().fenced();
        self.registration.send_replace(None);
    }

    /// Runs one connection until it ends.
    async fn run_connection(&mut self, address: &str) -> StreamEnd {
        let mut client = match connect(address, &self.link.identity).await {
            Ok(client) => client,
            Err(cause) => return StreamEnd::Lost(cause),
        };
        let epoch = match self.epoch() {
            Some(epoch) => epoch,
            None => match self.join(&mut client).await {
                Ok(epoch) => epoch,
                Err(ended) => return ended,
            },
        };
        let (send, stream) = mpsc::channel(STREAM_BUFFER);
        // This router may never have received them.
        self.reuse_stats.mark_changed();
        // The first message identifies the node, so that the leader knows it before any batch.
        if send.try_send(self.heartbeat(epoch)).is_err() {
            return StreamEnd::Lost("own stream closed".to_owned());
        }
        match timeout(CALL_TIMEOUT, client.announce(ReceiverStream::new(stream))).await {
            Ok(Ok(replies)) => self.stream(address, epoch, &send, replies.into_inner()).await,
            Ok(Err(status)) => stream_end(&status),
            Err(_) => StreamEnd::Lost("the announce stream was not opened in time".to_owned()),
        }
    }

    async fn join(&mut self, client: &mut RouterClient<Channel>) -> Result<Epoch, StreamEnd> {
        let manifest = Some(self.link.manifest.clone());
        let call = client.join(pb::JoinRequest { manifest, ..convert::join_to_pb(&self.link.record) });
        let reply = match timeout(CALL_TIMEOUT * 3, call).await {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return Err(stream_end(&status)),
            Err(_) => return Err(StreamEnd::Lost("join was not answered in time".to_owned())),
        };
        let epoch = Epoch(reply.epoch);
        let shards = u16::try_from(reply.shards).unwrap_or(u16::MAX).max(1);
        let generation = Generation(reply.generation);
        tracing::info!(%epoch, shards, %generation, "joined the cluster");
        self.joined_at = Some(Instant::now());
        self.first_epoch.get_or_insert(epoch);
        // First, so that the policies have the statistics before the first eviction.
        if let Some(fleet) = &reply.fleet {
            self.link.apply_fleet_stats(fleet).await;
        }
        let stopped = || StreamEnd::Lost("the node is stopping".to_owned());
        let joined = |reply| StoreRequest::Joined { epoch, shards, generation, reply };
        self.link.store.request(joined).await.map_err(|_| stopped())?.map_err(StreamEnd::Lost)?;
        if let Some(directives) = reply.directives {
            self.apply_directives(directives).await;
        }
        self.registration.send_replace(Some(Registration { epoch, shards }));
        self.start_shards(shards);
        Ok(epoch)
    }

    /// Starts the missing shard streams; they live through all epochs.
    fn start_shards(&mut self, shards: u16) {
        let running = u16::try_from(self.shards.len()).unwrap_or(u16::MAX);
        for shard in running + 1..=shards {
            let (lives, fences) = (self.registration.subscribe(), self.fence_sender.clone());
            self.shards.spawn(ShardStream::new(Arc::clone(&self.link), shard, lives, fences).run());
        }
    }

    async fn apply_directives(&mut self, directives: pb::Directives) {
        self.directives_version = self.link.apply_directives(directives).await;
    }

    async fn stream(
        &mut self,
        address: &str,
        epoch: Epoch,
        send: &mpsc::Sender<pb::AnnounceRequest>,
        mut replies: Streaming<pb::AnnounceReply>,
    ) -> StreamEnd {
        let mut beat = interval(HEARTBEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = beat.tick() => if send.send(self.heartbeat(epoch)).await.is_err() {
                    return StreamEnd::Lost("stream closed".to_owned());
                },
                Some(over) = self.fences.recv() => if over == epoch {
                    return StreamEnd::Fenced;
                },
                reply = replies.message() => match reply.map(|reply| reply.map(|reply| reply.body)) {
                    // Only the leader sends directives, as its first message.
                    Ok(Some(Some(announce_reply::Body::Directives(directives)))) => {
                        self.router_selector.succeeded(address);
                        self.apply_directives(directives).await;
                    }
                    Ok(Some(Some(announce_reply::Body::Fleet(fleet)))) => self.link.apply_fleet_stats(&fleet).await,
                    Ok(Some(Some(announce_reply::Body::Fenced(_)))) => return StreamEnd::Fenced,
                    Ok(Some(Some(announce_reply::Body::NotLeader(other)))) => {
                        return StreamEnd::Leader(other.address);
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => return StreamEnd::Lost("the router closed the stream".to_owned()),
                    Err(status) => return stream_end(&status),
                },
            }
        }
    }

    /// Tells the control group's leader that this node leaves, so that it receives no more
    /// requests. Without an answer the routers notice the missing heartbeats.
    async fn leave(&mut self) {
        let Some(epoch) = self.epoch() else { return };
        for _ in 0..LEAVE_ROUNDS * self.link.routers.len().max(1) {
            let Some((address, wait)) = self.router_selector.next_router() else { break };
            sleep(wait).await;
            match timeout(LEAVE_TIMEOUT, self.leave_through(&address, epoch)).await {
                Ok(Ok(())) => {
                    tracing::info!(%epoch, "left the cluster");
                    self.registration.send_replace(None);
                    return;
                }
                Ok(Err(StreamEnd::Leader(leader))) => self.router_selector.set_leader_hint(&leader),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        tracing::warn!(%epoch, "no router confirmed the leave; the routers will notice the missing heartbeats");
    }

    async fn leave_through(&self, address: &str, epoch: Epoch) -> Result<(), StreamEnd> {
        let mut client = connect(address, &self.link.identity).await.map_err(StreamEnd::Lost)?;
        let request = pb::LeaveRequest { node: self.link.record.node.0, epoch: epoch.0 };
        client.leave(request).await.map(drop).map_err(|status| stream_end(&status))
    }

    /// The reuse statistics, if this router has not received them yet.
    fn reuse_stats_update(&mut self) -> Option<pb::NodeStatistics> {
        if !self.reuse_stats.has_changed().unwrap_or(false) {
            return None;
        }
        let seen = Arc::clone(&self.reuse_stats.borrow_and_update());
        // A policy that does not learn sends none; one that reset its statistics sends empty ones.
        if seen.is_empty() && self.reuse_stats_seq == 0 {
            return None;
        }
        self.reuse_stats_seq += 1;
        let life = self.first_epoch.unwrap_or_default().0;
        let statistics = Some(convert::statistics_to_pb(&seen));
        Some(pb::NodeStatistics { life, seq: self.reuse_stats_seq, statistics })
    }

    fn heartbeat(&mut self, epoch: Epoch) -> pb::AnnounceRequest {
        let (dram_bytes, ssd_bytes) = self.link.shared().used_bytes();
        let directives_version = self.directives_version;
        let seen = self.reuse_stats_update();
        let beat = pb::Heartbeat {
            dram_bytes,
            ssd_bytes,
            directives_version,
            block_stats: seen,
            ..pb::Heartbeat::default()
        };
        self.link.request(CONTROL, epoch, announce_request::Body::Heartbeat(beat))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttls_of_unknown_groups_are_skipped() {
        let ttls = [0, TTL_GROUPS - 1, TTL_GROUPS, u32::MAX].map(|group| pb::GroupTtl { group, ttl_ms: 7 });
        let taken = ttls_of_groups(&ttls);
        let wanted =
            [TtlGroupId(0), TtlGroupId(TTL_GROUPS - 1)].map(|group| (group, Duration::from_millis(7)));
        assert_eq!(taken, wanted);
    }
}
