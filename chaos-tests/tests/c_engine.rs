//! The C example engine and four more C programs, compiled and run against a router and a node in
//! this process. The others cancel fetches, save by layer, prefill while loading, and report by
//! themselves.
//!
//! Not here: arguments that the interface refuses (`client/c/tests/hostile/main.rs`), and the
//! consistency of header and library (`client/c/tests/header.rs`).
#![allow(clippy::unwrap_used)]

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use chaos_tests::waiting::until;
use kv_core::id::{NodeId, RouterId};
use kvfleet_client::{Client, ClientConfig};
use kvfleet_net::tls::{Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_router::{Router, RouterConfig, VoterConfig};
use kvfleet_testkit::certificates::Certificates;
use kvfleet_testkit::ports::unused_address;
use prometheus::Registry;

/// Bytes of a layer's slice; the example's model has 32 layers.
const SLICE_BYTES: u64 = 1024;
const LAYERS: u64 = 32;

/// Rounds of eight cancelled fetches: a second or two.
const CANCEL_ROUNDS: u32 = 150;

async fn router(place: &Path, files: &Certificates) -> (Router, String) {
    let address = unused_address();
    let config = RouterConfig {
        id: 1,
        listen: address.clone(),
        voters: vec![VoterConfig { id: 1, address: address.clone() }],
        data_dir: place.join("router"),
        tls: files.config(&Role::Router(Some(RouterId(1)))),
        shards: 1,
        ..RouterConfig::default()
    };
    (Router::start(config, &Registry::new()).await.unwrap(), address)
}

async fn node(place: &Path, files: &Certificates, router: &str) -> Node {
    let TlsFiles { ca, cert, key } = files.files(&Role::Node(Some(NodeId(7))));
    let config = NodeConfig {
        id: 7,
        instance: Some(1),
        routers: vec![router.to_owned()],
        data_dir: place.join("node"),
        dram_blocks: Some(64),
        block_bytes: SLICE_BYTES * LAYERS,
        tls: TlsSection { ca, cert, key },
        ..NodeConfig::default()
    };
    Node::start(config, &Registry::new()).await.unwrap()
}

/// Reports an instance with its own node, so that routers send requests to it.
async fn report_until_ended(client: Client) {
    let mut report = pb::ReportRequest {
        instance: 1,
        address: "127.0.0.1:9".to_owned(),
        host: "localhost".to_owned(),
        node: 7,
        has_node: true,
        started_us: 1,
        ..pb::ReportRequest::default()
    };
    let mut due = tokio::time::interval(Duration::from_millis(100));
    loop {
        due.tick().await;
        report.sequence += 1;
        client.report(&report).await;
    }
}

/// Compiles a program of `client/c`, linked with the library built beside this test.
fn program(place: &Path, source: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let libraries = here.parent().unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client/c");
    let program = place.join(Path::new(source).file_stem().unwrap());
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-g"]);
    compiler.arg("-I").arg(folder.join("include")).arg(folder.join(source));
    compiler.arg("-L").arg(libraries).arg("-lkvfleet_client_c");
    compiler.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-o").arg(&program);
    let built = compiler.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

/// Runs a program until it succeeds. Returns its output.
async fn run(program: PathBuf, words: Vec<OsString>) -> String {
    let ran = tokio::task::spawn_blocking(move || Command::new(program).args(words).output().unwrap());
    let ran = ran.await.unwrap();
    let (said, complained) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}{complained}");
    said.into_owned()
}

/// Runs `prefill.c` beside a node that accepts connections and never answers.
async fn check_prefill(program: PathBuf, words: &[OsString]) {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let said = run(program, [words, &[address.into()]].concat()).await;
    let expected = "held: computed 0 of 4 blocks in 0 cells\nheld by nobody: computed 4 of 4 blocks in 128 cells\n\
        half of it silent: that half is computed\n";
    assert_eq!(said, expected);
}

/// The router's record of a request.
async fn explain(address: &str, files: &Certificates, request: u64) -> pb::WhyReply {
    let mut router = RouterClient::new(files.callers(address));
    router.why(pb::WhyRequest { request }).await.unwrap().into_inner()
}

/// Runs `reports.c` and checks the router's view of it: load, link, request outcome, and leave.
async fn check_reporting_engine(
    program: PathBuf,
    (words, files): (&[OsString], &Certificates),
    client: &Client,
) {
    let mut child =
        Command::new(program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let instance = || async {
        let instances = client.status().await.ok()?.instances;
        Some(instances.into_iter().find(|one| one.instance == 2))
    };
    let heard = until("its load", || async { instance().await?.filter(|one| one.queue_tokens == 77) }).await;
    assert_eq!((heard.running, heard.has_node, &*heard.address), (1, false, "127.0.0.1:9"));
    // Its reads count by node, path and tier, as remote reads: it has no node of its own.
    let link = until("its link", || async {
        let links = client.status().await.ok()?.links;
        links.into_iter().find(|link| (link.node, link.own, link.path, link.tier) == (7, false, 4, 2))
    })
    .await;
    assert!(link.bytes_per_s > 0, "{link:?}");
    let mut said = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    while !said.ends_with("done\n") {
        assert!(lines.read_line(&mut said).unwrap() > 0, "{said}");
    }
    let expected = "to decode: rejected and ok, with its time\n\
        1 link: 40 fetches from node 7 over 4 out of 2\n0 links of what was fetched ahead\n\
        path 4, with its reason, more bytes than the blocks have\ndone\n";
    assert_eq!(said, expected);
    let address = words[0].to_str().unwrap();
    let story = until("the end of its request", || async {
        let story = explain(address, files, 3).await;
        (story.output_tokens > 0).then_some(story)
    })
    .await;
    assert_eq!((story.instance, story.hit_blocks, story.ttft_us), (2, 4, 5_000), "{story:?}");
    assert_eq!((story.output_tokens, story.tbt_us), (9, 7_000), "{story:?}");
    drop(child.stdin.take());
    let ended = tokio::task::spawn_blocking(move || child.wait().unwrap()).await.unwrap();
    assert!(ended.success(), "{ended}");
    until("its goodbye", || async { instance().await?.is_none().then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c_engine_reads_back_its_bytes_and_owns_finished_memory() {
    // Referenced, so that the library is built for linking.
    assert_eq!(kvfleet_client_c::entry::kvf_abi_version(), kvfleet_client_c::abi::ABI_VERSION);
    let place = tempfile::tempdir().unwrap();
    let files = Certificates::open(place.path());
    let (router, address) = router(place.path(), &files).await;
    let node = node(place.path(), &files, &address).await;
    let client =
        |role: Role| Client::new(ClientConfig::new(vec![address.clone()], files.identity(&role))).unwrap();
    let (client, engine) = (client(Role::Admin), client(Role::Instance(None)));
    let reports = tokio::spawn(report_until_ended(engine.clone()));
    until("the router knows the node and the instance", || async {
        let status = client.status().await.ok()?;
        (status.nodes.iter().any(|node| node.live) && !status.instances.is_empty()).then_some(())
    })
    .await;
    let tls = files.files(&Role::Instance(None));
    let words: Vec<OsString> = [
        address.clone().into(),
        tls.ca.into(),
        tls.cert.into(),
        tls.key.into(),
        SLICE_BYTES.to_string().into(),
    ]
    .into();
    let said = run(program(place.path(), "examples/engine.c"), words.clone()).await;
    let expected = "instance 1 fetches 0 blocks and computes 4\nsaved 4 blocks\n\
        instance 1 fetches 4 blocks and computes 0\nlayer 0 of 4 blocks is there\n\
        layer 31 of 4 blocks is there\nfetched 4 blocks, all bytes right\n";
    assert_eq!(said, expected);
    let leases = || async { Some(client.node_status(&node.control_addr().to_string()).await.ok()?.leases) };
    assert_eq!(leases().await, Some(0), "leases of finished fetches were released");
    let rounds = OsString::from(CANCEL_ROUNDS.to_string());
    let said = run(program(place.path(), "tests/cancel.c"), [words.clone(), vec![rounds]].concat()).await;
    println!("{said}");
    // The release of a cancelled fetch may overtake it; then its lease expires instead.
    until("no lease is held", || async { (leases().await? == 0).then_some(()) }).await;
    let said = run(program(place.path(), "tests/save_layers.c"), words.clone()).await;
    assert_eq!(said, "saved by layers, all bytes right\n");
    until("no lease is held", || async { (leases().await? == 0).then_some(()) }).await;
    check_prefill(program(place.path(), "tests/prefill.c"), &words).await;
    until("no lease is held", || async { (leases().await? == 0).then_some(()) }).await;
    // The other instance leaves, so that only one can be chosen.
    reports.abort();
    assert!(reports.await.is_err_and(|ended| ended.is_cancelled()));
    engine
        .report(&pb::ReportRequest {
            instance: 1,
            started_us: 1,
            sequence: 1 << 40,
            leaving: true,
            ..Default::default()
        })
        .await;
    until("the other instance to leave", || async {
        client.status().await.ok()?.instances.is_empty().then_some(())
    })
    .await;
    check_reporting_engine(program(place.path(), "tests/reports.c"), (&words, &files), &client).await;
    node.shutdown().await;
    router.shutdown().await;
}
