//! The hash tree: from tokens to leaves to block hashes (docs/reference/hash.md).
//!
//! Not here: BLAKE3 of many messages at once (`lanes.rs`), and positions in a chain (`chain.rs`).

use super::chain::Chain;
use super::keys::HashKeys;
use super::lanes::{
    COMPRESSION_BYTES, LANES_MAX, LaneKey, Lanes, NODE_BYTES, Node, OUTPUT_BYTES, SimdLevel, lane_key, node,
};
use super::manifest::{BLOCK_TOKENS_MAX, IdentityManifest};
use crate::id::{BLOCK_GROUP_BLOCKS, BlockHash};

/// Bytes of a token in a message.
const TOKEN_BYTES: usize = 4;

/// Most blocks hashed at a time: a group in each lane.
const BATCH_BLOCKS: usize = BLOCK_GROUP_BLOCKS * LANES_MAX;

/// A message of two hashes: one after the other, then zeros.
type PairMessage = [u8; COMPRESSION_BYTES];

/// Computes block hashes of one identity and one tenant.
#[derive(Clone)]
pub struct PrefixHasher {
    keys: HashKeys,
    lanes: Lanes,
    block_tokens: usize,
}

impl std::fmt::Debug for PrefixHasher {
    /// Omits the key, because logs must not contain it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixHasher").field("block_tokens", &self.block_tokens).finish_non_exhaustive()
    }
}

impl PrefixHasher {
    /// Derives the keys from manifest and salt. The salt keeps tenants from probing each other:
    /// without it a tenant's hashes cannot be computed, not even from known text. It must be secret
    /// and random.
    ///
    /// A manifest that [`IdentityManifest::validate`] refuses is hashed too (with the nearest valid
    /// block size), because a shared key or a panic must never happen here.
    #[must_use]
    pub fn new(manifest: &IdentityManifest, tenant_salt: &[u8; 32]) -> Self {
        let block_tokens = manifest.block_tokens.clamp(1, BLOCK_TOKENS_MAX) as usize;
        Self { keys: HashKeys::new(manifest, tenant_salt), lanes: Lanes::fastest(), block_tokens }
    }

    /// The same hasher with the instructions of this level; `None` if the machine lacks them. For
    /// comparing levels; [`new`](Self::new) takes the fastest.
    #[must_use]
    pub fn at_level(self, level: SimdLevel) -> Option<Self> {
        let lanes = Lanes::at(level)?;
        Some(Self { lanes, ..self })
    }

    /// The level of instructions in use.
    #[must_use]
    pub fn level(&self) -> SimdLevel {
        self.lanes.level()
    }

    /// The empty prefix.
    #[must_use]
    pub fn start(&self) -> Chain {
        Chain::new()
    }

