//! The block frame: a block's bytes with what is needed to trust them.
//!
//! Layout (little endian): magic `KVF1` · version u16 · header bytes u16 · key form u8 · three zero bytes ·
//! slice count u32 · identity 16 · hash 16 · per slice (bytes u32, CRC32C u32) · CRC32C of the header ·
//! then the slices, layer-major, one after another. The same bytes travel on the wire and lie on SSD.

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};

/// A parsed frame: header checked, payload not yet verified.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The whole encoded frame.
    pub bytes: Bytes,
    /// Identity the bytes claim.
    pub identity: IdentityDigest,
    /// Hash the bytes claim.
    pub hash: BlockHash,
}
