//! Layer-wise saves through the bounce buffer: its contents over time, and peers that break the
//! rules.

use std::os::fd::AsFd;
use std::sync::Mutex;

use bytes::Bytes;
use kvfleet_proto::frame::{Frame, SliceLayout};

use super::super::mapping::memory_file;
use super::super::packet::{BounceRange, ClientPacket, NodePacket, Welcome};
use super::hostile::{FakeNode, PART, RawConnection, good_welcome, welcomed, welcomed_client};
use super::*;
use crate::suite::{ComputedBlocks, PATIENCE, done, frame_of, save_request};
use crate::{LayerBuffers, LayeredSaveOutcome, PathError, SaveAnswer, SaveDone, wire};

async fn within_patience<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("the operation must complete in time")
}

/// A node that only copies, with this frame limit, and a path to it. Both have timeouts longer than
/// any test.
async fn node(frame_bytes_max: u32) -> (ShmTestNode, Arc<MemoryService>, Arc<dyn Path>) {
    let service = Arc::new(MemoryService::default());
    let stall_timeout = 4 * PATIENCE;
    let config = ShmServerConfig { frame_bytes_max, stall_timeout, ..server_config() };
    let node = ShmTestNode::start(service.clone(), None, config, true);
    let dialer = ShmDialer::new(ShmConfig { stall_timeout, ..ShmConfig::new(node.dir()) });
    let path = dialer.dial(ADDRESS.to_owned()).await.unwrap();
    (node, service, path)
}

