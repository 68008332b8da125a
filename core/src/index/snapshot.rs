//! The index as bytes, in chunks, while it goes on living.
//!
//! [`Index::prepare_snapshot`] gives a cursor. From [`Index::begin_snapshot`] on whoever writes a page or a run for the
//! first time keeps what it was (`images.rs`), and [`Index::snapshot_chunk`] reads that, or the living one. So a
//! snapshot goes from the index at the pace of whoever writes it down, the index is held for a chunk at a time, and
//! [`Restore`](super::Restore) takes chunk after chunk: neither side ever holds the whole of a snapshot as bytes.
//! A snapshot is the index as it stands, run by run and page by page, stale holds, stubs and free numbers included, so
//! that a replica that restored it goes on exactly as the one that wrote it; only the table is built anew, and
//! every count and digest is computed again from the blocks, never believed. Each chunk has a checksum
//! and the last one the digest of the state: chunks that are not whole are refused, never read in part.
//! Not here: reading (`restore.rs`), files, and the log position a snapshot stands for (the router keeps both).

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::Index;
use super::bytes::{CodecError, put_number};
use super::codec::{put_pin, put_record};
use super::directives::Directives;
use super::images::Images;
use super::nodes::{NodeState, Nodes};
use super::pages::{PAGE_BLOCKS, Page, Pages};
use super::run::{Before, Run};

/// Format of the chunks that this release writes and reads; whoever keeps them keeps this number with them. 8: the
/// generation of the weights.
pub const SNAPSHOT_FORMAT: u32 = 8;
/// A chunk of runs ends when it has this many bytes: a message that no transport minds, encoded in a tenth of a
/// millisecond or two, for which a writer may have to wait. A run is never cut in two, so one that thousands of nodes
/// hold in many stretches makes a longer chunk, and a longer wait; so may pins and nodes, for which nobody waits.
pub const SNAPSHOT_CHUNK_BYTES: usize = 64 * 1024;
/// Pages that one look for stubs goes through: no longer than a chunk of runs takes.
const LOOK_PAGES: u32 = if cfg!(test) { 3 } else { 4_096 };
/// Checksum at the end of each chunk.
pub(super) const CHECK_BYTES: usize = 8;

/// First byte of each chunk: what it holds. One head, then runs, then anchors that list nothing, if there are any,
/// then the end.
pub(super) const HEAD: u8 = 1;
pub(super) const RUNS: u8 = 2;
pub(super) const END: u8 = 3;
pub(super) const STUBS: u8 = 4;

/// Bytes that the hashes of an octet have in common.
pub(super) const OCTET_BYTES: usize = 5;

/// Why bytes cannot be restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Written by another release.
    #[error("snapshot format {got} is not known here, only {known}: use the release that wrote it")]
    Format {
        /// Number found.
        got: u32,
        /// Number this release writes and reads.
        known: u32,
    },
    /// The end is missing.
    #[error("snapshot ends after {got} chunks, before its end: it was cut off")]
    Torn {
        /// Chunks given.
        got: u64,
    },
    /// Some byte changed since it was written.
    #[error("snapshot is damaged: the checksum of chunk {chunk} does not match")]
    Corrupt {
        /// Which chunk, counted from 0.
        chunk: u64,
    },
    /// Every checksum matches, but the state is another one than was written: a bug or a forgery.
    #[error("snapshot leads to another state than it was taken of")]
    OtherState,
    /// The checksums match, but the contents make no sense: a bug or a forgery.
    #[error("snapshot has invalid contents: {0}")]
    Invalid(#[from] CodecError),
}

/// The index that a cursor is of was replaced, or another snapshot of it was begun, or this one was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the index was replaced, or a later snapshot of it was begun: begin again")]
pub struct Superseded;

