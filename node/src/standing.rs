//! What a running node knows of its place in the cluster: whether routers count on it, and how it leaves them.
//!
//! Not here: how it joins and stays known (`crate::announce`).

use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::announce::link::Life;

/// The standing of one node, which outlives no node: after its end it answers that it is not there.
#[derive(Clone, Debug)]
pub struct Standing {
    has_routers: bool,
    life: watch::Receiver<Option<Life>>,
    leaving: CancellationToken,
    left: CancellationToken,
}

impl Standing {
    /// A standing, and what the link reports to it: the epoch, whether to leave, and its end.
    pub(crate) fn new(
        has_routers: bool,
    ) -> (Standing, watch::Sender<Option<Life>>, CancellationToken, CancellationToken) {
        let (tell, life) = watch::channel(None);
        let (leaving, left) = (CancellationToken::new(), CancellationToken::new());
        let standing = Standing { has_routers, life, leaving: leaving.clone(), left: left.clone() };
        (standing, tell, leaving, left)
    }

    /// Whether the routers count on this node; if not, why. One that has no routers serves whoever knows it. While no router
    /// answers, a node that had joined goes on serving.
    ///
    /// # Errors
    /// A line for a person.
    pub fn ready(&self) -> Result<(), String> {
        if self.leaving.is_cancelled() {
            return Err("the node is leaving the cluster".to_owned());
        }
        if self.has_routers && self.life.borrow().is_none() {
            return Err("the node has not joined: no router has given it an epoch that holds".to_owned());
        }
        Ok(())
    }

    /// Leaves the cluster and goes on answering readers: routers name it no more. Whether a router took that within
    /// this time; if none did, they will notice by the silence. Whoever asks is about to end the process: a node that left does not join again.
    pub async fn leave(&self, within: Duration) -> bool {
        self.leaving.cancel();
        let is_over = tokio::time::timeout(within, self.left.cancelled()).await.is_ok();
        // An epoch that nobody took back still stands.
        is_over && self.life.borrow().is_none()
    }
}
