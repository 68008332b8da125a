//! Combined hit rate of a node's two tiers, and its SSD writes: the tier book replayed over
//! generated requests.
//!
//! Not here: the replay (`kvfleet_sim::tiers`), one tier under every policy (`cargo xtask
//! policies`), and time.

use benches::{BenchRow, Better, Outcome, outcome};
use kv_core::evict::{DEFAULT, by_name};
use kvfleet_lab::policies::Traffic;
use kvfleet_node::NodeConfig;
use kvfleet_sim::generate::{TraceGenerator, TraceSpec, TrafficKind};
use kvfleet_sim::tiers::{ReplayTier, TiersOutcome, TwoTierReplay};
use kvfleet_sim::trace::Request;

use crate::Effort;

pub(crate) const ABOUT: &str = "the tier book over generated requests, in blocks of 64 tokens, with DRAM and \
    SSD for a share of the distinct blocks: hits of both tiers and writes to SSD, under a node's policy and \
    its minimum reuse probability for SSD writes; beside an LRU on SSD that stores every block that leaves \
    DRAM, and one tier as large as both";

/// Tokens of a block: fewer prolong the replay and change little.
const BLOCK_TOKENS: u32 = 64;
/// Shares of the distinct blocks that fit into DRAM and into SSD.
const SIZES: [(f64, f64); 2] = [(0.005, 0.02), (0.02, 0.1)];
/// Seed of the first run; later runs increment it.
const SEED: u64 = 31_007;

/// Outcomes of one run.
struct TierOutcomes {
    ours: TiersOutcome,
    /// Every block that leaves DRAM is written.
    lru_below: TiersOutcome,
    one_tier: TiersOutcome,
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for kind in TrafficKind::ALL {
        for (dram, ssd) in SIZES {
            eprintln!("tiers: {}, {dram} and {ssd} of the blocks", kind.name());
            let seen: Vec<TierOutcomes> = (SEED..)
                .take(effort.runs)
                .map(|seed| replay_kind(kind, dram, ssd, seed, effort.scaled(10_000)))
                .collect::<Result<_, _>>()?;
            rows.extend(rows_of(kind, dram, ssd, &seen));
        }
    }
    Ok(rows)
}

fn rows_of(kind: TrafficKind, dram: f64, ssd: f64, seen: &[TierOutcomes]) -> [BenchRow; 3] {
    let of = |ours: &dyn Fn(&TierOutcomes) -> f64, theirs: &dyn Fn(&TierOutcomes) -> f64| -> Outcome {
        let pairs: Vec<_> = seen.iter().map(|seen| (ours(seen), theirs(seen))).collect();
        outcome(&pairs)
    };
    let row = |what: &str, peer: &str, better: Better, outcome: Outcome| {
        let name = format!("{}, DRAM {} %, SSD {} %: {what}", kind.name(), dram * 100.0, ssd * 100.0);
        BenchRow::new("tiers", &name, "% of requested blocks", peer, better, outcome)
    };
    let hits = |outcome: &TiersOutcome| 100.0 * outcome.hit_rate();
    let written =
        |outcome: &TiersOutcome| 100.0 * outcome.written_blocks as f64 / outcome.block_accesses as f64;
    let ours = |seen: &TierOutcomes| hits(&seen.ours);
    [
        row("hits", "LRU on SSD", Better::Higher, of(&ours, &|seen| hits(&seen.lru_below))),
        row("hits", "one tier as large as both", Better::Higher, of(&ours, &|seen| hits(&seen.one_tier))),
        row(
            "written to SSD",
            "every block that leaves DRAM",
            Better::Lower,
            of(&|seen| written(&seen.ours), &|seen| written(&seen.lru_below)),
        ),
    ]
}

fn replay_kind(
    kind: TrafficKind,
    dram: f64,
    ssd: f64,
    seed: u64,
    requests: u64,
) -> anyhow::Result<TierOutcomes> {
    let spec = TraceSpec { block_tokens: BLOCK_TOKENS, ..TraceSpec::new(kind, seed, requests) };
    let requests: Vec<Request> = TraceGenerator::new(spec).collect();
    let unique = Traffic::recorded(kind.name(), requests.clone()).unique_blocks() as f64;
    let (dram, ssd) = ((dram * unique) as u64, (ssd * unique) as u64);
    let replay = |dram: u64, ssd: (u64, &str), reuse_min: f64| -> anyhow::Result<TiersOutcome> {
        let policy = |name| by_name(name, seed).ok_or_else(|| anyhow::anyhow!("no policy named {name}"));
        let mut tiers = TwoTierReplay::new(
            ReplayTier { blocks: dram, policy: policy(DEFAULT)? },
            ReplayTier { blocks: ssd.0, policy: policy(ssd.1)? },
            reuse_min,
        );
        requests.iter().for_each(|request| tiers.serve(request));
        Ok(tiers.outcome())
    };
    Ok(TierOutcomes {
        ours: replay(dram, (ssd, DEFAULT), NodeConfig::default().ssd_reuse_min)?,
        lru_below: replay(dram, (ssd, "lru"), 0.0)?,
        one_tier: replay(dram + ssd, (0, DEFAULT), 0.0)?,
    })
}