/// How far a snapshot was written down that [`Index::begin_snapshot`] began. In this order: [`head`](Self::head),
/// what [`Index::snapshot_chunk`] gives until all [is read](Self::is_read), and [`end`](Self::end).
#[derive(Debug)]
pub struct SnapshotCursor {
    /// Which snapshot.
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
    /// Runs that were not written yet.
    runs: Range<u32>,
    stubs: Stubs,
    /// See [`SNAPSHOT_CHUNK_BYTES`].
    pub(super) chunk_bytes: usize,
}

/// What pages and runs were, which no snapshot needs any more. Freeing it may take some milliseconds.
#[derive(Debug)]
pub struct SnapshotImages {
    _pages: Option<Box<Images<Page>>>,
    _runs: Option<Box<Images<Run>>>,
}

/// Checks the number that was kept with some chunks.
///
/// # Errors
/// [`SnapshotError::Format`] when this release does not read them.
pub fn check_snapshot_format(got: u32) -> Result<(), SnapshotError> {
    if got == SNAPSHOT_FORMAT {
        return Ok(());
    }
    Err(SnapshotError::Format { got, known: SNAPSHOT_FORMAT })
}

/// Whether a chunk is as it was written, for whoever only passes it on.
#[must_use]
pub fn is_whole_chunk(chunk: &[u8]) -> bool {
    let parts = chunk.split_last_chunk::<CHECK_BYTES>();
    parts.is_some_and(|(body, check)| xxh3_64(body) == u64::from_le_bytes(*check))
}

impl Index {
    /// Looks at what a snapshot of the index as it is now has besides pages and runs. Costs O(nodes + pins). The
    /// cursor is of use from [`Index::begin_snapshot`] on, and nothing may be applied between the two.
    #[must_use]
    pub fn prepare_snapshot(&self) -> SnapshotCursor {
        SnapshotCursor {
            token: Arc::new(()),
            nodes: self.nodes.clone(),
            directives: self.directives.clone(),
            sweep_at: self.store.sweep_at,
            births: self.store.runs.births,
            blocks: self.store.places.len(),
            entries: self.store.places.entries(),
            number: 1,
            runs: 0..self.store.runs.used(),
            stubs: Stubs { left: self.store.places.stubs(), page: 0, found: Vec::new() },
            chunk_bytes: SNAPSHOT_CHUNK_BYTES,
        }
    }

    /// Begins the snapshot that was prepared; an earlier one is superseded. Costs a word per 2,048 blocks and per 256
    /// runs. Until [`Index::end_snapshot`] every page and every run that is written is kept as it was, once.
    pub fn begin_snapshot(&mut self, cursor: &SnapshotCursor) {
        debug_assert_eq!(
            (cursor.blocks, cursor.births, cursor.runs.end),
            (self.store.places.len(), self.store.runs.births, self.store.runs.used()),
            "something was applied since the snapshot was prepared"
        );
        self.snapshot = Some(Arc::clone(&cursor.token));
        self.store.pages.begin_images();
        self.store.runs.begin_images();
    }

    /// The next chunk, encoded now, or nothing when one look did not find all of it: until the cursor says that all is
    /// read.
    ///
    /// # Errors
    /// [`Superseded`].
    pub fn snapshot_chunk(&self, cursor: &mut SnapshotCursor) -> Result<Option<Vec<u8>>, Superseded> {
        if !self.is_making(cursor) {
            return Err(Superseded);
        }
        let pages = &self.store.pages;
        if cursor.is_read() {
            return Ok(None);
        }
        if cursor.runs.is_empty() {
            return Ok(cursor.look_for_stubs(pages));
        }
        let mut out = begun(RUNS, cursor.number);
        put_number(&mut out, cursor.runs.start.into());
        while out.len() < cursor.chunk_bytes
            && let Some(run) = cursor.runs.next()
        {
            put_run(self.store.runs.then(run), pages, &mut out);
        }
        cursor.number += 1;
        Ok(Some(sealed(out)))
    }

