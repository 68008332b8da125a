//! The index that reads see, published left-right: two copies, readers on one, the writer on the other.
//!
//! Why two copies and not one behind a lock. A proposal may hold 65,536 blocks, and a snapshot walks the
//! whole index; behind one lock every route would wait for either. With two copies a reader takes an
//! uncontended shared lock on the active copy and nothing ever makes it wait: the writer changes only the
//! other copy, switches, then repeats the change on the first. The prices are twice the memory and twice
//! the applying, both off the path of a request. A slow reader (a snapshot being encoded) holds up the
//! writer, never another reader. Not here: what a change is.

use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::index::Index;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use tokio::sync::watch;

use crate::raft::{LogId, StoredMembership};

/// One replica of the cluster's state at one applied log entry.
pub(crate) struct Replica {
    /// The replicated index.
    pub(crate) index: Index,
    /// The last entry that is in it.
    pub(crate) applied: Option<LogId>,
    /// The last membership entry that is in it.
    pub(crate) membership: StoredMembership,
}

impl Replica {
    /// Number of the last applied entry, 0 before the first.
    pub(crate) fn applied_index(&self) -> u64 {
        self.applied.map_or(0, |applied| applied.index())
    }
}

/// Two copies of the replica and which of them readers use.
pub(crate) struct Published {
    copies: [RwLock<Replica>; 2],
    active: AtomicUsize,
    /// One writer at a time; held over both halves of a change.
    writing: Mutex<()>,
    /// Counts published changes; waiters for an applied state wake on it.
    changes: watch::Sender<u64>,
    /// Counts changes of membership, pins, quotas or TTLs.
    rules: watch::Sender<u64>,
}

impl Published {
    /// Publishes two copies of the same replica.
    pub(crate) fn new(copies: [Replica; 2]) -> Published {
        Published {
            copies: copies.map(RwLock::new),
            active: AtomicUsize::new(0),
            writing: Mutex::new(()),
            changes: watch::Sender::new(0),
            rules: watch::Sender::new(0),
        }
    }

    /// The newest published replica. Does not wait: the writer only locks the copy that is not active.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Replica> {
        loop {
            let active = self.active.load(Ordering::Acquire);
            // A failure means that the copies were switched between the two lines; the next turn sees it.
            if let Some(replica) = self.copies[active].try_read() {
                return replica;
            }
            std::hint::spin_loop();
        }
    }

    /// Changes both copies. What the first run of `change` returns is given to `publish` at the moment
    /// when every new reader sees it; the second run repeats it on the other copy. Blocks while a reader
    /// still holds the copy it needs.
    pub(crate) fn write<T>(&self, mut change: impl FnMut(&mut Replica) -> T, publish: impl FnOnce(T)) {
        let _one_writer = self.writing.lock();
        let active = self.active.load(Ordering::Acquire);
        let answers = change(&mut self.copies[1 - active].write());
        self.active.store(1 - active, Ordering::Release);
        self.changes.send_modify(|count| *count += 1);
        publish(answers);
        drop(change(&mut self.copies[active].write()));
    }

    /// Says that something other than ownership of blocks was changed.
    pub(crate) fn rules_changed(&self) {
        self.rules.send_modify(|count| *count += 1);
    }

    /// Wakes when something other than ownership of blocks was changed.
    pub(crate) fn rules_changes(&self) -> watch::Receiver<u64> {
        self.rules.subscribe()
    }

    /// Wakes whenever something was published.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
