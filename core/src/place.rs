//! Consistent-hash ring with bounded load: where a new block is saved when no node is the obvious one.
//!
//! Not here: who holds a block already (`index/`), and when a node is live (the caller builds the ring
//! from live nodes only). The next stop of a placement is [`crate::schedule::Decision::save_to`].
//!
//! Bounded load is that of Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads"
//! (SODA 2018): walk on from a node that carries more than `bound` times its fair share.
//! Beside it: how copies between nodes end, what is worth another one, and what a node that leaves gives to others first.

pub mod copies;
pub mod hot;
pub mod leaving;

use std::cmp::Reverse;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::id::NodeId;

/// Most a node may carry over its fair share before a key walks on. 1.25 is the middle of the range the
/// bounded-load paper measures: a quarter of the memory stays as slack, and about four in five keys
/// still land on their first node.
pub const LOAD_BOUND: f64 = 1.25;

/// Points on the ring per unit of weight. With 128 the share of a node of weight 1 strays from fair by
/// about 1/sqrt(128) = 9 % (one standard deviation), which the load bound then caps; a ring of 100 nodes
/// is 12,800 points of 16 bytes, 200 KiB.
pub const POINTS_PER_WEIGHT: u32 = 128;

/// Largest weight that counts; larger ones are cut to it, so that a typing error cannot fill the memory.
pub const WEIGHT_MAX: u32 = 1_024;

/// Bounds above this change nothing and would overflow the exact comparison.
const BOUND_MAX: f64 = 1e6;

/// Keeps points and keys apart: a key with the bytes of a point must not land exactly on it.
const POINT_SEED: u64 = 0x6b76_666c_6565_7401;
const KEY_SEED: u64 = 0x6b76_666c_6565_7402;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    position: u64,
    /// Position of the node in `Ring::members`; orders like the node itself.
    rank: u32,
}

/// Nodes on a circle of 2^64 positions. Equal members give an equal ring, whatever order they are named
/// in. A key belongs to the first point at or after its position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    points: Vec<Point>,
    members: Vec<(NodeId, u32)>,
}

impl Ring {
    /// A ring of these nodes with their weights. A weight of 0 leaves the node out; of a node named
    /// twice, the larger weight counts.
    #[must_use]
    pub fn new(members: &[(NodeId, u32)]) -> Self {
        let mut members: Vec<_> =
            members.iter().map(|&(node, weight)| (node, weight.min(WEIGHT_MAX))).collect();
        members.retain(|&(_, weight)| weight > 0);
        members.sort_unstable_by_key(|&(node, weight)| (node, Reverse(weight)));
        members.dedup_by_key(|member| member.0);
        let mut points: Vec<_> =
            (0u32..).zip(&members).flat_map(|(rank, &member)| points_of(rank, member)).collect();
        points.sort_unstable();
        Self { points, members }
    }

    /// How many nodes are on the ring.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether no node is on the ring.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Every node once, nearest first: the first is the key's own, the next ones are where copies go.
    pub fn walk(&self, key: &[u8]) -> impl Iterator<Item = NodeId> + '_ {
        let position = xxh3_64_with_seed(key, KEY_SEED);
        let first = self.points.partition_point(|point| point.position < position);
        let (before, after) = self.points.split_at(first);
        let mut seen = vec![false; self.members.len()];
        let unseen = move |point: &Point| {
            let rank = point.rank as usize;
            (!std::mem::replace(&mut seen[rank], true)).then(|| self.members[rank].0)
        };
        // `take` ends the walk once every node was named: the rest of the circle could only repeat.
        after.iter().chain(before).filter_map(unseen).take(self.members.len())
    }

    /// The first node of the walk that carries less than `bound` times its fair share, counting the new
    /// block; `load` gives what a node carries now, in blocks. A `bound` under 1 (or no number) is taken as
    /// 1. Nothing only when the ring is empty: the shares sum to more than all blocks, so some node is below its own.
    pub fn place(&self, key: &[u8], load: impl Fn(NodeId) -> u64, bound: f64) -> Option<NodeId> {
        let blocks = 1 + self.members.iter().map(|&(node, _)| u128::from(load(node))).sum::<u128>();
        let weights: u128 = self.members.iter().map(|&(_, weight)| u128::from(weight)).sum();
        let bound = if bound.is_nan() { 1.0 } else { bound.clamp(1.0, BOUND_MAX) };
        let bound_permille = (bound * 1_000.0).round() as u128;
        // load < ceil(bound * blocks * weight / weights), without the division.
        let fits = |&node: &NodeId| {
            u128::from(load(node)) * weights * 1_000 < bound_permille * blocks * self.weight(node)
        };
        self.walk(key).find(fits)
    }

    fn weight(&self, node: NodeId) -> u128 {
        self.members
            .binary_search_by_key(&node, |member| member.0)
            .map_or(0, |rank| self.members[rank].1.into())
    }
}

fn points_of(rank: u32, (node, weight): (NodeId, u32)) -> impl Iterator<Item = Point> {
    (0..weight * POINTS_PER_WEIGHT).map(move |copy| {
        let mut bytes = [0u8; 8];
        bytes[..4].copy_from_slice(&node.0.to_le_bytes());
        bytes[4..].copy_from_slice(&copy.to_le_bytes());
        Point { position: xxh3_64_with_seed(&bytes, POINT_SEED), rank }
    })
}

#[cfg(test)]
mod tests;
