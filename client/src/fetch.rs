//! Fetch: reads the cached part of a prefix from all its sources at once and verifies it block by
//! block.
//!
//! A block counts only if every earlier one arrived, so the result is contiguous from the first
//! block that is not resident. One deadline limits the whole fetch, because recomputing is cheaper
//! after it. Not here: choosing sources (the router's decision) and recomputing (the engine).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{
    BlockHash, Category, Epoch, IdentityDigest, LeaseId, NodeId, RequestId, TenantId, Tier, TrafficClass,
};
use kvfleet_net::trace_context::current_traceparent;
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_transport::{
    BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, Progress, RequestContext,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::Client;
use crate::links::{LinkReader, LinkStats, TransferTiming, common_tier};
use crate::paths::{AcquiredPath, Paths};

/// Longest deadline, to avoid overflow of the clock; a longer one would have no effect.
pub(crate) const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// A fetch of the blocks that a decision lists as cached.
#[derive(Clone, Debug)]
pub struct FetchCall {
    /// Lease that holds the blocks on the nodes until released.
    pub lease: LeaseId,
    /// The request.
    pub request: RequestId,
    /// The tenant.
    pub tenant: TenantId,
    /// Its category.
    pub category: Category,
    /// Expected identity of the bytes.
    pub identity: IdentityDigest,
    /// Blocks of the whole request, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Leading blocks that are in the engine's GPU memory, as the decision says; sources begin
    /// behind them.
    pub resident_blocks: u32,
    /// The decision's sources: consecutive segments from the first block that is not resident.
    pub sources: Vec<pb::Source>,
    /// Time after which recomputing is cheaper than waiting.
    pub deadline: Duration,
    /// The traffic class if no request waits for this fetch, else `None`.
    pub class: Option<TrafficClass>,
}

/// A received block, verified to be the requested one.
#[derive(Clone, Debug)]
pub struct FetchedBlock {
    /// Its bytes.
    pub frame: Frame,
    /// Tier it was read from.
    pub tier: Tier,
    /// Node that sent it.
    pub node: NodeId,
}

/// Result of a fetch.
#[derive(Clone, Debug, Default)]
pub struct FetchOutcome {
    /// Blocks from the first non-resident one on, without gaps, all verified.
    pub blocks: Vec<FetchedBlock>,
    /// Encoded bytes of `blocks`.
    pub bytes: u64,
    /// Encoded bytes of all received frames, usable or not.
    pub received_bytes: u64,
    /// Received frames that are not the requested block, or are damaged.
    pub wrong_blocks: u32,
    /// Sources that delivered less than the decision promised.
    pub misses: Vec<SourceMiss>,
    /// Leases now held; release them when the request ends.
    pub leases: Vec<HeldLease>,
}

/// A source that delivered less than planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMiss {
    /// The node.
    pub node: NodeId,
    /// Its data address.
    pub address: String,
    /// First block of the request that it did not deliver.
    pub first_missing_block: u32,
    /// The reason.
    pub reason: MissReason,
    /// The broken link between here and the node and its remedy, if known.
    pub cause: Option<String>,
}

impl std::fmt::Display for SourceMiss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} from block {}", self.node, self.reason.name(), self.first_missing_block)?;
        self.cause.as_ref().map_or(Ok(()), |cause| write!(f, ", {cause}"))
    }
}

/// A lease on one node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HeldLease {
    /// Data address of the node.
    pub address: String,
    /// The lease.
    pub lease: LeaseId,
}

/// Error of a fetch that could not start. Missing blocks are not an error (see
/// [`FetchOutcome::misses`]).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The sources are not consecutive segments behind the resident blocks and within the request.
    #[error(
        "source {position} covers blocks {start} to {end}, expected it to begin at {expected} and end by {asked}"
    )]
    Sources {
        /// Position of the source.
        position: usize,
        /// Its first block.
        start: u32,
        /// One past its last block.
        end: u64,
        /// Block at which it should begin.
        expected: u64,
        /// Blocks of the request.
        asked: usize,
    },
    /// The number of buffers differs from the number of blocks of the sources.
    #[error("{rooms} buffers for {blocks} blocks of the sources: give one for each")]
    BufferCount {
        /// Buffers given.
        rooms: usize,
        /// Blocks of all sources.
        blocks: usize,
    },
    /// The buffers have another number of layers than the compute costs.
    #[error("buffers of {layers} layers, and costs of {costs}: give both for the same model")]
    LayerCount {
        /// Layers of the first buffer.
        layers: usize,
        /// Layers of the costs.
        costs: usize,
    },
}

