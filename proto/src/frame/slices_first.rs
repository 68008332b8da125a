//! A frame with its slices received before its header, as a model computes one layer after another.
//! Each slice is written in place and its checksum computed. The header arrives last and decides
//! whether the frame is valid.
//!
//! Until then the memory holds no frame and must stay private. The caller provides the slices, in
//! any order, and the memory.

use std::ops::Range;
use std::sync::Arc;

use kv_core::id::{BlockHash, IdentityDigest};

use super::header::{Header, entry_at, header_len, payload_len, slice_count};
use super::{FrameError, KeyForm, verify_ids, volatile};
use kvfleet_cpu::crc32c;

/// Positions of the slices in a frame. Clones share the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceLayout {
    slice_bytes: Arc<[u32]>,
    starts: Arc<[usize]>,
    frame_bytes: usize,
}

impl SliceLayout {
    /// The layout of a frame with slices of these lengths.
    ///
    /// # Errors
    /// When there are no slices, or a limit is exceeded.
    pub fn new(slice_bytes: &[u32]) -> Result<SliceLayout, FrameError> {
        let mut at = header_len(slice_count(slice_bytes.len())?);
        let frame_bytes = at + payload_len(slice_bytes.iter().copied())?;
        let starts = slice_bytes.iter().map(|bytes| {
            let start = at;
            at += *bytes as usize;
            start
        });
        let starts = starts.collect();
        Ok(SliceLayout { slice_bytes: slice_bytes.into(), starts, frame_bytes })
    }

    /// Length of each slice in bytes.
    #[must_use]
    pub fn slice_bytes(&self) -> &[u32] {
        &self.slice_bytes
    }

    /// Length of the header in bytes.
    #[must_use]
    pub fn head_bytes(&self) -> usize {
        header_len(self.slice_bytes.len())
    }

    /// Encoded size of the whole frame in bytes.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Byte range of a layer's slice in the frame; `None` if there is no such layer.
    #[must_use]
    pub fn range(&self, layer: usize) -> Option<Range<usize>> {
        let (start, bytes) = (*self.starts.get(layer)?, *self.slice_bytes.get(layer)? as usize);
        Some(start..start + bytes)
    }
}

/// The checksums of the slices received so far, in order.
#[derive(Debug)]
pub struct SlicesFirstFrame {
    layout: SliceLayout,
    sums: Vec<u32>,
}

impl SlicesFirstFrame {
    /// A frame without any slice yet.
    #[must_use]
    pub fn new(layout: SliceLayout) -> SlicesFirstFrame {
        SlicesFirstFrame { layout, sums: Vec::new() }
    }

