//! A node with a change of weights: misses and their reasons, reads in progress, and restarts.

use crate::world::*;
use kv_core::content;
use kv_core::id::{BlockHash, Epoch, Generation, LeaseId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_node::{Node, NodeConfig};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_transport::{FetchAnswer, FetchRequest, MissReason, Path, SaveAnswer, SaveRefusal, SaveRequest};

/// Blocks of one weights generation; another one has other bytes.
#[derive(Clone, Copy)]
struct WeightsVersion(u32);

impl WeightsVersion {
    fn frame(self, hash: BlockHash) -> Frame {
        let mut payload = vec![0u8; BLOCK_BYTES];
        content::fill(hash, &mut payload);
        payload.iter_mut().for_each(|byte| *byte ^= self.0 as u8);
        let half = u32::try_from(BLOCK_BYTES / 2).unwrap();
        let identity = our_identity().with_generation(Generation(self.0));
        seal(identity, hash, KeyForm::Rotated, &[half, half], &payload).unwrap()
    }

    fn fetch_request(self, lease: u64, epoch: u64, all: &[BlockHash]) -> FetchRequest {
        let mut request = fetch_request(lease, Epoch(epoch), all);
        request.context.identity = our_identity().with_generation(Generation(self.0));
        request
    }

    /// Every frame received has exactly the bytes of these weights.
    async fn fetch(self, path: &dyn Path, lease: u64, epoch: u64, all: &[BlockHash]) -> FetchAnswer {
        let mut frames = Vec::new();
        let request = self.fetch_request(lease, epoch, all);
        let answer = path.fetch(request, &mut |frame| frames.push(frame)).await.unwrap();
        path.release(LeaseId(lease)).await.unwrap();
        assert_eq!(frames.len(), answer.tiers().len());
        for (frame, hash) in frames.iter().zip(all) {
            assert_eq!(frame.bytes, self.frame(*hash).bytes);
        }
        answer
    }

    fn save_request(self, lease: u64, first: u64, all: &[BlockHash]) -> SaveRequest {
        let mut request = save_request(lease, first, all);
        request.context.identity = our_identity().with_generation(Generation(self.0));
        request
    }

    async fn save(self, path: &dyn Path, lease: u64, numbers: std::ops::Range<u64>) -> SaveAnswer {
        let all = hashes(numbers.clone());
        let request = self.save_request(lease, numbers.start, &all);
        let answer = path.save(request, &|position| self.frame(all[position])).await.unwrap();
        path.release(LeaseId(lease)).await.unwrap();
        answer
    }
}

fn stored(answer: &SaveAnswer) -> u32 {
    match answer {
        SaveAnswer::Done(done) => done.stored_blocks,
        other => panic!("{other:?}"),
    }
}

fn small(world: &TestCluster, router: &str) -> NodeConfig {
    let config = world.config(&[router.to_owned()]);
    NodeConfig { dram_blocks: Some(2), ssd_blocks: Some(16), ..config }
}

/// The routers change the weights, and the node follows: its epoch ends, and the next one confirms
/// it.
async fn change_weights(router: &FakeRouter, path: &dyn Path, generation: u32) -> u64 {
    let next = {
        let mut state = router.state.lock();
        state.generation = generation;
        state.epoch += 1;
        state.epoch + 1
    };
    let miss = FetchAnswer::Miss { reason: MissReason::NotHeld };
    eventually("the node follows", async || {
        (WeightsVersion(generation).fetch(path, 900, next, &hashes(800..801)).await == miss).then_some(())
    })
    .await;
    next
}

async fn on_ssd(world: &TestCluster, node: &Node, count: u64) {
    eventually("blocks are on SSD", async || {
        let mut control = world.control(node.control_addr()).await;
        let status = control.node_status(kvfleet_proto::pb::NodeStatusRequest {}).await.unwrap().into_inner();
        let moving = status.tiers.iter().map(|tier| tier.blocks).sum::<u64>();
        (status.tiers[1].blocks == count && moving == count + 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn blocks_of_earlier_weights_miss_and_new_ones_are_stored() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&small(&world, &router.serve(&world.router).await)).await;
    let epoch = router.joined().await;
    let path = world.dial(node.data_addr()).await;
    let (old, new, all) = (WeightsVersion(0), WeightsVersion(1), hashes(0..4));
    eventually("the node knows its epoch", async || {
        (old.fetch(&*path, 9, epoch, &all[..1]).await == FetchAnswer::Miss { reason: MissReason::NotHeld })
            .then_some(())
    })
    .await;
    assert_eq!(stored(&old.save(&*path, 1, 0..4).await), 4);
    assert_eq!(old.fetch(&*path, 2, epoch, &all).await.tiers().len(), 4);
    let ahead = new.fetch(&*path, 3, epoch, &all).await;
    assert_eq!(
        ahead,
        FetchAnswer::Miss { reason: MissReason::GenerationDiffers },
        "a caller ahead of the node learns the reason too"
    );

    let epoch = change_weights(&router, &*path, 1).await;
    let FetchAnswer::Miss { reason } = old.fetch(&*path, 4, epoch, &all).await else { panic!("a hit") };
    says("a fetch under other weights than those in force", &reason.name(), &[]);
    let refused = old.save(&*path, 5, 10..12).await;
    assert_eq!(refused, SaveAnswer::Refused(SaveRefusal::GenerationDiffers));
    let miss = FetchAnswer::Miss { reason: MissReason::NotHeld };
    assert_eq!(new.fetch(&*path, 6, epoch, &all).await, miss);
    assert!(router.state.lock().blocks.is_empty(), "no block of earlier weights is announced");

    assert_eq!(stored(&new.save(&*path, 7, 0..3).await), 3);
    assert_eq!(new.fetch(&*path, 8, epoch, &all[..3]).await.tiers().len(), 3);
    router.wait_for("the new blocks are announced", |state| state.blocks.len() == 3).await;
    node.shutdown().await;
}

#[tokio::test]
async fn frames_of_another_generation_than_their_save_are_refused() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&small(&world, &router.serve(&world.router).await)).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    let epoch = change_weights(&router, &*path, 1).await;
    let all = hashes(0..1);
    let request = WeightsVersion(1).save_request(1, 0, &all);
    let answer = path.save(request, &|_| WeightsVersion(0).frame(all[0])).await.unwrap();
    assert!(matches!(answer, SaveAnswer::Done(done) if (done.stored_blocks, done.refused_blocks) == (0, 1)));
    let miss = FetchAnswer::Miss { reason: MissReason::NotHeld };
    assert_eq!(WeightsVersion(1).fetch(&*path, 2, epoch, &all).await, miss);
    node.shutdown().await;
}

#[tokio::test]
async fn read_in_progress_keeps_its_weights() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let node = start(&small(&world, &router.serve(&world.router).await)).await;
    let epoch = router.joined().await;
    let path = world.dial(node.data_addr()).await;
    let (old, new, all) = (WeightsVersion(0), WeightsVersion(1), hashes(0..4));
    eventually("the node takes blocks under its epoch", async || {
        old.save(&*path, 1, 0..4).await;
        (old.fetch(&*path, 2, epoch, &all).await.tiers().len() == 4).then_some(())
    })
    .await;
    // In this process, so that no block is read before the change: two are in DRAM, two are still
    // to be loaded.
    let service = node.blocks();
    let mut reply = service.fetch(old.fetch_request(77, epoch, &all)).await;
    assert_eq!(reply.answer.tiers().len(), 4);
    let epoch = change_weights(&router, &*path, 1).await;
    assert_eq!(stored(&new.save(&*path, 3, 0..4).await), 4);
    for hash in &all {
        let frame = reply.frames.next().await.expect("every block comes");
        assert_eq!(frame.bytes, old.frame(*hash).bytes);
    }
    service.release(LeaseId(77)).await;
    assert_eq!(new.fetch(&*path, 4, epoch, &all).await.tiers().len(), 4);
    node.shutdown().await;
}

