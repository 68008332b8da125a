//! A prefill that overlaps with loading its history, for an engine that computes layer by layer.
//!
//! [`Client::prefill`] combines several parts. The read buffer covers the excess of the load time
//! over the compute time ([`Preload`]). Slices arrive in the order of layers
//! ([`Client::fetch_layers`]). The deadline is the cost of recomputing. At each moment
//! [`kv_core::pipeline`] decides whether compute waits or recomputes missing blocks. So a request
//! takes no longer than without a cache, except for a bounded loss of idle waiting: a 64th, or two
//! milliseconds if that is more, because timers are no finer.
//!
//! ```text
//! let mut prefill = client.prefill(call, buffers)?;    // the read buffer fills while other jobs compute
//! prefill.begin();                                     // the prefill starts
//! loop {
//!     match prefill.next().await {
//!         NextAction::Layer { layer } => …,                  // of the new tokens and the blocks of prefill.wave()
//!         NextAction::CatchUp { blocks, layers } => …,       // the first layers of these blocks
//!         NextAction::Done | NextAction::Wait { .. } => break,
//!     }
//! }
//! let end = prefill.end();                             // blocks that arrived or were computed,
//! all buffers, leases to release
//! ```
//!
//! Not here: computing, saving the results (`layer_save.rs`), and the rules
//! ([`kv_core::pipeline`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use kv_core::pipeline::{ArrivalOrder, ComputeCosts, LoadComputeOverlap, NextAction, Preload, PreloadWork};
use kvfleet_proto::frame::SLICES_MAX;
use kvfleet_proto::pb;
use tokio::time::{Instant, timeout_at};

use crate::fetch::check_sources;
use crate::layers::slice_lengths;
use crate::{
    BufferReturns, Client, FetchCall, FetchError, HeldLease, LayerEvent, LayerFetch, LayerFetchCall,
    ReturnedBuffer, SliceBuffer, SourceEnd, SourceMiss,
};

/// Lateness of timers: a wait ends earlier by this much and counts in full.
const TIMER_GRAIN_NS: u64 = 1_000_000;

/// Target duration of one request: many round trips within a data centre, and still a small part of
/// a worthwhile history.
const REQUEST_TARGET_NS: u64 = 32_000_000;

/// A prefill with a history to load.
#[derive(Clone, Debug)]
pub struct PrefillCall {
    /// The fetch. Its deadline counts from the prefill start, and is at most the time to recompute
    /// everything.
    pub fetch: FetchCall,
    /// Compute costs of each block of the sources, in order, and of the tokens behind them.
    pub costs: ComputeCosts,
    /// Encoded size of the largest frame, in bytes.
    pub frame_bytes: u64,
    /// Expected throughput of all sources together, in bytes a second, if one of them is
    /// unmeasured. Used until slices arrive or fail to.
    pub bytes_per_s: u64,
    /// Maximum bytes to load before the prefill start.
    pub read_buffer_bytes_max: u64,
    /// As in [`LayerFetchCall::in_flight_bytes_max`].
    pub in_flight_bytes_max: u64,
}

/// A running prefill. Dropping it ends its fetch and drops buffers that were not returned.
#[derive(Debug)]
pub struct Prefill<R> {
    fetch: LayerFetch<R>,
    overlap: LoadComputeOverlap,
    /// Origin of the overlap's times.
    origin: Instant,
    read_buffer_bytes: u64,
    /// Numbers of the sources' blocks in the request.
    blocks: Range<u32>,
    arrived: BTreeMap<u32, R>,
    incomplete: Vec<ReturnedBuffer<R>>,
    source_ends: Vec<SourceEnd<R>>,
    /// For each source that has not ended, the lease that its node may hold.
    open_sources: BTreeMap<usize, HeldLease>,
    is_started: bool,
    is_finished: bool,
    /// The scheduled end of the last wait that timed out.
    waited_ns: u64,
    work: PreloadWork,
    /// Maximum idle time of waits without result.
    wait_budget_ns: u64,
}

