//! The tier book's owner, and with it that of every slot of DRAM and every record on SSD of this node.
//!
//! Questions are answered by whoever asks or, when somebody works on the state, by the one task, over a bounded channel
//! (`desk`); ends of SSD and GPU jobs come over others. After each, the task runs what the book says and hands the changes
//! to the outboxes. Situations are beside: `fetching`, `saving`,
//! `moving`, `gpu`, `packing`, `status`. Not here: decisions (`kv_core::tier`) and the wire (`serve`).

mod asks;
#[cfg(test)]
mod caller_tests;
mod desk;
mod fetching;
mod gpu;
#[cfg(test)]
mod gpu_end_tests;
#[cfg(test)]
mod gpu_read_tests;
#[cfg(test)]
mod gpu_tests;
#[cfg(test)]
mod layer_tests;
mod moving;
mod packing;
mod saving;
mod slots;
mod status;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod weights_tests;
mod windows;

pub use asks::Ask;
pub use desk::{Full, StoreHandle};
pub(crate) use fetching::LoadBudget;
pub use fetching::{FetchPlan, Planned, PlannedBytes};
pub(crate) use gpu::{GPU_READS_MAX, GPU_RETRY, Gpu};
pub(crate) use saving::SlotSizes;
pub use saving::{OfferPlan, Reserved};
pub use windows::WaitingRequest;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kv_core::evict::BlockKey;
use kv_core::evict::statistics::Statistics;
use kv_core::id::{BlockHash, Epoch, Generation, NodeId, Seq, Timestamp};
use kv_core::tier::Book;
use kvfleet_transport::VisibleAt;
use parking_lot::Mutex;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::announce::outboxes::{Outboxes, Point};
use crate::arena::Arena;
use crate::metrics::Metrics;
use crate::tiers::gpu::GpuRecord;
use crate::tiers::gpu::thread::GpuReport;
use crate::tiers::ssd::budget::WriteBudget;
use crate::tiers::ssd::pace::Pace;
use crate::tiers::ssd::{Depth, Report, Ssd, SsdRecord};
use desk::{Desk, Queue, WeakQueue};
use moving::{Load, Move, Trouble};
use packing::Held;
use slots::Slots;
use windows::Windows;

/// Requests waiting for the task. It answers one in microseconds, so a full queue is some
/// milliseconds of work; beyond it callers are told `Busy`.
pub const STORE_QUEUE_MAX: usize = 1024;

/// What a caller is told to wait when the queue is full.
pub const BUSY_RETRY: Duration = Duration::from_millis(20);

/// Housekeeping interval: leases, retries, gauges.
const TICK: Duration = Duration::from_millis(20);

/// Time between two words to the routers of what was seen: half an hour is remembered, so seconds are soon.
const SAY_EVERY: Duration = Duration::from_secs(5);
/// Interval of the policies' background work.
const REFIT: Duration = Duration::from_secs(1);

/// What the task shares with the others.
#[derive(Debug)]
pub struct Shared {
    /// This node.
    pub node: NodeId,
    /// Announcements on their way.
    pub outboxes: Mutex<Outboxes>,
    /// Counts up when something new is in the outboxes.
    pub filled: watch::Sender<u64>,
    /// Last acknowledged announcement of each shard.
    pub acked: watch::Sender<Point>,
    /// What this node saw of categories of blocks, some seconds ago.
    pub(crate) seen: watch::Sender<Arc<Statistics>>,
    windows: Windows,
    generation: AtomicU32,
    epoch: AtomicU64,
    /// The same, for whoever waits for another.
    pub(crate) joined: watch::Sender<Epoch>,
    dram_bytes: AtomicU64,
    ssd_bytes: AtomicU64,
}

impl Shared {
    /// Nothing announced, no epoch.
    #[must_use]
    pub fn new(node: NodeId) -> Shared {
        Shared {
            node,
            outboxes: Mutex::new(Outboxes::default()),
            filled: watch::Sender::new(0),
            acked: watch::Sender::new(Point::default()),
            seen: watch::Sender::new(Arc::default()),
            windows: Windows::default(),
            generation: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            joined: watch::Sender::new(Epoch(0)),
            dram_bytes: AtomicU64::new(0),
            ssd_bytes: AtomicU64::new(0),
        }
    }

