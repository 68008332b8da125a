//! One source's part of a fetch: what is asked for before the job's turn and after it, and how much at once.
//!
//! Not here: what becomes of what comes (`rooms.rs`).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::{Class, Epoch, NodeId};
use kv_core::pipeline::Arrive;
use kvfleet_proto::pb;
use kvfleet_transport::{AskedLayers, MissReason};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::rooms::{Filling, Rooms};
use super::{BlockRoom, LayerEvent, LayersCall, SourceEnd};
use crate::fetch::{Came, DEADLINE_MAX, OneSource, Tally};
use crate::links::{Links, Timed};
use crate::paths::Paths;
use crate::{HeldLease, SourceMiss};

/// When a node that was busy is asked again for what nobody waits for yet: as soon as nodes say.
const BUSY_AGAIN: Duration = Duration::from_millis(50);

/// The longest that it is left alone for.
const BUSY_AGAIN_MAX: Duration = Duration::from_secs(1);

/// How much later than a fetch its source is given up: it says itself that it is late, and what came of it.
const GRACE: Duration = Duration::from_millis(20);

/// All layers, however many there are.
const ALL: Range<usize> = 0..usize::MAX;

/// What all sources of a fetch share.
pub(super) struct Plan {
    pub(super) call: LayersCall,
    /// Lengths of the slices of each block.
    slices: Vec<usize>,
}

impl Plan {
    pub(super) fn new(call: LayersCall, slices: Vec<usize>) -> Plan {
        Plan { call, slices }
    }

    fn blocks_of_all_sources(&self) -> u64 {
        self.call.fetch.sources.iter().map(|source| u64::from(source.len_blocks)).sum()
    }

    /// Blocks that the read buffer takes whole.
    fn buffer_blocks(&self) -> u64 {
        self.call.read_buffer_bytes / self.call.frame_bytes.max(1)
    }

