//! Every eviction policy on the same traffic at the same capacities: what each hits, and how near to the bound.
//!
//! Replays do not touch each other, so they are spread over threads; the result does not depend on how many.
//! Not here: where traffic comes from, and tables and plots (the `kvfleet trace policies` command).

mod judge;

pub use judge::{Distance, Gap, Judgement, Spread, judge, spread};

use crate::cache::optimal::Future;
use crate::cache::simulate;
use crate::generate::{Generator, Spec, simulate_knowable};
use crate::stats::curve::OPTIMAL;
use crate::trace::{Request, TurnInference};
use kv_core::evict;
use serde::Serialize;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Capacities compared, as shares of the unique blocks: from a tier that holds a few requests to one that
/// holds most of what will ever be used again.
pub const SHARES: [f64; 9] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4];

/// Name of the bound that knows how traffic is made but not the future ([`simulate_knowable`]).
pub const KNOWABLE: &str = "knowable";

/// Requests of one kind, ready to be replayed.
pub struct Traffic {
    /// What it is called; several seeds of one generator have the same name.
    pub name: String,
    /// Seed of generated traffic.
    pub seed: Option<u64>,
    /// How it is made, where that is known.
    spec: Option<Spec>,
    requests: Vec<Request>,
    unique_blocks: usize,
}

impl Traffic {
    /// Generates requests.
    #[must_use]
    pub fn generated(spec: Spec) -> Self {
        let recorded = Traffic::recorded(spec.kind.name(), Generator::new(spec).collect());
        Traffic { seed: Some(spec.seed), spec: Some(spec), ..recorded }
    }

    /// Takes requests in order of arrival. Turns that are not said are inferred ([`TurnInference`]).
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

    /// Different blocks, which capacities are shares of.
    #[must_use]
    pub fn unique_blocks(&self) -> usize {
        self.unique_blocks
    }
}

/// What one policy hit at one capacity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Name of the traffic.
    pub traffic: String,
    /// Its seed, where it was generated.
    pub seed: Option<u64>,
    /// Name of the policy, or [`OPTIMAL`] or [`KNOWABLE`].
    pub policy: String,
    /// Capacity over unique blocks.
    pub capacity_share: f64,
    /// Capacity in blocks.
    pub capacity_blocks: usize,
    /// Hits over blocks asked, 0 to 1.
    pub hit_rate: f64,
}

/// Replays the traffic under each policy (and the bounds, where [`OPTIMAL`] and [`KNOWABLE`] are named) at each share of
/// its unique blocks, on as many threads as said. Unknown names give no trial, nor does [`KNOWABLE`] for recorded traffic.
#[must_use]
pub fn replay_all(traffic: &Traffic, policies: &[&str], shares: &[f64], threads: usize) -> Vec<Trial> {
    let future = Future::of(&traffic.requests);
    let cells: Vec<(&str, f64)> =
        policies.iter().flat_map(|&policy| shares.iter().map(move |&share| (policy, share))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some(&(policy, share)) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.extend(trial(traffic, &future, policy, share));
        }
        done
    };
    let mut trials: Vec<Trial> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        // A panic in a replay is a defect of a policy, and must be seen where all is run.
        let joined = others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        own.into_iter().chain(joined.flatten()).collect()
    });
    let place = |trial: &Trial| policies.iter().position(|policy| trial.policy == *policy);
    trials.sort_by(|a, b| place(a).cmp(&place(b)).then(a.capacity_share.total_cmp(&b.capacity_share)));
    trials
}

fn trial(traffic: &Traffic, future: &Future<'_>, policy: &str, capacity_share: f64) -> Option<Trial> {
    let capacity_blocks = ((capacity_share * traffic.unique_blocks as f64) as usize).max(1);
    // No policy draws; the seed is that of the traffic in case one does some day.
    let outcome = match evict::by_name(policy, traffic.seed.unwrap_or(0)) {
        Some(fresh) => simulate(fresh, capacity_blocks, &traffic.requests),
        None if policy == OPTIMAL => future.simulate(capacity_blocks),
        None if policy == KNOWABLE => simulate_knowable(traffic.spec?, &[capacity_blocks]).pop()?,
        None => return None,
    };
    Some(Trial {
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
    use crate::generate::Kind;

    #[test]
    fn the_number_of_threads_changes_nothing_and_every_cell_is_there() {
        let traffic = Traffic::generated(Spec { block_tokens: 64, ..Spec::new(Kind::Agent, 2, 300) });
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
    fn who_knows_how_traffic_is_made_is_between_the_policies_and_who_knows_the_future() {
        for kind in Kind::ALL {
            let traffic = Traffic::generated(Spec { block_tokens: 64, ..Spec::new(kind, 3, 2_000) });
            let policies = [evict::NAMES.as_slice(), &[KNOWABLE, OPTIMAL]].concat();
            for share in [0.002, 0.02, 0.2] {
                let rates: Vec<(String, f64)> = replay_all(&traffic, &policies, &[share], 2)
                    .into_iter()
                    .map(|trial| (trial.policy, 100.0 * trial.hit_rate))
                    .collect();
                let of = |name: &str| rates.iter().find(|(policy, _)| policy == name).unwrap().1;
                let (knowable, optimal) = (of(KNOWABLE), of(OPTIMAL));
                assert!(knowable < optimal + 1e-9, "{kind:?} {share}: {knowable} of {optimal}");
                // It bounds what may be expected; a policy may have luck with a few thousand draws.
                for (policy, rate) in &rates[..evict::NAMES.len()] {
                    assert!(*rate < knowable + 0.5, "{kind:?} {share}: {policy} {rate} above {knowable}");
                }
            }
        }
    }
}
