//! Behaviour of the tier on every device: the same for the fake one and a GPU.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{KeyForm, seal};

use super::super::device::{CopyRange, DeviceCopy};
use super::super::*;
use crate::arena::{Arena, ArenaShape, SLOT_ALIGN_BYTES};

/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// Length of a chunk: not a divisor of any other length, so that slices cross chunk boundaries.
const CHUNK_BYTES: usize = 5000;

/// Slices of small and of large frames, in bytes.
const SLICES: [&[u32]; 2] = [&[700, 1, 900, 1300], &[4000, 4100, 0, 6000, 1]];

/// A block of one of two sizes, with distinct content.
pub(super) fn frame(number: u64, is_large: bool) -> Bytes {
    let slices = SLICES[usize::from(is_large)];
    let len: u32 = slices.iter().sum();
    let payload: Vec<u8> = (0..u64::from(len)).map(|at| (at * 31 + number * 7 + at / 251) as u8).collect();
    let hash = BlockHash([number as u8; _]);
    seal(IdentityDigest([3; 16]), hash, KeyForm::Rotated, slices, &payload).unwrap().bytes
}

pub(super) fn classes() -> SizeClasses {
    SizeClasses::new(&[frame(0, false).len(), frame(0, true).len()])
}

pub(super) fn shape(slabs: usize) -> GpuShape {
    GpuShape { classes: classes(), slabs, chunk_bytes: CHUNK_BYTES, chunks: 3, jobs_max: 6 }
}

/// Device memory that the suite needs.
pub(super) fn device_bytes() -> usize {
    16 * classes().slab_bytes() + (1 << 20)
}

/// A tier, a DRAM arena, and the results of jobs.
pub(super) struct TierBench<D: GpuDevice> {
    pub(super) tier: GpuTier<D>,
    pub(super) arena: Arena,
    pub(super) stored: BTreeMap<u64, Result<GpuRecord, GpuFault>>,
    pub(super) loaded: BTreeMap<u64, Result<Bytes, GpuFault>>,
    /// Reported slice counts, in order.
    pub(super) scattered: BTreeMap<u64, Vec<usize>>,
    pub(super) scatters_ended: BTreeMap<u64, Result<(), GpuFault>>,
}

impl<D: GpuDevice> TierBench<D> {
    pub(super) fn new(device: D, shape: GpuShape) -> TierBench<D> {
        let slots = ArenaShape { classes: shape.classes.clone(), slabs: 64, reserve_slabs: 0 };
        TierBench {
            tier: GpuTier::open(device, shape).unwrap(),
            arena: Arena::new(slots).unwrap(),
            stored: BTreeMap::new(),
            loaded: BTreeMap::new(),
            scattered: BTreeMap::new(),
            scatters_ended: BTreeMap::new(),
        }
    }

    /// Collects the results of jobs; each ends once.
    pub(super) fn poll(&mut self) {
        for done in self.tier.poll() {
            match done {
                GpuCompletion::Stored { token, result } => {
                    assert!(self.stored.insert(token, result).is_none());
                }
                GpuCompletion::Loaded { token, result } => {
                    assert!(self.loaded.insert(token, result).is_none());
                }
                GpuCompletion::Scattered { token, slices, is_last } => {
                    self.scattered.entry(token).or_default().push(slices);
                    assert!(!is_last || self.scatters_ended.insert(token, Ok(())).is_none());
                }
                GpuCompletion::ScatterFailed { token, fault } => {
                    assert!(self.scatters_ended.insert(token, Err(fault)).is_none());
                }
            }
        }
    }

    pub(super) fn run_to_completion(&mut self) {
        let start = Instant::now();
        self.poll();
        while self.tier.jobs() > 0 {
            assert!(start.elapsed() < PATIENCE, "{} jobs never ended", self.tier.jobs());
            std::thread::yield_now();
            self.poll();
        }
    }

    pub(super) fn put(&mut self, token: u64, frame: &Bytes) -> Result<GpuRecord, GpuFault> {
        assert!(self.tier.put(token, frame).unwrap());
        self.run_to_completion();
        self.stored.remove(&token).unwrap()
    }

    pub(super) fn get(&mut self, token: u64, record: GpuRecord, len: usize) -> Result<Bytes, GpuFault> {
        let slot = self.arena.take(len, Purpose::Load).unwrap();
        assert!(self.tier.get(token, record, slot).unwrap());
        self.run_to_completion();
        self.loaded.remove(&token).unwrap()
    }

    /// Content of device memory, bypassing the tier; it must have no jobs.
    fn peek(&mut self, address: u64, len: usize) -> Vec<u8> {
        let staging = self.tier.device.allocate_staging(len).unwrap();
        self.tier
            .device
            .start(u64::MAX, DeviceCopy::DeviceToHost(staging, CopyRange { device: address, host: 0..len }));
        let start = Instant::now();
        loop {
            if let Some(ended) = self.tier.device.take_completed().pop() {
                ended.result.unwrap();
                return ended.staging.unwrap().as_ref()[..len].to_vec();
            }
            assert!(start.elapsed() < PATIENCE, "a copy never ended");
        }
    }
}

