//! Cost of serving a DRAM block within the node's process.
//!
//! Not here: SSD (`ssd.rs`) and networks (`transport.rs`).

mod tier;

use benches::{BenchRow, Better, measure_time, outcome};

use crate::Effort;
pub(crate) use tier::certificates;
use tier::{BLOCKS, DramTier, PREFIX_BLOCKS};

pub(crate) const ABOUT: &str = "requests to a node in the same process: a fetch (lease, hit counts, a \
    reference to each block's bytes, no copy) and its release (the policy records the use), all on one \
    thread; CPU time per block, by blocks per fetch";

/// Limit per block, in microseconds.
const GET_MAX_US: f64 = 0.3;
/// Blocks per run.
const RUN_BLOCKS: u64 = 2_000_000;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let dir = tempfile::tempdir()?;
    let mut tier = DramTier::open(dir.path())?;
    let mut rows = Vec::new();
    for blocks in [1, 16, 64, PREFIX_BLOCKS] {
        // A fetch of one block mostly measures the fixed cost of a fetch.
        let fetches = effort.scaled(RUN_BLOCKS).div_ceil(blocks as u64).min(effort.scaled(200_000));
        let mut pairs = Vec::new();
        for run in 0..=effort.runs {
            let (sum, spent) = measure_time(|| tier.get(blocks, fetches));
            anyhow::ensure!(sum? != 0, "the addresses sum to zero");
            if run > 0 {
                pairs.push((spent.cpu_us_per(fetches * blocks as u64), GET_MAX_US));
            }
        }
        let name = format!("GET by reference, {blocks} of {BLOCKS} blocks per fetch");
        // The limit is per block; small fetches with their fixed cost are only informative.
        let peer = if blocks < 64 { "0.3 µs, for comparison" } else { "limit: 0.3 µs" };
        rows.push(BenchRow::new("get", &name, "µs CPU per block", peer, Better::Lower, outcome(&pairs)));
    }
    tier.close();
    Ok(rows)
}
