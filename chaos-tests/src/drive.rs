//! Carries out a plan against a cluster, heals it, and holds every invariant against what it says.
//!
//! Not here: the plan (`workload.rs`), the properties (`invariants/`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfleet_proto::{convert, pb};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use crate::cluster::{CALL_TIMEOUT, Cluster, Contacts, ROUTERS_COUNT, Trouble};
use crate::invariants::{announces_kept, epochs_grow, fenced_stay_silent, pins_kept, replicas_agree};
use crate::oracle::{Acknowledged, Answer, Oracle, PinFact, Standing};
use crate::pins::{self, until_one_does};
use crate::speaker::{Order, Speaker};
use crate::workload::{CHAINS_COUNT, NODES_COUNT, Step, chain, shard_of_node};

/// How long a cluster with all routers running may take to do what it must.
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What a run amounted to, so that a suite can see that it did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Router processes killed.
    pub kills: u32,
    /// Batches that were acknowledged, as far as numbers say.
    pub batches: u64,
    /// Epochs given out.
    pub epochs: usize,
    /// Blocks compared at the end.
    pub blocks_compared: u64,
}

/// Runs a plan to its end.
///
/// # Errors
/// With the first invariant that does not hold, or what kept the run from ending.
pub async fn run(program: &Path, plan: &[Step]) -> Result<Tally, Trouble> {
    let cluster = Cluster::start(program)?;
    let contacts = cluster.contacts();
    let oracle = Arc::new(Mutex::new(Oracle::default()));
    let start = |node| (node, Speaker::start(node, contacts.clone(), Arc::clone(&oracle)));
    let speakers = (1..=NODES_COUNT).map(start).collect();
    let mut drive = Drive { cluster, contacts, oracle, speakers, tally: Tally::default() };
    for (position, step) in plan.iter().enumerate() {
        drive.step(step).await.map_err(|error| format!("step {position} {step:?}: {error}"))?;
    }
    drive.heal_and_judge().await?;
    Ok(drive.tally)
}

struct Drive {
    cluster: Cluster,
    contacts: Contacts,
    oracle: Arc<Mutex<Oracle>>,
    speakers: BTreeMap<u32, mpsc::Sender<Order>>,
    tally: Tally,
}

impl Drive {
    async fn step(&mut self, step: &Step) -> Result<(), Trouble> {
        match step {
            Step::Hold { node, wanted } => self.order(*node, Order::Hold(wanted.clone())).await,
            Step::SkipNumber { node } => self.order(*node, Order::SkipNumber).await,
            Step::RestartNode { node } => self.order(*node, Order::Restart).await,
            Step::Silence { node } => self.order(*node, Order::Silence).await,
            Step::Wake { node } => self.order(*node, Order::Wake).await,
            Step::Pin { pin, chain } => self.pin(*pin, *chain).await,
            Step::Unpin { pin } => self.unpin(*pin).await,
            Step::KillLeader => match self.contacts.leader().await {
                Some(position) => self.kill(position),
                None => Ok(()),
            },
            Step::KillRouter { router } => self.kill(*router),
            Step::KillAll => self.kill_all(),
            Step::RestartRouters => self.restart(),
            Step::Look => self.look().await,
        }
    }

    async fn order(&self, node: u32, order: Order) -> Result<(), Trouble> {
        let sent = timeout(PATIENCE, self.speakers[&node].send(order)).await;
        sent.map_err(|_| format!("node {node} got no batch acknowledged for {PATIENCE:?}"))?
            .map_err(|_| format!("node {node} ended").into())
    }

    /// Kills one router; a cluster that lacks one already gets it back first, so that a majority stays.
    fn kill(&mut self, position: usize) -> Result<(), Trouble> {
        self.restart()?;
        self.tally.kills += 1;
        self.cluster.kill(position)
    }

    fn kill_all(&mut self) -> Result<(), Trouble> {
        for position in 0..ROUTERS_COUNT {
            self.tally.kills += u32::from(self.cluster.is_running(position));
            self.cluster.kill(position)?;
        }
        self.restart()
    }

