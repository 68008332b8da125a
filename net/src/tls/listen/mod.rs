//! Accepts connections with TLS and the current certificate: of control calls, with the caller's
//! certificate known from the connection's own handshake, and of strangers to an HTTPS port.
//!
//! tonic's own listener keeps its first certificate and resumes sessions, so a caller could keep
//! connecting after its certificate expired. Not here: authorisation of calls (`access/`).

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::codegen::tokio_stream::Stream;

use self::connections::{CallerLimits, ConnectionCounts};
use super::{ClientVerifier, EndingStream, Identity, ServerCertificate, role_of};
use crate::accept_limits::{AcceptWarnings, connection_limit};

mod connections;

/// Limits on callers that have not authenticated yet.
#[derive(Clone, Copy, Debug)]
struct HandshakeLimits {
    /// Concurrent handshakes, at least one. A further connection replaces an evictable handshake
    /// ([`Handshakes::evict_one`]), or waits for one.
    handshakes_max: usize,
    /// Timeout of a handshake.
    handshake_max: Duration,
    /// How long a handshake that received data is protected from eviction. It needs some round
    /// trips and a signature, also when every client reconnects at once. One without data is
    /// protected for a [`SILENT_GRACE_DIVISOR`]th: its data may be here and not read yet.
    grace_period: Duration,
}

impl Default for HandshakeLimits {
    fn default() -> Self {
        HandshakeLimits {
            handshakes_max: connection_limit(HANDSHAKES_MAX, OPEN_FILES_SHARE),
            handshake_max: Duration::from_secs(5),
            grace_period: Duration::from_secs(1),
        }
    }
}

/// Concurrent handshakes, unless the open-file limit is low.
const HANDSHAKES_MAX: usize = 1024;

/// Unauthenticated callers get one of this many parts of the open-file limit.
const OPEN_FILES_SHARE: usize = 4;

/// See [`HandshakeLimits::grace_period`].
const SILENT_GRACE_DIVISOR: u32 = 10;

/// Pause after a failed accept, mostly for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Age at which a server of control calls asks a client to open a new connection. Calls on the old
/// one end by themselves, or after [`CONNECTION_AGE_GRACE`].
pub const CONNECTION_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How long calls on an old connection may go on.
pub const CONNECTION_AGE_GRACE: Duration = Duration::from_secs(60);

/// A connection after its handshake. It ends with the certificate of its caller, if that has one.
pub type CallerStream = EndingStream<TlsStream<TcpStream>>;

/// Accepts connections on this listener until dropped, which also ends the handshakes. For
/// `serve_with_incoming` of a tonic server without TLS of its own. The stream never ends and yields
/// no error: a failed connection concerns its caller only.
pub fn incoming(
    listener: TcpListener,
    identity: &Identity,
) -> impl Stream<Item = io::Result<CallerStream>> + Send + Unpin + use<> {
    incoming_with_limits(listener, identity, HandshakeLimits::default(), CallerLimits::default())
}

/// Like [`incoming`], for callers outside the cluster. With `clients`, each needs a certificate that
/// it accepts; without, calls are open to strangers.
pub fn incoming_from_outsiders(
    listener: TcpListener,
    identity: &Identity,
    clients: Option<ClientVerifier>,
) -> impl Stream<Item = io::Result<CallerStream>> + Send + Unpin + use<> {
    accept_stream(listener, identity.grpc_server_for_outsiders(clients), None, HandshakeLimits::default())
}

/// Like [`incoming`], for the HTTP/1 clients of a server with a certificate of its own.
pub fn incoming_from_strangers(
    listener: TcpListener,
    certificate: &ServerCertificate,
) -> impl Stream<Item = io::Result<CallerStream>> + Send + Unpin + use<> {
    accept_stream(listener, certificate.http_server(), None, HandshakeLimits::default())
}

