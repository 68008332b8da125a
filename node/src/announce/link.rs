//! The task that keeps this node known: joins through whichever router leads, streams announcements and
//! heartbeats, and obeys what comes back. While no router answers, the node goes on serving.
//!
//! Not here: what is announced and under which number (`outbox`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, Seq, TenantId};
use kv_core::index::command::{Announcement, NodeRecord};
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::pb::{self, announce_reply, announce_request};
use kvfleet_proto::{convert, tls};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::outbox::Batch;
use super::seek::Seek;
use crate::store::{Ask, Shared, StoreHandle};

/// A router fences a node it has not heard for 800 ms; eight heartbeats may be lost before that.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);

/// How long a router may take to accept a connection or a join.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// A ping on the connection, to notice a router that went silent without closing it (a partition, a
/// stopped process): nothing else would before TCP gives up, after a quarter of an hour.
const KEEPALIVE: Duration = Duration::from_millis(300);

/// How long a router may take to answer a ping: more than a busy machine's pauses, and short against the
/// time that an unrouted node costs.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Messages handed to a stream and not yet taken by the connection.
const STREAM_AHEAD: usize = 16;

/// The metadata key under which a router names the leader.
const LEADER_KEY: &str = "kvfleet-leader";

/// What the task needs.
pub(crate) struct Link {
    pub(crate) record: NodeRecord,
    pub(crate) routers: Vec<String>,
    pub(crate) identity: tls::Identity,
    pub(crate) store: StoreHandle,
}

/// Why a stream ended.
#[derive(Debug)]
enum Ended {
    Lost(String),
    Leader(String),
    Fenced,
    /// Not for this node, whoever is asked.
    Refused(String),
}

/// Registration and stream state between connections.
struct Session {
    link: Link,
    seek: Seek,
    epoch: Option<Epoch>,
    directives_version: u64,
    joined: Option<Instant>,
}

impl Link {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let seek = Seek::new(&self.routers);
        let mut session = Session { link: self, seek, epoch: None, directives_version: 0, joined: None };
        tokio::select! {
            () = stop.cancelled() => {}
            () = session.run() => {}
        }
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.store.shared
    }
}

impl Session {
    async fn run(&mut self) {
        let mut said = false;
        let mut refused = None;
        while let Some((address, wait)) = self.seek.next() {
            sleep(wait).await;
            match self.visit(&address).await {
                Ended::Leader(leader) => self.seek.leader_is(&leader),
                Ended::Fenced => {
                    self.fenced();
                    self.seek.leader_is(&address);
                }
                Ended::Refused(cause) => {
                    // Said once, however often it is tried again and whatever else went wrong before.
                    if refused.as_ref() != Some(&cause) {
                        tracing::error!(
                            address,
                            cause,
                            "the routers refuse this node: nothing is routed to it"
                        );
                        refused = Some(cause);
                    }
                    continue;
                }
                Ended::Lost(cause) if !said => {
                    said = true;
                    tracing::warn!(address, cause, "no router takes announcements; serving goes on");
                    continue;
                }
                Ended::Lost(cause) => {
                    tracing::debug!(address, cause, "router lost");
                    continue;
                }
            }
            said = false;
        }
    }

    fn fenced(&mut self) {
        let lived = self.joined.map_or(Duration::MAX, |joined| joined.elapsed());
        match self.seek.fenced(lived) {
            Some(rivals) => tracing::error!(
                node = self.link.record.node.0, epoch = ?self.epoch, in_a_row = rivals,
                "the routers end this node's epochs as soon as it joins: another process probably runs with the \
                 same id; give each node an id of its own",
            ),
            None => {
                tracing::warn!(epoch = ?self.epoch, "the routers ended this node's epoch; joining again");
            }
        }
        self.epoch = None;
        self.link.shared().outbox.lock().fenced();
    }

