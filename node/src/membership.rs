//! Cluster membership of a running node: readiness, draining and leaving.
//!
//! Not here: joining and heartbeats (`crate::announce`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::announce::link::Registration;
use crate::drain::{DrainReport, DrainWorker};

/// Part of the drain time that is reserved for leaving, which needs an answer from a router.
const LEAVE_RESERVE: Duration = Duration::from_secs(3);

/// Membership of one node. It may outlive the node, and then reports that the node is not ready.
#[derive(Clone, Debug)]
pub struct Membership {
    registration: watch::Receiver<Option<Registration>>,
    leave_requested: CancellationToken,
    has_left: CancellationToken,
    drain_worker: Arc<DrainWorker>,
    /// Cancelling it stops copies from other nodes.
    copies_closed: CancellationToken,
}

/// The link's side of a [`Membership`].
pub(crate) struct MembershipReporter {
    /// The current registration.
    pub(crate) registration: watch::Sender<Option<Registration>>,
    /// Cancelled to request leaving the cluster.
    pub(crate) leave_requested: CancellationToken,
    /// Cancelled when the link has ended.
    pub(crate) has_left: CancellationToken,
}

impl Membership {
    /// Creates a membership and the link's side of it. `evacuator` creates the drain worker. A
    /// drain cancels `copies_closed`, so that other nodes copy no more blocks here.
    pub(crate) fn new(
        evacuator: impl FnOnce(watch::Receiver<Option<Registration>>) -> DrainWorker,
        copies_closed: CancellationToken,
    ) -> (Membership, MembershipReporter) {
        let (tell, life) = watch::channel(None);
        let (leaving, left) = (CancellationToken::new(), CancellationToken::new());
        let evacuator = Arc::new(evacuator(life.clone()));
        let standing = Membership {
            registration: life,
            leave_requested: leaving.clone(),
            has_left: left.clone(),
            drain_worker: evacuator,
            copies_closed,
        };
        (standing, MembershipReporter { registration: tell, leave_requested: leaving, has_left: left })
    }

    /// Whether routers may send requests to this node. A node without routers is always ready. A
    /// node that has joined stays ready while no router answers.
    ///
    /// # Errors
    /// The reason, as text for a person.
    pub fn ready(&self) -> Result<(), String> {
        if self.leave_requested.is_cancelled() {
            return Err("the node is leaving the cluster".to_owned());
        }
        if self.drain_worker.has_routers() && self.registration.borrow().is_none() {
            return Err("the node has not joined: no router has given it a valid epoch".to_owned());
        }
        Ok(())
    }

    /// Stops accepting copies, copies out blocks that only this node holds as far as time permits,
    /// and leaves the cluster. Reads are served throughout.
    ///
    /// Returns the drain report, and whether a router confirmed the leave; without confirmation the
    /// routers notice the missing heartbeats. The caller must end the process afterwards: a node
    /// that left does not join again.
    pub async fn drain(&self, within: Duration) -> (DrainReport, bool) {
        let begun = Instant::now();
        // Before listing blocks: another draining node must not copy its blocks here now.
        self.copies_closed.cancel();
        let announcing = self.drain_worker.announce().await;
        let copy_budget = within.saturating_sub(LEAVE_RESERVE.min(within / 2));
        let report = self.drain_worker.copy_out(copy_budget.saturating_sub(begun.elapsed())).await;
        self.leave_requested.cancel();
        let is_over = tokio::time::timeout(within.saturating_sub(begun.elapsed()), self.has_left.cancelled())
            .await
            .is_ok();
        drop(announcing);
        // An epoch that no router has ended is still valid.
        (report, is_over && self.registration.borrow().is_none())
    }
}
