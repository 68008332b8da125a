//! CRC32C of bytes, and copies that compute it on the way, so that memory is read once. If other
//! processes may write the source, each byte is loaded once, and the checksum is that of the copy.
//!
//! With AVX-512 and VPCLMULQDQ the checksum is free beside the copy: 256 bytes at a time are
//! loaded, folded and stored. Large batches use non-temporal stores, since a block is rarely read
//! soon after it arrives. On other processors, short chunks are copied and summed while they are in
//! the L1 cache. Not here: which bytes belong to which checksum (`proto/src/frame/`).
#![allow(unsafe_code)]

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
mod shared;

pub use shared::SharedBytes;

use std::marker::PhantomData;

/// Smaller batches stay in the caches: waiting for non-temporal stores costs as much as storing a
/// few kilobytes.
const NON_TEMPORAL_BYTES_MIN: usize = 16 << 10;

/// Copies made one after another and used together: the slices of one frame ([`copy_batch`]).
#[derive(Debug)]
pub struct CopyBatch {
    is_non_temporal: bool,
    /// The fence must run on the thread that made the non-temporal stores.
    _not_send: PhantomData<*const ()>,
}

/// Runs `make`, which copies `bytes` in total, perhaps in many short copies. A large batch uses
/// non-temporal stores, with one fence after the last copy.
pub fn copy_batch<T>(bytes: usize, make: impl FnOnce(&CopyBatch) -> T) -> T {
    /// Runs also if `make` unwinds.
    struct StoreFence;
    impl Drop for StoreFence {
        fn drop(&mut self) {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // Only this fence orders the non-temporal stores for other threads. SAFETY: every
            // x86-64 processor has the instruction.
            unsafe {
                std::arch::x86_64::_mm_sfence();
            }
        }
    }
    let is_past_caches = bytes >= NON_TEMPORAL_BYTES_MIN;
    let _ordered = is_past_caches.then_some(StoreFence);
    make(&CopyBatch { is_non_temporal: is_past_caches, _not_send: PhantomData })
}

impl CopyBatch {
    /// Copies `from` to `to`, which has the same length, and returns the CRC32C of the bytes.
    ///
    /// # Panics
    /// When the lengths differ, as `copy_from_slice` does.
    pub fn crc32c(&self, to: &mut [u8], from: &[u8]) -> u32 {
        check_lengths(to.len(), from.len());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `from` has the length of `to` and may be read over all of it.
        if let Some(crc) = unsafe { avx512::copy_crc32c(to, from.as_ptr(), self.is_non_temporal) } {
            return crc;
        }
        copy_in_chunks(to, |at, piece| piece.copy_from_slice(&from[at..at + piece.len()]))
    }

    /// Fills `to` with bytes that others may write meanwhile, and returns the CRC32C of `to`. Each
    /// byte of `from` is loaded once, so the checksum covers exactly the copied bytes. Different
    /// bytes may stem from different moments.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn crc32c_shared(&self, to: &mut [u8], from: SharedBytes<'_>) -> u32 {
        check_lengths(to.len(), from.len());
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `from` has the length of `to` and may be read over all of it.
        if let Some(crc) = unsafe { avx512::copy_crc32c(to, from.as_ptr(), self.is_non_temporal) } {
            return crc;
        }
        copy_in_chunks(to, |at, piece| from.slice(at, piece.len()).copy_to(piece))
    }
}

#[inline]
fn check_lengths(to: usize, from: usize) {
    assert_eq!(to, from, "a copy needs buffers of equal length");
}

/// A single copy with its checksum ([`CopyBatch::crc32c`]).
///
/// # Panics
/// When the lengths differ, as `copy_from_slice` does.
pub fn copy_crc32c(to: &mut [u8], from: &[u8]) -> u32 {
    copy_batch(to.len(), |copies| copies.crc32c(to, from))
}

/// The CRC32C of bytes in place.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = avx512::crc32c(bytes) {
        return crc;
    }
    crc32c::crc32c(bytes)
}

