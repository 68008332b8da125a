//! The GPU tier in the store: promotions, read-backs, and the handling of a failed or lost device.
//!
//! No call here waits for the device. While it is absent, moves may begin and fail at once, so that
//! a reader gets a miss at once. Not here: which block moves (`kv_core::tier`), and how
//! (`tiers::gpu`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, Tier};
use kv_core::tier::GPU_PROMOTIONS_MAX;
use kvfleet_transport::MissReason;

use super::Store;
use super::compaction::DramBlock;
use super::moving::{SSD_RETRY, TierOutage, next_wait};
use crate::arena::{Purpose, SlotMut};
use crate::tiers::BlockVersion;
use crate::tiers::gpu::device::DeviceError;
use crate::tiers::gpu::thread::{GpuReport, GpuRequest, GpuThread};
use crate::tiers::gpu::{GpuFault, GpuRecord, JOBS_MAX};

/// DRAM slots for blocks read from the GPU that stay assigned to it. They are not charged to DRAM
/// and are held until the last reader is done, so they are counted, and the arena has as many extra
/// slots.
pub(crate) const GPU_READS_MAX: usize = JOBS_MAX;

/// After a failure the GPU accepts no blocks for this long; each failed retry doubles the wait, as
/// for the SSD.
pub(crate) const GPU_RETRY: Duration = SSD_RETRY;

/// Maximum moves in flight that no reader awaits.
const BACKGROUND_MAX: usize = GPU_PROMOTIONS_MAX;

/// State of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It is being opened.
    Opening,
    /// It works.
    Ready,
    /// It is lost, and the book is being updated step by step.
    Losing,
    /// It is lost, and the book is up to date.
    Lost,
    /// Its thread ended; only a restart of the node recovers it.
    ThreadEnded,
}

/// A move on the GPU thread.
#[derive(Debug)]
struct GpuMove {
    key: BlockKey,
    hash: BlockHash,
    is_promotion: bool,
    /// A reader waited when it began.
    is_awaited: bool,
    /// Set if its slot is one of [`GPU_READS_MAX`].
    transit: Option<Arc<()>>,
}

/// Bytes in one of [`GPU_READS_MAX`] slots.
struct TransitBytes {
    /// Dropped first: a task woken by the freed slot must see the right count.
    _mark: Arc<()>,
    bytes: Bytes,
}

impl AsRef<[u8]> for TransitBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// State of the GPU tier.
#[derive(Debug)]
pub(crate) struct Gpu {
    thread: GpuThread,
    phase: Phase,
    moves: HashMap<u64, GpuMove>,
    /// Each slot of a block in transit holds a reference.
    transit: Arc<()>,
    outage: Option<TierOutage>,
    /// Last wait after a failure, until a block is stored; `None` while it works.
    probation: Option<Duration>,
    /// First wait after a failure.
    retry: Duration,
}

/// The cause with a remedy.
pub(super) fn with_remedy(cause: &DeviceError) -> String {
    let remedy = match cause {
        DeviceError::Absent | DeviceError::NoMemory { .. } => return cause.to_string(),
        DeviceError::Copy(_) => "check the GPU if this repeats (nvidia-smi)",
        DeviceError::Lost(_) => {
            "blocks that were only on it are dropped; check it (nvidia-smi), and restart the node if it does \
             not come back"
        }
    };
    format!("{cause}; {remedy}")
}

/// Kinds of GPU moves that can begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuPermits {
    pub(super) read: bool,
    pub(super) read_back: bool,
    pub(super) promote: bool,
}

impl Gpu {
    /// Starts to open the device on this thread.
    pub(crate) fn new(thread: GpuThread, retry: Duration) -> Gpu {
        thread.send(GpuRequest::Open);
        let (moves, transit) = (HashMap::new(), Arc::default());
        Gpu { thread, phase: Phase::Opening, moves, transit, outage: None, probation: None, retry }
    }

    /// Moves in flight.
    pub(super) fn moves(&self) -> usize {
        self.moves.len()
    }

    /// Why it accepts no blocks; `None` if it does.
    pub(super) fn outage_reason(&self) -> Option<&str> {
        let opening = (self.phase == Phase::Opening).then_some("being opened");
        self.outage.as_ref().map(|trouble| trouble.reason.as_str()).or(opening)
    }

