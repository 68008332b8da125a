//! One source's part of a fetch: what is asked for before the job's turn and after it, and how much at once.
//!
//! Not here: what becomes of what comes (`rooms.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kv_core::id::{Class, Epoch, NodeId, Tier};
use kv_core::pipeline::Arrive;
use kvfleet_proto::pb;
use kvfleet_transport::pick::PathKind;
use kvfleet_transport::{AskedLayers, MissReason, Progress};
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
    /// Whether a path was found that moves no slices: blocks of its source come whole.
    pub(super) whole: Arc<AtomicBool>,
    pub(super) order: Arc<Order>,
}

/// What is said and counted while a fetch is under way.
#[derive(Debug)]
pub(super) struct Order {
    /// Blocks from this one on are not to be asked for.
    pub(super) useless: AtomicU32,
    /// So many come whole before layers of the others do.
    pub(super) blocks_first: AtomicU32,
    pub(super) received_bytes: AtomicU64,
    pub(super) wrong_blocks: AtomicU32,
}

impl Default for Order {
    fn default() -> Order {
        Order {
            useless: AtomicU32::new(u32::MAX),
            blocks_first: AtomicU32::new(0),
            received_bytes: AtomicU64::new(0),
            wrong_blocks: AtomicU32::new(0),
        }
    }
}

impl Plan {
    pub(super) fn new(call: LayersCall, slices: Vec<usize>) -> Plan {
        Plan { call, slices, whole: Arc::default(), order: Arc::default() }
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
        let arrive = self.call.arrive;
        let step = |blocks, layers, is_ahead| Step {
            blocks,
            layers,
            when: if is_ahead { When::Ahead } else { When::Then },
            arrive,
        };
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

    /// What is asked after the turn: leading blocks, and then layers of all others, no more of them at once than may be.
    fn in_order(&self, step: Step, by_slices: bool) -> Vec<Step> {
        let step = Step { when: When::Now, ..step };
        if !by_slices {
            return vec![step];
        }
        let wanted = u64::from(self.order.blocks_first.load(Ordering::Relaxed));
        let share = wanted * step.blocks.len() as u64 / self.blocks_of_all_sources().max(1);
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        let cut = step.blocks.start.saturating_add(share).min(step.blocks.end);
        let first = Step { blocks: step.blocks.start..cut, arrive: Arrive::ByBlock, ..step.clone() };
        let each = usize::try_from(self.call.layers_at_once).unwrap_or(usize::MAX).max(1);
        let layers = step.layers.start..step.layers.end.min(self.slices.len());
        let part = |first: usize| first..first.saturating_add(each).min(layers.end);
        let rest = Step { blocks: cut..step.blocks.end, ..step };
        let parts = layers.clone().step_by(each).map(|first| Step { layers: part(first), ..rest.clone() });
        std::iter::once(first).chain(parts).collect()
    }
}

/// Layers of some blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    blocks: Range<u32>,
    layers: Range<usize>,
    when: When,
    arrive: Arrive,
}

/// When something is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// Before the job's turn.
    Ahead,
    /// After it, in an order that is known then.
    Then,
    /// After it.
    Now,
}

/// One source's part of a fetch.
pub(super) struct Feed<R> {
    plan: Arc<Plan>,
    position: usize,
    rooms: Rooms<R>,
    turn: watch::Receiver<Option<Instant>>,
    links: Links,
}

/// How far a source was asked.
struct Asking {
    sum: Sum,
    /// Blocks from this one on do not come.
    end: u32,
    /// Something that was asked for came, all of it.
    has_come: bool,
}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// All of it was asked for.
    All,
    /// Nothing came of it before the turn.
    Again,
}

