//! The SSD tier against the same device without it: fio where it is installed, and plain direct I/O from as
//! many threads as operations are in flight.
//!
//! Not here: stores and wires. Our side goes through the tier's public handle: every read is verified, every
//! write is flushed before it counts.

mod bare;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use benches::{Better, Row, Spent, outcome, spend};
use bytes::Bytes;
use kv_core::evict::BlockTraits;
use kv_core::id::{BlockHash, IdentityDigest, TenantId};
use kv_core::tier::Capacity;
use kvfleet_node::arena::{Arena, ArenaShape, Purpose};
use kvfleet_node::tiers::ssd::{Done, RecordHeader, Report, Ssd, SsdConfig, SsdRecord};
use kvfleet_proto::frame::{KeyForm, seal};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::Effort;
use bare::{Bare, Fio};

pub(crate) const ABOUT: &str = "blocks read from and written to the SSD tier, reads verified, writes flushed; against fio (io_uring, direct; \
     where it is installed) and threads with direct reads and writes of their own, neither verified nor flushed";

/// What is asked of the device.
struct Shape {
    name: &'static str,
    block_bytes: u32,
    in_flight: usize,
    is_put: bool,
}

const SHAPES: &[Shape] = &[
    Shape { name: "GET 1 MiB, 1 in flight", block_bytes: 1 << 20, in_flight: 1, is_put: false },
    Shape { name: "GET 1 MiB, 8 in flight", block_bytes: 1 << 20, in_flight: 8, is_put: false },
    Shape { name: "GET 64 KiB, 16 in flight", block_bytes: 64 << 10, in_flight: 16, is_put: false },
    Shape { name: "PUT 1 MiB, 32 in flight", block_bytes: 1 << 20, in_flight: 32, is_put: true },
    Shape { name: "PUT 64 KiB, 32 in flight", block_bytes: 64 << 10, in_flight: 32, is_put: true },
];

/// Bytes on the device, per side.
const STOCK_BYTES: u64 = 1 << 30;

/// Bytes read or written per run and side.
const RUN_BYTES: u64 = 512 << 20;

/// Frames that differ; they are used again and again.
const FRAMES: u64 = 64;

const IDENTITY: IdentityDigest = IdentityDigest([0x5d; 16]);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir()?;
    let mut rows = Vec::new();
    if !Fio::is_installed() {
        eprintln!("fio is not installed: the rows against it are left out");
    }
    for shape in SHAPES {
        let place = dir.path().join(format!("{}-{}", shape.block_bytes, shape.in_flight));
        std::fs::create_dir(&place)?;
        rows.extend(compare(effort, shape, &place).with_context(|| shape.name)?);
        std::fs::remove_dir_all(&place)?;
    }
    Ok(rows)
}

fn compare(effort: &Effort, shape: &Shape, dir: &Path) -> anyhow::Result<Vec<Row>> {
    let (stock, bytes) = (effort.scaled(STOCK_BYTES), effort.scaled(RUN_BYTES));
    let count = bytes / u64::from(shape.block_bytes);
    let mut ours = Ours::open(shape, &dir.join("ours"), stock)?;
    let bare = Bare::open(&dir.join("bare"), stock)?;
    let fio = Fio::is_installed().then(|| Fio::new(dir.join("bare"), stock));
    let (mut rates, mut loads, mut against_fio) = (Vec::new(), Vec::new(), Vec::new());
    // The first round does not count; who begins alternates.
    for round in 0..=effort.runs {
        let measure_ours = |ours: &mut Ours| -> anyhow::Result<Spent> {
            let (end, spent) = spend(|| ours.go(shape, count));
            end.map(|()| spent)
        };
        let first = (round % 2 == 0).then(|| measure_ours(&mut ours)).transpose()?;
        let (end, theirs) = spend(|| bare.go(shape.is_put, shape.block_bytes, shape.in_flight, count));
        end?;
        let fio_rate =
            fio.as_ref().map(|fio| fio.go(shape.is_put, shape.block_bytes, shape.in_flight, bytes));
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
        Row::new("ssd", shape.name, unit, peer, Better::Higher, outcome(pairs))
    };
    let threads = "limit: threads, direct I/O";
    let mut rows = vec![row("GB/s", threads, &rates), row("GB/CPU-s", threads, &loads)];
    if !against_fio.is_empty() {
        rows.push(row("GB/s", "fio, io_uring, direct", &against_fio));
    }
    Ok(rows)
}

/// The tier, with blocks in it.
struct Ours {
    ssd: Ssd,
    reports: UnboundedReceiver<Report>,
    arena: Arena,
    frames: Vec<(RecordHeader, Bytes)>,
    /// Oldest first, with the number of the frame.
    stock: VecDeque<(SsdRecord, usize)>,
    stock_max: usize,
    next: usize,
    chance: ChaCha8Rng,
}

