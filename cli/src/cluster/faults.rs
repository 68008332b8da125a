//! Breaking a running cluster on purpose: kill and start again.

use std::time::Instant;

use super::{ChildId, Cluster, name, wait};
use crate::calls::RouterCalls;
use crate::process::Role;

/// A process that was killed.
#[derive(Clone, Copy, Debug)]
pub struct Killed {
    /// Which.
    pub child: ChildId,
    /// When SIGKILL was sent.
    pub at: Instant,
}

impl Cluster {
    /// Numbers of the children of a role that should be running.
    pub fn wanted(&self, role: Role) -> impl Iterator<Item = u64> {
        let wanted = self.children.iter().filter(move |((of, _), child)| *of == role && child.is_wanted());
        wanted.map(|((_, number), _)| *number)
    }

    /// Addresses of the routers that should be running.
    #[must_use]
    pub fn running_routers(&self) -> Vec<String> {
        self.wanted(Role::Router).filter_map(|number| self.routers.get(&number).cloned()).collect()
    }

    /// Address of one router.
    #[must_use]
    pub fn router_address(&self, number: u64) -> Option<&str> {
        self.routers.get(&number).map(String::as_str)
    }

    /// Kills a child with SIGKILL and reaps it.
    pub async fn kill(&mut self, id: ChildId) -> anyhow::Result<Killed> {
        let Some(child) = self.children.get_mut(&id).filter(|child| child.is_wanted()) else {
            anyhow::bail!("{} is not running: it cannot be killed", name(id));
        };
        self.cpu_of_ended += child.cpu_time().unwrap_or_default();
        let at = child.kill().await?;
        Ok(Killed { child: id, at })
    }

    /// Kills whichever router leads.
    pub async fn kill_leader(&mut self) -> anyhow::Result<Killed> {
        let leader = self.leader().await?;
        let killed = self.kill((Role::Router, leader)).await?;
        self.leader_killed = Some(leader);
        Ok(killed)
    }

    /// Number of the router that the running ones agree to follow.
    pub async fn leader(&self) -> anyhow::Result<u64> {
        for router in RouterCalls::all(&self.running_routers(), &self.identity()?)? {
            if let Ok(status) = router.status().await
                && status.leader != 0
                && self.wanted(Role::Router).any(|number| number == status.leader)
            {
                return Ok(status.leader);
            }
        }
        anyhow::bail!("no router leads at this moment")
    }

    /// The leader killed last, for a restart.
    #[must_use]
    pub fn leader_killed(&self) -> Option<u64> {
        self.leader_killed
    }

    /// Starts a child again with the same configuration and data, and waits until it serves. A router
    /// alone may wait for others: see [`Cluster::until_serving`].
    pub async fn restart(&mut self, id: ChildId) -> anyhow::Result<()> {
        if self.children.get(&id).is_some_and(|child| child.is_wanted()) {
            self.stop_child(id).await;
        }
        self.spawn(id)?;
        self.ready(id).await
    }

    /// Stops a child cleanly.
    pub async fn stop_child(&mut self, id: ChildId) {
        if let Some(child) = self.children.get_mut(&id) {
            self.cpu_of_ended += child.cpu_time().unwrap_or_default();
            child.stop(super::STOP_GRACE).await;
        }
    }

    /// Waits until every wanted process is known to every wanted router, and the routers know every block
    /// that the nodes have.
    pub async fn until_serving(&mut self) -> anyhow::Result<()> {
        wait::until_serving(self).await?;
        for number in self.wanted(Role::Node).collect::<Vec<_>>() {
            wait::until_settled(self, number).await?;
        }
        Ok(())
    }
}
