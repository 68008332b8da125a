//! Copies between nodes on a router's request: the copied blocks are right, and failures leave no
//! wrong state.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{BlockHash, Epoch, Generation, HASH_BYTES, LeaseId, Tier};
use kv_core::place::copies::CopyOutcome;
use kvfleet_errors_doc::says;
use kvfleet_node::copies::COPY_BLOCKS_MAX;
use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::convert;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::quic::QuicServer;
use kvfleet_transport::suite::{IDENTITY, MemoryService};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, SaveOffer, SaveRequest, SaveSession,
};
use tonic::Code;

use crate::world::*;

/// A node of this number with its own router, in its first epoch.
async fn joined(world: &TestCluster, id: u32, change: impl FnOnce(&mut NodeConfig)) -> (Node, FakeRouter) {
    let router = FakeRouter::default();
    let mut config = world.config(&[router.serve(&world.router).await]);
    (config.id, config.data_dir) = (id, world.dir.path().join(format!("ssd-{id}")));
    change(&mut config);
    let node = start(&config).await;
    assert_eq!(router.joined().await, 1);
    (node, router)
}

fn request(source: &str, numbers: std::ops::Range<u64>) -> pb::CopyBlocksRequest {
    pb::CopyBlocksRequest {
        run: Some(pb::BlockRun {
            blocks: convert::hashes_to_bytes(&hashes(numbers.clone())),
            parent: convert::parent_to_bytes(numbers.start.checked_sub(1).map(hash)),
            first_offset_blocks: u32::try_from(numbers.start).unwrap(),
            ..pb::BlockRun::default()
        }),
        source: 3,
        source_epoch: 1,
        source_address: source.to_owned(),
        identity: our_identity().0.to_vec(),
        bytes_max: u64::MAX,
        within_ms: 20_000,
    }
}

async fn ask(world: &TestCluster, target: &Node, request: pb::CopyBlocksRequest) -> pb::CopyBlocksReply {
    let mut control = control_as(&world.router, target.control_addr()).await;
    control.copy_blocks(request).await.unwrap().into_inner()
}

fn outcome(reply: &pb::CopyBlocksReply) -> (CopyOutcome, u32, u32) {
    (CopyOutcome::from_number(reply.end).unwrap(), reply.stored_blocks, reply.present_blocks)
}

/// Number of leading blocks that a node serves, verified.
async fn served(world: &TestCluster, node: &Node, numbers: std::ops::Range<u64>) -> usize {
    let path = world.dial(node.data_addr()).await;
    let (_, frames) = fetch(&*path, 900, 1, &hashes(numbers)).await;
    path.release(LeaseId(900)).await.unwrap();
    frames
}

/// The in-memory service under the identity of these tests.
struct RekeyedService(MemoryService);

impl BlockService for RekeyedService {
    fn fetch(&self, mut request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        request.context.identity = IDENTITY;
        self.0.fetch(request)
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.0.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

/// A source that holds these frames, valid or not.
fn source_of(world: &TestCluster, frames: Vec<Frame>) -> (QuicServer, MemoryService) {
    let service = MemoryService::default();
    service.set_epoch(Epoch(1));
    frames.into_iter().for_each(|frame| service.hold(frame));
    let any = "127.0.0.1:0".parse().unwrap();
    (QuicServer::bind(any, &world.node, Arc::new(RekeyedService(service.clone()))).unwrap(), service)
}

#[tokio::test]
async fn copied_run_is_announced_and_served_and_present_blocks_are_skipped() {
    let world = TestCluster::new();
    let (source, _) = joined(&world, 3, |config| config.ssd_blocks = Some(64)).await;
    let (target, router) = joined(&world, 4, |_| ()).await;
    let path = world.dial(source.data_addr()).await;
    save(&*path, 1, 0..10).await;
    let at = source.data_addr().to_string();
    let reply = ask(&world, &target, request(&at, 0..6)).await;
    assert_eq!(outcome(&reply), (CopyOutcome::Copied, 6, 0));
    assert_eq!(reply.stored_bytes, 6 * frame(hash(0)).bytes.len() as u64);
    let seen = reply.visible_at.unwrap();
    assert_eq!((seen.node, seen.epoch, seen.shard), (4, 1, 1));
    router.wait_for("the copies are announced", |state| state.blocks.len() == 6).await;
    assert_eq!(served(&world, &target, 0..10).await, 6);
    // A later part of the same prefix, starting with blocks that are present.
    let reply = ask(&world, &target, request(&at, 4..10)).await;
    assert_eq!(outcome(&reply), (CopyOutcome::Copied, 4, 2));
    assert_eq!(served(&world, &target, 0..10).await, 10);
    let (answer, _) = fetch(&*path, 901, 1, &hashes(0..10)).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: vec![Tier::Dram; 10] }, "the source kept all its blocks");
    // More than the source has: the available blocks are copied.
    let reply = ask(&world, &target, request(&at, 8..14)).await;
    assert_eq!(outcome(&reply), (CopyOutcome::NotHeld, 0, 2));
    source.shutdown().await;
    target.shutdown().await;
}

