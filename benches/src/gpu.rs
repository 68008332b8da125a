//! The GPU tier against the same GPU without it: plain copies through page-locked memory, and slices that are copied one by one.
//!
//! Not here: which blocks belong on a GPU (`kv_core::tier`), and the path to it over a network. Needs a GPU, so it is no part of `--all`: figures stand in docs/adr/0026-gpu-tier.md.

use anyhow::{Context, bail, ensure};
use benches::{Better, Row, outcome, spend};
use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_node::arena::{Arena, ArenaShape, Purpose, SizeClasses};
use kvfleet_node::tiers::gpu::cuda::CudaDevice;
use kvfleet_node::tiers::gpu::device::{Copy, Device, Hop, Piece};
use kvfleet_node::tiers::gpu::{CHUNK_BYTES, CHUNKS, Done, GpuRecord, GpuShape, GpuTier, JOBS_MAX};
use kvfleet_proto::frame::{KeyForm, seal};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Effort;

pub(crate) const ABOUT: &str = "blocks put into a GPU's memory (and read back), read from it and scattered within it by the GPU tier, all checked, as a node has it; \
     against plain copies of the same bytes through page-locked memory, slices copied one by one, and one copy of a whole block";

/// Blocks that differ, and how often each is used in a run.
const BLOCKS: u64 = 128;
const ROUNDS: u64 = 8;

/// Sixteen tokens of a model of eight billion parameters with 32 layers (2 MiB), and of one that keeps little: layers, bytes of each.
const SHAPES: [(usize, u32); 2] = [(32, 64 << 10), (60, 18 << 10)];

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let rows = SHAPES.iter().map(|shape| compare(effort, *shape)).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(rows.concat())
}

/// What one side does, once.
type Side<'a> = &'a mut dyn FnMut() -> anyhow::Result<()>;

/// Rates of both sides in GB/s, of so many bytes; who begins alternates.
fn rates(run: usize, bytes: u64, ours: Side<'_>, theirs: Side<'_>) -> anyhow::Result<(f64, f64)> {
    let timed = |side: Side<'_>| {
        let (end, spent) = spend(side);
        end.map(|()| spent.per_wall_s(bytes) / 1e9)
    };
    if run.is_multiple_of(2) {
        let first = timed(ours)?;
        return Ok((first, timed(theirs)?));
    }
    let first = timed(theirs)?;
    Ok((timed(ours)?, first))
}

fn compare(effort: &Effort, (layers, slice_bytes): (usize, u32)) -> anyhow::Result<Vec<Row>> {
    let rounds = effort.scaled(ROUNDS);
    let mut ours = Ours::open(layers, slice_bytes, device()?)?;
    let mut one_by_one = Ours::open(layers, slice_bytes, device()?.without_kernels())?;
    let mut plain = Plain::open(ours.block_bytes)?;
    let bytes = ours.block_bytes as u64 * BLOCKS * rounds;
    eprintln!("gpu: {layers} layers of {slice_bytes} bytes on {}, {}", ours.name, ours.kernel);
    let mut pairs: [Vec<(f64, f64)>; 4] = Default::default();
    // The first run does not count.
    for run in 0..=effort.runs {
        let of_run = [
            rates(run, bytes, &mut || ours.put(rounds), &mut || plain.copies(Way::InAndOut, rounds))?,
            rates(run, bytes, &mut || ours.get(rounds), &mut || plain.copies(Way::Out, rounds))?,
            rates(run, bytes, &mut || ours.scatter(rounds), &mut || one_by_one.scatter(rounds))?,
            rates(run, bytes, &mut || ours.scatter(rounds), &mut || plain.copies(Way::Within, rounds))?,
        ];
        if run > 0 {
            pairs.iter_mut().zip(of_run).for_each(|(pairs, pair)| pairs.push(pair));
        }
    }
    let names = [
        ("put", "all written, then all read, unchecked"),
        ("get", "limit: read, unchecked"),
        ("scatter", "slices one by one"),
        ("scatter", "limit: whole blocks"),
    ];
    let row = |((what, peer), pairs): ((&str, &str), Vec<(f64, f64)>)| {
        let name = format!("{what}, {layers} x {} KiB", slice_bytes >> 10);
        Row::new("gpu", &name, "GB/s", peer, Better::Higher, outcome(&pairs))
    };
    Ok(names.into_iter().zip(pairs).map(row).collect())
}

