//! Applies committed entries to the published index, and makes and takes snapshots of it.
//!
//! Applying and encoding run on blocking threads, so that neither a large proposal nor a large snapshot
//! holds a thread that serves requests; small proposals are applied where they come. A snapshot goes from the index to its file chunk by chunk, and what is
//! handed around is the open file: nowhere is it in memory as a whole. Not here: what a command does
//! (`kv_core::index`), how readers see it (`crate::view::published`), the file (`snapshot_file.rs`), how one comes
//! in (`intake.rs`) and goes out (`sending.rs`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use futures_util::{Stream, StreamExt};
use kv_core::index::Index;
use kv_core::index::command::{Announcement, Applied, Change, Command};
use openraft::OptionalSend;
use openraft::storage::{ApplyResponder, EntryResponder, RaftSnapshotBuilder, RaftStateMachine};
use parking_lot::{Mutex, MutexGuard};

use super::intake::{Intake, Received};
use super::making::Making;
use super::repair::Entries;
use super::snapshot_file::{self, ChunkError, SnapshotFileError, Stored, Written};
use super::{Answer, Entry, LogId, Payload, Proposal, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};
use crate::view::departed::Departed;
use crate::view::published::{Published, Replica, Writing};

/// Entries handed to a blocking thread at once: bounds how long a proposer waits for entries behind its own.
const APPLY_ENTRIES_MAX: usize = 64;

/// Bytes of commands that are applied without a blocking thread: less work than waking one, and coming back, takes.
const APPLY_HERE_BYTES_MAX: usize = 1 << 10;

/// Blocks changed under one hold of the lock that readers share: a few hundred microseconds of applying.
const SLICE_BLOCKS_MAX: usize = 2_048;

/// Entries that a repair applies while none is applied beside it.
const CAUGHT_UP_ENTRIES: u64 = 16;

/// A snapshot as openraft hands it around.
#[derive(Debug)]
pub(crate) enum SnapshotData {
    /// A file on this router.
    Stored(Arc<Stored>),
    /// One that came in whole, with the index that was restored on the way.
    Received(Box<Received>),
}

/// The state machine of one group on one router. Clones share it; openraft's snapshot builder is a clone.
#[derive(Clone)]
pub(crate) struct StateMachine {
    published: Arc<Published>,
    intake: Intake,
    /// The current snapshot. Held while a file takes its name, never while one is written.
    current: Arc<Mutex<Option<Arc<Stored>>>>,
    /// Held while a snapshot is made: an index keeps what it was for one at a time.
    building: Arc<Mutex<()>>,
    /// Counts repairs: a snapshot that was begun before one is of the state that was wrong.
    repairs: Arc<AtomicU64>,
    /// Whether a repair needs the log as long as it is: the log is cut where openraft's snapshots are.
    keeps_log: Arc<AtomicBool>,
}

/// While this lives openraft is given no snapshot to cut the log by. One repair has it at a time.
pub(super) struct LogKept(Arc<AtomicBool>);

impl Drop for LogKept {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl StateMachine {
    /// Starts from the group's snapshot when there is one. Blocking.
    pub(crate) fn open(intake: Intake) -> Result<StateMachine, SnapshotFileError> {
        let stored = Stored::open(&intake.directory, intake.group)?;
        let replica = match &stored {
            Some(stored) => {
                let index = intake.restore(stored).map_err(|error| refused(&intake, error))?;
                replica(index, stored)
            }
            None => return Ok(StateMachine::empty(intake)),
        };
        let current = Arc::new(Mutex::new(stored.map(Arc::new)));
        let published = Arc::new(Published::new(replica));
        let (building, repairs, keeps_log) = Default::default();
        Ok(StateMachine { published, intake, current, building, repairs, keeps_log })
    }

    /// Starts from nothing.
    pub(crate) fn empty(intake: Intake) -> StateMachine {
        let index = Index::new(intake.limits());
        let replica = Replica { index, applied: None, membership: StoredMembership::default() };
        let published = Arc::new(Published::new(replica));
        let (current, building, repairs, keeps_log) = Default::default();
        StateMachine { published, intake, current, building, repairs, keeps_log }
    }

