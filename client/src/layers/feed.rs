//! One source's part of a layer-wise fetch: the requests before and after the prefill start, and
//! their size.
//!
//! Not here: handling received data (`buffers.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kv_core::id::{Epoch, NodeId, Tier, TrafficClass};
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::pb;
use kvfleet_transport::pick::PathKind;
use kvfleet_transport::{LayerRequest, MissReason, Progress};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::buffers::{SliceReceiver, SourceBuffers};
use super::{LayerEvent, LayerFetchCall, SliceBuffer, SourceEnd};
use crate::fetch::{DEADLINE_MAX, FetchTotals, SourceFetch, SourceOutcome};
use crate::links::{LinkStats, TransferTiming};
use crate::paths::Paths;
use crate::{HeldLease, SourceMiss};

/// Initial delay before a busy node is asked again for data that no request waits for yet; nodes
/// suggest the same.
const BUSY_BACKOFF: Duration = Duration::from_millis(50);

/// Longest such delay.
const BUSY_BACKOFF_MAX: Duration = Duration::from_secs(1);

/// Extra time after the deadline before a source is abandoned, so that it can report its own
/// lateness and partial result.
const GRACE: Duration = Duration::from_millis(20);

/// All layers of any block.
const ALL_LAYERS: Range<usize> = 0..usize::MAX;

/// State shared by all sources of a fetch.
pub(super) struct FetchPlan {
    pub(super) call: LayerFetchCall,
    /// Lengths of the slices of each block.
    slices: Vec<usize>,
    /// Set if a path does not move slices: its blocks arrive whole.
    pub(super) whole_blocks: Arc<AtomicBool>,
    pub(super) control: Arc<FetchControl>,
}

/// Requests of the caller during a fetch, and running totals.
#[derive(Debug)]
pub(super) struct FetchControl {
    /// Blocks from this one on are not requested.
    pub(super) skip_from: AtomicU32,
    /// Number of leading blocks to complete before layers of the others.
    pub(super) priority_blocks: AtomicU32,
    pub(super) received_bytes: AtomicU64,
    pub(super) wrong_blocks: AtomicU32,
}

impl Default for FetchControl {
    fn default() -> FetchControl {
        FetchControl {
            skip_from: AtomicU32::new(u32::MAX),
            priority_blocks: AtomicU32::new(0),
            received_bytes: AtomicU64::new(0),
            wrong_blocks: AtomicU32::new(0),
        }
    }
}

impl FetchPlan {
    pub(super) fn new(call: LayerFetchCall, slices: Vec<usize>) -> FetchPlan {
        FetchPlan { call, slices, whole_blocks: Arc::default(), control: Arc::default() }
    }

    fn blocks_of_all_sources(&self) -> u64 {
        self.call.fetch.sources.iter().map(|source| u64::from(source.len_blocks)).sum()
    }

    /// Number of whole blocks that fit the read buffer.
    fn buffer_blocks(&self) -> u64 {
        self.call.read_buffer_bytes / self.call.frame_bytes.max(1)
    }

    /// Number of leading layers of all blocks that fit the read buffer.
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

    /// Maximum blocks of one source with outstanding requests. A node holds whole frames even for
    /// partial requests.
    fn blocks_at_once(&self) -> u32 {
        let sources = self.call.fetch.sources.len().max(1) as u64;
        let blocks = self.call.in_flight_bytes_max / sources / self.call.frame_bytes.max(1);
        u32::try_from(blocks).unwrap_or(u32::MAX).max(1)
    }

    /// Steps for these blocks of a source, before and after the prefill start.
    fn steps(&self, blocks: Range<u32>, by_slices: bool) -> [FetchStep; 2] {
        let arrive = self.call.arrival_order;
        let step = |blocks, layers, is_ahead| FetchStep {
            blocks,
            layers,
            phase: if is_ahead { StepPhase::BeforeStart } else { StepPhase::ToExpand },
            arrival_order: arrive,
        };
        let layers = if by_slices { self.buffer_layers() } else { 0 };
        let none = blocks.end..blocks.end;
        if layers >= self.slices.len() {
            return [step(blocks, ALL_LAYERS, true), step(none, ALL_LAYERS, false)];
        }
        if layers > 0 {
            return [step(blocks.clone(), 0..layers, true), step(blocks, layers..usize::MAX, false)];
        }
        let first = self.call.fetch.resident_blocks;
        let buffered = if self.call.arrival_order == ArrivalOrder::ByLayer {
            // Other sources may fill their share by layers.
            let share = self.buffer_blocks() * blocks.len() as u64 / self.blocks_of_all_sources().max(1);
            u64::from(blocks.start) + share
        } else {
            u64::from(first) + self.buffer_blocks()
        };
        let cut = u32::try_from(buffered).unwrap_or(u32::MAX).clamp(blocks.start, blocks.end);
        [step(blocks.start..cut, ALL_LAYERS, true), step(cut..blocks.end, ALL_LAYERS, false)]
    }

