//! The slices of a layer-wise fetch on their way into the caller's memory.
//!
//! [`SliceSink`] is that memory. [`FetchAssembly`] tracks one fetch on any path: the received
//! headers, the next slice of each block, and the first bad block. [`FrameSplitter`] passes on
//! whole frames slice by slice. Not here: the order of slices, and their wire format (`pieces.rs`).

use std::ops::Range;

use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::frame::{Frame, FrameHead};

use crate::pieces::PieceQueue;
use crate::{FetchAnswer, MissReason};

/// The requested layers of each block, and their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRequest {
    /// Layers; those that a block lacks are ignored.
    pub layers: Range<usize>,
    /// Order of arrival, as far as the path supports it and the blocks are readable.
    pub arrive: ArrivalOrder,
}

/// Destination of a fetch's slices. Positions count from the first requested block.
pub trait SliceSink: Send {
    /// Takes a block's header, before its slices. Headers come in prefix order. Returns `false` if
    /// it is not the requested block or does not fit: this block and all later ones are then
    /// dropped.
    fn head(&mut self, position: usize, head: &FrameHead) -> bool;

    /// Memory for a slice, as long as the header states. It is written before the next call, or not
    /// at all.
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]>;

    /// The slices of these layers are in their memory and match their checksums. The layers of a
    /// block come in order.
    fn slices_filled(&mut self, position: usize, layers: Range<usize>);

    /// A slice did not match its checksum, or had no memory: this block and all later ones are
    /// dropped.
    fn slice_rejected(&mut self, position: usize);

    /// Counts received encoded bytes, valid or not.
    fn count_received(&mut self, bytes: usize);
}

/// State of one layer-wise fetch.
pub struct FetchAssembly<'a> {
    sink: &'a mut dyn SliceSink,
    /// Requested layers of each block.
    layers: Range<usize>,
    /// Blocks with a header, from the first requested one on.
    blocks: Vec<BlockProgress>,
    /// Blocks from this position on are dropped.
    usable_blocks: usize,
    /// Bytes of slices still to come, over all blocks with a header.
    left_bytes: usize,
    /// Blocks that have a header and miss slices.
    open_blocks: usize,
    /// Something received was not as requested.
    has_bad_slice: bool,
    /// Whether received bytes are counted here, piece by piece; else the caller counts them.
    counts_received: bool,
}

struct BlockProgress {
    head: FrameHead,
    /// The next layer.
    next_layer: usize,
    /// One past the last layer.
    end_layer: usize,
}

impl<'a> FetchAssembly<'a> {
    /// For these layers of each block, as far as it has them.
    #[must_use]
    pub fn new(sink: &'a mut dyn SliceSink, layers: Range<usize>) -> FetchAssembly<'a> {
        FetchAssembly {
            sink,
            layers,
            blocks: Vec::new(),
            usable_blocks: usize::MAX,
            left_bytes: 0,
            open_blocks: 0,
            has_bad_slice: false,
            counts_received: true,
        }
    }

    /// Adds the header of the next block.
    pub fn add_header(&mut self, head: FrameHead) {
        let position = self.blocks.len();
        self.count(head.bytes().len());
        if position < self.usable_blocks && !self.sink.head(position, &head) {
            self.stop_at(position);
        }
        let (next, end) = clip_layers(&self.layers, &head);
        self.left_bytes += head.bytes_of(next..end);
        self.open_blocks += usize::from(next < end);
        self.blocks.push(BlockProgress { head, next_layer: next, end_layer: end });
    }

    /// Number of received headers.
    #[must_use]
    pub fn header_count(&self) -> usize {
        self.blocks.len()
    }

    /// Whether all of `wanted` blocks arrived, valid or not.
    pub(crate) fn is_complete(&self, wanted: usize) -> bool {
        self.blocks.len() >= wanted && self.open_blocks == 0
    }

    /// Bytes still to come, over all blocks with a header.
    pub(crate) fn left_bytes(&self) -> usize {
        self.left_bytes
    }

    /// Whether these are the next layers of a block with a header.
    pub(crate) fn is_next(&self, position: usize, layers: &Range<usize>) -> bool {
        self.blocks.get(position).is_some_and(|block| {
            block.next_layer == layers.start && !layers.is_empty() && layers.end <= block.end_layer
        })
    }

    /// Length of the next slice, and its memory; `None` if the block is dropped.
    pub(crate) fn slice(&mut self, position: usize, layer: usize) -> (usize, Option<&mut [u8]>) {
        let bytes = self.blocks[position].head.slice_bytes(layer).unwrap_or(0);
        if position >= self.usable_blocks {
            return (bytes, None);
        }
        // Called twice, because the sink must learn of a rejected block before its memory is
        // returned.
        let fits = self.sink.slice(position, layer).is_some_and(|room| room.len() == bytes);
        if !fits {
            self.reject(position);
            return (bytes, None);
        }
        (bytes, self.sink.slice(position, layer))
    }

    /// Checks a slice after it was written to its memory.
    pub(crate) fn check(&mut self, position: usize, layer: usize) {
        if position >= self.usable_blocks {
            return;
        }
        let head = &self.blocks[position].head;
        let is_good =
            self.sink.slice(position, layer).is_some_and(|room| head.verify_slice(layer, room).is_ok());
        if !is_good {
            self.reject(position);
        }
    }

    /// Copies the next layers of a block from contiguous bytes.
    pub fn take_slices(&mut self, position: usize, layers: Range<usize>, mut from: &[u8]) {
        for layer in layers.clone() {
            let bytes = self.blocks[position].head.slice_bytes(layer).unwrap_or(0);
            let (slice, rest) = from.split_at(bytes.min(from.len()));
            self.copy_slice(position, layer, slice);
            from = rest;
        }
        self.mark_received(position, layers);
    }

    /// Copies a slice into its memory and checks it on the way.
    fn copy_slice(&mut self, position: usize, layer: usize, from: &[u8]) {
        if position >= self.usable_blocks {
            return;
        }
        let head = &self.blocks[position].head;
        let is_good =
            self.sink.slice(position, layer).is_some_and(|room| head.copy_slice(layer, from, room).is_ok());
        if !is_good {
            self.reject(position);
        }
    }

    /// Records these layers of a block as received, valid or not.
    pub(crate) fn mark_received(&mut self, position: usize, layers: Range<usize>) {
        let block = &mut self.blocks[position];
        let bytes = block.head.bytes_of(layers.clone());
        block.next_layer = layers.end;
        self.open_blocks -= usize::from(block.next_layer == block.end_layer);
        self.left_bytes -= bytes;
        self.count(bytes);
        if position < self.usable_blocks {
            self.sink.slices_filled(position, layers);
        }
    }

    /// Number of leading blocks with all requested layers, all valid.
    #[must_use]
    pub fn complete_blocks(&self) -> usize {
        self.blocks
            .iter()
            .take(self.usable_blocks)
            .take_while(|block| block.next_layer == block.end_layer)
            .count()
    }

    /// Whether something received was not as requested.
    #[must_use]
    pub fn has_bad_slice(&self) -> bool {
        self.has_bad_slice
    }

    fn count(&mut self, bytes: usize) {
        if self.counts_received {
            self.sink.count_received(bytes);
        }
    }

    /// Drops this block and all later ones.
    fn stop_at(&mut self, position: usize) {
        (self.usable_blocks, self.has_bad_slice) = (position, true);
    }

    /// Rejects a bad block.
    pub fn reject(&mut self, position: usize) {
        self.stop_at(position);
        self.sink.slice_rejected(position);
    }
}

/// For a fetch that continues where another one ended.
impl<'a> FetchAssembly<'a> {
    /// Sets whether received bytes are counted here from now on.
    pub fn set_counting(&mut self, counts: bool) {
        self.counts_received = counts;
    }

