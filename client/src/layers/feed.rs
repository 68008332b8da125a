//! One source's part of a fetch: what is asked for before the job's turn and after it, and how much at once.
//!
//! Not here: what becomes of what comes (`rooms.rs`).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{Epoch, NodeId};
use kvfleet_proto::pb;
use kvfleet_transport::MissReason;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::rooms::{Filling, Rooms};
use super::{BlockRoom, LayerEvent, LayersCall, SourceEnd};
use crate::fetch::{Came, DEADLINE_MAX, OneSource, Tally};
use crate::paths::Paths;
use crate::{HeldLease, SourceMiss};

/// All layers, however many there are.
const ALL: Range<usize> = 0..usize::MAX;

/// What all sources of a fetch share.
pub(super) struct Plan {
    pub(super) call: LayersCall,
    /// Lengths of the slices of each block.
    slices: Vec<usize>,
    /// Leading layers that the read buffer takes of all blocks.
    buffer_layers: usize,
}

impl Plan {
    /// For so many blocks of all sources.
    pub(super) fn new(call: LayersCall, slices: Vec<usize>, blocks: usize) -> Plan {
        let mut left = call.read_buffer_bytes;
        let fits = |bytes: &&usize| {
            let layer = (**bytes as u64).checked_mul(blocks as u64);
            let rest = layer.and_then(|layer| left.checked_sub(layer));
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        let buffer_layers = slices.iter().take_while(fits).count();
        Plan { call, slices, buffer_layers }
    }

    /// The first block that is not loaded before the job's turn, where blocks come whole.
    fn ahead_end(&self) -> u32 {
        let blocks = self.call.read_buffer_bytes / self.call.frame_bytes.max(1);
        self.call.fetch.resident_blocks.saturating_add(u32::try_from(blocks).unwrap_or(u32::MAX))
    }

    /// Blocks of which one source may be asked for these layers at once.
    fn blocks_at_once(&self, layers: &Range<usize>) -> u32 {
        let bytes = if *layers == ALL {
            self.call.frame_bytes
        } else {
            let end = layers.end.min(self.slices.len());
            self.slices[layers.start.min(end)..end].iter().map(|bytes| *bytes as u64).sum()
        };
        let sources = self.call.fetch.sources.len().max(1) as u64;
        let blocks = self.call.in_flight_bytes_max / sources / bytes.max(1);
        u32::try_from(blocks).unwrap_or(u32::MAX).max(1)
    }

    /// What is asked of a source with these blocks, in order.
    fn steps(&self, blocks: Range<u32>, by_slices: bool) -> [Step; 2] {
        let step = |blocks, layers, is_ahead| Step { blocks, layers, is_ahead };
        if by_slices {
            let ahead = self.buffer_layers;
            let rest = if ahead < self.slices.len() { blocks.clone() } else { blocks.end..blocks.end };
            let buffered = if ahead > 0 { blocks } else { rest.start..rest.start };
            let layers = if ahead > 0 { ahead..usize::MAX } else { ALL };
            [step(buffered, 0..ahead, true), step(rest, layers, false)]
        } else {
            let cut = self.ahead_end().clamp(blocks.start, blocks.end);
            [step(blocks.start..cut, ALL, true), step(cut..blocks.end, ALL, false)]
        }
    }
}

/// Layers of some blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    blocks: Range<u32>,
    layers: Range<usize>,
    /// Before the job's turn.
    is_ahead: bool,
}

/// One source's part of a fetch.
pub(super) struct Feed<R> {
    plan: Arc<Plan>,
    position: usize,
    rooms: Rooms<R>,
    turn: watch::Receiver<Option<Instant>>,
}

/// What came of all that a source was asked.
#[derive(Default)]
struct Sum {
    received_bytes: u64,
    wrong_blocks: u32,
    leased: bool,
    reason: Option<MissReason>,
}

impl<R: BlockRoom> Feed<R> {
    pub(super) fn new(
        plan: Arc<Plan>,
        position: usize,
        rooms: Rooms<R>,
        turn: watch::Receiver<Option<Instant>>,
    ) -> Feed<R> {
        Feed { plan, position, rooms, turn }
    }

