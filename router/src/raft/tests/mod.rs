//! The store against openraft's own suite, restarts and damage.
#![allow(clippy::unwrap_used)]

mod damage;
mod full_disk;
mod log_files;
mod recover;
mod repair;
mod restart;
mod snapshot_build;
mod snapshot_parts;
mod snapshots;
mod suite;

use std::path::Path;
use std::sync::Arc;

use kv_core::id::TenantId;
use kv_core::index::IndexLimits;
use kv_core::index::command::Command;
use openraft::entry::RaftEntry;
use openraft::vote::RaftLeaderIdExt;
use tempfile::TempDir;

use super::disk_room::DiskRoom;
use super::intake::Intake;
use super::log::{DiskLog, LogError, LogOwner, RecoveredLog};
use super::log_store::{LogGuard, LogStore};
use super::{ClusterIdentity, Entry, LeaderId, LogId, Payload, Proposal};

/// The router that owns these stores.
const ROUTER: u64 = 1;

fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(LeaderId::new_committed(term, ROUTER), index)
}

/// Entry `index` of term 1: a command that depends on the index.
fn entry(index: u64) -> Entry {
    let command = Command::SetQuota { tenant: TenantId(7), bytes: Some(index) };
    Entry::new(log_id(1, index), Payload::Normal(Proposal::encode(&command)))
}

/// The log of the control group; the log of the single shard is closed at once.
fn try_open(directory: &Path, router: u64) -> Result<(LogStore, LogGuard), LogError> {
    let (mut logs, guard) = open_all(directory, &owner(router, "test", 1))?;
    Ok((logs.swap_remove(0), guard))
}

/// The logs of all groups.
fn open_all(directory: &Path, owner: &LogOwner) -> Result<(Vec<LogStore>, LogGuard), LogError> {
    let (disk, recovered) = DiskLog::open(directory, owner)?;
    Ok(LogStore::open(disk, recovered, Arc::new(DiskRoom::new(directory))).unwrap())
}

fn owner(router: u64, cluster: &str, shards: u16) -> LogOwner {
    LogOwner { router, cluster: ClusterIdentity { name: cluster.into(), shards } }
}

/// The log without its writer thread.
fn open_disk(directory: &Path) -> Result<(DiskLog, Vec<RecoveredLog>), LogError> {
    DiskLog::open(directory, &owner(ROUTER, "test", 1))
}

/// A directory in memory if available, for tests that open a log thousands of times.
fn in_memory() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap()
}

/// Makes a folder an exact copy of another one.
fn replace_folder(from: &Path, to: &Path) {
    if to.exists() {
        std::fs::remove_dir_all(to).unwrap();
    }
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn open(directory: &Path) -> (LogStore, LogGuard) {
    try_open(directory, ROUTER).unwrap()
}

fn intake(directory: &Path, group: u16) -> Intake {
    Intake::new(directory, group, IndexLimits::default())
}

/// Closes a store as a router does, so that the file can be reopened.
async fn close(store: LogStore, guard: LogGuard) {
    drop(store);
    tokio::task::spawn_blocking(move || guard.join()).await.unwrap();
}
