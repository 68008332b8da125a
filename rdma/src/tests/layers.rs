//! Layer-wise fetches: the slices read, their order, the rails used, and failures of rails.

use std::ops::Range;

use kv_core::id::Epoch;
use kv_core::pipeline::ArrivalOrder;
use kvfleet_transport::LayerRequest;
use kvfleet_transport::suite::{CheckedSlices, EPOCH, frame_of};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::rails::{NODE, TestRails, never_retry, rails_of};
use super::*;

const ALL: Range<usize> = 0..usize::MAX;

fn service_with_slices(blocks: u32, slices: &[u32]) -> MemoryService {
    let service = MemoryService::default();
    service.make_frames_ready();
    (0..blocks).for_each(|number| service.hold(frame_of(hash(number), slices)));
    service
}

/// This number of rails at each end; a fetch of about twenty frames uses all of them.
fn rails(service: &MemoryService, several: usize) -> TestRails {
    let lending = |arena| SharedArenaService { inner: service.clone(), arena, may_map: true };
    let config = RdmaConfig { large_bytes: 80_000, ..never_retry() };
    rails_of(lending, (several, several), &config)
}

async fn fetch(
    path: &dyn kvfleet_transport::Path,
    blocks: u32,
    layers: Range<usize>,
) -> (FetchAnswer, CheckedSlices) {
    let asked = LayerRequest { layers: layers.clone(), arrive: ArrivalOrder::ByLayer };
    let mut rooms = CheckedSlices::new(&hashes(blocks), layers);
    let answer = path.fetch_layers(fetch_request(&hashes(blocks)), asked, &mut rooms).await.unwrap();
    rooms.check();
    (answer, rooms)
}

fn hit(blocks: u32) -> FetchAnswer {
    FetchAnswer::Hit { tiers: in_dram(blocks as usize) }
}

/// Each layer of each block was delivered once.
fn assert_whole(rooms: &CheckedSlices, blocks: u32, layers: usize) {
    assert_eq!(rooms.layers_received(), vec![layers; blocks as usize]);
    assert_eq!(rooms.filled.iter().map(|(_, layers)| layers.len()).sum::<usize>(), layers * blocks as usize);
}

/// A path with a link on both rails that knows the frame size.
async fn warm(rails: &TestRails) -> Arc<dyn kvfleet_transport::Path> {
    let path = rails.path().await;
    both_help(rails, path.as_ref()).await;
    path
}

/// Returns once a large history was read over both rails.
async fn both_help(rails: &TestRails, path: &dyn kvfleet_transport::Path) {
    rails::wait_all_rails_used(rails, async || drop(fetch(path, 100, ALL).await)).await;
}

#[tokio::test]
async fn only_requested_slices_are_read_layer_by_layer() {
    for (maps, blocks) in [(true, 8), (false, 4)] {
        let service = service_with_slices(blocks, &[20_000; 6]);
        let world = world(&service, maps, &small());
        let path = world.path().await;
        let before = world.fabric.transfers().len();
        let (answer, rooms) = fetch(path.as_ref(), blocks, 1..3).await;
        assert_eq!(answer, hit(blocks));
        assert_whole(&rooms, blocks, 2);
        let blocks = blocks as usize;
        let slices: Vec<u64> = world.fabric.transfers()[before..]
            .iter()
            .filter(|transfer| transfer.len == 20_000)
            .map(|transfer| transfer.remote_address)
            .collect();
        assert_eq!(slices.len(), blocks * 2, "one read for each slice");
        for block in 0..blocks {
            assert_eq!(
                slices[blocks + block],
                slices[block] + 20_000,
                "all of a layer, then all of the next"
            );
        }
        let head = frame_of(hash(0), &[20_000; 6]).head().unwrap().bytes().len() as u64;
        assert_eq!(
            world.rdma_server.carried().sent_bytes(),
            blocks as u64 * (head + 2 * 20_000),
            "only the requested bytes count"
        );
        let all = world.client.stats().read_bytes;
        fetch(path.as_ref(), blocks as u32, 0..0).await;
        let heads = world.client.stats().read_bytes - all;
        assert!(heads < blocks as u64 * 1200, "{heads} bytes of heads and epoch words");
    }
}

#[tokio::test]
async fn a_long_history_is_read_layer_by_layer() {
    let service = service_with_slices(120, &[130_000; 4]);
    let world = world(&service, true, &RdmaConfig { local_bytes: 8 << 20, ..small() });
    let path = world.path().await;
    let (answer, rooms) = fetch(path.as_ref(), 120, ALL).await;
    assert_eq!(answer, hit(120));
    let layers: Vec<usize> = rooms.filled.iter().map(|(_, layers)| layers.start).collect();
    assert!(layers.is_sorted() && layers.len() == 120 * 4, "{layers:?}");
}

#[tokio::test]
async fn heads_of_many_layers_are_read_in_two_steps() {
    let service = service_with_slices(3, &[100; 300]);
    let world = world(&service, true, &small());
    let path = world.path().await;
    let (answer, rooms) = fetch(path.as_ref(), 3, 7..290).await;
    assert_eq!(answer, hit(3));
    assert_whole(&rooms, 3, 283);
}

