//! CRC32C of bytes, and copies that compute it on the way, so that memory is read once. If other
//! processes may write the source, each byte is loaded once, and the checksum is that of the copy.
//!
//! With AVX-512 and VPCLMULQDQ the checksum is free beside the copy: 256 bytes at a time are
//! loaded, folded and stored. Large batches use non-temporal stores, since a block is rarely read
//! soon after it arrives. On other processors, short chunks are copied and summed while they are in
//! the L1 cache. Not here: which bytes belong to which checksum (`super`).

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

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
        assert_eq!(to.len(), from.len(), "a copy needs buffers of equal length");
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `from` has the length of `to` and may be read over all of it.
        if let Some(crc) = unsafe { avx512::copy_crc32c(to, from.as_ptr(), self.is_non_temporal) } {
            return crc;
        }
        copy_in_chunks(to, |at, piece| piece.copy_from_slice(&from[at..at + piece.len()]))
    }

    /// Fills `to` with the bytes at `from`, which others may write meanwhile, and returns the
    /// CRC32C of `to`. Each byte of `from` is loaded once, so the checksum covers exactly the
    /// copied bytes. Different bytes may stem from different moments.
    ///
    /// # Safety
    /// At least `to.len()` bytes must be readable at `from` until the call returns. Concurrent
    /// writers must be other processes, or threads of this process that use atomic stores.
    pub unsafe fn crc32c_from(&self, to: &mut [u8], from: *const u8) -> u32 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: guaranteed by the caller.
        if let Some(crc) = unsafe { avx512::copy_crc32c(to, from, self.is_non_temporal) } {
            return crc;
        }
        // SAFETY: guaranteed by the caller; each chunk is a part of the range.
        copy_in_chunks(to, |at, piece| unsafe { copy_from(piece, from.add(at)) })
    }
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

