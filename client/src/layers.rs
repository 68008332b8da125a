//! Fetch and save for an engine that computes layer by layer, in its own memory.
//!
//! A fetch fills the rooms that the caller gave, one for each block, and hands each back as its block is there and
//! proven: whoever computes feeds that to [`kv_core::pipeline::Race`] and is told what to do next. Before the job's
//! turn comes what the read buffer takes, the rest after [`LayerFetch::begin`]; at most so many bytes are asked for
//! at once. Saving is `layer_save.rs`.
//!
//! **Whole frames.** A frame has all layers of one block and travels whole, so what is handed out is a block
//! with all its layers ([`kv_core::pipeline::Arrive::ByBlock`]), and nothing of a save leaves before its last
//! layer. Layers over the wire need two things that are not there: a fetch that names a range of layers and is
//! answered with the frame's header first (its table has the length and the sum of every slice) and then the
//! slices of that range, all blocks of one layer before the next; and a save whose header comes last. The sums
//! are those of slices already, so neither changes what is stored.
//!
//! Not here: what is waited for and for how long ([`kv_core::pipeline`]), and which sources (the router's decision).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Class, NodeId};
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::MissReason;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::fetch::{Came, DEADLINE_MAX, OneSource, check_sources};
use crate::links::Links;
use crate::paths::Paths;
use crate::{Client, FetchCall, FetchError, HeldLease, SourceMiss};

/// When a node that was busy is asked again for what nobody waits for yet: as soon as nodes say.
const BUSY_AGAIN: Duration = Duration::from_millis(50);

/// Memory of the caller for one block.
pub trait BlockRoom: Send + 'static {
    /// Where this layer's slice goes, exactly as long as the slice; nothing behind the last layer. A block
    /// that has other slices counts as wrong.
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]>;
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
    /// Bytes that are asked for and not handed out, at most; but one block of each source may be.
    pub in_flight_bytes_max: u64,
}

/// What happened in a fetch.
#[derive(Debug)]
pub enum LayerEvent<R> {
    /// All slices of a block are in its room, and proven. Blocks of one source come in order.
    Arrived {
        /// Which block of the request.
        block: u32,
        /// Its room.
        room: R,
    },
    /// Nothing more comes from this source.
    Ended(SourceEnd<R>),
}

/// How a source ended.
#[derive(Debug)]
pub struct SourceEnd<R> {
    /// What it did not deliver of what it should have; nothing when all came.
    pub miss: Option<SourceMiss>,
    /// Blocks that did not come, with their rooms. What is in them is of no use.
    pub absent: Vec<(u32, R)>,
    /// The lease that its node may hold now.
    pub lease: Option<HeldLease>,
    /// Encoded bytes of all frames that arrived, usable or not.
    pub received_bytes: u64,
    /// Frames that arrived and were not the block asked, whole, or did not fit their room.
    pub wrong_blocks: u32,
}

/// A fetch under way. Dropping it ends it; rooms that were not handed back are dropped too.
#[derive(Debug)]
pub struct LayerFetch<R> {
    events: mpsc::UnboundedReceiver<LayerEvent<R>>,
    turn: watch::Sender<Option<Instant>>,
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

    /// What happens next; nothing once every source has ended.
    pub async fn next(&mut self) -> Option<LayerEvent<R>> {
        self.events.recv().await
    }

    /// What has happened already, for a thread that computes and has no runtime: never waits.
    pub fn poll(&mut self) -> Option<LayerEvent<R>> {
        self.events.try_recv().ok()
    }

    /// Whether every source has ended and all of that was heard.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.events.is_closed() && self.events.is_empty()
    }
}

impl Client {
    /// Fetches from all sources at once into `rooms`, one for each block of the sources, in order. Until
    /// [`LayerFetch::begin`], only leading blocks that fit the read buffer. Needs a tokio runtime.
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
        let mut rooms = rooms.into_iter();
        let call = Arc::new(call);
        for (position, source) in call.fetch.sources.iter().enumerate() {
            let rooms = rooms.by_ref().take(source.len_blocks as usize).collect();
            let feed = Feed {
                call: Arc::clone(&call),
                position,
                filled: source.start_blocks,
                rooms,
                events: sender.clone(),
                turn: turns.clone(),
                links: self.links.clone(),
            };
            tokio::spawn(feed.run(self.paths.clone()));
        }
        Ok(LayerFetch { events, turn })
    }
}

/// One source's part of a fetch.
struct Feed<R> {
    call: Arc<LayersCall>,
    position: usize,
    /// The next block that is to come.
    filled: u32,
    /// From that one on.
    rooms: VecDeque<R>,
    events: mpsc::UnboundedSender<LayerEvent<R>>,
    turn: watch::Receiver<Option<Instant>>,
    links: Links,
}

