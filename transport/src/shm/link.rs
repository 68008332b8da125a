//! The client's end of one connection: pending operations, their replies, and grants of the node's
//! memory.
//!
//! No background task reads the socket. A caller that waits for a reply reads for all, first by
//! spinning, then as the one task that the runtime wakes. The link lives as long as any fetched
//! block; its end tells the node that no block is read any more. Not here: what operations mean
//! (`path.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::id::GrantId;
use kv_core::lease_grant::{
    GrantClient, GrantDescriptor, GrantMemory, MemoryExtent, ReceiveOutcome, SlotAllocator,
};
use kvfleet_proto::data;
use kvfleet_proto::frame::{Frame, VolatileBytes, copy_batch};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::cpu_migration;
use super::mapping::{Mapping, ShmBounceFrame};
use super::packet::{BounceRange, ClientPacket, NodePacket, set_sender_cpu};
use super::seqpacket::{RecvOutcome, SendOutcome, Seqpacket};
use super::spin_wait::SpinWait;
use super::{BOUNCE_ALIGN_BYTES, PACKET_BYTES_MAX};
use crate::PathError;

/// After this time a caller polls by itself although another caller reads. That reader is a future
/// of the application: it may be kept without being polled, or its runtime may stand still.
pub(super) const READER_TIMEOUT: Duration = Duration::from_millis(5);

/// Expected work of the node above which the client does not spin.
const SPIN_BUSY_MAX: Duration = Duration::from_micros(100);

/// Interval of attempts to send packets that did not fit into the node's queue.
const UNSENT_RETRY: Duration = Duration::from_millis(1);

/// Maximum unread frames or pieces of one save: more than both ends ever differ by, less than the
/// node queues.
const PUTS_MAX: usize = 512;

const _: () = assert!(
    PUTS_MAX < super::connection::SAVE_PARTS_MAX,
    "a client within this limit is never closed for it"
);

/// Maximum unsent packets. Above, the node counts as lost: each packet is an operation that a
/// caller waited for in vain.
const UNSENT_MAX: usize = 256;

/// Packets handled in one read.
const PACKETS_PER_READ: usize = 64;

/// Maximum queued replies: one for each block, and those that start and end an operation.
const REPLIES_MAX: usize = super::BLOCKS_PER_OPERATION_MAX + 8;

/// Maximum grants returned in one packet.
const RETURNS_MAX: usize = super::packet::ROWS_MAX;

/// A reply to an operation. Dropping its rows returns their grants.
#[derive(Debug)]
pub(super) enum Reply<R = GrantedBlock> {
    Head(data::FetchHead, Vec<R>),
    More(Vec<R>),
    End(u32),
    Offer(data::SaveOffer),
    Taken,
    Done(data::SaveDone),
    Acknowledged(data::Pong),
    Ended,
}

/// Progress of reading.
#[derive(Clone, Copy, PartialEq, Eq)]
#[must_use]
enum SocketProgress {
    /// The queue is empty.
    Drained,
    /// More packets may be queued.
    MoreLeft,
}

/// One connection.
pub(super) struct ShmLink {
    socket: Seqpacket,
    peer: String,
    /// The process that owns it. A child that inherits the socket must not use it: it would return
    /// grants that this process reads.
    pid: u32,
    state: Mutex<LinkState>,
    /// Its holder reads the socket.
    buffer: Mutex<Box<[u8; PACKET_BYTES_MAX]>>,
    arena: Option<Arc<Mapping>>,
    bounce: Arc<Mapping>,
    /// Offset of the part of the bounce buffer that this end reads.
    bounce_out_offset: u64,
    /// Notified when a range of the bounce buffer is freed.
    space_freed: Notify,
    spin_wait: SpinWait,
    /// Whether a task is sending unsent packets. Not under the lock: a runtime that shuts down may
    /// drop the task while the lock is held.
    is_flushing: AtomicBool,
    /// Runtime of the dial, used to return grants from threads without a runtime.
    runtime: Option<Handle>,
}

struct LinkState {
    grants: GrantClient,
    operations: BTreeMap<u64, PendingOperation>,
    free_space: SlotAllocator,
    /// Packets that did not fit into the node's queue.
    unsent: VecDeque<Vec<u8>>,
    /// Grants are to be returned as soon as no other packet is unsent.
    is_return_due: bool,
    has_reader: bool,
    failure: Option<LinkFailure>,
}

