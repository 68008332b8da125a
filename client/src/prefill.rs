//! A prefill beside its load: what an engine follows that computes layer by layer while its history comes.
//!
//! [`Client::prefill`] joins what is apart elsewhere: the read buffer is sized by what loading takes longer than computing
//! ([`Preload`]), slices come in the order of layers ([`Client::fetch_layers`]), the deadline is what recomputing costs, and at each
//! moment [`Race`] says whether compute waits or computes what has not come. So a request never takes longer than if nothing
//! had been cached, but for the 64th of it that a wait in vain may cost, or two milliseconds where that is more: timers tell no
//! less apart.
//!
//! ```text
//! let mut prefill = client.prefill(call, rooms)?;      // the read buffer fills while other jobs compute
//! prefill.begin();                                     // the job's turn
//! loop {
//!     match prefill.next().await {
//!         Next::Layer { layer } => …,                  // of the new tokens and the blocks of prefill.pass()
//!         Next::CatchUp { blocks, layers } => …,       // the first layers of these blocks
//!         Next::Done | Next::Wait { .. } => break,
//!     }
//! }
//! let end = prefill.end();                             // what came, what was computed, every room, and the leases to release
//! ```
//!
//! Not here: computing, saving what was computed (`layer_save.rs`), and the rules ([`kv_core::pipeline`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use kv_core::pipeline::{Arrive, Costs, Next, Preload, PreloadWork, Race};
use kvfleet_proto::frame::SLICES_MAX;
use kvfleet_proto::pb;
use tokio::time::{Instant, timeout_at};

use crate::fetch::check_sources;
use crate::layers::slices_of;
use crate::{
    BlockRoom, Client, FetchCall, FetchError, HeldLease, LayerEvent, LayerFetch, LayersCall, RoomBack,
    RoomsLeft, SourceEnd, SourceMiss,
};

/// How late timers are: a wait ends so much sooner, and counts as long as it was to be.
const TIMER_GRAIN_NS: u64 = 1_000_000;

/// What is asked for at once takes about so long: many round trips of a data centre, and still a small part of a history that is worth
/// while.
const REQUEST_NS: u64 = 32_000_000;

/// A prefill whose history is loaded.
#[derive(Clone, Debug)]
pub struct PrefillCall {
    /// What is fetched. Its deadline counts from the job's turn, and is never later than recomputing all would end.
    pub fetch: FetchCall,
    /// What computing takes: of each block of the sources, in order, and of the tokens behind them.
    pub costs: Costs,
    /// Encoded size of the largest frame, in bytes.
    pub frame_bytes: u64,
    /// Bytes a second that are expected of all sources together where earlier fetches say nothing of one of them. It is believed until
    /// slices come, or do not.
    pub bytes_per_s: u64,
    /// Bytes that may be loaded before the job's turn, at most.
    pub read_buffer_bytes_max: u64,
    /// As in [`LayersCall::in_flight_bytes_max`].
    pub in_flight_bytes_max: u64,
}

/// A prefill under way. Dropping it ends its fetch; rooms that did not come back are dropped too.
#[derive(Debug)]
pub struct Prefill<R> {
    fetch: LayerFetch<R>,
    race: Race,
    /// What times of the race count from.
    origin: Instant,
    read_buffer_bytes: u64,
    /// The blocks of the sources.
    blocks: Range<u32>,
    arrived: BTreeMap<u32, R>,
    absent: Vec<RoomBack<R>>,
    ends: Vec<SourceEnd<R>>,
    /// Of each source that has not ended what its node may hold.
    awaited: BTreeMap<usize, HeldLease>,
    is_begun: bool,
    is_over: bool,
    /// The end of a wait that is over.
    waited_ns: u64,
    work: PreloadWork,
    /// What may be idled in vain.
    wait_ns: u64,
}

/// What came of a prefill.
#[derive(Debug)]
pub struct PrefillEnd<R> {
    /// Blocks that came whole, by their number in the request. A block behind one of its source that was still to come is not among
    /// them, but in `rest`.
    pub arrived: BTreeMap<u32, R>,
    /// Rooms of blocks that did not come whole, of sources that have ended: in ascending order, with what is in them.
    pub absent: Vec<RoomBack<R>>,
    /// All other rooms: of sources that were still awaited. They come when nothing is written to them any more, which is not waited for
    /// here.
    pub rest: RoomsLeft<R>,
    /// Blocks that were computed although a source had them, in ascending order. Some of them may have come all the same.
    pub computed: Vec<u32>,
    /// Sources that said why they fell short. One that was still awaited at the end says nothing.
    pub misses: Vec<SourceMiss>,
    /// Leases that nodes may hold now, to be released when the request ends.
    pub leases: Vec<HeldLease>,
    /// Encoded bytes that came, usable or not.
    pub received_bytes: u64,
    /// Frames that were not the block asked, whole, or did not fit their rooms.
    pub wrong_blocks: u32,
    /// How long compute had nothing to do.
    pub idle: Duration,
    /// Computing that was spared.
    pub saved: Duration,
}

