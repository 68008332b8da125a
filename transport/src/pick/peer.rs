//! State of the paths to one peer, kept while paths come and go.
//!
//! Not here: the paths themselves (`path.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::breaker::Breaker;
use super::choice::PathChoice;
use super::{PathClass, PathKind, PathReport, PeerReport, PickReason, PickRules};
use crate::PathError;

/// Silence after which a fetch's path counts as failed: longer than the delays of a busy node or
/// client.
const SILENCE_MIN: Duration = Duration::from_millis(100);

/// Round trips that a fetch must have waited for its silence to count.
const ROUND_TRIPS: u32 = 4;

/// Total time that waiting fetches got no answer over a path. Concurrent fetches count once.
#[derive(Clone, Debug, Default)]
struct SilenceTracker {
    sum: Duration,
    until: Option<Instant>,
}

impl SilenceTracker {
    /// Adds a silent fetch's interval. Returns whether the sum is long enough; it then starts anew.
    fn add_interval(&mut self, since: Instant, now: Instant) -> bool {
        let counted = self.until.map_or(since, |until| until.max(since));
        self.sum += now.saturating_duration_since(counted);
        self.until = Some(now);
        let is_long = self.sum >= SILENCE_MIN;
        if is_long {
            self.sum = Duration::ZERO;
        }
        is_long
    }
}

/// State of one peer. Paths are identified by position, those of the network last.
pub(super) struct PeerPaths {
    address: String,
    kinds: Vec<PathKind>,
    /// Position of the first measured path.
    first_measured: usize,
    state: Mutex<PeerState>,
}

struct PeerState {
    breakers: Vec<Breaker>,
    /// The choice among the network's paths.
    choice: PathChoice,
    errors: Vec<Option<PathError>>,
    silences: Vec<SilenceTracker>,
    /// The preferred path (of a better class than the network) of the last operation, if it used
    /// one.
    preferred: Option<usize>,
    /// The path used in place of the network's current one, if the last operation could not use
    /// that.
    fallback: Option<usize>,
}

