//! The blocks by which a lookup comes into a run: the first of each run, each that follows one in its run which
//! nobody holds any more, and each that somebody announced with no block before it.
//!
//! A prompt begins with such a block, and goes on with one wherever it leaves a run, so this small map answers
//! what a lookup asks first and last. It stays in the near caches however many blocks the index lists: a prompt
//! that nobody knows costs no wait for the memory. It is exact: which blocks are in it stands in their pages
//! (`pages.rs`), and goes when they are unlisted. Not here: every other block (`places.rs`).

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::store::At;
use crate::id::BlockHash;

/// Parts of the map: each is small, so that a look goes through one or two steps of the tree; with fewer, a look at ten
/// million blocks takes half as long again. Few in tests.
const PARTS: usize = if cfg!(test) { 2 } else { 4_096 };

/// Position of each head, in order of hashes: whoever chooses them gets no more than the depth of a tree, and core
/// has no chance of its own that would keep a hash table from being aimed at.
#[derive(Clone, Debug, Default)]
pub(super) struct Heads {
    /// None before the first head.
    parts: Vec<BTreeMap<Key, At>>,
}

impl Heads {
    /// Where a block is, if it is a head.
    #[inline]
    pub(super) fn find(&self, hash: BlockHash) -> Option<At> {
        self.parts.get(part(hash))?.get(&Key::of(hash)).copied()
    }

    pub(super) fn insert(&mut self, hash: BlockHash, at: At) {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, BTreeMap::default);
        }
        self.parts[part(hash)].insert(Key::of(hash), at);
    }

    pub(super) fn remove(&mut self, hash: BlockHash) {
        if let Some(part) = self.parts.get_mut(part(hash)) {
            part.remove(&Key::of(hash));
        }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(BTreeMap::len).sum()
    }
}

/// By the last two bytes; the first is the same along a prefix and among all prefixes of a shard.
fn part(hash: BlockHash) -> usize {
    let [.., low, high] = hash.0;
    usize::from(u16::from_le_bytes([low, high])) % PARTS
}

/// A hash as one number, which two instructions compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key(u128);

impl Key {
    fn of(hash: BlockHash) -> Self {
        Self(u128::from_le_bytes(hash.0))
    }
}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        #[cfg(test)]
        tests::COMPARED.with(|compared| compared.set(compared.get() + 1));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for Key {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Comparisons of keys.
        pub(super) static COMPARED: Cell<u64> = const { Cell::new(0) };
    }

    const HEADS: u64 = 20_000;

    /// Comparisons that so many heads cost which come, are found, and go.
    fn compared(name: impl Fn(u64) -> BlockHash) -> u64 {
        COMPARED.set(0);
        let mut heads = Heads::default();
        let at = |number: u64| At { run: number as u32, offset: 0 };
        (0..HEADS).for_each(|number| heads.insert(name(number), at(number)));
        assert_eq!(heads.len() as u64, HEADS);
        assert!((0..HEADS).all(|number| heads.find(name(number)) == Some(at(number))));
        (0..HEADS).for_each(|number| heads.remove(name(number)));
        assert_eq!(heads.len(), 0);
        COMPARED.get()
    }

    #[test]
    fn chosen_heads_cost_little_more_than_others() {
        let mixed = |number: u64| {
            let low = u128::from(number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
            BlockHash((low ^ low.rotate_left(64)).to_le_bytes())
        };
        let others = compared(mixed);
        let half = |low: u64, high: u64| BlockHash((u128::from(high) << 64 | u128::from(low)).to_le_bytes());
        // Factors of a product that is always zero; counters in either half; hashes that differ in few bits.
        let chosen = [
            compared(|number| half(0x9E37_79B9_7F4A_7C15, number)),
            compared(|number| half(number, 0xC2B2_AE3D_27D4_EB4F)),
            compared(|number| half(0, number)),
            compared(|number| half(number << 40, 1 << 56)),
        ];
        assert!(others < 3 * HEADS * 60, "{others}");
        assert!(chosen.iter().all(|chosen| *chosen < 2 * others), "{chosen:?} and {others}");
    }
}
