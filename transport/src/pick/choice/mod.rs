//! Chooses among several measured paths for the fetches of a peer; the caller passes the time in.
//!
//! All fetches use the current path, except for an occasional *trial*: a few fetches in a row over
//! another path. So both are measured with the same blocks under the same load, and no byte is
//! moved for the measurement alone. Another path becomes current after it was clearly better in
//! several consecutive trials. Not here: failing paths (`breaker.rs`), and kinds preferred without
//! measuring (`path.rs`).

use std::time::Duration;

use tokio::time::Instant;

use super::PathKind;
use super::estimate::{PathEstimate, as_f64};
use super::reason::{Comparison, ComparisonOutcome, PickReason};

/// When to try another path, and when to switch to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceRules {
    /// Fetches of a trial.
    pub trial_fetches: u32,
    /// Time after which a trial ends with the fetches it has.
    pub trial_max: Duration,
    /// Fetches over the current path per fetch of a trial. It bounds the share of fetches that use
    /// another path.
    pub fetches_between_trials: u32,
    /// Time between trials at first, and again after each won trial.
    pub trial_interval_min: Duration,
    /// Longest time between trials; each lost one doubles it.
    pub trial_interval_max: Duration,
    /// Another path wins a trial if its time is below this fraction of the current path's.
    pub win_ratio: f64,
    /// Consecutive wins after which the other path becomes current.
    pub wins_needed: u32,
    /// Measured fetches needed before two paths are compared.
    pub fetches_min: u32,
}

impl Default for ChoiceRules {
    fn default() -> ChoiceRules {
        ChoiceRules {
            trial_fetches: 12,
            trial_max: Duration::from_secs(10),
            fetches_between_trials: 8,
            trial_interval_min: Duration::from_secs(2),
            trial_interval_max: Duration::from_secs(300),
            // On a busy machine, averages of a dozen fetches differ by a tenth by chance.
            win_ratio: 0.8,
            wins_needed: 2,
            fetches_min: 6,
        }
    }
}

/// A trial: a few fetches over a path other than the current one.
#[derive(Clone, Copy, Debug)]
struct PathTrial {
    path: usize,
    started: Instant,
    assigned: u32,
    measured: u32,
}

/// The measured paths of a peer and the choice among them. Paths are identified by position.
#[derive(Clone, Debug)]
pub(super) struct PathChoice {
    rules: ChoiceRules,
    kinds: Vec<PathKind>,
    estimates: Vec<PathEstimate>,
    current: usize,
    trial: Option<PathTrial>,
    last_trial: usize,
    next_trial: Instant,
    trial_interval: Duration,
    /// Consecutive wins of `last_trial`.
    consecutive_wins: u32,
    /// Fetches over the current path since the last trial.
    fetches_since_trial: u32,
    /// Average size of a fetch, in bytes.
    mean_bytes: f64,
    reason: PickReason,
}

impl PathChoice {
    /// A choice that starts with the first path.
    pub(super) fn new(rules: ChoiceRules, kinds: Vec<PathKind>, now: Instant) -> PathChoice {
        PathChoice {
            rules,
            estimates: vec![PathEstimate::default(); kinds.len()],
            kinds,
            current: 0,
            trial: None,
            last_trial: 0,
            next_trial: now + rules.trial_interval_min,
            trial_interval: rules.trial_interval_min,
            consecutive_wins: 0,
            fetches_since_trial: 0,
            mean_bytes: 0.0,
            reason: PickReason::Default,
        }
    }

    /// The current path, which operations other than fetches use too.
    pub(super) fn current(&self) -> usize {
        self.current
    }

    pub(super) fn reason(&self) -> &PickReason {
        &self.reason
    }

    pub(super) fn estimate(&self, at: usize) -> &PathEstimate {
        &self.estimates[at]
    }

    pub(super) fn record_ping(&mut self, at: usize, took: Duration) {
        self.estimates[at].record_ping(took);
    }

    /// The path of the next fetch among the usable ones; `None` if none is usable.
    pub(super) fn next_fetch(&mut self, now: Instant, usable: &[bool]) -> Option<usize> {
        self.end_trial_if_over(now);
        if let Some(turn) = self.trial.as_mut()
            && usable[turn.path]
            && turn.assigned < self.rules.trial_fetches
        {
            turn.assigned += 1;
            return Some(turn.path);
        }
        if let Some(at) = self.trial_due(now, usable) {
            self.trial = Some(PathTrial { path: at, started: now, assigned: 1, measured: 0 });
            if self.last_trial != at {
                self.consecutive_wins = 0;
            }
            self.last_trial = at;
            return Some(at);
        }
        self.current_or_fallback(usable)
    }