impl PeerPaths {
    pub(super) fn new(address: String, kinds: Vec<PathKind>, rules: &PickRules, now: Instant) -> PeerPaths {
        let first_measured = kinds.iter().take_while(|kind| kind.path_class() < PathClass::Network).count();
        let known = PeerState {
            breakers: vec![Breaker::new(rules.breaker); kinds.len()],
            choice: PathChoice::new(rules.choice, kinds[first_measured..].to_vec(), now),
            errors: vec![None; kinds.len()],
            silences: vec![SilenceTracker::default(); kinds.len()],
            preferred: None,
            fallback: None,
        };
        PeerPaths { address, kinds, first_measured, state: Mutex::new(known) }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    fn state(&self) -> MutexGuard<'_, PeerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path of the next operation among the open ones; `None` if none is open. Only fetches
    /// take part in trials.
    pub(super) fn pick(&self, now: Instant, open: &[bool], is_fetch: bool) -> Option<usize> {
        let mut known = self.state();
        let usable: Vec<bool> =
            open.iter().enumerate().map(|(at, open)| *open && known.breakers[at].is_closed()).collect();
        known.preferred = usable[..self.first_measured].iter().position(|usable| *usable);
        if known.preferred.is_some() {
            return known.preferred;
        }
        let measured = &usable[self.first_measured..];
        let (mut picked, mut used) = (None, None);
        if !measured.is_empty() {
            picked = is_fetch.then(|| known.choice.next_fetch(now, measured)).flatten();
            used = known.choice.current_or_fallback(measured);
        }
        // If all are suspended, an open one is better than none.
        let of_all = |at: Option<usize>| {
            at.map(|at| at + self.first_measured).or_else(|| open.iter().position(|open| *open))
        };
        let in_use = self.first_measured + known.choice.current();
        known.fallback = of_all(used).filter(|at| *at != in_use);
        of_all(picked.or(used))
    }

    /// The paths in dial order: better classes first, then the current one. Suspended ones are left
    /// out, unless all are.
    pub(super) fn dial_order(&self, now: Instant) -> Vec<usize> {
        let mut known = self.state();
        let in_use = known.choice.current() + self.first_measured;
        let mut order: Vec<usize> = (0..self.kinds.len()).collect();
        order.sort_by_key(|at| (self.kinds[*at].path_class(), *at != in_use));
        let passing: Vec<usize> =
            order.iter().copied().filter(|at| known.breakers[*at].allows(now)).collect();
        if passing.is_empty() { order } else { passing }
    }

    /// Whether this path may be dialed in the background.
    pub(super) fn allows_trial(&self, now: Instant, at: usize) -> bool {
        self.state().breakers[at].allows(now)
    }

    /// Whether this path's breaker is closed.
    pub(super) fn is_healthy(&self, at: usize) -> bool {
        self.state().breakers[at].is_closed()
    }

    /// Records an operation that succeeded, or another sign of life.
    pub(super) fn record_success(&self, at: usize) {
        self.update_breaker(at, Breaker::record_success);
    }

    /// Records a fetch that delivered data.
    pub(super) fn record_delivery(&self, at: usize) {
        self.state().silences[at] = SilenceTracker::default();
        self.update_breaker(at, Breaker::record_delivery);
    }

    fn update_breaker(&self, at: usize, note: fn(&mut Breaker)) {
        let mut known = self.state();
        let was_closed = known.breakers[at].is_closed();
        note(&mut known.breakers[at]);
        if !was_closed && known.breakers[at].is_closed() {
            drop(known);
            tracing::info!(peer = self.address, path = self.kinds[at].name(), "a path works again");
        }
    }

    pub(super) fn record_failure(&self, now: Instant, at: usize, error: &PathError) {
        self.update_failure((now, at), error, Breaker::record_failure);
    }

    /// Records a fetch that got no answer over this path since `since`. A wait of less than a few
    /// round trips is ignored, and short waits are added up.
    pub(super) fn record_silence(&self, now: Instant, at: usize, since: Instant) {
        let after = now.saturating_duration_since(since);
        let mut known = self.state();
        let measured = at.checked_sub(self.first_measured);
        let latency = measured.and_then(|at| known.choice.estimate(at).latency()).unwrap_or_default();
        if after < latency.saturating_mul(ROUND_TRIPS) || !known.silences[at].add_interval(since, now) {
            return;
        }
        drop(known);
        let error = PathError::TimedOut { peer: self.address.clone(), after };
        self.update_failure((now, at), &error, Breaker::record_silence);
    }

    fn update_failure(
        &self,
        (now, at): (Instant, usize),
        error: &PathError,
        note: fn(&mut Breaker, Instant) -> bool,
    ) {
        let mut known = self.state();
        let was_closed = known.breakers[at].is_closed();
        let opened = note(&mut known.breakers[at], now) && was_closed;
        known.errors[at] = Some(error.clone());
        if let Some(measured) = at.checked_sub(self.first_measured) {
            known.choice.record_failure(now, measured);
        }
        drop(known);
        let path = self.kinds[at].name();
        // A single path is never suspended, since there is no alternative.
        if opened && self.kinds.len() > 1 {
            tracing::info!(peer = self.address, path, %error, "a path failed and is suspended");
        } else {
            tracing::debug!(peer = self.address, path, %error, "a path failed");
        }
    }

    /// Records a fetch of `bytes` from DRAM.
    pub(super) fn record_fetch(&self, now: Instant, at: usize, bytes: u64, took: Duration) {
        self.update_choice(at, |choice, at| choice.record_fetch(now, at, bytes, took));
    }

    /// Records a fetch without any data in `took`.
    pub(super) fn record_late_fetch(&self, now: Instant, at: usize, took: Duration) {
        self.update_choice(at, |choice, at| choice.record_late_fetch(now, at, took));
    }

    fn update_choice(&self, at: usize, note: impl FnOnce(&mut PathChoice, usize)) {
        let Some(measured) = at.checked_sub(self.first_measured) else { return };
        let mut known = self.state();
        let before = known.choice.current();
        note(&mut known.choice, measured);
        if known.choice.current() != before {
            let reason = known.choice.reason().clone();
            drop(known);
            tracing::info!(peer = self.address, %reason, "blocks go over another path");
        }
    }

    pub(super) fn record_ping(&self, at: usize, took: Duration) {
        if let Some(measured) = at.checked_sub(self.first_measured) {
            self.state().choice.record_ping(measured, took);
        }
    }

    /// The path of fetches outside trials. Without measured paths, the first one.
    fn used_kind(&self, known: &PeerState) -> PathKind {
        let in_use =
            known.preferred.or(known.fallback).unwrap_or(self.first_measured + known.choice.current());
        *self.kinds.get(in_use).unwrap_or(&self.kinds[0])
    }

    pub(super) fn report(&self) -> PeerReport {
        let known = self.state();
        let path = |(at, kind): (usize, &PathKind)| {
            let estimate = at.checked_sub(self.first_measured).map(|at| known.choice.estimate(at));
            PathReport {
                kind: *kind,
                is_suspended: !known.breakers[at].is_closed(),
                latency: estimate.and_then(super::estimate::PathEstimate::latency),
                bytes_per_second: estimate.and_then(super::estimate::PathEstimate::bytes_per_second),
                fetches: estimate.map_or(0, super::estimate::PathEstimate::fetches),
                error: known.errors[at].as_ref().map(ToString::to_string),
            }
        };
        let fallback_reason = || {
            let other = self.kinds.get(self.first_measured + known.choice.current());
            known.fallback.and(other).map(|other| PickReason::Fallback { other: *other })
        };
        let reason = known.preferred.map(|_| PickReason::Preferred).or_else(fallback_reason);
        let reason = reason.unwrap_or_else(|| known.choice.reason().clone());
        PeerReport {
            peer: self.address.clone(),
            used: self.used_kind(&known),
            reason,
            paths: self.kinds.iter().enumerate().map(path).collect(),
        }
    }
}
