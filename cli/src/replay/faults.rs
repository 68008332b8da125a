//! Carries out the faults of a replay at their moments, and measures what each one cost.
//!
//! New requests wait while a fault is carried out (a kill takes a few milliseconds, a restart until the
//! process serves again), those under way do not. What comes after a kill is measured in the background.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfleet_proto::pb;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::measure::FaultMark;
use super::visible::Visible;
use super::watch::{DeadNode, Watch, until_leader, until_unrouted};
use crate::args::{Fault, FaultKind, Target};
use crate::calls::RouterCalls;
use crate::cluster::{ChildId, Cluster, Leader, name};
use crate::process::Role;

/// A fault still to come.
#[derive(Clone, Debug)]
struct Planned {
    at_request: usize,
    kind: FaultKind,
    fault: Fault,
}

/// What is still being measured after a kill.
enum Pending {
    Unrouted { node: u32, killed_at: Instant, time: JoinHandle<Option<Duration>> },
    Leader(JoinHandle<Option<Duration>>),
    Nothing,
}

/// The faults of one replay, those to come and those done.
pub(super) struct Faults {
    planned: Vec<Planned>,
    done: Vec<(FaultMark, Pending)>,
    watch: Arc<Watch>,
    failed: Vec<String>,
}

/// What became of all faults.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Those carried out.
    pub(super) done: Vec<FaultMark>,
    /// Those that were not, and why.
    pub(super) not_done: Vec<String>,
    /// Kills whose cost has no number.
    pub(super) not_measured: Vec<String>,
}

impl Faults {
    /// Plans `kills` and `restarts` over `requests`; at the same moment a kill comes first.
    pub(super) fn plan(kills: &[Fault], restarts: &[Fault], requests: usize, watch: &Arc<Watch>) -> Self {
        let plan =
            |kind, fault: &Fault| Planned { at_request: fault.at_request(requests), kind, fault: *fault };
        let kills = kills.iter().map(|fault| plan(FaultKind::Kill, fault));
        let restarts = restarts.iter().map(|fault| plan(FaultKind::Restart, fault));
        let mut planned: Vec<_> = kills.chain(restarts).collect();
        // Stable: kills stay before restarts. Reversed, so that the next one is popped from the end.
        planned.sort_by_key(|planned| planned.at_request);
        planned.reverse();
        Self { planned, done: vec![], watch: Arc::clone(watch), failed: vec![] }
    }

    /// Whether a fault comes before the next request.
    pub(super) fn is_due(&self, started: usize) -> bool {
        self.planned.last().is_some_and(|planned| planned.at_request <= started)
    }

    /// Carries out every fault that is due. Dropped half way, the one under way counts as not done.
    pub(super) async fn due(
        &mut self,
        started: usize,
        begun: Instant,
        visible: &mut Visible,
        mut cluster: Option<&mut Cluster>,
    ) {
        while self.is_due(started) {
            let next = self.planned.last().cloned();
            let (Some(planned), Some(cluster)) = (next, cluster.as_deref_mut()) else { return };
            let outcome = match planned.kind {
                FaultKind::Kill => self.kill(&planned, begun, visible, cluster).await,
                FaultKind::Restart => self.restart(&planned, begun, cluster).await,
            };
            self.planned.pop();
            if let Err(error) = outcome {
                self.failed.push(format!("{} {}: {error}", planned.kind.name(), planned.fault));
            }
        }
    }

