//! A frame whose slices come before its head, as where a model computes one layer after the other: each slice is written where
//! it belongs and summed there, and the head says at the end whether all of it is what it should be.
//!
//! Until then nothing of it is a frame: memory that nobody else may see. Not here: where the slices come from, in which order, and
//! the memory.

use std::ops::Range;
use std::sync::Arc;

use kv_core::id::{BlockHash, IdentityDigest};

use super::copy::crc32c;
use super::header::{Header, entry_at, header_len, payload_len, slice_count};
use super::{FrameError, KeyForm, unsettled, verify_ids};

/// Where the slices of these lengths lie in a frame. Clones share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceLayout {
    slice_bytes: Arc<[u32]>,
    starts: Arc<[usize]>,
    frame_bytes: usize,
}

impl SliceLayout {
    /// Of a frame with these slices.
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

    /// Where a layer's slice lies in the frame; nothing when there is no such layer.
    #[must_use]
    pub fn range(&self, layer: usize) -> Option<Range<usize>> {
        let (start, bytes) = (*self.starts.get(layer)?, *self.slice_bytes.get(layer)? as usize);
        Some(start..start + bytes)
    }
}

/// What is known of such a frame so far: the sums of its slices, in their order.
#[derive(Debug)]
pub struct HeadLast {
    layout: SliceLayout,
    sums: Vec<u32>,
}

impl HeadLast {
    /// Nothing came.
    #[must_use]
    pub fn new(layout: SliceLayout) -> HeadLast {
        HeadLast { layout, sums: Vec::new() }
    }

    /// Memory of the slice of a layer in that of the frame; nothing when it is not the next one, or the frame is shorter.
    #[must_use]
    pub fn slice<'a>(&self, layer: usize, frame: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let range = self.layout.range(layer).filter(|_| layer == self.sums.len())?;
        frame.get_mut(range)
    }

    /// The next slice was written where it belongs in `frame`. It must not change any more.
    pub fn came(&mut self, frame: &[u8]) {
        if let Some(slice) = self.layout.range(self.sums.len()).and_then(|range| frame.get(range)) {
            self.sums.push(crc32c(slice));
        }
    }

    /// Writes the head before the slices: `frame` is now block `hash` of `identity`, with keys in `key_form`. After an error what is
    /// in it is of no use.
    ///
    /// # Errors
    /// Names what is wrong: with the head by itself, what it is the head of, lengths that are not those of this layout, or a
    /// slice that differs or did not come.
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
        unsettled::has_key_form(&header, key_form)?;
        let SliceLayout { slice_bytes, frame_bytes, .. } = &self.layout;
        unsettled::has_length(frame.len(), *frame_bytes)?;
        unsettled::has_length(head.len(), self.layout.head_bytes())?;
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
    const HASH: BlockHash = BlockHash([7; 16]);
    const SLICES: [u32; 3] = [3, 0, 5];

    fn frame() -> Frame {
        seal(IDENTITY, HASH, KeyForm::Raw, &SLICES, b"aaabbbbb").unwrap()
    }

    /// The slices of `from`, one after the other into memory that holds something else.
    fn filled(from: &Frame, layers: usize) -> (HeadLast, Vec<u8>) {
        let layout = SliceLayout::new(&SLICES).unwrap();
        let (mut comes, mut memory) = (HeadLast::new(layout.clone()), vec![0xee; layout.frame_bytes()]);
        for layer in 0..layers {
            let slice = from.slice(layer).unwrap();
            comes.slice(layer, &mut memory).unwrap().copy_from_slice(&slice);
            comes.came(&memory);
        }
        (comes, memory)
    }

    fn finish((comes, memory): &mut (HeadLast, Vec<u8>), head: &[u8]) -> Result<(), FrameError> {
        comes.finish(head, IDENTITY, KeyForm::Raw, HASH, memory)
    }

    #[test]
    fn slices_and_then_their_head_are_the_frame() {
        let good = frame();
        let layout = SliceLayout::new(&SLICES).unwrap();
        assert_eq!((layout.frame_bytes(), layout.slice_bytes()), (good.bytes.len(), &SLICES[..]));
        let mut comes = filled(&good, 3);
        finish(&mut comes, good.head().unwrap().bytes()).unwrap();
        assert_eq!(comes.1, good.bytes);
        assert_eq!(comes.0.slice(3, &mut comes.1), None, "there is no fourth");
    }

    #[test]
    fn a_head_and_slices_put_together_are_the_frame() {
        let good = frame();
        let sums: Vec<u32> = (0..3).map(|layer| crc32c(&good.slice(layer).unwrap())).collect();
        let head = FrameHead::of(IDENTITY, HASH, KeyForm::Raw, &SLICES, &sums).unwrap();
        assert_eq!(head, good.head().unwrap());
        let slices: Vec<_> = (0..3).map(|layer| good.slice(layer).unwrap()).collect();
        assert_eq!(head.frame(&slices).unwrap(), good);
        assert!(head.frame(&slices[..2]).is_err());
        assert!(FrameHead::of(IDENTITY, HASH, KeyForm::Raw, &SLICES, &sums[..2]).is_err());
        assert!(FrameHead::of(IDENTITY, HASH, KeyForm::Raw, &[], &[]).is_err());
    }

    #[test]
    fn slices_come_in_order() {
        let (comes, mut memory) = filled(&frame(), 1);
        assert!(comes.slice(0, &mut memory).is_none(), "it came");
        assert!(comes.slice(2, &mut memory).is_none(), "another is before it");
        assert!(comes.slice(1, &mut memory[..5]).is_none(), "the memory ends before it");
    }

    #[test]
    fn what_is_not_what_was_announced_is_no_frame() {
        let good = frame();
        let head = good.head().unwrap();
        let mut comes = filled(&good, 2);
        assert_eq!(finish(&mut comes, head.bytes()), Err(FrameError::SliceChecksum { layer: 2 }), "missing");
        let mut other = filled(&seal(IDENTITY, HASH, KeyForm::Raw, &SLICES, b"aaabbbbc").unwrap(), 3);
        assert_eq!(
            finish(&mut other, head.bytes()),
            Err(FrameError::SliceChecksum { layer: 2 }),
            "a lying table"
        );
        let mut comes = filled(&good, 3);
        let of =
            |identity, hash, form, slices: &[u32]| seal(identity, hash, form, slices, b"aaabbbbb").unwrap();
        let wrong = [
            of(IdentityDigest([9; 16]), HASH, KeyForm::Raw, &SLICES),
            of(IDENTITY, BlockHash([9; 16]), KeyForm::Raw, &SLICES),
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
