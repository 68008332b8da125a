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
/// Rows compared at a time.
const LANES: usize = 8;
/// Row of a category without a block.
const NO_ROW: usize = usize::MAX;

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

/// Row by row: the head of every category that has one.
#[derive(Debug)]
pub(super) struct Heads {
    form: Form,
    /// Microseconds, exact below 2^53 (285 years); infinite behind the last row, which makes what is not there
    /// worth more than everything.
    last_use: [f64; CATEGORIES],
    start: [f64; CATEGORIES],
    rate: [f64; CATEGORIES],
    offset_blocks: [u32; CATEGORIES],
    category: [usize; CATEGORIES],
    rows: usize,
    /// Row of each category, [`NO_ROW`] where there is none.
    row_of: [usize; CATEGORIES],
    /// Start and rate of each category.
    lines: [(f64, f64); CATEGORIES],
    /// Curves of each category, for the forms that are no straight line; empty for the others.
    curves: Vec<ReuseCurve>,
}

/// A time as the rows hold it.
pub(super) fn micros(at: Timestamp) -> f64 {
    at.0 as f64
}

/// The lesser of two numbers that are none of them NaN, in one instruction.
fn lesser(left: f64, right: f64) -> f64 {
    if left < right { left } else { right }
}

impl Heads {
    /// No category has a block.
    pub(super) fn new(form: Form) -> Self {
        Heads {
            form,
            last_use: [f64::INFINITY; CATEGORIES],
            start: [0.0; CATEGORIES],
            rate: [1.0; CATEGORIES],
            offset_blocks: [0; CATEGORIES],
            category: [0; CATEGORIES],
            rows: 0,
            row_of: [NO_ROW; CATEGORIES],
            lines: [(0.0, 1.0); CATEGORIES],
            curves: Vec::new(),
        }
    }

