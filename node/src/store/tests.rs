//! The store with its disk and block service, without the wire: waiting readers, limits, restarts.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use kv_core::id::{CallerId, Category, Generation, IdentityDigest, LeaseId, RequestId, TenantId, Tier};
use kvfleet_proto::frame::{Frame, KeyForm, seal};
use kvfleet_proto::pb;
use kvfleet_transport::{
    BlockService, FetchAnswer, FetchRequest, MissReason, SaveOffer, SaveRefusal, SaveRequest,
};
use tokio::time::timeout;

use super::*;
use crate::NodeConfig;
use crate::arena::{Purpose, SlotMut};
use crate::block_service::Service;
use crate::start;
use crate::tiers::ssd::SsdFaults;

/// Longest wait for a required event.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) const BLOCK_BYTES: usize = 6000;

pub(super) struct StoreFixture {
    pub(super) store: StoreHandle,
    pub(super) service: Service,
    pub(super) arena: Arena,
    metrics: Metrics,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

pub(super) fn config(dir: &std::path::Path, dram_blocks: u64, ssd_blocks: u64) -> NodeConfig {
    NodeConfig {
        data_dir: dir.join("ssd"),
        dram_blocks: Some(dram_blocks),
        ssd_blocks: Some(ssd_blocks),
        block_bytes: BLOCK_BYTES as u64,
        policy: "lru".to_owned(),
        watermark_high: 1.0,
        watermark_low: 1.0,
        ..NodeConfig::default()
    }
}

pub(super) async fn open(config: &NodeConfig) -> StoreFixture {
    open_with(config, |_| {}).await
}

pub(super) async fn parts(config: &NodeConfig) -> StoreParts {
    parts_on(config, Arc::default()).await
}

/// Store parts on SSDs with these faults.
pub(super) async fn parts_on(config: &NodeConfig, faults: Arc<SsdFaults>) -> StoreParts {
    let arena = start::open_arena(config).unwrap();
    let shared = Arc::new(SharedState::new(NodeId(1)));
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    start::open_parts(config, arena, shared, metrics, faults).await.unwrap()
}

/// A store with parts replaced by `change`.
pub(super) async fn open_with(config: &NodeConfig, change: impl FnOnce(&mut StoreParts)) -> StoreFixture {
    open_of(config, parts(config).await, change)
}

pub(super) fn open_of(
    config: &NodeConfig,
    mut parts: StoreParts,
    change: impl FnOnce(&mut StoreParts),
) -> StoreFixture {
    change(&mut parts);
    let (arena, metrics) = (parts.arena.clone(), parts.metrics.clone());
    let stop = CancellationToken::new();
    let (store, task) = Store::start(parts, stop.clone());
    let service = start::service(config, store.clone(), arena.clone(), metrics.clone());
    StoreFixture { store, service, arena, metrics, stop, task }
}

pub(super) fn identity() -> IdentityDigest {
    NodeConfig::default().identity.manifest().digest()
}

pub(super) fn hash(number: u64) -> BlockHash {
    let mut bytes = [0xcd; _];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockHash(bytes)
}

pub(super) fn frame(number: u64, payload: usize) -> Frame {
    let fill = vec![number as u8; payload];
    seal(identity(), hash(number), KeyForm::Rotated, &[u32::try_from(payload).unwrap()], &fill).unwrap()
}

pub(super) fn asker(lease: u64) -> kvfleet_transport::RequestContext {
    kvfleet_transport::RequestContext {
        lease: LeaseId(lease),
        request: RequestId(lease),
        tenant: TenantId(0),
        category: Category::default(),
        identity: identity(),
        traceparent: String::new(),
        class: None,
    }
}

pub(super) fn save_request(lease: u64, numbers: std::ops::Range<u64>) -> SaveRequest {
    SaveRequest {
        context: asker(lease),
        parent: None,
        first_offset_blocks: u32::try_from(numbers.start).unwrap(),
        hashes: numbers.map(hash).collect(),
        frame_bytes: frame(0, BLOCK_BYTES).bytes.len() as u64,
    }
}

pub(super) fn fetch_request(lease: u64, numbers: std::ops::Range<u64>) -> FetchRequest {
    FetchRequest {
        context: asker(lease),
        epoch: Epoch(0),
        first_offset_blocks: 0,
        hashes: numbers.map(hash).collect(),
        deadline: Duration::from_micros(u64::MAX),
        progress: kvfleet_transport::Progress::default(),
    }
}

impl StoreFixture {
    /// Saves blocks with payloads of `bytes(number)`; the lease stays. Returns the number stored.
    pub(super) async fn save(
        &self,
        lease: u64,
        numbers: std::ops::Range<u64>,
        bytes: impl Fn(u64) -> usize,
    ) -> u32 {
        let (offer, session) = self.service.save(save_request(lease, numbers.clone())).await;
        let (SaveOffer::Wanted(wanted), Some(mut session)) = (offer, session) else { return 0 };
        for (number, _) in numbers.zip(wanted).filter(|(_, wanted)| *wanted) {
            session.put(frame(number, bytes(number))).await;
        }
        session.finish().await.stored_blocks
    }

