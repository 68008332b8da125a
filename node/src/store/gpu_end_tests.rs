//! The end of a GPU's thread: by a defect, of which the node lives on, and with the node, which does not wait for a device
//! that never ends a copy.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kv_core::id::{LeaseId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_transport::BlockService;

use super::gpu_tests::{RETRY, blocks, open_on, three, until_in_dram, used};
use super::tests::{BLOCK_BYTES, PATIENCE, fetch_request, frame, open_with, parts};
use super::*;
use crate::start::gpu_shape;
use crate::tiers::gpu::tests::fake::{FakeDevice, Hand};
use crate::tiers::gpu::thread::{GpuThread, Job};

/// A fake device opens, takes a block and is lost; then its thread ends. All that it had said is heard after that.
#[tokio::test]
async fn what_a_thread_had_said_before_it_ended_brings_nothing_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = three(dir.path(), 2, 4, 0);
    let (bytes, hand) = (usize::try_from(config.gpu_bytes).unwrap(), Hand::default());
    hand.lock().lost_at = Some(0);
    let mut devices = vec![FakeDevice::in_hand(bytes, 7, &hand)];
    let open = move || Ok(Some(devices.pop().expect("a defect in a driver")));
    let (send, mut reports) = mpsc::unbounded_channel();
    let thread = GpuThread::start(open, gpu_shape(&config).shape, send).unwrap();
    thread.send(Job::Open);
    thread.send(Job::Put { token: 1, frame: frame(0, BLOCK_BYTES).bytes });
    let mut said = Vec::new();
    while said.len() < 3 {
        said.push(reports.recv().await.unwrap());
    }
    let text = format!("{said:?}");
    assert!(text.contains("Opened(Ok(()))") && text.contains("Stored") && text.contains("Lost("), "{text}");
    let mut parts = parts(&config).await;
    // It has the device opened once more, by which the thread ends.
    parts.gpu = Some(Gpu::new(thread, RETRY));
    let (mut store, _handle, _inbox) = Store::new(parts);
    let state = |store: &Store| {
        let why_not = store.parts.gpu.as_ref().and_then(Gpu::why_not).map(str::to_owned);
        (why_not, store.parts.book.stats(Tier::Gpu).admitting)
    };
    let start = Instant::now();
    while !state(&store).0.is_some_and(|why_not| why_not.contains("panic")) {
        assert!(start.elapsed() < PATIENCE, "its end is never noticed");
        store.retry_gpu();
        tokio::task::yield_now().await;
    }
    let buried = state(&store);
    assert!(!buried.1);
    for report in said {
        let text = format!("{report:?}");
        store.on_gpu_report(report);
        assert_eq!(state(&store), buried, "{text}");
        store.settle_gpu();
        store.retry_gpu();
        assert_eq!(state(&store), buried, "{text}");
    }
}

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
