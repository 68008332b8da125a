//! The SSD tier: a log of records in segments, on one or several devices, each with its own thread.
//!
//! A block is committed (written and flushed) before it is announced, and verified at every read.
//! After a restart its content is recovered from the segments. The format and its invariants are in
//! `docs/adr/0022-ssd-segments.md`. Not here: which blocks belong on SSD (`kv_core::tier`), and
//! handling of errors (`store`).

mod book;
pub mod budget;
mod buffer;
mod depth;
mod device;
mod engine;
mod files;
pub mod format;
mod lane;
mod mailbox;
pub mod pace;
mod pick;
mod recover;
mod ring;
pub mod shape;
mod slowness;
#[cfg(test)]
mod tests;
mod weights;
mod writer;

pub use depth::Depth;
pub use engine::{ReadFault, Report, SsdFaults};
pub use format::RecordHeader;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::{BlockHash, Generation, IdentityDigest};
use kv_core::tier::Capacity;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::BlockVersion;
use crate::arena::{Arena, SlotMut};
use book::{RecordId, SegmentBook};
use buffer::ChunkPool;
use device::{BlockDevice, FileDevice};
use engine::{DeviceEngine, EngineParts, QUEUE_DEPTH};
use files::Directory;
use lane::{DeviceHealth, Lane, LaneEvent};
use mailbox::Mailbox;
use recover::DeviceRecovery;
use ring::Ring;
use shape::SegmentShape;
use weights::WeightsNote;

/// Maximum open jobs of a device; above it callers must retry later.
pub const JOBS_MAX: usize = 1024;

const _: () = assert!(depth::DEPTH_MAX.moves <= JOBS_MAX, "a device accepts a job for each move");

/// Maximum devices of one node; a record stores the device in eight bits.
pub const DEVICES_MAX: usize = 64;

/// Memory per record in bytes, including recovery at start; lists grow by doubling.
pub(crate) const RECORD_BYTES_MAX: u64 = 3 * book::RECORD_BYTES + 2 * size_of::<ScannedBlock>() as u64;

/// Memory of one device's engine, in bytes: write chunks, records being relocated or checked, and
/// at start the one unsealed segment that is read whole.
pub(crate) fn memory_bytes_max(capacity: Capacity, frame_bytes_max: usize) -> u64 {
    let record = format::record_bytes(frame_bytes_max) as u64;
    let moved = (lane::RECORDS_IN_MEMORY_MAX as u64).saturating_mul(record);
    let staging = Depth::for_frames(frame_bytes_max).staging_records(1);
    let segment = SegmentShape::new(capacity, frame_bytes_max, staging, None).segment_bytes();
    writer::POOL_BYTES as u64 + moved.saturating_add(segment)
}

/// Configuration of the tier.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// Directories, ideally each on its own device; created if absent. The capacity is spread
    /// evenly.
    pub dirs: Vec<PathBuf>,
    /// Identity of every block in it, with weights of generation 0.
    pub identity: IdentityDigest,
    /// Total capacity of all directories.
    pub capacity: Capacity,
    /// Length of the largest frame, in bytes.
    pub frame_bytes_max: usize,
    /// Limits of blocks in transit.
    pub depth: Depth,
    /// Whether to try io_uring; otherwise system calls are used.
    pub uring: bool,
    /// Seed that differs between starts; nonces of segments are derived from it.
    pub seed: u64,
    /// Destination of reads, if known: devices register it with the kernel.
    pub arena: Option<Arena>,
    /// Faults injected by tests.
    pub faults: Arc<SsdFaults>,
}

/// Error of an unusable directory.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot use SSD directory {}: {cause}; give this node a directory of its own that it may write, or set \
     ssd_bytes = 0",
    dir.display()
)]
pub struct SsdError {
    /// The directory.
    pub dir: PathBuf,
    /// The system's error.
    pub cause: io::Error,
}

/// A block's record; stays the same when it is relocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SsdRecord {
    lane: u8,
    id: RecordId,
}

