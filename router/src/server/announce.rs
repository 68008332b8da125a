//! A node's streams: heartbeats to the leader of the control group, batches to the leader of each shard;
//! acknowledgements, resyncs and directives out.
//!
//! The first message says which node speaks, under which epoch, to which group. A shard that does not know the
//! epoch yet takes it over from the control group before it listens. Two tasks per stream: the reader takes
//! messages, hands batches to the shard's ingest and counts the node as heard; the teller waits for the verdicts
//! in order. Both write to one bounded channel. Not here: when a batch is proposed (`crate::ingest`) and what it
//! does (`kv_core::index`).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId};
use kv_core::index::command::{AnnounceOutcome, Announcement, Applied, Command, NodeRecord};
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::{convert, pb};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{Shared, check, leader_only, millis, not_leader};
use crate::directives::told_at;
use crate::groups::Group;
use crate::ingest::{Ingest, Verdict, blocks_of};
use crate::raft::CONTROL;
use crate::raft::handle::LeaderAt;
use crate::view::holders;

/// Replies waiting for a node that reads slowly; above it the stream waits, and the node falls silent.
const REPLIES_MAX: usize = 64;

/// Batches of one node under way: above it the node is told to slow down.
const VERDICTS_MAX: usize = 256;

/// When a node should try again after `Busy`: about two proposals later.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// How often a stream looks whether this router still leads.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Longest a new stream may keep its first message to itself.
const FIRST_WORD_MAX: Duration = Duration::from_secs(2);

/// Longest a shard's leader waits until its control replica has heard of an epoch: a follower lags by a
/// heartbeat or two.
const EPOCH_WAIT_MAX: Duration = Duration::from_secs(2);

type Replies = mpsc::Sender<Result<pb::AnnounceReply, Status>>;

/// Opens a stream of one node.
pub(super) async fn open(
    shared: Arc<Shared>,
    mut words: Streaming<pb::AnnounceRequest>,
) -> Result<ReceiverStream<Result<pb::AnnounceReply, Status>>, Status> {
    let first = tokio::time::timeout(FIRST_WORD_MAX, words.message()).await;
    let first = first
        .map_err(|_| check::invalid("the first message of a stream says who speaks: send it at once"))?;
    let first = first?.ok_or_else(|| check::invalid("a stream without messages"))?;
    let group = Arc::clone(shared.group(first.group)?);
    leader_only(&group)?;
    // A leader that has just won may not have applied what its predecessor committed; without this a node
    // whose join is in those entries would be told that it is fenced.
    if !group.consensus.caught_up().await {
        return Err(not_leader(None));
    }
    let (replies, receiver) = mpsc::channel(REPLIES_MAX);
    let (verdicts, pending) = mpsc::channel(VERDICTS_MAX);
    tokio::spawn(tell(pending, replies.clone()));
    let speaker = Speaker { node: NodeId(first.node), epoch: Epoch(first.epoch), group: first.group };
    let stream = NodeStream { shared, group, replies, verdicts, speaker, refused: None };
    tokio::spawn(stream.run(first, words));
    Ok(ReceiverStream::new(receiver))
}

/// Who speaks on a stream, and to which group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Speaker {
    node: NodeId,
    epoch: Epoch,
    group: u32,
}

struct NodeStream {
    shared: Arc<Shared>,
    group: Arc<Group>,
    replies: Replies,
    verdicts: mpsc::Sender<(u64, oneshot::Receiver<Verdict>)>,
    speaker: Speaker,
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
    async fn run(mut self, first: pb::AnnounceRequest, words: Streaming<pb::AnnounceRequest>) {
        let stop = self.shared.stop.clone();
        let end = stop.run_until_cancelled(self.converse(first, words)).await.unwrap_or(End::Gone);
        let last = match end {
            End::Said(reply) => Ok(pb::AnnounceReply { body: Some(reply) }),
            End::Broken(status) => Err(status),
            End::Gone => return,
        };
        drop(self.replies.send(last).await);
    }

