//! Weights that change under a running cluster of real processes: what is missed from one call on and why, who reads on, and
//! what a node that restarts brings back.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Category, Epoch, Generation, IdentityDigest, LeaseId, RequestId, TenantId};
use kvfleet::calls::{RouterCalls, channel, run_on_instance};
use kvfleet::cluster::{Cluster, NodeCapacity, Shape};
use kvfleet::process::Role;
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall};
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::{content, pb};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::{
    Asker, Dialer, FetchAnswer, FetchRequest, MissReason, Path, Progress, SaveAnswer, SaveRefusal,
    SaveRequest,
};

use crate::support::{Place, shape};

const BLOCK_BYTES: usize = 4096;
const BLOCKS: u64 = 24;

/// Blocks of one chain, as the index sees it.
fn hash(number: u64) -> BlockHash {
    let mut bytes = [0x5a; 16];
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    let first = BlockHash([0x5a; 16]);
    BlockHash(bytes).in_chain(0x5a, first, number as usize)
}

fn hashes(numbers: Range<u64>) -> Vec<BlockHash> {
    numbers.map(hash).collect()
}

/// Bytes of a block under a generation: under another they are others.
fn frame(identity: IdentityDigest, generation: u32, hash: BlockHash) -> Frame {
    let mut payload = vec![0u8; BLOCK_BYTES];
    content::fill(hash, &mut payload);
    payload.iter_mut().for_each(|byte| *byte ^= generation as u8);
    let slices = [u32::try_from(BLOCK_BYTES / 4).unwrap(); 4];
    seal(identity.of_generation(Generation(generation)), hash, KeyForm::Rotated, &slices, &payload).unwrap()
}

/// The one node as an instance meets it.
struct At {
    manifest: IdentityDigest,
    path: Arc<dyn Path>,
    epoch: Epoch,
}

impl At {
    async fn of(cluster: &Cluster) -> At {
        let node = status(cluster).await.nodes.into_iter().find(|node| node.live).expect("it has joined");
        let dialer = QuicDialer::new(&cluster.identity().unwrap(), QuicConfig::default());
        let path = dialer.dial(node.data_address).await.unwrap();
        At { manifest: cluster.shape().manifest().digest(), path, epoch: Epoch(node.epoch) }
    }

    fn asker(&self, lease: u64, generation: u32) -> Asker {
        Asker {
            lease: LeaseId(lease),
            request: RequestId(lease),
            tenant: TenantId(0),
            category: Category::default(),
            identity: self.manifest.of_generation(Generation(generation)),
            traceparent: String::new(),
            class: None,
        }
    }

    async fn save(&self, lease: u64, generation: u32, numbers: Range<u64>) -> SaveAnswer {
        let all = hashes(numbers.clone());
        let request = SaveRequest {
            asker: self.asker(lease, generation),
            parent: numbers.start.checked_sub(1).map(hash),
            first_offset_blocks: u32::try_from(numbers.start).unwrap(),
            hashes: all.clone(),
            frame_bytes: frame(self.manifest, generation, hash(0)).bytes.len() as u64,
        };
        let saved = self.path.save(request, &|at| frame(self.manifest, generation, all[at])).await.unwrap();
        self.path.release(LeaseId(lease)).await.unwrap();
        saved
    }

    async fn stored(&self, lease: u64, generation: u32, numbers: Range<u64>) -> u32 {
        match self.save(lease, generation, numbers).await {
            SaveAnswer::Done(done) => done.stored_blocks,
            other => panic!("{other:?}"),
        }
    }

