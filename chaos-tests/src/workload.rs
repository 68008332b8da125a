//! A plan from a seed: announcements, pins, silent nodes, and router failures.
//!
//! Equal seeds give equal plans. Not here: execution (`drive.rs`). The interleaving with the
//! cluster still depends on timing; the invariants must hold for every timing.

use kv_core::id::{BLOCK_GROUP_BLOCKS, BlockHash};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cluster::{ROUTERS_COUNT, SHARDS_COUNT};

/// Fake nodes of a run.
pub const NODES_COUNT: u32 = 4;

/// Prefixes that the nodes hold parts of.
pub const CHAINS_COUNT: u32 = 6;

/// Blocks of a prefix.
pub const CHAIN_BLOCKS: u32 = 24;

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A node stores or drops blocks at the tail of its part of some chains, in one batch.
    Hold {
        /// The node.
        node: u32,
        /// Chain, and number of leading blocks held afterwards.
        wanted: Vec<(u32, u32)>,
    },
    /// A node skips an announcement number.
    SkipNumber {
        /// The node.
        node: u32,
    },
    /// A node restarts: joins, gets an epoch, announces everything again.
    RestartNode {
        /// The node.
        node: u32,
    },
    /// A node falls silent until it is woken.
    Silence {
        /// The node.
        node: u32,
    },
    /// A silent node resumes.
    Wake {
        /// The node.
        node: u32,
    },
    /// A chain is pinned.
    Pin {
        /// Number of the pin.
        pin: u64,
        /// Pinned chain.
        chain: u32,
    },
    /// The pin's owner ends it.
    Unpin {
        /// Number of the pin.
        pin: u64,
    },
    /// The leader is killed.
    KillLeader,
    /// A router is killed, if a majority remains.
    KillRouter {
        /// Its position.
        router: usize,
    },
    /// Every router is killed at once and restarted.
    KillAll,
    /// Killed routers are restarted.
    RestartRouters,
    /// The status of every router is recorded.
    CheckStatus,
}

/// The shard that lists a chain.
#[must_use]
pub fn shard_of(chain_number: u32) -> u16 {
    chain(chain_number)[0].shard(SHARDS_COUNT)
}

/// The shard that a node announces to. It holds parts of this shard's chains only.
#[must_use]
pub fn shard_of_node(node: u32) -> u16 {
    (node % u32::from(SHARDS_COUNT)) as u16 + 1
}

/// The hashes of a chain. Any distinct hashes with one tag would do; these encode chain and
/// position. Four chains of five have block groups like real ones, the fifth has none.
#[must_use]
pub fn chain(number: u32) -> Vec<BlockHash> {
    // Adjacent chains are in different shards.
    let tag = ((number % u32::from(SHARDS_COUNT)) * 256 / u32::from(SHARDS_COUNT)) as u8;
    let block = |position: u32| {
        let mut bytes = [0xa5; _];
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        bytes[0] = tag;
        bytes[4..8].copy_from_slice(&position.to_be_bytes());
        bytes[8..12].copy_from_slice(&number.to_be_bytes());
        BlockHash(bytes)
    };
    let octet = |position: u32| {
        let mut bytes = [0; _];
        let mixed = u64::from(number << 16 | position).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes[..8].copy_from_slice(&mixed.to_le_bytes());
        BlockHash(bytes)
    };
    let in_octet = |position: u32| {
        let first = position - position % BLOCK_GROUP_BLOCKS as u32;
        block(position).in_chain(tag, octet(first), position as usize)
    };
    (0..CHAIN_BLOCKS)
        .map(|position| if number % 5 == 4 { block(position) } else { in_octet(position) })
        .collect()
}

/// A plan of `steps` random steps, plus one kill of the leader and one kill of all routers.
#[must_use]
pub fn plan(seed: u64, steps: usize) -> Vec<Step> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut pins = 0;
    let mut plan: Vec<Step> = (0..steps).map(|_| step(&mut random, &mut pins)).collect();
    plan.insert(steps / 3, Step::KillLeader);
    plan.insert(2 * steps / 3, Step::KillAll);
    plan
}

fn step(random: &mut ChaCha8Rng, pins: &mut u64) -> Step {
    let node = random.random_range(1..=NODES_COUNT);
    match random.random_range(0..100) {
        0..60 => Step::Hold { node, wanted: wanted(random) },
        60..64 => Step::SkipNumber { node },
        64..68 => Step::RestartNode { node },
        68..71 => Step::Silence { node },
        71..76 => Step::Wake { node },
        76..84 => {
            *pins += 1;
            Step::Pin { pin: *pins, chain: random.random_range(0..CHAINS_COUNT) }
        }
        84..88 => Step::Unpin { pin: random.random_range(1..=(*pins).max(1)) },
        88..90 => Step::KillLeader,
        90..92 => Step::KillRouter { router: random.random_range(0..ROUTERS_COUNT) },
        92..96 => Step::RestartRouters,
        _ => Step::CheckStatus,
    }
}

fn wanted(random: &mut ChaCha8Rng) -> Vec<(u32, u32)> {
    let chains: Vec<u32> = (0..CHAINS_COUNT).collect();
    let count = random.random_range(1..=3);
    let chosen = chains.choose_multiple(random, count).copied().collect::<Vec<_>>();
    chosen.into_iter().map(|chain| (chain, random.random_range(0..=CHAIN_BLOCKS))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_plans() {
        assert_eq!(plan(7, 100), plan(7, 100));
        assert_ne!(plan(7, 100), plan(8, 100));
    }

    #[test]
    fn every_plan_kills_the_leader_and_once_all_routers() {
        for seed in 0..20 {
            let plan = plan(seed, 30);
            assert!(plan.contains(&Step::KillLeader));
            assert!(plan.contains(&Step::KillAll));
        }
    }

    #[test]
    fn every_shard_has_chains_and_nodes() {
        for shard in 1..=SHARDS_COUNT {
            assert!((0..CHAINS_COUNT).any(|number| shard_of(number) == shard));
            assert!((1..=NODES_COUNT).any(|node| shard_of_node(node) == shard));
        }
    }

    #[test]
    fn chains_share_no_block() {
        let mut all: Vec<BlockHash> = (0..CHAINS_COUNT).flat_map(chain).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), (CHAINS_COUNT * CHAIN_BLOCKS) as usize);
    }
}
