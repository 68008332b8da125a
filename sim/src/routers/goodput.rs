//! Requests served in time where more are offered than a fleet gets through.
//!
//! The production scheduler runs with its admission; each of the others with the best of several thresholds for this very load, which nobody
//! could know beforehand. Not here: what one run is (`crate::fleet`).

use serde::{Deserialize, Serialize};

use super::admitting::{Admitting, Threshold};
use super::{BASELINES, PRODUCTION, Router, by_name};
use crate::fleet::{Report, Setup, Spread, Workload, run};

/// What counts as in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Until the first token.
    pub ttft_ms: u64,
    /// Between two of the others, the mean of a request.
    pub tbt_ms: u64,
}

/// Thresholds that the others are tried with, as shares of the limit; the last one lets everything in.
const THRESHOLDS: [f64; 6] = [0.125, 0.25, 0.5, 0.75, 1.0, f64::INFINITY];

/// What one router came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Good {
    /// Its name.
    pub router: String,
    /// Share of the limit above which it turned requests away; nothing for the production scheduler, and where it turned none away.
    pub threshold: Option<f64>,
    /// Requests served in time, of all that were offered.
    pub in_time: f64,
    /// Requests turned away, of all.
    pub rejected: f64,
    /// Of those that were served, in time or not.
    pub ttft: Spread,
    /// Of the dearest tenth of what was offered by prompt length: those served in time.
    pub long_in_time: f64,
}

/// All of one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// Share of the fleet's capacity that is offered.
    pub load: f64,
    /// What was in time.
    pub limits: Limits,
    /// The production scheduler.
    pub production: Good,
    /// The others, the best first, each with its best threshold.
    pub baselines: Vec<Good>,
}

impl Goodput {
    /// Requests in time of the production scheduler over the most of the others.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        let best = self.baselines.iter().map(|good| good.in_time).fold(f64::MIN_POSITIVE, f64::max);
        self.production.in_time / best
    }
}

/// Runs all routers at one share of `capacity`, in requests a second.
#[must_use]
pub fn goodput(
    workload: &Workload,
    setup: &Setup,
    (load, capacity): (f64, f64),
    limits: Limits,
    seed: u64,
) -> Goodput {
    let paced = workload.at_rate(load * capacity);
    let ttft_max_us = limits.ttft_ms * 1_000;
    let judged = |router: &mut dyn Router, threshold: Option<f64>| {
        let report = run(&paced, setup, router);
        good(router.name(), &report, &paced, (limits, threshold))
    };
    let production = judged(&mut Admitting::new(ttft_max_us), None);
    debug_assert_eq!(production.router, PRODUCTION);
    let mut baselines = Vec::new();
    for name in BASELINES {
        let tried = THRESHOLDS.iter().filter_map(|share| {
            let inner = by_name(name, seed)?;
            let ttft_max_us = if share.is_finite() { (ttft_max_us as f64 * share) as u64 } else { u64::MAX };
            Some(judged(&mut Threshold { inner, ttft_max_us }, share.is_finite().then_some(*share)))
        });
        baselines.extend(tried.max_by(|one, other| one.in_time.total_cmp(&other.in_time)));
    }
    baselines.sort_by(|one, other| other.in_time.total_cmp(&one.in_time));
    Goodput { load, limits, production, baselines }
}

fn good(
    name: &str,
    report: &Report,
    workload: &Workload,
    (limits, threshold): (Limits, Option<f64>),
) -> Good {
    let (ttft_ns, tbt_ns) = (limits.ttft_ms * 1_000_000, limits.tbt_ms * 1_000_000);
    let offered = workload.len().max(1) as f64;
    let in_time = report.in_time(ttft_ns, tbt_ns);
    let long = workload.longest(0.1);
    let long_in_time = in_time.iter().filter(|nth| long.binary_search(nth).is_ok()).count();
    Good {
        router: name.to_owned(),
        threshold,
        in_time: in_time.len() as f64 / offered,
        rejected: report.rejected as f64 / offered,
        ttft: report.ttft(),
        long_in_time: long_in_time as f64 / long.len().max(1) as f64,
    }
}