    pub(super) async fn saved(&self, lease: u64, numbers: std::ops::Range<u64>) {
        let count = numbers.end - numbers.start;
        assert_eq!(u64::from(self.save(lease, numbers, |_| BLOCK_BYTES).await), count);
        self.service.release(LeaseId(lease)).await;
    }

    /// Fetches and verifies the frames.
    pub(super) async fn fetch(&self, lease: u64, numbers: std::ops::Range<u64>) -> (FetchAnswer, usize) {
        let mut reply = self.service.fetch(fetch_request(lease, numbers.clone())).await;
        let mut got = 0;
        while let Some(frame) = timeout(PATIENCE, reply.frames.next()).await.unwrap() {
            frame.verify(identity(), hash(numbers.start + got)).unwrap();
            got += 1;
        }
        (reply.answer, usize::try_from(got).unwrap())
    }

    pub(super) async fn status(&self) -> pb::NodeStatusReply {
        self.store.request(|reply| StoreRequest::Status { reply }).await.unwrap()
    }

    pub(super) async fn wait_until(&self, what: &str, test: impl Fn(&pb::NodeStatusReply, usize) -> bool) {
        let tries = async {
            while !test(&self.status().await, self.arena.used_bytes()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(PATIENCE, tries).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// Takes every free DRAM slot, so that no block can be loaded.
    pub(super) fn take_all_slots(&self) -> Vec<SlotMut> {
        std::iter::from_fn(|| self.arena.take(1, Purpose::Load)).collect()
    }

    pub(super) async fn quota(&self, bytes: u64) {
        let quotas = vec![(TenantId(0), bytes)];
        self.store
            .send(StoreRequest::Directives { pins: Vec::new(), quotas, ttls: Vec::new() })
            .await
            .unwrap();
    }

    pub(super) async fn close(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// A store with block 0 on SSD only, and its one DRAM block held under lease 3.
pub(super) async fn fixture_with_block_on_ssd(config: &NodeConfig) -> StoreFixture {
    let bench = open(config).await;
    bench.saved(1, 0..1).await;
    bench.saved(2, 1..2).await;
    let slot = crate::arena::slot_bytes(config.frame_bytes_max());
    bench
        .wait_until("block 0 is on SSD only", |status, used| status.tiers[1].blocks == 1 && used == slot)
        .await;
    assert_eq!(bench.fetch(3, 1..2).await.1, 1);
    bench
}

#[tokio::test]
async fn readers_of_a_block_dropped_before_its_load_get_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let bench = fixture_with_block_on_ssd(&config(dir.path(), 1, 8)).await;
    let room = bench.take_all_slots();
    let mut reply = bench.service.fetch(fetch_request(4, 0..1)).await;
    assert_eq!(reply.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd] });
    bench.service.release(LeaseId(4)).await;
    // The load cannot begin, and the block is unheld: its tenant's quota drops it.
    bench.quota(frame(0, BLOCK_BYTES).bytes.len() as u64).await;
    let end = timeout(PATIENCE, reply.frames.next()).await.expect("the reader gets an end");
    assert!(end.is_none());
    // Another block reuses the key; no reader may mistake it for the first one.
    bench.quota(u64::MAX).await;
    drop(room);
    bench.saved(5, 7..8).await;
    assert_eq!(bench.fetch(6, 7..8).await.1, 1);
    assert_eq!(bench.fetch(6, 0..1).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
}

#[tokio::test]
async fn busy_fetch_leaves_no_lease_and_gone_reader_frees_its_load() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), 1, 8);
    config.fetch_inflight_bytes = config.frame_bytes_max() as u64;
    let bench = fixture_with_block_on_ssd(&config).await;
    let room = bench.take_all_slots();
    let waiting = bench.service.fetch(fetch_request(4, 0..1)).await;
    assert_eq!(waiting.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd] });
    let leases = bench.status().await.leases;
    let busy = bench.service.fetch(fetch_request(5, 0..1)).await.answer;
    assert!(matches!(busy, FetchAnswer::Busy { .. }), "{busy:?}");
    assert_eq!(bench.status().await.leases, leases, "a refused request holds no lease");
    // Blocks in DRAM need no load budget.
    assert_eq!(bench.fetch(6, 1..2).await.1, 1);
    // The first reader leaves; its load never began, and its deadline is far away.
    drop(waiting);
    let tries = async {
        while matches!(bench.service.fetch(fetch_request(7, 0..1)).await.answer, FetchAnswer::Busy { .. }) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, tries).await.expect("the load budget is free again");
    drop(room);
    // The last of those readers left too; its task must notice that.
    let answered = async {
        loop {
            match bench.fetch(8, 0..1).await {
                (FetchAnswer::Busy { .. }, _) => tokio::task::yield_now().await,
                (_, got) => return got,
            }
        }
    };
    assert_eq!(timeout(PATIENCE, answered).await.unwrap(), 1);
}

