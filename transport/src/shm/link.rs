//! The client's end of one connection: what was asked, what came for it, and what is held of the node's memory.
//!
//! Nobody reads the socket in the background. Whoever waits for an answer reads for all, first without sleeping for a
//! moment, then as the one that the system wakes. The link lives as long as anything that was fetched over it: its
//! end tells the node that nobody reads any more. Not here: what operations mean (`path.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::id::LoanId;
use kv_core::lend::{Borrower, Descriptor, Extent, Place, Received, Room};
use kvfleet_proto::data;
use kvfleet_proto::frame::{Frame, Unsettled, copies};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::aside;
use super::awake::Awake;
use super::map::{Mapping, TrayFrame};
use super::packet::{ToClient, ToNode, TrayPlace, say_from};
use super::seqpacket::{Got, Sent, Seqpacket};
use super::{PACKET_BYTES_MAX, PLACE_ALIGN};
use crate::PathError;

/// After how long who waits for another that reads looks for itself. That other is a future of the caller's: it may be kept
/// without being polled, or belong to a runtime that stands still.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A node that works on something for longer is not waited for without sleeping.
const BUSY_MAX: Duration = Duration::from_micros(100);

/// How often is tried again to send what the node's queue had no room for.
const UNSENT_RETRY: Duration = Duration::from_millis(1);

/// Frames or pieces of one save that the node may have to read: more than both ends are ever apart, less than the node keeps.
const PUTS_MAX: usize = 512;

const _: () =
    assert!(PUTS_MAX < super::connection::PARTS_MAX, "a client that keeps to it is never ended for it");

/// Packets that wait for a node to read. More, and it is given up: each is an operation that somebody waited for in vain.
const UNSENT_MAX: usize = 256;

/// Packets read at one go.
const PACKETS_AT_ONCE: usize = 64;

/// Answers that can wait to be looked at: one for each block, and those that begin and end an operation.
const REPLIES_MAX: usize = super::BLOCKS_PER_ASK_MAX + 8;

/// Loans that one packet gives back.
const RETURNS_MAX: usize = super::packet::ROWS_MAX;

/// What came for an operation. Whoever has its rows gives them back by dropping them.
#[derive(Debug)]
pub(super) enum Reply<R = Row> {
    Head(data::FetchHead, Vec<R>),
    More(Vec<R>),
    End(u32),
    Offer(data::SaveOffer),
    Taken,
    Done(data::SaveDone),
    Noted(data::Pong),
    Ended,
}

/// How far reading went.
#[derive(Clone, Copy, PartialEq, Eq)]
#[must_use]
enum Read {
    /// Nothing is there now.
    All,
    /// There may be more.
    Some,
}

/// One connection.
pub(super) struct Link {
    socket: Seqpacket,
    peer: String,
    /// The process that has it. A child that inherits the socket must not speak for it: it would give back what this reads.
    pid: u32,
    state: Mutex<State>,
    /// Whoever holds it reads the socket.
    buffer: Mutex<Box<[u8; PACKET_BYTES_MAX]>>,
    arena: Option<Arc<Mapping>>,
    tray: Arc<Mapping>,
    /// Where the part from which this end reads begins in the tray.
    tray_out_at: u64,
    /// A place of the tray came free.
    room: Notify,
    awake: Awake,
    /// A task tries to send what is unsent. Beside the lock: a runtime that ends may drop the task while somebody has that.
    is_flushing: AtomicBool,
    /// The one on which it was dialled, for what threads without one give back.
    runtime: Option<Handle>,
}

struct State {
    borrower: Borrower,
    operations: BTreeMap<u64, Operation>,
    rooms: Room,
    /// Packets that the node's queue had no room for.
    unsent: VecDeque<Vec<u8>>,
    /// What nobody reads any more is to be given back as soon as nothing else is unsent.
    is_return_due: bool,
    is_led: bool,
    lost: Option<Lost>,
}

