//! Instances in rotation. This is "Round-Robin" of Harchol-Balter, Crovella and Murta, "On Choosing
//! a Task Assignment Policy for a Distributed Server System" (Performance Tools '98), and
//! `round_robin` of the SGLang Model Gateway (documentation, "Load Balancing Policies", commit
//! 0f4513c).
//!
//! Not here: load or cache awareness.

use kv_core::id::InstanceId;
use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, route_to};

/// Round-robin routing.
#[derive(Default)]
pub(super) struct RoundRobin(u32);

impl Router for RoundRobin {
    fn name(&self) -> &'static str {
        "round-robin"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let next = self.0 % view.instance_use.len().max(1) as u32;
        self.0 = self.0.wrapping_add(1);
        route_to(ask, view, Some(InstanceId(next)))
    }
}
