//! Writes the index as chunks of bytes while it keeps changing.
//!
//! [`Index::prepare_snapshot`] returns a cursor. From [`Index::begin_snapshot`] on, the first write
//! to a page or run saves its old contents (`images.rs`). [`Index::snapshot_chunk`] reads those, or
//! the live contents. So the index is locked for one chunk at a time, at the writer's pace.
//! [`Restore`](super::Restore) takes chunk after chunk: neither side holds a whole snapshot as bytes.
//!
//! A snapshot contains every run and page, also stale extents, tombstone pages and free numbers, so
//! a restored replica continues exactly like the writer. Only the table is rebuilt, and every count
//! and digest is recomputed, never trusted. Each chunk has a checksum and the last one the digest
//! of the state; a damaged chunk is refused whole. Not here: reading (`restore.rs`), files, and the
//! log position of a snapshot (the router keeps both).

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::Index;
use super::bytes::{CodecError, put_varint};
use super::codec::{put_pin, put_record};
use super::directives::Directives;
use super::images::Images;
use super::nodes::{NodeState, Nodes};
use super::pages::{PAGE_BLOCKS, Page, Pages};
use super::run::{Predecessor, PrefixRun};
use crate::id::PLACE_BYTES;

/// Chunk format that this release writes and reads; store it with the chunks. 9: block hashes of
/// nineteen bytes.
pub const SNAPSHOT_FORMAT: u32 = 9;
/// Size at which a chunk of runs ends. Small enough for any transport, and for the time that a
/// writer may wait while it is encoded. A run is never split, so one with extents of thousands of
/// nodes makes a longer chunk; so may pins and nodes, which delay no writer.
pub const SNAPSHOT_CHUNK_BYTES: usize = 64 * 1024;
/// Pages that one scan for tombstones visits: no longer than a chunk of runs takes.
const TOMBSTONE_SCAN_PAGES: u32 = if cfg!(test) { 3 } else { 4_096 };
/// Checksum at the end of each chunk.
pub(super) const CHECKSUM_BYTES: usize = 8;

/// First byte of each chunk: its kind. In order: one header, runs, tombstone pages if there are
/// any, the end.
pub(super) const HEADER: u8 = 1;
pub(super) const RUNS: u8 = 2;
pub(super) const END: u8 = 3;
pub(super) const TOMBSTONES: u8 = 4;

/// Why a snapshot cannot be restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Another release wrote it.
    #[error("snapshot format {got} is unknown, this release reads {known}: use the release that wrote it")]
    Format {
        /// Number found.
        got: u32,
        /// Number this release writes and reads.
        known: u32,
    },
    /// The end chunk is missing.
    #[error("snapshot is incomplete: it ends after {got} chunks without an end chunk")]
    Incomplete {
        /// Chunks read.
        got: u64,
    },
    /// A byte changed after it was written.
    #[error("snapshot is damaged: the checksum of chunk {chunk} does not match")]
    Corrupt {
        /// The damaged chunk, counted from 0.
        chunk: u64,
    },
    /// Every checksum matches, but the restored state has another digest: a bug or a forgery.
    #[error("snapshot restores to a state with another digest")]
    DigestMismatch,
    /// The checksums match, but the contents are invalid: a bug or a forgery.
    #[error("snapshot has invalid contents: {0}")]
    Invalid(#[from] CodecError),
}

/// The snapshot of a cursor is over: the index was replaced, a later snapshot began, or this one
/// ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the index was replaced or a later snapshot of it began: start a new snapshot")]
pub struct SnapshotSuperseded;

/// Progress of a snapshot that [`Index::begin_snapshot`] began. Write in this order:
/// [`header`](Self::header), the chunks of [`Index::snapshot_chunk`] until the snapshot [is fully
/// read](Self::is_fully_read), and [`end`](Self::end).
#[derive(Debug)]
pub struct SnapshotCursor {
    /// Identifies the snapshot.
    token: Arc<()>,
    nodes: Nodes,
    directives: Directives,
    sweep_at: u32,
    births: u16,
    /// Listed blocks.
    blocks: u64,
    /// Entries of the table.
    entries: u64,
    /// Number of the next chunk.
    number: u64,
    /// Runs not yet written.
    runs: Range<u32>,
    tombstones: TombstoneScan,
    /// See [`SNAPSHOT_CHUNK_BYTES`].
    pub(super) chunk_bytes: usize,
}

