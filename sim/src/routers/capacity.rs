//! Capacity of a fleet: the highest rate of requests that it keeps up with under least-loaded
//! routing. Loads are shares of it.
//!
//! Not here: a single run (`crate::fleet`).

use super::{FetchScope, LeastLoaded};
use crate::fleet::{FleetSetup, ServedRequest, Workload, run};

/// Time to first token and inter-token latency of a request alone on an instance without cached
/// blocks.
#[must_use]
pub fn unloaded_ns(input_tokens: u32, setup: &FleetSetup) -> (u64, u64) {
    let (profile, chunk_tokens) = (&setup.profile, setup.batch.chunk_tokens.max(1));
    let steps = u64::from(input_tokens.div_ceil(chunk_tokens));
    let first_ns = profile.prefill_ns(0, input_tokens.into()) + steps * profile.step_ns;
    (first_ns, profile.step_ns + profile.step_ns_per_running)
}

/// Maximum time after the last arrival, as a share of the workload's duration, for a fleet that
/// keeps up.
const OVERRUN_SHARE_MAX: f64 = 0.03;

/// Bisections of the capacity's range.
const HALVINGS: u32 = 6;

/// Maximum doublings of the range's upper end while the fleet keeps up with it.
const DOUBLINGS: u32 = 8;

/// Highest rate of requests per second that the fleet keeps up with, with a pool of KV: none waits
/// for its first token far beyond the last arrival. A request's own service time does not count as
/// waiting, and neither does decoding. A burst of all requests would measure less, because no
/// request could reuse blocks of an earlier one.
#[must_use]
pub fn capacity(workload: &Workload, setup: &FleetSetup) -> f64 {
    let setup = FleetSetup { fetch_scope: FetchScope::Pool, ..setup.clone() };
    let keeps_up = |per_s: f64| {
        let paced = workload.at_rate(per_s);
        let report = run(&paced, &setup, &mut LeastLoaded);
        let waited_ns = |served: &ServedRequest| {
            let request = &paced.requests[served.nth];
            request.arrival_ns + served.ttft_ns.saturating_sub(unloaded_ns(request.input_tokens, &setup).0)
        };
        let last_ns = report.served.iter().map(waited_ns).max().unwrap_or_default();
        last_ns as f64 <= paced.last_ns() as f64 * (1.0 + OVERRUN_SHARE_MAX)
    };
    let report = run(&workload.with_pace(0.0), &setup, &mut LeastLoaded);
    let at_once = workload.len() as f64 / (report.ended_ns.max(1) as f64 / 1e9);
    let (mut low, mut high) = (at_once / 2.0, at_once * 4.0);
    // Only a burst includes the last tokens in its duration, and these may dominate it.
    for _ in 0..DOUBLINGS {
        if !keeps_up(high) {
            break;
        }
        (low, high) = (high, high * 2.0);
    }
    if !keeps_up(low) {
        // The trace is so short that any burst in it makes some requests wait longer.
        return at_once;
    }
    for _ in 0..HALVINGS {
        // Geometric bisection, because loads are shares of the capacity.
        let middle = (low * high).sqrt();
        if keeps_up(middle) { low = middle } else { high = middle }
    }
    low
}
