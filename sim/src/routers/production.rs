//! The production scheduler itself, as routers run it.
//!
//! Not here: the scheduler (`kv_core::schedule`).

use kv_core::schedule::{Admission, Offer, RouteRequest, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{Ask, View};

/// See the file. Requests have no limits, and all are let in.
#[derive(Default)]
pub(super) struct Production {
    admission: Admission,
}

impl Router for Production {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let tenant = ask.request.tenant;
        let standing = self.admission.standing(tenant, 0, &view.fleet, ask.now);
        let request = RouteRequest { standing, ..ask.request };
        let Ok(decision) = choose(&request, ask.held(), &view.fleet, ask.now) else { return Route::Reject };
        let offer = Offer::of(&decision, (tenant, 0), None);
        match self.admission.admit(&offer, ask.now) {
            Ok(()) => {
                let waiting = view.fleet.waiting_tokens();
                self.admission.sent(tenant, decision.recompute_tokens, waiting, ask.now);
                Route::To(decision)
            }
            Err(_) => Route::Reject,
        }
    }
}
