//! The blocks by which a lookup comes into a run: the first of each run, each that follows one in its run which
//! nobody holds any more, and each that somebody announced with no block before it.
//!
//! A prompt begins with such a block, and goes on with one wherever it leaves a run, so this small map answers
//! what a lookup asks first and last. It stays in the near caches however many blocks the index lists: a prompt
//! that nobody knows costs no wait for the memory. It is exact: which blocks are in it stands in their pages
//! (`pages.rs`), and goes when they are unlisted. Not here: every other block (`places.rs`).

use std::cmp::Ordering;
use std::collections::BTreeMap;

use hashbrown::HashTable;

use super::store::At;
use crate::id::BlockHash;

/// Parts of the map, so that no command waits while all of it grows: a million heads are moved in less than
/// a millisecond. Few in tests, which make many.
const PARTS: usize = if cfg!(test) { 2 } else { 64 };
/// A part is made smaller when it has room for so many times what is in it.
const THIN: usize = 4;
/// Heads for which a part keeps its room.
const ROOM_MIN: usize = 64;
/// Others that a new head may be compared with before it goes to the crowd. Hashes that nobody chose are compared with
/// one in a hundred or so.
const CROWD_MIN: u32 = 16;

/// Position of each head.
#[derive(Clone, Debug, Default)]
pub(super) struct Heads {
    /// None before the first head.
    parts: Vec<Part>,
}

impl Heads {
    /// Where a block is, if it is a head.
    #[inline]
    pub(super) fn find(&self, hash: BlockHash) -> Option<At> {
        self.parts.get(part(hash))?.find(hash)
    }

    pub(super) fn insert(&mut self, hash: BlockHash, at: At) {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, Part::default);
        }
        self.parts[part(hash)].insert(hash, at);
    }

    pub(super) fn remove(&mut self, hash: BlockHash) {
        if let Some(part) = self.parts.get_mut(part(hash)) {
            part.remove(hash);
        }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.iter().map(|part| part.table.len() + part.crowd.len()).sum()
    }
}

/// A hash table, which answers soonest, and a tree for what was made to meet there. Core has no chance of its own by
/// which to hash so that nobody can aim at the table, so it notices when somebody did.
#[derive(Clone, Debug, Default)]
struct Part {
    table: HashTable<(BlockHash, At)>,
    crowd: BTreeMap<Key, At>,
}

impl Part {
    #[inline]
    fn find(&self, hash: BlockHash) -> Option<At> {
        match self.table.find(fold(hash), |(held, _)| same(*held, hash)) {
            Some((_, at)) => Some(*at),
            None if self.crowd.is_empty() => None,
            None => self.crowd.get(&Key::of(hash)).copied(),
        }
    }

    fn insert(&mut self, hash: BlockHash, at: At) {
        let mut met = 0;
        let held = self.table.find_mut(fold(hash), |(held, _)| {
            met += 1;
            same(*held, hash)
        });
        if let Some((_, held)) = held {
            *held = at;
        } else if met >= CROWD_MIN || self.crowd.contains_key(&Key::of(hash)) {
            self.crowd.insert(Key::of(hash), at);
        } else {
            self.table.insert_unique(fold(hash), (hash, at), |(held, _)| fold(*held));
        }
    }

    fn remove(&mut self, hash: BlockHash) {
        match self.table.find_entry(fold(hash), |(held, _)| same(*held, hash)) {
            Ok(held) => drop(held.remove()),
            Err(_) => drop(self.crowd.remove(&Key::of(hash))),
        }
        if self.table.capacity() > ROOM_MIN.max(self.table.len() * THIN) {
            // One by one, since more of them meet in a smaller table.
            let smaller = HashTable::with_capacity(self.table.len() * 2);
            for (hash, at) in std::mem::replace(&mut self.table, smaller) {
                self.insert(hash, at);
            }
        }
    }
}

/// By the last byte; the first is the same along a prefix and among all prefixes of a shard.
fn part(hash: BlockHash) -> usize {
    let [.., last] = hash.0;
    usize::from(last) % PARTS
}

/// Block hashes are uniform already; the multiplication guards against hashes that are alike and not aimed.
fn fold(hash: BlockHash) -> u64 {
    let hash = u128::from_le_bytes(hash.0);
    let (low, high) = (hash as u64, (hash >> 64) as u64);
    let product = u128::from(low ^ 0x9E37_79B9_7F4A_7C15) * u128::from(high ^ 0xC2B2_AE3D_27D4_EB4F);
    (product >> 64) as u64 ^ product as u64
}

fn same(held: BlockHash, hash: BlockHash) -> bool {
    #[cfg(test)]
    tests::COMPARED.with(|compared| compared.set(compared.get() + 1));
    held == hash
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
        // As many as lead to the crowd, and the depth of its tree, twice where a head comes.
        let most = 3 * HEADS * (16 + 2 * 20);
        assert!(others < 3 * HEADS * 2, "{others}");
        assert!(chosen.iter().all(|chosen| *chosen < most), "{chosen:?}, at most {most}");
    }

    #[test]
    fn a_crowd_is_as_exact_as_the_table() {
        const SEED: u64 = 20_261_122;
        println!("seed {SEED}");
        let mut random = SEED;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (random >> 33) % below
        };
        // Half of them meet in one place.
        let name = |number: u64| {
            let low = if number.is_multiple_of(2) {
                0x9E37_79B9_7F4A_7C15
            } else {
                number.wrapping_mul(0xD6E8_FEB8_6659_FD93)
            };
            BlockHash((u128::from(number) << 64 | u128::from(low)).to_le_bytes())
        };
        let (mut heads, mut known, mut crowd) = (Heads::default(), BTreeMap::new(), 0);
        for turn in 0..60_000 {
            // Mostly coming, then mostly going, so that tables grow and shrink.
            let comes = draw(10) < if turn / 5_000 % 2 == 0 { 8 } else { 2 };
            let (number, at) = (draw(3_000), At { run: draw(1 << 20) as u32, offset: 0 });
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
            crowd = crowd.max(heads.parts.iter().map(|part| part.crowd.len()).max().unwrap_or(0));
        }
        assert!(crowd > 100, "{crowd}");
        for asked in 0..3_000 {
            assert_eq!(heads.find(name(asked)), known.get(&asked).copied());
        }
    }
}
