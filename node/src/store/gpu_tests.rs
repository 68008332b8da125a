//! The store with a GPU that is none: blocks that go up and come down, and a device that fails, flips bits or is gone.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{Generation, LeaseId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::{BlockService, FetchAnswer, MissReason};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::tests::{BLOCK_BYTES, Bench, PATIENCE, asker, config, frame, hash, open_with};
use super::*;
use crate::NodeConfig;
use crate::start::{gpu_bytes_min, gpu_shape};
use crate::tiers::gpu::device::DeviceError;
use crate::tiers::gpu::tests::fake::{FakeDevice, Faults, Hand};
use crate::tiers::gpu::thread::GpuThread;

/// Wait before a device that failed is tried again: nobody waits for the real one here.
pub(super) const RETRY: Duration = Duration::from_millis(5);

/// A node with room for so many blocks on a GPU and in DRAM.
pub(super) fn three(dir: &std::path::Path, gpu: usize, dram: u64, ssd: u64) -> NodeConfig {
    let config = config(dir, dram, ssd);
    let slot = crate::arena::slot_bytes(config.frame_bytes_max());
    let gpu_bytes = (gpu_bytes_min(&config) + (gpu - 1) * slot) as u64;
    NodeConfig { gpu_bytes, ..config }
}

/// The node on a fake device that `open` gives, each time the node opens one.
pub(super) async fn open_on(
    config: &NodeConfig,
    open: impl FnMut() -> Result<Option<FakeDevice>, DeviceError> + Send + 'static,
) -> Bench {
    open_with(config, |parts| {
        let (send, reports) = mpsc::unbounded_channel();
        parts.gpu = Some(Gpu::new(GpuThread::start(open, gpu_shape(config).shape, send).unwrap(), RETRY));
        parts.gpu_reports = reports;
    })
    .await
}

pub(super) async fn open(config: &NodeConfig) -> (Bench, Hand) {
    let hand = Hand::default();
    let (bytes, of) = (usize::try_from(config.gpu_bytes).unwrap(), Arc::clone(&hand));
    let bench = open_on(config, move || Ok(Some(FakeDevice::in_hand(bytes, 7, &of)))).await;
    bench.until("the GPU is open", |status, _| status.tiers[2].admitting).await;
    (bench, hand)
}

pub(super) fn blocks(status: &pb::NodeStatusReply) -> [u64; 3] {
    [2, 0, 1].map(|tier: usize| status.tiers[tier].blocks)
}

/// Uses a block, which is somewhere, in a request of its own.
pub(super) async fn used(bench: &Bench, lease: u64, number: u64) {
    assert_eq!(bench.fetch(lease, number..number + 1).await.1, 1, "block {number}");
    bench.service.release(LeaseId(lease)).await;
}

/// Waits until so many blocks have their bytes in DRAM, and no move is on its way.
pub(super) async fn until_in_dram(bench: &Bench, config: &NodeConfig, count: usize) {
    let slot = crate::arena::slot_bytes(config.frame_bytes_max());
    bench.until("all moves ended", |_, used| used == count * slot).await;
}

/// What one reader of a block hears.
pub(super) async fn read(
    bench: &Bench,
    lease: u64,
    number: u64,
) -> (Tier, oneshot::Receiver<Result<Bytes, MissReason>>) {
    let asker = bench.service.asker(&asker(lease));
    let hashes = vec![hash(number)];
    let plan = bench
        .store
        .ask(|reply| Ask::Fetch { asker, generation: Generation(0), hashes, reply })
        .await
        .unwrap();
    let FetchPlan::Blocks { mut blocks, .. } = plan else { panic!("{plan:?}") };
    let Planned { tier, bytes, .. } = blocks.remove(0);
    match bytes {
        PlannedBytes::Loading(told) => (tier, told),
        PlannedBytes::Ready(bytes) => {
            let (tell, told) = oneshot::channel();
            tell.send(Ok(bytes)).unwrap();
            (tier, told)
        }
    }
}

#[tokio::test]
async fn blocks_go_up_when_they_are_used_again_and_come_back_right() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 8);
    let (bench, _) = open(&config).await;
    for number in 0..4 {
        bench.saved(number, number..number + 1).await;
    }
    assert_eq!(blocks(&bench.status().await), [0, 4, 0]);
    used(&bench, 10, 0).await;
    used(&bench, 11, 1).await;
    until_in_dram(&bench, &config, 2).await;
    let status = bench.status().await;
    assert_eq!((blocks(&status), status.tiers[2].tier), ([2, 2, 0], Tier::Gpu as u32));
    assert_eq!(status.tiers[2].used_bytes, 2 * crate::arena::slot_bytes(config.frame_bytes_max()) as u64);
    // Read over the network, they come by way of DRAM, and keep their place.
    let (answer, frames) = bench.fetch(12, 0..2).await;
    assert_eq!((answer, frames), (FetchAnswer::Hit { tiers: vec![Tier::Gpu; 2] }, 2));
    bench.service.release(LeaseId(12)).await;
    until_in_dram(&bench, &config, 2).await;
    // 2 is used twice since, so one of them comes down for it; and saves push that on to SSD.
    used(&bench, 13, 2).await;
    used(&bench, 14, 2).await;
    until_in_dram(&bench, &config, 2).await;
    assert_eq!(blocks(&bench.status().await), [2, 2, 0]);
    for number in 4..8 {
        bench.saved(number, number..number + 1).await;
    }
    bench.until("DRAM has pushed out two", |status, _| blocks(status) == [2, 4, 2]).await;
    for number in 0..8 {
        assert_eq!(bench.fetch(20 + number, number..number + 1).await.1, 1, "block {number} is right");
    }
    let classes = bench.status().await.classes;
    let hits = |tier: Tier| classes.iter().filter(|c| c.tier == tier as u32).map(|c| c.hits).sum::<u64>();
    assert!(hits(Tier::Gpu) >= 3, "{classes:?}");
    bench.close().await;
}

