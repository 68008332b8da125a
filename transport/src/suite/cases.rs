//! The cases of the suite, one function each. The name states the expected behaviour.
#![allow(missing_docs)]

use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, LeaseId};
use kvfleet_proto::frame::Frame;
use tokio::sync::watch;
use tokio::time::timeout;

use super::{
    EPOCH, IDENTITY, MemoryService, PATIENCE, done, fetch, fetch_request, frame, hash, hashes, in_dram, save,
    save_request,
};
use crate::{FetchAnswer, FetchRequest, MissReason, Path, SaveAnswer, SaveRefusal};

pub use super::layer_cases::*;
pub use super::save_cases::*;

/// A deadline that passes while a closed gate holds frames back, but not before the open ones pass.
const SHORT: Duration = Duration::from_secs(2);

fn hold(service: &MemoryService, blocks: u32, bytes: u32) {
    for number in 0..blocks {
        service.hold(frame(hash(number), bytes));
    }
}

async fn answer(path: &dyn Path, blocks: u32) -> FetchAnswer {
    fetch(path, fetch_request(&hashes(blocks))).await.expect("the path works")
}

pub async fn fetch_hit(service: &MemoryService, path: &dyn Path) {
    hold(service, 3, 1000);
    assert_eq!(answer(path, 3).await, FetchAnswer::Hit { tiers: in_dram(3) });
}

pub async fn fetch_partial(service: &MemoryService, path: &dyn Path) {
    hold(service, 4, 1000);
    service.forget(hash(2));
    let expected = FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::NotHeld };
    assert_eq!(answer(path, 4).await, expected);
}

pub async fn fetch_miss(service: &MemoryService, path: &dyn Path) {
    hold(service, 1, 1000);
    service.forget(hash(0));
    assert_eq!(answer(path, 3).await, FetchAnswer::Miss { reason: MissReason::NotHeld });
    let mut request = fetch_request(&hashes(1));
    request.context.identity.0[0] ^= 1;
    let expected = FetchAnswer::Miss { reason: MissReason::IdentityDiffers };
    assert_eq!(fetch(path, request).await.expect("the path works"), expected);
}

pub async fn fetch_busy(service: &MemoryService, path: &dyn Path) {
    let retry_after = Duration::from_millis(7);
    service.set_busy(Some(retry_after));
    assert_eq!(answer(path, 3).await, FetchAnswer::Busy { retry_after });
}

pub async fn fetch_of_nothing(_: &MemoryService, path: &dyn Path) {
    assert_eq!(answer(path, 0).await, FetchAnswer::Hit { tiers: Vec::new() });
}

pub async fn fetch_many_blocks(service: &MemoryService, path: &dyn Path) {
    hold(service, 2000, 300);
    assert_eq!(answer(path, 2000).await, FetchAnswer::Hit { tiers: in_dram(2000) });
}

pub async fn fetch_big_block(service: &MemoryService, path: &dyn Path) {
    hold(service, 2, 9 << 20);
    assert_eq!(answer(path, 2).await, FetchAnswer::Hit { tiers: in_dram(2) });
}

pub async fn fetch_stale_epoch(service: &MemoryService, path: &dyn Path) {
    hold(service, 3, 1000);
    service.set_epoch(Epoch(EPOCH.0 + 1));
    assert_eq!(answer(path, 3).await, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
}

/// Routers may end the epoch of a live node, which then takes the next one and serves on. An answer
/// from before stays consistent: its blocks arrive as they were then, although the node drops them
/// and holds others meanwhile.
pub async fn fetch_over_the_end_of_an_epoch(service: &MemoryService, path: &dyn Path) {
    hold(service, 6, 1000);
    service.set_gate(2);
    let (seen, mut frames) = (watch::Sender::new(0), Vec::new());
    let mut sink = |frame| {
        frames.push(frame);
        seen.send_replace(frames.len());
    };
    let fetch = path.fetch(fetch_request(&hashes(6)), &mut sink);
    let newer = Epoch(EPOCH.0 + 1);
    let ends = async {
        let _ = seen.subscribe().wait_for(|seen| *seen == 2).await; // the sender is here
        service.set_epoch(newer);
        (0..6).for_each(|number| service.forget(hash(number)));
        hold(service, 6, 2000);
        service.set_gate(100);
    };
    let (answered, ()) =
        timeout(PATIENCE, async { tokio::join!(fetch, ends) }).await.expect("the fetch ends");
    assert_eq!(answered.expect("the path works"), FetchAnswer::Hit { tiers: in_dram(6) });
    assert_eq!(
        answer(path, 6).await,
        FetchAnswer::Miss { reason: MissReason::StaleEpoch },
        "a later request with the old epoch"
    );
    let request = FetchRequest { epoch: newer, ..fetch_request(&hashes(6)) };
    assert_eq!(fetch_of(path, request, 2000).await, FetchAnswer::Hit { tiers: in_dram(6) });
    // The frames are held in their original memory, which may be the node's.
    assert_frames(&frames, &hashes(6), 1000);
}

/// Checks that these are the blocks, with this many bytes of content each.
fn assert_frames(frames: &[Frame], hashes: &[BlockHash], bytes: usize) {
    assert_eq!(frames.len(), hashes.len());
    for (frame, hash) in frames.iter().zip(hashes) {
        frame.verify(IDENTITY, *hash).expect("a valid frame of the requested block");
        assert_eq!(frame.payload().len(), bytes, "a block of another answer");
    }
}

async fn fetch_of(path: &dyn Path, request: FetchRequest, bytes: usize) -> FetchAnswer {
    let (hashes, mut frames) = (request.hashes.clone(), Vec::new());
    let answer = path.fetch(request, &mut |frame| frames.push(frame)).await.expect("the path works");
    assert_frames(&frames, &hashes, bytes);
    answer
}

pub async fn fetch_ends_early(service: &MemoryService, path: &dyn Path) {
    hold(service, 3, 1000);
    service.fail_medium();
    assert_eq!(answer(path, 3).await, FetchAnswer::Miss { reason: MissReason::MediumFailed });
}

pub async fn fetch_ends_with_a_reason(service: &MemoryService, path: &dyn Path) {
    hold(service, 3, 1000);
    service.end_with(MissReason::Busy);
    assert_eq!(answer(path, 3).await, FetchAnswer::Miss { reason: MissReason::Busy });
}

pub async fn deadline_before_any_block(service: &MemoryService, path: &dyn Path) {
    hold(service, 3, 1000);
    service.set_gate(0);
    let request = FetchRequest { deadline: Duration::from_millis(20), ..fetch_request(&hashes(3)) };
    let expected = FetchAnswer::Miss { reason: MissReason::TooLate };
    assert_eq!(fetch(path, request).await.expect("a late answer is an answer"), expected);
    service.set_gate(100);
    assert_eq!(answer(path, 3).await, FetchAnswer::Hit { tiers: in_dram(3) }, "the path works on");
}

pub async fn deadline_between_frames(service: &MemoryService, path: &dyn Path) {
    hold(service, 5, 1000);
    service.set_gate(2);
    let request = FetchRequest { deadline: SHORT, ..fetch_request(&hashes(5)) };
    let expected = FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::TooLate };
    assert_eq!(fetch(path, request).await.expect("the fetch returns the delivered blocks"), expected);
}

