//! Layer-wise fetches over the network paths into the caller's memory.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::content;
use kv_core::id::{Category, LeaseId, RequestId, TenantId};
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{EPOCH, IDENTITY, MemoryService, PATIENCE, frame_of, hash, hashes};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{Dialer, MissReason};

use tokio::time::timeout;

use super::authority::{Authority, config};
use crate::{
    Client, Completion, CompletionQueue, FetchCall, FetchLayersOperation, LayerEvent, LayerFetch,
    LayerFetchCall, Operation, OperationOutcome, Progress, QueueLimits, ReturnedBuffer, SourceEnd,
    Submission,
};

type SliceTestBuffer = Vec<Box<[u8]>>;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const SLICES: [u32; 4] = [20_000, 30_000, 100, 40_000];
const BLOCKS: u32 = 5;

/// A node with ready blocks, and a client of it.
struct SliceCluster {
    service: MemoryService,
    client: Client,
    address: String,
    _server: Box<dyn std::any::Any>,
}

fn service() -> MemoryService {
    let service = MemoryService::default();
    (0..BLOCKS).for_each(|number| service.hold(frame_of(hash(number), &SLICES)));
    service.make_frames_ready();
    service
}

fn cluster(over_quic: bool) -> SliceCluster {
    let (authority, service) = (Authority::new(), service());
    let identity = authority.member();
    let node = Arc::new(service.clone());
    let (address, dialer, server): (_, Arc<dyn Dialer>, Box<dyn std::any::Any>) = if over_quic {
        let server = QuicServer::bind(ANY, &identity, node).unwrap();
        let dialer = QuicDialer::new(&authority.member(), QuicConfig::default());
        (server.local_addr(), Arc::new(dialer), Box::new(server))
    } else {
        let server = TcpServer::bind(ANY, &identity, node).unwrap();
        let dialer = TcpDialer::new(&authority.member(), TcpConfig::default());
        (server.local_addr(), Arc::new(dialer), Box::new(server))
    };
    let config = config(vec!["127.0.0.1:1".to_owned()], authority.member());
    let client = Client::with_dialer(config, dialer).unwrap();
    SliceCluster { service, client, address: address.to_string(), _server: server }
}

impl SliceCluster {
    /// A layer-wise fetch of all blocks with this read buffer.
    fn fetch(&self, read_buffer_bytes: u64) -> LayerFetch<SliceTestBuffer> {
        let (call, rooms) = self.call(read_buffer_bytes);
        let call = LayerFetchCall { arrival_order: ArrivalOrder::ByLayer, ..call };
        self.client.fetch_layers(call, rooms).unwrap()
    }

    fn call(&self, read_buffer_bytes: u64) -> (LayerFetchCall, Vec<SliceTestBuffer>) {
        let source = pb::Source {
            node: 0,
            epoch: EPOCH.0,
            address: self.address.clone(),
            start_blocks: 0,
            len_blocks: BLOCKS,
            tier: 1,
        };
        let fetch = FetchCall {
            lease: LeaseId(5),
            request: RequestId(5),
            tenant: TenantId(0),
            category: Category::default(),
            identity: IDENTITY,
            hashes: hashes(BLOCKS),
            resident_blocks: 0,
            sources: vec![source],
            deadline: PATIENCE,
            class: None,
        };
        let frame_bytes = frame_of(hash(0), &SLICES).bytes.len() as u64;
        let in_flight_bytes_max = u64::MAX;
        let arrive = ArrivalOrder::ByBlock;
        let layers_at_once = u32::MAX;
        let call = LayerFetchCall {
            fetch,
            frame_bytes,
            read_buffer_bytes,
            in_flight_bytes_max,
            layers_per_request: layers_at_once,
            arrival_order: arrive,
        };
        let room = || SLICES.map(|bytes| vec![0; bytes as usize].into()).to_vec();
        (call, (0..BLOCKS).map(|_| room()).collect())
    }
}

/// Events of a fetch.
#[derive(Default)]
struct ReceivedEvents {
    slices: Vec<(u32, Range<u32>)>,
    whole: Vec<u32>,
    end: Option<SourceEnd<SliceTestBuffer>>,
}

impl ReceivedEvents {
    fn handle_event(&mut self, event: LayerEvent<SliceTestBuffer>) {
        match event {
            LayerEvent::Slices { block, layers } => self.slices.push((block, layers)),
            LayerEvent::Unavailable { .. } => {}
            LayerEvent::Arrived { block, buffer: room } => {
                assert!(content::matches(hash(block), &room.concat()), "wrong bytes were returned");
                self.whole.push(block);
            }
            LayerEvent::SourceEnded(end) => self.end = Some(*end),
        }
    }

