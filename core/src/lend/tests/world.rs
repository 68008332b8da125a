//! A small node with its clients, in which everything that can happen next is a value: production `Lender` and `Borrower`
//! at the ends of queues, slots that are written again as soon as nobody refers to them, and processes that are killed.
//!
//! Clients read what they map, or have a card read it for them (`card`). The evictor is stronger than the tier book: it drops
//! any block at any moment. Time stands still, so that no clock keeps anything right: a lease that ends is a `Close` at the node
//! and a `Kill` at the client, each of which may come at any moment. Not here: the walk through all of it (`search`).

mod card;
mod client;
mod judge;
mod node;

use std::hash::Hash;

use super::search::Recorder;
use crate::id::LoanId;
use client::{Asked, Client};

/// How the ends behave; all but the first are wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    /// As they should.
    Kept,
    /// The node takes the end of a lease for the end of its loans.
    FreeAtRelease,
    /// The node takes a cancelled operation for one of which nothing arrived.
    FreeAtCancel,
    /// The client gives back what it still reads.
    ReturnBeforeTheReadEnds,
    /// The socket of a process that ends goes before its memory.
    EndBeforeTheReaderStopped,
    /// The node that closes a connection takes it for ended.
    FreeAtClose,
    /// The book hears of the end of a lease when the client says it.
    ReleaseAtOnce,
    /// Numbers of loans are used again.
    NumbersAgain,
    /// What came for a cancelled operation is not given back.
    KeepUnwanted,
    /// The client looks at the board when its card begins to read.
    VouchBeforeTheReadEnds,
    /// The node shows a new epoch on a board when it next answers over that connection.
    ShowAtTheNextAnswer,
}

/// How much of everything there may be at one time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) slots: usize,
    pub(super) clients: usize,
    /// Messages on the way in each direction.
    pub(super) queue: usize,
    /// Operations of a client, with those that were cancelled.
    pub(super) operations: usize,
    /// Loans of a client, with those that are on the way to it or back, and what it asked for.
    pub(super) loans: usize,
    /// The node may be killed and start again.
    pub(super) node_dies: bool,
    /// Cards read for clients; nothing is mapped.
    pub(super) by_card: bool,
    /// Epochs that a living node is given after its first.
    pub(super) epochs: u8,
}

