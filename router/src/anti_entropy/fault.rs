//! Faults that tests plant in a running router: a replica that lists a block no node announced.
//!
//! Built with debug assertions only, so no release holds it. Not here: how drift is found and repaired (`judge.rs`).

use kv_core::id::{BlockHash, Epoch, NodeId, TenantId, Tier};
use kv_core::index::command::{Announcement, Applied, Change, Command};

use crate::raft::handle::Consensus;
use crate::start::Router;

impl Router {
    /// Lists a block on this replica of `group` that `node` did not announce, as a flipped bit would, and begins a
    /// snapshot that holds it.
    ///
    /// # Panics
    /// When the router has no such group, or the replica refuses the change.
    #[doc(hidden)]
    pub async fn list_unannounced_block(&self, group: u32, node: NodeId, block: BlockHash) {
        let group = self.groups.get(group).expect("the test names a group of this router");
        let applied = group.published.begin_entry().apply_slice(|replica| {
            let (epoch, seq) = replica.index.next_seq(node).expect("the node has joined");
            let stored = Change::Stored { parent: None, blocks: vec![block], tier: Tier::Dram };
            let announcement = Announcement { node, epoch: Epoch(epoch.0), seq, changes: vec![stored] };
            replica.index.apply(&Command::Announce(vec![announcement]))
        });
        assert!(matches!(applied, Applied::Announced(_)), "{applied:?}");
        group.consensus.snapshot_now().await;
    }

    /// Submits entries of no weight to `group` as fast as it takes them. Does not return.
    ///
    /// # Panics
    /// When the router has no such group, or stops leading it.
    #[doc(hidden)]
    pub async fn submit_idle_entries(&self, group: u32) {
        let leader = self.groups.get(group).expect("the test names a group of this router").consensus.clone();
        let command = Command::SetQuota { tenant: TenantId(7), bytes: Some(1) };
        loop {
            let mut pending = Vec::new();
            for _ in 0..64 {
                pending.push(leader.submit(&command).await.expect("the leader takes entries"));
            }
            for one in pending {
                Consensus::await_result(one).await.expect("the leader commits entries");
            }
        }
    }
}
