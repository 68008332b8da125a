//! Entry points: the blocks at which a lookup enters a run. These are the first block of each run,
//! each block after an unlisted one, and each block announced without a parent.
//!
//! A prompt starts at an entry point and continues at one wherever it leaves a run. So this small
//! map serves the first and the last step of a lookup. It fits the near caches however many blocks
//! the index lists: an unknown prompt costs no wait for memory. It is exact: pages record their
//! entry points (`pages.rs`), and unlisting removes them. Not here: all other blocks
//! (`locations.rs`).

use std::cmp::Ordering;
use std::collections::BTreeMap;

use hashbrown::HashTable;

use super::store::RunPosition;
use crate::id::{BlockHash, HashWords};

/// Parts of the map, so that no command waits while the whole map grows. Few in tests, which create
/// many maps.
const PARTS: usize = if cfg!(test) { 2 } else { 64 };
/// A part shrinks when its capacity exceeds its length by this factor.
const SHRINK_FACTOR: usize = 4;
/// Capacity that a part always keeps.
const CAPACITY_MIN: usize = 64;
/// Comparisons after which a new entry goes to the collision tree. Hashes that are not crafted
/// rarely need one.
const COMPARES_MAX: u32 = 16;

/// Position of each entry point.
#[derive(Clone, Debug, Default)]
pub(super) struct EntryPoints {
    /// Empty before the first entry point.
    parts: Vec<MapPart>,
}

impl EntryPoints {
    /// Position of a block, if it is an entry point.
    #[inline]
    pub(super) fn find(&self, hash: BlockHash) -> Option<RunPosition> {
        self.parts.get(part(hash))?.find(hash)
    }

    pub(super) fn insert(&mut self, hash: BlockHash, at: RunPosition) {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, MapPart::default);
        }
        self.parts[part(hash)].insert(hash, at);
    }

    pub(super) fn remove(&mut self, hash: BlockHash) {
        if let Some(part) = self.parts.get_mut(part(hash)) {
            part.remove(hash);
        }
    }

    /// Number of entry points.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.table.len() + part.collisions.len()).sum()
    }
}

/// A hash table for speed, and a tree for keys crafted to collide in it. This crate has no source
/// of randomness to key the hash, so it detects collisions instead.
#[derive(Clone, Debug, Default)]
struct MapPart {
    table: HashTable<(BlockHash, RunPosition)>,
    collisions: BTreeMap<HashKey, RunPosition>,
}

impl MapPart {
    #[inline]
    fn find(&self, hash: BlockHash) -> Option<RunPosition> {
        match self.table.find(fold(hash), |(held, _)| equal(*held, hash)) {
            Some((_, at)) => Some(*at),
            None if self.collisions.is_empty() => None,
            None => self.collisions.get(&HashKey(hash)).copied(),
        }
    }

    fn insert(&mut self, hash: BlockHash, at: RunPosition) {
        let mut met = 0;
        let held = self.table.find_mut(fold(hash), |(held, _)| {
            met += 1;
            equal(*held, hash)
        });
        if let Some((_, held)) = held {
            *held = at;
        } else if met >= COMPARES_MAX || self.collisions.contains_key(&HashKey(hash)) {
            self.collisions.insert(HashKey(hash), at);
        } else {
            self.table.insert_unique(fold(hash), (hash, at), |(held, _)| fold(*held));
        }
    }

    fn remove(&mut self, hash: BlockHash) {
        match self.table.find_entry(fold(hash), |(held, _)| equal(*held, hash)) {
            Ok(held) => drop(held.remove()),
            Err(_) => drop(self.collisions.remove(&HashKey(hash))),
        }
        if self.table.capacity() > CAPACITY_MIN.max(self.table.len() * SHRINK_FACTOR) {
            // One by one, since more entries collide in a smaller table.
            let smaller = HashTable::with_capacity(self.table.len() * 2);
            for (hash, at) in std::mem::replace(&mut self.table, smaller) {
                self.insert(hash, at);
            }
        }
    }
}

/// Selects by the last byte; the first byte is equal along a prefix and within a shard.
fn part(hash: BlockHash) -> usize {
    let [.., last] = hash.0;
    usize::from(last) % PARTS
}

