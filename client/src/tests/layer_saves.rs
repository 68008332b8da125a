//! Saves by layer: slices that leave while others are computed, and what is saved where they cannot.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::LeaseId;
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::{Frame, KeyForm, SliceLayout};
use kvfleet_transport::loopback::{Faults, Loopback};
use kvfleet_transport::suite::{EPOCH, MemoryService, PATIENCE, asker, frame_of, hash};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchReply, FetchRequest, LayerRoom, SaveDone, SaveOffer, SaveRequest,
    SaveSession,
};
use tokio::time::{Instant, timeout};

use super::authority::{client_on, network};
use crate::{Client, LayerSave, LayerSaveCall, LayerSaveError, SAVE_DEADLINE, SaveCall, SaveError};

const SLICES: [u32; 3] = [700, 0, 1300];

fn save_call(blocks: Range<u32>) -> LayerSaveCall {
    LayerSaveCall {
        asker: asker(7),
        address: "node:0".to_owned(),
        epoch: EPOCH,
        parent: None,
        first_offset_blocks: blocks.start,
        hashes: blocks.map(hash).collect(),
        key_form: KeyForm::Rotated,
        slice_bytes: SLICES.to_vec(),
        then_release: Vec::new(),
        deadline: SAVE_DEADLINE,
    }
}

/// Puts these layers of these blocks.
fn put(save: &mut LayerSave, blocks: Range<u32>, layers: Range<usize>) {
    for layer in layers {
        let slices: Vec<_> =
            blocks.clone().map(|block| frame_of(hash(block), &SLICES).slice(layer).unwrap()).collect();
        let slices: Vec<&[u8]> = slices.iter().map(|slice| &slice[..]).collect();
        save.put(&slices).unwrap();
    }
}

/// The node has these blocks as they were computed.
fn holds(service: &MemoryService, blocks: Range<u32>) -> bool {
    blocks.map(hash).all(|hash| service.held(hash) == Some(frame_of(hash, &SLICES)))
}

async fn ended(client: &Client) {
    timeout(PATIENCE, client.saves_ended()).await.expect("saves end");
}

#[tokio::test]
async fn slices_leave_while_others_are_computed_and_are_no_blocks_before_the_end() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    let mut save = client.save_layers(save_call(0..4)).unwrap();
    for layer in 0..3 {
        put(&mut save, 0..4, layer..layer + 1);
        timeout(PATIENCE, services[0].slices_seen(4 * (layer + 1)))
            .await
            .expect("a layer leaves once it is there");
    }
    assert!(!services[0].holds(hash(0)), "all layers are there, and nobody said that it is the end");
    save.finish().unwrap();
    ended(&client).await;
    assert!(holds(&services[0], 0..4));
    assert_eq!(services[0].released(), [LeaseId(7)]);
}

/// Slices in memory that says when it is free.
fn shared(blocks: Range<u32>, layer: usize, all: &Arc<()>) -> Vec<Bytes> {
    struct Owned(Bytes, #[expect(dead_code, reason = "counted while it lives")] Arc<()>);
    impl AsRef<[u8]> for Owned {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let slices = blocks.map(|block| frame_of(hash(block), &SLICES).slice(layer).unwrap());
    slices.map(|slice| Bytes::from_owner(Owned(slice, Arc::clone(all)))).collect()
}

#[tokio::test]
async fn slices_that_are_shared_are_the_callers_again_when_they_are_saved() {
    for streams in [true, false] {
        let (network, services) = network(1, 0);
        services[0].set_takes_layers(streams);
        let (client, all) = (client_on(&network), Arc::new(()));
        let mut save = client.save_layers(save_call(0..4)).unwrap();
        let few = save.put_shared(shared(0..3, 0, &all)).unwrap_err();
        assert!(matches!(few, LayerSaveError::Slices { layer: 0, blocks: 4, .. }), "{few:?}");
        assert!(save.put_shared(shared(0..4, 1, &all)).is_err(), "of another layer");
        assert_eq!(Arc::strong_count(&all), 1, "what was not taken is free");
        save.put_shared(shared(0..4, 0, &all)).unwrap();
        // A layer that is copied may come between.
        put(&mut save, 0..4, 1..2);
        save.put_shared(shared(0..4, 2, &all)).unwrap();
        assert!(save.put_shared(shared(0..4, 2, &all)).is_err(), "all layers were put");
        assert_eq!(Arc::strong_count(&all), 9, "a path that breaks needs them again");
        save.finish().unwrap();
        ended(&client).await;
        assert!(holds(&services[0], 0..4));
        assert_eq!(Arc::strong_count(&all), 1);
    }
}

#[tokio::test]
async fn a_save_that_is_dropped_leaves_nothing_wherever_it_is() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    for layers in 0..=3 {
        let mut save = client.save_layers(save_call(0..2)).unwrap();
        put(&mut save, 0..2, 0..layers);
        timeout(PATIENCE, services[0].slices_seen(layers * (layers + 1))).await.expect("they leave");
        drop(save);
        timeout(PATIENCE, services[0].aborts_seen(layers)).await.expect("the node hears of it");
        ended(&client).await;
        assert!(!services[0].holds(hash(0)) && services[0].released().is_empty(), "{layers} layers");
    }
}

#[tokio::test]
async fn a_path_that_breaks_on_the_way_costs_no_block() {
    for cut_after in [0, 1, 5] {
        let (network, services) = network(1, 0);
        let client = client_on(&network);
        network.set_faults(Faults { cut_after: Some(cut_after), ..Faults::default() });
        let mut save = client.save_layers(save_call(0..3)).unwrap();
        put(&mut save, 0..3, 0..3);
        timeout(PATIENCE, services[0].aborts_seen(1)).await.expect("it breaks");
        network.set_faults(Faults::default());
        save.finish().unwrap();
        ended(&client).await;
        assert!(holds(&services[0], 0..3), "cut after {cut_after}");
        assert_eq!(services[0].released(), [LeaseId(7)]);
    }
}

/// A node that is told of other saves: of each offer that comes, so many blocks at its begin are still being written.
struct Contended(MemoryService, Mutex<VecDeque<u32>>);

/// A save of what is behind those.
struct Behind(Box<dyn SaveSession>, u32);

impl SaveSession for Behind {
    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        self.0.put(frame)
    }

    fn layers(&mut self, layout: &SliceLayout) -> Option<&mut dyn LayerRoom> {
        self.0.layers(layout)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        Box::pin(async move {
            let done = self.0.finish().await;
            SaveDone { present_blocks: done.present_blocks + self.1, ..done }
        })
    }
}