    /// Leading layers that the read buffer takes of all blocks.
    fn buffer_layers(&self) -> usize {
        let mut left = self.call.read_buffer_bytes;
        let blocks = self.blocks_of_all_sources();
        let fits = |bytes: &&usize| {
            let layer = (**bytes as u64).checked_mul(blocks);
            let rest = layer.and_then(|layer| left.checked_sub(layer));
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        self.slices.iter().take_while(fits).count()
    }

    /// Blocks of which one source may be asked for something at once. A node holds whole frames, whatever is asked of them.
    fn blocks_at_once(&self) -> u32 {
        let sources = self.call.fetch.sources.len().max(1) as u64;
        let blocks = self.call.in_flight_bytes_max / sources / self.call.frame_bytes.max(1);
        u32::try_from(blocks).unwrap_or(u32::MAX).max(1)
    }

    /// What is asked of a source with these blocks before the job's turn, and then.
    fn steps(&self, blocks: Range<u32>, by_slices: bool) -> [Step; 2] {
        let step = |blocks, layers, is_ahead| Step { blocks, layers, is_ahead };
        let layers = if by_slices { self.buffer_layers() } else { 0 };
        let none = blocks.end..blocks.end;
        if layers >= self.slices.len() {
            return [step(blocks, ALL, true), step(none, ALL, false)];
        }
        if layers > 0 {
            return [step(blocks.clone(), 0..layers, true), step(blocks, layers..usize::MAX, false)];
        }
        let first = self.call.fetch.resident_blocks;
        let buffered = if self.call.arrive == Arrive::ByLayer {
            // Other sources may fill their share by layers.
            let share = self.buffer_blocks() * blocks.len() as u64 / self.blocks_of_all_sources().max(1);
            u64::from(blocks.start) + share
        } else {
            u64::from(first) + self.buffer_blocks()
        };
        let cut = u32::try_from(buffered).unwrap_or(u32::MAX).clamp(blocks.start, blocks.end);
        [step(blocks.start..cut, ALL, true), step(cut..blocks.end, ALL, false)]
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
    links: Links,
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
        links: Links,
    ) -> Feed<R> {
        Feed { plan, position, rooms, turn, links }
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
        let _ = events.send(LayerEvent::Ended(Box::new(end)));
    }

    /// Nothing when nobody waits for it any more.
    async fn ask_for_all(&mut self, paths: &Paths) -> Option<Sum> {
        let source = self.source();
        let blocks = source.start_blocks..source.start_blocks + source.len_blocks;
        let mut sum = Sum::default();
        let mut steps = [Step { blocks: blocks.clone(), layers: ALL, is_ahead: false }].to_vec();
        if self.plan.call.read_buffer_bytes > 0 && !blocks.is_empty() {
            let by_slices = self.plan.call.arrive == Arrive::ByLayer && self.moves_slices(paths).await?;
            if self.turn.borrow().is_none() {
                steps = self.plan.steps(blocks.clone(), by_slices).to_vec();
            }
        }
        // What is behind a block that does not come is not asked for again.
        let mut end = blocks.end;
        for step in steps {
            let (mut most, mut again) = (self.plan.blocks_at_once(), BUSY_AGAIN);
            let (mut first, last) = (step.blocks.start, step.blocks.end.min(end));
            while first < last {
                if !step.is_ahead {
                    // Dropped before its turn, it is not waited for.
                    self.turn.wait_for(Option::is_some).await.ok()?;
                }
                if self.turn.borrow().is_some() {
                    most = self.plan.blocks_at_once();
                }
                let part = first..last.min(first.saturating_add(most));
                let is_ahead = self.turn.borrow().is_none();
                let came = self.part(part.clone(), step.layers.clone(), paths).await?;
                let proven = u32::try_from(came.proven).unwrap_or(u32::MAX);
                sum.received_bytes += came.received_bytes;
                sum.wrong_blocks += came.wrong_blocks;
                sum.leased |= came.leased;
                if is_ahead && came.reason == Some(MissReason::Busy) {
                    // Others went first, which says nothing of the blocks: they are asked for again, fewer at once in case
                    // there is never room for so many, and at the turn at the latest.
                    first = part.start.saturating_add(proven);
                    most = (part.end - part.start).div_ceil(2);
                    self.wait_a_little(&mut again).await?;
                    continue;
                }
                again = BUSY_AGAIN;
                first = part.end;
                if came.reason.is_some() {
                    sum.reason = came.reason;
                    end = part.start.saturating_add(proven);
                    break;
                }
            }
        }
        Some(sum)
    }

    /// Until a node that was busy may be asked again, which is later each time; nothing when the fetch is dropped before that.
    async fn wait_a_little(&mut self, again: &mut Duration) -> Option<()> {
        let span = std::mem::replace(again, (*again * 2).min(BUSY_AGAIN_MAX));
        match timeout(span, self.turn.wait_for(Option::is_some)).await {
            Ok(Err(_)) => None,
            _ => Some(()),
        }
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
        // Before its turn nobody waits for it.
        let is_ahead = turn.borrow().is_none();
        let usual = if is_ahead { Class::Prefetch } else { Class::Fetch };
        let source = &call.sources[self.position];
        let one = OneSource::new(call, source, blocks.clone(), (at_most, &self.links))
            .of_class(call.class.unwrap_or(usual));
        let mut filling = Filling {
            rooms: &mut self.rooms,
            first: blocks.start,
            asked: AskedLayers { layers, arrive: self.plan.call.arrive },
            identity: call.identity,
            hashes: &call.hashes,
            tally: Tally::default(),
            timed: Timed::begin(),
            heard: Arc::default(),
        };
        let heard = Arc::clone(&filling.heard);
        tokio::select! {
            biased;
            came = one.run(paths, &mut filling) => Some(came),
            // Nobody waits for what is asked for as that: it is asked for again, now that somebody does.
            () = unheard_at_its_turn(turn.clone(), &heard), if is_ahead => {
                Some(Came::again())
            }
            () = over(turn, patience + GRACE) => Some(Came::late()),
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

/// Ends when the turn comes before anything of a part did.
async fn unheard_at_its_turn(mut turn: watch::Receiver<Option<Instant>>, heard: &AtomicBool) {
    let is_there = turn.wait_for(Option::is_some).await.is_ok();
    if !is_there || heard.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// Ends when a job's turn was so long ago, or the fetch was dropped.
async fn over(mut turn: watch::Receiver<Option<Instant>>, patience: Duration) {
    let begun = turn.wait_for(Option::is_some).await.ok().and_then(|turn| *turn);
    if let Some(begun) = begun {
        sleep_until(begun + patience).await;
    }
}