/// Images of pages and runs that no snapshot needs any more. Dropping them may take some
/// milliseconds.
#[derive(Debug)]
pub struct SnapshotImages {
    _pages: Option<Box<Images<Page>>>,
    _runs: Option<Box<Images<PrefixRun>>>,
}

/// Checks the format number that was stored with the chunks.
pub fn check_snapshot_format(got: u32) -> Result<(), SnapshotError> {
    if got == SNAPSHOT_FORMAT {
        return Ok(());
    }
    Err(SnapshotError::Format { got, known: SNAPSHOT_FORMAT })
}

/// Whether the checksum of a chunk matches, for a caller that only forwards it.
#[must_use]
pub fn is_valid_chunk(chunk: &[u8]) -> bool {
    let parts = chunk.split_last_chunk::<CHECKSUM_BYTES>();
    parts.is_some_and(|(body, check)| xxh3_64(body) == u64::from_le_bytes(*check))
}

impl Index {
    /// Captures the state outside pages and runs for a snapshot of the current index. Costs O(nodes
    /// + pins). The caller must pass the cursor to [`Index::begin_snapshot`] before it applies
    ///   another command.
    #[must_use]
    pub fn prepare_snapshot(&self) -> SnapshotCursor {
        SnapshotCursor {
            token: Arc::new(()),
            nodes: self.nodes.clone(),
            directives: self.directives.clone(),
            sweep_at: self.store.sweep_cursor,
            births: self.store.runs.last_birth,
            blocks: self.store.locations.len(),
            entries: self.store.locations.entries(),
            number: 1,
            runs: 0..self.store.runs.number_limit(),
            tombstones: TombstoneScan {
                remaining: self.store.locations.tombstones(),
                page: 0,
                chunk: Vec::new(),
            },
            chunk_bytes: SNAPSHOT_CHUNK_BYTES,
        }
    }

    /// Begins the prepared snapshot and supersedes an earlier one. Costs a word per 2,048 blocks
    /// and per 256 runs. Until [`Index::end_snapshot`], the first write to each page and run saves
    /// its old contents.
    pub fn begin_snapshot(&mut self, cursor: &SnapshotCursor) {
        debug_assert_eq!(
            (cursor.blocks, cursor.births, cursor.runs.end),
            (self.store.locations.len(), self.store.runs.last_birth, self.store.runs.number_limit()),
            "a command was applied since the snapshot was prepared"
        );
        self.active_snapshot = Some(Arc::clone(&cursor.token));
        self.store.pages.begin_images();
        self.store.runs.begin_images();
    }

    /// The next chunk. `None` if one scan did not complete a chunk, or if the cursor is fully read.
    pub fn snapshot_chunk(&self, cursor: &mut SnapshotCursor) -> Result<Option<Vec<u8>>, SnapshotSuperseded> {
        if !self.is_active(cursor) {
            return Err(SnapshotSuperseded);
        }
        let pages = &self.store.pages;
        if cursor.is_fully_read() {
            return Ok(None);
        }
        if cursor.runs.is_empty() {
            return Ok(cursor.scan_tombstones(pages));
        }
        let mut out = start_chunk(RUNS, cursor.number);
        put_varint(&mut out, cursor.runs.start.into());
        while out.len() < cursor.chunk_bytes
            && let Some(run) = cursor.runs.next()
        {
            put_run(self.store.runs.get_at_snapshot(run), pages, &mut out);
        }
        cursor.number += 1;
        Ok(Some(seal_chunk(out)))
    }

    /// Ends the snapshot, complete or not, and returns its images; empty if it was superseded.
    pub fn end_snapshot(&mut self, cursor: &SnapshotCursor) -> SnapshotImages {
        if !self.is_active(cursor) {
            return SnapshotImages { _pages: None, _runs: None };
        }
        self.active_snapshot = None;
        SnapshotImages { _pages: self.store.pages.end_images(), _runs: self.store.runs.end_images() }
    }

