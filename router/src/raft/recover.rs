//! Opens what is on disk. A snapshot that fails its check is set aside, never deleted and never served; the group
//! comes back empty and its leader sends it again.
//!
//! What the router may promise meanwhile is the point (docs/adr/0019). A lost snapshot leaves the last entry of the
//! log and the vote known: the router follows, and votes again once it has that entry again. A lost log leaves
//! neither known, so that even following could break a promise: the router refuses to start and must become a new
//! member. Not here: the checks (`disk.rs`, `snapshot_file.rs`) and the withholding (`withheld.rs`).

use std::path::Path;
use std::sync::Arc;

use super::LogId;
use super::intake::Intake;
use super::log::{Change, Disk, LOG_FOLDER, LogError, Owner, Recovered};
use super::log_store::{LogGuard, LogStore};
use super::snapshot_file::{self, SnapshotFileError};
use super::state_machine::StateMachine;
use super::withheld::{WITHHELD_FILE, Withheld};
use crate::error::StartError;

/// What is there of every group, by number, and what is not any more.
pub(crate) struct Opened {
    pub(crate) stores: Vec<(LogStore, StateMachine)>,
    pub(crate) guard: LogGuard,
    pub(crate) withheld: Arc<Withheld>,
}

/// What was found and set aside.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Loss {
    /// A snapshot of which the log still holds every entry.
    #[error(
        "snapshot {path} was corrupted: {what}. It was set aside{aside}; the log holds all of it. Check the disk"
    )]
    Rebuilt {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
        /// Where it is now.
        aside: String,
    },
    /// A snapshot, and with it entries that the log does not hold any more.
    #[error(
        "snapshot {path} was corrupted: {what}. It was set aside{aside}; the leader of group {group} sends another one, \
         and until this router has again what it had it gives no vote in the group. Check the disk"
    )]
    Snapshot {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
        /// Where it is now, if it was there.
        aside: String,
        /// The group.
        group: u16,
    },
}

/// Opens everything. `is_alone`: no other router can send what is lost. Blocking.
///
/// # Errors
/// [`StartError`]: what is not a loss, or a loss that nobody can make good.
pub(crate) fn open(
    directory: &Path,
    owner: &Owner,
    intakes: &[Intake],
    is_alone: bool,
) -> Result<(Opened, Vec<Loss>), StartError> {
    let failed = |source| StartError::from(SnapshotFileError::Io { path: directory.to_owned(), source });
    snapshot_file::remove_temporaries(directory).map_err(failed)?;
    let (mut disk, mut recovered) = Disk::open(directory, owner)?;
    let withheld = Withheld::open(directory)?;
    let mut opening = Opening { directory, is_alone, withheld, losses: Vec::new() };
    let machines: Vec<_> = intakes.iter().cloned().map(StateMachine::open).collect();
    opening.check_log_is_old(&machines, &recovered)?;
    let parts = intakes.iter().zip(machines).zip(&mut recovered);
    let machines = parts.map(|((intake, machine), log)| opening.machine(intake, machine, &mut disk, log));
    let machines = machines.collect::<Result<Vec<_>, StartError>>()?;
    let Opening { withheld, losses, .. } = opening;
    let log = |source| LogError::Io { path: directory.to_owned(), source };
    let (logs, guard) = LogStore::on(disk, recovered).map_err(log)?;
    let stores = logs.into_iter().zip(machines).collect();
    Ok((Opened { stores, guard, withheld: Arc::new(withheld) }, losses))
}

struct Opening<'a> {
    directory: &'a Path,
    is_alone: bool,
    withheld: Withheld,
    losses: Vec<Loss>,
}

type Machine = Result<StateMachine, SnapshotFileError>;

impl Opening<'_> {
    /// A log that is new beside a snapshot is one that was lost: every other one holds a vote.
    fn check_log_is_old(&self, machines: &[Machine], logs: &[Recovered]) -> Result<(), LogError> {
        let has_snapshot = |machine: &Machine| match machine {
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

    /// The machine of a group, empty when its snapshot is lost.
    fn machine(
        &mut self,
        intake: &Intake,
        machine: Machine,
        disk: &mut Disk,
        log: &mut Recovered,
    ) -> Result<StateMachine, StartError> {
        let what = match machine {
            Ok(machine) => match misses(&machine, log) {
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
                self.losses.push(Loss::Rebuilt { path: path.display().to_string(), what, aside });
            }
            Some(_) if self.is_alone => return Err(SnapshotFileError::Corrupt { path, what }.into()),
            Some(purged) => self.lose_snapshot(intake.group, &path, what, disk, log, purged)?,
        }
        Ok(StateMachine::empty(intake.clone()))
    }

    /// Begins a group anew: its log without the snapshot before it is of no use. The vote stays.
    fn lose_snapshot(
        &mut self,
        group: u16,
        path: &Path,
        what: String,
        disk: &mut Disk,
        log: &mut Recovered,
        purged: LogId,
    ) -> Result<(), StartError> {
        let last = log.entries.back().map_or(purged, |entry| entry.log_id);
        self.withheld
            .withhold(group, last)
            .map_err(|source| SnapshotFileError::Io { path: self.directory.join(WITHHELD_FILE), source })?;
        let forgotten = disk.commit([(group, &Change::Forget)].into_iter());
        forgotten.map_err(|source| LogError::Io { path: self.directory.join(LOG_FOLDER), source })?;
        *log = Recovered { vote: log.vote, ..Recovered::default() };
        let aside = set_aside(path)?;
        self.losses.push(Loss::Snapshot { path: path.display().to_string(), what, aside, group });
        Ok(())
    }
}

/// What is wrong when entries are neither in the snapshot nor in the log any more.
fn misses(machine: &StateMachine, log: &Recovered) -> Option<String> {
    let next = |entry: Option<LogId>| entry.map_or(0, |entry| entry.index() + 1);
    let (covered, begins) = (next(machine.published().read().applied), next(log.purged));
    (begins > covered)
        .then(|| format!("it ends before entry {covered}, but the log begins with entry {begins}"))
}

/// Renames a file that may be there; says where it is now.
fn set_aside(path: &Path) -> Result<String, StartError> {
    match snapshot_file::set_aside(path) {
        Ok(aside) => Ok(format!(" as {}", aside.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(SnapshotFileError::Io { path: path.to_owned(), source }.into()),
    }
}
