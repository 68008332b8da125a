//! What a tier of another size would hit: a miss-ratio curve kept from a small sample of the blocks.
//!
//! The stack distance of a use is the number of different blocks used since the same block's last use; an LRU tier of
//! more blocks than that hits. Blocks are sampled by a hash of what they are, so all uses of a sampled block are seen and
//! distances among sampled blocks are those among all, scaled by the rate (SHARDS, FAST '15). The sample's size is fixed: the
//! rate falls as blocks come. Not here: other orders than last use, and the rule that a hit needs all blocks before it.

use std::collections::BTreeMap;

/// Blocks in the sample. The error of a rate is some 1/√n of it, about one point here; 100 B each.
const SAMPLE_BLOCKS: usize = 8192;

/// Distances are kept in steps of an eighth of an octave: a step is 9 %.
const STEPS_PER_OCTAVE: usize = 8;
/// Octaves of distances: 2^40 blocks of 16 KiB are more than any node has.
const OCTAVES: usize = 40;
const STEPS: usize = STEPS_PER_OCTAVE * OCTAVES;

/// Stack distances of the uses of one node's blocks.
#[derive(Clone, Debug)]
pub struct MissCurve {
    seed: u64,
    sample_blocks: usize,
    /// Blocks whose mark is at most this are sampled; marks are uniform over all 64 bits.
    mark_max: u64,
    /// Of every sampled block its mark and the turn of its last use. Those of the greatest marks leave when the rate falls.
    turns: BTreeMap<u64, usize>,
    order: Order,
    /// Uses by the step of their distance, in uses of all blocks.
    hits: Vec<f64>,
    /// Uses of blocks that were not used before.
    firsts: f64,
}

impl MissCurve {
    /// No use yet. `seed` decides which blocks are sampled: who chooses blocks must not know it.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_sample(seed, SAMPLE_BLOCKS)
    }

    fn with_sample(seed: u64, sample_blocks: usize) -> Self {
        MissCurve {
            seed,
            sample_blocks,
            mark_max: u64::MAX,
            turns: BTreeMap::new(),
            order: Order::new(2 * sample_blocks + 2),
            hits: vec![0.0; STEPS],
            firsts: 0.0,
        }
    }

    /// A block was asked for, whether it was there or not. `fingerprint` is [`BlockHash::fingerprint`](crate::id::BlockHash::fingerprint).
    pub fn used(&mut self, fingerprint: u64) {
        let mark = mixed(fingerprint ^ self.seed);
        if mark > self.mark_max {
            return;
        }
        let weight = 1.0 / self.rate();
        if self.order.is_full() {
            self.renumber();
        }
        match self.turns.get(&mark).copied() {
            Some(turn) => {
                let distance = self.order.later_than(turn) as f64 * weight;
                self.hits[step(distance)] += weight;
                self.order.forget(turn);
            }
            None => self.firsts += weight,
        }
        self.turns.insert(mark, self.order.push());
        if self.turns.len() > self.sample_blocks {
            self.thin();
        }
    }

    /// Share of uses that an LRU tier of so many blocks would have hit, 0 to 1; 0 before any use.
    #[must_use]
    pub fn hit_rate(&self, capacity_blocks: u64) -> f64 {
        let all = self.uses();
        if all <= 0.0 || capacity_blocks == 0 {
            return 0.0;
        }
        // A distance of d needs d + 1 blocks. Within a step distances are taken for evenly spread.
        let place = place_of(capacity_blocks as f64 - 1.0);
        let whole = (place as usize).min(STEPS);
        let part = self.hits.get(whole).map_or(0.0, |hits| hits * (place - whole as f64));
        ((self.hits[..whole].iter().sum::<f64>() + part) / all).min(1.0)
    }

    /// Uses counted, in uses of all blocks (an estimate).
    #[must_use]
    pub fn uses(&self) -> f64 {
        self.hits.iter().sum::<f64>() + self.firsts
    }

    /// Forgets a share of what was counted, so that the curve follows what is asked lately. `kept` is 0 to 1.
    pub fn fade(&mut self, kept: f64) {
        self.hits.iter_mut().for_each(|hits| *hits *= kept);
        self.firsts *= kept;
    }

    /// Share of the blocks that are sampled.
    fn rate(&self) -> f64 {
        (self.mark_max as f64 + 1.0) / (u64::MAX as f64 + 1.0)
    }

    /// Leaves out the block with the greatest mark, and from now on all like it.
    fn thin(&mut self) {
        let Some((mark, turn)) = self.turns.pop_last() else { return };
        self.order.forget(turn);
        self.mark_max = mark.saturating_sub(1);
    }

    /// Gives the blocks turns from 0 on, in the same order.
    fn renumber(&mut self) {
        let mut turns: Vec<(usize, u64)> = self.turns.iter().map(|(mark, turn)| (*turn, *mark)).collect();
        turns.sort_unstable();
        self.order.clear();
        for (_, mark) in turns {
            self.turns.insert(mark, self.order.push());
        }
    }
}

/// Which turns are some block's last, and how many of those are later than a given one: a Fenwick tree.
#[derive(Clone, Debug)]
struct Order {
    sums: Vec<u32>,
    turns: usize,
    len: usize,
}

