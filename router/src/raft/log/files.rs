//! The files of the log: how one is made, how it grows, how it is written and used again.
//!
//! A file is written in pages that nobody wrote since it was made, so that a sync changes no more than their contents:
//! zeros lie ahead of what is written. A file that is no longer wanted is renamed and used again, which spares the
//! system new blocks. Not here: what is written (`frame.rs`), and which files are wanted (`disk.rs`).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::frame::{FRAMES_START, FileHead};
use super::page_file::PageFile;

/// Bytes after which the next file is begun: small enough that most are free soon after a purge, large enough that
/// this is rare. A single frame may be larger, and then has a file that is.
pub(super) const FILE_BYTES: u64 = if cfg!(test) { 128 << 10 } else { 32 << 20 };

/// Bytes of a new file, and what lengths are a multiple of.
const STEP_BYTES: u64 = if cfg!(test) { 32 << 10 } else { 1 << 20 };

/// Zeros that are written ahead at once: frames that come meanwhile wait, so this must be rare for small ones, less
/// than one in a hundred, and not long.
const ZEROS_BYTES: u64 = if cfg!(test) { 32 << 10 } else { 4 << 20 };

/// Room ahead below which the next zeros are written: that of a few frames.
const AHEAD_MIN: u64 = if cfg!(test) { 16 << 10 } else { 128 << 10 };

/// Bytes of a frame that holds next to nothing.
pub(super) const MARK_BYTES: u64 = 2 * super::frame::PAGE as u64;

/// Files kept to be used again.
const FREE_MAX: usize = 4;

/// Name of a file while its head is written.
const NEW: &str = "new";

/// Beginning of the name of one to be used again.
const FREE_PREFIX: &str = "free-";

/// The folder, and what in it can be used again.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    free: Vec<PathBuf>,
    #[cfg(test)]
    pub(super) is_full: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

impl Folder {
    /// Takes a folder as it is; what can be used again is found by [`Self::numbers`].
    pub(super) fn new(path: PathBuf) -> Folder {
        Folder {
            path,
            free: Vec::new(),
            #[cfg(test)]
            is_full: std::sync::Arc::default(),
        }
    }

    /// Where a file is.
    pub(super) fn path_of(&self, file: u64) -> PathBuf {
        self.path.join(format!("{file:016}"))
    }

    /// Numbers of the files of the log, ascending. What else is there and ours is removed or used again.
    ///
    /// # Errors
    /// What the file system said.
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

    /// Makes the file that `head` names, of a free one or a new one; durable under its name when it returns.
    ///
    /// # Errors
    /// What the file system said.
    pub(super) fn create(&mut self, mut head: FileHead) -> io::Result<LogFile> {
        self.refuse_when_full()?;
        let new = self.path.join(NEW);
        if let Some(free) = self.free.pop() {
            fs::rename(free, &new)?;
            // Or a file could be found under its old name with its new head, once the power is back.
            self.sync()?;
        }
        let mut file = PageFile::open(OpenOptions::new().create(true), &new)?;
        let old_bytes = file.bytes()?;
        head.file_bytes = old_bytes.max(STEP_BYTES);
        file.write(0, &[&head.encode()?])?;
        file.write_zeros(old_bytes.max(FRAMES_START), head.file_bytes)?;
        file.sync_all()?;
        fs::rename(&new, self.path_of(head.file))?;
        self.sync()?;
        let bytes = head.file_bytes;
        Ok(LogFile { file, head, end: FRAMES_START, named: bytes, bytes, written: bytes })
    }

