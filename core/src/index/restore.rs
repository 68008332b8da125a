//! Rebuilds an index from the chunks of a snapshot, one by one: a consistent index, or an error.
//!
//! A snapshot may be forged. So everything is checked that the live index relies on to terminate,
//! to bound its memory and to name the holders of a block. Data that only speeds up lookups is
//! taken unchecked: predecessor, fork and birth of a run. So is the claim that a run's blocks form
//! a prefix, as with announcements of nodes. Not here: the chunk format (`snapshot.rs`).

use std::ops::Range;

use smallvec::SmallVec;

use super::bytes::{ByteReader, CodecError, invalid};
use super::codec::{read_pin, read_record};
use super::directives::Directives;
use super::holders::TierSet;
use super::nodes::{DEPARTED_MAX, NodeState, Nodes};
use super::pages::{PAGE_BLOCKS, PageOwner, PageSlot};
use super::run::{Extent, Predecessor, PrefixRun, RUN_BLOCKS_MAX};
use super::snapshot::{CHECKSUM_BYTES, END, HEADER, RUNS, SnapshotError, TOMBSTONES, is_valid_chunk};
use super::store::{RunPosition, Store};
use super::{Index, IndexLimits};
use crate::id::{BlockHash, DIGEST_BYTES, Epoch, Generation, NodeId, PLACE_BYTES, Seq, TenantId, TtlGroupId};

/// A page of a run.
#[derive(Clone, Debug)]
pub(super) struct RestoredPage {
    pub(super) number: u32,
    /// Whether the table entry of its block group names it.
    pub(super) is_canonical: bool,
    /// One hash for each offset of the run in this page, listed or not.
    pub(super) hashes: SmallVec<[BlockHash; PAGE_BLOCKS as usize]>,
}

/// Pages that can be verified only after the last chunk.
#[derive(Clone, Debug, Default)]
pub(super) struct UnverifiedPages {
    /// Pages that are not canonical for their block group.
    siblings: Vec<u32>,
    /// Tombstone pages.
    tombstones: Vec<u32>,
}

/// An index that is being restored, chunk by chunk.
#[derive(Debug)]
pub struct Restore {
    index: Index,
    /// Chunks read.
    chunks: u64,
    /// Kind of the last chunk, which bounds the next one; `None` after the end.
    expected: Option<u8>,
    runs: u32,
    /// Number of listed blocks that the header announced.
    blocks: u64,
    /// Number of table entries that the header announced.
    entries: u64,
    unverified: UnverifiedPages,
}

