//! A node with a recording router: the announcements, their order, and their recovery after losses.

use std::os::unix::fs::FileExt;

use crate::world::*;
use kv_core::id::{HASH_BYTES, IdentityDigest, LeaseId, TenantId, Tier};
use kv_core::index::command::Refusal;
use kvfleet_errors_doc::says;
use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::convert;
use kvfleet_proto::pb::{self, announce_reply};
use kvfleet_transport::{FetchAnswer, MissReason, SaveAnswer, SaveRefusal};

async fn settle(world: &TestCluster, node: &Node) -> pb::FlushReply {
    let mut control = world.control(node.control_addr()).await;
    control.flush(pb::FlushRequest { timeout_ms: 30_000 }).await.unwrap().into_inner()
}

#[tokio::test]
async fn saves_become_visible_at_the_promised_number() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    let epoch = router.joined().await;
    let path = world.dial(node.data_addr()).await;
    let at = eventually("the node knows its epoch", async || save(&*path, 1, 0..4).await.visible_at).await;
    assert_eq!((at.node.0, at.epoch.0), (3, epoch));
    router.wait_for("the batch arrives", |state| state.next > at.seq.0).await;
    assert_eq!(router.state.lock().blocks.len(), 4);
    let join = router.state.lock().joins[0].clone();
    assert_eq!(join.data_address, node.data_addr().to_string());
    assert_eq!(join.control_address, node.control_addr().to_string());
    let settled = settle(&world, &node).await;
    assert!(settled.flushed && settled.epoch == epoch && settled.acknowledged_seq >= at.seq.0, "{settled:?}");
    router.wait_for("heartbeats go on", |state| state.heartbeats > 3).await;
    let (answer, _) = fetch(&*path, 9, epoch, &hashes(0..4)).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: vec![Tier::Dram; 4] });
}

#[tokio::test]
async fn blocks_saved_without_routers_are_announced_later() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    router.state.lock().leader_elsewhere = Some(String::from("127.0.0.1:1"));
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    let path = world.dial(node.data_addr()).await;
    assert_eq!(save(&*path, 1, 0..4).await.stored_blocks, 4);
    router.state.lock().leader_elsewhere = None;
    router.wait_for("all blocks are announced", |state| state.blocks.len() == 4).await;
}

#[tokio::test]
async fn node_follows_the_leader() {
    let world = TestCluster::new();
    let (leader, follower) = (FakeRouter::default(), FakeRouter::default());
    let leader_address = leader.serve(&world.router).await;
    follower.state.lock().leader_elsewhere = Some(leader_address);
    let node = start(&world.config(&[follower.serve(&world.router).await])).await;
    leader.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..2).await;
    leader.wait_for("the leader hears", |state| state.blocks.len() == 2).await;
    assert_eq!(follower.state.lock().epoch, 0);
}

#[tokio::test]
async fn new_leader_gets_the_rest_under_the_same_epoch() {
    let world = TestCluster::new();
    let (old, new) = (FakeRouter::default(), FakeRouter::default());
    let new_address = new.serve(&world.router).await;
    let node = start(&world.config(&[old.serve(&world.router).await])).await;
    old.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..2).await;
    settle(&world, &node).await;
    {
        // The new leader has the old one's log except the last batch.
        let mut state = new.state.lock();
        (state.epoch, state.next) = (1, old.state.lock().next - 1);
    }
    old.state.lock().leader_elsewhere = Some(new_address.clone());
    let away = announce_reply::Body::NotLeader(pb::NotLeader { leader: 2, address: new_address });
    old.state.lock().scripted = vec![away];
    save(&*path, 2, 2..4).await;
    new.wait_for("all blocks are announced", |state| state.blocks.len() == 4).await;
    assert!(new.state.lock().joins.is_empty(), "no new epoch was needed");
}