impl Client {
    /// Begins to load the history of a prefill into `rooms`, one for each block of the sources: until [`Prefill::begin`] what the
    /// read buffer takes. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the sources make no sense for these hashes, or there are not as many rooms and costs as blocks.
    pub fn prefill<R: BlockRoom>(
        &self,
        call: PrefillCall,
        mut rooms: Vec<R>,
    ) -> Result<Prefill<R>, FetchError> {
        check_sources(&call.fetch)?;
        let blocks = call.costs.block_layer_ns.len();
        if rooms.len() != blocks {
            return Err(FetchError::Rooms { rooms: rooms.len(), blocks });
        }
        let slices = rooms.first_mut().map(slices_of).unwrap_or_default();
        let slices: Vec<u32> =
            slices.into_iter().map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX)).collect();
        let layers = usize::try_from(call.costs.layers).unwrap_or(usize::MAX);
        if layers > SLICES_MAX || blocks > 0 && slices.len() != layers {
            return Err(FetchError::Layers { layers: slices.len(), costs: layers });
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
        let race = Race::by_clock(call.costs, &slices, Arrive::ByLayer, bytes_per_s, 0, TIMER_GRAIN_NS);
        let fetch = self.fetch_layers(
            LayersCall {
                fetch,
                frame_bytes: call.frame_bytes,
                read_buffer_bytes,
                in_flight_bytes_max: call.in_flight_bytes_max,
                layers_at_once: layers_at_once(work, layers),
                arrive: Arrive::ByLayer,
            },
            rooms,
        )?;
        let (arrived, absent, ends) = (BTreeMap::new(), Vec::new(), Vec::new());
        Ok(Prefill {
            fetch,
            race,
            origin,
            read_buffer_bytes,
            blocks,
            arrived,
            absent,
            ends,
            awaited,
            is_begun: false,
            is_over: false,
            waited_ns: 0,
            work,
            wait_ns,
        })
    }
}

/// Layers that are asked for at once: what comes before blocks that are computed meanwhile can be left out.
fn layers_at_once(work: PreloadWork, layers: usize) -> u32 {
    let requests = (work.load_ns() / REQUEST_NS).clamp(1, layers.max(1) as u64);
    u32::try_from((layers as u64).div_ceil(requests)).unwrap_or(u32::MAX)
}

impl<R> Prefill<R> {
    /// Bytes that are loaded before the job's turn.
    #[must_use]
    pub fn read_buffer_bytes(&self) -> u64 {
        self.read_buffer_bytes
    }

    /// It is the job's turn: from now on compute may be idle, and the rest is loaded. Once is enough.
    pub fn begin(&mut self) {
        if std::mem::replace(&mut self.is_begun, true) {
            return;
        }
        // What came before the turn is not counted as how fast it comes.
        self.hear();
        let now_ns = self.now_ns();
        self.race.begin(now_ns);
        self.fetch.blocks_first(self.blocks_first());
        self.fetch.begin();
    }

    /// Leading blocks that come whole before layers of the others, where loading what is not here takes longer than computing. By
    /// layers nothing is whole before the end, so that compute could wait for no more than its credit, and would have to
    /// compute what is on its way. So many are whole first that what is left takes as long as computing, and half of the credit: none
    /// where the first of each source would not be whole within that.
    fn blocks_first(&self) -> u32 {
        let left_ns = self.race.missing_bytes() as f64 / self.work.bytes_per_s.max(1) as f64 * 1e9;
        let credit_ns = self.wait_ns as f64 / 2.0;
        let blocks = f64::from(self.blocks.end - self.blocks.start);
        if left_ns * self.awaited.len() as f64 > credit_ns * blocks {
            return 0;
        }
        // At most zero where loading is the faster.
        (blocks * (1.0 - (self.work.compute_ns() as f64 + credit_ns) / left_ns.max(1.0))) as u32
    }

