//! Measures how long the effects of a kill last: until no router lists a killed node, until a new
//! leader commits.
//!
//! Both run from SIGKILL and are measured from outside by polling every running router; decisions
//! received by requests count as well. A router that does not answer still counts as listing the
//! node and is polled again, unless it was itself killed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::id::BlockHash;
use kvfleet_proto::pb;
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::calls::RouterCalls;

/// Interval between two polls of a router; the resolution of the measurements.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// After this long without success, the measurement ends without a result.
const WATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// A killed node and the last time an answer named it.
#[derive(Debug)]
struct KilledNode {
    node: u32,
    epoch: u64,
    at: Instant,
    last_named_at: Option<Instant>,
}

/// Records killed processes and the decisions that name them.
#[derive(Debug, Default)]
pub(super) struct FailureWatch {
    killed_nodes: Mutex<Vec<KilledNode>>,
    /// Addresses of routers that were killed and not restarted.
    routers_killed: Mutex<BTreeSet<String>>,
}

impl FailureWatch {
    /// Records that `node` was killed at `at` in `epoch`.
    pub(super) fn node_killed(&self, node: u32, epoch: u64, at: Instant) {
        self.killed_nodes.lock().push(KilledNode { node, epoch, at, last_named_at: None });
    }

    /// Records that the router at this address was killed.
    pub(super) fn router_killed(&self, address: &str) {
        self.routers_killed.lock().insert(address.to_owned());
    }

    /// Records that the router at this address was restarted.
    pub(super) fn router_restarted(&self, address: &str) {
        self.routers_killed.lock().remove(address);
    }

    fn is_router_killed(&self, address: &str) -> bool {
        self.routers_killed.lock().contains(address)
    }

    /// Records a decision just received from a router.
    pub(super) fn record_decision(&self, decision: &pb::Decision) {
        let mut dead = self.killed_nodes.lock();
        if dead.is_empty() {
            return;
        }
        let sources = decision.sources.iter().map(|source| (source.node, source.epoch));
        let save = decision.save_to.iter().map(|holder| (holder.node, holder.epoch));
        for (node, epoch) in sources.chain(save) {
            for killed in dead.iter_mut().filter(|one| one.node == node && epoch <= one.epoch) {
                killed.last_named_at = Some(Instant::now());
            }
        }
    }

    /// Time from the death of the node to the last decision that named it.
    pub(super) fn last_named_after(&self, node: u32, at: Instant) -> Option<Duration> {
        let dead = self.killed_nodes.lock();
        let one = dead.iter().find(|one| one.node == node && one.at == at)?;
        one.last_named_at.map(|last| last.saturating_duration_since(at))
    }
}

/// A killed node, to look up at routers.
#[derive(Clone, Debug)]
pub(super) struct KilledNodeQuery {
    pub(super) node: u32,
    pub(super) epoch: u64,
    pub(super) at: Instant,
    /// A block stored on the node, to look up.
    pub(super) block: Option<BlockHash>,
}

/// Time until no router's status lists the node as live and no lookup names it; `None` if a router
/// still does after `GIVE_UP_AFTER` or cannot be queried.
pub(super) async fn until_unrouted(
    routers: Vec<RouterCalls>,
    dead: KilledNodeQuery,
    watch: Arc<FailureWatch>,
) -> Option<Duration> {
    let at = dead.at;
    let polls = routers.into_iter().map(|router| {
        let (dead, watch, address) = (dead.clone(), Arc::clone(&watch), router.address.clone());
        let lookup = move || poll_router(router.clone(), dead.clone());
        async move { until_gone(at, lookup, || watch.is_router_killed(&address)).await }
    });
    let mut polls: JoinSet<Option<Instant>> = polls.collect();
    let mut last = at;
    while let Some(gone_at) = polls.join_next().await {
        last = last.max(gone_at.ok().flatten()?);
    }
    Some(last.saturating_duration_since(at))
}

/// The result of one poll of a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LookupResult {
    Listed,
    Gone,
    NoAnswer,
}