    async fn kill(
        &mut self,
        planned: &Planned,
        begun: Instant,
        visible: &mut Visible,
        cluster: &mut Cluster,
    ) -> anyhow::Result<()> {
        let (killed, pending) = match planned.fault.target {
            Target::Node(node) => self.kill_node(node, visible, cluster).await?,
            Target::RouterLeader => {
                let (killed, leader) = cluster.kill_leader().await?;
                self.router_killed(cluster, leader.number);
                (killed, watch_leader(cluster, killed.at, leader)?)
            }
            Target::Router(number) => {
                let leader = cluster.leader().await.ok().filter(|leader| leader.number == number);
                let killed = cluster.kill((Role::Router, number)).await?;
                self.router_killed(cluster, number);
                let pending = leader.map(|leader| watch_leader(cluster, killed.at, leader)).transpose()?;
                (killed, pending.unwrap_or(Pending::Nothing))
            }
            Target::Instance(number) => {
                (cluster.kill((Role::Instance, number.into())).await?, Pending::Nothing)
            }
        };
        let mark = mark("kill", planned, killed.child, killed.at.saturating_duration_since(begun));
        self.done.push((mark, pending));
        Ok(())
    }

    fn router_killed(&self, cluster: &Cluster, number: u64) {
        self.watch.router_killed(cluster.router_address(number).unwrap_or_default());
    }

    async fn kill_node(
        &mut self,
        node: u32,
        visible: &mut Visible,
        cluster: &mut Cluster,
    ) -> anyhow::Result<(crate::cluster::Killed, Pending)> {
        let routers = RouterCalls::all(&cluster.running_routers(), &cluster.identity()?)?;
        let epoch = epoch_of(&routers, node).await?;
        let block = visible.block_on(node);
        visible.epoch_over(node, epoch);
        let killed = cluster.kill((Role::Node, node.into())).await?;
        self.watch.killed(node, epoch, killed.at);
        let dead = DeadNode { node, epoch, at: killed.at, block };
        let time = tokio::spawn(until_unrouted(routers, dead, Arc::clone(&self.watch)));
        Ok((killed, Pending::Unrouted { node, killed_at: killed.at, time }))
    }

    async fn restart(
        &mut self,
        planned: &Planned,
        begun: Instant,
        cluster: &mut Cluster,
    ) -> anyhow::Result<()> {
        let child: ChildId = match planned.fault.target {
            Target::Node(number) => (Role::Node, number.into()),
            Target::Router(number) => (Role::Router, number),
            Target::Instance(number) => (Role::Instance, number.into()),
            Target::RouterLeader => match cluster.leader_killed() {
                Some(number) => (Role::Router, number),
                None => (Role::Router, cluster.leader().await?.number),
            },
        };
        let at = Instant::now();
        cluster.restart(child).await?;
        if child.0 == Role::Router {
            self.watch.router_restarts(cluster.router_address(child.1).unwrap_or_default());
        }
        cluster.until_serving().await?;
        let mut mark = mark("restart", planned, child, at.saturating_duration_since(begun));
        mark.serving_ms = Some(at.elapsed().as_secs_f64() * 1e3);
        self.done.push((mark, Pending::Nothing));
        Ok(())
    }

    /// Waits for what is still being measured, no longer than until `stop`.
    pub(super) async fn finish(self, watch: &Watch, stop: &CancellationToken) -> Marks {
        let to_come = self.planned.iter().rev();
        let to_come = to_come
            .map(|planned| format!("{} {}: the replay ended before", planned.kind.name(), planned.fault));
        let mut marks =
            Marks { not_done: self.failed.iter().cloned().chain(to_come).collect(), ..Marks::default() };
        for (mut mark, pending) in self.done {
            let measured = tokio::select! {
                measured = pending.finish(watch, &mut mark) => measured,
                () = stop.cancelled() => false,
            };
            if !measured {
                marks.not_measured.push(format!("{} {} ({})", mark.kind, mark.target, mark.process));
            }
            marks.done.push(mark);
        }
        marks
    }
}