#[derive(Default)]
struct PendingOperation {
    replies: VecDeque<Reply<GrantDescriptor>>,
    waker: Option<Waker>,
    /// Ranges of the bounce buffer that the node has not read.
    unread_ranges: VecDeque<u64>,
    is_abandoned: bool,
}

/// Why a connection is unusable.
#[derive(Clone, Debug)]
pub(super) enum LinkFailure {
    Broken(String),
    Protocol(String),
}

/// Parts of a connection.
pub(super) struct LinkParts {
    pub(super) socket: Seqpacket,
    pub(super) peer: String,
    pub(super) arena: Option<Arc<Mapping>>,
    pub(super) bounce: Arc<Mapping>,
    pub(super) bounce_in_bytes: u64,
    pub(super) extent: MemoryExtent,
    pub(super) spin_wait: Duration,
}

impl ShmLink {
    pub(super) fn new(parts: LinkParts) -> Arc<ShmLink> {
        let state = LinkState {
            grants: GrantClient::new(parts.extent),
            operations: BTreeMap::new(),
            free_space: SlotAllocator::new(parts.bounce_in_bytes, BOUNCE_ALIGN_BYTES),
            unsent: VecDeque::new(),
            is_return_due: false,
            has_reader: false,
            failure: None,
        };
        Arc::new(ShmLink {
            socket: parts.socket,
            peer: parts.peer,
            pid: std::process::id(),
            state: Mutex::new(state),
            buffer: Mutex::new(Box::new([0; PACKET_BYTES_MAX])),
            arena: parts.arena,
            bounce: parts.bounce,
            bounce_out_offset: parts.bounce_in_bytes,
            space_freed: Notify::new(),
            spin_wait: SpinWait::new(parts.spin_wait),
            is_flushing: AtomicBool::new(false),
            runtime: Handle::try_current().ok(),
        })
    }

    /// Whether blocks are read in place.
    pub(super) fn reads_in_place(&self) -> bool {
        self.arena.is_some()
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    fn lock_state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts an operation for this number of blocks. Dropping it before it is finished cancels it.
    pub(super) fn begin(
        self: &Arc<Self>,
        blocks: usize,
        request: data::DataRequest,
    ) -> Result<ShmOperation, PathError> {
        let mut state = self.lock_usable()?;
        let op = state.grants.begin(blocks);
        self.send_first_packet(state, op, &ClientPacket::Begin { op, request }, VecDeque::new())
    }

    /// Starts a save with its frames, one for each block; `None` while the bounce buffer cannot
    /// hold all of them.
    pub(super) fn begin_eager_save(
        self: &Arc<Self>,
        request: data::DataRequest,
        frames: &[Frame],
    ) -> Result<Option<ShmOperation>, PathError> {
        let Some(places) = self.take_ranges(frames)? else { return Ok(None) };
        // Outside the lock: these ranges are exclusively ours.
        let is_written = frames
            .iter()
            .zip(&places)
            .all(|(frame, place)| self.bounce.write(place.at, &frame.bytes).is_some());
        let own = places.iter().map(|place| place.at).collect();
        let mut state = self.lock_state();
        if !is_written {
            state.free_ranges(own);
            return Ok(None);
        }
        let op = state.grants.begin(0);
        self.send_first_packet(state, op, &ClientPacket::Save { op, request, places }, own).map(Some)
    }

    fn take_ranges(&self, frames: &[Frame]) -> Result<Option<Vec<BounceRange>>, PathError> {
        let mut state = self.lock_usable()?;
        let mut places = Vec::with_capacity(frames.len());
        for frame in frames {
            let len = u32::try_from(frame.bytes.len()).ok();
            let Some((len, at)) = len.and_then(|len| state.free_space.allocate(len).map(|at| (len, at)))
            else {
                state.free_ranges(places.iter().map(|place: &BounceRange| place.at).collect());
                return Ok(None);
            };
            places.push(BounceRange { at, len });
        }
        Ok(Some(places))
    }

    /// The state, if the connection is usable for a new operation.
    fn lock_usable(&self) -> Result<MutexGuard<'_, LinkState>, PathError> {
        if let Some(inherited) = self.inherited_error() {
            return Err(inherited);
        }
        let mut state = self.lock_state();
        if state.unsent.len() >= UNSENT_MAX {
            drop(state);
            self.fail(LinkFailure::Broken("the node does not read its packets".to_owned()));
            state = self.lock_state();
        }
        match &state.failure {
            Some(lost) => Err(lost.at(&self.peer)),
            None => Ok(state),
        }
    }

