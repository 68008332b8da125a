//! The store: owner of the tier book, of every DRAM slot and of every SSD record of this node.
//!
//! A request is answered by the caller itself if the state is free, and otherwise queued for the
//! store task (`cell`). Completions of SSD and GPU jobs arrive on other channels. After each step
//! the store runs the book's actions and passes its changes to the outboxes. Details are in
//! `fetching`, `saving`, `moving`, `gpu`, `compaction` and `status`. Not here: decisions
//! (`kv_core::tier`) and the wire (`block_service`).

#[cfg(test)]
mod caller_tests;
mod cell;
mod compaction;
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
mod requests;
mod saving;
mod slots;
mod status;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod weights_tests;
mod windows;

pub use cell::{StoreBusy, StoreHandle};
pub(crate) use fetching::LoadBudget;
pub use fetching::{FetchPlan, PlannedBlock, PlannedBytes};
pub(crate) use gpu::{GPU_READS_MAX, GPU_RETRY, Gpu};
pub use requests::StoreRequest;
pub(crate) use saving::SlotSizes;
pub use saving::{OfferPlan, OfferReservation};
pub use windows::WaitingRequest;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kv_core::evict::BlockKey;
use kv_core::evict::reuse_stats::ReuseStats;
use kv_core::id::{BlockHash, Epoch, Generation, NodeId, Seq, Timestamp};
use kv_core::tier::Book;
use kvfleet_transport::AnnouncePosition;
use parking_lot::Mutex;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::announce::outboxes::{Outboxes, ShardPositions};
use crate::arena::Arena;
use crate::metrics::Metrics;
use crate::tiers::BlockVersion;
use crate::tiers::gpu::GpuRecord;
use crate::tiers::gpu::thread::GpuReport;
use crate::tiers::ssd::budget::WriteBudget;
use crate::tiers::ssd::pace::ScrubPace;
use crate::tiers::ssd::{Depth, Report, SsdRecord, SsdTier};
use cell::{StoreCell, StoreQueue, WeakStoreQueue};
use compaction::DramBlock;
use moving::{PendingLoad, SsdMove, TierOutage};
use slots::MoveSlots;
use windows::Windows;

/// Maximum queued requests. The task answers one in microseconds, so a full queue is some
/// milliseconds of work; above it callers receive `Busy`.
pub const STORE_QUEUE_MAX: usize = 1024;

/// Retry hint sent with `Busy` when the queue is full.
pub const BUSY_RETRY: Duration = Duration::from_millis(20);

/// Housekeeping interval: leases, retries, gauges.
const TICK: Duration = Duration::from_millis(20);

/// Interval of reuse statistics sent to the routers, short against the half hour they cover.
const REUSE_STATS_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of the policies' background work.
const REFIT_INTERVAL: Duration = Duration::from_secs(1);

/// State that the store shares with other tasks.
#[derive(Debug)]
pub struct SharedState {
    /// This node.
    pub node: NodeId,
    /// Announcements to be sent.
    pub outboxes: Mutex<Outboxes>,
    /// Incremented when an outbox has a new change.
    pub filled: watch::Sender<u64>,
    /// Last acknowledged announcement of each shard.
    pub acked: watch::Sender<ShardPositions>,
    /// Reuse statistics of this node, updated every few seconds.
    pub(crate) reuse_stats: watch::Sender<Arc<ReuseStats>>,
    windows: Windows,
    generation: AtomicU32,
    epoch: AtomicU64,
    /// The current epoch, for tasks that wait for a change.
    pub(crate) joined: watch::Sender<Epoch>,
    dram_bytes: AtomicU64,
    ssd_bytes: AtomicU64,
}

impl SharedState {
    /// Without announcements or an epoch.
    #[must_use]
    pub fn new(node: NodeId) -> SharedState {
        SharedState {
            node,
            outboxes: Mutex::new(Outboxes::default()),
            filled: watch::Sender::new(0),
            acked: watch::Sender::new(ShardPositions::default()),
            reuse_stats: watch::Sender::new(Arc::default()),
            windows: Windows::default(),
            generation: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            joined: watch::Sender::new(Epoch(0)),
            dram_bytes: AtomicU64::new(0),
            ssd_bytes: AtomicU64::new(0),
        }
    }

