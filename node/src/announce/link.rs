//! The task that keeps this node known: joins through whichever router leads the control group, streams
//! heartbeats, and obeys what comes back. While no router answers, the node goes on serving.
//!
//! Not here: announcements. Each shard of the index has a stream of its own (`shard`), which this task starts
//! with the first epoch.

use std::sync::Arc;
use std::time::Duration;

use kv_core::evict::statistics::Statistics;
use kv_core::id::{BlockHash, Epoch, GROUPS, Generation, GroupId, PinId, TenantId};
use kv_core::index::command::{NodeRecord, PinKind};
use kv_core::tier::{PinEnd, PinOrder};
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::pb::{self, announce_reply, announce_request};
use kvfleet_proto::{convert, tls};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use super::seek::Seek;
use super::session::{CALL_TIMEOUT, Ended, STREAM_AHEAD, Said, connect, ended};
use super::shard::ShardStream;
use crate::store::{Ask, Shared, StoreHandle};

/// A router fences a node it has not heard for 800 ms; eight heartbeats may be lost before that.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);

/// Shards that wait to say that an epoch is over; one is enough, the others say the same.
const FENCES_MAX: usize = 1;

/// The Raft group that knows nodes, pins, quotas and times to live; shards are counted from 1.
const CONTROL: u16 = 0;

/// What the task needs.
pub(crate) struct Link {
    pub(crate) record: NodeRecord,
    /// Whose digest the record has.
    pub(crate) manifest: pb::Manifest,
    pub(crate) routers: Vec<String>,
    pub(crate) identity: tls::Identity,
    pub(crate) store: StoreHandle,
    /// The epoch that the routers gave and did not end.
    pub(crate) life: watch::Sender<Option<Life>>,
    /// Cancelled when the node is to leave the cluster before it stops.
    pub(crate) leaving: CancellationToken,
}

/// Longest that one router is asked to let this node go.
const LEAVE_TRY: Duration = Duration::from_secs(1);

/// Rounds over all routers in which it is asked: a leader that is just being elected is found in the second one.
const LEAVE_ROUNDS: usize = 3;

/// An epoch of this node, and the shards it announces to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) epoch: Epoch,
    pub(crate) shards: u16,
}

/// Registration and stream state between connections.
struct Session {
    link: Arc<Link>,
    seek: Seek,
    life: watch::Sender<Option<Life>>,
    directives_version: u64,
    /// What is to be said of what this node saw; each time it says all of it, under a number of its own.
    seen: watch::Receiver<Arc<Statistics>>,
    seen_seq: u64,
    /// First epoch of this process.
    born: Option<Epoch>,
    joined: Option<Instant>,
    /// Epochs that a shard's leader called over.
    fences: mpsc::Receiver<Epoch>,
    to_fence: mpsc::Sender<Epoch>,
    shards: JoinSet<()>,
}

impl Link {
    /// Runs until `stop`, or until the node has left.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let (leaving, life) = (self.leaving.clone(), self.life.clone());
        let link = Arc::new(self);
        let seek = Seek::new(&link.routers);
        let (to_fence, fences) = mpsc::channel(FENCES_MAX);
        let shards = JoinSet::new();
        let seen = link.shared().seen.subscribe();
        let mut session = Session {
            link,
            seek,
            life,
            directives_version: 0,
            seen,
            seen_seq: 0,
            born: None,
            joined: None,
            fences,
            to_fence,
            shards,
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = leaving.cancelled() => {
                // Nothing is announced beside it: a shard would answer that the epoch is over, and the node join again.
                session.shards.abort_all();
                let _ = stop.run_until_cancelled(session.leave()).await; // stopped, which says it more slowly
            }
            () = session.run() => {}
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
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

    /// Takes over what the routers order; answers under which version.
    pub(super) async fn obey(&self, directives: pb::Directives) -> u64 {
        let mut pins: Vec<PinOrder> = Vec::with_capacity(directives.pins.len());
        for pin in &directives.pins {
            match convert::hashes_from_bytes("pins.blocks", &pin.blocks) {
                Ok(blocks) => pins.push(pin_order(pin, blocks)),
                Err(cause) => tracing::error!(pin = pin.pin, %cause, "a pin of the routers is unreadable"),
            }
        }
        let quotas = directives.quotas.iter().map(|quota| (TenantId(quota.tenant), quota.bytes)).collect();
        let ttls = ttls_of_groups(&directives.ttls);
        // Refused only while the node stops.
        let _ = self.store.tell(Ask::Directives { pins, quotas, ttls }).await;
        directives.version
    }

    /// Takes over what the whole fleet saw. A router of another release may say it in a way that is not understood here.
    async fn learn(&self, fleet: &pb::Statistics) {
        match convert::statistics_from_pb(fleet) {
            // Refused only while the node stops.
            Ok(fleet) => drop(self.store.tell(Ask::Inform { fleet }).await),
            Err(cause) => tracing::debug!(%cause, "what the fleet saw is not taken"),
        }
    }
}

fn pin_order(pin: &pb::PinnedBlocks, blocks: Vec<BlockHash>) -> PinOrder {
    let kind = if pin.soft { PinKind::Soft } else { PinKind::Hard };
    let left = Duration::from_millis(pin.left_ms);
    let end = pin.ends_ms.map(|ends_ms| PinEnd { ends_ms, left });
    PinOrder { pin: PinId(pin.pin), kind, blocks: blocks.into(), end }
}

/// Times to live of groups there are. Routers of earlier builds took any number for a group, and may have kept some.
fn ttls_of_groups(ttls: &[pb::GroupTtl]) -> Vec<(GroupId, Duration)> {
    let known = ttls.iter().filter(|ttl| ttl.group < GROUPS);
    known.map(|ttl| (GroupId(ttl.group), Duration::from_millis(ttl.ttl_ms))).collect()
}

impl Session {
    async fn run(&mut self) {
        let mut said = Said::default();
        while let Some((address, wait)) = self.seek.next() {
            sleep(wait).await;
            match self.visit(&address).await {
                Ended::Leader(leader) => self.seek.leader_is(&leader),
                Ended::Fenced | Ended::Rejoined => {
                    self.fenced();
                    self.seek.leader_is(&address);
                }
                Ended::Refused(cause) => {
                    said.refused(&address, cause);
                    continue;
                }
                Ended::Lost(cause) => {
                    said.lost(CONTROL, &address, &cause);
                    continue;
                }
            }
            said.found();
        }
    }

