//! One data-parallel rank of an engine: what its numbered messages come to, in the order in which they count.
//!
//! A message that cannot be read is one that is missing: nobody knows what it removed. Where messages are missing and no replay brings
//! them, nothing counts as resident until it is said again, or proved by what is stored behind it. Without sockets and without waiting: that a replay is
//! wanted is an answer. Not here: who brings messages (`dial.rs`, `listen.rs`) and asks for replays (`follow.rs`).

use bytes::Bytes;
use kvfleet_proto::engine_events::{Dialect, Feed, Heard, Replayed, decode};

use super::aliases::{Aliases, Changes};
use super::metrics::RankMetrics;
use super::teller::{Teller, Told};
use crate::view::residency::BATCH_BLOCKS_MAX;

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

/// How a replay goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goes {
    /// With its next message.
    On,
    /// Not: what follows is to be asked for again, from the last that counted.
    Again,
    /// Not: it is another process, and everything is to be asked for.
    FromStart,
}

/// Where one rank stands.
pub(super) struct Rank {
    dialect: Dialect,
    /// Its number among the ranks of its engine, which messages have.
    rank: u32,
    feed: Feed,
    aliases: Aliases,
    teller: Teller,
    metrics: RankMetrics,
    /// Whether it may be another process than the one that was heard, as somebody else says.
    is_doubted: bool,
    /// What was wrong with the last message that could not be taken; each thing is said once.
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
        Rank { dialect, rank, feed, aliases, teller, metrics, is_doubted: false, said: None }
    }

    /// Number of the last message that counted.
    pub(super) fn last(&self) -> Option<u64> {
        self.feed.last()
    }

    /// Whether a replay must show that it is the process that was heard.
    pub(super) fn is_doubted(&self) -> bool {
        self.is_doubted
    }

    /// Another connection stands.
    pub(super) fn connected(&mut self) {
        self.feed.connected();
    }

    /// A replay was heard to its end, or cannot be: without one, whoever speaks now may be another process.
    pub(super) fn asked(&mut self, is_confirmed: bool) {
        if !is_confirmed && self.feed.last().is_some() {
            self.forget_process();
        }
        if std::mem::take(&mut self.is_doubted) {
            self.tell_all();
        }
    }

    /// A message of the live stream.
    pub(super) fn hear(&mut self, message: &Message) -> Wants {
        let mut heard = self.feed.hear(message.number, &message.payload);
        if heard == Heard::Restarted {
            self.forget_process();
            heard = self.feed.hear(message.number, &message.payload);
        }
        match heard {
            Heard::Next => self.read(&message.payload, true),
            Heard::Gap { from } => return Wants::Replay { from },
            Heard::Before | Heard::Restarted => self.metrics.message("before"),
        }
        Wants::Nothing
    }

    /// A live message behind a gap, after whatever a replay brought.
    pub(super) fn hear_after_replay(&mut self, message: &Message) {
        let was_heard = self.feed.last().is_some();
        if let Wants::Replay { .. } = self.hear(message) {
            if was_heard {
                self.metrics.gap("lost");
                self.void();
            }
            self.feed.begin_at(message.number, &message.payload);
            self.read(&message.payload, true);
        } else {
            self.metrics.gap("filled");
        }
    }

    /// A replay begins.
    pub(super) fn replay_begins(&mut self) {
        self.feed.ask();
    }

    /// A message of a replay.
    pub(super) fn replay(&mut self, message: &Message) -> Goes {
        match self.feed.replay(message.number, &message.payload) {
            Replayed::Before => self.metrics.message("before"),
            Replayed::Next => self.read(&message.payload, false),
            Replayed::Hole => return Goes::Again,
            Replayed::Anew => {
                self.forget_process();
                return Goes::FromStart;
            }
        }
        Goes::On
    }

    /// A replay came to its end. Whoever keeps messages keeps its last one: who does not have ours is another process.
    pub(super) fn replay_ends(&mut self) -> Goes {
        if self.feed.is_replayed() || self.feed.last().is_none() {
            return Goes::On;
        }
        self.forget_process();
        Goes::FromStart
    }

    /// Says that the engine is there, and tells everything again if what was told does not count any more.
    pub(super) fn is_there(&mut self) {
        if !self.is_doubted {
            let told = self.teller.is_there();
            self.told(told);
        }
    }

    /// It is another process: what the one before said is void.
    fn forget_process(&mut self) {
        self.metrics.restarted();
        self.aliases.forget();
        self.feed.forget();
        self.teller.begin_anew();
    }

    /// Nobody knows what is resident, though it is the same process.
    fn void(&mut self) {
        self.aliases.forget_resident();
        self.tell_all();
    }

    fn tell_all(&mut self) {
        match self.teller.tell(self.aliases.all()) {
            // Once more under what was learnt by it; then the next sign of life does.
            Told::Lost => {
                let _ = self.teller.tell(self.aliases.all());
            }
            told => self.told(told),
        }
    }

    fn told(&mut self, told: Told) {
        match told {
            Told::Counts { unlisted } => self.metrics.no_room(unlisted),
            Told::Lost if self.is_doubted => {}
            Told::Lost => self.tell_all(),
            // It has said since that it started: only a replay shows whether that is what was heard.
            Told::Outdated => self.is_doubted = true,
            Told::TooMuch => self.aliases.forget_resident(),
            // The next sign of life finds nothing told, and tells all.
            Told::NoPlace => {}
        }
    }

    /// Takes what a message says.
    fn read(&mut self, payload: &[u8], is_live: bool) {
        let batch = match decode(payload, self.dialect) {
            Ok(batch) => batch,
            Err(error) => {
                self.metrics.message("unreadable");
                self.say_once(
                    error.to_string(),
                    "events of an engine cannot be read, and what it has is not known any more",
                );
                return self.void();
            }
        };
        if let Some(rank) = batch.rank.filter(|rank| *rank != self.rank) {
            self.metrics.message("other_rank");
            let text = format!(
                "they are of rank {rank}, and rank {} was expected: correct `first_rank` and `ranks`",
                self.rank
            );
            return self.say_once(text, "events of an engine are left out");
        }
        self.metrics.message("applied");
        self.metrics.unknown_events(batch.unknown_events);
        if is_live {
            self.metrics.made_at(batch.at_s);
        }
        let mut changes = Changes::default();
        for event in &batch.events {
            self.aliases.take(event, &mut changes);
            // A few words can make many blocks come and go.
            if changes.blocks() >= BATCH_BLOCKS_MAX {
                self.tell(&mut changes);
            }
        }
        self.metrics.left_out(self.aliases.take_left_out());
        self.tell(&mut changes);
    }

    fn tell(&mut self, changes: &mut Changes) {
        if changes.blocks() > 0 {
            let told = self.teller.tell(changes.take());
            self.told(told);
        }
    }

    fn say_once(&mut self, text: String, what: &str) {
        if self.said.as_ref() != Some(&text) {
            tracing::warn!(error = text, "{what}");
            self.said = Some(text);
        }
    }
}

#[cfg(test)]
mod tests;