    /// Whether a snapshot is in progress.
    #[must_use]
    pub fn is_snapshotting(&self) -> bool {
        self.active_snapshot.is_some()
    }

    fn is_active(&self, cursor: &SnapshotCursor) -> bool {
        self.active_snapshot.as_ref().is_some_and(|token| Arc::ptr_eq(token, &cursor.token))
    }

    /// Sixteen bytes that are equal on two replicas exactly if their logical states are, up to
    /// negligible collisions, whatever the block layout. Costs O(nodes + pinned blocks), not
    /// O(blocks): each change updates the digest of its node.
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        digest(&self.nodes, &self.directives)
    }
}

fn digest(nodes: &Nodes, directives: &Directives) -> [u8; 16] {
    let mut state = Vec::new();
    put_epochs(nodes, &mut state);
    for node in nodes.iter() {
        put_node(node, &mut state);
        state.extend_from_slice(&node.digest_sum.to_le_bytes());
        put_varint(&mut state, node.blocks);
    }
    put_directives(directives, &mut state);
    let full = blake3::hash(&state);
    std::array::from_fn(|position| full.as_bytes()[position])
}

/// Progress of the scan for tombstone pages.
#[derive(Debug)]
struct TombstoneScan {
    /// Tombstone pages not yet written; mostly zero, and then no page is read.
    remaining: u32,
    /// The next page to scan.
    page: u32,
    /// The chunk in progress.
    chunk: Vec<u8>,
}

impl SnapshotCursor {
    /// The first chunk: nodes, directives and counts. Needs no access to the index, because it may
    /// be long.
    #[must_use]
    pub fn header(&self) -> Vec<u8> {
        let mut out = start_chunk(HEADER, 0);
        put_header(self, &mut out);
        seal_chunk(out)
    }

    /// Whether only the end chunk remains.
    #[must_use]
    pub fn is_fully_read(&self) -> bool {
        self.runs.is_empty() && self.tombstones.remaining == 0
    }

    /// The last chunk.
    #[must_use]
    pub fn end(&self) -> Vec<u8> {
        let mut out = start_chunk(END, self.number);
        out.extend_from_slice(&digest(&self.nodes, &self.directives));
        seal_chunk(out)
    }

    /// Scans some pages for tombstones and writes each with its block group.
    fn scan_tombstones(&mut self, pages: &Pages) -> Option<Vec<u8>> {
        let TombstoneScan { remaining: left, page, chunk: found } = &mut self.tombstones;
        if found.is_empty() {
            *found = start_chunk(TOMBSTONES, self.number);
        }
        let end = pages.page_count_at_snapshot().min(*page + TOMBSTONE_SCAN_PAGES);
        while *left > 0 && *page < end && found.len() < self.chunk_bytes {
            if let Some(stub) = pages.page_at_snapshot(*page).filter(|page| page.is_tombstone()) {
                put_varint(found, (*page).into());
                put_block_group(found, stub.block_group());
                *left -= 1;
            }
            *page += 1;
        }
        if *page == pages.page_count_at_snapshot() {
            debug_assert_eq!(*left, 0, "counted tombstone pages are missing");
            *left = 0;
        }
        if *left > 0 && found.len() < self.chunk_bytes {
            return None;
        }
        self.number += 1;
        Some(seal_chunk(std::mem::take(found)))
    }
}

/// Starts a chunk.
fn start_chunk(kind: u8, number: u64) -> Vec<u8> {
    let mut out = vec![kind];
    put_varint(&mut out, number);
    out
}

/// Appends the checksum.
fn seal_chunk(mut out: Vec<u8>) -> Vec<u8> {
    let check = xxh3_64(&out);
    out.extend_from_slice(&check.to_le_bytes());
    out
}

fn put_epochs(nodes: &Nodes, out: &mut Vec<u8>) {
    put_varint(out, nodes.epoch_floor.0);
    put_varint(out, nodes.departed.len() as u64);
    for (node, epoch) in &nodes.departed {
        put_varint(out, node.0.into());
        put_varint(out, epoch.0);
    }
}

fn put_node(node: &NodeState, out: &mut Vec<u8>) {
    put_record(out, &node.record);
    put_varint(out, node.epoch.0);
    out.push(u8::from(node.live));
    put_varint(out, node.next_seq.0);
}

