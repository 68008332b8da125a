//! The files of the log: creation, growth, writing and reuse.
//!
//! A file is written in pages that are preallocated with zeros, so that a sync changes only
//! contents. An unneeded file is renamed and reused, which saves the allocation of new blocks. Not
//! here: the contents (`frame.rs`), and the choice of needed files (`mod.rs`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::frame::{FRAMES_START, FileHead};
use super::page_file::PageFile;

/// Size at which the next file is started: small enough that most are free soon after a purge,
/// large enough that a switch is rare. A larger frame gets a larger file.
pub(super) const FILE_BYTES: u64 = if cfg!(test) { 128 << 10 } else { 32 << 20 };

/// Size of a new file; lengths are a multiple of it.
const STEP_BYTES: u64 = if cfg!(test) { 32 << 10 } else { 1 << 20 };

/// Zeros written ahead at once: pending frames wait for it, so it must be rare (for small frames
/// below one in a hundred) and short.
const ZEROS_BYTES: u64 = if cfg!(test) { 32 << 10 } else { 4 << 20 };

/// Remaining room at which the next zeros are written: a few frames.
const AHEAD_MIN: u64 = if cfg!(test) { 16 << 10 } else { 128 << 10 };

/// Bytes of a nearly empty frame.
pub(super) const EMPTY_FRAME_BYTES: u64 = 2 * super::frame::PAGE as u64;

/// Files kept for reuse.
const FREE_MAX: usize = 4;

/// Name of a file while its head is written.
const NEW: &str = "new";

/// Name prefix of a file for reuse.
const FREE_PREFIX: &str = "free-";

/// The folder, and its reusable files.
#[derive(Debug)]
pub(super) struct LogFolder {
    path: PathBuf,
    free: Vec<PathBuf>,
    /// Writes until the disk is full; `usize::MAX` for never.
    #[cfg(test)]
    pub(super) writes_left: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

impl LogFolder {
    /// Opens a folder; [`Self::numbers`] finds the reusable files.
    pub(super) fn new(path: PathBuf) -> LogFolder {
        LogFolder {
            path,
            free: Vec::new(),
            #[cfg(test)]
            writes_left: std::sync::Arc::new(usize::MAX.into()),
        }
    }

    /// Path of a file.
    pub(super) fn path_of(&self, file: u64) -> PathBuf {
        self.path.join(format!("{file:016}"))
    }

