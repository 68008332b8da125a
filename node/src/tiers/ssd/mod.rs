//! The SSD tier: a log of records in segments, on one or several devices, each with a thread of its own.
//!
//! A block is committed (written and flushed) before anyone hears of it, and verified whenever it is
//! read. After a restart the segments say what they hold. The format and its invariants are in
//! `docs/adr/0022-ssd-segments.md`. Not here: which blocks belong on SSD (`kv_core::tier`), and what follows
//! from an error (`store`).

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
mod slow;
#[cfg(test)]
mod tests;
mod weights;
mod writing;

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

use crate::arena::{Arena, SlotMut};
use book::{RecordId, SegmentBook};
use buffer::Pool;
use device::{Device, FileDevice};
use engine::{Engine, Parts, QUEUE_DEPTH};
use files::Directory;
use lane::{Ended, Lane, Sight};
use mailbox::Mailbox;
use recover::Recovery;
use ring::Ring;
use shape::Shape;
use weights::Noted;

/// Jobs handed to a device and not yet reported; callers are told to come again above it.
pub const JOBS_MAX: usize = 1024;

const _: () = assert!(depth::DEPTH_MAX.moves <= JOBS_MAX, "a device takes a job for each move");

/// Devices of one node; a record says which in eight bits.
pub const DEVICES_MAX: usize = 64;

/// Memory for what is known of one record, in bytes, and for what a start finds of it; lists grow by doubling.
pub(crate) const RECORD_BYTES_MAX: u64 = 3 * book::RECORD_BYTES + 2 * size_of::<FoundBlock>() as u64;

/// Memory of one device's engine, in bytes: chunks that are written, records that are moved or checked, and at start the
/// one segment that a crash makes it read whole.
pub(crate) fn memory_bytes_max(capacity: Capacity, frame_bytes_max: usize) -> u64 {
    let record = format::record_bytes(frame_bytes_max) as u64;
    let moved = (lane::RECORDS_HELD_MAX as u64).saturating_mul(record);
    let staging = Depth::of(frame_bytes_max).staging_records(1);
    let segment = Shape::new(capacity, frame_bytes_max, staging, None).segment_bytes();
    writing::POOL_BYTES as u64 + moved.saturating_add(segment)
}

/// How the tier is opened.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// Directories, each best on a device of its own; made if absent. The capacity is spread evenly.
    pub dirs: Vec<PathBuf>,
    /// Identity of every block in it, under weights of generation 0.
    pub identity: IdentityDigest,
    /// Size of all of them together.
    pub capacity: Capacity,
    /// Length of the largest frame, in bytes.
    pub frame_bytes_max: usize,
    /// Blocks on their way at once.
    pub depth: Depth,
    /// Try io_uring (otherwise plain calls).
    pub uring: bool,
    /// Differs from start to start; what tells one use of a segment from the others is drawn from it.
    pub seed: u64,
    /// Where blocks are read to, if it is known: devices keep it mapped.
    pub arena: Option<Arena>,
    /// Faults for tests.
    pub faults: Arc<SsdFaults>,
}

/// The directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot use SSD directory {}: {cause}; give this node a directory of its own that it may write, or set ssd_bytes = 0",
    dir.display()
)]
pub struct SsdError {
    /// The directory.
    pub dir: PathBuf,
    /// What the system said.
    pub cause: io::Error,
}

/// A block's record; stays the same when its bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SsdRecord {
    lane: u8,
    id: RecordId,
}

/// A block found at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundBlock {
    /// Its record.
    pub record: SsdRecord,
    /// What the record says.
    pub header: RecordHeader,
    /// Its bytes were read and are right; otherwise only the footer of its segment says so.
    pub is_verified: bool,
}

/// What a start found.
#[derive(Debug, Default)]
pub struct ScanReport {
    /// Blocks, oldest first: those of the generation that the node was told last, written since.
    pub blocks: Vec<FoundBlock>,
    /// That generation.
    pub generation: Generation,
    /// All others, which are left out and free.
    pub void: u64,
    /// Records and segments skipped: damaged, unreadable, or too long for this node.
    pub damaged: u64,
    /// Writes that a crash cut short; nobody was told of them.
    pub torn: u64,
    /// Files set aside, by their new names.
    pub quarantined: Vec<PathBuf>,
}

