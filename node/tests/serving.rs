//! A node over real QUIC: saves, fetches, refusals, limits, and errors at start.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::world::*;
use kv_core::id::{Epoch, IdentityDigest, InstanceId, LeaseId, TenantId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;
use kvfleet_node::tiers::ssd::SsdFaults;
use kvfleet_node::{Node, NodeConfig, QuotaSection, TlsSection};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb;
use kvfleet_transport::{FetchAnswer, MissReason, Path, SaveAnswer, SaveRefusal};
use prometheus::Registry;

#[tokio::test]
async fn saved_blocks_are_fetched_without_a_router() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let path = world.dial(node.data_addr()).await;
    let done = save(&*path, 1, 0..5).await;
    assert_eq!((done.stored_blocks, done.present_blocks, done.refused_blocks), (5, 0, 0));
    assert_eq!(done.visible_at, None, "no router assigned an epoch yet");
    let (answer, frames) = fetch(&*path, 2, 0, &hashes(0..5)).await;
    assert_eq!((answer, frames), (FetchAnswer::Hit { tiers: vec![Tier::Dram; 5] }, 5));
    let (answer, frames) = fetch(&*path, 2, 0, &hashes(0..8)).await;
    let partial = FetchAnswer::Partial { tiers: vec![Tier::Dram; 5], reason: MissReason::NotHeld };
    assert_eq!((answer, frames), (partial, 5));
    let (answer, _) = fetch(&*path, 3, 0, &hashes(50..51)).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    assert_eq!(save(&*path, 4, 0..6).await.present_blocks, 5);
    node.shutdown().await;
}

#[tokio::test]
async fn another_epoch_or_identity_is_a_miss_with_its_reason() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..1).await;
    let (answer, _) = fetch(&*path, 2, 9, &hashes(0..1)).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::StaleEpoch });
    let mut request = fetch_request(3, Epoch(0), &hashes(0..1));
    request.context.identity = IdentityDigest([9; 16]);
    let answer = path.fetch(request, &mut |_| panic!("bytes of another identity")).await.unwrap();
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::IdentityDiffers });
    let all = hashes(5..6);
    let mut request = save_request(4, 5, &all);
    request.context.identity = IdentityDigest([9; 16]);
    let answer = path.save(request, &|position| frame(all[position])).await.unwrap();
    assert_eq!(answer, SaveAnswer::Refused(SaveRefusal::IdentityDiffers));
}

#[tokio::test]
async fn release_by_another_certificate_is_ignored_and_a_new_path_keeps_the_lease() {
    let world = TestCluster::new();
    let node = start(&NodeConfig { dram_blocks: Some(1), ..world.config(&[]) }).await;
    let other = files(world.dir.path(), &Role::Instance(Some(InstanceId(8)))).load().unwrap();
    let (ours, theirs) = (world.dial(node.data_addr()).await, dial_as(&other, node.data_addr()).await);
    let all = hashes(0..1);
    let kept = ours.save(save_request(7, 0, &all), &|_| frame(all[0])).await.unwrap();
    assert!(matches!(kept, SaveAnswer::Done(done) if done.stored_blocks == 1), "and lease 7 holds it");
    let other = hashes(50..51);
    let pushes = async |path: &dyn Path, lease| {
        let answer = path.save(save_request(lease, 50, &other), &|_| frame(other[0])).await.unwrap();
        path.release(LeaseId(lease)).await.unwrap();
        answer
    };
    theirs.release(LeaseId(7)).await.unwrap();
    assert_eq!(pushes(&*theirs, 7).await, SaveAnswer::Refused(SaveRefusal::Full), "it is still held");
    assert_eq!(status(&world, &node).await.leases, 1);
    drop(ours);
    let ours = world.dial(node.data_addr()).await;
    ours.release(LeaseId(7)).await.unwrap();
    assert_eq!(status(&world, &node).await.leases, 0);
    assert!(matches!(pushes(&*theirs, 8).await, SaveAnswer::Done(done) if done.stored_blocks == 1));
    // The block was saved with another certificate, but the tenant decides about reads.
    assert_eq!(fetch(&*ours, 9, 0, &other).await.1, 1);
}

#[tokio::test]
async fn tenant_cannot_read_a_known_foreign_hash() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let path = world.dial(node.data_addr()).await;
    save(&*path, 1, 0..2).await;
    let all = hashes(0..2);
    let mut request = fetch_request(2, Epoch(0), &all);
    request.context.tenant = TenantId(5);
    let answer = path.fetch(request, &mut |_| panic!("bytes of another tenant")).await.unwrap();
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    let mut request = save_request(3, 0, &all);
    request.context.tenant = TenantId(5);
    let answer = path.save(request, &|_| panic!("must not be asked for")).await.unwrap();
    assert_eq!(answer, SaveAnswer::Refused(SaveRefusal::Full));
    assert_eq!(fetch(&*path, 4, 0, &all).await.1, 2, "the owning tenant can read them");
}

