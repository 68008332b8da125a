//! An engine block, as it is kept under its name.
//!
//! Not here: the table of names (`names.rs`), and the effect of events.

use std::collections::VecDeque;

use kv_core::id::BlockHash;
use kv_core::prefix::{Chain, ChainNodes};
use kvfleet_engine_events::events::EngineHash;
use smallvec::SmallVec;

use super::names::{NamedEntry, Slot};

/// An engine block. Two cache lines; the first holds all that the removal of a block needs, if it
/// is one of ours or a part.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Alias {
    pub(super) name: EngineHash,
    pub(super) our_blocks: OurBlocks,
    /// Creation order: a parent's is below its children's.
    pub(super) order: EventNumber,
    /// Number of its last departure; 0 if it never left.
    pub(super) departure: EventNumber,
    /// Slot of its parent when this block was stored; the slot may have been reused.
    pub(super) parent_slot: Slot,
    pub(super) hasher: u16,
    pub(super) is_resident: bool,
    has_before: bool,
    /// Our block before the first one that it has a part of.
    before: BlockHash,
    /// Name of its parent.
    pub(super) parent: Option<EngineHash>,
    /// Chain after our last block that ends in it or before it, without what that block's hash
    /// tells.
    pub(super) chain: ChainNodes,
}

/// A number of events, in six bytes: enough for a hundred thousand a second over 80 years. It stays
/// at the highest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EventNumber([u8; 6]);

impl EventNumber {
    pub(super) const MAX: EventNumber = EventNumber([u8::MAX; 6]);

    pub(super) fn new(number: u64) -> Self {
        let [high, low, rest @ ..] = number.to_be_bytes();
        if high | low == 0 { Self(rest) } else { Self::MAX }
    }
}

const _: () = assert!(size_of::<Option<Alias>>() == 128);

/// The part of our blocks that an engine block covers.
#[derive(Debug)]
pub(super) enum OurBlocks {
    One(BlockHash),
    Several(Box<[BlockHash]>),
    Part(Part),
}

/// An engine block that is smaller than ours.
#[derive(Debug)]
pub(super) struct Part {
    /// Tokens of our block up to the end of this part.
    pub(super) filled: u16,
    /// Tokens of this part.
    pub(super) count: u16,
    /// Our block that it is a part of, or [`SplitBlockId::NONE`], or [`SplitBlockId::SEVERAL`].
    split_block: SplitBlockId,
    /// `None` for the last part, which belongs to one block of ours and needs no tokens later.
    inner: Option<Box<EarlyPart>>,
}

/// Data of a part that is not the last.
#[derive(Debug)]
struct EarlyPart {
    tokens: SmallVec<[u32; 16]>,
    /// Our blocks that it is a part of, if several: one for each continuation to the end of our
    /// block.
    split_blocks: Vec<SplitBlockId>,
}

/// Index of one of our blocks that is in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitBlockId(u32);

impl SplitBlockId {
    const NONE: SplitBlockId = SplitBlockId(u32::MAX);
    const SEVERAL: SplitBlockId = SplitBlockId(u32::MAX - 1);
}

/// One of our blocks that is in parts.
#[derive(Debug)]
pub(super) struct SplitBlock {
    pub(super) block: BlockHash,
    pub(super) before: Option<BlockHash>,
    /// The part that completed it. While this is kept, none of its parts is forgotten.
    pub(super) last_part: Slot,
    /// Number of its parts that are not resident.
    pub(super) missing: u32,
}

/// Position at which an engine block begins.
#[derive(Clone, Copy)]
pub(super) struct ChainPosition {
    pub(super) hasher: u16,
    pub(super) chain: Chain,
    /// Our block before it.
    pub(super) before: Option<BlockHash>,
    /// Tokens from the end of that block to here.
    pub(super) filled: usize,
    /// Name and slot of the engine's previous block.
    pub(super) parent: Option<EngineHash>,
    pub(super) parent_slot: Slot,
}

impl NamedEntry for Alias {
    #[inline]
    fn name(&self) -> EngineHash {
        self.name
    }
}

impl Alias {
    /// A newly stored block.
    #[inline]
    pub(super) fn new(
        name: EngineHash,
        order: u64,
        place: ChainPosition,
        chain: Chain,
        our_blocks: OurBlocks,
    ) -> Alias {
        let ChainPosition { hasher, before, parent, parent_slot, .. } = place;
        Alias {
            name,
            our_blocks,
            order: EventNumber::new(order),
            departure: EventNumber::default(),
            parent_slot,
            hasher,
            is_resident: true,
            has_before: before.is_some(),
            before: before.unwrap_or_default(),
            parent,
            chain: chain.nodes(),
        }
    }

