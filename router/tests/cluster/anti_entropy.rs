//! Correct and incorrect nodes under anti-entropy.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, NodeId, Tier};
use kv_core::index::digest::copy_digest;
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_net::tls::listen::incoming;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::node_control_server::{NodeControl, NodeControlServer};
use kvfleet_proto::pb::raft_client::RaftClient;
use kvfleet_router::AntiEntropyConfig;
use parking_lot::Mutex;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use kv_core::id::HASH_BYTES;
use kvfleet_testkit::cluster::{
    Cluster, FakeNode, HashBytes, channel, cleared, holders, join_request, prefix, stored, until,
};

type BlockBytes = HashBytes;

/// Actual blocks of a fake node, and the batch that announces them.
#[derive(Default)]
struct Holdings {
    epoch: u64,
    seq: u64,
    blocks: BTreeSet<BlockBytes>,
}

/// Answers audits from its holdings.
#[derive(Clone, Default)]
struct AuditedNode {
    holdings: Arc<Mutex<Holdings>>,
}

#[tonic::async_trait]
impl NodeControl for AuditedNode {
    async fn node_status(
        &self,
        _: Request<pb::NodeStatusRequest>,
    ) -> Result<Response<pb::NodeStatusReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn flush(&self, _: Request<pb::FlushRequest>) -> Result<Response<pb::FlushReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn set_window(
        &self,
        _: Request<pb::SetWindowRequest>,
    ) -> Result<Response<pb::SetWindowReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn copy_blocks(
        &self,
        _: Request<pb::CopyBlocksRequest>,
    ) -> Result<Response<pb::CopyBlocksReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn audit(&self, request: Request<pb::AuditRequest>) -> Result<Response<pb::AuditReply>, Status> {
        let request = request.into_inner();
        let holdings = self.holdings.lock();
        let (asked, _) = request.blocks.as_chunks::<HASH_BYTES>();
        let count = holdings.blocks.len();
        let start = request.seed as usize % count.max(1);
        let sample = holdings.blocks.iter().cycle().skip(start).take(count.min(request.sample as usize));
        Ok(Response::new(pb::AuditReply {
            epoch: holdings.epoch,
            seq: holdings.seq,
            held: asked.iter().map(|block| holdings.blocks.contains(block)).collect(),
            sample: sample.flatten().copied().collect(),
        }))
    }
}

/// One router with frequent checks, and one node that answers audits.
async fn world() -> (Cluster, AuditedNode, FakeNode) {
    let truth = AntiEntropyConfig { digests_ms: 50, audit_ms: 50, audit_blocks: 64 };
    let cluster = Cluster::start(1, |config| config.anti_entropy = truth.clone()).await;
    let audited_node = AuditedNode::default();
    let identity = cluster.certificates().identity(&Role::Node(Some(NodeId(1))));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control_address = listener.local_addr().unwrap().to_string();
    let served = Server::builder().add_service(NodeControlServer::new(audited_node.clone()));
    tokio::spawn(served.serve_with_incoming(incoming(listener, &identity)));
    let request = pb::JoinRequest { control_address, ..join_request(1) };
    let joined = cluster.on_leader(|mut client| {
        let request = request.clone();
        async move { client.join(request).await }
    });
    let epoch = joined.await.epoch;
    audited_node.holdings.lock().epoch = epoch;
    let node = cluster.reconnect(1, epoch, 1).await;
    (cluster, audited_node, node)
}

fn digest(blocks: &BTreeSet<BlockBytes>) -> u128 {
    blocks.iter().map(|block| copy_digest(BlockHash(*block), Tier::Dram)).fold(0, u128::wrapping_add)
}

async fn truth(cluster: &Cluster) -> pb::AuditStats {
    cluster.status(1).await.unwrap().nodes[0].audit.unwrap_or_default()
}

