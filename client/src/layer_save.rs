//! Save from the memory of an engine that computes layer by layer: each layer's slices are taken as they are
//! computed, and after the last one the engine's memory is its own again while the frames go out.
//!
//! The queue of background saves is the write buffer: room for all frames of a save is taken at its begin, so
//! that the job behind never waits for it. Where there is none the caller is told before anything is computed,
//! and the blocks are not saved.
//!
//! Not here: frames that go out before their last layer (see `layers.rs`), and the queue (`save.rs`).

use std::sync::Arc;

use kv_core::id::{BlockHash, Epoch};
use kvfleet_proto::frame::{Frame, FrameBuilder, FrameError, KeyForm, encoded_len};
use kvfleet_transport::Asker;
use tokio::sync::OwnedSemaphorePermit;

use crate::{BackgroundSave, Client, HeldLease, SaveBusy, SaveCall};

/// Save blocks that are being computed.
#[derive(Clone, Debug)]
pub struct LayerSaveCall {
    /// Who saves; the lease is the one of the request's fetch.
    pub asker: Asker,
    /// Data address of the node.
    pub address: String,
    /// Epoch in which the router named the node.
    pub epoch: Epoch,
    /// Hash before the first block; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks in prefix order.
    pub hashes: Vec<BlockHash>,
    /// In which form the keys are: that of the model manifest, for nodes keep no other.
    pub key_form: KeyForm,
    /// Length of each layer's slice in bytes.
    pub slice_bytes: Vec<u32>,
    /// Leases that end after it, besides its own.
    pub then_release: Vec<HeldLease>,
}

/// Why layers cannot be saved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerSaveError {
    /// The write buffer is full; nothing was taken.
    #[error(transparent)]
    Busy(#[from] SaveBusy),
    /// Such slices make no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// There are not as many slices as blocks, or one has another length.
    #[error("layer {layer} of {blocks} blocks has slices of {expected} bytes, got {got:?}")]
    Slices {
        /// The layer.
        layer: usize,
        /// Blocks of the save.
        blocks: usize,
        /// Bytes that each should have.
        expected: usize,
        /// Bytes of each that came.
        got: Vec<usize>,
    },
    /// It has other layers than were put.
    #[error("a save of {expected} layers got {got}: put each layer once, or drop the save")]
    Layers {
        /// Layers of a block.
        expected: usize,
        /// Layers that were put, or tried to be.
        got: usize,
    },
}

/// A save that takes layers. Dropping it saves nothing.
#[derive(Debug)]
pub struct LayerSave {
    client: Client,
    call: LayerSaveCall,
    frames: Vec<FrameBuilder>,
    layer: usize,
    /// Where the next layer begins in each payload.
    at: usize,
    room: [OwnedSemaphorePermit; 2],
}

impl Client {
    /// Begins to save blocks that are being computed: room for all of their frames is taken now.
    ///
    /// # Errors
    /// When there is no room, or the slices make no frame.
    pub fn save_layers(&self, call: LayerSaveCall) -> Result<LayerSave, LayerSaveError> {
        let bytes = encoded_len(&call.slice_bytes).saturating_mul(call.hashes.len());
        let room = self.saves.enter(bytes)?;
        let builder = |hash: &BlockHash| {
            FrameBuilder::new(call.asker.identity, *hash, call.key_form, &call.slice_bytes)
        };
        let frames = call.hashes.iter().map(builder).collect::<Result<_, _>>()?;
        Ok(LayerSave { client: self.clone(), call, frames, layer: 0, at: 0, room })
    }
}

impl LayerSave {
    /// Takes the next layer: a slice of each block, in their order. They are the caller's again at once.
    ///
    /// # Errors
    /// When these are not the slices of the next layer; nothing was taken.
    pub fn put(&mut self, slices: &[&[u8]]) -> Result<(), LayerSaveError> {
        let layers = self.call.slice_bytes.len();
        let Some(&bytes) = self.call.slice_bytes.get(self.layer) else {
            return Err(LayerSaveError::Layers { expected: layers, got: self.layer + 1 });
        };
        let expected = bytes as usize;
        if slices.len() != self.frames.len() || slices.iter().any(|slice| slice.len() != expected) {
            let got = slices.iter().map(|slice| slice.len()).collect();
            let blocks = self.frames.len();
            return Err(LayerSaveError::Slices { layer: self.layer, blocks, expected, got });
        }
        for (frame, slice) in self.frames.iter_mut().zip(slices) {
            frame.payload_mut()[self.at..self.at + expected].copy_from_slice(slice);
        }
        (self.layer, self.at) = (self.layer + 1, self.at + expected);
        Ok(())
    }

    /// All layers were put: what was taken goes out in the background, and leases are released then. Needs a
    /// tokio runtime.
    ///
    /// # Errors
    /// When layers are missing; nothing is saved.
    pub fn finish(self) -> Result<(), LayerSaveError> {
        let LayerSave { client, call, frames, layer, room, .. } = self;
        let expected = call.slice_bytes.len();
        if layer != expected {
            return Err(LayerSaveError::Layers { expected, got: layer });
        }
        tokio::spawn(async move {
            let sealed = tokio::task::spawn_blocking(|| frames.into_iter().map(FrameBuilder::seal).collect());
            // Ends early only with the runtime, and with it everything that was to be saved.
            if let Ok(frames) = sealed.await {
                client.run_in_turn(save_of(call, frames)).await;
            }
            drop(room);
        });
        Ok(())
    }
}

fn save_of(call: LayerSaveCall, frames: Vec<Frame>) -> BackgroundSave {
    let frame_bytes = frames.first().map_or(0, |frame| frame.bytes.len() as u64);
    let LayerSaveCall { asker, address, epoch, parent, first_offset_blocks, hashes, then_release, .. } = call;
    let frame = Arc::new(move |position: usize| frames[position].clone());
    let call = SaveCall { asker, address, epoch, parent, first_offset_blocks, hashes, frame_bytes, frame };
    BackgroundSave { call, then_release }
}
