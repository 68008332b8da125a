//! One replica of a group without a cluster around it, for benches: entries, snapshots and installs as a router does
//! them, with the same files and the same stream of parts.
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
use super::sending::parts;
use super::service::receive;
use super::state_machine::{SnapshotData, StateMachine, apply_batch};
use super::{Cluster, Entry, LeaderId, LogId, Payload, Proposal};

/// The group it stands for.
const GROUP: u16 = 1;

/// Longer than any part takes.
const PART_MAX: Duration = Duration::from_secs(60);

/// A replica. Clones share it.
#[derive(Clone)]
pub struct Replica {
    machine: StateMachine,
}

impl Replica {
    /// Opens a replica in a directory. Blocking.
    ///
    /// # Errors
    /// When its snapshot cannot be read.
    pub fn open(directory: &Path) -> io::Result<Replica> {
        let intake = Intake::new(directory, GROUP, IndexLimits::default());
        Ok(Replica { machine: StateMachine::open(intake)? })
    }

    /// Applies a command as the next entry of the log; gives how long that took. Blocking.
    ///
    /// # Errors
    /// When the command does not decode.
    pub fn apply(&self, command: &Command) -> io::Result<Duration> {
        let published = self.machine.published();
        let index = published.read().applied_index() + 1;
        let payload = Payload::Normal(Proposal::of(command));
        let entry = Entry { log_id: LogId::new(LeaderId::new_committed(1, 1), index), payload };
        let start = Instant::now();
        apply_batch(&published, vec![(entry, None)])?;
        Ok(start.elapsed())
    }

    /// Makes a snapshot of it on disk; gives its bytes. Blocking.
    ///
    /// # Errors
    /// What the file system says.
    pub fn snapshot(&self) -> io::Result<u64> {
        match self.machine.build()?.snapshot {
            SnapshotData::Stored(stored) => Ok(stored.bytes),
            SnapshotData::Received(_) => Err(io::Error::other("a snapshot that was built did not come in")),
        }
    }

    /// Digest of its state.
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        self.machine.published().read().index.digest()
    }

    /// Takes in the current snapshot of another replica and installs it, as a router does what a leader sends.
    ///
    /// # Errors
    /// When the other one has none, or it cannot be taken in.
    pub async fn install_from(&self, other: &Replica) -> io::Result<()> {
        let snapshot = other.machine.current()?.ok_or_else(|| io::Error::other("there is no snapshot"))?;
        let SnapshotData::Stored(stored) = snapshot.snapshot else {
            return Err(io::Error::other("a snapshot that is kept did not come in"));
        };
        let cluster = Arc::new(Cluster { name: String::new(), shards: 1 });
        let envelope = Envelope { cluster, group: GROUP };
        let mut parts = parts(&envelope, Vec::new(), Arc::clone(&stored)).skip(1).map(Ok);
        let intake = self.machine.intake();
        let received = receive(&intake, snapshot.meta, stored.bytes, &mut parts, PART_MAX).await;
        let data = SnapshotData::Received(Box::new(received.map_err(io::Error::other)?));
        let machine = self.machine.clone();
        tokio::task::spawn_blocking(move || machine.install(data)).await.map_err(io::Error::other)?
    }
}
