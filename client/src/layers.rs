//! Fetch and save for an engine that computes layer by layer, in its own memory.
//!
//! A fetch fills the rooms that the caller gave, one for each block. It says of each slice when it is there and proven, and
//! hands each room back when all of its block is: whoever computes feeds that to [`kv_core::pipeline::Race`] and is told
//! what to do next. Before the job's turn comes what the read buffer takes, the rest after [`LayerFetch::begin`]; at most
//! so many bytes are asked for at once. Saving is `layer_save.rs`.
//!
//! **In which order** is the caller's to say. By layers, over a path that moves slices
//! ([`kvfleet_transport::Path::moves_slices`]), a layer of all blocks that are asked for at once comes before the next, and the read
//! buffer holds the leading layers of all blocks. Else blocks come one after the other, and it holds the leading ones.
//!
//! Not here: what is waited for and for how long ([`kv_core::pipeline`]), which sources (the router's decision), and the
//! rooms of a source (`rooms.rs`).

mod feed;
mod rooms;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::pipeline::Arrive;
use kvfleet_proto::frame::SLICES_MAX;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::fetch::check_sources;
use crate::{Client, FetchCall, FetchError, HeldLease, SourceMiss};
use feed::{Feed, Order, Plan};
use rooms::Rooms;

/// Memory of the caller for one block.
pub trait BlockRoom: Send + 'static {
    /// Where this layer's slice goes, exactly as long as the slice; nothing behind the last layer. A block
    /// that has other slices counts as wrong. Not asked for once that slice was [`filled`](BlockRoom::filled).
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]>;

    /// This layer's slice is there and proven, and is not written any more. A room that shares its memory may let
    /// others read it now.
    fn filled(&mut self, _layer: usize) {}
}

/// Lengths of the slices that a room has.
pub(crate) fn slices_of(room: &mut impl BlockRoom) -> Vec<usize> {
    (0..SLICES_MAX).map_while(|layer| room.slice(layer).map(|slice| slice.len())).collect()
}

/// A block's slices one after the other in memory of its own.
impl BlockRoom for Vec<Box<[u8]>> {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        self.get_mut(layer).map(|slice| &mut slice[..])
    }
}

/// Fetch into the caller's memory.
#[derive(Clone, Debug)]
pub struct LayersCall {
    /// What is fetched. Its deadline counts from the job's turn.
    pub fetch: FetchCall,
    /// Encoded size of the largest frame, in bytes.
    pub frame_bytes: u64,
    /// Bytes that are loaded before the job's turn ([`kv_core::pipeline::Preload::buffer_bytes`]).
    pub read_buffer_bytes: u64,
    /// Bytes of blocks of which something is asked for and not there, at most; but one block of each source may be. Layers come
    /// in order within what is asked for at once: where that is less than the history, some blocks are ahead of others.
    pub in_flight_bytes_max: u64,
    /// Layers of a source's blocks that are asked for at once after the job's turn, at most, over a path that moves slices; at least one.
    /// Between two of these requests a round trip passes, and what [`LayerFetch::leave_out`] named before is not asked for any more.
    pub layers_at_once: u32,
    /// Layers first, for an engine that computes with those that are there: what ends early leaves leading layers of all
    /// blocks. Or blocks first: it leaves leading blocks.
    pub arrive: Arrive,
}

/// What happened in a fetch.
#[derive(Debug)]
pub enum LayerEvent<R> {
    /// These slices of a block are in its room, and proven; the layers of a block come in order. Those with which it is
    /// whole are told by [`LayerEvent::Arrived`], if no block of its source before it is missing then.
    Slices {
        /// Which block of the request.
        block: u32,
        /// Which layers of it.
        layers: Range<u32>,
    },
    /// All slices of a block are in its room, and proven. Blocks of one source come in order.
    Arrived {
        /// Which block of the request.
        block: u32,
        /// Its room.
        room: R,
    },
    /// These blocks will not come whole: their source fell short. Their rooms come with its end.
    Short {
        /// Which blocks of the request.
        blocks: Range<u32>,
    },
    /// Nothing more comes from this source.
    Ended(Box<SourceEnd<R>>),
}

