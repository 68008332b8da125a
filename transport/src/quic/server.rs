//! The node's end: accepts connections, reads what each stream asks, lets the [`BlockService`] answer.
//!
//! Limits are enforced here, before the service is asked, so that a refused operation costs nothing and
//! leases nothing. Every operation has an end: each read and write is bounded by the stall timeout, a fetch
//! by its deadline, a save by a time of its own. Not here: what a node does with a request (`node/`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use kvfleet_proto::tls::Identity;
use kvfleet_proto::trace_context;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Connection, Endpoint, RecvStream, SendStream, default_runtime};
use rustls_pki_types::CertificateDer;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tracing::Instrument;

use super::stream::{
    ItemError, Next, encode, read_frame, read_message, write_end, write_frame, write_message,
};
use super::{
    CODE_DONE, CODE_REFUSED, CONNECTIONS_MAX, QuicConfig, RETRY_AFTER, SAVES_AT_ONCE_MAX,
    save_bytes_in_flight,
};
use crate::wire::{self, Operation};
use crate::{
    Admission, BlockService, Caller, FetchAnswer, FetchRequest, PathError, SaveOffer, SaveRequest,
    SaveSession,
};

/// Frame size assumed before the first frame was sent, in bytes.
const FRAME_BYTES_GUESS: u64 = 64 << 10;

/// Longest time a fetch holds its part of the bytes in flight, whatever deadline it names.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// How much longer than its deadline a fetch is served. The reader's own clock ends it first and says
/// `TooLate`; this only ends what a reader that is gone or hostile left behind.
const DEADLINE_GRACE: Duration = Duration::from_secs(1);

/// Longest time a save may take: all of [`SAVES_AT_ONCE_MAX`] with 256 MiB each need two minutes on a
/// gigabit link. Without it a peer that sends one frame per stall timeout would keep its place for days.
const SAVE_TIME_MAX: Duration = Duration::from_secs(300);

/// Time for connections to say goodbye when the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on udp {address}: {cause}; choose a free port or stop the process that holds it")]
pub struct BindError {
    /// Where.
    pub address: SocketAddr,
    /// What the system said.
    pub cause: std::io::Error,
}

/// Serves a node's blocks over QUIC until closed or dropped.
#[derive(Debug)]
pub struct QuicServer {
    endpoint: Endpoint,
    local: SocketAddr,
    accepting: JoinHandle<()>,
}

/// What all streams of a server share.
struct Shared {
    /// Says who answers each connection.
    service: Arc<dyn BlockService>,
    saves: Semaphore,
    fetches: InFlight,
    arriving: InFlight,
    largest_frame: AtomicU64,
    stall_timeout: Duration,
    times: Times,
}

/// How long operations may take in all.
#[derive(Clone, Copy, Debug)]
struct Times {
    fetch_max: Duration,
    save_max: Duration,
    grace: Duration,
}

const TIMES: Times = Times { fetch_max: FETCH_TIME_MAX, save_max: SAVE_TIME_MAX, grace: DEADLINE_GRACE };

impl QuicServer {
    /// Listens on `address` (port 0: any) with the default settings. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(
        address: SocketAddr,
        identity: &Identity,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, BindError> {
        QuicServer::bind_with(address, identity, &QuicConfig::default(), service)
    }

    /// Like [`QuicServer::bind`], with settings.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind_with(
        address: SocketAddr,
        identity: &Identity,
        config: &QuicConfig,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, BindError> {
        QuicServer::bind_timed(address, identity, config, TIMES, service)
    }

    fn bind_timed(
        address: SocketAddr,
        identity: &Identity,
        config: &QuicConfig,
        times: Times,
        service: Arc<dyn BlockService>,
    ) -> Result<QuicServer, BindError> {
        let failed = |cause| BindError { address, cause };
        let crypto = QuicServerConfig::try_from(identity.quic_server())
            .expect("ring has the cipher suite that QUIC's first packets need");
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        server.transport_config(config.transport());
        let socket = std::net::UdpSocket::bind(address).map_err(failed)?;
        let runtime = default_runtime().ok_or_else(|| failed(std::io::Error::other("no tokio runtime")))?;
        let endpoint = Endpoint::new(config.endpoint(), Some(server), socket, runtime).map_err(failed)?;
        let local = endpoint.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared::new(service, config, times));
        let accepting = tokio::spawn(accept(endpoint.clone(), shared));
        Ok(QuicServer { endpoint, local, accepting })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Ends every operation and connection; returns when peers were told or a second has passed.
    pub async fn close(self) {
        self.endpoint.close(CODE_DONE, b"server closes");
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.endpoint.wait_idle()).await;
    }
}

impl Drop for QuicServer {
    fn drop(&mut self) {
        self.endpoint.close(CODE_DONE, b"server closes");
        self.accepting.abort();
    }
}

