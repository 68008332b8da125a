//! Replays in which compute takes time: each prefill runs beside its load, one at a time on each instance.

use serde_json::Value;

use crate::support::Place;

fn replay(place: &Place, words: &[&str]) -> Value {
    let shape = ["--block-bytes", "16KiB", "--routers", "1", "--nodes", "2", "--instances", "2"];
    let report = place.replay(&[&shape[..], words].concat());
    for wrong in ["wrong_bytes", "wrong_blocks", "requests_failed"] {
        assert_eq!(report[wrong], 0, "{report:#}");
    }
    assert_eq!(report["requests_ended"], report["requests"], "{report:#}");
    report
}

#[test]
fn what_a_prefill_loads_is_what_was_saved_over_every_transport() {
    let place = Place::new();
    place.trace(100);
    for transport in ["tcp", "quic", "shm", "auto"] {
        let report = replay(&place, &["--time-scale", "0.002", "--transport", transport]);
        let prefill = &report["prefill"];
        assert_eq!(prefill["prefill_us"]["count"], report["requests"], "{report:#}");
        // Of blocks that are computed in place of waiting there may be any number on a machine that others use.
        assert!(report["block_hits"].as_u64().unwrap() > 0, "{report:#}");
        assert!(report["verified_bytes"].as_u64().unwrap() > 0, "{report:#}");
        assert!(prefill["over_recompute"].as_f64().unwrap() > 0.0, "{report:#}");
        assert!(
            prefill["streamed_blocks"].as_u64().unwrap() > 0,
            "nothing left while it was computed: {report:#}"
        );
        assert_eq!(report["fetch_us"]["count"], 0, "no fetch is timed by itself: {report:#}");
    }
    assert!(replay(&place, &[])["prefill"].is_null(), "where compute takes no time, nothing is timed");
}

#[test]
fn a_node_that_dies_costs_no_request_and_no_right_byte() {
    let place = Place::new();
    place.trace(150);
    let report = replay(&place, &["--time-scale", "0.01", "--transport", "tcp", "--kill", "node:2@50%"]);
    assert_eq!(report["prefill"]["prefill_us"]["count"], report["requests"], "{report:#}");
    assert_eq!(report["kills"].as_array().map(Vec::len), Some(1), "{report:#}");
}
