//! The slices of a fetch, layer by layer, on their way into memory of the caller.
//!
//! [`SliceSink`] is that memory. [`Filling`] is the account of one fetch, the same for every path: which heads came, which
//! slice of each block is next, and from which block on nothing is good any more. [`Whole`] hands frames on that came
//! whole. Not here: the order in which slices are sent, and their form on a wire (`pieces.rs`).

use std::ops::Range;

use kv_core::pipeline::Arrive;
use kvfleet_proto::frame::{Frame, FrameHead};

use crate::pieces::Wave;
use crate::{FetchAnswer, MissReason};

/// What is asked of each block of a fetch, and in which order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedLayers {
    /// Those of them that a block has.
    pub layers: Range<usize>,
    /// As far as the path can, and blocks are readable.
    pub arrive: Arrive,
}

/// Where the slices of a fetch go. Positions count from the first block asked.
pub trait SliceSink: Send {
    /// The head of a block, before any slice of it; heads come in prefix order. `false` when it is not the head of the
    /// block asked, or does not fit: then this block and all behind it are not handed on.
    fn head(&mut self, position: usize, head: &FrameHead) -> bool;

    /// Memory for a slice, as long as the head said. It is written before the next call, or not at all.
    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]>;

    /// Slices of these layers are in their memory and match their sums. The layers of a block come in order.
    fn filled(&mut self, position: usize, layers: Range<usize>);

    /// A slice did not match its sum, or had no memory: this block and all behind it are not handed on any more.
    fn wrong(&mut self, position: usize);

    /// So many encoded bytes came, good or not.
    fn received(&mut self, bytes: usize);
}

/// The account of one fetch.
pub(crate) struct Filling<'a> {
    sink: &'a mut dyn SliceSink,
    /// Asked of each block.
    layers: Range<usize>,
    /// Whose heads came, from the first asked on.
    blocks: Vec<Block>,
    /// Blocks from this position on are not handed on.
    usable: usize,
    /// Bytes of slices that are still to come of the heads that came.
    left_bytes: usize,
    /// Blocks whose heads came and that are not complete.
    open: usize,
    /// Something that came was not what was asked.
    is_spoilt: bool,
    /// Whether what comes is told piece by piece; else by whoever knows when it came.
    counts: bool,
}

struct Block {
    head: FrameHead,
    /// The layer that comes next.
    next: usize,
    /// One past the last that comes.
    end: usize,
}

impl<'a> Filling<'a> {
    /// For these layers of each block; of a block that has fewer, those that it has.
    pub(crate) fn new(sink: &'a mut dyn SliceSink, layers: Range<usize>) -> Filling<'a> {
        Filling {
            sink,
            layers,
            blocks: Vec::new(),
            usable: usize::MAX,
            left_bytes: 0,
            open: 0,
            is_spoilt: false,
            counts: true,
        }
    }

    /// The head of the next block.
    pub(crate) fn head(&mut self, head: FrameHead) {
        let position = self.blocks.len();
        self.count(head.bytes().len());
        if position < self.usable && !self.sink.head(position, &head) {
            self.refuse(position);
        }
        let (next, end) = clip(&self.layers, &head);
        self.left_bytes += head.bytes_of(next..end);
        self.open += usize::from(next < end);
        self.blocks.push(Block { head, next, end });
    }

    /// Heads that came.
    pub(crate) fn heads(&self) -> usize {
        self.blocks.len()
    }

    /// Whether all of so many blocks came, good or not.
    pub(crate) fn is_over(&self, wanted: usize) -> bool {
        self.blocks.len() >= wanted && self.open == 0
    }

    /// Bytes that are still to come of blocks whose heads came.
    pub(crate) fn left_bytes(&self) -> usize {
        self.left_bytes
    }

    /// Whether these are the layers that come next of a block whose head came.
    pub(crate) fn is_next(&self, position: usize, layers: &Range<usize>) -> bool {
        self.blocks
            .get(position)
            .is_some_and(|block| block.next == layers.start && !layers.is_empty() && layers.end <= block.end)
    }

    /// Length of a slice whose turn it is, and its memory; none when it is of no use any more.
    pub(crate) fn slice(&mut self, position: usize, layer: usize) -> (usize, Option<&mut [u8]>) {
        let bytes = self.blocks[position].head.slice_bytes(layer).unwrap_or(0);
        if position >= self.usable {
            return (bytes, None);
        }
        // Asked twice, because what is wrong must be said to the one who lent the memory.
        let fits = self.sink.slice(position, layer).is_some_and(|room| room.len() == bytes);
        if !fits {
            self.spoil(position);
            return (bytes, None);
        }
        (bytes, self.sink.slice(position, layer))
    }

    /// What was written into a slice's memory.
    pub(crate) fn check(&mut self, position: usize, layer: usize) {
        if position >= self.usable {
            return;
        }
        let head = &self.blocks[position].head;
        let is_good =
            self.sink.slice(position, layer).is_some_and(|room| head.verify_slice(layer, room).is_ok());
        if !is_good {
            self.spoil(position);
        }
    }

    /// These layers of a block came, which come next: fills their memory from where they lie, one behind the other.
    pub(crate) fn take(&mut self, position: usize, layers: Range<usize>, mut from: &[u8]) {
        for layer in layers.clone() {
            let bytes = self.blocks[position].head.slice_bytes(layer).unwrap_or(0);
            let (slice, rest) = from.split_at(bytes.min(from.len()));
            self.copy(position, layer, slice);
            from = rest;
        }
        self.came(position, layers);
    }

    /// Fills a slice's memory from where it lies, and checks it on the way.
    fn copy(&mut self, position: usize, layer: usize, from: &[u8]) {
        if position >= self.usable {
            return;
        }
        let head = &self.blocks[position].head;
        let is_good =
            self.sink.slice(position, layer).is_some_and(|room| head.copy_slice(layer, from, room).is_ok());
        if !is_good {
            self.spoil(position);
        }
    }

    /// These layers of a block came, good or not.
    pub(crate) fn came(&mut self, position: usize, layers: Range<usize>) {
        let block = &mut self.blocks[position];
        let bytes = block.head.bytes_of(layers.clone());
        block.next = layers.end;
        self.open -= usize::from(block.next == block.end);
        self.left_bytes -= bytes;
        self.count(bytes);
        if position < self.usable {
            self.sink.filled(position, layers);
        }
    }

    /// Leading blocks of which all came that was asked, and was good.
    pub(crate) fn whole(&self) -> usize {
        self.blocks.iter().take(self.usable).take_while(|block| block.next == block.end).count()
    }

    /// Whether something that came was not what was asked.
    pub(crate) fn is_spoilt(&self) -> bool {
        self.is_spoilt
    }

    fn count(&mut self, bytes: usize) {
        if self.counts {
            self.sink.received(bytes);
        }
    }

    /// Nothing from this block on is handed on any more.
    fn refuse(&mut self, position: usize) {
        (self.usable, self.is_spoilt) = (position, true);
    }

    /// What came of a block is not what was asked.
    pub(crate) fn spoil(&mut self, position: usize) {
        self.refuse(position);
        self.sink.wrong(position);
    }
}

/// What a fetch asks that goes on where another one ended.
#[cfg(feature = "rdma")]
impl<'a> Filling<'a> {
    /// Whether what comes from now on is told piece by piece.
    pub(crate) fn counts(&mut self, counts: bool) {
        self.counts = counts;
    }

