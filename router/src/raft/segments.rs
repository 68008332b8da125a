//! Large commands of the log, one behind the other in files beside it.
//!
//! The log file names where a command lies and its checksum, and says so only once the command is durable here. So
//! these files need no structure: bytes that the log does not name are nobody's, whether they were never finished
//! or are no longer wanted. A file is written from its start again once nothing in it is wanted, which spares the
//! system new blocks and new memory. Not here: which commands are large, and when they are wanted (`disk.rs`).

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// What files are called: this and a number.
const FILE_PREFIX: &str = "raft-commands.";

/// Bytes after which the next file is begun: small enough that most are free soon after a purge, large enough
/// that syncing rarely concerns two.
const SEGMENT_BYTES_MAX: u64 = if cfg!(test) { 64 << 10 } else { 32 << 20 };

/// Files kept for later though nothing in them is wanted.
const FREE_MAX: usize = 4;

/// Where a command lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Extent {
    segment: u32,
    offset: u64,
    bytes: u32,
    crc32c: u32,
}

#[derive(Debug)]
struct Segment {
    file: File,
    /// Commands in it that are wanted.
    wanted: u64,
    /// Where the next command goes.
    end: u64,
    /// Written since the last sync.
    unsynced: bool,
}

/// All files of one log.
#[derive(Debug)]
pub(super) struct Segments {
    directory: PathBuf,
    segments: BTreeMap<u32, Segment>,
    /// The one that is written.
    current: Option<u32>,
}

