//! Connections of callers to a server of control calls: TLS that shows what is to be shown now, and that knows every
//! caller's certificate from its own handshake.
//!
//! tonic's own listener keeps the certificate that it began with, and resumes sessions: whose certificate ran out would go
//! on opening connections. Not here: what a caller may call (`callers.rs`).

use std::collections::BTreeMap;
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

use super::Identity;
use crate::accepting::{Refused, connections_within};

/// Bounds of what callers cost before they have said who they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Handshakes under way at once, one at least. Whoever comes above that has the place of one that may be
    /// ended ([`Handshakes::make_way`]), or waits until there is one.
    pub(super) handshakes_max: usize,
    /// Longest a handshake may take, so that who connects and says nothing goes.
    pub(super) handshake_max: Duration,
    /// As long as this it is not ended for another once its caller has spoken: it takes some turns and a signature, also of a server to
    /// which everybody comes back at once. Of whoever has said nothing, a [`SILENT_PART`]th: his words may be here, and not looked at yet.
    pub(super) undisturbed: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            handshakes_max: connections_within(HANDSHAKES_MAX, SHARE_OF_FILES),
            handshake_max: Duration::from_secs(5),
            undisturbed: Duration::from_secs(1),
        }
    }
}

/// Handshakes under way at once, unless files are few.
const HANDSHAKES_MAX: usize = 1024;

/// Of the files that the process may have open strangers get this part at most.
const SHARE_OF_FILES: usize = 4;

/// See [`Bounds::undisturbed`].
const SILENT_PART: u32 = 10;

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

/// The same for callers who need not say who they are: for what strangers may ask.
pub fn incoming_of_anyone(
    listener: TcpListener,
    identity: &Identity,
) -> impl Stream<Item = io::Result<Called>> + Send + Unpin + use<> {
    within(listener, identity.grpc_server_of_anyone(), Bounds::default())
}

pub(super) fn incoming_within(
    listener: TcpListener,
    identity: &Identity,
    bounds: Bounds,
) -> impl Stream<Item = io::Result<Called>> + Send + Unpin + use<> {
    within(listener, identity.grpc_server(), bounds)
}

fn within(
    listener: TcpListener,
    config: ServerConfig,
    bounds: Bounds,
) -> impl Stream<Item = io::Result<Called>> + Send + Unpin + use<> {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let handshakes = Handshakes { bounds, begun: 0, running: JoinSet::new(), by_age: BTreeMap::new() };
    let incoming = Incoming { listener, acceptor, handshakes, refused: Refused::default() };
    Box::pin(futures_util::stream::unfold(incoming, |mut incoming| async {
        let called = incoming.next().await;
        Some((Ok(called), incoming))
    }))
}

struct Incoming {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    handshakes: Handshakes,
    refused: Refused,
}

impl Incoming {
    async fn next(&mut self) -> Called {
        loop {
            let place = self.handshakes.place();
            tokio::select! {
                // Who has ended makes room first, so that nobody is ended for want of it who need not be.
                biased;
                Some(ended) = self.handshakes.ended() => {
                    if let Some(called) = ended {
                        return called;
                    }
                }
                // The system keeps callers for us meanwhile.
                () = sleep_until(place.unwrap_or_else(Instant::now)), if place.is_some() => {}
                accepted = self.listener.accept(), if place.is_none() => match accepted {
                    Ok((socket, _)) => self.handshakes.begin(self.acceptor.clone(), socket),
                    Err(error) => self.refused(&error).await,
                },
            }
        }
    }

    /// Nothing can be accepted, most often for want of descriptors.
    async fn refused(&mut self, error: &io::Error) {
        if self.refused.is_to_be_said() {
            tracing::warn!(%error, "no connection for control calls could be accepted; raise the limit of open files if there are too many");
        }
        self.handshakes.halve();
        sleep(ACCEPT_PAUSE).await;
    }
}

/// Handshakes under way.
struct Handshakes {
    bounds: Bounds,
    /// How many were begun so far: the number of the next.
    begun: u64,
    running: JoinSet<(u64, Option<Called>)>,
    /// Those that may be under way, by number.
    by_age: BTreeMap<u64, Handshake>,
}

struct Handshake {
    task: AbortHandle,
    since: Instant,
    /// Whether its caller said anything.
    is_begun: Arc<AtomicBool>,
}

impl Handshake {
    /// From when on it may be ended for another.
    fn yields(&self, bounds: &Bounds) -> Instant {
        let is_begun = self.is_begun.load(Ordering::Relaxed);
        self.since + if is_begun { bounds.undisturbed } else { bounds.undisturbed / SILENT_PART }
    }
}

impl Handshakes {
    /// When there is a place for another one, if not now.
    fn place(&self) -> Option<Instant> {
        if self.by_age.len() < self.bounds.handshakes_max.max(1) {
            return None;
        }
        let soonest = self.by_age.values().map(|handshake| handshake.yields(&self.bounds)).min();
        soonest.filter(|soonest| *soonest > Instant::now())
    }

    /// Begins one, in the place of another if there is none free.
    fn begin(&mut self, acceptor: TlsAcceptor, socket: TcpStream) {
        while self.by_age.len() >= self.bounds.handshakes_max.max(1) && self.make_way() {}
        let (number, longest) = (self.begun, self.bounds.handshake_max);
        self.begun += 1;
        let is_begun = Arc::<AtomicBool>::default();
        let spoken = Arc::clone(&is_begun);
        let shaking = async move { (number, shake_hands(acceptor, socket, longest, &spoken).await) };
        let task = self.running.spawn(shaking);
        self.by_age.insert(number, Handshake { task, since: Instant::now(), is_begun });
    }

    /// Ends the oldest whose caller has said nothing, or else the oldest that had its time. `false` when there is none.
    fn make_way(&mut self) -> bool {
        let now = Instant::now();
        let yields = |handshake: &Handshake| handshake.yields(&self.bounds) <= now;
        let silent = |handshake: &Handshake| !handshake.is_begun.load(Ordering::Relaxed) && yields(handshake);
        let oldest = |may: &dyn Fn(&Handshake) -> bool| {
            self.by_age.iter().find(|(_, handshake)| may(handshake)).map(|(number, _)| *number)
        };
        let Some(number) = oldest(&silent).or_else(|| oldest(&yields)) else { return false };
        if let Some(ended) = self.by_age.remove(&number) {
            ended.task.abort();
            tracing::debug!("a handshake for control calls made way for a newer one");
        }
        true
    }

    /// Ends half of those that may be ended, so that their descriptors are there for whoever comes.
    fn halve(&mut self) {
        let now = Instant::now();
        let yield_now = |handshake: &&Handshake| handshake.yields(&self.bounds) <= now;
        let some = self.by_age.values().filter(yield_now).count();
        for _ in 0..some.div_ceil(2) {
            self.make_way();
        }
    }

    /// The next one that ends, and whose connection it was if it went well. Nothing where none is under way.
    async fn ended(&mut self) -> Option<Option<Called>> {
        // Who made way has no number here any more.
        let Ok((number, called)) = self.running.join_next().await? else { return Some(None) };
        self.by_age.remove(&number);
        Some(called)
    }
}

async fn shake_hands(
    acceptor: TlsAcceptor,
    socket: TcpStream,
    longest: Duration,
    is_begun: &AtomicBool,
) -> Option<Called> {
    let _ = socket.set_nodelay(true); // without it answers come later, and no less right
    let shaking = async {
        socket.peek(&mut [0]).await?;
        is_begun.store(true, Ordering::Relaxed);
        acceptor.accept(socket).await
    };
    match timeout(longest, shaking).await {
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
