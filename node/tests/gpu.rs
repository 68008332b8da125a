//! A whole node on a GPU, where there is one.
//!
//! Not here: what a node does with a GPU that fails (`store/gpu_tests.rs`), and the copies themselves (`tiers/gpu/tests`).

use crate::world::*;
use kv_core::id::{LeaseId, Tier};
use kvfleet_node::NodeConfig;
use kvfleet_node::tiers::gpu::cuda::CudaDevice;
use kvfleet_transport::FetchAnswer;

#[tokio::test]
async fn what_went_up_to_a_gpu_is_fetched_from_there_where_there_is_one() {
    if CudaDevice::open(0).unwrap().is_none() {
        return println!("SKIPPED: there is no driver or no GPU here");
    }
    let world = World::new();
    let config = NodeConfig { gpu_bytes: 256 << 20, dram_blocks: Some(16), ..world.config(&[]) };
    let node = start(&config).await;
    let of_gpu = async || {
        let status = status(&world, &node).await;
        status.tiers.into_iter().find(|tier| tier.tier == Tier::Gpu as u32).unwrap()
    };
    eventually("the GPU has its memory", async || of_gpu().await.admitting.then_some(())).await;
    let path = world.dial(node.data_addr()).await;
    assert_eq!(save(&*path, 1, 0..16).await.stored_blocks, 16);
    // Eight of them come up at once, at most, each when it is used again.
    for lease in 2..6 {
        for first in [0, 8] {
            let lease = 10 * lease + first;
            assert_eq!(fetch(&*path, lease, 0, &hashes(first..first + 8)).await.1, 8);
            path.release(LeaseId(lease)).await.unwrap();
        }
        eventually("lifts ended", async || (of_gpu().await.blocks >= 8).then_some(())).await;
    }
    eventually("all of them are there", async || {
        let lease = 1_000;
        let (answer, frames) = fetch(&*path, lease, 0, &hashes(0..16)).await;
        path.release(LeaseId(lease)).await.unwrap();
        assert_eq!(frames, 16, "all bytes are right, wherever they come from");
        (answer == FetchAnswer::Hit { tiers: vec![Tier::Gpu; 16] }).then_some(())
    })
    .await;
    assert_eq!(of_gpu().await.blocks, 16);
    node.shutdown().await;
}
