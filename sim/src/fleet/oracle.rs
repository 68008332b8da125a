//! An oracle scheduler with knowledge that no real one has: it simulates the engines for each plan,
//! and knows the next requests.
//!
//! Each request gets the production scheduler's plan for one instance. The instance is chosen by
//! running copies of the engines with all present and upcoming requests, and minimising the sum of
//! times to first token. Upcoming requests have a tentative instance, which is improved one request
//! at a time. That is a heuristic search, so its result is not a lower bound. Upcoming requests are
//! assumed to find on nodes everything that earlier ones computed. Not here: running engines ahead
//! (`lookahead.rs`), and a router's knowledge (`view.rs`).

use std::collections::HashSet;

use kv_core::id::{BlockHash, InstanceId, NodeId, Timestamp};
use kv_core::schedule::{
    Decision, InstanceFilter, PrefixLocations, QueuePriority, choose, choose_filtered, priority_deadline,
};

use super::engine::EngineJob;
use super::store::FetchResult;
use super::{InstancePlan, RouteQuery, SimFleet, Workload, lookahead};
use crate::routers::Route;

/// Upcoming requests that are tried elsewhere at each arrival.
const MOVES_PER_ARRIVAL: usize = 4;

pub(super) struct Oracle {
    instances: usize,
    window: usize,
    /// Leading blocks of each request that earlier ones share.
    seen_blocks: Vec<u32>,
    /// Upcoming requests, the nearest first.
    planned: Vec<PlannedRequest>,
    /// Index of the next one to try elsewhere.
    cursor: usize,
}

/// An upcoming request with its tentative instance.
#[derive(Clone, Copy)]
struct PlannedRequest {
    at_ns: u64,
    job: EngineJob,
    instance: usize,
}

/// One instance's option for the arriving request.
struct OracleOption {
    decision: Decision,
    job: EngineJob,
}

impl Oracle {
    pub(super) fn new(workload: &Workload, instances: u32, window: usize) -> Oracle {
        let mut seen: HashSet<BlockHash> = HashSet::new();
        let seen_blocks = (0..workload.len()).map(|nth| {
            let prompt = workload.prompt(nth);
            let before = prompt.iter().take_while(|block| seen.contains(*block)).count();
            seen.extend(&prompt[before..]);
            before as u32
        });
        let seen_blocks = seen_blocks.collect();
        Oracle { instances: instances as usize, window, seen_blocks, planned: Vec::new(), cursor: 0 }
    }

    /// Routes a request.
    pub(super) fn route(
        &mut self,
        nth: usize,
        ask: &RouteQuery<'_>,
        fleet: &SimFleet<'_>,
        now_ns: u64,
    ) -> Route {
        let options = instance_options(nth, ask, fleet, now_ns);
        if options.is_empty() {
            return Route::Reject;
        }
        self.planned.retain(|planned| planned.job.nth > nth);
        self.look_ahead(nth, fleet, now_ns);
        let mut best = self.best(&options, fleet, now_ns);
        if self.improve_plan(&options[best], fleet, now_ns) {
            best = self.best(&options, fleet, now_ns);
        }
        let mut options = options;
        Route::To(options.swap_remove(best).decision)
    }

    /// The option with the least total delay for all requests.
    fn best(&self, options: &[OracleOption], fleet: &SimFleet<'_>, now_ns: u64) -> usize {
        let without: Vec<u128> = (0..self.instances).map(|at| self.sum_ns(at, &[], fleet, now_ns)).collect();
        let cost = |option: &OracleOption| {
            let at = option.decision.instance.0 as usize;
            // Only the added delay counts, not the delay that exists without the request.
            self.sum_ns(at, &[(now_ns, option.job)], fleet, now_ns) as i128 - without[at] as i128
        };
        // Ties go to the first, the production scheduler's choice.
        let costs = options.iter().enumerate().map(|(at, option)| (cost(option), at));
        costs.min().map_or(0, |(_, at)| at)
    }

    /// Sum of waits for first tokens on an instance: its own requests, `first`, and those planned
    /// for it.
    fn sum_ns(&self, instance: usize, first: &[(u64, EngineJob)], fleet: &SimFleet<'_>, now_ns: u64) -> u128 {
        let planned = self.planned.iter().filter(|planned| planned.instance == instance);
        let come: Vec<(u64, EngineJob)> =
            first.iter().copied().chain(planned.map(|planned| (planned.at_ns, planned.job))).collect();
        lookahead::sum_of_first_token_waits_ns(&fleet.engines[instance], &come, now_ns)
    }

