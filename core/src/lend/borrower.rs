//! The client's end of a connection: what it may read, and what is to be given back.
//!
//! The node's word is checked where it costs nothing: ranges, lengths, counts and numbers. Whether the bytes are the block is
//! checked by whoever reads them. Not here: the mapping, and the threads that read in it.

use std::collections::BTreeMap;

use crate::id::LoanId;

/// Loans that wait to be given back before a message goes for them alone: 512 bytes of it.
pub const RETURNS_AT_ONCE: usize = 64;

/// In which memory of a connection something lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// The node's arena, read in place.
    Arena,
    /// The connection's tray, through which bytes are copied.
    Tray,
}

/// Where the bytes of a loan lie, as the node says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Descriptor {
    /// The loan.
    pub loan: LoanId,
    /// In which memory.
    pub place: Place,
    /// From which byte on.
    pub at: u64,
    /// How many bytes.
    pub len: u32,
}

/// How much memory a connection has, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// The node's arena; zero when it is not mapped.
    pub arena_bytes: u64,
    /// The tray's part from which the client reads.
    pub tray_bytes: u64,
    /// The largest frame.
    pub frame_bytes_max: u32,
}

/// What becomes of rows that are as they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// They may be read.
    Kept,
    /// Their operation was cancelled: they wait to be given back.
    Unwanted,
}

/// What is wrong with rows; none of them counts, and the connection is to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongDescriptor {
    /// It does not lie in the memory it names.
    #[error("a block of {len} bytes at {at} does not lie in the {extent} bytes there are")]
    Range {
        /// From which byte on.
        at: u64,
        /// How many bytes.
        len: u32,
        /// Bytes there are.
        extent: u64,
    },
    /// It is empty, or larger than the largest frame.
    #[error("a block of {len} bytes is none, {limit} is the largest")]
    Length {
        /// How many bytes.
        len: u32,
        /// [`Extent::frame_bytes_max`].
        limit: u32,
    },
    /// The number is not above those before.
    #[error("{0} was lent before")]
    Again(LoanId),
    /// More rows than blocks that were asked for.
    #[error("more than the {asked} blocks that were asked for")]
    TooMany {
        /// Blocks asked for.
        asked: usize,
    },
    /// The operation was never begun, or is over.
    #[error("operation {0} is not under way")]
    NoOperation(u64),
}

/// What a client has borrowed through one connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Borrower {
    extent: Extent,
    newest_operation: u64,
    operations: BTreeMap<u64, Operation>,
    /// The newest loan that was seen. Numbers grow, so that one number says of every other whether it is new.
    newest_loan: LoanId,
    /// What may be read, with its operation.
    held: BTreeMap<LoanId, u64>,
    /// What nobody reads any more and the node does not know of yet.
    returns: Vec<LoanId>,
    is_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Operation {
    asked: usize,
    received: usize,
    held: usize,
    is_cancelled: bool,
    /// Nothing comes for it any more; it stays as long as something of it is held.
    is_finished: bool,
}

impl Borrower {
    /// A new connection.
    #[must_use]
    pub fn new(extent: Extent) -> Borrower {
        Borrower {
            extent,
            newest_operation: 0,
            operations: BTreeMap::new(),
            newest_loan: LoanId(0),
            held: BTreeMap::new(),
            returns: Vec::new(),
            is_lost: false,
        }
    }

    /// The number of a new operation that asks for so many blocks.
    pub fn begin(&mut self, asked: usize) -> u64 {
        self.newest_operation += 1;
        let operation = Operation { asked, received: 0, held: 0, is_cancelled: false, is_finished: false };
        self.operations.insert(self.newest_operation, operation);
        self.newest_operation
    }

