//! Start order of requests, such that hits come out as if requests had run one after the other.
//!
//! A request may overtake another unless it shares a block that the other is the first to contain:
//! such a block is not visible until that request has ended. With bounded capacity, even a touch
//! affects later evictions, so requests run one at a time. A request that has not arrived neither
//! starts nor keeps others from starting. Free of I/O: no clock and no tasks.

use std::collections::{BTreeSet, HashMap};

use kv_core::id::BlockHash;

/// Waiting requests to track per concurrent request. Bounds memory and keeps the order close to
/// that of the trace.
const WAITING_PER_RUNNING: usize = 8;

/// The start order of one replay.
#[derive(Debug)]
pub(super) struct Order {
    requests: usize,
    running_max: usize,
    admitted: usize,
    ended: usize,
    running: usize,
    is_ended: Vec<bool>,
    first_with: HashMap<BlockHash, usize>,
    open_dependencies: HashMap<usize, usize>,
    dependents: HashMap<usize, Vec<usize>>,
    ready: BTreeSet<usize>,
}

impl Order {
    /// An order over requests `0..requests` with at most `running_max` running concurrently; with 1
    /// it is the trace order.
    pub(super) fn new(requests: usize, running_max: usize) -> Self {
        Self {
            requests,
            running_max: running_max.max(1),
            admitted: 0,
            ended: 0,
            running: 0,
            is_ended: vec![false; requests],
            first_with: HashMap::new(),
            open_dependencies: HashMap::new(),
            dependents: HashMap::new(),
            ready: BTreeSet::new(),
        }
    }