    /// Adds upcoming requests that are inside the window now.
    fn look_ahead(&mut self, nth: usize, fleet: &SimFleet<'_>, now_ns: u64) {
        let from = self.planned.last().map_or(nth, |planned| planned.job.nth) + 1;
        for to_come in from..(nth + 1 + self.window).min(fleet.workload.len()) {
            let (at_ns, job) = self.future_job(to_come, fleet);
            self.planned.push(PlannedRequest { at_ns, job, instance: 0 });
            self.place_request(self.planned.len() - 1, None, fleet, now_ns);
        }
    }

    /// Finds the best instance for one upcoming request; returns whether it changed.
    fn place_request(
        &mut self,
        which: usize,
        now: Option<&OracleOption>,
        fleet: &SimFleet<'_>,
        now_ns: u64,
    ) -> bool {
        let before = self.planned[which].instance;
        let added = |oracle: &mut Oracle, at: usize| {
            let here = now.filter(|option| option.decision.instance.0 as usize == at);
            let first: Vec<_> = here.iter().map(|option| (now_ns, option.job)).collect();
            oracle.planned[which].instance = at;
            let with = oracle.sum_ns(at, &first, fleet, now_ns) as i128;
            // No instance.
            oracle.planned[which].instance = usize::MAX;
            with - oracle.sum_ns(at, &first, fleet, now_ns) as i128
        };
        let costs = (0..self.instances).map(|at| (added(self, at), at != before, at));
        let best = costs.min().map_or(before, |(_, _, at)| at);
        self.planned[which].instance = best;
        best != before
    }

    /// Tries some upcoming requests elsewhere, continuing after the last one tried.
    fn improve_plan(&mut self, now: &OracleOption, fleet: &SimFleet<'_>, now_ns: u64) -> bool {
        let mut is_other = false;
        for _ in 0..MOVES_PER_ARRIVAL.min(self.planned.len()) {
            self.cursor = (self.cursor + 1) % self.planned.len();
            is_other |= self.place_request(self.cursor, Some(now), fleet, now_ns);
        }
        is_other
    }

    /// The job of an upcoming request, independent of its instance.
    fn future_job(&self, nth: usize, fleet: &SimFleet<'_>) -> (u64, EngineJob) {
        let SimFleet { workload, setup, view, .. } = fleet;
        let request = &workload.requests[nth];
        let fetched_tokens = (self.seen_blocks[nth] * workload.block_tokens).min(request.input_tokens);
        let profile = &setup.profile;
        let lane = profile.dram.through(profile.network);
        let moved_ns = profile.stream_ns(lane, fetched_tokens.into());
        let left = request.input_tokens - fetched_tokens;
        let prefill_us = (profile.prefill_ns(fetched_tokens.into(), left.into()) + profile.step_ns) / 1_000;
        let at = Timestamp(request.arrival_ns / 1_000);
        let job = EngineJob {
            nth,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            fetched_tokens,
            resident_tokens: 0,
            ready_ns: request.arrival_ns + if fetched_tokens > 0 { lane.latency_ns + moved_ns } else { 0 },
            priority_deadline: view
                .fleet
                .instances()
                .first()
                .map_or(at, |instance| priority_deadline(instance, QueuePriority::default(), prefill_us, at)),
        };
        (request.arrival_ns, job)
    }
}

/// The production scheduler's plan for each instance, with and without waiting for blocks computed
/// there for others. Its own choice comes first.
fn instance_options(
    nth: usize,
    ask: &RouteQuery<'_>,
    fleet: &SimFleet<'_>,
    now_ns: u64,
) -> Vec<OracleOption> {
    let known = &fleet.view.fleet;
    let Ok(chosen) = choose(&ask.request, ask.held(), known, ask.now) else { return Vec::new() };
    let open = chosen.candidates.iter().filter(|candidate| candidate.filtered.is_none());
    let mut all = Vec::new();
    for candidate in open {
        let among = [candidate.instance];
        let eligible = InstanceFilter { candidates: Some(&among), ..InstanceFilter::default() };
        let alone =
            |held: PrefixLocations<'_>| choose_filtered(&ask.request, held, eligible, known, ask.now).ok();
        let with = alone(ask.held());
        let without = alone(PrefixLocations { in_flight: &[], ..ask.held() })
            .filter(|_| !ask.in_flight_prefixes.is_empty());
        for decision in [with, without].into_iter().flatten() {
            let InstanceId(own) = decision.instance;
            let fetched: FetchResult = fleet.store.predict_fetch(
                &decision.sources,
                NodeId(own),
                fleet.workload.block_tokens,
                now_ns,
            );
            let job = fleet.job(nth, InstancePlan::of(&decision), fetched);
            all.push(OracleOption { decision, job });
        }
    }
    all
}
