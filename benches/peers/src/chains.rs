//! Chains of blocks that all sides store and look up, made from tokens; identical in every run.
//!
//! Not here: the order of their announcements (`events.rs`).

use dynamo_kv_router::protocols::{BlockHashOptions, compute_block_hash_for_seq, compute_seq_hash_for_block};
use kv_core::id::BlockHash;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Nodes (workers, to the peers) that hold chains.
pub(crate) const NODES: u32 = 64;
/// Tokens per block.
pub(crate) const BLOCK_TOKENS: u32 = 16;
/// Chains that share one prefix.
const CHAINS_PER_PREFIX: u32 = 16;
/// Blocks in the shared prefix.
pub(crate) const SHARED_BLOCKS: u32 = 64;
/// Upper bound of token IDs, as in a current model's vocabulary.
const VOCABULARY: u32 = 128_000;
/// Seed of every run; printed, so that another run can use another.
pub(crate) const SEED: u64 = 20_261_121;

/// Number and length of the chains, and nodes per chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) chains: u32,
    pub(crate) chain_blocks: u32,
    pub(crate) holders: u32,
}

impl Shape {
    /// A shape with about `entries` pairs of node and block.
    pub(crate) fn of(entries: u64, chain_blocks: u32, holders: u32) -> Self {
        let chains = entries.div_ceil(u64::from(chain_blocks) * u64::from(holders));
        Self { chains: chains as u32, chain_blocks, holders }
    }

    /// Pairs of node and block: each pair is announced once and removed once.
    pub(crate) fn entries(&self) -> u64 {
        u64::from(self.chains) * u64::from(self.chain_blocks) * u64::from(self.holders)
    }

    /// The nodes that hold a chain. Chains with a shared prefix are on different nodes.
    pub(crate) fn nodes(&self, chain: u32) -> impl Iterator<Item = u32> {
        let holders = self.holders;
        (0..holders).map(move |holder| (chain + holder * (NODES / holders)) % NODES)
    }
}

/// The hashes of all chains in every naming scheme.
pub(crate) struct Chains {
    pub(crate) shape: Shape,
    hasher: OurHasher,
    seed: u64,
    shared: bool,
    /// kvfleet's hashes: keyed, covering the block and its prefix.
    ours: Vec<BlockHash>,
    /// The peers' hashes of the block's own tokens. Empty if only kvfleet runs.
    local: Vec<u64>,
    /// The peers' hashes of the block and its prefix. Empty if only kvfleet runs.
    rolling: Vec<u64>,
}

impl Chains {
    /// Chains for all sides.
    pub(crate) fn for_all(shape: Shape) -> Self {
        Self::new(shape, SEED, true, true)
    }

    /// Chains for kvfleet alone, which need a third of the memory.
    pub(crate) fn for_ours(shape: Shape) -> Self {
        Self::new(shape, SEED, true, false)
    }

    /// Chains that no node holds and that share no prefix.
    pub(crate) fn unknown(chains: u32, chain_blocks: u32) -> Self {
        Self::new(Shape { chains, chain_blocks, holders: 0 }, !SEED, false, true)
    }

    fn new(shape: Shape, seed: u64, shared: bool, for_peers: bool) -> Self {
        let blocks = shape.chains as usize * shape.chain_blocks as usize;
        let peer_blocks = if for_peers { blocks } else { 0 };
        let mut chains = Self {
            shape,
            hasher: OurHasher::new(),
            seed,
            shared,
            ours: Vec::with_capacity(blocks),
            local: Vec::with_capacity(peer_blocks),
            rolling: Vec::with_capacity(peer_blocks),
        };
        for chain in 0..shape.chains {
            let tokens = chains.tokens(chain);
            chains.ours.extend(chains.hasher.blocks(&tokens));
            if for_peers {
                let local = compute_block_hash_for_seq(&tokens, BLOCK_TOKENS, BlockHashOptions::default());
                chains.rolling.extend(compute_seq_hash_for_block(&local));
                chains.local.extend(local.iter().map(|hash| hash.0));
            }
        }
        chains
    }

    /// The prompt of a chain.
    pub(crate) fn tokens(&self, chain: u32) -> Vec<u32> {
        let shared_blocks = if self.shared { SHARED_BLOCKS.min(self.shape.chain_blocks) } else { 0 };
        let own_blocks = self.shape.chain_blocks - shared_blocks;
        let group = u64::from(chain / CHAINS_PER_PREFIX) | 1 << 32;
        let mut tokens = random_tokens(self.seed ^ group, shared_blocks * BLOCK_TOKENS);
        tokens.extend(random_tokens(self.seed ^ u64::from(chain), own_blocks * BLOCK_TOKENS));
        tokens
    }

    pub(crate) fn ours(&self, chain: u32) -> &[BlockHash] {
        &self.ours[self.range(chain)]
    }

    pub(crate) fn local(&self, chain: u32) -> &[u64] {
        &self.local[self.range(chain)]
    }

    pub(crate) fn rolling(&self, chain: u32) -> &[u64] {
        &self.rolling[self.range(chain)]
    }

    fn range(&self, chain: u32) -> std::ops::Range<usize> {
        let (chain, blocks) = (chain as usize, self.shape.chain_blocks as usize);
        chain * blocks..(chain + 1) * blocks
    }
}

fn random_tokens(seed: u64, count: u32) -> Vec<u32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| random.next_u32() % VOCABULARY).collect()
}

/// kvfleet's keyed hash, which marks the blocks of a chain and of an octet.
pub(crate) struct OurHasher(PrefixHasher);

impl OurHasher {
    pub(crate) fn new() -> Self {
        let manifest = IdentityManifest { block_tokens: BLOCK_TOKENS, ..IdentityManifest::default() };
        Self(PrefixHasher::new(&manifest, &[7; 32]))
    }

    pub(crate) fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        self.0.blocks(tokens)
    }
}

#[cfg(test)]
mod tests {
    use kv_core::id::BLOCK_GROUP_BLOCKS;

    use super::*;

    #[test]
    fn chains_share_only_their_prefix() {
        let chains = Chains::for_all(Shape::of(32 * 100, 100, 1));
        let shared = SHARED_BLOCKS as usize;
        assert_eq!(chains.ours(0)[..shared], chains.ours(15)[..shared]);
        assert_eq!(chains.local(0)[..shared], chains.local(15)[..shared]);
        assert_ne!(chains.ours(0)[shared], chains.ours(15)[shared]);
        assert_ne!(chains.rolling(0)[0], chains.rolling(16)[0]);
        let ours = chains.ours(3);
        assert!(ours.iter().all(|hash| hash.root_tag() == ours[0].root_tag()));
        for (position, hash) in ours.iter().enumerate() {
            let first = ours[position - position % BLOCK_GROUP_BLOCKS];
            assert_eq!(
                (hash.block_group(), hash.position_in_group()),
                (first.block_group(), position % BLOCK_GROUP_BLOCKS)
            );
        }
    }

    #[test]
    fn no_node_holds_a_block_twice() {
        for holders in [1, 4] {
            let shape = Shape { chains: 16, chain_blocks: 100, holders };
            let mut nodes: Vec<_> = (0..16).flat_map(|chain| shape.nodes(chain)).collect();
            nodes.sort_unstable();
            nodes.dedup();
            assert_eq!(nodes.len() as u32, 16 * holders);
        }
    }
}