#[tokio::test]
async fn frames_shorter_than_offered_come_back_from_ssd() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 2, 30)).await;
    let length = |number: u64| 100 + usize::try_from(number).unwrap() * 290;
    for number in 0..20 {
        assert_eq!(bench.save(number, number..number + 1, length).await, 1);
        bench.service.release(LeaseId(number)).await;
    }
    for number in 0..20 {
        assert_eq!(bench.fetch(100 + number, number..number + 1).await.1, 1, "block {number}");
        bench.service.release(LeaseId(100 + number)).await;
    }
    let status = bench.status().await;
    assert_eq!((status.tiers[0].blocks, status.tiers[1].blocks), (2, 18));
    assert!(status.tiers[1].admitting);
    let bytes: usize = (0..20).map(|number| frame(number, length(number)).bytes.len()).sum();
    assert_eq!(status.tenants[0].bytes, bytes as u64, "a tenant is charged for its actual bytes");
}

#[tokio::test]
async fn earlier_frame_lengths_do_not_block_the_largest_frame() {
    let dir = tempfile::tempdir().unwrap();
    for bytes in [false, true] {
        let mut config = config(&dir.path().join(bytes.to_string()), 4, 12);
        if bytes {
            let slot = SlotSizes::new(&config.frame_bytes()).largest();
            (config.dram_blocks, config.ssd_blocks) = (None, None);
            (config.dram_bytes, config.ssd_bytes) = (4 * u64::from(slot.dram), 12 * u64::from(slot.ssd));
        }
        let bench = open(&config).await;
        let length =
            |number: u64| if number < 100 { 1 + usize::try_from(number).unwrap() * 57 } else { BLOCK_BYTES };
        for number in (0..100).chain(200..230) {
            assert_eq!(bench.save(number, number..number + 1, length).await, 1, "block {number}");
            bench.service.release(LeaseId(number)).await;
        }
        let full = |status: &pb::NodeStatusReply| status.tiers[0].blocks + status.tiers[1].blocks == 16;
        bench.wait_until("both tiers are full", |status, _| full(status)).await;
        for number in 214..230 {
            assert_eq!(bench.fetch(1000 + number, number..number + 1).await.1, 1, "block {number}");
            bench.service.release(LeaseId(1000 + number)).await;
        }
        let status = bench.status().await;
        assert!(status.tiers[1].admitting && full(&status), "{:?}", status.tiers);
        bench.close().await;
    }
}

