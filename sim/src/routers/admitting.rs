//! Routers that turn requests away when not all can be served in time: the production scheduler with its admission, and any other with a
//! threshold on what is predicted for the instance that it chose.
//!
//! Not here: the admission (`kv_core::schedule::Admission`), and how the threshold of another is found (`goodput.rs`).

use kv_core::schedule::{Admission, Offer, RouteRequest, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{Ask, View};

/// The production scheduler as routers run it where requests have a limit.
pub(crate) struct Admitting {
    admission: Admission,
    ttft_max_us: u64,
    tbt_max_us: u64,
}

impl Admitting {
    /// With these limits; a time between tokens of 0 is none.
    pub(crate) fn new(ttft_max_us: u64, tbt_max_us: u64) -> Admitting {
        Admitting { admission: Admission::default(), ttft_max_us, tbt_max_us }
    }
}

impl Router for Admitting {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let request = RouteRequest { tbt_max_us: self.tbt_max_us, ..ask.request };
        let Ok(decision) = choose(&request, ask.held(), &view.fleet, ask.now) else {
            return Route::Reject;
        };
        let offer = Offer::of(&decision, (request.tenant, 0), Some(self.ttft_max_us));
        match self.admission.admit(&offer, ask.now) {
            Ok(()) => Route::To(decision),
            Err(_) => Route::Reject,
        }
    }
}

/// Another router, which turns away what it would send where more than this is predicted: until the first token and between two of the others, as the
/// production scheduler predicts it of that instance.
pub(crate) struct Threshold {
    pub(crate) inner: Box<dyn Router>,
    pub(crate) ttft_max_us: u64,
    pub(crate) tbt_max_us: u64,
}

impl Router for Threshold {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        match self.inner.route(ask, view) {
            Route::To(decision)
                if decision.predicted.ttft_us() <= self.ttft_max_us
                    && decision.predicted.tbt_us <= self.tbt_max_us =>
            {
                Route::To(decision)
            }
            _ => Route::Reject,
        }
    }
}