    /// Keeps nothing more for this snapshot, whether it was read to its end or not; one that is superseded has nothing
    /// any more.
    pub fn end_snapshot(&mut self, cursor: &SnapshotCursor) -> SnapshotImages {
        if !self.is_making(cursor) {
            return SnapshotImages { _pages: None, _runs: None };
        }
        self.snapshot = None;
        SnapshotImages { _pages: self.store.pages.end_images(), _runs: self.store.runs.end_images() }
    }

    /// Whether a snapshot was begun and not ended.
    #[must_use]
    pub fn keeps_images(&self) -> bool {
        self.snapshot.is_some()
    }

    fn is_making(&self, cursor: &SnapshotCursor) -> bool {
        self.snapshot.as_ref().is_some_and(|token| Arc::ptr_eq(token, &cursor.token))
    }

    /// Sixteen bytes that are equal on two replicas exactly when their logical states are (up to
    /// collisions nobody meets by accident), however their blocks are laid out. Costs O(nodes + pinned
    /// blocks), not O(blocks): the part of each node's blocks is kept up to date by every change.
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
        put_number(&mut state, node.blocks);
    }
    put_directives(directives, &mut state);
    let full = blake3::hash(&state);
    std::array::from_fn(|position| full.as_bytes()[position])
}

/// Which stubs were not written yet.
#[derive(Debug)]
struct Stubs {
    /// How many: mostly none, and then no page is read to see that.
    left: u32,
    /// Page to look at next.
    page: u32,
    /// The chunk that those are in that were found.
    found: Vec<u8>,
}

impl SnapshotCursor {
    /// The first chunk: nodes, directives and counts. Long when there are many, and no index is needed for it.
    #[must_use]
    pub fn head(&self) -> Vec<u8> {
        let mut out = begun(HEAD, 0);
        put_head(self, &mut out);
        sealed(out)
    }

    /// Whether only the end is missing.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.runs.is_empty() && self.stubs.left == 0
    }

    /// The last chunk.
    #[must_use]
    pub fn end(&self) -> Vec<u8> {
        let mut out = begun(END, self.number);
        out.extend_from_slice(&digest(&self.nodes, &self.directives));
        sealed(out)
    }

    /// Goes through some pages for anchors that list nothing, each of which is written with its octet.
    fn look_for_stubs(&mut self, pages: &Pages) -> Option<Vec<u8>> {
        let Stubs { left, page, found } = &mut self.stubs;
        if found.is_empty() {
            *found = begun(STUBS, self.number);
        }
        let end = pages.numbers_then().min(*page + LOOK_PAGES);
        while *left > 0 && *page < end && found.len() < self.chunk_bytes {
            if let Some(stub) = pages.then(*page).filter(|page| page.is_stub()) {
                put_number(found, (*page).into());
                put_octet(found, stub.octet());
                *left -= 1;
            }
            *page += 1;
        }
        if *page == pages.numbers_then() {
            debug_assert_eq!(*left, 0, "stubs that were counted are not there");
            *left = 0;
        }
        if *left > 0 && found.len() < self.chunk_bytes {
            return None;
        }
        self.number += 1;
        Some(sealed(std::mem::take(found)))
    }
}

/// A chunk with nothing in it yet.
fn begun(kind: u8, number: u64) -> Vec<u8> {
    let mut out = vec![kind];
    put_number(&mut out, number);
    out
}

/// A chunk with its checksum.
fn sealed(mut out: Vec<u8>) -> Vec<u8> {
    let check = xxh3_64(&out);
    out.extend_from_slice(&check.to_le_bytes());
    out
}

fn put_epochs(nodes: &Nodes, out: &mut Vec<u8>) {
    put_number(out, nodes.epoch_floor.0);
    put_number(out, nodes.departed.len() as u64);
    for (node, epoch) in &nodes.departed {
        put_number(out, node.0.into());
        put_number(out, epoch.0);
    }
}

fn put_node(node: &NodeState, out: &mut Vec<u8>) {
    put_record(out, &node.record);
    put_number(out, node.epoch.0);
    out.push(u8::from(node.live));
    put_number(out, node.next_seq.0);
}

