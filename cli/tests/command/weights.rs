//! New weights under a running cluster of real processes: which blocks miss, with what reason,
//! which reads continue, and what a restarted node restores.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::content;

use kv_core::id::{
    BlockHash, Category, Epoch, Generation, IdentityDigest, InstanceId, LeaseId, RequestId, TenantId,
};
use kvfleet::calls::{RouterCalls, channel, run_on_instance};
use kvfleet::cluster::{ClusterShape, LocalCluster, NodeCapacity};
use kvfleet::process::Role;
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall};
use kvfleet_errors_doc::says;
use kvfleet_net::certificates::{Authority, CertificateFiles};
use kvfleet_net::tls;
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb;
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{
    Dialer, FetchAnswer, FetchRequest, MissReason, Path, Progress, RequestContext, SaveAnswer, SaveRefusal,
    SaveRequest,
};

use crate::support::{Workspace, shape};

const BLOCK_BYTES: usize = 4096;
const BLOCKS: u64 = 24;

/// Block `number` of one hash chain.
fn hash(number: u64) -> BlockHash {
    let mut bytes = [0x5a; _];
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    let first = BlockHash([0x5a; _]);
    BlockHash(bytes).in_chain(0x5a, first, number as usize)
}

fn hashes(numbers: Range<u64>) -> Vec<BlockHash> {
    numbers.map(hash).collect()
}

/// The frame of a block under a weight generation; each generation has different bytes.
fn frame(identity: IdentityDigest, generation: u32, hash: BlockHash) -> Frame {
    let mut payload = vec![0u8; BLOCK_BYTES];
    content::fill(hash, &mut payload);
    payload.iter_mut().for_each(|byte| *byte ^= generation as u8);
    let slices = [u32::try_from(BLOCK_BYTES / 4).unwrap(); 4];
    seal(identity.with_generation(Generation(generation)), hash, KeyForm::Rotated, &slices, &payload).unwrap()
}

/// A connection to the only node, as an instance makes it.
struct NodeConnection {
    manifest: IdentityDigest,
    path: Arc<dyn Path>,
    epoch: Epoch,
}

impl NodeConnection {
    async fn connect(cluster: &LocalCluster) -> NodeConnection {
        let node = status(cluster).await.nodes.into_iter().find(|node| node.live).expect("no live node");
        let role = tls::Role::Instance(Some(InstanceId(1)));
        let CertificateFiles { ca, cert, key } =
            Authority::open(&cluster.certificates()).unwrap().issue(&role).unwrap();
        let identity = tls::TlsFiles { ca, cert, key }.load().unwrap();
        let dialer = QuicDialer::new(&identity, QuicConfig::default());
        let path = dialer.dial(node.data_address).await.unwrap();
        NodeConnection { manifest: cluster.shape().manifest().digest(), path, epoch: Epoch(node.epoch) }
    }

    fn asker(&self, lease: u64, generation: u32) -> RequestContext {
        RequestContext {
            lease: LeaseId(lease),
            request: RequestId(lease),
            tenant: TenantId(0),
            category: Category::default(),
            identity: self.manifest.with_generation(Generation(generation)),
            traceparent: String::new(),
            class: None,
        }
    }

    async fn save(&self, lease: u64, generation: u32, numbers: Range<u64>) -> SaveAnswer {
        let all = hashes(numbers.clone());
        let request = SaveRequest {
            context: self.asker(lease, generation),
            parent: numbers.start.checked_sub(1).map(hash),
            first_offset_blocks: u32::try_from(numbers.start).unwrap(),
            hashes: all.clone(),
            frame_bytes: frame(self.manifest, generation, hash(0)).bytes.len() as u64,
        };
        let saved = self.path.save(request, &|at| frame(self.manifest, generation, all[at])).await.unwrap();
        self.path.release(LeaseId(lease)).await.unwrap();
        saved
    }

    async fn save_all(&self, lease: u64, generation: u32, numbers: Range<u64>) -> u32 {
        match self.save(lease, generation, numbers).await {
            SaveAnswer::Done(done) => done.stored_blocks,
            other => panic!("{other:?}"),
        }
    }