/// When a router stopped listing a node that died at `at`. For a router that was itself killed, the
/// last time at which it listed the node.
async fn until_gone<Lookup: Future<Output = LookupResult>>(
    at: Instant,
    mut lookup: impl FnMut() -> Lookup,
    is_killed: impl Fn() -> bool,
) -> Option<Instant> {
    let mut last_listed_at = at;
    while at.elapsed() < WATCH_TIMEOUT {
        match lookup().await {
            LookupResult::Gone => return Some(Instant::now()),
            LookupResult::NoAnswer if is_killed() => return Some(last_listed_at),
            LookupResult::NoAnswer => {}
            LookupResult::Listed => last_listed_at = Instant::now(),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    None
}

async fn poll_router(router: RouterCalls, dead: KilledNodeQuery) -> LookupResult {
    let Ok(status) = router.status().await else { return LookupResult::NoAnswer };
    let live = |node: &pb::NodeStatus| node.node == dead.node && node.epoch <= dead.epoch && node.live;
    if status.nodes.iter().any(live) {
        return LookupResult::Listed;
    }
    let Some(block) = dead.block else { return LookupResult::Gone };
    let request = pb::LookupRequest { hashes: block.0.to_vec(), ..pb::LookupRequest::default() };
    let Ok(found) = router.lookup(request).await else { return LookupResult::NoAnswer };
    let mut holders = found.runs.iter().flat_map(|run| &run.holders);
    if holders.any(|holder| holder.node == dead.node && holder.epoch <= dead.epoch) {
        LookupResult::Listed
    } else {
        LookupResult::Gone
    }
}

/// Time until one of `routers` acknowledges a write as leader of a term after `term`, the dead
/// leader's.
pub(super) async fn until_leader(
    routers: Vec<RouterCalls>,
    killed_at: Instant,
    term: u64,
) -> Option<Duration> {
    let mut tries: JoinSet<Option<Instant>> =
        routers.into_iter().map(|router| until_committed(router, killed_at, term)).collect();
    while let Some(committed) = tries.join_next().await {
        if let Ok(Some(committed)) = committed {
            return Some(committed.saturating_duration_since(killed_at));
        }
    }
    None
}

async fn until_committed(router: RouterCalls, since: Instant, term: u64) -> Option<Instant> {
    while since.elapsed() < WATCH_TIMEOUT {
        if router.commit_nothing().await.is_ok() {
            let committed = Instant::now();
            if router.status().await.is_ok_and(|status| status.term > term) {
                return Some(committed);
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
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
    fn counts_only_decisions_that_name_the_killed_node() {
        let watch = FailureWatch::default();
        watch.record_decision(&naming(2, 1));
        let at = Instant::now();
        watch.node_killed(2, 1, at);
        assert_eq!(watch.last_named_after(2, at), None);
        watch.record_decision(&naming(1, 1));
        watch.record_decision(&naming(2, 2));
        assert_eq!(watch.last_named_after(2, at), None, "neither another node nor a later epoch counts");
        watch.record_decision(&naming(2, 1));
        assert!(watch.last_named_after(2, at).is_some());
    }

    /// Returns the given results in order, then the last one for ever.
    fn lookups(looks: &[LookupResult]) -> impl FnMut() -> std::future::Ready<LookupResult> {
        let mut next = looks.iter().copied().chain(std::iter::repeat(looks[looks.len() - 1]));
        move || std::future::ready(next.next().unwrap_or(LookupResult::NoAnswer))
    }

    #[tokio::test]
    async fn silent_routers_still_list_the_node() {
        use LookupResult::{Gone, Listed, NoAnswer};
        let at = Instant::now();
        let gone_at = until_gone(at, lookups(&[Listed, NoAnswer, NoAnswer, Listed, Gone]), || false).await;
        let waited = gone_at.map(|forgot| forgot - at);
        assert!(waited.is_some_and(|waited| waited >= 4 * POLL_INTERVAL), "five polls, not two: {waited:?}");
    }

    #[tokio::test]
    async fn killed_routers_are_not_waited_for() {
        let at = Instant::now();
        let gone_at = until_gone(at, lookups(&[LookupResult::NoAnswer]), || true).await;
        assert_eq!(gone_at, Some(at), "it never listed the dead node");
        let watch = FailureWatch::default();
        watch.router_killed("127.0.0.1:1");
        assert!(watch.is_router_killed("127.0.0.1:1") && !watch.is_router_killed("127.0.0.1:2"));
        watch.router_restarted("127.0.0.1:1");
        assert!(!watch.is_router_killed("127.0.0.1:1"));
    }

    #[test]
    fn save_targets_count_as_named() {
        let watch = FailureWatch::default();
        let at = Instant::now();
        watch.node_killed(3, 1, at);
        let save_to = Some(pb::Holder { node: 3, epoch: 1, ..pb::Holder::default() });
        watch.record_decision(&pb::Decision { save_to, ..pb::Decision::default() });
        assert!(watch.last_named_after(3, at).is_some());
    }
}