/// Result of a prefill.
#[derive(Debug)]
pub struct PrefillResult<R> {
    /// Buffers of whole blocks, by number in the request. A block behind an outstanding one of its
    /// source is in `pending_buffers` instead.
    pub arrived: BTreeMap<u32, R>,
    /// Buffers of incomplete blocks of ended sources, in ascending order, with their number of
    /// layers.
    pub incomplete: Vec<ReturnedBuffer<R>>,
    /// All other buffers, those of sources still outstanding. They are returned when they are not
    /// written any more, without waiting here.
    pub pending_buffers: BufferReturns<R>,
    /// Blocks that were computed although a source had them, in ascending order. Some of them may
    /// have arrived anyway.
    pub computed: Vec<u32>,
    /// Shortfalls of ended sources. Sources still outstanding are not included.
    pub misses: Vec<SourceMiss>,
    /// Leases that nodes may hold now; release them when the request ends.
    pub leases: Vec<HeldLease>,
    /// Encoded bytes received, usable or not.
    pub received_bytes: u64,
    /// Frames that are not the requested block, are damaged, or do not fit their buffers.
    pub wrong_blocks: u32,
    /// Time during which compute was idle.
    pub idle_time: Duration,
    /// Compute time saved by the cache.
    pub saved_time: Duration,
}

impl Client {
    /// Starts to load the history of a prefill into `buffers`, one for each block of the sources;
    /// until [`Prefill::begin`] only as much as the read buffer holds. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the sources are inconsistent with the hashes, or the numbers of buffers, costs and blocks
    /// differ.
    pub fn prefill<R: SliceBuffer>(
        &self,
        call: PrefillCall,
        mut buffers: Vec<R>,
    ) -> Result<Prefill<R>, FetchError> {
        check_sources(&call.fetch)?;
        let blocks = call.costs.block_layer_ns.len();
        if buffers.len() != blocks {
            return Err(FetchError::BufferCount { rooms: buffers.len(), blocks });
        }
        let slices = buffers.first_mut().map(slice_lengths).unwrap_or_default();
        let slices: Vec<u32> =
            slices.into_iter().map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX)).collect();
        let layers = usize::try_from(call.costs.layers).unwrap_or(usize::MAX);
        if layers > SLICES_MAX || blocks > 0 && slices.len() != layers {
            return Err(FetchError::LayerCount { layers: slices.len(), costs: layers });
        }
        let bytes_per_s = self.links.rate(&call.fetch.sources).unwrap_or(call.bytes_per_s);
        let block_bytes: u64 = slices.iter().map(|bytes| u64::from(*bytes)).sum();
        let work = PreloadWork::of(&call.costs, block_bytes.saturating_mul(blocks as u64), bytes_per_s);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let read_buffer_bytes =
            Preload::new(work, &slices, blocks, call.read_buffer_bytes_max).buffer_bytes();
        let mut fetch = call.fetch;
        fetch.deadline = fetch.deadline.min(Duration::from_nanos(call.costs.deadline_ns(TIMER_GRAIN_NS)));
        let blocks = fetch.resident_blocks..fetch.resident_blocks.saturating_add(blocks);
        let lease = fetch.lease;
        let held = |source: &pb::Source| HeldLease { address: source.address.clone(), lease };
        let awaited: BTreeMap<_, _> = fetch.sources.iter().map(held).enumerate().collect();
        let wait_ns = call.costs.wait_ns(TIMER_GRAIN_NS);
        let origin = Instant::now();
        let race = LoadComputeOverlap::with_timer(
            call.costs,
            &slices,
            ArrivalOrder::ByLayer,
            bytes_per_s,
            0,
            TIMER_GRAIN_NS,
        );
        let fetch = self.fetch_layers(
            LayerFetchCall {
                fetch,
                frame_bytes: call.frame_bytes,
                read_buffer_bytes,
                in_flight_bytes_max: call.in_flight_bytes_max,
                layers_per_request: layers_per_request(work, layers),
                arrival_order: ArrivalOrder::ByLayer,
            },
            buffers,
        )?;
        let (arrived, absent, ends) = (BTreeMap::new(), Vec::new(), Vec::new());
        Ok(Prefill {
            fetch,
            overlap: race,
            origin,
            read_buffer_bytes,
            blocks,
            arrived,
            incomplete: absent,
            source_ends: ends,
            open_sources: awaited,
            is_started: false,
            is_finished: false,
            waited_ns: 0,
            work,
            wait_budget_ns: wait_ns,
        })
    }
}

