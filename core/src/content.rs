//! Block bytes as a deterministic function of the block hash, so that a test can check every
//! fetched byte.
//!
//! For mock engines and checks only. The bytes are not cryptographically random, and they are not a
//! checksum (the frame has its own).

use crate::id::BlockHash;

/// Bytes written per step.
const STRIDE: usize = 8;

/// Odd constants of the splitmix and wyrand generators: full period, good avalanche.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const MIX: u64 = 0xE703_7ED1_A0B4_28DB;

/// The 8-byte word at `position` of the stream, a mixed counter. Any position is computed without
/// the others.
#[inline(always)]
fn word(seed: StreamSeed, position: u64) -> u64 {
    let counter = seed.0.wrapping_add(position.wrapping_mul(STEP));
    let product = u128::from(counter ^ MIX) * u128::from(counter ^ seed.1);
    #[expect(clippy::cast_possible_truncation, reason = "folds the two halves of the product")]
    let folded = (product as u64) ^ ((product >> 64) as u64);
    folded
}

/// A hash as two numbers.
#[derive(Clone, Copy)]
struct StreamSeed(u64, u64);

fn seed(hash: BlockHash) -> StreamSeed {
    let words = hash.words();
    StreamSeed(words.first ^ words.middle << 40, words.last)
}

/// Fills `bytes` with the content of block `hash`. A longer buffer continues a shorter one.
pub fn fill(hash: BlockHash, bytes: &mut [u8]) {
    fill_from(seed(hash), 0, bytes);
}

/// Fills `bytes` with the content of block `hash` from byte `start` on.
pub fn fill_at(hash: BlockHash, start: usize, bytes: &mut [u8]) {
    let seed = seed(hash);
    let (first_word, within) = ((start / STRIDE) as u64, start % STRIDE);
    let (head, rest) = bytes.split_at_mut(bytes.len().min((STRIDE - within) % STRIDE));
    head.copy_from_slice(&word(seed, first_word).to_le_bytes()[within..][..head.len()]);
    fill_from(seed, first_word + u64::from(within > 0), rest);
}

/// Fills `bytes` with the words of the stream from word `first` on.
fn fill_from(seed: StreamSeed, first: u64, bytes: &mut [u8]) {
    let (words, tail) = bytes.as_chunks_mut::<STRIDE>();
    let mut position = first;
    for chunk in words {
        *chunk = word(seed, position).to_le_bytes();
        position += 1;
    }
    let last = word(seed, position).to_le_bytes();
    let tail_bytes = tail.len();
    tail.copy_from_slice(&last[..tail_bytes]);
}

/// Whether `bytes` are exactly the content of block `hash`.
#[must_use]
pub fn matches(hash: BlockHash, bytes: &[u8]) -> bool {
    matches_from(seed(hash), 0, bytes)
}

/// Whether `bytes` equal the content of block `hash` from byte `start` on.
#[must_use]
pub fn matches_at(hash: BlockHash, start: usize, bytes: &[u8]) -> bool {
    let seed = seed(hash);
    let (first_word, within) = ((start / STRIDE) as u64, start % STRIDE);
    let (head, rest) = bytes.split_at(bytes.len().min((STRIDE - within) % STRIDE));
    let is_head = head == &word(seed, first_word).to_le_bytes()[within..][..head.len()];
    is_head && matches_from(seed, first_word + u64::from(within > 0), rest)
}

/// Whether `bytes` equal the words of the stream from word `first` on.
fn matches_from(seed: StreamSeed, first: u64, bytes: &[u8]) -> bool {
    let (words, tail) = bytes.as_chunks::<STRIDE>();
    let mut position = first;
    let mut difference = 0u64;
    for chunk in words {
        difference |= u64::from_le_bytes(*chunk) ^ word(seed, position);
        position += 1;
    }
    difference == 0 && tail == &word(seed, position).to_le_bytes()[..tail.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::HASH_BYTES;

    #[test]
    fn content_matches_itself_at_every_length() {
        let mut long = vec![0; 200];
        fill(BlockHash([7; _]), &mut long);
        for length in 0..long.len() {
            let mut bytes = vec![0; length];
            fill(BlockHash([7; _]), &mut bytes);
            assert!(matches(BlockHash([7; _]), &bytes));
            assert_eq!(bytes, long[..length], "a longer buffer continues a shorter one");
        }
    }

    #[test]
    fn any_byte_range_can_be_filled_and_checked() {
        let hash = BlockHash([7; _]);
        let mut whole = [0; 40];
        fill(hash, &mut whole);
        for (start, end) in (0..40).flat_map(|start| (start..40).map(move |end| (start, end))) {
            let mut part = whole[start..end].to_vec();
            assert!(matches_at(hash, start, &part), "{start}..{end}");
            let mut filled = vec![0; part.len()];
            fill_at(hash, start, &mut filled);
            assert_eq!(filled, part, "{start}..{end}");
            // Neighbouring bytes may be equal by chance; whole words are not.
            assert!(
                part.len() < STRIDE || !matches_at(hash, start + 1, &part),
                "{start}..{end} matched one byte further"
            );
            for at in 0..part.len() {
                part[at] ^= 1;
                assert!(!matches_at(hash, start, &part), "{start}..{end}: byte {at}");
                part[at] ^= 1;
            }
        }
    }

    #[test]
    fn detects_every_flipped_bit() {
        let mut bytes = vec![0; 77];
        fill(BlockHash([9; _]), &mut bytes);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches(BlockHash([9; _]), &bytes), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn neighbouring_hashes_differ_nearly_everywhere() {
        let mut zero = vec![0; 4096];
        fill(BlockHash([0; _]), &mut zero);
        for byte in 0..HASH_BYTES {
            for bit in 0..8 {
                let mut hash = [0; _];
                hash[byte] = 1 << bit;
                let mut other = vec![0; 4096];
                fill(BlockHash(hash), &mut other);
                let equal = zero.iter().zip(&other).filter(|(a, b)| a == b).count();
                assert!(equal < 128, "hash bit {byte}.{bit}: {equal} equal bytes");
            }
        }
    }

    #[test]
    fn content_has_no_short_period() {
        let mut bytes = vec![0; 1 << 16];
        fill(BlockHash([3; _]), &mut bytes);
        let (words, _) = bytes.as_chunks::<8>();
        let distinct: std::collections::BTreeSet<_> = words.iter().collect();
        assert_eq!(distinct.len(), words.len());
    }
}
