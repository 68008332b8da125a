//! The stages of a router's life that its answers depend on: start, drain and stop.
//!
//! Not here: how a router starts and stops (`crate::start`, `crate::handle`).

use kv_core::id::Timestamp;
use tokio_util::sync::CancellationToken;

/// Start, drain and stop of this router.
pub(crate) struct Lifecycle {
    /// End of the grace period after a restart: missing instances are then a fault of the cluster,
    /// and not of this router.
    reports_due: Timestamp,
    /// Ends streams that callers can reopen elsewhere; cancelled before `stop`, and at the latest
    /// with it.
    draining: CancellationToken,
    stop: CancellationToken,
}

impl Lifecycle {
    pub(crate) fn new(reports_due: Timestamp, stop: CancellationToken) -> Lifecycle {
        Lifecycle { reports_due, draining: stop.child_token(), stop }
    }

    /// Whether instances may not have reported since this router started.
    pub(super) fn awaits_reports(&self, now: Timestamp) -> bool {
        now < self.reports_due
    }

    /// Begins the drain.
    pub(crate) fn start_drain(&self) {
        self.draining.cancel();
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Cancelled when the router stops.
    pub(super) fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    /// Cancelled when a stream that opens now must end. A caller that connects during a drain has
    /// no other router, and is served until the stop.
    pub(super) fn end_of_streams(&self) -> CancellationToken {
        if self.is_draining() { self.stop.clone() } else { self.draining.clone() }
    }
}