/// A copy without a checksum, for short data that is read next: it stays in the caches. The
/// compiler neither repeats nor splits the loads.
///
/// # Safety
/// As for [`CopyBatch::crc32c_from`].
pub unsafe fn copy_from(to: &mut [u8], from: *const u8) {
    /// The longest load that every processor does atomically.
    const WORD_BYTES: usize = 8;
    let head = from.align_offset(WORD_BYTES).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (to_words, to_tail) = to.as_chunks_mut::<WORD_BYTES>();
    let tail = head + to_words.len() * WORD_BYTES;
    // SAFETY: all accesses lie within the length of `to`, which the caller allows to be read. An
    // atomic load does not race with atomic stores, and other processes are outside the memory
    // model. The words are aligned, because they begin after the head.
    unsafe {
        for (at, byte) in to_head.iter_mut().enumerate() {
            *byte = (*from.add(at).cast::<AtomicU8>()).load(Relaxed);
        }
        for (at, word) in to_words.iter_mut().enumerate() {
            let from = from.add(head + at * WORD_BYTES).cast::<AtomicU64>();
            *word = (*from).load(Relaxed).to_ne_bytes();
        }
        for (at, byte) in to_tail.iter_mut().enumerate() {
            *byte = (*from.add(tail + at).cast::<AtomicU8>()).load(Relaxed);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512 {
    //! Folding as in Intel's paper (Gopal and others, 2009), with four registers of four 128-bit
    //! lanes each.
    //!
    //! The source is loaded by inline assembly, which the compiler emits exactly once. So the
    //! stored and the summed bytes come from one load, even if others write the source.

    use std::arch::asm;
    use std::arch::x86_64::*;

    /// Size of a register and of a non-temporal store.
    const LINE_BYTES: usize = 64;
    /// Lines summed side by side: one fold takes as long as four independent ones.
    const STEP_LINES: usize = 4;
    const STEP_BYTES: usize = STEP_LINES * LINE_BYTES;
    /// Shorter copies use ordinary stores even in a non-temporal batch: most of their cache lines
    /// are shared with neighbouring slices.
    const NON_TEMPORAL_COPY_BYTES_MIN: usize = 512;

    fn is_supported() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// Copies and sums, if the processor supports it; `None` otherwise. With `is_non_temporal` the
    /// caller must fence the stores.
    ///
    /// # Safety
    /// As for [`super::CopyBatch::crc32c_from`].
    pub(super) unsafe fn copy_crc32c(to: &mut [u8], from: *const u8, is_past_caches: bool) -> Option<u32> {
        // SAFETY: the processor has every feature that the function is compiled for; the caller
        // guarantees the rest.
        is_supported()
            .then(|| unsafe { copy(to, from, is_past_caches && to.len() >= NON_TEMPORAL_COPY_BYTES_MIN) })
    }

    /// Sums, if the processor supports it; `None` otherwise.
    pub(super) fn crc32c(bytes: &[u8]) -> Option<u32> {
        // SAFETY: the processor has every feature that the function is compiled for.
        is_supported().then(|| unsafe { sum(bytes) })
    }

    /// # Safety
    /// As for [`super::CopyBatch::crc32c_from`].
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    unsafe fn copy(to: &mut [u8], from: *const u8, is_past_caches: bool) -> u32 {
        // Non-temporal stores write whole aligned lines.
        let head = if is_past_caches { to.as_ptr().align_offset(LINE_BYTES).min(to.len()) } else { 0 };
        let (to_head, to) = to.split_at_mut(head);
        let (to_steps, to) = to.as_chunks_mut::<STEP_BYTES>();
        let (to_lines, to_tail) = to.as_chunks_mut::<LINE_BYTES>();
        let lines_at = head + to_steps.len() * STEP_BYTES;
        let tail = lines_at + to_lines.len() * LINE_BYTES;
        // SAFETY: head, steps, lines and tail follow one another within the range that the caller
        // allows to be read.
        let crc = unsafe { copy_words(to_head, from, !0) };
        let mut to_steps = to_steps.iter_mut().enumerate();
        let mut to_lines = to_lines.iter_mut().enumerate();
        let step = || {
            let (step, to) = to_steps.next()?;
            // SAFETY: as above.
            let bytes = unsafe { load_once(from.add(head + step * STEP_BYTES)) };
            let (to, _) = to.as_chunks_mut::<LINE_BYTES>();
            to.iter_mut().zip(bytes).for_each(|(to, line)| store(to, line, is_past_caches));
            Some(bytes)
        };
        let line = || {
            let (line, to) = to_lines.next()?;
            // SAFETY: as above.
            let [bytes] = unsafe { load_once(from.add(lines_at + line * LINE_BYTES)) };
            store(to, bytes, is_past_caches);
            Some(bytes)
        };
        let crc = fold_all(crc, step, line);
        // SAFETY: as above.
        !unsafe { copy_words(to_tail, from.add(tail), crc) }
    }

    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    fn sum(bytes: &[u8]) -> u32 {
        let head = bytes.as_ptr().align_offset(LINE_BYTES).min(bytes.len());
        let (head, bytes) = bytes.split_at(head);
        let (steps, bytes) = bytes.as_chunks::<STEP_BYTES>();
        let (lines, tail) = bytes.as_chunks::<LINE_BYTES>();
        let (mut steps, mut lines) = (steps.iter(), lines.iter());
        let step = || steps.next().map(|step| [0, 1, 2, 3].map(|line| load(&step.as_chunks().0[line])));
        let line = || lines.next().map(|line| load(line));
        !crc_words(tail, fold_all(crc_words(head, !0), step, line))
    }

    #[target_feature(enable = "sse4.2")]
    fn crc_words(bytes: &[u8], crc: u32) -> u32 {
        let (words, rest) = bytes.as_chunks::<8>();
        let crc =
            words.iter().fold(u64::from(crc), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
        rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
    }

    /// Copies and sums data that is shorter than a step.
    ///
    /// # Safety
    /// As for [`super::CopyBatch::crc32c_from`].
    #[target_feature(enable = "sse4.2")]
    unsafe fn copy_words(to: &mut [u8], mut from: *const u8, crc: u32) -> u32 {
        let (words, rest) = to.as_chunks_mut::<8>();
        let mut wide_crc = u64::from(crc);
        for to in words {
            let word: u64;
            // SAFETY: these eight bytes lie in the range that the caller allows to be read; the
            // advanced pointer is at most its end.
            unsafe {
                asm!("mov {word}, qword ptr [{from}]", word = out(reg) word, from = in(reg) from,
                    options(nostack, preserves_flags, readonly));
                from = from.add(8);
            }
            *to = word.to_le_bytes();
            wide_crc = _mm_crc32_u64(wide_crc, word);
        }
        let mut crc = wide_crc as u32;
        for to in rest {
            // SAFETY: one byte of the same range.
            unsafe {
                asm!("mov {byte}, byte ptr [{from}]", byte = out(reg_byte) *to, from = in(reg) from,
                    options(nostack, preserves_flags, readonly));
                from = from.add(1);
            }
            crc = _mm_crc32_u8(crc, *to);
        }
        crc
    }

    /// The checksum of all whole steps, four lines side by side, and of the lines after them.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    #[inline]
    fn fold_all(
        crc: u32,
        mut step: impl FnMut() -> Option<[__m512i; STEP_LINES]>,
        mut line: impl FnMut() -> Option<__m512i>,
    ) -> u32 {
        let start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(crc.cast_signed()));
        let over_line = _mm512_broadcast_i32x4(fold_constants::<512>());
        let mut sum = if let Some(mut sums) = step() {
            sums[0] = _mm512_xor_si512(sums[0], start);
            let over_step = _mm512_broadcast_i32x4(fold_constants::<2048>());
            while let Some(next) = step() {
                sums = [0, 1, 2, 3].map(|line| fold(sums[line], over_step, next[line]));
            }
            let [first, others @ ..] = sums;
            others.into_iter().fold(first, |sum, next| fold(sum, over_line, next))
        } else {
            let Some(first) = line() else { return crc };
            _mm512_xor_si512(first, start)
        };
        while let Some(next) = line() {
            sum = fold(sum, over_line, next);
        }
        let lanes = [
            _mm512_extracti32x4_epi32::<0>(sum),
            _mm512_extracti32x4_epi32::<1>(sum),
            _mm512_extracti32x4_epi32::<2>(sum),
            _mm512_extracti32x4_epi32::<3>(sum),
        ];
        let over_lane = fold_constants::<128>();
        let [first, others @ ..] = lanes;
        let last = others.into_iter().fold(first, |sum, next| {
            let low = _mm_clmulepi64_si128::<0x00>(sum, over_lane);
            let high = _mm_clmulepi64_si128::<0x11>(sum, over_lane);
            _mm_xor_si128(_mm_xor_si128(low, high), next)
        });
        let crc = _mm_crc32_u64(0, _mm_extract_epi64::<0>(last).cast_unsigned());
        _mm_crc32_u64(crc, _mm_extract_epi64::<1>(last).cast_unsigned()) as u32
    }

    /// Loads `LINES` consecutive lines, each once. All of them wait for memory together.
    ///
    /// # Safety
    /// The lines must be readable at `from`. Others may write them meanwhile.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_once<const LINES: usize>(from: *const u8) -> [__m512i; LINES] {
        let mut lines = [_mm512_setzero_si512(); LINES];
        for (at, line) in lines.iter_mut().enumerate() {
            // SAFETY: the caller allows these 64 bytes to be read; the load may be unaligned and
            // touches no other memory.
            unsafe {
                asm!("vmovdqu64 {line}, zmmword ptr [{from}]", line = out(zmm_reg) *line,
                    from = in(reg) from.add(at * LINE_BYTES), options(nostack, preserves_flags, readonly));
            }
        }
        lines
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn load(from: &[u8; LINE_BYTES]) -> __m512i {
        // SAFETY: the 64 bytes lie inside the array; the load may be unaligned.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    /// Stores a line. A non-temporal store needs an aligned destination.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn store(to: &mut [u8; LINE_BYTES], line: __m512i, is_past_caches: bool) {
        let to = to.as_mut_ptr().cast::<__m512i>();
        debug_assert!(!is_past_caches || to.is_aligned());
        // SAFETY: the 64 bytes lie inside the array. A plain store may be unaligned. A non-temporal
        // store happens only after a head that ends at a line boundary, so its destination is
        // aligned.
        unsafe { if is_past_caches { _mm512_stream_si512(to, line) } else { _mm512_storeu_si512(to, line) } }
    }

    /// Advances the folded checksum by the number of bits that `over` stands for, and adds `next`.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    #[inline]
    fn fold(sum: __m512i, over: __m512i, next: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(sum, over);
        let high = _mm512_clmulepi64_epi128::<0x11>(sum, over);
        // Exclusive or of all three.
        _mm512_ternarylogic_epi64::<0x96>(low, high, next)
    }

    /// Multipliers that advance the 64-bit halves of a lane by `BITS` bits.
    #[target_feature(enable = "sse2")]
    #[inline]
    fn fold_constants<const BITS: u32>() -> __m128i {
        _mm_set_epi64x(
            const { power_of_x(BITS - 32) }.cast_signed(),
            const { power_of_x(BITS + 32) }.cast_signed(),
        )
    }

    /// `x` to this power modulo the CRC32C polynomial, reflected and shifted up by one bit, because
    /// products of reflected numbers are one bit down.
    const fn power_of_x(exponent: u32) -> u64 {
        /// The polynomial 0x1EDC6F41, reflected.
        const POLYNOMIAL: u32 = 0x82f6_3b78;
        let (mut value, mut at) = (0x8000_0000_u32, 0);
        while at < exponent {
            value = if value & 1 == 1 { (value >> 1) ^ POLYNOMIAL } else { value >> 1 };
            at += 1;
        }
        (value as u64) << 1
    }
}

/// Copies and sums memory at byte `at` that other threads write by atomic stores, for tests without
/// unsafe code.
#[cfg(test)]
pub(super) fn copy_crc32c_shared(to: &mut [u8], from: &[AtomicU64], at: usize, copies: &CopyBatch) -> u32 {
    assert!(at + to.len() <= size_of_val(from));
    // SAFETY: the range lies within the words, which are written by atomic stores only.
    unsafe { copies.crc32c_from(to, from.as_ptr().cast::<u8>().add(at)) }
}

/// Like [`copy_crc32c_shared`], without a checksum.
#[cfg(test)]
pub(super) fn copy_shared(to: &mut [u8], from: &[AtomicU64], at: usize) {
    assert!(at + to.len() <= size_of_val(from));
    // SAFETY: as in [`copy_crc32c_shared`].
    unsafe { copy_from(to, from.as_ptr().cast::<u8>().add(at)) };
}

/// Stops a test's writer thread when dropped, also on a panic: the thread scope waits for the
/// writer.
#[cfg(test)]
pub(super) struct StopOnDrop<'flag>(pub(super) &'flag std::sync::atomic::AtomicBool);

#[cfg(test)]
impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// A short copy that is part of a large batch.
    fn copy_in_large_batch(to: &mut [u8], from: &[u8]) -> u32 {
        copy_batch(NON_TEMPORAL_BYTES_MIN, |copies| copies.crc32c(to, from))
    }

    /// The portable code path, which this machine would not choose.
    fn copy_in_plain_chunks(to: &mut [u8], from: &[u8]) -> u32 {
        copy_in_chunks(to, |at, piece| piece.copy_from_slice(&from[at..at + piece.len()]))
    }

    fn copy_in_chunks_loaded_once(to: &mut [u8], from: &[u8]) -> u32 {
        assert_eq!(to.len(), from.len());
        // SAFETY: both have the same length.
        copy_in_chunks(to, |at, piece| unsafe { copy_from(piece, from.as_ptr().add(at)) })
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
            let from = from.as_ptr().cast::<u8>();
            // SAFETY: within the words, as the caller ensures.
            copy_in_chunks(to, |piece_at, piece| unsafe { copy_from(piece, from.add(at + piece_at)) })
        };
        let shared: CopyFn =
            |to, from, at| copy_batch(to.len(), |copies| copy_crc32c_shared(to, from, at, copies));
        let among_others: CopyFn = |to, from, at| {
            copy_batch(NON_TEMPORAL_BYTES_MIN, |copies| copy_crc32c_shared(to, from, at, copies))
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
