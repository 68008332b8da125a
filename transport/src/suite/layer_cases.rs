//! The cases of the suite for layer-wise fetches. The name states the expected behaviour.
#![allow(missing_docs)]

use std::ops::Range;
use std::time::Duration;

use bytes::BytesMut;
use kv_core::id::Epoch;
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::frame::Frame;
use tokio::time::timeout;

use super::{CheckedSlices, EPOCH, MemoryService, PATIENCE, fetch_request, frame_of, hash, hashes, in_dram};
use crate::{FetchAnswer, FetchRequest, LayerRequest, MissReason, Path};

/// Slices of each block: long, short and empty ones.
const SLICES: [u32; 5] = [20_000, 0, 100, 40_000, 3000];

const ALL: Range<usize> = 0..usize::MAX;

/// As in [`super::cases`].
const SHORT: Duration = Duration::from_secs(2);

fn hold(service: &MemoryService, blocks: u32) {
    (0..blocks).for_each(|number| service.hold(frame_of(hash(number), &SLICES)));
}

/// Fetches in both orders: the results must agree.
async fn fetch(path: &dyn Path, request: FetchRequest, layers: Range<usize>) -> (FetchAnswer, CheckedSlices) {
    let (answer, rooms) = fetch_as(path, request.clone(), layers.clone(), ArrivalOrder::ByBlock).await;
    let (same, others) = fetch_as(path, request, layers, ArrivalOrder::ByLayer).await;
    assert_eq!((&answer, rooms.layers_received().len()), (&same, others.layers_received().len()));
    (same, others)
}

async fn fetch_as(
    path: &dyn Path,
    request: FetchRequest,
    layers: Range<usize>,
    arrive: ArrivalOrder,
) -> (FetchAnswer, CheckedSlices) {
    let mut rooms = CheckedSlices::new(&request.hashes, layers.clone());
    let answer = path
        .fetch_layers(request, LayerRequest { layers, arrive }, &mut rooms)
        .await
        .expect("the path works");
    rooms.check();
    (answer, rooms)
}

async fn all(path: &dyn Path, blocks: u32, layers: Range<usize>) -> (FetchAnswer, CheckedSlices) {
    fetch(path, fetch_request(&hashes(blocks)), layers).await
}

pub async fn layers_of_all_blocks(service: &MemoryService, path: &dyn Path) {
    hold(service, 6);
    let (answer, rooms) = all(path, 6, ALL).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(6) });
    assert_eq!(rooms.layers_received(), [5; 6]);
    assert_eq!(rooms.received_bytes, 6 * frame_of(hash(0), &SLICES).bytes.len());
    let (answer, rooms) = all(path, 0, ALL).await;
    assert_eq!((answer, rooms.received_bytes), (FetchAnswer::Hit { tiers: Vec::new() }, 0));
}

pub async fn layers_of_a_range(service: &MemoryService, path: &dyn Path) {
    hold(service, 3);
    for (layers, there) in [(1..4, 3), (3..9, 2), (0..1, 1), (7..9, 0), (2..2, 0)] {
        let (answer, rooms) = all(path, 3, layers.clone()).await;
        assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(3) }, "{layers:?}");
        assert_eq!(rooms.layers_received(), [there; 3], "{layers:?}");
    }
}

pub async fn layers_of_what_is_held(service: &MemoryService, path: &dyn Path) {
    hold(service, 4);
    service.forget(hash(2));
    let (answer, rooms) = all(path, 4, ALL).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NotHeld });
    assert_eq!(rooms.layers_received(), [5; 2]);
    service.end_with(MissReason::Busy);
    let (answer, rooms) = all(path, 2, ALL).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::Busy });
    assert_eq!(rooms.layers_received(), [0; 0]);
}

pub async fn layers_that_are_late(service: &MemoryService, path: &dyn Path) {
    hold(service, 5);
    service.set_gate(2);
    let request = FetchRequest { deadline: SHORT, ..fetch_request(&hashes(5)) };
    let (answer, rooms) = fetch_as(path, request, ALL, ArrivalOrder::ByLayer).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::TooLate });
    assert_eq!(rooms.layers_received(), [5; 2]);
    service.set_gate(100);
    let (answer, _) = all(path, 5, ALL).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(5) }, "the path works on");
}

