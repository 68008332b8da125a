//! What a process answers when it is asked whether it lives, whether it is ready, and to drain.
//!
//! Not here: the endpoints where it is asked (`metrics.rs`, `drain.rs`), and what a router, a node or an instance counts as
//! ready (they say so themselves).

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvfleet_node::Standing;
use kvfleet_router::Desk;
use tokio_util::sync::CancellationToken;

/// Whom the answer is about.
#[derive(Clone, Debug)]
pub(super) enum Subject {
    /// A router is ready while its replicas follow their leaders, whoever leads.
    Router(Desk),
    /// A node is ready while it has an epoch.
    Node(Standing),
    /// An instance is ready once it serves.
    Instance,
}

/// The health of this process. It lives as long as its runtime answers at all: what it lacks of others makes it not ready,
/// and to start it again would bring none of that back.
#[derive(Clone, Debug, Default)]
pub(super) struct Health {
    subject: Arc<OnceLock<Subject>>,
    draining: CancellationToken,
}

impl Health {
    /// From here on the service is there to be asked.
    pub(super) fn serves(&self, subject: Subject) {
        // Said once, by the one that started the service.
        let _ = self.subject.set(subject);
    }

    /// From here on not ready, for good.
    pub(super) fn stops(&self) {
        self.draining.cancel();
    }

    /// Whether requests should come here; if not, why.
    pub(super) fn ready(&self) -> Result<(), String> {
        if self.draining.is_cancelled() {
            return Err("this process is draining: it was asked to let go of its work".to_owned());
        }
        match self.subject.get() {
            None => Err("this process is starting".to_owned()),
            Some(Subject::Router(desk)) => desk.ready(),
            Some(Subject::Node(standing)) => standing.ready(),
            Some(Subject::Instance) => Ok(()),
        }
    }

    /// Is not ready from here on, lets go of what others would wait for, and serves on until the process is ended: a router
    /// hands over what it leads, a node gives what it holds to others and leaves the cluster.
    ///
    /// # Errors
    /// What it still has after that long.
    pub(super) async fn drain(&self, within: Duration) -> Result<String, String> {
        self.draining.cancel();
        let begun = Instant::now();
        let done = match self.subject.get() {
            None => "it had not begun to serve".to_owned(),
            Some(Subject::Router(desk)) => match desk.hand_over(within).await {
                led if led.is_empty() => "this router leads nothing that another could lead".to_owned(),
                led => {
                    return Err(format!(
                        "this router still leads groups {led:?} after {within:?}: no other voter took over; the others will elect once it is gone"
                    ));
                }
            },
            Some(Subject::Node(standing)) => match standing.drain(within).await {
                (given, true) => format!("this node has left the cluster, or has none: {given}"),
                (given, false) => {
                    return Err(format!(
                        "this node has not left the cluster after {within:?}: no router answered; they will notice its silence. Of what it held: {given}"
                    ));
                }
            },
            Some(Subject::Instance) => "an instance has nothing to hand over".to_owned(),
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
    async fn a_process_is_ready_from_its_start_until_it_drains() {
        let health = Health::default();
        assert_eq!(health.ready().unwrap_err(), "this process is starting");
        health.serves(Subject::Instance);
        assert_eq!(health.ready(), Ok(()));
        assert!(health.drain(Duration::from_secs(1)).await.is_ok());
        assert!(health.ready().unwrap_err().contains("draining"));
        assert!(health.drain(Duration::from_secs(1)).await.is_ok(), "may be said again");
    }
}