    /// What readers see.
    pub(crate) fn published(&self) -> Arc<Published> {
        Arc::clone(&self.published)
    }

    /// Where snapshots of the group come in.
    pub(crate) fn intake(&self) -> Intake {
        self.intake.clone()
    }

    /// Makes the index as it is now the current snapshot on disk. Blocking.
    ///
    /// Entries go on being applied while it is written down, see `making.rs`; another one that is to be made waits.
    pub(crate) fn build(&self) -> io::Result<Snapshot> {
        self.build_alone(&self.building.lock())
    }

    fn build_alone(&self, _only_one: &MutexGuard<'_, ()>) -> io::Result<Snapshot> {
        loop {
            let (making, meta, repairs) =
                Making::begin(&self.published, |_| self.repairs.load(Ordering::Acquire));
            let mut writer = self.intake.writer(meta)?;
            if !making.write(&mut writer)? {
                continue;
            }
            let written = writer.finish()?;
            let mut current = self.current.lock();
            if repairs == self.repairs.load(Ordering::Acquire) {
                return Ok(snapshot(self.publish(&mut current, written)?));
            }
        }
    }

    /// Makes a file the current snapshot, unless a newer one came in meanwhile. Gives the current one.
    pub(super) fn keep(&self, written: Written) -> io::Result<Arc<Stored>> {
        self.publish(&mut self.current.lock(), written)
    }

    fn publish(&self, current: &mut Option<Arc<Stored>>, written: Written) -> io::Result<Arc<Stored>> {
        if let Some(current) = &*current
            && current.meta.last_log_id > written.stored.meta.last_log_id
        {
            return Ok(Arc::clone(current));
        }
        let stored = Arc::new(written.publish(&self.intake.directory, self.intake.group)?);
        *current = Some(Arc::clone(&stored));
        Ok(stored)
    }

    /// Replaces everything by a snapshot, on disk first. Blocking.
    pub(crate) fn install(&self, data: SnapshotData) -> io::Result<()> {
        let Received { index, written } = match data {
            SnapshotData::Received(received) => *received,
            SnapshotData::Stored(stored) => self.copy(&stored)?,
        };
        let received = replica(index, &written.stored);
        self.keep(written)?;
        let before = self.published.entry().slice(|replica| std::mem::replace(replica, received));
        self.published.rules_changed();
        // Freeing an index takes a while, and neither readers nor entries need wait for it.
        drop(tokio::runtime::Handle::try_current().map(|runtime| runtime.spawn_blocking(|| drop(before))));
        Ok(())
    }

    /// Has openraft's snapshots wait, so that the log keeps all entries from here on.
    pub(super) fn keep_log(&self) -> LogKept {
        self.keeps_log.store(true, Ordering::Release);
        LogKept(Arc::clone(&self.keeps_log))
    }

    /// Replaces what applying came to here by another replica's state, with what was applied here beyond it applied
    /// again, and the snapshot on disk with it. Blocking; no other entry is applied meanwhile.
    ///
    /// # Errors
    /// When this replica has not applied what the state has, or the log does not hold what is between; nothing is
    /// changed then. When the new snapshot cannot be written the replica is repaired and its file is not: started
    /// from that, it is found to differ again.
    pub(super) fn repair(&self, received: Received, entries: &Entries, _: LogKept) -> io::Result<()> {
        // The file is a temporary one and goes with this: an older one must not follow a log that was purged.
        let Received { index, written } = received;
        let repaired = Published::new(replica(index, &written.stored));
        // Most of what is missing is applied while entries go on here, unless as many come as are applied again.
        let missing =
            || self.published.read().applied_index().saturating_sub(repaired.read().applied_index());
        let (mut before, mut left) = (u64::MAX, missing());
        while left > CAUGHT_UP_ENTRIES && left <= before / 2 {
            catch_up(&repaired, &self.published, entries)?;
            (before, left) = (left, missing());
        }
        let writing = self.published.entry();
        catch_up(&repaired, &self.published, entries)?;
        self.repairs.fetch_add(1, Ordering::Release);
        let before = writing.slice(|replica| std::mem::replace(replica, repaired.into_replica()));
        self.published.forget_marks();
        drop((writing, before));
        self.published.rules_changed();
        self.build().map(drop)
    }

