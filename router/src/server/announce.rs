//! A node's streams: heartbeats to the leader of the control group, batches to the leader of each
//! shard; acknowledgements, resyncs and directives back.
//!
//! The first message names node, epoch and group. A shard that does not know the epoch yet takes it
//! from the control group first. Each stream has two tasks. The reader receives messages, queues
//! batches at the shard's ingest and records the node as alive; the sender awaits the results in
//! order. Both write to one bounded channel. Not here: when a batch is proposed (`crate::ingest`)
//! and its effect (`kv_core::index`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId};
use kv_core::index::command::{AnnounceOutcome, Announcement, Applied, Command, NodeRecord};
use kvfleet_net::tls::callers::Caller;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::{convert, pb};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{ServerState, check, leader_only, millis, not_leader};
use crate::directives::at_time;
use crate::groups::Group;
use crate::ingest::{AnnounceResult, Ingest, announcement_weight};
use crate::raft::CONTROL;
use crate::raft::handle::LeaderAddress;
use crate::view::holders;

/// Replies queued for a slow node; at the limit the stream stops reading, and the node counts as
/// silent.
const REPLIES_MAX: usize = 64;

/// Batches of one node in flight; at the limit the node gets `Busy`.
const PENDING_BATCHES_MAX: usize = 256;

/// Hint for the next attempt after `Busy`: about two proposals later.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// Interval at which a stream checks that this router still leads.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Timeout of a stream's first message.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time a shard's leader waits until its control replica knows an epoch: a follower lags by
/// a heartbeat or two.
const EPOCH_WAIT_MAX: Duration = Duration::from_secs(2);

type ReplySender = mpsc::Sender<Result<pb::AnnounceReply, Status>>;

/// Opens a stream of one node.
pub(super) async fn open(
    shared: Arc<ServerState>,
    caller: &Caller,
    mut words: Streaming<pb::AnnounceRequest>,
) -> Result<ReceiverStream<Result<pb::AnnounceReply, Status>>, Status> {
    let first = tokio::time::timeout(FIRST_MESSAGE_TIMEOUT, words.message()).await;
    let first = first.map_err(|_| {
        check::invalid("the first message of a stream names node, epoch and group: send it at once")
    })?;
    let first = first?.ok_or_else(|| check::invalid("a stream without messages"))?;
    // Later messages must name the same node.
    caller.require_node(NodeId(first.node))?;
    let group = Arc::clone(shared.group(first.group)?);
    leader_only(&group)?;
    // A new leader may not have applied its predecessor's entries. Without this wait, a node with
    // its join in those entries would be told that it is fenced.
    if !group.consensus.caught_up().await {
        return Err(not_leader(None));
    }
    let (replies, receiver) = mpsc::channel(REPLIES_MAX);
    let (verdicts, pending) = mpsc::channel(PENDING_BATCHES_MAX);
    tokio::spawn(send_results(pending, replies.clone()));
    let identity = StreamIdentity { node: NodeId(first.node), epoch: Epoch(first.epoch), group: first.group };
    let stream = NodeStream { shared, group, replies, results: verdicts, identity, busy_from: None };
    tokio::spawn(stream.run(first, words));
    Ok(ReceiverStream::new(receiver))
}

/// Node, epoch and group of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StreamIdentity {
    node: NodeId,
    epoch: Epoch,
    group: u32,
}

struct NodeStream {
    shared: Arc<ServerState>,
    group: Arc<Group>,
    replies: ReplySender,
    results: mpsc::Sender<(u64, oneshot::Receiver<AnnounceResult>)>,
    identity: StreamIdentity,
    /// Lowest batch number answered with `Busy`: later ones would only be gaps.
    busy_from: Option<u64>,
}

/// Reason for the end of a stream.
enum StreamEnd {
    /// With this last reply.
    Reply(Reply),
    /// With an error.
    Error(Status),
    /// The node disconnected, or this router stops.
    Closed,
}

