//! Reads of blocks that stay on the GPU: their transit slots in DRAM are limited and freed.
#![allow(clippy::unwrap_used)]

use kv_core::id::{LeaseId, Tier};
use kvfleet_proto::pb;
use kvfleet_transport::{BlockService, FetchAnswer};
use tokio::time::timeout;

use super::gpu_tests::{blocks, config_with_gpu, open, read, until_in_dram, used};
use super::tests::{PATIENCE, StoreFixture, fetch_request, hash};
use super::*;
use crate::NodeConfig;
use crate::arena::Purpose;

/// A store with blocks 0 to 63 on the GPU, 76 to 79 in DRAM and 64 to 75 on SSD: the GPU has more
/// blocks than DRAM has slots of any kind.
async fn full_fixture(dir: &std::path::Path) -> (NodeConfig, StoreFixture) {
    let config = config_with_gpu(dir, 64, 4, 30);
    let (bench, _) = open(&config).await;
    for number in 0..64 {
        bench.saved(number, number..number + 1).await;
        used(&bench, 100 + number, number).await;
        // Promotions are limited, so one beyond the limit would be skipped.
        until_in_dram(&bench, &config, 0).await;
    }
    for number in 64..80 {
        bench.saved(number, number..number + 1).await;
    }
    bench.wait_until("all blocks are in their tiers", |status, _| blocks(status) == [64, 4, 12]).await;
    until_in_dram(&bench, &config, 4).await;
    (config, bench)
}

/// Readers that do not consume their frames occupy transit slots only.
#[tokio::test]
async fn slow_gpu_readers_do_not_block_ssd_loads_or_saves() {
    let dir = tempfile::tempdir().unwrap();
    let (config, bench) = full_fixture(dir.path()).await;
    let mut slow = bench.service.fetch(fetch_request(200, 0..64)).await;
    assert_eq!(slow.answer, FetchAnswer::Hit { tiers: vec![Tier::Gpu; 64] });
    assert_eq!(slow.lendable, [false; 64], "their slots are needed by others");
    until_in_dram(&bench, &config, 4 + GPU_READS_MAX).await;
    // Three rounds of the tier: a DRAM slot leaked by a load or a save would be missing in the next
    // round.
    for lease in 0..12 {
        let number = 64 + lease;
        assert_eq!(bench.fetch(300 + lease, number..number + 1).await.1, 1, "block {number}");
        bench.service.release(LeaseId(300 + lease)).await;
        bench.saved(400 + lease, 100 + lease..101 + lease).await;
    }
    until_in_dram(&bench, &config, 4 + GPU_READS_MAX).await;
    // A reader that resumes gets all its frames.
    let mut got = 0;
    while let Some(frame) = timeout(PATIENCE, slow.frames.next()).await.unwrap() {
        assert_eq!(frame.hash, hash(got));
        got += 1;
    }
    assert_eq!(got, 64);
    drop(slow);
    until_in_dram(&bench, &config, 4).await;
    bench.close().await;
}

/// While saves use all their slots, GPU reads take half of the reserve and leave the other half.
#[tokio::test]
async fn gpu_reads_leave_half_of_the_reserve_to_ssd_loads() {
    let dir = tempfile::tempdir().unwrap();
    let (_, bench) = full_fixture(dir.path()).await;
    let saves: Vec<_> = std::iter::from_fn(|| bench.arena.take(1, Purpose::Save)).collect();
    let slow = bench.service.fetch(fetch_request(200, 0..64)).await;
    let half = bench.arena.stats().reserve_slabs / 2;
    let is_half = |_: &pb::NodeStatusReply, _| bench.arena.stats().empty_slabs == half;
    bench.wait_until("half of the reserve is used", is_half).await;
    for number in 64..76 {
        assert_eq!(bench.fetch(300 + number, number..number + 1).await.1, 1, "block {number}");
        bench.service.release(LeaseId(300 + number)).await;
    }
    bench.wait_until("and not more", is_half).await;
    drop((slow, saves));
    bench.close().await;
}

/// The slot is then charged to DRAM and no longer counts as a transit slot.
#[tokio::test]
async fn blocks_demoted_while_read_are_charged_to_dram() {
    let dir = tempfile::tempdir().unwrap();
    let rounds = GPU_READS_MAX + 2;
    let config = config_with_gpu(dir.path(), 1, 2 * rounds as u64, 0);
    let (bench, hand) = open(&config).await;
    bench.saved(0, 0..1).await;
    used(&bench, 1, 0).await;
    until_in_dram(&bench, &config, 0).await;
    for round in 0..rounds {
        let (number, lease) = (round as u64, 10 * (1 + round as u64));
        bench.saved(lease, number + 1..number + 2).await;
        hand.lock().is_stalled = true;
        let (tier, told) = read(&bench, lease + 1, number).await;
        assert_eq!(tier, Tier::Gpu, "round {round}");
        bench.service.release(LeaseId(lease + 1)).await;
        // The next block is promoted for it. The decision is immediate; the bytes follow.
        used(&bench, lease + 2, number + 1).await;
        used(&bench, lease + 3, number + 1).await;
        hand.lock().is_stalled = false;
        timeout(PATIENCE, told).await.unwrap().unwrap().unwrap();
        until_in_dram(&bench, &config, round + 1).await;
        assert_eq!(blocks(&bench.status().await), [1, 1 + round as u64, 0]);
    }
    bench.close().await;
}