    async fn converse(
        &mut self,
        first: pb::AnnounceRequest,
        mut words: Streaming<pb::AnnounceRequest>,
    ) -> End {
        let opened = match self.ingest() {
            Some(_) => self.admitted().await,
            None => Ok(()),
        };
        if let Err(end) = opened {
            return end;
        }
        if let Err(end) = self.hear(first).await {
            return end;
        }
        let mut directives = self.shared.directives.clone();
        directives.mark_changed();
        let mut fleet = self.shared.fits.told.clone();
        fleet.mark_changed();
        let mut look = tokio::time::interval(LOOK_EVERY);
        let is_control = self.ingest().is_none();
        loop {
            let ended = tokio::select! {
                word = words.message() => match word {
                    Ok(Some(word)) => self.hear(word).await,
                    Ok(None) | Err(_) => Err(End::Gone),
                },
                Ok(()) = directives.changed(), if is_control => {
                    let now_ms = self.shared.unix.now_ms();
                    let newest = told_at(&directives.borrow_and_update(), now_ms);
                    self.say(Reply::Directives(newest)).await
                }
                Ok(()) = fleet.changed(), if is_control => {
                    let newest = fleet.borrow_and_update().as_deref().cloned();
                    match newest {
                        Some(newest) => self.say(Reply::Fleet(newest)).await,
                        None => Ok(()),
                    }
                }
                _ = look.tick() => match self.still_leads().and_then(|()| self.still_live()) {
                    Ok(()) => self.ask_for_all().await,
                    end => end,
                },
            };
            if let Err(end) = ended {
                return end;
            }
        }
    }

    /// Where the batches of this stream go; the control group takes none.
    fn ingest(&self) -> Option<&Ingest> {
        self.shared.ingests.get(usize::from(self.group.number().checked_sub(1)?))
    }

    fn still_leads(&self) -> Result<(), End> {
        let consensus = &self.group.consensus;
        if consensus.holds_office() {
            return Ok(());
        }
        // A leader that lost its quorum does not know who leads now.
        let id = consensus.id();
        Err(End::Said(not_leader_reply(consensus.leader().filter(|leader| leader.router != id))))
    }

    /// A node that was fenced hears of it here, and a stream whose node vanished ends.
    fn still_live(&self) -> Result<(), End> {
        if self.is_live() { Ok(()) } else { Err(End::Said(Reply::Fenced(pb::Fenced {}))) }
    }

    /// Asks for everything anew when what the index lists of the node was found to be wrong. What is under way goes
    /// on under its numbers, and all of it comes after.
    async fn ask_for_all(&self) -> Result<(), End> {
        if self.shared.truth.takes_wanted(self.group.number(), self.speaker.node) {
            return self.say(Reply::Resync(pb::Resync { expected: 0 })).await;
        }
        Ok(())
    }

    fn is_live(&self) -> bool {
        let control = self.shared.control().published.read();
        holders::is_live(&control.index, self.speaker.node, self.speaker.epoch)
    }

    /// Waits until the control replica knows the epoch, and brings it into the shard if it is new there.
    async fn admitted(&self) -> Result<(), End> {
        let record = match tokio::time::timeout(EPOCH_WAIT_MAX, self.record()).await {
            Ok(record) => record?,
            // Not heard of here in time: another router may know more.
            Err(_) => return Err(End::Said(not_leader_reply(None))),
        };
        let Speaker { node, epoch, .. } = self.speaker;
        let known = self.group.published.read().index.next_seq(node).map(|(known, _)| known);
        if known >= Some(epoch) {
            return Ok(());
        }
        let admit = Command::Admit { record, epoch };
        match self.group.consensus.propose(&admit).await {
            // Nodes of another model may wait to be swept from the shard: the node comes again.
            Ok((_, Applied::Refused(refusal))) => {
                tracing::warn!(%node, %epoch, shard = self.group.number(), %refusal, "an epoch was not taken over");
                Err(End::Said(not_leader_reply(None)))
            }
            Ok(_) => Ok(()),
            Err(error) => {
                tracing::debug!(%node, %epoch, %error, "an epoch was not taken over; the node will ask again");
                Err(End::Said(not_leader_reply(None)))
            }
        }
    }

