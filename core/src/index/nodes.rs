//! The nodes of the cluster: their records, epochs, announce positions, and the slots that make
//! fencing O(1).
//!
//! Not here: which blocks they hold (`store.rs`); only how many, and the digest over them.

use std::collections::BTreeMap;

use super::command::NodeRecord;
use super::lookup::Holder;
use super::run::Hold;
use super::store::Tally;
use crate::id::{Epoch, IdentityDigest, NodeId, Seq};

/// Last epochs of nodes that left, kept one by one. Above it, the lowest is folded into a floor that
/// every new node starts above: epochs still only grow, they just skip some numbers.
pub(super) const DEPARTED_MAX: usize = if cfg!(test) { 2 } else { 4_096 };

/// Last incarnation of a slot before it starts over. Small in tests, so that they get there.
const INCARNATION_MAX: u32 = if cfg!(test) { 3 } else { u32::MAX };

/// Slots at most: their numbers are sixteen bits wide.
pub(super) const SLOTS_MAX: u32 = 65_536;

/// What the index knows about one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// What it said when it joined.
    pub record: NodeRecord,
    /// The epoch of its last join.
    pub epoch: Epoch,
    /// Whether that epoch still counts. A fenced node stays known until it joins again or leaves.
    pub live: bool,
    /// Number its next announcement must carry.
    pub next_seq: Seq,
    /// Distinct blocks it holds.
    pub blocks: u64,
    /// Blocks it holds per tier, by tier number; a block in two tiers counts in both.
    pub tier_blocks: [u64; 3],
    /// Sum of the digests of its holds: order does not matter, each hold can be taken out again.
    pub(super) digest_sum: u128,
}

impl NodeState {
    pub(super) fn new(record: NodeRecord, epoch: Epoch) -> Self {
        Self { record, epoch, live: true, next_seq: Seq(1), blocks: 0, tier_blocks: [0; 3], digest_sum: 0 }
    }

    /// Digest over what it holds: what [`super::digest::after`] comes to over its announcements, as long as it
    /// holds each block in one tier at a time and all of them found room.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.digest_sum
    }

    /// Books what a change came to.
    fn book(&mut self, tally: &Tally) {
        self.blocks = self.blocks.wrapping_add_signed(tally.blocks);
        for (blocks, more) in self.tier_blocks.iter_mut().zip(tally.tier_blocks) {
            *blocks = blocks.wrapping_add_signed(more);
        }
        self.digest_sum = self.digest_sum.wrapping_add(tally.digest);
    }

    fn forget_blocks(&mut self) {
        self.blocks = 0;
        self.tier_blocks = [0; 3];
        self.digest_sum = 0;
    }
}

fn next_epoch(last: Epoch) -> Epoch {
    Epoch(last.0.saturating_add(1))
}

/// A slot whose incarnations ran out: every hold of it must leave the table before it is used again.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exhausted(pub(super) Option<u16>);

/// Node and epoch of a slot; kept together, because lookups read nothing else of a node.
#[derive(Clone, Copy, Debug, Default)]
struct Face {
    node: NodeId,
    epoch: Epoch,
}

/// Every node that joined and did not leave.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    by_id: BTreeMap<NodeId, u16>,
    pub(super) slots: Vec<Option<NodeState>>,
    /// One per slot. Kept apart from the states because a lookup compares only these.
    pub(super) incarnations: Vec<u32>,
    /// One per slot: what a lookup says of its node.
    faces: Vec<Face>,
    /// Slots of nodes that left, the next to be used last.
    pub(super) free: Vec<u16>,
    /// Sum of the blocks of all nodes.
    copies: u64,
    /// Last epoch of nodes that left.
    pub(super) departed: BTreeMap<NodeId, Epoch>,
    /// Every node new to the index starts above this epoch.
    pub(super) epoch_floor: Epoch,
}