impl Order {
    fn new(turns: usize) -> Self {
        Order { sums: vec![0; turns + 1], turns: 0, len: 0 }
    }

    fn is_full(&self) -> bool {
        self.turns + 1 == self.sums.len()
    }

    fn clear(&mut self) {
        self.sums.fill(0);
        (self.turns, self.len) = (0, 0);
    }

    /// The next turn, which is a block's last one.
    fn push(&mut self) -> usize {
        let turn = self.turns;
        self.turns += 1;
        self.len += 1;
        self.add(turn, 1);
        turn
    }

    /// The turn is no block's last any more.
    fn forget(&mut self, turn: usize) {
        self.len -= 1;
        self.add(turn, -1);
    }

    /// Last turns after this one.
    fn later_than(&self, turn: usize) -> usize {
        let (mut at, mut up_to) = (turn + 1, 0usize);
        while at > 0 {
            up_to += self.sums[at] as usize;
            at &= at - 1;
        }
        self.len - up_to
    }

    fn add(&mut self, turn: usize, count: i32) {
        let mut at = turn + 1;
        while at < self.sums.len() {
            self.sums[at] = self.sums[at].wrapping_add_signed(count);
            at += at & at.wrapping_neg();
        }
    }
}

/// Where a distance stands among the steps.
fn place_of(distance: f64) -> f64 {
    (distance.max(0.0) + 1.0).log2() * STEPS_PER_OCTAVE as f64
}

fn step(distance: f64) -> usize {
    (place_of(distance) as usize).min(STEPS - 1)
}

/// All bits of the result depend on all bits given.
fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses with much and little reuse: three of four draws from a small set, the others from a large one.
    fn stream(seed: u64, uses: usize, blocks: u64) -> Vec<u64> {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mixed(mixed(state))
        };
        (0..uses)
            .map(|_| {
                let (which, number) = (draw(), draw());
                // The square root of a uniform number is more often large: numbers near the end are popular.
                let popular = ((number as f64 / u64::MAX as f64).sqrt() * blocks as f64) as u64;
                if which.is_multiple_of(4) { number % (4 * blocks) } else { blocks - popular.min(blocks - 1) }
            })
            .collect()
    }

    /// Hit rate of a real LRU tier.
    fn lru(uses: &[u64], capacity: usize) -> f64 {
        let (mut order, mut last) = (BTreeMap::new(), BTreeMap::new());
        let mut hits = 0;
        for (turn, block) in uses.iter().enumerate() {
            if let Some(before) = last.insert(*block, turn) {
                hits += usize::from(order.remove(&before).is_some());
            }
            order.insert(turn, *block);
            if order.len() > capacity {
                order.pop_first();
            }
        }
        hits as f64 / uses.len() as f64
    }

    fn curve(sample: usize, uses: &[u64]) -> MissCurve {
        let mut curve = MissCurve::with_sample(11, sample);
        uses.iter().for_each(|block| curve.used(*block));
        curve
    }

    #[test]
    fn a_sample_of_all_blocks_is_exact_up_to_the_width_of_a_step() {
        let uses = stream(1, 20_000, 300);
        let curve = curve(2000, &uses);
        assert_eq!(curve.uses() as usize, uses.len());
        for capacity in [1, 2, 7, 63, 127, 255, 511, 1200, 5000] {
            let (found, real) = (curve.hit_rate(capacity as u64), lru(&uses, capacity));
            assert!((found - real).abs() < 0.012, "{capacity} blocks: {found} instead of {real}");
        }
    }

    #[test]
    fn a_small_sample_is_near() {
        for seed in 1..=4 {
            println!("seed {seed}");
            let uses = stream(seed, 300_000, 20_000);
            let curve = curve(2048, &uses);
            assert!(curve.turns.len() <= 2048 && curve.turns.len() == curve.order.len);
            assert!(curve.rate() < 0.05, "{} of the blocks are sampled", curve.rate());
            for capacity in [500, 2_000, 8_000, 20_000, 60_000] {
                let (found, real) = (curve.hit_rate(capacity as u64), lru(&uses, capacity));
                assert!((found - real).abs() < 0.04, "{capacity} blocks: {found} instead of {real}");
            }
        }
    }

    #[test]
    fn what_is_asked_lately_counts_more_once_the_rest_faded() {
        let mut curve = MissCurve::new(3);
        (0..1000).for_each(|block| curve.used(block));
        assert_eq!(curve.hit_rate(1 << 30), 0.0);
        curve.fade(0.0);
        (0..1000).for_each(|_| curve.used(7));
        assert!(curve.hit_rate(2000) > 0.99, "{}", curve.hit_rate(2000));
        assert!(curve.hit_rate(2) > 0.99, "all but the first are repeated at once");
    }

    #[test]
    fn nothing_asked_and_no_room_are_no_hits() {
        let mut curve = MissCurve::new(3);
        assert_eq!(curve.hit_rate(10), 0.0);
        (0..10).for_each(|_| curve.used(1));
        assert_eq!(curve.hit_rate(0), 0.0);
    }
}
