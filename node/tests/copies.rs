//! Copies between nodes by a router's word: what comes is what the source holds, and nothing that goes wrong leaves anything wrong.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{BlockHash, Epoch, Generation, LeaseId, Tier};
use kv_core::place::copies::CopyEnd;
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

/// A node of this number with a router of its own, in its first epoch.
async fn joined(world: &World, id: u32, change: impl FnOnce(&mut NodeConfig)) -> (Node, FakeRouter) {
    let router = FakeRouter::default();
    let mut config = world.config(&[router.serve(&world.identity).await]);
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

async fn ask(world: &World, target: &Node, request: pb::CopyBlocksRequest) -> pb::CopyBlocksReply {
    let mut control = control_as(&world.router, target.control_addr()).await;
    control.copy_blocks(request).await.unwrap().into_inner()
}

fn told(reply: &pb::CopyBlocksReply) -> (CopyEnd, u32, u32) {
    (CopyEnd::from_number(reply.end).unwrap(), reply.stored_blocks, reply.present_blocks)
}

/// Leading blocks that a node serves, whole and right.
async fn served(world: &World, node: &Node, numbers: std::ops::Range<u64>) -> usize {
    let path = world.dial(node.data_addr()).await;
    let (_, frames) = fetch(&*path, 900, 1, &hashes(numbers)).await;
    path.release(LeaseId(900)).await.unwrap();
    frames
}

/// The service in memory under the identity of these tests.
struct OfOurs(MemoryService);

impl BlockService for OfOurs {
    fn fetch(&self, mut request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        request.asker.identity = IDENTITY;
        self.0.fetch(request)
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.0.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

/// A source that holds these frames, whatever they are.
fn source_of(world: &World, frames: Vec<Frame>) -> (QuicServer, MemoryService) {
    let service = MemoryService::default();
    service.set_epoch(Epoch(1));
    frames.into_iter().for_each(|frame| service.hold(frame));
    let any = "127.0.0.1:0".parse().unwrap();
    (QuicServer::bind(any, &world.identity, Arc::new(OfOurs(service.clone()))).unwrap(), service)
}

#[tokio::test]
async fn a_run_is_copied_announced_and_served_and_what_is_there_is_not_fetched_again() {
    let world = World::new();
    let (source, _) = joined(&world, 3, |config| config.ssd_blocks = Some(64)).await;
    let (target, router) = joined(&world, 4, |_| ()).await;
    let path = world.dial(source.data_addr()).await;
    save(&*path, 1, 0..10).await;
    let at = source.data_addr().to_string();
    let reply = ask(&world, &target, request(&at, 0..6)).await;
    assert_eq!(told(&reply), (CopyEnd::Copied, 6, 0));
    assert_eq!(reply.stored_bytes, 6 * frame(hash(0)).bytes.len() as u64);
    let seen = reply.visible_at.unwrap();
    assert_eq!((seen.node, seen.epoch, seen.shard), (4, 1, 1));
    router.holds("the copies are announced", |state| state.blocks.len() == 6).await;
    assert_eq!(served(&world, &target, 0..10).await, 6);
    // Further on in the same prefix, beginning with what is there.
    let reply = ask(&world, &target, request(&at, 4..10)).await;
    assert_eq!(told(&reply), (CopyEnd::Copied, 4, 2));
    assert_eq!(served(&world, &target, 0..10).await, 10);
    let (answer, _) = fetch(&*path, 901, 1, &hashes(0..10)).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: vec![Tier::Dram; 10] }, "the source has all that it had");
    // More than the source has: what there is comes.
    let reply = ask(&world, &target, request(&at, 8..14)).await;
    assert_eq!(told(&reply), (CopyEnd::NotHeld, 0, 2));
    source.shutdown().await;
    target.shutdown().await;
}

#[tokio::test]
async fn only_routers_say_what_is_copied_and_what_cannot_be_read_is_refused() {
    let world = World::new();
    let (target, _router) = joined(&world, 4, |_| ()).await;
    // A node, an instance or a person of the same cluster.
    let mut other = world.control(target.control_addr()).await;
    let refused = other.copy_blocks(request("127.0.0.1:1", 0..1)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    says("a copy asked for by somebody who is no router", &refused.message(), &[]);
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
        request.run.as_mut().unwrap().blocks = vec![0; 16 * (COPY_BLOCKS_MAX + 1)];
    });
    says("a copy of too many blocks", &many.await, &[]);
    target.shutdown().await;
}

