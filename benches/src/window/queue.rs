//! Sessions whose requests wait for one instance, a node's book, and an SSD that takes its time; the same for every
//! seed, and no clock but its own.
//!
//! Not here: what is compared (`window.rs`).

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use anyhow::Context;
use kv_core::evict::BlockKey;
use kv_core::id::{BlockHash, CallerId, Category, LeaseId, TenantId, Tier, Timestamp};
use kv_core::tier::{Action, Asker, Book, Offer, Offered, Room};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{CHARGE, book};

/// Time of a request on the instance once its blocks are there, in microseconds.
const SERVICE_US: u64 = 50_000;
/// Between two words of the queue, in microseconds.
const TOLD_EVERY_US: u64 = 100_000;
/// Reading and writing a block of 2 MiB, in microseconds: 5 and 4 GB/s.
const READ_US: u64 = 419;
const WRITE_US: u64 = 524;
/// Reads and writes in flight, as in the node.
const READS_MAX: usize = 16;
const WRITES_MAX: usize = 32;
/// Blocks that a session begins with at least, that each turn adds at most and least, and after which it ends.
const TURN_BLOCKS: std::ops::RangeInclusive<u64> = 4..=12;
const SESSION_BLOCKS: u64 = 96;
/// Turns of a session in a run, of which the first third does not count.
const TURNS: u64 = 6;

/// How large.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    sessions: u64,
    dram_blocks: u64,
    ssd_blocks: u64,
}

impl Setting {
    /// For so many sessions: about 50 blocks of each, 24 times the DRAM, and an SSD for all.
    pub(super) fn scaled(sessions: u64) -> Self {
        Setting { sessions, dram_blocks: sessions * 50 / 24, ssd_blocks: sessions * 160 }
    }

    /// Mean pause of a session between an answer and its next request. With it a tenth of the sessions wait.
    fn pause_us(self) -> f64 {
        (self.sessions * SERVICE_US) as f64 * 0.9
    }
}

/// What came of a run, after it warmed up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    asked: u64,
    hits: [u64; 2],
    wait_us: u64,
    requests: u64,
}

impl Seen {
    pub(super) fn dram_share(&self) -> f64 {
        100.0 * self.hits[1] as f64 / (self.hits[0] + self.hits[1]) as f64
    }

    pub(super) fn hit_rate(&self) -> f64 {
        100.0 * (self.hits[0] + self.hits[1]) as f64 / self.asked as f64
    }

    pub(super) fn wait_ms(&self) -> f64 {
        self.wait_us as f64 / self.requests as f64 / 1e3
    }
}

/// Block `number`, as no other seed has it.
pub(super) fn hash(number: u64, seed: u64) -> BlockHash {
    let mixed = (number ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mixed.to_le_bytes());
    bytes[8..].copy_from_slice(&number.wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes());
    BlockHash(bytes)
}

/// A request that runs.
struct Running {
    session: usize,
    lease: LeaseId,
    hits: usize,
    /// Blocks that are still being loaded.
    loading: BTreeSet<BlockKey>,
    began_us: u64,
    ends_us: Option<u64>,
}

struct World {
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
    running: Option<Running>,
    /// Ends of moves and what moved; each medium does one after the other.
    reads: VecDeque<(u64, BlockKey)>,
    writes: VecDeque<(u64, BlockKey)>,
    requests: u64,
    seen: Seen,
}

/// Runs until every session had its turns. With windows, the node is told what waits.
pub(super) fn run(setting: Setting, seed: u64, with_windows: bool) -> anyhow::Result<Seen> {
    let mut world = World {
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
        seen: Seen::default(),
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
            told_us = world.now_us + TOLD_EVERY_US;
            let queue = world.waiting.iter().map(|session| world.sessions[*session].as_slice());
            world.book.set_window(queue, Timestamp(world.now_us));
        }
        world.pump();
        let told = with_windows.then_some(told_us);
        world.now_us = world.next_us().into_iter().chain(told).min().context("nothing is to come")?;
        world.advance()?;
    }
    Ok(world.seen)
}

impl World {
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

    /// Starts what the book says and the media have room for.
    fn pump(&mut self) {
        self.book.prefetch(Timestamp(self.now_us));
        loop {
            let (dram, ssd) = (self.reads.len() < READS_MAX, self.writes.len() < WRITES_MAX);
            let room = Room { dram, ssd, prefetch: self.reads.len() < READS_MAX / 2, ..Room::default() };
            let Some(action) = self.book.next_action(room) else { return };
            let after = |moves: &VecDeque<(u64, BlockKey)>| moves.back().map_or(self.now_us, |last| last.0);
            match action {
                Action::Promote { key, .. } => self.reads.push_back((after(&self.reads) + READ_US, key)),
                Action::Demote { key, .. } => self.writes.push_back((after(&self.writes) + WRITE_US, key)),
                Action::DropDram { .. } | Action::DropSsd { .. } => {}
                // There is no GPU here.
                Action::Lift { .. } | Action::Lower { .. } | Action::DropGpu { .. } => {}
            }
        }
    }

    /// When something happens next.
    fn next_us(&self) -> Option<u64> {
        let pause = self.pauses.peek().map(|Reverse((at, _))| *at);
        let moves = [&self.reads, &self.writes].map(|moves| moves.front().map(|(at, _)| *at));
        let run = self.running.as_ref().and_then(|running| running.ends_us);
        [pause, run].into_iter().chain(moves).flatten().min()
    }

    /// Whatever happens now.
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

    /// The instance computes once all blocks are there.
    fn compute(&mut self) {
        let Some(running) = self.running.as_mut().filter(|running| running.ends_us.is_none()) else { return };
        if running.loading.is_empty() {
            running.ends_us = Some(self.now_us + SERVICE_US);
            if self.requests > self.setting.sessions * TURNS / 3 {
                self.seen.wait_us += self.now_us - running.began_us;
                self.seen.requests += 1;
            }
        }
    }

    fn asker(lease: LeaseId) -> Asker {
        Asker { lease, caller: CallerId(0), tenant: TenantId(0), category: Category::default() }
    }

    fn begin(&mut self, session: usize) -> anyhow::Result<()> {
        self.requests += 1;
        let lease = LeaseId(self.requests);
        let prompt = &self.sessions[session];
        let reached = self.book.fetch(Self::asker(lease), prompt, Timestamp(self.now_us))?;
        if self.requests > self.setting.sessions * TURNS / 3 {
            self.seen.asked += prompt.len() as u64;
            for reach in &reached {
                self.seen.hits[usize::from(reach.tier == Tier::Dram)] += 1;
            }
        }
        let loading = reached.iter().filter(|reach| reach.tier == Tier::Ssd).map(|reach| reach.key).collect();
        let (hits, began_us) = (reached.len(), self.now_us);
        self.running = Some(Running { session, lease, hits, loading, began_us, ends_us: None });
        self.pump();
        Ok(())
    }

    /// The request is answered: its new blocks are saved, and its session goes on after a pause.
    fn save(&mut self, running: &Running) -> anyhow::Result<()> {
        let (session, now) = (running.session, Timestamp(self.now_us));
        let prompt = &self.sessions[session];
        let parent = running.hits.checked_sub(1).map(|last| prompt[last]);
        let first_offset_blocks = u32::try_from(running.hits)?;
        let hashes = &prompt[running.hits..];
        let offer = Offer { parent, first_offset_blocks, hashes, charge: CHARGE };
        for answer in self.book.offer(Self::asker(running.lease), offer, now)? {
            if let Offered::Wanted(key) = answer {
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