impl Pending {
    /// Writes into `mark` what was measured; answers whether everything that should be was.
    async fn finish(self, watch: &Watch, mark: &mut FaultMark) -> bool {
        match self {
            Pending::Unrouted { node, killed_at, time } => {
                let forgotten = time.await.ok().flatten();
                let named = watch.named_for(node, killed_at).unwrap_or_default();
                mark.unrouted_ms = forgotten.map(|forgotten| forgotten.max(named).as_secs_f64() * 1e3);
                mark.unrouted_ms.is_some()
            }
            Pending::Leader(time) => {
                mark.leader_ms = time.await.ok().flatten().map(|time| time.as_secs_f64() * 1e3);
                mark.leader_ms.is_some()
            }
            Pending::Nothing => true,
        }
    }
}

fn mark(kind: &'static str, planned: &Planned, child: ChildId, at: Duration) -> FaultMark {
    FaultMark {
        at,
        kind,
        target: planned.fault.target.to_string(),
        process: name(child),
        at_request: planned.at_request,
        unrouted_ms: None,
        leader_ms: None,
        serving_ms: None,
    }
}

fn watch_leader(cluster: &Cluster, killed_at: Instant, leader: Leader) -> anyhow::Result<Pending> {
    let routers = RouterCalls::all(&cluster.running_routers(), &cluster.identity()?)?;
    Ok(Pending::Leader(tokio::spawn(until_leader(routers, killed_at, leader.term))))
}

/// The latest epoch of a node that any router knows.
async fn epoch_of(routers: &[RouterCalls], node: u32) -> anyhow::Result<u64> {
    let mut said = vec![];
    for router in routers {
        said.extend(router.status().await);
    }
    latest_epoch(&said, node).ok_or_else(|| anyhow::anyhow!("no router knows node {node}"))
}

fn latest_epoch(said: &[pb::StatusReply], node: u32) -> Option<u64> {
    let known = said.iter().flat_map(|status| &status.nodes).filter(|known| known.node == node);
    known.map(|known| known.epoch).max()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn faults(planned: &[&str], done: Vec<(FaultMark, Pending)>) -> Faults {
        let kills: Vec<Fault> = planned.iter().map(|text| text.parse().unwrap()).collect();
        Faults { done, ..Faults::plan(&kills, &[], 100, &Arc::default()) }
    }

    fn done(target: &str, pending: Pending) -> (FaultMark, Pending) {
        let fault: Fault = format!("{target}@10%").parse().unwrap();
        let planned = Planned { at_request: 10, kind: FaultKind::Kill, fault };
        (mark("kill", &planned, (Role::Router, 1), Duration::ZERO), pending)
    }

    #[test]
    fn a_replica_that_is_behind_does_not_decide_the_epoch() {
        let status = |epoch| pb::StatusReply {
            nodes: vec![pb::NodeStatus { node: 2, epoch, ..pb::NodeStatus::default() }],
            ..pb::StatusReply::default()
        };
        assert_eq!(latest_epoch(&[status(3), status(5), status(4)], 2), Some(5));
        assert_eq!(latest_epoch(&[status(3)], 1), None);
    }

    #[tokio::test]
    async fn what_did_not_happen_and_what_has_no_number_are_named() {
        let lost = Pending::Leader(tokio::spawn(async { None }));
        let faults =
            faults(&["node:2@50%"], vec![done("router-leader", lost), done("instance:1", Pending::Nothing)]);
        let marks = faults.finish(&Watch::default(), &CancellationToken::new()).await;
        assert_eq!(marks.not_done, ["kill node:2@50%: the replay ended before"]);
        assert_eq!(marks.not_measured, ["kill router-leader (router-1)"]);
        assert_eq!(marks.done.len(), 2);
    }

    #[tokio::test]
    async fn a_stop_ends_measuring() {
        let endless = Pending::Leader(tokio::spawn(std::future::pending()));
        let (faults, stop) = (faults(&[], vec![done("router-leader", endless)]), CancellationToken::new());
        stop.cancel();
        let marks = faults.finish(&Watch::default(), &stop).await;
        assert_eq!(marks.not_measured.len(), 1);
        assert_eq!(marks.done[0].leader_ms, None);
    }
}
