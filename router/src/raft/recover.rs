//! Opens the data directory. A snapshot that fails its check is set aside, never deleted and never
//! served; the group starts empty and its leader sends a new one.
//!
//! The issue is which promises the router may make meanwhile (docs/adr/0019). After a lost
//! snapshot, the last log entry and the vote are still known: the router follows, and votes again
//! once it has that entry. After a lost log neither is known, so even following could break a
//! promise: the router refuses to start and must become a new member. Not here: the checks (`log/`,
//! `snapshot_file.rs`) and the withheld votes (`withheld_votes.rs`).

use std::path::Path;
use std::sync::Arc;

use super::LogId;
use super::disk_room::DiskRoom;
use super::intake::Intake;
use super::log::{Change, DiskLog, LOG_FOLDER, LogError, LogOwner, RecoveredLog};
use super::log_store::{LogGuard, LogStore};
use super::snapshot_file::{self, SnapshotFileError};
use super::state_machine::StateMachine;
use super::withheld_votes::{WITHHELD_FILE, WithheldVotes};
use crate::error::StartError;

/// Stores of every group, by number, and the withheld votes.
pub(crate) struct OpenedStores {
    pub(crate) stores: Vec<(LogStore, StateMachine)>,
    pub(crate) guard: LogGuard,
    pub(crate) withheld: Arc<WithheldVotes>,
}

/// Data that was found damaged and set aside.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataLoss {
    /// A snapshot; the log still holds all its entries.
    #[error(
        "snapshot {path} was corrupted: {what}. It was set aside{aside}; the log holds all of it. Check the disk"
    )]
    Rebuilt {
        /// The file.
        path: String,
        /// The problem.
        what: String,
        /// Its new path.
        aside: String,
    },
    /// A snapshot, with entries that the log no longer holds.
    #[error(
        "snapshot {path} was corrupted: {what}. It was set aside{aside}; the leader of group {group} sends \
         another one, and until this router has caught up with its lost entries it gives no vote in the \
         group. Check the disk"
    )]
    Snapshot {
        /// The file.
        path: String,
        /// The problem.
        what: String,
        /// Its new path, if it existed.
        aside: String,
        /// The group.
        group: u16,
    },
}

/// Opens everything. `is_alone`: no other router can resend lost data. Blocking.
///
/// # Errors
/// [`StartError`]: an error other than a loss, or a loss without a remedy.
pub(crate) fn open(
    directory: &Path,
    owner: &LogOwner,
    intakes: &[Intake],
    is_alone: bool,
    room: &Arc<DiskRoom>,
) -> Result<(OpenedStores, Vec<DataLoss>), StartError> {
    let failed = |source| StartError::from(SnapshotFileError::Io { path: directory.to_owned(), source });
    snapshot_file::remove_temporaries(directory).map_err(failed)?;
    let (mut disk, mut recovered) = DiskLog::open(directory, owner)?;
    let withheld = WithheldVotes::open(directory)?;
    let mut recovery = RecoveryContext { directory, is_alone, withheld, losses: Vec::new() };
    let machines: Vec<_> = intakes.iter().cloned().map(StateMachine::open).collect();
    recovery.check_log_not_lost(&machines, &recovered)?;
    let parts = intakes.iter().zip(machines).zip(&mut recovered);
    let machines = parts.map(|((intake, machine), log)| recovery.machine(intake, machine, &mut disk, log));
    let machines = machines.collect::<Result<Vec<_>, StartError>>()?;
    let RecoveryContext { withheld, losses, .. } = recovery;
    let log = |source| LogError::Io { path: directory.to_owned(), source };
    let (logs, guard) = LogStore::open(disk, recovered, Arc::clone(room)).map_err(log)?;
    let stores = logs.into_iter().zip(machines).collect();
    Ok((OpenedStores { stores, guard, withheld: Arc::new(withheld) }, losses))
}

