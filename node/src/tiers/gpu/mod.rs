//! The engine of the GPU tier: frames in device memory, copied through page-locked buffers and
//! verified before they are reported.
//!
//! Device memory is divided like the DRAM arena: size classes of the layout, in slabs. A frame is
//! written in chunks of one buffer and read back. It counts as stored once every chunk has its
//! checksum from DRAM; later reads are checked against the same checksums. Its layer slices can be
//! scattered to an engine's addresses, first layer first. The owner calls [`GpuTier::poll`]; no
//! function here waits, and there is no unsafe code.
//!
//! Not here: the device (`device`), the thread that owns it (`thread`), and which block belongs on
//! a GPU (`kv_core::tier`).

#[cfg(feature = "gpu")]
pub mod cuda;
pub mod device;
mod jobs;
#[cfg(feature = "gpu")]
mod kernels;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod thread;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kv_core::tier::GPU_PROMOTIONS_MAX;
use kvfleet_proto::frame::{Frame, FrameError, SLICES_MAX};

use crate::arena::slabs::{Slabs, SlotId};
use crate::arena::{Purpose, SizeClasses, SlotMut};
use device::{DeviceError, GpuDevice};
use jobs::{GpuJob, JobStep};

/// Length of a page-locked copy buffer, in bytes.
pub const CHUNK_BYTES: usize = 1 << 20;

/// Number of these buffers in a node: enough in flight to keep a link of 64 GB/s busy between two
/// polls.
pub const CHUNKS: usize = 16;

/// Maximum blocks in transit in a node, in both directions.
pub const JOBS_MAX: usize = 2 * GPU_PROMOTIONS_MAX;

/// Dimensions of the tier.
#[derive(Clone, Debug)]
pub struct GpuShape {
    /// Slot sizes of device memory.
    pub classes: SizeClasses,
    /// Number of slabs of device memory.
    pub slabs: usize,
    /// Length of a page-locked buffer, in bytes: the unit of copies and of checks.
    pub chunk_bytes: usize,
    /// Number of page-locked buffers, which bounds the copies in flight between host and device.
    pub chunks: usize,
    /// Maximum blocks in transit.
    pub jobs_max: usize,
}

impl GpuShape {
    /// Host memory in bytes for the buffers, and for the metadata of `blocks` blocks with frames of
    /// up to `frame_bytes_max`.
    #[must_use]
    pub(crate) fn host_bytes_max(&self, frame_bytes_max: usize, blocks: u64) -> u64 {
        if self.slabs == 0 {
            return 0;
        }
        let chunks = frame_bytes_max.div_ceil(self.chunk_bytes.max(1));
        // Two tables with their headers, and an entry in a tree that may be half empty.
        let kept = chunks * size_of::<u32>()
            + SLICES_MAX * size_of::<Range<usize>>()
            + 3 * size_of::<StoredFrame>()
            + 64;
        ((self.chunks * self.chunk_bytes) as u64).saturating_add(blocks.saturating_mul(kept as u64))
    }
}

/// A frame in device memory. It is freed by [`GpuTier::free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuRecord(NonZeroU64);

/// Error of a block transfer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuFault {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Bytes read differ from bytes written.
    #[error("bytes {}..{} do not match their checksum", .0.start, .0.end)]
    Corrupt(Range<usize>),
    /// The bytes are not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The record does not exist, an argument does not fit it, or the token is in use.
    #[error("unknown record, wrong shape, or token already in use")]
    Unknown,
}

/// Result of a job.
#[derive(Debug)]
pub enum GpuCompletion {
    /// A put: the frame is in device memory and was verified.
    Stored {
        /// The job.
        token: u64,
        /// The record, or the error.
        result: Result<GpuRecord, GpuFault>,
    },
    /// A get: the verified frame.
    Loaded {
        /// The job.
        token: u64,
        /// The bytes, or the error.
        result: Result<Bytes, GpuFault>,
    },
    /// A scatter: the first `slices` slices are at their destination.
    Scattered {
        /// The job.
        token: u64,
        /// Number of slices so far.
        slices: usize,
        /// Whether all slices are copied.
        is_last: bool,
    },
    /// A scatter failed.
    ScatterFailed {
        /// The job.
        token: u64,
        /// The error.
        fault: GpuFault,
    },
}

