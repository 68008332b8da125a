//! The announcement stream to one shard of the index, sent to its current leader.
//!
//! It lives as long as the node, through all epochs. Not here: epochs (`link`), and the numbering
//! of announcements (`outbox`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, Seq};
use kv_core::index::command::Announcement;
use kvfleet_proto::convert;
use kvfleet_proto::pb::{self, announce_reply, announce_request};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::link::{Registration, RouterLink};
use super::outbox::AnnounceBatch;
use super::router_selector::RouterSelector;
use super::session::{CALL_TIMEOUT, LoggedTrouble, STREAM_BUFFER, StreamEnd, connect, stream_end};
use crate::store::StoreRequest;

/// The stream of one shard; see the module.
pub(super) struct ShardStream {
    link: Arc<RouterLink>,
    shard: u16,
    router_selector: RouterSelector,
    registrations: watch::Receiver<Option<Registration>>,
    /// Receives epochs that a shard's leader fenced.
    fences: mpsc::Sender<Epoch>,
    directives_version: u64,
}

impl ShardStream {
    pub(super) fn new(
        link: Arc<RouterLink>,
        shard: u16,
        registrations: watch::Receiver<Option<Registration>>,
        fences: mpsc::Sender<Epoch>,
    ) -> ShardStream {
        let router_selector = RouterSelector::new(&link.routers);
        ShardStream { link, shard, router_selector, registrations, fences, directives_version: 0 }
    }

    pub(super) async fn run(mut self) {
        let mut said = LoggedTrouble::default();
        while let Ok(life) = self.registrations.wait_for(Option::is_some).await.map(|life| *life) {
            let Some((life, (address, wait))) = life.zip(self.router_selector.next_router()) else { return };
            sleep(wait).await;
            match self.run_connection(&address, life.epoch).await {
                StreamEnd::Leader(leader) => self.router_selector.set_leader_hint(&leader),
                StreamEnd::Fenced => {
                    // A full queue already holds the same information.
                    let _ = self.fences.try_send(life.epoch);
                    if self.next_registration(life).await.is_err() {
                        return;
                    }
                    self.router_selector.set_leader_hint(&address);
                }
                StreamEnd::Rejoined => self.router_selector.set_leader_hint(&address),
                StreamEnd::Refused(cause) => {
                    said.refused(&address, cause);
                    continue;
                }
                StreamEnd::Lost(cause) => {
                    said.lost(self.shard, &address, &cause);
                    continue;
                }
            }
            said.found();
        }
    }

    async fn next_registration(&mut self, life: Registration) -> Result<(), watch::error::RecvError> {
        self.registrations.wait_for(|now| *now != Some(life)).await.map(drop)
    }

    /// Runs one connection until it ends.
    async fn run_connection(&mut self, address: &str, epoch: Epoch) -> StreamEnd {
        let mut client = match connect(address, &self.link.identity).await {
            Ok(client) => client,
            Err(cause) => return StreamEnd::Lost(cause),
        };
        let (send, stream) = mpsc::channel(STREAM_BUFFER);
        // The first message identifies the node, so that the leader can adopt the epoch before any
        // batch.
        let (seq, digest) = self
            .outbox(|outbox| (outbox.epoch() == Some(epoch)).then(|| outbox.acked_digest()))
            .flatten()
            .unwrap_or_default();
        let digest = convert::node_digest_to_bytes(digest);
        let hello = pb::Heartbeat { seq: seq.0, digest, ..pb::Heartbeat::default() };
        let hello = announce_request::Body::Heartbeat(hello);
        if send.try_send(self.link.request(self.shard, epoch, hello)).is_err() {
            return StreamEnd::Lost("own stream closed".to_owned());
        }
        match timeout(CALL_TIMEOUT, client.announce(ReceiverStream::new(stream))).await {
            Ok(Ok(replies)) => self.stream(address, epoch, &send, replies.into_inner()).await,
            Ok(Err(status)) => stream_end(&status),
            Err(_) => StreamEnd::Lost("the announce stream was not opened in time".to_owned()),
        }
    }

