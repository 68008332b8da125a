//! Rules of the replay of one tier that hold under every policy, baselines included.
//!
//! Not here: the rules under one policy, against a plain model (`sim/src/cache/tests.rs`).

#![allow(clippy::unwrap_used)]

use kvfleet_lab::evict::{NAMES, by_name};
use kvfleet_sim::cache::optimal::simulate_optimal;
use kvfleet_sim::cache::{CacheReplay, simulate};
use kvfleet_sim::trace::Request;
use proptest::prelude::*;

fn request(arrival_us: u64, blocks: &[u64]) -> Request {
    Request { arrival_us, blocks: blocks.to_vec(), block_tokens: 512, ..Request::default() }
}

fn cache(name: &str, capacity_blocks: usize) -> CacheReplay {
    CacheReplay::new(by_name(name, 0).unwrap(), capacity_blocks)
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
