//! HTTP/1 listener: bounds the number of connections, shuts them down gracefully, and closes those
//! that stall.
//!
//! Not here: the answers (`openai/routes.rs`, `endpoints/calls/answer.rs`).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Delay after a failed accept, for example when the process has no file descriptors left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Limits on connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// Open connections; more wait in the kernel's backlog.
    pub(crate) connections: usize,
    /// Longest time for the head of a request, and longest idle time of a connection.
    pub(crate) head_timeout: Duration,
    /// Longest time without a client reading any of its answer.
    pub(crate) write_stall_timeout: Duration,
}

/// Signals to a running server.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerControl {
    /// Stop accepting; open connections finish their current request.
    pub(crate) close: CancellationToken,
    /// Close everything at once.
    pub(crate) abort: CancellationToken,
    /// Open connections.
    pub(crate) tasks: TaskTracker,
}

/// Accepts connections until `close` is signalled.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    orders: ServerControl,
) {
    let permits = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    loop {
        let permit = tokio::select! {
            place = permits.clone().acquire_owned() => place,
            () = orders.close.cancelled() => return,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = orders.close.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let (router, task_control) = (router.clone(), orders.clone());
                orders.tasks.spawn(async move {
                    let _place = permit;
                    tokio::select! {
                        () = serve_connection(stream, router, limits, &task_control.close) => {}
                        () = task_control.abort.cancelled() => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection to the gateway failed");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    router: Router,
    limits: ConnectionLimits,
    close: &CancellationToken,
) {
    // Chunks of an answer are sent one by one, without Nagle's delay.
    let _ = stream.set_nodelay(true);
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
        tracing::debug!(%error, "a connection to the gateway ended early");
    }
}

/// A connection that fails its writes if the client stops reading for too long. Without this limit,
/// a client that never reads would keep an engine busy forever.
#[derive(Debug)]
struct StallGuardedStream {
    stream: TcpStream,
    limit: Duration,
    /// Set while a write is blocked.
    timer: Option<Pin<Box<Sleep>>>,
}

impl StallGuardedStream {
    fn new(stream: TcpStream, limit: Duration) -> StallGuardedStream {
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

impl AsyncRead for StallGuardedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for StallGuardedStream {
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