    /// Fetches blocks and asserts that every byte belongs to `generation`. Calls `at_first` when
    /// the first block arrives.
    async fn fetch(
        &self,
        lease: u64,
        generation: u32,
        numbers: Range<u64>,
        on_first_block: impl FnOnce() + Send,
    ) -> FetchAnswer {
        let all = hashes(numbers.clone());
        let request = FetchRequest {
            context: self.asker(lease, generation),
            epoch: self.epoch,
            first_offset_blocks: u32::try_from(numbers.start).unwrap(),
            hashes: all.clone(),
            deadline: Duration::from_secs(30),
            progress: Progress::default(),
        };
        let (mut frames, mut at_first) = (Vec::new(), Some(on_first_block));
        let took = &mut |frame| {
            frames.push(frame);
            if let Some(at_first) = at_first.take() {
                at_first();
            }
        };
        let answer = self.path.fetch(request, took).await.unwrap();
        self.path.release(LeaseId(lease)).await.unwrap();
        assert_eq!(frames.len(), answer.tiers().len());
        for (got, hash) in frames.iter().zip(&all) {
            assert_eq!(got.bytes, frame(self.manifest, generation, *hash).bytes);
        }
        answer
    }
}

async fn status(cluster: &LocalCluster) -> pb::StatusReply {
    let routers = RouterCalls::all(&cluster.router_addresses(), &cluster.identity().unwrap()).unwrap();
    routers[0].status().await.unwrap()
}

fn client(cluster: &LocalCluster) -> Client {
    Client::new(ClientConfig::new(cluster.router_addresses(), cluster.identity().unwrap())).unwrap()
}

/// Runs `kvfleet weights` with extra arguments.
fn weights(place: &Workspace, cluster: &LocalCluster, words: &[&str]) -> crate::support::CommandOutput {
    let (routers, tls) = (cluster.router_addresses().join(","), cluster.certificates());
    let reach = ["weights", "--cluster", &routers, "--tls-dir", tls.to_str().unwrap()];
    tokio::task::block_in_place(|| place.run(&[&reach[..], words].concat()))
}

