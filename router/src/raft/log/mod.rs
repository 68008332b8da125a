//! The Raft logs of all groups as one append-only log: how it is opened, how one batch of changes becomes durable, how
//! room is made.
//!
//! A batch is one frame: one write and one sync, however many groups it concerns. A batch with large commands has them
//! beside its records, durable before the records that name them. Files are used one after the other; each begins with
//! all that is known but entries, so that the oldest one goes once no entry in it is wanted. Why nothing that was
//! acknowledged is lost silently is written in docs/adr/0020. Not here: what becomes of a router whose log was refused
//! (`recover.rs`), when a batch is made (`disk_thread.rs`) and what openraft sees (`log_store.rs`).

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

use super::{Cluster, Entry, LogId, Vote};
use error::corrupt;
use files::{FILE_BYTES, Folder, LogFile, MARK_BYTES, is_full, sync_folder};
use frame::{FileHead, FrameHead, PAGE, copies_bytes, encode};
use recovery::{Replayed, replay};
use state::{GroupState, LogState, Record, Records};

/// Name of the folder with the log inside the data directory.
pub(crate) const LOG_FOLDER: &str = "raft-log";

/// A log being made; it takes its name once it is whole.
const NEW_FOLDER: &str = "raft-log.new";

/// The log of earlier releases, and its format.
const OLD_FILE: (&str, u64) = ("raft.redb", 3);

/// Commands of one batch that are written twice like all else, which saves a sync; above it they are written once.
const TWICE_BYTES_MAX: u64 = 64 << 10;

/// Largest command that is written twice in a batch above that.
const SMALL_COMMAND_BYTES_MAX: usize = 512;

/// Files that are kept however little of them is wanted.
const FILES_MIN: u64 = 3;

/// Whose log it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) router: u64,
    pub(crate) cluster: Cluster,
}

/// Everything the log held of one group when it was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Recovered {
    pub(crate) vote: Option<Vote>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
    pub(crate) entries: VecDeque<Entry>,
}

impl Recovered {
    fn of(state: &GroupState) -> Recovered {
        let entries = state.entries.values().map(|(_, entry)| entry.clone()).collect();
        let marks = state.marks;
        // Of a full batch, entries may be in the next frame, and that one lost; what was committed comes from the
        // leader then.
        let committed = marks.committed.filter(|committed| Some(committed.index()) <= marks.last);
        Recovered { vote: marks.vote, purged: marks.purged, committed, entries }
    }
}

/// The open log. One thread owns it.
#[derive(Debug)]
pub(crate) struct Disk {
    folder: Folder,
    /// Numbers of all files, the one that is written last.
    files: VecDeque<u64>,
    current: LogFile,
    /// Where the frames behind its first one begin.
    begun: u64,
    state: LogState,
    next_frame: u64,
    /// Whether the last frame had no commands beside its records.
    was_small: bool,
    /// Why nothing is committed any more.
    failed: Option<io::Error>,
    /// Where the last frame is, for tests.
    #[cfg(test)]
    pub(crate) last_frame: std::ops::Range<u64>,
    /// Held as long as the log is open, by the data directory.
    _lock: File,
}

