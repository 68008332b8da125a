//! Verifying a frame while copying it, against a bare copy and against two separate passes.
//!
//! Not here: the source of a frame and the destination of its copy.

use std::cell::Cell;
use std::hint::black_box;

use anyhow::ensure;
use benches::{BenchRow, Better, measure_time, side_by_side};
use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{Frame, KeyForm, seal};

use crate::Effort;

pub(crate) const ABOUT: &str = "frames are copied from one 256 MiB set into another, and every slice's \
    CRC32C is checked during the copy; against a bare copy of the same bytes and against a check followed by \
    a copy; one thread";

const BARE_COPY: &str = "a bare copy, through the caches";
const TWO_PASSES: &str = "the same in two passes";

const IDENTITY: IdentityDigest = IdentityDigest([1; 16]);
const HASH: BlockHash = BlockHash([2; _]);

/// Far larger than any cache, so that every byte comes from memory and goes to memory.
const SET_BYTES: usize = 256 << 20;

/// Slices per frame and bytes per slice: 1 MiB in 32 layers, and a small model's 64 KiB in 16.
const SHAPES: [(usize, u32); 2] = [(32, 32 << 10), (16, 4 << 10)];

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for (slices, bytes) in SHAPES {
        rows.extend(compare(effort, slices, bytes)?);
    }
    Ok(rows)
}

fn compare(effort: &Effort, slices: usize, slice_bytes: u32) -> anyhow::Result<[BenchRow; 2]> {
    let payload_bytes = slices * slice_bytes as usize;
    let count = (effort.scaled(SET_BYTES as u64) as usize / payload_bytes).max(2);
    let frames: Vec<Frame> =
        (0..count).map(|number| frame(number, slices, slice_bytes)).collect::<Result<_, _>>()?;
    let frame_bytes = frames[0].bytes.len();
    let mut target = vec![0u8; count * frame_bytes];
    let failed = Cell::new(0u64);
    let fused = |room: &mut [u8]| {
        cpu_us_per_frame(&frames, room, |frame, to| {
            failed.set(failed.get() + u64::from(frame.verify_into(IDENTITY, HASH, to).is_err()));
        })
    };
    fused(&mut target);
    let is_copied = frames.iter().zip(target.chunks_exact(frame_bytes)).all(|(frame, to)| frame.bytes == to);
    ensure!(is_copied, "the verified bytes differ from the copied ones");
    let bare = |room: &mut [u8]| {
        cpu_us_per_frame(&frames, room, |frame, to| to.copy_from_slice(black_box(&frame.bytes)))
    };
    let apart = |room: &mut [u8]| {
        cpu_us_per_frame(&frames, room, |frame, to| {
            failed.set(failed.get() + u64::from(frame.verify(IDENTITY, HASH).is_err()));
            to.copy_from_slice(&frame.bytes);
        })
    };
    let name = format!("verify and copy {} KiB in {slices} slices", payload_bytes >> 10);
    let room = std::cell::RefCell::new(&mut target[..]);
    let row = |peer, outcome| BenchRow::new("frame", &name, "µs CPU", peer, Better::Lower, outcome);
    let rows = [
        row(
            BARE_COPY,
            side_by_side(effort.runs, || fused(&mut room.borrow_mut()), || bare(&mut room.borrow_mut())),
        ),
        row(
            TWO_PASSES,
            side_by_side(effort.runs, || fused(&mut room.borrow_mut()), || apart(&mut room.borrow_mut())),
        ),
    ];
    ensure!(failed.get() == 0, "{} valid frames were rejected", failed.get());
    Ok(rows)
}

/// CPU microseconds per frame.
fn cpu_us_per_frame(frames: &[Frame], room: &mut [u8], mut copy: impl FnMut(&Frame, &mut [u8])) -> f64 {
    let places = room.chunks_exact_mut(frames[0].bytes.len());
    let ((), spent) = measure_time(|| frames.iter().zip(places).for_each(|(frame, to)| copy(frame, to)));
    black_box(room);
    spent.cpu_us_per(frames.len() as u64)
}

fn frame(number: usize, slices: usize, slice_bytes: u32) -> anyhow::Result<Frame> {
    let payload: Bytes =
        (0..slices * slice_bytes as usize).map(|at| (at.wrapping_mul(number + 31) >> 3) as u8).collect();
    Ok(seal(IDENTITY, HASH, KeyForm::Rotated, &vec![slice_bytes; slices], &payload)?)
}