impl BlockService for Contended {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        self.0.fetch(request)
    }

    fn save(&self, mut request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        let writing = self.1.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or_default();
        Box::pin(async move {
            let held = vec![false; writing as usize];
            request.hashes.drain(..held.len());
            let (offer, session) = self.0.save(request).await;
            let SaveOffer::Wanted(behind) = offer else { return (offer, session) };
            let session = session.map(|session| Box::new(Behind(session, writing)) as Box<dyn SaveSession>);
            (SaveOffer::Wanted([held, behind].concat()), session)
        })
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

/// Such a node, and what it has.
fn contended(writing: &[u32]) -> (Loopback, MemoryService) {
    let (network, inner) = (Loopback::default(), MemoryService::default());
    let node = Contended(inner.clone(), Mutex::new(writing.iter().copied().collect()));
    network.serve("node:0", Arc::new(node));
    (network, inner)
}

#[tokio::test]
async fn what_another_save_still_wrote_at_the_begin_is_offered_once_more() {
    for writing in [1, 3] {
        let (network, service) = contended(&[writing]);
        let client = client_on(&network);
        let mut save = client.save_layers(save_call(0..3)).unwrap();
        put(&mut save, 0..3, 0..1);
        timeout(PATIENCE, service.slices_seen(3 - writing as usize)).await.expect("the others leave");
        put(&mut save, 0..3, 1..3);
        save.finish().unwrap();
        ended(&client).await;
        assert!(holds(&service, 0..3), "{writing} blocks of one that was given up");
        assert_eq!(service.released(), [LeaseId(7)]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_computation_longer_than_a_save_may_take_is_saved_whole_behind_it() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    let slices = [100; 80];
    let mut save =
        client.save_layers(LayerSaveCall { slice_bytes: slices.to_vec(), ..save_call(0..2) }).unwrap();
    let frames = [0, 1].map(|block| frame_of(hash(block), &slices));
    for layer in 0..slices.len() {
        tokio::time::sleep(Duration::from_secs(4)).await; // on a clock that the test holds
        let slices = frames.each_ref().map(|frame| frame.slice(layer).unwrap());
        save.put(&slices.each_ref().map(|slice| &slice[..])).unwrap();
    }
    timeout(PATIENCE, services[0].aborts_seen(1)).await.expect("it is left");
    save.finish().unwrap();
    ended(&client).await;
    assert_eq!([0, 1].map(|block| services[0].held(hash(block))), frames.map(Some));
}

#[tokio::test(start_paused = true)]
async fn a_second_try_that_meets_the_first_one_comes_again() {
    // The node does not know yet that the first one ended.
    let (network, service) = contended(&[0, 3]);
    let client = client_on(&network);
    network.set_faults(Faults { cut_after: Some(4), ..Faults::default() });
    let mut save = client.save_layers(save_call(0..3)).unwrap();
    put(&mut save, 0..3, 0..1);
    timeout(PATIENCE, service.slices_seen(3)).await.expect("it begins");
    network.set_faults(Faults::default());
    put(&mut save, 0..3, 1..3);
    save.finish().unwrap();
    ended(&client).await;
    assert!(holds(&service, 0..3));
}

#[tokio::test(start_paused = true)]
async fn what_was_never_begun_is_not_waited_for_behind_it() {
    for is_busy in [true, false] {
        let (network, services) = network(1, 0);
        let client = client_on(&network);
        // As after another request with the same first block.
        services[0].hold(frame_of(hash(0), &SLICES));
        services[0].set_busy(is_busy.then_some(Duration::from_millis(1)));
        services[0].set_takes_layers(false);
        let mut save = client.save_layers(save_call(0..3)).unwrap();
        put(&mut save, 0..3, 0..3);
        tokio::time::sleep(Duration::from_secs(1)).await; // on a clock that the test holds
        services[0].set_busy(None);
        let begun = Instant::now();
        save.finish().unwrap();
        ended(&client).await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}, busy: {is_busy}", begun.elapsed());
        assert!(holds(&services[0], 0..3));
    }
}

#[tokio::test]
async fn saves_that_do_not_stream_keep_no_turn_from_those_that_do() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    services[0].set_takes_layers(false);
    let mut whole: Vec<_> =
        (0..4).map(|save| client.save_layers(save_call(save * 10..save * 10 + 1)).unwrap()).collect();
    timeout(PATIENCE, services[0].aborts_seen(4)).await.expect("all of them ask for layers");
    services[0].set_takes_layers(true);
    let mut save = client.save_layers(save_call(90..91)).unwrap();
    put(&mut save, 90..91, 0..1);
    timeout(PATIENCE, services[0].slices_seen(1)).await.expect("one behind them streams");
    put(&mut save, 90..91, 1..3);
    save.finish().unwrap();
    for (number, mut save) in (0..).zip(whole.drain(..)) {
        put(&mut save, number * 10..number * 10 + 1, 0..3);
        save.finish().unwrap();
    }
    ended(&client).await;
    assert!([0, 10, 20, 30, 90].into_iter().all(|block| holds(&services[0], block..block + 1)));
}

#[tokio::test]
async fn without_room_for_layers_blocks_are_saved_whole() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    services[0].set_takes_layers(false);
    let mut save = client.save_layers(save_call(0..3)).unwrap();
    put(&mut save, 0..3, 0..3);
    save.finish().unwrap();
    ended(&client).await;
    assert!(holds(&services[0], 0..3));
}

