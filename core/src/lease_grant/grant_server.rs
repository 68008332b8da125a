//! The node's end of a grant connection: which blocks are granted, under which leases, and when
//! both end.
//!
//! Not here: the bytes (the caller that runs the effects keeps them), and the tier book.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::{GrantId, LeaseId, Timestamp};

/// Limits of one connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantLimits {
    /// Bytes that grants may hold in place at one time. A single grant may be larger.
    pub granted_bytes_max: u64,
    /// Grants and copies at one time.
    pub grants_max: usize,
    /// Leases with an operation or a grant, or with one less than [`Self::lease`] ago.
    pub leases_max: usize,
    /// How long the tier book keeps a lease without renewal.
    pub lease: Duration,
}

/// An action for the caller, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GrantEffect {
    /// The bytes of this grant are no longer read: free them.
    Free(GrantId),
    /// Release the lease in the tier book.
    Release(LeaseId),
    /// Renew the lease in the tier book.
    Renew(LeaseId),
}

/// Why a grant is refused. The node answers `Busy`, and the client takes a copy or retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantRefused {
    /// The granted bytes are at their limit.
    #[error("this connection may hold grants for {limit} bytes: drop blocks that are no longer read")]
    Bytes {
        /// [`GrantLimits::granted_bytes_max`].
        limit: u64,
    },
    /// The grants are at their limit.
    #[error("this connection may hold {limit} grants: drop blocks that are no longer read")]
    Grants {
        /// [`GrantLimits::grants_max`].
        limit: usize,
    },
    /// The leases in use are at their limit.
    #[error("this connection may use {limit} leases: release those of requests that ended")]
    Leases {
        /// [`GrantLimits::leases_max`].
        limit: usize,
    },
    /// The connection is closing or closed, or no operation of the lease is in flight.
    #[error("blocks are granted only during an operation of an open connection")]
    Closed,
}

/// The client returned a grant that it does not hold. That breaks the protocol, and the connection
/// must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} was returned, but the client does not hold it")]
pub struct UnknownGrant(pub GrantId);

/// Grants given out over one connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantServer {
    limits: GrantLimits,
    /// Id of the newest grant.
    newest: GrantId,
    grants: BTreeMap<GrantId, Grant>,
    leases: BTreeMap<LeaseId, LeaseUsage>,
    granted_bytes: u64,
    /// Number of grants that are copies.
    copies: usize,
    /// No operation or grant may start.
    is_closed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Grant {
    /// `None` for a copy, which holds no block in place.
    lease: Option<LeaseId>,
    granted_at: Timestamp,
}

/// Operations and grants under one lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LeaseUsage {
    operations: u32,
    grants: u32,
    /// Bytes granted since the lease last had no grant. While one grant is out, the book keeps the
    /// blocks of all, because they share one lease.
    granted_bytes: u64,
    /// The client released it; the book is told when no operation or grant is left.
    is_released: bool,
    /// A time at or after the start of the book's current lease period.
    renewed: Timestamp,
}

impl LeaseUsage {
    fn is_idle(&self) -> bool {
        self.operations == 0 && self.grants == 0
    }
}

impl GrantServer {
    /// A connection without grants.
    #[must_use]
    pub fn new(limits: GrantLimits) -> GrantServer {
        GrantServer {
            limits,
            newest: GrantId(0),
            grants: BTreeMap::new(),
            leases: BTreeMap::new(),
            granted_bytes: 0,
            copies: 0,
            is_closed: false,
        }
    }

    /// Starts an operation under this lease; the book may be called under it next. A lease with a
    /// release that waits for its grants continues as if the release had not been sent.
    ///
    /// # Errors
    /// If there are too many leases, or the connection is closing.
    pub fn begin(&mut self, lease: LeaseId, now: Timestamp) -> Result<(), GrantRefused> {
        if self.is_closed {
            return Err(GrantRefused::Closed);
        }
        let limit = self.limits.leases_max;
        if self.leases.len() >= limit && !self.leases.contains_key(&lease) {
            return Err(GrantRefused::Leases { limit });
        }
        let fresh =
            LeaseUsage { operations: 0, grants: 0, granted_bytes: 0, is_released: false, renewed: now };
        let borrowing = self.leases.entry(lease).or_insert(fresh);
        borrowing.operations += 1;
        borrowing.is_released = false;
        // `renewed` stays: not every operation reaches the book, which would restart the lease
        // period.
        Ok(())
    }

