//! Predicts the hit rate of a tier of another size: a miss-ratio curve from a small sample of the
//! blocks.
//!
//! The stack distance of a use is the number of different blocks used since the same block's last
//! use. An LRU tier with more blocks than that hits. Blocks are sampled by a hash of their
//! identity, so every use of a sampled block is seen. Distances within the sample are the real
//! distances scaled by the rate (SHARDS, FAST '15). The sample's size is fixed: the rate falls as
//! blocks arrive. Not here: orders other than LRU, and the rule that a hit needs all earlier
//! blocks.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::Timestamp;

/// Blocks in the sample, about 100 B each. The error of a rate is about 1/√n, one percentage point
/// here.
const SAMPLE_BLOCKS: usize = 8192;

/// Distances are kept in steps of an eighth of an octave: a step is 9 %.
const STEPS_PER_OCTAVE: usize = 8;
/// Octaves of distances: 2^40 blocks of 16 KiB exceed any node.
const OCTAVES: usize = 40;
const STEPS: usize = STEPS_PER_OCTAVE * OCTAVES;

/// Half-life of a use in a curve: as long as the paper finds reuse stable (ATC '25 §3).
const CURVE_HALF_LIFE: Duration = Duration::from_secs(3600);

/// Stack distances of the uses of one node's blocks.
#[derive(Clone, Debug)]
pub struct MissCurve {
    seed: u64,
    sample_blocks: usize,
    /// Blocks with a mark up to this are sampled; marks are uniform over all 64 bits.
    mark_max: u64,
    /// Mark of every sampled block, and the position of its last use. The largest marks leave when
    /// the rate falls.
    last_positions: BTreeMap<u64, usize>,
    order: RecencyTree,
    /// Uses by the step of their distance, scaled to all blocks.
    hits: Vec<f64>,
    /// First uses of blocks.
    firsts: f64,
    /// Time of the last fading.
    faded_at: Timestamp,
}

impl MissCurve {
    /// An empty curve. `seed` selects the sample; a party that can choose blocks must not know it.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_sample(seed, SAMPLE_BLOCKS)
    }

    fn with_sample(seed: u64, sample_blocks: usize) -> Self {
        MissCurve {
            seed,
            sample_blocks,
            mark_max: u64::MAX,
            last_positions: BTreeMap::new(),
            order: RecencyTree::new(2 * sample_blocks + 2),
            hits: vec![0.0; STEPS],
            firsts: 0.0,
            faded_at: Timestamp(0),
        }
    }

    /// Records a request for a block, present or not. `fingerprint` is
    /// [`BlockHash::fingerprint`](crate::id::BlockHash::fingerprint).
    pub fn record_use(&mut self, fingerprint: u64) {
        let mark = mixed(fingerprint ^ self.seed);
        if mark > self.mark_max {
            return;
        }
        let weight = 1.0 / self.rate();
        if self.order.is_full() {
            self.renumber();
        }
        match self.last_positions.get(&mark).copied() {
            Some(turn) => {
                let distance = self.order.count_after(turn) as f64 * weight;
                self.hits[step(distance)] += weight;
                self.order.forget(turn);
            }
            None => self.firsts += weight,
        }
        self.last_positions.insert(mark, self.order.push());
        if self.last_positions.len() > self.sample_blocks {
            self.thin();
        }
    }

    /// Share of uses that an LRU tier of `capacity_blocks` would have hit, 0 to 1; 0 before any
    /// use.
    #[must_use]
    pub fn hit_rate(&self, capacity_blocks: u64) -> f64 {
        let all = self.uses();
        if all <= 0.0 || capacity_blocks == 0 {
            return 0.0;
        }
        // A distance of d needs d + 1 blocks. Within a step, distances are assumed evenly spread.
        let place = step_position(capacity_blocks as f64 - 1.0);
        let whole = (place as usize).min(STEPS);
        let part = self.hits.get(whole).map_or(0.0, |hits| hits * (place - whole as f64));
        ((self.hits[..whole].iter().sum::<f64>() + part) / all).min(1.0)
    }

    /// Uses counted, scaled to all blocks (an estimate).
    #[must_use]
    pub fn uses(&self) -> f64 {
        self.hits.iter().sum::<f64>() + self.firsts
    }

    /// Fades all counts by the time since the last call.
    pub fn fade_until(&mut self, now: Timestamp) {
        let span = now.since(self.faded_at);
        self.faded_at = self.faded_at.max(now);
        self.fade((-span.as_secs_f64() / CURVE_HALF_LIFE.as_secs_f64()).exp2());
    }

    /// Scales all counts by `kept` (0 to 1), so that the curve follows recent requests.
    fn fade(&mut self, kept: f64) {
        self.hits.iter_mut().for_each(|hits| *hits *= kept);
        self.firsts *= kept;
    }

    /// Share of the blocks that are sampled.
    fn rate(&self) -> f64 {
        (self.mark_max as f64 + 1.0) / (u64::MAX as f64 + 1.0)
    }

    /// Removes the block with the largest mark, and lowers the limit below it.
    fn thin(&mut self) {
        let Some((mark, turn)) = self.last_positions.pop_last() else { return };
        self.order.forget(turn);
        self.mark_max = mark.saturating_sub(1);
    }

    /// Renumbers the positions from 0 on, in the same order.
    fn renumber(&mut self) {
        let mut turns: Vec<(usize, u64)> =
            self.last_positions.iter().map(|(mark, turn)| (*turn, *mark)).collect();
        turns.sort_unstable();
        self.order.clear();
        for (_, mark) in turns {
            self.last_positions.insert(mark, self.order.push());
        }
    }
}

