//! Compares routers on equal fleets at equal loads.
//!
//! A load is a share of the capacity of a fleet with least-loaded routing
//! (`kvfleet_sim::routers::capacity`), a measure that favours no compared router by its caches. Not
//! here: a single run (`kvfleet_sim::fleet`).

use kvfleet_sim::fleet::{FleetReport, FleetSetup, LatencySummary, Workload, run};
use kvfleet_sim::routers::PRODUCTION;
use serde::{Deserialize, Serialize};

use super::{BASELINES, by_name};

/// Requests excluded from prediction metrics, while a router learns.
const WARM_UP_REQUESTS: usize = 200;

/// Result of one router at one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterResult {
    /// Name of the router.
    pub router: String,
    /// Offered share of the fleet's capacity.
    pub load: f64,
    /// Times to first token.
    pub ttft: LatencySummary,
    /// Mean inter-token latency, in milliseconds.
    pub tbt_ms: f64,
    /// Share of the prompts' tokens that were not computed.
    pub saved: f64,
    /// Blocks fetched from nodes.
    pub fetched_blocks: u64,
    /// Median relative error of the predicted TTFT, and bias of the sums.
    pub prediction: (f64, f64),
    /// Rejected requests.
    pub rejected: u64,
}

/// Results of all routers at one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The load.
    pub load: f64,
    /// The production scheduler.
    pub production: RouterResult,
    /// The production scheduler with instances that start requests in order of arrival, as under
    /// the baselines.
    pub in_order_of_coming: RouterResult,
    /// The baselines, by mean TTFT.
    pub baselines: Vec<RouterResult>,
    /// Ratios of the production scheduler to the best baseline, by mean and by P90, at rates near
    /// the load's ([`LoadDraw`]).
    #[serde(default)]
    pub drawn: Vec<(f64, f64)>,
}

/// One of several runs at a load: a rate within one percent of the load's, and its own seed. A
/// single run is a random sample, because each different choice changes all later ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadDraw {
    /// Factor of the rate.
    pub rate: f64,
    /// Seed of randomised routers.
    pub seed: u64,
}

impl LoadDraw {
    /// Maximum deviation of the rates from the load's.
    const RATE_DEVIATION_MAX: f64 = 0.01;

    /// The load itself, and then evenly spread further rates up to `draws` in total.
    #[must_use]
    pub fn all(draws: u32, seed: u64) -> Vec<LoadDraw> {
        let others = draws.saturating_sub(1);
        let step = |nth: u32| match others {
            1 => 1.0,
            _ => 2.0 * f64::from(nth) / f64::from(others - 1) - 1.0,
        };
        let beside = (0..others).map(|nth| LoadDraw {
            rate: 1.0 + LoadDraw::RATE_DEVIATION_MAX * step(nth),
            seed: seed.wrapping_add(1 + u64::from(nth)),
        });
        std::iter::once(LoadDraw { rate: 1.0, seed }).chain(beside).collect()
    }
}

/// Median, least and greatest of the same ratio in several draws.
#[must_use]
pub fn median_and_range(ratios: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut all: Vec<f64> = ratios.collect();
    all.sort_by(f64::total_cmp);
    let (Some(least), Some(greatest)) = (all.first(), all.last()) else { return [f64::NAN; 3] };
    let (low, high) = (all[(all.len() - 1) / 2], all[all.len() / 2]);
    [f64::midpoint(low, high), *least, *greatest]
}

impl Comparison {
    /// [`Comparison::ratios`] of all draws, that of the load itself first.
    pub fn all_ratios(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        std::iter::once(self.ratios()).chain(self.drawn.iter().copied())
    }

    /// Ratios of the production scheduler to the best baseline, by mean and by P90 TTFT.
    #[must_use]
    pub fn ratios(&self) -> (f64, f64) {
        let best = |of: fn(&LatencySummary) -> f64| {
            self.baselines.iter().map(|point| of(&point.ttft)).fold(f64::INFINITY, f64::min)
        };
        let own = &self.production.ttft;
        (own.mean_ms / best(|spread| spread.mean_ms), own.p90_ms / best(|spread| spread.p90_ms))
    }
}

/// Runs all routers at one share of `capacity`, in requests per second, for each draw. Reports the
/// first draw in full, and the ratios of the others.
#[must_use]
pub fn compare(
    workload: &Workload,
    setup: &FleetSetup,
    load: f64,
    capacity: f64,
    draws: &[LoadDraw],
) -> Comparison {
    let mut all = draws.iter().map(|draw| compare_draw(workload, setup, load, capacity, *draw));
    let Some(first) = all.next() else { return Comparison { load, ..Comparison::default() } };
    let drawn = all.map(|comparison| comparison.ratios()).collect();
    let paced = workload.at_rate(load * capacity * draws.first().map_or(1.0, |draw| draw.rate));
    let in_order_of_coming = by_name(PRODUCTION, 0).map(|mut router| {
        run(&paced, &FleetSetup { uses_priority_deadlines: false, ..setup.clone() }, router.as_mut())
    });
    let in_order_of_coming = RouterResult {
        router: format!("{PRODUCTION}, in order of coming"),
        ..router_result(PRODUCTION, load, &in_order_of_coming.unwrap_or_default())
    };
    Comparison { in_order_of_coming, drawn, ..first }
}

fn compare_draw(
    workload: &Workload,
    setup: &FleetSetup,
    load: f64,
    capacity: f64,
    draw: LoadDraw,
) -> Comparison {
    let paced = workload.at_rate(load * capacity * draw.rate);
    let point = |name: &str| {
        let report = by_name(name, draw.seed).map(|mut router| run(&paced, setup, router.as_mut()));
        router_result(name, load, &report.unwrap_or_default())
    };
    let production = point(PRODUCTION);
    let mut baselines: Vec<RouterResult> = BASELINES.iter().map(|name| point(name)).collect();
    baselines.sort_by(|one, other| one.ttft.mean_ms.total_cmp(&other.ttft.mean_ms));
    Comparison { load, production, baselines, ..Comparison::default() }
}

fn router_result(name: &str, load: f64, report: &FleetReport) -> RouterResult {
    RouterResult {
        router: name.to_owned(),
        load,
        ttft: report.ttft(),
        tbt_ms: report.tbt_ms(),
        saved: report.saved_share(),
        fetched_blocks: report.fetched_blocks,
        prediction: report.ttft_prediction_error(WARM_UP_REQUESTS),
        rejected: report.rejected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_start_with_the_load_and_surround_it_evenly() {
        let rates = |draws| LoadDraw::all(draws, 7).iter().map(|draw| draw.rate).collect::<Vec<_>>();
        assert_eq!(rates(1), [1.0]);
        assert_eq!(rates(2), [1.0, 1.01]);
        assert_eq!(rates(3), [1.0, 0.99, 1.01]);
        assert_eq!(rates(4), [1.0, 0.99, 1.0, 1.01]);
        let seeds: Vec<_> = LoadDraw::all(3, u64::MAX).iter().map(|draw| draw.seed).collect();
        assert_eq!(seeds, [u64::MAX, 0, 1]);
    }

    #[test]
    fn the_range_is_the_median_and_both_extremes() {
        assert_eq!(median_and_range([3.0, 1.0, 2.0].into_iter()), [2.0, 1.0, 3.0]);
        assert_eq!(median_and_range([4.0, 1.0, 2.0, 3.0].into_iter()), [2.5, 1.0, 4.0]);
        assert!(median_and_range(std::iter::empty()).iter().all(|one| one.is_nan()));
    }
}
