//! The buffers of one source: slices are written, and whole blocks are handed out in order.
//!
//! Not here: sending requests (`feed.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::FrameHead;
use kvfleet_transport::{
    BoxFuture, FetchAnswer, FetchRequest, LayerRequest, Path, PathError, Progress, SliceSink,
};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::mpsc::error::SendError;

use super::feed::FetchControl;
use super::{LayerEvent, ReturnedBuffer, SliceBuffer};
use crate::fetch::{FetchTotals, SourceReceiver};
use crate::links::TransferTiming;

/// Buffers that are not handed out yet, and the channels for them.
pub(super) struct SourceBuffers<R> {
    /// Number of the first block in `slots`.
    first: u32,
    slots: VecDeque<BufferSlot<R>>,
    events: UnboundedSender<LayerEvent<R>>,
    /// Receives buffers once events are closed.
    returns: UnboundedSender<ReturnedBuffer<R>>,
}

/// A block's buffer.
struct BufferSlot<R> {
    buffer: R,
    /// Number of leading layers that are complete.
    layers_present: usize,
    /// Head of the block's frame, once known. A second fetch of the block must match it.
    head: Option<FrameHead>,
}

impl<R> BufferSlot<R> {
    fn is_whole(&self) -> bool {
        self.head.as_ref().is_some_and(|head| self.layers_present == head.slice_count())
    }

    /// The buffer and its number of layers.
    fn into_returned(self, block: u32) -> ReturnedBuffer<R> {
        let layers = u32::try_from(self.layers_present).unwrap_or(u32::MAX);
        ReturnedBuffer { block, buffer: self.buffer, layers }
    }
}

impl<R: SliceBuffer> SourceBuffers<R> {
    pub(super) fn new(
        first: u32,
        rooms: impl Iterator<Item = R>,
        events: UnboundedSender<LayerEvent<R>>,
        returns: UnboundedSender<ReturnedBuffer<R>>,
    ) -> SourceBuffers<R> {
        let slots = rooms.map(|room| BufferSlot { buffer: room, layers_present: 0, head: None }).collect();
        SourceBuffers { first, slots, events, returns }
    }

    pub(super) fn events(&self) -> UnboundedSender<LayerEvent<R>> {
        self.events.clone()
    }

    /// The first incomplete block.
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    fn slot(&mut self, block: u32) -> Option<&mut BufferSlot<R>> {
        self.slots.get_mut(block.checked_sub(self.first)? as usize)
    }

    fn hand_out_whole(&mut self) {
        while let Some(slot) = self.slots.pop_front_if(|slot| slot.is_whole()) {
            self.hand_out(self.first, slot);
            self.first += 1;
        }
    }

    fn hand_out(&self, block: u32, slot: BufferSlot<R>) {
        let ReturnedBuffer { buffer: room, layers, .. } = slot.into_returned(block);
        let arrived = LayerEvent::Arrived { block, buffer: room };
        if let Err(SendError(LayerEvent::Arrived { buffer: room, .. })) = self.events.send(arrived) {
            self.return_buffer(ReturnedBuffer { block, buffer: room, layers });
        }
    }

    /// If this channel is closed too, the buffer is dropped.
    fn return_buffer(&self, back: ReturnedBuffer<R>) {
        let _ = self.returns.send(back);
    }

    /// Ends the source: whole blocks behind a gap are handed out, the other buffers go into the
    /// event made by `end_event`, if events are open.
    pub(super) fn finish(mut self, end_event: impl FnOnce(Vec<ReturnedBuffer<R>>) -> LayerEvent<R>) {
        let mut absent = Vec::new();
        for (block, slot) in (self.first..).zip(std::mem::take(&mut self.slots)) {
            if slot.is_whole() {
                self.hand_out(block, slot);
            } else {
                absent.push(slot.into_returned(block));
            }
        }
        if let Err(SendError(LayerEvent::SourceEnded(end))) = self.events.send(end_event(absent)) {
            end.incomplete.into_iter().for_each(|back| self.return_buffer(back));
        }
    }
}

/// Returns the remaining buffers in every case; a returned buffer is not written again.
impl<R> Drop for SourceBuffers<R> {
    fn drop(&mut self) {
        for (block, slot) in (self.first..).zip(std::mem::take(&mut self.slots)) {
            let _ = self.returns.send(slot.into_returned(block));
        }
    }
}

