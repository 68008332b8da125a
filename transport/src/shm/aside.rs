//! A node's thread that is about to wait without sleeping on its client's processor goes to another one first.
//!
//! Whoever is woken by a packet is often put on the processor of whoever sent it, which is about to wait. There each end that waits
//! without sleeping keeps the other from answering; both learn that it is of no use, sleep, and are woken beside each other
//! again: for seconds, while other processors are idle. Clients say on which processor they are, and their threads are left alone: they are
//! an engine's. Not here: waiting (`awake.rs`).

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Between two moves, which take as long as some answers do.
const PAUSE: Duration = Duration::from_millis(1);

/// Processors have numbers below this on the wire; zero says nothing of it.
const NUMBERS: usize = 255;

/// On which processor this thread is, as a client says it.
pub(super) fn here() -> u8 {
    let number = Some(sched_getcpu()).filter(|number| *number < NUMBERS);
    number.map_or(0, |number| u8::try_from(number + 1).unwrap_or(0))
}

/// What a connection knows of where its client is.
#[derive(Debug, Default)]
pub(super) struct Aside {
    there: u8,
    moved: Option<Instant>,
}

impl Aside {
    /// A packet came from there.
    pub(super) fn heard(&mut self, there: u8) {
        self.there = there;
    }

    /// The calling thread is about to wait without sleeping: moves it away from its client. The system may bring it back.
    pub(super) fn make_way(&mut self) {
        if self.is_due(here(), Instant::now) {
            leave(usize::from(self.there) - 1);
        }
    }

    /// Whether one who is `here` should leave.
    fn is_due(&mut self, here: u8, now: impl FnOnce() -> Instant) -> bool {
        if self.there == 0 || self.there != here {
            return false;
        }
        let now = now();
        let is_due = self.moved.is_none_or(|moved| now.saturating_duration_since(moved) >= PAUSE);
        if is_due {
            self.moved = Some(now);
        }
        is_due
    }
}

/// Leaves a processor for any other that this thread may use; stays where there is none. Afterwards it may use them all as before, so
/// that neither the system nor threads that this one makes are bound.
fn leave(processor: usize) {
    let Ok(all) = sched_getaffinity(None) else { return };
    let Some(others) = without(all, processor) else { return };
    // Not being allowed to costs what it cost before.
    if sched_setaffinity(None, &others).is_ok() {
        let _ = sched_setaffinity(None, &all);
    }
}

fn without(all: CpuSet, processor: usize) -> Option<CpuSet> {
    let mut others = all;
    (processor < CpuSet::MAX_CPU).then(|| others.unset(processor));
    (others.count() > 0).then_some(others)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn who_is_beside_its_client_leaves_and_not_at_once_again() {
        let (mut aside, start) = (Aside::default(), Instant::now());
        let mut after = |micros, there, here| {
            aside.heard(there);
            aside.is_due(here, || start + Duration::from_micros(micros))
        };
        assert_eq!([after(1, 6, 7), after(2, 7, 7), after(3, 7, 7)], [false, true, false]);
        assert_eq!([after(1001, 7, 7), after(1002, 7, 7)], [false, true]);
        assert!(!after(9000, 0, 0), "who says nothing is nowhere");
    }

    #[test]
    fn the_last_processor_is_not_left() {
        let mut all = CpuSet::new();
        all.set(3);
        assert!(without(all, 3).is_none());
        all.set(5);
        let others = without(all, 3).unwrap();
        assert!(others.is_set(5) && others.count() == 1);
        assert_eq!(without(all, CpuSet::MAX_CPU).unwrap().count(), 2);
    }

    #[test]
    fn a_thread_that_leaves_is_elsewhere_and_may_go_anywhere() {
        std::thread::spawn(|| {
            let all = sched_getaffinity(None).unwrap();
            if all.count() < 2 {
                return println!("skipped: one processor");
            }
            // Whether the system brings it back in between is not ours to say: once is enough.
            let left = (0..100).any(|_| {
                let before = sched_getcpu();
                leave(before);
                sched_getcpu() != before
            });
            assert!(left);
            assert_eq!(sched_getaffinity(None).unwrap(), all);
        })
        .join()
        .unwrap();
    }
}
