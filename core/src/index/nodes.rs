//! The nodes of the cluster: records, epochs, announce positions, and the slots that make fencing
//! O(1).
//!
//! Not here: which blocks a node holds (`store.rs`). This file keeps only their number and digest.

use std::collections::BTreeMap;

use super::command::NodeRecord;
use super::lookup::Holder;
use super::run::Extent;
use super::store::CopyDelta;
use crate::id::{Epoch, IdentityDigest, NodeId, Seq};

/// Last epochs kept for nodes that left. Above this number the lowest is folded into `epoch_floor`,
/// above which every new node starts. Epochs still only grow; they skip some numbers.
pub(super) const DEPARTED_MAX: usize = if cfg!(test) { 2 } else { 4_096 };

/// Last incarnation of a slot before it wraps. Small in tests, so that they reach it.
const INCARNATION_MAX: u32 = if cfg!(test) { 3 } else { u32::MAX };

/// Maximum number of slots: slot numbers have sixteen bits.
pub(super) const SLOTS_MAX: u32 = 65_536;

/// What the index knows about one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// The record of its last join.
    pub record: NodeRecord,
    /// The epoch of its last join.
    pub epoch: Epoch,
    /// Whether that epoch still counts. A fenced node stays known until it joins again or leaves.
    pub live: bool,
    /// Sequence number that its next announcement must carry.
    pub next_seq: Seq,
    /// Distinct blocks it holds.
    pub blocks: u64,
    /// Blocks it holds per tier, by tier number; a block in two tiers counts in both.
    pub tier_blocks: [u64; 3],
    /// Wrapping sum of the digests of its extents. Independent of order, so an extent can be
    /// subtracted again.
    pub(super) digest_sum: u128,
}

impl NodeState {
    pub(super) fn new(record: NodeRecord, epoch: Epoch) -> Self {
        Self { record, epoch, live: true, next_seq: Seq(1), blocks: 0, tier_blocks: [0; 3], digest_sum: 0 }
    }

    /// Digest over the blocks it holds. Equals [`super::digest::digest_after`] over its
    /// announcements if each block is in one tier at a time and the index listed all of them.
    #[must_use]
    pub fn digest(&self) -> u128 {
        self.digest_sum
    }

    fn apply_delta(&mut self, delta: &CopyDelta) {
        self.blocks = self.blocks.wrapping_add_signed(delta.blocks);
        for (blocks, more) in self.tier_blocks.iter_mut().zip(delta.tier_blocks) {
            *blocks = blocks.wrapping_add_signed(more);
        }
        self.digest_sum = self.digest_sum.wrapping_add(delta.digest);
    }

    fn clear_blocks(&mut self) {
        self.blocks = 0;
        self.tier_blocks = [0; 3];
        self.digest_sum = 0;
    }
}

fn next_epoch(last: Epoch) -> Epoch {
    Epoch(last.0.saturating_add(1))
}

/// A slot with no incarnations left: all its extents must be removed before the slot is used again.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExhaustedSlot(pub(super) Option<u16>);

/// Node and epoch of a slot, stored together because a lookup reads only these.
#[derive(Clone, Copy, Debug, Default)]
struct NodeEpoch {
    node: NodeId,
    epoch: Epoch,
}

/// Every node that joined and did not leave.
#[derive(Clone, Debug, Default)]
pub(super) struct Nodes {
    by_id: BTreeMap<NodeId, u16>,
    pub(super) slots: Vec<Option<NodeState>>,
    /// Current incarnation of each slot. Kept apart from the states because a lookup compares only
    /// these.
    pub(super) incarnations: Vec<u32>,
    /// Node and epoch of each slot, as lookups report them.
    node_epochs: Vec<NodeEpoch>,
    /// Slots of nodes that left; the last one is used next.
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

    /// Adds the delta of a change to the node of a slot.
    pub(super) fn apply_delta(&mut self, slot: u16, delta: &CopyDelta) {
        let Some(Some(state)) = self.slots.get_mut(usize::from(slot)) else { return };
        state.apply_delta(delta);
        self.copies = self.copies.wrapping_add_signed(delta.blocks);
    }

    /// The identity that all nodes share; `None` when no node is known.
    pub(super) fn identity(&self) -> Option<IdentityDigest> {
        self.iter().next().map(|state| state.record.identity)
    }

