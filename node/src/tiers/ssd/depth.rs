//! Number of blocks in transit between DRAM and SSD: roughly constant in bytes for all block
//! lengths. A flush commits all earlier writes, so one flush for a few small blocks costs as much
//! as one for many.
//!
//! Not here: which of them may start (`store`), and how they are written (`writer`).

/// Bytes being written while no reader waits: a flush covers half of them while the device accepts
/// the other half.
const DEMOTION_BYTES: usize = 32 << 20;
/// Minimum of demotions, for large blocks, which are enough bytes; maximum, for small blocks,
/// beyond which bookkeeping is the bottleneck.
const DEMOTIONS: (usize, usize) = (32, 512);
/// Divisor of the demotions that continue while a reader waits.
const READERS_WAITING_DIVISOR: usize = 4;
/// Additional records beyond those in transit.
const SPARE_RECORDS: usize = 16;

/// Limits of blocks in transit on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Maximum blocks being written: two thirds of all moves; the rest is left for loads.
    pub demotions: usize,
    /// The same while a reader waits for a load that DRAM has space for: these writes delay the
    /// read in the device. If DRAM has no space, demotions create it, and the reader waits for them
    /// too.
    pub demotions_while_readers_wait: usize,
    /// Maximum moves in both directions.
    pub moves: usize,
}

impl Depth {
    /// For frames of up to this length. Tests use the limits of large frames, since they need files
    /// of few small segments; `scaled_for` is the normal value.
    #[must_use]
    pub const fn for_frames(frame_bytes: usize) -> Depth {
        if cfg!(test) { Depth::base() } else { Depth::scaled_for(frame_bytes) }
    }

    /// As many bytes of frames of this length as of large ones, up to a number.
    pub(super) const fn scaled_for(frame_bytes: usize) -> Depth {
        Depth::with(frame_bytes, DEMOTION_BYTES)
    }

    /// The limits for large frames.
    pub(super) const fn base() -> Depth {
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
            demotions_while_readers_wait: demotions / READERS_WAITING_DIVISOR,
            moves: demotions + demotions / 2,
        }
    }

    /// Records beyond a device's capacity for blocks in transit: its share of one for each move,
    /// and some more.
    #[must_use]
    pub const fn staging_records(self, devices: usize) -> u64 {
        (self.moves.div_ceil(if devices == 0 { 1 } else { devices }) + SPARE_RECORDS) as u64
    }
}

/// The largest limits of all.
pub(super) const DEPTH_MAX: Depth = Depth::for_frames(0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_get_more_moves_up_to_a_limit() {
        let of = Depth::scaled_for;
        let demotions = [64 << 20, 1 << 20, 256 << 10, 64 << 10, 100].map(|bytes| of(bytes).demotions);
        assert_eq!(demotions, [32, 32, 128, 512, 512]);
        let large = Depth { demotions: 32, demotions_while_readers_wait: 8, moves: 48 };
        assert_eq!((of(2 << 20), Depth::base(), large.staging_records(1)), (large, large, 64));
        assert_eq!(large.staging_records(5), 26, "each device has a share of the moves");
        let most = of(0).moves;
        assert!(
            (0..4 << 20).step_by(4099).map(of).all(|depth| (depth.demotions..=most).contains(&depth.moves))
        );
    }
}