/// How a source ended.
#[derive(Debug)]
pub struct SourceEnd<R> {
    /// Which source of the call.
    pub source: usize,
    /// What it did not deliver of what it should have; nothing when all came, but what was left out.
    pub miss: Option<SourceMiss>,
    /// Rooms of blocks that did not come whole.
    pub absent: Vec<RoomBack<R>>,
    /// The lease that its node may hold now.
    pub lease: Option<HeldLease>,
    /// Encoded bytes of all frames that arrived, usable or not.
    pub received_bytes: u64,
    /// Frames that arrived and were not the block asked, whole, or did not fit their room.
    pub wrong_blocks: u32,
}

/// A room that came back without its block having been heard of as [`LayerEvent::Arrived`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomBack<R> {
    /// Which block of the request.
    pub block: u32,
    /// Its room.
    pub room: R,
    /// So many leading layers are in it, and proven: all of them, if it came whole unheard.
    pub layers: u32,
}

/// Rooms of a fetch that is over, as its tasks let go of them. Dropping it drops those that are still to come, as soon as they do.
#[derive(Debug)]
pub struct RoomsLeft<R> {
    /// What was told and not heard, or is being told at this moment: there are rooms in it too.
    events: mpsc::UnboundedReceiver<LayerEvent<R>>,
    back: mpsc::UnboundedReceiver<RoomBack<R>>,
    /// Layers of a block that is whole.
    layers: u32,
    /// Out of events, and not taken yet.
    told: VecDeque<RoomBack<R>>,
}

impl<R> RoomsLeft<R> {
    /// Of blocks of so many layers, whose events were closed.
    fn of(
        events: mpsc::UnboundedReceiver<LayerEvent<R>>,
        back: mpsc::UnboundedReceiver<RoomBack<R>>,
        layers: u32,
    ) -> RoomsLeft<R> {
        RoomsLeft { events, back, layers, told: VecDeque::new() }
    }

    /// All that come, in ascending order of their blocks: some moments, in which nothing is waited for but the tasks' own turn.
    pub async fn all(mut self) -> Vec<RoomBack<R>> {
        // Also what somebody is about to tell, which a look does not see.
        while let Some(event) = self.events.recv().await {
            self.hear(event);
        }
        let mut all: Vec<_> = self.told.into();
        while let Some(back) = self.back.recv().await {
            all.push(back);
        }
        all.sort_by_key(|back| back.block);
        all
    }

    /// The next that comes; nothing once all have.
    pub async fn next(&mut self) -> Option<RoomBack<R>> {
        loop {
            if let Some(back) = self.poll() {
                return Some(back);
            }
            // Also what somebody is about to tell, on either way.
            tokio::select! {
                Some(event) = self.events.recv() => self.hear(event),
                Some(back) = self.back.recv() => return Some(back),
                else => return None,
            }
        }
    }

    /// One that has come, for a thread that never waits.
    pub fn poll(&mut self) -> Option<RoomBack<R>> {
        while self.told.is_empty() {
            let Ok(event) = self.events.try_recv() else { return self.back.try_recv().ok() };
            self.hear(event);
        }
        self.told.pop_front()
    }

    /// Whether all have come and were taken: nothing is written to any room of the fetch any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        // Once nobody is there to tell anything, all that was told can be seen.
        let is_told = self.events.sender_strong_count() == 0 && self.back.sender_strong_count() == 0;
        is_told && self.told.is_empty() && self.events.is_empty() && self.back.is_empty()
    }

    fn hear(&mut self, event: LayerEvent<R>) {
        match event {
            LayerEvent::Slices { .. } | LayerEvent::Short { .. } => {}
            LayerEvent::Arrived { block, room } => {
                self.told.push_back(RoomBack { block, room, layers: self.layers });
            }
            LayerEvent::Ended(end) => self.told.extend(end.absent),
        }
    }
}

/// A fetch under way. Dropping it ends it; rooms that were not handed back are dropped too
/// ([`LayerFetch::rooms_left`] gives them back).
#[derive(Debug)]
pub struct LayerFetch<R> {
    events: mpsc::UnboundedReceiver<LayerEvent<R>>,
    back: mpsc::UnboundedReceiver<RoomBack<R>>,
    turn: watch::Sender<Option<Instant>>,
    layers: u32,
    arrive: Arrive,
    order: Arc<Order>,
    /// Set once a path is found that moves no slices.
    whole: Arc<AtomicBool>,
}

impl<R> LayerFetch<R> {
    /// It is the job's turn: the rest is asked for, and the deadline counts from now. Once is enough.
    pub fn begin(&self) {
        self.turn.send_if_modified(|turn| {
            let is_first = turn.is_none();
            turn.get_or_insert_with(Instant::now);
            is_first
        });
    }

