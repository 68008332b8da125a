//! Reads the log after a start: every acknowledged frame is present, or the log is refused.
//!
//! Frames are numbered without gaps over all files. The log ends at the first frame without a valid
//! copy, unless a later frame or file proves that it continues. An acknowledged frame has two valid
//! copies, so one damaged place does not end the log early (docs/adr/0020). Not here: the meaning
//! of records (`state.rs`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::files::{LogFile, LogFolder};
use super::frame::{FRAMES_START, FileHead, Frame, HeadError, PAGE, next_copy};
use super::state::{Change, LogState, Record, decode};
use super::{LogError, LogOwner, corrupt};
use crate::raft::{Entry, LogId, Payload, Proposal};

/// The recovered log.
pub(super) struct ReplayedLog {
    pub(super) state: LogState,
    /// Numbers of the files, ascending.
    pub(super) files: Vec<u64>,
    /// The file with the last frames.
    pub(super) tail: LogFile,
    /// Whether its last frame records that the next file exists.
    pub(super) tail_is_closed: bool,
    /// A later file without a frame yet.
    pub(super) empty: Option<LogFile>,
    /// Number of the next frame.
    pub(super) next_frame: u64,
}

/// One file that was read.
struct ReadFile {
    head: FileHead,
    path: PathBuf,
    end: u64,
    named: u64,
    is_closed: bool,
}

impl ReadFile {
    fn is_empty(&self) -> bool {
        self.end == FRAMES_START
    }

    fn reopen(self) -> Result<LogFile, LogError> {
        let ReadFile { head, path, end, named, .. } = self;
        LogFile::reopen(&path, head, end, named).map_err(|source| LogError::Io { path, source })
    }
}

/// Reads all files of a folder.
///
/// # Errors
/// [`LogError`] if they belong to another router, have another format, or are damaged.
pub(super) fn replay(folder: &mut LogFolder, path: &Path, owner: &LogOwner) -> Result<ReplayedLog, LogError> {
    let numbers = folder.numbers().map_err(|source| LogError::Io { path: path.to_owned(), source })?;
    let mut replay = ReplayState {
        state: LogState::new(owner.cluster.groups()),
        salt: None,
        next_frame: 0,
        marked: BTreeSet::new(),
    };
    let mut read: Vec<ReadFile> = Vec::new();
    for number in &numbers {
        let file = replay.file(folder.path_of(*number), *number, owner, read.last())?;
        read.push(file);
    }
    let Some(last) = read.pop() else { return Err(corrupt(path, "it holds no file")) };
    if last.is_closed {
        let gone = folder.path_of(last.head.file + 1);
        return Err(corrupt(&gone, "it is missing, but the previous file records its existence"));
    }
    let is_new = numbers.first().is_none_or(|first| *first == FileHead::new(owner).file);
    for (group, state) in (0..).zip(&replay.state.groups) {
        if !is_new && !replay.marked.contains(&group) {
            return Err(corrupt(path, format!("no record has the marks of group {group}")));
        }
        state.check(group).map_err(|what| corrupt(path, what))?;
    }
    let (tail, empty) = match read.pop() {
        Some(tail) if last.is_empty() => (tail, Some(last.reopen()?)),
        _ => (last, None),
    };
    let ReplayState { state, next_frame, .. } = replay;
    Ok(ReplayedLog {
        state,
        files: numbers,
        tail_is_closed: tail.is_closed,
        tail: tail.reopen()?,
        empty,
        next_frame,
    })
}

struct ReplayState {
    state: LogState,
    salt: Option<u64>,
    /// Number of the next frame; 0 before the first file.
    next_frame: u64,
    /// Groups with marks read so far. The oldest remaining file may lack marks, if its process
    /// stopped before writing them; the next file then has them.
    marked: BTreeSet<u16>,
}

impl ReplayState {
    /// Reads the file that follows `before`.
    fn file(
        &mut self,
        path: PathBuf,
        number: u64,
        owner: &LogOwner,
        before: Option<&ReadFile>,
    ) -> Result<ReadFile, LogError> {
        let bytes = durable_bytes(&path).map_err(|source| LogError::Io { path: path.clone(), source })?;
        let head = FileHead::decode(&bytes).map_err(|error| match error {
            HeadError::Damaged => corrupt(&path, "its head is damaged in both copies"),
            HeadError::OtherFormat(found) => LogError::Format { path: path.clone(), found: found.into() },
        })?;
        check_owner(path.parent().unwrap_or(&path), &head, owner)?;
        if head.file != number || self.salt.is_some_and(|salt| salt != head.salt) {
            return Err(corrupt(&path, "it is another file than its name says"));
        }
        if bytes.get(..PAGE) != bytes.get(PAGE..2 * PAGE) {
            tracing::warn!(path = %path.display(), "a copy of the head of a file of the raft log is damaged, \
                the other one is sound: check the disk");
        }
        self.salt = Some(head.salt);
        let mut file = ReadFile { named: head.file_bytes, end: FRAMES_START, is_closed: false, path, head };
        self.check_order(&file, before)?;
        let is_open = before.is_some_and(|before| !before.is_closed);
        while let Some(frame) = self.frame(&file, &bytes)? {
            if is_open {
                let what = format!("it has frame {}, but the file before it ends early", frame.head.number);
                return Err(corrupt(&file.path, what));
            }
            self.records(&mut file, &frame, &bytes)?;
        }
        let (length, named) = (bytes.len() as u64, file.named);
        if length < named {
            return Err(corrupt(&file.path, format!("it was cut to {length} of {named} bytes")));
        }
        Ok(file)
    }

