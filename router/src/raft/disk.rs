//! The Raft logs of all groups as records in one redb file: how a record looks, how the file is opened and checked,
//! how one batch of operations becomes one durable transaction.
//!
//! Every record carries a CRC32C over its key and its bytes, and the file names the first and last entry
//! of each group, so a flipped bit, a torn page and a lost tail are all found at open. A file that fails is
//! refused, never repaired by guessing: a voter that forgets what it acknowledged can lose other
//! routers' commits. Commands above [`COMMAND_BYTES_MAX`] lie in files beside it (`segments.rs`), durable before
//! the record that names them: a tree that is copied when it is written is no place for megabytes. Not here: what
//! becomes of a router whose file was refused (`recover.rs`), when a batch is made (`disk_thread.rs`) and what
//! openraft sees
//! (`log_store.rs`).

use std::collections::VecDeque;
use std::io;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, Table, TableDefinition};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::segments::{Extent, Segments};
use super::{Cluster, Entry, LogId, Payload, Proposal, Vote};

/// Name of the log file inside the data directory.
pub(crate) const LOG_FILE: &str = "raft.redb";

/// A log being made; it takes its name once it is whole.
const NEW_FILE: &str = "raft.redb.new";

/// Version of the record layout; another one is refused.
const FORMAT: u64 = 3;

/// Largest command in a record. A larger one costs a sync of its own, and less of everything else.
const COMMAND_BYTES_MAX: usize = 8 << 10;

/// Page cache of redb. Small, because entries are read from memory and the file only at start.
const CACHE_BYTES: usize = 16 << 20;

const ENTRIES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("entries");
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

const KEY_FORMAT: &str = "format";
const KEY_ROUTER: &str = "router";
const KEY_CLUSTER: &str = "cluster";
const KEY_SHARDS: &str = "shards";
const KEY_VOTE: &str = "vote";
const KEY_PURGED: &str = "purged";
const KEY_COMMITTED: &str = "committed";
const KEY_LAST: &str = "last";

/// Bits of an entry's key that count entries; the group stands above them. A group that takes a thousand
/// entries a second needs nine thousand years for them.
const INDEX_BITS: u32 = 48;

const INDEX_MAX: u64 = (1 << INDEX_BITS) - 1;

/// Why a log file was not opened.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A record does not match its checksum, or one that must be there is missing.
    #[error(
        "raft log {path} is corrupted: {what}. This router refuses to start because it can no longer prove what it \
         acknowledged and what it voted"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Which record, and what is wrong with it.
        what: String,
    },
    /// The file belongs to another router.
    #[error(
        "raft log {path} belongs to router {found}, this is router {wanted}: correct `id` or `data_dir` in the config"
    )]
    OtherRouter {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        found: u64,
        /// Who we are.
        wanted: u64,
    },
    /// The file belongs to another cluster, or cuts the index into other shards.
    #[error(
        "raft log {path} is of cluster {found:?} with {found_shards} shards, the config says cluster {wanted:?} with \
         {wanted_shards}: correct `cluster` and `shards`, which never change after the first start, or name an empty \
         data_dir"
    )]
    OtherCluster {
        /// The file.
        path: PathBuf,
        /// Its cluster.
        found: String,
        /// Its shards.
        found_shards: u16,
        /// The cluster of the config.
        wanted: String,
        /// The shards of the config.
        wanted_shards: u16,
    },
    /// The record layout is of another release.
    #[error(
        "raft log {path} has format {found}, this release reads {FORMAT}: start the release that wrote it"
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format number.
        found: u64,
    },
    /// Another process has the file open.
    #[error(
        "raft log {path} is in use by another process: stop the other router or give this one its own data_dir"
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("raft log {path} cannot be opened: {source}; check that the directory exists and is writable")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Whose log it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) router: u64,
    pub(crate) cluster: Cluster,
}

/// Everything the file held of one group when it was opened.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub(crate) vote: Option<Vote>,
    pub(crate) purged: Option<LogId>,
    pub(crate) committed: Option<LogId>,
    pub(crate) entries: VecDeque<Entry>,
}

/// One change of one group's log.
#[derive(Debug)]
pub(crate) enum Change {
    Vote(Vote),
    Append(Vec<Entry>),
    /// Remove every entry with this index or a higher one; `last` is the last index that stays.
    Truncate {
        from: u64,
    },
    Purge(LogId),
    Committed(Option<LogId>),
    /// The group begins anew, with the vote it gave.
    Forget,
}

