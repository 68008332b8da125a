//! Which of several measured paths the fetches of a peer go over, time passed in.
//!
//! All go over the one in use, but for a *turn* now and then: a few fetches in a row over another one. So both are measured
//! with the same blocks under the same load, and no byte is moved for the measurement alone. Another path is taken into use after it
//! was clearly better in several turns one after the other. Not here: paths that fail (`breaker.rs`), and kinds that
//! are preferred without measuring (`path.rs`).

use std::time::Duration;

use tokio::time::Instant;

use super::PathKind;
use super::estimate::{Estimate, as_f64};
use super::reason::{Compared, Outcome, Reason};

/// When another path is tried, and when it is taken into use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceRules {
    /// Fetches of a turn.
    pub turn_fetches: u32,
    /// Time after which a turn ends with what it has.
    pub turn_max: Duration,
    /// Fetches over the path in use for each one of a turn: of all fetches, at most one in so many and one goes another way.
    pub fetches_between: u32,
    /// Time between turns at first, and again after each that was won.
    pub turns_every_min: Duration,
    /// Time between turns after many that were lost: each one doubles it.
    pub turns_every_max: Duration,
    /// What another path must take of the time of the one in use, at most, to win a turn.
    pub better: f64,
    /// Turns won in a row, after which the other path is the one in use.
    pub wins: u32,
    /// Fetches that must have counted before two paths are compared.
    pub fetches_min: u32,
}

impl Default for ChoiceRules {
    fn default() -> ChoiceRules {
        ChoiceRules {
            turn_fetches: 12,
            turn_max: Duration::from_secs(10),
            fetches_between: 8,
            turns_every_min: Duration::from_secs(2),
            turns_every_max: Duration::from_secs(300),
            // Two averages of a dozen fetches on a busy machine differ by a tenth for nothing.
            better: 0.8,
            wins: 2,
            fetches_min: 6,
        }
    }
}

/// A few fetches over a path that is not in use.
#[derive(Clone, Copy, Debug)]
struct Turn {
    at: usize,
    begun: Instant,
    given: u32,
    counted: u32,
}

/// What is known of a peer's measured paths, and what follows from it. Paths are told apart by their position.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    rules: ChoiceRules,
    kinds: Vec<PathKind>,
    estimates: Vec<Estimate>,
    in_use: usize,
    turn: Option<Turn>,
    last_turn: usize,
    next_turn: Instant,
    every: Duration,
    /// Turns won in a row by `last_turn`.
    won: u32,
    /// Fetches over the path in use since the last turn.
    since_turn: u32,
    /// Average size of a fetch, in bytes.
    usual_bytes: f64,
    reason: Reason,
}

impl Choice {
    /// The first path is the one in use until another one is better.
    pub(super) fn new(rules: ChoiceRules, kinds: Vec<PathKind>, now: Instant) -> Choice {
        Choice {
            rules,
            estimates: vec![Estimate::default(); kinds.len()],
            kinds,
            in_use: 0,
            turn: None,
            last_turn: 0,
            next_turn: now + rules.turns_every_min,
            every: rules.turns_every_min,
            won: 0,
            since_turn: 0,
            usual_bytes: 0.0,
            reason: Reason::Default,
        }
    }

    /// The path in use: what is not a fetch goes over it too.
    pub(super) fn in_use(&self) -> usize {
        self.in_use
    }

    pub(super) fn reason(&self) -> &Reason {
        &self.reason
    }

    pub(super) fn estimate(&self, at: usize) -> &Estimate {
        &self.estimates[at]
    }

    pub(super) fn pinged(&mut self, at: usize, took: Duration) {
        self.estimates[at].pinged(took);
    }

    /// Which path the next fetch takes of those that are usable; nothing when none is.
    pub(super) fn next_fetch(&mut self, now: Instant, usable: &[bool]) -> Option<usize> {
        self.end_turn_if_over(now);
        if let Some(turn) = self.turn.as_mut()
            && usable[turn.at]
            && turn.given < self.rules.turn_fetches
        {
            turn.given += 1;
            return Some(turn.at);
        }
        if let Some(at) = self.may_begin_turn(now, usable) {
            self.turn = Some(Turn { at, begun: now, given: 1, counted: 0 });
            if self.last_turn != at {
                self.won = 0;
            }
            self.last_turn = at;
            return Some(at);
        }
        self.usable(usable)
    }

