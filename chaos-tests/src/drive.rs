//! Executes a plan against a cluster, heals the cluster, and checks every invariant.
//!
//! Not here: the plan (`workload.rs`) and the properties (`invariants/`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use crate::cluster::{CALL_TIMEOUT, Cluster, ROUTERS_COUNT, RouterClients, SuiteError};
use crate::fake_node::{FakeNode, NodeCommand};
use crate::invariants::{
    announcements_are_kept, epochs_grow, fenced_stay_silent, pins_are_kept, replicas_agree,
};
use crate::oracle::{AcknowledgedState, HolderAnswer, Oracle, PinFact, ReplicaStatus};
use crate::pins::{self, call_any_router};
use crate::workload::{CHAINS_COUNT, NODES_COUNT, Step, chain, shard_of_node};

/// Time limit for a cluster with all routers running.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Counts of a run, so that a suite can verify that it was not trivial.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunReport {
    /// Router processes killed.
    pub kills: u32,
    /// Acknowledged batches, by their numbers.
    pub batches: u64,
    /// Epochs assigned.
    pub epochs: usize,
    /// Blocks compared at the end.
    pub blocks_compared: u64,
}

/// Runs a plan to its end.
///
/// # Errors
/// The first violated invariant, or a failure of the run itself.
pub async fn run(program: &Path, plan: &[Step]) -> Result<RunReport, SuiteError> {
    let cluster = Cluster::start(program)?;
    let contacts = cluster.router_clients();
    let oracle = Arc::new(Mutex::new(Oracle::default()));
    let start = |node| (node, FakeNode::start(node, contacts.clone(), Arc::clone(&oracle)));
    let speakers = (1..=NODES_COUNT).map(start).collect();
    let mut drive = PlanRunner {
        cluster,
        router_clients: contacts,
        oracle,
        fake_nodes: speakers,
        report: RunReport::default(),
    };
    for (position, step) in plan.iter().enumerate() {
        drive.step(step).await.map_err(|error| format!("step {position} {step:?}: {error}"))?;
    }
    drive.heal_and_check().await?;
    Ok(drive.report)
}

struct PlanRunner {
    cluster: Cluster,
    router_clients: RouterClients,
    oracle: Arc<Mutex<Oracle>>,
    fake_nodes: BTreeMap<u32, mpsc::Sender<NodeCommand>>,
    report: RunReport,
}

impl PlanRunner {
    async fn step(&mut self, step: &Step) -> Result<(), SuiteError> {
        match step {
            Step::Hold { node, wanted } => self.order(*node, NodeCommand::Hold(wanted.clone())).await,
            Step::SkipNumber { node } => self.order(*node, NodeCommand::SkipNumber).await,
            Step::RestartNode { node } => self.order(*node, NodeCommand::Restart).await,
            Step::Silence { node } => self.order(*node, NodeCommand::Silence).await,
            Step::Wake { node } => self.order(*node, NodeCommand::Wake).await,
            Step::Pin { pin, chain } => self.pin(*pin, *chain).await,
            Step::Unpin { pin } => self.unpin(*pin).await,
            Step::KillLeader => match self.router_clients.leader().await {
                Some(position) => self.kill(position),
                None => Ok(()),
            },
            Step::KillRouter { router } => self.kill(*router),
            Step::KillAll => self.kill_all(),
            Step::RestartRouters => self.restart(),
            Step::CheckStatus => self.check_status().await,
        }
    }

    async fn order(&self, node: u32, order: NodeCommand) -> Result<(), SuiteError> {
        let sent = timeout(PATIENCE, self.fake_nodes[&node].send(order)).await;
        sent.map_err(|_| format!("node {node} got no batch acknowledged for {PATIENCE:?}"))?
            .map_err(|_| format!("node {node} ended").into())
    }

    /// Kills one router. A router that is already down is restarted first, so that a majority
    /// remains.
    fn kill(&mut self, position: usize) -> Result<(), SuiteError> {
        self.restart()?;
        self.report.kills += 1;
        self.cluster.kill(position)
    }

    fn kill_all(&mut self) -> Result<(), SuiteError> {
        for position in 0..ROUTERS_COUNT {
            self.report.kills += u32::from(self.cluster.is_running(position));
            self.cluster.kill(position)?;
        }
        self.restart()
    }

