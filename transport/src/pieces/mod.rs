//! Slices of several blocks on one stream: layer by layer over all available blocks, or block by
//! block.
//!
//! The answer to a layer-wise fetch consists of *pieces*, each behind eight bytes: the block's
//! position u32, the first layer u16, the number of layers u16 (little endian). A piece without
//! layers is the header of the block's frame. Headers come in prefix order, each before the slices
//! of its block; the layers of one block come in order. Position `u32::MAX` ends the answer early,
//! and its first layer is the number of the reason (0: none). Both sides know the lengths from the
//! headers.
//!
//! The sender chooses the next block ([`PieceQueue`]): the one furthest behind. So blocks from a
//! slow medium catch up, and no other block waits for them. Not here: the reader's handling of
//! slices (`slices.rs`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::frame::FrameHead;

use crate::MissReason;
use crate::slices::{FetchAssembly, LayerRequest, clip_layers};
use crate::stream::{ItemError, Source};

/// Bytes before each piece.
const PIECE_HEAD_BYTES: usize = 8;

/// Position number that stands for the end.
const END: u32 = u32::MAX;

/// Layer by layer, slices are sent together up to this many bytes, because each piece costs both
/// ends some work.
const PIECE_BYTES: usize = 16 << 10;

/// Buffer for discarded bytes.
const DISCARD_BYTES: usize = 4 << 10;

/// The send order of slices. `T` is the data of a block: the frame's bytes, or their location.
pub struct PieceQueue<T> {
    request: LayerRequest,
    blocks: Vec<Option<QueuedBlock<T>>>,
    /// Unsent blocks, the next one first: by next layer and position, or by position alone.
    order: BinaryHeap<Reverse<(usize, usize)>>,
}

/// A block with unsent slices.
struct QueuedBlock<T> {
    head: FrameHead,
    /// The next slice, and its offset in the frame.
    next_layer: usize,
    offset: usize,
    data: T,
}

/// Contiguous slices of a block.
pub struct Piece<T> {
    /// Position counted from the first added block.
    pub position: usize,
    /// Its layers.
    pub layers: Range<usize>,
    /// Byte range in the frame.
    pub range: Range<usize>,
    /// Data of the block.
    pub data: T,
}

impl<T: Clone> PieceQueue<T> {
    /// A queue for these layers of each block.
    #[must_use]
    pub fn new(request: LayerRequest) -> PieceQueue<T> {
        PieceQueue { request, blocks: Vec::new(), order: BinaryHeap::new() }
    }

    fn queue(&mut self, position: usize, layer: usize) {
        let rank = if self.request.arrive == ArrivalOrder::ByLayer { layer } else { 0 };
        self.order.push(Reverse((rank, position)));
    }

    /// Number of added blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Adds the next block.
    pub(crate) fn add(&mut self, head: FrameHead, of: T) {
        let (first, _) = clip_layers(&self.request.layers, &head);
        self.add_from(first, head, of);
    }

    /// Adds the next block; its layers before `first` were sent already.
    pub fn add_from(&mut self, first: usize, head: FrameHead, of: T) {
        let (_, end) = clip_layers(&self.request.layers, &head);
        if first < end {
            self.queue(self.blocks.len(), first);
        }
        let at = head.bytes().len() + head.bytes_of(0..first);
        self.blocks.push((first < end).then_some(QueuedBlock {
            head,
            next_layer: first,
            offset: at,
            data: of,
        }));
    }

    /// The next piece to send; `None` if all added blocks are sent.
    pub fn next_piece(&mut self) -> Option<Piece<T>> {
        let Reverse((_, position)) = self.order.pop()?;
        let slot = self.blocks.get_mut(position)?;
        let sending = slot.as_mut()?;
        let (_, last) = clip_layers(&self.request.layers, &sending.head);
        let most = if self.request.arrive == ArrivalOrder::ByLayer { PIECE_BYTES } else { usize::MAX };
        let (first, from) = (sending.next_layer, sending.offset);
        while sending.next_layer < last && (sending.next_layer == first || sending.offset - from < most) {
            sending.offset += sending.head.slice_bytes(sending.next_layer).unwrap_or(0);
            sending.next_layer += 1;
        }
        let (end, at) = (sending.next_layer, from..sending.offset);
        let of = sending.data.clone();
        if end < last {
            self.queue(position, end);
        } else {
            *slot = None;
        }
        Some(Piece { position, layers: first..end, range: at, data: of })
    }
}

