//! Work on the ghosts that is put off until the memory it needs has come.
//!
//! A ghost is found by its fingerprint, so every look at one is a line of memory that no cache holds. A decision
//! needs two of them and no answer at once: what is remembered of a block that comes in is first asked for when it is
//! used or leaves. So the line is asked for, and the work done some calls later, in the order in which it came and
//! as of the time at which it came: everything is counted as if it had been done at once. Even asking holds the
//! processor up until the page of the line is found, and several pages take hardly longer than one: so it is asked for
//! several lines at a time. Not here: what a ghost is
//! ([`super::ghosts`]).

use super::classes::Class;
use super::ghosts::{Ghost, Memory};
use super::resident::Resident;
use super::{BlockKey, Density, bands};
use crate::id::Timestamp;

/// Most work put off.
const PENDING_MAX: usize = 32;
/// Pieces of work whose memory is asked for together. At two pieces a decision memory has eight decisions of time at
/// least, which is twice what it takes.
const ASKED_TOGETHER: usize = 16;

/// A piece of work.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// A block came in: it may be remembered.
    Take { key: BlockKey, fingerprint: u64 },
    /// A block of the running request did not come in: it may be remembered.
    Pass { touch: usize, fingerprint: u64 },
    /// A block left, one of `residents`, and is remembered.
    Remember { fingerprint: u64, memory: Memory, last_use: Timestamp, residents: usize },
    /// A block left and is not.
    Forget { class: Class, last_use: Timestamp },
    /// What came in before and what comes in later are of two requests.
    Cluster,
}

/// Work in the order in which it came, each with its time.
#[derive(Debug)]
pub(super) struct Pending {
    ring: [(Timestamp, Work); PENDING_MAX],
    first: usize,
    len: usize,
    /// So many of the newest have not asked for their memory yet.
    unasked: usize,
}

impl Default for Pending {
    fn default() -> Self {
        Pending { ring: [(Timestamp(0), Work::Cluster); PENDING_MAX], first: 0, len: 0, unasked: 0 }
    }
}

impl Pending {
    fn pop(&mut self) -> Option<(Timestamp, Work)> {
        self.len = self.len.checked_sub(1)?;
        let at = self.first;
        self.first = (at + 1) % PENDING_MAX;
        Some(self.ring[at])
    }

    /// There is room.
    fn push(&mut self, now: Timestamp, work: Work) {
        self.ring[(self.first + self.len) % PENDING_MAX] = (now, work);
        self.len += 1;
        self.unasked += 1;
    }

    /// The fingerprints whose ghosts the newest work needs, which has not asked for them yet.
    fn unasked(&mut self) -> impl Iterator<Item = u64> {
        let end = self.first + self.len;
        let newest = (end - std::mem::take(&mut self.unasked)..end).map(|at| self.ring[at % PENDING_MAX].1);
        newest.filter_map(|work| match work {
            Work::Take { fingerprint, .. }
            | Work::Pass { fingerprint, .. }
            | Work::Remember { fingerprint, .. } => Some(fingerprint),
            Work::Forget { .. } | Work::Cluster => None,
        })
    }
}

impl Density {
    /// Does this later. To be followed by [`Density::catch_up`] before anything it changes is looked at.
    pub(super) fn put_off(&mut self, work: Work) {
        if self.pending.len == PENDING_MAX
            && let Some((then, oldest)) = self.pending.pop()
        {
            self.perform(then, oldest);
        }
        self.pending.push(self.clock, work);
        if self.pending.unasked == ASKED_TOGETHER {
            self.ask();
        }
    }

    fn ask(&mut self) {
        self.pending.unasked().for_each(|fingerprint| self.ghosts.prefetch(fingerprint));
    }

    /// Does all that was put off.
    pub(super) fn catch_up(&mut self) {
        self.ask();
        while let Some((then, work)) = self.pending.pop() {
            self.perform(then, work);
        }
    }

    fn perform(&mut self, then: Timestamp, work: Work) {
        match work {
            Work::Take { key, fingerprint } => self.take_ghost(key, fingerprint, then),
            Work::Pass { touch, fingerprint } => self.take_passed(touch, fingerprint, then),
            Work::Remember { fingerprint, memory, last_use, residents } => {
                let tables = &self.tables;
                let worth = |class: Class, last_use: Timestamp| {
                    tables.values[class.at()][bands::band(then.0.saturating_sub(last_use.0))]
                };
                let before = self.ghosts.remember(fingerprint, (memory, last_use), residents, then, worth);
                if let Some((memory, last_use)) = before {
                    self.alive.end(memory.class, last_use, then, &mut self.evidence);
                }
            }
            Work::Forget { class, last_use } => self.alive.end(class, last_use, then, &mut self.evidence),
            Work::Cluster => self.close_cluster(),
        }
    }

    /// A block came in: what is remembered of it, if anything is.
    fn take_ghost(&mut self, key: BlockKey, fingerprint: u64, then: Timestamp) {
        let known = self.ghosts.take(fingerprint, then);
        let Some(&mut mut resident) = self.links.about_mut(key) else { return };
        self.recall(&mut resident, known, then);
        self.links.set_about(key, resident);
    }

    /// What is remembered of a block that a request brings: nothing, or its last use, after which this is one like any
    /// other. Or whoever is evicted too early would look as if nobody wanted him.
    pub(super) fn recall(&mut self, resident: &mut Resident, known: Option<Ghost>, then: Timestamp) {
        resident.recall(known.map(|(memory, _)| memory));
        if let Some((memory, last_use)) = known {
            let age_us = then.0.saturating_sub(last_use.0);
            resident.use_again(age_us);
            self.alive.end(memory.class, last_use, then, &mut self.evidence);
            self.evidence.reused(memory.class, age_us);
            self.run.count_reuse(memory.class);
        }
    }
}