/// The open file. One thread owns it.
pub(crate) struct Disk {
    database: Database,
    segments: Segments,
}

/// An entry as its record has it.
#[derive(Serialize)]
enum Record<'a> {
    Whole(&'a Entry),
    /// Its command lies beside the log.
    Beside(LogId, Extent),
}

/// The same, read.
#[derive(Deserialize)]
enum OwnedRecord {
    Whole(Entry),
    Beside(LogId, Extent),
}

impl Disk {
    /// Opens or creates the file, checks every record and returns what it holds of each group.
    pub(crate) fn open(directory: &Path, owner: &Owner) -> Result<(Disk, Vec<Recovered>), LogError> {
        let path = directory.join(LOG_FILE);
        // redb checks what it reads with assertions in places; a damaged file must end in a message.
        let opened = catch_unwind(AssertUnwindSafe(|| open_checked(&path, owner)));
        opened.unwrap_or_else(|_| Err(corrupt(&path, "its page structure is damaged")))
    }

    /// A log on another kind of file, for tests of what a disk can do.
    #[cfg(test)]
    pub(crate) fn on(device: impl redb::StorageBackend, directory: &Path) -> Disk {
        let database = Database::builder().create_with_backend(device);
        let segments = Segments::open(directory).expect("a directory");
        Disk { database: database.expect("a new device"), segments }
    }

    /// Makes all changes of all groups durable in one transaction, in order.
    ///
    /// # Errors
    /// What the file system said (no space, I/O error). Nothing of the batch is visible then.
    pub(crate) fn commit<'a>(&mut self, changes: impl Iterator<Item = (u16, &'a Change)>) -> io::Result<()> {
        let changes: Vec<(u16, &Change)> = changes.collect();
        let mut extents = self.write_beside(&changes)?.into_iter();
        let mut released = Vec::new();
        let transaction = self.database.begin_write().map_err(io::Error::other)?;
        {
            let mut tables = Tables {
                entries: transaction.open_table(ENTRIES).map_err(io::Error::other)?,
                meta: transaction.open_table(META).map_err(io::Error::other)?,
            };
            for (group, change) in changes {
                tables.write(group, change, &mut extents, &mut released)?;
            }
        }
        transaction.commit().map_err(commit_error)?;
        self.segments.release(released)
    }

    /// Makes the large commands of all new entries durable; says where they lie, in order.
    fn write_beside(&mut self, changes: &[(u16, &Change)]) -> io::Result<Vec<Extent>> {
        let mut extents = Vec::new();
        for (_, change) in changes {
            let Change::Append(entries) = change else { continue };
            for command in entries.iter().filter_map(large_command) {
                extents.push(self.segments.write(command)?);
            }
        }
        self.segments.sync()?;
        Ok(extents)
    }
}

/// The command of an entry, if it is too large for a record.
fn large_command(entry: &Entry) -> Option<&[u8]> {
    match &entry.payload {
        Payload::Normal(Proposal(command)) if command.len() > COMMAND_BYTES_MAX => Some(command),
        _ => None,
    }
}

fn commit_error(error: redb::CommitError) -> io::Error {
    match error {
        redb::CommitError::Storage(redb::StorageError::Io(source)) => source,
        other => io::Error::other(other),
    }
}

fn storage_error(error: redb::StorageError) -> io::Error {
    match error {
        redb::StorageError::Io(source) => source,
        other => io::Error::other(other),
    }
}

type Meta<'t> = Table<'t, &'static str, &'static [u8]>;

/// The tables of the file in one transaction.
struct Tables<'t> {
    entries: Table<'t, u64, &'static [u8]>,
    meta: Meta<'t>,
}

/// Key of an entry: entries of one group lie together, in order.
fn place(group: u16, index: u64) -> u64 {
    u64::from(group) << INDEX_BITS | index
}

/// Key of a group's record in the table of single values.
fn key_of(group: u16, key: &str) -> String {
    format!("{group}/{key}")
}

