//! The index as bytes, in chunks, while it goes on living.
//!
//! [`Index::freeze`] shares the pages and runs with the index, which copies a few
//! of them at a time when it next writes. [`Frozen::chunks`] then encodes at its own pace, and
//! [`Restore`](super::Restore) takes chunk after chunk, so that neither side ever holds the whole of a snapshot as bytes.
//! A snapshot is the index as it stands, run by run and page by page, stale holds, stubs and free numbers included, so
//! that a replica that restored it goes on exactly as the one that wrote it; only the table is built anew, and
//! every count and digest is computed again from the blocks, never believed. Each chunk has a checksum
//! and the last one the digest of the state: chunks that are not whole are refused, never read in part.
//! Not here: reading (`restore.rs`), files, and the log position a snapshot stands for (the router keeps both).

use xxhash_rust::xxh3::xxh3_64;

use super::Index;
use super::bytes::{CodecError, put_number};
use super::codec::{put_pin, put_record};
use super::directives::Directives;
use super::nodes::{NodeState, Nodes};
use super::pages::Pages;
use super::run::{Before, Run, Runs};

/// Format of the chunks that this release writes and reads; whoever keeps them keeps this number with them.
pub const SNAPSHOT_FORMAT: u32 = 5;
/// A chunk of runs ends when it has this many bytes: a message that no transport minds, encoded in well
/// under a millisecond. The chunk of pins and nodes may be longer.
pub const SNAPSHOT_CHUNK_BYTES: usize = 256 * 1024;
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

/// An index as it was at one moment. Cheap to make, and to keep while it is being encoded.
#[derive(Clone, Debug)]
pub struct Frozen {
    nodes: Nodes,
    directives: Directives,
    pages: Pages,
    runs: Runs,
    /// Listed blocks.
    blocks: u64,
    /// Entries of the table.
    entries: u64,
    /// Anchors that list nothing.
    stubs: u32,
    sweep_at: u32,
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
    /// The index as it is now, for [`Frozen::chunks`]. Costs O(nodes + pins), and one reference per
    /// 248 blocks and per 16 runs.
    #[must_use]
    pub fn freeze(&self) -> Frozen {
        Frozen {
            nodes: self.nodes.clone(),
            directives: self.directives.clone(),
            pages: self.store.pages.clone(),
            runs: self.store.runs.frozen(),
            blocks: self.store.places.len(),
            entries: self.store.places.entries(),
            stubs: self.store.places.stubs(),
            sweep_at: self.store.sweep_at,
        }
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

impl Frozen {
    /// Digest of the state, see [`Index::digest`].
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        digest(&self.nodes, &self.directives)
    }

    /// The chunks of the snapshot, one by one, each encoded when it is asked for.
    pub fn chunks(self) -> impl Iterator<Item = Vec<u8>> {
        let stubs = Stubs { left: self.stubs, chunk: 0 };
        let mut chunks = Chunks { frozen: self, number: 0, run: 0, stubs, stage: HEAD };
        std::iter::from_fn(move || chunks.next_chunk())
    }
}

/// Where encoding stands.
struct Chunks {
    frozen: Frozen,
    number: u64,
    run: u32,
    stubs: Stubs,
    stage: u8,
}

/// Which stubs were not encoded yet.
struct Stubs {
    /// How many: mostly none, and then no page is read to see that.
    left: u32,
    /// Chunk of pages to look for them in next.
    chunk: usize,
}

impl Chunks {
    fn next_chunk(&mut self) -> Option<Vec<u8>> {
        let frozen = &self.frozen;
        let mut out = vec![self.stage];
        put_number(&mut out, self.number);
        match self.stage {
            HEAD => {
                put_head(frozen, &mut out);
                self.stage = RUNS;
            }
            RUNS if self.run < frozen.runs.used() => {
                put_number(&mut out, self.run.into());
                while out.len() < SNAPSHOT_CHUNK_BYTES && self.run < frozen.runs.used() {
                    put_run(frozen.runs.get(self.run), &frozen.pages, &mut out);
                    self.run += 1;
                }
            }
            RUNS | STUBS if put_stubs(&frozen.pages, &mut self.stubs, &mut out) => {
                out[0] = STUBS;
                self.stage = STUBS;
            }
            RUNS | STUBS => {
                out[0] = END;
                out.extend_from_slice(&frozen.digest());
                self.stage = END;
            }
            _ => return None,
        }
        let check = xxh3_64(&out);
        out.extend_from_slice(&check.to_le_bytes());
        self.number += 1;
        Some(out)
    }
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
}

fn put_head(frozen: &Frozen, out: &mut Vec<u8>) {
    let nodes = &frozen.nodes;
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
    put_directives(&frozen.directives, out);
    put_number(out, frozen.sweep_at.into());
    put_number(out, frozen.runs.births.into());
    put_number(out, frozen.blocks);
    put_number(out, frozen.entries);
    put_number(out, frozen.runs.used().into());
}

fn put_settings(out: &mut Vec<u8>, settings: impl ExactSizeIterator<Item = (u32, u64)>) {
    put_number(out, settings.len() as u64);
    for (key, value) in settings {
        put_number(out, key.into());
        put_number(out, value);
    }
}

/// Anchors that list nothing, chunk of pages by chunk, each with its octet; answers whether there was one.
fn put_stubs(pages: &Pages, at: &mut Stubs, out: &mut Vec<u8>) -> bool {
    let before = out.len();
    while at.left > 0
        && out.len() < SNAPSHOT_CHUNK_BYTES
        && let Some(stubs) = pages.stubs(at.chunk)
    {
        for stub in stubs {
            put_number(out, stub.into());
            put_octet(out, pages.octet(stub));
            at.left = at.left.saturating_sub(1);
        }
        at.chunk += 1;
    }
    out.len() > before
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
    for page in run.pages() {
        put_number(out, page.map_or(0, |page| 1 + 2 * u64::from(page) + u64::from(pages.is_anchor(page))));
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
    let is_head = |offset: &u32| {
        let place = run.place(*offset);
        place.is_some_and(|place| pages.heads(place.page()) & 1 << place.slot() != 0)
    };
    let heads: Vec<u32> = (run.start()..run.end()).filter(is_head).collect();
    put_number(out, heads.len() as u64);
    for offset in heads {
        put_number(out, offset.into());
    }
    for offset in run.start()..run.end() {
        let Some(place) = run.place(offset) else { continue };
        if offset == run.start() || place.slot() == 0 {
            put_octet(out, pages.octet(place.page()));
        }
        out.extend_from_slice(&pages.hash(place).0[OCTET_BYTES..]);
    }
}
