//! One client of the small node, with its whole connection: both ends, and the messages in flight.
//!
//! Not here: its NIC (`nic`), and the node (`node`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use super::nic::Nic;
use super::{SLOTS_MAX, ToClient, ToNode};
use crate::id::{GrantId, LeaseId, Timestamp};
use crate::lease_grant::{GrantClient, GrantLimits, GrantServer, MemoryExtent};

pub(super) const LEASE: LeaseId = LeaseId(1);
pub(super) const NOW: Timestamp = Timestamp(0);
/// One connection with both its ends.
#[derive(Clone, Debug, Hash)]
pub(super) struct Client {
    // The client's end.
    pub(super) is_alive: bool,
    pub(super) grant_client: GrantClient,
    pub(super) pending: BTreeMap<u64, PendingOperation>,
    /// Slots that it may read at any moment.
    pub(super) frames: BTreeMap<GrantId, u8>,
    /// A slot that it reads after returning it, under a broken rule.
    pub(super) reading: Option<u8>,
    /// The NIC that reads for it, if it maps no memory.
    pub(super) nic: Option<Nic>,
    pub(super) must_return: bool,
    pub(super) is_lost: bool,
    // Between them.
    pub(super) to_node: VecDeque<ToNode>,
    pub(super) to_client: VecDeque<ToClient>,
    // The node's end.
    pub(super) grant_server: GrantServer,
    /// The slot of each grant that the node keeps the bytes of.
    pub(super) granted_slots: BTreeMap<GrantId, u8>,
    pub(super) operations: BTreeMap<u64, NodeOperation>,
    /// The book has the lease.
    pub(super) is_leased: bool,
    pub(super) is_closed: bool,
    /// The node of this connection is gone.
    pub(super) is_orphan: bool,
}

#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct PendingOperation {
    pub(super) is_cancelled: bool,
}

#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct NodeOperation {
    pub(super) grant: Option<GrantId>,
    pub(super) is_answered: bool,
    /// Epoch of the request.
    pub(super) epoch: u8,
}

impl Client {
    /// A client that connects to a node of this epoch.
    pub(super) fn new(by_nic: bool, epoch: u8) -> Client {
        let limits = GrantLimits {
            granted_bytes_max: 1 << 20,
            grants_max: 1 << 10,
            leases_max: 1,
            lease: Duration::from_secs(1),
        };
        let extent =
            MemoryExtent { arena_bytes: SLOTS_MAX as u64, bounce_buffer_bytes: 0, frame_bytes_max: 1 };
        Client {
            is_alive: true,
            grant_client: GrantClient::new(extent),
            pending: BTreeMap::new(),
            frames: BTreeMap::new(),
            reading: None,
            nic: by_nic.then(|| Nic::new(epoch)),
            must_return: false,
            is_lost: false,
            to_node: VecDeque::new(),
            to_client: VecDeque::new(),
            grant_server: GrantServer::new(limits),
            granted_slots: BTreeMap::new(),
            operations: BTreeMap::new(),
            is_leased: false,
            is_closed: false,
            is_orphan: false,
        }
    }

    /// The same client with a new connection.
    pub(super) fn fresh(&self, epoch: u8) -> Client {
        Client::new(self.nic.is_some(), epoch)
    }

    pub(super) fn can_send(&self) -> bool {
        self.is_alive && !self.is_lost
    }

    /// The node reads its messages and answers.
    pub(super) fn is_served(&self) -> bool {
        !self.is_orphan && !self.is_closed
    }

    /// The process ends, and with it all of its reads.
    pub(super) fn die(&mut self) {
        self.is_alive = false;
        self.grant_client = self.fresh(0).grant_client;
        self.pending.clear();
        self.frames.clear();
        if let Some(card) = &mut self.nic {
            card.reads.clear();
        }
        self.reading = None;
        self.must_return = false;
        self.is_lost = false;
        self.to_client.clear();
    }

    /// It learns that the node is gone, or has closed the connection.
    pub(super) fn detect_loss(&mut self) {
        if self.nic.is_some() {
            // No NIC read outlives its queue pair.
            return self.die();
        }
        self.is_lost = true;
        self.grant_client.server_lost();
        self.pending.clear();
        self.must_return = false;
    }

    pub(super) fn send_returns(&mut self) {
        self.must_return = false;
        let loans = self.grant_client.take_returns(usize::MAX);
        if !loans.is_empty() {
            self.to_node.push_back(ToNode::Return { loans });
        }
    }

    /// Ids count past events, which does not affect behaviour: they are replaced by the smallest
    /// ids in the same order.
    pub(super) fn renumber(&mut self) {
        let loans = RefCell::new(BTreeSet::from([GrantId(0)]));
        let operations = RefCell::new(BTreeSet::from([0]));
        self.map_ids(
            &|loan| {
                loans.borrow_mut().insert(loan);
                loan
            },
            &|operation| {
                operations.borrow_mut().insert(operation);
                operation
            },
        );
        let (loans, operations): (Vec<GrantId>, Vec<u64>) =
            (loans.into_inner().into_iter().collect(), operations.into_inner().into_iter().collect());
        let is_smallest = loans.last() == Some(&GrantId(loans.len() as u64 - 1))
            && operations.last() == Some(&(operations.len() as u64 - 1));
        if !is_smallest {
            self.map_ids(&|loan| GrantId(loans.binary_search(&loan).unwrap() as u64), &|operation| {
                operations.binary_search(&operation).unwrap() as u64
            });
        }
    }

    fn map_ids(&mut self, loan: &dyn Fn(GrantId) -> GrantId, operation: &dyn Fn(u64) -> u64) {
        self.grant_server.renumber(loan);
        self.grant_client.renumber(loan, operation);
        self.pending =
            std::mem::take(&mut self.pending).into_iter().map(|(id, of)| (operation(id), of)).collect();
        self.frames = std::mem::take(&mut self.frames).into_iter().map(|(id, of)| (loan(id), of)).collect();
        if let Some(card) = &mut self.nic {
            card.reads = std::mem::take(&mut card.reads).into_iter().map(|(id, of)| (loan(id), of)).collect();
        }
        self.granted_slots =
            std::mem::take(&mut self.granted_slots).into_iter().map(|(id, of)| (loan(id), of)).collect();
        self.operations =
            std::mem::take(&mut self.operations).into_iter().map(|(id, of)| (operation(id), of)).collect();
        for serving in self.operations.values_mut() {
            serving.grant = serving.grant.map(loan);
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