    pub(super) async fn run(mut self, paths: Paths) {
        let Some(sum) = self.ask_for_all(&paths).await else { return };
        let call = &self.plan.call.fetch;
        let source = call.sources[self.position].clone();
        let lease = HeldLease { address: source.address.clone(), lease: call.lease };
        let miss = sum.reason.map(|reason| SourceMiss {
            node: NodeId(source.node),
            address: source.address,
            first_missing_block: self.rooms.first(),
            reason,
        });
        let events = self.rooms.events();
        let end = SourceEnd {
            miss,
            absent: self.rooms.end(),
            lease: sum.leased.then_some(lease),
            received_bytes: sum.received_bytes,
            wrong_blocks: sum.wrong_blocks,
        };
        // Nobody listens any more: what is left is dropped.
        let _ = events.send(LayerEvent::Ended(end));
    }

    /// Nothing when nobody waits for it any more.
    async fn ask_for_all(&mut self, paths: &Paths) -> Option<Sum> {
        let source = self.source();
        let blocks = source.start_blocks..source.start_blocks + source.len_blocks;
        let by_slices = self.plan.call.read_buffer_bytes > 0 && self.moves_slices(paths).await?;
        let mut sum = Sum::default();
        for Step { blocks, layers, is_ahead } in self.plan.steps(blocks, by_slices) {
            let most = self.plan.blocks_at_once(&layers);
            let mut first = blocks.start;
            while first < blocks.end && sum.reason.is_none() {
                if !is_ahead {
                    // Dropped before its turn, it is not waited for.
                    self.turn.wait_for(Option::is_some).await.ok()?;
                }
                let part = first..blocks.end.min(first.saturating_add(most));
                first = part.end;
                let came = self.part(part, layers.clone(), paths).await?;
                sum.received_bytes += came.received_bytes;
                sum.wrong_blocks += came.wrong_blocks;
                sum.leased |= came.leased;
                sum.reason = came.reason;
            }
        }
        Some(sum)
    }

    /// Whether the path to the source moves slices, as far as that is known in time.
    async fn moves_slices(&mut self, paths: &Paths) -> Option<bool> {
        let (source, events) = (self.source(), self.rooms.events());
        tokio::select! {
            found = paths.get(&source.address, Some(Epoch(source.epoch))) => {
                Some(found.is_ok_and(|found| found.path.moves_slices()))
            }
            () = over(self.turn.clone(), self.patience()) => Some(false),
            () = events.closed() => None,
        }
    }

    /// Fetches these layers of these blocks; nothing when nobody waits for them any more.
    async fn part(&mut self, blocks: Range<u32>, layers: Range<usize>, paths: &Paths) -> Option<Came> {
        let patience = self.patience();
        let (plan, turn, events) = (Arc::clone(&self.plan), self.turn.clone(), self.rooms.events());
        let call = &plan.call.fetch;
        let at_most = turn.borrow().map_or_else(|| Instant::now() + DEADLINE_MAX, |turn| turn + patience);
        let one = OneSource::new(call, &call.sources[self.position], blocks.clone(), at_most);
        let mut filling = Filling {
            rooms: &mut self.rooms,
            first: blocks.start,
            layers,
            identity: call.identity,
            hashes: &call.hashes,
            tally: Tally::default(),
        };
        tokio::select! {
            came = one.run(paths, &mut filling) => Some(came),
            () = over(turn, patience) => Some(Came::late()),
            () = events.closed() => None,
        }
    }

    fn patience(&self) -> Duration {
        self.plan.call.fetch.deadline.min(DEADLINE_MAX)
    }

    fn source(&self) -> &pb::Source {
        &self.plan.call.fetch.sources[self.position]
    }
}

/// Ends when a job's turn was so long ago, or the fetch was dropped.
async fn over(mut turn: watch::Receiver<Option<Instant>>, patience: Duration) {
    let begun = turn.wait_for(Option::is_some).await.ok().and_then(|turn| *turn);
    if let Some(begun) = begun {
        sleep_until(begun + patience).await;
    }
}
