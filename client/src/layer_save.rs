//! Save from the memory of an engine that computes layer by layer: each layer's slices are copied as they are computed, or shared where
//! they lie in memory that is the save's until its end, and are on their way while the next one is. After the last layer the engine
//! goes on, and what is left leaves behind it.
//!
//! The queue of background saves is the write buffer: room for all frames of a save is taken at its begin, so
//! that the job behind never waits for it. Where there is none the caller is told before anything is computed,
//! and the blocks are not saved. What was put is kept until the node has answered, so that a path that fails on the way costs a
//! second try and no block.
//!
//! Not here: what becomes of the layers (`layer_save/sending.rs`), and the queue (`save.rs`).

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use kv_core::id::{BlockHash, Epoch};
use kvfleet_proto::frame::{FrameError, KeyForm, SliceLayout, copies};
use kvfleet_transport::{Asker, SaveAnswer};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::{Client, HeldLease, SaveBusy, SaveError};

mod sending;

use sending::{Layer, Layers, Put, send};

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
    /// How long it may take from its last layer on; [`SAVE_DEADLINE`](crate::SAVE_DEADLINE) unless there is a reason.
    pub deadline: Duration,
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

/// A save that takes layers. Dropping it saves nothing, and ends what is under way; its leases are the caller's to release then,
/// its own among them, which the node may have opened when it was asked.
#[derive(Debug)]
pub struct LayerSave {
    layout: SliceLayout,
    blocks: usize,
    layer: usize,
    puts: mpsc::UnboundedSender<Put>,
    /// Kept here until the end, so that it is free at once where the save is dropped.
    room: [OwnedSemaphorePermit; 2],
    finished: oneshot::Sender<[OwnedSemaphorePermit; 2]>,
    answered: oneshot::Receiver<Result<LayersAnswer, SaveError>>,
}

/// What became of a save whose layers were all put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayersAnswer {
    /// What the node says, of all its blocks.
    pub answer: SaveAnswer,
    /// How many were stored from slices that left as they came; others were stored from whole frames behind the last layer.
    pub streamed_blocks: u32,
}

/// A save that was put to its end and goes on in the background, whether this is kept or not.
#[derive(Debug)]
pub struct LayersSaved(oneshot::Receiver<Result<LayersAnswer, SaveError>>);

impl LayersSaved {
    /// Waits for the commit: the answer says from which announce batch on the blocks are visible. Its own lease and those that were to
    /// end with it may be released a little later.
    ///
    /// # Errors
    /// When the node is lost on the way, the deadline passes, or the runtime ends first.
    pub async fn answer(self) -> Result<LayersAnswer, SaveError> {
        self.0.await.unwrap_or(Err(SaveError::Stopped))
    }
}

impl Client {
    /// Begins to save blocks that are being computed: room for all of their frames is taken now, and the node is asked in the
    /// background. Needs a tokio runtime.
    ///
    /// # Errors
    /// When there is no room, or the slices make no frame.
    pub fn save_layers(&self, call: LayerSaveCall) -> Result<LayerSave, LayerSaveError> {
        let layout = SliceLayout::new(&call.slice_bytes)?;
        let blocks = call.hashes.len();
        let room = self.saves.enter(layout.frame_bytes().saturating_mul(blocks))?;
        // Without a bound of its own: what is put is within the room.
        let (puts, came) = mpsc::unbounded_channel();
        let (finished, is_finished) = oneshot::channel();
        let (told, answered) = oneshot::channel();
        let layers = Layers::new(&call, layout.clone(), came);
        tokio::spawn(send(self.clone(), call, layers, (is_finished, told)));
        Ok(LayerSave { layout, blocks, layer: 0, puts, room, finished, answered })
    }
}

impl LayerSave {
    /// Takes the next layer: a slice of each block, in their order. They are copied, and the caller's again at once.
    ///
    /// # Errors
    /// When these are not the slices of the next layer; nothing was taken.
    pub fn put(&mut self, slices: &[&[u8]]) -> Result<(), LayerSaveError> {
        let expected = self.take_turn(slices.len(), slices.iter().map(|slice| slice.len()))?;
        // Fails only with the runtime, and with it everything that was to be saved.
        let _ = self.puts.send(Put::Layer(copied(slices, expected)));
        Ok(())
    }

    /// The same of slices that lie in memory of which others have no use before the save's end, such as what a card copied them
    /// to: nothing is copied here, and they are dropped when they are saved or given up.
    ///
    /// # Errors
    /// As for [`LayerSave::put`]; the slices are dropped.
    pub fn put_shared(&mut self, slices: Vec<Bytes>) -> Result<(), LayerSaveError> {
        self.take_turn(slices.len(), slices.iter().map(Bytes::len))?;
        // As above.
        let _ = self.puts.send(Put::Shared(slices));
        Ok(())
    }

    /// Counts a layer with slices of these lengths as put: how long each is, in bytes.
    fn take_turn(
        &mut self,
        slices: usize,
        lengths: impl Iterator<Item = usize> + Clone,
    ) -> Result<usize, LayerSaveError> {
        let layers = self.layout.slice_bytes().len();
        let Some(&bytes) = self.layout.slice_bytes().get(self.layer) else {
            return Err(LayerSaveError::Layers { expected: layers, got: self.layer + 1 });
        };
        let expected = bytes as usize;
        if slices != self.blocks || lengths.clone().any(|bytes| bytes != expected) {
            let got = lengths.collect();
            return Err(LayerSaveError::Slices { layer: self.layer, blocks: self.blocks, expected, got });
        }
        self.layer += 1;
        Ok(expected)
    }

    /// All layers were put: what is not on its way yet goes out in the background, and leases are released then. What becomes of it
    /// is told to whoever wants to know.
    ///
    /// # Errors
    /// When layers are missing; nothing is saved.
    pub fn finish(self) -> Result<LayersSaved, LayerSaveError> {
        let expected = self.layout.slice_bytes().len();
        if self.layer != expected {
            return Err(LayerSaveError::Layers { expected, got: self.layer });
        }
        // As above.
        let _ = self.finished.send(self.room);
        let _ = self.puts.send(Put::End);
        Ok(LayersSaved(self.answered))
    }
}

/// The slices of a layer in memory of our own, with their sums.
fn copied(slices: &[&[u8]], bytes: usize) -> Layer {
    let mut copied = BytesMut::zeroed(bytes * slices.len());
    let mut left = &mut copied[..];
    let sums = copies(left.len(), |copies| {
        let sums = slices.iter().map(|slice| {
            let (copy, behind) = std::mem::take(&mut left).split_at_mut(bytes);
            left = behind;
            copies.crc32c(copy, slice)
        });
        sums.collect()
    });
    let mut copied = copied.freeze();
    Layer { slices: slices.iter().map(|_| copied.split_to(bytes)).collect(), sums }
}
