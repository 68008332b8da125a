//! Probes and drain requests, as an orchestrator sends them: liveness, readiness, and drain before
//! a stop.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use kvfleet_errors_doc::says;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{CommandOutput, Workspace, until};

/// A cluster that is killed when its test ends.
struct RunningCluster(Child);

impl Drop for RunningCluster {
    fn drop(&mut self) {
        let _ = self.0.kill(); // The process may have exited already; its children follow it.
        let _ = self.0.wait();
    }
}

/// A cluster with drain listeners on its routers and nodes.
fn up(place: &Workspace) -> (RunningCluster, Value) {
    let free = ["router.process.drain_listen=127.0.0.1:0", "node.process.drain_listen=127.0.0.1:0"];
    let words = ["up", "--json", "--nodes", "2", "--instances", "1", "--dram", "8MiB"];
    let words = [&words[..], &["--set", free[0], "--set", free[1]]].concat();
    let mut child = place.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (RunningCluster(child), serde_json::from_str(&line).unwrap())
}

fn down(mut up: RunningCluster) {
    let child = &mut up.0;
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}

fn processes<'said>(said: &'said Value, role: &str) -> Vec<&'said Value> {
    let all = said["processes"].as_array().unwrap().iter();
    all.filter(|process| process["role"] == role).collect()
}

fn address<'said>(process: &'said Value, purpose: &str) -> &'said str {
    process["addresses"][purpose].as_str().unwrap_or_else(|| panic!("no {purpose} in {process:#}"))
}

fn probe(place: &Workspace, what: &str, process: &Value) -> CommandOutput {
    place.run(&["probe", what, "--address", address(process, "metrics")])
}

fn drain(place: &Workspace, process: &Value) -> CommandOutput {
    place.run(&["drain", "--address", address(process, "drain"), "--within", "20s", "--linger", "1ms"])
}