    /// Says that something new is in the outboxes.
    fn filled(&self) {
        self.filled.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// The present epoch; 0 before the first join.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// The weights in force, as far as this node heard: those of what it found at start, before the first join.
    #[must_use]
    pub fn generation(&self) -> Generation {
        Generation(self.generation.load(Ordering::Acquire))
    }

    /// Bytes in use in DRAM and on SSD, for heartbeats.
    #[must_use]
    pub fn used_bytes(&self) -> (u64, u64) {
        (self.dram_bytes.load(Ordering::Relaxed), self.ssd_bytes.load(Ordering::Relaxed))
    }
}

/// Bytes of one block.
#[derive(Debug, Default)]
struct Row {
    dram: Option<Held>,
    ssd: Option<SsdRecord>,
    gpu: Option<GpuRecord>,
}

/// Memory for a block's row, in bytes, and for what lends its bytes; rows grow by doubling.
pub(crate) const ROW_BYTES_MAX: u64 = 3 * size_of::<Row>() as u64 + 256;

/// What the store is made of.
pub(crate) struct Parts {
    pub(crate) book: Book,
    pub(crate) policy: String,
    pub(crate) arena: Arena,
    pub(crate) ssd: Option<Ssd>,
    pub(crate) reports: mpsc::UnboundedReceiver<Report>,
    pub(crate) gpu: Option<Gpu>,
    pub(crate) gpu_reports: mpsc::UnboundedReceiver<GpuReport>,
    pub(crate) rows: Vec<(BlockKey, SsdRecord)>,
    pub(crate) frame_bytes_max: usize,
    pub(crate) budget: LoadBudget,
    pub(crate) capacities: Capacities,
    pub(crate) writes: WriteBudget,
    pub(crate) scrub: Pace,
    pub(crate) quarantined: u64,
    pub(crate) memory_bytes_max: u64,
    pub(crate) shared: Arc<Shared>,
    pub(crate) metrics: Metrics,
    pub(crate) started: Instant,
}

pub(crate) use status::Capacities;

/// What the task woke for.
enum Came {
    /// Something is in the queue, or there is room.
    Due,
    Report(Report),
    GpuReport(GpuReport),
    Tick,
}

/// What the task has; dropped in this order.
struct Work {
    inbox: mpsc::Receiver<Ask>,
    desk: AtDesk,
}

/// Whoever has it ends the state.
struct AtDesk(Arc<Desk>);

impl Drop for AtDesk {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// The task's state.
pub(crate) struct Store {
    parts: Parts,
    /// Its own queue, for answers that nobody heard; weak, so that the task ends with its askers.
    queue: WeakQueue,
    rows: Vec<Row>,
    moves: HashMap<u64, Move>,
    slots: Slots,
    next_token: u64,
    /// By hash and not by key: a key is given out again, and what was read is checked against the hash. And by generation: of
    /// a hash there may be a block of earlier weights, which somebody reads still, and one of now.
    loads: HashMap<(BlockHash, Generation), Load>,
    trouble: Option<Trouble>,
    /// The SSD failed and has written nothing since: how long it was left alone.
    probation: Option<Duration>,
    /// Blocks that did not go to a slow SSD, as far as the metrics know.
    unwritten_blocks: u64,
    /// Bytes written again that the budget has taken in.
    rescued_bytes: u64,
    refitted: Instant,
    /// When what was seen was said last.
    said: Instant,
    /// Categories of which it was told what the fleet saw.
    fleet_categories: usize,
}

impl Store {
    /// Starts the task here.
    #[cfg(test)]
    pub(crate) fn start(parts: Parts, stop: CancellationToken) -> (StoreHandle, tokio::task::JoinHandle<()>) {
        Store::start_on(&tokio::runtime::Handle::current(), parts, stop)
    }

    /// Starts the task on a runtime.
    pub(crate) fn start_on(
        runtime: &tokio::runtime::Handle,
        parts: Parts,
        stop: CancellationToken,
    ) -> (StoreHandle, tokio::task::JoinHandle<()>) {
        let desk = Arc::new(Desk::default());
        let (store, handle, inbox) = Store::at(&Arc::downgrade(&desk), parts);
        desk.put(store);
        (handle, runtime.spawn(Store::run(desk, inbox, stop)))
    }

    /// Without a task: whoever has it answers for it.
    #[cfg(test)]
    fn new(parts: Parts) -> (Store, StoreHandle, mpsc::Receiver<Ask>) {
        Store::at(&Weak::new(), parts)
    }

    fn at(desk: &Weak<Desk>, mut parts: Parts) -> (Store, StoreHandle, mpsc::Receiver<Ask>) {
        let (asks, inbox) = mpsc::channel(STORE_QUEUE_MAX);
        let queue = Queue::new(asks, Weak::clone(desk));
        let weak = queue.downgrade();
        let handle = StoreHandle { queue, shared: Arc::clone(&parts.shared) };
        parts.shared.generation.store(parts.book.generation().0, Ordering::Release);
        let found = std::mem::take(&mut parts.rows);
        let mut store = Store {
            refitted: parts.started,
            said: parts.started,
            fleet_categories: 0,
            slots: Slots::new(Depth::of(parts.frame_bytes_max)),
            parts,
            queue: weak,
            rows: Vec::new(),
            moves: HashMap::new(),
            next_token: 0,
            loads: HashMap::new(),
            trouble: None,
            probation: None,
            unwritten_blocks: 0,
            rescued_bytes: 0,
        };
        for (key, record) in found {
            store.row(key).ssd = Some(record);
        }
        (store, handle, inbox)
    }

