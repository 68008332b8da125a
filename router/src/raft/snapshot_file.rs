//! The snapshot of a group on disk: one file, written and read in chunks, replaced as a whole.
//!
//! Layout, little endian:
//! - magic (8 bytes), version (u32), format of the chunks (u32), length of the head (u32).
//! - CRC32C of everything before it and of the head (u32).
//! - Head (MessagePack of the snapshot's meta).
//! - Each chunk of the index (`kv_core::index`) after its length (u32).
//!
//! Every chunk has its own checksum, and the last one is marked as the last. The file is written to
//! a temporary name, synced and renamed, and then the directory is synced. So a crash leaves the
//! old or the new file, and temporaries are removed at start. Not here: handling of a file that
//! fails its check (`recover.rs`), and the state machine.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, BytesMut};
use kv_core::index::{SNAPSHOT_CHUNK_BYTES, SNAPSHOT_FORMAT, check_snapshot_format};

use super::SnapshotMeta;

/// Path of a group's snapshot inside the data directory.
pub(crate) fn path_of(directory: &Path, group: u16) -> PathBuf {
    directory.join(format!("snapshot-{group}.kvf"))
}

/// Suffix of a file that is being written.
const TEMPORARY: &str = ".new";

const MAGIC: [u8; 8] = *b"KVFSNAP\n";
const VERSION: u32 = 2;
const FIXED_BYTES: usize = 24;
const CRC_AT: usize = 20;

/// Longest head: a membership of thousands of routers.
const HEAD_BYTES_MAX: u32 = 16 << 20;

/// Longest chunk. Runs end a chunk at 64 KiB, and indivisible parts stay below this: all nodes and
/// pins at the limits of an index, or one run with thousands of fragmented holders. It bounds the
/// cost of a forged length.
pub(crate) const CHUNK_BYTES_MAX: u32 = 256 << 20;

/// Bytes of one read.
const READ_BYTES: usize = 8 * SNAPSHOT_CHUNK_BYTES;

/// Unsynced bytes after which a file is synced, so that the final sync is short.
const SYNC_BYTES: u64 = 32 << 20;

/// Error of the snapshot on disk.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// The bytes differ from those that were written.
    #[error(
        "snapshot {path} is corrupted: {what}. This router refuses to start: it is the only voter, and no \
         other router has its contents. Restore its data directory from a copy, or start a new cluster with \
         an empty one",
        path = path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// The problem.
        what: String,
    },
    /// A file system error.
    #[error(
        "snapshot {path} cannot be read or written: {source}; check the disk and the permissions",
        path = path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
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

/// Renames an unusable file, so that a person can inspect it; returns its new name.
///
/// # Errors
/// The file system's error.
pub(crate) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let name = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".set-aside-{number}"));
        PathBuf::from(name)
    };
    let free = (1..).map(name).find(|name| !name.exists());
    let free = free.ok_or_else(|| io::Error::other("every name is taken"))?;
    fs::rename(path, &free)?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(free)
}

/// Removes partial files of a killed process. They were never acknowledged.
///
/// # Errors
/// The file system's error.
pub(crate) fn remove_temporaries(directory: &Path) -> io::Result<()> {
    for file in fs::read_dir(directory)? {
        let file = file?;
        let name = file.file_name();
        let is_ours = |name: &str| name.starts_with("snapshot-") && name.ends_with(TEMPORARY);
        if name.to_str().is_some_and(is_ours) {
            fs::remove_file(file.path())?;
        }
    }
    Ok(())
}

/// A file that is being written; removed unless it becomes the snapshot.
#[derive(Debug)]
pub(crate) struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // It may have been renamed; a leftover is removed at the next start.
        drop(fs::remove_file(&self.0));
    }
}

/// A snapshot file that is being written.
pub(crate) struct SnapshotWriter {
    temporary: TemporaryFile,
    file: File,
    meta: SnapshotMeta,
    data_at: u64,
    bytes: u64,
    unsynced: u64,
}

