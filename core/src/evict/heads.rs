//! The coldest block of every category, and the choice of the least worth among them.
//!
//! A victim search reads every category once, so the data lies in plain rows of numbers: no block
//! and no curve is read. If worth is linear over time (in logarithms) it costs a subtraction and a
//! product per category, which the compiler vectorises. Not here: the queues ([`super::workload`])
//! and the curves ([`super::reuse_prob`]).

use super::reuse_prob::{ReuseCurve, WorthModel};
use crate::id::{RequestKind, Timestamp};
use std::cmp::Ordering;

/// Turns with their own curve; later ones share the last. Turn 5 is the P90 of trace A, and the
/// probability of a next turn is constant after the first.
pub const TURNS_DISTINCT_MAX: usize = 8;
/// Categories with their own queue.
pub(super) const CATEGORIES: usize = RequestKind::ALL.len() * TURNS_DISTINCT_MAX;
/// Rows compared at a time.
const LANES: usize = 8;
/// Marks a category without a row.
const NO_ROW: usize = usize::MAX;

/// Sort key of a victim candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct VictimCandidate {
    pub(super) worth: f64,
    pub(super) offset_blocks: u32,
    pub(super) last_use: f64,
    pub(super) category: usize,
}

impl VictimCandidate {
    /// Whether `self` leaves before `other`. Ties beyond the paper's order go to the longer unused
    /// block, then to the lower category, so that equal histories give equal victims.
    pub(super) fn leaves_before(&self, other: &VictimCandidate) -> bool {
        let order = self.worth.total_cmp(&other.worth);
        let order = order.then(other.offset_blocks.cmp(&self.offset_blocks));
        let order = order.then(self.last_use.total_cmp(&other.last_use));
        order.then(self.category.cmp(&other.category)) == Ordering::Less
    }
}

/// The head of every category that has one, in rows.
#[derive(Debug)]
pub(super) struct CategoryHeads {
    form: WorthModel,
    /// Microseconds, exact below 2^53 (285 years). Infinite after the last row, so that an absent
    /// head is worth more than all others.
    last_use: [f64; CATEGORIES],
    line_start: [f64; CATEGORIES],
    line_rate: [f64; CATEGORIES],
    offset_blocks: [u32; CATEGORIES],
    category: [usize; CATEGORIES],
    rows: usize,
    /// Row of each category, or [`NO_ROW`].
    row_of: [usize; CATEGORIES],
    /// Start and slope of each category.
    lines: [(f64, f64); CATEGORIES],
    /// Curve of each category, for non-linear models; empty for the others.
    curves: Vec<ReuseCurve>,
}

/// A time in the unit of the rows.
pub(super) fn micros(at: Timestamp) -> f64 {
    at.0 as f64
}

/// The lesser of two numbers without NaN, in one instruction.
fn lesser(left: f64, right: f64) -> f64 {
    if left < right { left } else { right }
}

impl CategoryHeads {
    /// No heads yet.
    pub(super) fn new(form: WorthModel) -> Self {
        CategoryHeads {
            form,
            last_use: [f64::INFINITY; CATEGORIES],
            line_start: [0.0; CATEGORIES],
            line_rate: [1.0; CATEGORIES],
            offset_blocks: [0; CATEGORIES],
            category: [0; CATEGORIES],
            rows: 0,
            row_of: [NO_ROW; CATEGORIES],
            lines: [(0.0, 1.0); CATEGORIES],
            curves: Vec::new(),
        }
    }

