//! Connections of callers to a server of control calls: TLS that shows what is to be shown now, and that knows every
//! caller's certificate from its own handshake.
//!
//! tonic's own listener keeps the certificate that it began with, and resumes sessions: whose certificate ran out would go
//! on opening connections. Not here: what a caller may call (`callers.rs`).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::codegen::tokio_stream::Stream;

use super::Identity;

/// Handshakes under way at once. Whoever comes above it waits in the kernel's queue.
const HANDSHAKES_MAX: usize = 1024;

/// Longest a handshake may take, so that who connects and says nothing goes.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Pause after a connection could not be taken, for want of descriptors, say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A connection whose caller showed a certificate of the cluster.
pub type Called = TlsStream<TcpStream>;

/// Takes connections on this listener until dropped, which ends handshakes too: for `serve_with_incoming` of a tonic server
/// without TLS of its own. It never ends by itself, and gives no error: what is wrong with a connection is its caller's.
pub fn incoming(
    listener: TcpListener,
    identity: &Identity,
) -> impl Stream<Item = io::Result<Called>> + Send + Unpin + use<> {
    let acceptor = TlsAcceptor::from(Arc::new(identity.grpc_server()));
    let incoming = Incoming { listener, acceptor, handshakes: JoinSet::new() };
    Box::pin(futures_util::stream::unfold(incoming, |mut incoming| async {
        let called = incoming.next().await;
        Some((Ok(called), incoming))
    }))
}

struct Incoming {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    handshakes: JoinSet<Option<Called>>,
}

impl Incoming {
    async fn next(&mut self) -> Called {
        loop {
            tokio::select! {
                accepted = self.listener.accept(), if self.handshakes.len() < HANDSHAKES_MAX => match accepted {
                    Ok((socket, _)) => {
                        self.handshakes.spawn(shake_hands(self.acceptor.clone(), socket));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "no connection for control calls could be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(ended) = self.handshakes.join_next() => {
                    if let Ok(Some(called)) = ended {
                        return called;
                    }
                }
            }
        }
    }
}

async fn shake_hands(acceptor: TlsAcceptor, socket: TcpStream) -> Option<Called> {
    let _ = socket.set_nodelay(true); // without it answers come later, and no less right
    match timeout(HANDSHAKE_MAX, acceptor.accept(socket)).await {
        Ok(Ok(called)) => Some(called),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a handshake for control calls failed");
            None
        }
        Err(_) => {
            tracing::debug!("a handshake for control calls took too long");
            None
        }
    }
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
