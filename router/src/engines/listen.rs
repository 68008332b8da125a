//! Listens for engines that dial routers with their events, as publishers with a host in their
//! endpoint do.
//!
//! The topic of the first message identifies the engine, and its batch the rank. Not here: engines
//! that the router dials (`dial.rs`), and handling of events (`follow.rs`).

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvfleet_engine_events::events::{Dialect, decode};
use kvfleet_engine_events::zmtp::{Connection, Role, ZmtpError};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::dial::relay;
use super::follow::{ConnectionEvent, parse_live};
use super::metrics::RankMetrics;
use crate::config::EngineConfig;

/// Connections in addition to two per rank: unidentified ones, and engines that dial again.
const SPARE_CONNECTIONS: usize = 16;

/// Shown length of an unknown topic.
const TOPIC_SHOWN_MAX: usize = 128;

/// Pause before another silent connection is closed, if the last one kept its place.
const ROOM_RETRY: Duration = Duration::from_millis(100);

/// Pause after a failed accept, for example without free file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Followers of the ranks of engines that dial.
#[derive(Default)]
pub(super) struct TopicDirectory {
    by_topic: HashMap<String, DialingEngine>,
}

struct DialingEngine {
    dialect: Dialect,
    first_rank: u32,
    ranks: Vec<FollowedRank>,
}

/// A rank that this router follows.
struct FollowedRank {
    events: mpsc::Sender<ConnectionEvent>,
    metrics: RankMetrics,
    /// Number of its newest connection, and the token that ends it.
    newest: Mutex<(u64, CancellationToken)>,
}

impl FollowedRank {
    /// Makes a new connection the newest and ends the one before. An engine dials again after a
    /// disconnect, and two processes with one topic would alternate.
    fn take_over(&self) -> (u64, CancellationToken) {
        let mut newest = self.newest.lock();
        newest.1.cancel();
        *newest = (newest.0 + 1, CancellationToken::new());
        newest.clone()
    }
}

impl TopicDirectory {
    /// Adds the next rank of an engine that dials.
    pub(super) fn add(
        &mut self,
        engine: &EngineConfig,
        events: mpsc::Sender<ConnectionEvent>,
        metrics: RankMetrics,
    ) {
        let entry = self.by_topic.entry(engine.topic.clone());
        let (dialect, first_rank) = (engine.dialect.into(), engine.first_rank);
        let engine = entry.or_insert_with(|| DialingEngine { dialect, first_rank, ranks: Vec::new() });
        engine.ranks.push(FollowedRank { events, metrics, newest: Mutex::default() });
    }

    fn ranks(&self) -> usize {
        self.by_topic.values().map(|engine| engine.ranks.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_topic.is_empty()
    }

    /// The rank that a first message belongs to.
    fn resolve(&self, frames: &[Bytes]) -> Result<&FollowedRank, RejectedConnection> {
        let message = parse_live(frames).ok_or(RejectedConnection::Frames)?;
        let topic =
            frames.first().map(|topic| String::from_utf8_lossy(topic).into_owned()).unwrap_or_default();
        let Some(engine) = self.by_topic.get(&topic) else {
            let topic = topic.chars().take(TOPIC_SHOWN_MAX).collect();
            return Err(RejectedConnection::Topic { topic });
        };
        if let [followed] = &engine.ranks[..] {
            return Ok(followed);
        }
        let rank = decode(&message.payload, engine.dialect).ok().and_then(|batch| batch.rank);
        let rank = rank.ok_or(RejectedConnection::NoRank)?;
        let at = rank.checked_sub(engine.first_rank).map(|at| at as usize);
        let ranks = engine.ranks.len();
        at.and_then(|at| engine.ranks.get(at)).ok_or(RejectedConnection::Rank { topic, rank, ranks })
    }
}

/// Reason why a connection is not followed.
#[derive(Debug, thiserror::Error)]
enum RejectedConnection {
    #[error("its first message does not have the three frames of an engine's events")]
    Frames,
    #[error(
        "no engine of engines.list has the topic {topic:?}: add it, with the topic of its kv-events-config"
    )]
    Topic { topic: String },
    #[error(
        "its first message does not say its rank, and the engine has several: give each a topic and an \
         instance of its own"
    )]
    NoRank,
    #[error(
        "rank {rank} of the engine with topic {topic:?}, which has {ranks} in engines.list: correct \
         `first_rank` and `ranks`"
    )]
    Rank { topic: String, rank: u32, ranks: usize },
    #[error(
        "a newer connection has its topic and rank: give each engine its own topic, unless it dialed again"
    )]
    TakenOver,
    #[error("it was silent for longer than all others, and a new connection needed its place")]
    Idle,
    #[error(transparent)]
    Socket(#[from] ZmtpError),
}

