//! Copies of blocks from other nodes, by a router's word.
//!
//! A copy is a fetch in the class that takes only what nobody else wants, and a save as any other: what is not worth the room is not
//! let in, and is not fetched either, for room is asked for first. It goes in pieces, so that little is kept open at once, and what
//! came of it stays whenever it ends. Not here: what is copied where (the routers), and who may say so (`server`).

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::id::{BlockHash, Class, Epoch, IdentityDigest, LeaseId, RequestId};
use kv_core::place::copies::{BlockRun, CopyEnd};
use kv_core::tier::{Offered, RefusedBy};
use kvfleet_proto::frame::Frame;
use kvfleet_proto::tls::Identity;
use kvfleet_transport::pick::{Candidate, PathKind, PickDialer, PickRules};
use kvfleet_transport::quic::{QuicConfig, QuicDialer};
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::{
    Asker, BlockService, Dialer, FetchAnswer, FetchRequest, MissReason, Path, Progress, SaveOffer,
    SaveRefusal, SaveRequest, SaveSession, VisibleAt,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::serve::{Service, Session};

/// Copies that wait behind those under way: more than that, and whoever asks does better elsewhere.
pub const COPIES_WAITING_MAX: usize = 16;

/// Blocks of one copy: 64 KiB of hashes, and as many blocks of two megabytes as a fast link brings in a second.
pub const COPY_BLOCKS_MAX: usize = 4_096;

/// Longest time of one copy, whatever is asked: what has not come by then is asked for by somebody who waits.
pub const COPY_TIME_MAX: Duration = Duration::from_secs(60);

/// Bytes that are fetched at once for one copy, or one block: as long as it takes a fast link, nothing is noticed of a piece that comes
/// for nothing.
const PIECE_BYTES: u64 = 8 << 20;

/// Time before a source that is busy is asked again, at least and at most.
const AGAIN_MIN: Duration = Duration::from_millis(5);
const AGAIN_MAX: Duration = Duration::from_millis(200);

/// Paths to other nodes that are kept.
const PATHS_MAX: usize = 64;

/// Bytes that the copies under way keep outside the arena at most: what came of a piece and what is still read.
pub(crate) fn memory_bytes_max(copies: u32, frame_bytes_max: usize) -> u64 {
    u64::from(copies).saturating_mul(2 * PIECE_BYTES.max(frame_bytes_max as u64))
}

/// What a router asks for.
#[derive(Clone, Debug)]
pub(crate) struct CopyOrder {
    pub(crate) run: BlockRun,
    pub(crate) source_address: String,
    pub(crate) source_epoch: Epoch,
    /// Of the model under the weights that are to be in force at both.
    pub(crate) identity: IdentityDigest,
    pub(crate) bytes_max: u64,
    pub(crate) within: Duration,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) end: CopyEnd,
    pub(crate) stored_blocks: u32,
    pub(crate) present_blocks: u32,
    pub(crate) stored_bytes: u64,
    pub(crate) visible_at: Option<VisibleAt>,
}

impl Copied {
    fn nothing(end: CopyEnd) -> Copied {
        Copied { end, stored_blocks: 0, present_blocks: 0, stored_bytes: 0, visible_at: None }
    }

    /// Leading blocks of the run that are here.
    fn blocks(&self) -> usize {
        self.stored_blocks as usize + self.present_blocks as usize
    }
}

/// What one piece came to.
enum Piece {
    /// All of it is here.
    Here,
    /// The source has something better to do; again after this time.
    Again(Duration),
    Ended(CopyEnd),
}

/// Does what routers ask for.
pub(crate) struct Copier {
    service: Arc<Service>,
    dialer: Arc<dyn Dialer>,
    paths: Mutex<BTreeMap<String, Arc<dyn Path>>>,
    running: Semaphore,
    /// Running and waiting.
    places: Semaphore,
    /// Nodes may share a certificate, and with it the names of their leases.
    leases: RandomState,
    next_lease: AtomicU64,
    metrics: Metrics,
    /// Whether nothing is copied here any more: what came now would go with this node.
    is_closed: CancellationToken,
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier").finish_non_exhaustive()
    }
}

/// Puts frames up to the first that is not kept: what is behind it is of no use, and would be counted in its place.
async fn keep_leading(session: &mut Session, frames: Vec<Frame>) {
    for frame in frames {
        let before = session.stored_blocks();
        session.put(frame).await;
        if session.stored_blocks() == before {
            break;
        }
    }
}

/// The ways that nodes take to each other: those of the network that every node serves.
pub(crate) fn dialer(identity: &Identity) -> Arc<dyn Dialer> {
    let quic: Arc<dyn Dialer> = Arc::new(QuicDialer::new(identity, QuicConfig::default()));
    let tcp: Arc<dyn Dialer> = Arc::new(TcpDialer::new(identity, TcpConfig::default()));
    let way = |kind, dialer| Candidate { kind, dialer };
    let more = vec![way(PathKind::Tcp, tcp)];
    Arc::new(PickDialer::new(way(PathKind::Quic, quic), more, PickRules::default()))
}