impl Tables<'_> {
    /// Writes a change. `beside` says where the large commands lie; what lies beside the log and is no longer named
    /// goes to `released`.
    fn write(
        &mut self,
        group: u16,
        change: &Change,
        beside: &mut impl Iterator<Item = Extent>,
        released: &mut Vec<Extent>,
    ) -> io::Result<()> {
        let key = |key| key_of(group, key);
        match change {
            Change::Vote(vote) => put_meta(&mut self.meta, &key(KEY_VOTE), vote),
            Change::Committed(committed) => put_meta(&mut self.meta, &key(KEY_COMMITTED), committed),
            Change::Append(new) => self.append(group, new, beside),
            Change::Truncate { from } => {
                self.remove(place(group, *from)..=place(group, INDEX_MAX), released)?;
                put_meta(&mut self.meta, &key(KEY_LAST), &from.checked_sub(1))
            }
            Change::Purge(upto) => {
                self.remove(place(group, 0)..=place(group, upto.index()), released)?;
                put_meta(&mut self.meta, &key(KEY_PURGED), upto)
            }
            Change::Forget => {
                self.remove(place(group, 0)..=place(group, INDEX_MAX), released)?;
                for gone in [KEY_PURGED, KEY_COMMITTED, KEY_LAST] {
                    self.meta.remove(key(gone).as_str()).map_err(storage_error)?;
                }
                Ok(())
            }
        }
    }

    fn append(
        &mut self,
        group: u16,
        new: &[Entry],
        beside: &mut impl Iterator<Item = Extent>,
    ) -> io::Result<()> {
        for entry in new {
            let place = place(group, entry.log_id.index());
            let record = match large_command(entry) {
                None => Record::Whole(entry),
                Some(_) => {
                    let extent =
                        beside.next().ok_or_else(|| io::Error::other("a command was not written"))?;
                    Record::Beside(entry.log_id, extent)
                }
            };
            let record = seal(&place.to_le_bytes(), &record)?;
            self.entries.insert(place, record.as_slice()).map_err(storage_error)?;
        }
        match new.last() {
            Some(last) => put_meta(&mut self.meta, &key_of(group, KEY_LAST), &Some(last.log_id.index())),
            None => Ok(()),
        }
    }

    fn remove(&mut self, places: RangeInclusive<u64>, released: &mut Vec<Extent>) -> io::Result<()> {
        let release = |place: u64, record: &[u8]| {
            if let Ok(OwnedRecord::Beside(_, extent)) = unseal(&place.to_le_bytes(), record) {
                released.push(extent);
            }
            false
        };
        self.entries.retain_in(places, release).map_err(storage_error)
    }
}

fn put_meta<T: Serialize>(meta: &mut Meta<'_>, key: &str, value: &T) -> io::Result<()> {
    let record = seal(key.as_bytes(), value)?;
    meta.insert(key, record.as_slice()).map_err(storage_error)?;
    Ok(())
}

/// CRC32C over key and payload, then the payload: a record moved to another key fails too.
fn seal<T: Serialize>(key: &[u8], value: &T) -> io::Result<Vec<u8>> {
    let mut record = vec![0; 4];
    rmp_serde::encode::write(&mut record, value).map_err(io::Error::other)?;
    let crc = checksum(key, &record[4..]);
    record[..4].copy_from_slice(&crc.to_le_bytes());
    Ok(record)
}

fn checksum(key: &[u8], payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(key), payload)
}

fn unseal<T: DeserializeOwned>(key: &[u8], record: &[u8]) -> Result<T, String> {
    let Some((crc, payload)) = record.split_first_chunk::<4>() else {
        return Err(format!("is {} bytes long, shorter than its checksum", record.len()));
    };
    let (stored, computed) = (u32::from_le_bytes(*crc), checksum(key, payload));
    if stored != computed {
        return Err(format!("has checksum {stored:08x}, its bytes give {computed:08x}"));
    }
    rmp_serde::from_slice(payload).map_err(|error| format!("does not decode: {error}"))
}

fn corrupt(path: &Path, what: impl Into<String>) -> LogError {
    LogError::Corrupt { path: path.to_owned(), what: what.into() }
}

