//! The two inner operations of the block hash, dispatched to an instruction set.
//!
//! All levels give equal results; a new hasher takes the fastest that the machine has. Not here:
//! the operations themselves (`portable.rs`, `cpu/src/block_hash/`).

use kvfleet_cpu::block_hash::{self, BlockBatch};

use super::chain::{Chain, HashWriter};
use super::keys::HashKeys;
use super::{field, portable};
use crate::id::BlockHash;

/// Instruction sets for hashing, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// Integer multiplications, with the AES that the crate `aes` detects. Available on every
    /// machine.
    Portable,
    /// Carry-less multiplication, AES and AVX, on 128-bit registers: x86-64 processors since about 2011.
    Pclmul,
    /// The same on four blocks in a 512-bit register: since Ice Lake and Zen 4.
    Avx512,
}

impl SimdLevel {
    /// All levels, slowest first.
    pub const ALL: [SimdLevel; 3] = [SimdLevel::Portable, SimdLevel::Pclmul, SimdLevel::Avx512];
}

/// The implementation for one level.
#[derive(Clone)]
pub(super) enum Kernel {
    Portable(Box<portable::Cipher>),
    #[cfg(target_arch = "x86_64")]
    Pclmul(block_hash::Pclmul),
    #[cfg(target_arch = "x86_64")]
    Avx512(Box<block_hash::Avx512>),
}

impl Kernel {
    /// The fastest that this machine has.
    pub(super) fn fastest(cipher_key: &[u8; 16]) -> Self {
        let found = SimdLevel::ALL.into_iter().rev().find_map(|level| Self::at(level, cipher_key));
        found.unwrap_or_else(|| Self::portable(cipher_key))
    }

    /// The implementation for this level, if the machine has it.
    pub(super) fn at(level: SimdLevel, cipher_key: &[u8; 16]) -> Option<Self> {
        match level {
            SimdLevel::Portable => Some(Self::portable(cipher_key)),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Pclmul => block_hash::Pclmul::detect(cipher_key).map(Self::Pclmul),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => {
                block_hash::Avx512::detect(cipher_key).map(|kernel| Self::Avx512(Box::new(kernel)))
            }
            #[cfg(not(target_arch = "x86_64"))]
            SimdLevel::Pclmul | SimdLevel::Avx512 => None,
        }
    }

    fn portable(cipher_key: &[u8; 16]) -> Self {
        Self::Portable(Box::new(portable::Cipher::new(cipher_key)))
    }

    pub(super) fn level(&self) -> SimdLevel {
        match self {
            Self::Portable(_) => SimdLevel::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Pclmul(_) => SimdLevel::Pclmul,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => SimdLevel::Avx512,
        }
    }

    /// Adds blocks to the chain and writes their hashes: the encrypted state after each block, with
    /// its header.
    pub(super) fn absorb(
        &self,
        keys: &HashKeys,
        blocks: BlockBatch<'_>,
        chain: &mut Chain,
        hashes: &mut [BlockHash],
    ) {
        let Chain { state, position, .. } = chain;
        let mut images = HashWriter { hashes, position: *position };
        match self {
            Self::Portable(cipher) => cipher.absorb(&keys.lines, blocks, state, &mut images),
            #[cfg(target_arch = "x86_64")]
            Self::Pclmul(kernel) => kernel.absorb(&keys.lines, blocks, state, &mut images),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(kernel) => kernel.absorb(&keys.lines, blocks, state, &mut images),
        }
        *position = images.position;
    }

    /// Product of two elements of the field.
    pub(super) fn multiply(&self, left: u128, right: u128) -> u128 {
        match self {
            Self::Portable(_) => field::multiply(left, right),
            #[cfg(target_arch = "x86_64")]
            Self::Pclmul(kernel) => kernel.multiply(left, right),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(kernel) => kernel.multiply(left, right),
        }
    }
}