fn put_directives(directives: &Directives, out: &mut Vec<u8>) {
    put_settings(out, directives.quotas.iter().map(|(key, value)| (key.0, *value)));
    put_settings(out, directives.ttls.iter().map(|(key, value)| (key.0, *value)));
    put_number(out, directives.pins.len() as u64);
    for pin in directives.pins.values() {
        put_pin(out, pin);
    }
    put_number(out, directives.generation.0.into());
}

fn put_head(cursor: &SnapshotCursor, out: &mut Vec<u8>) {
    let nodes = &cursor.nodes;
    put_epochs(nodes, out);
    put_number(out, nodes.slots.len() as u64);
    for (slot, incarnation) in nodes.slots.iter().zip(&nodes.incarnations) {
        put_number(out, (*incarnation).into());
        out.push(u8::from(slot.is_some()));
        if let Some(node) = slot {
            put_node(node, out);
        }
    }
    put_number(out, nodes.free.len() as u64);
    for slot in &nodes.free {
        put_number(out, (*slot).into());
    }
    put_directives(&cursor.directives, out);
    put_number(out, cursor.sweep_at.into());
    put_number(out, cursor.births.into());
    put_number(out, cursor.blocks);
    put_number(out, cursor.entries);
    put_number(out, cursor.runs.end.into());
}

fn put_settings(out: &mut Vec<u8>, settings: impl ExactSizeIterator<Item = (u32, u64)>) {
    put_number(out, settings.len() as u64);
    for (key, value) in settings {
        put_number(out, key.into());
        put_number(out, value);
    }
}

fn put_octet(out: &mut Vec<u8>, octet: u64) {
    out.extend_from_slice(&octet.to_le_bytes()[..OCTET_BYTES]);
}

/// End, number of each page and whether it is an anchor, where the block before was, holds, offsets of heads, and of
/// each page what its hashes have in common and what not. A run that is none ends at zero.
fn put_run(run: &Run, pages: &Pages, out: &mut Vec<u8>) {
    put_number(out, run.end().into());
    if run.end() == 0 {
        return;
    }
    // They lie here and there: all are asked for before the first is read.
    let page = |number: u32| pages.then(number).inspect(|page| page.prefetch());
    let there: SmallVec<[Option<&Page>; 64]> = run.pages().map(|number| page(number?)).collect();
    debug_assert!(
        run.pages().zip(&there).all(|(number, page)| number.is_some() == page.is_some()),
        "a page of a run is not there"
    );
    for (number, page) in run.pages().zip(&there) {
        let is_anchor = page.is_some_and(Page::is_anchor);
        put_number(out, number.map_or(0, |number| 1 + 2 * u64::from(number) + u64::from(is_anchor)));
    }
    let Before { run: before, offset, born } = run.before;
    put_number(out, before.into());
    for word in [offset, born, run.born, run.head, run.fork() as u16] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    put_number(out, run.holds().len() as u64);
    for hold in run.holds() {
        put_number(out, hold.slot.into());
        put_number(out, hold.incarnation.into());
        put_number(out, hold.from.into());
        put_number(out, (hold.to - hold.from).into());
        out.push(hold.tiers.bits());
    }
    let pages =
        || (0..).step_by(PAGE_BLOCKS as usize).zip(&there).filter_map(|(at, page)| Some((at, (*page)?)));
    put_number(out, pages().map(|(_, page)| u64::from(page.heads().count_ones())).sum());
    for (first, page) in pages() {
        let heads = (0..PAGE_BLOCKS).filter(|slot| page.heads() & 1 << slot != 0);
        heads.for_each(|slot| put_number(out, u64::from(first + slot)));
    }
    for (first, page) in pages() {
        let slots = run.start().saturating_sub(first)..run.end().saturating_sub(first).min(PAGE_BLOCKS);
        put_octet(out, page.octet());
        out.extend_from_slice(page.own_bytes(slots));
    }
}