/// One request that writes into the buffers.
pub(super) struct SliceReceiver<'a, R> {
    pub(super) buffers: &'a mut SourceBuffers<R>,
    /// Number of the first requested block.
    pub(super) first: u32,
    pub(super) requested: LayerRequest,
    pub(super) identity: IdentityDigest,
    /// Hashes of all blocks of the request.
    pub(super) hashes: &'a [BlockHash],
    pub(super) totals: FetchTotals,
    pub(super) timing: TransferTiming,
    /// Set when data arrives.
    pub(super) has_data: Arc<AtomicBool>,
    /// Set by a path that does not move slices.
    pub(super) whole_blocks: Arc<AtomicBool>,
    pub(super) control: Arc<FetchControl>,
    /// Tells which path is used.
    pub(super) progress: Progress,
}

impl<R: SliceBuffer> SliceReceiver<'_, R> {
    fn block(&self, position: usize) -> u32 {
        self.first.saturating_add(u32::try_from(position).unwrap_or(u32::MAX))
    }

    /// Whether this is the head of the block's frame, and its slices have the lengths of the
    /// buffer's.
    fn accept_head(&mut self, block: u32, head: &FrameHead) -> bool {
        let is_it =
            self.hashes.get(block as usize).is_some_and(|hash| head.verify(self.identity, *hash).is_ok());
        let Some(slot) = self.buffers.slot(block).filter(|_| is_it) else { return false };
        if let Some(before) = &slot.head {
            // Then the lengths match too. Do not call the buffer again: its slices may be in use by
            // a reader.
            return before == head;
        }
        let fits = |layer| slot.buffer.slice(layer).map(|slice| slice.len()) == head.slice_bytes(layer);
        // Behind the last layer both return `None`.
        let fits = (0..=head.slice_count()).all(fits);
        slot.head = Some(head.clone()).filter(|_| fits);
        fits
    }
}

impl<R: SliceBuffer> SourceReceiver for SliceReceiver<'_, R> {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        self.timing = TransferTiming::begin();
        self.progress = request.progress.clone();
        self.whole_blocks.fetch_or(!path.fetches_slices(), Ordering::Relaxed);
        let asked = self.requested.clone();
        Box::pin(async move {
            let answer = path.fetch_layers(request, asked, self).await?;
            self.totals.proven = answer.tiers().len();
            Ok(answer)
        })
    }

    fn totals(&self) -> FetchTotals {
        self.totals
    }

    fn timing(&self) -> TransferTiming {
        self.timing
    }
}