    /// Expands the step after the start: leading blocks first, then layers of the others, within
    /// the limit per request.
    fn expand(&self, step: FetchStep, by_slices: bool) -> Vec<FetchStep> {
        let step = FetchStep { phase: StepPhase::AfterStart, ..step };
        if !by_slices {
            return vec![step];
        }
        let wanted = u64::from(self.control.priority_blocks.load(Ordering::Relaxed));
        let share = wanted * step.blocks.len() as u64 / self.blocks_of_all_sources().max(1);
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        let cut = step.blocks.start.saturating_add(share).min(step.blocks.end);
        let first = FetchStep {
            blocks: step.blocks.start..cut,
            arrival_order: ArrivalOrder::ByBlock,
            ..step.clone()
        };
        let each = usize::try_from(self.call.layers_per_request).unwrap_or(usize::MAX).max(1);
        let layers = step.layers.start..step.layers.end.min(self.slices.len());
        let part = |first: usize| first..first.saturating_add(each).min(layers.end);
        let rest = FetchStep { blocks: cut..step.blocks.end, ..step };
        let parts =
            layers.clone().step_by(each).map(|first| FetchStep { layers: part(first), ..rest.clone() });
        std::iter::once(first).chain(parts).collect()
    }
}

/// A request for some layers of some blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FetchStep {
    blocks: Range<u32>,
    layers: Range<usize>,
    phase: StepPhase,
    arrival_order: ArrivalOrder,
}

/// Time at which a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepPhase {
    /// Before the prefill start.
    BeforeStart,
    /// After the start; expanded into an order that is known then.
    ToExpand,
    /// After the start.
    AfterStart,
}

/// One source's part of a fetch.
pub(super) struct SourceFeed<R> {
    plan: Arc<FetchPlan>,
    position: usize,
    buffers: SourceBuffers<R>,
    prefill_start: watch::Receiver<Option<Instant>>,
    links: LinkStats,
}

/// Progress of a source.
struct SourceProgress {
    totals: SourceTotals,
    /// Blocks from this one on do not arrive.
    end: u32,
    /// Whether at least one request was answered in full.
    has_delivered: bool,
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepOutcome {
    /// Everything was requested.
    Requested,
    /// No data arrived before the prefill start; plan again.
    Restart,
}

/// Totals over all requests to a source.
#[derive(Default)]
struct SourceTotals {
    received_bytes: u64,
    wrong_blocks: u32,
    leased: bool,
    reason: Option<MissReason>,
    cause: Option<String>,
}

impl<R: SliceBuffer> SourceFeed<R> {
    pub(super) fn new(
        plan: Arc<FetchPlan>,
        position: usize,
        buffers: SourceBuffers<R>,
        prefill_start: watch::Receiver<Option<Instant>>,
        links: LinkStats,
    ) -> SourceFeed<R> {
        SourceFeed { plan, position, buffers, prefill_start, links }
    }

    pub(super) async fn run(mut self, paths: Paths) {
        let Some(sum) = self.fetch_all(&paths).await else { return };
        let call = &self.plan.call.fetch;
        let source = call.sources[self.position].clone();
        let lease = HeldLease { address: source.address.clone(), lease: call.lease };
        let miss = sum.reason.map(|reason| SourceMiss {
            node: NodeId(source.node),
            address: source.address,
            first_missing_block: self.buffers.first(),
            reason,
            cause: sum.cause,
        });
        let source = self.position;
        self.buffers.finish(|absent| {
            LayerEvent::SourceEnded(Box::new(SourceEnd {
                source,
                miss,
                incomplete: absent,
                lease: sum.leased.then_some(lease),
                received_bytes: sum.received_bytes,
                wrong_blocks: sum.wrong_blocks,
            }))
        });
    }

    /// The steps, and whether the path moves slices; `None` if the fetch was dropped.
    async fn plan_steps(&mut self, paths: &Paths) -> Option<(VecDeque<FetchStep>, bool)> {
        let (blocks, plan) = (self.blocks(), Arc::clone(&self.plan));
        let all = FetchStep {
            blocks: blocks.clone(),
            layers: ALL_LAYERS,
            phase: StepPhase::ToExpand,
            arrival_order: plan.call.arrival_order,
        };
        let by_slices = plan.call.arrival_order == ArrivalOrder::ByLayer
            && !blocks.is_empty()
            && self.moves_slices(paths).await?;
        if plan.call.read_buffer_bytes > 0 && self.prefill_start.borrow().is_none() {
            return Some((plan.steps(blocks, by_slices).into(), by_slices));
        }
        Some(([all].into(), by_slices))
    }

