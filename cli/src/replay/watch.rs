//! How long a dead process is noticed: until no router names a killed node, until a new leader commits.
//!
//! Both are measured from the moment of SIGKILL, from outside, by asking every running router again
//! and again; decisions that requests received count as well.

use std::time::{Duration, Instant};

use kv_core::id::BlockHash;
use kvfleet_proto::pb;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::calls::RouterCalls;

/// Time between two looks at a router: the resolution of what is measured.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// After this long without success the answer is "not within".
const GIVE_UP_AFTER: Duration = Duration::from_secs(30);

/// A node that was killed, and the last time an answer named it.
#[derive(Debug)]
struct Dead {
    node: u32,
    epoch: u64,
    at: Instant,
    named_last: Option<Instant>,
}

/// Remembers the dead and listens to decisions.
#[derive(Debug, Default)]
pub(super) struct Watch {
    dead: Mutex<Vec<Dead>>,
}

impl Watch {
    /// `node` was killed at `at` while it had `epoch`.
    pub(super) fn killed(&self, node: u32, epoch: u64, at: Instant) {
        self.dead.lock().push(Dead { node, epoch, at, named_last: None });
    }

    /// A router just answered with this decision.
    pub(super) fn decided(&self, decision: &pb::Decision) {
        let mut dead = self.dead.lock();
        if dead.is_empty() {
            return;
        }
        let sources = decision.sources.iter().map(|source| (source.node, source.epoch));
        let save = decision.save_to.iter().map(|holder| (holder.node, holder.epoch));
        for (node, epoch) in sources.chain(save) {
            for one in dead.iter_mut().filter(|one| one.node == node && epoch <= one.epoch) {
                one.named_last = Some(Instant::now());
            }
        }
    }

    /// Time from the node's death to the last decision that named it.
    pub(super) fn named_for(&self, node: u32, at: Instant) -> Option<Duration> {
        let dead = self.dead.lock();
        let one = dead.iter().find(|one| one.node == node && one.at == at)?;
        one.named_last.map(|last| last.saturating_duration_since(at))
    }
}

/// A killed node as the routers know it.
#[derive(Clone, Debug)]
pub(super) struct DeadNode {
    pub(super) node: u32,
    pub(super) epoch: u64,
    pub(super) at: Instant,
    /// A block that was on it, to look up.
    pub(super) block: Option<BlockHash>,
}

/// Time until no router's status calls the node live and no lookup names it.
pub(super) async fn until_unrouted(routers: Vec<RouterCalls>, dead: DeadNode) -> Option<Duration> {
    let looks = routers.into_iter().map(|router| until_router_forgot(router, dead.clone()));
    let mut looks: JoinSet<Option<Instant>> = looks.collect();
    let mut last = dead.at;
    while let Some(forgot) = looks.join_next().await {
        last = last.max(forgot.ok().flatten()?);
    }
    Some(last.saturating_duration_since(dead.at))
}

async fn until_router_forgot(router: RouterCalls, dead: DeadNode) -> Option<Instant> {
    while dead.at.elapsed() < GIVE_UP_AFTER {
        if !is_named(&router, &dead).await {
            return Some(Instant::now());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    None
}

/// A router that cannot be asked names nobody: it may have been killed in the meantime.
async fn is_named(router: &RouterCalls, dead: &DeadNode) -> bool {
    let Ok(status) = router.status().await else { return false };
    let live = |node: &pb::NodeStatus| node.node == dead.node && node.epoch <= dead.epoch && node.live;
    if status.nodes.iter().any(live) {
        return true;
    }
    let Some(block) = dead.block else { return false };
    let request = pb::LookupRequest { hashes: block.0.to_vec(), after: vec![] };
    let Ok(found) = router.lookup(request).await else { return false };
    let holders = found.runs.iter().flat_map(|run| &run.holders);
    holders.into_iter().any(|holder| holder.node == dead.node && holder.epoch <= dead.epoch)
}

/// Time until one of `routers` acknowledges a write as leader.
pub(super) async fn until_leader(routers: Vec<RouterCalls>, killed_at: Instant) -> Option<Duration> {
    let mut tries: JoinSet<Option<Instant>> =
        routers.into_iter().map(|router| until_commits(router, killed_at)).collect();
    while let Some(committed) = tries.join_next().await {
        if let Ok(Some(committed)) = committed {
            return Some(committed.saturating_duration_since(killed_at));
        }
    }
    None
}

async fn until_commits(router: RouterCalls, since: Instant) -> Option<Instant> {
    while since.elapsed() < GIVE_UP_AFTER {
        if router.commit_nothing().await.is_ok() {
            return Some(Instant::now());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naming(node: u32, epoch: u64) -> pb::Decision {
        pb::Decision {
            sources: vec![pb::Source { node, epoch, ..pb::Source::default() }],
            ..pb::Decision::default()
        }
    }

    #[test]
    fn only_decisions_that_name_the_dead_count() {
        let watch = Watch::default();
        watch.decided(&naming(2, 1));
        let at = Instant::now();
        watch.killed(2, 1, at);
        assert_eq!(watch.named_for(2, at), None);
        watch.decided(&naming(1, 1));
        watch.decided(&naming(2, 2));
        assert_eq!(watch.named_for(2, at), None, "another node, and its next life, are not it");
        watch.decided(&naming(2, 1));
        assert!(watch.named_for(2, at).is_some());
    }

    #[test]
    fn a_save_place_names_a_node_too() {
        let watch = Watch::default();
        let at = Instant::now();
        watch.killed(3, 1, at);
        let save_to = Some(pb::Holder { node: 3, epoch: 1, ..pb::Holder::default() });
        watch.decided(&pb::Decision { save_to, ..pb::Decision::default() });
        assert!(watch.named_for(3, at).is_some());
    }
}
