//! Tiers of a copy: the memories of a node that hold the block.
//!
//! Not here: which blocks an extent covers (`run.rs`).

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

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the set contains `tier`.
    #[must_use]
    pub fn contains(self, tier: Tier) -> bool {
        self.0 & Self::only(tier).0 != 0
    }

    /// Without the tiers of `removed`, with those of `added`.
    #[must_use]
    pub fn with_changes(self, removed: TierSet, added: TierSet) -> TierSet {
        TierSet(self.0 & !removed.0 | added.0)
    }

    /// The fastest tier, which serves readers; `None` if the set is empty.
    #[must_use]
    pub fn fastest(self) -> Option<Tier> {
        Tier::ALL.get((self.0.checked_ilog2()?) as usize).copied()
    }
}

impl std::fmt::Debug for TierSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(Tier::ALL.iter().filter(|&&tier| self.contains(tier))).finish()
    }
}

/// Change of the tiers of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierUpdate {
    pub(super) removed: TierSet,
    pub(super) added: TierSet,
}

impl TierUpdate {
    pub(super) fn apply_to(self, before: TierSet) -> TierSet {
        before.with_changes(self.removed, self.added)
    }
}
