//! HTTP/1 server for every HTTP port, plain or with TLS: bounds the number of connections, shuts them
//! down gracefully, and closes those that stall.
//!
//! Not here: the answers (`gateway/src/openai/routes.rs`, `cli/src/process/metrics.rs`), and the
//! limits of gRPC and of the block path (`accept_limits.rs`).

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use futures_util::{Stream, StreamExt};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::tls::ServerCertificate;
use crate::tls::listen::{CallerStream, incoming_from_strangers};

/// Connections to a port with small answers: far more than monitoring needs, far fewer than a process
/// has descriptors.
const SMALL_ANSWER_CONNECTIONS: usize = 64;

/// Time for a request to such a port, and to read its answer.
const SMALL_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay after a failed accept, for example when the process has no file descriptors left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Limits on connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Open connections.
    pub connections: usize,
    /// What happens to a connection above that number.
    pub when_full: WhenFull,
    /// Longest time for the head of a request, and longest idle time of a connection.
    pub head_timeout: Duration,
    /// Longest time without a client reading any of its answer.
    pub write_stall_timeout: Duration,
}

/// What happens to a connection when as many as allowed are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits in the kernel's backlog. For ports with long requests.
    Wait,
    /// It takes the place of the oldest one. For ports with requests of milliseconds, where an
    /// old connection is an idle one, and where a health check must not wait behind it.
    CloseOldest,
}

impl ConnectionLimits {
    /// Limits for a port that answers at once and with little, such as metrics and health.
    #[must_use]
    pub fn for_small_answers() -> ConnectionLimits {
        ConnectionLimits {
            connections: SMALL_ANSWER_CONNECTIONS,
            when_full: WhenFull::CloseOldest,
            head_timeout: SMALL_ANSWER_TIMEOUT,
            write_stall_timeout: SMALL_ANSWER_TIMEOUT,
        }
    }
}

/// Signals to a running server.
#[derive(Clone, Debug, Default)]
pub struct ServerControl {
    /// Stop accepting; open connections finish their current request.
    pub close: CancellationToken,
    /// Close everything at once.
    pub abort: CancellationToken,
    /// Open connections.
    pub tasks: TaskTracker,
}

/// A source of connections that are ready for HTTP.
trait ConnectionSource: Send {
    type Connection: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next connection. Dropping the future loses none.
    fn next(&mut self) -> impl Future<Output = io::Result<Self::Connection>> + Send;
}

impl ConnectionSource for TcpListener {
    type Connection = TcpStream;

