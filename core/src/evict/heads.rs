//! The coldest block of every category side by side, and which of them is worth least.
//!
//! A victim costs one look at each category, so what is looked at lies in plain rows of numbers: no block and
//! no curve is read. Where worth is a straight line over time (in logarithms) it is a subtraction and a product for each
//! category, which the compiler does for several at a time. Not here: the queues behind the heads
//! ([`super::workload`]) and the curves themselves ([`super::reuse_prob`]).

use super::reuse_prob::{Form, ReuseCurve};
use crate::id::{RequestKind, Timestamp};
use std::cmp::Ordering;

/// Turns with a curve of their own; later ones share the last. Turn 5 is the P90 of trace A, and the chance
/// of a next turn is level after the first.
pub const TURNS_DISTINCT_MAX: usize = 8;
/// Categories with a queue of their own.
pub(super) const CATEGORIES: usize = RequestKind::ALL.len() * TURNS_DISTINCT_MAX;
/// Minima kept at a time: as many as fit in the registers that hold several numbers.
const LANES: usize = 8;

/// What a victim is chosen by, of one block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offer {
    pub(super) worth: f64,
    pub(super) offset_blocks: u32,
    pub(super) last_use: f64,
    pub(super) category: usize,
}

impl Offer {
    /// Whether `self` leaves before `other`. Ties beyond the paper's order go to the longer unused block,
    /// then to the lower category, so that equal histories give equal victims.
    pub(super) fn leaves_before(&self, other: &Offer) -> bool {
        let order = self.worth.total_cmp(&other.worth);
        let order = order.then(other.offset_blocks.cmp(&self.offset_blocks));
        let order = order.then(self.last_use.total_cmp(&other.last_use));
        order.then(self.category.cmp(&other.category)) == Ordering::Less
    }
}

/// Row by row: the head of every category.
#[derive(Debug)]
pub(super) struct Heads {
    form: Form,
    /// Microseconds, exact below 2^53 (285 years); infinite where a category has no block, which makes it worth
    /// more than everything.
    last_use: [f64; CATEGORIES],
    offset_blocks: [u32; CATEGORIES],
    start: [f64; CATEGORIES],
    rate: [f64; CATEGORIES],
    /// Curves, for the forms that are no straight line; empty for the others.
    curves: Vec<ReuseCurve>,
}

/// A time as the rows hold it.
pub(super) fn micros(at: Timestamp) -> f64 {
    at.0 as f64
}

impl Heads {
    /// No category has a block.
    pub(super) fn new(form: Form) -> Self {
        Heads {
            form,
            last_use: [f64::INFINITY; CATEGORIES],
            offset_blocks: [0; CATEGORIES],
            start: [0.0; CATEGORIES],
            rate: [1.0; CATEGORIES],
            curves: Vec::new(),
        }
    }

