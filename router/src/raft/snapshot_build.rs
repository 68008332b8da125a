//! Writes a snapshot of the published index to a file.
//!
//! The index continues to change: old contents are kept until they are read here
//! (`kv_core::index`). The lock is held for one chunk at a time and never during a write. Entries
//! and readers wait at most for the encoding of one chunk, and a slow disk costs memory but no
//! time. Not here: the file (`snapshot_file.rs`), and its further use (`state_machine.rs`).

use std::io;

use kv_core::index::SnapshotCursor;

use super::SnapshotMeta;
use super::snapshot_file::SnapshotWriter;
use crate::view::published::{PublishedReplica, Replica};

/// A snapshot in progress. Its drop releases the contents kept for it.
pub(super) struct SnapshotBuild<'a> {
    published: &'a PublishedReplica,
    cursor: SnapshotCursor,
}

impl SnapshotBuild<'_> {
    /// Starts a snapshot between two entries, and runs `look` at the same state. An earlier one of
    /// the same index ends.
    pub(super) fn begin<T>(
        published: &PublishedReplica,
        look: impl FnOnce(&Replica) -> T,
    ) -> (SnapshotBuild<'_>, SnapshotMeta, T) {
        let pause = published.pause();
        // Nodes and pins may be many: they are copied while readers continue.
        let (cursor, meta, seen) = pause.read(|replica| {
            let meta =
                SnapshotMeta { last_log_id: replica.applied, last_membership: replica.membership.clone() };
            (replica.index.prepare_snapshot(), meta, look(replica))
        });
        pause.modify(|replica| replica.index.begin_snapshot(&cursor));
        (SnapshotBuild { published, cursor }, meta, seen)
    }

    /// Writes the whole snapshot. Returns false if the index was replaced meanwhile, so that the
    /// output is useless. Blocking.
    pub(super) fn write(mut self, writer: &mut SnapshotWriter) -> io::Result<bool> {
        writer.chunk(&self.cursor.header())?;
        while !self.cursor.is_fully_read() {
            let chunk = self.published.read().index.snapshot_chunk(&mut self.cursor);
            let Ok(chunk) = chunk else { return Ok(false) };
            chunk.map(|chunk| writer.chunk(&chunk)).transpose()?;
        }
        writer.chunk(&self.cursor.end())?;
        Ok(true)
    }
}

impl Drop for SnapshotBuild<'_> {
    fn drop(&mut self) {
        // Freed outside the pause, since it takes a while.
        let images = self.published.pause().modify(|replica| replica.index.end_snapshot(&self.cursor));
        drop(images);
    }
}