fn device() -> anyhow::Result<CudaDevice> {
    CudaDevice::open(0)?
        .context("there is no GPU here, or no driver for it: run this where nvidia-smi lists one")
}

/// The tier, with blocks in it.
struct Ours {
    tier: GpuTier<CudaDevice>,
    arena: Arena,
    frames: Vec<Bytes>,
    stock: Vec<GpuRecord>,
    block_bytes: usize,
    layers: usize,
    /// Where an engine has its KV: a stretch of each layer, the blocks of a request apart from each other.
    engine: u64,
    slice_bytes: u64,
    name: String,
    kernel: &'static str,
}

impl Ours {
    fn open(layers: usize, slice_bytes: u32, mut device: CudaDevice) -> anyhow::Result<Ours> {
        let frames: Vec<Bytes> =
            (0..BLOCKS).map(|number| frame(number, layers, slice_bytes)).collect::<anyhow::Result<_>>()?;
        let frame_bytes = frames.first().map_or(0, Bytes::len);
        let classes = SizeClasses::new(&[frame_bytes]);
        let slabs = classes.slabs_for(frames.len() + JOBS_MAX);
        let arena = Arena::new(ArenaShape::equal(frame_bytes, frames.len() + JOBS_MAX, 0))?;
        let placed = |frame: Bytes| {
            let mut slot = arena.take(frame.len(), Purpose::Load).context("no slot")?;
            slot.copy_from_slice(&frame);
            Ok(slot.freeze())
        };
        let frames = frames.into_iter().map(placed).collect::<anyhow::Result<Vec<_>>>()?;
        let block_bytes = layers * slice_bytes as usize;
        let engine = device.allocate(2 * block_bytes * BLOCKS as usize)?;
        let kernel = if device.hops_max() > 1 { "slices by a kernel" } else { "slices one by one" };
        let name = device.name();
        let shape = GpuShape { classes, slabs, chunk_bytes: CHUNK_BYTES, chunks: CHUNKS, jobs_max: JOBS_MAX };
        let tier = GpuTier::open(device, shape)?;
        let slice_bytes = slice_bytes.into();
        let stock = Vec::new();
        let mut ours =
            Ours { tier, arena, frames, stock, block_bytes, layers, engine, slice_bytes, name, kernel };
        ours.put(1)?;
        Ok(ours)
    }

