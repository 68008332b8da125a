//! Copies and sums with AVX-512.
//!
//! Folding as in Intel's paper (Gopal and others, 2009), with four registers of four 128-bit lanes
//! each. The source is loaded by inline assembly, which the compiler emits exactly once. So the
//! stored and the summed bytes come from one load, even if others write the source. Not here: the
//! choice of the code path (`mod.rs`).
#![allow(unsafe_code)]

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
/// At least `to.len()` bytes must be readable at `from`, as [`super::SharedBytes::new`] defines it.
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
/// At least `to.len()` bytes must be readable at `from`, as [`super::SharedBytes::new`] defines it.
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
    let crc = words.iter().fold(u64::from(crc), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
    rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
}

/// Copies and sums data that is shorter than a step.
///
/// # Safety
/// At least `to.len()` bytes must be readable at `from`, as [`super::SharedBytes::new`] defines it.
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