#[derive(Default)]
struct Operation {
    replies: VecDeque<Reply<Descriptor>>,
    waker: Option<Waker>,
    /// Places of the tray with what the node has not read.
    places: VecDeque<u64>,
    is_abandoned: bool,
}

/// Why a connection is of no more use.
#[derive(Clone, Debug)]
pub(super) enum Lost {
    Broken(String),
    Protocol(String),
}

/// What a connection is made of.
pub(super) struct Parts {
    pub(super) socket: Seqpacket,
    pub(super) peer: String,
    pub(super) arena: Option<Arc<Mapping>>,
    pub(super) tray: Arc<Mapping>,
    pub(super) tray_in_bytes: u64,
    pub(super) extent: Extent,
    pub(super) awake: Duration,
}

impl Link {
    pub(super) fn new(parts: Parts) -> Arc<Link> {
        let state = State {
            borrower: Borrower::new(parts.extent),
            operations: BTreeMap::new(),
            rooms: Room::new(parts.tray_in_bytes, PLACE_ALIGN),
            unsent: VecDeque::new(),
            is_return_due: false,
            is_led: false,
            lost: None,
        };
        Arc::new(Link {
            socket: parts.socket,
            peer: parts.peer,
            pid: std::process::id(),
            state: Mutex::new(state),
            buffer: Mutex::new(Box::new([0; PACKET_BYTES_MAX])),
            arena: parts.arena,
            tray: parts.tray,
            tray_out_at: parts.tray_in_bytes,
            room: Notify::new(),
            awake: Awake::new(parts.awake),
            is_flushing: AtomicBool::new(false),
            runtime: Handle::try_current().ok(),
        })
    }

    /// Whether blocks are read where they lie.
    pub(super) fn reads_in_place(&self) -> bool {
        self.arena.is_some()
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation that asks for so many blocks. Dropped before it is finished, it is cancelled.
    pub(super) fn begin(
        self: &Arc<Self>,
        blocks: usize,
        request: data::DataRequest,
    ) -> Result<Asking, PathError> {
        let mut state = self.usable()?;
        let op = state.borrower.begin(blocks);
        self.open(state, op, &ToNode::Ask { op, request }, VecDeque::new())
    }

    /// Begins a save whose frames, one for each block, go with it; nothing while the tray has no place for all of them.
    pub(super) fn begin_save(
        self: &Arc<Self>,
        request: data::DataRequest,
        frames: &[Frame],
    ) -> Result<Option<Asking>, PathError> {
        let Some(places) = self.take_places(frames)? else { return Ok(None) };
        // Outside the lock: these places are ours alone.
        let is_written = frames
            .iter()
            .zip(&places)
            .all(|(frame, place)| self.tray.write(place.at, &frame.bytes).is_some());
        let own = places.iter().map(|place| place.at).collect();
        let mut state = self.state();
        if !is_written {
            state.give_back_places(own);
            return Ok(None);
        }
        let op = state.borrower.begin(0);
        self.open(state, op, &ToNode::Save { op, request, places }, own).map(Some)
    }

    fn take_places(&self, frames: &[Frame]) -> Result<Option<Vec<TrayPlace>>, PathError> {
        let mut state = self.usable()?;
        let mut places = Vec::with_capacity(frames.len());
        for frame in frames {
            let len = u32::try_from(frame.bytes.len()).ok();
            let Some((len, at)) = len.and_then(|len| state.rooms.take(len).map(|at| (len, at))) else {
                state.give_back_places(places.iter().map(|place: &TrayPlace| place.at).collect());
                return Ok(None);
            };
            places.push(TrayPlace { at, len });
        }
        Ok(Some(places))
    }

    /// The state of a connection over which something can be asked.
    fn usable(&self) -> Result<MutexGuard<'_, State>, PathError> {
        if let Some(inherited) = self.inherited() {
            return Err(inherited);
        }
        let mut state = self.state();
        if state.unsent.len() >= UNSENT_MAX {
            drop(state);
            self.lose(Lost::Broken("the node does not read what it is sent".to_owned()));
            state = self.state();
        }
        match &state.lost {
            Some(lost) => Err(lost.at(&self.peer)),
            None => Ok(state),
        }
    }