impl Restore {
    /// An empty restore. `limits` apply to later commands only; the snapshot may exceed them.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        let index = Index::new(limits);
        let unverified = UnverifiedPages::default();
        Self { index, chunks: 0, expected: Some(HEADER), runs: 0, blocks: 0, entries: 0, unverified }
    }

    /// Whether the last chunk was read.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.expected.is_none()
    }

    /// Reads the next chunk. After an error the restore is unusable.
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), SnapshotError> {
        let damaged = SnapshotError::Corrupt { chunk: self.chunks };
        if !is_valid_chunk(chunk) {
            return Err(damaged);
        }
        let (body, _) = chunk.split_at(chunk.len() - CHECKSUM_BYTES);
        let mut reader = ByteReader::new(body);
        let kind = reader.byte()?;
        let number = reader.varint("chunk number")?;
        if number != self.chunks {
            return Err(invalid("chunk number", 1, number).into());
        }
        match (self.expected, kind) {
            (Some(HEADER), HEADER) => self.read_header(&mut reader)?,
            (Some(RUNS), RUNS) => self.read_runs(&mut reader)?,
            (Some(RUNS | TOMBSTONES), TOMBSTONES) => self.read_tombstones(&mut reader)?,
            (Some(RUNS | TOMBSTONES), END) => self.read_end(&mut reader)?,
            _ => return Err(invalid("chunk kind", 0, kind.into()).into()),
        }
        self.expected = (kind != END).then_some(kind.max(RUNS));
        self.chunks += 1;
        Ok(reader.finish()?)
    }

    /// Returns the restored index.
    pub fn finish(self) -> Result<Index, SnapshotError> {
        if self.is_complete() { Ok(self.index) } else { Err(SnapshotError::Incomplete { got: self.chunks }) }
    }

    fn read_header(&mut self, reader: &mut ByteReader<'_>) -> Result<(), CodecError> {
        let nodes = &mut self.index.nodes;
        nodes.epoch_floor = Epoch(reader.varint("epoch floor")?);
        let departed = read_settings(reader, "departed nodes")?;
        if departed.len() > DEPARTED_MAX {
            return Err(invalid("departed nodes", reader.position(), departed.len() as u64));
        }
        nodes.departed = departed.into_iter().map(|(node, epoch)| (NodeId(node), Epoch(epoch))).collect();
        read_slots(nodes, reader)?;
        read_directives(&mut self.index.directives, reader)?;
        self.index.store.sweep_cursor = reader.varint_u32("sweep")?;
        let at = reader.position();
        let births = reader.varint_u32("births")?;
        // Births are even; odd marks a trimmed run.
        let even = u16::try_from(births).ok().filter(|births| births % 2 == 0);
        self.index.store.runs.last_birth = even.ok_or(invalid("births", at, births.into()))?;
        self.blocks = reader.varint("blocks")?;
        self.entries = reader.varint("entries")?;
        self.index.store.locations.expect_entries(self.entries);
        self.runs = reader.varint_u32("runs")?;
        Ok(())
    }

    fn read_runs(&mut self, reader: &mut ByteReader<'_>) -> Result<(), CodecError> {
        let at = reader.position();
        let first = reader.varint_u32("run")?;
        if first != self.index.store.runs.number_limit() {
            return Err(invalid("run", at, first.into()));
        }
        while reader.remaining() > 0 {
            self.read_run(reader)?;
        }
        Ok(())
    }

    fn read_run(&mut self, reader: &mut ByteReader<'_>) -> Result<(), CodecError> {
        let at = reader.position();
        let end = reader.varint_u32("end of a run")?;
        if end > RUN_BLOCKS_MAX || self.index.store.runs.number_limit() >= self.runs {
            return Err(invalid("end of a run", at, end.into()));
        }
        if end == 0 {
            self.index.store.runs.restore_run(PrefixRun::default());
            return Ok(());
        }
        let mut pages = Vec::new();
        for _ in 0..end.div_ceil(PAGE_BLOCKS) {
            pages.push(reader.varint_u32("page")?.checked_sub(1));
        }
        let before = reader.varint_u32("run before")?;
        let mut word = || reader.array().map(u16::from_le_bytes);
        let (offset, before_born, born, head, fork) = (word()?, word()?, word()?, word()?, word()?);
        let before = Predecessor { run: before, offset, birth: before_born };
        let mut holds = Vec::new();
        for _ in 0..reader.count("holds", 5)? {
            holds.push(self.read_extent(reader)?);
        }
        let mut heads = Vec::new();
        for _ in 0..reader.count("heads", 1)? {
            heads.push(reader.varint_u32("head")?);
        }
        let numbers: Vec<_> = pages.iter().map(|page| page.map(|page| page / 2)).collect();
        let run = PrefixRun::from_snapshot(end, born, head, fork, before, &numbers, &holds);
        let run = run.ok_or(invalid("run", at, end.into()))?;
        let mut present = Vec::new();
        for (nth, page) in (0..).zip(pages) {
            let Some(page) = page else { continue };
            let slots = run.start().max(nth * PAGE_BLOCKS)..end.min((nth + 1) * PAGE_BLOCKS);
            let hashes = read_hashes(slots, reader)?;
            present.push(RestoredPage { number: page / 2, is_canonical: page % 2 == 1, hashes });
        }
        let number = self.index.store.runs.number_limit();
        if !self.index.store.restore_run(run, &present, &heads, &mut self.unverified) {
            return Err(invalid("run", at, number.into()));
        }
        self.count_run(number);
        Ok(())
    }

    fn read_tombstones(&mut self, reader: &mut ByteReader<'_>) -> Result<(), CodecError> {
        loop {
            let at = reader.position();
            let page = reader.varint_u32("page")?;
            let octet = read_block_group(reader)?.block_group();
            if !self.index.store.restore_tombstone(page, octet, &mut self.unverified) {
                return Err(invalid("page", at, page.into()));
            }
            if reader.remaining() == 0 {
                return Ok(());
            }
        }
    }

    fn read_extent(&self, reader: &mut ByteReader<'_>) -> Result<Extent, CodecError> {
        let at = reader.position();
        let slot = reader.varint_u32("holder")?;
        let incarnation = reader.varint_u32("incarnation")?;
        let from = reader.varint_u32("first block of a hold")?;
        let blocks = reader.varint_u32("blocks of a hold")?;
        let bits = reader.byte()?;
        let tiers = TierSet::from_bits(bits).filter(|tiers| !tiers.is_empty());
        let tiers = tiers.ok_or(invalid("tiers", at, bits.into()))?;
        let number = |number: u32| u16::try_from(number).map_err(|_| invalid("hold", at, number.into()));
        let to = number(from.saturating_add(blocks))?;
        let hold = Extent { incarnation, slot: number(slot)?, from: number(from)?, to, tiers };
        let nodes = &self.index.nodes;
        // A current extent needs a live node; a stale one may belong to any past node.
        let is_live = nodes.state(hold.slot).is_some_and(|node| node.live);
        let is_current = hold.is_current(nodes.incarnations());
        // A later incarnation would start to count when the slot reaches it.
        let is_past = nodes.incarnations().get(usize::from(hold.slot)).is_some_and(|now| incarnation <= *now);
        if !is_past || (is_current && !is_live) {
            return Err(invalid("holder", at, slot.into()));
        }
        Ok(hold)
    }

    fn count_run(&mut self, run: u32) {
        let Index { nodes, store, .. } = &mut self.index;
        store.run_deltas(run, &mut |hold, tally| {
            if hold.is_current(nodes.incarnations()) {
                nodes.apply_delta(hold.slot, &tally);
            }
        });
    }

    fn read_end(&mut self, reader: &mut ByteReader<'_>) -> Result<(), SnapshotError> {
        self.index.store.locations.expect_entries(0);
        let store = &mut self.index.store;
        if !store.verify_pages(&self.unverified) {
            return Err(invalid("octets", 0, self.blocks).into());
        }
        if store.locations.len() != self.blocks {
            return Err(invalid("blocks", 0, self.blocks).into());
        }
        if store.locations.entries() != self.entries {
            return Err(invalid("entries", 0, self.entries).into());
        }
        if store.runs.number_limit() != self.runs || store.runs.last_is_free() {
            return Err(invalid("runs", 0, store.runs.number_limit().into()).into());
        }
        let digest: [u8; 16] = reader.array()?;
        if digest != self.index.digest() { Err(SnapshotError::DigestMismatch) } else { Ok(()) }
    }
}

