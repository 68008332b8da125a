//! The readers' view of one group's replica: one copy behind a lock that writers hold briefly.
//!
//! A writer takes the lock for one slice of an entry at a time, small enough that a reader waits
//! less than a millisecond. Between two slices readers see part of the entry, which is a state that
//! each node was in. Readers that need whole entries use [`PublishedReplica::read_whole`] (to
//! compare digests) or [`PublishedReplica::pause`] (for a snapshot). Not here: the size of a slice
//! (`crate::raft::state_machine`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::{BlockHash, NodeId};
use kv_core::index::Index;
use kv_core::index::command::{AnnounceOutcome, DropCause};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::watch;

use crate::anti_entropy::digests::DigestMark;
use crate::clock::Clock;
use crate::raft::{LogId, StoredMembership};
use crate::view::recent_drops::{DroppedBlocks, RecentDrops};

/// Entries between two kept digests. A digest costs a walk over nodes and pins.
const MARK_INTERVAL_ENTRIES: u64 = 256;

/// Kept digests: a follower may lag by some, or be ahead of the leader's last message.
const MARKS_MAX: usize = 16;

/// One replica of a group's state.
pub(crate) struct Replica {
    /// The replicated index.
    pub(crate) index: Index,
    /// The last entry that is applied completely.
    pub(crate) applied: Option<LogId>,
    /// The last applied membership entry.
    pub(crate) membership: StoredMembership,
}

impl Replica {
    /// Number of the last applied entry, 0 before the first.
    pub(crate) fn applied_index(&self) -> u64 {
        self.applied.map_or(0, |applied| applied.index())
    }

    /// Its digest and applied index.
    fn mark(&self) -> DigestMark {
        DigestMark { index: self.applied_index(), digest: self.index.digest() }
    }
}

/// The replica, and its change notifications.
pub(crate) struct PublishedReplica {
    replica: RwLock<Replica>,
    /// Held over a whole entry with all its slices.
    entry: Mutex<()>,
    marks: Mutex<VecDeque<DigestMark>>,
    recent_drops: Mutex<RecentDrops>,
    caught_up: AtomicBool,
    /// Dates the drops.
    clock: Clock,
    /// Counts published entries; waiters for an applied state wake on it.
    changes: watch::Sender<u64>,
    /// Counts changes of membership, pins, quotas or TTLs.
    rules: watch::Sender<u64>,
}

impl PublishedReplica {
    /// Publishes a replica.
    pub(crate) fn new(replica: Replica) -> PublishedReplica {
        PublishedReplica {
            replica: RwLock::new(replica),
            entry: Mutex::new(()),
            marks: Mutex::default(),
            recent_drops: Mutex::default(),
            caught_up: AtomicBool::new(false),
            clock: Clock::start(),
            changes: watch::Sender::new(0),
            rules: watch::Sender::new(0),
        }
    }

    /// The current replica, perhaps in the middle of an entry. Waits for one slice at most.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Replica> {
        self.replica.read()
    }

    /// Runs `look` on the replica between two entries. No entry is applied meanwhile, so it must be
    /// short or rare.
    pub(crate) fn read_whole<T>(&self, look: impl FnOnce(&Replica) -> T) -> T {
        self.pause().read(look)
    }

    /// Holds back the next entry while the guard lives.
    pub(crate) fn pause(&self) -> PauseGuard<'_> {
        PauseGuard { published: self, _no_entry: self.entry.lock() }
    }

    /// The replica, once it has no readers.
    pub(crate) fn into_replica(self) -> Replica {
        self.replica.into_inner()
    }

    /// Clears the digests after another replica's state was installed.
    pub(crate) fn clear_marks(&self) {
        self.marks.lock().clear();
    }

    /// Digests after some entries, including the last one.
    pub(crate) fn marks(&self) -> Vec<DigestMark> {
        let now = self.read_whole(Replica::mark);
        self.marks.lock().iter().copied().chain([now]).collect()
    }

    /// Records the drops of applied announcements.
    pub(crate) fn record_drops(&self, dropped: &[DroppedBlocks], outcomes: &[AnnounceOutcome]) {
        // Drops replayed before the replica caught up happened at an unknown time.
        if !dropped.is_empty() && self.caught_up.load(Ordering::Relaxed) {
            self.recent_drops.lock().record_applied(dropped, outcomes, self.clock.now());
        }
    }

    /// Records that the replica has caught up: from here on an entry is applied when it happens.
    pub(crate) fn mark_caught_up(&self) {
        self.caught_up.store(true, Ordering::Relaxed);
    }

    /// The node that last dropped a block recently, the cause, and the time since.
    pub(crate) fn last_drop(&self, block: BlockHash) -> Option<(NodeId, DropCause, Duration)> {
        self.recent_drops.lock().get(block, self.clock.now())
    }

    /// Starts to apply one entry.
    pub(crate) fn begin_entry(&self) -> EntryWriter<'_> {
        EntryWriter { published: self, _one_entry: self.entry.lock() }
    }

    /// Notifies of a change of membership, pins, quotas or TTLs.
    pub(crate) fn notify_rules(&self) {
        self.rules.send_modify(|count| *count += 1);
    }

    /// Wakes at changes of membership, pins, quotas or TTLs.
    pub(crate) fn watch_rules(&self) -> watch::Receiver<u64> {
        self.rules.subscribe()
    }

    /// Wakes after every published entry.
    pub(crate) fn watch_entries(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// The replica between two entries. No entry is applied while this lives, so it must be short-lived
/// or rare.
pub(crate) struct PauseGuard<'a> {
    published: &'a PublishedReplica,
    _no_entry: MutexGuard<'a, ()>,
}

impl PauseGuard<'_> {
    /// Reads the replica; other readers may do so meanwhile.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&Replica) -> T) -> T {
        look(&self.published.replica.read())
    }

    /// Changes state outside the log, with exclusive access.
    pub(crate) fn modify<T>(&self, change: impl FnOnce(&mut Replica) -> T) -> T {
        change(&mut self.published.replica.write())
    }
}

/// An entry being applied. Its drop wakes waiters.
pub(crate) struct EntryWriter<'a> {
    published: &'a PublishedReplica,
    _one_entry: MutexGuard<'a, ()>,
}

impl EntryWriter<'_> {
    /// Applies one slice of the entry. Waiting readers go before the next slice.
    pub(crate) fn apply_slice<T>(&self, change: impl FnOnce(&mut Replica) -> T) -> T {
        let mut replica = self.published.replica.write();
        let answer = change(&mut replica);
        RwLockWriteGuard::unlock_fair(replica);
        answer
    }
}

impl Drop for EntryWriter<'_> {
    fn drop(&mut self) {
        // The entry is complete, and the next one waits for this guard.
        let replica = self.published.replica.read();
        if replica.applied_index().is_multiple_of(MARK_INTERVAL_ENTRIES) {
            let mark = replica.mark();
            let mut marks = self.published.marks.lock();
            marks.retain(|known| known.index < mark.index);
            marks.push_back(mark);
            if marks.len() > MARKS_MAX {
                marks.pop_front();
            }
        }
        drop(replica);
        self.published.changes.send_modify(|count| *count += 1);
    }
}
