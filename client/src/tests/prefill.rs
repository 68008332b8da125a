//! A prefill beside its load, on a clock that is moved by who waits for it: a node whose slices come one after the other at a set
//! rate, that falls silent, ends, or sends whole blocks, and an engine whose compute takes the time that it costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kv_core::id::{Category, LeaseId, NodeId, RequestId, TenantId, Tier};
use kv_core::pipeline::{Arrive, Costs, Next, WAIT_SHARE};
use kv_core::schedule::RATE_MIN;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::{content, pb};
use kvfleet_transport::suite::{EPOCH, IDENTITY, frame_of, hash, hashes};
use kvfleet_transport::{
    AskedLayers, BoxFuture, Dialer, FetchAnswer, FetchRequest, MissReason, Path, PathError, SaveAnswer,
    SaveRequest, SliceSink,
};
use tokio::time::{Instant, sleep, sleep_until};

use super::authority::{Authority, config};
use crate::{Client, FetchCall, FetchError, HeldLease, Prefill, PrefillCall, PrefillEnd, RoomBack};

type Room = Vec<Box<[u8]>>;

const LAYERS: u32 = 32;
const BLOCKS: u32 = 32;
const SLICE_BYTES: u32 = 200;
/// Bytes of the slices of all blocks.
const BYTES: u64 = (LAYERS * BLOCKS * SLICE_BYTES) as u64;
/// One layer of the new tokens: the clock has a grain of a millisecond.
const CELL: Duration = Duration::from_millis(30);
/// Computing of the new tokens.
const COMPUTE: Duration = Duration::from_millis(960);

/// What an engine takes whose history loads twelve times as fast as it is computed.
fn costs(load: Duration) -> Costs {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap();
    let block_layer_ns = vec![ns(load * 12 / (LAYERS * BLOCKS)); BLOCKS as usize];
    Costs { block_layer_ns, new_layer_ns: ns(CELL), layers: LAYERS }
}

/// R.
fn recompute(load: Duration) -> Duration {
    Duration::from_nanos(costs(load).recompute_ns())
}

/// What a wait in vain may take, and a timer that wakes late, in each of a few waits.
fn bound(load: Duration) -> Duration {
    recompute(load) + recompute(load) / u32::try_from(WAIT_SHARE).unwrap() + Duration::from_millis(5)
}

/// A node and the way to it.
#[derive(Clone, Debug)]
struct Paced {
    slice: Duration,
    by_layer: bool,
    /// So many slices come, and then nothing.
    silent_after: usize,
    /// So many slices come, and then it is known that no others do.
    cut_after: usize,
    /// It does not have this block, and says so.
    without: Option<u32>,
    /// Requests from this one on find it busy once.
    busy_at: Option<usize>,
    asked: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
}

impl Paced {
    /// All slices come within this time.
    fn within(load: Duration) -> Paced {
        let never = usize::MAX;
        let slice = load / (LAYERS * BLOCKS);
        Paced {
            slice,
            by_layer: true,
            silent_after: never,
            cut_after: never,
            without: None,
            busy_at: None,
            asked: Arc::default(),
            sent: Arc::default(),
        }
    }

    /// Sends the slices of these blocks in this order; `false` when it is cut.
    async fn send(&self, sink: &mut dyn SliceSink, frames: &[Frame], layers: &[(usize, usize)]) -> bool {
        // What is due is reckoned from the begin: timers of the clock have a grain of a millisecond.
        let begun = Instant::now();
        for (number, (position, layer)) in (1..).zip(layers) {
            let sent = self.sent.fetch_add(1, Ordering::Relaxed);
            if sent >= self.cut_after {
                return false;
            }
            if sent >= self.silent_after {
                std::future::pending::<()>().await;
            }
            sleep_until(begun + self.slice * number).await;
            let bytes = frames[*position].slice(*layer).unwrap();
            sink.slice(*position, *layer).unwrap().copy_from_slice(&bytes);
            sink.received(bytes.len());
            sink.filled(*position, *layer..*layer + 1);
        }
        true
    }
}

