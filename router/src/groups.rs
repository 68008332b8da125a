//! The Raft groups that a router hosts: control, which knows nodes, pins and quotas, and the shards, which list
//! blocks.
//!
//! Not here: what a group is made of (`crate::raft`) and what readers make of several of them
//! (`crate::view::holders`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
}

impl Group {
    /// A group whose replica is as it was found on disk: how old, nobody knows yet.
    pub(crate) fn new(
        consensus: Consensus,
        published: Arc<Published>,
        log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Group {
        Group { consensus, published, log_bytes, was_level: AtomicBool::new(false) }
    }

    /// Whether the replica was level with the leader since this process started. Before, it may lack anything
    /// that was committed while the process was away.
    pub(crate) fn was_level(&self) -> bool {
        self.was_level.load(Ordering::Relaxed)
    }

    /// The replica has applied what was committed a moment ago.
    pub(crate) fn is_level(&self) {
        self.was_level.store(true, Ordering::Relaxed);
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
