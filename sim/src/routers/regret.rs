//! What better knowledge would be worth to the production scheduler: the same requests on the same fleet, under four kinds of it.
//!
//! The differences are told apart: what is lost to word that is late, to predictions that are not what engines come to, and to choosing for what is there
//! and not for what comes. The last is the best that a search found and no bound from below. Not here: the search (`crate::fleet`).

use serde::Serialize;

use super::compare::{Draw, spread};
use super::{PRODUCTION, by_name};
use crate::fleet::{Report, Setup, Spread, Workload, run, run_knowing};

/// What a scheduler knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Knowledge {
    /// What has reached it, as everywhere else.
    AsItComes,
    /// Loads and places of blocks as they are at this moment.
    Fresh,
    /// Besides, what each engine would take for it, if nothing else came.
    TrueTimes,
    /// Besides, the next requests.
    ToCome,
}

impl Knowledge {
    /// From the least to the most.
    pub const ALL: [Knowledge; 4] =
        [Knowledge::AsItComes, Knowledge::Fresh, Knowledge::TrueTimes, Knowledge::ToCome];
}

/// What came of one kind of knowledge.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Knowing {
    /// Which.
    pub knowledge: Knowledge,
    /// Times to first token.
    pub ttft: Spread,
    /// Share of the prompts' tokens that were not computed.
    pub saved: f64,
}

/// Of the mean TTFT as it is, what each kind of knowledge takes away; below 0 where it adds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Shares {
    /// Word that is late.
    pub delay: f64,
    /// Predictions that are not what engines come to.
    pub prediction: f64,
    /// Choosing without what is to come: what a search found, and no bound from below.
    pub greed: f64,
}

/// All of one load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Regret {
    /// Share of the fleet's capacity that is offered.
    pub load: f64,
    /// Requests served.
    pub requests: usize,
    /// How many requests to come were known.
    pub window: usize,
    /// By kind of knowledge.
    pub knowing: Vec<Knowing>,
    /// The differences of the means.
    pub lost: Shares,
    /// The same at rates beside the load's ([`Draw`]).
    pub drawn: Vec<Shares>,
}

impl Regret {
    /// Median, least and greatest of one of the shares, of all draws.
    #[must_use]
    pub fn spread(&self, of: fn(&Shares) -> f64) -> [f64; 3] {
        spread(std::iter::once(&self.lost).chain(&self.drawn).map(of))
    }
}

/// Runs the production scheduler under each kind of knowledge at one share of `capacity`, in requests a second, in each of these draws. Of the first
/// all is told, and the shares of the others; none without a draw.
#[must_use]
pub fn regret(
    workload: &Workload,
    setup: &Setup,
    (load, capacity): (f64, f64),
    window: usize,
    draws: &[Draw],
) -> Option<Regret> {
    let mut all = draws.iter().map(|draw| drawn(workload, setup, (load, capacity), window, *draw));
    let first = all.next()?;
    Some(Regret { drawn: all.map(|regret| regret.lost).collect(), ..first })
}

fn drawn(
    workload: &Workload,
    setup: &Setup,
    (load, capacity): (f64, f64),
    window: usize,
    Draw { rate, seed }: Draw,
) -> Regret {
    let paced = workload.at_rate(load * capacity * rate);
    let routed = |setup: &Setup| {
        by_name(PRODUCTION, seed).map(|mut router| run(&paced, setup, router.as_mut())).unwrap_or_default()
    };
    let knowing = Knowledge::ALL.map(|knowledge| {
        let report: Report = match knowledge {
            Knowledge::AsItComes => routed(setup),
            Knowledge::Fresh => routed(&setup.clone().fresh()),
            Knowledge::TrueTimes => run_knowing(&paced, setup, 0),
            Knowledge::ToCome => run_knowing(&paced, setup, window),
        };
        Knowing { knowledge, ttft: report.ttft(), saved: report.saved() }
    });
    let [as_it_comes, fresh, true_times, to_come] = [0, 1, 2, 3].map(|at| knowing[at].ttft.mean_ms);
    let share = |ms: f64| if as_it_comes > 0.0 { ms / as_it_comes } else { 0.0 };
    let lost = Shares {
        delay: share(as_it_comes - fresh),
        prediction: share(fresh - true_times),
        greed: share(true_times - to_come),
    };
    Regret { load, requests: paced.len(), window, knowing: knowing.into(), lost, drawn: Vec::new() }
}
