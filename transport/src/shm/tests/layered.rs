//! Saves by layer through the tray: what is in it when, and ends that do not keep to the rules.

use std::os::fd::AsFd;
use std::sync::Mutex;

use bytes::Bytes;
use kvfleet_proto::frame::{Frame, SliceLayout};

use super::super::map::memory_file;
use super::super::packet::{ToClient, ToNode, TrayPlace, Welcome};
use super::hostile::{Forger, PART, Raw, good_welcome, raw_client, welcomed};
use super::*;
use crate::suite::{Computed, PATIENCE, done, frame_of, save_request};
use crate::{LayerRoom, PathError, SaveAnswer, SaveDone, Streamed, wire};

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it comes")
}

/// A node that only copies, whose frames have this length at most, and a path to it. Both wait longer than any test.
async fn node(frame_bytes_max: u32) -> (Node, Arc<MemoryService>, Arc<dyn Path>) {
    let service = Arc::new(MemoryService::default());
    let stall_timeout = 4 * PATIENCE;
    let config = ShmServerConfig { frame_bytes_max, stall_timeout, ..server_config() };
    let node = Node::start(service.clone(), None, config, true);
    let dialer = ShmDialer::new(ShmConfig { stall_timeout, ..ShmConfig::new(node.dir()) });
    let path = dialer.dial(ADDRESS.to_owned()).await.unwrap();
    (node, service, path)
}