    /// Memory for the slice of `layer` within `frame`. `None` if it is not the next slice, or the
    /// frame is shorter.
    #[must_use]
    pub fn slice<'a>(&self, layer: usize, frame: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let range = self.layout.range(layer).filter(|_| layer == self.sums.len())?;
        frame.get_mut(range)
    }

    /// Records that the next slice was written in place in `frame`. It must not change afterwards.
    pub fn record_slice(&mut self, frame: &[u8]) {
        if let Some(slice) = self.layout.range(self.sums.len()).and_then(|range| frame.get(range)) {
            self.sums.push(crc32c(slice));
        }
    }

    /// Writes the header before the slices: `frame` is now block `hash` of `identity`, with keys in
    /// `key_form`. After an error the content of `frame` is unspecified.
    ///
    /// # Errors
    /// Names the first problem: an invalid header, other ids or key form, lengths that differ from
    /// the layout, or a slice that differs or is missing.
    pub fn finish(
        &self,
        head: &[u8],
        identity: IdentityDigest,
        key_form: KeyForm,
        hash: BlockHash,
        frame: &mut [u8],
    ) -> Result<(), FrameError> {
        let header = Header::read(head)?;
        verify_ids(&[header.identity], &[header.hash], identity, hash)?;
        volatile::check_key_form(&header, key_form)?;
        let SliceLayout { slice_bytes, frame_bytes, .. } = &self.layout;
        volatile::check_length(frame.len(), *frame_bytes)?;
        volatile::check_length(head.len(), self.layout.head_bytes())?;
        if header.slices != slice_bytes.len() {
            return Err(FrameError::Header("other slices than were announced"));
        }
        for (layer, announced) in slice_bytes.iter().enumerate() {
            let (bytes, sum) = entry_at(head, layer);
            if bytes != *announced as usize {
                return Err(FrameError::Header("slices of other lengths than were announced"));
            }
            if self.sums.get(layer) != Some(&sum) {
                return Err(FrameError::SliceChecksum { layer });
            }
        }
        frame[..head.len()].copy_from_slice(head);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::{Frame, FrameHead, seal};
    use super::*;

    const IDENTITY: IdentityDigest = IdentityDigest([3; 16]);
    const HASH: BlockHash = BlockHash([7; _]);
    const SLICES: [u32; 3] = [3, 0, 5];

    fn frame() -> Frame {
        seal(IDENTITY, HASH, KeyForm::Raw, &SLICES, b"aaabbbbb").unwrap()
    }

    /// Copies the first `layers` slices of `from` into memory that holds other bytes.
    fn assemble_slices(from: &Frame, layers: usize) -> (SlicesFirstFrame, Vec<u8>) {
        let layout = SliceLayout::new(&SLICES).unwrap();
        let (mut assembly, mut memory) =
            (SlicesFirstFrame::new(layout.clone()), vec![0xee; layout.frame_bytes()]);
        for layer in 0..layers {
            let slice = from.slice(layer).unwrap();
            assembly.slice(layer, &mut memory).unwrap().copy_from_slice(&slice);
            assembly.record_slice(&memory);
        }
        (assembly, memory)
    }

    fn finish((comes, memory): &mut (SlicesFirstFrame, Vec<u8>), head: &[u8]) -> Result<(), FrameError> {
        comes.finish(head, IDENTITY, KeyForm::Raw, HASH, memory)
    }

    #[test]
    fn slices_followed_by_the_header_make_the_frame() {
        let good = frame();
        let layout = SliceLayout::new(&SLICES).unwrap();
        assert_eq!((layout.frame_bytes(), layout.slice_bytes()), (good.bytes.len(), &SLICES[..]));
        let mut comes = assemble_slices(&good, 3);
        finish(&mut comes, good.head().unwrap().bytes()).unwrap();
        assert_eq!(comes.1, good.bytes);
        assert_eq!(comes.0.slice(3, &mut comes.1), None, "there are only three slices");
    }

    #[test]
    fn a_header_joined_with_its_slices_makes_the_frame() {
        let good = frame();
        let sums: Vec<u32> = (0..3).map(|layer| crc32c(&good.slice(layer).unwrap())).collect();
        let head = FrameHead::new(IDENTITY, HASH, KeyForm::Raw, &SLICES, &sums).unwrap();
        assert_eq!(head, good.head().unwrap());
        let slices: Vec<_> = (0..3).map(|layer| good.slice(layer).unwrap()).collect();
        assert_eq!(head.frame(&slices).unwrap(), good);
        assert!(head.frame(&slices[..2]).is_err());
        assert!(FrameHead::new(IDENTITY, HASH, KeyForm::Raw, &SLICES, &sums[..2]).is_err());
        assert!(FrameHead::new(IDENTITY, HASH, KeyForm::Raw, &[], &[]).is_err());
    }

    #[test]
    fn slices_are_accepted_in_order_only() {
        let (comes, mut memory) = assemble_slices(&frame(), 1);
        assert!(comes.slice(0, &mut memory).is_none(), "slice 0 was already received");
        assert!(comes.slice(2, &mut memory).is_none(), "slice 1 comes first");
        assert!(comes.slice(1, &mut memory[..5]).is_none(), "the memory ends before the slice");
    }

    #[test]
    fn rejects_frames_that_differ_from_the_announced_layout() {
        let good = frame();
        let head = good.head().unwrap();
        let mut comes = assemble_slices(&good, 2);
        assert_eq!(finish(&mut comes, head.bytes()), Err(FrameError::SliceChecksum { layer: 2 }), "missing");
        let mut other =
            assemble_slices(&seal(IDENTITY, HASH, KeyForm::Raw, &SLICES, b"aaabbbbc").unwrap(), 3);
        assert_eq!(
            finish(&mut other, head.bytes()),
            Err(FrameError::SliceChecksum { layer: 2 }),
            "a header with another checksum"
        );
        let mut comes = assemble_slices(&good, 3);
        let of =
            |identity, hash, form, slices: &[u32]| seal(identity, hash, form, slices, b"aaabbbbb").unwrap();
        let wrong = [
            of(IdentityDigest([9; 16]), HASH, KeyForm::Raw, &SLICES),
            of(IDENTITY, BlockHash([9; _]), KeyForm::Raw, &SLICES),
            of(IDENTITY, HASH, KeyForm::Rotated, &SLICES),
            of(IDENTITY, HASH, KeyForm::Raw, &[5, 0, 3]),
            of(IDENTITY, HASH, KeyForm::Raw, &[3, 5]),
        ];
        for frame in wrong {
            assert!(finish(&mut comes, frame.head().unwrap().bytes()).is_err(), "{frame:?}");
        }
        for at in 0..head.bytes().len() {
            let mut bytes = head.bytes().to_vec();
            bytes[at] ^= 0x10;
            assert!(finish(&mut comes, &bytes).is_err(), "byte {at}");
            assert!(finish(&mut comes, &head.bytes()[..at]).is_err(), "{at} bytes");
        }
        assert!(finish(&mut comes, &good.bytes).is_err(), "more than the head");
        comes.1.pop();
        assert!(finish(&mut comes, head.bytes()).is_err(), "memory of another length");
    }
}
