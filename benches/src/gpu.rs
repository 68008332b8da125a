//! The GPU tier against the same GPU without it: plain copies through page-locked memory, and
//! slices copied individually.
//!
//! Not here: placement of blocks on a GPU (`kv_core::tier`), and network paths to it. It needs a
//! GPU, so `--all` excludes it; the figures are in docs/adr/0026-gpu-tier.md.

use anyhow::{Context, bail, ensure};
use benches::{BenchRow, Better, measure_time, outcome};
use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_node::arena::{Arena, ArenaShape, Purpose, SizeClasses};
use kvfleet_node::tiers::gpu::cuda::CudaDevice;
use kvfleet_node::tiers::gpu::device::{CopyRange, DeviceCopy, GpuDevice, SliceCopy};
use kvfleet_node::tiers::gpu::{CHUNK_BYTES, CHUNKS, GpuCompletion, GpuRecord, GpuShape, GpuTier, JOBS_MAX};
use kvfleet_proto::frame::{KeyForm, seal};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Effort;

pub(crate) const ABOUT: &str = "blocks written to a GPU's memory (and read back), read from it and scattered \
    within it by the GPU tier, all verified, as in a node; against plain copies of the same bytes through \
    page-locked memory, slices copied one by one, and one copy of a whole block";

/// Number of distinct blocks, and uses of each per run.
const BLOCKS: u64 = 128;
const ROUNDS: u64 = 8;

/// Layers and bytes per layer. First, sixteen tokens of a model of eight billion parameters with 32
/// layers (2 MiB), then a model with small KV.
const SHAPES: [(usize, u32); 2] = [(32, 64 << 10), (60, 18 << 10)];

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let rows = SHAPES
        .iter()
        .map(|(layers, slice_bytes)| compare(effort, *layers, *slice_bytes))
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok(rows.concat())
}

/// One run of one side.
type GpuRun<'a> = &'a mut dyn FnMut() -> anyhow::Result<()>;

/// Rates of both sides in GB/s for `bytes` bytes; the starting side alternates.
fn rates(run: usize, bytes: u64, ours: GpuRun<'_>, theirs: GpuRun<'_>) -> anyhow::Result<(f64, f64)> {
    let timed = |side: GpuRun<'_>| {
        let (end, spent) = measure_time(side);
        end.map(|()| spent.per_wall_s(bytes) / 1e9)
    };
    if run.is_multiple_of(2) {
        let first = timed(ours)?;
        return Ok((first, timed(theirs)?));
    }
    let first = timed(theirs)?;
    Ok((timed(ours)?, first))
}