impl NodeStream {
    async fn run(mut self, first: pb::AnnounceRequest, words: Streaming<pb::AnnounceRequest>) {
        let stop = self.shared.lifecycle.stop().clone();
        let end = stop.run_until_cancelled(self.serve(first, words)).await.unwrap_or(StreamEnd::Closed);
        let last = match end {
            StreamEnd::Reply(reply) => Ok(pb::AnnounceReply { body: Some(reply) }),
            StreamEnd::Error(status) => Err(status),
            StreamEnd::Closed => return,
        };
        drop(self.replies.send(last).await);
    }

    async fn serve(
        &mut self,
        first: pb::AnnounceRequest,
        mut words: Streaming<pb::AnnounceRequest>,
    ) -> StreamEnd {
        let opened = match self.ingest() {
            Some(_) => self.admit_epoch().await,
            None => Ok(()),
        };
        if let Err(end) = opened {
            return end;
        }
        if let Err(end) = self.handle(first).await {
            return end;
        }
        let mut directives = self.shared.nodes.directives().clone();
        directives.mark_changed();
        let mut fleet = self.shared.nodes.reuse_stats().published.clone();
        fleet.mark_changed();
        let mut look = tokio::time::interval(CHECK_INTERVAL);
        let is_control = self.ingest().is_none();
        loop {
            let ended = tokio::select! {
                word = words.message() => match word {
                    Ok(Some(word)) => self.handle(word).await,
                    Ok(None) | Err(_) => Err(StreamEnd::Closed),
                },
                Ok(()) = directives.changed(), if is_control => {
                    let now_ms = self.shared.unix.now_ms();
                    let newest = at_time(&directives.borrow_and_update(), now_ms);
                    self.send(Reply::Directives(newest)).await
                }
                Ok(()) = fleet.changed(), if is_control => {
                    let newest = fleet.borrow_and_update().as_deref().cloned();
                    match newest {
                        Some(newest) => self.send(Reply::Fleet(newest)).await,
                        None => Ok(()),
                    }
                }
                _ = look.tick() => match self.still_leads().and_then(|()| self.still_live()) {
                    Ok(()) => self.request_resync().await,
                    end => end,
                },
            };
            if let Err(end) = ended {
                return end;
            }
        }
    }

    /// Queue of this stream's batches; `None` for the control group, which takes none.
    fn ingest(&self) -> Option<&Ingest> {
        self.shared.nodes.ingest(self.group.number())
    }

    fn still_leads(&self) -> Result<(), StreamEnd> {
        let consensus = &self.group.consensus;
        if consensus.holds_leader_lease() {
            return Ok(());
        }
        // A leader without its quorum does not know the current leader.
        let id = consensus.id();
        Err(StreamEnd::Reply(not_leader_reply(consensus.leader().filter(|leader| leader.router != id))))
    }

    /// Ends the stream with `Fenced` if the node's epoch is no longer live.
    fn still_live(&self) -> Result<(), StreamEnd> {
        if self.is_live() { Ok(()) } else { Err(StreamEnd::Reply(Reply::Fenced(pb::Fenced {}))) }
    }

    /// Requests a full announcement if the index was found wrong about the node. Batches in flight
    /// keep their numbers; the announcement comes after them.
    async fn request_resync(&self) -> Result<(), StreamEnd> {
        if self.shared.nodes.anti_entropy().take_resync_request(self.group.number(), self.identity.node) {
            return self.send(Reply::Resync(pb::Resync { expected: 0 })).await;
        }
        Ok(())
    }

    fn is_live(&self) -> bool {
        let control = self.shared.control().published.read();
        holders::is_live(&control.index, self.identity.node, self.identity.epoch)
    }

