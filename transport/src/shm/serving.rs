//! One operation of a client, from its request to its last packet.
//!
//! An operation that has to wait runs as a separate task. If it is dropped midway, only its grants
//! remain, and the client returns those. Not here: access control (`server.rs`), receiving packets
//! (`connection.rs`), and layer-wise saves (`layered_save.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::lease_grant::GrantRefused;
use kvfleet_proto::frame::SliceLayout;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::RETRY_AFTER;
use super::grants::{ConnectionGrants, GrantableBlock, OperationGuard};
use super::layered_save::LayeredSave;
use super::mapping::ShmBounceFrame;
use super::packet::{BounceRange, NodePacket};
use super::save_guard::{GuardedSession, SaveGuard};
use crate::serve::TIMES;
use crate::{BlockService, FetchAnswer, FetchReply, FetchRequest, MissReason, SaveOffer, SaveRequest, wire};

/// Bytes above which a copy moves to another thread: the 10 µs to start there are a tenth of the
/// copy.
const INLINE_COPY_BYTES_MAX: usize = 128 << 10;

/// Copied bytes after which the thread yields: some microseconds.
const YIELD_BYTES: usize = 16 << 10;

/// Interval of progress packets for a save.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// How long a fetch is served beyond its deadline; the client's own clock ends it first.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Maximum duration of a fetch, whatever its deadline.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Maximum duration of a save.
const SAVE_TIME_MAX: Duration = TIMES.save_max;

/// State shared by all operations of a connection.
#[derive(Clone)]
pub(super) struct OperationContext {
    pub(super) grants: Arc<ConnectionGrants>,
    pub(super) service: Arc<dyn BlockService>,
    pub(super) frame_bytes_max: u32,
    pub(super) stall_timeout: Duration,
    /// Whether a violation by a client was logged.
    pub(super) is_violation_logged: Arc<AtomicBool>,
    /// How long to spin for the next packet.
    pub(super) spin_wait: Duration,
    /// Whether its thread may move to another processor.
    pub(super) may_move: bool,
    /// Runtime for long copies.
    pub(super) bulk: Handle,
}

/// A client's packet during a save.
#[derive(Debug)]
pub(super) enum SavePart {
    Put(Vec<BounceRange>),
    Finish,
}

/// Location of a save's frames.
#[derive(Debug)]
pub(super) struct SaveFrames {
    /// Lengths of their slices, if they may arrive by layer.
    pub(super) layout: Option<SliceLayout>,
    /// Whether a layer-wise save was requested; then it may end without frames.
    pub(super) may_be_empty: bool,
    /// Eager frames, one for each block; empty if frames follow the offer.
    pub(super) eager_ranges: Vec<BounceRange>,
    pub(super) parts: mpsc::Receiver<SavePart>,
}