    /// Grants `bytes` bytes of a block that the book holds for this lease, during one of its
    /// operations. Descriptors must reach the client in the order of these calls.
    ///
    /// # Errors
    /// If a limit is reached, or no operation of the lease is in flight.
    pub fn grant(&mut self, lease: LeaseId, bytes: u64, now: Timestamp) -> Result<GrantId, GrantRefused> {
        let fits = self.fits(0, bytes);
        let borrowing = self.leases.get_mut(&lease).filter(|borrowing| borrowing.operations > 0);
        let Some(borrowing) = borrowing.filter(|_| !self.is_closed) else { return Err(GrantRefused::Closed) };
        if self.grants.len() >= self.limits.grants_max {
            return Err(GrantRefused::Grants { limit: self.limits.grants_max });
        }
        // A lone grant always passes: otherwise a limit below one block would end all grants.
        if !fits {
            return Err(GrantRefused::Bytes { limit: self.limits.granted_bytes_max });
        }
        self.newest.0 += 1;
        self.granted_bytes = self.granted_bytes.saturating_add(bytes);
        borrowing.grants += 1;
        borrowing.granted_bytes = borrowing.granted_bytes.saturating_add(bytes);
        self.grants.insert(self.newest, Grant { lease: Some(lease), granted_at: now });
        Ok(self.newest)
    }

    /// Same, for bytes in a copy: it ends like a grant and holds no block in place.
    ///
    /// # Errors
    /// As [`Self::grant`], except for bytes.
    pub fn grant_copy(&mut self, lease: LeaseId, now: Timestamp) -> Result<GrantId, GrantRefused> {
        let is_begun = self.leases.get(&lease).is_some_and(|borrowing| borrowing.operations > 0);
        if !is_begun || self.is_closed {
            return Err(GrantRefused::Closed);
        }
        if self.grants.len() >= self.limits.grants_max {
            return Err(GrantRefused::Grants { limit: self.limits.grants_max });
        }
        self.newest.0 += 1;
        self.copies += 1;
        self.grants.insert(self.newest, Grant { lease: None, granted_at: now });
        Ok(self.newest)
    }

    /// Whether `bytes` more bytes could be granted beside those that are granted or `planned`.
    #[must_use]
    pub fn fits(&self, planned: u64, bytes: u64) -> bool {
        let beside = self.granted_bytes.saturating_add(planned);
        beside == 0 || beside.saturating_add(bytes) <= self.limits.granted_bytes_max
    }

    /// An operation has ended, in whatever way.
    pub fn finish(&mut self, lease: LeaseId, out: &mut Vec<GrantEffect>) {
        if let Some(borrowing) = self.leases.get_mut(&lease) {
            debug_assert!(borrowing.operations > 0, "an operation of {lease} ended that was not started");
            borrowing.operations = borrowing.operations.saturating_sub(1);
            self.settle_release(lease, out);
        }
    }

    /// The client returned these grants and reads none of them any more.
    ///
    /// # Errors
    /// If one of them is not out, or listed twice. Then all of them stay out.
    pub fn return_grants(
        &mut self,
        loans: &[GrantId],
        out: &mut Vec<GrantEffect>,
    ) -> Result<(), UnknownGrant> {
        let mut taken = Vec::with_capacity(loans.len().min(self.grants.len()));
        for &id in loans {
            let Some(loan) = self.grants.remove(&id) else {
                self.grants.extend(taken);
                return Err(UnknownGrant(id));
            };
            taken.push((id, loan));
        }
        for (id, loan) in taken {
            out.push(GrantEffect::Free(id));
            let Some(lease) = loan.lease else {
                self.copies -= 1;
                continue;
            };
            if let Some(borrowing) = self.leases.get_mut(&lease) {
                borrowing.grants -= 1;
                if borrowing.grants == 0 {
                    self.granted_bytes -= std::mem::take(&mut borrowing.granted_bytes);
                }
            }
            self.settle_release(lease, out);
        }
        Ok(())
    }

