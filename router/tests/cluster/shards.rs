//! Four shards: each lists its own chains, with common epochs and separate leaders.

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use tonic::Code;

use kvfleet_testkit::cluster::{
    Cluster, FakeNode, chain, cleared, heartbeat, holders, join_request, stored, until,
};

const SHARDS: u16 = 4;

/// A tag of each shard, in their order.
const TAGS: [u8; SHARDS as usize] = [3, 70, 140, 255];

async fn cluster() -> Cluster {
    Cluster::start(3, |config| config.shards = SHARDS).await
}

/// A node with a stream to every shard.
async fn streams_to_all_shards(cluster: &Cluster, node: u32) -> Vec<FakeNode> {
    let epoch = cluster.join(node).await;
    let mut streams = Vec::new();
    for shard in 1..=u32::from(SHARDS) {
        streams.push(cluster.open_streams(node, epoch, 1, shard).await);
    }
    streams
}

/// Stores a chain of `len` blocks in every shard.
async fn store_all(streams: &mut [FakeNode], seed: u64, len: u64) -> Vec<pb::AnnouncePosition> {
    let mut seen = Vec::new();
    for (stream, tag) in streams.iter_mut().zip(TAGS) {
        seen.push(stream.store(&chain(tag, seed, len)).await);
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_router_answers_for_every_shard() {
    let cluster = cluster().await;
    let mut first = streams_to_all_shards(&cluster, 1).await;
    let mut second = streams_to_all_shards(&cluster, 2).await;
    let mut seen = store_all(&mut first, 51, 20).await;
    seen.extend(store_all(&mut second, 51, 8).await);
    for router in 1..=3 {
        for (shard, tag) in (1..).zip(TAGS) {
            let reply = cluster.lookup(router, &chain(tag, 51, 20), seen.clone()).await;
            assert_eq!(holders(&reply), [(0, 8, vec![(1, 1), (2, 1)]), (8, 12, vec![(1, 1)])]);
            let freshness = reply.freshness.unwrap();
            assert_eq!((freshness.group, freshness.router), (shard, router));
            assert!(freshness.applied_index > 0);
        }
        // A chain that continues with another chain's blocks ends before them, although they are
        // listed.
        let mixed = [&chain(TAGS[0], 51, 5)[..], &chain(TAGS[1], 51, 5)[..]].concat();
        assert_eq!(
            cluster.lookup(router, &mixed, vec![]).await.runs.iter().map(|run| run.len_blocks).sum::<u32>(),
            5
        );
    }
    let status = cluster.status(1).await.unwrap();
    assert_eq!(status.groups.len(), 5);
    assert_eq!(status.groups[0].blocks, 0, "the control group lists no blocks");
    assert!(status.groups[1..].iter().all(|shard| (shard.blocks, shard.copies) == (20, 28)));
    assert_eq!((status.index_blocks, status.index_copies), (80, 112));
    assert_eq!(status.nodes.iter().map(|node| node.blocks).collect::<Vec<_>>(), [80, 32]);
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_shard_numbers_batches_separately() {
    let cluster = cluster().await;
    let mut streams = streams_to_all_shards(&cluster, 1).await;
    streams[0].store(&chain(TAGS[0], 52, 4)).await;
    streams[0].store(&chain(TAGS[0], 53, 4)).await;
    // Shard 2 has no batch yet: its first number is 1, and it repairs its own gap.
    streams[1].send(3, vec![stored(&chain(TAGS[1], 52, 4))]).await;
    assert_eq!(streams[1].reply().await, Reply::Resync(pb::Resync { expected: 1 }));
    streams[1].send(1, vec![cleared(), stored(&chain(TAGS[1], 52, 4))]).await;
    assert_eq!(streams[1].reply().await, Reply::Ack(pb::Ack { seq: 1 }));
    let reply = cluster.lookup(1, &chain(TAGS[0], 52, 4), vec![]).await;
    assert!(reply.freshness.is_some());
    let seen = vec![pb::AnnouncePosition { node: 1, epoch: 1, seq: 2, shard: 1 }];
    assert_eq!(holders(&cluster.lookup(2, &chain(TAGS[0], 52, 4), seen).await), [(0, 4, vec![(1, 1)])]);
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_fence_hides_a_node_in_all_shards_and_is_swept_in_each() {
    let cluster =
        Cluster::start(3, |config| (config.shards, config.timings.silence_ms) = (SHARDS, 1_500)).await;
    let mut silent = streams_to_all_shards(&cluster, 1).await;
    let seen = store_all(&mut silent, 54, 6).await;
    for router in 1..=3 {
        let reply = cluster.lookup(router, &chain(TAGS[3], 54, 6), seen.clone()).await;
        // On a slow machine the node may be fenced by now; then the comparison is skipped.
        assert!(holders(&reply).len() <= 1);
    }
    for router in 1..=3 {
        until("the fence", || async {
            let status = cluster.status(router).await?;
            (!status.nodes.first()?.live).then_some(())
        })
        .await;
        for tag in TAGS {
            assert_eq!(holders(&cluster.lookup(router, &chain(tag, 54, 6), vec![]).await), [], "tag {tag}");
        }
    }
    assert_eq!(silent[2].reply().await, Reply::Fenced(pb::Fenced {}));
    for router in 1..=3 {
        until("the sweep", || async {
            let groups = cluster.status(router).await?.groups;
            groups.iter().all(|group| group.copies == 0).then_some(())
        })
        .await;
    }
    // The next epoch starts over in each shard.
    let mut again = streams_to_all_shards(&cluster, 1).await;
    let seen = store_all(&mut again, 55, 3).await;
    let reply = cluster.lookup(2, &chain(TAGS[2], 55, 3), seen).await;
    assert!(holders(&reply).iter().all(|(_, _, holders)| *holders == [(1, again[0].epoch)]));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shard_refuses_an_ended_epoch() {
    let cluster = cluster().await;
    let old = cluster.join(1).await;
    let new = cluster.join(1).await;
    assert_eq!(new, old + 1);
    for shard in 1..=u32::from(SHARDS) {
        let mut late = cluster.open_streams(1, old, 1, shard).await;
        assert_eq!(late.reply().await, Reply::Fenced(pb::Fenced {}), "shard {shard}");
        cluster.open_streams(1, new, 1, shard).await.store(&chain(TAGS[shard as usize - 1], 56, 2)).await;
    }
    // An epoch that was never assigned: a router waits for it, then redirects the node.
    let mut early = cluster.open_streams(1, new + 1, 1, 1).await;
    assert!(matches!(early.reply().await, Reply::NotLeader(_)));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_to_the_wrong_group_gets_an_error() {
    let cluster = cluster().await;
    let epoch = cluster.join(1).await;
    let mut node = cluster.open_streams(1, epoch, 1, 1).await;
    let batch = pb::announce_request::Body::Batch(pb::Batch {
        seq: 1,
        changes: vec![stored(&chain(3, 1, 1))],
        digest: vec![],
    });
    let request = pb::AnnounceRequest { body: Some(batch), ..heartbeat(1, epoch, 0) };
    node.control_words.send(request).await.unwrap();
    let status = loop {
        match node.control.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without an error"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::InvalidArgument);
    says("a batch for the control group", &status.message(), &[]);
    let (words, receiver) = tokio::sync::mpsc::channel(1);
    words.send(heartbeat(1, epoch, 9)).await.unwrap();
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let status = cluster.client(1).announce(stream).await.unwrap_err();
    says("a group that is not there", &status.message(), &[]);
    node.messages.send(heartbeat(2, epoch, 1)).await.unwrap();
    let status = node.replies.message().await.unwrap_err();
    says("a stream that changes its speaker", &status.message(), &[]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_a_shards_leader_loses_nothing() {
    let mut cluster = cluster().await;
    let mut streams = streams_to_all_shards(&cluster, 1).await;
    let seen = store_all(&mut streams, 57, 30).await;
    let dead = cluster.leader_of(2).await;
    cluster.take(dead).halt().await;
    for group in 0..=u32::from(SHARDS) {
        assert_ne!(cluster.leader_of(group).await, dead);
    }
    for router in cluster.running() {
        for tag in TAGS {
            let reply = cluster.lookup(router, &chain(tag, 57, 30), seen.clone()).await;
            assert_eq!(holders(&reply), [(0, 30, vec![(1, 1)])], "tag {tag} at router {router}");
        }
    }
    // The node continues under the same epoch, in every shard.
    for (shard, tag) in (1..).zip(TAGS) {
        cluster.open_streams(1, 1, 2, shard).await.store(&chain(tag, 58, 3)).await;
    }
    cluster.start_router(dead).await;
    cluster.leader().await;
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_shards_survive_a_restart_of_all_routers() {
    let mut cluster = Cluster::start(3, |config| {
        (config.shards, config.snapshot_every_entries) = (SHARDS, 100);
    })
    .await;
    let mut streams = streams_to_all_shards(&cluster, 1).await;
    let mut seen = Vec::new();
    for round in 0..60 {
        seen = store_all(&mut streams, 1_000 + round, 3).await;
    }
    for id in cluster.running() {
        cluster.take(id).halt().await;
    }
    for id in 1..=3 {
        cluster.start_router(id).await;
    }
    for group in 0..=u32::from(SHARDS) {
        cluster.leader_of(group).await;
    }
    for router in 1..=3 {
        for round in 0..60 {
            let tag = TAGS[round % TAGS.len()];
            let reply = cluster.lookup(router, &chain(tag, 1_000 + round as u64, 3), seen.clone()).await;
            assert_eq!(holders(&reply), [(0, 3, vec![(1, 1)])], "round {round} at router {router}");
        }
    }
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

/// Number of groups that each router leads, once all agree.
async fn led(cluster: &Cluster) -> Vec<usize> {
    let mut led = vec![0; 3];
    for group in 0..=u32::from(SHARDS) {
        led[cluster.leader_of(group).await as usize - 1] += 1;
    }
    led
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaders_are_balanced_and_then_stable() {
    let cluster =
        Cluster::start(3, |config| (config.shards, config.timings.balance_ms) = (SHARDS, 100)).await;
    until("spread leaders", || async { led(&cluster).await.iter().all(|count| *count <= 2).then_some(()) })
        .await;
    let terms =
        async || cluster.status(1).await.unwrap().groups.iter().map(|group| group.term).collect::<Vec<_>>();
    let before = terms().await;
    let mut streams = streams_to_all_shards(&cluster, 1).await;
    for round in 0..40 {
        store_all(&mut streams, 2_000 + round, 16).await;
    }
    assert_eq!(terms().await, before, "no unnecessary elections");
    assert!(led(&cluster).await.iter().all(|count| *count <= 2));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_read_is_linearizable_on_any_router() {
    let cluster = cluster().await;
    let mut streams = streams_to_all_shards(&cluster, 1).await;
    for round in 0..10 {
        store_all(&mut streams, 3_000 + round, 5).await;
        for router in 1..=3 {
            for tag in TAGS {
                let hashes = chain(tag, 3_000 + round, 5).concat();
                let request = pb::LookupRequest { hashes, after: vec![], fresh: true };
                let reply = cluster.client(router).lookup(request).await.unwrap().into_inner();
                assert_eq!(holders(&reply), [(0, 5, vec![(1, 1)])], "router {router}, round {round}");
            }
        }
    }
    // A fresh read includes a join, and its effect on the earlier epoch.
    cluster.join(1).await;
    for router in 1..=3 {
        let request = pb::LookupRequest { hashes: chain(3, 3_000, 5).concat(), after: vec![], fresh: true };
        let reply = cluster.client(router).lookup(request).await.unwrap().into_inner();
        assert_eq!(holders(&reply), []);
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_quorum_a_fresh_read_is_refused_and_a_plain_one_is_answered() {
    let mut cluster = cluster().await;
    let mut streams = streams_to_all_shards(&cluster, 1).await;
    let seen = store_all(&mut streams, 59, 5).await;
    let request = pb::LookupRequest { hashes: chain(3, 59, 5).concat(), after: seen, fresh: false };
    cluster.client(3).lookup(request.clone()).await.unwrap();
    for dead in [1, 2] {
        cluster.take(dead).halt().await;
    }
    let reply = cluster.client(3).lookup(request.clone()).await.unwrap().into_inner();
    assert_eq!(holders(&reply), [(0, 5, vec![(1, 1)])]);
    let fresh = pb::LookupRequest { fresh: true, ..request };
    let status = cluster.client(3).lookup(fresh).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    let text = status.message();
    assert!(text.starts_with("a fresh read needs the leader of group"), "{text}");
    let (head, rest) = text.split_once(": ").unwrap();
    let (why, _) = rest.split_once(';').unwrap();
    says("a fresh read without a leader", &text, &[head.split(' ').next_back().unwrap(), why]);
    drop(join_request(1));
    cluster.take(3).halt().await;
}