/// A layout with two sizes: fifteen small slots take as much as a large one.
const GROUP_BYTES: [usize; 2] = [2000, 60_000];

/// A node for [`GROUP_BYTES`] with DRAM for this many large blocks.
fn hybrid(dir: &std::path::Path, large_blocks: u64, ssd_blocks: u64) -> NodeConfig {
    let mut config = config(dir, 0, ssd_blocks);
    let [small, large] = GROUP_BYTES.map(|bytes| bytes as u64);
    (config.block_bytes, config.component_bytes) = (large, vec![small]);
    let slots = SlotSizes::new(&config.frame_bytes());
    let charge = |payload| slots.charge(u32::try_from(frame(0, payload).bytes.len()).unwrap()).dram;
    assert_eq!(GROUP_BYTES.map(charge), [4096, 15 * 4096]);
    (config.dram_blocks, config.dram_bytes) = (None, large_blocks * 15 * 4096);
    config
}

/// Saves one block with this payload in its own request.
async fn save_one(bench: &StoreFixture, number: u64, payload: usize) -> bool {
    let frame = frame(number, payload);
    let frame_bytes = frame.bytes.len() as u64;
    let request = SaveRequest { frame_bytes, ..save_request(number, number..number + 1) };
    let (offer, session) = bench.service.save(request).await;
    let (SaveOffer::Wanted(_), Some(mut session)) = (offer, session) else { return false };
    session.put(frame).await;
    let done = session.finish().await;
    bench.service.release(LeaseId(number)).await;
    done.stored_blocks == 1
}

async fn fetch_one(bench: &StoreFixture, number: u64) -> bool {
    let (_, frames) = bench.fetch(number, number..number + 1).await;
    bench.service.release(LeaseId(number)).await;
    frames == 1
}

#[tokio::test]
async fn scattered_small_blocks_do_not_block_large_ones() {
    let dir = tempfile::tempdir().unwrap();
    let [small, large] = GROUP_BYTES;
    let bench = open(&hybrid(dir.path(), 40, 0)).await;
    for number in 0..600 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    // One block of fifteen is used again; the others are evicted for large ones.
    for number in (0..600).step_by(15) {
        assert!(fetch_one(&bench, number).await, "block {number}");
    }
    for number in 1000..1037 {
        assert!(save_one(&bench, number, large).await, "block {number}");
    }
    for number in (0..600).step_by(15).chain(1000..1037) {
        assert!(fetch_one(&bench, number).await, "block {number} is present and right");
    }
    let arena = bench.status().await.arena.unwrap();
    assert!(arena.moved_frames > 0, "{arena:?}");
    let used: Vec<u64> = arena.classes.iter().map(|class| class.used_slots).collect();
    assert!(used[0] >= 40 && used[1] == 37, "{arena:?}");
}

#[tokio::test]
async fn slow_readers_do_not_block_small_saves() {
    let dir = tempfile::tempdir().unwrap();
    let [small, large] = GROUP_BYTES;
    let bench = open(&hybrid(dir.path(), 40, 0)).await;
    for number in 0..600 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    // Readers hold one block of fifteen for long.
    let mut readers = Vec::new();
    for number in (0..600).step_by(15) {
        let asker = kv_core::tier::Requester {
            lease: LeaseId(10_000 + number),
            caller: CallerId(1),
            tenant: TenantId(0),
            category: Category::default(),
        };
        let hashes = vec![hash(number)];
        readers.push(
            bench
                .store
                .request(|reply| StoreRequest::Fetch { asker, generation: Generation(0), hashes, reply })
                .await
                .unwrap(),
        );
    }
    let mut stored = Vec::new();
    for number in 1000..1037 {
        if !save_one(&bench, number, large).await {
            break;
        }
        stored.push(number);
    }
    assert!(stored.len() < 37, "each slab has a frame with a reader");
    let arena = bench.status().await.arena.unwrap();
    assert!(arena.moved_frames <= 15, "frames with readers do not move: {arena:?}");
    for number in 2000..2200 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    drop(readers);
    for number in 3000..3020 {
        assert!(save_one(&bench, number, large).await, "block {number}");
    }
}