    fn restart(&mut self) -> Result<(), Trouble> {
        (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.start_router(position))
    }

    async fn pin(&mut self, pin: u64, number: u32) -> Result<(), Trouble> {
        let fact = PinFact { owner: format!("owner-{pin}"), blocks: chain(number) };
        let request = pb::PinRequest {
            pin,
            owner: fact.owner.clone(),
            blocks: convert::hashes_to_bytes(&fact.blocks),
            ..pb::PinRequest::default()
        };
        until_one_does(&self.contacts, |mut client| {
            let request = request.clone();
            async move { client.pin(request).await.map(drop) }
        })
        .await?;
        self.oracle.lock().pins.insert(pin, fact);
        Ok(())
    }

    async fn unpin(&mut self, pin: u64) -> Result<(), Trouble> {
        let request = pb::UnpinRequest { pin, owner: format!("owner-{pin}") };
        until_one_does(&self.contacts, |mut client| {
            let request = request.clone();
            async move { client.unpin(request).await.map(drop) }
        })
        .await?;
        self.oracle.lock().pins.remove(&pin);
        Ok(())
    }

    /// Notes where every router stands.
    async fn look(&self) -> Result<(), Trouble> {
        for position in 0..ROUTERS_COUNT {
            if let Some(status) = self.contacts.status(position).await {
                let router = status.router;
                let standing = |group: pb::GroupStatus| {
                    let pb::GroupStatus { group, applied_index: applied, digest, .. } = group;
                    Standing { router, group, applied, digest }
                };
                self.oracle.lock().standings.extend(status.groups.into_iter().map(standing));
            }
        }
        Ok(replicas_agree::check(&self.oracle.lock().standings)?)
    }

    /// Faults stop here: the cluster must come back, and then everything acknowledged must be there.
    async fn heal_and_judge(&mut self) -> Result<(), Trouble> {
        self.restart()?;
        let live = self.settle().await?;
        self.wait_until_fenced(&live).await?;
        self.wait_until_level().await?;
        self.judge_holders(&live).await?;
        self.judge_pins().await?;
        self.wait_until_level().await?;
        let oracle = self.oracle.lock();
        epochs_grow::check(&oracle)?;
        replicas_agree::check(&oracle.standings)?;
        self.tally.batches = oracle.nodes.values().map(|fact| fact.seq).sum();
        self.tally.epochs = oracle.epochs.values().map(Vec::len).sum();
        Ok(())
    }

    /// Waits until every stand-in node has nothing under way; answers which of them speak.
    async fn settle(&self) -> Result<Vec<u32>, Trouble> {
        let mut live = Vec::new();
        for &node in self.speakers.keys() {
            let (answer, settled) = oneshot::channel();
            self.order(node, Order::Settle(answer)).await?;
            let speaks =
                timeout(PATIENCE, settled).await.map_err(|_| format!("node {node} does not settle"))??;
            live.extend(speaks.then_some(node));
        }
        Ok(live)
    }

    /// Waits until every router knows that the silent nodes are gone.
    async fn wait_until_fenced(&self, live: &[u32]) -> Result<(), Trouble> {
        let deadline = Instant::now() + PATIENCE;
        for position in 0..ROUTERS_COUNT {
            loop {
                let nodes =
                    self.contacts.status(position).await.map(|status| status.nodes).unwrap_or_default();
                let known = |node: &u32| nodes.iter().any(|status| status.node == *node && status.live);
                let silent =
                    |status: &&pb::NodeStatus| status.node <= NODES_COUNT && !live.contains(&status.node);
                if !nodes.is_empty() && live.iter().all(known) && !nodes.iter().filter(silent).any(|s| s.live)
                {
                    break;
                }
                give_up_after(deadline, "silent nodes are not fenced everywhere, or live ones are").await?;
            }
        }
        Ok(())
    }

