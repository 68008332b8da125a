//! The node's end of a connection: what is lent, under which leases, and when both end.
//!
//! Not here: the bytes (whoever runs the effects keeps them), and the tier book.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::{LeaseId, LoanId, Timestamp};

/// What one connection may have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LendLimits {
    /// Bytes that loans may keep where they are at one time. A loan that is the only one may be larger.
    pub lent_bytes_max: u64,
    /// Loans and copies at one time.
    pub loans_max: usize,
    /// Leases that have an operation or a loan, or had one less than [`Self::lease`] ago.
    pub leases_max: usize,
    /// How long the tier book keeps a lease that nobody renews.
    pub lease: Duration,
}

/// What is to be done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Effect {
    /// Nobody reads the bytes of this loan any more: let go of them.
    Free(LoanId),
    /// Release the lease in the tier book.
    Release(LeaseId),
    /// Renew the lease in the tier book.
    Renew(LeaseId),
}

/// Why nothing is lent; the caller answers `Busy` and the client takes a copy, or comes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LendRefused {
    /// As many bytes as allowed are lent.
    #[error("this connection may have {limit} bytes lent: drop blocks that are no longer read")]
    Bytes {
        /// [`LendLimits::lent_bytes_max`].
        limit: u64,
    },
    /// As many loans as allowed are out.
    #[error("this connection may have {limit} loans: drop blocks that are no longer read")]
    Loans {
        /// [`LendLimits::loans_max`].
        limit: usize,
    },
    /// As many leases as allowed are in use.
    #[error("this connection may use {limit} leases: release those of requests that ended")]
    Leases {
        /// [`LendLimits::leases_max`].
        limit: usize,
    },
    /// The connection is closing or over, or no operation of the lease is under way.
    #[error("nothing is lent outside an operation of an open connection")]
    Closed,
}

/// The client gave back what it does not have: it does not keep to the rules, and the connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} was given back and is not out")]
pub struct UnknownLoan(pub LoanId);

/// What one connection has borrowed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lender {
    limits: LendLimits,
    /// Number of the newest loan.
    newest: LoanId,
    loans: BTreeMap<LoanId, Loan>,
    leases: BTreeMap<LeaseId, Borrowing>,
    lent_bytes: u64,
    /// Those of the loans that are copies.
    copies: usize,
    /// Nothing new is begun or lent.
    is_closed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Loan {
    /// Nothing for a copy, which keeps nothing of the book's where it is.
    lease: Option<LeaseId>,
    since: Timestamp,
}

/// What goes on under one lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Borrowing {
    operations: u32,
    loans: u32,
    /// Bytes lent since there was no loan. As long as one is out the book keeps the blocks of all, for the lease is one.
    lent_bytes: u64,
    /// The client ended it; the book hears of it when nothing goes on any more.
    is_released: bool,
    /// When the book's time of it began, if it knows it, or later.
    renewed: Timestamp,
}

impl Borrowing {
    fn is_idle(&self) -> bool {
        self.operations == 0 && self.loans == 0
    }
}

impl Lender {
    /// A connection without loans.
    #[must_use]
    pub fn new(limits: LendLimits) -> Lender {
        Lender {
            limits,
            newest: LoanId(0),
            loans: BTreeMap::new(),
            leases: BTreeMap::new(),
            lent_bytes: 0,
            copies: 0,
            is_closed: false,
        }
    }

    /// An operation under this lease begins; the book may be asked under it next. A lease whose release waits for its
    /// loans goes on, as it would if the release had not been sent.
    ///
    /// # Errors
    /// When there are too many leases, or the connection is closing.
    pub fn begin(&mut self, lease: LeaseId, now: Timestamp) -> Result<(), LendRefused> {
        if self.is_closed {
            return Err(LendRefused::Closed);
        }
        let limit = self.limits.leases_max;
        if self.leases.len() >= limit && !self.leases.contains_key(&lease) {
            return Err(LendRefused::Leases { limit });
        }
        let fresh = Borrowing { operations: 0, loans: 0, lent_bytes: 0, is_released: false, renewed: now };
        let borrowing = self.leases.entry(lease).or_insert(fresh);
        borrowing.operations += 1;
        borrowing.is_released = false;
        // Its time goes on: not every operation comes as far as the book, which would begin it anew.
        Ok(())
    }