#[tokio::test]
async fn compaction_runs_after_dropped_frames_are_freed() {
    let dir = tempfile::tempdir().unwrap();
    let [small, large] = GROUP_BYTES;
    let bench = open(&hybrid(dir.path(), 40, 0)).await;
    for number in 0..600 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    for number in (0..600).step_by(2) {
        assert!(fetch_one(&bench, number).await, "block {number}");
    }
    // No slab is left for saves, and no small slot is free: no frame can move.
    let len = frame(0, large).bytes.len();
    let taken: Vec<SlotMut> = std::iter::from_fn(|| bench.arena.take(len, Purpose::Save)).collect();
    let arena = bench.status().await.arena.unwrap();
    assert_eq!((arena.empty_slabs, arena.moved_frames), (arena.reserve_slabs, 0));
    // Every second frame is dropped, and the others are compacted at once.
    bench.quota(300 * frame(0, small).bytes.len() as u64).await;
    let status = bench.status().await;
    let arena = status.arena.unwrap();
    assert_eq!((status.tiers[0].blocks, taken.len()), (300, 17));
    assert!(arena.empty_slabs > arena.reserve_slabs && arena.moved_frames > 0, "{arena:?}");
    assert!(arena.moved_frames < 15, "at most one slab is compacted: {arena:?}");
}

#[tokio::test]
async fn blocks_of_two_sizes_swap_between_dram_and_ssd() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&hybrid(dir.path(), 3, 400)).await;
    let payload = |number: u64| GROUP_BYTES[usize::from(number.is_multiple_of(7))];
    for number in 0..300 {
        assert!(save_one(&bench, number, payload(number)).await, "block {number}");
    }
    for step in 0..600u64 {
        let number = step * 97 % 300;
        assert!(fetch_one(&bench, number).await, "step {step}: block {number} is present and right");
    }
    let status = bench.status().await;
    assert_eq!(status.tiers[0].blocks + status.tiers[1].blocks, 300);
    let capacity = status.tiers[0].capacity_bytes;
    assert!(status.tiers[0].used_bytes <= capacity && status.tiers[0].used_bytes * 2 > capacity);
}

#[tokio::test]
async fn oldest_block_is_evicted_first_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config = NodeConfig { policy: "workload".to_owned(), ..config(dir.path(), 0, 6) };
    let bench = open(&config).await;
    for number in 0..6 {
        bench.saved(number, number..number + 1).await;
        bench
            .wait_until("it is on SSD", |status, used| status.tiers[1].blocks == number + 1 && used == 0)
            .await;
    }
    bench.close().await;
    let bench = open(&config).await;
    bench.saved(10, 50..51).await;
    let mut there = Vec::new();
    for number in 0..6 {
        if bench.fetch(20 + number, number..number + 1).await.1 == 1 {
            there.push(number);
        }
    }
    assert_eq!(there, [1, 2, 3, 4, 5], "not the block with the largest offset");
}

#[tokio::test]
async fn put_blocks_stay_when_a_save_ends_early() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 8, 0)).await;
    let (_, session) = bench.service.save(save_request(1, 0..3)).await;
    let mut session = session.unwrap();
    session.put(frame(0, BLOCK_BYTES)).await;
    drop(session);
    bench.wait_until("the other blocks are aborted", |status, _| status.tiers[0].blocks == 1).await;
    let (answer, frames) = bench.fetch(2, 0..3).await;
    let head = FetchAnswer::Partial { tiers: vec![Tier::Dram], reason: MissReason::NotHeld };
    assert_eq!((answer, frames), (head, 1));
    assert_eq!(bench.save(3, 0..3, |_| BLOCK_BYTES).await, 2);
}

