//! Replays the public Mooncake trace: hit rates must match the reference figures to 0.01 point, and
//! those of other policies must match recorded values.
//!
//! Not here: the trace itself. It is looked up in the folder `KVFLEET_TRACES`, then in
//! `../shared/traces` beside the repository; without it the test says that it did not run.

#![allow(clippy::unwrap_used)]

use kvfleet_lab::evict::by_name;
use kvfleet_sim::cache::{optimal::FutureUses, simulate};
use kvfleet_sim::trace::{Format, Request, Strictness, TurnInference, read};
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

/// Maximum difference from a published figure, in points: they have two digits.
const PUBLISHED_POINTS: f64 = 0.01;
/// Maximum difference from our own figures. Replays are deterministic, so any policy change shows.
/// The tolerance allows for the last digit of a fitted curve.
const OWN_POINTS: f64 = 0.1;

fn check(name: &str, within: f64, expected: [f64; 6], hit_rate: impl Fn(usize) -> f64) {
    for (percent, expected) in PERCENTS.into_iter().zip(expected) {
        let measured = 100.0 * hit_rate(UNIQUE_BLOCKS * percent / 100);
        eprintln!("{name} at {percent} %: {measured:.3} (reference {expected})");
        assert!(
            (measured - expected).abs() <= within,
            "{name} at {percent} %: {measured} against {expected}"
        );
    }
}

/// Compares a policy with figures.
fn check_policy(requests: &[Request], name: &str, within: f64, expected: [f64; 6]) {
    let replay = |capacity| simulate(by_name(name, 0).unwrap(), capacity, requests).hit_rate();
    check(name, within, expected, replay);
}

#[test]
fn the_ideal_hit_rate_matches_the_published_one() {
    let Some(requests) = trace() else { return };
    let ideal = simulate(by_name("lru", 0).unwrap(), usize::MAX, &requests);
    assert_eq!((ideal.requests, ideal.block_accesses, ideal.evictions), (12_031, 288_500, 0));
    assert_eq!(ideal.block_accesses - ideal.block_hits, UNIQUE_BLOCKS as u64);
    assert!((100.0 * ideal.hit_rate() - 36.64).abs() < 0.005);
}

#[test]
fn published_policies_and_the_bound_match_the_reference() {
    let Some(requests) = trace() else { return };
    check_policy(&requests, "lru", PUBLISHED_POINTS, [5.25, 7.93, 19.58, 27.89, 34.53, 36.04]);
    check_policy(&requests, "fifo", PUBLISHED_POINTS, [5.13, 7.67, 17.53, 24.81, 31.33, 34.75]);
    check_policy(&requests, "lfu", PUBLISHED_POINTS, [5.82, 8.34, 12.67, 19.49, 30.69, 35.91]);
    check_policy(&requests, "s3fifo", PUBLISHED_POINTS, [7.49, 10.67, 18.74, 24.48, 32.76, 35.84]);
    check_policy(&requests, "gdsf", PUBLISHED_POINTS, [5.52, 8.64, 20.72, 28.79, 33.96, 35.97]);
    let future = FutureUses::new(&requests);
    let bound = |capacity| future.simulate(capacity).hit_rate();
    check("opt", PUBLISHED_POINTS, [24.64, 31.42, 36.64, 36.64, 36.64, 36.64], bound);
}

#[test]
fn unpublished_policies_keep_their_recorded_hit_rates() {
    let Some(mut requests) = trace() else { return };
    let mut inference = TurnInference::new();
    requests.iter_mut().for_each(|request| inference.infer(request));
    check_policy(&requests, "arc", OWN_POINTS, [6.52, 9.25, 21.23, 28.41, 32.02, 35.96]);
    check_policy(&requests, "tinylfu", OWN_POINTS, [5.93, 8.54, 12.32, 15.09, 19.03, 24.67]);
    check_policy(&requests, "workload", OWN_POINTS, [8.28, 10.06, 20.33, 27.92, 33.95, 36.02]);
    check_policy(&requests, "workload-share", OWN_POINTS, [9.46, 12.14, 17.88, 24.76, 34.19, 36.03]);
    check_policy(&requests, "workload-posterior", OWN_POINTS, [9.44, 12.37, 17.70, 24.79, 34.09, 36.06]);
    check_policy(&requests, "density", OWN_POINTS, [9.80, 14.81, 22.84, 29.64, 34.84, 36.04]);
    check_policy(&requests, "workload-aged", OWN_POINTS, [5.25, 7.89, 19.63, 27.93, 34.52, 36.04]);
}
