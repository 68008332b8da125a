//! Storage media of this node besides DRAM, which is `arena`. One folder per medium.

pub mod gpu;
pub mod ssd;

use kv_core::id::{BlockHash, Generation};

/// A block under one generation of weights. A node may hold an earlier and the current version of
/// the same hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockVersion {
    /// Hash of its tokens.
    pub hash: BlockHash,
    /// Generation of the weights that computed it.
    pub generation: Generation,
}