    /// Sends the first packet of an operation, which owns these ranges.
    fn send_first_packet(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, LinkState>,
        op: u64,
        packet: &ClientPacket,
        places: VecDeque<u64>,
    ) -> Result<ShmOperation, PathError> {
        let packet = packet.encode();
        if packet.len() > PACKET_BYTES_MAX {
            state.free_ranges(places);
            state.grants.finish(op);
            return Err(PathError::TooLarge { bytes: packet.len(), limit: PACKET_BYTES_MAX });
        }
        state
            .operations
            .insert(op, PendingOperation { unread_ranges: places, ..PendingOperation::default() });
        self.post(&mut state, packet);
        drop(state);
        Ok(ShmOperation { link: Arc::clone(self), op, is_over: false })
    }

    /// Why this connection is unusable, as far as known without waiting.
    pub(super) fn failure(self: &Arc<Self>) -> Option<PathError> {
        if let Some(inherited) = self.inherited_error() {
            // Only the owner may read the packets.
            return Some(inherited);
        }
        if let Ok(mut buffer) = self.buffer.try_lock() {
            let _ = self.read(&mut buffer);
        }
        self.lock_state().failure.as_ref().map(|lost| lost.at(&self.peer))
    }

    fn is_inherited(&self) -> bool {
        std::process::id() != self.pid
    }

    fn inherited_error(&self) -> Option<PathError> {
        let whose = || LinkFailure::Broken("it belongs to the parent process of this fork".to_owned());
        self.is_inherited().then(|| whose().at(&self.peer))
    }