    fn epoch(&self) -> Option<Epoch> {
        self.life.borrow().map(|life| life.epoch)
    }

    fn fenced(&mut self) {
        let lived = self.joined.map_or(Duration::MAX, |joined| joined.elapsed());
        let epoch = self.epoch();
        match self.seek.fenced(lived) {
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
        self.life.send_replace(None);
    }

    /// One connection from its opening to its end.
    async fn visit(&mut self, address: &str) -> Ended {
        let mut client = match connect(address, &self.link.identity).await {
            Ok(client) => client,
            Err(cause) => return Ended::Lost(cause),
        };
        let epoch = match self.epoch() {
            Some(epoch) => epoch,
            None => match self.join(&mut client).await {
                Ok(epoch) => epoch,
                Err(ended) => return ended,
            },
        };
        let (send, stream) = mpsc::channel(STREAM_AHEAD);
        // Whoever hears it may never have heard of this node.
        self.seen.mark_changed();
        // The first message says who this is, so that the leader need not wait for news to know.
        if send.try_send(self.heartbeat(epoch)).is_err() {
            return Ended::Lost("own stream closed".to_owned());
        }
        match timeout(CALL_TIMEOUT, client.announce(ReceiverStream::new(stream))).await {
            Ok(Ok(replies)) => self.stream(address, epoch, &send, replies.into_inner()).await,
            Ok(Err(status)) => ended(&status),
            Err(_) => Ended::Lost("the announce stream was not opened in time".to_owned()),
        }
    }

    async fn join(&mut self, client: &mut RouterClient<Channel>) -> Result<Epoch, Ended> {
        let manifest = Some(self.link.manifest.clone());
        let call = client.join(pb::JoinRequest { manifest, ..convert::join_to_pb(&self.link.record) });
        let reply = match timeout(CALL_TIMEOUT * 3, call).await {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return Err(ended(&status)),
            Err(_) => return Err(Ended::Lost("join was not answered in time".to_owned())),
        };
        let epoch = Epoch(reply.epoch);
        let shards = u16::try_from(reply.shards).unwrap_or(u16::MAX).max(1);
        let generation = Generation(reply.generation);
        tracing::info!(%epoch, shards, %generation, "joined the cluster");
        self.joined = Some(Instant::now());
        self.born.get_or_insert(epoch);
        // Before all else that follows: whoever begins to evict knows it.
        if let Some(fleet) = &reply.fleet {
            self.link.learn(fleet).await;
        }
        let stopped = || Ended::Lost("the node is stopping".to_owned());
        let joined = |reply| Ask::Joined { epoch, shards, generation, reply };
        self.link.store.ask(joined).await.map_err(|_| stopped())?.map_err(Ended::Lost)?;
        if let Some(directives) = reply.directives {
            self.obey(directives).await;
        }
        self.life.send_replace(Some(Life { epoch, shards }));
        self.start_shards(shards);
        Ok(epoch)
    }

    /// Starts the streams of shards that have none yet: they live on through all epochs.
    fn start_shards(&mut self, shards: u16) {
        let running = u16::try_from(self.shards.len()).unwrap_or(u16::MAX);
        for shard in running + 1..=shards {
            let (lives, fences) = (self.life.subscribe(), self.to_fence.clone());
            self.shards.spawn(ShardStream::new(Arc::clone(&self.link), shard, lives, fences).run());
        }
    }

    async fn obey(&mut self, directives: pb::Directives) {
        self.directives_version = self.link.obey(directives).await;
    }

    async fn stream(
        &mut self,
        address: &str,
        epoch: Epoch,
        send: &mpsc::Sender<pb::AnnounceRequest>,
        mut replies: Streaming<pb::AnnounceReply>,
    ) -> Ended {
        let mut beat = interval(HEARTBEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = beat.tick() => if send.send(self.heartbeat(epoch)).await.is_err() {
                    return Ended::Lost("stream closed".to_owned());
                },
                Some(over) = self.fences.recv() => if over == epoch {
                    return Ended::Fenced;
                },
                reply = replies.message() => match reply.map(|reply| reply.map(|reply| reply.body)) {
                    // Only the leader sends directives, and it does so first of all.
                    Ok(Some(Some(announce_reply::Body::Directives(directives)))) => {
                        self.seek.worked(address);
                        self.obey(directives).await;
                    }
                    Ok(Some(Some(announce_reply::Body::Fleet(fleet)))) => self.link.learn(&fleet).await,
                    Ok(Some(Some(announce_reply::Body::Fenced(_)))) => return Ended::Fenced,
                    Ok(Some(Some(announce_reply::Body::NotLeader(other)))) => {
                        return Ended::Leader(other.address);
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => return Ended::Lost("the router closed the stream".to_owned()),
                    Err(status) => return ended(&status),
                },
            }
        }
    }

    /// Says goodbye to whoever leads the control group, so that nothing is routed here any more. Without an answer the routers
    /// notice by the silence.
    async fn leave(&mut self) {
        let Some(epoch) = self.epoch() else { return };
        for _ in 0..LEAVE_ROUNDS * self.link.routers.len().max(1) {
            let Some((address, wait)) = self.seek.next() else { break };
            sleep(wait).await;
            match timeout(LEAVE_TRY, self.leave_by(&address, epoch)).await {
                Ok(Ok(())) => {
                    tracing::info!(%epoch, "left the cluster");
                    self.life.send_replace(None);
                    return;
                }
                Ok(Err(Ended::Leader(leader))) => self.seek.leader_is(&leader),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        tracing::warn!(%epoch, "no router took the goodbye; they will notice by the silence");
    }

    async fn leave_by(&self, address: &str, epoch: Epoch) -> Result<(), Ended> {
        let mut client = connect(address, &self.link.identity).await.map_err(Ended::Lost)?;
        let request = pb::LeaveRequest { node: self.link.record.node.0, epoch: epoch.0 };
        client.leave(request).await.map(drop).map_err(|status| ended(&status))
    }

    /// What this node saw, if that is news to whoever hears it.
    fn seen(&mut self) -> Option<pb::NodeStatistics> {
        if !self.seen.has_changed().unwrap_or(false) {
            return None;
        }
        let seen = Arc::clone(&self.seen.borrow_and_update());
        // A policy that does not learn has nothing to say; one that forgot everything says so.
        if seen.is_empty() && self.seen_seq == 0 {
            return None;
        }
        self.seen_seq += 1;
        let life = self.born.unwrap_or_default().0;
        let statistics = Some(convert::statistics_to_pb(&seen));
        Some(pb::NodeStatistics { life, seq: self.seen_seq, statistics })
    }

    fn heartbeat(&mut self, epoch: Epoch) -> pb::AnnounceRequest {
        let (dram_bytes, ssd_bytes) = self.link.shared().used_bytes();
        let directives_version = self.directives_version;
        let seen = self.seen();
        let beat =
            pb::Heartbeat { dram_bytes, ssd_bytes, directives_version, seen, ..pb::Heartbeat::default() };
        self.link.request(CONTROL, epoch, announce_request::Body::Heartbeat(beat))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_to_live_of_groups_that_are_none_are_left_out() {
        let ttls = [0, GROUPS - 1, GROUPS, u32::MAX].map(|group| pb::GroupTtl { group, ttl_ms: 7 });
        let taken = ttls_of_groups(&ttls);
        let wanted = [GroupId(0), GroupId(GROUPS - 1)].map(|group| (group, Duration::from_millis(7)));
        assert_eq!(taken, wanted);
    }
}
