//! A fetch by layers at the client's end: the heads of blocks are read, then slices, a layer of all blocks before the next.
//!
//! The node lends whole frames: which bytes of them are read, and in which order, is the reader's to say. What a link leaves
//! behind when it breaks stands, and the next one goes on behind it. Not here: how it is read (`reads.rs`), words with the node
//! (`fetch.rs`), which links there are (`path.rs`).

use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::lend::Descriptor;
use kvfleet_proto::frame::{Frame, FrameHead};

use super::fetch::{Signs, Stop, Terms, nonsense};
use super::reads::{Came, Reaches, read_all};
use crate::pieces::{Piece, Wave};
use crate::slices::Filling;
use crate::{AskedLayers, SliceSink};

/// Bytes that are read of a block to see its head: that of some hundred layers.
const HEAD_BYTES: u32 = 1 << 10;

/// Bytes of the heads of one message: those of 4,096 blocks of a thousand layers and more.
const HEADS_BYTES_MAX: u64 = 64 << 20;

/// The slices of one fetch, whichever links bring them.
pub(super) struct Slices<'a> {
    filling: Filling<'a>,
    asked: AskedLayers,
    /// Blocks in front of those that are asked for now: they came before.
    before: usize,
    came_whole: bool,
}

impl<'a> Slices<'a> {
    /// For these layers of each block.
    pub(super) fn new(sink: &'a mut dyn SliceSink, asked: AskedLayers) -> Slices<'a> {
        let filling = Filling::new(sink, asked.layers.clone());
        Slices { filling, asked, before: 0, came_whole: false }
    }

    pub(super) fn asked(&self) -> &AskedLayers {
        &self.asked
    }

    /// Leading blocks of which all came.
    pub(super) fn whole(&self) -> usize {
        self.filling.whole()
    }

    /// The same of those that are asked for now.
    pub(super) fn delivered(&self) -> usize {
        self.whole() - self.before
    }

    /// From now on what is behind the blocks that came whole is asked for.
    pub(super) fn go_on(&mut self) {
        self.before = self.whole();
    }

    /// Whether something that came was not what was asked.
    pub(super) fn is_spoilt(&self) -> bool {
        self.filling.is_spoilt()
    }

    /// A block came whole over the connection of a link, as those do that are larger than what cards read.
    pub(super) fn note_whole(&mut self) {
        self.came_whole = true;
    }

    /// Whether blocks come so; nothing where none came.
    pub(super) fn comes_whole(&self) -> Option<bool> {
        (self.filling.heads() > 0).then_some(self.came_whole)
    }

    /// Whether something is there of blocks behind those that came whole.
    pub(super) fn is_half_done(&self) -> bool {
        self.filling.heads() > self.whole()
    }

    /// Where slices go, as long as none came.
    pub(super) fn untouched(&mut self) -> Option<&mut (dyn SliceSink + 'a)> {
        (self.filling.heads() == 0 && !self.is_spoilt()).then(|| self.filling.sink())
    }

    /// A block came whole, the `nth` of those that are asked for now.
    pub(super) fn frame(&mut self, nth: usize, frame: &Frame) {
        // It came as one: that its slices follow each other at once says nothing of the path.
        self.filling.counts(false);
        self.filling.sink().received(frame.bytes.len());
        let mut wave = Wave::new(self.asked.clone());
        if let Some((head, first)) = self.head(nth, &frame.bytes, frame.bytes.len()) {
            wave.add_from(first, head, frame.bytes.clone());
        }
        while let Some(piece) = wave.next() {
            self.filling.take(self.before + nth, piece.layers.clone(), &piece.bytes());
        }
        self.filling.counts(true);
    }

    /// Blocks of those that are asked for now that are of use, where one was wrong.
    pub(super) fn of_use(&self) -> Option<usize> {
        self.filling.first_wrong().map(|wrong| wrong - self.before)
    }

    /// A frame of `len` bytes begins so: its head, and which layer comes next of it; nothing when it is of no use.
    fn head(&mut self, nth: usize, bytes: &[u8], len: usize) -> Option<(FrameHead, usize)> {
        let position = self.before + nth;
        if !self.filling.is_usable(position) {
            return None;
        }
        let Some(head) = FrameHead::read(bytes).ok().filter(|head| head.frame_bytes() == len) else {
            self.filling.spoil(position);
            return None;
        };
        // Of one that came before, slices go on behind those that are there.
        match self.filling.head_of(position) {
            None => self.filling.head(head.clone()),
            Some(before) if *before == head => {}
            Some(_) => self.filling.spoil(position),
        }
        let first = self.filling.next(position)?;
        self.filling.is_usable(position).then_some((head, first))
    }
}

/// What is to be read of some blocks.
pub(super) struct Plan {
    wave: Wave<Descriptor>,
    /// How many bytes that are.
    pub(super) bytes: u64,
    /// Position of the first of them.
    first: usize,
}

/// Reads the heads of these rows, the first of which is the `nth` block of those that are asked for now.
pub(super) async fn plan(
    slices: &mut Slices<'_>,
    (nth, rows): (usize, &[Descriptor]),
    reaches: &Reaches<'_>,
    terms: &Terms,
    signs: &mut Signs<'_>,
) -> Result<Plan, Stop> {
    let of_use = slices.of_use().map_or(rows.len(), |blocks| blocks.saturating_sub(nth).min(rows.len()));
    let rows = &rows[..of_use];
    let heads = read_heads(rows, reaches, terms, signs).await?;
    let mut plan = Plan { wave: Wave::new(slices.asked().clone()), bytes: 0, first: slices.before + nth };
    for (block, (row, bytes)) in rows.iter().zip(&heads).enumerate() {
        let Some((head, first)) = slices.head(nth + block, bytes, row.len as usize) else { break };
        plan.bytes += head.bytes_of(first..slices.asked().layers.end.min(head.slice_count())) as u64;
        plan.wave.add_from(first, head, *row);
    }
    Ok(plan)
}

/// Reads what is planned.
pub(super) async fn read(
    slices: &mut Slices<'_>,
    Plan { mut wave, first, .. }: Plan,
    reaches: &Reaches<'_>,
    terms: &Terms,
    signs: &mut Signs<'_>,
) -> Result<(), Stop> {
    // What lies behind a wrong slice is not read any more.
    let usable = AtomicUsize::new(usize::MAX);
    let wanted = || {
        let is_usable = |piece: &Piece<Descriptor>| piece.position < usable.load(Ordering::Relaxed);
        let piece = std::iter::from_fn(|| wave.next()).find(is_usable)?;
        // A frame is as long as its row says, so this fits.
        let part = piece.at.start as u32..piece.at.end as u32;
        let row = piece.of;
        Some((piece, row, part))
    };
    let take = |piece: Piece<Descriptor>, came: Option<Came<'_>>| {
        let bytes = came.as_ref().map_or(&[][..], |came| came.bytes());
        slices.filling.take(first + piece.position, piece.layers, bytes);
        if !slices.filling.is_usable(first + piece.position) {
            usable.fetch_min(piece.position, Ordering::Relaxed);
        }
        Ok(None)
    };
    read_all(reaches, terms, signs, wanted, take).await
}