impl Nodes {
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, node: NodeId) -> Option<&NodeState> {
        self.state(*self.by_id.get(&node)?)
    }

    /// Every node by ascending id.
    pub(super) fn iter(&self) -> impl Iterator<Item = &NodeState> {
        self.by_id.values().filter_map(|&slot| self.state(slot))
    }

    pub(super) fn state(&self, slot: u16) -> Option<&NodeState> {
        self.slots.get(usize::from(slot))?.as_ref()
    }

    pub(super) fn state_mut(&mut self, slot: u16) -> Option<&mut NodeState> {
        self.slots.get_mut(usize::from(slot))?.as_mut()
    }

    pub(super) fn slot_of(&self, node: NodeId) -> Option<u16> {
        self.by_id.get(&node).copied()
    }

    pub(super) fn incarnations(&self) -> &[u32] {
        &self.incarnations
    }

    /// Books what a change of the node of a slot came to.
    pub(super) fn book(&mut self, slot: u16, tally: &Tally) {
        let Some(Some(state)) = self.slots.get_mut(usize::from(slot)) else { return };
        state.book(tally);
        self.copies = self.copies.wrapping_add_signed(tally.blocks);
    }

    /// The identity all nodes share; open again when the last node has left.
    pub(super) fn identity(&self) -> Option<IdentityDigest> {
        self.iter().next().map(|state| state.record.identity)
    }

    /// (node, block) pairs that count.
    pub(super) fn copies(&self) -> u64 {
        self.copies
    }

    /// A hold as readers see it, if it still counts.
    pub(super) fn holder(&self, hold: &Hold) -> Option<Holder> {
        if !hold.is_current(&self.incarnations) {
            return None;
        }
        let Face { node, epoch } = *self.faces.get(usize::from(hold.slot))?;
        Some(Holder { node, epoch, tier: hold.tiers.fastest()? })
    }

    /// The node of a slot that was fenced and has not come back.
    pub(super) fn fenced(&self, slot: u16) -> Option<NodeId> {
        self.state(slot).filter(|state| !state.live).map(|state| state.record.node)
    }

    /// Takes a node in under its next epoch.
    pub(super) fn join(&mut self, record: NodeRecord) -> (Epoch, Exhausted) {
        let node = record.node;
        if let Some(slot) = self.slot_of(node) {
            let epoch = next_epoch(self.state(slot).map(|state| state.epoch).unwrap_or_default());
            let exhausted = self.void(slot);
            self.place(slot, NodeState::new(record, epoch));
            return (epoch, exhausted);
        }
        let last = self.departed.remove(&node).unwrap_or_default().max(self.epoch_floor);
        let epoch = next_epoch(last);
        self.insert(NodeState::new(record, epoch));
        (epoch, Exhausted(None))
    }

    /// Takes a node in under an epoch that was given elsewhere and is above every one known of it here.
    pub(super) fn admit(&mut self, record: NodeRecord, epoch: Epoch) -> Exhausted {
        let Some(slot) = self.slot_of(record.node) else {
            self.departed.remove(&record.node);
            self.insert(NodeState::new(record, epoch));
            return Exhausted(None);
        };
        let exhausted = self.void(slot);
        self.place(slot, NodeState::new(record, epoch));
        exhausted
    }

    /// Gives a state a slot. The caller has checked that the node is not known and that there is room.
    fn insert(&mut self, state: NodeState) -> u16 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.incarnations.push(0);
            self.faces.push(Face::default());
            (self.slots.len() - 1) as u16
        });
        self.by_id.insert(state.record.node, slot);
        self.place(slot, state);
        slot
    }

    fn place(&mut self, slot: u16, state: NodeState) {
        let slot = usize::from(slot);
        self.faces[slot] = Face { node: state.record.node, epoch: state.epoch };
        self.slots[slot] = Some(state);
    }

    /// A slot as a snapshot describes it, with or without a node.
    pub(super) fn restore(&mut self, incarnation: u32, state: Option<NodeState>) -> bool {
        let Ok(slot) = u16::try_from(self.slots.len()) else { return false };
        if let Some(state) = &state
            && self.by_id.insert(state.record.node, slot).is_some()
        {
            return false;
        }
        let face = state.as_ref().map(|state| Face { node: state.record.node, epoch: state.epoch });
        self.faces.push(face.unwrap_or_default());
        self.slots.push(state);
        self.incarnations.push(incarnation);
        INCARNATION_MAX.checked_sub(incarnation).is_some()
    }

    /// Voids everything the node of a slot announced, in O(1).
    pub(super) fn void(&mut self, slot: u16) -> Exhausted {
        if let Some(Some(state)) = self.slots.get_mut(usize::from(slot)) {
            self.copies -= state.blocks;
            state.forget_blocks();
        }
        let incarnation = &mut self.incarnations[usize::from(slot)];
        if *incarnation == INCARNATION_MAX {
            *incarnation = 0;
            return Exhausted(Some(slot));
        }
        *incarnation += 1;
        Exhausted(None)
    }

    /// Forgets a node, but not its epoch.
    pub(super) fn leave(&mut self, slot: u16) -> Exhausted {
        let exhausted = self.void(slot);
        if let Some(state) = self.slots[usize::from(slot)].take() {
            self.by_id.remove(&state.record.node);
            self.free.push(slot);
            self.remember_departed(state.record.node, state.epoch);
        }
        exhausted
    }

    /// The epoch that every later join of an unknown node is above, if it is known to have been here.
    pub(super) fn departed_epoch(&self, node: NodeId) -> Option<Epoch> {
        let own = self.departed.get(&node).copied();
        own.max(Some(self.epoch_floor)).filter(|last| *last > Epoch::default())
    }

    fn remember_departed(&mut self, node: NodeId, epoch: Epoch) {
        self.departed.insert(node, epoch);
        while self.departed.len() > DEPARTED_MAX {
            let lowest = self.departed.iter().map(|(&node, &epoch)| (epoch, node)).min();
            let Some((epoch, node)) = lowest else { return };
            self.departed.remove(&node);
            self.epoch_floor = self.epoch_floor.max(epoch);
        }
    }
}
