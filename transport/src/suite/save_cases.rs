//! The cases of the suite for layer-wise saves. The name states the expected behaviour, which also
//! holds if frames come whole.
#![allow(missing_docs)]

use std::time::Duration;

use kv_core::id::{BlockHash, LeaseId};
use tokio::time::timeout;

use super::{
    ComputedBlocks, MemoryService, PATIENCE, done, fetch, fetch_request, frame_of, hash, hashes, in_dram,
    save_request,
};
use crate::{FetchAnswer, LayeredSaveOutcome, Path, SaveAnswer, SaveDone, SaveRefusal, SaveRequest};

/// Slices of each block: long, short and empty ones.
const SLICES: [u32; 5] = [20_000, 0, 100, 40_000, 3000];

fn request(hashes: &[BlockHash]) -> SaveRequest {
    let frame_bytes = frame_of(hash(0), &SLICES).bytes.len() as u64;
    SaveRequest { frame_bytes, ..save_request(hashes) }
}

async fn answer(path: &dyn Path, mut computed: ComputedBlocks, blocks: u32) -> SaveAnswer {
    let saving = async {
        match path.save_layers(request(&hashes(blocks)), &mut computed).await {
            Ok(LayeredSaveOutcome::NotStreamed | LayeredSaveOutcome::Abandoned) => {
                path.save(request(&hashes(blocks)), &|position| computed.frame(position)).await
            }
            Ok(LayeredSaveOutcome::Answered(answer)) => Ok(answer),
            Err(error) => Err(error),
        }
    };
    timeout(PATIENCE, saving).await.expect("the save ends").expect("the path works")
}

async fn save(path: &dyn Path, computed: ComputedBlocks, blocks: u32) -> SaveDone {
    done(answer(path, computed, blocks).await)
}

fn computed(blocks: u32) -> ComputedBlocks {
    ComputedBlocks::new(&hashes(blocks), &SLICES)
}

pub async fn save_by_layer_takes_the_wanted(service: &MemoryService, path: &dyn Path) {
    for held in [1, 3] {
        service.hold(frame_of(hash(held), &SLICES));
    }
    let first = save(path, computed(5), 5).await;
    assert_eq!((first.stored_blocks, first.present_blocks, first.refused_blocks), (3, 2, 0));
    assert_eq!(first.stored_bytes, 3 * frame_of(hash(0), &SLICES).bytes.len() as u64);
    assert_eq!(first.visible_at.map(|at| at.seq.0), Some(1));
    let there = fetch(path, fetch_request(&hashes(5))).await.expect("the path works");
    assert_eq!(there, FetchAnswer::Hit { tiers: in_dram(5) });
    let again = save(path, computed(5), 5).await;
    assert_eq!((again.stored_blocks, again.present_blocks, again.visible_at), (0, 5, None));
}

pub async fn save_by_layer_refuses_alone_what_is_wrong(service: &MemoryService, path: &dyn Path) {
    let wrong = computed(4).with_wrong_slice(1).with_other_block(2, hash(9));
    let result = save(path, wrong, 4).await;
    assert_eq!((result.stored_blocks, result.refused_blocks), (2, 2));
    assert_eq!([0, 1, 2, 3, 9].map(|number| service.holds(hash(number))), [true, false, false, true, false]);
    assert_eq!(save(path, computed(4), 4).await.stored_blocks, 2, "the path works on");
}

pub async fn save_by_layer_without_room_comes_whole(service: &MemoryService, path: &dyn Path) {
    service.set_accepts_layers(false);
    assert_eq!(save(path, computed(3), 3).await.stored_blocks, 3);
    let there = fetch(path, fetch_request(&hashes(3))).await.expect("the path works");
    assert_eq!(there, FetchAnswer::Hit { tiers: in_dram(3) });
}

pub async fn save_by_layer_refused(service: &MemoryService, path: &dyn Path) {
    service.set_refuse(Some(SaveRefusal::Quota));
    assert_eq!(answer(path, computed(2), 2).await, SaveAnswer::Refused(SaveRefusal::Quota));
    service.set_refuse(None);
    let retry_after = Duration::from_millis(9);
    service.set_busy(Some(retry_after));
    assert_eq!(answer(path, computed(2), 2).await, SaveAnswer::Busy { retry_after });
    assert!(!service.holds(hash(0)));
}

pub async fn aborted_save_by_layer_leaves_nothing(service: &MemoryService, path: &dyn Path) {
    let mut some = computed(3).with_layers(2);
    let streams = path.streams_saves();
    tokio::select! {
        result = path.save_layers(request(&hashes(3)), &mut some), if streams => panic!("the save ended \
            without all layers: {result:?}"),
        () = service.wait_for_slices(6), if streams => {}
        () = tokio::task::yield_now(), if !streams => {}
    }
    if streams {
        timeout(PATIENCE, service.wait_for_aborts(1)).await.expect("the node notices the abort");
    }
    assert!((0..3).all(|number| !service.holds(hash(number))), "a block of an aborted save was committed");
    assert_eq!(save(path, computed(3), 3).await.stored_blocks, 3, "the path works on");
}

/// For paths with layered saves.
pub async fn slices_leave_before_the_last_layer(service: &MemoryService, path: &dyn Path) {
    assert!(path.streams_saves());
    let mut some = computed(3).with_layers(4);
    let gate = some.gate();
    let saving = path.save_layers(request(&hashes(3)), &mut some);
    let last = async {
        service.wait_for_slices(12).await;
        assert!((0..3).all(|number| !service.holds(hash(number))), "a block is visible before its header");
        path.ping().await.expect("a ping passes a save that waits for its layers");
        gate.add_permits(2);
    };
    let (saved, ()) = timeout(PATIENCE, async { tokio::join!(saving, last) }).await.expect("no deadlock");
    let saved = saved.expect("the path works").answer().expect("the save is layered");
    assert_eq!(done(saved).stored_blocks, 3);
    assert_eq!(
        some.sent_bytes,
        3 * frame_of(hash(0), &SLICES).bytes.len(),
        "not every byte was counted once"
    );
}

/// For paths to a node that renews leases during operations. A computation may outlast a lease, and
/// so may a slow medium.
pub async fn leases_in_use_are_renewed(service: &MemoryService, path: &dyn Path) {
    service.set_renew_interval(Duration::from_millis(5));
    let mut some = computed(3).with_layers(1);
    let gate = some.gate();
    let saving = path.save_layers(request(&hashes(3)), &mut some);
    let next = async {
        service.wait_for_slices(3).await;
        assert_eq!(service.wait_for_renewals(3).await, [LeaseId(1); 3], "while it waits for a layer");
        gate.add_permits(5);
    };
    let (saved, ()) =
        timeout(PATIENCE, async { tokio::join!(saving, next) }).await.expect("the lease is renewed");
    let saved = saved.expect("the path works").answer().expect("the save is layered");
    assert_eq!(done(saved).stored_blocks, 3);
    service.set_gate(0);
    let fetching = fetch(path, fetch_request(&hashes(3)));
    let medium = async {
        assert_eq!(service.wait_for_renewals(3).await, [LeaseId(1); 3], "while the medium works");
        service.set_gate(100);
    };
    let (there, ()) =
        timeout(PATIENCE, async { tokio::join!(fetching, medium) }).await.expect("the lease is renewed");
    assert_eq!(there.expect("the path works"), FetchAnswer::Hit { tiers: in_dram(3) });
}