#[tokio::test]
async fn a_history_larger_than_registered_memory_is_read() {
    let service = service_with_slices(40, &[30_000; 5]);
    let config = RdmaConfig { local_bytes: 1 << 20, bounce_buffer_bytes: 400 << 10, ..small() };
    for maps in [true, false] {
        let world = world(&service, maps, &config);
        let path = world.path().await;
        let both = async { tokio::join!(fetch(path.as_ref(), 40, ALL), fetch(path.as_ref(), 40, 2..4)) };
        let ((answer, rooms), (other, some)) = tokio::time::timeout(PATIENCE, both).await.unwrap();
        assert_eq!((answer, other), (hit(40), hit(40)));
        assert_whole(&rooms, 40, 5);
        assert_whole(&some, 40, 2);
        assert_eq!(world.server.traffic().sent_bytes(), 0, "no block used the connection");
    }
}

#[tokio::test]
async fn an_epoch_change_during_slice_reads_is_detected() {
    for maps in [true, false] {
        let world = world(&service_with_slices(3, &[20_000; 4]), maps, &small());
        let path = world.path().await;
        let before = world.fabric.transfers().len();
        let fetch = fetch(path.as_ref(), 3, ALL);
        let restarted = async {
            // The heads have arrived.
            world.wait_until("slices are read", |world| world.fabric.transfers().len() > before + 4).await;
            let begun = world.fabric.transfers().split_off(before + 4);
            assert!(begun.iter().all(|transfer| transfer.len == 20_000), "the epoch word is read after them");
            world.rdma_server.set_epoch(Epoch(EPOCH.0 + 1));
        };
        // From now on reads are held back, after those of the heads and their epoch word.
        world.fabric.hold_from(before + 4);
        let ((answer, rooms), ()) = tokio::join!(fetch, async {
            restarted.await;
            world.fabric.release();
        });
        assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        assert_eq!(rooms.filled, [], "slices read under the older epoch must not be delivered");
    }
}

#[tokio::test]
async fn a_slice_that_changes_during_its_read_corrupts_only_later_blocks() {
    let service = service_with_slices(3, &[20_000; 4]);
    let world = world(&service, true, &small());
    let path = world.path().await;
    let before = world.fabric.transfers().len();
    world.fabric.hold_from(before + 4);
    let fetch = fetch(path.as_ref(), 3, ALL);
    let rot = async {
        world.wait_until("slices are read", |world| world.fabric.held() >= 3).await;
        let second = world.fabric.transfers()[before + 5];
        let arena = world.arena.memory();
        arena.write(second.remote_address - arena.address() + 77, &[0xEE; 3]);
        world.fabric.release();
    };
    let ((answer, rooms), ()) = tokio::join!(fetch, rot);
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::Corrupt });
    assert_eq!((&rooms.wrong[..], rooms.layers_received()[0]), (&[1][..], 4));
    assert!(rooms.filled.iter().all(|(position, _)| *position == 0), "{:?}", rooms.filled);
}

#[tokio::test]
async fn a_large_history_is_read_over_all_rails_under_one_lease() {
    let service = service_with_slices(100, &[1000; 4]);
    let rails = rails(&service, 2);
    let path = warm(&rails).await;
    let (before, asked, began) =
        (rails.read_bytes(), service.deadlines().len(), rails.world.fabric.transfers().len());
    let (answer, rooms) = fetch(path.as_ref(), 100, ALL).await;
    assert_eq!((answer, service.deadlines().len() - asked), (hit(100), 1));
    assert_eq!(rails.rails_used(began), 2);
    assert_whole(&rooms, 100, 4);
    let read: Vec<u64> =
        rails.read_bytes().iter().zip(before).map(|(after, before)| after - before).collect();
    assert!(read.iter().all(|read| *read > 100 * 4000 / 4), "{read:?}");
    // A small fetch leaves the other rails free.
    let before = rails.world.fabric.transfers().len();
    fetch(path.as_ref(), 5, ALL).await;
    assert_eq!(rails.rails_used(before), 1);
}

#[tokio::test]
async fn slices_read_before_a_rail_failure_are_not_read_again() {
    for several in [1, 2] {
        let service = service_with_slices(300, &[20_000; 4]);
        let rails = rails(&service, several);
        let path = rails.path().await;
        fetch(path.as_ref(), 1, ALL).await;
        let before = rails.world.fabric.transfers().len();
        // In the last layer.
        rails.world.fabric.kill_after(NODE[0], before + 300 + 1000);
        let read: u64 = rails.read_bytes().iter().sum();
        let (answer, rooms) = fetch(path.as_ref(), 300, ALL).await;
        assert_eq!(answer, hit(300));
        assert_whole(&rooms, 300, 4);
        let read = rails.read_bytes().iter().sum::<u64>() - read;
        let sent = rails.world.server.traffic().sent_bytes();
        if several == 1 {
            assert!(sent > 0, "the connection brings the remaining blocks");
        } else {
            let slices = read / 20_000;
            assert!(
                (1200..1500).contains(&slices),
                "{slices} slices: only undelivered ones may be read again"
            );
            assert_eq!(sent, 0);
        }
    }
}

