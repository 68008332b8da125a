//! Layers that come one after the other, over the network's paths and into the caller's memory.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Category, LeaseId, RequestId, TenantId};
use kv_core::pipeline::Arrive;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::{content, pb};
use kvfleet_transport::quic::{QuicConfig, QuicDialer, QuicServer};
use kvfleet_transport::suite::{EPOCH, IDENTITY, MemoryService, PATIENCE, frame_of, hash, hashes};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer, TcpServer};
use kvfleet_transport::{Dialer, MissReason};

use tokio::time::timeout;

use super::authority::{Authority, config};
use crate::{
    Client, Completion, CompletionQueue, FetchCall, LayerEvent, LayerFetch, LayersCall, LayersOperation,
    Operation, Outcome, Progress, QueueLimits, RoomBack, SourceEnd, Submission,
};

type Room = Vec<Box<[u8]>>;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const SLICES: [u32; 4] = [20_000, 30_000, 100, 40_000];
const BLOCKS: u32 = 5;

/// A node with blocks that lie ready, and a client of it.
struct Cluster {
    service: MemoryService,
    client: Client,
    address: String,
    _server: Box<dyn std::any::Any>,
}

fn service() -> MemoryService {
    let service = MemoryService::default();
    (0..BLOCKS).for_each(|number| service.hold(frame_of(hash(number), &SLICES)));
    service.lie_ready();
    service
}

fn cluster(over_quic: bool) -> Cluster {
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
    Cluster { service, client, address: address.to_string(), _server: server }
}

impl Cluster {
    /// A fetch of all blocks by layers with so much loaded ahead.
    fn fetch(&self, read_buffer_bytes: u64) -> LayerFetch<Room> {
        let (call, rooms) = self.call(read_buffer_bytes);
        let call = LayersCall { arrive: Arrive::ByLayer, ..call };
        self.client.fetch_layers(call, rooms).unwrap()
    }

    fn call(&self, read_buffer_bytes: u64) -> (LayersCall, Vec<Room>) {
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
        let arrive = Arrive::ByBlock;
        let layers_at_once = u32::MAX;
        let call =
            LayersCall { fetch, frame_bytes, read_buffer_bytes, in_flight_bytes_max, layers_at_once, arrive };
        let room = || SLICES.map(|bytes| vec![0; bytes as usize].into()).to_vec();
        (call, (0..BLOCKS).map(|_| room()).collect())
    }
}

/// What was told of a fetch.
#[derive(Default)]
struct Told {
    slices: Vec<(u32, Range<u32>)>,
    whole: Vec<u32>,
    end: Option<SourceEnd<Room>>,
}

impl Told {
    fn hear(&mut self, event: LayerEvent<Room>) {
        match event {
            LayerEvent::Slices { block, layers } => self.slices.push((block, layers)),
            LayerEvent::Short { .. } => {}
            LayerEvent::Arrived { block, room } => {
                assert!(content::matches(hash(block), &room.concat()), "wrong bytes were handed out");
                self.whole.push(block);
            }
            LayerEvent::Ended(end) => self.end = Some(*end),
        }
    }

    async fn rest(mut self, mut fetch: LayerFetch<Room>) -> Told {
        while let Some(event) = fetch.next().await {
            self.hear(event);
        }
        self
    }

