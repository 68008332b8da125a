//! Save: awaited and in the background, and rejections of the queue.

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_transport::loopback::Faults;
use kvfleet_transport::suite::{EPOCH, done, frame, hash, request_context};
use kvfleet_transport::{PathError, SaveAnswer, SaveRefusal};

use super::authority::{CONTENT_BYTES, client_on, network};
use crate::{BackgroundSave, HeldLease, SAVE_DEADLINE, SAVE_QUEUE_CALLS_MAX, SaveCall, SaveError};

fn call(blocks: std::ops::Range<u32>) -> SaveCall {
    SaveCall {
        asker: request_context(7),
        address: "node:0".to_owned(),
        epoch: EPOCH,
        parent: None,
        first_offset_blocks: blocks.start,
        hashes: blocks.clone().map(hash).collect(),
        frame_bytes: frame(hash(0), CONTENT_BYTES).bytes.len() as u64,
        frame: Arc::new(move |position| {
            frame(hash(blocks.start + u32::try_from(position).unwrap()), CONTENT_BYTES)
        }),
        deadline: SAVE_DEADLINE,
    }
}

#[tokio::test]
async fn awaited_save_returns_its_announcement_batch() {
    let (network, services) = network(1, 2);
    let client = client_on(&network);
    let result = done(client.save(&call(0..5)).await.unwrap());
    assert_eq!((result.stored_blocks, result.present_blocks), (3, 2));
    assert_eq!(result.visible_at.unwrap().seq.0, 1);
    assert!(services[0].holds(hash(4)));
    assert!(services[0].released().is_empty(), "the lease stays until released");
}

#[tokio::test]
async fn refusals_are_answers_and_losses_are_errors() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    assert!(matches!(client.save(&call(0..0)).await, Err(SaveError::Empty)));
    services[0].set_refuse(Some(SaveRefusal::Quota));
    assert_eq!(client.save(&call(0..2)).await.unwrap(), SaveAnswer::Refused(SaveRefusal::Quota));
    let retry_after = Duration::from_millis(4);
    services[0].set_busy(Some(retry_after));
    assert_eq!(client.save(&call(0..2)).await.unwrap(), SaveAnswer::Busy { retry_after });
    services[0].set_busy(None);
    services[0].set_refuse(None);
    network.set_faults(Faults { cut_after: Some(1), ..Faults::default() });
    let error = client.save(&call(0..2)).await.unwrap_err();
    assert!(matches!(error, SaveError::Path(PathError::Broken { .. })), "{error}");
    network.stop("node:0");
    let error = client.save(&call(0..2)).await.unwrap_err();
    assert!(matches!(error, SaveError::Path(PathError::Unreachable { .. })), "{error}");
}

#[tokio::test]
async fn background_save_releases_its_leases() {
    let (network, services) = network(2, 0);
    let client = client_on(&network);
    let elsewhere = HeldLease { address: "node:1".to_owned(), lease: LeaseId(7) };
    let save = BackgroundSave { call: call(0..3), then_release: vec![elsewhere] };
    client.save_in_background(save).unwrap();
    client.wait_for_saves().await;
    assert!(services[0].holds(hash(2)));
    assert_eq!(services[0].released(), [LeaseId(7)]);
    assert_eq!(services[1].released(), [LeaseId(7)]);
}

#[tokio::test]
async fn full_queue_refuses_at_once_and_recovers() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    services[0].set_gate(0);
    let save = || BackgroundSave { call: call(0..1), then_release: vec![] };
    for _ in 0..SAVE_QUEUE_CALLS_MAX {
        client.save_in_background(save()).unwrap();
    }
    let busy = client.save_in_background(save()).unwrap_err();
    assert_eq!(busy.bytes, frame(hash(0), CONTENT_BYTES).bytes.len());
    services[0].set_gate(10_000);
    client.wait_for_saves().await;
    client.save_in_background(save()).unwrap();
    client.wait_for_saves().await;
    assert!(services[0].holds(hash(0)));
}
