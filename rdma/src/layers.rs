//! A fetch by layers at the client's end: reads the heads of blocks, then slices, one layer of all
//! blocks before the next.
//!
//! The node grants whole frames; the reader decides the bytes to read and their order. Slices that
//! arrived before a link broke stay, and the next link continues behind them. Not here: the reads
//! (`reads.rs`), messages to the node (`fetch.rs`), which links exist (`path.rs`).

use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::lease_grant::GrantDescriptor;
use kvfleet_proto::frame::{Frame, FrameHead};
use kvfleet_transport::upgrade::{FetchAssembly, Piece, PieceQueue};
use kvfleet_transport::{LayerRequest, SliceSink};

use super::fetch::{FetchStop, GrantTerms, ReturnSender, malformed};
use super::reads::{ReadBuffer, ReadChannels, read_all};

/// Bytes that are read of a block to see its head: enough for about a hundred layers.
const HEAD_BYTES: u32 = 1 << 10;

/// Maximum bytes of the heads of one message: enough for 4,096 blocks of more than a thousand
/// layers.
const HEADS_BYTES_MAX: u64 = 64 << 20;

/// The slices of one fetch over all its links.
pub(super) struct SliceFetch<'a> {
    filling: FetchAssembly<'a>,
    asked: LayerRequest,
    /// Blocks before those of the current request, which are complete.
    delivered_before: usize,
    is_frame_sent: bool,
}

impl<'a> SliceFetch<'a> {
    /// A fetch of these layers of each block.
    pub(super) fn new(sink: &'a mut dyn SliceSink, asked: LayerRequest) -> SliceFetch<'a> {
        let filling = FetchAssembly::new(sink, asked.layers.clone());
        SliceFetch { filling, asked, delivered_before: 0, is_frame_sent: false }
    }

    pub(super) fn asked(&self) -> &LayerRequest {
        &self.asked
    }

    /// Complete leading blocks.
    pub(super) fn complete_blocks(&self) -> usize {
        self.filling.complete_blocks()
    }

    /// Complete leading blocks of the current request.
    pub(super) fn delivered_blocks(&self) -> usize {
        self.complete_blocks() - self.delivered_before
    }

    /// Continues behind the complete blocks with the next request.
    pub(super) fn advance(&mut self) {
        self.delivered_before = self.complete_blocks();
    }

    /// Whether received bytes did not match the request.
    pub(super) fn is_corrupt(&self) -> bool {
        self.filling.has_bad_slice()
    }

    /// Records that a whole frame came over the connection, as for frames larger than cards read.
    pub(super) fn note_frame(&mut self) {
        self.is_frame_sent = true;
    }

    /// Whether blocks come as whole frames; `None` if none came.
    pub(super) fn sends_frames(&self) -> Option<bool> {
        (self.filling.header_count() > 0).then_some(self.is_frame_sent)
    }

    /// Whether slices arrived of blocks behind the complete ones.
    pub(super) fn has_partial_blocks(&self) -> bool {
        self.filling.header_count() > self.complete_blocks()
    }

    /// The sink, if no slice was delivered yet.
    pub(super) fn unused_sink(&mut self) -> Option<&mut (dyn SliceSink + 'a)> {
        (self.filling.header_count() == 0 && !self.is_corrupt()).then(|| self.filling.sink())
    }

    /// Delivers the `nth` block of the current request as a whole.
    pub(super) fn put_frame(&mut self, nth: usize, frame: &Frame) {
        // The frame came at once, so the timing of its slices does not describe the path.
        self.filling.set_counting(false);
        self.filling.sink().count_received(frame.bytes.len());
        let mut wave = PieceQueue::new(self.asked.clone());
        if let Some((head, first)) = self.accept_head(nth, &frame.bytes, frame.bytes.len()) {
            wave.add_from(first, head, frame.bytes.clone());
        }
        while let Some(piece) = wave.next_piece() {
            self.filling.take_slices(self.delivered_before + nth, piece.layers.clone(), &piece.bytes());
        }
        self.filling.set_counting(true);
    }

    /// Useful leading blocks of the current request, if a block was corrupt.
    pub(super) fn usable_blocks(&self) -> Option<usize> {
        self.filling.first_bad().map(|wrong| wrong - self.delivered_before)
    }

    /// Checks the head of a frame of `len` bytes. Returns the head and the next layer to read, or
    /// `None` if the frame is useless.
    fn accept_head(&mut self, nth: usize, bytes: &[u8], len: usize) -> Option<(FrameHead, usize)> {
        let position = self.delivered_before + nth;
        if !self.filling.is_usable(position) {
            return None;
        }
        let Some(head) = FrameHead::read(bytes).ok().filter(|head| head.frame_bytes() == len) else {
            self.filling.reject(position);
            return None;
        };
        // For a block that an earlier link began, slices continue behind those that arrived.
        match self.filling.head_of(position) {
            None => self.filling.add_header(head.clone()),
            Some(before) if *before == head => {}
            Some(_) => self.filling.reject(position),
        }
        let first = self.filling.next_layer(position)?;
        self.filling.is_usable(position).then_some((head, first))
    }
}

/// The bytes to read of some blocks.
pub(super) struct SlicePlan {
    wave: PieceQueue<GrantDescriptor>,
    /// Number of bytes to read.
    pub(super) bytes: u64,
    /// Position of the first block.
    first_block: usize,
}

/// Reads the heads of these rows; the first row is the `nth` block of the current request.
pub(super) async fn plan_slices(
    slices: &mut SliceFetch<'_>,
    nth: usize,
    rows: &[GrantDescriptor],
    reaches: &ReadChannels<'_>,
    terms: &GrantTerms,
    signs: &mut ReturnSender<'_>,
) -> Result<SlicePlan, FetchStop> {
    let of_use =
        slices.usable_blocks().map_or(rows.len(), |blocks| blocks.saturating_sub(nth).min(rows.len()));
    let rows = &rows[..of_use];
    let heads = read_heads(rows, reaches, terms, signs).await?;
    let mut plan = SlicePlan {
        wave: PieceQueue::new(slices.asked().clone()),
        bytes: 0,
        first_block: slices.delivered_before + nth,
    };
    for (block, (row, bytes)) in rows.iter().zip(&heads).enumerate() {
        let Some((head, first)) = slices.accept_head(nth + block, bytes, row.len as usize) else { break };
        plan.bytes += head.bytes_of(first..slices.asked().layers.end.min(head.slice_count())) as u64;
        plan.wave.add_from(first, head, *row);
    }
    Ok(plan)
}

/// Reads the planned slices.
pub(super) async fn read_slices(
    slices: &mut SliceFetch<'_>,
    SlicePlan { mut wave, first_block: first, .. }: SlicePlan,
    reaches: &ReadChannels<'_>,
    terms: &GrantTerms,
    signs: &mut ReturnSender<'_>,
) -> Result<(), FetchStop> {
    // Slices behind a corrupt one are not read any more.
    let usable = AtomicUsize::new(usize::MAX);
    let wanted = || {
        let is_usable = |piece: &Piece<GrantDescriptor>| piece.position < usable.load(Ordering::Relaxed);
        let piece = std::iter::from_fn(|| wave.next_piece()).find(is_usable)?;
        // A frame is no longer than its row says, and that is a `u32`.
        let part = piece.range.start as u32..piece.range.end as u32;
        let row = piece.data;
        Some((piece, row, part))
    };
    let take = |piece: Piece<GrantDescriptor>, came: Option<ReadBuffer<'_>>| {
        let bytes = came.as_ref().map_or(&[][..], |came| came.bytes());
        slices.filling.take_slices(first + piece.position, piece.layers, bytes);
        if !slices.filling.is_usable(first + piece.position) {
            usable.fetch_min(piece.position, Ordering::Relaxed);
        }
        Ok(None)
    };
    read_all(reaches, terms, signs, wanted, take).await
}

