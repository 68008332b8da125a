//! Maps keyed by block ids: ids are often small consecutive numbers, and no attacker chooses them.
//!
//! Not here: the keyed hashes of the product, which a trace does not have.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from block ids, about twice as fast as one that is safe against chosen keys.
pub type IdMap<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// Spreads an id over all 64 bits, like a hash.
#[must_use]
pub fn mix_bits(id: u64) -> u64 {
    let id = (id ^ (id >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (id ^ (id >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (id >> 32)
}

/// Hashes one id.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = mix_bits(self.0 ^ id);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
