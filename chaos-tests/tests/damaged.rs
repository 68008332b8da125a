//! A byte flipped on one router's disk: the cluster goes on, and the router ends with the state of the others.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use chaos_tests::cluster::{Cluster, Contacts, ROUTERS_COUNT};
use chaos_tests::waiting::{until, until_equal};
use kvfleet_client::Members;
use kvfleet_proto::pb;

const PROGRAM: &str = env!("CARGO_BIN_EXE_chaos-router");

/// Every router.
const ALL: [usize; ROUTERS_COUNT] = [0, 1, 2];

/// The router whose disk it is.
const DAMAGED: usize = 0;

/// Stands in the log where nothing else does.
const MARKER: &str = "an owner nobody else would have";

/// The first file of its Raft log.
const LOG_FILE: &str = "raft-log/0000000000000001";

/// Writes quotas, through whichever router leads.
async fn write(contacts: &Contacts, tenants: std::ops::Range<u32>) {
    for tenant in tenants {
        let quota = pb::SetQuotaRequest { tenant, bytes: u64::from(tenant), lift: false };
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
    assert!(!places.is_empty(), "there is something to damage in {}", path.display());
    places.into_iter().for_each(|place| bytes[place] ^= 0x10);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_snapshot_is_sent_again_and_the_router_votes_again() {
    let mut cluster = Cluster::start(Path::new(PROGRAM)).unwrap();
    let contacts = cluster.contacts();
    write(&contacts, 0..600).await;
    until("a snapshot, and entries that only it holds", || async {
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
    // It has its vote again: without it, the two that are left could not go on.
    let withheld = cluster.data_dir(DAMAGED).join("withheld-votes");
    // CRC and an empty map.
    until("the vote", || async { (std::fs::read(&withheld).ok()?.len() == 5).then_some(()) }).await;
    cluster.kill(DAMAGED + 1).unwrap();
    write(&contacts, 640..660).await;
    cluster.start_router(DAMAGED + 1).unwrap();
    until_equal(&contacts, &ALL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_with_a_damaged_log_comes_back_as_a_new_member() {
    let mut cluster = Cluster::start(Path::new(PROGRAM)).unwrap();
    let contacts = cluster.contacts();
    let pin =
        pb::PinRequest { pin: 1, owner: MARKER.into(), blocks: vec![7; 16], ..pb::PinRequest::default() };
    until("a pin", || async {
        for position in 0..ROUTERS_COUNT {
            if contacts.client(position).pin(pin.clone()).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    // So that frames follow it: both of its copies are damaged here, and it must not be taken for the end.
    write(&contacts, 0..20).await;
    until_equal(&contacts, &ALL).await;
    cluster.kill(DAMAGED).unwrap();
    let is_marker = |bytes: &[u8], at: usize| bytes[at..].starts_with(MARKER.as_bytes());
    let damaged = flip(&cluster.data_dir(DAMAGED).join(LOG_FILE), |bytes| {
        (0..bytes.len()).filter(|at| is_marker(bytes, *at)).collect()
    });
    // It refuses to start, as often as it is asked to; the others go on.
    for _ in 0..2 {
        assert!(cluster.start_router(DAMAGED).is_err(), "a router started from a damaged log");
    }
    write(&contacts, 20..50).await;
    // What its message says is what to do.
    let mut members = Members::new(cluster.addresses(), &cluster.identity().unwrap()).unwrap();
    let (router, address) = (DAMAGED as u64 + 1, cluster.addresses()[DAMAGED].clone());
    members.remove(router, |_| {}).await.unwrap();
    let away = cluster.empty_router(DAMAGED).unwrap();
    cluster.start_router(DAMAGED).unwrap();
    members.add(router, &address, false, |_| {}).await.unwrap();
    write(&contacts, 50..100).await;
    until_equal(&contacts, &ALL).await;
    assert_eq!(std::fs::read(away.join(LOG_FILE)).unwrap(), damaged, "it stays for whoever comes to look");
    // Its vote counts again.
    cluster.kill(DAMAGED + 1).unwrap();
    write(&contacts, 100..120).await;
    cluster.start_router(DAMAGED + 1).unwrap();
    until_equal(&contacts, &ALL).await;
}
