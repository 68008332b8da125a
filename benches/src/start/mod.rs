//! Time from a node's start until it serves its SSD blocks again: a million blocks.
//!
//! Not here: the later announcements to the routers (`snapshot.rs`, `index.rs`), and the process
//! that wrote the blocks (`start/writer.rs`).

mod node;
mod writer;

use std::path::Path;

use anyhow::ensure;
use benches::{BenchRow, Better, TimeSpent, measure_time, outcome};

use crate::Effort;
use node::StartedNode;
use writer::WriterProcess;
pub(crate) use writer::serve;

pub(crate) const ABOUT: &str = "a node with blocks of 3 KiB, each a page of its SSD tier, from its start \
    until it has served the newest of them, verified; after a stop that completed every write, and after a \
    kill during writes";

/// Blocks on the SSD.
const BLOCKS: u64 = 1_000_000;
/// Limit of a start, in seconds.
const START_S: f64 = 2.0;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let dir = tempfile::tempdir()?;
    let blocks = effort.scaled(BLOCKS);
    let mut rows = Vec::new();
    for is_killed in [false, true] {
        let (mut took, mut loads) = (Vec::new(), Vec::new());
        // The first round is a warm-up: it writes the stock.
        for round in 0..=effort.runs {
            let mut writing = WriterProcess::start(dir.path(), blocks)?;
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
            BenchRow::new("start", &name, unit, limit, Better::Lower, outcome(pairs))
        };
        rows.push(row("s", "limit: 2 s", &took));
        rows.push(row("CPU-s", "2 s, for comparison", &loads));
    }
    Ok(rows)
}

/// Time until the block with this number was read back.
fn start(dir: &Path, blocks: u64, newest: u64) -> anyhow::Result<TimeSpent> {
    let (served, spent) = measure_time(|| {
        let mut served = StartedNode::start(dir, blocks)?;
        ensure!(served.has(newest)?, "the newest announced block is missing");
        Ok(served)
    });
    let mut served = served?;
    let count = served.count()?;
    // Some blocks are always in flight, and the rest of the capacity is for those.
    ensure!(count >= blocks * 99 / 100, "{count} of {blocks} blocks came back");
    served.close();
    Ok(spent)
}
