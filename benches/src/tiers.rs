//! What two tiers of a node hit together, and what that costs its SSD: the tier book replayed over generated requests.
//!
//! Not here: the replay (`kvfleet_sim::tiers`), one tier under every policy (`cargo xtask policies`), and time.

use benches::{Better, Outcome, Row, outcome};
use kv_core::evict::{DEFAULT, by_name};
use kvfleet_node::NodeConfig;
use kvfleet_sim::generate::{Generator, Kind, Spec};
use kvfleet_sim::policies::Traffic;
use kvfleet_sim::tiers::{Tiers, TiersOutcome};
use kvfleet_sim::trace::Request;

use crate::Effort;

pub(crate) const ABOUT: &str = "the tier book over generated requests, in blocks of 64 tokens, with DRAM and SSD for a share of their different \
     blocks: what both hit and what is written to SSD, under the policy of a node and the least chance of reuse that it writes \
     for; beside an LRU on SSD, to which all is written that leaves DRAM, and one tier as large as both";

/// Tokens of a block: fewer make the replay longer and change little.
const BLOCK_TOKENS: u32 = 64;
/// Shares of the different blocks that fit into DRAM and into SSD.
const SIZES: [(f64, f64); 2] = [(0.005, 0.02), (0.02, 0.1)];
/// Seed of the first run; the next ones count on.
const SEED: u64 = 31_007;

/// What came of one run.
struct Seen {
    ours: TiersOutcome,
    /// Everything that leaves DRAM is written.
    lru_below: TiersOutcome,
    one_tier: TiersOutcome,
}

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for kind in Kind::ALL {
        for size in SIZES {
            eprintln!("tiers: {}, {} and {} of the blocks", kind.name(), size.0, size.1);
            let seen: Vec<Seen> = (SEED..)
                .take(effort.runs)
                .map(|seed| look(kind, size, seed, effort.scaled(10_000)))
                .collect::<Result<_, _>>()?;
            rows.extend(rows_of(kind, size, &seen));
        }
    }
    Ok(rows)
}

fn rows_of(kind: Kind, (dram, ssd): (f64, f64), seen: &[Seen]) -> [Row; 3] {
    let of = |ours: &dyn Fn(&Seen) -> f64, theirs: &dyn Fn(&Seen) -> f64| -> Outcome {
        let pairs: Vec<_> = seen.iter().map(|seen| (ours(seen), theirs(seen))).collect();
        outcome(&pairs)
    };
    let row = |what: &str, peer: &str, better: Better, outcome: Outcome| {
        let name = format!("{}, DRAM {} %, SSD {} %: {what}", kind.name(), dram * 100.0, ssd * 100.0);
        Row::new("tiers", &name, "% of blocks asked", peer, better, outcome)
    };
    let hits = |outcome: &TiersOutcome| 100.0 * outcome.hit_rate();
    let written =
        |outcome: &TiersOutcome| 100.0 * outcome.written_blocks as f64 / outcome.block_accesses as f64;
    let ours = |seen: &Seen| hits(&seen.ours);
    [
        row("hits", "LRU on SSD", Better::Higher, of(&ours, &|seen| hits(&seen.lru_below))),
        row("hits", "one tier as large as both", Better::Higher, of(&ours, &|seen| hits(&seen.one_tier))),
        row(
            "written to SSD",
            "whatever leaves DRAM",
            Better::Lower,
            of(&|seen| written(&seen.ours), &|seen| written(&seen.lru_below)),
        ),
    ]
}

fn look(kind: Kind, size: (f64, f64), seed: u64, requests: u64) -> anyhow::Result<Seen> {
    let spec = Spec { block_tokens: BLOCK_TOKENS, ..Spec::new(kind, seed, requests) };
    let requests: Vec<Request> = Generator::new(spec).collect();
    let unique = Traffic::recorded(kind.name(), requests.clone()).unique_blocks() as f64;
    let (dram, ssd) = ((size.0 * unique) as u64, (size.1 * unique) as u64);
    let replay = |dram: u64, ssd: (u64, &str), reuse_min: f64| -> anyhow::Result<TiersOutcome> {
        let policy = |name| by_name(name, seed).ok_or_else(|| anyhow::anyhow!("there is no {name}"));
        let mut tiers = Tiers::new((dram, policy(DEFAULT)?), (ssd.0, policy(ssd.1)?), reuse_min);
        requests.iter().for_each(|request| tiers.serve(request));
        Ok(tiers.outcome())
    };
    Ok(Seen {
        ours: replay(dram, (ssd, DEFAULT), NodeConfig::default().ssd_reuse_min)?,
        lru_below: replay(dram, (ssd, "lru"), 0.0)?,
        one_tier: replay(dram + ssd, (0, DEFAULT), 0.0)?,
    })
}