    /// What comes is of these weights to the last byte; `at_first` is done when the first block is there.
    async fn fetch(
        &self,
        lease: u64,
        generation: u32,
        numbers: Range<u64>,
        at_first: impl FnOnce() + Send,
    ) -> FetchAnswer {
        let all = hashes(numbers.clone());
        let request = FetchRequest {
            asker: self.asker(lease, generation),
            epoch: self.epoch,
            first_offset_blocks: u32::try_from(numbers.start).unwrap(),
            hashes: all.clone(),
            deadline: Duration::from_secs(30),
            progress: Progress::default(),
        };
        let (mut frames, mut at_first) = (Vec::new(), Some(at_first));
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

async fn status(cluster: &Cluster) -> pb::StatusReply {
    let routers = RouterCalls::all(&cluster.router_addresses(), &cluster.identity().unwrap()).unwrap();
    routers[0].status().await.unwrap()
}

fn client(cluster: &Cluster) -> Client {
    Client::new(ClientConfig::new(cluster.router_addresses(), cluster.identity().unwrap())).unwrap()
}

/// `kvfleet weights` with further words.
fn weights(place: &Place, cluster: &Cluster, words: &[&str]) -> crate::support::Ran {
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
    tokio::time::timeout(Duration::from_secs(60), tries).await.unwrap_or_else(|_| panic!("never: {what}"))
}

/// The leading blocks that the index lists, as of what is committed now.
async fn listed(cluster: &Cluster) -> u32 {
    let client = client(cluster);
    until("routers answer", async || {
        let reply = client.lookup(&hashes(0..BLOCKS), Vec::new(), true).await.ok()?;
        Some(reply.runs.iter().map(|run| run.len_blocks).sum())
    })
    .await
}

async fn until_listed(cluster: &Cluster, count: u32) {
    until("the index lists them", async || (listed(cluster).await == count).then_some(())).await;
}

/// Until the node has joined under the weights in force.
async fn until_joined(place: &Place, cluster: &Cluster, generation: u32) {
    let said = format!("weights of generation {generation}: 1 of 1 nodes have joined under it");
    until("the node joins", async || weights(place, cluster, &[]).out.contains(&said).then_some(())).await;
}

/// An instance that still has the weights of before asks for what a decision promises, and routers can say why it got nothing.
async fn asks_in_vain(place: &Place, cluster: &Cluster, request: u64) {
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
    let ran = run_on_instance(channel(&address, &identity).unwrap(), run).await.unwrap();
    assert_eq!((ran.hit_blocks, ran.saved_blocks, ran.wrong_bytes), (0, 0, 0));
    // One for each source, which there is for each tier.
    let differs = |reason: &String| reason == "generation_differs";
    assert!(!ran.misses.is_empty() && ran.misses.iter().all(differs), "{:?}", ran.misses);
    let (routers, tls) = (cluster.router_addresses().join(","), cluster.certificates());
    let (request, tls) = (request.to_string(), tls.to_str().unwrap().to_owned());
    let why = ["why", &request, "--cluster", &routers, "--tls-dir", &tls];
    until("the reason is told", async || {
        let said = tokio::task::block_in_place(|| place.run(&why));
        (said.out.contains("(generation_differs)") && said.out.contains("kvfleet weights")).then_some(())
    })
    .await;
}

fn small(place: &Place) -> Shape {
    let capacity = NodeCapacity { dram_blocks: 8, ssd_blocks: 256 };
    Shape { nodes: 1, instances: 1, ..shape(place, capacity) }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_weights_are_missed_with_their_reason_and_what_is_read_meanwhile_is_right() {
    let place = Place::new();
    let mut cluster = Cluster::start(small(&place)).await.unwrap();
    let node = At::of(&cluster).await;
    assert_eq!(u64::from(node.stored(1, 0, 0..BLOCKS).await), BLOCKS);
    until_listed(&cluster, BLOCKS as u32).await;
    assert!(weights(&place, &cluster, &[]).ok().starts_with("weights of generation 0: 1 of 1 nodes"));
    let wrong = weights(&place, &cluster, &["--next", "7"]);
    says("a generation of weights that does not follow the one in force", &wrong.refused(&[]), &[]);

    // Most of it is on SSD, and the change comes when the first block is there.
    let handle = tokio::runtime::Handle::current();
    let change = || {
        let changed = weights(&place, &cluster, &["--next", "1"]).ok();
        assert!(changed.starts_with("weights are of generation 1 from now on"), "{changed}");
        tokio::task::block_in_place(|| handle.block_on(until_joined(&place, &cluster, 1)));
    };
    let read = node.fetch(2, 0, 0..BLOCKS, change).await;
    assert_eq!(read.tiers().len() as u64, BLOCKS, "who began to read has all of it");
    assert!(weights(&place, &cluster, &["--next", "1"]).ok().contains("already"));

    let before = node;
    let node = At::of(&cluster).await;
    assert!(node.epoch > before.epoch);
    assert_eq!(listed(&cluster).await, 0, "nothing of before is listed");
    let differs = FetchAnswer::Miss { reason: MissReason::GenerationDiffers };
    assert_eq!(node.fetch(3, 0, 0..BLOCKS, || {}).await, differs);
    let refused = SaveAnswer::Refused(SaveRefusal::GenerationDiffers);
    assert_eq!(node.save(4, 0, 0..BLOCKS).await, refused);
    let miss = FetchAnswer::Miss { reason: MissReason::NotHeld };
    assert_eq!(node.fetch(5, 1, 0..BLOCKS, || {}).await, miss);

    assert_eq!(u64::from(node.stored(6, 1, 0..BLOCKS).await), BLOCKS, "the same hashes are other blocks now");
    until_listed(&cluster, BLOCKS as u32).await;
    assert_eq!(node.fetch(7, 1, 0..BLOCKS, || {}).await.tiers().len() as u64, BLOCKS);
    asks_in_vain(&place, &cluster, 4711).await;

    cluster.kill((Role::Node, 1)).await.unwrap();
    cluster.restart((Role::Node, 1)).await.unwrap();
    cluster.until_serving().await.unwrap();
    until("the node has joined again", async || {
        status(&cluster).await.nodes.iter().any(|one| one.live && one.epoch > node.epoch.0).then_some(())
    })
    .await;
    let node = At::of(&cluster).await;
    let mut back = 0;
    for number in 0..BLOCKS {
        assert_eq!(node.fetch(8, 0, number..number + 1, || {}).await, differs, "block {number}");
        back += node.fetch(9, 1, number..number + 1, || {}).await.tiers().len();
    }
    assert!(back > 0, "what was on SSD of the last weights is there");
    cluster.stop().await;
}