impl Path for Paced {
    fn fetch<'a>(
        &'a self,
        _: FetchRequest,
        _: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        unreachable!("a prefill asks for layers")
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            if self.busy_at == Some(self.asked.fetch_add(1, Ordering::Relaxed)) {
                return Ok(FetchAnswer::Busy { retry_after: Duration::from_millis(1) });
            }
            let without = self.without.map(hash);
            let has = request.hashes.iter().take_while(|hash| Some(**hash) != without);
            let frames: Vec<Frame> =
                has.map(|hash| frame_of(*hash, &[SLICE_BYTES; LAYERS as usize])).collect();
            for (position, frame) in frames.iter().enumerate() {
                assert!(sink.head(position, &frame.head().unwrap()));
            }
            let layers = asked.layers.start..asked.layers.end.min(LAYERS as usize);
            let mut order: Vec<_> =
                layers.flat_map(|layer| (0..frames.len()).map(move |position| (position, layer))).collect();
            if !self.by_layer || asked.arrive == Arrive::ByBlock {
                order.sort_unstable();
            }
            let tiers = vec![Tier::Dram; frames.len()];
            if self.send(sink, &frames, &order).await {
                let is_all = tiers.len() == request.hashes.len();
                let reason = MissReason::NotHeld;
                return Ok(if is_all {
                    FetchAnswer::Hit { tiers }
                } else {
                    FetchAnswer::Partial { tiers, reason }
                });
            }
            Ok(FetchAnswer::Partial { tiers: vec![], reason: MissReason::NodeLost })
        })
    }

    fn moves_slices(&self) -> bool {
        self.by_layer
    }

    fn save<'a>(
        &'a self,
        _: SaveRequest,
        _: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        unreachable!("a prefill saves nothing")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async { Ok(()) })
    }

    fn failure(&self) -> Option<PathError> {
        None
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async { Ok(Duration::ZERO) })
    }
}

impl Dialer for Paced {
    fn dial(&self, _: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        let path: Arc<dyn Path> = Arc::new(self.clone());
        Box::pin(async move { Ok(path) })
    }
}

/// A prefill of all blocks from such a node, expected at its rate if it were well: what it brings in `load`.
fn prefill(node: &Paced, load: Duration, read_buffer_bytes_max: u64) -> Prefill<Room> {
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(node.clone())).unwrap();
    client.prefill(call(load, read_buffer_bytes_max), rooms(BLOCKS)).unwrap()
}

fn call(load: Duration, read_buffer_bytes_max: u64) -> PrefillCall {
    let source = pb::Source {
        node: 0,
        epoch: EPOCH.0,
        address: "node:0".to_owned(),
        start_blocks: 2,
        len_blocks: BLOCKS,
        tier: 1,
    };
    let fetch = FetchCall {
        lease: LeaseId(5),
        request: RequestId(5),
        tenant: TenantId(0),
        category: Category::default(),
        identity: IDENTITY,
        hashes: hashes(BLOCKS + 2),
        // As an engine that has the first two blocks itself.
        resident_blocks: 2,
        sources: vec![source],
        deadline: Duration::from_secs(60),
        class: None,
    };
    PrefillCall {
        fetch,
        costs: costs(load),
        frame_bytes: frame_of(hash(0), &[SLICE_BYTES; LAYERS as usize]).bytes.len() as u64,
        bytes_per_s: (BYTES as f64 / load.as_secs_f64()) as u64,
        read_buffer_bytes_max,
        in_flight_bytes_max: u64::MAX,
    }
}

fn rooms(blocks: u32) -> Vec<Room> {
    let room = || (0..LAYERS).map(|_| vec![0; SLICE_BYTES as usize].into()).collect();
    (0..blocks).map(|_| room()).collect()
}

/// Runs it from the job's turn to its last layer: how long that took, and what came of it. Its layers take what `load` says.
async fn run(prefill: Prefill<Room>, load: Duration) -> (Duration, PrefillEnd<Room>) {
    run_at(prefill, &costs(load)).await
}

