//! What the small node does over one connection, and what of it arrives at the client.
//!
//! Not here: the boards of clients that have cards (`card`).

use super::card::Board;
use super::client::{LEASE, NOW, Serving};
use super::{Rules, Slot, ToClient, ToNode, World};
use crate::id::LoanId;
use crate::lend::{Descriptor, Effect, Place, Received};

impl World {
    pub(super) fn lend(&mut self, number: usize, operation: u64) {
        let client = &mut self.clients[number];
        let Some(serving) = client.operations.get_mut(&operation) else { return };
        serving.is_answered = true;
        if let Some(card) = &mut client.card {
            card.show(self.epoch);
            // It is answered that its epoch is over.
            if serving.epoch != self.epoch {
                return;
            }
        }
        let Some(slot) = self.slots.iter().position(|slot| slot.is_listed) else {
            return;
        };
        let Ok(loan) = client.lender.lend(LEASE, 1, NOW) else {
            self.fault = Some("nothing is lent below the limits");
            return;
        };
        serving.loan = Some(loan);
        self.slots[slot].references += 1;
        client.kept.insert(loan, slot as u8);
        client.to_client.push_back(ToClient::Row { operation, loan, slot: slot as u8, epoch: self.epoch });
    }

    pub(super) fn finish(&mut self, number: usize, operation: u64) {
        let client = &mut self.clients[number];
        client.operations.remove(&operation);
        client.to_client.push_back(ToClient::End { operation });
        let mut effects = Vec::new();
        client.lender.finish(LEASE, &mut effects);
        self.run(number, &effects);
    }

    pub(super) fn node_reads(&mut self, number: usize, rules: Rules) {
        let client = &mut self.clients[number];
        let mut effects = Vec::new();
        match client.to_node.pop_front() {
            Some(ToNode::Ask { operation, epoch }) => {
                if client.lender.begin(LEASE, NOW).is_err() {
                    self.fault = Some("an operation is refused below the limits");
                }
                client.is_leased = true;
                client.operations.insert(operation, Serving { loan: None, is_answered: false, epoch });
            }
            Some(ToNode::Cancel { operation }) => {
                if let Some(serving) = client.operations.get(&operation).copied() {
                    if let (Rules::FreeAtCancel, Some(loan)) = (rules, serving.loan) {
                        // Such a node does not hear of the loan again either.
                        let _ = client.lender.take_back(&[loan], &mut effects);
                    }
                    self.finish(number, operation);
                }
            }
            Some(ToNode::Return { loans }) => {
                // A node that freed some of it too early is not to be found by its own complaint.
                let is_out = |loan: &LoanId| rules == Rules::Kept || client.kept.contains_key(loan);
                let out: Vec<LoanId> = loans.iter().copied().filter(is_out).collect();
                if client.lender.take_back(&out, &mut effects).is_err() {
                    self.fault = Some("what is given back was not out");
                }
                if rules == Rules::NumbersAgain {
                    let out = client.kept.keys().filter(|loan| !loans.contains(loan));
                    *client.lender.newest_mut() = out.copied().max().unwrap_or_default();
                }
            }
            Some(ToNode::Release) => {
                if rules == Rules::FreeAtRelease {
                    let all: Vec<LoanId> = client.kept.keys().copied().collect();
                    let _ = client.lender.take_back(&all, &mut effects);
                }
                client.lender.release(LEASE, &mut effects);
                if rules == Rules::ReleaseAtOnce {
                    client.is_leased = false;
                }
            }
            None => {}
        }
        self.run(number, &effects);
    }

    pub(super) fn client_reads(&mut self, number: usize, rules: Rules) {
        let client = &mut self.clients[number];
        match client.to_client.pop_front() {
            Some(ToClient::Row { operation, loan, slot, epoch }) => {
                let row = Descriptor { loan, place: Place::Arena, at: u64::from(slot), len: 1 };
                match client.borrower.receive(operation, &[row]) {
                    Ok(Received::Kept) => client.take(loan, slot, epoch, rules),
                    Ok(Received::Unwanted) if rules == Rules::KeepUnwanted => {
                        client.borrower.take_returns(1);
                    }
                    Ok(Received::Unwanted) => {}
                    Err(_) => self.fault = Some("the row of a node that keeps to the rules is refused"),
                }
            }
            Some(ToClient::End { operation }) => {
                client.asked.remove(&operation);
                client.must_give_back |= client.borrower.finish(operation);
            }
            None => {}
        }
    }

    /// The node sees that the client's end is gone.
    pub(super) fn end(&mut self, number: usize) {
        let mut effects = Vec::new();
        self.clients[number].lender.end(&mut effects);
        self.run(number, &effects);
        let client = &mut self.clients[number];
        if client.is_alive {
            // Only where the rules are broken: the reader goes on without a connection.
            (client.is_closed, client.is_lost) = (true, true);
            client.operations.clear();
            client.borrower.lost();
            client.to_node.clear();
            client.to_client.clear();
        } else {
            *client = client.fresh(self.epoch);
        }
    }

    /// The node has enough of the client, which may be reading.
    pub(super) fn close(&mut self, number: usize, rules: Rules) {
        let mut effects = Vec::new();
        let client = &mut self.clients[number];
        client.is_closed = true;
        client.to_node.clear();
        if let Some(card) = &mut client.card {
            card.board = Board::Revoked;
        }
        client.lender.close(&mut effects);
        for _ in std::mem::take(&mut client.operations) {
            client.lender.finish(LEASE, &mut effects);
        }
        if rules == Rules::FreeAtClose {
            client.lender.end(&mut effects);
        }
        self.run(number, &effects);
    }

    /// What the clients map stays as it is; a node that starts has other memory.
    pub(super) fn kill_node(&mut self) {
        self.is_node_alive = false;
        self.slots.fill(Slot::FREE);
        for client in self.clients.iter_mut().filter(|client| !client.is_orphan) {
            let fresh = client.fresh(0);
            client.end_queue();
            client.is_orphan = true;
            client.to_node.clear();
            (client.lender, client.kept, client.operations) = (fresh.lender, fresh.kept, fresh.operations);
            (client.is_leased, client.is_closed) = (false, false);
        }
    }

    pub(super) fn run(&mut self, number: usize, effects: &[Effect]) {
        let client = &mut self.clients[number];
        for effect in effects {
            match effect {
                Effect::Free(loan) => match client.kept.remove(loan) {
                    Some(slot) => self.slots[usize::from(slot)].references -= 1,
                    None => self.fault = Some("a loan ends twice"),
                },
                Effect::Release(_) => client.is_leased = false,
                Effect::Renew(_) => {}
            }
        }
    }
}
