//! Invariants of the small world, now and after all operations have ended.

use super::{DriverRules, GrantWorld, ToNode, WANTED, WorldEvent};

impl GrantWorld {
    /// Invariants of every state.
    pub(in super::super) fn check_invariants(&self) -> Result<(), &'static str> {
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
            client.check_nic(&self.slots)?;
            if !client.frames.keys().all(|loan| client.grant_client.may_read(*loan)) {
                return Err("a client holds a frame without a readable grant");
            }
            let (loans, bytes) = client.grant_server.granted();
            if loans != client.granted_slots.len() || bytes < loans as u64 || (loans == 0) != (bytes == 0) {
                return Err("granted blocks differ from kept ones");
            }
            if !client.granted_slots.is_empty() && !client.is_leased {
                return Err("the book has no lease for granted blocks");
            }
            client.granted_slots.values().for_each(|slot| references[usize::from(*slot)] += 1);
        }
        if self.slots.iter().map(|slot| slot.references).ne(references) {
            return Err("references are not loans");
        }
        Ok(())
    }

    /// From here all operations end without new ones: no grant remains, neither after returns by
    /// clients nor after their end.
    pub(in super::super) fn drain(&mut self, rules: DriverRules) -> Result<(), &'static str> {
        for number in 0..self.clients.len() {
            if self.clients[number].is_orphan {
                continue;
            }
            self.settle(number, rules);
            self.check_invariants()?;
            let client = &self.clients[number];
            if client.nic.is_some() && client.is_closed && !client.granted_slots.is_empty() {
                return Err("a node that took back its grants still keeps blocks");
            }
            if client.is_alive && client.is_served() && !client.granted_slots.is_empty() {
                return Err("a client without readers does not return a grant");
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
            true => self.check_invariants(),
            false => Err("a slot has a reference without an owner"),
        }
    }

    /// Messages in flight arrive, and the client drops all of its frames.
    fn settle(&mut self, number: usize, rules: DriverRules) {
        loop {
            let client = &self.clients[number];
            let serving = client.operations.iter().next().map(|(id, serving)| (*id, serving.is_answered));
            let held = client.frames.keys().next().copied();
            let action = if client.is_alive && !client.to_client.is_empty() {
                WorldEvent::ClientReads(number)
            } else if client.is_served() && !client.to_node.is_empty() {
                WorldEvent::NodeReads(number)
            } else if let Some((operation, is_answered)) = serving {
                if is_answered {
                    WorldEvent::Finish(number, operation)
                } else {
                    WorldEvent::Grant(number, operation)
                }
            } else if client.reading.is_some() {
                WorldEvent::StopReading(number)
            } else if let Some(loan) = held {
                WorldEvent::Drop(number, loan)
            } else if let Some(action) = client.next_nic_event(number) {
                action
            } else if client.must_return && client.can_send() && client.is_served() {
                WorldEvent::SendReturns(number)
            } else {
                return;
            };
            self.apply(action, rules);
        }
    }
}
