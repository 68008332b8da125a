//! Actions of the small node over one connection, and their effect at the client.
//!
//! Not here: the epoch words of clients with NICs (`nic`).

use super::client::{LEASE, NOW, NodeOperation};
use super::nic::EpochWord;
use super::{DriverRules, GrantWorld, TestSlot, ToClient, ToNode};
use crate::id::GrantId;
use crate::lease_grant::{GrantDescriptor, GrantEffect, GrantMemory, ReceiveOutcome};

impl GrantWorld {
    pub(super) fn grant(&mut self, number: usize, operation: u64) {
        let client = &mut self.clients[number];
        let Some(serving) = client.operations.get_mut(&operation) else { return };
        serving.is_answered = true;
        if let Some(card) = &mut client.nic {
            card.show(self.epoch);
            // The answer says that its epoch has ended.
            if serving.epoch != self.epoch {
                return;
            }
        }
        let Some(slot) = self.slots.iter().position(|slot| slot.is_listed) else {
            return;
        };
        let Ok(loan) = client.grant_server.grant(LEASE, 1, NOW) else {
            self.fault = Some("a grant is refused below the limits");
            return;
        };
        serving.grant = Some(loan);
        self.slots[slot].references += 1;
        client.granted_slots.insert(loan, slot as u8);
        client.to_client.push_back(ToClient::Row { operation, loan, slot: slot as u8, epoch: self.epoch });
    }

    pub(super) fn finish(&mut self, number: usize, operation: u64) {
        let client = &mut self.clients[number];
        client.operations.remove(&operation);
        client.to_client.push_back(ToClient::End { operation });
        let mut effects = Vec::new();
        client.grant_server.finish(LEASE, &mut effects);
        self.apply_effects(number, &effects);
    }

    pub(super) fn node_reads(&mut self, number: usize, rules: DriverRules) {
        let client = &mut self.clients[number];
        let mut effects = Vec::new();
        match client.to_node.pop_front() {
            Some(ToNode::Ask { operation, epoch }) => {
                if client.grant_server.begin(LEASE, NOW).is_err() {
                    self.fault = Some("an operation is refused below the limits");
                }
                client.is_leased = true;
                client.operations.insert(operation, NodeOperation { grant: None, is_answered: false, epoch });
            }
            Some(ToNode::Cancel { operation }) => {
                if let Some(serving) = client.operations.get(&operation).copied() {
                    if let (DriverRules::FreeAtCancel, Some(loan)) = (rules, serving.grant) {
                        // Such a node does not accept the return of the grant either.
                        let _ = client.grant_server.return_grants(&[loan], &mut effects);
                    }
                    self.finish(number, operation);
                }
            }
            Some(ToNode::Return { loans }) => {
                // Under a broken rule, the node must not be caught by its own check of freed
                // grants.
                let is_out =
                    |loan: &GrantId| rules == DriverRules::Correct || client.granted_slots.contains_key(loan);
                let out: Vec<GrantId> = loans.iter().copied().filter(is_out).collect();
                if client.grant_server.return_grants(&out, &mut effects).is_err() {
                    self.fault = Some("a returned grant is unknown");
                }
                if rules == DriverRules::ReuseIds {
                    let out = client.granted_slots.keys().filter(|loan| !loans.contains(loan));
                    *client.grant_server.newest_mut() = out.copied().max().unwrap_or_default();
                }
            }
            Some(ToNode::Release) => {
                if rules == DriverRules::FreeAtRelease {
                    let all: Vec<GrantId> = client.granted_slots.keys().copied().collect();
                    let _ = client.grant_server.return_grants(&all, &mut effects);
                }
                client.grant_server.release(LEASE, &mut effects);
                if rules == DriverRules::ReleaseAtOnce {
                    client.is_leased = false;
                }
            }
            None => {}
        }
        self.apply_effects(number, &effects);
    }

    pub(super) fn client_reads(&mut self, number: usize, rules: DriverRules) {
        let client = &mut self.clients[number];
        match client.to_client.pop_front() {
            Some(ToClient::Row { operation, loan, slot, epoch }) => {
                let row = GrantDescriptor {
                    grant: loan,
                    memory: GrantMemory::Arena,
                    offset: u64::from(slot),
                    len: 1,
                };
                match client.grant_client.receive(operation, &[row]) {
                    Ok(ReceiveOutcome::Accepted) => client.receive_grant(loan, slot, epoch, rules),
                    Ok(ReceiveOutcome::Unwanted) if rules == DriverRules::KeepUnwantedGrants => {
                        client.grant_client.take_returns(1);
                    }
                    Ok(ReceiveOutcome::Unwanted) => {}
                    Err(_) => self.fault = Some("a valid descriptor is rejected"),
                }
            }
            Some(ToClient::End { operation }) => {
                client.pending.remove(&operation);
                client.must_return |= client.grant_client.finish(operation);
            }
            None => {}
        }
    }

    /// The node sees that the client's end is gone.
    pub(super) fn end(&mut self, number: usize) {
        let mut effects = Vec::new();
        self.clients[number].grant_server.end(&mut effects);
        self.apply_effects(number, &effects);
        let client = &mut self.clients[number];
        if client.is_alive {
            // Only under a broken rule: the reader continues without a connection.
            (client.is_closed, client.is_lost) = (true, true);
            client.operations.clear();
            client.grant_client.server_lost();
            client.to_node.clear();
            client.to_client.clear();
        } else {
            *client = client.fresh(self.epoch);
        }
    }

    /// The node closes the connection of a client that may still read.
    pub(super) fn close(&mut self, number: usize, rules: DriverRules) {
        let mut effects = Vec::new();
        let client = &mut self.clients[number];
        client.is_closed = true;
        client.to_node.clear();
        if let Some(card) = &mut client.nic {
            card.epoch_word = EpochWord::Revoked;
        }
        client.grant_server.close(&mut effects);
        for _ in std::mem::take(&mut client.operations) {
            client.grant_server.finish(LEASE, &mut effects);
        }
        if rules == DriverRules::FreeAtClose {
            client.grant_server.end(&mut effects);
        }
        self.apply_effects(number, &effects);
    }

    /// Memory that clients have mapped stays as it is; a restarted node has other memory.
    pub(super) fn kill_node(&mut self) {
        self.is_node_alive = false;
        self.slots.fill(TestSlot::FREE);
        for client in self.clients.iter_mut().filter(|client| !client.is_orphan) {
            let fresh = client.fresh(0);
            client.end_queue();
            client.is_orphan = true;
            client.to_node.clear();
            (client.grant_server, client.granted_slots, client.operations) =
                (fresh.grant_server, fresh.granted_slots, fresh.operations);
            (client.is_leased, client.is_closed) = (false, false);
        }
    }

    pub(super) fn apply_effects(&mut self, number: usize, effects: &[GrantEffect]) {
        let client = &mut self.clients[number];
        for effect in effects {
            match effect {
                GrantEffect::Free(loan) => match client.granted_slots.remove(loan) {
                    Some(slot) => self.slots[usize::from(slot)].references -= 1,
                    None => self.fault = Some("a grant ends twice"),
                },
                GrantEffect::Release(_) => client.is_leased = false,
                GrantEffect::Renew(_) => {}
            }
        }
    }
}
