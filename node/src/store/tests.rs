//! The store with its disk and its service, without the wire: readers that wait, limits, restarts.
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
use crate::serve::Service;
use crate::start;
use crate::tiers::ssd::SsdFaults;

/// Longest wait for something that must happen.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

pub(super) const BLOCK_BYTES: usize = 6000;

pub(super) struct Bench {
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

pub(super) async fn open(config: &NodeConfig) -> Bench {
    open_with(config, |_| {}).await
}

pub(super) async fn parts(config: &NodeConfig) -> Parts {
    parts_on(config, Arc::default()).await
}

/// The same on SSDs with these faults.
pub(super) async fn parts_on(config: &NodeConfig, faults: Arc<SsdFaults>) -> Parts {
    let arena = start::open_arena(config).unwrap();
    let shared = Arc::new(Shared::new(NodeId(1)));
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    start::open_parts(config, arena, shared, metrics, faults).await.unwrap()
}

/// A node of which `change` replaces parts.
pub(super) async fn open_with(config: &NodeConfig, change: impl FnOnce(&mut Parts)) -> Bench {
    open_of(config, parts(config).await, change)
}

pub(super) fn open_of(config: &NodeConfig, mut parts: Parts, change: impl FnOnce(&mut Parts)) -> Bench {
    change(&mut parts);
    let (arena, metrics) = (parts.arena.clone(), parts.metrics.clone());
    let stop = CancellationToken::new();
    let (store, task) = Store::start(parts, stop.clone());
    let service = start::service(config, store.clone(), arena.clone(), metrics.clone());
    Bench { store, service, arena, metrics, stop, task }
}

pub(super) fn identity() -> IdentityDigest {
    NodeConfig::default().identity.manifest().digest()
}

pub(super) fn hash(number: u64) -> BlockHash {
    let mut bytes = [0xcd; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockHash(bytes)
}

pub(super) fn frame(number: u64, payload: usize) -> Frame {
    let fill = vec![number as u8; payload];
    seal(identity(), hash(number), KeyForm::Rotated, &[u32::try_from(payload).unwrap()], &fill).unwrap()
}

pub(super) fn asker(lease: u64) -> kvfleet_transport::Asker {
    kvfleet_transport::Asker {
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
        asker: asker(lease),
        parent: None,
        first_offset_blocks: u32::try_from(numbers.start).unwrap(),
        hashes: numbers.map(hash).collect(),
        frame_bytes: frame(0, BLOCK_BYTES).bytes.len() as u64,
    }
}

pub(super) fn fetch_request(lease: u64, numbers: std::ops::Range<u64>) -> FetchRequest {
    FetchRequest {
        asker: asker(lease),
        epoch: Epoch(0),
        first_offset_blocks: 0,
        hashes: numbers.map(hash).collect(),
        deadline: Duration::from_micros(u64::MAX),
        progress: kvfleet_transport::Progress::default(),
    }
}

impl Bench {
    /// Saves blocks with payloads of `bytes(number)`; the lease stays. Returns how many were stored.
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

    /// Fetches; the frames that came are right.
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
        self.store.ask(|reply| Ask::Status { reply }).await.unwrap()
    }

    pub(super) async fn until(&self, what: &str, test: impl Fn(&pb::NodeStatusReply, usize) -> bool) {
        let tries = async {
            while !test(&self.status().await, self.arena.used_bytes()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(PATIENCE, tries).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// Takes every DRAM slot that is left, so that nothing can be loaded.
    pub(super) fn no_room(&self) -> Vec<SlotMut> {
        std::iter::from_fn(|| self.arena.take(1, Purpose::Load)).collect()
    }

    pub(super) async fn quota(&self, bytes: u64) {
        let quotas = vec![(TenantId(0), bytes)];
        self.store.tell(Ask::Directives { pins: Vec::new(), quotas, ttls: Vec::new() }).await.unwrap();
    }

    pub(super) async fn close(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// A node whose block 0 is on SSD only, and whose one DRAM block is held under lease 3.
pub(super) async fn block_on_ssd(config: &NodeConfig) -> Bench {
    let bench = open(config).await;
    bench.saved(1, 0..1).await;
    bench.saved(2, 1..2).await;
    let slot = crate::arena::slot_bytes(config.frame_bytes_max());
    bench.until("block 0 is on SSD only", |status, used| status.tiers[1].blocks == 1 && used == slot).await;
    assert_eq!(bench.fetch(3, 1..2).await.1, 1);
    bench
}

#[tokio::test]
async fn readers_of_a_block_that_goes_before_its_load_hear_it_and_get_no_other_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let bench = block_on_ssd(&config(dir.path(), 1, 8)).await;
    let room = bench.no_room();
    let mut reply = bench.service.fetch(fetch_request(4, 0..1)).await;
    assert_eq!(reply.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd] });
    bench.service.release(LeaseId(4)).await;
    // The load cannot begin, and the block is nobody's: its tenant's quota makes it go.
    bench.quota(frame(0, BLOCK_BYTES).bytes.len() as u64).await;
    let end = timeout(PATIENCE, reply.frames.next()).await.expect("the reader is told");
    assert!(end.is_none());
    // Another block takes over the key, and nobody is left who could take it for the first.
    bench.quota(u64::MAX).await;
    drop(room);
    bench.saved(5, 7..8).await;
    assert_eq!(bench.fetch(6, 7..8).await.1, 1);
    assert_eq!(bench.fetch(6, 0..1).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
}

#[tokio::test]
async fn a_fetch_told_to_come_again_leaves_no_lease_and_a_reader_that_left_no_load() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), 1, 8);
    config.fetch_inflight_bytes = config.frame_bytes_max() as u64;
    let bench = block_on_ssd(&config).await;
    let room = bench.no_room();
    let waiting = bench.service.fetch(fetch_request(4, 0..1)).await;
    assert_eq!(waiting.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd] });
    let leases = bench.status().await.leases;
    let busy = bench.service.fetch(fetch_request(5, 0..1)).await.answer;
    assert!(matches!(busy, FetchAnswer::Busy { .. }), "{busy:?}");
    assert_eq!(bench.status().await.leases, leases, "nothing is held for a request that was sent away");
    // What is in DRAM costs nothing of the budget.
    assert_eq!(bench.fetch(6, 1..2).await.1, 1);
    // The first reader goes; its load never began, its deadline is in no near future.
    drop(waiting);
    let tries = async {
        while matches!(bench.service.fetch(fetch_request(7, 0..1)).await.answer, FetchAnswer::Busy { .. }) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, tries).await.expect("the budget is free again");
    drop(room);
    // The last of those left too, and its task has to see that.
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
    assert_eq!(status.tenants[0].bytes, bytes as u64, "a tenant pays for what it saved");
}