fn request(hashes: &[kv_core::id::BlockHash], slices: &[u32]) -> SaveRequest {
    let frame_bytes = frame_of(hash(0), slices).bytes.len() as u64;
    SaveRequest { frame_bytes, ..save_request(hashes) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_larger_than_the_bounce_buffer_succeeds() {
    let slices = [1 << 20; 3];
    let (_node, service, path) = node(4 << 20).await;
    let blocks = hashes(4);
    assert!(u64::from(slices[0]) * 12 > bounce_part_bytes(4 << 20));
    let mut computed = ComputedBlocks::new(&blocks, &slices);
    let saved = within_patience(path.save_layers(request(&blocks, &slices), &mut computed)).await.unwrap();
    assert_eq!(done(saved.answer().expect("it must save by layer")).stored_blocks, 4);
    assert!(blocks.iter().all(|block| service.held(*block) == Some(frame_of(*block, &slices))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_waiting_for_a_layer_holds_no_bounce_space() {
    let slices = [3 << 20, 100, 50];
    let (_node, service, path) = node(4 << 20).await;
    let blocks = hashes(2);
    let mut some = ComputedBlocks::new(&blocks, &slices).with_layers(1);
    let gate = some.gate();
    let waiting = path.save_layers(request(&blocks, &slices), &mut some);
    let others = async {
        service.wait_for_slices(2).await;
        // Each frame is half of the bounce buffer, and the received slices exceed the other half.
        let large = frame_of(hash(9), &[(4 << 20) - 4096]);
        assert_eq!(2 * large.bytes.len().next_multiple_of(4096) as u64, bounce_part_bytes(4 << 20));
        assert!(2 * u64::from(slices[0]) > bounce_part_bytes(4 << 20) / 2);
        for first in [10, 20] {
            let more = [hash(first), hash(first + 1)];
            let request = SaveRequest { frame_bytes: 4 << 20, ..save_request(&more) };
            let source = |position: usize| frame_of(more[position], &[(4 << 20) - 4096]);
            assert_eq!(done(path.save(request, &source).await.unwrap()).stored_blocks, 2);
        }
        gate.add_permits(3);
    };
    let (saved, ()) = within_patience(async { tokio::join!(waiting, others) }).await;
    assert_eq!(done(saved.unwrap().answer().expect("it must save by layer")).stored_blocks, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_of_the_saves_of_a_client_may_wait_for_their_layers() {
    let (_node, service, path) = node(1 << 20).await;
    let slices = [1000, 1000];
    let mut waiting = Vec::new();
    for number in 0..SAVES_MAX / 2 {
        let (path, block) = (Arc::clone(&path), hash(u32::try_from(number).unwrap()));
        waiting.push(tokio::spawn(async move {
            let mut some = ComputedBlocks::new(&[block], &slices).with_layers(1);
            path.save_layers(request(&[block], &slices), &mut some).await
        }));
        within_patience(service.wait_for_slices(number + 1)).await;
    }
    let block = hash(99);
    let mut all = ComputedBlocks::new(&[block], &slices);
    let over = within_patience(path.save_layers(request(&[block], &slices), &mut all)).await.unwrap();
    assert_eq!(over, LayeredSaveOutcome::NotStreamed, "this one must be saved as whole frames");
    let source = |_| frame_of(block, &slices);
    let whole = within_patience(path.save(request(&[block], &slices), &source)).await.unwrap();
    assert_eq!(done(whole).stored_blocks, 1);
    waiting.into_iter().for_each(|saving| saving.abort());
    within_patience(service.wait_for_aborts(SAVES_MAX / 2)).await;
    let block = hash(100);
    let mut all = ComputedBlocks::new(&[block], &slices);
    let next = within_patience(path.save_layers(request(&[block], &slices), &mut all)).await.unwrap();
    assert_eq!(done(next.answer().expect("a slot must be free again")).stored_blocks, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_pieces_end_only_their_save() {
    let (_node, service, mut raw) = welcomed_client(server_config()).await;
    let part = bounce_part_bytes(server_config().frame_bytes_max);
    let head = SliceLayout::new(&[100, 50]).unwrap().head_bytes();
    let head = u32::try_from(head).unwrap();
    let at = |at, len| BounceRange { at, len };
    let there = |len| at(0, len);
    let cases: [(&str, Vec<BounceRange>, u32); 8] = [
        ("a slice that is cut", vec![there(99)], 0),
        ("one and a half", vec![there(150)], 0),
        ("an empty piece", vec![there(0)], 0),
        ("a piece behind the part", vec![at(part - 50, 100)], 0),
        ("a piece beyond all numbers", vec![at(u64::MAX - 10, 100)], 0),
        ("fewer slices than blocks", vec![there(250)], 1),
        ("fewer heads than blocks", vec![there(200), there(100), there(head)], 3),
        ("more than the heads", vec![there(200), there(100), there(2 * head), there(head)], 3),
    ];
    for ((what, places, taken), op) in cases.into_iter().zip(1..) {
        let ask = wire::save_layers_to_pb(&request(&[hash(7), hash(8)], &[100, 50]), &[100, 50]);
        raw.send_to_node(&ClientPacket::Begin { op, request: ask });
        let heard = raw.receive_from_node().await;
        let Some(NodePacket::Offer { offer, .. }) = heard else { panic!("{what}: {heard:?}") };
        assert!(offer.is_by_layer, "{what}");
        places.into_iter().for_each(|place| raw.send_to_node(&ClientPacket::Put { op, places: vec![place] }));
        raw.send_to_node(&ClientPacket::Finish { op });
        for _ in 0..taken {
            assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op, frames: 1 }), "{what}");
        }
        assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op }), "{what}");
    }
    assert!(!service.holds(hash(7)) && !service.holds(hash(8)));
    // Valid pieces are accepted, but bytes that are not slices of these blocks are refused by their
    // heads.
    let ask = wire::save_layers_to_pb(&request(&[hash(7)], &[100]), &[100]);
    raw.send_to_node(&ClientPacket::Begin { op: 30, request: ask });
    assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Offer { .. })));
    let head = SliceLayout::new(&[100]).unwrap().head_bytes();
    let head = u32::try_from(head).unwrap();
    [100, head]
        .into_iter()
        .for_each(|len| raw.send_to_node(&ClientPacket::Put { op: 30, places: vec![there(len)] }));
    raw.send_to_node(&ClientPacket::Finish { op: 30 });
    for _ in 0..2 {
        assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op: 30, frames: 1 }));
    }
    let Some(NodePacket::Done { done, .. }) = raw.receive_from_node().await else {
        panic!("the save must end")
    };
    assert_eq!((done.stored_blocks, done.refused_blocks), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_silent_between_layers_times_out() {
    let config = ShmServerConfig { stall_timeout: Duration::from_secs(1), ..server_config() };
    let (_node, service, mut raw) = welcomed_client(config).await;
    let ask = wire::save_layers_to_pb(&request(&[hash(7)], &[100, 50]), &[100, 50]);
    raw.send_to_node(&ClientPacket::Begin { op: 1, request: ask });
    // Sent at once: the node's timeout starts with its offer, and this end may be slow to receive
    // that.
    raw.send_to_node(&ClientPacket::Put { op: 1, places: vec![BounceRange { at: 0, len: 100 }] });
    let heard = raw.receive_from_node().await;
    assert!(matches!(heard, Some(NodePacket::Offer { .. })), "{heard:?}");
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op: 1, frames: 1 }));
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op: 1 }));
    within_patience(service.wait_for_aborts(1)).await;
}