impl Client {
    /// Fetches from all sources at once and verifies every frame: identity, hash, checksums.
    ///
    /// # Errors
    /// If the sources are inconsistent with the hashes.
    pub async fn fetch(&self, call: FetchCall) -> Result<FetchOutcome, FetchError> {
        check_sources(&call)?;
        let deadline = Instant::now() + call.deadline.min(DEADLINE_MAX);
        let mut running = JoinSet::new();
        for (position, source) in call.sources.iter().enumerate() {
            let all = source.start_blocks..source.start_blocks + source.len_blocks;
            let one = SourceFetch::new(&call, source, all, deadline, &self.links);
            let paths = self.paths.clone();
            let (identity, hashes) = (call.identity, one.request.hashes.clone());
            let mut proving = FrameReceiver {
                identity,
                hashes,
                frames: Vec::new(),
                totals: FetchTotals::default(),
                timing: TransferTiming::begin(),
            };
            running.spawn(async move {
                let came = one.run(&paths, &mut proving).await;
                (position, (came, proving.frames))
            });
        }
        let mut came: Vec<_> = call.sources.iter().map(|_| (SourceOutcome::default(), Vec::new())).collect();
        while let Some(ended) = running.join_next().await {
            // If a source's task panicked, its default outcome reports the source as lost.
            if let Ok((position, result)) = ended {
                came[position] = result;
            }
        }
        Ok(assemble(&call, came))
    }

    /// Reader of the measured transfers per link, for reports to one router
    /// ([`pb::ReportRequest::links`]).
    #[must_use]
    pub fn link_reader(&self) -> LinkReader {
        LinkReader::new(self.links.clone())
    }

    /// Releases leases on all nodes at once. A lease that cannot be released expires; the failures
    /// are returned for the log.
    pub async fn release(&self, leases: &[HeldLease]) -> Vec<(HeldLease, PathError)> {
        let mut running = JoinSet::new();
        for held in leases {
            let (held, paths) = (held.clone(), self.paths.clone());
            running.spawn(async move { release_one(&paths, &held).await.err().map(|error| (held, error)) });
        }
        running.join_all().await.into_iter().flatten().collect()
    }
}

async fn release_one(paths: &Paths, held: &HeldLease) -> Result<(), PathError> {
    // Without an epoch, so a lost node delays no release.
    let AcquiredPath { path, .. } = paths.get(&held.address, None).await?;
    let released = path.release(held.lease).await;
    if let Err(error) = &released {
        paths.note_failure(&held.address, None, &path, error);
    }
    released
}

pub(crate) fn check_sources(call: &FetchCall) -> Result<(), FetchError> {
    let mut expected = u64::from(call.resident_blocks);
    for (position, source) in call.sources.iter().enumerate() {
        let end = u64::from(source.start_blocks) + u64::from(source.len_blocks);
        if u64::from(source.start_blocks) != expected || end > call.hashes.len() as u64 {
            let (start, asked) = (source.start_blocks, call.hashes.len());
            return Err(FetchError::Sources { position, start, end, expected, asked });
        }
        expected = end;
    }
    Ok(())
}

/// Outcome of one source. The default is a lost source.
#[derive(Default)]
pub(crate) struct SourceOutcome {
    /// Leading blocks that are verified and kept.
    pub(crate) proven: usize,
    tiers: Vec<Tier>,
    pub(crate) received_bytes: u64,
    pub(crate) wrong_blocks: u32,
    /// Reason of the shortfall; `None` if all blocks arrived.
    pub(crate) reason: Option<MissReason>,
    /// Description of the failure behind the reason, if known.
    pub(crate) cause: Option<String>,
    /// Whether the node may hold a lease now.
    pub(crate) leased: bool,
}

impl SourceOutcome {
    /// Outcome of an attempt that was abandoned to be retried at once.
    pub(crate) fn to_retry() -> SourceOutcome {
        SourceOutcome { reason: Some(MissReason::Busy), leased: true, ..SourceOutcome::default() }
    }

