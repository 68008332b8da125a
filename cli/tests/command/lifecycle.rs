//! Starting, looking at, interrupting: nothing may be left behind.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Place, until};

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), signal).unwrap();
}

fn assert_nothing_left(place: &Place) {
    until("every process is gone", || place.processes().is_empty());
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

/// `kvfleet up --json`, ready, with what it said.
fn up(place: &Place) -> (Child, Value) {
    let words = ["up", "--json", "--nodes", "2", "--instances", "2", "--dram", "8MiB", "--ssd", "8MiB"];
    let mut child = place.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, serde_json::from_str(&line).unwrap())
}

#[test]
fn up_serves_until_it_is_told_to_stop() {
    let place = Place::new();
    let (mut child, said) = up(&place);
    let routers: Vec<_> = said["routers"].as_array().unwrap().iter().map(|r| r.as_str().unwrap()).collect();
    let tls = said["tls_dir"].as_str().unwrap();
    let cluster = routers[0];
    let status = place.run(&["status", "--cluster", cluster, "--tls-dir", tls, "--json"]).ok();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(
        status["routers"].as_array().unwrap().len(),
        3,
        "one address is enough to see all: {status:#}"
    );
    assert_eq!(status["nodes"].as_array().unwrap().len(), 2, "{status:#}");
    assert_eq!(status["instances"].as_array().unwrap().len(), 2, "{status:#}");
    let text = place.run(&["status", "--cluster", cluster, "--tls-dir", tls]).ok();
    assert!(text.contains("leads") && text.contains("live"), "{text}");
    administer(&place, &routers.join(","), tls);
    signal(&child, Signal::TERM);
    assert!(child.wait().unwrap().success());
    assert_nothing_left(&place);
}

/// Pins and quotas go through, whoever leads.
fn administer(place: &Place, cluster: &str, tls: &str) {
    let reach = ["--cluster", cluster, "--tls-dir", tls];
    let hash = "00".repeat(16);
    let pin = ["pin", "--pin", "7", "--owner", "me", hash.as_str()];
    assert!(place.run(&[&pin[..], &reach].concat()).ok().contains("pin 7 holds 1 blocks"));
    let other = ["unpin", "--pin", "7", "--owner", "somebody"];
    place.run(&[&other[..], &reach].concat()).refused(&["belongs to"]);
    let unpin = ["unpin", "--pin", "7", "--owner", "me"];
    assert!(place.run(&[&unpin[..], &reach].concat()).ok().contains("is ended"));
    let quota = ["quota", "--tenant", "3", "--bytes", "1MiB"];
    assert!(place.run(&[&quota[..], &reach].concat()).ok().contains("1048576 bytes"));
}

#[test]
fn every_process_shows_metrics() {
    let place = Place::new();
    let (mut child, said) = up(&place);
    for process in said["processes"].as_array().unwrap() {
        let address = process["addresses"]["metrics"].as_str().unwrap();
        let text = get(address, "/metrics");
        assert!(text.contains("# TYPE kvfleet_"), "{process}: {text}");
        assert!(get(address, "/healthz").contains("ok"));
    }
    signal(&child, Signal::INT);
    assert!(child.wait().unwrap().success());
    assert_nothing_left(&place);
}

fn get(address: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn children_do_not_outlive_a_killed_parent() {
    let place = Place::new();
    let (mut child, _) = up(&place);
    assert!(!place.processes().is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    until("every process is gone", || place.processes().is_empty());
}

/// A replay that would take hours, interrupted as soon as `is_time` says so.
fn interrupted(is_time: impl Fn(&Place) -> bool) -> (Place, Option<i32>) {
    let place = Place::new();
    place.trace(200);
    let words = [
        "replay",
        "trace.jsonl",
        "--quiet",
        "--speed",
        "0.1x",
        "--report",
        "report",
        "--block-bytes",
        "4KiB",
    ];
    let mut child = place.command(&words).stdout(Stdio::null()).spawn().unwrap();
    until("it is time", || is_time(&place));
    signal(&child, Signal::INT);
    let code = child.wait().unwrap().code();
    (place, code)
}

#[test]
fn ctrl_c_during_a_replay_reports_what_ended_and_leaves_nothing() {
    // Instances have written their logs: the cluster is about to serve, or does already.
    let (place, code) = interrupted(|place| {
        let clusters = place.leftovers();
        clusters.iter().any(|dir| dir.join("logs/instance-3.log").metadata().is_ok_and(|log| log.len() > 0))
    });
    assert_eq!(code, Some(2), "an interrupted replay is no success");
    assert_nothing_left(&place);
    let report = std::fs::read_to_string(place.path("report/report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["interrupted"], true);
}

#[test]
fn ctrl_c_during_the_start_leaves_nothing() {
    let (place, _) = interrupted(|place| !place.leftovers().is_empty());
    assert_nothing_left(&place);
}