fn open_checked(path: &Path, owner: &Owner) -> Result<(Disk, Vec<Recovered>), LogError> {
    // redb takes an empty file for a new one; this log never leaves one behind.
    if std::fs::metadata(path).is_ok_and(|file| file.len() == 0) {
        return Err(corrupt(path, "it is empty"));
    }
    if !path.exists() {
        make(path, owner)?;
    }
    let database = open_file(path).map_err(|error| open_error(path, error))?;
    claim(&database, path, owner)?;
    // Behind the log's own lock, so that no other process writes them.
    let segments = Segments::open(path.parent().unwrap_or(Path::new(".")));
    let mut segments = segments.map_err(|source| LogError::Io { path: path.to_owned(), source })?;
    let recovered = recover(&database, &mut segments, path, owner.cluster.groups())?;
    Ok((Disk { database, segments }, recovered))
}

fn open_file(path: &Path) -> Result<Database, redb::DatabaseError> {
    Database::builder().set_cache_size(CACHE_BYTES).create(path)
}

/// Makes an empty log under another name first: a process killed meanwhile leaves no log, not half of one.
fn make(path: &Path, owner: &Owner) -> Result<(), LogError> {
    let failed = |source| LogError::Io { path: path.to_owned(), source };
    let new = path.with_file_name(NEW_FILE);
    let database = match open_file(&new) {
        Err(redb::DatabaseError::DatabaseAlreadyOpen) => {
            return Err(LogError::InUse { path: path.to_owned() });
        }
        // What a killed process left; nothing was ever acknowledged from it.
        Err(_) if new.exists() => {
            std::fs::remove_file(&new).map_err(failed)?;
            open_file(&new)
        }
        opened => opened,
    };
    let database = database.map_err(|error| open_error(path, error))?;
    claim(&database, path, owner)?;
    drop(database);
    std::fs::rename(&new, path).map_err(failed)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
}

fn open_error(path: &Path, error: redb::DatabaseError) -> LogError {
    use redb::{DatabaseError, StorageError};
    match error {
        DatabaseError::DatabaseAlreadyOpen => LogError::InUse { path: path.to_owned() },
        DatabaseError::Storage(StorageError::Io(source)) if source.kind() == io::ErrorKind::InvalidData => {
            corrupt(path, format!("it is no log file ({source})"))
        }
        DatabaseError::Storage(StorageError::Io(source)) => LogError::Io { path: path.to_owned(), source },
        other => corrupt(path, other.to_string()),
    }
}

/// Writes format and owner into a new file; compares them in an old one.
fn claim(database: &Database, path: &Path, owner: &Owner) -> Result<(), LogError> {
    let damaged = |error: &dyn std::fmt::Display| corrupt(path, error.to_string());
    let transaction = database.begin_write().map_err(|error| damaged(&error))?;
    {
        let entries = transaction.open_table(ENTRIES).map_err(|error| damaged(&error))?;
        let mut meta = transaction.open_table(META).map_err(|error| damaged(&error))?;
        let format: Option<u64> = get_meta(&meta, path, KEY_FORMAT)?;
        match format {
            None if entries.iter().is_ok_and(|mut all| all.next().is_none()) => {
                put_owner(&mut meta, owner).map_err(|error| damaged(&error))?;
            }
            None => return Err(corrupt(path, "record \"format\" is missing")),
            Some(FORMAT) => check_owner(&meta, path, owner)?,
            Some(found) => return Err(LogError::Format { path: path.to_owned(), found }),
        }
    }
    transaction.commit().map_err(|error| LogError::Io { path: path.to_owned(), source: commit_error(error) })
}

fn put_owner(meta: &mut Meta<'_>, owner: &Owner) -> io::Result<()> {
    put_meta(meta, KEY_FORMAT, &FORMAT)?;
    put_meta(meta, KEY_ROUTER, &owner.router)?;
    put_meta(meta, KEY_CLUSTER, &owner.cluster.name)?;
    put_meta(meta, KEY_SHARDS, &owner.cluster.shards)
}

fn check_owner(meta: &Meta<'_>, path: &Path, owner: &Owner) -> Result<(), LogError> {
    let absent = |key: &str| corrupt(path, format!("record {key:?} is missing"));
    let router: u64 = get_meta(meta, path, KEY_ROUTER)?.ok_or_else(|| absent(KEY_ROUTER))?;
    let name: String = get_meta(meta, path, KEY_CLUSTER)?.ok_or_else(|| absent(KEY_CLUSTER))?;
    let shards: u16 = get_meta(meta, path, KEY_SHARDS)?.ok_or_else(|| absent(KEY_SHARDS))?;
    if router != owner.router {
        return Err(LogError::OtherRouter { path: path.to_owned(), found: router, wanted: owner.router });
    }
    if (&name, shards) != (&owner.cluster.name, owner.cluster.shards) {
        return Err(LogError::OtherCluster {
            path: path.to_owned(),
            found: name,
            found_shards: shards,
            wanted: owner.cluster.name.clone(),
            wanted_shards: owner.cluster.shards,
        });
    }
    Ok(())
}

