//! Follows one rank of an engine: takes what its connection brings, asks for replays, says that the engine is there while it is.
//!
//! A replay is asked for when a connection begins, when a message is missing, and after [`QUIET`], because the last messages of a
//! publisher may be lost without a next one to tell. Signs of life go on beside it. Not here: the connection (`dial.rs`, `listen.rs`), what
//! messages come to (`rank.rs`).

use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::zmtp::{Connection, Endpoint, Role, ZmtpError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::metrics::RankMetrics;
use super::rank::{Goes, Message, Rank, Wants};
use crate::view::residency::LOOK_EVERY;

/// Messages that wait to be read, each of any length there is; behind them TCP's window fills, and then the publisher drops.
pub(super) const QUEUE: usize = 4;

/// After this long without a message, an engine is asked whether it said something; each time that fails doubles it.
const QUIET: Duration = Duration::from_secs(5);

/// At most.
const QUIET_MAX: Duration = Duration::from_secs(60);

/// Replays in a row that bring something each and break off: a publisher with a slow reader drops what it replays.
const ATTEMPTS_MAX: usize = 64;

/// Longest between two messages of a replay: the publisher serves it between its own.
const REPLAY_QUIET: Duration = Duration::from_secs(5);

/// Most messages of one replay: ten times what vLLM keeps unless told otherwise.
const REPLAY_MESSAGES_MAX: usize = 100_000;

/// The number of the message that ends a replay.
const END: u64 = u64::MAX;

/// What a connection brings, and which.
#[derive(Debug)]
pub(super) struct Brought {
    pub(super) connection: u64,
    pub(super) what: What,
}

/// What a connection brings.
#[derive(Debug)]
pub(super) enum What {
    /// It is there, and everything said from here on is heard.
    Up,
    /// It is over.
    Down,
    /// A message.
    Message(Message),
}

/// Reads a message of the live stream.
pub(super) fn live(frames: &[Bytes]) -> Option<Message> {
    match frames {
        [_topic, number, payload] => message(number, payload),
        _ => None,
    }
}

/// Reads a message of a replay: some releases leave the topic out.
fn replayed(frames: &[Bytes]) -> Option<Message> {
    match frames {
        [delimiter, number, payload] | [delimiter, _, number, payload] if delimiter.is_empty() => {
            message(number, payload)
        }
        _ => None,
    }
}

fn message(number: &Bytes, payload: &Bytes) -> Option<Message> {
    let number = u64::from_be_bytes(number[..].try_into().ok()?);
    Some(Message { number, payload: payload.clone() })
}

/// Why a replay brought less than it could.
#[derive(Debug, thiserror::Error)]
enum ReplayError {
    #[error(transparent)]
    Socket(#[from] ZmtpError),
    #[error("the engine did not go on with a replay for {} s", REPLAY_QUIET.as_secs())]
    Quiet,
    #[error(
        "the engine answers a replay with frames that are none of a replay: is it the port of its replays?"
    )]
    Frames,
    #[error("a replay has more than {REPLAY_MESSAGES_MAX} messages, or does not come to its end")]
    Endless,
    #[error("messages are missing in a replay, and asking again does not bring them")]
    Hole,
}

/// One rank, and where it is asked.
pub(super) struct Follower {
    pub(super) rank: Rank,
    pub(super) replay: Option<Endpoint>,
    pub(super) metrics: RankMetrics,
    /// What was wrong with the last replay; each thing is said once.
    pub(super) said: Option<String>,
}

impl Follower {
    /// Runs until cancelled, or until nobody can bring anything any more.
    pub(super) async fn run(mut self, mut brought: mpsc::Receiver<Brought>, stop: CancellationToken) {
        let mut tick = tokio::time::interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The newest that stands; what an older one still brings is of nobody, or of who dialed again since.
        let mut current = None;
        let (mut heard_at, mut quiet) = (Instant::now(), QUIET);
        loop {
            let next = tokio::select! {
                () = stop.cancelled() => return,
                next = brought.recv() => Some(next),
                _ = tick.tick(), if current.is_some() => None,
            };
            match next {
                Some(None) => return,
                Some(Some(Brought { connection, what: What::Up })) if Some(connection) > current => {
                    current = Some(connection);
                    self.rank.connected();
                    let is_confirmed = self.ask(&stop).await;
                    self.rank.asked(is_confirmed);
                }
                Some(Some(Brought { connection, .. })) if Some(connection) != current => continue,
                Some(Some(Brought { what: What::Down, .. })) => current = None,
                Some(Some(Brought { what: What::Message(message), .. })) => self.hear(&message, &stop).await,
                Some(Some(Brought { what: What::Up, .. })) => {}
                None => {
                    if heard_at.elapsed() >= quiet || self.rank.is_doubted() {
                        let is_confirmed = self.ask(&stop).await;
                        if self.rank.is_doubted() {
                            self.rank.asked(is_confirmed);
                        }
                        quiet = if is_confirmed { QUIET } else { (2 * quiet).min(QUIET_MAX) };
                        heard_at = Instant::now();
                    }
                    self.rank.is_there();
                    continue;
                }
            }
            heard_at = Instant::now();
            self.metrics.connected(current.is_some());
        }
    }