fn compare(effort: &Effort, layers: usize, slice_bytes: u32) -> anyhow::Result<Vec<BenchRow>> {
    let rounds = effort.scaled(ROUNDS);
    let mut ours = GpuTierBench::open(layers, slice_bytes, device()?)?;
    let mut one_by_one = GpuTierBench::open(layers, slice_bytes, device()?.without_kernels())?;
    let mut plain = PlainCopies::open(ours.block_bytes)?;
    let bytes = ours.block_bytes as u64 * BLOCKS * rounds;
    eprintln!("gpu: {layers} layers of {slice_bytes} bytes on {}, {}", ours.name, ours.kernel);
    let mut pairs: [Vec<(f64, f64)>; 4] = Default::default();
    // The first run is a warm-up.
    for run in 0..=effort.runs {
        let of_run = [
            rates(run, bytes, &mut || ours.put(rounds), &mut || {
                plain.run(CopyPattern::WriteThenRead, rounds)
            })?,
            rates(run, bytes, &mut || ours.get(rounds), &mut || plain.run(CopyPattern::Read, rounds))?,
            rates(run, bytes, &mut || ours.scatter(rounds), &mut || one_by_one.scatter(rounds))?,
            rates(run, bytes, &mut || ours.scatter(rounds), &mut || {
                plain.run(CopyPattern::WithinDevice, rounds)
            })?,
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
        BenchRow::new("gpu", &name, "GB/s", peer, Better::Higher, outcome(&pairs))
    };
    Ok(names.into_iter().zip(pairs).map(row).collect())
}

fn device() -> anyhow::Result<CudaDevice> {
    CudaDevice::open(0)?.context("no GPU or no driver: run this on a machine with a GPU in nvidia-smi's list")
}

/// The tier, with blocks in it.
struct GpuTierBench {
    tier: GpuTier<CudaDevice>,
    arena: Arena,
    frames: Vec<Bytes>,
    stock: Vec<GpuRecord>,
    block_bytes: usize,
    layers: usize,
    /// The engine's KV memory: one region per layer, with the blocks of a request apart from each
    /// other.
    engine: u64,
    slice_bytes: u64,
    name: String,
    kernel: &'static str,
}

impl GpuTierBench {
    fn open(layers: usize, slice_bytes: u32, mut device: CudaDevice) -> anyhow::Result<GpuTierBench> {
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
        let kernel =
            if device.slices_per_copy_max() > 1 { "slices by a kernel" } else { "slices one by one" };
        let name = device.name();
        let shape = GpuShape { classes, slabs, chunk_bytes: CHUNK_BYTES, chunks: CHUNKS, jobs_max: JOBS_MAX };
        let tier = GpuTier::open(device, shape)?;
        let slice_bytes = slice_bytes.into();
        let stock = Vec::new();
        let mut ours = GpuTierBench {
            tier,
            arena,
            frames,
            stock,
            block_bytes,
            layers,
            engine,
            slice_bytes,
            name,
            kernel,
        };
        ours.put(1)?;
        Ok(ours)
    }

    /// Writes every block `rounds` times; the last ones stay.
    fn put(&mut self, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.stock.drain(..).for_each(|record| self.tier.free(record));
            let frames = self.frames.clone();
            self.run_jobs(frames.len(), |ours, number| Ok(ours.tier.put(number as u64, &frames[number])?))?;
        }
        Ok(())
    }

    fn get(&mut self, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            self.run_jobs(self.stock.len(), |ours, number| {
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
            self.run_jobs(self.stock.len(), |ours, number| {
                // Every other block of a layer belongs to another request.
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

    /// Runs `count` jobs, as many concurrently as the tier accepts, and checks each result.
    fn run_jobs(
        &mut self,
        count: usize,
        mut begin: impl FnMut(&mut GpuTierBench, usize) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let (mut begun, mut ended) = (0, 0);
        while ended < count {
            while begun < count && self.tier.jobs() < JOBS_MAX && begin(self, begun)? {
                begun += 1;
            }
            for done in self.tier.poll() {
                match done {
                    GpuCompletion::Stored { result, .. } => self.stock.push(result?),
                    GpuCompletion::Loaded { token, result } => {
                        ensure!(result?.len() == self.frames[token as usize].len());
                    }
                    GpuCompletion::Scattered { is_last: false, .. } => continue,
                    GpuCompletion::Scattered { .. } => {}
                    GpuCompletion::ScatterFailed { fault, .. } => bail!(fault),
                }
                ended += 1;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum CopyPattern {
    /// Writes, then reads back.
    WriteThenRead,
    Read,
    WithinDevice,
}

/// The GPU alone: the same number of concurrent copies and the same piece size as the tier.
struct PlainCopies {
    device: CudaDevice,
    staging: Vec<<CudaDevice as GpuDevice>::Staging>,
    memory: u64,
    block_bytes: usize,
    next: u64,
}

impl PlainCopies {
    fn open(block_bytes: usize) -> anyhow::Result<PlainCopies> {
        let mut device = device()?.without_kernels();
        let memory = device.allocate(2 * block_bytes * BLOCKS as usize)?;
        let staging = (0..CHUNKS).map(|_| device.allocate_staging(CHUNK_BYTES)).collect::<Result<_, _>>()?;
        Ok(PlainCopies { device, staging, memory, block_bytes, next: 0 })
    }

    fn run(&mut self, way: CopyPattern, rounds: u64) -> anyhow::Result<()> {
        for _ in 0..rounds {
            match way {
                CopyPattern::WriteThenRead => {
                    self.copy_pieces(true)?;
                    self.copy_pieces(false)?;
                }
                CopyPattern::Read => self.copy_pieces(false)?,
                CopyPattern::WithinDevice => self.copy_blocks()?,
            }
        }
        Ok(())
    }

    fn copy_pieces(&mut self, is_in: bool) -> anyhow::Result<()> {
        let bytes = self.block_bytes * BLOCKS as usize;
        let (mut begun, mut ended) = (0, 0);
        while ended < bytes {
            while begun < bytes
                && let Some(staging) = self.staging.pop()
            {
                let len = CHUNK_BYTES.min(bytes - begun);
                let piece = CopyRange { device: self.memory + begun as u64, host: 0..len };
                self.next += 1;
                let copy = if is_in {
                    DeviceCopy::HostToDevice(staging, piece)
                } else {
                    DeviceCopy::DeviceToHost(staging, piece)
                };
                self.device.start(self.next, copy);
                begun += len;
            }
            for end in self.device.take_completed() {
                end.result?;
                self.staging.extend(end.staging);
                ended = (ended + CHUNK_BYTES).min(bytes);
            }
        }
        Ok(())
    }

    fn copy_blocks(&mut self) -> anyhow::Result<()> {
        let (mut begun, mut ended) = (0, 0);
        while ended < BLOCKS {
            while begun < BLOCKS && begun - ended < JOBS_MAX as u64 {
                let from = self.memory + begun * self.block_bytes as u64;
                let to = from + BLOCKS * self.block_bytes as u64;
                self.next += 1;
                self.device.start(
                    self.next,
                    DeviceCopy::DeviceToDevice(vec![SliceCopy { from, to, len: self.block_bytes }]),
                );
                begun += 1;
            }
            for end in self.device.take_completed() {
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
    let hash = BlockHash([number as u8; _]);
    Ok(seal(IdentityDigest([0x5d; 16]), hash, KeyForm::Rotated, &vec![slice_bytes; layers], &payload)?.bytes)
}