async fn until<T>(what: &str, mut test: impl AsyncFnMut() -> Option<T>) -> T {
    let tries = async {
        loop {
            if let Some(value) = test().await {
                break value;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), tries)
        .await
        .unwrap_or_else(|_| panic!("timed out waiting: {what}"))
}

/// Leading blocks in the index, as of the latest commit.
async fn listed(cluster: &LocalCluster) -> u32 {
    let client = client(cluster);
    until("routers answer", async || {
        let reply = client.lookup(&hashes(0..BLOCKS), Vec::new(), true).await.ok()?;
        Some(reply.runs.iter().map(|run| run.len_blocks).sum())
    })
    .await
}

async fn until_listed(cluster: &LocalCluster, count: u32) {
    until("the index lists the blocks", async || (listed(cluster).await == count).then_some(())).await;
}

/// Waits until the node joins under the current weights.
async fn until_joined(place: &Workspace, cluster: &LocalCluster, generation: u32) {
    let said = format!("weights of generation {generation}: 1 of 1 nodes have joined under it");
    until("the node joins", async || weights(place, cluster, &[]).out.contains(&said).then_some(())).await;
}

/// An instance with outdated weights requests the promised blocks and gets none. The routers then
/// explain the misses.
async fn assert_outdated_weights_miss(place: &Workspace, cluster: &LocalCluster, request: u64) {
    let (client, identity) = (client(cluster), cluster.identity().unwrap());
    let tokens = u32::try_from(BLOCKS).unwrap() * 512;
    let call = RouteCall {
        request: RequestId(request),
        tenant: TenantId(0),
        category: Category::default(),
        hashes: hashes(0..BLOCKS),
        block_tokens: 512,
        input_tokens: tokens,
        output_tokens: 1,
        tbt_max_us: 0,
        identity: cluster.shape().manifest().digest(),
        after: Vec::new(),
        fresh: true,
    };
    let RouteAnswer::Decided(decision) = client.route(call).await.unwrap() else { panic!("rejected") };
    assert!(decision.fetch_blocks > 0, "{decision:?}");
    let address = decision.instance_address.clone();
    let run = pb::RunRequest {
        request,
        tenant: 0,
        category: None,
        hashes: hashes(0..BLOCKS).iter().flat_map(|hash| hash.0).collect(),
        block_tokens: 512,
        input_tokens: tokens,
        output_tokens: 1,
        decision: Some(decision),
        wait_save: true,
        traceparent: String::new(),
    };
    let ran =
        run_on_instance(channel(&address, &identity, tls::Role::Instance(None)).unwrap(), run).await.unwrap();
    assert_eq!((ran.hit_blocks, ran.saved_blocks, ran.wrong_bytes), (0, 0, 0));
    // One miss per source; each tier is a source.
    let differs = |reason: &String| reason == "generation_differs";
    assert!(!ran.misses.is_empty() && ran.misses.iter().all(differs), "{:?}", ran.misses);
    let (routers, tls) = (cluster.router_addresses().join(","), cluster.certificates());
    let (request, tls) = (request.to_string(), tls.to_str().unwrap().to_owned());
    let why = ["why", &request, "--cluster", &routers, "--tls-dir", &tls];
    until("the reason is explained", async || {
        let said = tokio::task::block_in_place(|| place.run(&why));
        (said.out.contains("(generation_differs)") && said.out.contains("kvfleet weights")).then_some(())
    })
    .await;
}

fn small(place: &Workspace) -> ClusterShape {
    let capacity = NodeCapacity { dram_blocks: 8, ssd_blocks: 256 };
    ClusterShape { nodes: 1, instances: 1, ..shape(place, capacity) }
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_weights_miss_with_their_reason() {
    let place = Workspace::new();
    let mut cluster = LocalCluster::start(small(&place)).await.unwrap();
    let node = NodeConnection::connect(&cluster).await;
    assert_eq!(u64::from(node.save_all(1, 0, 0..BLOCKS).await), BLOCKS);
    until_listed(&cluster, BLOCKS as u32).await;
    assert!(weights(&place, &cluster, &[]).ok().starts_with("weights of generation 0: 1 of 1 nodes"));
    let wrong = weights(&place, &cluster, &["--next", "7"]);
    says("a generation of weights that does not follow the one in force", &wrong.refused(&[]), &[]);

    // Most blocks are on SSD, and the weights change when the first block arrives.
    let handle = tokio::runtime::Handle::current();
    let change = || {
        let changed = weights(&place, &cluster, &["--next", "1"]).ok();
        assert!(changed.starts_with("weights are now of generation 1"), "{changed}");
        tokio::task::block_in_place(|| handle.block_on(until_joined(&place, &cluster, 1)));
    };
    let read = node.fetch(2, 0, 0..BLOCKS, change).await;
    assert_eq!(read.tiers().len() as u64, BLOCKS, "a read in progress completes");
    assert!(weights(&place, &cluster, &["--next", "1"]).ok().contains("already"));

    let before = node;
    let node = NodeConnection::connect(&cluster).await;
    assert!(node.epoch > before.epoch);
    assert_eq!(listed(&cluster).await, 0, "a block of the old weights is listed");
    let differs = FetchAnswer::Miss { reason: MissReason::GenerationDiffers };
    assert_eq!(node.fetch(3, 0, 0..BLOCKS, || {}).await, differs);
    let refused = SaveAnswer::Refused(SaveRefusal::GenerationDiffers);
    assert_eq!(node.save(4, 0, 0..BLOCKS).await, refused);
    let miss = FetchAnswer::Miss { reason: MissReason::NotHeld };
    assert_eq!(node.fetch(5, 1, 0..BLOCKS, || {}).await, miss);

    assert_eq!(
        u64::from(node.save_all(6, 1, 0..BLOCKS).await),
        BLOCKS,
        "the same hashes are different blocks now"
    );
    until_listed(&cluster, BLOCKS as u32).await;
    assert_eq!(node.fetch(7, 1, 0..BLOCKS, || {}).await.tiers().len() as u64, BLOCKS);
    assert_outdated_weights_miss(&place, &cluster, 4711).await;

    cluster.kill((Role::Node, 1)).await.unwrap();
    cluster.restart((Role::Node, 1)).await.unwrap();
    cluster.until_serving().await.unwrap();
    until("the node has joined again", async || {
        status(&cluster).await.nodes.iter().any(|one| one.live && one.epoch > node.epoch.0).then_some(())
    })
    .await;
    let node = NodeConnection::connect(&cluster).await;
    let mut back = 0;
    for number in 0..BLOCKS {
        assert_eq!(node.fetch(8, 0, number..number + 1, || {}).await, differs, "block {number}");
        back += node.fetch(9, 1, number..number + 1, || {}).await.tiers().len();
    }
    assert!(back > 0, "the SSD blocks of the last weights are back");
    cluster.stop().await;
}
