//! Carries out the faults of a replay at their moments, and measures what each one cost.
//!
//! New requests wait while a fault is carried out (a kill takes a few milliseconds, a restart until the
//! process serves again), those under way do not. What comes after a kill is measured in the background.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::measure::FaultMark;
use super::visible::Visible;
use super::watch::{DeadNode, Watch, until_leader, until_unrouted};
use crate::args::{Fault, FaultKind, Target};
use crate::calls::RouterCalls;
use crate::cluster::{ChildId, Cluster, name};
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
    watch: std::sync::Arc<Watch>,
    notes: Vec<String>,
}

impl Faults {
    /// Plans `kills` and `restarts` over `requests`; at the same moment a kill comes first.
    pub(super) fn plan(
        kills: &[Fault],
        restarts: &[Fault],
        requests: usize,
        watch: &std::sync::Arc<Watch>,
    ) -> Self {
        let plan =
            |kind, fault: &Fault| Planned { at_request: fault.at_request(requests), kind, fault: *fault };
        let kills = kills.iter().map(|fault| plan(FaultKind::Kill, fault));
        let restarts = restarts.iter().map(|fault| plan(FaultKind::Restart, fault));
        let mut planned: Vec<_> = kills.chain(restarts).collect();
        // Stable: kills stay before restarts. Reversed, so that the next one is popped from the end.
        planned.sort_by_key(|planned| planned.at_request);
        planned.reverse();
        Self { planned, done: vec![], watch: std::sync::Arc::clone(watch), notes: vec![] }
    }

    /// Whether a fault comes before the next request.
    pub(super) fn is_due(&self, started: usize) -> bool {
        self.planned.last().is_some_and(|planned| planned.at_request <= started)
    }

    /// Carries out every fault that is due.
    pub(super) async fn due(
        &mut self,
        started: usize,
        begun: Instant,
        visible: &mut Visible,
        mut cluster: Option<&mut Cluster>,
    ) {
        while self.is_due(started) {
            let (Some(planned), Some(cluster)) = (self.planned.pop(), cluster.as_deref_mut()) else { return };
            let outcome = match planned.kind {
                FaultKind::Kill => self.kill(&planned, begun, visible, cluster).await,
                FaultKind::Restart => self.restart(&planned, begun, cluster).await,
            };
            if let Err(error) = outcome {
                self.notes.push(format!("{}: {error}", planned.fault));
                tracing::error!(fault = %planned.fault, %error, "a fault was not carried out");
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
                let killed = cluster.kill_leader().await?;
                (killed, watch_leader(cluster, killed.at)?)
            }
            Target::Router(number) => {
                let leads = cluster.leader().await.is_ok_and(|leader| leader == number);
                let killed = cluster.kill((Role::Router, number)).await?;
                (killed, if leads { watch_leader(cluster, killed.at)? } else { Pending::Nothing })
            }
            Target::Instance(number) => {
                (cluster.kill((Role::Instance, number.into())).await?, Pending::Nothing)
            }
        };
        let mark = mark("kill", planned, killed.child, killed.at.saturating_duration_since(begun));
        self.done.push((mark, pending));
        Ok(())
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
        let time = tokio::spawn(until_unrouted(routers, dead));
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
                None => (Role::Router, cluster.leader().await?),
            },
        };
        let at = Instant::now();
        cluster.restart(child).await?;
        cluster.until_serving().await?;
        let mut mark = mark("restart", planned, child, at.saturating_duration_since(begun));
        mark.serving_ms = Some(at.elapsed().as_secs_f64() * 1e3);
        self.done.push((mark, Pending::Nothing));
        Ok(())
    }

    /// Waits for what is still being measured. Answers the faults, and why others were not carried out.
    pub(super) async fn finish(self, watch: &Watch) -> (Vec<FaultMark>, Vec<String>) {
        let mut marks = vec![];
        for (mut mark, pending) in self.done {
            match pending {
                Pending::Unrouted { node, killed_at, time } => {
                    let forgotten = time.await.ok().flatten();
                    let named = watch.named_for(node, killed_at).unwrap_or_default();
                    mark.unrouted_ms = forgotten.map(|forgotten| forgotten.max(named).as_secs_f64() * 1e3);
                }
                Pending::Leader(time) => {
                    mark.leader_ms = time.await.ok().flatten().map(|time| time.as_secs_f64() * 1e3);
                }
                Pending::Nothing => {}
            }
            marks.push(mark);
        }
        (marks, self.notes)
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

fn watch_leader(cluster: &Cluster, killed_at: Instant) -> anyhow::Result<Pending> {
    let routers = RouterCalls::all(&cluster.running_routers(), &cluster.identity()?)?;
    Ok(Pending::Leader(tokio::spawn(until_leader(routers, killed_at))))
}

async fn epoch_of(routers: &[RouterCalls], node: u32) -> anyhow::Result<u64> {
    for router in routers {
        if let Ok(status) = router.status().await
            && let Some(found) = status.nodes.iter().find(|status| status.node == node)
        {
            return Ok(found.epoch);
        }
    }
    anyhow::bail!("no router knows node {node}")
}
