//! The node's end of one connection: reads packets, starts operations, sends what waits.
//!
//! It ends with the client's end of the socket, and only then is what was lent used again. Not here: accepting
//! (`server.rs`), operations (`serving.rs`), and what is lent (`lending.rs`).

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use kv_core::classes::{self, ClassRoom};
use kv_core::id::Class;
use kv_core::lend::Effect;
use kvfleet_proto::data;
use kvfleet_proto::frame::SliceLayout;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::aside::Aside;
use super::awake::Awake;
use super::held::{Copies, Held};
use super::lending::{Begun, Lending};
use super::packet::{Closing, PacketError, ToClient, ToNode, TrayPlace, said_from};
use super::seqpacket::Got;
use super::serving::{Frames, SavePart, Serving};
use super::{
    AT_ONCE_BLOCKS_MAX, AT_ONCE_BYTES_MAX, BLOCKS_PER_ASK_MAX, OPERATIONS_MAX, PACKET_BYTES_MAX, RETRY_AFTER,
    SAVES_MAX,
};
use crate::layered::SLICES_AT_ONCE_MAX;
use crate::wire::{self, Operation};
use crate::{BoxFuture, FetchAnswer, FetchRequest, SaveOffer, SaveRequest};

/// How often the socket is looked at in one turn of the thread: a look takes a quarter of a microsecond, a turn more.
const LOOKS_A_TURN: usize = 4;

/// Loans given back in one packet, above which others have their turn before the next.
const LOANS_AT_ONCE: usize = 64;

/// Packets read at one go, so that operations under way get their turn between.
const PACKETS_AT_ONCE: usize = 32;

/// Blocks that are answered for one connection before others have their turn: some ten microseconds.
const BLOCKS_A_TURN: usize = 128;

/// How long a client that has nothing lent may take to hear that its connection ended.
const GOODBYE: Duration = Duration::from_secs(1);

/// Parts of a save that wait to be looked at.
pub(super) const PARTS_MAX: usize = 1024;

