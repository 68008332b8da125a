//! Fetch: the cached part of a prefix, from all its sources at once, proven block by block.
//!
//! A block counts only while every earlier one came: what is handed out is contiguous from the first block that
//! the engine has not itself.
//! Waiting ends at one deadline for everything, because after it recomputing is cheaper. Not here:
//! which sources (the router's decision) and recomputing (the engine).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{
    BlockHash, Category, Class, Epoch, IdentityDigest, LeaseId, NodeId, RequestId, TenantId, Tier,
};
use kvfleet_proto::frame::Frame;
use kvfleet_proto::pb;
use kvfleet_proto::trace_context::current_traceparent;
use kvfleet_transport::{Asker, BoxFuture, FetchAnswer, FetchRequest, MissReason, Path, PathError, Progress};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::Client;
use crate::links::{LinkReader, Links, Timed, one_tier};
use crate::paths::{Found, Paths};

/// Longest deadline; more is the same as none, and would overflow the clock.
pub(crate) const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Fetch what a decision says is cached.
#[derive(Clone, Debug)]
pub struct FetchCall {
    /// Lease that holds the blocks on the nodes until released.
    pub lease: LeaseId,
    /// The request.
    pub request: RequestId,
    /// Whose.
    pub tenant: TenantId,
    /// Its category.
    pub category: Category,
    /// Identity the bytes must have.
    pub identity: IdentityDigest,
    /// Blocks of the whole request, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Leading blocks that the engine has in GPU memory itself, as the decision says: sources begin behind them.
    pub resident_blocks: u32,
    /// The decision's sources: consecutive segments from the first block that is not resident.
    pub sources: Vec<pb::Source>,
    /// Time after which recomputing is cheaper than waiting.
    pub deadline: Duration,
    /// What it is for, where no request waits for it.
    pub class: Option<Class>,
}

/// A block that came, proven to be the one asked.
#[derive(Clone, Debug)]
pub struct FetchedBlock {
    /// Its bytes.
    pub frame: Frame,
    /// Tier it was read from.
    pub tier: Tier,
    /// Node it came from.
    pub node: NodeId,
}

/// What came of a fetch.
#[derive(Clone, Debug, Default)]
pub struct FetchOutcome {
    /// Blocks from the first that is not resident on, without gaps, all verified.
    pub blocks: Vec<FetchedBlock>,
    /// Encoded bytes of `blocks`.
    pub bytes: u64,
    /// Encoded bytes of all frames that arrived, usable or not.
    pub received_bytes: u64,
    /// Frames that arrived and were not the block asked, whole.
    pub wrong_blocks: u32,
    /// Sources that delivered less than the decision promised.
    pub misses: Vec<SourceMiss>,
    /// Leases now held, to be released when the request ends.
    pub leases: Vec<HeldLease>,
}

/// A source that fell short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceMiss {
    /// The node.
    pub node: NodeId,
    /// Its data address.
    pub address: String,
    /// First block of the request that it did not deliver.
    pub first_missing_block: u32,
    /// Why.
    pub reason: MissReason,
    /// What is broken between here and the node, and what to do about it, where that is known.
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

/// Why a fetch could not even begin. That blocks did not come is no error (see [`FetchOutcome::misses`]).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The sources are not consecutive segments behind the resident blocks and within the request.
    #[error(
        "source {position} covers blocks {start} to {end}, expected it to begin at {expected} and end by {asked}"
    )]
    Sources {
        /// Which source.
        position: usize,
        /// Its first block.
        start: u32,
        /// One past its last block.
        end: u64,
        /// Where it should begin.
        expected: u64,
        /// Blocks of the request.
        asked: usize,
    },
    /// Not one room for each block of the sources.
    #[error("{rooms} rooms for {blocks} blocks of the sources: give one for each")]
    Rooms {
        /// Rooms that were given.
        rooms: usize,
        /// Blocks of all sources.
        blocks: usize,
    },
    /// Rooms of another model than the one whose computing is reckoned with.
    #[error("rooms of {layers} layers, and costs of {costs}: give both for the same model")]
    Layers {
        /// Layers of the first room.
        layers: usize,
        /// Layers of the costs.
        costs: usize,
    },
}

