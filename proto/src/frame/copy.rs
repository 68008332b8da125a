//! Copies bytes and computes their CRC32C on the way, so that they come from memory once.
//!
//! Not here: which bytes belong to which checksum (`super`).

/// Bytes copied before their checksum is computed. Both ends of a piece stay in the first-level cache (32 KiB and more),
/// and a piece is long enough that the checksum's three streams are worth their joining.
const PIECE_BYTES: usize = 6 << 10;

/// Copies `from` to `to`, which are of one length, and gives the CRC32C of what `to` holds then: a copy that went wrong is
/// noticed as much as bytes that were wrong before.
pub(super) fn copy_crc32c(to: &mut [u8], from: &[u8]) -> u32 {
    let mut crc = 0;
    for (to, from) in to.chunks_mut(PIECE_BYTES).zip(from.chunks(PIECE_BYTES)) {
        to.copy_from_slice(from);
        crc = crc32c::crc32c_append(crc, to);
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_sum_of_the_whole() {
        let from: Vec<u8> =
            (0..5 * PIECE_BYTES as u32 + 77).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        for bytes in [0, 1, 63, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, from.len()] {
            let mut to = vec![0; bytes];
            assert_eq!(copy_crc32c(&mut to, &from[..bytes]), crc32c::crc32c(&from[..bytes]), "{bytes} bytes");
            assert_eq!(to, from[..bytes], "{bytes} bytes");
        }
    }
}
