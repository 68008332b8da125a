//! Queue for the accelerator: one request computes at a time, and the one with the earliest
//! deadline goes next.
//!
//! Not here: how the deadline is computed (`kv_core::schedule::priority_deadline`, sent with the
//! router's decision), and computing (`prefill.rs`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// A queued request.
struct QueuedRequest {
    /// Deadline, then order of arrival.
    order: Reverse<(u64, u64)>,
    /// Receives the permit; if the request was cancelled, the permit comes back at once.
    wake: oneshot::Sender<AcceleratorPermit>,
}

impl PartialEq for QueuedRequest {
    fn eq(&self, other: &QueuedRequest) -> bool {
        self.order == other.order
    }
}

impl Eq for QueuedRequest {}

impl PartialOrd for QueuedRequest {
    fn partial_cmp(&self, other: &QueuedRequest) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for QueuedRequest {
    fn cmp(&self, other: &QueuedRequest) -> std::cmp::Ordering {
        self.order.cmp(&other.order)
    }
}

#[derive(Default)]
struct QueueState {
    is_busy: bool,
    arrivals: u64,
    waiting: BinaryHeap<QueuedRequest>,
}

/// The queue. Clones share it.
#[derive(Clone, Default)]
pub(super) struct AcceleratorQueue {
    state: Arc<Mutex<QueueState>>,
}

impl std::fmt::Debug for AcceleratorQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Turns")
    }
}

/// Permit to compute, held until dropped.
#[derive(Debug)]
pub(super) struct AcceleratorPermit {
    queue: AcceleratorQueue,
}

impl AcceleratorQueue {
    /// Waits for the accelerator. The earliest deadline goes first; equal ones go in order of
    /// arrival.
    pub(super) async fn acquire(&self, deadline_ms: u64) -> AcceleratorPermit {
        let waits = {
            let mut line = self.state.lock();
            if line.is_busy {
                let (called, waits) = oneshot::channel();
                line.arrivals += 1;
                let place = Reverse((deadline_ms, line.arrivals));
                line.waiting.push(QueuedRequest { order: place, wake: called });
                Some(waits)
            } else {
                line.is_busy = true;
                None
            }
        };
        match waits {
            None => AcceleratorPermit { queue: self.clone() },
            // The holder of the permit passes it on when it is dropped.
            Some(waits) => waits.await.unwrap_or_else(|_| AcceleratorPermit { queue: self.clone() }),
        }
    }
}

impl Drop for AcceleratorPermit {
    fn drop(&mut self) {
        let next = {
            let mut line = self.queue.state.lock();
            let next = line.waiting.pop();
            line.is_busy = next.is_some();
            next
        };
        if let Some(QueuedRequest { wake: called, .. }) = next {
            // If the next request was cancelled, the permit comes back and is dropped here, which
            // passes it to the one after.
            drop(called.send(AcceleratorPermit { queue: self.queue.clone() }));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn earliest_deadline_first_then_arrival_order() {
        let turns = AcceleratorQueue::default();
        let first = turns.acquire(9).await;
        let (told, mut order) = tokio::sync::mpsc::unbounded_channel();
        let mut tasks = Vec::new();
        for (nth, priority_deadline_ms) in [(0, 5), (1, 3), (2, 5), (3, 1)] {
            let (theirs, told) = (turns.clone(), told.clone());
            tasks.push(tokio::spawn(async move {
                let _turn = theirs.acquire(priority_deadline_ms).await;
                told.send(nth).unwrap();
            }));
            // Each request queues before the next one starts.
            while turns.state.lock().waiting.len() < tasks.len() {
                tokio::task::yield_now().await;
            }
        }
        drop(first);
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(order.recv().await.unwrap());
        }
        assert_eq!(seen, [3, 1, 0, 2]);
        assert!(!turns.state.lock().is_busy);
    }

    #[tokio::test]
    async fn cancelled_waiters_do_not_block_the_queue() {
        let turns = AcceleratorQueue::default();
        let first = turns.acquire(1).await;
        for priority_deadline_ms in 2..2_000 {
            let gone = tokio::time::timeout(Duration::ZERO, turns.acquire(priority_deadline_ms)).await;
            assert!(gone.is_err());
        }
        let last = tokio::spawn({
            let turns = turns.clone();
            async move { drop(turns.acquire(5_000).await) }
        });
        while turns.state.lock().waiting.len() < 1_999 {
            tokio::task::yield_now().await;
        }
        drop(first);
        tokio::time::timeout(Duration::from_secs(10), last).await.unwrap().unwrap();
        assert!(!turns.state.lock().is_busy);
    }
}
