//! Follows one rank of an engine: takes what its connection brings, asks for replays, says that the engine is there while it is.
//!
//! A replay is asked for when a connection begins, when a message is missing, and after [`QUIET`], because the last messages of a
//! publisher may be lost without a next one to tell. Not here: the connection (`dial.rs`, `listen.rs`), what messages come to
//! (`rank.rs`).

use std::time::Duration;

use bytes::Bytes;
use kvfleet_proto::zmtp::{Connection, Endpoint, Role, ZmtpError};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::metrics::RankMetrics;
use super::rank::{Message, Rank, Wants};
use crate::view::residency::LOOK_EVERY;

/// Messages that wait to be read; behind them TCP's window fills, and then the publisher drops.
pub(super) const QUEUE: usize = 64;

/// After this long without a message, an engine is asked whether it said something.
const QUIET: Duration = Duration::from_secs(5);

/// Longest between two messages of a replay: the publisher serves it between its own.
const REPLAY_QUIET: Duration = Duration::from_secs(5);

/// Most messages of one replay: ten times what vLLM keeps unless told otherwise.
const REPLAY_MESSAGES_MAX: usize = 100_000;

/// The number of the message that ends a replay.
const END: u64 = u64::MAX;

/// What a connection brings.
#[derive(Debug)]
pub(super) enum Brought {
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
    #[error("the engine answers a replay with frames that are none")]
    Frames,
    #[error("a replay has more than {REPLAY_MESSAGES_MAX} messages")]
    Endless,
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
        let mut is_up = false;
        let mut heard_at = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                next = brought.recv() => {
                    heard_at = Instant::now();
                    match next {
                        None => return,
                        Some(Brought::Down) => is_up = false,
                        Some(Brought::Up) => {
                            is_up = true;
                            self.ask(&stop).await;
                        }
                        Some(Brought::Message(message)) => self.hear(message, &stop).await,
                    }
                    self.metrics.connected(is_up);
                }
                _ = tick.tick(), if is_up => {
                    if heard_at.elapsed() >= QUIET {
                        self.ask(&stop).await;
                        heard_at = Instant::now();
                    }
                    self.rank.is_there();
                }
            }
        }
    }

    async fn hear(&mut self, message: Message, stop: &CancellationToken) {
        if let Wants::Replay { .. } = self.rank.hear(&message) {
            self.ask(stop).await;
            self.rank.hear_after_replay(&message);
        }
    }

    /// Has everything replayed that is not known, and from the beginning if that shows another process.
    async fn ask(&mut self, stop: &CancellationToken) {
        let Some(endpoint) = self.replay.clone() else { return };
        let before = self.rank.last();
        let asked = async {
            self.ask_from(&endpoint, before.unwrap_or(0)).await?;
            if before.is_some() && self.rank.last().is_none() {
                self.ask_from(&endpoint, 0).await?;
            }
            Ok::<_, ReplayError>(())
        };
        let Some(asked) = stop.run_until_cancelled(asked).await else { return };
        let error = asked.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|error| self.said.as_ref() != Some(error)) {
            tracing::warn!(%endpoint, error, "an engine's events are not replayed");
        }
        self.said = error;
    }

    async fn ask_from(&mut self, endpoint: &Endpoint, from: u64) -> Result<(), ReplayError> {
        let mut connection = Connection::dial(endpoint, Role::Dealer).await?;
        connection.send(&[b"", &from.to_be_bytes()]).await?;
        self.rank.replay_begins();
        for _ in 0..=REPLAY_MESSAGES_MAX {
            let frames = tokio::time::timeout(REPLAY_QUIET, connection.receive()).await;
            let frames = frames.map_err(|_| ReplayError::Quiet)??;
            let message = replayed(&frames).ok_or(ReplayError::Frames)?;
            if message.number == END {
                self.rank.replay_ends();
                return Ok(());
            }
            self.rank.replay(&message);
        }
        Err(ReplayError::Endless)
    }
}
