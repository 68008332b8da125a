//! The index as bytes and back, in chunks, while it goes on living.
//!
//! [`Index::freeze`] takes microseconds: it shares the pages and runs with the index, which copies a few
//! of them at a time when it next writes. [`Frozen::chunks`] then encodes at its own pace, and [`Restore`]
//! takes chunk after chunk, so that neither side ever holds the whole of a snapshot as bytes. A snapshot is
//! the index as it stands, run by run and page by page, stale holds and free numbers included, so that a
//! replica that restored it goes on exactly as the one that wrote it; only the table is built anew, and
//! every count and digest is computed again from the blocks, never believed. Each chunk has a checksum
//! and the last one the digest of the state: chunks that are not whole are refused, never read in part.
//! Not here: files, and the log position a snapshot stands for (the router keeps both).

use std::ops::Range;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::bytes::{CodecError, Reader, invalid, put_number};
use super::codec::{put_pin, put_record, read_pin, read_record};
use super::directives::Directives;
use super::holders::TierSet;
use super::nodes::{DEPARTED_MAX, NodeState, Nodes};
use super::pages::{PAGE_BLOCKS, Pages};
use super::restore::{RestoredPage, Unproven};
use super::run::{Before, Hold, RUN_BLOCKS_MAX, Run, Runs};
use super::{Index, IndexLimits};
use crate::id::{BlockHash, Epoch, GroupId, NodeId, Seq, TenantId};

/// Format of the chunks that this release writes and reads; whoever keeps them keeps this number with them.
pub const SNAPSHOT_FORMAT: u32 = 5;
/// A chunk of runs ends when it has this many bytes: a message that no transport minds, encoded in well
/// under a millisecond. The chunk of pins and nodes may be longer.
pub const SNAPSHOT_CHUNK_BYTES: usize = 256 * 1024;
/// Checksum at the end of each chunk.
const CHECK_BYTES: usize = 8;

/// First byte of each chunk: what it holds. One head, then runs, then anchors that list nothing, if there are any,
/// then the end.
const HEAD: u8 = 1;
const RUNS: u8 = 2;
const END: u8 = 3;
const STUBS: u8 = 4;

/// Bytes that the hashes of an octet have in common.
const OCTET_BYTES: usize = 5;

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
        let mut chunks = Chunks { frozen: self, number: 0, run: 0, stubs: 0, stage: HEAD };
        std::iter::from_fn(move || chunks.next_chunk())
    }
}

/// Where encoding stands.
struct Chunks {
    frozen: Frozen,
    number: u64,
    run: u32,
    /// Chunks of pages whose stubs were encoded.
    stubs: usize,
    stage: u8,
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
fn put_stubs(pages: &Pages, chunk: &mut usize, out: &mut Vec<u8>) -> bool {
    let before = out.len();
    while out.len() < SNAPSHOT_CHUNK_BYTES
        && let Some(stubs) = pages.stubs(*chunk)
    {
        for stub in stubs {
            put_number(out, stub.into());
            put_octet(out, pages.octet(stub));
        }
        *chunk += 1;
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

/// An index that is being restored, chunk by chunk.
#[derive(Debug)]
pub struct Restore {
    index: Index,
    /// Chunks read.
    chunks: u64,
    /// Kind of the next chunk, if not the one that follows; none after the end.
    expected: Option<u8>,
    runs: u32,
    /// Blocks that will be listed.
    blocks: u64,
    /// Entries that the table will have.
    entries: u64,
    unproven: Unproven,
}

impl Restore {
    /// Nothing yet. Later commands are held to `limits`; what is in the snapshot is kept even above them.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        let index = Index::new(limits);
        let unproven = Unproven::default();
        Self { index, chunks: 0, expected: Some(HEAD), runs: 0, blocks: 0, entries: 0, unproven }
    }

    /// Whether the last chunk was read.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.expected.is_none()
    }

    /// Reads the next chunk. After an error the rest is of no use.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), SnapshotError> {
        let damaged = SnapshotError::Corrupt { chunk: self.chunks };
        if !is_whole_chunk(chunk) {
            return Err(damaged);
        }
        let (body, _) = chunk.split_at(chunk.len() - CHECK_BYTES);
        let mut reader = Reader::new(body);
        let kind = reader.byte()?;
        let number = reader.number("chunk number")?;
        if number != self.chunks {
            return Err(invalid("chunk number", 1, number).into());
        }
        match (self.expected, kind) {
            (Some(HEAD), HEAD) => self.read_head(&mut reader)?,
            (Some(RUNS), RUNS) => self.read_runs(&mut reader)?,
            (Some(RUNS | STUBS), STUBS) => self.read_stubs(&mut reader)?,
            (Some(RUNS | STUBS), END) => self.read_end(&mut reader)?,
            _ => return Err(invalid("chunk kind", 0, kind.into()).into()),
        }
        self.expected = (kind != END).then_some(kind.max(RUNS));
        self.chunks += 1;
        Ok(reader.finish()?)
    }