/// Layers per request. Blocks that are computed meanwhile can be skipped between two requests.
fn layers_per_request(work: PreloadWork, layers: usize) -> u32 {
    let requests = (work.load_ns() / REQUEST_TARGET_NS).clamp(1, layers.max(1) as u64);
    u32::try_from((layers as u64).div_ceil(requests)).unwrap_or(u32::MAX)
}

impl<R> Prefill<R> {
    /// Bytes to load before the prefill start.
    #[must_use]
    pub fn read_buffer_bytes(&self) -> u64 {
        self.read_buffer_bytes
    }

    /// Starts the prefill: compute may wait from now on, and the rest is loaded. Repeated calls
    /// have no effect.
    pub fn begin(&mut self) {
        if std::mem::replace(&mut self.is_started, true) {
            return;
        }
        // Data from before the start does not count for the measured rate.
        self.drain_events();
        let now_ns = self.now_ns();
        self.overlap.begin(now_ns);
        self.fetch.prioritize_blocks(self.priority_blocks());
        self.fetch.begin();
    }

    /// Number of leading blocks to complete before layers of the others, if loading the rest takes
    /// longer than computing.
    ///
    /// In layer order no block is complete before the end. Compute could then wait only for its
    /// wait budget, and would recompute blocks in flight. With this many whole blocks first, the
    /// remaining load takes as long as computing plus half of the wait budget. Returns 0 if the
    /// first block of each source would not be complete within that half.
    fn priority_blocks(&self) -> u32 {
        let left_ns = self.overlap.missing_bytes() as f64 / self.work.bytes_per_s.max(1) as f64 * 1e9;
        let credit_ns = self.wait_budget_ns as f64 / 2.0;
        let blocks = f64::from(self.blocks.end - self.blocks.start);
        if left_ns * self.open_sources.len() as f64 > credit_ns * blocks {
            return 0;
        }
        // Zero or less if loading is faster.
        (blocks * (1.0 - (self.work.compute_ns() as f64 + credit_ns) / left_ns.max(1.0))) as u32
    }

    /// The next compute step, once there is one; the previous step is done. Returns [`NextAction::Done`]
    /// when all layers are computed, and never [`NextAction::Wait`]. Cancel-safe.
    pub async fn next(&mut self) -> NextAction {
        loop {
            match self.poll() {
                NextAction::Wait { until_ns } => self.wait(until_ns).await,
                next => return next,
            }
        }
    }

    /// The same for a thread that never waits here. [`NextAction::Wait`] returns the time until which
    /// polling is unnecessary unless data arrives, in nanoseconds from [`Prefill::origin`].
    pub fn poll(&mut self) -> NextAction {
        self.drain_events();
        self.overlap.set_arrival_order(self.fetch.arrival_order());
        let now_ns = self.now_ns();
        let next = self.overlap.next(now_ns);
        self.skip_computed_tail();
        match next {
            NextAction::CatchUp { mut blocks, layers } => {
                blocks.iter_mut().for_each(|block| *block += self.blocks.start);
                NextAction::CatchUp { blocks, layers }
            }
            next => next,
        }
    }

