//! Layer-wise fetch into the caller's memory and save out of it.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_core::content;

use kv_core::id::{Category, LeaseId, NodeId, RequestId, TenantId, TrafficClass};
use kv_core::pipeline::{ArrivalOrder, ComputeCosts, LoadComputeOverlap, NextAction};
use kvfleet_proto::frame::{FrameError, KeyForm};
use kvfleet_proto::pb;
use kvfleet_transport::loopback::Faults;
use kvfleet_transport::suite::{
    EPOCH, IDENTITY, MemoryService, PATIENCE, frame, hash, hashes, request_context,
};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, Frames, MissReason, SaveOffer,
    SaveRequest, SaveSession,
};

use tokio::time::Instant;

use super::authority::{CONTENT_BYTES, client_on, network};
use crate::{
    Client, FetchCall, FetchError, HeldLease, LayerEvent, LayerFetch, LayerFetchCall, LayerSaveCall,
    LayerSaveError, SAVE_DEADLINE, SourceEnd, SourceMiss,
};

/// A block's two slices, as the suite makes them.
type LayerBuffer = Vec<Box<[u8]>>;

const SLICE_BYTES: [u32; 2] = [CONTENT_BYTES / 2, CONTENT_BYTES - CONTENT_BYTES / 2];

fn layer_buffers(blocks: u32) -> Vec<LayerBuffer> {
    (0..blocks).map(|_| SLICE_BYTES.map(|bytes| vec![0; bytes as usize].into()).to_vec()).collect()
}

fn source(node: u32, start_blocks: u32, len_blocks: u32) -> pb::Source {
    pb::Source { node, epoch: EPOCH.0, address: format!("node:{node}"), start_blocks, len_blocks, tier: 1 }
}

/// A fetch without preloading, with all blocks requested together.
fn call(blocks: u32, sources: Vec<pb::Source>) -> LayerFetchCall {
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
    LayerFetchCall {
        fetch,
        frame_bytes: frame_bytes(),
        read_buffer_bytes: 0,
        in_flight_bytes_max: u64::MAX,
        layers_per_request: u32::MAX,
        arrival_order: ArrivalOrder::ByBlock,
    }
}

fn frame_bytes() -> u64 {
    frame(hash(0), CONTENT_BYTES).bytes.len() as u64
}

/// The blocks in order of arrival, with verified content, and each source's end.
async fn collect_blocks(mut fetch: LayerFetch<LayerBuffer>) -> (Vec<u32>, Vec<SourceEnd<LayerBuffer>>) {
    let (mut blocks, mut ends) = (Vec::new(), Vec::new());
    while let Some(event) = fetch.next().await {
        match event {
            LayerEvent::Slices { .. } | LayerEvent::Unavailable { .. } => {}
            LayerEvent::Arrived { block, buffer: room } => {
                assert!(content::matches(hash(block), &room.concat()), "wrong bytes were returned");
                blocks.push(block);
            }
            LayerEvent::SourceEnded(end) => ends.push(*end),
        }
    }
    assert!(fetch.is_finished());
    (blocks, ends)
}

/// The same with an immediate start.
async fn fetch(client: &Client, call: LayerFetchCall) -> (Vec<u32>, Vec<SourceEnd<LayerBuffer>>) {
    let blocks = call.fetch.sources.iter().map(|source| source.len_blocks).sum();
    let fetch = client.fetch_layers(call, layer_buffers(blocks)).unwrap();
    fetch.begin();
    collect_blocks(fetch).await
}

