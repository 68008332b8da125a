//! Fetch into the caller's memory and save out of it, layer by layer.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_core::id::{Category, Class, LeaseId, NodeId, RequestId, TenantId};
use kv_core::pipeline::{Arrive, Costs, Next, Race};
use kvfleet_proto::frame::{FrameError, KeyForm};
use kvfleet_proto::{content, pb};
use kvfleet_transport::loopback::Faults;
use kvfleet_transport::suite::{EPOCH, IDENTITY, MemoryService, PATIENCE, asker, frame, hash, hashes};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, Frames, MissReason, SaveOffer,
    SaveRequest, SaveSession,
};

use tokio::time::Instant;

use super::authority::{CONTENT_BYTES, client_on, network};
use crate::{
    Client, FetchCall, FetchError, HeldLease, LayerEvent, LayerFetch, LayerSaveCall, LayerSaveError,
    LayersCall, SAVE_DEADLINE, SourceEnd, SourceMiss,
};

/// A block's two slices, as the suite makes them.
type Room = Vec<Box<[u8]>>;

const SLICE_BYTES: [u32; 2] = [CONTENT_BYTES / 2, CONTENT_BYTES - CONTENT_BYTES / 2];

fn rooms(blocks: u32) -> Vec<Room> {
    (0..blocks).map(|_| SLICE_BYTES.map(|bytes| vec![0; bytes as usize].into()).to_vec()).collect()
}

fn source(node: u32, start_blocks: u32, len_blocks: u32) -> pb::Source {
    pb::Source { node, epoch: EPOCH.0, address: format!("node:{node}"), start_blocks, len_blocks, tier: 1 }
}

/// A fetch of which nothing is loaded ahead, and all is asked for at once.
fn call(blocks: u32, sources: Vec<pb::Source>) -> LayersCall {
    let fetch = FetchCall {
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
    };
    LayersCall {
        fetch,
        frame_bytes: frame_bytes(),
        read_buffer_bytes: 0,
        in_flight_bytes_max: u64::MAX,
        layers_at_once: u32::MAX,
        arrive: Arrive::ByBlock,
    }
}

fn frame_bytes() -> u64 {
    frame(hash(0), CONTENT_BYTES).bytes.len() as u64
}

/// What came of a fetch: the blocks in the order in which they came, each as it should be, and each source's end.
async fn all(mut fetch: LayerFetch<Room>) -> (Vec<u32>, Vec<SourceEnd<Room>>) {
    let (mut blocks, mut ends) = (Vec::new(), Vec::new());
    while let Some(event) = fetch.next().await {
        match event {
            LayerEvent::Slices { .. } | LayerEvent::Short { .. } => {}
            LayerEvent::Arrived { block, room } => {
                assert!(content::matches(hash(block), &room.concat()), "wrong bytes were handed out");
                blocks.push(block);
            }
            LayerEvent::Ended(end) => ends.push(*end),
        }
    }
    assert!(fetch.is_over());
    (blocks, ends)
}

/// The same with everything asked for at once.
async fn fetch(client: &Client, call: LayersCall) -> (Vec<u32>, Vec<SourceEnd<Room>>) {
    let blocks = call.fetch.sources.iter().map(|source| source.len_blocks).sum();
    let fetch = client.fetch_layers(call, rooms(blocks)).unwrap();
    fetch.begin();
    all(fetch).await
}

#[tokio::test]
async fn blocks_of_all_sources_come_into_the_callers_memory() {
    let (network, _) = network(2, 10);
    let (mut blocks, ends) =
        fetch(&client_on(&network), call(9, vec![source(0, 0, 4), source(1, 4, 5)])).await;
    let of = |range: Range<u32>| blocks.iter().filter(|block| range.contains(block)).is_sorted();
    assert!(of(0..4) && of(4..9), "in order of each source");
    blocks.sort_unstable();
    assert_eq!(blocks, (0..9).collect::<Vec<_>>());
    assert_eq!(ends.len(), 2);
    assert!(ends.iter().all(|end| end.miss.is_none() && end.absent.is_empty() && end.wrong_blocks == 0));
    assert_eq!(ends.iter().map(|end| end.received_bytes).sum::<u64>(), 9 * frame_bytes());
    let mut leases: Vec<HeldLease> = ends.into_iter().filter_map(|end| end.lease).collect();
    leases.sort();
    let held = |node: u32| HeldLease { address: format!("node:{node}"), lease: LeaseId(5) };
    assert_eq!(leases, [held(0), held(1)]);
}

