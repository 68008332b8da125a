//! Receives a snapshot: each chunk is checked, restored and written to a file on arrival.
//!
//! So an install costs one pass over the bytes, and the first wrong chunk ends it. Memory: the
//! restored index, one chunk, and the caller's queue. Not here: the stream (`service.rs`) and the
//! swap (`state_machine.rs`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use kv_core::index::{Index, IndexLimits, Restore};

use super::SnapshotMeta;
use super::snapshot_file::{ChunkDecoder, ChunkError, FinishedSnapshot, SnapshotFile, SnapshotWriter};

/// Chunks queued for the disk while the index is restored from later ones.
const CHUNKS_WAITING_MAX: usize = 32;

/// Error of an incoming snapshot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IntakeError {
    /// Its bytes are wrong.
    #[error("the snapshot of group {group} is refused at chunk {chunk}: {what}; it must be sent again")]
    Damaged {
        /// The group.
        group: u16,
        /// The chunk, counted from 0.
        chunk: u64,
        /// The problem.
        what: String,
    },
    /// Its end is missing.
    #[error(
        "the snapshot of group {group} ended within or after chunk {chunk}, before its end: it must be sent again"
    )]
    Cut {
        /// The group.
        group: u16,
        /// The chunk, counted from 0.
        chunk: u64,
    },
    /// It cannot be written to disk.
    #[error(
        "the snapshot of group {group} cannot be written to disk: {source}; make room or check the disk, it \
         is sent again"
    )]
    Disk {
        /// The group.
        group: u16,
        /// The operating system's error.
        source: io::Error,
    },
}

/// Receives snapshots of one group. Clones share the file numbers.
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

    /// Limits of the group's index.
    pub(crate) fn limits(&self) -> IndexLimits {
        self.limits
    }

    /// Creates a new file of the group. Blocking.
    pub(crate) fn writer(&self, meta: SnapshotMeta) -> io::Result<SnapshotWriter> {
        let number = self.files.fetch_add(1, Ordering::Relaxed);
        SnapshotWriter::new(&self.directory, self.group, number, meta)
    }

    /// Starts to receive a snapshot. Blocking, as are its methods.
    pub(crate) fn begin(&self, meta: SnapshotMeta) -> Result<IncomingSnapshot, IntakeError> {
        let group = self.group;
        let writing = self.writer(meta).and_then(FileWriterThread::start);
        let writing = writing.map_err(|source| IntakeError::Disk { group, source })?;
        Ok(IncomingSnapshot {
            group,
            chunks: 0,
            frames: ChunkDecoder::default(),
            restore: Restore::new(self.limits),
            writing,
        })
    }

    /// Reads the index of a file and checks every chunk. Blocking.
    pub(crate) fn restore(&self, stored: &SnapshotFile) -> Result<Index, ChunkError> {
        let mut restore = Restore::new(self.limits);
        for chunk in stored.chunks() {
            restore.push(&chunk?).map_err(|error| ChunkError::Damaged(error.to_string()))?;
        }
        restore.finish().map_err(|error| ChunkError::Damaged(error.to_string()))
    }
}

/// A snapshot that is being received.
pub(crate) struct IncomingSnapshot {
    group: u16,
    chunks: u64,
    frames: ChunkDecoder,
    restore: Restore,
    writing: FileWriterThread,
}

impl IncomingSnapshot {
    /// Takes the next bytes; every complete chunk is checked, restored and written.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), IntakeError> {
        self.frames.push(bytes);
        while let Some(chunk) = self.frames.next().map_err(|what| self.damaged(what))? {
            self.chunk(chunk.freeze())?;
        }
        Ok(())
    }

    /// Takes a complete chunk.
    pub(crate) fn chunk(&mut self, chunk: Bytes) -> Result<(), IntakeError> {
        self.restore.push(&chunk).map_err(|error| self.damaged(error.to_string()))?;
        self.chunks += 1;
        self.writing.chunk(chunk).map_err(|source| IntakeError::Disk { group: self.group, source })
    }

    /// The snapshot, once all bytes were given; durable, but still under its temporary name.
    pub(crate) fn finish(self) -> Result<ReceivedSnapshot, IntakeError> {
        let IncomingSnapshot { group, chunks: chunk, frames, restore, writing } = self;
        if frames.pending_bytes() > 0 {
            return Err(IntakeError::Cut { group, chunk });
        }
        let index = restore.finish().map_err(|_| IntakeError::Cut { group, chunk })?;
        let written = writing.finish().map_err(|source| IntakeError::Disk { group, source })?;
        Ok(ReceivedSnapshot { index, file: written })
    }

    fn damaged(&self, what: String) -> IntakeError {
        IntakeError::Damaged { group: self.group, chunk: self.chunks, what }
    }
}

/// A completely received snapshot.
#[derive(Debug)]
pub(crate) struct ReceivedSnapshot {
    pub(crate) index: Index,
    pub(crate) file: FinishedSnapshot,
}

/// The thread that writes the file, so that disk and processor work in parallel. If this is dropped
/// early, the thread ends and its file is removed.
struct FileWriterThread {
    /// Chunks, and `None` for the end.
    chunks: Option<SyncSender<Option<Bytes>>>,
    thread: Option<JoinHandle<io::Result<FinishedSnapshot>>>,
}

impl FileWriterThread {
    fn start(writer: SnapshotWriter) -> io::Result<FileWriterThread> {
        let (chunks, waiting) = sync_channel(CHUNKS_WAITING_MAX);
        let write = move || write(writer, &waiting);
        let thread = thread::Builder::new().name("snapshot-file".into()).spawn(write)?;
        Ok(FileWriterThread { chunks: Some(chunks), thread: Some(thread) })
    }

    fn chunk(&mut self, chunk: Bytes) -> io::Result<()> {
        self.send(Some(chunk))
    }

    fn finish(mut self) -> io::Result<FinishedSnapshot> {
        self.send(None)?;
        self.join()
    }

    fn send(&mut self, chunk: Option<Bytes>) -> io::Result<()> {
        let sent = self.chunks.as_ref().is_some_and(|chunks| chunks.send(chunk).is_ok());
        // The thread has failed; its result says why.
        if sent { Ok(()) } else { self.join().map(drop) }
    }

    fn join(&mut self) -> io::Result<FinishedSnapshot> {
        self.chunks = None;
        let thread = self.thread.take().ok_or_else(|| io::Error::other("writing failed before"))?;
        thread.join().map_err(|_| io::Error::other("the thread that writes it panicked"))?
    }
}

impl Drop for FileWriterThread {
    fn drop(&mut self) {
        drop(self.join());
    }
}

fn write(mut writer: SnapshotWriter, chunks: &Receiver<Option<Bytes>>) -> io::Result<FinishedSnapshot> {
    loop {
        match chunks.recv() {
            Ok(Some(chunk)) => writer.chunk(&chunk)?,
            Ok(None) => return writer.finish(),
            Err(_) => return Err(io::Error::other("it was given up")),
        }
    }
}
