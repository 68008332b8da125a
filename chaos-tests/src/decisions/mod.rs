//! What consensus buys, counted: routers die or restart under load, and every decision is held against what was
//! acknowledged before it was asked for.
//!
//! The experiment is the one of SG#39822, where an index in memory and one that persists itself were restarted
//! under load. Who loads the index is `load.rs`, who asks is `ask.rs`, what an answer counts as is `judge.rs`, the
//! table is `table.rs`. Not here: whole-state properties after a run (`crate::invariants`).

pub mod ask;
pub mod judge;
pub mod load;
pub mod table;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::sleep;

use crate::cluster::{Cluster, Contacts, ROUTERS_COUNT, SHARDS_COUNT, Trouble};
use crate::oracle::Oracle;
use ask::Deciders;
use load::Load;
use table::Row;

/// A run that comes no further in this time hangs.
const HANG: Duration = Duration::from_secs(120);

/// Between two looks at a condition.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Longest silence of a node: the one that routers can be set to. A starved machine must not fence nodes here,
/// since then nobody could tell what was lost from what was ended.
const SILENCE_MS: u64 = 60_000;

/// Pins in force before the first strike: what was never given cannot be lost. The owners race for one at a time, so all of these but one stay until the
/// end.
const PINS_MIN: usize = 4;

/// Control and the shards.
const GROUPS_COUNT: u64 = SHARDS_COUNT as u64 + 1;

/// What is done to the routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The leader of each group in turn, and each router in turn, is killed and started again at once: a leader that
    /// comes back before anybody missed it is the harder case.
    Restart,
    /// The leader of each group in turn is killed, and started again some decisions later.
    LeaderKill,
    /// Each router in turn is dead for nearly a third of the run: with three, every minority there is.
    MinorityLoss,
    /// All routers are killed and start with empty disks, and nodes announce again: an index kept in memory.
    /// Here to show what the experiment says of one.
    Forget,
}

impl Fault {
    /// In words, for the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::Restart => "router restart",
            Fault::LeaderKill => "leader kill",
            Fault::MinorityLoss => "loss of any minority",
            Fault::Forget => "restart without log",
        }
    }

    /// How often it strikes in one run.
    fn rounds(self) -> u64 {
        match self {
            Fault::Restart => 6 * ROUTERS_COUNT as u64,
            Fault::LeaderKill => 2 * GROUPS_COUNT,
            Fault::MinorityLoss => ROUTERS_COUNT as u64,
            Fault::Forget => 2,
        }
    }
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// What is done.
    pub fault: Fault,
    /// Decisions to count.
    pub decisions: u64,
    /// Whether what must be new is asked for with `fresh`. Without, a follower that lags answers from what it has.
    pub fresh: bool,
    /// Where every random choice starts.
    pub seed: u64,
}

/// What the parts of a run share.
pub(crate) struct Shared {
    pub(crate) oracle: Arc<Mutex<Oracle>>,
    pub(crate) row: Mutex<Row>,
    /// Decisions that were counted.
    pub(crate) decided: AtomicU64,
}

/// Runs the experiment with routers of this program.
///
/// # Errors
/// When the cluster does not come up, or the run hangs; what it finds is in the row.
pub async fn run(program: &Path, experiment: Experiment) -> Result<Row, Trouble> {
    let cluster = Cluster::start_with(program, |config| config.timings.silence_ms = SILENCE_MS)?;
    let contacts = cluster.contacts();
    let shared = Arc::new(Shared {
        oracle: Arc::default(),
        row: Mutex::new(Row::of(&experiment)),
        decided: AtomicU64::new(0),
    });
    let load = Load::start(&contacts, &shared, experiment.seed).await?;
    let deciders = Deciders::start(&cluster, &shared, experiment)?;
    let mut strikes = Strikes { cluster, contacts, shared: Arc::clone(&shared) };
    strikes.run(experiment).await?;
    deciders.stop().await;
    let Strikes { cluster, contacts, .. } = strikes;
    load.stop(&contacts, &shared).await?;
    ask::count_stale_everywhere(&contacts, &shared).await?;
    drop(cluster);
    let row = shared.row.lock().clone();
    Ok(row)
}

/// Whoever strikes.
struct Strikes {
    cluster: Cluster,
    contacts: Contacts,
    shared: Arc<Shared>,
}

impl Strikes {
    /// Strikes at even distances, counted in decisions and not in time; between two strikes what died comes back. Decisions from before there are pins
    /// are counted besides.
    async fn run(&mut self, Experiment { fault, decisions, .. }: Experiment) -> Result<(), Trouble> {
        self.until_pinned().await?;
        let rounds = fault.rounds();
        let first = self.shared.decided.load(Ordering::Relaxed);
        for round in 0..rounds {
            let at = |eighths: u64| first + (8 * round + eighths) * decisions / (8 * rounds);
            self.until_decided(at(1)).await?;
            let struck = self.strike(fault, round).await?;
            self.shared.row.lock().faults += 1;
            self.until_decided(at(if fault == Fault::MinorityLoss { 7 } else { 4 })).await?;
            struck.into_iter().try_for_each(|position| self.cluster.start_router(position))?;
        }
        self.until_decided(first + decisions).await
    }

    /// Strikes once; gives who is to be started again later.
    async fn strike(&mut self, fault: Fault, round: u64) -> Result<Option<usize>, Trouble> {
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
                (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.forget(position))?;
                (0..ROUTERS_COUNT).try_for_each(|position| self.cluster.start_router(position))?;
                self.shared.oracle.lock().losses += 1;
                Ok(None)
            }
        }
    }

    /// Waits until there is something to lose.
    async fn until_pinned(&self) -> Result<(), Trouble> {
        let deadline = Instant::now() + HANG;
        while self.shared.oracle.lock().pins.len() < PINS_MIN {
            if Instant::now() > deadline {
                return Err(format!("fewer than {PINS_MIN} pins in force for {HANG:?}").into());
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    /// Position of the router that leads the group whose turn it is.
    async fn leader_of(&self, round: u64) -> Result<usize, Trouble> {
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
            sleep(LOOK_EVERY).await;
        }
        Err(format!("nobody leads group {group} for {HANG:?}").into())
    }

    async fn until_decided(&self, count: u64) -> Result<(), Trouble> {
        let deadline = Instant::now() + HANG;
        while self.shared.decided.load(Ordering::Relaxed) < count {
            if Instant::now() > deadline {
                return Err(format!("fewer than {count} decisions after another {HANG:?}").into());
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}