#[tokio::test]
async fn lengths_that_came_before_leave_the_largest_frame_its_place() {
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
        bench.until("both tiers are full", |status, _| full(status)).await;
        for number in 214..230 {
            assert_eq!(bench.fetch(1000 + number, number..number + 1).await.1, 1, "block {number}");
            bench.service.release(LeaseId(1000 + number)).await;
        }
        let status = bench.status().await;
        assert!(status.tiers[1].admitting && full(&status), "{:?}", status.tiers);
        bench.close().await;
    }
}

/// A layout with two sizes: fifteen of the small ones take as much as a large one.
const GROUP_BYTES: [usize; 2] = [2000, 60_000];

/// A node for [`GROUP_BYTES`] with DRAM for so many large blocks.
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

/// A request of its own for one block with a payload of so many bytes.
async fn save_one(bench: &Bench, number: u64, payload: usize) -> bool {
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

async fn fetch_one(bench: &Bench, number: u64) -> bool {
    let (_, frames) = bench.fetch(number, number..number + 1).await;
    bench.service.release(LeaseId(number)).await;
    frames == 1
}

#[tokio::test]
async fn small_blocks_left_all_over_dram_leave_the_largest_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let [small, large] = GROUP_BYTES;
    let bench = open(&hybrid(dir.path(), 40, 0)).await;
    for number in 0..600 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    // One of each fifteen is used again; the others go for the large ones.
    for number in (0..600).step_by(15) {
        assert!(fetch_one(&bench, number).await, "block {number}");
    }
    for number in 1000..1037 {
        assert!(save_one(&bench, number, large).await, "block {number}");
    }
    for number in (0..600).step_by(15).chain(1000..1037) {
        assert!(fetch_one(&bench, number).await, "block {number} is there and right");
    }
    let arena = bench.status().await.arena.unwrap();
    assert!(arena.moved_frames > 0, "{arena:?}");
    let used: Vec<u64> = arena.classes.iter().map(|class| class.used_slots).collect();
    assert!(used[0] >= 40 && used[1] == 37, "{arena:?}");
}

