//! Anti-entropy: checks that the index is right about nodes, and that replicas agree.
//!
//! Digests reveal drift between replicas and between a node and the index (`digests.rs`). Audits of
//! samples measure precision and recall (`audit.rs`). The leader of a group runs both (`run.rs`,
//! `replicas.rs`). A node that drifted must announce everything again. A replica that differs from
//! a majority (`judge.rs`) stops answering and takes the leader's state. Not here: announcements
//! (`server/announce.rs`), and the transfer of that state (`crate::raft::repair`).

pub(crate) mod audit;

pub(crate) mod digests;
#[cfg(debug_assertions)]
mod fault;
mod judge;
mod replicas;
pub(crate) mod run;

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::{Epoch, NodeId};
use kv_core::index::command::{Announcement, Change};
use parking_lot::Mutex;

use audit::{AuditScore, ClaimSample, SplitMix};
use digests::NodeDigests;

/// This router's anti-entropy state.
pub(crate) struct AntiEntropy {
    state: Mutex<AntiEntropyState>,
}

struct AntiEntropyState {
    digests: BTreeMap<(u16, NodeId), NodeDigests>,
    claims: BTreeMap<(u16, NodeId), ClaimSample>,
    scores: BTreeMap<NodeId, AuditScore>,
    /// Differences found per group, of replicas and of nodes.
    drifts: BTreeMap<u16, u64>,
    /// Nodes that must announce everything again to a shard.
    resyncs: BTreeSet<(u16, NodeId)>,
    random: SplitMix,
}

impl AntiEntropy {
    pub(crate) fn new(seed: u64) -> AntiEntropy {
        let (told, claims, scores) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (drifts, wanted) = (BTreeMap::new(), BTreeSet::new());
        AntiEntropy {
            state: Mutex::new(AntiEntropyState {
                digests: told,
                claims,
                scores,
                drifts,
                resyncs: wanted,
                random: SplitMix::new(seed),
            }),
        }
    }

    /// Records an announcement with the node's own digest after it.
    pub(crate) fn record_announcement(&self, shard: u16, announcement: &Announcement, digest: Option<u128>) {
        let Announcement { node, epoch, seq, changes } = announcement;
        let mut state = self.state.lock();
        let AntiEntropyState { digests: told, claims, random: chance, .. } = &mut *state;
        let is_full = changes.iter().any(|change| matches!(change, Change::Cleared));
        told.entry((shard, *node)).or_default().record(*epoch, seq.0, digest, is_full);
        let claims = claims.entry((shard, *node)).or_default();
        for change in changes {
            if let Change::Stored { blocks, .. } = change {
                claims.record(blocks, chance);
            }
        }
    }

    /// Records a node's own digest from a heartbeat.
    pub(crate) fn record_heartbeat(
        &self,
        shard: u16,
        node: NodeId,
        epoch: Epoch,
        seq: u64,
        digest: Option<u128>,
    ) {
        if digest.is_some() {
            self.state.lock().digests.entry((shard, node)).or_default().record(epoch, seq, digest, false);
        }
    }

    /// Takes the request for a full announcement of a node to a shard, if there is one.
    pub(crate) fn take_resync_request(&self, shard: u16, node: NodeId) -> bool {
        self.state.lock().resyncs.remove(&(shard, node))
    }

    /// Audit results of a node.
    pub(crate) fn score(&self, node: NodeId) -> Option<AuditScore> {
        self.state.lock().scores.get(&node).copied()
    }

    /// Differences found in a group since this router started.
    pub(crate) fn drifts(&self, group: u16) -> u64 {
        self.state.lock().drifts.get(&group).copied().unwrap_or(0)
    }
}