#[tokio::test]
async fn blocks_of_all_sources_arrive_in_caller_memory() {
    let (network, _) = network(2, 10);
    let (mut blocks, ends) =
        fetch(&client_on(&network), call(9, vec![source(0, 0, 4), source(1, 4, 5)])).await;
    let of = |range: Range<u32>| blocks.iter().filter(|block| range.contains(block)).is_sorted();
    assert!(of(0..4) && of(4..9), "blocks of a source out of order");
    blocks.sort_unstable();
    assert_eq!(blocks, (0..9).collect::<Vec<_>>());
    assert_eq!(ends.len(), 2);
    assert!(ends.iter().all(|end| end.miss.is_none() && end.incomplete.is_empty() && end.wrong_blocks == 0));
    assert_eq!(ends.iter().map(|end| end.received_bytes).sum::<u64>(), 9 * frame_bytes());
    let mut leases: Vec<HeldLease> = ends.into_iter().filter_map(|end| end.lease).collect();
    leases.sort();
    let held = |node: u32| HeldLease { address: format!("node:{node}"), lease: LeaseId(5) };
    assert_eq!(leases, [held(0), held(1)]);
}

#[tokio::test]
async fn only_the_read_buffer_is_filled_before_the_start() {
    let (network, _) = network(2, 10);
    let buffered = LayerFetchCall {
        read_buffer_bytes: 3 * frame_bytes() + 1,
        ..call(10, vec![source(0, 0, 2), source(1, 2, 8)])
    };
    let mut fetch = client_on(&network).fetch_layers(buffered, layer_buffers(10)).unwrap();
    let mut blocks = Vec::new();
    // The first source ends by itself; one block of the second fits.
    while blocks.len() < 4 {
        match fetch.next().await.unwrap() {
            LayerEvent::Slices { .. } | LayerEvent::Unavailable { .. } => {
                panic!("no block arrives in parts or fails")
            }
            LayerEvent::Arrived { block, .. } => blocks.push(block),
            LayerEvent::SourceEnded(end) => blocks.push(if end.miss.is_none() { 100 } else { 200 }),
        }
    }
    blocks.sort_unstable();
    assert_eq!(blocks, [0, 1, 2, 100]);
    (0..100).for_each(|_| assert!(fetch.poll().is_none()));
    tokio::task::yield_now().await;
    assert!(fetch.poll().is_none() && !fetch.is_finished(), "more was requested than fits the read buffer");
    fetch.begin();
    fetch.begin();
    let (blocks, ends) = collect_blocks(fetch).await;
    assert_eq!(blocks, (3..10).collect::<Vec<_>>());
    assert!(ends.len() == 1 && ends[0].miss.is_none());
}

/// A node that records the number of blocks of each request.
struct CountingService(MemoryService, Mutex<Vec<usize>>);

