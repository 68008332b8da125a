//! The Raft logs of all groups as one append-only log: opening, committing a batch, freeing space.
//!
//! A batch is one frame: one write and one sync for all groups. Large commands are stored out of
//! line, durable before the records that name them. Files are used in order. Each starts with the
//! full state except entries, so that the oldest file can go once none of its entries is needed.
//! docs/adr/0020 explains why no acknowledged data is lost silently. Not here: a router with a
//! refused log (`recover.rs`), the timing of batches (`disk_thread.rs`) and the openraft side
//! (`log_store.rs`).

mod error;
mod files;
mod frame;
mod page_file;
mod recovery;
mod state;

use std::collections::VecDeque;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

pub use error::LogError;
pub(crate) use state::Change;

use super::disk_room::is_full;
use super::{ClusterIdentity, Entry, LogId, Vote};
use error::corrupt;
use files::{EMPTY_FRAME_BYTES, FILE_BYTES, LogFile, LogFolder, sync_folder};
use frame::{FileHead, FrameHead, PAGE, copies_bytes, encode};
use recovery::{ReplayedLog, replay};
use state::{GroupState, LogState, Record, Records};

/// Name of the folder with the log inside the data directory.
pub(crate) const LOG_FOLDER: &str = "raft-log";

/// Name of a log that is being created; renamed once complete.
const NEW_FOLDER: &str = "raft-log.new";

/// Log file of earlier releases, and its format.
const OLD_FILE: (&str, u64) = ("raft.redb", 3);

/// Command bytes of a batch that are stored in both copies, which saves a sync; larger batches
/// store large commands once.
const DUPLICATED_BYTES_MAX: u64 = 64 << 10;

/// Largest command stored in both copies in such a batch.
const SMALL_COMMAND_BYTES_MAX: usize = 512;

/// Number of files that are kept regardless of their needed entries.
const FILES_MIN: u64 = 3;

/// Owner of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogOwner {
    pub(crate) router: u64,
    pub(crate) cluster: ClusterIdentity,
}

/// Recovered log of one group.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RecoveredLog {
    pub(crate) vote: Option<Vote>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
    pub(crate) entries: VecDeque<Entry>,
}

impl RecoveredLog {
    fn from_state(state: &GroupState) -> RecoveredLog {
        let entries = state.entries.values().map(|(_, entry)| entry.clone()).collect();
        let marks = state.marks;
        // The end of a batch may be lost with the next frame; the leader then supplies the
        // committed index.
        let committed = marks.committed.filter(|committed| Some(committed.index()) <= marks.last);
        RecoveredLog { vote: marks.vote, purged: marks.purged, committed, entries }
    }
}

/// The open log. One thread owns it.
#[derive(Debug)]
pub(crate) struct DiskLog {
    folder: LogFolder,
    /// Numbers of all files, ascending; the last is the one being written.
    files: VecDeque<u64>,
    current: LogFile,
    /// Offset after its first frame; `None` until that is written. A full disk may come between.
    first_frame_end: Option<u64>,
    state: LogState,
    next_frame: u64,
    /// Whether the last frame had no out-of-line commands.
    was_small: bool,
    /// Error after which commits are refused.
    failed: Option<io::Error>,
    /// Range of the last frame, for tests.
    #[cfg(test)]
    pub(crate) last_frame: std::ops::Range<u64>,
    /// Lock on the data directory while the log is open.
    _lock: File,
}

impl DiskLog {
    /// Opens or creates the log, checks every frame and returns the recovered log of each group.
    ///
    /// # Errors
    /// [`LogError`]: it belongs to another router, or acknowledged data may be missing.
    pub(crate) fn open(directory: &Path, owner: &LogOwner) -> Result<(DiskLog, Vec<RecoveredLog>), LogError> {
        let path = directory.join(LOG_FOLDER);
        let failed = |source| LogError::Io { path: path.clone(), source };
        let lock = File::open(directory).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(LogError::InUse { path }),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let (old, found) = (directory.join(OLD_FILE.0), OLD_FILE.1);
        if old.exists() {
            return Err(LogError::Format { path: old, found });
        }
        if !path.exists() {
            create(directory, &path, owner).map_err(failed)?;
        }
        // Names may exist only in memory, and later writes must not be more durable than they are.
        sync_folder(directory).and_then(|()| sync_folder(&path)).map_err(failed)?;
        let mut folder = LogFolder::new(path.clone());
        let replayed = replay(&mut folder, &path, owner)?;
        let recovered = replayed.state.groups.iter().map(RecoveredLog::from_state).collect();
        DiskLog::begin(folder, replayed, lock).map(|disk| (disk, recovered)).map_err(failed)
    }

