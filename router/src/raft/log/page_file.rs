//! A file that is written in whole pages, past the system's own copy of it where the file system allows that.
//!
//! What a log writes is not read again before the next start, so a copy in the system's memory is of no use to anybody,
//! and making it was a seventh of what announced blocks cost a router. Not here: what is written where (`files.rs`),
//! and reading (`recovery.rs`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::frame::PAGE;

/// Bytes of one write, at most: more would spare little, and stay in no cache near.
const WRITE_BYTES_MAX: usize = if cfg!(test) { 4 * PAGE } else { 256 << 10 };

/// The file, and the pages that are being filled.
#[derive(Debug)]
pub(super) struct PageFile {
    file: File,
    /// Long enough for [`WRITE_BYTES_MAX`] wherever in it a page begins.
    pages: Box<[u8]>,
}

impl PageFile {
    /// Opens a file for reading and writing, with these options besides. Where writes cannot go past the system's memory (some
    /// file systems keep everything there), they go through it.
    ///
    /// # Errors
    /// What the file system said.
    pub(super) fn open(options: &mut OpenOptions, path: &Path) -> io::Result<PageFile> {
        let options = options.read(true).write(true);
        let file = match options.clone().custom_flags(OFlags::DIRECT.bits().cast_signed()).open(path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => options.open(path)?,
            opened => opened?,
        };
        Ok(PageFile { file, pages: vec![0; WRITE_BYTES_MAX + PAGE].into() })
    }

    /// Bytes that it has.
    pub(super) fn bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Writes all parts one behind the other from `at` on, where a page begins, and zeros up to the end of the last page.
    ///
    /// # Errors
    /// What the file system said. What was written then is not known.
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

    /// Writes zeros from a page on to the beginning of another; nothing when that one lies before.
    ///
    /// # Errors
    /// What the file system said.
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

    /// Makes it so many bytes long, with zeros where there was nothing.
    pub(super) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    /// Makes contents and length durable.
    pub(super) fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Makes what was written durable.
    pub(super) fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Writes to another file from here on, for tests of what a disk may do; gives the one before.
    #[cfg(test)]
    pub(super) fn put_on(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// Where the pages to be written are filled: from the beginning of a page of memory on, as writes past the system's memory
    /// must be.
    fn window(&mut self) -> &mut [u8] {
        let start = self.start();
        &mut self.pages[start..start + WRITE_BYTES_MAX]
    }

    fn write_window(&self, at: u64, bytes: usize) -> io::Result<()> {
        let start = self.start();
        let pages = &self.pages[start..start + bytes];
        match self.file.write_all_at(pages, at) {
            // Some take the option, and want larger pages than these.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                let flags = fcntl_getfl(&self.file)?;
                fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
                self.file.write_all_at(pages, at)
            }
            written => written,
        }
    }

    /// Where the first page in the memory begins.
    fn start(&self) -> usize {
        self.pages.as_ptr().align_offset(PAGE).min(PAGE)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    /// A file with so many bytes that are no zeros.
    fn filled(directory: &Path, bytes: usize) -> PageFile {
        let path = directory.join("file");
        std::fs::write(&path, vec![0xff; bytes]).unwrap();
        PageFile::open(&mut OpenOptions::new(), &path).unwrap()
    }

    proptest! {
        #[test]
        fn parts_lie_one_behind_the_other_and_zeros_up_to_the_next_page(
            lengths in prop::collection::vec(0..WRITE_BYTES_MAX + 300, 0..5), page in 0u64..3,
        ) {
            let parts: Vec<Vec<u8>> =
                lengths.iter().zip(1..).map(|(length, byte)| vec![byte; *length]).collect();
            let (written, pages) = (parts.concat(), 30);
            let mut expected = vec![0xff; pages * PAGE];
            let (from, to) = (page as usize * PAGE, page as usize * PAGE + written.len());
            expected[from..to].copy_from_slice(&written);
            expected[to..to.next_multiple_of(PAGE)].fill(0);
            // On a file system on a disk, and on one in memory, which has no way past memory.
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
    fn what_cannot_go_past_memory_goes_through_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = filled(directory.path(), PAGE);
        file.window().fill(7);
        file.write_window(1, 10).unwrap();
        let bytes = std::fs::read(directory.path().join("file")).unwrap();
        assert_eq!((bytes[0], &bytes[1..11], bytes[11]), (0xff, &[7; 10][..], 0xff));
    }

    #[test]
    fn zeros_go_up_to_the_page_named() {
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
