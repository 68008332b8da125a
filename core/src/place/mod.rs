//! Consistent-hash ring with bounded load: picks the node that saves a new block if the instance
//! has no node of its own.
//!
//! Not here: which nodes hold a block already (`index/`), and which nodes are live (the caller
//! builds the ring from live nodes only). The result ends up in
//! [`crate::schedule::Decision::save_to`].
//!
//! Bounded load follows Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads"
//! (SODA 2018): walk on from a node that carries more than `bound` times its fair share.
//! Submodules: outcomes of copies between nodes, proposals of further replicas, and the hand-over
//! order of a draining node.

pub mod copies;
pub mod drain_order;
pub mod hot_prefixes;

use std::cmp::Reverse;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::id::NodeId;

/// Load limit of a node, as a multiple of its fair share, before a key walks on. 1.25 is the middle
/// of the range in the bounded-load paper: a quarter of the memory stays as slack, and about four
/// in five keys still land on their first node.
pub const LOAD_BOUND: f64 = 1.25;

/// Points on the ring per unit of weight. With 128 the share of a node of weight 1 deviates from
/// fair by about 1/sqrt(128) = 9 % (one standard deviation), which the load bound then caps. A ring
/// of 100 nodes has 12,800 points of 16 bytes, 200 KiB.
pub const POINTS_PER_WEIGHT: u32 = 128;

/// Largest weight that counts; larger ones are cut to it, so that a typing error cannot exhaust
/// memory.
pub const WEIGHT_MAX: u32 = 1_024;

/// Larger bounds have no further effect and would overflow the exact comparison.
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

/// Nodes on a circle of 2^64 positions. Equal members give an equal ring in whatever order they are
/// listed. A key belongs to the first point at or after its position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    points: Vec<Point>,
    members: Vec<(NodeId, u32)>,
}

impl Ring {
    /// A ring of these nodes with their weights. A weight of 0 leaves the node out; of a node
    /// listed twice, the larger weight counts.
    #[must_use]
    pub fn new(members: &[(NodeId, u32)]) -> Self {
        let mut members: Vec<_> =
            members.iter().map(|&(node, weight)| (node, weight.min(WEIGHT_MAX))).collect();
        members.retain(|&(_, weight)| weight > 0);
        members.sort_unstable_by_key(|&(node, weight)| (node, Reverse(weight)));
        members.dedup_by_key(|member| member.0);
        let mut points: Vec<_> = (0u32..)
            .zip(&members)
            .flat_map(|(rank, &(node, weight))| points_of(rank, node, weight))
            .collect();
        points.sort_unstable();
        Self { points, members }
    }

    /// Number of nodes on the ring.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether no node is on the ring.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Every node once, nearest first: the first is the key's home node, the next ones take
    /// replicas.
    pub fn walk(&self, key: &[u8]) -> impl Iterator<Item = NodeId> + '_ {
        let position = xxh3_64_with_seed(key, KEY_SEED);
        let first = self.points.partition_point(|point| point.position < position);
        let (before, after) = self.points.split_at(first);
        let mut seen = vec![false; self.members.len()];
        let unseen = move |point: &Point| {
            let rank = point.rank as usize;
            (!std::mem::replace(&mut seen[rank], true)).then(|| self.members[rank].0)
        };
        // `take` ends the walk once every node was returned: the rest of the circle only repeats.
        after.iter().chain(before).filter_map(unseen).take(self.members.len())
    }

    /// The first node of the walk that carries less than `bound` times its fair share, counting the
    /// new block. `load` returns the blocks that a node carries now. A `bound` below 1 or NaN
    /// counts as 1. `None` only if the ring is empty: the shares sum to more than all blocks, so
    /// some node is below its own.
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

fn points_of(rank: u32, node: NodeId, weight: u32) -> impl Iterator<Item = Point> {
    (0..weight * POINTS_PER_WEIGHT).map(move |copy| {
        let mut bytes = [0u8; 8];
        bytes[..4].copy_from_slice(&node.0.to_le_bytes());
        bytes[4..].copy_from_slice(&copy.to_le_bytes());
        Point { position: xxh3_64_with_seed(&bytes, POINT_SEED), rank }
    })
}

#[cfg(test)]
mod tests;