#[tokio::test]
async fn slow_readers_all_over_dram_leave_small_blocks_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let [small, large] = GROUP_BYTES;
    let bench = open(&hybrid(dir.path(), 40, 0)).await;
    for number in 0..600 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    // Readers have one of each fifteen, and take their time.
    let mut readers = Vec::new();
    for number in (0..600).step_by(15) {
        let asker = kv_core::tier::Asker {
            lease: LeaseId(10_000 + number),
            caller: CallerId(1),
            tenant: TenantId(0),
            category: Category::default(),
        };
        let hashes = vec![hash(number)];
        readers.push(
            bench
                .store
                .ask(|reply| Ask::Fetch { asker, generation: Generation(0), hashes, reply })
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
    assert!(stored.len() < 37, "each slab has something that is read");
    let arena = bench.status().await.arena.unwrap();
    assert!(arena.moved_frames <= 15, "what is read does not move: {arena:?}");
    for number in 2000..2200 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    drop(readers);
    for number in 3000..3020 {
        assert!(save_one(&bench, number, large).await, "block {number}");
    }
}

#[tokio::test]
async fn frames_move_after_those_that_go_have_gone() {
    let dir = tempfile::tempdir().unwrap();
    let [small, large] = GROUP_BYTES;
    let bench = open(&hybrid(dir.path(), 40, 0)).await;
    for number in 0..600 {
        assert!(save_one(&bench, number, small).await, "block {number}");
    }
    for number in (0..600).step_by(2) {
        assert!(fetch_one(&bench, number).await, "block {number}");
    }
    // No slab is left for saves, and no small slot is free: nothing can move.
    let len = frame(0, large).bytes.len();
    let taken: Vec<SlotMut> = std::iter::from_fn(|| bench.arena.take(len, Purpose::Save)).collect();
    let arena = bench.status().await.arena.unwrap();
    assert_eq!((arena.empty_slabs, arena.moved_frames), (arena.reserve_slabs, 0));
    // Every second frame goes, and what is left moves together at once.
    bench.quota(300 * frame(0, small).bytes.len() as u64).await;
    let status = bench.status().await;
    let arena = status.arena.unwrap();
    assert_eq!((status.tiers[0].blocks, taken.len()), (300, 17));
    assert!(arena.empty_slabs > arena.reserve_slabs && arena.moved_frames > 0, "{arena:?}");
    assert!(arena.moved_frames < 15, "no more than one slab's: {arena:?}");
}

#[tokio::test]
async fn blocks_of_two_sizes_trade_places_between_dram_and_ssd() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&hybrid(dir.path(), 3, 400)).await;
    let payload = |number: u64| GROUP_BYTES[usize::from(number.is_multiple_of(7))];
    for number in 0..300 {
        assert!(save_one(&bench, number, payload(number)).await, "block {number}");
    }
    for step in 0..600u64 {
        let number = step * 97 % 300;
        assert!(fetch_one(&bench, number).await, "step {step}: block {number} is there and right");
    }
    let status = bench.status().await;
    assert_eq!(status.tiers[0].blocks + status.tiers[1].blocks, 300);
    let capacity = status.tiers[0].capacity_bytes;
    assert!(status.tiers[0].used_bytes <= capacity && status.tiers[0].used_bytes * 2 > capacity);
}

#[tokio::test]
async fn after_a_restart_the_oldest_block_leaves_first() {
    let dir = tempfile::tempdir().unwrap();
    let config = NodeConfig { policy: "workload".to_owned(), ..config(dir.path(), 0, 6) };
    let bench = open(&config).await;
    for number in 0..6 {
        bench.saved(number, number..number + 1).await;
        bench.until("it is on SSD", |status, used| status.tiers[1].blocks == number + 1 && used == 0).await;
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
    assert_eq!(there, [1, 2, 3, 4, 5], "not the one furthest down its prefix");
}

#[tokio::test]
async fn what_was_put_stays_when_a_save_ends_early() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 8, 0)).await;
    let (_, session) = bench.service.save(save_request(1, 0..3)).await;
    let mut session = session.unwrap();
    session.put(frame(0, BLOCK_BYTES)).await;
    drop(session);
    bench.until("the rest is given back", |status, _| status.tiers[0].blocks == 1).await;
    let (answer, frames) = bench.fetch(2, 0..3).await;
    let head = FetchAnswer::Partial { tiers: vec![Tier::Dram], reason: MissReason::NotHeld };
    assert_eq!((answer, frames), (head, 1));
    assert_eq!(bench.save(3, 0..3, |_| BLOCK_BYTES).await, 2);
}

