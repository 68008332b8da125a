//! Tier bookkeeping of one node: the tier of every block, the leases and pins that hold it, and the
//! next move. Pure.
//!
//! The book assigns a block to a tier *at once*; the bytes follow later. Each entry has an assigned
//! tier and a set of existing copies. The difference between the two comes out as [`Action`]s. The
//! caller that runs an action reports with [`Book::on_moved`] or [`Book::on_move_failed`].
//!
//! Decisions do not wait for bytes, so DRAM and SSD together behave as one policy of the summed
//! capacity, however slow the disk is. [`Book::with_gpu`] adds GPU memory as a third tier: blocks
//! in frequent use are promoted to it, and blocks evicted from it return to DRAM.
//!
//! Not here: bytes, slots and files (`kvfleet-node`), and the choice of the victim
//! ([`crate::evict`]).

mod book;
mod changes;
mod counters;
mod curve;
mod entry;
mod fetch;
mod gpu;
mod gpu_residency;
mod holdings;
mod invalidation;
mod lease;
mod lease_table;
mod moves;
mod order;
mod pins;
mod pressure;
mod queues;
mod quota;
mod save;
mod scans;
mod share;
mod ssd_writes;
mod tenants;
#[cfg(test)]
mod tests;
mod tiers;
mod ttl;
mod watermark;
mod window;

pub use book::{Book, BookLimits, RecoveredBlock};
pub use changes::ChangeLog;
pub use counters::{CategoryCounters, DurationHistogram, RemovalReason, TierCounters};
pub use curve::MissCurve;
pub use entry::{BLOCK_BYTES_MAX, Meta, PinnedBlocks};
pub use fetch::{FetchHit, FetchHits};
pub use gpu::{GPU_LOSS_SLOTS_MAX, GPU_PROMOTIONS_MAX};
pub use holdings::{HOLDINGS_MAX, Holding, HoldingsPage};
pub use invalidation::{SWEEP_DROPS_MAX, SWEEP_SLOTS_MAX};
pub use lease::EXPIRED_LEASE_BLOCKS_MAX;
pub use moves::{Action, MovePermits};
pub use order::LISTED_BLOCKS_MAX;
pub use pins::{ENDED_PINS_MAX, PIN_STEP_BLOCKS, PinDirective, PinExpiry};
pub use pressure::EVICTED_BLOCKS_MAX;
pub use quota::QUOTA_DROPS_MAX;
pub use save::{OfferOutcome, RefusalReason, SaveOffer};
pub use share::TENANTS_MAX;
pub use tiers::TierStats;
pub use ttl::EXPIRED_BLOCKS_MAX;
pub use watermark::{Capacity, TierLimits};
pub use window::{
    PREFETCH_SHARE_MAX, PREFETCHES_MAX, WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX, WINDOW_SPAN, WindowSummary,
};

use crate::id::{CallerId, Category, LeaseId, TenantId};

pub use crate::evict::BlockKey;

/// The requester of a fetch or save: the part of the request that the book needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    /// Lease that holds this request's blocks. One lease belongs to the same caller in every call.
    pub lease: LeaseId,
    /// Caller of the request. No caller may hold all leases.
    pub caller: CallerId,
    /// Tenant that owns the bytes.
    pub tenant: TenantId,
    /// Category of the request, passed to the policy.
    pub category: Category,
}

/// Size of one block, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// Encoded frame, counted against the tenant's quota.
    pub frame: u32,
    /// Slot in DRAM. A GPU slot has the same size.
    pub dram: u32,
    /// Slot on SSD.
    pub ssd: u32,
}

/// No lease is available for this caller now; the node answers `Busy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{held} of {limit} leases are held, {own} by this caller; a caller may not hold more leases than remain free"
)]
pub struct LeasesFull {
    /// Maximum number of leases.
    pub limit: usize,
    /// Leases held now.
    pub held: usize,
    /// Leases that this caller holds.
    pub own: usize,
}
