//! Moves a node's thread away from its client's processor before it spins.
//!
//! The kernel often wakes a receiver on the sender's processor, and the sender is about to wait.
//! There, each end that spins keeps the other from answering. Both stop spinning, sleep, and are
//! woken on one processor again, for seconds, while other processors are idle. Clients report their
//! processor. Their own threads are never moved, because they belong to an engine. Not here:
//! waiting (`spin_wait.rs`).

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Minimum time between two moves, because a move takes as long as some answers.
const MOVE_INTERVAL: Duration = Duration::from_millis(1);

/// Limit of processor numbers on the wire; zero means unknown.
const CPU_NUMBERS_MAX: usize = 255;

/// This thread's processor, as encoded in a client's packet.
pub(super) fn current_cpu() -> u8 {
    let number = Some(sched_getcpu()).filter(|number| *number < CPU_NUMBERS_MAX);
    number.map_or(0, |number| u8::try_from(number + 1).unwrap_or(0))
}

/// A connection's knowledge of its client's processor.
#[derive(Debug, Default)]
pub(super) struct CpuMigration {
    client_cpu: u8,
    moved_at: Option<Instant>,
}

impl CpuMigration {
    /// Records the processor that a packet was sent from.
    pub(super) fn set_client_cpu(&mut self, there: u8) {
        self.client_cpu = there;
    }

    /// Moves the calling thread away from its client's processor before a spin. The kernel may move
    /// it back.
    pub(super) fn leave_client_cpu(&mut self) {
        if self.is_due(current_cpu(), Instant::now) {
            leave_cpu(usize::from(self.client_cpu) - 1);
        }
    }

    /// Whether a thread on `here` should move.
    fn is_due(&mut self, here: u8, now: impl FnOnce() -> Instant) -> bool {
        if self.client_cpu == 0 || self.client_cpu != here {
            return false;
        }
        let now = now();
        let is_due = self.moved_at.is_none_or(|moved| now.saturating_duration_since(moved) >= MOVE_INTERVAL);
        if is_due {
            self.moved_at = Some(now);
        }
        is_due
    }
}

/// Moves this thread to any other allowed processor, if there is one. Afterwards its affinity mask
/// is as before, so that neither the kernel nor new threads are restricted.
fn leave_cpu(processor: usize) {
    let Ok(all) = sched_getaffinity(None) else { return };
    let Some(others) = without(all, processor) else { return };
    // If the call is not permitted, the thread stays.
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
    fn a_thread_leaves_its_clients_cpu_once_per_interval() {
        let (mut aside, start) = (CpuMigration::default(), Instant::now());
        let mut after = |micros, there, here| {
            aside.set_client_cpu(there);
            aside.is_due(here, || start + Duration::from_micros(micros))
        };
        assert_eq!([after(1, 6, 7), after(2, 7, 7), after(3, 7, 7)], [false, true, false]);
        assert_eq!([after(1001, 7, 7), after(1002, 7, 7)], [false, true]);
        assert!(!after(9000, 0, 0), "an unknown client processor never causes a move");
    }

    #[test]
    fn the_only_cpu_is_not_left() {
        let mut all = CpuSet::new();
        all.set(3);
        assert!(without(all, 3).is_none());
        all.set(5);
        let others = without(all, 3).unwrap();
        assert!(others.is_set(5) && others.count() == 1);
        assert_eq!(without(all, CpuSet::MAX_CPU).unwrap().count(), 2);
    }

    #[test]
    fn a_moved_thread_keeps_its_affinity_mask() {
        std::thread::spawn(|| {
            let all = sched_getaffinity(None).unwrap();
            if all.count() < 2 {
                return println!("skipped: one processor");
            }
            // The kernel may move it back in between, so one success of many suffices.
            let left = (0..100).any(|_| {
                let before = sched_getcpu();
                leave_cpu(before);
                sched_getcpu() != before
            });
            assert!(left);
            assert_eq!(sched_getaffinity(None).unwrap(), all);
        })
        .join()
        .unwrap();
    }
}