/// The portable version: `copy` fills the chunk of `to` that begins at the given offset, and the
/// chunk is then summed.
fn copy_in_chunks(to: &mut [u8], copy: impl Fn(usize, &mut [u8])) -> u32 {
    /// Source and destination of a chunk fit a 32 KiB L1 cache, and a chunk is long enough for the
    /// three streams of its checksum.
    const PIECE_BYTES: usize = 6 << 10;
    let (mut crc, mut at) = (0, 0);
    for piece in to.chunks_mut(PIECE_BYTES) {
        copy(at, piece);
        crc = crc32c::crc32c_append(crc, piece);
        at += piece.len();
    }
    crc
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

    use super::*;

    /// Stops the writer thread when dropped, also on a panic: the thread scope waits for the
    /// writer.
    struct StopOnDrop<'flag>(&'flag AtomicBool);

    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    /// A short copy that is part of a large batch.
    fn copy_in_large_batch(to: &mut [u8], from: &[u8]) -> u32 {
        copy_batch(NON_TEMPORAL_BYTES_MIN, |copies| copies.crc32c(to, from))
    }

    /// The portable code path, which this machine would not choose.
    fn copy_in_plain_chunks(to: &mut [u8], from: &[u8]) -> u32 {
        copy_in_chunks(to, |at, piece| piece.copy_from_slice(&from[at..at + piece.len()]))
    }

    fn copy_in_chunks_loaded_once(to: &mut [u8], from: &[u8]) -> u32 {
        // SAFETY: nothing writes these bytes.
        let from = unsafe { SharedBytes::new(from.as_ptr(), from.len()) };
        copy_in_chunks(to, |at, piece| from.slice(at, piece.len()).copy_to(piece))
    }

    #[test]
    fn copy_checksum_matches_at_every_length_and_alignment() {
        let from: Vec<u8> = (0..20_000_u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        let lengths = (0..700).chain([1023, 1024, 4096, 6143, 6144, 6145, 12_289, 16_383, 16_384, 19_900]);
        for bytes in lengths {
            for (place, source) in [(0, 0), (1, 0), (63, 7), (17, 64)] {
                let from = &from[source..source + bytes];
                assert_eq!(crc32c(from), crc32c::crc32c(from), "{bytes} bytes from {source}");
                let mut room = vec![0xee; place + bytes + 1];
                for copy in
                    [copy_crc32c, copy_in_large_batch, copy_in_plain_chunks, copy_in_chunks_loaded_once]
                {
                    let to = &mut room[place..place + bytes];
                    to.fill(0);
                    assert_eq!(
                        copy(to, from),
                        crc32c::crc32c(from),
                        "{bytes} bytes from {source} to {place}"
                    );
                    assert_eq!(to, from, "{bytes} bytes from {source} to {place}");
                    assert_eq!(room[place + bytes], 0xee, "{bytes} bytes from {source} to {place}");
                }
            }
        }
    }

    #[test]
    #[should_panic = "needs buffers of equal length"]
    fn rejects_a_destination_of_another_length() {
        copy_crc32c(&mut [0; 500], &[0; 600]);
    }

    /// Copies from the given offset of the shared words.
    type CopyFn = fn(&mut [u8], &[AtomicU64], usize) -> u32;

    /// Like another process that writes its bounce buffer: the source changes all the time, and the
    /// checksum is still that of the copy.
    #[test]
    #[cfg(not(miri))]
    fn checksum_covers_the_copy_under_concurrent_writes() {
        const ROUNDS_MIN: usize = 20_000;
        const ROUNDS_MAX: usize = 2_000_000;
        let source: Vec<AtomicU64> = (0..2048).map(|_| AtomicU64::new(0)).collect();
        let is_over = AtomicBool::new(false);
        let write = || {
            let mut value = 0_u64;
            while !is_over.load(Relaxed) {
                value = value.wrapping_add(0x0101_0101_0101_0101);
                source.iter().for_each(|word| word.store(value, Relaxed));
            }
        };
        let read_once: CopyFn = |to, from, at| {
            let from = SharedBytes::of_words(from).slice(at, to.len());
            copy_in_chunks(to, |at, piece| from.slice(at, piece.len()).copy_to(piece))
        };
        let shared: CopyFn = |to, from, at| {
            let from = SharedBytes::of_words(from).slice(at, to.len());
            copy_batch(to.len(), |copies| copies.crc32c_shared(to, from))
        };
        let among_others: CopyFn = |to, from, at| {
            let from = SharedBytes::of_words(from).slice(at, to.len());
            copy_batch(NON_TEMPORAL_BYTES_MIN, |copies| copies.crc32c_shared(to, from))
        };
        let mut room = vec![0; 8192 + 64];
        // Torn copies per copy function. Without any, the writer met no copy and the test proves
        // too little.
        let mut torn = [0; 3];
        std::thread::scope(|scope| {
            scope.spawn(write);
            let _ends = StopOnDrop(&is_over);
            for round in 0..ROUNDS_MAX {
                if round >= ROUNDS_MIN && torn.iter().all(|torn| *torn > 0) {
                    break;
                }
                // Heads and tails of all lengths; most copies are short enough to have only these.
                let (place, offset) = (round % 64, round % 23);
                let bytes = if round % 16 == 0 { 8192 - round % 300 } else { round % 600 };
                let to = &mut room[place..place + bytes];
                for (way, torn) in [shared, among_others, read_once].iter().zip(&mut torn) {
                    assert_eq!(
                        way(to, &source, offset),
                        crc32c::crc32c(to),
                        "{bytes} bytes from {offset} to {place}"
                    );
                    *torn += usize::from(to.windows(2).any(|pair| pair[0] != pair[1]));
                }
            }
        });
        assert!(torn.iter().all(|torn| *torn > 0), "{torn:?}");
    }
}
