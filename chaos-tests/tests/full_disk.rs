//! A voter with a full disk steps down and stops voting, the cluster continues, and the voter
//! recovers when it has space.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use chaos_tests::cluster::{Cluster, ROUTERS_COUNT, RouterClients};
use chaos_tests::waiting::{until, until_equal};
use kv_core::id::HASH_BYTES;
use kvfleet_client::MembershipClient;
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;

const PROGRAM: &str = env!("CARGO_BIN_EXE_chaos-router");

/// Enough for the log of a freshly started router, and little more.
const FILE_BYTES: u64 = 4 << 20;

/// Blocks of a pin: a log entry of 1.2 MiB.
const PIN_BLOCKS: usize = 65_536;

/// Writes a pin and ends it, through any router that leads.
async fn write(contacts: &RouterClients, number: u64) {
    let pin = pb::PinRequest {
        pin: number,
        owner: "test".into(),
        blocks: vec![number as u8; HASH_BYTES * PIN_BLOCKS],
        ..pb::PinRequest::default()
    };
    let unpin = pb::UnpinRequest { pin: number, owner: "test".into() };
    until("a write", || async {
        for position in 0..ROUTERS_COUNT {
            if contacts.client(position).pin(pin.clone()).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    until("a write", || async {
        for position in 0..ROUTERS_COUNT {
            if contacts.client(position).unpin(unpin.clone()).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn voter_with_a_full_disk_steps_down_and_recovers() {
    let keep_all = |config: &mut kvfleet_router::RouterConfig| config.snapshot_every_entries = 1_000_000;
    let mut cluster = Cluster::start_with(Path::new(PROGRAM), keep_all).unwrap();
    let contacts = cluster.router_clients();
    cluster.kill(0).unwrap();
    cluster.start_router_on_a_full_disk(0, FILE_BYTES).unwrap();
    let mut members = MembershipClient::new(cluster.addresses(), &cluster.identity(&Role::Admin)).unwrap();
    members.transfer_all(1, |_| {}).await.unwrap();
    // Twelve entries of 1.2 MiB exceed the remaining space; every write is accepted anyway.
    for number in 1..=12 {
        write(&contacts, number).await;
    }
    until("another leader of every group", || async {
        let groups = contacts.status(1).await?.groups;
        groups.iter().all(|group| group.leader > 1).then_some(())
    })
    .await;
    // With space, it catches up with the others.
    cluster.kill(0).unwrap();
    cluster.start_router(0).unwrap();
    until_equal(&contacts, &[0, 1, 2]).await;
}
