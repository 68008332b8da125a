//! Fetch for an engine that computes layer by layer in its own memory. Saving is in
//! `layer_save.rs`.
//!
//! A fetch fills the caller's buffers, one for each block. It reports each slice once it is
//! verified, and returns each buffer once its block is whole. The engine feeds these events to
//! [`kv_core::pipeline`], which decides the next step. Data up to the size of the read buffer is
//! loaded before the prefill starts, the rest after [`LayerFetch::begin`]. The bytes in flight are
//! limited.
//!
//! **The order** is the caller's choice. In layer order, one layer of all requested blocks arrives
//! before the next, and the read buffer holds the leading layers of all blocks. It needs a path
//! that moves slices ([`kvfleet_transport::Path::moves_slices`]). Otherwise blocks arrive one after
//! the other, and the read buffer holds the leading blocks.
//!
//! Not here: choosing the blocks to wait for ([`kv_core::pipeline`]); choosing sources (the
//! router's decision); the buffers of a source (`buffers.rs`).

mod buffers;
mod feed;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::frame::SLICES_MAX;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::fetch::check_sources;
use crate::{Client, FetchCall, FetchError, HeldLease, SourceMiss};
use buffers::SourceBuffers;
use feed::{FetchControl, FetchPlan, SourceFeed};

/// Memory of the caller for one block.
pub trait SliceBuffer: Send + 'static {
    /// Destination of this layer's slice, exactly as long as the slice; `None` behind the last
    /// layer. A block with other slice lengths counts as wrong. Not called again after
    /// [`filled`](SliceBuffer::filled) for that layer.
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]>;

    /// Called when this layer's slice is complete and verified; it is not written again. A shared
    /// buffer may expose it to readers now.
    fn filled(&mut self, _layer: usize) {}
}

/// Lengths of the slices of a buffer.
pub(crate) fn slice_lengths(buffer: &mut impl SliceBuffer) -> Vec<usize> {
    (0..SLICES_MAX).map_while(|layer| buffer.slice(layer).map(|slice| slice.len())).collect()
}

/// The slices of a block in separate heap allocations.
impl SliceBuffer for Vec<Box<[u8]>> {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        self.get_mut(layer).map(|slice| &mut slice[..])
    }
}

/// A fetch into the caller's memory.
#[derive(Clone, Debug)]
pub struct LayerFetchCall {
    /// The fetch. Its deadline counts from the prefill start.
    pub fetch: FetchCall,
    /// Encoded size of the largest frame, in bytes.
    pub frame_bytes: u64,
    /// Bytes to load before the prefill starts ([`kv_core::pipeline::Preload::buffer_bytes`]).
    pub read_buffer_bytes: u64,
    /// Maximum bytes of blocks with outstanding requests; each source may have at least one block.
    /// Layers arrive in order within the blocks requested together. If the limit is below the
    /// history's size, some blocks are ahead of others.
    pub in_flight_bytes_max: u64,
    /// Maximum layers per request after the prefill start, over a path that moves slices; at least
    /// one. Between two requests passes a round trip, and blocks skipped by
    /// [`LayerFetch::skip_from`] meanwhile are not requested.
    pub layers_per_request: u32,
    /// By layers, for an engine that computes with partial blocks: an early end leaves leading
    /// layers of all blocks. By blocks: it leaves leading blocks.
    pub arrival_order: ArrivalOrder,
}

/// An event of a fetch.
#[derive(Debug)]
pub enum LayerEvent<R> {
    /// These slices of a block are in its buffer and verified; a block's layers arrive in order.
    /// Slices that complete a block are reported by [`LayerEvent::Arrived`] instead, unless an
    /// earlier block of its source is missing.
    Slices {
        /// Number of the block in the request.
        block: u32,
        /// The layers.
        layers: Range<u32>,
    },
    /// All slices of a block are in its buffer and verified. Blocks of one source arrive in order.
    Arrived {
        /// Number of the block in the request.
        block: u32,
        /// Its buffer.
        buffer: R,
    },
    /// These blocks will not be completed: their source failed. Their buffers follow with the
    /// source's end.
    Unavailable {
        /// Numbers of the blocks in the request.
        blocks: Range<u32>,
    },
    /// The last event of this source.
    SourceEnded(Box<SourceEnd<R>>),
}

/// The end of a source.
#[derive(Debug)]
pub struct SourceEnd<R> {
    /// Position of the source in the call.
    pub source: usize,
    /// The shortfall of the source; `None` if all blocks arrived, except those skipped.
    pub miss: Option<SourceMiss>,
    /// Buffers of incomplete blocks.
    pub incomplete: Vec<ReturnedBuffer<R>>,
    /// The lease that its node may hold now.
    pub lease: Option<HeldLease>,
    /// Encoded bytes of all received frames, usable or not.
    pub received_bytes: u64,
    /// Received frames that are not the requested block, are damaged, or do not fit their buffer.
    pub wrong_blocks: u32,
}

