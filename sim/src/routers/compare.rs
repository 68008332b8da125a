//! Many routers on equal fleets at equal loads.
//!
//! A load is a share of what the fleet keeps up with when the least loaded instance takes each request: a measure that favours none of those
//! compared by their caches. Not here: what one run is (`crate::fleet`).

use serde::{Deserialize, Serialize};

use super::{BASELINES, PRODUCTION, Plane, by_name};
use crate::fleet::{Report, Setup, Spread, Workload, run};

/// Requests that are not judged for prediction: what a router has to learn first.
const WARM: usize = 200;

/// What one router came to at one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Its name.
    pub router: String,
    /// Share of the fleet's capacity that is offered.
    pub load: f64,
    /// Times to first token.
    pub ttft: Spread,
    /// Mean time between tokens, in milliseconds.
    pub tbt_ms: f64,
    /// Share of the prompts' tokens that were not computed.
    pub saved: f64,
    /// Blocks that came from nodes.
    pub fetched_blocks: u64,
    /// Median error of the predicted TTFT, as a share of the observed one, and bias of their sums.
    pub prediction: (f64, f64),
    /// Requests that were turned away.
    pub rejected: u64,
}

/// All of one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Of which.
    pub load: f64,
    /// The production scheduler.
    pub production: Point,
    /// The same where instances begin what waits in the order in which it came, as under the others.
    pub in_order_of_coming: Point,
    /// The others, by mean TTFT.
    pub baselines: Vec<Point>,
}

impl Comparison {
    /// Mean and P90 of the production scheduler over the best of the others, each.
    #[must_use]
    pub fn ratios(&self) -> (f64, f64) {
        let best = |of: fn(&Spread) -> f64| {
            self.baselines.iter().map(|point| of(&point.ttft)).fold(f64::INFINITY, f64::min)
        };
        let own = &self.production.ttft;
        (own.mean_ms / best(|spread| spread.mean_ms), own.p90_ms / best(|spread| spread.p90_ms))
    }
}

/// Share of the time of a workload that a fleet may need behind its last arrival and have kept up with it.
const BEHIND: f64 = 0.03;

/// Halvings of the span in which the capacity lies.
const HALVINGS: u32 = 6;

/// Requests a second that the fleet keeps up with, with a pool of KV: the most at which it has answered all of them soon behind the last arrival.
/// That all of them are there at once would tell less, for nothing of an earlier request can be known yet when the next one is sent.
#[must_use]
pub fn capacity(workload: &Workload, setup: &Setup, seed: u64) -> f64 {
    let setup = Setup { plane: Plane::Pool, ..setup.clone() };
    let keeps_up = |per_s: f64| {
        let paced = workload.at_rate(per_s);
        let report = by_name("least-loaded", seed).map(|mut router| run(&paced, &setup, router.as_mut()));
        report.is_some_and(|report| report.ended_ns as f64 <= paced.last_ns() as f64 * (1.0 + BEHIND))
    };
    let report =
        by_name("least-loaded", seed).map(|mut router| run(&workload.paced(0.0), &setup, router.as_mut()));
    let at_once = workload.len() as f64 / (report.map_or(1, |report| report.ended_ns.max(1)) as f64 / 1e9);
    let (mut low, mut high) = (at_once / 2.0, at_once * 4.0);
    if !keeps_up(low) {
        // A trace so short that its last answers alone take longer.
        return at_once;
    }
    for _ in 0..HALVINGS {
        // Halves the ratio: it is shares of the capacity that matter.
        let middle = (low * high).sqrt();
        if keeps_up(middle) { low = middle } else { high = middle }
    }
    low
}

/// Runs all routers at one share of `capacity`, in requests a second.
#[must_use]
pub fn compare(workload: &Workload, setup: &Setup, (load, capacity): (f64, f64), seed: u64) -> Comparison {
    let paced = workload.at_rate(load * capacity);
    let point = |name: &str, setup: &Setup| {
        let report =
            by_name(name, seed).map(|mut router| run(&paced, setup, router.as_mut())).unwrap_or_default();
        point(name, load, &report)
    };
    let production = point(PRODUCTION, setup);
    let in_order_of_coming = point(PRODUCTION, &Setup { orders: false, ..setup.clone() });
    let mut baselines: Vec<Point> = BASELINES.iter().map(|name| point(name, setup)).collect();
    baselines.sort_by(|one, other| one.ttft.mean_ms.total_cmp(&other.ttft.mean_ms));
    let in_order_of_coming =
        Point { router: format!("{PRODUCTION}, in order of coming"), ..in_order_of_coming };
    Comparison { load, production, in_order_of_coming, baselines }
}

fn point(name: &str, load: f64, report: &Report) -> Point {
    Point {
        router: name.to_owned(),
        load,
        ttft: report.ttft(),
        tbt_ms: report.tbt_ms(),
        saved: report.saved(),
        fetched_blocks: report.fetched_blocks,
        prediction: report.prediction_error(WARM),
        rejected: report.rejected,
    }
}