#[tokio::test]
async fn whatever_is_wrong_with_a_source_is_told_and_nothing_of_it_is_kept() {
    let world = World::new();
    let (target, router) = joined(&world, 4, |_| ()).await;
    let (lies, service) = source_of(&world, (0..4).map(|number| frame(hash(number))).collect());
    let at = lies.local_addr().to_string();
    let end = async |request| told(&ask(&world, &target, request).await);
    // Of another epoch than the router heard of; the service answers as a node does.
    assert_eq!(
        end(pb::CopyBlocksRequest { source_epoch: 9, ..request(&at, 0..4) }).await,
        (CopyEnd::StaleEpoch, 0, 0)
    );
    // A bit that flipped behind a whole block: what came before stays.
    let mut bytes = frame(hash(1)).bytes.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    service.hold(Frame { bytes: Bytes::from(bytes), ..frame(hash(1)) });
    assert_eq!(end(request(&at, 0..4)).await, (CopyEnd::Corrupt, 1, 0));
    assert_eq!(served(&world, &target, 0..4).await, 1);
    // Another block under the name of the one that is asked for.
    service.hold(Frame { hash: hash(1), ..frame(hash(7)) });
    assert_eq!(end(request(&at, 1..4)).await, (CopyEnd::Corrupt, 0, 0));
    service.hold(frame(hash(1)));
    service.fail_medium();
    assert_eq!(end(request(&at, 1..4)).await.0, CopyEnd::MediumFailed);
    lies.close().await;
    assert_eq!(end(request(&at, 1..4)).await, (CopyEnd::SourceLost, 0, 0));
    let nobody = "127.0.0.1:1";
    assert_eq!(end(request(nobody, 1..4)).await, (CopyEnd::SourceLost, 0, 0));
    assert_eq!(router.state.lock().blocks.keys().copied().collect::<Vec<BlockHash>>(), [hash(0)]);
    // The room that was kept for what did not come is there for others.
    let path = world.dial(target.data_addr()).await;
    assert_eq!(save(&*path, 5, 100..163).await.stored_blocks, 63);
    target.shutdown().await;
}

#[tokio::test]
async fn other_weights_and_another_model_are_not_copied() {
    let world = World::new();
    let (target, _router) = joined(&world, 4, |_| ()).await;
    let (source, _) = source_of(&world, vec![frame(hash(0))]);
    let at = source.local_addr().to_string();
    let of = |identity: [u8; 16]| pb::CopyBlocksRequest { identity: identity.to_vec(), ..request(&at, 0..1) };
    let other = ask(&world, &target, of(our_identity().of_generation(Generation(1)).0)).await;
    assert_eq!(told(&other).0, CopyEnd::GenerationDiffers);
    assert_eq!(told(&ask(&world, &target, of([9; 16])).await).0, CopyEnd::IdentityDiffers);
    assert_eq!(served(&world, &target, 0..1).await, 0);
    source.close().await;
    target.shutdown().await;
}