#[tokio::test]
async fn wrong_bytes_are_counted_and_never_served() {
    let (world, registry, log) = (TestCluster::new(), Registry::new(), Log::start());
    let node = Node::start(world.config(&[]), &registry).await.unwrap();
    let path = world.dial(node.data_addr()).await;
    let all = hashes(0..3);
    let request = save_request(1, 0, &all);
    let damaged = |position: usize| {
        let good = frame(all[position]);
        match position {
            1 => {
                let mut bytes = good.bytes.to_vec();
                *bytes.last_mut().unwrap() ^= 1;
                Frame { bytes: bytes.into(), ..good }
            }
            2 => frame(hash(77)),
            _ => good,
        }
    };
    let SaveAnswer::Done(done) = path.save(request, &damaged).await.unwrap() else { panic!("not done") };
    assert_eq!((done.stored_blocks, done.refused_blocks), (1, 2));
    let hash_of = |position: usize| all[position].to_string();
    says("a saved block with a flipped bit", &log.line("does not match"), &[&hash_of(1)]);
    let varying = [hash_of(2), hash(77).to_string()];
    says(
        "a saved block that is another one",
        &log.line("is of block"),
        &varying.each_ref().map(String::as_str),
    );
    let metric = "kvfleet_node_refused_blocks_total";
    says("refused blocks, in the metrics", &figure(&registry, metric), &[]);
    path.release(LeaseId(1)).await.unwrap();
    assert_eq!(fetch(&*path, 2, 0, &all).await.1, 1);
    assert_eq!(fetch(&*path, 2, 0, &hashes(77..78)).await.1, 0);
    let status = status(&world, &node).await;
    assert_eq!(status.tiers[0].blocks, 1, "space of refused blocks is free again");
    assert_eq!(save(&*path, 3, 0..3).await.stored_blocks, 2);
}

/// A node with a raw-keys manifest refuses rotated keys, and the other way round. Readers take the
/// form from the manifest, and would rotate such keys twice or never.
#[tokio::test]
async fn a_saved_block_with_keys_of_another_form_is_refused() {
    for raw_keys in [false, true] {
        let (world, log) = (TestCluster::new(), Log::start());
        let mut config = world.config(&[]);
        config.identity.raw_keys = raw_keys;
        let (identity, all) = (config.identity.manifest().digest(), hashes(0..3));
        let node = start(&config).await;
        let path = world.dial(node.data_addr()).await;
        let half = u32::try_from(BLOCK_BYTES / 2).unwrap();
        let with_raw = |position: usize, raw: bool| {
            let form = if raw { KeyForm::Raw } else { KeyForm::Rotated };
            seal(identity, all[position], form, &[half, half], &[7; BLOCK_BYTES]).unwrap()
        };
        let mut request = save_request(1, 0, &all);
        request.context.identity = identity;
        let again = request.clone();
        let one_is_other = |position: usize| with_raw(position, raw_keys != (position == 1));
        let SaveAnswer::Done(done) = path.save(request, &one_is_other).await.unwrap() else {
            panic!("not done")
        };
        assert_eq!((done.stored_blocks, done.refused_blocks), (2, 1), "raw keys: {raw_keys}");
        if !raw_keys {
            let line = log.line("a saved frame is refused");
            says("a saved block with keys of another form", &line, &[&all[1].to_string()]);
        }
        let right = |position: usize| with_raw(position, raw_keys);
        let SaveAnswer::Done(done) = path.save(again, &right).await.unwrap() else { panic!("not done") };
        assert_eq!((done.stored_blocks, done.present_blocks), (1, 2), "the block is still wanted");
    }
}

#[tokio::test]
async fn frames_too_large_are_refused_before_they_are_sent() {
    let world = TestCluster::new();
    let node = start(&world.config(&[])).await;
    let path = world.dial(node.data_addr()).await;
    let all = hashes(0..1);
    let mut request = save_request(1, 0, &all);
    request.frame_bytes = 1 << 20;
    let answer = path.save(request, &|_| panic!("must not be asked for")).await.unwrap();
    assert_eq!(answer, SaveAnswer::Refused(SaveRefusal::FrameSize));
}

