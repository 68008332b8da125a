//! Follows one rank of an engine. It handles connection events, requests replays, and keeps the
//! instance alive while the engine is connected.
//!
//! A replay is requested when a connection starts, when a message is missing, and after
//! [`IDLE_MIN`]. The last messages of a publisher may be lost without a later one to reveal it.
//! Keepalives continue meanwhile. Not here: the connection (`dial.rs`, `listen.rs`), and the effect
//! of messages (`rank.rs`).

use std::time::Duration;

use bytes::Bytes;
use kvfleet_engine_events::zmtp::{Connection, Endpoint, Role, ZmtpError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::metrics::RankMetrics;
use super::rank::{EngineMessage, NextStep, RankState, ReplayStep};
use crate::view::residency::SWEEP_INTERVAL;

/// Queued messages, each of any size. Beyond it TCP's window fills, and then the publisher drops
/// messages.
pub(super) const QUEUE_MESSAGES: usize = 4;

/// Time without a message after which an engine is asked for missed ones; each failure doubles it.
const IDLE_MIN: Duration = Duration::from_secs(5);

/// Upper bound of that time.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Consecutive replays that make progress and break off: a publisher drops replayed messages of a
/// slow reader.
const REPLAY_ATTEMPTS_MAX: usize = 64;

/// Timeout between two messages of a replay: the publisher serves it between its own messages.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);

/// Most messages of one replay: ten times vLLM's default buffer.
const REPLAY_MESSAGES_MAX: usize = 100_000;

/// The message number that ends a replay.
const REPLAY_END: u64 = u64::MAX;

/// An event of a connection, with the connection's number.
#[derive(Debug)]
pub(super) struct ConnectionEvent {
    pub(super) connection: u64,
    pub(super) kind: ConnectionEventKind,
}

/// Kind of a connection event.
#[derive(Debug)]
pub(super) enum ConnectionEventKind {
    /// Connected: every message from here on is received.
    Up,
    /// Disconnected.
    Down,
    /// A message.
    Message(EngineMessage),
}

/// Parses a message of the live stream.
pub(super) fn parse_live(frames: &[Bytes]) -> Option<EngineMessage> {
    match frames {
        [_topic, number, payload] => parse_message(number, payload),
        _ => None,
    }
}

/// Parses a message of a replay; some releases leave out the topic.
fn parse_replayed(frames: &[Bytes]) -> Option<EngineMessage> {
    match frames {
        [delimiter, number, payload] | [delimiter, _, number, payload] if delimiter.is_empty() => {
            parse_message(number, payload)
        }
        _ => None,
    }
}

fn parse_message(number: &Bytes, payload: &Bytes) -> Option<EngineMessage> {
    let number = u64::from_be_bytes(number[..].try_into().ok()?);
    Some(EngineMessage { number, payload: payload.clone() })
}

/// Reason of an incomplete replay.
#[derive(Debug, thiserror::Error)]
enum ReplayError {
    #[error(transparent)]
    Socket(#[from] ZmtpError),
    #[error("the engine sent no replay message for {} s", REPLAY_TIMEOUT.as_secs())]
    Timeout,
    #[error("the engine answers a replay request with other frames: is this its replay port?")]
    BadFrames,
    #[error("a replay has more than {REPLAY_MESSAGES_MAX} messages, or no end")]
    TooLong,
    #[error("messages are missing in a replay, and another attempt does not return them")]
    MissingMessages,
}

/// Follower of one rank.
pub(super) struct Follower {
    pub(super) rank: RankState,
    pub(super) replay: Option<Endpoint>,
    pub(super) metrics: RankMetrics,
    /// Error of the last replay; each error is logged once.
    pub(super) last_error: Option<String>,
}

impl Follower {
    /// Runs until cancelled, or until all senders are gone.
    pub(super) async fn run(mut self, mut events: mpsc::Receiver<ConnectionEvent>, stop: CancellationToken) {
        let mut tick = tokio::time::interval(SWEEP_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The newest live connection; events of older ones are stale and ignored.
        let mut current = None;
        let (mut last_message_at, mut idle_limit) = (Instant::now(), IDLE_MIN);
        loop {
            let next = tokio::select! {
                () = stop.cancelled() => return,
                next = events.recv() => Some(next),
                _ = tick.tick(), if current.is_some() => None,
            };
            match next {
                Some(None) => return,
                Some(Some(ConnectionEvent { connection, kind: ConnectionEventKind::Up }))
                    if Some(connection) > current =>
                {
                    current = Some(connection);
                    self.rank.connected();
                    let is_confirmed = self.request_replay(&stop).await;
                    self.rank.confirm(is_confirmed);
                }
                Some(Some(ConnectionEvent { connection, .. })) if Some(connection) != current => continue,
                Some(Some(ConnectionEvent { kind: ConnectionEventKind::Down, .. })) => current = None,
                Some(Some(ConnectionEvent { kind: ConnectionEventKind::Message(message), .. })) => {
                    self.handle_message(&message, &stop).await;
                }
                Some(Some(ConnectionEvent { kind: ConnectionEventKind::Up, .. })) => {}
                None => {
                    if last_message_at.elapsed() >= idle_limit || self.rank.is_unconfirmed() {
                        let is_confirmed = self.request_replay(&stop).await;
                        if self.rank.is_unconfirmed() {
                            self.rank.confirm(is_confirmed);
                        }
                        idle_limit = if is_confirmed { IDLE_MIN } else { (2 * idle_limit).min(IDLE_MAX) };
                        last_message_at = Instant::now();
                    }
                    self.rank.keepalive();
                    continue;
                }
            }
            last_message_at = Instant::now();
            self.metrics.set_connected(current.is_some());
        }
    }

    async fn handle_message(&mut self, message: &EngineMessage, stop: &CancellationToken) {
        if let NextStep::Replay { .. } = self.rank.receive(message) {
            // Two attempts, in case a connection breaks.
            let _ = self.request_replay(stop).await || self.request_replay(stop).await;
            self.rank.receive_after_replay(message);
        }
    }

    /// Requests all unknown messages. Returns whether a replay completed, which confirms the
    /// process of the earlier messages.
    async fn request_replay(&mut self, stop: &CancellationToken) -> bool {
        let Some(endpoint) = self.replay.clone() else { return false };
        let asked = stop.run_until_cancelled(self.replay_all(&endpoint)).await;
        let Some(asked) = asked else { return true };
        let error = asked.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|error| self.last_error.as_ref() != Some(error)) {
            tracing::warn!(%endpoint, error, "an engine's events are not replayed");
        }
        self.last_error = error;
        self.last_error.is_none()
    }

    /// Continues a replay that broke off, as long as each attempt makes progress.
    async fn replay_all(&mut self, endpoint: &Endpoint) -> Result<(), ReplayError> {
        for _ in 0..REPLAY_ATTEMPTS_MAX {
            let before = self.rank.last();
            match self.replay_from(endpoint, before.unwrap_or(0)).await? {
                ReplayStep::Continue => return Ok(()),
                ReplayStep::Restart => {}
                ReplayStep::Retry if self.rank.last() > before => {}
                ReplayStep::Retry => return Err(ReplayError::MissingMessages),
            }
        }
        Err(ReplayError::TooLong)
    }

    async fn replay_from(&mut self, endpoint: &Endpoint, from: u64) -> Result<ReplayStep, ReplayError> {
        let mut keepalives = keepalive_interval();
        let connection =
            self.with_keepalive(&mut keepalives, Connection::dial(endpoint, Role::Dealer)).await?;
        self.replay_over(connection, from).await
    }

    async fn replay_over(
        &mut self,
        mut connection: Connection<impl AsyncRead + AsyncWrite + Unpin>,
        from: u64,
    ) -> Result<ReplayStep, ReplayError> {
        connection.send(&[b"", &from.to_be_bytes()]).await?;
        self.rank.begin_replay();
        let mut keepalives = keepalive_interval();
        for _ in 0..=REPLAY_MESSAGES_MAX {
            let frames = tokio::time::timeout(REPLAY_TIMEOUT, connection.receive());
            let Ok(frames) = self.with_keepalive(&mut keepalives, frames).await else {
                // A publisher that drops replayed messages also drops the end marker.
                return if self.rank.last() > Some(from) {
                    Ok(ReplayStep::Retry)
                } else {
                    Err(ReplayError::Timeout)
                };
            };
            let message = parse_replayed(&frames?).ok_or(ReplayError::BadFrames)?;
            if message.number == REPLAY_END {
                return Ok(self.rank.end_replay());
            }
            match self.rank.receive_replayed(&message) {
                ReplayStep::Continue => {}
                other => return Ok(other),
            }
        }
        Err(ReplayError::TooLong)
    }

    /// Awaits `waited_for` and sends keepalives meanwhile, also between results that arrive without
    /// a pause.
    async fn with_keepalive<T>(&mut self, keepalives: &mut Interval, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                biased;
                _ = keepalives.tick() => self.rank.keepalive(),
                done = &mut future => return done,
            }
        }
    }
}

/// Interval of keepalives during other waits.
fn keepalive_interval() -> Interval {
    let mut keepalives = tokio::time::interval_at(Instant::now() + SWEEP_INTERVAL, SWEEP_INTERVAL);
    keepalives.set_missed_tick_behavior(MissedTickBehavior::Delay);
    keepalives
}

#[cfg(test)]
mod tests;
