//! A scheduler that knows more than one can: the engines themselves say how long each plan would take, and the next requests are known.
//!
//! Each request gets the production scheduler's plan for one instance; which instance, is decided by letting copies of the engines run on with
//! all requests that are there and the next ones, and taking that of the least sum of times to first token. For the next ones a place is kept
//! and improved as time goes on, by moving one at a time. That is a search, so what comes of it is the best found and no bound from below. Of requests to come it is
//! taken that nodes hold by then what any earlier one computed. Not here: how engines run on (`ahead.rs`), and what a router knows (`view.rs`).

use std::collections::HashSet;

use kv_core::id::{BlockHash, InstanceId, NodeId, Timestamp};
use kv_core::schedule::{Decision, Eligible, Held, Standing, choose, choose_among, turn_of};

use super::engine::Job;
use super::store::Fetched;
use super::{Ask, Fleet, Plan, Workload, ahead};
use crate::routers::Route;

/// Of the requests to come, how many are tried elsewhere each time that one comes.
const MOVES: usize = 4;

pub(super) struct Oracle {
    instances: usize,
    window: usize,
    /// Of each request: leading blocks that earlier ones have too.
    seen_blocks: Vec<u32>,
    /// Of the requests to come, the nearest first.
    planned: Vec<Planned>,
    /// The one to try elsewhere next.
    turn: usize,
}

/// A request with its place.
#[derive(Clone, Copy)]
struct Planned {
    at_ns: u64,
    job: Job,
    instance: usize,
}

