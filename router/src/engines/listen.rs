//! Listens for engines that dial routers with their events, as publishers with a host in their endpoint do.
//!
//! Which engine it is says the topic of its first message, and the batch in it which rank. Not here: engines that are dialed (`dial.rs`),
//! and what is heard (`follow.rs`).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::engine_events::{Dialect, decode};
use kvfleet_proto::zmtp::{Connection, Role, ZmtpError};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::dial::relay;
use super::follow::{Brought, live};
use super::metrics::RankMetrics;

/// Connections at once: as many as instances.
const CONNECTIONS_MAX: usize = 4_096;

/// After a failure to accept, such as for want of file descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Who follows the ranks of the engines that dial.
#[derive(Default)]
pub(super) struct Directory {
    by_topic: HashMap<String, Engine>,
}

struct Engine {
    dialect: Dialect,
    ranks: Vec<(mpsc::Sender<Brought>, RankMetrics)>,
}

impl Directory {
    /// Adds the next rank of the engine with this topic.
    pub(super) fn add(
        &mut self,
        topic: &str,
        dialect: Dialect,
        brought: mpsc::Sender<Brought>,
        metrics: RankMetrics,
    ) {
        let engine = self.by_topic.entry(topic.to_owned());
        let engine = engine.or_insert_with(|| Engine { dialect, ranks: Vec::new() });
        engine.ranks.push((brought, metrics));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_topic.is_empty()
    }

    /// Whose first message this is.
    fn of(&self, frames: &[Bytes]) -> Result<&(mpsc::Sender<Brought>, RankMetrics), Unknown> {
        let message = live(frames).ok_or(Unknown::Frames)?;
        let topic =
            frames.first().map(|topic| String::from_utf8_lossy(topic).into_owned()).unwrap_or_default();
        let Some(engine) = self.by_topic.get(&topic) else { return Err(Unknown::Topic { topic }) };
        let rank = match &engine.ranks[..] {
            [_] => 0,
            _ => decode(&message.payload, engine.dialect)
                .ok()
                .and_then(|batch| batch.rank)
                .ok_or(Unknown::NoRank)?,
        };
        engine.ranks.get(rank as usize).ok_or(Unknown::Rank { topic, rank, ranks: engine.ranks.len() })
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
        "rank {rank} of the engine with topic {topic:?}, which has {ranks} in engines.list: correct `ranks`"
    )]
    Rank { topic: String, rank: u32, ranks: usize },
    #[error(transparent)]
    Socket(#[from] ZmtpError),
}

/// Takes connections until cancelled.
pub(super) async fn run(listener: TcpListener, directory: Arc<Directory>, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = Arc::clone(&places).acquire_owned();
        let Some(Ok(place)) = stop.run_until_cancelled(place).await else { return };
        match stop.run_until_cancelled(listener.accept()).await {
            None => return,
            Some(Ok((stream, peer))) => {
                let (directory, stop) = (Arc::clone(&directory), stop.clone());
                tokio::spawn(async move {
                    let _place = place;
                    let _ = stop.run_until_cancelled(serve(stream, peer, &directory)).await; // stopped, as asked
                });
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "an engine that dials cannot be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, peer: SocketAddr, directory: &Directory) {
    if let Err(error) = follow(stream, directory).await {
        tracing::warn!(%peer, %error, "an engine that dialed is not heard");
    }
}

async fn follow(stream: TcpStream, directory: &Directory) -> Result<(), Unknown> {
    let mut connection = Connection::over(stream, Role::Subscriber).await?;
    connection.subscribe(b"").await?;
    let first = connection.receive().await?;
    let (brought, metrics) = directory.of(&first)?;
    let ended = relay(connection, live(&first), brought, metrics).await;
    tracing::info!(error = %ended, "an engine that dialed is gone");
    Ok(())
}
