//! Tokens of texts that were cut before, within a number of bytes.
//!
//! Two generations: what is used moves to the young one, and what was not used while that filled up is let go. Pure. Not here: which
//! texts may stand alone (`tokens.rs`).

use std::collections::HashMap;
use std::sync::Arc;

/// What a text costs besides itself and its tokens: the entry, its lengths and its counts.
const ENTRY_BYTES: usize = 96;

/// Tokens by text.
#[derive(Debug)]
pub(super) struct Remembered {
    young: HashMap<Box<str>, Arc<[u32]>>,
    old: HashMap<Box<str>, Arc<[u32]>>,
    young_bytes: usize,
    generation_bytes: usize,
}

impl Remembered {
    /// Room for `bytes`.
    pub(super) fn new(bytes: usize) -> Remembered {
        Remembered { young: HashMap::new(), old: HashMap::new(), young_bytes: 0, generation_bytes: bytes / 2 }
    }

    pub(super) fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(text) {
            return Some(tokens.clone());
        }
        let (text, tokens) = self.old.remove_entry(text)?;
        self.insert(text, tokens.clone());
        Some(tokens)
    }

    pub(super) fn put(&mut self, text: &str, tokens: Arc<[u32]>) {
        if cost(text, &tokens) <= self.generation_bytes && !self.young.contains_key(text) {
            self.insert(text.into(), tokens);
        }
    }

    fn insert(&mut self, text: Box<str>, tokens: Arc<[u32]>) {
        let bytes = cost(&text, &tokens);
        if self.young_bytes + bytes > self.generation_bytes {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        self.young_bytes += bytes;
        self.young.insert(text, tokens);
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.young.iter().chain(&self.old).map(|(text, tokens)| cost(text, tokens)).sum()
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
}