    /// Writes until the disk is full, for tests; `usize::MAX` for never.
    #[cfg(test)]
    pub(crate) fn writes_left(&self) -> std::sync::Arc<std::sync::atomic::AtomicUsize> {
        std::sync::Arc::clone(&self.folder.writes_left)
    }

    /// Runs [`DiskLog::prepare`] on another file, for tests of disk failures.
    #[cfg(test)]
    pub(crate) fn prepare_on(&mut self, file: File) {
        let own = self.current.replace_file(file);
        self.prepare();
        self.current.replace_file(own);
    }

    /// Continues in a new file, so that the end of the recovered files is known.
    fn begin(folder: LogFolder, replayed: ReplayedLog, lock: File) -> io::Result<DiskLog> {
        let ReplayedLog { state, files, tail, tail_is_closed, empty, next_frame } = replayed;
        let (files, begun) = (files.into(), tail.end);
        let mut disk = DiskLog {
            folder,
            files,
            current: tail,
            first_frame_end: Some(begun),
            state,
            next_frame,
            was_small: true,
            failed: None,
            #[cfg(test)]
            last_frame: 0..0,
            _lock: lock,
        };
        match empty {
            Some(next) if tail_is_closed => disk.current = next,
            Some(next) => disk.close_for(next)?,
            None if disk.current.is_empty() => {}
            None => disk.next_file()?,
        }
        disk.begin_file()?;
        // Otherwise repeated restarts would fill the disk.
        while disk.free_oldest()? {}
        Ok(disk)
    }

