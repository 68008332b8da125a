//! Side by side: both sides in each run, in alternating order, judged by the ratio of the run.
//!
//! Not here: clocks (`clock.rs`) and how an outcome is printed (`row.rs`).

/// Fewest runs that make a row: with five, the median shrugs off two runs that a neighbour disturbed.
pub const RUNS_MIN: usize = 5;

/// What the runs came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Median figure of our side.
    pub ours: f64,
    /// Median figure of the other side.
    pub theirs: f64,
    /// Median of the ratios ours over theirs, each of one run.
    pub ratio: f64,
    /// Least of those ratios.
    pub min: f64,
    /// Greatest of those ratios.
    pub max: f64,
    /// How many runs counted.
    pub runs: usize,
}

/// Measures both sides `runs` times (at least [`RUNS_MIN`]) after one run that does not count. Which side
/// goes first alternates, so that neither always finds the caches warm or the machine hot.
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

/// What pairs (ours, theirs), each of one run, come to.
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
    fn the_ratio_is_that_of_single_runs() {
        let pairs = [(1.0, 2.0), (9.0, 3.0), (4.0, 4.0), (10.0, 100.0), (6.0, 3.0)];
        let expected = Outcome { ours: 6.0, theirs: 3.0, ratio: 1.0, min: 0.1, max: 3.0, runs: 5 };
        assert_eq!(outcome(&pairs), expected);
    }

    #[test]
    fn an_even_number_of_runs_takes_the_mean_of_the_middle() {
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn sides_alternate_and_the_first_run_does_not_count() {
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
