//! The gap to an oracle: the production scheduler's TTFT on the same requests and fleet under four
//! levels of knowledge.
//!
//! Separates the losses by delayed information, by wrong predictions, and by greedy choice without
//! upcoming requests. The last level is the best result of a search, not a lower bound. Not here:
//! the search (`kvfleet_sim::fleet`).

use kvfleet_sim::fleet::{FleetReport, FleetSetup, LatencySummary, Workload, run, run_with_oracle};
use kvfleet_sim::routers::Production;
use serde::Serialize;

use super::compare::{LoadDraw, median_and_range};

/// Level of a scheduler's knowledge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Knowledge {
    /// Delayed information, as in all other runs.
    AsItComes,
    /// Current loads and locations of blocks.
    Fresh,
    /// Additionally each engine's true time for the request, if no other arrived.
    TrueTimes,
    /// Additionally the next requests.
    ToCome,
}

impl Knowledge {
    /// From the least to the most.
    pub const ALL: [Knowledge; 4] =
        [Knowledge::AsItComes, Knowledge::Fresh, Knowledge::TrueTimes, Knowledge::ToCome];
}

/// Result of one level of knowledge.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KnowledgeResult {
    /// The level.
    pub knowledge: Knowledge,
    /// Times to first token.
    pub ttft: LatencySummary,
    /// Share of the prompts' tokens that were not computed.
    pub saved: f64,
}

/// Share of the actual mean TTFT that each level of knowledge saves; negative if it adds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GapShares {
    /// Loss by delayed information.
    pub delay: f64,
    /// Loss by wrong predictions.
    pub prediction: f64,
    /// Loss by greedy choice: the result of a search, not a lower bound.
    pub greed: f64,
}

/// Results at one load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OracleGap {
    /// Offered share of the fleet's capacity.
    pub load: f64,
    /// Requests served.
    pub requests: usize,
    /// Number of upcoming requests that were known.
    pub window: usize,
    /// Results by level of knowledge.
    pub knowing: Vec<KnowledgeResult>,
    /// The differences of the means.
    pub lost: GapShares,
    /// The same at rates near the load's ([`LoadDraw`]).
    pub drawn: Vec<GapShares>,
}

impl OracleGap {
    /// Median, least and greatest of one share over all draws.
    #[must_use]
    pub fn median_and_range(&self, of: fn(&GapShares) -> f64) -> [f64; 3] {
        median_and_range(std::iter::once(&self.lost).chain(&self.drawn).map(of))
    }
}

/// Runs the production scheduler under each level of knowledge at one share of `capacity`, in
/// requests per second, for each draw. Reports the first draw in full, and the shares of the
/// others; `None` without a draw.
#[must_use]
pub fn oracle_gap(
    workload: &Workload,
    setup: &FleetSetup,
    load: f64,
    capacity: f64,
    window: usize,
    draws: &[LoadDraw],
) -> Option<OracleGap> {
    let mut all = draws.iter().map(|draw| gap_of_draw(workload, setup, load, capacity, window, *draw));
    let first = all.next()?;
    Some(OracleGap { drawn: all.map(|gap| gap.lost).collect(), ..first })
}

fn gap_of_draw(
    workload: &Workload,
    setup: &FleetSetup,
    load: f64,
    capacity: f64,
    window: usize,
    LoadDraw { rate, .. }: LoadDraw,
) -> OracleGap {
    let paced = workload.at_rate(load * capacity * rate);
    let routed = |setup: &FleetSetup| run(&paced, setup, &mut Production::default());
    let knowing = Knowledge::ALL.map(|knowledge| {
        let report: FleetReport = match knowledge {
            Knowledge::AsItComes => routed(setup),
            Knowledge::Fresh => routed(&setup.clone().with_fresh_state()),
            Knowledge::TrueTimes => run_with_oracle(&paced, setup, 0),
            Knowledge::ToCome => run_with_oracle(&paced, setup, window),
        };
        KnowledgeResult { knowledge, ttft: report.ttft(), saved: report.saved_share() }
    });
    let [as_it_comes, fresh, true_times, to_come] = [0, 1, 2, 3].map(|at| knowing[at].ttft.mean_ms);
    let share = |ms: f64| if as_it_comes > 0.0 { ms / as_it_comes } else { 0.0 };
    let lost = GapShares {
        delay: share(as_it_comes - fresh),
        prediction: share(fresh - true_times),
        greed: share(true_times - to_come),
    };
    OracleGap { load, requests: paced.len(), window, knowing: knowing.into(), lost, drawn: Vec::new() }
}