    /// The task: a step for each thing that comes, and after each what follows from it.
    async fn run(desk: Arc<Desk>, inbox: mpsc::Receiver<Ask>, stop: CancellationToken) {
        // However this ends, who waits in the queue hears of it before the state goes, which may wait for a device; and that goes
        // here, not wherever somebody asks last.
        let mut work = Work { inbox, desk: AtDesk(desk) };
        let (desk, inbox) = (Arc::clone(&work.desk.0), &mut work.inbox);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut reports, mut gpu_reports, arena) = desk.step(Store::take_reports);
        loop {
            let came = tokio::select! {
                () = stop.cancelled() => break,
                () = desk.due.notified() => Came::Due,
                Some(report) = reports.recv() => Came::Report(report),
                Some(report) = gpu_reports.recv() => Came::GpuReport(report),
                () = arena.freed() => Came::Due,
                _ = tick.tick() => Came::Tick,
            };
            // In one step with what follows: who asks between would find neither what was nor what is.
            let goes_on = desk.step(|store| {
                match came {
                    Came::Due => {}
                    Came::Report(report) => store.on_report(report),
                    Came::GpuReport(report) => store.on_gpu_report(report),
                    Came::Tick => store.tick(),
                }
                store.next(inbox)
            });
            if goes_on.is_break() {
                break;
            }
            if !inbox.is_empty() {
                desk.due.notify_one();
            }
            // Nothing above gives others of this thread their turn while the queue is never empty.
            tokio::task::consume_budget().await;
        }
    }

    /// What the task waits for without the state in its hands.
    fn take_reports(
        &mut self,
    ) -> (mpsc::UnboundedReceiver<Report>, mpsc::UnboundedReceiver<GpuReport>, Arena) {
        self.pump();
        let none = mpsc::unbounded_channel().1;
        let reports = std::mem::replace(&mut self.parts.reports, none);
        let none = mpsc::unbounded_channel().1;
        (reports, std::mem::replace(&mut self.parts.gpu_reports, none), self.parts.arena.clone())
    }

    /// Answers the next question, if there is one, and does what follows. Ends when nobody can ask any more.
    fn next(&mut self, inbox: &mut mpsc::Receiver<Ask>) -> ControlFlow<()> {
        match inbox.try_recv() {
            Ok(ask) => self.answer(ask),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return ControlFlow::Break(()),
        }
        self.pump();
        ControlFlow::Continue(())
    }

    fn answer(&mut self, ask: Ask) {
        // A caller that went away drops its end; what it asked for is done anyway.
        match ask {
            Ask::Fetch { asker, generation, hashes, reply } => {
                // Looked at before and again here, in one step with what is found: other weights may have come between.
                let is_now = generation == self.parts.book.generation();
                drop(reply.send(if is_now { self.fetch(asker, &hashes) } else { FetchPlan::OtherWeights }));
            }
            Ask::Offer { asker, generation, parent, first_offset_blocks, hashes, frame_bytes, reply } => {
                let is_now = generation == self.parts.book.generation();
                let mut offer = || self.offer(asker, parent, first_offset_blocks, &hashes, frame_bytes);
                drop(reply.send(if is_now { offer() } else { OfferPlan::OtherWeights }));
            }
            Ask::Put { lease, key, bytes } => self.put(lease, key, bytes),
            Ask::Abort { keys } => keys.into_iter().for_each(|key| self.parts.book.abort(key)),
            Ask::Position { block, reply } => drop(reply.send(self.position(block))),
            Ask::Positions { reply } => {
                self.tell_changes();
                drop(reply.send(self.parts.shared.outboxes.lock().positions()));
            }
            Ask::Release { lease, reply } => {
                self.parts.book.release(lease, self.now());
                let _ = reply.send(());
            }
            Ask::Renew { lease } => self.parts.book.renew(lease, self.now()),
            Ask::Joined { epoch, shards, generation, reply } => {
                let joined = self.joined(epoch, shards, generation);
                let _ = reply.send(joined);
            }
            Ask::Directives { pins, quotas, ttls } => {
                self.parts.book.set_pins(pins, self.now());
                self.parts.book.set_quotas(quotas);
                self.parts.book.set_ttls(ttls);
            }
            Ask::Inform { fleet } => {
                self.fleet_categories = fleet.categories().count();
                self.parts.book.inform(&fleet, self.now());
            }
            Ask::SetWindow => self.apply_windows(),
            Ask::Reannounce { shard, expected, reply } => {
                self.reannounce(shard, expected);
                let _ = reply.send(());
            }
            Ask::Audit { shard, blocks, sample, seed, reply } => {
                drop(reply.send(self.audit(shard, &blocks, sample, seed)));
            }
            Ask::Holdings { from, reply } => drop(reply.send(self.parts.book.holdings(from, self.now()))),
            Ask::Status { reply } => drop(reply.send(self.status())),
        }
    }

