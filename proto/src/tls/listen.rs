//! Connections of callers to a server of control calls: TLS that shows what is to be shown now, and that knows every
//! caller's certificate from its own handshake.
//!
//! tonic's own listener keeps the certificate that it began with, and resumes sessions: whose certificate ran out would go
//! on opening connections. Not here: what a caller may call (`callers.rs`).

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::codegen::tokio_stream::Stream;

use super::Identity;

/// Bounds of what callers cost before they have said who they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Handshakes under way at once, one at least. Whoever comes above that has the place of the oldest, which is ended: those who say
    /// nothing are to be in nobody's way.
    pub(super) handshakes_max: usize,
    /// Longest a handshake may take, so that who connects and says nothing goes.
    pub(super) handshake_max: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds { handshakes_max: 1024, handshake_max: Duration::from_secs(5) }
    }
}

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
    incoming_within(listener, identity, Bounds::default())
}

pub(super) fn incoming_within(
    listener: TcpListener,
    identity: &Identity,
    bounds: Bounds,
) -> impl Stream<Item = io::Result<Called>> + Send + Unpin + use<> {
    let acceptor = TlsAcceptor::from(Arc::new(identity.grpc_server()));
    let handshakes = Handshakes { bounds, begun: 0, running: JoinSet::new(), by_age: BTreeMap::new() };
    let incoming = Incoming { listener, acceptor, handshakes, is_said: false };
    Box::pin(futures_util::stream::unfold(incoming, |mut incoming| async {
        let called = incoming.next().await;
        Some((Ok(called), incoming))
    }))
}

struct Incoming {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    handshakes: Handshakes,
    /// Whether it was said that nothing can be accepted, since something was.
    is_said: bool,
}

impl Incoming {
    async fn next(&mut self) -> Called {
        loop {
            tokio::select! {
                // Who has ended makes room first, so that nobody is ended for want of it who need not be.
                biased;
                Some(ended) = self.handshakes.ended() => {
                    if let Some(called) = ended {
                        return called;
                    }
                }
                accepted = self.listener.accept() => match accepted {
                    Ok((socket, _)) => {
                        self.is_said = false;
                        self.handshakes.begin(self.acceptor.clone(), socket);
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut self.is_said, true) {
                            tracing::warn!(%error, "no connection for control calls could be accepted; raise the limit of open files if there are too many");
                        }
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }
}

/// Handshakes under way.
struct Handshakes {
    bounds: Bounds,
    /// How many were begun so far: the number of the next.
    begun: u64,
    running: JoinSet<(u64, Option<Called>)>,
    /// Those that may be under way, by number.
    by_age: BTreeMap<u64, AbortHandle>,
}

impl Handshakes {
    /// Begins one, in the place of the oldest if there is no other.
    fn begin(&mut self, acceptor: TlsAcceptor, socket: TcpStream) {
        while self.by_age.len() >= self.bounds.handshakes_max.max(1) {
            let Some((_, oldest)) = self.by_age.pop_first() else { break };
            oldest.abort();
            tracing::debug!("a handshake for control calls made way for a newer one");
        }
        let (number, longest) = (self.begun, self.bounds.handshake_max);
        self.begun += 1;
        let shaking = async move { (number, shake_hands(acceptor, socket, longest).await) };
        self.by_age.insert(number, self.running.spawn(shaking));
    }

    /// The next one that ends, and whose connection it was if it went well. Nothing where none is under way.
    async fn ended(&mut self) -> Option<Option<Called>> {
        // Who made way has no number here any more.
        let Ok((number, called)) = self.running.join_next().await? else { return Some(None) };
        self.by_age.remove(&number);
        Some(called)
    }
}

async fn shake_hands(acceptor: TlsAcceptor, socket: TcpStream, longest: Duration) -> Option<Called> {
    let _ = socket.set_nodelay(true); // without it answers come later, and no less right
    match timeout(longest, acceptor.accept(socket)).await {
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
