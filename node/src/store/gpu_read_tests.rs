//! Reads of blocks that stay on the GPU: their slots in DRAM, which no account has, are few, and come back.
#![allow(clippy::unwrap_used)]

use kv_core::id::{LeaseId, Tier};
use kvfleet_proto::pb;
use kvfleet_transport::{BlockService, FetchAnswer};
use tokio::time::timeout;

use super::gpu_tests::{blocks, open, read, three, until_in_dram, used};
use super::tests::{Bench, PATIENCE, fetch_request, hash};
use super::*;
use crate::NodeConfig;
use crate::arena::Purpose;

/// A node whose GPU has blocks 0 to 63, DRAM 76 to 79 and SSD 64 to 75: more on the GPU than DRAM has slots of any kind.
async fn full(dir: &std::path::Path) -> (NodeConfig, Bench) {
    let config = three(dir, 64, 4, 30);
    let (bench, _) = open(&config).await;
    for number in 0..64 {
        bench.saved(number, number..number + 1).await;
        used(&bench, 100 + number, number).await;
        // A lift is a wish, and one too many is left out.
        until_in_dram(&bench, &config, 0).await;
    }
    for number in 64..80 {
        bench.saved(number, number..number + 1).await;
    }
    bench.until("all are where they belong", |status, _| blocks(status) == [64, 4, 12]).await;
    until_in_dram(&bench, &config, 4).await;
    (config, bench)
}

/// Readers who do not take what they asked for have the slots of those who read from the GPU, and nobody else's.
#[tokio::test]
async fn slow_readers_of_a_gpu_keep_neither_loads_from_ssd_nor_saves_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let (config, bench) = full(dir.path()).await;
    let mut slow = bench.service.fetch(fetch_request(200, 0..64)).await;
    assert_eq!(slow.answer, FetchAnswer::Hit { tiers: vec![Tier::Gpu; 64] });
    assert_eq!(slow.lendable, [false; 64], "they lie in slots that others need");
    until_in_dram(&bench, &config, 4 + GPU_READS_MAX).await;
    // Three rounds of the tier: whatever of DRAM a load or a save leaves behind would be missing in the next one.
    for lease in 0..12 {
        let number = 64 + lease;
        assert_eq!(bench.fetch(300 + lease, number..number + 1).await.1, 1, "block {number}");
        bench.service.release(LeaseId(300 + lease)).await;
        bench.saved(400 + lease, 100 + lease..101 + lease).await;
    }
    until_in_dram(&bench, &config, 4 + GPU_READS_MAX).await;
    // Who takes them after all gets all that he asked for.
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

/// While saves have all slots that they may have, reads from the GPU take half of the reserve and leave the other one.
#[tokio::test]
async fn reads_from_a_gpu_leave_loads_from_ssd_their_half_of_the_reserve() {
    let dir = tempfile::tempdir().unwrap();
    let (_, bench) = full(dir.path()).await;
    let saves: Vec<_> = std::iter::from_fn(|| bench.arena.take(1, Purpose::Save)).collect();
    let slow = bench.service.fetch(fetch_request(200, 0..64)).await;
    let half = bench.arena.numbers().reserve_slabs / 2;
    let is_half = |_: &pb::NodeStatusReply, _| bench.arena.numbers().empty_slabs == half;
    bench.until("half is taken", is_half).await;
    for number in 64..76 {
        assert_eq!(bench.fetch(300 + number, number..number + 1).await.1, 1, "block {number}");
        bench.service.release(LeaseId(300 + number)).await;
    }
    bench.until("and no more", is_half).await;
    drop((slow, saves));
    bench.close().await;
}

/// Its slot is then on the account of DRAM, and none of the few.
#[tokio::test]
async fn blocks_that_leave_the_gpu_while_they_are_read_count_as_blocks_of_dram() {
    let dir = tempfile::tempdir().unwrap();
    let rounds = GPU_READS_MAX + 2;
    let config = three(dir.path(), 1, 2 * rounds as u64, 0);
    let (bench, hand) = open(&config).await;
    bench.saved(0, 0..1).await;
    used(&bench, 1, 0).await;
    until_in_dram(&bench, &config, 0).await;
    for round in 0..rounds {
        let (number, lease) = (round as u64, 10 * (1 + round as u64));
        bench.saved(lease, number + 1..number + 2).await;
        hand.lock().is_held = true;
        let (tier, told) = read(&bench, lease + 1, number).await;
        assert_eq!(tier, Tier::Gpu, "round {round}");
        bench.service.release(LeaseId(lease + 1)).await;
        // The next one comes up for it, which is decided at once; the bytes follow.
        used(&bench, lease + 2, number + 1).await;
        used(&bench, lease + 3, number + 1).await;
        hand.lock().is_held = false;
        timeout(PATIENCE, told).await.unwrap().unwrap().unwrap();
        until_in_dram(&bench, &config, round + 1).await;
        assert_eq!(blocks(&bench.status().await), [1, 1 + round as u64, 0]);
    }
    bench.close().await;
}