impl Client {
    /// Fetches from all sources at once and verifies every frame: identity, hash, checksums.
    ///
    /// # Errors
    /// When the sources make no sense for these hashes.
    pub async fn fetch(&self, call: FetchCall) -> Result<FetchOutcome, FetchError> {
        check_sources(&call)?;
        let deadline = Instant::now() + call.deadline.min(DEADLINE_MAX);
        let mut running = JoinSet::new();
        for (position, source) in call.sources.iter().enumerate() {
            let all = source.start_blocks..source.start_blocks + source.len_blocks;
            let one = OneSource::new(&call, source, all, (deadline, &self.links));
            let paths = self.paths.clone();
            let (identity, hashes) = (call.identity, one.request.hashes.clone());
            let mut proving = Proving {
                identity,
                hashes,
                frames: Vec::new(),
                tally: Tally::default(),
                timed: Timed::begin(),
            };
            running.spawn(async move {
                let came = one.run(&paths, &mut proving).await;
                (position, (came, proving.frames))
            });
        }
        let mut came: Vec<_> = call.sources.iter().map(|_| (Came::default(), Vec::new())).collect();
        while let Some(ended) = running.join_next().await {
            // A source whose task panicked has delivered nothing; its default says that it is lost.
            if let Ok((position, result)) = ended {
                came[position] = result;
            }
        }
        Ok(assemble(&call, came))
    }

    /// What fetches came to, for reports to one router ([`pb::ReportRequest::links`]).
    #[must_use]
    pub fn link_reader(&self) -> LinkReader {
        LinkReader::new(self.links.clone())
    }

    /// Ends leases, on all nodes at once. What cannot be released expires by itself; the failures come
    /// back for the log.
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
    // No epoch: a node that was lost is not waited for again to say goodbye.
    let Found { path, .. } = paths.get(&held.address, None).await?;
    let released = path.release(held.lease).await;
    if let Err(error) = &released {
        paths.failed(&held.address, None, &path, error);
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

/// What came from one source. The default is a source that is lost.
#[derive(Default)]
pub(crate) struct Came {
    /// The leading blocks that are proven and kept.
    pub(crate) proven: usize,
    tiers: Vec<Tier>,
    pub(crate) received_bytes: u64,
    pub(crate) wrong_blocks: u32,
    /// Why not all; nothing when all came.
    pub(crate) reason: Option<MissReason>,
    /// What is broken, where that is why.
    pub(crate) cause: Option<String>,
    /// Whether the node may hold a lease now.
    pub(crate) leased: bool,
}

impl Came {
    /// Given up to be asked for again at once.
    pub(crate) fn again() -> Came {
        Came { reason: Some(MissReason::Busy), leased: true, ..Came::default() }
    }

    /// The deadline came first.
    pub(crate) fn late() -> Came {
        Came { reason: Some(MissReason::TooLate), leased: true, ..Came::default() }
    }
}

/// What one attempt brought so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// The leading blocks that are proven and kept.
    pub(crate) proven: usize,
    pub(crate) received_bytes: u64,
    pub(crate) wrong_blocks: u32,
}

/// Who takes what comes of a source, and proves it.
pub(crate) trait Taking: Send {
    /// One attempt over this path.
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>>;

    /// What the attempt brought.
    fn tally(&self) -> Tally;

    /// When it came.
    fn timed(&self) -> Timed;
}

/// Takes frames. The first that is not the block asked ends what is usable of its source.
struct Proving {
    identity: IdentityDigest,
    hashes: Vec<BlockHash>,
    frames: Vec<Frame>,
    tally: Tally,
    timed: Timed,
}

impl Taking for Proving {
    fn fetch<'a>(
        &'a mut self,
        path: &'a dyn Path,
        request: FetchRequest,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        self.timed = Timed::begin();
        Box::pin(async move { path.fetch(request, &mut |frame| self.take(frame)).await })
    }

    fn tally(&self) -> Tally {
        self.tally
    }