/// Announces all held blocks, as a node does on request.
async fn announce_all(node: &mut FakeNode, audited_node: &AuditedNode, digest: u128) {
    let held: Vec<BlockBytes> = {
        let mut holdings = audited_node.holdings.lock();
        holdings.seq = node.seq;
        holdings.blocks.iter().copied().collect()
    };
    node.send_with(node.seq, vec![cleared(), stored(&held)], Some(digest)).await;
    node.seq += 1;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_node_is_detected_and_announces_again() {
    let (cluster, audited_node, mut node) = world().await;
    let (claimed, hidden) = (prefix(71, 20), prefix(72, 5));
    // Answers under another epoch are ignored: no audit ends before all blocks are announced.
    audited_node.holdings.lock().epoch = 0;
    for len in 1..=claimed.len() {
        node.store(&claimed[..len]).await;
    }
    *audited_node.holdings.lock() = Holdings {
        epoch: node.epoch,
        seq: node.seq - 1,
        blocks: claimed[..15].iter().chain(&hidden).copied().collect(),
    };
    // A second query confirms both errors before the full announcement is requested.
    let Reply::Resync(resync) = node.reply().await else { panic!("no full announcement was requested") };
    assert_eq!(resync.expected, 0);
    let found = truth(&cluster).await;
    let (wrong, unknown) = (found.claimed_wrong, found.held_unknown);
    // The audited claims are a sample; of its held blocks this node lists all.
    assert!(wrong > 0 && unknown > 0 && unknown.is_multiple_of(5), "{found:?}");
    let right = digest(&audited_node.holdings.lock().blocks);
    announce_all(&mut node, &audited_node, right).await;
    let last = node.seq - 1;
    while !matches!(node.reply().await, Reply::Ack(ack) if ack.seq == last) {}
    // One audit may have been in progress.
    let asked = truth(&cluster).await.held_blocks;
    let before = until("another audit", || async {
        Some(truth(&cluster).await).filter(|now| now.held_blocks > asked)
    });
    let before = before.await;
    let after = until("more audits", || async {
        Some(truth(&cluster).await).filter(|now| now.held_blocks > before.held_blocks + 200)
    });
    let after = after.await;
    assert_eq!(after.claimed_wrong, before.claimed_wrong, "correct after the full announcement: {after:?}");
    assert_eq!((after.held_unknown, after.drifts), (before.held_unknown, 0));
    let reply = cluster.lookup(1, &claimed, vec![]).await;
    assert_eq!(holders(&reply), [(0, 15, vec![(1, node.epoch)])]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_differing_digest_causes_one_full_announcement() {
    let (cluster, audited_node, mut node) = world().await;
    let blocks = prefix(73, 20);
    audited_node.holdings.lock().blocks = blocks.iter().copied().collect();
    audited_node.holdings.lock().seq = 1;
    let right = digest(&audited_node.holdings.lock().blocks);
    node.send_with(1, vec![stored(&blocks)], Some(right ^ 1)).await;
    node.seq = 2;
    assert!(matches!(node.reply().await, Reply::Ack(ack) if ack.seq == 1));
    let Reply::Resync(resync) = node.reply().await else { panic!("no full announcement was requested") };
    assert_eq!(resync.expected, 0);
    announce_all(&mut node, &audited_node, right).await;
    while !matches!(node.reply().await, Reply::Ack(ack) if ack.seq == 2) {}
    let before = truth(&cluster).await;
    assert_eq!(before.drifts, 1);
    let looked = until("more audits", || async {
        Some(truth(&cluster).await).filter(|now| now.held_blocks > before.held_blocks + 200)
    });
    assert_eq!(looked.await.drifts, 1, "the digests agree now");
    assert_eq!(cluster.status(1).await.unwrap().groups[1].drifts, 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_correct_node_under_load_is_never_reported_wrong() {
    let (cluster, audited_node, mut node) = world().await;
    let mut number = 0;
    loop {
        // Holdings change at once and are announced a moment later: in between, index and node
        // differ.
        let (changes, own) = {
            let mut holdings = audited_node.holdings.lock();
            let new = prefix(1_000 + number, 8);
            let mut changes = vec![stored(&new)];
            holdings.blocks.extend(&new);
            if number >= 10 {
                let old = prefix(1_000 + number - 10, 8);
                holdings.blocks.retain(|block| !old.contains(block));
                let dropped = pb::Dropped { blocks: old.concat(), tier: 1, cause: 0 };
                changes.push(pb::Change { change: Some(pb::change::Change::Dropped(dropped)) });
            }
            holdings.seq = node.seq;
            (changes, digest(&holdings.blocks))
        };
        tokio::time::sleep(Duration::from_millis(1)).await;
        node.send_with(node.seq, changes, Some(own)).await;
        assert!(
            matches!(node.reply().await, Reply::Ack(ack) if ack.seq == node.seq),
            "an unexpected request"
        );
        (node.seq, number) = (node.seq + 1, number + 1);
        let found = truth(&cluster).await;
        assert_eq!((found.claimed_wrong, found.held_unknown, found.drifts), (0, 0, 0), "{found:?}");
        if found.claimed_blocks.min(found.held_blocks) > 500 {
            break;
        }
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_are_compared_with_their_leader() {
    let truth = AntiEntropyConfig { digests_ms: 50, ..AntiEntropyConfig::default() };
    let cluster = Cluster::start(3, |config| config.anti_entropy = truth.clone()).await;
    let mut node = cluster.node(1).await;
    for number in 0..20 {
        node.store(&prefix(2_000 + number, 4)).await;
    }
    for id in 1..=3 {
        until("agreement of every group", || async {
            let groups = cluster.status(id).await?.groups;
            assert!(groups.iter().all(|group| !group.diverged && group.drifts == 0), "{groups:?}");
            groups.iter().all(|group| group.agreed_index == group.applied_index).then_some(())
        })
        .await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_diverged_replica_does_not_answer_until_it_agrees() {
    let never = AntiEntropyConfig { digests_ms: 0, audit_ms: 0, ..AntiEntropyConfig::default() };
    let cluster = Cluster::start(1, |config| config.anti_entropy = never.clone()).await;
    let mut node = cluster.node(1).await;
    let blocks = prefix(74, 6);
    node.store(&blocks).await;
    let mut raft = RaftClient::new(channel(&cluster.configs[0].tls, &cluster.configs[0].listen));
    let group = cluster.status(1).await.unwrap().groups[1].clone();
    let mut compare = async |digest: Vec<u8>| {
        let mark = pb::Mark { index: group.applied_index, digest };
        let cluster = "kvfleet".to_owned();
        let verdict = pb::Verdict::Unclear.into();
        let request = pb::CompareRequest { group: 1, cluster, shards: 1, marks: vec![mark], verdict };
        raft.compare(request).await.unwrap().into_inner()
    };
    let reply = compare(vec![9; 16]).await;
    assert_eq!((reply.compared_index, reply.differs), (group.applied_index, true));
    for fresh in [false, true] {
        let request = pb::LookupRequest { hashes: blocks.concat(), fresh, ..Default::default() };
        let refused = cluster.client(1).lookup(request).await.unwrap_err();
        says("a read from a replica that differs", &refused.message(), &[]);
    }
    assert!(cluster.status(1).await.unwrap().groups[1].diverged);
    let reply = compare(group.digest.clone()).await;
    assert_eq!((reply.compared_index, reply.differs), (group.applied_index, false));
    assert_eq!(holders(&cluster.lookup(1, &blocks, vec![]).await), [(0, 6, vec![(1, node.epoch)])]);
    cluster.shutdown().await;
}
