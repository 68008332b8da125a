//! A frame whose bytes come from the front, piece by piece: what is there is checked while the rest is on its way.
//!
//! Not here: where the pieces come from, and the checks of a frame that is there (`super`).

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};

use super::copy::crc32c;
use super::header::{self, Need, parse_header};
use super::{Frame, FrameError};

/// How much of a frame was checked.
#[derive(Debug, Default)]
pub struct Arriving {
    slices: usize,
}

impl Arriving {
    /// Checks the slices that lie whole in `start`, the leading bytes of the frame, and were not checked before. Those
    /// bytes must not change any more.
    ///
    /// # Errors
    /// Names what is wrong with the header or the first slice that differs; [`Self::finish`] says it again.
    pub fn advance(&mut self, start: &[u8]) -> Result<(), FrameError> {
        if let Need::Header(_) = parse_header(start)? {
            return Ok(());
        }
        for (layer, entry) in header::entries(start).enumerate().skip(self.slices) {
            let Some(slice) = start.get(entry.range()) else { break };
            if crc32c(slice) != entry.crc {
                return Err(FrameError::SliceChecksum { layer });
            }
            self.slices = layer + 1;
        }
        Ok(())
    }

    /// The whole frame, once all of it is there and all of it was checked: it is block `hash` of `identity`.
    ///
    /// # Errors
    /// As [`Frame::parse`] and [`Frame::verify`].
    pub fn finish(
        mut self,
        bytes: Bytes,
        identity: IdentityDigest,
        hash: BlockHash,
    ) -> Result<Frame, FrameError> {
        // Of exactly the length that its table says: every slice lies in it.
        let frame = Frame::parse(bytes)?;
        frame.verify_claims(identity, hash)?;
        self.advance(&frame.bytes)?;
        Ok(frame)
    }
}