    /// Others weights take force here before anything is announced under them, and are noted on SSD before that: a small file on each device, for which
    /// everybody waits, once for each change.
    fn joined(&mut self, epoch: Epoch, shards: u16, generation: Generation) -> Result<(), String> {
        let before = self.parts.book.generation();
        if let Some(ssd) = self.parts.ssd.as_ref().filter(|_| generation != before) {
            ssd.note_weights(generation).map_err(|cause| {
                format!(
                    "generation {generation} of the weights cannot be noted on SSD ({cause}): mend or empty its directory, or start the node without SSD"
                )
            })?;
        }
        if self.parts.book.set_generation(generation, self.now()) {
            if generation < before {
                tracing::warn!(%before, now = %generation, "the routers count generations of weights anew, having lost their state: what this node has is void; tell instances the number that `kvfleet weights` shows");
            } else {
                tracing::info!(%before, now = %generation, "other weights are in force: what was computed with earlier ones is void");
            }
            self.parts.shared.generation.store(generation.0, Ordering::Release);
        }
        let everything = self.parts.book.announce_all();
        self.parts.shared.outboxes.lock().joined(epoch, shards, everything);
        self.parts.shared.epoch.store(epoch.0, Ordering::Release);
        self.parts.shared.joined.send_replace(epoch);
        self.parts.shared.filled();
        Ok(())
    }

    fn reannounce(&mut self, shard: u16, expected: Option<Seq>) {
        // The book forgets them with the next line, and other shards may be waiting for them.
        self.tell_changes();
        let everything = self.parts.book.announce_all();
        let mut outboxes = self.parts.shared.outboxes.lock();
        let part = outboxes.part(shard, everything);
        let Some(outbox) = outboxes.shard(shard) else { return };
        match expected {
            Some(expected) => outbox.resync(expected, part),
            None => outbox.refill(part),
        }
        drop(outboxes);
        self.parts.shared.filled();
    }

    fn position(&mut self, block: BlockHash) -> Option<VisibleAt> {
        self.tell_changes();
        let (shard, epoch, seq) = self.parts.shared.outboxes.lock().position(block)?;
        Some(VisibleAt { node: self.parts.shared.node, epoch, shard, seq })
    }

    /// Hands the book's changes to the outboxes.
    fn tell_changes(&mut self) {
        let changes = self.parts.book.take_changes();
        if !changes.is_empty() {
            self.parts.shared.outboxes.lock().push(changes);
            self.parts.shared.filled();
        }
    }

    /// Applies what all routers say together.
    fn apply_windows(&mut self) {
        let waiting = self.parts.shared.windows.take(Instant::now());
        let now = self.now();
        let taken = self.parts.book.set_window(waiting.newest.iter().map(Vec::as_slice), now);
        for caller in waiting.callers {
            let _ = caller.send(taken);
        }
    }

    fn tick(&mut self) {
        if self.parts.shared.windows.have_ended(Instant::now()) {
            self.apply_windows();
        }
        let now = self.now();
        self.parts.book.expire(now);
        self.parts.book.expire_window(now);
        self.parts.book.expire_pins(now);
        self.parts.book.expire_blocks(now);
        self.parts.book.list_more();
        self.parts.book.drop_void_blocks();
        self.parts.book.enforce_quotas();
        if self.refitted.elapsed() >= REFIT {
            self.refitted = Instant::now();
            self.parts.book.refit(now);
        }
        if self.said.elapsed() >= SAY_EVERY {
            self.said = Instant::now();
            self.parts.shared.seen.send_replace(Arc::new(self.parts.book.statistics(now)));
        }
        self.retry_ssd();
        self.look_at_ssds();
        self.retry_gpu();
        self.scrub(now);
        self.count_wear(now);
        self.show();
    }

    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.parts.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn row(&mut self, key: BlockKey) -> &mut Row {
        let position = key.0 as usize;
        if self.rows.len() <= position {
            self.rows.resize_with(position + 1, Row::default);
        }
        &mut self.rows[position]
    }
}
