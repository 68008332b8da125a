//! What a running node knows of its place in the cluster: whether routers count on it, and how it leaves them.
//!
//! Not here: how it joins and stays known (`crate::announce`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::announce::link::Life;
use crate::evacuate::{Evacuated, Evacuator};

/// What of the time for draining is for leaving, which takes a router that answers.
const LEAVES_WITHIN: Duration = Duration::from_secs(3);

/// The standing of one node, which outlives no node: after its end it answers that it is not there.
#[derive(Clone, Debug)]
pub struct Standing {
    life: watch::Receiver<Option<Life>>,
    leaving: CancellationToken,
    left: CancellationToken,
    evacuator: Arc<Evacuator>,
    /// Ends copies from other nodes.
    takes_no_copies: CancellationToken,
}

/// What the link reports to a standing.
pub(crate) struct Reports {
    /// The epoch.
    pub(crate) life: watch::Sender<Option<Life>>,
    /// Whether to leave.
    pub(crate) leaving: CancellationToken,
    /// Its end.
    pub(crate) left: CancellationToken,
}

impl Standing {
    /// A standing, and what the link reports to it. `evacuator` makes what gives away the node's blocks; a drain says by `takes_no_copies` that
    /// others give it none.
    pub(crate) fn new(
        evacuator: impl FnOnce(watch::Receiver<Option<Life>>) -> Evacuator,
        takes_no_copies: CancellationToken,
    ) -> (Standing, Reports) {
        let (tell, life) = watch::channel(None);
        let (leaving, left) = (CancellationToken::new(), CancellationToken::new());
        let evacuator = Arc::new(evacuator(life.clone()));
        let standing =
            Standing { life, leaving: leaving.clone(), left: left.clone(), evacuator, takes_no_copies };
        (standing, Reports { life: tell, leaving, left })
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
        if self.evacuator.has_routers() && self.life.borrow().is_none() {
            return Err("the node has not joined: no router has given it an epoch that holds".to_owned());
        }
        Ok(())
    }

    /// Takes nothing new any more, gives what this node alone holds to others, as far as there is time, and leaves the cluster; goes on
    /// answering readers all the while. What it gave away, and whether a router took it that it left; if none did, they will
    /// notice by the silence. Whoever asks is about to end the process: a node that left does not join again.
    pub async fn drain(&self, within: Duration) -> (Evacuated, bool) {
        let begun = Instant::now();
        // Before it looks what it has: who gives it blocks now, and leaves as well, would lose them.
        self.takes_no_copies.cancel();
        let saying = self.evacuator.say().await;
        let for_others = within.saturating_sub(LEAVES_WITHIN.min(within / 2));
        let given = self.evacuator.give_away(for_others.saturating_sub(begun.elapsed())).await;
        self.leaving.cancel();
        let is_over =
            tokio::time::timeout(within.saturating_sub(begun.elapsed()), self.left.cancelled()).await.is_ok();
        drop(saying);
        // An epoch that nobody took back still stands.
        (given, is_over && self.life.borrow().is_none())
    }
}