    /// The index.
    ///
    /// # Errors
    /// [`SnapshotError::Torn`] when chunks are missing.
    pub fn finish(self) -> Result<Index, SnapshotError> {
        if self.is_whole() { Ok(self.index) } else { Err(SnapshotError::Torn { got: self.chunks }) }
    }

    fn read_head(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let nodes = &mut self.index.nodes;
        nodes.epoch_floor = Epoch(reader.number("epoch floor")?);
        let departed = read_settings(reader, "departed nodes")?;
        if departed.len() > DEPARTED_MAX {
            return Err(invalid("departed nodes", reader.at(), departed.len() as u64));
        }
        nodes.departed = departed.into_iter().map(|(node, epoch)| (NodeId(node), Epoch(epoch))).collect();
        read_slots(nodes, reader)?;
        read_directives(&mut self.index.directives, reader)?;
        self.index.store.sweep_at = reader.number_u32("sweep")?;
        let at = reader.at();
        let births = reader.number_u32("births")?;
        self.index.store.runs.births =
            u16::try_from(births).map_err(|_| invalid("births", at, births.into()))?;
        self.blocks = reader.number("blocks")?;
        self.entries = reader.number("entries")?;
        self.index.store.places.expect(self.entries);
        self.runs = reader.number_u32("runs")?;
        Ok(())
    }

    fn read_runs(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let at = reader.at();
        let first = reader.number_u32("run")?;
        if first != self.index.store.runs.used() {
            return Err(invalid("run", at, first.into()));
        }
        while reader.left() > 0 {
            self.read_run(reader)?;
        }
        Ok(())
    }

    fn read_run(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        let at = reader.at();
        let end = reader.number_u32("end of a run")?;
        if end > RUN_BLOCKS_MAX || self.index.store.runs.used() >= self.runs {
            return Err(invalid("end of a run", at, end.into()));
        }
        if end == 0 {
            self.index.store.runs.restore(Run::default());
            return Ok(());
        }
        let mut pages = Vec::new();
        for _ in 0..end.div_ceil(PAGE_BLOCKS) {
            pages.push(reader.number_u32("page")?.checked_sub(1));
        }
        let before = reader.number_u32("run before")?;
        let mut word = || reader.array().map(u16::from_le_bytes);
        let (offset, before_born, born, head, fork) = (word()?, word()?, word()?, word()?, word()?);
        let before = Before { run: before, offset, born: before_born };
        let mut holds = Vec::new();
        for _ in 0..reader.count("holds", 5)? {
            holds.push(self.read_hold(reader)?);
        }
        let mut heads = Vec::new();
        for _ in 0..reader.count("heads", 1)? {
            heads.push(reader.number_u32("head")?);
        }
        let numbers: Vec<_> = pages.iter().map(|page| page.map(|page| page / 2)).collect();
        let run = Run::restored(end, (born, head, fork, before), &numbers, &holds);
        let run = run.ok_or(invalid("run", at, end.into()))?;
        let mut present = Vec::new();
        for (nth, page) in (0..).zip(pages) {
            let Some(page) = page else { continue };
            let slots = run.start().max(nth * PAGE_BLOCKS)..end.min((nth + 1) * PAGE_BLOCKS);
            let hashes = read_hashes(slots, reader)?;
            present.push(RestoredPage { number: page / 2, is_anchor: page % 2 == 1, hashes });
        }
        let number = self.index.store.runs.used();
        if !self.index.store.restore_run(run, &present, &heads, &mut self.unproven) {
            return Err(invalid("run", at, number.into()));
        }
        self.book(number);
        Ok(())
    }