    /// `has_slots`: DRAM has slots beyond those that SSD loads need.
    fn permits(&self, has_slots: bool) -> GpuPermits {
        if self.phase != Phase::Ready {
            return GpuPermits { read: true, read_back: true, promote: true };
        }
        let background = self.moves.values().filter(|move_| !move_.is_awaited).count();
        let is_free = self.moves.len() < JOBS_MAX;
        let is_idle = is_free && background < BACKGROUND_MAX;
        // One reference is the tier's own.
        let may_pass = Arc::strong_count(&self.transit) <= GPU_READS_MAX;
        GpuPermits {
            read: is_free && has_slots && may_pass,
            read_back: is_idle && has_slots,
            promote: is_idle,
        }
    }

    /// Backs off from the device for a while. Logs the failure once until the device works again.
    fn back_off(&mut self, cause: &str) {
        let next = || self.probation.map_or(self.retry, |before| next_wait(Some(before)));
        let known = self.outage.as_ref().filter(|_| self.phase != Phase::Lost).map(|trouble| trouble.wait);
        let wait = known.unwrap_or_else(next);
        let reason = format!("{cause}; trying again after {} s", wait.as_secs());
        if self.outage.is_none() && self.probation.is_none() {
            tracing::error!(reason, "the GPU tier takes no blocks; DRAM and SSD go on without it");
        } else {
            tracing::debug!(reason, "the GPU tier takes no blocks");
        }
        self.outage = Some(TierOutage { reason, until: Instant::now() + wait, wait });
        self.probation = Some(wait);
    }
}

impl Store {
    pub(super) fn gpu_permits(&self) -> GpuPermits {
        let room = |gpu: &Gpu| gpu.permits(self.parts.arena.has_room(Purpose::Prefetch));
        self.parts.gpu.as_ref().map(room).unwrap_or_default()
    }

    /// Starts a promotion from DRAM to GPU.
    pub(super) fn promote_to_gpu(&mut self, key: BlockKey, hash: BlockHash) {
        let frame = self.locations_mut(key).dram.as_ref().map(DramBlock::share);
        let is_begun = frame.is_some_and(|frame| {
            let lift = GpuMove { key, hash, is_promotion: true, is_awaited: false, transit: None };
            self.begin_gpu(lift, |token| GpuRequest::Put { token, frame })
        });
        if !is_begun {
            self.parts.book.on_move_failed(key, Tier::Gpu, self.now());
        }
    }

    /// Starts a read-back from GPU to DRAM.
    pub(super) fn read_back_from_gpu(&mut self, key: BlockKey, hash: BlockHash) {
        let is_read = self.loads.contains_key(&self.version_of(key, hash));
        let record = self.locations_mut(key).gpu;
        let len = self.parts.book.meta(key).map(|meta| meta.traits.bytes as usize);
        let is_ready = self.parts.gpu.as_ref().is_some_and(|gpu| gpu.phase == Phase::Ready);
        let (true, Some(record), Some(len)) = (is_ready, record, len) else {
            return self.load_failed(key, hash, MissReason::MediumFailed);
        };
        // The reserve is for SSD loads: each of them demotes a block from DRAM, and this one does
        // not.
        let Some(into) = self.parts.arena.take(len, Purpose::Prefetch) else {
            return self.parts.book.on_move_delayed(key, Tier::Dram);
        };
        let get = |token, into: SlotMut| GpuRequest::Get { token, record, into };
        let passes = self.parts.book.assigned_tier(key) == Some(Tier::Gpu);
        let passing = self.parts.gpu.as_ref().filter(|_| passes).map(|gpu| Arc::clone(&gpu.transit));
        let lower = GpuMove { key, hash, is_promotion: false, is_awaited: is_read, transit: passing };
        if !self.begin_gpu(lower, |token| get(token, into)) {
            self.load_failed(key, hash, MissReason::MediumFailed);
        }
    }