fn status(place: &Workspace, said: &Value) -> Value {
    let routers: Vec<_> =
        said["routers"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    let tls = said["tls_dir"].as_str().unwrap();
    let text = place.run(&["status", "--cluster", &routers.join(","), "--tls-dir", tls, "--json"]).ok();
    serde_json::from_str(&text).unwrap()
}

/// The leader of the control group, as the routers report it.
fn leader(status: &Value) -> u64 {
    let lines = status["routers"].as_array().unwrap().iter();
    lines.map(|router| router["leader"].as_u64().unwrap()).max().unwrap()
}

#[test]
fn a_draining_router_hands_over_and_is_unready() {
    let place = Workspace::new();
    let (child, said) = up(&place);
    for process in said["processes"].as_array().unwrap() {
        assert!(probe(&place, "live", process).ok().contains("ok"));
        until("every process is ready", || probe(&place, "ready", process).code == Some(0));
    }
    until("a leader is elected", || leader(&status(&place, &said)) > 0);
    let old = leader(&status(&place, &said));
    let routers = processes(&said, "router");
    let of = |number: u64| *routers.iter().find(|process| process["number"] == number).unwrap();
    assert!(drain(&place, of(old)).ok().contains("leads nothing"));
    let ran = probe(&place, "ready", of(old));
    assert_eq!(ran.code, Some(2), "{}", ran.all());
    says("a probe of a router that drains", &ran.refused(&[]), &[]);
    probe(&place, "live", of(old)).ok();
    // The drained router is not elected again, and the others are ready under the new leader.
    until("another router leads", || ![0, old].contains(&leader(&status(&place, &said))));
    for other in routers.iter().filter(|process| process["number"] != old) {
        until("the others are ready", || probe(&place, "ready", other).code == Some(0));
    }
    assert!(drain(&place, of(old)).ok().contains("leads nothing"), "drain is idempotent");
    down(child);
}

#[test]
fn a_draining_node_leaves_the_cluster() {
    let place = Workspace::new();
    let (child, said) = up(&place);
    let nodes = processes(&said, "node");
    for node in &nodes {
        until("every node is ready", || probe(&place, "ready", node).code == Some(0));
    }
    let listed = || status(&place, &said)["nodes"].as_array().unwrap().clone();
    assert_eq!(listed().len(), 2);
    let said = drain(&place, nodes[0]).ok();
    assert!(said.contains("has left") && said.contains("are left behind"), "{said}");
    let number = nodes[0]["number"].as_u64().unwrap();
    let gone = |line: &Value| line["node"].as_u64() != Some(number);
    until("no router lists it", || listed().len() == 1 && listed().iter().all(gone));
    assert_eq!(probe(&place, "ready", nodes[0]).code, Some(2));
    probe(&place, "live", nodes[0]).ok();
    probe(&place, "ready", nodes[1]).ok();
    down(child);
}

/// Manifests with commands for the orchestrator, each with its process configuration.
const MANIFESTS: [(&str, &str, &str); 2] = [
    (
        "router",
        include_str!("../../../deploy/base/routers.yaml"),
        include_str!("../../../deploy/base/router.toml"),
    ),
    ("node", include_str!("../../../deploy/base/nodes.yaml"), include_str!("../../../deploy/base/node.toml")),
];

/// The commands in a manifest with their purposes.
fn commands(manifest: &str) -> Vec<(&str, Vec<&str>)> {
    let (mut found, mut what) = (Vec::new(), "");
    for line in manifest.lines().map(str::trim) {
        let hook = line.strip_suffix(':').filter(|key| key.ends_with("Probe") || *key == "preStop");
        what = hook.unwrap_or(what);
        if let Some(words) = line.strip_prefix("command: [").and_then(|rest| rest.strip_suffix(']')) {
            found.push((what, words.split(',').map(|word| word.trim().trim_matches('"')).collect()));
        }
    }
    found
}

/// Runs a manifest's command against a local process with other ports. `--linger` is 1 ms because
/// no endpoint removal has to spread here.
fn run_manifest_command(place: &Workspace, command: &[&str], config: &str, process: &Value) -> CommandOutput {
    let config: toml::Table = config.parse().unwrap();
    let port = |address: &str| address.rsplit_once(':').unwrap().1.parse::<u16>().unwrap();
    let purpose_of = |given: &str| {
        let found = config["process"].as_table().unwrap().iter().find_map(|(key, value)| {
            let purpose = key.strip_suffix("_listen")?;
            (port(value.as_str().unwrap()) == port(given)).then(|| purpose.to_owned())
        });
        found.unwrap_or_else(|| panic!("the configuration has no listener at {given}"))
    };
    assert_eq!(command[0], "/usr/local/bin/kvfleet");
    let mut words: Vec<String> = command[1..].iter().map(|word| (*word).to_owned()).collect();
    for at in 1..words.len() {
        match words[at - 1].as_str() {
            "--address" => words[at] = address(process, &purpose_of(&words[at])).to_owned(),
            "--linger" => words[at] = "1ms".to_owned(),
            _ => {}
        }
    }
    place.run(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn manifest_commands_probe_and_drain() {
    let place = Workspace::new();
    let (child, said) = up(&place);
    for (role, manifest, config) in MANIFESTS {
        let commands = commands(manifest);
        let names: Vec<_> = commands.iter().map(|(what, _)| *what).collect();
        assert_eq!(names, ["startupProbe", "livenessProbe", "readinessProbe", "preStop"], "of {role}");
        let process = processes(&said, role)[0];
        let asks = |at: usize| run_manifest_command(&place, &commands[at].1, config, process);
        let [startup, live, ready, drain] = [0, 1, 2, 3];
        until("the process is ready", || asks(ready).code == Some(0));
        assert!(asks(startup).ok().contains("ok") && asks(live).ok().contains("ok"));
        let drained = asks(drain).ok();
        let what = if role == "router" { "leads nothing" } else { "has left" };
        assert!(drained.contains(what), "{drained}");
        // A draining process gets no more work and is not restarted for that.
        assert_eq!(asks(ready).code, Some(2));
        asks(live).ok();
    }
    down(child);
}

#[test]
fn no_listener_is_no_answer() {
    let place = Workspace::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let ran = place.run(&["probe", "ready", "--address", &closed]);
    assert_eq!(ran.code, Some(1), "{}", ran.all());
    says("a probe of nobody", &ran.refused(&[]), &[&closed]);
    let ran = place.run(&["drain", "--address", &closed]);
    assert_eq!(ran.code, Some(1), "{}", ran.all());
}

#[test]
fn a_foreign_answer_is_an_error() {
    let place = Workspace::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        stream.write_all(b"\xff\xfe what?\r\n\r\n").unwrap();
    });
    let ran = place.run(&["probe", "live", "--address", &address]);
    says("a probe of something else", &ran.refused(&[]), &[&address]);
    other.join().unwrap();
}

#[test]
fn check_validates_without_starting() {
    let place = Workspace::new();
    let valid = "data_dir = \"d\"\n[[voters]]\nid = 2\naddress = \"r:1\"\n[tls]\nca = \"a\"\ncert = \
        \"b\"\nkey = \"c\"\n";
    std::fs::write(place.path("router.toml"), valid).unwrap();
    let check = ["router", "--check", "--config", "router.toml", "--id-from-ordinal"];
    let said = place.run(&[&check[..], &["kvfleet-router-1"]].concat()).ok();
    assert_eq!(said.trim(), "router 2: the configuration is valid");
    assert!(!place.path("d").exists(), "the check created the data directory");
    place.run(&[&check[..], &["kvfleet-router-2"]].concat()).refused(&["voters", "id 3"]);
    let ran = place.run(&[&check[..], &["kvfleet"]].concat());
    says("a router's name without a number", &ran.refused(&[]), &[]);
    let said = place.run(&["node", "--check", "--id-from-host", "worker-0"]).ok();
    assert_eq!(said.trim(), "node 1493537201: the configuration is valid");
    let said = place.run(&["instance", "--check", "--set", "routers=[\"r:1\"]"]).ok();
    assert!(said.contains("instance 1"), "{said}");
}

#[test]
fn drain_listens_on_loopback_only() {
    let place = Workspace::new();
    let ran = place.run(&["node", "--check", "--drain-listen", "0.0.0.0:7419"]);
    says("draining for everybody", &ran.refused(&[]), &[]);
    place.run(&["node", "--check", "--drain-listen", "here"]).refused(&["process.drain_listen"]);
    for fine in ["127.0.0.1:7419", "[::1]:7419", ""] {
        place.run(&["node", "--check", "--drain-listen", fine]).ok();
    }
}