    fn read_stubs(&mut self, reader: &mut Reader<'_>) -> Result<(), CodecError> {
        loop {
            let at = reader.at();
            let page = reader.number_u32("page")?;
            let octet = read_octet(reader)?.octet();
            if !self.index.store.restore_stub(page, octet, &mut self.unproven) {
                return Err(invalid("page", at, page.into()));
            }
            if reader.left() == 0 {
                return Ok(());
            }
        }
    }

    fn read_hold(&self, reader: &mut Reader<'_>) -> Result<Hold, CodecError> {
        let at = reader.at();
        let slot = reader.number_u32("holder")?;
        let incarnation = reader.number_u32("incarnation")?;
        let from = reader.number_u32("first block of a hold")?;
        let blocks = reader.number_u32("blocks of a hold")?;
        let bits = reader.byte()?;
        let tiers = TierSet::from_bits(bits).filter(|tiers| !tiers.is_empty());
        let tiers = tiers.ok_or(invalid("tiers", at, bits.into()))?;
        let number = |number: u32| u16::try_from(number).map_err(|_| invalid("hold", at, number.into()));
        let to = number(from.saturating_add(blocks))?;
        let hold = Hold { incarnation, slot: number(slot)?, from: number(from)?, to, tiers };
        let nodes = &self.index.nodes;
        // What counts is held by a live node; what is stale may be anyone's that ever was.
        let is_live = nodes.state(hold.slot).is_some_and(|node| node.live);
        let is_current = hold.is_current(nodes.incarnations());
        // One of a later incarnation would begin to count when the slot gets there.
        let is_past = nodes.incarnations().get(usize::from(hold.slot)).is_some_and(|now| incarnation <= *now);
        if !is_past || (is_current && !is_live) {
            return Err(invalid("holder", at, slot.into()));
        }
        Ok(hold)
    }

    fn book(&mut self, run: u32) {
        let Index { nodes, store, .. } = &mut self.index;
        store.tally_run(run, &mut |hold, tally| {
            if hold.is_current(nodes.incarnations()) {
                nodes.book(hold.slot, &tally);
            }
        });
    }

    fn read_end(&mut self, reader: &mut Reader<'_>) -> Result<(), SnapshotError> {
        self.index.store.places.expect(0);
        let store = &mut self.index.store;
        if !store.prove(&self.unproven) {
            return Err(invalid("octets", 0, self.blocks).into());
        }
        if store.places.len() != self.blocks {
            return Err(invalid("blocks", 0, self.blocks).into());
        }
        if store.places.entries() != self.entries {
            return Err(invalid("entries", 0, self.entries).into());
        }
        if store.runs.used() != self.runs || store.runs.ends_free() {
            return Err(invalid("runs", 0, store.runs.used().into()).into());
        }
        let digest: [u8; 16] = reader.array()?;
        if digest != self.index.digest() { Err(SnapshotError::OtherState) } else { Ok(()) }
    }
}

