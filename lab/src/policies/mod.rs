//! Runs every eviction policy on the same traffic at the same capacities: hit rates, and distance
//! to the bounds.
//!
//! Replays are independent, so they are spread over threads; the result does not depend on their
//! number. Not here: sources of traffic, and tables and plots (the `kvfleet-lab policies`
//! command).

mod judge;

pub use judge::{BaselineDistance, BoundGap, HitRateSpread, PolicyJudgement, hit_rate_spread, judge_policy};

use crate::evict;
use kvfleet_sim::cache::optimal::FutureUses;
use kvfleet_sim::cache::simulate;
use kvfleet_sim::generate::{TraceGenerator, TraceSpec, simulate_knowable};
use kvfleet_sim::stats::curve::OPTIMAL;
use kvfleet_sim::trace::{Request, TurnInference};
use serde::Serialize;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Capacities to compare, as shares of the unique blocks: from a tier for a few requests to one for
/// most blocks that are ever reused.
pub const SHARES: [f64; 9] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4];

/// Name of the bound that knows the traffic model but not the future ([`simulate_knowable`]).
pub const KNOWABLE: &str = "knowable";

/// Requests of one kind, ready to be replayed.
pub struct Traffic {
    /// Name; several seeds of one generator share it.
    pub name: String,
    /// Seed of generated traffic; `None` for recorded traffic.
    pub seed: Option<u64>,
    /// Parameters of generated traffic.
    spec: Option<TraceSpec>,
    requests: Vec<Request>,
    unique_blocks: usize,
}

impl Traffic {
    /// Generates traffic.
    #[must_use]
    pub fn generated(spec: TraceSpec) -> Self {
        let recorded = Traffic::recorded(spec.kind.name(), TraceGenerator::new(spec).collect());
        Traffic { seed: Some(spec.seed), spec: Some(spec), ..recorded }
    }

    /// Takes requests in order of arrival. Missing turns are inferred ([`TurnInference`]).
    #[must_use]
    pub fn recorded(name: &str, mut requests: Vec<Request>) -> Self {
        let mut inference = TurnInference::new();
        requests.iter_mut().for_each(|request| inference.infer(request));
        let unique: HashSet<u64> = requests.iter().flat_map(|request| &request.blocks).copied().collect();
        Traffic { name: name.to_owned(), seed: None, spec: None, requests, unique_blocks: unique.len() }
    }

    /// All requests, in order of arrival.
    #[must_use]
    pub fn all(&self) -> &[Request] {
        &self.requests
    }

    /// Number of requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Number of unique blocks, the base of capacity shares.
    #[must_use]
    pub fn unique_blocks(&self) -> usize {
        self.unique_blocks
    }
}

/// Hit rate of one policy at one capacity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyTrial {
    /// Name of the traffic.
    pub traffic: String,
    /// Seed of generated traffic; `None` for recorded traffic.
    pub seed: Option<u64>,
    /// Name of the policy, or [`OPTIMAL`] or [`KNOWABLE`].
    pub policy: String,
    /// Capacity over unique blocks.
    pub capacity_share: f64,
    /// Capacity in blocks.
    pub capacity_blocks: usize,
    /// Hits over blocks requested, 0 to 1.
    pub hit_rate: f64,
}

/// Replays the traffic under each policy (and the bounds, if [`OPTIMAL`] or [`KNOWABLE`] are named)
/// at each share of its unique blocks, on `threads` threads. Unknown names give no trial, nor does
/// [`KNOWABLE`] for recorded traffic.
#[must_use]
pub fn replay_all(traffic: &Traffic, policies: &[&str], shares: &[f64], threads: usize) -> Vec<PolicyTrial> {
    let future = FutureUses::new(&traffic.requests);
    let cells: Vec<(&str, f64)> =
        policies.iter().flat_map(|&policy| shares.iter().map(move |&share| (policy, share))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(policy, share)) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.extend(run_trial(traffic, &future, policy, share));
        }
        done
    };
    let mut trials: Vec<PolicyTrial> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        // A panic in a replay is a defect of a policy, and must reach the caller.
        let joined = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        own.into_iter().chain(joined.flatten()).collect()
    });
    let place = |trial: &PolicyTrial| policies.iter().position(|policy| trial.policy == *policy);
    trials.sort_by(|a, b| place(a).cmp(&place(b)).then(a.capacity_share.total_cmp(&b.capacity_share)));
    trials
}

fn run_trial(
    traffic: &Traffic,
    future: &FutureUses<'_>,
    policy: &str,
    capacity_share: f64,
) -> Option<PolicyTrial> {
    let capacity_blocks = ((capacity_share * traffic.unique_blocks as f64) as usize).max(1);
    // No policy is randomised so far; the traffic's seed is there for one that is.
    let outcome = match evict::by_name(policy, traffic.seed.unwrap_or(0)) {
        Some(fresh) => simulate(fresh, capacity_blocks, &traffic.requests),
        None if policy == OPTIMAL => future.simulate(capacity_blocks),
        None if policy == KNOWABLE => simulate_knowable(traffic.spec?, &[capacity_blocks]).pop()?,
        None => return None,
    };
    Some(PolicyTrial {
        traffic: traffic.name.clone(),
        seed: traffic.seed,
        policy: policy.to_owned(),
        capacity_share,
        capacity_blocks,
        hit_rate: outcome.hit_rate(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kvfleet_sim::generate::TrafficKind;

    #[test]
    fn trials_are_complete_and_independent_of_the_thread_count() {
        let traffic =
            Traffic::generated(TraceSpec { block_tokens: 64, ..TraceSpec::new(TrafficKind::Agent, 2, 300) });
        let policies = [evict::NAMES.as_slice(), &[KNOWABLE, OPTIMAL, "clairvoyant"]].concat();
        let alone = replay_all(&traffic, &policies, &[0.01, 0.1], 1);
        assert_eq!(alone.len(), (evict::NAMES.len() + 2) * 2);
        assert_eq!(alone, replay_all(&traffic, &policies, &[0.01, 0.1], 3));
        assert_eq!(traffic.requests(), 300);
        assert!(
            alone
                .iter()
                .all(|trial| trial.hit_rate <= 1.0 && trial.capacity_blocks < traffic.unique_blocks())
        );
    }

    #[test]
    fn the_knowable_bound_is_between_the_policies_and_the_optimum() {
        for kind in TrafficKind::ALL {
            let traffic =
                Traffic::generated(TraceSpec { block_tokens: 64, ..TraceSpec::new(kind, 3, 2_000) });
            let policies = [evict::NAMES.as_slice(), &[KNOWABLE, OPTIMAL]].concat();
            for share in [0.002, 0.02, 0.2] {
                let rates: Vec<(String, f64)> = replay_all(&traffic, &policies, &[share], 2)
                    .into_iter()
                    .map(|trial| (trial.policy, 100.0 * trial.hit_rate))
                    .collect();
                let of = |name: &str| rates.iter().find(|(policy, _)| policy == name).unwrap().1;
                let (knowable, optimal) = (of(KNOWABLE), of(OPTIMAL));
                assert!(knowable < optimal + 1e-9, "{kind:?} {share}: {knowable} of {optimal}");
                // It bounds the expectation; a policy may be lucky with a few thousand requests.
                for (policy, rate) in &rates[..evict::NAMES.len()] {
                    assert!(*rate < knowable + 0.5, "{kind:?} {share}: {policy} {rate} above {knowable}");
                }
            }
        }
    }
}
