//! A whole node with a real GPU; skipped without one.
//!
//! Not here: handling of a failing GPU (`store/gpu_tests.rs`), and the copies themselves
//! (`tiers/gpu/tests`).

use crate::world::*;
use kv_core::id::{LeaseId, Tier};
use kvfleet_node::NodeConfig;
use kvfleet_node::tiers::gpu::cuda::CudaDevice;
use kvfleet_transport::FetchAnswer;

#[tokio::test]
async fn promoted_blocks_are_read_from_the_gpu() {
    if CudaDevice::open(0).unwrap().is_none() {
        return println!("SKIPPED: there is no driver or no GPU here");
    }
    let world = TestCluster::new();
    let config = NodeConfig { gpu_bytes: 256 << 20, dram_blocks: Some(16), ..world.config(&[]) };
    let node = start(&config).await;
    let of_gpu = async || {
        let status = status(&world, &node).await;
        status.tiers.into_iter().find(|tier| tier.tier == Tier::Gpu as u32).unwrap()
    };
    eventually("the GPU has its memory", async || of_gpu().await.admitting.then_some(())).await;
    let path = world.dial(node.data_addr()).await;
    assert_eq!(save(&*path, 1, 0..16).await.stored_blocks, 16);
    // At most eight are promoted at once, each when it is used again.
    for lease in 2..6 {
        for first in [0, 8] {
            let lease = 10 * lease + first;
            assert_eq!(fetch(&*path, lease, 0, &hashes(first..first + 8)).await.1, 8);
            path.release(LeaseId(lease)).await.unwrap();
        }
        eventually("promotions ended", async || (of_gpu().await.blocks >= 8).then_some(())).await;
    }
    eventually("all blocks are on the GPU", async || {
        let lease = 1_000;
        let (answer, frames) = fetch(&*path, lease, 0, &hashes(0..16)).await;
        path.release(LeaseId(lease)).await.unwrap();
        assert_eq!(frames, 16, "all bytes are right, whatever their tier");
        (answer == FetchAnswer::Hit { tiers: vec![Tier::Gpu; 16] }).then_some(())
    })
    .await;
    assert_eq!(of_gpu().await.blocks, 16);
    node.shutdown().await;
}
