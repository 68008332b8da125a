//! The header of a frame without its slices: the ids, and the length and checksum of each slice. If
//! slices travel one by one, each is checked against it on arrival.
//!
//! Not here: the layout (`header.rs`), and the order of the slices.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use kv_core::id::{BlockHash, IdentityDigest};

use super::header::{
    Header, START_BYTES, entry_at, header_len, parse_header, payload_len, slice_count, table_payload_len,
};
use super::{BytesNeeded, Frame, FrameError, KeyForm, verify_ids};
use kvfleet_cpu::{copy_crc32c, crc32c};

/// A frame's header, parsed and matching its own checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameHead {
    header: Bytes,
    slices: usize,
    payload_bytes: usize,
    identity: IdentityDigest,
    hash: BlockHash,
}

impl FrameHead {
    /// Number of bytes that [`Self::length`] needs.
    pub const START_BYTES: usize = START_BYTES;

    /// Length of the header that starts with these [`Self::START_BYTES`] bytes.
    ///
    /// # Errors
    /// When they do not begin a frame within the limits.
    pub fn length(start: &[u8; START_BYTES]) -> Result<usize, FrameError> {
        match parse_header(start)? {
            BytesNeeded::Header(bytes) => Ok(bytes),
            // Every header is longer than its start.
            BytesNeeded::Frame(_) => Err(FrameError::Header("length does not fit the slice count")),
        }
    }

    /// Reads the header at the start of `bytes`; ignores the bytes after it.
    ///
    /// # Errors
    /// Names the first problem; never panics, whatever the bytes.
    pub fn read(bytes: &[u8]) -> Result<FrameHead, FrameError> {
        let Header { identity, hash, slices, .. } = Header::read(bytes)?;
        let payload_bytes = table_payload_len(bytes, slices)?;
        // A copy, so that a kept header does not keep its frame in memory.
        let header = Bytes::copy_from_slice(&bytes[..header_len(slices)]);
        Ok(FrameHead { header, slices, payload_bytes, identity, hash })
    }

    /// The header of a frame with slices of these lengths and CRC32C checksums.
    ///
    /// # Errors
    /// When a limit is exceeded, or the number of checksums differs from the number of slices.
    pub fn new(
        identity: IdentityDigest,
        hash: BlockHash,
        key_form: KeyForm,
        slice_bytes: &[u32],
        sums: &[u32],
    ) -> Result<FrameHead, FrameError> {
        let slices = slice_count(slice_bytes.len())?;
        let payload_bytes = payload_len(slice_bytes.iter().copied())?;
        if sums.len() != slices {
            return Err(FrameError::SliceCount(sums.len()));
        }
        let mut header = BytesMut::zeroed(header_len(slices));
        Header { identity, hash, key_form, slices }.write(slice_bytes, sums, &mut header);
        Ok(FrameHead { header: header.freeze(), slices, payload_bytes, identity, hash })
    }

    /// The frame of these slices. Their content is not checked.
    ///
    /// # Errors
    /// When a length differs from the header.
    pub fn frame(&self, slices: &[Bytes]) -> Result<Frame, FrameError> {
        let lengths =
            slices.iter().enumerate().all(|(layer, slice)| self.slice_bytes(layer) == Some(slice.len()));
        if slices.len() != self.slices || !lengths {
            return Err(FrameError::Header("payload is not the sum of its slices"));
        }
        let mut bytes = BytesMut::with_capacity(self.frame_bytes());
        bytes.extend_from_slice(&self.header);
        slices.iter().for_each(|slice| bytes.extend_from_slice(slice));
        Ok(Frame { bytes: bytes.freeze(), identity: self.identity, hash: self.hash })
    }

