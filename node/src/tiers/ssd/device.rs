//! Storage of bytes: a file, or in tests a device with faults. The ring performs the I/O, so that
//! one engine works with all of them.
//!
//! Not here: the meaning of the bytes (`format`).

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kv_core::id::Timestamp;
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;

use super::buffer::PageBuffer;
use super::format::PAGE_BYTES;

/// Start of the clock, at or soon after the opening of the first device.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Storage that is read and written in whole pages.
pub(crate) trait BlockDevice: Debug + Send + Sync {
    /// File descriptor for a kernel ring; without one the calls below are used.
    fn fd(&self) -> Option<RawFd>;

    /// Reads up to the length of `into`; a short read is not an error.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes up to the length of `from`; a short write is not an error.
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize>;

    /// Makes all completed writes durable.
    fn sync(&self) -> io::Result<()>;

    /// Size in bytes.
    fn bytes(&self) -> io::Result<u64>;

    /// Reserves space up to `bytes`, so that a full medium fails here and not in the middle of a
    /// block.
    fn grow(&self, bytes: u64) -> io::Result<()>;

    /// Index of the next completion to report among `open` ones. The first, except in tests of
    /// reordering.
    fn next_reported(&self, _open: usize) -> usize {
        0
    }

    /// The time for measuring its work: the clock's, except in tests of slow devices.
    fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(START.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

/// A file.
#[derive(Debug)]
pub(crate) struct FileDevice {
    file: File,
    grown: AtomicU64,
    /// The first page of a new file. It is written with the first segment, so that a file can be
    /// opened on a full medium; a file of zeros counts as new.
    head: Mutex<Option<PageBuffer>>,
}

impl FileDevice {
    pub(crate) fn open(path: &Path, direct: bool) -> io::Result<FileDevice> {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        let grown = AtomicU64::new(file.metadata()?.len());
        Ok(FileDevice { file, grown, head: Mutex::new(None) })
    }

    /// Creates a file that will begin with `head`; its previous content is deleted.
    pub(crate) fn create(path: &Path, direct: bool, head: &[u8; PAGE_BYTES]) -> io::Result<FileDevice> {
        let mut page = PageBuffer::new(PAGE_BYTES);
        page.copy_from_slice(head);
        let device = FileDevice::open(path, direct)?;
        device.file.set_len(0)?;
        device.grown.store(0, Ordering::Relaxed);
        *device.head.lock() = Some(page);
        Ok(device)
    }

    fn write_head(&self) -> io::Result<()> {
        let mut head = self.head.lock();
        if let Some(page) = &*head {
            write_all(self, page, 0)?;
            self.file.sync_all()?;
            self.grown.fetch_max(PAGE_BYTES as u64, Ordering::Relaxed);
            *head = None;
        }
        Ok(())
    }
}

impl BlockDevice for FileDevice {
    fn fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(into, at)
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize> {
        self.file.write_at(from, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        let grown = self.grown.load(Ordering::Relaxed);
        if bytes <= grown {
            return Ok(());
        }
        // The head goes first: a file with space but without a head would not be recognised again.
        self.write_head()?;
        let grown = self.grown.load(Ordering::Relaxed);
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), grown, bytes.saturating_sub(grown)) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => self.file.set_len(bytes)?,
            Err(cause) => {
                // Some file systems keep the space that they allocated before they ran out.
                if let Err(cause) = self.file.set_len(grown) {
                    tracing::warn!(%cause, "space that the SSD tier could not use stays allocated");
                }
                return Err(cause.into());
            }
        }
        self.grown.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Reads all of `into`, in as many calls as the device needs.
///
/// # Errors
/// The device's error; `UnexpectedEof` at its end.
pub(crate) fn read_all(device: &dyn BlockDevice, into: &mut [u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        match device.read_at(&mut into[done..], at + done as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => done += got,
        }
    }
    Ok(())
}

/// Writes all of `from`, in as many calls as the device needs.
///
/// # Errors
/// The device's error; `WriteZero` if it accepts no byte.
pub(crate) fn write_all(device: &dyn BlockDevice, from: &[u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < from.len() {
        match device.write_at(&from[done..], at + done as u64)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            put => done += put,
        }
    }
    Ok(())
}

/// Whether files of this directory can be opened for direct I/O.
///
/// # Errors
/// If no file can be created there.
pub(crate) fn direct_io_works(dir: &Path) -> io::Result<bool> {
    let path = dir.join(".probe");
    if let Err(cause) = std::fs::write(&path, [0u8; PAGE_BYTES]) {
        // After a write to a full medium the empty file remains; a failed removal does not matter.
        let _ = std::fs::remove_file(&path);
        return Err(cause);
    }
    let mut page = PageBuffer::new(PAGE_BYTES);
    let works = FileDevice::open(&path, true).is_ok_and(|file| read_all(&file, &mut page, 0).is_ok());
    std::fs::remove_file(&path)?;
    Ok(works)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn failed_growth_leaves_only_the_file_head() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = FileDevice::create(file.path(), false, &[7; PAGE_BYTES]).unwrap();
        // No file system is this large.
        assert!(device.grow(1 << 62).is_err());
        assert_eq!(std::fs::read(file.path()).unwrap(), vec![7; PAGE_BYTES]);
        device.grow(5 * PAGE_BYTES as u64).unwrap();
        assert_eq!(device.bytes().unwrap(), 5 * PAGE_BYTES as u64);
    }
}
