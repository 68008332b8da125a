//! The truth meter: whether what the index says of nodes is so, and whether replicas agree.
//!
//! Digests find drift, between replicas and between a node and the index (`digests.rs`); audits of samples tell how
//! right claims are (`audit.rs`); the leader of a group compares and asks (`run.rs`, `replicas.rs`). A node that drifted
//! is asked to announce all anew; a replica that a majority says is wrong (`judge.rs`) answers nothing and takes the
//! leader's state. Not here: what a node announces (`server/announce.rs`), and how that state is taken
//! (`crate::raft::repair`).

pub(crate) mod audit;
#[cfg(test)]
mod cluster_tests;
pub(crate) mod digests;
mod judge;
mod replicas;
pub(crate) mod run;

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::{Epoch, NodeId};
use kv_core::index::command::{Announcement, Change};
use parking_lot::Mutex;

use audit::{Chance, Claims, Score};
use digests::Told;

/// What this router knows of the truth of nodes.
pub(crate) struct Truth {
    state: Mutex<State>,
}

struct State {
    told: BTreeMap<(u16, NodeId), Told>,
    claims: BTreeMap<(u16, NodeId), Claims>,
    scores: BTreeMap<NodeId, Score>,
    /// Differences found in each group, of replicas and of nodes.
    drifts: BTreeMap<u16, u64>,
    /// Who is to be asked to announce all anew.
    wanted: BTreeSet<(u16, NodeId)>,
    chance: Chance,
}

impl Truth {
    pub(crate) fn new(seed: u64) -> Truth {
        let (told, claims, scores) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (drifts, wanted) = (BTreeMap::new(), BTreeSet::new());
        Truth { state: Mutex::new(State { told, claims, scores, drifts, wanted, chance: Chance::new(seed) }) }
    }

    /// A node announced something, with its own digest after it.
    pub(crate) fn announced(&self, shard: u16, announcement: &Announcement, digest: Option<u128>) {
        let Announcement { node, epoch, seq, changes } = announcement;
        let mut state = self.state.lock();
        let State { told, claims, chance, .. } = &mut *state;
        let anew = changes.iter().any(|change| matches!(change, Change::Cleared));
        told.entry((shard, *node)).or_default().told(*epoch, seq.0, digest, anew);
        let claims = claims.entry((shard, *node)).or_default();
        for change in changes {
            if let Change::Stored { blocks, .. } = change {
                claims.stored(blocks, chance);
            }
        }
    }

    /// A node says of itself where it stands.
    pub(crate) fn stands(&self, shard: u16, node: NodeId, epoch: Epoch, seq: u64, digest: Option<u128>) {
        if digest.is_some() {
            self.state.lock().told.entry((shard, node)).or_default().told(epoch, seq, digest, false);
        }
    }

    /// Whether a node is to announce all anew to a shard. Says so once.
    pub(crate) fn takes_wanted(&self, shard: u16, node: NodeId) -> bool {
        self.state.lock().wanted.remove(&(shard, node))
    }

    /// What audits of a node came to.
    pub(crate) fn score(&self, node: NodeId) -> Option<Score> {
        self.state.lock().scores.get(&node).copied()
    }

    /// Differences found in a group since this router started.
    pub(crate) fn drifts(&self, group: u16) -> u64 {
        self.state.lock().drifts.get(&group).copied().unwrap_or(0)
    }
}
