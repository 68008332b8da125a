//! State survives a restart; damaged state is refused.

use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_router::StartError;

use kvfleet_testkit::cluster::{Cluster, holders, prefix, start, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_answers_after_all_routers_restart() {
    let seed = 31;
    println!("seed {seed}");
    let mut cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let prefixes: Vec<_> = (0..200).map(|number| prefix(seed + number, 1 + number % 9)).collect();
    let mut seen = pb::AnnouncePosition::default();
    for blocks in &prefixes {
        seen = node.store(blocks).await;
    }
    let mut before = Vec::new();
    for blocks in &prefixes {
        before.push(holders(&cluster.lookup(1, blocks, vec![seen]).await));
    }
    for id in cluster.running() {
        cluster.take(id).halt().await;
    }
    for id in 1..=3 {
        cluster.start_router(id).await;
    }
    cluster.leader().await;
    for id in 1..=3 {
        for (blocks, expected) in prefixes.iter().zip(&before) {
            assert_eq!(&holders(&cluster.lookup(id, blocks, vec![seen]).await), expected, "router {id}");
        }
    }
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

/// A restarted router's disk may be stale: it answers only after contact with a leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_router_answers_after_catching_up() {
    let mut cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(33, 30);
    node.store(&blocks[..10]).await;
    cluster.take(3).halt().await;
    let mut node = cluster.reconnect(1, node.epoch, node.seq).await;
    node.store(&blocks).await;
    for id in [1, 2] {
        cluster.take(id).halt().await;
    }
    cluster.start_router(3).await;
    let plain = pb::LookupRequest { hashes: blocks.concat(), ..Default::default() };
    let refused = cluster.client(3).lookup(plain.clone()).await.unwrap_err();
    let why = refused.message().split_once("yet: ").unwrap().1.split(';').next().unwrap();
    says("a read from a router that has just started", &refused.message(), &[why]);
    cluster.start_router(1).await;
    let reply = until("an answer", || async { cluster.client(3).lookup(plain.clone()).await.ok() }).await;
    assert_eq!(holders(&reply.into_inner()), [(0, 30, vec![(1, node.epoch)])]);
    // Instance reports are not on its disk either.
    let route =
        pb::RouteRequest { block_tokens: 16, input_tokens: 480, hashes: plain.hashes, ..Default::default() };
    let refused = cluster.client(1).route(route.clone()).await.unwrap_err();
    says("a request to a router that has just come back", &refused.message(), &[]);
    // After a grace period their absence is an answer.
    let answer = until("a rejection", || async { cluster.client(1).route(route.clone()).await.ok() }).await;
    assert!(matches!(answer.into_inner().answer, Some(pb::route_reply::Answer::Rejected(_))));
    for id in [1, 3] {
        cluster.take(id).halt().await;
    }
}

async fn quotas(cluster: &Cluster, tenants: std::ops::Range<u32>) {
    for tenant in tenants {
        let quota = pb::SetQuotaRequest { tenant, bytes: u64::from(tenant), clear: false };
        cluster.on_leader(|mut client| async move { client.set_quota(quota).await }).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lagging_router_catches_up_by_snapshot_and_restarts_from_it() {
    let mut cluster = Cluster::start(3, |config| config.snapshot_every_entries = 100).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(32, 30);
    let seen = node.store(&blocks).await;
    let away = cluster.follower().await;
    cluster.take(away).halt().await;
    // More entries than are kept behind a snapshot, so that the log alone is not enough.
    quotas(&cluster, 0..600).await;
    let leader = cluster.leader().await;
    until("a snapshot", || async { (cluster.status(leader).await?.snapshot_index > 500).then_some(()) })
        .await;
    cluster.start_router(away).await;
    until("the snapshot's arrival", || async {
        (cluster.status(away).await?.snapshot_index > 500).then_some(())
    })
    .await;
    assert_eq!(holders(&cluster.lookup(away, &blocks, vec![seen]).await), [(0, 30, vec![(1, 1)])]);
    cluster.assert_equal_replicas().await;
    cluster.take(away).halt().await;
    cluster.start_router(away).await;
    cluster.leader().await;
    cluster.assert_equal_replicas().await;
    assert_eq!(holders(&cluster.lookup(away, &blocks, vec![seen]).await), [(0, 30, vec![(1, 1)])]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_with_a_new_disk_is_restored_by_the_others() {
    let mut cluster = Cluster::start(3, |_| {}).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(33, 30);
    let seen = node.store(&blocks).await;
    let wiped = cluster.follower().await;
    cluster.take(wiped).halt().await;
    std::fs::remove_dir_all(cluster.directory.path().join(format!("router-{wiped}"))).unwrap();
    cluster.start_router(wiped).await;
    cluster.leader().await;
    cluster.assert_equal_replicas().await;
    assert_eq!(holders(&cluster.lookup(wiped, &blocks, vec![seen]).await), [(0, 30, vec![(1, 1)])]);
    cluster.shutdown().await;
}

/// The first file of the Raft log.
const LOG_FILE: &str = "raft-log/0000000000000001";

/// Flips bytes in a file at a marker until the router refuses it; returns the error.
async fn refused_after_damage(cluster: &Cluster, id: u64, file: &str, needle: &[u8]) -> StartError {
    let config = cluster.configs[usize::try_from(id - 1).unwrap()].clone();
    let path = config.data_dir.join(file);
    let mut bytes = std::fs::read(&path).unwrap();
    let hits: Vec<_> =
        (0..bytes.len() - needle.len()).filter(|at| bytes[*at..].starts_with(needle)).collect();
    assert!(!hits.is_empty(), "the marker is in {file}");
    for at in hits {
        bytes[at] ^= 0x55;
    }
    std::fs::write(&path, bytes).unwrap();
    match start(config).await {
        Ok(_) => panic!("a router started from a damaged {file}"),
        Err(error) => error,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupted_log_is_refused_with_a_remedy() {
    let mut cluster = Cluster::start(3, |_| {}).await;
    let marker = b"an owner nobody else would have".to_vec();
    let owner = String::from_utf8(marker.clone()).unwrap();
    let pin = pb::PinRequest { pin: 1, owner, blocks: prefix(34, 1).concat(), ..pb::PinRequest::default() };
    cluster
        .on_leader(|mut client| {
            let pin = pin.clone();
            async move { client.pin(pin).await }
        })
        .await;
    // Both copies are damaged, and later frames show that the log continues.
    quotas(&cluster, 0..3).await;
    cluster.assert_equal_replicas().await;
    cluster.take(1).halt().await;
    let log = refused_after_damage(&cluster, 1, LOG_FILE, &marker).await;
    assert!(matches!(log, StartError::LostLog { .. }), "{log}");
    let here = cluster.directory.path().display().to_string();
    let address = cluster.configs[0].voters[0].address.clone();
    // The number of the frame depends on elections.
    let what = |error: &StartError| {
        let text = error.to_string();
        let what = text.split_once(" is corrupted: ").and_then(|(_, rest)| rest.split_once(". This router"));
        what.map(|(what, _)| what.to_owned()).unwrap_or_default()
    };
    says("a corrupted Raft log", &log, &[&here, &what(&log), &address]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_without_its_snapshot_withholds_its_vote() {
    let mut cluster = Cluster::start(3, |config| config.snapshot_every_entries = 100).await;
    quotas(&cluster, 0..600).await;
    for id in 1..=3 {
        until("a snapshot", || async { (cluster.status(id).await?.snapshot_index > 500).then_some(()) })
            .await;
    }
    for id in cluster.running() {
        cluster.take(id).halt().await;
    }
    let snapshot = cluster.configs[1].data_dir.join("snapshot-0.kvf");
    let mut bytes = std::fs::read(&snapshot).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&snapshot, &bytes).unwrap();
    // An elected leader appends an entry, so the end of the log is a better sign than the recorded
    // leader.
    let end = |status: pb::StatusReply| {
        status.groups.iter().find(|one| one.group == 0).map(|one| one.last_log_index).expect("control")
    };
    cluster.start_router(3).await;
    let before = end(cluster.status(3).await.unwrap());
    cluster.start_router(2).await;
    assert_eq!(std::fs::read(snapshot.with_extension("kvf.set-aside-1")).unwrap(), bytes);
    // The shards elect; control must not, since router 2 may lack entries that router 3 lacks too.
    let shard_leader =
        |status: pb::StatusReply| status.groups.iter().all(|one| one.group == 0 || one.leader > 0);
    until("leaders of the shards", || async { shard_leader(cluster.status(3).await?).then_some(()) }).await;
    let turns = 10 * cluster.configs[0].timings.election_max_ms;
    tokio::time::sleep(std::time::Duration::from_millis(turns)).await;
    for id in 2..=3 {
        let after = end(cluster.status(id).await.unwrap());
        assert!(after <= before, "router {id} has entry {after} after {before}, of a leader of the two");
    }
    // The third one makes a leader possible; router 2 recovers its entries and its vote.
    cluster.start_router(1).await;
    cluster.leader().await;
    cluster.assert_equal_replicas().await;
    let withheld = cluster.configs[1].data_dir.join("withheld-votes");
    let lost = std::fs::read(&withheld).unwrap().len();
    until("the vote", || async { (std::fs::read(&withheld).ok()?.len() < lost || lost <= 5).then_some(()) })
        .await;
    cluster.take(1).halt().await;
    until("a leader of two", || async {
        cluster.status(3).await.filter(|status| matches!(status.leader, 2 | 3)).map(drop)
    })
    .await;
    quotas(&cluster, 600..620).await;
    cluster.assert_equal_replicas().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_snapshot_is_detected_from_the_log() {
    let mut cluster = Cluster::start(1, |config| config.snapshot_every_entries = 100).await;
    quotas(&cluster, 0..600).await;
    until("a snapshot", || async { (cluster.status(1).await?.snapshot_index > 500).then_some(()) }).await;
    quotas(&cluster, 600..620).await;
    cluster.take(1).halt().await;
    let snapshot = cluster.configs[0].data_dir.join("snapshot-0.kvf");
    let kept = std::fs::read(&snapshot).unwrap();
    std::fs::remove_file(&snapshot).unwrap();
    let error = start(cluster.configs[0].clone()).await.err().expect("must be refused");
    let here = cluster.directory.path().display().to_string();
    // The numbers of snapshots and purges depend on timing.
    let last_entry = |error: &StartError| {
        let text = error.to_string();
        let number = text.split(" begins with entry ").last().and_then(|rest| rest.split('.').next());
        number.unwrap_or_default().to_owned()
    };
    says("a snapshot that is lost", &error, &[&here, &last_entry(&error)]);
    // In the opposite case the router would have lost its vote.
    std::fs::write(&snapshot, kept).unwrap();
    std::fs::remove_dir_all(cluster.configs[0].data_dir.join("raft-log")).unwrap();
    let error = start(cluster.configs[0].clone()).await.err().expect("must be refused");
    says("a Raft log that is lost", &error, &[&here]);
}
