//! The GPU tier as the store owns it: moves up to it and down from it, and what comes of a device that fails or is gone.
//!
//! Nothing here waits for the device. While it is not there, moves may begin and fail at once, so that a reader
//! hears of a miss and not of nothing. Not here: which block moves (`kv_core::tier`), and how (`tiers::gpu`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, Generation, Tier};
use kv_core::tier::LIFTS_MAX;
use kvfleet_transport::MissReason;

use super::Store;
use super::moving::{SSD_RETRY, Trouble, next_wait};
use super::packing::Held;
use crate::arena::{Purpose, SlotMut};
use crate::tiers::gpu::device::DeviceError;
use crate::tiers::gpu::thread::{GpuReport, GpuThread, Job};
use crate::tiers::gpu::{GpuFault, GpuRecord, JOBS_MAX};

/// Slots of DRAM for what is read from the GPU and keeps its place there. It is on no account of DRAM, and has its slot until
/// its last reader has done with it, which may take long: so they are counted, and the arena has as many more.
pub(crate) const GPU_READS_MAX: usize = JOBS_MAX;

/// After a failure the GPU takes no blocks for this long, then it is tried again; each try that fails doubles it, as for
/// the SSD.
pub(crate) const GPU_RETRY: Duration = SSD_RETRY;

/// Of the blocks on their way, those that nobody waits for.
const BACKGROUND_MAX: usize = LIFTS_MAX;

/// How the device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It is being opened.
    Opening,
    /// It works.
    Ready,
    /// It is gone, and the book is told so bit by bit.
    Losing,
    /// It is gone, and nothing of it is left.
    Away,
    /// Its thread ended, and nothing brings it back.
    Over,
}

/// A move on the GPU thread.
#[derive(Debug)]
struct Move {
    key: BlockKey,
    hash: BlockHash,
    is_lift: bool,
    /// Somebody waited when it began.
    is_read: bool,
    /// Its slot is one of [`GPU_READS_MAX`].
    passing: Option<Arc<()>>,
}

/// Bytes in one of [`GPU_READS_MAX`] slots.
struct Passing {
    /// Goes first: whoever is woken because the slot came back finds the count right.
    _mark: Arc<()>,
    bytes: Bytes,
}

impl AsRef<[u8]> for Passing {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// What the store knows of its GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    thread: GpuThread,
    phase: Phase,
    moves: HashMap<u64, Move>,
    /// Each slot of what passes through DRAM has a share in it.
    passing: Arc<()>,
    trouble: Option<Trouble>,
    /// It failed and has taken no block since: how long it was left alone.
    probation: Option<Duration>,
    /// The first wait after it worked.
    retry: Duration,
}

/// What happened, and what to do.
pub(super) fn with_remedy(cause: &DeviceError) -> String {
    let remedy = match cause {
        DeviceError::Absent | DeviceError::NoMemory { .. } => return cause.to_string(),
        DeviceError::Copy(_) => "check the GPU when this repeats (nvidia-smi)",
        DeviceError::Lost(_) => {
            "what was only there is dropped; check it (nvidia-smi), and start the node again if it does not come back"
        }
    };
    format!("{cause}; {remedy}")
}

/// Which moves of a GPU can begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuRoom {
    pub(super) read: bool,
    pub(super) lower: bool,
    pub(super) lift: bool,
}

impl Gpu {
    /// On this thread, which opens the device from here on.
    pub(crate) fn new(thread: GpuThread, retry: Duration) -> Gpu {
        thread.send(Job::Open);
        let (moves, passing) = (HashMap::new(), Arc::default());
        Gpu { thread, phase: Phase::Opening, moves, passing, trouble: None, probation: None, retry }
    }

    /// Moves in flight.
    pub(super) fn moves(&self) -> usize {
        self.moves.len()
    }

    /// Why it takes nothing; nothing while it does.
    pub(super) fn why_not(&self) -> Option<&str> {
        let opening = (self.phase == Phase::Opening).then_some("being opened");
        self.trouble.as_ref().map(|trouble| trouble.reason.as_str()).or(opening)
    }

    /// `has_slots`: DRAM has slots beside those that loads from SSD need.
    fn room(&self, has_slots: bool) -> GpuRoom {
        if self.phase != Phase::Ready {
            return GpuRoom { read: true, lower: true, lift: true };
        }
        let background = self.moves.values().filter(|move_| !move_.is_read).count();
        let is_free = self.moves.len() < JOBS_MAX;
        let is_idle = is_free && background < BACKGROUND_MAX;
        // One share is the GPU's own.
        let may_pass = Arc::strong_count(&self.passing) <= GPU_READS_MAX;
        GpuRoom { read: is_free && has_slots && may_pass, lower: is_idle && has_slots, lift: is_idle }
    }

