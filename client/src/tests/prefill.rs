//! A prefill that overlaps with its load, on a paused clock. The node sends slices at a set rate,
//! falls silent, fails, or sends whole blocks; the engine's compute takes its nominal time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kv_core::content;

use kv_core::id::{Category, LeaseId, NodeId, RequestId, TenantId, Tier};
use kv_core::pipeline::{ArrivalOrder, ComputeCosts, NextAction, WAIT_SHARE};
use kv_core::schedule::RATE_MIN;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::suite::{EPOCH, IDENTITY, frame_of, hash, hashes};
use kvfleet_transport::{
    BoxFuture, Dialer, FetchAnswer, FetchRequest, LayerRequest, MissReason, Path, PathError, SaveAnswer,
    SaveRequest, SliceSink,
};
use tokio::time::{Instant, sleep, sleep_until};

use super::authority::{Authority, config};
use crate::{Client, FetchCall, FetchError, HeldLease, Prefill, PrefillCall, PrefillResult, ReturnedBuffer};

type PrefillBuffer = Vec<Box<[u8]>>;

const LAYERS: u32 = 32;
const BLOCKS: u32 = 32;
const SLICE_BYTES: u32 = 200;
/// Bytes of the slices of all blocks.
const BYTES: u64 = (LAYERS * BLOCKS * SLICE_BYTES) as u64;
/// Compute time of one layer of the new tokens; the clock has a grain of a millisecond.
const LAYER_COMPUTE: Duration = Duration::from_millis(30);
/// Compute time of the new tokens.
const COMPUTE: Duration = Duration::from_millis(960);

/// Costs of an engine that loads its history twelve times as fast as it computes it.
fn costs(load: Duration) -> ComputeCosts {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap();
    let block_layer_ns = vec![ns(load * 12 / (LAYERS * BLOCKS)); BLOCKS as usize];
    ComputeCosts { block_layer_ns, new_layer_ns: ns(LAYER_COMPUTE), layers: LAYERS }
}

/// Time to recompute everything.
fn recompute(load: Duration) -> Duration {
    Duration::from_nanos(costs(load).recompute_ns())
}

/// Maximum time with wasted waits, plus late timers in a few waits.
fn time_bound(load: Duration) -> Duration {
    recompute(load) + recompute(load) / u32::try_from(WAIT_SHARE).unwrap() + Duration::from_millis(5)
}

/// A node and the path to it.
#[derive(Clone, Debug)]
struct PacedNode {
    slice: Duration,
    by_layer: bool,
    /// Number of slices sent before it falls silent.
    silent_after: usize,
    /// Number of slices sent before it reports a failure.
    cut_after: usize,
    /// A block that it does not hold, and reports as missing.
    missing_block: Option<u32>,
    /// Number of the request that it answers with busy.
    busy_at: Option<usize>,
    requests: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
}

impl PacedNode {
    /// A node that sends all slices within this time.
    fn within(load: Duration) -> PacedNode {
        let never = usize::MAX;
        let slice = load / (LAYERS * BLOCKS);
        PacedNode {
            slice,
            by_layer: true,
            silent_after: never,
            cut_after: never,
            missing_block: None,
            busy_at: None,
            requests: Arc::default(),
            sent: Arc::default(),
        }
    }

    /// Sends the slices of these blocks in this order; `false` if the node fails.
    async fn send(&self, sink: &mut dyn SliceSink, frames: &[Frame], layers: &[(usize, usize)]) -> bool {
        // Due times count from the start, because timers have a grain of a millisecond.
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
            sink.count_received(bytes.len());
            sink.slices_filled(*position, *layer..*layer + 1);
        }
        true
    }
}