    /// Signals that an outbox has a new change.
    fn notify_filled(&self) {
        self.filled.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// The current epoch; 0 before the first join.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// Weights generation in force; before the first join, that of the recovered SSD blocks.
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

/// Locations of one block's bytes.
#[derive(Debug, Default)]
struct BlockLocations {
    dram: Option<DramBlock>,
    ssd: Option<SsdRecord>,
    gpu: Option<GpuRecord>,
}

/// Maximum memory for a block's locations and its shared bytes; the vector grows by doubling.
pub(crate) const BLOCK_LOCATIONS_BYTES_MAX: u64 = 3 * size_of::<BlockLocations>() as u64 + 256;

/// Parts of the store.
pub(crate) struct StoreParts {
    pub(crate) book: Book,
    pub(crate) policy: String,
    pub(crate) arena: Arena,
    pub(crate) ssd: Option<SsdTier>,
    pub(crate) reports: mpsc::UnboundedReceiver<Report>,
    pub(crate) gpu: Option<Gpu>,
    pub(crate) gpu_reports: mpsc::UnboundedReceiver<GpuReport>,
    pub(crate) locations: Vec<(BlockKey, SsdRecord)>,
    pub(crate) frame_bytes_max: usize,
    pub(crate) budget: LoadBudget,
    pub(crate) capacities: Capacities,
    pub(crate) writes: WriteBudget,
    pub(crate) scrub: ScrubPace,
    pub(crate) quarantined: u64,
    pub(crate) memory_bytes_max: u64,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) metrics: Metrics,
    pub(crate) started: Instant,
}

pub(crate) use status::Capacities;

/// Why the task woke up.
enum WakeReason {
    /// A request is queued, or a slot became free.
    Queue,
    Report(Report),
    GpuReport(GpuReport),
    Tick,
}

/// State owned by the store task, in drop order.
struct TaskState {
    inbox: mpsc::Receiver<StoreRequest>,
    cell: CellGuard,
}

/// Dropping it drops the store.
struct CellGuard(Arc<StoreCell>);

impl Drop for CellGuard {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// The store's state.
pub(crate) struct Store {
    parts: StoreParts,
    /// The store's own queue, used by undelivered answers to abort reservations. Weak, so that the
    /// task ends when its callers are gone.
    queue: WeakStoreQueue,
    locations: Vec<BlockLocations>,
    moves: HashMap<u64, SsdMove>,
    slots: MoveSlots,
    next_token: u64,
    /// Keyed by hash, because keys are reused and loaded bytes are verified against the hash. Also
    /// by generation: one hash may have an earlier block that is still being read, and a current
    /// one.
    loads: HashMap<BlockVersion, PendingLoad>,
    outage: Option<TierOutage>,
    /// Last wait after an SSD failure, until a write succeeds; `None` while the SSD works.
    probation: Option<Duration>,
    /// Blocks not written to a slow SSD, as already counted in the metrics.
    unwritten_blocks: u64,
    /// Rewritten bytes already charged to the write budget.
    rescued_bytes: u64,
    refitted_at: Instant,
    /// When the reuse statistics were last published.
    stats_sent_at: Instant,
    /// Number of categories in the fleet's reuse statistics.
    fleet_categories: usize,
}

impl Store {
    /// Starts the task on the current runtime.
    #[cfg(test)]
    pub(crate) fn start(
        parts: StoreParts,
        stop: CancellationToken,
    ) -> (StoreHandle, tokio::task::JoinHandle<()>) {
        Store::start_on(&tokio::runtime::Handle::current(), parts, stop)
    }

    /// Starts the task on the given runtime.
    pub(crate) fn start_on(
        runtime: &tokio::runtime::Handle,
        parts: StoreParts,
        stop: CancellationToken,
    ) -> (StoreHandle, tokio::task::JoinHandle<()>) {
        let desk = Arc::new(StoreCell::default());
        let (store, handle, inbox) = Store::at(&Arc::downgrade(&desk), parts);
        desk.put(store);
        (handle, runtime.spawn(Store::run(desk, inbox, stop)))
    }

    /// A store without a task, for tests that call it directly.
    #[cfg(test)]
    fn new(parts: StoreParts) -> (Store, StoreHandle, mpsc::Receiver<StoreRequest>) {
        Store::at(&Weak::new(), parts)
    }

    fn at(
        desk: &Weak<StoreCell>,
        mut parts: StoreParts,
    ) -> (Store, StoreHandle, mpsc::Receiver<StoreRequest>) {
        let (asks, inbox) = mpsc::channel(STORE_QUEUE_MAX);
        let queue = StoreQueue::new(asks, Weak::clone(desk));
        let weak = queue.downgrade();
        let handle = StoreHandle { queue, shared: Arc::clone(&parts.shared) };
        parts.shared.generation.store(parts.book.generation().0, Ordering::Release);
        let found = std::mem::take(&mut parts.locations);
        let mut store = Store {
            refitted_at: parts.started,
            stats_sent_at: parts.started,
            fleet_categories: 0,
            slots: MoveSlots::new(Depth::for_frames(parts.frame_bytes_max)),
            parts,
            queue: weak,
            locations: Vec::new(),
            moves: HashMap::new(),
            next_token: 0,
            loads: HashMap::new(),
            outage: None,
            probation: None,
            unwritten_blocks: 0,
            rescued_bytes: 0,
        };
        for (key, record) in found {
            store.locations_mut(key).ssd = Some(record);
        }
        (store, handle, inbox)
    }

