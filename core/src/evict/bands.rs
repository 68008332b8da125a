//! Age bands on a logarithmic scale: four bands an octave from 16 ms to hours.
//!
//! Not here: the counts per band ([`super::density`], [`super::reuse_stats`]).

/// Number of bands. The last is open: 4.5 hours and more.
pub(crate) const BANDS: usize = 82;
/// Ages below 2^14 µs are one band.
const FIRST_BITS: u32 = 14;

/// The band of an age.
pub(crate) fn band(age_us: u64) -> usize {
    // Younger ages map to the end of the first band, without a branch.
    let age_us = age_us.max((1 << FIRST_BITS) - 1);
    let octave = 63 - age_us.leading_zeros();
    let quarter = (age_us >> (octave - 2)) & 3;
    (octave as usize * 4 + quarter as usize + 1 - FIRST_BITS as usize * 4).min(BANDS - 1)
}

/// Lower bound of a band in microseconds; `u64::MAX` for `BANDS`.
pub(crate) fn start_us(band: usize) -> u64 {
    match band {
        0 => 0,
        1..BANDS => (4 + (band as u64 - 1) % 4) << (FIRST_BITS as usize + (band - 1) / 4 - 2),
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_band_begins_where_the_one_before_ends() {
        for at in 1..BANDS {
            assert_eq!(band(start_us(at)), at);
            assert_eq!(band(start_us(at) - 1), at - 1);
        }
        assert_eq!(band(u64::MAX), BANDS - 1);
        assert_eq!(start_us(BANDS - 1), 1 << 34);
    }
}
