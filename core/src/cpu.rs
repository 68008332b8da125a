//! Two CPU instructions without a counterpart in the language: a prefetch, and a comparison of
//! sixteen bytes at once.
//!
//! The index is larger than any cache, and an index change spends most of its time on memory
//! latency. A plain load stalls once the out-of-order window is full; a prefetch waits at most for
//! its page to be found. Not here: larger vector code (`prefix/x86.rs`). This file and that one
//! hold all `unsafe` code of the crate (docs/adr/0018).

/// Starts to load the cache line at the start of `place`. A hint without any visible effect.
#[inline(always)]
#[allow(unsafe_code)]
pub fn prefetch<T>(place: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch neither reads nor writes anything that the program can see, and it never
    // faults. The address is also that of a live reference.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast());
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = place;
}

/// Same as [`prefetch`], for a value that may begin in one cache line and end in the next.
#[inline(always)]
#[allow(unsafe_code)]
pub(crate) fn prefetch_whole<T>(place: &T) {
    const { assert!(size_of::<T>() <= 64) };
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as above; the last byte also belongs to the live reference.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let first = std::ptr::from_ref(place).cast::<i8>();
        _mm_prefetch::<_MM_HINT_T0>(first);
        _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(size_of::<T>().saturating_sub(1)));
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = place;
}

/// A mask with one bit set for each byte of `bytes` that equals `byte`.
#[inline(always)]
#[allow(unsafe_code)]
pub(crate) fn equal_bytes(bytes: [u8; 16], byte: u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of every x86-64; the operands are values, no memory is touched.
    unsafe {
        use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set_epi64x, _mm_set1_epi8};
        let whole = u128::from_le_bytes(bytes);
        let bytes = _mm_set_epi64x((whole >> 64) as i64, whole as i64);
        _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8))) as u32
    }
    #[cfg(not(target_arch = "x86_64"))]
    bytes.iter().enumerate().fold(0, |found, (place, own)| found | u32::from(*own == byte) << place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_equal_bytes_at_any_position() {
        assert_eq!(equal_bytes([7; 16], 7), 0xFFFF);
        assert_eq!(equal_bytes([7; 16], 8), 0);
        for place in 0..16 {
            let mut bytes = [0x80; 16];
            bytes[place] = 0xFF;
            assert_eq!(equal_bytes(bytes, 0xFF), 1 << place);
            assert_eq!(equal_bytes(bytes, 0x80), 0xFFFF & !(1 << place));
        }
    }
}