    async fn hear(&mut self, message: &Message, stop: &CancellationToken) {
        if let Wants::Replay { .. } = self.rank.hear(message) {
            // Twice, for a connection that breaks.
            let _ = self.ask(stop).await || self.ask(stop).await;
            self.rank.hear_after_replay(message);
        }
    }

    /// Has everything replayed that is not known. Whether a replay came to its end, and so showed whose messages counted before.
    async fn ask(&mut self, stop: &CancellationToken) -> bool {
        let Some(endpoint) = self.replay.clone() else { return false };
        let asked = stop.run_until_cancelled(self.ask_all(&endpoint)).await;
        let Some(asked) = asked else { return true };
        let error = asked.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|error| self.said.as_ref() != Some(error)) {
            tracing::warn!(%endpoint, error, "an engine's events are not replayed");
        }
        self.said = error;
        self.said.is_none()
    }

    /// Asks again where a replay broke off, while each brings something.
    async fn ask_all(&mut self, endpoint: &Endpoint) -> Result<(), ReplayError> {
        for _ in 0..ATTEMPTS_MAX {
            let before = self.rank.last();
            match self.ask_from(endpoint, before.unwrap_or(0)).await? {
                Goes::On => return Ok(()),
                Goes::FromStart => {}
                Goes::Again if self.rank.last() > before => {}
                Goes::Again => return Err(ReplayError::Hole),
            }
        }
        Err(ReplayError::Endless)
    }

    async fn ask_from(&mut self, endpoint: &Endpoint, from: u64) -> Result<Goes, ReplayError> {
        let mut signs = signs_of_life();
        let connection = self.beside(&mut signs, Connection::dial(endpoint, Role::Dealer)).await?;
        self.ask_over(connection, from).await
    }

    async fn ask_over(
        &mut self,
        mut connection: Connection<impl AsyncRead + AsyncWrite + Unpin>,
        from: u64,
    ) -> Result<Goes, ReplayError> {
        connection.send(&[b"", &from.to_be_bytes()]).await?;
        self.rank.replay_begins();
        let mut signs = signs_of_life();
        for _ in 0..=REPLAY_MESSAGES_MAX {
            let frames = tokio::time::timeout(REPLAY_QUIET, connection.receive());
            let Ok(frames) = self.beside(&mut signs, frames).await else {
                // Who drops what it replays drops the end of it too.
                return if self.rank.last() > Some(from) { Ok(Goes::Again) } else { Err(ReplayError::Quiet) };
            };
            let message = replayed(&frames?).ok_or(ReplayError::Frames)?;
            if message.number == END {
                return Ok(self.rank.replay_ends());
            }
            match self.rank.replay(&message) {
                Goes::On => {}
                other => return Ok(other),
            }
        }
        Err(ReplayError::Endless)
    }

    /// Waits for something, with signs of life meanwhile; and between one thing and the next, if they come without a pause.
    async fn beside<T>(&mut self, signs: &mut Interval, waited_for: impl Future<Output = T>) -> T {
        let mut waited_for = std::pin::pin!(waited_for);
        loop {
            tokio::select! {
                biased;
                _ = signs.tick() => self.rank.is_there(),
                done = &mut waited_for => return done,
            }
        }
    }
}

/// When to say that an engine is there, while something else is waited for.
fn signs_of_life() -> Interval {
    let mut signs = tokio::time::interval_at(Instant::now() + LOOK_EVERY, LOOK_EVERY);
    signs.set_missed_tick_behavior(MissedTickBehavior::Delay);
    signs
}

#[cfg(test)]
mod tests;
