//! Builds this router's consensus: disk, state machines, openraft settings, first membership.
//!
//! Not here: the parts on top of it (`crate::start`).

use std::collections::BTreeMap;
use std::sync::Arc;

use kv_core::index::IndexLimits;
use kvfleet_net::tls::Identity;
use openraft::errors::{InitializeError, RaftError};
use openraft::impls::BasicNode;
use openraft::{Config, SnapshotPolicy};

use super::disk_room::DiskRoom;
use super::handle::Consensus;
use super::intake::Intake;
use super::log::{LogError, LogOwner};
use super::log_store::LogGuard;
use super::network::{Envelope, Network, Peers};
use super::recover::{self, OpenedStores};
use super::repair::ReplicaRepair;
use super::withheld_votes::{self, WithheldVotes};
use super::{CONTROL, ClusterIdentity, Raft};
use crate::config::RouterConfig;
use crate::error::StartError;
use crate::groups::{Group, Groups};

/// Entries kept behind a snapshot for slightly lagging followers; others get the snapshot. A full
/// entry is 256 KiB, so a purge leaves at most 32 MiB, less than the log size that triggers a
/// snapshot.
const ENTRIES_KEPT: u64 = 128;

/// Limit on entries in one replication message, in addition to its byte limit.
const MESSAGE_ENTRIES_MAX: u64 = 256;

/// Timeout for a whole snapshot to reach a follower: gigabytes over a slow network.
pub(super) const SNAPSHOT_TIMEOUT_MS: u64 = 60_000;

/// Retry pauses for an unresponsive follower: soon after its return, without a busy loop.
const BACKOFF: &str = "50ms 100ms 200ms ...500ms";

/// The built consensus; idle until it is told to run.
pub(crate) struct BootedConsensus {
    pub(crate) cluster: Arc<ClusterIdentity>,
    pub(crate) groups: Groups,
    pub(crate) peers: Peers,
    /// By group.
    pub(crate) repairs: Vec<Arc<ReplicaRepair>>,
    /// Groups without a vote of this router.
    pub(crate) withheld: Arc<WithheldVotes>,
    pub(crate) guard: LogGuard,
    /// Whether a cluster exists that this router returns to, or is to be added to.
    pub(crate) joins_running_cluster: bool,
}

/// Opens the data directory and builds the Raft of every group.
pub(crate) async fn boot(config: &RouterConfig, identity: Identity) -> Result<BootedConsensus, StartError> {
    let cluster = Arc::new(ClusterIdentity { name: config.cluster.clone(), shards: config.shards });
    let room = Arc::new(DiskRoom::new(&config.data_dir));
    let OpenedStores { stores, guard, withheld } = open(config, &cluster, &room)?;
    let joins_running_cluster = config.join || stores.iter().any(|(log, _)| log.has_vote());
    let peers = Peers::new(identity);
    let mut repairs = Vec::with_capacity(stores.len());
    let mut groups = Vec::with_capacity(stores.len());
    for (group, (log, machine)) in (0..).zip(stores) {
        let published = machine.published();
        let log_bytes = Box::new(log.bytes_held());
        let envelope = Envelope { cluster: Arc::clone(&cluster), group };
        let network = Network { peers: peers.clone(), envelope };
        repairs.push(Arc::new(ReplicaRepair::new(machine.clone(), &log, network.clone())));
        let settings = Arc::new(settings(config, !withheld.is_withheld(group))?);
        let raft = Raft::build(config.id, settings, network, log, machine).await;
        let raft = raft.map_err(|error| StartError::Consensus(error.to_string()))?;
        let consensus = Consensus::new(group, raft, config.timings.leader_lease(), Arc::clone(&room));
        tokio::spawn(withheld_votes::watch(Arc::clone(&withheld), consensus.clone()));
        groups.push(Arc::new(Group::new(consensus, published, log_bytes)));
    }
    Ok(BootedConsensus {
        cluster,
        groups: Groups::new(groups),
        peers,
        repairs,
        withheld,
        guard,
        joins_running_cluster,
    })
}

fn open(
    config: &RouterConfig,
    cluster: &ClusterIdentity,
    room: &Arc<DiskRoom>,
) -> Result<OpenedStores, StartError> {
    let owner = LogOwner { router: config.id, cluster: cluster.clone() };
    let intake = |group| Intake::new(&config.data_dir, group, limits(config, group));
    let intakes: Vec<_> = (0..cluster.groups()).map(intake).collect();
    let is_alone = !config.join && config.voters.len() < 2;
    let opened = recover::open(&config.data_dir, &owner, &intakes, is_alone, room);
    let (opened, losses) = opened.map_err(|error| remedy(error, config, is_alone))?;
    losses.iter().for_each(|loss| tracing::error!("{loss}"));
    Ok(opened)
}

/// Adds the possible remedy to the loss of a log.
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

/// Index limits of one group: the shards divide the copies, since chains are spread evenly.
fn limits(config: &RouterConfig, group: u16) -> IndexLimits {
    let limits = IndexLimits::default();
    match group {
        CONTROL => IndexLimits { copies_max: 0, ..limits },
        _ => IndexLimits { copies_max: config.index_copies_max.div_ceil(config.shards.into()), ..limits },
    }
}

/// openraft settings. `may_lead`: whether this router may stand for election.
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
        // A router that was cut off must not depose a healthy leader on return.
        enable_pre_vote: Some(true),
        enable_elect: may_lead,
        // A follower with a replaced disk starts empty; that must not stop the leader.
        allow_log_reversion: Some(true),
        // A leader that restarts within its term would otherwise continue without an election,
        // without knowing its committed entries. Its read index could then be older than
        // acknowledged entries. Entries that others committed before its own disk had them could
        // lose their indexes to new entries of the same term.
        enable_leader_restore: Some(false),
        backoff: BACKOFF.into(),
        ..Config::default()
    };
    settings.validate().map_err(|error| StartError::Consensus(error.to_string()))
}

/// Writes the first membership of every new group, unless this router waits to be added. Every
/// voter does so with the same list, as openraft allows: one is elected, and the others find the
/// same entry in their log.
pub(crate) async fn initialize(
    groups: &Groups,
    withheld: &WithheldVotes,
    config: &RouterConfig,
) -> Result<(), StartError> {
    if config.join {
        return Ok(());
    }
    let failed = |error: &dyn std::fmt::Display| StartError::Consensus(error.to_string());
    for group in groups.all() {
        let raft = group.consensus.raft();
        // Its first membership was written before; the leader sends it.
        if withheld.is_withheld(group.number()) {
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
