//! The fewest prompt tokens ahead, as reported and routed since: "Dynamic" (least work remaining) of Harchol-Balter, Crovella and Murta, "On Choosing a
//! Task Assignment Policy for a Distributed Server System" (Performance Tools '98), with tokens to prefill as the work. Of equal ones the fewest
//! requests, which is ours.
//!
//! Not here: any regard to caches.

use super::{Route, Router, cheapest, in_flight, to};
use crate::fleet::{Ask, View};

/// See the file.
pub(super) struct LeastLoaded;

impl Router for LeastLoaded {
    fn name(&self) -> &'static str {
        "least-loaded"
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let cost = |instance| view.load(instance).tokens_ahead() as f64 + in_flight(view, instance) / 1e6;
        to(ask, view, cheapest(view, cost))
    }
}
