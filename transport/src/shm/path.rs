//! The client's end as a path: the four operations over a link.
//!
//! Requests with more blocks than one operation takes are split. Not here: packets and memory
//! (`link.rs`), layer-wise saves (`layered_save.rs`), frame verification (the caller verifies every
//! frame), and the choice of a path.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use tokio::time::{Instant, timeout, timeout_at};

use super::adaptive_toggle::AdaptiveToggle;
use super::layered_save::CopyBudget;
use super::link::{GrantedBlock, READER_TIMEOUT, Reply, ShmLink, ShmOperation};
use super::{BLOCKS_PER_OPERATION_MAX, EAGER_BLOCKS_MAX, EAGER_BYTES_MAX};
use crate::layered::LayerSupport;
use crate::slices::FrameSplitter;
use crate::{
    BoxFuture, FetchAnswer, FetchRequest, LayerRequest, LayerSource, LayeredSaveOutcome, MissReason, Path,
    PathError, SaveAnswer, SaveDone, SaveOffer, SaveRequest, SliceSink, wire,
};

/// Longest deadline of a fetch; a longer one has no use and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Bytes of a save that a node processes per microsecond, at least.
const SAVE_BYTES_PER_MICROSECOND: u64 = 2000;

/// A connection to a node of this host.
pub(super) struct ShmPath {
    pub(super) link: Arc<ShmLink>,
    pub(super) stall_timeout: Duration,
    pub(super) bounce_in_bytes: u64,
    /// Whether frames are sent before the node asks for them.
    pub(super) eager_saves: AdaptiveToggle,
    pub(super) saves_frames: LayerSupport,
}

impl ShmPath {
    pub(super) fn malformed(&self, what: &dyn std::fmt::Display) -> PathError {
        let peer = self.link.peer().to_owned();
        PathError::Protocol { peer, what: format!("a malformed message: {what}") }
    }

    pub(super) fn unexpected(&self, reply: &Reply) -> PathError {
        match reply {
            Reply::Ended => PathError::Broken {
                peer: self.link.peer().to_owned(),
                cause: "the node ended the operation".to_owned(),
            },
            other => self.malformed(&format_args!("unexpected {other:?}")),
        }
    }

    pub(super) async fn within_stall_timeout<T>(
        &self,
        work: impl Future<Output = Result<T, PathError>>,
    ) -> Result<T, PathError> {
        let peer = || self.link.peer().to_owned();
        let after = self.stall_timeout;
        timeout(after, work).await.unwrap_or_else(|_| Err(PathError::TimedOut { peer: peer(), after }))
    }

    async fn fetch_all(
        &self,
        mut request: FetchRequest,
        sink: &mut dyn FrameBatchSink,
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        if request.hashes.len() <= BLOCKS_PER_OPERATION_MAX {
            return self.fetch_part(request, deadline, sink).await;
        }
        let mut hashes = std::mem::take(&mut request.hashes).into_iter().peekable();
        let mut all = Vec::new();
        while hashes.peek().is_some() {
            let part: Vec<_> = hashes.by_ref().take(BLOCKS_PER_OPERATION_MAX).collect();
            let blocks = u32::try_from(part.len()).unwrap_or(u32::MAX);
            let some = FetchRequest { hashes: part, ..request.clone() };
            request.first_offset_blocks = request.first_offset_blocks.saturating_add(blocks);
            let answer = self.fetch_part(some, deadline, sink).await;
            let reason = match answer {
                Ok(FetchAnswer::Hit { tiers }) => {
                    all.extend(tiers);
                    continue;
                }
                Ok(FetchAnswer::Partial { tiers, reason }) => {
                    all.extend(tiers);
                    reason
                }
                other if all.is_empty() => return other,
                Ok(FetchAnswer::Busy { .. }) => MissReason::Busy,
                Ok(FetchAnswer::Miss { reason }) => reason,
                Err(_) => MissReason::NodeLost,
            };
            return Ok(FetchAnswer::Partial { tiers: all, reason });
        }
        Ok(FetchAnswer::Hit { tiers: all })
    }