/// Why an operation ended early. Only logged: the client learns that it ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ShmServeError {
    #[error("a save ended after {got} of {wanted} frames")]
    MissingFrames { got: usize, wanted: usize },
    #[error("a save brings more than the {wanted} frames that are wanted")]
    TooMany { wanted: usize },
    #[error(
        "a frame of {len} bytes at {at} is not inside the bounce buffer, or is longer than the offer said"
    )]
    Range { at: u64, len: u32 },
    #[error("a slice or a head of {wanted} bytes, but its piece has only {left} left")]
    Piece { wanted: usize, left: usize },
    #[error("a save by layer ended before the last head")]
    MissingPieces,
    #[error("the service offered slices without a buffer for them")]
    NoSliceBuffer,
    #[error("the client sent no packet in time")]
    Stalled(#[from] tokio::time::error::Elapsed),
    #[error("the copying thread ended")]
    Copy(#[from] tokio::task::JoinError),
}

impl OperationContext {
    pub(super) async fn fetch(
        self,
        op: u64,
        request: FetchRequest,
        begun: Result<OperationGuard, GrantRefused>,
    ) {
        let epoch = request.epoch;
        let Ok(_begun) = begun else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            let head = wire::head_to_pb(&busy, epoch);
            return self.grants.post(&NodePacket::Head { op, head, rows: Vec::new() });
        };
        let limit = request.deadline.saturating_add(DEADLINE_GRACE).min(FETCH_TIME_MAX);
        if timeout(limit, self.answer(op, request)).await.is_err() {
            self.grants.post(&NodePacket::End { op, reason: MissReason::TooLate as u32 });
        }
    }

    async fn answer(&self, op: u64, request: FetchRequest) {
        let lease = request.context.lease;
        let mut reply = self.service.fetch(request).await;
        let wanted = reply.answer.tiers().len();
        let (mut sent, mut is_headed) = (0, false);
        while sent < wanted || !is_headed {
            let (blocks, waits) = self.ready_blocks(&mut reply, wanted - sent, sent).await;
            if blocks.is_empty() && is_headed && !waits {
                break;
            }
            let head = (!is_headed).then(|| wire::head_to_pb(&reply.answer, reply.epoch));
            is_headed = true;
            let lent = self.grants.grant(lease, blocks, |rows, _| match head {
                Some(head) => Some(NodePacket::Head { op, head, rows }),
                None => (!rows.is_empty()).then_some(NodePacket::More { op, rows }),
            });
            sent += lent.rows;
            if let Some(refused) = lent.refused {
                tracing::debug!(%refused, "a fetch ends early");
                return self.send_end(op, sent, wanted, Some(MissReason::Busy));
            }
            self.grants.wait_backlog().await;
            if waits && let Err(reason) = self.send_next_block(op, lease, &mut reply, &mut sent).await {
                return self.send_end(op, sent, wanted, reason);
            }
        }
        self.send_end(op, sent, wanted, reply.frames.end_reason());
    }

    fn send_end(&self, op: u64, sent: usize, wanted: usize, reason: Option<MissReason>) {
        if sent < wanted {
            self.grants.post(&NodePacket::End { op, reason: reason.map_or(0, |reason| reason as u32) });
        }
    }

    /// The blocks that are available now, at most `most`, the first at `position`; and whether to
    /// wait for more.
    async fn ready_blocks(
        &self,
        reply: &mut FetchReply,
        most: usize,
        position: usize,
    ) -> (Vec<GrantableBlock>, bool) {
        let (mut blocks, mut planned) = (Vec::with_capacity(most.min(16)), 0);
        while blocks.len() < most {
            let Some(frame) = reply.frames.try_next() else {
                return (blocks, reply.frames.end_reason().is_none());
            };
            let is_lendable = reply.lendable.get(position + blocks.len()).copied().unwrap_or(false);
            match is_lendable.then(|| self.grants.grant_in_place(&frame.bytes, planned)).flatten() {
                Some(block) => {
                    planned += frame.bytes.len() as u64;
                    blocks.push(block);
                }
                None => {
                    reply.frames.put_back(frame);
                    return (blocks, true);
                }
            }
        }
        (blocks, false)
    }

    /// Waits for the next block and sends it, copied if needed. An error if none comes, with the
    /// reason if there is one.
    async fn send_next_block(
        &self,
        op: u64,
        lease: kv_core::id::LeaseId,
        reply: &mut FetchReply,
        sent: &mut usize,
    ) -> Result<(), Option<MissReason>> {
        let Some(frame) = reply.frames.next().await else { return Err(reply.frames.end_reason()) };
        let is_lendable = reply.lendable.get(*sent).copied().unwrap_or(false);
        let block = match is_lendable.then(|| self.grants.grant_in_place(&frame.bytes, 0)).flatten() {
            Some(block) => block,
            None => match self.copy_block(&frame.bytes).await {
                Ok(block) => block,
                Err(ShmServeError::Stalled(_)) => return Err(Some(MissReason::Busy)),
                Err(error) => {
                    tracing::warn!(%error, "cannot copy a block for a client of this host");
                    return Err(None);
                }
            },
        };
        debug_assert!(block.is_copied() || is_lendable, "only blocks of the arena are granted in place");
        let lent = self.grants.grant(lease, vec![block], |rows, refused| {
            refused.is_none().then_some(NodePacket::More { op, rows })
        });
        *sent += lent.rows;
        if lent.refused.is_some() { Err(Some(MissReason::Busy)) } else { Ok(()) }
    }

    async fn copy_block(&self, bytes: &Bytes) -> Result<GrantableBlock, ShmServeError> {
        loop {
            let room = self.grants.space_freed();
            let copied = if bytes.len() <= INLINE_COPY_BYTES_MAX {
                self.grants.copy_to_bounce(bytes)
            } else {
                let (lending, bytes) = (Arc::clone(&self.grants), bytes.clone());
                self.bulk.spawn(async move { lending.copy_to_bounce(&bytes) }).await?
            };
            match copied {
                Some(block) => {
                    InlineCopyBudget::default().charge(bytes.len()).await;
                    return Ok(block);
                }
                // A client that reads frees ranges. Bytes to copy must not be kept for a client
                // that does not read.
                None => timeout(self.stall_timeout, room).await?,
            }
        }
    }

    pub(super) async fn save(
        self,
        op: u64,
        request: SaveRequest,
        held: Result<Arc<SaveGuard>, GrantRefused>,
        frames: SaveFrames,
    ) {
        let Ok(held) = held else {
            let offer = wire::offer_to_pb(&SaveOffer::Busy { retry_after: RETRY_AFTER });
            return self.grants.post(&NodePacket::Offer { op, offer });
        };
        let ended = match timeout(SAVE_TIME_MAX, self.receive_save(op, request, &held, frames)).await {
            Ok(taken) => taken,
            Err(elapsed) => Err(elapsed.into()),
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a save ends early");
            held.report_end();
        }
    }

    async fn receive_save(
        &self,
        op: u64,
        request: SaveRequest,
        held: &Arc<SaveGuard>,
        frames: SaveFrames,
    ) -> Result<(), ShmServeError> {
        let len_max = request.frame_bytes.min(u64::from(self.frame_bytes_max));
        let (offer, session) = self.service.save(request).await;
        let saving = session.map(|session| GuardedSession::new(session, held));
        let saving = match (offer, saving) {
            (SaveOffer::Wanted(wanted), Some(saving)) if !frames.eager_ranges.is_empty() => {
                self.receive_eager(op, saving, &wanted, frames.eager_ranges, len_max).await?
            }
            (SaveOffer::Wanted(wanted), Some(saving)) if let Some(layout) = frames.layout => {
                let parts = frames.parts;
                LayeredSave { op, wanted, layout, parts, len_max }.receive(self, saving).await?
            }
            (offer, saving) => {
                self.grants.post(&NodePacket::Offer { op, offer: wire::offer_to_pb(&offer) });
                let (SaveOffer::Wanted(wanted), Some(saving)) = (offer, saving) else { return Ok(()) };
                self.receive_wanted(op, saving, &wanted, frames.parts, len_max, frames.may_be_empty).await?
            }
        };
        let done = saving.session.finish().await;
        self.grants.post(&NodePacket::Done { op, done: wire::done_to_pb(&done) });
        Ok(())
    }

    /// Receives the wanted frames of an eager save.
    async fn receive_eager(
        &self,
        op: u64,
        mut saving: GuardedSession,
        wanted: &[bool],
        places: Vec<BounceRange>,
        len_max: u64,
    ) -> Result<GuardedSession, ShmServeError> {
        let (mut turn, mut since, mut passed) = (InlineCopyBudget::default(), Instant::now(), 0);
        for (place, wanted) in places.into_iter().zip(wanted) {
            if *wanted {
                turn.charge(place.len as usize).await;
                saving = self.put_frame(saving, place, len_max).await?;
            }
            passed += 1;
            // The client waits as long as it receives progress. Most saves end before that.
            if since.elapsed() >= PROGRESS_INTERVAL {
                self.grants.post(&NodePacket::Taken { op, frames: passed });
                (since, passed) = (Instant::now(), 0);
            }
        }
        Ok(saving)
    }

    /// Receives announced frames of at most this length. A client that asked to save by layer may
    /// end before the first frame.
    pub(super) async fn receive_wanted(
        &self,
        op: u64,
        mut saving: GuardedSession,
        wanted: &[bool],
        mut parts: mpsc::Receiver<SavePart>,
        len_max: u64,
        may_end: bool,
    ) -> Result<GuardedSession, ShmServeError> {
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        let (mut got, mut turn) = (0, InlineCopyBudget::default());
        loop {
            match timeout(self.stall_timeout, parts.recv()).await? {
                Some(SavePart::Put(places)) => {
                    for place in places {
                        if got == wanted {
                            return Err(ShmServeError::TooMany { wanted });
                        }
                        turn.charge(place.len as usize).await;
                        saving = self.put_frame(saving, place, len_max).await?;
                        got += 1;
                        self.grants.post(&NodePacket::Taken { op, frames: 1 });
                    }
                }
                Some(SavePart::Finish) if got == wanted || may_end && got == 0 => return Ok(saving),
                Some(SavePart::Finish) | None => return Err(ShmServeError::MissingFrames { got, wanted }),
            }
        }
    }

    async fn put_frame(
        &self,
        mut saving: GuardedSession,
        place: BounceRange,
        len_max: u64,
    ) -> Result<GuardedSession, ShmServeError> {
        let frame = Arc::new(self.frame_at(place, len_max)?);
        if place.len as usize <= INLINE_COPY_BYTES_MAX {
            saving.session.put_volatile(frame).await;
            return Ok(saving);
        }
        let put = async move {
            saving.session.put_volatile(frame).await;
            saving
        };
        self.run_on_bulk(put).await
    }

    /// Runs work on the bulk runtime. If this operation is dropped meanwhile, a copy continues to
    /// its end and holds the lease until then.
    pub(super) async fn run_on_bulk<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, ShmServeError> {
        let mut there = JoinSet::new();
        there.spawn_on(work, &self.bulk);
        Ok(there.join_next().await.ok_or(ShmServeError::NoSliceBuffer)??)
    }

    /// The frame in the client's range, of at most this length.
    pub(super) fn frame_at(&self, place: BounceRange, len_max: u64) -> Result<ShmBounceFrame, ShmServeError> {
        let BounceRange { at, len } = place;
        let is_inside =
            at.checked_add(u64::from(len)).is_some_and(|end| end <= self.grants.bounce_in_bytes());
        let fits = is_inside && len > 0 && u64::from(len) <= len_max;
        let there = ShmBounceFrame::new(self.grants.bounce(), at, len).filter(|_| fits);
        there.ok_or(ShmServeError::Range { at, len })
    }
}

/// Bytes copied since the last yield of this thread.
#[derive(Default)]
struct InlineCopyBudget {
    bytes: usize,
}

impl InlineCopyBudget {
    /// Call before a copy of `bytes` bytes: yields first if the copies before used up the budget.
    async fn charge(&mut self, bytes: usize) {
        if self.bytes >= YIELD_BYTES {
            self.bytes = 0;
            tokio::task::yield_now().await;
        }
        // Short copies have a fixed cost too.
        self.bytes += bytes.max(YIELD_BYTES / 16);
    }
}
