//! Copies of blocks from other nodes, on a router's request.
//!
//! A copy is a fetch in the replicate class, which only uses spare capacity, followed by a normal
//! save. Space is requested first, so a block that is not admitted is not fetched. Copies run in
//! pieces to bound memory, and completed pieces stay. Not here: the choice of blocks and targets
//! (the routers), and authorization (`server`).

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, IdentityDigest, LeaseId, RequestId, TrafficClass};
use kv_core::place::copies::{BlockRun, CopyOutcome};
use kv_core::tier::{OfferOutcome, RefusalReason};
use kvfleet_net::tls::Identity;
use kvfleet_proto::frame::Frame;
use kvfleet_transport::pick::{NetworkPreference, PathCandidate, PathKind, PickDialer, PickRules};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{
    AnnouncePosition, BlockService, Dialer, FetchAnswer, FetchRequest, MissReason, Path, Progress,
    RequestContext, SaveOffer, SaveRefusal, SaveRequest, SaveSession,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::block_service::{NodeSaveSession, Service};
use crate::metrics::Metrics;

/// Maximum copies queued behind the running ones; above it the router should choose another target.
pub const COPIES_WAITING_MAX: usize = 16;

/// Maximum blocks of one copy: 64 KiB of hashes, about a second of 2 MiB blocks on a fast link.
pub const COPY_BLOCKS_MAX: usize = 4_096;

/// Longest time of one copy, whatever the request says: a reader fetches the missing blocks itself
/// by then.
pub const COPY_TIME_MAX: Duration = Duration::from_secs(60);

/// Bytes fetched at once for one copy, or one block: long enough to fill a fast link, short enough
/// that a wasted piece costs little.
const PIECE_BYTES: u64 = 8 << 20;

/// Minimum and maximum wait before a busy source is asked again.
const RETRY_MIN: Duration = Duration::from_millis(5);
const RETRY_MAX: Duration = Duration::from_millis(200);

/// Maximum cached paths to other nodes.
const PATHS_MAX: usize = 64;

/// Maximum bytes that running copies hold outside the arena: a received piece and the one being
/// read.
pub(crate) fn memory_bytes_max(copies: u32, frame_bytes_max: usize) -> u64 {
    u64::from(copies).saturating_mul(2 * PIECE_BYTES.max(frame_bytes_max as u64))
}

/// A router's copy request.
#[derive(Clone, Debug)]
pub(crate) struct CopyRequest {
    pub(crate) run: BlockRun,
    pub(crate) source_address: String,
    pub(crate) source_epoch: Epoch,
    /// Identity under the weights that must be in force at both nodes.
    pub(crate) identity: IdentityDigest,
    pub(crate) bytes_max: u64,
    pub(crate) within: Duration,
}

/// Outcome of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyReport {
    pub(crate) end: CopyOutcome,
    pub(crate) stored_blocks: u32,
    pub(crate) present_blocks: u32,
    pub(crate) stored_bytes: u64,
    pub(crate) visible_at: Option<AnnouncePosition>,
}

impl CopyReport {
    fn empty(end: CopyOutcome) -> CopyReport {
        CopyReport { end, stored_blocks: 0, present_blocks: 0, stored_bytes: 0, visible_at: None }
    }

    /// Leading blocks of the run that are present now.
    fn blocks(&self) -> usize {
        self.stored_blocks as usize + self.present_blocks as usize
    }
}

/// Outcome of one piece.
enum PieceOutcome {
    /// All blocks of the piece are present.
    Present,
    /// The source is busy; retry after this time.
    Retry(Duration),
    Ended(CopyOutcome),
}

/// Executes copy requests.
pub(crate) struct Copier {
    service: Arc<Service>,
    dialer: Arc<dyn Dialer>,
    paths: Mutex<BTreeMap<String, Arc<dyn Path>>>,
    running: Semaphore,
    /// Running and queued copies.
    queue_slots: Semaphore,
    /// Keyed, because nodes may share a certificate and with it the namespace of their leases.
    leases: RandomState,
    next_lease: AtomicU64,
    metrics: Metrics,
    /// Cancelled when this node accepts no more copies, because it is about to leave.
    is_closed: CancellationToken,
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier").finish_non_exhaustive()
    }
}

/// Puts frames up to the first that is refused: later blocks are useless without it, and would be
/// counted in its place.
async fn put_leading(session: &mut NodeSaveSession, frames: Vec<Frame>) {
    for frame in frames {
        let before = session.stored_blocks();
        session.put(frame).await;
        if session.stored_blocks() == before {
            break;
        }
    }
}