impl SnapshotWriter {
    /// Starts a file of a group; `number` distinguishes concurrent files of one group. Blocking.
    pub(crate) fn new(
        directory: &Path,
        group: u16,
        number: u64,
        meta: SnapshotMeta,
    ) -> io::Result<SnapshotWriter> {
        let path = directory.join(format!("snapshot-{group}.kvf.{number}{TEMPORARY}"));
        let head = rmp_serde::to_vec_named(&meta).map_err(io::Error::other)?;
        let mut start = Vec::with_capacity(FIXED_BYTES + head.len());
        start.extend_from_slice(&MAGIC);
        start.extend_from_slice(&VERSION.to_le_bytes());
        start.extend_from_slice(&SNAPSHOT_FORMAT.to_le_bytes());
        start.extend_from_slice(&u32::try_from(head.len()).map_err(io::Error::other)?.to_le_bytes());
        let crc = checksum(&start, &head);
        start.extend_from_slice(&crc.to_le_bytes());
        start.extend_from_slice(&head);
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        let temporary = TemporaryFile(path);
        file.write_all(&start)?;
        Ok(SnapshotWriter { temporary, file, meta, data_at: start.len() as u64, bytes: 0, unsynced: 0 })
    }

    /// Appends a chunk. Blocking.
    pub(crate) fn chunk(&mut self, chunk: &[u8]) -> io::Result<()> {
        let length = u32::try_from(chunk.len()).map_err(io::Error::other)?;
        self.file.write_all(&length.to_le_bytes())?;
        self.file.write_all(chunk)?;
        let bytes = u64::from(length) + 4;
        self.bytes += bytes;
        self.unsynced += bytes;
        if self.unsynced >= SYNC_BYTES {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }

    /// Makes everything durable except the name. Blocking.
    pub(crate) fn finish(self) -> io::Result<FinishedSnapshot> {
        self.file.sync_all()?;
        let SnapshotWriter { temporary, file, meta, data_at, bytes, .. } = self;
        Ok(FinishedSnapshot {
            temporary,
            stored: SnapshotFile { file, meta, data_at, bytes, is_damaged: AtomicBool::new(false) },
        })
    }
}

/// A complete snapshot file under its temporary name.
#[derive(Debug)]
pub(crate) struct FinishedSnapshot {
    temporary: TemporaryFile,
    pub(crate) stored: SnapshotFile,
}

impl FinishedSnapshot {
    /// Renames the file over the current snapshot. Blocking.
    pub(crate) fn publish(self, directory: &Path, group: u16) -> io::Result<SnapshotFile> {
        fs::rename(&self.temporary.0, path_of(directory, group))?;
        File::open(directory)?.sync_all()?;
        Ok(self.stored)
    }
}

/// An open snapshot file. It stays readable after another one takes its name.
#[derive(Debug)]
pub(crate) struct SnapshotFile {
    file: File,
    pub(crate) meta: SnapshotMeta,
    data_at: u64,
    /// Bytes of all chunks with their lengths.
    pub(crate) bytes: u64,
    is_damaged: AtomicBool,
}

impl SnapshotFile {
    /// Opens a group's snapshot and checks its head; `None` if there is none. Blocking.
    pub(crate) fn open(directory: &Path, group: u16) -> Result<Option<SnapshotFile>, SnapshotFileError> {
        let path = path_of(directory, group);
        let opened = File::open(&path).and_then(|file| {
            let bytes = file.metadata()?.len();
            Ok((read_head(&file)?, file, bytes))
        });
        match opened {
            Ok((Ok((meta, data_at)), file, bytes)) => {
                let is_damaged = AtomicBool::new(false);
                Ok(Some(SnapshotFile {
                    file,
                    meta,
                    data_at,
                    bytes: bytes.saturating_sub(data_at),
                    is_damaged,
                }))
            }
            Ok((Err(what), ..)) => Err(SnapshotFileError::Corrupt { path, what }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(SnapshotFileError::Io { path, source }),
        }
    }

    /// The chunks in order, unchecked: the caller checks them. Blocking.
    pub(crate) fn chunks(&self) -> SnapshotChunks<'_> {
        SnapshotChunks {
            stored: self,
            at: 0,
            frames: ChunkDecoder::default(),
            read: vec![0; READ_BYTES],
            has_failed: false,
        }
    }