    fn post(self: &Arc<Self>, state: &mut LinkState, mut packet: Vec<u8>) {
        if state.failure.is_some() || self.is_inherited() {
            return;
        }
        set_sender_cpu(&mut packet, cpu_migration::current_cpu());
        state.unsent.push_back(packet);
        self.flush(state);
        // Without a runtime the packet goes with the next one.
        if !state.unsent.is_empty()
            && let Some(runtime) = Handle::try_current().ok().or_else(|| self.runtime.clone())
            && !self.is_flushing.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(FlushTask(Some(Arc::clone(self))).run());
        }
    }

    fn flush(&self, state: &mut LinkState) {
        loop {
            let Some(packet) = state.unsent.front() else {
                if !std::mem::take(&mut state.is_return_due) || state.grants.pending_returns() == 0 {
                    return;
                }
                let mut packet =
                    ClientPacket::Return { loans: state.grants.take_returns(RETURNS_MAX) }.encode();
                set_sender_cpu(&mut packet, cpu_migration::current_cpu());
                state.is_return_due = state.grants.pending_returns() > 0;
                state.unsent.push_back(packet);
                continue;
            };
            match self.socket.send(packet, &[]) {
                // Readers of the socket report the end of the connection.
                Ok(SendOutcome::Queued | SendOutcome::Closed) => drop(state.unsent.pop_front()),
                Ok(SendOutcome::WouldBlock) => return,
                Err(error) => {
                    // Other callers learn of it at their next poll, a moment later.
                    state.fail(LinkFailure::Broken(error.to_string()));
                    return;
                }
            }
        }
    }

    /// The next reply to an operation, or `None` if it is over. The node is expected to work on it
    /// for about `busy`.
    async fn next_reply(
        self: &Arc<Self>,
        op: u64,
        busy: Duration,
    ) -> Result<Option<Reply<GrantDescriptor>>, PathError> {
        match self.spin_for_reply(op, busy) {
            Some(found) => found,
            None => self.wait_reply(op).await,
        }
    }

    /// Like `next_reply` without spinning.
    async fn wait_reply(self: &Arc<Self>, op: u64) -> Result<Option<Reply<GrantDescriptor>>, PathError> {
        loop {
            let mut lead = None;
            let turn = std::future::poll_fn(|context| {
                let mut state = self.lock_state();
                if let Some(found) = self.take_reply(&mut state, op) {
                    return Poll::Ready(Some(found));
                }
                if !state.has_reader {
                    state.has_reader = true;
                    lead = Some(ReaderRole(self));
                    return Poll::Ready(None);
                }
                if let Some(operation) = state.operations.get_mut(&op) {
                    operation.waker = Some(context.waker().clone());
                }
                Poll::Pending
            });
            match timeout(READER_TIMEOUT, turn).await {
                Ok(Some(found)) => return found,
                Ok(None) => self.read_for_all(op).await?,
                Err(_) => {
                    if let Some(found) = self.poll_reply(op) {
                        return found;
                    }
                }
            }
        }
    }

    fn take_reply(&self, state: &mut LinkState, op: u64) -> Option<NextReply> {
        if let Some(reply) = state.operations.get_mut(&op).and_then(|operation| operation.replies.pop_front())
        {
            return Some(Ok(Some(reply)));
        }
        if let Some(lost) = &state.failure {
            return Some(Err(lost.at(&self.peer)));
        }
        if state.operations.contains_key(&op) { None } else { Some(Ok(None)) }
    }

    /// Spins for a moment: an active node answers within it, and a wake-up takes longer.
    fn spin_for_reply(self: &Arc<Self>, op: u64, busy: Duration) -> Option<NextReply> {
        if busy > SPIN_BUSY_MAX {
            return self.poll_reply(op);
        }
        let Some(span) = self.spin_wait.begin().map(|span| span + busy) else { return self.poll_reply(op) };
        let since = Instant::now();
        loop {
            if let Some(found) = self.poll_reply(op) {
                self.spin_wait.succeeded();
                return Some(found);
            }
            if since.elapsed() >= span {
                // A misjudged `busy` does not show how fast the node answers otherwise.
                if busy.is_zero() {
                    self.spin_wait.failed();
                }
                return None;
            }
            std::hint::spin_loop();
        }
    }

    fn poll_reply(self: &Arc<Self>, op: u64) -> Option<NextReply> {
        if let Ok(mut buffer) = self.buffer.try_lock() {
            let _ = self.read(&mut buffer);
        }
        self.take_reply(&mut self.lock_state(), op)
    }

    /// Whether this operation has no need to wait.
    fn has_answer(&self, op: u64) -> bool {
        let state = self.lock_state();
        let waits = state.operations.get(&op).is_some_and(|operation| operation.replies.is_empty());
        !waits || state.failure.is_some()
    }

    /// Reads for all callers until `op` has a reply.
    async fn read_for_all(self: &Arc<Self>, op: u64) -> Result<(), PathError> {
        let broken = |error: std::io::Error| LinkFailure::Broken(error.to_string()).at(&self.peer);
        let ear = self.socket.readable().map_err(broken)?;
        loop {
            let read = self.read(&mut self.buffer.lock().unwrap_or_else(PoisonError::into_inner));
            if read == SocketProgress::MoreLeft {
                // A node that never stops sending must not keep this task from its timeouts.
                tokio::task::yield_now().await;
                if self.has_answer(op) {
                    return Ok(());
                }
                continue;
            }
            let woken = std::future::poll_fn(|context| {
                let mut state = self.lock_state();
                match state.operations.get_mut(&op) {
                    // Another caller may have read the packet, so the socket would not wake this
                    // task.
                    Some(operation) if operation.replies.is_empty() => {
                        operation.waker = Some(context.waker().clone());
                    }
                    _ => return Poll::Ready(Ok(true)),
                }
                if state.failure.is_some() {
                    return Poll::Ready(Ok(true));
                }
                drop(state);
                ear.poll_read_ready(context).map_ok(|mut ready| {
                    // Later packets wake this task again; earlier ones are read next.
                    ready.clear_ready();
                    false
                })
            });
            if woken.await.map_err(broken)? {
                return Ok(());
            }
        }
    }

    /// Handles the queued packets, up to a limit.
    fn read(self: &Arc<Self>, buffer: &mut [u8; PACKET_BYTES_MAX]) -> SocketProgress {
        for _ in 0..PACKETS_PER_READ {
            let lost = match self.socket.recv(buffer) {
                Ok(RecvOutcome::WouldBlock) => return SocketProgress::Drained,
                Ok(RecvOutcome::Closed) => LinkFailure::Broken("the node closed the connection".to_owned()),
                Ok(RecvOutcome::Packet(_, descriptors)) if !descriptors.is_empty() => {
                    LinkFailure::Protocol("unexpected descriptors".to_owned())
                }
                Ok(RecvOutcome::Packet(len, _)) => match NodePacket::decode(&buffer[..len]) {
                    Ok(packet) => match self.handle_packet(packet) {
                        Ok(()) => continue,
                        Err(lost) => lost,
                    },
                    Err(error) => LinkFailure::Protocol(error.to_string()),
                },
                Err(error) => LinkFailure::Broken(error.to_string()),
            };
            self.fail(lost);
            return SocketProgress::Drained;
        }
        SocketProgress::MoreLeft
    }

    fn fail(&self, lost: LinkFailure) {
        let mut state = self.lock_state();
        state.fail(lost);
        let wakers = state.wakers();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn handle_packet(self: &Arc<Self>, packet: NodePacket) -> Result<(), LinkFailure> {
        let mut state = self.lock_state();
        let (op, reply) = match packet {
            NodePacket::Head { op, head, rows } => {
                (op, Reply::Head(head, self.receive_rows(&mut state, op, rows)?))
            }
            NodePacket::More { rows, .. } if rows.is_empty() => {
                return Err(LinkFailure::Protocol("a packet without rows".to_owned()));
            }
            NodePacket::More { op, rows } => (op, Reply::More(self.receive_rows(&mut state, op, rows)?)),
            NodePacket::End { op, reason } => (op, Reply::End(reason)),
            NodePacket::Offer { op, offer } => (op, Reply::Offer(offer)),
            NodePacket::Taken { op, frames } => {
                self.frames_taken(&mut state, op, frames as usize)?;
                (op, Reply::Taken)
            }
            NodePacket::Done { op, done } => (op, Reply::Done(done)),
            NodePacket::Acknowledged { op, pong } => (op, Reply::Acknowledged(pong)),
            NodePacket::Ended { op } => (op, Reply::Ended),
            NodePacket::Welcome(_) => return Err(LinkFailure::Protocol("a second welcome".to_owned())),
            NodePacket::Closing(why) => return Err(LinkFailure::Broken(why.cause().to_owned())),
        };
        let is_ended = matches!(reply, Reply::Ended);
        if let Some(operation) = state.operations.get_mut(&op) {
            if operation.replies.len() >= REPLIES_MAX {
                return Err(LinkFailure::Protocol("more replies than an operation has".to_owned()));
            }
            // A second `Taken` adds no information if the first was not read yet.
            let is_known = matches!((operation.replies.back(), &reply), (Some(Reply::Taken), Reply::Taken));
            if !operation.is_abandoned && !is_known {
                operation.replies.push_back(reply);
            }
            let waker = operation.waker.take();
            if is_ended && operation.is_abandoned {
                self.close_operation(&mut state, op);
            }
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        Ok(())
    }

    /// Rows that may be read; empty if no caller waits for them any more.
    fn receive_rows(
        self: &Arc<Self>,
        state: &mut LinkState,
        op: u64,
        rows: Vec<GrantDescriptor>,
    ) -> Result<Vec<GrantDescriptor>, LinkFailure> {
        let received =
            state.grants.receive(op, &rows).map_err(|wrong| LinkFailure::Protocol(wrong.to_string()))?;
        match received {
            ReceiveOutcome::Accepted => Ok(rows),
            ReceiveOutcome::Unwanted => {
                self.send_returns(state);
                Ok(Vec::new())
            }
        }
    }

    /// The node has read frames of a save.
    fn frames_taken(&self, state: &mut LinkState, op: u64, frames: usize) -> Result<(), LinkFailure> {
        let Some(operation) = state.operations.get_mut(&op) else { return Ok(()) };
        if frames == 0 || frames > operation.unread_ranges.len() {
            return Err(LinkFailure::Protocol(format!("{frames} frames as taken")));
        }
        let freed = operation.unread_ranges.drain(..frames).collect();
        state.free_ranges(freed);
        self.space_freed.notify_waiters();
        Ok(())
    }

    /// Ends an operation: no packet of it is outstanding.
    fn close_operation(self: &Arc<Self>, state: &mut LinkState, op: u64) {
        if let Some(operation) = state.operations.remove(&op) {
            state.free_ranges(operation.unread_ranges);
            self.space_freed.notify_waiters();
        }
        if state.grants.finish(op) {
            self.send_returns(state);
        }
    }

    fn send_returns(self: &Arc<Self>, state: &mut LinkState) {
        // While other packets are unsent, returns wait and go together; one packet per block would
        // be too many.
        state.is_return_due = !state.unsent.is_empty();
        while state.grants.pending_returns() > 0 && !state.is_return_due {
            let loans = state.grants.take_returns(RETURNS_MAX);
            self.post(state, ClientPacket::Return { loans }.encode());
        }
    }

    fn return_grant(self: &Arc<Self>, loan: GrantId, at_once: bool) {
        let mut state = self.lock_state();
        if state.grants.release(loan) || at_once {
            self.send_returns(&mut state);
        }
    }

    fn guard_row(self: &Arc<Self>, row: GrantDescriptor) -> GrantedBlock {
        let loan = GrantGuard {
            link: Arc::clone(self),
            id: row.grant,
            is_urgent: row.memory == GrantMemory::BounceBuffer,
        };
        GrantedBlock { grant: loan, place: row.memory, at: row.offset, len: row.len }
    }
}

/// The next reply of an operation, its end, or an error; `None` if there is neither.
type NextReply = Result<Option<Reply<GrantDescriptor>>, PathError>;

/// Sends unsent packets as soon as the node's queue has space.
struct FlushTask(Option<Arc<ShmLink>>);

impl FlushTask {
    async fn run(mut self) {
        while let Some(link) = self.0.take() {
            self.0 = Some(Arc::clone(&link));
            tokio::time::sleep(UNSENT_RETRY).await;
            let mut state = link.lock_state();
            link.flush(&mut state);
            if state.unsent.is_empty() {
                // Under the lock: a caller that adds a packet later starts a new task.
                link.is_flushing.store(false, Ordering::Relaxed);
                self.0 = None;
            }
        }
    }
}

impl Drop for FlushTask {
    fn drop(&mut self) {
        // The runtime shut down before the task finished.
        if let Some(link) = &self.0 {
            link.is_flushing.store(false, Ordering::Relaxed);
        }
    }
}

/// A granted block, until dropped.
#[derive(Debug)]
pub(super) struct GrantedBlock {
    grant: GrantGuard,
    place: GrantMemory,
    at: u64,
    len: u32,
}

impl GrantedBlock {
    /// Its bytes: in place, or a copy from the bounce buffer.
    pub(super) fn bytes(self) -> Option<Bytes> {
        let GrantedBlock { grant: loan, place, at, len } = self;
        let link = &loan.link;
        match place {
            GrantMemory::Arena => {
                let arena = Arc::clone(link.arena.as_ref()?);
                arena.granted_bytes(at, len, loan)
            }
            GrantMemory::BounceBuffer => {
                let from = ShmBounceFrame::new(&link.bounce, link.bounce_out_offset.checked_add(at)?, len)?;
                let mut bytes = vec![0; len as usize];
                // The copy routine for long copies; only the frame's reader knows the expected
                // checksum.
                copy_batch(bytes.len(), |copies| from.copy_crc32c(0, &mut bytes, copies));
                Some(Bytes::from(bytes))
            }
        }
    }
}

impl Reply<GrantDescriptor> {
    fn guarded(self, link: &Arc<ShmLink>) -> Reply {
        let rows = |rows: Vec<GrantDescriptor>| rows.into_iter().map(|row| link.guard_row(row)).collect();
        match self {
            Reply::Head(head, came) => Reply::Head(head, rows(came)),
            Reply::More(came) => Reply::More(rows(came)),
            Reply::End(reason) => Reply::End(reason),
            Reply::Offer(offer) => Reply::Offer(offer),
            Reply::Taken => Reply::Taken,
            Reply::Done(done) => Reply::Done(done),
            Reply::Acknowledged(pong) => Reply::Acknowledged(pong),
            Reply::Ended => Reply::Ended,
        }
    }
}

impl LinkState {
    fn free_ranges(&mut self, places: VecDeque<u64>) {
        places.into_iter().for_each(|at| {
            self.free_space.free(at);
        });
    }

    fn fail(&mut self, lost: LinkFailure) {
        self.failure.get_or_insert(lost);
        self.grants.server_lost();
        self.unsent.clear();
    }

    /// Wakers of all waiting callers, to be woken without the lock.
    fn wakers(&mut self) -> Vec<Waker> {
        self.operations.values_mut().filter_map(|operation| operation.waker.take()).collect()
    }
}

impl LinkFailure {
    pub(super) fn at(&self, peer: &str) -> PathError {
        let peer = peer.to_owned();
        match self {
            LinkFailure::Broken(cause) => PathError::Broken { peer, cause: cause.clone() },
            LinkFailure::Protocol(what) => PathError::Protocol { peer, what: what.clone() },
        }
    }
}

/// Its holder reads the socket for all callers.
struct ReaderRole<'a>(&'a ShmLink);

