//! The node's side of the four operations, over any stream: reads requests and lets the
//! [`BlockService`] answer.
//!
//! Limits are enforced before the service is called, so that a refused operation costs no work and
//! takes no lease. Every operation ends: the stall timeout bounds each read and write, the deadline
//! a fetch, and a fixed limit a save. Not here: connections (`quic/server.rs`, `tcp/server.rs`),
//! and a node's handling of requests (`node/`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{LeaseId, TrafficClass};
use kvfleet_net::trace_context;
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame, SliceLayout};
use tracing::Instrument;

use crate::capacity::{Capacity, LayeredSaveReservation, TrafficCounters};
use crate::in_flight::InFlightReservation;
use crate::layered::{self, LayerBuffers, SLICES_AT_ONCE_MAX};
use crate::pieces::{self, PieceQueue};
use crate::quic::{RETRY_AFTER, save_bytes_in_flight};
use crate::stream::{ItemError, NextItem, Stream, StreamError, encode, read_frame, read_message};
use crate::wire::{self, Operation};
use crate::{
    BlockService, Caller, CallerAdmission, FetchAnswer, FetchReply, FetchRequest, Frames, LayerRequest,
    MissReason, PathError, SaveOffer, SaveRequest, SaveSession,
};

/// Longest time that a fetch holds its share of the bytes in flight, whatever its deadline.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// Time that a fetch is served beyond its deadline. The reader's own clock ends it first with
/// `TooLate`; this ends only fetches of vanished or hostile readers.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Longest duration of a save. [`SAVES_AT_ONCE_MAX`](crate::quic::SAVES_AT_ONCE_MAX) saves of 256
/// MiB each need about two minutes on a gigabit link. Without it, a peer that sends one frame per
/// stall timeout would keep its slot for days.
const SAVE_TIME_MAX: Duration = Duration::from_secs(300);

/// An admitted caller and its service.
pub(crate) struct AdmittedCaller {
    pub(crate) service: Arc<dyn BlockService>,
    /// The caller's certificate.
    pub(crate) leaf: Arc<[u8]>,
    /// Whether the caller may read all memory of the node's blocks.
    pub(crate) may_map: bool,
}

/// Admits a caller that proved this leaf certificate; `None` if it is not served.
pub(crate) fn admit(leaf: Option<Arc<[u8]>>, service: &Arc<dyn BlockService>) -> Option<AdmittedCaller> {
    // A handshake without a certificate fails; if it succeeded, the caller would be unknown.
    let leaf = leaf?;
    match service.admit(&Caller::Certified(Arc::clone(&leaf))) {
        CallerAdmission::Unscoped => {
            Some(AdmittedCaller { service: Arc::clone(service), leaf, may_map: false })
        }
        CallerAdmission::Scoped { service, may_map: maps } => {
            Some(AdmittedCaller { service, leaf, may_map: maps })
        }
        CallerAdmission::Refused => None,
    }
}

/// Time limits of whole operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OperationTimeouts {
    pub(crate) fetch_max: Duration,
    pub(crate) save_max: Duration,
    pub(crate) grace: Duration,
}

pub(crate) const TIMES: OperationTimeouts =
    OperationTimeouts { fetch_max: FETCH_TIME_MAX, save_max: SAVE_TIME_MAX, grace: DEADLINE_GRACE };

/// Time limits of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServeLimits {
    /// Time without progress after which a peer counts as gone.
    pub(crate) stall_timeout: Duration,
    pub(crate) times: OperationTimeouts,
}

/// State shared by all operations of a server.
pub struct Operations {
    /// Shared with the node's other servers.
    capacity: Capacity,
    /// Traffic of this server alone.
    pub traffic: TrafficCounters,
    limits: ServeLimits,
}

/// A save's slot and its bytes in flight.
pub struct SaveReservation<'a> {
    _slot: InFlightReservation<'a>,
    bytes: InFlightReservation<'a>,
}

impl SaveReservation<'_> {
    /// Reduces the reservation to the wanted blocks.
    pub fn shrink(&mut self, wanted: usize, frame_bytes: u64) {
        self.bytes.shrink(if wanted == 0 { 0 } else { save_bytes_in_flight(wanted, frame_bytes) });
    }
}

