//! A fake node: joins, announces commanded holdings, restarts and falls silent. It stores no bytes.
//!
//! It keeps one batch in flight and resends it until some router acknowledges it. Not here: the
//! schedule of commands (`drive.rs`) and real nodes (`kvfleet-node` has its own suites).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Tier};
use kv_core::index::command::Change;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::announce_request::Body as Word;
use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::cluster::{CALL_TIMEOUT, RouterClients};
use crate::oracle::{Holdings, Oracle};
use crate::workload::{chain, shard_of, shard_of_node};

/// Maximum queued commands for a fake node; above it the driver waits, so that kills hit batches in
/// flight.
pub const COMMANDS_MAX: usize = 4;

/// Heartbeat interval of real nodes.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// Heartbeats after which an unanswered batch is sent to another router: five seconds.
const UNANSWERED_BEATS_MAX: u32 = 50;

/// Pause before another router is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// A command to a fake node.
pub enum NodeCommand {
    /// Hold this many leading blocks of these chains.
    Hold(Vec<(u32, u32)>),
    /// Skip an announcement number.
    SkipNumber,
    /// Restart with all holdings.
    Restart,
    /// Restart without holdings.
    RestartEmpty,
    /// Fall silent.
    Silence,
    /// Resume.
    Wake,
    /// Reply when all earlier batches are acknowledged, with whether the node is live.
    Settle(oneshot::Sender<bool>),
}

/// A batch in flight.
#[derive(Clone)]
struct Batch {
    seq: u64,
    changes: Vec<Change>,
}

/// Why a stream ended.
enum StreamEnd {
    /// Try another router.
    OtherRouter,
    /// The epoch is over.
    Fenced,
    /// No more commands.
    Finished,
    /// A command ended the stream.
    Commanded,
}

/// A fake node.
pub struct FakeNode {
    node: u32,
    contacts: RouterClients,
    oracle: Arc<Mutex<Oracle>>,
    commands: mpsc::Receiver<NodeCommand>,
    epoch: Option<u64>,
    next_seq: u64,
    holdings: Holdings,
    pending: Option<Batch>,
    is_silent: bool,
    position: usize,
    /// Losses of the index that it has noticed.
    index_losses: u64,
    /// Keeps the epoch alive at the control group; ends when dropped.
    heartbeat: JoinSet<()>,
}

impl FakeNode {
    /// Starts a fake node as a task; it ends when the sender of its commands is dropped.
    #[must_use]
    pub fn start(
        node: u32,
        contacts: RouterClients,
        oracle: Arc<Mutex<Oracle>>,
    ) -> mpsc::Sender<NodeCommand> {
        let (sender, orders) = mpsc::channel(COMMANDS_MAX);
        let speaker = FakeNode {
            node,
            contacts,
            oracle,
            commands: orders,
            epoch: None,
            next_seq: 1,
            holdings: Holdings::new(),
            pending: None,
            is_silent: false,
            position: 0,
            index_losses: 0,
            heartbeat: JoinSet::new(),
        };
        tokio::spawn(speaker.run());
        sender
    }