#[tokio::test]
async fn a_tier_holds_exactly_its_blocks_and_drops_the_oldest() {
    let world = TestCluster::new();
    let node = start(&NodeConfig { dram_blocks: Some(4), ..world.config(&[]) }).await;
    let path = world.dial(node.data_addr()).await;
    for number in 0..6 {
        assert_eq!(save(&*path, number, number * 10..number * 10 + 1).await.stored_blocks, 1);
    }
    assert_eq!(status(&world, &node).await.tiers[0].blocks, 4);
    for number in 0..6 {
        let expected = usize::from(number >= 2);
        assert_eq!(fetch(&*path, 100 + number, 0, &[hash(number * 10)]).await.1, expected, "block {number}");
    }
}

#[tokio::test]
async fn a_request_larger_than_the_node_keeps_its_head() {
    let world = TestCluster::new();
    let node = start(&NodeConfig { dram_blocks: Some(4), ..world.config(&[]) }).await;
    let path = world.dial(node.data_addr()).await;
    let done = save(&*path, 1, 0..10).await;
    assert_eq!((done.stored_blocks, done.refused_blocks), (4, 6));
    assert_eq!(fetch(&*path, 2, 0, &hashes(0..10)).await.1, 4);
}

#[tokio::test]
async fn a_tenant_never_holds_more_than_its_quota() {
    let world = TestCluster::new();
    let bytes = frame(hash(0)).bytes.len() as u64 * 2;
    let quotas = vec![QuotaSection { tenant: 0, bytes }];
    let node = start(&NodeConfig { quotas, ..world.config(&[]) }).await;
    let path = world.dial(node.data_addr()).await;
    let done = save(&*path, 1, 0..3).await;
    assert_eq!((done.stored_blocks, done.refused_blocks), (2, 1));
    let tenants = status(&world, &node).await.tenants;
    assert_eq!(
        tenants,
        vec![pb::TenantUse { tenant: TenantId(0).0, bytes, quota_bytes: bytes, has_quota: true }]
    );
}

#[tokio::test]
async fn blocks_are_demoted_to_ssd_and_promoted_back() {
    for io_uring in [true, false] {
        let world = TestCluster::new();
        let config = NodeConfig { dram_blocks: Some(2), ssd_blocks: Some(20), io_uring, ..world.config(&[]) };
        let node = start(&config).await;
        let path = world.dial(node.data_addr()).await;
        for number in 0..10 {
            save(&*path, number, number * 10..number * 10 + 1).await;
        }
        for number in 0..10 {
            assert_eq!(fetch(&*path, 100 + number, 0, &[hash(number * 10)]).await.1, 1, "block {number}");
            path.release(LeaseId(100 + number)).await.unwrap();
        }
        let status = status(&world, &node).await;
        assert_eq!((status.tiers[0].blocks, status.tiers[1].blocks), (2, 8));
        let classes = || status.classes.iter();
        // From either tier: bytes moving to SSD are still in DRAM.
        assert_eq!(classes().map(|class| class.hits).sum::<u64>(), 10);
        assert!(classes().map(|class| class.demoted).sum::<u64>() >= 8, "{status:?}");
        let most = status.curve.last().unwrap();
        assert!((most.hit_rate - 0.5).abs() < 0.01, "every block was used twice: {status:?}");
    }
}

#[tokio::test]
async fn a_request_larger_than_dram_is_read_from_ssd_at_once() {
    let world = TestCluster::new();
    let config = NodeConfig { dram_blocks: Some(3), ssd_blocks: Some(60), ..world.config(&[]) };
    let node = start(&config).await;
    let path = world.dial(node.data_addr()).await;
    assert_eq!(save(&*path, 1, 0..50).await.stored_blocks, 50);
    for lease in 2..5 {
        assert_eq!(fetch(&*path, lease, 0, &hashes(0..50)).await.1, 50);
        path.release(LeaseId(lease)).await.unwrap();
    }
}

