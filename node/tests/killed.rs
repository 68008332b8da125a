//! A node and a local client as two processes; one is killed or stopped. Its leases and
//! reservations end, and bytes being read never change.
//!
//! The other process is this program again, with its role in an environment variable. Not here:
//! orderly ends (`shm.rs`).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::world::*;
use kv_core::id::{Epoch, Tier};
use kvfleet_net::tls::Role;
use kvfleet_node::{Node, NodeConfig, ShmSection};
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::shm::{ShmConfig, ShmDialer};
use kvfleet_transport::{Dialer, FetchAnswer, Path, PathError};
use prometheus::Registry;
use rustix::process::{Pid, Signal, kill_process};

/// Role of the other process: `client DIRECTORY ADDRESS`, or `node DIRECTORY ADDRESS`.
const ROLE: &str = "KVFLEET_TEST_ROLE";

/// Blocks that a client reads, and blocks that it begins to save.
const READ: std::ops::Range<u64> = 0..4;
const SAVED: std::ops::Range<u64> = 100..103;

/// This test program as another process.
struct OtherProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl OtherProcess {
    fn start(role: &str, world: &TestCluster, address: &str) -> OtherProcess {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "killed::the_other_process", "--nocapture"]);
        child.env(ROLE, format!("{role}\n{}\n{address}", world.dir.path().display()));
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        OtherProcess { child, input, output }
    }

    /// Its next message, without the output of the test harness.
    fn next_message(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process ended");
            if let Some((_, said)) = line.split_once("other: ") {
                return said.trim_end().to_owned();
            }
        }
    }

    fn wake(&mut self) {
        writeln!(self.input, "go on").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send_message(what: &str) {
    println!("other: {what}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_wake() {
    let mut line = String::new();
    assert!(std::io::stdin().read_line(&mut line).unwrap() > 0, "the test ended");
}

/// The other process's main function; without a role it returns at once.
#[test]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let mut words = role.split('\n').map(str::to_owned);
    let (role, dir, address) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match role.as_str() {
        "client" => runtime.block_on(client(&dir, address)),
        "node" => runtime.block_on(async {
            let node = start(&config(std::path::Path::new(&dir), &address)).await;
            send_message(&node.data_addr().to_string());
            std::future::pending::<()>().await;
        }),
        other => panic!("no role {other}"),
    }
}

/// Reads, starts a save, and reads again when woken.
async fn client(dir: &str, address: String) {
    let path = ShmDialer::new(ShmConfig::new(format!("{dir}/sockets").into())).dial(address).await.unwrap();
    let frames = held(&*path, 1).await;
    assert_eq!(frames.len(), 4);
    let saving = Arc::clone(&path);
    tokio::spawn(async move {
        let all = hashes(SAVED);
        let source = |position: usize| {
            if position == 2 {
                // Two frames are sent, the third never is.
                send_message("reads and saves");
                std::thread::park();
            }
            frame(all[position])
        };
        saving.save(save_request(2, SAVED.start, &all), &source).await
    });
    tokio::task::spawn_blocking(wait_for_wake).await.unwrap();
    assert!(are_whole(&frames));
    send_message("has right bytes");
    std::future::pending::<()>().await;
}

fn config(dir: &std::path::Path, data_listen: &str) -> NodeConfig {
    let files = files(dir, &Role::Node(None));
    NodeConfig {
        data_listen: data_listen.to_owned(),
        dram_blocks: Some(16),
        ssd_blocks: Some(0),
        data_dir: dir.join("ssd"),
        block_bytes: BLOCK_BYTES as u64,
        policy: "lru".to_owned(),
        watermark_high: 1.0,
        watermark_low: 1.0,
        lease_ms: 300,
        shm: ShmSection {
            dir: Some(dir.join("sockets")),
            in_place_bytes: Some(1 << 30),
            ..ShmSection::default()
        },
        tls: kvfleet_node::TlsSection { ca: files.ca, cert: files.cert, key: files.key },
        ..NodeConfig::default()
    }
}

async fn dial(world: &TestCluster, address: &str) -> Result<Arc<dyn Path>, PathError> {
    ShmDialer::new(ShmConfig::new(world.dir.path().join("sockets"))).dial(address.to_owned()).await
}

async fn held(path: &dyn Path, lease: u64) -> Vec<Frame> {
    let mut frames = Vec::new();
    path.fetch(fetch_request(lease, Epoch(0), &hashes(READ)), &mut |frame| frames.push(frame)).await.unwrap();
    frames
}

fn are_whole(frames: &[Frame]) -> bool {
    frames.iter().zip(READ).all(|(frame, number)| frame.verify(our_identity(), hash(number)).is_ok())
}

fn figure(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    families.iter().find(|family| family.name() == name).unwrap().get_metric()[0].get_gauge().get_value()
}

async fn until(registry: &Registry, name: &str, value: f64) {
    eventually(name, async || (figure(registry, name) == value).then_some(())).await;
}

async fn leases(world: &TestCluster, node: &Node) -> u64 {
    let mut control = world.control(node.control_addr()).await;
    control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner().leases
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_client_leaves_no_lease_or_reservation() {
    let world = TestCluster::new();
    let registry = Registry::new();
    let node = Node::start(config(world.dir.path(), "127.0.0.1:0"), &registry).await.unwrap();
    let address = node.data_addr().to_string();
    let far = world.dial(node.data_addr()).await;
    save(&*far, 1, READ).await;
    for round in 0..6 {
        let mut client = OtherProcess::start("client", &world, &address);
        assert_eq!(client.next_message(), "reads and saves");
        until(&registry, "kvfleet_node_in_place_reads", 4.0).await;
        client.kill();
        until(&registry, "kvfleet_node_in_place_reads", 0.0).await;
        until(&registry, "kvfleet_node_host_clients", 0.0).await;
        eventually("no lease is left", async || (leases(&world, &node).await == 0).then_some(())).await;
        // No partial block is present, no space is reserved, and every slot can be used.
        let done = save(&*far, 2, SAVED).await;
        assert_eq!(done.stored_blocks + done.present_blocks, 3, "round {round}: {done:?}");
        assert_eq!(fetch(&*far, 3, 0, &hashes(SAVED)).await.1, 3);
        far.release(kv_core::id::LeaseId(3)).await.unwrap();
        let first = 1000 + 100 * round;
        assert_eq!(save(&*far, 4, first..first + 16).await.stored_blocks, 16, "round {round}");
        save(&*far, 5, READ).await;
    }
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_client_keeps_its_reads_and_continues() {
    let world = TestCluster::new();
    let node = start(&config(world.dir.path(), "127.0.0.1:0")).await;
    let far = world.dial(node.data_addr()).await;
    save(&*far, 1, READ).await;
    let mut client = OtherProcess::start("client", &world, &node.data_addr().to_string());
    assert_eq!(client.next_message(), "reads and saves");
    client.signal(Signal::STOP);
    let since = std::time::Instant::now();
    let mut first = 1000;
    while since.elapsed() < Duration::from_secs(1) {
        // Of sixteen slots four are read, and some are reserved for its save.
        let stored = save(&*far, 2, first..first + 16).await.stored_blocks;
        assert!((1..=12).contains(&stored), "{stored}");
        first += 100;
    }
    client.signal(Signal::CONT);
    client.wake();
    assert_eq!(client.next_message(), "has right bytes");
    client.kill();
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_node_leaves_reads_intact_and_can_be_replaced() {
    let world = TestCluster::new();
    let mut node = OtherProcess::start("node", &world, "127.0.0.1:0");
    let address = node.next_message();
    let path = dial(&world, &address).await.unwrap();
    save(&*path, 1, READ).await;
    let frames = held(&*path, 2).await;
    assert_eq!(frames.len(), 4);
    node.kill();
    assert!(matches!(path.ping().await, Err(PathError::Broken { .. })));
    assert!(are_whole(&frames));
    assert!(dial(&world, &address).await.is_err(), "its socket file has no listener");
    let mut node = OtherProcess::start("node", &world, &address);
    assert_eq!(node.next_message(), address);
    let again = dial(&world, &address).await.unwrap();
    assert_eq!(held(&*again, 2).await.len(), 0, "its memory is gone");
    save(&*again, 1, READ).await;
    let (answer, _) = fetch(&*again, 2, 0, &hashes(READ)).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: vec![Tier::Dram; 4] });
    assert!(are_whole(&frames));
}
