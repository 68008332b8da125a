//! BLAKE3 of many equally long messages at once, one in each lane of a vector register.
//!
//! Each result equals `blake3::keyed_hash` of the message, cut to [`NODE_BYTES`]. Not here: the
//! meaning of the messages (`hasher.rs`).

use blake3::IncrementCounter;
use blake3::platform::{MAX_SIMD_DEGREE_OR_2, Platform, words_from_le_bytes_32};

/// Bytes of a hash that the tree keeps: more than the digest of a block has.
pub(super) const NODE_BYTES: usize = 16;

/// A hash within the tree.
pub(super) type Node = [u8; NODE_BYTES];

/// Bytes that BLAKE3 takes in one compression.
pub(super) const COMPRESSION_BYTES: usize = 64;

/// Messages that [`Lanes::hash`] takes at a time: the lanes of the widest register.
pub(super) const LANES_MAX: usize = MAX_SIMD_DEGREE_OR_2;

/// Bytes of a BLAKE3 hash.
pub(super) const OUTPUT_BYTES: usize = 32;

/// Flags of a compression (BLAKE3, section 2.2): of the first one of a chunk, of the last one, of
/// the last one of a message, and of all of a keyed hash.
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 1 << 1;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// A key of BLAKE3.
pub(super) type LaneKey = [u32; 8];

/// The words of a key.
pub(super) fn lane_key(bytes: &[u8; OUTPUT_BYTES]) -> LaneKey {
    words_from_le_bytes_32(bytes)
}

/// Instruction sets for hashing, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// One message at a time, on every machine.
    Portable,
    /// Four lanes: every x86-64 processor since about 2008.
    Sse41,
    /// Eight lanes: since about 2013.
    Avx2,
    /// Sixteen lanes: since Skylake-X and Zen 4.
    Avx512,
    /// Four lanes on ARM.
    Neon,
}

impl SimdLevel {
    /// All levels, slowest first; a machine has those of its architecture.
    pub const ALL: [SimdLevel; 5] =
        [SimdLevel::Portable, SimdLevel::Sse41, SimdLevel::Avx2, SimdLevel::Avx512, SimdLevel::Neon];
}

/// The implementation for one level.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lanes {
    platform: Platform,
    level: SimdLevel,
}

impl Lanes {
    /// The fastest that this machine has.
    pub(super) fn fastest() -> Self {
        let found = SimdLevel::ALL.into_iter().rev().find_map(Self::at);
        found.unwrap_or(Self { platform: Platform::portable(), level: SimdLevel::Portable })
    }

    /// The implementation for this level, if the machine has it.
    pub(super) fn at(level: SimdLevel) -> Option<Self> {
        let platform = match level {
            SimdLevel::Portable => Some(Platform::portable()),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Sse41 => Platform::sse41(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => Platform::avx2(),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => Platform::avx512(),
            #[cfg(target_arch = "aarch64")]
            SimdLevel::Neon => Platform::neon(),
            #[allow(unreachable_patterns, reason = "which levels remain depends on the architecture")]
            _ => None,
        };
        platform.map(|platform| Self { platform, level })
    }

    pub(super) fn level(self) -> SimdLevel {
        self.level
    }

    /// The keyed hash of one message of a single compression.
    #[inline]
    pub(super) fn hash_one(self, key: &LaneKey, message: &[u8; COMPRESSION_BYTES]) -> [u8; OUTPUT_BYTES] {
        let mut output = [0; OUTPUT_BYTES];
        self.hash_into(key, &[message], &mut output);
        output
    }

    /// The keyed hashes of these messages, at most [`LANES_MAX`], of `BYTES` each: a multiple of
    /// [`COMPRESSION_BYTES`], and at most the 1,024 of a chunk.
    #[inline]
    pub(super) fn hash<const BYTES: usize>(
        self,
        key: &LaneKey,
        messages: &[[u8; BYTES]],
    ) -> [[u8; OUTPUT_BYTES]; LANES_MAX] {
        const { assert!(BYTES.is_multiple_of(COMPRESSION_BYTES) && BYTES > 0 && BYTES <= 1024) };
        let mut inputs: [&[u8; BYTES]; LANES_MAX] = [&[0; BYTES]; LANES_MAX];
        for (input, message) in inputs.iter_mut().zip(messages) {
            *input = message;
        }
        let lanes = messages.len().min(LANES_MAX);
        let mut outputs = [[0; OUTPUT_BYTES]; LANES_MAX];
        self.hash_into(key, &inputs[..lanes], outputs.as_flattened_mut());
        outputs
    }

    /// Writes the keyed hashes of messages, one behind the other.
    #[inline]
    fn hash_into<const BYTES: usize>(self, key: &LaneKey, messages: &[&[u8; BYTES]], outputs: &mut [u8]) {
        let (no, flags, start, end) = (IncrementCounter::No, KEYED_HASH, CHUNK_START, CHUNK_END | ROOT);
        self.platform.hash_many(messages, key, 0, no, flags, start, end, outputs);
    }
}

/// The first bytes of a hash.
#[inline]
pub(super) fn node(output: &[u8; OUTPUT_BYTES]) -> Node {
    let [low @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = *output;
    low
}
