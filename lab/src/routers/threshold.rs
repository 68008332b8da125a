//! Another router that rejects requests by a threshold on the prediction for its chosen instance.
//!
//! Not here: how the best threshold is found (`goodput.rs`).

use std::sync::Arc;

use kvfleet_sim::fleet::{RouteQuery, RouterView};
use kvfleet_sim::routers::{Route, Router, limits_of};

/// Another router with thresholds: rejects a request if the production scheduler's prediction for
/// its instance exceeds a share of either limit.
pub struct ThresholdRouter {
    /// The router.
    pub inner: Box<dyn Router>,
    /// See [`kvfleet_sim::routers::AdmittingRouter::new`].
    pub limits: Arc<[(u64, u64)]>,
    /// Maximum shares of the TTFT limit and of the inter-token latency limit.
    pub shares: [f64; 2],
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