    /// The blocks computed along with the new tokens, as numbers in the request in ascending order.
    pub fn wave(&self) -> impl Iterator<Item = u32> + '_ {
        self.overlap.wave().map(|block| block + self.blocks.start)
    }

    /// Origin of the times in [`NextAction::Wait`].
    #[must_use]
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// Ends the prefill, complete or abandoned, without waiting for data in flight.
    #[must_use]
    pub fn end(mut self) -> PrefillResult<R> {
        let computed = self.wave().collect();
        // Later events, and those being sent now, reach the caller through `pending_buffers`.
        self.fetch.close();
        while let Some(event) = self.fetch.poll() {
            self.handle_event(event);
        }
        self.incomplete.sort_by_key(|back| back.block);
        let ended = self.source_ends.iter().filter_map(|end| end.lease.clone());
        PrefillResult {
            computed,
            // The node of a source that has not ended may hold the lease too.
            leases: ended.chain(self.open_sources.into_values()).collect(),
            received_bytes: self.fetch.received_bytes(),
            wrong_blocks: self.fetch.wrong_blocks(),
            misses: self.source_ends.into_iter().filter_map(|end| end.miss).collect(),
            idle_time: Duration::from_nanos(self.overlap.idle_ns()),
            saved_time: Duration::from_nanos(self.overlap.saved_ns()),
            arrived: self.arrived,
            incomplete: self.incomplete,
            pending_buffers: self.fetch.into_buffer_returns(),
        }
    }

    /// Skips the trailing blocks that are all computed.
    fn skip_computed_tail(&mut self) {
        let computed: Vec<u32> = self.overlap.wave().collect();
        let end = self.blocks.end - self.blocks.start;
        let tail =
            computed.iter().rev().zip((0..end).rev()).take_while(|(block, last)| *block == last).count();
        if tail > 0 {
            self.fetch.skip_from(self.blocks.end - u32::try_from(tail).unwrap_or(u32::MAX));
        }
    }

    async fn wait(&mut self, until_ns: u64) {
        let now_ns = self.now_ns();
        let early_ns = TIMER_GRAIN_NS.min(until_ns.saturating_sub(now_ns) / 2);
        let until = self.origin + Duration::from_nanos(until_ns - early_ns);
        match timeout_at(until, self.fetch.next()).await {
            Ok(Some(event)) => self.handle_event(event),
            Ok(None) => self.finish(),
            Err(_) => self.waited_ns = until_ns,
        }
    }

    /// Handles all available events.
    fn drain_events(&mut self) {
        while let Some(event) = self.fetch.poll() {
            self.handle_event(event);
        }
        if self.fetch.is_finished() {
            self.finish();
        }
    }

    fn handle_event(&mut self, event: LayerEvent<R>) {
        let now_ns = self.now_ns();
        match event {
            LayerEvent::Slices { block, layers } => {
                self.overlap.slices_arrived(block - self.blocks.start, layers.end, now_ns);
            }
            LayerEvent::Arrived { block, buffer: room } => {
                self.overlap.slices_arrived(block - self.blocks.start, self.fetch.layers(), now_ns);
                self.arrived.insert(block, room);
            }
            LayerEvent::Unavailable { blocks } => {
                blocks.for_each(|block| self.overlap.mark_lost(block - self.blocks.start));
            }
            LayerEvent::SourceEnded(mut end) => {
                for back in end.incomplete.drain(..) {
                    self.overlap.mark_lost(back.block - self.blocks.start);
                    self.incomplete.push(back);
                }
                self.open_sources.remove(&end.source);
                self.source_ends.push(*end);
            }
        }
    }

    /// Marks all remaining blocks as lost, also those of a source that stopped with its runtime
    /// before its end.
    fn finish(&mut self) {
        if !std::mem::replace(&mut self.is_finished, true) {
            (0..self.blocks.end - self.blocks.start).for_each(|block| self.overlap.mark_lost(block));
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX).max(self.waited_ns)
    }
}