    /// A file that is not wanted any more. Durable when it returns, so that files go in order.
    ///
    /// # Errors
    /// What the file system said.
    pub(super) fn free(&mut self, file: u64) -> io::Result<()> {
        let path = self.path_of(file);
        if !path.exists() {
            // It went before, and only that was not made durable.
            return self.sync();
        }
        if self.free.len() >= FREE_MAX || fs::metadata(&path)?.len() > 2 * FILE_BYTES {
            fs::remove_file(path)?;
        } else {
            let free = self.path.join(format!("{FREE_PREFIX}{file:016}"));
            fs::rename(path, &free)?;
            // Used again only once it is durably not a file of the log.
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
        let is_full = self.is_full.load(std::sync::atomic::Ordering::SeqCst);
        if is_full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
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

/// Whether there is only no room: nothing was written that is not known of.
pub(super) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// A sync that failed is more than a disk that is full, whatever the reason: what was to be synced may be lost, and the
/// next sync succeeds all the same.
fn sync_failed(error: &io::Error) -> io::Error {
    io::Error::other(format!("it cannot be synced: {error}"))
}

/// The file that is written.
#[derive(Debug)]
pub(super) struct LogFile {
    file: PageFile,
    pub(super) head: FileHead,
    /// Where the next frame goes.
    pub(super) end: u64,
    /// Bytes that it has, as its head or a frame says. Nothing is written beyond, but for what says more: so a file
    /// that was cut is known for one.
    named: u64,
    /// Bytes that it has, durably.
    bytes: u64,
    /// Up to where its blocks were written since it was made.
    written: u64,
}

impl LogFile {
    /// One that was read: its frames end at `end`, and they say that it has `named` bytes.
    pub(super) fn reopen(path: &Path, head: FileHead, end: u64, named: u64) -> io::Result<LogFile> {
        let file = PageFile::open(&mut OpenOptions::new(), path)?;
        let bytes = file.bytes()?;
        Ok(LogFile { file, head, end, named, bytes, written: bytes })
    }

    /// Whether no frame was written.
    pub(super) fn is_empty(&self) -> bool {
        self.end == FRAMES_START
    }

    pub(super) fn number(&self) -> u64 {
        self.head.file
    }

    /// Whether frames up to `end` may be written, with room behind for one that says how long the file is, or that it
    /// is closed.
    pub(super) fn has_room(&self, end: u64) -> bool {
        end + MARK_BYTES <= self.named
    }

    /// Makes it long enough for frames up to `end`, durably: as long as files are, or as need be. That takes no room.
    pub(super) fn grow(&mut self, end: u64) -> io::Result<()> {
        let needed = end + MARK_BYTES;
        if needed <= self.bytes {
            return Ok(());
        }
        let bytes = needed.next_multiple_of(STEP_BYTES).max(FILE_BYTES);
        self.file.set_len(bytes)?;
        self.file.sync_all().map_err(|error| sync_failed(&error))?;
        self.bytes = bytes;
        Ok(())
    }

    /// Bytes that the next frame names.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes commands one behind the other and syncs them.
    pub(super) fn write_beside(&mut self, at: u64, commands: &[Bytes]) -> io::Result<()> {
        self.file.write(at, commands)?;
        self.file.sync_data()
    }

    /// Writes the copies of a frame and syncs them. The next one goes to `next`.
    pub(super) fn write_copies(&mut self, copies: &[u8], next: u64) -> io::Result<()> {
        self.file.write(self.end, &[copies])?;
        self.file.sync_data()?;
        self.end = next;
        self.named = self.bytes;
        self.written = self.written.max(next);
        Ok(())
    }

    /// Makes room for small frames to come, before they wait for it: a longer file, and zeros in it.
    pub(super) fn write_ahead(&mut self) -> io::Result<()> {
        let wanted = self.end + AHEAD_MIN;
        if wanted <= self.written || self.written >= FILE_BYTES {
            return Ok(());
        }
        self.grow(wanted)?;
        let to = (self.written + ZEROS_BYTES).min(self.bytes);
        self.file.write_zeros(self.written, to)?;
        self.file.sync_data().map_err(|error| sync_failed(&error))?;
        self.written = to;
        Ok(())
    }

    /// Writes to another file from here on, for tests of what a disk may do; gives the one before.
    #[cfg(test)]
    pub(super) fn put_on(&mut self, file: File) -> File {
        self.file.put_on(file)
    }
}
