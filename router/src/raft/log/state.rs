//! Contents of the log: the records of frames, and the state of every group that results from them.
//!
//! Writing and reading share it: a change is applied once its frame is durable, and again when the
//! frame is read after a restart. Not here: frames and files.

use std::collections::BTreeMap;
use std::io;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::SMALL_COMMAND_BYTES_MAX;
use crate::raft::{Entry, LogId, Payload, Proposal, Vote};

/// One change of one group's log.
#[derive(Debug)]
pub(crate) enum Change {
    Vote(Vote),
    Append(Vec<Entry>),
    /// Removes every entry with this index or a higher one.
    Truncate {
        from: u64,
    },
    Purge(LogId),
    Committed(Option<LogId>),
    /// Resets the group except its vote.
    Forget,
}

impl Change {
    /// Total bytes of its commands.
    pub(crate) fn command_bytes(&self) -> u64 {
        match self {
            Change::Append(new) => new.iter().map(command_bytes).sum(),
            _ => 0,
        }
    }
}

/// A record of a frame. Variant names and field order are part of the format.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Record {
    /// State of a group except its entries, at the start of a file: earlier records are not needed
    /// to know it.
    Group {
        group: u16,
        marks: GroupMarks,
    },
    Vote {
        group: u16,
        vote: Vote,
    },
    Append {
        group: u16,
        entry: Entry,
    },
    /// The entry's command is the next out-of-line one.
    AppendBeside {
        group: u16,
        log_id: LogId,
        bytes: u32,
        crc32c: u32,
    },
    Truncate {
        group: u16,
        from: u64,
    },
    Purge {
        group: u16,
        upto: LogId,
    },
    Committed {
        group: u16,
        last: Option<LogId>,
    },
    Forget {
        group: u16,
    },
    /// Last record of a file: the next file exists.
    Closed,
}

/// State of a group except its entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupMarks {
    pub(super) vote: Option<Vote>,
    pub(super) purged: Option<LogId>,
    pub(super) committed: Option<LogId>,
    /// Index of the last entry.
    pub(super) last: Option<u64>,
}

/// A group, with the file number of each entry.
#[derive(Debug, Default)]
pub(super) struct GroupState {
    pub(super) marks: GroupMarks,
    pub(super) entries: BTreeMap<u64, (u64, Entry)>,
}

/// Approximate bytes of an entry's record without its command.
const RECORD_BYTES: u64 = 64;

/// Needed entries of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LiveEntries {
    pub(super) entries: u64,
    /// Bytes that its entries take in a file that they are moved to.
    pub(super) bytes: u64,
}

/// All groups, and the needed entries of each file.
#[derive(Debug)]
pub(super) struct LogState {
    pub(super) groups: Vec<GroupState>,
    live: BTreeMap<u64, LiveEntries>,
}

impl LogState {
    pub(super) fn new(groups: u16) -> LogState {
        LogState { groups: (0..groups).map(|_| GroupState::default()).collect(), live: BTreeMap::new() }
    }

    pub(super) fn live_in(&self, file: u64) -> LiveEntries {
        self.live.get(&file).copied().unwrap_or_default()
    }

    /// Bytes that all needed entries take in files that they are moved to.
    pub(super) fn live_bytes(&self) -> u64 {
        self.live.values().map(|wanted| wanted.bytes).sum()
    }

    /// Applies a change that is stored in `file`.
    pub(super) fn apply(&mut self, group: u16, change: &Change, file: u64) -> io::Result<()> {
        let Self { groups, live: wanted } = self;
        let state = groups.get_mut(usize::from(group)).ok_or_else(|| io::Error::other("no such group"))?;
        let mut give_up = |gone: BTreeMap<u64, (u64, Entry)>| {
            gone.into_values().for_each(|(file, entry)| release(wanted, file, &entry));
        };
        let GroupState { marks, entries } = state;
        match change {
            Change::Vote(vote) => marks.vote = Some(*vote),
            Change::Committed(last) => marks.committed = *last,
            Change::Append(new) => {
                new.iter().for_each(|entry| state.insert(entry.clone(), file, wanted));
            }
            Change::Truncate { from } => {
                give_up(entries.split_off(from));
                marks.last = from.checked_sub(1).and_then(|last| marks.last.map(|old| old.min(last)));
            }
            Change::Purge(upto) => {
                let kept = entries.split_off(&(upto.index() + 1));
                give_up(std::mem::replace(entries, kept));
                marks.purged = Some(*upto);
                marks.last = marks.last.max(Some(upto.index()));
            }
            Change::Forget => {
                give_up(std::mem::take(entries));
                *marks = GroupMarks { vote: marks.vote, ..GroupMarks::default() };
            }
        }
        Ok(())
    }

    /// Records of everything except entries.
    pub(super) fn marks(&self) -> Vec<Record> {
        let records = (0..).zip(&self.groups);
        records.map(|(group, state)| Record::Group { group, marks: state.marks }).collect()
    }