    /// The first block that was wrong.
    pub(crate) fn first_wrong(&self) -> Option<usize> {
        self.is_spoilt.then_some(self.usable)
    }

    /// What comes of this block is handed on.
    pub(crate) fn is_usable(&self, position: usize) -> bool {
        position < self.usable
    }

    /// The head of a block, if it came.
    pub(crate) fn head_of(&self, position: usize) -> Option<&FrameHead> {
        self.blocks.get(position).map(|block| &block.head)
    }

    /// The layer of a block that comes next, if its head came.
    pub(crate) fn next(&self, position: usize) -> Option<usize> {
        self.blocks.get(position).map(|block| block.next)
    }

    /// Where slices go.
    pub(crate) fn sink(&mut self) -> &mut (dyn SliceSink + 'a) {
        self.sink
    }
}

/// What there is of `layers` in a block.
pub(crate) fn clip(layers: &Range<usize>, head: &FrameHead) -> (usize, usize) {
    let end = layers.end.min(head.slice_count());
    (layers.start.min(end), end)
}

/// Frames that came whole, handed on in the order of slices: those that are there together go layer by layer.
pub(crate) struct Whole<'a> {
    filling: Filling<'a>,
    asked: AskedLayers,
}

impl<'a> Whole<'a> {
    pub(crate) fn new(sink: &'a mut dyn SliceSink, asked: AskedLayers) -> Whole<'a> {
        // A frame came as one: that its slices follow each other at once says nothing of the path.
        let filling = Filling { counts: false, ..Filling::new(sink, asked.layers.clone()) };
        Whole { filling, asked }
    }

    /// How many leading blocks were good, where not all were.
    pub(crate) fn spoilt(&self) -> Option<usize> {
        self.filling.is_spoilt().then(|| self.filling.whole())
    }

    /// What a fetch ended with, less what was not good.
    pub(crate) fn conclude(&self, answer: FetchAnswer) -> FetchAnswer {
        match self.spoilt() {
            Some(good) => answer.cut_short(good, MissReason::Corrupt),
            None => answer,
        }
    }

    /// The next blocks, in prefix order.
    pub(crate) fn take(&mut self, frames: &[Frame]) {
        let first = self.filling.heads();
        let mut wave = Wave::new(self.asked.clone());
        for frame in frames {
            self.filling.sink.received(frame.bytes.len());
            // A frame whose head parsed once parses again, but where a peer changes it meanwhile.
            let Ok(head) = frame.head() else {
                self.filling.spoil(self.filling.heads());
                break;
            };
            self.filling.head(head.clone());
            wave.add(head, frame.bytes.clone());
        }
        while let Some(piece) = wave.next() {
            let bytes = piece.bytes();
            self.filling.take(first + piece.position, piece.layers, &bytes);
        }
    }
}