    async fn drain(mut self, mut fetch: LayerFetch<SliceTestBuffer>) -> ReceivedEvents {
        while let Some(event) = fetch.next().await {
            self.handle_event(event);
        }
        self
    }

    /// Number of layers reported of each block; checks that each is reported once and in order.
    fn layers(&self) -> Vec<u32> {
        let mut layers = vec![0; BLOCKS as usize];
        for (block, told) in &self.slices {
            assert_eq!(layers[*block as usize], told.start, "block {block}");
            layers[*block as usize] = told.end;
        }
        layers
    }
}

#[tokio::test]
async fn first_layer_of_all_blocks_precedes_second_layers() {
    for over_quic in [false, true] {
        let cluster = cluster(over_quic);
        let fetch = cluster.fetch(0);
        fetch.begin();
        let told = ReceivedEvents::default().drain(fetch).await;
        assert!(told.slices.is_sorted_by_key(|(_, layers)| layers.start), "{:?}", told.slices);
        // The last piece of a block is reported by its arrival.
        assert_eq!(told.layers(), [2; BLOCKS as usize], "{:?}", told.slices);
        assert_eq!(told.whole, (0..BLOCKS).collect::<Vec<_>>());
        assert!(told.end.is_some_and(|end| end.miss.is_none() && end.incomplete.is_empty()));
    }
}

#[tokio::test]
async fn block_order_delivers_whole_blocks() {
    let cluster = cluster(false);
    let (call, rooms) = cluster.call(0);
    let fetch = cluster.client.fetch_layers(call, rooms).unwrap();
    fetch.begin();
    let told = ReceivedEvents::default().drain(fetch).await;
    assert_eq!((told.slices, told.whole), (vec![], vec![0, 1, 2, 3, 4]));
}

/// Long enough to notice an unexpected request.
const QUIET_PERIOD: Duration = Duration::from_millis(50);

#[tokio::test]
async fn read_buffer_holds_leading_layers_of_all_blocks() {
    // Two layers but not the third, or three, or all of them, or less than the first: then leading
    // blocks.
    let two = u64::from(BLOCKS * (SLICES[0] + SLICES[1]));
    for (buffer, layers) in [(two, 2), (two + 499, 2), (two + 500, 3), (u64::MAX, 4), (99_999, 0)] {
        let cluster = cluster(false);
        let mut fetch = cluster.fetch(buffer);
        let mut told = ReceivedEvents::default();
        let is_there = |told: &ReceivedEvents| match layers {
            4 => told.end.is_some(),
            0 => !told.whole.is_empty(),
            _ => told.layers() == [layers; 5],
        };
        while !is_there(&told) {
            told.handle_event(
                timeout(PATIENCE, fetch.next())
                    .await
                    .expect("no event in time")
                    .expect("the fetch ended early"),
            );
        }
        while let Ok(Some(event)) = timeout(QUIET_PERIOD, fetch.next()).await {
            told.handle_event(event);
        }
        match layers {
            4 => assert_eq!((&told.whole[..], told.end.is_some()), (&[0, 1, 2, 3, 4][..], true)),
            0 => assert_eq!((&told.whole[..], told.end.is_some()), (&[0][..], false)),
            _ => assert_eq!((told.layers(), &told.whole[..]), (vec![layers; 5], &[][..]), "{buffer}"),
        }
        assert_eq!(cluster.service.deadlines().len(), 1, "more was requested than fits: {buffer}");
        fetch.begin();
        let told = told.drain(fetch).await;
        assert_eq!(told.whole, [0, 1, 2, 3, 4], "{buffer}");
        let end = told.end.unwrap();
        assert!(end.miss.is_none(), "{buffer}");
        let frame = frame_of(hash(0), &SLICES);
        let heads = 5 * frame.head().unwrap().bytes().len();
        let twice = if (1..4).contains(&layers) { heads } else { 0 };
        assert_eq!(end.received_bytes, (5 * frame.bytes.len() + twice) as u64, "each slice once: {buffer}");
    }
}

#[tokio::test]
async fn fetch_started_at_once_sends_one_request() {
    let cluster = cluster(false);
    let fetch = cluster.fetch(u64::from(BLOCKS * SLICES[0]));
    fetch.begin();
    let told = ReceivedEvents::default().drain(fetch).await;
    assert_eq!(told.whole, [0, 1, 2, 3, 4]);
    assert_eq!(cluster.service.deadlines().len(), 1);
}

/// The fourth block's frame with a wrong byte in this layer.
fn corrupted_block(layer: usize) -> Frame {
    let good = frame_of(hash(3), &SLICES);
    let mut bytes = good.bytes.to_vec();
    let slice = good.slice(layer).unwrap();
    bytes[slice.as_ptr() as usize - good.bytes.as_ptr() as usize] ^= 1;
    Frame { bytes: bytes.into(), ..good }
}