    /// Appends the hashes of all whole blocks of `tokens` to `hashes` and advances `chain` behind
    /// them. Returns the tokens that do not fill a block: the caller keeps them until more arrive,
    /// or ends the prefix with [`tail`](Self::tail).
    pub fn extend<'tokens>(
        &self,
        chain: &mut Chain,
        tokens: &'tokens [u32],
        hashes: &mut Vec<BlockHash>,
    ) -> &'tokens [u32] {
        self.extend_with(chain, tokens, hashes, |_| ())
    }

    /// Like [`extend`](Self::extend), and also appends the chain after each block, for a caller
    /// that may continue from any of them.
    pub fn extend_each(
        &self,
        mut chain: Chain,
        tokens: &[u32],
        hashes: &mut Vec<BlockHash>,
        chains: &mut Vec<Chain>,
    ) {
        self.extend_with(&mut chain, tokens, hashes, |after| chains.push(after));
    }

    /// Hash of a partly filled block after `chain`. It ends a prefix, since no block follows one
    /// that still grows. `None` without tokens, or with a whole block of them.
    #[must_use]
    pub fn tail(&self, chain: &Chain, tokens: &[u32]) -> Option<BlockHash> {
        if tokens.is_empty() || tokens.len() >= self.block_tokens {
            return None;
        }
        Some(self.absorb_one(&mut chain.clone(), self.leaf(tokens)))
    }

    /// Hashes of all blocks of a prompt in prefix order; the last one may be partly filled.
    #[must_use]
    pub fn blocks(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(tokens.len().div_ceil(self.block_tokens));
        self.blocks_into(tokens, &mut hashes);
        hashes
    }

    /// Like [`blocks`](Self::blocks), into a list that is emptied first, to reuse its memory.
    pub fn blocks_into(&self, tokens: &[u32], hashes: &mut Vec<BlockHash>) {
        hashes.clear();
        let mut chain = self.start();
        let rest = self.extend(&mut chain, tokens, hashes);
        hashes.extend(self.tail(&chain, rest));
    }

    /// Hashes of a prefix given as block numbers of a trace. A number stands for the content of a
    /// block; the same number after another prefix is another block.
    #[must_use]
    pub fn chain_ids(&self, ids: &[u64]) -> Vec<BlockHash> {
        let mut hashes = Vec::with_capacity(ids.len());
        let mut chain = self.start();
        let mut messages = [[0; COMPRESSION_BYTES]; LANES_MAX];
        let mut leaves = [Node::default(); BATCH_BLOCKS];
        for ids in ids.chunks(BATCH_BLOCKS) {
            for (ids, leaves) in ids.chunks(LANES_MAX).zip(leaves.chunks_mut(LANES_MAX)) {
                for (message, id) in messages.iter_mut().zip(ids) {
                    message[..8].copy_from_slice(&id.to_le_bytes());
                }
                let outputs = self.lanes.hash(&self.keys.ids, &messages[..ids.len()]);
                leaves.iter_mut().zip(&outputs).for_each(|(leaf, output)| *leaf = node(output));
            }
            self.absorb(&mut chain, &leaves[..ids.len()], &mut hashes, |_| ());
        }
        hashes
    }

    /// [`extend`](Self::extend), which calls `after` with the chain behind each block.
    #[inline]
    fn extend_with<'tokens>(
        &self,
        chain: &mut Chain,
        tokens: &'tokens [u32],
        hashes: &mut Vec<BlockHash>,
        mut after: impl FnMut(Chain),
    ) -> &'tokens [u32] {
        let (mut whole, rest) = tokens.split_at(tokens.len() - tokens.len() % self.block_tokens);
        if whole.len() == self.block_tokens {
            // A conversation grows by one block at a time, for which batches are too large.
            hashes.push(self.absorb_one(chain, self.leaf(whole)));
            after(*chain);
            return rest;
        }
        hashes.reserve(whole.len() / self.block_tokens);
        let mut leaves = [Node::default(); BATCH_BLOCKS];
        while !whole.is_empty() {
            // Batches end at the end of a group, so that only the first begins within one.
            let blocks = BATCH_BLOCKS - chain.position.index_in_group();
            let (now, later) = whole.split_at(whole.len().min(blocks * self.block_tokens));
            let leaves = &mut leaves[..now.len() / self.block_tokens];
            self.leaves(now, leaves);
            self.absorb(chain, leaves, hashes, &mut after);
            whole = later;
        }
        rest
    }

    /// The leaves of whole blocks.
    fn leaves(&self, tokens: &[u32], leaves: &mut [Node]) {
        match self.block_tokens * TOKEN_BYTES {
            64 => self.leaves_in_lanes::<64>(tokens, leaves),
            128 => self.leaves_in_lanes::<128>(tokens, leaves),
            256 => self.leaves_in_lanes::<256>(tokens, leaves),
            512 => self.leaves_in_lanes::<512>(tokens, leaves),
            1024 => self.leaves_in_lanes::<1024>(tokens, leaves),
            _ => {
                for (leaf, block) in leaves.iter_mut().zip(tokens.chunks(self.block_tokens)) {
                    *leaf = self.leaf(block);
                }
            }
        }
    }

    fn leaves_in_lanes<const BYTES: usize>(&self, tokens: &[u32], leaves: &mut [Node]) {
        let key = lane_key(&self.keys.tokens);
        let mut blocks = tokens.chunks_exact(self.block_tokens);
        let mut messages = [[0; BYTES]; LANES_MAX];
        for leaves in leaves.chunks_mut(LANES_MAX) {
            for (message, block) in messages.iter_mut().zip(blocks.by_ref().take(leaves.len())) {
                put_tokens(message, block);
            }
            let outputs = self.lanes.hash(&key, &messages[..leaves.len()]);
            leaves.iter_mut().zip(&outputs).for_each(|(leaf, output)| *leaf = node(output));
        }
    }

    /// The leaf of one block, whole or partly filled.
    fn leaf(&self, tokens: &[u32]) -> Node {
        let mut message = [0; TOKEN_BYTES * BLOCK_TOKENS_MAX as usize];
        let message = &mut message[..TOKEN_BYTES * tokens.len()];
        put_tokens(message, tokens);
        node(blake3::keyed_hash(&self.keys.tokens, message).as_bytes())
    }

    /// Advances `chain` over the block with this leaf, and returns its hash: the definition of all
    /// block hashes.
    fn absorb_one(&self, chain: &mut Chain, leaf: Node) -> BlockHash {
        let index = chain.position.index_in_group();
        let mut message = [0; COMPRESSION_BYTES];
        let group = if index == 0 {
            leaf
        } else {
            put_pair(&mut message, &chain.group, &leaf);
            node(&self.lanes.hash_one(&self.keys.group, &message))
        };
        put_pair(&mut message, &chain.state, &group);
        let output = self.lanes.hash_one(&self.keys.prefix, &message);
        let hash = chain.position.next_hash(&output);
        chain.group = group;
        if index == BLOCK_GROUP_BLOCKS - 1 {
            chain.state = node(&output);
        }
        hash
    }

    /// Advances `chain` over blocks with these leaves as [`absorb_one`](Self::absorb_one) does, many
    /// at a time. Appends their hashes, and calls `after` with the chain behind each. At most as
    /// many blocks as keep within [`LANES_MAX`] groups.
    fn absorb(
        &self,
        chain: &mut Chain,
        leaves: &[Node],
        hashes: &mut Vec<BlockHash>,
        mut after: impl FnMut(Chain),
    ) {
        let mut batch = BlockBatch::new(chain, leaves);
        batch.hash_groups(self.lanes, &self.keys.group);
        batch.hash_states(self.lanes, &self.keys.prefix);
        batch.hash_prefixes(self.lanes, &self.keys.prefix);
        for slot in batch.slots() {
            hashes.push(chain.position.next_hash(&batch.outputs[slot]));
            chain.group = batch.groups[slot];
            chain.state = batch.states[(slot + 1) / BLOCK_GROUP_BLOCKS];
            after(*chain);
        }
    }
}

