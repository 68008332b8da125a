//! The store when weights change between a request and its answer, or while readers wait.
#![allow(clippy::unwrap_used)]

use kv_core::id::{CallerId, Category, Epoch, Generation, LeaseId, TenantId, Tier};
use kv_core::tier::Requester;
use kvfleet_proto::frame::{KeyForm, seal};
use kvfleet_transport::{BlockService, FetchAnswer, MissReason, SaveOffer};
use tokio::time::timeout;

use super::tests::*;
use super::{FetchPlan, OfferPlan, StoreRequest};

fn requester(lease: u64) -> Requester {
    Requester {
        lease: LeaseId(lease),
        caller: CallerId(1),
        tenant: TenantId(0),
        category: Category::default(),
    }
}

async fn join(bench: &StoreFixture, epoch: u64, generation: u32) {
    let (epoch, generation) = (Epoch(epoch), Generation(generation));
    bench
        .store
        .request(|reply| StoreRequest::Joined { epoch, shards: 1, generation, reply })
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn generation_is_checked_again_when_a_request_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    bench.saved(1, 0..1).await;
    join(&bench, 1, 1).await;
    let (asker, generation, hashes) = (requester(2), Generation(0), vec![hash(0)]);
    let fetched =
        bench.store.request(|reply| StoreRequest::Fetch { asker, generation, hashes, reply }).await.unwrap();
    assert!(matches!(fetched, FetchPlan::GenerationMismatch), "{fetched:?}");
    let offer = |reply| StoreRequest::Offer {
        asker: requester(3),
        generation: Generation(0),
        parent: None,
        first_offset_blocks: 0,
        hashes: vec![hash(0)],
        frame_bytes: 100,
        reply,
    };
    let offered = bench.store.request(offer).await.unwrap();
    assert!(matches!(offered, OfferPlan::GenerationMismatch), "{offered:?}");
    assert_eq!(bench.status().await.leases, 0, "neither request holds a lease");
}

#[tokio::test]
async fn save_started_before_a_weights_change_stores_no_later_block() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    let (offer, session) = bench.service.save(save_request(1, 0..2)).await;
    let (SaveOffer::Wanted(_), Some(mut session)) = (offer, session) else { panic!("not wanted") };
    session.put(frame(0, BLOCK_BYTES)).await;
    join(&bench, 1, 1).await;
    session.put(frame(1, BLOCK_BYTES)).await;
    let done = session.finish().await;
    assert_eq!((done.stored_blocks, done.refused_blocks), (1, 1));
    bench.service.release(LeaseId(1)).await;
    bench.wait_until("its space is free", |status, used| used == 0 && status.tiers[0].blocks == 0).await;
}

/// One hash has a block of earlier weights with a waiting reader, and a current block: each reader
/// gets its own bytes.
#[tokio::test]
async fn readers_of_one_hash_under_two_weights_get_their_own_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let bench = fixture_with_block_on_ssd(&config(dir.path(), 1, 8)).await;
    let room = bench.take_all_slots();
    let mut old = bench.service.fetch(fetch_request(4, 0..1)).await;
    assert_eq!(old.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd] });
    join(&bench, 0, 1).await;
    bench.service.release(LeaseId(3)).await;
    drop(room);
    let now = identity().with_generation(Generation(1));
    let sealed = |number: u64| {
        let fill = vec![0xee; BLOCK_BYTES];
        let length = [u32::try_from(BLOCK_BYTES).unwrap()];
        seal(now, hash(number), KeyForm::Rotated, &length, &fill).unwrap()
    };
    let mut request = save_request(5, 0..1);
    request.context.identity = now;
    let (offer, session) = bench.service.save(request).await;
    let (SaveOffer::Wanted(_), Some(mut session)) = (offer, session) else { panic!("not wanted") };
    session.put(sealed(0)).await;
    assert_eq!(session.finish().await.stored_blocks, 1);
    bench.service.release(LeaseId(5)).await;
    let mut request = fetch_request(6, 0..1);
    request.context.identity = now;
    let mut new = bench.service.fetch(request).await;
    let (old, new) = (old.frames.next(), new.frames.next());
    let (old, new) = (timeout(PATIENCE, old).await.unwrap(), timeout(PATIENCE, new).await.unwrap());
    assert_eq!(old.expect("it is loaded").bytes, frame(0, BLOCK_BYTES).bytes);
    assert_eq!(new.expect("it is there").bytes, sealed(0).bytes);
    let (answer, _) = bench.fetch(7, 0..1).await;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::GenerationDiffers });
}