    async fn next(&mut self) -> io::Result<TcpStream> {
        let (stream, _) = self.accept().await?;
        // Chunks of an answer are sent one by one, without Nagle's delay.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

/// Connections after their TLS handshake.
struct TlsConnections<S>(S);

impl<S: Stream<Item = io::Result<CallerStream>> + Send + Unpin> ConnectionSource for TlsConnections<S> {
    type Connection = CallerStream;

    async fn next(&mut self) -> io::Result<CallerStream> {
        let next = self.0.next().await;
        next.unwrap_or_else(|| Err(io::ErrorKind::NotConnected.into()))
    }
}

/// Accepts connections until `close` is signalled. Errors of single connections are logged.
pub async fn serve(listener: TcpListener, router: Router, limits: ConnectionLimits, orders: ServerControl) {
    serve_from(listener, router, limits, orders).await;
}

/// Like [`serve`], with TLS. Handshakes have limits of their own (`tls/listen/`), and count as
/// connections when they have ended.
pub async fn serve_tls(
    listener: TcpListener,
    certificate: &ServerCertificate,
    router: Router,
    limits: ConnectionLimits,
    orders: ServerControl,
) {
    let incoming = TlsConnections(incoming_from_strangers(listener, certificate));
    serve_from(incoming, router, limits, orders).await;
}

async fn serve_from(
    mut source: impl ConnectionSource,
    router: Router,
    limits: ConnectionLimits,
    orders: ServerControl,
) {
    let permits = Arc::new(Semaphore::new(limits.connections.clamp(1, Semaphore::MAX_PERMITS)));
    let mut open = OpenConnections::default();
    loop {
        let waited = match limits.when_full {
            WhenFull::CloseOldest => None,
            WhenFull::Wait => tokio::select! {
                place = permits.clone().acquire_owned() => Some(place),
                () = orders.close.cancelled() => return,
            },
        };
        let accepted = tokio::select! {
            accepted = source.next() => accepted,
            () = orders.close.cancelled() => return,
        };
        let permit = match waited {
            Some(permit) => permit,
            None => {
                if permits.available_permits() == 0 {
                    open.close_oldest();
                }
                permits.clone().acquire_owned().await
            }
        };
        match accepted {
            Ok(stream) => {
                let (router, task_control) = (router.clone(), orders.clone());
                let replaced = match limits.when_full {
                    WhenFull::Wait => CancellationToken::new(),
                    WhenFull::CloseOldest => open.add(limits.connections),
                };
                orders.tasks.spawn(async move {
                    let _place = permit;
                    tokio::select! {
                        () = serve_connection(stream, router, limits, &task_control.close) => {}
                        () = task_control.abort.cancelled() => {}
                        () = replaced.cancelled() => {}
                    }
                    replaced.cancel();
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting an HTTP connection failed");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Connections, oldest first, each with the signal that closes it.
#[derive(Debug, Default)]
struct OpenConnections(VecDeque<CancellationToken>);

impl OpenConnections {
    fn add(&mut self, connections_max: usize) -> CancellationToken {
        // Those that ended by themselves; between them may be some that are open.
        if self.0.len() > 2 * connections_max {
            self.0.retain(|closing| !closing.is_cancelled());
        }
        let closing = CancellationToken::new();
        self.0.push_back(closing.clone());
        closing
    }

    fn close_oldest(&mut self) {
        while let Some(oldest) = self.0.pop_front() {
            if !oldest.is_cancelled() {
                return oldest.cancel();
            }
        }
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    limits: ConnectionLimits,
    close: &CancellationToken,
) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.head_timeout);
    let serving = builder.serve_connection(
        TokioIo::new(StallGuardedStream::new(stream, limits.write_stall_timeout)),
        TowerToHyperService::new(router),
    );
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = close.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "an HTTP connection ended early");
    }
}

/// A connection that fails its writes if the client stops reading for too long. Without this limit,
/// a client that never reads would keep an engine busy forever.
#[derive(Debug)]
struct StallGuardedStream<S> {
    stream: S,
    limit: Duration,
    /// Set while a write is blocked.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> StallGuardedStream<S> {
    fn new(stream: S, limit: Duration) -> StallGuardedStream<S> {
        StallGuardedStream { stream, limit, timer: None }
    }

    /// Passes on the result of a write, or fails with a timeout if writes were blocked for too
    /// long.
    fn check_stall<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let limit = self.limit;
        let timer =
            self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the client did not read its answer for {} ms", limit.as_millis()),
            ))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuardedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuardedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_stall(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.check_stall(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn server(limits: ConnectionLimits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| std::future::ready("yes")));
        tokio::spawn(serve(listener, router, limits, ServerControl::default()));
        address
    }

    async fn ask(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn idle_connections_give_way_to_a_new_one() {
        let limits = ConnectionLimits { connections: 3, ..ConnectionLimits::for_small_answers() };
        let address = server(limits).await;
        let mut idle = Vec::new();
        for _ in 0..40 {
            idle.push(TcpStream::connect(address).await.unwrap());
            assert!(ask(address).await.ends_with("yes"));
        }
        // All but the newest were closed; half a request does not keep a connection either.
        for stream in &mut idle[..37] {
            assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0);
        }
        for _ in 0..3 {
            let mut half = TcpStream::connect(address).await.unwrap();
            half.write_all(b"GET / HTTP/1.1\r\nhost:").await.unwrap();
            idle.push(half);
        }
        assert!(ask(address).await.ends_with("yes"));
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_request_is_closed_in_time() {
        let address = server(ConnectionLimits::for_small_answers()).await;
        let mut half = TcpStream::connect(address).await.unwrap();
        half.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
        let begun = Instant::now();
        let mut rest = Vec::new();
        half.read_to_end(&mut rest).await.unwrap();
        assert!(begun.elapsed() <= 2 * SMALL_ANSWER_TIMEOUT, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn connections_wait_where_requests_take_long() {
        let limits = ConnectionLimits {
            connections: 1,
            when_full: WhenFull::Wait,
            ..ConnectionLimits::for_small_answers()
        };
        let address = server(limits).await;
        let first = TcpStream::connect(address).await.unwrap();
        let second = tokio::spawn(ask(address));
        drop(first);
        assert!(second.await.unwrap().ends_with("yes"));
    }
}