    /// Checks that no file is missing before this one. A created but unused file may follow one
    /// without its end record.
    fn check_order(&mut self, file: &ReadFile, before: Option<&ReadFile>) -> Result<(), LogError> {
        let Some(before) = before else {
            self.next_frame = file.head.first_frame;
            return Ok(());
        };
        let number = before.head.file + 1;
        if file.head.file != number {
            return Err(corrupt(&before.path.with_file_name(format!("{number:016}")), "it is missing"));
        }
        let first = self.next_frame + u64::from(!before.is_closed);
        if file.head.first_frame != first {
            let what = format!("it begins with frame {}, but {first} is the next one", file.head.first_frame);
            return Err(corrupt(&file.path, what));
        }
        Ok(())
    }

    /// The next frame of a file; `None` at its end.
    fn frame<'a>(&self, file: &ReadFile, bytes: &'a [u8]) -> Result<Option<Frame<'a>>, LogError> {
        let number = self.next_frame.max(file.head.first_frame);
        let Some(frame) = next_copy(file.head.seed(), bytes, file.end, number) else { return Ok(None) };
        if frame.head.number != number || frame.head.start != file.end {
            let what = format!(
                "frame {number} at byte {} is damaged in both copies, and frame {} follows",
                file.end, frame.head.number
            );
            return Err(corrupt(&file.path, what));
        }
        if frame.at != frame.head.start {
            tracing::warn!(path = %file.path.display(), frame = number, "a copy of a frame of the raft log \
                is damaged, the other one is sound: check the disk");
        }
        Ok(Some(frame))
    }

    /// Applies the records of a frame.
    fn records(&mut self, file: &mut ReadFile, frame: &Frame<'_>, bytes: &[u8]) -> Result<(), LogError> {
        let number = frame.head.number;
        let damaged = |what: String| corrupt(&file.path, format!("frame {number} {what}"));
        let records = decode(frame.records).map_err(|error| damaged(format!("does not decode: {error}")))?;
        let mut beside = frame.out_of_line_start();
        for record in records {
            let (group, change) = match record {
                Record::Closed => {
                    file.is_closed = true;
                    continue;
                }
                Record::Group { group, marks } => {
                    let state = self.state.groups.get_mut(usize::from(group));
                    let state = state.ok_or_else(|| damaged(format!("names a group {group}")))?;
                    if !self.marked.insert(group) && state.marks != marks {
                        return Err(damaged(format!("and the files before it disagree on group {group}")));
                    }
                    state.marks = marks;
                    continue;
                }
                Record::AppendBeside { group, log_id, bytes: length, crc32c } => {
                    let command = command_at(bytes, beside, length, crc32c).map_err(|what| {
                        let index = log_id.index();
                        corrupt(&file.path, format!("the command of entry {index} of group {group} {what}"))
                    })?;
                    beside += u64::from(length);
                    (group, Change::Append(vec![with_command(log_id, command)]))
                }
                Record::Append { group, entry } => (group, Change::Append(vec![entry])),
                Record::Vote { group, vote } => (group, Change::Vote(vote)),
                Record::Truncate { group, from } => (group, Change::Truncate { from }),
                Record::Purge { group, upto } => (group, Change::Purge(upto)),
                Record::Committed { group, last } => (group, Change::Committed(last)),
                Record::Forget { group } => (group, Change::Forget),
            };
            let applied = self.state.apply(group, &change, file.head.file);
            applied.map_err(|error| damaged(error.to_string()))?;
        }
        file.end = frame.end().ok_or_else(|| damaged("is longer than any file".into()))?;
        file.named = file.named.max(frame.head.file_bytes);
        self.next_frame = number + 1;
        Ok(())
    }
}

fn check_owner(path: &Path, head: &FileHead, owner: &LogOwner) -> Result<(), LogError> {
    let found = head.owner();
    if found.router != owner.router {
        let (found, wanted) = (found.router, owner.router);
        return Err(LogError::OtherRouter { path: path.to_owned(), found, wanted });
    }
    if found.cluster != owner.cluster {
        return Err(LogError::OtherCluster {
            path: path.to_owned(),
            found: found.cluster.name,
            found_shards: found.cluster.shards,
            wanted: owner.cluster.name.clone(),
            wanted_shards: owner.cluster.shards,
        });
    }
    Ok(())
}

/// The bytes of a file, after a sync: data of a killed process may be only in memory, and later
/// writes must not be more durable than it is.
fn durable_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    File::open(path)?.sync_all()?;
    fs::read(path)
}

fn with_command(log_id: LogId, command: Bytes) -> Entry {
    Entry { log_id, payload: Payload::Normal(Proposal(command)) }
}

fn command_at(bytes: &[u8], at: u64, length: u32, stored: u32) -> Result<Bytes, String> {
    let start = usize::try_from(at).unwrap_or(usize::MAX);
    let command = bytes.get(start..).and_then(|rest| rest.get(..length as usize));
    let command = command.ok_or_else(|| format!("extends past the end at byte {}", bytes.len()))?;
    let computed = crc32c::crc32c(command);
    if stored != computed {
        return Err(format!("has checksum {stored:08x}, its bytes give {computed:08x}"));
    }
    Ok(Bytes::copy_from_slice(command))
}