impl Drop for ReaderRole<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock_state();
        state.has_reader = false;
        let wakers = state.wakers();
        drop(state);
        // One of them becomes the reader.
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Held while bytes of the node's memory may be read.
struct GrantGuard {
    link: Arc<ShmLink>,
    id: GrantId,
    /// Return it at once: its range of the bounce buffer is needed for the next block.
    is_urgent: bool,
}

impl std::fmt::Debug for GrantGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.id.fmt(f)
    }
}

impl Drop for GrantGuard {
    fn drop(&mut self) {
        self.link.return_grant(self.id, self.is_urgent);
    }
}

/// An operation in progress.
pub(super) struct ShmOperation {
    link: Arc<ShmLink>,
    op: u64,
    is_over: bool,
}

impl ShmOperation {
    /// The next reply.
    pub(super) async fn next(&self) -> Result<Reply, PathError> {
        self.next_when_busy(Duration::ZERO).await
    }

    /// Like `next` for a node that is expected to work for about `busy`.
    pub(super) async fn next_when_busy(&self, busy: Duration) -> Result<Reply, PathError> {
        let next = self.link.next_reply(self.op, busy).await?.map(|reply| reply.guarded(&self.link));
        next.ok_or_else(|| LinkFailure::Broken("the operation is over".to_owned()).at(&self.link.peer))
    }

