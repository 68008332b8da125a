//! Clients with an RDMA NIC that reads for them: it sees a slot at some moment before its read
//! ends, as long as the queue pair lives. Its bytes count once the client has checked the epoch
//! word afterwards.
//!
//! Here the node also ends grants: it revokes the epoch word, destroys its end of the queue pair,
//! and only then frees the grants. Not here: descriptors and returns, which are as for mapping
//! clients.

use std::collections::BTreeMap;

use super::client::Client;
use super::{DriverRules, GrantWorld, TestSlot, WANTED, WorldEvent};
use crate::id::GrantId;

/// The violation of a NIC that sees another block.
const WRONG_BLOCK: &str = "a NIC reads another block than the granted one";

/// Contents of a connection's epoch word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum EpochWord {
    /// The node grants under this epoch.
    Epoch(u8),
    /// The node ends the connection.
    Revoked,
}

/// A client's NIC, and the node's end of its queue pair.
#[derive(Clone, Debug, Hash)]
pub(super) struct Nic {
    pub(super) epoch_word: EpochWord,
    has_queue: bool,
    pub(super) reads: BTreeMap<GrantId, NicRead>,
}

/// A block that is being read, or has been.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct NicRead {
    slot: u8,
    /// Epoch of its grant.
    epoch: u8,
    observed: Option<NicObservation>,
    /// Under a broken rule: the epoch word was checked before the read.
    is_checked: bool,
}

/// Bytes that a NIC read.
#[derive(Clone, Copy, Debug, Hash)]
struct NicObservation {
    block: u8,
    /// The epoch of the grant had ended.
    is_late: bool,
}

impl Nic {
    pub(super) fn new(epoch: u8) -> Nic {
        Nic { epoch_word: EpochWord::Epoch(epoch), has_queue: true, reads: BTreeMap::new() }
    }

    /// No new epoch is shown after a revocation.
    pub(super) fn show(&mut self, epoch: u8) {
        if self.epoch_word != EpochWord::Revoked {
            self.epoch_word = EpochWord::Epoch(epoch);
        }
    }
}

impl Client {
    /// A descriptor arrived: a mapping client may read from now on, a NIC starts to read.
    pub(super) fn receive_grant(&mut self, loan: GrantId, slot: u8, epoch: u8, rules: DriverRules) {
        let Some(card) = &mut self.nic else {
            self.frames.insert(loan, slot);
            return;
        };
        let is_vouched =
            rules == DriverRules::CheckEpochBeforeRead && card.epoch_word == EpochWord::Epoch(epoch);
        card.reads.insert(loan, NicRead { slot, epoch, observed: None, is_checked: is_vouched });
        if rules == DriverRules::ReturnBeforeReadEnds {
            self.must_return |= self.grant_client.release(loan);
        }
    }

    /// The queue pair ends: unfinished reads fail.
    pub(super) fn end_queue(&mut self) {
        if let Some(card) = &mut self.nic {
            card.has_queue = false;
        }
    }

    /// The next spontaneous event of the NIC, or of the node on its behalf.
    pub(super) fn next_nic_event(&self, number: usize) -> Option<WorldEvent> {
        let card = self.nic.as_ref()?;
        if let Some((loan, read)) = card.reads.iter().next() {
            return Some(match read.observed {
                // Reads fail, so the client gives up the connection.
                _ if !card.has_queue => WorldEvent::Kill(number),
                None => WorldEvent::NicReads(number, *loan),
                Some(_) => WorldEvent::CheckEpoch(number, *loan),
            });
        }
        if !self.is_closed || self.is_orphan {
            return None;
        }
        let may_take_back = (!self.granted_slots.is_empty()).then_some(WorldEvent::RevokeGrants(number));
        if card.has_queue { Some(WorldEvent::EndQueue(number)) } else { may_take_back }
    }

    /// A NIC sees only granted blocks.
    pub(super) fn check_nic(&self, slots: &[TestSlot]) -> Result<(), &'static str> {
        let Some(card) = self.nic.as_ref().filter(|card| card.has_queue) else { return Ok(()) };
        let mut under_way = card.reads.values().filter(|read| read.observed.is_none());
        match under_way.all(|read| slots[usize::from(read.slot)].block == WANTED) {
            true => Ok(()),
            false => Err(WRONG_BLOCK),
        }
    }
}

impl GrantWorld {
    pub(super) fn nic_events(&self, number: usize, all: &mut Vec<WorldEvent>) {
        let client = &self.clients[number];
        let Some(card) = &client.nic else { return };
        if client.is_orphan {
            return;
        }
        for (loan, read) in card.reads.iter().filter(|_| card.has_queue) {
            all.push(match read.observed {
                None => WorldEvent::NicReads(number, *loan),
                Some(_) => WorldEvent::CheckEpoch(number, *loan),
            });
        }
        if client.is_closed && card.has_queue {
            all.push(WorldEvent::EndQueue(number));
        } else if client.is_closed && !client.granted_slots.is_empty() {
            all.push(WorldEvent::RevokeGrants(number));
        }
    }

    pub(super) fn nic_reads(&mut self, number: usize, loan: GrantId) {
        let (slots, epoch) = (&self.slots, self.epoch);
        let read = self.clients[number].nic.as_mut().and_then(|card| card.reads.get_mut(&loan));
        if let Some(read) = read {
            let block = slots[usize::from(read.slot)].block;
            read.observed = Some(NicObservation { block, is_late: read.epoch != epoch });
        }
    }

    pub(super) fn check_epoch(&mut self, number: usize, loan: GrantId, rules: DriverRules) {
        let client = &mut self.clients[number];
        let Some(card) = &mut client.nic else { return };
        let Some(NicRead { epoch, observed: Some(saw), is_checked: is_vouched, .. }) =
            card.reads.remove(&loan)
        else {
            return;
        };
        let is_good = match rules {
            DriverRules::CheckEpochBeforeRead => is_vouched,
            _ => card.epoch_word == EpochWord::Epoch(epoch),
        };
        if !is_good {
            return client.die();
        }
        if saw.block != WANTED {
            self.fault = Some(WRONG_BLOCK);
        } else if saw.is_late {
            self.fault = Some("bytes read after the end of their epoch are delivered");
        }
        if rules != DriverRules::ReturnBeforeReadEnds {
            client.must_return |= client.grant_client.release(loan);
        }
    }

    /// The queue pair is gone, so no reader of the grants is left.
    pub(super) fn revoke_grants(&mut self, number: usize) {
        let mut effects = Vec::new();
        self.clients[number].grant_server.end(&mut effects);
        self.apply_effects(number, &effects);
    }

    /// The live node gets its next epoch.
    pub(super) fn new_epoch(&mut self, rules: DriverRules) {
        self.epoch += 1;
        if rules == DriverRules::DelayEpochWord {
            return;
        }
        for card in self.clients.iter_mut().filter_map(|client| client.nic.as_mut()) {
            card.show(self.epoch);
        }
    }
}
