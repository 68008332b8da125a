//! A file written in whole pages with direct I/O where the file system supports it.
//!
//! The log is not read again before the next start, so a copy in the page cache is useless and
//! costs noticeable processor time. Not here: the layout (`files.rs`), and reading (`recovery.rs`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::frame::PAGE;

/// Largest single write: more would save little and exceed near caches.
const WRITE_BYTES_MAX: usize = if cfg!(test) { 4 * PAGE } else { 256 << 10 };

/// The file, and a buffer for pages.
#[derive(Debug)]
pub(super) struct PageFile {
    file: File,
    /// Has room for [`WRITE_BYTES_MAX`] from its first page boundary.
    pages: Box<[u8]>,
}

impl PageFile {
    /// Opens a file for reading and writing with these options. Falls back to buffered I/O where
    /// direct I/O is not supported.
    ///
    /// # Errors
    /// The file system's error.
    pub(super) fn open(options: &mut OpenOptions, path: &Path) -> io::Result<PageFile> {
        let options = options.read(true).write(true);
        let file = match options.clone().custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => options.open(path)?,
            opened => opened?,
        };
        Ok(PageFile { file, pages: vec![0; WRITE_BYTES_MAX + PAGE].into() })
    }

    /// Size of the file in bytes.
    pub(super) fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Writes all parts contiguously from the page boundary `at`, and pads the last page with
    /// zeros.
    ///
    /// # Errors
    /// The file system's error; the extent of the write is then unknown.
    pub(super) fn write<P: AsRef<[u8]>>(&mut self, mut at: u64, parts: &[P]) -> io::Result<()> {
        let mut filled = 0;
        for part in parts {
            let mut rest = part.as_ref();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(WRITE_BYTES_MAX - filled));
                self.window()[filled..filled + now.len()].copy_from_slice(now);
                (rest, filled) = (later, filled + now.len());
                if filled == WRITE_BYTES_MAX {
                    self.write_window(at, filled)?;
                    (at, filled) = (at + filled as u64, 0);
                }
            }
        }
        let end = filled.next_multiple_of(PAGE);
        self.window()[filled..end].fill(0);
        self.write_window(at, end)
    }

    /// Writes zeros between two page boundaries; no effect if `to` is before `from`.
    ///
    /// # Errors
    /// The file system's error.
    pub(super) fn write_zeros(&mut self, from: u64, to: u64) -> io::Result<()> {
        self.window().fill(0);
        let mut at = from;
        while at < to {
            let bytes = (to - at).min(WRITE_BYTES_MAX as u64);
            self.write_window(at, bytes as usize)?;
            at += bytes;
        }
        Ok(())
    }

    /// Sets the size of the file; new bytes are zero.
    pub(super) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    /// Makes contents and length durable.
    pub(super) fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Makes written data durable.
    pub(super) fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Writes to another file from here on, for tests of disk failures; returns the previous one.
    #[cfg(test)]
    pub(super) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// The page-aligned part of the buffer, as direct I/O requires.
    fn window(&mut self) -> &mut [u8] {
        let start = self.start();
        &mut self.pages[start..start + WRITE_BYTES_MAX]
    }

    fn write_window(&self, at: u64, bytes: usize) -> io::Result<()> {
        let start = self.start();
        let pages = &self.pages[start..start + bytes];
        match self.file.write_all_at(pages, at) {
            // Some file systems accept the option but need larger pages.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let flags = fcntl_getfl(&self.file)?;
                fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
                self.file.write_all_at(pages, at)
            }
            written => written,
        }
    }

    /// Offset of the first page boundary in the buffer.
    fn start(&self) -> usize {
        self.pages.as_ptr().align_offset(PAGE).min(PAGE)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    /// A file with this many nonzero bytes.
    fn filled(directory: &Path, bytes: usize) -> PageFile {
        let path = directory.join("file");
        std::fs::write(&path, vec![0xff; bytes]).unwrap();
        PageFile::open(&mut OpenOptions::new(), &path).unwrap()
    }

    proptest! {
        #[test]
        fn parts_are_contiguous_and_padded_to_a_page(
            lengths in prop::collection::vec(0..WRITE_BYTES_MAX + 300, 0..5), page in 0u64..3,
        ) {
            let parts: Vec<Vec<u8>> =
                lengths.iter().zip(1..).map(|(length, byte)| vec![byte; *length]).collect();
            let (written, pages) = (parts.concat(), 30);
            let mut expected = vec![0xff; pages * PAGE];
            let (from, to) = (page as usize * PAGE, page as usize * PAGE + written.len());
            expected[from..to].copy_from_slice(&written);
            expected[to..to.next_multiple_of(PAGE)].fill(0);
            // On a disk file system, and on one in memory without direct I/O.
            for directory in [tempfile::tempdir(), tempfile::tempdir_in("/dev/shm")] {
                let directory = directory.unwrap();
                let mut file = filled(directory.path(), pages * PAGE);
                file.write(page * PAGE as u64, &parts).unwrap();
                file.sync_data().unwrap();
                prop_assert!(std::fs::read(directory.path().join("file")).unwrap() == expected);
            }
        }
    }

    #[test]
    fn unaligned_writes_fall_back_to_buffered_io() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = filled(directory.path(), PAGE);
        file.window().fill(7);
        file.write_window(1, 10).unwrap();
        let bytes = std::fs::read(directory.path().join("file")).unwrap();
        assert_eq!((bytes[0], &bytes[1..11], bytes[11]), (0xff, &[7; 10][..], 0xff));
    }

    #[test]
    fn zeros_end_at_the_given_page() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = filled(directory.path(), 12 * PAGE);
        file.write_zeros(PAGE as u64, 11 * PAGE as u64).unwrap();
        file.write_zeros(5 * PAGE as u64, 2 * PAGE as u64).unwrap();
        let bytes = std::fs::read(directory.path().join("file")).unwrap();
        let ends = [&bytes[..PAGE], &bytes[11 * PAGE..]].concat();
        assert!(
            bytes[PAGE..11 * PAGE].iter().all(|byte| *byte == 0) && ends.iter().all(|byte| *byte == 0xff)
        );
        assert_eq!(bytes.len(), 12 * PAGE);
    }
}
