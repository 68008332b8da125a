//! What a node gains from seeing the queue: scheduler windows over the real tier book, beside the same without them.
//!
//! Not here: the simulated time in which requests wait and the SSD reads (`window/queue.rs`).

mod queue;

use benches::{Better, Outcome, Row, outcome, spend};
use kv_core::evict::by_name;
use kv_core::id::{BlockHash, TenantId, Tier, Timestamp};
use kv_core::tier::{Book, Capacity, Charge, Found, Limits, TierLimits, WINDOW_BLOCKS_MAX};

use crate::Effort;
use queue::{Seen, Setting, run as simulate};

pub(crate) const ABOUT: &str = "the tier book with LRU in simulated time: 1,000 sessions of 8 to 96 blocks of 2 MiB (one shared \
     by all), 24 times the DRAM, all of it on SSD at most; one request runs at a time, 50 ms each, about 100 wait; reads of \
     5 GB/s, writes of 4 GB/s. With windows the queue is told every 100 ms, beside the same requests without (CachedAttention \
     says 99.6 % against 0.6 % of its hits); and what telling a node of as long a queue as it takes costs it";

const PEER: &str = "LRU without windows";
/// The share of hits in DRAM that windows must give, in percent.
const DRAM_SHARE: f64 = 99.0;
/// Longest that the task which owns the book may be busy with one window, in milliseconds: its housekeeping interval.
const SET_MS: f64 = 20.0;
/// Seed of the first run; the next ones count on.
const SEED: u64 = 24_083;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let setting = Setting::scaled(effort.scaled(1000));
    let mut pairs: Vec<(Seen, Seen)> = Vec::new();
    for seed in (SEED..).take(effort.runs) {
        eprintln!("window: seed {seed}");
        pairs.push((simulate(setting, seed, true)?, simulate(setting, seed, false)?));
    }
    let of = |figure: fn(&Seen) -> f64| -> Outcome {
        let figures: Vec<_> = pairs.iter().map(|(ours, theirs)| (figure(ours), figure(theirs))).collect();
        outcome(&figures)
    };
    let share: Vec<_> = pairs.iter().map(|(ours, _)| (ours.dram_share(), DRAM_SHARE)).collect();
    let name = "DRAM share of hits, waiting queue visible, SSD-heavy";
    let row = |name: &str, unit: &str, peer: &str, better: Better, outcome: Outcome| {
        Row::new("window", name, unit, peer, better, outcome)
    };
    Ok(vec![
        row(name, "%", PEER, Better::Higher, of(Seen::dram_share)),
        row(name, "%", "limit: 99 %", Better::Higher, outcome(&share)),
        row("wait for the SSD, mean of a request", "ms", PEER, Better::Lower, of(Seen::wait_ms)),
        row("hits of both tiers over blocks asked", "%", PEER, Better::Higher, of(Seen::hit_rate)),
        row(
            "telling of as many blocks as count, all other than before",
            "ms CPU",
            "limit: 20 ms",
            Better::Lower,
            telling(effort)?,
        ),
    ])
}

/// CPU time of one window as long as a node takes, of blocks that are all there and of which the window before had none:
/// as many blocks leave it as come.
fn telling(effort: &Effort) -> anyhow::Result<Outcome> {
    let held = 2 * WINDOW_BLOCKS_MAX as u64;
    let mut book = book(0, held)?;
    let blocks: Vec<BlockHash> = (0..held).map(|block| queue::hash(block, SEED)).collect();
    for (now, hash) in (0u64..).zip(&blocks) {
        let traits = Default::default();
        let found = Found { hash: *hash, parent: None, tenant: TenantId(0), traits, charge: CHARGE };
        anyhow::ensure!(book.restore(found, Timestamp(now)).is_some(), "a block found no room");
    }
    let windows = blocks.split_at(WINDOW_BLOCKS_MAX);
    let mut pairs = Vec::new();
    for run in 0..=effort.runs {
        let window = if run % 2 == 0 { windows.0 } else { windows.1 };
        let queue: Vec<&[BlockHash]> = window.chunks(64).collect();
        let now = Timestamp(held + run as u64);
        let (taken, spent) = spend(|| book.set_window(queue.iter().copied(), now));
        anyhow::ensure!(taken.blocks == WINDOW_BLOCKS_MAX && taken.ssd_blocks == taken.blocks, "{taken:?}");
        // The first one builds what the next ones replace.
        if run > 0 {
            pairs.push((spent.cpu_us_per(1) / 1e3, SET_MS));
        }
    }
    anyhow::ensure!(book.stats(Tier::Ssd).blocks == held, "a window is no reason to leave");
    Ok(outcome(&pairs))
}

/// What a block costs: 2 MiB wherever it is.
const CHARGE: Charge = Charge { frame: 2 << 20, dram: 2 << 20, ssd: 2 << 20 };

/// An empty book of LRU tiers.
fn book(dram_blocks: u64, ssd_blocks: u64) -> anyhow::Result<Book> {
    let limits = Limits {
        dram: TierLimits::exact(Capacity::Blocks(dram_blocks)),
        ssd: TierLimits::exact(Capacity::Blocks(ssd_blocks)),
        lease: std::time::Duration::from_secs(3600),
        leases_max: 16,
        seed: SEED,
    };
    let lru = || by_name("lru", 0).ok_or_else(|| anyhow::anyhow!("there is no LRU"));
    Ok(Book::new(&limits, lru()?, lru()?))
}
