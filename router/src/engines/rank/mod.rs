//! One data-parallel rank of an engine: the effect of its numbered messages, in order.
//!
//! An unreadable message counts as missing, since its removals are unknown. If messages are missing
//! and no replay returns them, no block counts as resident until it is stored again or proved by a
//! child. Without sockets or waiting: a wanted replay is a return value. Not here: delivery of
//! messages (`dial.rs`, `listen.rs`) and replay requests (`follow.rs`).

use bytes::Bytes;
use kvfleet_engine_events::events::{Dialect, EventSequence, LiveOutcome, ReplayOutcome, decode};

use super::aliases::{Aliases, Changes};
use super::metrics::RankMetrics;
use super::reporter::{ReportOutcome, ResidencyReporter};
use crate::view::residency::BATCH_BLOCKS_MAX;

/// One message of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EngineMessage {
    pub(super) number: u64,
    pub(super) payload: Bytes,
}

/// Next step after a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    /// Wait for the next message.
    Continue,
    /// Request a replay from this number, then receive the message again.
    Replay { from: u64 },
}

/// Next step of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayStep {
    /// Continue with its next message.
    Continue,
    /// Stop, and request it again from the last applied message.
    Retry,
    /// Stop: it is another process, so request everything.
    Restart,
}

/// State of one rank.
pub(super) struct RankState {
    dialect: Dialect,
    /// Rank number, which its messages carry.
    rank: u32,
    feed: EventSequence,
    aliases: Aliases,
    reporter: ResidencyReporter,
    metrics: RankMetrics,
    /// Whether another source reports a restart that no replay has confirmed or refuted.
    is_unconfirmed: bool,
    /// Last warning; each is logged once.
    last_warning: Option<String>,
}

impl RankState {
    pub(super) fn new(
        dialect: Dialect,
        rank: u32,
        aliases: Aliases,
        reporter: ResidencyReporter,
        metrics: RankMetrics,
    ) -> RankState {
        let feed = EventSequence::default();
        RankState {
            dialect,
            rank,
            feed,
            aliases,
            reporter,
            metrics,
            is_unconfirmed: false,
            last_warning: None,
        }
    }

    /// Number of the last applied message.
    pub(super) fn last(&self) -> Option<u64> {
        self.feed.last()
    }

    /// Whether a replay must confirm that the process is the same.
    pub(super) fn is_unconfirmed(&self) -> bool {
        self.is_unconfirmed
    }

    /// Records a new connection.
    pub(super) fn connected(&mut self) {
        self.feed.reset_connection();
    }

    /// Ends a replay attempt. Without confirmation, the sender may be another process, so earlier
    /// state is reset.
    pub(super) fn confirm(&mut self, is_confirmed: bool) {
        if !is_confirmed && self.feed.last().is_some() {
            self.reset_process();
        }
        if std::mem::take(&mut self.is_unconfirmed) {
            self.report_all();
        }
    }

    /// Receives a message of the live stream.
    pub(super) fn receive(&mut self, message: &EngineMessage) -> NextStep {
        let mut heard = self.feed.receive_live(message.number, &message.payload);
        if heard == LiveOutcome::Restarted {
            self.reset_process();
            heard = self.feed.receive_live(message.number, &message.payload);
        }
        match heard {
            LiveOutcome::Next => self.apply_payload(&message.payload, true),
            LiveOutcome::Gap { from } => return NextStep::Replay { from },
            LiveOutcome::Duplicate | LiveOutcome::Restarted => self.metrics.count_message("before"),
        }
        NextStep::Continue
    }

    /// Receives a live message after a gap and a replay attempt.
    pub(super) fn receive_after_replay(&mut self, message: &EngineMessage) {
        let was_heard = self.feed.last().is_some();
        if let NextStep::Replay { .. } = self.receive(message) {
            if was_heard {
                self.metrics.count_gap("lost");
                self.invalidate();
            }
            self.feed.start_at(message.number, &message.payload);
            self.apply_payload(&message.payload, true);
        } else {
            self.metrics.count_gap("filled");
        }
    }

    /// Starts a replay.
    pub(super) fn begin_replay(&mut self) {
        self.feed.begin_replay();
    }

