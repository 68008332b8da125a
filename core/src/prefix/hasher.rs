//! The hash chain: from tokens to states to block hashes.
//!
//! Not here: how a block is summed and a state encrypted (`kernel.rs`), and positions in a chain
//! (`chain.rs`).

use kvfleet_cpu::block_hash::{BlockBatch, LINE_TOKENS, SEGMENT_LINES, TokenLine};

use super::chain::Chain;
use super::kernel::{Kernel, SimdLevel};
use super::keys::HashKeys;
use super::manifest::{BLOCK_TOKENS_MAX, IdentityManifest};
use crate::id::BlockHash;

/// Computes block hashes of one identity and one tenant.
#[derive(Clone)]
pub struct PrefixHasher {
    keys: HashKeys,
    kernel: Kernel,
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
        let keys = HashKeys::new(manifest, tenant_salt);
        let kernel = Kernel::fastest(&keys.cipher);
        Self { kernel, keys, block_tokens: manifest.block_tokens.clamp(1, BLOCK_TOKENS_MAX) as usize }
    }

    /// The same hasher with the instructions of this level; `None` if the machine lacks them. For
    /// comparing levels; [`new`](Self::new) takes the fastest.
    #[must_use]
    pub fn at_level(self, level: SimdLevel) -> Option<Self> {
        let kernel = Kernel::at(level, &self.keys.cipher)?;
        Some(Self { kernel, ..self })
    }

    /// The level of instructions in use.
    #[must_use]
    pub fn level(&self) -> SimdLevel {
        self.kernel.level()
    }

    /// The empty prefix.
    #[must_use]
    pub fn start(&self) -> Chain {
        Chain::new(0)
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
        let (whole, rest) = tokens.split_at(tokens.len() - tokens.len() % self.block_tokens);
        let before = hashes.len();
        hashes.resize(before + whole.len() / self.block_tokens, BlockHash::default());
        let hashes = &mut hashes[before..];
        if self.block_tokens.is_multiple_of(LINE_TOKENS) {
            self.absorb(chain, self.lines_per_block(), whole.as_chunks().0, hashes);
        } else {
            self.absorb_padded(chain, whole, hashes);
        }
        rest
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
        for block in tokens.chunks_exact(self.block_tokens) {
            self.extend(&mut chain, block, hashes);
            chains.push(chain);
        }
    }

    /// Hash of a partly filled block after `chain`. It ends a prefix, since no block follows one
    /// that still grows. `None` without tokens, or with a whole block of them.
    #[must_use]
    pub fn tail(&self, chain: &Chain, tokens: &[u32]) -> Option<BlockHash> {
        if tokens.is_empty() || tokens.len() >= self.block_tokens {
            return None;
        }
        let mut padded = [[0; LINE_TOKENS]; SEGMENT_LINES];
        padded.as_flattened_mut()[..tokens.len()].copy_from_slice(tokens);
        let lines = &padded[..tokens.len().div_ceil(LINE_TOKENS)];
        // A separate chain that ends here: the tail's length term is added before its lines.
        let mut end = *chain;
        let slot = self.start_block(&mut end, self.lines_per_block());
        let length = self.kernel.multiply(self.keys.tail, tokens.len() as u128);
        end.state = (u128::from_le_bytes(end.state) ^ length).to_le_bytes();
        let mut hash = [BlockHash::default()];
        let block = BlockBatch { slot, lines_per_block: lines.len(), lines };
        self.kernel.absorb(&self.keys, block, &mut end, &mut hash);
        Some(hash[0])
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
        let mut hashes = vec![BlockHash::default(); ids.len()];
        let mut chain = Chain::new(self.keys.ids);
        for (ids, hashes) in ids.chunks(SEGMENT_LINES).zip(hashes.chunks_mut(SEGMENT_LINES)) {
            let mut lines = [[0; LINE_TOKENS]; SEGMENT_LINES];
            for (line, id) in lines.iter_mut().zip(ids) {
                line[0] = *id as u32;
                line[1] = (id >> 32) as u32;
            }
            self.absorb(&mut chain, 1, &lines[..ids.len()], hashes);
        }
        hashes
    }

    fn lines_per_block(&self) -> usize {
        self.block_tokens.div_ceil(LINE_TOKENS)
    }

    /// For whole blocks with a size that is not a multiple of a line: pads each with zeros.
    fn absorb_padded(&self, chain: &mut Chain, tokens: &[u32], hashes: &mut [BlockHash]) {
        let lines_each = self.lines_per_block();
        let blocks_max = SEGMENT_LINES / lines_each;
        let batches = tokens.chunks(blocks_max * self.block_tokens);
        for (tokens, hashes) in batches.zip(hashes.chunks_mut(blocks_max)) {
            let mut padded = [[0; LINE_TOKENS]; SEGMENT_LINES];
            let blocks = tokens.chunks_exact(self.block_tokens);
            for (lines, block) in padded.chunks_exact_mut(lines_each).zip(blocks) {
                lines.as_flattened_mut()[..block.len()].copy_from_slice(block);
            }
            self.absorb(chain, lines_each, &padded[..hashes.len() * lines_each], hashes);
        }
    }

    /// Advances `chain` over blocks of whole lines and writes their hashes.
    fn absorb(
        &self,
        chain: &mut Chain,
        lines_each: usize,
        mut lines: &[TokenLine],
        mut hashes: &mut [BlockHash],
    ) {
        while !hashes.is_empty() {
            let slot = self.start_block(chain, lines_each);
            let in_segment = hashes.len().min((SEGMENT_LINES - slot) / lines_each);
            let (now, later) = std::mem::take(&mut hashes).split_at_mut(in_segment);
            let (own, rest) = lines.split_at(in_segment * lines_each);
            self.kernel.absorb(
                &self.keys,
                BlockBatch { slot, lines_per_block: lines_each, lines: own },
                chain,
                now,
            );
            chain.in_segment += in_segment as u8;
            (lines, hashes) = (rest, later);
        }
    }

    /// Advances the state to where the next block is added, and returns its first line of keys.
    /// Blocks do not cross segments: lines too few for a whole block stay unused.
    fn start_block(&self, chain: &mut Chain, lines_each: usize) -> usize {
        if usize::from(chain.in_segment) == SEGMENT_LINES / lines_each {
            let state = u128::from_le_bytes(chain.state);
            chain.state = self.kernel.multiply(state, self.keys.step).to_le_bytes();
            chain.in_segment = 0;
        }
        usize::from(chain.in_segment) * lines_each
    }
}