    /// The task: one step for each event, followed by its consequences.
    async fn run(desk: Arc<StoreCell>, inbox: mpsc::Receiver<StoreRequest>, stop: CancellationToken) {
        // On any exit, queued callers learn of it before the state is dropped, which may wait for a
        // device. The drop happens here, not in the thread of the last caller.
        let mut work = TaskState { inbox, cell: CellGuard(desk) };
        let (desk, inbox) = (Arc::clone(&work.cell.0), &mut work.inbox);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut reports, mut gpu_reports, arena) = desk.step(Store::take_reports);
        loop {
            let came = tokio::select! {
                () = stop.cancelled() => break,
                () = desk.queued.notified() => WakeReason::Queue,
                Some(report) = reports.recv() => WakeReason::Report(report),
                Some(report) = gpu_reports.recv() => WakeReason::GpuReport(report),
                () = arena.freed() => WakeReason::Queue,
                _ = tick.tick() => WakeReason::Tick,
            };
            // One step with its consequences: a caller in between would see an inconsistent state.
            let goes_on = desk.step(|store| {
                match came {
                    WakeReason::Queue => {}
                    WakeReason::Report(report) => store.on_report(report),
                    WakeReason::GpuReport(report) => store.on_gpu_report(report),
                    WakeReason::Tick => store.tick(),
                }
                store.next(inbox)
            });
            if goes_on.is_break() {
                break;
            }
            if !inbox.is_empty() {
                desk.queued.notify_one();
            }
            // With a queue that never empties, no await above yields to other tasks of this thread.
            tokio::task::consume_budget().await;
        }
    }

    /// Takes the receivers that the task awaits without holding the state.
    fn take_reports(
        &mut self,
    ) -> (mpsc::UnboundedReceiver<Report>, mpsc::UnboundedReceiver<GpuReport>, Arena) {
        self.pump();
        let none = mpsc::unbounded_channel().1;
        let reports = std::mem::replace(&mut self.parts.reports, none);
        let none = mpsc::unbounded_channel().1;
        (reports, std::mem::replace(&mut self.parts.gpu_reports, none), self.parts.arena.clone())
    }

    /// Answers the next queued request and runs its consequences. Breaks when no caller is left.
    fn next(&mut self, inbox: &mut mpsc::Receiver<StoreRequest>) -> ControlFlow<()> {
        match inbox.try_recv() {
            Ok(ask) => self.answer(ask),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return ControlFlow::Break(()),
        }
        self.pump();
        ControlFlow::Continue(())
    }

    fn answer(&mut self, ask: StoreRequest) {
        // A caller that went away drops its receiver; its request is executed anyway.
        match ask {
            StoreRequest::Fetch { asker, generation, hashes, reply } => {
                // Checked earlier and again here, in one step with the lookup: the weights may have
                // changed in between.
                let is_now = generation == self.parts.book.generation();
                drop(reply.send(if is_now {
                    self.fetch(asker, &hashes)
                } else {
                    FetchPlan::GenerationMismatch
                }));
            }
            StoreRequest::Offer {
                asker,
                generation,
                parent,
                first_offset_blocks,
                hashes,
                frame_bytes,
                reply,
            } => {
                let is_now = generation == self.parts.book.generation();
                let mut offer = || self.offer(asker, parent, first_offset_blocks, &hashes, frame_bytes);
                drop(reply.send(if is_now { offer() } else { OfferPlan::GenerationMismatch }));
            }
            StoreRequest::Put { lease, key, bytes } => self.put(lease, key, bytes),
            StoreRequest::Abort { keys } => keys.into_iter().for_each(|key| self.parts.book.abort(key)),
            StoreRequest::Position { block, reply } => drop(reply.send(self.position(block))),
            StoreRequest::Positions { reply } => {
                self.publish_changes();
                drop(reply.send(self.parts.shared.outboxes.lock().positions()));
            }
            StoreRequest::Release { lease, reply } => {
                self.parts.book.release(lease, self.now());
                let _ = reply.send(());
            }
            StoreRequest::Renew { lease } => self.parts.book.renew(lease, self.now()),
            StoreRequest::Joined { epoch, shards, generation, reply } => {
                let joined = self.joined(epoch, shards, generation);
                let _ = reply.send(joined);
            }
            StoreRequest::Directives { pins, quotas, ttls } => {
                self.parts.book.set_pins(pins, self.now());
                self.parts.book.set_quotas(quotas);
                self.parts.book.set_ttls(ttls);
            }
            StoreRequest::SetFleetReuseStats { fleet } => {
                self.fleet_categories = fleet.categories().count();
                self.parts.book.set_fleet_reuse_stats(&fleet, self.now());
            }
            StoreRequest::SetWindow => self.apply_windows(),
            StoreRequest::Reannounce { shard, expected, reply } => {
                self.reannounce(shard, expected);
                let _ = reply.send(());
            }
            StoreRequest::Audit { shard, blocks, sample, seed, reply } => {
                drop(reply.send(self.audit(shard, &blocks, sample, seed)));
            }
            StoreRequest::Holdings { from, reply } => {
                drop(reply.send(self.parts.book.holdings(from, self.now())));
            }
            StoreRequest::Status { reply } => drop(reply.send(self.status())),
        }
    }

