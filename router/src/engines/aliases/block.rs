//! A block of an engine, as it is kept under its name.
//!
//! Not here: the table of names (`names.rs`), and what events change.

use std::collections::VecDeque;

use kv_core::id::BlockHash;
use kv_core::prefix::Chain;
use kvfleet_proto::engine_events::EngineHash;
use smallvec::SmallVec;

use super::names::{Named, Slot};

/// A block of an engine. Two lines of a cache, of which the first has all that the going of one block of ours takes, or of a part.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Alias {
    pub(super) name: EngineHash,
    pub(super) ours: Ours,
    /// A parent's is below its children's.
    pub(super) nth: u64,
    /// Which departure its last one was; none is zero.
    pub(super) left: u64,
    /// Where the block before it was when this one came. Another one may be there now.
    pub(super) parent_slot: Slot,
    pub(super) hasher: u16,
    pub(super) is_resident: bool,
    has_before: bool,
    /// The block of ours before the first that it has a part of.
    before: BlockHash,
    /// Behind the last block of ours that ends in it or before it.
    pub(super) chain: Chain,
    /// The block before it.
    pub(super) parent: Option<EngineHash>,
}

const _: () = assert!(size_of::<Option<Alias>>() == 128);

/// Which of our blocks an engine's block is.
#[derive(Debug)]
pub(super) enum Ours {
    One(BlockHash),
    Several(Box<[BlockHash]>),
    Part(Part),
}

/// A block of an engine that is smaller than ours.
#[derive(Debug)]
pub(super) struct Part {
    /// Tokens of our block up to the end of this part.
    pub(super) filled: u16,
    /// Tokens of this part.
    pub(super) count: u16,
    /// The one block of ours that it is a part of, or [`WholeId::NONE`], or [`WholeId::SEVERAL`].
    of: WholeId,
    /// Nothing for the last part: it is of one block of ours, and its tokens are not asked for again.
    more: Option<Box<More>>,
}

/// What is kept of a part that is not the last.
#[derive(Debug)]
struct More {
    tokens: SmallVec<[u32; 16]>,
    /// Our blocks that it is a part of, where they are several: one for each way to go on from here to the end of ours.
    of: Vec<WholeId>,
}

/// Where a block of ours that is in parts is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WholeId(u32);

impl WholeId {
    const NONE: WholeId = WholeId(u32::MAX);
    const SEVERAL: WholeId = WholeId(u32::MAX - 1);
}

/// A block of ours in parts.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) block: BlockHash,
    pub(super) before: Option<BlockHash>,
    /// The part that made it whole. As long as this is kept, none of its parts is forgotten.
    pub(super) last: Slot,
    /// Parts that are not resident.
    pub(super) missing: u32,
}

/// Where a block of an engine begins.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) hasher: u16,
    pub(super) chain: Chain,
    /// The block of ours before it.
    pub(super) before: Option<BlockHash>,
    /// Tokens between that one's end and here.
    pub(super) filled: usize,
    /// The engine's block before it, and where that is kept.
    pub(super) parent: Option<EngineHash>,
    pub(super) parent_slot: Slot,
}

impl Named for Alias {
    #[inline]
    fn name(&self) -> EngineHash {
        self.name
    }
}

impl Alias {
    /// One that came just now.
    #[inline]
    pub(super) fn new(name: EngineHash, nth: u64, place: Place, chain: Chain, ours: Ours) -> Alias {
        let Place { hasher, before, parent, parent_slot, .. } = place;
        Alias {
            name,
            ours,
            nth,
            left: 0,
            parent_slot,
            hasher,
            is_resident: true,
            has_before: before.is_some(),
            before: before.unwrap_or_default(),
            chain,
            parent,
        }
    }

    pub(super) fn before(&self) -> Option<BlockHash> {
        self.has_before.then_some(self.before)
    }

