//! Error messages for invalid input: each names the fault, its place and the remedy.

use std::net::TcpListener;

use kv_core::id::{InstanceId, NodeId};
use kvfleet_errors_doc::says;
use kvfleet_net::certificates::Authority;
use kvfleet_net::tls::Role;

use crate::support::Workspace;

#[test]
fn unknown_keys_suggest_the_nearest_for_every_process() {
    let place = Workspace::new();
    let cases = [
        ("router", "votres", "voters"),
        ("node", "dram_byte", "dram_bytes"),
        ("instance", "routres", "routers"),
    ];
    for (role, key, nearest) in cases {
        let file = format!("{role}.toml");
        std::fs::write(place.path(&file), format!("{key} = 1\n")).unwrap();
        place.run(&[role, "--config", &file]).refused(&[&file, key, "nearest valid key", nearest]);
    }
    let ran = place.run(&["node", "--config", "node.toml"]);
    says("an unknown key, from a process", &ran.refused(&[]), &[]);
}

#[test]
fn invalid_values_name_the_expected_ones() {
    let place = Workspace::new();
    place.run(&["node", "--set", "block_bytes=lots"]).refused(&[
        "flag --set",
        "block_bytes",
        "a whole number",
    ]);
    place.run(&["node", "--set", "policy=magic"]).refused(&["policy", "magic", "lru"]);
    place.run(&["router", "--config", "nowhere.toml"]).refused(&["cannot read nowhere.toml"]);
    place.run(&["instance"]).refused(&["routers is empty"]);
}

#[test]
fn data_directories_for_all_users_are_refused() {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    let place = Workspace::new();
    let files = Authority::open(&place.path("ours")).unwrap().issue(&Role::Node(Some(NodeId(1)))).unwrap();
    let data_dir = place.path("data");
    std::fs::DirBuilder::new().mode(0o700).create(&data_dir).unwrap();
    let set = |key: &str, path: &std::path::Path| format!("{key}={}", path.display());
    let [ca, cert, key] = [("tls.ca", &files.ca), ("tls.cert", &files.cert), ("tls.key", &files.key)]
        .map(|(key, path)| set(key, path));
    let data = set("data_dir", &data_dir);
    let node = || {
        place.run(&[
            "node",
            "--check",
            "--set",
            &ca,
            "--set",
            &cert,
            "--set",
            &key,
            "--set",
            &data,
            "--set",
            "routers=[\"a:1\"]",
        ])
    };
    node().ok();
    for mode in [0o755, 0o701] {
        std::fs::set_permissions(&data_dir, std::fs::Permissions::from_mode(mode)).unwrap();
        node().refused(&["open to all users", "chmod o-rwx"]);
    }
}

#[test]
fn names_missing_and_foreign_certificates() {
    let place = Workspace::new();
    let files = Authority::open(&place.path("ours")).unwrap().issue(&Role::Node(Some(NodeId(1)))).unwrap();
    let theirs = Authority::open(&place.path("theirs")).unwrap().issue(&Role::Node(Some(NodeId(1)))).unwrap();
    let node = |ca: &std::path::Path, cert: &std::path::Path| {
        let set = |key: &str, path: &std::path::Path| format!("tls.{key}={}", path.display());
        let (ca, cert, key) = (set("ca", ca), set("cert", cert), set("key", &files.key));
        place.run(&[
            "node",
            "--set",
            &ca,
            "--set",
            &cert,
            "--set",
            &key,
            "--set",
            "dram_bytes=1048576",
            "--set",
            "block_bytes=4096",
        ])
    };
    node(&place.path("absent.pem"), &files.cert).refused(&["absent.pem", "cannot read"]);
    node(&theirs.ca, &files.cert).refused(&["not accepted under authority"]);
    node(&files.ca, &theirs.cert).refused(&["node-1"]);
}

#[test]
fn refuses_or_skips_malformed_trace_lines() {
    let place = Workspace::new();
    place.trace(5);
    let mut text = std::fs::read_to_string(place.path("trace.jsonl")).unwrap();
    text.push_str("{\"timestamp\": \"soon\"}\n");
    std::fs::write(place.path("bad.jsonl"), &text).unwrap();
    place.run(&["replay", "bad.jsonl"]).refused(&["bad.jsonl", "line 6", "timestamp"]);
    place.run(&["trace", "stats", "bad.jsonl"]).refused(&["bad.jsonl", "line 6"]);
    says("a bad line, from a command", &place.run(&["trace", "stats", "bad.jsonl"]).refused(&[]), &[]);
    text.push_str("nonsense\n{\"timestamp\": 9");
    std::fs::write(place.path("bad.jsonl"), &text).unwrap();
    let said = place.run(&["trace", "stats", "bad.jsonl", "--lenient"]).ok();
    let skipped = said.lines().find(|line| line.contains("skipped")).unwrap_or_default();
    says("bad lines, with --lenient", &skipped, &[]);
    place.run(&["replay", "nowhere.jsonl"]).refused(&["cannot read nowhere.jsonl"]);
}