/// Why an operation was aborted. For logs only: the peer sees its stream reset or closed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An item could not be read.
    #[error("peer sent {0}")]
    Item(#[from] ItemError),
    /// A field of the request has no valid value.
    #[error("peer sent a malformed request: {0}")]
    Request(#[from] kvfleet_proto::convert::ConvertError),
    /// The answer could not be sent.
    #[error("cannot answer: {0}")]
    Write(#[from] StreamError),
    /// The answer is too long.
    #[error("cannot answer: {0}")]
    Encode(#[from] PathError),
    /// The stall timeout or the operation's own limit passed.
    #[error("peer made no progress within the stall timeout")]
    Stalled(#[from] tokio::time::error::Elapsed),
    /// The peer cancelled the operation.
    #[error("peer gave up")]
    GaveUp,
    /// The service accepted a save without a session.
    #[error("the service wants a save and has no session")]
    MissingSession,
    /// A save ended early.
    #[error("save ended after {got} of {wanted} frames")]
    SaveTruncated {
        /// Frames received.
        got: usize,
        /// Frames expected.
        wanted: usize,
    },
    /// A save has too many frames.
    #[error("peer sent more than the {wanted} frames of its save")]
    SaveTooLong {
        /// Frames expected.
        wanted: usize,
    },
    /// The protocol of an upgraded connection failed.
    #[error("{0}")]
    Upgrade(Box<dyn std::error::Error + Send + Sync>),
}

impl Operations {
    pub(crate) fn new(capacity: Capacity, limits: ServeLimits) -> Operations {
        Operations { capacity, traffic: TrafficCounters::default(), limits }
    }

    /// Serves one operation to its end. `service` answers.
    pub(crate) async fn serve(
        &self,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let request = self.request(stream).await?;
        self.serve_request(request, service, stream).await
    }

    /// Reads the request of a stream.
    pub(crate) async fn request(&self, stream: &mut impl Stream) -> Result<data::DataRequest, ServeError> {
        Ok(self.with_stall_timeout(read_message(stream)).await??)
    }

    /// Serves an operation after its request was read.
    ///
    /// # Errors
    /// If the peer or the stream failed.
    pub async fn serve_request(
        &self,
        request: data::DataRequest,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        stream.set_class(wire::class_of(&request));
        let span = tracing::debug_span!("serve_blocks");
        trace_context::set_parent(&span, &request.traceparent);
        let operation = wire::operation_from_pb(request)?;
        self.run(operation, service, stream).instrument(span).await
    }

    /// Time limit of a fetch with this deadline.
    #[must_use]
    pub fn fetch_timeout(&self, deadline: Duration) -> Duration {
        let times = &self.limits.times;
        deadline.saturating_add(times.grace).min(times.fetch_max)
    }

    /// Time limit of a save.
    #[must_use]
    pub fn save_timeout(&self) -> Duration {
        self.limits.times.save_max
    }

    /// Reserves bytes for a fetch of this many blocks, by the largest known frame; `None` if too
    /// much is in flight.
    #[must_use]
    pub fn reserve_fetch(&self, class: TrafficClass, blocks: usize) -> Option<InFlightReservation<'_>> {
        let shares = self.capacity.pools();
        let frame_bytes = shares.largest_frame.load(Ordering::Relaxed);
        shares.fetches.reserve(class, frame_bytes.saturating_mul(blocks as u64))
    }

    /// Records the length of a frame that is sent.
    pub fn sent(&self, frame_bytes: usize) {
        self.capacity.pools().largest_frame.fetch_max(frame_bytes as u64, Ordering::Relaxed);
    }

    /// Reserves a save slot and the bytes of the save; `None` if there are none.
    #[must_use]
    pub fn reserve_save(&self, request: &SaveRequest) -> Option<SaveReservation<'_>> {
        let (shares, class) = (self.capacity.pools(), request.class());
        let place = shares.saves.reserve(class, 1)?;
        let bytes = save_bytes_in_flight(request.hashes.len(), request.frame_bytes);
        let room = shares.arriving.reserve(class, bytes)?;
        Some(SaveReservation { _slot: place, bytes: room })
    }

    async fn run(
        &self,
        operation: Operation,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        match operation {
            Operation::Fetch(request, layers) => {
                let (limit, lease) = (self.fetch_timeout(request.deadline), request.context.lease);
                let fetch = with_lease_renewal(service, lease, self.fetch(request, layers, service, stream));
                tokio::time::timeout(limit, fetch).await?
            }
            Operation::Save(request, layout) => {
                let lease = request.context.lease;
                let save = with_lease_renewal(service, lease, self.save(request, layout, service, stream));
                tokio::time::timeout(self.save_timeout(), save).await?
            }
            Operation::Release(lease) => {
                self.with_stall_timeout(service.release(lease)).await?;
                self.answer(stream, &pong()).await
            }
            Operation::Ping => self.answer(stream, &pong()).await,
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If it cannot be sent within the stall timeout.
    pub async fn answer<M: prost::Message>(
        &self,
        stream: &mut impl Stream,
        message: &M,
    ) -> Result<(), ServeError> {
        self.with_stall_timeout(stream.write(encode(message)?)).await??;
        self.flush(stream).await
    }

    /// Sends buffered bytes.
    ///
    /// # Errors
    /// If they cannot be sent within the stall timeout.
    pub async fn flush(&self, stream: &mut impl Stream) -> Result<(), ServeError> {
        Ok(self.with_stall_timeout(stream.flush()).await??)
    }

    async fn fetch(
        &self,
        request: FetchRequest,
        layers: Option<LayerRequest>,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let Some(_reserved) = self.reserve_fetch(request.class(), request.hashes.len()) else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::head_to_pb(&busy, request.epoch)).await;
        };
        let mut reply = service.fetch(request).await;
        // The answer leaves together with the frames that are ready.
        let mut head = wire::head_to_pb(&reply.answer, reply.epoch);
        head.is_by_layer = layers.is_some();
        self.with_stall_timeout(stream.write(encode(&head)?)).await??;
        if let Some(layers) = layers {
            return self.send_pieces(&mut reply, layers, stream).await;
        }
        for _ in reply.answer.tiers() {
            let Some(frame) = self.next_frame(&mut reply.frames, stream).await? else {
                return Ok(self.with_stall_timeout(stream.end(reply.frames.end_reason())).await??);
            };
            let bytes = frame.bytes.len();
            self.sent(bytes);
            self.with_stall_timeout(stream.write(frame.bytes)).await??;
            self.traffic.sent(bytes);
        }
        self.flush(stream).await
    }

    /// Sends one layer of all readable blocks, then the next. Blocks that become readable meanwhile
    /// catch up.
    async fn send_pieces(
        &self,
        reply: &mut FetchReply,
        asked: LayerRequest,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let mut wanted = reply.answer.tiers().len();
        let mut spoilt = false;
        let mut wave = PieceQueue::new(asked);
        loop {
            while let Some(frame) = (wave.len() < wanted).then(|| reply.frames.try_next()).flatten() {
                spoilt = !self.send_head(&mut wave, &frame, stream).await?;
                wanted = if spoilt { wave.len() } else { wanted };
            }
            if let Some(piece) = wave.next_piece() {
                let bytes = piece.bytes();
                let sent = bytes.len();
                self.with_stall_timeout(stream.write(piece.start())).await??;
                self.with_stall_timeout(stream.write(bytes)).await??;
                self.traffic.sent(sent);
            } else if wave.len() < wanted {
                let Some(frame) = self.next_frame(&mut reply.frames, stream).await? else {
                    self.with_stall_timeout(stream.write(pieces::end(reply.frames.end_reason()))).await??;
                    break;
                };
                spoilt = !self.send_head(&mut wave, &frame, stream).await?;
                wanted = if spoilt { wave.len() } else { wanted };
            } else {
                if spoilt {
                    self.with_stall_timeout(stream.write(pieces::end(Some(MissReason::Corrupt)))).await??;
                }
                break;
            }
        }
        self.flush(stream).await
    }

    /// `false` if the stored frame has no valid header.
    async fn send_head(
        &self,
        wave: &mut PieceQueue<Bytes>,
        frame: &Frame,
        stream: &mut impl Stream,
    ) -> Result<bool, ServeError> {
        let Ok(head) = frame.head() else { return Ok(false) };
        self.sent(frame.bytes.len());
        self.with_stall_timeout(stream.write(pieces::head_start(wave.len()))).await??;
        self.with_stall_timeout(stream.write(head.bytes().clone())).await??;
        self.traffic.sent(head.bytes().len());
        wave.add(head, frame.bytes.clone());
        Ok(true)
    }

    /// The next frame of a fetch. Flushes the stream before it waits.
    ///
    /// # Errors
    /// If the stream fails, or the peer gave up.
    pub async fn next_frame(
        &self,
        frames: &mut Frames,
        stream: &mut impl Stream,
    ) -> Result<Option<Frame>, ServeError> {
        if let Some(frame) = frames.try_next() {
            return Ok(Some(frame));
        }
        self.flush(stream).await?;
        // A reader that gave up must not hold its reservation while a slow medium reads.
        tokio::select! {
            frame = frames.next() => Ok(frame),
            () = stream.stopped() => Err(ServeError::GaveUp),
        }
    }

    async fn save(
        &self,
        request: SaveRequest,
        layout: Option<SliceLayout>,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let Some(mut room) = self.reserve_save(&request) else {
            let busy = SaveOffer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::offer_to_pb(&busy)).await;
        };
        let frame_bytes = request.frame_bytes;
        let limit = usize::try_from(frame_bytes).unwrap_or(usize::MAX).min(FRAME_BYTES_MAX);
        let (offer, session) = service.save(request).await;
        let mut answer = wire::offer_to_pb(&offer);
        let SaveOffer::Wanted(wanted) = offer else { return self.answer(stream, &answer).await };
        let mut session = session.ok_or(ServeError::MissingSession)?;
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        room.shrink(wanted, frame_bytes);
        if let Some(layout) = &layout
            && let Some(_part) = self.reserve_layered_save(layout, wanted)
            && let Some(layers) = session.layer_buffers(layout)
        {
            answer.is_by_layer = true;
            self.answer(stream, &answer).await?;
            let stopped = stream.stopped();
            tokio::select! {
                taken = self.receive_layers(stream, layers, wanted, layout) => taken?,
                () = stopped => return Err(ServeError::GaveUp),
            }
        } else {
            self.answer(stream, &answer).await?;
            let stopped = stream.stopped();
            session = tokio::select! {
                session = self.receive_frames(stream, session, wanted, limit, layout.is_some()) => session?,
                () = stopped => return Err(ServeError::GaveUp),
            };
        }
        let done = session.finish().await;
        self.answer(stream, &wire::done_to_pb(&done)).await
    }

    /// Reserves a part of the memory for layer-wise saves. `None` if it is taken, or no slice is
    /// expected.
    fn reserve_layered_save(
        &self,
        layout: &SliceLayout,
        wanted: usize,
    ) -> Option<LayeredSaveReservation<'_>> {
        let slices = wanted.saturating_mul(layout.slice_bytes().len());
        let bytes = save_bytes_in_flight(wanted, layout.frame_bytes() as u64);
        let part = self.capacity.pools().layered.reserve(bytes);
        part.filter(|_| wanted > 0 && slices <= SLICES_AT_ONCE_MAX)
    }

    /// Receives the slices and headers of a save. The stall timeout bounds each slice, so that a
    /// stopped computation does not hold its memory for long.
    async fn receive_layers(
        &self,
        stream: &mut impl Stream,
        room: &mut dyn LayerBuffers,
        wanted: usize,
        layout: &SliceLayout,
    ) -> Result<(), ServeError> {
        for (layer, slice_bytes) in layout.slice_bytes().iter().enumerate() {
            for position in 0..wanted {
                let behind = (wanted - position - 1) * *slice_bytes as usize;
                let reading = layered::read_slice(stream, room, position, layer, behind);
                let bytes = self.with_stall_timeout(reading).await??.ok_or(ServeError::MissingSession)?;
                self.traffic.received(bytes);
                // Slices may be empty, so a million of them need no wait: yield to other tasks.
                tokio::task::consume_budget().await;
            }
        }
        for position in 0..wanted {
            let behind = (wanted - position - 1) * layout.head_bytes();
            let head = self.with_stall_timeout(layered::read_head(stream, layout, behind)).await??;
            self.traffic.received(head.len());
            room.put_head(head).await;
        }
        match self.with_stall_timeout(read_frame(stream, 0)).await?? {
            NextItem::End(_) => Ok(()),
            NextItem::Frame(_) => Err(ServeError::SaveTooLong { wanted }),
        }
    }

    /// Receives the frames of a save. If dropped midway, it drops the session, which discards the
    /// missing blocks; the service decides about those that were put. `limit` bounds a frame in
    /// bytes. With `may_end`, the saver may end before the first frame, because it wanted to send
    /// slices.
    async fn receive_frames(
        &self,
        stream: &mut impl Stream,
        mut session: Box<dyn SaveSession>,
        wanted: usize,
        limit: usize,
        may_end: bool,
    ) -> Result<Box<dyn SaveSession>, ServeError> {
        for got in 0..wanted {
            match self.with_stall_timeout(read_frame(stream, limit)).await?? {
                NextItem::Frame(frame) => {
                    self.traffic.received(frame.bytes.len());
                    session.put(frame).await;
                }
                NextItem::End(_) if may_end && got == 0 => return Ok(session),
                NextItem::End(_) => return Err(ServeError::SaveTruncated { got, wanted }),
            }
        }
        // A save is answered only after the peer states its end.
        match self.with_stall_timeout(read_frame(stream, limit)).await?? {
            NextItem::End(_) => Ok(session),
            NextItem::Frame(_) => Err(ServeError::SaveTooLong { wanted }),
        }
    }

    /// `work` within the stall timeout.
    ///
    /// # Errors
    /// If that passes.
    pub async fn with_stall_timeout<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, tokio::time::error::Elapsed> {
        tokio::time::timeout(self.limits.stall_timeout, work).await
    }
}

/// Runs `work` and renews its lease meanwhile: between two layers of a save, or two frames of a
/// slow fetch, there is no other sign of use.
async fn with_lease_renewal<T>(
    service: &dyn BlockService,
    lease: LeaseId,
    work: impl Future<Output = T>,
) -> T {
    tokio::pin!(work);
    loop {
        match tokio::time::timeout(service.renew_interval(), &mut work).await {
            Ok(done) => return done,
            Err(_) => service.renew(lease),
        }
    }
}

fn pong() -> data::Pong {
    data::Pong { version: wire::PROTOCOL_VERSION }
}