/// Runs all checks, each on a new device.
pub(super) fn run<D: GpuDevice>(make: impl Fn() -> D) {
    check_round_trip(make());
    check_limits_and_reuse(make());
    check_scatter_order(make());
    check_mismatches_are_refused(make());
}

fn check_round_trip<D: GpuDevice>(device: D) {
    let mut bench = TierBench::new(device, shape(12));
    let frames: Vec<Bytes> = (0..20).map(|number| frame(number, number % 3 == 0)).collect();
    let mut waiting: VecDeque<u64> = (0..20).collect();
    while let Some(number) = waiting.pop_front() {
        if !bench.tier.put(number, &frames[number as usize]).unwrap() {
            waiting.push_front(number);
            bench.poll();
        }
    }
    bench.run_to_completion();
    let records: Vec<GpuRecord> =
        (0..20).map(|number| bench.stored.remove(&number).unwrap().unwrap()).collect();
    assert_eq!(bench.tier.used_bytes(), frames.iter().map(Bytes::len).sum::<usize>());
    for (token, (record, frame)) in (100..).zip(records.iter().zip(&frames)) {
        assert_eq!(bench.get(token, *record, frame.len()).unwrap(), frame);
    }
    records.into_iter().for_each(|record| bench.tier.free(record));
    assert_eq!((bench.tier.used_bytes(), bench.tier.slabs.empty_slabs()), (0, 12));
}

fn check_limits_and_reuse<D: GpuDevice>(device: D) {
    let mut bench = TierBench::new(device, GpuShape { jobs_max: 2, ..shape(2) });
    let large = frame(1, true);
    assert!(bench.tier.put(1, &large).unwrap() && bench.tier.put(2, &large).unwrap());
    assert!(!bench.tier.put(3, &large).unwrap(), "too many blocks in transit");
    assert!(bench.tier.copies.len() <= 3, "more copies than buffers");
    bench.run_to_completion();
    let per_slab = classes().list()[1].slots_per_slab;
    let mut records: Vec<GpuRecord> = bench.stored.values().map(|result| *result.as_ref().unwrap()).collect();
    for token in 3..=2 * per_slab as u64 {
        records.push(bench.put(token, &large).unwrap());
    }
    assert!(!bench.tier.put(90, &large).unwrap(), "no memory left");
    bench.tier.free(records[0]);
    bench.put(91, &large).unwrap();
}

fn check_scatter_order<D: GpuDevice>(mut device: D) {
    let engine = device.allocate(1 << 16).unwrap();
    let at_once = device.slices_per_copy_max();
    let mut bench = TierBench::new(device, shape(4));
    let block = frame(9, true);
    let record = bench.put(1, &block).unwrap();
    // Last layer first in the engine's memory, with gaps.
    let to: Vec<u64> = (0..5u64).map(|layer| engine + (4 - layer) * 8192).collect();
    assert!(bench.tier.scatter(2, record, to.clone()).unwrap());
    bench.run_to_completion();
    // Reported after each copy, which has one slice or several.
    let told: Vec<usize> = (1..=5usize.div_ceil(at_once)).map(|copies| (copies * at_once).min(5)).collect();
    assert_eq!((&bench.scattered[&2], &bench.scatters_ended[&2]), (&told, &Ok(())));
    let parsed = Frame::parse(block).unwrap();
    for (layer, address) in to.into_iter().enumerate() {
        let slice = parsed.slice(layer).unwrap();
        assert!(bench.peek(address, slice.len().max(1)).starts_with(&slice), "layer {layer}");
    }
}

fn check_mismatches_are_refused<D: GpuDevice>(device: D) {
    let mut bench = TierBench::new(device, shape(4));
    let block = frame(9, false);
    let record = bench.put(1, &block).unwrap();
    let slot = |len| bench.arena.take(len, Purpose::Load).unwrap();
    let (other, right) = (slot(block.len() - 1), slot(block.len()));
    assert_eq!(bench.tier.get(2, record, other), Err(GpuFault::Unknown), "another length");
    assert_eq!(bench.tier.scatter(2, record, vec![0; 3]), Err(GpuFault::Unknown), "another number of slices");
    assert!(matches!(bench.tier.put(2, &block.slice(1..)), Err(GpuFault::Frame(_))));
    let long = vec![20_000; 4];
    let payload = vec![0; 80_000];
    let long = seal(IdentityDigest([3; 16]), BlockHash([1; _]), KeyForm::Raw, &long, &payload).unwrap();
    assert!(long.bytes.len() > 4 * SLOT_ALIGN_BYTES);
    assert_eq!(bench.tier.put(2, &long.bytes), Err(GpuFault::Unknown), "longer than any slot");
    bench.tier.free(record);
    assert_eq!(bench.tier.get(2, record, right), Err(GpuFault::Unknown), "freed");
    assert_eq!(bench.tier.jobs(), 0);
}
