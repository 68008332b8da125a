//! In which order requests may start so that hits come out as if they had run one after the other.
//!
//! A request may overtake another unless it shares a block that the other one is the first to bring:
//! such a block is not visible before that one has ended. With bounded capacity even touching a block
//! matters to what is evicted, so there only one request runs at a time. A request that has not arrived
//! yet neither starts nor keeps others from starting. Pure: no clock, no tasks.

use std::collections::{BTreeSet, HashMap};

use kv_core::id::BlockHash;

/// Requests that may be known to wait at the same time, per request that may run. Bounds memory and
/// keeps the order near the trace's.
const WAITING_PER_RUNNING: usize = 8;

/// The order of one replay.
#[derive(Debug)]
pub(super) struct Order {
    requests: usize,
    running_max: usize,
    admitted: usize,
    ended: usize,
    running: usize,
    is_ended: Vec<bool>,
    first_with: HashMap<BlockHash, usize>,
    waits_for: HashMap<usize, usize>,
    waited_for_by: HashMap<usize, Vec<usize>>,
    free: BTreeSet<usize>,
}

impl Order {
    /// An order over requests `0..requests` of which `running_max` run at a time; 1 is the trace's own.
    pub(super) fn new(requests: usize, running_max: usize) -> Self {
        Self {
            requests,
            running_max: running_max.max(1),
            admitted: 0,
            ended: 0,
            running: 0,
            is_ended: vec![false; requests],
            first_with: HashMap::new(),
            waits_for: HashMap::new(),
            waited_for_by: HashMap::new(),
            free: BTreeSet::new(),
        }
    }

    /// The next request that may start now, which then counts as running.
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
        let next = self.free.pop_first()?;
        self.running += 1;
        Some(next)
    }

    /// A running request has ended: those that waited only for it become free.
    pub(super) fn end(&mut self, request: usize) {
        self.running -= 1;
        self.ended += 1;
        self.is_ended[request] = true;
        for waiting in self.waited_for_by.remove(&request).unwrap_or_default() {
            if let Some(left) = self.waits_for.get_mut(&waiting) {
                *left -= 1;
                if *left == 0 {
                    self.waits_for.remove(&waiting);
                    self.free.insert(waiting);
                }
            }
        }
    }

    /// Whether every request has ended.
    pub(super) fn is_done(&self) -> bool {
        self.ended == self.requests
    }

    /// The request whose arrival is next to be waited for; nothing when none is left, or when enough wait.
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
            self.free.insert(request);
            return;
        }
        self.waits_for.insert(request, earlier.len());
        for first in earlier {
            self.waited_for_by.entry(first).or_default().push(request);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn block(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    fn start(order: &mut Order, blocks: &[Vec<BlockHash>]) -> Option<usize> {
        order.start_next(|request| &blocks[request], |_| true)
    }

    /// Starts all that may start at `now`, by a clock that is a number.
    fn start_at(order: &mut Order, blocks: &[Vec<BlockHash>], arrivals: &[u64], now: u64) -> Vec<usize> {
        let mut next = || order.start_next(|request| &blocks[request], |request| arrivals[request] <= now);
        std::iter::from_fn(&mut next).collect()
    }

    #[test]
    fn nothing_starts_before_it_arrives_and_nobody_waits_for_others_to_arrive() {
        // 1 shares a block with 0 and waits for its end; 2 shares nothing and arrives late.
        let blocks = vec![vec![block(1)], vec![block(1)], vec![block(2)]];
        let arrivals = [0, 10, 1000];
        let mut order = Order::new(3, 4);
        assert_eq!(start_at(&mut order, &blocks, &arrivals, 0), [0]);
        assert_eq!(order.next_to_arrive(), Some(1));
        assert_eq!(
            start_at(&mut order, &blocks, &arrivals, 20),
            [] as [usize; 0],
            "2 does not take 1's turn"
        );
        assert_eq!(order.next_to_arrive(), Some(2));
        order.end(0);
        assert_eq!(
            start_at(&mut order, &blocks, &arrivals, 30),
            [1],
            "1 has arrived: 2's arrival is not its own"
        );
        assert_eq!(start_at(&mut order, &blocks, &arrivals, 999), [] as [usize; 0]);
        assert_eq!(start_at(&mut order, &blocks, &arrivals, 1000), [2]);
        assert_eq!(order.next_to_arrive(), None);
    }

    #[test]
    fn every_request_starts_at_its_arrival_while_there_is_room() {
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
    fn strangers_run_side_by_side() {
        let blocks = vec![vec![block(1)], vec![block(2)], vec![block(3)]];
        let mut order = Order::new(3, 2);
        assert_eq!(start(&mut order, &blocks), Some(0));
        assert_eq!(start(&mut order, &blocks), Some(1));
        assert_eq!(start(&mut order, &blocks), None, "two at a time");
        order.end(1);
        assert_eq!(start(&mut order, &blocks), Some(2));
    }

    #[test]
    fn a_child_waits_for_its_parent_and_others_overtake() {
        let blocks = vec![vec![block(1)], vec![block(1), block(2)], vec![block(3)]];
        let mut order = Order::new(3, 3);
        assert_eq!(start(&mut order, &blocks), Some(0));
        assert_eq!(start(&mut order, &blocks), Some(2));
        assert_eq!(start(&mut order, &blocks), None);
        order.end(0);
        assert_eq!(start(&mut order, &blocks), Some(1));
    }

    #[test]
    fn a_block_of_an_ended_request_is_waited_for_by_nobody() {
        let blocks = vec![vec![block(1)], vec![block(1)], vec![block(1)]];
        let mut order = Order::new(3, 3);
        assert_eq!(start(&mut order, &blocks), Some(0));
        order.end(0);
        assert_eq!(start(&mut order, &blocks), Some(1));
        assert_eq!(start(&mut order, &blocks), Some(2), "both only read");
    }

    #[test]
    fn one_at_a_time_is_the_order_of_the_trace() {
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
    fn every_request_starts_exactly_once_and_after_its_introducers() {
        // A deterministic mix of shared and own blocks.
        let blocks: Vec<Vec<BlockHash>> =
            (0u8..200).map(|n| vec![block(n % 7), block(50 + n % 23), block(n)]).collect();
        let mut order = Order::new(200, 5);
        let (mut running, mut ended) = (vec![], BTreeSet::new());
        while !order.is_done() {
            while let Some(next) = start(&mut order, &blocks) {
                for earlier in 0..next {
                    let brings = |b: &BlockHash| !blocks[..earlier].iter().flatten().any(|other| other == b);
                    let shared =
                        blocks[earlier].iter().filter(|b| brings(b)).any(|b| blocks[next].contains(b));
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