    /// Applies a new epoch. A new weights generation takes effect before any announcement under it,
    /// and is recorded on SSD before that. The record is a small file on each device, written once
    /// per change while all callers wait.
    fn joined(&mut self, epoch: Epoch, shards: u16, generation: Generation) -> Result<(), String> {
        let before = self.parts.book.generation();
        if let Some(ssd) = self.parts.ssd.as_ref().filter(|_| generation != before) {
            ssd.record_weights(generation).map_err(|cause| {
                format!(
                    "cannot record weights generation {generation} on SSD ({cause}): repair or empty its \
                     directory, or start the node without SSD"
                )
            })?;
        }
        if self.parts.book.set_generation(generation, self.now()) {
            if generation < before {
                tracing::warn!(%before, now = %generation, "the routers restarted their count of weights \
                    generations after losing state; all blocks of this node are invalidated; give instances \
                    the generation that `kvfleet weights` shows");
            } else {
                tracing::info!(%before, now = %generation, "other weights are in force; blocks of earlier \
                    weights are invalidated");
            }
            self.parts.shared.generation.store(generation.0, Ordering::Release);
        }
        let everything = self.parts.book.announce_all();
        self.parts.shared.outboxes.lock().joined(epoch, shards, everything);
        self.parts.shared.epoch.store(epoch.0, Ordering::Release);
        self.parts.shared.joined.send_replace(epoch);
        self.parts.shared.notify_filled();
        Ok(())
    }

    fn reannounce(&mut self, shard: u16, expected: Option<Seq>) {
        // The next line discards pending changes, and other shards may need them.
        self.publish_changes();
        let everything = self.parts.book.announce_all();
        let mut outboxes = self.parts.shared.outboxes.lock();
        let part = outboxes.part(shard, everything);
        let Some(outbox) = outboxes.shard(shard) else { return };
        match expected {
            Some(expected) => outbox.resync(expected, part),
            None => outbox.refill(part),
        }
        drop(outboxes);
        self.parts.shared.notify_filled();
    }

    fn position(&mut self, block: BlockHash) -> Option<AnnouncePosition> {
        self.publish_changes();
        let (shard, epoch, seq) = self.parts.shared.outboxes.lock().position(block)?;
        Some(AnnouncePosition { node: self.parts.shared.node, epoch, shard, seq })
    }

    /// Passes the book's changes to the outboxes.
    fn publish_changes(&mut self) {
        let changes = self.parts.book.take_changes();
        if !changes.is_empty() {
            self.parts.shared.outboxes.lock().push(changes);
            self.parts.shared.notify_filled();
        }
    }

    /// Applies the merged windows of all routers.
    fn apply_windows(&mut self) {
        let waiting = self.parts.shared.windows.take(Instant::now());
        let now = self.now();
        let taken = self.parts.book.set_window(waiting.requests.iter().map(Vec::as_slice), now);
        for caller in waiting.callers {
            let _ = caller.send(taken);
        }
    }

    fn tick(&mut self) {
        if self.parts.shared.windows.any_expired(Instant::now()) {
            self.apply_windows();
        }
        let now = self.now();
        self.parts.book.expire(now);
        self.parts.book.expire_window(now);
        self.parts.book.expire_pins(now);
        self.parts.book.expire_blocks(now);
        self.parts.book.list_more();
        self.parts.book.drop_invalidated_blocks();
        self.parts.book.enforce_quotas();
        if self.refitted_at.elapsed() >= REFIT_INTERVAL {
            self.refitted_at = Instant::now();
            self.parts.book.refit(now);
        }
        if self.stats_sent_at.elapsed() >= REUSE_STATS_INTERVAL {
            self.stats_sent_at = Instant::now();
            self.parts.shared.reuse_stats.send_replace(Arc::new(self.parts.book.reuse_stats(now)));
        }
        self.retry_ssd();
        self.update_slow_ssds();
        self.retry_gpu();
        self.scrub(now);
        self.count_wear(now);
        self.update_metrics();
    }

    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.parts.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn locations_mut(&mut self, key: BlockKey) -> &mut BlockLocations {
        let position = key.0 as usize;
        if self.locations.len() <= position {
            self.locations.resize_with(position + 1, BlockLocations::default);
        }
        &mut self.locations[position]
    }
}