#[tokio::test]
async fn repeated_fetches_of_a_request_count_once() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 8, 8)).await;
    bench.saved(1, 0..3).await;
    for end in [2, 3, 3] {
        assert_eq!(bench.fetch(2, 0..end).await.1, end as usize);
    }
    assert_eq!(bench.fetch(3, 0..1).await.1, 1);
    let classes = bench.status().await.classes;
    assert_eq!(classes.iter().map(|class| class.hits).sum::<u64>(), 4, "{classes:?}");
    assert_eq!(bench.metrics.hits(Tier::Dram), 4);
    bench.close().await;
}

#[tokio::test]
async fn empty_fetch_is_an_empty_hit() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 2, 0)).await;
    assert_eq!(bench.fetch(1, 0..0).await, (FetchAnswer::Hit { tiers: Vec::new() }, 0));
}

#[tokio::test]
async fn offsets_past_the_last_number_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 2, 0)).await;
    let request = SaveRequest { first_offset_blocks: u32::MAX, ..save_request(1, 0..2) };
    let (offer, session) = bench.service.save(request).await;
    assert!(session.is_none());
    assert_eq!(offer, SaveOffer::Refused(SaveRefusal::FrameSize));
    bench.saved(2, 0..1).await;
}

#[tokio::test]
async fn blocks_above_the_daily_write_budget_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let record = config(dir.path(), 1, 30).frame_bytes_max() as u64;
    // The hourly budget covers five blocks.
    let config = NodeConfig { ssd_write_bytes_per_day: record * 5 * 24 + 24, ..config(dir.path(), 1, 30) };
    let bench = open(&config).await;
    for number in 0..20 {
        bench.saved(number, number * 10..number * 10 + 1).await;
        bench
            .wait_until("its move ended", |status, used| {
                let slot = crate::arena::slot_bytes(config.frame_bytes_max());
                used == slot || status.tiers[1].blocks > 5
            })
            .await;
    }
    let status = bench.status().await;
    assert_eq!((status.tiers[0].blocks, status.tiers[1].blocks), (1, 5));
    assert!(status.tiers[1].admitting, "the device works");
    let mut hits = Vec::new();
    for number in 0..20 {
        hits.extend((bench.fetch(100 + number, number * 10..number * 10 + 1).await.1 == 1).then_some(number));
        bench.service.release(LeaseId(100 + number)).await;
    }
    assert_eq!(hits.first(), Some(&0), "written blocks stay: {hits:?}");
}

#[tokio::test]
async fn window_drops_no_block_when_the_write_budget_is_used_up() {
    let dir = tempfile::tempdir().unwrap();
    let record = config(dir.path(), 10, 30).frame_bytes_max() as u64;
    let config = NodeConfig { ssd_write_bytes_per_day: record * 5 * 24 + 24, ..config(dir.path(), 10, 30) };
    let bench = open(&config).await;
    for number in 0..20 {
        bench.saved(number, number..number + 1).await;
        let here = usize::try_from(number + 1).unwrap().min(10);
        let slot = crate::arena::slot_bytes(config.frame_bytes_max());
        bench.wait_until("its move ended", |_, used| used == here * slot).await;
    }
    let blocks = |status: &pb::NodeStatusReply| (status.tiers[0].blocks, status.tiers[1].blocks);
    assert_eq!(blocks(&bench.status().await), (10, 5));
    // The first five were written. Promoting one needs a demotion, which the budget does not cover.
    let waiting: Vec<BlockHash> = (0..5).map(hash).collect();
    assert_eq!(bench.store.set_window(1, vec![starting_now(waiting)]).await.unwrap().ssd_blocks, 5);
    let status = bench.status().await;
    assert_eq!((blocks(&status), status.window_blocks, status.prefetched_blocks), ((10, 5), 5, 0));
    bench.close().await;
}

