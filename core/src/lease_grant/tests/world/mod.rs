//! A small node with its clients; every possible next event is a value. Production `GrantServer`
//! and `GrantClient` at the ends of queues, slots that are rewritten as soon as they are
//! unreferenced, and processes that are killed.
//!
//! Clients read mapped memory, or an RDMA NIC reads for them (`nic`). The evictor is stronger than
//! the tier book: it drops any block at any moment. Time stands still, so that no clock keeps the
//! state correct: a lease that expires is a `Close` at the node and a `Kill` at the client, at any
//! moment. Not here: the search (`search`).

mod client;
mod judge;
mod nic;
mod node;

use std::hash::Hash;

use super::search::Recorder;
use crate::id::GrantId;
use client::{Client, PendingOperation};

/// Behaviour of the two ends; all but the first are wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriverRules {
    /// The production rules.
    Correct,
    /// The node frees the grants of a released lease.
    FreeAtRelease,
    /// The node treats a cancelled operation as if no grant had been sent.
    FreeAtCancel,
    /// The client returns grants that it still reads.
    ReturnBeforeReadEnds,
    /// The socket of an ending process closes before its reads stop.
    CloseBeforeReadEnds,
    /// The node treats a connection that it closes as ended.
    FreeAtClose,
    /// The book is told of a release as soon as the client sends it.
    ReleaseAtOnce,
    /// Grant ids are reused.
    ReuseIds,
    /// Grants of a cancelled operation are not returned.
    KeepUnwantedGrants,
    /// The client checks the epoch word when its NIC starts to read.
    CheckEpochBeforeRead,
    /// The node writes a new epoch word only with its next answer over that connection.
    DelayEpochWord,
}

/// Limits of the searched state space.
#[derive(Clone, Copy, Debug)]
pub(super) struct SearchBounds {
    pub(super) slots: usize,
    pub(super) clients: usize,
    /// Messages in flight in each direction.
    pub(super) queue: usize,
    /// Operations of a client, including cancelled ones.
    pub(super) operations: usize,
    /// Grants of a client, including those in flight in both directions and requested ones.
    pub(super) grants: usize,
    /// The node may be killed and restart.
    pub(super) node_dies: bool,
    /// NICs read for clients; no memory is mapped.
    pub(super) by_nic: bool,
    /// Further epochs of a live node.
    pub(super) epochs: u8,
}