    /// These are the curves from now on, in the order of the categories.
    pub(super) fn renew_curves<'a>(&mut self, curves: impl Iterator<Item = &'a ReuseCurve> + Clone) {
        for (line, curve) in self.lines.iter_mut().zip(curves.clone()) {
            *line = curve.linear(self.form).unwrap_or((0.0, 1.0));
        }
        for row in 0..self.rows {
            (self.start[row], self.rate[row]) = self.lines[self.category[row]];
        }
        let is_line = matches!(self.form, Form::Window | Form::Share);
        self.curves = if is_line { Vec::new() } else { curves.copied().collect() };
    }

    /// This block is the coldest of its category.
    pub(super) fn set(&mut self, category: usize, last_use: Timestamp, offset_blocks: u32) {
        let mut row = self.row_of[category];
        if row == NO_ROW {
            row = self.rows;
            self.rows += 1;
            self.row_of[category] = row;
            self.category[row] = category;
            (self.start[row], self.rate[row]) = self.lines[category];
        }
        self.last_use[row] = micros(last_use);
        self.offset_blocks[row] = offset_blocks;
    }

    /// The category has no block that could leave: the last row takes the place of its own.
    pub(super) fn clear(&mut self, category: usize) {
        let row = std::mem::replace(&mut self.row_of[category], NO_ROW);
        if row == NO_ROW {
            return;
        }
        self.rows -= 1;
        let last = self.rows;
        if row != last {
            self.last_use[row] = self.last_use[last];
            (self.start[row], self.rate[row]) = (self.start[last], self.rate[last]);
            self.offset_blocks[row] = self.offset_blocks[last];
            self.category[row] = self.category[last];
            self.row_of[self.category[row]] = row;
        }
        self.last_use[last] = f64::INFINITY;
    }

    /// Fills in what each head is worth at `now`, in the order of the rows, up to a whole number of [`LANES`];
    /// infinite where there is none.
    pub(super) fn worths<'w>(&self, now: f64, worths: &'w mut [f64; CATEGORIES]) -> &'w mut [f64] {
        let filled = self.rows.next_multiple_of(LANES).min(CATEGORIES);
        let worths = &mut worths[..filled];
        let rows = self.last_use[..filled].iter().zip(&self.start[..filled]).zip(&self.rate[..filled]);
        for (worth, ((last_use, start), rate)) in worths.iter_mut().zip(rows) {
            *worth = start - (now - last_use) * rate;
        }
        if !self.curves.is_empty() {
            let rows = self.last_use[..self.rows].iter().zip(&self.category);
            for (worth, (last_use, &category)) in worths.iter_mut().zip(rows) {
                *worth = self.curves[category].worth(self.form, now - last_use);
            }
        }
        worths
    }

    /// Takes the head of a category out of what [`Self::worths`] gave.
    pub(super) fn pass_over(&self, category: usize, worths: &mut [f64]) {
        if let Some(worth) = worths.get_mut(self.row_of[category]) {
            *worth = f64::INFINITY;
        }
    }

    /// What a block of the category would be worth at `now`.
    pub(super) fn offer(&self, category: usize, last_use: Timestamp, offset_blocks: u32, now: f64) -> Offer {
        let last_use = micros(last_use);
        let (start, rate) = self.lines[category];
        let line = start - (now - last_use) * rate;
        let worth = self.curves.get(category).map_or(line, |curve| curve.worth(self.form, now - last_use));
        Offer { worth, offset_blocks, last_use, category }
    }

    /// The head that leaves first of those with a finite worth.
    pub(super) fn lowest(&self, worths: &[f64]) -> Option<Offer> {
        let mut least_of = [f64::INFINITY; CATEGORIES / LANES];
        let mut least = f64::INFINITY;
        for (of_row, row) in least_of.iter_mut().zip(worths.chunks_exact(LANES)) {
            let [a, b, c, d, e, f, g, h] = *row else { continue };
            let (a, b, c, d) = (lesser(a, e), lesser(b, f), lesser(c, g), lesser(d, h));
            *of_row = lesser(lesser(a, c), lesser(b, d));
            least = lesser(*of_row, least);
        }
        if least == f64::INFINITY {
            return None;
        }
        let mut lowest: Option<Offer> = None;
        let rows = least_of.iter().enumerate().filter(|(_, of_row)| **of_row == least);
        let rows = rows.flat_map(|(number, _)| number * LANES..(number + 1) * LANES);
        for row in rows.filter(|&row| worths[row] == least) {
            let (offset_blocks, last_use) = (self.offset_blocks[row], self.last_use[row]);
            let offer = Offer { worth: least, offset_blocks, last_use, category: self.category[row] };
            if lowest.as_ref().is_none_or(|lowest| offer.leaves_before(lowest)) {
                lowest = Some(offer);
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

    fn lowest(heads: &Heads, now: f64) -> Option<Offer> {
        let mut worths = [0.0; CATEGORIES];
        heads.lowest(heads.worths(now, &mut worths))
    }

    #[test]
    fn nothing_is_lowest_of_no_heads() {
        for form in [Form::Window, Form::Share, Form::Posterior, Form::Aged] {
            let mut heads = heads(form);
            assert_eq!(lowest(&heads, 1e9), None);
            heads.set(3, Timestamp(5), 7);
            assert_eq!(lowest(&heads, 1e9).map(|offer| offer.category), Some(3));
            heads.clear(3);
            assert_eq!(lowest(&heads, 1e9), None);
        }
    }

    #[test]
    fn the_row_says_the_same_as_one_block_asked_alone() {
        for form in [Form::Window, Form::Share, Form::Posterior, Form::Aged] {
            let mut heads = heads(form);
            for category in 0..CATEGORIES {
                heads.set(category, Timestamp(category as u64 * 1000), 2);
            }
            let mut worths = [0.0; CATEGORIES];
            let worths: Vec<f64> = heads.worths(9e6, &mut worths).to_vec();
            let alone: Vec<Offer> = (0..CATEGORIES)
                .map(|category| heads.offer(category, Timestamp(category as u64 * 1000), 2, 9e6))
                .collect();
            assert!(alone.iter().map(|offer| offer.worth).eq(worths.iter().copied()), "{form:?}");
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
        assert_eq!(lowest(&heads, 20.0).map(|offer| offer.category), Some(9));
    }

    #[test]
    fn categories_come_and_go_in_any_order() {
        let mut heads = heads(Form::Window);
        let mut present = std::collections::BTreeMap::new();
        for step in 0_u64..2000 {
            let category = (step * 37 % 56) as usize;
            if step % 3 == 0 {
                heads.clear(category);
                present.remove(&category);
            } else {
                heads.set(category, Timestamp(step * 1000), step as u32);
                present.insert(category, (Timestamp(step * 1000), step as u32));
            }
            let offers =
                present.iter().map(|(&at, &(last_use, offset))| heads.offer(at, last_use, offset, 9e6));
            let first = offers.reduce(|least, offer| if offer.leaves_before(&least) { offer } else { least });
            assert_eq!(lowest(&heads, 9e6), first, "step {step}");
        }
    }
}
