//! Computes the CRC32C of bytes, and copies them on the way if they are to be somewhere else: they come from
//! memory once. Bytes that others may write meanwhile are loaded once each, so that the sum is that of the copy.
//!
//! With AVX-512 and VPCLMULQDQ the sum costs nothing beside the copy: 256 bytes at a time are loaded, folded and stored, what is
//! long as a whole past the caches (nobody reads a block soon after it came). Elsewhere short pieces are copied and summed while
//! they are in the first-level cache. Not here: which bytes belong to which checksum (`super`).

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

/// What is shorter as a whole stays in the caches: to wait until stores past them are done takes as long as some kilobytes do.
const PAST_CACHES_BYTES_MIN: usize = 16 << 10;

/// Copies that are made one after the other and used when all are: slices of one frame ([`copies`]).
#[derive(Debug)]
pub struct Copies {
    is_past_caches: bool,
    /// Stores past the caches are brought into order on the thread that made them.
    _of_one_thread: PhantomData<*const ()>,
}

/// Makes copies of `bytes` together, which may be short each. Where they are long as a whole they are stored past the caches, and
/// waited for once, behind the last.
pub fn copies<T>(bytes: usize, make: impl FnOnce(&Copies) -> T) -> T {
    /// Also when what makes them unwinds.
    struct Ordered;
    impl Drop for Ordered {
        fn drop(&mut self) {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // Others see these stores in their order only from here on.
            // SAFETY: every processor of this kind has the instruction.
            unsafe {
                std::arch::x86_64::_mm_sfence();
            }
        }
    }
    let is_past_caches = bytes >= PAST_CACHES_BYTES_MIN;
    let _ordered = is_past_caches.then_some(Ordered);
    make(&Copies { is_past_caches, _of_one_thread: PhantomData })
}

impl Copies {
    /// Copies `from` to `to`, which are of one length, and gives the CRC32C of the bytes.
    ///
    /// # Panics
    /// When the lengths differ, as `copy_from_slice` does.
    pub fn crc32c(&self, to: &mut [u8], from: &[u8]) -> u32 {
        assert_eq!(to.len(), from.len(), "a copy has the length of what is copied");
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: `from` may be read over the length of `to`, which is its own.
        if let Some(crc) = unsafe { wide::copy_crc32c(to, from.as_ptr(), self.is_past_caches) } {
            return crc;
        }
        in_pieces(to, |at, piece| piece.copy_from_slice(&from[at..at + piece.len()]))
    }

    /// Fills `to` with the bytes at `from`, which others may write meanwhile, and gives the CRC32C of what is in `to` now: each
    /// byte of `from` is loaded once, so that what was summed is what was copied. Which moment each byte is of, nobody
    /// knows.
    ///
    /// # Safety
    /// As many bytes as `to` has may be read at `from` until the call returns. Others that write them are another process,
    /// or threads of this one by atomic stores.
    pub unsafe fn crc32c_from(&self, to: &mut [u8], from: *const u8) -> u32 {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: the caller's word.
        if let Some(crc) = unsafe { wide::copy_crc32c(to, from, self.is_past_caches) } {
            return crc;
        }
        // SAFETY: the caller's word, of a part of it.
        in_pieces(to, |at, piece| unsafe { copy_from(piece, from.add(at)) })
    }
}

/// A copy that is used alone ([`Copies::crc32c`]).
///
/// # Panics
/// When the lengths differ, as `copy_from_slice` does.
pub fn copy_crc32c(to: &mut [u8], from: &[u8]) -> u32 {
    copies(to.len(), |copies| copies.crc32c(to, from))
}

/// The CRC32C of bytes that stay where they are.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = wide::crc32c(bytes) {
        return crc;
    }
    crc32c::crc32c(bytes)
}

/// The same on any machine: `copy` fills the piece of `to` that begins at a place, and what is there then is summed.
fn in_pieces(to: &mut [u8], copy: impl Fn(usize, &mut [u8])) -> u32 {
    /// Both ends of a piece stay in a first-level cache of 32 KiB, and a piece is long enough for the three streams
    /// in which it is summed.
    const PIECE_BYTES: usize = 6 << 10;
    let (mut crc, mut at) = (0, 0);
    for piece in to.chunks_mut(PIECE_BYTES) {
        copy(at, piece);
        crc = crc32c::crc32c_append(crc, piece);
        at += piece.len();
    }
    crc
}

