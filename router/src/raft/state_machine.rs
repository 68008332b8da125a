//! Applies committed entries to the published index, and makes and installs its snapshots.
//!
//! Applying and encoding run on blocking threads, so that a large proposal or snapshot does not
//! block a serving thread; small proposals are applied inline. A snapshot moves between index and
//! file in chunks and is passed around as an open file: it is never in memory as a whole. Not here:
//! the effect of a command (`kv_core::index`), the readers' view (`crate::view::published`), the
//! file (`snapshot_file.rs`), receiving (`intake.rs`) and sending (`snapshot_sender.rs`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use kv_core::index::Index;
use kv_core::index::command::{Announcement, Applied, Change, Command};
use openraft::OptionalSend;
use openraft::storage::{ApplyResponder, EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use parking_lot::{Mutex, MutexGuard};

use super::disk_room::is_full;
use super::intake::{Intake, ReceivedSnapshot};
use super::repair::HeldEntries;
use super::snapshot_build::SnapshotBuild;
use super::snapshot_file::{self, ChunkError, FinishedSnapshot, SnapshotFile, SnapshotFileError};
use super::{
    ApplyResult, Entry, LogId, Payload, Proposal, Snapshot, SnapshotMeta, StoredMembership, TypeConfig,
};
use crate::view::published::{EntryWriter, PublishedReplica, Replica};
use crate::view::recent_drops::RecentDrops;

/// Entries per blocking task: bounds how long a proposer waits for entries behind its own.
const APPLY_ENTRIES_MAX: usize = 64;

/// Command bytes that are applied inline: less work than waking a blocking thread.
const APPLY_HERE_BYTES_MAX: usize = 1 << 10;

/// Blocks changed under one hold of the readers' lock: a few hundred microseconds.
const SLICE_BLOCKS_MAX: usize = 2_048;

/// Entries that a repair applies while no others are applied.
const CAUGHT_UP_ENTRIES: u64 = 16;

/// Pause before a snapshot that found the disk full is built again.
const SNAPSHOT_PAUSE: Duration = Duration::from_secs(5);

/// A snapshot as openraft passes it around.
#[derive(Debug)]
pub(crate) enum SnapshotData {
    /// A file on this router.
    File(Arc<SnapshotFile>),
    /// A received snapshot, with the index that was restored on the way.
    Received(Box<ReceivedSnapshot>),
}

/// The state machine of one group on one router. Clones share it; openraft's snapshot builder is a
/// clone.
#[derive(Clone)]
pub(crate) struct StateMachine {
    published: Arc<PublishedReplica>,
    intake: Intake,
    /// The current snapshot. Locked while a file is renamed, never while one is written.
    current: Arc<Mutex<Option<Arc<SnapshotFile>>>>,
    /// Locked while a snapshot is made: an index keeps old contents for one at a time.
    building: Arc<Mutex<()>>,
    /// Number of repairs: a snapshot started before one has the wrong state.
    repairs: Arc<AtomicU64>,
    /// Whether a repair needs the whole log, which openraft purges at snapshots.
    keeps_log: Arc<AtomicBool>,
}

/// While this lives, openraft gets no snapshot at which it would purge the log. One repair holds it
/// at a time.
pub(super) struct LogHold(Arc<AtomicBool>);

impl Drop for LogHold {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl StateMachine {
    /// Starts from the group's snapshot if there is one. Blocking.
    pub(crate) fn open(intake: Intake) -> Result<StateMachine, SnapshotFileError> {
        let stored = SnapshotFile::open(&intake.directory, intake.group)?;
        let replica = match &stored {
            Some(stored) => {
                let index = intake.restore(stored).map_err(|error| file_error(&intake, error))?;
                replica(index, stored)
            }
            None => return Ok(StateMachine::empty(intake)),
        };
        let current = Arc::new(Mutex::new(stored.map(Arc::new)));
        let published = Arc::new(PublishedReplica::new(replica));
        let (building, repairs, keeps_log) = Default::default();
        Ok(StateMachine { published, intake, current, building, repairs, keeps_log })
    }

    /// Starts empty.
    pub(crate) fn empty(intake: Intake) -> StateMachine {
        let index = Index::new(intake.limits());
        let replica = Replica { index, applied: None, membership: StoredMembership::default() };
        let published = Arc::new(PublishedReplica::new(replica));
        let (current, building, repairs, keeps_log) = Default::default();
        StateMachine { published, intake, current, building, repairs, keeps_log }
    }

    /// The readers' view.
    pub(crate) fn published(&self) -> Arc<PublishedReplica> {
        Arc::clone(&self.published)
    }

    /// Receiver of the group's snapshots.
    pub(crate) fn intake(&self) -> Intake {
        self.intake.clone()
    }

    /// Writes the current index to disk as the current snapshot. Blocking.
    ///
    /// Entries continue to be applied meanwhile, see `snapshot_build.rs`; a concurrent build waits.
    pub(crate) fn build(&self) -> io::Result<Snapshot> {
        self.build_alone(&self.building.lock())
    }

    fn build_alone(&self, _only_one: &MutexGuard<'_, ()>) -> io::Result<Snapshot> {
        loop {
            let (build, meta, repairs) =
                SnapshotBuild::begin(&self.published, |_| self.repairs.load(Ordering::Acquire));
            let mut writer = self.intake.writer(meta)?;
            if !build.write(&mut writer)? {
                continue;
            }
            let written = writer.finish()?;
            let mut current = self.current.lock();
            if repairs == self.repairs.load(Ordering::Acquire) {
                return Ok(snapshot(self.publish(&mut current, written)?));
            }
        }
    }

    /// Makes a file the current snapshot, unless a newer one was received meanwhile. Returns the
    /// current one.
    pub(super) fn keep_file(&self, written: FinishedSnapshot) -> io::Result<Arc<SnapshotFile>> {
        self.publish(&mut self.current.lock(), written)
    }

    fn publish(
        &self,
        current: &mut Option<Arc<SnapshotFile>>,
        written: FinishedSnapshot,
    ) -> io::Result<Arc<SnapshotFile>> {
        if let Some(current) = &*current
            && current.meta.last_log_id > written.stored.meta.last_log_id
        {
            return Ok(Arc::clone(current));
        }
        let stored = Arc::new(written.publish(&self.intake.directory, self.intake.group)?);
        *current = Some(Arc::clone(&stored));
        Ok(stored)
    }

    /// Replaces everything with a snapshot, on disk first. Blocking.
    pub(crate) fn install(&self, data: SnapshotData) -> io::Result<()> {
        let ReceivedSnapshot { index, file: written } = match data {
            SnapshotData::Received(received) => *received,
            SnapshotData::File(stored) => self.copy(&stored)?,
        };
        let received = replica(index, &written.stored);
        self.keep_file(written)?;
        let before = self.published.begin_entry().apply_slice(|replica| std::mem::replace(replica, received));
        self.published.notify_rules();
        // Freed in the background, since neither readers nor entries need wait for it.
        drop(tokio::runtime::Handle::try_current().map(|runtime| runtime.spawn_blocking(|| drop(before))));
        Ok(())
    }

    /// Delays openraft's snapshots, so that the log keeps all entries from here on.
    pub(super) fn hold_log(&self) -> LogHold {
        self.keeps_log.store(true, Ordering::Release);
        LogHold(Arc::clone(&self.keeps_log))
    }

    /// Replaces the applied state with another replica's, reapplies this replica's later entries,
    /// and replaces the snapshot on disk. Blocking; no other entry is applied meanwhile.
    ///
    /// # Errors
    /// If this replica has not applied the state's entries, or the log lacks the entries in
    /// between; then the replica is unchanged. If the new snapshot cannot be written, the replica
    /// is repaired but its file is not: a restart from it is detected as diverged again.
    pub(super) fn repair(
        &self,
        received: ReceivedSnapshot,
        entries: &HeldEntries,
        _: LogHold,
    ) -> io::Result<()> {
        // The received file is temporary and is removed here: an older snapshot must not follow a
        // purged log.
        let ReceivedSnapshot { index, file: written } = received;
        let repaired = PublishedReplica::new(replica(index, &written.stored));
        // Most missing entries are applied while others continue, unless they arrive as fast as
        // they are reapplied.
        let missing =
            || self.published.read().applied_index().saturating_sub(repaired.read().applied_index());
        let (mut before, mut left) = (u64::MAX, missing());
        while left > CAUGHT_UP_ENTRIES && left <= before / 2 {
            catch_up(&repaired, &self.published, entries)?;
            (before, left) = (left, missing());
        }
        let writing = self.published.begin_entry();
        catch_up(&repaired, &self.published, entries)?;
        self.repairs.fetch_add(1, Ordering::Release);
        let before = writing.apply_slice(|replica| std::mem::replace(replica, repaired.into_replica()));
        self.published.clear_marks();
        drop((writing, before));
        self.published.notify_rules();
        self.build().map(drop)
    }

    /// Copies a snapshot file as if it had been received.
    fn copy(&self, stored: &SnapshotFile) -> io::Result<ReceivedSnapshot> {
        let mut incoming = self.intake.begin(stored.meta.clone()).map_err(io::Error::other)?;
        for chunk in stored.chunks() {
            let chunk = chunk.map_err(|error| file_error(&self.intake, error))?;
            incoming.chunk(chunk.freeze()).map_err(io::Error::other)?;
        }
        incoming.finish().map_err(io::Error::other)
    }

    /// The current snapshot. A damaged one is set aside and rebuilt, since its state is still live.
    /// Blocking.
    pub(crate) fn current(&self) -> io::Result<Option<Snapshot>> {
        let current = self.current.lock().clone();
        let Some(current) = current else { return Ok(None) };
        if !current.is_damaged() {
            return Ok(Some(snapshot(current)));
        }
        let only_one = self.building.lock();
        let path = snapshot_file::path_of(&self.intake.directory, self.intake.group);
        let aside = {
            let now = self.current.lock();
            // Another one may have replaced it during the wait.
            if let Some(now) = now.as_ref().filter(|now| !Arc::ptr_eq(now, &current)) {
                return Ok(Some(snapshot(Arc::clone(now))));
            }
            snapshot_file::set_aside(&path)?
        };
        tracing::error!(
            group = self.intake.group, path = %path.display(), aside = %aside.display(),
            "the snapshot was damaged on disk and set aside; it is rebuilt from the index. Check the disk"
        );
        self.build_alone(&only_one).map(Some)
    }
}

/// Applies the entries that `ahead` has applied and `behind` has not.
fn catch_up(behind: &PublishedReplica, ahead: &PublishedReplica, entries: &HeldEntries) -> io::Result<()> {
    let (from, to) = (behind.read().applied_index(), ahead.read().applied_index());
    if from > to {
        return Err(io::Error::other(format!("entry {from} is in the received state but not applied here")));
    }
    let between = entries(from + 1..=to);
    if between.iter().map(|entry| entry.log_id.index()).ne(from + 1..=to) {
        return Err(io::Error::other(format!("the log does not hold all entries from {} to {to}", from + 1)));
    }
    apply_batch(behind, between.into_iter().map(|entry| (entry, None)).collect())
}

fn replica(index: Index, stored: &SnapshotFile) -> Replica {
    let SnapshotMeta { last_log_id, last_membership } = stored.meta.clone();
    Replica { index, applied: last_log_id, membership: last_membership }
}

fn snapshot(stored: Arc<SnapshotFile>) -> Snapshot {
    Snapshot { meta: stored.meta.clone(), snapshot: SnapshotData::File(stored) }
}

fn file_error(intake: &Intake, error: ChunkError) -> SnapshotFileError {
    let path = snapshot_file::path_of(&intake.directory, intake.group);
    match error {
        ChunkError::Damaged(what) => SnapshotFileError::Corrupt { path, what },
        ChunkError::Io(source) => SnapshotFileError::Io { path, source },
    }
}

/// A decoded committed entry.
struct CommittedEntry {
    log_id: LogId,
    effect: EntryEffect,
}

enum EntryEffect {
    Blank,
    Membership(StoredMembership),
    Command(Command),
}

impl CommittedEntry {
    fn decode(entry: Entry) -> io::Result<CommittedEntry> {
        let log_id = entry.log_id;
        let what = match entry.payload {
            Payload::Blank => EntryEffect::Blank,
            Payload::Membership(members) => {
                EntryEffect::Membership(StoredMembership::new(Some(log_id), members))
            }
            Payload::Normal(proposal) => {
                EntryEffect::Command(Command::decode(&proposal.0).map_err(|error| {
                    io::Error::new(io::ErrorKind::InvalidData, format!("{log_id}: {error}"))
                })?)
            }
        };
        Ok(CommittedEntry { log_id, effect: what })
    }

    /// Whether it can change more than ownership of blocks.
    fn is_rule(&self) -> bool {
        matches!(&self.effect, EntryEffect::Command(command) if !matches!(command, Command::Announce(_)))
    }

    /// Applies the entry to the published replica.
    fn apply(self, published: &PublishedReplica) -> Option<Applied> {
        let writing = published.begin_entry();
        let applied = Some(self.log_id);
        match self.effect {
            EntryEffect::Blank => {
                writing.apply_slice(|replica| replica.applied = applied);
                None
            }
            EntryEffect::Membership(membership) => {
                writing.apply_slice(|replica| (replica.membership, replica.applied) = (membership, applied));
                None
            }
            EntryEffect::Command(command) => {
                let dropped = match &command {
                    Command::Announce(batch) => RecentDrops::from_batch(batch),
                    _ => Vec::new(),
                };
                let answer = apply_command(&writing, command);
                if let Applied::Announced(outcomes) = &answer {
                    published.record_drops(&dropped, outcomes);
                }
                writing.apply_slice(|replica| replica.applied = applied);
                Some(answer)
            }
        }
    }
}

/// Applies a command in slices that readers can wait for. Announcements are independent: one after
/// the other has the same effect as all at once, if the limits allow all of them.
fn apply_command(writing: &EntryWriter<'_>, command: Command) -> Applied {
    let batch = match command {
        Command::Announce(batch) if blocks_of(&batch) > SLICE_BLOCKS_MAX => batch,
        command => return writing.apply_slice(|replica| replica.index.apply(&command)),
    };
    let command = Command::Announce(batch);
    let refused = writing.apply_slice(|replica| replica.index.limits().check(&command).err());
    let batch = match (refused, command) {
        (None, Command::Announce(batch)) => batch,
        (Some(refusal), _) => return Applied::Refused(refusal),
        (None, command) => return writing.apply_slice(|replica| replica.index.apply(&command)),
    };
    let mut outcomes = Vec::with_capacity(batch.len());
    let mut rest = batch.into_iter().peekable();
    while rest.peek().is_some() {
        let mut blocks = 0;
        let slice: Vec<Announcement> = std::iter::from_fn(|| {
            let table = |next: &Announcement| blocks == 0 || blocks + weight(next) <= SLICE_BLOCKS_MAX;
            let next = rest.next_if(table)?;
            blocks += weight(&next);
            Some(next)
        })
        .collect();
        match writing.apply_slice(|replica| replica.index.apply(&Command::Announce(slice))) {
            Applied::Announced(some) => outcomes.extend(some),
            // The limits were checked for all of them.
            other => return other,
        }
    }
    Applied::Announced(outcomes)
}

fn blocks_of(batch: &[Announcement]) -> usize {
    batch.iter().map(weight).sum()
}

/// Cost of an announcement: its blocks and changes, at least 1.
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

/// Applies entries; a proposer gets its result once readers see it. Watchers of membership, pins
/// and quotas are notified before that: a node that is told that it joined should already count in
/// placement. Blocking.
pub(super) fn apply_batch(published: &PublishedReplica, batch: Vec<(Entry, Responder)>) -> io::Result<()> {
    for (entry, responder) in batch {
        let step = CommittedEntry::decode(entry)?;
        let rules = step.is_rule();
        let answer = step.apply(published);
        if rules {
            published.notify_rules();
        }
        if let Some(responder) = responder {
            responder.send(ApplyResult(answer));
        }
    }
    Ok(())
}

fn command_bytes(entry: &Entry) -> usize {
    match &entry.payload {
        Payload::Normal(Proposal(command)) => command.len(),
        _ => 0,
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

impl RaftStateMachine<TypeConfig> for StateMachine {
    type SnapshotData = SnapshotData;
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
            let published = Arc::clone(&self.published);
            match batch.iter().map(|(entry, _)| command_bytes(entry)).sum() {
                0..=APPLY_HERE_BYTES_MAX => apply_batch(&published, batch)?,
                _ => blocking(move || apply_batch(&published, batch)).await?,
            }
        }
        Ok(())
    }

    async fn try_create_snapshot_builder(&mut self, force: bool) -> Option<StateMachine> {
        (force || !self.keeps_log.load(Ordering::Acquire)).then(|| self.clone())
    }

    async fn get_snapshot_builder(&mut self) -> StateMachine {
        self.clone()
    }

    async fn install_snapshot(&mut self, _: &SnapshotMeta, data: SnapshotData) -> Result<(), io::Error> {
        let machine = self.clone();
        blocking(move || machine.install(data)).await
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        let machine = self.clone();
        blocking(move || machine.current()).await
    }
}

impl RaftSnapshotBuilder<TypeConfig> for StateMachine {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        loop {
            let machine = self.clone();
            match blocking(move || machine.build()).await {
                // openraft ends after a failed snapshot. It can wait: the log has all entries.
                Err(error) if is_full(&error) => {
                    tracing::warn!(%error, "a snapshot waits for room on the disk");
                    tokio::time::sleep(SNAPSHOT_PAUSE).await;
                }
                built => return built,
            }
        }
    }
}