    /// Finishes the operation: no packet follows.
    pub(super) fn finish(mut self) {
        self.is_over = true;
        let mut state = self.link.lock_state();
        self.link.close_operation(&mut state, self.op);
    }

    /// Writes `parts` in sequence into the bounce buffer as the next frame or piece of a save;
    /// their total length is `len`. Returns `false` while there is no free range among the first
    /// `within` bytes of the client's part.
    pub(super) fn put(&self, parts: &[Bytes], len: u32, within: u64) -> bool {
        let at = {
            let mut state = self.link.lock_state();
            let puts = state.operations.get(&self.op).map_or(0, |operation| operation.unread_ranges.len());
            if puts < PUTS_MAX { state.free_space.allocate_within(len, within) } else { None }
        };
        let Some(at) = at else { return false };
        // Outside the lock: this range is exclusively ours.
        let mut to = at;
        let is_written = parts.iter().all(|part| {
            let written = self.link.bounce.write(to, part);
            to += part.len() as u64;
            written.is_some()
        });
        let mut state = self.link.lock_state();
        if let Some(operation) = state.operations.get_mut(&self.op).filter(|_| is_written) {
            operation.unread_ranges.push_back(at);
            let places = vec![BounceRange { at, len }];
            self.link.post(&mut state, ClientPacket::Put { op: self.op, places }.encode());
        } else {
            state.free_space.free(at);
        }
        true
    }

