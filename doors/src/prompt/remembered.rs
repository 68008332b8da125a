//! Tokens of texts that were cut before, within a number of bytes.
//!
//! Two generations: what is used moves to the young one, and what was not used while that filled up is let go, a little with each text that comes, so
//! that nobody's prompt waits until thousands of others are. Pure. Not here: which texts may stand alone (`tokens.rs`).

use std::collections::{HashMap, hash_map};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128_with_seed;

/// What a text costs besides itself and its tokens: a slot of 33 bytes in a table that may have just been doubled, the entry behind it, counts, and what allocators add.
const ENTRY_BYTES: usize = 144;

/// Tokens by text. A text is found by a hash that is made of it once: they are long, and tables that grow ask for the hash of all that is in them.
#[derive(Debug)]
pub(super) struct Remembered {
    seed: u64,
    young: HashMap<u128, Box<Kept>>,
    old: HashMap<u128, Box<Kept>>,
    /// The generation before these.
    going: hash_map::IntoIter<u128, Box<Kept>>,
    young_bytes: usize,
    old_bytes: usize,
    going_bytes: usize,
    generation_bytes: usize,
}

/// A text that was cut. Of two with one hash, one is cut again and again.
#[derive(Debug)]
struct Kept {
    text: Box<str>,
    tokens: Arc<[u32]>,
}

impl Kept {
    fn bytes(&self) -> usize {
        cost(&self.text, &self.tokens)
    }
}

impl Remembered {
    /// Room for `bytes`.
    pub(super) fn new(bytes: usize) -> Remembered {
        Remembered {
            seed: RandomState::new().build_hasher().finish(),
            young: HashMap::new(),
            old: HashMap::new(),
            going: HashMap::new().into_iter(),
            young_bytes: 0,
            old_bytes: 0,
            going_bytes: 0,
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

    /// Remembers a text, unless it has more than half a generation: as much as two such have is always gone before the next one.
    pub(super) fn put(&mut self, text: &str, tokens: Arc<[u32]>) {
        let key = self.key(text);
        if cost(text, &tokens) <= self.generation_bytes / 2 && !self.young.contains_key(&key) {
            self.insert(key, Box::new(Kept { text: text.into(), tokens }));
        }
    }

    fn insert(&mut self, key: u128, kept: Box<Kept>) {
        let bytes = kept.bytes();
        if self.young_bytes + bytes > self.generation_bytes {
            // At least half a generation came since the last time, and so nothing of what went is left.
            debug_assert_eq!(self.going_bytes, 0, "all of it is gone");
            let young = std::mem::take(&mut self.young);
            self.going = std::mem::replace(&mut self.old, young).into_iter();
            (self.going_bytes, self.old_bytes, self.young_bytes) = (self.old_bytes, self.young_bytes, 0);
        }
        // Twice as much as comes: all of them together have no more bytes than two generations.
        self.let_go(2 * bytes);
        self.young_bytes += bytes;
        self.young.insert(key, kept);
    }

    fn let_go(&mut self, bytes: usize) {
        let mut gone = 0;
        while gone < bytes
            && let Some((_, kept)) = self.going.next()
        {
            gone += kept.bytes();
        }
        self.going_bytes -= gone;
        if self.going_bytes == 0 {
            // Its table goes, too.
            self.going = HashMap::new().into_iter();
        }
    }

    /// What is in use, tables of both generations included.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let counted = |map: &HashMap<u128, Box<Kept>>| map.values().map(|kept| kept.bytes()).sum::<usize>();
        assert_eq!((counted(&self.young), counted(&self.old)), (self.young_bytes, self.old_bytes));
        assert_eq!(self.going_bytes == 0, self.going.len() == 0, "what is gone is counted");
        let slots = |map: &HashMap<u128, Box<Kept>>| (map.capacity() * 8 / 7).next_power_of_two() * 33;
        let held = |kept: &Kept| size_of::<Kept>() + kept.text.len() + 16 + size_of_val(&*kept.tokens);
        let of =
            |map: &HashMap<u128, Box<Kept>>| slots(map) + map.values().map(|kept| held(kept)).sum::<usize>();
        of(&self.young) + of(&self.old) + self.going_bytes
    }
}

fn cost(text: &str, tokens: &[u32]) -> usize {
    ENTRY_BYTES + text.len() + size_of_val(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays_and_the_rest_is_let_go_within_the_room() {
        let mut remembered = Remembered::new(20_000);
        let text = |number: u32| format!("text {number}");
        remembered.put("kept", Arc::from([7_u32]));
        for number in 0..1_000 {
            remembered.put(&text(number), Arc::from([number; 8]));
            assert!(remembered.bytes() <= 20_000, "after {number}");
            assert_eq!(remembered.get("kept").as_deref(), Some(&[7][..]), "after {number}");
        }
        assert_eq!(remembered.get(&text(0)), None);
        assert_eq!(remembered.get(&text(999)).as_deref(), Some(&[999; 8][..]));
        remembered.put(&"x".repeat(10_000), Arc::from([1]));
        assert_eq!(remembered.get(&"x".repeat(10_000)), None, "more than a generation");
        remembered.put(&"y".repeat(5_000), Arc::from([1]));
        assert_eq!(remembered.get(&"y".repeat(5_000)), None, "more than half of one");
    }

    #[test]
    fn a_generation_is_let_go_as_others_come_however_long_they_are() {
        let mut remembered = Remembered::new(60_000);
        let text = |length: usize, number: usize| format!("{number:0length$}");
        let (mut number, mut most_gone) = (0, 0);
        for round in 0..40 {
            for _ in 0..50 {
                number += 1;
                let going = remembered.going.len();
                remembered.put(&text(8 + 40 * (round % 7), number), Arc::from([1]));
                assert!(remembered.bytes() <= 60_000, "after {number}");
                most_gone = most_gone.max(going.saturating_sub(remembered.going.len()));
            }
        }
        assert!((1..=10).contains(&most_gone), "{most_gone} at once, of hundreds");
    }
}