    async fn fetch_part(
        &self,
        request: FetchRequest,
        deadline: Instant,
        sink: &mut dyn FrameBatchSink,
    ) -> Result<FetchAnswer, PathError> {
        let asked = request.hashes.len();
        let asking = self.link.begin(asked, wire::fetch_to_pb(&request))?;
        request.progress.mark_asked();
        let Ok(first) = timeout_at(deadline, asking.next()).await else {
            return Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
        };
        let first = first?;
        request.progress.mark_answered();
        let (head, rows) = match first {
            Reply::Head(head, rows) => (head, rows),
            // The node's clock reached the deadline first.
            Reply::End(reason) => {
                asking.finish();
                return Ok(FetchAnswer::Miss { reason: miss_reason(reason) });
            }
            other => return Err(self.unexpected(&other)),
        };
        let (answer, epoch) = wire::head_from_pb(&head, asked).map_err(|error| self.malformed(&error))?;
        if epoch != request.epoch && !answer.tiers().is_empty() {
            return Ok(FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        }
        let wanted = answer.tiers().len();
        let (delivered, reason) = self.receive(asking, rows, wanted, deadline, sink).await;
        Ok(answer.cut_short(delivered, reason))
    }

    /// Delivers up to `wanted` frames to `sink`; returns how many came, and why no more.
    async fn receive(
        &self,
        asking: ShmOperation,
        mut rows: Vec<GrantedBlock>,
        wanted: usize,
        deadline: Instant,
        sink: &mut dyn FrameBatchSink,
    ) -> (usize, MissReason) {
        let mut delivered = 0;
        loop {
            let (there, left) = (rows.len(), wanted - delivered);
            let parsed = rows.into_iter().map(|row| row.bytes().and_then(|bytes| Frame::parse(bytes).ok()));
            let frames: Vec<Frame> = parsed.map_while(|frame| frame).take(left).collect();
            let sound = frames.len();
            delivered += sound;
            sink.take(frames);
            if sound < there {
                return (delivered, MissReason::Corrupt);
            }
            if delivered >= wanted {
                asking.finish();
                return (delivered, MissReason::NotHeld);
            }
            rows = match timeout_at(deadline, asking.next()).await {
                Ok(Ok(Reply::More(rows))) => rows,
                Ok(Ok(Reply::End(reason))) => {
                    asking.finish();
                    return (delivered, miss_reason(reason));
                }
                Ok(Ok(_)) => return (delivered, MissReason::Corrupt),
                Ok(Err(_)) => return (delivered, MissReason::NodeLost),
                Err(_) => return (delivered, MissReason::TooLate),
            };
        }
    }

    async fn save_all(
        &self,
        mut request: SaveRequest,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let hashes = std::mem::take(&mut request.hashes);
        if hashes.len() <= BLOCKS_PER_OPERATION_MAX {
            return self.save_part(SaveRequest { hashes, ..request }, 0, source).await;
        }
        let (mut sum, mut first) = (SaveDone::default(), 0);
        for part in hashes.chunks(BLOCKS_PER_OPERATION_MAX) {
            let some = SaveRequest { hashes: part.to_vec(), ..request.clone() };
            match self.save_part(some, first, source).await? {
                SaveAnswer::Done(done) => {
                    sum.stored_blocks += done.stored_blocks;
                    sum.present_blocks += done.present_blocks;
                    sum.refused_blocks += done.refused_blocks;
                    sum.stored_bytes += done.stored_bytes;
                    sum.visible_at = done.visible_at.or(sum.visible_at);
                }
                other if first == 0 => return Ok(other),
                // Later blocks have no stored prefix, so they count as refused.
                SaveAnswer::Busy { .. } | SaveAnswer::Refused(_) => {
                    sum.refused_blocks += u32::try_from(hashes.len() - first).unwrap_or(u32::MAX);
                    break;
                }
            }
            first += part.len();
            request.parent = part.last().copied();
            let blocks = u32::try_from(part.len()).unwrap_or(u32::MAX);
            request.first_offset_blocks = request.first_offset_blocks.saturating_add(blocks);
        }
        Ok(SaveAnswer::Done(sum))
    }

    async fn save_part(
        &self,
        request: SaveRequest,
        first: usize,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let blocks = request.hashes.len();
        let bytes = request.frame_bytes.saturating_mul(blocks as u64);
        let is_small = (1..=EAGER_BLOCKS_MAX).contains(&blocks) && bytes <= EAGER_BYTES_MAX;
        if is_small && self.eager_saves.should_try() {
            let frames: Vec<Frame> = (first..first + blocks).map(source).collect();
            if let Some(asking) = self.link.begin_eager_save(wire::save_to_pb(&request), &frames)? {
                let taking = Duration::from_micros(bytes / SAVE_BYTES_PER_MICROSECOND);
                let answer = self.finish_eager_save(asking, blocks, taking).await;
                match &answer {
                    Ok(SaveAnswer::Done(done)) if 2 * done.stored_blocks as usize >= blocks => {
                        self.eager_saves.succeeded();
                    }
                    _ => self.eager_saves.failed(),
                }
                return answer;
            }
            self.eager_saves.failed();
        }
        self.save_on_offer(request, first, source).await
    }

    /// Waits for the end of an eager save.
    async fn finish_eager_save(
        &self,
        asking: ShmOperation,
        blocks: usize,
        taking: Duration,
    ) -> Result<SaveAnswer, PathError> {
        let mut reply = self.within_stall_timeout(asking.next_when_busy(taking)).await?;
        // Only a sign of progress.
        while matches!(reply, Reply::Taken) {
            reply = self.within_stall_timeout(asking.next()).await?;
        }
        let answer = match reply {
            Reply::Done(done) => wire::done_from_pb(&done),
            Reply::Offer(offer) => {
                match wire::offer_from_pb(&offer, blocks).map_err(|error| self.malformed(&error))? {
                    SaveOffer::Busy { retry_after } => SaveAnswer::Busy { retry_after },
                    SaveOffer::Refused(refusal) => SaveAnswer::Refused(refusal),
                    SaveOffer::Wanted(_) => {
                        return Err(self.malformed(&"an offer for frames that were already sent"));
                    }
                }
            }
            other => return Err(self.unexpected(&other)),
        };
        asking.finish();
        Ok(answer)
    }

    /// A save that sends the frames that the node asks for.
    async fn save_on_offer(
        &self,
        request: SaveRequest,
        first: usize,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let asking = self.link.begin(0, wire::save_to_pb(&request))?;
        let offer = match self.within_stall_timeout(asking.next()).await? {
            Reply::Offer(offer) => offer,
            other => return Err(self.unexpected(&other)),
        };
        let offer =
            wire::offer_from_pb(&offer, request.hashes.len()).map_err(|error| self.malformed(&error))?;
        let wanted = match offer {
            SaveOffer::Wanted(wanted) => wanted,
            SaveOffer::Busy { retry_after } => {
                asking.finish();
                return Ok(SaveAnswer::Busy { retry_after });
            }
            SaveOffer::Refused(refusal) => {
                asking.finish();
                return Ok(SaveAnswer::Refused(refusal));
            }
        };
        let mut turn = CopyBudget::default();
        for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let frame = source(first + position);
            turn.charge(frame.bytes.len()).await;
            self.within_stall_timeout(self.put_when_free(&asking, &[frame.bytes], self.bounce_in_bytes))
                .await?;
        }
        self.finish_save(asking).await
    }

