//! How long a node takes from its start until it serves again what its SSD holds: a million blocks.
//!
//! Not here: what the routers are told of it afterwards (`snapshot.rs`, `index.rs`), and how the blocks got there
//! (`start/writer.rs`).

mod node;
mod writer;

use std::path::Path;

use anyhow::ensure;
use benches::{Better, Row, Spent, outcome, spend};

use crate::Effort;
use node::Served;
use writer::Writing;
pub(crate) use writer::serve;

pub(crate) const ABOUT: &str = "a node of blocks of 3 KiB, each a page of its SSD tier, from its start until it has handed out the newest of them, \
     verified; after a stop that ended every write, and after the process was killed while it wrote";

/// Blocks on the SSD.
const BLOCKS: u64 = 1_000_000;
/// What a start may take.
const START_S: f64 = 2.0;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir()?;
    let blocks = effort.scaled(BLOCKS);
    let mut rows = Vec::new();
    for is_killed in [false, true] {
        let (mut took, mut loads) = (Vec::new(), Vec::new());
        // The first round does not count: it makes the stock.
        for round in 0..=effort.runs {
            let mut writing = Writing::start(dir.path(), blocks)?;
            let newest = writing.newest()?;
            if is_killed {
                writing.kill()?;
            } else {
                writing.stop()?;
            }
            let spent = start(dir.path(), blocks, newest)?;
            if round > 0 {
                took.push((spent.wall.as_secs_f64(), START_S));
                loads.push((spent.cpu.as_secs_f64(), START_S));
            }
        }
        let how = if is_killed { "a kill" } else { "a stop" };
        let name = format!("start with {blocks} blocks after {how}");
        let row = |unit, limit, pairs: &[(f64, f64)]| {
            Row::new("start", &name, unit, limit, Better::Lower, outcome(pairs))
        };
        rows.push(row("s", "limit: 2 s", &took));
        rows.push(row("CPU-s", "2 s, for comparison", &loads));
    }
    Ok(rows)
}

/// What it took until the block with this number was read back.
fn start(dir: &Path, blocks: u64, newest: u64) -> anyhow::Result<Spent> {
    let (served, spent) = spend(|| {
        let mut served = Served::start(dir, blocks)?;
        ensure!(served.has(newest)?, "the newest block that was told of is not there");
        Ok(served)
    });
    let mut served = served?;
    let count = served.count()?;
    // Some are always on their way, and the rest of its room is for those.
    ensure!(count >= blocks * 99 / 100, "{count} of {blocks} blocks came back");
    served.close();
    Ok(spent)
}
