//! The SSD tier: files of fixed-size slots in one directory, read and written on a thread of their own.
//!
//! A block is committed (written and flushed) before anyone hears of it, and verified whenever it is
//! read. After a restart the slots say what they hold. Not here: which blocks belong on SSD
//! (`kv_core::tier`), and what follows from an error (`store`).

mod buffer;
mod engine;
pub mod format;
mod ring;
mod scan;
mod space;
#[cfg(test)]
mod tests;

pub use engine::{Done, ReadFault, SsdFaults};
pub use format::SlotHeader;
pub use scan::{FoundBlock, ScanReport};
pub use space::SlotId;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kv_core::tier::Capacity;
use tokio::sync::mpsc::UnboundedSender;

use crate::arena::SlotMut;
use engine::{Engine, Job, Target};
use ring::Ring;
use space::Space;

/// Jobs handed to the thread and not yet reported. With 2 MiB blocks that is 256 MiB of buffers at most.
pub const JOBS_MAX: usize = 128;

/// Operations open in the ring at once; NVMe devices reach their full rate well below this.
pub const QUEUE_DEPTH: usize = 64;

/// Slots beyond the capacity, for blocks that are between two places: at least as many as moves in flight.
pub const STAGING_SLOTS: u64 = 64;

/// How the tier is opened.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// Directory of the files; made if absent.
    pub dir: PathBuf,
    /// Identity of every block in it.
    pub identity: IdentityDigest,
    /// Size.
    pub capacity: Capacity,
    /// Length of the largest frame, in bytes.
    pub frame_bytes_max: usize,
    /// Try io_uring (otherwise plain calls).
    pub uring: bool,
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

/// Handle of the tier. Dropping it ends the thread after the open jobs.
#[derive(Debug)]
pub struct Ssd {
    space: Space,
    identity: IdentityDigest,
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    sequence: u64,
    /// Held as long as this handle: two processes on one directory would overwrite each other.
    _lock: File,
}

impl Ssd {
    /// Opens the directory, reads what it holds and starts the thread; `done` gets the ends of jobs.
    ///
    /// # Errors
    /// [`SsdError`] when the directory cannot be read or written at all.
    pub fn open(config: &SsdConfig, done: UnboundedSender<Done>) -> Result<(Ssd, ScanReport), SsdError> {
        let failed = |cause| SsdError { dir: config.dir.clone(), cause };
        std::fs::create_dir_all(&config.dir).map_err(failed)?;
        let lock = lock(&config.dir).map_err(failed)?;
        let direct = direct_io(config).map_err(failed)?;
        let (dir, identity) = (&config.dir, config.identity);
        let mut space =
            Space::new(dir, identity, direct, config.frame_bytes_max, config.capacity, STAGING_SLOTS);
        let report = scan::scan(dir, identity, direct, &mut space, &config.faults).map_err(failed)?;
        let (jobs, inbox) = sync_channel(JOBS_MAX);
        let (uring, faults) = (config.uring, Arc::clone(&config.faults));
        let thread = std::thread::Builder::new()
            .name("kvfleet-ssd".to_owned())
            .spawn(move || {
                let ring = Ring::new(QUEUE_DEPTH as u32 * 2, uring);
                tracing::debug!(ring = ring.name(), direct, "SSD tier runs");
                Engine::new(inbox, done, ring, QUEUE_DEPTH, faults).run();
            })
            .map_err(failed)?;
        let sequence = report.blocks.last().map_or(0, |found| found.header.sequence);
        let ssd = Ssd {
            space,
            identity: config.identity,
            jobs: Some(jobs),
            thread: Some(thread),
            sequence,
            _lock: lock,
        };
        Ok((ssd, report))
    }

    /// Whether [`Self::take`] would find a slot now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.space.has_room()
    }

    /// A slot for a frame; `Ok(None)` while all are in use.
    ///
    /// # Errors
    /// What the file system said; `StorageFull` when it is full. `InvalidInput` for a frame longer than any.
    pub fn take(&mut self, frame_bytes: usize) -> io::Result<Option<SlotId>> {
        self.space.take(frame_bytes)
    }

    /// Frees a slot. Its bytes may be overwritten from now on.
    pub fn free(&mut self, slot: SlotId) {
        self.space.give_back(slot);
    }

    /// Writes a frame; [`Done::Written`] follows. The header's sequence is set here.
    ///
    /// # Errors
    /// When [`JOBS_MAX`] are open or the thread is gone.
    pub fn write(
        &mut self,
        token: u64,
        slot: SlotId,
        mut header: SlotHeader,
        frame: Bytes,
    ) -> io::Result<()> {
        self.sequence += 1;
        header.sequence = self.sequence;
        let target = self.target(slot);
        self.send(Job::Write { token, target, header, frame })
    }

    /// Reads a frame into `into` (which has its length) and verifies it; [`Done::Read`] follows.
    ///
    /// # Errors
    /// When [`JOBS_MAX`] are open or the thread is gone.
    pub fn read(&self, token: u64, slot: SlotId, hash: BlockHash, into: SlotMut) -> io::Result<()> {
        let target = self.target(slot);
        self.send(Job::Read { token, target, identity: self.identity, hash, into })
    }

    fn target(&self, slot: SlotId) -> Target {
        let file = &self.space.files[slot.file];
        Target { file: Arc::clone(&file.file), offset: self.space.offset(slot), slot_bytes: file.slot_bytes }
    }

    fn send(&self, job: Job) -> io::Result<()> {
        let jobs = self.jobs.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        jobs.try_send(job).map_err(|refused| match refused {
            TrySendError::Full(_) => io::ErrorKind::WouldBlock.into(),
            TrySendError::Disconnected(_) => io::ErrorKind::BrokenPipe.into(),
        })
    }
}

/// Whether to go round the page cache. A full directory cannot be probed, and what it holds is served.
fn direct_io(config: &SsdConfig) -> io::Result<bool> {
    let dir = config.dir.display();
    let probed = SsdFaults::apply(&config.faults.write_errno, Ok(()));
    match probed.and_then(|()| space::direct_io_works(&config.dir)) {
        Ok(true) => Ok(true),
        Ok(false) => {
            tracing::warn!(%dir, "direct I/O is refused here; the SSD tier goes through the page cache");
            Ok(false)
        }
        Err(cause) if cause.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(%dir, "the SSD directory is full: its blocks are served, new ones need free space there");
            Ok(false)
        }
        Err(cause) => Err(cause),
    }
}

fn lock(dir: &Path) -> io::Result<File> {
    let file = File::create(dir.join(".lock"))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process uses it"))
        }
        Err(cause) => Err(cause.into()),
    }
}

impl Drop for Ssd {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the SSD thread ended with a panic");
        }
    }
}