/// What the hashes of a page have in common, as the first of its octet would have it.
fn read_octet(reader: &mut Reader<'_>) -> Result<BlockHash, CodecError> {
    let at = reader.at();
    let common: [u8; OCTET_BYTES] = reader.array()?;
    let mut hash = BlockHash::default();
    hash.0[..OCTET_BYTES].copy_from_slice(&common);
    if hash.nth_of_octet() != 0 {
        return Err(invalid("octet", at, common[1].into()));
    }
    Ok(hash)
}

/// The hashes of a page at some offsets of its run, at least one.
fn read_hashes(
    offsets: Range<u32>,
    reader: &mut Reader<'_>,
) -> Result<SmallVec<[BlockHash; PAGE_BLOCKS as usize]>, CodecError> {
    let octet = read_octet(reader)?;
    let mut hashes = SmallVec::new();
    for offset in offsets {
        let mut hash = BlockHash::default();
        hash.0[OCTET_BYTES..].copy_from_slice(&reader.array::<{ 16 - OCTET_BYTES }>()?);
        hashes.push(hash.in_chain(octet.root_tag(), octet, offset as usize));
    }
    Ok(hashes)
}

fn read_slots(nodes: &mut Nodes, reader: &mut Reader<'_>) -> Result<(), CodecError> {
    for _ in 0..reader.count("slots", 2)? {
        let at = reader.at();
        let incarnation = reader.number_u32("incarnation")?;
        let node = if reader.flag("node")? { Some(read_node(reader)?) } else { None };
        if !nodes.restore(incarnation, node) {
            return Err(invalid("slot", at, incarnation.into()));
        }
    }
    let mut is_free: Vec<bool> = nodes.slots.iter().map(Option::is_none).collect();
    for _ in 0..reader.count("free slots", 1)? {
        let at = reader.at();
        let slot = reader.number_u32("free slot")?;
        match is_free.get_mut(slot as usize) {
            Some(free) if *free => *free = false,
            _ => return Err(invalid("free slot", at, slot.into())),
        }
        nodes.free.push(slot as u16);
    }
    if is_free.contains(&true) {
        return Err(invalid("free slots", reader.at(), nodes.free.len() as u64));
    }
    let identities = nodes.iter().map(|node| node.record.identity);
    if identities.collect::<std::collections::BTreeSet<_>>().len() > 1 {
        return Err(invalid("identities", reader.at(), 2));
    }
    Ok(())
}

fn read_node(reader: &mut Reader<'_>) -> Result<NodeState, CodecError> {
    let record = read_record(reader)?;
    let epoch = Epoch(reader.number("epoch")?);
    let live = reader.flag("live")?;
    let next_seq = Seq(reader.number("sequence number")?);
    Ok(NodeState { live, next_seq, ..NodeState::new(record, epoch) })
}

fn read_directives(directives: &mut Directives, reader: &mut Reader<'_>) -> Result<(), CodecError> {
    let quotas = read_settings(reader, "quotas")?;
    directives.quotas = quotas.into_iter().map(|(key, value)| (TenantId(key), value)).collect();
    let ttls = read_settings(reader, "times to live")?;
    directives.ttls = ttls.into_iter().map(|(key, value)| (GroupId(key), value)).collect();
    let mut before = None;
    for _ in 0..reader.count("pins", 3)? {
        let at = reader.at();
        let pin = read_pin(reader)?;
        if before >= Some(pin.pin) {
            return Err(invalid("pin", at, pin.pin.0));
        }
        before = Some(pin.pin);
        directives.insert_pin(pin);
    }
    Ok(())
}

/// Pairs by strictly ascending key.
fn read_settings(reader: &mut Reader<'_>, what: &'static str) -> Result<Vec<(u32, u64)>, CodecError> {
    let mut settings: Vec<(u32, u64)> = Vec::new();
    for _ in 0..reader.count(what, 2)? {
        let at = reader.at();
        let key = reader.number_u32(what)?;
        if settings.last().is_some_and(|(before, _)| *before >= key) {
            return Err(invalid(what, at, key.into()));
        }
        settings.push((key, reader.number(what)?));
    }
    Ok(settings)
}