    /// Sends the first packet of an operation, which has these places of the tray.
    fn open(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        op: u64,
        packet: &ToNode,
        places: VecDeque<u64>,
    ) -> Result<Asking, PathError> {
        let packet = packet.encode();
        if packet.len() > PACKET_BYTES_MAX {
            state.give_back_places(places);
            state.borrower.finish(op);
            return Err(PathError::TooLarge { bytes: packet.len(), limit: PACKET_BYTES_MAX });
        }
        state.operations.insert(op, Operation { places, ..Operation::default() });
        self.post(&mut state, packet);
        drop(state);
        Ok(Asking { link: Arc::clone(self), op, is_over: false })
    }

    /// Why this connection is of no more use, as far as can be known without waiting.
    pub(super) fn failure(self: &Arc<Self>) -> Option<PathError> {
        if let Some(inherited) = self.inherited() {
            // What came is its owner's to read.
            return Some(inherited);
        }
        if let Ok(mut buffer) = self.buffer.try_lock() {
            let _ = self.read(&mut buffer);
        }
        self.state().lost.as_ref().map(|lost| lost.at(&self.peer))
    }

    fn is_inherited(&self) -> bool {
        std::process::id() != self.pid
    }

    fn inherited(&self) -> Option<PathError> {
        let whose = || Lost::Broken("it belongs to the process that this was forked from".to_owned());
        self.is_inherited().then(|| whose().at(&self.peer))
    }

