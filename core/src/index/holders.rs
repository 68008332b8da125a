//! Who holds one block, in which tiers, under which incarnation of the node.
//!
//! A node lives in a *slot*; everything it announced carries the slot's incarnation of that moment.
//! Whether it still counts is one comparison with the slot's incarnation of now, which is how a node
//! is fenced, or cleared, in O(1). Not here: slots (`nodes.rs`) and the map of blocks (`table.rs`).

use crate::id::Tier;

/// A set of tiers: a node may hold a block in several at once.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TierSet(u8);

impl TierSet {
    /// No tier.
    pub const NONE: TierSet = TierSet(0);
    const ALL: u8 = (1 << Tier::ALL.len()) - 1;

    /// Just this tier.
    #[must_use]
    pub fn only(tier: Tier) -> Self {
        Self(1 << tier as u8)
    }

    /// The set with these bits (bit n is tier number n), if they all stand for tiers.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Self> {
        (bits & !Self::ALL == 0).then_some(Self(bits))
    }

    /// Bit n is tier number n.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Whether no tier is in it.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `tier` is in it.
    #[must_use]
    pub fn contains(self, tier: Tier) -> bool {
        self.0 & Self::only(tier).0 != 0
    }

    /// Without the tiers of `gone`, with those of `added`.
    #[must_use]
    pub fn changed(self, gone: TierSet, added: TierSet) -> TierSet {
        TierSet(self.0 & !gone.0 | added.0)
    }

    /// The tier a reader is served from, if any.
    #[must_use]
    pub fn fastest(self) -> Option<Tier> {
        Tier::ALL.into_iter().rev().find(|&tier| self.contains(tier))
    }
}

impl std::fmt::Debug for TierSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(Tier::ALL.iter().filter(|&&tier| self.contains(tier))).finish()
    }
}

/// One node's hold on one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// Incarnation of the slot when this was announced.
    pub(super) incarnation: u32,
    /// Slot of the node.
    pub(super) slot: u16,
    /// Never empty.
    pub(super) tiers: TierSet,
}

impl Held {
    /// Whether the node still stands by it.
    pub(super) fn is_current(&self, incarnations: &[u32]) -> bool {
        incarnations.get(usize::from(self.slot)) == Some(&self.incarnation)
    }
}

/// All holds on one block, by ascending slot. Most blocks have one; sixteen bytes either way.
#[derive(Clone, Debug)]
pub(super) enum Holders {
    /// The usual case, without a second allocation.
    One(Held),
    /// Two or more; empty only between a removal and the removal of the block.
    Many(Box<[Held]>),
}

impl Holders {
    /// The holds, stale ones included.
    pub(super) fn as_slice(&self) -> &[Held] {
        match self {
            Holders::One(held) => std::slice::from_ref(held),
            Holders::Many(many) => many,
        }
    }

    /// Forgets every hold that `keep` refuses; answers how many went.
    pub(super) fn retain(&mut self, keep: impl Fn(&Held) -> bool) -> usize {
        let gone = self.as_slice().iter().filter(|held| !keep(held)).count();
        if gone > 0 {
            self.rebuild(|holds| holds.retain(|held| keep(held)));
        }
        gone
    }

    /// Tiers in which the node of `slot` holds the block.
    pub(super) fn tiers(&self, slot: u16) -> TierSet {
        self.as_slice().iter().find(|held| held.slot == slot).map_or(TierSet::NONE, |held| held.tiers)
    }

    /// Makes `new` the only hold of its slot; without tiers, removes the slot's hold.
    pub(super) fn put(&mut self, new: Held) {
        let own = self.as_mut_slice().iter_mut().find(|held| held.slot == new.slot);
        match own {
            Some(held) if !new.tiers.is_empty() => *held = new,
            Some(_) => self.rebuild(|holds| holds.retain(|held| held.slot != new.slot)),
            None if new.tiers.is_empty() => {}
            None => self.rebuild(|holds| {
                let place = holds.partition_point(|held| held.slot < new.slot);
                holds.insert(place, new);
            }),
        }
    }

    fn as_mut_slice(&mut self) -> &mut [Held] {
        match self {
            Holders::One(held) => std::slice::from_mut(held),
            Holders::Many(many) => many,
        }
    }

    fn rebuild(&mut self, change: impl FnOnce(&mut Vec<Held>)) {
        let mut holds = match std::mem::replace(self, Holders::Many(Box::default())) {
            Holders::One(held) => vec![held],
            Holders::Many(many) => many.into_vec(),
        };
        change(&mut holds);
        *self = match holds[..] {
            [held] => Holders::One(held),
            _ => Holders::Many(holds.into_boxed_slice()),
        };
    }
}
