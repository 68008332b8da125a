//! A node of a running cluster drains: other nodes serve its sole copies with the right bytes, and
//! it serves until it has left.
//!
//! Not here: the order of the offers (`kvfleet-node`), and the choice of targets
//! (`kvfleet-router`).
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::Duration;

use chaos_tests::waiting::until;
use kv_core::content;
use kv_core::id::{BlockHash, Category, Epoch, LeaseId, NodeId, RequestId, RouterId, TenantId};
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::{convert, pb};
use kvfleet_router::{Router, RouterConfig, VoterConfig};
use kvfleet_testkit::certificates::{Certificates, RoleChannel};
use kvfleet_testkit::ports::unused_address;
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{Dialer, FetchRequest, Progress, RequestContext, SaveRequest};
use prometheus::Registry;

const BLOCK_BYTES: usize = 2048;

/// Conversations held by the node, and blocks of each.
const CHAINS: u64 = 12;
const CHAIN_BLOCKS: u64 = 5;

async fn router(place: &Path, files: &Certificates) -> (Router, String) {
    let address = unused_address();
    let config = RouterConfig {
        id: 1,
        listen: address.clone(),
        voters: vec![VoterConfig { id: 1, address: address.clone() }],
        data_dir: place.join("router"),
        tls: files.config(&Role::Router(Some(RouterId(1)))),
        ..RouterConfig::default()
    };
    (Router::start(config, &Registry::new()).await.unwrap(), address)
}

async fn node(place: &Path, files: &Certificates, router: &str, id: u32) -> Node {
    let TlsFiles { ca, cert, key } = files.files(&Role::Node(Some(NodeId(id))));
    let config = NodeConfig {
        id,
        routers: vec![router.to_owned()],
        data_dir: place.join(format!("node-{id}")),
        // Some blocks are on SSD.
        dram_blocks: Some(40),
        ssd_blocks: Some(200),
        block_bytes: BLOCK_BYTES as u64,
        policy: "lru".to_owned(),
        tls: TlsSection { ca, cert, key },
        ..NodeConfig::default()
    };
    Node::start(config, &Registry::new()).await.unwrap()
}

/// A block of a conversation; all blocks of one have the same tag.
fn hash(chain: u64, offset: u64) -> BlockHash {
    BlockHash::from_words(chain & 0xff, 1 + offset)
}

fn chain(number: u64) -> Vec<BlockHash> {
    (0..CHAIN_BLOCKS).map(|offset| hash(number, offset)).collect()
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

async fn save(identity: &Identity, node: &Node, number: u64) {
    let way =
        QuicDialer::new(identity, QuicConfig::default()).dial(node.data_addr().to_string()).await.unwrap();
    let hashes = chain(number);
    let save = SaveRequest {
        context: asker(number + 1),
        parent: None,
        first_offset_blocks: 0,
        hashes: hashes.clone(),
        frame_bytes: frame(hashes[0]).bytes.len() as u64,
    };
    way.save(save, &|position| frame(hashes[position])).await.unwrap();
    way.release(LeaseId(number + 1)).await.unwrap();
}

/// Number of a run's blocks that its holder serves with the right bytes.
async fn fetched(identity: &Identity, holder: &pb::Holder, hashes: &[BlockHash]) -> usize {
    let way = QuicDialer::new(identity, QuicConfig::default()).dial(holder.address.clone()).await.unwrap();
    let request = FetchRequest {
        context: asker(999),
        epoch: Epoch(holder.epoch),
        first_offset_blocks: 0,
        hashes: hashes.to_vec(),
        deadline: Duration::from_secs(20),
        progress: Progress::default(),
    };
    let mut frames = Vec::new();
    way.fetch(request, &mut |frame| frames.push(frame)).await.unwrap();
    way.release(LeaseId(999)).await.unwrap();
    let ours = NodeConfig::default().identity.manifest().digest();
    let right = frames.iter().zip(hashes).filter(|(frame, hash)| {
        frame.verify(ours, **hash).is_ok() && content::matches(**hash, &frame.payload())
    });
    right.count()
}

async fn lookup(client: &mut RouterClient<RoleChannel>, number: u64) -> Vec<pb::HolderRun> {
    let request =
        pb::LookupRequest { hashes: convert::hashes_to_bytes(&chain(number)), ..Default::default() };
    client.lookup(request).await.unwrap().into_inner().runs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sole_copies_of_a_draining_node_are_served_by_other_nodes() {
    let place = tempfile::tempdir().unwrap();
    let files = Certificates::open(place.path());
    let identity = files.identity(&Role::Instance(None));
    let (router, address) = router(place.path(), &files).await;
    let leaver = node(place.path(), &files, &address, 1).await;
    let others =
        [node(place.path(), &files, &address, 2).await, node(place.path(), &files, &address, 3).await];
    let mut client = RouterClient::new(files.callers(&address));
    until("all nodes have joined", || {
        let mut client = client.clone();
        async move {
            let status = client.status(pb::StatusRequest {}).await.ok()?.into_inner();
            (status.nodes.iter().filter(|node| node.live).count() == 3).then_some(())
        }
    })
    .await;
    for number in 0..CHAINS {
        save(&identity, &leaver, number).await;
    }
    // One conversation is also on another node.
    save(&identity, &others[0], 0).await;
    for number in 0..CHAINS {
        until("saved blocks are listed", || {
            let mut client = client.clone();
            async move {
                let runs = lookup(&mut client, number).await;
                let known: u32 = runs.iter().map(|run| run.len_blocks).sum();
                let twice = number > 0 || runs.iter().all(|run| run.holders.len() == 2);
                (u64::from(known) == CHAIN_BLOCKS && twice).then_some(())
            }
        })
        .await;
    }
    let (given, has_left) = leaver.membership().drain(Duration::from_secs(60)).await;
    assert!(has_left, "{given}");
    assert_eq!((given.copied_blocks, given.elsewhere_blocks), ((CHAINS - 1) * CHAIN_BLOCKS, CHAIN_BLOCKS));
    assert_eq!((given.left_blocks, given.left_bytes, given.left_share), (0, 0, 0.0), "{given}");
    // Right after it left, all blocks are where the index lists them.
    let mut holders = std::collections::BTreeSet::new();
    for number in 0..CHAINS {
        let runs = lookup(&mut client, number).await;
        let known: u64 = runs.iter().map(|run| u64::from(run.len_blocks)).sum();
        assert_eq!(known, CHAIN_BLOCKS, "chain {number}: {runs:?}");
        for run in &runs {
            let (start, len) = (run.start_blocks as usize, run.len_blocks as usize);
            let holder = run.holders.first().unwrap();
            assert_ne!(holder.node, 1, "{runs:?}");
            holders.insert(holder.node);
            assert_eq!(fetched(&identity, holder, &chain(number)[start..start + len]).await, len);
        }
    }
    assert_eq!(holders.into_iter().collect::<Vec<u32>>(), [2, 3], "both other nodes received blocks");
    leaver.shutdown().await;
    for node in others {
        node.shutdown().await;
    }
    router.shutdown().await;
}
