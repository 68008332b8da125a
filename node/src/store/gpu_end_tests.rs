//! The end of the GPU thread: by a panic, which the node survives, and with the node, which does
//! not wait for a hanging device.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kv_core::id::{LeaseId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_transport::BlockService;

use super::gpu_tests::{RETRY, blocks, config_with_gpu, open_on, until_in_dram, used};
use super::tests::{BLOCK_BYTES, PATIENCE, fetch_request, frame, open_with, parts};
use super::*;
use crate::start::gpu_shape;
use crate::tiers::gpu::tests::fake::{FakeDevice, FaultControl};
use crate::tiers::gpu::thread::{GpuRequest, GpuThread};

/// A fake device opens, takes a block and is lost; then its thread ends. The store processes its
/// reports only afterwards.
#[tokio::test]
async fn reports_of_an_ended_gpu_thread_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 0);
    let (bytes, hand) = (usize::try_from(config.gpu_bytes).unwrap(), FaultControl::default());
    hand.lock().lost_at = Some(0);
    let mut devices = vec![FakeDevice::with_faults(bytes, 7, &hand)];
    let open = move || Ok(Some(devices.pop().expect("a defect in a driver")));
    let (send, mut reports) = mpsc::unbounded_channel();
    let thread = GpuThread::start(open, gpu_shape(&config).shape, send).unwrap();
    thread.send(GpuRequest::Open);
    thread.send(GpuRequest::Put { token: 1, frame: frame(0, BLOCK_BYTES).bytes });
    let mut said = Vec::new();
    while said.len() < 3 {
        said.push(reports.recv().await.unwrap());
    }
    let text = format!("{said:?}");
    assert!(text.contains("Opened(Ok(()))") && text.contains("Stored") && text.contains("Lost("), "{text}");
    let mut parts = parts(&config).await;
    // The store asks it to open the device again, which makes the thread panic.
    parts.gpu = Some(Gpu::new(thread, RETRY));
    let (mut store, _handle, _inbox) = Store::new(parts);
    let state = |store: &Store| {
        let why_not = store.parts.gpu.as_ref().and_then(Gpu::outage_reason).map(str::to_owned);
        (why_not, store.parts.book.stats(Tier::Gpu).admitting)
    };
    let start = Instant::now();
    while !state(&store).0.is_some_and(|why_not| why_not.contains("panic")) {
        assert!(start.elapsed() < PATIENCE, "the end of the thread is not noticed");
        store.retry_gpu();
        tokio::task::yield_now().await;
    }
    let buried = state(&store);
    assert!(!buried.1);
    for report in said {
        let text = format!("{report:?}");
        store.on_gpu_report(report);
        assert_eq!(state(&store), buried, "{text}");
        store.continue_gpu_loss();
        store.retry_gpu();
        assert_eq!(state(&store), buried, "{text}");
    }
}

#[tokio::test]
async fn panicking_gpu_thread_does_not_stop_the_node() {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with_gpu(dir.path(), 2, 4, 0);
    let bench = open_on(&config, || panic!("a defect in a driver")).await;
    bench.wait_until("it is reported", |status, _| status.tiers[2].reject_reason.contains("panic")).await;
    says("a GPU with an ended thread", &bench.status().await.tiers[2].reject_reason, &[]);
    bench.saved(1, 0..1).await;
    used(&bench, 2, 0).await;
    assert_eq!(blocks(&bench.status().await), [0, 1, 0]);
    bench.close().await;
}

#[test]
fn node_stops_although_a_gpu_copy_never_ends() {
    // On its own thread, so that a hang is detected.
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let dir = tempfile::tempdir().unwrap();
        let config = config_with_gpu(dir.path(), 2, 4, 0);
        let (bytes, hand) = (usize::try_from(config.gpu_bytes).unwrap(), FaultControl::default());
        let of = Arc::clone(&hand);
        let open = move || Ok(Some(FakeDevice::with_faults(bytes, 7, &of)));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let bench = open_with(&config, |parts| {
                let (send, reports) = mpsc::unbounded_channel();
                let thread = GpuThread::start(open, gpu_shape(&config).shape, send).unwrap();
                parts.gpu = Some(Gpu::new(thread.with_shutdown_timeout(Duration::from_millis(5)), RETRY));
                parts.gpu_reports = reports;
            });
            let bench = bench.await;
            bench.wait_until("the GPU is open", |status, _| status.tiers[2].admitting).await;
            bench.saved(1, 0..1).await;
            used(&bench, 2, 0).await;
            until_in_dram(&bench, &config, 0).await;
            hand.lock().is_stalled = true;
            let reading = bench.service.fetch(fetch_request(3, 0..1)).await;
            until_in_dram(&bench, &config, 1).await;
            bench.service.release(LeaseId(3)).await;
            bench.close().await;
            drop(reading);
        });
        tell.send(())
    });
    told.recv_timeout(PATIENCE).expect("the node stops");
}