    pub(super) fn part(&self) -> Option<&Part> {
        match &self.ours {
            Ours::Part(part) => Some(part),
            Ours::One(_) | Ours::Several(_) => None,
        }
    }

    pub(super) fn part_mut(&mut self) -> Option<&mut Part> {
        match &mut self.ours {
            Ours::Part(part) => Some(part),
            Ours::One(_) | Ours::Several(_) => None,
        }
    }

    /// Blocks of ours in it, for the limit.
    #[inline]
    pub(super) fn weight(&self) -> usize {
        match &self.ours {
            Ours::Several(blocks) => blocks.len(),
            Ours::One(_) | Ours::Part(_) => 1,
        }
    }
}

impl Part {
    /// One that is not the last.
    pub(super) fn early(tokens: &[u32], filled: usize) -> Part {
        let more = More { tokens: SmallVec::from_slice(tokens), of: Vec::new() };
        Part {
            filled: filled as u16,
            count: tokens.len() as u16,
            of: WholeId::NONE,
            more: Some(Box::new(more)),
        }
    }

    /// The last one of a block of ours.
    pub(super) fn last(count: usize, filled: usize, of: WholeId) -> Part {
        Part { filled: filled as u16, count: count as u16, of, more: None }
    }

    /// Its tokens, which the last one does not keep.
    pub(super) fn tokens(&self) -> &[u32] {
        self.more.as_deref().map_or(&[], |more| &more.tokens)
    }

    /// Our blocks that it is a part of.
    #[inline]
    pub(super) fn of(&self) -> &[WholeId] {
        match (self.of, &self.more) {
            (WholeId::NONE, _) => &[],
            (WholeId::SEVERAL, Some(more)) => &more.of,
            _ => std::slice::from_ref(&self.of),
        }
    }

    /// Notes that it is a part of another one.
    pub(super) fn push(&mut self, whole: WholeId) {
        match (self.of, &mut self.more) {
            (WholeId::NONE, _) => self.of = whole,
            (WholeId::SEVERAL, Some(more)) => more.of.push(whole),
            (one, Some(more)) => {
                more.of.extend([one, whole]);
                self.of = WholeId::SEVERAL;
            }
            (_, None) => {}
        }
    }

    /// Notes that one of them is not known any more.
    pub(super) fn forget(&mut self, whole: WholeId) {
        if self.of == whole {
            self.of = WholeId::NONE;
        } else if let (WholeId::SEVERAL, Some(more)) = (self.of, &mut self.more)
            && let Some(at) = more.of.iter().rposition(|of| *of == whole)
        {
            more.of.swap_remove(at);
            if more.of.is_empty() {
                (more.of, self.of) = (Vec::new(), WholeId::NONE);
            }
        }
    }
}

/// Blocks of ours that engine blocks are parts of. Places that became free are taken in the order in which they did, as those of the parts.
#[derive(Debug, Default)]
pub(super) struct Wholes {
    list: Vec<Option<Whole>>,
    free: VecDeque<WholeId>,
}

impl Wholes {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.list.len() - self.free.len()
    }

    #[inline]
    pub(super) fn get(&self, id: WholeId) -> Option<&Whole> {
        self.list.get(id.0 as usize)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: WholeId) -> Option<&mut Whole> {
        self.list.get_mut(id.0 as usize)?.as_mut()
    }

    pub(super) fn insert(&mut self, whole: Whole) -> WholeId {
        let Some(id) = self.free.pop_front() else {
            self.list.push(Some(whole));
            return WholeId(self.list.len() as u32 - 1);
        };
        if let Some(own) = self.list.get_mut(id.0 as usize) {
            *own = Some(whole);
        }
        id
    }

    pub(super) fn remove(&mut self, id: WholeId) -> Option<Whole> {
        let whole = self.list.get_mut(id.0 as usize)?.take()?;
        self.free.push_back(id);
        Some(whole)
    }

    pub(super) fn clear(&mut self) {
        *self = Wholes::default();
    }
}
