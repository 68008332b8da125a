//! Sessions with requests that wait for one instance, a node's book, and a slow SSD. Deterministic
//! per seed, in simulated time.
//!
//! Not here: the comparison (`window.rs`).

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use anyhow::Context;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, CallerId, Category, LeaseId, TenantId, Tier, Timestamp};
use kv_core::tier::{Action, Book, MovePermits, OfferOutcome, Requester, SaveOffer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{CHARGE, book};

/// Compute time of a request once its blocks are loaded, in microseconds.
const SERVICE_US: u64 = 50_000;
/// Interval of window updates, in microseconds.
const WINDOW_INTERVAL_US: u64 = 100_000;
/// Read and write time of a block of 2 MiB, in microseconds: 5 and 4 GB/s.
const READ_US: u64 = 419;
const WRITE_US: u64 = 524;
/// Reads and writes in flight, as in the node.
const READS_MAX: usize = 16;
const WRITES_MAX: usize = 32;
/// Range of blocks per turn, which also gives the minimum at a session's start, and the maximum
/// length of a session.
const TURN_BLOCKS: std::ops::RangeInclusive<u64> = 4..=12;
const SESSION_BLOCKS: u64 = 96;
/// Turns of a session per run; the first third is a warm-up.
const TURNS: u64 = 6;

/// Size of the simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    sessions: u64,
    dram_blocks: u64,
    ssd_blocks: u64,
}

impl Setting {
    /// For `sessions` sessions: about 50 blocks each, 24 times the DRAM, and an SSD for all.
    pub(super) fn scaled(sessions: u64) -> Self {
        Setting { sessions, dram_blocks: sessions * 50 / 24, ssd_blocks: sessions * 160 }
    }

    /// Mean pause of a session between an answer and its next request; a tenth of the sessions
    /// wait.
    fn pause_us(self) -> f64 {
        (self.sessions * SERVICE_US) as f64 * 0.9
    }
}

/// Result of a run, after its warm-up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueueResult {
    lookup_blocks: u64,
    hits: [u64; 2],
    wait_us: u64,
    requests: u64,
}

impl QueueResult {
    pub(super) fn dram_share(&self) -> f64 {
        100.0 * self.hits[1] as f64 / (self.hits[0] + self.hits[1]) as f64
    }

    pub(super) fn hit_rate(&self) -> f64 {
        100.0 * (self.hits[0] + self.hits[1]) as f64 / self.lookup_blocks as f64
    }

    pub(super) fn wait_ms(&self) -> f64 {
        self.wait_us as f64 / self.requests as f64 / 1e3
    }
}