impl Segments {
    /// Opens the files in a directory. Nothing in them is wanted until [`Self::read`] says so.
    ///
    /// # Errors
    /// What the file system said.
    pub(super) fn open(directory: &Path) -> io::Result<Segments> {
        let mut segments = BTreeMap::new();
        for file in std::fs::read_dir(directory)? {
            let file = file?;
            let name = file.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix(FILE_PREFIX));
            if let Some(number) = number.and_then(|number| number.parse().ok()) {
                let opened = OpenOptions::new().read(true).write(true).open(file.path())?;
                segments.insert(number, Segment { file: opened, wanted: 0, end: 0, unsynced: false });
            }
        }
        Ok(Segments { directory: directory.to_owned(), segments, current: None })
    }

    /// Writes a command. It is durable after the next [`Self::sync`].
    ///
    /// # Errors
    /// What the file system said.
    pub(super) fn write(&mut self, command: &[u8]) -> io::Result<Extent> {
        let bytes = u32::try_from(command.len()).map_err(io::Error::other)?;
        let number = self.with_room()?;
        let segment = self.segments.get_mut(&number).ok_or_else(|| io::Error::other("a segment is gone"))?;
        let offset = segment.end;
        segment.file.write_all_at(command, offset)?;
        segment.end += u64::from(bytes);
        segment.wanted += 1;
        segment.unsynced = true;
        Ok(Extent { segment: number, offset, bytes, crc32c: crc32c::crc32c(command) })
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// What the file system said.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        for segment in self.segments.values_mut().filter(|segment| segment.unsynced) {
            segment.file.sync_data()?;
            segment.unsynced = false;
        }
        Ok(())
    }

    /// A command that the log names, checked; from now on it is wanted.
    ///
    /// # Errors
    /// What is wrong with it, to be said after its name.
    pub(super) fn read(&mut self, extent: Extent) -> Result<Bytes, String> {
        let Extent { segment: number, offset, bytes, crc32c: stored } = extent;
        let file = format!("{FILE_PREFIX}{number}");
        let segment =
            self.segments.get_mut(&number).ok_or_else(|| format!("lies in {file}, which is gone"))?;
        let length = segment.file.metadata().map_err(|error| format!("lies in {file}: {error}"))?.len();
        if offset.checked_add(bytes.into()).is_none_or(|end| end > length) {
            return Err(format!("lies in {file}, which ends at byte {length}, before it does"));
        }
        let mut command = vec![0; bytes as usize];
        let read = segment.file.read_exact_at(&mut command, offset);
        read.map_err(|error| format!("lies in {file}: {error}"))?;
        let computed = crc32c::crc32c(&command);
        if stored != computed {
            return Err(format!("has checksum {stored:08x}, its bytes in {file} give {computed:08x}"));
        }
        segment.wanted += 1;
        segment.end = segment.end.max(offset + u64::from(bytes));
        Ok(Bytes::from(command))
    }

    /// Commands that no log names any more, for good.
    ///
    /// # Errors
    /// What the file system said when a file was removed.
    pub(super) fn release(&mut self, extents: impl IntoIterator<Item = Extent>) -> io::Result<()> {
        for extent in extents {
            if let Some(segment) = self.segments.get_mut(&extent.segment) {
                segment.wanted = segment.wanted.saturating_sub(1);
            }
        }
        let free = self.free().collect::<Vec<u32>>();
        for number in free.into_iter().skip(FREE_MAX) {
            self.segments.remove(&number);
            std::fs::remove_file(self.path(number))?;
        }
        Ok(())
    }

    fn free(&self) -> impl Iterator<Item = u32> {
        let free =
            |(number, segment): &(&u32, &Segment)| segment.wanted == 0 && Some(**number) != self.current;
        self.segments.iter().filter(free).map(|(number, _)| *number)
    }

    fn path(&self, number: u32) -> PathBuf {
        self.directory.join(format!("{FILE_PREFIX}{number}"))
    }

    /// The file that takes the next command.
    fn with_room(&mut self) -> io::Result<u32> {
        let room = |segment: &Segment| segment.end < SEGMENT_BYTES_MAX;
        if let Some(current) = self.current.filter(|current| self.segments.get(current).is_some_and(room)) {
            return Ok(current);
        }
        let next = self.free().next();
        let number = match next {
            Some(number) => number,
            None => self.create()?,
        };
        if let Some(segment) = self.segments.get_mut(&number) {
            segment.end = 0;
        }
        self.current = Some(number);
        Ok(number)
    }

    fn create(&mut self) -> io::Result<u32> {
        let number = self.segments.last_key_value().map_or(0, |(last, _)| last + 1);
        let path = self.path(number);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        // A name that is lost with the power takes what is synced in the file with it.
        File::open(&self.directory)?.sync_all()?;
        self.segments.insert(number, Segment { file, wanted: 0, end: 0, unsynced: false });
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A command of which four fill a file.
    fn command(number: u8) -> Vec<u8> {
        vec![number; (SEGMENT_BYTES_MAX / 4) as usize]
    }

    fn files(directory: &Path) -> usize {
        std::fs::read_dir(directory).unwrap().count()
    }

    #[test]
    fn commands_come_back_after_a_restart() {
        let directory = tempfile::TempDir::new().unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        let extents: Vec<Extent> = (0..6).map(|n| segments.write(&command(n)).unwrap()).collect();
        segments.sync().unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        for (number, extent) in (0..).zip(&extents) {
            assert_eq!(segments.read(*extent).unwrap(), command(number));
        }
        // What is wanted is not written over, and a file is not written on after a restart.
        segments.write(&command(9)).unwrap();
        assert_eq!(segments.read(extents[5]).unwrap(), command(5));
        assert_eq!(files(directory.path()), 3);
    }

    #[test]
    fn a_file_is_used_again_once_nothing_in_it_is_wanted() {
        let directory = tempfile::TempDir::new().unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        let mut wanted = std::collections::VecDeque::new();
        for number in 0..200 {
            wanted.push_back((number, segments.write(&command(number)).unwrap()));
            if wanted.len() > 8 {
                segments.release(wanted.pop_front().map(|(_, extent)| extent)).unwrap();
            }
            assert!(files(directory.path()) <= 8 / 4 + 2, "after {number} commands");
        }
        for (number, extent) in wanted.clone() {
            assert_eq!(segments.read(extent).unwrap(), command(number));
        }
    }

    #[test]
    fn files_that_nobody_needs_are_removed() {
        let directory = tempfile::TempDir::new().unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        let extents: Vec<Extent> = (0..40).map(|n| segments.write(&command(n)).unwrap()).collect();
        assert_eq!(files(directory.path()), 10);
        segments.release(extents).unwrap();
        assert_eq!(files(directory.path()), FREE_MAX + 1);
    }

    #[test]
    fn damage_is_named() {
        let directory = tempfile::TempDir::new().unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        let extent = segments.write(b"a command").unwrap();
        let path = directory.path().join("raft-commands.0");
        std::fs::write(&path, b"a commanD").unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        assert!(segments.read(extent).unwrap_err().starts_with("has checksum"));
        std::fs::write(&path, b"a comman").unwrap();
        assert!(segments.read(extent).unwrap_err().contains("ends at byte 8"));
        let far = Extent { offset: u64::MAX, ..extent };
        assert!(segments.read(far).unwrap_err().contains("ends at byte 8"));
        std::fs::remove_file(&path).unwrap();
        let mut segments = Segments::open(directory.path()).unwrap();
        assert!(segments.read(extent).unwrap_err().contains("which is gone"));
    }
}