    /// (node, block) pairs that count.
    pub(super) fn copies(&self) -> u64 {
        self.copies
    }

    /// The holder that an extent stands for, if the extent still counts.
    pub(super) fn holder(&self, hold: &Extent) -> Option<Holder> {
        if !hold.is_current(&self.incarnations) {
            return None;
        }
        let NodeEpoch { node, epoch } = *self.node_epochs.get(usize::from(hold.slot))?;
        Some(Holder { node, epoch, tier: hold.tiers.fastest()? })
    }

    /// The node of a slot that was fenced and has not joined again.
    pub(super) fn fenced_node(&self, slot: u16) -> Option<NodeId> {
        self.state(slot).filter(|state| !state.live).map(|state| state.record.node)
    }

    /// Adds a node under its next epoch.
    pub(super) fn join(&mut self, record: NodeRecord) -> (Epoch, ExhaustedSlot) {
        let node = record.node;
        if let Some(slot) = self.slot_of(node) {
            let epoch = next_epoch(self.state(slot).map(|state| state.epoch).unwrap_or_default());
            let exhausted = self.invalidate(slot);
            self.set_state(slot, NodeState::new(record, epoch));
            return (epoch, exhausted);
        }
        let last = self.departed.remove(&node).unwrap_or_default().max(self.epoch_floor);
        let epoch = next_epoch(last);
        self.insert(NodeState::new(record, epoch));
        (epoch, ExhaustedSlot(None))
    }

    /// Adds a node under an epoch from the control group, above every epoch known of it here.
    pub(super) fn admit(&mut self, record: NodeRecord, epoch: Epoch) -> ExhaustedSlot {
        let Some(slot) = self.slot_of(record.node) else {
            self.departed.remove(&record.node);
            self.insert(NodeState::new(record, epoch));
            return ExhaustedSlot(None);
        };
        let exhausted = self.invalidate(slot);
        self.set_state(slot, NodeState::new(record, epoch));
        exhausted
    }

    /// Assigns a slot. The caller has checked that the node is unknown and that a slot is
    /// available.
    fn insert(&mut self, state: NodeState) -> u16 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.incarnations.push(0);
            self.node_epochs.push(NodeEpoch::default());
            (self.slots.len() - 1) as u16
        });
        self.by_id.insert(state.record.node, slot);
        self.set_state(slot, state);
        slot
    }

    fn set_state(&mut self, slot: u16, state: NodeState) {
        let slot = usize::from(slot);
        self.node_epochs[slot] = NodeEpoch { node: state.record.node, epoch: state.epoch };
        self.slots[slot] = Some(state);
    }

    /// Adds a slot from a snapshot, with or without a node. Returns false if the slot is invalid.
    pub(super) fn restore_slot(&mut self, incarnation: u32, state: Option<NodeState>) -> bool {
        let Ok(slot) = u16::try_from(self.slots.len()) else { return false };
        if let Some(state) = &state
            && self.by_id.insert(state.record.node, slot).is_some()
        {
            return false;
        }
        let face = state.as_ref().map(|state| NodeEpoch { node: state.record.node, epoch: state.epoch });
        self.node_epochs.push(face.unwrap_or_default());
        self.slots.push(state);
        self.incarnations.push(incarnation);
        INCARNATION_MAX.checked_sub(incarnation).is_some()
    }

    /// Invalidates everything that the node of a slot announced, in O(1).
    pub(super) fn invalidate(&mut self, slot: u16) -> ExhaustedSlot {
        if let Some(Some(state)) = self.slots.get_mut(usize::from(slot)) {
            self.copies -= state.blocks;
            state.clear_blocks();
        }
        let incarnation = &mut self.incarnations[usize::from(slot)];
        if *incarnation == INCARNATION_MAX {
            *incarnation = 0;
            return ExhaustedSlot(Some(slot));
        }
        *incarnation += 1;
        ExhaustedSlot(None)
    }

    /// Removes a node but remembers its last epoch.
    pub(super) fn leave(&mut self, slot: u16) -> ExhaustedSlot {
        let exhausted = self.invalidate(slot);
        if let Some(state) = self.slots[usize::from(slot)].take() {
            self.by_id.remove(&state.record.node);
            self.free.push(slot);
            self.remember_departed(state.record.node, state.epoch);
        }
        exhausted
    }

    /// The epoch that every later join of this node exceeds, if it may have been a member before.
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
