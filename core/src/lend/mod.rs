//! Rules of lending: when memory of a node that another process reads in place may be used for something else. Pure.
//!
//! One connection has a [`Lender`] at the node and a [`Borrower`] at the client. Each loan ends in one of three ways: the
//! borrower gives it back, the borrower's process is gone, or the lender's is (then nothing is written there any more). No
//! clock ends a loan, since no clock can stop a reader. Leases are the second layer: the tier book must not count as free
//! what is lent, so the end of a lease is told to the book when its last loan is back, and a lease is renewed meanwhile.
//!
//! Each end is told what happened and says what is to be done; whoever runs them keeps the bytes of a loan until
//! [`Effect::Free`], and sends rows in the order in which they were lent.
//!
//! Not here: sockets and mappings, how many bytes all connections together may have, and which blocks may be lent.

mod borrower;
mod lender;
mod room;
#[cfg(test)]
mod tests;

pub use borrower::{Borrower, Descriptor, Extent, Place, RETURNS_AT_ONCE, Received, WrongDescriptor};
pub use lender::{Effect, LendLimits, LendRefused, Lender, UnknownLoan};
pub use room::Room;
