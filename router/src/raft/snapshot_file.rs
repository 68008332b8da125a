//! The snapshot of a group on disk: one file, written and read chunk by chunk, replaced as a whole.
//!
//! Layout, little endian: magic (8 bytes), version (u32), format of the chunks (u32), length of the head
//! (u32), CRC32C of everything before it and of the head (u32), head (MessagePack of the snapshot's meta), then
//! each chunk of the index (`kv_core::index`) after its length (u32). Every chunk has its own checksum, and the
//! last one says that it is the last. Written to a temporary name, synced, renamed, directory synced: a crash
//! leaves the old one or the new one, and temporaries are removed at start. Not here: what is done about a file
//! that fails its check (`recover.rs`), and the state machine.

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

/// End of the name of a file that is being written.
const TEMPORARY: &str = ".new";

const MAGIC: [u8; 8] = *b"KVFSNAP\n";
const VERSION: u32 = 2;
const FIXED_BYTES: usize = 24;
const CRC_AT: usize = 20;

/// Longest head: a membership of thousands of routers.
const HEAD_BYTES_MAX: u32 = 16 << 20;

/// Longest chunk: runs end a chunk at 64 KiB, and what stands in one piece (all nodes and pins at the limits of
/// an index, one run that thousands hold in shreds) stays below this. It bounds what a forged length can cost.
pub(crate) const CHUNK_BYTES_MAX: u32 = 256 << 20;

/// Bytes read at once.
const READ_BYTES: usize = 8 * SNAPSHOT_CHUNK_BYTES;

/// Bytes after which a file that is being written is pushed to the disk, so that the sync at the end waits for
/// little.
const SYNC_BYTES: u64 = 32 << 20;

/// Why the snapshot on disk is not served.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// The bytes are not those that were written.
    #[error(
        "snapshot {path} is corrupted: {what}. This router refuses to start: it is the only voter, and nobody else has \
         what is in it. Restore its data directory from a copy, or start a new cluster with an empty one", path = path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file system refused.
    #[error("snapshot {path} cannot be read or written: {source}; check the disk and the permissions", path = path.display())]
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

/// Renames a file that is not to be used, so that somebody can look at it; gives its new name.
///
/// # Errors
/// What the file system says.
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

/// Removes what a killed process was writing. Nothing was ever acknowledged from it.
///
/// # Errors
/// What the file system says.
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

/// A file that is being written; it goes when nobody makes it the snapshot.
#[derive(Debug)]
pub(crate) struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // It may have been renamed; what stays is removed at the next start.
        drop(fs::remove_file(&self.0));
    }
}

/// A snapshot file that is being written.
pub(crate) struct Writer {
    temporary: Temporary,
    file: File,
    meta: SnapshotMeta,
    data_at: u64,
    bytes: u64,
    unsynced: u64,
}

impl Writer {
    /// Begins a file of a group; `number` tells files of one group apart that are written at once. Blocking.
    pub(crate) fn new(directory: &Path, group: u16, number: u64, meta: SnapshotMeta) -> io::Result<Writer> {
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
        let temporary = Temporary(path);
        file.write_all(&start)?;
        Ok(Writer { temporary, file, meta, data_at: start.len() as u64, bytes: 0, unsynced: 0 })
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

    /// Makes everything durable; only the name is missing. Blocking.
    pub(crate) fn finish(self) -> io::Result<Written> {
        self.file.sync_all()?;
        let Writer { temporary, file, meta, data_at, bytes, .. } = self;
        Ok(Written {
            temporary,
            stored: Stored { file, meta, data_at, bytes, is_damaged: AtomicBool::new(false) },
        })
    }
}

/// A whole snapshot file that still has its temporary name.
#[derive(Debug)]
pub(crate) struct Written {
    temporary: Temporary,
    pub(crate) stored: Stored,
}

impl Written {
    /// Gives the file its name, in place of the one that had it. Blocking.
    pub(crate) fn publish(self, directory: &Path, group: u16) -> io::Result<Stored> {
        fs::rename(&self.temporary.0, path_of(directory, group))?;
        File::open(directory)?.sync_all()?;
        Ok(self.stored)
    }
}

/// A snapshot file, open. It stays legible when another one has taken its name.
#[derive(Debug)]
pub(crate) struct Stored {
    file: File,
    pub(crate) meta: SnapshotMeta,
    data_at: u64,
    /// Bytes of all chunks with their lengths.
    pub(crate) bytes: u64,
    is_damaged: AtomicBool,
}

impl Stored {
    /// Opens a group's snapshot and checks its head; `None` when there is none. Blocking.
    pub(crate) fn open(directory: &Path, group: u16) -> Result<Option<Stored>, SnapshotFileError> {
        let path = path_of(directory, group);
        let opened = File::open(&path).and_then(|file| {
            let bytes = file.metadata()?.len();
            Ok((read_head(&file)?, file, bytes))
        });
        match opened {
            Ok((Ok((meta, data_at)), file, bytes)) => {
                let is_damaged = AtomicBool::new(false);
                Ok(Some(Stored { file, meta, data_at, bytes: bytes.saturating_sub(data_at), is_damaged }))
            }
            Ok((Err(what), ..)) => Err(SnapshotFileError::Corrupt { path, what }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(SnapshotFileError::Io { path, source }),
        }
    }

    /// The chunks in order, as they are on disk: whoever takes them checks them. Blocking.
    pub(crate) fn chunks(&self) -> Chunks<'_> {
        Chunks {
            stored: self,
            at: 0,
            frames: Frames::default(),
            read: vec![0; READ_BYTES],
            has_failed: false,
        }
    }

    /// Says that a chunk did not match its checksum: the file is not to be sent again.
    pub(crate) fn found_damaged(&self) {
        self.is_damaged.store(true, Ordering::Relaxed);
    }

    /// Whether somebody found it so.
    pub(crate) fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Relaxed)
    }
}

/// Meta of the file and where its chunks begin, or what is wrong.
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

/// Chunks cut out of bytes that come piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    pending: BytesMut,
}

impl Frames {
    /// Takes more bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next chunk that is there; an error for a length that no chunk has.
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

    /// Bytes that are no chunk yet.
    pub(crate) fn left(&self) -> usize {
        self.pending.len()
    }
}

/// Why the next chunk of a file cannot be had.
#[derive(Debug)]
pub(crate) enum ChunkError {
    /// Its bytes are cut wrong.
    Damaged(String),
    /// The file system refused.
    Io(io::Error),
}

/// The chunks of a file.
pub(crate) struct Chunks<'a> {
    stored: &'a Stored,
    at: u64,
    frames: Frames,
    read: Vec<u8>,
    has_failed: bool,
}

impl Chunks<'_> {
    fn read(&mut self) -> Result<Option<BytesMut>, ChunkError> {
        loop {
            if let Some(chunk) = self.frames.next().map_err(ChunkError::Damaged)? {
                return Ok(Some(chunk));
            }
            let read = self.stored.file.read_at(&mut self.read, self.stored.data_at + self.at);
            match read.map_err(ChunkError::Io)? {
                0 if self.frames.left() == 0 => return Ok(None),
                0 => {
                    let left = self.frames.left();
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

impl Iterator for Chunks<'_> {
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
