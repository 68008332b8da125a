//! Measures the value of consensus: routers are killed or restarted under load, and every decision
//! is compared with the state acknowledged before the query.
//!
//! The experiment follows SG#39822, which restarted an index in memory and one that persists itself
//! under load. The load is in `load.rs`, queries in `deciders.rs`, evaluation in `verdicts.rs`, the
//! table in `table.rs`. Not here: whole-state properties after a run (`crate::invariants`).

pub mod deciders;
pub mod load;
pub mod table;
pub mod verdicts;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::sleep;

use crate::cluster::{Cluster, ROUTERS_COUNT, RouterClients, SHARDS_COUNT, SuiteError};
use crate::oracle::Oracle;
use deciders::Deciders;
use load::IndexLoad;
use table::ResultRow;

/// A run without progress for this long hangs.
const HANG: Duration = Duration::from_secs(120);

/// Interval between checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Node silence limit, at its maximum: a starved machine must not fence nodes here, because lost
/// and ended state would be indistinguishable.
const SILENCE_MS: u64 = 60_000;

/// Pins in force before the first fault, so that some can be lost. The owners race for one at a
/// time, so all but one of these stay until the end.
const PINS_MIN: usize = 4;

/// Control and the shards.
const GROUPS_COUNT: u64 = SHARDS_COUNT as u64 + 1;

/// Fault injected into the routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Each group's leader in turn, and each router in turn, is killed and restarted at once. A
    /// leader that returns before its absence is noticed is the harder case.
    Restart,
    /// Each group's leader in turn is killed, and restarted some decisions later.
    LeaderKill,
    /// Each router in turn is down for nearly a third of the run: with three routers, every
    /// minority.
    MinorityLoss,
    /// All routers are killed and start with empty disks, like an index in memory, and nodes
    /// announce again. Included as a reference.
    Forget,
}

impl Fault {
    /// Name in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::Restart => "router restart",
            Fault::LeaderKill => "leader kill",
            Fault::MinorityLoss => "loss of any minority",
            Fault::Forget => "restart without log",
        }
    }

    /// Number of faults in one run.
    fn rounds(self) -> u64 {
        match self {
            Fault::Restart => 6 * ROUTERS_COUNT as u64,
            Fault::LeaderKill => 2 * GROUPS_COUNT,
            Fault::MinorityLoss => ROUTERS_COUNT as u64,
            Fault::Forget => 2,
        }
    }
}

/// Parameters of one run.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// The fault.
    pub fault: Fault,
    /// Decisions to count.
    pub decisions: u64,
    /// Whether queries about recent state use `fresh`. Without it, a lagging follower answers from
    /// its own state.
    pub fresh: bool,
    /// Seed of every random choice.
    pub seed: u64,
}

/// State shared by the parts of a run.
pub(crate) struct ExperimentState {
    pub(crate) oracle: Arc<Mutex<Oracle>>,
    pub(crate) row: Mutex<ResultRow>,
    /// Decisions counted.
    pub(crate) decided: AtomicU64,
}

/// Runs the experiment with routers of this program.
///
/// # Errors
/// If the cluster does not start, or the run hangs; findings are in the row.
pub async fn run(program: &Path, experiment: Experiment) -> Result<ResultRow, SuiteError> {
    let cluster = Cluster::start_with(program, |config| config.timings.silence_ms = SILENCE_MS)?;
    let contacts = cluster.router_clients();
    let shared = Arc::new(ExperimentState {
        oracle: Arc::default(),
        row: Mutex::new(ResultRow::of(&experiment)),
        decided: AtomicU64::new(0),
    });
    let load = IndexLoad::start(&contacts, &shared, experiment.seed).await?;
    let deciders = Deciders::start(&cluster, &shared, experiment)?;
    let mut strikes = FaultInjector { cluster, contacts, shared: Arc::clone(&shared) };
    strikes.run(experiment).await?;
    deciders.stop().await;
    let FaultInjector { cluster, contacts, .. } = strikes;
    load.stop(&contacts, &shared).await?;
    deciders::count_stale_everywhere(&contacts, &shared).await?;
    drop(cluster);
    let row = shared.row.lock().clone();
    Ok(row)
}

/// Injects the faults.
struct FaultInjector {
    cluster: Cluster,
    contacts: RouterClients,
    shared: Arc<ExperimentState>,
}

impl FaultInjector {
    /// Injects faults at even distances, counted in decisions; killed routers restart in between.
    /// Decisions before the first pin are counted in addition.
    async fn run(&mut self, Experiment { fault, decisions, .. }: Experiment) -> Result<(), SuiteError> {
        self.wait_until_pinned().await?;
        let rounds = fault.rounds();
        let first = self.shared.decided.load(Ordering::Relaxed);
        for round in 0..rounds {
            let at = |eighths: u64| first + (8 * round + eighths) * decisions / (8 * rounds);
            self.wait_until_decided(at(1)).await?;
            let struck = self.inject(fault, round).await?;
            self.shared.row.lock().faults += 1;
            self.wait_until_decided(at(if fault == Fault::MinorityLoss { 7 } else { 4 })).await?;
            struck.into_iter().try_for_each(|position| self.cluster.start_router(position))?;
        }
        self.wait_until_decided(first + decisions).await
    }

    /// Injects one fault. Returns the router to restart later.
    async fn inject(&mut self, fault: Fault, round: u64) -> Result<Option<usize>, SuiteError> {
        let turn = (round % ROUTERS_COUNT as u64) as usize;
        match fault {
            Fault::Restart => {
                let position = if round.is_multiple_of(2) { self.leader_of(round / 2).await? } else { turn };
                self.cluster.kill(position)?;
                self.cluster.start_router(position)?;
                Ok(None)
            }
            Fault::LeaderKill => {
                let position = self.leader_of(round).await?;
                self.cluster.kill(position)?;
                Ok(Some(position))
            }
            Fault::MinorityLoss => {
                self.cluster.kill(turn)?;
                Ok(Some(turn))
            }
            Fault::Forget => {
                (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.kill(position))?;
                (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.delete_router_data(position))?;
                (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.start_router(position))?;
                self.shared.oracle.lock().index_losses += 1;
                Ok(None)
            }
        }
    }

    /// Waits until there are pins to lose.
    async fn wait_until_pinned(&self) -> Result<(), SuiteError> {
        let deadline = Instant::now() + HANG;
        while self.shared.oracle.lock().pins.len() < PINS_MIN {
            if Instant::now() > deadline {
                return Err(format!("fewer than {PINS_MIN} pins in force for {HANG:?}").into());
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Position of the router that leads the group of this round.
    async fn leader_of(&self, round: u64) -> Result<usize, SuiteError> {
        let group = (round % GROUPS_COUNT) as usize;
        let deadline = Instant::now() + HANG;
        while Instant::now() < deadline {
            for position in 0..ROUTERS_COUNT {
                let status = self.contacts.status(position).await.unwrap_or_default();
                let leads = |group: &kvfleet_proto::pb::GroupStatus| group.leader == status.router;
                if status.router > 0 && status.groups.get(group).is_some_and(leads) {
                    return Ok(position);
                }
            }
            sleep(POLL_INTERVAL).await;
        }
        Err(format!("group {group} has no leader for {HANG:?}").into())
    }

    async fn wait_until_decided(&self, count: u64) -> Result<(), SuiteError> {
        let deadline = Instant::now() + HANG;
        while self.shared.decided.load(Ordering::Relaxed) < count {
            if Instant::now() > deadline {
                return Err(format!("fewer than {count} decisions after another {HANG:?}").into());
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}
