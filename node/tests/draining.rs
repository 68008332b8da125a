//! A node that drains, as its routers hear it: what it offers, in which order, and what it says that it left behind.

use std::time::Duration;

use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::{convert, pb};

use crate::world::*;

async fn draining(
    world: &World,
    evacuating: fn(u32) -> pb::EvacuateReply,
    change: impl FnOnce(&mut NodeConfig),
) -> (Node, FakeRouter) {
    let router = FakeRouter::default();
    router.state.lock().evacuating = Some(evacuating);
    let mut config = world.config(&[router.serve(&world.identity).await]);
    change(&mut config);
    let node = start(&config).await;
    router.joined().await;
    (node, router)
}

fn all_copied(blocks: u32) -> pb::EvacuateReply {
    let copied_bytes = u64::from(blocks) * frame(hash(0)).bytes.len() as u64;
    pb::EvacuateReply { copied_blocks: blocks, copied_bytes, ..pb::EvacuateReply::default() }
}

/// The runs that were offered, in order.
fn offered(router: &FakeRouter) -> Vec<Vec<u64>> {
    let number = |hash: &kv_core::id::BlockHash| u64::from_le_bytes(hash.0[..8].try_into().unwrap());
    let state = router.state.lock();
    let runs = state.evacuated.iter().filter_map(|request| request.run.as_ref());
    runs.map(|run| {
        let hashes = convert::hashes_from_bytes("blocks", &run.blocks).unwrap();
        hashes.iter().map(number).collect()
    })
    .collect()
}

#[tokio::test]
async fn what_was_used_last_is_offered_first_and_the_node_serves_until_it_has_left_and_after() {
    let world = World::new();
    let (node, router) = draining(&world, all_copied, |_| ()).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    save(&*path, 2, 20..22).await;
    save(&*path, 3, 10..13).await;
    let (given, has_left) = node.standing().drain(Duration::from_secs(20)).await;
    assert!(has_left);
    assert_eq!((given.copied_blocks, given.left_blocks, given.left_bytes), (9, 0, 0));
    assert_eq!(given.left_share, 0.0);
    let offered = offered(&router);
    // Several calls are under way at once, so the first ones may pass each other.
    assert_eq!(offered.iter().flatten().count(), 9);
    assert!(offered.iter().any(|run| *run == [0, 1, 2, 3]), "{offered:?}");
    {
        let state = router.state.lock();
        assert!(state.evacuated[0].run.is_none(), "first of all it says that it drains");
        assert!(state.evacuated.iter().all(|request| (request.node, request.epoch) == (3, 1)));
        assert_eq!(state.left, Some(1));
    }
    let (_, frames) = fetch(&*path, 9, 1, &hashes(0..4)).await;
    assert_eq!(frames, 4, "readers are served on");
    let before = router.state.lock().evacuated.len();
    let (again, has_left) = node.standing().drain(Duration::from_secs(20)).await;
    assert_eq!((again, has_left), (given, true), "may be said again");
    assert_eq!(router.state.lock().evacuated.len(), before);
    node.shutdown().await;
}

#[tokio::test]
async fn what_nobody_takes_is_told_with_its_share_of_the_value() {
    let world = World::new();
    let half = |blocks: u32| match blocks {
        // One is elsewhere, one is copied and nobody takes the others.
        4 => pb::EvacuateReply {
            elsewhere_blocks: 1,
            copied_blocks: 1,
            copied_bytes: 10,
            ..pb::EvacuateReply::default()
        },
        _ => pb::EvacuateReply::default(),
    };
    let (node, _router) = draining(&world, half, |_| ()).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    let (given, has_left) = node.standing().drain(Duration::from_secs(20)).await;
    let bytes = frame(hash(0)).bytes.len() as u64;
    assert_eq!((given.elsewhere_blocks, given.copied_blocks, given.copied_bytes), (1, 1, 10));
    assert_eq!((given.left_blocks, given.left_bytes, has_left), (2, 2 * bytes, true));
    assert!((given.left_share - 0.5).abs() < 1e-9, "{given}");
    assert!(given.to_string().contains("50.0 % of the value"), "{given}");
    node.shutdown().await;
}

#[tokio::test]
async fn no_more_is_given_than_configured_and_the_most_valuable_of_it() {
    let world = World::new();
    let bytes = frame(hash(0)).bytes.len() as u64;
    let (node, router) = draining(&world, all_copied, |config| config.drain_bytes = 3 * bytes).await;
    let path = world.dial(node.data_addr()).await;
    for number in 0..8 {
        save(&*path, number, 10 * number..10 * number + 1).await;
    }
    let (given, _) = node.standing().drain(Duration::from_secs(20)).await;
    assert_eq!((given.copied_blocks, given.left_blocks), (3, 5));
    let mut offered = offered(&router);
    offered.sort();
    assert_eq!(offered, [[50], [60], [70]]);
    node.shutdown().await;
    let (node, router) = draining(&world, all_copied, |config| config.drain_ms = 0).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    let (_, has_left) = node.standing().drain(Duration::from_secs(20)).await;
    assert!(has_left && router.state.lock().evacuated.iter().all(|request| request.run.is_none()));
    node.shutdown().await;
}

#[tokio::test]
async fn a_router_that_never_answers_costs_the_time_that_there_is_and_no_more() {
    let world = World::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.identity).await])).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    // It knows of no such call, as one of an earlier release.
    let (given, has_left) = node.standing().drain(Duration::from_secs(20)).await;
    assert_eq!((given.copied_blocks, given.left_blocks, has_left), (0, 4, true));
    assert!((given.left_share - 1.0).abs() < 1e-9);
    node.shutdown().await;
    let alone = start(&world.config(&[])).await;
    let (given, has_left) = alone.standing().drain(Duration::from_secs(20)).await;
    assert_eq!((given, has_left), (kvfleet_node::Evacuated::default(), true), "whoever has no routers");
    alone.shutdown().await;
}