    /// The needed entries of a file, by group.
    pub(super) fn entries_in(&self, file: u64) -> Vec<(u16, Change)> {
        let of_group = |(group, state): (u16, &GroupState)| {
            let here = state.entries.values().filter(|(place, _)| *place == file);
            let here: Vec<Entry> = here.map(|(_, entry)| entry.clone()).collect();
            (!here.is_empty()).then_some((group, Change::Append(here)))
        };
        (0..).zip(&self.groups).filter_map(of_group).collect()
    }
}

impl GroupState {
    fn insert(&mut self, entry: Entry, file: u64, live: &mut BTreeMap<u64, LiveEntries>) {
        let index = entry.log_id.index();
        let here = live.entry(file).or_default();
        here.entries += 1;
        here.bytes += relocated_bytes(&entry);
        if let Some((file, old)) = self.entries.insert(index, (file, entry)) {
            release(live, file, &old);
        }
        self.marks.last = self.marks.last.max(Some(index));
    }

    /// Checks a group after all files were read; the error names missing entries.
    pub(super) fn check(&self, group: u16) -> Result<(), String> {
        let mut expected = self.marks.purged.map_or(0, |purged| purged.index() + 1);
        for index in self.entries.keys() {
            if *index != expected {
                return Err(format!("entry {expected} of group {group} is missing"));
            }
            expected += 1;
        }
        match self.marks.last {
            Some(last) if last >= expected => {
                Err(format!("entries {expected} to {last} of group {group} are missing"))
            }
            _ => Ok(()),
        }
    }
}

fn release(live: &mut BTreeMap<u64, LiveEntries>, file: u64, entry: &Entry) {
    if let Some(here) = live.get_mut(&file) {
        here.entries = here.entries.saturating_sub(1);
        here.bytes = here.bytes.saturating_sub(relocated_bytes(entry));
        if here.entries == 0 {
            live.remove(&file);
        }
    }
}

/// Bytes of an entry among many in one frame: its record twice, and its command once if it is out
/// of line.
fn relocated_bytes(entry: &Entry) -> u64 {
    let command = command_bytes(entry);
    let twice = if command > SMALL_COMMAND_BYTES_MAX as u64 { command } else { 2 * command };
    2 * RECORD_BYTES + twice
}

/// Bytes of an entry's command.
fn command_bytes(entry: &Entry) -> u64 {
    command(entry).map_or(0, |command| command.len() as u64)
}

/// The command of an entry.
fn command(entry: &Entry) -> Option<&Bytes> {
    match &entry.payload {
        Payload::Normal(Proposal(command)) => Some(command),
        _ => None,
    }
}

/// Changes as the records of one frame, and their out-of-line commands.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) encoded: Vec<u8>,
    pub(super) out_of_line: Vec<Bytes>,
}

impl Records {
    pub(super) fn push(&mut self, record: &Record) -> io::Result<()> {
        rmp_serde::encode::write(&mut self.encoded, record).map_err(io::Error::other)
    }

    /// Adds a change; commands above `beside_min` bytes are stored out of line.
    pub(super) fn change(&mut self, group: u16, change: &Change, out_of_line_min: usize) -> io::Result<()> {
        match change {
            Change::Vote(vote) => self.push(&Record::Vote { group, vote: *vote }),
            Change::Truncate { from } => self.push(&Record::Truncate { group, from: *from }),
            Change::Purge(upto) => self.push(&Record::Purge { group, upto: *upto }),
            Change::Committed(last) => self.push(&Record::Committed { group, last: *last }),
            Change::Forget => self.push(&Record::Forget { group }),
            Change::Append(new) => {
                new.iter().try_for_each(|entry| self.append(group, entry, out_of_line_min))
            }
        }
    }

    fn append(&mut self, group: u16, entry: &Entry, out_of_line_min: usize) -> io::Result<()> {
        let Some(command) = command(entry).filter(|command| command.len() > out_of_line_min) else {
            return self.push(&Record::Append { group, entry: entry.clone() });
        };
        let bytes = u32::try_from(command.len()).map_err(io::Error::other)?;
        let crc32c = crc32c::crc32c(command);
        self.out_of_line.push(command.clone());
        self.push(&Record::AppendBeside { group, log_id: entry.log_id, bytes, crc32c })
    }

    pub(super) fn out_of_line_bytes(&self) -> u64 {
        self.out_of_line.iter().map(|command| command.len() as u64).sum()
    }
}

/// The records of a frame.
pub(super) fn decode(mut encoded: &[u8]) -> Result<Vec<Record>, String> {
    let mut records = Vec::new();
    while !encoded.is_empty() {
        records.push(rmp_serde::from_read(&mut encoded).map_err(|error| error.to_string())?);
    }
    Ok(records)
}