fn request(hashes: &[kv_core::id::BlockHash], slices: &[u32]) -> SaveRequest {
    let frame_bytes = frame_of(hash(0), slices).bytes.len() as u64;
    SaveRequest { frame_bytes, ..save_request(hashes) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_larger_than_the_tray_goes_through_it() {
    let slices = [1 << 20; 3];
    let (_node, service, path) = node(4 << 20).await;
    let blocks = hashes(4);
    assert!(u64::from(slices[0]) * 12 > tray_part_bytes(4 << 20));
    let mut computed = Computed::new(&blocks, &slices);
    let saved = soon(path.save_layers(request(&blocks, &slices), &mut computed)).await.unwrap();
    assert_eq!(done(saved.answer().expect("it streams")).stored_blocks, 4);
    assert!(blocks.iter().all(|block| service.held(*block) == Some(frame_of(*block, &slices))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_layer_holds_nothing_of_the_tray() {
    let slices = [3 << 20, 100, 50];
    let (_node, service, path) = node(4 << 20).await;
    let blocks = hashes(2);
    let mut some = Computed::new(&blocks, &slices).until(1);
    let gate = some.gate();
    let waiting = path.save_layers(request(&blocks, &slices), &mut some);
    let others = async {
        service.slices_seen(2).await;
        // Each of them is half of the tray, and what has come is more than the other half.
        let large = frame_of(hash(9), &[(4 << 20) - 4096]);
        assert_eq!(2 * large.bytes.len().next_multiple_of(4096) as u64, tray_part_bytes(4 << 20));
        assert!(2 * u64::from(slices[0]) > tray_part_bytes(4 << 20) / 2);
        for first in [10, 20] {
            let more = [hash(first), hash(first + 1)];
            let request = SaveRequest { frame_bytes: 4 << 20, ..save_request(&more) };
            let source = |position: usize| frame_of(more[position], &[(4 << 20) - 4096]);
            assert_eq!(done(path.save(request, &source).await.unwrap()).stored_blocks, 2);
        }
        gate.add_permits(3);
    };
    let (saved, ()) = soon(async { tokio::join!(waiting, others) }).await;
    assert_eq!(done(saved.unwrap().answer().expect("it streams")).stored_blocks, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_of_the_saves_of_a_client_may_wait_for_their_layers() {
    let (_node, service, path) = node(1 << 20).await;
    let slices = [1000, 1000];
    let mut waiting = Vec::new();
    for number in 0..SAVES_MAX / 2 {
        let (path, block) = (Arc::clone(&path), hash(u32::try_from(number).unwrap()));
        waiting.push(tokio::spawn(async move {
            let mut some = Computed::new(&[block], &slices).until(1);
            path.save_layers(request(&[block], &slices), &mut some).await
        }));
        soon(service.slices_seen(number + 1)).await;
    }
    let block = hash(99);
    let mut all = Computed::new(&[block], &slices);
    let over = soon(path.save_layers(request(&[block], &slices), &mut all)).await.unwrap();
    assert_eq!(over, Streamed::Nothing, "this one comes as whole frames");
    let source = |_| frame_of(block, &slices);
    let whole = soon(path.save(request(&[block], &slices), &source)).await.unwrap();
    assert_eq!(done(whole).stored_blocks, 1);
    waiting.into_iter().for_each(|saving| saving.abort());
    soon(service.aborts_seen(SAVES_MAX / 2)).await;
    let block = hash(100);
    let mut all = Computed::new(&[block], &slices);
    let next = soon(path.save_layers(request(&[block], &slices), &mut all)).await.unwrap();
    assert_eq!(done(next.answer().expect("there is a place again")).stored_blocks, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_that_are_not_what_was_announced_end_their_save_alone() {
    let (_node, service, mut raw) = raw_client(server_config()).await;
    let part = tray_part_bytes(server_config().frame_bytes_max);
    let head = SliceLayout::new(&[100, 50]).unwrap().head_bytes();
    let head = u32::try_from(head).unwrap();
    let at = |at, len| TrayPlace { at, len };
    let there = |len| at(0, len);
    let cases: [(&str, Vec<TrayPlace>, u32); 8] = [
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
        raw.say(&ToNode::Ask { op, request: ask });
        let heard = raw.hear_node().await;
        let Some(ToClient::Offer { offer, .. }) = heard else { panic!("{what}: {heard:?}") };
        assert!(offer.is_by_layer, "{what}");
        places.into_iter().for_each(|place| raw.say(&ToNode::Put { op, places: vec![place] }));
        raw.say(&ToNode::Finish { op });
        for _ in 0..taken {
            assert_eq!(raw.hear_node().await, Some(ToClient::Taken { op, frames: 1 }), "{what}");
        }
        assert_eq!(raw.hear_node().await, Some(ToClient::Ended { op }), "{what}");
    }
    assert!(!service.holds(hash(7)) && !service.holds(hash(8)));
    // And what is right goes on: bytes that are no slices of these blocks are refused by their heads.
    let ask = wire::save_layers_to_pb(&request(&[hash(7)], &[100]), &[100]);
    raw.say(&ToNode::Ask { op: 30, request: ask });
    assert!(matches!(raw.hear_node().await, Some(ToClient::Offer { .. })));
    let head = SliceLayout::new(&[100]).unwrap().head_bytes();
    let head = u32::try_from(head).unwrap();
    [100, head].into_iter().for_each(|len| raw.say(&ToNode::Put { op: 30, places: vec![there(len)] }));
    raw.say(&ToNode::Finish { op: 30 });
    for _ in 0..2 {
        assert_eq!(raw.hear_node().await, Some(ToClient::Taken { op: 30, frames: 1 }));
    }
    let Some(ToClient::Done { done, .. }) = raw.hear_node().await else { panic!("the save ends") };
    assert_eq!((done.stored_blocks, done.refused_blocks), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_quiet_between_layers_is_not_waited_for() {
    let config = ShmServerConfig { stall_timeout: Duration::from_secs(1), ..server_config() };
    let (_node, service, mut raw) = raw_client(config).await;
    let ask = wire::save_layers_to_pb(&request(&[hash(7)], &[100, 50]), &[100, 50]);
    raw.say(&ToNode::Ask { op: 1, request: ask });
    // At once: the node waits for it from its offer on, and this end may be slow to hear that.
    raw.say(&ToNode::Put { op: 1, places: vec![TrayPlace { at: 0, len: 100 }] });
    let heard = raw.hear_node().await;
    assert!(matches!(heard, Some(ToClient::Offer { .. })), "{heard:?}");
    assert_eq!(raw.hear_node().await, Some(ToClient::Taken { op: 1, frames: 1 }));
    assert_eq!(raw.hear_node().await, Some(ToClient::Ended { op: 1 }));
    soon(service.aborts_seen(1)).await;
}

/// Takes one block, and puts it when the test says so, in a copy that nothing interrupts. Notes what it was asked, in order.
#[derive(Clone)]
struct Slow {
    order: Arc<Mutex<Vec<&'static str>>>,
    copies: tokio::sync::watch::Sender<bool>,
    goes_on: Arc<Mutex<std::sync::mpsc::Receiver<()>>>,
    slot: Vec<u8>,
}

impl Slow {
    fn note(&self, what: &'static str) {
        self.order.lock().unwrap().push(what);
    }

    fn put_slowly(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.copies.send_replace(true);
            // Other tasks of this thread go on elsewhere.
            tokio::task::block_in_place(|| self.goes_on.lock().unwrap().recv_timeout(PATIENCE)).unwrap();
            self.note("put");
        })
    }
}

impl BlockService for Slow {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        unreachable!("nobody fetches")
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

impl SaveSession for Slow {
    fn put(&mut self, _: Frame) -> BoxFuture<'_, ()> {
        self.put_slowly()
    }

    fn layers(&mut self, _: &SliceLayout) -> Option<&mut dyn LayerRoom> {
        Some(self)
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, SaveDone> {
        unreachable!("it is given up")
    }
}

impl LayerRoom for Slow {
    fn slice(&mut self, _: usize, _: usize) -> Option<&mut [u8]> {
        Some(&mut self.slot)
    }

    fn came(&mut self, _: usize) {}

    fn put_head(&mut self, _: Bytes) -> BoxFuture<'_, ()> {
        self.put_slowly()
    }
}

/// Whatever comes, by layer or as a frame: a release does not overtake what is still copied, and nobody hears of an end before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_save_that_is_given_up_in_a_copy_ends_with_the_copy() {
    for is_by_layer in [true, false] {
        let (go_on, goes_on) = std::sync::mpsc::channel();
        let (order, copies) = (Arc::default(), tokio::sync::watch::Sender::new(false));
        let slow = Slow { order, copies, goes_on: Arc::new(Mutex::new(goes_on)), slot: vec![0; 1 << 20] };
        let node =
            Node::start(Arc::new(slow.clone()), Some(BumpArena::new(ARENA_BYTES)), server_config(), true);
        let mut raw = welcomed(&node).await;
        let whole = wire::save_to_pb(&request(&[hash(7)], &[1 << 20]));
        let by_layer = wire::save_layers_to_pb(&request(&[hash(7)], &[1 << 20]), &[1 << 20]);
        raw.say(&ToNode::Ask { op: 1, request: if is_by_layer { by_layer } else { whole } });
        assert!(matches!(raw.hear_node().await, Some(ToClient::Offer { .. })));
        let head = u32::try_from(SliceLayout::new(&[1 << 20]).unwrap().head_bytes()).unwrap();
        raw.say(&ToNode::Put { op: 1, places: vec![TrayPlace { at: 0, len: 1 << 20 }] });
        if is_by_layer {
            assert_eq!(raw.hear_node().await, Some(ToClient::Taken { op: 1, frames: 1 }));
            raw.say(&ToNode::Put { op: 1, places: vec![TrayPlace { at: 0, len: head }] });
            assert_eq!(raw.hear_node().await, Some(ToClient::Taken { op: 1, frames: 1 }));
        }
        soon(slow.copies.subscribe().wait_for(|copies| *copies)).await.unwrap();
        raw.say(&ToNode::Cancel { op: 1 });
        raw.say(&ToNode::Ask { op: 2, request: wire::release_to_pb(LeaseId(1)) });
        for op in 2..6 {
            let heard = raw.hear_node().await;
            assert!(matches!(heard, Some(ToClient::Noted { op: noted, .. }) if noted == op), "{heard:?}");
            raw.say(&ToNode::Ask { op: op + 1, request: wire::ping_to_pb() });
        }
        assert!(matches!(raw.hear_node().await, Some(ToClient::Noted { op: 6, .. })));
        assert_eq!(*slow.order.lock().unwrap(), [""; 0]);
        go_on.send(()).unwrap();
        assert_eq!(raw.hear_node().await, Some(ToClient::Ended { op: 1 }));
        let all = async {
            while slow.order.lock().unwrap().len() < 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon(all).await;
        assert_eq!(slow.order.lock().unwrap()[..2], ["put", "released"]);
    }
}

/// A path to a forger, and the forger's end.
async fn forged() -> (Arc<dyn Path>, Raw) {
    forged_with(PART).await
}

/// The same with a tray whose parts have so many bytes.
async fn forged_with(part: u64) -> (Arc<dyn Path>, Raw) {
    let forger = Forger::new();
    let (tray, arena) = (memory_file(2 * part).unwrap(), memory_file(PART).unwrap());
    let welcome = Welcome { tray_in_bytes: part, tray_out_bytes: part, ..good_welcome() };
    let welcome = ToClient::Welcome(welcome).encode();
    forger.welcome(&welcome, &[tray.as_fd(), arena.as_fd()]).await.unwrap()
}

/// What a save of one block by layer comes to at a node that answers its offer so, and then says these packets.
async fn saved(
    offer: impl FnOnce(u64) -> ToClient,
    then: &[fn(u64) -> ToClient],
) -> (Raw, Result<Streamed, PathError>) {
    let (path, mut raw) = forged().await;
    let saving = tokio::spawn(async move {
        let mut computed = Computed::new(&[hash(7)], &[100, 50]);
        path.save_layers(request(&[hash(7)], &[100, 50]), &mut computed).await
    });
    let ToNode::Ask { op, .. } = raw.hear_client().await else { panic!("it asks first") };
    raw.tell(&offer(op));
    then.iter().for_each(|packet| raw.tell(&packet(op)));
    let saved = soon(saving).await.unwrap();
    (raw, saved)
}

fn offer(is_by_layer: bool) -> impl FnOnce(u64) -> ToClient {
    let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(vec![true]));
    offer.is_by_layer = is_by_layer;
    move |op| ToClient::Offer { op, offer }
}

fn all_done(op: u64) -> ToClient {
    ToClient::Done { op, done: wire::done_to_pb(&SaveDone { stored_blocks: 1, ..SaveDone::default() }) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_makes_of_slices_is_its_word_and_nonsense_is_none() {
    let (mut raw, plain) = saved(offer(false), &[all_done]).await;
    assert_eq!(
        plain.unwrap(),
        Streamed::Nothing,
        "a node that has no room for layers is offered frames later"
    );
    assert!(matches!(raw.hear_client().await, ToNode::Finish { .. }), "it says that none come now");
    let (_, busy) = saved(
        |op| {
            let offer = SaveOffer::Busy { retry_after: Duration::from_millis(3) };
            ToClient::Offer { op, offer: wire::offer_to_pb(&offer) }
        },
        &[],
    )
    .await;
    assert_eq!(busy.unwrap(), Streamed::Nothing);
    let ended: fn(u64) -> ToClient = |op| ToClient::Ended { op };
    let (_, ended) = saved(offer(true), &[ended]).await;
    assert!(matches!(ended, Err(PathError::Broken { .. })), "{ended:?}");
    let early: fn(u64) -> ToClient = |op| ToClient::End { op, reason: 0 };
    let (_, early) = saved(offer(true), &[early]).await;
    assert!(matches!(early, Err(PathError::Protocol { .. })), "{early:?}");
    let (_, none) = saved(|op| ToClient::Ended { op }, &[]).await;
    assert!(matches!(none, Err(PathError::Broken { .. })), "{none:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_knows_of_frames_only_is_asked_for_layers_once() {
    let (path, mut raw) = forged().await;
    assert!(path.streams_saves());
    let saving = {
        let path = Arc::clone(&path);
        tokio::spawn(async move {
            let mut computed = Computed::new(&[hash(7)], &[100, 50]);
            path.save_layers(request(&[hash(7)], &[100, 50]), &mut computed).await
        })
    };
    let ToNode::Ask { op, .. } = raw.hear_client().await else { panic!("it asks first") };
    raw.tell(&offer(false)(op));
    assert_eq!(raw.hear_client().await, ToNode::Finish { op });
    // As one does that misses the frame it wanted.
    raw.tell(&ToClient::Ended { op });
    assert_eq!(soon(saving).await.unwrap().unwrap(), Streamed::Nothing);
    assert!(path.failure().is_none() && !path.streams_saves());
}

/// A node that has taken nothing of what streams yet.
#[tokio::test]
async fn a_whole_frame_finds_its_place_beside_all_saves_that_stream() {
    // Too long to go with its offer.
    let frame = 4 << 20;
    let (path, mut raw) = forged_with(2 * frame).await;
    // Two pieces of each of them would be twice the tray.
    let slices = [2 << 20; 2];
    let streaming: Vec<_> = (0..4)
        .map(|number| {
            let (path, blocks) = (Arc::clone(&path), [hash(2 * number), hash(2 * number + 1)]);
            tokio::spawn(async move {
                let mut computed = Computed::new(&blocks, &slices);
                path.save_layers(request(&blocks, &slices), &mut computed).await.map(drop)
            })
        })
        .collect();
    let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(vec![true; 2]));
    offer.is_by_layer = true;
    let mut pieces = Vec::new();
    for _ in 0..1000 {
        match raw.there() {
            Some(ToNode::Ask { op, .. }) => raw.tell(&ToClient::Offer { op, offer: offer.clone() }),
            Some(ToNode::Put { places, .. }) => pieces.extend(places),
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
    let ToNode::Ask { op, .. } = raw.hear_client().await else { panic!("it is too long to go at once") };
    let wanted = wire::offer_to_pb(&SaveOffer::Wanted(vec![true]));
    raw.tell(&ToClient::Offer { op, offer: wanted });
    let put = raw.hear_client().await;
    assert!(matches!(&put, ToNode::Put { op: of, .. } if *of == op), "{put:?}");
    streaming.into_iter().chain([saving]).for_each(|task| task.abort());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_that_stream_and_whole_ones_pass_each_other_in_the_tray() {
    let slices = [2 << 20, (2 << 20) - 4096];
    let (_node, service, path) = node(4 << 20).await;
    let mut saving = Vec::new();
    for number in 0..8 {
        let (path, blocks) = (Arc::clone(&path), [hash(2 * number), hash(2 * number + 1)]);
        saving.push(tokio::spawn(async move {
            let mut computed = Computed::new(&blocks, &slices);
            let saved = if number < 4 {
                path.save_layers(request(&blocks, &slices), &mut computed).await.unwrap().answer()
            } else {
                let source = |position| computed.frame(position);
                Some(path.save(request(&blocks, &slices), &source).await.unwrap())
            };
            done(saved.expect("it streams")).stored_blocks
        }));
    }
    for saving in saving {
        assert_eq!(soon(saving).await.unwrap(), 2);
    }
    assert!((0..16).all(|number| service.held(hash(number)) == Some(frame_of(hash(number), &slices))));
}

/// A node that answers at once, or as here has room for all of it, is no reason to keep a thread from what else runs on it.
#[tokio::test]
async fn who_saves_leaves_its_thread_to_others_while_it_copies() {
    const BLOCKS: usize = 64;
    let (slices, blocks) = ([128 << 10], hashes(BLOCKS as u32));
    for is_by_layer in [true, false] {
        let (path, mut raw) = forged_with(64 << 20).await;
        let (blocks, request) = (blocks.clone(), request(&blocks, &slices));
        let saving = tokio::spawn(async move {
            let mut computed = Computed::new(&blocks, &slices);
            if is_by_layer {
                path.save_layers(request, &mut computed).await.map(drop)
            } else {
                path.save(request, &|position| computed.frame(position)).await.map(drop)
            }
        });
        let ToNode::Ask { op, .. } = raw.hear_client().await else { panic!("it asks first") };
        let mut offer = wire::offer_to_pb(&SaveOffer::Wanted(vec![true; BLOCKS]));
        offer.is_by_layer = is_by_layer;
        raw.tell(&ToClient::Offer { op, offer });
        let (mut puts, mut most_at_once) = (0, 0);
        while puts < BLOCKS {
            let there = std::iter::from_fn(|| raw.there()).count();
            puts += there;
            most_at_once = most_at_once.max(there);
            tokio::task::yield_now().await;
        }
        assert!(most_at_once <= 4, "{most_at_once} of {puts} in one turn, by layer: {is_by_layer}");
        saving.abort();
    }
}

/// Answers come as fast as pieces, and a save has thousands of them: they are not all kept until somebody looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_save_of_many_short_layers_outlives_its_answers() {
    let layers = 4000;
    let (path, mut raw) = forged().await;
    let saving = tokio::spawn(async move {
        let slices = vec![1; layers];
        let mut computed = Computed::new(&[hash(7)], &slices);
        path.save_layers(request(&[hash(7)], &slices), &mut computed).await
    });
    let ToNode::Ask { op, .. } = raw.hear_client().await else { panic!("it asks first") };
    raw.tell(&offer(true)(op));
    let mut pieces = 0;
    loop {
        match raw.hear_client().await {
            ToNode::Put { places, .. } => {
                assert_eq!(places.len(), 1);
                pieces += 1;
                raw.tell(&ToClient::Taken { op, frames: 1 });
            }
            ToNode::Finish { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pieces, layers + 1, "each layer, and the head");
    raw.tell(&all_done(op));
    assert!(matches!(soon(saving).await.unwrap(), Ok(Streamed::Answered(SaveAnswer::Done(_)))));
}