    /// The first bad block.
    #[must_use]
    pub fn first_bad(&self) -> Option<usize> {
        self.has_bad_slice.then_some(self.usable_blocks)
    }

    /// Whether slices of this block are passed on.
    #[must_use]
    pub fn is_usable(&self, position: usize) -> bool {
        position < self.usable_blocks
    }

    /// Header of a block; `None` if it has not arrived.
    #[must_use]
    pub fn head_of(&self, position: usize) -> Option<&FrameHead> {
        self.blocks.get(position).map(|block| &block.head)
    }

    /// The next layer of a block; `None` if its header has not arrived.
    #[must_use]
    pub fn next_layer(&self, position: usize) -> Option<usize> {
        self.blocks.get(position).map(|block| block.next_layer)
    }

    /// Destination of the slices.
    pub fn sink(&mut self) -> &mut (dyn SliceSink + 'a) {
        self.sink
    }
}

/// First layer and end of `layers`, clipped to the layers of this block.
pub(crate) fn clip_layers(layers: &Range<usize>, head: &FrameHead) -> (usize, usize) {
    let end = layers.end.min(head.slice_count());
    (layers.start.min(end), end)
}

/// Whole frames, passed on in the order of slices: frames that are there together go layer by
/// layer.
pub(crate) struct FrameSplitter<'a> {
    filling: FetchAssembly<'a>,
    request: LayerRequest,
}

impl<'a> FrameSplitter<'a> {
    pub(crate) fn new(sink: &'a mut dyn SliceSink, request: LayerRequest) -> FrameSplitter<'a> {
        // A frame arrives as one, so its slices do not count as separate pieces.
        let filling =
            FetchAssembly { counts_received: false, ..FetchAssembly::new(sink, request.layers.clone()) };
        FrameSplitter { filling, request }
    }

    /// Number of leading valid blocks; `None` if all are valid.
    pub(crate) fn good_blocks(&self) -> Option<usize> {
        self.filling.has_bad_slice().then(|| self.filling.complete_blocks())
    }

    /// The final answer, without the invalid blocks.
    pub(crate) fn finish(&self, answer: FetchAnswer) -> FetchAnswer {
        match self.good_blocks() {
            Some(good) => answer.cut_short(good, MissReason::Corrupt),
            None => answer,
        }
    }

    /// Passes on the next blocks, in prefix order.
    pub(crate) fn split(&mut self, frames: &[Frame]) {
        let first = self.filling.header_count();
        let mut wave = PieceQueue::new(self.request.clone());
        for frame in frames {
            self.filling.sink.count_received(frame.bytes.len());
            // The header was valid before, but the peer may have changed it in shared memory.
            let Ok(head) = frame.head() else {
                self.filling.reject(self.filling.header_count());
                break;
            };
            self.filling.add_header(head.clone());
            wave.add(head, frame.bytes.clone());
        }
        while let Some(piece) = wave.next_piece() {
            let bytes = piece.bytes();
            self.filling.take_slices(first + piece.position, piece.layers, &bytes);
        }
    }
}
