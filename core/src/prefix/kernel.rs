//! The two inner operations of the block hash, and which instructions carry them out.
//!
//! All levels give equal results; the fastest one that the machine has is chosen when a hasher is made.
//! Not here: the operations themselves (`portable.rs`, `x86.rs`).

use super::chain::Chain;
use super::keys::{Blocks, Keys};
use super::{field, portable};
use crate::id::BlockHash;
#[cfg(target_arch = "x86_64")]
use crate::prefix::x86;

/// Instructions that hash, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Integer multiplications; AES as the package `aes` finds it. On every machine.
    Portable,
    /// Carry-less multiplication, AES and AVX, on 128-bit registers: x86-64 processors since about 2011.
    Pclmul,
    /// The same on four blocks in a 512-bit register: since Ice Lake and Zen 4.
    Avx512,
}

impl Level {
    /// All levels, slowest first.
    pub const ALL: [Level; 3] = [Level::Portable, Level::Pclmul, Level::Avx512];
}

/// Carries the operations out at one level.
#[derive(Clone)]
pub(super) enum Kernel {
    Portable(Box<portable::Cipher>),
    #[cfg(target_arch = "x86_64")]
    Pclmul(x86::Pclmul),
    #[cfg(target_arch = "x86_64")]
    Avx512(Box<x86::Avx512>),
}

impl Kernel {
    /// The fastest one this machine has.
    pub(super) fn fastest(cipher_key: &[u8; 16]) -> Self {
        let found = Level::ALL.into_iter().rev().find_map(|level| Self::at(level, cipher_key));
        found.unwrap_or_else(|| Self::portable(cipher_key))
    }

    /// The one of this level, when the machine has it.
    pub(super) fn at(level: Level, cipher_key: &[u8; 16]) -> Option<Self> {
        match level {
            Level::Portable => Some(Self::portable(cipher_key)),
            #[cfg(target_arch = "x86_64")]
            Level::Pclmul => x86::Pclmul::detect(cipher_key).map(Self::Pclmul),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => x86::Avx512::detect(cipher_key).map(|kernel| Self::Avx512(Box::new(kernel))),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Pclmul | Level::Avx512 => None,
        }
    }

    fn portable(cipher_key: &[u8; 16]) -> Self {
        Self::Portable(Box::new(portable::Cipher::new(cipher_key)))
    }

    pub(super) fn level(&self) -> Level {
        match self {
            Self::Portable(_) => Level::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Pclmul(_) => Level::Pclmul,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Level::Avx512,
        }
    }

    /// Adds blocks to the chain and writes the hash of each: the image of the state after it, in its place.
    pub(super) fn absorb(
        &self,
        keys: &Keys,
        blocks: Blocks<'_>,
        chain: &mut Chain,
        hashes: &mut [BlockHash],
    ) {
        match self {
            Self::Portable(cipher) => cipher.absorb(keys, blocks, chain, hashes),
            #[cfg(target_arch = "x86_64")]
            Self::Pclmul(kernel) => kernel.absorb(keys, blocks, chain, hashes),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(kernel) => kernel.absorb(keys, blocks, chain, hashes),
        }
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
