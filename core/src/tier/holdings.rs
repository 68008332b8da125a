//! What a node holds and what each block is worth to it, for whoever takes over: read in steps, and nothing is changed.
//!
//! Not here: the order in which it goes to others ([`crate::place::leaving`]).

use super::book::Book;
use super::entry::Meta;
use crate::evict::{BlockKey, BlockTraits};
use crate::id::{BlockHash, TenantId, Timestamp};

/// Places of the slab that are looked at in one call: about a millisecond of the task that owns the book.
pub const HOLDINGS_MAX: usize = 4_096;

/// A readable block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Holding {
    /// The block.
    pub hash: BlockHash,
    /// The one before it in its prefix, as whoever saved it said.
    pub parent: Option<BlockHash>,
    /// Whose it is.
    pub tenant: TenantId,
    /// As the policy knows it.
    pub traits: BlockTraits,
    /// How likely, 0 to 1, it is used before it would leave, as the policy of its tier says. What somebody holds, pinned or waits for is
    /// certain to be.
    pub worth: f64,
    /// Order of last uses; larger is later.
    pub stamp: u64,
}

/// A step through all that is held.
#[derive(Clone, Debug, PartialEq)]
pub struct Holdings {
    /// What was found.
    pub blocks: Vec<Holding>,
    /// Where the next step begins; nothing at the end.
    pub next: Option<usize>,
}

impl Book {
    /// Readable blocks under the weights in force, from this place on: [`HOLDINGS_MAX`] places of them. What comes and goes between
    /// two steps may be missed or named though it left.
    pub fn holdings(&mut self, from: usize, now: Timestamp) -> Holdings {
        let places = self.slab.places();
        let end = from.saturating_add(HOLDINGS_MAX).min(places);
        let mut blocks = Vec::new();
        for place in from..end {
            let key = BlockKey(u32::try_from(place).unwrap_or(u32::MAX));
            let Some(entry) = self.slab.get(key) else { continue };
            let Some(tier) = entry.place.filter(|_| entry.announced.is_some() && !self.slab.is_void(key))
            else {
                continue;
            };
            let (meta, stamp, is_parked) = (entry.meta, entry.stamp, entry.parked());
            let worth = if is_parked { 1.0 } else { self.shelf_mut(tier).policy.prospect_of(key, now) };
            let Meta { hash, parent, tenant, traits, .. } = meta;
            blocks.push(Holding { hash, parent, tenant, traits, worth, stamp });
        }
        Holdings { blocks, next: (end < places).then_some(end) }
    }
}
