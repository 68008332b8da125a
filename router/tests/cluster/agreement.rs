//! Every replica gives the same answers, follows the leader, and names it.

use kvfleet_proto::pb;
use tonic::Code;

use kvfleet_testkit::cluster::{Cluster, holders, prefix, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_replicas_give_equal_answers() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut first = cluster.node(1).await;
    let mut second = cluster.node(2).await;
    let seed = 11;
    println!("seed {seed}");
    let blocks = prefix(seed, 40);
    let seen = vec![first.store(&blocks).await, second.store(&blocks[..25]).await];
    let mut answers = Vec::new();
    for id in 1..=3 {
        let reply = cluster.lookup(id, &blocks, seen.clone()).await;
        assert_eq!(reply.freshness.unwrap().router, id);
        answers.push(holders(&reply));
    }
    let expected = vec![(0, 25, vec![(1, 1), (2, 1)]), (25, 15, vec![(1, 1)])];
    assert_eq!(answers, vec![expected; 3]);
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_redirects_changes_to_the_leader() {
    let cluster = Cluster::start(3, |_| {}).await;
    let (leader, follower) = (cluster.leader().await, cluster.follower().await);
    let request = pb::SetQuotaRequest { tenant: 1, bytes: 5, clear: false };
    let status = cluster.client(follower).set_quota(request).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    let address = cluster.configs[usize::try_from(leader - 1).unwrap()].listen.clone();
    assert_eq!(status.metadata().get("kvfleet-leader").unwrap().to_str().unwrap(), address);
    let status = cluster.status(follower).await.unwrap();
    assert_eq!((status.leader, status.leader_address, status.voters.len()), (leader, address, 3));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_the_leader_loses_nothing() {
    let mut cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(12, 64);
    let seen = node.store(&blocks).await;
    let pin = pb::PinRequest {
        pin: 9,
        owner: "test".into(),
        blocks: blocks[..2].concat(),
        ..pb::PinRequest::default()
    };
    cluster
        .on_leader(|mut client| {
            let pin = pin.clone();
            async move { client.pin(pin).await }
        })
        .await;
    let old = cluster.leader().await;
    cluster.take(old).halt().await;
    let new = cluster.leader().await;
    assert_ne!(new, old);
    let reply = cluster.lookup(new, &blocks, vec![seen]).await;
    assert_eq!(holders(&reply), [(0, 64, vec![(1, 1)])]);
    assert_eq!(cluster.status(new).await.unwrap().pins, 1);
    // The node continues under the same epoch.
    let mut node = cluster.reconnect(1, node.epoch, node.seq).await;
    node.store(&prefix(13, 8)).await;
    cluster.start_router(old).await;
    cluster.leader().await;
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_stops_hands_over() {
    let mut cluster = Cluster::start(3, |_| {}).await;
    let old = cluster.leader().await;
    let term = cluster.status(old).await.unwrap().term;
    cluster.take(old).shutdown().await;
    let new = cluster.leader().await;
    assert_ne!(new, old);
    assert_eq!(cluster.status(new).await.unwrap().term, term + 1, "one election, called by the old leader");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freshness_shows_the_applied_state_of_a_replica() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let leader = cluster.leader_of(1).await;
    let follower = cluster.running().into_iter().find(|id| *id != leader).unwrap();
    let seen = node.store(&prefix(14, 4)).await;
    let fresh = cluster.lookup(follower, &prefix(14, 4), vec![seen]).await.freshness.unwrap();
    assert!(!fresh.leader && fresh.age_ms < 60_000, "{fresh:?}");
    // A position that never comes is waited for, then answered from the applied state.
    let never = pb::AnnouncePosition { node: 1, epoch: node.epoch, seq: 1_000, shard: 1 };
    let reply = cluster.lookup(follower, &prefix(14, 4), vec![never]).await;
    assert_eq!(holders(&reply), [(0, 4, vec![(1, 1)])]);
    until("the leader's freshness", || async {
        let fresh = cluster.lookup(leader, &prefix(14, 4), vec![]).await.freshness?;
        (fresh.leader && fresh.age_ms < 60_000).then_some(())
    })
    .await;
    cluster.shutdown().await;
}
