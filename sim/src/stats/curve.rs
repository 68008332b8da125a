//! Hit rate against capacity: every requested policy, and the bound that knows the future.
//!
//! Not here: the replay itself ([`crate::cache`]).

use crate::cache::optimal::simulate_optimal;
use crate::cache::simulate;
use crate::trace::Request;
use kv_core::evict;
use serde::Serialize;

/// Name of the offline bound, accepted beside the names of the policies.
pub const OPTIMAL: &str = "opt";

/// Shares of the unique blocks at which the reference figures were taken.
pub const SHARES: [f64; 6] = [0.01, 0.02, 0.05, 0.10, 0.20, 0.40];

/// Hit rate of one policy at one capacity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CapacityPoint {
    /// Name of the policy, or [`OPTIMAL`].
    pub policy: String,
    /// Capacity over unique blocks.
    pub capacity_share: f64,
    /// Capacity in blocks.
    pub capacity_blocks: u64,
    /// Hits over accesses, 0 to 1.
    pub hit_rate: f64,
}

/// Replays the requests once per policy and share of `unique_blocks`. Unknown names give no point:
/// check them against [`evict::NAMES`] and [`OPTIMAL`] first.
#[must_use]
pub fn capacity_curve(
    requests: &[Request],
    unique_blocks: u64,
    policies: &[&str],
    shares: &[f64],
    seed: u64,
) -> Vec<CapacityPoint> {
    let mut points = Vec::with_capacity(policies.len() * shares.len());
    for policy in policies {
        for &capacity_share in shares {
            let capacity = ((capacity_share * unique_blocks as f64) as usize).max(1);
            let outcome = match evict::by_name(policy, seed) {
                Some(fresh) => simulate(fresh, capacity, requests),
                None if *policy == OPTIMAL => simulate_optimal(requests, capacity),
                None => continue,
            };
            points.push(CapacityPoint {
                policy: (*policy).to_owned(),
                capacity_share,
                capacity_blocks: capacity as u64,
                hit_rate: outcome.hit_rate(),
            });
        }
    }
    points
}