    fn timed(&self) -> Timed {
        self.timed
    }
}

impl Proving {
    fn take(&mut self, frame: Frame) {
        self.timed.came(frame.bytes.len());
        let tally = &mut self.tally;
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

/// One source's part of a fetch.
pub(crate) struct OneSource {
    address: String,
    node: NodeId,
    /// The tier that the decision named.
    planned: Option<Tier>,
    request: FetchRequest,
    deadline: Instant,
    links: Links,
}

impl OneSource {
    /// Blocks of a source, counted as the request's.
    pub(crate) fn new(
        call: &FetchCall,
        source: &pb::Source,
        blocks: Range<u32>,
        (deadline, links): (Instant, &Links),
    ) -> OneSource {
        OneSource {
            address: source.address.clone(),
            planned: Tier::ALL.into_iter().find(|tier| *tier as u32 == source.tier),
            node: NodeId(source.node),
            links: links.clone(),
            request: FetchRequest {
                asker: Asker {
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

    /// The same for something else than the call says.
    pub(crate) fn of_class(mut self, class: Class) -> OneSource {
        self.request.asker.class = Some(class);
        self
    }

    pub(crate) async fn run(self, paths: &Paths, taking: &mut dyn Taking) -> Came {
        loop {
            let found = match timeout_at(self.deadline, paths.get(&self.address, self.epoch())).await {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => return lost(&self.address, &error, false),
                Err(_) => return Came { reason: Some(MissReason::TooLate), ..Came::default() },
            };
            let (mut came, error) = self.fetch_over(&found.path, taking).await;
            let Some(error) = error else {
                // A stream that was cut says nothing of the others; a path that ended does.
                if let Some(error) = found.path.failure() {
                    paths.failed(&self.address, self.epoch(), &found.path, &error);
                    came.cause = (came.reason == Some(MissReason::NodeLost)).then(|| error.to_string());
                }
                return came;
            };
            paths.failed(&self.address, self.epoch(), &found.path, &error);
            // A kept path may have died unnoticed, as when its node restarted: dial once more.
            if !found.kept || !matches!(error, PathError::Broken { .. }) {
                return lost(&self.address, &error, true);
            }
        }
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(self.request.epoch)
    }

    /// One attempt. An error means that nothing came.
    async fn fetch_over(&self, path: &Arc<dyn Path>, taking: &mut dyn Taking) -> (Came, Option<PathError>) {
        let mut came = Came { leased: true, ..Came::default() };
        let mut request = self.request.clone();
        request.deadline = self.deadline.saturating_duration_since(Instant::now());
        let (class, progress) = (request.class(), request.progress.clone());
        let answer = match taking.fetch(&**path, request).await {
            Ok(answer) => answer,
            Err(error) => return (came, Some(error)),
        };
        let mut timed = taking.timed();
        let Tally { proven, received_bytes, wrong_blocks } = taking.tally();
        (came.proven, came.received_bytes, came.wrong_blocks) = (proven, received_bytes, wrong_blocks);
        self.conclude(&mut came, &answer);
        if came.reason == Some(MissReason::TooLate) {
            timed.held_up();
        }
        if class == Class::Fetch && came.wrong_blocks == 0 {
            let tier = one_tier(&came.tiers, self.request.hashes.len(), self.planned);
            self.links.fetched((self.node, self.request.epoch), progress.kind(), tier, &timed);
        }
        (came, None)
    }

    fn conclude(&self, came: &mut Came, answer: &FetchAnswer) {
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
        // One that began and ended busy has its lease.
        came.leased = !matches!(answer, FetchAnswer::Busy { .. });
    }
}

fn lost(address: &str, error: &PathError, leased: bool) -> Came {
    tracing::debug!(address, %error, "source lost");
    let cause = Some(error.to_string());
    Came { reason: Some(MissReason::NodeLost), cause, leased, ..Came::default() }
}

/// Puts the sources' parts together up to the first block that is missing.
fn assemble(call: &FetchCall, came: Vec<(Came, Vec<Frame>)>) -> FetchOutcome {
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