impl Copier {
    /// Does so many copies at once; with 0 none. Those under way end once it `is_closed`.
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
            places: Semaphore::new(places),
            leases: RandomState::new(),
            next_lease: AtomicU64::new(0),
            metrics,
            is_closed,
        }
    }

    /// Copies a run. Whoever asks and does not wait for the end ends it.
    pub(crate) async fn copy(&self, order: &CopyOrder) -> Copied {
        let lost = Copied::nothing(CopyEnd::TargetLost);
        let copied = self.is_closed.run_until_cancelled(self.queued(order)).await.unwrap_or(lost);
        self.metrics.copied(copied.end, copied.stored_blocks, copied.stored_bytes);
        tracing::debug!(
            source = order.source_address,
            end = copied.end.name(),
            blocks = copied.stored_blocks,
            "a copy ended"
        );
        copied
    }

    async fn queued(&self, order: &CopyOrder) -> Copied {
        let until = Instant::now() + order.within.min(COPY_TIME_MAX);
        if let Some(end) = self.differs(order.identity) {
            return Copied::nothing(end);
        }
        let Ok(_place) = self.places.try_acquire() else { return Copied::nothing(CopyEnd::Queue) };
        match timeout_at(until, self.running.acquire()).await {
            Ok(Ok(_running)) => self.pieces(order, until).await,
            _ => Copied::nothing(CopyEnd::TooLate),
        }
    }

    /// Why blocks of this identity are not kept here, if they are not.
    fn differs(&self, identity: IdentityDigest) -> Option<CopyEnd> {
        if identity.generation_over(self.service.manifest()).is_none() {
            return Some(CopyEnd::IdentityDiffers);
        }
        (identity != self.service.identity()).then_some(CopyEnd::GenerationDiffers)
    }

    async fn pieces(&self, order: &CopyOrder, until: Instant) -> Copied {
        let mut copied = Copied::nothing(CopyEnd::Copied);
        let most = self.service.frame_bytes_max() as u64;
        let frame_bytes = if order.run.frame_bytes == 0 { most } else { order.run.frame_bytes.min(most) };
        let at_once = PIECE_BYTES / frame_bytes.max(1);
        loop {
            let done = copied.blocks();
            if done >= order.run.hashes.len() {
                return copied;
            }
            if Instant::now() >= until {
                return Copied { end: CopyEnd::TooLate, ..copied };
            }
            let affordable = order.bytes_max.saturating_sub(copied.stored_bytes) / frame_bytes.max(1);
            if affordable == 0 {
                return Copied { end: CopyEnd::Budget, ..copied };
            }
            let blocks = usize::try_from(at_once.max(1).min(affordable)).unwrap_or(usize::MAX);
            let part = BlockRun { frame_bytes, ..order.run.part(done, done.saturating_add(blocks)) };
            match timeout_at(until, self.piece(order, &part, until, &mut copied)).await {
                Ok(Piece::Here) => {}
                Ok(Piece::Again(wait)) if Instant::now() + wait < until => sleep(wait).await,
                Ok(Piece::Again(_)) => return Copied { end: CopyEnd::SourceBusy, ..copied },
                Ok(Piece::Ended(end)) => return Copied { end, ..copied },
                Err(_) => return Copied { end: CopyEnd::TooLate, ..copied },
            }
        }
    }

    /// Asks for room, fetches what there is room for, and keeps it.
    async fn piece(&self, order: &CopyOrder, part: &BlockRun, until: Instant, copied: &mut Copied) -> Piece {
        let number = self.next_lease.fetch_add(1, Ordering::Relaxed);
        let lease = LeaseId(self.leases.hash_one(number));
        let asker = Asker {
            lease,
            request: RequestId(lease.0),
            tenant: part.tenant,
            category: part.category,
            identity: order.identity,
            traceparent: String::new(),
            class: Some(Class::Replicate),
        };
        let request = SaveRequest {
            asker: asker.clone(),
            parent: part.parent,
            first_offset_blocks: part.first_offset_blocks,
            hashes: part.hashes.clone(),
            frame_bytes: part.frame_bytes,
        };
        let (answers, mut session) = match self.service.reserve(&request).await {
            Ok(reserved) => reserved,
            Err(SaveOffer::Busy { retry_after }) => return Piece::Again(retry_after),
            Err(SaveOffer::Refused(refusal)) => return Piece::Ended(end_of_refusal(refusal)),
            Err(SaveOffer::Wanted(_)) => return Piece::Ended(CopyEnd::Full),
        };
        // What is behind a block that has no room is of no use.
        let taken = answers.iter().take_while(|answer| !matches!(answer, Offered::Refused(_))).count();
        let is_wanted = |(answer, _): &(&Offered, &BlockHash)| matches!(answer, Offered::Wanted(_));
        let wanted = answers.iter().zip(&part.hashes).take(taken).filter(is_wanted);
        let wanted: Vec<BlockHash> = wanted.map(|(_, hash)| *hash).collect();
        let fetched = self.fetch(order, asker, (&wanted, part.frame_bytes), until).await;
        let (frames, reason) = match fetched {
            Fetched::Came { frames, reason } => (frames, reason),
            Fetched::Again(wait) => {
                self.service.release(lease).await;
                return Piece::Again(wait);
            }
        };
        let came = frames.len();
        keep_leading(&mut session, frames).await;
        let (stored, is_short) = (session.stored_blocks(), came > session.stored_blocks() as usize);
        let done = Box::new(session).finish().await;
        self.service.release(lease).await;
        // Those up to the first that did not come are the first of the run; what came behind a refused one stays, and is not counted.
        let mut left = stored as usize;
        let leading = answers.iter().take(taken).take_while(|answer| match answer {
            Offered::Wanted(_) => {
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
            Offered::Refused(by) => Some(end_of_refused(*by)),
            _ => None,
        });
        // Room that was promised and was not there in time.
        let no_room = is_short.then_some(CopyEnd::Full);
        reason.or(no_room).or(refused).map_or(Piece::Here, Piece::Ended)
    }

    /// The leading blocks that come in time and are what was asked for; and why no more came.
    async fn fetch(
        &self,
        order: &CopyOrder,
        asker: Asker,
        (hashes, frame_bytes): (&[BlockHash], u64),
        until: Instant,
    ) -> Fetched {
        let ended = |end| Fetched::Came { frames: Vec::new(), reason: Some(end) };
        if hashes.is_empty() {
            return Fetched::Came { frames: Vec::new(), reason: None };
        }
        let Some(path) = self.path(&order.source_address).await else { return ended(CopyEnd::SourceLost) };
        let (lease, identity) = (asker.lease, asker.identity);
        let request = FetchRequest {
            asker,
            epoch: order.source_epoch,
            first_offset_blocks: 0,
            hashes: hashes.to_vec(),
            deadline: until.saturating_duration_since(Instant::now()),
            progress: Progress::default(),
        };
        let (mut came, mut is_large) = (Vec::new(), false);
        // A source that sends more than was asked for is not listened to, nor one whose frames are larger than there is memory for.
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
            _ if is_wrong => Some(CopyEnd::Corrupt),
            Err(_) => Some(CopyEnd::SourceLost),
            Ok(FetchAnswer::Busy { retry_after }) => {
                return Fetched::Again(retry_after.clamp(AGAIN_MIN, AGAIN_MAX));
            }
            // Says that all came, and it did not.
            Ok(FetchAnswer::Hit { .. }) => short.then_some(CopyEnd::NotHeld),
            Ok(
                FetchAnswer::Partial { reason: MissReason::Busy, .. }
                | FetchAnswer::Miss { reason: MissReason::Busy },
            ) if came.is_empty() => {
                return Fetched::Again(AGAIN_MAX);
            }
            Ok(FetchAnswer::Partial { reason, .. } | FetchAnswer::Miss { reason }) => {
                Some(end_of_miss(reason))
            }
        };
        Fetched::Came { frames: came, reason }
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

/// What a fetch came to.
enum Fetched {
    Came { frames: Vec<Frame>, reason: Option<CopyEnd> },
    Again(Duration),
}

fn end_of_miss(reason: MissReason) -> CopyEnd {
    match reason {
        MissReason::NotHeld => CopyEnd::NotHeld,
        MissReason::StaleEpoch => CopyEnd::StaleEpoch,
        MissReason::IdentityDiffers => CopyEnd::IdentityDiffers,
        MissReason::Corrupt => CopyEnd::Corrupt,
        MissReason::TooLate => CopyEnd::TooLate,
        MissReason::NodeLost => CopyEnd::SourceLost,
        MissReason::Busy => CopyEnd::SourceBusy,
        MissReason::MediumFailed => CopyEnd::MediumFailed,
        MissReason::GenerationDiffers => CopyEnd::GenerationDiffers,
    }
}

fn end_of_refusal(refusal: SaveRefusal) -> CopyEnd {
    match refusal {
        SaveRefusal::Quota => CopyEnd::Quota,
        SaveRefusal::IdentityDiffers | SaveRefusal::FrameSize => CopyEnd::IdentityDiffers,
        SaveRefusal::Full => CopyEnd::Full,
        SaveRefusal::Worth => CopyEnd::Worth,
        SaveRefusal::GenerationDiffers => CopyEnd::GenerationDiffers,
    }
}

fn end_of_refused(by: RefusedBy) -> CopyEnd {
    match by {
        RefusedBy::Quota => CopyEnd::Quota,
        RefusedBy::Full => CopyEnd::Full,
        RefusedBy::Worth => CopyEnd::Worth,
    }
}
