//! Saves computed layers to the target node while later layers are computed.
//!
//! It covers the blocks after the fetched ones, which are always computed. Not here: when a layer
//! is computed (`prefill.rs`), and saving whole frames of blocks that failed to arrive
//! (`serve.rs`).

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kv_core::content;
use kv_core::id::{BlockHash, Epoch};
use kvfleet_client::{LayerSave, LayerSaveCall, PendingLayerSave, SAVE_DEADLINE};
use kvfleet_transport::RequestContext;

use super::blocks::BlockShape;
use super::request::Job;
use super::serve::{MockEngine, blocks_u32};

/// A save in progress, layer by layer.
pub(super) struct StreamedSave {
    shape: Arc<BlockShape>,
    hashes: Vec<BlockHash>,
    /// Offset of the first block in the prompt.
    pub(super) first_block: u32,
    save: LayerSave,
    layer: usize,
}

impl MockEngine {
    /// Starts to save the blocks after the first `fetched` ones. `None` if there is no target, or
    /// if the write buffer is full.
    pub(super) fn start_streamed_save(
        &self,
        job: &Job,
        asker: &RequestContext,
        fetched: u32,
    ) -> Option<StreamedSave> {
        let node = job.save_to.as_ref()?;
        let (known, new) = job.hashes.split_at_checked(fetched as usize)?;
        if new.is_empty() {
            return None;
        }
        let call = LayerSaveCall {
            asker: asker.clone(),
            address: node.address.clone(),
            epoch: Epoch(node.epoch),
            parent: known.last().copied(),
            first_offset_blocks: blocks_u32(known.len()),
            hashes: new.to_vec(),
            key_form: self.config.key_form(),
            slice_bytes: self.blocks.slice_bytes().to_vec(),
            then_release: Vec::new(),
            deadline: SAVE_DEADLINE,
        };
        match self.client.save_layers(call) {
            Ok(save) => Some(StreamedSave {
                shape: Arc::clone(&self.blocks),
                hashes: new.to_vec(),
                first_block: fetched,
                save,
                layer: 0,
            }),
            Err(error) => {
                tracing::debug!(%error, address = node.address, "saving after the prefill instead");
                None
            }
        }
    }
}

impl StreamedSave {
    /// Slices of the next layer; empty after the last.
    pub(super) fn next_layer(&self) -> Vec<Bytes> {
        let lengths = self.shape.slice_bytes();
        let Some(&bytes) = lengths.get(self.layer) else { return Vec::new() };
        let start = lengths[..self.layer].iter().map(|bytes| *bytes as usize).sum();
        layer_slices(&self.hashes, start, bytes as usize)
    }

    /// Adds the next computed layer.
    pub(super) fn put_layer(&mut self, slices: Vec<Bytes>) {
        self.layer += 1;
        // Fails only for slices of wrong length or surplus layers, which the end of the save
        // reports.
        let _ = self.save.put_shared(slices);
    }

    /// Finishes after all layers; `None` if some are missing.
    pub(super) fn finish(self) -> Option<PendingLayerSave> {
        self.save.finish().inspect_err(|error| tracing::warn!(%error, "an incomplete save was dropped")).ok()
    }
}

/// Slices of one layer: `bytes` from `start` of each block.
fn layer_slices(hashes: &[BlockHash], start: usize, bytes: usize) -> Vec<Bytes> {
    let mut layer = BytesMut::zeroed(bytes * hashes.len());
    let mut left = &mut layer[..];
    for hash in hashes {
        let (slice, behind) = left.split_at_mut(bytes);
        content::fill_at(*hash, start, slice);
        left = behind;
    }
    let mut layer = layer.freeze();
    hashes.iter().map(|_| layer.split_to(bytes)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kv_core::id::IdentityDigest;
    use kvfleet_proto::frame::KeyForm;

    use super::*;

    #[test]
    fn layer_slices_match_the_frame() {
        // Slice boundaries inside of words.
        let shape = BlockShape::new(IdentityDigest([1; 16]), KeyForm::default(), 1027, 4).unwrap();
        let hashes = [BlockHash([7; _]), BlockHash([8; _])];
        let frames = hashes.map(|hash| shape.make(hash));
        let mut start = 0;
        for (layer, bytes) in shape.slice_bytes().iter().map(|bytes| *bytes as usize).enumerate() {
            for (slice, frame) in layer_slices(&hashes, start, bytes).iter().zip(&frames) {
                assert_eq!(*slice, frame.slice(layer).unwrap());
            }
            start += bytes;
        }
    }
}
