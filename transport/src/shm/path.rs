//! The client's end as a path: the four operations over a link.
//!
//! Requests for more blocks than one operation takes are cut, one after another. Not here: packets and memory
//! (`link.rs`), saves that come by layer (`layered.rs`), checking what the bytes are (the caller verifies every frame), and choosing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::Frame;
use tokio::time::{Instant, timeout, timeout_at};

use super::guess::Guess;
use super::layered::Turn;
use super::link::{Asking, LOOK_AGAIN, Link, Reply, Row};
use super::{AT_ONCE_BLOCKS_MAX, AT_ONCE_BYTES_MAX, BLOCKS_PER_ASK_MAX};
use crate::layered::FramesOnly;
use crate::slices::Whole;
use crate::{
    AskedLayers, BoxFuture, FetchAnswer, FetchRequest, LayerSource, MissReason, Path, PathError, SaveAnswer,
    SaveDone, SaveOffer, SaveRequest, SliceSink, Streamed, wire,
};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Bytes of a save that a node takes in within a microsecond, at least.
const TAKEN_BYTES_A_MICROSECOND: u64 = 2000;

/// A connection to a node of this host.
pub(super) struct ShmPath {
    pub(super) link: Arc<Link>,
    pub(super) stall_timeout: Duration,
    pub(super) tray_in_bytes: u64,
    /// Whether frames are sent before the node says that it wants them.
    pub(super) at_once: Guess,
    pub(super) saves_frames: FramesOnly,
}

impl ShmPath {
    pub(super) fn protocol(&self, what: &dyn std::fmt::Display) -> PathError {
        let peer = self.link.peer().to_owned();
        PathError::Protocol { peer, what: format!("a message that makes no sense: {what}") }
    }

    pub(super) fn unexpected(&self, reply: &Reply) -> PathError {
        match reply {
            Reply::Ended => PathError::Broken {
                peer: self.link.peer().to_owned(),
                cause: "the node ended the operation".to_owned(),
            },
            other => self.protocol(&format_args!("{other:?} out of place")),
        }
    }