/// Consecutive blocks of a chain on their way from leaves to hashes. Slots are numbered from the
/// first block of the group in which the batch begins.
struct BlockBatch<'leaves> {
    /// Slot of the first block.
    first: usize,
    leaves: &'leaves [Node],
    /// Hash of the group's blocks before the first.
    before: Node,
    /// For each slot, the hash of its group's blocks up to it.
    groups: [Node; BATCH_BLOCKS],
    /// For each group, and for the one after the last, the hash of everything before it.
    states: [Node; LANES_MAX + 1],
    /// For each slot, the hash of everything up to its block.
    outputs: [[u8; OUTPUT_BYTES]; BATCH_BLOCKS],
}

impl<'leaves> BlockBatch<'leaves> {
    fn new(chain: &Chain, leaves: &'leaves [Node]) -> Self {
        let first = chain.position.index_in_group();
        let leaves = &leaves[..leaves.len().min(BATCH_BLOCKS - first)];
        let mut states = [Node::default(); LANES_MAX + 1];
        states[0] = chain.state;
        Self {
            first,
            leaves,
            before: chain.group,
            groups: [Node::default(); BATCH_BLOCKS],
            states,
            outputs: [[0; OUTPUT_BYTES]; BATCH_BLOCKS],
        }
    }

    /// The slots of the blocks.
    fn slots(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.leaves.len()
    }

