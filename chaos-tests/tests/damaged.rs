//! A flipped byte on one router's disk: the cluster continues, and the router recovers the state of
//! the others.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use chaos_tests::cluster::{Cluster, ROUTERS_COUNT, RouterClients};
use chaos_tests::waiting::{until, until_equal};
use kv_core::id::HASH_BYTES;
use kvfleet_client::MembershipClient;
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;

const PROGRAM: &str = env!("CARGO_BIN_EXE_chaos-router");

/// All routers.
const ALL: [usize; ROUTERS_COUNT] = [0, 1, 2];

/// The router with the damaged disk.
const DAMAGED: usize = 0;

/// A string that is unique in the log.
const MARKER: &str = "an owner unique in the log";

/// The first file of its Raft log.
const LOG_FILE: &str = "raft-log/0000000000000001";

/// Writes quotas through any router that leads.
async fn write(contacts: &RouterClients, tenants: std::ops::Range<u32>) {
    for tenant in tenants {
        let quota = pb::SetQuotaRequest { tenant, bytes: u64::from(tenant), clear: false };
        until("a write", || async {
            for position in 0..ROUTERS_COUNT {
                if contacts.client(position).set_quota(quota).await.is_ok() {
                    return Some(());
                }
            }
            None
        })
        .await;
    }
}

fn flip(path: &Path, places: impl Fn(&[u8]) -> Vec<usize>) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    let places = places(&bytes);
    assert!(!places.is_empty(), "no bytes to damage in {}", path.display());
    places.into_iter().for_each(|place| bytes[place] ^= 0x10);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn router_with_a_damaged_snapshot_recovers_and_votes() {
    let mut cluster = Cluster::start(Path::new(PROGRAM)).unwrap();
    let contacts = cluster.router_clients();
    write(&contacts, 0..600).await;
    until("a snapshot, and later entries", || async {
        (contacts.status(DAMAGED).await?.snapshot_index > 500).then_some(())
    })
    .await;
    cluster.kill(DAMAGED).unwrap();
    let path = cluster.data_dir(DAMAGED).join("snapshot-0.kvf");
    let damaged = flip(&path, |bytes| vec![bytes.len() / 2]);
    write(&contacts, 600..620).await;
    cluster.start_router(DAMAGED).unwrap();
    write(&contacts, 620..640).await;
    until_equal(&contacts, &ALL).await;
    assert_eq!(std::fs::read(path.with_extension("kvf.set-aside-1")).unwrap(), damaged);
    // It votes again: otherwise the two remaining routers could not continue.
    let withheld = cluster.data_dir(DAMAGED).join("withheld-votes");
    // A CRC and an empty map.
    until("the vote", || async { (std::fs::read(&withheld).ok()?.len() == 5).then_some(()) }).await;
    cluster.kill(DAMAGED + 1).unwrap();
    write(&contacts, 640..660).await;
    cluster.start_router(DAMAGED + 1).unwrap();
    until_equal(&contacts, &ALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn router_with_a_damaged_log_rejoins_as_a_new_member() {
    let mut cluster = Cluster::start(Path::new(PROGRAM)).unwrap();
    let contacts = cluster.router_clients();
    let pin = pb::PinRequest {
        pin: 1,
        owner: MARKER.into(),
        blocks: vec![7; HASH_BYTES],
        ..pb::PinRequest::default()
    };
    until("a pin", || async {
        for position in 0..ROUTERS_COUNT {
            if contacts.client(position).pin(pin.clone()).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    // Further frames follow the damaged one, so that it cannot be mistaken for the end. Both of its
    // copies are damaged.
    write(&contacts, 0..20).await;
    until_equal(&contacts, &ALL).await;
    cluster.kill(DAMAGED).unwrap();
    let is_marker = |bytes: &[u8], at: usize| bytes[at..].starts_with(MARKER.as_bytes());
    let damaged = flip(&cluster.data_dir(DAMAGED).join(LOG_FILE), |bytes| {
        (0..bytes.len()).filter(|at| is_marker(bytes, *at)).collect()
    });
    // It refuses to start, repeatedly; the others continue.
    for _ in 0..2 {
        assert!(cluster.start_router(DAMAGED).is_err(), "a router started from a damaged log");
    }
    write(&contacts, 20..50).await;
    // Follow the remedy in its error message.
    let mut members = MembershipClient::new(cluster.addresses(), &cluster.identity(&Role::Admin)).unwrap();
    let (router, address) = (DAMAGED as u64 + 1, cluster.addresses()[DAMAGED].clone());
    members.remove(router, |_| {}).await.unwrap();
    let away = cluster.detach_router(DAMAGED).unwrap();
    cluster.start_router(DAMAGED).unwrap();
    members.add(router, &address, false, |_| {}).await.unwrap();
    write(&contacts, 50..100).await;
    until_equal(&contacts, &ALL).await;
    assert_eq!(std::fs::read(away.join(LOG_FILE)).unwrap(), damaged, "the damaged log is kept for analysis");
    // Its vote counts again.
    cluster.kill(DAMAGED + 1).unwrap();
    write(&contacts, 100..120).await;
    cluster.start_router(DAMAGED + 1).unwrap();
    until_equal(&contacts, &ALL).await;
}
