//! Numbers only: fits, searches and rounding without knowledge of blocks, time or nodes.

pub mod exponential;

/// The nearest integer, halves up: `value.round() as u64` without the library call that baseline
/// x86-64 needs for `round`. Negative values and NaN give 0.
#[must_use]
pub fn round_to_u64(value: f64) -> u64 {
    // A cast truncates and saturates.
    let whole = value as u64;
    whole.saturating_add(u64::from(value - whole as f64 >= 0.5))
}

#[cfg(test)]
mod tests {
    use super::round_to_u64;

    #[test]
    fn matches_f64_round() {
        let most = u64::MAX as f64;
        let edges = [0.0, -0.0, 0.5, -0.5, -3.7, 0.499_999_999_999_999_94, 1.5, 2.5, f64::NAN, f64::INFINITY];
        let large = [
            f64::NEG_INFINITY,
            f64::MIN_POSITIVE,
            f64::MAX,
            most,
            most / 2.0,
            2f64.powi(52) + 0.5,
            2f64.powi(53),
        ];
        let around = (0..2_000).map(|at| f64::from(at) / 7.0 + 2f64.powi(at % 60));
        for value in edges.into_iter().chain(large).chain(around) {
            assert_eq!(round_to_u64(value), value.round() as u64, "{value:?}");
        }
    }
}
