//! The stream that announces to one shard of the index, to whichever router leads it.
//!
//! Lives as long as the node, through all its epochs. Not here: epochs (`link`), and what is announced under
//! which number (`outbox`).

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

use super::link::{Life, Link};
use super::outbox::Batch;
use super::seek::Seek;
use super::session::{CALL_TIMEOUT, Ended, STREAM_AHEAD, Said, connect, ended};
use crate::store::Ask;

/// See the module.
pub(super) struct ShardStream {
    link: Arc<Link>,
    shard: u16,
    seek: Seek,
    lives: watch::Receiver<Option<Life>>,
    /// Where epochs go that the routers call over.
    fences: mpsc::Sender<Epoch>,
    directives_version: u64,
}

impl ShardStream {
    pub(super) fn new(
        link: Arc<Link>,
        shard: u16,
        lives: watch::Receiver<Option<Life>>,
        fences: mpsc::Sender<Epoch>,
    ) -> ShardStream {
        let seek = Seek::new(&link.routers);
        ShardStream { link, shard, seek, lives, fences, directives_version: 0 }
    }

    pub(super) async fn run(mut self) {
        let mut said = Said::default();
        while let Ok(life) = self.lives.wait_for(Option::is_some).await.map(|life| *life) {
            let Some((life, (address, wait))) = life.zip(self.seek.next()) else { return };
            sleep(wait).await;
            match self.visit(&address, life.epoch).await {
                Ended::Leader(leader) => self.seek.leader_is(&leader),
                Ended::Fenced => {
                    // A full queue says the same already.
                    let _ = self.fences.try_send(life.epoch);
                    if self.next_life(life).await.is_err() {
                        return;
                    }
                    self.seek.leader_is(&address);
                }
                Ended::Rejoined => self.seek.leader_is(&address),
                Ended::Refused(cause) => {
                    said.refused(&address, cause);
                    continue;
                }
                Ended::Lost(cause) => {
                    said.lost(self.shard, &address, &cause);
                    continue;
                }
            }
            said.found();
        }
    }

    async fn next_life(&mut self, life: Life) -> Result<(), watch::error::RecvError> {
        self.lives.wait_for(|now| *now != Some(life)).await.map(drop)
    }

    /// One connection from its opening to its end.
    async fn visit(&mut self, address: &str, epoch: Epoch) -> Ended {
        let mut client = match connect(address, &self.link.identity).await {
            Ok(client) => client,
            Err(cause) => return Ended::Lost(cause),
        };
        let (send, stream) = mpsc::channel(STREAM_AHEAD);
        // The first message says who this is, so that the leader can take the epoch over before any news.
        let (seq, digest) = self
            .outbox(|outbox| (outbox.epoch() == Some(epoch)).then(|| outbox.acked_digest()))
            .flatten()
            .unwrap_or_default();
        let digest = convert::node_digest_to_bytes(digest);
        let hello = pb::Heartbeat { seq: seq.0, digest, ..pb::Heartbeat::default() };
        let hello = announce_request::Body::Heartbeat(hello);
        if send.try_send(self.link.request(self.shard, epoch, hello)).is_err() {
            return Ended::Lost("own stream closed".to_owned());
        }
        match timeout(CALL_TIMEOUT, client.announce(ReceiverStream::new(stream))).await {
            Ok(Ok(replies)) => self.stream(address, epoch, &send, replies.into_inner()).await,
            Ok(Err(status)) => ended(&status),
            Err(_) => Ended::Lost("the announce stream was not opened in time".to_owned()),
        }
    }