    async fn run(mut self) {
        loop {
            self.join_after_loss();
            self.update_heartbeat();
            let end = match self.epoch {
                _ if self.is_silent => match self.commands.recv().await {
                    Some(order) => self.handle_command(order),
                    None => StreamEnd::Finished,
                },
                None => self.join().await,
                Some(epoch) => self.run_stream(epoch).await.unwrap_or(StreamEnd::OtherRouter),
            };
            match end {
                StreamEnd::Finished => return,
                StreamEnd::Fenced => {
                    self.oracle.lock().leaves_epoch(self.node);
                    (self.epoch, self.heartbeat) = (None, JoinSet::new());
                }
                StreamEnd::Commanded => {}
                StreamEnd::OtherRouter => {
                    self.position += 1;
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// An index that was lost knows no epochs.
    fn join_after_loss(&mut self) {
        let losses = self.oracle.lock().index_losses;
        if std::mem::replace(&mut self.index_losses, losses) < losses {
            (self.epoch, self.heartbeat) = (None, JoinSet::new());
        }
    }

    /// Asks one router for an epoch. With it, everything is announced again.
    async fn join(&mut self) -> StreamEnd {
        let request = pb::JoinRequest {
            node: self.node,
            data_address: "127.0.0.1:1".into(),
            control_address: "127.0.0.1:2".into(),
            host: "localhost".into(),
            identity: vec![7; 16],
            block_bytes: 4096,
            ..pb::JoinRequest::default()
        };
        let mut client = self.contacts.client(self.position);
        match timeout(CALL_TIMEOUT, client.join(request)).await {
            Ok(Ok(reply)) => {
                let epoch = reply.into_inner().epoch;
                self.oracle.lock().joined(self.node, epoch);
                self.epoch = Some(epoch);
                self.pending = Some(Batch { seq: 1, changes: everything(&self.holdings) });
                StreamEnd::Commanded
            }
            _ => StreamEnd::OtherRouter,
        }
    }

    /// Runs one stream until it ends. The batch in flight is resent on the next one.
    async fn run_stream(&mut self, epoch: u64) -> Option<StreamEnd> {
        let (words, receiver) = mpsc::channel(COMMANDS_MAX);
        words.send(self.request(epoch, Word::Heartbeat(pb::Heartbeat::default()))).await.ok()?;
        let mut client = self.contacts.client(self.position);
        let request = ReceiverStream::new(receiver);
        let mut replies = timeout(CALL_TIMEOUT, client.announce(request)).await.ok()?.ok()?.into_inner();
        let mut beat = interval(HEARTBEAT);
        let mut unanswered = 0;
        self.send(epoch, &words).await?;
        loop {
            tokio::select! {
                _ = beat.tick() => {
                    unanswered += u32::from(self.pending.is_some());
                    if unanswered > UNANSWERED_BEATS_MAX {
                        return Some(StreamEnd::OtherRouter);
                    }
                    words.send(self.request(epoch, Word::Heartbeat(pb::Heartbeat::default()))).await.ok()?;
                }
                reply = next_reply(&mut replies) => {
                    unanswered = 0;
                    match self.handle_reply(epoch, &reply?) {
                        Some(StreamEnd::Commanded) => self.send(epoch, &words).await?,
                        None => {}
                        end => return end,
                    }
                }
                order = self.commands.recv(), if self.pending.is_none() => match order
                    .map(|order| self.handle_command(order))
                {
                    None => return Some(StreamEnd::Finished),
                    Some(StreamEnd::Commanded) if !self.is_silent => self.send(epoch, &words).await?,
                    Some(end) => return Some(end),
                },
            }
        }
    }

    /// Runs heartbeats while the node has an epoch and is not silent.
    fn update_heartbeat(&mut self) {
        let beats = self.epoch.filter(|_| !self.is_silent);
        match beats {
            None => self.heartbeat = JoinSet::new(),
            Some(epoch) if self.heartbeat.is_empty() => {
                self.heartbeat.spawn(send_heartbeats(self.contacts.clone(), self.node, epoch));
            }
            Some(_) => {}
        }
    }

    fn request(&self, epoch: u64, body: Word) -> pb::AnnounceRequest {
        pb::AnnounceRequest {
            node: self.node,
            epoch,
            group: shard_of_node(self.node).into(),
            body: Some(body),
        }
    }

    /// Sends the batch in flight, if any.
    async fn send(&self, epoch: u64, words: &mpsc::Sender<pb::AnnounceRequest>) -> Option<()> {
        let Some(batch) = &self.pending else { return Some(()) };
        let changes = batch.changes.iter().map(convert::change_to_pb).collect();
        words
            .send(
                self.request(
                    epoch,
                    Word::Batch(pb::Batch { seq: batch.seq, changes, ..pb::Batch::default() }),
                ),
            )
            .await
            .ok()
    }

    /// Handles a reply. `Commanded` means that the batch in flight must be sent (again).
    fn handle_reply(&mut self, epoch: u64, reply: &Reply) -> Option<StreamEnd> {
        match reply {
            Reply::Ack(ack) => {
                if self.pending.as_ref().is_some_and(|batch| batch.seq <= ack.seq) {
                    self.pending = None;
                    self.next_seq = ack.seq + 1;
                    self.oracle.lock().acknowledged(self.node, epoch, ack.seq, &self.holdings);
                }
                None
            }
            Reply::Resync(resync) => {
                let mut changes = vec![Change::Cleared];
                changes.extend(everything(&self.holdings));
                self.pending = Some(Batch { seq: resync.expected, changes });
                Some(StreamEnd::Commanded)
            }
            Reply::Busy(_) => Some(StreamEnd::Commanded),
            Reply::Fenced(_) => Some(StreamEnd::Fenced),
            Reply::NotLeader(_) => Some(StreamEnd::OtherRouter),
            Reply::Directives(_) | Reply::Fleet(_) => None,
        }
    }

    fn handle_command(&mut self, order: NodeCommand) -> StreamEnd {
        match order {
            NodeCommand::Hold(wanted) => {
                let own = |(number, _): &(u32, u32)| shard_of(*number) == shard_of_node(self.node);
                let wanted: Vec<_> = wanted.into_iter().filter(own).collect();
                let changes =
                    wanted.into_iter().filter_map(|(number, len)| self.change(number, len)).collect();
                self.queue_changes(changes);
            }
            NodeCommand::SkipNumber => self.next_seq += 1,
            NodeCommand::Restart => return StreamEnd::Fenced,
            NodeCommand::RestartEmpty => {
                self.holdings.clear();
                return StreamEnd::Fenced;
            }
            NodeCommand::Silence => self.is_silent = true,
            NodeCommand::Wake => self.is_silent = false,
            NodeCommand::Settle(answer) => drop(answer.send(!self.is_silent)),
        }
        StreamEnd::Commanded
    }

    /// Adds changes to the pending batch. A batch is already pending only if commands arrived while
    /// silent: then none of it was sent, and they are sent together.
    fn queue_changes(&mut self, changes: Vec<Change>) {
        match &mut self.pending {
            Some(unsent) => unsent.changes.extend(changes),
            None => self.pending = Some(Batch { seq: self.next_seq, changes }),
        }
    }

    /// The change that makes the node hold `len` leading blocks of a chain.
    fn change(&mut self, number: u32, len: u32) -> Option<Change> {
        let held = self.holdings.insert(number, len).unwrap_or(0);
        let blocks = chain(number);
        let (held, len) = (held as usize, len as usize);
        match len.cmp(&held) {
            std::cmp::Ordering::Greater => Some(stored(&blocks, held, len)),
            std::cmp::Ordering::Less => {
                self.oracle.lock().reduces_to(self.node, number, len as u32);
                Some(Change::Dropped {
                    blocks: blocks[len..held].to_vec(),
                    tier: Tier::Dram,
                    cause: Default::default(),
                })
            }
            std::cmp::Ordering::Equal => None,
        }
    }
}

/// Sends heartbeats to the control group, trying one router after the other.
async fn send_heartbeats(contacts: RouterClients, node: u32, epoch: u64) {
    for position in 0.. {
        let _ended = send_heartbeats_to(&contacts, position, node, epoch).await;
        sleep(PAUSE).await;
    }
}

async fn send_heartbeats_to(contacts: &RouterClients, position: usize, node: u32, epoch: u64) -> Option<()> {
    let (words, receiver) = mpsc::channel(COMMANDS_MAX);
    let word = || pb::AnnounceRequest {
        node,
        epoch,
        group: 0,
        body: Some(Word::Heartbeat(pb::Heartbeat::default())),
    };
    words.send(word()).await.ok()?;
    let mut client = contacts.client(position);
    let opened = timeout(CALL_TIMEOUT, client.announce(ReceiverStream::new(receiver))).await;
    let mut replies = opened.ok()?.ok()?.into_inner();
    let mut beat = interval(HEARTBEAT);
    loop {
        tokio::select! {
            _ = beat.tick() => words.send(word()).await.ok()?,
            reply = next_reply(&mut replies) => if !matches!(reply?, Reply::Directives(_) | Reply::Fleet(_)) {
                return None;
            },
        }
    }
}

async fn next_reply(replies: &mut Streaming<pb::AnnounceReply>) -> Option<Reply> {
    replies.message().await.ok()??.body
}

fn stored(blocks: &[BlockHash], from: usize, to: usize) -> Change {
    let parent = from.checked_sub(1).map(|position| blocks[position]);
    Change::Stored { parent, blocks: blocks[from..to].to_vec(), tier: Tier::Dram }
}

fn everything(holdings: &Holdings) -> Vec<Change> {
    let held = holdings.iter().filter(|(_, len)| **len > 0);
    held.map(|(number, len)| stored(&chain(*number), 0, *len as usize)).collect()
}
