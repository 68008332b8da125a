//! A uniformly random instance. This is "Random" of Harchol-Balter, Crovella and Murta, "On
//! Choosing a Task Assignment Policy for a Distributed Server System" (Performance Tools '98), and
//! `random` of the SGLang Model Gateway (documentation, "Load Balancing Policies", commit 0f4513c).
//!
//! Not here: load or cache awareness.

use kv_core::id::InstanceId;
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, route_to};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Random routing.
pub(super) struct Random(ChaCha8Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(ChaCha8Rng::seed_from_u64(seed))
    }
}

impl Router for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let drawn = self.0.random_range(0..view.instance_use.len().max(1) as u32);
        route_to(ask, view, Some(InstanceId(drawn)))
    }
}
