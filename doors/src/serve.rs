//! Connections of callers of a door that speaks HTTP/1: taken up to a number, ended in good order, and ended when the caller does not say or hear what is next.
//!
//! Not here: what is answered (`openai/routes.rs`, `endpoints/calls/answer.rs`).

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

/// After a connection could not be taken, because the process has no more files, say.
const AFTER_ERROR: Duration = Duration::from_millis(50);

/// What callers may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections; more wait.
    pub(crate) connections: usize,
    /// How long the head of a request may take, and a connection stay idle.
    pub(crate) head: Duration,
    /// How long a caller may take nothing of an answer.
    pub(crate) unread: Duration,
}

/// What a server obeys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    /// No more connections; those that are there end with what they have.
    pub(crate) close: CancellationToken,
    /// All ends at once.
    pub(crate) abort: CancellationToken,
    /// Connections that are there.
    pub(crate) tasks: TaskTracker,
}

/// Takes connections until told to close.
pub(crate) async fn serve(listener: TcpListener, router: Router, limits: Limits, orders: Orders) {
    let places = Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS)));
    loop {
        let place = tokio::select! {
            place = places.clone().acquire_owned() => place,
            () = orders.close.cancelled() => return,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = orders.close.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let (router, own) = (router.clone(), orders.clone());
                orders.tasks.spawn(async move {
                    let _place = place;
                    tokio::select! {
                        () = connection(stream, router, limits, &own.close) => {}
                        () = own.abort.cancelled() => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to a door cannot be taken");
                tokio::time::sleep(AFTER_ERROR).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, router: Router, limits: Limits, close: &CancellationToken) {
    // Pieces of an answer go out one by one.
    let _ = stream.set_nodelay(true);
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.head);
    let serving = builder
        .serve_connection(TokioIo::new(Heard::new(stream, limits.unread)), TowerToHyperService::new(router));
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = close.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection to a door ended early");
    }
}

/// A connection that fails when its other end takes nothing for too long: otherwise who asks and never reads keeps an engine busy without end.
#[derive(Debug)]
struct Heard {
    stream: TcpStream,
    limit: Duration,
    /// There while something waits to be taken.
    timer: Option<Pin<Box<Sleep>>>,
}

impl Heard {
    fn new(stream: TcpStream, limit: Duration) -> Heard {
        Heard { stream, limit, timer: None }
    }

    /// What a write came to, unless nothing could be written for too long.
    fn in_time<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
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
                format!("the caller took nothing of its answer for {} ms", limit.as_millis()),
            ))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Heard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.in_time(context, written)
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