    /// Leaves the device alone for a while; what is said of it is said once until it works again.
    fn leave_alone(&mut self, cause: &str) {
        let next = || self.probation.map_or(self.retry, |before| next_wait(Some(before)));
        let known = self.trouble.as_ref().filter(|_| self.phase != Phase::Away).map(|trouble| trouble.wait);
        let wait = known.unwrap_or_else(next);
        let reason = format!("{cause}; trying again after {} s", wait.as_secs());
        if self.trouble.is_none() && self.probation.is_none() {
            tracing::error!(reason, "the GPU tier takes no blocks; DRAM and SSD go on without it");
        } else {
            tracing::debug!(reason, "the GPU tier takes no blocks");
        }
        self.trouble = Some(Trouble { reason, until: Instant::now() + wait, wait });
        self.probation = Some(wait);
    }
}

impl Store {
    pub(super) fn gpu_room(&self) -> GpuRoom {
        let room = |gpu: &Gpu| gpu.room(self.parts.arena.has_room(Purpose::Prefetch));
        self.parts.gpu.as_ref().map(room).unwrap_or_default()
    }

    /// DRAM to GPU.
    pub(super) fn lift(&mut self, key: BlockKey, hash: BlockHash) {
        let frame = self.row(key).dram.as_ref().map(Held::lend);
        let is_begun = frame.is_some_and(|frame| {
            let lift = Move { key, hash, is_lift: true, is_read: false, passing: None };
            self.begin_gpu(lift, |token| Job::Put { token, frame })
        });
        if !is_begun {
            self.parts.book.on_move_failed(key, Tier::Gpu, self.now());
        }
    }

    /// GPU to DRAM.
    pub(super) fn lower(&mut self, key: BlockKey, hash: BlockHash) {
        let is_read = self.loads.contains_key(&(hash, self.generation_of(key)));
        let record = self.row(key).gpu;
        let len = self.parts.book.meta(key).map(|meta| meta.traits.bytes as usize);
        let is_ready = self.parts.gpu.as_ref().is_some_and(|gpu| gpu.phase == Phase::Ready);
        let (true, Some(record), Some(len)) = (is_ready, record, len) else {
            return self.load_failed(key, hash, MissReason::MediumFailed);
        };
        // The reserve is for loads from SSD: each of them has one leave DRAM for it, and this has none.
        let Some(into) = self.parts.arena.take(len, Purpose::Prefetch) else {
            return self.parts.book.on_move_delayed(key, Tier::Dram);
        };
        let get = |token, into: SlotMut| Job::Get { token, record, into };
        let passes = self.parts.book.place(key) == Some(Tier::Gpu);
        let passing = self.parts.gpu.as_ref().filter(|_| passes).map(|gpu| Arc::clone(&gpu.passing));
        let lower = Move { key, hash, is_lift: false, is_read, passing };
        if !self.begin_gpu(lower, |token| get(token, into)) {
            self.load_failed(key, hash, MissReason::MediumFailed);
        }
    }

    /// `false` when the device is not there.
    fn begin_gpu(&mut self, move_: Move, job: impl FnOnce(u64) -> Job) -> bool {
        let Some(gpu) = self.parts.gpu.as_mut().filter(|gpu| gpu.phase == Phase::Ready) else { return false };
        self.next_token += 1;
        let is_sent = gpu.thread.send(job(self.next_token));
        if is_sent {
            gpu.moves.insert(self.next_token, move_);
        }
        is_sent
    }

    pub(super) fn drop_gpu(&mut self, key: BlockKey, block: (BlockHash, Generation)) {
        if let (Some(record), Some(gpu)) = (self.row(key).gpu.take(), &self.parts.gpu) {
            gpu.thread.send(Job::Free { record });
        }
        // Who waits for a block that is over must hear that it will not come; one that goes on elsewhere comes still.
        let (hash, generation) = block;
        let goes_on = if generation == self.parts.book.generation() {
            self.parts.book.tier_of(&hash).is_some()
        } else {
            // Nothing comes any more under weights that are over, so it is still this block if it is there.
            let is_this = self.parts.book.meta(key).is_some_and(|meta| meta.hash == hash);
            is_this && self.parts.book.generation_of(key) == Some(generation)
        };
        if !goes_on {
            self.tell_waiting(block, &Err(MissReason::NotHeld));
        }
    }

    pub(super) fn on_gpu_report(&mut self, report: GpuReport) {
        // What a thread said before it ended may be heard after it was buried, and is void: nothing is there any more.
        if self.parts.gpu.as_ref().is_none_or(|gpu| gpu.phase == Phase::Over) {
            return;
        }
        match report {
            GpuReport::Opened(Ok(())) => self.gpu_opened(),
            GpuReport::Opened(Err(cause)) => {
                self.set_gpu_phase(Phase::Away);
                self.gpu_failed(&cause);
            }
            GpuReport::Lost(cause) => self.gpu_lost(&cause),
            GpuReport::Stored { token, result } => self.on_lifted(token, result),
            GpuReport::Loaded { token, result } => self.on_lowered(token, result),
        }
    }

    fn gpu_opened(&mut self) {
        let Some(gpu) = self.parts.gpu.as_mut() else { return };
        gpu.phase = Phase::Ready;
        if gpu.trouble.take().is_some() {
            tracing::info!("the GPU tier is open again");
        }
        self.parts.book.set_admitting(Tier::Gpu, true);
    }

