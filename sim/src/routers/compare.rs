//! Many routers on equal fleets at equal loads.
//!
//! A load is a share of what the fleet keeps up with when the least loaded instance takes each request: a measure that favours none of those
//! compared by their caches. Not here: what one run is (`crate::fleet`).

use serde::{Deserialize, Serialize};

use super::goodput::alone_ns;
use super::{BASELINES, PRODUCTION, Plane, by_name};
use crate::fleet::{Report, Served, Setup, Spread, Workload, run};

/// Requests that are not judged for prediction: what a router has to learn first.
const WARM: usize = 200;

/// What one router came to at one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Of which.
    pub load: f64,
    /// The production scheduler.
    pub production: Point,
    /// The same where instances begin what waits in the order in which it came, as under the others.
    pub in_order_of_coming: Point,
    /// The others, by mean TTFT.
    pub baselines: Vec<Point>,
    /// Mean and P90 of the production scheduler over the best of the others, each, at rates beside the load's ([`Draw`]).
    #[serde(default)]
    pub drawn: Vec<(f64, f64)>,
}

/// One of several runs at a load: a rate within a hundredth of the load's, and a seed of its own. One run is one draw, since every
/// choice that differs makes all later ones other ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// By which the rate is multiplied.
    pub rate: f64,
    /// Of routers that leave something to chance.
    pub seed: u64,
}

impl Draw {
    /// How far the rates are from the load's, at most.
    const SPAN: f64 = 0.01;

    /// The load itself, and then as many more as make `draws` of them, from below to above it.
    #[must_use]
    pub fn all(draws: u32, seed: u64) -> Vec<Draw> {
        let others = draws.saturating_sub(1);
        let step = |nth: u32| match others {
            1 => 1.0,
            _ => 2.0 * f64::from(nth) / f64::from(others - 1) - 1.0,
        };
        let beside = (0..others).map(|nth| Draw {
            rate: 1.0 + Draw::SPAN * step(nth),
            seed: seed.wrapping_add(1 + u64::from(nth)),
        });
        std::iter::once(Draw { rate: 1.0, seed }).chain(beside).collect()
    }
}

/// Median, least and greatest of the same ratio in several draws.
#[must_use]
pub fn spread(ratios: impl Iterator<Item = f64>) -> [f64; 3] {
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

/// Times that the end of that span is doubled, at most, while the fleet keeps up with it.
const DOUBLINGS: u32 = 8;

/// Requests a second that the fleet keeps up with, with a pool of KV: the most at which none waits for its first token far beyond the last arrival. What each
/// takes by itself is no waiting: a prompt of ten seconds among the last ones would end later on a fleet of any size. How long the last answers take says nothing
/// either, and where many decode beside one another it is long. That all of them are there at once would tell less, for nothing of an earlier request can be known
/// yet when the next one is sent.
#[must_use]
pub fn capacity(workload: &Workload, setup: &Setup, seed: u64) -> f64 {
    let setup = Setup { plane: Plane::Pool, ..setup.clone() };
    let keeps_up = |per_s: f64| {
        let paced = workload.at_rate(per_s);
        let report = by_name("least-loaded", seed).map(|mut router| run(&paced, &setup, router.as_mut()));
        let waited_ns = |served: &Served| {
            let request = &paced.requests[served.nth];
            request.arrival_ns + served.ttft_ns.saturating_sub(alone_ns(request.input_tokens, &setup).0)
        };
        let last_ns = report.map(|report| report.served.iter().map(waited_ns).max().unwrap_or_default());
        last_ns.is_some_and(|last_ns| last_ns as f64 <= paced.last_ns() as f64 * (1.0 + BEHIND))
    };
    let report =
        by_name("least-loaded", seed).map(|mut router| run(&workload.paced(0.0), &setup, router.as_mut()));
    let at_once = workload.len() as f64 / (report.map_or(1, |report| report.ended_ns.max(1)) as f64 / 1e9);
    let (mut low, mut high) = (at_once / 2.0, at_once * 4.0);
    // Last tokens are in the time of all at once and in no other, and may be most of it.
    for _ in 0..DOUBLINGS {
        if !keeps_up(high) {
            break;
        }
        (low, high) = (high, high * 2.0);
    }
    if !keeps_up(low) {
        // A trace so short that whatever comes at once in it makes some wait longer.
        return at_once;
    }
    for _ in 0..HALVINGS {
        // Halves the ratio: it is shares of the capacity that matter.
        let middle = (low * high).sqrt();
        if keeps_up(middle) { low = middle } else { high = middle }
    }
    low
}

/// Runs all routers at one share of `capacity`, in requests a second, in each of these draws. Of the first all is told, and the ratios of the others.
#[must_use]
pub fn compare(
    workload: &Workload,
    setup: &Setup,
    (load, capacity): (f64, f64),
    draws: &[Draw],
) -> Comparison {
    let mut all = draws.iter().map(|draw| drawn(workload, setup, (load, capacity), *draw));
    let Some(first) = all.next() else { return Comparison { load, ..Comparison::default() } };
    let drawn = all.map(|comparison| comparison.ratios()).collect();
    let paced = workload.at_rate(load * capacity * draws.first().map_or(1.0, |draw| draw.rate));
    let in_order_of_coming = by_name(PRODUCTION, 0)
        .map(|mut router| run(&paced, &Setup { orders: false, ..setup.clone() }, router.as_mut()));
    let in_order_of_coming = Point {
        router: format!("{PRODUCTION}, in order of coming"),
        ..point(PRODUCTION, load, &in_order_of_coming.unwrap_or_default())
    };
    Comparison { in_order_of_coming, drawn, ..first }
}

fn drawn(workload: &Workload, setup: &Setup, (load, capacity): (f64, f64), draw: Draw) -> Comparison {
    let paced = workload.at_rate(load * capacity * draw.rate);
    let point = |name: &str| {
        let report = by_name(name, draw.seed).map(|mut router| run(&paced, setup, router.as_mut()));
        point(name, load, &report.unwrap_or_default())
    };
    let production = point(PRODUCTION);
    let mut baselines: Vec<Point> = BASELINES.iter().map(|name| point(name)).collect();
    baselines.sort_by(|one, other| one.ttft.mean_ms.total_cmp(&other.ttft.mean_ms));
    Comparison { load, production, baselines, ..Comparison::default() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_begin_with_the_load_itself_and_lie_evenly_about_it() {
        let rates = |draws| Draw::all(draws, 7).iter().map(|draw| draw.rate).collect::<Vec<_>>();
        assert_eq!(rates(1), [1.0]);
        assert_eq!(rates(2), [1.0, 1.01]);
        assert_eq!(rates(3), [1.0, 0.99, 1.01]);
        assert_eq!(rates(4), [1.0, 0.99, 1.0, 1.01]);
        let seeds: Vec<_> = Draw::all(3, u64::MAX).iter().map(|draw| draw.seed).collect();
        assert_eq!(seeds, [u64::MAX, 0, 1]);
    }

    #[test]
    fn a_spread_is_the_middle_and_both_ends() {
        assert_eq!(spread([3.0, 1.0, 2.0].into_iter()), [2.0, 1.0, 3.0]);
        assert_eq!(spread([4.0, 1.0, 2.0, 3.0].into_iter()), [2.5, 1.0, 4.0]);
        assert!(spread(std::iter::empty()).iter().all(|one| one.is_nan()));
    }
}