    /// The node as the control group knows it, once it knows this epoch.
    async fn record(&self) -> Result<NodeRecord, End> {
        let Speaker { node, epoch, .. } = self.speaker;
        let mut changes = self.shared.control().published.changes();
        loop {
            changes.mark_unchanged();
            {
                let control = self.shared.control().published.read();
                if control.index.is_over(node, epoch) {
                    return Err(End::Said(Reply::Fenced(pb::Fenced {})));
                }
                if let Some(state) = control.index.node(node).filter(|state| state.epoch == epoch) {
                    return Ok(state.record.clone());
                }
            }
            if changes.changed().await.is_err() {
                return Err(End::Gone);
            }
        }
    }

    async fn say(&self, reply: Reply) -> Result<(), End> {
        let reply = Ok(pb::AnnounceReply { body: Some(reply) });
        self.replies.send(reply).await.map_err(|_| End::Gone)
    }

    async fn hear(&mut self, word: pb::AnnounceRequest) -> Result<(), End> {
        let speaker = Speaker { node: NodeId(word.node), epoch: Epoch(word.epoch), group: word.group };
        if self.speaker != speaker {
            let text = "a stream belongs to one node, one epoch and one group: open another one after a join";
            return Err(End::Broken(check::invalid(text)));
        }
        self.still_live()?;
        match word.body {
            Some(Word::Batch(batch)) => self.take(&batch).await,
            Some(Word::Heartbeat(beat)) => {
                if self.group.number() == CONTROL {
                    self.shared.silence.lock().heard(speaker.node, speaker.epoch, self.shared.clock.now());
                    // What is not taken is no reason to hear the node no more: it may be of another release.
                    if let Some(seen) = &beat.seen {
                        let took = self.shared.fits.heard(speaker.node, speaker.epoch, seen);
                        self.shared.metrics.fits_heard(took);
                    }
                } else {
                    let digest = own_digest(&beat.digest)?;
                    let group = self.group.number();
                    self.shared.truth.stands(group, speaker.node, speaker.epoch, beat.seq, digest);
                }
                Ok(())
            }
            None => Err(End::Broken(check::invalid("a message on this stream is a batch or a heartbeat"))),
        }
    }

    /// Hands a batch in, or answers `Busy`.
    async fn take(&mut self, batch: &pb::Batch) -> Result<(), End> {
        let seq = batch.seq;
        if self.refused.is_some_and(|refused| seq > refused) {
            return self.busy(seq).await;
        }
        let Some(ingest) = self.ingest() else {
            let text = "the control group takes no batches: send them to the shard that lists their blocks";
            return Err(End::Broken(check::invalid(text)));
        };
        let announcement = convert::announcement_from_pb(self.speaker.node.0, self.speaker.epoch.0, batch)
            .map_err(check::invalid)
            .and_then(|announcement| self.within_limits(announcement))
            .map_err(End::Broken)?;
        let digest = own_digest(&batch.digest)?;
        let Ok(place) = self.verdicts.clone().try_reserve_owned() else { return self.refuse(seq).await };
        // Before it can be applied, so that there is something to compare with then.
        self.shared.truth.announced(self.group.number(), &announcement, digest);
        match ingest.offer(announcement) {
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
        let limits = *self.group.published.read().index.limits();
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

/// A node's digest of itself, as it came.
fn own_digest(bytes: &[u8]) -> Result<Option<u128>, End> {
    convert::node_digest_from_bytes("digest", bytes).map_err(|error| End::Broken(check::invalid(error)))
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