/// Connections without a message yet. An engine may be silent for hours, so silence alone ends
/// none. When all places are taken, the longest silent one is closed; otherwise silent strangers
/// would keep engines out.
#[derive(Debug, Default)]
struct SilentConnections {
    since: Mutex<BTreeMap<u64, CancellationToken>>,
}

impl SilentConnections {
    /// Registers a connection before its task starts.
    fn enter(&self, number: u64) -> CancellationToken {
        let token = CancellationToken::new();
        self.since.lock().insert(number, token.clone());
        token
    }

    /// Waits for the first message, or until another connection needs the place.
    async fn wait_for_first<T>(
        &self,
        number: u64,
        token: CancellationToken,
        heard: impl Future<Output = Result<T, RejectedConnection>>,
    ) -> Result<T, RejectedConnection> {
        let heard = token.run_until_cancelled(heard).await;
        self.since.lock().remove(&number);
        heard.unwrap_or(Err(RejectedConnection::Idle))
    }

    /// Returns a place, closing the longest silent connection if necessary. Retries, since that one
    /// may just have sent its first message.
    async fn make_room(&self, places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(place) = Arc::clone(places).try_acquire_owned() {
                return Some(place);
            }
            if let Some((_, token)) = self.since.lock().pop_first() {
                token.cancel();
            }
            let place = Arc::clone(places).acquire_owned();
            if let Ok(place) = tokio::time::timeout(ROOM_RETRY, place).await {
                return place.ok();
            }
        }
    }
}

/// Accepts connections until cancelled.
pub(super) async fn run(listener: TcpListener, directory: Arc<TopicDirectory>, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(2 * directory.ranks() + SPARE_CONNECTIONS));
    let silent = Arc::new(SilentConnections::default());
    for number in 0.. {
        match stop.run_until_cancelled(listener.accept()).await {
            None => return,
            Some(Ok((stream, peer))) => {
                let place = stop.run_until_cancelled(silent.make_room(&places)).await;
                let Some(Some(place)) = place else { return };
                let token = silent.enter(number);
                let (directory, silent, stop) = (Arc::clone(&directory), Arc::clone(&silent), stop.clone());
                tokio::spawn(async move {
                    let _place = place;
                    let served = serve(stream, peer, number, token, &directory, &silent);
                    let _ = stop.run_until_cancelled(served).await; // cancelled by shutdown
                });
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "cannot accept a connection of an engine");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    number: u64,
    token: CancellationToken,
    directory: &TopicDirectory,
    silent: &SilentConnections,
) {
    let first = async {
        let mut connection = Connection::from_stream(stream, Role::Subscriber).await?;
        connection.subscribe(b"").await?;
        let first = connection.receive().await?;
        Ok((connection, first))
    };
    let followed = match silent.wait_for_first(number, token, first).await {
        Ok((connection, first)) => follow(connection, &first, directory).await,
        Err(error) => Err(error),
    };
    if let Err(error) = followed {
        tracing::warn!(%peer, %error, "a connection of an engine is rejected");
    }
}

async fn follow(
    connection: Connection<TcpStream>,
    first: &[Bytes],
    directory: &TopicDirectory,
) -> Result<(), RejectedConnection> {
    let followed = directory.resolve(first)?;
    let (nth, over) = followed.take_over();
    let relayed = relay(nth, connection, parse_live(first), &followed.events, &followed.metrics);
    let Some(ended) = over.run_until_cancelled(relayed).await else {
        return Err(RejectedConnection::TakenOver);
    };
    tracing::info!(error = %ended, "a connection of an engine ended");
    Ok(())
}
