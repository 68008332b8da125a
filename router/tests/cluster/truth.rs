//! Nodes that lie and nodes that do not, as the truth meter sees them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Tier};
use kv_core::index::digest::of_hold;
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_proto::pb::announce_reply::Body as Reply;
use kvfleet_proto::pb::node_control_server::{NodeControl, NodeControlServer};
use kvfleet_proto::pb::raft_client::RaftClient;
use kvfleet_proto::tls::TlsFiles;
use kvfleet_proto::tls::listen::incoming;
use kvfleet_router::TruthConfig;
use parking_lot::Mutex;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::harness::{Cluster, Node, channel, cleared, holders, join_request, prefix, stored, until};

type Block = [u8; 16];

/// What a stand-in node really holds, and the batch with which that is announced.
#[derive(Default)]
struct Holdings {
    epoch: u64,
    seq: u64,
    blocks: BTreeSet<Block>,
}

/// Answers audits from what it holds.
#[derive(Clone, Default)]
struct Witness {
    holdings: Arc<Mutex<Holdings>>,
}

#[tonic::async_trait]
impl NodeControl for Witness {
    async fn node_status(
        &self,
        _: Request<pb::NodeStatusRequest>,
    ) -> Result<Response<pb::NodeStatusReply>, Status> {
        Err(Status::unimplemented("not part of these tests"))
    }

    async fn settle(&self, _: Request<pb::SettleRequest>) -> Result<Response<pb::SettleReply>, Status> {
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
        let (asked, _) = request.blocks.as_chunks::<16>();
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

/// One router that looks closely, and one node that answers audits.
async fn world() -> (Cluster, Witness, Node) {
    let truth = TruthConfig { digests_ms: 50, audit_ms: 50, audit_blocks: 64 };
    let cluster = Cluster::start(1, |config| config.truth = truth.clone()).await;
    let witness = Witness::default();
    let tls = &cluster.configs[0].tls;
    let files = TlsFiles { ca: tls.ca.clone(), cert: tls.cert.clone(), key: tls.key.clone() };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let control_address = listener.local_addr().unwrap().to_string();
    let served = Server::builder().add_service(NodeControlServer::new(witness.clone()));
    tokio::spawn(served.serve_with_incoming(incoming(listener, &files.load().unwrap())));
    let request = pb::JoinRequest { control_address, ..join_request(1) };
    let joined = cluster.on_leader(|mut client| {
        let request = request.clone();
        async move { client.join(request).await }
    });
    let epoch = joined.await.epoch;
    witness.holdings.lock().epoch = epoch;
    let node = cluster.reconnect(1, epoch, 1).await;
    (cluster, witness, node)
}

fn digest(blocks: &BTreeSet<Block>) -> u128 {
    blocks.iter().map(|block| of_hold(BlockHash(*block), Tier::Dram)).fold(0, u128::wrapping_add)
}

async fn truth(cluster: &Cluster) -> pb::Truth {
    cluster.status(1).await.unwrap().nodes[0].truth.unwrap_or_default()
}

/// Announces everything that is held, as a node does that was asked to.
async fn announce_all(node: &mut Node, witness: &Witness, digest: u128) {
    let held: Vec<Block> = {
        let mut holdings = witness.holdings.lock();
        holdings.seq = node.seq;
        holdings.blocks.iter().copied().collect()
    };
    node.send_with(node.seq, vec![cleared(), stored(&held)], Some(digest)).await;
    node.seq += 1;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_lies_is_found_counted_and_announces_all_anew() {
    let (cluster, witness, mut node) = world().await;
    let (claimed, hidden) = (prefix(71, 20), prefix(72, 5));
    // Answers under another epoch count for nothing: no audit ends before all is announced.
    witness.holdings.lock().epoch = 0;
    for len in 1..=claimed.len() {
        node.store(&claimed[..len]).await;
    }
    *witness.holdings.lock() = Holdings {
        epoch: node.epoch,
        seq: node.seq - 1,
        blocks: claimed[..15].iter().chain(&hidden).copied().collect(),
    };
    // Both lies are confirmed by a second question before the node is asked for everything.
    let Reply::Resync(resync) = node.reply().await else { panic!("not asked to announce all anew") };
    assert_eq!(resync.expected, 0);
    let found = truth(&cluster).await;
    let (wrong, unknown) = (found.claimed_wrong, found.held_unknown);
    // The claims that are asked about are a sample; of what is held, this node names everything.
    assert!(wrong > 0 && unknown > 0 && unknown.is_multiple_of(5), "{found:?}");
    let right = digest(&witness.holdings.lock().blocks);
    announce_all(&mut node, &witness, right).await;
    let last = node.seq - 1;
    while !matches!(node.reply().await, Reply::Ack(ack) if ack.seq == last) {}
    // One audit may have been about to be counted.
    let asked = truth(&cluster).await.held_blocks;
    let before = until("another audit", || async {
        Some(truth(&cluster).await).filter(|now| now.held_blocks > asked)
    });
    let before = before.await;
    let after = until("more audits", || async {
        Some(truth(&cluster).await).filter(|now| now.held_blocks > before.held_blocks + 200)
    });
    let after = after.await;
    assert_eq!(after.claimed_wrong, before.claimed_wrong, "once announced anew, nothing is wrong: {after:?}");
    assert_eq!((after.held_unknown, after.drifts), (before.held_unknown, 0));
    let reply = cluster.lookup(1, &claimed, vec![]).await;
    assert_eq!(holders(&reply), [(0, 15, vec![(1, node.epoch)])]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_digest_differs_announces_all_anew_once() {
    let (cluster, witness, mut node) = world().await;
    let blocks = prefix(73, 20);
    witness.holdings.lock().blocks = blocks.iter().copied().collect();
    witness.holdings.lock().seq = 1;
    let right = digest(&witness.holdings.lock().blocks);
    node.send_with(1, vec![stored(&blocks)], Some(right ^ 1)).await;
    node.seq = 2;
    assert!(matches!(node.reply().await, Reply::Ack(ack) if ack.seq == 1));
    let Reply::Resync(resync) = node.reply().await else { panic!("not asked to announce all anew") };
    assert_eq!(resync.expected, 0);
    announce_all(&mut node, &witness, right).await;
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
async fn an_honest_node_under_load_is_never_called_wrong() {
    let (cluster, witness, mut node) = world().await;
    let mut number = 0;
    loop {
        // What is held changes at once, and is announced a moment later: in between, index and node differ.
        let (changes, own) = {
            let mut holdings = witness.holdings.lock();
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
        assert!(matches!(node.reply().await, Reply::Ack(ack) if ack.seq == node.seq), "asked for something");
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
    let truth = TruthConfig { digests_ms: 50, ..TruthConfig::default() };
    let cluster = Cluster::start(3, |config| config.truth = truth.clone()).await;
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
async fn a_replica_that_differs_answers_nothing_until_it_agrees() {
    let never = TruthConfig { digests_ms: 0, audit_ms: 0, ..TruthConfig::default() };
    let cluster = Cluster::start(1, |config| config.truth = never.clone()).await;
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
