//! The fewest prompt tokens ahead, as reported and routed since; then the fewest requests.

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