/// A job's end.
#[derive(Debug)]
pub enum Done {
    /// The block is on the medium.
    Written {
        /// The job.
        token: u64,
        /// Whether it is.
        result: io::Result<()>,
    },
    /// The block is in DRAM again, verified.
    Read {
        /// The job.
        token: u64,
        /// Its frame.
        result: Result<Bytes, ReadFault>,
    },
    /// A block that nobody asked for turned out to be unreadable while it was moved. Its record is gone.
    Lost {
        /// The record.
        record: SsdRecord,
        /// What was given with it.
        owner: u32,
        /// Why.
        fault: ReadFault,
    },
    /// A record was read though nobody asked.
    Checked {
        /// The bytes that are as they were written, or what the medium said when it was to be read.
        result: io::Result<u64>,
    },
    /// A device cannot write for itself; nothing is written to it before [`Ssd::resume`].
    Failed {
        /// What it said.
        cause: io::Error,
    },
}

/// Bytes written since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wear {
    /// Frames that came from DRAM.
    pub saved_bytes: u64,
    /// Frames that were written again so that their segment could be.
    pub rescued_bytes: u64,
}

/// Handle of the tier. Dropping it ends the threads after the open jobs.
#[derive(Debug)]
pub struct Ssd {
    lanes: Vec<Lane>,
    /// The device that is tried first for the next block.
    turn: usize,
    /// The device of which a record is checked next.
    scrub_turn: usize,
    sequence: u64,
    /// Held as long as this handle.
    dirs: Vec<Directory>,
}

impl Ssd {
    /// Opens the directories, reads what they hold and starts the threads; `reports` gets the ends of jobs,
    /// for [`Self::take_in`].
    ///
    /// # Errors
    /// [`SsdError`] when a directory cannot be read or written at all.
    pub fn open(
        config: &SsdConfig,
        reports: &UnboundedSender<Report>,
    ) -> Result<(Ssd, ScanReport), SsdError> {
        let mut report = ScanReport::default();
        let mut ssd = Ssd::empty();
        for dir in config.dirs.iter().take(DEVICES_MAX) {
            let opened = ssd.open_dir(config, dir, reports.clone(), &mut report);
            opened.map_err(|cause| SsdError { dir: dir.clone(), cause })?;
        }
        let noted = ssd.noted(&report)?;
        ssd.order(noted, &mut report);
        Ok((ssd, report))
    }

    fn empty() -> Ssd {
        Ssd { lanes: Vec::new(), turn: 0, scrub_turn: 0, sequence: 0, dirs: Vec::new() }
    }

    /// Brings what all devices hold into one order.
    fn order(&mut self, noted: Noted, report: &mut ScanReport) {
        // A record that was being moved may be at both places, with one number: rather the one that was read. Runs that
        // are in order already, as most segments are, are only put together.
        report.blocks.sort_by_key(|found| (found.header.sequence, found.is_verified));
        self.sequence = report.blocks.last().map_or(0, |found| found.header.sequence);
        self.keep_these_weights(noted, report);
        self.keep_newest(&mut report.blocks);
    }

    /// What the node was told last of its weights. Where that cannot be read nothing is brought back, and it is noted anew.
    fn noted(&self, report: &ScanReport) -> Result<Noted, SsdError> {
        let (mut noted, mut is_known) = (Noted::default(), true);
        for dir in &self.dirs {
            match weights::read(&dir.path) {
                // A device that was away while others were told knows less than they.
                Ok(found) => {
                    let both = [noted, found.unwrap_or_default()].into_iter();
                    noted = both.max_by_key(|noted| noted.after).unwrap_or_default();
                }
                Err(cause) => {
                    tracing::error!(dir = %dir.path.display(), %cause, "of which weights the SSD blocks are cannot be read: none of them is served, and it is noted anew; look at the device");
                    is_known = false;
                }
            }
        }
        if is_known {
            return Ok(noted);
        }
        let last = report.blocks.iter().map(|found| found.header.sequence).max().unwrap_or_default();
        let anew = Noted { generation: noted.generation, after: noted.after.max(last) };
        for dir in &self.dirs {
            weights::write(&dir.path, anew).map_err(|cause| SsdError { dir: dir.path.clone(), cause })?;
        }
        Ok(anew)
    }

    /// What was written before the node was told of these weights is not brought back, nor is what is of others.
    fn keep_these_weights(&mut self, noted: Noted, report: &mut ScanReport) {
        report.generation = noted.generation;
        self.sequence = self.sequence.max(noted.after);
        let found = report.blocks.len();
        report.blocks.retain(|found| {
            let RecordHeader { generation, sequence, .. } = found.header;
            let keep = generation == noted.generation && sequence > noted.after;
            if !keep {
                self.free(found.record);
            }
            keep
        });
        report.void = (found - report.blocks.len()) as u64;
    }

