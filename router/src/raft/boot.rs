//! Puts this router's consensus together: disk, state machine, openraft's settings, first membership.
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

use super::Raft;
use super::disk::{LOG_FILE, LogError};
use super::handle::{Consensus, Contact};
use super::log_store::{LogGuard, LogStore};
use super::network::Network;
use super::snapshot_file;
use super::state_machine::StateMachine;
use crate::config::RouterConfig;
use crate::error::StartError;
use crate::view::published::Published;

/// Entries kept behind a snapshot for followers that lag a little; one that lags more gets the snapshot.
/// Each may be a megabyte, so this bounds what a purge leaves in memory.
const ENTRIES_KEPT: u64 = 256;

/// Entries in one replication message, besides its limit in bytes.
const MESSAGE_ENTRIES_MAX: u64 = 256;

/// Time for a whole snapshot to reach a follower: gigabytes at the speed of a slow network.
const SNAPSHOT_TIMEOUT_MS: u64 = 60_000;

/// How often a follower that does not answer is tried: soon after it is back, but not hot.
const BACKOFF: &str = "50ms 100ms 200ms ...500ms";

/// What was put together. Consensus is idle until [`Booted::run`].
pub(crate) struct Booted {
    pub(crate) consensus: Consensus,
    pub(crate) contact: Arc<Contact>,
    pub(crate) published: Arc<Published>,
    pub(crate) log_bytes: Box<dyn Fn() -> u64 + Send + Sync>,
    pub(crate) guard: LogGuard,
}

/// Opens what is on disk and builds the Raft on it.
pub(crate) async fn boot(config: &RouterConfig, tls: ClientTlsConfig) -> Result<Booted, StartError> {
    let (log, guard, machine) = open(config)?;
    let published = machine.published();
    let log_bytes = Box::new(log.bytes_held());
    let settings = Arc::new(settings(config)?);
    let raft = Raft::build(config.id, settings, Network::new(tls), log, machine).await;
    let raft = raft.map_err(|error| StartError::Consensus(error.to_string()))?;
    let contact = Arc::new(Contact::new());
    let consensus = Consensus::new(raft, Arc::clone(&contact), config.timings.office());
    Ok(Booted { consensus, contact, published, log_bytes, guard })
}

fn open(config: &RouterConfig) -> Result<(LogStore, LogGuard, StateMachine), StartError> {
    let limits = IndexLimits { copies_max: config.index_copies_max, ..IndexLimits::default() };
    let machine = StateMachine::open(&config.data_dir, limits)?;
    let (log, guard) = LogStore::open(&config.data_dir, config.id)?;
    let covered = machine.published().read().applied_index();
    if covered > 0 && !log.has_vote() {
        let what = format!("it is new, but the snapshot beside it ends at entry {covered}");
        return Err(LogError::Corrupt { path: config.data_dir.join(LOG_FILE), what }.into());
    }
    check_covered(&config.data_dir, covered, log.purged_index())?;
    Ok((log, guard, machine))
}

/// Entries are purged only once a snapshot holds them: a snapshot that ends before the log begins has
/// been lost or replaced.
fn check_covered(directory: &Path, covered: u64, purged: Option<u64>) -> Result<(), StartError> {
    match purged {
        Some(purged) if purged > covered => {
            let what = format!("it ends at entry {covered}, but the log begins after entry {purged}");
            Err(snapshot_file::corrupt(directory, what).into())
        }
        _ => Ok(()),
    }
}

fn settings(config: &RouterConfig) -> Result<Config, StartError> {
    let settings = Config {
        cluster_name: "kvfleet".into(),
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
        backoff: BACKOFF.into(),
        ..Config::default()
    };
    settings.validate().map_err(|error| StartError::Consensus(error.to_string()))
}

/// Writes the first membership if this router has never had one. Every voter does so with the same list,
/// which openraft allows: one of them is elected, the others find the same entry in their log.
pub(crate) async fn initialize(consensus: &Consensus, config: &RouterConfig) -> Result<(), StartError> {
    let raft = consensus.raft();
    let failed = |error: &dyn std::fmt::Display| StartError::Consensus(error.to_string());
    if raft.is_initialized().await.map_err(|error| failed(&error))? {
        return Ok(());
    }
    let voters = config.voters.iter().map(|voter| (voter.id, BasicNode::new(&voter.address)));
    match raft.initialize(voters.collect::<BTreeMap<_, _>>()).await {
        Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(()),
        Err(error) => Err(failed(&error)),
    }
}
