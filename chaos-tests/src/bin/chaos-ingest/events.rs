//! Events that one node announces to one shard: a pure function of the event number.
//!
//! An event stores 16 blocks of a chain of 512. Once the node holds [`HELD_CHAINS`], each event
//! also drops 16 blocks from the end of the oldest chain, as a full node does. Not here: the
//! timing.

use std::ops::Range;

use kv_core::id::{BLOCK_GROUP_BLOCKS, BlockHash, Epoch, NodeId, Seq, Tier};
use kv_core::index::command::{Announcement, Change};

/// Blocks of one event.
pub(crate) const EVENT_BLOCKS: u64 = 16;

/// Events of one chain.
const CHAIN_EVENTS: u64 = 32;

/// Chains that a node holds in one shard: with four nodes and four shards, two million blocks in
/// all.
const HELD_CHAINS: u64 = 256;

/// The events of one node for one shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Events {
    pub(crate) node: u32,
    /// From 1.
    pub(crate) shard: u16,
    pub(crate) shards: u16,
}

impl Events {
    /// The batch with these events.
    pub(crate) fn announcement(&self, epoch: u64, seq: u64, events: Range<u64>) -> Announcement {
        let changes = events.flat_map(|event| self.changes(event)).collect();
        Announcement { node: NodeId(self.node), epoch: Epoch(epoch), seq: Seq(seq), changes }
    }

    /// Blocks that an event stores and drops.
    pub(crate) fn blocks(event: u64) -> u64 {
        if dropped_by(event).is_some() { 2 * EVENT_BLOCKS } else { EVENT_BLOCKS }
    }

    fn changes(&self, event: u64) -> impl Iterator<Item = Change> {
        let first = event * EVENT_BLOCKS;
        let parent = (!event.is_multiple_of(CHAIN_EVENTS)).then(|| self.hash(first - 1));
        let stored = Change::Stored { parent, blocks: self.hashes(event), tier: Tier::Dram };
        let dropped = dropped_by(event).map(|gone| Change::Dropped {
            blocks: self.hashes(gone),
            tier: Tier::Dram,
            cause: Default::default(),
        });
        std::iter::once(stored).chain(dropped)
    }

    fn hashes(&self, event: u64) -> Vec<BlockHash> {
        (event * EVENT_BLOCKS..(event + 1) * EVENT_BLOCKS).map(|block| self.hash(block)).collect()
    }

    /// Distributed like real hashes, with the tag of the shard and a common block group.
    fn hash(&self, block: u64) -> BlockHash {
        let tag = (u32::from(self.shard - 1) * 256).div_ceil(u32::from(self.shards)) as u8;
        let position = block % (CHAIN_EVENTS * EVENT_BLOCKS);
        let octet = self.unique_hash(block - position % BLOCK_GROUP_BLOCKS as u64);
        self.unique_hash(block).in_chain(tag, octet, position as usize)
    }

    /// The other bits of a hash, different for each block of each node.
    fn unique_hash(&self, block: u64) -> BlockHash {
        let spread = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let mut hash = [0; _];
        hash[1..5].copy_from_slice(&spread(block << 24 | u64::from(self.node))[4..]);
        hash[5..9].copy_from_slice(&self.node.to_le_bytes());
        hash[9..16].copy_from_slice(&spread(block)[..7]);
        BlockHash(hash)
    }
}

/// The event with the blocks that this event drops: the oldest chain is dropped from its end.
fn dropped_by(event: u64) -> Option<u64> {
    let oldest = (event / CHAIN_EVENTS).checked_sub(HELD_CHAINS)?;
    Some(oldest * CHAIN_EVENTS + (CHAIN_EVENTS - 1 - event % CHAIN_EVENTS))
}