    /// Outcome of an attempt that the deadline ended.
    pub(crate) fn too_late() -> SourceOutcome {
        SourceOutcome { reason: Some(MissReason::TooLate), leased: true, ..SourceOutcome::default() }
    }
}

/// Running totals of one attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FetchTotals {
    /// Leading blocks that are verified and kept.
    pub(crate) proven: usize,
    pub(crate) received_bytes: u64,
    pub(crate) wrong_blocks: u32,
}

/// Receives the blocks of a source and verifies them.
pub(crate) trait SourceReceiver: Send {
    /// One attempt over this path.
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>>;

    /// Totals of the attempt.
    fn totals(&self) -> FetchTotals;

    /// Timing of the attempt's transfers.
    fn timing(&self) -> TransferTiming;
}

/// Receives frames. The first wrong frame ends the usable part of its source.
struct FrameReceiver {
    identity: IdentityDigest,
    hashes: Vec<BlockHash>,
    frames: Vec<Frame>,
    totals: FetchTotals,
    timing: TransferTiming,
}

impl SourceReceiver for FrameReceiver {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        self.timing = TransferTiming::begin();
        Box::pin(async move { path.fetch(request, &mut |frame| self.receive(frame)).await })
    }

    fn totals(&self) -> FetchTotals {
        self.totals
    }

    fn timing(&self) -> TransferTiming {
        self.timing
    }
}

impl FrameReceiver {
    fn receive(&mut self, frame: Frame) {
        self.timing.record(frame.bytes.len());
        let tally = &mut self.totals;
        tally.received_bytes += frame.bytes.len() as u64;
        if tally.wrong_blocks > 0 {
            return;
        }
        let hash = self.hashes.get(tally.proven);
        if hash.is_some_and(|hash| frame.verify(self.identity, *hash).is_ok()) {
            tally.proven += 1;
            self.frames.push(frame);
        } else {
            tally.wrong_blocks += 1;
        }
    }
}

/// The part of a fetch that one source delivers.
pub(crate) struct SourceFetch {
    address: String,
    node: NodeId,
    /// The tier that the decision named.
    planned: Option<Tier>,
    request: FetchRequest,
    deadline: Instant,
    links: LinkStats,
}

impl SourceFetch {
    /// A fetch of some blocks of a source, numbered within the request.
    pub(crate) fn new(
        call: &FetchCall,
        source: &pb::Source,
        blocks: Range<u32>,
        deadline: Instant,
        links: &LinkStats,
    ) -> SourceFetch {
        SourceFetch {
            address: source.address.clone(),
            planned: Tier::ALL.into_iter().find(|tier| *tier as u32 == source.tier),
            node: NodeId(source.node),
            links: links.clone(),
            request: FetchRequest {
                context: RequestContext {
                    lease: call.lease,
                    request: call.request,
                    tenant: call.tenant,
                    category: call.category,
                    identity: call.identity,
                    traceparent: current_traceparent(),
                    class: call.class,
                },
                epoch: Epoch(source.epoch),
                first_offset_blocks: blocks.start,
                hashes: call.hashes[blocks.start as usize..blocks.end as usize].to_vec(),
                deadline: Duration::ZERO,
                progress: Progress::default(),
            },
            deadline,
        }
    }

    /// The same with another traffic class than the call's.
    pub(crate) fn with_class(mut self, class: TrafficClass) -> SourceFetch {
        self.request.context.class = Some(class);
        self
    }

    pub(crate) async fn run(self, paths: &Paths, receiver: &mut dyn SourceReceiver) -> SourceOutcome {
        loop {
            let found = match timeout_at(self.deadline, paths.get(&self.address, self.epoch())).await {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => return lost_source(&self.address, &error, false),
                Err(_) => {
                    return SourceOutcome { reason: Some(MissReason::TooLate), ..SourceOutcome::default() };
                }
            };
            let (mut came, error) = self.fetch_over(&found.path, receiver).await;
            let Some(error) = error else {
                // A broken stream does not affect the path's other streams; a failed path does.
                if let Some(error) = found.path.failure() {
                    paths.note_failure(&self.address, self.epoch(), &found.path, &error);
                    came.cause = (came.reason == Some(MissReason::NodeLost)).then(|| error.to_string());
                }
                return came;
            };
            paths.note_failure(&self.address, self.epoch(), &found.path, &error);
            // A kept path may have failed unnoticed, for example when its node restarted: dial once
            // more.
            if !found.reused || !matches!(error, PathError::Broken { .. }) {
                return lost_source(&self.address, &error, true);
            }
        }
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(self.request.epoch)
    }

