//! Goodput under overload: requests served within their limits.
//!
//! The production scheduler runs with its admission. Each baseline runs with the best of several
//! thresholds on either latency for exactly this load, which no operator could know in advance. Not
//! here: a single run (`kvfleet_sim::fleet`).

use std::sync::Arc;

use kvfleet_sim::fleet::{FleetReport, FleetSetup, LatencySummary, Workload, run};
use kvfleet_sim::routers::{AdmittingRouter, PRODUCTION, Router, unloaded_ns};
use serde::{Deserialize, Serialize};

use super::compare::LoadDraw;
use super::threshold::ThresholdRouter;
use super::{BASELINES, by_name};

/// Latency limits of requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LatencyLimits {
    /// The same limits for every request.
    Equal {
        /// Time to first token.
        ttft_ms: u64,
        /// Inter-token latency, the mean of a request.
        tbt_ms: u64,
    },
    /// Multiples of the latency of a request alone on an instance without cached blocks, as in the
    /// evaluation of "Mooncake".
    Alone {
        /// Factor of the time to first token.
        ttft: f64,
        /// Factor of the inter-token latency, the mean of a request.
        tbt: f64,
    },
}

impl LatencyLimits {
    /// Limits of a request with a prompt of this length: time to first token, and inter-token
    /// latency, in microseconds.
    pub(crate) fn of(self, input_tokens: u32, setup: &FleetSetup) -> (u64, u64) {
        match self {
            LatencyLimits::Equal { ttft_ms, tbt_ms } => (ttft_ms * 1_000, tbt_ms * 1_000),
            LatencyLimits::Alone { ttft, tbt } => {
                let (first_ns, between_ns) = unloaded_ns(input_tokens, setup);
                // Casts saturate.
                let us = |ns: u64, times: f64| (ns as f64 * times / 1_000.0) as u64;
                (us(first_ns, ttft), us(between_ns, tbt))
            }
        }
    }
}

/// Thresholds for the baselines, as shares of a request's TTFT limit; the last one admits all.
const TTFT_THRESHOLDS: [f64; 6] = [0.125, 0.25, 0.5, 0.75, 1.0, f64::INFINITY];

/// Thresholds for the inter-token latency limit. They are combined with the TTFT thresholds that
/// leave more than [`SLOW_SHARE_MIN`] of the served requests above that limit.
const TBT_THRESHOLDS: [f64; 2] = [0.8, 1.0];

/// See [`TBT_THRESHOLDS`].
const SLOW_SHARE_MIN: f64 = 0.01;

/// Result of one router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoodputResult {
    /// Name of the router.
    pub router: String,
    /// Share of the TTFT limit above which it rejected requests; `None` for the production
    /// scheduler, and without rejections.
    pub threshold: Option<f64>,
    /// The same for the inter-token latency.
    #[serde(default)]
    pub pace: Option<f64>,
    /// Share of the offered requests that were served within limits.
    pub in_time: f64,
    /// Share of the offered requests that were rejected.
    pub rejected: f64,
    /// Times to first token of all served requests.
    pub ttft: LatencySummary,
    /// Share of finished requests above their inter-token latency limit.
    #[serde(default)]
    pub slow: f64,
    /// Share served within limits among the tenth of requests with the longest prompts.
    pub long_in_time: f64,
}

/// Results of all routers at one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// Offered share of the fleet's capacity.
    pub load: f64,
    /// The limits.
    pub limits: LatencyLimits,
    /// The production scheduler.
    pub production: GoodputResult,
    /// The baselines, the best first, each with its best threshold.
    pub baselines: Vec<GoodputResult>,
    /// The best baseline with thresholds on the TTFT alone, as these systems have themselves.
    #[serde(default)]
    pub by_ttft: Option<GoodputResult>,
    /// Both ratios at rates near the load's ([`LoadDraw`]).
    #[serde(default)]
    pub drawn: Vec<(f64, f64)>,
}

impl Goodput {
    /// Ratio to the best baseline with thresholds on the TTFT alone.
    #[must_use]
    pub fn ratio_by_ttft(&self) -> Option<f64> {
        let best = self.by_ttft.as_ref().map(|good| good.in_time.max(f64::MIN_POSITIVE))?;
        Some(self.production.in_time / best)
    }

