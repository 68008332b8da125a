//! Fetch: several sources, gaps, faults, and the deadline.

use std::time::Duration;

use kv_core::content;

use kv_core::id::{Category, Epoch, LeaseId, NodeId, RequestId, TenantId, Tier};
use kvfleet_errors_doc::says;
use kvfleet_proto::pb;
use kvfleet_transport::MissReason;
use kvfleet_transport::loopback::Faults;
use kvfleet_transport::suite::{EPOCH, IDENTITY, PATIENCE, frame, hash, hashes};

use super::authority::{CONTENT_BYTES, client_on, network};
use crate::{FetchCall, FetchError, FetchOutcome, HeldLease, SourceMiss};

pub(super) fn source(node: u32, start_blocks: u32, len_blocks: u32) -> pb::Source {
    pb::Source { node, epoch: EPOCH.0, address: format!("node:{node}"), start_blocks, len_blocks, tier: 1 }
}

pub(super) fn call(blocks: u32, sources: Vec<pb::Source>) -> FetchCall {
    FetchCall {
        lease: LeaseId(5),
        request: RequestId(5),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        hashes: hashes(blocks),
        resident_blocks: 0,
        sources,
        deadline: PATIENCE,
        class: None,
    }
}

fn miss(node: u32, first_missing_block: u32, reason: MissReason) -> SourceMiss {
    let address = format!("node:{node}");
    SourceMiss { node: NodeId(node), address, first_missing_block, reason, cause: None }
}

fn held(node: u32) -> HeldLease {
    HeldLease { address: format!("node:{node}"), lease: LeaseId(5) }
}

/// Checks invariants of every outcome: contiguous, complete, correct.
fn check(outcome: &FetchOutcome) {
    let mut bytes = 0;
    for (number, block) in (0..).zip(&outcome.blocks) {
        assert_eq!(block.frame.hash, hash(number));
        assert!(content::matches(hash(number), &block.frame.payload()), "wrong bytes were returned");
        bytes += block.frame.bytes.len() as u64;
    }
    assert_eq!(outcome.bytes, bytes);
    assert!(outcome.received_bytes >= bytes);
}

#[tokio::test]
async fn sources_are_joined_in_order() {
    let (network, _) = network(3, 10);
    let sources = vec![source(0, 0, 4), source(1, 4, 1), source(2, 5, 4)];
    let outcome = client_on(&network).fetch(call(10, sources)).await.unwrap();
    check(&outcome);
    assert_eq!(outcome.blocks.len(), 9);
    assert_eq!(outcome.received_bytes, outcome.bytes);
    assert!(outcome.blocks.iter().all(|block| block.tier == Tier::Dram));
    let nodes: Vec<u32> = outcome.blocks.iter().map(|block| block.node.0).collect();
    assert_eq!(nodes, [0, 0, 0, 0, 1, 2, 2, 2, 2]);
    assert_eq!(outcome.misses, []);
    assert_eq!(outcome.leases, [held(0), held(1), held(2)]);
}

#[tokio::test]
async fn gap_ends_the_prefix() {
    let (network, services) = network(3, 10);
    services[1].forget(hash(5));
    let sources = vec![source(0, 0, 4), source(1, 4, 3), source(2, 7, 3)];
    let outcome = client_on(&network).fetch(call(10, sources)).await.unwrap();
    check(&outcome);
    assert_eq!(outcome.blocks.len(), 5);
    assert!(outcome.received_bytes > outcome.bytes, "blocks behind the gap are received but not used");
    assert_eq!(outcome.misses, [miss(1, 5, MissReason::NotHeld)]);
    assert_eq!(outcome.leases.len(), 3, "the source behind the gap is leased too");
}

#[tokio::test]
async fn fetch_ended_busy_holds_its_lease() {
    let (network, services) = network(1, 4);
    services[0].end_with(MissReason::Busy);
    let outcome = client_on(&network).fetch(call(4, vec![source(0, 0, 4)])).await.unwrap();
    assert_eq!((outcome.misses, outcome.leases.len()), (vec![miss(0, 0, MissReason::Busy)], 1));
}

#[tokio::test]
async fn every_miss_reason_is_reported() {
    let (network, services) = network(1, 4);
    let client = client_on(&network);
    let reasons = async |call| client.fetch(call).await.unwrap().misses;

    services[0].set_busy(Some(Duration::from_millis(1)));
    let outcome = client.fetch(call(4, vec![source(0, 0, 4)])).await.unwrap();
    assert_eq!((outcome.misses, outcome.leases), (vec![miss(0, 0, MissReason::Busy)], vec![]));
    services[0].set_busy(None);

    services[0].set_epoch(Epoch(99));
    assert_eq!(reasons(call(4, vec![source(0, 0, 4)])).await, [miss(0, 0, MissReason::StaleEpoch)]);
    services[0].set_epoch(EPOCH);

    let mut other = call(4, vec![source(0, 0, 4)]);
    other.identity.0[0] ^= 1;
    assert_eq!(reasons(other).await, [miss(0, 0, MissReason::IdentityDiffers)]);

    let absent = pb::Source { address: "nowhere:1".into(), ..source(0, 0, 4) };
    let outcome = client.fetch(call(4, vec![absent])).await.unwrap();
    assert_eq!(outcome.misses[0].reason, MissReason::NodeLost);
    says("a source that is not there", &outcome.misses[0], &[]);
    assert_eq!(outcome.leases, [], "no lease at an unreachable node");

    let imposter = kvfleet_proto::frame::Frame { hash: hash(1), ..frame(hash(9), CONTENT_BYTES) };
    services[0].hold(imposter);
    let outcome = client.fetch(call(4, vec![source(0, 0, 4)])).await.unwrap();
    assert_eq!(outcome.blocks.len(), 1, "another block under this hash ends the prefix");
    assert_eq!(outcome.misses, [miss(0, 1, MissReason::Corrupt)]);
    assert_eq!(outcome.wrong_blocks, 1);
}