fn incoming_with_limits(
    listener: TcpListener,
    identity: &Identity,
    bounds: HandshakeLimits,
    connections: CallerLimits,
) -> impl Stream<Item = io::Result<CallerStream>> + Send + Unpin + use<> {
    let counted = Some((identity.clone(), ConnectionCounts::new(connections)));
    accept_stream(listener, identity.grpc_server(), counted, bounds)
}

/// Accepts connections. With an identity, they are counted by caller, and each ends with its caller's
/// certificate.
fn accept_stream(
    listener: TcpListener,
    config: ServerConfig,
    counted: Option<(Identity, ConnectionCounts)>,
    bounds: HandshakeLimits,
) -> impl Stream<Item = io::Result<CallerStream>> + Send + Unpin + use<> {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let handshakes = Handshakes { bounds, next_number: 0, running: JoinSet::new(), by_age: BTreeMap::new() };
    let incoming = CallerAcceptor {
        listener,
        acceptor,
        counted,
        handshakes,
        accept_warnings: AcceptWarnings::default(),
        caller_warnings: AcceptWarnings::default(),
    };
    Box::pin(futures_util::stream::unfold(incoming, |mut incoming| async {
        let called = incoming.next().await;
        Some((Ok(called), incoming))
    }))
}

struct CallerAcceptor {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    /// `None` for callers without certificates.
    counted: Option<(Identity, ConnectionCounts)>,
    handshakes: Handshakes,
    accept_warnings: AcceptWarnings,
    caller_warnings: AcceptWarnings,
}

impl CallerAcceptor {
    async fn next(&mut self) -> CallerStream {
        loop {
            let next_slot = self.handshakes.next_slot_at();
            tokio::select! {
                // A finished handshake frees its slot first, so that no other is evicted
                // needlessly.
                biased;
                Some(ended) = self.handshakes.join_next() => {
                    if let Some(called) = ended.and_then(|called| self.admit(called)) {
                        return called;
                    }
                }
                // Until then the kernel queues new connections.
                () = sleep_until(next_slot.unwrap_or_else(Instant::now)), if next_slot.is_some() => {}
                accepted = self.listener.accept(), if next_slot.is_none() => match accepted {
                    Ok((socket, _)) => self.handshakes.start(self.acceptor.clone(), socket),
                    Err(error) => self.accept_failed(&error).await,
                },
            }
        }
    }

    /// The connection, until its caller's certificate ends. `None` if the caller has too many.
    fn admit(&mut self, called: TlsStream<TcpStream>) -> Option<CallerStream> {
        let Some((identity, connections)) = self.counted.clone() else {
            return Some(EndingStream::new(called, pending()));
        };
        let chain = called.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
        // Calls with other names are refused one by one, with the reason.
        let role = chain.first().and_then(|leaf| role_of(leaf).ok());
        let Some(slot) = connections.open(role.as_ref()) else {
            if self.caller_warnings.should_warn() {
                let caller =
                    role.map_or_else(|| "a caller without a role".to_owned(), |role| role.to_string());
                tracing::warn!(
                    caller,
                    "a connection for control calls was closed: this caller or all together \
                    have as many as the limit of open files allows"
                );
            }
            return None;
        };
        let end = async move {
            let _slot = slot;
            identity.client_end(chain).await
        };
        Some(EndingStream::new(called, end))
    }

    /// Handles a failed accept, mostly for want of descriptors.
    async fn accept_failed(&mut self, error: &io::Error) {
        if self.accept_warnings.should_warn() {
            tracing::warn!(%error, "cannot accept connections with TLS; raise the limit of open \
                files if there are too many");
        }
        self.handshakes.evict_half();
        sleep(ACCEPT_PAUSE).await;
    }
}

/// Handshakes in progress.
struct Handshakes {
    bounds: HandshakeLimits,
    /// Number of the next handshake.
    next_number: u64,
    running: JoinSet<(u64, Option<TlsStream<TcpStream>>)>,
    /// Handshakes that count against the limit, by number.
    by_age: BTreeMap<u64, Handshake>,
}