/// A buffer that was returned without a received [`LayerEvent::Arrived`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReturnedBuffer<R> {
    /// Number of the block in the request.
    pub block: u32,
    /// Its buffer.
    pub buffer: R,
    /// Number of leading layers in it that are verified; all of them if it was completed unnoticed.
    pub layers: u32,
}

/// Buffers of an ended fetch, as its tasks release them. Dropping it drops the remaining buffers as
/// soon as they are released.
#[derive(Debug)]
pub struct BufferReturns<R> {
    /// Unread events, also those being sent at this moment: they contain buffers too.
    events: mpsc::UnboundedReceiver<LayerEvent<R>>,
    returns: mpsc::UnboundedReceiver<ReturnedBuffer<R>>,
    /// Number of layers of a whole block.
    layers: u32,
    /// Taken from events, and not returned yet.
    from_events: VecDeque<ReturnedBuffer<R>>,
}

impl<R> BufferReturns<R> {
    /// For blocks with `layers` layers, after the events were closed.
    fn new(
        events: mpsc::UnboundedReceiver<LayerEvent<R>>,
        returns: mpsc::UnboundedReceiver<ReturnedBuffer<R>>,
        layers: u32,
    ) -> BufferReturns<R> {
        BufferReturns { events, returns, layers, from_events: VecDeque::new() }
    }

    /// All buffers, in ascending order of their blocks. Waits only until the tasks have run once
    /// more.
    pub async fn collect(mut self) -> Vec<ReturnedBuffer<R>> {
        // `recv` also waits for events being sent, which `try_recv` misses.
        while let Some(event) = self.events.recv().await {
            self.handle_event(event);
        }
        let mut all: Vec<_> = self.from_events.into();
        while let Some(back) = self.returns.recv().await {
            all.push(back);
        }
        all.sort_by_key(|back| back.block);
        all
    }

    /// The next buffer; `None` once all have been returned.
    pub async fn next(&mut self) -> Option<ReturnedBuffer<R>> {
        loop {
            if let Some(back) = self.poll() {
                return Some(back);
            }
            // Also waits for events being sent on either channel.
            tokio::select! {
                Some(event) = self.events.recv() => self.handle_event(event),
                Some(back) = self.returns.recv() => return Some(back),
                else => return None,
            }
        }
    }

    /// A buffer that is available now, for a thread that never waits.
    pub fn poll(&mut self) -> Option<ReturnedBuffer<R>> {
        while self.from_events.is_empty() {
            let Ok(event) = self.events.try_recv() else { return self.returns.try_recv().ok() };
            self.handle_event(event);
        }
        self.from_events.pop_front()
    }

    /// Whether all buffers were returned and taken: no buffer of the fetch is written any more.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        // Without senders, everything sent is visible.
        let is_told = self.events.sender_strong_count() == 0 && self.returns.sender_strong_count() == 0;
        is_told && self.from_events.is_empty() && self.events.is_empty() && self.returns.is_empty()
    }

    fn handle_event(&mut self, event: LayerEvent<R>) {
        match event {
            LayerEvent::Slices { .. } | LayerEvent::Unavailable { .. } => {}
            LayerEvent::Arrived { block, buffer: room } => {
                self.from_events.push_back(ReturnedBuffer { block, buffer: room, layers: self.layers });
            }
            LayerEvent::SourceEnded(end) => self.from_events.extend(end.incomplete),
        }
    }
}

/// A running fetch. Dropping it ends the fetch and drops buffers that were not returned
/// ([`LayerFetch::into_buffer_returns`] returns them).
#[derive(Debug)]
pub struct LayerFetch<R> {
    events: mpsc::UnboundedReceiver<LayerEvent<R>>,
    returns: mpsc::UnboundedReceiver<ReturnedBuffer<R>>,
    prefill_start: watch::Sender<Option<Instant>>,
    layers: u32,
    arrival_order: ArrivalOrder,
    control: Arc<FetchControl>,
    /// Set if a path does not move slices.
    whole_blocks: Arc<AtomicBool>,
}

impl<R> LayerFetch<R> {
    /// Starts the prefill: the rest is requested, and the deadline counts from now. Repeated calls
    /// have no effect.
    pub fn begin(&self) {
        self.prefill_start.send_if_modified(|turn| {
            let is_first = turn.is_none();
            turn.get_or_insert_with(Instant::now);
            is_first
        });
    }