/// Dialer for node-to-node transfers: the network transports that every node serves.
pub(crate) fn dialer(identity: &Identity, network: NetworkPreference) -> Arc<dyn Dialer> {
    let quic: Arc<dyn Dialer> = Arc::new(QuicDialer::new(identity, QuicConfig::default()));
    let tcp: Arc<dyn Dialer> = Arc::new(TcpDialer::new(identity, TcpConfig::default()));
    let way = |kind, dialer| PathCandidate { kind, dialer };
    let rules = PickRules { network, ..PickRules::default() };
    Arc::new(PickDialer::new(way(PathKind::Tcp, tcp), vec![way(PathKind::Quic, quic)], rules))
}

impl Copier {
    /// Runs up to `copies` copies at once; 0 disables copies. Running ones end when `is_closed` is
    /// cancelled.
    pub(crate) fn new(
        service: Arc<Service>,
        dialer: Arc<dyn Dialer>,
        copies: u32,
        metrics: Metrics,
        is_closed: CancellationToken,
    ) -> Copier {
        let copies = copies as usize;
        let places = if copies == 0 { 0 } else { copies + COPIES_WAITING_MAX };
        Copier {
            service,
            dialer,
            paths: Mutex::default(),
            running: Semaphore::new(copies),
            queue_slots: Semaphore::new(places),
            leases: RandomState::new(),
            next_lease: AtomicU64::new(0),
            metrics,
            is_closed,
        }
    }

    /// Copies a run. Dropping the future ends the copy.
    pub(crate) async fn copy(&self, order: &CopyRequest) -> CopyReport {
        let lost = CopyReport::empty(CopyOutcome::TargetLost);
        let copied = self.is_closed.run_until_cancelled(self.run_queued(order)).await.unwrap_or(lost);
        self.metrics.copied(copied.end, copied.stored_blocks, copied.stored_bytes);
        tracing::debug!(
            source = order.source_address,
            end = copied.end.name(),
            blocks = copied.stored_blocks,
            "copy ended"
        );
        copied
    }

    async fn run_queued(&self, order: &CopyRequest) -> CopyReport {
        let until = Instant::now() + order.within.min(COPY_TIME_MAX);
        if let Some(end) = self.identity_mismatch(order.identity) {
            return CopyReport::empty(end);
        }
        let Ok(_place) = self.queue_slots.try_acquire() else { return CopyReport::empty(CopyOutcome::Queue) };
        match timeout_at(until, self.running.acquire()).await {
            Ok(Ok(_running)) => self.copy_pieces(order, until).await,
            _ => CopyReport::empty(CopyOutcome::TooLate),
        }
    }

    /// Why blocks of this identity are not stored here, or `None`.
    fn identity_mismatch(&self, identity: IdentityDigest) -> Option<CopyOutcome> {
        if identity.generation_relative_to(self.service.manifest()).is_none() {
            return Some(CopyOutcome::IdentityDiffers);
        }
        (identity != self.service.identity()).then_some(CopyOutcome::GenerationDiffers)
    }

    async fn copy_pieces(&self, order: &CopyRequest, until: Instant) -> CopyReport {
        let mut copied = CopyReport::empty(CopyOutcome::Copied);
        let most = self.service.frame_bytes_max() as u64;
        let frame_bytes = if order.run.frame_bytes == 0 { most } else { order.run.frame_bytes.min(most) };
        let at_once = PIECE_BYTES / frame_bytes.max(1);
        loop {
            let done = copied.blocks();
            if done >= order.run.hashes.len() {
                return copied;
            }
            if Instant::now() >= until {
                return CopyReport { end: CopyOutcome::TooLate, ..copied };
            }
            let affordable = order.bytes_max.saturating_sub(copied.stored_bytes) / frame_bytes.max(1);
            if affordable == 0 {
                return CopyReport { end: CopyOutcome::Budget, ..copied };
            }
            let blocks = usize::try_from(at_once.max(1).min(affordable)).unwrap_or(usize::MAX);
            let part = BlockRun { frame_bytes, ..order.run.part(done, done.saturating_add(blocks)) };
            match timeout_at(until, self.copy_piece(order, &part, until, &mut copied)).await {
                Ok(PieceOutcome::Present) => {}
                Ok(PieceOutcome::Retry(wait)) if Instant::now() + wait < until => sleep(wait).await,
                Ok(PieceOutcome::Retry(_)) => return CopyReport { end: CopyOutcome::SourceBusy, ..copied },
                Ok(PieceOutcome::Ended(end)) => return CopyReport { end, ..copied },
                Err(_) => return CopyReport { end: CopyOutcome::TooLate, ..copied },
            }
        }
    }