/// Accepts one block and writes it when the test says so, in a copy that cannot be interrupted.
/// Records the order of calls.
#[derive(Clone)]
struct SlowService {
    calls: Arc<Mutex<Vec<&'static str>>>,
    copies: tokio::sync::watch::Sender<bool>,
    gate: Arc<Mutex<std::sync::mpsc::Receiver<()>>>,
    slot: Vec<u8>,
}

impl SlowService {
    fn note(&self, what: &'static str) {
        self.calls.lock().unwrap().push(what);
    }

    fn put_slowly(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.copies.send_replace(true);
            // Other tasks of this thread continue elsewhere.
            tokio::task::block_in_place(|| self.gate.lock().unwrap().recv_timeout(PATIENCE)).unwrap();
            self.note("put");
        })
    }
}

impl BlockService for SlowService {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        unreachable!("this service serves no fetch")
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        let session: Box<dyn SaveSession> = Box::new(self.clone());
        Box::pin(async { (SaveOffer::Wanted(vec![true]), Some(session)) })
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        self.note("released");
        Box::pin(async {})
    }
}

impl SaveSession for SlowService {
    fn put(&mut self, _: Frame) -> BoxFuture<'_, ()> {
        self.put_slowly()
    }

    fn layer_buffers(&mut self, _: &SliceLayout) -> Option<&mut dyn LayerBuffers> {
        Some(self)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        unreachable!("the save is cancelled")
    }
}

impl LayerBuffers for SlowService {
    fn slice(&mut self, _: usize, _: usize) -> Option<&mut [u8]> {
        Some(&mut self.slot)
    }

    fn slice_written(&mut self, _: usize) {}

    fn put_head(&mut self, _: Bytes) -> BoxFuture<'_, ()> {
        self.put_slowly()
    }
}

