//! Cuts tokens into blocks and gives each a keyed hash that answers for the whole prefix before it.
//!
//! A [`BlockHash`](crate::id::BlockHash) stands for everything that decides the bytes of a block: the
//! manifest, the tenant, every earlier token and the block's own tokens. It is the AES image of a
//! universal hash of the prefix, with five bytes that say where in the chain the block is and what it has
//! in common with its neighbours: `docs/adr/0016-prompt-hash.md` has the formula and the proof, `hasher.rs` the chain, `keys.rs` the keys, `field.rs` and `portable.rs` the arithmetic that runs
//! anywhere, `x86.rs` the same arithmetic with vector instructions.
//!
//! Not here: who holds a block ([`crate::index`]) and the bytes themselves. The construction is fixed: a
//! change of it is a change of every key of every cluster, and takes new domain strings.

mod chain;
mod field;
mod hasher;
mod kernel;
mod keys;
mod manifest;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

pub use chain::Chain;
pub use hasher::PrefixHasher;
pub use kernel::Level;
pub use manifest::{BLOCK_TOKENS_MAX, Difference, IdentityManifest, KeyForm, ManifestError};
