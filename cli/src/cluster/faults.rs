//! Fault injection into a running cluster: kill and restart.

use std::time::{Duration, Instant};

use kvfleet_proto::pb;

use super::{ChildId, LocalCluster, process_name, wait};
use crate::calls::RouterCalls;
use crate::process::Role;

/// Longest wait for a leader: a few elections.
const LEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of checks for a leader.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A router that reports itself as the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its number.
    pub number: u64,
    /// Term of its leadership.
    pub term: u64,
}

/// A killed process.
#[derive(Clone, Copy, Debug)]
pub struct KilledProcess {
    /// The process.
    pub child: ChildId,
    /// Time of SIGKILL.
    pub at: Instant,
}

impl LocalCluster {
    /// Numbers of a role's children that should be running.
    pub fn expected_children(&self, role: Role) -> impl Iterator<Item = u64> {
        let wanted = self.children.iter().filter(move |((of, _), child)| *of == role && child.should_run());
        wanted.map(|((_, number), _)| *number)
    }

    /// Addresses of the routers that should be running.
    #[must_use]
    pub fn running_routers(&self) -> Vec<String> {
        self.expected_children(Role::Router).filter_map(|number| self.routers.get(&number).cloned()).collect()
    }

    /// Address of one router.
    #[must_use]
    pub fn router_address(&self, number: u64) -> Option<&str> {
        self.routers.get(&number).map(String::as_str)
    }

    /// Kills a child with SIGKILL and reaps it. A child that has already crashed is not killed, and
    /// stays recorded as a crash.
    pub async fn kill(&mut self, id: ChildId) -> anyhow::Result<KilledProcess> {
        let Some(child) = self.children.get_mut(&id).filter(|child| child.should_run()) else {
            anyhow::bail!("{} is not running: it cannot be killed", process_name(id));
        };
        if let Some(how) = child.crashed() {
            anyhow::bail!("{} has already ended ({how}): it cannot be killed", process_name(id));
        }
        self.ended_cpu_time += child.cpu_time().unwrap_or_default();
        self.record_peak(id);
        let Some(child) = self.children.get_mut(&id) else { anyhow::bail!("{} is gone", process_name(id)) };
        let at = child.kill().await?;
        Ok(KilledProcess { child: id, at })
    }

    /// Kills the current leader, after waiting for one. Returns the killed leader.
    pub async fn kill_leader(&mut self) -> anyhow::Result<(KilledProcess, Leader)> {
        let begun = Instant::now();
        let leader = loop {
            match self.leader().await {
                Ok(leader) => break leader,
                Err(error) if begun.elapsed() > LEADER_TIMEOUT => return Err(error),
                Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        };
        let killed = self.kill((Role::Router, leader.number)).await?;
        self.last_killed_leader = Some(leader.number);
        Ok((killed, leader))
    }

    /// The router that reports itself as the leader; reports about others may be outdated.
    pub async fn leader(&self) -> anyhow::Result<Leader> {
        let mut said = vec![];
        for router in RouterCalls::all(&self.running_routers(), &self.identity()?)? {
            said.extend(router.status().await);
        }
        highest_leader(&said).ok_or_else(|| anyhow::anyhow!("no router leads at the moment"))
    }

    /// The leader killed last, for a restart.
    #[must_use]
    pub fn leader_killed(&self) -> Option<u64> {
        self.last_killed_leader
    }

    /// Restarts a child with the same configuration and data, and waits until it is ready. A single
    /// router may need others first: see [`LocalCluster::until_serving`].
    pub async fn restart(&mut self, id: ChildId) -> anyhow::Result<()> {
        let crashed = self.crashed_now();
        self.crashes.extend(crashed.into_iter().filter(|(crashed, _)| *crashed == id));
        if self.children.get(&id).is_some_and(|child| child.should_run()) {
            self.stop_child(id).await;
        }
        self.spawn(id)?;
        self.ready(id).await
    }

    /// Stops a child cleanly.
    pub async fn stop_child(&mut self, id: ChildId) {
        self.record_peak(id);
        if let Some(child) = self.children.get_mut(&id) {
            self.ended_cpu_time += child.cpu_time().unwrap_or_default();
            child.stop(super::STOP_GRACE).await;
        }
    }

    /// Waits until every router knows every process that should run, and all blocks that the nodes
    /// have.
    pub async fn until_serving(&mut self) -> anyhow::Result<()> {
        wait::until_serving(self).await?;
        for number in self.expected_children(Role::Node).collect::<Vec<_>>() {
            wait::until_settled(self, number).await?;
        }
        Ok(())
    }
}

/// The self-declared leader of the highest term; an older leader may not know of its end yet.
fn highest_leader(said: &[pb::StatusReply]) -> Option<Leader> {
    let leading = said.iter().filter(|status| status.leader != 0 && status.leader == status.router);
    let leaders = leading.map(|status| Leader { number: status.router, term: status.term });
    leaders.max_by_key(|leader| leader.term)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_the_self_declared_leader_of_the_highest_term() {
        let told =
            |router, leader, term| pb::StatusReply { router, leader, term, ..pb::StatusReply::default() };
        assert_eq!(highest_leader(&[told(1, 2, 4), told(3, 2, 4)]), None, "reports by others do not count");
        assert_eq!(highest_leader(&[told(1, 0, 4)]), None);
        let both = [told(1, 1, 4), told(2, 2, 5), told(3, 1, 4)];
        assert_eq!(highest_leader(&both), Some(Leader { number: 2, term: 5 }));
    }
}
