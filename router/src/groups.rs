//! The Raft groups of a router: control, which holds nodes, pins and quotas, and the shards, which
//! list blocks.
//!
//! Not here: the implementation of a group (`crate::raft`) and reads over several groups
//! (`crate::view::holders`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kv_core::id::BlockHash;

use crate::raft::CONTROL;
use crate::raft::handle::Consensus;
use crate::view::published::PublishedReplica;

/// One group: its consensus and its published view.
pub(crate) struct Group {
    pub(crate) consensus: Consensus,
    pub(crate) published: Arc<PublishedReplica>,
    /// Bytes of log entries held in memory.
    pub(crate) log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Whether the replica has caught up with the leader since this process started.
    caught_up: AtomicBool,
    /// Newest entry at which the replica differed from the leader's; 0 while it is trusted.
    diverged_at: AtomicU64,
    /// Newest entry at which it equalled another replica.
    agreed_index: AtomicU64,
    /// Number of failed repairs of the replica.
    repairs_failed: AtomicU64,
}

impl Group {
    /// A group with the replica as read from disk; its staleness is not known yet.
    pub(crate) fn new(
        consensus: Consensus,
        published: Arc<PublishedReplica>,
        log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Group {
        let (diverged_at, agreed_index) = (AtomicU64::new(0), AtomicU64::new(0));
        Group {
            consensus,
            published,
            log_bytes,
            caught_up: AtomicBool::new(false),
            diverged_at,
            agreed_index,
            repairs_failed: AtomicU64::new(0),
        }
    }

    /// Whether the replica has caught up with the leader since this process started. Before that it
    /// may lack entries committed while the process was down.
    pub(crate) fn has_caught_up(&self) -> bool {
        self.caught_up.load(Ordering::Relaxed)
    }

    /// Whether the replica is known to differ from the leader's; if so, it must not answer.
    pub(crate) fn has_diverged(&self) -> bool {
        self.diverged_at.load(Ordering::Relaxed) > 0
    }

    /// Records a comparison with the leader's replica after an entry. A repaired replica is trusted
    /// again once it agrees at the differing entry or later; an earlier agreement is no evidence.
    pub(crate) fn record_comparison(&self, index: u64, differs: bool) {
        if differs {
            self.diverged_at.fetch_max(index.max(1), Ordering::Relaxed);
            return;
        }
        let trusted = |at: u64| (at > 0 && at <= index).then_some(0);
        let _ = self.diverged_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, trusted);
        self.record_agreement(index);
    }

    /// Records that another replica equalled this one after an entry.
    pub(crate) fn record_agreement(&self, index: u64) {
        self.agreed_index.fetch_max(index, Ordering::Relaxed);
    }

    /// Newest entry at which another replica equalled this one; 0 before the first.
    pub(crate) fn agreed_index(&self) -> u64 {
        self.agreed_index.load(Ordering::Relaxed)
    }

    /// Counts a failed repair.
    pub(crate) fn record_failed_repair(&self) {
        self.repairs_failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Failed repairs of the replica since this process started.
    pub(crate) fn repairs_failed(&self) -> u64 {
        self.repairs_failed.load(Ordering::Relaxed)
    }

    /// Records that the replica has applied everything that was committed a moment ago.
    pub(crate) fn mark_caught_up(&self) {
        self.caught_up.store(true, Ordering::Relaxed);
        self.published.mark_caught_up();
    }

    /// Its number.
    pub(crate) fn number(&self) -> u16 {
        self.consensus.group()
    }
}

/// All groups of a router; clones share them.
#[derive(Clone)]
pub(crate) struct Groups {
    all: Arc<[Arc<Group>]>,
}

impl Groups {
    /// Takes the groups by ascending number, control first.
    pub(crate) fn new(all: Vec<Arc<Group>>) -> Groups {
        assert!(all.len() >= 2, "a cluster has a control group and at least one shard");
        Groups { all: Arc::from(all) }
    }

    /// Every group, by number.
    pub(crate) fn all(&self) -> &[Arc<Group>] {
        &self.all
    }

    pub(crate) fn control(&self) -> &Arc<Group> {
        &self.all[usize::from(CONTROL)]
    }

    /// The groups that list blocks.
    pub(crate) fn shards(&self) -> &[Arc<Group>] {
        &self.all[1..]
    }

    pub(crate) fn shard_count(&self) -> u16 {
        u16::try_from(self.all.len() - 1).unwrap_or(u16::MAX)
    }

    /// The group with this number.
    pub(crate) fn get(&self, number: u32) -> Option<&Arc<Group>> {
        self.all.get(usize::try_from(number).ok()?)
    }

    /// The shard that lists a block.
    pub(crate) fn shard_of(&self, block: BlockHash) -> &Arc<Group> {
        &self.all[usize::from(block.shard(self.shard_count()))]
    }
}
