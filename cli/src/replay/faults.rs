//! Carries out the faults of a replay when they are due and measures the cost of each.
//!
//! New requests wait while a fault is carried out (a kill takes a few milliseconds, a restart lasts
//! until the process serves again); running requests continue. The effects of a kill are measured
//! in the background.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfleet_proto::pb;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::measure::FaultMark;
use super::save_positions::SavePositions;
use super::watch::{FailureWatch, KilledNodeQuery, until_leader, until_unrouted};
use crate::args::{FaultKind, FaultSpec, Target};
use crate::calls::RouterCalls;
use crate::cluster::{ChildId, Leader, LocalCluster, process_name};
use crate::process::Role;

/// A fault not yet carried out.
#[derive(Clone, Debug)]
struct PlannedFault {
    at_request: usize,
    kind: FaultKind,
    fault: FaultSpec,
}

/// The measurement still running after a kill.
enum PendingMeasurement {
    Unrouted { node: u32, killed_at: Instant, time: JoinHandle<Option<Duration>> },
    Leader(JoinHandle<Option<Duration>>),
    Complete,
}

/// Planned and completed faults of one replay.
pub(super) struct Faults {
    planned: Vec<PlannedFault>,
    done: Vec<(FaultMark, PendingMeasurement)>,
    watch: Arc<FailureWatch>,
    failed: Vec<String>,
}

/// The outcome of all faults.
#[derive(Debug, Default)]
pub(super) struct FaultResults {
    /// Faults that were carried out.
    pub(super) done: Vec<FaultMark>,
    /// Faults that were not, with the reason.
    pub(super) not_done: Vec<String>,
    /// Kills whose cost could not be measured.
    pub(super) not_measured: Vec<String>,
}

impl Faults {
    /// Plans `kills` and `restarts` over `requests`; of faults due at the same request, kills come
    /// first.
    pub(super) fn plan(
        kills: &[FaultSpec],
        restarts: &[FaultSpec],
        requests: usize,
        watch: &Arc<FailureWatch>,
    ) -> Self {
        let plan = |kind, fault: &FaultSpec| PlannedFault {
            at_request: fault.at_request(requests),
            kind,
            fault: *fault,
        };
        let kills = kills.iter().map(|fault| plan(FaultKind::Kill, fault));
        let restarts = restarts.iter().map(|fault| plan(FaultKind::Restart, fault));
        let mut planned: Vec<_> = kills.chain(restarts).collect();
        // The sort is stable, so kills stay before restarts. Reversed so that the next fault is
        // popped from the end.
        planned.sort_by_key(|planned| planned.at_request);
        planned.reverse();
        Self { planned, done: vec![], watch: Arc::clone(watch), failed: vec![] }
    }

    /// Whether a fault is due before the next request.
    pub(super) fn is_due(&self, started: usize) -> bool {
        self.planned.last().is_some_and(|planned| planned.at_request <= started)
    }

