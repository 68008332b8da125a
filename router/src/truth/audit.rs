//! Samples of what the index claims and of what nodes hold, and how right both were. Pure: chance is an argument.
//!
//! Not here: asking a node (`run.rs`).

use std::collections::VecDeque;

use kv_core::id::BlockHash;

/// Blocks kept of one node's announcements to one shard, to ask about.
const CLAIMS_MAX: usize = 256;

/// Blocks of one announcement that are looked at for the sample.
const LOOKS_MAX: usize = 8;

/// Counts are halved above this, so that a ratio tells of the last hours and not of all time.
const COUNTED_MAX: u64 = 1 << 20;

/// Numbers that look random, from a seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A place in a list of this length; 0 for an empty one.
    pub(crate) fn below(&mut self, len: usize) -> usize {
        usize::try_from(self.next().checked_rem(len as u64).unwrap_or(0)).unwrap_or(0)
    }
}

/// Some blocks that a node announced: newer ones push out others at random.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claims {
    blocks: VecDeque<BlockHash>,
}

impl Claims {
    /// A node announced these.
    pub(crate) fn stored(&mut self, blocks: &[BlockHash], chance: &mut Chance) {
        for _ in 0..blocks.len().min(LOOKS_MAX) {
            let block = blocks[chance.below(blocks.len())];
            if self.blocks.len() < CLAIMS_MAX {
                self.blocks.push_back(block);
            } else {
                let at = chance.below(CLAIMS_MAX);
                self.blocks[at] = block;
            }
        }
    }

    /// At most `count` of them, from a random place on, that the index still lists; others are forgotten.
    pub(crate) fn sample(
        &mut self,
        count: usize,
        chance: &mut Chance,
        is_listed: impl Fn(BlockHash) -> bool,
    ) -> Vec<BlockHash> {
        self.blocks.retain(|block| is_listed(*block));
        let start = chance.below(self.blocks.len());
        let mut blocks: Vec<_> =
            self.blocks.iter().cycle().skip(start).take(self.blocks.len()).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        while blocks.len() > count {
            blocks.swap_remove(chance.below(blocks.len()));
        }
        blocks
    }
}

/// What audits of one node came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Score {
    /// Blocks that the index attributes to the node, and that were asked about.
    pub(crate) claimed: u64,
    /// Of these, confirmed not to be held.
    pub(crate) claimed_wrong: u64,
    /// Blocks that the node holds, and that were looked up.
    pub(crate) held: u64,
    /// Of these, confirmed to be unknown to the index.
    pub(crate) held_unknown: u64,
    /// Differences of digests.
    pub(crate) drifts: u64,
}

impl Score {
    /// Adds one audit.
    pub(crate) fn add(&mut self, audit: &Score) {
        self.claimed += audit.claimed;
        self.claimed_wrong += audit.claimed_wrong;
        self.held += audit.held;
        self.held_unknown += audit.held_unknown;
        if self.claimed.max(self.held) > COUNTED_MAX {
            for count in [&mut self.claimed, &mut self.claimed_wrong, &mut self.held, &mut self.held_unknown]
            {
                *count /= 2;
            }
        }
    }

    /// Share of what the index claims that is so; none while nothing was asked.
    pub(crate) fn precision(&self) -> Option<f64> {
        share(self.claimed, self.claimed_wrong)
    }

    /// Share of what the node holds that the index knows.
    pub(crate) fn recall(&self) -> Option<f64> {
        share(self.held, self.held_unknown)
    }

    /// Whether anything was found to be wrong.
    pub(crate) fn is_wrong(&self) -> bool {
        self.claimed_wrong + self.held_unknown > 0
    }
}

#[allow(clippy::cast_precision_loss)]
fn share(all: u64, wrong: u64) -> Option<f64> {
    (all > 0).then(|| 1.0 - wrong as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u8) -> BlockHash {
        BlockHash([number; 16])
    }

    #[test]
    fn equal_seeds_ask_about_equal_blocks_and_only_about_listed_ones() {
        let all: Vec<_> = (0..200).map(block).collect();
        let draw = |seed| {
            let (mut claims, mut chance) = (Claims::default(), Chance::new(seed));
            all.chunks(5).for_each(|some| claims.stored(some, &mut chance));
            claims.sample(16, &mut chance, |block| block.0[0] % 2 == 0)
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_eq!(draw(3).len(), 16);
        assert!(draw(3).iter().all(|block| block.0[0] % 2 == 0));
        let none = Claims::default().sample(4, &mut Chance::new(1), |_| true);
        assert!(none.is_empty());
    }

    #[test]
    fn claims_are_bounded_and_take_in_what_is_new() {
        let (mut claims, mut chance) = (Claims::default(), Chance::new(7));
        for _ in 0..1_000 {
            claims.stored(&[block(1)], &mut chance);
        }
        for _ in 0..2_000 {
            claims.stored(&[block(2)], &mut chance);
        }
        assert_eq!(claims.blocks.len(), CLAIMS_MAX);
        assert_eq!(claims.sample(4, &mut chance, |block| block.0[0] == 2), [block(2)]);
    }

    #[test]
    fn shares_are_of_what_was_asked() {
        let mut score = Score::default();
        assert_eq!((score.precision(), score.recall()), (None, None));
        score.add(&Score { claimed: 8, claimed_wrong: 2, held: 4, ..Score::default() });
        assert_eq!((score.precision(), score.recall()), (Some(0.75), Some(1.0)));
        assert!(score.is_wrong());
        score.add(&Score { claimed: COUNTED_MAX, ..Score::default() });
        assert_eq!((score.claimed, score.claimed_wrong, score.held), ((COUNTED_MAX + 8) / 2, 1, 2));
    }
}
