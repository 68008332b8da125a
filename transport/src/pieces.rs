//! Slices of several blocks on one stream: a layer of all blocks that lie ready before the next, or block by block.
//!
//! A fetch by layer is answered by *pieces*, each behind eight bytes: the block's position u32, the first layer u16, the
//! number of layers u16 (little endian). A piece of no layer is the header of the block's frame; those come in prefix
//! order, each before the slices of its block. The layers of one block come in order. Position `u32::MAX` is the end,
//! before all came, and its first layer the number of the reason (0: none). Each end knows the lengths from the headers.
//!
//! Which block is next is the sender's to say ([`Wave`]): the one that is furthest behind, so that blocks that a slow
//! medium gave later catch up, and nothing waits for them. Not here: what a reader does with slices (`slices.rs`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use kv_core::pipeline::Arrive;
use kvfleet_proto::frame::FrameHead;

use crate::MissReason;
use crate::slices::{AskedLayers, Filling, clip};
use crate::stream::{ItemError, Source};

/// Bytes before each piece.
const PIECE_HEAD_BYTES: usize = 8;

/// Position that no block has.
const END: u32 = u32::MAX;

/// By layers, slices are sent together up to here, in bytes: each piece costs both ends some work, and a reader hears of each.
const PIECE_BYTES: usize = 16 << 10;

/// What is read and thrown away at once, in bytes.
const WASTE_BYTES: usize = 4 << 10;

/// In which order slices leave. `T` is what they are slices of: a frame's bytes, or where they lie.
pub(crate) struct Wave<T> {
    asked: AskedLayers,
    blocks: Vec<Option<Sending<T>>>,
    /// Blocks that are not sent, the next one first: by next layer and position, or only by position.
    order: BinaryHeap<Reverse<(usize, usize)>>,
}

/// A block of which slices are left.
struct Sending<T> {
    head: FrameHead,
    /// The next slice, and where it begins in the frame.
    next: usize,
    at: usize,
    of: T,
}

/// Slices of a block that lie one behind the other.
pub(crate) struct Piece<T> {
    /// Counted from the first block that was added.
    pub(crate) position: usize,
    pub(crate) layers: Range<usize>,
    /// Where in the frame, in bytes.
    pub(crate) at: Range<usize>,
    pub(crate) of: T,
}

impl<T: Clone> Wave<T> {
    /// Of these layers of each block.
    pub(crate) fn new(asked: AskedLayers) -> Wave<T> {
        Wave { asked, blocks: Vec::new(), order: BinaryHeap::new() }
    }

    fn queue(&mut self, position: usize, layer: usize) {
        let rank = if self.asked.arrive == Arrive::ByLayer { layer } else { 0 };
        self.order.push(Reverse((rank, position)));
    }

    /// Blocks that were added.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// The next block.
    pub(crate) fn add(&mut self, head: FrameHead, of: T) {
        let (first, _) = clip(&self.asked.layers, &head);
        self.add_from(first, head, of);
    }

    /// The next block, of which the layers before `first` left already.
    pub(crate) fn add_from(&mut self, first: usize, head: FrameHead, of: T) {
        let (_, end) = clip(&self.asked.layers, &head);
        if first < end {
            self.queue(self.blocks.len(), first);
        }
        let at = head.bytes().len() + head.bytes_of(0..first);
        self.blocks.push((first < end).then_some(Sending { head, next: first, at, of }));
    }

    /// What leaves next; nothing when all that was added has left.
    pub(crate) fn next(&mut self) -> Option<Piece<T>> {
        let Reverse((_, position)) = self.order.pop()?;
        let slot = self.blocks.get_mut(position)?;
        let sending = slot.as_mut()?;
        let (_, last) = clip(&self.asked.layers, &sending.head);
        let most = if self.asked.arrive == Arrive::ByLayer { PIECE_BYTES } else { usize::MAX };
        let (first, from) = (sending.next, sending.at);
        while sending.next < last && (sending.next == first || sending.at - from < most) {
            sending.at += sending.head.slice_bytes(sending.next).unwrap_or(0);
            sending.next += 1;
        }
        let (end, at) = (sending.next, from..sending.at);
        let of = sending.of.clone();
        if end < last {
            self.queue(position, end);
        } else {
            *slot = None;
        }
        Some(Piece { position, layers: first..end, at, of })
    }
}

impl Piece<Bytes> {
    /// What it is; less where the frame is shorter than its head says.
    pub(crate) fn bytes(&self) -> Bytes {
        let end = self.at.end.min(self.of.len());
        self.of.slice(self.at.start.min(end)..end)
    }

    /// What stands before it on the wire.
    pub(crate) fn start(&self) -> Bytes {
        start(self.position, self.layers.start, self.layers.len())
    }
}

/// What stands before the header of a block's frame.
pub(crate) fn head_start(position: usize) -> Bytes {
    start(position, 0, 0)
}

/// The end of the pieces, with why if that is known.
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

/// Reads the pieces of `wanted` blocks into a fetch's memory. `Ok(Some(reason))` when the peer ended before all came.
///
/// # Errors
/// When the stream broke, or what came are no pieces of these blocks.
pub(crate) async fn receive(
    source: &mut impl Source,
    wanted: usize,
    filling: &mut Filling<'_>,
) -> Result<Option<Option<MissReason>>, ItemError> {
    while !filling.is_over(wanted) {
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
            if position != filling.heads() || position >= wanted {
                return Err(ItemError::Piece { position, layer: 0 });
            }
            filling.head(read_head(source, filling.left_bytes()).await?);
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
                (bytes, None) => waste(source, bytes).await?,
            }
        }
        filling.came(position, layers);
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
    if source.read_into(to, behind).await? { Ok(()) } else { Err(ItemError::Cut) }
}

async fn waste(source: &mut impl Source, mut bytes: usize) -> Result<(), ItemError> {
    let mut into = [0; WASTE_BYTES];
    while bytes > 0 {
        let part = bytes.min(into.len());
        read(source, &mut into[..part], bytes - part).await?;
        bytes -= part;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