    pub(super) fn before(&self) -> Option<BlockHash> {
        self.has_before.then_some(self.before)
    }

    pub(super) fn part(&self) -> Option<&Part> {
        match &self.our_blocks {
            OurBlocks::Part(part) => Some(part),
            OurBlocks::One(_) | OurBlocks::Several(_) => None,
        }
    }

    pub(super) fn part_mut(&mut self) -> Option<&mut Part> {
        match &mut self.our_blocks {
            OurBlocks::Part(part) => Some(part),
            OurBlocks::One(_) | OurBlocks::Several(_) => None,
        }
    }

    /// Number of our blocks in it, for the limit.
    #[inline]
    pub(super) fn weight(&self) -> usize {
        match &self.our_blocks {
            OurBlocks::Several(blocks) => blocks.len(),
            OurBlocks::One(_) | OurBlocks::Part(_) => 1,
        }
    }
}

impl Part {
    /// A part that is not the last.
    pub(super) fn early(tokens: &[u32], filled: usize) -> Part {
        let more = EarlyPart { tokens: SmallVec::from_slice(tokens), split_blocks: Vec::new() };
        Part {
            filled: filled as u16,
            count: tokens.len() as u16,
            split_block: SplitBlockId::NONE,
            inner: Some(Box::new(more)),
        }
    }

    /// The last part of our block.
    pub(super) fn last(count: usize, filled: usize, split_block: SplitBlockId) -> Part {
        Part { filled: filled as u16, count: count as u16, split_block, inner: None }
    }

    /// Its tokens; empty for the last part.
    pub(super) fn tokens(&self) -> &[u32] {
        self.inner.as_deref().map_or(&[], |more| &more.tokens)
    }

    /// Our blocks that it is a part of.
    #[inline]
    pub(super) fn split_blocks(&self) -> &[SplitBlockId] {
        match (self.split_block, &self.inner) {
            (SplitBlockId::NONE, _) => &[],
            (SplitBlockId::SEVERAL, Some(more)) => &more.split_blocks,
            _ => std::slice::from_ref(&self.split_block),
        }
    }

    /// Records that it is a part of another block.
    pub(super) fn push(&mut self, whole: SplitBlockId) {
        match (self.split_block, &mut self.inner) {
            (SplitBlockId::NONE, _) => self.split_block = whole,
            (SplitBlockId::SEVERAL, Some(more)) => more.split_blocks.push(whole),
            (one, Some(more)) => {
                more.split_blocks.extend([one, whole]);
                self.split_block = SplitBlockId::SEVERAL;
            }
            (_, None) => {}
        }
    }

    /// Records that one of them is forgotten.
    pub(super) fn forget(&mut self, whole: SplitBlockId) {
        if self.split_block == whole {
            self.split_block = SplitBlockId::NONE;
        } else if let (SplitBlockId::SEVERAL, Some(more)) = (self.split_block, &mut self.inner)
            && let Some(at) = more.split_blocks.iter().rposition(|of| *of == whole)
        {
            more.split_blocks.swap_remove(at);
            if more.split_blocks.is_empty() {
                (more.split_blocks, self.split_block) = (Vec::new(), SplitBlockId::NONE);
            }
        }
    }
}

/// Our blocks in parts. Free entries are reused first in, first out, as slots of parts are.
#[derive(Debug, Default)]
pub(super) struct SplitBlocks {
    list: Vec<Option<SplitBlock>>,
    free: VecDeque<SplitBlockId>,
}

impl SplitBlocks {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.list.len() - self.free.len()
    }

    #[inline]
    pub(super) fn get(&self, id: SplitBlockId) -> Option<&SplitBlock> {
        self.list.get(id.0 as usize)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: SplitBlockId) -> Option<&mut SplitBlock> {
        self.list.get_mut(id.0 as usize)?.as_mut()
    }

    pub(super) fn insert(&mut self, whole: SplitBlock) -> SplitBlockId {
        let Some(id) = self.free.pop_front() else {
            self.list.push(Some(whole));
            return SplitBlockId(self.list.len() as u32 - 1);
        };
        if let Some(own) = self.list.get_mut(id.0 as usize) {
            *own = Some(whole);
        }
        id
    }

    pub(super) fn remove(&mut self, id: SplitBlockId) -> Option<SplitBlock> {
        let whole = self.list.get_mut(id.0 as usize)?.take()?;
        self.free.push_back(id);
        Some(whole)
    }

    pub(super) fn clear(&mut self) {
        *self = SplitBlocks::default();
    }
}
