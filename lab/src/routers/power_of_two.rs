//! Of two randomly drawn instances, the one with fewer requests in flight (Mitzenmacher, "The power
//! of two choices in randomized load balancing", IEEE TPDS 2001).
//!
//! Not here: cache awareness.

use kv_core::id::InstanceId;
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, in_flight_load, route_to};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Power-of-two-choices routing.
pub(super) struct PowerOfTwo(ChaCha8Rng);

impl PowerOfTwo {
    pub(super) fn new(seed: u64) -> PowerOfTwo {
        PowerOfTwo(ChaCha8Rng::seed_from_u64(seed))
    }
}

impl Router for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power-of-two"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let count = view.instance_use.len().max(1) as u32;
        let first = InstanceId(self.0.random_range(0..count));
        let other = InstanceId((first.0 + self.0.random_range(0..count.max(2) - 1) + 1) % count);
        let is_first = in_flight_load(view, first) <= in_flight_load(view, other);
        route_to(ask, view, Some(if is_first { first } else { other }))
    }
}
