//! The public Mooncake trace replayed: hit rates must equal the reference figures to 0.01 point.
//!
//! Not here: the trace itself. It is looked for in the folder `KVFLEET_TRACES` names, then in
//! `../shared/traces` beside the repository; without it the test says that it did not run.

#![allow(clippy::unwrap_used)]

use kv_core::evict::by_name;
use kvfleet_sim::cache::{optimal::simulate_optimal, simulate};
use kvfleet_sim::trace::{Format, Request, Strictness, read};
use std::io::BufReader;
use std::path::PathBuf;

const FILE: &str = "mooncake_conversation_trace.jsonl";
const UNIQUE_BLOCKS: usize = 182_790;
const PERCENTS: [usize; 6] = [1, 2, 5, 10, 20, 40];

fn trace() -> Option<Vec<Request>> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces");
    let folder = std::env::var_os("KVFLEET_TRACES").map_or_else(|| PathBuf::from(beside), PathBuf::from);
    let path = folder.join(FILE);
    let Ok(file) = std::fs::File::open(&path) else {
        eprintln!("SKIPPED: {} is absent; put the trace there or set KVFLEET_TRACES", path.display());
        return None;
    };
    let mut reader = read(BufReader::new(file), Format::Detect, Strictness::Strict);
    let requests = reader.by_ref().map(Result::unwrap).collect();
    assert_eq!(reader.format(), Format::Mooncake);
    Some(requests)
}

fn check(name: &str, expected: [f64; 6], hit_rate: impl Fn(usize) -> f64) {
    for (percent, expected) in PERCENTS.into_iter().zip(expected) {
        let measured = 100.0 * hit_rate(UNIQUE_BLOCKS * percent / 100);
        eprintln!("{name} at {percent} %: {measured:.3} (reference {expected})");
        assert!((measured - expected).abs() <= 0.01, "{name} at {percent} %: {measured} against {expected}");
    }
}

#[test]
fn the_ideal_hit_rate_is_the_published_one() {
    let Some(requests) = trace() else { return };
    let ideal = simulate(by_name("lru", 0).unwrap(), usize::MAX, &requests);
    assert_eq!((ideal.requests, ideal.block_accesses, ideal.evictions), (12_031, 288_500, 0));
    assert_eq!(ideal.block_accesses - ideal.block_hits, UNIQUE_BLOCKS as u64);
    assert!((100.0 * ideal.hit_rate() - 36.64).abs() < 0.005);
}

#[test]
fn lru_fifo_and_the_bound_hit_as_the_reference_says() {
    let Some(requests) = trace() else { return };
    let replay = |name: &'static str| {
        let requests = &requests;
        move |capacity| simulate(by_name(name, 0).unwrap(), capacity, requests).hit_rate()
    };
    check("lru", [5.25, 7.93, 19.58, 27.89, 34.53, 36.04], replay("lru"));
    check("fifo", [5.13, 7.67, 17.53, 24.81, 31.33, 34.75], replay("fifo"));
    let bound = |capacity| simulate_optimal(&requests, capacity).hit_rate();
    check("opt", [24.64, 31.42, 36.64, 36.64, 36.64, 36.64], bound);
}