/// Marks the positions that are some block's last use, and counts the later ones: a Fenwick tree.
#[derive(Clone, Debug)]
struct RecencyTree {
    sums: Vec<u32>,
    next_position: usize,
    len: usize,
}

impl RecencyTree {
    fn new(turns: usize) -> Self {
        RecencyTree { sums: vec![0; turns + 1], next_position: 0, len: 0 }
    }

    fn is_full(&self) -> bool {
        self.next_position + 1 == self.sums.len()
    }

    fn clear(&mut self) {
        self.sums.fill(0);
        (self.next_position, self.len) = (0, 0);
    }

    /// Takes the next position as a block's last use.
    fn push(&mut self) -> usize {
        let turn = self.next_position;
        self.next_position += 1;
        self.len += 1;
        self.add(turn, 1);
        turn
    }

    /// Unmarks a position.
    fn forget(&mut self, turn: usize) {
        self.len -= 1;
        self.add(turn, -1);
    }

    /// Number of marked positions after this one.
    fn count_after(&self, turn: usize) -> usize {
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

/// Position of a distance among the steps, with its fraction.
fn step_position(distance: f64) -> f64 {
    (distance.max(0.0) + 1.0).log2() * STEPS_PER_OCTAVE as f64
}

fn step(distance: f64) -> usize {
    (step_position(distance) as usize).min(STEPS - 1)
}

/// Mixes the bits: every output bit depends on every input bit.
fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses with mixed reuse: three of four draws from a small set, the others from a large one.
    fn stream(seed: u64, uses: usize, blocks: u64) -> Vec<u64> {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mixed(mixed(state))
        };
        (0..uses)
            .map(|_| {
                let (which, number) = (draw(), draw());
                // The square root of a uniform number tends to be large: numbers near the end are
                // popular.
                let popular = ((number as f64 / u64::MAX as f64).sqrt() * blocks as f64) as u64;
                if which.is_multiple_of(4) { number % (4 * blocks) } else { blocks - popular.min(blocks - 1) }
            })
            .collect()
    }

    /// Hit rate of a real LRU tier.
    fn lru_hit_rate(uses: &[u64], capacity: usize) -> f64 {
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
        uses.iter().for_each(|block| curve.record_use(*block));
        curve
    }

    #[test]
    fn full_sample_is_exact_within_one_step() {
        let uses = stream(1, 20_000, 300);
        let curve = curve(2000, &uses);
        assert_eq!(curve.uses() as usize, uses.len());
        for capacity in [1, 2, 7, 63, 127, 255, 511, 1200, 5000] {
            let (found, real) = (curve.hit_rate(capacity as u64), lru_hit_rate(&uses, capacity));
            assert!((found - real).abs() < 0.012, "{capacity} blocks: {found} instead of {real}");
        }
    }

    #[test]
    fn small_sample_approximates_lru() {
        for seed in 1..=4 {
            println!("seed {seed}");
            let uses = stream(seed, 300_000, 20_000);
            let curve = curve(2048, &uses);
            assert!(curve.last_positions.len() <= 2048 && curve.last_positions.len() == curve.order.len);
            assert!(
                curve.rate() < 0.05,
                "{} of the blocks are sampled, expected less than 0.05",
                curve.rate()
            );
            for capacity in [500, 2_000, 8_000, 20_000, 60_000] {
                let (found, real) = (curve.hit_rate(capacity as u64), lru_hit_rate(&uses, capacity));
                assert!((found - real).abs() < 0.04, "{capacity} blocks: {found} instead of {real}");
            }
        }
    }

    #[test]
    fn recent_uses_dominate_after_fading() {
        let mut curve = MissCurve::new(3);
        (0..1000).for_each(|block| curve.record_use(block));
        assert_eq!(curve.hit_rate(1 << 30), 0.0);
        curve.fade(0.0);
        (0..1000).for_each(|_| curve.record_use(7));
        assert!(curve.hit_rate(2000) > 0.99, "{}", curve.hit_rate(2000));
        assert!(curve.hit_rate(2) > 0.99, "every use except the first repeats the same block");
    }

    #[test]
    fn empty_curve_and_zero_capacity_have_no_hits() {
        let mut curve = MissCurve::new(3);
        assert_eq!(curve.hit_rate(10), 0.0);
        (0..10).for_each(|_| curve.record_use(1));
        assert_eq!(curve.hit_rate(0), 0.0);
    }
}
