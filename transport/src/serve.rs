//! The node's end of the four operations, over any stream: reads what a stream asks, lets the
//! [`BlockService`] answer.
//!
//! Limits are enforced here, before the service is asked, so that a refused operation costs nothing and
//! leases nothing. Every operation has an end: each read and write is bounded by the stall timeout, a fetch
//! by its deadline, a save by a time of its own. Not here: connections (`quic/server.rs`, `tcp/server.rs`),
//! and what a node does with a request (`node/`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{Class, LeaseId};
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame, SliceLayout};
use kvfleet_proto::trace_context;
use tracing::Instrument;

use crate::in_flight::Reserved;
use crate::layered::{self, LayerRoom, SLICES_AT_ONCE_MAX};
use crate::pieces::{self, Wave};
use crate::quic::{RETRY_AFTER, save_bytes_in_flight};
use crate::room::{Carried, LayeredPart, Room};
use crate::stream::{ItemError, Loss, Next, Stream, encode, read_frame, read_message};
use crate::wire::{self, Operation};
use crate::{
    Admission, AskedLayers, BlockService, Caller, FetchAnswer, FetchReply, FetchRequest, Frames, MissReason,
    PathError, SaveOffer, SaveRequest, SaveSession,
};

/// Longest time a fetch holds its part of the bytes in flight, whatever deadline it names.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// How much longer than its deadline a fetch is served. The reader's own clock ends it first and says
/// `TooLate`; this only ends what a reader that is gone or hostile left behind.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Longest time a save may take: all of [`SAVES_AT_ONCE_MAX`](crate::quic::SAVES_AT_ONCE_MAX) with 256 MiB each need two minutes on a
/// gigabit link. Without it a peer that sends one frame per stall timeout would keep its place for days.
const SAVE_TIME_MAX: Duration = Duration::from_secs(300);

/// Who answers a caller.
pub(crate) struct Admitted {
    pub(crate) service: Arc<dyn BlockService>,
    /// Its certificate.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "only links are counted by caller"))]
    pub(crate) leaf: Arc<[u8]>,
    /// Whether it may read all memory of the node's blocks.
    #[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "only RDMA lends memory over a network"))]
    pub(crate) maps: bool,
}

/// Who answers a caller that proved this leaf certificate; nothing when it is not served.
pub(crate) fn admit(leaf: Option<Arc<[u8]>>, service: &Arc<dyn BlockService>) -> Option<Admitted> {
    // A handshake without one does not end; if one did, its caller would be nobody.
    let leaf = leaf?;
    match service.admit(&Caller::Certified(Arc::clone(&leaf))) {
        Admission::Same => Some(Admitted { service: Arc::clone(service), leaf, maps: false }),
        Admission::Scoped { service, maps } => Some(Admitted { service, leaf, maps }),
        Admission::Refused => None,
    }
}

/// How long operations may take in all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) fetch_max: Duration,
    pub(crate) save_max: Duration,
    pub(crate) grace: Duration,
}

pub(crate) const TIMES: Times =
    Times { fetch_max: FETCH_TIME_MAX, save_max: SAVE_TIME_MAX, grace: DEADLINE_GRACE };

/// How long operations of a server may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time without progress after which a peer counts as gone.
    pub(crate) stall_timeout: Duration,
    pub(crate) times: Times,
}

/// What all operations of a server share.
pub(crate) struct Operations {
    /// Shared with the node's other servers.
    room: Room,
    /// Of this server alone.
    pub(crate) carried: Carried,
    limits: Limits,
}

/// A save's place and its room.
pub(crate) struct Arriving<'a> {
    _place: Reserved<'a>,
    room: Reserved<'a>,
}

impl Arriving<'_> {
    /// Only so many blocks arrive.
    pub(crate) fn shrink(&mut self, wanted: usize, frame_bytes: u64) {
        self.room.shrink(if wanted == 0 { 0 } else { save_bytes_in_flight(wanted, frame_bytes) });
    }
}