/// Like [`super::cases::fetch_over_the_end_of_an_epoch`]: no block mixes slices of two answers.
pub async fn layers_over_the_end_of_an_epoch(service: &MemoryService, path: &dyn Path) {
    hold(service, 4);
    service.set_gate(2);
    let mut rooms = CheckedSlices::new(&hashes(4), ALL);
    let mut filled = rooms.slice_count();
    let asked = LayerRequest { layers: ALL, arrive: ArrivalOrder::ByLayer };
    let fetch = path.fetch_layers(fetch_request(&hashes(4)), asked, &mut rooms);
    let ends = async {
        let _ = filled.wait_for(|filled| *filled > 0).await; // the sender is with the fetch
        service.set_epoch(Epoch(EPOCH.0 + 1));
        // The same blocks with other slices.
        (0..4).for_each(|number| service.hold(frame_of(hash(number), &[30_000, 100, 0, 33_000, 0])));
        service.set_gate(100);
    };
    let (answer, ()) = timeout(PATIENCE, async { tokio::join!(fetch, ends) }).await.expect("the fetch ends");
    assert_eq!(answer.expect("the path works"), FetchAnswer::Hit { tiers: in_dram(4) });
    assert_eq!(rooms.slice_bytes(), [&SLICES[..]; 4], "a header of another answer");
    assert_eq!((&rooms.wrong[..], rooms.layers_received()), (&[][..], vec![5; 4]));
    rooms.check();
    let stale = fetch_as(path, fetch_request(&hashes(4)), ALL, ArrivalOrder::ByLayer).await;
    assert_eq!(
        stale.0,
        FetchAnswer::Miss { reason: MissReason::StaleEpoch },
        "a later request with the old epoch"
    );
}

pub async fn layers_that_are_wrong(service: &MemoryService, path: &dyn Path) {
    hold(service, 4);
    let good = frame_of(hash(1), &SLICES);
    let mut bytes = BytesMut::from(&good.bytes[..]);
    let third = good.slice(3).expect("the slice exists");
    let at = third.as_ptr() as usize - good.bytes.as_ptr() as usize;
    bytes[at + third.len() - 1] ^= 1;
    service.hold(Frame { bytes: bytes.freeze(), ..good });
    let (answer, rooms) = all(path, 4, ALL).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::Corrupt });
    assert_eq!(rooms.wrong, [1]);
    assert_eq!(rooms.layers_received()[0], 5, "the block before is incomplete");
    assert!(rooms.layers_received()[1] <= 3, "the wrong slice was passed on: {rooms:?}");
    let (answer, rooms) = all(path, 4, 0..3).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(4) }, "its other layers are valid");
    assert!(rooms.wrong.is_empty());

    service.hold(Frame { hash: hash(1), ..frame_of(hash(9), &SLICES) });
    let (answer, rooms) = all(path, 4, ALL).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::Corrupt });
    assert_eq!(
        (&rooms.wrong[..], rooms.layers_received()),
        (&[1][..], vec![5]),
        "another block was passed on"
    );
}

/// Not for every path: one that moves whole frames has another order.
pub async fn layers_come_one_after_the_other(service: &MemoryService, path: &dyn Path) {
    hold(service, 4);
    service.make_frames_ready();
    let (_, rooms) = all(path, 4, ALL).await;
    let layers: Vec<usize> = rooms.filled.iter().map(|(_, layers)| layers.start).collect();
    assert!(layers.is_sorted(), "{:?}", rooms.filled);
    assert!(rooms.filled.len() >= 3 * 4, "too few pieces: {:?}", rooms.filled);
}

pub async fn layers_of_a_frame_without_a_head(service: &MemoryService, path: &dyn Path) {
    hold(service, 3);
    let good = frame_of(hash(1), &SLICES);
    let mut bytes = BytesMut::from(&good.bytes[..]);
    bytes[50] ^= 1;
    service.hold(Frame { bytes: bytes.freeze(), ..good });
    let (answer, rooms) = all(path, 3, ALL).await;
    assert_eq!(answer, FetchAnswer::Partial { tiers: in_dram(1), reason: MissReason::Corrupt });
    assert_eq!(rooms.layers_received(), [5], "the block before is incomplete");
    service.hold(frame_of(hash(1), &SLICES));
    assert_eq!(all(path, 3, ALL).await.0, FetchAnswer::Hit { tiers: in_dram(3) }, "the path works on");
}
