//! Replays: exact hit rates, survived faults, complete reports.

use std::io::BufReader;

use kv_core::evict;
use kvfleet_sim::cache::simulate;
use kvfleet_sim::trace::{Format, Request, Strictness, read};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Workspace, until};

/// Asserts the invariants of every replay.
fn assert_sound(report: &Value) {
    assert_eq!(report["requests_ended"], report["requests"], "{report:#}");
    assert_eq!(report["requests_failed"], 0, "{report:#}");
    assert_eq!(report["wrong_bytes"], 0, "{report:#}");
    assert_eq!(report["wrong_blocks"], 0, "{report:#}");
    let bytes = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(bytes("verified_bytes") + bytes("unused_bytes"), bytes("fetched_bytes"), "{report:#}");
    for problems in ["faults_not_done", "faults_not_measured", "crashed"] {
        assert_eq!(report[problems], serde_json::json!([]), "{report:#}");
    }
}

fn requests(place: &Workspace) -> Vec<Request> {
    let file = std::fs::File::open(place.path("trace.jsonl")).unwrap();
    read(BufReader::new(file), Format::Detect, Strictness::Strict).map(Result::unwrap).collect()
}

#[test]
fn unbounded_capacity_yields_every_possible_hit() {
    let place = Workspace::new();
    place.trace(300);
    let stats: Value =
        serde_json::from_str(&place.run(&["trace", "stats", "trace.jsonl", "--json"]).ok()).unwrap();
    let report = place.replay(&["--block-bytes", "4KiB", "--concurrency", "8"]);
    assert_sound(&report);
    assert_eq!(report["block_accesses"], stats["characteristics"]["block_accesses"]);
    assert_eq!(report["block_hits"], stats["characteristics"]["ideal_hits"], "{report:#}");
    assert!(report["block_hits"].as_u64().unwrap() > 0);
    let hits = report["block_hits"].as_u64().unwrap();
    assert_eq!(report["fetched_bytes"].as_u64().unwrap(), hits * 4096, "every hit is one fetched block");
    assert_eq!(report["verified_bytes"], report["fetched_bytes"], "every fetched byte is verified");
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_bounded_cluster_is_an_exact_lru() {
    let place = Workspace::new();
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
        "two tiers act as one LRU of their total size"
    );
    assert!(both["hits_by_tier"]["ssd"].as_u64().unwrap() > 0, "{both:#}");
}

#[test]
fn kills_cost_only_time() {
    let place = Workspace::new();
    place.trace(300);
    let report =
        place.replay(&["--block-bytes", "4KiB", "--kill", "node:2@30%", "--kill", "router-leader@60%"]);
    assert_sound(&report);
    let kills = report["kills"].as_array().unwrap();
    assert_eq!(kills.len(), 2, "{report:#}");
    assert!(kills[0]["unrouted_ms"].is_f64(), "{report:#}");
    assert!(kills[0]["leader_ms"].is_null(), "{report:#}");
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
fn a_restarted_node_serves_again() {
    let place = Workspace::new();
    place.trace(200);
    let faults = ["--kill", "node:1@40%", "--restart", "node:1@60%", "--kill", "instance:2@50%"];
    let report = place.replay(&[&["--block-bytes", "4KiB"], &faults[..]].concat());
    assert_sound(&report);
    assert_eq!(report["restarts"][0]["process"], "node-1");
    assert!(report["restarts"][0]["serving_ms"].is_f64(), "{report:#}");
}

#[test]
fn an_unmeasurable_kill_fails_the_replay() {
    let place = Workspace::new();
    place.trace(20);
    let alone = ["--routers", "1", "--nodes", "1", "--instances", "1", "--block-bytes", "4KiB"];
    // After the only router dies, no leader follows.
    let (report, code) = place.replay_with_code(&[&alone[..], &["--kill", "router-leader@100%"]].concat());
    assert_eq!(report["requests_ended"], 20, "a fault at 100 % comes after the last request: {report:#}");
    let number = |value: &Value| value.as_f64().unwrap();
    let at_s = number(&report["kills"][0]["at_s"]);
    assert!(
        number(&report["wall_s"]) <= at_s,
        "the fault does not count into the replay's duration: {report:#}"
    );
    assert!(report["kills"][0]["leader_ms"].is_null(), "{report:#}");
    assert_eq!(report["faults_not_measured"].as_array().unwrap().len(), 1, "{report:#}");
    assert_eq!(code, Some(2));
}

#[test]
fn crashes_and_missed_faults_fail_the_replay() {
    let place = Workspace::new();
    place.trace(300);
    let words = ["replay", "trace.jsonl", "--quiet", "--report", "report", "--speed", "500x"];
    // The same instance twice: the second kill finds no process.
    let kills = ["--kill", "instance:2@1%", "--kill", "instance:2@2%", "--block-bytes", "4KiB"];
    let mut child = place.command(&[&words[..], &kills].concat()).spawn().unwrap();
    // The process lives for some 50 ms, too short to observe reliably, but its log records that it
    // served.
    until("the first fault is carried out", || {
        place.log_of("instance-2").contains("serving") && place.pid_of("instance-2").is_none()
    });
    let node = Pid::from_raw(place.pid_of("node-3").unwrap()).unwrap();
    kill_process(node, Signal::KILL).unwrap();
    let code = child.wait().unwrap().code();
    let text = std::fs::read_to_string(place.path("report/report.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    let named = |key: &str| report[key][0].as_str().unwrap_or_default().to_owned();
    assert!(named("crashed").contains("node-3 ended: signal: 9"), "{report:#}");
    assert!(named("faults_not_done").contains("instance-2 is not running"), "{report:#}");
    assert_eq!(report["requests_failed"], 0, "{report:#}");
    assert_eq!(code, Some(2));
}