/// The hash of block `number`, distinct for each seed.
pub(super) fn hash(number: u64, seed: u64) -> BlockHash {
    let mixed = (number ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    BlockHash::from_words(mixed, number.wrapping_mul(0xbf58_476d_1ce4_e5b9))
}

/// A running request.
struct RunningRequest {
    session: usize,
    lease: LeaseId,
    hits: usize,
    /// Blocks still being loaded.
    loading: BTreeSet<BlockKey>,
    began_us: u64,
    ends_us: Option<u64>,
}

struct Simulation {
    setting: Setting,
    seed: u64,
    random: ChaCha8Rng,
    book: Book,
    now_us: u64,
    /// The blocks of each session's next prompt.
    sessions: Vec<Vec<BlockHash>>,
    next_block: u64,
    pauses: BinaryHeap<Reverse<(u64, usize)>>,
    waiting: VecDeque<usize>,
    running: Option<RunningRequest>,
    /// End times and blocks of moves; each device works sequentially.
    reads: VecDeque<(u64, BlockKey)>,
    writes: VecDeque<(u64, BlockKey)>,
    requests: u64,
    result: QueueResult,
}

/// Runs until every session had its turns. With windows, the node gets the queue.
pub(super) fn run(setting: Setting, seed: u64, with_windows: bool) -> anyhow::Result<QueueResult> {
    let mut world = Simulation {
        setting,
        seed,
        random: ChaCha8Rng::seed_from_u64(seed),
        book: book(setting.dram_blocks, setting.ssd_blocks)?,
        now_us: 0,
        sessions: Vec::new(),
        next_block: 1,
        pauses: BinaryHeap::new(),
        waiting: VecDeque::new(),
        running: None,
        reads: VecDeque::new(),
        writes: VecDeque::new(),
        requests: 0,
        result: QueueResult::default(),
    };
    for session in 0..setting.sessions as usize {
        let blocks = world.random.random_range(*TURN_BLOCKS.start()..SESSION_BLOCKS);
        world.sessions.push(vec![hash(0, seed)]);
        world.grow(session, blocks);
        world.pause(session);
    }
    let mut told_us = 0;
    while world.requests < setting.sessions * TURNS {
        if with_windows && world.now_us >= told_us {
            told_us = world.now_us + WINDOW_INTERVAL_US;
            let queue = world.waiting.iter().map(|session| world.sessions[*session].as_slice());
            world.book.set_window(queue, Timestamp(world.now_us));
        }
        world.start_moves();
        let told = with_windows.then_some(told_us);
        world.now_us = world.next_us().into_iter().chain(told).min().context("no event is pending")?;
        world.advance()?;
    }
    Ok(world.result)
}

impl Simulation {
    fn grow(&mut self, session: usize, blocks: u64) {
        for _ in 0..blocks {
            let block = hash(self.next_block, self.seed);
            self.sessions[session].push(block);
            self.next_block += 1;
        }
    }

    fn pause(&mut self, session: usize) {
        let share: f64 = self.random.random_range(f64::EPSILON..1.0);
        let pause_us = -share.ln() * self.setting.pause_us();
        self.pauses.push(Reverse((self.now_us + pause_us as u64, session)));
    }

    /// Starts the moves that the book requests and the devices have capacity for.
    fn start_moves(&mut self) {
        self.book.prefetch(Timestamp(self.now_us));
        loop {
            let (dram, ssd) = (self.reads.len() < READS_MAX, self.writes.len() < WRITES_MAX);
            let room = MovePermits {
                dram,
                ssd,
                prefetch: self.reads.len() < READS_MAX / 2,
                ..MovePermits::default()
            };
            let Some(action) = self.book.next_action(room) else { return };
            let after = |moves: &VecDeque<(u64, BlockKey)>| moves.back().map_or(self.now_us, |last| last.0);
            match action {
                Action::Promote { key, .. } => self.reads.push_back((after(&self.reads) + READ_US, key)),
                Action::Demote { key, .. } => self.writes.push_back((after(&self.writes) + WRITE_US, key)),
                Action::DropDram { .. } | Action::DropSsd { .. } => {}
                // The simulation has no GPU.
                Action::PromoteToGpu { .. } | Action::ReadBackFromGpu { .. } | Action::DropGpu { .. } => {}
            }
        }
    }

    /// Time of the next event.
    fn next_us(&self) -> Option<u64> {
        let pause = self.pauses.peek().map(|Reverse((at, _))| *at);
        let moves = [&self.reads, &self.writes].map(|moves| moves.front().map(|(at, _)| *at));
        let run = self.running.as_ref().and_then(|running| running.ends_us);
        [pause, run].into_iter().chain(moves).flatten().min()
    }

    /// Processes all events of the current time.
    fn advance(&mut self) -> anyhow::Result<()> {
        while let Some(&(at, key)) = self.reads.front().filter(|(at, _)| *at <= self.now_us) {
            self.reads.pop_front();
            self.book.on_moved(key, Tier::Dram);
            if let Some(running) = &mut self.running {
                running.loading.remove(&key);
            }
            debug_assert!(at <= self.now_us);
        }
        while let Some(&(_, key)) = self.writes.front().filter(|(at, _)| *at <= self.now_us) {
            self.writes.pop_front();
            self.book.on_moved(key, Tier::Ssd);
        }
        while let Some(&Reverse((_, session))) = self.pauses.peek().filter(|next| next.0.0 <= self.now_us) {
            self.pauses.pop();
            self.waiting.push_back(session);
        }
        self.compute();
        if let Some(running) =
            self.running.take_if(|running| running.ends_us.is_some_and(|at| at <= self.now_us))
        {
            self.save(&running)?;
        }
        if self.running.is_none()
            && let Some(session) = self.waiting.pop_front()
        {
            self.begin(session)?;
            self.compute();
        }
        Ok(())
    }

    /// Starts the computation once all blocks are loaded.
    fn compute(&mut self) {
        let Some(running) = self.running.as_mut().filter(|running| running.ends_us.is_none()) else { return };
        if running.loading.is_empty() {
            running.ends_us = Some(self.now_us + SERVICE_US);
            if self.requests > self.setting.sessions * TURNS / 3 {
                self.result.wait_us += self.now_us - running.began_us;
                self.result.requests += 1;
            }
        }
    }

    fn asker(lease: LeaseId) -> Requester {
        Requester { lease, caller: CallerId(0), tenant: TenantId(0), category: Category::default() }
    }

    fn begin(&mut self, session: usize) -> anyhow::Result<()> {
        self.requests += 1;
        let lease = LeaseId(self.requests);
        let prompt = &self.sessions[session];
        let reached = self.book.fetch(Self::asker(lease), prompt, Timestamp(self.now_us))?;
        if self.requests > self.setting.sessions * TURNS / 3 {
            self.result.lookup_blocks += prompt.len() as u64;
            for reach in &reached {
                self.result.hits[usize::from(reach.tier == Tier::Dram)] += 1;
            }
        }
        let loading = reached.iter().filter(|reach| reach.tier == Tier::Ssd).map(|reach| reach.key).collect();
        let (hits, began_us) = (reached.len(), self.now_us);
        self.running = Some(RunningRequest { session, lease, hits, loading, began_us, ends_us: None });
        self.start_moves();
        Ok(())
    }

    /// Ends a request: saves its new blocks, and pauses its session.
    fn save(&mut self, running: &RunningRequest) -> anyhow::Result<()> {
        let (session, now) = (running.session, Timestamp(self.now_us));
        let prompt = &self.sessions[session];
        let parent = running.hits.checked_sub(1).map(|last| prompt[last]);
        let first_offset_blocks = u32::try_from(running.hits)?;
        let hashes = &prompt[running.hits..];
        let offer = SaveOffer { parent, first_offset_blocks, hashes, charge: CHARGE };
        for answer in self.book.offer(Self::asker(running.lease), offer, now)? {
            if let OfferOutcome::Wanted(key) = answer {
                self.book.commit(key, CHARGE, now);
            }
        }
        self.book.release(running.lease, now);
        let turn = self.random.random_range(TURN_BLOCKS);
        if self.sessions[session].len() as u64 + turn > SESSION_BLOCKS {
            self.sessions[session].truncate(1);
        }
        self.grow(session, turn);
        self.pause(session);
        Ok(())
    }
}