    /// The slots of the blocks that have this index in their groups.
    fn slots_at(&self, index: usize) -> impl Iterator<Item = usize> + use<> {
        let slots = self.slots();
        let start = if index < slots.start { index + BLOCK_GROUP_BLOCKS } else { index };
        (start..slots.end).step_by(BLOCK_GROUP_BLOCKS)
    }

    /// Hashes the blocks of each group one after the other, with a group in each lane.
    fn hash_groups(&mut self, lanes: Lanes, key: &LaneKey) {
        self.slots_at(0).for_each(|slot| self.groups[slot] = self.leaves[slot - self.first]);
        let mut messages = [[0; COMPRESSION_BYTES]; LANES_MAX];
        for index in 1..BLOCK_GROUP_BLOCKS {
            let mut count = 0;
            for (message, slot) in messages.iter_mut().zip(self.slots_at(index)) {
                let before = if slot == self.first { self.before } else { self.groups[slot - 1] };
                put_pair(message, &before, &self.leaves[slot - self.first]);
                count += 1;
            }
            if count > 0 {
                let outputs = lanes.hash(key, &messages[..count]);
                for (slot, output) in self.slots_at(index).zip(&outputs) {
                    self.groups[slot] = node(output);
                }
            }
        }
    }

    /// Hashes whole groups, each after the one before: the only step without lanes.
    fn hash_states(&mut self, lanes: Lanes, key: &LaneKey) {
        for slot in self.slots_at(BLOCK_GROUP_BLOCKS - 1) {
            let group = slot / BLOCK_GROUP_BLOCKS;
            let mut message = [0; COMPRESSION_BYTES];
            put_pair(&mut message, &self.states[group], &self.groups[slot]);
            let output = lanes.hash_one(key, &message);
            self.states[group + 1] = node(&output);
            self.outputs[slot] = output;
        }
    }

    /// Hashes everything up to each block that does not end its group.
    fn hash_prefixes(&mut self, lanes: Lanes, key: &LaneKey) {
        let mut slots = self.slots().filter(|slot| slot % BLOCK_GROUP_BLOCKS < BLOCK_GROUP_BLOCKS - 1);
        let mut messages = [[0; COMPRESSION_BYTES]; LANES_MAX];
        let mut of = [0; LANES_MAX];
        loop {
            let mut count = 0;
            for ((message, lane), slot) in messages.iter_mut().zip(&mut of).zip(slots.by_ref()) {
                put_pair(message, &self.states[slot / BLOCK_GROUP_BLOCKS], &self.groups[slot]);
                *lane = slot;
                count += 1;
            }
            if count == 0 {
                return;
            }
            let outputs = lanes.hash(key, &messages[..count]);
            of[..count].iter().zip(&outputs).for_each(|(slot, output)| self.outputs[*slot] = *output);
        }
    }
}

fn put_tokens(message: &mut [u8], tokens: &[u32]) {
    let (words, _) = message.as_chunks_mut::<TOKEN_BYTES>();
    words.iter_mut().zip(tokens).for_each(|(word, token)| *word = token.to_le_bytes());
}

#[inline]
fn put_pair(message: &mut PairMessage, before: &Node, own: &Node) {
    message[..NODE_BYTES].copy_from_slice(before);
    message[NODE_BYTES..2 * NODE_BYTES].copy_from_slice(own);
}
