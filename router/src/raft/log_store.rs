//! The log for openraft: entries are readable from memory at once, and durable when the disk
//! confirms.
//!
//! openraft 0.10 requires that an entry is readable when `append` returns; durability follows
//! through the callback. So memory holds the log since the last purge, and the disk (`log/`)
//! follows in the same order. Not here: decisions about entries, which are openraft's.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::sync::Arc;
use std::thread;

use openraft::OptionalSend;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use parking_lot::{Mutex, RwLock};

use super::bounded::take_bytes;
use super::disk_room::DiskRoom;
use super::disk_thread::{DiskQueue, DurableCallback};
use super::log::{Change, DiskLog, RecoveredLog};
use super::{Entry, LogId, Payload, TypeConfig, Vote};

/// Entry bytes of one replication message: fits the message limit with margin, and lets a lagging
/// follower catch up at line speed. One entry always goes.
pub(crate) const REPLICATION_BYTES_MAX: usize = 1 << 20;

#[derive(Debug, Default)]
struct MemoryLog {
    entries: VecDeque<Entry>,
    bytes: u64,
    purged: Option<LogId>,
    committed: Option<LogId>,
    vote: Option<Vote>,
}

impl MemoryLog {
    fn from_recovered(recovered: RecoveredLog) -> MemoryLog {
        let bytes = recovered.entries.iter().map(entry_bytes).sum();
        let RecoveredLog { vote, purged, committed, entries } = recovered;
        MemoryLog { entries, bytes, purged, committed, vote }
    }

    /// Index of the first held entry, or of the next one if none is held.
    fn first_index(&self) -> u64 {
        match self.entries.front() {
            Some(entry) => entry.log_id.index(),
            None => self.purged.map_or(0, |purged| purged.index() + 1),
        }
    }

    fn last_log_id(&self) -> Option<LogId> {
        self.entries.back().map(|entry| entry.log_id).or(self.purged)
    }

    fn push(&mut self, entry: Entry) {
        self.bytes += entry_bytes(&entry);
        self.entries.push_back(entry);
    }

    fn truncate_from(&mut self, from: u64) {
        while self.entries.back().is_some_and(|entry| entry.log_id.index() >= from) {
            let gone = self.entries.pop_back();
            self.bytes -= gone.as_ref().map_or(0, entry_bytes);
        }
    }

    fn purge(&mut self, upto: LogId) {
        while self.entries.front().is_some_and(|entry| entry.log_id.index() <= upto.index()) {
            let gone = self.entries.pop_front();
            self.bytes -= gone.as_ref().map_or(0, entry_bytes);
        }
        self.purged = Some(upto);
    }

    fn range(&self, range: &impl RangeBounds<u64>) -> impl Iterator<Item = &Entry> {
        let first = self.first_index();
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(start) => start.saturating_add(1),
            Bound::Unbounded => first,
        };
        let end = match range.end_bound() {
            Bound::Included(end) => end.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        let skip = usize::try_from(start.saturating_sub(first)).unwrap_or(usize::MAX);
        let take = usize::try_from(end.saturating_sub(start.max(first))).unwrap_or(usize::MAX);
        self.entries.iter().skip(skip).take(take)
    }
}

/// Approximate memory of an entry, for the log's limit.
fn entry_bytes(entry: &Entry) -> u64 {
    let payload = match &entry.payload {
        Payload::Normal(proposal) => proposal.0.len(),
        _ => 0,
    };
    (payload + size_of::<Entry>()) as u64
}

/// The log of one Raft group. Clones share it: openraft's readers are clones.
#[derive(Clone)]
pub(crate) struct LogStore {
    memory: Arc<RwLock<MemoryLog>>,
    disk: DiskQueue,
}

/// Joins the writer thread after every [`LogStore`] is gone, so that the file is closed.
pub(crate) struct LogGuard {
    thread: Mutex<Option<thread::JoinHandle<()>>>,
    room: Arc<DiskRoom>,
}

impl LogGuard {
    /// From now on no write waits for room on a full disk: consensus could wait for it, and not end.
    pub(crate) fn stop_waiting(&self) {
        self.room.stop();
    }

    /// Blocks until the thread has written everything and closed the file.
    pub(crate) fn join(&self) {
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the raft log thread panicked");
        }
    }
}

impl LogStore {
    /// Logs by group on an open file with the `recovered` contents.
    pub(crate) fn open(
        disk: DiskLog,
        recovered: Vec<RecoveredLog>,
        room: Arc<DiskRoom>,
    ) -> io::Result<(Vec<LogStore>, LogGuard)> {
        let groups = u16::try_from(recovered.len()).map_err(io::Error::other)?;
        let (queues, thread) = DiskQueue::start(disk, groups, Arc::clone(&room))?;
        let store = |(disk, recovered)| LogStore {
            memory: Arc::new(RwLock::new(MemoryLog::from_recovered(recovered))),
            disk,
        };
        let stores = queues.into_iter().zip(recovered).map(store).collect();
        Ok((stores, LogGuard { thread: Mutex::new(Some(thread)), room }))
    }

    /// Whether this router ever voted or followed: every log except a new one holds a vote.
    pub(crate) fn has_vote(&self) -> bool {
        self.memory.read().vote.is_some()
    }

    /// Returns a reader of the entry bytes held in memory, for the snapshot trigger. It does not
    /// keep the log open.
    pub(crate) fn bytes_held(&self) -> impl Fn() -> u64 + Send + Sync + 'static {
        let memory = Arc::clone(&self.memory);
        move || memory.read().bytes
    }

    /// Returns a reader of the held entries in a range. It does not keep the log open.
    pub(super) fn entries_held(&self) -> impl Fn(RangeInclusive<u64>) -> Vec<Entry> + Send + Sync + 'static {
        let memory = Arc::clone(&self.memory);
        move |range| memory.read().range(&range).cloned().collect()
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> Result<Vec<Entry>, io::Error> {
        Ok(self.memory.read().range(&range).cloned().collect())
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.memory.read().vote)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        let memory = self.memory.read();
        let range = start..end;
        let limited =
            take_bytes(memory.range(&range), REPLICATION_BYTES_MAX as u64, |entry| entry_bytes(entry));
        Ok(limited.cloned().collect())
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = LogStore;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        let memory = self.memory.read();
        Ok(LogState { last_purged_log_id: memory.purged, last_log_id: memory.last_log_id() })
    }

    async fn get_log_reader(&mut self) -> LogStore {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.disk.send_durable(Change::Vote(*vote)).await?;
        self.memory.write().vote = Some(*vote);
        Ok(())
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        self.memory.write().committed = committed;
        self.disk.note_committed(committed);
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(self.memory.read().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        {
            let mut memory = self.memory.write();
            entries.iter().for_each(|entry| memory.push(entry.clone()));
        }
        self.disk.send(Change::Append(entries), DurableCallback::Flushed(callback)).await
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        let from = last_log_id.map_or(0, |last| last.index() + 1);
        self.memory.write().truncate_from(from);
        self.disk.send_durable(Change::Truncate { from }).await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), io::Error> {
        self.memory.write().purge(log_id);
        // No wait: an entry that is purged late is only read again at the next start.
        self.disk.send(Change::Purge(log_id), DurableCallback::Ignored).await
    }
}