    /// The encoded header.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.header
    }

    /// Encoded size of the whole frame in bytes.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.header.len() + self.payload_bytes
    }

    /// Number of slices.
    #[must_use]
    pub fn slice_count(&self) -> usize {
        self.slices
    }

    /// Length of a layer's slice in bytes; `None` if there is no such layer.
    #[must_use]
    pub fn slice_bytes(&self, layer: usize) -> Option<usize> {
        self.entry(layer).map(|(bytes, _)| bytes)
    }

    /// Total bytes of the slices of these layers. Layers beyond the last count as 0.
    #[must_use]
    pub fn bytes_of(&self, layers: Range<usize>) -> usize {
        layers.map_while(|layer| self.slice_bytes(layer)).sum()
    }

    /// Checks that this is the header of block `hash` of `identity`.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn verify(&self, identity: IdentityDigest, hash: BlockHash) -> Result<(), FrameError> {
        verify_ids(&[self.identity], &[self.hash], identity, hash)
    }

    /// Checks that `slice` holds the bytes of a layer's slice.
    ///
    /// # Errors
    /// When it does not, or there is no such layer.
    pub fn verify_slice(&self, layer: usize, slice: &[u8]) -> Result<(), FrameError> {
        let is_it =
            self.entry(layer).is_some_and(|(bytes, sum)| bytes == slice.len() && sum == crc32c(slice));
        if is_it { Ok(()) } else { Err(FrameError::SliceChecksum { layer }) }
    }

    /// Copies a layer's slice to `to` and checks it on the way. After an error the content of `to`
    /// is unspecified.
    ///
    /// # Errors
    /// When the checksum or a length differs, or there is no such layer.
    pub fn copy_slice(&self, layer: usize, from: &[u8], to: &mut [u8]) -> Result<(), FrameError> {
        let Some((bytes, sum)) = self.entry(layer) else { return Err(FrameError::SliceChecksum { layer }) };
        let fits = from.len() == bytes && to.len() == bytes;
        if fits && copy_crc32c(to, from) == sum { Ok(()) } else { Err(FrameError::SliceChecksum { layer }) }
    }

    fn entry(&self, layer: usize) -> Option<(usize, u32)> {
        (layer < self.slices).then(|| entry_at(&self.header, layer))
    }
}

impl Frame {
    /// The header of this frame, in its own memory.
    ///
    /// # Errors
    /// When the bytes do not begin with a header.
    pub fn head(&self) -> Result<FrameHead, FrameError> {
        FrameHead::read(&self.bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::seal;
    use super::*;

    const IDENTITY: IdentityDigest = IdentityDigest([3; 16]);
    const HASH: BlockHash = BlockHash([7; _]);

    fn frame() -> Frame {
        seal(IDENTITY, HASH, KeyForm::Raw, &[3, 0, 5], b"aaabbbbb").unwrap()
    }

    #[test]
    fn a_header_describes_its_frame() {
        let frame = frame();
        let head = frame.head().unwrap();
        let start: [u8; START_BYTES] = frame.bytes[..START_BYTES].try_into().unwrap();
        assert_eq!(FrameHead::length(&start).unwrap(), head.bytes().len());
        assert_eq!(
            head,
            FrameHead::read(head.bytes()).unwrap(),
            "the header alone reads the same as the frame"
        );
        assert_eq!((head.slice_count(), head.frame_bytes()), (3, frame.bytes.len()));
        assert_eq!([0, 1, 2, 3].map(|layer| head.slice_bytes(layer)), [Some(3), Some(0), Some(5), None]);
        assert_eq!([head.bytes_of(0..2), head.bytes_of(1..9), head.bytes_of(7..9)], [3, 5, 0]);
        assert_eq!(head.verify(IDENTITY, HASH), Ok(()));
        assert!(head.verify(IDENTITY, BlockHash([8; _])).is_err());
        assert!(head.verify(IdentityDigest([8; 16]), HASH).is_err());
    }

    #[test]
    fn a_header_shares_no_memory_with_its_frame() {
        let frame = frame();
        let head = frame.head().unwrap();
        assert!(frame.bytes.is_unique() && !head.bytes().is_empty());
    }

    #[test]
    fn a_slice_is_checked_in_place_and_while_copied() {
        let head = frame().head().unwrap();
        assert_eq!(head.verify_slice(2, b"bbbbb"), Ok(()));
        assert_eq!(head.verify_slice(1, b""), Ok(()));
        for (layer, wrong) in [(2, &b"bbbba"[..]), (2, b"bbbb"), (0, b"bbbbb"), (3, b"")] {
            assert_eq!(head.verify_slice(layer, wrong), Err(FrameError::SliceChecksum { layer }));
            let mut to = vec![0; wrong.len()];
            assert!(head.copy_slice(layer, wrong, &mut to).is_err());
        }
        let mut to = [0; 5];
        assert_eq!(head.copy_slice(2, b"bbbbb", &mut to), Ok(()));
        assert_eq!(&to, b"bbbbb");
        assert!(head.copy_slice(2, b"bbbbb", &mut [0; 4]).is_err());
    }

    #[test]
    fn rejects_changed_and_truncated_headers() {
        let whole = frame().head().unwrap();
        for at in 0..whole.bytes().len() {
            let mut bytes = whole.bytes().to_vec();
            bytes[at] ^= 0x10;
            assert!(FrameHead::read(&bytes).is_err(), "byte {at}");
            assert!(FrameHead::read(&whole.bytes().slice(..at)).is_err(), "{at} bytes");
        }
    }
}