#[tokio::test]
async fn before_its_turn_only_the_read_buffer_is_filled() {
    let (network, _) = network(2, 10);
    let buffered = LayersCall {
        read_buffer_bytes: 3 * frame_bytes() + 1,
        ..call(10, vec![source(0, 0, 2), source(1, 2, 8)])
    };
    let mut fetch = client_on(&network).fetch_layers(buffered, rooms(10)).unwrap();
    let mut blocks = Vec::new();
    // The first source ends by itself; of the second, one block fits.
    while blocks.len() < 4 {
        match fetch.next().await.unwrap() {
            LayerEvent::Slices { .. } | LayerEvent::Short { .. } => {
                panic!("no block comes in parts or short")
            }
            LayerEvent::Arrived { block, .. } => blocks.push(block),
            LayerEvent::Ended(end) => blocks.push(if end.miss.is_none() { 100 } else { 200 }),
        }
    }
    blocks.sort_unstable();
    assert_eq!(blocks, [0, 1, 2, 100]);
    (0..100).for_each(|_| assert!(fetch.poll().is_none()));
    tokio::task::yield_now().await;
    assert!(fetch.poll().is_none() && !fetch.is_over(), "nothing more was asked for");
    fetch.begin();
    fetch.begin();
    let (blocks, ends) = all(fetch).await;
    assert_eq!(blocks, (3..10).collect::<Vec<_>>());
    assert!(ends.len() == 1 && ends[0].miss.is_none());
}

/// A node that notes how many blocks each fetch asks for.
struct Noting(MemoryService, Mutex<Vec<usize>>);

