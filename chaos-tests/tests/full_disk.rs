//! Routers with full disks: the cluster goes on if a majority has room, and waits if none has. Each
//! continues by itself when there is room.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use chaos_tests::cluster::{Cluster, ROUTERS_COUNT, RouterClients};
use chaos_tests::waiting::{until, until_equal};
use kv_core::id::HASH_BYTES;
use kvfleet_client::MembershipClient;
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;
use tonic::Code;

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

/// A cluster without snapshots, so that its logs only grow.
fn cluster() -> Cluster {
    let keep_all = |config: &mut kvfleet_router::RouterConfig| config.snapshot_every_entries = 1_000_000;
    Cluster::start_with(Path::new(PROGRAM), keep_all).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn voter_with_a_full_disk_catches_up_by_itself() {
    let mut cluster = cluster();
    let contacts = cluster.router_clients();
    cluster.kill(0).unwrap();
    cluster.start_router_on_a_full_disk(0, FILE_BYTES).unwrap();
    let mut members = MembershipClient::new(cluster.addresses(), &cluster.identity(&Role::Admin)).unwrap();
    members.transfer_all(1, |_| {}).await.unwrap();
    // Twelve entries of 1.2 MiB exceed the remaining space; every write is accepted anyway.
    for number in 1..=12 {
        write(&contacts, number).await;
    }
    // With space, it catches up with the others.
    cluster.make_room(0).unwrap();
    until_equal(&contacts, &[0, 1, 2]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_with_full_disks_wait_and_recover_by_themselves() {
    let mut cluster = cluster();
    let contacts = cluster.router_clients();
    for position in 0..ROUTERS_COUNT {
        cluster.kill(position).unwrap();
    }
    for position in 0..ROUTERS_COUNT {
        cluster.start_router_on_a_full_disk(position, FILE_BYTES).unwrap();
    }
    // No log has room for an entry of this size, and writes end with the reason.
    let refusal = until("a write that is refused for want of room", || async {
        for position in 0..ROUTERS_COUNT {
            let pin = pb::PinRequest {
                pin: 2,
                owner: "test".into(),
                blocks: vec![7; HASH_BYTES * PIN_BLOCKS],
                ..pb::PinRequest::default()
            };
            let refused = contacts.client(position).pin(pin).await.err();
            if let Some(refused) = refused.filter(|refused| refused.code() == Code::ResourceExhausted) {
                return Some(refused.message().to_owned());
            }
        }
        None
    })
    .await;
    assert!(refusal.contains("the disk of this router is full"), "{refusal}");
    for position in 0..ROUTERS_COUNT {
        assert!(cluster.is_running(position), "router {position} ended");
    }
    for position in 0..ROUTERS_COUNT {
        cluster.make_room(position).unwrap();
    }
    write(&contacts, 1).await;
    until_equal(&contacts, &[0, 1, 2]).await;
}
