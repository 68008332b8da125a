//! The production scheduler itself, as routers run it.
//!
//! Not here: the scheduler (`kv_core::schedule`).

use kv_core::schedule::{Admission, AdmissionRequest, RouteRequest, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{RouteQuery, RouterView};

/// The production scheduler without request limits, so all requests are admitted.
#[derive(Default)]
pub struct Production {
    admission: Admission,
}

impl Router for Production {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let tenant = ask.request.tenant;
        let standing = self.admission.queue_priority(tenant, 0, &view.fleet, ask.now);
        let request = RouteRequest { queue_priority: standing, ..ask.request };
        let Ok(decision) = choose(&request, ask.held(), &view.fleet, ask.now) else { return Route::Reject };
        let offer = AdmissionRequest::of(&decision, tenant, 0, None);
        match self.admission.admit(&offer, ask.now) {
            Ok(()) => {
                let waiting = view.fleet.waiting_tokens();
                self.admission.record(tenant, decision.recompute_tokens, waiting, ask.now);
                Route::To(decision)
            }
            Err(_) => Route::Reject,
        }
    }
}