    /// Makes one attempt. An error means that no block was received.
    async fn fetch_over(
        &self,
        path: &Arc<dyn Path>,
        receiver: &mut dyn SourceReceiver,
    ) -> (SourceOutcome, Option<PathError>) {
        let mut came = SourceOutcome { leased: true, ..SourceOutcome::default() };
        let mut request = self.request.clone();
        request.deadline = self.deadline.saturating_duration_since(Instant::now());
        let (class, progress) = (request.class(), request.progress.clone());
        let answer = match receiver.fetch(&**path, request).await {
            Ok(answer) => answer,
            Err(error) => return (came, Some(error)),
        };
        let mut timed = receiver.timing();
        let FetchTotals { proven, received_bytes, wrong_blocks } = receiver.totals();
        (came.proven, came.received_bytes, came.wrong_blocks) = (proven, received_bytes, wrong_blocks);
        self.apply_answer(&mut came, &answer);
        if came.reason == Some(MissReason::TooLate) {
            timed.record_stall();
        }
        if class == TrafficClass::Fetch && came.wrong_blocks == 0 {
            let tier = common_tier(&came.tiers, self.request.hashes.len(), self.planned);
            self.links.record_fetch(self.node, self.request.epoch, progress.kind(), tier, &timed);
        }
        (came, None)
    }

    fn apply_answer(&self, came: &mut SourceOutcome, answer: &FetchAnswer) {
        came.tiers = answer.tiers().to_vec();
        came.proven = came.proven.min(came.tiers.len());
        let told = match answer {
            FetchAnswer::Hit { .. } => None,
            FetchAnswer::Partial { reason, .. } | FetchAnswer::Miss { reason } => Some(*reason),
            FetchAnswer::Busy { .. } => Some(MissReason::Busy),
        };
        let complete = came.proven == self.request.hashes.len();
        came.reason = match told {
            _ if came.wrong_blocks > 0 => Some(MissReason::Corrupt),
            _ if complete => None,
            Some(reason) => Some(reason),
            None => Some(MissReason::MediumFailed),
        };
        // A `Busy` answer before any transfer grants no lease; a transfer that ended busy keeps its
        // lease.
        came.leased = !matches!(answer, FetchAnswer::Busy { .. });
    }
}

fn lost_source(address: &str, error: &PathError, leased: bool) -> SourceOutcome {
    tracing::debug!(address, %error, "source lost");
    let cause = Some(error.to_string());
    SourceOutcome { reason: Some(MissReason::NodeLost), cause, leased, ..SourceOutcome::default() }
}

/// Joins the sources' parts up to the first missing block.
fn assemble(call: &FetchCall, came: Vec<(SourceOutcome, Vec<Frame>)>) -> FetchOutcome {
    let mut outcome = FetchOutcome::default();
    let mut whole = true;
    for (source, (came, frames)) in call.sources.iter().zip(came) {
        let node = NodeId(source.node);
        let delivered = u32::try_from(came.proven).unwrap_or(u32::MAX);
        outcome.received_bytes += came.received_bytes;
        outcome.wrong_blocks += came.wrong_blocks;
        let short = delivered < source.len_blocks;
        if whole {
            for (frame, tier) in frames.into_iter().zip(came.tiers).take(came.proven) {
                outcome.bytes += frame.bytes.len() as u64;
                outcome.blocks.push(FetchedBlock { frame, tier, node });
            }
        }
        if short {
            outcome.misses.push(SourceMiss {
                node,
                address: source.address.clone(),
                first_missing_block: source.start_blocks.saturating_add(delivered),
                reason: came.reason.unwrap_or(MissReason::NodeLost),
                cause: came.cause,
            });
        }
        whole &= !short;
        let held = HeldLease { address: source.address.clone(), lease: call.lease };
        if came.leased && !outcome.leases.contains(&held) {
            outcome.leases.push(held);
        }
    }
    outcome
}