/// A block found at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScannedBlock {
    /// Its record.
    pub record: SsdRecord,
    /// The record's metadata.
    pub header: RecordHeader,
    /// Whether its bytes were read and verified; otherwise only the segment's footer lists it.
    pub is_verified: bool,
}

/// Result of the scan at start.
#[derive(Debug, Default)]
pub struct ScanReport {
    /// Recovered blocks, oldest first: those of the current generation, written since it took
    /// effect.
    pub blocks: Vec<ScannedBlock>,
    /// The current generation.
    pub generation: Generation,
    /// Number of blocks of other generations, which are discarded.
    pub invalidated: u64,
    /// Records and segments skipped: damaged, unreadable, or too long for this node.
    pub damaged: u64,
    /// Writes cut short by a crash; they were never announced.
    pub torn: u64,
    /// Quarantined files, by their new names.
    pub quarantined: Vec<PathBuf>,
}

/// Result of a job.
#[derive(Debug)]
pub enum SsdCompletion {
    /// A write ended.
    Written {
        /// The job.
        token: u64,
        /// Whether the block is on the medium.
        result: io::Result<()>,
    },
    /// A read ended.
    Read {
        /// The job.
        token: u64,
        /// The verified frame.
        result: Result<Bytes, ReadFault>,
    },
    /// A block turned out to be unreadable during a relocation or check. Its record is freed.
    Lost {
        /// The record.
        record: SsdRecord,
        /// The owner given with it.
        owner: u32,
        /// The reason.
        fault: ReadFault,
    },
    /// The scrubber checked a record.
    Checked {
        /// Bytes verified, or the medium's error.
        result: io::Result<u64>,
    },
    /// A maintenance write of a device failed; it accepts no writes until [`SsdTier::resume`].
    Failed {
        /// The error.
        cause: io::Error,
    },
}

/// Bytes written since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wear {
    /// Bytes of frames from DRAM.
    pub saved_bytes: u64,
    /// Bytes of frames rewritten to reclaim their segment.
    pub rewritten_bytes: u64,
}

/// Handle of the tier. Dropping it ends the threads after the open jobs.
#[derive(Debug)]
pub struct SsdTier {
    lanes: Vec<Lane>,
    /// The device to try first for the next block.
    next_device: usize,
    /// The device to scrub next.
    next_scrub_device: usize,
    sequence: u64,
    /// Held as long as this handle, for the directory locks.
    dirs: Vec<Directory>,
}

impl SsdTier {
    /// Opens the directories, recovers their content and starts the threads; `reports` receives the
    /// ends of jobs, for [`Self::complete`].
    ///
    /// # Errors
    /// [`SsdError`] if a directory cannot be read or written at all.
    pub fn open(
        config: &SsdConfig,
        reports: &UnboundedSender<Report>,
    ) -> Result<(SsdTier, ScanReport), SsdError> {
        let mut report = ScanReport::default();
        let mut ssd = SsdTier::empty();
        for dir in config.dirs.iter().take(DEVICES_MAX) {
            let opened = ssd.open_dir(config, dir, reports.clone(), &mut report);
            opened.map_err(|cause| SsdError { dir: dir.clone(), cause })?;
        }
        let noted = ssd.read_weights_note(&report)?;
        ssd.merge_recovered(noted, &mut report);
        Ok((ssd, report))
    }

    fn empty() -> SsdTier {
        SsdTier { lanes: Vec::new(), next_device: 0, next_scrub_device: 0, sequence: 0, dirs: Vec::new() }
    }

    /// Merges the blocks of all devices into one order.
    fn merge_recovered(&mut self, noted: WeightsNote, report: &mut ScanReport) {
        // A relocation in progress may have left two records with the same sequence: prefer the
        // verified one. The sort merges runs that are already in order, as most segments are.
        report.blocks.sort_by_key(|found| (found.header.sequence, found.is_verified));
        self.sequence = report.blocks.last().map_or(0, |found| found.header.sequence);
        self.drop_other_weights(noted, report);
        self.keep_newest(&mut report.blocks);
    }

