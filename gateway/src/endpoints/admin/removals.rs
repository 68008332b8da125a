//! Pending removals of endpoints, which wait until their requests end.
//!
//! Not here: the calls that start them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::InstanceId;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::endpoints::EndpointRegistry;

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Shortest wait before a removal: a request may be on its way, and the reported load lags.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// Pending removals with their deadlines. Clones share state.
#[derive(Clone, Debug)]
pub(super) struct PendingRemovals {
    endpoints: EndpointRegistry,
    all: Arc<Mutex<BTreeMap<InstanceId, Removal>>>,
}

#[derive(Clone, Copy, Debug)]
struct Removal {
    since: Instant,
    until: Instant,
}

impl PendingRemovals {
    pub(super) fn new(endpoints: EndpointRegistry) -> PendingRemovals {
        PendingRemovals { endpoints, all: Arc::default() }
    }

    /// Drains an endpoint, and removes it when it is idle, or after `wait`.
    pub(super) fn remove_within(&self, instance: InstanceId, wait: Duration) {
        self.endpoints.drain(instance);
        let since = Instant::now();
        self.all.lock().insert(instance, Removal { since, until: since + wait });
    }

    /// Cancels a removal.
    pub(super) fn keep(&self, instance: InstanceId) {
        self.all.lock().remove(&instance);
    }

    /// Removes finished endpoints, until stopped.
    pub(super) async fn run(self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await.is_some() {
            self.look(Instant::now());
        }
    }

    fn look(&self, now: Instant) {
        self.all.lock().retain(|instance, waits| {
            let is_over = now >= waits.until || (now >= waits.since + SETTLE_TIME && self.is_idle(*instance));
            if is_over {
                self.endpoints.remove(*instance);
                tracing::info!(instance = instance.0, "an engine was removed as requested");
            }
            !is_over
        });
    }

    /// Whether its latest load, if recent, shows no requests.
    fn is_idle(&self, instance: InstanceId) -> bool {
        let load = self.endpoints.status(instance).and_then(|standing| standing.load);
        load.is_some_and(|(heard, at)| (heard.running, heard.waiting) == (0, 0) && at.elapsed() < SETTLE_TIME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoints::{Endpoint, EngineLoad, Origin};

    #[test]
    fn removes_idle_engines_soon_and_busy_ones_at_the_deadline() {
        let removals = PendingRemovals::new(EndpointRegistry::default());
        let (idle, busy, kept) = (InstanceId(1), InstanceId(2), InstanceId(3));
        for (instance, running) in [(idle, 0), (busy, 1), (kept, 0)] {
            let (authority, origin) = ("a:1".to_owned(), Origin::Admin);
            removals.endpoints.put(Endpoint {
                instance,
                authority,
                is_tls: false,
                fetches: false,
                role: kv_core::schedule::InstanceRole::Both,
                place: String::new(),
                is_draining: false,
                origin,
            });
            let heard = EngineLoad { running, ..EngineLoad::default() };
            let now = std::time::Instant::now();
            removals.endpoints.update_status(instance, "a:1", |standing| standing.load = Some((heard, now)));
            removals.remove_within(instance, Duration::from_secs(100));
        }
        removals.keep(kept);
        let remaining_after = |seconds| {
            removals.look(Instant::now() + Duration::from_secs(seconds));
            removals.endpoints.list().iter().map(|endpoint| endpoint.instance).collect::<Vec<_>>()
        };
        assert_eq!(remaining_after(0), [idle, busy, kept], "a request may be on its way");
        assert_eq!(remaining_after(2), [busy, kept]);
        assert_eq!(remaining_after(99), [busy, kept]);
        assert_eq!(remaining_after(101), [kept]);
        assert_eq!(remaining_after(9_999), [kept]);
    }
}