#[tokio::test]
async fn a_copy_takes_no_more_than_there_is_room_time_and_budget_for() {
    let world = World::new();
    let (target, router) = joined(&world, 4, |config| config.dram_blocks = Some(8)).await;
    let (source, service) = source_of(&world, (0..20).map(|number| frame(hash(number))).collect());
    let at = source.local_addr().to_string();
    let frame_bytes = frame(hash(0)).bytes.len() as u64;
    let cut = pb::CopyBlocksRequest { bytes_max: 3 * frame_bytes + 1, ..request(&at, 0..6) };
    // Of unknown size each block counts as the longest frame there may be.
    let reply = ask(&world, &target, cut).await;
    assert_eq!((told(&reply).0, reply.stored_bytes <= 3 * frame_bytes), (CopyEnd::Budget, true));
    // All that is here is pinned, and there is no room for more.
    let pins = vec![pb::PinnedBlocks {
        pin: 1,
        blocks: convert::hashes_to_bytes(&hashes(0..8)),
        ..pb::PinnedBlocks::default()
    }];
    router.state.lock().directives = Some(pb::Directives { version: 4, pins, quotas: vec![], ttls: vec![] });
    let mut control = control_as(&world.router, target.control_addr()).await;
    eventually("the pin is heard of", async || {
        ask(&world, &target, request(&at, 0..8)).await;
        let status = control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner();
        (status.pinned_blocks == 8).then_some(())
    })
    .await;
    assert_eq!(told(&ask(&world, &target, request(&at, 0..20)).await), (CopyEnd::Full, 0, 8));
    assert_eq!(served(&world, &target, 0..20).await, 8, "what was pinned is there");
    // Others have all of the source until the time is over.
    service.set_busy(Some(Duration::from_millis(20)));
    router.state.lock().directives =
        Some(pb::Directives { version: 5, pins: vec![], quotas: vec![], ttls: vec![] });
    let short = pb::CopyBlocksRequest { within_ms: 300, ..request(&at, 8..10) };
    eventually("there is room again, and the source is busy", async || {
        let (end, ..) = told(&ask(&world, &target, short.clone()).await);
        matches!(end, CopyEnd::SourceBusy | CopyEnd::TooLate).then_some(())
    })
    .await;
    source.close().await;
    target.shutdown().await;
    let (none, _router) = joined(&world, 5, |config| config.copies = 0).await;
    assert_eq!(told(&ask(&world, &none, request(&at, 0..1)).await), (CopyEnd::Queue, 0, 0));
    none.shutdown().await;
}

#[tokio::test]
async fn more_copies_than_may_wait_are_refused_and_those_that_wait_come_to_their_turn() {
    let world = World::new();
    let (target, _router) = joined(&world, 4, |config| config.copies = 1).await;
    let (source, service) = source_of(&world, (0..64).map(|number| frame(hash(number))).collect());
    service.set_gate(0);
    let at = source.local_addr().to_string();
    let mut asked = tokio::task::JoinSet::new();
    for number in 0..40 {
        let (request, mut control) =
            (request(&at, number..number + 1), control_as(&world.router, target.control_addr()).await);
        asked.spawn(async move { told(&control.copy_blocks(request).await.unwrap().into_inner()).0 });
    }
    // One under way and sixteen behind it; the others hear so at once.
    for _ in 0..40 - 17 {
        assert_eq!(asked.join_next().await.unwrap().unwrap(), CopyEnd::Queue);
    }
    service.set_gate(1_000);
    while let Some(end) = asked.join_next().await {
        assert_eq!(end.unwrap(), CopyEnd::Copied);
    }
    source.close().await;
    target.shutdown().await;
}

#[tokio::test]
async fn who_does_not_wait_for_a_copy_ends_it_and_leaves_nothing_behind() {
    let world = World::new();
    let (target, _router) = joined(&world, 4, |config| config.dram_blocks = Some(4)).await;
    let (source, service) = source_of(&world, (0..4).map(|number| frame(hash(number))).collect());
    service.set_gate(0);
    let mut control = control_as(&world.router, target.control_addr()).await;
    let mut open = Box::pin(control.copy_blocks(request(&source.local_addr().to_string(), 0..4)));
    let asked = async {
        tokio::select! {
            _ = &mut open => panic!("nothing passes"),
            () = async { while service.deadlines().is_empty() { tokio::task::yield_now().await } } => {}
        }
    };
    asked.await;
    drop(open);
    let path = world.dial(target.data_addr()).await;
    eventually("its room is free for others", async || {
        (save(&*path, 7, 10..14).await.stored_blocks + save(&*path, 8, 10..14).await.present_blocks == 8)
            .then_some(())
    })
    .await;
    source.close().await;
    target.shutdown().await;
}
