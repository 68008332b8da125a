//! What handing out a block that is in DRAM costs, in the node's own process.
//!
//! Not here: SSD (`ssd.rs`) and wires (`transport.rs`).

mod tier;

use benches::{Better, Row, outcome, spend};

use crate::Effort;
pub(crate) use tier::certificates;
use tier::{BLOCKS, DramTier, PREFIX_BLOCKS};

pub(crate) const ABOUT: &str = "a node asked in its own process: a fetch (lease, hit counts, a reference to each block's bytes, no copy) \
     and its release (the policy hears of the use), all on one thread; CPU time a block, by blocks a fetch";

/// What a block may take.
const GET_US: f64 = 0.3;
/// Blocks of one run.
const RUN_BLOCKS: u64 = 2_000_000;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir()?;
    let mut tier = DramTier::open(dir.path())?;
    let mut rows = Vec::new();
    for blocks in [1, 16, 64, PREFIX_BLOCKS] {
        // A fetch of one block is mostly what a fetch costs.
        let fetches = effort.scaled(RUN_BLOCKS).div_ceil(blocks as u64).min(effort.scaled(200_000));
        let mut pairs = Vec::new();
        for run in 0..=effort.runs {
            let (sum, spent) = spend(|| tier.get(blocks, fetches));
            anyhow::ensure!(sum? != 0, "no bytes");
            if run > 0 {
                pairs.push((spent.cpu_us_per(fetches * blocks as u64), GET_US));
            }
        }
        let name = format!("GET by reference, {blocks} of {BLOCKS} blocks a fetch");
        // The limit is of a block: what a few blocks share of a fetch's own work is shown beside it.
        let peer = if blocks < 64 { "0.3 µs, for comparison" } else { "limit: 0.3 µs" };
        rows.push(Row::new("get", &name, "µs CPU a block", peer, Better::Lower, outcome(&pairs)));
    }
    tier.close();
    Ok(rows)
}
