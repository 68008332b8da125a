//! kvfleet's SSD tier as one side of a bench, through its public handle: every read is verified,
//! and every write is flushed before it counts.
//!
//! Not here: the other sides (`ssd/device.rs`, and foyer's in `peers/`).

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use kv_core::evict::BlockTraits;
use kv_core::id::{BlockHash, Generation, IdentityDigest, TenantId};
use kv_core::tier::Capacity;
use kvfleet_node::arena::{Arena, ArenaShape, Purpose};
use kvfleet_node::tiers::BlockVersion;
use kvfleet_node::tiers::ssd::{Depth, RecordHeader, Report, SsdCompletion, SsdConfig, SsdRecord, SsdTier};
use kvfleet_proto::frame::{KeyForm, seal};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Load on a device.
#[derive(Clone, Copy, Debug)]
pub struct IoShape {
    /// Name of the row.
    pub name: &'static str,
    /// Size of a block including the tier's record header.
    pub block_bytes: u32,
    /// Blocks requested and not complete; for writes, as many as a node has of that size.
    pub in_flight: usize,
    /// The same for the device without a tier: its best value.
    pub device_in_flight: usize,
    /// Whether it writes; otherwise it reads.
    pub is_put: bool,
}

/// The measured loads.
pub const SHAPES: &[IoShape] = &[
    get("GET 1 MiB, 1 in flight", 1 << 20, 1),
    get("GET 1 MiB, 8 in flight", 1 << 20, 8),
    get("GET 64 KiB, 16 in flight", 64 << 10, 16),
    put("PUT 1 MiB, 32 in flight", 1 << 20),
    put("PUT 64 KiB, 512 in flight (the device 32)", 64 << 10),
];

const fn get(name: &'static str, block_bytes: u32, in_flight: usize) -> IoShape {
    IoShape { name, block_bytes, in_flight, device_in_flight: in_flight, is_put: false }
}

const fn put(name: &'static str, block_bytes: u32) -> IoShape {
    let in_flight = Depth::for_frames(block_bytes as usize).demotions;
    IoShape { name, block_bytes, in_flight, device_in_flight: 32, is_put: true }
}

/// Bytes on the device, per side.
pub const STOCK_BYTES: u64 = 1 << 30;

/// Bytes read or written per run and side.
pub const RUN_BYTES: u64 = 512 << 20;

/// Number of distinct frames, used repeatedly.
const FRAMES: u64 = 64;

const IDENTITY: IdentityDigest = IdentityDigest([0x5d; 16]);

/// The tier, with blocks in it.
#[derive(Debug)]
pub struct SsdTierBench {
    ssd: SsdTier,
    reports: UnboundedReceiver<Report>,
    arena: Arena,
    frames: Vec<(RecordHeader, Bytes)>,
    /// Stored blocks with their frame numbers, oldest first.
    stock: VecDeque<(SsdRecord, usize)>,
    stock_max: usize,
    next: usize,
    rng: ChaCha8Rng,
}

impl SsdTierBench {
    /// A tier in `dir`, full of blocks of `shape`.
    ///
    /// # Errors
    /// If the tier cannot be opened or written.
    pub fn open(shape: &IoShape, dir: &Path, stock_bytes: u64) -> anyhow::Result<Self> {
        let frames: Vec<(RecordHeader, Bytes)> =
            (0..FRAMES).map(|number| frame(number, shape.block_bytes)).collect::<anyhow::Result<_>>()?;
        let frame_bytes_max = frames.first().map_or(0, |(_, frame)| frame.len());
        let blocks = stock_bytes / u64::from(shape.block_bytes);
        let (send, reports) = unbounded_channel();
        let slots = shape.in_flight + 1 + frames.len();
        let arena = Arena::new(ArenaShape::equal(frame_bytes_max, slots, 0))?;
        // In the arena, as in a node.
        let placed = |(header, frame): (RecordHeader, Bytes)| {
            let mut slot = arena.take(frame.len(), Purpose::Load).context("no slot")?;
            slot.copy_from_slice(&frame);
            Ok((header, slot.freeze()))
        };
        let frames = frames.into_iter().map(placed).collect::<anyhow::Result<_>>()?;
        let config = SsdConfig {
            dirs: vec![dir.to_owned()],
            identity: IDENTITY,
            capacity: Capacity::Blocks(blocks),
            frame_bytes_max,
            depth: Depth::for_frames(frame_bytes_max),
            uring: true,
            seed: 1,
            arena: Some(arena.clone()),
            faults: Arc::default(),
        };
        let (ssd, _) = SsdTier::open(&config, &send)?;
        let (stock, chance) = (VecDeque::new(), ChaCha8Rng::seed_from_u64(1));
        let stock_max = usize::try_from(blocks)?;
        let mut tier = Self { ssd, reports, arena, frames, stock, stock_max, next: 0, rng: chance };
        // More than twice the stock: every segment is written once before measuring.
        tier.put(32, blocks * 5 / 2)?;
        Ok(tier)
    }

    /// Reads or writes `count` blocks.
    ///
    /// # Errors
    /// If a block cannot be written, or reads back differently.
    pub fn run(&mut self, shape: &IoShape, count: u64) -> anyhow::Result<()> {
        if shape.is_put { self.put(shape.in_flight, count) } else { self.get(shape.in_flight, count) }
    }

    fn next_completion(&mut self) -> anyhow::Result<SsdCompletion> {
        loop {
            let report = self.reports.blocking_recv().context("the tier stopped")?;
            let done = self.ssd.complete(report);
            // As a node does; every block is worth a move.
            self.ssd.next_to_relocate();
            self.ssd.relocate_offered();
            if let Some(done) = done {
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
            match self.next_completion()? {
                SsdCompletion::Written { result, .. } => result?,
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
                let nth = self.rng.random_range(0..self.stock.len());
                let Some(&(record, number)) = self.stock.get(nth) else { bail!("the tier is empty") };
                let Some((header, frame)) = self.frames.get(number) else { bail!("no frames") };
                let into = self.arena.take(frame.len(), Purpose::Load).context("no slot")?;
                let block = BlockVersion { hash: header.hash, generation: header.generation };
                self.ssd.read(0, record, block, into)?;
                (open, left) = (open + 1, left - 1);
            }
            match self.next_completion()? {
                SsdCompletion::Read { result, .. } => ensure!(!result?.is_empty(), "an empty read"),
                other => bail!("unexpected: {other:?}"),
            }
            open -= 1;
        }
        Ok(())
    }
}

/// A frame that fills a block together with its header, as in a node.
fn frame(number: u64, block_bytes: u32) -> anyhow::Result<(RecordHeader, Bytes)> {
    let hash = BlockHash::from_words(number, 0x7e7e);
    // Whole pages with header and trailer, so that both sides move the same bytes.
    let slices = [(block_bytes - 1024) / 8; 8];
    let mut payload = vec![0u8; slices.iter().map(|bytes| *bytes as usize).sum()];
    ChaCha8Rng::seed_from_u64(number).fill(&mut payload[..]);
    let sealed = seal(IDENTITY, hash, KeyForm::Rotated, &slices, &payload)?;
    let bytes = u32::try_from(sealed.bytes.len())?;
    let traits = BlockTraits { bytes, fingerprint: hash.fingerprint(), ..BlockTraits::default() };
    Ok((
        RecordHeader {
            hash,
            parent: None,
            tenant: TenantId(1),
            traits,
            generation: Generation(0),
            sequence: 0,
        },
        sealed.bytes,
    ))
}