/// One thing that happens. The first number is the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Ask(usize),
    Cancel(usize, u64),
    StopReading(usize),
    Drop(usize, LoanId),
    GiveBack(usize),
    Release(usize),
    NodeReads(usize),
    ClientReads(usize),
    Lend(usize, u64),
    Finish(usize, u64),
    Kill(usize),
    End(usize),
    Close(usize),
    SeeLoss(usize),
    Connect(usize),
    KillNode,
    StartNode,
    Evict(usize),
    Write(usize, u8),
    /// A card takes what it sees at this moment.
    CardReads(usize, LoanId),
    /// The client looks at the board, and hands on what its card read or gives the connection up.
    Vouch(usize, LoanId),
    /// The node, which closed the connection, ends its queue pair.
    EndQueue(usize),
    /// Then it takes back what was lent.
    TakeBack(usize),
    NewEpoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToNode {
    Ask { operation: u64, epoch: u8 },
    Cancel { operation: u64 },
    Return { loans: Vec<LoanId> },
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToClient {
    Row { operation: u64, loan: LoanId, slot: u8, epoch: u8 },
    End { operation: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Slot {
    block: u8,
    /// Fetches find the wanted block here.
    is_listed: bool,
    references: u8,
}

impl Slot {
    const FREE: Slot = Slot { block: OTHER, is_listed: false, references: 0 };
}

const SLOTS_MAX: usize = 2;
/// The block that everybody asks for, and every other one: what else a slot may hold makes no difference.
const WANTED: u8 = 1;
const OTHER: u8 = 2;

/// Everything.
#[derive(Clone, Debug)]
pub(super) struct World {
    slots: Vec<Slot>,
    clients: Vec<Client>,
    is_node_alive: bool,
    epoch: u8,
    /// What an end said that keeps to the rules and was refused.
    fault: Option<&'static str>,
}

impl World {
    pub(super) fn new(bounds: Bounds) -> World {
        let clients = vec![Client::new(bounds.by_card, 0); bounds.clients];
        World { slots: vec![Slot::FREE; bounds.slots], clients, is_node_alive: true, epoch: 0, fault: None }
    }

    /// Makes the numbers small again that this may have made large.
    pub(super) fn renumber(&mut self, after: Action) {
        match after {
            Action::Ask(number)
            | Action::Cancel(number, _)
            | Action::StopReading(number)
            | Action::Drop(number, _)
            | Action::GiveBack(number)
            | Action::Release(number)
            | Action::NodeReads(number)
            | Action::ClientReads(number)
            | Action::Lend(number, _)
            | Action::Finish(number, _)
            | Action::Kill(number)
            | Action::End(number)
            | Action::Close(number)
            | Action::SeeLoss(number)
            | Action::Connect(number)
            | Action::CardReads(number, _)
            | Action::Vouch(number, _)
            | Action::EndQueue(number)
            | Action::TakeBack(number) => self.clients[number].renumber(),
            Action::KillNode => self.clients.iter_mut().for_each(Client::renumber),
            Action::StartNode | Action::Evict(_) | Action::Write(..) | Action::NewEpoch => {}
        }
    }

    /// Feeds all there is to a hash, but for which client is the first.
    pub(super) fn identity(&self, hash: impl Fn(&dyn Fn(&mut Recorder)) -> u128) -> u128 {
        let mut clients: Vec<u128> =
            self.clients.iter().map(|client| hash(&|recorder| client.hash(recorder))).collect();
        clients.sort_unstable();
        hash(&|recorder| (&self.slots, self.is_node_alive, self.epoch, self.fault, &clients).hash(recorder))
    }

    /// Everything that can happen next.
    pub(super) fn actions(&self, rules: Rules, bounds: Bounds) -> Vec<Action> {
        let mut all = Vec::new();
        for number in 0..self.clients.len() {
            self.actions_of_client(number, bounds, &mut all);
            self.actions_of_connection(number, rules, bounds, &mut all);
            self.actions_of_card(number, &mut all);
        }
        if !self.is_node_alive {
            all.push(Action::StartNode);
            return all;
        }
        all.extend(bounds.node_dies.then_some(Action::KillNode));
        all.extend((self.epoch < bounds.epochs).then_some(Action::NewEpoch));
        for (number, slot) in self.slots.iter().enumerate() {
            if slot.is_listed {
                all.push(Action::Evict(number));
            } else if slot.references == 0 {
                let is_listed = self.slots.iter().any(|slot| slot.is_listed);
                all.extend((!is_listed).then_some(Action::Write(number, WANTED)));
                all.extend((slot.block != OTHER).then_some(Action::Write(number, OTHER)));
            }
        }
        all
    }

    fn actions_of_client(&self, number: usize, bounds: Bounds, all: &mut Vec<Action>) {
        let client = &self.clients[number];
        if !client.is_alive {
            return;
        }
        let has_room = client.speaks() && client.to_node.len() < bounds.queue;
        if has_room {
            let is_asking = client.asked.values().any(|asked| !asked.is_cancelled);
            let is_full = client.kept.len() + client.asked.len() >= bounds.loans
                || client.asked.len() >= bounds.operations;
            if !is_asking && !is_full {
                all.push(Action::Ask(number));
            }
            let open = client.asked.iter().filter(|(_, asked)| !asked.is_cancelled);
            all.extend(open.map(|(operation, _)| Action::Cancel(number, *operation)));
            if !client.to_node.contains(&ToNode::Release) {
                all.push(Action::Release(number));
            }
            if client.borrower.waiting() > 0 {
                all.push(Action::GiveBack(number));
            }
        }
        match client.reading {
            Some(_) => all.push(Action::StopReading(number)),
            None => all.extend(client.frames.keys().map(|loan| Action::Drop(number, *loan))),
        }
        all.push(Action::Kill(number));
        let is_gone = (client.is_orphan || client.is_closed) && client.to_client.is_empty();
        if is_gone && !client.is_lost {
            all.push(Action::SeeLoss(number));
        }
    }

    fn actions_of_connection(&self, number: usize, rules: Rules, bounds: Bounds, all: &mut Vec<Action>) {
        let client = &self.clients[number];
        if client.is_alive && !client.to_client.is_empty() {
            all.push(Action::ClientReads(number));
        }
        if client.is_orphan {
            if !client.is_alive && self.is_node_alive {
                all.push(Action::Connect(number));
            }
            return;
        }
        if !client.is_alive || rules == Rules::EndBeforeTheReaderStopped {
            all.push(Action::End(number));
        }
        if !client.is_served() {
            return;
        }
        all.push(Action::Close(number));
        let has_room = client.to_client.len() < bounds.queue;
        match client.to_node.front() {
            Some(ToNode::Cancel { operation }) if client.operations.contains_key(operation) && !has_room => {}
            Some(_) => all.push(Action::NodeReads(number)),
            None => {}
        }
        if has_room {
            for (operation, serving) in &client.operations {
                all.push(match serving.is_answered {
                    false => Action::Lend(number, *operation),
                    true => Action::Finish(number, *operation),
                });
            }
        }
    }

    pub(super) fn apply(&mut self, action: Action, rules: Rules) {
        match action {
            Action::Ask(number) => {
                let client = &mut self.clients[number];
                let operation = client.borrower.begin(1);
                client.asked.insert(operation, Asked { is_cancelled: false });
                client.to_node.push_back(ToNode::Ask { operation, epoch: self.epoch });
            }
            Action::Cancel(number, operation) => {
                let client = &mut self.clients[number];
                client.borrower.cancel(operation);
                if let Some(asked) = client.asked.get_mut(&operation) {
                    asked.is_cancelled = true;
                }
                client.to_node.push_back(ToNode::Cancel { operation });
            }
            Action::StopReading(number) => self.clients[number].reading = None,
            Action::Drop(number, loan) => {
                let client = &mut self.clients[number];
                let frame = client.frames.remove(&loan);
                client.reading = frame.filter(|_| rules == Rules::ReturnBeforeTheReadEnds);
                client.must_give_back |= client.borrower.give_back(loan);
            }
            Action::GiveBack(number) => self.clients[number].send_returns(),
            Action::Release(number) => self.clients[number].to_node.push_back(ToNode::Release),
            Action::NodeReads(number) => self.node_reads(number, rules),
            Action::ClientReads(number) => self.client_reads(number, rules),
            Action::Lend(number, operation) => self.lend(number, operation),
            Action::Finish(number, operation) => self.finish(number, operation),
            Action::Kill(number) => self.clients[number].die(),
            Action::End(number) => self.end(number),
            Action::Close(number) => self.close(number, rules),
            Action::SeeLoss(number) => self.clients[number].see_loss(),
            Action::Connect(number) => self.clients[number] = self.clients[number].fresh(self.epoch),
            Action::KillNode => self.kill_node(),
            Action::StartNode => self.is_node_alive = true,
            Action::Evict(slot) => self.slots[slot].is_listed = false,
            Action::Write(slot, block) => {
                self.slots[slot] = Slot { block, is_listed: block == WANTED, references: 0 };
            }
            Action::CardReads(number, loan) => self.card_reads(number, loan),
            Action::Vouch(number, loan) => self.vouch(number, loan, rules),
            Action::EndQueue(number) => self.clients[number].end_queue(),
            Action::TakeBack(number) => self.take_back(number),
            Action::NewEpoch => self.new_epoch(rules),
        }
    }
}
