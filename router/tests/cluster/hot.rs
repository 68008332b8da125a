//! Prefixes that are read from afar again and again are copied to the node next to where they are asked for, by the router that sent the requests.
//!
//! Not here: what is worth a copy (`kv_core::place::hot`), and the same among real nodes (`chaos-tests`).

use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::place::copies::CopyEnd;
use kvfleet_proto::pb;
use kvfleet_router::{HotCopiesConfig, RouterConfig};
use pb::route_reply::Answer;

use crate::copies::{Taker, evacuate, join};
use crate::harness::{Cluster, Node, holders, prefix, until};
use crate::residency::load;

/// What a joining node says that its blocks have.
const BLOCK_BYTES: u64 = 4_096;

fn on(config: &mut RouterConfig, burst_blocks: u64) {
    let burst_bytes = burst_blocks * BLOCK_BYTES;
    // So long that nothing is tried again within a test.
    let decay_ms = 3_600_000;
    config.hot_copies = HotCopiesConfig { bytes_per_second: 1, burst_bytes, decay_ms, copies_max: 4 };
}

/// A cluster of routers, a node with the first number that holds everything, and those next to which instances are: of the same numbers.
struct World {
    cluster: Cluster,
    holder: Node,
    sequence: AtomicU64,
}

impl World {
    async fn start(routers: u64, change: impl Fn(&mut RouterConfig)) -> World {
        let cluster = Cluster::start(routers, change).await;
        let holder = join(&cluster, 1, &Taker::new(0, CopyEnd::Full)).await;
        World { cluster, holder, sequence: AtomicU64::new(1) }
    }

    async fn taker(&self, node: u32, takes: u32, end: CopyEnd) -> Taker {
        let mut taker = Taker::new(takes, end);
        taker.block_bytes = BLOCK_BYTES;
        taker.announces(join(&self.cluster, node, &taker).await).await;
        taker
    }

    /// What the first node holds from now on, as far as every router knows.
    async fn held(&mut self, seed: u64) -> Vec<[u8; 16]> {
        let blocks = prefix(seed, 8);
        let seen = self.holder.store(&blocks).await;
        for router in self.cluster.running() {
            self.cluster.lookup(router, &blocks, vec![seen]).await;
        }
        blocks
    }

    async fn ask(&self, router: u64, instance: u32, blocks: &[[u8; 16]], runs_there: bool) -> pb::Decision {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let report = pb::ReportRequest { node: instance, has_node: true, ..load(instance, sequence) };
        self.cluster.client(router).report(report).await.unwrap();
        let request = pb::RouteRequest {
            request: sequence,
            hashes: blocks.concat(),
            block_tokens: 256,
            input_tokens: 256 * u32::try_from(blocks.len()).unwrap() + 1,
            among: Some(pb::Among { instances: vec![instance] }),
            runs_there,
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
async fn what_is_asked_for_next_to_another_node_goes_there_as_far_as_there_is_budget() {
    let mut world = World::start(1, |config| on(config, 3)).await;
    let taker = world.taker(2, u32::MAX, CopyEnd::Full).await;
    let blocks = world.held(5).await;
    until("the first blocks are read from the own node", || async {
        let decision = world.ask(1, 2, &blocks, false).await;
        (sources(&decision) == [(2, 0, 3), (1, 3, 5)]).then_some(())
    })
    .await;
    let known = world.cluster.lookup(1, &blocks, vec![]).await;
    let nodes = |run: &(u32, u32, Vec<(u32, u64)>)| run.2.iter().map(|(node, _)| *node).collect::<Vec<_>>();
    assert_eq!(holders(&known).iter().map(nodes).collect::<Vec<_>>(), [vec![1, 2], vec![1]]);
    assert_eq!(taker.asked(), [(0, 3)], "once, and no more than there was budget for");
    world.cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_moves_for_who_only_asks_or_for_a_router_without_a_budget() {
    let mut world = World::start(2, |config| {
        if config.id == 1 {
            on(config, 64);
        }
    })
    .await;
    let taker = world.taker(2, u32::MAX, CopyEnd::Full).await;
    let (asked, off, hot) = (world.held(5).await, world.held(6).await, world.held(7).await);
    until("what was sent is copied", || async {
        world.ask(1, 2, &asked, true).await;
        world.ask(2, 2, &off, false).await;
        world.ask(1, 2, &hot, false).await;
        (!taker.asked().is_empty()).then_some(())
    })
    .await;
    let later = world.held(8).await;
    until("a later one is copied", || async {
        world.ask(1, 2, &asked, true).await;
        world.ask(2, 2, &off, false).await;
        world.ask(1, 2, &later, false).await;
        (taker.asked().len() > 1).then_some(())
    })
    .await;
    assert_eq!(taker.heads(), [hot[0], later[0]]);
    world.cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_refused_is_left_alone_and_nothing_goes_where_a_node_drains_or_nobody_reads() {
    let mut world = World::start(1, |config| on(config, 64)).await;
    let refuses = world.taker(2, 0, CopyEnd::Worth).await;
    let (drains, stays) =
        (Taker::new(u32::MAX, CopyEnd::Full), world.taker(4, u32::MAX, CopyEnd::Full).await);
    let leaver = join(&world.cluster, 3, &drains).await;
    let lone = world.taker(5, u32::MAX, CopyEnd::Full).await;
    let all = [world.held(5).await, world.held(6).await, world.held(7).await];
    for copies in 1..=all.len() {
        until("one more is tried", || async {
            evacuate(&world.cluster, &leaver, None).await.unwrap();
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
