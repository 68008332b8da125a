//! One data-parallel rank of an engine: what its numbered messages come to, in the order in which they count.
//!
//! A message that cannot be read is one that is missing: nobody knows what it removed. Where messages are missing and no replay brings
//! them, everything the engine said is void, and it is known anew from there on. Without sockets and without waiting: that a replay is
//! wanted is an answer. Not here: who brings messages (`dial.rs`, `listen.rs`) and asks for replays (`follow.rs`).

use bytes::Bytes;
use kvfleet_proto::engine_events::{Dialect, Feed, Heard, Replayed, decode};

use super::aliases::Aliases;
use super::metrics::RankMetrics;
use super::teller::{Teller, Told};

/// One message of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) number: u64,
    pub(super) payload: Bytes,
}

/// What a message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// The next one.
    Nothing,
    /// A replay from this number on, and then to be heard again.
    Replay { from: u64 },
}

/// Where one rank stands.
pub(super) struct Rank {
    dialect: Dialect,
    /// Its number, if messages must have it.
    rank: u32,
    feed: Feed,
    aliases: Aliases,
    teller: Teller,
    metrics: RankMetrics,
    /// Whether the replay that runs has brought a message.
    is_replayed: bool,
    /// What was wrong with the last payload that could not be read; each thing is said once.
    said: Option<String>,
}

impl Rank {
    pub(super) fn new(
        (dialect, rank): (Dialect, u32),
        aliases: Aliases,
        teller: Teller,
        metrics: RankMetrics,
    ) -> Rank {
        let feed = Feed::default();
        Rank { dialect, rank, feed, aliases, teller, metrics, is_replayed: false, said: None }
    }

    /// Number of the last message that counted.
    pub(super) fn last(&self) -> Option<u64> {
        self.feed.last()
    }

    /// A message of the live stream.
    pub(super) fn hear(&mut self, message: &Message) -> Wants {
        let mut heard = self.feed.hear(message.number, &message.payload);
        if heard == Heard::Restarted {
            self.forget_process();
            heard = self.feed.hear(message.number, &message.payload);
        }
        match heard {
            Heard::Next => self.read(&message.payload),
            Heard::Gap { from } => return Wants::Replay { from },
            Heard::Before | Heard::Restarted => self.metrics.message("before"),
        }
        Wants::Nothing
    }

    /// A live message behind a gap, after whatever a replay brought.
    pub(super) fn hear_after_replay(&mut self, message: &Message) {
        if let Wants::Replay { .. } = self.hear(message) {
            self.metrics.gap("lost");
            self.void();
            self.feed.begin_at(message.number, &message.payload);
            self.read(&message.payload);
        } else {
            self.metrics.gap("filled");
        }
    }

    /// A replay begins.
    pub(super) fn replay_begins(&mut self) {
        self.feed.ask();
        self.is_replayed = false;
    }

    /// A message of a replay.
    pub(super) fn replay(&mut self, message: &Message) {
        self.is_replayed = true;
        match self.feed.replay(message.number, &message.payload) {
            Replayed::Before => return self.metrics.message("before"),
            Replayed::Anew => self.forget_process(),
            Replayed::Next => {}
        }
        self.read(&message.payload);
    }

    /// A replay came to its end. Whoever keeps messages keeps its last one: who does not have ours is another process.
    pub(super) fn replay_ends(&mut self) {
        if !self.is_replayed && self.feed.last().is_some() {
            self.forget_process();
            self.feed = Feed::default();
        }
    }

    /// Says that the engine is there, and tells everything again if what was told does not count any more.
    pub(super) fn is_there(&mut self) {
        if self.teller.is_there() == Told::Lost {
            self.tell_all();
        }
    }

    /// It is another process: what the one before said is void.
    fn forget_process(&mut self) {
        self.metrics.restarted();
        self.aliases.forget();
        self.teller.begin_anew();
    }

    /// What it said is void, though it is the same process.
    fn void(&mut self) {
        self.aliases.forget();
        self.tell_all();
    }

    fn tell_all(&mut self) {
        match self.teller.tell(self.aliases.all()) {
            Told::Counts => {}
            // Once more under the epoch that it was told; then the next sign of life does.
            Told::Lost => drop(self.teller.tell(self.aliases.all())),
            Told::TooMuch => self.aliases.forget(),
        }
    }

    /// Takes what a message says.
    fn read(&mut self, payload: &[u8]) {
        let batch = match decode(payload, self.dialect) {
            Ok(batch) => batch,
            Err(error) => {
                self.metrics.message("unreadable");
                let error = error.to_string();
                if self.said.as_ref() != Some(&error) {
                    tracing::warn!(
                        error,
                        "events of an engine cannot be read, and what it said before is void"
                    );
                    self.said = Some(error);
                }
                return self.void();
            }
        };
        if batch.rank.is_some_and(|rank| rank != self.rank) {
            return self.metrics.message("other_rank");
        }
        self.metrics.message("applied");
        self.metrics.unknown_events(batch.unknown_events);
        self.metrics.made_at(batch.at_s);
        let mut changes = Vec::new();
        batch.events.iter().for_each(|event| self.aliases.take(event, &mut changes));
        self.metrics.left_out(self.aliases.take_left_out());
        if changes.is_empty() {
            return;
        }
        match self.teller.tell(changes) {
            Told::Counts => {}
            Told::Lost => self.tell_all(),
            Told::TooMuch => self.void(),
        }
    }
}

#[cfg(test)]
mod tests;