#[tokio::test]
async fn full_disk_stops_the_ssd_tier_and_not_the_node() {
    let world = TestCluster::new();
    let config = NodeConfig { dram_blocks: Some(2), ssd_blocks: Some(20), ..world.config(&[]) };
    let (faults, registry, log) = (Arc::new(SsdFaults::default()), Registry::new(), Log::start());
    let node = Node::start_with_faults(config, &registry, Arc::clone(&faults)).await.unwrap();
    let path = world.dial(node.data_addr()).await;
    faults.write_errno.store(libc::ENOSPC, Ordering::Relaxed);
    for number in 0..6 {
        assert_eq!(save(&*path, number, number * 10..number * 10 + 1).await.stored_blocks, 1);
    }
    let why = eventually("the tier stops admitting", async || {
        let ssd = status(&world, &node).await.tiers[1].clone();
        (!ssd.admitting).then_some(ssd.reject_reason)
    })
    .await;
    says("a full SSD directory, in the node's status", &why, &[]);
    says("a full SSD directory, in the log", &log.line("stops admitting"), &[]);
    let metric = "kvfleet_node_admitting{tier=\"ssd\"}";
    let stopped = eventually("the metric follows", async || {
        let figure = figure(&registry, metric);
        figure.ends_with(" 0").then_some(figure)
    });
    says("a full SSD directory, in the metrics", &stopped.await, &[]);
    assert_eq!(fetch(&*path, 99, 0, &[hash(50)]).await.1, 1, "the newest block is still served");
    path.release(LeaseId(99)).await.unwrap();
    // The disk has space again, and the tier recovers by itself.
    faults.write_errno.store(0, Ordering::Relaxed);
    let mut number = 100;
    eventually("blocks go to SSD again", async || {
        number += 1;
        save(&*path, number, number * 10..number * 10 + 1).await;
        let ssd = status(&world, &node).await.tiers[1].clone();
        (ssd.admitting && ssd.blocks > 2).then_some(())
    })
    .await;
    assert_eq!(log.count("stops admitting"), 1, "logged once");
}

#[tokio::test]
async fn failing_medium_is_a_miss_and_drops_the_block() {
    let world = TestCluster::new();
    let config = NodeConfig { dram_blocks: Some(1), ssd_blocks: Some(20), ..world.config(&[]) };
    let faults = Arc::new(SsdFaults::default());
    let node = Node::start_with_faults(config, &Registry::new(), Arc::clone(&faults)).await.unwrap();
    let path = world.dial(node.data_addr()).await;
    faults.read_errno.store(libc::EIO, Ordering::Relaxed);
    // Each attempt saves one more, so that an older one is eventually on SSD only.
    let mut number = 0;
    let lost = eventually("a block is on SSD only", async || {
        number += 1;
        save(&*path, number, number * 10..number * 10 + 1).await;
        let older = hash(number.saturating_sub(3).max(1) * 10);
        let (answer, frames) = fetch(&*path, 1_000 + number, 0, &[older]).await;
        path.release(LeaseId(1_000 + number)).await.unwrap();
        (frames == 0 && answer != FetchAnswer::Miss { reason: MissReason::NotHeld }).then_some(older)
    })
    .await;
    faults.read_errno.store(0, Ordering::Relaxed);
    let (answer, _) = fetch(&*path, 5_000, 0, &[lost]).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    assert_eq!(save(&*path, 5_001, 7..8).await.stored_blocks, 1, "the node keeps serving");
}

#[tokio::test]
async fn each_failed_start_has_a_remedy() {
    let world = TestCluster::new();
    let good = world.config(&[]);
    let node = start(&good).await;
    let taken = [node.data_addr().to_string(), node.control_addr().to_string()];
    let file = world.dir.path().join("a-file");
    std::fs::write(&file, b"").unwrap();
    let gone = TlsSection { cert: world.dir.path().join("none.pem"), ..good.tls.clone() };
    let here = world.dir.path().display().to_string();
    let refused = async |config: NodeConfig| Node::start(config, &Registry::new()).await.unwrap_err();
    let config = NodeConfig { data_listen: taken[0].clone(), ..good.clone() };
    says("a port in use, of a node's data", &refused(config).await, &[&taken[0]]);
    let config = NodeConfig { control_listen: taken[1].clone(), ..good.clone() };
    says("a port in use, of a node's control calls", &refused(config).await, &[&taken[1]]);
    let config = NodeConfig { control_listen: "here".to_owned(), ..good.clone() };
    says("a node: an address that is none", &refused(config).await, &[]);
    let config = NodeConfig { tls: gone, ..good.clone() };
    says("a node without its certificate file", &refused(config).await, &[&here]);
    let config = NodeConfig { data_dir: file.join("x"), ssd_blocks: Some(4), ..good.clone() };
    says("a node with an SSD directory that cannot be created", &refused(config).await, &[&here]);
    let config = NodeConfig { dram_blocks: None, dram_bytes: 1 << 60, ..good.clone() };
    let error = refused(config).await.to_string();
    let available = error.split("the machine has ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    says("a node with more DRAM than there is", &error, &[available]);
}

/// The line of one metric, as the metrics endpoint shows it.
fn figure(registry: &Registry, name: &str) -> String {
    let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned()
}