impl<R: BlockRoom> Feed<R> {
    async fn run(mut self, paths: Paths) {
        let (mut received_bytes, mut wrong_blocks, mut leased) = (0, 0, false);
        let mut reason = None;
        let (end, most) = (self.source_end(), self.blocks_at_once());
        while self.filled < end && reason.is_none() {
            let ahead = self.ahead_end();
            if self.filled >= ahead && !self.wait_for_turn().await {
                return;
            }
            let until = if self.turn.borrow().is_some() { end } else { end.min(ahead) };
            let part = self.filled..until.min(self.filled.saturating_add(most));
            let is_ahead = self.turn.borrow().is_none();
            let Some(mut came) = self.part(part, &paths).await else { return };
            // Others went first, which says nothing of the blocks: they are asked for again, at the turn at the latest.
            if is_ahead && came.reason == Some(MissReason::Busy) {
                came.reason = None;
                if !self.wait_a_little().await {
                    return;
                }
            }
            received_bytes += came.received_bytes;
            wrong_blocks += came.wrong_blocks;
            leased |= came.leased;
            reason = came.reason;
        }
        let source = self.source().clone();
        let held = HeldLease { address: source.address.clone(), lease: self.call.fetch.lease };
        let miss = reason.map(|reason| SourceMiss {
            node: NodeId(source.node),
            address: source.address,
            first_missing_block: self.filled,
            reason,
        });
        let absent = (self.filled..).zip(self.rooms).collect();
        let lease = leased.then_some(held);
        // Nobody listens any more: what is left is dropped.
        let _ = self.events.send(LayerEvent::Ended(SourceEnd {
            miss,
            absent,
            lease,
            received_bytes,
            wrong_blocks,
        }));
    }

    /// Fetches these blocks; nothing when nobody waits for them any more.
    async fn part(&mut self, part: std::ops::Range<u32>, paths: &Paths) -> Option<Came> {
        let patience = self.call.fetch.deadline.min(DEADLINE_MAX);
        let (call, position, events) = (Arc::clone(&self.call), self.position, self.events.clone());
        let source = &call.fetch.sources[position];
        let at_most =
            self.turn.borrow().map_or_else(|| Instant::now() + DEADLINE_MAX, |turn| turn + patience);
        // Before its turn nobody waits for it.
        let usual = if self.turn.borrow().is_some() { Class::Fetch } else { Class::Prefetch };
        let class = call.fetch.class.unwrap_or(usual);
        let one = OneSource::new(&call.fetch, source, part, (at_most, &self.links)).of_class(class);
        let turn = self.turn.clone();
        let (rooms, filled) = (&mut self.rooms, &mut self.filled);
        let mut keep = |frame: Frame| {
            let Some(mut room) = rooms.pop_front() else { return false };
            if !fill(&mut room, &frame) {
                rooms.push_front(room);
                return false;
            }
            // Whoever does not listen ends this, in its own time.
            let _ = events.send(LayerEvent::Arrived { block: *filled, room });
            *filled += 1;
            true
        };
        tokio::select! {
            came = one.run(paths, &mut keep) => Some(came),
            () = over(turn, patience) => {
                Some(Came::late())
            }
            () = events.closed() => None,
        }
    }

    /// Until a node that was busy may be asked again; `false` when the fetch is dropped before that.
    async fn wait_a_little(&mut self) -> bool {
        let turn = timeout(BUSY_AGAIN, self.turn.wait_for(Option::is_some)).await;
        turn.map_or(true, |turn| turn.is_ok())
    }

    /// `false` when the fetch is dropped before its turn.
    async fn wait_for_turn(&mut self) -> bool {
        self.turn.wait_for(Option::is_some).await.is_ok()
    }

    fn source(&self) -> &pb::Source {
        &self.call.fetch.sources[self.position]
    }

    fn source_end(&self) -> u32 {
        self.source().start_blocks + self.source().len_blocks
    }

    /// The first block that is not loaded before the job's turn.
    fn ahead_end(&self) -> u32 {
        let blocks = self.call.read_buffer_bytes / self.call.frame_bytes.max(1);
        self.call.fetch.resident_blocks.saturating_add(u32::try_from(blocks).unwrap_or(u32::MAX))
    }

    /// Blocks that one source may be asked for at once.
    fn blocks_at_once(&self) -> u32 {
        let sources = self.call.fetch.sources.len().max(1) as u64;
        let blocks = self.call.in_flight_bytes_max / sources / self.call.frame_bytes.max(1);
        u32::try_from(blocks).unwrap_or(u32::MAX).max(1)
    }
}

/// Ends when a job's turn was so long ago, or the fetch was dropped.
async fn over(mut turn: watch::Receiver<Option<Instant>>, patience: Duration) {
    let begun = turn.wait_for(Option::is_some).await.ok().and_then(|turn| *turn);
    if let Some(begun) = begun {
        sleep_until(begun + patience).await;
    }
}

/// Copies every slice of a proven frame to its place; `false` when the room has other slices.
fn fill(room: &mut impl BlockRoom, frame: &Frame) -> bool {
    let layers = frame.slice_count();
    let fits = (0..layers).all(|layer| match (room.slice(layer), frame.slice(layer)) {
        (Some(to), Some(from)) if to.len() == from.len() => {
            to.copy_from_slice(&from);
            true
        }
        _ => false,
    });
    fits && room.slice(layers).is_none()
}