/// What came of all that a source was asked.
#[derive(Default)]
struct Sum {
    received_bytes: u64,
    wrong_blocks: u32,
    leased: bool,
    reason: Option<MissReason>,
    cause: Option<String>,
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
            cause: sum.cause,
        });
        let source = self.position;
        self.rooms.end(|absent| {
            LayerEvent::Ended(Box::new(SourceEnd {
                source,
                miss,
                absent,
                lease: sum.leased.then_some(lease),
                received_bytes: sum.received_bytes,
                wrong_blocks: sum.wrong_blocks,
            }))
        });
    }

    /// What is asked for, and whether the path moves slices; nothing when nobody waits for it any more.
    async fn plan(&mut self, paths: &Paths) -> Option<(VecDeque<Step>, bool)> {
        let (blocks, plan) = (self.blocks(), Arc::clone(&self.plan));
        let all = Step { blocks: blocks.clone(), layers: ALL, when: When::Then, arrive: plan.call.arrive };
        let by_slices =
            plan.call.arrive == Arrive::ByLayer && !blocks.is_empty() && self.moves_slices(paths).await?;
        if plan.call.read_buffer_bytes > 0 && self.turn.borrow().is_none() {
            return Some((plan.steps(blocks, by_slices).into(), by_slices));
        }
        Some(([all].into(), by_slices))
    }

    /// Nothing when nobody waits for it any more.
    async fn ask_for_all(&mut self, paths: &Paths) -> Option<Sum> {
        let (mut steps, by_slices) = self.plan(paths).await?;
        // What is behind a block that does not come is not asked for again.
        let mut asking = Asking { sum: Sum::default(), end: self.blocks().end, has_come: false };
        while let Some(mut step) = steps.pop_front() {
            if step.blocks.is_empty() {
                continue;
            }
            if step.when == When::Then {
                self.turn_comes().await?;
                let order = self.plan.in_order(step, by_slices);
                order.into_iter().rev().for_each(|step| steps.push_front(step));
                continue;
            }
            if self.plan.whole.load(Ordering::Relaxed) {
                // Whole blocks came where slices were asked for: once is enough.
                step.layers.end = ALL.end;
                steps.retain(|later| later.when != When::Now || later.blocks != step.blocks);
            }
            if self.ask(&step, &mut asking, paths).await? == Asked::Again {
                let blocks = self.blocks();
                steps =
                    [Step { blocks, layers: ALL, when: When::Then, arrive: self.plan.call.arrive }].into();
            }
        }
        Some(asking.sum)
    }

    /// Asks for what a step says, no more of it at once than may be.
    async fn ask(&mut self, step: &Step, asking: &mut Asking, paths: &Paths) -> Option<Asked> {
        let (mut most, mut again) = (self.plan.blocks_at_once(), BUSY_AGAIN);
        let mut first = step.blocks.start;
        loop {
            let useless = self.plan.order.useless.load(Ordering::Relaxed);
            let last = step.blocks.end.min(asking.end).min(useless);
            if first >= last {
                return Some(Asked::All);
            }
            let is_ahead = self.turn.borrow().is_none();
            if !is_ahead {
                most = self.plan.blocks_at_once();
            }
            let part = first..last.min(first.saturating_add(most));
            let came = self.part(part.clone(), (step.layers.clone(), step.arrive), paths).await?;
            let proven = u32::try_from(came.proven).unwrap_or(u32::MAX);
            asking.sum.received_bytes += came.received_bytes;
            asking.sum.wrong_blocks += came.wrong_blocks;
            asking.sum.leased |= came.leased;
            let is_busy = came.reason == Some(MissReason::Busy);
            if is_busy && is_ahead && self.turn.borrow().is_some() && asking.sum.received_bytes == 0 {
                // Its turn came before anything of it did: it is asked for in the order that is known now.
                return Some(Asked::Again);
            }
            if is_busy && (is_ahead || asking.has_come) {
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
                (asking.sum.reason, asking.sum.cause) = (came.reason, came.cause);
                let short = part.start.saturating_add(proven)..asking.end;
                asking.end = short.start;
                // Whoever does not listen ends this, in its own time.
                let _ = self.rooms.events().send(LayerEvent::Short { blocks: short });
                return Some(Asked::All);
            }
            asking.has_come = true;
        }
    }

    /// Until a node that was busy may be asked again, which is later each time; nothing when the fetch is dropped before that.
    async fn wait_a_little(&mut self, again: &mut Duration) -> Option<()> {
        let span = std::mem::replace(again, (*again * 2).min(BUSY_AGAIN_MAX));
        if self.turn.borrow().is_some() {
            let events = self.rooms.events();
            return timeout(span, events.closed()).await.is_err().then_some(());
        }
        timeout(span, self.turn_comes()).await.unwrap_or(Some(()))
    }

    /// Until it is the job's turn; nothing when the fetch is dropped or closed before that.
    async fn turn_comes(&mut self) -> Option<()> {
        let events = self.rooms.events();
        tokio::select! {
            turn = self.turn.wait_for(Option::is_some) => turn.ok().map(drop),
            () = events.closed() => None,
        }
    }

    fn blocks(&self) -> Range<u32> {
        let source = self.source();
        source.start_blocks..source.start_blocks + source.len_blocks
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
    async fn part(
        &mut self,
        blocks: Range<u32>,
        (layers, arrive): (Range<usize>, Arrive),
        paths: &Paths,
    ) -> Option<Came> {
        if self.rooms.events().is_closed() {
            return None;
        }
        let patience = self.patience();
        let (plan, turn, events) = (Arc::clone(&self.plan), self.turn.clone(), self.rooms.events());
        let call = &plan.call.fetch;
        let at_most = turn.borrow().map_or_else(|| Instant::now() + DEADLINE_MAX, |turn| turn + patience);
        // Before its turn nobody waits for it.
        let is_ahead = turn.borrow().is_none();
        let class = call.class.unwrap_or(if is_ahead { Class::Prefetch } else { Class::Fetch });
        let source = &call.sources[self.position];
        let one = OneSource::new(call, source, blocks.clone(), (at_most, &self.links)).of_class(class);
        let mut filling = Filling {
            rooms: &mut self.rooms,
            first: blocks.start,
            asked: AskedLayers { layers, arrive },
            identity: call.identity,
            hashes: &call.hashes,
            tally: Tally::default(),
            timed: Timed::begin(),
            heard: Arc::default(),
            whole: Arc::clone(&plan.whole),
            order: Arc::clone(&plan.order),
            progress: Progress::default(),
        };
        let heard = Arc::clone(&filling.heard);
        tokio::select! {
            biased;
            came = one.run(paths, &mut filling) => Some(came),
            // Nobody waits for what is asked for as that: it is asked for again, now that somebody does.
            () = unheard_at_its_turn(turn.clone(), &heard), if is_ahead => {
                Some(Came::again())
            }
            () = over(turn, patience + GRACE) => {
                // It did not even say that it is late.
                let (timed, kind) = (filling.timed, filling.progress.kind());
                self.given_up(class, timed, kind);
                Some(Came::late())
            }
            () = events.closed() => {
                // Nobody waits for it any more, perhaps because it did not come: that is to be known of the source.
                let (timed, kind) = (filling.timed, filling.progress.kind());
                self.given_up(class, timed, kind);
                None
            }
        }
    }

    /// An attempt was given up. If somebody waited for it, that counts for the path it was on.
    fn given_up(&self, class: Class, mut timed: Timed, kind: Option<PathKind>) {
        if class != Class::Fetch {
            return;
        }
        timed.held_up();
        let source = self.source();
        let planned = Tier::ALL.into_iter().find(|tier| *tier as u32 == source.tier);
        self.links.fetched((NodeId(source.node), Epoch(source.epoch)), kind, planned, &timed);
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