    /// These are the curves from now on, in the order of the categories.
    pub(super) fn renew_curves<'a>(&mut self, curves: impl Iterator<Item = &'a ReuseCurve> + Clone) {
        let lines = curves.clone().map(|curve| curve.linear(self.form));
        for ((start, rate), line) in self.start.iter_mut().zip(&mut self.rate).zip(lines) {
            (*start, *rate) = line.unwrap_or((0.0, 1.0));
        }
        let is_line = matches!(self.form, Form::Window | Form::Share);
        self.curves = if is_line { Vec::new() } else { curves.copied().collect() };
    }

    /// This block is the coldest of its category.
    pub(super) fn set(&mut self, category: usize, last_use: Timestamp, offset_blocks: u32) {
        self.last_use[category] = micros(last_use);
        self.offset_blocks[category] = offset_blocks;
    }

    /// The category has no block that could leave.
    pub(super) fn clear(&mut self, category: usize) {
        self.last_use[category] = f64::INFINITY;
    }

    /// What each head is worth at `now`; infinite where there is none.
    pub(super) fn worths(&self, now: f64) -> [f64; CATEGORIES] {
        let mut worths = [f64::INFINITY; CATEGORIES];
        let rows = self.last_use.iter().zip(&self.start).zip(&self.rate);
        for (worth, ((last_use, start), rate)) in worths.iter_mut().zip(rows) {
            *worth = start - (now - last_use) * rate;
        }
        for ((worth, last_use), curve) in worths.iter_mut().zip(&self.last_use).zip(&self.curves) {
            if *worth < f64::INFINITY {
                *worth = curve.worth(self.form, now - last_use);
            }
        }
        worths
    }

    /// What a block of the category would be worth at `now`.
    pub(super) fn offer(&self, category: usize, last_use: Timestamp, offset_blocks: u32, now: f64) -> Offer {
        let (last_use, line) =
            (micros(last_use), self.start[category] - (now - micros(last_use)) * self.rate[category]);
        let worth = self.curves.get(category).map_or(line, |curve| curve.worth(self.form, now - last_use));
        Offer { worth, offset_blocks, last_use, category }
    }

    /// The head that leaves first of those with a finite worth.
    pub(super) fn lowest(&self, worths: &[f64; CATEGORIES]) -> Option<Offer> {
        let mut lanes = [f64::INFINITY; LANES];
        for row in worths.chunks_exact(LANES) {
            for (lane, &worth) in lanes.iter_mut().zip(row) {
                *lane = if worth < *lane { worth } else { *lane };
            }
        }
        let least =
            lanes.into_iter().fold(f64::INFINITY, |least, lane| if lane < least { lane } else { least });
        if least == f64::INFINITY {
            return None;
        }
        let mut lowest: Option<Offer> = None;
        for (category, &worth) in worths.iter().enumerate() {
            if worth == least {
                let (offset_blocks, last_use) = (self.offset_blocks[category], self.last_use[category]);
                let offer = Offer { worth, offset_blocks, last_use, category };
                if lowest.as_ref().is_none_or(|lowest| offer.leaves_before(lowest)) {
                    lowest = Some(offer);
                }
            }
        }
        lowest
    }
}

/// Rows are looked at [`LANES`] at a time, and none may be left over.
const _: () = assert!(CATEGORIES.is_multiple_of(LANES));

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::math::exponential::Exponential;

    fn heads(form: Form) -> Heads {
        let curve = |at: usize| ReuseCurve::new(Exponential::with_mean(1e6 * (at + 1) as f64).unwrap(), 5e6);
        let curves: Vec<ReuseCurve> = (0..CATEGORIES).map(curve).collect();
        let mut heads = Heads::new(form);
        heads.renew_curves(curves.iter());
        heads
    }

    #[test]
    fn nothing_is_lowest_of_no_heads() {
        for form in [Form::Window, Form::Share, Form::Posterior, Form::Aged] {
            let mut heads = heads(form);
            assert_eq!(heads.lowest(&heads.worths(1e9)), None);
            heads.set(3, Timestamp(5), 7);
            assert_eq!(heads.lowest(&heads.worths(1e9)).map(|offer| offer.category), Some(3));
            heads.clear(3);
            assert_eq!(heads.lowest(&heads.worths(1e9)), None);
        }
    }

    #[test]
    fn the_row_says_the_same_as_one_block_asked_alone() {
        for form in [Form::Window, Form::Share, Form::Posterior, Form::Aged] {
            let mut heads = heads(form);
            for category in 0..CATEGORIES {
                heads.set(category, Timestamp(category as u64 * 1000), 2);
            }
            let worths = heads.worths(9e6);
            let alone: Vec<Offer> = (0..CATEGORIES)
                .map(|category| heads.offer(category, Timestamp(category as u64 * 1000), 2, 9e6))
                .collect();
            assert!(alone.iter().map(|offer| offer.worth).eq(worths), "{form:?}");
            let first =
                alone.iter().reduce(|least, offer| if offer.leaves_before(least) { offer } else { least });
            assert_eq!(heads.lowest(&worths), first.copied(), "{form:?}");
        }
    }

    #[test]
    fn of_equal_worths_the_deepest_leaves_then_the_lower_category() {
        let mut heads = Heads::new(Form::Window);
        for (category, offset) in [(1, 4), (9, 6), (20, 6), (55, 2)] {
            heads.set(category, Timestamp(10), offset);
        }
        assert_eq!(heads.lowest(&heads.worths(20.0)).map(|offer| offer.category), Some(9));
    }
}
