//! Cache of tokenized texts, bounded in bytes.
//!
//! It has two generations. A lookup moves an entry to the young one. When the young one is full,
//! the old one is retired a little with every insertion, so that no single request pays for
//! dropping it. Pure. Not here: which texts can be cached alone (`tokenizer.rs`).

use std::collections::{HashMap, hash_map};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Cost of an entry besides its text and tokens: a slot in a hash table that may be half empty, the
/// boxed entry, reference counts and allocator overhead.
const ENTRY_BYTES: usize = 144;

/// Tokens by text. The key is a 128-bit hash, computed once per text, because texts are long and
/// growing tables would hash them again.
#[derive(Debug)]
pub(super) struct TokenCache {
    seed: u64,
    young: HashMap<u128, Box<CacheEntry>>,
    old: HashMap<u128, Box<CacheEntry>>,
    /// The generation that is being retired.
    retiring: hash_map::IntoIter<u128, Box<CacheEntry>>,
    young_bytes: usize,
    old_bytes: usize,
    retiring_bytes: usize,
    generation_bytes: usize,
}

/// A tokenized text. If two texts share a hash, only one of them is cached.
#[derive(Debug)]
struct CacheEntry {
    text: Box<str>,
    tokens: Arc<[u32]>,
}

impl CacheEntry {
    fn bytes(&self) -> usize {
        cost(&self.text, &self.tokens)
    }
}

impl TokenCache {
    /// Cache of at most `bytes`.
    pub(super) fn new(bytes: usize) -> TokenCache {
        TokenCache {
            seed: RandomState::new().build_hasher().finish(),
            young: HashMap::new(),
            old: HashMap::new(),
            retiring: HashMap::new().into_iter(),
            young_bytes: 0,
            old_bytes: 0,
            retiring_bytes: 0,
            generation_bytes: bytes / 2,
        }
    }

    fn key(&self, text: &str) -> u128 {
        xxh3_128_with_seed(text.as_bytes(), self.seed)
    }

    pub(super) fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        let key = self.key(text);
        if let Some(kept) = self.young.get(&key) {
            return (*kept.text == *text).then(|| kept.tokens.clone());
        }
        self.old.get(&key).filter(|kept| *kept.text == *text)?;
        let kept = self.old.remove(&key)?;
        self.old_bytes -= kept.bytes();
        let tokens = kept.tokens.clone();
        self.insert(key, kept);
        Some(tokens)
    }

    /// Adds a text, unless it is larger than half a generation. This bound guarantees that the
    /// retiring generation is gone before the next one retires.
    pub(super) fn put(&mut self, text: &str, tokens: Arc<[u32]>) {
        let key = self.key(text);
        if cost(text, &tokens) <= self.generation_bytes / 2 && !self.young.contains_key(&key) {
            self.insert(key, Box::new(CacheEntry { text: text.into(), tokens }));
        }
    }

    fn insert(&mut self, key: u128, kept: Box<CacheEntry>) {
        let bytes = kept.bytes();
        if self.young_bytes + bytes > self.generation_bytes {
            // At least half a generation was inserted since the last time, so the retiring one is
            // empty.
            debug_assert_eq!(self.retiring_bytes, 0, "the retiring generation is empty");
            let young = std::mem::take(&mut self.young);
            self.retiring = std::mem::replace(&mut self.old, young).into_iter();
            (self.retiring_bytes, self.old_bytes, self.young_bytes) = (self.old_bytes, self.young_bytes, 0);
        }
        // Retire twice as much as is inserted, so that the total stays below two generations.
        self.retire(2 * bytes);
        self.young_bytes += bytes;
        self.young.insert(key, kept);
    }

    fn retire(&mut self, bytes: usize) {
        let mut gone = 0;
        while gone < bytes
            && let Some((_, kept)) = self.retiring.next()
        {
            gone += kept.bytes();
        }
        self.retiring_bytes -= gone;
        if self.retiring_bytes == 0 {
            // Also free its table.
            self.retiring = HashMap::new().into_iter();
        }
    }

    /// Bytes in use, including the tables of both generations.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let counted =
            |map: &HashMap<u128, Box<CacheEntry>>| map.values().map(|kept| kept.bytes()).sum::<usize>();
        assert_eq!((counted(&self.young), counted(&self.old)), (self.young_bytes, self.old_bytes));
        assert_eq!(self.retiring_bytes == 0, self.retiring.len() == 0, "retiring_bytes matches its entries");
        let slots = |map: &HashMap<u128, Box<CacheEntry>>| (map.capacity() * 8 / 7).next_power_of_two() * 33;
        let held =
            |kept: &CacheEntry| size_of::<CacheEntry>() + kept.text.len() + 16 + size_of_val(&*kept.tokens);
        let of = |map: &HashMap<u128, Box<CacheEntry>>| {
            slots(map) + map.values().map(|kept| held(kept)).sum::<usize>()
        };
        of(&self.young) + of(&self.old) + self.retiring_bytes
    }
}

fn cost(text: &str, tokens: &[u32]) -> usize {
    ENTRY_BYTES + text.len() + size_of_val(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_used_texts_within_its_capacity() {
        let mut cache = TokenCache::new(20_000);
        let text = |number: u32| format!("text {number}");
        cache.put("kept", Arc::from([7_u32]));
        for number in 0..1_000 {
            cache.put(&text(number), Arc::from([number; 8]));
            assert!(cache.bytes() <= 20_000, "after {number}");
            assert_eq!(cache.get("kept").as_deref(), Some(&[7][..]), "after {number}");
        }
        assert_eq!(cache.get(&text(0)), None);
        assert_eq!(cache.get(&text(999)).as_deref(), Some(&[999; 8][..]));
        cache.put(&"x".repeat(10_000), Arc::from([1]));
        assert_eq!(cache.get(&"x".repeat(10_000)), None, "larger than a generation");
        cache.put(&"y".repeat(5_000), Arc::from([1]));
        assert_eq!(cache.get(&"y".repeat(5_000)), None, "larger than half a generation");
    }

    #[test]
    fn retires_a_generation_gradually() {
        let mut cache = TokenCache::new(60_000);
        let text = |length: usize, number: usize| format!("{number:0length$}");
        let (mut number, mut most_retired) = (0, 0);
        for round in 0..40 {
            for _ in 0..50 {
                number += 1;
                let retiring = cache.retiring.len();
                cache.put(&text(8 + 40 * (round % 7), number), Arc::from([1]));
                assert!(cache.bytes() <= 60_000, "after {number}");
                most_retired = most_retired.max(retiring.saturating_sub(cache.retiring.len()));
            }
        }
        assert!((1..=10).contains(&most_retired), "{most_retired} at once, of hundreds");
    }
}