impl Disk {
    /// Opens or makes the log, checks every frame and returns what it holds of each group.
    ///
    /// # Errors
    /// [`LogError`]: it is not ours, or something that was acknowledged may be missing.
    pub(crate) fn open(directory: &Path, owner: &Owner) -> Result<(Disk, Vec<Recovered>), LogError> {
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
            make(directory, &path, owner).map_err(failed)?;
        }
        // Names, too, may be in the system's memory only, and what is built on them must not be more durable.
        sync_folder(directory).and_then(|()| sync_folder(&path)).map_err(failed)?;
        let mut folder = Folder::new(path.clone());
        let replayed = replay(&mut folder, &path, owner)?;
        let recovered = replayed.state.groups.iter().map(Recovered::of).collect();
        Disk::begin(folder, replayed, lock).map(|disk| (disk, recovered)).map_err(failed)
    }

    /// What makes the disk full, for tests.
    #[cfg(test)]
    pub(crate) fn is_full(&self) -> std::sync::Arc<std::sync::atomic::AtomicBool> {
        std::sync::Arc::clone(&self.folder.is_full)
    }

    /// Makes room ahead on another file than the log's, for tests of what a disk may do.
    #[cfg(test)]
    pub(crate) fn prepare_on(&mut self, file: File) {
        let own = self.current.put_on(file);
        self.prepare();
        self.current.put_on(own);
    }

    /// Goes on in a file of its own, so that what was read is followed by something and its end is known.
    fn begin(folder: Folder, replayed: Replayed, lock: File) -> io::Result<Disk> {
        let Replayed { state, files, tail, tail_is_closed, empty, next_frame } = replayed;
        let (files, begun) = (files.into(), tail.end);
        let mut disk = Disk {
            folder,
            files,
            current: tail,
            begun,
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
        // Or a router that is started again and again would fill the disk.
        while disk.free_oldest()? {}
        Ok(disk)
    }

    /// Makes all changes of all groups durable, in order.
    ///
    /// # Errors
    /// What the file system said (no space, I/O error). Nothing of the batch counts then, and nothing may be
    /// committed any more.
    pub(crate) fn commit<'a>(&mut self, changes: impl Iterator<Item = (u16, &'a Change)>) -> io::Result<()> {
        if let Some(error) = &self.failed {
            return Err(io::Error::new(error.kind(), error.to_string()));
        }
        let changes: Vec<(u16, &Change)> = changes.collect();
        let mut records = Records::default();
        push_all(&mut records, &changes)?;
        let bytes = frame_bytes(&records);
        if self.current.end + bytes + MARK_BYTES > FILE_BYTES && self.current.end > self.begun {
            self.next_file()?;
            self.begin_file()?;
        }
        self.write(&records)?;
        for (group, change) in changes {
            self.state.apply(group, change, self.current.number())?;
        }
        Ok(())
    }

    /// Makes room for the next batches while nobody waits. Where there is none, that is told when it is needed. Any
    /// other failure of the disk fails the next batch: a sync that failed is reported once.
    pub(crate) fn prepare(&mut self) {
        // Zeros below a large frame would cost more than they save.
        let ahead = if self.was_small { self.current.write_ahead() } else { Ok(()) };
        for error in [ahead.err(), self.free_oldest().err()].into_iter().flatten() {
            if is_full(&error) {
                tracing::debug!(%error, "no room was made ahead in the raft log");
            } else {
                self.failed.get_or_insert(error);
            }
        }
    }

    /// Writes one frame, in a file that is long enough for it and says so.
    fn write(&mut self, records: &Records) -> io::Result<()> {
        let end = self.current.end + frame_bytes(records);
        if !self.current.has_room(end) {
            self.current.grow(end + MARK_BYTES)?;
            self.put(&Records::default())?;
        }
        self.put(records)
    }

    /// Puts a frame where the last one ends.
    fn put(&mut self, records: &Records) -> io::Result<()> {
        self.folder.refuse_when_full()?;
        let file = &mut self.current;
        let (start, number) = (file.end, self.next_frame);
        let head =
            FrameHead { number, start, file_bytes: file.bytes(), beside_bytes: records.beside_bytes() };
        let copies = encode(file.head.seed(), head, &records.encoded)?;
        self.was_small = records.beside.is_empty();
        if !self.was_small {
            file.write_beside(start + copies.len() as u64, &records.beside)?;
        }
        file.write_copies(&copies, start + frame_bytes(records))?;
        self.next_frame += 1;
        #[cfg(test)]
        self.last_frame.clone_from(&(start..self.current.end));
        Ok(())
    }

    /// Makes the next file, and says in this one that it is there.
    fn next_file(&mut self) -> io::Result<()> {
        let file = self.current.number() + 1;
        let head = FileHead { file, first_frame: self.next_frame + 1, ..self.current.head.clone() };
        let next = self.folder.create(head)?;
        self.files.push_back(file);
        self.close_for(next)
    }

    fn close_for(&mut self, next: LogFile) -> io::Result<()> {
        let mut closed = Records::default();
        closed.push(&Record::Closed)?;
        self.put(&closed)?;
        self.current = next;
        Ok(())
    }

    /// Writes the first frame of a file: all marks, and entries of the oldest files when too many files are kept for
    /// what is wanted of them.
    fn begin_file(&mut self) -> io::Result<()> {
        let kept_max = FILES_MIN + 2 * self.state.wanted_bytes() / FILE_BYTES;
        let moved_files = (self.files.len() as u64).saturating_sub(kept_max) as usize;
        let moved = self.files.iter().take(moved_files).flat_map(|file| self.state.entries_in(*file));
        let moved: Vec<(u16, Change)> = moved.collect();
        let changes: Vec<(u16, &Change)> = moved.iter().map(|(group, change)| (*group, change)).collect();
        let mut records = Records::default();
        self.state.marks().iter().try_for_each(|record| records.push(record))?;
        push_all(&mut records, &changes)?;
        self.write(&records)?;
        self.begun = self.current.end;
        for (group, change) in changes {
            self.state.apply(group, change, self.current.number())?;
        }
        Ok(())
    }

    /// Gives up the oldest file if no entry in it is wanted; one at a time, in order. Answers whether it did.
    fn free_oldest(&mut self) -> io::Result<bool> {
        let oldest = self.files.front().copied().filter(|oldest| *oldest != self.current.number());
        match oldest {
            Some(oldest) if self.state.wanted(oldest).entries == 0 => {
                self.folder.free(oldest)?;
                self.files.pop_front();
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// Above how many bytes a command lies beside its record.
fn beside_min(changes: &[(u16, &Change)]) -> usize {
    let bytes = changes.iter().map(|(_, change)| change.command_bytes());
    if bytes.sum::<u64>() <= TWICE_BYTES_MAX { usize::MAX } else { SMALL_COMMAND_BYTES_MAX }
}

fn push_all(records: &mut Records, changes: &[(u16, &Change)]) -> io::Result<()> {
    let beside_min = beside_min(changes);
    changes.iter().try_for_each(|(group, change)| records.change(*group, change, beside_min))
}

/// Bytes of a frame with these records, in whole pages.
fn frame_bytes(records: &Records) -> u64 {
    copies_bytes(records.encoded.len()) as u64 + records.beside_bytes().next_multiple_of(PAGE as u64)
}

/// Makes an empty log under another name first: a process killed meanwhile leaves no log, not half of one.
fn make(directory: &Path, path: &Path, owner: &Owner) -> io::Result<()> {
    let new = directory.join(NEW_FOLDER);
    if new.exists() {
        fs::remove_dir_all(&new)?;
    }
    fs::create_dir(&new)?;
    Folder::new(new.clone()).create(FileHead::new(owner))?;
    fs::rename(&new, path)?;
    sync_folder(directory)
}