#[tokio::test]
async fn nothing_is_left_behind_by_any_number_of_moves() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 4, 6, 12);
    let (bench, hand) = open(&config).await;
    for number in 0..16 {
        bench.saved(number, number..number + 1).await;
    }
    // More than a thousand copies, of which some fail and some flip a bit, on the way up and on the way down.
    let (failing, flipping) = ((30..9000).step_by(61).collect(), (50..9000).step_by(67).collect());
    *hand.lock() = Faults { failing, flipping, ..Faults::default() };
    let slot = crate::arena::slot_bytes(config.frame_bytes_max()) as u64;
    for step in 0..300u64 {
        let number = step * 7 % 16;
        for lease in [1000 + 2 * step, 1001 + 2 * step] {
            // One that was lost to a fault is saved again.
            if bench.fetch(lease, number..number + 1).await.1 == 0 {
                bench.save(lease, number..number + 1, |_| BLOCK_BYTES).await;
            }
            bench.service.release(LeaseId(lease)).await;
        }
        let at_rest = |status: &pb::NodeStatusReply, used: usize| {
            status.tiers[2].admitting && used as u64 == status.tiers[0].blocks * slot
        };
        bench.until("all moves ended", at_rest).await;
    }
    *hand.lock() = Faults::default();
    let classes = bench.status().await.classes;
    let left = |of: fn(&pb::ClassStatus) -> u64| {
        classes.iter().filter(|class| class.tier == Tier::Gpu as u32).map(of).sum::<u64>()
    };
    let moved = (left(|class| class.demoted), left(|class| class.failed));
    println!("{moved:?} blocks came down and failed");
    assert!(moved.0 > 40 && moved.1 > 4, "{moved:?}: too few for a leak to show");
    // A slot that was lost for each move would be more than there are; all of them can be filled again.
    bench.until("it takes blocks again", |status, _| status.tiers[2].admitting).await;
    bench.quota(0).await;
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [0, 0, 0]);
    bench.quota(u64::MAX).await;
    for number in 20..24 {
        bench.saved(9000 + number, number..number + 1).await;
        used(&bench, 9100 + number, number).await;
    }
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [4, 0, 0]);
    for number in 20..24 {
        assert_eq!(bench.fetch(9200 + number, number..number + 1).await.1, 1);
    }
    bench.close().await;
}

#[tokio::test]
async fn a_bit_that_flipped_on_the_gpu_is_found_and_the_reader_hears_of_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 0);
    let (bench, hand) = open(&config).await;
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    until_in_dram(&bench, &config, 0).await;
    // The first copy wrote it, the second read it back, and the third is a reader's.
    hand.lock().flipping.insert(2);
    let (tier, told) = read(&bench, 3, 0).await;
    assert_eq!(tier, Tier::Gpu);
    assert_eq!(timeout(PATIENCE, told).await.unwrap().unwrap(), Err(MissReason::Corrupt));
    assert_eq!(bench.fetch(4, 0..1).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [0, 0, 0]);
    // It comes again, and goes up again.
    bench.service.release(LeaseId(3)).await;
    bench.saved(5, 0..1).await;
    used(&bench, 6, 0).await;
    until_in_dram(&bench, &config, 0).await;
    let (_, told) = read(&bench, 7, 0).await;
    let bytes = timeout(PATIENCE, told).await.unwrap().unwrap().unwrap();
    Frame::parse(bytes.clone()).unwrap();
    assert_eq!(bytes, frame(0, BLOCK_BYTES).bytes);
    bench.close().await;
}

#[tokio::test]
async fn a_lift_that_comes_back_otherwise_costs_no_block_and_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 0);
    let (bench, hand) = open(&config).await;
    // What is written is wrong, and the copy that reads it back sees it.
    hand.lock().flipping.insert(0);
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    bench
        .until("it takes nothing for a while", |status, _| status.tiers[2].why_not.contains("trying again"))
        .await;
    assert_eq!(blocks(&bench.status().await), [0, 1, 0]);
    let answer = bench.fetch(3, 0..1).await;
    assert_eq!(answer, (FetchAnswer::Hit { tiers: vec![Tier::Dram] }, 1));
    bench.service.release(LeaseId(3)).await;
    bench.until("it is tried again", |status, _| status.tiers[2].admitting).await;
    used(&bench, 4, 0).await;
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [1, 0, 0]);
    bench.close().await;
}