/// Metadata of a frame in device memory.
#[derive(Debug)]
struct StoredFrame {
    slot: SlotId,
    address: u64,
    len: usize,
    /// CRC32C of each written chunk.
    checksums: Box<[u32]>,
    /// Range of each layer slice in the frame.
    slices: Arc<[Range<usize>]>,
    /// Jobs that use it.
    users: u32,
    /// Whether it was freed; its memory is reused once it is unused.
    is_freed: bool,
}

/// Frames in the memory of one device.
#[derive(Debug)]
pub struct GpuTier<D: GpuDevice> {
    device: D,
    shape: GpuShape,
    base: u64,
    slabs: Slabs,
    frames: BTreeMap<GpuRecord, StoredFrame>,
    jobs: BTreeMap<u64, GpuJob>,
    /// Jobs with copies to start, the next one first.
    copy_queue: VecDeque<u64>,
    /// Copies in flight: the token of their job, and the number of the chunk or copy.
    copies: BTreeMap<u64, (u64, usize)>,
    staging: Vec<D::Staging>,
    done: Vec<GpuCompletion>,
    next: u64,
    lost: Option<DeviceError>,
}

impl<D: GpuDevice> GpuTier<D> {
    /// Allocates all memory of the shape.
    ///
    /// # Errors
    /// If the device or the host has too little memory.
    pub fn open(mut device: D, shape: GpuShape) -> Result<GpuTier<D>, DeviceError> {
        let bytes = shape.classes.slab_bytes().saturating_mul(shape.slabs.max(1));
        let base = device.allocate(bytes)?;
        let staging = (0..shape.chunks.max(1)).map(|_| device.allocate_staging(shape.chunk_bytes.max(1)));
        let staging = staging.collect::<Result<Vec<_>, _>>()?;
        let slabs = Slabs::new(&shape.classes, shape.slabs, 0);
        tracing::info!(device = device.name(), bytes, "GPU tier memory allocated");
        Ok(GpuTier {
            device,
            shape,
            base,
            slabs,
            frames: BTreeMap::new(),
            jobs: BTreeMap::new(),
            copy_queue: VecDeque::new(),
            copies: BTreeMap::new(),
            staging,
            done: Vec::new(),
            next: 0,
            lost: None,
        })
    }

    /// Starts to store a verified frame; [`GpuCompletion::Stored`] follows. `false` while there is
    /// no space, or too many blocks are in transit.
    ///
    /// # Errors
    /// If it is not a frame, exceeds the largest slot, or the device is lost.
    pub fn put(&mut self, token: u64, frame: &Bytes) -> Result<bool, GpuFault> {
        self.admit(token)?;
        let parsed = Frame::parse(frame.clone())?;
        let class = self.shape.classes.find(frame.len()).ok_or(GpuFault::Unknown)?;
        if self.jobs.len() >= self.shape.jobs_max {
            return Ok(false);
        }
        let Some(place) = self.slabs.take(class, frame.len(), Purpose::Load) else { return Ok(false) };
        let slot_bytes = self.shape.classes.list().get(class).map_or(0, |class| class.slot_bytes);
        let offset = place.slab as usize * self.shape.classes.slab_bytes() + place.slot as usize * slot_bytes;
        // Set when the chunks are written.
        let sums = vec![0; frame.len().div_ceil(self.shape.chunk_bytes.max(1))].into();
        // Slices are consecutive and end at the frame's end.
        let mut end = frame.len() - parsed.payload().len();
        let slices = (0..parsed.slice_count()).filter_map(|layer| parsed.slice(layer)).map(|slice| {
            end += slice.len();
            end - slice.len()..end
        });
        let slices = slices.collect();
        let record = GpuRecord(NonZeroU64::MIN.saturating_add(self.next_number()));
        let (address, len) = (self.base + offset as u64, frame.len());
        self.frames.insert(
            record,
            StoredFrame { slot: place, address, len, checksums: sums, slices, users: 0, is_freed: false },
        );
        self.add_job(token, record, JobStep::Write(frame.clone()));
        Ok(true)
    }