    /// The client released the lease, which is acknowledged at once. The book is told when no
    /// operation or grant of it is left.
    pub fn release(&mut self, lease: LeaseId, out: &mut Vec<GrantEffect>) {
        match self.leases.get_mut(&lease) {
            Some(borrowing) => borrowing.is_released = true,
            // The book may still know a lease that is forgotten here.
            None if !self.is_closed => return out.push(GrantEffect::Release(lease)),
            None => {}
        }
        self.settle_release(lease, out);
    }

    /// Renews leases in use after each third of their period, and forgets those unused for as long
    /// as the book keeps them. Must be called more often than that. An operation also keeps its
    /// lease in use: the blocks that it is about to grant must still be held then.
    pub fn tick(&mut self, now: Timestamp, out: &mut Vec<GrantEffect>) {
        let span = self.limits.lease;
        for (lease, borrowing) in &mut self.leases {
            if !borrowing.is_idle() && now.since(borrowing.renewed) >= span / 3 {
                borrowing.renewed = now;
                out.push(GrantEffect::Renew(*lease));
            }
        }
        self.leases.retain(|_, borrowing| now.since(borrowing.renewed) < span);
    }

    /// The node wants to close the connection while the client may live: no grant starts, and
    /// messages of the client are ignored. Grants stay out until [`Self::end`], because the client
    /// may read them, and so do their leases.
    pub fn close(&mut self, out: &mut Vec<GrantEffect>) {
        self.is_closed = true;
        for borrowing in self.leases.values_mut() {
            borrowing.is_released = true;
        }
        for lease in self.leases.keys().copied().collect::<Vec<_>>() {
            self.settle_release(lease, out);
        }
    }

    /// The client's end is gone, and with it its process or all of its readers: every grant ends,
    /// then every lease. Operations in flight get no more grants.
    pub fn end(&mut self, out: &mut Vec<GrantEffect>) {
        self.is_closed = true;
        (self.granted_bytes, self.copies) = (0, 0);
        out.extend(std::mem::take(&mut self.grants).into_keys().map(GrantEffect::Free));
        out.extend(std::mem::take(&mut self.leases).into_keys().map(GrantEffect::Release));
    }

    /// Number of grants that are out, without copies, and the bytes that they hold in place.
    #[must_use]
    pub fn granted(&self) -> (usize, u64) {
        (self.grants.len() - self.copies, self.granted_bytes)
    }

    /// Time at which the oldest grant was given out.
    #[must_use]
    pub fn oldest_since(&self) -> Option<Timestamp> {
        self.grants.values().find(|loan| loan.lease.is_some()).map(|loan| loan.granted_at)
    }

    /// Tells the book that a released lease ends, once no operation or grant is left under it.
    fn settle_release(&mut self, lease: LeaseId, out: &mut Vec<GrantEffect>) {
        if self.leases.get(&lease).is_some_and(|borrowing| borrowing.is_released && borrowing.is_idle()) {
            self.leases.remove(&lease);
            out.push(GrantEffect::Release(lease));
        }
    }

    /// Same state with other grant ids, for a search that must not distinguish states by how often
    /// something happened before. `number` is monotonic.
    #[cfg(test)]
    pub(super) fn renumber(&mut self, number: &dyn Fn(GrantId) -> GrantId) {
        self.newest = number(self.newest);
        self.grants =
            std::mem::take(&mut self.grants).into_iter().map(|(id, loan)| (number(id), loan)).collect();
        for borrowing in self.leases.values_mut() {
            borrowing.granted_bytes = u64::from(borrowing.grants);
        }
        self.granted_bytes = self.leases.values().map(|borrowing| borrowing.granted_bytes).sum();
    }

    /// Id of the newest grant.
    #[cfg(test)]
    pub(super) fn newest_mut(&mut self) -> &mut GrantId {
        &mut self.newest
    }
}