    /// Ratio of the production scheduler's requests within limits to those of the best baseline.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        let best = self.baselines.iter().map(|good| good.in_time).fold(f64::MIN_POSITIVE, f64::max);
        self.production.in_time / best
    }

    /// [`Goodput::ratio`] and [`Goodput::ratio_by_ttft`] of all draws, those of the load itself first.
    pub fn all_ratios(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        let own = (self.ratio(), self.ratio_by_ttft().unwrap_or_default());
        std::iter::once(own).chain(self.drawn.iter().copied())
    }
}

/// Runs all routers at one share of `capacity`, in requests per second, for each draw. Reports the
/// first draw in full, and the ratios of the others; `None` without a draw.
#[must_use]
pub fn goodput(
    workload: &Workload,
    setup: &FleetSetup,
    load: f64,
    capacity: f64,
    limits: LatencyLimits,
    draws: &[LoadDraw],
) -> Option<Goodput> {
    let mut all = draws.iter().map(|draw| goodput_of_draw(workload, setup, load, capacity, limits, *draw));
    let first = all.next()?;
    let drawn = all.flat_map(|goodput| goodput.all_ratios().next()).collect();
    Some(Goodput { drawn, ..first })
}

fn goodput_of_draw(
    workload: &Workload,
    setup: &FleetSetup,
    load: f64,
    capacity: f64,
    limits: LatencyLimits,
    LoadDraw { rate, seed }: LoadDraw,
) -> Goodput {
    let paced = workload.at_rate(load * capacity * rate);
    let of: Vec<(u64, u64)> = paced.input_tokens().map(|tokens| limits.of(tokens, setup)).collect();
    let of: Arc<[(u64, u64)]> = of.into();
    let judged = |router: &mut dyn Router, threshold: [Option<f64>; 2]| {
        let report = run(&paced, setup, router);
        goodput_result(router.name(), &report, &paced, &of, threshold)
    };
    let production = judged(&mut AdmittingRouter::new(of.clone()), [None; 2]);
    debug_assert_eq!(production.router, PRODUCTION);
    let (mut baselines, mut by_ttft) = (Vec::new(), Vec::new());
    for name in BASELINES {
        let tried = |shares: [f64; 2]| {
            let inner = by_name(name, seed)?;
            let told = shares.map(|share| share.is_finite().then_some(share));
            Some(judged(&mut ThresholdRouter { inner, limits: of.clone(), shares }, told))
        };
        let alone: Vec<GoodputResult> =
            TTFT_THRESHOLDS.iter().filter_map(|share| tried([*share, f64::INFINITY])).collect();
        // If inter-token latencies are met anyway, rejections for them have no benefit.
        let slow = TTFT_THRESHOLDS.iter().zip(&alone).filter(|(_, good)| good.slow > SLOW_SHARE_MIN);
        let pairs = slow.flat_map(|(share, _)| TBT_THRESHOLDS.iter().map(|pace| [*share, *pace]));
        let paced: Vec<GoodputResult> = pairs.filter_map(tried).collect();
        by_ttft.extend(best(alone.iter()));
        baselines.extend(best(alone.iter().chain(&paced)));
    }
    let by_ttft = best(by_ttft.iter());
    baselines.sort_by(|one, other| other.in_time.total_cmp(&one.in_time));
    Goodput { load, limits, production, baselines, by_ttft, drawn: Vec::new() }
}

/// The result with the most requests within limits.
fn best<'a>(all: impl Iterator<Item = &'a GoodputResult>) -> Option<GoodputResult> {
    all.max_by(|one, other| one.in_time.total_cmp(&other.in_time)).cloned()
}

fn goodput_result(
    name: &str,
    report: &FleetReport,
    workload: &Workload,
    limits: &[(u64, u64)],
    [threshold, pace]: [Option<f64>; 2],
) -> GoodputResult {
    let offered = workload.len().max(1) as f64;
    let in_time = report.within_limits(|nth| limits[nth]);
    let slow = report.ended.iter().filter(|(nth, between_ns)| *between_ns > limits[*nth].1 * 1_000).count();
    let long = workload.longest(0.1);
    let long_in_time = in_time.iter().filter(|nth| long.binary_search(nth).is_ok()).count();
    GoodputResult {
        router: name.to_owned(),
        threshold,
        pace,
        in_time: in_time.len() as f64 / offered,
        rejected: report.rejected as f64 / offered,
        ttft: report.ttft(),
        slow: slow as f64 / report.ended.len().max(1) as f64,
        long_in_time: long_in_time as f64 / long.len().max(1) as f64,
    }
}