    /// What compute does next, once there is something to do; what was said before is done. [`Next::Done`] once all layers
    /// are computed, and never [`Next::Wait`]. Cancelled, it may be called again.
    pub async fn next(&mut self) -> Next {
        loop {
            match self.poll() {
                Next::Wait { until_ns } => self.wait(until_ns).await,
                next => return next,
            }
        }
    }

    /// The same for a thread that never waits here: in place of waiting it is told until when, in nanoseconds from
    /// [`Prefill::origin`], nothing needs to be asked again unless something comes before.
    pub fn poll(&mut self) -> Next {
        self.hear();
        self.race.comes(self.fetch.arrive());
        let now_ns = self.now_ns();
        let next = self.race.next(now_ns);
        self.leave_out();
        match next {
            Next::CatchUp { mut blocks, layers } => {
                blocks.iter_mut().for_each(|block| *block += self.blocks.start);
                Next::CatchUp { blocks, layers }
            }
            next => next,
        }
    }

    /// The blocks that are computed beside the new tokens, as numbers in the request and in ascending order.
    pub fn pass(&self) -> impl Iterator<Item = u32> + '_ {
        self.race.pass().map(|block| block + self.blocks.start)
    }

    /// What times in [`Next::Wait`] count from.
    #[must_use]
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// The prefill is over, or nobody wants it any more: what is still on its way is not waited for.
    #[must_use]
    pub fn end(mut self) -> PrefillEnd<R> {
        let computed = self.pass().collect();
        // What happens from here on comes by way of the rooms that are left, as does what is being told at this moment.
        self.fetch.close();
        while let Some(event) = self.fetch.poll() {
            self.told(event);
        }
        self.absent.sort_by_key(|back| back.block);
        let ended = self.ends.iter().filter_map(|end| end.lease.clone());
        PrefillEnd {
            computed,
            // A node that has not ended may hold it too.
            leases: ended.chain(self.awaited.into_values()).collect(),
            received_bytes: self.fetch.received_bytes(),
            wrong_blocks: self.fetch.wrong_blocks(),
            misses: self.ends.into_iter().filter_map(|end| end.miss).collect(),
            idle: Duration::from_nanos(self.race.idle_ns()),
            saved: Duration::from_nanos(self.race.saved_ns()),
            arrived: self.arrived,
            absent: self.absent,
            rest: self.fetch.rooms_left(),
        }
    }

    /// What is behind the last block that is not computed need not come.
    fn leave_out(&mut self) {
        let computed: Vec<u32> = self.race.pass().collect();
        let end = self.blocks.end - self.blocks.start;
        let tail =
            computed.iter().rev().zip((0..end).rev()).take_while(|(block, last)| *block == last).count();
        if tail > 0 {
            self.fetch.leave_out(self.blocks.end - u32::try_from(tail).unwrap_or(u32::MAX));
        }
    }

    async fn wait(&mut self, until_ns: u64) {
        let now_ns = self.now_ns();
        let early_ns = TIMER_GRAIN_NS.min(until_ns.saturating_sub(now_ns) / 2);
        let until = self.origin + Duration::from_nanos(until_ns - early_ns);
        match timeout_at(until, self.fetch.next()).await {
            Ok(Some(event)) => self.told(event),
            Ok(None) => self.over(),
            Err(_) => self.waited_ns = until_ns,
        }
    }

    /// Everything that has happened.
    fn hear(&mut self) {
        while let Some(event) = self.fetch.poll() {
            self.told(event);
        }
        if self.fetch.is_over() {
            self.over();
        }
    }

    fn told(&mut self, event: LayerEvent<R>) {
        let now_ns = self.now_ns();
        match event {
            LayerEvent::Slices { block, layers } => {
                self.race.arrived(block - self.blocks.start, layers.end, now_ns);
            }
            LayerEvent::Arrived { block, room } => {
                self.race.arrived(block - self.blocks.start, self.fetch.layers(), now_ns);
                self.arrived.insert(block, room);
            }
            LayerEvent::Short { blocks } => {
                blocks.for_each(|block| self.race.lost(block - self.blocks.start));
            }
            LayerEvent::Ended(mut end) => {
                for back in end.absent.drain(..) {
                    self.race.lost(back.block - self.blocks.start);
                    self.absent.push(back);
                }
                self.awaited.remove(&end.source);
                self.ends.push(*end);
            }
        }
    }

    /// Nothing more comes: also not from a source that ended without a word, with its runtime.
    fn over(&mut self) {
        if !std::mem::replace(&mut self.is_over, true) {
            (0..self.blocks.end - self.blocks.start).for_each(|block| self.race.lost(block));
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX).max(self.waited_ns)
    }
}
