//! Layer-wise saves: streamed slices, and whole frames if streaming is not possible.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::LeaseId;
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::{Frame, KeyForm, SliceLayout};
use kvfleet_transport::loopback::{Faults, Loopback};
use kvfleet_transport::suite::{EPOCH, MemoryService, PATIENCE, frame_of, hash, request_context};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchReply, FetchRequest, LayerBuffers, SaveDone, SaveOffer, SaveRequest,
    SaveSession,
};
use tokio::time::{Instant, timeout};

use super::authority::{client_on, network};
use crate::{Client, LayerSave, LayerSaveCall, LayerSaveError, SAVE_DEADLINE, SaveCall, SaveError};

const SLICES: [u32; 3] = [700, 0, 1300];

fn save_call(blocks: Range<u32>) -> LayerSaveCall {
    LayerSaveCall {
        asker: request_context(7),
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

/// Whether the node holds these blocks as computed.
fn holds(service: &MemoryService, blocks: Range<u32>) -> bool {
    blocks.map(hash).all(|hash| service.held(hash) == Some(frame_of(hash, &SLICES)))
}

async fn wait_for_saves(client: &Client) {
    timeout(PATIENCE, client.wait_for_saves()).await.expect("saves did not end");
}

#[tokio::test]
async fn slices_are_streamed_early_and_stored_only_at_the_end() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    let mut save = client.save_layers(save_call(0..4)).unwrap();
    for layer in 0..3 {
        put(&mut save, 0..4, layer..layer + 1);
        timeout(PATIENCE, services[0].wait_for_slices(4 * (layer + 1)))
            .await
            .expect("a layer was not sent when put");
    }
    assert!(!services[0].holds(hash(0)), "all layers were sent, but the save is not finished");
    save.finish().unwrap();
    wait_for_saves(&client).await;
    assert!(holds(&services[0], 0..4));
    assert_eq!(services[0].released(), [LeaseId(7)]);
}

/// Slices in memory that counts its references.
fn shared(blocks: Range<u32>, layer: usize, all: &Arc<()>) -> Vec<Bytes> {
    struct OwnedSlice(Bytes, #[expect(dead_code, reason = "keeps a reference count")] Arc<()>);
    impl AsRef<[u8]> for OwnedSlice {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let slices = blocks.map(|block| frame_of(hash(block), &SLICES).slice(layer).unwrap());
    slices.map(|slice| Bytes::from_owner(OwnedSlice(slice, Arc::clone(all)))).collect()
}

#[tokio::test]
async fn shared_slices_are_dropped_after_the_save() {
    for streams in [true, false] {
        let (network, services) = network(1, 0);
        services[0].set_accepts_layers(streams);
        let (client, all) = (client_on(&network), Arc::new(()));
        let mut save = client.save_layers(save_call(0..4)).unwrap();
        let few = save.put_shared(shared(0..3, 0, &all)).unwrap_err();
        assert!(matches!(few, LayerSaveError::Slices { layer: 0, blocks: 4, .. }), "{few:?}");
        assert!(save.put_shared(shared(0..4, 1, &all)).is_err(), "slices of another layer");
        assert_eq!(Arc::strong_count(&all), 1, "rejected slices are dropped");
        save.put_shared(shared(0..4, 0, &all)).unwrap();
        // A copied layer may come between shared ones.
        put(&mut save, 0..4, 1..2);
        save.put_shared(shared(0..4, 2, &all)).unwrap();
        assert!(save.put_shared(shared(0..4, 2, &all)).is_err(), "all layers were put");
        assert_eq!(Arc::strong_count(&all), 9, "slices are kept in case the path breaks");
        save.finish().unwrap();
        wait_for_saves(&client).await;
        assert!(holds(&services[0], 0..4));
        assert_eq!(Arc::strong_count(&all), 1);
    }
}

#[tokio::test]
async fn dropped_save_stores_no_block() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    for layers in 0..=3 {
        let mut save = client.save_layers(save_call(0..2)).unwrap();
        put(&mut save, 0..2, 0..layers);
        timeout(PATIENCE, services[0].wait_for_slices(layers * (layers + 1)))
            .await
            .expect("slices were not sent");
        drop(save);
        timeout(PATIENCE, services[0].wait_for_aborts(layers)).await.expect("the node did not see the abort");
        wait_for_saves(&client).await;
        assert!(!services[0].holds(hash(0)) && services[0].released().is_empty(), "{layers} layers");
    }
}

#[tokio::test]
async fn broken_path_costs_no_block() {
    for cut_after in [0, 1, 5] {
        let (network, services) = network(1, 0);
        let client = client_on(&network);
        network.set_faults(Faults { cut_after: Some(cut_after), ..Faults::default() });
        let mut save = client.save_layers(save_call(0..3)).unwrap();
        put(&mut save, 0..3, 0..3);
        timeout(PATIENCE, services[0].wait_for_aborts(1)).await.expect("the path did not break");
        network.set_faults(Faults::default());
        save.finish().unwrap();
        wait_for_saves(&client).await;
        assert!(holds(&services[0], 0..3), "cut after {cut_after}");
        assert_eq!(services[0].released(), [LeaseId(7)]);
    }
}

/// A node with concurrent saves: for each offer, the given number of leading blocks is still being
/// written by another save.
struct ContendedService(MemoryService, Mutex<VecDeque<u32>>);

/// A save of the blocks behind those.
struct ContendedSession(Box<dyn SaveSession>, u32);

impl SaveSession for ContendedSession {
    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()> {
        self.0.put(frame)
    }

    fn layer_buffers(&mut self, layout: &SliceLayout) -> Option<&mut dyn LayerBuffers> {
        self.0.layer_buffers(layout)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        Box::pin(async move {
            let done = self.0.finish().await;
            SaveDone { present_blocks: done.present_blocks + self.1, ..done }
        })
    }
}

impl BlockService for ContendedService {
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
            let session =
                session.map(|session| Box::new(ContendedSession(session, writing)) as Box<dyn SaveSession>);
            (SaveOffer::Wanted([held, behind].concat()), session)
        })
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

/// A contended node, and the memory service behind it.
fn contended_network(writing: &[u32]) -> (Loopback, MemoryService) {
    let (network, inner) = (Loopback::default(), MemoryService::default());
    let node = ContendedService(inner.clone(), Mutex::new(writing.iter().copied().collect()));
    network.serve("node:0", Arc::new(node));
    (network, inner)
}

#[tokio::test]
async fn blocks_written_by_another_save_are_offered_again() {
    for writing in [1, 3] {
        let (network, service) = contended_network(&[writing]);
        let client = client_on(&network);
        let mut save = client.save_layers(save_call(0..3)).unwrap();
        put(&mut save, 0..3, 0..1);
        timeout(PATIENCE, service.wait_for_slices(3 - writing as usize))
            .await
            .expect("the other blocks were not sent");
        put(&mut save, 0..3, 1..3);
        save.finish().unwrap();
        wait_for_saves(&client).await;
        assert!(holds(&service, 0..3), "{writing} blocks of an abandoned save");
        assert_eq!(service.released(), [LeaseId(7)]);
    }
}

#[tokio::test(start_paused = true)]
async fn save_outlasting_the_stream_timeout_sends_whole_frames() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    let slices = [100; 80];
    let mut save =
        client.save_layers(LayerSaveCall { slice_bytes: slices.to_vec(), ..save_call(0..2) }).unwrap();
    let frames = [0, 1].map(|block| frame_of(hash(block), &slices));
    for layer in 0..slices.len() {
        tokio::time::sleep(Duration::from_secs(4)).await; // on the test's paused clock
        let slices = frames.each_ref().map(|frame| frame.slice(layer).unwrap());
        save.put(&slices.each_ref().map(|slice| &slice[..])).unwrap();
    }
    timeout(PATIENCE, services[0].wait_for_aborts(1)).await.expect("the stream was not abandoned");
    save.finish().unwrap();
    wait_for_saves(&client).await;
    assert_eq!([0, 1].map(|block| services[0].held(hash(block))), frames.map(Some));
}

