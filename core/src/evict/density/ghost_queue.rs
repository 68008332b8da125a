//! Deferred work on ghosts, run when its cache lines have arrived.
//!
//! A ghost lookup misses all caches, and a decision needs two without needing the answers at once:
//! the ghost of an inserted block matters only at its next use or eviction. So the line is
//! prefetched and the work runs some calls later, in order and with its original time. All counts
//! equal those of immediate work. Even a prefetch stalls on address translation, and several
//! translations take hardly longer than one, so prefetches are batched. Not here: ghosts themselves
//! ([`super::ghosts`]).

use super::classes::ReuseClass;
use super::ghosts::{Ghost, GhostHistory};
use super::resident_block::ResidentBlock;
use super::{BlockKey, Density, bands};
use crate::id::Timestamp;

/// Maximum number of deferred items.
const QUEUE_MAX: usize = 32;
/// Items prefetched together. At two items a decision, memory has at least eight decisions of time,
/// twice the time of an access.
const PREFETCH_BATCH: usize = 16;

/// A deferred item.
#[derive(Clone, Copy, Debug)]
pub(super) enum GhostWork {
    /// A block was inserted: look for its ghost.
    Take { key: BlockKey, fingerprint: u64 },
    /// A block of the running request is absent: look for its ghost.
    TakeAbsent { touch: usize, fingerprint: u64 },
    /// A block left, one of `residents`: store a ghost.
    Remember { fingerprint: u64, memory: GhostHistory, last_use: Timestamp, residents: usize },
    /// A block left without a ghost.
    Forget { class: ReuseClass, last_use: Timestamp },
    /// Boundary between the insertions of two requests.
    Cluster,
}

/// Deferred items in order, each with its time.
#[derive(Debug)]
pub(super) struct GhostQueue {
    ring: [(Timestamp, GhostWork); QUEUE_MAX],
    first: usize,
    len: usize,
    /// Number of newest items not prefetched yet.
    unfetched: usize,
}

impl Default for GhostQueue {
    fn default() -> Self {
        GhostQueue { ring: [(Timestamp(0), GhostWork::Cluster); QUEUE_MAX], first: 0, len: 0, unfetched: 0 }
    }
}

impl GhostQueue {
    fn pop(&mut self) -> Option<(Timestamp, GhostWork)> {
        self.len = self.len.checked_sub(1)?;
        let at = self.first;
        self.first = (at + 1) % QUEUE_MAX;
        Some(self.ring[at])
    }

    /// Requires a free entry.
    fn push(&mut self, now: Timestamp, work: GhostWork) {
        self.ring[(self.first + self.len) % QUEUE_MAX] = (now, work);
        self.len += 1;
        self.unfetched += 1;
    }

    /// Fingerprints of the items not prefetched yet; marks them as prefetched.
    fn take_unfetched(&mut self) -> impl Iterator<Item = u64> {
        let end = self.first + self.len;
        let newest = (end - std::mem::take(&mut self.unfetched)..end).map(|at| self.ring[at % QUEUE_MAX].1);
        newest.filter_map(|work| match work {
            GhostWork::Take { fingerprint, .. }
            | GhostWork::TakeAbsent { fingerprint, .. }
            | GhostWork::Remember { fingerprint, .. } => Some(fingerprint),
            GhostWork::Forget { .. } | GhostWork::Cluster => None,
        })
    }
}

impl Density {
    /// Defers `work`. Call [`Density::run_deferred`] before reading any state that it changes.
    pub(super) fn defer(&mut self, work: GhostWork) {
        if self.ghost_queue.len == QUEUE_MAX
            && let Some((then, oldest)) = self.ghost_queue.pop()
        {
            self.perform(then, oldest);
        }
        self.ghost_queue.push(self.clock, work);
        if self.ghost_queue.unfetched == PREFETCH_BATCH {
            self.prefetch_deferred();
        }
    }

    fn prefetch_deferred(&mut self) {
        self.ghost_queue.take_unfetched().for_each(|fingerprint| self.ghosts.prefetch(fingerprint));
    }

    /// Runs all deferred items.
    pub(super) fn run_deferred(&mut self) {
        self.prefetch_deferred();
        while let Some((then, work)) = self.ghost_queue.pop() {
            self.perform(then, work);
        }
    }

    fn perform(&mut self, then: Timestamp, work: GhostWork) {
        match work {
            GhostWork::Take { key, fingerprint } => self.take_ghost(key, fingerprint, then),
            GhostWork::TakeAbsent { touch, fingerprint } => self.take_absent(touch, fingerprint, then),
            GhostWork::Remember { fingerprint, memory, last_use, residents } => {
                let tables = &self.tables;
                let worth = |class: ReuseClass, last_use: Timestamp| {
                    tables.values[class.index()][bands::band(then.0.saturating_sub(last_use.0))]
                };
                let before = self.ghosts.remember(fingerprint, (memory, last_use), residents, then, worth);
                if let Some((memory, last_use)) = before {
                    self.open_waits.end(memory.class, last_use, then, &mut self.evidence);
                }
            }
            GhostWork::Forget { class, last_use } => {
                self.open_waits.end(class, last_use, then, &mut self.evidence);
            }
            GhostWork::Cluster => self.finish_cluster(),
        }
    }

    /// A block was inserted: applies its ghost, if any.
    fn take_ghost(&mut self, key: BlockKey, fingerprint: u64, then: Timestamp) {
        let known = self.ghosts.take(fingerprint, then);
        let Some(&mut mut resident) = self.links.data_mut(key) else { return };
        self.recall(&mut resident, known, then);
        self.links.set_data(key, resident);
    }

    /// Applies the ghost of a block that a request used: its last use makes this one a reuse.
    /// Otherwise a block evicted too early would look unused.
    pub(super) fn recall(&mut self, resident: &mut ResidentBlock, known: Option<Ghost>, then: Timestamp) {
        resident.apply_history(known.map(|(memory, _)| memory));
        if let Some((memory, last_use)) = known {
            let age_us = then.0.saturating_sub(last_use.0);
            resident.use_again(age_us);
            self.open_waits.end(memory.class, last_use, then, &mut self.evidence);
            self.evidence.add_reuse(memory.class, age_us);
            self.request.count_reuse(memory.class);
        }
    }
}
