//! Routers that turn requests away when not all can be served in time: the production scheduler with its admission, and any other with a
//! threshold on what is predicted for the instance that it chose.
//!
//! Not here: the admission (`kv_core::schedule::Admission`), and how the threshold of another is found (`goodput.rs`).

use std::sync::Arc;

use kv_core::schedule::{Admission, Offer, RouteRequest, choose};

use super::{PRODUCTION, Route, Router};
use crate::fleet::{Ask, View};

/// The production scheduler as routers run it where requests have a limit.
pub(crate) struct Admitting {
    admission: Admission,
    limits: Arc<[(u64, u64)]>,
}

impl Admitting {
    /// Each request with its limits: until the first token and between two of the others, in microseconds; a time between tokens of 0 is none.
    pub(crate) fn new(limits: Arc<[(u64, u64)]>) -> Admitting {
        Admitting { admission: Admission::default(), limits }
    }
}

/// The limits of the request that is asked for.
fn limits_of(limits: &[(u64, u64)], ask: &Ask<'_>) -> (u64, u64) {
    let nth = usize::try_from(ask.request.request.0).unwrap_or(usize::MAX);
    limits.get(nth).copied().unwrap_or((u64::MAX, 0))
}

impl Router for Admitting {
    fn name(&self) -> &'static str {
        PRODUCTION
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
        let (ttft_max_us, tbt_max_us) = limits_of(&self.limits, ask);
        let standing = self.admission.standing(ask.request.tenant, 0, &view.fleet, ask.now);
        let request = RouteRequest { ttft_max_us, tbt_max_us, standing, ..ask.request };
        let Ok(decision) = choose(&request, ask.held(), &view.fleet, ask.now) else {
            return Route::Reject;
        };
        let offer = Offer::of(&decision, (request.tenant, 0), Some(ttft_max_us));
        match self.admission.admit(&offer, ask.now) {
            Ok(()) => {
                let waiting = view.fleet.waiting_tokens();
                self.admission.sent(request.tenant, decision.recompute_tokens, waiting, ask.now);
                Route::To(decision)
            }
            Err(_) => Route::Reject,
        }
    }
}

/// Another router, which turns away what it would send where more than a share of either limit is predicted, as the production scheduler predicts it of
/// that instance.
pub(crate) struct Threshold {
    pub(crate) inner: Box<dyn Router>,
    /// See [`Admitting::new`].
    pub(crate) limits: Arc<[(u64, u64)]>,
    /// Of the time until the first token, and of that between two of the others.
    pub(crate) shares: [f64; 2],
}

impl Router for Threshold {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn route(&mut self, ask: &Ask<'_>, view: &View) -> Route {
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