#[tokio::test]
async fn restart_restores_blocks_of_the_last_weights_only() {
    let world = TestCluster::new();
    let router = FakeRouter::default();
    let config = small(&world, &router.serve(&world.router).await);
    let node = start(&config).await;
    router.joined().await;
    let path = world.dial(node.data_addr()).await;
    assert_eq!(stored(&WeightsVersion(0).save(&*path, 1, 0..5).await), 5);
    on_ssd(&world, &node, 3).await;
    change_weights(&router, &*path, 1).await;
    assert_eq!(stored(&WeightsVersion(1).save(&*path, 2, 0..4).await), 4);
    on_ssd(&world, &node, 2).await;
    node.shutdown().await;

    let node = start_again(&config).await;
    router.wait_for("two of them are announced", |state| state.blocks.len() == 2).await;
    let (epoch, here): (u64, Vec<BlockHash>) = {
        let state = router.state.lock();
        assert!(state.blocks.values().all(|tier| *tier == Tier::Ssd));
        (state.epoch, state.blocks.keys().copied().collect())
    };
    let path = world.dial(node.data_addr()).await;
    for hash in here {
        let hit = FetchAnswer::Hit { tiers: vec![Tier::Ssd] };
        assert_eq!(WeightsVersion(1).fetch(&*path, 3, epoch, &[hash]).await, hit);
    }
    node.shutdown().await;

    let joins = {
        let mut state = router.state.lock();
        state.generation = 2;
        state.joins.len()
    };
    let node = start_again(&config).await;
    router.wait_for("it joins", |state| state.joins.len() > joins).await;
    let path = world.dial(node.data_addr()).await;
    let epoch = router.state.lock().epoch;
    for hash in hashes(0..5) {
        let asked = async || {
            let answer = WeightsVersion(2).fetch(&*path, 4, epoch, &[hash]).await;
            (answer == FetchAnswer::Miss { reason: MissReason::NotHeld }).then_some(())
        };
        eventually("no block of earlier weights is present", asked).await;
    }
    assert!(router.state.lock().blocks.is_empty());
    node.shutdown().await;
}
