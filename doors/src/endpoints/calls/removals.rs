//! Endpoints that are to be removed once they have ended what they had.
//!
//! Not here: who asked for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::InstanceId;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::endpoints::Endpoints;

/// Between two looks at who is done.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Shortest that an engine is waited for: a request may be on its way, and its load is some time old.
const SETTLES: Duration = Duration::from_secs(1);

/// Which, and until when they are waited for. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Removals {
    endpoints: Endpoints,
    all: Arc<Mutex<BTreeMap<InstanceId, Waits>>>,
}

#[derive(Clone, Copy, Debug)]
struct Waits {
    since: Instant,
    until: Instant,
}

impl Removals {
    pub(super) fn new(endpoints: Endpoints) -> Removals {
        Removals { endpoints, all: Arc::default() }
    }

    /// Drains one, and removes it when it is idle, or after so long.
    pub(super) fn remove_within(&self, instance: InstanceId, wait: Duration) {
        self.endpoints.drain(instance);
        let since = Instant::now();
        self.all.lock().insert(instance, Waits { since, until: since + wait });
    }

    /// One stays after all.
    pub(super) fn keep(&self, instance: InstanceId) {
        self.all.lock().remove(&instance);
    }

    /// Removes who is done, until stopped.
    pub(super) async fn run(self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(LOOK_EVERY)).await.is_some() {
            self.look(Instant::now());
        }
    }

    fn look(&self, now: Instant) {
        self.all.lock().retain(|instance, waits| {
            let is_over = now >= waits.until || (now >= waits.since + SETTLES && self.is_idle(*instance));
            if is_over {
                self.endpoints.remove(*instance);
                tracing::info!(instance = instance.0, "an engine is removed, as asked");
            }
            !is_over
        });
    }

    /// Whether it said lately that it has nothing to do.
    fn is_idle(&self, instance: InstanceId) -> bool {
        let load = self.endpoints.standing(instance).and_then(|standing| standing.load);
        load.is_some_and(|(heard, at)| (heard.running, heard.waiting) == (0, 0) && at.elapsed() < SETTLES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoints::{Endpoint, Heard, Origin};

    #[test]
    fn who_is_idle_goes_soon_who_is_busy_late_and_who_is_kept_not_at_all() {
        let removals = Removals::new(Endpoints::default());
        let (idle, busy, kept) = (InstanceId(1), InstanceId(2), InstanceId(3));
        for (instance, running) in [(idle, 0), (busy, 1), (kept, 0)] {
            let (authority, origin) = ("a:1".to_owned(), Origin::Called);
            removals.endpoints.put(Endpoint {
                instance,
                authority,
                fetches: false,
                role: kv_core::schedule::Role::Both,
                place: String::new(),
                draining: false,
                origin,
            });
            let heard = Heard { running, ..Heard::default() };
            let now = std::time::Instant::now();
            removals.endpoints.note(instance, "a:1", |standing| standing.load = Some((heard, now)));
            removals.remove_within(instance, Duration::from_secs(100));
        }
        removals.keep(kept);
        let left_after = |seconds| {
            removals.look(Instant::now() + Duration::from_secs(seconds));
            removals.endpoints.list().iter().map(|endpoint| endpoint.instance).collect::<Vec<_>>()
        };
        assert_eq!(left_after(0), [idle, busy, kept], "a request may be on its way");
        assert_eq!(left_after(2), [busy, kept]);
        assert_eq!(left_after(99), [busy, kept]);
        assert_eq!(left_after(101), [kept]);
        assert_eq!(left_after(9_999), [kept]);
    }
}
