//! The production scheduler with its admission: rejects requests if not all can be served in time.
//!
//! Not here: the admission (`kv_core::schedule::Admission`), and its results beside those of other
//! routers (`lab/src/routers/goodput.rs`).

use std::sync::Arc;

use kv_core::schedule::{Admission, AdmissionRequest, RouteRequest, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{RouteQuery, RouterView};

/// The production scheduler with request limits.
pub struct AdmittingRouter {
    admission: Admission,
    limits: Arc<[(u64, u64)]>,
}

impl AdmittingRouter {
    /// `limits` holds each request's limits in microseconds: time to first token, and inter-token
    /// latency (0 for none).
    #[must_use]
    pub fn new(limits: Arc<[(u64, u64)]>) -> AdmittingRouter {
        AdmittingRouter { admission: Admission::default(), limits }
    }
}

/// Limits of a request by its index: time to first token, and inter-token latency. A request
/// without an entry has none.
#[must_use]
pub fn limits_of(limits: &[(u64, u64)], ask: &RouteQuery<'_>) -> (u64, u64) {
    let nth = usize::try_from(ask.request.request.0).unwrap_or(usize::MAX);
    limits.get(nth).copied().unwrap_or((u64::MAX, 0))
}

impl Router for AdmittingRouter {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let (ttft_max_us, tbt_max_us) = limits_of(&self.limits, ask);
        let standing = self.admission.queue_priority(ask.request.tenant, 0, &view.fleet, ask.now);
        let request = RouteRequest { ttft_max_us, tbt_max_us, queue_priority: standing, ..ask.request };
        let Ok(decision) = choose(&request, ask.held(), &view.fleet, ask.now) else {
            return Route::Reject;
        };
        let offer = AdmissionRequest::of(&decision, request.tenant, 0, Some(ttft_max_us));
        match self.admission.admit(&offer, ask.now) {
            Ok(()) => {
                let waiting = view.fleet.waiting_tokens();
                self.admission.record(request.tenant, decision.recompute_tokens, waiting, ask.now);
                Route::To(decision)
            }
            Err(_) => Route::Reject,
        }
    }
}
