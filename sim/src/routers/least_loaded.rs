//! Least prompt tokens queued, as reported and routed since. This is "Dynamic" (least work
//! remaining) of Harchol-Balter, Crovella and Murta, "On Choosing a Task Assignment Policy for a
//! Distributed Server System" (Performance Tools '98), with tokens to prefill as the work. Ties go
//! to the fewest requests, which is our addition.
//!
//! Not here: cache awareness.

use super::{Route, Router, cheapest, in_flight_load, route_to};
use crate::fleet::{RouteQuery, RouterView};

/// Least-loaded routing.
pub struct LeastLoaded;

impl Router for LeastLoaded {
    fn name(&self) -> &'static str {
        "least-loaded"
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let cost =
            |instance| view.load(instance).tokens_ahead() as f64 + in_flight_load(view, instance) / 1e6;
        route_to(ask, view, cheapest(view, cost))
    }
}
