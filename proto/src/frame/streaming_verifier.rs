//! Verifies a frame that arrives from the front, piece by piece, while the rest is in transit.
//!
//! Not here: the source of the pieces, and the checks of a complete frame (`super`).

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};

use super::header::{self, BytesNeeded, parse_header};
use super::{Frame, FrameError};
use kvfleet_cpu::crc32c;

/// Progress of the verification of one frame.
#[derive(Debug, Default)]
pub struct StreamingVerifier {
    checked_slices: usize,
}

impl StreamingVerifier {
    /// Checks the slices that lie whole in `start`, the leading bytes of the frame, and were not
    /// checked before. Those bytes must not change afterwards.
    ///
    /// # Errors
    /// Names the header error or the first slice that differs; [`Self::finish`] returns the same
    /// error again.
    pub fn advance(&mut self, start: &[u8]) -> Result<(), FrameError> {
        if let BytesNeeded::Header(_) = parse_header(start)? {
            return Ok(());
        }
        for (layer, entry) in header::entries(start).enumerate().skip(self.checked_slices) {
            let Some(slice) = start.get(entry.range()) else { break };
            if crc32c(slice) != entry.crc {
                return Err(FrameError::SliceChecksum { layer });
            }
            self.checked_slices = layer + 1;
        }
        Ok(())
    }

    /// Completes the frame once all bytes are there and all are checked: it is block `hash` of
    /// `identity`.
    ///
    /// # Errors
    /// As [`Frame::parse`] and [`Frame::verify`].
    pub fn finish(
        mut self,
        bytes: Bytes,
        identity: IdentityDigest,
        hash: BlockHash,
    ) -> Result<Frame, FrameError> {
        // The frame has exactly the length that its table states, so it contains every slice.
        let frame = Frame::parse(bytes)?;
        frame.verify_ids_in_bytes(identity, hash)?;
        self.advance(&frame.bytes)?;
        Ok(frame)
    }
}