    /// Requests space, fetches the blocks that have space, and stores them.
    async fn copy_piece(
        &self,
        order: &CopyRequest,
        part: &BlockRun,
        until: Instant,
        copied: &mut CopyReport,
    ) -> PieceOutcome {
        let number = self.next_lease.fetch_add(1, Ordering::Relaxed);
        let lease = LeaseId(self.leases.hash_one(number));
        let request = save_request(order, part, lease);
        let (answers, mut session) = match self.service.reserve(&request).await {
            Ok(reserved) => reserved,
            Err(SaveOffer::Busy { retry_after }) => return PieceOutcome::Retry(retry_after),
            Err(SaveOffer::Refused(refusal)) => return PieceOutcome::Ended(end_of_refusal(refusal)),
            Err(SaveOffer::Wanted(_)) => return PieceOutcome::Ended(CopyOutcome::Full),
        };
        // Blocks after one without space are useless.
        let taken = answers.iter().take_while(|answer| !matches!(answer, OfferOutcome::Refused(_))).count();
        let is_wanted = |(answer, _): &(&OfferOutcome, &BlockHash)| matches!(answer, OfferOutcome::Wanted(_));
        let wanted = answers.iter().zip(&part.hashes).take(taken).filter(is_wanted);
        let wanted: Vec<BlockHash> = wanted.map(|(_, hash)| *hash).collect();
        let fetched = self.fetch(order, request.context.clone(), &wanted, part.frame_bytes, until).await;
        let (frames, reason) = match fetched {
            PieceFetch::Frames { frames, reason } => (frames, reason),
            PieceFetch::Retry(wait) => {
                self.service.release(lease).await;
                return PieceOutcome::Retry(wait);
            }
        };
        let came = frames.len();
        put_leading(&mut session, frames).await;
        let (stored, is_short) = (session.stored_blocks(), came > session.stored_blocks() as usize);
        let done = Box::new(session).finish().await;
        self.service.release(lease).await;
        // Count only the leading blocks of the run. Blocks stored after a refused one stay, but are
        // not counted.
        let mut left = stored as usize;
        let leading = answers.iter().take(taken).take_while(|answer| match answer {
            OfferOutcome::Wanted(_) => {
                let came = left > 0;
                left = left.saturating_sub(1);
                came
            }
            _ => true,
        });
        let leading = u32::try_from(leading.count()).unwrap_or(u32::MAX);
        copied.stored_blocks += stored;
        copied.present_blocks += leading.saturating_sub(stored);
        copied.stored_bytes += done.stored_bytes;
        copied.visible_at = done.visible_at.filter(|_| stored > 0).or(copied.visible_at);
        let refused = answers.get(taken).and_then(|answer| match answer {
            OfferOutcome::Refused(by) => Some(end_of_refused_block(*by)),
            _ => None,
        });
        // Reserved space that was not available in time.
        let no_room = is_short.then_some(CopyOutcome::Full);
        reason.or(no_room).or(refused).map_or(PieceOutcome::Present, PieceOutcome::Ended)
    }