#[tokio::test(start_paused = true)]
async fn retry_during_abandoned_stream_is_repeated() {
    // The node has not yet noticed that the first save ended.
    let (network, service) = contended_network(&[0, 3]);
    let client = client_on(&network);
    network.set_faults(Faults { cut_after: Some(4), ..Faults::default() });
    let mut save = client.save_layers(save_call(0..3)).unwrap();
    put(&mut save, 0..3, 0..1);
    timeout(PATIENCE, service.wait_for_slices(3)).await.expect("the stream did not start");
    network.set_faults(Faults::default());
    put(&mut save, 0..3, 1..3);
    save.finish().unwrap();
    wait_for_saves(&client).await;
    assert!(holds(&service, 0..3));
}

#[tokio::test(start_paused = true)]
async fn save_without_stream_has_no_retry_delay() {
    for is_busy in [true, false] {
        let (network, services) = network(1, 0);
        let client = client_on(&network);
        // As after another request with the same first block.
        services[0].hold(frame_of(hash(0), &SLICES));
        services[0].set_busy(is_busy.then_some(Duration::from_millis(1)));
        services[0].set_accepts_layers(false);
        let mut save = client.save_layers(save_call(0..3)).unwrap();
        put(&mut save, 0..3, 0..3);
        tokio::time::sleep(Duration::from_secs(1)).await; // on the test's paused clock
        services[0].set_busy(None);
        let begun = Instant::now();
        save.finish().unwrap();
        wait_for_saves(&client).await;
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}, busy: {is_busy}", begun.elapsed());
        assert!(holds(&services[0], 0..3));
    }
}

