//! Longest prefix in the instance's own memory and node: the highest hit rate, as the vLLM
//! Production Stack describes its routing (documentation, "KV Cache Aware Routing", commit
//! a7d2672). Ties go to the least loaded, which is our addition.
//!
//! Not here: other use of the load; later versions of that page have a minimum length and a
//! fallback below it.

use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, cheapest, in_flight_load, route_to};

/// Longest-local-prefix routing.
pub(super) struct LocalPrefix;

impl Router for LocalPrefix {
    fn name(&self) -> &'static str {
        "local-prefix"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let cost = |instance| in_flight_load(view, instance) / 1e6 - f64::from(ask.local_blocks(instance));
        route_to(ask, view, cheapest(view, cost))
    }
}