#[tokio::test]
async fn fenced_node_joins_again_and_announces_everything() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..3).await;
    settle(&world, &node).await;
    router.state.lock().epoch = 7;
    router.wait_for("a new epoch", |state| state.epoch == 8 && state.blocks.len() == 3).await;
    eventually("requests of the old epoch miss", async || {
        let (answer, _) = fetch(&*path, 2, 1, &hashes(0..1)).await;
        (answer == FetchAnswer::Miss { reason: MissReason::StaleEpoch }).then_some(())
    })
    .await;
    assert_eq!(fetch(&*path, 3, 8, &hashes(0..3)).await.1, 3);
}

#[tokio::test]
async fn gaps_and_busy_leaders_lose_nothing() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..2).await;
    settle(&world, &node).await;
    let busy = pb::Busy { retry_after_ms: 5, seq: router.state.lock().next };
    router.state.lock().scripted = vec![announce_reply::Body::Busy(busy)];
    save(&*path, 2, 10..12).await;
    router.wait_for("the busy batch was sent again", |state| state.blocks.len() == 4).await;
    {
        let mut state = router.state.lock();
        state.next -= 1;
        state.blocks.clear();
    }
    save(&*path, 3, 20..21).await;
    router.wait_for("the gap was filled", |state| state.blocks.len() == 5).await;
}

#[tokio::test]
async fn every_batch_carries_the_digest_of_announced_blocks() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let routers = [router.serve(&world.router).await];
    // Small tiers, so that blocks are demoted and dropped.
    let config = NodeConfig { dram_blocks: Some(8), ssd_blocks: Some(16), ..world.config(&routers) };
    let node = start(&config).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    for round in 0..12 {
        save(&*path, 1 + round, round * 4..round * 4 + 4).await;
        settle(&world, &node).await;
    }
    router.wait_for("blocks on SSD", |state| state.blocks.values().any(|tier| *tier == Tier::Ssd)).await;
    assert!(router.state.lock().digests.0 > 3);
    // A router that found a mismatch requests everything again, under new numbers.
    router.state.lock().request_resync = true;
    save(&*path, 100, 1_000..1_002).await;
    router.wait_for("everything is announced again", |state| state.cleared > 0).await;
    save(&*path, 101, 2_000..2_002).await;
    settle(&world, &node).await;
    let state = router.state.lock();
    assert!(state.blocks.contains_key(&hash(1_000)) && state.blocks.contains_key(&hash(2_001)));
    assert_eq!((state.digests.1, state.cleared), (0, 1), "of {} batches", state.digests.0);
}

#[tokio::test]
async fn audit_reports_held_blocks() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    let epoch = router.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..4).await;
    let mut control = control_as(&world.router, node.control_addr()).await;
    let asked = convert::hashes_to_bytes(&hashes(0..6));
    let request = pb::AuditRequest { shard: 1, blocks: asked.clone(), sample: 10, seed: 5 };
    // Before the node knows its epoch, it announces to no shard.
    let reply = eventually("an audit", async || control.audit(request.clone()).await.ok()).await.into_inner();
    assert_eq!((reply.epoch, &reply.held[..]), (epoch, &[true, true, true, true, false, false][..]));
    let mut sample = convert::hashes_from_bytes("sample", &reply.sample).unwrap();
    sample.sort_unstable();
    let mut held = hashes(0..4);
    held.sort_unstable();
    assert_eq!(sample, held);
    router.wait_for("the batch named in the audit", |state| state.next > reply.seq).await;
    assert_eq!(router.state.lock().blocks.len(), 4, "all audited blocks are announced by this batch");
    let two = control.audit(pb::AuditRequest { sample: 2, ..request.clone() }).await.unwrap().into_inner();
    assert_eq!(two.sample.len(), 2 * HASH_BYTES);
    let many = control.audit(pb::AuditRequest { sample: 5_000, ..request.clone() }).await.unwrap_err();
    says("an audit of too many blocks", &many.message(), &[]);
    let nowhere = control.audit(pb::AuditRequest { shard: 9, ..request }).await.unwrap_err();
    says("an audit of a shard that is not there", &nowhere.message(), &[]);
}