impl<R: SliceBuffer> SliceSink for SliceReceiver<'_, R> {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        let fits = self.accept_head(self.block(position), head);
        self.totals.wrong_blocks += u32::from(!fits);
        fits
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        let block = self.block(position);
        // A reported slice is not written again.
        self.buffers.slot(block).filter(|slot| layer >= slot.layers_present)?.buffer.slice(layer)
    }

    fn slices_filled(&mut self, position: usize, layers: Range<usize>) {
        let block = self.block(position);
        let is_first = block == self.buffers.first;
        let Some(slot) = self.buffers.slot(block).filter(|slot| slot.layers_present == layers.start) else {
            return;
        };
        slot.layers_present = layers.end;
        layers.clone().for_each(|layer| slot.buffer.filled(layer));
        if is_first && slot.is_whole() {
            return self.buffers.hand_out_whole();
        }
        let number = |layer: usize| u32::try_from(layer).unwrap_or(u32::MAX);
        let layers = number(layers.start)..number(layers.end);
        let _ = self.buffers.events.send(LayerEvent::Slices { block, layers });
    }

    fn slice_rejected(&mut self, _: usize) {
        self.totals.wrong_blocks += 1;
        self.control.wrong_blocks.fetch_add(1, Ordering::Relaxed);
    }

    fn count_received(&mut self, bytes: usize) {
        self.totals.received_bytes += bytes as u64;
        self.control.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.timing.record(bytes);
        self.has_data.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::pipeline::ArrivalOrder;
    use kvfleet_transport::suite::{IDENTITY, frame_of, hash, hashes};
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::{BufferReturns, SourceEnd};
    use super::*;

    type TestBuffer = Vec<Box<[u8]>>;

    fn test_buffer() -> TestBuffer {
        vec![vec![0; 10].into(), vec![0; 20].into()]
    }

    /// A request for all layers of the blocks from this one on.
    fn slice_receiver<'a, R>(
        rooms: &'a mut SourceBuffers<R>,
        hashes: &'a [BlockHash],
        first: u32,
    ) -> SliceReceiver<'a, R> {
        SliceReceiver {
            buffers: rooms,
            first,
            requested: LayerRequest { layers: 0..9, arrive: ArrivalOrder::ByLayer },
            identity: IDENTITY,
            hashes,
            totals: FetchTotals::default(),
            timing: TransferTiming::begin(),
            has_data: Arc::default(),
            whole_blocks: Arc::default(),
            control: Arc::default(),
            progress: Progress::default(),
        }
    }

    /// A buffer that exposes complete slices to readers, and records the layers.
    struct RecordingBuffer(TestBuffer, Arc<std::sync::Mutex<Vec<usize>>>);

    impl SliceBuffer for RecordingBuffer {
        fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
            assert!(!self.1.lock().unwrap().contains(&layer), "the slice was exposed to readers");
            self.0.slice(layer)
        }

        fn filled(&mut self, layer: usize) {
            self.1.lock().unwrap().push(layer);
        }
    }

    #[test]
    fn filled_is_called_once_and_slice_is_not_requested_again() {
        let (sender, _events) = unbounded_channel();
        let filled = Arc::<std::sync::Mutex<Vec<usize>>>::default();
        let mut rooms = SourceBuffers::new(
            0,
            [RecordingBuffer(test_buffer(), Arc::clone(&filled))].into_iter(),
            sender,
            unbounded_channel().0,
        );
        let (hashes, head) = (hashes(1), frame_of(hash(0), &[10, 20]).head().unwrap());
        let mut first = slice_receiver(&mut rooms, &hashes, 0);
        assert!(first.head(0, &head));
        first.slices_filled(0, 0..1);
        first.slices_filled(0, 0..1);
        assert_eq!(*filled.lock().unwrap(), [0]);
        let mut second = slice_receiver(&mut rooms, &hashes, 0);
        assert!(second.head(0, &head), "the head is compared without a call to the buffer");
        assert!(second.slice(0, 0).is_none() && second.slice(0, 1).is_some());
        second.slices_filled(0, 1..2);
        assert_eq!(*filled.lock().unwrap(), [0, 1]);
    }

    fn end_event(absent: Vec<ReturnedBuffer<TestBuffer>>) -> LayerEvent<TestBuffer> {
        let (miss, lease) = (None, None);
        LayerEvent::SourceEnded(Box::new(SourceEnd {
            source: 0,
            miss,
            incomplete: absent,
            lease,
            received_bytes: 0,
            wrong_blocks: 0,
        }))
    }

    /// The events: whole blocks as `[block]`, slices as `[block, first, end]`, the end as `[]`.
    fn drain_events(
        events: &mut tokio::sync::mpsc::UnboundedReceiver<LayerEvent<TestBuffer>>,
    ) -> Vec<Vec<u32>> {
        std::iter::from_fn(|| events.try_recv().ok())
            .map(|event| match event {
                LayerEvent::Slices { block, layers } => vec![block, layers.start, layers.end],
                LayerEvent::Arrived { block, .. } => vec![block],
                LayerEvent::Unavailable { .. } => unreachable!("sent only by the feed"),
                LayerEvent::SourceEnded(_) => vec![],
            })
            .collect()
    }

    #[test]
    fn whole_blocks_are_handed_out_in_order_and_after_a_gap_at_the_end() {
        let (sender, mut events) = unbounded_channel();
        let mut rooms = SourceBuffers::new(2, (0..4).map(|_| test_buffer()), sender, unbounded_channel().0);
        let hashes = hashes(6);
        let mut filling = slice_receiver(&mut rooms, &hashes, 2);
        for position in 0..4 {
            let head = frame_of(hash(2 + position), &[10, 20]).head().unwrap();
            assert!(filling.head(position as usize, &head));
        }
        filling.slices_filled(1, 0..2);
        assert_eq!(drain_events(&mut events), [[3, 0, 2]]);
        filling.slices_filled(0, 0..1);
        filling.slices_filled(0, 1..2);
        assert_eq!(drain_events(&mut events), [vec![2, 0, 1], vec![2], vec![3]]);
        assert!(
            filling.slice(0, 1).is_none() && filling.slice(1, 0).is_none(),
            "slices of handed-out blocks"
        );
        filling.slices_filled(3, 0..2);
        filling.slices_filled(2, 0..1);
        assert!(filling.slice(2, 0).is_none(), "a reported slice");
        assert_eq!(filling.slice(2, 1).map(|slice| slice.len()), Some(20));
        assert!(filling.slice(4, 0).is_none(), "not a block of this source");
        assert_eq!((rooms.first(), drain_events(&mut events)), (4, vec![vec![5, 0, 2], vec![4, 0, 1]]));
        let mut absent = Vec::new();
        rooms.finish(|rooms| {
            absent = rooms.iter().map(|back| (back.block, back.layers)).collect();
            end_event(rooms)
        });
        assert_eq!((absent, drain_events(&mut events)), (vec![(4, 1)], vec![vec![5], vec![]]));
    }

    #[test]
    fn unheard_buffers_are_returned_on_finish_and_drop() {
        let hashes = hashes(3);
        // At its end, and dropped as with an aborted task.
        for ends in [true, false] {
            let ((sender, mut events), (back, mut came)) = (unbounded_channel(), unbounded_channel());
            let mut rooms = SourceBuffers::new(0, (0..3).map(|_| test_buffer()), sender, back);
            let mut filling = slice_receiver(&mut rooms, &hashes, 0);
            for position in 0..3 {
                let head = frame_of(hash(position), &[10, 20]).head().unwrap();
                assert!(filling.head(position as usize, &head));
            }
            filling.slices_filled(1, 0..1);
            filling.slices_filled(2, 0..2);
            assert_eq!(drain_events(&mut events), [[1, 0, 1], [2, 0, 2]]);
            events.close();
            filling.slices_filled(0, 0..2);
            if ends {
                rooms.finish(end_event);
            } else {
                drop(rooms);
            }
            let mut back: Vec<_> =
                std::iter::from_fn(|| came.try_recv().ok()).map(|back| (back.block, back.layers)).collect();
            back.sort_unstable();
            assert_eq!(back, [(0, 2), (1, 1), (2, 2)]);
        }
    }

    /// Regardless of the moment at which the fetch is dropped: another thread may be in the middle
    /// of sending an event.
    #[test]
    fn no_buffer_is_lost_when_events_close_concurrently() {
        const BLOCKS: u32 = 8;
        let hashes = hashes(BLOCKS);
        let heads: Vec<_> =
            (0..BLOCKS).map(|block| frame_of(hash(block), &[10, 20]).head().unwrap()).collect();
        for turn in 0..500 {
            let ((sender, mut events), (giver, back)) = (unbounded_channel(), unbounded_channel());
            let mut rooms = SourceBuffers::new(0, (0..BLOCKS).map(|_| test_buffer()), sender, giver);
            let mut heard = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut filling = slice_receiver(&mut rooms, &hashes, 0);
                    for (position, head) in heads.iter().enumerate() {
                        assert!(filling.head(position, head));
                    }
                    (0..6).for_each(|position| filling.slices_filled(position, 0..2));
                    filling.slices_filled(7, 0..1);
                    if turn % 2 == 0 {
                        rooms.finish(end_event);
                    } else {
                        drop(rooms);
                    }
                });
                let mut heard = Vec::new();
                while heard.len() < turn % 7 {
                    match events.try_recv() {
                        Ok(LayerEvent::Arrived { block, .. }) => heard.push((block, 2)),
                        _ => std::thread::yield_now(),
                    }
                }
                events.close();
                let mut left = BufferReturns::new(events, back, 2);
                while !left.is_finished() {
                    match left.poll() {
                        Some(back) => heard.push((back.block, back.layers)),
                        None => std::thread::yield_now(),
                    }
                }
                heard
            });
            heard.sort_unstable();
            let all = (0..BLOCKS).map(|block| (block, [2, 0, 1][block.saturating_sub(5) as usize]));
            assert_eq!(heard, all.collect::<Vec<_>>(), "iteration {turn}");
        }
    }

    #[test]
    fn mismatched_or_oversized_head_is_wrong() {
        let (sender, _events) = unbounded_channel();
        let mut rooms = SourceBuffers::new(0, [test_buffer()].into_iter(), sender, unbounded_channel().0);
        let hashes = hashes(1);
        let mut filling = slice_receiver(&mut rooms, &hashes, 0);
        let head = |number, slices: &[u32]| frame_of(hash(number), slices).head().unwrap();
        for wrong in [head(1, &[10, 20]), head(0, &[10]), head(0, &[10, 20, 0]), head(0, &[20, 10])] {
            assert!(!filling.head(0, &wrong), "{wrong:?}");
        }
        assert!(!filling.head(1, &head(1, &[10, 20])), "the block was not requested");
        assert_eq!(filling.totals.wrong_blocks, 5);
        assert!(filling.head(0, &head(0, &[10, 20])));
        let other = frame_of(hash(9), &[10, 20]);
        let other = kvfleet_proto::frame::Frame { hash: hash(0), ..other };
        assert!(!filling.head(0, &other.head().unwrap()), "the head differs from the first one");
        assert!(filling.head(0, &head(0, &[10, 20])));
    }
}