    /// The next request that may start now; it then counts as running.
    pub(super) fn start_next<'a>(
        &mut self,
        blocks_of: impl Fn(usize) -> &'a [BlockHash],
        has_arrived: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        if self.running == self.running_max {
            return None;
        }
        while self.next_to_arrive().is_some_and(&has_arrived) {
            self.admit(self.admitted, blocks_of(self.admitted));
        }
        let next = self.ready.pop_first()?;
        self.running += 1;
        Some(next)
    }

    /// Ends a running request: requests that waited only for it may start.
    pub(super) fn end(&mut self, request: usize) {
        self.running -= 1;
        self.ended += 1;
        self.is_ended[request] = true;
        for waiting in self.dependents.remove(&request).unwrap_or_default() {
            if let Some(left) = self.open_dependencies.get_mut(&waiting) {
                *left -= 1;
                if *left == 0 {
                    self.open_dependencies.remove(&waiting);
                    self.ready.insert(waiting);
                }
            }
        }
    }

    /// Whether every request has ended.
    pub(super) fn is_done(&self) -> bool {
        self.ended == self.requests
    }

    /// The next request to wait for; `None` if no request is left or enough are waiting.
    pub(super) fn next_to_arrive(&self) -> Option<usize> {
        let waiting_max = if self.running_max == 1 { 1 } else { self.running_max * WAITING_PER_RUNNING };
        (self.admitted < self.requests && self.admitted - self.ended < waiting_max).then_some(self.admitted)
    }

    fn admit(&mut self, request: usize, blocks: &[BlockHash]) {
        self.admitted += 1;
        let mut earlier = BTreeSet::new();
        for block in blocks {
            let first = *self.first_with.entry(*block).or_insert(request);
            if first != request && !self.is_ended[first] {
                earlier.insert(first);
            }
        }
        if earlier.is_empty() {
            self.ready.insert(request);
            return;
        }
        self.open_dependencies.insert(request, earlier.len());
        for first in earlier {
            self.dependents.entry(first).or_default().push(request);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn block(number: u8) -> BlockHash {
        BlockHash([number; _])
    }

    fn start(order: &mut Order, blocks: &[Vec<BlockHash>]) -> Option<usize> {
        order.start_next(|request| &blocks[request], |_| true)
    }

    /// Starts every request that may start at time `now`.
    fn start_at(order: &mut Order, blocks: &[Vec<BlockHash>], arrivals: &[u64], now: u64) -> Vec<usize> {
        let mut next = || order.start_next(|request| &blocks[request], |request| arrivals[request] <= now);
        std::iter::from_fn(&mut next).collect()
    }

    #[test]
    fn late_arrivals_do_not_block_others() {
        // Request 1 shares a block with 0 and waits for its end; 2 shares no block and arrives
        // late.
        let blocks = vec![vec![block(1)], vec![block(1)], vec![block(2)]];
        let arrivals = [0, 10, 1000];
        let mut order = Order::new(3, 4);
        assert_eq!(start_at(&mut order, &blocks, &arrivals, 0), [0]);
        assert_eq!(order.next_to_arrive(), Some(1));
        assert_eq!(
            start_at(&mut order, &blocks, &arrivals, 20),
            [] as [usize; 0],
            "request 2 does not start in place of 1"
        );
        assert_eq!(order.next_to_arrive(), Some(2));
        order.end(0);
        assert_eq!(
            start_at(&mut order, &blocks, &arrivals, 30),
            [1],
            "request 1 has arrived and need not wait for the arrival of 2"
        );
        assert_eq!(start_at(&mut order, &blocks, &arrivals, 999), [] as [usize; 0]);
        assert_eq!(start_at(&mut order, &blocks, &arrivals, 1000), [2]);
        assert_eq!(order.next_to_arrive(), None);
    }

    #[test]
    fn requests_start_at_their_arrival() {
        let blocks: Vec<_> = (0..20).map(|number| vec![block(number)]).collect();
        let arrivals: Vec<u64> = (0..20).map(|number| number * 100).collect();
        let mut order = Order::new(20, 2);
        for now in 0..2000 {
            for started in start_at(&mut order, &blocks, &arrivals, now) {
                assert_eq!(arrivals[started], now);
                order.end(started);
            }
        }
        assert!(order.is_done());
    }

    #[test]
    fn unrelated_requests_run_concurrently() {
        let blocks = vec![vec![block(1)], vec![block(2)], vec![block(3)]];
        let mut order = Order::new(3, 2);
        assert_eq!(start(&mut order, &blocks), Some(0));
        assert_eq!(start(&mut order, &blocks), Some(1));
        assert_eq!(start(&mut order, &blocks), None, "two at a time");
        order.end(1);
        assert_eq!(start(&mut order, &blocks), Some(2));
    }

    #[test]
    fn shared_blocks_wait_for_the_first_request() {
        let blocks = vec![vec![block(1)], vec![block(1), block(2)], vec![block(3)]];
        let mut order = Order::new(3, 3);
        assert_eq!(start(&mut order, &blocks), Some(0));
        assert_eq!(start(&mut order, &blocks), Some(2));
        assert_eq!(start(&mut order, &blocks), None);
        order.end(0);
        assert_eq!(start(&mut order, &blocks), Some(1));
    }

    #[test]
    fn ended_requests_block_nobody() {
        let blocks = vec![vec![block(1)], vec![block(1)], vec![block(1)]];
        let mut order = Order::new(3, 3);
        assert_eq!(start(&mut order, &blocks), Some(0));
        order.end(0);
        assert_eq!(start(&mut order, &blocks), Some(1));
        assert_eq!(start(&mut order, &blocks), Some(2), "both only read");
    }

    #[test]
    fn sequential_keeps_trace_order() {
        let blocks: Vec<_> = (0..9).map(|number| vec![block(number)]).collect();
        let mut order = Order::new(9, 1);
        for expected in 0..9 {
            assert_eq!(start(&mut order, &blocks), Some(expected));
            assert_eq!(start(&mut order, &blocks), None);
            order.end(expected);
        }
        assert!(order.is_done());
    }

    #[test]
    fn each_request_starts_once_after_its_dependencies() {
        // A deterministic mix of shared and unshared blocks.
        let blocks: Vec<Vec<BlockHash>> =
            (0u8..200).map(|n| vec![block(n % 7), block(50 + n % 23), block(n)]).collect();
        let mut order = Order::new(200, 5);
        let (mut running, mut ended) = (vec![], BTreeSet::new());
        while !order.is_done() {
            while let Some(next) = start(&mut order, &blocks) {
                for earlier in 0..next {
                    let introduces =
                        |b: &BlockHash| !blocks[..earlier].iter().flatten().any(|other| other == b);
                    let shared =
                        blocks[earlier].iter().filter(|b| introduces(b)).any(|b| blocks[next].contains(b));
                    assert!(!shared || ended.contains(&earlier), "{next} started before {earlier} ended");
                }
                running.push(next);
            }
            let end = running.remove(running.len() / 2);
            order.end(end);
            assert!(ended.insert(end));
        }
        assert_eq!(ended.len(), 200);
    }
}