    /// Notes that other weights are in force from here on, before anything is written under them.
    ///
    /// # Errors
    /// When no directory takes the note: after a restart nobody would know.
    pub fn note_weights(&self, generation: Generation) -> io::Result<()> {
        let noted = Noted { generation, after: self.sequence };
        let mut failed = None;
        let mut is_noted = self.dirs.is_empty();
        for dir in &self.dirs {
            match weights::write(&dir.path, noted) {
                Ok(()) => is_noted = true,
                Err(cause) => {
                    tracing::error!(dir = %dir.path.display(), %cause, "which weights are in force cannot be noted");
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
        let capacity = share(config.capacity, config.dirs.len());
        let longest = config.frame_bytes_max;
        let staging = config.depth.staging_records(config.dirs.len());
        let mut shape = Shape::new(capacity, longest, staging, directory.segment_pages);
        if !shape.fits() {
            directory.set_aside("its segments hold fewer than four of the largest blocks of this node")?;
            shape = Shape::new(capacity, longest, staging, None);
        }
        let device: Arc<dyn Device> = if directory.segment_pages.is_some() {
            Arc::new(FileDevice::open(&directory.file(), direct)?)
        } else {
            directory.create()?;
            let bytes = u32::try_from(shape.segment_bytes()).map_err(|_| io::ErrorKind::InvalidInput)?;
            let head = format::file_head(bytes, config.identity);
            Arc::new(FileDevice::begin(&directory.file(), direct, &head)?)
        };
        report.quarantined.append(&mut directory.quarantined);
        self.open_device(config, device, shape, directory.file().display().to_string(), reports, report)?;
        self.dirs.push(directory);
        Ok(())
    }

    /// Reads what a device holds and starts its thread.
    fn open_device(
        &mut self,
        config: &SsdConfig,
        device: Arc<dyn Device>,
        shape: Shape,
        name: String,
        reports: UnboundedSender<Report>,
        report: &mut ScanReport,
    ) -> io::Result<()> {
        let number = u8::try_from(self.lanes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (identity, faults) = (config.identity, &*config.faults);
        let recovery = Recovery {
            device: &*device,
            shape,
            identity,
            faults,
            name: name.clone(),
            flushed: Mutex::default(),
        };
        let (segments, skipped) = recovery.all()?;
        let records = segments.iter().map(|found| found.entries().len()).sum();
        let mut book = SegmentBook::new(shape);
        book.expect_records(records);
        report.blocks.reserve(records);
        for found in segments {
            let is_verified = matches!(&found, book::Found::Records { sealed: false, .. });
            let (lane, headers) = (number, found.entries().iter().map(|entry| entry.header));
            report.blocks.extend(headers.zip(book.adopt(&found)).map(|(header, id)| FoundBlock {
                record: SsdRecord { lane, id },
                header,
                is_verified,
            }));
        }
        report.damaged += skipped.damaged;
        report.torn += skipped.torn;
        let mailbox = Arc::new(Mailbox::new()?);
        let tally = Arc::default();
        let sight = Sight::new(Arc::clone(&device), Arc::clone(&tally), Arc::clone(&config.faults), name);
        let parts = Parts {
            lane: usize::from(number),
            identity,
            device,
            tally,
            mailbox: Arc::clone(&mailbox),
            reports: reports.clone(),
            faults: Arc::clone(&config.faults),
        };
        let (uring, arena) = (config.uring, config.arena.clone());
        let thread = std::thread::Builder::new()
            .name(format!("kvfleet-ssd-{number}"))
            .spawn(move || run(parts, uring, arena.as_ref()))?;
        let seed = config.seed.wrapping_add(u64::from(number) << 32);
        self.lanes.push(Lane::new(book, usize::from(number), mailbox, reports, thread, sight, seed));
        Ok(())
    }

    /// Of several records with one hash the last written stays; the others are free.
    fn keep_newest(&mut self, blocks: &mut Vec<FoundBlock>) {
        // Sorted, not looked up one by one: of a million that would be most of what a start does.
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

    /// Reads a frame into `into` (which has its length) and verifies it; [`Done::Read`] follows.
    ///
    /// # Errors
    /// When [`JOBS_MAX`] are open, or the record is not there.
    pub fn read(
        &mut self,
        token: u64,
        record: SsdRecord,
        block: (BlockHash, Generation),
        into: SlotMut,
    ) -> io::Result<()> {
        let lane = self.lanes.get_mut(usize::from(record.lane)).ok_or(io::ErrorKind::NotFound)?;
        lane.read(token, record.id, block, into)
    }

    /// Begins to check the next record that nobody asked for, on a device that nobody waits for;
    /// [`Done::Checked`] or [`Done::Lost`] follows. Says how many bytes it has; nothing when there is none now.
    /// A record is checked once in a pass.
    pub fn check_next(&mut self, pass: u64) -> Option<u64> {
        let count = self.lanes.len().max(1);
        let first = self.scrub_turn;
        self.scrub_turn = (first + 1) % count;
        (first..count).chain(0..first).find_map(|number| self.lanes.get_mut(number)?.check_next(pass))
    }

    /// Frees a record. Its bytes may be overwritten from now on.
    pub fn free(&mut self, record: SsdRecord) {
        if let Some(lane) = self.lanes.get_mut(usize::from(record.lane)) {
            lane.free(record.id);
        }
    }

    /// What comes back with [`Done::Lost`] of a record found at start.
    pub fn set_owner(&mut self, record: SsdRecord, owner: u32) {
        if let Some(lane) = self.lanes.get_mut(usize::from(record.lane)) {
            lane.book.set_owner(record.id, owner);
        }
    }

    /// The end of a job; nothing for what the tier does for itself.
    pub fn take_in(&mut self, report: Report) -> Option<Done> {
        let Report { lane: number, job, outcome } = report;
        let lane = self.lanes.get_mut(number)?;
        Some(match lane.take_in(job, outcome)? {
            Ended::Written { token, result } => Done::Written { token, result },
            Ended::Read { token, result } => Done::Read { token, result },
            Ended::Lost { record, owner, fault } => Done::Lost {
                record: SsdRecord { lane: u8::try_from(number).ok()?, id: record },
                owner,
                fault,
            },
            Ended::Checked { result } => Done::Checked { result },
            Ended::Failed { cause } => Done::Failed { cause },
        })
    }

    /// Whose records are to be written again soon, so that there is room: each is named once. One that is freed before
    /// [`Self::go_on`] is not.
    pub fn next_to_move(&mut self) -> Vec<u32> {
        self.lanes.iter_mut().flat_map(Lane::next_to_move).collect()
    }

    /// What of [`Self::next_to_move`] is still there is moved.
    pub fn go_on(&mut self) {
        self.lanes.iter_mut().for_each(Lane::go_on);
    }

    /// Tries to write again, on every device.
    pub fn resume(&mut self) {
        self.lanes.iter_mut().for_each(Lane::resume);
    }

    /// Bytes written since start.
    #[must_use]
    pub fn wear(&self) -> Wear {
        self.lanes.iter().fold(Wear::default(), |sum, lane| Wear {
            saved_bytes: sum.saved_bytes + lane.wear.saved_bytes,
            rescued_bytes: sum.rescued_bytes + lane.wear.rescued_bytes,
        })
    }
}

/// The thread of a device.
fn run(parts: Parts, uring: bool, arena: Option<&Arena>) {
    let pool = Pool::new(writing::CHUNKS, writing::CHUNK_BYTES);
    let (device, bell) = (Arc::clone(&parts.device), parts.mailbox.bell());
    let ring = Ring::new(device, bell, &pool, arena, QUEUE_DEPTH as u32, uring);
    tracing::debug!(ring = ring.name(), lane = parts.lane, "SSD tier runs");
    Engine::new(parts, ring, pool).run();
}

/// The part of a capacity that one of `count` devices has.
fn share(capacity: Capacity, count: usize) -> Capacity {
    let count = count.max(1) as u64;
    match capacity {
        Capacity::Bytes(bytes) => Capacity::Bytes(bytes.div_ceil(count)),
        Capacity::Blocks(blocks) => Capacity::Blocks(blocks.div_ceil(count)),
    }
}

/// Whether to go round the page cache. A full directory cannot be probed, and what it holds is served.
fn direct_io(dir: &Path, faults: &SsdFaults) -> io::Result<bool> {
    let probed = SsdFaults::apply(&faults.write_errno, Ok(()));
    let dir_shown = dir.display();
    match probed.and_then(|()| device::direct_io_works(dir)) {
        Ok(true) => Ok(true),
        Ok(false) => {
            tracing::warn!(dir = %dir_shown, "direct I/O is refused here; the SSD tier goes through the page cache");
            Ok(false)
        }
        Err(cause) if cause.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(dir = %dir_shown, "the SSD directory is full: its blocks are served, new ones need free space there");
            Ok(false)
        }
        Err(cause) => Err(cause),
    }
}