    /// Carries out every due fault. If this is cancelled, the fault in progress counts as not done.
    pub(super) async fn inject_due(
        &mut self,
        started: usize,
        begun: Instant,
        visible: &mut SavePositions,
        mut cluster: Option<&mut LocalCluster>,
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
        planned: &PlannedFault,
        begun: Instant,
        visible: &mut SavePositions,
        cluster: &mut LocalCluster,
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
                (killed, pending.unwrap_or(PendingMeasurement::Complete))
            }
            Target::Instance(number) => {
                (cluster.kill((Role::Instance, number.into())).await?, PendingMeasurement::Complete)
            }
        };
        let mark = fault_mark("kill", planned, killed.child, killed.at.saturating_duration_since(begun));
        self.done.push((mark, pending));
        Ok(())
    }

    fn router_killed(&self, cluster: &LocalCluster, number: u64) {
        self.watch.router_killed(cluster.router_address(number).unwrap_or_default());
    }

    async fn kill_node(
        &mut self,
        node: u32,
        visible: &mut SavePositions,
        cluster: &mut LocalCluster,
    ) -> anyhow::Result<(crate::cluster::KilledProcess, PendingMeasurement)> {
        let routers = RouterCalls::all(&cluster.running_routers(), &cluster.identity()?)?;
        let epoch = current_epoch(&routers, node).await?;
        let block = visible.block_on(node);
        visible.end_epoch(node, epoch);
        let killed = cluster.kill((Role::Node, node.into())).await?;
        self.watch.node_killed(node, epoch, killed.at);
        let dead = KilledNodeQuery { node, epoch, at: killed.at, block };
        let time = tokio::spawn(until_unrouted(routers, dead, Arc::clone(&self.watch)));
        Ok((killed, PendingMeasurement::Unrouted { node, killed_at: killed.at, time }))
    }

    async fn restart(
        &mut self,
        planned: &PlannedFault,
        begun: Instant,
        cluster: &mut LocalCluster,
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
            self.watch.router_restarted(cluster.router_address(child.1).unwrap_or_default());
        }
        cluster.until_serving().await?;
        let mut mark = fault_mark("restart", planned, child, at.saturating_duration_since(begun));
        mark.serving_ms = Some(at.elapsed().as_secs_f64() * 1e3);
        self.done.push((mark, PendingMeasurement::Complete));
        Ok(())
    }

    /// Waits for the running measurements, at most until `stop`.
    pub(super) async fn finish(self, watch: &FailureWatch, stop: &CancellationToken) -> FaultResults {
        let to_come = self.planned.iter().rev();
        let to_come = to_come
            .map(|planned| format!("{} {}: the replay ended before", planned.kind.name(), planned.fault));
        let mut marks = FaultResults {
            not_done: self.failed.iter().cloned().chain(to_come).collect(),
            ..FaultResults::default()
        };
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

impl PendingMeasurement {
    /// Writes the measurement into `mark`; returns whether it is complete.
    async fn finish(self, watch: &FailureWatch, mark: &mut FaultMark) -> bool {
        match self {
            PendingMeasurement::Unrouted { node, killed_at, time } => {
                let unrouted = time.await.ok().flatten();
                let named = watch.last_named_after(node, killed_at).unwrap_or_default();
                mark.unrouted_ms = unrouted.map(|forgotten| forgotten.max(named).as_secs_f64() * 1e3);
                mark.unrouted_ms.is_some()
            }
            PendingMeasurement::Leader(time) => {
                mark.leader_ms = time.await.ok().flatten().map(|time| time.as_secs_f64() * 1e3);
                mark.leader_ms.is_some()
            }
            PendingMeasurement::Complete => true,
        }
    }
}

fn fault_mark(kind: &'static str, planned: &PlannedFault, child: ChildId, at: Duration) -> FaultMark {
    FaultMark {
        at,
        kind,
        target: planned.fault.target.to_string(),
        process: process_name(child),
        at_request: planned.at_request,
        unrouted_ms: None,
        leader_ms: None,
        serving_ms: None,
    }
}

fn watch_leader(
    cluster: &LocalCluster,
    killed_at: Instant,
    leader: Leader,
) -> anyhow::Result<PendingMeasurement> {
    let routers = RouterCalls::all(&cluster.running_routers(), &cluster.identity()?)?;
    Ok(PendingMeasurement::Leader(tokio::spawn(until_leader(routers, killed_at, leader.term))))
}

/// The latest epoch of `node` known to any router.
async fn current_epoch(routers: &[RouterCalls], node: u32) -> anyhow::Result<u64> {
    let mut statuses = vec![];
    for router in routers {
        statuses.extend(router.status().await);
    }
    latest_epoch(&statuses, node).ok_or_else(|| anyhow::anyhow!("no router knows node {node}"))
}

fn latest_epoch(statuses: &[pb::StatusReply], node: u32) -> Option<u64> {
    let known = statuses.iter().flat_map(|status| &status.nodes).filter(|known| known.node == node);
    known.map(|known| known.epoch).max()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn faults(planned: &[&str], done: Vec<(FaultMark, PendingMeasurement)>) -> Faults {
        let kills: Vec<FaultSpec> = planned.iter().map(|text| text.parse().unwrap()).collect();
        Faults { done, ..Faults::plan(&kills, &[], 100, &Arc::default()) }
    }

    fn done(target: &str, pending: PendingMeasurement) -> (FaultMark, PendingMeasurement) {
        let fault: FaultSpec = format!("{target}@10%").parse().unwrap();
        let planned = PlannedFault { at_request: 10, kind: FaultKind::Kill, fault };
        (fault_mark("kill", &planned, (Role::Router, 1), Duration::ZERO), pending)
    }

    #[test]
    fn takes_the_latest_epoch_of_all_routers() {
        let status = |epoch| pb::StatusReply {
            nodes: vec![pb::NodeStatus { node: 2, epoch, ..pb::NodeStatus::default() }],
            ..pb::StatusReply::default()
        };
        assert_eq!(latest_epoch(&[status(3), status(5), status(4)], 2), Some(5));
        assert_eq!(latest_epoch(&[status(3)], 1), None);
    }

    #[tokio::test]
    async fn names_skipped_and_unmeasured_faults() {
        let lost = PendingMeasurement::Leader(tokio::spawn(async { None }));
        let faults = faults(
            &["node:2@50%"],
            vec![done("router-leader", lost), done("instance:1", PendingMeasurement::Complete)],
        );
        let marks = faults.finish(&FailureWatch::default(), &CancellationToken::new()).await;
        assert_eq!(marks.not_done, ["kill node:2@50%: the replay ended before"]);
        assert_eq!(marks.not_measured, ["kill router-leader (router-1)"]);
        assert_eq!(marks.done.len(), 2);
    }

    #[tokio::test]
    async fn stop_ends_measurement() {
        let endless = PendingMeasurement::Leader(tokio::spawn(std::future::pending()));
        let (faults, stop) = (faults(&[], vec![done("router-leader", endless)]), CancellationToken::new());
        stop.cancel();
        let marks = faults.finish(&FailureWatch::default(), &stop).await;
        assert_eq!(marks.not_measured.len(), 1);
        assert_eq!(marks.done[0].leader_ms, None);
    }
}