impl BlockService for CountingService {
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

/// A node that records the class of each request, and answers busy to the first prefetch requests.
struct PrefetchBusyService(MemoryService, Mutex<Vec<TrafficClass>>, usize);

impl BlockService for PrefetchBusyService {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let mut asked = self.1.lock().unwrap();
        asked.push(request.class());
        let ahead = asked.iter().filter(|class| **class == TrafficClass::Prefetch).count();
        drop(asked);
        if request.class() == TrafficClass::Prefetch && ahead <= self.2 {
            let answer = FetchAnswer::Busy { retry_after: Duration::from_millis(1) };
            let (frames, epoch) = (Frames::empty(), request.epoch);
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

/// Classes of the requests to a node that is busy for the first `busy` prefetches, if the fetch
/// starts after `begins_at` blocks.
async fn request_classes(busy: usize, begins_at: usize) -> Vec<TrafficClass> {
    let (network, services) = network(1, 6);
    let node = Arc::new(PrefetchBusyService(services[0].clone(), Mutex::default(), busy));
    network.serve("node:0", node.clone());
    let buffered = LayerFetchCall { read_buffer_bytes: 3 * frame_bytes(), ..call(6, vec![source(0, 0, 6)]) };
    let mut fetch = client_on(&network).fetch_layers(buffered, layer_buffers(6)).unwrap();
    for block in 0..begins_at {
        assert!(
            matches!(fetch.next().await, Some(LayerEvent::Arrived { block: at, .. }) if at == block as u32)
        );
    }
    while begins_at == 0 && node.1.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    fetch.begin();
    let (blocks, ends) = collect_blocks(fetch).await;
    assert_eq!(blocks, (begins_at as u32..6).collect::<Vec<_>>());
    assert_eq!(ends[0].miss, None);
    std::mem::take(&mut *node.1.lock().unwrap())
}

#[tokio::test]
async fn requests_are_prefetch_class_before_the_start_and_fetch_class_after() {
    let [fetch, ahead] = [TrafficClass::Fetch, TrafficClass::Prefetch];
    assert_eq!(request_classes(0, 3).await, [ahead, fetch]);
    let expected = [ahead, ahead, ahead, ahead, ahead, fetch];
    assert_eq!(
        request_classes(2, 3).await,
        expected,
        "a busy node is asked again, for three blocks, two, and one at a time"
    );
    let mut asked = request_classes(usize::MAX, 0).await;
    asked.dedup();
    assert_eq!(asked, [ahead, fetch], "at the start at the latest");
}

/// A node that returns at most one block of a prefetch, or none if several are requested.
struct LimitedPrefetchService(MemoryService, bool);

impl BlockService for LimitedPrefetchService {
    fn fetch(&self, mut request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let asked = request.hashes.len();
        if request.class() == TrafficClass::Fetch || asked <= 1 {
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
async fn busy_node_is_asked_for_fewer_blocks_before_the_start() {
    for gives_one in [false, true] {
        let (network, services) = network(1, 6);
        network.serve("node:0", Arc::new(LimitedPrefetchService(services[0].clone(), gives_one)));
        let buffered =
            LayerFetchCall { read_buffer_bytes: 5 * frame_bytes(), ..call(6, vec![source(0, 0, 6)]) };
        let mut fetch = client_on(&network).fetch_layers(buffered, layer_buffers(6)).unwrap();
        for block in 0..5 {
            let event = fetch.next().await;
            assert!(
                matches!(&event, Some(LayerEvent::Arrived { block: at, .. }) if *at == block),
                "{event:?}"
            );
        }
        fetch.begin();
        let (blocks, ends) = collect_blocks(fetch).await;
        assert_eq!((blocks, &ends[0].miss), (vec![5], &None), "{gives_one}");
    }
}

#[tokio::test]
async fn stalled_prefetch_is_repeated_as_fetch_after_the_start() {
    let (network, services) = network(1, 6);
    let node = Arc::new(PrefetchBusyService(services[0].clone(), Mutex::default(), 0));
    network.serve("node:0", node.clone());
    services[0].set_gate(0);
    let buffered = LayerFetchCall { read_buffer_bytes: u64::MAX, ..call(6, vec![source(0, 0, 6)]) };
    let fetch = client_on(&network).fetch_layers(buffered, layer_buffers(6)).unwrap();
    let asked = || node.1.lock().unwrap().clone();
    while asked().is_empty() {
        tokio::task::yield_now().await;
    }
    fetch.begin();
    while asked().len() < 2 {
        tokio::task::yield_now().await;
    }
    services[0].set_gate(100);
    let (blocks, ends) = collect_blocks(fetch).await;
    assert_eq!((blocks.len(), &ends[0].miss), (6, &None));
    assert_eq!(asked(), [TrafficClass::Prefetch, TrafficClass::Fetch]);
}

#[tokio::test]
async fn requests_respect_the_in_flight_limit() {
    let (network, services) = network(2, 12);
    let noting = |node: usize| Arc::new(CountingService(services[node].clone(), Mutex::default()));
    let nodes = [noting(0), noting(1)];
    (0..).zip(&nodes).for_each(|(at, node): (u32, _)| network.serve(&format!("node:{at}"), node.clone()));
    let sources = vec![source(0, 0, 5), source(1, 5, 7)];
    let bounded = LayerFetchCall { in_flight_bytes_max: 4 * frame_bytes() + 3, ..call(12, sources.clone()) };
    let (mut blocks, ends) = fetch(&client_on(&network), bounded).await;
    blocks.sort_unstable();
    assert_eq!(blocks, (0..12).collect::<Vec<_>>());
    assert!(ends.iter().all(|end| end.miss.is_none()));
    let asked = |node: &CountingService| std::mem::take(&mut *node.1.lock().unwrap());
    assert_eq!(nodes.each_ref().map(|node| asked(node)), [vec![2, 2, 1], vec![2, 2, 2, 1]]);
    let none = LayerFetchCall { in_flight_bytes_max: 0, ..call(12, sources) };
    fetch(&client_on(&network), none).await;
    assert_eq!(nodes.each_ref().map(|node| asked(node)), [vec![1; 5], vec![1; 7]], "one block at least");
}

#[tokio::test]
async fn incomplete_buffers_return_with_the_miss_reason() {
    let (network, services) = network(1, 6);
    services[0].forget(hash(3));
    let (blocks, ends) = fetch(&client_on(&network), call(6, vec![source(0, 0, 6)])).await;
    assert_eq!(blocks, [0, 1, 2]);
    let miss = |first_missing_block, reason| {
        let address = "node:0".to_owned();
        Some(SourceMiss { node: NodeId(0), address, first_missing_block, reason, cause: None })
    };
    assert_eq!(ends[0].miss, miss(3, MissReason::NotHeld));
    assert_eq!(ends[0].incomplete.iter().map(|back| back.block).collect::<Vec<_>>(), [3, 4, 5]);

    network.set_faults(Faults { cut_after: Some(1), ..Faults::default() });
    let (blocks, ends) = fetch(&client_on(&network), call(3, vec![source(0, 0, 3)])).await;
    assert_eq!((blocks, &ends[0].miss), (vec![0], &miss(1, MissReason::NodeLost)));

    network.stop("node:0");
    let (_, ends) = fetch(&client_on(&network), call(3, vec![source(0, 0, 3)])).await;
    let miss = ends[0].miss.as_ref().expect("the node is unreachable");
    assert!(miss.cause.as_ref().is_some_and(|cause| cause.contains("cannot reach node:0")), "{miss}");
}

#[tokio::test]
async fn deadline_counts_from_the_start() {
    let (network, services) = network(1, 4);
    services[0].set_gate(1);
    let late = call(4, vec![source(0, 0, 4)]);
    let late = LayerFetchCall {
        fetch: FetchCall { deadline: Duration::from_millis(50), ..late.fetch },
        read_buffer_bytes: u64::MAX,
        ..late
    };
    let mut fetch = client_on(&network).fetch_layers(late, layer_buffers(4)).unwrap();
    assert!(matches!(fetch.next().await, Some(LayerEvent::Arrived { block: 0, .. })));
    assert!(fetch.poll().is_none());
    fetch.begin();
    let (blocks, ends) = collect_blocks(fetch).await;
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
        let faulty =
            LayerFetchCall { in_flight_bytes_max, ..call(8, vec![source(0, 0, 4), source(1, 4, 4)]) };
        // `collect_blocks` checks every byte.
        let (blocks, ends) = fetch(&client, faulty).await;
        let absent: usize = ends.iter().map(|end| end.incomplete.len()).sum();
        assert_eq!(blocks.len() + absent, 8, "each buffer must be returned once");
        assert!(ends.iter().all(|end| end.miss.is_none() == end.incomplete.is_empty()));
        whole += u32::from(absent == 0);
        wrong += ends.iter().map(|end| end.wrong_blocks).sum::<u32>();
    }
    assert!(whole > 0 && wrong > 50, "{whole} whole fetches, {wrong} wrong blocks seen");
}

#[tokio::test]
async fn block_not_fitting_its_buffer_is_wrong() {
    let (network, _) = network(1, 3);
    let short = |room: &mut LayerBuffer| room[1] = vec![0; 3].into();
    let few = |room: &mut LayerBuffer| drop(room.pop());
    let many = |room: &mut LayerBuffer| room.push(Box::default());
    for spoil in [&short as &dyn Fn(&mut LayerBuffer), &few, &many] {
        let mut rooms = layer_buffers(3);
        spoil(&mut rooms[1]);
        let fetch = client_on(&network).fetch_layers(call(3, vec![source(0, 0, 3)]), rooms).unwrap();
        fetch.begin();
        let (blocks, ends) = collect_blocks(fetch).await;
        assert_eq!(blocks, [0]);
        assert_eq!(ends[0].miss.as_ref().map(|miss| miss.reason), Some(MissReason::Corrupt));
        assert_eq!((ends[0].wrong_blocks, ends[0].incomplete.len()), (1, 2));
    }
}

#[tokio::test]
async fn fetch_requires_one_buffer_per_block() {
    let (network, _) = network(1, 3);
    let error =
        client_on(&network).fetch_layers(call(3, vec![source(0, 0, 3)]), layer_buffers(2)).unwrap_err();
    assert_eq!(error, FetchError::BufferCount { rooms: 2, blocks: 3 });
}

#[tokio::test]
async fn buffers_in_unread_events_are_returned() {
    let (network, services) = network(2, 6);
    services[1].forget(hash(5));
    // For each number of events read before.
    for heard in 0..3 {
        let call = call(6, vec![source(0, 0, 3), source(1, 3, 3)]);
        let mut fetch = client_on(&network).fetch_layers(call, layer_buffers(6)).unwrap();
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
        let left = fetch.into_buffer_returns();
        assert!(!left.is_finished(), "buffers are still outstanding");
        came.extend(left.collect().await.into_iter().map(|back| (back.block, back.layers)));
        came.sort_unstable();
        assert_eq!(came, [(0, 2), (1, 2), (2, 2), (3, 2), (4, 2), (5, 0)], "{heard} events read");
    }
}

#[tokio::test]
async fn fetch_closed_before_start_returns_every_buffer() {
    let (network, _) = network(1, 6);
    let buffered = LayerFetchCall { read_buffer_bytes: 2 * frame_bytes(), ..call(6, vec![source(0, 0, 6)]) };
    let mut fetch = client_on(&network).fetch_layers(buffered, layer_buffers(6)).unwrap();
    for block in 0..2 {
        let event = fetch.next().await;
        assert!(matches!(event, Some(LayerEvent::Arrived { block: at, .. }) if at == block), "{event:?}");
    }
    // It waits for its start, which never comes.
    (0..100).for_each(|_| assert!(fetch.poll().is_none()));
    fetch.close();
    let is_over = async {
        while !fetch.is_finished() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, is_over).await.expect("the closed fetch did not end");
    let left: Vec<u32> =
        fetch.into_buffer_returns().collect().await.into_iter().map(|back| back.block).collect();
    assert_eq!(left, [2, 3, 4, 5]);
}

/// With several worker threads, so that tasks run concurrently with the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_buffer_returns_when_a_fetch_is_dropped_at_any_time() {
    let (network, _) = network(2, 8);
    let client = client_on(&network);
    for turn in 0..200 {
        let call = call(8, vec![source(0, 0, 4), source(1, 4, 4)]);
        let mut fetch = client.fetch_layers(call, layer_buffers(8)).unwrap();
        fetch.begin();
        let mut came = Vec::new();
        while came.len() < turn % 8 {
            if let LayerEvent::Arrived { block, .. } = fetch.next().await.unwrap() {
                came.push(block);
            }
        }
        let mut rest = fetch.into_buffer_returns();
        let mut left = Vec::new();
        if turn % 2 == 0 {
            left = rest.collect().await;
        } else {
            while let Some(back) = rest.next().await {
                left.push(back);
            }
            assert!(rest.is_finished());
        }
        for back in &left {
            assert!(back.layers < 2 || content::matches(hash(back.block), &back.buffer.concat()));
        }
        came.extend(left.into_iter().map(|back| back.block));
        came.sort_unstable();
        assert_eq!(came, (0..8).collect::<Vec<_>>(), "iteration {turn}");
    }
}

/// An engine with simulated compute time: the blocks that it had to compute.
async fn recomputed_blocks(client: &Client, call: LayerFetchCall, blocks: u32) -> Vec<u32> {
    let costs = ComputeCosts {
        block_layer_ns: vec![1_000_000_000; blocks as usize],
        new_layer_ns: 1_000_000_000,
        layers: 2,
    };
    let mut fetch = client.fetch_layers(call, layer_buffers(blocks)).unwrap();
    let begun = Instant::now();
    let mut spent_ns = 0;
    let now_ns = |spent_ns: u64| u64::try_from(begun.elapsed().as_nanos()).unwrap() + spent_ns;
    let mut race = LoadComputeOverlap::new(costs, &SLICE_BYTES, ArrivalOrder::ByBlock, 1_000_000, 0);
    race.begin(0);
    fetch.begin();
    let told = |race: &mut LoadComputeOverlap, event: LayerEvent<LayerBuffer>, now_ns| match event {
        LayerEvent::Slices { block, layers } => race.slices_arrived(block, layers.end, now_ns),
        LayerEvent::Unavailable { blocks } => blocks.for_each(|block| race.mark_lost(block)),
        LayerEvent::Arrived { block, .. } => race.slices_arrived(block, 2, now_ns),
        LayerEvent::SourceEnded(end) => end.incomplete.iter().for_each(|back| race.mark_lost(back.block)),
    };
    loop {
        while let Some(event) = fetch.poll() {
            told(&mut race, event, now_ns(spent_ns));
        }
        match race.next(now_ns(spent_ns)) {
            NextAction::Layer { .. } => spent_ns += 1_000_000_000 * (1 + race.wave().count() as u64),
            NextAction::CatchUp { blocks, layers } => {
                spent_ns += 1_000_000_000 * blocks.len() as u64 * u64::from(layers);
            }
            NextAction::Wait { until_ns } => {
                let wait = Duration::from_nanos(until_ns.saturating_sub(now_ns(spent_ns)));
                if let Ok(Some(event)) = tokio::time::timeout(wait, fetch.next()).await {
                    told(&mut race, event, now_ns(spent_ns));
                }
            }
            NextAction::Done => return race.wave().collect(),
        }
    }
}

#[tokio::test]
async fn engine_recomputes_exactly_the_missing_blocks() {
    let (network, services) = network(2, 8);
    let client = client_on(&network);
    let sources = || vec![source(0, 0, 4), source(1, 4, 4)];
    assert_eq!(recomputed_blocks(&client, call(8, sources()), 8).await, Vec::<u32>::new());
    services[1].forget(hash(6));
    assert_eq!(recomputed_blocks(&client, call(8, sources()), 8).await, [6, 7], "the missing blocks");
    services[0].set_gate(2);
    let computed = recomputed_blocks(&client, call(8, sources()), 8).await;
    assert_eq!(computed, [2, 3, 6, 7], "also those of a silent path");
}

fn save_call(blocks: Range<u32>) -> LayerSaveCall {
    LayerSaveCall {
        asker: request_context(7),
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
async fn layers_put_one_by_one_are_saved_as_whole_blocks() {
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
    client.wait_for_saves().await;
    assert!((0..5).all(|block| services[0].holds(hash(block))));
    assert!(services.iter().all(|service| service.released() == [LeaseId(7)]));
    let (blocks, _) = fetch(&client, call(5, vec![source(0, 0, 5)])).await;
    assert_eq!(blocks, [0, 1, 2, 3, 4], "the saved blocks are returned");
}

#[tokio::test]
async fn mismatched_layers_are_refused() {
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
    client.wait_for_saves().await;
    assert!(!services[0].holds(hash(0)));
}

#[tokio::test]
async fn full_write_buffer_rejects_saves_until_one_is_dropped() {
    let (network, _) = network(1, 0);
    let client = client_on(&network);
    let large = || LayerSaveCall { slice_bytes: vec![32 << 20], ..save_call(0..5) };
    let held = client.save_layers(large()).unwrap();
    assert!(matches!(client.save_layers(large()).unwrap_err(), LayerSaveError::Busy(_)));
    drop(held);
    assert!(client.save_layers(large()).is_ok(), "a dropped save frees its space");
}
