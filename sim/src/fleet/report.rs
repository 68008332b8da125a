//! Counters of a fleet run, and metrics derived from them.
//!
//! Not here: comparing routers (`lab/src/routers/compare.rs`).

use serde::{Deserialize, Serialize};

/// One request that got its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ServedRequest {
    /// Index in the workload.
    pub nth: usize,
    /// Instance that served it.
    pub instance: u32,
    /// Time from arrival to first token.
    pub ttft_ns: u64,
    /// Time to first token predicted at routing.
    pub predicted_ns: u64,
    /// Prompt length.
    pub input_tokens: u32,
    /// Prompt tokens that were computed.
    pub computed_tokens: u32,
    /// Blocks fetched from the own node and from others, each by tier.
    pub fetched: [[u32; 3]; 2],
}

/// Counters of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FleetReport {
    /// Requests in the order of their first tokens.
    pub served: Vec<ServedRequest>,
    /// Finished requests, with their mean inter-token latency in nanoseconds.
    pub ended: Vec<(usize, u64)>,
    /// Predicted and actual inter-token latency of finished requests, in nanoseconds.
    pub paced: Vec<(u64, u64)>,
    /// Rejected requests.
    pub rejected: u64,
    /// Blocks fetched from nodes.
    pub fetched_blocks: u64,
    /// Time of the last token.
    pub ended_ns: u64,
    /// Compute time of each instance.
    pub busy_ns: Vec<u64>,
    /// Number of intervals between tokens of a request.
    pub between_tokens: u64,
    /// Sum of these intervals; see [`FleetReport::between_tokens`].
    pub between_ns: u64,
}

/// Mean and percentiles, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Mean.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
}

impl LatencySummary {
    fn new(mut ns: Vec<u64>) -> LatencySummary {
        ns.sort_unstable();
        let ms = |ns: f64| ns / 1e6;
        let at = |share: f64| ns.get(((ns.len() as f64 * share) as usize).min(ns.len().saturating_sub(1)));
        let at = |share: f64| ms(at(share).copied().unwrap_or_default() as f64);
        let sum: f64 = ns.iter().map(|ns| *ns as f64).sum();
        let mean_ms = if ns.is_empty() { 0.0 } else { ms(sum / ns.len() as f64) };
        LatencySummary { mean_ms, p50_ms: at(0.5), p90_ms: at(0.9), p99_ms: at(0.99) }
    }
}

impl FleetReport {
    /// Summary of the times to first token.
    #[must_use]
    pub fn ttft(&self) -> LatencySummary {
        LatencySummary::new(self.served.iter().map(|served| served.ttft_ns).collect())
    }

    /// Share of the prompts' tokens that were not computed, 0 to 1.
    #[must_use]
    pub fn saved_share(&self) -> f64 {
        let sum = |of: fn(&ServedRequest) -> u32| {
            self.served.iter().map(|served| f64::from(of(served))).sum::<f64>()
        };
        let input = sum(|served| served.input_tokens);
        if input == 0.0 { 0.0 } else { 1.0 - sum(|served| served.computed_tokens) / input }
    }

    /// Mean inter-token latency, in milliseconds.
    #[must_use]
    pub fn tbt_ms(&self) -> f64 {
        self.between_ns as f64 / self.between_tokens.max(1) as f64 / 1e6
    }

    /// Requests that met both limits: time to first token, and mean inter-token latency.
    /// `limits_us` returns both in microseconds.
    #[must_use]
    pub fn within_limits(&self, limits_us: impl Fn(usize) -> (u64, u64)) -> Vec<usize> {
        let is_slow = |ended: &&(usize, u64)| ended.1 > limits_us(ended.0).1.saturating_mul(1_000);
        let mut slow: Vec<usize> = self.ended.iter().filter(is_slow).map(|(nth, _)| *nth).collect();
        slow.sort_unstable();
        let is_good = |served: &&ServedRequest| {
            served.ttft_ns <= limits_us(served.nth).0.saturating_mul(1_000)
                && slow.binary_search(&served.nth).is_err()
        };
        self.served.iter().filter(is_good).map(|served| served.nth).collect()
    }

    /// Median relative error and bias of predicted inter-token latencies. Skips the first `warm`
    /// requests to end, and those with a single token.
    #[must_use]
    pub fn tbt_prediction_error(&self, warm: usize) -> (f64, f64) {
        let judged = self.paced.iter().skip(warm).filter(|(_, tbt_ns)| *tbt_ns > 0);
        let judged: Vec<_> = judged.map(|(predicted, tbt)| (*predicted as f64, *tbt as f64)).collect();
        let mut relative: Vec<f64> =
            judged.iter().map(|(predicted, tbt)| (predicted - tbt).abs() / tbt).collect();
        relative.sort_by(f64::total_cmp);
        let sums = judged.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let median = relative.get(relative.len() / 2).copied().unwrap_or_default();
        (median, if sums.1 > 0.0 { sums.0 / sums.1 - 1.0 } else { 0.0 })
    }

    /// Median of |predicted - observed| / observed over all requests but the first `warm`, and the
    /// sum of (predicted - observed) over the sum of observed.
    #[must_use]
    pub fn ttft_prediction_error(&self, warm: usize) -> (f64, f64) {
        let judged: Vec<_> = self.served.iter().filter(|served| served.nth >= warm).collect();
        let mut relative: Vec<f64> = judged
            .iter()
            .map(|served| {
                (served.predicted_ns as f64 - served.ttft_ns as f64).abs() / served.ttft_ns.max(1) as f64
            })
            .collect();
        relative.sort_by(f64::total_cmp);
        let sum = |of: fn(&ServedRequest) -> u64| judged.iter().map(|served| of(served) as f64).sum::<f64>();
        let observed = sum(|served| served.ttft_ns).max(1.0);
        let median = relative.get(relative.len() / 2).copied().unwrap_or_default();
        (median, (sum(|served| served.predicted_ns) - observed) / observed)
    }
}