    /// The path in use, or the first that can be used instead.
    pub(super) fn usable(&self, usable: &[bool]) -> Option<usize> {
        if usable[self.in_use] { Some(self.in_use) } else { usable.iter().position(|usable| *usable) }
    }

    fn may_begin_turn(&self, now: Instant, usable: &[bool]) -> Option<usize> {
        let between = self.rules.turn_fetches.saturating_mul(self.rules.fetches_between);
        let due = self.turn.is_none() && now >= self.next_turn && self.since_turn >= between;
        if !due || !usable[self.in_use] {
            return None;
        }
        // The others one after the other.
        let count = self.kinds.len();
        (1..=count).map(|step| (self.last_turn + step) % count).find(|at| *at != self.in_use && usable[*at])
    }

    /// A fetch of so many bytes, all of them from memory, took so long over this path.
    pub(super) fn fetched(&mut self, now: Instant, at: usize, bytes: u64, took: Duration) {
        self.estimates[at].fetched(bytes, took);
        let weight = if self.usual_bytes == 0.0 { 1.0 } else { 1.0 / 16.0 };
        self.usual_bytes += weight * (as_f64(bytes) - self.usual_bytes);
        self.count(now, at, true);
    }

    /// Of a fetch nothing came in all that time: one of the usual size would have taken longer. A time that was not longer than what
    /// is expected anyway says nothing, nor does any where nothing is expected: such a fetch is none of those that a turn compares.
    pub(super) fn late(&mut self, now: Instant, at: usize, took: Duration) {
        let bytes = self.usual_bytes();
        let says = self.estimates[at].expects(bytes).is_some_and(|expected| took > expected);
        if says {
            self.estimates[at].fetched(bytes, took);
        }
        self.count(now, at, says);
    }

    fn usual_bytes(&self) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an average of sizes
        let bytes = self.usual_bytes as u64;
        bytes
    }

    fn count(&mut self, now: Instant, at: usize, is_measured: bool) {
        match self.turn.as_mut() {
            Some(turn) if turn.at == at => turn.counted += u32::from(is_measured),
            _ if at == self.in_use => self.since_turn = self.since_turn.saturating_add(1),
            _ => {}
        }
        self.end_turn_if_over(now);
    }

    /// This path failed: it wins no turn.
    pub(super) fn failed(&mut self, now: Instant, at: usize) {
        if self.turn.is_some_and(|turn| turn.at == at) {
            self.reason = Reason::Failed { other: self.kinds[at] };
            self.lost_turn(now);
        }
    }

    fn end_turn_if_over(&mut self, now: Instant) {
        let Some(turn) = self.turn else { return };
        let all_counted = turn.counted >= self.rules.turn_fetches;
        if !all_counted && now.duration_since(turn.begun) < self.rules.turn_max {
            return;
        }
        let (used, other) = (&self.estimates[self.in_use], &self.estimates[turn.at]);
        let bytes = self.usual_bytes();
        let known =
            turn.counted >= self.rules.fetches_min && used.fetches() >= u64::from(self.rules.fetches_min);
        let Some((used, other)) = used.expects(bytes).zip(other.expects(bytes)).filter(|_| known) else {
            self.reason = Reason::TooFew { other: self.kinds[turn.at], fetches: turn.counted };
            return self.lost_turn(now);
        };
        let is_won = other.as_secs_f64() < used.as_secs_f64() * self.rules.better;
        let (in_use, tried) = (self.kinds[self.in_use], self.kinds[turn.at]);
        let of = |outcome| {
            Reason::Compared(Compared { outcome, bytes, used: (in_use, used), other: (tried, other) })
        };
        if !is_won {
            self.reason = of(Outcome::Stays);
            return self.lost_turn(now);
        }
        self.won += 1;
        self.end_turn(now, self.rules.turns_every_min);
        self.reason = of(if self.won < self.rules.wins { Outcome::Ahead } else { Outcome::Changed });
        if self.won >= self.rules.wins {
            (self.in_use, self.last_turn, self.won) = (turn.at, self.in_use, 0);
        }
    }

    fn lost_turn(&mut self, now: Instant) {
        self.won = 0;
        self.end_turn(now, self.every.saturating_mul(2).min(self.rules.turns_every_max));
    }

    fn end_turn(&mut self, now: Instant, every: Duration) {
        (self.turn, self.since_turn, self.every) = (None, 0, every);
        self.next_turn = now + every;
    }
}

#[cfg(test)]
#[path = "choice_tests.rs"]
mod tests;