struct RecoveryContext<'a> {
    directory: &'a Path,
    is_alone: bool,
    withheld: WithheldVotes,
    losses: Vec<DataLoss>,
}

type OpenedMachine = Result<StateMachine, SnapshotFileError>;

impl RecoveryContext<'_> {
    /// A new log beside a snapshot means that the log was lost, since every other log holds a vote.
    fn check_log_not_lost(&self, machines: &[OpenedMachine], logs: &[RecoveredLog]) -> Result<(), LogError> {
        let has_snapshot = |machine: &OpenedMachine| match machine {
            Ok(machine) => machine.published().read().applied.is_some(),
            Err(_) => true,
        };
        let mut groups = (0..).zip(machines.iter().zip(logs));
        match groups.find(|(_, (machine, log))| log.vote.is_none() && has_snapshot(machine)) {
            None => Ok(()),
            Some((group, _)) => Err(LogError::Corrupt {
                path: self.directory.join(LOG_FOLDER),
                what: format!("it is new, but beside it there is a snapshot of group {group}"),
            }),
        }
    }

    /// The state machine of a group, empty if its snapshot is lost.
    fn machine(
        &mut self,
        intake: &Intake,
        machine: OpenedMachine,
        disk: &mut DiskLog,
        log: &mut RecoveredLog,
    ) -> Result<StateMachine, StartError> {
        let what = match machine {
            Ok(machine) => match missing_entries(&machine, log) {
                None => return Ok(machine),
                Some(what) => what,
            },
            Err(SnapshotFileError::Corrupt { what, .. }) => what,
            Err(other) => return Err(other.into()),
        };
        let path = snapshot_file::path_of(self.directory, intake.group);
        match log.purged {
            None => {
                let aside = set_aside(&path)?;
                self.losses.push(DataLoss::Rebuilt { path: path.display().to_string(), what, aside });
            }
            Some(_) if self.is_alone => return Err(SnapshotFileError::Corrupt { path, what }.into()),
            Some(purged) => self.lose_snapshot(intake.group, &path, what, disk, log, purged)?,
        }
        Ok(StateMachine::empty(intake.clone()))
    }

    /// Resets a group except its vote: its log is useless without the lost snapshot.
    fn lose_snapshot(
        &mut self,
        group: u16,
        path: &Path,
        what: String,
        disk: &mut DiskLog,
        log: &mut RecoveredLog,
        purged: LogId,
    ) -> Result<(), StartError> {
        let last = log.entries.back().map_or(purged, |entry| entry.log_id);
        self.withheld
            .withhold(group, last)
            .map_err(|source| SnapshotFileError::Io { path: self.directory.join(WITHHELD_FILE), source })?;
        let forgotten = disk.commit([(group, &Change::Forget)].into_iter());
        forgotten.map_err(|source| LogError::Io { path: self.directory.join(LOG_FOLDER), source })?;
        *log = RecoveredLog { vote: log.vote, ..RecoveredLog::default() };
        let aside = set_aside(path)?;
        self.losses.push(DataLoss::Snapshot { path: path.display().to_string(), what, aside, group });
        Ok(())
    }
}

/// Describes entries that are in neither the snapshot nor the log; `None` if there are none.
fn missing_entries(machine: &StateMachine, log: &RecoveredLog) -> Option<String> {
    let next = |entry: Option<LogId>| entry.map_or(0, |entry| entry.index() + 1);
    let (covered, begins) = (next(machine.published().read().applied), next(log.purged));
    (begins > covered)
        .then(|| format!("it ends before entry {covered}, but the log begins with entry {begins}"))
}

/// Renames a file if it exists; returns its new path as text.
fn set_aside(path: &Path) -> Result<String, StartError> {
    match snapshot_file::set_aside(path) {
        Ok(aside) => Ok(format!(" as {}", aside.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(SnapshotFileError::Io { path: path.to_owned(), source }.into()),
    }
}