    fn restart(&mut self) -> Result<(), SuiteError> {
        (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.start_router(position))
    }

    async fn pin(&mut self, pin: u64, number: u32) -> Result<(), SuiteError> {
        let fact = PinFact { owner: format!("owner-{pin}"), blocks: chain(number) };
        let request = pb::PinRequest {
            pin,
            owner: fact.owner.clone(),
            blocks: convert::hashes_to_bytes(&fact.blocks),
            ..pb::PinRequest::default()
        };
        call_any_router(&self.router_clients, |mut client| {
            let request = request.clone();
            async move { client.pin(request).await.map(drop) }
        })
        .await?;
        self.oracle.lock().pins.insert(pin, fact);
        Ok(())
    }

    async fn unpin(&mut self, pin: u64) -> Result<(), SuiteError> {
        let request = pb::UnpinRequest { pin, owner: format!("owner-{pin}") };
        call_any_router(&self.router_clients, |mut client| {
            let request = request.clone();
            async move { client.unpin(request).await.map(drop) }
        })
        .await?;
        self.oracle.lock().pins.remove(&pin);
        Ok(())
    }

    /// Records the status of every router.
    async fn check_status(&self) -> Result<(), SuiteError> {
        for position in 0..ROUTERS_COUNT {
            if let Some(status) = self.router_clients.status(position).await {
                let router = status.router;
                let standing = |group: pb::GroupStatus| {
                    let pb::GroupStatus { group, applied_index: applied, digest, .. } = group;
                    ReplicaStatus { router, group, applied, digest }
                };
                self.oracle.lock().statuses.extend(status.groups.into_iter().map(standing));
            }
        }
        Ok(replicas_agree::check(&self.oracle.lock().statuses)?)
    }

    /// Ends the faults: the cluster must recover, and everything acknowledged must be present.
    async fn heal_and_check(&mut self) -> Result<(), SuiteError> {
        self.restart()?;
        let live = self.settle().await?;
        self.wait_until_fenced(&live).await?;
        self.wait_until_caught_up().await?;
        self.check_holders(&live).await?;
        self.check_pins().await?;
        self.wait_until_caught_up().await?;
        let oracle = self.oracle.lock();
        epochs_grow::check(&oracle)?;
        replicas_agree::check(&oracle.statuses)?;
        self.report.batches = oracle.nodes.values().map(|fact| fact.seq).sum();
        self.report.epochs = oracle.epochs.values().map(Vec::len).sum();
        Ok(())
    }

    /// Waits until every fake node has no batch in flight. Returns the live ones.
    async fn settle(&self) -> Result<Vec<u32>, SuiteError> {
        let mut live = Vec::new();
        for &node in self.fake_nodes.keys() {
            let (answer, settled) = oneshot::channel();
            self.order(node, NodeCommand::Settle(answer)).await?;
            let speaks =
                timeout(PATIENCE, settled).await.map_err(|_| format!("node {node} does not settle"))??;
            live.extend(speaks.then_some(node));
        }
        Ok(live)
    }

    /// Waits until every router has fenced the silent nodes.
    async fn wait_until_fenced(&self, live: &[u32]) -> Result<(), SuiteError> {
        let deadline = Instant::now() + PATIENCE;
        for position in 0..ROUTERS_COUNT {
            loop {
                let nodes =
                    self.router_clients.status(position).await.map(|status| status.nodes).unwrap_or_default();
                let known = |node: &u32| nodes.iter().any(|status| status.node == *node && status.live);
                let silent =
                    |status: &&pb::NodeStatus| status.node <= NODES_COUNT && !live.contains(&status.node);
                if !nodes.is_empty() && live.iter().all(known) && !nodes.iter().filter(silent).any(|s| s.live)
                {
                    break;
                }
                retry_until(deadline, "silent nodes are not fenced everywhere, or live ones are").await?;
            }
        }
        Ok(())
    }

