//! A node and local processes: access, in-place reads and their limits, and invalid directories.

use std::path::PathBuf;
use std::sync::Arc;

use crate::world::*;
use kv_core::id::{Epoch, LeaseId, TenantId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_node::{Node, NodeConfig, ShmPeerSection, ShmSection};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::shm::{ShmConfig, ShmDialer, socket_path};
use kvfleet_transport::{Dialer, FetchAnswer, MissReason, Path, PathError, SaveAnswer};
use prometheus::Registry;

fn sockets(world: &TestCluster) -> PathBuf {
    world.dir.path().join("sockets")
}

/// A node that serves local processes.
fn config(world: &TestCluster, shm: ShmSection) -> NodeConfig {
    NodeConfig { shm: ShmSection { dir: Some(sockets(world)), ..shm }, ..world.config(&[]) }
}

fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn peer(uid: u32, tenants: &[u32], map: bool) -> ShmSection {
    let peers = vec![ShmPeerSection { uid, tenants: tenants.to_vec(), map }];
    ShmSection { peers, ..ShmSection::default() }
}

async fn try_dial(world: &TestCluster, node: &Node) -> Result<Arc<dyn Path>, PathError> {
    ShmDialer::new(ShmConfig::new(sockets(world))).dial(node.data_addr().to_string()).await
}

async fn dial(world: &TestCluster, node: &Node) -> Arc<dyn Path> {
    try_dial(world, node).await.unwrap()
}

/// Fetches and keeps the frames.
async fn held(path: &dyn Path, lease: u64, numbers: std::ops::Range<u64>) -> (FetchAnswer, Vec<Frame>) {
    let mut frames = Vec::new();
    let request = fetch_request(lease, Epoch(0), &hashes(numbers));
    let answer = path.fetch(request, &mut |frame| frames.push(frame)).await.unwrap();
    (answer, frames)
}

fn are_whole(frames: &[Frame], first: u64) -> bool {
    frames.iter().zip(first..).all(|(frame, number)| frame.verify(our_identity(), hash(number)).is_ok())
}

fn figure(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).unwrap();
    family.get_metric()[0].get_gauge().get_value()
}

async fn until(registry: &Registry, name: &str, value: f64) {
    eventually(name, async || (figure(registry, name) == value).then_some(())).await;
}

