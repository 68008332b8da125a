//! Requests served in time where more are offered than a fleet gets through.
//!
//! The production scheduler runs with its admission; each of the others with the best of several thresholds on either time for this very load, which nobody
//! could know beforehand. Not here: what one run is (`crate::fleet`).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::admitting::{Admitting, Threshold};
use super::compare::Draw;
use super::{BASELINES, PRODUCTION, Router, by_name};
use crate::fleet::{Report, Setup, Spread, Workload, run};

/// What counts as in time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limits {
    /// The same for every request.
    Equal {
        /// Until the first token.
        ttft_ms: u64,
        /// Between two of the others, the mean of a request.
        tbt_ms: u64,
    },
    /// So many times what a request takes that is alone on an instance which has nothing of its prompt, as in the evaluation of "Mooncake".
    Alone {
        /// Until the first token.
        ttft: f64,
        /// Between two of the others, the mean of a request.
        tbt: f64,
    },
}

impl Limits {
    /// Those of a request with a prompt of this many tokens: until its first token, and between two of the others, in microseconds.
    pub(crate) fn of(self, input_tokens: u32, setup: &Setup) -> (u64, u64) {
        match self {
            Limits::Equal { ttft_ms, tbt_ms } => (ttft_ms * 1_000, tbt_ms * 1_000),
            Limits::Alone { ttft, tbt } => {
                let (first_ns, between_ns) = alone_ns(input_tokens, setup);
                // Casts saturate.
                let us = |ns: u64, times: f64| (ns as f64 * times / 1_000.0) as u64;
                (us(first_ns, ttft), us(between_ns, tbt))
            }
        }
    }
}

/// What a request takes that is alone on an instance which has nothing of its prompt: until its first token, and between two of the others.
pub(super) fn alone_ns(input_tokens: u32, setup: &Setup) -> (u64, u64) {
    let (profile, chunk_tokens) = (&setup.profile, setup.batch.chunk_tokens.max(1));
    let steps = u64::from(input_tokens.div_ceil(chunk_tokens));
    let first_ns = profile.prefill_ns(0, input_tokens.into()) + steps * profile.step_ns;
    (first_ns, profile.step_ns + profile.step_ns_per_running)
}

/// Thresholds that the others are tried with, as shares of a request's limit until the first token; the last one lets everything in.
const THRESHOLDS: [f64; 6] = [0.125, 0.25, 0.5, 0.75, 1.0, f64::INFINITY];

/// The same of the time between tokens, each of those with each of these where more than [`SLOW_MIN`] of what is served has tokens too far apart without.
const PACES: [f64; 2] = [0.8, 1.0];

/// See [`PACES`].
const SLOW_MIN: f64 = 0.01;

/// What one router came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Good {
    /// Its name.
    pub router: String,
    /// Share of the limit above which it turned requests away; nothing for the production scheduler, and where it turned none away.
    pub threshold: Option<f64>,
    /// The same of the time between tokens.
    #[serde(default)]
    pub pace: Option<f64>,
    /// Requests served in time, of all that were offered.
    pub in_time: f64,
    /// Requests turned away, of all.
    pub rejected: f64,
    /// Of those that were served, in time or not.
    pub ttft: Spread,
    /// Of those that ended, the share whose tokens came too far apart.
    #[serde(default)]
    pub slow: f64,
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
    /// The best of the others with thresholds on the time until the first token alone, which is what they have themselves.
    #[serde(default)]
    pub by_ttft: Option<Good>,
    /// Both ratios at rates beside the load's ([`Draw`]).
    #[serde(default)]
    pub drawn: Vec<(f64, f64)>,
}

impl Goodput {
    /// The same over the most of the others with thresholds on the time until the first token alone.
    #[must_use]
    pub fn ratio_by_ttft(&self) -> Option<f64> {
        let best = self.by_ttft.as_ref().map(|good| good.in_time.max(f64::MIN_POSITIVE))?;
        Some(self.production.in_time / best)
    }

    /// Requests in time of the production scheduler over the most of the others.
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

/// Runs all routers at one share of `capacity`, in requests a second, in each of these draws. Of the first all is told, and the ratios of the others;
/// none without a draw.
#[must_use]
pub fn goodput(
    workload: &Workload,
    setup: &Setup,
    (load, capacity): (f64, f64),
    limits: Limits,
    draws: &[Draw],
) -> Option<Goodput> {
    let mut all = draws.iter().map(|draw| drawn(workload, setup, (load, capacity), limits, *draw));
    let first = all.next()?;
    let drawn = all.flat_map(|goodput| goodput.all_ratios().next()).collect();
    Some(Goodput { drawn, ..first })
}

fn drawn(
    workload: &Workload,
    setup: &Setup,
    (load, capacity): (f64, f64),
    limits: Limits,
    Draw { rate, seed }: Draw,
) -> Goodput {
    let paced = workload.at_rate(load * capacity * rate);
    let of: Vec<(u64, u64)> =
        paced.requests.iter().map(|request| limits.of(request.input_tokens, setup)).collect();
    let of: Arc<[(u64, u64)]> = of.into();
    let judged = |router: &mut dyn Router, threshold: [Option<f64>; 2]| {
        let report = run(&paced, setup, router);
        good(router.name(), &report, &paced, (&of, threshold))
    };
    let production = judged(&mut Admitting::new(of.clone()), [None; 2]);
    debug_assert_eq!(production.router, PRODUCTION);
    let (mut baselines, mut by_ttft) = (Vec::new(), Vec::new());
    for name in BASELINES {
        let tried = |shares: [f64; 2]| {
            let inner = by_name(name, seed)?;
            let told = shares.map(|share| share.is_finite().then_some(share));
            Some(judged(&mut Threshold { inner, limits: of.clone(), shares }, told))
        };
        let alone: Vec<Good> = THRESHOLDS.iter().filter_map(|share| tried([*share, f64::INFINITY])).collect();
        // Where tokens come in time anyway, nothing is won by turning away for them.
        let slow = THRESHOLDS.iter().zip(&alone).filter(|(_, good)| good.slow > SLOW_MIN);
        let pairs = slow.flat_map(|(share, _)| PACES.iter().map(|pace| [*share, *pace]));
        let paced: Vec<Good> = pairs.filter_map(tried).collect();
        by_ttft.extend(best(alone.iter()));
        baselines.extend(best(alone.iter().chain(&paced)));
    }
    let by_ttft = best(by_ttft.iter());
    baselines.sort_by(|one, other| other.in_time.total_cmp(&one.in_time));
    Goodput { load, limits, production, baselines, by_ttft, drawn: Vec::new() }
}

/// The one with the most in time.
fn best<'a>(all: impl Iterator<Item = &'a Good>) -> Option<Good> {
    all.max_by(|one, other| one.in_time.total_cmp(&other.in_time)).cloned()
}

fn good(
    name: &str,
    report: &Report,
    workload: &Workload,
    (limits, [threshold, pace]): (&[(u64, u64)], [Option<f64>; 2]),
) -> Good {
    let offered = workload.len().max(1) as f64;
    let in_time = report.in_time(|nth| limits[nth]);
    let slow = report.ended.iter().filter(|(nth, between_ns)| *between_ns > limits[*nth].1 * 1_000).count();
    let long = workload.longest(0.1);
    let long_in_time = in_time.iter().filter(|nth| long.binary_search(nth).is_ok()).count();
    Good {
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
