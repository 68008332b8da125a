//! A comparison of sixteen bytes at once.
//!
//! Not here: copies and checksums of bytes (`copy/`).

/// A mask with one bit set for each byte of `bytes` that equals `byte`.
#[inline(always)]
#[must_use]
#[allow(unsafe_code)]
pub fn equal_bytes(bytes: [u8; 16], byte: u8) -> u32 {
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