    /// Compares every chain on every router with what was acknowledged. A node that a stalled machine let
    /// fall silent meanwhile joins again; then the comparison starts over.
    async fn judge_holders(&mut self, live: &[u32]) -> Result<(), Trouble> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let before = self.facts(live);
            let answers = self.answers(&before).await;
            if let Some(answers) = answers.filter(|_| self.facts(live) == before) {
                let epochs = before.iter().map(|(node, fact)| (*node, fact.epoch)).collect();
                for answer in &answers {
                    fenced_stay_silent::check(&epochs, answer)?;
                    before.iter().try_for_each(|(node, fact)| announces_kept::check(*node, fact, answer))?;
                    self.tally.blocks_compared +=
                        answer.holders.values().map(|len| u64::from(*len)).sum::<u64>();
                }
                return Ok(());
            }
            give_up_after(deadline, "routers do not answer lookups").await?;
            self.settle().await?;
        }
    }

    fn facts(&self, live: &[u32]) -> BTreeMap<u32, Acknowledged> {
        let oracle = self.oracle.lock();
        let facts = oracle.nodes.iter().filter(|(node, _)| live.contains(node));
        facts.map(|(node, fact)| (*node, fact.clone())).collect()
    }

    /// What every router says of every chain once it has seen everything acknowledged.
    async fn answers(&self, facts: &BTreeMap<u32, Acknowledged>) -> Option<Vec<Answer>> {
        let seen = |(node, fact): (&u32, &Acknowledged)| {
            let shard = shard_of_node(*node).into();
            pb::Seen { node: *node, epoch: fact.epoch, seq: fact.seq, shard }
        };
        let after: Vec<pb::Seen> = facts.iter().map(seen).collect();
        let mut answers = Vec::new();
        for router in 0..ROUTERS_COUNT {
            for number in 0..CHAINS_COUNT {
                let hashes = convert::hashes_to_bytes(&chain(number));
                let request = pb::LookupRequest { hashes, after: after.clone(), fresh: false };
                let reply = self.contacts.client(router).lookup(request).await.ok()?.into_inner();
                answers.push(Answer { router, chain: number, holders: shares(&reply.runs) });
            }
        }
        Some(answers)
    }

    /// Asks for the pins as a joining node is told them, until they are right or patience ends: a leader
    /// tells nodes of a pin a moment after it is committed.
    async fn judge_pins(&self) -> Result<(), Trouble> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        loop {
            let told = pins::told(&self.contacts, &self.oracle).await?;
            let verdict = pins_kept::check(&self.oracle.lock().pins, &told);
            if verdict.is_ok() || Instant::now() > deadline {
                return Ok(verdict?);
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until all routers have applied the same entry, and notes their digests there.
    async fn wait_until_level(&self) -> Result<(), Trouble> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut applied = Vec::new();
            for position in 0..ROUTERS_COUNT {
                let status = self.contacts.status(position).await;
                applied.extend(
                    status.map(|status| {
                        status.groups.iter().map(|group| group.applied_index).collect::<Vec<_>>()
                    }),
                );
            }
            self.look().await?;
            if applied.len() == ROUTERS_COUNT && applied.windows(2).all(|pair| pair[0] == pair[1]) {
                return Ok(());
            }
            give_up_after(deadline, "routers do not reach the same entry").await?;
        }
    }
}

/// Blocks from the first one on that each holder has.
fn shares(runs: &[pb::HolderRun]) -> BTreeMap<(u32, u64), u32> {
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

async fn give_up_after(deadline: Instant, what: &str) -> Result<(), Trouble> {
    if Instant::now() > deadline {
        return Err(format!("{what} after {PATIENCE:?}").into());
    }
    sleep(LOOK_EVERY).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_count_from_the_first_block_without_a_gap() {
        let holder = |node| pb::Holder { node, epoch: 1, ..pb::Holder::default() };
        let run = |start_blocks, len_blocks, holders: &[u32]| pb::HolderRun {
            start_blocks,
            len_blocks,
            holders: holders.iter().map(|node| holder(*node)).collect(),
            ..Default::default()
        };
        let shares = shares(&[run(0, 4, &[1, 2]), run(4, 2, &[1]), run(6, 3, &[1, 2, 3])]);
        assert_eq!(shares, BTreeMap::from([((1, 1), 9), ((2, 1), 4)]));
    }
}
