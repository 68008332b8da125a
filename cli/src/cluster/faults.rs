//! Breaking a running cluster on purpose: kill and start again.

use std::time::{Duration, Instant};

use kvfleet_proto::pb;

use super::{ChildId, Cluster, name, wait};
use crate::calls::RouterCalls;
use crate::process::Role;

/// How long the routers may take until one of them leads: a few elections.
const LEADER_PATIENCE: Duration = Duration::from_secs(5);

/// Time between two looks for a leader.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A router that says of itself that it leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its number.
    pub number: u64,
    /// The term it leads in.
    pub term: u64,
}

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

    /// Kills a child with SIGKILL and reaps it. One that ended by itself is not killed but stays a crash.
    pub async fn kill(&mut self, id: ChildId) -> anyhow::Result<Killed> {
        let Some(child) = self.children.get_mut(&id).filter(|child| child.is_wanted()) else {
            anyhow::bail!("{} is not running: it cannot be killed", name(id));
        };
        if let Some(how) = child.crashed() {
            anyhow::bail!("{} has ended by itself ({how}): it cannot be killed", name(id));
        }
        self.cpu_of_ended += child.cpu_time().unwrap_or_default();
        self.note_peak(id);
        let Some(child) = self.children.get_mut(&id) else { anyhow::bail!("{} is gone", name(id)) };
        let at = child.kill().await?;
        Ok(Killed { child: id, at })
    }

    /// Kills whichever router leads, waiting for one that does. Answers the leader it was.
    pub async fn kill_leader(&mut self) -> anyhow::Result<(Killed, Leader)> {
        let begun = Instant::now();
        let leader = loop {
            match self.leader().await {
                Ok(leader) => break leader,
                Err(error) if begun.elapsed() > LEADER_PATIENCE => return Err(error),
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
            }
        };
        let killed = self.kill((Role::Router, leader.number)).await?;
        self.leader_killed = Some(leader.number);
        Ok((killed, leader))
    }

    /// The router that says of itself that it leads; what others say of it may be old.
    pub async fn leader(&self) -> anyhow::Result<Leader> {
        let mut said = vec![];
        for router in RouterCalls::all(&self.running_routers(), &self.identity()?)? {
            said.extend(router.status().await);
        }
        leader_of(&said).ok_or_else(|| anyhow::anyhow!("no router leads at this moment"))
    }

    /// The leader killed last, for a restart.
    #[must_use]
    pub fn leader_killed(&self) -> Option<u64> {
        self.leader_killed
    }

    /// Starts a child again with the same configuration and data, and waits until it serves. A router
    /// alone may wait for others: see [`Cluster::until_serving`].
    pub async fn restart(&mut self, id: ChildId) -> anyhow::Result<()> {
        let crashed = self.crashed_now();
        self.crashes.extend(crashed.into_iter().filter(|(crashed, _)| *crashed == id));
        if self.children.get(&id).is_some_and(|child| child.is_wanted()) {
            self.stop_child(id).await;
        }
        self.spawn(id)?;
        self.ready(id).await
    }

    /// Stops a child cleanly.
    pub async fn stop_child(&mut self, id: ChildId) {
        self.note_peak(id);
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

/// Of routers that lead by their own word, the one of the highest term: an old leader may not know yet.
fn leader_of(said: &[pb::StatusReply]) -> Option<Leader> {
    let leading = said.iter().filter(|status| status.leader != 0 && status.leader == status.router);
    let leaders = leading.map(|status| Leader { number: status.router, term: status.term });
    leaders.max_by_key(|leader| leader.term)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_says_so_itself_and_in_the_highest_term() {
        let told =
            |router, leader, term| pb::StatusReply { router, leader, term, ..pb::StatusReply::default() };
        assert_eq!(leader_of(&[told(1, 2, 4), told(3, 2, 4)]), None, "that others name it proves nothing");
        assert_eq!(leader_of(&[told(1, 0, 4)]), None);
        let both = [told(1, 1, 4), told(2, 2, 5), told(3, 1, 4)];
        assert_eq!(leader_of(&both), Some(Leader { number: 2, term: 5 }));
    }
}
