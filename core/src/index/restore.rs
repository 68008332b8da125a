//! An index out of the chunks of a snapshot, one by one: what agrees with all the rest, or an error.
//!
//! A snapshot may be forged, so all is checked that the living index relies on to end, to stay within its memory and to
//! name the holders of a block. What only helps a lookup is taken as it stands: where a run hangs, goes off and was
//! born, and that the blocks of a run are a prefix, as it is of nodes. Not here: how chunks are written, and what is
//! in them (`snapshot.rs`).

use std::ops::Range;

use smallvec::SmallVec;

use super::bytes::{CodecError, Reader, invalid};
use super::codec::{read_pin, read_record};
use super::directives::Directives;
use super::holders::TierSet;
use super::nodes::{DEPARTED_MAX, NodeState, Nodes};
use super::pages::{PAGE_BLOCKS, Place};
use super::run::{Before, Hold, RUN_BLOCKS_MAX, Run};
use super::snapshot::{CHECK_BYTES, END, HEAD, OCTET_BYTES, RUNS, STUBS, SnapshotError, is_whole_chunk};
use super::store::{At, Store};
use super::{Index, IndexLimits};
use crate::id::{BlockHash, Epoch, Generation, GroupId, NodeId, Seq, TenantId};

/// A page of a run.
#[derive(Clone, Debug)]
pub(super) struct RestoredPage {
    pub(super) number: u32,
    /// Whether its octet is found by it.
    pub(super) is_anchor: bool,
    /// One for each offset of the run that falls into it, listed or not.
    pub(super) hashes: SmallVec<[BlockHash; PAGE_BLOCKS as usize]>,
}

/// Pages of which it shows only at the end whether they are what they say.
#[derive(Clone, Debug, Default)]
pub(super) struct Unproven {
    /// Pages whose octets are found by others.
    others: Vec<u32>,
    /// Anchors that list nothing.
    stubs: Vec<u32>,
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
        // Births are even; an odd one would be taken for that of a run whose end was cut off.
        let even = u16::try_from(births).ok().filter(|births| births % 2 == 0);
        self.index.store.runs.births = even.ok_or(invalid("births", at, births.into()))?;
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
    for _ in 0..reader.count("pins", 5)? {
        let at = reader.at();
        let pin = read_pin(reader)?;
        if before >= Some(pin.pin) {
            return Err(invalid("pin", at, pin.pin.0));
        }
        before = Some(pin.pin);
        directives.insert_pin(pin);
    }
    directives.generation = Generation(reader.number_u32("generation")?);
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

impl Store {
    /// Takes in a run, with those of its pages that were not given back, in order, and the offsets of heads. Answers
    /// false when it cannot be.
    pub(super) fn restore_run(
        &mut self,
        run: Run,
        pages: &[RestoredPage],
        heads: &[u32],
        unproven: &mut Unproven,
    ) -> bool {
        let number = self.runs.restore(run);
        for page in pages {
            if !self.pages.take_exactly(page.number) {
                return false;
            }
            page.hashes.first().inspect(|hash| self.places.prefetch(**hash));
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
            let place = Place::new(page.number, first % PAGE_BLOCKS);
            let whose = ((number, nth), page.is_anchor);
            if live == 0 || !self.places.restore(place, whose, (&page.hashes, live), &mut self.pages) {
                return false;
            }
            unproven.others.extend((!page.is_anchor).then_some(page.number));
        }
        self.held += run.holds().iter().map(Hold::blocks).sum::<u64>();
        self.restore_heads(number, heads)
    }

    fn restore_heads(&mut self, number: u32, heads: &[u32]) -> bool {
        if !heads.is_sorted_by(|one, next| one < next) {
            return false;
        }
        for &offset in heads {
            let place = self.runs.get(number).place(offset).filter(|place| self.pages.make_head(*place));
            let Some(place) = place else { return false };
            self.heads.insert(self.pages.hash(place), At { run: number, offset });
        }
        self.has_its_heads(self.runs.get(number))
    }

    /// Whether each listed block of a run is a head or follows a listed one: else no lookup would come to it.
    fn has_its_heads(&self, run: &Run) -> bool {
        let mut before = 0;
        run.pages().all(|page| {
            let (live, heads) = page.map_or((0, 0), |page| (self.pages.live(page), self.pages.heads(page)));
            let follows = live << 1 | before;
            before = live >> (PAGE_BLOCKS - 1);
            live & !follows & !heads == 0
        })
    }

    /// Takes in an anchor that lists nothing; they come by ascending number. Answers false when it cannot be.
    pub(super) fn restore_stub(&mut self, number: u32, octet: u64, unproven: &mut Unproven) -> bool {
        let in_order = unproven.stubs.last().is_none_or(|last| *last < number);
        unproven.stubs.push(number);
        in_order && self.places.restore_stub(number, octet, &mut self.pages)
    }

    /// Joins pages with their anchors, when all are there. Answers false when they do not fit together.
    pub(super) fn prove(&mut self, unproven: &Unproven) -> bool {
        let Unproven { others, stubs } = unproven;
        others.iter().all(|page| self.places.join_anchor(*page, &mut self.pages))
            && stubs.iter().all(|stub| self.pages.others(*stub) > 0)
    }
}
