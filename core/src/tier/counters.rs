//! Counters of a tier by request category: uses, times between uses, and removals by reason and
//! age.
//!
//! All counters start at zero when the node starts; readers take differences. Not here: the current
//! contents ([`super::TierStats`]) and predictions for another size ([`super::MissCurve`]).

use crate::id::{Category, RequestKind};

/// Conversation turns counted apart, as [`crate::evict::workload`] distinguishes them; later turns
/// share the last slot.
const TURNS_DISTINCT_MAX: usize = crate::evict::workload::TURNS_DISTINCT_MAX;

/// Why a block left its tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// Pressure moved it to a slower tier.
    Demoted = 0,
    /// Pressure dropped it.
    Dropped = 1,
    /// Its tenant's quota dropped it.
    Quota = 2,
    /// Its bytes could not be read or written.
    Failed = 3,
    /// Its group's time to live expired.
    Ttl = 4,
}

impl RemovalReason {
    /// Every reason, in discriminant order.
    pub const ALL: [RemovalReason; 5] = [
        RemovalReason::Demoted,
        RemovalReason::Dropped,
        RemovalReason::Quota,
        RemovalReason::Failed,
        RemovalReason::Ttl,
    ];

    /// Name in metrics and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RemovalReason::Demoted => "demoted",
            RemovalReason::Dropped => "dropped",
            RemovalReason::Quota => "quota",
            RemovalReason::Failed => "failed",
            RemovalReason::Ttl => "ttl",
        }
    }
}

/// Buckets are powers of two of milliseconds; 24 of them reach over four hours.
const BUCKETS: usize = 24;

/// Histogram of durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurationHistogram {
    counts: [u64; BUCKETS],
    sum_us: u64,
}

impl DurationHistogram {
    /// Adds one duration, in microseconds.
    pub fn add(&mut self, span_us: u64) {
        let span = (64 - (span_us / 1000).leading_zeros()) as usize;
        self.counts[span.min(BUCKETS - 1)] += 1;
        self.sum_us = self.sum_us.saturating_add(span_us);
    }

    /// Number of durations added.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Mean in microseconds; `None` if empty.
    #[must_use]
    pub fn mean_us(&self) -> Option<u64> {
        self.sum_us.checked_div(self.count())
    }

    /// Duration in microseconds that this share (0 to 1) of the entries did not exceed, within a
    /// factor of two. `None` if empty.
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

/// Counters of one category in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CategoryCounters {
    /// Uses of blocks in this tier.
    pub hits: u64,
    /// Time since the previous use, for every hit.
    pub reuse_gap: DurationHistogram,
    /// Removed blocks, indexed by [`RemovalReason`].
    pub removals: [u64; RemovalReason::ALL.len()],
    /// Time since the last use, for blocks that pressure demoted or dropped.
    pub age_at_eviction: DurationHistogram,
}

/// Counters of one tier.
#[derive(Clone, Debug)]
pub struct TierCounters {
    categories: Vec<CategoryCounters>,
}

impl Default for TierCounters {
    fn default() -> Self {
        TierCounters {
            categories: vec![CategoryCounters::default(); RequestKind::ALL.len() * TURNS_DISTINCT_MAX],
        }
    }
}

impl TierCounters {
    /// Every category with a nonzero counter. The last turn also stands for all later turns.
    pub fn categories(&self) -> impl Iterator<Item = (Category, &CategoryCounters)> {
        let all = self.categories.iter().enumerate();
        all.filter(|(_, class)| **class != CategoryCounters::default()).map(|(place, class)| {
            let kind = RequestKind::ALL[place / TURNS_DISTINCT_MAX];
            (Category { kind, conversation_turn: (place % TURNS_DISTINCT_MAX) as u8 }, class)
        })
    }

    /// Records a use of a block, `gap_us` after its previous use.
    pub(super) fn record_hit(&mut self, category: Category, gap_us: u64) {
        let class = self.category_mut(category);
        class.hits += 1;
        class.reuse_gap.add(gap_us);
    }

    /// Records a removal. `age_us` is the time since the last use, or `None` if age was not the
    /// reason.
    pub(super) fn record_removal(&mut self, category: Category, why: RemovalReason, age_us: Option<u64>) {
        let class = self.category_mut(category);
        class.removals[why as usize] += 1;
        if let Some(age_us) = age_us {
            class.age_at_eviction.add(age_us);
        }
    }

    fn category_mut(&mut self, category: Category) -> &mut CategoryCounters {
        let turn = usize::from(category.conversation_turn).min(TURNS_DISTINCT_MAX - 1);
        &mut self.categories[category.kind as usize * TURNS_DISTINCT_MAX + turn]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_factor_of_two() {
        let mut spans = DurationHistogram::default();
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
        assert_eq!(spans.count(), 6, "a duration beyond the last bucket counts in the last bucket");
    }

    #[test]
    fn late_turns_share_one_category() {
        let mut numbers = TierCounters::default();
        let category = |kind, turn| Category { kind, conversation_turn: turn };
        numbers.record_hit(category(RequestKind::Agent, 200), 5);
        numbers.record_hit(category(RequestKind::Agent, 9), 5);
        let text = category(RequestKind::Text, 1);
        numbers.record_removal(text, RemovalReason::Dropped, Some(5_000_000));
        numbers.record_removal(text, RemovalReason::Quota, None);
        let classes: Vec<_> = numbers.categories().collect();
        assert_eq!(classes.len(), 2);
        assert_eq!(classes[0].0, text);
        assert_eq!(classes[0].1.removals, [0, 1, 1, 0, 0]);
        assert_eq!(classes[0].1.age_at_eviction.mean_us(), Some(5_000_000));
        assert_eq!((classes[1].0.conversation_turn, classes[1].1.hits), (7, 2));
    }
}