/// What one instance could do for the request that comes now.
struct Choice {
    decision: Decision,
    job: Job,
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
        Oracle { instances: instances as usize, window, seen_blocks, planned: Vec::new(), turn: 0 }
    }

    /// Routes a request.
    pub(super) fn route(&mut self, nth: usize, ask: &Ask<'_>, fleet: &Fleet<'_>, now_ns: u64) -> Route {
        let options = options(nth, ask, fleet, now_ns);
        if options.is_empty() {
            return Route::Reject;
        }
        self.planned.retain(|planned| planned.job.nth > nth);
        self.look_ahead(nth, fleet, now_ns);
        let mut best = self.best(&options, fleet, now_ns);
        if self.move_some(&options[best], fleet, now_ns) {
            best = self.best(&options, fleet, now_ns);
        }
        let mut options = options;
        Route::To(options.swap_remove(best).decision)
    }

    /// Which is best for all.
    fn best(&self, options: &[Choice], fleet: &Fleet<'_>, now_ns: u64) -> usize {
        let without: Vec<u128> = (0..self.instances).map(|at| self.sum_ns(at, &[], fleet, now_ns)).collect();
        let cost = |option: &Choice| {
            let at = option.decision.instance.0 as usize;
            // What is there without it counts against none: only what it adds does.
            self.sum_ns(at, &[(now_ns, option.job)], fleet, now_ns) as i128 - without[at] as i128
        };
        // Of equal ones the first, which is what the production scheduler thinks best.
        let costs = options.iter().enumerate().map(|(at, option)| (cost(option), at));
        costs.min().map_or(0, |(_, at)| at)
    }

    /// Of an instance: the first tokens of what it has, of these, and of what is planned for it.
    fn sum_ns(&self, instance: usize, first: &[(u64, Job)], fleet: &Fleet<'_>, now_ns: u64) -> u128 {
        let planned = self.planned.iter().filter(|planned| planned.instance == instance);
        let come: Vec<(u64, Job)> =
            first.iter().copied().chain(planned.map(|planned| (planned.at_ns, planned.job))).collect();
        ahead::sum_of_firsts_ns(&fleet.engines[instance], &come, now_ns)
    }

    /// Gives requests a place that are near enough now.
    fn look_ahead(&mut self, nth: usize, fleet: &Fleet<'_>, now_ns: u64) {
        let from = self.planned.last().map_or(nth, |planned| planned.job.nth) + 1;
        for to_come in from..(nth + 1 + self.window).min(fleet.workload.len()) {
            let (at_ns, job) = self.to_come(to_come, fleet);
            self.planned.push(Planned { at_ns, job, instance: 0 });
            self.place(self.planned.len() - 1, (None, fleet), now_ns);
        }
    }

    /// Finds the best place for one request to come; answers whether it is another one.
    fn place(&mut self, which: usize, (now, fleet): (Option<&Choice>, &Fleet<'_>), now_ns: u64) -> bool {
        let before = self.planned[which].instance;
        let added = |oracle: &mut Oracle, at: usize| {
            let here = now.filter(|option| option.decision.instance.0 as usize == at);
            let first: Vec<_> = here.iter().map(|option| (now_ns, option.job)).collect();
            oracle.planned[which].instance = at;
            let with = oracle.sum_ns(at, &first, fleet, now_ns) as i128;
            // Nowhere.
            oracle.planned[which].instance = usize::MAX;
            with - oracle.sum_ns(at, &first, fleet, now_ns) as i128
        };
        let costs = (0..self.instances).map(|at| (added(self, at), at != before, at));
        let best = costs.min().map_or(before, |(_, _, at)| at);
        self.planned[which].instance = best;
        best != before
    }

    /// Tries some of those to come elsewhere, the next ones each time.
    fn move_some(&mut self, now: &Choice, fleet: &Fleet<'_>, now_ns: u64) -> bool {
        let mut is_other = false;
        for _ in 0..MOVES.min(self.planned.len()) {
            self.turn = (self.turn + 1) % self.planned.len();
            is_other |= self.place(self.turn, (Some(now), fleet), now_ns);
        }
        is_other
    }

    /// A request as it will come, wherever it goes.
    fn to_come(&self, nth: usize, fleet: &Fleet<'_>) -> (u64, Job) {
        let Fleet { workload, setup, view, .. } = fleet;
        let request = &workload.requests[nth];
        let fetched_tokens = (self.seen_blocks[nth] * workload.block_tokens).min(request.input_tokens);
        let profile = &setup.profile;
        let lane = profile.dram.through(profile.network);
        let moved_ns = profile.stream_ns(lane, fetched_tokens.into());
        let left = request.input_tokens - fetched_tokens;
        let prefill_us = (profile.prefill_ns(fetched_tokens.into(), left.into()) + profile.step_ns) / 1_000;
        let at = Timestamp(request.arrival_ns / 1_000);
        let job = Job {
            nth,
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            fetched_tokens,
            resident_tokens: 0,
            ready_ns: request.arrival_ns + if fetched_tokens > 0 { lane.latency_ns + moved_ns } else { 0 },
            turn: view
                .fleet
                .instances()
                .first()
                .map_or(at, |instance| turn_of(instance, Standing::default(), prefill_us, at)),
        };
        (request.arrival_ns, job)
    }
}

/// The production scheduler's plan for each instance, with and without what is being computed there for others: first what it would choose itself.
fn options(nth: usize, ask: &Ask<'_>, fleet: &Fleet<'_>, now_ns: u64) -> Vec<Choice> {
    let known = &fleet.view.fleet;
    let Ok(chosen) = choose(&ask.request, ask.held(), known, ask.now) else { return Vec::new() };
    let open = chosen.candidates.iter().filter(|candidate| candidate.filtered.is_none());
    let mut all = Vec::new();
    for candidate in open {
        let among = [candidate.instance];
        let eligible = Eligible { among: Some(&among), ..Eligible::default() };
        let alone = |held: Held<'_>| choose_among(&ask.request, held, eligible, known, ask.now).ok();
        let with = alone(ask.held());
        let without = alone(Held { coming: &[], ..ask.held() }).filter(|_| !ask.coming.is_empty());
        for decision in [with, without].into_iter().flatten() {
            let InstanceId(own) = decision.instance;
            let fetched: Fetched =
                fleet.store.would_fetch(&decision.sources, NodeId(own), fleet.workload.block_tokens, now_ns);
            let job = fleet.job(nth, Plan::of(&decision), fetched);
            all.push(Choice { decision, job });
        }
    }
    all
}
