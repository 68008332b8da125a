//! Side by side: both sides in each run, in alternating order, judged by the run's ratio.
//!
//! Not here: clocks (`clock.rs`) and the output of an outcome (`row.rs`).

/// Minimum number of runs per row: with five, the median tolerates two disturbed runs.
pub const RUNS_MIN: usize = 5;

/// Summary of all runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Median figure of our side.
    pub ours: f64,
    /// Median figure of the other side.
    pub theirs: f64,
    /// Median of the per-run ratios of ours over theirs.
    pub ratio: f64,
    /// Smallest of those ratios.
    pub min: f64,
    /// Largest of those ratios.
    pub max: f64,
    /// Number of counted runs.
    pub runs: usize,
}

/// Measures both sides `runs` times (at least [`RUNS_MIN`]) after a warm-up run. The starting side
/// alternates, so that neither always finds warm caches or a hot machine.
pub fn side_by_side(runs: usize, mut ours: impl FnMut() -> f64, mut theirs: impl FnMut() -> f64) -> Outcome {
    ours();
    theirs();
    let mut pairs = Vec::new();
    for run in 0..runs.max(RUNS_MIN) {
        let pair = if run % 2 == 0 {
            let first = ours();
            (first, theirs())
        } else {
            let first = theirs();
            (ours(), first)
        };
        pairs.push(pair);
    }
    outcome(&pairs)
}

/// Summarizes pairs (ours, theirs), one per run.
#[must_use]
pub fn outcome(pairs: &[(f64, f64)]) -> Outcome {
    let ratios = sorted(pairs.iter().map(|(ours, theirs)| ours / theirs));
    Outcome {
        ours: median(&sorted(pairs.iter().map(|pair| pair.0))),
        theirs: median(&sorted(pairs.iter().map(|pair| pair.1))),
        ratio: median(&ratios),
        min: ratios.first().copied().unwrap_or(f64::NAN),
        max: ratios.last().copied().unwrap_or(f64::NAN),
        runs: pairs.len(),
    }
}

/// The figures in ascending order.
pub fn sorted(figures: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut figures: Vec<_> = figures.collect();
    figures.sort_unstable_by(f64::total_cmp);
    figures
}

/// The middle of figures in ascending order, or the mean of the two middle ones.
#[must_use]
pub fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn ratio_is_per_run() {
        let pairs = [(1.0, 2.0), (9.0, 3.0), (4.0, 4.0), (10.0, 100.0), (6.0, 3.0)];
        let expected = Outcome { ours: 6.0, theirs: 3.0, ratio: 1.0, min: 0.1, max: 3.0, runs: 5 };
        assert_eq!(outcome(&pairs), expected);
    }

    #[test]
    fn median_averages_the_middle_pair() {
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn alternates_sides_after_a_warm_up() {
        let order = RefCell::new(String::new());
        let figures = RefCell::new([100.0, 3.0, 3.0, 3.0, 3.0, 3.0].into_iter());
        let ours = || {
            order.borrow_mut().push('o');
            figures.borrow_mut().next().unwrap_or(f64::NAN)
        };
        let theirs = || {
            order.borrow_mut().push('t');
            1.5
        };
        let outcome = side_by_side(1, ours, theirs);
        assert_eq!(*order.borrow(), "otottoottoot");
        assert_eq!(outcome, Outcome { ours: 3.0, theirs: 1.5, ratio: 2.0, min: 2.0, max: 2.0, runs: 5 });
    }
}