/// The shared bytes of a page's hashes, as the first hash of the block group.
fn read_block_group(reader: &mut ByteReader<'_>) -> Result<BlockHash, CodecError> {
    let at = reader.position();
    let common: [u8; PLACE_BYTES] = reader.array()?;
    let mut hash = BlockHash::default();
    hash.0[..PLACE_BYTES].copy_from_slice(&common);
    if hash.position_in_group() != 0 {
        return Err(invalid("octet", at, common[1].into()));
    }
    Ok(hash)
}

/// The hashes of a page at some offsets of its run; at least one.
fn read_hashes(
    offsets: Range<u32>,
    reader: &mut ByteReader<'_>,
) -> Result<SmallVec<[BlockHash; PAGE_BLOCKS as usize]>, CodecError> {
    let octet = read_block_group(reader)?;
    let mut hashes = SmallVec::new();
    for offset in offsets {
        let mut hash = BlockHash::default();
        hash.0[PLACE_BYTES..].copy_from_slice(&reader.array::<DIGEST_BYTES>()?);
        hashes.push(hash.in_chain(octet.root_tag(), octet, offset as usize));
    }
    Ok(hashes)
}

fn read_slots(nodes: &mut Nodes, reader: &mut ByteReader<'_>) -> Result<(), CodecError> {
    for _ in 0..reader.count("slots", 2)? {
        let at = reader.position();
        let incarnation = reader.varint_u32("incarnation")?;
        let node = if reader.flag("node")? { Some(read_node(reader)?) } else { None };
        if !nodes.restore_slot(incarnation, node) {
            return Err(invalid("slot", at, incarnation.into()));
        }
    }
    let mut is_free: Vec<bool> = nodes.slots.iter().map(Option::is_none).collect();
    for _ in 0..reader.count("free slots", 1)? {
        let at = reader.position();
        let slot = reader.varint_u32("free slot")?;
        match is_free.get_mut(slot as usize) {
            Some(free) if *free => *free = false,
            _ => return Err(invalid("free slot", at, slot.into())),
        }
        nodes.free.push(slot as u16);
    }
    if is_free.contains(&true) {
        return Err(invalid("free slots", reader.position(), nodes.free.len() as u64));
    }
    let identities = nodes.iter().map(|node| node.record.identity);
    if identities.collect::<std::collections::BTreeSet<_>>().len() > 1 {
        return Err(invalid("identities", reader.position(), 2));
    }
    Ok(())
}

fn read_node(reader: &mut ByteReader<'_>) -> Result<NodeState, CodecError> {
    let record = read_record(reader)?;
    let epoch = Epoch(reader.varint("epoch")?);
    let live = reader.flag("live")?;
    let next_seq = Seq(reader.varint("sequence number")?);
    Ok(NodeState { live, next_seq, ..NodeState::new(record, epoch) })
}

fn read_directives(directives: &mut Directives, reader: &mut ByteReader<'_>) -> Result<(), CodecError> {
    let quotas = read_settings(reader, "quotas")?;
    directives.quotas = quotas.into_iter().map(|(key, value)| (TenantId(key), value)).collect();
    let ttls = read_settings(reader, "times to live")?;
    directives.ttls = ttls.into_iter().map(|(key, value)| (TtlGroupId(key), value)).collect();
    let mut before = None;
    for _ in 0..reader.count("pins", 5)? {
        let at = reader.position();
        let pin = read_pin(reader)?;
        if before >= Some(pin.pin) {
            return Err(invalid("pin", at, pin.pin.0));
        }
        before = Some(pin.pin);
        directives.insert_pin(pin);
    }
    directives.generation = Generation(reader.varint_u32("generation")?);
    Ok(())
}

