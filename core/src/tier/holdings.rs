//! Lists the node's readable blocks with their value, page by page, for a drain. Read-only.
//!
//! Not here: the order of the copies to other nodes ([`crate::place::leaving`]).

use super::book::Book;
use super::entry::Meta;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, TenantId, Timestamp};

/// Slots of the slab scanned in one call: about a millisecond of the task that owns the book.
pub const HOLDINGS_MAX: usize = 4_096;

/// A readable block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Holding {
    /// Hash of the block.
    pub hash: BlockHash,
    /// Hash of the preceding block in its prefix, as the saver reported it.
    pub parent: Option<BlockHash>,
    /// Tenant that owns it.
    pub tenant: TenantId,
    /// Traits as the policy knows them.
    pub traits: BlockTraits,
    /// Probability, 0 to 1, of a use before eviction, from the policy of its tier. It is 1 for a
    /// block that is held, pinned or needed by a queued request.
    pub reuse_prob: f64,
    /// Order of last uses; larger is later.
    pub stamp: u64,
}

/// One page of the listing.
#[derive(Clone, Debug, PartialEq)]
pub struct HoldingsPage {
    /// Blocks found.
    pub blocks: Vec<Holding>,
    /// Slot at which the next page begins; `None` at the end.
    pub next: Option<usize>,
}

impl Book {
    /// Readable blocks of the current generation in [`HOLDINGS_MAX`] slots from slot `from`. A
    /// block that arrives or leaves between two pages may be missing, or listed although it left.
    pub fn holdings(&mut self, from: usize, now: Timestamp) -> HoldingsPage {
        let places = self.slab.slot_count();
        let end = from.saturating_add(HOLDINGS_MAX).min(places);
        let mut blocks = Vec::new();
        for place in from..end {
            let key = BlockKey(u32::try_from(place).unwrap_or(u32::MAX));
            let Some(entry) = self.slab.get(key) else { continue };
            let Some(tier) =
                entry.assigned_tier.filter(|_| entry.announced.is_some() && !self.slab.is_invalidated(key))
            else {
                continue;
            };
            let (meta, stamp, is_parked) = (entry.meta, entry.stamp, entry.parked());
            let worth =
                if is_parked { 1.0 } else { self.tier_state_mut(tier).policy.reuse_prob_if_kept(key, now) };
            let Meta { hash, parent, tenant, traits, .. } = meta;
            blocks.push(Holding { hash, parent, tenant, traits, reuse_prob: worth, stamp });
        }
        HoldingsPage { blocks, next: (end < places).then_some(end) }
    }
}
