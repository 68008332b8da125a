//! Prefixes that are read remotely again and again are copied near their readers, by the router
//! that sent the requests.
//!
//! Not here: the choice of prefixes (`kv_core::place::hot`), and the same with real nodes
//! (`chaos-tests`).

use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::place::copies::CopyOutcome;
use kvfleet_proto::pb;
use kvfleet_router::{HotCopiesConfig, RouterConfig};
use pb::route_reply::Answer;

use crate::copies::{CopyTarget, evacuate, join};
use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, FakeNode, HashBytes, holders, prefix, until};

/// Block size that a joining node reports.
const BLOCK_BYTES: u64 = 4_096;

fn on(config: &mut RouterConfig, burst_blocks: u64) {
    let burst_bytes = burst_blocks * BLOCK_BYTES;
    // Long enough that no copy is retried within a test.
    let decay_ms = 3_600_000;
    config.hot_copies = HotCopiesConfig { bytes_per_second: 1, burst_bytes, decay_ms, copies_max: 4 };
}

/// Routers, node 1 that holds everything, and the local nodes of the instances, with equal numbers.
struct HotCluster {
    cluster: Cluster,
    holder: FakeNode,
    sequence: AtomicU64,
}

impl HotCluster {
    async fn start(routers: u64, change: impl Fn(&mut RouterConfig)) -> HotCluster {
        let cluster = Cluster::start(routers, change).await;
        let holder = join(&cluster, 1, &CopyTarget::new(0, CopyOutcome::Full)).await;
        HotCluster { cluster, holder, sequence: AtomicU64::new(1) }
    }

    async fn taker(&self, node: u32, takes: u32, end: CopyOutcome) -> CopyTarget {
        let mut target = CopyTarget::new(takes, end);
        target.block_bytes = BLOCK_BYTES;
        target.announces(join(&self.cluster, node, &target).await).await;
        target
    }

    /// Stores blocks on node 1 and waits until every router knows.
    async fn held(&mut self, seed: u64) -> Vec<HashBytes> {
        let blocks = prefix(seed, 8);
        let seen = self.holder.store(&blocks).await;
        for router in self.cluster.running() {
            self.cluster.lookup(router, &blocks, vec![seen]).await;
        }
        blocks
    }

    async fn ask(
        &self,
        router: u64,
        instance: u32,
        blocks: &[HashBytes],
        pinned_instance: bool,
    ) -> pb::Decision {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let report = pb::ReportRequest { node: instance, has_node: true, ..load(instance, sequence) };
        self.cluster.client(router).report(report).await.unwrap();
        let request = pb::RouteRequest {
            request: sequence,
            hashes: blocks.concat(),
            block_tokens: 256,
            input_tokens: 256 * u32::try_from(blocks.len()).unwrap() + 1,
            candidates: Some(pb::CandidateSet { instances: vec![instance] }),
            pinned_instance,
            ..Default::default()
        };
        match self.cluster.client(router).route(request).await.unwrap().into_inner().answer {
            Some(Answer::Decision(decision)) => decision,
            other => panic!("{other:?}"),
        }
    }
}

fn sources(decision: &pb::Decision) -> Vec<(u32, u32, u32)> {
    decision.sources.iter().map(|source| (source.node, source.start_blocks, source.len_blocks)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hot_prefixes_are_copied_to_the_local_node_within_the_budget() {
    let mut world = HotCluster::start(1, |config| on(config, 3)).await;
    let target = world.taker(2, u32::MAX, CopyOutcome::Full).await;
    let blocks = world.held(5).await;
    until("the first blocks are read from the local node", || async {
        let decision = world.ask(1, 2, &blocks, false).await;
        (sources(&decision) == [(2, 0, 3), (1, 3, 5)]).then_some(())
    })
    .await;
    let known = world.cluster.lookup(1, &blocks, vec![]).await;
    let nodes = |run: &(u32, u32, Vec<(u32, u64)>)| run.2.iter().map(|(node, _)| *node).collect::<Vec<_>>();
    assert_eq!(holders(&known).iter().map(nodes).collect::<Vec<_>>(), [vec![1, 2], vec![1]]);
    assert_eq!(target.asked(), [(0, 3)], "once, and only within the budget");
    world.cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_sent_requests_and_a_budget_cause_copies() {
    let mut world = HotCluster::start(2, |config| {
        if config.id == 1 {
            on(config, 64);
        }
    })
    .await;
    let target = world.taker(2, u32::MAX, CopyOutcome::Full).await;
    let (asked, off, hot) = (world.held(5).await, world.held(6).await, world.held(7).await);
    until("copies of the sent prefixes", || async {
        world.ask(1, 2, &asked, true).await;
        world.ask(2, 2, &off, false).await;
        world.ask(1, 2, &hot, false).await;
        (!target.asked().is_empty()).then_some(())
    })
    .await;
    let later = world.held(8).await;
    until("a later one is copied", || async {
        world.ask(1, 2, &asked, true).await;
        world.ask(2, 2, &off, false).await;
        world.ask(1, 2, &later, false).await;
        (target.asked().len() > 1).then_some(())
    })
    .await;
    assert_eq!(target.heads(), [hot[0], later[0]]);
    world.cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_copies_are_not_retried_and_draining_nodes_get_none() {
    let mut world = HotCluster::start(1, |config| on(config, 64)).await;
    let refuses = world.taker(2, 0, CopyOutcome::Worth).await;
    let (drains, stays) =
        (CopyTarget::new(u32::MAX, CopyOutcome::Full), world.taker(4, u32::MAX, CopyOutcome::Full).await);
    let evacuation = join(&world.cluster, 3, &drains).await;
    let lone = world.taker(5, u32::MAX, CopyOutcome::Full).await;
    let all = [world.held(5).await, world.held(6).await, world.held(7).await];
    for copies in 1..=all.len() {
        until("one more is tried", || async {
            evacuate(&world.cluster, &evacuation, None).await.unwrap();
            for blocks in &all[..copies] {
                world.ask(1, 2, blocks, false).await;
                world.ask(1, 3, blocks, false).await;
                world.ask(1, 4, blocks, false).await;
            }
            (refuses.asked().len() >= copies && stays.asked().len() >= copies).then_some(())
        })
        .await;
    }
    let heads: Vec<_> = all.iter().map(|blocks| blocks[0].to_vec()).collect();
    assert_eq!((refuses.heads(), stays.heads()), (heads.clone(), heads), "each of them once");
    assert_eq!((drains.asked(), lone.asked()), (vec![], vec![]));
    world.cluster.shutdown().await;
}