#[tokio::test]
async fn only_routers_order_copies_and_malformed_requests_are_refused() {
    let world = TestCluster::new();
    let (target, _router) = joined(&world, 4, |_| ()).await;
    // A node, an instance or a person of the same cluster.
    let mut other = world.control(target.control_addr()).await;
    let refused = other.copy_blocks(request("127.0.0.1:1", 0..1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    says("a copy requested by a caller that is not a router", &refused.message(), &[]);
    let mut tenant = control_as(&world.tenant, target.control_addr()).await;
    let refused = tenant.copy_blocks(request("127.0.0.1:1", 0..1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut control = control_as(&world.router, target.control_addr()).await;
    let mut wrong = async |change: fn(&mut pb::CopyBlocksRequest)| {
        let mut request = request("127.0.0.1:1", 0..1);
        change(&mut request);
        let status = control.copy_blocks(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        status.message().to_owned()
    };
    says("a copy without a run", &wrong(|request| request.run = None).await, &[]);
    wrong(|request| request.run.as_mut().unwrap().blocks.truncate(15)).await;
    wrong(|request| request.run.as_mut().unwrap().parent = vec![1]).await;
    wrong(|request| request.identity.truncate(3)).await;
    let many = wrong(|request| {
        request.run.as_mut().unwrap().blocks = vec![0; HASH_BYTES * (COPY_BLOCKS_MAX + 1)];
    });
    says("a copy of too many blocks", &many.await, &[]);
    target.shutdown().await;
}

#[tokio::test]
async fn source_failures_are_reported_and_no_bad_block_is_stored() {
    let world = TestCluster::new();
    let (target, router) = joined(&world, 4, |_| ()).await;
    let (lies, service) = source_of(&world, (0..4).map(|number| frame(hash(number))).collect());
    let at = lies.local_addr().to_string();
    let end = async |request| outcome(&ask(&world, &target, request).await);
    // Another epoch than the router knew; the service answers as a node does.
    assert_eq!(
        end(pb::CopyBlocksRequest { source_epoch: 9, ..request(&at, 0..4) }).await,
        (CopyOutcome::StaleEpoch, 0, 0)
    );
    // A flipped bit in the second block: the first one stays.
    let mut bytes = frame(hash(1)).bytes.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    service.hold(Frame { bytes: Bytes::from(bytes), ..frame(hash(1)) });
    assert_eq!(end(request(&at, 0..4)).await, (CopyOutcome::Corrupt, 1, 0));
    assert_eq!(served(&world, &target, 0..4).await, 1);
    // Another block under the requested hash.
    service.hold(Frame { hash: hash(1), ..frame(hash(7)) });
    assert_eq!(end(request(&at, 1..4)).await, (CopyOutcome::Corrupt, 0, 0));
    service.hold(frame(hash(1)));
    service.fail_medium();
    assert_eq!(end(request(&at, 1..4)).await.0, CopyOutcome::MediumFailed);
    lies.close().await;
    assert_eq!(end(request(&at, 1..4)).await, (CopyOutcome::SourceLost, 0, 0));
    let nobody = "127.0.0.1:1";
    assert_eq!(end(request(nobody, 1..4)).await, (CopyOutcome::SourceLost, 0, 0));
    assert_eq!(router.state.lock().blocks.keys().copied().collect::<Vec<BlockHash>>(), [hash(0)]);
    // Space reserved for blocks that did not arrive is free again.
    let path = world.dial(target.data_addr()).await;
    assert_eq!(save(&*path, 5, 100..163).await.stored_blocks, 63);
    target.shutdown().await;
}

#[tokio::test]
async fn other_weights_or_models_are_not_copied() {
    let world = TestCluster::new();
    let (target, _router) = joined(&world, 4, |_| ()).await;
    let (source, _) = source_of(&world, vec![frame(hash(0))]);
    let at = source.local_addr().to_string();
    let of = |identity: [u8; 16]| pb::CopyBlocksRequest { identity: identity.to_vec(), ..request(&at, 0..1) };
    let other = ask(&world, &target, of(our_identity().with_generation(Generation(1)).0)).await;
    assert_eq!(outcome(&other).0, CopyOutcome::GenerationDiffers);
    assert_eq!(outcome(&ask(&world, &target, of([9; 16])).await).0, CopyOutcome::IdentityDiffers);
    assert_eq!(served(&world, &target, 0..1).await, 0);
    source.close().await;
    target.shutdown().await;
}

#[tokio::test]
async fn copy_respects_space_time_and_budget() {
    let world = TestCluster::new();
    let (target, router) = joined(&world, 4, |config| config.dram_blocks = Some(8)).await;
    let (source, service) = source_of(&world, (0..20).map(|number| frame(hash(number))).collect());
    let at = source.local_addr().to_string();
    let frame_bytes = frame(hash(0)).bytes.len() as u64;
    let cut = pb::CopyBlocksRequest { bytes_max: 3 * frame_bytes + 1, ..request(&at, 0..6) };
    // Without a known size, each block counts as the longest possible frame.
    let reply = ask(&world, &target, cut).await;
    assert_eq!((outcome(&reply).0, reply.stored_bytes <= 3 * frame_bytes), (CopyOutcome::Budget, true));
    // All blocks here are pinned, and there is no space for more.
    let pins = vec![pb::PinnedBlocks {
        pin: 1,
        blocks: convert::hashes_to_bytes(&hashes(0..8)),
        ..pb::PinnedBlocks::default()
    }];
    router.state.lock().directives = Some(pb::Directives { version: 4, pins, quotas: vec![], ttls: vec![] });
    let mut control = control_as(&world.router, target.control_addr()).await;
    eventually("the pin is applied", async || {
        ask(&world, &target, request(&at, 0..8)).await;
        let status = control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner();
        (status.pinned_blocks == 8).then_some(())
    })
    .await;
    assert_eq!(outcome(&ask(&world, &target, request(&at, 0..20)).await), (CopyOutcome::Full, 0, 8));
    assert_eq!(served(&world, &target, 0..20).await, 8, "the pinned blocks are present");
    // The source is busy until the time is over.
    service.set_busy(Some(Duration::from_millis(20)));
    router.state.lock().directives =
        Some(pb::Directives { version: 5, pins: vec![], quotas: vec![], ttls: vec![] });
    let short = pb::CopyBlocksRequest { within_ms: 300, ..request(&at, 8..10) };
    eventually("there is space again, and the source is busy", async || {
        let (end, ..) = outcome(&ask(&world, &target, short.clone()).await);
        matches!(end, CopyOutcome::SourceBusy | CopyOutcome::TooLate).then_some(())
    })
    .await;
    source.close().await;
    target.shutdown().await;
    let (none, _router) = joined(&world, 5, |config| config.copies = 0).await;
    assert_eq!(outcome(&ask(&world, &none, request(&at, 0..1)).await), (CopyOutcome::Queue, 0, 0));
    none.shutdown().await;
}

#[tokio::test]
async fn copies_beyond_the_queue_are_refused_and_queued_ones_run() {
    let world = TestCluster::new();
    let (target, _router) = joined(&world, 4, |config| config.copies = 1).await;
    let (source, service) = source_of(&world, (0..64).map(|number| frame(hash(number))).collect());
    service.set_gate(0);
    let at = source.local_addr().to_string();
    let mut asked = tokio::task::JoinSet::new();
    for number in 0..40 {
        let (request, mut control) =
            (request(&at, number..number + 1), control_as(&world.router, target.control_addr()).await);
        asked.spawn(async move { outcome(&control.copy_blocks(request).await.unwrap().into_inner()).0 });
    }
    // One runs and sixteen are queued; the others are refused at once.
    for _ in 0..40 - 17 {
        assert_eq!(asked.join_next().await.unwrap().unwrap(), CopyOutcome::Queue);
    }
    service.set_gate(1_000);
    while let Some(end) = asked.join_next().await {
        assert_eq!(end.unwrap(), CopyOutcome::Copied);
    }
    source.close().await;
    target.shutdown().await;
}

#[tokio::test]
async fn dropped_copy_call_ends_the_copy_and_frees_its_space() {
    let world = TestCluster::new();
    let (target, _router) = joined(&world, 4, |config| config.dram_blocks = Some(4)).await;
    let (source, service) = source_of(&world, (0..4).map(|number| frame(hash(number))).collect());
    service.set_gate(0);
    let mut control = control_as(&world.router, target.control_addr()).await;
    let mut open = Box::pin(control.copy_blocks(request(&source.local_addr().to_string(), 0..4)));
    let asked = async {
        tokio::select! {
            _ = &mut open => panic!("no frame passes the closed gate"),
            () = async { while service.deadlines().is_empty() { tokio::task::yield_now().await } } => {}
        }
    };
    asked.await;
    drop(open);
    let path = world.dial(target.data_addr()).await;
    eventually("its space is free for others", async || {
        (save(&*path, 7, 10..14).await.stored_blocks + save(&*path, 8, 10..14).await.present_blocks == 8)
            .then_some(())
    })
    .await;
    source.close().await;
    target.shutdown().await;
}