#[tokio::test]
async fn non_streaming_saves_hold_no_streaming_permit() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    services[0].set_accepts_layers(false);
    let mut whole: Vec<_> =
        (0..4).map(|save| client.save_layers(save_call(save * 10..save * 10 + 1)).unwrap()).collect();
    timeout(PATIENCE, services[0].wait_for_aborts(4)).await.expect("not all saves offered layers");
    services[0].set_accepts_layers(true);
    let mut save = client.save_layers(save_call(90..91)).unwrap();
    put(&mut save, 90..91, 0..1);
    timeout(PATIENCE, services[0].wait_for_slices(1)).await.expect("a later save did not stream");
    put(&mut save, 90..91, 1..3);
    save.finish().unwrap();
    for (number, mut save) in (0..).zip(whole.drain(..)) {
        put(&mut save, number * 10..number * 10 + 1, 0..3);
        save.finish().unwrap();
    }
    wait_for_saves(&client).await;
    assert!([0, 10, 20, 30, 90].into_iter().all(|block| holds(&services[0], block..block + 1)));
}

#[tokio::test]
async fn blocks_are_saved_whole_if_node_refuses_layers() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    services[0].set_accepts_layers(false);
    let mut save = client.save_layers(save_call(0..3)).unwrap();
    put(&mut save, 0..3, 0..3);
    save.finish().unwrap();
    wait_for_saves(&client).await;
    assert!(holds(&services[0], 0..3));
}

#[tokio::test]
async fn streaming_saves_do_not_block_whole_saves() {
    let (network, services) = network(1, 0);
    let client = client_on(&network);
    // More saves than may stream concurrently, and none of them ends.
    let mut streaming: Vec<_> =
        (0..6).map(|save| client.save_layers(save_call(save * 10..save * 10 + 1)).unwrap()).collect();
    for (number, save) in (0..).zip(&mut streaming) {
        put(save, number * 10..number * 10 + 1, 0..1);
    }
    timeout(PATIENCE, services[0].wait_for_slices(4)).await.expect("fewer than four saves stream");
    let mut whole = client.save_layers(save_call(90..92)).unwrap();
    put(&mut whole, 90..92, 0..3);
    whole.finish().unwrap();
    let is_there = async {
        while !holds(&services[0], 90..92) {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, is_there).await.expect("a complete save was blocked by incomplete ones");
    for (number, mut save) in (0..).zip(streaming) {
        put(&mut save, number * 10..number * 10 + 1, 1..3);
        save.finish().unwrap();
    }
    wait_for_saves(&client).await;
    assert!((0..6).all(|number| holds(&services[0], number * 10..number * 10 + 1)));
}

/// A node that never answers a save.
struct SilentService(MemoryService);

impl BlockService for SilentService {
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
async fn deadline_ends_a_save_to_a_silent_node() {
    let inner = MemoryService::default();
    let hour = Duration::from_secs(3600);
    let network = Loopback::new(Faults { timeout: hour, ..Faults::default() });
    network.serve("node:0", Arc::new(SilentService(inner.clone())));
    let client = client_on(&network);
    let deadline = Duration::from_secs(3);
    let frame = frame_of(hash(0), &SLICES);
    let layered = LayerSaveCall { deadline, ..save_call(0..1) };
    let call = SaveCall {
        asker: request_context(7),
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
    // The deadline counts from its end, regardless of the time to compute.
    let mut save = client.save_layers(layered).unwrap();
    put(&mut save, 0..1, 0..3);
    tokio::time::sleep(deadline * 10).await; // on the test's paused clock
    save.finish().unwrap();
    let begun = Instant::now();
    client.wait_for_saves().await;
    assert_eq!(begun.elapsed(), deadline);
    assert_eq!(inner.released(), [LeaseId(7)], "the lease was not released");
}
