//! Dials the publisher of an engine's events, and again whenever it is gone.
//!
//! Not here: engines that dial (`listen.rs`), and what is heard (`follow.rs`).

use std::time::Duration;

use kvfleet_proto::zmtp::{Connection, Endpoint, Role, ZmtpError};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::follow::{Brought, live};
use super::metrics::RankMetrics;
use super::rank::Message;

/// Between two attempts at first; each that fails doubles it.
const AGAIN_MIN: Duration = Duration::from_millis(100);

/// Between two attempts at last: an engine loads its weights for minutes.
const AGAIN_MAX: Duration = Duration::from_secs(2);

/// Dials one rank until cancelled.
pub(super) async fn run(
    endpoint: Endpoint,
    topic: String,
    brought: mpsc::Sender<Brought>,
    metrics: RankMetrics,
    stop: CancellationToken,
) {
    let mut again = AGAIN_MIN;
    let mut said = None;
    while !brought.is_closed() {
        let heard = async {
            let mut connection = Connection::dial(&endpoint, Role::Subscriber).await?;
            connection.subscribe(topic.as_bytes()).await?;
            tracing::info!(%endpoint, "the events of an engine are heard");
            (again, said) = (AGAIN_MIN, None);
            Ok(relay(connection, None, &brought, &metrics).await)
        };
        let Some(ended) = stop.run_until_cancelled(heard).await else { return };
        let error = ended.unwrap_or_else(|error: ZmtpError| error).to_string();
        if said.as_ref() != Some(&error) {
            tracing::warn!(%endpoint, error, "the events of an engine are not heard; dialing again");
            said = Some(error);
        }
        if stop.run_until_cancelled(tokio::time::sleep(again)).await.is_none() {
            return;
        }
        again = (2 * again).min(AGAIN_MAX);
    }
}

/// Hands on what a connection brings until it is over, after what it has brought, and answers why it is.
pub(super) async fn relay(
    mut connection: Connection<TcpStream>,
    first: Option<Message>,
    brought: &mpsc::Sender<Brought>,
    metrics: &RankMetrics,
) -> ZmtpError {
    for next in [Some(Brought::Up), first.map(Brought::Message)].into_iter().flatten() {
        if brought.send(next).await.is_err() {
            return ZmtpError::Closed;
        }
    }
    let ended = loop {
        let message = match connection.receive().await {
            Ok(frames) => live(&frames),
            Err(error) => break error,
        };
        match message {
            // Its number is missing then, and asked for.
            None => metrics.message("malformed"),
            Some(message) => {
                if brought.send(Brought::Message(message)).await.is_err() {
                    return ZmtpError::Closed;
                }
            }
        }
    };
    drop(brought.send(Brought::Down).await);
    ended
}
