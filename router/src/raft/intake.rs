//! A snapshot that comes in: each chunk is checked and restored as it arrives, and written down beside.
//!
//! So an install costs one pass over the bytes, and the first wrong chunk ends it. Memory: the index that is being
//! restored, one chunk, and what the caller queues. Not here: the stream (`service.rs`) and the swap
//! (`state_machine.rs`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use kv_core::index::{Index, IndexLimits, Restore};

use super::SnapshotMeta;
use super::snapshot_file::{ChunkError, Frames, Stored, Writer, Written};

/// Chunks that wait for the disk while the index is being restored from later ones.
const CHUNKS_WAITING_MAX: usize = 32;

/// Why an incoming snapshot is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IntakeError {
    /// Its bytes are wrong.
    #[error("the snapshot of group {group} is refused at chunk {chunk}: {what}; it must be sent again")]
    Damaged {
        /// The group.
        group: u16,
        /// Which chunk, counted from 0.
        chunk: u64,
        /// What is wrong.
        what: String,
    },
    /// Its end is missing.
    #[error(
        "the snapshot of group {group} ended within or after chunk {chunk}, before its end: it must be sent again"
    )]
    Cut {
        /// The group.
        group: u16,
        /// Which chunk, counted from 0.
        chunk: u64,
    },
    /// It cannot be written down.
    #[error(
        "the snapshot of group {group} cannot be written down: {source}; make room or check the disk, it is sent again"
    )]
    Disk {
        /// The group.
        group: u16,
        /// What the system said.
        source: io::Error,
    },
}

/// Where snapshots of one group come in. Clones share the numbers of their files.
#[derive(Clone)]
pub(crate) struct Intake {
    pub(crate) directory: Arc<Path>,
    pub(crate) group: u16,
    limits: IndexLimits,
    files: Arc<AtomicU64>,
}

impl Intake {
    pub(crate) fn new(directory: &Path, group: u16, limits: IndexLimits) -> Intake {
        Intake { directory: Arc::from(directory), group, limits, files: Arc::default() }
    }

    /// What the index of the group may hold.
    pub(crate) fn limits(&self) -> IndexLimits {
        self.limits
    }

    /// A new file of the group. Blocking.
    pub(crate) fn writer(&self, meta: SnapshotMeta) -> io::Result<Writer> {
        let number = self.files.fetch_add(1, Ordering::Relaxed);
        Writer::new(&self.directory, self.group, number, meta)
    }

    /// Begins to take a snapshot in. Blocking, like all of it.
    pub(crate) fn begin(&self, meta: SnapshotMeta) -> Result<Incoming, IntakeError> {
        let group = self.group;
        let writing = self.writer(meta).and_then(Writing::start);
        let writing = writing.map_err(|source| IntakeError::Disk { group, source })?;
        Ok(Incoming {
            group,
            chunks: 0,
            frames: Frames::default(),
            restore: Restore::new(self.limits),
            writing,
        })
    }

    /// Reads the index of a file, checking every chunk. Blocking.
    pub(crate) fn restore(&self, stored: &Stored) -> Result<Index, ChunkError> {
        let mut restore = Restore::new(self.limits);
        for chunk in stored.chunks() {
            restore.push(&chunk?).map_err(|error| ChunkError::Damaged(error.to_string()))?;
        }
        restore.finish().map_err(|error| ChunkError::Damaged(error.to_string()))
    }
}

/// A snapshot that is coming in.
pub(crate) struct Incoming {
    group: u16,
    chunks: u64,
    frames: Frames,
    restore: Restore,
    writing: Writing,
}

impl Incoming {
    /// Takes the next bytes: every chunk that is whole with them is checked, restored and written down.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), IntakeError> {
        self.frames.push(bytes);
        while let Some(chunk) = self.frames.next().map_err(|what| self.damaged(what))? {
            self.chunk(chunk.freeze())?;
        }
        Ok(())
    }

    /// Takes a whole chunk.
    pub(crate) fn chunk(&mut self, chunk: Bytes) -> Result<(), IntakeError> {
        self.restore.push(&chunk).map_err(|error| self.damaged(error.to_string()))?;
        self.chunks += 1;
        self.writing.chunk(chunk).map_err(|source| IntakeError::Disk { group: self.group, source })
    }

    /// The snapshot, once every byte was given; durable, but not yet under its name.
    pub(crate) fn finish(self) -> Result<Received, IntakeError> {
        let Incoming { group, chunks: chunk, frames, restore, writing } = self;
        if frames.left() > 0 {
            return Err(IntakeError::Cut { group, chunk });
        }
        let index = restore.finish().map_err(|_| IntakeError::Cut { group, chunk })?;
        let written = writing.finish().map_err(|source| IntakeError::Disk { group, source })?;
        Ok(Received { index, written })
    }

    fn damaged(&self, what: String) -> IntakeError {
        IntakeError::Damaged { group: self.group, chunk: self.chunks, what }
    }
}

/// A snapshot that came in whole.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) index: Index,
    pub(crate) written: Written,
}

/// The thread that writes the file, so that the disk and the processor work at the same time. When this is dropped
/// before the end, the thread is gone and its file with it.
struct Writing {
    /// Chunks, and nothing for the end.
    chunks: Option<SyncSender<Option<Bytes>>>,
    thread: Option<JoinHandle<io::Result<Written>>>,
}

impl Writing {
    fn start(writer: Writer) -> io::Result<Writing> {
        let (chunks, waiting) = sync_channel(CHUNKS_WAITING_MAX);
        let write = move || write(writer, &waiting);
        let thread = thread::Builder::new().name("snapshot-file".into()).spawn(write)?;
        Ok(Writing { chunks: Some(chunks), thread: Some(thread) })
    }

    fn chunk(&mut self, chunk: Bytes) -> io::Result<()> {
        self.send(Some(chunk))
    }

    fn finish(mut self) -> io::Result<Written> {
        self.send(None)?;
        self.join()
    }

    fn send(&mut self, chunk: Option<Bytes>) -> io::Result<()> {
        let sent = self.chunks.as_ref().is_some_and(|chunks| chunks.send(chunk).is_ok());
        // It takes no more because it failed, and says why.
        if sent { Ok(()) } else { self.join().map(drop) }
    }

    fn join(&mut self) -> io::Result<Written> {
        self.chunks = None;
        let thread = self.thread.take().ok_or_else(|| io::Error::other("writing failed before"))?;
        thread.join().map_err(|_| io::Error::other("the thread that writes it panicked"))?
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        drop(self.join());
    }
}

fn write(mut writer: Writer, chunks: &Receiver<Option<Bytes>>) -> io::Result<Written> {
    loop {
        match chunks.recv() {
            Ok(Some(chunk)) => writer.chunk(&chunk)?,
            Ok(None) => return writer.finish(),
            Err(_) => return Err(io::Error::other("it was given up")),
        }
    }
}