    /// Numbers of the log's files, ascending. Leftovers are removed or kept for reuse.
    ///
    /// # Errors
    /// The file system's error.
    pub(super) fn numbers(&mut self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for file in fs::read_dir(&self.path)? {
            let file = file?;
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            match name.parse() {
                Ok(number) => numbers.push(number),
                Err(_) if name == NEW => fs::remove_file(file.path())?,
                Err(_) if name.starts_with(FREE_PREFIX) => self.free.push(file.path()),
                Err(_) => {}
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Creates the file that `head` names, from a reusable file or a new one; durable under its
    /// name on return.
    ///
    /// # Errors
    /// The file system's error.
    pub(super) fn create(&mut self, mut head: FileHead) -> io::Result<LogFile> {
        self.refuse_when_full()?;
        let new = self.path.join(NEW);
        if let Some(free) = self.free.pop() {
            fs::rename(free, &new)?;
            // Otherwise a power loss could leave the file under its old name with its new head.
            self.sync()?;
        }
        let mut file = PageFile::open(OpenOptions::new().create(true), &new)?;
        let old_bytes = file.bytes()?;
        head.file_bytes = old_bytes.max(STEP_BYTES);
        file.write(0, &[&head.encode()?])?;
        file.write_zeros(old_bytes.max(FRAMES_START), head.file_bytes)?;
        file.sync_all().map_err(|error| sync_failed(&error))?;
        fs::rename(&new, self.path_of(head.file))?;
        self.sync()?;
        let bytes = head.file_bytes;
        Ok(LogFile { file, head, end: FRAMES_START, recorded_bytes: bytes, bytes, preallocated_end: bytes })
    }

    /// Releases a file that is no longer needed. Durable on return, so that files go in order.
    ///
    /// # Errors
    /// The file system's error.
    pub(super) fn free(&mut self, file: u64) -> io::Result<()> {
        let path = self.path_of(file);
        if !path.exists() {
            // It is gone already, but maybe not durably.
            return self.sync();
        }
        if self.free.len() >= FREE_MAX || fs::metadata(&path)?.len() > 2 * FILE_BYTES {
            fs::remove_file(path)?;
        } else {
            let free = self.path.join(format!("{FREE_PREFIX}{file:016}"));
            fs::rename(path, &free)?;
            // Reused only once it is durably no file of the log.
            self.sync()?;
            self.free.push(free);
            return Ok(());
        }
        self.sync()
    }

    /// Makes names durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        sync_folder(&self.path)
    }

    #[cfg(test)]
    pub(super) fn refuse_when_full(&self) -> io::Result<()> {
        use std::sync::atomic::Ordering::SeqCst;
        let next = |left: usize| if left == usize::MAX { Some(left) } else { left.checked_sub(1) };
        let left = self.writes_left.fetch_update(SeqCst, SeqCst, next);
        left.map(drop).map_err(|_| io::ErrorKind::StorageFull.into())
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "tests fill the disk here")]
    pub(super) fn refuse_when_full(&self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all().map_err(|error| sync_failed(&error))
}

/// A failed sync is worse than a full disk: the data may be lost, and yet the next sync succeeds.
fn sync_failed(error: &io::Error) -> io::Error {
    io::Error::other(format!("sync failed: {error}"))
}

/// A file that is open for writing.
#[derive(Debug)]
pub(super) struct LogFile {
    file: PageFile,
    pub(super) head: FileHead,
    /// Offset of the next frame.
    pub(super) end: u64,
    /// Size of the file according to its head or a frame. Frames beyond it first record a larger
    /// size, so that a truncated file is detected.
    recorded_bytes: u64,
    /// Durable size of the file.
    bytes: u64,
    /// End of the preallocated part.
    preallocated_end: u64,
}

impl LogFile {
    /// A file that was read: its frames end at `end`, and record a size of `named` bytes.
    pub(super) fn reopen(path: &Path, head: FileHead, end: u64, named: u64) -> io::Result<LogFile> {
        let file = PageFile::open(&mut OpenOptions::new(), path)?;
        let bytes = file.bytes()?;
        Ok(LogFile { file, head, end, recorded_bytes: named, bytes, preallocated_end: bytes })
    }

    /// Whether it has no frame.
    pub(super) fn is_empty(&self) -> bool {
        self.end == FRAMES_START
    }

    pub(super) fn number(&self) -> u64 {
        self.head.file
    }

    /// Whether frames up to `end` fit, with room for one more that records a new size or the end.
    pub(super) fn has_room(&self, end: u64) -> bool {
        end + EMPTY_FRAME_BYTES <= self.recorded_bytes
    }

    /// Extends the file durably for frames up to `end`. This allocates no blocks.
    pub(super) fn grow(&mut self, end: u64) -> io::Result<()> {
        let needed = end + EMPTY_FRAME_BYTES;
        if needed <= self.bytes {
            return Ok(());
        }
        let bytes = needed.next_multiple_of(STEP_BYTES).max(FILE_BYTES);
        self.file.set_len(bytes)?;
        self.file.sync_all().map_err(|error| sync_failed(&error))?;
        self.bytes = bytes;
        Ok(())
    }

    /// File size that the next frame records.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes commands one after the other and syncs them.
    pub(super) fn write_out_of_line(&mut self, at: u64, commands: &[Bytes]) -> io::Result<()> {
        self.file.write(at, commands)?;
        self.file.sync_data().map_err(|error| sync_failed(&error))
    }

    /// Writes the copies of a frame and syncs them. The next frame goes to `next`.
    pub(super) fn write_copies(&mut self, copies: &[u8], next: u64) -> io::Result<()> {
        self.file.write(self.end, &[copies])?;
        self.file.sync_data().map_err(|error| sync_failed(&error))?;
        self.end = next;
        self.recorded_bytes = self.bytes;
        self.preallocated_end = self.preallocated_end.max(next);
        Ok(())
    }

    /// Prepares room for later small frames: a longer file, and zeros in it.
    pub(super) fn write_ahead(&mut self) -> io::Result<()> {
        let needed_end = self.end + AHEAD_MIN;
        if needed_end <= self.preallocated_end || self.preallocated_end >= FILE_BYTES {
            return Ok(());
        }
        self.grow(needed_end)?;
        let to = (self.preallocated_end + ZEROS_BYTES).min(self.bytes);
        self.file.write_zeros(self.preallocated_end, to)?;
        self.file.sync_data().map_err(|error| sync_failed(&error))?;
        self.preallocated_end = to;
        Ok(())
    }

    /// Writes to another file from here on, for tests of disk failures; returns the previous one.
    #[cfg(test)]
    pub(super) fn replace_file(&mut self, file: File) -> File {
        self.file.replace_file(file)
    }
}
