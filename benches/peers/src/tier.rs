//! Our SSD tier beside foyer's, on one device: blocks read and written, by the clock and by CPU.
//!
//! Each side is a process of its own that sleeps while another is measured: threads that spin when they have
//! nothing to do would count against whoever works. foyer checks what it reads and does not flush what it
//! writes; ours does both. Not here: the device without any tier (`cargo xtask bench ssd`).

mod foyer;
mod process;

use std::path::Path;

use anyhow::Context;
use benches::ssd_tier::{RUN_BYTES, SHAPES, Shape};
use benches::{Better, outcome};

use crate::Effort;
use crate::judge::{Label, Printer, Reach};
use process::Process;
pub(crate) use process::{Side, serve};

/// Each shape, against foyer with each of its ways to the device.
pub(crate) fn run(effort: &Effort, data: &Path, printer: Printer) -> anyhow::Result<()> {
    printer.head();
    for (number, shape) in SHAPES.iter().enumerate() {
        let dir = tempfile::tempdir_in(data)?;
        compare(effort, (number, shape), dir.path(), printer).with_context(|| shape.name)?;
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

fn compare(
    effort: &Effort,
    (number, shape): (usize, &Shape),
    dir: &Path,
    printer: Printer,
) -> anyhow::Result<()> {
    let mut ours = Process::start(Side::Ours, number, &dir.join("ours"))?;
    for (side, peer) in
        [(Side::FoyerUring, "foyer 0.22.6, io_uring"), (Side::FoyerCalls, "foyer 0.22.6, psync")]
    {
        let mut theirs = Process::start(side, number, &dir.join("theirs"))?;
        let (mut rates, mut loads) = (Vec::new(), Vec::new());
        // The first round does not count; who begins alternates.
        for round in 0..=effort.rounds {
            let (ours, theirs) = if round % 2 == 0 {
                let first = ours.go()?;
                (first, theirs.go()?)
            } else {
                let first = theirs.go()?;
                (ours.go()?, first)
            };
            if round > 0 {
                let gigabytes = RUN_BYTES as f64 / 1e9;
                rates.push((gigabytes / ours.wall_s, gigabytes / theirs.wall_s));
                loads.push((gigabytes / ours.cpu_s, gigabytes / theirs.cpu_s));
            }
        }
        theirs.end()?;
        std::fs::remove_dir_all(dir.join("theirs"))?;
        let label = |unit| Label { bench: "tier", row: shape.name, unit, peer, better: Better::Higher };
        let (rate, load) = reaches(shape);
        printer.row(&label("GB/s").judged(outcome(&rates), rate))?;
        printer.row(&label("GB/CPU-s").judged(outcome(&loads), load))?;
    }
    ours.end()
}