/// Block hashes are uniform already; the multiplication guards against similar hashes, not against
/// crafted ones.
fn fold(hash: BlockHash) -> u64 {
    let HashWords { first, middle, last } = hash.words();
    let low = first ^ middle << 40;
    let product = u128::from(low ^ 0x9E37_79B9_7F4A_7C15) * u128::from(last ^ 0xC2B2_AE3D_27D4_EB4F);
    (product >> 64) as u64 ^ product as u64
}

fn equal(held: BlockHash, hash: BlockHash) -> bool {
    #[cfg(test)]
    tests::COMPARED.with(|compared| compared.set(compared.get() + 1));
    held == hash
}

/// A hash as the key of a tree, which tests count comparisons of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HashKey(BlockHash);

impl Ord for HashKey {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        #[cfg(test)]
        tests::COMPARED.with(|compared| compared.set(compared.get() + 1));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for HashKey {
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

    /// Comparisons that [`HEADS`] entry points cost to add, find and remove.
    fn comparisons(name: impl Fn(u64) -> BlockHash) -> u64 {
        COMPARED.set(0);
        let mut heads = EntryPoints::default();
        let at = |number: u64| RunPosition { run: number as u32, offset: 0 };
        (0..HEADS).for_each(|number| heads.insert(name(number), at(number)));
        assert_eq!(heads.len() as u64, HEADS);
        assert!((0..HEADS).all(|number| heads.find(name(number)) == Some(at(number))));
        (0..HEADS).for_each(|number| heads.remove(name(number)));
        assert_eq!(heads.len(), 0);
        COMPARED.get()
    }

    #[test]
    fn crafted_entry_points_cost_little_more_than_others() {
        let mixed = |number: u64| {
            let low = u128::from(number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
            let mixed = low ^ low.rotate_left(64);
            BlockHash::from_words(mixed as u64, (mixed >> 64) as u64)
        };
        let others = comparisons(mixed);
        let half = BlockHash::from_words;
        // Factors that make the product zero; counters in either half; hashes that differ in few
        // bits.
        let chosen = [
            comparisons(|number| half(0x9E37_79B9_7F4A_7C15, number)),
            comparisons(|number| half(number, 0xC2B2_AE3D_27D4_EB4F)),
            comparisons(|number| half(0, number)),
            comparisons(|number| half(number << 40, 1 << 56)),
        ];
        // Comparisons before a key counts as colliding, plus the depth of the tree, twice at an
        // insert.
        let most = 3 * HEADS * (16 + 2 * 20);
        assert!(others < 3 * HEADS * 2, "{others}");
        assert!(chosen.iter().all(|chosen| *chosen < most), "{chosen:?}, at most {most}");
    }

    #[test]
    fn collisions_are_as_exact_as_the_table() {
        const SEED: u64 = 20_261_122;
        println!("seed {SEED}");
        let mut random = SEED;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (random >> 33) % below
        };
        // Half of the hashes collide.
        let name = |number: u64| {
            let low = if number.is_multiple_of(2) {
                0x9E37_79B9_7F4A_7C15
            } else {
                number.wrapping_mul(0xD6E8_FEB8_6659_FD93)
            };
            BlockHash::from_words(low, number)
        };
        let (mut heads, mut known, mut crowd) = (EntryPoints::default(), BTreeMap::new(), 0);
        for turn in 0..60_000 {
            // Phases of mostly inserts, then mostly removals, so that tables grow and shrink.
            let comes = draw(10) < if turn / 5_000 % 2 == 0 { 8 } else { 2 };
            let (number, at) = (draw(3_000), RunPosition { run: draw(1 << 20) as u32, offset: 0 });
            if comes {
                heads.insert(name(number), at);
                known.insert(number, at);
            } else {
                heads.remove(name(number));
                known.remove(&number);
            }
            let asked = draw(3_000);
            assert_eq!(heads.find(name(asked)), known.get(&asked).copied());
            assert_eq!(heads.len(), known.len());
            crowd = crowd.max(heads.parts.iter().map(|part| part.collisions.len()).max().unwrap_or(0));
        }
        assert!(crowd > 100, "{crowd}");
        for asked in 0..3_000 {
            assert_eq!(heads.find(name(asked)), known.get(&asked).copied());
        }
    }
}
