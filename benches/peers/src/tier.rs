//! Our SSD tier beside foyer's, on one device: blocks read and written, by the clock and by CPU.
//!
//! Not here: the device without any tier (`cargo xtask bench ssd`). foyer checks what it reads and does not
//! flush what it writes; ours does both.

mod foyer;

use std::path::Path;

use anyhow::Context;
use benches::ssd_tier::{RUN_BYTES, SHAPES, STOCK_BYTES, Shape, SsdTier};
use benches::{Better, Spent, outcome, spend};

use crate::Effort;
use crate::judge::{Label, Printer, Reach};
use foyer::{Foyer, Io};

/// Ratios of one shape against one peer, a pair of figures a round.
struct Pairs {
    peer: Io,
    rates: Vec<(f64, f64)>,
    loads: Vec<(f64, f64)>,
}

/// Each shape, against foyer with each of its ways to the device.
pub(crate) fn run(effort: &Effort, data: &Path, printer: Printer) -> anyhow::Result<()> {
    printer.head();
    for shape in SHAPES {
        let dir = tempfile::tempdir_in(data)?;
        for pairs in compare(effort, shape, dir.path()).with_context(|| shape.name)? {
            let peer = pairs.peer.name();
            let label = |unit| Label { bench: "tier", row: shape.name, unit, peer, better: Better::Higher };
            let (rate, load) = reaches(shape);
            printer.row(&label("GB/s").judged(outcome(&pairs.rates), rate))?;
            printer.row(&label("GB/CPU-s").judged(outcome(&pairs.loads), load))?;
        }
    }
    Ok(())
}

/// What the rate and the bytes a CPU-second have to reach.
fn reaches(shape: &Shape) -> (Reach, Reach) {
    match (shape.is_put, shape.in_flight) {
        (true, _) => (Reach::RatioAtLeast(1.3), Reach::Shown),
        (false, 1) => (Reach::RatioAtLeast(1.4), Reach::Shown),
        (false, _) => (Reach::Shown, Reach::RatioAtLeast(2.0)),
    }
}

fn compare(effort: &Effort, shape: &Shape, dir: &Path) -> anyhow::Result<Vec<Pairs>> {
    let mut ours = SsdTier::open(shape, &dir.join("ours"), STOCK_BYTES)?;
    let mut sides = Vec::new();
    for peer in [Io::Uring, Io::Calls] {
        let place = dir.join(format!("foyer-{peer:?}"));
        std::fs::create_dir(&place)?;
        let foyer = Foyer::open(peer, shape, &place, STOCK_BYTES)?;
        sides.push((foyer, Pairs { peer, rates: Vec::new(), loads: Vec::new() }));
    }
    let count = RUN_BYTES / u64::from(shape.block_bytes);
    let figures = |spent: Spent| (spent.per_wall_s(RUN_BYTES) / 1e9, spent.per_cpu_s(RUN_BYTES) / 1e9);
    // The first round does not count; who begins alternates.
    for round in 0..=effort.rounds {
        for (foyer, pairs) in &mut sides {
            let mut measure_ours = || {
                let (end, spent) = spend(|| ours.go(shape, count));
                end.map(|()| figures(spent))
            };
            let first = (round % 2 == 0).then(&mut measure_ours).transpose()?;
            let (end, theirs) = spend(|| foyer.go(shape, count));
            end?;
            let (ours, theirs) = (first.map_or_else(measure_ours, Ok)?, figures(theirs));
            if round > 0 {
                pairs.rates.push((ours.0, theirs.0));
                pairs.loads.push((ours.1, theirs.1));
            }
        }
    }
    Ok(sides.into_iter().map(|(_, pairs)| pairs).collect())
}
