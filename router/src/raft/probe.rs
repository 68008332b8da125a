//! One replica of a group without a cluster, for benches: entries, snapshots and installs as in a
//! router, with the same files and the same stream of parts.
//!
//! Only with the feature `probe`. Not here: consensus, and the connection between two routers.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kv_core::index::IndexLimits;
use kv_core::index::command::Command;
use openraft::vote::RaftLeaderIdExt;

use super::intake::Intake;
use super::network::Envelope;
use super::service::receive;
use super::snapshot_sender::parts;
use super::state_machine::{SnapshotData, StateMachine, apply_batch};
use super::{ClusterIdentity, Entry, LeaderId, LogId, Payload, Proposal};

/// Number of the simulated group.
const GROUP: u16 = 1;

/// Longer than any part takes.
const PART_TIMEOUT: Duration = Duration::from_secs(60);

/// A replica; clones share it.
#[derive(Clone)]
pub struct ReplicaProbe {
    machine: StateMachine,
}

impl ReplicaProbe {
    /// Opens a replica in a directory. Blocking.
    ///
    /// # Errors
    /// If its snapshot cannot be read.
    pub fn open(directory: &Path) -> io::Result<ReplicaProbe> {
        let intake = Intake::new(directory, GROUP, IndexLimits::default());
        Ok(ReplicaProbe { machine: StateMachine::open(intake)? })
    }

    /// Applies a command as the next log entry; returns the time taken. Blocking.
    ///
    /// # Errors
    /// If the command does not decode.
    pub fn apply(&self, command: &Command) -> io::Result<Duration> {
        let published = self.machine.published();
        let index = published.read().applied_index() + 1;
        let payload = Payload::Normal(Proposal::encode(command));
        let entry = Entry { log_id: LogId::new(LeaderId::new_committed(1, 1), index), payload };
        let start = Instant::now();
        apply_batch(&published, vec![(entry, None)])?;
        Ok(start.elapsed())
    }

    /// Writes a snapshot to disk; returns its size in bytes. Blocking.
    ///
    /// # Errors
    /// The file system's error.
    pub fn snapshot(&self) -> io::Result<u64> {
        match self.machine.build()?.snapshot {
            SnapshotData::File(stored) => Ok(stored.bytes),
            SnapshotData::Received(_) => Err(io::Error::other("a built snapshot is not a file")),
        }
    }

    /// Digest of its state.
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        self.machine.published().read().index.digest()
    }

    /// Receives and installs another replica's current snapshot, as a router does with one from its
    /// leader.
    ///
    /// # Errors
    /// If the other one has none, or it cannot be installed.
    pub async fn install_from(&self, other: &ReplicaProbe) -> io::Result<()> {
        let snapshot = other.machine.current()?.ok_or_else(|| io::Error::other("there is no snapshot"))?;
        let SnapshotData::File(stored) = snapshot.snapshot else {
            return Err(io::Error::other("a kept snapshot is not a file"));
        };
        let cluster = Arc::new(ClusterIdentity { name: String::new(), shards: 1 });
        let envelope = Envelope { cluster, group: GROUP };
        let mut parts = parts(&envelope, Vec::new(), Arc::clone(&stored)).skip(1).map(Ok);
        let intake = self.machine.intake();
        let received = receive(&intake, snapshot.meta, stored.bytes, &mut parts, PART_TIMEOUT).await;
        let data = SnapshotData::Received(Box::new(received.map_err(io::Error::other)?));
        let machine = self.machine.clone();
        tokio::task::spawn_blocking(move || machine.install(data)).await.map_err(io::Error::other)?
    }
}
