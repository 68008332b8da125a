//! The store with a fake GPU: promotion and demotion, and a device that fails, flips bits or is
//! lost.
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

use super::tests::{BLOCK_BYTES, PATIENCE, StoreFixture, asker, config, frame, hash, open_with};
use super::*;
use crate::NodeConfig;
use crate::start::{gpu_bytes_min, gpu_shape};
use crate::tiers::gpu::device::DeviceError;
use crate::tiers::gpu::tests::fake::{FakeDevice, FaultControl, InjectedFaults};
use crate::tiers::gpu::thread::GpuThread;

/// Short wait before a failed fake device is retried.
pub(super) const RETRY: Duration = Duration::from_millis(5);

/// A configuration with capacity for this many blocks on a GPU, in DRAM and on SSD.
pub(super) fn config_with_gpu(dir: &std::path::Path, gpu: usize, dram: u64, ssd: u64) -> NodeConfig {
    let config = config(dir, dram, ssd);
    let slot = crate::arena::slot_bytes(config.frame_bytes_max());
    let gpu_bytes = (gpu_bytes_min(&config) + (gpu - 1) * slot) as u64;
    NodeConfig { gpu_bytes, ..config }
}

/// A store on a fake device that `open` returns on each attempt.
pub(super) async fn open_on(
    config: &NodeConfig,
    open: impl FnMut() -> Result<Option<FakeDevice>, DeviceError> + Send + 'static,
) -> StoreFixture {
    open_with(config, |parts| {
        let (send, reports) = mpsc::unbounded_channel();
        parts.gpu = Some(Gpu::new(GpuThread::start(open, gpu_shape(config).shape, send).unwrap(), RETRY));
        parts.gpu_reports = reports;
    })
    .await
}

pub(super) async fn open(config: &NodeConfig) -> (StoreFixture, FaultControl) {
    let hand = FaultControl::default();
    let (bytes, of) = (usize::try_from(config.gpu_bytes).unwrap(), Arc::clone(&hand));
    let bench = open_on(config, move || Ok(Some(FakeDevice::with_faults(bytes, 7, &of)))).await;
    bench.wait_until("the GPU is open", |status, _| status.tiers[2].admitting).await;
    (bench, hand)
}

pub(super) fn blocks(status: &pb::NodeStatusReply) -> [u64; 3] {
    [2, 0, 1].map(|tier: usize| status.tiers[tier].blocks)
}

/// Reads a resident block in its own request.
pub(super) async fn used(bench: &StoreFixture, lease: u64, number: u64) {
    assert_eq!(bench.fetch(lease, number..number + 1).await.1, 1, "block {number}");
    bench.service.release(LeaseId(lease)).await;
}

/// Waits until this many blocks have their bytes in DRAM and no move is in flight.
pub(super) async fn until_in_dram(bench: &StoreFixture, config: &NodeConfig, count: usize) {
    let slot = crate::arena::slot_bytes(config.frame_bytes_max());
    bench.wait_until("all moves ended", |_, used| used == count * slot).await;
}

/// The tier and bytes that a reader of a block gets.
pub(super) async fn read(
    bench: &StoreFixture,
    lease: u64,
    number: u64,
) -> (Tier, oneshot::Receiver<Result<Bytes, MissReason>>) {
    let asker = bench.service.asker(&asker(lease));
    let hashes = vec![hash(number)];
    let plan = bench
        .store
        .request(|reply| StoreRequest::Fetch { asker, generation: Generation(0), hashes, reply })
        .await
        .unwrap();
    let FetchPlan::Blocks { mut blocks, .. } = plan else { panic!("{plan:?}") };
    let PlannedBlock { tier, bytes, .. } = blocks.remove(0);
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
async fn reused_blocks_are_promoted_to_the_gpu_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 8);
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
    // Network reads pass through DRAM, and the blocks stay on the GPU.
    let (answer, frames) = bench.fetch(12, 0..2).await;
    assert_eq!((answer, frames), (FetchAnswer::Hit { tiers: vec![Tier::Gpu; 2] }, 2));
    bench.service.release(LeaseId(12)).await;
    until_in_dram(&bench, &config, 2).await;
    // Block 2 was used twice since, so one of them is demoted for it; saves then push that one to
    // SSD.
    used(&bench, 13, 2).await;
    used(&bench, 14, 2).await;
    until_in_dram(&bench, &config, 2).await;
    assert_eq!(blocks(&bench.status().await), [2, 2, 0]);
    for number in 4..8 {
        bench.saved(number, number..number + 1).await;
    }
    bench.wait_until("DRAM has demoted two blocks", |status, _| blocks(status) == [2, 4, 2]).await;
    for number in 0..8 {
        assert_eq!(bench.fetch(20 + number, number..number + 1).await.1, 1, "block {number} is right");
    }
    let classes = bench.status().await.classes;
    let hits = |tier: Tier| classes.iter().filter(|c| c.tier == tier as u32).map(|c| c.hits).sum::<u64>();
    assert!(hits(Tier::Gpu) >= 3, "{classes:?}");
    bench.close().await;
}