fn hit(tier: Tier, blocks: usize) -> FetchAnswer {
    FetchAnswer::Hit { tiers: vec![tier; blocks] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn own_user_reads_in_place_blocks_of_any_path() {
    let world = TestCluster::new();
    let registry = Registry::new();
    let node = Node::start(config(&world, ShmSection::default()), &registry).await.unwrap();
    let (near, far) = (dial(&world, &node).await, world.dial(node.data_addr()).await);
    assert_eq!(save(&*far, 1, 0..5).await.stored_blocks, 5);
    assert_eq!(save(&*near, 1, 5..10).await.stored_blocks, 5);
    assert_eq!(save(&*near, 1, 0..10).await.present_blocks, 10);
    assert_eq!(fetch(&*far, 2, 0, &hashes(0..10)).await, (hit(Tier::Dram, 10), 10));
    let (answer, frames) = held(&*near, 3, 0..10).await;
    assert_eq!(answer, hit(Tier::Dram, 10));
    assert!(are_whole(&frames, 0));
    until(&registry, "kvfleet_node_in_place_reads", 10.0).await;
    until(&registry, "kvfleet_node_host_clients", 1.0).await;
    until(
        &registry,
        "kvfleet_node_in_place_read_bytes",
        frames.iter().map(|frame| frame.bytes.len()).sum::<usize>() as f64,
    )
    .await;
    drop(frames);
    near.release(LeaseId(3)).await.unwrap();
    until(&registry, "kvfleet_node_in_place_reads", 0.0).await;
    drop(near);
    until(&registry, "kvfleet_node_host_clients", 0.0).await;
    node.shutdown().await;
    assert_eq!(std::fs::read_dir(sockets(&world)).unwrap().count(), 0, "the socket is removed with the node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_tenants_gets_copies_of_its_tenants_only() {
    let world = TestCluster::new();
    let registry = Registry::new();
    let node = Node::start(config(&world, peer(own(), &[1, 2], false)), &registry).await.unwrap();
    let (near, far) = (dial(&world, &node).await, world.dial(node.data_addr()).await);
    save(&*far, 1, 0..2).await;
    let (answer, _) = held(&*near, 2, 0..2).await;
    assert_eq!(
        answer,
        FetchAnswer::Miss { reason: MissReason::NotHeld },
        "tenant 0 is not one of its tenants"
    );
    let all = hashes(0..2);
    let refused = near.save(save_request(3, 0, &all), &|position| frame(all[position])).await.unwrap();
    assert!(matches!(refused, SaveAnswer::Refused(_)), "{refused:?}");
    let theirs = hashes(20..22);
    let mut request = save_request(4, 20, &theirs);
    (request.context.tenant, request.parent) = (TenantId(2), None);
    let saved = near.save(request, &|position| frame(theirs[position])).await.unwrap();
    assert!(matches!(saved, SaveAnswer::Done(done) if done.stored_blocks == 2));
    let mut request = fetch_request(5, Epoch(0), &theirs);
    request.context.tenant = TenantId(2);
    let mut frames = Vec::new();
    assert_eq!(near.fetch(request, &mut |frame| frames.push(frame)).await.unwrap(), hit(Tier::Dram, 2));
    assert!(are_whole(&frames, 20));
    until(&registry, "kvfleet_node_host_clients", 1.0).await;
    assert_eq!(figure(&registry, "kvfleet_node_in_place_reads"), 0.0, "copies are not in-place reads");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlisted_user_is_not_served() {
    let world = TestCluster::new();
    let node = start(&config(&world, peer(own() + 1, &[], true))).await;
    let error = try_dial(&world, &node).await.err().unwrap();
    assert!(error.to_string().contains("name it in the node's shm.peers"), "{error}");
    let far = world.dial(node.data_addr()).await;
    assert_eq!(save(&*far, 1, 0..2).await.stored_blocks, 2, "the network is still available");
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_read_in_place_stay_until_dropped() {
    let world = TestCluster::new();
    let shm = ShmSection { in_place_bytes: Some(1 << 30), ..ShmSection::default() };
    let registry = Registry::new();
    let node =
        Node::start(NodeConfig { dram_blocks: Some(8), ..config(&world, shm) }, &registry).await.unwrap();
    let (near, far) = (dial(&world, &node).await, world.dial(node.data_addr()).await);
    save(&*near, 1, 0..4).await;
    let (answer, frames) = held(&*near, 2, 0..4).await;
    assert_eq!(answer, hit(Tier::Dram, 4));
    near.release(LeaseId(2)).await.unwrap();
    for round in 0..10 {
        // Of eight slots four are read, so others can use four.
        let first = 100 + 10 * round;
        assert_eq!(save(&*far, 3, first..first + 8).await.stored_blocks, 4);
    }
    assert!(are_whole(&frames, 0));
    assert_eq!(fetch(&*far, 4, 0, &hashes(0..4)).await, (hit(Tier::Dram, 4), 4), "they are still present");
    far.release(LeaseId(4)).await.unwrap();
    drop(frames);
    until(&registry, "kvfleet_node_in_place_reads", 0.0).await;
    near.ping().await.unwrap();
    eventually("all eight are free", async || {
        (save(&*far, 5, 300..308).await.stored_blocks == 8).then_some(())
    })
    .await;
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_above_half_of_in_place_bytes_gets_copies() {
    let world = TestCluster::new();
    let registry = Registry::new();
    let bytes = frame(hash(0)).bytes.len() as u64;
    let shm = ShmSection { in_place_bytes: Some(8 * bytes), ..ShmSection::default() };
    let node = Node::start(config(&world, shm), &registry).await.unwrap();
    let (hoarder, other) = (dial(&world, &node).await, dial(&world, &node).await);
    save(&*other, 1, 0..20).await;
    let (answer, kept) = held(&*hoarder, 2, 0..20).await;
    assert_eq!((answer, kept.len()), (hit(Tier::Dram, 20), 20));
    until(&registry, "kvfleet_node_in_place_reads", 4.0).await;
    let (answer, lent) = held(&*other, 4, 0..4).await;
    assert_eq!((answer, lent.len()), (hit(Tier::Dram, 4), 4));
    until(&registry, "kvfleet_node_in_place_reads", 8.0).await;
    assert_eq!(save(&*other, 5, 30..40).await.stored_blocks, 10);
    assert!(are_whole(&kept, 0) && are_whole(&lent, 0));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_read_in_place_outlive_their_lease() {
    let world = TestCluster::new();
    let lease_ms = 200;
    let tiers = NodeConfig { dram_blocks: Some(8), lease_ms, ..config(&world, ShmSection::default()) };
    let shm = ShmSection { in_place_bytes: Some(1 << 30), ..tiers.shm.clone() };
    let node = start(&NodeConfig { shm, ..tiers }).await;
    let (near, far) = (dial(&world, &node).await, world.dial(node.data_addr()).await);
    save(&*near, 1, 0..4).await;
    let (_, frames) = held(&*near, 2, 0..4).await;
    // Polls under the same lease do not renew the earlier blocks.
    let since = std::time::Instant::now();
    let mut first = 100;
    while since.elapsed().as_millis() < 5 * u128::from(lease_ms) {
        let (answer, _) = held(&*near, 2, 90..91).await;
        assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
        assert_eq!(save(&*far, 3, first..first + 8).await.stored_blocks, 4);
        first += 10;
    }
    assert_eq!(fetch(&*far, 4, 0, &hashes(0..4)).await, (hit(Tier::Dram, 4), 4), "they are still present");
    assert!(are_whole(&frames, 0));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_read_past_dram_are_copied_and_free_load_slots() {
    let world = TestCluster::new();
    let registry = Registry::new();
    let tiers =
        NodeConfig { dram_blocks: Some(0), ssd_blocks: Some(64), ..config(&world, ShmSection::default()) };
    let node = Node::start(tiers, &registry).await.unwrap();
    let near = dial(&world, &node).await;
    save(&*near, 1, 0..40).await;
    let kept = eventually("all are on SSD", async || {
        let (answer, frames) = held(&*near, 2, 0..40).await;
        near.release(LeaseId(2)).await.unwrap();
        (answer == hit(Tier::Ssd, 40)).then_some(frames)
    });
    let kept = kept.await;
    assert!(are_whole(&kept, 0));
    // More frames than load slots are kept; further reads still succeed.
    assert_eq!(fetch(&*near, 3, 0, &hashes(0..40)).await, (hit(Tier::Ssd, 40), 40));
    until(&registry, "kvfleet_node_host_clients", 1.0).await;
    assert_eq!(figure(&registry, "kvfleet_node_in_place_reads"), 0.0);
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_read_in_place_outlive_the_node_and_its_socket_is_reused() {
    let world = TestCluster::new();
    let config = config(&world, ShmSection::default());
    let node = start(&config).await;
    let at = node.data_addr();
    let near = dial(&world, &node).await;
    save(&*near, 1, 0..4).await;
    let (_, frames) = held(&*near, 2, 0..4).await;
    node.shutdown().await;
    assert!(are_whole(&frames, 0));
    assert!(matches!(near.ping().await, Err(PathError::Broken { .. })));
    // A stale socket file, as a killed node leaves it.
    std::fs::write(socket_path(&sockets(&world), &at.to_string()), "").unwrap();
    let node = start_again(&NodeConfig { data_listen: at.to_string(), ..config }).await;
    let again = dial(&world, &node).await;
    assert_eq!(held(&*again, 2, 0..4).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
    assert!(are_whole(&frames, 0));
    node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_share_a_directory() {
    let world = TestCluster::new();
    let (one, two) = (
        start(&config(&world, ShmSection::default())).await,
        start(&config(&world, ShmSection::default())).await,
    );
    let (near_one, near_two) = (dial(&world, &one).await, dial(&world, &two).await);
    save(&*near_one, 1, 0..3).await;
    assert_eq!(held(&*near_one, 2, 0..3).await.0, hit(Tier::Dram, 3));
    assert_eq!(held(&*near_two, 2, 0..3).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
    one.shutdown().await;
    assert_eq!(save(&*near_two, 3, 0..3).await.stored_blocks, 3);
    two.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zero_in_place_bytes_copies_everything() {
    let world = TestCluster::new();
    let registry = Registry::new();
    let shm = ShmSection { in_place_bytes: Some(0), ..ShmSection::default() };
    let node = Node::start(config(&world, shm), &registry).await.unwrap();
    let near = dial(&world, &node).await;
    save(&*near, 1, 0..4).await;
    let (answer, frames) = held(&*near, 2, 0..4).await;
    assert_eq!(answer, hit(Tier::Dram, 4));
    assert!(are_whole(&frames, 0));
    until(&registry, "kvfleet_node_host_clients", 1.0).await;
    assert_eq!(figure(&registry, "kvfleet_node_in_place_reads"), 0.0);
    node.shutdown().await;
}

#[tokio::test]
async fn invalid_socket_directory_stops_the_start() {
    let world = TestCluster::new();
    let file = world.dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let shm = ShmSection { dir: Some(file.join("sockets")), ..ShmSection::default() };
    let refused = Node::start(NodeConfig { shm, ..world.config(&[]) }, &Registry::new()).await.unwrap_err();
    says(
        "a node: a directory for sockets that cannot be made",
        &refused,
        &[&world.dir.path().display().to_string()],
    );
    let long = world.dir.path().join("x".repeat(120));
    let shm = ShmSection { dir: Some(long), ..ShmSection::default() };
    let refused = Node::start(NodeConfig { shm, ..world.config(&[]) }, &Registry::new()).await.unwrap_err();
    let said = refused.to_string();
    let port = said.split_once("127.0.0.1_").unwrap().1.split_once(".sock").unwrap().0;
    let dir = world.dir.path().display().to_string();
    says("a node: a socket directory with too long a name", &refused, &[&dir, port]);
}