#[tokio::test]
async fn expired_pin_is_not_revived_by_a_router() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&world.config(&[router.serve(&world.router).await])).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..1).await;
    // A quota of this many bytes shows that the directives were applied.
    let tell = |version: u64, left_ms| {
        let blocks = convert::hashes_to_bytes(&[hash(0)]);
        let pins = vec![pb::PinnedBlocks { pin: 1, blocks, soft: true, ends_ms: Some(7), left_ms }];
        let quotas = vec![pb::Quota { tenant: 5, bytes: version }];
        router.state.lock().directives = Some(pb::Directives { version, pins, quotas, ttls: vec![] });
    };
    let pinned = async |version: u64| {
        eventually("the directives are applied", async || {
            let mut control = world.control(node.control_addr()).await;
            let status = control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner();
            let is_taken = status.tenants.iter().any(|tenant| tenant.quota_bytes == version);
            is_taken.then_some((status.pinned_blocks, status.soft_pinned_blocks, status.next_pin_end_ms))
        })
        .await
    };
    let mut request = save_request(60, 90, &hashes(90..91));
    request.context.tenant = TenantId(5);
    path.save(request, &|_| frame(hash(90))).await.unwrap();
    tell(1_000_000, 3_600_000);
    let (blocks, soft, end) = pinned(1_000_000).await;
    assert!((blocks, soft) == (1, 1) && end.is_some_and(|left| left <= 3_600_000), "{end:?}");
    tell(2_000_000, 1);
    pinned(2_000_000).await;
    eventually("the pin is over", async || (pinned(2_000_000).await == (0, 0, None)).then_some(())).await;
    tell(3_000_000, 3_600_000);
    assert_eq!(pinned(3_000_000).await, (0, 0, None), "a router with a clock that was set back");
    node.shutdown().await;
}

#[tokio::test]
async fn directives_pin_and_limit() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let config = NodeConfig { dram_blocks: Some(2), ..world.config(&[router.serve(&world.router).await]) };
    let node = start(&config).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    let pins = vec![pb::PinnedBlocks {
        pin: 1,
        blocks: convert::hashes_to_bytes(&[hash(0)]),
        ..pb::PinnedBlocks::default()
    }];
    let quotas = vec![pb::Quota { tenant: 5, bytes: 1 }];
    router.state.lock().directives = Some(pb::Directives { version: 4, pins, quotas, ttls: vec![] });
    save(&*path, 1, 0..1).await;
    let mut control = world.control(node.control_addr()).await;
    eventually("the pin is applied", async || {
        let status = control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner();
        (status.pinned_blocks == 1).then_some(())
    })
    .await;
    for number in 1..5 {
        save(&*path, 1 + number, number * 10..number * 10 + 1).await;
    }
    let epoch = router.state.lock().epoch;
    assert_eq!(fetch(&*path, 50, epoch, &[hash(0)]).await.1, 1, "the pinned block stayed");
    let all = hashes(90..91);
    let mut request = save_request(60, 90, &all);
    request.context.tenant = TenantId(5);
    let answer = path.save(request, &|position| frame(all[position])).await.unwrap();
    assert_eq!(answer, SaveAnswer::Refused(SaveRefusal::Quota), "tenant 5 may hold one byte");
}

#[tokio::test]
async fn refused_node_logs_once_and_keeps_serving() {
    let (world, router, log) = (TestCluster::new(), FakeRouter::default(), Log::start());
    let (ours, theirs) = (IdentityDigest([7; 16]), our_identity());
    router.state.lock().refusal = Some(Refusal::Identity { ours, theirs }.to_string());
    let address = router.serve(&world.router).await;
    let node = start(&world.config(std::slice::from_ref(&address))).await;
    router.wait_for("the node tries again", |state| state.joins.len() > 2).await;
    let varying = [address, ours.to_string(), theirs.to_string()];
    let varying = varying.each_ref().map(String::as_str);
    says("a node of another identity, in its own log", &log.line("refuse this node"), &varying);
    assert_eq!(log.count("refuse this node"), 1);
    let path = world.dial(node.data_addr()).await;
    assert_eq!(save(&*path, 1, 0..1).await.stored_blocks, 1);
    router.state.lock().refusal = None;
    router.wait_for("the node is accepted", |state| state.blocks.len() == 1).await;
}