impl Path for PacedNode {
    fn fetch<'a>(
        &'a self,
        _: FetchRequest,
        _: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        unreachable!("a prefill must request layers")
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            if self.busy_at == Some(self.requests.fetch_add(1, Ordering::Relaxed)) {
                return Ok(FetchAnswer::Busy { retry_after: Duration::from_millis(1) });
            }
            let without = self.missing_block.map(hash);
            let has = request.hashes.iter().take_while(|hash| Some(**hash) != without);
            let frames: Vec<Frame> =
                has.map(|hash| frame_of(*hash, &[SLICE_BYTES; LAYERS as usize])).collect();
            for (position, frame) in frames.iter().enumerate() {
                assert!(sink.head(position, &frame.head().unwrap()));
            }
            let layers = asked.layers.start..asked.layers.end.min(LAYERS as usize);
            let mut order: Vec<_> =
                layers.flat_map(|layer| (0..frames.len()).map(move |position| (position, layer))).collect();
            if !self.by_layer || asked.arrive == ArrivalOrder::ByBlock {
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

    fn fetches_slices(&self) -> bool {
        self.by_layer
    }

    fn save<'a>(
        &'a self,
        _: SaveRequest,
        _: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        unreachable!("a prefill must not save")
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

impl Dialer for PacedNode {
    fn dial(&self, _: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        let path: Arc<dyn Path> = Arc::new(self.clone());
        Box::pin(async move { Ok(path) })
    }
}

/// A prefill of all blocks from this node, with the rate of a healthy node (everything in `load`)
/// as the expectation.
fn prefill(node: &PacedNode, load: Duration, read_buffer_bytes_max: u64) -> Prefill<PrefillBuffer> {
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(node.clone())).unwrap();
    client.prefill(call(load, read_buffer_bytes_max), prefill_buffers(BLOCKS)).unwrap()
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
        // As for an engine with two resident blocks.
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

fn prefill_buffers(blocks: u32) -> Vec<PrefillBuffer> {
    let room = || (0..LAYERS).map(|_| vec![0; SLICE_BYTES as usize].into()).collect();
    (0..blocks).map(|_| room()).collect()
}

/// Runs it from start to last layer, with the compute costs of `load`: its duration and result.
async fn run(prefill: Prefill<PrefillBuffer>, load: Duration) -> (Duration, PrefillResult<PrefillBuffer>) {
    run_at(prefill, &costs(load)).await
}

async fn run_at(
    mut prefill: Prefill<PrefillBuffer>,
    costs: &ComputeCosts,
) -> (Duration, PrefillResult<PrefillBuffer>) {
    let begun = Instant::now();
    let block = Duration::from_nanos(costs.block_layer_ns[0]);
    let new = Duration::from_nanos(costs.new_layer_ns);
    prefill.begin();
    loop {
        match prefill.next().await {
            NextAction::Layer { .. } => sleep(new + block * prefill.wave().count() as u32).await,
            NextAction::CatchUp { blocks, layers } => {
                assert!(blocks.iter().all(|block| (2..BLOCKS + 2).contains(block)));
                sleep(block * blocks.len() as u32 * layers).await;
            }
            NextAction::Done => break,
            wait @ NextAction::Wait { .. } => panic!("{wait:?}"),
        }
    }
    let took = begun.elapsed();
    let end = prefill.end();
    for (block, room) in &end.arrived {
        assert!(content::matches(hash(*block), &room.concat()), "wrong bytes in block {block}");
    }
    (took, end)
}

/// Rounding of the compute sleeps to whole milliseconds, per layer.
const SLEEP_ROUNDING: Duration = Duration::from_millis(LAYERS as u64);

#[tokio::test(start_paused = true)]
async fn overlapped_prefill_takes_the_longer_of_load_and_compute() {
    for load in [COMPUTE / 4, COMPUTE, COMPUTE * 2, COMPUTE * 4] {
        let (took, end) = run(prefill(&PacedNode::within(load), load, 0), load).await;
        // Plus one layer of each that does not overlap.
        let at_most = load.max(COMPUTE) + (load + COMPUTE) / LAYERS + SLEEP_ROUNDING;
        assert!(took <= at_most, "{load:?}: {took:?}, {:?}", end.computed);
        assert_eq!((&end.computed[..], end.arrived.len()), (&[][..], BLOCKS as usize), "{load:?}");
        assert_eq!((end.misses, end.wrong_blocks, end.received_bytes > BYTES), (vec![], 0, false));
    }
}

#[tokio::test(start_paused = true)]
async fn recomputed_blocks_are_not_requested_any_more() {
    // Eight times slower than expected.
    let load = COMPUTE;
    let node = PacedNode::within(load * 8);
    let (took, end) = run(prefill(&node, load, 0), load).await;
    assert!(took < time_bound(load), "{took:?}, {:?}", end.computed);
    assert_eq!(end.computed.last(), Some(&(BLOCKS + 1)), "the last blocks: {:?}", end.computed);
    let sent = node.sent.load(Ordering::Relaxed) as u32;
    assert!(sent < LAYERS * BLOCKS * 3 / 4, "{sent} slices were sent: {:?} computed", end.computed);
    assert_eq!((end.misses, end.wrong_blocks), (vec![], 0), "skipped blocks are not a miss");
}

#[tokio::test(start_paused = true)]
async fn no_path_is_slower_than_recompute() {
    let load = COMPUTE;
    let half = (LAYERS * BLOCKS / 2) as usize;
    let well = || PacedNode::within(load);
    let silent = |silent_after| PacedNode { silent_after, ..well() };
    let cut = |cut_after| PacedNode { cut_after, ..well() };
    let whole = |node: PacedNode| PacedNode { by_layer: false, ..node };
    let nodes = [
        ("at 1 %", PacedNode::within(load * 100)),
        ("at 1 %, whole blocks", whole(PacedNode::within(load * 100))),
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
        assert!(took <= time_bound(load) + SLEEP_ROUNDING, "{name}: {took:?}, {:?}", end.computed);
        let held = HeldLease { address: "node:0".to_owned(), lease: LeaseId(5) };
        assert_eq!(end.leases, [held], "{name}: the node may hold the lease");
        let here = |block: &u32| end.arrived.contains_key(block) || end.computed.contains(block);
        assert!((2..BLOCKS + 2).all(|block| here(&block)), "{name}: {:?}", end.computed);
        let lost = name.starts_with("cut").then_some((NodeId(0), MissReason::NodeLost));
        assert_eq!(end.misses.first().map(|miss| (miss.node, miss.reason)), lost, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_received_before_a_failure_are_not_recomputed() {
    let load = COMPUTE;
    let half = (LAYERS * BLOCKS / 2) as usize;
    let node = PacedNode { by_layer: false, cut_after: half, ..PacedNode::within(load) };
    let (took, end) = run(prefill(&node, load, 0), load).await;
    assert_eq!(end.computed, (BLOCKS / 2 + 2..BLOCKS + 2).collect::<Vec<_>>());
    assert!(took < recompute(load) * 2 / 3, "{took:?}");
    assert_eq!(end.saved_time, (recompute(load) - COMPUTE) / 2);
}

#[tokio::test(start_paused = true)]
async fn preload_is_large_enough_to_avoid_waits() {
    // Loading takes twice as long as computing the new tokens: half of the layers do not overlap.
    let load = COMPUTE * 2;
    let node = PacedNode::within(load);
    let ahead = prefill(&node, load, u64::MAX);
    let (buffer, layer) = (ahead.read_buffer_bytes(), u64::from(SLICE_BYTES * BLOCKS));
    // The expected rate is rounded down to whole bytes.
    assert!((BYTES / 2..=BYTES / 2 + layer).contains(&buffer) && buffer.is_multiple_of(layer), "{buffer}");
    sleep(load * 3).await;
    assert_eq!(
        node.sent.load(Ordering::Relaxed) as u64 * u64::from(SLICE_BYTES),
        buffer,
        "preload must match the read buffer"
    );
    let (took, end) = run(ahead, load).await;
    assert!(took <= COMPUTE + LAYER_COMPUTE * 2 + SLEEP_ROUNDING, "{took:?}");
    assert!(
        end.computed.is_empty() && end.idle_time <= LAYER_COMPUTE * 2,
        "{:?} {:?}",
        end.computed,
        end.idle_time
    );

    let bounded = prefill(&PacedNode::within(load), load, BYTES / 4 + 1);
    assert_eq!(bounded.read_buffer_bytes(), BYTES / 4);
    let fast = prefill(&PacedNode::within(load), LAYER_COMPUTE, u64::MAX);
    assert_eq!(fast.read_buffer_bytes(), 0, "no preload if loading is faster");
}

#[tokio::test(start_paused = true)]
async fn early_start_with_empty_read_buffer_costs_no_extra_time() {
    // As on an idle engine: the read buffer is still empty.
    for load in [COMPUTE * 2, COMPUTE * 4] {
        let (took, end) = run(prefill(&PacedNode::within(load), load, u64::MAX), load).await;
        assert!(took <= load + (load + COMPUTE) / LAYERS + SLEEP_ROUNDING, "{took:?}, {:?}", end.computed);
        assert_eq!((&end.computed[..], end.arrived.len()), (&[][..], BLOCKS as usize), "{load:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn missing_blocks_are_recomputed_when_reported() {
    let load = COMPUTE * 4;
    let missing = BLOCKS - 4;
    let node = PacedNode { missing_block: Some(missing), ..PacedNode::within(load) };
    let (took, end) = run(prefill(&node, load, 0), load).await;
    let last: Vec<u32> = (missing..BLOCKS + 2).collect();
    assert_eq!(end.computed, last);
    let computed = COMPUTE + load * 12 / BLOCKS * last.len() as u32;
    // It reports the miss when asked for the first layers of these blocks, after the blocks that
    // are completed first, and not at its end.
    assert!(took <= computed + load * 3 / 4, "{took:?}, {computed:?} of compute");
    assert_eq!(
        end.misses.first().map(|miss| (miss.first_missing_block, miss.reason)),
        Some((missing, MissReason::NotHeld))
    );
}

#[tokio::test(start_paused = true)]
async fn node_busy_midway_is_asked_again() {
    let load = COMPUTE * 2;
    let node = PacedNode { busy_at: Some(2), ..PacedNode::within(load) };
    let (took, end) = run(prefill(&node, load, 0), load).await;
    assert!(took < load * 5 / 4, "{took:?}");
    assert_eq!((end.computed, end.misses), (vec![], vec![]));
}

#[tokio::test(start_paused = true)]
async fn each_source_delivers_its_share() {
    // Two unequal sources in parallel: the larger one takes three quarters of the time of a single
    // one.
    let load = COMPUTE * 4;
    let call = call(load, 0);
    let source = |node, start_blocks, len_blocks| {
        let address = format!("node:{node}");
        pb::Source { node, address, start_blocks, len_blocks, ..call.fetch.sources[0].clone() }
    };
    let sources = vec![source(0, 2, BLOCKS / 4), source(1, 2 + BLOCKS / 4, BLOCKS * 3 / 4)];
    let fetch = FetchCall { sources, ..call.fetch.clone() };
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(PacedNode::within(load))).unwrap();
    let prefill = client.prefill(PrefillCall { fetch, ..call }, prefill_buffers(BLOCKS)).unwrap();
    let (took, end) = run(prefill, load).await;
    assert!(
        took <= load * 3 / 4 + (load + COMPUTE) / LAYERS + SLEEP_ROUNDING,
        "{took:?}, {:?}",
        end.computed
    );
    assert_eq!((&end.computed[..], end.arrived.len(), end.leases.len()), (&[][..], BLOCKS as usize, 2));
}

#[tokio::test(start_paused = true)]
async fn rate_is_learned_from_earlier_fetches() {
    let load = COMPUTE * 2;
    let node = PacedNode::within(load);
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(node.clone())).unwrap();
    // The expected rate is infinite, so there is no preload.
    let fast = PrefillCall { bytes_per_s: u64::MAX, ..call(load, u64::MAX) };
    let new = || client.prefill(fast.clone(), prefill_buffers(BLOCKS)).unwrap();
    let first = new();
    assert_eq!(first.read_buffer_bytes(), 0);
    run(first, load).await;
    let layer = u64::from(SLICE_BYTES * BLOCKS);
    let behind = new().read_buffer_bytes();
    assert!(behind.abs_diff(BYTES / 2) <= layer, "{behind}");
}

/// All buffers by block, each once, with their number of leading layers; checks the content of
/// these layers.
async fn collect_buffers(end: PrefillResult<PrefillBuffer>) -> Vec<(u32, u32)> {
    let rest = end.pending_buffers.collect().await;
    for some in [&end.incomplete, &rest] {
        assert!(some.is_sorted_by_key(|back| back.block), "buffers out of order");
    }
    let arrived =
        end.arrived.into_iter().map(|(block, room)| ReturnedBuffer { block, buffer: room, layers: LAYERS });
    let mut all: Vec<_> = arrived.chain(end.incomplete).chain(rest).collect();
    all.sort_by_key(|back| back.block);
    for ReturnedBuffer { block, buffer: room, layers } in &all {
        let frame = frame_of(hash(*block), &[SLICE_BYTES; LAYERS as usize]);
        let is_right = |layer: usize| room[layer][..] == frame.slice(layer).unwrap()[..];
        assert!((0..*layers as usize).all(is_right), "block {block}");
    }
    all.into_iter().map(|back| (back.block, back.layers)).collect()
}

#[tokio::test(start_paused = true)]
async fn every_buffer_returns_with_its_layers() {
    let load = COMPUTE;
    let half = (LAYERS * BLOCKS / 2) as usize;
    let well = || PacedNode::within(load);
    let nodes = [
        ("well", well()),
        ("too slow", PacedNode::within(load * 8)),
        ("silent from the first byte", PacedNode { silent_after: 0, ..well() }),
        ("silent in its middle", PacedNode { silent_after: half, ..well() }),
        ("silent in its middle, whole blocks", PacedNode { silent_after: half, by_layer: false, ..well() }),
        ("cut in its middle", PacedNode { cut_after: half, ..well() }),
        ("without a block", PacedNode { missing_block: Some(9), ..well() }),
    ];
    for (name, node) in nodes {
        let (_, end) = run(prefill(&node, load, 0), load).await;
        let rooms = collect_buffers(end).await;
        let blocks: Vec<u32> = rooms.iter().map(|(block, _)| *block).collect();
        assert_eq!(blocks, (2..BLOCKS + 2).collect::<Vec<_>>(), "{name}");
        let slices: u32 = rooms.iter().map(|(_, layers)| *layers).sum();
        assert_eq!(slices, node.sent.load(Ordering::Relaxed).min(slices as usize) as u32, "{name}");
        let some = name != "silent from the first byte";
        assert_eq!(slices > 0, some, "{name}: received slices must be in their buffer");
    }
}

#[tokio::test(start_paused = true)]
async fn abandoned_prefill_returns_buffers_and_stops_writing() {
    let load = COMPUTE;
    let node = PacedNode::within(load);
    let mut prefill = prefill(&node, load, 0);
    prefill.begin();
    sleep(load / 2).await;
    let mut end = prefill.end();
    assert!(end.arrived.is_empty() && end.incomplete.is_empty() && !end.pending_buffers.is_finished());
    let mut came = 0;
    while !end.pending_buffers.is_finished() {
        while end.pending_buffers.poll().is_some() {
            came += 1;
        }
        tokio::task::yield_now().await;
    }
    let sent = node.sent.load(Ordering::Relaxed);
    assert_eq!(came, BLOCKS);
    sleep(load).await;
    assert_eq!(node.sent.load(Ordering::Relaxed), sent, "a returned buffer was written");
}

#[tokio::test(start_paused = true)]
async fn abandoned_attempts_count_for_their_link() {
    let load = COMPUTE;
    let silent = PacedNode { silent_after: 0, ..PacedNode::within(load) };
    // Abandoned because recomputing is faster, and because the node did not report its lateness.
    for deadline in [Duration::from_secs(60), load / 4] {
        let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
        let client = Client::with_dialer(config, Arc::new(silent.clone())).unwrap();
        let call = call(load, 0);
        let call = PrefillCall { fetch: FetchCall { deadline, ..call.fetch }, ..call };
        let (_, end) = run(client.prefill(call, prefill_buffers(BLOCKS)).unwrap(), load).await;
        end.pending_buffers.collect().await;
        let told = client.link_reader().take();
        assert_eq!(told.len(), 1, "{deadline:?}");
        let rate = told[0].bytes as f64 / (told[0].stream_us as f64 / 1e6);
        assert!((rate / RATE_MIN - 1.0).abs() < 0.01, "{deadline:?}: {rate}");
        assert!(Duration::from_micros(told[0].stream_us) >= load / 4, "{deadline:?}: {told:?}");
    }
}

/// If a 64th of recomputing is below the timer's resolution, the timer must not decide.
#[tokio::test(start_paused = true)]
async fn healthy_path_is_awaited_even_if_recompute_is_short() {
    let ms = Duration::from_millis;
    for recompute_ms in [12, 20, 40, 80] {
        let each = |share: u64| recompute_ms * 1_000_000 * share / 10 / u64::from(LAYERS);
        let block_layer_ns = vec![each(9) / u64::from(BLOCKS); BLOCKS as usize];
        let costs = ComputeCosts { block_layer_ns, new_layer_ns: each(1), layers: LAYERS };
        let load = ms(recompute_ms) / 6;
        let prefill = |node: &PacedNode| {
            let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
            let client = Client::with_dialer(config, Arc::new(node.clone())).unwrap();
            let call = PrefillCall { costs: costs.clone(), ..call(load, 0) };
            client.prefill(call, prefill_buffers(BLOCKS)).unwrap()
        };
        let well = PacedNode::within(load);
        let (_, end) = run_at(prefill(&well), &costs).await;
        assert_eq!((&end.computed[..], end.arrived.len()), (&[][..], BLOCKS as usize), "{recompute_ms} ms");
        let silent = PacedNode { silent_after: 0, ..well };
        let (_, end) = run_at(prefill(&silent), &costs).await;
        // Two timer ticks, and the one of the wake-up.
        assert!(end.idle_time <= ms(3), "{recompute_ms} ms: {:?}", end.idle_time);
        assert_eq!(end.computed.len(), BLOCKS as usize, "{recompute_ms} ms");
    }
}

#[tokio::test]
async fn costs_of_another_model_are_rejected() {
    let config = config(vec!["127.0.0.1:1".to_owned()], Authority::new().member());
    let client = Client::with_dialer(config, Arc::new(PacedNode::within(LAYER_COMPUTE))).unwrap();
    let call = call(LAYER_COMPUTE, 0);
    let error = client.prefill(call.clone(), prefill_buffers(BLOCKS - 1)).unwrap_err();
    assert_eq!(error, FetchError::BufferCount { rooms: 31, blocks: 32 });
    let other = PrefillCall { costs: ComputeCosts { layers: 9, ..call.costs.clone() }, ..call };
    let error = client.prefill(other, prefill_buffers(BLOCKS)).unwrap_err();
    assert_eq!(error, FetchError::LayerCount { layers: 32, costs: 9 });
}
