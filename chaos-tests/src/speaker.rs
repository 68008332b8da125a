//! A stand-in node: joins, announces what it is told to hold, starts anew, falls silent. No bytes.
//!
//! Keeps one batch under way and sends it again until a router acknowledges it, whoever leads. Not here:
//! when it is told what (`drive.rs`), and a real node (`kvfleet-node` has its own suites).

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

use crate::cluster::{CALL_TIMEOUT, Contacts};
use crate::oracle::{Holdings, Oracle};
use crate::workload::{chain, shard_of, shard_of_node};

/// Orders that wait for a stand-in node; above it the driver waits, so that kills meet work under way.
pub const ORDERS_MAX: usize = 4;

/// Between two heartbeats, as real nodes do.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// Heartbeats after which a batch without an answer is taken elsewhere: five seconds.
const UNANSWERED_BEATS_MAX: u32 = 50;

/// Before another router is tried.
const PAUSE: Duration = Duration::from_millis(20);

/// What a stand-in node is told.
pub enum Order {
    /// Hold this many first blocks of these chains.
    Hold(Vec<(u32, u32)>),
    /// Leave out a number.
    SkipNumber,
    /// Start anew with everything held before.
    Restart,
    /// Start anew with nothing.
    RestartEmpty,
    /// Say nothing more.
    Silence,
    /// Speak again.
    Wake,
    /// Answer when everything before is acknowledged: whether the node speaks.
    Settle(oneshot::Sender<bool>),
}

/// A batch under way.
#[derive(Clone)]
struct Batch {
    seq: u64,
    changes: Vec<Change>,
}

/// Why a stream ended.
enum End {
    /// Try another router.
    Elsewhere,
    /// The epoch is over.
    Fenced,
    /// No more orders.
    Finished,
    /// An order ended the stream.
    Ordered,
}

/// A stand-in node.
pub struct Speaker {
    node: u32,
    contacts: Contacts,
    oracle: Arc<Mutex<Oracle>>,
    orders: mpsc::Receiver<Order>,
    epoch: Option<u64>,
    next_seq: u64,
    holdings: Holdings,
    pending: Option<Batch>,
    is_silent: bool,
    position: usize,
    /// Losses of the index that it knows of.
    losses: u64,
    /// Keeps the epoch alive at the control group; ends when it is dropped.
    heart: JoinSet<()>,
}

impl Speaker {
    /// Starts a stand-in node as a task; it ends when the sender of its orders is dropped.
    #[must_use]
    pub fn start(node: u32, contacts: Contacts, oracle: Arc<Mutex<Oracle>>) -> mpsc::Sender<Order> {
        let (sender, orders) = mpsc::channel(ORDERS_MAX);
        let speaker = Speaker {
            node,
            contacts,
            oracle,
            orders,
            epoch: None,
            next_seq: 1,
            holdings: Holdings::new(),
            pending: None,
            is_silent: false,
            position: 0,
            losses: 0,
            heart: JoinSet::new(),
        };
        tokio::spawn(speaker.run());
        sender
    }