/// Key-value pairs in strictly ascending key order.
fn read_settings(reader: &mut ByteReader<'_>, what: &'static str) -> Result<Vec<(u32, u64)>, CodecError> {
    let mut settings: Vec<(u32, u64)> = Vec::new();
    for _ in 0..reader.count(what, 2)? {
        let at = reader.position();
        let key = reader.varint_u32(what)?;
        if settings.last().is_some_and(|(before, _)| *before >= key) {
            return Err(invalid(what, at, key.into()));
        }
        settings.push((key, reader.varint(what)?));
    }
    Ok(settings)
}

impl Store {
    /// Adds a run with its unreleased pages in order, and the offsets of its entry points. Returns
    /// false if they are inconsistent.
    pub(super) fn restore_run(
        &mut self,
        run: PrefixRun,
        pages: &[RestoredPage],
        heads: &[u32],
        unproven: &mut UnverifiedPages,
    ) -> bool {
        let number = self.runs.restore_run(run);
        for page in pages {
            if !self.pages.allocate_exact(page.number) {
                return false;
            }
            page.hashes.first().inspect(|hash| self.locations.prefetch(**hash));
        }
        let run = self.runs.get(number).clone();
        let gaps = run.uncovered(run.start(), run.end());
        let mut pages = pages.iter();
        for nth in 0..run.end().div_ceil(PAGE_BLOCKS) {
            let first = run.start().max(nth * PAGE_BLOCKS);
            let last = run.end().min((nth + 1) * PAGE_BLOCKS);
            let is_held = |offset: &u32| !gaps.iter().any(|(from, to)| (from..to).contains(&offset));
            let live = (first..last).filter(is_held).fold(0u8, |bits, at| bits | 1 << (at % PAGE_BLOCKS));
            if run.page(nth).is_none() {
                if live != 0 {
                    return false;
                }
                continue;
            }
            let Some(page) = pages.next() else { return false };
            let place = PageSlot::new(page.number, first % PAGE_BLOCKS);
            let owner = PageOwner { run: number, nth };
            let (is_canonical, hashes) = (page.is_canonical, &page.hashes);
            if live == 0
                || !self.locations.restore_page(place, owner, is_canonical, hashes, live, &mut self.pages)
            {
                return false;
            }
            unproven.siblings.extend((!page.is_canonical).then_some(page.number));
        }
        self.total_copies += run.extents().iter().map(Extent::blocks).sum::<u64>();
        self.restore_entry_points(number, heads)
    }

    fn restore_entry_points(&mut self, number: u32, heads: &[u32]) -> bool {
        if !heads.is_sorted_by(|one, next| one < next) {
            return false;
        }
        for &offset in heads {
            let place =
                self.runs.get(number).page_slot(offset).filter(|place| self.pages.make_entry_point(*place));
            let Some(place) = place else { return false };
            self.entry_points.insert(self.pages.hash(place), RunPosition { run: number, offset });
        }
        self.has_entry_points(self.runs.get(number))
    }

    /// Whether each listed block of a run is an entry point or follows a listed block; otherwise
    /// lookups could not reach it.
    fn has_entry_points(&self, run: &PrefixRun) -> bool {
        let mut before = 0;
        run.pages().all(|page| {
            let (live, heads) =
                page.map_or((0, 0), |page| (self.pages.listed(page), self.pages.entry_points(page)));
            let follows = live << 1 | before;
            before = live >> (PAGE_BLOCKS - 1);
            live & !follows & !heads == 0
        })
    }

    /// Adds a tombstone page; numbers must ascend. Returns false if the page is invalid.
    pub(super) fn restore_tombstone(
        &mut self,
        number: u32,
        octet: u64,
        unproven: &mut UnverifiedPages,
    ) -> bool {
        let in_order = unproven.tombstones.last().is_none_or(|last| *last < number);
        unproven.tombstones.push(number);
        in_order && self.locations.restore_tombstone(number, octet, &mut self.pages)
    }

    /// Attaches pages to their canonical pages, once all are present. Returns false if they are
    /// inconsistent.
    pub(super) fn verify_pages(&mut self, unproven: &UnverifiedPages) -> bool {
        let UnverifiedPages { siblings: others, tombstones: stubs } = unproven;
        others.iter().all(|page| self.locations.attach_to_canonical(*page, &mut self.pages))
            && stubs.iter().all(|stub| self.pages.siblings(*stub) > 0)
    }
}
