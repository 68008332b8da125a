//! Applies committed entries to the published index, and makes and takes snapshots of it.
//!
//! Applying and encoding run on blocking threads, so that neither a large proposal nor a large snapshot
//! holds a thread that serves requests. Not here: what a command does (`kv_core::index`), how readers see
//! it (`crate::view::published`), the file (`snapshot_file.rs`).

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use kv_core::index::command::{Applied, Command};
use kv_core::index::{Index, IndexLimits};
use openraft::OptionalSend;
use openraft::storage::{ApplyResponder, EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use parking_lot::Mutex;

use super::snapshot_file::{self, SnapshotFileError};
use super::{Answer, Entry, LogId, Payload, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};
use crate::view::published::{Published, Replica};

/// Entries applied under one switch of the published copies: bounds how long a proposer waits for
/// proposals behind its own.
const APPLY_ENTRIES_MAX: usize = 64;

/// The state machine of one router. Clones share it; openraft's snapshot builder is a clone.
#[derive(Clone)]
pub(crate) struct StateMachine {
    published: Arc<Published>,
    directory: Arc<Path>,
    limits: IndexLimits,
    /// One snapshot file is written at a time, whether built here or received.
    writing_file: Arc<Mutex<()>>,
}

impl StateMachine {
    /// Starts from the snapshot in `directory` when there is one. Blocking.
    pub(crate) fn open(directory: &Path, limits: IndexLimits) -> Result<StateMachine, SnapshotFileError> {
        let copies = match snapshot_file::read(directory)? {
            Some(snapshot) => {
                decode(&snapshot, limits).map_err(|what| snapshot_file::corrupt(directory, what))?
            }
            None => [empty(limits), empty(limits)],
        };
        Ok(StateMachine {
            published: Arc::new(Published::new(copies)),
            directory: Arc::from(directory),
            limits,
            writing_file: Arc::default(),
        })
    }

    /// What readers see.
    pub(crate) fn published(&self) -> Arc<Published> {
        Arc::clone(&self.published)
    }

    /// Encodes the index as it is now and makes it the current snapshot on disk. Blocking.
    fn encode(&self) -> io::Result<Snapshot> {
        let _one_writer = self.writing_file.lock();
        let snapshot = {
            let replica = self.published.read();
            let meta =
                SnapshotMeta { last_log_id: replica.applied, last_membership: replica.membership.clone() };
            Snapshot { meta, snapshot: Bytes::from(replica.index.snapshot()) }
        };
        snapshot_file::write(&self.directory, &snapshot)?;
        Ok(snapshot)
    }

    /// Replaces everything by a received snapshot, on disk first. Blocking.
    fn install(&self, snapshot: &Snapshot) -> io::Result<()> {
        let _one_writer = self.writing_file.lock();
        let copies = decode(snapshot, self.limits).map_err(|what| {
            io::Error::new(io::ErrorKind::InvalidData, format!("received snapshot: {what}"))
        })?;
        snapshot_file::write(&self.directory, snapshot)?;
        let mut copies = copies.into_iter();
        self.published.write(
            |replica| {
                if let Some(copy) = copies.next() {
                    *replica = copy;
                }
            },
            |()| {},
        );
        self.published.rules_changed();
        Ok(())
    }
}

fn empty(limits: IndexLimits) -> Replica {
    Replica { index: Index::new(limits), applied: None, membership: StoredMembership::default() }
}

fn decode(snapshot: &Snapshot, limits: IndexLimits) -> Result<[Replica; 2], String> {
    let copy = || -> Result<Replica, String> {
        let index = Index::restore(&snapshot.snapshot, limits).map_err(|error| error.to_string())?;
        let SnapshotMeta { last_log_id, last_membership } = snapshot.meta.clone();
        Ok(Replica { index, applied: last_log_id, membership: last_membership })
    };
    Ok([copy()?, copy()?])
}

/// A committed entry, decoded.
struct Step {
    log_id: LogId,
    what: What,
}

enum What {
    Nothing,
    Membership(StoredMembership),
    Command(Command),
}

impl Step {
    fn of(entry: Entry) -> io::Result<Step> {
        let log_id = entry.log_id;
        let what = match entry.payload {
            Payload::Blank => What::Nothing,
            Payload::Membership(members) => What::Membership(StoredMembership::new(Some(log_id), members)),
            Payload::Normal(proposal) => {
                What::Command(Command::decode(&proposal.0).map_err(|error| {
                    io::Error::new(io::ErrorKind::InvalidData, format!("{log_id}: {error}"))
                })?)
            }
        };
        Ok(Step { log_id, what })
    }

    /// Whether it can change anything but ownership of blocks.
    fn is_rule(&self) -> bool {
        matches!(&self.what, What::Command(command) if !matches!(command, Command::Announce(_)))
    }

    fn apply(&self, replica: &mut Replica) -> Option<Applied> {
        replica.applied = Some(self.log_id);
        match &self.what {
            What::Nothing => None,
            What::Membership(membership) => {
                replica.membership = membership.clone();
                None
            }
            What::Command(command) => Some(replica.index.apply(command)),
        }
    }
}

type Responder = Option<ApplyResponder<TypeConfig>>;

/// Applies a batch to both copies; proposers hear of it as soon as readers see it. Blocking.
fn apply_batch(published: &Published, batch: Vec<(Entry, Responder)>) -> io::Result<()> {
    let mut steps = Vec::with_capacity(batch.len());
    let mut responders = Vec::with_capacity(batch.len());
    for (entry, responder) in batch {
        steps.push(Step::of(entry)?);
        responders.push(responder);
    }
    let rules = steps.iter().any(Step::is_rule);
    published.write(
        |replica| steps.iter().map(|step| step.apply(replica)).collect::<Vec<_>>(),
        |answers| {
            for (responder, answer) in responders.into_iter().zip(answers) {
                if let Some(responder) = responder {
                    responder.send(Answer(answer));
                }
            }
        },
    );
    if rules {
        published.rules_changed();
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

impl RaftStateMachine<TypeConfig> for StateMachine {
    type SnapshotData = Bytes;
    type SnapshotBuilder = StateMachine;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let replica = self.published.read();
        Ok((replica.applied, replica.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        let mut ended = false;
        while !ended {
            let mut batch = Vec::new();
            while batch.len() < APPLY_ENTRIES_MAX && !ended {
                match entries.next().await {
                    Some(entry) => batch.push(entry?),
                    None => ended = true,
                }
            }
            if !batch.is_empty() {
                let published = Arc::clone(&self.published);
                blocking(move || apply_batch(&published, batch)).await?;
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> StateMachine {
        self.clone()
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, data: Bytes) -> Result<(), io::Error> {
        let machine = self.clone();
        let snapshot = Snapshot { meta: meta.clone(), snapshot: data };
        blocking(move || machine.install(&snapshot)).await
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        let directory = Arc::clone(&self.directory);
        blocking(move || Ok(snapshot_file::read(&directory)?)).await
    }
}

impl RaftSnapshotBuilder<TypeConfig> for StateMachine {
    type SnapshotData = Bytes;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let machine = self.clone();
        blocking(move || machine.encode()).await
    }
}