    /// Compares every chain on every router with the acknowledged state. If a stalled machine got a
    /// node fenced meanwhile, the node joins again and the comparison restarts.
    async fn check_holders(&mut self, live: &[u32]) -> Result<(), SuiteError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let before = self.facts(live);
            let answers = self.answers(&before).await;
            if let Some(answers) = answers.filter(|_| self.facts(live) == before) {
                let epochs = before.iter().map(|(node, fact)| (*node, fact.epoch)).collect();
                for answer in &answers {
                    fenced_stay_silent::check(&epochs, answer)?;
                    before
                        .iter()
                        .try_for_each(|(node, fact)| announcements_are_kept::check(*node, fact, answer))?;
                    self.report.blocks_compared +=
                        answer.holders.values().map(|len| u64::from(*len)).sum::<u64>();
                }
                return Ok(());
            }
            retry_until(deadline, "routers do not answer lookups").await?;
            self.settle().await?;
        }
    }

    fn facts(&self, live: &[u32]) -> BTreeMap<u32, AcknowledgedState> {
        let oracle = self.oracle.lock();
        let facts = oracle.nodes.iter().filter(|(node, _)| live.contains(node));
        facts.map(|(node, fact)| (*node, fact.clone())).collect()
    }

    /// Each router's answer for each chain, after it has applied everything acknowledged.
    async fn answers(&self, facts: &BTreeMap<u32, AcknowledgedState>) -> Option<Vec<HolderAnswer>> {
        let seen = |(node, fact): (&u32, &AcknowledgedState)| {
            let shard = shard_of_node(*node).into();
            pb::AnnouncePosition { node: *node, epoch: fact.epoch, seq: fact.seq, shard }
        };
        let after: Vec<pb::AnnouncePosition> = facts.iter().map(seen).collect();
        let mut answers = Vec::new();
        for router in 0..ROUTERS_COUNT {
            for number in 0..CHAINS_COUNT {
                let hashes = convert::hashes_to_bytes(&chain(number));
                let request = pb::LookupRequest { hashes, after: after.clone(), fresh: false };
                let reply = self.router_clients.client(router).lookup(request).await.ok()?.into_inner();
                answers.push(HolderAnswer { router, chain: number, holders: leading_blocks(&reply.runs) });
            }
        }
        Some(answers)
    }

    /// Reads the pins as a joining node receives them, until they match or time is up: a leader
    /// distributes a pin shortly after its commit.
    async fn check_pins(&self) -> Result<(), SuiteError> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        loop {
            let told = pins::announced_pins(&self.router_clients, &self.oracle).await?;
            let verdict = pins_are_kept::check(&self.oracle.lock().pins, &told);
            if verdict.is_ok() || Instant::now() > deadline {
                return Ok(verdict?);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until all routers have applied the same entry, and records their digests there.
    async fn wait_until_caught_up(&self) -> Result<(), SuiteError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut applied = Vec::new();
            for position in 0..ROUTERS_COUNT {
                let status = self.router_clients.status(position).await;
                applied.extend(
                    status.map(|status| {
                        status.groups.iter().map(|group| group.applied_index).collect::<Vec<_>>()
                    }),
                );
            }
            self.check_status().await?;
            if applied.len() == ROUTERS_COUNT && applied.windows(2).all(|pair| pair[0] == pair[1]) {
                return Ok(());
            }
            retry_until(deadline, "routers did not reach the same entry").await?;
        }
    }
}

/// Number of leading blocks that each holder has.
fn leading_blocks(runs: &[pb::HolderRun]) -> BTreeMap<(u32, u64), u32> {
    let mut shares = BTreeMap::new();
    for run in runs {
        for holder in &run.holders {
            let share = shares.entry((holder.node, holder.epoch)).or_insert(0);
            if *share == run.start_blocks {
                *share += run.len_blocks;
            }
        }
    }
    shares.retain(|_, share| *share > 0);
    shares
}

async fn retry_until(deadline: Instant, what: &str) -> Result<(), SuiteError> {
    if Instant::now() > deadline {
        return Err(format!("{what} after {PATIENCE:?}").into());
    }
    sleep(POLL_INTERVAL).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_blocks_count_from_the_first_block_without_a_gap() {
        let holder = |node| pb::Holder { node, epoch: 1, ..pb::Holder::default() };
        let run = |start_blocks, len_blocks, holders: &[u32]| pb::HolderRun {
            start_blocks,
            len_blocks,
            holders: holders.iter().map(|node| holder(*node)).collect(),
            ..Default::default()
        };
        let shares = leading_blocks(&[run(0, 4, &[1, 2]), run(4, 2, &[1]), run(6, 3, &[1, 2, 3])]);
        assert_eq!(shares, BTreeMap::from([((1, 1), 9), ((2, 1), 4)]));
    }
}