    /// Replaces the curves, in the order of the categories.
    pub(super) fn set_curves<'a>(&mut self, curves: impl Iterator<Item = &'a ReuseCurve> + Clone) {
        for (line, curve) in self.lines.iter_mut().zip(curves.clone()) {
            *line = curve.as_line(self.form).unwrap_or((0.0, 1.0));
        }
        for row in 0..self.rows {
            (self.line_start[row], self.line_rate[row]) = self.lines[self.category[row]];
        }
        let is_line = matches!(self.form, WorthModel::Window | WorthModel::Share);
        self.curves = if is_line { Vec::new() } else { curves.copied().collect() };
    }

    /// Sets the coldest block of a category.
    pub(super) fn set(&mut self, category: usize, last_use: Timestamp, offset_blocks: u32) {
        let mut row = self.row_of[category];
        if row == NO_ROW {
            row = self.rows;
            self.rows += 1;
            self.row_of[category] = row;
            self.category[row] = category;
            (self.line_start[row], self.line_rate[row]) = self.lines[category];
        }
        self.last_use[row] = micros(last_use);
        self.offset_blocks[row] = offset_blocks;
    }

    /// Removes the head of a category; the last row moves into its place.
    pub(super) fn clear(&mut self, category: usize) {
        let row = std::mem::replace(&mut self.row_of[category], NO_ROW);
        if row == NO_ROW {
            return;
        }
        self.rows -= 1;
        let last = self.rows;
        if row != last {
            self.last_use[row] = self.last_use[last];
            (self.line_start[row], self.line_rate[row]) = (self.line_start[last], self.line_rate[last]);
            self.offset_blocks[row] = self.offset_blocks[last];
            self.category[row] = self.category[last];
            self.row_of[self.category[row]] = row;
        }
        self.last_use[last] = f64::INFINITY;
    }

    /// Writes the worth of each head at `now`, in row order, padded to a multiple of [`LANES`] with
    /// infinity.
    pub(super) fn worths<'w>(&self, now: f64, worths: &'w mut [f64; CATEGORIES]) -> &'w mut [f64] {
        let filled = self.rows.next_multiple_of(LANES).min(CATEGORIES);
        let worths = &mut worths[..filled];
        let rows =
            self.last_use[..filled].iter().zip(&self.line_start[..filled]).zip(&self.line_rate[..filled]);
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

    /// Excludes the head of a category from the output of [`Self::worths`].
    pub(super) fn exclude(&self, category: usize, worths: &mut [f64]) {
        if let Some(worth) = worths.get_mut(self.row_of[category]) {
            *worth = f64::INFINITY;
        }
    }

    /// The candidate for a block of the category at `now`.
    pub(super) fn candidate(
        &self,
        category: usize,
        last_use: Timestamp,
        offset_blocks: u32,
        now: f64,
    ) -> VictimCandidate {
        let last_use = micros(last_use);
        let (start, rate) = self.lines[category];
        let line = start - (now - last_use) * rate;
        let worth = self.curves.get(category).map_or(line, |curve| curve.worth(self.form, now - last_use));
        VictimCandidate { worth, offset_blocks, last_use, category }
    }

    /// The first head to leave among those with a finite worth.
    pub(super) fn lowest(&self, worths: &[f64]) -> Option<VictimCandidate> {
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
        let mut lowest: Option<VictimCandidate> = None;
        let rows = least_of.iter().enumerate().filter(|(_, of_row)| **of_row == least);
        let rows = rows.flat_map(|(number, _)| number * LANES..(number + 1) * LANES);
        for row in rows.filter(|&row| worths[row] == least) {
            let (offset_blocks, last_use) = (self.offset_blocks[row], self.last_use[row]);
            let offer =
                VictimCandidate { worth: least, offset_blocks, last_use, category: self.category[row] };
            if lowest.as_ref().is_none_or(|lowest| offer.leaves_before(lowest)) {
                lowest = Some(offer);
            }
        }
        lowest
    }
}

/// Rows are processed [`LANES`] at a time, without remainder.
const _: () = assert!(CATEGORIES.is_multiple_of(LANES));

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::math::exponential::Exponential;

    fn heads(form: WorthModel) -> CategoryHeads {
        let curve = |at: usize| ReuseCurve::new(Exponential::with_mean(1e6 * (at + 1) as f64).unwrap(), 5e6);
        let curves: Vec<ReuseCurve> = (0..CATEGORIES).map(curve).collect();
        let mut heads = CategoryHeads::new(form);
        heads.set_curves(curves.iter());
        heads
    }

    fn lowest(heads: &CategoryHeads, now: f64) -> Option<VictimCandidate> {
        let mut worths = [0.0; CATEGORIES];
        heads.lowest(heads.worths(now, &mut worths))
    }

    #[test]
    fn no_head_without_blocks() {
        for form in [WorthModel::Window, WorthModel::Share, WorthModel::Posterior, WorthModel::Aged] {
            let mut heads = heads(form);
            assert_eq!(lowest(&heads, 1e9), None);
            heads.set(3, Timestamp(5), 7);
            assert_eq!(lowest(&heads, 1e9).map(|offer| offer.category), Some(3));
            heads.clear(3);
            assert_eq!(lowest(&heads, 1e9), None);
        }
    }

    #[test]
    fn rows_match_single_candidates() {
        for form in [WorthModel::Window, WorthModel::Share, WorthModel::Posterior, WorthModel::Aged] {
            let mut heads = heads(form);
            for category in 0..CATEGORIES {
                heads.set(category, Timestamp(category as u64 * 1000), 2);
            }
            let mut worths = [0.0; CATEGORIES];
            let worths: Vec<f64> = heads.worths(9e6, &mut worths).to_vec();
            let alone: Vec<VictimCandidate> = (0..CATEGORIES)
                .map(|category| heads.candidate(category, Timestamp(category as u64 * 1000), 2, 9e6))
                .collect();
            assert!(alone.iter().map(|offer| offer.worth).eq(worths.iter().copied()), "{form:?}");
            let first =
                alone.iter().reduce(|least, offer| if offer.leaves_before(least) { offer } else { least });
            assert_eq!(heads.lowest(&worths), first.copied(), "{form:?}");
        }
    }

    #[test]
    fn ties_go_to_the_deepest_then_lowest_category() {
        let mut heads = CategoryHeads::new(WorthModel::Window);
        for (category, offset) in [(1, 4), (9, 6), (20, 6), (55, 2)] {
            heads.set(category, Timestamp(10), offset);
        }
        assert_eq!(lowest(&heads, 20.0).map(|offer| offer.category), Some(9));
    }

    #[test]
    fn categories_come_and_go_in_any_order() {
        let mut heads = heads(WorthModel::Window);
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
                present.iter().map(|(&at, &(last_use, offset))| heads.candidate(at, last_use, offset, 9e6));
            let first = offers.reduce(|least, offer| if offer.leaves_before(&least) { offer } else { least });
            assert_eq!(lowest(&heads, 9e6), first, "step {step}");
        }
    }
}