#[tokio::test]
async fn gpu_moves_leak_no_slots() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 4, 6, 12);
    let (bench, hand) = open(&config).await;
    for number in 0..16 {
        bench.saved(number, number..number + 1).await;
    }
    // More than a thousand copies in both directions; some fail and some flip a bit.
    let (failing, flipping) = ((30..9000).step_by(61).collect(), (50..9000).step_by(67).collect());
    *hand.lock() = InjectedFaults { failing, flipping, ..InjectedFaults::default() };
    let slot = crate::arena::slot_bytes(config.frame_bytes_max()) as u64;
    for step in 0..300u64 {
        let number = step * 7 % 16;
        for lease in [1000 + 2 * step, 1001 + 2 * step] {
            // A block lost to a fault is saved again.
            if bench.fetch(lease, number..number + 1).await.1 == 0 {
                bench.save(lease, number..number + 1, |_| BLOCK_BYTES).await;
            }
            bench.service.release(LeaseId(lease)).await;
        }
        let at_rest = |status: &pb::NodeStatusReply, used: usize| {
            status.tiers[2].admitting && used as u64 == status.tiers[0].blocks * slot
        };
        bench.wait_until("all moves ended", at_rest).await;
    }
    *hand.lock() = InjectedFaults::default();
    let classes = bench.status().await.classes;
    let left = |of: fn(&pb::ClassStatus) -> u64| {
        classes.iter().filter(|class| class.tier == Tier::Gpu as u32).map(of).sum::<u64>()
    };
    let moved = (left(|class| class.demoted), left(|class| class.failed));
    println!("{moved:?} blocks demoted and failed");
    assert!(moved.0 > 40 && moved.1 > 4, "{moved:?}: too few to reveal a leak");
    // A slot leaked per move would exceed the total; all slots can be filled again.
    bench.wait_until("it accepts blocks again", |status, _| status.tiers[2].admitting).await;
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
async fn flipped_bit_on_the_gpu_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 0);
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
    // It is saved again and promoted again.
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
async fn corrupted_promotion_loses_no_block_and_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 0);
    let (bench, hand) = open(&config).await;
    // The written bytes are wrong, and the verifying copy detects it.
    hand.lock().flipping.insert(0);
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    bench
        .wait_until("it accepts no blocks for a while", |status, _| {
            status.tiers[2].reject_reason.contains("trying again")
        })
        .await;
    assert_eq!(blocks(&bench.status().await), [0, 1, 0]);
    let answer = bench.fetch(3, 0..1).await;
    assert_eq!(answer, (FetchAnswer::Hit { tiers: vec![Tier::Dram] }, 1));
    bench.service.release(LeaseId(3)).await;
    bench.wait_until("it is retried", |status, _| status.tiers[2].admitting).await;
    used(&bench, 4, 0).await;
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [1, 0, 0]);
    bench.close().await;
}