    /// Layers that the rooms have.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// How slices come, as far as it is known: as the call says, or block by block once a path is found that moves no slices.
    #[must_use]
    pub fn arrive(&self) -> Arrive {
        if self.whole.load(Ordering::Relaxed) { Arrive::ByBlock } else { self.arrive }
    }

    /// From this block on the caller computes them all: what was not asked for of them yet, is not. They come back as absent, without a
    /// miss where nothing else was.
    pub fn leave_out(&self, from_block: u32) {
        self.order.useless.fetch_min(from_block, Ordering::Relaxed);
    }

    /// So many leading blocks come whole after the job's turn before layers of the others do, over a path that moves slices: each source's share of
    /// them. Blocks that are whole need not be computed whatever becomes of the rest: where loading is the slower that is what
    /// waiting may be paid with. Said before [`LayerFetch::begin`].
    pub fn blocks_first(&self, blocks: u32) {
        self.order.blocks_first.store(blocks, Ordering::Relaxed);
    }

    /// Encoded bytes that came so far, usable or not.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.order.received_bytes.load(Ordering::Relaxed)
    }

    /// Frames so far that were not the block asked, whole, or did not fit their room.
    #[must_use]
    pub fn wrong_blocks(&self) -> u32 {
        self.order.wrong_blocks.load(Ordering::Relaxed)
    }

    /// What happens next; nothing once every source has ended.
    pub async fn next(&mut self) -> Option<LayerEvent<R>> {
        self.events.recv().await
    }

    /// What has happened already, for a thread that computes and has no runtime: never waits.
    pub fn poll(&mut self) -> Option<LayerEvent<R>> {
        self.events.try_recv().ok()
    }

    /// Ends it, before its turn as well as after it: what is on its way is not waited for. What has happened until now is still heard by
    /// [`LayerFetch::poll`], and rooms come by [`LayerFetch::rooms_left`].
    pub fn close(&mut self) {
        self.events.close();
    }

    /// Ends it. Rooms that were not handed back come as soon as nothing is written to them any more; also those that were, in events
    /// that nobody heard. A node whose source was not heard to end may hold the call's lease.
    #[must_use]
    pub fn rooms_left(mut self) -> RoomsLeft<R> {
        self.close();
        RoomsLeft::of(self.events, self.back, self.layers)
    }

    /// Whether every source has ended and all of that was heard.
    #[must_use]
    pub fn is_over(&self) -> bool {
        // Closed is not enough: somebody may be about to tell what was begun before.
        self.events.sender_strong_count() == 0 && self.events.is_empty()
    }
}

impl Client {
    /// Fetches from all sources at once into `rooms`, one for each block of the sources, in order. Until
    /// [`LayerFetch::begin`], only leading layers or blocks that fit the read buffer. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the sources make no sense for these hashes, or there is not one room for each block of them.
    pub fn fetch_layers<R: BlockRoom>(
        &self,
        call: LayersCall,
        rooms: Vec<R>,
    ) -> Result<LayerFetch<R>, FetchError> {
        check_sources(&call.fetch)?;
        let blocks: usize = call.fetch.sources.iter().map(|source| source.len_blocks as usize).sum();
        if rooms.len() != blocks {
            return Err(FetchError::Rooms { rooms: rooms.len(), blocks });
        }
        let (turn, turns) = watch::channel(None);
        let (sender, events) = mpsc::unbounded_channel();
        let (giver, back) = mpsc::unbounded_channel();
        let mut rooms = rooms;
        let slices = rooms.first_mut().map(slices_of).unwrap_or_default();
        let layers = u32::try_from(slices.len()).unwrap_or(u32::MAX);
        let plan = Arc::new(Plan::new(call, slices));
        let mut rooms = rooms.into_iter();
        for (position, source) in plan.call.fetch.sources.iter().enumerate() {
            let of_source = rooms.by_ref().take(source.len_blocks as usize);
            let rooms = Rooms::new(source.start_blocks, of_source, sender.clone(), giver.clone());
            let feed = Feed::new(Arc::clone(&plan), position, rooms, turns.clone(), self.links.clone());
            tokio::spawn(feed.run(self.paths.clone()));
        }
        Ok(LayerFetch {
            events,
            back,
            turn,
            layers,
            arrive: plan.call.arrive,
            order: Arc::clone(&plan.order),
            whole: Arc::clone(&plan.whole),
        })
    }
}