/// Reads the first bytes of each block, enough to parse its head.
async fn read_heads(
    rows: &[GrantDescriptor],
    reaches: &ReadChannels<'_>,
    terms: &GrantTerms,
    signs: &mut ReturnSender<'_>,
) -> Result<Vec<Vec<u8>>, FetchStop> {
    let mut heads = vec![Vec::new(); rows.len()];
    let mut lengths: Vec<u32> = rows.iter().map(|row| row.len.min(HEAD_BYTES)).collect();
    // Most heads fit; longer ones state their length, which is believed once.
    for _ in 0..2 {
        if lengths.iter().map(|bytes| u64::from(*bytes)).sum::<u64>() > HEADS_BYTES_MAX {
            return Err(malformed(&"blocks of more layers than any model has"));
        }
        let mut short = (0..rows.len())
            .filter(|nth| heads[*nth].len() < lengths[*nth] as usize)
            .collect::<Vec<_>>()
            .into_iter();
        let wanted = || short.next().map(|nth| (nth, rows[nth], 0..lengths[nth]));
        let take = |nth: usize, came: Option<ReadBuffer<'_>>| {
            heads[nth] = came.map_or_else(Vec::new, |came| came.bytes().to_vec());
            Ok(None)
        };
        read_all(reaches, terms, signs, wanted, take).await?;
        for (nth, row) in rows.iter().enumerate() {
            // Bytes that are not a frame fail when the head is parsed.
            let needs = heads[nth].first_chunk().and_then(|start| FrameHead::length(start).ok());
            let needs = needs.and_then(|needs| u32::try_from(needs).ok()).filter(|needs| *needs <= row.len);
            lengths[nth] = lengths[nth].max(needs.unwrap_or(0));
        }
    }
    Ok(heads)
}