    /// Starts to read a frame into a slot of its length; [`GpuCompletion::Loaded`] follows. `false`
    /// while too many blocks are in transit.
    ///
    /// # Errors
    /// If the record does not exist, the slot has another length, or the device is lost.
    pub fn get(&mut self, token: u64, record: GpuRecord, into: SlotMut) -> Result<bool, GpuFault> {
        self.admit(token)?;
        self.readable_frame(record).filter(|kept| kept.len == into.len()).ok_or(GpuFault::Unknown)?;
        Ok(self.jobs.len() < self.shape.jobs_max && self.add_job(token, record, JobStep::Read(into)))
    }

    /// Starts to copy the frame's layer slices to these addresses in device memory, one for each
    /// slice, in order. [`GpuCompletion::Scattered`] follows as they are copied; they are not
    /// verified there. `false` while too many blocks are in transit.
    ///
    /// # Errors
    /// If the record does not exist or has another number of slices, a destination overlaps the
    /// tier's own memory, or the device is lost.
    pub fn scatter(&mut self, token: u64, record: GpuRecord, to: Vec<u64>) -> Result<bool, GpuFault> {
        self.admit(token)?;
        let kept = self.readable_frame(record).filter(|kept| kept.slices.len() == to.len());
        let slices = &kept.ok_or(GpuFault::Unknown)?.slices;
        if to.iter().zip(slices.iter()).any(|(to, slice)| self.overlaps_own_memory(*to, slice.len())) {
            return Err(GpuFault::Unknown);
        }
        Ok(self.jobs.len() < self.shape.jobs_max && self.add_job(token, record, JobStep::Scatter(to)))
    }

    /// Frees a record. Its memory is reused once no job reads it any more.
    pub fn free(&mut self, record: GpuRecord) {
        if let Some(kept) = self.frames.get_mut(&record) {
            kept.is_freed = true;
            self.release_if_unused(record);
        }
    }

    /// Handles completed copies, starts further ones, and returns the results.
    pub fn poll(&mut self) -> Vec<GpuCompletion> {
        for ended in self.device.take_completed() {
            self.handle_completed(ended);
        }
        self.start_copies();
        std::mem::take(&mut self.done)
    }

    /// The error if the device is lost, and with it the content of its memory.
    #[must_use]
    pub fn lost(&self) -> Option<&DeviceError> {
        self.lost.as_ref()
    }

    /// The same tier with record and copy numbers above this one.
    pub(crate) fn with_numbers_above(mut self, number: u64) -> GpuTier<D> {
        self.next = self.next.max(number);
        self
    }

    /// The last number in use.
    pub(crate) fn last_number(&self) -> u64 {
        self.next
    }

    /// Blocks in transit.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Bytes of frames in device memory.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.slabs.uses().iter().map(|uses| uses.frame_bytes).sum()
    }

    fn admit(&self, token: u64) -> Result<(), GpuFault> {
        match &self.lost {
            Some(lost) => Err(lost.clone().into()),
            None if self.jobs.contains_key(&token) => Err(GpuFault::Unknown),
            None => Ok(()),
        }
    }

    /// Whether a range overlaps the tier's own memory.
    fn overlaps_own_memory(&self, address: u64, len: usize) -> bool {
        let own = self.shape.classes.slab_bytes().saturating_mul(self.shape.slabs.max(1));
        len > 0
            && address < self.base.saturating_add(own as u64)
            && address.saturating_add(len as u64) > self.base
    }

    fn readable_frame(&self, record: GpuRecord) -> Option<&StoredFrame> {
        self.frames.get(&record).filter(|kept| !kept.is_freed)
    }

    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}