#[tokio::test]
async fn one_deadline_limits_all_sources() {
    let (network, services) = network(2, 8);
    services[1].set_gate(0);
    let sources = vec![source(0, 0, 4), source(1, 4, 4)];
    let call = FetchCall { deadline: Duration::from_secs(2), ..call(8, sources) };
    let outcome = client_on(&network).fetch(call).await.unwrap();
    check(&outcome);
    assert_eq!(outcome.blocks.len(), 4, "blocks that arrived in time are kept");
    assert_eq!(outcome.misses, [miss(1, 4, MissReason::TooLate)]);
}

#[tokio::test]
async fn restarted_node_is_found_again() {
    let (network, services) = network(1, 4);
    let client = client_on(&network);
    network.stop("node:0");
    let outcome = client.fetch(call(4, vec![source(0, 0, 4)])).await.unwrap();
    let cause = outcome.misses[0].cause.clone();
    assert!(cause.is_some());
    assert_eq!(outcome.misses, [SourceMiss { cause, ..miss(0, 0, MissReason::NodeLost) }]);
    services[0].set_epoch(Epoch(EPOCH.0 + 1));
    network.serve("node:0", std::sync::Arc::new(services[0].clone()));
    let again = pb::Source { epoch: EPOCH.0 + 1, ..source(0, 0, 4) };
    let outcome = client.fetch(call(4, vec![again])).await.unwrap();
    assert_eq!(outcome.blocks.len(), 4);
}

#[tokio::test]
async fn faults_never_hand_out_wrong_bytes() {
    let (network, _) = network(3, 12);
    let client = client_on(&network);
    let (mut whole, mut wrong) = (0, 0);
    for seed in 0..300 {
        println!("seed {seed}");
        let cut_after = (seed % 3 == 0).then_some(2);
        network.set_faults(Faults { seed, corrupt: 0.1, reorder: 0.1, cut_after, ..Faults::default() });
        let sources = vec![source(0, 0, 4), source(1, 4, 4), source(2, 8, 4)];
        let outcome = client.fetch(call(12, sources)).await.unwrap();
        check(&outcome);
        assert_eq!(outcome.blocks.len() == 12, outcome.misses.is_empty());
        whole += u32::from(outcome.misses.is_empty());
        wrong += outcome.wrong_blocks;
    }
    assert!(whole > 0 && wrong > 100, "{whole} whole fetches, {wrong} wrong blocks seen");
}

#[tokio::test]
async fn resident_blocks_are_not_fetched() {
    let (network, _) = network(1, 6);
    let client = client_on(&network);
    let behind = FetchCall { resident_blocks: 2, ..call(6, vec![source(0, 2, 3)]) };
    let outcome = client.fetch(behind).await.unwrap();
    let fetched: Vec<_> = outcome.blocks.iter().map(|block| block.frame.verify(IDENTITY, hash(2))).collect();
    assert!(fetched.len() == 3 && fetched[0].is_ok() && fetched[1].is_err(), "blocks 2 to 4");
    let before = FetchCall { resident_blocks: 2, ..call(6, vec![source(0, 0, 3)]) };
    let error = client.fetch(before).await.unwrap_err();
    assert!(matches!(error, FetchError::Sources { expected: 2, .. }), "{error}");
}

#[tokio::test]
async fn inconsistent_sources_are_refused() {
    let (network, _) = network(1, 4);
    let client = client_on(&network);
    for sources in [
        vec![source(0, 1, 2)],
        vec![source(0, 0, 5)],
        vec![source(0, 0, 2), source(0, 3, 1)],
        vec![source(0, 0, u32::MAX), source(0, u32::MAX, u32::MAX)],
    ] {
        let error = client.fetch(call(4, sources)).await.unwrap_err();
        assert!(matches!(error, FetchError::Sources { .. }), "{error}");
    }
    let nothing = client.fetch(call(4, vec![])).await.unwrap();
    assert!(nothing.blocks.is_empty() && nothing.misses.is_empty());
}

#[tokio::test]
async fn leases_are_released_where_they_are_held() {
    let (network, services) = network(2, 4);
    let client = client_on(&network);
    let outcome = client.fetch(call(4, vec![source(0, 0, 2), source(1, 2, 2)])).await.unwrap();
    assert!(client.release(&outcome.leases).await.is_empty());
    assert!(services.iter().all(|service| service.released() == [LeaseId(5)]));
    network.stop("node:1");
    let failed = client.release(&outcome.leases).await;
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].0, held(1));
}