    async fn run(mut self) {
        loop {
            self.join_after_loss();
            self.keep_heart();
            let end = match self.epoch {
                _ if self.is_silent => match self.orders.recv().await {
                    Some(order) => self.obey(order),
                    None => End::Finished,
                },
                None => self.join().await,
                Some(epoch) => self.converse(epoch).await.unwrap_or(End::Elsewhere),
            };
            match end {
                End::Finished => return,
                End::Fenced => {
                    self.oracle.lock().leaves_epoch(self.node);
                    (self.epoch, self.heart) = (None, JoinSet::new());
                }
                End::Ordered => {}
                End::Elsewhere => {
                    self.position += 1;
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// An index that was thrown away knows no epochs.
    fn join_after_loss(&mut self) {
        let losses = self.oracle.lock().losses;
        if std::mem::replace(&mut self.losses, losses) < losses {
            (self.epoch, self.heart) = (None, JoinSet::new());
        }
    }

    /// Asks one router for an epoch; with it, everything is announced again.
    async fn join(&mut self) -> End {
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
                End::Ordered
            }
            _ => End::Elsewhere,
        }
    }

    /// Speaks on one stream until it ends. Nothing is lost with it: what is under way is sent again.
    async fn converse(&mut self, epoch: u64) -> Option<End> {
        let (words, receiver) = mpsc::channel(ORDERS_MAX);
        words.send(self.word(epoch, Word::Heartbeat(pb::Heartbeat::default()))).await.ok()?;
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
                        return Some(End::Elsewhere);
                    }
                    words.send(self.word(epoch, Word::Heartbeat(pb::Heartbeat::default()))).await.ok()?;
                }
                reply = next_reply(&mut replies) => {
                    unanswered = 0;
                    match self.hear(epoch, &reply?) {
                        Some(End::Ordered) => self.send(epoch, &words).await?,
                        None => {}
                        end => return end,
                    }
                }
                order = self.orders.recv(), if self.pending.is_none() => match order.map(|order| self.obey(order)) {
                    None => return Some(End::Finished),
                    Some(End::Ordered) if !self.is_silent => self.send(epoch, &words).await?,
                    Some(end) => return Some(end),
                },
            }
        }
    }

    /// A heart beats as long as the node has an epoch and speaks.
    fn keep_heart(&mut self) {
        let beats = self.epoch.filter(|_| !self.is_silent);
        match beats {
            None => self.heart = JoinSet::new(),
            Some(epoch) if self.heart.is_empty() => {
                self.heart.spawn(beat(self.contacts.clone(), self.node, epoch));
            }
            Some(_) => {}
        }
    }

    fn word(&self, epoch: u64, body: Word) -> pb::AnnounceRequest {
        pb::AnnounceRequest {
            node: self.node,
            epoch,
            group: shard_of_node(self.node).into(),
            body: Some(body),
        }
    }

    /// Sends the batch under way, if there is one.
    async fn send(&self, epoch: u64, words: &mpsc::Sender<pb::AnnounceRequest>) -> Option<()> {
        let Some(batch) = &self.pending else { return Some(()) };
        let changes = batch.changes.iter().map(convert::change_to_pb).collect();
        words
            .send(
                self.word(epoch, Word::Batch(pb::Batch { seq: batch.seq, changes, ..pb::Batch::default() })),
            )
            .await
            .ok()
    }

    /// Takes a reply. `Ordered` means that the batch under way must be sent (again).
    fn hear(&mut self, epoch: u64, reply: &Reply) -> Option<End> {
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
                Some(End::Ordered)
            }
            Reply::Busy(_) => Some(End::Ordered),
            Reply::Fenced(_) => Some(End::Fenced),
            Reply::NotLeader(_) => Some(End::Elsewhere),
            Reply::Directives(_) | Reply::Fleet(_) => None,
        }
    }

    fn obey(&mut self, order: Order) -> End {
        match order {
            Order::Hold(wanted) => {
                let own = |(number, _): &(u32, u32)| shard_of(*number) == shard_of_node(self.node);
                let wanted: Vec<_> = wanted.into_iter().filter(own).collect();
                let changes =
                    wanted.into_iter().filter_map(|(number, len)| self.change(number, len)).collect();
                self.hold_back(changes);
            }
            Order::SkipNumber => self.next_seq += 1,
            Order::Restart => return End::Fenced,
            Order::RestartEmpty => {
                self.holdings.clear();
                return End::Fenced;
            }
            Order::Silence => self.is_silent = true,
            Order::Wake => self.is_silent = false,
            Order::Settle(answer) => drop(answer.send(!self.is_silent)),
        }
        End::Ordered
    }

    /// Puts changes into the batch under way. A batch is there already only when orders came in silence:
    /// then none of it was sent, and they go out together.
    fn hold_back(&mut self, changes: Vec<Change>) {
        match &mut self.pending {
            Some(unsent) => unsent.changes.extend(changes),
            None => self.pending = Some(Batch { seq: self.next_seq, changes }),
        }
    }

    /// What changes when the node is to hold `len` first blocks of a chain.
    fn change(&mut self, number: u32, len: u32) -> Option<Change> {
        let held = self.holdings.insert(number, len).unwrap_or(0);
        let blocks = chain(number);
        let (held, len) = (held as usize, len as usize);
        match len.cmp(&held) {
            std::cmp::Ordering::Greater => Some(stored(&blocks, held, len)),
            std::cmp::Ordering::Less => {
                self.oracle.lock().falls_to(self.node, number, len as u32);
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

/// Tells the control group again and again that a node lives, whoever leads.
async fn beat(contacts: Contacts, node: u32, epoch: u64) {
    for position in 0.. {
        let _ended = beat_at(&contacts, position, node, epoch).await;
        sleep(PAUSE).await;
    }
}

async fn beat_at(contacts: &Contacts, position: usize, node: u32, epoch: u64) -> Option<()> {
    let (words, receiver) = mpsc::channel(ORDERS_MAX);
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