    /// Number of layers of the buffers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The arrival order of slices, as far as known: as in the call, or block by block once a path
    /// does not move slices.
    #[must_use]
    pub fn arrival_order(&self) -> ArrivalOrder {
        if self.whole_blocks.load(Ordering::Relaxed) { ArrivalOrder::ByBlock } else { self.arrival_order }
    }

    /// The caller computes all blocks from this one on, so further data of them is not requested.
    /// Their buffers are returned as incomplete, without a miss unless other blocks are missing.
    pub fn skip_from(&self, from_block: u32) {
        self.control.skip_from.fetch_min(from_block, Ordering::Relaxed);
    }

    /// After the prefill start, completes this many leading blocks before layers of the others,
    /// over a path that moves slices; each source has its share. Complete blocks need no compute
    /// even if the rest fails, which allows longer waits if loading is slower than computing. Call
    /// it before [`LayerFetch::begin`].
    pub fn prioritize_blocks(&self, blocks: u32) {
        self.control.priority_blocks.store(blocks, Ordering::Relaxed);
    }

    /// Encoded bytes received so far, usable or not.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.control.received_bytes.load(Ordering::Relaxed)
    }

    /// Frames received so far that are not the requested block, are damaged, or do not fit their
    /// buffer.
    #[must_use]
    pub fn wrong_blocks(&self) -> u32 {
        self.control.wrong_blocks.load(Ordering::Relaxed)
    }

    /// The next event; `None` once every source has ended.
    pub async fn next(&mut self) -> Option<LayerEvent<R>> {
        self.events.recv().await
    }

    /// An available event, for a compute thread without a runtime: never waits.
    pub fn poll(&mut self) -> Option<LayerEvent<R>> {
        self.events.try_recv().ok()
    }

    /// Ends the fetch, before or after its start, without waiting for data in flight.
    /// [`LayerFetch::poll`] still returns earlier events, and [`LayerFetch::into_buffer_returns`]
    /// the buffers.
    pub fn close(&mut self) {
        self.events.close();
    }

    /// Ends the fetch. Buffers are returned as soon as they are not written any more, including
    /// those in unread events. The node of a source without a reported end may hold the call's
    /// lease.
    #[must_use]
    pub fn into_buffer_returns(mut self) -> BufferReturns<R> {
        self.close();
        BufferReturns::new(self.events, self.returns, self.layers)
    }

    /// Whether every source has ended and all events were read.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        // A closed channel is not enough: an event may still be in the middle of being sent.
        self.events.sender_strong_count() == 0 && self.events.is_empty()
    }
}

impl Client {
    /// Fetches from all sources at once into `buffers`, one for each block of the sources, in
    /// order. Until [`LayerFetch::begin`] it loads only leading layers or blocks that fit the read
    /// buffer. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the sources are inconsistent with the hashes, or the number of buffers differs from the
    /// number of blocks.
    pub fn fetch_layers<R: SliceBuffer>(
        &self,
        call: LayerFetchCall,
        buffers: Vec<R>,
    ) -> Result<LayerFetch<R>, FetchError> {
        check_sources(&call.fetch)?;
        let blocks: usize = call.fetch.sources.iter().map(|source| source.len_blocks as usize).sum();
        if buffers.len() != blocks {
            return Err(FetchError::BufferCount { rooms: buffers.len(), blocks });
        }
        let (turn, turns) = watch::channel(None);
        let (sender, events) = mpsc::unbounded_channel();
        let (return_sender, back) = mpsc::unbounded_channel();
        let mut rooms = buffers;
        let slices = rooms.first_mut().map(slice_lengths).unwrap_or_default();
        let layers = u32::try_from(slices.len()).unwrap_or(u32::MAX);
        let plan = Arc::new(FetchPlan::new(call, slices));
        let mut rooms = rooms.into_iter();
        for (position, source) in plan.call.fetch.sources.iter().enumerate() {
            let of_source = rooms.by_ref().take(source.len_blocks as usize);
            let rooms =
                SourceBuffers::new(source.start_blocks, of_source, sender.clone(), return_sender.clone());
            let feed = SourceFeed::new(Arc::clone(&plan), position, rooms, turns.clone(), self.links.clone());
            tokio::spawn(feed.run(self.paths.clone()));
        }
        Ok(LayerFetch {
            events,
            returns: back,
            prefill_start: turn,
            layers,
            arrival_order: plan.call.arrival_order,
            control: Arc::clone(&plan.control),
            whole_blocks: Arc::clone(&plan.whole_blocks),
        })
    }
}