    /// The thread says so before it ends what it had begun: those ends come still.
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
            gpu.leave_alone(&with_remedy(cause));
        }
    }

    fn on_lifted(&mut self, token: u64, result: Result<Option<GpuRecord>, GpuFault>) {
        let Some(Move { key, hash, .. }) = self.end_gpu(token) else { return };
        match result {
            Ok(Some(record)) => {
                self.row(key).gpu = Some(record);
                self.parts.book.on_moved(key, Tier::Gpu);
                let gpu = self.parts.gpu.as_mut();
                if gpu.is_some_and(|gpu| gpu.trouble.is_none() && gpu.probation.take().is_some()) {
                    tracing::info!("the GPU tier takes blocks again");
                }
                return;
            }
            // Slots of its size are out, though there is room by the account: it stays where it is.
            Ok(None) => {}
            // Said once for the device, and not for each block.
            Err(GpuFault::Device(DeviceError::Lost(_))) => {}
            Err(GpuFault::Device(cause)) => self.gpu_failed(&cause),
            Err(fault) => {
                tracing::debug!(%fault, %hash, "a block that was lifted came back otherwise");
                self.gpu_failed(&DeviceError::Copy(fault.to_string()));
            }
        }
        self.parts.book.on_move_failed(key, Tier::Gpu, self.now());
    }

    fn on_lowered(&mut self, token: u64, result: Result<Bytes, GpuFault>) {
        let Some(Move { key, hash, passing, .. }) = self.end_gpu(token) else { return };
        match result {
            Ok(bytes) => {
                // One that left the GPU for DRAM meanwhile is on its account.
                let passing = passing.filter(|_| self.parts.book.place(key) != Some(Tier::Dram));
                let bytes = match passing {
                    Some(mark) => Bytes::from_owner(Passing { _mark: mark, bytes }),
                    None => bytes,
                };
                self.loaded(key, hash, bytes);
            }
            Err(fault) => {
                let is_lost = matches!(fault, GpuFault::Device(DeviceError::Lost(_)));
                if !is_lost {
                    tracing::error!(%fault, %hash, "a block on the GPU is unusable and was dropped; check the GPU when this repeats (nvidia-smi)");
                    self.parts.metrics.gpu_error();
                }
                let is_corrupt = matches!(fault, GpuFault::Corrupt(_) | GpuFault::Frame(_));
                let reason = if is_corrupt { MissReason::Corrupt } else { MissReason::MediumFailed };
                self.load_failed(key, hash, reason);
            }
        }
    }

    fn end_gpu(&mut self, token: u64) -> Option<Move> {
        self.parts.gpu.as_mut()?.moves.remove(&token)
    }

    /// Goes on with what a lost device leaves behind.
    pub(super) fn settle_gpu(&mut self) {
        if self.parts.gpu.as_ref().is_none_or(|gpu| gpu.phase != Phase::Losing) {
            return;
        }
        let is_more = self.parts.book.lose_gpu(self.now());
        if let Some(gpu) = self.parts.gpu.as_mut().filter(|gpu| !is_more && gpu.moves.is_empty()) {
            gpu.phase = Phase::Away;
        }
    }

    /// The thread ended by a defect: what it had begun ends here, and what was on the GPU is gone.
    fn bury_gpu(&mut self) {
        let reason =
            "the GPU's thread ended with a panic, which is a defect: start the node again".to_owned();
        tracing::error!(reason, "the GPU tier takes no blocks; DRAM and SSD go on without it");
        self.parts.metrics.gpu_error();
        if let Some(gpu) = self.parts.gpu.as_mut() {
            gpu.trouble = Some(Trouble { reason, until: Instant::now(), wait: gpu.retry });
        }
        let moves = self.parts.gpu.as_mut().map(|gpu| std::mem::take(&mut gpu.moves)).unwrap_or_default();
        for Move { key, hash, is_lift, .. } in moves.into_values() {
            if is_lift {
                self.parts.book.on_move_failed(key, Tier::Gpu, self.now());
            } else {
                self.load_failed(key, hash, MissReason::MediumFailed);
            }
        }
        while self.parts.book.lose_gpu(self.now()) {}
        self.set_gpu_phase(Phase::Over);
    }

    /// Tries again what failed some time ago.
    pub(super) fn retry_gpu(&mut self) {
        if self.parts.gpu.as_ref().is_some_and(|gpu| gpu.phase != Phase::Over && gpu.thread.is_gone()) {
            return self.bury_gpu();
        }
        let Some(gpu) = self.parts.gpu.as_mut() else { return };
        if gpu.trouble.as_ref().is_none_or(|trouble| Instant::now() < trouble.until) {
            return;
        }
        match gpu.phase {
            Phase::Away => {
                gpu.phase = Phase::Opening;
                gpu.thread.send(Job::Open);
            }
            // Copies failed: perhaps they do no more.
            Phase::Ready => {
                gpu.trouble = None;
                self.parts.book.set_admitting(Tier::Gpu, true);
            }
            Phase::Opening | Phase::Losing | Phase::Over => {}
        }
    }
}