/// By layer or as a frame: a release does not overtake a running copy, and the end is not reported
/// before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_save_cancelled_during_a_copy_ends_with_the_copy() {
    for is_by_layer in [true, false] {
        let (go_on, goes_on) = std::sync::mpsc::channel();
        let (order, copies) = (Arc::default(), tokio::sync::watch::Sender::new(false));
        let slow =
            SlowService { calls: order, copies, gate: Arc::new(Mutex::new(goes_on)), slot: vec![0; 1 << 20] };
        let node = ShmTestNode::start(
            Arc::new(slow.clone()),
            Some(BumpArena::new(ARENA_BYTES)),
            server_config(),
            true,
        );
        let mut raw = welcomed(&node).await;
        let whole = wire::save_to_pb(&request(&[hash(7)], &[1 << 20]));
        let by_layer = wire::save_layers_to_pb(&request(&[hash(7)], &[1 << 20]), &[1 << 20]);
        raw.send_to_node(&ClientPacket::Begin { op: 1, request: if is_by_layer { by_layer } else { whole } });
        assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Offer { .. })));
        let head = u32::try_from(SliceLayout::new(&[1 << 20]).unwrap().head_bytes()).unwrap();
        raw.send_to_node(&ClientPacket::Put { op: 1, places: vec![BounceRange { at: 0, len: 1 << 20 }] });
        if is_by_layer {
            assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op: 1, frames: 1 }));
            raw.send_to_node(&ClientPacket::Put { op: 1, places: vec![BounceRange { at: 0, len: head }] });
            assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op: 1, frames: 1 }));
        }
        within_patience(slow.copies.subscribe().wait_for(|copies| *copies)).await.unwrap();
        raw.send_to_node(&ClientPacket::Cancel { op: 1 });
        raw.send_to_node(&ClientPacket::Begin { op: 2, request: wire::release_to_pb(LeaseId(1)) });
        for op in 2..6 {
            let heard = raw.receive_from_node().await;
            assert!(
                matches!(heard, Some(NodePacket::Acknowledged { op: noted, .. }) if noted == op),
                "{heard:?}"
            );
            raw.send_to_node(&ClientPacket::Begin { op: op + 1, request: wire::ping_to_pb() });
        }
        assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Acknowledged { op: 6, .. })));
        assert_eq!(*slow.calls.lock().unwrap(), [""; 0]);
        go_on.send(()).unwrap();
        assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op: 1 }));
        let all = async {
            while slow.calls.lock().unwrap().len() < 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        within_patience(all).await;
        assert_eq!(slow.calls.lock().unwrap()[..2], ["put", "released"]);
    }
}

/// A path to a fake node, and the fake node's end.
async fn forged() -> (Arc<dyn Path>, RawConnection) {
    forged_with(PART).await
}

/// The same with bounce buffer parts of this size.
async fn forged_with(part: u64) -> (Arc<dyn Path>, RawConnection) {
    let forger = FakeNode::new();
    let (tray, arena) = (memory_file(2 * part).unwrap(), memory_file(PART).unwrap());
    let welcome = Welcome { bounce_in_bytes: part, bounce_out_bytes: part, ..good_welcome() };
    let welcome = NodePacket::Welcome(welcome).encode();
    forger.welcome(&welcome, &[tray.as_fd(), arena.as_fd()]).await.unwrap()
}

/// The result of a layer-wise save of one block at a node that sends this offer and then these
/// packets.
async fn layered_save_result(
    offer: impl FnOnce(u64) -> NodePacket,
    then: &[fn(u64) -> NodePacket],
) -> (RawConnection, Result<LayeredSaveOutcome, PathError>) {
    let (path, mut raw) = forged().await;
    let saving = tokio::spawn(async move {
        let mut computed = ComputedBlocks::new(&[hash(7)], &[100, 50]);
        path.save_layers(request(&[hash(7)], &[100, 50]), &mut computed).await
    });
    let ClientPacket::Begin { op, .. } = raw.receive_from_client().await else { panic!("it must ask first") };
    raw.send_to_client(&offer(op));
    then.iter().for_each(|packet| raw.send_to_client(&packet(op)));
    let saved = within_patience(saving).await.unwrap();
    (raw, saved)
}

fn offer(is_by_layer: bool) -> impl FnOnce(u64) -> NodePacket {
    let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(vec![true]));
    offer.is_by_layer = is_by_layer;
    move |op| NodePacket::Offer { op, offer }
}