    /// Number of ranges of this save that the node has not read.
    pub(super) fn pending_puts(&self) -> usize {
        self.link.lock_state().operations.get(&self.op).map_or(0, |operation| operation.unread_ranges.len())
    }

    /// Says that no further frames follow.
    pub(super) fn finish_puts(&self) {
        self.link.post(&mut self.link.lock_state(), ClientPacket::Finish { op: self.op }.encode());
    }

    /// Waits until a range of the bounce buffer is freed. Create it before checking for a free
    /// range, so that no event is missed.
    pub(super) fn space_freed(&self) -> tokio::sync::futures::Notified<'_> {
        self.link.space_freed.notified()
    }
}

impl Drop for ShmOperation {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut state = self.link.lock_state();
        state.grants.cancel(self.op);
        let Some(operation) = state.operations.get_mut(&self.op) else { return };
        operation.is_abandoned = true;
        let rows = std::mem::take(&mut operation.replies).into_iter().flat_map(|reply| match reply {
            Reply::Head(_, rows) | Reply::More(rows) => rows,
            _ => Vec::new(),
        });
        for row in rows {
            state.grants.release(row.grant);
        }
        self.link.send_returns(&mut state);
        self.link.post(&mut state, ClientPacket::Cancel { op: self.op }.encode());
        drop(state);
        // Later replies must return their grants, even if no other operation runs.
        if let Ok(runtime) = Handle::try_current() {
            let (link, op) = (Arc::clone(&self.link), self.op);
            runtime.spawn(async move {
                let _ = link.next_reply(op, Duration::ZERO).await;
            });
        }
    }
}