#[tokio::test]
async fn gpu_lost_during_moves_loses_only_its_blocks_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 3, 4, 8);
    let (bench, hand) = open(&config).await;
    for number in 0..4 {
        bench.saved(number, number..number + 1).await;
    }
    used(&bench, 10, 0).await;
    used(&bench, 11, 1).await;
    until_in_dram(&bench, &config, 2).await;
    // A reader waits for block 0, and block 2 is being promoted, when the GPU is lost.
    hand.lock().is_stalled = true;
    let (tier, told) = read(&bench, 12, 0).await;
    assert_eq!(tier, Tier::Gpu);
    used(&bench, 13, 2).await;
    *hand.lock() = InjectedFaults { lost_at: Some(4), ..InjectedFaults::default() };
    assert_eq!(timeout(PATIENCE, told).await.unwrap().unwrap(), Err(MissReason::MediumFailed));
    bench.wait_until("other blocks are unchanged", |status, _| blocks(status) == [0, 2, 0]).await;
    hand.lock().lost_at = None;
    let answers = [bench.fetch(20, 0..1).await.0, bench.fetch(21, 1..2).await.0];
    assert!(answers.iter().all(|answer| *answer == FetchAnswer::Miss { reason: MissReason::NotHeld }));
    for number in [2, 3] {
        let answer = bench.fetch(20 + number, number..number + 1).await;
        assert_eq!(answer, (FetchAnswer::Hit { tiers: vec![Tier::Dram] }, 1));
        bench.service.release(LeaseId(20 + number)).await;
    }
    bench.wait_until("the GPU is open again", |status, _| status.tiers[2].admitting).await;
    for number in [2, 3] {
        used(&bench, 30 + number, number).await;
    }
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [2, 0, 0]);
    used(&bench, 40, 2).await;
    bench.close().await;
}

#[tokio::test]
async fn node_serves_without_its_gpu_and_opens_it_later() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 0);
    let (bytes, mut tries) = (usize::try_from(config.gpu_bytes).unwrap(), 0);
    let there = FaultControl::default();
    let of = Arc::clone(&there);
    there.lock().is_stalled = true;
    let bench = open_on(&config, move || {
        tries += 1;
        let is_there = !of.lock().is_stalled;
        // First no device, then one with too little memory.
        Ok((is_there || tries > 2)
            .then(|| FakeDevice::with_faults(if is_there { bytes } else { 100 }, 7, &of)))
    })
    .await;
    bench
        .wait_until("the GPU is absent", |status, _| status.tiers[2].reject_reason.contains("no such GPU"))
        .await;
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    assert_eq!(blocks(&bench.status().await), [0, 1, 0]);
    bench
        .wait_until("the GPU has too little memory", |status, _| {
            status.tiers[2].reject_reason.contains("bytes of device memory")
        })
        .await;
    there.lock().is_stalled = false;
    bench.wait_until("the GPU is open", |status, _| status.tiers[2].admitting).await;
    used(&bench, 3, 0).await;
    until_in_dram(&bench, &config, 0).await;
    assert_eq!(blocks(&bench.status().await), [1, 0, 0]);
    bench.close().await;
}

#[tokio::test]
async fn gpu_blocks_are_announced_with_their_tier() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 0);
    let (bench, hand) = open(&config).await;
    bench
        .store
        .request(|reply| StoreRequest::Joined {
            epoch: Epoch(1),
            shards: 1,
            generation: Generation(0),
            reply,
        })
        .await
        .unwrap()
        .unwrap();
    bench.saved(1, 0..1).await;
    let _ = read(&bench, 2, 0).await;
    bench.service.release(LeaseId(2)).await;
    until_in_dram(&bench, &config, 0).await;
    let told = || format!("{:?}", bench.store.shared.outboxes.lock());
    assert!(told().contains("Moved") && told().contains("to: Gpu"), "{}", told());
    // The next copy is a reader's, and the GPU is lost with it.
    hand.lock().lost_at = Some(2);
    let (tier, miss) = read(&bench, 3, 0).await;
    assert_eq!(tier, Tier::Gpu);
    assert_eq!(timeout(PATIENCE, miss).await.unwrap().unwrap(), Err(MissReason::MediumFailed));
    bench.wait_until("the block is gone", |status, _| blocks(status) == [0, 0, 0]).await;
    assert!(told().contains("Dropped") && told().contains("tier: Gpu"), "{}", told());
    bench.close().await;
}

#[test]
fn gpu_errors_have_a_remedy() {
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
