//! Replays over each transport: bytes take the requested path, arrive intact, and the report says
//! so.

use serde_json::Value;

use crate::support::Workspace;

fn replay(place: &Workspace, words: &[&str]) -> Value {
    let shape = ["--block-bytes", "4KiB", "--routers", "1", "--nodes", "2", "--instances", "2"];
    let report = place.replay(&[&shape[..], words].concat());
    for wrong in ["wrong_bytes", "wrong_blocks", "requests_failed"] {
        assert_eq!(report[wrong], 0, "{report:#}");
    }
    assert_eq!(report["requests_ended"], report["requests"], "{report:#}");
    report
}

/// Encoded bytes that were fetched over a path; `None` if the report lacks the path.
fn fetched(report: &Value, path: &str) -> Option<u64> {
    report["paths"].get(path)?["fetched_bytes"].as_u64()
}

#[test]
fn blocks_use_the_requested_transport() {
    let place = Workspace::new();
    place.trace(200);
    for (words, path, other) in [
        (&["--transport", "tcp"][..], "tcp", "quic"),
        (&["--transport", "quic"], "quic", "tcp"),
        (&["--transport", "shm"], "shm", "quic"),
    ] {
        let report = replay(&place, words);
        assert_eq!(report["config"]["transport"], path);
        // Frames are longer than their blocks.
        assert!(fetched(&report, path) > report["fetched_bytes"].as_u64(), "{report:#}");
        assert_eq!(fetched(&report, other), None, "{report:#}");
        assert!(report["paths"][path]["saved_bytes"].as_u64() > report["saved_bytes"].as_u64());
        assert!(report["cpu"]["cluster_s_per_gb"].as_f64().unwrap() > 0.0, "{report:#}");
    }
}

#[test]
fn auto_survives_a_kill_and_explains_its_path() {
    let place = Workspace::new();
    place.trace(300);
    // `auto` is the default.
    let report = replay(&place, &["--kill", "node:2@50%", "--restart", "node:2@70%"]);
    assert_eq!(report["config"]["transport"], "auto");
    let paths = ["shm", "quic", "tcp"].map(|path| fetched(&report, path).unwrap());
    assert!(paths.iter().sum::<u64>() > report["fetched_bytes"].as_u64().unwrap(), "{report:#}");
    assert!(paths[0] > paths[1] + paths[2], "every node is on this host: {report:#}");
    let reasons = report["path_reasons"].as_array().unwrap();
    assert!(
        reasons.iter().any(|reason| reason.as_str().unwrap().contains(" over shm: same host")),
        "{report:#}"
    );
}

#[test]
fn missing_rdma_is_reported_before_serving() {
    let place = Workspace::new();
    place.trace(2);
    let nowhere = ["--set", "instance.rdma.device=nowhere", "--set", "node.rdma.device=nowhere"];
    let words = ["replay", "trace.jsonl", "--quiet", "--transport", "rdma", "--routers", "1", "--nodes", "1"];
    let ran = place.run(&[&words[..], &["--instances", "1"], &nowhere].concat());
    let is_built = cfg!(feature = "rdma");
    let missing =
        if is_built { "no such device" } else { "built without RDMA: build it with --features rdma" };
    assert!(ran.code != Some(0) && ran.all().contains(missing), "{}", ran.all());
    // A node that enables RDMA without the feature fails to start too.
    let enabled = ["--transport", "tcp", "--set", "node.rdma.enabled=true"];
    let words = ["replay", "trace.jsonl", "--quiet", "--routers", "1", "--nodes", "1", "--instances", "1"];
    let ran = place.run(&[&words[..], &enabled, &nowhere].concat());
    assert_eq!(ran.code == Some(0), is_built, "the node serves without a device: {}", ran.all());
    assert!(is_built || ran.all().contains("rdma.enabled is true: this program was built without RDMA"));
}