    /// The leading blocks that arrive in time and verify, and why no more arrived.
    async fn fetch(
        &self,
        order: &CopyRequest,
        asker: RequestContext,
        hashes: &[BlockHash],
        frame_bytes: u64,
        until: Instant,
    ) -> PieceFetch {
        let ended = |end| PieceFetch::Frames { frames: Vec::new(), reason: Some(end) };
        if hashes.is_empty() {
            return PieceFetch::Frames { frames: Vec::new(), reason: None };
        }
        let Some(path) = self.path(&order.source_address).await else {
            return ended(CopyOutcome::SourceLost);
        };
        let (lease, identity) = (asker.lease, asker.identity);
        let request = FetchRequest {
            context: asker,
            epoch: order.source_epoch,
            first_offset_blocks: 0,
            hashes: hashes.to_vec(),
            deadline: until.saturating_duration_since(Instant::now()),
            progress: Progress::default(),
        };
        let (mut came, mut is_large) = (Vec::new(), false);
        // Ignore a source that sends more blocks or larger frames than requested.
        let mut take = |frame: Frame| {
            is_large |= frame.bytes.len() as u64 > frame_bytes;
            if came.len() < hashes.len() && !is_large {
                came.push(frame);
            }
        };
        let answer = path.fetch(request, &mut take).await;
        if path.release(lease).await.is_err() || answer.is_err() {
            self.forget(&order.source_address, &path);
        }
        let right = came.iter().zip(hashes).take_while(|(frame, hash)| {
            frame.bytes.len() <= self.service.frame_bytes_max() && frame.verify(identity, **hash).is_ok()
        });
        let right = right.count();
        let is_wrong = right < came.len() || is_large;
        came.truncate(right);
        let short = came.len() < hashes.len();
        let reason = match answer {
            _ if is_wrong => Some(CopyOutcome::Corrupt),
            Err(_) => Some(CopyOutcome::SourceLost),
            Ok(FetchAnswer::Busy { retry_after }) => {
                return PieceFetch::Retry(retry_after.clamp(RETRY_MIN, RETRY_MAX));
            }
            // The source claims a full hit, but blocks are missing.
            Ok(FetchAnswer::Hit { .. }) => short.then_some(CopyOutcome::NotHeld),
            Ok(
                FetchAnswer::Partial { reason: MissReason::Busy, .. }
                | FetchAnswer::Miss { reason: MissReason::Busy },
            ) if came.is_empty() => {
                return PieceFetch::Retry(RETRY_MAX);
            }
            Ok(FetchAnswer::Partial { reason, .. } | FetchAnswer::Miss { reason }) => {
                Some(end_of_miss(reason))
            }
        };
        PieceFetch::Frames { frames: came, reason }
    }

    async fn path(&self, address: &str) -> Option<Arc<dyn Path>> {
        let known = self.paths.lock().get(address).cloned();
        if let Some(path) = known.filter(|path| path.failure().is_none()) {
            return Some(path);
        }
        let path = self.dialer.dial(address.to_owned()).await.ok()?;
        let mut paths = self.paths.lock();
        if paths.len() >= PATHS_MAX {
            paths.clear();
        }
        paths.insert(address.to_owned(), Arc::clone(&path));
        Some(path)
    }

    fn forget(&self, address: &str, path: &Arc<dyn Path>) {
        let mut paths = self.paths.lock();
        if paths.get(address).is_some_and(|known| Arc::ptr_eq(known, path)) {
            paths.remove(address);
        }
    }
}

/// Result of fetching a piece.
enum PieceFetch {
    Frames { frames: Vec<Frame>, reason: Option<CopyOutcome> },
    Retry(Duration),
}

fn end_of_miss(reason: MissReason) -> CopyOutcome {
    match reason {
        MissReason::NotHeld => CopyOutcome::NotHeld,
        MissReason::StaleEpoch => CopyOutcome::StaleEpoch,
        MissReason::IdentityDiffers => CopyOutcome::IdentityDiffers,
        MissReason::Corrupt => CopyOutcome::Corrupt,
        MissReason::TooLate => CopyOutcome::TooLate,
        MissReason::NodeLost => CopyOutcome::SourceLost,
        MissReason::Busy => CopyOutcome::SourceBusy,
        MissReason::MediumFailed => CopyOutcome::MediumFailed,
        MissReason::GenerationDiffers => CopyOutcome::GenerationDiffers,
    }
}

fn end_of_refusal(refusal: SaveRefusal) -> CopyOutcome {
    match refusal {
        SaveRefusal::Quota => CopyOutcome::Quota,
        SaveRefusal::IdentityDiffers | SaveRefusal::FrameSize => CopyOutcome::IdentityDiffers,
        SaveRefusal::Full => CopyOutcome::Full,
        SaveRefusal::LowValue => CopyOutcome::Worth,
        SaveRefusal::GenerationDiffers => CopyOutcome::GenerationDiffers,
    }
}

fn end_of_refused_block(by: RefusalReason) -> CopyOutcome {
    match by {
        RefusalReason::Quota => CopyOutcome::Quota,
        RefusalReason::Full => CopyOutcome::Full,
        RefusalReason::LowValue => CopyOutcome::Worth,
    }
}

/// The save of a part of an ordered copy, under a lease of its own.
fn save_request(order: &CopyRequest, part: &BlockRun, lease: LeaseId) -> SaveRequest {
    let context = RequestContext {
        lease,
        request: RequestId(lease.0),
        tenant: part.tenant,
        category: part.category,
        identity: order.identity,
        traceparent: String::new(),
        class: Some(TrafficClass::Replicate),
    };
    SaveRequest {
        context,
        parent: part.parent,
        first_offset_blocks: part.first_offset_blocks,
        hashes: part.hashes.clone(),
        frame_bytes: part.frame_bytes,
    }
}