    /// Returns `false` if the device is absent.
    fn begin_gpu(&mut self, move_: GpuMove, job: impl FnOnce(u64) -> GpuRequest) -> bool {
        let Some(gpu) = self.parts.gpu.as_mut().filter(|gpu| gpu.phase == Phase::Ready) else { return false };
        self.next_token += 1;
        let is_sent = gpu.thread.send(job(self.next_token));
        if is_sent {
            gpu.moves.insert(self.next_token, move_);
        }
        is_sent
    }

    pub(super) fn drop_gpu(&mut self, key: BlockKey, block: BlockVersion) {
        if let (Some(record), Some(gpu)) = (self.locations_mut(key).gpu.take(), &self.parts.gpu) {
            gpu.thread.send(GpuRequest::Free { record });
        }
        // Readers of a dropped block must learn that it will not arrive; a block that continues
        // elsewhere still arrives.
        let BlockVersion { hash, generation } = block;
        let goes_on = if generation == self.parts.book.generation() {
            self.parts.book.tier_of(&hash).is_some()
        } else {
            // No block is saved under earlier weights any more, so if the key is known it is still
            // this block.
            let is_this = self.parts.book.meta(key).is_some_and(|meta| meta.hash == hash);
            is_this && self.parts.book.generation_of(key) == Some(generation)
        };
        if !goes_on {
            self.notify_waiting(block, &Err(MissReason::NotHeld));
        }
    }

    pub(super) fn on_gpu_report(&mut self, report: GpuReport) {
        // A report sent before the thread ended may arrive after its cleanup; ignore it, because no
        // block is there any more.
        if self.parts.gpu.as_ref().is_none_or(|gpu| gpu.phase == Phase::ThreadEnded) {
            return;
        }
        match report {
            GpuReport::Opened(Ok(())) => self.gpu_opened(),
            GpuReport::Opened(Err(cause)) => {
                self.set_gpu_phase(Phase::Lost);
                self.gpu_failed(&cause);
            }
            GpuReport::Lost(cause) => self.gpu_lost(&cause),
            GpuReport::Stored { token, result } => self.on_promoted_to_gpu(token, result),
            GpuReport::Loaded { token, result } => self.on_read_back(token, result),
        }
    }

    fn gpu_opened(&mut self) {
        let Some(gpu) = self.parts.gpu.as_mut() else { return };
        gpu.phase = Phase::Ready;
        if gpu.outage.take().is_some() {
            tracing::info!("the GPU tier is open again");
        }
        self.parts.book.set_admitting(Tier::Gpu, true);
    }

    /// The thread reports the loss before it ends its jobs; their results still arrive.
    fn gpu_lost(&mut self, cause: &DeviceError) {
        self.set_gpu_phase(Phase::Losing);
        self.gpu_failed(cause);
    }

    fn set_gpu_phase(&mut self, phase: Phase) {
        if let Some(gpu) = self.parts.gpu.as_mut() {
            gpu.phase = phase;
        }
    }

    fn gpu_failed(&mut self, cause: &DeviceError) {
        self.parts.metrics.gpu_error();
        self.parts.book.set_admitting(Tier::Gpu, false);
        if let Some(gpu) = self.parts.gpu.as_mut() {
            gpu.back_off(&with_remedy(cause));
        }
    }

    fn on_promoted_to_gpu(&mut self, token: u64, result: Result<Option<GpuRecord>, GpuFault>) {
        let Some(GpuMove { key, hash, .. }) = self.end_gpu(token) else { return };
        match result {
            Ok(Some(record)) => {
                self.locations_mut(key).gpu = Some(record);
                self.parts.book.on_moved(key, Tier::Gpu);
                let gpu = self.parts.gpu.as_mut();
                if gpu.is_some_and(|gpu| gpu.outage.is_none() && gpu.probation.take().is_some()) {
                    tracing::info!("the GPU tier takes blocks again");
                }
                return;
            }
            // No free slot of its size, although the account has space: it stays in DRAM.
            Ok(None) => {}
            // Logged once for the device, not for each block.
            Err(GpuFault::Device(DeviceError::Lost(_))) => {}
            Err(GpuFault::Device(cause)) => self.gpu_failed(&cause),
            Err(fault) => {
                tracing::debug!(%fault, %hash, "a block promoted to the GPU was corrupted");
                self.gpu_failed(&DeviceError::Copy(fault.to_string()));
            }
        }
        self.parts.book.on_move_failed(key, Tier::Gpu, self.now());
    }

