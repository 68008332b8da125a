//! Routers that reject requests if not all can be served in time: the production scheduler with its
//! admission, and any other with a threshold on the prediction for its chosen instance.
//!
//! Not here: the admission (`kv_core::schedule::Admission`), and how the best threshold is found
//! (`goodput.rs`).

use std::sync::Arc;

use kv_core::schedule::{Admission, AdmissionRequest, RouteRequest, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{RouteQuery, RouterView};

/// The production scheduler with request limits.
pub(crate) struct AdmittingRouter {
    admission: Admission,
    limits: Arc<[(u64, u64)]>,
}

impl AdmittingRouter {
    /// `limits` holds each request's limits in microseconds: time to first token, and inter-token
    /// latency (0 for none).
    pub(crate) fn new(limits: Arc<[(u64, u64)]>) -> AdmittingRouter {
        AdmittingRouter { admission: Admission::default(), limits }
    }
}

/// The limits of this request.
fn limits_of(limits: &[(u64, u64)], ask: &RouteQuery<'_>) -> (u64, u64) {
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
        let offer = AdmissionRequest::of(&decision, (request.tenant, 0), Some(ttft_max_us));
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

/// Another router with thresholds: rejects a request if the production scheduler's prediction for
/// its instance exceeds a share of either limit.
pub(crate) struct ThresholdRouter {
    pub(crate) inner: Box<dyn Router>,
    /// See [`AdmittingRouter::new`].
    pub(crate) limits: Arc<[(u64, u64)]>,
    /// Maximum shares of the TTFT limit and of the inter-token latency limit.
    pub(crate) shares: [f64; 2],
}

impl Router for ThresholdRouter {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn route(&mut self, ask: &RouteQuery<'_>, view: &RouterView) -> Route {
        let (ttft_max_us, tbt_max_us) = limits_of(&self.limits, ask);
        let is_within = |us: u64, limit_us: u64, share: f64| us as f64 <= limit_us as f64 * share;
        match self.inner.route(ask, view) {
            Route::To(decision)
                if is_within(decision.predicted.ttft_us(), ttft_max_us, self.shares[0])
                    && is_within(decision.predicted.tbt_us, tbt_max_us, self.shares[1]) =>
            {
                Route::To(decision)
            }
            _ => Route::Reject,
        }
    }

    fn keeps_fetched(&self) -> bool {
        self.inner.keeps_fetched()
    }
}
