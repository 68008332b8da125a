//! kvfleet's SSD tier beside foyer's on one device: blocks read and written, by wall time and by
//! CPU.
//!
//! Each side is a separate process, stopped while the other is measured: idle spinning threads
//! would slow the other side down. foyer verifies reads and does not flush writes; kvfleet does
//! both. Not here: the device without a tier (`cargo xtask bench ssd`).

mod foyer;
mod process;

use std::path::Path;

use anyhow::Context;
use benches::ssd_tier::{IoShape, RUN_BYTES, SHAPES};
use benches::{Better, outcome};

use crate::Effort;
use crate::judge::{Printer, RowLabel, Target};
use process::TierProcess;
pub(crate) use process::{TierKind, serve};

/// Runs each shape against foyer with each of its I/O engines.
pub(crate) fn run(effort: &Effort, data: &Path, printer: Printer) -> anyhow::Result<()> {
    printer.header();
    for (number, shape) in SHAPES.iter().enumerate() {
        let dir = tempfile::tempdir_in(data)?;
        compare(effort, number, shape, dir.path(), printer).with_context(|| shape.name)?;
    }
    Ok(())
}

/// Targets of the rate and of the bytes per CPU-second.
fn targets(shape: &IoShape) -> (Target, Target) {
    match (shape.is_put, shape.in_flight) {
        (true, _) => (Target::RatioAtLeast(1.3), Target::Unjudged),
        (false, 1) => (Target::RatioAtLeast(1.4), Target::Unjudged),
        (false, _) => (Target::Unjudged, Target::RatioAtLeast(2.0)),
    }
}

fn compare(
    effort: &Effort,
    number: usize,
    shape: &IoShape,
    dir: &Path,
    printer: Printer,
) -> anyhow::Result<()> {
    let mut ours = TierProcess::start(TierKind::Ours, number, &dir.join("ours"))?;
    for (side, peer) in
        [(TierKind::FoyerUring, "foyer 0.22.6, io_uring"), (TierKind::FoyerCalls, "foyer 0.22.6, psync")]
    {
        let mut theirs = TierProcess::start(side, number, &dir.join("theirs"))?;
        let (mut rates, mut loads) = (Vec::new(), Vec::new());
        // The first round is a warm-up; the starting side alternates.
        for round in 0..=effort.rounds {
            let (ours, theirs) = if round % 2 == 0 {
                let first = ours.run()?;
                (first, theirs.run()?)
            } else {
                let first = theirs.run()?;
                (ours.run()?, first)
            };
            if round > 0 {
                let gigabytes = RUN_BYTES as f64 / 1e9;
                rates.push((gigabytes / ours.wall_s, gigabytes / theirs.wall_s));
                loads.push((gigabytes / ours.cpu_s, gigabytes / theirs.cpu_s));
            }
        }
        theirs.end()?;
        std::fs::remove_dir_all(dir.join("theirs"))?;
        let label = |unit| RowLabel { bench: "tier", row: shape.name, unit, peer, better: Better::Higher };
        let (rate, load) = targets(shape);
        printer.row(&label("GB/s").judge(outcome(&rates), rate))?;
        printer.row(&label("GB/CPU-s").judge(outcome(&loads), load))?;
    }
    ours.end()
}
