//! What is read where slices are asked for, in which order, over which rails, and what becomes of it when they fail.

use std::ops::Range;

use kv_core::id::Epoch;
use kv_core::pipeline::Arrive;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::rails::{NODE, Rails, never, rails_of};
use super::*;
use crate::AskedLayers;
use crate::suite::{EPOCH, Rooms, frame_of};

const ALL: Range<usize> = 0..usize::MAX;

fn holding_slices(blocks: u32, slices: &[u32]) -> MemoryService {
    let service = MemoryService::default();
    service.lie_ready();
    (0..blocks).for_each(|number| service.hold(frame_of(hash(number), slices)));
    service
}

/// So many rails at each end, over all of which a fetch of twenty frames or so is read.
fn rails(service: &MemoryService, several: usize) -> Rails {
    let lending = |arena| LendingService { inner: service.clone(), arena, maps: true };
    let config = RdmaConfig { large_bytes: 80_000, ..never() };
    rails_of(lending, (several, several), &config)
}

async fn fetch(path: &dyn crate::Path, blocks: u32, layers: Range<usize>) -> (FetchAnswer, Rooms) {
    let asked = AskedLayers { layers: layers.clone(), arrive: Arrive::ByLayer };
    let mut rooms = Rooms::new(&hashes(blocks), layers);
    let answer = path.fetch_layers(fetch_request(&hashes(blocks)), asked, &mut rooms).await.unwrap();
    rooms.check();
    (answer, rooms)
}

fn hit(blocks: u32) -> FetchAnswer {
    FetchAnswer::Hit { tiers: in_dram(blocks as usize) }
}

/// Each layer of each block was handed on once.
fn assert_whole(rooms: &Rooms, blocks: u32, layers: usize) {
    assert_eq!(rooms.layers_there(), vec![layers; blocks as usize]);
    assert_eq!(rooms.filled.iter().map(|(_, layers)| layers.len()).sum::<usize>(), layers * blocks as usize);
}

/// Both rails have a link, and the path knows how large frames are.
async fn warm(rails: &Rails) -> Arc<dyn crate::Path> {
    let path = rails.path().await;
    both_help(rails, path.as_ref()).await;
    path
}

/// Returns once a large history was read over both rails.
async fn both_help(rails: &Rails, path: &dyn crate::Path) {
    rails::both_help(rails, async || drop(fetch(path, 100, ALL).await)).await;
}

#[tokio::test]
async fn only_what_is_asked_is_read_and_a_layer_of_all_blocks_before_the_next() {
    for (maps, blocks) in [(true, 8), (false, 4)] {
        let service = holding_slices(blocks, &[20_000; 6]);
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
        assert_eq!(slices.len(), blocks * 2, "a read for each");
        for block in 0..blocks {
            assert_eq!(
                slices[blocks + block],
                slices[block] + 20_000,
                "all of a layer, then all of the next"
            );
        }
        let head = frame_of(hash(0), &[20_000; 6]).head().unwrap().bytes().len() as u64;
        assert_eq!(world.offer.carried().sent_bytes(), blocks as u64 * (head + 2 * 20_000), "what was asked");
        let all = world.client.numbers().read_bytes;
        fetch(path.as_ref(), blocks as u32, 0..0).await;
        let heads = world.client.numbers().read_bytes - all;
        assert!(heads < blocks as u64 * 1200, "{heads} bytes of heads and boards");
    }
}

#[tokio::test]
async fn a_long_history_is_read_layer_by_layer() {
    let service = holding_slices(120, &[130_000; 4]);
    let world = world(&service, true, &RdmaConfig { local_bytes: 8 << 20, ..small() });
    let path = world.path().await;
    let (answer, rooms) = fetch(path.as_ref(), 120, ALL).await;
    assert_eq!(answer, hit(120));
    let layers: Vec<usize> = rooms.filled.iter().map(|(_, layers)| layers.start).collect();
    assert!(layers.is_sorted() && layers.len() == 120 * 4, "{layers:?}");
}

#[tokio::test]
async fn heads_of_many_layers_are_read_in_two_steps() {
    let service = holding_slices(3, &[100; 300]);
    let world = world(&service, true, &small());
    let path = world.path().await;
    let (answer, rooms) = fetch(path.as_ref(), 3, 7..290).await;
    assert_eq!(answer, hit(3));
    assert_whole(&rooms, 3, 283);
}

