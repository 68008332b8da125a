//! Computes the CRC32C of bytes, and copies them on the way if they are to be somewhere else: they come from
//! memory once.
//!
//! With AVX-512 and VPCLMULQDQ the sum costs nothing beside the copy: 256 bytes at a time are loaded, folded and stored past
//! the caches (nobody reads a block soon after it came). Elsewhere short pieces are copied and summed while they are
//! in the first-level cache. Not here: which bytes belong to which checksum (`super`).

/// Copies `from` to `to`, which are of one length, and gives the CRC32C of the bytes.
///
/// # Panics
/// When the lengths differ, as `copy_from_slice` does.
pub(super) fn copy_crc32c(to: &mut [u8], from: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = wide::copy_crc32c(to, from) {
        return crc;
    }
    in_pieces(to, from)
}

/// The CRC32C of bytes that stay where they are.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = wide::crc32c(bytes) {
        return crc;
    }
    crc32c::crc32c(bytes)
}

/// The same on any machine.
fn in_pieces(to: &mut [u8], from: &[u8]) -> u32 {
    /// Both ends of a piece stay in a first-level cache of 32 KiB, and a piece is long enough for the three streams
    /// in which it is summed.
    const PIECE_BYTES: usize = 6 << 10;
    assert_eq!(to.len(), from.len(), "a copy has the length of what is copied");
    let mut crc = 0;
    for (to, from) in to.chunks_mut(PIECE_BYTES).zip(from.chunks(PIECE_BYTES)) {
        to.copy_from_slice(from);
        crc = crc32c::crc32c_append(crc, to);
    }
    crc
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[allow(unsafe_code)]
mod wide {
    //! Folding as in Intel's paper (Gopal and others, 2009), with four registers of four 128-bit lanes each.

    use std::arch::x86_64::*;

    /// Bytes of a step: four registers.
    const STEP_BYTES: usize = 256;
    /// Destination of a store past the caches.
    const LINE_BYTES: usize = 64;

    fn is_able() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// Copies and sums, where the processor can.
    pub(super) fn copy_crc32c(to: &mut [u8], from: &[u8]) -> Option<u32> {
        // SAFETY: the processor has every feature that the function is compiled for.
        is_able().then(|| unsafe { copy(to, from) })
    }

    /// Sums, where the processor can.
    pub(super) fn crc32c(bytes: &[u8]) -> Option<u32> {
        // SAFETY: as above.
        is_able().then(|| unsafe { sum(bytes) })
    }

    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    fn copy(to: &mut [u8], from: &[u8]) -> u32 {
        assert_eq!(to.len(), from.len(), "a copy has the length of what is copied");
        let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len());
        let ((to_head, to), (from_head, from)) = (to.split_at_mut(head), from.split_at(head));
        let (to_steps, to_tail) = to.as_chunks_mut::<STEP_BYTES>();
        let (from_steps, from_tail) = from.as_chunks::<STEP_BYTES>();
        to_head.copy_from_slice(from_head);
        to_tail.copy_from_slice(from_tail);
        let crc = steps(Some(to_steps), from_steps, words(from_head, !0));
        !words(from_tail, crc)
    }

    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    fn sum(bytes: &[u8]) -> u32 {
        let head = bytes.as_ptr().align_offset(LINE_BYTES).min(bytes.len());
        let (head, bytes) = bytes.split_at(head);
        let (whole, tail) = bytes.as_chunks::<STEP_BYTES>();
        let crc = steps(None, whole, words(head, !0));
        !words(tail, crc)
    }

    #[target_feature(enable = "sse4.2")]
    fn words(bytes: &[u8], crc: u32) -> u32 {
        let (words, rest) = bytes.as_chunks::<8>();
        let crc =
            words.iter().fold(u64::from(crc), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
        rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
    }

    /// Whole steps; `to`, which has as many if it is there, begins at a line.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    fn steps(to: Option<&mut [[u8; STEP_BYTES]]>, from: &[[u8; STEP_BYTES]], crc: u32) -> u32 {
        let Some((first, rest)) = from.split_first() else { return crc };
        let mut to = to.unwrap_or_default().iter_mut();
        let mut next_step = |from| {
            let bytes = load(from);
            if let Some(to) = to.next() {
                store(to, bytes);
            }
            bytes
        };
        let mut sums = next_step(first);
        sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(crc.cast_signed())));
        let over_step = _mm512_broadcast_i32x4(constants::<2048>());
        for from in rest {
            let next = next_step(from);
            sums = [0, 1, 2, 3].map(|lane| fold(sums[lane], over_step, next[lane]));
        }
        // Stores past the caches are seen by others in their order only from here on.
        _mm_sfence();
        let over_register = _mm512_broadcast_i32x4(constants::<512>());
        let sum = fold(sums[0], over_register, sums[1]);
        let sum = fold(fold(sum, over_register, sums[2]), over_register, sums[3]);
        let lanes = [
            _mm512_extracti32x4_epi32::<0>(sum),
            _mm512_extracti32x4_epi32::<1>(sum),
            _mm512_extracti32x4_epi32::<2>(sum),
            _mm512_extracti32x4_epi32::<3>(sum),
        ];
        let over_lane = constants::<128>();
        let [first, others @ ..] = lanes;
        let last = others.into_iter().fold(first, |sum, next| {
            let low = _mm_clmulepi64_si128::<0x00>(sum, over_lane);
            let high = _mm_clmulepi64_si128::<0x11>(sum, over_lane);
            _mm_xor_si128(_mm_xor_si128(low, high), next)
        });
        let crc = _mm_crc32_u64(0, _mm_extract_epi64::<0>(last).cast_unsigned());
        _mm_crc32_u64(crc, _mm_extract_epi64::<1>(last).cast_unsigned()) as u32
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn load(from: &[u8; STEP_BYTES]) -> [__m512i; 4] {
        // SAFETY: the 64 bytes from there lie inside the array; the load may be unaligned.
        [0, 1, 2, 3]
            .map(|register| unsafe { _mm512_loadu_si512(from.as_ptr().add(register * LINE_BYTES).cast()) })
    }

    /// Writes a step past the caches.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn store(to: &mut [u8; STEP_BYTES], bytes: [__m512i; 4]) {
        debug_assert!(to.as_ptr().cast::<__m512i>().is_aligned());
        for (register, bytes) in bytes.into_iter().enumerate() {
            // SAFETY: the 64 bytes from there lie inside the array, and it begins at a line of 64 bytes, as all steps
            // do that follow an aligned start without a gap.
            unsafe { _mm512_stream_si512(to.as_mut_ptr().add(register * LINE_BYTES).cast(), bytes) };
        }
    }

    /// Brings what was summed as many bits further as the constants say, and adds what lies there.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    #[inline]
    fn fold(sum: __m512i, over: __m512i, next: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(sum, over);
        let high = _mm512_clmulepi64_epi128::<0x11>(sum, over);
        // Exclusive or of all three.
        _mm512_ternarylogic_epi64::<0x96>(low, high, next)
    }

    /// What 64-bit halves of a lane are multiplied by to bring it so many bits further.
    #[target_feature(enable = "sse2")]
    #[inline]
    fn constants<const BITS: u32>() -> __m128i {
        _mm_set_epi64x(const { power(BITS - 32) }.cast_signed(), const { power(BITS + 32) }.cast_signed())
    }

    /// `x` to this power modulo the polynomial of CRC32C, reflected and one bit up, as products of reflected numbers are
    /// one bit down.
    const fn power(exponent: u32) -> u64 {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_sum_of_the_whole_wherever_it_begins_and_ends() {
        let from: Vec<u8> = (0..20_000_u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        let lengths = (0..700).chain([1023, 1024, 4096, 6143, 6144, 6145, 12_289, 19_900]);
        for bytes in lengths {
            for (place, source) in [(0, 0), (1, 0), (63, 7), (17, 64)] {
                let from = &from[source..source + bytes];
                assert_eq!(crc32c(from), crc32c::crc32c(from), "{bytes} bytes from {source}");
                let mut room = vec![0xee; place + bytes + 1];
                for copy in [copy_crc32c, in_pieces] {
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
    #[should_panic = "has the length of what is copied"]
    fn a_copy_of_another_length_is_refused() {
        copy_crc32c(&mut [0; 500], &[0; 600]);
    }
}
