//! Groups without a vote of this router, because it lost acknowledged entries.
//!
//! A voter that lost such entries could help elect a leader without them. So the loss is recorded
//! on disk before any other step. Until it is repaired the router follows, takes entries and
//! snapshots of the leader, and neither votes nor stands for election (docs/adr/0019). Not here:
//! detection of a loss (`recover.rs`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::LogId;
use super::handle::Consensus;
use super::log::LogError;

/// Name of the file inside the data directory.
pub(crate) const WITHHELD_FILE: &str = "withheld-votes";

/// Withheld groups, in memory and on disk: each with the last entry of its lost log.
#[derive(Debug)]
pub(crate) struct WithheldVotes {
    directory: PathBuf,
    groups: Mutex<BTreeMap<u16, LogId>>,
}

impl WithheldVotes {
    /// Reads the recorded groups. Blocking.
    ///
    /// # Errors
    /// [`LogError`] if the file is unreadable: the promises are then unknown.
    pub(crate) fn open(directory: &Path) -> Result<WithheldVotes, LogError> {
        let path = directory.join(WITHHELD_FILE);
        let groups = match fs::read(&path) {
            Ok(bytes) => match parse(&bytes) {
                Some(groups) => groups,
                None => return Err(LogError::Corrupt { path, what: "its checksum does not match".into() }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(source) => return Err(LogError::Io { path, source }),
        };
        Ok(WithheldVotes { directory: directory.to_owned(), groups: Mutex::new(groups) })
    }

    /// Whether the router gives no vote in a group.
    pub(crate) fn is_withheld(&self, group: u16) -> bool {
        self.groups.lock().contains_key(&group)
    }

    /// The entry that the router must have again before it votes in a group.
    pub(crate) fn until(&self, group: u16) -> Option<LogId> {
        self.groups.lock().get(&group).copied()
    }

    /// Records that a group's log up to an entry is lost; of two losses the longer log counts.
    /// Blocking, durable on return.
    pub(crate) fn withhold(&self, group: u16, last: LogId) -> io::Result<()> {
        self.change(|groups| {
            let until = groups.entry(group).or_insert(last);
            *until = last.max(*until);
        })
    }

    /// Releases a group after its loss was repaired. Blocking, durable on return.
    pub(crate) fn release(&self, group: u16) -> io::Result<()> {
        self.change(|groups| {
            groups.remove(&group);
        })
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<u16, LogId>)) -> io::Result<()> {
        let mut groups = self.groups.lock();
        let mut changed = groups.clone();
        change(&mut changed);
        self.write(&changed)?;
        *groups = changed;
        Ok(())
    }

    fn write(&self, groups: &BTreeMap<u16, LogId>) -> io::Result<()> {
        let payload = rmp_serde::to_vec_named(groups).map_err(io::Error::other)?;
        let path = self.directory.join(WITHHELD_FILE);
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&crc32c::crc32c(&payload).to_le_bytes())?;
        file.write_all(&payload)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(&self.directory)?.sync_all()
    }
}

fn parse(bytes: &[u8]) -> Option<BTreeMap<u16, LogId>> {
    let (crc, payload) = bytes.split_first_chunk()?;
    let is_sound = crc32c::crc32c(payload) == u32::from_le_bytes(*crc);
    is_sound.then(|| rmp_serde::from_slice(payload).ok()).flatten()
}

/// Releases a group once a snapshot on this router's disk covers the lost log.
pub(crate) async fn watch(withheld: Arc<WithheldVotes>, consensus: Consensus) {
    let group = consensus.group();
    let Some(until) = withheld.until(group) else { return };
    if !consensus.wait_snapshot_covers(until).await {
        return;
    }
    let made_good = tokio::task::spawn_blocking(move || withheld.release(group)).await;
    match made_good.unwrap_or_else(|error| Err(io::Error::other(error))) {
        Ok(()) => {
            consensus.raft().runtime_config().elect(true);
            tracing::info!(
                group,
                "this router has recovered its lost entries of the group, and votes in it again"
            );
        }
        Err(error) => {
            tracing::error!(group, %error, "this router gives no vote in the group until it is restarted");
        }
    }
}
