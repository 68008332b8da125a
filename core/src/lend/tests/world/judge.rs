//! What must hold in the small world, now and once everybody ended what they do.

use super::{Action, Rules, ToNode, WANTED, World};

impl World {
    /// What must hold at every moment.
    pub(in super::super) fn judge(&self) -> Result<(), &'static str> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let mut references = vec![0; self.slots.len()];
        for client in &self.clients {
            let held = client.frames.values().chain(&client.reading);
            for slot in held.filter(|_| !client.is_orphan) {
                if self.slots[usize::from(*slot)].block != WANTED {
                    return Err("a client reads another block than the one it asked for");
                }
            }
            client.judge_card(&self.slots)?;
            if !client.frames.keys().all(|loan| client.borrower.may_read(*loan)) {
                return Err("a client holds what it may not read");
            }
            let (loans, bytes) = client.lender.lent();
            if loans != client.kept.len() || bytes < loans as u64 || (loans == 0) != (bytes == 0) {
                return Err("what is lent is not what is kept");
            }
            if !client.kept.is_empty() && !client.is_leased {
                return Err("the book has no lease of what is lent");
            }
            client.kept.values().for_each(|slot| references[usize::from(*slot)] += 1);
        }
        if self.slots.iter().map(|slot| slot.references).ne(references) {
            return Err("references are not loans");
        }
        Ok(())
    }

    /// From here everybody ends what they do, without anything new: nothing is left lent, neither by what clients give back
    /// nor by their going.
    pub(in super::super) fn drain(&mut self, rules: Rules) -> Result<(), &'static str> {
        for number in 0..self.clients.len() {
            if self.clients[number].is_orphan {
                continue;
            }
            self.settle(number, rules);
            self.judge()?;
            let client = &self.clients[number];
            if client.card.is_some() && client.is_closed && !client.kept.is_empty() {
                return Err("what a node took back stays lent");
            }
            if client.is_alive && client.is_served() && !client.kept.is_empty() {
                return Err("a loan is not given back by a client that reads nothing any more");
            }
            if client.is_alive && client.is_served() {
                self.clients[number].to_node.push_back(ToNode::Release);
                self.settle(number, rules);
                if self.clients[number].is_leased {
                    return Err("a lease that was released stays");
                }
            }
            self.clients[number].die();
            self.end(number);
        }
        match self.slots.iter().all(|slot| slot.references == 0) {
            true => self.judge(),
            false => Err("a slot is referred to by nobody"),
        }
    }

    /// What is on the way arrives, and the client lets go of all it has.
    fn settle(&mut self, number: usize, rules: Rules) {
        loop {
            let client = &self.clients[number];
            let serving = client.operations.iter().next().map(|(id, serving)| (*id, serving.is_answered));
            let held = client.frames.keys().next().copied();
            let action = if client.is_alive && !client.to_client.is_empty() {
                Action::ClientReads(number)
            } else if client.is_served() && !client.to_node.is_empty() {
                Action::NodeReads(number)
            } else if let Some((operation, is_answered)) = serving {
                if is_answered { Action::Finish(number, operation) } else { Action::Lend(number, operation) }
            } else if client.reading.is_some() {
                Action::StopReading(number)
            } else if let Some(loan) = held {
                Action::Drop(number, loan)
            } else if let Some(action) = client.card_goes_on(number) {
                action
            } else if client.must_give_back && client.speaks() && client.is_served() {
                Action::GiveBack(number)
            } else {
                return;
            };
            self.apply(action, rules);
        }
    }
}
