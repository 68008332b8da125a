//! Layer-wise save. Each layer's slices are copied when computed, or shared if they stay unchanged
//! until the save ends, and are sent while the engine computes the next layer. After the last layer
//! the engine continues, and the rest is sent in the background.
//!
//! The queue of background saves is the write buffer. A save reserves space for all its frames at
//! the start, so the engine never waits for it. If there is no space, the call fails before
//! anything is computed, and the blocks are not saved. Slices are kept until the node answers, so a
//! failed path costs a retry and no block.
//!
//! Not here: sending the layers (`layer_save/upload.rs`), and the queue (`save.rs`).

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::{BlockHash, Epoch};
use kvfleet_proto::frame::{FrameError, KeyForm, SliceLayout, copy_batch};
use kvfleet_transport::{RequestContext, SaveAnswer};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::{Client, HeldLease, SaveBusy, SaveError};

mod upload;

use upload::{LayerSlices, PutLayers, PutMessage, run_save};

/// A save of blocks that are being computed.
#[derive(Clone, Debug)]
pub struct LayerSaveCall {
    /// Identity of the caller; the lease is the one of the request's fetch.
    pub asker: RequestContext,
    /// Data address of the node.
    pub address: String,
    /// Epoch under which the router named the node.
    pub epoch: Epoch,
    /// Hash before the first block; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Form of the keys; it must be that of the model manifest, since nodes store no other.
    pub key_form: KeyForm,
    /// Length of each layer's slice in bytes.
    pub slice_bytes: Vec<u32>,
    /// Leases to release after it, besides its own.
    pub then_release: Vec<HeldLease>,
    /// Time limit after its last layer; use [`SAVE_DEADLINE`](crate::SAVE_DEADLINE) by default.
    pub deadline: Duration,
}

/// Error of a layer-wise save.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayerSaveError {
    /// The write buffer is full; no space was reserved.
    #[error(transparent)]
    Busy(#[from] SaveBusy),
    /// Slices of these lengths form no valid frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The number of slices differs from the number of blocks, or one has another length.
    #[error("layer {layer} of {blocks} blocks has slices of {expected} bytes, got {got:?}")]
    Slices {
        /// The layer.
        layer: usize,
        /// Blocks of the save.
        blocks: usize,
        /// Bytes that each slice should have.
        expected: usize,
        /// Bytes of each given slice.
        got: Vec<usize>,
    },
    /// The number of layers put is wrong.
    #[error("a save of {expected} layers got {got}: put each layer once, or drop the save")]
    Layers {
        /// Layers of a block.
        expected: usize,
        /// Layers put, including the rejected one.
        got: usize,
    },
}

/// A save that accepts layers. Dropping it ends the save, and no block is stored. The caller then
/// releases the leases, including the save's own, which the node may hold already.
#[derive(Debug)]
pub struct LayerSave {
    layout: SliceLayout,
    blocks: usize,
    next_layer: usize,
    puts: mpsc::UnboundedSender<PutMessage>,
    /// Kept here so that the space is free at once if the save is dropped.
    reservation: [OwnedSemaphorePermit; 2],
    finished: oneshot::Sender<[OwnedSemaphorePermit; 2]>,
    answer: oneshot::Receiver<Result<LayerSaveAnswer, SaveError>>,
}

/// Result of a complete layer-wise save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSaveAnswer {
    /// The node's answer for all its blocks.
    pub answer: SaveAnswer,
    /// Blocks stored from streamed slices; the others were stored from whole frames after the last
    /// layer.
    pub streamed_blocks: u32,
}

/// A complete save that continues in the background, even if this handle is dropped.
#[derive(Debug)]
pub struct PendingLayerSave(oneshot::Receiver<Result<LayerSaveAnswer, SaveError>>);

impl PendingLayerSave {
    /// Waits for the commit. The answer names the announcement batch that makes the blocks visible.
    /// Its leases may be released a little later.
    ///
    /// # Errors
    /// If the node is lost during the save, the deadline passes, or the runtime stops first.
    pub async fn answer(self) -> Result<LayerSaveAnswer, SaveError> {
        self.0.await.unwrap_or(Err(SaveError::Stopped))
    }
}

