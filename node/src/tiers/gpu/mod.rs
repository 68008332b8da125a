//! The GPU tier's engine: frames in device memory, copied through page-locked buffers and checked before anybody hears
//! of them.
//!
//! Device memory is cut as the DRAM arena is: size classes of the layout, in slabs. A frame goes in by chunks of one
//! buffer, is read back, and counts once every chunk has the checksum it had in DRAM; what comes out is
//! checked against the same sums. Its layer slices can be scattered to where an engine wants them, first layer first.
//! Whoever owns the tier calls [`GpuTier::poll`]; nothing here waits, and nothing is unsafe.
//! Not here: the device (`device`), the thread that owns it (`thread`), and which block belongs on a GPU
//! (`kv_core::tier`).

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
use kv_core::tier::LIFTS_MAX;
use kvfleet_proto::frame::{Frame, FrameError, SLICES_MAX};

use crate::arena::slabs::{Place, Slabs};
use crate::arena::{Purpose, SizeClasses, SlotMut};
use device::{Device, DeviceError};
use jobs::{Job, Work};

/// Length of a page-locked buffer for copies to and from a GPU, in bytes.
pub const CHUNK_BYTES: usize = 1 << 20;

/// How many of them a node has: enough under way to keep a link of 64 GB/s busy for as long as the thread sleeps
/// between two looks.
pub const CHUNKS: usize = 16;

/// Blocks on their way at once in a node, in both directions.
pub const JOBS_MAX: usize = 2 * LIFTS_MAX;

/// How the tier is cut.
#[derive(Clone, Debug)]
pub struct GpuShape {
    /// Slots of device memory.
    pub classes: SizeClasses,
    /// Slabs of device memory.
    pub slabs: usize,
    /// Length of a page-locked buffer, in bytes: the unit of copies and of checks.
    pub chunk_bytes: usize,
    /// Page-locked buffers: copies between host and device in flight.
    pub chunks: usize,
    /// Blocks on their way at once.
    pub jobs_max: usize,
}

impl GpuShape {
    /// Host memory for the buffers, and for what is kept of so many blocks with frames of up to `frame_bytes_max`.
    #[must_use]
    pub(crate) fn host_bytes_max(&self, frame_bytes_max: usize, blocks: u64) -> u64 {
        if self.slabs == 0 {
            return 0;
        }
        let chunks = frame_bytes_max.div_ceil(self.chunk_bytes.max(1));
        // Two tables with their headers, and a place in a tree that may be half empty.
        let kept =
            chunks * size_of::<u32>() + SLICES_MAX * size_of::<Range<usize>>() + 3 * size_of::<Kept>() + 64;
        ((self.chunks * self.chunk_bytes) as u64).saturating_add(blocks.saturating_mul(kept as u64))
    }
}

/// A frame in device memory. Ends by [`GpuTier::free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuRecord(NonZeroU64);

/// Why a block did not arrive.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuFault {
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// What came back is not what went in.
    #[error("bytes {}..{} do not match their checksum", .0.start, .0.end)]
    Corrupt(Range<usize>),
    /// Not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// There is no such record, what was given does not fit it, or the token is another job's.
    #[error("no such record, not of this shape, or a token that is in use")]
    Unknown,
}

/// What a job came to.
#[derive(Debug)]
pub enum Done {
    /// A put: the frame is in device memory and was read back right.
    Stored {
        /// The job.
        token: u64,
        /// The record, or why there is none.
        result: Result<GpuRecord, GpuFault>,
    },
    /// A get: the frame, checked.
    Loaded {
        /// The job.
        token: u64,
        /// The bytes, or why there are none.
        result: Result<Bytes, GpuFault>,
    },
    /// A scatter: so many slices, from the first on, are where they were wanted.
    Scattered {
        /// The job.
        token: u64,
        /// How many.
        slices: usize,
        /// Whether that is all of them.
        is_last: bool,
    },
    /// A scatter ended early.
    ScatterFailed {
        /// The job.
        token: u64,
        /// Why.
        fault: GpuFault,
    },
}

/// What is kept of a frame in device memory.
#[derive(Debug)]
struct Kept {
    place: Place,
    address: u64,
    len: usize,
    /// CRC32C of each chunk that was written.
    sums: Box<[u32]>,
    /// Where each layer slice lies in the frame.
    slices: Arc<[Range<usize>]>,
    /// Jobs that use it.
    users: u32,
    /// Freed, once nobody uses it.
    is_over: bool,
}

/// Frames in the memory of one device.
#[derive(Debug)]
pub struct GpuTier<D: Device> {
    device: D,
    shape: GpuShape,
    base: u64,
    slabs: Slabs,
    kept: BTreeMap<GpuRecord, Kept>,
    jobs: BTreeMap<u64, Job>,
    /// Jobs that have copies to begin, the next one first.
    line: VecDeque<u64>,
    /// Copies in flight: whose, and which chunk or slice.
    copies: BTreeMap<u64, (u64, usize)>,
    staging: Vec<D::Staging>,
    done: Vec<Done>,
    next: u64,
    lost: Option<DeviceError>,
}

