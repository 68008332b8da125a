//! By how much those that are still to come lengthen a wait, where instances keep an order.
//!
//! A request that waits is passed by shorter ones that come meanwhile. What share of an instance's time the shorter ones take is learnt from
//! what was sent lately; a wait is longer by that share of itself, which is what Cobham (1954) has for queues with priorities. Not here: what
//! waits already (`load.rs`), and the order (`turn.rs`).

use std::time::Duration;

use super::turn::STRETCH;
use crate::id::Timestamp;

/// Sizes that are told apart, each twice the one before: from a microsecond to half an hour.
const SIZES: usize = 32;

/// After so long what was sent counts half: some hundred requests of a busy fleet, and short against the hours in which traffic changes.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// Of an instance's time, most that is believed to be taken: beyond it a wait would have no end.
const SHARE_MAX: f64 = 0.95;

/// What was sent to a whole fleet lately, by size.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Passing {
    /// Microseconds of prefill, decayed.
    sent_us: [f64; SIZES],
    /// Time in which that was sent, decayed alike.
    span_us: f64,
    at: Option<Timestamp>,
    /// Of all instances' time, the share that requests below each size take.
    below: [f64; SIZES],
    /// All of what was sent, and the time of all instances in which it was.
    all: [f64; 2],
}

fn size_of(prefill_us: u64) -> usize {
    (prefill_us.max(1).ilog2() as usize).min(SIZES - 1)
}

impl Passing {
    /// A request was sent to one of so many instances.
    pub(super) fn sent(&mut self, prefill_us: u64, instances: usize, now: Timestamp) {
        let since_us = self.at.map_or(0.0, |at| now.since(at).as_micros() as f64);
        let kept = (-since_us / HALF_LIFE.as_micros() as f64).exp2();
        self.span_us = self.span_us * kept + since_us;
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
        self.sent_us.iter_mut().for_each(|sent| *sent *= kept);
        self.sent_us[size_of(prefill_us)] += prefill_us as f64;
        // Of a short time nothing can be told.
        let whole_us = self.span_us.max(HALF_LIFE.as_micros() as f64 / 4.0) * instances.max(1) as f64;
        let mut sum_us = 0.0;
        for (below, sent) in self.below.iter_mut().zip(&self.sent_us) {
            // Of its own size, half are shorter.
            *below = ((sum_us + sent / 2.0) / whole_us).min(SHARE_MAX);
            sum_us += sent;
        }
        self.all = [sum_us, whole_us];
    }

    /// Of an instance's time, the share that prompts took lately: less, the longer none was sent.
    pub(super) fn share(&self, now: Timestamp) -> f64 {
        let [sent_us, whole_us] = self.all;
        if sent_us <= 0.0 {
            return 0.0;
        }
        let since_us = self.at.map_or(0.0, |at| now.since(at).as_micros() as f64);
        let kept = (-since_us / HALF_LIFE.as_micros() as f64).exp2();
        (sent_us / whole_us * kept).min(SHARE_MAX)
    }

    /// By how much they lengthen the wait of a request of this size that would wait so long if nobody came any more.
    pub(super) fn lengthening_us(&self, wait_us: u64, prefill_us: u64) -> u64 {
        let share = self.below[size_of(prefill_us)];
        // Who comes later than its turn does not pass it.
        let most = share * prefill_us as f64 * f64::from(STRETCH);
        (wait_us as f64 * share / (1.0 - share)).min(most) as u64
    }
}
