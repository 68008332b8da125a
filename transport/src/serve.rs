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

use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use kvfleet_proto::trace_context;
use tracing::Instrument;

use crate::quic::{RETRY_AFTER, save_bytes_in_flight};
use crate::room::{Carried, Room};
use crate::stream::{ItemError, Loss, Next, Stream, encode, read_frame, read_message};
use crate::wire::{self, Operation};
use crate::{
    Admission, BlockService, Caller, FetchAnswer, FetchRequest, Frames, PathError, SaveOffer, SaveRequest,
    SaveSession,
};

/// Longest time a fetch holds its part of the bytes in flight, whatever deadline it names.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// How much longer than its deadline a fetch is served. The reader's own clock ends it first and says
/// `TooLate`; this only ends what a reader that is gone or hostile left behind.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Longest time a save may take: all of [`SAVES_AT_ONCE_MAX`](crate::quic::SAVES_AT_ONCE_MAX) with 256 MiB each need two minutes on a
/// gigabit link. Without it a peer that sends one frame per stall timeout would keep its place for days.
const SAVE_TIME_MAX: Duration = Duration::from_secs(300);

/// Who answers a caller that proved this leaf certificate; nothing when it is not served.
pub(crate) fn admit(
    leaf: Option<Arc<[u8]>>,
    service: &Arc<dyn BlockService>,
) -> Option<Arc<dyn BlockService>> {
    // A handshake without one does not end; if one did, its caller would be nobody.
    match service.admit(&Caller::Certified(leaf?)) {
        Admission::Same => Some(Arc::clone(service)),
        Admission::Scoped { service, .. } => Some(service),
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
        let request: data::DataRequest = self.timed(read_message(stream)).await??;
        let span = tracing::debug_span!("serve_blocks");
        trace_context::set_parent(&span, &request.traceparent);
        let operation = wire::operation_from_pb(request)?;
        self.run(operation, service, stream).instrument(span).await
    }

    async fn run(
        &self,
        operation: Operation,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let times = &self.limits.times;
        match operation {
            Operation::Fetch(request) => {
                let limit = request.deadline.saturating_add(times.grace).min(times.fetch_max);
                tokio::time::timeout(limit, self.fetch(request, service, stream)).await?
            }
            Operation::Save(request) => {
                tokio::time::timeout(times.save_max, self.save(request, service, stream)).await?
            }
            Operation::Release(lease) => {
                self.timed(service.release(lease)).await?;
                self.answer(stream, &pong()).await
            }
            Operation::Ping => self.answer(stream, &pong()).await,
        }
    }

    async fn answer<M: prost::Message>(
        &self,
        stream: &mut impl Stream,
        message: &M,
    ) -> Result<(), ServeError> {
        self.timed(stream.write(encode(message)?)).await??;
        self.flush(stream).await
    }

    async fn flush(&self, stream: &mut impl Stream) -> Result<(), ServeError> {
        Ok(self.timed(stream.flush()).await??)
    }

    async fn fetch(
        &self,
        request: FetchRequest,
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let room = self.room.shares();
        let frame_bytes = room.largest_frame.load(Ordering::Relaxed);
        let bytes = frame_bytes.saturating_mul(request.hashes.len() as u64);
        let Some(_reserved) = room.fetches.reserve(bytes) else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::head_to_pb(&busy, request.epoch)).await;
        };
        let mut reply = service.fetch(request).await;
        // The head leaves with what lies ready behind it.
        let head = encode(&wire::head_to_pb(&reply.answer, reply.epoch))?;
        self.timed(stream.write(head)).await??;
        for _ in reply.answer.tiers() {
            let Some(frame) = self.next(&mut reply.frames, stream).await? else {
                return Ok(self.timed(stream.end(reply.frames.ended())).await??);
            };
            let bytes = frame.bytes.len();
            room.largest_frame.fetch_max(bytes as u64, Ordering::Relaxed);
            self.timed(stream.write(frame.bytes)).await??;
            self.carried.sent(bytes);
        }
        self.flush(stream).await
    }

    /// The next frame of a fetch. While it is waited for, nothing that was written waits.
    async fn next(&self, frames: &mut Frames, stream: &mut impl Stream) -> Result<Option<Frame>, ServeError> {
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
        service: &dyn BlockService,
        stream: &mut impl Stream,
    ) -> Result<(), ServeError> {
        let shares = self.room.shares();
        let permit = shares.saves.try_acquire().ok();
        let bytes = save_bytes_in_flight(request.hashes.len(), request.frame_bytes);
        let Some((_permit, mut room)) = permit.zip(shares.arriving.reserve(bytes)) else {
            let busy = SaveOffer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::offer_to_pb(&busy)).await;
        };
        let frame_bytes = request.frame_bytes;
        let limit = usize::try_from(frame_bytes).unwrap_or(usize::MAX).min(FRAME_BYTES_MAX);
        let (offer, session) = service.save(request).await;
        self.answer(stream, &wire::offer_to_pb(&offer)).await?;
        let SaveOffer::Wanted(wanted) = offer else { return Ok(()) };
        let session = session.ok_or(ServeError::NoSession)?;
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        room.shrink(if wanted == 0 { 0 } else { save_bytes_in_flight(wanted, frame_bytes) });
        let stopped = stream.stopped();
        let session = tokio::select! {
            session = self.take(stream, session, wanted, limit) => session?,
            () = stopped => return Err(ServeError::GaveUp),
        };
        let done = session.finish().await;
        self.answer(stream, &wire::done_to_pb(&done)).await
    }

    /// Takes the frames of a save up to its end. Dropped midway, it drops the session, which gives back
    /// what did not come; whether blocks that were put already stay is the service's to say.
    async fn take(
        &self,
        stream: &mut impl Stream,
        mut session: Box<dyn SaveSession>,
        wanted: usize,
        limit: usize,
    ) -> Result<Box<dyn SaveSession>, ServeError> {
        for got in 0..wanted {
            match self.timed(read_frame(stream, limit)).await?? {
                Next::Frame(frame) => {
                    self.carried.received(frame.bytes.len());
                    session.put(frame).await;
                }
                Next::End(_) => return Err(ServeError::SaveCut { got, wanted }),
            }
        }
        // A save is answered only when the peer says that it is complete.
        match self.timed(read_frame(stream, limit)).await?? {
            Next::End(_) => Ok(session),
            Next::Frame(_) => Err(ServeError::SaveTooLong { wanted }),
        }
    }

    async fn timed<T>(&self, work: impl Future<Output = T>) -> Result<T, tokio::time::error::Elapsed> {
        tokio::time::timeout(self.limits.stall_timeout, work).await
    }
}

fn pong() -> data::Pong {
    data::Pong { version: wire::PROTOCOL_VERSION }
}
