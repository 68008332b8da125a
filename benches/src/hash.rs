//! Hashing a prompt: 112 bits that no other prompt has, keyed per tenant, against 64 bits without a
//! key and against a chain of keyed BLAKE3.
//!
//! Not here: the peers' own code; the same hash functions, called the same way, represent them.

use std::hint::black_box;

use benches::{BenchRow, Better, measure_time, side_by_side};
use kv_core::prefix::{IdentityManifest, PrefixHasher, SimdLevel};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::Effort;

pub(crate) const ABOUT: &str = "hashes of all blocks of a prompt, on one thread into a reused list, at each \
    instruction set level of this machine; against XXH3-64 with a seed over the bytes of each block and \
    again over parent and block, and against a chain of keyed BLAKE3 calls, one after the other";

const XXH3: &str = "XXH3-64, no key, chained";
const BLAKE3: &str = "BLAKE3, keyed, chained";

/// Tokens of the prompts: a long chat, and the longest context of common models.
const PROMPTS_TOKENS: [usize; 2] = [8_000, 131_072];
/// Tokens of a block in the engines' stock settings.
const BLOCK_TOKENS: usize = 16;
/// Tokens hashed per run, in whole prompts.
const RUN_TOKENS: u64 = 20_000_000;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let manifest = IdentityManifest { block_tokens: BLOCK_TOKENS as u32, ..IdentityManifest::default() };
    let hasher = PrefixHasher::new(&manifest, &[7; 32]);
    let mut rows = Vec::new();
    for prompt_tokens in PROMPTS_TOKENS {
        let tokens: Vec<u32> =
            (0..prompt_tokens as u32).map(|place| place.wrapping_mul(0x9e37_79b9) >> 15).collect();
        let expected = hasher.blocks(&tokens);
        for level in SimdLevel::ALL {
            let Some(hasher) = hasher.clone().at_level(level) else { continue };
            anyhow::ensure!(hasher.blocks(&tokens) == expected, "{level:?} gives different hashes");
            rows.extend(compare(effort, &hasher, &tokens));
        }
    }
    Ok(rows)
}

/// One level against both peers. The peers get the tokens as bytes, without conversion costs.
fn compare(effort: &Effort, hasher: &PrefixHasher, tokens: &[u32]) -> [BenchRow; 2] {
    let level = format!("{:?}", hasher.level()).to_lowercase();
    let name = format!("{} tokens in blocks of {BLOCK_TOKENS}, {level}", tokens.len());
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let prompts = effort.scaled(RUN_TOKENS / tokens.len() as u64);
    let (mut hashes, mut numbers, mut keyed) = (Vec::new(), Vec::new(), Vec::new());
    let mut ours =
        || cpu_us_per_prompt(prompts, || hasher.blocks_into(black_box(tokens), black_box(&mut hashes)));
    let xxh3 = || cpu_us_per_prompt(prompts, || xxh3_chain(black_box(&bytes), black_box(&mut numbers)));
    let blake3 =
        || cpu_us_per_prompt(prompts.div_ceil(10), || blake3_chain(black_box(&bytes), black_box(&mut keyed)));
    let row = |peer, outcome| BenchRow::new("hash", &name, "µs CPU", peer, Better::Lower, outcome);
    [
        row(XXH3, side_by_side(effort.runs, &mut ours, xxh3)),
        row(BLAKE3, side_by_side(effort.runs, &mut ours, blake3)),
    ]
}

/// CPU microseconds per prompt.
fn cpu_us_per_prompt(prompts: u64, mut hash: impl FnMut()) -> f64 {
    measure_time(|| (0..prompts).for_each(|_| hash())).1.cpu_us_per(prompts)
}

/// A hash of each block's bytes, then one of the parent's hash and the block's own.
fn xxh3_chain(bytes: &[u8], hashes: &mut Vec<u64>) {
    hashes.clear();
    let mut parent = None;
    for block in bytes.chunks(4 * BLOCK_TOKENS) {
        let own = xxh3_64_with_seed(block, SEED);
        let hash = parent.map_or(own, |parent: u64| {
            let mut pair = [0; 16];
            pair[..8].copy_from_slice(&parent.to_le_bytes());
            pair[8..].copy_from_slice(&own.to_le_bytes());
            xxh3_64_with_seed(&pair, SEED)
        });
        parent = Some(hash);
        hashes.push(hash);
    }
}

/// Arbitrary seed.
const SEED: u64 = 1337;

/// Parent, token count and tokens of each block under one key, truncated to 128 bits.
fn blake3_chain(bytes: &[u8], hashes: &mut Vec<[u8; 16]>) {
    hashes.clear();
    let (keyed, mut parent) = (blake3::Hasher::new_keyed(&[7; 32]), [0; 16]);
    for block in bytes.chunks(4 * BLOCK_TOKENS) {
        let mut hasher = keyed.clone();
        hasher.update(&parent).update(&(block.len() as u64 / 4).to_le_bytes()).update(block);
        parent.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        hashes.push(parent);
    }
}
