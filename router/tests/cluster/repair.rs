//! Replicas corrupted on purpose in a running cluster: detected, silenced, repaired, counted once.
#![allow(clippy::unwrap_used)]

use kv_core::id::{BlockHash, NodeId};
use kvfleet_proto::pb;

use kvfleet_router::AntiEntropyConfig;
use kvfleet_testkit::cluster::{Cluster, FakeNode, prefix, until};

async fn world() -> (Cluster, FakeNode) {
    let truth = AntiEntropyConfig { digests_ms: 50, audit_ms: 0, ..AntiEntropyConfig::default() };
    let cluster = Cluster::start(3, |config| config.anti_entropy = truth.clone()).await;
    let mut node = cluster.node(1).await;
    for number in 0..20 {
        node.store(&prefix(number, 6)).await;
    }
    (cluster, node)
}

/// Lists an unannounced block on one replica, as a flipped bit would, and persists it.
async fn make_wrong(cluster: &Cluster, router: u64) {
    let of = cluster.routers[usize::try_from(router - 1).unwrap()].as_ref().unwrap();
    of.list_unannounced_block(1, NodeId(1), BlockHash([77; _])).await;
    until("a snapshot", || async { (shard(cluster, router).await?.snapshot_index > 0).then_some(()) }).await;
}

async fn shard(cluster: &Cluster, router: u64) -> Option<pb::GroupStatus> {
    Some(cluster.status(router).await?.groups[1].clone())
}

async fn drifts(cluster: &Cluster) -> u64 {
    let mut drifts = 0;
    for router in cluster.running() {
        drifts += shard(cluster, router).await.unwrap().drifts;
    }
    drifts
}

/// Waits until the replica equals the others and reports it.
async fn repaired(cluster: &Cluster, router: u64) {
    until("the repair", || async {
        let shard = shard(cluster, router).await?;
        (!shard.diverged && shard.agreed_index == shard.applied_index).then_some(())
    })
    .await;
    cluster.assert_equal_replicas().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_follower_is_repaired_durably() {
    let (mut cluster, mut node) = world().await;
    let leader = cluster.leader_of(1).await;
    let wrong = cluster.running().into_iter().find(|router| *router != leader).unwrap();
    make_wrong(&cluster, wrong).await;
    // Entries continue meanwhile: those applied beyond the leader's state are applied again.
    until("the drift", || async { (drifts(&cluster).await > 0).then_some(()) }).await;
    for number in 100..150 {
        node.store(&prefix(number, 6)).await;
    }
    repaired(&cluster, wrong).await;
    assert_eq!(drifts(&cluster).await, 1, "counted once");
    assert_eq!(cluster.leader_of(1).await, leader);
    let reply = cluster.lookup(wrong, &prefix(149, 6), vec![]).await;
    assert_eq!(kvfleet_testkit::cluster::holders(&reply), [(0, 6, vec![(1, node.epoch)])]);
    // The state on disk is repaired too.
    cluster.take(wrong).shutdown().await;
    cluster.start_router(wrong).await;
    repaired(&cluster, wrong).await;
    assert_eq!(drifts(&cluster).await, 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_leader_hands_over_and_silences_no_other() {
    let (cluster, node) = world().await;
    let wrong = cluster.leader_of(1).await;
    make_wrong(&cluster, wrong).await;
    let next = until("another leader", || async {
        for router in cluster.running() {
            let shard = shard(&cluster, router).await?;
            assert!(router == wrong || !shard.diverged, "router {router} was right and was silenced");
        }
        let leader = cluster.leader_of(1).await;
        (leader != wrong).then_some(leader)
    });
    assert_ne!(next.await, wrong);
    repaired(&cluster, wrong).await;
    let mut node = cluster.reconnect(1, node.epoch, node.seq).await;
    node.store(&prefix(200, 6)).await;
    cluster.assert_equal_replicas().await;
    assert!((1..=2).contains(&drifts(&cluster).await), "by itself, and possibly by the next leader");
    cluster.shutdown().await;
}

/// The log that a repair needs is kept although snapshots are due constantly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_under_load_keeps_its_log() {
    let truth = AntiEntropyConfig { digests_ms: 50, audit_ms: 0, ..AntiEntropyConfig::default() };
    let cluster = Cluster::start(3, |config| {
        (config.anti_entropy, config.snapshot_every_entries) = (truth.clone(), 100);
    })
    .await;
    let mut node = cluster.node(1).await;
    // Enough state that its transfer takes some time.
    for number in 0..200 {
        node.store(&prefix(number, 500)).await;
    }
    let leader = cluster.leader_of(1).await;
    let wrong = cluster.running().into_iter().find(|router| *router != leader).unwrap();
    let at = usize::try_from(leader - 1).unwrap();
    let leading = cluster.routers[at].as_ref().unwrap();
    let repair = async {
        make_wrong(&cluster, wrong).await;
        until("the drift", || async { (drifts(&cluster).await > 0).then_some(()) }).await;
        until("the repair", || async { (!shard(&cluster, wrong).await?.diverged).then_some(()) }).await;
    };
    tokio::select! {()= leading.submit_idle_entries(1) => unreachable!("it does not return"),
        () = repair => {}
    }
    let failed = shard(&cluster, wrong).await.unwrap().repairs_failed;
    repaired(&cluster, wrong).await;
    assert_eq!((failed, drifts(&cluster).await), (0, 1));
    cluster.shutdown().await;
}