    fn post(self: &Arc<Self>, state: &mut State, mut packet: Vec<u8>) {
        if state.lost.is_some() || self.is_inherited() {
            return;
        }
        say_from(&mut packet, aside::here());
        state.unsent.push_back(packet);
        self.flush(state);
        // Without any runtime it goes with what is sent next.
        if !state.unsent.is_empty()
            && let Some(runtime) = Handle::try_current().ok().or_else(|| self.runtime.clone())
            && !self.is_flushing.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(Flushing(Some(Arc::clone(self))).run());
        }
    }

    fn flush(&self, state: &mut State) {
        loop {
            let Some(packet) = state.unsent.front() else {
                if !std::mem::take(&mut state.is_return_due) || state.borrower.waiting() == 0 {
                    return;
                }
                let mut packet = ToNode::Return { loans: state.borrower.take_returns(RETURNS_MAX) }.encode();
                say_from(&mut packet, aside::here());
                state.is_return_due = state.borrower.waiting() > 0;
                state.unsent.push_back(packet);
                continue;
            };
            match self.socket.send(packet, &[]) {
                // The end of the connection is heard of where packets are read.
                Ok(Sent::Queued | Sent::Ended) => drop(state.unsent.pop_front()),
                Ok(Sent::Later) => return,
                Err(error) => {
                    // Others hear of it when they look, a moment later.
                    state.lose(Lost::Broken(error.to_string()));
                    return;
                }
            }
        }
    }

    /// The next reply to an operation; nothing when it is over. The node is known to work on it for about `busy`.
    async fn next(self: &Arc<Self>, op: u64, busy: Duration) -> Result<Option<Reply<Descriptor>>, PathError> {
        match self.look_awake(op, busy) {
            Some(found) => found,
            None => self.sleep(op).await,
        }
    }

    /// The same without a moment of waiting awake.
    async fn sleep(self: &Arc<Self>, op: u64) -> Result<Option<Reply<Descriptor>>, PathError> {
        loop {
            let mut lead = None;
            let turn = std::future::poll_fn(|context| {
                let mut state = self.state();
                if let Some(found) = self.found(&mut state, op) {
                    return Poll::Ready(Some(found));
                }
                if !state.is_led {
                    state.is_led = true;
                    lead = Some(Lead(self));
                    return Poll::Ready(None);
                }
                if let Some(operation) = state.operations.get_mut(&op) {
                    operation.waker = Some(context.waker().clone());
                }
                Poll::Pending
            });
            match timeout(LOOK_AGAIN, turn).await {
                Ok(Some(found)) => return found,
                Ok(None) => self.lead(op).await?,
                Err(_) => {
                    if let Some(found) = self.look(op) {
                        return found;
                    }
                }
            }
        }
    }

    fn found(&self, state: &mut State, op: u64) -> Option<Found> {
        if let Some(reply) = state.operations.get_mut(&op).and_then(|operation| operation.replies.pop_front())
        {
            return Some(Ok(Some(reply)));
        }
        if let Some(lost) = &state.lost {
            return Some(Err(lost.at(&self.peer)));
        }
        if state.operations.contains_key(&op) { None } else { Some(Ok(None)) }
    }

    /// Reads without sleeping for a moment: a node that is awake answers within it, and to be woken takes longer.
    fn look_awake(self: &Arc<Self>, op: u64, busy: Duration) -> Option<Found> {
        if busy > BUSY_MAX {
            return self.look(op);
        }
        let Some(span) = self.awake.begin().map(|span| span + busy) else { return self.look(op) };
        let since = Instant::now();
        loop {
            if let Some(found) = self.look(op) {
                self.awake.came();
                return Some(found);
            }
            if since.elapsed() >= span {
                // That a node takes longer than was thought says nothing of how it answers else.
                if busy.is_zero() {
                    self.awake.missed();
                }
                return None;
            }
            std::hint::spin_loop();
        }
    }

    fn look(self: &Arc<Self>, op: u64) -> Option<Found> {
        if let Ok(mut buffer) = self.buffer.try_lock() {
            let _ = self.read(&mut buffer);
        }
        self.found(&mut self.state(), op)
    }

    /// Whether there is no need to wait for this operation.
    fn has_answer(&self, op: u64) -> bool {
        let state = self.state();
        let waits = state.operations.get(&op).is_some_and(|operation| operation.replies.is_empty());
        !waits || state.lost.is_some()
    }

    /// Reads for all until there is something for `op`.
    async fn lead(self: &Arc<Self>, op: u64) -> Result<(), PathError> {
        let broken = |error: std::io::Error| Lost::Broken(error.to_string()).at(&self.peer);
        let ear = self.socket.heard().map_err(broken)?;
        loop {
            let read = self.read(&mut self.buffer.lock().unwrap_or_else(PoisonError::into_inner));
            if read == Read::Some {
                // A node that never stops talking does not keep this task from its time.
                tokio::task::yield_now().await;
                if self.has_answer(op) {
                    return Ok(());
                }
                continue;
            }
            let woken = std::future::poll_fn(|context| {
                let mut state = self.state();
                match state.operations.get_mut(&op) {
                    // Others may have read what came: then the system wakes nobody.
                    Some(operation) if operation.replies.is_empty() => {
                        operation.waker = Some(context.waker().clone());
                    }
                    _ => return Poll::Ready(Ok(true)),
                }
                if state.lost.is_some() {
                    return Poll::Ready(Ok(true));
                }
                drop(state);
                ear.poll_read_ready(context).map_ok(|mut ready| {
                    // What comes from now on is told again; what came before is read next.
                    ready.clear_ready();
                    false
                })
            });
            if woken.await.map_err(broken)? {
                return Ok(());
            }
        }
    }

    /// Takes in the packets that are there, up to a bound.
    fn read(self: &Arc<Self>, buffer: &mut [u8; PACKET_BYTES_MAX]) -> Read {
        for _ in 0..PACKETS_AT_ONCE {
            let lost = match self.socket.recv(buffer) {
                Ok(Got::Later) => return Read::All,
                Ok(Got::Ended) => Lost::Broken("the node ended the connection".to_owned()),
                Ok(Got::Packet(_, descriptors)) if !descriptors.is_empty() => {
                    Lost::Protocol("descriptors where none belong".to_owned())
                }
                Ok(Got::Packet(len, _)) => match ToClient::decode(&buffer[..len]) {
                    Ok(packet) => match self.take_in(packet) {
                        Ok(()) => continue,
                        Err(lost) => lost,
                    },
                    Err(error) => Lost::Protocol(error.to_string()),
                },
                Err(error) => Lost::Broken(error.to_string()),
            };
            self.lose(lost);
            return Read::All;
        }
        Read::Some
    }

    fn lose(&self, lost: Lost) {
        let mut state = self.state();
        state.lose(lost);
        let wakers = state.wakers();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn take_in(self: &Arc<Self>, packet: ToClient) -> Result<(), Lost> {
        let mut state = self.state();
        let (op, reply) = match packet {
            ToClient::Head { op, head, rows } => (op, Reply::Head(head, self.receive(&mut state, op, rows)?)),
            ToClient::More { rows, .. } if rows.is_empty() => {
                return Err(Lost::Protocol("rows that are none".to_owned()));
            }
            ToClient::More { op, rows } => (op, Reply::More(self.receive(&mut state, op, rows)?)),
            ToClient::End { op, reason } => (op, Reply::End(reason)),
            ToClient::Offer { op, offer } => (op, Reply::Offer(offer)),
            ToClient::Taken { op, frames } => {
                self.taken(&mut state, op, frames as usize)?;
                (op, Reply::Taken)
            }
            ToClient::Done { op, done } => (op, Reply::Done(done)),
            ToClient::Noted { op, pong } => (op, Reply::Noted(pong)),
            ToClient::Ended { op } => (op, Reply::Ended),
            ToClient::Welcome(_) => return Err(Lost::Protocol("a second welcome".to_owned())),
            ToClient::Closing(why) => return Err(Lost::Broken(why.cause().to_owned())),
        };
        let is_ended = matches!(reply, Reply::Ended);
        if let Some(operation) = state.operations.get_mut(&op) {
            if operation.replies.len() >= REPLIES_MAX {
                return Err(Lost::Protocol("more answers than an operation has".to_owned()));
            }
            // That more was taken is no news to who has not heard of what was before.
            let is_known = matches!((operation.replies.back(), &reply), (Some(Reply::Taken), Reply::Taken));
            if !operation.is_abandoned && !is_known {
                operation.replies.push_back(reply);
            }
            let waker = operation.waker.take();
            if is_ended && operation.is_abandoned {
                self.over(&mut state, op);
            }
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        Ok(())
    }

    /// Rows that may be read; none when nobody waits for them any more.
    fn receive(
        self: &Arc<Self>,
        state: &mut State,
        op: u64,
        rows: Vec<Descriptor>,
    ) -> Result<Vec<Descriptor>, Lost> {
        let received =
            state.borrower.receive(op, &rows).map_err(|wrong| Lost::Protocol(wrong.to_string()))?;
        match received {
            Received::Kept => Ok(rows),
            Received::Unwanted => {
                self.send_returns(state);
                Ok(Vec::new())
            }
        }
    }

    /// The node has read frames of a save.
    fn taken(&self, state: &mut State, op: u64, frames: usize) -> Result<(), Lost> {
        let Some(operation) = state.operations.get_mut(&op) else { return Ok(()) };
        if frames == 0 || frames > operation.places.len() {
            return Err(Lost::Protocol(format!("{frames} frames as taken")));
        }
        let freed = operation.places.drain(..frames).collect();
        state.give_back_places(freed);
        self.room.notify_waiters();
        Ok(())
    }

    /// Nothing of an operation is under way any more.
    fn over(self: &Arc<Self>, state: &mut State, op: u64) {
        if let Some(operation) = state.operations.remove(&op) {
            state.give_back_places(operation.places);
            self.room.notify_waiters();
        }
        if state.borrower.finish(op) {
            self.send_returns(state);
        }
    }

    fn send_returns(self: &Arc<Self>, state: &mut State) {
        // While packets wait for the node to read, these do, and go in one: as many as there are blocks would be too many.
        state.is_return_due = !state.unsent.is_empty();
        while state.borrower.waiting() > 0 && !state.is_return_due {
            let loans = state.borrower.take_returns(RETURNS_MAX);
            self.post(state, ToNode::Return { loans }.encode());
        }
    }

    fn give_back(self: &Arc<Self>, loan: LoanId, at_once: bool) {
        let mut state = self.state();
        if state.borrower.give_back(loan) || at_once {
            self.send_returns(&mut state);
        }
    }

    fn row(self: &Arc<Self>, row: Descriptor) -> Row {
        let loan = Loan { link: Arc::clone(self), id: row.loan, at_once: row.place == Place::Tray };
        Row { loan, place: row.place, at: row.at, len: row.len }
    }
}

/// What an operation has, if anything: its next reply, its end, or why there is none.
type Found = Result<Option<Reply<Descriptor>>, PathError>;

/// Sends what the node's queue had no room for, as soon as it has.
struct Flushing(Option<Arc<Link>>);

impl Flushing {
    async fn run(mut self) {
        while let Some(link) = self.0.take() {
            self.0 = Some(Arc::clone(&link));
            tokio::time::sleep(UNSENT_RETRY).await;
            let mut state = link.state();
            link.flush(&mut state);
            if state.unsent.is_empty() {
                // Under the lock: whoever adds to it from here on begins anew.
                link.is_flushing.store(false, Ordering::Relaxed);
                self.0 = None;
            }
        }
    }
}

impl Drop for Flushing {
    fn drop(&mut self) {
        // Its runtime ended before it did.
        if let Some(link) = &self.0 {
            link.is_flushing.store(false, Ordering::Relaxed);
        }
    }
}

/// A block that came, until dropped.
#[derive(Debug)]
pub(super) struct Row {
    loan: Loan,
    place: Place,
    at: u64,
    len: u32,
}

impl Row {
    /// Its bytes: in place, or a copy of what lies in the tray.
    pub(super) fn bytes(self) -> Option<Bytes> {
        let Row { loan, place, at, len } = self;
        let link = &loan.link;
        match place {
            Place::Arena => {
                let arena = Arc::clone(link.arena.as_ref()?);
                arena.lent(at, len, loan)
            }
            Place::Tray => {
                let from = TrayFrame::new(&link.tray, link.tray_out_at.checked_add(at)?, len)?;
                let mut bytes = vec![0; len as usize];
                // The way of long copies; whose sum it is, only who reads the frame knows.
                copies(bytes.len(), |copies| from.copy_crc32c(0, &mut bytes, copies));
                Some(Bytes::from(bytes))
            }
        }
    }
}

impl Reply<Descriptor> {
    fn guarded(self, link: &Arc<Link>) -> Reply {
        let rows = |rows: Vec<Descriptor>| rows.into_iter().map(|row| link.row(row)).collect();
        match self {
            Reply::Head(head, came) => Reply::Head(head, rows(came)),
            Reply::More(came) => Reply::More(rows(came)),
            Reply::End(reason) => Reply::End(reason),
            Reply::Offer(offer) => Reply::Offer(offer),
            Reply::Taken => Reply::Taken,
            Reply::Done(done) => Reply::Done(done),
            Reply::Noted(pong) => Reply::Noted(pong),
            Reply::Ended => Reply::Ended,
        }
    }
}

impl State {
    fn give_back_places(&mut self, places: VecDeque<u64>) {
        places.into_iter().for_each(|at| {
            self.rooms.give_back(at);
        });
    }

    fn lose(&mut self, lost: Lost) {
        self.lost.get_or_insert(lost);
        self.borrower.lost();
        self.unsent.clear();
    }

    /// Of everybody who waits, to be woken without the lock.
    fn wakers(&mut self) -> Vec<Waker> {
        self.operations.values_mut().filter_map(|operation| operation.waker.take()).collect()
    }
}

impl Lost {
    pub(super) fn at(&self, peer: &str) -> PathError {
        let peer = peer.to_owned();
        match self {
            Lost::Broken(cause) => PathError::Broken { peer, cause: cause.clone() },
            Lost::Protocol(what) => PathError::Protocol { peer, what: what.clone() },
        }
    }
}

/// Whoever has it reads for all.
struct Lead<'a>(&'a Link);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_led = false;
        let wakers = state.wakers();
        drop(state);
        // One of them leads now.
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Held while bytes of the node's memory may be read.
struct Loan {
    link: Arc<Link>,
    id: LoanId,
    /// Its place in the tray is needed for what comes next.
    at_once: bool,
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.id.fmt(f)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.link.give_back(self.id, self.at_once);
    }
}