    /// Lends so many bytes of a block that the book holds for this lease, during an operation of it. Rows are to reach the
    /// client in the order of these calls.
    ///
    /// # Errors
    /// When a limit is reached, or no operation of the lease is under way.
    pub fn lend(&mut self, lease: LeaseId, bytes: u64, now: Timestamp) -> Result<LoanId, LendRefused> {
        let fits = self.fits(0, bytes);
        let borrowing = self.leases.get_mut(&lease).filter(|borrowing| borrowing.operations > 0);
        let Some(borrowing) = borrowing.filter(|_| !self.is_closed) else { return Err(LendRefused::Closed) };
        if self.loans.len() >= self.limits.loans_max {
            return Err(LendRefused::Loans { limit: self.limits.loans_max });
        }
        // One alone always passes: a limit below one block would otherwise end all lending.
        if !fits {
            return Err(LendRefused::Bytes { limit: self.limits.lent_bytes_max });
        }
        self.newest.0 += 1;
        self.lent_bytes = self.lent_bytes.saturating_add(bytes);
        borrowing.loans += 1;
        borrowing.lent_bytes = borrowing.lent_bytes.saturating_add(bytes);
        self.loans.insert(self.newest, Loan { lease: Some(lease), since: now });
        Ok(self.newest)
    }

    /// The same of bytes in a copy: it ends as a loan does and keeps no block where it is.
    ///
    /// # Errors
    /// As [`Self::lend`], but for bytes.
    pub fn lend_copy(&mut self, lease: LeaseId, now: Timestamp) -> Result<LoanId, LendRefused> {
        let is_begun = self.leases.get(&lease).is_some_and(|borrowing| borrowing.operations > 0);
        if !is_begun || self.is_closed {
            return Err(LendRefused::Closed);
        }
        if self.loans.len() >= self.limits.loans_max {
            return Err(LendRefused::Loans { limit: self.limits.loans_max });
        }
        self.newest.0 += 1;
        self.copies += 1;
        self.loans.insert(self.newest, Loan { lease: None, since: now });
        Ok(self.newest)
    }

    /// Whether so many bytes could be lent beside what is lent and what is `planned` to be.
    #[must_use]
    pub fn fits(&self, planned: u64, bytes: u64) -> bool {
        let beside = self.lent_bytes.saturating_add(planned);
        beside == 0 || beside.saturating_add(bytes) <= self.limits.lent_bytes_max
    }

    /// An operation that was begun is over, however it ended.
    pub fn finish(&mut self, lease: LeaseId, out: &mut Vec<Effect>) {
        if let Some(borrowing) = self.leases.get_mut(&lease) {
            debug_assert!(borrowing.operations > 0, "an operation of {lease} ended that was not begun");
            borrowing.operations = borrowing.operations.saturating_sub(1);
            self.settle(lease, out);
        }
    }

    /// The client gave these back: it reads none of them any more.
    ///
    /// # Errors
    /// When one of them is not out, or named twice. Then all of them stay out.
    pub fn take_back(&mut self, loans: &[LoanId], out: &mut Vec<Effect>) -> Result<(), UnknownLoan> {
        let mut taken = Vec::with_capacity(loans.len().min(self.loans.len()));
        for &id in loans {
            let Some(loan) = self.loans.remove(&id) else {
                self.loans.extend(taken);
                return Err(UnknownLoan(id));
            };
            taken.push((id, loan));
        }
        for (id, loan) in taken {
            out.push(Effect::Free(id));
            let Some(lease) = loan.lease else {
                self.copies -= 1;
                continue;
            };
            if let Some(borrowing) = self.leases.get_mut(&lease) {
                borrowing.loans -= 1;
                if borrowing.loans == 0 {
                    self.lent_bytes -= std::mem::take(&mut borrowing.lent_bytes);
                }
            }
            self.settle(lease, out);
        }
        Ok(())
    }