    /// Waits until the control replica knows the epoch, and admits it into the shard if it is new
    /// there.
    async fn admit_epoch(&self) -> Result<(), StreamEnd> {
        let record = match tokio::time::timeout(EPOCH_WAIT_MAX, self.wait_for_record()).await {
            Ok(record) => record?,
            // Unknown here after the wait: another router may know more.
            Err(_) => return Err(StreamEnd::Reply(not_leader_reply(None))),
        };
        let StreamIdentity { node, epoch, .. } = self.identity;
        let known = self.group.published.read().index.next_seq(node).map(|(known, _)| known);
        if known >= Some(epoch) {
            return Ok(());
        }
        let admit = Command::Admit { record, epoch };
        match self.group.consensus.propose(&admit).await {
            // Nodes of another model may still be in the shard: the node retries.
            Ok((_, Applied::Refused(refusal))) => {
                tracing::warn!(%node, %epoch, shard = self.group.number(), %refusal, "an epoch was refused by a shard");
                Err(StreamEnd::Reply(not_leader_reply(None)))
            }
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::debug!(%node, %epoch, %error, "an epoch was not admitted to a shard; the node retries");
                Err(StreamEnd::Reply(not_leader_reply(None)))
            }
        }
    }

    /// The node's record in the control group, once this epoch is known there.
    async fn wait_for_record(&self) -> Result<NodeRecord, StreamEnd> {
        let StreamIdentity { node, epoch, .. } = self.identity;
        let mut changes = self.shared.control().published.watch_entries();
        loop {
            changes.mark_unchanged();
            {
                let control = self.shared.control().published.read();
                if control.index.is_epoch_over(node, epoch) {
                    return Err(StreamEnd::Reply(Reply::Fenced(pb::Fenced {})));
                }
                if let Some(state) = control.index.node(node).filter(|state| state.epoch == epoch) {
                    return Ok(state.record.clone());
                }
            }
            if changes.changed().await.is_err() {
                return Err(StreamEnd::Closed);
            }
        }
    }

    async fn send(&self, reply: Reply) -> Result<(), StreamEnd> {
        let reply = Ok(pb::AnnounceReply { body: Some(reply) });
        self.replies.send(reply).await.map_err(|_| StreamEnd::Closed)
    }

    async fn handle(&mut self, word: pb::AnnounceRequest) -> Result<(), StreamEnd> {
        let identity =
            StreamIdentity { node: NodeId(word.node), epoch: Epoch(word.epoch), group: word.group };
        if self.identity != identity {
            let text = "a stream belongs to one node, one epoch and one group: open another one after a join";
            return Err(StreamEnd::Error(check::invalid(text)));
        }
        self.still_live()?;
        match word.body {
            Some(Word::Batch(batch)) => self.take_batch(&batch).await,
            Some(Word::Heartbeat(beat)) => {
                if self.group.number() == CONTROL {
                    self.shared.nodes.record_heard(identity.node, identity.epoch, self.shared.clock.now());
                    // An invalid report does not end the stream, since it may come from another
                    // release.
                    if let Some(seen) = &beat.block_stats {
                        let took =
                            self.shared.nodes.reuse_stats().record(identity.node, identity.epoch, seen);
                        self.shared.metrics.record_reuse_report(took);
                    }
                } else {
                    let digest = own_digest(&beat.digest)?;
                    let group = self.group.number();
                    self.shared.nodes.anti_entropy().record_heartbeat(
                        group,
                        identity.node,
                        identity.epoch,
                        beat.seq,
                        digest,
                    );
                }
                Ok(())
            }
            None => {
                Err(StreamEnd::Error(check::invalid("a message on this stream is a batch or a heartbeat")))
            }
        }
    }

    /// Queues a batch, or answers `Busy`.
    async fn take_batch(&mut self, batch: &pb::Batch) -> Result<(), StreamEnd> {
        let seq = batch.seq;
        if self.busy_from.is_some_and(|refused| seq > refused) {
            return self.send_busy(seq).await;
        }
        let Some(ingest) = self.ingest() else {
            let text = "the control group takes no batches: send them to the shard that lists their blocks";
            return Err(StreamEnd::Error(check::invalid(text)));
        };
        let announcement = convert::announcement_from_pb(self.identity.node.0, self.identity.epoch.0, batch)
            .map_err(check::invalid)
            .and_then(|announcement| self.within_limits(announcement))
            .map_err(StreamEnd::Error)?;
        let digest = own_digest(&batch.digest)?;
        let Ok(place) = self.results.clone().try_reserve_owned() else { return self.refuse_batch(seq).await };
        // Recorded before it can be applied, so that the comparison has a value then.
        self.shared.nodes.anti_entropy().record_announcement(self.group.number(), &announcement, digest);
        match ingest.offer(announcement) {
            Ok(verdict) => {
                self.busy_from = None;
                place.send((seq, verdict));
                Ok(())
            }
            Err(_full) => self.refuse_batch(seq).await,
        }
    }

    fn within_limits(&self, announcement: Announcement) -> Result<Announcement, Status> {
        let (blocks, limit) = (announcement_weight(&announcement), self.shared.limits.announce_blocks_max());
        check::at_most("number of blocks in one announcement", blocks, limit)?;
        let limits = *self.group.published.read().index.limits();
        match check::within_limits(&limits, Command::Announce(vec![announcement]))? {
            Command::Announce(mut one) => one.pop().ok_or_else(|| Status::internal("a batch vanished")),
            _ => Err(Status::internal("a batch became another command")),
        }
    }

    async fn refuse_batch(&mut self, seq: u64) -> Result<(), StreamEnd> {
        self.busy_from = Some(self.busy_from.map_or(seq, |refused| refused.min(seq)));
        self.send_busy(seq).await
    }

    async fn send_busy(&self, seq: u64) -> Result<(), StreamEnd> {
        self.shared.metrics.record_busy();
        self.send(busy_reply(seq)).await
    }
}

