//! Hints and orders of routers: windows of queued requests, and times to live.

use crate::world::*;
use kv_core::id::{LeaseId, RouterId, Tier};
use kv_core::tier::WINDOW_SPAN;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_node::NodeConfig;
use kvfleet_proto::convert;
use kvfleet_proto::pb;
use kvfleet_transport::FetchAnswer;

fn window(waiting: &[std::ops::Range<u64>]) -> pb::SetWindowRequest {
    let request = |numbers: &std::ops::Range<u64>| pb::WaitingRequest {
        blocks: convert::hashes_to_bytes(&hashes(numbers.clone())),
        starts_after_ms: 0,
    };
    pb::SetWindowRequest { router: 1, waiting: waiting.iter().map(request).collect() }
}

#[tokio::test]
async fn window_prefetches_blocks_and_expires() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let listen = [router.serve(&world.router).await];
    let node =
        start(&NodeConfig { dram_blocks: Some(10), ssd_blocks: Some(40), ..world.config(&listen) }).await;
    let epoch = router.joined().await;
    let path = world.dial(node.data_addr()).await;
    for number in 0..30 {
        save(&*path, number, number..number + 1).await;
    }
    // By announcements: a status counts a block for SSD as soon as it is assigned there, but it is
    // read from DRAM until written.
    router
        .wait_for("twenty blocks are on SSD", |state| {
            state.blocks.values().filter(|tier| **tier == Tier::Ssd).count() == 20
        })
        .await;
    let mut control = control_as(&world.router, node.control_addr()).await;
    let reply = control.set_window(window(&[0..4, 90..92, 2..6])).await.unwrap().into_inner();
    assert_eq!((reply.requests, reply.blocks, reply.dram_blocks, reply.ssd_blocks), (3, 8, 0, 6));
    assert_eq!(u128::from(reply.ends_after_ms), WINDOW_SPAN.as_millis());
    eventually("all needed blocks are in DRAM without a request for them", async || {
        // Repeated, as a router does, because the speed of this machine is not under test.
        let reply = control.set_window(window(&[0..4, 90..92, 2..6])).await.unwrap().into_inner();
        let status = status(&world, &node).await;
        (reply.dram_blocks == 6 && status.prefetched_blocks >= 6 && status.window_blocks == 8).then_some(())
    })
    .await;
    // The bytes arrive after the assignment; a reader sees DRAM once they are there.
    eventually("the bytes are in DRAM", async || {
        control.set_window(window(&[0..4, 90..92, 2..6])).await.unwrap();
        let (answer, frames) = fetch(&*path, 100, epoch, &hashes(0..6)).await;
        path.release(LeaseId(100)).await.unwrap();
        assert_eq!(frames, 6);
        (answer == FetchAnswer::Hit { tiers: vec![Tier::Dram; 6] }).then_some(())
    })
    .await;
    eventually("the window expired", async || (status(&world, &node).await.window_blocks == 0).then_some(()))
        .await;
    let cut = pb::SetWindowRequest {
        router: 1,
        waiting: vec![pb::WaitingRequest { blocks: vec![0; 15], starts_after_ms: 0 }],
    };
    says("a window with truncated hashes", &control.set_window(cut).await.unwrap_err().message(), &[]);
    // A node, an instance or a person of the same cluster.
    let mut other = world.control(node.control_addr()).await;
    let refused = other.set_window(window(&[0..2, 2..4])).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    says("a window from a caller that is not a router", &refused.message(), &[]);
    let second = files(world.dir.path(), &Role::Router(Some(RouterId(2)))).load().unwrap();
    let mut second = control_as(&second, node.control_addr()).await;
    let refused = second.set_window(window(&[0..2, 2..4])).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    assert!(refused.message().starts_with("the call names router-1"), "{refused}");
    assert_eq!(status(&world, &node).await.window_blocks, 0);
    node.shutdown().await;
}

#[tokio::test]
async fn expired_group_blocks_are_dropped_except_pinned_ones() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    for number in 0..4 {
        save(&*path, number, number..number + 1).await;
    }
    router.wait_for("all are announced", |state| state.blocks.len() == 4).await;
    let pins = vec![pb::PinnedBlocks {
        pin: 1,
        blocks: convert::hashes_to_bytes(&[hash(2)]),
        ..pb::PinnedBlocks::default()
    }];
    let ttl = |number: u64| pb::GroupTtl { group: hash(number).ttl_group().0, ttl_ms: 30 };
    let ttls = vec![ttl(1), ttl(2)];
    router.state.lock().directives = Some(pb::Directives { version: 4, pins, quotas: vec![], ttls });
    router
        .wait_for("block 1 is withdrawn", |state| {
            !state.blocks.contains_key(&hash(1)) && state.blocks.len() == 3
        })
        .await;
    let status = status(&world, &node).await;
    assert_eq!((status.tiers[0].blocks, status.pinned_blocks, status.ttl_groups), (3, 1, 2));
    assert_eq!(status.classes.iter().map(|class| class.ttl).sum::<u64>(), 1);
    node.shutdown().await;
}
