//! A prefix held by one node and requested next to another node is copied there. The next decision
//! reads the copy, with the right bytes, and the prefix survives its first holder.
//!
//! Not here: the value of a copy (`kv_core::place::hot`), and the schedule of copies
//! (`kvfleet-router`).
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chaos_tests::waiting::until;
use kv_core::content;
use kv_core::id::{BlockHash, Category, Epoch, LeaseId, NodeId, RequestId, RouterId, TenantId};
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::{convert, pb};
use kvfleet_router::{HotCopiesConfig, Router, RouterConfig, VoterConfig};
use kvfleet_testkit::certificates::{Certificates, RoleChannel};
use kvfleet_testkit::ports::unused_address;
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{Dialer, FetchRequest, Progress, RequestContext, SaveRequest};
use pb::route_reply::Answer;
use prometheus::Registry;

const BLOCK_BYTES: usize = 2048;
const BLOCKS: u64 = 6;

/// The holder of the prefix, and the node next to the requesting instance.
const HOLDER: u32 = 1;
const READER: u32 = 2;

async fn router(place: &Path, files: &Certificates, registry: &Registry) -> (Router, String) {
    let address = unused_address();
    let config = RouterConfig {
        id: 1,
        listen: address.clone(),
        voters: vec![VoterConfig { id: 1, address: address.clone() }],
        data_dir: place.join("router"),
        tls: files.config(&Role::Router(Some(RouterId(1)))),
        hot_copies: HotCopiesConfig { bytes_per_second: 1 << 20, ..HotCopiesConfig::default() },
        ..RouterConfig::default()
    };
    (Router::start(config, registry).await.unwrap(), address)
}

async fn node(place: &Path, files: &Certificates, router: &str, id: u32) -> Node {
    let TlsFiles { ca, cert, key } = files.files(&Role::Node(Some(NodeId(id))));
    let config = NodeConfig {
        id,
        routers: vec![router.to_owned()],
        data_dir: place.join(format!("node-{id}")),
        dram_blocks: Some(40),
        block_bytes: BLOCK_BYTES as u64,
        tls: TlsSection { ca, cert, key },
        ..NodeConfig::default()
    };
    Node::start(config, &Registry::new()).await.unwrap()
}

fn hashes() -> Vec<BlockHash> {
    (1..=BLOCKS).map(|offset| BlockHash::from_words(9, offset)).collect()
}

fn frame(hash: BlockHash) -> Frame {
    let mut payload = vec![0; BLOCK_BYTES];
    content::fill(hash, &mut payload);
    let identity = NodeConfig::default().identity.manifest().digest();
    seal(identity, hash, KeyForm::Rotated, &[BLOCK_BYTES as u32], &payload).unwrap()
}

fn asker(lease: u64) -> RequestContext {
    RequestContext {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(0),
        category: Category::default(),
        identity: NodeConfig::default().identity.manifest().digest(),
        traceparent: String::new(),
        class: None,
    }
}

async fn save(identity: &Identity, node: &Node) {
    let way =
        QuicDialer::new(identity, QuicConfig::default()).dial(node.data_addr().to_string()).await.unwrap();
    let hashes = hashes();
    let save = SaveRequest {
        context: asker(1),
        parent: None,
        first_offset_blocks: 0,
        hashes: hashes.clone(),
        frame_bytes: frame(hashes[0]).bytes.len() as u64,
    };
    way.save(save, &|position| frame(hashes[position])).await.unwrap();
    way.release(LeaseId(1)).await.unwrap();
}

/// Number of the prefix's blocks that a source serves with the right bytes.
async fn fetched(identity: &Identity, source: &pb::Source) -> usize {
    let way = QuicDialer::new(identity, QuicConfig::default()).dial(source.address.clone()).await.unwrap();
    let request = FetchRequest {
        context: asker(999),
        epoch: Epoch(source.epoch),
        first_offset_blocks: 0,
        hashes: hashes(),
        deadline: Duration::from_secs(20),
        progress: Progress::default(),
    };
    let mut frames = Vec::new();
    way.fetch(request, &mut |frame| frames.push(frame)).await.unwrap();
    way.release(LeaseId(999)).await.unwrap();
    let ours = NodeConfig::default().identity.manifest().digest();
    let right = frames.iter().zip(hashes()).filter(|(frame, hash)| {
        frame.verify(ours, *hash).is_ok() && content::matches(*hash, &frame.payload())
    });
    right.count()
}

/// The decision for the prefix and the instance next to [`READER`].
async fn decided(client: &RouterClient<RoleChannel>) -> pb::Decision {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    let report = pb::ReportRequest {
        instance: 7,
        address: "i:7".into(),
        sequence: number,
        started_us: 1,
        node: READER,
        has_node: true,
        ..Default::default()
    };
    client.clone().report(report).await.unwrap();
    let request = pb::RouteRequest {
        request: number,
        hashes: convert::hashes_to_bytes(&hashes()),
        block_tokens: 256,
        input_tokens: 256 * BLOCKS as u32 + 1,
        ..Default::default()
    };
    match client.clone().route(request).await.unwrap().into_inner().answer {
        Some(Answer::Decision(decision)) => decision,
        other => panic!("{other:?}"),
    }
}

fn value(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name);
    family.map_or(0.0, |family| family.get_metric().iter().map(|one| one.get_counter().get_value()).sum())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remotely_read_prefix_is_copied_and_survives_its_first_holder() {
    let place = tempfile::tempdir().unwrap();
    let files = Certificates::open(place.path());
    let identity = files.identity(&Role::Instance(None));
    let registry = Registry::new();
    let (router, address) = router(place.path(), &files, &registry).await;
    let holder = node(place.path(), &files, &address, HOLDER).await;
    let own = node(place.path(), &files, &address, READER).await;
    let client = RouterClient::new(files.callers(&address));
    save(&identity, &holder).await;
    let read_from = |node: u32| {
        let client = &client;
        move || async move {
            let decision = decided(client).await;
            let is_there = decision.fetch_blocks == BLOCKS as u32;
            (is_there && decision.sources.iter().all(|source| source.node == node)).then_some(decision)
        }
    };
    until("it is read from the remote node", read_from(HOLDER)).await;
    let decision = until("it is read next to the instance", read_from(READER)).await;
    assert_eq!(fetched(&identity, &decision.sources[0]).await, BLOCKS as usize);
    // The index may list the copy before the router has the node's reply.
    let all = (frame(hashes()[0]).bytes.len() * BLOCKS as usize) as f64;
    until("it is counted", || async {
        (value(&registry, "kvfleet_hot_copies_bytes_total") == all).then_some(())
    })
    .await;
    assert_eq!(value(&registry, "kvfleet_hot_copies_proposed_total"), 1.0);
    holder.shutdown().await;
    let decision = decided(&client).await;
    assert_eq!((decision.fetch_blocks, decision.sources[0].node), (BLOCKS as u32, READER));
    own.shutdown().await;
    router.shutdown().await;
}
