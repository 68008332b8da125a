//! Benefit of a node that sees the queue: scheduler windows over the real tier book, beside the
//! same without them.
//!
//! Not here: the simulated time of waiting requests and SSD reads (`window/queue.rs`).

mod queue;

use benches::{BenchRow, Better, Outcome, measure_time, outcome};
use kv_core::evict::by_name;
use kv_core::id::{BlockHash, TenantId, Tier, Timestamp};
use kv_core::tier::{Book, BookLimits, Capacity, Charge, RecoveredBlock, TierLimits, WINDOW_BLOCKS_MAX};

use crate::Effort;
use queue::{QueueResult, Setting, run as simulate};

pub(crate) const ABOUT: &str = "the tier book with LRU in simulated time: 1,000 sessions of 8 to 96 blocks \
    of 2 MiB (one shared by all), 24 times the DRAM, all of it on SSD at most; one request runs at a time, \
    50 ms each, about 100 wait; reads of 5 GB/s, writes of 4 GB/s. With windows the node gets the queue \
    every 100 ms, beside the same requests without (CachedAttention reports 99.6 % against 0.6 % of its \
    hits); and the node's cost for a queue of maximum length";

const PEER: &str = "LRU without windows";
/// Minimum DRAM share of hits with windows, in percent.
const DRAM_SHARE: f64 = 99.0;
/// Maximum time of one window update in the book's task, in milliseconds: its housekeeping
/// interval.
const WINDOW_MAX_MS: f64 = 20.0;
/// Seed of the first run; later runs increment it.
const SEED: u64 = 24_083;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let setting = Setting::scaled(effort.scaled(1000));
    let mut pairs: Vec<(QueueResult, QueueResult)> = Vec::new();
    for seed in (SEED..).take(effort.runs) {
        eprintln!("window: seed {seed}");
        pairs.push((simulate(setting, seed, true)?, simulate(setting, seed, false)?));
    }
    let of = |figure: fn(&QueueResult) -> f64| -> Outcome {
        let figures: Vec<_> = pairs.iter().map(|(ours, theirs)| (figure(ours), figure(theirs))).collect();
        outcome(&figures)
    };
    let share: Vec<_> = pairs.iter().map(|(ours, _)| (ours.dram_share(), DRAM_SHARE)).collect();
    let name = "DRAM share of hits, waiting queue visible, SSD-heavy";
    let row = |name: &str, unit: &str, peer: &str, better: Better, outcome: Outcome| {
        BenchRow::new("window", name, unit, peer, better, outcome)
    };
    Ok(vec![
        row(name, "%", PEER, Better::Higher, of(QueueResult::dram_share)),
        row(name, "%", "limit: 99 %", Better::Higher, outcome(&share)),
        row("wait for the SSD, mean per request", "ms", PEER, Better::Lower, of(QueueResult::wait_ms)),
        row("hits of both tiers per requested block", "%", PEER, Better::Higher, of(QueueResult::hit_rate)),
        row(
            "update of a full window, all blocks new",
            "ms CPU",
            "limit: 20 ms",
            Better::Lower,
            window_update_cost(effort)?,
        ),
    ])
}

/// CPU time of one update with a maximum window. The previous window shares no block with it, so as
/// many blocks leave as enter.
fn window_update_cost(effort: &Effort) -> anyhow::Result<Outcome> {
    let held = 2 * WINDOW_BLOCKS_MAX as u64;
    let mut book = book(0, held)?;
    let blocks: Vec<BlockHash> = (0..held).map(|block| queue::hash(block, SEED)).collect();
    for (now, hash) in (0u64..).zip(&blocks) {
        let traits = Default::default();
        let found = RecoveredBlock { hash: *hash, parent: None, tenant: TenantId(0), traits, charge: CHARGE };
        anyhow::ensure!(
            book.restore(found, Timestamp(now)).is_some(),
            "the book has no capacity for a block"
        );
    }
    let windows = blocks.split_at(WINDOW_BLOCKS_MAX);
    let mut pairs = Vec::new();
    for run in 0..=effort.runs {
        let window = if run % 2 == 0 { windows.0 } else { windows.1 };
        let queue: Vec<&[BlockHash]> = window.chunks(64).collect();
        let now = Timestamp(held + run as u64);
        let (taken, spent) = measure_time(|| book.set_window(queue.iter().copied(), now));
        anyhow::ensure!(taken.blocks == WINDOW_BLOCKS_MAX && taken.ssd_blocks == taken.blocks, "{taken:?}");
        // The first update builds the window that later ones replace.
        if run > 0 {
            pairs.push((spent.cpu_us_per(1) / 1e3, WINDOW_MAX_MS));
        }
    }
    anyhow::ensure!(book.stats(Tier::Ssd).blocks == held, "a window must not evict");
    Ok(outcome(&pairs))
}

/// Charge of a block: 2 MiB in every tier.
const CHARGE: Charge = Charge { frame: 2 << 20, dram: 2 << 20, ssd: 2 << 20 };

/// An empty book of LRU tiers.
fn book(dram_blocks: u64, ssd_blocks: u64) -> anyhow::Result<Book> {
    let limits = BookLimits {
        dram: TierLimits::exact(Capacity::Blocks(dram_blocks)),
        ssd: TierLimits::exact(Capacity::Blocks(ssd_blocks)),
        lease: std::time::Duration::from_secs(3600),
        leases_max: 16,
        seed: SEED,
    };
    let lru = || by_name("lru", 0).ok_or_else(|| anyhow::anyhow!("no LRU policy"));
    Ok(Book::new(&limits, lru()?, lru()?))
}