    /// The last recorded change of weights. If it cannot be read, no block is recovered, and a new
    /// note is written.
    fn read_weights_note(&self, report: &ScanReport) -> Result<WeightsNote, SsdError> {
        let (mut noted, mut is_known) = (WeightsNote::default(), true);
        for dir in &self.dirs {
            match weights::read(&dir.path) {
                // A device that was absent during a change has an older note than the others.
                Ok(found) => {
                    let both = [noted, found.unwrap_or_default()].into_iter();
                    noted = both.max_by_key(|noted| noted.older_up_to).unwrap_or_default();
                }
                Err(cause) => {
                    tracing::error!(dir = %dir.path.display(), %cause, "cannot read which weights the SSD \
                        blocks have: none of them is served, and a new note is written; check the device");
                    is_known = false;
                }
            }
        }
        if is_known {
            return Ok(noted);
        }
        let last = report.blocks.iter().map(|found| found.header.sequence).max().unwrap_or_default();
        let anew = WeightsNote { generation: noted.generation, older_up_to: noted.older_up_to.max(last) };
        for dir in &self.dirs {
            weights::write(&dir.path, anew).map_err(|cause| SsdError { dir: dir.path.clone(), cause })?;
        }
        Ok(anew)
    }

    /// Discards blocks written before the current weights took effect, and blocks of other weights.
    fn drop_other_weights(&mut self, noted: WeightsNote, report: &mut ScanReport) {
        report.generation = noted.generation;
        self.sequence = self.sequence.max(noted.older_up_to);
        let found = report.blocks.len();
        report.blocks.retain(|found| {
            let RecordHeader { generation, sequence, .. } = found.header;
            let keep = generation == noted.generation && sequence > noted.older_up_to;
            if !keep {
                self.free(found.record);
            }
            keep
        });
        report.invalidated = (found - report.blocks.len()) as u64;
    }

    /// Records that other weights are in effect from here on, before any block of them is written.
    ///
    /// # Errors
    /// If no directory could store the note: it would be lost at a restart.
    pub fn record_weights(&self, generation: Generation) -> io::Result<()> {
        let noted = WeightsNote { generation, older_up_to: self.sequence };
        let mut failed = None;
        let mut is_noted = self.dirs.is_empty();
        for dir in &self.dirs {
            match weights::write(&dir.path, noted) {
                Ok(()) => is_noted = true,
                Err(cause) => {
                    tracing::error!(dir = %dir.path.display(), %cause, "cannot record the weights in effect");
                    failed = Some(cause);
                }
            }
        }
        failed.filter(|_| !is_noted).map_or(Ok(()), Err)
    }

    fn open_dir(
        &mut self,
        config: &SsdConfig,
        dir: &Path,
        reports: UnboundedSender<Report>,
        report: &mut ScanReport,
    ) -> io::Result<()> {
        let mut directory = Directory::open(dir, config.identity, &config.faults)?;
        let direct = direct_io(dir, &config.faults)?;
        let capacity = capacity_share(config.capacity, config.dirs.len());
        let longest = config.frame_bytes_max;
        let staging = config.depth.staging_records(config.dirs.len());
        let mut shape = SegmentShape::new(capacity, longest, staging, directory.segment_pages);
        if !shape.fits() {
            directory.quarantine("its segments hold fewer than four of the largest blocks of this node")?;
            shape = SegmentShape::new(capacity, longest, staging, None);
        }
        let device: Arc<dyn BlockDevice> = if directory.segment_pages.is_some() {
            Arc::new(FileDevice::open(&directory.file(), direct)?)
        } else {
            directory.create()?;
            let bytes = u32::try_from(shape.segment_bytes()).map_err(|_| io::ErrorKind::InvalidInput)?;
            let head = format::file_head(bytes, config.identity);
            Arc::new(FileDevice::create(&directory.file(), direct, &head)?)
        };
        report.quarantined.append(&mut directory.quarantined);
        self.open_device(config, device, shape, directory.file().display().to_string(), reports, report)?;
        self.dirs.push(directory);
        Ok(())
    }

