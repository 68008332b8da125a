//! How long a dead process is noticed: until no router names a killed node, until a new leader commits.
//!
//! Both are measured from the moment of SIGKILL, from outside, by asking every running router again
//! and again; decisions that requests received count as well. A router that gives no answer has not
//! forgotten anything: it is asked on, unless it is one that was killed.

use std::collections::BTreeSet;
use std::sync::Arc;
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
    /// Addresses of routers that were killed and not started again.
    routers_killed: Mutex<BTreeSet<String>>,
}

impl Watch {
    /// `node` was killed at `at` while it had `epoch`.
    pub(super) fn killed(&self, node: u32, epoch: u64, at: Instant) {
        self.dead.lock().push(Dead { node, epoch, at, named_last: None });
    }

    /// The router at this address was killed.
    pub(super) fn router_killed(&self, address: &str) {
        self.routers_killed.lock().insert(address.to_owned());
    }

    /// The router at this address is started again.
    pub(super) fn router_restarts(&self, address: &str) {
        self.routers_killed.lock().remove(address);
    }

    fn is_router_killed(&self, address: &str) -> bool {
        self.routers_killed.lock().contains(address)
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

/// Time until no router's status calls the node live and no lookup names it; nothing when one of them
/// still does after a long while, or cannot be asked.
pub(super) async fn until_unrouted(
    routers: Vec<RouterCalls>,
    dead: DeadNode,
    watch: Arc<Watch>,
) -> Option<Duration> {
    let at = dead.at;
    let looks = routers.into_iter().map(|router| {
        let (dead, watch, address) = (dead.clone(), Arc::clone(&watch), router.address.clone());
        let look = move || look(router.clone(), dead.clone());
        async move { until_forgot(at, look, || watch.is_router_killed(&address)).await }
    });
    let mut looks: JoinSet<Option<Instant>> = looks.collect();
    let mut last = at;
    while let Some(forgot) = looks.join_next().await {
        last = last.max(forgot.ok().flatten()?);
    }
    Some(last.saturating_duration_since(at))
}

/// What one look at a router showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    Named,
    Forgot,
    NoAnswer,
}

/// When a router had forgotten a node that died at `at`. One that was killed itself names nobody since
/// it was last seen to.
async fn until_forgot<Looking: Future<Output = Look>>(
    at: Instant,
    mut look: impl FnMut() -> Looking,
    is_killed: impl Fn() -> bool,
) -> Option<Instant> {
    let mut named_last = at;
    while at.elapsed() < GIVE_UP_AFTER {
        match look().await {
            Look::Forgot => return Some(Instant::now()),
            Look::NoAnswer if is_killed() => return Some(named_last),
            Look::NoAnswer => {}
            Look::Named => named_last = Instant::now(),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    None
}

async fn look(router: RouterCalls, dead: DeadNode) -> Look {
    let Ok(status) = router.status().await else { return Look::NoAnswer };
    let live = |node: &pb::NodeStatus| node.node == dead.node && node.epoch <= dead.epoch && node.live;
    if status.nodes.iter().any(live) {
        return Look::Named;
    }
    let Some(block) = dead.block else { return Look::Forgot };
    let request = pb::LookupRequest { hashes: block.0.to_vec(), ..pb::LookupRequest::default() };
    let Ok(found) = router.lookup(request).await else { return Look::NoAnswer };
    let mut holders = found.runs.iter().flat_map(|run| &run.holders);
    if holders.any(|holder| holder.node == dead.node && holder.epoch <= dead.epoch) {
        Look::Named
    } else {
        Look::Forgot
    }
}

/// Time until one of `routers` acknowledges a write as leader of a term after `term`, the dead leader's.
pub(super) async fn until_leader(
    routers: Vec<RouterCalls>,
    killed_at: Instant,
    term: u64,
) -> Option<Duration> {
    let mut tries: JoinSet<Option<Instant>> =
        routers.into_iter().map(|router| until_commits(router, killed_at, term)).collect();
    while let Some(committed) = tries.join_next().await {
        if let Ok(Some(committed)) = committed {
            return Some(committed.saturating_duration_since(killed_at));
        }
    }
    None
}

async fn until_commits(router: RouterCalls, since: Instant, term: u64) -> Option<Instant> {
    while since.elapsed() < GIVE_UP_AFTER {
        if router.commit_nothing().await.is_ok() {
            let committed = Instant::now();
            if router.status().await.is_ok_and(|status| status.term > term) {
                return Some(committed);
            }
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

    /// Looks in the order given, and the last one for ever.
    fn looks(looks: &[Look]) -> impl FnMut() -> std::future::Ready<Look> {
        let mut next = looks.iter().copied().chain(std::iter::repeat(looks[looks.len() - 1]));
        move || std::future::ready(next.next().unwrap_or(Look::NoAnswer))
    }

    #[tokio::test]
    async fn a_router_that_does_not_answer_has_not_forgotten() {
        use Look::{Forgot, Named, NoAnswer};
        let at = Instant::now();
        let forgot = until_forgot(at, looks(&[Named, NoAnswer, NoAnswer, Named, Forgot]), || false).await;
        let waited = forgot.map(|forgot| forgot - at);
        assert!(waited.is_some_and(|waited| waited >= 4 * LOOK_EVERY), "five looks, not two: {waited:?}");
    }

    #[tokio::test]
    async fn a_router_that_was_killed_is_not_waited_for() {
        let at = Instant::now();
        let forgot = until_forgot(at, looks(&[Look::NoAnswer]), || true).await;
        assert_eq!(forgot, Some(at), "it never named the dead node");
        let watch = Watch::default();
        watch.router_killed("127.0.0.1:1");
        assert!(watch.is_router_killed("127.0.0.1:1") && !watch.is_router_killed("127.0.0.1:2"));
        watch.router_restarts("127.0.0.1:1");
        assert!(!watch.is_router_killed("127.0.0.1:1"));
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
