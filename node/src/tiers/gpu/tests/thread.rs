//! The thread that owns the tier: dropping it never blocks, whether the device completes its copies
//! or not.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvfleet_errors_doc::says;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::fake::{FakeDevice, FaultControl};
use super::suite::{classes, device_bytes, frame, shape};
use crate::arena::{Arena, ArenaShape, Purpose};
use crate::tiers::gpu::thread::{GpuReport, GpuRequest, GpuThread};
use kvfleet_errors_doc::log::Log;

/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// A thread, a DRAM arena, and the fault control of its device. One frame is on the device and is
/// being read.
struct ThreadBench {
    thread: GpuThread,
    arena: Arena,
    faults: FaultControl,
}

fn next(reports: &mut UnboundedReceiver<GpuReport>) -> GpuReport {
    reports.blocking_recv().expect("the GPU thread ended")
}

impl ThreadBench {
    fn reading(patience: Duration) -> ThreadBench {
        let (faults, (send, mut reports)) = (FaultControl::default(), unbounded_channel());
        let of = Arc::clone(&faults);
        let open = move || Ok(Some(FakeDevice::with_faults(device_bytes(), 7, &of)));
        let thread = GpuThread::start(open, shape(12), send).unwrap().with_shutdown_timeout(patience);
        thread.send(GpuRequest::Open);
        assert!(matches!(next(&mut reports), GpuReport::Opened(Ok(()))));
        let block = frame(1, true);
        thread.send(GpuRequest::Put { token: 1, frame: block.clone() });
        let stored = next(&mut reports);
        let GpuReport::Stored { result: Ok(Some(record)), .. } = stored else { panic!("{stored:?}") };
        let arena = Arena::new(ArenaShape { classes: classes(), slabs: 2, reserve_slabs: 0 }).unwrap();
        faults.lock().is_stalled = true;
        let into = arena.take(block.len(), Purpose::Load).unwrap();
        thread.send(GpuRequest::Get { token: 2, record, into });
        ThreadBench { thread, arena, faults }
    }

    /// Whether the thread has freed everything: its device, and the slot of the read.
    fn is_over(arena: &Arena, hand: &FaultControl) -> bool {
        Arc::strong_count(hand) == 1 && arena.used_bytes() == 0
    }
}

#[test]
fn ended_thread_returns_all_memory() {
    let ThreadBench { thread, arena, faults: hand } = ThreadBench::reading(PATIENCE);
    hand.lock().is_stalled = false;
    drop(thread);
    assert!(ThreadBench::is_over(&arena, &hand));
}

#[test]
fn stalled_device_keeps_its_memory_but_does_not_block_shutdown() {
    let ThreadBench { thread, arena, faults: hand } = ThreadBench::reading(Duration::from_millis(5));
    // On a separate thread, so that an endless wait is detected.
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let log = Log::start();
        drop(thread);
        tell.send(log.line("is abandoned"))
    });
    let said = told.recv_timeout(PATIENCE).expect("the drop was blocked by the device");
    says("a GPU that completes no copy when its node stops", &said, &[]);
    assert!(arena.used_bytes() > 0, "the device still owns the slot");
    // The driver returns later.
    hand.lock().is_stalled = false;
    let start = Instant::now();
    while !ThreadBench::is_over(&arena, &hand) {
        assert!(start.elapsed() < PATIENCE, "abandoned memory was never freed");
        std::thread::yield_now();
    }
}