    /// `None` if the fetch was dropped.
    async fn fetch_all(&mut self, paths: &Paths) -> Option<SourceTotals> {
        let (mut steps, by_slices) = self.plan_steps(paths).await?;
        // Blocks behind a missing one are not requested again.
        let mut asking =
            SourceProgress { totals: SourceTotals::default(), end: self.blocks().end, has_delivered: false };
        while let Some(mut step) = steps.pop_front() {
            if step.blocks.is_empty() {
                continue;
            }
            if step.phase == StepPhase::ToExpand {
                self.wait_for_start().await?;
                let order = self.plan.expand(step, by_slices);
                order.into_iter().rev().for_each(|step| steps.push_front(step));
                continue;
            }
            if self.plan.whole_blocks.load(Ordering::Relaxed) {
                // Whole blocks arrived although slices were requested: request them only once.
                step.layers.end = ALL_LAYERS.end;
                steps.retain(|later| later.phase != StepPhase::AfterStart || later.blocks != step.blocks);
            }
            if self.run_step(&step, &mut asking, paths).await? == StepOutcome::Restart {
                let blocks = self.blocks();
                steps = [FetchStep {
                    blocks,
                    layers: ALL_LAYERS,
                    phase: StepPhase::ToExpand,
                    arrival_order: self.plan.call.arrival_order,
                }]
                .into();
            }
        }
        Some(asking.totals)
    }

    /// Runs a step, with limited blocks per request.
    async fn run_step(
        &mut self,
        step: &FetchStep,
        progress: &mut SourceProgress,
        paths: &Paths,
    ) -> Option<StepOutcome> {
        let (mut most, mut backoff) = (self.plan.blocks_at_once(), BUSY_BACKOFF);
        let mut first = step.blocks.start;
        loop {
            let useless = self.plan.control.skip_from.load(Ordering::Relaxed);
            let last = step.blocks.end.min(progress.end).min(useless);
            if first >= last {
                return Some(StepOutcome::Requested);
            }
            let is_ahead = self.prefill_start.borrow().is_none();
            if !is_ahead {
                most = self.plan.blocks_at_once();
            }
            let part = first..last.min(first.saturating_add(most));
            let came = self.fetch_part(part.clone(), step.layers.clone(), step.arrival_order, paths).await?;
            let proven = u32::try_from(came.proven).unwrap_or(u32::MAX);
            progress.totals.received_bytes += came.received_bytes;
            progress.totals.wrong_blocks += came.wrong_blocks;
            progress.totals.leased |= came.leased;
            let is_busy = came.reason == Some(MissReason::Busy);
            if is_busy
                && is_ahead
                && self.prefill_start.borrow().is_some()
                && progress.totals.received_bytes == 0
            {
                // The prefill started before any data arrived: plan again in the order that is
                // known now.
                return Some(StepOutcome::Restart);
            }
            if is_busy && (is_ahead || progress.has_delivered) {
                // Other requests had priority, so the blocks are not missing: retry, with half as
                // many blocks in case this many never fit, and at the latest at the prefill start.
                first = part.start.saturating_add(proven);
                most = (part.end - part.start).div_ceil(2);
                self.back_off(&mut backoff).await?;
                continue;
            }
            backoff = BUSY_BACKOFF;
            first = part.end;
            if came.reason.is_some() {
                (progress.totals.reason, progress.totals.cause) = (came.reason, came.cause);
                let short = part.start.saturating_add(proven)..progress.end;
                progress.end = short.start;
                // An error means that the receiver is gone, which ends this task elsewhere.
                let _ = self.buffers.events().send(LayerEvent::Unavailable { blocks: short });
                return Some(StepOutcome::Requested);
            }
            progress.has_delivered = true;
        }
    }

    /// Waits before a busy node is asked again, longer each time; `None` if the fetch is dropped
    /// before that.
    async fn back_off(&mut self, backoff: &mut Duration) -> Option<()> {
        let span = std::mem::replace(backoff, (*backoff * 2).min(BUSY_BACKOFF_MAX));
        if self.prefill_start.borrow().is_some() {
            let events = self.buffers.events();
            return timeout(span, events.closed()).await.is_err().then_some(());
        }
        timeout(span, self.wait_for_start()).await.unwrap_or(Some(()))
    }

    /// Waits for the prefill start; `None` if the fetch is dropped or closed before that.
    async fn wait_for_start(&mut self) -> Option<()> {
        let events = self.buffers.events();
        tokio::select! {
            turn = self.prefill_start.wait_for(Option::is_some) => turn.ok().map(drop),
            () = events.closed() => None,
        }
    }

