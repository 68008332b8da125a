//! A node and a client of its host as two processes, one of which is killed or stands still: nothing is left of what it held,
//! and nothing that is read changes.
//!
//! The other process is this program once more, told what it is by its environment. Not here: ends that are dropped in order
//! (`shm.rs`).

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::world::*;
use kv_core::id::{Epoch, Tier};
use kvfleet_node::{Node, NodeConfig, ShmSection};
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::shm::{ShmConfig, ShmDialer};
use kvfleet_transport::{Dialer, FetchAnswer, Path, PathError};
use prometheus::Registry;
use rustix::process::{Pid, Signal, kill_process};

/// What the other process is to be: `client DIRECTORY ADDRESS`, or `node DIRECTORY ADDRESS`.
const ROLE: &str = "KVFLEET_TEST_ROLE";

/// Blocks that a client reads, and those that it begins to save.
const READ: std::ops::Range<u64> = 0..4;
const SAVED: std::ops::Range<u64> = 100..103;

/// This test's program as another process.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str, world: &World, address: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "killed::the_other_process", "--nocapture"]);
        child.env(ROLE, format!("{role}\n{}\n{address}", world.dir.path().display()));
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Other { child, input, output }
    }

    /// What it says next, without what the test's harness prints around it.
    fn says(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process ended");
            if let Some((_, said)) = line.split_once("other: ") {
                return said.trim_end().to_owned();
            }
        }
    }

    fn tell(&mut self) {
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

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(what: &str) {
    println!("other: {what}");
    std::io::stdout().flush().unwrap();
}

fn is_told() {
    let mut line = String::new();
    assert!(std::io::stdin().read_line(&mut line).unwrap() > 0, "the test ended");
}

/// What the other process does; as a test of its own, nothing.
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
            say(&node.data_addr().to_string());
            std::future::pending::<()>().await;
        }),
        other => panic!("no role {other}"),
    }
}

/// Reads, has a save under way, and reads again when told.
async fn client(dir: &str, address: String) {
    let path = ShmDialer::new(ShmConfig::new(format!("{dir}/sockets").into())).dial(address).await.unwrap();
    let frames = held(&*path, 1).await;
    assert_eq!(frames.len(), 4);
    let saving = Arc::clone(&path);
    tokio::spawn(async move {
        let all = hashes(SAVED);
        let source = |position: usize| {
            if position == 2 {
                // Two frames are put, the third never comes.
                say("reads and saves");
                std::thread::park();
            }
            frame(all[position])
        };
        saving.save(save_request(2, SAVED.start, &all), &source).await
    });
    tokio::task::spawn_blocking(is_told).await.unwrap();
    assert!(are_whole(&frames));
    say("has right bytes");
    std::future::pending::<()>().await;
}

fn config(dir: &std::path::Path, data_listen: &str) -> NodeConfig {
    let file = |name: &str| dir.join(name);
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
            lent_bytes: Some(1 << 30),
            ..ShmSection::default()
        },
        tls: kvfleet_node::TlsSection { ca: file("ca.pem"), cert: file("cert.pem"), key: file("cert.key") },
        ..NodeConfig::default()
    }
}

async fn dial(world: &World, address: &str) -> Result<Arc<dyn Path>, PathError> {
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

async fn leases(world: &World, node: &Node) -> u64 {
    let mut control = world.control(node.control_addr()).await;
    control.node_status(pb::NodeStatusRequest {}).await.unwrap().into_inner().leases
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_killed_leaves_nothing() {
    let world = World::new();
    let registry = Registry::new();
    let node = Node::start(config(world.dir.path(), "127.0.0.1:0"), &registry).await.unwrap();
    let address = node.data_addr().to_string();
    let far = world.dial(node.data_addr()).await;
    save(&*far, 1, READ).await;
    for round in 0..6 {
        let mut client = Other::start("client", &world, &address);
        assert_eq!(client.says(), "reads and saves");
        until(&registry, "kvfleet_node_loans", 4.0).await;
        client.kill();
        until(&registry, "kvfleet_node_loans", 0.0).await;
        until(&registry, "kvfleet_node_host_clients", 0.0).await;
        eventually("no lease is left", async || (leases(&world, &node).await == 0).then_some(())).await;
        // Nothing half-written is there, nothing is reserved, and every place can be used.
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
async fn a_client_that_stands_still_keeps_what_it_reads_and_goes_on() {
    let world = World::new();
    let node = start(&config(world.dir.path(), "127.0.0.1:0")).await;
    let far = world.dial(node.data_addr()).await;
    save(&*far, 1, READ).await;
    let mut client = Other::start("client", &world, &node.data_addr().to_string());
    assert_eq!(client.says(), "reads and saves");
    client.signal(Signal::STOP);
    let since = std::time::Instant::now();
    let mut first = 1000;
    while since.elapsed() < Duration::from_secs(1) {
        // Of sixteen places four are read, and some are reserved for its save.
        let stored = save(&*far, 2, first..first + 16).await.stored_blocks;
        assert!((1..=12).contains(&stored), "{stored}");
        first += 100;
    }
    client.signal(Signal::CONT);
    client.tell();
    assert_eq!(client.says(), "has right bytes");
    client.kill();
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_leaves_what_is_read_and_another_takes_its_place() {
    let world = World::new();
    let mut node = Other::start("node", &world, "127.0.0.1:0");
    let address = node.says();
    let path = dial(&world, &address).await.unwrap();
    save(&*path, 1, READ).await;
    let frames = held(&*path, 2).await;
    assert_eq!(frames.len(), 4);
    node.kill();
    assert!(matches!(path.ping().await, Err(PathError::Broken { .. })));
    assert!(are_whole(&frames));
    assert!(dial(&world, &address).await.is_err(), "its socket is a name without anybody behind it");
    let mut node = Other::start("node", &world, &address);
    assert_eq!(node.says(), address);
    let again = dial(&world, &address).await.unwrap();
    assert_eq!(held(&*again, 2).await.len(), 0, "its memory went with it");
    save(&*again, 1, READ).await;
    let (answer, _) = fetch(&*again, 2, 0, &hashes(READ)).await;
    assert_eq!(answer, FetchAnswer::Hit { tiers: vec![Tier::Dram; 4] });
    assert!(are_whole(&frames));
}
