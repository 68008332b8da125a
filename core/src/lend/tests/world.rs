//! A small node with its clients, in which everything that can happen next is a value: production `Lender` and `Borrower`
//! at the ends of queues, slots that are written again as soon as nobody refers to them, and processes that are killed.
//!
//! The evictor is stronger than the tier book: it drops any block at any moment. Time stands still, so that no clock
//! keeps anything right. Not here: the walk through all of it (`search`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use super::super::*;
use super::search::Recorder;
use crate::id::{LeaseId, LoanId, Timestamp};

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
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToNode {
    Ask { operation: u64 },
    Cancel { operation: u64 },
    Return { loans: Vec<LoanId> },
    Release,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToClient {
    Row { operation: u64, loan: LoanId, slot: u8 },
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

/// One connection with both its ends.
#[derive(Clone, Debug, Hash)]
struct Client {
    // The client's end.
    is_alive: bool,
    borrower: Borrower,
    asked: BTreeMap<u64, Asked>,
    /// What it may be reading at any moment.
    frames: BTreeMap<LoanId, u8>,
    /// What it reads and gave back, where the rules are broken.
    reading: Option<u8>,
    must_give_back: bool,
    is_lost: bool,
    // Between them.
    to_node: VecDeque<ToNode>,
    to_client: VecDeque<ToClient>,
    // The node's end.
    lender: Lender,
    /// What keeps the bytes of loans: the slot of each.
    kept: BTreeMap<LoanId, u8>,
    operations: BTreeMap<u64, Serving>,
    /// The book has the lease.
    is_leased: bool,
    is_closed: bool,
    /// The node that this connection leads to is gone.
    is_orphan: bool,
}

#[derive(Clone, Copy, Debug, Hash)]
struct Asked {
    is_cancelled: bool,
}

#[derive(Clone, Copy, Debug, Hash)]
struct Serving {
    loan: Option<LoanId>,
    is_answered: bool,
}

const LEASE: LeaseId = LeaseId(1);
const NOW: Timestamp = Timestamp(0);
const SLOTS_MAX: usize = 2;
/// The block that everybody asks for, and every other one: what else a slot may hold makes no difference.
const WANTED: u8 = 1;
const OTHER: u8 = 2;

impl Client {
    fn new() -> Client {
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

    fn speaks(&self) -> bool {
        self.is_alive && !self.is_lost
    }

    /// The node hears and answers.
    fn is_served(&self) -> bool {
        !self.is_orphan && !self.is_closed
    }

    /// The process is gone, and with it all that it could read.
    fn die(&mut self) {
        self.is_alive = false;
        self.borrower = Client::new().borrower;
        self.asked.clear();
        self.frames.clear();
        self.reading = None;
        self.must_give_back = false;
        self.is_lost = false;
        self.to_client.clear();
    }

    /// Numbers count how often something happened before, which changes nothing: they become the smallest of the same order.
    fn renumber(&mut self) {
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

/// Everything.
#[derive(Clone, Debug)]
pub(super) struct World {
    slots: Vec<Slot>,
    clients: Vec<Client>,
    is_node_alive: bool,
    /// What an end said that keeps to the rules and was refused.
    fault: Option<&'static str>,
}

impl World {
    pub(super) fn new(bounds: Bounds) -> World {
        let clients = vec![Client::new(); bounds.clients];
        World { slots: vec![Slot::FREE; bounds.slots], clients, is_node_alive: true, fault: None }
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
            | Action::Connect(number) => self.clients[number].renumber(),
            Action::KillNode => self.clients.iter_mut().for_each(Client::renumber),
            Action::StartNode | Action::Evict(_) | Action::Write(..) => {}
        }
    }

    /// Feeds all there is to a hash, but for which client is the first.
    pub(super) fn identity(&self, hash: impl Fn(&dyn Fn(&mut Recorder)) -> u128) -> u128 {
        let mut clients: Vec<u128> =
            self.clients.iter().map(|client| hash(&|recorder| client.hash(recorder))).collect();
        clients.sort_unstable();
        hash(&|recorder| (&self.slots, self.is_node_alive, self.fault, &clients).hash(recorder))
    }

    /// Everything that can happen next.
    pub(super) fn actions(&self, rules: Rules, bounds: Bounds) -> Vec<Action> {
        let mut all = Vec::new();
        for number in 0..self.clients.len() {
            self.actions_of_client(number, bounds, &mut all);
            self.actions_of_connection(number, rules, bounds, &mut all);
        }
        if !self.is_node_alive {
            all.push(Action::StartNode);
            return all;
        }
        all.extend(bounds.node_dies.then_some(Action::KillNode));
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
                client.to_node.push_back(ToNode::Ask { operation });
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
            Action::SeeLoss(number) => {
                let client = &mut self.clients[number];
                client.is_lost = true;
                client.borrower.lost();
                client.asked.clear();
                client.must_give_back = false;
            }
            Action::Connect(number) => self.clients[number] = Client::new(),
            Action::KillNode => self.kill_node(),
            Action::StartNode => self.is_node_alive = true,
            Action::Evict(slot) => self.slots[slot].is_listed = false,
            Action::Write(slot, block) => {
                self.slots[slot] = Slot { block, is_listed: block == WANTED, references: 0 };
            }
        }
    }

    fn lend(&mut self, number: usize, operation: u64) {
        let client = &mut self.clients[number];
        let Some(serving) = client.operations.get_mut(&operation) else { return };
        serving.is_answered = true;
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
        client.to_client.push_back(ToClient::Row { operation, loan, slot: slot as u8 });
    }

    fn finish(&mut self, number: usize, operation: u64) {
        let client = &mut self.clients[number];
        client.operations.remove(&operation);
        client.to_client.push_back(ToClient::End { operation });
        let mut effects = Vec::new();
        client.lender.finish(LEASE, &mut effects);
        self.run(number, &effects);
    }

    fn node_reads(&mut self, number: usize, rules: Rules) {
        let client = &mut self.clients[number];
        let mut effects = Vec::new();
        match client.to_node.pop_front() {
            Some(ToNode::Ask { operation }) => {
                if client.lender.begin(LEASE, NOW).is_err() {
                    self.fault = Some("an operation is refused below the limits");
                }
                client.is_leased = true;
                client.operations.insert(operation, Serving { loan: None, is_answered: false });
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

    fn client_reads(&mut self, number: usize, rules: Rules) {
        let client = &mut self.clients[number];
        match client.to_client.pop_front() {
            Some(ToClient::Row { operation, loan, slot }) => {
                let row = Descriptor { loan, place: Place::Arena, at: u64::from(slot), len: 1 };
                match client.borrower.receive(operation, &[row]) {
                    Ok(Received::Kept) => {
                        client.frames.insert(loan, slot);
                    }
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
    fn end(&mut self, number: usize) {
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
            *client = Client::new();
        }
    }

    /// The node has enough of the client, which may be reading.
    fn close(&mut self, number: usize, rules: Rules) {
        let mut effects = Vec::new();
        let client = &mut self.clients[number];
        client.is_closed = true;
        client.to_node.clear();
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
    fn kill_node(&mut self) {
        self.is_node_alive = false;
        self.slots.fill(Slot::FREE);
        for client in self.clients.iter_mut().filter(|client| !client.is_orphan) {
            let fresh = Client::new();
            client.is_orphan = true;
            client.to_node.clear();
            (client.lender, client.kept, client.operations) = (fresh.lender, fresh.kept, fresh.operations);
            (client.is_leased, client.is_closed) = (false, false);
        }
    }

    fn run(&mut self, number: usize, effects: &[Effect]) {
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

    /// What must hold at every moment.
    pub(super) fn judge(&self) -> Result<(), &'static str> {
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
    pub(super) fn drain(&mut self, rules: Rules) -> Result<(), &'static str> {
        for number in 0..self.clients.len() {
            if self.clients[number].is_orphan {
                continue;
            }
            self.settle(number, rules);
            self.judge()?;
            let client = &self.clients[number];
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
            } else if client.must_give_back && client.speaks() && client.is_served() {
                Action::GiveBack(number)
            } else {
                return;
            };
            self.apply(action, rules);
        }
    }
}

impl Client {
    fn send_returns(&mut self) {
        self.must_give_back = false;
        let loans = self.borrower.take_returns(usize::MAX);
        if !loans.is_empty() {
            self.to_node.push_back(ToNode::Return { loans });
        }
    }
}
