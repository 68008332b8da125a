//! The SSD tier against the same device without it: fio, if installed, and plain direct I/O with
//! one thread per operation in flight.
//!
//! Not here: our side (`ssd_tier`), stores and networks.

mod device;

use std::path::Path;

use anyhow::Context;
use benches::ssd_tier::{IoShape, RUN_BYTES, SHAPES, STOCK_BYTES, SsdTierBench};
use benches::{BenchRow, Better, TimeSpent, measure_time, outcome};

use crate::Effort;
use device::{DirectFile, Fio};

pub(crate) const ABOUT: &str = "blocks read from and written to the SSD tier, reads verified, writes \
    flushed; against fio (io_uring, direct; if installed) and threads with direct reads and writes, neither \
    verified nor flushed";

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let dir = tempfile::tempdir()?;
    let mut rows = Vec::new();
    if !Fio::is_installed() {
        eprintln!("fio is not installed: its rows are skipped");
    }
    for shape in SHAPES.iter().filter(|shape| effort.is_selected(shape.name)) {
        let place = dir.path().join(format!("{}-{}", shape.block_bytes, shape.in_flight));
        std::fs::create_dir(&place)?;
        rows.extend(compare(effort, shape, &place).with_context(|| shape.name)?);
        std::fs::remove_dir_all(&place)?;
    }
    Ok(rows)
}

fn compare(effort: &Effort, shape: &IoShape, dir: &Path) -> anyhow::Result<Vec<BenchRow>> {
    let (stock, bytes) = (effort.scaled(STOCK_BYTES), effort.scaled(RUN_BYTES));
    let count = bytes / u64::from(shape.block_bytes);
    let mut ours = SsdTierBench::open(shape, &dir.join("ours"), stock)?;
    let bare = DirectFile::open(&dir.join("bare"), stock)?;
    let fio = Fio::is_installed().then(|| Fio::new(dir.join("bare"), stock));
    let (mut rates, mut loads, mut against_fio) = (Vec::new(), Vec::new(), Vec::new());
    // The first round is a warm-up; the starting side alternates.
    for round in 0..=effort.runs {
        let measure_ours = |ours: &mut SsdTierBench| -> anyhow::Result<TimeSpent> {
            let (end, spent) = measure_time(|| ours.run(shape, count));
            end.map(|()| spent)
        };
        let first = (round % 2 == 0).then(|| measure_ours(&mut ours)).transpose()?;
        let (end, theirs) =
            measure_time(|| bare.run(shape.is_put, shape.block_bytes, shape.device_in_flight, count));
        end?;
        let fio_rate =
            fio.as_ref().map(|fio| fio.run(shape.is_put, shape.block_bytes, shape.device_in_flight, bytes));
        let ours = first.map_or_else(|| measure_ours(&mut ours), Ok)?;
        if round > 0 {
            rates.push((ours.per_wall_s(bytes) / 1e9, theirs.per_wall_s(bytes) / 1e9));
            loads.push((ours.per_cpu_s(bytes) / 1e9, theirs.per_cpu_s(bytes) / 1e9));
            if let Some(rate) = fio_rate {
                against_fio.push((ours.per_wall_s(bytes) / 1e9, rate? / 1e9));
            }
        }
    }
    let row = |unit, peer, pairs: &[(f64, f64)]| {
        BenchRow::new("ssd", shape.name, unit, peer, Better::Higher, outcome(pairs))
    };
    let threads = "limit: threads, direct I/O";
    let mut rows = vec![row("GB/s", threads, &rates), row("GB/CPU-s", threads, &loads)];
    if !against_fio.is_empty() {
        rows.push(row("GB/s", "fio, io_uring, direct", &against_fio));
    }
    Ok(rows)
}