pub async fn save_takes_the_wanted(service: &MemoryService, path: &dyn Path) {
    hold(service, 3, 1000);
    let result = done(save(path, save_request(&hashes(5)), 1000).await.expect("the path works"));
    assert_eq!((result.stored_blocks, result.present_blocks, result.refused_blocks), (2, 3, 0));
    assert_eq!(result.stored_bytes, 2 * frame(hash(0), 1000).bytes.len() as u64);
    let visible = result.visible_at.expect("blocks were stored");
    assert_eq!((visible.epoch, visible.seq.0), (EPOCH, 1));
    assert_eq!(answer(path, 5).await, FetchAnswer::Hit { tiers: in_dram(5) });

    let again = done(save(path, save_request(&hashes(5)), 1000).await.expect("the path works"));
    assert_eq!((again.stored_blocks, again.present_blocks, again.visible_at), (0, 5, None));
}

pub async fn save_refused(service: &MemoryService, path: &dyn Path) {
    for refusal in SaveRefusal::ALL {
        service.set_refuse(Some(refusal));
        let result = save(path, save_request(&hashes(2)), 1000).await.expect("a refusal is an answer");
        assert_eq!(result, SaveAnswer::Refused(refusal));
    }
    assert!(!service.holds(hash(0)));
}

pub async fn save_busy(service: &MemoryService, path: &dyn Path) {
    let retry_after = Duration::from_millis(9);
    service.set_busy(Some(retry_after));
    let result = save(path, save_request(&hashes(2)), 1000).await.expect("busy is an answer");
    assert_eq!(result, SaveAnswer::Busy { retry_after });
}

pub async fn aborted_save_leaves_nothing(service: &MemoryService, path: &dyn Path) {
    service.set_gate(1);
    tokio::select! {
        result = save(path, save_request(&hashes(3)), 1000) => panic!("the save passed a closed gate: {result:?}"),
        () = service.wait_for_puts(2) => {}
    }
    timeout(PATIENCE, service.wait_for_aborts(1)).await.expect("the node notices the abort");
    service.set_gate(100);
    assert!((0..3).all(|number| !service.holds(hash(number))), "a block of an aborted save was committed");
    let again = done(save(path, save_request(&hashes(3)), 1000).await.expect("the path works on"));
    assert_eq!(again.stored_blocks, 3);
}

pub async fn release_reaches_the_node(service: &MemoryService, path: &dyn Path) {
    path.release(LeaseId(42)).await.expect("the path works");
    assert_eq!(service.released(), [LeaseId(42)]);
}

pub async fn operations_run_side_by_side(service: &MemoryService, path: &dyn Path) {
    hold(service, 8, 100_000);
    service.set_gate(0);
    let stuck = async { answer(path, 1).await };
    let passing = async {
        path.ping().await.expect("a ping passes a stuck fetch");
        path.release(LeaseId(1)).await.expect("a release passes a stuck fetch");
        service.set_gate(1_000_000);
        let (a, b, c, d) = tokio::join!(answer(path, 8), answer(path, 8), answer(path, 8), answer(path, 8));
        for result in [a, b, c, d] {
            assert_eq!(result, FetchAnswer::Hit { tiers: in_dram(8) });
        }
    };
    let (first, ()) = timeout(PATIENCE, async { tokio::join!(stuck, passing) }).await.expect("no deadlock");
    assert_eq!(first, FetchAnswer::Hit { tiers: in_dram(1) });
}

pub async fn ping_answers(_: &MemoryService, path: &dyn Path) {
    assert!(path.ping().await.expect("the path works") < PATIENCE);
}