impl BlockService for Noting {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        self.1.lock().unwrap().push(request.hashes.len());
        self.0.fetch(request)
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.0.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

/// A node that notes what each fetch is for, and is busy for those that nobody waits for so many times.
struct Choosy(MemoryService, Mutex<Vec<Class>>, usize);

impl BlockService for Choosy {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let mut asked = self.1.lock().unwrap();
        asked.push(request.class());
        let ahead = asked.iter().filter(|class| **class == Class::Prefetch).count();
        drop(asked);
        if request.class() == Class::Prefetch && ahead <= self.2 {
            let answer = FetchAnswer::Busy { retry_after: Duration::from_millis(1) };
            let (frames, epoch) = (Frames::none(), request.epoch);
            return Box::pin(async move { FetchReply { answer, frames, epoch, lendable: Vec::new() } });
        }
        self.0.fetch(request)
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.0.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

/// What is asked of a node that is busy so many times, by whoever begins when so many blocks came.
async fn classes(busy: usize, begins_at: usize) -> Vec<Class> {
    let (network, services) = network(1, 6);
    let node = Arc::new(Choosy(services[0].clone(), Mutex::default(), busy));
    network.serve("node:0", node.clone());
    let buffered = LayersCall { read_buffer_bytes: 3 * frame_bytes(), ..call(6, vec![source(0, 0, 6)]) };
    let mut fetch = client_on(&network).fetch_layers(buffered, rooms(6)).unwrap();
    for block in 0..begins_at {
        assert!(
            matches!(fetch.next().await, Some(LayerEvent::Arrived { block: at, .. }) if at == block as u32)
        );
    }
    while begins_at == 0 && node.1.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    fetch.begin();
    let (blocks, ends) = all(fetch).await;
    assert_eq!(blocks, (begins_at as u32..6).collect::<Vec<_>>());
    assert_eq!(ends[0].miss, None);
    std::mem::take(&mut *node.1.lock().unwrap())
}

#[tokio::test]
async fn before_its_turn_blocks_are_asked_for_as_nobody_waits_for_them_and_then_as_somebody_does() {
    let [fetch, ahead] = [Class::Fetch, Class::Prefetch];
    assert_eq!(classes(0, 3).await, [ahead, fetch]);
    let expected = [ahead, ahead, ahead, ahead, ahead, fetch];
    assert_eq!(
        classes(2, 3).await,
        expected,
        "a busy node is asked again, for three blocks, two, and one at a time"
    );
    let mut asked = classes(usize::MAX, 0).await;
    asked.dedup();
    assert_eq!(asked, [ahead, fetch], "at the turn at the latest");
}

/// A node that gives at most one block of a fetch that nobody waits for, or none if it is asked for several.
struct Narrow(MemoryService, bool);

impl BlockService for Narrow {
    fn fetch(&self, mut request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let asked = request.hashes.len();
        if request.class() == Class::Fetch || asked <= 1 {
            return self.0.fetch(request);
        }
        request.hashes.truncate(usize::from(self.1));
        Box::pin(async move {
            let reply = self.0.fetch(request).await;
            let answer = match reply.answer {
                FetchAnswer::Hit { tiers } if !tiers.is_empty() => {
                    FetchAnswer::Partial { tiers, reason: MissReason::Busy }
                }
                _ => FetchAnswer::Busy { retry_after: Duration::from_millis(1) },
            };
            FetchReply { answer, ..reply }
        })
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.0.save(request)
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.0.release(lease)
    }
}

#[tokio::test]
async fn a_node_that_has_no_room_for_many_is_asked_for_fewer_before_the_turn() {
    for gives_one in [false, true] {
        let (network, services) = network(1, 6);
        network.serve("node:0", Arc::new(Narrow(services[0].clone(), gives_one)));
        let buffered = LayersCall { read_buffer_bytes: 5 * frame_bytes(), ..call(6, vec![source(0, 0, 6)]) };
        let mut fetch = client_on(&network).fetch_layers(buffered, rooms(6)).unwrap();
        for block in 0..5 {
            let event = fetch.next().await;
            assert!(
                matches!(&event, Some(LayerEvent::Arrived { block: at, .. }) if *at == block),
                "{event:?}"
            );
        }
        fetch.begin();
        let (blocks, ends) = all(fetch).await;
        assert_eq!((blocks, &ends[0].miss), (vec![5], &None), "{gives_one}");
    }
}

#[tokio::test]
async fn what_nobody_waited_for_is_asked_for_again_when_somebody_does() {
    let (network, services) = network(1, 6);
    let node = Arc::new(Choosy(services[0].clone(), Mutex::default(), 0));
    network.serve("node:0", node.clone());
    services[0].set_gate(0);
    let buffered = LayersCall { read_buffer_bytes: u64::MAX, ..call(6, vec![source(0, 0, 6)]) };
    let fetch = client_on(&network).fetch_layers(buffered, rooms(6)).unwrap();
    let asked = || node.1.lock().unwrap().clone();
    while asked().is_empty() {
        tokio::task::yield_now().await;
    }
    fetch.begin();
    while asked().len() < 2 {
        tokio::task::yield_now().await;
    }
    services[0].set_gate(100);
    let (blocks, ends) = all(fetch).await;
    assert_eq!((blocks.len(), &ends[0].miss), (6, &None));
    assert_eq!(asked(), [Class::Prefetch, Class::Fetch]);
}

#[tokio::test]
async fn no_more_is_asked_for_at_once_than_may_be_in_flight() {
    let (network, services) = network(2, 12);
    let noting = |node: usize| Arc::new(Noting(services[node].clone(), Mutex::default()));
    let nodes = [noting(0), noting(1)];
    (0..).zip(&nodes).for_each(|(at, node): (u32, _)| network.serve(&format!("node:{at}"), node.clone()));
    let sources = vec![source(0, 0, 5), source(1, 5, 7)];
    let bounded = LayersCall { in_flight_bytes_max: 4 * frame_bytes() + 3, ..call(12, sources.clone()) };
    let (mut blocks, ends) = fetch(&client_on(&network), bounded).await;
    blocks.sort_unstable();
    assert_eq!(blocks, (0..12).collect::<Vec<_>>());
    assert!(ends.iter().all(|end| end.miss.is_none()));
    let asked = |node: &Noting| std::mem::take(&mut *node.1.lock().unwrap());
    assert_eq!(nodes.each_ref().map(|node| asked(node)), [vec![2, 2, 1], vec![2, 2, 2, 1]]);
    let none = LayersCall { in_flight_bytes_max: 0, ..call(12, sources) };
    fetch(&client_on(&network), none).await;
    assert_eq!(nodes.each_ref().map(|node| asked(node)), [vec![1; 5], vec![1; 7]], "one block at least");
}

#[tokio::test]
async fn what_does_not_come_is_given_back_with_its_reason() {
    let (network, services) = network(1, 6);
    services[0].forget(hash(3));
    let (blocks, ends) = fetch(&client_on(&network), call(6, vec![source(0, 0, 6)])).await;
    assert_eq!(blocks, [0, 1, 2]);
    let miss = |first_missing_block, reason| {
        let address = "node:0".to_owned();
        Some(SourceMiss { node: NodeId(0), address, first_missing_block, reason, cause: None })
    };
    assert_eq!(ends[0].miss, miss(3, MissReason::NotHeld));
    assert_eq!(ends[0].absent.iter().map(|back| back.block).collect::<Vec<_>>(), [3, 4, 5]);

    network.set_faults(Faults { cut_after: Some(1), ..Faults::default() });
    let (blocks, ends) = fetch(&client_on(&network), call(3, vec![source(0, 0, 3)])).await;
    assert_eq!((blocks, &ends[0].miss), (vec![0], &miss(1, MissReason::NodeLost)));

    network.stop("node:0");
    let (_, ends) = fetch(&client_on(&network), call(3, vec![source(0, 0, 3)])).await;
    let miss = ends[0].miss.as_ref().expect("nobody is there");
    assert!(miss.cause.as_ref().is_some_and(|cause| cause.contains("cannot reach node:0")), "{miss}");
}

#[tokio::test]
async fn the_deadline_counts_from_its_turn() {
    let (network, services) = network(1, 4);
    services[0].set_gate(1);
    let late = call(4, vec![source(0, 0, 4)]);
    let late = LayersCall {
        fetch: FetchCall { deadline: Duration::from_millis(50), ..late.fetch },
        read_buffer_bytes: u64::MAX,
        ..late
    };
    let mut fetch = client_on(&network).fetch_layers(late, rooms(4)).unwrap();
    assert!(matches!(fetch.next().await, Some(LayerEvent::Arrived { block: 0, .. })));
    assert!(fetch.poll().is_none());
    fetch.begin();
    let (blocks, ends) = all(fetch).await;
    assert_eq!(blocks, Vec::<u32>::new());
    assert_eq!(ends[0].miss.as_ref().map(|miss| miss.reason), Some(MissReason::TooLate));
    assert!(ends[0].lease.is_some(), "the node may hold it");
}

#[tokio::test]
async fn faults_never_hand_out_wrong_bytes() {
    let (network, _) = network(2, 8);
    let client = client_on(&network);
    let (mut whole, mut wrong) = (0, 0);
    for seed in 0..300 {
        println!("seed {seed}");
        let cut_after = (seed % 3 == 0).then_some(2);
        network.set_faults(Faults { seed, corrupt: 0.1, reorder: 0.1, cut_after, ..Faults::default() });
        let in_flight_bytes_max = if seed % 2 == 0 { u64::MAX } else { 4 * frame_bytes() };
        let faulty = LayersCall { in_flight_bytes_max, ..call(8, vec![source(0, 0, 4), source(1, 4, 4)]) };
        // `all` looks at every byte.
        let (blocks, ends) = fetch(&client, faulty).await;
        let absent: usize = ends.iter().map(|end| end.absent.len()).sum();
        assert_eq!(blocks.len() + absent, 8, "each room comes back once");
        assert!(ends.iter().all(|end| end.miss.is_none() == end.absent.is_empty()));
        whole += u32::from(absent == 0);
        wrong += ends.iter().map(|end| end.wrong_blocks).sum::<u32>();
    }
    assert!(whole > 0 && wrong > 50, "{whole} whole fetches, {wrong} wrong blocks seen");
}

#[tokio::test]
async fn a_block_that_does_not_fit_its_room_is_wrong() {
    let (network, _) = network(1, 3);
    let short = |room: &mut Room| room[1] = vec![0; 3].into();
    let few = |room: &mut Room| drop(room.pop());
    let many = |room: &mut Room| room.push(Box::default());
    for spoil in [&short as &dyn Fn(&mut Room), &few, &many] {
        let mut rooms = rooms(3);
        spoil(&mut rooms[1]);
        let fetch = client_on(&network).fetch_layers(call(3, vec![source(0, 0, 3)]), rooms).unwrap();
        fetch.begin();
        let (blocks, ends) = all(fetch).await;
        assert_eq!(blocks, [0]);
        assert_eq!(ends[0].miss.as_ref().map(|miss| miss.reason), Some(MissReason::Corrupt));
        assert_eq!((ends[0].wrong_blocks, ends[0].absent.len()), (1, 2));
    }
}

#[tokio::test]
async fn a_room_for_each_block_or_none_is_filled() {
    let (network, _) = network(1, 3);
    let error = client_on(&network).fetch_layers(call(3, vec![source(0, 0, 3)]), rooms(2)).unwrap_err();
    assert_eq!(error, FetchError::Rooms { rooms: 2, blocks: 3 });
}

#[tokio::test]
async fn rooms_of_events_that_nobody_heard_come_back_too() {
    let (network, services) = network(2, 6);
    services[1].forget(hash(5));
    // As many of them as were heard before.
    for heard in 0..3 {
        let call = call(6, vec![source(0, 0, 3), source(1, 3, 3)]);
        let mut fetch = client_on(&network).fetch_layers(call, rooms(6)).unwrap();
        fetch.begin();
        let mut came = Vec::new();
        while came.len() < heard {
            if let LayerEvent::Arrived { block, .. } = fetch.next().await.unwrap() {
                came.push((block, 2));
            }
        }
        while fetch.received_bytes() < 5 * frame_bytes() {
            tokio::task::yield_now().await;
        }
        let left = fetch.rooms_left();
        assert!(!left.is_over(), "nobody has them");
        came.extend(left.all().await.into_iter().map(|back| (back.block, back.layers)));
        came.sort_unstable();
        assert_eq!(came, [(0, 2), (1, 2), (2, 2), (3, 2), (4, 2), (5, 0)], "{heard} heard");
    }
}

#[tokio::test]
async fn a_fetch_that_is_closed_before_its_turn_ends_and_gives_every_room_back() {
    let (network, _) = network(1, 6);
    let buffered = LayersCall { read_buffer_bytes: 2 * frame_bytes(), ..call(6, vec![source(0, 0, 6)]) };
    let mut fetch = client_on(&network).fetch_layers(buffered, rooms(6)).unwrap();
    for block in 0..2 {
        let event = fetch.next().await;
        assert!(matches!(event, Some(LayerEvent::Arrived { block: at, .. }) if at == block), "{event:?}");
    }
    // It waits for its turn, which never comes.
    (0..100).for_each(|_| assert!(fetch.poll().is_none()));
    fetch.close();
    let is_over = async {
        while !fetch.is_over() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, is_over).await.expect("nobody waits for it any more");
    let left: Vec<u32> = fetch.rooms_left().all().await.into_iter().map(|back| back.block).collect();
    assert_eq!(left, [2, 3, 4, 5]);
}

/// On other threads than whoever ends it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_room_comes_back_at_whatever_moment_a_fetch_is_given_up() {
    let (network, _) = network(2, 8);
    let client = client_on(&network);
    for turn in 0..200 {
        let call = call(8, vec![source(0, 0, 4), source(1, 4, 4)]);
        let mut fetch = client.fetch_layers(call, rooms(8)).unwrap();
        fetch.begin();
        let mut came = Vec::new();
        while came.len() < turn % 8 {
            if let LayerEvent::Arrived { block, .. } = fetch.next().await.unwrap() {
                came.push(block);
            }
        }
        let mut rest = fetch.rooms_left();
        let mut left = Vec::new();
        if turn % 2 == 0 {
            left = rest.all().await;
        } else {
            while let Some(back) = rest.next().await {
                left.push(back);
            }
            assert!(rest.is_over());
        }
        for back in &left {
            assert!(back.layers < 2 || content::matches(hash(back.block), &back.room.concat()));
        }
        came.extend(left.into_iter().map(|back| back.block));
        came.sort_unstable();
        assert_eq!(came, (0..8).collect::<Vec<_>>(), "turn {turn}");
    }
}

/// An engine whose compute takes no time of ours, only of the clock it tells the race: the blocks it had to compute.
async fn computed(client: &Client, call: LayersCall, blocks: u32) -> Vec<u32> {
    let costs = Costs {
        block_layer_ns: vec![1_000_000_000; blocks as usize],
        new_layer_ns: 1_000_000_000,
        layers: 2,
    };
    let mut fetch = client.fetch_layers(call, rooms(blocks)).unwrap();
    let begun = Instant::now();
    let mut spent_ns = 0;
    let now_ns = |spent_ns: u64| u64::try_from(begun.elapsed().as_nanos()).unwrap() + spent_ns;
    let mut race = Race::new(costs, &SLICE_BYTES, Arrive::ByBlock, 1_000_000, 0);
    race.begin(0);
    fetch.begin();
    let told = |race: &mut Race, event: LayerEvent<Room>, now_ns| match event {
        LayerEvent::Slices { block, layers } => race.arrived(block, layers.end, now_ns),
        LayerEvent::Short { blocks } => blocks.for_each(|block| race.lost(block)),
        LayerEvent::Arrived { block, .. } => race.arrived(block, 2, now_ns),
        LayerEvent::Ended(end) => end.absent.iter().for_each(|back| race.lost(back.block)),
    };
    loop {
        while let Some(event) = fetch.poll() {
            told(&mut race, event, now_ns(spent_ns));
        }
        match race.next(now_ns(spent_ns)) {
            Next::Layer { .. } => spent_ns += 1_000_000_000 * (1 + race.pass().count() as u64),
            Next::CatchUp { blocks, layers } => {
                spent_ns += 1_000_000_000 * blocks.len() as u64 * u64::from(layers);
            }
            Next::Wait { until_ns } => {
                let wait = Duration::from_nanos(until_ns.saturating_sub(now_ns(spent_ns)));
                if let Ok(Some(event)) = tokio::time::timeout(wait, fetch.next()).await {
                    told(&mut race, event, now_ns(spent_ns));
                }
            }
            Next::Done => return race.pass().collect(),
        }
    }
}

#[tokio::test]
async fn an_engine_that_follows_the_race_computes_what_does_not_come_and_nothing_else() {
    let (network, services) = network(2, 8);
    let client = client_on(&network);
    let sources = || vec![source(0, 0, 4), source(1, 4, 4)];
    assert_eq!(computed(&client, call(8, sources()), 8).await, Vec::<u32>::new());
    services[1].forget(hash(6));
    assert_eq!(computed(&client, call(8, sources()), 8).await, [6, 7], "those that are lost");
    services[0].set_gate(2);
    let computed = computed(&client, call(8, sources()), 8).await;
    assert_eq!(computed, [2, 3, 6, 7], "those of a path that fell silent, too");
}

fn save_call(blocks: Range<u32>) -> LayerSaveCall {
    LayerSaveCall {
        asker: asker(7),
        address: "node:0".to_owned(),
        epoch: EPOCH,
        parent: None,
        first_offset_blocks: blocks.start,
        hashes: blocks.map(hash).collect(),
        key_form: KeyForm::Rotated,
        slice_bytes: SLICE_BYTES.to_vec(),
        then_release: vec![HeldLease { address: "node:1".to_owned(), lease: LeaseId(7) }],
        deadline: SAVE_DEADLINE,
    }
}

/// The payloads of these blocks.
fn payloads(blocks: Range<u32>) -> Vec<Vec<u8>> {
    blocks.map(|block| frame(hash(block), CONTENT_BYTES).payload().to_vec()).collect()
}

#[tokio::test]
async fn layers_that_are_put_while_others_are_computed_are_saved_as_whole_blocks() {
    let (network, services) = network(2, 0);
    let client = client_on(&network);
    let mut save = client.save_layers(save_call(0..5)).unwrap();
    let payloads = payloads(0..5);
    let half = SLICE_BYTES[0] as usize;
    for layer in [0..half, half..CONTENT_BYTES as usize] {
        let slices: Vec<&[u8]> = payloads.iter().map(|payload| &payload[layer.clone()]).collect();
        save.put(&slices).unwrap();
    }
    save.finish().unwrap();
    client.saves_ended().await;
    assert!((0..5).all(|block| services[0].holds(hash(block))));
    assert!(services.iter().all(|service| service.released() == [LeaseId(7)]));
    let (blocks, _) = fetch(&client, call(5, vec![source(0, 0, 5)])).await;
    assert_eq!(blocks, [0, 1, 2, 3, 4], "what was put is what comes back");
}

#[tokio::test]
async fn layers_that_are_not_those_of_the_blocks_are_refused() {
    let (network, services) = network(2, 0);
    let client = client_on(&network);
    let mut save = client.save_layers(save_call(0..2)).unwrap();
    let slice = vec![0; SLICE_BYTES[0] as usize];
    let wrong = |got: LayerSaveError| matches!(got, LayerSaveError::Slices { layer: 0, blocks: 2, .. });
    assert!(wrong(save.put(&[&slice]).unwrap_err()));
    assert!(wrong(save.put(&[&slice, &slice[1..]]).unwrap_err()));
    save.put(&[&slice, &slice]).unwrap();
    assert_eq!(save.finish().unwrap_err(), LayerSaveError::Layers { expected: 2, got: 1 });
    let mut save = client.save_layers(save_call(0..1)).unwrap();
    (0..2).for_each(|_| save.put(&[&slice]).unwrap());
    assert_eq!(save.put(&[&slice]).unwrap_err(), LayerSaveError::Layers { expected: 2, got: 3 });
    drop(save);
    let none = LayerSaveCall { slice_bytes: vec![], ..save_call(0..1) };
    let error = client.save_layers(none).unwrap_err();
    assert_eq!(error, LayerSaveError::Frame(FrameError::SliceCount(0)));
    client.saves_ended().await;
    assert!(!services[0].holds(hash(0)));
}

#[tokio::test]
async fn a_full_write_buffer_is_named_at_the_begin_and_room_comes_back() {
    let (network, _) = network(1, 0);
    let client = client_on(&network);
    let large = || LayerSaveCall { slice_bytes: vec![32 << 20], ..save_call(0..5) };
    let held = client.save_layers(large()).unwrap();
    assert!(matches!(client.save_layers(large()).unwrap_err(), LayerSaveError::Busy(_)));
    drop(held);
    assert!(client.save_layers(large()).is_ok(), "a save that was dropped leaves its room");
}
