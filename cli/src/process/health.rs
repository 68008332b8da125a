//! Liveness, readiness and draining of a process.
//!
//! Not here: the endpoints (`metrics.rs`, `drain.rs`), and when a router, node or instance is ready
//! (their own code).

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvfleet_node::Membership;
use kvfleet_router::RouterHandle;
use tokio_util::sync::CancellationToken;

/// Source of the readiness.
#[derive(Clone, Debug)]
pub(super) enum HealthSource {
    /// A router is ready while its replicas follow a leader.
    Router(RouterHandle),
    /// A node is ready while it has an epoch.
    Node(Membership),
    /// An instance is ready once it serves.
    Instance,
}

/// Health of this process. It is live while its runtime answers. Missing peers make it unready but
/// not dead, since a restart would not bring them back.
#[derive(Clone, Debug, Default)]
pub(super) struct Health {
    source: Arc<OnceLock<HealthSource>>,
    draining: CancellationToken,
}

impl Health {
    /// Sets the source once the service runs.
    pub(super) fn set_source(&self, subject: HealthSource) {
        // Set once, by the code that started the service.
        let _ = self.source.set(subject);
    }

    /// Makes the process unready, permanently.
    pub(super) fn begin_stop(&self) {
        self.draining.cancel();
    }

    /// Whether requests should be sent here; the error is the reason against it.
    pub(super) fn ready(&self) -> Result<(), String> {
        if self.draining.is_cancelled() {
            return Err("this process is draining, as it was asked to".to_owned());
        }
        match self.source.get() {
            None => Err("this process is starting".to_owned()),
            Some(HealthSource::Router(desk)) => desk.ready(),
            Some(HealthSource::Node(standing)) => standing.ready(),
            Some(HealthSource::Instance) => Ok(()),
        }
    }

    /// Makes the process unready and hands over its work, but keeps serving until the process ends.
    /// A router transfers its leaderships; a node gives its blocks to others and leaves the
    /// cluster.
    ///
    /// # Errors
    /// The remaining work after the time limit.
    pub(super) async fn drain(&self, within: Duration) -> Result<String, String> {
        self.draining.cancel();
        let begun = Instant::now();
        let done = match self.source.get() {
            None => "the service had not started".to_owned(),
            Some(HealthSource::Router(desk)) => match desk.hand_over_leadership(within).await {
                led if led.is_empty() => "this router leads nothing that another could lead".to_owned(),
                led => {
                    return Err(format!(
                        "this router still leads groups {led:?} after {within:?}: no other voter took over; \
                         the others will elect a leader after its end"
                    ));
                }
            },
            Some(HealthSource::Node(standing)) => match standing.drain(within).await {
                (given, true) => format!("this node has left the cluster, or is in none: {given}"),
                (given, false) => {
                    return Err(format!(
                        "this node has not left the cluster after {within:?}: no router answered; they will \
                         notice its silence. Blocks handed over: {given}"
                    ));
                }
            },
            Some(HealthSource::Instance) => "an instance has nothing to hand over".to_owned(),
        };
        tracing::info!(done, took = ?begun.elapsed(), "drained");
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn ready_from_start_until_drain() {
        let health = Health::default();
        assert_eq!(health.ready().unwrap_err(), "this process is starting");
        health.set_source(HealthSource::Instance);
        assert_eq!(health.ready(), Ok(()));
        assert!(health.drain(Duration::from_secs(1)).await.is_ok());
        assert!(health.ready().unwrap_err().contains("draining"));
        assert!(health.drain(Duration::from_secs(1)).await.is_ok(), "draining is idempotent");
    }
}