/// An operation under way.
pub(super) struct Asking {
    link: Arc<Link>,
    op: u64,
    is_over: bool,
}

impl Asking {
    /// The next reply.
    pub(super) async fn next(&self) -> Result<Reply, PathError> {
        self.next_after(Duration::ZERO).await
    }

    /// The same when the node is known to work on it for about `busy`.
    pub(super) async fn next_after(&self, busy: Duration) -> Result<Reply, PathError> {
        let next = self.link.next(self.op, busy).await?.map(|reply| reply.guarded(&self.link));
        next.ok_or_else(|| Lost::Broken("the operation is over".to_owned()).at(&self.link.peer))
    }

    /// Nothing follows.
    pub(super) fn finish(mut self) {
        self.is_over = true;
        let mut state = self.link.state();
        self.link.over(&mut state, self.op);
    }

    /// Puts bytes into the tray, one after the other, as what comes next of a save: a frame, or a piece of one that comes by layer.
    /// All together are `len`. `false` while there is no place among the first bytes `within` the client's part of the tray.
    pub(super) fn put(&self, parts: &[Bytes], len: u32, within: u64) -> bool {
        let at = {
            let mut state = self.link.state();
            let puts = state.operations.get(&self.op).map_or(0, |operation| operation.places.len());
            if puts < PUTS_MAX { state.rooms.take_within(len, within) } else { None }
        };
        let Some(at) = at else { return false };
        // Outside the lock: this place is ours alone.
        let mut to = at;
        let is_written = parts.iter().all(|part| {
            let written = self.link.tray.write(to, part);
            to += part.len() as u64;
            written.is_some()
        });
        let mut state = self.link.state();
        if let Some(operation) = state.operations.get_mut(&self.op).filter(|_| is_written) {
            operation.places.push_back(at);
            let places = vec![TrayPlace { at, len }];
            self.link.post(&mut state, ToNode::Put { op: self.op, places }.encode());
        } else {
            state.rooms.give_back(at);
        }
        true
    }