#[tokio::test]
async fn a_history_larger_than_all_memory_for_it_is_read_through_it() {
    let service = holding_slices(40, &[30_000; 5]);
    let config = RdmaConfig { local_bytes: 1 << 20, tray_bytes: 400 << 10, ..small() };
    for maps in [true, false] {
        let world = world(&service, maps, &config);
        let path = world.path().await;
        let both = async { tokio::join!(fetch(path.as_ref(), 40, ALL), fetch(path.as_ref(), 40, 2..4)) };
        let ((answer, rooms), (other, some)) = tokio::time::timeout(PATIENCE, both).await.unwrap();
        assert_eq!((answer, other), (hit(40), hit(40)));
        assert_whole(&rooms, 40, 5);
        assert_whole(&some, 40, 2);
        assert_eq!(world.server.carried().sent_bytes(), 0, "nothing went over the connection");
    }
}

#[tokio::test]
async fn an_epoch_that_changes_while_slices_are_read_is_seen() {
    for maps in [true, false] {
        let world = world(&holding_slices(3, &[20_000; 4]), maps, &small());
        let path = world.path().await;
        let before = world.fabric.transfers().len();
        let fetch = fetch(path.as_ref(), 3, ALL);
        let restarted = async {
            // The heads came.
            world.until("slices are read", |world| world.fabric.transfers().len() > before + 4).await;
            let begun = world.fabric.transfers().split_off(before + 4);
            assert!(
                begun.iter().all(|transfer| transfer.len == 20_000),
                "the board is looked at behind them"
            );
            world.offer.answered(Epoch(EPOCH.0 + 1));
        };
        // What is read from now on is held back, but for the heads and their board.
        world.fabric.hold_from(before + 4);
        let ((answer, rooms), ()) = tokio::join!(fetch, async {
            restarted.await;
            world.fabric.let_go();
        });
        assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        assert_eq!(rooms.filled, [], "nothing that was read under the older one is handed on");
    }
}

#[tokio::test]
async fn a_slice_that_changes_while_it_is_read_spoils_its_block_and_nothing_before() {
    let service = holding_slices(3, &[20_000; 4]);
    let world = world(&service, true, &small());
    let path = world.path().await;
    let before = world.fabric.transfers().len();
    world.fabric.hold_from(before + 4);
    let fetch = fetch(path.as_ref(), 3, ALL);
    let rot = async {
        world.until("slices are read", |world| world.fabric.held() >= 3).await;
        let second = world.fabric.transfers()[before + 5];
        let arena = world.arena.memory();
        arena.write(second.remote_address - arena.address() + 77, &[0xEE; 3]);
        world.fabric.let_go();
    };
    let ((answer, rooms), ()) = tokio::join!(fetch, rot);
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::Corrupt });
    assert_eq!((&rooms.wrong[..], rooms.layers_there()[0]), (&[1][..], 4));
    assert!(rooms.filled.iter().all(|(position, _)| *position == 0), "{:?}", rooms.filled);
}

#[tokio::test]
async fn a_large_history_is_read_over_all_rails_under_one_lease() {
    let service = holding_slices(100, &[1000; 4]);
    let rails = rails(&service, 2);
    let path = warm(&rails).await;
    let (before, asked, began) =
        (rails.read(), service.deadlines().len(), rails.world.fabric.transfers().len());
    let (answer, rooms) = fetch(path.as_ref(), 100, ALL).await;
    assert_eq!((answer, service.deadlines().len() - asked), (hit(100), 1));
    assert_eq!(rails.took_part(began), 2);
    assert_whole(&rooms, 100, 4);
    let read: Vec<u64> = rails.read().iter().zip(before).map(|(after, before)| after - before).collect();
    assert!(read.iter().all(|read| *read > 100 * 4000 / 4), "{read:?}");
    // What is small leaves other rails to others.
    let before = rails.world.fabric.transfers().len();
    fetch(path.as_ref(), 5, ALL).await;
    assert_eq!(rails.took_part(before), 1);
}

#[tokio::test]
async fn what_came_before_a_rail_failed_is_not_read_again() {
    for several in [1, 2] {
        let service = holding_slices(300, &[20_000; 4]);
        let rails = rails(&service, several);
        let path = rails.path().await;
        fetch(path.as_ref(), 1, ALL).await;
        let before = rails.world.fabric.transfers().len();
        // In the last layer.
        rails.world.fabric.kill_after(NODE[0], before + 300 + 1000);
        let read: u64 = rails.read().iter().sum();
        let (answer, rooms) = fetch(path.as_ref(), 300, ALL).await;
        assert_eq!(answer, hit(300));
        assert_whole(&rooms, 300, 4);
        let read = rails.read().iter().sum::<u64>() - read;
        let sent = rails.world.server.carried().sent_bytes();
        if several == 1 {
            assert!(sent > 0, "the connection brings the rest");
        } else {
            let slices = read / 20_000;
            assert!(
                (1200..1500).contains(&slices),
                "{slices} slices: only those that nobody had seen were read again"
            );
            assert_eq!(sent, 0);
        }
    }
}

