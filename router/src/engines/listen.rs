//! Listens for engines that dial routers with their events, as publishers with a host in their endpoint do.
//!
//! Which engine it is says the topic of its first message, and the batch in it which rank. Not here: engines that are dialed (`dial.rs`),
//! and what is heard (`follow.rs`).

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::engine_events::{Dialect, decode};
use kvfleet_proto::zmtp::{Connection, Role, ZmtpError};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::dial::relay;
use super::follow::{Brought, live};
use super::metrics::RankMetrics;
use crate::config::EngineConfig;

/// Connections at once besides two for each rank: of strangers, who have said nothing yet, and of those that dial again.
const CONNECTIONS_MORE: usize = 16;

/// Of a topic that nobody has, what is shown.
const TOPIC_SHOWN_MAX: usize = 128;

/// Until another connection is asked to make room, where the last one did not.
const ROOM_AGAIN: Duration = Duration::from_millis(100);

/// After a failure to accept, such as for want of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Who follows the ranks of the engines that dial.
#[derive(Default)]
pub(super) struct Directory {
    by_topic: HashMap<String, Engine>,
}

struct Engine {
    dialect: Dialect,
    first_rank: u32,
    ranks: Vec<Followed>,
}

/// One rank that is followed here.
struct Followed {
    brought: mpsc::Sender<Brought>,
    metrics: RankMetrics,
    /// The newest connection of it: how many there were, and what ends it.
    newest: Mutex<(u64, CancellationToken)>,
}

impl Followed {
    /// Another connection takes over. The one before ends: an engine dials again when it is over, and two processes with one topic would speak
    /// in turn.
    fn take_over(&self) -> (u64, CancellationToken) {
        let mut newest = self.newest.lock();
        newest.1.cancel();
        *newest = (newest.0 + 1, CancellationToken::new());
        newest.clone()
    }
}

impl Directory {
    /// Adds the next rank of an engine that dials.
    pub(super) fn add(
        &mut self,
        engine: &EngineConfig,
        brought: mpsc::Sender<Brought>,
        metrics: RankMetrics,
    ) {
        let entry = self.by_topic.entry(engine.topic.clone());
        let (dialect, first_rank) = (engine.dialect.into(), engine.first_rank);
        let engine = entry.or_insert_with(|| Engine { dialect, first_rank, ranks: Vec::new() });
        engine.ranks.push(Followed { brought, metrics, newest: Mutex::default() });
    }

    fn ranks(&self) -> usize {
        self.by_topic.values().map(|engine| engine.ranks.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_topic.is_empty()
    }

    /// Whose first message this is.
    fn of(&self, frames: &[Bytes]) -> Result<&Followed, Unknown> {
        let message = live(frames).ok_or(Unknown::Frames)?;
        let topic =
            frames.first().map(|topic| String::from_utf8_lossy(topic).into_owned()).unwrap_or_default();
        let Some(engine) = self.by_topic.get(&topic) else {
            let topic = topic.chars().take(TOPIC_SHOWN_MAX).collect();
            return Err(Unknown::Topic { topic });
        };
        if let [followed] = &engine.ranks[..] {
            return Ok(followed);
        }
        let rank = decode(&message.payload, engine.dialect).ok().and_then(|batch| batch.rank);
        let rank = rank.ok_or(Unknown::NoRank)?;
        let at = rank.checked_sub(engine.first_rank).map(|at| at as usize);
        let ranks = engine.ranks.len();
        at.and_then(|at| engine.ranks.get(at)).ok_or(Unknown::Rank { topic, rank, ranks })
    }
}

/// Why nobody follows a connection.
#[derive(Debug, thiserror::Error)]
enum Unknown {
    #[error("its first message does not have the three frames of an engine's events")]
    Frames,
    #[error(
        "no engine of engines.list has the topic {topic:?}: add it, with the topic of its kv-events-config"
    )]
    Topic { topic: String },
    #[error(
        "its first message does not say its rank, and the engine has several: give each a topic and an instance of its own"
    )]
    NoRank,
    #[error(
        "rank {rank} of the engine with topic {topic:?}, which has {ranks} in engines.list: correct `first_rank` and `ranks`"
    )]
    Rank { topic: String, rank: u32, ranks: usize },
    #[error(
        "another connection has its topic and rank since: give each engine its own topic, unless it dialed again"
    )]
    TakenOver,
    #[error("it said nothing for longer than all others, and another one dialed where no place was left")]
    Silent,
    #[error(transparent)]
    Socket(#[from] ZmtpError),
}

