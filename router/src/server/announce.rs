//! A node's stream: batches and heartbeats in; acknowledgements, resyncs and directives out. Leader only.
//!
//! Two tasks per stream. The reader takes messages, hands batches to the ingest and counts the node as
//! heard; the teller waits for the verdicts in order. Both write to one bounded channel. Not here: when a
//! batch is proposed (`crate::ingest`) and what it does (`kv_core::index`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId};
use kv_core::index::command::{AnnounceOutcome, Announcement, Command};
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::{convert, pb};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{Shared, check, millis, not_leader};
use crate::ingest::{Verdict, blocks_of};
use crate::raft::handle::LeaderAt;

/// Replies waiting for a node that reads slowly; above it the stream waits, and the node falls silent.
const REPLIES_MAX: usize = 64;

/// Batches of one node under way: above it the node is told to slow down.
const VERDICTS_MAX: usize = 256;

/// When a node should try again after `Busy`: about two proposals later.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// How often a stream looks whether this router still leads.
const LOOK_EVERY: Duration = Duration::from_millis(50);

type Replies = mpsc::Sender<Result<pb::AnnounceReply, Status>>;

/// Opens the stream of one node.
pub(super) async fn open(
    shared: Arc<Shared>,
    words: Streaming<pb::AnnounceRequest>,
) -> Result<ReceiverStream<Result<pb::AnnounceReply, Status>>, Status> {
    shared.leader_only()?;
    // A leader that has just won may not have applied what its predecessor committed; without this a node
    // whose join is in those entries would be told that it is fenced.
    if !shared.consensus.caught_up().await {
        return Err(not_leader(None));
    }
    let (replies, receiver) = mpsc::channel(REPLIES_MAX);
    let (verdicts, pending) = mpsc::channel(VERDICTS_MAX);
    tokio::spawn(tell(pending, replies.clone()));
    let stream = NodeStream { shared, replies, verdicts, speaker: None, refused: None };
    tokio::spawn(stream.run(words));
    Ok(ReceiverStream::new(receiver))
}

struct NodeStream {
    shared: Arc<Shared>,
    replies: Replies,
    verdicts: mpsc::Sender<(u64, oneshot::Receiver<Verdict>)>,
    /// Who speaks on this stream; the first message says it.
    speaker: Option<(NodeId, Epoch)>,
    /// Lowest batch number that was answered `Busy`: later ones would only be gaps.
    refused: Option<u64>,
}

/// Why a stream ends.
enum End {
    /// After this last word.
    Said(Reply),
    /// With an error.
    Broken(Status),
    /// The node went away, or this router stops.
    Gone,
}

impl NodeStream {
    async fn run(mut self, words: Streaming<pb::AnnounceRequest>) {
        let stop = self.shared.stop.clone();
        let end = stop.run_until_cancelled(self.converse(words)).await.unwrap_or(End::Gone);
        let last = match end {
            End::Said(reply) => Ok(pb::AnnounceReply { body: Some(reply) }),
            End::Broken(status) => Err(status),
            End::Gone => return,
        };
        drop(self.replies.send(last).await);
    }

