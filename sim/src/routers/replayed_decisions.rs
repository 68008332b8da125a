//! The production scheduler with recorded decisions, optionally replaying those of another fleet.
//!
//! Two fleets that decide one request differently hold different blocks afterwards, and all later
//! differences may follow from that. A replaying fleet sends every request where the other one did
//! and records its own decision, so each difference belongs to one decision. Not here: the other
//! fleet.

use kv_core::id::InstanceId;
use kv_core::schedule::{Decision, InstanceFilter, choose, choose_filtered};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{RouteQuery, RouterView};

/// The recording and replaying scheduler.
#[derive(Debug, Default)]
pub struct ReplayedDecisions {
    /// Target instance of each request; `None` where it decides itself.
    targets: Vec<Option<InstanceId>>,
    /// Own decision for each request, by index; `None` if no instance was eligible.
    pub decisions: Vec<Option<Decision>>,
}

impl ReplayedDecisions {
    /// The scheduler without replay.
    #[must_use]
    pub fn recording() -> ReplayedDecisions {
        ReplayedDecisions::default()
    }

    /// Replays these target instances, by index of the request.
    #[must_use]
    pub fn following(targets: Vec<Option<InstanceId>>) -> ReplayedDecisions {
        ReplayedDecisions { targets, decisions: Vec::new() }
    }
}

impl Router for ReplayedDecisions {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let own = choose(&ask.request, ask.held(), &view.fleet, ask.now).ok();
        let nth = usize::try_from(ask.request.request.0).unwrap_or(usize::MAX);
        if self.decisions.len() <= nth {
            self.decisions.resize_with(nth + 1, || None);
        }
        self.decisions[nth].clone_from(&own);
        let led = self.targets.get(nth).copied().flatten();
        let Some(there) = led.filter(|there| own.as_ref().is_none_or(|own| own.instance != *there)) else {
            return own.map_or(Route::Reject, Route::To);
        };
        // The request runs there whatever its prediction.
        let among = [there];
        let eligible =
            InstanceFilter { candidates: Some(&among), is_pinned: true, ..InstanceFilter::default() };
        choose_filtered(&ask.request, ask.held(), eligible, &view.fleet, ask.now)
            .map_or(Route::Reject, Route::To)
    }
}
