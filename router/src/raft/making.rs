//! A snapshot on its way from the published index into a file.
//!
//! The index goes on being written: what it was is kept until it was read here (`kv_core::index`). It is held for one
//! chunk at a time and never while one is written down, so entries and readers wait for the encoding of a chunk at most,
//! and a slow disk costs memory for what is kept and no time. Not here: the file (`snapshot_file.rs`), and what becomes
//! of it (`state_machine.rs`).

use std::io;

use kv_core::index::SnapshotCursor;

use super::SnapshotMeta;
use super::snapshot_file::Writer;
use crate::view::published::{Published, Replica};

/// A snapshot that is being made. When this is dropped the index keeps nothing for it any more.
pub(super) struct Making<'a> {
    published: &'a Published,
    cursor: SnapshotCursor,
}

impl Making<'_> {
    /// Begins one between two entries, and looks at what else must be of the same moment. An earlier one of the same
    /// index ends.
    pub(super) fn begin<T>(
        published: &Published,
        look: impl FnOnce(&Replica) -> T,
    ) -> (Making<'_>, SnapshotMeta, T) {
        let pause = published.pause();
        // Nodes and pins may be many: they are copied beside readers.
        let (cursor, meta, seen) = pause.look(|replica| {
            let meta =
                SnapshotMeta { last_log_id: replica.applied, last_membership: replica.membership.clone() };
            (replica.index.prepare_snapshot(), meta, look(replica))
        });
        pause.change(|replica| replica.index.begin_snapshot(&cursor));
        (Making { published, cursor }, meta, seen)
    }

    /// Writes all of it down. Answers false when the index was replaced meanwhile: what was written is of no use then.
    /// Blocking.
    pub(super) fn write(mut self, writer: &mut Writer) -> io::Result<bool> {
        writer.chunk(&self.cursor.head())?;
        while !self.cursor.is_read() {
            let chunk = self.published.read().index.snapshot_chunk(&mut self.cursor);
            let Ok(chunk) = chunk else { return Ok(false) };
            chunk.map(|chunk| writer.chunk(&chunk)).transpose()?;
        }
        writer.chunk(&self.cursor.end())?;
        Ok(true)
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        // Freeing them takes a while, and nobody need wait for it.
        let images = self.published.pause().change(|replica| replica.index.end_snapshot(&self.cursor));
        drop(images);
    }
}