impl<D: Device> GpuTier<D> {
    /// Takes all memory that the shape needs.
    ///
    /// # Errors
    /// When device or host have not so much.
    pub fn open(mut device: D, shape: GpuShape) -> Result<GpuTier<D>, DeviceError> {
        let bytes = shape.classes.slab_bytes().saturating_mul(shape.slabs.max(1));
        let base = device.allocate(bytes)?;
        let staging = (0..shape.chunks.max(1)).map(|_| device.staging(shape.chunk_bytes.max(1)));
        let staging = staging.collect::<Result<Vec<_>, _>>()?;
        let slabs = Slabs::new(&shape.classes, shape.slabs, 0);
        tracing::info!(device = device.name(), bytes, "the GPU tier has its memory");
        Ok(GpuTier {
            device,
            shape,
            base,
            slabs,
            kept: BTreeMap::new(),
            jobs: BTreeMap::new(),
            line: VecDeque::new(),
            copies: BTreeMap::new(),
            staging,
            done: Vec::new(),
            next: 0,
            lost: None,
        })
    }

    /// Begins to store a frame that was verified; [`Done::Stored`] follows. `false` while there is no room, or too much is
    /// on its way.
    ///
    /// # Errors
    /// When it is no frame, or longer than any may be, and once the device is lost.
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
        // Known once they are written.
        let sums = vec![0; frame.len().div_ceil(self.shape.chunk_bytes.max(1))].into();
        // Slices follow each other to the frame's end.
        let mut end = frame.len() - parsed.payload().len();
        let slices = (0..parsed.slice_count()).filter_map(|layer| parsed.slice(layer)).map(|slice| {
            end += slice.len();
            end - slice.len()..end
        });
        let slices = slices.collect();
        let record = GpuRecord(NonZeroU64::MIN.saturating_add(self.number()));
        let (address, len) = (self.base + offset as u64, frame.len());
        self.kept.insert(record, Kept { place, address, len, sums, slices, users: 0, is_over: false });
        self.add(token, record, Work::Write(frame.clone()));
        Ok(true)
    }

    /// Begins to read a frame into a slot of its length; [`Done::Loaded`] follows. `false` while too much is on its way.
    ///
    /// # Errors
    /// When there is no such record or the slot has another length, and once the device is lost.
    pub fn get(&mut self, token: u64, record: GpuRecord, into: SlotMut) -> Result<bool, GpuFault> {
        self.admit(token)?;
        self.readable(record).filter(|kept| kept.len == into.len()).ok_or(GpuFault::Unknown)?;
        Ok(self.jobs.len() < self.shape.jobs_max && self.add(token, record, Work::Read(into)))
    }

    /// Begins to copy the frame's layer slices to these addresses in device memory, one for each slice, in their
    /// order; [`Done::Scattered`] follows as they arrive. They are not read back from there. `false` while too much is
    /// on its way.
    ///
    /// # Errors
    /// When there is no such record, it has another number of slices, or one would go into the tier's own memory, where
    /// other blocks are; and once the device is lost.
    pub fn scatter(&mut self, token: u64, record: GpuRecord, to: Vec<u64>) -> Result<bool, GpuFault> {
        self.admit(token)?;
        let kept = self.readable(record).filter(|kept| kept.slices.len() == to.len());
        let slices = &kept.ok_or(GpuFault::Unknown)?.slices;
        if to.iter().zip(slices.iter()).any(|(to, slice)| self.is_own(*to, slice.len())) {
            return Err(GpuFault::Unknown);
        }
        Ok(self.jobs.len() < self.shape.jobs_max && self.add(token, record, Work::Scatter(to)))
    }

    /// Ends a record. Its memory is given out again when no job reads it any more.
    pub fn free(&mut self, record: GpuRecord) {
        if let Some(kept) = self.kept.get_mut(&record) {
            kept.is_over = true;
            self.close(record);
        }
    }

    /// Takes in what ended, begins what can begin, and says what came of it.
    pub fn poll(&mut self) -> Vec<Done> {
        for ended in self.device.ended() {
            self.take_in(ended);
        }
        self.begin();
        std::mem::take(&mut self.done)
    }

    /// Why nothing works any more; what was in device memory is gone then.
    #[must_use]
    pub fn lost(&self) -> Option<&DeviceError> {
        self.lost.as_ref()
    }

    /// The same tier with numbers of records and copies above this one.
    pub(crate) fn numbered_from(mut self, number: u64) -> GpuTier<D> {
        self.next = self.next.max(number);
        self
    }

    /// The last number that was given out.
    pub(crate) fn numbers(&self) -> u64 {
        self.next
    }

    /// Blocks on their way.
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

    /// Whether any byte of a range is the tier's.
    fn is_own(&self, address: u64, len: usize) -> bool {
        let own = self.shape.classes.slab_bytes().saturating_mul(self.shape.slabs.max(1));
        len > 0
            && address < self.base.saturating_add(own as u64)
            && address.saturating_add(len as u64) > self.base
    }

    fn readable(&self, record: GpuRecord) -> Option<&Kept> {
        self.kept.get(&record).filter(|kept| !kept.is_over)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}
