//! Clients whose card reads for them: it sees a slot at some moment before its read ends, as long as the queue pair lives. What it
//! saw counts once the client looked at the board behind it.
//!
//! Here the node ends loans, too: it says so on the board, ends its end of the queue pair, and only then lets go of what was lent.
//! Not here: rows and what is given back, which are as for those who map.

use std::collections::BTreeMap;

use super::client::Client;
use super::{Action, Rules, Slot, WANTED, World};
use crate::id::LoanId;

/// What is wrong with a card that sees something else.
const ANOTHER: &str = "a card reads another block than the one that was lent";

/// What stands on a connection's board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Board {
    /// The node lends under this epoch.
    Epoch(u8),
    /// The node ends the connection.
    Revoked,
}

/// A client's card, and the node's end of its queue pair.
#[derive(Clone, Debug, Hash)]
pub(super) struct Card {
    pub(super) board: Board,
    has_queue: bool,
    pub(super) reads: BTreeMap<LoanId, Read>,
}

/// A block that is being read, or was.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct Read {
    slot: u8,
    /// Under which it was lent.
    epoch: u8,
    saw: Option<Saw>,
    /// Where the rules are broken: the board was looked at before.
    is_vouched: bool,
}

/// What a card took.
#[derive(Clone, Copy, Debug, Hash)]
struct Saw {
    block: u8,
    /// The epoch had ended under which it was lent.
    is_late: bool,
}

impl Card {
    pub(super) fn new(epoch: u8) -> Card {
        Card { board: Board::Epoch(epoch), has_queue: true, reads: BTreeMap::new() }
    }

    /// Nothing is shown any more where everything was taken back.
    pub(super) fn show(&mut self, epoch: u8) {
        if self.board != Board::Revoked {
            self.board = Board::Epoch(epoch);
        }
    }
}

impl Client {
    /// A row came: whoever maps may read it from now on, a card begins to.
    pub(super) fn take(&mut self, loan: LoanId, slot: u8, epoch: u8, rules: Rules) {
        let Some(card) = &mut self.card else {
            self.frames.insert(loan, slot);
            return;
        };
        let is_vouched = rules == Rules::VouchBeforeTheReadEnds && card.board == Board::Epoch(epoch);
        card.reads.insert(loan, Read { slot, epoch, saw: None, is_vouched });
        if rules == Rules::ReturnBeforeTheReadEnds {
            self.must_give_back |= self.borrower.give_back(loan);
        }
    }

    /// Its queue pair is of no more use: what was not read by now is not.
    pub(super) fn end_queue(&mut self) {
        if let Some(card) = &mut self.card {
            card.has_queue = false;
        }
    }

    /// What its card, or the node on behalf of it, does next by itself.
    pub(super) fn card_goes_on(&self, number: usize) -> Option<Action> {
        let card = self.card.as_ref()?;
        if let Some((loan, read)) = card.reads.iter().next() {
            return Some(match read.saw {
                // Reads fail, so the client gives the connection up.
                _ if !card.has_queue => Action::Kill(number),
                None => Action::CardReads(number, *loan),
                Some(_) => Action::Vouch(number, *loan),
            });
        }
        if !self.is_closed || self.is_orphan {
            return None;
        }
        let may_take_back = (!self.kept.is_empty()).then_some(Action::TakeBack(number));
        if card.has_queue { Some(Action::EndQueue(number)) } else { may_take_back }
    }

    /// What a card may still see is what was lent.
    pub(super) fn judge_card(&self, slots: &[Slot]) -> Result<(), &'static str> {
        let Some(card) = self.card.as_ref().filter(|card| card.has_queue) else { return Ok(()) };
        let mut under_way = card.reads.values().filter(|read| read.saw.is_none());
        match under_way.all(|read| slots[usize::from(read.slot)].block == WANTED) {
            true => Ok(()),
            false => Err(ANOTHER),
        }
    }
}

impl World {
    pub(super) fn actions_of_card(&self, number: usize, all: &mut Vec<Action>) {
        let client = &self.clients[number];
        let Some(card) = &client.card else { return };
        if client.is_orphan {
            return;
        }
        for (loan, read) in card.reads.iter().filter(|_| card.has_queue) {
            all.push(match read.saw {
                None => Action::CardReads(number, *loan),
                Some(_) => Action::Vouch(number, *loan),
            });
        }
        if client.is_closed && card.has_queue {
            all.push(Action::EndQueue(number));
        } else if client.is_closed && !client.kept.is_empty() {
            all.push(Action::TakeBack(number));
        }
    }

    pub(super) fn card_reads(&mut self, number: usize, loan: LoanId) {
        let (slots, epoch) = (&self.slots, self.epoch);
        let read = self.clients[number].card.as_mut().and_then(|card| card.reads.get_mut(&loan));
        if let Some(read) = read {
            let block = slots[usize::from(read.slot)].block;
            read.saw = Some(Saw { block, is_late: read.epoch != epoch });
        }
    }

    pub(super) fn vouch(&mut self, number: usize, loan: LoanId, rules: Rules) {
        let client = &mut self.clients[number];
        let Some(card) = &mut client.card else { return };
        let Some(Read { epoch, saw: Some(saw), is_vouched, .. }) = card.reads.remove(&loan) else { return };
        let is_good = match rules {
            Rules::VouchBeforeTheReadEnds => is_vouched,
            _ => card.board == Board::Epoch(epoch),
        };
        if !is_good {
            return client.die();
        }
        if saw.block != WANTED {
            self.fault = Some(ANOTHER);
        } else if saw.is_late {
            self.fault = Some("what was read behind the end of its epoch is handed on");
        }
        if rules != Rules::ReturnBeforeTheReadEnds {
            client.must_give_back |= client.borrower.give_back(loan);
        }
    }

    /// The queue pair is gone, so nobody reads what was lent.
    pub(super) fn take_back(&mut self, number: usize) {
        let mut effects = Vec::new();
        self.clients[number].lender.end(&mut effects);
        self.run(number, &effects);
    }

    /// Routers give the node, which lives, its next epoch.
    pub(super) fn new_epoch(&mut self, rules: Rules) {
        self.epoch += 1;
        if rules == Rules::ShowAtTheNextAnswer {
            return;
        }
        for card in self.clients.iter_mut().filter_map(|client| client.card.as_mut()) {
            card.show(self.epoch);
        }
    }
}