#[test]
fn refuses_impossible_arguments_before_starting() {
    let place = Workspace::new();
    place.trace(5);
    let refused =
        |words: &[&str]| place.run(&[&["replay", "trace.jsonl"], words].concat()).refused(&[]).to_owned();
    says("a fault on a node that is not there", &refused(&["--kill", "node:9@50%"]), &[]);
    says("a fault without its moment, from `replay`", &refused(&["--kill", "node:1"]), &[]);
    says("a size that is none", &refused(&["--dram", "some"]), &[]);
    says("less DRAM than a block", &refused(&["--dram", "1%", "--nodes", "64"]), &[]);
    says("a policy that is none", &refused(&["--policy", "magic"]), &[]);
    says("a replay of no request", &refused(&["--limit", "0"]), &[]);
    says("a speed that is none", &refused(&["--speed", "soon"]), &[]);
    says("a pace that no clock counts", &refused(&["--speed", "1e-300x"]), &[]);
    says("blocks of no tokens, from `replay`", &refused(&["--block-tokens", "0"]), &[]);
    let unwritable = refused(&["--report", "trace.jsonl/report"]);
    says("a report folder that cannot be written", &unwritable, &[]);
    says("a cluster without its certificates", &refused(&["--cluster", "127.0.0.1:1"]), &[]);
    let foreign = refused(&["--cluster", "127.0.0.1:1", "--kill", "node:1@1%"]);
    says("a fault on somebody else's cluster", &foreign, &[]);
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn names_a_taken_port() {
    let place = Workspace::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    place
        .run(&["up", "--base-port", &port])
        .refused(&[&format!("port {port} of router 1 is in use"), "--base-port"]);
    let address = format!("127.0.0.1:{port}");
    let ran = place.run(&["node", "--metrics-listen", &address]);
    says("a port in use, of the metrics", &ran.refused(&[]), &[&port]);
    let files =
        Authority::open(&place.path("tls")).unwrap().issue(&Role::Instance(Some(InstanceId(1)))).unwrap();
    let keys = [
        format!("listen={address}"),
        "routers=[\"127.0.0.1:1\"]".to_owned(),
        format!("identity={}", "07".repeat(16)),
        format!("tls.ca={}", files.ca.display()),
        format!("tls.cert={}", files.cert.display()),
        format!("tls.key={}", files.key.display()),
    ];
    let words: Vec<&str> =
        std::iter::once("instance").chain(keys.iter().flat_map(|key| ["--set", key.as_str()])).collect();
    says("a port in use, of an instance", &place.run(&words).refused(&[]), &[&port]);
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn reports_an_unreachable_cluster() {
    let place = Workspace::new();
    Authority::open(&place.path("tls")).unwrap().issue(&Role::Admin).unwrap();
    let ran = place.run(&["status", "--cluster", "127.0.0.1:9", "--tls-dir", "tls"]);
    says("a router that does not run", &ran.refused(&[]), &[]);
    place.trace(5);
    let words = ["replay", "trace.jsonl", "--cluster", "127.0.0.1:9,127.0.0.1:10", "--tls-dir", "tls"];
    let begun = std::time::Instant::now();
    says("a replay on a cluster of which no router answers", &place.run(&words).refused(&[]), &[]);
    assert!(begun.elapsed() < std::time::Duration::from_secs(30), "no request is attempted first");
    says("no cluster named", &place.run(&["status"]).refused(&[]), &[]);
    let ran = place.run(&["status", "--cluster", "127.0.0.1:9", "--tls-dir", "nowhere"]);
    says("a directory without certificates", &ran.refused(&[]), &[]);
}

#[test]
fn replays_ignore_the_environment_cluster() {
    let place = Workspace::new();
    place.trace(5);
    let elsewhere = ("KVFLEET_CLUSTER", "127.0.0.1:9");
    let words = ["replay", "trace.jsonl", "--kill", "node:9@50%"];
    place.run_with(elsewhere, &words).refused(&["there is no node 9"]);
    let demo = ["demo", "--requests", "20", "--report", "report", "--quiet"];
    assert!(place.run_with(elsewhere, &demo).ok().contains("20 of 20 ended"));
}

#[test]
fn help_explains_exit_statuses() {
    let place = Workspace::new();
    for words in [&["--help"][..], &["replay", "--help"], &["demo", "--help"]] {
        let said = place.run(words).ok();
        assert!(said.contains("Exit status") && said.contains("130"), "{said}");
    }
}
