//! Expected delay from overtaking requests, for instances that order their queue by priority
//! deadline.
//!
//! Shorter requests that arrive later overtake a waiting one. The share of an instance's time that
//! shorter requests take is learned from recently sent ones; a wait grows by that share of itself,
//! after Cobham (1954) for priority queues. Not here: requests that already wait (`load.rs`), and
//! the order (`priority_deadline.rs`).

use std::time::Duration;

use crate::id::Timestamp;
use crate::schedule::fairness::priority_deadline::DEADLINE_STRETCH;

/// Size classes by prefill time, each twice the previous one: from a microsecond to half an hour.
const SIZE_CLASSES: usize = 32;

/// Time after which a sent request counts half: some hundred requests of a busy fleet, and short
/// against the hours in which traffic changes.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// Largest believable share of an instance's time: beyond it a wait would have no end.
const SHARE_MAX: f64 = 0.95;

/// Prefill time sent to the whole fleet lately, by size class.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::schedule) struct OvertakingModel {
    /// Microseconds of prefill, decayed.
    sent_us: [f64; SIZE_CLASSES],
    /// Time span of these, decayed alike.
    span_us: f64,
    at: Option<Timestamp>,
    /// Share of all instances' time that requests below each size class take.
    share_below: [f64; SIZE_CLASSES],
    /// Prefill time of all sent requests, and the instance time in the same span.
    totals: [f64; 2],
}

fn size_class(prefill_us: u64) -> usize {
    (prefill_us.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)
}

impl OvertakingModel {
    /// Records a request sent to one of `instances` instances.
    pub(in crate::schedule) fn record(&mut self, prefill_us: u64, instances: usize, now: Timestamp) {
        let since_us = self.at.map_or(0.0, |at| now.since(at).as_micros() as f64);
        let kept = (-since_us / HALF_LIFE.as_micros() as f64).exp2();
        self.span_us = self.span_us * kept + since_us;
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
        self.sent_us.iter_mut().for_each(|sent| *sent *= kept);
        self.sent_us[size_class(prefill_us)] += prefill_us as f64;
        // A short span says too little.
        let whole_us = self.span_us.max(HALF_LIFE.as_micros() as f64 / 4.0) * instances.max(1) as f64;
        let mut sum_us = 0.0;
        for (below, sent) in self.share_below.iter_mut().zip(&self.sent_us) {
            // Half of the requests in its own class are shorter.
            *below = ((sum_us + sent / 2.0) / whole_us).min(SHARE_MAX);
            sum_us += sent;
        }
        self.totals = [sum_us, whole_us];
    }

    /// Share of an instance's time that prefill took lately; decays while no request is sent.
    pub(in crate::schedule) fn prefill_share(&self, now: Timestamp) -> f64 {
        let [sent_us, whole_us] = self.totals;
        if sent_us <= 0.0 {
            return 0.0;
        }
        let since_us = self.at.map_or(0.0, |at| now.since(at).as_micros() as f64);
        let kept = (-since_us / HALF_LIFE.as_micros() as f64).exp2();
        (sent_us / whole_us * kept).min(SHARE_MAX)
    }

    /// Expected growth of a wait of `wait_us` by later, shorter requests.
    pub(in crate::schedule) fn expected_delay_us(&self, wait_us: u64, prefill_us: u64) -> u64 {
        let share = self.share_below[size_class(prefill_us)];
        // A request that arrives after the deadline does not overtake.
        let most = share * prefill_us as f64 * f64::from(DEADLINE_STRETCH);
        (wait_us as f64 * share / (1.0 - share)).min(most) as u64
    }
}
