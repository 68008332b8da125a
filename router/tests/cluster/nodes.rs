//! Life of a node: join, announcements, gaps, silence, restart, directives.

use std::time::Duration;

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::router_client::RouterClient;
use tonic::Code;

use kvfleet_testkit::certificates::RoleChannel;
use kvfleet_testkit::cluster::{
    Cluster, HANG, cleared, heartbeat, holders, join_request, prefix, stored, until,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_is_repaired_by_a_resync() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(21, 12);
    node.store(&blocks[..4]).await;
    // Batch 2 is lost; 3 and 4 follow. One resync answers both.
    node.send(3, vec![stored(&blocks[4..8])]).await;
    node.send(4, vec![stored(&blocks[8..])]).await;
    assert_eq!(node.reply().await, Reply::Resync(pb::Resync { expected: 2 }));
    node.send(2, vec![cleared(), stored(&blocks)]).await;
    assert_eq!(node.reply().await, Reply::Ack(pb::Ack { seq: 2 }));
    // An earlier batch is a duplicate, acknowledged up to the known number.
    node.send(1, vec![stored(&blocks[..4])]).await;
    assert_eq!(node.reply().await, Reply::Ack(pb::Ack { seq: 2 }));
    let seen = vec![pb::AnnouncePosition { node: 1, epoch: node.epoch, seq: 2, shard: 1 }];
    let follower = cluster.follower().await;
    assert_eq!(holders(&cluster.lookup(follower, &blocks, seen).await), [(0, 12, vec![(1, node.epoch)])]);
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_join_fences_the_first() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut old = cluster.node(1).await;
    let blocks = prefix(22, 6);
    old.store(&blocks).await;
    let mut new = cluster.node(1).await;
    assert_eq!(new.epoch, old.epoch + 1);
    assert_eq!(old.reply().await, Reply::Fenced(pb::Fenced {}));
    let leader = cluster.leader().await;
    assert_eq!(holders(&cluster.lookup(leader, &blocks, vec![]).await), [], "the first epoch is over");
    let seen = new.store(&blocks[..3]).await;
    assert_eq!(holders(&cluster.lookup(leader, &blocks, vec![seen]).await), [(0, 3, vec![(1, new.epoch)])]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_node_is_fenced_on_every_replica() {
    let cluster = Cluster::start(3, |config| config.timings.silence_ms = 800).await;
    let mut speaking = cluster.node(1).await;
    let mut silent = cluster.node(2).await;
    let blocks = prefix(23, 6);
    speaking.store(&blocks).await;
    silent.store(&blocks).await;
    let words = speaking.control_words.clone();
    let epoch = speaking.epoch;
    let heart = tokio::spawn(async move {
        while words.send(heartbeat(1, epoch, 0)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    for id in cluster.running() {
        until("the fence of node 2", || async {
            let status = cluster.status(id).await?;
            let live: Vec<_> = status.nodes.iter().filter(|node| node.live).map(|node| node.node).collect();
            (live == [1]).then_some(())
        })
        .await;
        assert_eq!(holders(&cluster.lookup(id, &blocks, vec![]).await), [(0, 6, vec![(1, epoch)])]);
    }
    // It is told without sending a message.
    assert_eq!(silent.reply().await, Reply::Fenced(pb::Fenced {}));
    heart.abort();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_receive_pins_quotas_and_ttls() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(24, 2);
    let pin =
        pb::PinRequest { pin: 3, owner: "test".into(), blocks: blocks.concat(), ..pb::PinRequest::default() };
    cluster
        .on_leader(|mut client| {
            let pin = pin.clone();
            async move { client.pin(pin).await }
        })
        .await;
    let quota = pb::SetQuotaRequest { tenant: 5, bytes: 1_000, clear: false };
    cluster.on_leader(|mut client| async move { client.set_quota(quota).await }).await;
    let heard = async {
        loop {
            let reply = node.control.message().await.unwrap().expect("the stream is open");
            if let Some(Reply::Directives(all)) = reply.body
                && !all.pins.is_empty()
                && !all.quotas.is_empty()
            {
                return all;
            }
        }
    };
    let all = tokio::time::timeout(HANG, heard).await.unwrap();
    assert_eq!(
        all.pins,
        [pb::PinnedBlocks { pin: 3, blocks: blocks.concat(), ..pb::PinnedBlocks::default() }]
    );
    assert_eq!(all.quotas, [pb::Quota { tenant: 5, bytes: 1_000 }]);
    assert!(all.ttls.is_empty());
    // Another router gives equal contents the same version.
    let joined = cluster.on_leader(|mut client| async move { client.join(join_request(2)).await }).await;
    assert_eq!(joined.directives.unwrap(), all);
    let ttl = pb::SetTtlRequest { group: 6, ttl_ms: 70, clear: false };
    cluster.on_leader(|mut client| async move { client.set_ttl(ttl).await }).await;
    let heard = async {
        loop {
            let reply = node.control.message().await.unwrap().expect("the stream is open");
            if let Some(Reply::Directives(all)) = reply.body
                && !all.ttls.is_empty()
            {
                return all;
            }
        }
    };
    let all = tokio::time::timeout(HANG, heard).await.unwrap();
    assert_eq!(all.ttls, [pb::GroupTtl { group: 6, ttl_ms: 70 }]);
    let leader = cluster.leader().await;
    let nowhere = pb::SetTtlRequest { group: 256, ..ttl };
    let refused = cluster.client(leader).set_ttl(nowhere).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    says("a time to live for a group that is not there", &refused.message(), &[]);
    let lift = pb::SetTtlRequest { clear: true, ..ttl };
    cluster.on_leader(|mut client| async move { client.set_ttl(lift).await }).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_at_a_deposed_leader_is_redirected() {
    let mut cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(25, 3);
    node.store(&blocks).await;
    let old = cluster.leader_of(1).await;
    let stopping = cluster.take(old);
    let stopped = tokio::spawn(stopping.shutdown());
    // The stream gets a redirect or ends: it is never silent.
    let last = tokio::time::timeout(HANG, async {
        loop {
            match node.replies.message().await {
                Ok(Some(reply)) => match reply.body {
                    Some(Reply::NotLeader(leader)) => return Some(leader),
                    _ => continue,
                },
                Ok(None) | Err(_) => return None,
            }
        }
    })
    .await
    .unwrap();
    if let Some(leader) = last {
        assert_ne!(leader.leader, old);
    }
    stopped.await.unwrap();
    let mut again = cluster.reconnect(1, node.epoch, node.seq).await;
    again.store(&prefix(26, 3)).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_concurrent_nodes_get_acknowledgements() {
    let cluster = Cluster::start(3, |_| {}).await;
    let mut tasks = Vec::new();
    for number in 1..=8u32 {
        let mut node = cluster.node(number).await;
        tasks.push(tokio::spawn(async move {
            for round in 0..50u64 {
                node.store(&prefix(u64::from(number) * 1_000 + round, 16)).await;
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    cluster.assert_equal_replicas().await;
    let leader = cluster.leader().await;
    assert_eq!(cluster.status(leader).await.unwrap().index_copies, 8 * 50 * 16);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_pin_is_hidden_and_removed_from_every_replica() {
    let cluster = Cluster::start(3, |_| {}).await;
    let pin = |number, soft, for_ms| pb::PinRequest {
        pin: number,
        owner: "test".into(),
        blocks: prefix(27, 2).concat(),
        soft,
        for_ms,
    };
    let say = async |request: pb::PinRequest| {
        let say = |mut client: RouterClient<RoleChannel>| {
            let request = request.clone();
            async move { client.pin(request).await }
        };
        cluster.on_leader(say).await
    };
    let on_all = async |what: &str, is_so: &dyn Fn(&pb::StatusReply) -> bool| {
        for id in 1..=3 {
            until(what, || async { is_so(&cluster.status(id).await?).then_some(()) }).await;
        }
    };
    say(pin(1, true, Some(600_000))).await;
    on_all("the soft pin", &|all| (all.pins, all.soft_pins) == (1, 1)).await;
    let leader = cluster.leader().await;
    let before = cluster.status(leader).await.unwrap();
    assert!(before.next_pin_end_ms.is_some_and(|left| left <= 600_000), "{:?}", before.next_pin_end_ms);
    let taken = say(pin(2, false, Some(1))).await;
    assert!(taken.changed);
    on_all("the expired pin is removed by a log entry", &|all| {
        all.applied_index > taken.applied_index && all.digest == before.digest && all.pins == 1
    })
    .await;
    // Its number is free, and another owner may take it.
    let other = pb::PinRequest { owner: "other".into(), ..pin(2, false, Some(600_000)) };
    assert!(say(other).await.changed);
    // The owner renews it: now hard, and without an end.
    assert!(say(pin(1, false, None)).await.changed);
    assert!(!say(pin(1, false, None)).await.changed, "repeated");
    on_all("both are hard", &|all| (all.pins, all.soft_pins) == (2, 0)).await;
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}