/// Why the node ends a connection.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("a client of this host sent {0}")]
    Packet(#[from] PacketError),
    #[error("a client of this host asked something that makes no sense: {0}")]
    Request(#[from] kvfleet_proto::convert::ConvertError),
    #[error("a client of this host does not keep to the rules: {0}")]
    Loan(#[from] kv_core::lend::UnknownLoan),
    #[error("a client of this host sent {0}")]
    Rule(&'static str),
    #[error("the socket of a client of this host failed: {0}")]
    Socket(#[from] io::Error),
    #[error("a client of this host does not read what it is sent")]
    Slow,
}

/// What each class has at least of the operations of a connection. The host has no other bound that one could fill: each
/// process has a connection, and copies places, of its own.
const PARTS: classes::Parts = [8, 4, 1, 2];

/// One connection after its welcome.
pub(super) struct Connection {
    serving: Serving,
    operations: JoinSet<()>,
    running: BTreeMap<u64, Running>,
    /// One place for each of them.
    places: ClassRoom,
    ids: BTreeMap<Id, u64>,
    buffer: Box<[u8; PACKET_BYTES_MAX]>,
    awake: Awake,
    aside: Aside,
    /// Blocks of operations begun since others had their turn.
    blocks_of_turn: usize,
    /// Copies for saves that may still be under way, also of those that were given up.
    copies: Copies,
}

struct Running {
    abort: AbortHandle,
    class: Class,
    save: Option<Parts>,
    is_cancelled: bool,
}

/// Where a save hears of its frames or pieces, and how many it may still bring.
struct Parts {
    to: mpsc::Sender<SavePart>,
    left: usize,
    /// Whether it may come by layer.
    is_layered: bool,
    /// Until nothing of it is copied any more.
    held: Weak<Held>,
}

/// What the loop woke for.
enum Woken {
    /// The next packet, without having slept for it; nothing when none came in time.
    Came(Option<Got>),
    Read(Read),
    Ended {
        id: Id,
        is_broken: bool,
    },
    Again,
    Tick,
    Closes,
}

/// How far reading went.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Read {
    /// Nothing is there now.
    All,
    /// There may be more.
    Some,
    /// The client is gone.
    End,
}

impl Connection {
    pub(super) fn new(serving: Serving) -> Connection {
        let awake = Awake::new(serving.awake);
        Connection {
            awake,
            aside: Aside::default(),
            serving,
            operations: JoinSet::new(),
            running: BTreeMap::new(),
            places: ClassRoom::new(OPERATIONS_MAX as u64, PARTS),
            ids: BTreeMap::new(),
            buffer: Box::new([0; PACKET_BYTES_MAX]),
            blocks_of_turn: 0,
            copies: Copies::default(),
        }
    }

    /// Serves the client until it is gone. When the node wants to end first (`closes`, or the client breaks a rule), it says so and waits.
    /// `closes` is dropped when that was said.
    pub(super) async fn serve(mut self, mut closes: watch::Receiver<bool>, lease: Duration) {
        let why = match self.run(&mut closes, lease).await {
            Ok(None) => None,
            Ok(Some(why)) => Some(why),
            Err(broken) => {
                if self.serving.said_broken.swap(true, Ordering::Relaxed) {
                    tracing::debug!("{broken}; its connection is ended");
                } else {
                    tracing::warn!("{broken}; its connection is ended, and others that do the same");
                }
                Some(Closing::Protocol)
            }
        };
        let lending = self.serving.lending.clone();
        self.operations.shutdown().await;
        if let Some(why) = why {
            lending.close(&ToClient::Closing(why));
            lending.flush();
            lending.socket().get_ref().end_sending();
            drop(closes);
            self.run_effects().await;
            if lending.numbers().0 > 0 {
                self.wait_for_end(lease).await;
            } else {
                // It reads nothing of ours, so it only has to hear why.
                let _ = timeout(GOODBYE, self.wait_for_end(lease)).await;
            }
        }
        self.copies.ended().await;
        lending.end();
        self.run_effects().await;
    }

    /// Until the client is gone (nothing), or the node ends the connection (why).
    async fn run(
        &mut self,
        closes: &mut watch::Receiver<bool>,
        lease: Duration,
    ) -> Result<Option<Closing>, Broken> {
        let lending = self.serving.lending.clone();
        let mut tick = interval((lease / 8).min(self.serving.stall_timeout / 2));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut awake, mut at_once) = (None, 0);
        loop {
            let is_posting = lending.flush();
            let is_behind = lending.is_behind();
            // The socket comes last: a client that never stops sending keeps nothing else from its turn.
            let woken = tokio::select! {
                biased;
                () = told(closes) => Woken::Closes,
                _ = tick.tick() => Woken::Tick,
                Some(ended) = self.operations.join_next_with_id() => Woken::of(ended),
                () = lending.work() => Woken::Again,
                room = lending.socket().get_ref().room(), if is_posting => {
                    room?;
                    Woken::Again
                }
                came = look(&lending, &mut self.buffer, awake), if awake.is_some() && !is_behind => Woken::Came(came?),
                ready = lending.socket().readable(), if awake.is_none() && !is_behind => Woken::Read(self.read(ready?).await?),
            };
            match woken {
                Woken::Read(Read::End) => return Ok(None),
                Woken::Closes => return Ok(Some(Closing::Stops)),
                Woken::Ended { id, is_broken } => self.ended(id, is_broken),
                Woken::Came(None) => {
                    self.awake.missed();
                    awake = None;
                }
                Woken::Came(Some(got)) => {
                    self.awake.came();
                    if self.take(got).await? == Read::End {
                        return Ok(None);
                    }
                    at_once += 1;
                    if at_once % PACKETS_AT_ONCE == 0 {
                        tokio::task::yield_now().await;
                    }
                    awake = self.wait();
                }
                Woken::Read(read) => {
                    if read == Read::Some {
                        // Nor other tasks of this thread.
                        tokio::task::yield_now().await;
                    }
                    awake = self.wait();
                }
                Woken::Again => {}
                Woken::Tick => lending.tick(),
            }
            if let Some(error) = lending.take_failure() {
                return Err(error.into());
            }
            if lending.posted_since().is_some_and(|since| since.elapsed() > self.serving.stall_timeout) {
                return Err(Broken::Slow);
            }
            self.run_effects().await;
        }
    }

    /// Reads what is there, up to a bound.
    async fn read(
        &mut self,
        mut ready: tokio::io::unix::AsyncFdReadyGuard<'_, super::seqpacket::Seqpacket>,
    ) -> Result<Read, Broken> {
        for _ in 0..PACKETS_AT_ONCE {
            if self.serving.lending.is_behind() {
                break;
            }
            let got = ready.get_inner().recv(&mut self.buffer)?;
            let is_later = matches!(got, Got::Later);
            match self.take(got).await? {
                Read::Some => {}
                read => {
                    if is_later {
                        ready.clear_ready();
                    }
                    return Ok(read);
                }
            }
        }
        Ok(Read::Some)
    }

    /// A packet was taken in: until when the next is waited for without sleeping.
    fn wait(&mut self) -> Option<Instant> {
        let span = self.awake.begin()?;
        if self.serving.may_move {
            self.aside.make_way();
        }
        Some(Instant::now() + span)
    }

    /// Takes in what lies in the buffer.
    async fn take(&mut self, got: Got) -> Result<Read, Broken> {
        match got {
            Got::Packet(len, descriptors) if descriptors.is_empty() => {
                if self.serving.may_move {
                    self.aside.heard(said_from(&self.buffer[..len]));
                }
                let packet = ToNode::decode(&self.buffer[..len])?;
                self.packet(packet).await?;
                Ok(Read::Some)
            }
            Got::Packet(..) => Err(Broken::Rule("descriptors where none belong")),
            Got::Ended => Ok(Read::End),
            Got::Later => Ok(Read::All),
        }
    }

    async fn packet(&mut self, packet: ToNode) -> Result<(), Broken> {
        match packet {
            ToNode::Hello { .. } => return Err(Broken::Rule("a second hello")),
            ToNode::Ask { op, request } => return self.ask(op, request).await,
            ToNode::Save { op, request, places } => return self.save_at_once(op, request, places).await,
            ToNode::Put { op, places } => self.part(op, SavePart::Put(places))?,
            ToNode::Finish { op } => self.part(op, SavePart::Finish)?,
            ToNode::Cancel { op } => match self.running.get_mut(&op) {
                Some(running) => {
                    running.is_cancelled = true;
                    running.abort.abort();
                }
                None => self.serving.lending.post(&ToClient::Ended { op }),
            },
            ToNode::Return { loans } => {
                self.serving.lending.take_back(&loans)?;
                if loans.len() > LOANS_AT_ONCE {
                    tokio::task::yield_now().await;
                }
            }
        }
        Ok(())
    }

    /// A part of a save; of one that ended meanwhile it is of no use.
    fn part(&mut self, op: u64, part: SavePart) -> Result<(), Broken> {
        let Some(running) = self.running.get_mut(&op) else { return Ok(()) };
        let Some(save) = &mut running.save else { return Err(Broken::Rule("frames for what is no save")) };
        if let SavePart::Put(places) = &part {
            // What waits to be looked at is bounded by packets.
            if places.is_empty() || save.is_layered && places.len() > 1 {
                return Err(Broken::Rule("a packet without frames, or with more than one piece"));
            }
            let left = save.left.checked_sub(places.len());
            save.left = left.ok_or(Broken::Rule(
                "more frames than a save has blocks, or more pieces than it has slices and heads",
            ))?;
        }
        match save.to.try_send(part) {
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(Broken::Rule("more frames or pieces at once than a save may have"))
            }
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
        }
    }

    async fn ask(&mut self, op: u64, request: data::DataRequest) -> Result<(), Broken> {
        self.is_new(op)?;
        let lending = self.serving.lending.clone();
        let noted = ToClient::Noted { op, pong: data::Pong { version: wire::PROTOCOL_VERSION } };
        match wire::operation_from_pb(request)? {
            // Its client takes the layers out of frames that are there whole.
            Operation::Fetch(request, _) => self.fetch(op, request).await?,
            Operation::Save(request, layout) => self.save(op, request, layout, Vec::new()).await?,
            Operation::Release(lease) => {
                lending.release(lease);
                self.run_effects().await;
                lending.post(&noted);
            }
            Operation::Ping => lending.post(&noted),
        }
        Ok(())
    }

    /// A save whose frames lie in the tray.
    async fn save_at_once(
        &mut self,
        op: u64,
        request: data::DataRequest,
        places: Vec<TrayPlace>,
    ) -> Result<(), Broken> {
        self.is_new(op)?;
        match wire::operation_from_pb(request)? {
            Operation::Save(request, _) if request.hashes.len() == places.len() => {
                let bytes: u64 = places.iter().map(|place| u64::from(place.len)).sum();
                if places.len() > AT_ONCE_BLOCKS_MAX || bytes > AT_ONCE_BYTES_MAX {
                    return Err(Broken::Rule("more frames than may go with an offer"));
                }
                self.save(op, request, None, places).await
            }
            _ => Err(Broken::Rule("frames beside what is no save of as many blocks")),
        }
    }

    fn is_new(&self, op: u64) -> Result<(), Broken> {
        match self.running.contains_key(&op) {
            true => Err(Broken::Rule("an operation with the number of one that is under way")),
            false => Ok(()),
        }
    }

    async fn fetch(&mut self, op: u64, request: FetchRequest) -> Result<(), Broken> {
        has_count(request.hashes.len())?;
        let class = request.class();
        if !self.has_place(class) {
            let head = wire::head_to_pb(&FetchAnswer::Busy { retry_after: RETRY_AFTER }, request.epoch);
            self.serving.lending.post(&ToClient::Head { op, head, rows: Vec::new() });
            return Ok(());
        }
        let begun = self.begin(request.asker.lease).await;
        let blocks = request.hashes.len();
        self.start((op, class), blocks, None, Box::pin(self.serving.clone().fetch(op, request, begun))).await;
        Ok(())
    }

    async fn save(
        &mut self,
        op: u64,
        request: SaveRequest,
        layout: Option<SliceLayout>,
        there: Vec<TrayPlace>,
    ) -> Result<(), Broken> {
        has_count(request.hashes.len())?;
        self.look_after_ended();
        let saves = || self.running.values().filter_map(|running| running.save.as_ref());
        // They last as long as a prefill: others find a place beside them.
        let layered = saves().filter(|save| save.is_layered).count();
        let may_end = layout.is_some();
        let puts = puts_of(&request, layout.as_ref());
        let layout = layout.filter(|_| layered < SAVES_MAX / 2 && puts <= SLICES_AT_ONCE_MAX);
        let (saves, class) = (saves().count(), request.class());
        if saves >= SAVES_MAX || !self.has_place(class) {
            let offer = wire::offer_to_pb(&SaveOffer::Busy { retry_after: RETRY_AFTER });
            self.serving.lending.post(&ToClient::Offer { op, offer });
            return Ok(());
        }
        let begun = self.begin(request.asker.lease).await;
        let held = begun.map(|begun| Held::new(op, self.serving.lending.clone(), begun, &self.copies));
        let (to, come) = mpsc::channel(PARTS_MAX);
        // To take a frame in takes longer than to find a block.
        let blocks = request.hashes.len() + there.len() * BLOCKS_A_TURN / 8;
        let left = if there.is_empty() { puts_of(&request, layout.as_ref()) } else { 0 };
        let weak = held.as_ref().map_or_else(|_| Weak::new(), Arc::downgrade);
        let parts = Parts { to, left, is_layered: layout.is_some(), held: weak };
        let frames = Frames { layout, may_end, there, come };
        let save = Box::pin(self.serving.clone().save(op, request, held, frames));
        self.start((op, class), blocks, Some(parts), save).await;
        Ok(())
    }

    /// Releases go first: one that waits must not end what begins now.
    async fn begin(&mut self, lease: kv_core::id::LeaseId) -> Result<Begun, kv_core::lend::LendRefused> {
        self.run_effects().await;
        self.serving.lending.begin(lease)
    }

    /// Begins an operation on so many blocks here. One that has to wait for something goes on as a task of its own; most need
    /// none.
    async fn start(
        &mut self,
        (op, class): (u64, Class),
        blocks: usize,
        save: Option<Parts>,
        mut operation: BoxFuture<'static, ()>,
    ) {
        self.blocks_of_turn += blocks + 1;
        if self.blocks_of_turn > BLOCKS_A_TURN {
            self.blocks_of_turn = 0;
            tokio::task::yield_now().await;
        }
        let first = poll_fn(|context| {
            // As in a task of its own, what breaks in it ends nothing else.
            let polled = catch_unwind(AssertUnwindSafe(|| operation.as_mut().poll(context)));
            Poll::Ready(polled)
        });
        match first.await {
            Ok(Poll::Ready(())) => self.places.give_back(class, 1),
            Ok(Poll::Pending) => {
                let abort = self.operations.spawn(operation);
                self.ids.insert(abort.id(), op);
                self.running.insert(op, Running { abort, class, save, is_cancelled: false });
            }
            Err(_) => {
                self.places.give_back(class, 1);
                self.serving.lending.post(&ToClient::Ended { op });
            }
        }
    }

    /// Takes a place for one operation more of this class, if there is one. Those that came to their end, but were not
    /// looked at, have none.
    fn has_place(&mut self, class: Class) -> bool {
        self.look_after_ended();
        self.places.take(class, 1)
    }

    fn look_after_ended(&mut self) {
        while let Some(Woken::Ended { id, is_broken }) =
            self.operations.try_join_next_with_id().map(Woken::of)
        {
            self.ended(id, is_broken);
        }
    }

    /// An operation's task is over. One that did not come to its end said nothing of it to the client.
    fn ended(&mut self, id: Id, is_broken: bool) {
        let Some(op) = self.ids.remove(&id) else { return };
        let Some(running) = self.running.remove(&op) else { return };
        self.places.give_back(running.class, 1);
        if running.is_cancelled || is_broken {
            match running.save.and_then(|save| save.held.upgrade()) {
                // It says so at its end.
                Some(held) => held.say_ended(),
                None => self.serving.lending.post(&ToClient::Ended { op }),
            }
        }
    }

    async fn run_effects(&mut self) {
        for effect in self.serving.lending.take_effects() {
            match effect {
                Effect::Release(lease) => self.serving.service.release(lease).await,
                Effect::Renew(lease) => self.serving.service.renew(lease),
                Effect::Free(_) => {}
            }
        }
    }

    /// The client was told to go. What it still sends is not heard.
    async fn wait_for_end(&mut self, lease: Duration) {
        let lending = self.serving.lending.clone();
        let mut tick = interval(lease / 8);
        loop {
            tokio::select! {
                biased;
                // What it has lent is held as long as it may read it.
                _ = tick.tick() => {
                    lending.tick();
                    self.run_effects().await;
                }
                ready = lending.socket().readable() => {
                    // Without a word of its end, what it may read stays as it is.
                    let Ok(mut ready) = ready else { return std::future::pending().await };
                    match ready.get_inner().recv(&mut self.buffer) {
                        Ok(Got::Ended) => return,
                        Ok(Got::Later) => ready.clear_ready(),
                        // Descriptors that came are closed.
                        Ok(Got::Packet(..)) => {}
                        Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                        Err(error) => {
                            tracing::warn!(%error, "the socket of a client of this host failed");
                            return std::future::pending().await;
                        }
                    }
                    tokio::task::yield_now().await;
                }
            }
        }
    }
}

impl Woken {
    fn of(ended: Result<(Id, ()), JoinError>) -> Woken {
        match ended {
            Ok((id, ())) => Woken::Ended { id, is_broken: false },
            Err(error) => Woken::Ended { id: error.id(), is_broken: true },
        }
    }
}

/// Looks for a packet until then, and lets everything else of this thread have its turn between.
async fn look(
    lending: &Lending,
    buffer: &mut [u8; PACKET_BYTES_MAX],
    until: Option<Instant>,
) -> io::Result<Option<Got>> {
    loop {
        for _ in 0..LOOKS_A_TURN {
            match lending.socket().get_ref().recv(buffer)? {
                Got::Later => {}
                got => return Ok(Some(got)),
            }
        }
        if until.is_none_or(|until| Instant::now() >= until) {
            return Ok(None);
        }
        tokio::task::yield_now().await;
    }
}

/// Until the server closes.
async fn told(closes: &mut watch::Receiver<bool>) {
    // A server that is gone has closed.
    let _ = closes.wait_for(|closes| *closes).await;
}

/// How many places a save may name: one for each frame, or for each slice and head.
fn puts_of(request: &SaveRequest, layout: Option<&SliceLayout>) -> usize {
    let of_block = layout.map_or(1, |layout| layout.slice_bytes().len() + 1);
    request.hashes.len().saturating_mul(of_block)
}

fn has_count(blocks: usize) -> Result<(), Broken> {
    if blocks > BLOCKS_PER_ASK_MAX {
        Err(Broken::Rule("more blocks than one operation may ask for"))
    } else {
        Ok(())
    }
}
