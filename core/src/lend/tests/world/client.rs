//! One client of the small node, and all of its connection: both ends, and what is on its way between them.
//!
//! Not here: what its card does (`card`), and what the node does (`node`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use super::card::Card;
use super::{SLOTS_MAX, ToClient, ToNode};
use crate::id::{LeaseId, LoanId, Timestamp};
use crate::lend::{Borrower, Extent, LendLimits, Lender};

pub(super) const LEASE: LeaseId = LeaseId(1);
pub(super) const NOW: Timestamp = Timestamp(0);
/// One connection with both its ends.
#[derive(Clone, Debug, Hash)]
pub(super) struct Client {
    // The client's end.
    pub(super) is_alive: bool,
    pub(super) borrower: Borrower,
    pub(super) asked: BTreeMap<u64, Asked>,
    /// What it may be reading at any moment.
    pub(super) frames: BTreeMap<LoanId, u8>,
    /// What it reads and gave back, where the rules are broken.
    pub(super) reading: Option<u8>,
    /// What reads for it, where it maps nothing.
    pub(super) card: Option<Card>,
    pub(super) must_give_back: bool,
    pub(super) is_lost: bool,
    // Between them.
    pub(super) to_node: VecDeque<ToNode>,
    pub(super) to_client: VecDeque<ToClient>,
    // The node's end.
    pub(super) lender: Lender,
    /// What keeps the bytes of loans: the slot of each.
    pub(super) kept: BTreeMap<LoanId, u8>,
    pub(super) operations: BTreeMap<u64, Serving>,
    /// The book has the lease.
    pub(super) is_leased: bool,
    pub(super) is_closed: bool,
    /// The node that this connection leads to is gone.
    pub(super) is_orphan: bool,
}

#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct Asked {
    pub(super) is_cancelled: bool,
}

#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct Serving {
    pub(super) loan: Option<LoanId>,
    pub(super) is_answered: bool,
    /// Under which it was asked.
    pub(super) epoch: u8,
}

impl Client {
    /// One that connects to a node of this epoch.
    pub(super) fn new(by_card: bool, epoch: u8) -> Client {
        let limits = LendLimits {
            lent_bytes_max: 1 << 20,
            loans_max: 1 << 10,
            leases_max: 1,
            lease: Duration::from_secs(1),
        };
        let extent = Extent { arena_bytes: SLOTS_MAX as u64, tray_bytes: 0, frame_bytes_max: 1 };
        Client {
            is_alive: true,
            borrower: Borrower::new(extent),
            asked: BTreeMap::new(),
            frames: BTreeMap::new(),
            reading: None,
            card: by_card.then(|| Card::new(epoch)),
            must_give_back: false,
            is_lost: false,
            to_node: VecDeque::new(),
            to_client: VecDeque::new(),
            lender: Lender::new(limits),
            kept: BTreeMap::new(),
            operations: BTreeMap::new(),
            is_leased: false,
            is_closed: false,
            is_orphan: false,
        }
    }

    /// The same client with a new connection.
    pub(super) fn fresh(&self, epoch: u8) -> Client {
        Client::new(self.card.is_some(), epoch)
    }

    pub(super) fn speaks(&self) -> bool {
        self.is_alive && !self.is_lost
    }

    /// The node hears and answers.
    pub(super) fn is_served(&self) -> bool {
        !self.is_orphan && !self.is_closed
    }

    /// The process is gone, and with it all that it could read.
    pub(super) fn die(&mut self) {
        self.is_alive = false;
        self.borrower = self.fresh(0).borrower;
        self.asked.clear();
        self.frames.clear();
        if let Some(card) = &mut self.card {
            card.reads.clear();
        }
        self.reading = None;
        self.must_give_back = false;
        self.is_lost = false;
        self.to_client.clear();
    }

    /// It hears that the node is gone, or has closed the connection.
    pub(super) fn see_loss(&mut self) {
        if self.card.is_some() {
            // Nothing that a card reads outlives its queue pair.
            return self.die();
        }
        self.is_lost = true;
        self.borrower.lost();
        self.asked.clear();
        self.must_give_back = false;
    }

    pub(super) fn send_returns(&mut self) {
        self.must_give_back = false;
        let loans = self.borrower.take_returns(usize::MAX);
        if !loans.is_empty() {
            self.to_node.push_back(ToNode::Return { loans });
        }
    }

    /// Numbers count how often something happened before, which changes nothing: they become the smallest of the same order.
    pub(super) fn renumber(&mut self) {
        let loans = RefCell::new(BTreeSet::from([LoanId(0)]));
        let operations = RefCell::new(BTreeSet::from([0]));
        self.each_number(
            &|loan| {
                loans.borrow_mut().insert(loan);
                loan
            },
            &|operation| {
                operations.borrow_mut().insert(operation);
                operation
            },
        );
        let (loans, operations): (Vec<LoanId>, Vec<u64>) =
            (loans.into_inner().into_iter().collect(), operations.into_inner().into_iter().collect());
        let is_smallest = loans.last() == Some(&LoanId(loans.len() as u64 - 1))
            && operations.last() == Some(&(operations.len() as u64 - 1));
        if !is_smallest {
            self.each_number(&|loan| LoanId(loans.binary_search(&loan).unwrap() as u64), &|operation| {
                operations.binary_search(&operation).unwrap() as u64
            });
        }
    }

    fn each_number(&mut self, loan: &dyn Fn(LoanId) -> LoanId, operation: &dyn Fn(u64) -> u64) {
        self.lender.renumber(loan);
        self.borrower.renumber(loan, operation);
        self.asked =
            std::mem::take(&mut self.asked).into_iter().map(|(id, of)| (operation(id), of)).collect();
        self.frames = std::mem::take(&mut self.frames).into_iter().map(|(id, of)| (loan(id), of)).collect();
        if let Some(card) = &mut self.card {
            card.reads = std::mem::take(&mut card.reads).into_iter().map(|(id, of)| (loan(id), of)).collect();
        }
        self.kept = std::mem::take(&mut self.kept).into_iter().map(|(id, of)| (loan(id), of)).collect();
        self.operations =
            std::mem::take(&mut self.operations).into_iter().map(|(id, of)| (operation(id), of)).collect();
        for serving in self.operations.values_mut() {
            serving.loan = serving.loan.map(loan);
        }
        for message in &mut self.to_node {
            match message {
                ToNode::Ask { operation: id, .. } | ToNode::Cancel { operation: id } => *id = operation(*id),
                ToNode::Return { loans } => loans.iter_mut().for_each(|id| *id = loan(*id)),
                ToNode::Release => {}
            }
        }
        for message in &mut self.to_client {
            match message {
                ToClient::Row { operation: of, loan: id, .. } => (*of, *id) = (operation(*of), loan(*id)),
                ToClient::End { operation: of } => *of = operation(*of),
            }
        }
    }
}