/// The same without a sum, for what is short and looked at next: what is copied stays in the caches. The compiler neither
/// repeats nor splits these loads.
///
/// # Safety
/// As for [`Copies::crc32c_from`].
pub unsafe fn copy_from(to: &mut [u8], from: *const u8) {
    /// The longest load that every machine does at once.
    const WORD_BYTES: usize = 8;
    let head = from.align_offset(WORD_BYTES).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (to_words, to_tail) = to.as_chunks_mut::<WORD_BYTES>();
    let tail = head + to_words.len() * WORD_BYTES;
    // SAFETY: all places lie within the length of `to`. A load of an atomic is no data race with what else is atomic,
    // and other processes know of no rules. The words are aligned, since they begin behind the head.
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
mod wide {
    //! Folding as in Intel's paper (Gopal and others, 2009), with four registers of four 128-bit lanes each.
    //!
    //! What is copied is loaded by assembly, which the compiler executes as often as it stands there: what was stored and
    //! what was summed are one load, whoever else writes the source.

    use std::arch::asm;
    use std::arch::x86_64::*;

    /// A register, and the destination of a store past the caches.
    const LINE_BYTES: usize = 64;
    /// Lines that are summed side by side: one fold takes as long as four that do not wait for each other.
    const STEP_LINES: usize = 4;
    const STEP_BYTES: usize = STEP_LINES * LINE_BYTES;
    /// A shorter piece is in the caches also beside others that are not: it has more of lines that it shares with what is
    /// before and behind than of its own.
    const PIECE_BYTES_MIN: usize = 512;

    fn is_able() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("vpclmulqdq")
            && is_x86_feature_detected!("pclmulqdq")
            && is_x86_feature_detected!("sse4.2")
    }

    /// Copies and sums, where the processor can; if past the caches, the caller orders the stores.
    ///
    /// # Safety
    /// As for [`super::Copies::crc32c_from`].
    pub(super) unsafe fn copy_crc32c(to: &mut [u8], from: *const u8, is_past_caches: bool) -> Option<u32> {
        // SAFETY: the processor has every feature that the function is compiled for; the rest is the caller's word.
        is_able().then(|| unsafe { copy(to, from, is_past_caches && to.len() >= PIECE_BYTES_MIN) })
    }

    /// Sums, where the processor can.
    pub(super) fn crc32c(bytes: &[u8]) -> Option<u32> {
        // SAFETY: as above.
        is_able().then(|| unsafe { sum(bytes) })
    }

    /// # Safety
    /// As for [`super::Copies::crc32c_from`].
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    unsafe fn copy(to: &mut [u8], from: *const u8, is_past_caches: bool) -> u32 {
        // Stores past the caches are of whole lines.
        let head = if is_past_caches { to.as_ptr().align_offset(LINE_BYTES).min(to.len()) } else { 0 };
        let (to_head, to) = to.split_at_mut(head);
        let (to_steps, to) = to.as_chunks_mut::<STEP_BYTES>();
        let (to_lines, to_tail) = to.as_chunks_mut::<LINE_BYTES>();
        let lines_at = head + to_steps.len() * STEP_BYTES;
        let tail = lines_at + to_lines.len() * LINE_BYTES;
        // SAFETY: head, steps, lines and tail lie one behind the other in what the caller says may be read.
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
        let crc = folded(crc, step, line);
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
        !words(tail, folded(words(head, !0), step, line))
    }

    #[target_feature(enable = "sse4.2")]
    fn words(bytes: &[u8], crc: u32) -> u32 {
        let (words, rest) = bytes.as_chunks::<8>();
        let crc =
            words.iter().fold(u64::from(crc), |crc, word| _mm_crc32_u64(crc, u64::from_le_bytes(*word)));
        rest.iter().fold(crc as u32, |crc, byte| _mm_crc32_u8(crc, *byte))
    }

    /// Copies and sums what is shorter than a step.
    ///
    /// # Safety
    /// As for [`super::Copies::crc32c_from`].
    #[target_feature(enable = "sse4.2")]
    unsafe fn copy_words(to: &mut [u8], mut from: *const u8, crc: u32) -> u32 {
        let (words, rest) = to.as_chunks_mut::<8>();
        let mut wide_crc = u64::from(crc);
        for to in words {
            let word: u64;
            // SAFETY: eight bytes of what the caller says may be read; the place behind them is its end at most.
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
            // SAFETY: one byte of it, as above.
            unsafe {
                asm!("mov {byte}, byte ptr [{from}]", byte = out(reg_byte) *to, from = in(reg) from,
                    options(nostack, preserves_flags, readonly));
                from = from.add(1);
            }
            crc = _mm_crc32_u8(crc, *to);
        }
        crc
    }

    /// The sum of whole steps, whose lines are summed side by side, and of the lines behind them.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
    #[inline]
    fn folded(
        crc: u32,
        mut step: impl FnMut() -> Option<[__m512i; STEP_LINES]>,
        mut line: impl FnMut() -> Option<__m512i>,
    ) -> u32 {
        let start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(crc.cast_signed()));
        let over_line = _mm512_broadcast_i32x4(constants::<512>());
        let mut sum = if let Some(mut sums) = step() {
            sums[0] = _mm512_xor_si512(sums[0], start);
            let over_step = _mm512_broadcast_i32x4(constants::<2048>());
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

    /// So many lines behind each other, each loaded once: all of them wait for memory together.
    ///
    /// # Safety
    /// They may be read at `from`, whoever writes them meanwhile.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_once<const LINES: usize>(from: *const u8) -> [__m512i; LINES] {
        let mut lines = [_mm512_setzero_si512(); LINES];
        for (at, line) in lines.iter_mut().enumerate() {
            // SAFETY: 64 bytes from there may be read; the load may be unaligned, and nothing else is touched.
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
        // SAFETY: the 64 bytes from there lie inside the array; the load may be unaligned.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    /// Writes a line; past the caches only where it is one of the destination too.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn store(to: &mut [u8; LINE_BYTES], line: __m512i, is_past_caches: bool) {
        let to = to.as_mut_ptr().cast::<__m512i>();
        debug_assert!(!is_past_caches || to.is_aligned());
        // SAFETY: the 64 bytes from there lie inside the array. A plain store may be unaligned; one past the caches is
        // made only behind a head that ends where a line begins, and without a gap.
        unsafe { if is_past_caches { _mm512_stream_si512(to, line) } else { _mm512_storeu_si512(to, line) } }
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

/// The copy of what lies `at` bytes into memory that other threads write by atomic stores, for tests without unsafe code.
#[cfg(test)]
pub(super) fn copy_crc32c_shared(to: &mut [u8], from: &[AtomicU64], at: usize, copies: &Copies) -> u32 {
    assert!(at + to.len() <= size_of_val(from));
    // SAFETY: within the words, which have no other stores than atomic ones.
    unsafe { copies.crc32c_from(to, from.as_ptr().cast::<u8>().add(at)) }
}

/// As above, without a sum.
#[cfg(test)]
pub(super) fn copy_shared(to: &mut [u8], from: &[AtomicU64], at: usize) {
    assert!(at + to.len() <= size_of_val(from));
    // SAFETY: as above.
    unsafe { copy_from(to, from.as_ptr().cast::<u8>().add(at)) };
}

/// Ends the writer of a test when it goes, also with a panic: the scope waits for the writer.
#[cfg(test)]
pub(super) struct Ends<'flag>(pub(super) &'flag std::sync::atomic::AtomicBool);

#[cfg(test)]
impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// What is short each, as one of a frame of many slices.
    fn among_others(to: &mut [u8], from: &[u8]) -> u32 {
        copies(PAST_CACHES_BYTES_MIN, |copies| copies.crc32c(to, from))
    }

    /// The ways to copy that a machine has not got by itself.
    fn plain_pieces(to: &mut [u8], from: &[u8]) -> u32 {
        in_pieces(to, |at, piece| piece.copy_from_slice(&from[at..at + piece.len()]))
    }

    fn pieces_each_once(to: &mut [u8], from: &[u8]) -> u32 {
        assert_eq!(to.len(), from.len());
        // SAFETY: of that length.
        in_pieces(to, |at, piece| unsafe { copy_from(piece, from.as_ptr().add(at)) })
    }

    #[test]
    fn a_copy_has_the_sum_of_the_whole_wherever_it_begins_and_ends() {
        let from: Vec<u8> = (0..20_000_u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        let lengths = (0..700).chain([1023, 1024, 4096, 6143, 6144, 6145, 12_289, 16_383, 16_384, 19_900]);
        for bytes in lengths {
            for (place, source) in [(0, 0), (1, 0), (63, 7), (17, 64)] {
                let from = &from[source..source + bytes];
                assert_eq!(crc32c(from), crc32c::crc32c(from), "{bytes} bytes from {source}");
                let mut room = vec![0xee; place + bytes + 1];
                for copy in [copy_crc32c, among_others, plain_pieces, pieces_each_once] {
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

    /// Copies what begins at a place of the shared words.
    type Way = fn(&mut [u8], &[AtomicU64], usize) -> u32;

    /// What another process does in its tray: the source changes all the time, and the sum is still that of the copy.
    #[test]
    #[cfg(not(miri))]
    fn a_copy_has_its_own_sum_whatever_writes_the_source() {
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
        let read_once: Way = |to, from, at| {
            let from = from.as_ptr().cast::<u8>();
            // SAFETY: within the words, as the caller sees to.
            in_pieces(to, |piece_at, piece| unsafe { copy_from(piece, from.add(at + piece_at)) })
        };
        let shared: Way = |to, from, at| copies(to.len(), |copies| copy_crc32c_shared(to, from, at, copies));
        let among_others: Way =
            |to, from, at| copies(PAST_CACHES_BYTES_MIN, |copies| copy_crc32c_shared(to, from, at, copies));
        let mut room = vec![0; 8192 + 64];
        // Copies of more than one moment, each way: without any the writer met no copy, and nothing is shown.
        let mut torn = [0; 3];
        std::thread::scope(|scope| {
            scope.spawn(write);
            let _ends = Ends(&is_over);
            for round in 0..ROUNDS_MAX {
                if round >= ROUNDS_MIN && torn.iter().all(|torn| *torn > 0) {
                    break;
                }
                // Heads and tails of all lengths, most copies short enough to be nothing else.
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