/// The first bytes of each block, from which its head can be read.
async fn read_heads(
    rows: &[Descriptor],
    reaches: &Reaches<'_>,
    terms: &Terms,
    signs: &mut Signs<'_>,
) -> Result<Vec<Vec<u8>>, Stop> {
    let mut heads = vec![Vec::new(); rows.len()];
    let mut lengths: Vec<u32> = rows.iter().map(|row| row.len.min(HEAD_BYTES)).collect();
    // Most heads are as short; others say how long they are, which is believed once.
    for _ in 0..2 {
        if lengths.iter().map(|bytes| u64::from(*bytes)).sum::<u64>() > HEADS_BYTES_MAX {
            return Err(nonsense(&"blocks of more layers than any model has"));
        }
        let mut short = (0..rows.len())
            .filter(|nth| heads[*nth].len() < lengths[*nth] as usize)
            .collect::<Vec<_>>()
            .into_iter();
        let wanted = || short.next().map(|nth| (nth, rows[nth], 0..lengths[nth]));
        let take = |nth: usize, came: Option<Came<'_>>| {
            heads[nth] = came.map_or_else(Vec::new, |came| came.bytes().to_vec());
            Ok(None)
        };
        read_all(reaches, terms, signs, wanted, take).await?;
        for (nth, row) in rows.iter().enumerate() {
            // What does not begin a frame is found out by whoever reads the head.
            let needs = heads[nth].first_chunk().and_then(|start| FrameHead::length(start).ok());
            let needs = needs.and_then(|needs| u32::try_from(needs).ok()).filter(|needs| *needs <= row.len);
            lengths[nth] = lengths[nth].max(needs.unwrap_or(0));
        }
    }
    Ok(heads)
}