/// Whatever fails at any time, each delivered slice is correct, in order and unique, and all arrive
/// while the node lives.
#[tokio::test]
async fn rail_failures_lose_no_slice() {
    for seed in 0..60 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut slices = vec![random.random_range(1000..9000)];
        slices.extend((0..random.random_range(0..5)).map(|_| random.random_range(0..6) * 1700));
        let service = service_with_slices(100, &slices);
        let rails = rails(&service, 2);
        let path = warm(&rails).await;
        let began = rails.world.fabric.transfers().len();
        let dead: Vec<u8> = NODE.into_iter().filter(|_| random.random_bool(0.6)).collect();
        for rail in &dead {
            rails.world.fabric.kill_after(*rail, began + random.random_range(0..500));
        }
        let first = random.random_range(0..slices.len());
        let (answer, rooms) = fetch(path.as_ref(), 100, first..slices.len()).await;
        assert_eq!(answer, hit(100), "seed {seed}: {dead:?}");
        assert_whole(&rooms, 100, slices.len() - first);
        drop(path);
        rails
            .world
            .wait_until("all queue pairs are destroyed", |world| world.fabric.queues().is_empty())
            .await;
    }
}

#[tokio::test]
async fn a_busy_node_is_not_asked_again_for_delivered_slices() {
    let service = service_with_slices(30, &[20_000; 4]);
    let rails = rails(&service, 1);
    let path = rails.path().await;
    let before = rails.world.fabric.transfers().len();
    // In the second layer.
    rails.world.fabric.hold_from(before + 31 + 45);
    let fetch = fetch(path.as_ref(), 30, ALL);
    let breaks = async {
        rails.world.wait_until("slices are read", |world| world.fabric.held() > 0).await;
        service.set_busy(Some(Duration::from_millis(1)));
        rails.world.fabric.kill(NODE[0]);
        rails.world.fabric.release();
    };
    let ((answer, rooms), ()) = tokio::join!(fetch, breaks);
    assert!(!rooms.filled.is_empty());
    assert_eq!(
        answer,
        FetchAnswer::Miss { reason: MissReason::NodeLost },
        "a retry would deliver them twice"
    );
}

#[tokio::test]
async fn a_frame_that_changed_between_rails_is_not_mixed() {
    let service = service_with_slices(30, &[20_000; 4]);
    let rails = rails(&service, 2);
    let path = warm(&rails).await;
    let before = rails.world.fabric.transfers().len();
    rails.world.fabric.hold_from(before + 31 + 45);
    let fetch = fetch(path.as_ref(), 30, ALL);
    let breaks = async {
        rails.world.wait_until("slices are read", |world| world.fabric.held() > 0).await;
        // The same block, saved again by an instance with KV that differs in the last bits.
        service.hold(frame_of(hash(7), &[20_000, 20_000, 20_001, 19_999]));
        NODE.iter().for_each(|rail| rails.world.fabric.kill(*rail));
        rails.world.fabric.release();
    };
    let ((answer, rooms), ()) = tokio::join!(fetch, breaks);
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(7), reason: MissReason::Corrupt });
    assert_eq!((&rooms.wrong[..], &rooms.layers_received()[..7]), (&[7][..], &[4; 7][..]));
}

#[tokio::test]
async fn the_path_learns_that_large_frames_come_whole() {
    let service = service_with_slices(2, &[100_000; 3]);
    let config = RdmaConfig { local_bytes: 256 << 10, bounce_buffer_bytes: 64 << 10, ..small() };
    let world = world(&service, false, &config);
    let path = world.path().await;
    assert!(path.fetches_slices());
    let (answer, rooms) = fetch(path.as_ref(), 2, ALL).await;
    assert_eq!((answer, path.fetches_slices()), (hit(2), false));
    assert_eq!(rooms.received_bytes, 2 * frame_of(hash(0), &[100_000; 3]).bytes.len());
    service.hold(frame_of(hash(0), &[100; 3]));
    fetch(path.as_ref(), 1, ALL).await;
    assert!(path.fetches_slices());
}

#[tokio::test]
async fn a_dropped_layer_fetch_releases_everything() {
    let service = service_with_slices(100, &[1000; 4]);
    let rails = rails(&service, 2);
    let path = warm(&rails).await;
    // If each round lost any memory, all of the client's memory would be lost several times.
    for _ in 0..100 {
        both_help(&rails, path.as_ref()).await;
        // After the heads and a few epoch words.
        let begun = rails.world.fabric.transfers().len();
        rails.world.fabric.hold_from(begun + 150);
        tokio::select! {
            _ = fetch(path.as_ref(), 100, ALL) => panic!("the reads are held back"),
            () = rails.world.wait_until("reads are in flight", |world| world.fabric.held() > 10) => {}
        }
        rails.world.fabric.release();
    }
    let (answer, _) = fetch(path.as_ref(), 100, ALL).await;
    assert_eq!(answer, hit(100));
    drop(path);
    rails.world.wait_until("ended", |world| world.fabric.queues().is_empty()).await;
}