    async fn stream(
        &mut self,
        address: &str,
        epoch: Epoch,
        send: &mpsc::Sender<pb::AnnounceRequest>,
        mut replies: Streaming<pb::AnnounceReply>,
    ) -> Ended {
        self.outbox(|outbox| outbox.restart());
        let mut filled = self.link.shared().filled.subscribe();
        let mut lives = self.lives.clone();
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
                    return Ended::Lost("the node is stopping".to_owned());
                },
                () = other_life(&mut lives, epoch) => return Ended::Rejoined,
                () = sleep_until(hold_until), if Instant::now() < hold_until => {}
                reply = replies.message() => match reply {
                    Ok(Some(reply)) => {
                        // Only an acknowledgement says that this router leads and knows our epoch.
                        if matches!(reply.body, Some(announce_reply::Body::Ack(_))) {
                            self.seek.worked(address);
                        }
                        match self.on_reply(epoch, reply).await {
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

    fn outbox<T>(&self, work: impl FnOnce(&mut super::outbox::Outbox) -> T) -> Option<T> {
        self.link.shared().outboxes.lock().shard(self.shard).map(work)
    }

    async fn send_batches(
        &self,
        epoch: Epoch,
        send: &mpsc::Sender<pb::AnnounceRequest>,
    ) -> Result<(), Ended> {
        loop {
            // What was filled for a later epoch must not go out under this one.
            let of_epoch = |outbox: &mut super::outbox::Outbox| {
                if outbox.epoch() == Some(epoch) { outbox.next_batch() } else { None }
            };
            let Some(batch) = self.outbox(of_epoch).flatten() else { break };
            if send.send(self.request(epoch, batch)).await.is_err() {
                return Err(Ended::Lost("stream closed".to_owned()));
            }
        }
        if self.outbox(|outbox| outbox.stale() && outbox.epoch() == Some(epoch)).unwrap_or(false) {
            // Answered through `filled`, which brings us back here.
            self.reannounce(None).await;
        }
        Ok(())
    }

    fn request(&self, epoch: Epoch, batch: Batch) -> pb::AnnounceRequest {
        let node = self.link.record.node;
        let announcement = Announcement { node, epoch, seq: batch.seq, changes: batch.changes };
        let mut request =
            pb::AnnounceRequest { group: self.shard.into(), ..convert::announcement_to_pb(&announcement) };
        if let Some(announce_request::Body::Batch(message)) = &mut request.body {
            message.digest = convert::node_digest_to_bytes(batch.digest);
        }
        request
    }

    /// Obeys a reply. A pause to keep before sending on, or the end of the stream.
    async fn on_reply(&mut self, epoch: Epoch, reply: pb::AnnounceReply) -> Result<Option<Duration>, Ended> {
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
            Some(announce_reply::Body::Fenced(_)) => return Err(Ended::Fenced),
            Some(announce_reply::Body::NotLeader(other)) => return Err(Ended::Leader(other.address)),
            Some(announce_reply::Body::Directives(directives)) => {
                self.directives_version = self.link.obey(directives).await;
            }
            Some(announce_reply::Body::Busy(busy)) => {
                self.outbox(|outbox| outbox.again_from(Seq(busy.seq)));
                return Ok(Some(Duration::from_millis(busy.retry_after_ms.clamp(1, 1000))));
            }
            // Of all nodes only the control group speaks.
            Some(announce_reply::Body::Fleet(_)) | None => {}
        }
        Ok(None)
    }

    fn acked(&self, epoch: Epoch, seq: Seq) {
        let mut outboxes = self.link.shared().outboxes.lock();
        if let Some(outbox) = outboxes.shard(self.shard).filter(|outbox| outbox.epoch() == Some(epoch)) {
            outbox.ack(seq);
        }
        // Under the lock, so that what is told never goes back.
        self.link.shared().acked.send_replace(outboxes.acked());
    }

    async fn reannounce(&self, expected: Option<Seq>) {
        let shard = self.shard;
        // Refused only while the node stops.
        let _ = self.link.store.ask(|reply| Ask::Reannounce { shard, expected, reply }).await;
    }
}

/// Returns once the node has another epoch, or none.
async fn other_life(lives: &mut watch::Receiver<Option<Life>>, epoch: Epoch) {
    // The sender lives as long as this task.
    let _ = lives.wait_for(|life| life.is_none_or(|life| life.epoch != epoch)).await;
}
