//! What an instance computes leaves layer by layer for the node that keeps it.
//!
//! Of the blocks behind those that are fetched: they are computed whatever comes, and their layers one after the other. Not here: when a
//! layer is computed (`prefill.rs`), and whole frames of what was to be fetched and did not come (`serve.rs`).

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kv_core::id::{BlockHash, Epoch};
use kvfleet_client::{LayerSave, LayerSaveCall, LayersSaved, SAVE_DEADLINE};
use kvfleet_proto::content;
use kvfleet_transport::Asker;

use super::blocks::BlockShape;
use super::request::Job;
use super::serve::{Engine, blocks_u32};

/// A save whose layers come as they are computed.
pub(super) struct Saving {
    shape: Arc<BlockShape>,
    hashes: Vec<BlockHash>,
    /// Offset of the first of them in the prompt.
    pub(super) first_block: u32,
    save: LayerSave,
    layer: usize,
}

impl Engine {
    /// Begins to save what stands behind the `fetched` leading blocks; nothing where nobody would take it, or the write buffer is full.
    pub(super) fn saving(&self, job: &Job, asker: &Asker, fetched: u32) -> Option<Saving> {
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
            Ok(save) => Some(Saving {
                shape: Arc::clone(&self.blocks),
                hashes: new.to_vec(),
                first_block: fetched,
                save,
                layer: 0,
            }),
            Err(error) => {
                tracing::debug!(%error, address = node.address, "saved behind the compute");
                None
            }
        }
    }
}

impl Saving {
    /// The slices of the next layer; none behind the last.
    pub(super) fn next(&self) -> Vec<Bytes> {
        let lengths = self.shape.slice_bytes();
        let Some(&bytes) = lengths.get(self.layer) else { return Vec::new() };
        let start = lengths[..self.layer].iter().map(|bytes| *bytes as usize).sum();
        computed(&self.hashes, start, bytes as usize)
    }

    /// That layer is computed.
    pub(super) fn put(&mut self, slices: Vec<Bytes>) {
        self.layer += 1;
        // Fails only with slices of another length, or one layer too many, and then the end says what is wrong.
        let _ = self.save.put_shared(slices);
    }

    /// All layers are put; nothing when some are missing.
    pub(super) fn finish(self) -> Option<LayersSaved> {
        self.save.finish().inspect_err(|error| tracing::warn!(%error, "a save has no end")).ok()
    }
}

/// The slices of one layer, which has `bytes` from `start` on of each block.
fn computed(hashes: &[BlockHash], start: usize, bytes: usize) -> Vec<Bytes> {
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
    fn the_layers_of_a_block_are_those_of_its_frame() {
        // Slices that begin and end within a word.
        let shape = BlockShape::new(IdentityDigest([1; 16]), KeyForm::default(), 1027, 4).unwrap();
        let hashes = [BlockHash([7; 16]), BlockHash([8; 16])];
        let frames = hashes.map(|hash| shape.make(hash));
        let mut start = 0;
        for (layer, bytes) in shape.slice_bytes().iter().map(|bytes| *bytes as usize).enumerate() {
            for (slice, frame) in computed(&hashes, start, bytes).iter().zip(&frames) {
                assert_eq!(*slice, frame.slice(layer).unwrap());
            }
            start += bytes;
        }
    }
}
