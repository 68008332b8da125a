//! Routers that turn requests away when not all can be served in time: the production scheduler with its admission, and any other with a
//! threshold on what is predicted for the instance that it chose.
//!
//! Not here: the admission (`kv_core::schedule::Admission`), and how the threshold of another is found (`goodput.rs`).

use kv_core::schedule::{Admission, Offer, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{Ask, View};

/// The production scheduler as routers run it where requests have a limit.
pub(super) struct Admitting {
    admission: Admission,
    ttft_max_us: u64,
}

impl Admitting {
    pub(super) fn new(ttft_max_us: u64) -> Admitting {
        Admitting { admission: Admission::default(), ttft_max_us }
    }
}

impl Router for Admitting {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let Ok(decision) = choose(&ask.request, ask.held(), &view.fleet, ask.now) else {
            return Route::Reject;
        };
        let offer = Offer {
            tenant: ask.request.tenant,
            priority: 0,
            cost_us: decision.predicted.prefill_us,
            ttft_us: decision.predicted.ttft_us(),
            ttft_max_us: Some(self.ttft_max_us),
        };
        match self.admission.admit(&offer, ask.now) {
            Ok(()) => Route::To(decision),
            Err(_) => Route::Reject,
        }
    }
}

/// Another router, which turns away what it would send where more than this is predicted: until the first token, as the production scheduler
/// predicts it of that instance.
pub(super) struct Threshold {
    pub(super) inner: Box<dyn Router>,
    pub(super) ttft_max_us: u64,
}

impl Router for Threshold {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        match self.inner.route(ask, view) {
            Route::To(decision) if decision.predicted.ttft_us() <= self.ttft_max_us => Route::To(decision),
            _ => Route::Reject,
        }
    }
}
