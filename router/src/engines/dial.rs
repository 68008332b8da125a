//! Dials the publisher of an engine's events, and redials whenever the connection ends.
//!
//! Not here: engines that dial the router (`listen.rs`), and handling of events (`follow.rs`).

use std::time::{Duration, Instant};

use kvfleet_engine_events::zmtp::{Connection, Endpoint, Role, ZmtpError};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::follow::{ConnectionEvent, ConnectionEventKind, parse_live};
use super::metrics::RankMetrics;
use super::rank::EngineMessage;

/// First pause between attempts; each failure doubles it.
const RETRY_MIN: Duration = Duration::from_millis(100);

/// Longest pause between attempts: an engine loads its weights for minutes.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// Dials one rank until cancelled.
pub(super) async fn run(
    endpoint: Endpoint,
    topic: String,
    events: mpsc::Sender<ConnectionEvent>,
    metrics: RankMetrics,
    stop: CancellationToken,
) {
    let mut retry_after = RETRY_MIN;
    let mut logged_error = None;
    for nth in 1.. {
        let heard = async {
            let mut connection = Connection::dial(&endpoint, Role::Subscriber).await?;
            connection.subscribe(topic.as_bytes()).await?;
            tracing::debug!(%endpoint, "connected to an engine's events");
            let since = Instant::now();
            let ended = relay(nth, connection, None, &events, &metrics).await;
            // A connection that closes at once does not reset the backoff.
            if since.elapsed() >= RETRY_MAX {
                (retry_after, logged_error) = (RETRY_MIN, None);
            }
            Ok(ended)
        };
        let Some(ended) = stop.run_until_cancelled(heard).await else { return };
        if events.is_closed() {
            return;
        }
        let error = ended.unwrap_or_else(|error: ZmtpError| error).to_string();
        if logged_error.as_ref() != Some(&error) {
            tracing::warn!(%endpoint, error, "no connection to an engine's events; dialing again");
            logged_error = Some(error);
        }
        if stop.run_until_cancelled(tokio::time::sleep(retry_after)).await.is_none() {
            return;
        }
        retry_after = (2 * retry_after).min(RETRY_MAX);
    }
}

/// Forwards `first` and then all messages of a connection until it ends; returns the reason.
pub(super) async fn relay(
    nth: u64,
    mut connection: Connection<TcpStream>,
    first: Option<EngineMessage>,
    events: &mpsc::Sender<ConnectionEvent>,
    metrics: &RankMetrics,
) -> ZmtpError {
    let send = async |what| events.send(ConnectionEvent { connection: nth, kind: what }).await;
    for what in [Some(ConnectionEventKind::Up), first.map(ConnectionEventKind::Message)].into_iter().flatten()
    {
        if send(what).await.is_err() {
            return ZmtpError::Closed;
        }
    }
    let ended = loop {
        let message = match connection.receive().await {
            Ok(frames) => parse_live(&frames),
            Err(error) => break error,
        };
        match message {
            // Its number is then missing, and a replay is requested.
            None => metrics.count_message("malformed"),
            Some(message) => {
                if send(ConnectionEventKind::Message(message)).await.is_err() {
                    return ZmtpError::Closed;
                }
            }
        }
    };
    let _ = send(ConnectionEventKind::Down).await; // the receiver is gone at shutdown
    ended
}