async fn run_at(mut prefill: Prefill<Room>, costs: &Costs) -> (Duration, PrefillEnd<Room>) {
    let begun = Instant::now();
    let block = Duration::from_nanos(costs.block_layer_ns[0]);
    let new = Duration::from_nanos(costs.new_layer_ns);
    prefill.begin();
    loop {
        match prefill.next().await {
            Next::Layer { .. } => sleep(new + block * prefill.pass().count() as u32).await,
            Next::CatchUp { blocks, layers } => {
                assert!(blocks.iter().all(|block| (2..BLOCKS + 2).contains(block)));
                sleep(block * blocks.len() as u32 * layers).await;
            }
            Next::Done => break,
            wait @ Next::Wait { .. } => panic!("{wait:?}"),
        }
    }
    let took = begun.elapsed();
    let end = prefill.end();
    for (block, room) in &end.arrived {
        assert!(content::matches(hash(*block), &room.concat()), "wrong bytes in block {block}");
    }
    (took, end)
}

/// Compute sleeps in whole milliseconds, each layer.
const SLEEPS: Duration = Duration::from_millis(LAYERS as u64);

#[tokio::test(start_paused = true)]
async fn what_comes_while_it_computes_takes_the_longer_of_the_two() {
    for load in [COMPUTE / 4, COMPUTE, COMPUTE * 2, COMPUTE * 4] {
        let (took, end) = run(prefill(&Paced::within(load), load, 0), load).await;
        // And a layer of each, which nothing is beside.
        let at_most = load.max(COMPUTE) + (load + COMPUTE) / LAYERS + SLEEPS;
        assert!(took <= at_most, "{load:?}: {took:?}, {:?}", end.computed);
        assert_eq!((&end.computed[..], end.arrived.len()), (&[][..], BLOCKS as usize), "{load:?}");
        assert_eq!((end.misses, end.wrong_blocks, end.received_bytes > BYTES), (vec![], 0, false));
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_computed_in_place_of_waiting_is_not_asked_for_any_more() {
    // Eight times as slow as it was.
    let load = COMPUTE;
    let node = Paced::within(load * 8);
    let (took, end) = run(prefill(&node, load, 0), load).await;
    assert!(took < bound(load), "{took:?}, {:?}", end.computed);
    assert_eq!(end.computed.last(), Some(&(BLOCKS + 1)), "the last ones: {:?}", end.computed);
    let sent = node.sent.load(Ordering::Relaxed) as u32;
    assert!(sent < LAYERS * BLOCKS * 3 / 4, "{sent} slices came: {:?} computed", end.computed);
    assert_eq!((end.misses, end.wrong_blocks), (vec![], 0), "what was left out is no miss");
}

#[tokio::test(start_paused = true)]
async fn no_path_makes_it_longer_than_recomputing_all() {
    let load = COMPUTE;
    let half = (LAYERS * BLOCKS / 2) as usize;
    let well = || Paced::within(load);
    let silent = |silent_after| Paced { silent_after, ..well() };
    let cut = |cut_after| Paced { cut_after, ..well() };
    let whole = |node: Paced| Paced { by_layer: false, ..node };
    let nodes = [
        ("at 1 %", Paced::within(load * 100)),
        ("at 1 %, whole blocks", whole(Paced::within(load * 100))),
        ("silent from the first byte", silent(0)),
        ("silent in its middle", silent(half)),
        ("silent in its middle, whole blocks", whole(silent(half))),
        ("silent before the last slice", silent(2 * half - 1)),
        ("cut from the first byte", cut(0)),
        ("cut in its middle", cut(half)),
        ("cut in its middle, whole blocks", whole(cut(half))),
    ];
    for (name, node) in nodes {
        let (took, end) = run(prefill(&node, load, 0), load).await;
        assert!(took <= bound(load) + SLEEPS, "{name}: {took:?}, {:?}", end.computed);
        let held = HeldLease { address: "node:0".to_owned(), lease: LeaseId(5) };
        assert_eq!(end.leases, [held], "{name}: the node may hold it");
        let here = |block: &u32| end.arrived.contains_key(block) || end.computed.contains(block);
        assert!((2..BLOCKS + 2).all(|block| here(&block)), "{name}: {:?}", end.computed);
        let lost = name.starts_with("cut").then_some((NodeId(0), MissReason::NodeLost));
        assert_eq!(end.misses.first().map(|miss| (miss.node, miss.reason)), lost, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_came_before_it_failed_is_not_computed() {
    let load = COMPUTE;
    let half = (LAYERS * BLOCKS / 2) as usize;
    let node = Paced { by_layer: false, cut_after: half, ..Paced::within(load) };
    let (took, end) = run(prefill(&node, load, 0), load).await;
    assert_eq!(end.computed, (BLOCKS / 2 + 2..BLOCKS + 2).collect::<Vec<_>>());
    assert!(took < recompute(load) * 2 / 3, "{took:?}");
    assert_eq!(end.saved, (recompute(load) - COMPUTE) / 2);
}

#[tokio::test(start_paused = true)]
async fn before_its_turn_so_much_is_loaded_that_it_never_waits() {
    // Twice as long as the new tokens are computed: half of the layers are behind.
    let load = COMPUTE * 2;
    let node = Paced::within(load);
    let ahead = prefill(&node, load, u64::MAX);
    let (buffer, layer) = (ahead.read_buffer_bytes(), u64::from(SLICE_BYTES * BLOCKS));
    // The expected rate is a whole number of bytes: a little less.
    assert!((BYTES / 2..=BYTES / 2 + layer).contains(&buffer) && buffer.is_multiple_of(layer), "{buffer}");
    sleep(load * 3).await;
    assert_eq!(node.sent.load(Ordering::Relaxed) as u64 * u64::from(SLICE_BYTES), buffer, "and no more");
    let (took, end) = run(ahead, load).await;
    assert!(took <= COMPUTE + CELL * 2 + SLEEPS, "{took:?}");
    assert!(end.computed.is_empty() && end.idle <= CELL * 2, "{:?} {:?}", end.computed, end.idle);

    let bounded = prefill(&Paced::within(load), load, BYTES / 4 + 1);
    assert_eq!(bounded.read_buffer_bytes(), BYTES / 4);
    let fast = prefill(&Paced::within(load), CELL, u64::MAX);
    assert_eq!(fast.read_buffer_bytes(), 0, "where loading is the faster nothing is loaded ahead");
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_comes_before_anything_was_loaded_waits_no_longer_for_it() {
    // As on an engine that has nothing else to do: a read buffer that nothing was put in.
    for load in [COMPUTE * 2, COMPUTE * 4] {
        let (took, end) = run(prefill(&Paced::within(load), load, u64::MAX), load).await;
        assert!(took <= load + (load + COMPUTE) / LAYERS + SLEEPS, "{took:?}, {:?}", end.computed);
        assert_eq!((&end.computed[..], end.arrived.len()), (&[][..], BLOCKS as usize), "{load:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_that_a_node_does_not_have_are_computed_as_soon_as_it_says_so() {
    let load = COMPUTE * 4;
    let missing = BLOCKS - 4;
    let node = Paced { without: Some(missing), ..Paced::within(load) };
    let (took, end) = run(prefill(&node, load, 0), load).await;
    let last: Vec<u32> = (missing..BLOCKS + 2).collect();
    assert_eq!(end.computed, last);
    let computed = COMPUTE + load * 12 / BLOCKS * last.len() as u32;
    // It says so when it is asked for their first layers, behind the blocks that come whole first, and not at its end.
    assert!(took <= computed + load * 3 / 4, "{took:?}, {computed:?} of compute");
    assert_eq!(
        end.misses.first().map(|miss| (miss.first_missing_block, miss.reason)),
        Some((missing, MissReason::NotHeld))
    );
}

#[tokio::test(start_paused = true)]
async fn a_node_that_is_busy_in_the_middle_is_asked_again() {
    let load = COMPUTE * 2;
    let node = Paced { busy_at: Some(2), ..Paced::within(load) };
    let (took, end) = run(prefill(&node, load, 0), load).await;
    assert!(took < load * 5 / 4, "{took:?}");
    assert_eq!((end.computed, end.misses), (vec![], vec![]));
}

#[tokio::test(start_paused = true)]
async fn each_source_brings_its_share() {
    // Uneven ones, side by side: the larger one takes three quarters of the time that one for all would.
    let load = COMPUTE * 4;
    let call = call(load, 0);
    let source = |node, start_blocks, len_blocks| {
        let address = format!("node:{node}");
        pb::Source { node, address, start_blocks, len_blocks, ..call.fetch.sources[0].clone() }
    };
    let sources = vec![source(0, 2, BLOCKS / 4), source(1, 2 + BLOCKS / 4, BLOCKS * 3 / 4)];
    let fetch = FetchCall { sources, ..call.fetch.clone() };
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(Paced::within(load))).unwrap();
    let prefill = client.prefill(PrefillCall { fetch, ..call }, rooms(BLOCKS)).unwrap();
    let (took, end) = run(prefill, load).await;
    assert!(took <= load * 3 / 4 + (load + COMPUTE) / LAYERS + SLEEPS, "{took:?}, {:?}", end.computed);
    assert_eq!((&end.computed[..], end.arrived.len(), end.leases.len()), (&[][..], BLOCKS as usize, 2));
}

#[tokio::test(start_paused = true)]
async fn how_fast_it_comes_is_known_from_the_fetches_before() {
    let load = COMPUTE * 2;
    let node = Paced::within(load);
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(node.clone())).unwrap();
    // Expected at once, so nothing is loaded ahead.
    let fast = PrefillCall { bytes_per_s: u64::MAX, ..call(load, u64::MAX) };
    let new = || client.prefill(fast.clone(), rooms(BLOCKS)).unwrap();
    let first = new();
    assert_eq!(first.read_buffer_bytes(), 0);
    run(first, load).await;
    let layer = u64::from(SLICE_BYTES * BLOCKS);
    let behind = new().read_buffer_bytes();
    assert!(behind.abs_diff(BYTES / 2) <= layer, "{behind}");
}

/// The blocks of all rooms that came back, each once, with how many leading layers are in it; and that these hold what they should.
async fn every_room(end: PrefillEnd<Room>) -> Vec<(u32, u32)> {
    let rest = end.rest.all().await;
    for some in [&end.absent, &rest] {
        assert!(some.is_sorted_by_key(|back| back.block), "in order");
    }
    let arrived = end.arrived.into_iter().map(|(block, room)| RoomBack { block, room, layers: LAYERS });
    let mut all: Vec<_> = arrived.chain(end.absent).chain(rest).collect();
    all.sort_by_key(|back| back.block);
    for RoomBack { block, room, layers } in &all {
        let frame = frame_of(hash(*block), &[SLICE_BYTES; LAYERS as usize]);
        let is_right = |layer: usize| room[layer][..] == frame.slice(layer).unwrap()[..];
        assert!((0..*layers as usize).all(is_right), "block {block}");
    }
    all.into_iter().map(|back| (back.block, back.layers)).collect()
}

#[tokio::test(start_paused = true)]
async fn every_room_comes_back_with_what_is_in_it() {
    let load = COMPUTE;
    let half = (LAYERS * BLOCKS / 2) as usize;
    let well = || Paced::within(load);
    let nodes = [
        ("well", well()),
        ("too slow", Paced::within(load * 8)),
        ("silent from the first byte", Paced { silent_after: 0, ..well() }),
        ("silent in its middle", Paced { silent_after: half, ..well() }),
        ("silent in its middle, whole blocks", Paced { silent_after: half, by_layer: false, ..well() }),
        ("cut in its middle", Paced { cut_after: half, ..well() }),
        ("without a block", Paced { without: Some(9), ..well() }),
    ];
    for (name, node) in nodes {
        let (_, end) = run(prefill(&node, load, 0), load).await;
        let rooms = every_room(end).await;
        let blocks: Vec<u32> = rooms.iter().map(|(block, _)| *block).collect();
        assert_eq!(blocks, (2..BLOCKS + 2).collect::<Vec<_>>(), "{name}");
        let slices: u32 = rooms.iter().map(|(_, layers)| *layers).sum();
        assert_eq!(slices, node.sent.load(Ordering::Relaxed).min(slices as usize) as u32, "{name}");
        let some = name != "silent from the first byte";
        assert_eq!(slices > 0, some, "{name}: what came is in its room");
    }
}

#[tokio::test(start_paused = true)]
async fn a_prefill_that_is_given_up_gives_every_room_back_and_writes_no_more() {
    let load = COMPUTE;
    let node = Paced::within(load);
    let mut prefill = prefill(&node, load, 0);
    prefill.begin();
    sleep(load / 2).await;
    let mut end = prefill.end();
    assert!(end.arrived.is_empty() && end.absent.is_empty() && !end.rest.is_over());
    let mut came = 0;
    while !end.rest.is_over() {
        while end.rest.poll().is_some() {
            came += 1;
        }
        tokio::task::yield_now().await;
    }
    let sent = node.sent.load(Ordering::Relaxed);
    assert_eq!(came, BLOCKS);
    sleep(load).await;
    assert_eq!(node.sent.load(Ordering::Relaxed), sent, "nothing is written to a room that came back");
}

#[tokio::test(start_paused = true)]
async fn what_was_given_up_counts_for_its_path() {
    let load = COMPUTE;
    let silent = Paced { silent_after: 0, ..Paced::within(load) };
    // Given up because computing is quicker, and because it did not even say that it is late.
    for deadline in [Duration::from_secs(60), load / 4] {
        let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
        let client = Client::with_dialer(config, Arc::new(silent.clone())).unwrap();
        let call = call(load, 0);
        let call = PrefillCall { fetch: FetchCall { deadline, ..call.fetch }, ..call };
        let (_, end) = run(client.prefill(call, rooms(BLOCKS)).unwrap(), load).await;
        end.rest.all().await;
        let told = client.link_reader().take();
        assert_eq!(told.len(), 1, "{deadline:?}");
        let rate = told[0].bytes as f64 / (told[0].stream_us as f64 / 1e6);
        assert!((rate / RATE_MIN - 1.0).abs() < 0.01, "{deadline:?}: {rate}");
        assert!(Duration::from_micros(told[0].stream_us) >= load / 4, "{deadline:?}: {told:?}");
    }
}

/// Where a 64th of recomputing is less than what a timer can tell, it is not the timer that decides.
#[tokio::test(start_paused = true)]
async fn where_recomputing_is_short_a_path_that_is_well_is_still_waited_for() {
    let ms = Duration::from_millis;
    for recompute_ms in [12, 20, 40, 80] {
        let each = |share: u64| recompute_ms * 1_000_000 * share / 10 / u64::from(LAYERS);
        let block_layer_ns = vec![each(9) / u64::from(BLOCKS); BLOCKS as usize];
        let costs = Costs { block_layer_ns, new_layer_ns: each(1), layers: LAYERS };
        let load = ms(recompute_ms) / 6;
        let prefill = |node: &Paced| {
            let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
            let client = Client::with_dialer(config, Arc::new(node.clone())).unwrap();
            let call = PrefillCall { costs: costs.clone(), ..call(load, 0) };
            client.prefill(call, rooms(BLOCKS)).unwrap()
        };
        let well = Paced::within(load);
        let (_, end) = run_at(prefill(&well), &costs).await;
        assert_eq!((&end.computed[..], end.arrived.len()), (&[][..], BLOCKS as usize), "{recompute_ms} ms");
        let silent = Paced { silent_after: 0, ..well };
        let (_, end) = run_at(prefill(&silent), &costs).await;
        // Two turns of the clock, and the one in which it wakes up.
        assert!(end.idle <= ms(3), "{recompute_ms} ms: {:?}", end.idle);
        assert_eq!(end.computed.len(), BLOCKS as usize, "{recompute_ms} ms");
    }
}

#[tokio::test]
async fn costs_of_another_model_are_refused() {
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(Paced::within(CELL))).unwrap();
    let call = call(CELL, 0);
    let error = client.prefill(call.clone(), rooms(BLOCKS - 1)).unwrap_err();
    assert_eq!(error, FetchError::Rooms { rooms: 31, blocks: 32 });
    let other = PrefillCall { costs: Costs { layers: 9, ..call.costs.clone() }, ..call };
    let error = client.prefill(other, rooms(BLOCKS)).unwrap_err();
    assert_eq!(error, FetchError::Layers { layers: 32, costs: 9 });
}