    /// How many layers of each block were told, each once and in order.
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
async fn the_first_layer_of_all_blocks_comes_before_the_second_of_any() {
    for over_quic in [false, true] {
        let cluster = cluster(over_quic);
        let fetch = cluster.fetch(0);
        fetch.begin();
        let told = Told::default().rest(fetch).await;
        assert!(told.slices.is_sorted_by_key(|(_, layers)| layers.start), "{:?}", told.slices);
        // The last piece of a block is told by the block itself.
        assert_eq!(told.layers(), [2; BLOCKS as usize], "{:?}", told.slices);
        assert_eq!(told.whole, (0..BLOCKS).collect::<Vec<_>>());
        assert!(told.end.is_some_and(|end| end.miss.is_none() && end.absent.is_empty()));
    }
}

#[tokio::test]
async fn by_blocks_each_comes_whole() {
    let cluster = cluster(false);
    let (call, rooms) = cluster.call(0);
    let fetch = cluster.client.fetch_layers(call, rooms).unwrap();
    fetch.begin();
    let told = Told::default().rest(fetch).await;
    assert_eq!((told.slices, told.whole), (vec![], vec![0, 1, 2, 3, 4]));
}

/// Long enough for a fetch that must not be.
const A_WHILE: Duration = Duration::from_millis(50);

#[tokio::test]
async fn before_its_turn_the_read_buffer_takes_the_leading_layers_of_all_blocks() {
    // Two layers and not the third, or three, or all of them, or not the first: then leading blocks.
    let two = u64::from(BLOCKS * (SLICES[0] + SLICES[1]));
    for (buffer, layers) in [(two, 2), (two + 499, 2), (two + 500, 3), (u64::MAX, 4), (99_999, 0)] {
        let cluster = cluster(false);
        let mut fetch = cluster.fetch(buffer);
        let mut told = Told::default();
        let is_there = |told: &Told| match layers {
            4 => told.end.is_some(),
            0 => !told.whole.is_empty(),
            _ => told.layers() == [layers; 5],
        };
        while !is_there(&told) {
            told.hear(
                timeout(PATIENCE, fetch.next()).await.expect("it comes in time").expect("there is more"),
            );
        }
        while let Ok(Some(event)) = timeout(A_WHILE, fetch.next()).await {
            told.hear(event);
        }
        match layers {
            4 => assert_eq!((&told.whole[..], told.end.is_some()), (&[0, 1, 2, 3, 4][..], true)),
            0 => assert_eq!((&told.whole[..], told.end.is_some()), (&[0][..], false)),
            _ => assert_eq!((told.layers(), &told.whole[..]), (vec![layers; 5], &[][..]), "{buffer}"),
        }
        assert_eq!(cluster.service.deadlines().len(), 1, "nothing more was asked for: {buffer}");
        fetch.begin();
        let told = told.rest(fetch).await;
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
async fn one_whose_turn_is_there_asks_once() {
    let cluster = cluster(false);
    let fetch = cluster.fetch(u64::from(BLOCKS * SLICES[0]));
    fetch.begin();
    let told = Told::default().rest(fetch).await;
    assert_eq!(told.whole, [0, 1, 2, 3, 4]);
    assert_eq!(cluster.service.deadlines().len(), 1);
}

/// The fourth block's frame with a wrong byte in this layer.
fn spoilt(layer: usize) -> Frame {
    let good = frame_of(hash(3), &SLICES);
    let mut bytes = good.bytes.to_vec();
    let slice = good.slice(layer).unwrap();
    bytes[slice.as_ptr() as usize - good.bytes.as_ptr() as usize] ^= 1;
    Frame { bytes: bytes.into(), ..good }
}

#[tokio::test]
async fn blocks_before_one_that_is_missing_or_wrong_come_whole_behind_a_read_buffer_too() {
    let missing = |service: &MemoryService| service.forget(hash(3));
    let wrong_first = |service: &MemoryService| service.hold(spoilt(0));
    let wrong_last = |service: &MemoryService| service.hold(spoilt(3));
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
            let mut told = Told::default();
            while buffer > 0
                && let Ok(Some(event)) = timeout(A_WHILE, fetch.next()).await
            {
                told.hear(event);
            }
            fetch.begin();
            let told = told.rest(fetch).await;
            assert_eq!(told.whole, [0, 1, 2], "{reason:?} {buffer}");
            let end = told.end.unwrap();
            let miss = end.miss.map(|miss| (miss.first_missing_block, miss.reason));
            assert_eq!((miss, end.absent.len()), (Some((3, reason)), 2), "{buffer}");
        }
    }
}

#[tokio::test]
async fn what_comes_in_two_fetches_is_of_one_frame() {
    let cluster = cluster(false);
    let mut fetch = cluster.fetch(u64::from(BLOCKS * SLICES[0]));
    let mut told = Told::default();
    while told.slices.len() < 5 {
        told.hear(fetch.next().await.unwrap());
    }
    let other = frame_of(hash(9), &SLICES);
    cluster.service.hold(Frame { hash: hash(2), ..other });
    fetch.begin();
    let told = told.rest(fetch).await;
    assert_eq!(told.whole, [0, 1], "those before it");
    let end = told.end.unwrap();
    assert_eq!(end.miss.map(|miss| (miss.first_missing_block, miss.reason)), Some((2, MissReason::Corrupt)));
    assert_eq!((end.wrong_blocks, end.absent.len()), (1, 3));
    for RoomBack { block, room, layers } in end.absent {
        assert!(layers > 0, "of block {block}");
        let mut content = vec![0; SLICES.iter().sum::<u32>() as usize];
        content::fill(hash(block), &mut content);
        assert_eq!(*room[0], content[..SLICES[0] as usize], "what was told of block {block} stays");
    }
}

/// What a queue tells of a fetch whose last block has a wrong last slice: layers as `(layer, end)`, and from where on
/// to compute as `(99, from)`.
async fn queue_tells(arrive: Arrive) -> Vec<(u32, u32)> {
    let cluster = cluster(false);
    let good = frame_of(hash(4), &SLICES);
    let mut bytes = good.bytes.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    cluster.service.hold(Frame { bytes: bytes.into(), ..good });
    let (call, rooms) = cluster.call(0);
    let call = LayersCall { arrive, ..call };
    let operation = LayersOperation { call, rooms, begins: true, each_block: false };
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
                    assert!(matches!(end.outcome, Outcome::Layers(Ok(came)) if came.end_block == 4));
                    return told;
                }
                other => panic!("{other:?}"),
            }
        }
    });
    polled.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_tells_each_layer_as_it_comes_or_all_when_nothing_can_be_missing_any_more() {
    assert_eq!(queue_tells(Arrive::ByLayer).await, [(0, 5), (1, 5), (99, 4), (2, 4), (3, 4)]);
    assert_eq!(queue_tells(Arrive::ByBlock).await, [(99, 4), (0, 4), (1, 4), (2, 4), (3, 4)]);
}
