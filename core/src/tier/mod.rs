//! The tier book of one node: what is where, who holds it, what moves next. Pure.
//!
//! The book decides *logically and at once* in which tier a block belongs; bytes follow later. Each
//! entry has a place where it should be and the copies that exist, and the difference comes out as
//! [`Action`]s. Whoever runs them reports back with [`Book::on_moved`] or [`Book::on_move_failed`].
//! Because decisions do not wait for bytes, DRAM and SSD together behave as one policy of the summed
//! capacity, whatever the disk does. A third tier, the memory of a GPU, is there if it is asked for
//! ([`Book::with_gpu`]): what is used often goes up to it, and what leaves it goes back to DRAM.
//!
//! Not here: bytes, slots, files (`kvfleet-node`), nor which block is the victim ([`crate::evict`]).

mod book;
mod changes;
mod curve;
mod entry;
mod fetch;
mod holdings;
mod lease;
mod lift;
mod moves;
mod numbers;
mod order;
mod pins;
mod pressure;
mod quota;
mod save;
mod share;
#[cfg(test)]
mod tests;
mod ttl;
mod void;
mod watermark;
mod window;

pub use book::{Book, Found, Limits, TierStats};
pub use changes::ChangeLog;
pub use curve::MissCurve;
pub use entry::{BLOCK_BYTES_MAX, Meta, PinnedBlocks};
pub use fetch::{Reach, Reached};
pub use holdings::{HOLDINGS_MAX, Holding, Holdings};
pub use lease::EXPIRED_LEASE_BLOCKS_MAX;
pub use lift::{LIFTS_MAX, LOST_PLACES_MAX};
pub use moves::{Action, Room};
pub use numbers::{ClassNumbers, Left, Spans, TierNumbers};
pub use order::LISTED_BLOCKS_MAX;
pub use pins::{ENDED_PINS_MAX, PIN_STEP_BLOCKS, PinEnd, PinOrder};
pub use pressure::EVICTED_BLOCKS_MAX;
pub use quota::QUOTA_DROPS_MAX;
pub use save::{Offer, Offered, RefusedBy};
pub use share::TENANTS_MAX;
pub use ttl::EXPIRED_BLOCKS_MAX;
pub use void::{VOID_BLOCKS_MAX, VOID_PLACES_MAX};
pub use watermark::{Capacity, TierLimits};
pub use window::{
    PREFETCH_SHARE_MAX, PREFETCHES_MAX, WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX, WINDOW_SPAN, WindowTaken,
};

use crate::id::{CallerId, Category, LeaseId, TenantId};

pub use crate::evict::BlockKey;

/// Who asks: the part of a fetch or save that the book needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The lease under which this request's blocks are held, of the same caller each time.
    pub lease: LeaseId,
    /// Whose request it is: no caller may have all leases.
    pub caller: CallerId,
    /// Whose bytes.
    pub tenant: TenantId,
    /// Category of the request, handed to the policy.
    pub category: Category,
}

/// What one block costs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// Encoded frame, counted against the tenant's quota.
    pub frame: u32,
    /// Slot in DRAM; one on a GPU, whose memory is cut alike, is as large.
    pub dram: u32,
    /// Slot on SSD.
    pub ssd: u32,
}

/// There is no lease for this caller now; who asked answers `Busy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{held} of {limit} leases are held, {own} of them by this caller, which may have no more than are left"
)]
pub struct LeasesFull {
    /// How many there may be.
    pub limit: usize,
    /// How many there are.
    pub held: usize,
    /// How many of them this caller has.
    pub own: usize,
}