/// Why an operation ended before its end. Only ever logged: the peer sees its stream reset or closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error("peer sent {0}")]
    Item(#[from] ItemError),
    #[error("peer asked something that makes no sense: {0}")]
    Request(#[from] kvfleet_proto::convert::ConvertError),
    #[error("cannot answer: {0}")]
    Write(#[from] Loss),
    #[error("cannot answer: {0}")]
    Encode(#[from] PathError),
    #[error("peer went quiet")]
    Stalled(#[from] tokio::time::error::Elapsed),
    #[error("peer gave up")]
    GaveUp,
    #[error("the service wants a save and takes none")]
    NoSession,
    #[error("save ended after {got} of {wanted} frames")]
    SaveCut { got: usize, wanted: usize },
    #[error("save goes on after its {wanted} frames")]
    SaveTooLong { wanted: usize },
    #[cfg(feature = "rdma")]
    #[error("peer broke the rules of lending: {0}")]
    Lending(#[from] kv_core::lend::UnknownLoan),
    #[cfg(feature = "rdma")]
    #[error("peer asked something that makes no sense: {0}")]
    Nonsense(#[from] crate::rdma::Nonsense),
    #[cfg(feature = "rdma")]
    #[error("RDMA could not be set up: {0}")]
    Rdma(String),
}

impl Operations {
    pub(crate) fn new(room: Room, limits: Limits) -> Operations {
        Operations { room, carried: Carried::default(), limits }
    }

    /// Serves one operation, to its last byte. `service` answers.
    pub(crate) async fn serve(
        &self,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let request = self.request(stream).await?;
        self.serve_request(request, service, stream).await
    }

    /// What a stream asks.
    pub(crate) async fn request(&self, stream: &mut impl Stream) -> Result<data::DataRequest, ServeError> {
        Ok(self.timed(read_message(stream)).await??)
    }

    /// Serves an operation that was read.
    pub(crate) async fn serve_request(
        &self,
        request: data::DataRequest,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        stream.rank(wire::class_of(&request));
        let span = tracing::debug_span!("serve_blocks");
        trace_context::set_parent(&span, &request.traceparent);
        let operation = wire::operation_from_pb(request)?;
        self.run(operation, service, stream).instrument(span).await
    }

    /// How long a fetch with this deadline may take here.
    pub(crate) fn fetch_span(&self, deadline: Duration) -> Duration {
        let times = &self.limits.times;
        deadline.saturating_add(times.grace).min(times.fetch_max)
    }

    /// How long a save may take here.
    pub(crate) fn save_span(&self) -> Duration {
        self.limits.times.save_max
    }

    /// Room for a fetch of so many blocks, as far as is known before; nothing when too much is under way.
    pub(crate) fn reserve_fetch(&self, class: Class, blocks: usize) -> Option<Reserved<'_>> {
        let shares = self.room.shares();
        let frame_bytes = shares.largest_frame.load(Ordering::Relaxed);
        shares.fetches.reserve(class, frame_bytes.saturating_mul(blocks as u64))
    }

    /// A frame of so many bytes is on its way.
    pub(crate) fn sent(&self, frame_bytes: usize) {
        self.room.shares().largest_frame.fetch_max(frame_bytes as u64, Ordering::Relaxed);
    }

    /// A place among the saves at once, and room for what arrives; nothing when there is none.
    pub(crate) fn reserve_save(&self, request: &SaveRequest) -> Option<Arriving<'_>> {
        let (shares, class) = (self.room.shares(), request.class());
        let place = shares.saves.reserve(class, 1)?;
        let bytes = save_bytes_in_flight(request.hashes.len(), request.frame_bytes);
        let room = shares.arriving.reserve(class, bytes)?;
        Some(Arriving { _place: place, room })
    }

    async fn run(
        &self,
        operation: Operation,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        match operation {
            Operation::Fetch(request, layers) => {
                let (limit, lease) = (self.fetch_span(request.deadline), request.asker.lease);
                let fetch = renewing(service, lease, self.fetch(request, layers, service, stream));
                tokio::time::timeout(limit, fetch).await?
            }
            Operation::Save(request, layout) => {
                let lease = request.asker.lease;
                let save = renewing(service, lease, self.save(request, layout, service, stream));
                tokio::time::timeout(self.save_span(), save).await?
            }
            Operation::Release(lease) => {
                self.timed(service.release(lease)).await?;
                self.answer(stream, &pong()).await
            }
            Operation::Ping => self.answer(stream, &pong()).await,
        }
    }

    pub(crate) async fn answer<M: prost::Message>(
        &self,
        stream: &mut impl Stream,
        message: &M,
    ) -> Result<(), ServeError> {
        self.timed(stream.write(encode(message)?)).await??;
        self.flush(stream).await
    }

    pub(crate) async fn flush(&self, stream: &mut impl Stream) -> Result<(), ServeError> {
        Ok(self.timed(stream.flush()).await??)
    }

    async fn fetch(
        &self,
        request: FetchRequest,
        layers: Option<AskedLayers>,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let Some(_reserved) = self.reserve_fetch(request.class(), request.hashes.len()) else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::head_to_pb(&busy, request.epoch)).await;
        };
        let mut reply = service.fetch(request).await;
        // The head leaves with what lies ready behind it.
        let mut head = wire::head_to_pb(&reply.answer, reply.epoch);
        head.is_by_layer = layers.is_some();
        self.timed(stream.write(encode(&head)?)).await??;
        if let Some(layers) = layers {
            return self.send_layers(&mut reply, layers, stream).await;
        }
        for _ in reply.answer.tiers() {
            let Some(frame) = self.next(&mut reply.frames, stream).await? else {
                return Ok(self.timed(stream.end(reply.frames.ended())).await??);
            };
            let bytes = frame.bytes.len();
            self.sent(bytes);
            self.timed(stream.write(frame.bytes)).await??;
            self.carried.sent(bytes);
        }
        self.flush(stream).await
    }

    /// A layer of all blocks that are readable, then the next. Blocks that become readable meanwhile catch up.
    async fn send_layers(
        &self,
        reply: &mut FetchReply,
        asked: AskedLayers,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let mut wanted = reply.answer.tiers().len();
        let mut spoilt = false;
        let mut wave = Wave::new(asked);
        loop {
            while let Some(frame) = (wave.len() < wanted).then(|| reply.frames.try_next()).flatten() {
                spoilt = !self.send_head(&mut wave, &frame, stream).await?;
                wanted = if spoilt { wave.len() } else { wanted };
            }
            if let Some(piece) = wave.next() {
                let bytes = piece.bytes();
                let sent = bytes.len();
                self.timed(stream.write(piece.start())).await??;
                self.timed(stream.write(bytes)).await??;
                self.carried.sent(sent);
            } else if wave.len() < wanted {
                let Some(frame) = self.next(&mut reply.frames, stream).await? else {
                    self.timed(stream.write(pieces::end(reply.frames.ended()))).await??;
                    break;
                };
                spoilt = !self.send_head(&mut wave, &frame, stream).await?;
                wanted = if spoilt { wave.len() } else { wanted };
            } else {
                if spoilt {
                    self.timed(stream.write(pieces::end(Some(MissReason::Corrupt)))).await??;
                }
                break;
            }
        }
        self.flush(stream).await
    }

    /// `false` when there is no head: what was stored is spoilt.
    async fn send_head(
        &self,
        wave: &mut Wave<Bytes>,
        frame: &Frame,
        stream: &mut impl Stream,
    ) -> Result<bool, ServeError> {
        let Ok(head) = frame.head() else { return Ok(false) };
        self.sent(frame.bytes.len());
        self.timed(stream.write(pieces::head_start(wave.len()))).await??;
        self.timed(stream.write(head.bytes().clone())).await??;
        self.carried.sent(head.bytes().len());
        wave.add(head, frame.bytes.clone());
        Ok(true)
    }

    /// The next frame of a fetch. While it is waited for, nothing that was written waits.
    pub(crate) async fn next(
        &self,
        frames: &mut Frames,
        stream: &mut impl Stream,
    ) -> Result<Option<Frame>, ServeError> {
        if let Some(frame) = frames.try_next() {
            return Ok(Some(frame));
        }
        self.flush(stream).await?;
        // A reader that gave up must not keep its reservation while a slow medium works for it.
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
        let mut session = session.ok_or(ServeError::NoSession)?;
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        room.shrink(wanted, frame_bytes);
        if let Some(layout) = &layout
            && let Some(_part) = self.reserve_layers(layout, wanted)
            && let Some(layers) = session.layers(layout)
        {
            answer.is_by_layer = true;
            self.answer(stream, &answer).await?;
            let stopped = stream.stopped();
            tokio::select! {
                taken = self.take_layers(stream, layers, wanted, layout) => taken?,
                () = stopped => return Err(ServeError::GaveUp),
            }
        } else {
            self.answer(stream, &answer).await?;
            let stopped = stream.stopped();
            session = tokio::select! {
                session = self.take(stream, session, wanted, (limit, layout.is_some())) => session?,
                () = stopped => return Err(ServeError::GaveUp),
            };
        }
        let done = session.finish().await;
        self.answer(stream, &wire::done_to_pb(&done)).await
    }

    /// A part of what saves that come by layer may hold; nothing when others have it, or nothing is to come.
    fn reserve_layers(&self, layout: &SliceLayout, wanted: usize) -> Option<LayeredPart<'_>> {
        let slices = wanted.saturating_mul(layout.slice_bytes().len());
        let bytes = save_bytes_in_flight(wanted, layout.frame_bytes() as u64);
        let part = self.room.shares().layered.reserve(bytes);
        part.filter(|_| wanted > 0 && slices <= SLICES_AT_ONCE_MAX)
    }

    /// Takes the slices and heads of a save up to its end. Each slice is waited for like any word of a peer, so that what it
    /// holds is not held for long where nothing is computed any more.
    async fn take_layers(
        &self,
        stream: &mut impl Stream,
        room: &mut dyn LayerRoom,
        wanted: usize,
        layout: &SliceLayout,
    ) -> Result<(), ServeError> {
        for (layer, slice_bytes) in layout.slice_bytes().iter().enumerate() {
            for position in 0..wanted {
                let behind = (wanted - position - 1) * *slice_bytes as usize;
                let reading = layered::read_slice(stream, room, (position, layer), behind);
                let bytes = self.timed(reading).await??.ok_or(ServeError::NoSession)?;
                self.carried.received(bytes);
                // Slices may be empty, and a million of them are there without a wait: others are to have their turn.
                tokio::task::consume_budget().await;
            }
        }
        for position in 0..wanted {
            let behind = (wanted - position - 1) * layout.head_bytes();
            let head = self.timed(layered::read_head(stream, layout, behind)).await??;
            self.carried.received(head.len());
            room.put_head(head).await;
        }
        match self.timed(read_frame(stream, 0)).await?? {
            Next::End(_) => Ok(()),
            Next::Frame(_) => Err(ServeError::SaveTooLong { wanted }),
        }
    }

    /// Takes the frames of a save up to its end. Dropped midway, it drops the session, which gives back
    /// what did not come; whether blocks that were put already stay is the service's to say. Frames have a `limit` in bytes; a
    /// saver that would have sent slices may end before the first one.
    async fn take(
        &self,
        stream: &mut impl Stream,
        mut session: Box<dyn SaveSession>,
        wanted: usize,
        (limit, may_end): (usize, bool),
    ) -> Result<Box<dyn SaveSession>, ServeError> {
        for got in 0..wanted {
            match self.timed(read_frame(stream, limit)).await?? {
                Next::Frame(frame) => {
                    self.carried.received(frame.bytes.len());
                    session.put(frame).await;
                }
                Next::End(_) if may_end && got == 0 => return Ok(session),
                Next::End(_) => return Err(ServeError::SaveCut { got, wanted }),
            }
        }
        // A save is answered only when the peer says that it is complete.
        match self.timed(read_frame(stream, limit)).await?? {
            Next::End(_) => Ok(session),
            Next::Frame(_) => Err(ServeError::SaveTooLong { wanted }),
        }
    }

    pub(crate) async fn timed<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, tokio::time::error::Elapsed> {
        tokio::time::timeout(self.limits.stall_timeout, work).await
    }
}

/// Waits for `work`, an operation under this lease, which is renewed meanwhile: between two layers of a save, or two frames of
/// a slow fetch, nothing else says that it is in use.
async fn renewing<T>(service: &dyn BlockService, lease: LeaseId, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    loop {
        match tokio::time::timeout(service.renew_every(), &mut work).await {
            Ok(done) => return done,
            Err(_) => service.renew(lease),
        }
    }
}

fn pong() -> data::Pong {
    data::Pong { version: wire::PROTOCOL_VERSION }
}