/// Parses the node's own digest.
fn own_digest(bytes: &[u8]) -> Result<Option<u128>, StreamEnd> {
    convert::node_digest_from_bytes("digest", bytes).map_err(|error| StreamEnd::Error(check::invalid(error)))
}

fn busy_reply(seq: u64) -> Reply {
    Reply::Busy(pb::Busy { retry_after_ms: millis(RETRY_AFTER), seq })
}

fn not_leader_reply(leader: Option<LeaderAddress>) -> Reply {
    let (leader, address) = leader.map_or((0, String::new()), |at| (at.router, at.address));
    Reply::NotLeader(pb::NotLeader { leader, address })
}

/// Awaits the results of batches in order and sends them.
async fn send_results(
    mut pending: mpsc::Receiver<(u64, oneshot::Receiver<AnnounceResult>)>,
    replies: ReplySender,
) {
    // Batches after a lost one are gaps too, but one resync suffices for all.
    let mut resynced: Option<u64> = None;
    while let Some((seq, verdict)) = pending.recv().await {
        let reply = match verdict.await {
            Ok(AnnounceResult::Outcome(outcome)) => outcome_reply(seq, outcome),
            Ok(AnnounceResult::NotLeader(leader)) => not_leader_reply(leader),
            Ok(AnnounceResult::Retry) => busy_reply(seq),
            // The ingest has ended, since this router stops.
            Err(_) => return,
        };
        match &reply {
            Reply::Resync(resync) if resynced == Some(resync.expected) => continue,
            Reply::Resync(resync) => resynced = Some(resync.expected),
            _ => resynced = None,
        }
        if replies.send(Ok(pb::AnnounceReply { body: Some(reply) })).await.is_err() {
            return;
        }
    }
}

fn outcome_reply(seq: u64, outcome: AnnounceOutcome) -> Reply {
    match outcome {
        AnnounceOutcome::Applied { .. } => Reply::Ack(pb::Ack { seq }),
        AnnounceOutcome::Duplicate { next } => Reply::Ack(pb::Ack { seq: next.0.saturating_sub(1) }),
        AnnounceOutcome::Gap { expected } => Reply::Resync(pb::Resync { expected: expected.0 }),
        AnnounceOutcome::Fenced => Reply::Fenced(pb::Fenced {}),
    }
}
