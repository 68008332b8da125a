//! A draining node as its routers see it: the offers, their order, and the report of remaining
//! blocks.

use std::time::Duration;

use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::{convert, pb};

use crate::world::*;

async fn draining(
    world: &TestCluster,
    evacuating: fn(u32) -> pb::DrainReply,
    change: impl FnOnce(&mut NodeConfig),
) -> (Node, FakeRouter) {
    let router = FakeRouter::default();
    router.state.lock().drain_reply = Some(evacuating);
    let mut config = world.config(&[router.serve(&world.router).await]);
    change(&mut config);
    let node = start(&config).await;
    router.joined().await;
    (node, router)
}

fn all_copied(blocks: u32) -> pb::DrainReply {
    let copied_bytes = u64::from(blocks) * frame(hash(0)).bytes.len() as u64;
    pb::DrainReply { copied_blocks: blocks, copied_bytes, ..pb::DrainReply::default() }
}

/// The offered runs, in order.
fn offered(router: &FakeRouter) -> Vec<Vec<u64>> {
    let number = |hash: &kv_core::id::BlockHash| u64::from_le_bytes(hash.0[..8].try_into().unwrap());
    let state = router.state.lock();
    let runs = state.drain_requests.iter().filter_map(|request| request.run.as_ref());
    runs.map(|run| {
        let hashes = convert::hashes_from_bytes("blocks", &run.blocks).unwrap();
        hashes.iter().map(number).collect()
    })
    .collect()
}

#[tokio::test]
async fn drain_offers_recent_blocks_first_and_reads_continue() {
    let world = TestCluster::new();
    let (node, router) = draining(&world, all_copied, |_| ()).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    save(&*path, 2, 20..22).await;
    save(&*path, 3, 10..13).await;
    let (given, has_left) = node.membership().drain(Duration::from_secs(20)).await;
    assert!(has_left);
    assert_eq!((given.copied_blocks, given.left_blocks, given.left_bytes), (9, 0, 0));
    assert_eq!(given.left_share, 0.0);
    let offered = offered(&router);
    // Several calls are in flight at once, so the first ones may overtake each other.
    assert_eq!(offered.iter().flatten().count(), 9);
    assert!(offered.iter().any(|run| *run == [0, 1, 2, 3]), "{offered:?}");
    {
        let state = router.state.lock();
        assert!(state.drain_requests[0].run.is_none(), "the first call announces the drain");
        assert!(state.drain_requests.iter().all(|request| (request.node, request.epoch) == (3, 1)));
        assert_eq!(state.left, Some(1));
    }
    let (_, frames) = fetch(&*path, 9, 1, &hashes(0..4)).await;
    assert_eq!(frames, 4, "readers are still served");
    let before = router.state.lock().drain_requests.len();
    let (again, has_left) = node.membership().drain(Duration::from_secs(20)).await;
    assert_eq!((again, has_left), (given, true), "a second drain returns the same report");
    assert_eq!(router.state.lock().drain_requests.len(), before);
    node.shutdown().await;
}

#[tokio::test]
async fn drain_reports_blocks_left_with_their_value() {
    let world = TestCluster::new();
    let half = |blocks: u32| match blocks {
        // One block is elsewhere, one is copied, and no router takes the others.
        4 => pb::DrainReply {
            elsewhere_blocks: 1,
            copied_blocks: 1,
            copied_bytes: 10,
            ..pb::DrainReply::default()
        },
        _ => pb::DrainReply::default(),
    };
    let (node, _router) = draining(&world, half, |_| ()).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    let (given, has_left) = node.membership().drain(Duration::from_secs(20)).await;
    let bytes = frame(hash(0)).bytes.len() as u64;
    assert_eq!((given.elsewhere_blocks, given.copied_blocks, given.copied_bytes), (1, 1, 10));
    assert_eq!((given.left_blocks, given.left_bytes, has_left), (2, 2 * bytes, true));
    assert!((given.left_share - 0.5).abs() < 1e-9, "{given}");
    assert!(given.to_string().contains("50.0 % of the value"), "{given}");
    node.shutdown().await;
}

#[tokio::test]
async fn drain_respects_its_limit_and_offers_the_most_valuable() {
    let world = TestCluster::new();
    let bytes = frame(hash(0)).bytes.len() as u64;
    let (node, router) = draining(&world, all_copied, |config| config.drain_bytes = 3 * bytes).await;
    let path = world.dial(node.data_addr()).await;
    for number in 0..8 {
        save(&*path, number, 10 * number..10 * number + 1).await;
    }
    let (given, _) = node.membership().drain(Duration::from_secs(20)).await;
    assert_eq!((given.copied_blocks, given.left_blocks), (3, 5));
    let mut offered = offered(&router);
    offered.sort();
    assert_eq!(offered, [[50], [60], [70]]);
    node.shutdown().await;
    let (node, router) = draining(&world, all_copied, |config| config.drain_ms = 0).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    let (_, has_left) = node.membership().drain(Duration::from_secs(20)).await;
    assert!(has_left && router.state.lock().drain_requests.iter().all(|request| request.run.is_none()));
    node.shutdown().await;
}

#[tokio::test]
async fn drain_without_a_capable_router_still_leaves() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    // It does not implement the call, like a router of an earlier release.
    let (given, has_left) = node.membership().drain(Duration::from_secs(20)).await;
    assert_eq!((given.copied_blocks, given.left_blocks, has_left), (0, 4, true));
    assert!((given.left_share - 1.0).abs() < 1e-9);
    node.shutdown().await;
    let alone = start(&world.config(&[])).await;
    let (given, has_left) = alone.membership().drain(Duration::from_secs(20)).await;
    assert_eq!((given, has_left), (kvfleet_node::DrainReport::default(), true), "a node without routers");
    alone.shutdown().await;
}
