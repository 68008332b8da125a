//! Puts this router's consensus together: disk, state machines, openraft's settings, first membership.
//!
//! Not here: what runs on top (`crate::start`).

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::index::IndexLimits;
use kvfleet_proto::tls::Identity;
use openraft::errors::{InitializeError, RaftError};
use openraft::impls::BasicNode;
use openraft::{Config, SnapshotPolicy};

use super::handle::Consensus;
use super::intake::Intake;
use super::log::{LogError, Owner};
use super::log_store::LogGuard;
use super::network::{Envelope, Network, Peers};
use super::recover::{self, Opened};
use super::repair::Repair;
use super::withheld::{self, Withheld};
use super::{CONTROL, Cluster, Raft};
use crate::config::RouterConfig;
use crate::error::StartError;
use crate::groups::{Group, Groups};

/// Entries kept behind a snapshot for followers that lag a little; one that lags more gets the snapshot.
/// A full one is 256 KiB, so a purge leaves at most 32 MiB, less than what calls for the next snapshot.
const ENTRIES_KEPT: u64 = 128;

/// Entries in one replication message, besides its limit in bytes.
const MESSAGE_ENTRIES_MAX: u64 = 256;

/// Time for a whole snapshot to reach a follower: gigabytes at the speed of a slow network.
pub(super) const SNAPSHOT_TIMEOUT_MS: u64 = 60_000;

/// How often a follower that does not answer is tried: soon after it is back, but not hot.
const BACKOFF: &str = "50ms 100ms 200ms ...500ms";

/// What was put together. Consensus is idle until it is told to run.
pub(crate) struct Booted {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    /// By group.
    pub(crate) repairs: Vec<Arc<Repair>>,
    /// Where this router gives no vote.
    pub(crate) withheld: Arc<Withheld>,
    pub(crate) guard: LogGuard,
    /// Whether there is a cluster that this router comes back to, or is to be added to.
    pub(crate) comes_late: bool,
}

/// Opens what is on disk and builds the Raft of every group on it.
pub(crate) async fn boot(config: &RouterConfig, identity: Identity) -> Result<Booted, StartError> {
    let cluster = Arc::new(Cluster { name: config.cluster.clone(), shards: config.shards });
    let Opened { stores, guard, withheld } = open(config, &cluster)?;
    let comes_late = config.join || stores.iter().any(|(log, _)| log.has_vote());
    let peers = Peers::new(identity);
    let mut repairs = Vec::with_capacity(stores.len());
    let mut groups = Vec::with_capacity(stores.len());
    for (group, (log, machine)) in (0..).zip(stores) {
        let published = machine.published();
        let log_bytes = Box::new(log.bytes_held());
        let envelope = Envelope { cluster: Arc::clone(&cluster), group };
        let network = Network { peers: peers.clone(), envelope };
        repairs.push(Arc::new(Repair::new(machine.clone(), &log, network.clone())));
        let settings = Arc::new(settings(config, !withheld.holds(group))?);
        let raft = Raft::build(config.id, settings, network, log, machine).await;
        let raft = raft.map_err(|error| StartError::Consensus(error.to_string()))?;
        let consensus = Consensus::new(group, raft, config.timings.office());
        tokio::spawn(withheld::watch(Arc::clone(&withheld), consensus.clone()));
        groups.push(Arc::new(Group::new(consensus, published, log_bytes)));
    }
    Ok(Booted { cluster, groups: Groups::new(groups), peers, repairs, withheld, guard, comes_late })
}

fn open(config: &RouterConfig, cluster: &Cluster) -> Result<Opened, StartError> {
    let owner = Owner { router: config.id, cluster: cluster.clone() };
    let intake = |group| Intake::new(&config.data_dir, group, limits(config, group));
    let intakes: Vec<_> = (0..cluster.groups()).map(intake).collect();
    let is_alone = !config.join && config.voters.len() < 2;
    let opened = recover::open(&config.data_dir, &owner, &intakes, is_alone);
    let (opened, losses) = opened.map_err(|error| remedy(error, config, is_alone))?;
    losses.iter().for_each(|loss| tracing::error!("{loss}"));
    Ok(opened)
}

/// Adds to the loss of a log what can be done about it.
fn remedy(error: StartError, config: &RouterConfig, is_alone: bool) -> StartError {
    match error {
        StartError::Log(log @ LogError::Corrupt { .. }) if is_alone => {
            StartError::LostCluster { log: Box::new(log) }
        }
        StartError::Log(log @ LogError::Corrupt { .. }) => StartError::LostLog {
            log: Box::new(log),
            router: config.id,
            directory: config.data_dir.clone(),
            address: config.own_address().to_owned(),
        },
        other => other,
    }
}

/// What one group may hold: the shards divide the copies among them, since chains are spread evenly.
fn limits(config: &RouterConfig, group: u16) -> IndexLimits {
    let limits = IndexLimits::default();
    match group {
        CONTROL => IndexLimits { copies_max: 0, ..limits },
        _ => IndexLimits { copies_max: config.index_copies_max.div_ceil(config.shards.into()), ..limits },
    }
}

/// `may_lead`: whether this router may stand for election, or go on leading what it led before it stopped.
fn settings(config: &RouterConfig, may_lead: bool) -> Result<Config, StartError> {
    let settings = Config {
        cluster_name: config.cluster.clone(),
        heartbeat_interval: config.timings.heartbeat_ms,
        election_timeout_min: config.timings.election_min_ms,
        election_timeout_max: config.timings.election_max_ms,
        install_snapshot_timeout: SNAPSHOT_TIMEOUT_MS,
        max_payload_entries: MESSAGE_ENTRIES_MAX,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(config.snapshot_every_entries),
        // Above the snapshot interval, or sending a snapshot would not end the lag.
        replication_lag_threshold: 2 * config.snapshot_every_entries,
        max_in_snapshot_log_to_keep: ENTRIES_KEPT,
        // A router that was cut off must not depose a healthy leader when it comes back.
        enable_pre_vote: Some(true),
        enable_elect: may_lead,
        // A follower whose disk was replaced starts empty; that must not stop the leader.
        allow_log_reversion: Some(true),
        // A leader that restarts within its term would otherwise go on without an election, although it does not
        // know what it had committed: the entry that it names to linearizable reads may be older than what it
        // acknowledged, and entries that the others committed before its own disk had them would lose their numbers
        // to new ones of the same term.
        enable_leader_restore: Some(false),
        backoff: BACKOFF.into(),
        ..Config::default()
    };
    settings.validate().map_err(|error| StartError::Consensus(error.to_string()))
}

/// Writes the first membership of every group that has never had one, unless this router waits to be added.
/// Every voter does so with the same list, which openraft allows: one of them is elected, the others find the
/// same entry in their log.
pub(crate) async fn initialize(
    groups: &Groups,
    withheld: &Withheld,
    config: &RouterConfig,
) -> Result<(), StartError> {
    if config.join {
        return Ok(());
    }
    let failed = |error: &dyn std::fmt::Display| StartError::Consensus(error.to_string());
    for group in groups.all() {
        let raft = group.consensus.raft();
        // The first membership was written long ago; the leader sends it.
        if withheld.holds(group.number()) {
            continue;
        }
        if raft.is_initialized().await.map_err(|error| failed(&error))? {
            continue;
        }
        let voters = config.voters.iter().map(|voter| (voter.id, BasicNode::new(&voter.address)));
        match raft.initialize(voters.collect::<BTreeMap<_, _>>()).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => {}
            Err(error) => return Err(failed(&error)),
        }
    }
    Ok(())
}