#[tokio::test]
async fn a_gpu_lost_in_the_middle_of_moves_costs_what_was_only_there_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 3, 4, 8);
    let (bench, hand) = open(&config).await;
    for number in 0..4 {
        bench.saved(number, number..number + 1).await;
    }
    used(&bench, 10, 0).await;
    used(&bench, 11, 1).await;
    until_in_dram(&bench, &config, 2).await;
    // A reader waits for 0, and 2 is on its way up, when it goes.
    hand.lock().is_held = true;
    let (tier, told) = read(&bench, 12, 0).await;
    assert_eq!(tier, Tier::Gpu);
    used(&bench, 13, 2).await;
    *hand.lock() = Faults { lost_at: Some(4), ..Faults::default() };
    assert_eq!(timeout(PATIENCE, told).await.unwrap().unwrap(), Err(MissReason::MediumFailed));
    bench.until("what is left is where it was", |status, _| blocks(status) == [0, 2, 0]).await;
    hand.lock().lost_at = None;
    let answers = [bench.fetch(20, 0..1).await.0, bench.fetch(21, 1..2).await.0];
    assert!(answers.iter().all(|answer| *answer == FetchAnswer::Miss { reason: MissReason::NotHeld }));
    for number in [2, 3] {
        let answer = bench.fetch(20 + number, number..number + 1).await;
        assert_eq!(answer, (FetchAnswer::Hit { tiers: vec![Tier::Dram] }, 1));
        bench.service.release(LeaseId(20 + number)).await;
    }
    bench.until("another one is there", |status, _| status.tiers[2].admitting).await;
    for number in [2, 3] {
        used(&bench, 30 + number, number).await;
    }
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [2, 0, 0]);
    used(&bench, 40, 2).await;
    bench.close().await;
}

#[tokio::test]
async fn a_node_whose_gpu_is_not_there_serves_without_it_and_finds_it_later() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 0);
    let (bytes, mut tries) = (usize::try_from(config.gpu_bytes).unwrap(), 0);
    let there = Hand::default();
    let of = Arc::clone(&there);
    there.lock().is_held = true;
    let bench = open_on(&config, move || {
        tries += 1;
        let is_there = !of.lock().is_held;
        // First none at all, then one that has too little memory.
        Ok((is_there || tries > 2).then(|| FakeDevice::in_hand(if is_there { bytes } else { 100 }, 7, &of)))
    })
    .await;
    bench.until("it is not there", |status, _| status.tiers[2].why_not.contains("no such GPU")).await;
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    assert_eq!(blocks(&bench.status().await), [0, 1, 0]);
    bench
        .until("it has no memory", |status, _| status.tiers[2].why_not.contains("bytes of device memory"))
        .await;
    there.lock().is_held = false;
    bench.until("it is there", |status, _| status.tiers[2].admitting).await;
    used(&bench, 3, 0).await;
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [1, 0, 0]);
    bench.close().await;
}

#[tokio::test]
async fn blocks_on_the_gpu_are_told_of_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 0);
    let (bench, hand) = open(&config).await;
    bench
        .store
        .ask(|reply| Ask::Joined { epoch: Epoch(1), shards: 1, generation: Generation(0), reply })
        .await
        .unwrap()
        .unwrap();
    bench.saved(1, 0..1).await;
    let _ = read(&bench, 2, 0).await;
    bench.service.release(LeaseId(2)).await;
    until_in_dram(&bench, &config, 0).await;
    let told = || format!("{:?}", bench.store.shared.outboxes.lock());
    assert!(told().contains("Moved") && told().contains("to: Gpu"), "{}", told());
    // The next copy is a reader's, and with it the GPU goes.
    hand.lock().lost_at = Some(2);
    let (tier, miss) = read(&bench, 3, 0).await;
    assert_eq!(tier, Tier::Gpu);
    assert_eq!(timeout(PATIENCE, miss).await.unwrap().unwrap(), Err(MissReason::MediumFailed));
    bench.until("it is gone", |status, _| blocks(status) == [0, 0, 0]).await;
    assert!(told().contains("Dropped") && told().contains("tier: Gpu"), "{}", told());
    bench.close().await;
}

#[test]
fn what_is_wrong_with_a_gpu_is_said_with_what_to_do() {
    let said = gpu::with_remedy;
    says("a GPU that is not there", &said(&DeviceError::Absent), &[]);
    let cause = "CUDA_ERROR_OUT_OF_MEMORY".to_owned();
    let little = DeviceError::NoMemory { bytes: 8 << 30, what: "device", cause };
    says("a GPU with too little memory", &said(&little), &[]);
    let failed = DeviceError::Copy("CUDA_ERROR_INVALID_VALUE".to_owned());
    says("a copy to or from a GPU that failed", &said(&failed), &[]);
    let lost = DeviceError::Lost("CUDA_ERROR_ILLEGAL_ADDRESS".to_owned());
    says("a GPU that is lost", &said(&lost), &[]);
}
