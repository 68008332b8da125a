//! How many blocks are on their way between DRAM and SSD at once: about as many bytes whatever length blocks have, since
//! one flush commits what was written before it, and one for a few small blocks costs as much as one for many.
//!
//! Not here: which of them may begin (`store`), and how they are written (`writing`).

/// Bytes that are being written while nobody reads: a flush covers half of them while the device takes the other half.
const DEMOTED_BYTES: usize = 32 << 20;
/// Demotions of large blocks at least, which are enough bytes, and of small ones at most: beyond it each is a few pages, and
/// whoever keeps account of them is the limit.
const DEMOTIONS: (usize, usize) = (32, 512);
/// One in so many of the demotions goes on while a reader waits.
const BESIDE_READERS_PART: usize = 4;
/// Records beyond those of moves.
const SPARE_RECORDS: usize = 16;

/// Moves in flight on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Blocks being written at most: two thirds of all moves, the rest is left to loads.
    pub demotions: usize,
    /// The same while a reader waits for a load that DRAM has room for: those are what his read finds before it in the
    /// device. Without room they are what makes it, so that the reader waits for them too.
    pub demotions_beside_readers: usize,
    /// Moves in both directions.
    pub moves: usize,
}

impl Depth {
    /// For frames of up to this length. As for large ones under test, where files of few small segments are wanted;
    /// `deep` is what it is otherwise.
    #[must_use]
    pub const fn of(frame_bytes: usize) -> Depth {
        if cfg!(test) { Depth::flat() } else { Depth::deep(frame_bytes) }
    }

    /// As many bytes of frames of this length as of large ones, up to a number.
    pub(super) const fn deep(frame_bytes: usize) -> Depth {
        Depth::with(frame_bytes, DEMOTED_BYTES)
    }

    /// That of large frames.
    pub(super) const fn flat() -> Depth {
        Depth::with(0, 0)
    }

    const fn with(frame_bytes: usize, demoted_bytes: usize) -> Depth {
        let (least, most) = DEMOTIONS;
        let by_bytes = demoted_bytes / if frame_bytes == 0 { 1 } else { frame_bytes };
        let demotions = if by_bytes < least {
            least
        } else if by_bytes > most {
            most
        } else {
            by_bytes
        };
        Depth {
            demotions,
            demotions_beside_readers: demotions / BESIDE_READERS_PART,
            moves: demotions + demotions / 2,
        }
    }

    /// Records beyond a device's capacity, for blocks that are between two places: its part of one for each move, and some.
    #[must_use]
    pub const fn staging_records(self, devices: usize) -> u64 {
        (self.moves.div_ceil(if devices == 0 { 1 } else { devices }) + SPARE_RECORDS) as u64
    }
}

/// The deepest of all.
pub(super) const DEPTH_MAX: Depth = Depth::of(0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_are_as_many_bytes_in_flight_as_large_ones_up_to_a_number() {
        let of = Depth::deep;
        let demotions = [64 << 20, 1 << 20, 256 << 10, 64 << 10, 100].map(|bytes| of(bytes).demotions);
        assert_eq!(demotions, [32, 32, 128, 512, 512]);
        let large = Depth { demotions: 32, demotions_beside_readers: 8, moves: 48 };
        assert_eq!((of(2 << 20), Depth::flat(), large.staging_records(1)), (large, large, 64));
        assert_eq!(large.staging_records(5), 26, "devices have a part of the moves each");
        let most = of(0).moves;
        assert!(
            (0..4 << 20).step_by(4099).map(of).all(|depth| (depth.demotions..=most).contains(&depth.moves))
        );
    }
}
