//! Saves by layer, with slices before heads: their slots, their commit, and the release of their
//! slots.
#![allow(clippy::unwrap_used)]

use kv_core::id::LeaseId;
use kvfleet_proto::frame::{Frame, SliceLayout};
use kvfleet_transport::{BlockService, FetchAnswer, LayerBuffers, MissReason, SaveOffer, SaveSession};

use super::tests::{BLOCK_BYTES, StoreFixture, config, frame, open, save_request};
use crate::arena::Purpose;
use crate::start;
use kvfleet_errors_doc::log::Log;

/// Frames here have one slice.
fn layout() -> SliceLayout {
    SliceLayout::new(&[u32::try_from(BLOCK_BYTES).unwrap()]).unwrap()
}

/// A save of these blocks, all of them wanted.
async fn offered(bench: &StoreFixture, lease: u64, numbers: std::ops::Range<u64>) -> Box<dyn SaveSession> {
    let (offer, session) = bench.service.save(save_request(lease, numbers)).await;
    assert!(matches!(offer, SaveOffer::Wanted(wanted) if wanted.iter().all(|wanted| *wanted)));
    session.unwrap()
}

fn fill(room: &mut dyn LayerBuffers, position: usize, of: &Frame) {
    let slice = of.slice(0).unwrap();
    room.slice(position, 0).unwrap().copy_from_slice(&slice);
    room.slice_written(position);
}

async fn put_head(room: &mut dyn LayerBuffers, of: &Frame) {
    room.put_head(of.head().unwrap().bytes().clone()).await;
}

#[tokio::test]
async fn slices_become_a_block_only_after_their_head_is_verified() {
    let dir = tempfile::tempdir().unwrap();
    let (bench, log) = (open(&config(dir.path(), 8, 0)).await, Log::start());
    let mut session = offered(&bench, 1, 0..3).await;
    let room = session.layer_buffers(&layout()).unwrap();
    let held = bench.arena.used_bytes();
    assert!(held >= 3 * BLOCK_BYTES, "all slots are taken at once: {held}");
    (0..3).for_each(|number| fill(room, usize::try_from(number).unwrap(), &frame(number, BLOCK_BYTES)));
    assert_eq!(bench.fetch(2, 0..3).await, (FetchAnswer::Miss { reason: MissReason::NotHeld }, 0));
    put_head(room, &frame(0, BLOCK_BYTES)).await;
    // The second head belongs to another block.
    put_head(room, &frame(7, BLOCK_BYTES)).await;
    put_head(room, &frame(2, BLOCK_BYTES)).await;
    let done = session.finish().await;
    assert_eq!((done.stored_blocks, done.refused_blocks), (2, 1));
    assert_eq!(done.stored_bytes, 2 * frame(0, BLOCK_BYTES).bytes.len() as u64);
    assert_eq!(bench.fetch(3, 0..1).await.1, 1);
    assert_eq!(bench.fetch(4, 1..2).await.1, 0);
    assert_eq!(bench.fetch(5, 2..3).await.1, 1);
    assert_eq!(log.count("a saved frame is refused"), 1);
    bench.wait_until("slots of refused blocks are freed", |_, used| used == held / 3 * 2).await;
}

#[tokio::test]
async fn dropped_layerwise_save_frees_its_slots() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    let mut session = offered(&bench, 1, 0..2).await;
    let room = session.layer_buffers(&layout()).unwrap();
    fill(room, 0, &frame(0, BLOCK_BYTES));
    fill(room, 1, &frame(1, BLOCK_BYTES));
    put_head(room, &frame(0, BLOCK_BYTES)).await;
    drop(session);
    assert_eq!(bench.fetch(2, 0..1).await.1, 1, "the block with a verified head stays");
    assert_eq!(bench.fetch(3, 1..2).await.1, 0);
    bench.service.release(LeaseId(1)).await;
    bench.service.release(LeaseId(2)).await;
    bench.wait_until("the slot is freed", |_, used| used < 2 * BLOCK_BYTES).await;
    bench.saved(4, 1..4).await;
}

#[tokio::test]
async fn layerwise_saves_leave_half_of_the_slots() {
    for bytes in [BLOCK_BYTES, 60] {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), 40, 0);
        let bench = open(&config).await;
        // Half of the tier's own slabs; the others are for blocks in flight.
        let (_, tier_slabs) = start::arena_shape(&config);
        let half = tier_slabs / 2;
        assert!(half <= 20 && tier_slabs < bench.arena.stats().slabs);
        let layout = SliceLayout::new(&[u32::try_from(bytes).unwrap()]).unwrap();
        let (mut held, mut refused) = (Vec::new(), None);
        for number in 0..40 {
            let mut request = save_request(number, number..number + 1);
            request.frame_bytes = layout.frame_bytes() as u64;
            let mut session = bench.service.save(request).await.1.unwrap();
            match session.layer_buffers(&layout).is_some() {
                true => held.push(session),
                false => refused = Some((number, session)),
            }
        }
        assert_eq!(held.len(), half, "frames of {bytes} bytes, one in each slot");
        let free = bench.arena.take(bytes, Purpose::Save);
        assert!(free.is_some(), "other saves still find slots");
        drop(free);
        let (number, mut session) = refused.unwrap();
        session.put(frame(number, bytes)).await;
        assert_eq!(session.finish().await.stored_blocks, 1, "it can be saved as a whole frame");
        held.clear();
        let mut session = offered(&bench, 99, 60..62).await;
        assert!(session.layer_buffers(&self::layout()).is_some(), "the slots were freed");
    }
}

#[tokio::test]
async fn layerwise_saves_do_not_take_pass_through_slots() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 64)).await;
    // All of DRAM is held, so saved blocks pass through to SSD.
    bench.saved(1, 0..4).await;
    assert_eq!(bench.fetch(2, 0..4).await.1, 4);
    let mut computed = offered(&bench, 3, 10..22).await;
    assert!(
        computed.layer_buffers(&layout()).is_none(),
        "it would hold nearly all pass-through slots while being computed"
    );
    bench.saved(4, 30..40).await;
}

#[tokio::test]
async fn layerwise_slots_are_taken_all_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 8, 0)).await;
    let longer = SliceLayout::new(&[u32::try_from(BLOCK_BYTES).unwrap() + 1]).unwrap();
    let mut session = offered(&bench, 9, 20..22).await;
    assert!(session.layer_buffers(&longer).is_none(), "longer than offered");
    let taken = bench.take_all_slots();
    assert!(
        session.layer_buffers(&layout()).is_none(),
        "no slot is free, and a layer-wise save does not wait"
    );
    drop(taken);
    assert!(session.layer_buffers(&layout()).is_some());
}
