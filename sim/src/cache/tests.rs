//! Tests of the replay: its rules one by one, against a plain model, and the reference figures.

#![allow(clippy::unwrap_used)]

use super::optimal::simulate_optimal;
use super::*;
use kv_core::evict::{NAMES, by_name};
use proptest::prelude::*;

fn request(arrival_us: u64, blocks: &[u64]) -> Request {
    Request { arrival_us, blocks: blocks.to_vec(), block_tokens: 512, ..Request::default() }
}

fn cache(name: &str, capacity_blocks: usize) -> CacheReplay {
    CacheReplay::new(by_name(name, 0).unwrap(), capacity_blocks)
}

#[test]
fn a_hit_needs_every_earlier_block() {
    let mut cache = cache("lru", 10);
    assert_eq!(cache.serve(&request(0, &[1, 2, 3])), 0);
    assert_eq!(cache.serve(&request(1, &[1, 2, 3, 4])), 3);
    assert_eq!(cache.serve(&request(2, &[9, 2, 3])), 0, "2 and 3 are resident, but behind a miss");
    assert_eq!(
        cache.outcome(),
        ReplayOutcome { requests: 3, block_accesses: 10, block_hits: 3, evictions: 0 }
    );
}

#[test]
fn the_tail_of_a_request_leaves_before_its_head() {
    for name in NAMES {
        let mut cache = cache(name, 4);
        cache.serve(&request(0, &[1, 2, 3, 4]));
        cache.serve(&request(1, &[5, 6]));
        assert_eq!(cache.serve(&request(2, &[1, 2, 3])), 2, "{name}");
    }
}

#[test]
fn blocks_of_the_running_request_are_not_evicted() {
    for name in NAMES {
        let mut cache = cache(name, 3);
        cache.serve(&request(0, &[1, 2, 3, 4, 5]));
        assert_eq!(cache.resident_blocks(), 3);
        assert_eq!(cache.serve(&request(1, &[1, 2, 3, 4, 5])), 3, "{name} keeps the head");
        assert_eq!(cache.outcome().evictions, 0);
    }
}

#[test]
fn a_resident_block_behind_a_miss_is_touched() {
    let mut cache = cache("lru", 4);
    cache.serve(&request(0, &[1, 2]));
    cache.serve(&request(1, &[3]));
    cache.serve(&request(2, &[4, 2]));
    cache.serve(&request(3, &[5]));
    assert_eq!(cache.serve(&request(4, &[2])), 1, "1 was evicted, not 2");
    assert_eq!(cache.serve(&request(5, &[1])), 0);
}

#[test]
fn the_hit_rate_of_an_empty_replay_is_zero() {
    assert_eq!(ReplayOutcome::default().hit_rate(), 0.0);
    assert_eq!(simulate(by_name("lru", 0).unwrap(), 5, &[]), ReplayOutcome::default());
}

/// Least recently used in its simplest form: a list, oldest first.
fn plain_lru(requests: &[Request], capacity: usize) -> u64 {
    let (mut list, mut hits) = (Vec::<u64>::new(), 0);
    for request in requests {
        hits += request.blocks.iter().take_while(|block| list.contains(block)).count() as u64;
        let (held, new): (Vec<u64>, Vec<u64>) = request.blocks.iter().partition(|block| list.contains(block));
        let mut kept = held;
        for block in new {
            if list.len() == capacity {
                let Some(at) = list.iter().position(|old| !request.blocks.contains(old)) else { continue };
                list.remove(at);
            }
            list.push(block);
            kept.push(block);
        }
        list.retain(|block| !kept.contains(block));
        list.extend(request.blocks.iter().rev().filter(|block| kept.contains(block)));
    }
    hits
}

/// Requests over a small tree: a block's parent is half its number.
fn any_requests() -> impl Strategy<Value = Vec<Request>> {
    let path = |leaf: u64| {
        let mut blocks: Vec<u64> =
            std::iter::successors(Some(leaf), |&at| Some(at / 2).filter(|&up| up > 0)).collect();
        blocks.reverse();
        blocks
    };
    prop::collection::vec((1..64_u64).prop_map(path), 1..80)
        .prop_map(|paths| paths.iter().zip(0..).map(|(blocks, at)| request(at * 1_000_000, blocks)).collect())
}

proptest! {
    #[test]
    fn lru_hits_as_the_plain_list_does(requests in any_requests(), capacity in 1..40_usize) {
        let outcome = simulate(by_name("lru", 0).unwrap(), capacity, &requests);
        prop_assert_eq!(outcome.block_hits, plain_lru(&requests, capacity));
    }

    #[test]
    fn no_policy_exceeds_the_bound(requests in any_requests(), capacity in 8..40_usize) {
        let bound = simulate_optimal(&requests, capacity).block_hits;
        for name in NAMES {
            let hits = simulate(by_name(name, 0).unwrap(), capacity, &requests).block_hits;
            prop_assert!(hits <= bound, "{} hits {} of {}", name, hits, bound);
        }
    }

    #[test]
    fn all_policies_are_equal_with_unbounded_capacity(requests in any_requests()) {
        let ideal = simulate_optimal(&requests, usize::MAX);
        prop_assert_eq!(ideal.evictions, 0);
        for name in NAMES {
            prop_assert_eq!(simulate(by_name(name, 0).unwrap(), usize::MAX, &requests), ideal);
        }
    }
}
