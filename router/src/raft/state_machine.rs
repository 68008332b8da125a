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
use kv_core::index::command::{Announcement, Applied, Change, Command};
use kv_core::index::{Index, IndexLimits};
use openraft::OptionalSend;
use openraft::storage::{ApplyResponder, EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use parking_lot::Mutex;

use super::snapshot_file::{self, SnapshotFileError};
use super::{Answer, Entry, LogId, Payload, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};
use crate::view::published::{Published, Replica, Writing};

/// Entries handed to a blocking thread at once: bounds how long a proposer waits for entries behind its own.
const APPLY_ENTRIES_MAX: usize = 64;

/// Blocks changed under one hold of the lock that readers share: a few hundred microseconds of applying.
const SLICE_BLOCKS_MAX: usize = 2_048;

/// The state machine of one group on one router. Clones share it; openraft's snapshot builder is a clone.
#[derive(Clone)]
pub(crate) struct StateMachine {
    group: u16,
    published: Arc<Published>,
    directory: Arc<Path>,
    limits: IndexLimits,
    /// One snapshot file is written at a time, whether built here or received.
    writing_file: Arc<Mutex<()>>,
}

impl StateMachine {
    /// Starts from the group's snapshot in `directory` when there is one. Blocking.
    pub(crate) fn open(
        directory: &Path,
        group: u16,
        limits: IndexLimits,
    ) -> Result<StateMachine, SnapshotFileError> {
        let replica = match snapshot_file::read(directory, group)? {
            Some(snapshot) => {
                decode(&snapshot, limits).map_err(|what| snapshot_file::corrupt(directory, group, what))?
            }
            None => {
                Replica { index: Index::new(limits), applied: None, membership: StoredMembership::default() }
            }
        };
        Ok(StateMachine {
            group,
            published: Arc::new(Published::new(replica)),
            directory: Arc::from(directory),
            limits,
            writing_file: Arc::default(),
        })
    }

    /// What readers see.
    pub(crate) fn published(&self) -> Arc<Published> {
        Arc::clone(&self.published)
    }

    /// Makes the index as it is now the current snapshot on disk. Blocking.
    fn build(&self) -> io::Result<Snapshot> {
        let _one_writer = self.writing_file.lock();
        let snapshot = encode(&self.published);
        snapshot_file::write(&self.directory, self.group, &snapshot)?;
        Ok(snapshot)
    }

    /// Replaces everything by a received snapshot, on disk first. Blocking.
    fn install(&self, snapshot: &Snapshot) -> io::Result<()> {
        let _one_writer = self.writing_file.lock();
        let received = decode(snapshot, self.limits).map_err(|what| {
            io::Error::new(io::ErrorKind::InvalidData, format!("received snapshot: {what}"))
        })?;
        snapshot_file::write(&self.directory, self.group, snapshot)?;
        let before = self.published.entry().slice(|replica| std::mem::replace(replica, received));
        // Freeing an index takes a while, and nobody need wait for it.
        drop(before);
        self.published.rules_changed();
        Ok(())
    }
}

/// The replica as a snapshot. Entries wait for some microseconds while the index is frozen, not while it
/// is written down: a frozen index shares its blocks with the living one.
fn encode(published: &Published) -> Snapshot {
    let (frozen, last_log_id, last_membership) =
        published.whole(|replica| (replica.index.freeze(), replica.applied, replica.membership.clone()));
    let meta = SnapshotMeta { last_log_id, last_membership };
    Snapshot { meta, snapshot: Bytes::from(frozen.encode()) }
}

fn decode(snapshot: &Snapshot, limits: IndexLimits) -> Result<Replica, String> {
    let index = Index::restore(&snapshot.snapshot, limits).map_err(|error| error.to_string())?;
    let SnapshotMeta { last_log_id, last_membership } = snapshot.meta.clone();
    Ok(Replica { index, applied: last_log_id, membership: last_membership })
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

    /// Applies the entry to what readers see.
    fn apply(self, published: &Published) -> Option<Applied> {
        let writing = published.entry();
        let applied = Some(self.log_id);
        match self.what {
            What::Nothing => {
                writing.slice(|replica| replica.applied = applied);
                None
            }
            What::Membership(membership) => {
                writing.slice(|replica| (replica.membership, replica.applied) = (membership, applied));
                None
            }
            What::Command(command) => {
                let answer = apply_command(&writing, command);
                writing.slice(|replica| replica.applied = applied);
                Some(answer)
            }
        }
    }
}

/// Applies a command in slices that readers can wait for. Announcements stand for themselves: applied one
/// after the other they come to the same as all at once, when the limits let in all of them.
fn apply_command(writing: &Writing<'_>, command: Command) -> Applied {
    let batch = match command {
        Command::Announce(batch) if blocks_of(&batch) > SLICE_BLOCKS_MAX => batch,
        command => return writing.slice(|replica| replica.index.apply(&command)),
    };
    let command = Command::Announce(batch);
    let refused = writing.slice(|replica| replica.index.limits().check(&command).err());
    let batch = match (refused, command) {
        (None, Command::Announce(batch)) => batch,
        (Some(refusal), _) => return Applied::Refused(refusal),
        (None, command) => return writing.slice(|replica| replica.index.apply(&command)),
    };
    let mut outcomes = Vec::with_capacity(batch.len());
    let mut rest = batch.into_iter().peekable();
    while rest.peek().is_some() {
        let mut blocks = 0;
        let slice: Vec<Announcement> = std::iter::from_fn(|| {
            let fits = |next: &Announcement| blocks == 0 || blocks + weight(next) <= SLICE_BLOCKS_MAX;
            let next = rest.next_if(fits)?;
            blocks += weight(&next);
            Some(next)
        })
        .collect();
        match writing.slice(|replica| replica.index.apply(&Command::Announce(slice))) {
            Applied::Announced(some) => outcomes.extend(some),
            // The limits were checked on all of them.
            other => return other,
        }
    }
    Applied::Announced(outcomes)
}

fn blocks_of(batch: &[Announcement]) -> usize {
    batch.iter().map(weight).sum()
}

/// Blocks and changes of an announcement: what applying it costs. At least 1.
fn weight(announcement: &Announcement) -> usize {
    let blocks = announcement.changes.iter().map(|change| match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len()
        }
        Change::Cleared => 0,
    });
    blocks.sum::<usize>() + announcement.changes.len() + 1
}

type Responder = Option<ApplyResponder<TypeConfig>>;

/// Applies entries; a proposer hears of its own as soon as readers see it. Blocking.
fn apply_batch(published: &Published, batch: Vec<(Entry, Responder)>) -> io::Result<()> {
    for (entry, responder) in batch {
        let step = Step::of(entry)?;
        let rules = step.is_rule();
        let answer = step.apply(published);
        if let Some(responder) = responder {
            responder.send(Answer(answer));
        }
        if rules {
            published.rules_changed();
        }
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
        let (directory, group) = (Arc::clone(&self.directory), self.group);
        blocking(move || Ok(snapshot_file::read(&directory, group)?)).await
    }
}

impl RaftSnapshotBuilder<TypeConfig> for StateMachine {
    type SnapshotData = Bytes;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        let machine = self.clone();
        blocking(move || machine.build()).await
    }
}
