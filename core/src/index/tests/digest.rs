//! The digest that a node keeps of itself equals the one that the index keeps of the node.

use super::*;
use crate::id::NodeId;
use crate::index::digest;

/// Pseudo-random numbers (SplitMix64).
struct SplitMix64(u64);

impl SplitMix64 {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)) % limit
    }
}

/// Random announcements of a cache: stores chains, moves and drops held blocks, in any order.
#[test]
fn a_node_and_the_index_keep_one_digest() {
    for seed in 0..50 {
        let mut random = SplitMix64(seed);
        let mut index = Fixture::with_nodes(1);
        let (mut held, mut sum, mut fresh) = (Vec::<(u64, Tier)>::new(), 0, 0);
        for _ in 0..60 {
            let change = match random.below(20) {
                0..9 => {
                    let new = fresh..fresh + 1 + random.below(39);
                    fresh = new.end;
                    held.extend(new.clone().map(|number| (number, Tier::Dram)));
                    stored(new, Tier::Dram)
                }
                9 => {
                    held.clear();
                    Change::Cleared
                }
                turn => {
                    let at = random.below(held.len().max(1) as u64) as usize;
                    let Some((number, from)) = held.get(at).copied() else { continue };
                    held.retain(|(other, _)| *other != number);
                    if turn < 15 {
                        let to = if from == Tier::Dram { Tier::Ssd } else { Tier::Dram };
                        held.push((number, to));
                        moved([number], from, to)
                    } else {
                        dropped([number], from)
                    }
                }
            };
            sum = digest::digest_after(sum, &change);
            index.announce_next(1, vec![change]);
            assert_eq!(index.0.node(NodeId(1)).expect("joined").digest(), sum, "seed {seed}");
        }
        let share = |(number, tier): &(u64, Tier)| digest::copy_digest(block(*number), *tier);
        let alone = held.iter().map(share).fold(0, u128::wrapping_add);
        assert_eq!(sum, alone, "seed {seed}");
    }
}