fn all_done(op: u64) -> NodePacket {
    NodePacket::Done { op, done: wire::done_to_pb(&SaveDone { stored_blocks: 1, ..SaveDone::default() }) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_to_a_layered_save_are_followed_and_invalid_ones_refused() {
    let (mut raw, plain) = layered_save_result(offer(false), &[all_done]).await;
    assert_eq!(
        plain.unwrap(),
        LayeredSaveOutcome::NotStreamed,
        "frames are offered later to a node without space for layers"
    );
    assert!(
        matches!(raw.receive_from_client().await, ClientPacket::Finish { .. }),
        "it must say that no frames follow"
    );
    let (_, busy) = layered_save_result(
        |op| {
            let offer = SaveOffer::Busy { retry_after: Duration::from_millis(3) };
            NodePacket::Offer { op, offer: wire::offer_to_pb(&offer) }
        },
        &[],
    )
    .await;
    assert_eq!(busy.unwrap(), LayeredSaveOutcome::NotStreamed);
    let ended: fn(u64) -> NodePacket = |op| NodePacket::Ended { op };
    let (_, ended) = layered_save_result(offer(true), &[ended]).await;
    assert!(matches!(ended, Err(PathError::Broken { .. })), "{ended:?}");
    let early: fn(u64) -> NodePacket = |op| NodePacket::End { op, reason: 0 };
    let (_, early) = layered_save_result(offer(true), &[early]).await;
    assert!(matches!(early, Err(PathError::Protocol { .. })), "{early:?}");
    let (_, none) = layered_save_result(|op| NodePacket::Ended { op }, &[]).await;
    assert!(matches!(none, Err(PathError::Broken { .. })), "{none:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_layer_support_is_asked_once() {
    let (path, mut raw) = forged().await;
    assert!(path.streams_saves());
    let saving = {
        let path = Arc::clone(&path);
        tokio::spawn(async move {
            let mut computed = ComputedBlocks::new(&[hash(7)], &[100, 50]);
            path.save_layers(request(&[hash(7)], &[100, 50]), &mut computed).await
        })
    };
    let ClientPacket::Begin { op, .. } = raw.receive_from_client().await else { panic!("it must ask first") };
    raw.send_to_client(&offer(false)(op));
    assert_eq!(raw.receive_from_client().await, ClientPacket::Finish { op });
    // As a node does that misses the wanted frame.
    raw.send_to_client(&NodePacket::Ended { op });
    assert_eq!(within_patience(saving).await.unwrap().unwrap(), LayeredSaveOutcome::NotStreamed);
    assert!(path.failure().is_none() && !path.streams_saves());
}

/// The node has not taken any piece of the layer-wise saves yet.
#[tokio::test]
async fn a_whole_frame_fits_beside_all_layered_saves() {
    // Too long for an eager save.
    let frame = 4 << 20;
    let (path, mut raw) = forged_with(2 * frame).await;
    // Two pieces of each of them would be twice the bounce buffer.
    let slices = [2 << 20; 2];
    let streaming: Vec<_> = (0..4)
        .map(|number| {
            let (path, blocks) = (Arc::clone(&path), [hash(2 * number), hash(2 * number + 1)]);
            tokio::spawn(async move {
                let mut computed = ComputedBlocks::new(&blocks, &slices);
                path.save_layers(request(&blocks, &slices), &mut computed).await.map(drop)
            })
        })
        .collect();
    let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(vec![true; 2]));
    offer.is_by_layer = true;
    let mut pieces = Vec::new();
    for _ in 0..1000 {
        match raw.poll_client_packet() {
            Some(ClientPacket::Begin { op, .. }) => {
                raw.send_to_client(&NodePacket::Offer { op, offer: offer.clone() });
            }
            Some(ClientPacket::Put { places, .. }) => pieces.extend(places),
            Some(other) => panic!("{other:?}"),
            None => tokio::task::yield_now().await,
        }
    }
    assert!(!pieces.is_empty() && pieces.iter().all(|place| place.at + u64::from(place.len) <= frame));
    let whole = [u32::try_from(frame).unwrap() - 4096];
    let saving = {
        let (path, request) = (Arc::clone(&path), request(&[hash(9)], &whole));
        tokio::spawn(async move { path.save(request, &|_| frame_of(hash(9), &whole)).await.map(drop) })
    };
    let ClientPacket::Begin { op, .. } = raw.receive_from_client().await else {
        panic!("it is too long for an eager save")
    };
    let wanted = wire::offer_to_pb(&SaveOffer::Wanted(vec![true]));
    raw.send_to_client(&NodePacket::Offer { op, offer: wanted });
    let put = raw.receive_from_client().await;
    assert!(matches!(&put, ClientPacket::Put { op: of, .. } if *of == op), "{put:?}");
    streaming.into_iter().chain([saving]).for_each(|task| task.abort());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layered_and_whole_saves_run_side_by_side() {
    let slices = [2 << 20, (2 << 20) - 4096];
    let (_node, service, path) = node(4 << 20).await;
    let mut saving = Vec::new();
    for number in 0..8 {
        let (path, blocks) = (Arc::clone(&path), [hash(2 * number), hash(2 * number + 1)]);
        saving.push(tokio::spawn(async move {
            let mut computed = ComputedBlocks::new(&blocks, &slices);
            let saved = if number < 4 {
                path.save_layers(request(&blocks, &slices), &mut computed).await.unwrap().answer()
            } else {
                let source = |position| computed.frame(position);
                Some(path.save(request(&blocks, &slices), &source).await.unwrap())
            };
            done(saved.expect("it must save by layer")).stored_blocks
        }));
    }
    for saving in saving {
        assert_eq!(within_patience(saving).await.unwrap(), 2);
    }
    assert!((0..16).all(|number| service.held(hash(number)) == Some(frame_of(hash(number), &slices))));
}

/// A save yields its thread even if the node answers at once, or the bounce buffer holds all of it.
#[tokio::test]
async fn a_save_yields_its_thread_between_copies() {
    const BLOCKS: usize = 64;
    let (slices, blocks) = ([128 << 10], hashes(BLOCKS as u32));
    for is_by_layer in [true, false] {
        let (path, mut raw) = forged_with(64 << 20).await;
        let (blocks, request) = (blocks.clone(), request(&blocks, &slices));
        let saving = tokio::spawn(async move {
            let mut computed = ComputedBlocks::new(&blocks, &slices);
            if is_by_layer {
                path.save_layers(request, &mut computed).await.map(drop)
            } else {
                path.save(request, &|position| computed.frame(position)).await.map(drop)
            }
        });
        let ClientPacket::Begin { op, .. } = raw.receive_from_client().await else {
            panic!("it must ask first")
        };
        let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(vec![true; BLOCKS]));
        offer.is_by_layer = is_by_layer;
        raw.send_to_client(&NodePacket::Offer { op, offer });
        let (mut puts, mut most_at_once) = (0, 0);
        while puts < BLOCKS {
            let there = std::iter::from_fn(|| raw.poll_client_packet()).count();
            puts += there;
            most_at_once = most_at_once.max(there);
            tokio::task::yield_now().await;
        }
        assert!(most_at_once <= 4, "{most_at_once} of {puts} without a yield, by layer: {is_by_layer}");
        saving.abort();
    }
}

/// Replies come as fast as pieces, and a save has thousands of them: unread ones must not
/// accumulate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_of_many_short_layers_keeps_few_replies() {
    let layers = 4000;
    let (path, mut raw) = forged().await;
    let saving = tokio::spawn(async move {
        let slices = vec![1; layers];
        let mut computed = ComputedBlocks::new(&[hash(7)], &slices);
        path.save_layers(request(&[hash(7)], &slices), &mut computed).await
    });
    let ClientPacket::Begin { op, .. } = raw.receive_from_client().await else { panic!("it must ask first") };
    raw.send_to_client(&offer(true)(op));
    let mut pieces = 0;
    loop {
        match raw.receive_from_client().await {
            ClientPacket::Put { places, .. } => {
                assert_eq!(places.len(), 1);
                pieces += 1;
                raw.send_to_client(&NodePacket::Taken { op, frames: 1 });
            }
            ClientPacket::Finish { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pieces, layers + 1, "each layer, and the head");
    raw.send_to_client(&all_done(op));
    assert!(matches!(
        within_patience(saving).await.unwrap(),
        Ok(LayeredSaveOutcome::Answered(SaveAnswer::Done(_)))
    ));
}
