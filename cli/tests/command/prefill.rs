//! Replays with simulated compute time: each prefill overlaps its load, one prefill at a time per
//! instance.

use serde_json::Value;

use crate::support::Workspace;

fn replay(place: &Workspace, words: &[&str]) -> Value {
    let shape = ["--block-bytes", "16KiB", "--routers", "1", "--nodes", "2", "--instances", "2"];
    let report = place.replay(&[&shape[..], words].concat());
    for wrong in ["wrong_bytes", "wrong_blocks", "requests_failed"] {
        assert_eq!(report[wrong], 0, "{report:#}");
    }
    assert_eq!(report["requests_ended"], report["requests"], "{report:#}");
    report
}

#[test]
fn prefills_load_saved_blocks_over_every_transport() {
    let place = Workspace::new();
    place.trace(100);
    for transport in ["tcp", "quic", "shm", "auto"] {
        let report = replay(&place, &["--time-scale", "0.002", "--transport", transport]);
        let prefill = &report["prefill"];
        assert_eq!(prefill["prefill_us"]["count"], report["requests"], "{report:#}");
        // On a shared machine, any number of blocks may be recomputed in place of a wait.
        assert!(report["block_hits"].as_u64().unwrap() > 0, "{report:#}");
        assert!(report["verified_bytes"].as_u64().unwrap() > 0, "{report:#}");
        assert!(prefill["over_recompute"].as_f64().unwrap() > 0.0, "{report:#}");
        assert!(
            prefill["streamed_blocks"].as_u64().unwrap() > 0,
            "no block streamed during the prefill: {report:#}"
        );
        assert_eq!(report["fetch_us"]["count"], 0, "a fetch was timed separately: {report:#}");
    }
    assert!(replay(&place, &[])["prefill"].is_null(), "without compute time there are no prefill timings");
}

#[test]
fn a_dead_node_fails_no_request() {
    let place = Workspace::new();
    place.trace(150);
    let report = replay(&place, &["--time-scale", "0.01", "--transport", "tcp", "--kill", "node:2@50%"]);
    assert_eq!(report["prefill"]["prefill_us"]["count"], report["requests"], "{report:#}");
    assert_eq!(report["kills"].as_array().map(Vec::len), Some(1), "{report:#}");
}
