//! The Raft groups that a router hosts: control, which knows nodes, pins and quotas, and the shards, which list
//! blocks.
//!
//! Not here: what a group is made of (`crate::raft`) and what readers make of several of them
//! (`crate::view::holders`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kv_core::id::BlockHash;

use crate::raft::CONTROL;
use crate::raft::handle::Consensus;
use crate::view::published::Published;

/// One group: its consensus and what readers see of it.
pub(crate) struct Group {
    pub(crate) consensus: Consensus,
    pub(crate) published: Arc<Published>,
    /// Bytes of log entries held in memory.
    pub(crate) log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Whether the replica was level with the leader since this process started.
    was_level: AtomicBool,
    /// Newest entry at which the replica was found to differ; 0 while it is trusted.
    diverged_at: AtomicU64,
    /// Newest entry at which it was found to be like another one.
    agreed_index: AtomicU64,
    /// Repairs of the replica that failed.
    repairs_failed: AtomicU64,
}

impl Group {
    /// A group whose replica is as it was found on disk: how old, nobody knows yet.
    pub(crate) fn new(
        consensus: Consensus,
        published: Arc<Published>,
        log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Group {
        let (diverged_at, agreed_index) = (AtomicU64::new(0), AtomicU64::new(0));
        Group {
            consensus,
            published,
            log_bytes,
            was_level: AtomicBool::new(false),
            diverged_at,
            agreed_index,
            repairs_failed: AtomicU64::new(0),
        }
    }

    /// Whether the replica was level with the leader since this process started. Before, it may lack anything
    /// that was committed while the process was away.
    pub(crate) fn was_level(&self) -> bool {
        self.was_level.load(Ordering::Relaxed)
    }

    /// Whether the replica is known to differ from the leader's: then it must answer nothing.
    pub(crate) fn has_diverged(&self) -> bool {
        self.diverged_at.load(Ordering::Relaxed) > 0
    }

    /// The replica was compared with the leader's after an entry. One that differed and has been given the leader's
    /// state is trusted again as soon as it agrees there or later: that it agreed before it differed says nothing.
    pub(crate) fn compared(&self, index: u64, differs: bool) {
        if differs {
            self.diverged_at.fetch_max(index.max(1), Ordering::Relaxed);
            return;
        }
        let trusted = |at: u64| (at > 0 && at <= index).then_some(0);
        let _ = self.diverged_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, trusted);
        self.agreed_at(index);
    }

    /// Another replica was like this one after an entry.
    pub(crate) fn agreed_at(&self, index: u64) {
        self.agreed_index.fetch_max(index, Ordering::Relaxed);
    }

    /// Newest entry at which another replica was found to be like this one; 0 before the first.
    pub(crate) fn agreed_index(&self) -> u64 {
        self.agreed_index.load(Ordering::Relaxed)
    }

    /// A repair of the replica came to nothing.
    pub(crate) fn repair_failed(&self) {
        self.repairs_failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Repairs of the replica that came to nothing since this process started.
    pub(crate) fn repairs_failed(&self) -> u64 {
        self.repairs_failed.load(Ordering::Relaxed)
    }

    /// The replica has applied what was committed a moment ago.
    pub(crate) fn is_level(&self) {
        self.was_level.store(true, Ordering::Relaxed);
        self.published.is_level();
    }

    /// Its number.
    pub(crate) fn number(&self) -> u16 {
        self.consensus.group()
    }
}

/// All groups. Clones share them.
#[derive(Clone)]
pub(crate) struct Groups {
    all: Arc<[Arc<Group>]>,
}

impl Groups {
    /// By number, control first.
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

    /// How many shards there are.
    pub(crate) fn shard_count(&self) -> u16 {
        u16::try_from(self.all.len() - 1).unwrap_or(u16::MAX)
    }

    /// The group with this number.
    pub(crate) fn get(&self, number: u32) -> Option<&Arc<Group>> {
        self.all.get(usize::try_from(number).ok()?)
    }

    /// The shard that lists a block.
    pub(crate) fn of_block(&self, block: BlockHash) -> &Arc<Group> {
        &self.all[usize::from(block.shard(self.shard_count()))]
    }
}
