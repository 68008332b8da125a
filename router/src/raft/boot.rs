//! Puts this router's consensus together: disk, state machines, openraft's settings, first membership.
//!
//! Not here: what runs on top (`crate::start`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kv_core::index::IndexLimits;
use openraft::errors::{InitializeError, RaftError};
use openraft::impls::BasicNode;
use openraft::{Config, SnapshotPolicy};
use tonic::transport::ClientTlsConfig;

use super::disk::{LOG_FILE, LogError, Owner};
use super::handle::Consensus;
use super::log_store::{LogGuard, LogStore};
use super::network::{Envelope, Network, Peers};
use super::snapshot_file;
use super::state_machine::StateMachine;
use super::{CONTROL, Cluster, Raft};
use crate::config::RouterConfig;
use crate::error::StartError;
use crate::groups::{Group, Groups};

/// Entries kept behind a snapshot for followers that lag a little; one that lags more gets the snapshot.
/// Each may be a megabyte, so this bounds what a purge leaves in memory.
const ENTRIES_KEPT: u64 = 256;

/// Entries in one replication message, besides its limit in bytes.
const MESSAGE_ENTRIES_MAX: u64 = 256;

/// Time for a whole snapshot to reach a follower: gigabytes at the speed of a slow network.
const SNAPSHOT_TIMEOUT_MS: u64 = 60_000;

/// How often a follower that does not answer is tried: soon after it is back, but not hot.
const BACKOFF: &str = "50ms 100ms 200ms ...500ms";

/// What was put together. Consensus is idle until it is told to run.
pub(crate) struct Booted {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    pub(crate) guard: LogGuard,
    /// Whether there is a cluster that this router comes back to, or is to be added to.
    pub(crate) comes_late: bool,
}

/// Opens what is on disk and builds the Raft of every group on it.
pub(crate) async fn boot(config: &RouterConfig, tls: ClientTlsConfig) -> Result<Booted, StartError> {
    let cluster = Arc::new(Cluster { name: config.cluster.clone(), shards: config.shards });
    let (stores, guard) = open(config, &cluster)?;
    let comes_late = config.join || stores.iter().any(|(log, _)| log.has_vote());
    let settings = Arc::new(settings(config)?);
    let peers = Peers::new(tls);
    let mut groups = Vec::with_capacity(stores.len());
    for (group, (log, machine)) in (0..).zip(stores) {
        let published = machine.published();
        let log_bytes = Box::new(log.bytes_held());
        let envelope = Envelope { cluster: Arc::clone(&cluster), group };
        let network = Network { peers: peers.clone(), envelope };
        let raft = Raft::build(config.id, Arc::clone(&settings), network, log, machine).await;
        let raft = raft.map_err(|error| StartError::Consensus(error.to_string()))?;
        let consensus = Consensus::new(group, raft, config.timings.office());
        groups.push(Arc::new(Group::new(consensus, published, log_bytes)));
    }
    Ok(Booted { cluster, groups: Groups::new(groups), peers, guard, comes_late })
}

type Stores = Vec<(LogStore, StateMachine)>;

fn open(config: &RouterConfig, cluster: &Cluster) -> Result<(Stores, LogGuard), StartError> {
    let owner = Owner { router: config.id, cluster: cluster.clone() };
    let directory = &config.data_dir;
    let machines =
        (0..cluster.groups()).map(|group| StateMachine::open(directory, group, limits(config, group)));
    let machines = machines.collect::<Result<Vec<_>, _>>()?;
    let (logs, guard) = LogStore::open(directory, &owner)?;
    for (group, (log, machine)) in (0..).zip(logs.iter().zip(&machines)) {
        let covered = machine.published().read().applied_index();
        if covered > 0 && !log.has_vote() {
            let what = format!("it is new, but the snapshot beside it ends at entry {covered}");
            return Err(LogError::Corrupt { path: directory.join(LOG_FILE), what }.into());
        }
        check_covered(directory, group, covered, log.purged_index())?;
    }
    Ok((logs.into_iter().zip(machines).collect(), guard))
}

/// What one group may hold: the shards divide the copies among them, since chains are spread evenly.
fn limits(config: &RouterConfig, group: u16) -> IndexLimits {
    let limits = IndexLimits::default();
    match group {
        CONTROL => IndexLimits { copies_max: 0, ..limits },
        _ => IndexLimits { copies_max: config.index_copies_max.div_ceil(config.shards.into()), ..limits },
    }
}

/// Entries are purged only once a snapshot holds them: a snapshot that ends before the log begins has
/// been lost or replaced.
fn check_covered(directory: &Path, group: u16, covered: u64, purged: Option<u64>) -> Result<(), StartError> {
    match purged {
        Some(purged) if purged > covered => {
            let what = format!("it ends at entry {covered}, but the log begins after entry {purged}");
            Err(snapshot_file::corrupt(directory, group, what).into())
        }
        _ => Ok(()),
    }
}

fn settings(config: &RouterConfig) -> Result<Config, StartError> {
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
pub(crate) async fn initialize(groups: &Groups, config: &RouterConfig) -> Result<(), StartError> {
    if config.join {
        return Ok(());
    }
    let failed = |error: &dyn std::fmt::Display| StartError::Consensus(error.to_string());
    for group in groups.all() {
        let raft = group.consensus.raft();
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
