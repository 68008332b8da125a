//! A joining node has another node's reuse statistics before its first eviction: a real router and
//! two real nodes.
//!
//! Not here: the merging and effect of statistics (`kv_core::evict::statistics`), and the resulting
//! hit rate (`kvfleet-lab joins`).
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chaos_tests::waiting::until;
use kv_core::content;
use kv_core::id::{BlockHash, Category, LeaseId, NodeId, RequestId, RequestKind, RouterId, TenantId};
use kvfleet_net::tls::{Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb::node_control_client::NodeControlClient;
use kvfleet_proto::pb::{NodeStatusReply, NodeStatusRequest};
use kvfleet_router::{Router, RouterConfig, VoterConfig};
use kvfleet_testkit::certificates::Certificates;
use kvfleet_testkit::ports::unused_address;
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{
    Dialer, FetchAnswer, FetchRequest, Path as Way, Progress, RequestContext, SaveRequest,
};
use prometheus::Registry;

const BLOCK_BYTES: usize = 2048;

/// Capacity of a node in blocks.
const ROOM: u64 = 16;

async fn router(place: &Path, files: &Certificates, metrics: &Registry) -> (Router, String) {
    let address = unused_address();
    let config = RouterConfig {
        id: 1,
        listen: address.clone(),
        voters: vec![VoterConfig { id: 1, address: address.clone() }],
        data_dir: place.join("router"),
        tls: files.config(&Role::Router(Some(RouterId(1)))),
        shards: 1,
        ..RouterConfig::default()
    };
    (Router::start(config, metrics).await.unwrap(), address)
}

async fn node(place: &Path, files: &Certificates, router: &str, id: u32) -> Node {
    let TlsFiles { ca, cert, key } = files.files(&Role::Node(Some(NodeId(id))));
    let config = NodeConfig {
        id,
        routers: vec![router.to_owned()],
        data_dir: place.join(format!("node-{id}")),
        dram_blocks: Some(ROOM),
        ssd_blocks: Some(0),
        block_bytes: BLOCK_BYTES as u64,
        policy: "density".to_owned(),
        watermark_high: 1.0,
        watermark_low: 1.0,
        tls: TlsSection { ca, cert, key },
        ..NodeConfig::default()
    };
    Node::start(config, &Registry::new()).await.unwrap()
}

async fn status(files: &Certificates, node: &Node) -> NodeStatusReply {
    let channel = files.callers(&node.control_addr().to_string());
    NodeControlClient::new(channel).node_status(NodeStatusRequest {}).await.unwrap().into_inner()
}

fn hash(number: u64) -> BlockHash {
    BlockHash::from_words(number, number)
}

fn frame(hash: BlockHash) -> Frame {
    let mut payload = vec![0; BLOCK_BYTES];
    content::fill(hash, &mut payload);
    let identity = NodeConfig::default().identity.manifest().digest();
    seal(identity, hash, KeyForm::Rotated, &[BLOCK_BYTES as u32], &payload).unwrap()
}

fn asker(lease: u64, turn: u8) -> RequestContext {
    RequestContext {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(0),
        category: Category { kind: RequestKind::Agent, conversation_turn: turn },
        identity: NodeConfig::default().identity.manifest().digest(),
        traceparent: String::new(),
        class: None,
    }
}

/// A request that saves two blocks, and one that reads them.
async fn session(way: &Arc<dyn Way>, number: u64) {
    let hashes: Vec<BlockHash> = (2 * number..2 * number + 2).map(hash).collect();
    let save = SaveRequest {
        context: asker(2 * number + 1, 1),
        parent: None,
        first_offset_blocks: 0,
        hashes: hashes.clone(),
        frame_bytes: frame(hashes[0]).bytes.len() as u64,
    };
    way.save(save, &|position| frame(hashes[position])).await.unwrap();
    way.release(LeaseId(2 * number + 1)).await.unwrap();
    let fetch = FetchRequest {
        context: asker(2 * number + 2, 2),
        epoch: Default::default(),
        first_offset_blocks: 0,
        hashes,
        deadline: Duration::from_secs(20),
        progress: Progress::default(),
    };
    let answer = way.fetch(fetch, &mut |_| {}).await.unwrap();
    assert!(matches!(answer, FetchAnswer::Hit { .. } | FetchAnswer::Miss { .. }), "{answer:?}");
    way.release(LeaseId(2 * number + 2)).await.unwrap();
}

fn evicted_blocks(status: &NodeStatusReply) -> u64 {
    status.classes.iter().map(|class| class.demoted + class.dropped).sum()
}

fn counted(metrics: &Registry, name: &str, outcome: &str) -> f64 {
    let families = metrics.gather();
    let family = families.iter().find(|family| family.name() == name);
    let rows = family.into_iter().flat_map(|family| family.get_metric());
    let of = rows.filter(|row| row.get_label().iter().all(|label| label.value() == outcome));
    of.map(|row| row.get_counter().get_value()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_node_has_fleet_reuse_stats_before_its_first_eviction() {
    let place = tempfile::tempdir().unwrap();
    let files = Certificates::open(place.path());
    let identity = files.identity(&Role::Instance(None));
    let metrics = Registry::new();
    let (router, address) = router(place.path(), &files, &metrics).await;
    let first = node(place.path(), &files, &address, 7).await;
    let way =
        QuicDialer::new(&identity, QuicConfig::default()).dial(first.data_addr().to_string()).await.unwrap();
    let of_first = status(&files, &first).await;
    assert_eq!((of_first.seen_categories, of_first.fleet_categories), (0, 0), "no node has statistics yet");
    for number in 0..40 {
        session(&way, number).await;
    }
    // The router sends the merged statistics to all nodes, including their source.
    until("the first node's statistics returned through the router", || async {
        (status(&files, &first).await.fleet_categories > 0).then_some(())
    })
    .await;
    let of_first = status(&files, &first).await;
    assert!(of_first.seen_categories > 0 && evicted_blocks(&of_first) > 0, "{of_first:?}");
    assert!(counted(&metrics, "kvfleet_reuse_reports_total", "taken") >= 1.0);
    assert_eq!(counted(&metrics, "kvfleet_reuse_reports_total", "refused"), 0.0);

    let second = node(place.path(), &files, &address, 8).await;
    let joined = until("the second node has joined", || async {
        Some(status(&files, &second).await).filter(|status| status.epoch > 0)
    })
    .await;
    assert!(joined.fleet_categories > 0, "it receives them with the join: {joined:?}");
    assert_eq!(
        (joined.seen_categories, evicted_blocks(&joined)),
        (0, 0),
        "it has neither seen nor evicted a block itself"
    );
    let way =
        QuicDialer::new(&identity, QuicConfig::default()).dial(second.data_addr().to_string()).await.unwrap();
    for number in 0..40 {
        session(&way, number).await;
    }
    assert!(evicted_blocks(&status(&files, &second).await) > 0);
    first.shutdown().await;
    second.shutdown().await;
    router.shutdown().await;
}