    pub(super) async fn timed<T>(
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
        sink: &mut dyn Takes,
    ) -> Result<FetchAnswer, PathError> {
        let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
        if request.hashes.len() <= BLOCKS_PER_ASK_MAX {
            return self.fetch_some(request, deadline, sink).await;
        }
        let mut hashes = std::mem::take(&mut request.hashes).into_iter().peekable();
        let mut all = Vec::new();
        while hashes.peek().is_some() {
            let part: Vec<_> = hashes.by_ref().take(BLOCKS_PER_ASK_MAX).collect();
            let blocks = u32::try_from(part.len()).unwrap_or(u32::MAX);
            let some = FetchRequest { hashes: part, ..request.clone() };
            request.first_offset_blocks = request.first_offset_blocks.saturating_add(blocks);
            let answer = self.fetch_some(some, deadline, sink).await;
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

    async fn fetch_some(
        &self,
        request: FetchRequest,
        deadline: Instant,
        sink: &mut dyn Takes,
    ) -> Result<FetchAnswer, PathError> {
        let asked = request.hashes.len();
        let asking = self.link.begin(asked, wire::fetch_to_pb(&request))?;
        request.progress.asked();
        let Ok(first) = timeout_at(deadline, asking.next()).await else {
            return Ok(FetchAnswer::Miss { reason: MissReason::TooLate });
        };
        let first = first?;
        request.progress.answered();
        let (head, rows) = match first {
            Reply::Head(head, rows) => (head, rows),
            // The node's clock was the quicker one.
            Reply::End(reason) => {
                asking.finish();
                return Ok(FetchAnswer::Miss { reason: reason_of(reason) });
            }
            other => return Err(self.unexpected(&other)),
        };
        let (answer, epoch) = wire::head_from_pb(&head, asked).map_err(|error| self.protocol(&error))?;
        if epoch != request.epoch && !answer.tiers().is_empty() {
            return Ok(FetchAnswer::Miss { reason: MissReason::StaleEpoch });
        }
        let wanted = answer.tiers().len();
        let (delivered, reason) = self.receive(asking, rows, wanted, deadline, sink).await;
        Ok(answer.cut_short(delivered, reason))
    }

    /// Hands up to `wanted` frames to `sink`: how many came, and why not more.
    async fn receive(
        &self,
        asking: Asking,
        mut rows: Vec<Row>,
        wanted: usize,
        deadline: Instant,
        sink: &mut dyn Takes,
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
                    return (delivered, reason_of(reason));
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
        if hashes.len() <= BLOCKS_PER_ASK_MAX {
            return self.save_some(SaveRequest { hashes, ..request }, 0, source).await;
        }
        let (mut sum, mut first) = (SaveDone::default(), 0);
        for part in hashes.chunks(BLOCKS_PER_ASK_MAX) {
            let some = SaveRequest { hashes: part.to_vec(), ..request.clone() };
            match self.save_some(some, first, source).await? {
                SaveAnswer::Done(done) => {
                    sum.stored_blocks += done.stored_blocks;
                    sum.present_blocks += done.present_blocks;
                    sum.refused_blocks += done.refused_blocks;
                    sum.stored_bytes += done.stored_bytes;
                    sum.visible_at = done.visible_at.or(sum.visible_at);
                }
                other if first == 0 => return Ok(other),
                // What is behind has no prefix there: it is refused as a whole.
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

    async fn save_some(
        &self,
        request: SaveRequest,
        first: usize,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let blocks = request.hashes.len();
        let bytes = request.frame_bytes.saturating_mul(blocks as u64);
        let is_small = (1..=AT_ONCE_BLOCKS_MAX).contains(&blocks) && bytes <= AT_ONCE_BYTES_MAX;
        if is_small && self.at_once.tries() {
            let frames: Vec<Frame> = (first..first + blocks).map(source).collect();
            if let Some(asking) = self.link.begin_save(wire::save_to_pb(&request), &frames)? {
                let taking = Duration::from_micros(bytes / TAKEN_BYTES_A_MICROSECOND);
                let answer = self.save_at_once(asking, blocks, taking).await;
                match &answer {
                    Ok(SaveAnswer::Done(done)) if 2 * done.stored_blocks as usize >= blocks => {
                        self.at_once.was_right();
                    }
                    _ => self.at_once.was_wrong(),
                }
                return answer;
            }
            self.at_once.was_wrong();
        }
        self.save_wanted(request, first, source).await
    }

    /// The end of a save whose frames the node has.
    async fn save_at_once(
        &self,
        asking: Asking,
        blocks: usize,
        taking: Duration,
    ) -> Result<SaveAnswer, PathError> {
        let mut reply = self.timed(asking.next_after(taking)).await?;
        // It goes on, which is all that this says.
        while matches!(reply, Reply::Taken) {
            reply = self.timed(asking.next()).await?;
        }
        let answer = match reply {
            Reply::Done(done) => wire::done_from_pb(&done),
            Reply::Offer(offer) => {
                match wire::offer_from_pb(&offer, blocks).map_err(|error| self.protocol(&error))? {
                    SaveOffer::Busy { retry_after } => SaveAnswer::Busy { retry_after },
                    SaveOffer::Refused(refusal) => SaveAnswer::Refused(refusal),
                    SaveOffer::Wanted(_) => return Err(self.protocol(&"an offer of what was sent")),
                }
            }
            other => return Err(self.unexpected(&other)),
        };
        asking.finish();
        Ok(answer)
    }

    /// A save that brings what the node says that it wants.
    async fn save_wanted(
        &self,
        request: SaveRequest,
        first: usize,
        source: &(dyn Fn(usize) -> Frame + Send + Sync),
    ) -> Result<SaveAnswer, PathError> {
        let asking = self.link.begin(0, wire::save_to_pb(&request))?;
        let offer = match self.timed(asking.next()).await? {
            Reply::Offer(offer) => offer,
            other => return Err(self.unexpected(&other)),
        };
        let offer =
            wire::offer_from_pb(&offer, request.hashes.len()).map_err(|error| self.protocol(&error))?;
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
        let mut turn = Turn::default();
        for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let frame = source(first + position);
            turn.before(frame.bytes.len()).await;
            self.timed(self.put(&asking, &[frame.bytes], self.tray_in_bytes)).await?;
        }
        self.done(asking).await
    }

    /// Ends a save that brought what was wanted.
    pub(super) async fn done(&self, asking: Asking) -> Result<SaveAnswer, PathError> {
        asking.end_puts();
        loop {
            match self.timed(asking.next()).await? {
                Reply::Taken => {}
                Reply::Done(done) => {
                    asking.finish();
                    return Ok(wire::done_from_pb(&done));
                }
                other => return Err(self.unexpected(&other)),
            }
        }
    }

    /// Puts these bytes into the tray, one after the other in one place, as soon as there is one in this much of it.
    pub(super) async fn put(&self, asking: &Asking, parts: &[Bytes], within: u64) -> Result<(), PathError> {
        let bytes = parts.iter().map(Bytes::len).sum();
        let limit = usize::try_from(within).unwrap_or(usize::MAX);
        let len = u32::try_from(bytes).ok().filter(|_| bytes <= limit);
        let len = len.ok_or(PathError::TooLarge { bytes, limit })?;
        loop {
            let room = asking.room();
            if asking.put(parts, len, within) {
                return Ok(());
            }
            if asking.puts() == 0 {
                // Other saves have the tray; their owners hear of its places, or nobody does.
                if timeout(LOOK_AGAIN, room).await.is_err()
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

    /// Asks what is answered by a note.
    async fn note(&self, request: data::DataRequest) -> Result<data::Pong, PathError> {
        let asking = self.link.begin(0, request)?;
        match self.timed(asking.next()).await? {
            Reply::Noted(pong) => {
                asking.finish();
                Ok(pong)
            }
            other => Err(self.unexpected(&other)),
        }
    }
}

/// Who takes the frames of a fetch.
trait Takes: Send {
    /// These lie there, the next blocks in prefix order; others may come when these are taken.
    fn take(&mut self, frames: Vec<Frame>);
}

/// Frames handed on as they are.
struct OneByOne<'a>(&'a mut (dyn FnMut(Frame) + Send));

impl Takes for OneByOne<'_> {
    fn take(&mut self, frames: Vec<Frame>) {
        frames.into_iter().for_each(&mut *self.0);
    }
}

impl Takes for Whole<'_> {
    fn take(&mut self, frames: Vec<Frame>) {
        Whole::take(self, &frames);
    }
}

/// A node that says nothing more had no bytes.
fn reason_of(number: u32) -> MissReason {
    let known = MissReason::ALL.into_iter().find(|reason| *reason as u32 == number);
    known.unwrap_or(MissReason::MediumFailed)
}

impl Path for ShmPath {
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move { self.fetch_all(request, &mut OneByOne(sink)).await })
    }

    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let mut whole = Whole::new(sink, asked);
            let answer = self.fetch_all(request, &mut whole).await?;
            Ok(whole.conclude(answer))
        })
    }

    /// Nothing moves until it is copied out.
    fn moves_slices(&self) -> bool {
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
    ) -> BoxFuture<'a, Result<Streamed, PathError>> {
        Box::pin(self.save_by_layer(request, layers))
    }

    fn streams_saves(&self) -> bool {
        !self.saves_frames.is_so()
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>> {
        Box::pin(async move { self.note(wire::release_to_pb(lease)).await.map(|_| ()) })
    }

    fn failure(&self) -> Option<PathError> {
        self.link.failure()
    }

    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>> {
        Box::pin(async move {
            let asked = Instant::now();
            let pong = self.note(wire::ping_to_pb()).await?;
            if pong.version != wire::PROTOCOL_VERSION {
                return Err(self.protocol(&format_args!("protocol version {}", pong.version)));
            }
            Ok(asked.elapsed())
        })
    }
}