    /// Receives a message of a replay.
    pub(super) fn receive_replayed(&mut self, message: &EngineMessage) -> ReplayStep {
        match self.feed.receive_replay(message.number, &message.payload) {
            ReplayOutcome::Duplicate => self.metrics.count_message("before"),
            ReplayOutcome::Next => self.apply_payload(&message.payload, false),
            ReplayOutcome::Hole => return ReplayStep::Retry,
            ReplayOutcome::Restarted => {
                self.reset_process();
                return ReplayStep::Restart;
            }
        }
        ReplayStep::Continue
    }

    /// Ends a replay. The publisher keeps its last message, so one without ours is another process.
    pub(super) fn end_replay(&mut self) -> ReplayStep {
        if self.feed.has_replayed() || self.feed.last().is_none() {
            return ReplayStep::Continue;
        }
        self.reset_process();
        ReplayStep::Restart
    }

    /// Reports that the engine is alive, and reports everything again if earlier reports no longer
    /// count.
    pub(super) fn keepalive(&mut self) {
        if !self.is_unconfirmed {
            let told = self.reporter.keepalive();
            self.handle_outcome(told);
        }
    }

    /// Resets all state, since the engine is another process.
    fn reset_process(&mut self) {
        self.metrics.count_restart();
        self.aliases.forget();
        self.feed.reset();
        self.reporter.restart();
    }

    /// Invalidates residency within the same process.
    fn invalidate(&mut self) {
        self.aliases.forget_resident();
        self.report_all();
    }

    fn report_all(&mut self) {
        match self.reporter.report(self.aliases.all()) {
            // Retry once under the new epoch; otherwise the next keepalive does it.
            ReportOutcome::Lost => {
                let _ = self.reporter.report(self.aliases.all());
            }
            told => self.handle_outcome(told),
        }
    }

    fn handle_outcome(&mut self, told: ReportOutcome) {
        match told {
            ReportOutcome::Applied { unlisted } => self.metrics.count_no_room(unlisted),
            ReportOutcome::Lost if self.is_unconfirmed => {}
            ReportOutcome::Lost => self.report_all(),
            // The instance reported a later start: only a replay shows whether that is the process
            // we know.
            ReportOutcome::Outdated => self.is_unconfirmed = true,
            ReportOutcome::TooManyBlocks => self.aliases.forget_resident(),
            // The next keepalive finds no reports and sends all.
            ReportOutcome::TooManyInstances => {}
        }
    }

    /// Applies the payload of a message.
    fn apply_payload(&mut self, payload: &[u8], is_live: bool) {
        let batch = match decode(payload, self.dialect) {
            Ok(batch) => batch,
            Err(error) => {
                self.metrics.count_message("unreadable");
                self.warn_once(
                    error.to_string(),
                    "cannot read events of an engine; its resident blocks are invalidated",
                );
                return self.invalidate();
            }
        };
        if let Some(rank) = batch.rank.filter(|rank| *rank != self.rank) {
            self.metrics.count_message("other_rank");
            let text = format!(
                "the events are of rank {rank}, but rank {} is expected: correct `first_rank` and `ranks`",
                self.rank
            );
            return self.warn_once(text, "events of an engine are ignored");
        }
        self.metrics.count_message("applied");
        self.metrics.count_unknown_events(batch.unknown_events);
        if is_live {
            self.metrics.record_lag(batch.at_s);
        }
        let mut changes = Changes::default();
        for event in &batch.events {
            self.aliases.apply_event(event, &mut changes);
            // A few bytes can add and remove many blocks.
            if changes.blocks() >= BATCH_BLOCKS_MAX {
                self.report(&mut changes);
            }
        }
        self.metrics.unmapped(self.aliases.take_unmapped());
        self.report(&mut changes);
    }

    fn report(&mut self, changes: &mut Changes) {
        if changes.blocks() > 0 {
            let told = self.reporter.report(changes.take());
            self.handle_outcome(told);
        }
    }

    fn warn_once(&mut self, text: String, what: &str) {
        if self.last_warning.as_ref() != Some(&text) {
            tracing::warn!(error = text, "{what}");
            self.last_warning = Some(text);
        }
    }
}

#[cfg(test)]
mod tests;
