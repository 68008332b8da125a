//! Blocks for the sides of the eviction bench; identical in every run.
//!
//! Not here: the measurements (`evict.rs`).

use kv_core::evict::{BlockKey, BlockTraits, Policy};
use kv_core::id::{Category, RequestKind, Timestamp};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const KINDS: [RequestKind; 4] =
    [RequestKind::Text, RequestKind::File, RequestKind::Search, RequestKind::Agent];
const TURNS: u8 = 8;
/// Blocks of one request, inserted from the tail to the head.
const REQUEST_BLOCKS: u32 = 16;
/// Time for one full turnover of blocks, in microseconds.
const TURNOVER_US: u64 = 600_000_000;
/// Uses of each category to learn its curve from.
const TAUGHT_USES: u64 = 1_000;
const SEED: u64 = 20_240_713;

/// An endless sequence of blocks, request by request.
pub(super) struct EvictionLoad {
    random: ChaCha8Rng,
    blocks: u32,
    now_us: u64,
    category: Category,
    remaining: u32,
}

/// Every category, in the order of its number.
pub(super) fn categories() -> impl Iterator<Item = Category> {
    KINDS.into_iter().flat_map(|kind| (0..TURNS).map(move |turn| Category { kind, conversation_turn: turn }))
}

/// The number of a category among [`categories`].
pub(super) fn number(category: Category) -> usize {
    let kind = KINDS.iter().position(|kind| *kind == category.kind).unwrap_or(0);
    kind * usize::from(TURNS) + usize::from(category.conversation_turn)
}

impl EvictionLoad {
    /// A load for a tier of `blocks` blocks.
    pub(super) fn new(blocks: u32) -> Self {
        let random = ChaCha8Rng::seed_from_u64(SEED);
        Self { random, blocks, now_us: 1, category: Category::default(), remaining: 0 }
    }

    /// Shows the policy reuses of every category. Mean intervals range from two minutes to half an
    /// hour. Much shorter ones would round the difference of two exponentials to zero. Between a
    /// fifth and all of the uses are followed by another, which determines the life.
    pub(super) fn teach(&mut self, policy: &mut dyn Policy) {
        let (once, again) = (BlockKey(0), BlockKey(1));
        for (number, category) in (0..).zip(categories()) {
            let traits = BlockTraits { category, ..BlockTraits::default() };
            policy.insert(again, traits, Timestamp(self.now_us));
            for _ in 0..TAUGHT_USES {
                self.now_us += 120_000_007 + number * 57_123_457;
                policy.access(again, traits, Timestamp(self.now_us));
            }
            for _ in 0..number % 5 * TAUGHT_USES {
                policy.insert(once, traits, Timestamp(self.now_us));
                policy.remove(once);
            }
            policy.remove(again);
        }
        policy.refit(Timestamp(self.now_us));
    }

    /// Every key once, in random order, as in a long-running tier: neighbours in a queue are not
    /// neighbours in memory.
    pub(super) fn shuffled_keys(&mut self) -> Vec<BlockKey> {
        let mut keys: Vec<BlockKey> = (0..self.blocks).map(BlockKey).collect();
        keys.shuffle(&mut self.random);
        keys
    }

    /// The next block and its arrival time.
    pub(super) fn next(&mut self) -> (BlockTraits, Timestamp) {
        if self.remaining == 0 {
            self.remaining = REQUEST_BLOCKS;
            // Uneven steps, so that two categories never have exactly equal values.
            let mean_us = TURNOVER_US * u64::from(REQUEST_BLOCKS) / u64::from(self.blocks);
            self.now_us += self.random.random_range(1..=2 * mean_us);
            let (kind, turn) = (self.random.random_range(0..KINDS.len()), self.random.random_range(0..TURNS));
            self.category = Category { kind: KINDS[kind], conversation_turn: turn };
        }
        self.remaining -= 1;
        let traits = BlockTraits {
            category: self.category,
            offset_blocks: self.remaining,
            bytes: 1,
            is_partial: false,
            fingerprint: self.random.random(),
        };
        (traits, Timestamp(self.now_us))
    }

    /// The next `count` blocks.
    pub(super) fn take(&mut self, count: u64) -> Vec<(BlockTraits, Timestamp)> {
        (0..count).map(|_| self.next()).collect()
    }
}