async fn accept(endpoint: Endpoint, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Some(incoming) = endpoint.accept().await {
        while connections.try_join_next().is_some() {}
        if connections.len() >= CONNECTIONS_MAX {
            incoming.refuse();
            continue;
        }
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            match incoming.await {
                Ok(connection) => serve_connection(connection, shared).await,
                Err(error) => tracing::debug!(%error, "handshake failed"),
            }
        });
    }
}

async fn serve_connection(connection: Connection, shared: Arc<Shared>) {
    let Some(service) = admit(&connection, &shared.service) else {
        tracing::warn!(peer = %connection.remote_address(), "a caller is refused by its certificate");
        return connection.close(CODE_REFUSED, b"this caller is not served");
    };
    let mut streams = JoinSet::new();
    while let Ok((send, recv)) = connection.accept_bi().await {
        while streams.try_join_next().is_some() {}
        let (shared, service) = (Arc::clone(&shared), Arc::clone(&service));
        streams.spawn(async move {
            let mut stream = Stream { service, send, recv };
            if let Err(error) = shared.serve(&mut stream).await {
                tracing::debug!(%error, "operation ended early");
                stream.refuse();
            }
        });
    }
}

/// Who answers on this connection; nothing when its caller is not served.
fn admit(connection: &Connection, service: &Arc<dyn BlockService>) -> Option<Arc<dyn BlockService>> {
    // A handshake without one does not end; if one did, its caller would be nobody.
    let chain = connection.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    let caller = Caller::Certified(chain.first()?.as_ref().into());
    match service.admit(&caller) {
        Admission::Same => Some(Arc::clone(service)),
        Admission::Scoped { service, .. } => Some(service),
        Admission::Refused => None,
    }
}

/// Both halves of one operation's stream, and who answers.
struct Stream {
    service: Arc<dyn BlockService>,
    send: SendStream,
    recv: RecvStream,
}

impl Stream {
    fn refuse(&mut self) {
        let _ = self.send.reset(CODE_REFUSED);
        let _ = self.recv.stop(CODE_REFUSED);
    }
}

