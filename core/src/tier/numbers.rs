//! What happened to the blocks of a tier, by category: uses, the time between uses, who left, why and how old.
//!
//! Counted since the start; whoever shows them takes differences. Not here: what is there now ([`super::TierStats`]), and
//! what another size would do ([`super::MissCurve`]).

use crate::id::{Category, RequestKind};

/// Turns counted apart, as [`crate::evict::workload`] tells them apart; later ones share the last.
const TURNS_DISTINCT_MAX: usize = crate::evict::workload::TURNS_DISTINCT_MAX;

/// Why a block left its place in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Pressure moved it to a slower tier.
    Demoted = 0,
    /// Pressure dropped it.
    Dropped = 1,
    /// Its tenant's quota dropped it.
    Quota = 2,
    /// Its bytes could not be read or written.
    Failed = 3,
    /// Its group's time to live was over.
    Ttl = 4,
}

impl Left {
    /// Every reason, in the order of its number.
    pub const ALL: [Left; 5] = [Left::Demoted, Left::Dropped, Left::Quota, Left::Failed, Left::Ttl];

    /// Name in metrics and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Left::Demoted => "demoted",
            Left::Dropped => "dropped",
            Left::Quota => "quota",
            Left::Failed => "failed",
            Left::Ttl => "ttl",
        }
    }
}

/// Counts by powers of two of milliseconds: 24 of them reach over four hours.
const SPANS: usize = 24;

/// How often something took how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    counts: [u64; SPANS],
    sum_us: u64,
}

impl Spans {
    /// One more, in microseconds.
    pub fn add(&mut self, span_us: u64) {
        let span = (64 - (span_us / 1000).leading_zeros()) as usize;
        self.counts[span.min(SPANS - 1)] += 1;
        self.sum_us = self.sum_us.saturating_add(span_us);
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their mean in microseconds; nothing before the first.
    #[must_use]
    pub fn mean_us(&self) -> Option<u64> {
        self.sum_us.checked_div(self.count())
    }

    /// Microseconds that this share of them (0 to 1) did not exceed, to a factor of two; nothing before the first.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let place = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        });
        place.map(|place| 1000 << place)
    }
}

/// What happened to the blocks of one category in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassNumbers {
    /// Uses of blocks that were there.
    pub hits: u64,
    /// Time since the use before, of every hit.
    pub reuse_gap: Spans,
    /// Blocks that left, by [`Left`].
    pub left: [u64; Left::ALL.len()],
    /// Time since the last use, of blocks that pressure moved or dropped.
    pub age_at_eviction: Spans,
}

/// The numbers of one tier.
#[derive(Clone, Debug)]
pub struct TierNumbers {
    classes: Vec<ClassNumbers>,
}

impl Default for TierNumbers {
    fn default() -> Self {
        TierNumbers { classes: vec![ClassNumbers::default(); RequestKind::ALL.len() * TURNS_DISTINCT_MAX] }
    }
}

impl TierNumbers {
    /// Every category of which something was counted; the last turn stands for all later ones too.
    pub fn classes(&self) -> impl Iterator<Item = (Category, &ClassNumbers)> {
        let all = self.classes.iter().enumerate();
        all.filter(|(_, class)| **class != ClassNumbers::default()).map(|(place, class)| {
            let kind = RequestKind::ALL[place / TURNS_DISTINCT_MAX];
            (Category { kind, turn: (place % TURNS_DISTINCT_MAX) as u8 }, class)
        })
    }

    /// A block of the category was used, `gap_us` after it was last.
    pub(super) fn hit(&mut self, category: Category, gap_us: u64) {
        let class = self.class(category);
        class.hits += 1;
        class.reuse_gap.add(gap_us);
    }

    /// A block of the category left; `age_us` since its last use, where that was why.
    pub(super) fn left(&mut self, category: Category, why: Left, age_us: Option<u64>) {
        let class = self.class(category);
        class.left[why as usize] += 1;
        if let Some(age_us) = age_us {
            class.age_at_eviction.add(age_us);
        }
    }

    fn class(&mut self, category: Category) -> &mut ClassNumbers {
        let turn = usize::from(category.turn).min(TURNS_DISTINCT_MAX - 1);
        &mut self.classes[category.kind as usize * TURNS_DISTINCT_MAX + turn]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_a_factor_of_two() {
        let mut spans = Spans::default();
        assert_eq!((spans.mean_us(), spans.quantile_us(0.5)), (None, None));
        for ms in [1, 3, 3, 3, 100] {
            spans.add(ms * 1000);
        }
        assert_eq!((spans.count(), spans.mean_us()), (5, Some(22_000)));
        assert_eq!(spans.quantile_us(0.0), Some(2_000));
        assert_eq!(spans.quantile_us(0.5), Some(4_000));
        assert_eq!(spans.quantile_us(0.8), Some(4_000));
        assert_eq!(spans.quantile_us(1.0), Some(128_000));
        spans.add(u64::MAX);
        assert_eq!(spans.count(), 6, "what is longer than all counts as the longest");
    }

    #[test]
    fn categories_are_told_apart_and_late_turns_share_one() {
        let mut numbers = TierNumbers::default();
        let category = |kind, turn| Category { kind, turn };
        numbers.hit(category(RequestKind::Agent, 200), 5);
        numbers.hit(category(RequestKind::Agent, 9), 5);
        let text = category(RequestKind::Text, 1);
        numbers.left(text, Left::Dropped, Some(5_000_000));
        numbers.left(text, Left::Quota, None);
        let classes: Vec<_> = numbers.classes().collect();
        assert_eq!(classes.len(), 2);
        assert_eq!(classes[0].0, text);
        assert_eq!(classes[0].1.left, [0, 1, 1, 0, 0]);
        assert_eq!(classes[0].1.age_at_eviction.mean_us(), Some(5_000_000));
        assert_eq!((classes[1].0.turn, classes[1].1.hits), (7, 2));
    }
}
