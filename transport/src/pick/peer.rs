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
    /// A way of a better class than the network's, when the last operation took one.
    nearer: Option<usize>,
}

impl Peer {
    pub(super) fn new(address: String, kinds: Vec<PathKind>, rules: &PickRules, now: Instant) -> Peer {
        let first_measured = kinds.iter().take_while(|kind| kind.class() < Class::Network).count();
        let known = Known {
            breakers: vec![Breaker::new(rules.breaker); kinds.len()],
            choice: Choice::new(rules.choice, kinds[first_measured..].to_vec(), now),
            errors: vec![None; kinds.len()],
            nearer: None,
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
        let picked = match measured {
            [] => None,
            _ if is_fetch => known.choice.next_fetch(now, measured),
            _ => known.choice.usable(measured),
        };
        // Where all were left alone, one that is open is better than none.
        picked.map(|at| at + self.first_measured).or_else(|| open.iter().position(|open| *open))
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

    pub(super) fn succeeded(&self, at: usize) {
        let mut known = self.known();
        let was_closed = known.breakers[at].is_closed();
        known.breakers[at].succeeded();
        if !was_closed && known.breakers[at].is_closed() {
            drop(known);
            tracing::info!(peer = self.address, path = self.kinds[at].name(), "a path works again");
        }
    }

    pub(super) fn failed(&self, now: Instant, at: usize, error: &PathError) {
        let mut known = self.known();
        let was_closed = known.breakers[at].is_closed();
        let opened = known.breakers[at].failed(now) && was_closed;
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

    /// What fetches go over but for turns.
    pub(super) fn used(&self) -> PathKind {
        self.used_of(&self.known())
    }

    /// Where nothing is measured, the first is as good as any.
    fn used_of(&self, known: &Known) -> PathKind {
        let in_use = known.nearer.unwrap_or(self.first_measured + known.choice.in_use());
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
        let reason = known.nearer.map_or_else(|| known.choice.reason().clone(), |_| Reason::Nearer);
        PeerReport {
            peer: self.address.clone(),
            used: self.used_of(&known),
            reason,
            paths: self.kinds.iter().enumerate().map(path).collect(),
        }
    }
}