impl Piece<Bytes> {
    /// The bytes of the piece; fewer if the frame is shorter than its header states.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        let end = self.range.end.min(self.data.len());
        self.data.slice(self.range.start.min(end)..end)
    }

    /// The bytes before the piece on the wire.
    pub(crate) fn start(&self) -> Bytes {
        start(self.position, self.layers.start, self.layers.len())
    }
}

/// The bytes before the header of a block's frame.
pub(crate) fn head_start(position: usize) -> Bytes {
    start(position, 0, 0)
}

/// The early end of the answer, with the reason if known.
pub(crate) fn end(reason: Option<MissReason>) -> Bytes {
    start(END as usize, reason.map_or(0, |reason| reason as usize), 0)
}

fn start(position: usize, first: usize, count: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(PIECE_HEAD_BYTES);
    bytes.put_u32_le(u32::try_from(position).unwrap_or(END));
    bytes.put_u16_le(u16::try_from(first).unwrap_or(u16::MAX));
    bytes.put_u16_le(u16::try_from(count).unwrap_or(u16::MAX));
    bytes.freeze()
}

/// Receives the pieces of `wanted` blocks into a fetch's memory. `Ok(Some(reason))` if the peer
/// ended early.
///
/// # Errors
/// When the stream failed, or carries invalid pieces.
pub(crate) async fn receive(
    source: &mut impl Source,
    wanted: usize,
    filling: &mut FetchAssembly<'_>,
) -> Result<Option<Option<MissReason>>, ItemError> {
    while !filling.is_complete(wanted) {
        let mut start = [0; PIECE_HEAD_BYTES];
        read(source, &mut start, filling.left_bytes()).await?;
        let position = u32::from_le_bytes([start[0], start[1], start[2], start[3]]);
        let first = usize::from(u16::from_le_bytes([start[4], start[5]]));
        let count = usize::from(u16::from_le_bytes([start[6], start[7]]));
        if position == END {
            return Ok(Some(MissReason::ALL.into_iter().find(|reason| *reason as usize == first)));
        }
        let position = position as usize;
        if count == 0 {
            if position != filling.header_count() || position >= wanted {
                return Err(ItemError::Piece { position, layer: 0 });
            }
            filling.add_header(read_head(source, filling.left_bytes()).await?);
            continue;
        }
        let layers = first..first + count;
        if !filling.is_next(position, &layers) {
            return Err(ItemError::Piece { position, layer: first });
        }
        for layer in layers.clone() {
            let left = filling.left_bytes();
            match filling.slice(position, layer) {
                (_, Some(room)) => {
                    read(source, room, left).await?;
                    filling.check(position, layer);
                }
                (bytes, None) => discard(source, bytes).await?,
            }
        }
        filling.mark_received(position, layers);
    }
    Ok(None)
}

async fn read_head(source: &mut impl Source, behind: usize) -> Result<FrameHead, ItemError> {
    let mut start = [0; FrameHead::START_BYTES];
    read(source, &mut start, behind).await?;
    let mut header = vec![0; FrameHead::length(&start)?];
    let (known, rest) = header.split_at_mut(start.len());
    known.copy_from_slice(&start);
    read(source, rest, behind).await?;
    Ok(FrameHead::read(&header)?)
}

async fn read(source: &mut impl Source, to: &mut [u8], behind: usize) -> Result<(), ItemError> {
    if source.read_into(to, behind).await? { Ok(()) } else { Err(ItemError::Truncated) }
}

async fn discard(source: &mut impl Source, mut bytes: usize) -> Result<(), ItemError> {
    let mut into = [0; DISCARD_BYTES];
    while bytes > 0 {
        let part = bytes.min(into.len());
        read(source, &mut into[..part], bytes - part).await?;
        bytes -= part;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
