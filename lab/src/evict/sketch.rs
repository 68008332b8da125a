//! Recent use counts in four bits a block: a count-min sketch that is halved now and then.
//!
//! The estimate is too low only by halving, and too high only if four counters all collide. Memory:
//! eight to sixteen bytes a block. Not here: the decisions based on it ([`super::tinylfu`]).

/// Counters per fingerprint, each shared with others; the lowest one counts.
const ROWS: usize = 4;
/// Largest count of four bits.
const COUNT_MAX: u64 = 15;
/// Uses per word between two halvings: the paper's sample of ten times the blocks, or up to twice
/// that, as the number of words is a power of two.
const USES_PER_WORD: usize = 10;
/// Every bit of a word but the highest of each counter.
const HALVED: u64 = 0x7777_7777_7777_7777;
/// One odd number a row, to choose its word: fractions of the square roots of 2, 3, 5 and 7.
const ROW_FACTORS: [u64; ROWS] =
    [0x6a09_e667_f3bc_c909, 0xbb67_ae85_84ca_a73b, 0x3c6e_f372_fe94_f82b, 0xa54f_f53a_5f1d_36f1];

/// Counts of uses by fingerprint.
#[derive(Debug)]
pub(super) struct Sketch {
    /// A power of two of words; sixteen counters each, four for every row.
    words: Vec<u64>,
    uses: usize,
}

impl Default for Sketch {
    fn default() -> Self {
        Sketch { words: vec![0; 64], uses: 0 }
    }
}

impl Sketch {
    /// Grows for this many blocks. Counts are kept: the new half starts as a copy of the old.
    pub(super) fn grow_for(&mut self, blocks: usize) {
        while self.words.len() < blocks {
            self.words.extend_from_within(..);
        }
    }

    /// Word and bit shift of a fingerprint's counters.
    fn counters(&self, fingerprint: u32) -> [(usize, u32); ROWS] {
        let mask = self.words.len() - 1;
        std::array::from_fn(|row| {
            let spread = (u64::from(fingerprint) + 1).wrapping_mul(ROW_FACTORS[row]);
            let spread = spread ^ (spread >> 29);
            let place = (spread >> 60) as u32 % 4 + 4 * row as u32;
            (spread as usize & mask, 4 * place)
        })
    }

    /// Counts a use.
    pub(super) fn count(&mut self, fingerprint: u32) {
        for (word, shift) in self.counters(fingerprint) {
            if self.words[word] >> shift & COUNT_MAX < COUNT_MAX {
                self.words[word] += 1 << shift;
            }
        }
        self.uses += 1;
        if self.uses >= USES_PER_WORD * self.words.len() {
            self.uses /= 2;
            self.words.iter_mut().for_each(|word| *word = *word >> 1 & HALVED);
        }
    }

    /// Recent uses, 0 to 15.
    pub(super) fn estimate(&self, fingerprint: u32) -> u64 {
        let counts = self.counters(fingerprint).map(|(word, shift)| self.words[word] >> shift & COUNT_MAX);
        counts.into_iter().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_never_too_low_and_seldom_too_high() {
        let mut sketch = Sketch::default();
        sketch.grow_for(1000);
        for fingerprint in 0..1000 {
            (0..fingerprint % 5).for_each(|_| sketch.count(fingerprint));
        }
        let over = |fingerprint: u32| sketch.estimate(fingerprint) - u64::from(fingerprint % 5);
        let wrong = (0..1000).filter(|&fingerprint| over(fingerprint) > 0).count();
        assert!(wrong < 50, "{wrong} of a thousand are too high");
    }

    #[test]
    fn counts_stop_at_fifteen_and_halve() {
        let mut sketch = Sketch::default();
        (0..100).for_each(|_| sketch.count(7));
        assert_eq!(sketch.estimate(7), COUNT_MAX);
        (0..USES_PER_WORD * sketch.words.len() - 100).for_each(|_| sketch.count(8));
        assert_eq!((sketch.estimate(7), sketch.estimate(8)), (7, 7));
    }

    #[test]
    fn growing_keeps_counts() {
        let mut sketch = Sketch::default();
        (0..5).for_each(|_| sketch.count(3));
        sketch.grow_for(1 << 14);
        assert_eq!(sketch.estimate(3), 5);
    }
}