    /// The node lends these for an operation.
    ///
    /// # Errors
    /// When one of them cannot be; then none is taken.
    pub fn receive(&mut self, operation: u64, rows: &[Descriptor]) -> Result<Received, WrongDescriptor> {
        let found = self.operations.get_mut(&operation).filter(|found| !found.is_finished);
        let Some(found) = found.filter(|_| !self.is_lost) else {
            return Err(WrongDescriptor::NoOperation(operation));
        };
        if rows.len() > found.asked - found.received {
            return Err(WrongDescriptor::TooMany { asked: found.asked });
        }
        let mut newest = self.newest_loan;
        for row in rows {
            check(row, &self.extent)?;
            if row.loan <= newest {
                return Err(WrongDescriptor::Again(row.loan));
            }
            newest = row.loan;
        }
        self.newest_loan = newest;
        found.received += rows.len();
        let loans = rows.iter().map(|row| row.loan);
        if found.is_cancelled {
            self.returns.extend(loans);
            return Ok(Received::Unwanted);
        }
        found.held += rows.len();
        self.held.extend(loans.map(|loan| (loan, operation)));
        Ok(Received::Kept)
    }

    /// Nothing comes for the operation any more: the node said so. `true` says that what waits should be given back now.
    pub fn finish(&mut self, operation: u64) -> bool {
        if let Some(found) = self.operations.get_mut(&operation) {
            found.is_finished = true;
            if found.held == 0 {
                self.operations.remove(&operation);
                return !self.returns.is_empty();
            }
        }
        false
    }

    /// What still comes for the operation is not wanted. What came stays until it is given back, and the operation is over
    /// when the node says so.
    pub fn cancel(&mut self, operation: u64) {
        if let Some(found) = self.operations.get_mut(&operation) {
            found.is_cancelled = true;
        }
    }

    /// Nobody reads this any more. `true` says that what waits should be given back now: it was the last of its operation,
    /// or many wait.
    pub fn give_back(&mut self, loan: LoanId) -> bool {
        let Some(operation) = self.held.remove(&loan) else { return false };
        let mut is_last = false;
        if let Some(found) = self.operations.get_mut(&operation) {
            found.held -= 1;
            is_last = found.held == 0 && found.is_finished;
        }
        if is_last {
            self.operations.remove(&operation);
        }
        if self.is_lost {
            return false;
        }
        self.returns.push(loan);
        is_last || self.returns.len() >= RETURNS_AT_ONCE
    }

    /// What is to be told to the node now, the oldest first.
    pub fn take_returns(&mut self, most: usize) -> Vec<LoanId> {
        let rest = self.returns.split_off(most.min(self.returns.len()));
        std::mem::replace(&mut self.returns, rest)
    }

    /// The node is gone. Nothing is given back any more, and what is held stays as it is: who wrote it has ended.
    pub fn lost(&mut self) {
        self.is_lost = true;
        self.returns.clear();
        self.operations.clear();
    }

    /// How many loans wait to be given back.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.returns.len()
    }

    /// Whether the bytes of this loan are what they were when it came.
    #[must_use]
    pub fn may_read(&self, loan: LoanId) -> bool {
        self.held.contains_key(&loan)
    }

    /// Loans that are held: while there is one, the connection must stay open, also when the node closed its end.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// As [`super::Lender::renumber`].
    #[cfg(test)]
    pub(super) fn renumber(&mut self, loan: &dyn Fn(LoanId) -> LoanId, operation: &dyn Fn(u64) -> u64) {
        self.newest_operation = operation(self.newest_operation);
        self.newest_loan = loan(self.newest_loan);
        self.operations = std::mem::take(&mut self.operations)
            .into_iter()
            .map(|(id, found)| (operation(id), found))
            .collect();
        self.held =
            std::mem::take(&mut self.held).into_iter().map(|(id, of)| (loan(id), operation(of))).collect();
        self.returns.iter_mut().for_each(|id| *id = loan(*id));
    }
}

fn check(row: &Descriptor, extent: &Extent) -> Result<(), WrongDescriptor> {
    let Descriptor { place, at, len, .. } = *row;
    if len == 0 || len > extent.frame_bytes_max {
        return Err(WrongDescriptor::Length { len, limit: extent.frame_bytes_max });
    }
    let there = match place {
        Place::Arena => extent.arena_bytes,
        Place::Tray => extent.tray_bytes,
    };
    match at.checked_add(u64::from(len)) {
        Some(end) if end <= there => Ok(()),
        _ => Err(WrongDescriptor::Range { at, len, extent: there }),
    }
}
