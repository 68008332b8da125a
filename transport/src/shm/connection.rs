//! The node's end of one connection: reads packets, starts operations, sends queued packets.
//!
//! It ends with the client's end of the socket; only then is granted memory reused. Not here:
//! accepting (`server.rs`), operations (`serving.rs`), and grants (`grants.rs`).

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use kv_core::id::TrafficClass;
use kv_core::lease_grant::GrantEffect;
use kv_core::traffic_class::{self, ClassQuota};
use kvfleet_proto::data;
use kvfleet_proto::frame::SliceLayout;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::cpu_migration::CpuMigration;
use super::grants::{ConnectionGrants, OperationGuard};
use super::packet::{BounceRange, ClientPacket, CloseReason, NodePacket, PacketError, sender_cpu};
use super::save_guard::{ActiveSaves, SaveGuard};
use super::seqpacket::RecvOutcome;
use super::serving::{OperationContext, SaveFrames, SavePart};
use super::spin_wait::SpinWait;
use super::{
    BLOCKS_PER_OPERATION_MAX, EAGER_BLOCKS_MAX, EAGER_BYTES_MAX, OPERATIONS_MAX, PACKET_BYTES_MAX,
    RETRY_AFTER, SAVES_MAX,
};
use crate::layered::SLICES_AT_ONCE_MAX;
use crate::wire::{self, Operation};
use crate::{BoxFuture, FetchAnswer, FetchRequest, SaveOffer, SaveRequest};

/// Socket polls between two yields of the thread: a poll takes a quarter of a microsecond, a yield
/// longer.
const POLLS_PER_YIELD: usize = 4;

/// Returned grants of one packet that cause a yield before the next packet.
const RETURNS_PER_YIELD: usize = 64;

/// Packets read before a yield, so that running operations make progress.
const PACKETS_PER_YIELD: usize = 32;

/// Blocks that are answered for one connection before a yield: about ten microseconds.
const BLOCKS_PER_YIELD: usize = 128;

/// How long a client without grants may take to read why its connection closes.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum queued parts of a save.
pub(super) const SAVE_PARTS_MAX: usize = 1024;