    fn on_read_back(&mut self, token: u64, result: Result<Bytes, GpuFault>) {
        let Some(GpuMove { key, hash, transit: passing, .. }) = self.end_gpu(token) else { return };
        match result {
            Ok(bytes) => {
                // A block demoted from the GPU to DRAM meanwhile is charged to DRAM.
                let passing = passing.filter(|_| self.parts.book.assigned_tier(key) != Some(Tier::Dram));
                let bytes = match passing {
                    Some(mark) => Bytes::from_owner(TransitBytes { _mark: mark, bytes }),
                    None => bytes,
                };
                self.loaded(key, hash, bytes);
            }
            Err(fault) => {
                let is_lost = matches!(fault, GpuFault::Device(DeviceError::Lost(_)));
                if !is_lost {
                    tracing::error!(%fault, %hash, "a block on the GPU is unusable and was dropped; check \
                        the GPU when this repeats (nvidia-smi)");
                    self.parts.metrics.gpu_error();
                }
                let is_corrupt = matches!(fault, GpuFault::Corrupt(_) | GpuFault::Frame(_));
                let reason = if is_corrupt { MissReason::Corrupt } else { MissReason::MediumFailed };
                self.load_failed(key, hash, reason);
            }
        }
    }

    fn end_gpu(&mut self, token: u64) -> Option<GpuMove> {
        self.parts.gpu.as_mut()?.moves.remove(&token)
    }

    /// Continues the cleanup after a lost device.
    pub(super) fn continue_gpu_loss(&mut self) {
        if self.parts.gpu.as_ref().is_none_or(|gpu| gpu.phase != Phase::Losing) {
            return;
        }
        let is_more = self.parts.book.lose_gpu(self.now());
        if let Some(gpu) = self.parts.gpu.as_mut().filter(|gpu| !is_more && gpu.moves.is_empty()) {
            gpu.phase = Phase::Lost;
        }
    }

    /// Handles the unexpected end of the GPU thread: its moves fail, and all GPU blocks are lost.
    fn on_gpu_thread_ended(&mut self) {
        let reason =
            "the GPU's thread ended with a panic, which is a defect: start the node again".to_owned();
        tracing::error!(reason, "the GPU tier takes no blocks; DRAM and SSD go on without it");
        self.parts.metrics.gpu_error();
        if let Some(gpu) = self.parts.gpu.as_mut() {
            gpu.outage = Some(TierOutage { reason, until: Instant::now(), wait: gpu.retry });
        }
        let moves = self.parts.gpu.as_mut().map(|gpu| std::mem::take(&mut gpu.moves)).unwrap_or_default();
        for GpuMove { key, hash, is_promotion: is_lift, .. } in moves.into_values() {
            if is_lift {
                self.parts.book.on_move_failed(key, Tier::Gpu, self.now());
            } else {
                self.load_failed(key, hash, MissReason::MediumFailed);
            }
        }
        while self.parts.book.lose_gpu(self.now()) {}
        self.set_gpu_phase(Phase::ThreadEnded);
    }

    /// Retries after a failure, when the wait is over.
    pub(super) fn retry_gpu(&mut self) {
        if self
            .parts
            .gpu
            .as_ref()
            .is_some_and(|gpu| gpu.phase != Phase::ThreadEnded && gpu.thread.has_ended())
        {
            return self.on_gpu_thread_ended();
        }
        let Some(gpu) = self.parts.gpu.as_mut() else { return };
        if gpu.outage.as_ref().is_none_or(|trouble| Instant::now() < trouble.until) {
            return;
        }
        match gpu.phase {
            Phase::Lost => {
                gpu.phase = Phase::Opening;
                gpu.thread.send(GpuRequest::Open);
            }
            // Copies had failed; try again.
            Phase::Ready => {
                gpu.outage = None;
                self.parts.book.set_admitting(Tier::Gpu, true);
            }
            Phase::Opening | Phase::Losing | Phase::ThreadEnded => {}
        }
    }
}