/// Why an operation ended before its end. Only ever logged: the peer sees its stream reset.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("peer sent {0}")]
    Item(#[from] ItemError),
    #[error("peer asked something that makes no sense: {0}")]
    Request(#[from] kvfleet_proto::convert::ConvertError),
    #[error("cannot answer: {0}")]
    Write(#[from] quinn::WriteError),
    #[error("cannot answer: {0}")]
    Encode(#[from] PathError),
    #[error("peer went quiet")]
    Stalled(#[from] tokio::time::error::Elapsed),
    #[error("peer gave up")]
    GaveUp,
    #[error("save ended after {got} of {wanted} frames")]
    SaveCut { got: usize, wanted: usize },
}

impl Shared {
    fn new(service: Arc<dyn BlockService>, config: &QuicConfig, times: Times) -> Shared {
        Shared {
            service,
            saves: Semaphore::new(SAVES_AT_ONCE_MAX),
            fetches: InFlight::new(config.fetch_bytes_in_flight_max),
            arriving: InFlight::new(config.save_bytes_in_flight_max),
            largest_frame: AtomicU64::new(FRAME_BYTES_GUESS),
            stall_timeout: config.stall_timeout,
            times,
        }
    }

    async fn serve(&self, stream: &mut Stream) -> Result<(), ServeError> {
        let request: data::DataRequest = self.timed(read_message(&mut stream.recv)).await??;
        let span = tracing::debug_span!("serve_blocks");
        trace_context::set_parent(&span, &request.traceparent);
        let operation = wire::operation_from_pb(request)?;
        self.run(operation, stream).instrument(span).await?;
        let _ = stream.send.finish();
        Ok(())
    }

    async fn run(&self, operation: Operation, stream: &mut Stream) -> Result<(), ServeError> {
        match operation {
            Operation::Fetch(request) => {
                let limit = request.deadline.saturating_add(self.times.grace).min(self.times.fetch_max);
                tokio::time::timeout(limit, self.fetch(request, stream)).await?
            }
            Operation::Save(request) => {
                tokio::time::timeout(self.times.save_max, self.save(request, stream)).await?
            }
            Operation::Release(lease) => {
                self.timed(stream.service.release(lease)).await?;
                self.answer(stream, &pong()).await
            }
            Operation::Ping => self.answer(stream, &pong()).await,
        }
    }

    async fn answer<M: prost::Message>(&self, stream: &mut Stream, message: &M) -> Result<(), ServeError> {
        Ok(self.timed(write_message(&mut stream.send, encode(message)?)).await??)
    }

    async fn fetch(&self, request: FetchRequest, stream: &mut Stream) -> Result<(), ServeError> {
        let frame_bytes = self.largest_frame.load(Ordering::Relaxed);
        let bytes = frame_bytes.saturating_mul(request.hashes.len() as u64);
        let Some(_reserved) = self.fetches.reserve(bytes) else {
            let busy = FetchAnswer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::head_to_pb(&busy, request.epoch)).await;
        };
        let mut reply = stream.service.fetch(request).await;
        self.answer(stream, &wire::head_to_pb(&reply.answer, reply.epoch)).await?;
        let mut stopped = std::pin::pin!(stream.send.stopped());
        for _ in reply.answer.tiers() {
            // A reader that gave up must not keep its reservation while a slow medium works for it.
            let frame = tokio::select! {
                frame = reply.frames.next() => frame,
                _ = &mut stopped => None,
            };
            let Some(frame) = frame else {
                if let Some(reason) = reply.frames.ended() {
                    self.timed(write_end(&mut stream.send, reason)).await??;
                }
                break;
            };
            self.largest_frame.fetch_max(frame.bytes.len() as u64, Ordering::Relaxed);
            self.timed(write_frame(&mut stream.send, &frame)).await??;
        }
        Ok(())
    }

    async fn save(&self, request: SaveRequest, stream: &mut Stream) -> Result<(), ServeError> {
        let permit = self.saves.try_acquire().ok();
        let bytes = save_bytes_in_flight(request.hashes.len(), request.frame_bytes);
        let Some((_permit, mut room)) = permit.zip(self.arriving.reserve(bytes)) else {
            let busy = SaveOffer::Busy { retry_after: RETRY_AFTER };
            return self.answer(stream, &wire::offer_to_pb(&busy)).await;
        };
        let frame_bytes = request.frame_bytes;
        let limit = usize::try_from(frame_bytes).unwrap_or(usize::MAX).min(FRAME_BYTES_MAX);
        let (offer, session) = stream.service.save(request).await;
        self.answer(stream, &wire::offer_to_pb(&offer)).await?;
        let (SaveOffer::Wanted(wanted), Some(session)) = (offer, session) else { return Ok(()) };
        let wanted = wanted.iter().filter(|wanted| **wanted).count();
        room.shrink(if wanted == 0 { 0 } else { save_bytes_in_flight(wanted, frame_bytes) });
        let stopped = stream.send.stopped();
        let session = tokio::select! {
            session = self.take(stream, session, wanted, limit) => session?,
            _ = stopped => return Err(ServeError::GaveUp),
        };
        let done = session.finish().await;
        self.answer(stream, &wire::done_to_pb(&done)).await
    }

    /// Takes the frames of a save up to its end. Dropped midway, it drops the session, which gives back
    /// what did not come; whether blocks that were put already stay is the service's to say.
    async fn take(
        &self,
        stream: &mut Stream,
        mut session: Box<dyn SaveSession>,
        wanted: usize,
        limit: usize,
    ) -> Result<Box<dyn SaveSession>, ServeError> {
        for got in 0..wanted {
            match self.timed(read_frame(&mut stream.recv, limit)).await?? {
                Next::Frame(frame) => session.put(frame).await,
                Next::End(_) => return Err(ServeError::SaveCut { got, wanted }),
            }
        }
        self.expect_end(stream).await?;
        Ok(session)
    }

    /// A save is answered only when the peer says that it is complete.
    async fn expect_end(&self, stream: &mut Stream) -> Result<(), ServeError> {
        match self.timed(stream.recv.read_chunk(1, true)).await?.map_err(ItemError::from)? {
            None => Ok(()),
            Some(_) => Err(ItemError::Oversized { what: "bytes after a save", bytes: 1, limit: 0 }.into()),
        }
    }

    async fn timed<T>(&self, work: impl Future<Output = T>) -> Result<T, tokio::time::error::Elapsed> {
        tokio::time::timeout(self.stall_timeout, work).await
    }
}

/// Bytes under way in one direction, and how many may be.
struct InFlight {
    bytes: AtomicU64,
    bytes_max: u64,
}

impl InFlight {
    fn new(bytes_max: u64) -> InFlight {
        InFlight { bytes: AtomicU64::new(0), bytes_max }
    }

    /// Room for `bytes` more; nothing when too much is under way. What is larger than the limit passes when it is
    /// alone, or it could never be served.
    fn reserve(&self, bytes: u64) -> Option<Reserved<'_>> {
        let fits = |under_way: u64| {
            let after = under_way.saturating_add(bytes);
            (under_way == 0 || after <= self.bytes_max).then_some(after)
        };
        let before = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Reserved { under_way: &self.bytes, bytes: before.saturating_add(bytes) - before })
    }
}

/// Bytes counted as under way until dropped.
struct Reserved<'a> {
    under_way: &'a AtomicU64,
    bytes: u64,
}

impl Reserved<'_> {
    /// Gives back what is more than `bytes`.
    fn shrink(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.under_way.fetch_sub(less, Ordering::Relaxed);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.under_way.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

fn pong() -> data::Pong {
    data::Pong { version: wire::PROTOCOL_VERSION }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