/// Why the node closes a connection.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("a client of this host sent {0}")]
    Packet(#[from] PacketError),
    #[error("a client of this host sent an invalid request: {0}")]
    Request(#[from] kvfleet_proto::convert::ConvertError),
    #[error("a client of this host broke the grant rules: {0}")]
    Loan(#[from] kv_core::lease_grant::UnknownGrant),
    #[error("a client of this host sent {0}")]
    Rule(&'static str),
    #[error("the socket of a client of this host failed: {0}")]
    Socket(#[from] io::Error),
    #[error("a client of this host does not read its packets")]
    Slow,
}

/// Minimum operations of each class on one connection. The host needs no other limit: each process
/// has its own connection and bounce buffer.
const CLASS_MINIMUMS: traffic_class::ClassMinima = [8, 4, 1, 2];

/// One connection after its welcome.
pub(super) struct Connection {
    context: OperationContext,
    operations: JoinSet<()>,
    running: BTreeMap<u64, RunningOperation>,
    /// Slots of the running operations.
    class_slots: ClassQuota,
    ids: BTreeMap<Id, u64>,
    buffer: Box<[u8; PACKET_BYTES_MAX]>,
    spin_wait: SpinWait,
    cpu_migration: CpuMigration,
    /// Blocks of operations that were started since the last yield.
    blocks_since_yield: usize,
    /// Saves that may still copy, including aborted ones.
    active_saves: ActiveSaves,
}

struct RunningOperation {
    abort: AbortHandle,
    class: TrafficClass,
    save: Option<SaveChannel>,
    is_cancelled: bool,
}

/// Sends a save its frames or pieces, and counts how many it may still receive.
struct SaveChannel {
    sender: mpsc::Sender<SavePart>,
    puts_left: usize,
    /// Whether it may arrive by layer.
    is_layered: bool,
    /// Alive while the save still copies.
    guard: Weak<SaveGuard>,
}

/// Events of the connection's loop.
enum LoopEvent {
    /// The next packet, received by spinning; `None` if none came in time.
    Polled(Option<RecvOutcome>),
    Read(ReadProgress),
    OperationEnded {
        id: Id,
        is_broken: bool,
    },
    Work,
    Tick,
    Closing,
}

/// Progress of reading.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadProgress {
    /// The queue is empty.
    Drained,
    /// More packets may be queued.
    MoreLeft,
    /// The client is gone.
    Closed,
}

impl Connection {
    pub(super) fn new(context: OperationContext) -> Connection {
        let spin_wait = SpinWait::new(context.spin_wait);
        Connection {
            spin_wait,
            cpu_migration: CpuMigration::default(),
            context,
            operations: JoinSet::new(),
            running: BTreeMap::new(),
            class_slots: ClassQuota::new(OPERATIONS_MAX as u64, CLASS_MINIMUMS),
            ids: BTreeMap::new(),
            buffer: Box::new([0; PACKET_BYTES_MAX]),
            blocks_since_yield: 0,
            active_saves: ActiveSaves::default(),
        }
    }

    /// Serves the client until it is gone. If the node closes first (`closes`, or a violation by
    /// the client), it sends the reason and waits. `closes` is dropped once the reason was sent.
    pub(super) async fn serve(mut self, mut closes: watch::Receiver<bool>, lease: Duration) {
        let why = match self.run(&mut closes, lease).await {
            Ok(None) => None,
            Ok(Some(why)) => Some(why),
            Err(broken) => {
                if self.context.is_violation_logged.swap(true, Ordering::Relaxed) {
                    tracing::debug!("{broken}; closing its connection");
                } else {
                    tracing::warn!("{broken}; closing its connection, and later ones for the same reason");
                }
                Some(CloseReason::Protocol)
            }
        };
        let lending = self.context.grants.clone();
        self.operations.shutdown().await;
        if let Some(why) = why {
            lending.close(&NodePacket::Closing(why));
            lending.flush();
            lending.socket().get_ref().shutdown_send();
            drop(closes);
            self.run_effects().await;
            if lending.stats().0 > 0 {
                self.wait_for_client_end(lease).await;
            } else {
                // It reads no granted memory, so it only has to receive the reason.
                let _ = timeout(GOODBYE_TIMEOUT, self.wait_for_client_end(lease)).await;
            }
        }
        self.active_saves.wait_idle().await;
        lending.end();
        self.run_effects().await;
    }

    /// Runs until the client is gone (`None`), or the node closes the connection (the reason).
    async fn run(
        &mut self,
        closes: &mut watch::Receiver<bool>,
        lease: Duration,
    ) -> Result<Option<CloseReason>, ConnectionError> {
        let lending = self.context.grants.clone();
        let mut tick = interval((lease / 8).min(self.context.stall_timeout / 2));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut awake, mut at_once) = (None, 0);
        loop {
            let is_posting = lending.flush();
            let is_behind = lending.is_backlogged();
            // The socket comes last, so that a client that never stops sending does not starve
            // other work.
            let woken = tokio::select! {
                biased;
                () = wait_closing(closes) => LoopEvent::Closing,
                _ = tick.tick() => LoopEvent::Tick,
                Some(ended) = self.operations.join_next_with_id() => LoopEvent::from_join(ended),
                () = lending.wait_work() => LoopEvent::Work,
                room = lending.socket().get_ref().writable(), if is_posting => {
                    room?;
                    LoopEvent::Work
                }
                came = spin_receive(&lending, &mut self.buffer, awake), if awake.is_some() && !is_behind => {
                    LoopEvent::Polled(came?)
                }
                ready = lending.socket().readable(), if awake.is_none() && !is_behind => {
                    LoopEvent::Read(self.read(ready?).await?)
                }
            };
            match woken {
                LoopEvent::Read(ReadProgress::Closed) => return Ok(None),
                LoopEvent::Closing => return Ok(Some(CloseReason::Stopping)),
                LoopEvent::OperationEnded { id, is_broken } => self.operation_ended(id, is_broken),
                LoopEvent::Polled(None) => {
                    self.spin_wait.failed();
                    awake = None;
                }
                LoopEvent::Polled(Some(got)) => {
                    self.spin_wait.succeeded();
                    if self.handle_received(got).await? == ReadProgress::Closed {
                        return Ok(None);
                    }
                    at_once += 1;
                    if at_once % PACKETS_PER_YIELD == 0 {
                        tokio::task::yield_now().await;
                    }
                    awake = self.spin_deadline();
                }
                LoopEvent::Read(read) => {
                    if read == ReadProgress::MoreLeft {
                        // Nor does it starve other tasks of this thread.
                        tokio::task::yield_now().await;
                    }
                    awake = self.spin_deadline();
                }
                LoopEvent::Work => {}
                LoopEvent::Tick => lending.tick(),
            }
            if let Some(error) = lending.take_failure() {
                return Err(error.into());
            }
            if lending.queued_since().is_some_and(|since| since.elapsed() > self.context.stall_timeout) {
                return Err(ConnectionError::Slow);
            }
            self.run_effects().await;
        }
    }

    /// Reads the queued packets, up to a limit.
    async fn read(
        &mut self,
        mut ready: tokio::io::unix::AsyncFdReadyGuard<'_, super::seqpacket::Seqpacket>,
    ) -> Result<ReadProgress, ConnectionError> {
        for _ in 0..PACKETS_PER_YIELD {
            if self.context.grants.is_backlogged() {
                break;
            }
            let got = ready.get_inner().recv(&mut self.buffer)?;
            let is_later = matches!(got, RecvOutcome::WouldBlock);
            match self.handle_received(got).await? {
                ReadProgress::MoreLeft => {}
                read => {
                    if is_later {
                        ready.clear_ready();
                    }
                    return Ok(read);
                }
            }
        }
        Ok(ReadProgress::MoreLeft)
    }

    /// Until when to spin for the next packet; `None` to sleep.
    fn spin_deadline(&mut self) -> Option<Instant> {
        let span = self.spin_wait.begin()?;
        if self.context.may_move {
            self.cpu_migration.leave_client_cpu();
        }
        Some(Instant::now() + span)
    }

    /// Handles a received packet, which is in the buffer.
    async fn handle_received(&mut self, got: RecvOutcome) -> Result<ReadProgress, ConnectionError> {
        match got {
            RecvOutcome::Packet(len, descriptors) if descriptors.is_empty() => {
                if self.context.may_move {
                    self.cpu_migration.set_client_cpu(sender_cpu(&self.buffer[..len]));
                }
                let packet = ClientPacket::decode(&self.buffer[..len])?;
                self.handle_packet(packet).await?;
                Ok(ReadProgress::MoreLeft)
            }
            RecvOutcome::Packet(..) => Err(ConnectionError::Rule("unexpected descriptors")),
            RecvOutcome::Closed => Ok(ReadProgress::Closed),
            RecvOutcome::WouldBlock => Ok(ReadProgress::Drained),
        }
    }

    async fn handle_packet(&mut self, packet: ClientPacket) -> Result<(), ConnectionError> {
        match packet {
            ClientPacket::Hello { .. } => return Err(ConnectionError::Rule("a second hello")),
            ClientPacket::Begin { op, request } => return self.start_operation(op, request).await,
            ClientPacket::Save { op, request, places } => return self.save_eager(op, request, places).await,
            ClientPacket::Put { op, places } => self.forward_save_part(op, SavePart::Put(places))?,
            ClientPacket::Finish { op } => self.forward_save_part(op, SavePart::Finish)?,
            ClientPacket::Cancel { op } => match self.running.get_mut(&op) {
                Some(running) => {
                    running.is_cancelled = true;
                    running.abort.abort();
                }
                None => self.context.grants.post(&NodePacket::Ended { op }),
            },
            ClientPacket::Return { loans } => {
                self.context.grants.return_grants(&loans)?;
                if loans.len() > RETURNS_PER_YIELD {
                    tokio::task::yield_now().await;
                }
            }
        }
        Ok(())
    }

    /// Forwards a part of a save; ignores it if the save has ended.
    fn forward_save_part(&mut self, op: u64, part: SavePart) -> Result<(), ConnectionError> {
        let Some(running) = self.running.get_mut(&op) else { return Ok(()) };
        let Some(save) = &mut running.save else {
            return Err(ConnectionError::Rule("frames for an operation that is not a save"));
        };
        if let SavePart::Put(places) = &part {
            // Every queued packet has at least one range, so their number is bounded.
            if places.is_empty() || save.is_layered && places.len() > 1 {
                return Err(ConnectionError::Rule("a packet without frames, or with more than one piece"));
            }
            let left = save.puts_left.checked_sub(places.len());
            save.puts_left = left.ok_or(ConnectionError::Rule(
                "more frames than a save has blocks, or more pieces than it has slices and heads",
            ))?;
        }
        match save.sender.try_send(part) {
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(ConnectionError::Rule("more frames or pieces at once than a save may have"))
            }
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
        }
    }

    async fn start_operation(&mut self, op: u64, request: data::DataRequest) -> Result<(), ConnectionError> {
        self.check_new_operation(op)?;
        let lending = self.context.grants.clone();
        let noted = NodePacket::Acknowledged { op, pong: data::Pong { version: wire::PROTOCOL_VERSION } };
        match wire::operation_from_pb(request)? {
            // The client takes the layers out of whole frames.
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

    /// Starts a save with its frames already in the bounce buffer.
    async fn save_eager(
        &mut self,
        op: u64,
        request: data::DataRequest,
        places: Vec<BounceRange>,
    ) -> Result<(), ConnectionError> {
        self.check_new_operation(op)?;
        match wire::operation_from_pb(request)? {
            Operation::Save(request, _) if request.hashes.len() == places.len() => {
                let bytes: u64 = places.iter().map(|place| u64::from(place.len)).sum();
                if places.len() > EAGER_BLOCKS_MAX || bytes > EAGER_BYTES_MAX {
                    return Err(ConnectionError::Rule("more frames than may go with an offer"));
                }
                self.save(op, request, None, places).await
            }
            _ => Err(ConnectionError::Rule(
                "frames with a request that is not a save of the same number of blocks",
            )),
        }
    }

    fn check_new_operation(&self, op: u64) -> Result<(), ConnectionError> {
        match self.running.contains_key(&op) {
            true => Err(ConnectionError::Rule("the number of a running operation for a new one")),
            false => Ok(()),
        }
    }

    async fn fetch(&mut self, op: u64, request: FetchRequest) -> Result<(), ConnectionError> {
        check_block_count(request.hashes.len())?;
        let class = request.class();
        if !self.take_slot(class) {
            let head = wire::head_to_pb(&FetchAnswer::Busy { retry_after: RETRY_AFTER }, request.epoch);
            self.context.grants.post(&NodePacket::Head { op, head, rows: Vec::new() });
            return Ok(());
        }
        let begun = self.begin(request.context.lease).await;
        let blocks = request.hashes.len();
        self.spawn(op, class, blocks, None, Box::pin(self.context.clone().fetch(op, request, begun))).await;
        Ok(())
    }

    async fn save(
        &mut self,
        op: u64,
        request: SaveRequest,
        layout: Option<SliceLayout>,
        there: Vec<BounceRange>,
    ) -> Result<(), ConnectionError> {
        check_block_count(request.hashes.len())?;
        self.reap_ended();
        let saves = || self.running.values().filter_map(|running| running.save.as_ref());
        // Layer-wise saves last as long as a prefill, so slots are left for others.
        let layered = saves().filter(|save| save.is_layered).count();
        let may_end = layout.is_some();
        let puts = puts_max(&request, layout.as_ref());
        let layout = layout.filter(|_| layered < SAVES_MAX / 2 && puts <= SLICES_AT_ONCE_MAX);
        let (saves, class) = (saves().count(), request.class());
        if saves >= SAVES_MAX || !self.take_slot(class) {
            let offer = wire::offer_to_pb(&SaveOffer::Busy { retry_after: RETRY_AFTER });
            self.context.grants.post(&NodePacket::Offer { op, offer });
            return Ok(());
        }
        let begun = self.begin(request.context.lease).await;
        let held =
            begun.map(|begun| SaveGuard::new(op, self.context.grants.clone(), begun, &self.active_saves));
        let (to, come) = mpsc::channel(SAVE_PARTS_MAX);
        // Receiving a frame takes longer than looking up a block.
        let blocks = request.hashes.len() + there.len() * BLOCKS_PER_YIELD / 8;
        let left = if there.is_empty() { puts_max(&request, layout.as_ref()) } else { 0 };
        let weak = held.as_ref().map_or_else(|_| Weak::new(), Arc::downgrade);
        let parts = SaveChannel { sender: to, puts_left: left, is_layered: layout.is_some(), guard: weak };
        let frames = SaveFrames { layout, may_be_empty: may_end, eager_ranges: there, parts: come };
        let save = Box::pin(self.context.clone().save(op, request, held, frames));
        self.spawn(op, class, blocks, Some(parts), save).await;
        Ok(())
    }

    /// Runs pending releases first: they must not end the operation that starts now.
    async fn begin(
        &mut self,
        lease: kv_core::id::LeaseId,
    ) -> Result<OperationGuard, kv_core::lease_grant::GrantRefused> {
        self.run_effects().await;
        self.context.grants.begin(lease)
    }

    /// Polls a new operation once, here. If it has to wait, it continues as a separate task; most
    /// finish at once.
    async fn spawn(
        &mut self,
        op: u64,
        class: TrafficClass,
        blocks: usize,
        save: Option<SaveChannel>,
        mut operation: BoxFuture<'static, ()>,
    ) {
        self.blocks_since_yield += blocks + 1;
        if self.blocks_since_yield > BLOCKS_PER_YIELD {
            self.blocks_since_yield = 0;
            tokio::task::yield_now().await;
        }
        let first = poll_fn(|context| {
            // As in a separate task, a panic ends only this operation.
            let polled = catch_unwind(AssertUnwindSafe(|| operation.as_mut().poll(context)));
            Poll::Ready(polled)
        });
        match first.await {
            Ok(Poll::Ready(())) => self.class_slots.release(class, 1),
            Ok(Poll::Pending) => {
                let abort = self.operations.spawn(operation);
                self.ids.insert(abort.id(), op);
                self.running.insert(op, RunningOperation { abort, class, save, is_cancelled: false });
            }
            Err(_) => {
                self.class_slots.release(class, 1);
                self.context.grants.post(&NodePacket::Ended { op });
            }
        }
    }

    /// Takes a slot of this class for one more operation, if one is free. Finished operations are
    /// reaped first.
    fn take_slot(&mut self, class: TrafficClass) -> bool {
        self.reap_ended();
        self.class_slots.try_take(class, 1)
    }

    fn reap_ended(&mut self) {
        while let Some(LoopEvent::OperationEnded { id, is_broken }) =
            self.operations.try_join_next_with_id().map(LoopEvent::from_join)
        {
            self.operation_ended(id, is_broken);
        }
    }

    /// Handles the end of an operation's task. The client was not told if the task was cancelled or
    /// panicked.
    fn operation_ended(&mut self, id: Id, is_broken: bool) {
        let Some(op) = self.ids.remove(&id) else { return };
        let Some(running) = self.running.remove(&op) else { return };
        self.class_slots.release(running.class, 1);
        if running.is_cancelled || is_broken {
            match running.save.and_then(|save| save.guard.upgrade()) {
                // The guard tells the client at its end.
                Some(held) => held.report_end(),
                None => self.context.grants.post(&NodePacket::Ended { op }),
            }
        }
    }

    async fn run_effects(&mut self) {
        for effect in self.context.grants.take_effects() {
            match effect {
                GrantEffect::Release(lease) => self.context.service.release(lease).await,
                GrantEffect::Renew(lease) => self.context.service.renew(lease),
                GrantEffect::Free(_) => {}
            }
        }
    }

    /// The client was told to leave. Its further packets are ignored.
    async fn wait_for_client_end(&mut self, lease: Duration) {
        let lending = self.context.grants.clone();
        let mut tick = interval(lease / 8);
        loop {
            tokio::select! {
                biased;
                // Its grants stay valid as long as it may read them.
                _ = tick.tick() => {
                    lending.tick();
                    self.run_effects().await;
                }
                ready = lending.socket().readable() => {
                    // Its end is unknown, so memory that it may read is never reused.
                    let Ok(mut ready) = ready else { return std::future::pending().await };
                    match ready.get_inner().recv(&mut self.buffer) {
                        Ok(RecvOutcome::Closed) => return,
                        Ok(RecvOutcome::WouldBlock) => ready.clear_ready(),
                        // Received descriptors are closed.
                        Ok(RecvOutcome::Packet(..)) => {}
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

impl LoopEvent {
    fn from_join(ended: Result<(Id, ()), JoinError>) -> LoopEvent {
        match ended {
            Ok((id, ())) => LoopEvent::OperationEnded { id, is_broken: false },
            Err(error) => LoopEvent::OperationEnded { id: error.id(), is_broken: true },
        }
    }
}

/// Polls for a packet until then, and yields to the other tasks of this thread.
async fn spin_receive(
    lending: &ConnectionGrants,
    buffer: &mut [u8; PACKET_BYTES_MAX],
    until: Option<Instant>,
) -> io::Result<Option<RecvOutcome>> {
    loop {
        for _ in 0..POLLS_PER_YIELD {
            match lending.socket().get_ref().recv(buffer)? {
                RecvOutcome::WouldBlock => {}
                got => return Ok(Some(got)),
            }
        }
        if until.is_none_or(|until| Instant::now() >= until) {
            return Ok(None);
        }
        tokio::task::yield_now().await;
    }
}

/// Waits until the server closes.
async fn wait_closing(closes: &mut watch::Receiver<bool>) {
    // An error means that the server is gone, so it has closed.
    let _ = closes.wait_for(|closes| *closes).await;
}

/// Maximum ranges of a save: one for each frame, or for each slice and head.
fn puts_max(request: &SaveRequest, layout: Option<&SliceLayout>) -> usize {
    let of_block = layout.map_or(1, |layout| layout.slice_bytes().len() + 1);
    request.hashes.len().saturating_mul(of_block)
}

fn check_block_count(blocks: usize) -> Result<(), ConnectionError> {
    if blocks > BLOCKS_PER_OPERATION_MAX {
        Err(ConnectionError::Rule("more blocks than one operation may ask for"))
    } else {
        Ok(())
    }
}