    /// The current path, or the first usable one instead.
    pub(super) fn current_or_fallback(&self, usable: &[bool]) -> Option<usize> {
        if usable[self.current] { Some(self.current) } else { usable.iter().position(|usable| *usable) }
    }

    fn trial_due(&self, now: Instant, usable: &[bool]) -> Option<usize> {
        let between = self.rules.trial_fetches.saturating_mul(self.rules.fetches_between_trials);
        let due = self.trial.is_none() && now >= self.next_trial && self.fetches_since_trial >= between;
        if !due || !usable[self.current] {
            return None;
        }
        // The other paths take turns.
        let count = self.kinds.len();
        (1..=count).map(|step| (self.last_trial + step) % count).find(|at| *at != self.current && usable[*at])
    }

    /// Records a fetch of `bytes`, all from DRAM, over this path.
    pub(super) fn record_fetch(&mut self, now: Instant, at: usize, bytes: u64, took: Duration) {
        self.estimates[at].record_fetch(bytes, took);
        let weight = if self.mean_bytes == 0.0 { 1.0 } else { 1.0 / 16.0 };
        self.mean_bytes += weight * (as_f64(bytes) - self.mean_bytes);
        self.count_fetch(now, at, true);
    }

    /// Records a fetch without any data in `took`, which counts as a lower bound for one of the
    /// usual size. If `took` does not exceed the expected time, or there is none yet, the fetch is
    /// not measured.
    pub(super) fn record_late_fetch(&mut self, now: Instant, at: usize, took: Duration) {
        let bytes = self.mean_bytes();
        let says = self.estimates[at].expected_time(bytes).is_some_and(|expected| took > expected);
        if says {
            self.estimates[at].record_fetch(bytes, took);
        }
        self.count_fetch(now, at, says);
    }

    fn mean_bytes(&self) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an average of sizes
        let bytes = self.mean_bytes as u64;
        bytes
    }

    fn count_fetch(&mut self, now: Instant, at: usize, is_measured: bool) {
        match self.trial.as_mut() {
            Some(turn) if turn.path == at => turn.measured += u32::from(is_measured),
            _ if at == self.current => self.fetches_since_trial = self.fetches_since_trial.saturating_add(1),
            _ => {}
        }
        self.end_trial_if_over(now);
    }

    /// Records a failure of this path: it loses its trial.
    pub(super) fn record_failure(&mut self, now: Instant, at: usize) {
        if self.trial.is_some_and(|turn| turn.path == at) {
            self.reason = PickReason::TrialFailed { other: self.kinds[at] };
            self.end_lost_trial(now);
        }
    }

    fn end_trial_if_over(&mut self, now: Instant) {
        let Some(turn) = self.trial else { return };
        let all_counted = turn.measured >= self.rules.trial_fetches;
        if !all_counted && now.duration_since(turn.started) < self.rules.trial_max {
            return;
        }
        let (used, other) = (&self.estimates[self.current], &self.estimates[turn.path]);
        let bytes = self.mean_bytes();
        let known =
            turn.measured >= self.rules.fetches_min && used.fetches() >= u64::from(self.rules.fetches_min);
        let Some((used, other)) = used.expected_time(bytes).zip(other.expected_time(bytes)).filter(|_| known)
        else {
            self.reason = PickReason::TooFewFetches { other: self.kinds[turn.path], fetches: turn.measured };
            return self.end_lost_trial(now);
        };
        let is_won = other.as_secs_f64() < used.as_secs_f64() * self.rules.win_ratio;
        let (in_use, tried) = (self.kinds[self.current], self.kinds[turn.path]);
        let of = |outcome| {
            PickReason::Compared(Comparison { outcome, bytes, used: (in_use, used), other: (tried, other) })
        };
        if !is_won {
            self.reason = of(ComparisonOutcome::Kept);
            return self.end_lost_trial(now);
        }
        self.consecutive_wins += 1;
        self.end_trial(now, self.rules.trial_interval_min);
        self.reason = of(if self.consecutive_wins < self.rules.wins_needed {
            ComparisonOutcome::Leading
        } else {
            ComparisonOutcome::Switched
        });
        if self.consecutive_wins >= self.rules.wins_needed {
            (self.current, self.last_trial, self.consecutive_wins) = (turn.path, self.current, 0);
        }
    }

    fn end_lost_trial(&mut self, now: Instant) {
        self.consecutive_wins = 0;
        self.end_trial(now, self.trial_interval.saturating_mul(2).min(self.rules.trial_interval_max));
    }

    fn end_trial(&mut self, now: Instant, every: Duration) {
        (self.trial, self.fetches_since_trial, self.trial_interval) = (None, 0, every);
        self.next_trial = now + every;
    }
}

#[cfg(test)]
mod tests;
