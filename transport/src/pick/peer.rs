//! What is known of the ways to one peer, kept while paths to it come and go.
//!
//! Not here: the paths themselves (`path.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::breaker::Breaker;
use super::choice::Choice;
use super::{Class, PathKind, PathReport, PeerReport, PickRules, Reason};
use crate::PathError;

/// How long a fetch hears nothing before its way counts as one that failed: longer than a busy node or client takes to come to it.
const SILENCE_MIN: Duration = Duration::from_millis(100);

/// What a fetch must have waited, in round trips, for its silence to say something.
const ROUND_TRIPS: u32 = 4;

/// For how long fetches that wait heard nothing over a way. A moment in which several wait is one.
#[derive(Clone, Debug, Default)]
struct Silence {
    sum: Duration,
    until: Option<Instant>,
}

impl Silence {
    /// One heard nothing from then on. Whether that is long enough, by itself or with those since the last that was.
    fn lasts(&mut self, since: Instant, now: Instant) -> bool {
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

/// Knowledge of one peer. Ways are told apart by their position, those of the network last.
pub(super) struct Peer {
    address: String,
    kinds: Vec<PathKind>,
    /// Position of the first way that is measured.
    first_measured: usize,
    known: Mutex<Known>,
}

struct Known {
    breakers: Vec<Breaker>,
    /// Of the network's ways only.
    choice: Choice,
    errors: Vec<Option<PathError>>,
    silences: Vec<Silence>,
    /// A way of a better class than the network's, when the last operation took one.
    nearer: Option<usize>,
    /// What went for the network's way in use, when the last operation could not take that.
    stands_in: Option<usize>,
}

impl Peer {
    pub(super) fn new(address: String, kinds: Vec<PathKind>, rules: &PickRules, now: Instant) -> Peer {
        let first_measured = kinds.iter().take_while(|kind| kind.class() < Class::Network).count();
        let known = Known {
            breakers: vec![Breaker::new(rules.breaker); kinds.len()],
            choice: Choice::new(rules.choice, kinds[first_measured..].to_vec(), now),
            errors: vec![None; kinds.len()],
            silences: vec![Silence::default(); kinds.len()],
            nearer: None,
            stands_in: None,
        };
        Peer { address, kinds, first_measured, known: Mutex::new(known) }
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which way the next operation takes, of those that are open; nothing when none is. Only fetches take turns.
    pub(super) fn pick(&self, now: Instant, open: &[bool], is_fetch: bool) -> Option<usize> {
        let mut known = self.known();
        let usable: Vec<bool> =
            open.iter().enumerate().map(|(at, open)| *open && known.breakers[at].is_closed()).collect();
        known.nearer = usable[..self.first_measured].iter().position(|usable| *usable);
        if known.nearer.is_some() {
            return known.nearer;
        }
        let measured = &usable[self.first_measured..];
        let (mut picked, mut used) = (None, None);
        if !measured.is_empty() {
            picked = is_fetch.then(|| known.choice.next_fetch(now, measured)).flatten();
            used = known.choice.usable(measured);
        }
        // Where all were left alone, one that is open is better than none.
        let of_all = |at: Option<usize>| {
            at.map(|at| at + self.first_measured).or_else(|| open.iter().position(|open| *open))
        };
        let in_use = self.first_measured + known.choice.in_use();
        known.stands_in = of_all(used).filter(|at| *at != in_use);
        of_all(picked.or(used))
    }

    /// The ways in the order in which they are to be dialled: better classes first, then the one in use. Those that are
    /// left alone are left out, unless there is nothing else.
    pub(super) fn dial_order(&self, now: Instant) -> Vec<usize> {
        let mut known = self.known();
        let in_use = known.choice.in_use() + self.first_measured;
        let mut order: Vec<usize> = (0..self.kinds.len()).collect();
        order.sort_by_key(|at| (self.kinds[*at].class(), *at != in_use));
        let passing: Vec<usize> =
            order.iter().copied().filter(|at| known.breakers[*at].passes(now)).collect();
        if passing.is_empty() { order } else { passing }
    }

    /// Whether this way may be dialled behind everybody's back.
    pub(super) fn may_dial(&self, now: Instant, at: usize) -> bool {
        self.known().breakers[at].passes(now)
    }

    /// Whether nothing is known against this way.
    pub(super) fn is_closed(&self, at: usize) -> bool {
        self.known().breakers[at].is_closed()
    }

    /// A way did what was asked, or is there at least.
    pub(super) fn succeeded(&self, at: usize) {
        self.works(at, Breaker::succeeded);
    }

    /// A fetch brought something.
    pub(super) fn brought(&self, at: usize) {
        self.known().silences[at] = Silence::default();
        self.works(at, Breaker::brought);
    }

    fn works(&self, at: usize, note: fn(&mut Breaker)) {
        let mut known = self.known();
        let was_closed = known.breakers[at].is_closed();
        note(&mut known.breakers[at]);
        if !was_closed && known.breakers[at].is_closed() {
            drop(known);
            tracing::info!(peer = self.address, path = self.kinds[at].name(), "a path works again");
        }
    }

    pub(super) fn failed(&self, now: Instant, at: usize, error: &PathError) {
        self.fails((now, at), error, Breaker::failed);
    }

    /// A fetch that was asked over this way heard nothing since then. Who waits for less than a few round trips says nothing by that, and
    /// those that wait for no long time count together.
    pub(super) fn unheard(&self, now: Instant, at: usize, since: Instant) {
        let after = now.saturating_duration_since(since);
        let mut known = self.known();
        let measured = at.checked_sub(self.first_measured);
        let latency = measured.and_then(|at| known.choice.estimate(at).latency()).unwrap_or_default();
        if after < latency.saturating_mul(ROUND_TRIPS) || !known.silences[at].lasts(since, now) {
            return;
        }
        drop(known);
        let error = PathError::TimedOut { peer: self.address.clone(), after };
        self.fails((now, at), &error, Breaker::unheard);
    }

    fn fails(&self, (now, at): (Instant, usize), error: &PathError, note: fn(&mut Breaker, Instant) -> bool) {
        let mut known = self.known();
        let was_closed = known.breakers[at].is_closed();
        let opened = note(&mut known.breakers[at], now) && was_closed;
        known.errors[at] = Some(error.clone());
        if let Some(measured) = at.checked_sub(self.first_measured) {
            known.choice.failed(now, measured);
        }
        drop(known);
        let path = self.kinds[at].name();
        // A single way is not left alone for another.
        if opened && self.kinds.len() > 1 {
            tracing::info!(peer = self.address, path, %error, "a path failed and is left alone for a while");
        } else {
            tracing::debug!(peer = self.address, path, %error, "a path failed");
        }
    }

    /// A fetch of so many bytes from memory took so long.
    pub(super) fn fetched(&self, now: Instant, at: usize, bytes: u64, took: Duration) {
        self.measured(at, |choice, at| choice.fetched(now, at, bytes, took));
    }

    /// Of a fetch nothing came in all that time.
    pub(super) fn late(&self, now: Instant, at: usize, took: Duration) {
        self.measured(at, |choice, at| choice.late(now, at, took));
    }

    fn measured(&self, at: usize, note: impl FnOnce(&mut Choice, usize)) {
        let Some(measured) = at.checked_sub(self.first_measured) else { return };
        let mut known = self.known();
        let before = known.choice.in_use();
        note(&mut known.choice, measured);
        if known.choice.in_use() != before {
            let reason = known.choice.reason().clone();
            drop(known);
            tracing::info!(peer = self.address, %reason, "blocks go over another path");
        }
    }

    pub(super) fn pinged(&self, at: usize, took: Duration) {
        if let Some(measured) = at.checked_sub(self.first_measured) {
            self.known().choice.pinged(measured, took);
        }
    }

    /// What fetches go over but for turns. Where nothing is measured, the first is as good as any.
    fn used_of(&self, known: &Known) -> PathKind {
        let in_use = known.nearer.or(known.stands_in).unwrap_or(self.first_measured + known.choice.in_use());
        *self.kinds.get(in_use).unwrap_or(&self.kinds[0])
    }

    pub(super) fn report(&self) -> PeerReport {
        let known = self.known();
        let path = |(at, kind): (usize, &PathKind)| {
            let estimate = at.checked_sub(self.first_measured).map(|at| known.choice.estimate(at));
            PathReport {
                kind: *kind,
                is_left_alone: !known.breakers[at].is_closed(),
                latency: estimate.and_then(super::estimate::Estimate::latency),
                bytes_per_second: estimate.and_then(super::estimate::Estimate::bytes_per_second),
                fetches: estimate.map_or(0, super::estimate::Estimate::fetches),
                error: known.errors[at].as_ref().map(ToString::to_string),
            }
        };
        let stands_in = || {
            let other = self.kinds.get(self.first_measured + known.choice.in_use());
            known.stands_in.and(other).map(|other| Reason::StandsIn { other: *other })
        };
        let reason = known.nearer.map(|_| Reason::Nearer).or_else(stands_in);
        let reason = reason.unwrap_or_else(|| known.choice.reason().clone());
        PeerReport {
            peer: self.address.clone(),
            used: self.used_of(&known),
            reason,
            paths: self.kinds.iter().enumerate().map(path).collect(),
        }
    }
}