fn get_meta<T: DeserializeOwned>(
    meta: &impl ReadableTable<&'static str, &'static [u8]>,
    path: &Path,
    key: &str,
) -> Result<Option<T>, LogError> {
    let record = meta.get(key).map_err(|error| corrupt(path, format!("record {key:?}: {error}")))?;
    let Some(record) = record else { return Ok(None) };
    let value = unseal(key.as_bytes(), record.value());
    value.map(Some).map_err(|what| corrupt(path, format!("record {key:?} {what}")))
}

fn recover(
    database: &Database,
    segments: &mut Segments,
    path: &Path,
    groups: u16,
) -> Result<Vec<Recovered>, LogError> {
    let damaged = |error: &dyn std::fmt::Display| corrupt(path, error.to_string());
    let transaction = database.begin_read().map_err(|error| damaged(&error))?;
    let meta = transaction.open_table(META).map_err(|error| damaged(&error))?;
    let table = transaction.open_table(ENTRIES).map_err(|error| damaged(&error))?;
    (0..groups).map(|group| recover_group(&meta, &table, segments, path, group)).collect()
}

fn recover_group(
    meta: &impl ReadableTable<&'static str, &'static [u8]>,
    table: &impl ReadableTable<u64, &'static [u8]>,
    segments: &mut Segments,
    path: &Path,
    group: u16,
) -> Result<Recovered, LogError> {
    let damaged = |error: &dyn std::fmt::Display| corrupt(path, error.to_string());
    let committed: Option<Option<LogId>> = get_meta(meta, path, &key_of(group, KEY_COMMITTED))?;
    let last: Option<Option<u64>> = get_meta(meta, path, &key_of(group, KEY_LAST))?;
    let mut recovered = Recovered {
        vote: get_meta(meta, path, &key_of(group, KEY_VOTE))?,
        purged: get_meta(meta, path, &key_of(group, KEY_PURGED))?,
        committed: committed.flatten(),
        entries: VecDeque::new(),
    };
    let rows = table.range(place(group, 0)..place(group + 1, 0)).map_err(|error| damaged(&error))?;
    for row in rows {
        let (key, record) = row.map_err(|error| damaged(&error))?;
        recovered.entries.push_back(checked_entry(segments, path, group, key.value(), record.value())?);
    }
    check_bounds(path, group, &recovered, last.flatten())?;
    Ok(recovered)
}

fn checked_entry(
    segments: &mut Segments,
    path: &Path,
    group: u16,
    place: u64,
    record: &[u8],
) -> Result<Entry, LogError> {
    let index = place & INDEX_MAX;
    let damaged = |what| corrupt(path, format!("the record of entry {index} of group {group} {what}"));
    let entry = match unseal(&place.to_le_bytes(), record).map_err(damaged)? {
        OwnedRecord::Whole(entry) => entry,
        OwnedRecord::Beside(log_id, extent) => {
            let command = segments.read(extent);
            let damaged =
                |what| corrupt(path, format!("the command of entry {index} of group {group} {what}"));
            Entry { log_id, payload: Payload::Normal(Proposal(command.map_err(damaged)?)) }
        }
    };
    if entry.log_id.index() != index {
        return Err(damaged(format!("holds entry {}", entry.log_id.index())));
    }
    Ok(entry)
}

/// No hole after the purged entry, and the last entry is the one the file says it is.
fn check_bounds(path: &Path, group: u16, recovered: &Recovered, last: Option<u64>) -> Result<(), LogError> {
    let mut expected = recovered.purged.map_or(0, |purged| purged.index() + 1);
    for entry in &recovered.entries {
        if entry.log_id.index() != expected {
            return Err(corrupt(path, format!("entry {expected} of group {group} is missing")));
        }
        expected += 1;
    }
    match last {
        Some(last) if last >= expected => {
            Err(corrupt(path, format!("entries {expected} to {last} of group {group} are missing")))
        }
        _ => Ok(()),
    }
}