    /// Recovers a device's content and starts its thread.
    fn open_device(
        &mut self,
        config: &SsdConfig,
        device: Arc<dyn BlockDevice>,
        shape: SegmentShape,
        name: String,
        reports: UnboundedSender<Report>,
        report: &mut ScanReport,
    ) -> io::Result<()> {
        let number = u8::try_from(self.lanes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (identity, faults) = (config.identity, &*config.faults);
        let recovery = DeviceRecovery {
            device: &*device,
            shape,
            identity,
            faults,
            name: name.clone(),
            flushed: Mutex::default(),
        };
        let (segments, skipped) = recovery.read_segments()?;
        let records = segments.iter().map(|found| found.entries().len()).sum();
        let mut book = SegmentBook::new(shape);
        book.reserve_records(records);
        report.blocks.reserve(records);
        for found in segments {
            let is_verified = matches!(&found, book::RecoveredSegment::Records { sealed: false, .. });
            let (lane, headers) = (number, found.entries().iter().map(|entry| entry.header));
            report.blocks.extend(headers.zip(book.add_recovered(&found)).map(|(header, id)| ScannedBlock {
                record: SsdRecord { lane, id },
                header,
                is_verified,
            }));
        }
        report.damaged += skipped.damaged;
        report.torn += skipped.torn;
        let mailbox = Arc::new(Mailbox::new()?);
        let tally = Arc::default();
        let sight =
            DeviceHealth::new(Arc::clone(&device), Arc::clone(&tally), Arc::clone(&config.faults), name);
        let parts = EngineParts {
            lane: usize::from(number),
            identity,
            device,
            totals: tally,
            mailbox: Arc::clone(&mailbox),
            reports: reports.clone(),
            faults: Arc::clone(&config.faults),
        };
        let (uring, arena) = (config.uring, config.arena.clone());
        let thread = std::thread::Builder::new()
            .name(format!("kvfleet-ssd-{number}"))
            .spawn(move || run_device_thread(parts, uring, arena.as_ref()))?;
        let seed = config.seed.wrapping_add(u64::from(number) << 32);
        self.lanes.push(Lane::new(book, usize::from(number), mailbox, reports, thread, sight, seed));
        Ok(())
    }

    /// Keeps the newest of several records with one hash, and frees the others.
    fn keep_newest(&mut self, blocks: &mut Vec<ScannedBlock>) {
        // Sorting is much faster than lookups: with a million records, lookups would dominate the
        // start.
        let mut by_hash: Vec<(BlockHash, usize)> =
            blocks.iter().enumerate().map(|(at, found)| (found.header.hash, at)).collect();
        by_hash.sort_unstable();
        let mut is_older = vec![false; blocks.len()];
        for [(hash, at), (next, _)] in by_hash.array_windows() {
            is_older[*at] = hash == next;
        }
        let mut is_older = is_older.into_iter();
        blocks.retain(|found| {
            let keep = is_older.next() != Some(true);
            if !keep {
                self.free(found.record);
            }
            keep
        });
    }

    /// Reads a frame into `into` (which has its length) and verifies it; [`SsdCompletion::Read`]
    /// follows.
    ///
    /// # Errors
    /// If [`JOBS_MAX`] are open, or the record does not exist.
    pub fn read(
        &mut self,
        token: u64,
        record: SsdRecord,
        block: BlockVersion,
        into: SlotMut,
    ) -> io::Result<()> {
        let lane = self.lanes.get_mut(usize::from(record.lane)).ok_or(io::ErrorKind::NotFound)?;
        lane.read(token, record.id, block, into)
    }

    /// Starts to check the next record on an idle device; [`SsdCompletion::Checked`] or
    /// [`SsdCompletion::Lost`] follows. Returns its length in bytes, or `None` if no check started.
    /// Each record is checked once in a pass.
    pub fn check_next(&mut self, pass: u64) -> Option<u64> {
        let count = self.lanes.len().max(1);
        let first = self.next_scrub_device;
        self.next_scrub_device = (first + 1) % count;
        (first..count).chain(0..first).find_map(|number| self.lanes.get_mut(number)?.check_next(pass))
    }

    /// Frees a record. Its bytes may be overwritten from now on.
    pub fn free(&mut self, record: SsdRecord) {
        if let Some(lane) = self.lanes.get_mut(usize::from(record.lane)) {
            lane.free(record.id);
        }
    }

    /// Sets the owner of a recovered record, which [`SsdCompletion::Lost`] returns.
    pub fn set_owner(&mut self, record: SsdRecord, owner: u32) {
        if let Some(lane) = self.lanes.get_mut(usize::from(record.lane)) {
            lane.book.set_owner(record.id, owner);
        }
    }

    /// Processes the end of a job; `None` for the tier's own jobs.
    pub fn complete(&mut self, report: Report) -> Option<SsdCompletion> {
        let Report { lane: number, job, outcome } = report;
        let lane = self.lanes.get_mut(number)?;
        Some(match lane.complete(job, outcome)? {
            LaneEvent::Written { token, result } => SsdCompletion::Written { token, result },
            LaneEvent::Read { token, result } => SsdCompletion::Read { token, result },
            LaneEvent::Lost { record, owner, fault } => SsdCompletion::Lost {
                record: SsdRecord { lane: u8::try_from(number).ok()?, id: record },
                owner,
                fault,
            },
            LaneEvent::Checked { result } => SsdCompletion::Checked { result },
            LaneEvent::Failed { cause } => SsdCompletion::Failed { cause },
        })
    }

    /// Owners of records that will be rewritten soon to reclaim space; each is named once. Records
    /// freed before [`Self::relocate_offered`] are not rewritten.
    pub fn next_to_relocate(&mut self) -> Vec<u32> {
        self.lanes.iter_mut().flat_map(Lane::next_to_relocate).collect()
    }

    /// Relocates the remaining records of [`Self::next_to_relocate`].
    pub fn relocate_offered(&mut self) {
        self.lanes.iter_mut().for_each(Lane::relocate_offered);
    }

    /// Resumes writing on every device.
    pub fn resume(&mut self) {
        self.lanes.iter_mut().for_each(Lane::resume);
    }

    /// Bytes written since start.
    #[must_use]
    pub fn wear(&self) -> Wear {
        self.lanes.iter().fold(Wear::default(), |sum, lane| Wear {
            saved_bytes: sum.saved_bytes + lane.wear.saved_bytes,
            rewritten_bytes: sum.rewritten_bytes + lane.wear.rewritten_bytes,
        })
    }
}

/// The thread of a device.
fn run_device_thread(parts: EngineParts, uring: bool, arena: Option<&Arena>) {
    let pool = ChunkPool::new(writer::CHUNKS, writer::CHUNK_BYTES);
    let (device, bell) = (Arc::clone(&parts.device), parts.mailbox.wake_fd());
    let ring = Ring::new(device, bell, &pool, arena, QUEUE_DEPTH as u32, uring);
    tracing::debug!(ring = ring.name(), lane = parts.lane, "SSD device thread started");
    DeviceEngine::new(parts, ring, pool).run();
}

/// The share of a capacity for one of `count` devices.
fn capacity_share(capacity: Capacity, count: usize) -> Capacity {
    let count = count.max(1) as u64;
    match capacity {
        Capacity::Bytes(bytes) => Capacity::Bytes(bytes.div_ceil(count)),
        Capacity::Blocks(blocks) => Capacity::Blocks(blocks.div_ceil(count)),
    }
}

/// Whether to bypass the page cache. A full directory cannot be probed, but its content is served.
fn direct_io(dir: &Path, faults: &SsdFaults) -> io::Result<bool> {
    let probed = SsdFaults::apply(&faults.write_errno, Ok(()));
    let dir_shown = dir.display();
    match probed.and_then(|()| device::direct_io_works(dir)) {
        Ok(true) => Ok(true),
        Ok(false) => {
            tracing::warn!(dir = %dir_shown, "direct I/O is not supported here; the SSD tier uses the page cache");
            Ok(false)
        }
        Err(cause) if cause.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(dir = %dir_shown, "the SSD directory is full: its blocks are served, new ones \
                need free space there");
            Ok(false)
        }
        Err(cause) => Err(cause),
    }
}