    /// Finishes a save after its frames were sent.
    pub(super) async fn finish_save(&self, asking: ShmOperation) -> Result<SaveAnswer, PathError> {
        asking.finish_puts();
        loop {
            match self.within_stall_timeout(asking.next()).await? {
                Reply::Taken => {}
                Reply::Done(done) => {
                    asking.finish();
                    return Ok(wire::done_from_pb(&done));
                }
                other => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Writes `parts` in sequence into one range of the bounce buffer, as soon as its first
    /// `within` bytes have space.
    pub(super) async fn put_when_free(
        &self,
        asking: &ShmOperation,
        parts: &[Bytes],
        within: u64,
    ) -> Result<(), PathError> {
        let bytes = parts.iter().map(Bytes::len).sum();
        let limit = usize::try_from(within).unwrap_or(usize::MAX);
        let len = u32::try_from(bytes).ok().filter(|_| bytes <= limit);
        let len = len.ok_or(PathError::TooLarge { bytes, limit })?;
        loop {
            let room = asking.space_freed();
            if asking.put(parts, len, within) {
                return Ok(());
            }
            if asking.pending_puts() == 0 {
                // Other saves occupy the bounce buffer; their owners are notified of free space, or
                // no caller is.
                if timeout(READER_TIMEOUT, room).await.is_err()
                    && let Some(error) = self.link.failure()
                {
                    return Err(error);
                }
                continue;
            }
            match asking.next().await? {
                Reply::Taken => {}
                other => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Sends a request that is answered by an acknowledgement.
    async fn request_acknowledgement(&self, request: data::DataRequest) -> Result<data::Pong, PathError> {
        let asking = self.link.begin(0, request)?;
        match self.within_stall_timeout(asking.next()).await? {
            Reply::Acknowledged(pong) => {
                asking.finish();
                Ok(pong)
            }
            other => Err(self.unexpected(&other)),
        }
    }
}

/// Receives the frames of a fetch in batches.
trait FrameBatchSink: Send {
    /// Takes available frames, the next blocks in prefix order. Further ones may follow.
    fn take(&mut self, frames: Vec<Frame>);
}

/// Passes frames on one by one.
struct FrameSink<'a>(&'a mut (dyn FnMut(Frame) + Send));

impl FrameBatchSink for FrameSink<'_> {
    fn take(&mut self, frames: Vec<Frame>) {
        frames.into_iter().for_each(&mut *self.0);
    }
}

impl FrameBatchSink for FrameSplitter<'_> {
    fn take(&mut self, frames: Vec<Frame>) {
        FrameSplitter::split(self, &frames);
    }
}

/// An unknown number counts as a failed medium.
fn miss_reason(number: u32) -> MissReason {
    let known = MissReason::ALL.into_iter().find(|reason| *reason as u32 == number);
    known.unwrap_or(MissReason::MediumFailed)
}

impl Path for ShmPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.fetch_all(request, &mut FrameSink(sink)).await })
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let mut whole = FrameSplitter::new(sink, asked);
            let answer = self.fetch_all(request, &mut whole).await?;
            Ok(whole.finish(answer))
        })
    }

    /// Bytes are not moved before they are copied out.
    fn fetches_slices(&self) -> bool {
        self.link.reads_in_place()
    }

    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>> {
        Box::pin(self.save_all(request, source))
    }

    fn save_layers<'a>(
        &'a self,
        request: SaveRequest,
        layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<LayeredSaveOutcome, PathError>> {
        Box::pin(self.save_by_layer(request, layers))
    }

    fn streams_saves(&self) -> bool {
        !self.saves_frames.is_unsupported()
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async move { self.request_acknowledgement(wire::release_to_pb(lease)).await.map(|_| ()) })
    }

    fn failure(&self) -> Option<PathError> {
        self.link.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async move {
            let asked = Instant::now();
            let pong = self.request_acknowledgement(wire::ping_to_pb()).await?;
            if pong.version != wire::PROTOCOL_VERSION {
                return Err(self.malformed(&format_args!("protocol version {}", pong.version)));
            }
            Ok(asked.elapsed())
        })
    }
}