    /// A snapshot that is a file, as if it had come in.
    fn copy(&self, stored: &Stored) -> io::Result<Received> {
        let mut incoming = self.intake.begin(stored.meta.clone()).map_err(io::Error::other)?;
        for chunk in stored.chunks() {
            let chunk = chunk.map_err(|error| refused(&self.intake, error))?;
            incoming.chunk(chunk.freeze()).map_err(io::Error::other)?;
        }
        incoming.finish().map_err(io::Error::other)
    }

    /// The current snapshot. One that was found damaged is set aside and made anew: the state it was taken of
    /// is alive. Blocking.
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
            // Another one may have taken its name while this waited.
            if let Some(now) = now.as_ref().filter(|now| !Arc::ptr_eq(now, &current)) {
                return Ok(Some(snapshot(Arc::clone(now))));
            }
            snapshot_file::set_aside(&path)?
        };
        tracing::error!(
            group = self.intake.group, path = %path.display(), aside = %aside.display(),
            "the snapshot was damaged on disk and set aside; it is made anew from the index. Check the disk"
        );
        self.build_alone(&only_one).map(Some)
    }
}

/// Applies to a replica the entries that another one has applied beyond it.
fn catch_up(behind: &Published, ahead: &Published, entries: &Entries) -> io::Result<()> {
    let (from, to) = (behind.read().applied_index(), ahead.read().applied_index());
    if from > to {
        return Err(io::Error::other(format!("entry {from} is in the state and not applied here")));
    }
    let between = entries(from + 1..=to);
    if between.iter().map(|entry| entry.log_id.index()).ne(from + 1..=to) {
        return Err(io::Error::other(format!("the log does not hold all entries from {} to {to}", from + 1)));
    }
    apply_batch(behind, between.into_iter().map(|entry| (entry, None)).collect())
}

fn replica(index: Index, stored: &Stored) -> Replica {
    let SnapshotMeta { last_log_id, last_membership } = stored.meta.clone();
    Replica { index, applied: last_log_id, membership: last_membership }
}

fn snapshot(stored: Arc<Stored>) -> Snapshot {
    Snapshot { meta: stored.meta.clone(), snapshot: SnapshotData::Stored(stored) }
}

fn refused(intake: &Intake, error: ChunkError) -> SnapshotFileError {
    let path = snapshot_file::path_of(&intake.directory, intake.group);
    match error {
        ChunkError::Damaged(what) => SnapshotFileError::Corrupt { path, what },
        ChunkError::Io(source) => SnapshotFileError::Io { path, source },
    }
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
                let dropped = match &command {
                    Command::Announce(batch) => Departed::of(batch),
                    _ => Vec::new(),
                };
                let answer = apply_command(&writing, command);
                if let Applied::Announced(outcomes) = &answer {
                    published.note_departed(&dropped, outcomes);
                }
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

/// Applies entries; a proposer hears of its own as soon as readers see it. Whoever follows the rules is woken before: requests are placed by which nodes are
/// live, and one that is told that it has joined is to count there by then, as far as a word can see to it. Blocking.
pub(super) fn apply_batch(published: &Published, batch: Vec<(Entry, Responder)>) -> io::Result<()> {
    for (entry, responder) in batch {
        let step = Step::of(entry)?;
        let rules = step.is_rule();
        let answer = step.apply(published);
        if rules {
            published.rules_changed();
        }
        if let Some(responder) = responder {
            responder.send(Answer(answer));
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
        let machine = self.clone();
        blocking(move || machine.build()).await
    }
}
