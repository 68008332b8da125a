//! Dials the publisher of an engine's events, and again whenever it is gone.
//!
//! Not here: engines that dial (`listen.rs`), and what is heard (`follow.rs`).

use std::time::{Duration, Instant};

use kvfleet_proto::zmtp::{Connection, Endpoint, Role, ZmtpError};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::follow::{Brought, What, live};
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
    for nth in 1.. {
        let heard = async {
            let mut connection = Connection::dial(&endpoint, Role::Subscriber).await?;
            connection.subscribe(topic.as_bytes()).await?;
            tracing::debug!(%endpoint, "the events of an engine are heard");
            let since = Instant::now();
            let ended = relay((nth, connection), None, &brought, &metrics).await;
            // One that is closed at once is no better than none.
            if since.elapsed() >= AGAIN_MAX {
                (again, said) = (AGAIN_MIN, None);
            }
            Ok(ended)
        };
        let Some(ended) = stop.run_until_cancelled(heard).await else { return };
        if brought.is_closed() {
            return;
        }
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
    (nth, mut connection): (u64, Connection<TcpStream>),
    first: Option<Message>,
    brought: &mpsc::Sender<Brought>,
    metrics: &RankMetrics,
) -> ZmtpError {
    let send = async |what| brought.send(Brought { connection: nth, what }).await;
    for what in [Some(What::Up), first.map(What::Message)].into_iter().flatten() {
        if send(what).await.is_err() {
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
                if send(What::Message(message)).await.is_err() {
                    return ZmtpError::Closed;
                }
            }
        }
    };
    let _ = send(What::Down).await; // nobody listens when all ends
    ended
}
