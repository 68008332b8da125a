//! The snapshot of a group on disk: one file, checksummed, replaced as a whole.
//!
//! Layout, little endian: magic (8 bytes), version (u32), length of the head (u32), length of the data
//! (u64), CRC32C of everything before it and after it (u32), head (MessagePack of the snapshot's meta),
//! data (`kv_core::index` bytes). Written to a temporary name, synced, renamed, directory synced: a
//! crash leaves the old one or the new one. A file that fails its check is refused and named, never
//! served and never skipped: without it the purged part of the log is gone.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::{Snapshot, SnapshotMeta};

/// Path of a group's snapshot inside the data directory.
pub(crate) fn path_of(directory: &Path, group: u16) -> PathBuf {
    directory.join(format!("snapshot-{group}.kvf"))
}

const MAGIC: [u8; 8] = *b"KVFSNAP\n";
const VERSION: u32 = 1;
const FIXED_BYTES: usize = 28;
const CRC_AT: usize = 24;

/// Why the snapshot on disk is not served.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// The bytes are not those that were written.
    #[error(
        "snapshot {path} is corrupted: {what}. This router refuses to start from it. Move the router's data directory \
         to quarantine (for example {quarantine}), and start it with an empty one: a healthy majority sends a new snapshot"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// Where the directory could be moved.
        quarantine: PathBuf,
    },
    /// The file system refused.
    #[error("snapshot {path} cannot be read or written: {source}; check the disk and the permissions")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl From<SnapshotFileError> for io::Error {
    fn from(error: SnapshotFileError) -> io::Error {
        match error {
            SnapshotFileError::Io { path, source } => {
                io::Error::new(source.kind(), format!("snapshot {}: {source}", path.display()))
            }
            corrupt @ SnapshotFileError::Corrupt { .. } => {
                io::Error::new(io::ErrorKind::InvalidData, corrupt)
            }
        }
    }
}

/// Writes `snapshot` as the current one. Blocking.
pub(crate) fn write(directory: &Path, group: u16, snapshot: &Snapshot) -> Result<(), SnapshotFileError> {
    let path = path_of(directory, group);
    let temporary = path.with_extension("kvf.new");
    replace(directory, (&temporary, &path), snapshot)
        .map_err(|source| SnapshotFileError::Io { path: temporary, source })
}

fn replace(directory: &Path, (temporary, path): (&Path, &Path), snapshot: &Snapshot) -> io::Result<()> {
    let head = rmp_serde::to_vec_named(&snapshot.meta).map_err(io::Error::other)?;
    let head_bytes = u32::try_from(head.len()).map_err(io::Error::other)?;
    let mut fixed = Vec::with_capacity(FIXED_BYTES);
    fixed.extend_from_slice(&MAGIC);
    fixed.extend_from_slice(&VERSION.to_le_bytes());
    fixed.extend_from_slice(&head_bytes.to_le_bytes());
    fixed.extend_from_slice(&(snapshot.snapshot.len() as u64).to_le_bytes());
    let crc = checksum(&fixed, &head, &snapshot.snapshot);
    fixed.extend_from_slice(&crc.to_le_bytes());
    let mut file = File::create(temporary)?;
    file.write_all(&fixed)?;
    file.write_all(&head)?;
    file.write_all(&snapshot.snapshot)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    File::open(directory)?.sync_all()
}

fn checksum(fixed: &[u8], head: &[u8], data: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(fixed), head), data)
}

/// Reads and checks the current snapshot; `None` when there is none. Blocking.
pub(crate) fn read(directory: &Path, group: u16) -> Result<Option<Snapshot>, SnapshotFileError> {
    let path = path_of(directory, group);
    let mut bytes = Vec::new();
    match File::open(&path).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(SnapshotFileError::Io { path, source }),
    }
    parse(&Bytes::from(bytes)).map(Some).map_err(|what| corrupt(directory, group, what))
}

/// The refusal for the snapshot in `directory`, with `what` is wrong.
pub(crate) fn corrupt(directory: &Path, group: u16, what: impl Into<String>) -> SnapshotFileError {
    let quarantine = directory.with_extension("quarantine");
    SnapshotFileError::Corrupt { path: path_of(directory, group), what: what.into(), quarantine }
}

fn parse(bytes: &Bytes) -> Result<Snapshot, String> {
    let Some((fixed, rest)) = bytes.split_first_chunk::<FIXED_BYTES>() else {
        return Err(format!("{} bytes, shorter than its header", bytes.len()));
    };
    if fixed[..8] != MAGIC {
        return Err("it does not start with the magic of a snapshot".into());
    }
    let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    if word(8) != VERSION {
        return Err(format!("version {}, this release reads {VERSION}", word(8)));
    }
    let head_bytes = word(12) as usize;
    let data_bytes = u64::from(word(16)) | u64::from(word(20)) << 32;
    if (rest.len() as u64) != (head_bytes as u64).saturating_add(data_bytes) {
        return Err(format!("{} bytes after the header, {head_bytes} + {data_bytes} expected", rest.len()));
    }
    let (head, data) = rest.split_at(head_bytes);
    let (stored, computed) = (word(CRC_AT), checksum(&fixed[..CRC_AT], head, data));
    if stored != computed {
        return Err(format!("checksum {stored:08x}, its bytes give {computed:08x}"));
    }
    let meta: SnapshotMeta =
        rmp_serde::from_slice(head).map_err(|error| format!("its head does not decode: {error}"))?;
    Ok(Snapshot { meta, snapshot: bytes.slice(FIXED_BYTES + head_bytes..) })
}
