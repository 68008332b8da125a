//! Cuts tokens into blocks and gives each a keyed hash that covers the whole prefix before it.
//!
//! A [`BlockHash`](crate::id::BlockHash) covers everything that determines the bytes of a block:
//! the manifest, the tenant, every earlier token and the block's own tokens. It is the end of a tree
//! of keyed BLAKE3 hashes, with five bytes before it that give the block's position in the chain and
//! the bits it shares with its neighbours. `docs/reference/hash.md` specifies it, and ADR 0085 says
//! why. `hasher.rs` has the tree, `lanes.rs` BLAKE3 of many messages at once, `keys.rs` the keys.
//!
//! Not here: the holders of a block ([`crate::index`]) and its bytes. The construction is fixed: a
//! change of it changes every key of every cluster, and needs new domain strings.

mod chain;
mod hasher;
mod keys;
mod lanes;
mod manifest;

#[cfg(test)]
mod tests;

pub use chain::{Chain, ChainNodes};
pub use hasher::PrefixHasher;
pub use lanes::SimdLevel;
pub use manifest::{BLOCK_TOKENS_MAX, IdentityManifest, KeyForm, ManifestDifference, ManifestError};