/// Whatever fails whenever: each slice that is handed on is right, in order and once, and everything comes as long as the node
/// is there.
#[tokio::test]
async fn rails_that_fail_at_any_time_lose_nothing() {
    for seed in 0..60 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut slices = vec![random.random_range(1000..9000)];
        slices.extend((0..random.random_range(0..5)).map(|_| random.random_range(0..6) * 1700));
        let service = holding_slices(100, &slices);
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
        rails.world.until("everything is given back", |world| world.fabric.queues().is_empty()).await;
    }
}

#[tokio::test]
async fn a_node_that_is_busy_behind_slices_that_came_is_not_asked_again_for_these() {
    let service = holding_slices(30, &[20_000; 4]);
    let rails = rails(&service, 1);
    let path = rails.path().await;
    let before = rails.world.fabric.transfers().len();
    // In the second layer.
    rails.world.fabric.hold_from(before + 31 + 45);
    let fetch = fetch(path.as_ref(), 30, ALL);
    let breaks = async {
        rails.world.until("slices are read", |world| world.fabric.held() > 0).await;
        service.set_busy(Some(Duration::from_millis(1)));
        rails.world.fabric.kill(NODE[0]);
        rails.world.fabric.let_go();
    };
    let ((answer, rooms), ()) = tokio::join!(fetch, breaks);
    assert!(!rooms.filled.is_empty());
    assert_eq!(
        answer,
        FetchAnswer::Miss { reason: MissReason::NodeLost },
        "to come again would bring them twice"
    );
}

#[tokio::test]
async fn a_frame_that_changed_between_two_rails_is_not_put_together_of_both() {
    let service = holding_slices(30, &[20_000; 4]);
    let rails = rails(&service, 2);
    let path = warm(&rails).await;
    let before = rails.world.fabric.transfers().len();
    rails.world.fabric.hold_from(before + 31 + 45);
    let fetch = fetch(path.as_ref(), 30, ALL);
    let breaks = async {
        rails.world.until("slices are read", |world| world.fabric.held() > 0).await;
        // The same block, saved anew by somebody whose KV differs in the last bits.
        service.hold(frame_of(hash(7), &[20_000, 20_000, 20_001, 19_999]));
        NODE.iter().for_each(|rail| rails.world.fabric.kill(*rail));
        rails.world.fabric.let_go();
    };
    let ((answer, rooms), ()) = tokio::join!(fetch, breaks);
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(7), reason: MissReason::Corrupt });
    assert_eq!((&rooms.wrong[..], &rooms.layers_there()[..7]), (&[7][..], &[4; 7][..]));
}

#[tokio::test]
async fn frames_that_no_card_reads_are_known_to_come_whole() {
    let service = holding_slices(2, &[100_000; 3]);
    let config = RdmaConfig { local_bytes: 256 << 10, tray_bytes: 64 << 10, ..small() };
    let world = world(&service, false, &config);
    let path = world.path().await;
    assert!(path.moves_slices());
    let (answer, rooms) = fetch(path.as_ref(), 2, ALL).await;
    assert_eq!((answer, path.moves_slices()), (hit(2), false));
    assert_eq!(rooms.received_bytes, 2 * frame_of(hash(0), &[100_000; 3]).bytes.len());
    service.hold(frame_of(hash(0), &[100; 3]));
    fetch(path.as_ref(), 1, ALL).await;
    assert!(path.moves_slices());
}

#[tokio::test]
async fn a_fetch_that_is_dropped_midway_gives_everything_back() {
    let service = holding_slices(100, &[1000; 4]);
    let rails = rails(&service, 2);
    let path = warm(&rails).await;
    // All memory of the client is lost several times, if any is.
    for _ in 0..100 {
        both_help(&rails, path.as_ref()).await;
        // Behind the heads, and a few boards.
        let begun = rails.world.fabric.transfers().len();
        rails.world.fabric.hold_from(begun + 150);
        tokio::select! {
            _ = fetch(path.as_ref(), 100, ALL) => panic!("reads are held back"),
            () = rails.world.until("reads are under way", |world| world.fabric.held() > 10) => {}
        }
        rails.world.fabric.let_go();
    }
    let (answer, _) = fetch(path.as_ref(), 100, ALL).await;
    assert_eq!(answer, hit(100));
    drop(path);
    rails.world.until("ended", |world| world.fabric.queues().is_empty()).await;
}
