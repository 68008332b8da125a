//! The end of a GPU's thread: by a defect, of which the node lives on, and with the node, which does not wait for a device
//! that never ends a copy.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_errors_doc::says;
use kvfleet_transport::BlockService;

use super::gpu_tests::{RETRY, blocks, open_on, three, until_in_dram, used};
use super::tests::{PATIENCE, fetch_request, open_with};
use super::*;
use crate::start::gpu_shape;
use crate::tiers::gpu::tests::fake::{FakeDevice, Hand};
use crate::tiers::gpu::thread::GpuThread;

#[tokio::test]
async fn a_thread_that_panics_costs_the_gpu_and_not_the_node() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 0);
    let bench = open_on(&config, || panic!("a defect in a driver")).await;
    bench.until("it is said", |status, _| status.tiers[2].why_not.contains("panic")).await;
    says("a GPU whose thread ended", &bench.status().await.tiers[2].why_not, &[]);
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    assert_eq!(blocks(&bench.status().await), [0, 1, 0]);
    bench.close().await;
}

#[test]
fn a_node_whose_gpu_never_ends_a_copy_stops() {
    // On a thread of its own, so that a wait without end is seen.
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let dir = tempfile::tempdir().unwrap();
        let config = three(dir.path(), 2, 4, 0);
        let (bytes, hand) = (usize::try_from(config.gpu_bytes).unwrap(), Hand::default());
        let of = Arc::clone(&hand);
        let open = move || Ok(Some(FakeDevice::in_hand(bytes, 7, &of)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let bench = open_with(&config, |parts| {
                let (send, reports) = mpsc::unbounded_channel();
                let thread = GpuThread::start(open, gpu_shape(&config).shape, send).unwrap();
                parts.gpu = Some(Gpu::new(thread.waiting(Duration::from_millis(5)), RETRY));
                parts.gpu_reports = reports;
            });
            let bench = bench.await;
            bench.until("the GPU is open", |status, _| status.tiers[2].admitting).await;
            bench.saved(1, 0..1).await;
            used(&bench, 2, 0).await;
            until_in_dram(&bench, &config, 0).await;
            hand.lock().is_held = true;
            let reading = bench.service.fetch(fetch_request(3, 0..1)).await;
            until_in_dram(&bench, &config, 1).await;
            bench.service.release(LeaseId(3)).await;
            bench.close().await;
            drop(reading);
        });
        tell.send(())
    });
    told.recv_timeout(PATIENCE).expect("it stops");
}