impl Client {
    /// Starts a save of blocks that are being computed: reserves space for all their frames, and
    /// asks the node in the background. Needs a tokio runtime.
    ///
    /// # Errors
    /// If there is no space, or the slices form no valid frame.
    pub fn save_layers(&self, call: LayerSaveCall) -> Result<LayerSave, LayerSaveError> {
        let layout = SliceLayout::new(&call.slice_bytes)?;
        let blocks = call.hashes.len();
        let room = self.saves.reserve(layout.frame_bytes().saturating_mul(blocks))?;
        // Unbounded, because the reservation already limits the bytes.
        let (puts, came) = mpsc::unbounded_channel();
        let (finished, is_finished) = oneshot::channel();
        let (told, answered) = oneshot::channel();
        let layers = PutLayers::new(&call, layout.clone(), came);
        tokio::spawn(run_save(self.clone(), call, layers, is_finished, told));
        Ok(LayerSave { layout, blocks, next_layer: 0, puts, reservation: room, finished, answer: answered })
    }
}

impl LayerSave {
    /// Accepts the next layer: one slice per block, in their order. They are copied before the call
    /// returns.
    ///
    /// # Errors
    /// If these are not the slices of the next layer; the save is unchanged.
    pub fn put(&mut self, slices: &[&[u8]]) -> Result<(), LayerSaveError> {
        let expected = self.accept_layer(slices.len(), slices.iter().map(|slice| slice.len()))?;
        // Fails only if the runtime has stopped, and the whole save with it.
        let _ = self.puts.send(PutMessage::Layer(copy_layer(slices, expected)));
        Ok(())
    }

    /// The same without a copy, for slices in memory that stays unchanged until the save ends, such
    /// as the target of a device copy. They are dropped when the save ends.
    ///
    /// # Errors
    /// As for [`LayerSave::put`]; the slices are dropped.
    pub fn put_shared(&mut self, slices: Vec<Bytes>) -> Result<(), LayerSaveError> {
        self.accept_layer(slices.len(), slices.iter().map(Bytes::len))?;
        // Fails only if the runtime has stopped.
        let _ = self.puts.send(PutMessage::Shared(slices));
        Ok(())
    }

    /// Counts a layer with slices of these lengths as put; returns the length of each slice in
    /// bytes.
    fn accept_layer(
        &mut self,
        slices: usize,
        lengths: impl Iterator<Item = usize> + Clone,
    ) -> Result<usize, LayerSaveError> {
        let layers = self.layout.slice_bytes().len();
        let Some(&bytes) = self.layout.slice_bytes().get(self.next_layer) else {
            return Err(LayerSaveError::Layers { expected: layers, got: self.next_layer + 1 });
        };
        let expected = bytes as usize;
        if slices != self.blocks || lengths.clone().any(|bytes| bytes != expected) {
            let got = lengths.collect();
            return Err(LayerSaveError::Slices {
                layer: self.next_layer,
                blocks: self.blocks,
                expected,
                got,
            });
        }
        self.next_layer += 1;
        Ok(expected)
    }

    /// Completes the save after all layers were put: the rest is sent in the background, and leases
    /// are released after that. The returned handle gives the answer.
    ///
    /// # Errors
    /// If layers are missing; no block is saved.
    pub fn finish(self) -> Result<PendingLayerSave, LayerSaveError> {
        let expected = self.layout.slice_bytes().len();
        if self.next_layer != expected {
            return Err(LayerSaveError::Layers { expected, got: self.next_layer });
        }
        // Fails only if the runtime has stopped.
        let _ = self.finished.send(self.reservation);
        let _ = self.puts.send(PutMessage::End);
        Ok(PendingLayerSave(self.answer))
    }
}

/// Copies the slices of a layer, with their checksums.
fn copy_layer(slices: &[&[u8]], bytes: usize) -> LayerSlices {
    let mut copied = BytesMut::zeroed(bytes * slices.len());
    let mut left = &mut copied[..];
    let sums = copy_batch(left.len(), |copies| {
        let sums = slices.iter().map(|slice| {
            let (copy, behind) = std::mem::take(&mut left).split_at_mut(bytes);
            left = behind;
            copies.crc32c(copy, slice)
        });
        sums.collect()
    });
    let mut copied = copied.freeze();
    LayerSlices { slices: slices.iter().map(|_| copied.split_to(bytes)).collect(), checksums: sums }
}