    /// Places with what the node has not read of this save.
    pub(super) fn puts(&self) -> usize {
        self.link.state().operations.get(&self.op).map_or(0, |operation| operation.places.len())
    }

    /// Says that nothing follows.
    pub(super) fn end_puts(&self) {
        self.link.post(&mut self.link.state(), ToNode::Finish { op: self.op }.encode());
    }

    /// Waits until a place of the tray came free. Made before the try that finds none, it misses nothing.
    pub(super) fn room(&self) -> tokio::sync::futures::Notified<'_> {
        self.link.room.notified()
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut state = self.link.state();
        state.borrower.cancel(self.op);
        let Some(operation) = state.operations.get_mut(&self.op) else { return };
        operation.is_abandoned = true;
        let rows = std::mem::take(&mut operation.replies).into_iter().flat_map(|reply| match reply {
            Reply::Head(_, rows) | Reply::More(rows) => rows,
            _ => Vec::new(),
        });
        for row in rows {
            state.borrower.give_back(row.loan);
        }
        self.link.send_returns(&mut state);
        self.link.post(&mut state, ToNode::Cancel { op: self.op }.encode());
        drop(state);
        // What still comes for it must be given back, also when nobody asks for anything else.
        if let Ok(runtime) = Handle::try_current() {
            let (link, op) = (Arc::clone(&self.link), self.op);
            runtime.spawn(async move {
                let _ = link.next(op, Duration::ZERO).await;
            });
        }
    }
}