/// A node with two blocks in DRAM and the others on SSD, as announced to the router.
async fn spread(world: &TestCluster, router: &FakeRouter) -> (Node, NodeConfig) {
    let address = router.serve(&world.router).await;
    let config = NodeConfig { dram_blocks: Some(2), ssd_blocks: Some(30), ..world.config(&[address]) };
    let node = start(&config).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    for number in 0..10 {
        save(&*path, number, number..number + 1).await;
    }
    router
        .wait_for("eight blocks are on SSD", |state| {
            state.blocks.values().filter(|tier| **tier == Tier::Ssd).count() == 8
        })
        .await;
    (node, config)
}

async fn after_restart(world: &TestCluster, router: &FakeRouter, config: &NodeConfig) -> Node {
    let node = start_again(config).await;
    router
        .wait_for("the second epoch knows the SSD blocks", |state| {
            state.epoch == 2
                && state.blocks.len() >= 8
                && state.blocks.values().all(|tier| *tier == Tier::Ssd)
        })
        .await;
    let path = world.dial(node.data_addr()).await;
    let epoch = 2;
    for number in 0..8 {
        let (answer, frames) = fetch(&*path, 100 + number, epoch, &[hash(number)]).await;
        assert_eq!(frames, 1, "block {number}: {answer:?}");
        path.release(LeaseId(100 + number)).await.unwrap();
    }
    node
}

#[tokio::test]
async fn blocks_on_ssd_are_hits_again_after_a_restart() {
    let (world, router) = (TestCluster::new(), FakeRouter::default());
    let (node, config) = spread(&world, &router).await;
    node.shutdown().await;
    after_restart(&world, &router, &config).await.shutdown().await;
}

#[tokio::test]
async fn blocks_on_ssd_survive_an_abrupt_stop() {
    let (world, router) = (TestCluster::new(), FakeRouter::default());
    let (node, config) = spread(&world, &router).await;
    drop(node);
    after_restart(&world, &router, &config).await;
}

#[tokio::test]
async fn corrupt_ssd_blocks_are_never_served_and_are_withdrawn() {
    let (world, router) = (TestCluster::new(), FakeRouter::default());
    let (node, config) = spread(&world, &router).await;
    node.shutdown().await;
    let log = Log::start();
    let node = start_again(&config).await;
    router
        .wait_for("the blocks are announced again", |state| state.epoch == 2 && state.blocks.len() >= 8)
        .await;
    // Listed before the corruption: the scrubber withdraws the blocks it finds.
    let known: Vec<_> = router.state.lock().blocks.keys().copied().collect();
    let file = std::fs::OpenOptions::new().write(true).open(config.data_dir.join("segments.kvs")).unwrap();
    for page in 16..file.metadata().unwrap().len() / 4096 {
        file.write_all_at(b"not what was saved", page * 4096 + 3000).unwrap();
    }
    let path = world.dial(node.data_addr()).await;
    for (lease, block) in (0u64..).zip(&known) {
        assert_eq!(fetch(&*path, 500 + lease, 2, &[*block]).await.1, 0);
    }
    let saved: Vec<String> = hashes(0..10).iter().map(ToString::to_string).collect();
    let varying: Vec<&str> = saved.iter().map(String::as_str).collect();
    says("bytes that rotted on SSD", &log.line("unusable"), &varying);
    router.wait_for("all corrupt blocks are taken back", |state| state.blocks.is_empty()).await;
}