/// Connections that have said nothing yet. An engine may say nothing for hours, so none is ended for that; but where all places are taken, the one
/// that has been silent for longest makes room, or whoever dials and says nothing would keep engines out.
#[derive(Debug, Default)]
struct Silent {
    since: Mutex<BTreeMap<u64, CancellationToken>>,
}

impl Silent {
    /// One more has a place. It is known from here on, before its task is begun.
    fn enter(&self, number: u64) -> CancellationToken {
        let token = CancellationToken::new();
        self.since.lock().insert(number, token.clone());
        token
    }

    /// Waits for the first message, or until another one needs the place.
    async fn until_heard<T>(
        &self,
        (number, token): (u64, CancellationToken),
        heard: impl Future<Output = Result<T, Unknown>>,
    ) -> Result<T, Unknown> {
        let heard = token.run_until_cancelled(heard).await;
        self.since.lock().remove(&number);
        heard.unwrap_or(Err(Unknown::Silent))
    }

    /// A place, of the one that came first if there is no other. Again and again: that one may just have been heard, and keep it.
    async fn make_room(&self, places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(place) = Arc::clone(places).try_acquire_owned() {
                return Some(place);
            }
            if let Some((_, token)) = self.since.lock().pop_first() {
                token.cancel();
            }
            let place = Arc::clone(places).acquire_owned();
            if let Ok(place) = tokio::time::timeout(ROOM_AGAIN, place).await {
                return place.ok();
            }
        }
    }
}

/// Takes connections until cancelled.
pub(super) async fn run(listener: TcpListener, directory: Arc<Directory>, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(2 * directory.ranks() + CONNECTIONS_MORE));
    let silent = Arc::new(Silent::default());
    for number in 0.. {
        match stop.run_until_cancelled(listener.accept()).await {
            None => return,
            Some(Ok((stream, peer))) => {
                let place = stop.run_until_cancelled(silent.make_room(&places)).await;
                let Some(Some(place)) = place else { return };
                let known = (number, silent.enter(number));
                let (directory, silent, stop) = (Arc::clone(&directory), Arc::clone(&silent), stop.clone());
                tokio::spawn(async move {
                    let _place = place;
                    let served = serve((stream, peer), known, &directory, &silent);
                    let _ = stop.run_until_cancelled(served).await; // stopped, as asked
                });
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "an engine that dials cannot be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn serve(
    (stream, peer): (TcpStream, SocketAddr),
    known: (u64, CancellationToken),
    directory: &Directory,
    silent: &Silent,
) {
    let first = async {
        let mut connection = Connection::over(stream, Role::Subscriber).await?;
        connection.subscribe(b"").await?;
        let first = connection.receive().await?;
        Ok((connection, first))
    };
    let followed = match silent.until_heard(known, first).await {
        Ok((connection, first)) => follow(connection, &first, directory).await,
        Err(error) => Err(error),
    };
    if let Err(error) = followed {
        tracing::warn!(%peer, %error, "an engine that dialed is not heard");
    }
}

async fn follow(
    connection: Connection<TcpStream>,
    first: &[Bytes],
    directory: &Directory,
) -> Result<(), Unknown> {
    let followed = directory.of(first)?;
    let (nth, over) = followed.take_over();
    let relayed = relay((nth, connection), live(first), &followed.brought, &followed.metrics);
    let Some(ended) = over.run_until_cancelled(relayed).await else { return Err(Unknown::TakenOver) };
    tracing::info!(error = %ended, "an engine that dialed is gone");
    Ok(())
}
