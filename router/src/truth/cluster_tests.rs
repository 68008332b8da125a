//! Replicas that are made wrong on purpose, in a running cluster: found, silenced, repaired, counted once.
#![allow(clippy::unwrap_used)]

use kv_core::id::{BlockHash, Epoch, NodeId, TenantId, Tier};
use kv_core::index::command::{Announcement, Applied, Change, Command};
use kvfleet_proto::pb;

use crate::TruthConfig;
use crate::harness::{Cluster, Node, prefix, until};
use crate::raft::handle::Consensus;

async fn world() -> (Cluster, Node) {
    let truth = TruthConfig { digests_ms: 50, audit_ms: 0, ..TruthConfig::default() };
    let cluster = Cluster::start(3, |config| config.truth = truth.clone()).await;
    let mut node = cluster.node(1).await;
    for number in 0..20 {
        node.store(&prefix(number, 6)).await;
    }
    (cluster, node)
}

/// Lists a block on one replica that no node announced, as a flipped bit would, and writes that down.
async fn make_wrong(cluster: &Cluster, router: u64) {
    let groups = &cluster.routers[usize::try_from(router - 1).unwrap()].as_ref().unwrap().groups;
    let group = groups.get(1).unwrap();
    let applied = group.published.entry().slice(|replica| {
        let (epoch, seq) = replica.index.next_seq(NodeId(1)).unwrap();
        let stored = Change::Stored { parent: None, blocks: vec![BlockHash([77; 16])], tier: Tier::Dram };
        let announcement =
            Announcement { node: NodeId(1), epoch: Epoch(epoch.0), seq, changes: vec![stored] };
        replica.index.apply(&Command::Announce(vec![announcement]))
    });
    assert!(matches!(applied, Applied::Announced(_)), "{applied:?}");
    group.consensus.snapshot_now().await;
    until("a snapshot", || async { (group.consensus.standing().snapshot_index > 0).then_some(()) }).await;
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

/// Waits until the replica is like the others and says so.
async fn repaired(cluster: &Cluster, router: u64) {
    until("the repair", || async {
        let shard = shard(cluster, router).await?;
        (!shard.diverged && shard.agreed_index == shard.applied_index).then_some(())
    })
    .await;
    cluster.assert_equal_replicas().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_follower_takes_the_leaders_state_and_keeps_it() {
    let (mut cluster, mut node) = world().await;
    let leader = cluster.leader_of(1).await;
    let wrong = cluster.running().into_iter().find(|router| *router != leader).unwrap();
    make_wrong(&cluster, wrong).await;
    // Entries go on meanwhile: what is applied beyond the leader's state is applied again.
    until("the drift", || async { (drifts(&cluster).await > 0).then_some(()) }).await;
    for number in 100..150 {
        node.store(&prefix(number, 6)).await;
    }
    repaired(&cluster, wrong).await;
    assert_eq!(drifts(&cluster).await, 1, "found once");
    assert_eq!(cluster.leader_of(1).await, leader);
    let reply = cluster.lookup(wrong, &prefix(149, 6), vec![]).await;
    assert_eq!(crate::harness::holders(&reply), [(0, 6, vec![(1, node.epoch)])]);
    // What is on disk is repaired too.
    cluster.take(wrong).shutdown().await;
    cluster.start_router(wrong).await;
    repaired(&cluster, wrong).await;
    assert_eq!(drifts(&cluster).await, 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_leader_lets_another_lead_and_silences_nobody() {
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
    assert!((1..=2).contains(&drifts(&cluster).await), "by itself, and perhaps by the next leader");
    cluster.shutdown().await;
}

/// Entries of no weight, as fast as they are taken; until it is dropped.
async fn press(leader: Consensus) {
    let command = Command::SetQuota { tenant: TenantId(7), bytes: Some(1) };
    loop {
        let mut pending = Vec::new();
        for _ in 0..64 {
            pending.push(leader.submit(&command).await.unwrap());
        }
        for one in pending {
            Consensus::answer(one).await.unwrap();
        }
    }
}

/// The log that a repair needs is kept for it, although snapshots fall due all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_under_load_does_not_lose_what_it_needs() {
    let truth = TruthConfig { digests_ms: 50, audit_ms: 0, ..TruthConfig::default() };
    let cluster = Cluster::start(3, |config| {
        (config.truth, config.snapshot_every_entries) = (truth.clone(), 100);
    })
    .await;
    let mut node = cluster.node(1).await;
    // Enough for a state that is some time under way.
    for number in 0..200 {
        node.store(&prefix(number, 500)).await;
    }
    let leader = cluster.leader_of(1).await;
    let wrong = cluster.running().into_iter().find(|router| *router != leader).unwrap();
    let at = usize::try_from(leader - 1).unwrap();
    let group = &cluster.routers[at].as_ref().unwrap().groups.get(1).unwrap();
    let load = tokio::spawn(press(group.consensus.clone()));
    make_wrong(&cluster, wrong).await;
    until("the drift", || async { (drifts(&cluster).await > 0).then_some(()) }).await;
    until("the repair", || async { (!shard(&cluster, wrong).await?.diverged).then_some(()) }).await;
    load.abort();
    let failed = shard(&cluster, wrong).await.unwrap().repairs_failed;
    repaired(&cluster, wrong).await;
    assert_eq!((failed, drifts(&cluster).await), (0, 1));
    cluster.shutdown().await;
}
