//! The thread that owns the tier: that whoever drops it goes on, with a device that ends what it began and with one that
//! never does.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvfleet_errors_doc::says;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::fake::{FakeDevice, Hand};
use super::suite::{classes, device_bytes, frame, shape};
use crate::arena::{Arena, ArenaShape, Purpose};
use crate::test_log::Log;
use crate::tiers::gpu::thread::{GpuReport, GpuThread, Job};

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A thread, DRAM beside it, and a hand on its device. One frame is on the device and is being read from it.
struct Bench {
    thread: GpuThread,
    arena: Arena,
    hand: Hand,
}

fn next(reports: &mut UnboundedReceiver<GpuReport>) -> GpuReport {
    reports.blocking_recv().expect("the thread lives")
}

impl Bench {
    fn reading(patience: Duration) -> Bench {
        let (hand, (send, mut reports)) = (Hand::default(), unbounded_channel());
        let of = Arc::clone(&hand);
        let open = move || Ok(Some(FakeDevice::in_hand(device_bytes(), 7, &of)));
        let thread = GpuThread::start(open, shape(12), send).unwrap().waiting(patience);
        thread.send(Job::Open);
        assert!(matches!(next(&mut reports), GpuReport::Opened(Ok(()))));
        let block = frame(1, true);
        thread.send(Job::Put { token: 1, frame: block.clone() });
        let stored = next(&mut reports);
        let GpuReport::Stored { result: Ok(Some(record)), .. } = stored else { panic!("{stored:?}") };
        let arena = Arena::new(ArenaShape { classes: classes(), slabs: 2, reserve_slabs: 0 }).unwrap();
        hand.lock().is_held = true;
        let into = arena.take(block.len(), Purpose::Load).unwrap();
        thread.send(Job::Get { token: 2, record, into });
        Bench { thread, arena, hand }
    }

    /// Whether nothing of the thread is left: neither its device nor the slot that it was to read into.
    fn is_over(arena: &Arena, hand: &Hand) -> bool {
        Arc::strong_count(hand) == 1 && arena.used_bytes() == 0
    }
}

#[test]
fn a_thread_that_ends_has_given_everything_back() {
    let Bench { thread, arena, hand } = Bench::reading(PATIENCE);
    hand.lock().is_held = false;
    drop(thread);
    assert!(Bench::is_over(&arena, &hand));
}

#[test]
fn a_device_that_never_ends_a_copy_keeps_what_it_may_write_to_and_nobody_who_stops() {
    let Bench { thread, arena, hand } = Bench::reading(Duration::from_millis(5));
    // On a thread of its own, so that a wait without end is seen.
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let log = Log::start();
        drop(thread);
        tell.send(log.line("left behind"))
    });
    let said = told.recv_timeout(PATIENCE).expect("it goes on without the device");
    says("a GPU that ends nothing when its node stops", &said, &[]);
    assert!(arena.used_bytes() > 0, "the slot is the device's still");
    // The driver returns after all.
    hand.lock().is_held = false;
    let start = Instant::now();
    while !Bench::is_over(&arena, &hand) {
        assert!(start.elapsed() < PATIENCE, "what was left behind never comes back");
        std::thread::yield_now();
    }
}