#[tokio::test]
async fn saves_that_stream_keep_no_turn_from_others() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    // More than may stream at once, none of which comes to an end.
    let mut streaming: Vec<_> =
        (0..6).map(|save| client.save_layers(save_call(save * 10..save * 10 + 1)).unwrap()).collect();
    for (number, save) in (0..).zip(&mut streaming) {
        put(save, number * 10..number * 10 + 1, 0..1);
    }
    timeout(PATIENCE, services[0].slices_seen(4)).await.expect("four of them stream");
    let mut whole = client.save_layers(save_call(90..92)).unwrap();
    put(&mut whole, 90..92, 0..3);
    whole.finish().unwrap();
    let is_there = async {
        while !holds(&services[0], 90..92) {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, is_there).await.expect("one that is computed passes those that are not");
    for (number, mut save) in (0..).zip(streaming) {
        put(&mut save, number * 10..number * 10 + 1, 1..3);
        save.finish().unwrap();
    }
    ended(&client).await;
    assert!((0..6).all(|number| holds(&services[0], number * 10..number * 10 + 1)));
}

/// A node that never answers a save.
struct Silent(MemoryService);

impl BlockService for Silent {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        self.0.fetch(request)
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        Box::pin(std::future::pending())
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_says_nothing_ends_a_save_by_its_deadline() {
    let inner = MemoryService::default();
    let hour = Duration::from_secs(3600);
    let network = Loopback::new(Faults { lost_after: hour, ..Faults::default() });
    network.serve("node:0", Arc::new(Silent(inner.clone())));
    let client = client_on(&network);
    let deadline = Duration::from_secs(3);
    let frame = frame_of(hash(0), &SLICES);
    let layered = LayerSaveCall { deadline, ..save_call(0..1) };
    let call = SaveCall {
        asker: asker(7),
        address: "node:0".to_owned(),
        epoch: EPOCH,
        parent: None,
        first_offset_blocks: 0,
        hashes: vec![hash(0)],
        frame_bytes: frame.bytes.len() as u64,
        frame: Arc::new(move |_| frame.clone()),
        deadline,
    };
    let begun = Instant::now();
    let error = client.save(&call).await.unwrap_err();
    assert!(matches!(error, SaveError::Path(_)) && begun.elapsed() == deadline, "{error}");
    says("a node that does not answer a save in time", &error, &["node:0", "3s"]);
    // From its end on, however long it was computed.
    let mut save = client.save_layers(layered).unwrap();
    put(&mut save, 0..1, 0..3);
    tokio::time::sleep(deadline * 10).await; // on a clock that the test holds
    save.finish().unwrap();
    let begun = Instant::now();
    client.saves_ended().await;
    assert_eq!(begun.elapsed(), deadline);
    assert_eq!(inner.released(), [LeaseId(7)], "its lease is not kept for it");
}