fn put_directives(directives: &Directives, out: &mut Vec<u8>) {
    put_settings(out, directives.quotas.iter().map(|(key, value)| (key.0, *value)));
    put_settings(out, directives.ttls.iter().map(|(key, value)| (key.0, *value)));
    put_varint(out, directives.pins.len() as u64);
    for pin in directives.pins.values() {
        put_pin(out, pin);
    }
    put_varint(out, directives.generation.0.into());
}

fn put_header(cursor: &SnapshotCursor, out: &mut Vec<u8>) {
    let nodes = &cursor.nodes;
    put_epochs(nodes, out);
    put_varint(out, nodes.slots.len() as u64);
    for (slot, incarnation) in nodes.slots.iter().zip(&nodes.incarnations) {
        put_varint(out, (*incarnation).into());
        out.push(u8::from(slot.is_some()));
        if let Some(node) = slot {
            put_node(node, out);
        }
    }
    put_varint(out, nodes.free.len() as u64);
    for slot in &nodes.free {
        put_varint(out, (*slot).into());
    }
    put_directives(&cursor.directives, out);
    put_varint(out, cursor.sweep_at.into());
    put_varint(out, cursor.births.into());
    put_varint(out, cursor.blocks);
    put_varint(out, cursor.entries);
    put_varint(out, cursor.runs.end.into());
}

fn put_settings(out: &mut Vec<u8>, settings: impl ExactSizeIterator<Item = (u32, u64)>) {
    put_varint(out, settings.len() as u64);
    for (key, value) in settings {
        put_varint(out, key.into());
        put_varint(out, value);
    }
}

fn put_block_group(out: &mut Vec<u8>, octet: u64) {
    out.extend_from_slice(&octet.to_le_bytes()[..PLACE_BYTES]);
}

/// Writes a run: end, page numbers with their canonical flags, predecessor, extents, offsets of
/// entry points, and for each page the shared and unshared hash bytes. An absent run is just a zero
/// end.
fn put_run(run: &PrefixRun, pages: &Pages, out: &mut Vec<u8>) {
    put_varint(out, run.end().into());
    if run.end() == 0 {
        return;
    }
    // Pages are scattered in memory: prefetches all before the first is read.
    let page = |number: u32| pages.page_at_snapshot(number).inspect(|page| page.prefetch());
    let there: SmallVec<[Option<&Page>; 64]> = run.pages().map(|number| page(number?)).collect();
    debug_assert!(
        run.pages().zip(&there).all(|(number, page)| number.is_some() == page.is_some()),
        "a page of a run is missing"
    );
    for (number, page) in run.pages().zip(&there) {
        let is_anchor = page.is_some_and(Page::is_canonical);
        put_varint(out, number.map_or(0, |number| 1 + 2 * u64::from(number) + u64::from(is_anchor)));
    }
    let Predecessor { run: before, offset, birth: born } = run.predecessor;
    put_varint(out, before.into());
    for word in [offset, born, run.birth, run.head_bits, run.fork() as u16] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    put_varint(out, run.extents().len() as u64);
    for hold in run.extents() {
        put_varint(out, hold.slot.into());
        put_varint(out, hold.incarnation.into());
        put_varint(out, hold.from.into());
        put_varint(out, (hold.to - hold.from).into());
        out.push(hold.tiers.bits());
    }
    let pages =
        || (0..).step_by(PAGE_BLOCKS as usize).zip(&there).filter_map(|(at, page)| Some((at, (*page)?)));
    put_varint(out, pages().map(|(_, page)| u64::from(page.entry_points().count_ones())).sum());
    for (first, page) in pages() {
        let heads = (0..PAGE_BLOCKS).filter(|slot| page.entry_points() & 1 << slot != 0);
        heads.for_each(|slot| put_varint(out, u64::from(first + slot)));
    }
    for (first, page) in pages() {
        let slots = run.start().saturating_sub(first)..run.end().saturating_sub(first).min(PAGE_BLOCKS);
        put_block_group(out, page.block_group());
        out.extend_from_slice(page.suffix_bytes(slots));
    }
}