#[tokio::test]
async fn blocks_that_a_request_asks_for_again_count_once() {
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
async fn a_fetch_of_nothing_is_a_hit_of_nothing() {
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
async fn above_the_budget_of_a_day_blocks_are_dropped_and_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let record = config(dir.path(), 1, 30).frame_bytes_max() as u64;
    // An hour's worth is five blocks.
    let config = NodeConfig { ssd_write_bytes_per_day: record * 5 * 24 + 24, ..config(dir.path(), 1, 30) };
    let bench = open(&config).await;
    for number in 0..20 {
        bench.saved(number, number * 10..number * 10 + 1).await;
        bench
            .until("its move ended", |status, used| {
                let slot = crate::arena::slot_bytes(config.frame_bytes_max());
                used == slot || status.tiers[1].blocks > 5
            })
            .await;
    }
    let status = bench.status().await;
    assert_eq!((status.tiers[0].blocks, status.tiers[1].blocks), (1, 5));
    assert!(status.tiers[1].admitting, "nothing is wrong with the device");
    let mut hits = Vec::new();
    for number in 0..20 {
        hits.extend((bench.fetch(100 + number, number * 10..number * 10 + 1).await.1 == 1).then_some(number));
        bench.service.release(LeaseId(100 + number)).await;
    }
    assert_eq!(hits.first(), Some(&0), "what was written stays: {hits:?}");
}

#[tokio::test]
async fn a_window_has_no_block_dropped_when_no_more_may_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let record = config(dir.path(), 10, 30).frame_bytes_max() as u64;
    let config = NodeConfig { ssd_write_bytes_per_day: record * 5 * 24 + 24, ..config(dir.path(), 10, 30) };
    let bench = open(&config).await;
    for number in 0..20 {
        bench.saved(number, number..number + 1).await;
        let here = usize::try_from(number + 1).unwrap().min(10);
        let slot = crate::arena::slot_bytes(config.frame_bytes_max());
        bench.until("its move ended", |_, used| used == here * slot).await;
    }
    let blocks = |status: &pb::NodeStatusReply| (status.tiers[0].blocks, status.tiers[1].blocks);
    assert_eq!(blocks(&bench.status().await), (10, 5));
    // The first five were written; each of them would have another block leave, and that one may not be written.
    let waiting: Vec<BlockHash> = (0..5).map(hash).collect();
    assert_eq!(bench.store.set_window(1, vec![soon(waiting)]).await.unwrap().ssd_blocks, 5);
    let status = bench.status().await;
    assert_eq!((blocks(&status), status.window_blocks, status.prefetched_blocks), ((10, 5), 5, 0));
    bench.close().await;
}

/// A request that starts at once.
fn soon(blocks: Vec<BlockHash>) -> WaitingRequest {
    WaitingRequest { starts_after: Duration::ZERO, blocks }
}

#[tokio::test]
async fn of_windows_that_wait_only_the_newest_is_applied() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    let window = |blocks: u64| vec![soon((0..blocks).map(hash).collect())];
    // All three are there before the task is on again, on this one thread.
    let (first, second, third) = tokio::join!(
        bench.store.set_window(1, window(1)),
        bench.store.set_window(1, window(2)),
        bench.store.set_window(1, window(3)),
    );
    assert_eq!([first, second, third].map(|taken| taken.unwrap().blocks), [3, 3, 3]);
    assert_eq!(bench.status().await.window_blocks, 3);
    bench.close().await;
}

/// Eight blocks on SSD and eight in DRAM, which is full; then the SSD is slow.
async fn on_slow_ssd(dir: &std::path::Path, faults: &Arc<SsdFaults>) -> Bench {
    let config = config(dir, 8, 64);
    let bench = open_of(&config, parts_on(&config, Arc::clone(faults)).await, |_| {});
    bench.saved(1, 0..8).await;
    bench.saved(2, 8..16).await;
    let dram = 8 * crate::arena::slot_bytes(config.frame_bytes_max());
    bench.until("the first are on SSD", |status, used| status.tiers[1].blocks == 8 && used == dram).await;
    faults.slow.store(true, Ordering::Relaxed);
    bench.until("it is said", |status, _| status.tiers[1].why_not.starts_with("slow: ")).await;
    assert!(bench.status().await.tiers[1].admitting, "it takes what it can write");
    bench
}

#[tokio::test]
async fn readers_beyond_what_a_slow_ssd_can_do_hear_that_it_is_busy_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let faults: Arc<SsdFaults> = Arc::default();
    let bench = on_slow_ssd(dir.path(), &faults).await;
    // Eight wait for four that it is given.
    let mut reply = bench.service.fetch(fetch_request(3, 0..8)).await;
    assert_eq!(reply.answer, FetchAnswer::Hit { tiers: vec![Tier::Ssd; 8] });
    let mut got = 0;
    while timeout(PATIENCE, reply.frames.next()).await.unwrap().is_some() {
        got += 1;
    }
    assert_eq!((got, reply.frames.ended()), (4, Some(MissReason::Busy)));
    bench.service.release(LeaseId(3)).await;
    assert_eq!(bench.fetch(4, 4..8).await.1, 4, "they are there for whoever comes later");
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
        "it has the four that it was given"
    );
    // What leaves is the longest unused, not the newest.
    assert_eq!(bench.fetch(20, 96..104).await.1, 8);
    bench.service.release(LeaseId(20)).await;
    faults.hangs.store(false, Ordering::Relaxed);
    faults.slow.store(false, Ordering::Relaxed);
    bench.until("it is as it was", |status, _| status.tiers[1].why_not.is_empty()).await;
    for lease in 21..24 {
        bench.saved(lease, lease * 8..lease * 8 + 8).await;
    }
    bench.until("all is written again", |status, _| status.tiers[1].blocks == 12 + 24).await;
}