    /// One connection from its opening to its end.
    async fn visit(&mut self, address: &str) -> Ended {
        let mut client = match self.connect(address).await {
            Ok(client) => client,
            Err(cause) => return Ended::Lost(cause),
        };
        if self.epoch.is_none()
            && let Err(ended) = self.join(&mut client).await
        {
            return ended;
        }
        let (send, stream) = mpsc::channel(STREAM_AHEAD);
        // The first message says who this is, so that the leader need not wait for news to know.
        if send.try_send(self.heartbeat()).is_err() {
            return Ended::Lost("own stream closed".to_owned());
        }
        match timeout(CALL_TIMEOUT, client.announce(ReceiverStream::new(stream))).await {
            Ok(Ok(replies)) => self.stream(address, &send, replies.into_inner()).await,
            Ok(Err(status)) => ended(&status),
            Err(_) => Ended::Lost("the announce stream was not opened in time".to_owned()),
        }
    }

    async fn connect(&self, address: &str) -> Result<RouterClient<Channel>, String> {
        let endpoint = Endpoint::from_shared(format!("https://{address}"))
            .and_then(|endpoint| endpoint.tls_config(self.link.identity.client_tls()))
            .map_err(|cause| cause.to_string())?
            .connect_timeout(CALL_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true)
            .tcp_nodelay(true);
        let channel = timeout(CALL_TIMEOUT, endpoint.connect()).await.map_err(|late| late.to_string())?;
        channel.map(RouterClient::new).map_err(|cause| chain(&cause))
    }

