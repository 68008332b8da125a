//! Tokens of texts that were cut before, within a number of bytes.
//!
//! Two generations: what is used moves to the young one, and what was not used while that filled up is let go, a little with each text that comes, so
//! that nobody's prompt waits until thousands of others are. Pure. Not here: which texts may stand alone (`tokens.rs`).

use std::collections::{HashMap, hash_map};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

/// What a text costs besides itself and its tokens: the entry, its lengths and its counts.
const ENTRY_BYTES: usize = 96;

/// Tokens by text. A text is found by a hash that is made of it once: they are long, and tables that grow ask for the hash of all that is in them.
#[derive(Debug)]
pub(super) struct Remembered {
    young: HashMap<u128, Kept>,
    old: HashMap<u128, Kept>,
    /// The generation before these.
    going: hash_map::IntoIter<u128, Kept>,
    young_bytes: usize,
    old_bytes: usize,
    going_bytes: usize,
    generation_bytes: usize,
}

/// A text that was cut. Who makes two texts of one hash has one of them cut again and again.
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
            young: HashMap::new(),
            old: HashMap::new(),
            going: HashMap::new().into_iter(),
            young_bytes: 0,
            old_bytes: 0,
            going_bytes: 0,
            generation_bytes: bytes / 2,
        }
    }

    pub(super) fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        let key = xxh3_128(text.as_bytes());
        if let Some(kept) = self.young.get(&key) {
            return (*kept.text == *text).then(|| kept.tokens.clone());
        }
        let hash_map::Entry::Occupied(found) = self.old.entry(key) else { return None };
        if *found.get().text != *text {
            return None;
        }
        let kept = found.remove();
        self.old_bytes -= kept.bytes();
        let tokens = kept.tokens.clone();
        self.insert(key, kept);
        Some(tokens)
    }

    pub(super) fn put(&mut self, text: &str, tokens: Arc<[u32]>) {
        let key = xxh3_128(text.as_bytes());
        if cost(text, &tokens) <= self.generation_bytes && !self.young.contains_key(&key) {
            self.insert(key, Kept { text: text.into(), tokens });
        }
    }

    fn insert(&mut self, key: u128, kept: Kept) {
        let bytes = kept.bytes();
        if self.young_bytes + bytes > self.generation_bytes {
            let next = HashMap::with_capacity(self.young.len());
            let young = std::mem::replace(&mut self.young, next);
            self.going = std::mem::replace(&mut self.old, young).into_iter();
            (self.going_bytes, self.old_bytes, self.young_bytes) = (self.old_bytes, self.young_bytes, 0);
        }
        // Twice as much as comes, so that it is gone when half a generation has come, and all of them have no more bytes than two.
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
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let bytes = |kept: &HashMap<u128, Kept>| kept.values().map(Kept::bytes).sum::<usize>();
        assert_eq!((bytes(&self.young), bytes(&self.old)), (self.young_bytes, self.old_bytes));
        assert_eq!(self.going_bytes == 0, self.going.len() == 0, "what is gone is counted");
        self.young_bytes + self.old_bytes + self.going_bytes
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