/// One event. The first number is the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorldEvent {
    Ask(usize),
    Cancel(usize, u64),
    StopReading(usize),
    Drop(usize, GrantId),
    SendReturns(usize),
    Release(usize),
    NodeReads(usize),
    ClientReads(usize),
    Grant(usize, u64),
    Finish(usize, u64),
    Kill(usize),
    End(usize),
    Close(usize),
    DetectLoss(usize),
    Connect(usize),
    KillNode,
    StartNode,
    Evict(usize),
    Write(usize, u8),
    /// A NIC reads the slot at this moment.
    NicReads(usize, GrantId),
    /// The client checks the epoch word, and delivers the NIC's bytes or gives up the connection.
    CheckEpoch(usize, GrantId),
    /// The node, which closed the connection, destroys its queue pair.
    EndQueue(usize),
    /// Then it takes back its grants.
    RevokeGrants(usize),
    NewEpoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToNode {
    Ask { operation: u64, epoch: u8 },
    Cancel { operation: u64 },
    Return { loans: Vec<GrantId> },
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToClient {
    Row { operation: u64, loan: GrantId, slot: u8, epoch: u8 },
    End { operation: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct TestSlot {
    block: u8,
    /// Fetches find the wanted block here.
    is_listed: bool,
    references: u8,
}

impl TestSlot {
    const FREE: TestSlot = TestSlot { block: OTHER, is_listed: false, references: 0 };
}

const SLOTS_MAX: usize = 2;
/// The requested block, and every other one: further contents of a slot make no difference.
const WANTED: u8 = 1;
const OTHER: u8 = 2;

/// The whole state.
#[derive(Clone, Debug)]
pub(super) struct GrantWorld {
    slots: Vec<TestSlot>,
    clients: Vec<Client>,
    is_node_alive: bool,
    epoch: u8,
    /// A valid message that was rejected.
    fault: Option<&'static str>,
}

impl GrantWorld {
    pub(super) fn new(bounds: SearchBounds) -> GrantWorld {
        let clients = vec![Client::new(bounds.by_nic, 0); bounds.clients];
        GrantWorld {
            slots: vec![TestSlot::FREE; bounds.slots],
            clients,
            is_node_alive: true,
            epoch: 0,
            fault: None,
        }
    }

    /// Renumbers ids that this action may have increased.
    pub(super) fn renumber(&mut self, after: WorldEvent) {
        match after {
            WorldEvent::Ask(number)
            | WorldEvent::Cancel(number, _)
            | WorldEvent::StopReading(number)
            | WorldEvent::Drop(number, _)
            | WorldEvent::SendReturns(number)
            | WorldEvent::Release(number)
            | WorldEvent::NodeReads(number)
            | WorldEvent::ClientReads(number)
            | WorldEvent::Grant(number, _)
            | WorldEvent::Finish(number, _)
            | WorldEvent::Kill(number)
            | WorldEvent::End(number)
            | WorldEvent::Close(number)
            | WorldEvent::DetectLoss(number)
            | WorldEvent::Connect(number)
            | WorldEvent::NicReads(number, _)
            | WorldEvent::CheckEpoch(number, _)
            | WorldEvent::EndQueue(number)
            | WorldEvent::RevokeGrants(number) => self.clients[number].renumber(),
            WorldEvent::KillNode => self.clients.iter_mut().for_each(Client::renumber),
            WorldEvent::StartNode | WorldEvent::Evict(_) | WorldEvent::Write(..) | WorldEvent::NewEpoch => {}
        }
    }

    /// Feeds the whole state to a hash, independent of the order of clients.
    pub(super) fn identity(&self, hash: impl Fn(&dyn Fn(&mut Recorder)) -> u128) -> u128 {
        let mut clients: Vec<u128> =
            self.clients.iter().map(|client| hash(&|recorder| client.hash(recorder))).collect();
        clients.sort_unstable();
        hash(&|recorder| (&self.slots, self.is_node_alive, self.epoch, self.fault, &clients).hash(recorder))
    }

    /// All possible next events.
    pub(super) fn events(&self, rules: DriverRules, bounds: SearchBounds) -> Vec<WorldEvent> {
        let mut all = Vec::new();
        for number in 0..self.clients.len() {
            self.client_events(number, bounds, &mut all);
            self.connection_events(number, rules, bounds, &mut all);
            self.nic_events(number, &mut all);
        }
        if !self.is_node_alive {
            all.push(WorldEvent::StartNode);
            return all;
        }
        all.extend(bounds.node_dies.then_some(WorldEvent::KillNode));
        all.extend((self.epoch < bounds.epochs).then_some(WorldEvent::NewEpoch));
        for (number, slot) in self.slots.iter().enumerate() {
            if slot.is_listed {
                all.push(WorldEvent::Evict(number));
            } else if slot.references == 0 {
                let is_listed = self.slots.iter().any(|slot| slot.is_listed);
                all.extend((!is_listed).then_some(WorldEvent::Write(number, WANTED)));
                all.extend((slot.block != OTHER).then_some(WorldEvent::Write(number, OTHER)));
            }
        }
        all
    }

    fn client_events(&self, number: usize, bounds: SearchBounds, all: &mut Vec<WorldEvent>) {
        let client = &self.clients[number];
        if !client.is_alive {
            return;
        }
        let has_room = client.can_send() && client.to_node.len() < bounds.queue;
        if has_room {
            let is_asking = client.pending.values().any(|asked| !asked.is_cancelled);
            let is_full = client.granted_slots.len() + client.pending.len() >= bounds.grants
                || client.pending.len() >= bounds.operations;
            if !is_asking && !is_full {
                all.push(WorldEvent::Ask(number));
            }
            let open = client.pending.iter().filter(|(_, asked)| !asked.is_cancelled);
            all.extend(open.map(|(operation, _)| WorldEvent::Cancel(number, *operation)));
            if !client.to_node.contains(&ToNode::Release) {
                all.push(WorldEvent::Release(number));
            }
            if client.grant_client.pending_returns() > 0 {
                all.push(WorldEvent::SendReturns(number));
            }
        }
        match client.reading {
            Some(_) => all.push(WorldEvent::StopReading(number)),
            None => all.extend(client.frames.keys().map(|loan| WorldEvent::Drop(number, *loan))),
        }
        all.push(WorldEvent::Kill(number));
        let is_gone = (client.is_orphan || client.is_closed) && client.to_client.is_empty();
        if is_gone && !client.is_lost {
            all.push(WorldEvent::DetectLoss(number));
        }
    }

    fn connection_events(
        &self,
        number: usize,
        rules: DriverRules,
        bounds: SearchBounds,
        all: &mut Vec<WorldEvent>,
    ) {
        let client = &self.clients[number];
        if client.is_alive && !client.to_client.is_empty() {
            all.push(WorldEvent::ClientReads(number));
        }
        if client.is_orphan {
            if !client.is_alive && self.is_node_alive {
                all.push(WorldEvent::Connect(number));
            }
            return;
        }
        if !client.is_alive || rules == DriverRules::CloseBeforeReadEnds {
            all.push(WorldEvent::End(number));
        }
        if !client.is_served() {
            return;
        }
        all.push(WorldEvent::Close(number));
        let has_room = client.to_client.len() < bounds.queue;
        match client.to_node.front() {
            Some(ToNode::Cancel { operation }) if client.operations.contains_key(operation) && !has_room => {}
            Some(_) => all.push(WorldEvent::NodeReads(number)),
            None => {}
        }
        if has_room {
            for (operation, serving) in &client.operations {
                all.push(match serving.is_answered {
                    false => WorldEvent::Grant(number, *operation),
                    true => WorldEvent::Finish(number, *operation),
                });
            }
        }
    }

    pub(super) fn apply(&mut self, action: WorldEvent, rules: DriverRules) {
        match action {
            WorldEvent::Ask(number) => {
                let client = &mut self.clients[number];
                let operation = client.grant_client.begin(1);
                client.pending.insert(operation, PendingOperation { is_cancelled: false });
                client.to_node.push_back(ToNode::Ask { operation, epoch: self.epoch });
            }
            WorldEvent::Cancel(number, operation) => {
                let client = &mut self.clients[number];
                client.grant_client.cancel(operation);
                if let Some(asked) = client.pending.get_mut(&operation) {
                    asked.is_cancelled = true;
                }
                client.to_node.push_back(ToNode::Cancel { operation });
            }
            WorldEvent::StopReading(number) => self.clients[number].reading = None,
            WorldEvent::Drop(number, loan) => {
                let client = &mut self.clients[number];
                let frame = client.frames.remove(&loan);
                client.reading = frame.filter(|_| rules == DriverRules::ReturnBeforeReadEnds);
                client.must_return |= client.grant_client.release(loan);
            }
            WorldEvent::SendReturns(number) => self.clients[number].send_returns(),
            WorldEvent::Release(number) => self.clients[number].to_node.push_back(ToNode::Release),
            WorldEvent::NodeReads(number) => self.node_reads(number, rules),
            WorldEvent::ClientReads(number) => self.client_reads(number, rules),
            WorldEvent::Grant(number, operation) => self.grant(number, operation),
            WorldEvent::Finish(number, operation) => self.finish(number, operation),
            WorldEvent::Kill(number) => self.clients[number].die(),
            WorldEvent::End(number) => self.end(number),
            WorldEvent::Close(number) => self.close(number, rules),
            WorldEvent::DetectLoss(number) => self.clients[number].detect_loss(),
            WorldEvent::Connect(number) => self.clients[number] = self.clients[number].fresh(self.epoch),
            WorldEvent::KillNode => self.kill_node(),
            WorldEvent::StartNode => self.is_node_alive = true,
            WorldEvent::Evict(slot) => self.slots[slot].is_listed = false,
            WorldEvent::Write(slot, block) => {
                self.slots[slot] = TestSlot { block, is_listed: block == WANTED, references: 0 };
            }
            WorldEvent::NicReads(number, loan) => self.nic_reads(number, loan),
            WorldEvent::CheckEpoch(number, loan) => self.check_epoch(number, loan, rules),
            WorldEvent::EndQueue(number) => self.clients[number].end_queue(),
            WorldEvent::RevokeGrants(number) => self.revoke_grants(number),
            WorldEvent::NewEpoch => self.new_epoch(rules),
        }
    }
}