    async fn join(&mut self, client: &mut RouterClient<Channel>) -> Result<(), Ended> {
        let call = client.join(convert::join_to_pb(&self.link.record));
        let reply = match timeout(CALL_TIMEOUT * 3, call).await {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) => return Err(ended(&status)),
            Err(_) => return Err(Ended::Lost("join was not answered in time".to_owned())),
        };
        let epoch = Epoch(reply.epoch);
        tracing::info!(%epoch, "joined the cluster");
        (self.epoch, self.joined) = (Some(epoch), Some(Instant::now()));
        let stopped = || Ended::Lost("the node is stopping".to_owned());
        self.link.store.ask(|reply| Ask::Joined { epoch, reply }).await.map_err(|_| stopped())?;
        if let Some(directives) = reply.directives {
            self.obey(directives).await;
        }
        Ok(())
    }

    async fn stream(
        &mut self,
        address: &str,
        send: &mpsc::Sender<pb::AnnounceRequest>,
        mut replies: Streaming<pb::AnnounceReply>,
    ) -> Ended {
        self.link.shared().outbox.lock().restart();
        let mut beat = interval(HEARTBEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut hold_until = Instant::now();
        loop {
            if Instant::now() >= hold_until
                && let Err(ended) = self.send_batches(send).await
            {
                return ended;
            }
            let shared = Arc::clone(self.link.shared());
            tokio::select! {
                () = shared.outbox_filled.notified() => {}
                () = sleep_until(hold_until), if Instant::now() < hold_until => {}
                _ = beat.tick() => if send.send(self.heartbeat()).await.is_err() {
                    return Ended::Lost("stream closed".to_owned());
                },
                reply = replies.message() => match reply {
                    Ok(Some(reply)) => {
                        // Only an acknowledgement says that this router leads and knows our epoch.
                        if matches!(reply.body, Some(announce_reply::Body::Ack(_))) {
                            self.seek.worked(address);
                        }
                        match self.on_reply(reply).await {
                            Ok(Some(wait)) => hold_until = Instant::now() + wait,
                            Ok(None) => {}
                            Err(ended) => return ended,
                        }
                    }
                    Ok(None) => return Ended::Lost("the router closed the stream".to_owned()),
                    Err(status) => return ended(&status),
                },
            }
        }
    }

    async fn send_batches(&mut self, send: &mpsc::Sender<pb::AnnounceRequest>) -> Result<(), Ended> {
        loop {
            let next = self.link.shared().outbox.lock().next_batch();
            let Some(batch) = next else { break };
            let request = self.batch(batch);
            if send.send(request).await.is_err() {
                return Err(Ended::Lost("stream closed".to_owned()));
            }
        }
        let stale = self.link.shared().outbox.lock().stale();
        if stale {
            // Answered through `outbox_filled`, which brings us back here.
            self.reannounce(None).await;
        }
        Ok(())
    }

    /// Obeys a reply. A pause to keep before sending on, or the end of the stream.
    async fn on_reply(&mut self, reply: pb::AnnounceReply) -> Result<Option<Duration>, Ended> {
        match reply.body {
            Some(announce_reply::Body::Ack(ack)) => self.acked(Seq(ack.seq)),
            Some(announce_reply::Body::Resync(resync)) => {
                tracing::info!(
                    expected = resync.expected,
                    "the leader misses announcements; sending all anew"
                );
                self.reannounce(Some(Seq(resync.expected))).await;
            }
            Some(announce_reply::Body::Fenced(_)) => return Err(Ended::Fenced),
            Some(announce_reply::Body::NotLeader(other)) => return Err(Ended::Leader(other.address)),
            Some(announce_reply::Body::Directives(directives)) => self.obey(directives).await,
            Some(announce_reply::Body::Busy(busy)) => {
                self.link.shared().outbox.lock().again_from(Seq(busy.seq));
                return Ok(Some(Duration::from_millis(busy.retry_after_ms.clamp(1, 1000))));
            }
            None => {}
        }
        Ok(None)
    }

    fn acked(&self, seq: Seq) {
        let mut outbox = self.link.shared().outbox.lock();
        outbox.ack(seq);
        let acked = (outbox.epoch().unwrap_or_default(), outbox.acked());
        drop(outbox);
        self.link.shared().acked.send_replace(acked);
    }

    async fn reannounce(&self, expected: Option<Seq>) {
        // Refused only while the node stops.
        let _ = self.link.store.ask(|reply| Ask::Reannounce { expected, reply }).await;
    }

    async fn obey(&mut self, directives: pb::Directives) {
        let mut pins: BTreeSet<BlockHash> = BTreeSet::new();
        for pin in &directives.pins {
            match convert::hashes_from_bytes("pins.blocks", &pin.blocks) {
                Ok(blocks) => pins.extend(blocks),
                Err(cause) => tracing::error!(pin = pin.pin, %cause, "a pin of the routers is unreadable"),
            }
        }
        let quotas = directives.quotas.iter().map(|quota| (TenantId(quota.tenant), quota.bytes)).collect();
        if !directives.ttls.is_empty() && self.directives_version != directives.version {
            let groups = directives.ttls.len();
            tracing::warn!(
                groups,
                "the routers set times to live, which this version of the node does not act on"
            );
        }
        self.directives_version = directives.version;
        let _ = self.link.store.tell(Ask::Directives { pins, quotas }).await;
    }

    fn request(&self, body: announce_request::Body) -> pb::AnnounceRequest {
        let epoch = self.epoch.unwrap_or_default().0;
        pb::AnnounceRequest { node: self.link.record.node.0, epoch, body: Some(body) }
    }

    fn heartbeat(&self) -> pb::AnnounceRequest {
        let (dram_bytes, ssd_bytes) = self.link.shared().used_bytes();
        let directives_version = self.directives_version;
        let beat = pb::Heartbeat { dram_bytes, ssd_bytes, inflight_bytes: 0, directives_version };
        self.request(announce_request::Body::Heartbeat(beat))
    }

    fn batch(&self, batch: Batch) -> pb::AnnounceRequest {
        let epoch = self.epoch.unwrap_or_default();
        let node = self.link.record.node;
        convert::announcement_to_pb(&Announcement { node, epoch, seq: batch.seq, changes: batch.changes })
    }
}

/// What a refused call means.
fn ended(status: &Status) -> Ended {
    match status.metadata().get(LEADER_KEY).and_then(|value| value.to_str().ok()) {
        Some(leader) if !leader.is_empty() => Ended::Leader(leader.to_owned()),
        _ if status.code() == Code::PermissionDenied => Ended::Refused(status.message().to_owned()),
        _ => Ended::Lost(format!("{}: {}", status.code(), status.message())),
    }
}

/// An error with its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