struct Handshake {
    task: AbortHandle,
    since: Instant,
    /// Whether the caller has sent anything.
    has_received: Arc<AtomicBool>,
}

impl Handshake {
    /// When it may first be evicted for another connection.
    fn evictable_at(&self, bounds: &HandshakeLimits) -> Instant {
        let has_received = self.has_received.load(Ordering::Relaxed);
        self.since
            + if has_received { bounds.grace_period } else { bounds.grace_period / SILENT_GRACE_DIVISOR }
    }
}

impl Handshakes {
    /// When a slot becomes free; `None` if one is free now.
    fn next_slot_at(&self) -> Option<Instant> {
        if self.by_age.len() < self.bounds.handshakes_max.max(1) {
            return None;
        }
        let soonest = self.by_age.values().map(|handshake| handshake.evictable_at(&self.bounds)).min();
        soonest.filter(|soonest| *soonest > Instant::now())
    }

    /// Starts a handshake, evicting others if no slot is free.
    fn start(&mut self, acceptor: TlsAcceptor, socket: TcpStream) {
        while self.by_age.len() >= self.bounds.handshakes_max.max(1) && self.evict_one() {}
        let (number, longest) = (self.next_number, self.bounds.handshake_max);
        self.next_number += 1;
        let has_received = Arc::<AtomicBool>::default();
        let spoken = Arc::clone(&has_received);
        let shaking = async move { (number, shake_hands(acceptor, socket, longest, &spoken).await) };
        let task = self.running.spawn(shaking);
        self.by_age.insert(number, Handshake { task, since: Instant::now(), has_received });
    }

    /// Evicts the oldest evictable handshake without data, or else the oldest evictable one.
    /// `false` if there is none.
    fn evict_one(&mut self) -> bool {
        let now = Instant::now();
        let yields = |handshake: &Handshake| handshake.evictable_at(&self.bounds) <= now;
        let silent =
            |handshake: &Handshake| !handshake.has_received.load(Ordering::Relaxed) && yields(handshake);
        let oldest = |may: &dyn Fn(&Handshake) -> bool| {
            self.by_age.iter().find(|(_, handshake)| may(handshake)).map(|(number, _)| *number)
        };
        let Some(number) = oldest(&silent).or_else(|| oldest(&yields)) else { return false };
        if let Some(ended) = self.by_age.remove(&number) {
            ended.task.abort();
            tracing::debug!("a TLS handshake was evicted for a newer one");
        }
        true
    }

    /// Evicts half of the evictable handshakes to free descriptors.
    fn evict_half(&mut self) {
        let now = Instant::now();
        let yield_now = |handshake: &&Handshake| handshake.evictable_at(&self.bounds) <= now;
        let some = self.by_age.values().filter(yield_now).count();
        for _ in 0..some.div_ceil(2) {
            self.evict_one();
        }
    }

    /// The next handshake to end, with its connection if it succeeded. `None` if none is in
    /// progress.
    async fn join_next(&mut self) -> Option<Option<TlsStream<TcpStream>>> {
        // An evicted handshake is no longer listed here.
        let Ok((number, called)) = self.running.join_next().await? else { return Some(None) };
        self.by_age.remove(&number);
        Some(called)
    }
}

async fn shake_hands(
    acceptor: TlsAcceptor,
    socket: TcpStream,
    longest: Duration,
    has_received: &AtomicBool,
) -> Option<TlsStream<TcpStream>> {
    let _ = socket.set_nodelay(true); // on failure answers are only slower
    let shaking = async {
        socket.peek(&mut [0]).await?;
        has_received.store(true, Ordering::Relaxed);
        acceptor.accept(socket).await
    };
    match timeout(longest, shaking).await {
        Ok(Ok(called)) => Some(called),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("a TLS handshake took too long");
            None
        }
    }
}

#[cfg(test)]
mod tests;