    fn blocks(&self) -> Range<u32> {
        let source = self.source();
        source.start_blocks..source.start_blocks + source.len_blocks
    }

    /// Whether the path to the source moves slices; `false` if that is unknown at the deadline.
    async fn moves_slices(&mut self, paths: &Paths) -> Option<bool> {
        let (source, events) = (self.source(), self.buffers.events());
        tokio::select! {
            found = paths.get(&source.address, Some(Epoch(source.epoch))) => {
                Some(found.is_ok_and(|found| found.path.fetches_slices()))
            }
            () = deadline_passed(self.prefill_start.clone(), self.time_limit()) => Some(false),
            () = events.closed() => None,
        }
    }

    /// Fetches these layers of these blocks; `None` if the fetch is dropped.
    async fn fetch_part(
        &mut self,
        blocks: Range<u32>,
        layers: Range<usize>,
        arrive: ArrivalOrder,
        paths: &Paths,
    ) -> Option<SourceOutcome> {
        if self.buffers.events().is_closed() {
            return None;
        }
        let patience = self.time_limit();
        let (plan, turn, events) =
            (Arc::clone(&self.plan), self.prefill_start.clone(), self.buffers.events());
        let call = &plan.call.fetch;
        let at_most = turn.borrow().map_or_else(|| Instant::now() + DEADLINE_MAX, |turn| turn + patience);
        // Before the start no request waits for the data.
        let is_ahead = turn.borrow().is_none();
        let class = call.class.unwrap_or(if is_ahead { TrafficClass::Prefetch } else { TrafficClass::Fetch });
        let source = &call.sources[self.position];
        let one = SourceFetch::new(call, source, blocks.clone(), at_most, &self.links).with_class(class);
        let mut filling = SliceReceiver {
            buffers: &mut self.buffers,
            first: blocks.start,
            requested: LayerRequest { layers, arrive },
            identity: call.identity,
            hashes: &call.hashes,
            totals: FetchTotals::default(),
            timing: TransferTiming::begin(),
            has_data: Arc::default(),
            whole_blocks: Arc::clone(&plan.whole_blocks),
            control: Arc::clone(&plan.control),
            progress: Progress::default(),
        };
        let heard = Arc::clone(&filling.has_data);
        tokio::select! {
            biased;
            came = one.run(paths, &mut filling) => Some(came),
            // The prefill started during a low-priority request without data: request it again with
            // the priority of a fetch.
            () = started_without_data(turn.clone(), &heard), if is_ahead => {
                Some(SourceOutcome::to_retry())
            }
            () = deadline_passed(turn, patience + GRACE) => {
                // The source did not even report its lateness.
                let (timed, kind) = (filling.timing, filling.progress.kind());
                self.record_abandoned(class, timed, kind);
                Some(SourceOutcome::too_late())
            }
            () = events.closed() => {
                // The fetch was dropped, perhaps because the data did not arrive: record that for
                // the link.
                let (timed, kind) = (filling.timing, filling.progress.kind());
                self.record_abandoned(class, timed, kind);
                None
            }
        }
    }

    /// Records an abandoned attempt for its path, if a request waited for it.
    fn record_abandoned(&self, class: TrafficClass, mut timed: TransferTiming, kind: Option<PathKind>) {
        if class != TrafficClass::Fetch {
            return;
        }
        timed.record_stall();
        let source = self.source();
        let planned = Tier::ALL.into_iter().find(|tier| *tier as u32 == source.tier);
        self.links.record_fetch(NodeId(source.node), Epoch(source.epoch), kind, planned, &timed);
    }

    fn time_limit(&self) -> Duration {
        self.plan.call.fetch.deadline.min(DEADLINE_MAX)
    }

    fn source(&self) -> &pb::Source {
        &self.plan.call.fetch.sources[self.position]
    }
}

/// Completes if the prefill starts before any data of a part arrived.
async fn started_without_data(mut turn: watch::Receiver<Option<Instant>>, has_data: &AtomicBool) {
    let is_there = turn.wait_for(Option::is_some).await.is_ok();
    if !is_there || has_data.load(Ordering::Relaxed) {
        std::future::pending::<()>().await;
    }
}

/// Completes when the time limit after the prefill start has passed, or the fetch is dropped.
async fn deadline_passed(mut turn: watch::Receiver<Option<Instant>>, patience: Duration) {
    let begun = turn.wait_for(Option::is_some).await.ok().and_then(|turn| *turn);
    if let Some(begun) = begun {
        sleep_until(begun + patience).await;
    }
}
