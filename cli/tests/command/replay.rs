//! Replays: hit rates equal to what they must be, faults survived, reports complete.

use std::io::BufReader;

use kv_core::evict;
use kvfleet_sim::cache::simulate;
use kvfleet_sim::trace::{Format, Request, Strictness, read};
use serde_json::Value;

use crate::support::Place;

/// What must hold of every replay.
fn assert_sound(report: &Value) {
    assert_eq!(report["requests_ended"], report["requests"], "{report:#}");
    assert_eq!(report["requests_failed"], 0, "{report:#}");
    assert_eq!(report["wrong_bytes"], 0, "{report:#}");
    assert_eq!(report["verified_bytes"], report["fetched_bytes"], "{report:#}");
}

fn requests(place: &Place) -> Vec<Request> {
    let file = std::fs::File::open(place.path("trace.jsonl")).unwrap();
    read(BufReader::new(file), Format::Detect, Strictness::Strict).map(Result::unwrap).collect()
}

#[test]
fn with_room_for_everything_every_possible_hit_is_one() {
    let place = Place::new();
    place.trace(300);
    let stats: Value =
        serde_json::from_str(&place.run(&["trace", "stats", "trace.jsonl", "--json"]).ok()).unwrap();
    let report = place.replay(&["--block-bytes", "4KiB", "--concurrency", "8"]);
    assert_sound(&report);
    assert_eq!(report["block_accesses"], stats["characteristics"]["block_accesses"]);
    assert_eq!(report["block_hits"], stats["characteristics"]["ideal_hits"], "{report:#}");
    assert!(report["block_hits"].as_u64().unwrap() > 0);
    let hits = report["block_hits"].as_u64().unwrap();
    assert_eq!(report["fetched_bytes"].as_u64().unwrap(), hits * 4096, "a hit is a block that came");
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_bounded_cluster_is_one_exact_lru() {
    let place = Place::new();
    place.trace(300);
    let requests = requests(&place);
    let words =
        ["--block-bytes", "4KiB", "--routers", "1", "--nodes", "1", "--instances", "1", "--policy", "lru"];
    let dram = place.replay(&[&words[..], &["--dram", "400b"]].concat());
    assert_sound(&dram);
    let expected = simulate(evict::by_name("lru", 1).unwrap(), 400, &requests);
    assert_eq!(dram["block_hits"].as_u64().unwrap(), expected.block_hits);
    let both = place.replay(&[&words[..], &["--dram", "300b", "--ssd", "100b"]].concat());
    assert_sound(&both);
    assert_eq!(
        both["block_hits"].as_u64().unwrap(),
        expected.block_hits,
        "two tiers are one LRU of their sum"
    );
    assert!(both["hits_by_tier"]["ssd"].as_u64().unwrap() > 0, "{both:#}");
}

#[test]
fn a_killed_node_and_a_killed_leader_cost_time_and_nothing_else() {
    let place = Place::new();
    place.trace(300);
    let report =
        place.replay(&["--block-bytes", "4KiB", "--kill", "node:2@30%", "--kill", "router-leader@60%"]);
    assert_sound(&report);
    let kills = report["kills"].as_array().unwrap();
    assert_eq!(kills.len(), 2, "{report:#}");
    assert!(kills[0]["unrouted_ms"].is_f64(), "{report:#}");
    assert!(kills[1]["leader_ms"].is_f64(), "{report:#}");
    assert!(report["block_hits"].as_u64().unwrap() > 0);
    assert_eq!(report["seed"], 1);
    for plot in ["hit_rate.svg", "latency.svg", "bytes.svg", "events.svg"] {
        let svg = std::fs::read_to_string(place.path("report").join(plot)).unwrap();
        assert!(svg.contains("</svg>"), "{plot}");
        assert_eq!(svg.contains("node-2 killed"), plot != "latency.svg", "{plot}");
    }
    assert_eq!(place.processes(), Vec::<String>::new());
}

#[test]
fn a_killed_node_that_comes_back_serves_again() {
    let place = Place::new();
    place.trace(200);
    let faults = ["--kill", "node:1@40%", "--restart", "node:1@60%", "--kill", "instance:2@50%"];
    let report = place.replay(&[&["--block-bytes", "4KiB"], &faults[..]].concat());
    assert_sound(&report);
    assert_eq!(report["restarts"][0]["process"], "node-1");
    assert!(report["restarts"][0]["serving_ms"].is_f64(), "{report:#}");
}