    /// The client ended the lease, which is answered at once. The book hears of it when no operation and no loan of it is left.
    pub fn release(&mut self, lease: LeaseId, out: &mut Vec<Effect>) {
        match self.leases.get_mut(&lease) {
            Some(borrowing) => borrowing.is_released = true,
            // Forgotten here is not forgotten there.
            None if !self.is_closed => return out.push(Effect::Release(lease)),
            None => {}
        }
        self.settle(lease, out);
    }

    /// Renews leases in use, each third of their time, and forgets those that nobody used for as long as the book keeps
    /// them. To be called more often than that. A lease is in use by its operations too: what they are about to lend
    /// must still be held then.
    pub fn tick(&mut self, now: Timestamp, out: &mut Vec<Effect>) {
        let span = self.limits.lease;
        for (lease, borrowing) in &mut self.leases {
            if !borrowing.is_idle() && now.since(borrowing.renewed) >= span / 3 {
                borrowing.renewed = now;
                out.push(Effect::Renew(*lease));
            }
        }
        self.leases.retain(|_, borrowing| now.since(borrowing.renewed) < span);
    }

    /// The node wants to end the connection while the client may live: nothing new is lent, and what the client says is
    /// not heard any more. What is out stays out until [`Self::end`], because the client may read it, and the leases of it stay.
    pub fn close(&mut self, out: &mut Vec<Effect>) {
        self.is_closed = true;
        for borrowing in self.leases.values_mut() {
            borrowing.is_released = true;
        }
        for lease in self.leases.keys().copied().collect::<Vec<_>>() {
            self.settle(lease, out);
        }
    }

    /// The client's end of the connection is gone, and with it its process or all that it read: every loan ends, then every
    /// lease. Operations that are still under way lend nothing any more.
    pub fn end(&mut self, out: &mut Vec<Effect>) {
        self.is_closed = true;
        (self.lent_bytes, self.copies) = (0, 0);
        out.extend(std::mem::take(&mut self.loans).into_keys().map(Effect::Free));
        out.extend(std::mem::take(&mut self.leases).into_keys().map(Effect::Release));
    }

    /// Loans that are out, without copies, and the bytes that they keep where they are.
    #[must_use]
    pub fn lent(&self) -> (usize, u64) {
        (self.loans.len() - self.copies, self.lent_bytes)
    }

    /// Since when the oldest loan is out.
    #[must_use]
    pub fn oldest(&self) -> Option<Timestamp> {
        self.loans.values().find(|loan| loan.lease.is_some()).map(|loan| loan.since)
    }

    /// Tells the book of the end of a lease that was released once nothing goes on under it.
    fn settle(&mut self, lease: LeaseId, out: &mut Vec<Effect>) {
        if self.leases.get(&lease).is_some_and(|borrowing| borrowing.is_released && borrowing.is_idle()) {
            self.leases.remove(&lease);
            out.push(Effect::Release(lease));
        }
    }

    /// The same with other numbers of loans, for a search that must not take two states for different that differ only in
    /// how often something happened before. `number` keeps their order.
    #[cfg(test)]
    pub(super) fn renumber(&mut self, number: &dyn Fn(LoanId) -> LoanId) {
        self.newest = number(self.newest);
        self.loans =
            std::mem::take(&mut self.loans).into_iter().map(|(id, loan)| (number(id), loan)).collect();
        for borrowing in self.leases.values_mut() {
            borrowing.lent_bytes = u64::from(borrowing.loans);
        }
        self.lent_bytes = self.leases.values().map(|borrowing| borrowing.lent_bytes).sum();
    }

    /// The number that the newest loan has.
    #[cfg(test)]
    pub(super) fn newest_mut(&mut self) -> &mut LoanId {
        &mut self.newest
    }
}