    /// Records that a chunk did not match its checksum, so that the file is not sent again.
    pub(crate) fn mark_damaged(&self) {
        self.is_damaged.store(true, Ordering::Relaxed);
    }

    /// Whether the file was found damaged.
    pub(crate) fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Relaxed)
    }
}

/// Meta of the file and the offset of its chunks, or the problem.
fn read_head(file: &File) -> io::Result<Result<(SnapshotMeta, u64), String>> {
    let mut fixed = Vec::new();
    file.take(FIXED_BYTES as u64).read_to_end(&mut fixed)?;
    let Some((fixed, _)) = fixed.split_first_chunk::<FIXED_BYTES>() else {
        return Ok(Err(format!("{} bytes, shorter than its header", fixed.len())));
    };
    if fixed[..8] != MAGIC {
        return Ok(Err("it does not start with the magic of a snapshot".into()));
    }
    let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    if word(8) != VERSION {
        return Ok(Err(format!("version {}, this release reads {VERSION}", word(8))));
    }
    if let Err(error) = check_snapshot_format(word(12)) {
        return Ok(Err(error.to_string()));
    }
    let head_bytes = word(16);
    let mut head = Vec::new();
    file.take(head_bytes.min(HEAD_BYTES_MAX).into()).read_to_end(&mut head)?;
    let (stored, computed) = (word(CRC_AT), checksum(&fixed[..CRC_AT], &head));
    if stored != computed {
        return Ok(Err(format!("its head has checksum {stored:08x}, its bytes give {computed:08x}")));
    }
    let meta = rmp_serde::from_slice(&head).map_err(|error| format!("its head does not decode: {error}"));
    Ok(meta.map(|meta| (meta, FIXED_BYTES as u64 + u64::from(head_bytes))))
}

fn checksum(fixed: &[u8], head: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(fixed), head)
}

/// Cuts chunks out of bytes that arrive in pieces.
#[derive(Debug, Default)]
pub(crate) struct ChunkDecoder {
    pending: BytesMut,
}

impl ChunkDecoder {
    /// Adds bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next complete chunk; an error for an invalid length.
    pub(crate) fn next(&mut self) -> Result<Option<BytesMut>, String> {
        let Some(length) = self.pending.first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length);
        if length > CHUNK_BYTES_MAX {
            return Err(format!("a chunk claims {length} bytes, at most {CHUNK_BYTES_MAX} are valid"));
        }
        if self.pending.len() < length as usize + 4 {
            return Ok(None);
        }
        self.pending.advance(4);
        Ok(Some(self.pending.split_to(length as usize)))
    }

    /// Bytes of an incomplete chunk.
    pub(crate) fn pending_bytes(&self) -> usize {
        self.pending.len()
    }
}

/// Error of reading a chunk.
#[derive(Debug)]
pub(crate) enum ChunkError {
    /// Its bytes are cut wrong.
    Damaged(String),
    /// A file system error.
    Io(io::Error),
}

/// The chunks of a file.
pub(crate) struct SnapshotChunks<'a> {
    stored: &'a SnapshotFile,
    at: u64,
    frames: ChunkDecoder,
    read: Vec<u8>,
    has_failed: bool,
}

impl SnapshotChunks<'_> {
    fn read(&mut self) -> Result<Option<BytesMut>, ChunkError> {
        loop {
            if let Some(chunk) = self.frames.next().map_err(ChunkError::Damaged)? {
                return Ok(Some(chunk));
            }
            let read = self.stored.file.read_at(&mut self.read, self.stored.data_at + self.at);
            match read.map_err(ChunkError::Io)? {
                0 if self.frames.pending_bytes() == 0 => return Ok(None),
                0 => {
                    let left = self.frames.pending_bytes();
                    return Err(ChunkError::Damaged(format!("it ends {left} bytes into a chunk")));
                }
                read => {
                    self.at += read as u64;
                    self.frames.push(&self.read[..read]);
                }
            }
        }
    }
}

impl Iterator for SnapshotChunks<'_> {
    type Item = Result<BytesMut, ChunkError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let chunk = self.read();
        self.has_failed = chunk.is_err();
        chunk.transpose()
    }
}
