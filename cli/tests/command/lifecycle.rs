//! Starting, inspecting and interrupting a cluster: no process or directory may remain.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kv_core::id::{InstanceId, NodeId};
use kvfleet_errors_doc::says;
use kvfleet_net::certificates::Authority;
use kvfleet_net::tls::{Role, TlsFiles};
use kvfleet_proto::pb;
use kvfleet_proto::pb::instance_client::InstanceClient;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::support::{CommandOutput, Workspace, read_first_line, until};

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id().cast_signed()).unwrap(), signal).unwrap();
}

fn assert_nothing_left(place: &Workspace) {
    until("every process has exited", || place.processes().is_empty());
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
}

/// Starts `kvfleet up --json` and returns its first line.
fn up(place: &Workspace) -> (Child, Value) {
    up_with(place, &[])
}

fn up_with(place: &Workspace, more: &[&str]) -> (Child, Value) {
    let words = ["up", "--json", "--nodes", "2", "--instances", "2", "--dram", "8MiB", "--ssd", "8MiB"];
    let mut child = place.command(&[&words[..], more].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let said = read_first_line(&mut child);
    (child, said)
}

#[test]
fn up_serves_until_stopped() {
    let place = Workspace::new();
    let (mut child, said) = up_with(&place, &["--tenant", "3"]);
    let routers: Vec<_> = said["routers"].as_array().unwrap().iter().map(|r| r.as_str().unwrap()).collect();
    let tls = said["tls_dir"].as_str().unwrap();
    let cluster = routers[0];
    let status = place.run(&["status", "--cluster", cluster, "--tls-dir", tls, "--json"]).ok();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(
        status["routers"].as_array().unwrap().len(),
        3,
        "one address suffices to see all routers: {status:#}"
    );
    assert_eq!(status["nodes"].as_array().unwrap().len(), 2, "{status:#}");
    assert_eq!(status["instances"].as_array().unwrap().len(), 2, "{status:#}");
    let text = place.run(&["status", "--cluster", cluster, "--tls-dir", tls]).ok();
    assert!(text.contains("leads") && text.contains("live"), "{text}");
    administer(&place, &routers.join(","), tls);
    inspect(&place, &routers.join(","), tls);
    Authority::open(&place.path("theirs")).unwrap().issue(&Role::Admin).unwrap();
    let foreign = place.run(&["status", "--cluster", cluster, "--tls-dir", "theirs"]);
    says("a command with certificates of another cluster", &foreign.refused(&[]), &[cluster]);
    says("a status with a tenant's certificate", &as_tenant(&place, &said).refused(&[]), &[cluster]);
    signal(&child, Signal::TERM);
    assert!(child.wait().unwrap().success());
    assert_nothing_left(&place);
}

/// A status command with a tenant's certificate from `up`; an instance accepts the same
/// certificate.
fn as_tenant(place: &Workspace, said: &Value) -> CommandOutput {
    let certificate = Path::new(said["tenants"][0].as_str().unwrap());
    let (from, to) = (certificate.parent().unwrap(), place.path("tenant"));
    std::fs::create_dir(&to).unwrap();
    for (name, as_name) in
        [("ca.pem", "ca.pem"), ("tenant-3.pem", "admin.pem"), ("tenant-3.key", "admin.key")]
    {
        std::fs::copy(from.join(name), to.join(as_name)).unwrap();
    }
    let files = TlsFiles { ca: to.join("ca.pem"), cert: to.join("admin.pem"), key: to.join("admin.key") };
    let processes = said["processes"].as_array().unwrap();
    let instance = processes.iter().find(|process| process["role"] == "instance").unwrap();
    let address = instance["addresses"]["grpc"].as_str().unwrap();
    tokio::runtime::Runtime::new().unwrap().block_on(assert_tenant_rights(address, &files));
    let cluster = said["routers"][0].as_str().unwrap();
    place.run(&["status", "--cluster", cluster, "--tls-dir", "tenant"])
}

/// An instance runs requests of the caller's own tenant only. This request fails for lack of a
/// prompt.
async fn assert_tenant_rights(address: &str, files: &TlsFiles) {
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    let endpoint = endpoint.tls_config(files.load().unwrap().client_tls()).unwrap();
    let mut instance = InstanceClient::new(endpoint.connect().await.unwrap());
    let mut run = async |tenant| {
        let request = pb::RunRequest { tenant, ..Default::default() };
        instance.run(request).await.unwrap_err().code()
    };
    assert_eq!((run(3).await, run(4).await), (Code::InvalidArgument, Code::PermissionDenied));
    let status = instance.instance_status(pb::InstanceStatusRequest::default()).await;
    assert_eq!(status.unwrap_err().code(), Code::PermissionDenied);
}

/// Pins and quotas succeed through any router.
fn administer(place: &Workspace, cluster: &str, tls: &str) {
    let reach = ["--cluster", cluster, "--tls-dir", tls];
    let hash = "00".repeat(19);
    let pin = ["pin", "--pin", "7", "--owner", "me", hash.as_str()];
    assert!(place.run(&[&pin[..], &reach].concat()).ok().contains("pin 7 holds 1 blocks"));
    let soft = ["pin", "--pin", "8", "--owner", "me", "--soft", "--for", "600s", hash.as_str()];
    assert!(place.run(&[&soft[..], &reach].concat()).ok().contains("pin 8 softly holds 1 blocks for 600 s"));
    let status = place.run(&[&["status"][..], &reach].concat()).ok();
    assert!(status.contains("2 pins: 1 hard, 1 soft; the next ends in "), "{status}");
    let other = ["unpin", "--pin", "7", "--owner", "somebody"];
    let ran = place.run(&[&other[..], &reach].concat());
    says("a pin of somebody else", &ran.refused(&[]), &[]);
    let unpin = ["unpin", "--pin", "7", "--owner", "me"];
    assert!(place.run(&[&unpin[..], &reach].concat()).ok().contains("is ended"));
    let quota = ["quota", "--tenant", "3", "--bytes", "1MiB"];
    assert!(place.run(&[&quota[..], &reach].concat()).ok().contains("1048576 bytes"));
}

/// A node is found by its number through any router that knows it.
fn inspect(place: &Workspace, cluster: &str, tls: &str) {
    let inspect = |words: &[&str]| {
        let all = [&["node", "inspect", "--cluster", cluster, "--tls-dir", tls], words].concat();
        place.run(&all)
    };
    let json: Value = serde_json::from_str(&inspect(&["2", "--json"]).ok()).unwrap();
    assert_eq!(json["node"], 2, "{json:#}");
    assert_eq!(json["tiers"].as_array().unwrap().len(), 2, "{json:#}");
    let text = inspect(&["1"]).ok();
    assert!(text.contains("node 1 in epoch") && text.contains("dram"), "{text}");
    says("a node that is not there", &inspect(&["7"]).refused(&[]), &[]);
}

#[test]
fn every_process_shows_metrics() {
    let place = Workspace::new();
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
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_closed_terminal_stops_everything() {
    let place = Workspace::new();
    let (mut child, _) = up(&place);
    signal(&child, Signal::HUP);
    assert!(child.wait().unwrap().success());
    assert_nothing_left(&place);
}

#[test]
fn a_second_ctrl_c_stops_at_once() {
    let place = Workspace::new();
    let (mut child, _) = up(&place);
    // A stopped node cannot react to SIGTERM and delays the orderly shutdown.
    let node = Pid::from_raw(place.pid_of("node-1").unwrap()).unwrap();
    kill_process(node, Signal::STOP).unwrap();
    signal(&child, Signal::INT);
    until("the orderly shutdown has begun", || place.pid_of("instance-1").is_none());
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_nothing_left(&place);
}

/// `O_NONBLOCK` on Linux: open without waiting for the other end.
const O_NONBLOCK: i32 = 0o4000;

#[test]
fn a_hanging_start_ends_with_its_parent() {
    let place = Workspace::new();
    // A certificate pipe without a writer: reading it blocks.
    let pipe = place.path("ca.pem");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let files =
        Authority::open(&place.path("tls")).unwrap().issue(&Role::Instance(Some(InstanceId(1)))).unwrap();
    let set = |key: &str, path: &Path| format!("tls.{key}={}", path.display());
    let words = [
        "instance".to_owned(),
        "--follow-parent".to_owned(),
        "--set=routers=[\"127.0.0.1:9\"]".to_owned(),
        format!("--set=identity={}", "ab".repeat(16)),
        format!("--set={}", set("ca", &pipe)),
        format!("--set={}", set("cert", &files.cert)),
        format!("--set={}", set("key", &files.key)),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut child = place.command(&words).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut writer = None;
    until("the process reads the certificate", || {
        // Fails while there is no reader.
        writer = File::options().write(true).custom_flags(O_NONBLOCK).open(&pipe).ok();
        writer.is_some()
    });
    drop(child.stdin.take());
    until("the process has exited", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(1), "terminated by force");
}

/// Replaces every identity in the text by an ellipsis.
fn mask_identities(text: &str) -> String {
    let is_identity = |word: &str| word.len() == 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let shown = |word: &str| {
        if is_identity(word.trim_end_matches([':', ';'])) { "…".to_owned() } else { word.to_owned() }
    };
    text.split(' ').map(shown).collect::<Vec<_>>().join(" ")
}

#[test]
fn replay_explains_a_block_size_mismatch() {
    let place = Workspace::new();
    place.trace(20);
    let (mut child, said) = up_with(&place, &["--block-tokens", "16"]);
    let routers: Vec<_> = said["routers"].as_array().unwrap().iter().map(|r| r.as_str().unwrap()).collect();
    let (routers, tls) = (routers.join(","), said["tls_dir"].as_str().unwrap());
    let words = ["replay", "trace.jsonl", "--quiet", "--cluster", &routers, "--tls-dir", tls];
    let varying: Vec<&str> = routers.split(',').collect();
    let refused = place.run(&words);
    let message = mask_identities(refused.refused(&[]));
    says("a replay with blocks of another size than the cluster's", &message, &varying);
    let theirs = [&words[..], &["--block-tokens", "16", "--profile", "h100-8b"]].concat();
    let text = place.run(&theirs).ok();
    assert!(
        text.contains("modelled under profile laptop-emulated"),
        "the instances' own profile is used: {text}"
    );
    let strangers = Authority::open(&place.path("strangers")).unwrap();
    strangers.issue(&Role::Admin).unwrap();
    let strange = place.path("strangers");
    let words = ["replay", "trace.jsonl", "--cluster", &routers, "--tls-dir", strange.to_str().unwrap()];
    says("a replay with certificates of another cluster", &place.run(&words).refused(&[]), &varying);
    signal(&child, Signal::TERM);
    assert!(child.wait().unwrap().success());
}

#[test]
fn children_do_not_outlive_a_killed_parent() {
    let place = Workspace::new();
    let (mut child, _) = up(&place);
    assert!(!place.processes().is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    until("every process has exited", || place.processes().is_empty());
}

/// Arguments to run a single node.
fn node_arguments(place: &Workspace) -> Vec<String> {
    let files = Authority::open(&place.path("tls")).unwrap().issue(&Role::Node(Some(NodeId(1)))).unwrap();
    let keys = [
        format!("tls.ca={}", files.ca.display()),
        format!("tls.cert={}", files.cert.display()),
        format!("tls.key={}", files.key.display()),
        "dram_bytes=1048576".to_owned(),
        "block_bytes=4096".to_owned(),
    ];
    std::iter::once("node".to_owned()).chain(keys.into_iter().map(|key| format!("--set={key}"))).collect()
}

/// Starts a command and waits until it is ready.
fn start_ready(command: &mut Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("READY "), "{line}");
    child
}

#[test]
fn raises_the_limit_of_open_files() {
    let place = Workspace::new();
    let words = node_arguments(&place);
    let node = place.command(&words.iter().map(String::as_str).collect::<Vec<_>>());
    // A shell lowers its limits and then becomes the node.
    let mut command = place.command_of("sh");
    command.args(["-c", "ulimit -Sn 200 && ulimit -Hn 900 && exec \"$0\" \"$@\""]);
    let mut child = start_ready(command.arg(node.get_program()).args(node.get_args()));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = files.split_whitespace().filter(|word| word.parse::<u64>().is_ok()).collect();
    assert_eq!(numbers, ["900", "900"]);
    signal(&child, Signal::INT);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_process_stops_at_ctrl_c() {
    let place = Workspace::new();
    let words = node_arguments(&place);
    let mut child = start_ready(&mut place.command(&words.iter().map(String::as_str).collect::<Vec<_>>()));
    signal(&child, Signal::INT);
    assert!(child.wait().unwrap().success());
    let mut log = String::new();
    child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let line = log.lines().find(|line| line.contains("stopping")).unwrap_or(&log);
    // The timestamp precedes the message.
    says("Ctrl-C on a process that serves", &line.split_once(' ').unwrap_or_default().1, &[]);
}

/// Interrupts a long replay once `is_time` returns true, and returns its output.
fn interrupted_replay(is_time: impl Fn(&Workspace) -> bool) -> (Workspace, CommandOutput) {
    let place = Workspace::new();
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
    let child = place.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("the moment of the interrupt", || is_time(&place));
    signal(&child, Signal::INT);
    let ran = CommandOutput::of(&child.wait_with_output().unwrap());
    (place, ran)
}

/// The requests row of the final table, and its parts that vary between runs.
fn requests_row(ran: &CommandOutput) -> (&str, [String; 2]) {
    let row = ran.out.lines().find(|line| line.trim_start().starts_with("requests"));
    let row = row.unwrap_or_else(|| panic!("no table: {}", ran.all())).trim();
    let (ended, times) = row.split_once(" ended in ").unwrap_or((row, ""));
    let ended = ended.trim_start_matches("requests").trim();
    let times = times.split(", ").next().unwrap_or_default();
    (row, [ended.to_owned(), times.to_owned()])
}

#[test]
fn ctrl_c_during_a_replay_reports_and_cleans_up() {
    // The last instance has written its log: the cluster is serving or about to.
    let (place, ran) = interrupted_replay(|place| {
        let clusters = place.leftovers();
        clusters.iter().any(|dir| dir.join("logs/instance-3.log").metadata().is_ok_and(|log| log.len() > 0))
    });
    assert_eq!(ran.code, Some(2), "an interrupted replay must fail: {}", ran.all());
    says("Ctrl-C during a replay, at once", &ran.err, &[]);
    let (row, varying) = requests_row(&ran);
    says("Ctrl-C during a replay, in its report", &row, &varying.each_ref().map(String::as_str));
    assert_nothing_left(&place);
    let report = std::fs::read_to_string(place.path("report/report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["interrupted"], true);
}

#[test]
fn ctrl_c_during_the_start_cleans_up() {
    let (place, ran) = interrupted_replay(|place| !place.leftovers().is_empty());
    assert_nothing_left(&place);
    let (row, varying) = requests_row(&ran);
    says("Ctrl-C while a replay starts its cluster", &row, &varying.each_ref().map(String::as_str));
}
