//! Cuts tokens into blocks and gives each a keyed hash that covers the whole prefix before it.
//!
//! A [`BlockHash`](crate::id::BlockHash) covers everything that determines the bytes of a block:
//! the manifest, the tenant, every earlier token and the block's own tokens. It is the AES image of
//! a universal hash of the prefix. Five of its bytes hold the block's position in the chain and the
//! bits it shares with its neighbours. `docs/adr/0016-prompt-hash.md` has the formula and the
//! proof. `hasher.rs` has the chain, `keys.rs` the keys, `field.rs` and `portable.rs` the portable
//! arithmetic. `cpu/src/block_hash/` has the same with vector instructions.
//!
//! Not here: the holders of a block ([`crate::index`]) and its bytes. The construction is fixed: a
//! change of it changes every key of every cluster, and needs new domain strings.

mod chain;
mod field;
mod hasher;
mod kernel;
mod keys;
mod manifest;
mod portable;

#[cfg(test)]
mod tests;

pub use chain::Chain;
pub use hasher::PrefixHasher;
pub use kernel::SimdLevel;
pub use manifest::{BLOCK_TOKENS_MAX, IdentityManifest, KeyForm, ManifestDifference, ManifestError};
