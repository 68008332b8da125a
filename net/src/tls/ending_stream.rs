//! A connection that ends with the validity of its peer's certificate.
//!
//! Not here: the validity (`authority.rs`).

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// A stream that fails once its end has come.
pub struct EndingStream<S> {
    inner: S,
    /// Yields why the stream ends; `None` after it did.
    end: Option<BoxFuture<'static, rustls::Error>>,
}

impl<S: fmt::Debug> fmt::Debug for EndingStream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndingStream").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S> EndingStream<S> {
    /// `inner`, until `end` yields the reason.
    pub(crate) fn new(
        inner: S,
        end: impl Future<Output = rustls::Error> + Send + 'static,
    ) -> EndingStream<S> {
        EndingStream { inner, end: Some(Box::pin(end)) }
    }

    /// The stream itself.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Fails after the end. Before it, wakes the task of `context` at the end.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let ended = || io::Error::other("the certificate of the peer is no longer valid");
        let Poll::Ready(error) = self.end.as_mut().ok_or_else(ended)?.as_mut().poll(context) else {
            return Ok(());
        };
        self.end = None;
        tracing::debug!(%error, "a connection ends with the certificate of its peer");
        Err(ended())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for EndingStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

/// Writes go on: a server reads as long as a connection is open, and so notices its end.
impl<S: AsyncWrite + Unpin> AsyncWrite for EndingStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl<S: Connected> Connected for EndingStream<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> S::ConnectInfo {
        self.inner.connect_info()
    }
}