impl Ours {
    fn open(shape: &Shape, dir: &Path, stock_bytes: u64) -> anyhow::Result<Ours> {
        let frames: Vec<(RecordHeader, Bytes)> =
            (0..FRAMES).map(|number| frame(number, shape.block_bytes)).collect::<anyhow::Result<_>>()?;
        let frame_bytes_max = frames.first().map_or(0, |(_, frame)| frame.len());
        let blocks = stock_bytes / u64::from(shape.block_bytes);
        let (send, reports) = unbounded_channel();
        let config = SsdConfig {
            dirs: vec![dir.to_owned()],
            identity: IDENTITY,
            capacity: Capacity::Blocks(blocks),
            frame_bytes_max,
            uring: true,
            seed: 1,
            faults: Arc::default(),
        };
        let (ssd, _) = Ssd::open(&config, &send)?;
        let slots = shape.in_flight + 1;
        let arena = Arena::new(ArenaShape { frame_bytes_max, slots, reserve_slots: 0 })?;
        let (stock, chance) = (VecDeque::new(), ChaCha8Rng::seed_from_u64(1));
        let stock_max = usize::try_from(blocks)?;
        let mut ours = Ours { ssd, reports, arena, frames, stock, stock_max, next: 0, chance };
        // More than twice the stock: every segment was written once before anything is measured.
        ours.put(32, blocks * 5 / 2)?;
        Ok(ours)
    }

    fn go(&mut self, shape: &Shape, count: u64) -> anyhow::Result<()> {
        if shape.is_put { self.put(shape.in_flight, count) } else { self.get(shape.in_flight, count) }
    }

    fn done(&mut self) -> anyhow::Result<Done> {
        loop {
            let report = self.reports.blocking_recv().context("the tier is gone")?;
            if let Some(done) = self.ssd.take_in(report) {
                return Ok(done);
            }
        }
    }

    fn put(&mut self, in_flight: usize, count: u64) -> anyhow::Result<()> {
        let (mut open, mut left) = (0, count);
        while left > 0 || open > 0 {
            while left > 0 && open < in_flight {
                let number = self.next % self.frames.len();
                let Some((header, frame)) = self.frames.get(number) else { bail!("no frames") };
                let Some(record) = self.ssd.write(0, 0, *header, frame)? else { break };
                self.next += 1;
                self.stock.push_back((record, number));
                (open, left) = (open + 1, left - 1);
                if self.stock.len() > self.stock_max
                    && let Some((oldest, _)) = self.stock.pop_front()
                {
                    self.ssd.free(oldest);
                }
            }
            match self.done()? {
                Done::Written { result, .. } => result?,
                other => bail!("unexpected: {other:?}"),
            }
            open -= 1;
        }
        Ok(())
    }

    fn get(&mut self, in_flight: usize, count: u64) -> anyhow::Result<()> {
        let (mut open, mut left) = (0, count);
        while left > 0 || open > 0 {
            while left > 0 && open < in_flight {
                let nth = self.chance.random_range(0..self.stock.len());
                let Some(&(record, number)) = self.stock.get(nth) else { bail!("nothing is there") };
                let Some((header, frame)) = self.frames.get(number) else { bail!("no frames") };
                let into = self.arena.take(frame.len(), Purpose::Load).context("no slot")?;
                self.ssd.read(0, record, header.hash, into)?;
                (open, left) = (open + 1, left - 1);
            }
            match self.done()? {
                Done::Read { result, .. } => ensure!(!result?.is_empty(), "nothing was read"),
                other => bail!("unexpected: {other:?}"),
            }
            open -= 1;
        }
        Ok(())
    }
}

/// A frame whose payload takes a block with its header, as a node's blocks do.
fn frame(number: u64, block_bytes: u32) -> anyhow::Result<(RecordHeader, Bytes)> {
    let mut hash = [0x7e; 16];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    let hash = BlockHash(hash);
    // Of whole pages with header and trailer, so that both sides move the same bytes.
    let slices = [(block_bytes - 1024) / 8; 8];
    let mut payload = vec![0u8; slices.iter().map(|bytes| *bytes as usize).sum()];
    ChaCha8Rng::seed_from_u64(number).fill(&mut payload[..]);
    let sealed = seal(IDENTITY, hash, KeyForm::Rotated, &slices, &payload)?;
    let bytes = u32::try_from(sealed.bytes.len())?;
    let traits = BlockTraits { bytes, fingerprint: hash.fingerprint(), ..BlockTraits::default() };
    Ok((RecordHeader { hash, parent: None, tenant: TenantId(1), traits, sequence: 0 }, sealed.bytes))
}