/// A request that starts now.
fn starting_now(blocks: Vec<BlockHash>) -> WaitingRequest {
    WaitingRequest { starts_after: Duration::ZERO, blocks }
}

#[tokio::test]
async fn only_the_newest_pending_window_is_applied() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    let window = |blocks: u64| vec![starting_now((0..blocks).map(hash).collect())];
    // All three are queued before the task runs on this single thread.
    let (first, second, third) = tokio::join!(
        bench.store.set_window(1, window(1)),
        bench.store.set_window(1, window(2)),
        bench.store.set_window(1, window(3)),
    );
    assert_eq!([first, second, third].map(|taken| taken.unwrap().blocks), [3, 3, 3]);
    assert_eq!(bench.status().await.window_blocks, 3);
    bench.close().await;
}

/// Eight blocks on SSD and eight in DRAM, which is full; then the SSD becomes slow.
async fn on_slow_ssd(dir: &std::path::Path, faults: &Arc<SsdFaults>) -> StoreFixture {
    let config = config(dir, 8, 64);
    let bench = open_of(&config, parts_on(&config, Arc::clone(faults)).await, |_| {});
    bench.saved(1, 0..8).await;
    bench.saved(2, 8..16).await;
    let dram = 8 * crate::arena::slot_bytes(config.frame_bytes_max());
    bench
        .wait_until("the first are on SSD", |status, used| status.tiers[1].blocks == 8 && used == dram)
        .await;
    faults.slow.store(true, Ordering::Relaxed);
    bench
        .wait_until("the SSD is reported as slow", |status, _| {
            status.tiers[1].reject_reason.starts_with("slow: ")
        })
        .await;
    assert!(bench.status().await.tiers[1].admitting, "it accepts the blocks it can write");
    bench
}

#[tokio::test]
async fn reads_beyond_a_slow_ssds_capacity_are_busy_and_lose_no_block() {
    let dir = tempfile::tempdir().unwrap();
    let faults: Arc<SsdFaults> = Arc::default();
    let bench = on_slow_ssd(dir.path(), &faults).await;
    // Eight loads are requested and the slow device accepts four.
    let mut reply = bench.service.fetch(fetch_request(3, 0..8)).await;
    assert_eq!(reply.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd; 8] });
    let mut got = 0;
    while timeout(PATIENCE, reply.frames.next()).await.unwrap().is_some() {
        got += 1;
    }
    assert_eq!((got, reply.frames.end_reason()), (4, Some(MissReason::Busy)));
    bench.service.release(LeaseId(3)).await;
    assert_eq!(bench.fetch(4, 4..8).await.1, 4, "the others are still readable later");
    bench.service.release(LeaseId(4)).await;
    assert_eq!(bench.status().await.tiers.iter().map(|tier| tier.blocks).sum::<u64>(), 16);
}

#[tokio::test]
async fn saves_do_not_wait_for_a_slow_ssd() {
    let dir = tempfile::tempdir().unwrap();
    let faults: Arc<SsdFaults> = Arc::default();
    let bench = on_slow_ssd(dir.path(), &faults).await;
    faults.hangs.store(true, Ordering::Relaxed);
    for lease in 3..13 {
        bench.saved(lease, lease * 8..lease * 8 + 8).await;
    }
    let status = bench.status().await;
    assert_eq!(
        (status.tiers[0].blocks, status.tiers[1].blocks),
        (8, 12),
        "it has the four blocks it accepted"
    );
    // The longest unused blocks are dropped, not the newest.
    assert_eq!(bench.fetch(20, 96..104).await.1, 8);
    bench.service.release(LeaseId(20)).await;
    faults.hangs.store(false, Ordering::Relaxed);
    faults.slow.store(false, Ordering::Relaxed);
    bench.wait_until("the SSD is no longer slow", |status, _| status.tiers[1].reject_reason.is_empty()).await;
    for lease in 21..24 {
        bench.saved(lease, lease * 8..lease * 8 + 8).await;
    }
    bench
        .wait_until("all evicted blocks are written again", |status, _| status.tiers[1].blocks == 12 + 24)
        .await;
}
