//! Account, policy and counts of each tier.
//!
//! Not here: the blocks (`entry.rs`), and which block moves (`pressure.rs`, `gpu.rs`).

use std::collections::BTreeMap;

use super::counters::TierCounters;
use super::share::Shares;
use super::watermark::TierLimits;
use crate::evict::{BlockKey, Policy};
use crate::id::Tier;

/// The three tiers.
pub(super) struct Tiers {
    pub(super) dram: TierState,
    pub(super) ssd: TierState,
    /// Capacity 0 unless there is a GPU.
    pub(super) gpu: TierState,
}

impl Tiers {
    pub(super) fn state(&self, tier: Tier) -> &TierState {
        match tier {
            Tier::Ssd => &self.ssd,
            Tier::Dram => &self.dram,
            Tier::Gpu => &self.gpu,
        }
    }

    pub(super) fn state_mut(&mut self, tier: Tier) -> &mut TierState {
        match tier {
            Tier::Ssd => &mut self.ssd,
            Tier::Dram => &mut self.dram,
            Tier::Gpu => &mut self.gpu,
        }
    }

    /// All tiers, DRAM first.
    pub(super) fn all_mut(&mut self) -> [&mut TierState; 3] {
        [&mut self.dram, &mut self.ssd, &mut self.gpu]
    }

    pub(super) fn exists(&self, tier: Tier) -> bool {
        self.state(tier).limits.capacity.amount() > 0
    }

    /// Whether the tier exists and accepts new blocks.
    pub(super) fn is_open(&self, tier: Tier) -> bool {
        self.state(tier).stats.admitting && self.exists(tier)
    }
}

/// Account and policy of one tier.
pub(super) struct TierState {
    pub(super) limits: TierLimits,
    pub(super) policy: Box<dyn Policy>,
    /// In the capacity's unit.
    pub(super) used: u64,
    /// Evictable blocks that queued requests need, by queue position.
    pub(super) window: BTreeMap<u32, BlockKey>,
    pub(super) shares: Shares,
    pub(super) stats: TierStats,
    pub(super) numbers: TierCounters,
}

impl TierState {
    pub(super) fn new(limits: TierLimits, policy: Box<dyn Policy>) -> TierState {
        let stats = TierStats { admitting: true, ..TierStats::default() };
        let (window, shares, numbers) = Default::default();
        TierState { limits, policy, used: 0, window, shares, stats, numbers }
    }
}

/// Counts of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks assigned to this tier.
    pub blocks: u64,
    /// Their slots, in bytes.
    pub used_bytes: u64,
    /// Blocks demoted to a slower tier since the start.
    pub demoted_blocks: u64,
    /// Blocks promoted from a slower tier since the start.
    pub promoted_blocks: u64,
    /// Blocks dropped by pressure since the start.
    pub dropped_blocks: u64,
    /// Blocks rejected because the blocks they would displace are worth more. On SSD this includes
    /// blocks evicted from DRAM that are unlikely to be used again.
    pub not_admitted_blocks: u64,
    /// Blocks evicted from DRAM and not written to SSD, because the SSD's write queue was full
    /// ([`Book::set_ssd_queue_max`](super::Book::set_ssd_queue_max)).
    pub unwritten_blocks: u64,
    /// Blocks dropped since the start because their group's time to live expired.
    pub expired_blocks: u64,
    /// Blocks dropped since the start because they were computed with earlier weights.
    pub invalidated_blocks: u64,
    /// Whether the tier accepts new blocks.
    pub admitting: bool,
}