    async fn stream(
        &mut self,
        address: &str,
        epoch: Epoch,
        send: &mpsc::Sender<pb::AnnounceRequest>,
        mut replies: Streaming<pb::AnnounceReply>,
    ) -> StreamEnd {
        self.outbox(|outbox| outbox.restart());
        let mut filled = self.link.shared().filled.subscribe();
        let mut lives = self.registrations.clone();
        let mut hold_until = Instant::now();
        loop {
            filled.mark_unchanged();
            if Instant::now() >= hold_until
                && let Err(ended) = self.send_batches(epoch, send).await
            {
                return ended;
            }
            tokio::select! {
                changed = filled.changed() => if changed.is_err() {
                    return StreamEnd::Lost("the node is stopping".to_owned());
                },
                () = registration_changed(&mut lives, epoch) => return StreamEnd::Rejoined,
                () = sleep_until(hold_until), if Instant::now() < hold_until => {}
                reply = replies.message() => match reply {
                    Ok(Some(reply)) => {
                        // Only an acknowledgement proves that this router leads the shard and knows
                        // our epoch.
                        if matches!(reply.body, Some(announce_reply::Body::Ack(_))) {
                            self.router_selector.succeeded(address);
                        }
                        match self.on_reply(epoch, reply).await {
                            Ok(Some(wait)) => hold_until = Instant::now() + wait,
                            Ok(None) => {}
                            Err(ended) => return ended,
                        }
                    }
                    Ok(None) => return StreamEnd::Lost("the router closed the stream".to_owned()),
                    Err(status) => return stream_end(&status),
                },
            }
        }
    }

    fn outbox<T>(&self, work: impl FnOnce(&mut super::outbox::Outbox) -> T) -> Option<T> {
        self.link.shared().outboxes.lock().shard(self.shard).map(work)
    }

    async fn send_batches(
        &self,
        epoch: Epoch,
        send: &mpsc::Sender<pb::AnnounceRequest>,
    ) -> Result<(), StreamEnd> {
        loop {
            // Changes of a later epoch must not be sent under this one.
            let of_epoch = |outbox: &mut super::outbox::Outbox| {
                if outbox.epoch() == Some(epoch) { outbox.next_batch() } else { None }
            };
            let Some(batch) = self.outbox(of_epoch).flatten() else { break };
            if send.send(self.request(epoch, batch)).await.is_err() {
                return Err(StreamEnd::Lost("stream closed".to_owned()));
            }
        }
        if self.outbox(|outbox| outbox.stale() && outbox.epoch() == Some(epoch)).unwrap_or(false) {
            // It signals `filled`, which continues this loop.
            self.reannounce(None).await;
        }
        Ok(())
    }

    fn request(&self, epoch: Epoch, batch: AnnounceBatch) -> pb::AnnounceRequest {
        let node = self.link.record.node;
        let announcement = Announcement { node, epoch, seq: batch.seq, changes: batch.changes };
        let mut request =
            pb::AnnounceRequest { group: self.shard.into(), ..convert::announcement_to_pb(&announcement) };
        if let Some(announce_request::Body::Batch(message)) = &mut request.body {
            message.digest = convert::node_digest_to_bytes(batch.digest);
        }
        request
    }

    /// Handles a reply. Returns a pause before the next batch, or the end of the stream.
    async fn on_reply(
        &mut self,
        epoch: Epoch,
        reply: pb::AnnounceReply,
    ) -> Result<Option<Duration>, StreamEnd> {
        match reply.body {
            Some(announce_reply::Body::Ack(ack)) => self.acked(epoch, Seq(ack.seq)),
            Some(announce_reply::Body::Resync(resync)) => {
                let expected = resync.expected;
                tracing::info!(
                    shard = self.shard,
                    expected,
                    "the leader misses announcements; sending all anew"
                );
                self.reannounce((expected > 0).then_some(Seq(expected))).await;
            }
            Some(announce_reply::Body::Fenced(_)) => return Err(StreamEnd::Fenced),
            Some(announce_reply::Body::NotLeader(other)) => return Err(StreamEnd::Leader(other.address)),
            Some(announce_reply::Body::Directives(directives)) => {
                self.directives_version = self.link.apply_directives(directives).await;
            }
            Some(announce_reply::Body::Busy(busy)) => {
                self.outbox(|outbox| outbox.rewind_to(Seq(busy.seq)));
                return Ok(Some(Duration::from_millis(busy.retry_after_ms.clamp(1, 1000))));
            }
            // Only the control group sends the fleet's statistics.
            Some(announce_reply::Body::Fleet(_)) | None => {}
        }
        Ok(None)
    }

    fn acked(&self, epoch: Epoch, seq: Seq) {
        let mut outboxes = self.link.shared().outboxes.lock();
        if let Some(outbox) = outboxes.shard(self.shard).filter(|outbox| outbox.epoch() == Some(epoch)) {
            outbox.ack(seq);
        }
        // Under the lock, so that the published positions never go back.
        self.link.shared().acked.send_replace(outboxes.acked());
    }

    async fn reannounce(&self, expected: Option<Seq>) {
        let shard = self.shard;
        // Fails only while the node stops.
        let _ = self.link.store.request(|reply| StoreRequest::Reannounce { shard, expected, reply }).await;
    }
}

/// Returns when the node has another epoch, or none.
async fn registration_changed(lives: &mut watch::Receiver<Option<Registration>>, epoch: Epoch) {
    // The sender lives as long as this task.
    let _ = lives.wait_for(|life| life.is_none_or(|life| life.epoch != epoch)).await;
}
