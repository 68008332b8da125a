//! Whose turn it is: one request computes at a time, and of those that wait the one whose turn is earliest goes next.
//!
//! Not here: what a turn is (`kv_core::schedule::turn_of`, by way of the router's decision), and computing (`prefill.rs`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// One place in the order.
struct Waiting {
    /// Turn, and then which came first.
    place: Reverse<(u64, u64)>,
    /// Takes the turn itself: a request that is no longer there gives it back at once.
    called: oneshot::Sender<Turn>,
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Waiting) -> bool {
        self.place == other.place
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Waiting) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Waiting) -> std::cmp::Ordering {
        self.place.cmp(&other.place)
    }
}

#[derive(Default)]
struct Line {
    is_taken: bool,
    came: u64,
    waiting: BinaryHeap<Waiting>,
}

/// The order. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Turns {
    line: Arc<Mutex<Line>>,
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Turns")
    }
}

/// It is this request's turn until this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Turns,
}

impl Turns {
    /// Waits until everyone with an earlier turn is done; of equal turns, the first to come goes first.
    pub(super) async fn take(&self, turn_ms: u64) -> Turn {
        let waits = {
            let mut line = self.line.lock();
            if line.is_taken {
                let (called, waits) = oneshot::channel();
                line.came += 1;
                let place = Reverse((turn_ms, line.came));
                line.waiting.push(Waiting { place, called });
                Some(waits)
            } else {
                line.is_taken = true;
                None
            }
        };
        match waits {
            None => Turn { turns: self.clone() },
            // Whoever has the turn calls the next one before it is gone.
            Some(waits) => waits.await.unwrap_or_else(|_| Turn { turns: self.clone() }),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut line = self.turns.line.lock();
            let next = line.waiting.pop();
            line.is_taken = next.is_some();
            next
        };
        if let Some(Waiting { called, .. }) = next {
            // Of one that waits no more, the turn comes back and is dropped here, which calls the one behind it.
            drop(called.send(Turn { turns: self.turns.clone() }));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_earliest_turn_is_next_and_equal_ones_in_order_of_coming() {
        let turns = Turns::default();
        let first = turns.take(9).await;
        let (told, mut order) = tokio::sync::mpsc::unbounded_channel();
        let mut tasks = Vec::new();
        for (nth, turn_ms) in [(0, 5), (1, 3), (2, 5), (3, 1)] {
            let (theirs, told) = (turns.clone(), told.clone());
            tasks.push(tokio::spawn(async move {
                let _turn = theirs.take(turn_ms).await;
                told.send(nth).unwrap();
            }));
            // Each waits before the next one comes.
            while turns.line.lock().waiting.len() < tasks.len() {
                tokio::task::yield_now().await;
            }
        }
        drop(first);
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(order.recv().await.unwrap());
        }
        assert_eq!(seen, [3, 1, 0, 2]);
        assert!(!turns.line.lock().is_taken);
    }

    #[tokio::test]
    async fn who_waits_no_more_holds_nobody_up() {
        let turns = Turns::default();
        let first = turns.take(1).await;
        for turn_ms in 2..2_000 {
            let gone = tokio::time::timeout(Duration::ZERO, turns.take(turn_ms)).await;
            assert!(gone.is_err());
        }
        let last = tokio::spawn({
            let turns = turns.clone();
            async move { drop(turns.take(5_000).await) }
        });
        while turns.line.lock().waiting.len() < 1_999 {
            tokio::task::yield_now().await;
        }
        drop(first);
        tokio::time::timeout(Duration::from_secs(10), last).await.unwrap().unwrap();
        assert!(!turns.line.lock().is_taken);
    }
}