#[tokio::test]
async fn blocks_before_a_missing_or_wrong_one_arrive_with_any_read_buffer() {
    let missing = |service: &MemoryService| service.forget(hash(3));
    let wrong_first = |service: &MemoryService| service.hold(corrupted_block(0));
    let wrong_last = |service: &MemoryService| service.hold(corrupted_block(3));
    type Spoil<'a> = &'a dyn Fn(&MemoryService);
    let cases: [(Spoil<'_>, MissReason); 3] = [
        (&missing, MissReason::NotHeld),
        (&wrong_first, MissReason::Corrupt),
        (&wrong_last, MissReason::Corrupt),
    ];
    for (spoil, reason) in cases {
        for buffer in [0, u64::from(BLOCKS * SLICES[0]), u64::MAX] {
            let cluster = cluster(false);
            spoil(&cluster.service);
            let mut fetch = cluster.fetch(buffer);
            let mut told = ReceivedEvents::default();
            while buffer > 0
                && let Ok(Some(event)) = timeout(QUIET_PERIOD, fetch.next()).await
            {
                told.handle_event(event);
            }
            fetch.begin();
            let told = told.drain(fetch).await;
            assert_eq!(told.whole, [0, 1, 2], "{reason:?} {buffer}");
            let end = told.end.unwrap();
            let miss = end.miss.map(|miss| (miss.first_missing_block, miss.reason));
            assert_eq!((miss, end.incomplete.len()), (Some((3, reason)), 2), "{buffer}");
        }
    }
}

#[tokio::test]
async fn slices_of_two_requests_must_match_one_frame() {
    let cluster = cluster(false);
    let mut fetch = cluster.fetch(u64::from(BLOCKS * SLICES[0]));
    let mut told = ReceivedEvents::default();
    while told.slices.len() < 5 {
        told.handle_event(fetch.next().await.unwrap());
    }
    let other = frame_of(hash(9), &SLICES);
    cluster.service.hold(Frame { hash: hash(2), ..other });
    fetch.begin();
    let told = told.drain(fetch).await;
    assert_eq!(told.whole, [0, 1], "only the blocks before it");
    let end = told.end.unwrap();
    assert_eq!(end.miss.map(|miss| (miss.first_missing_block, miss.reason)), Some((2, MissReason::Corrupt)));
    assert_eq!((end.wrong_blocks, end.incomplete.len()), (1, 3));
    for ReturnedBuffer { block, buffer, layers } in end.incomplete {
        assert!(layers > 0, "block {block} has no layer");
        let mut content = vec![0; SLICES.iter().sum::<u32>() as usize];
        content::fill(hash(block), &mut content);
        assert_eq!(*buffer[0], content[..SLICES[0] as usize], "reported slices of block {block} changed");
    }
}

/// Reports of a queue for a fetch with a wrong last slice in the last block: layers as `(layer,
/// end)`, and the first block to recompute as `(99, from)`.
async fn queue_reports(arrive: ArrivalOrder) -> Vec<(u32, u32)> {
    let cluster = cluster(false);
    let good = frame_of(hash(4), &SLICES);
    let mut bytes = good.bytes.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    cluster.service.hold(Frame { bytes: bytes.into(), ..good });
    let (call, rooms) = cluster.call(0);
    let call = LayerFetchCall { arrival_order: arrive, ..call };
    let operation = FetchLayersOperation { call, buffers: rooms, start_now: true, each_block: false };
    let runtime = tokio::runtime::Handle::current();
    let queue = CompletionQueue::new(cluster.client.clone(), QueueLimits::default(), runtime);
    queue.submit(vec![Submission { tag: 1, operation: Operation::FetchLayers(operation) }]).unwrap();
    let polled = tokio::task::spawn_blocking(move || {
        let (mut told, mut next) = (Vec::new(), [Completion::default()]);
        loop {
            assert_eq!(queue.wait(&mut next, PATIENCE), 1, "{told:?}");
            match std::mem::take(&mut next[0]).progress {
                Progress::Layer { layer, end_block } => told.push((layer, end_block)),
                Progress::Recompute { from_block } => told.push((99, from_block)),
                Progress::Ended(end) => {
                    assert!(
                        matches!(end.outcome, OperationOutcome::LayersFetched(Ok(came)) if came.end_block == 4)
                    );
                    return told;
                }
                other => panic!("{other:?}"),
            }
        }
    });
    polled.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_reports_layers_singly_or_once_all_blocks_are_certain() {
    assert_eq!(queue_reports(ArrivalOrder::ByLayer).await, [(0, 5), (1, 5), (99, 4), (2, 4), (3, 4)]);
    assert_eq!(queue_reports(ArrivalOrder::ByBlock).await, [(99, 4), (0, 4), (1, 4), (2, 4), (3, 4)]);
}
