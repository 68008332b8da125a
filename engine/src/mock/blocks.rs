//! Blocks of the mock engine: generated from their hash, and checked against it byte by byte.
//!
//! Not here: frames and checksums (`kvfleet_proto::frame`), and moving blocks.

use kv_core::content;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::{Frame, FrameBuilder, FrameError, KeyForm, encoded_len};

/// Division of a block into slices.
#[derive(Clone, Debug)]
pub(super) struct BlockShape {
    identity: IdentityDigest,
    key_form: KeyForm,
    slice_bytes: Vec<u32>,
}

/// Result of comparing a fetched block with its expected content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CheckResult {
    /// Bytes of a correct block.
    pub(super) verified_bytes: u64,
    /// Bytes of a wrong block.
    pub(super) wrong_bytes: u64,
}

impl BlockShape {
    /// Blocks of `block_bytes` in `layers` slices that differ by at most one byte. Fails if no
    /// frame can have this shape.
    pub(super) fn new(
        identity: IdentityDigest,
        key_form: KeyForm,
        block_bytes: u64,
        layers: u32,
    ) -> Result<Self, FrameError> {
        let (each, longer) = (block_bytes / u64::from(layers.max(1)), block_bytes % u64::from(layers.max(1)));
        let slice = |layer: u64| u32::try_from(each + u64::from(layer < longer)).unwrap_or(u32::MAX);
        let shape = Self { identity, key_form, slice_bytes: (0..layers.into()).map(slice).collect() };
        shape.builder(BlockHash::default())?;
        Ok(shape)
    }

    fn builder(&self, hash: BlockHash) -> Result<FrameBuilder, FrameError> {
        FrameBuilder::new(self.identity, hash, self.key_form, &self.slice_bytes)
    }

    /// Payload size of a block.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.slice_bytes.iter().map(|bytes| u64::from(*bytes)).sum()
    }

    /// Size of a block's frame.
    pub(super) fn frame_bytes(&self) -> u64 {
        encoded_len(&self.slice_bytes) as u64
    }

    /// Payload in `encoded_bytes` of frames of this shape; approximate for other frames.
    pub(super) fn payload_of(&self, encoded_bytes: u64) -> u64 {
        let (whole, rest) = (encoded_bytes / self.frame_bytes(), encoded_bytes % self.frame_bytes());
        whole * self.payload_bytes() + rest.min(self.payload_bytes())
    }

    /// Lengths of a block's slices in bytes, in layer order.
    pub(super) fn slice_bytes(&self) -> &[u32] {
        &self.slice_bytes
    }

    /// Sealed frame of block `hash`, with content derived from the hash.
    pub(super) fn make(&self, hash: BlockHash) -> Frame {
        let mut builder = self.builder(hash).expect("`new` built a frame of these slices");
        content::fill(hash, builder.payload_mut());
        builder.seal()
    }

    /// Compares every byte of a fetched block, and its size, with the expected content.
    pub(super) fn check(&self, hash: BlockHash, frame: &Frame) -> CheckResult {
        let payload = frame.payload();
        let bytes = payload.len() as u64;
        if bytes == self.payload_bytes() && content::matches(hash, &payload) {
            CheckResult { verified_bytes: bytes, wrong_bytes: 0 }
        } else {
            CheckResult { verified_bytes: 0, wrong_bytes: bytes }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mock::InstanceConfig;

    /// Uses the non-default key form.
    fn shape() -> BlockShape {
        let config = InstanceConfig { raw_keys: true, ..InstanceConfig::default() };
        BlockShape::new(IdentityDigest([1; 16]), config.key_form(), 4099, 4).unwrap()
    }

    #[test]
    fn splits_a_block_into_layers() {
        let frame = shape().make(BlockHash([7; _]));
        assert_eq!((frame.slice_count(), frame.key_form()), (4, KeyForm::Raw));
        assert_eq!(frame.payload().len(), 4099);
        frame.verify(IdentityDigest([1; 16]), BlockHash([7; _])).unwrap();
    }

    #[test]
    fn check_accepts_the_exact_block_only() {
        let hash = BlockHash([7; _]);
        let frame = shape().make(hash);
        assert_eq!(shape().check(hash, &frame), CheckResult { verified_bytes: 4099, wrong_bytes: 0 });
        let other = shape().check(BlockHash([8; _]), &frame);
        assert_eq!(other, CheckResult { verified_bytes: 0, wrong_bytes: 4099 });
        let short = BlockShape::new(IdentityDigest([1; 16]), KeyForm::Raw, 100, 1).unwrap().make(hash);
        assert_eq!(
            shape().check(hash, &short).wrong_bytes,
            100,
            "a truncated block is wrong even if its start matches"
        );
    }
}
