//! Samples of indexed blocks and of blocks that nodes hold, and audit scores. Pure: randomness is
//! an argument.
//!
//! Not here: the calls to nodes (`run.rs`).

use std::collections::VecDeque;

use kv_core::id::BlockHash;

/// Blocks kept of one node's announcements to one shard, as audit candidates.
const CLAIMS_MAX: usize = 256;

/// Sampled blocks of one announcement.
const SAMPLES_PER_ANNOUNCEMENT_MAX: usize = 8;

/// Counts are halved above this, so that a ratio reflects recent hours.
const COUNTED_MAX: u64 = 1 << 20;

/// Pseudorandom numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(u64);

impl SplitMix {
    pub(crate) fn new(seed: u64) -> SplitMix {
        SplitMix(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// An index into a list of this length; 0 for an empty one.
    pub(crate) fn below(&mut self, len: usize) -> usize {
        usize::try_from(self.next().checked_rem(len as u64).unwrap_or(0)).unwrap_or(0)
    }
}

/// A sample of a node's announced blocks; newer ones replace random others.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClaimSample {
    blocks: VecDeque<BlockHash>,
}

impl ClaimSample {
    /// Records announced blocks.
    pub(crate) fn record(&mut self, blocks: &[BlockHash], random: &mut SplitMix) {
        for _ in 0..blocks.len().min(SAMPLES_PER_ANNOUNCEMENT_MAX) {
            let block = blocks[random.below(blocks.len())];
            if self.blocks.len() < CLAIMS_MAX {
                self.blocks.push_back(block);
            } else {
                let at = random.below(CLAIMS_MAX);
                self.blocks[at] = block;
            }
        }
    }

    /// At most `count` sampled blocks that the index still lists; others are forgotten.
    pub(crate) fn sample(
        &mut self,
        count: usize,
        random: &mut SplitMix,
        is_listed: impl Fn(BlockHash) -> bool,
    ) -> Vec<BlockHash> {
        self.blocks.retain(|block| is_listed(*block));
        let start = random.below(self.blocks.len());
        let mut blocks: Vec<_> =
            self.blocks.iter().cycle().skip(start).take(self.blocks.len()).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        while blocks.len() > count {
            blocks.swap_remove(random.below(blocks.len()));
        }
        blocks
    }
}

/// Results of the audits of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AuditScore {
    /// Audited blocks that the index attributes to the node.
    pub(crate) claimed: u64,
    /// Those confirmed not to be held.
    pub(crate) claimed_wrong: u64,
    /// Audited blocks that the node holds.
    pub(crate) held: u64,
    /// Those confirmed to be missing from the index.
    pub(crate) held_unknown: u64,
    /// Digest mismatches.
    pub(crate) drifts: u64,
}

impl AuditScore {
    /// Adds one audit.
    pub(crate) fn add(&mut self, audit: &AuditScore) {
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

    /// Share of audited indexed blocks that are held; `None` before the first audit.
    pub(crate) fn precision(&self) -> Option<f64> {
        share(self.claimed, self.claimed_wrong)
    }

    /// Share of audited held blocks that are indexed.
    pub(crate) fn recall(&self) -> Option<f64> {
        share(self.held, self.held_unknown)
    }

    /// Whether any block was wrong.
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
        BlockHash([number; _])
    }

    #[test]
    fn equal_seeds_sample_equal_listed_blocks() {
        let all: Vec<_> = (0..200).map(block).collect();
        let draw = |seed| {
            let (mut claims, mut random) = (ClaimSample::default(), SplitMix::new(seed));
            all.chunks(5).for_each(|some| claims.record(some, &mut random));
            claims.sample(16, &mut random, |block| block.0[0] % 2 == 0)
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_eq!(draw(3).len(), 16);
        assert!(draw(3).iter().all(|block| block.0[0] % 2 == 0));
        let none = ClaimSample::default().sample(4, &mut SplitMix::new(1), |_| true);
        assert!(none.is_empty());
    }

    #[test]
    fn claims_are_bounded_and_renewed() {
        let (mut claims, mut random) = (ClaimSample::default(), SplitMix::new(7));
        for _ in 0..1_000 {
            claims.record(&[block(1)], &mut random);
        }
        for _ in 0..2_000 {
            claims.record(&[block(2)], &mut random);
        }
        assert_eq!(claims.blocks.len(), CLAIMS_MAX);
        assert_eq!(claims.sample(4, &mut random, |block| block.0[0] == 2), [block(2)]);
    }

    #[test]
    fn shares_count_audited_blocks() {
        let mut score = AuditScore::default();
        assert_eq!((score.precision(), score.recall()), (None, None));
        score.add(&AuditScore { claimed: 8, claimed_wrong: 2, held: 4, ..AuditScore::default() });
        assert_eq!((score.precision(), score.recall()), (Some(0.75), Some(1.0)));
        assert!(score.is_wrong());
        score.add(&AuditScore { claimed: COUNTED_MAX, ..AuditScore::default() });
        assert_eq!((score.claimed, score.claimed_wrong, score.held), ((COUNTED_MAX + 8) / 2, 1, 2));
    }
}