    /// Puts every block, so many times; the last ones stay.
    fn put(&mut self, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.stock.drain(..).for_each(|record| self.tier.free(record));
            let frames = self.frames.clone();
            self.go(frames.len(), |ours, number| Ok(ours.tier.put(number as u64, &frames[number])?))?;
        }
        Ok(())
    }

    fn get(&mut self, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.go(self.stock.len(), |ours, number| {
                let Some(slot) = ours.arena.take(ours.frames[number].len(), Purpose::Load) else {
                    return Ok(false);
                };
                Ok(ours.tier.get(number as u64, ours.stock[number], slot)?)
            })?;
        }
        Ok(())
    }

    fn scatter(&mut self, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.go(self.stock.len(), |ours, number| {
                // Every other block of a layer is another request's.
                let layer_bytes = 2 * BLOCKS * ours.slice_bytes;
                let place = |layer: usize| {
                    ours.engine + layer as u64 * layer_bytes + 2 * number as u64 * ours.slice_bytes
                };
                let to = (0..ours.layers).map(place).collect();
                Ok(ours.tier.scatter(number as u64, ours.stock[number], to)?)
            })?;
        }
        Ok(())
    }

    /// Begins so many jobs, as many at once as the tier takes, and sees each end well.
    fn go(
        &mut self,
        count: usize,
        mut begin: impl FnMut(&mut Ours, usize) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let (mut begun, mut ended) = (0, 0);
        while ended < count {
            while begun < count && self.tier.jobs() < JOBS_MAX && begin(self, begun)? {
                begun += 1;
            }
            for done in self.tier.poll() {
                match done {
                    Done::Stored { result, .. } => self.stock.push(result?),
                    Done::Loaded { token, result } => {
                        ensure!(result?.len() == self.frames[token as usize].len());
                    }
                    Done::Scattered { is_last: false, .. } => continue,
                    Done::Scattered { .. } => {}
                    Done::ScatterFailed { fault, .. } => bail!(fault),
                }
                ended += 1;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Way {
    /// Written, and read behind it.
    InAndOut,
    Out,
    Within,
}

/// The GPU and nothing else: as many copies under way as the tier has buffers, in pieces of as many bytes.
struct Plain {
    device: CudaDevice,
    staging: Vec<<CudaDevice as Device>::Staging>,
    memory: u64,
    block_bytes: usize,
    next: u64,
}

impl Plain {
    fn open(block_bytes: usize) -> anyhow::Result<Plain> {
        let mut device = device()?.without_kernels();
        let memory = device.allocate(2 * block_bytes * BLOCKS as usize)?;
        let staging = (0..CHUNKS).map(|_| device.staging(CHUNK_BYTES)).collect::<Result<_, _>>()?;
        Ok(Plain { device, staging, memory, block_bytes, next: 0 })
    }

    fn copies(&mut self, way: Way, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            match way {
                Way::InAndOut => {
                    self.pieces(true)?;
                    self.pieces(false)?;
                }
                Way::Out => self.pieces(false)?,
                Way::Within => self.blocks()?,
            }
        }
        Ok(())
    }

    fn pieces(&mut self, is_in: bool) -> anyhow::Result<()> {
        let bytes = self.block_bytes * BLOCKS as usize;
        let (mut begun, mut ended) = (0, 0);
        while ended < bytes {
            while begun < bytes
                && let Some(staging) = self.staging.pop()
            {
                let len = CHUNK_BYTES.min(bytes - begun);
                let piece = Piece { device: self.memory + begun as u64, host: 0..len };
                self.next += 1;
                let copy = if is_in { Copy::In(staging, piece) } else { Copy::Out(staging, piece) };
                self.device.begin(self.next, copy);
                begun += len;
            }
            for end in self.device.ended() {
                end.result?;
                self.staging.extend(end.staging);
                ended = (ended + CHUNK_BYTES).min(bytes);
            }
        }
        Ok(())
    }

    fn blocks(&mut self) -> anyhow::Result<()> {
        let (mut begun, mut ended) = (0, 0);
        while ended < BLOCKS {
            while begun < BLOCKS && begun - ended < JOBS_MAX as u64 {
                let from = self.memory + begun * self.block_bytes as u64;
                let to = from + BLOCKS * self.block_bytes as u64;
                self.next += 1;
                self.device.begin(self.next, Copy::Within(vec![Hop { from, to, len: self.block_bytes }]));
                begun += 1;
            }
            for end in self.device.ended() {
                end.result?;
                ended += 1;
            }
        }
        Ok(())
    }
}

fn frame(number: u64, layers: usize, slice_bytes: u32) -> anyhow::Result<Bytes> {
    let mut payload = vec![0u8; layers * slice_bytes as usize];
    ChaCha8Rng::seed_from_u64(number).fill(&mut payload[..]);
    let hash = BlockHash([number as u8; 16]);
    Ok(seal(IdentityDigest([0x5d; 16]), hash, KeyForm::Rotated, &vec![slice_bytes; layers], &payload)?.bytes)
}