    /// Makes all changes of all groups durable, in order.
    ///
    /// # Errors
    /// The file system's error. The batch then does not count. If the disk was only full, the same
    /// batch may be committed again; after any other error, no batch may.
    pub(crate) fn commit<'a>(&mut self, changes: impl Iterator<Item = (u16, &'a Change)>) -> io::Result<()> {
        if let Some(error) = &self.failed {
            return Err(io::Error::new(error.kind(), error.to_string()));
        }
        let changes: Vec<(u16, &Change)> = changes.collect();
        let mut records = Records::default();
        push_all(&mut records, &changes)?;
        let bytes = frame_bytes(&records);
        let has_batches = self.first_frame_end.is_some_and(|end| self.current.end > end);
        if self.current.end + bytes + EMPTY_FRAME_BYTES > FILE_BYTES && has_batches {
            self.next_file()?;
        }
        if self.first_frame_end.is_none() {
            self.begin_file()?;
        }
        self.write(&records)?;
        for (group, change) in changes {
            self.state.apply(group, change, self.current.number())?;
        }
        Ok(())
    }

    /// Prepares room for the next batches while the thread is idle. A full disk is reported only
    /// when room is needed. Any other error fails the next batch, since a failed sync is reported
    /// once.
    pub(crate) fn prepare(&mut self) {
        // Zeros below a large frame would cost more than they save.
        let ahead = if self.was_small { self.current.write_ahead() } else { Ok(()) };
        for error in [ahead.err(), self.free_oldest().err()].into_iter().flatten() {
            if is_full(&error) {
                tracing::debug!(%error, "no room was prepared in the raft log");
            } else {
                self.failed.get_or_insert(error);
            }
        }
    }

    /// Writes one frame, after recording a larger file size if necessary.
    fn write(&mut self, records: &Records) -> io::Result<()> {
        let end = self.current.end + frame_bytes(records);
        if !self.current.has_room(end) {
            self.current.grow(end + EMPTY_FRAME_BYTES)?;
            self.write_frame(&Records::default())?;
        }
        self.write_frame(records)
    }

    /// Writes a frame after the last one.
    fn write_frame(&mut self, records: &Records) -> io::Result<()> {
        self.folder.refuse_when_full()?;
        let file = &mut self.current;
        let (start, number) = (file.end, self.next_frame);
        let head = FrameHead {
            number,
            start,
            file_bytes: file.bytes(),
            out_of_line_bytes: records.out_of_line_bytes(),
        };
        let copies = encode(file.head.seed(), head, &records.encoded)?;
        self.was_small = records.out_of_line.is_empty();
        if !self.was_small {
            file.write_out_of_line(start + copies.len() as u64, &records.out_of_line)?;
        }
        file.write_copies(&copies, start + frame_bytes(records))?;
        self.next_frame += 1;
        #[cfg(test)]
        self.last_frame.clone_from(&(start..self.current.end));
        Ok(())
    }

    /// Creates the next file and records its existence in this one.
    fn next_file(&mut self) -> io::Result<()> {
        let file = self.current.number() + 1;
        let head = FileHead { file, first_frame: self.next_frame + 1, ..self.current.head.clone() };
        let next = self.folder.create(head)?;
        self.close_for(next)?;
        self.files.push_back(file);
        Ok(())
    }

    fn close_for(&mut self, next: LogFile) -> io::Result<()> {
        let mut closed = Records::default();
        closed.push(&Record::Closed)?;
        self.write_frame(&closed)?;
        self.current = next;
        self.first_frame_end = None;
        Ok(())
    }

    /// Writes the first frame of a file: all marks, and entries of the oldest files if too many
    /// files are kept for their needed entries.
    fn begin_file(&mut self) -> io::Result<()> {
        let kept_max = FILES_MIN + 2 * self.state.live_bytes() / FILE_BYTES;
        let moved_files = (self.files.len() as u64).saturating_sub(kept_max) as usize;
        let moved = self.files.iter().take(moved_files).flat_map(|file| self.state.entries_in(*file));
        let moved: Vec<(u16, Change)> = moved.collect();
        let changes: Vec<(u16, &Change)> = moved.iter().map(|(group, change)| (*group, change)).collect();
        let mut records = Records::default();
        self.state.marks().iter().try_for_each(|record| records.push(record))?;
        push_all(&mut records, &changes)?;
        self.write(&records)?;
        self.first_frame_end = Some(self.current.end);
        for (group, change) in changes {
            self.state.apply(group, change, self.current.number())?;
        }
        Ok(())
    }

    /// Frees the oldest file if none of its entries is needed; returns whether it did.
    fn free_oldest(&mut self) -> io::Result<bool> {
        let oldest = self.files.front().copied().filter(|oldest| *oldest != self.current.number());
        match oldest {
            Some(oldest) if self.state.live_in(oldest).entries == 0 => {
                self.folder.free(oldest)?;
                self.files.pop_front();
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// Command size above which a command is stored out of line.
fn out_of_line_min(changes: &[(u16, &Change)]) -> usize {
    let bytes = changes.iter().map(|(_, change)| change.command_bytes());
    if bytes.sum::<u64>() <= DUPLICATED_BYTES_MAX { usize::MAX } else { SMALL_COMMAND_BYTES_MAX }
}

fn push_all(records: &mut Records, changes: &[(u16, &Change)]) -> io::Result<()> {
    let out_of_line_min = out_of_line_min(changes);
    changes.iter().try_for_each(|(group, change)| records.change(*group, change, out_of_line_min))
}

/// Bytes of a frame with these records, in whole pages.
fn frame_bytes(records: &Records) -> u64 {
    copies_bytes(records.encoded.len()) as u64 + records.out_of_line_bytes().next_multiple_of(PAGE as u64)
}

/// Creates an empty log under a temporary name, so that a killed process leaves no partial log.
fn create(directory: &Path, path: &Path, owner: &LogOwner) -> io::Result<()> {
    let new = directory.join(NEW_FOLDER);
    if new.exists() {
        fs::remove_dir_all(&new)?;
    }
    fs::create_dir(&new)?;
    LogFolder::new(new.clone()).create(FileHead::new(owner))?;
    fs::rename(&new, path)?;
    sync_folder(directory)
}