    async fn converse(&mut self, mut words: Streaming<pb::AnnounceRequest>) -> End {
        let mut directives = self.shared.directives.clone();
        directives.mark_changed();
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            let ended = tokio::select! {
                word = words.message() => match word {
                    Ok(Some(word)) => self.hear(word).await,
                    Ok(None) | Err(_) => Err(End::Gone),
                },
                Ok(()) = directives.changed() => {
                    let newest = pb::Directives::clone(&directives.borrow_and_update());
                    self.say(Reply::Directives(newest)).await
                }
                _ = look.tick() => self.still_leads().and_then(|()| self.still_live()),
            };
            if let Err(end) = ended {
                return end;
            }
        }
    }

    fn still_leads(&self) -> Result<(), End> {
        let consensus = &self.shared.consensus;
        if consensus.holds_office() {
            return Ok(());
        }
        // A leader that lost its quorum does not know who leads now.
        let id = consensus.id();
        Err(End::Said(not_leader_reply(consensus.leader().filter(|leader| leader.router != id))))
    }

    /// A node that was fenced hears of it here, and a stream whose node vanished ends.
    fn still_live(&self) -> Result<(), End> {
        match self.speaker {
            Some(speaker) if !self.is_live(speaker) => Err(End::Said(Reply::Fenced(pb::Fenced {}))),
            _ => Ok(()),
        }
    }

    async fn say(&self, reply: Reply) -> Result<(), End> {
        let reply = Ok(pb::AnnounceReply { body: Some(reply) });
        self.replies.send(reply).await.map_err(|_| End::Gone)
    }

    async fn hear(&mut self, word: pb::AnnounceRequest) -> Result<(), End> {
        let speaker = (NodeId(word.node), Epoch(word.epoch));
        if *self.speaker.get_or_insert(speaker) != speaker {
            let text = "a stream belongs to one node and one epoch: open another one after a join";
            return Err(End::Broken(check::invalid(text)));
        }
        if !self.is_live(speaker) {
            return Err(End::Said(Reply::Fenced(pb::Fenced {})));
        }
        self.shared.silence.lock().heard(speaker.0, speaker.1, self.shared.clock.now());
        match word.body {
            Some(Word::Batch(batch)) => self.take(speaker, &batch).await,
            Some(Word::Heartbeat(_)) => Ok(()),
            None => Err(End::Broken(check::invalid("a message on this stream is a batch or a heartbeat"))),
        }
    }

    fn is_live(&self, (node, epoch): (NodeId, Epoch)) -> bool {
        let replica = self.shared.published.read();
        replica.index.node(node).is_some_and(|state| state.live && state.epoch == epoch)
    }

    /// Hands a batch in, or answers `Busy`.
    async fn take(&mut self, (node, epoch): (NodeId, Epoch), batch: &pb::Batch) -> Result<(), End> {
        let seq = batch.seq;
        if self.refused.is_some_and(|refused| seq > refused) {
            return self.busy(seq).await;
        }
        let announcement = convert::announcement_from_pb(node.0, epoch.0, batch)
            .map_err(check::invalid)
            .and_then(|announcement| self.within_limits(announcement))
            .map_err(End::Broken)?;
        let Ok(place) = self.verdicts.clone().try_reserve_owned() else { return self.refuse(seq).await };
        match self.shared.ingest.offer(announcement) {
            Ok(verdict) => {
                self.refused = None;
                place.send((seq, verdict));
                Ok(())
            }
            Err(_full) => self.refuse(seq).await,
        }
    }

    fn within_limits(&self, announcement: Announcement) -> Result<Announcement, Status> {
        let (blocks, limit) = (blocks_of(&announcement), self.shared.announce_blocks_max);
        check::at_most("number of blocks in one announcement", blocks, limit)?;
        let limits = *self.shared.published.read().index.limits();
        match check::within_limits(&limits, Command::Announce(vec![announcement]))? {
            Command::Announce(mut one) => one.pop().ok_or_else(|| Status::internal("a batch vanished")),
            _ => Err(Status::internal("a batch became another command")),
        }
    }

    async fn refuse(&mut self, seq: u64) -> Result<(), End> {
        self.refused = Some(self.refused.map_or(seq, |refused| refused.min(seq)));
        self.busy(seq).await
    }

    async fn busy(&self, seq: u64) -> Result<(), End> {
        self.shared.metrics.busy();
        self.say(busy_reply(seq)).await
    }
}

fn busy_reply(seq: u64) -> Reply {
    Reply::Busy(pb::Busy { retry_after_ms: millis(RETRY_AFTER), seq })
}

fn not_leader_reply(leader: Option<LeaderAt>) -> Reply {
    let (leader, address) = leader.map_or((0, String::new()), |at| (at.router, at.address));
    Reply::NotLeader(pb::NotLeader { leader, address })
}

/// Waits for verdicts in the order of the batches and passes them on.
async fn tell(mut pending: mpsc::Receiver<(u64, oneshot::Receiver<Verdict>)>, replies: Replies) {
    // Batches sent behind a lost one are gaps too, but one resync is enough for all of them.
    let mut resynced: Option<u64> = None;
    while let Some((seq, verdict)) = pending.recv().await {
        let reply = match verdict.await {
            Ok(Verdict::Outcome(outcome)) => outcome_reply(seq, outcome),
            Ok(Verdict::NotLeader(leader)) => not_leader_reply(leader),
            Ok(Verdict::Again) => busy_reply(seq),
            // The ingest has ended: this router stops.
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
