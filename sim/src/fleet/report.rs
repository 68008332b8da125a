//! What a run of the fleet counted, and the figures made of it.
//!
//! Not here: comparing routers (`crate::routers::compare`).

use serde::{Deserialize, Serialize};

/// One request that got its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Served {
    /// Which of the workload.
    pub nth: usize,
    /// Where.
    pub instance: u32,
    /// From its arrival to its first token.
    pub ttft_ns: u64,
    /// The same as predicted when it was routed.
    pub predicted_ns: u64,
    /// Of its prompt.
    pub input_tokens: u32,
    /// Of these, how many were computed.
    pub computed_tokens: u32,
    /// Blocks that came from its own node and from others, each by tier.
    pub fetched: [[u32; 3]; 2],
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order of their first tokens.
    pub served: Vec<Served>,
    /// Requests that got their last token, with the mean time between two of their tokens, in nanoseconds.
    pub ended: Vec<(usize, u64)>,
    /// Of requests that ended, the time between tokens as predicted when they were routed, and as it was, in nanoseconds.
    pub paced: Vec<(u64, u64)>,
    /// Requests that were turned away.
    pub rejected: u64,
    /// Blocks that came from nodes.
    pub fetched_blocks: u64,
    /// When the last token was out.
    pub ended_ns: u64,
    /// Time that each instance computed.
    pub busy_ns: Vec<u64>,
    /// Tokens behind the first of a request, and the time between each and the one before, summed up.
    pub between_tokens: u64,
    /// See [`Report::between_tokens`].
    pub between_ns: u64,
}

/// Mean and percentiles, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Mean.
    pub mean_ms: f64,
    /// Half are below.
    pub p50_ms: f64,
    /// Nine of ten are.
    pub p90_ms: f64,
    /// Ninety-nine of a hundred are.
    pub p99_ms: f64,
}

impl Spread {
    fn of(mut ns: Vec<u64>) -> Spread {
        ns.sort_unstable();
        let ms = |ns: f64| ns / 1e6;
        let at = |share: f64| ns.get(((ns.len() as f64 * share) as usize).min(ns.len().saturating_sub(1)));
        let at = |share: f64| ms(at(share).copied().unwrap_or_default() as f64);
        let sum: f64 = ns.iter().map(|ns| *ns as f64).sum();
        let mean_ms = if ns.is_empty() { 0.0 } else { ms(sum / ns.len() as f64) };
        Spread { mean_ms, p50_ms: at(0.5), p90_ms: at(0.9), p99_ms: at(0.99) }
    }
}

impl Report {
    /// Times to first token.
    #[must_use]
    pub fn ttft(&self) -> Spread {
        Spread::of(self.served.iter().map(|served| served.ttft_ns).collect())
    }

    /// Share of the prompts' tokens that were not computed, 0 to 1.
    #[must_use]
    pub fn saved(&self) -> f64 {
        let sum =
            |of: fn(&Served) -> u32| self.served.iter().map(|served| f64::from(of(served))).sum::<f64>();
        let input = sum(|served| served.input_tokens);
        if input == 0.0 { 0.0 } else { 1.0 - sum(|served| served.computed_tokens) / input }
    }

    /// Mean time between two tokens of a request, in milliseconds.
    #[must_use]
    pub fn tbt_ms(&self) -> f64 {
        self.between_ns as f64 / self.between_tokens.max(1) as f64 / 1e6
    }

    /// Which requests those are whose first token came within their limit and whose others came no further apart than theirs on average. A request
    /// has these two, in microseconds.
    #[must_use]
    pub fn in_time(&self, limits_us: impl Fn(usize) -> (u64, u64)) -> Vec<usize> {
        let is_slow = |ended: &&(usize, u64)| ended.1 > limits_us(ended.0).1.saturating_mul(1_000);
        let mut slow: Vec<usize> = self.ended.iter().filter(is_slow).map(|(nth, _)| *nth).collect();
        slow.sort_unstable();
        let is_good = |served: &&Served| {
            served.ttft_ns <= limits_us(served.nth).0.saturating_mul(1_000)
                && slow.binary_search(&served.nth).is_err()
        };
        self.served.iter().filter(is_good).map(|served| served.nth).collect()
    }

    /// The same of times between tokens, over those requests that said more than one but the first `warm` to end.
    #[must_use]
    pub fn pace_error(&self, warm: usize) -> (f64, f64) {
        let judged = self.paced.iter().skip(warm).filter(|(_, tbt_ns)| *tbt_ns > 0);
        let judged: Vec<_> = judged.map(|(predicted, tbt)| (*predicted as f64, *tbt as f64)).collect();
        let mut relative: Vec<f64> =
            judged.iter().map(|(predicted, tbt)| (predicted - tbt).abs() / tbt).collect();
        relative.sort_by(f64::total_cmp);
        let sums = judged.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let median = relative.get(relative.len() / 2).copied().unwrap_or_default();
        (median, if sums.1 > 0.0 { sums.0 / sums.1 - 1.0 } else { 0.0 })
    }

    /// Median of |predicted - observed| / observed over all requests but the first `warm`, and the mean of (predicted - observed) over the
    /// mean of what was observed.
    #[must_use]
    pub fn prediction_error(&self, warm: usize) -> (f64, f64) {
        let judged: Vec<_> = self.served.iter().filter(|served| served.nth >= warm).collect();
        let mut relative: Vec<f64> = judged
            .iter()
            .map(|served| {
                (served.predicted_ns as f64 - served.ttft_ns as f64).abs() / served.ttft_ns.max(1) as f64
            })
            .collect();
        relative.sort_by(f64::total_cmp);
        let sum = |of: fn(&Served) -> u64| judged.iter().map(|served| of(served) as f64).sum::<f64>();
        let observed = sum(|served| served.ttft_ns).max(1.0);
        let median = relative.get(relative.len() / 2).copied().unwrap_or_default();
        (median, (sum(|served| served.predicted_ns) - observed) / observed)
    }
}
