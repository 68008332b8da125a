//! One group's replica as readers see it: one copy behind a lock that writers hold for moments only.
//!
//! A writer takes the lock for a slice of an entry at a time, small enough that a reader that waits for it
//! waits less than a millisecond; between two slices of an entry readers see part of it, which is a state that
//! each node was in. Who needs whole entries reads through [`Published::whole`] (a digest to compare), or comes through
//! [`Published::pause`] (a snapshot).
//! Not here: what a slice is (`crate::raft::state_machine`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::{BlockHash, NodeId};
use kv_core::index::Index;
use kv_core::index::command::{AnnounceOutcome, DropCause};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::raft::{LogId, StoredMembership};
use crate::truth::digests::Mark;
use crate::view::departed::{Departed, Drops};

/// Entries between two marks that are kept for comparing replicas. A digest costs what nodes and pins cost to walk.
const MARK_EVERY: u64 = 256;

/// Marks kept: a follower may be behind by some, or ahead of what the leader said a moment ago.
const MARKS_MAX: usize = 16;

/// One replica of a group's state.
pub(crate) struct Replica {
    /// The replicated index.
    pub(crate) index: Index,
    /// The last entry that is whole in it.
    pub(crate) applied: Option<LogId>,
    /// The last membership entry that is in it.
    pub(crate) membership: StoredMembership,
}

impl Replica {
    /// Number of the last applied entry, 0 before the first.
    pub(crate) fn applied_index(&self) -> u64 {
        self.applied.map_or(0, |applied| applied.index())
    }

    /// Its digest, and where.
    fn mark(&self) -> Mark {
        Mark { index: self.applied_index(), digest: self.index.digest() }
    }
}

/// The replica, and who waits for its changes.
pub(crate) struct Published {
    replica: RwLock<Replica>,
    /// Held over a whole entry, however many slices it has.
    entry: Mutex<()>,
    marks: Mutex<VecDeque<Mark>>,
    departed: Mutex<Departed>,
    is_level: AtomicBool,
    /// Times what left.
    clock: Clock,
    /// Counts published entries; waiters for an applied state wake on it.
    changes: watch::Sender<u64>,
    /// Counts changes of membership, pins, quotas or TTLs.
    rules: watch::Sender<u64>,
}

impl Published {
    /// Publishes a replica.
    pub(crate) fn new(replica: Replica) -> Published {
        Published {
            replica: RwLock::new(replica),
            entry: Mutex::new(()),
            marks: Mutex::default(),
            departed: Mutex::default(),
            is_level: AtomicBool::new(false),
            clock: Clock::start(),
            changes: watch::Sender::new(0),
            rules: watch::Sender::new(0),
        }
    }

    /// The replica as it is, perhaps in the middle of an entry. Waits for one slice at most.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Replica> {
        self.replica.read()
    }

    /// Runs `look` on the replica between two entries. No entry is applied meanwhile, so it must be short, or
    /// rare.
    pub(crate) fn whole<T>(&self, look: impl FnOnce(&Replica) -> T) -> T {
        self.pause().look(look)
    }

    /// Holds back the next entry.
    pub(crate) fn pause(&self) -> Pause<'_> {
        Pause { published: self, _no_entry: self.entry.lock() }
    }

    /// The replica, when nobody reads it any more.
    pub(crate) fn into_replica(self) -> Replica {
        self.replica.into_inner()
    }

    /// The replica was replaced by another one's state: what it came to before says nothing any more.
    pub(crate) fn forget_marks(&self) {
        self.marks.lock().clear();
    }

    /// Digests after some entries, the last one included.
    pub(crate) fn marks(&self) -> Vec<Mark> {
        let now = self.whole(Replica::mark);
        self.marks.lock().iter().copied().chain([now]).collect()
    }

    /// Notes what announcements that were applied dropped.
    pub(crate) fn note_departed(&self, dropped: &[Drops], outcomes: &[AnnounceOutcome]) {
        // What was applied before the replica was level with its leader left at some time that nobody knows.
        if !dropped.is_empty() && self.is_level.load(Ordering::Relaxed) {
            self.departed.lock().note(dropped, outcomes, self.clock.now());
        }
    }

    /// The replica has what was committed a moment ago: from here on times are those at which things happen.
    pub(crate) fn is_level(&self) {
        self.is_level.store(true, Ordering::Relaxed);
    }

    /// Who dropped a block lately, why, and how long ago.
    pub(crate) fn left(&self, block: BlockHash) -> Option<(NodeId, DropCause, Duration)> {
        self.departed.lock().get(block, self.clock.now())
    }

    /// Begins to change the replica by one entry.
    pub(crate) fn entry(&self) -> Writing<'_> {
        Writing { published: self, _one_entry: self.entry.lock() }
    }

    /// Says that something other than ownership of blocks was changed.
    pub(crate) fn rules_changed(&self) {
        self.rules.send_modify(|count| *count += 1);
    }

    /// Wakes when something other than ownership of blocks was changed.
    pub(crate) fn rules_changes(&self) -> watch::Receiver<u64> {
        self.rules.subscribe()
    }

    /// Wakes whenever an entry was published.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// The replica between two entries. No entry is applied while this lives, so it must be short, or rare.
pub(crate) struct Pause<'a> {
    published: &'a Published,
    _no_entry: MutexGuard<'a, ()>,
}

impl Pause<'_> {
    /// Looks at the replica; so may others meanwhile.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Replica) -> T) -> T {
        look(&self.published.replica.read())
    }

    /// Changes what the log does not know of. Everybody waits meanwhile.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Replica) -> T) -> T {
        change(&mut self.published.replica.write())
    }
}

/// An entry being applied. When it is dropped, waiters wake.
pub(crate) struct Writing<'a> {
    published: &'a Published,
    _one_entry: MutexGuard<'a, ()>,
}

impl Writing<'_> {
    /// Changes the replica by one slice of the entry. Readers that wait go before the next slice.
    pub(crate) fn slice<T>(&self, change: impl FnOnce(&mut Replica) -> T) -> T {
        let mut replica = self.published.replica.write();
        let answer = change(&mut replica);
        RwLockWriteGuard::unlock_fair(replica);
        answer
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // The entry is whole, and the next one waits for this guard.
        let replica = self.published.replica.read();
        if replica.applied_index().is_multiple_of(MARK_EVERY) {
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
