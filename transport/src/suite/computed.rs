//! Blocks with layers that become available when a test releases them. For tests only.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::BlockHash;
use kvfleet_proto::frame::{Frame, FrameHead};
use tokio::sync::Semaphore;

use super::frame_of;
use crate::{BoxFuture, LayerSource};

/// Blocks with slices of these lengths.
#[derive(Debug)]
pub struct ComputedBlocks {
    slice_bytes: Vec<u32>,
    frames: Vec<Frame>,
    /// Permits for further layers, and for the end after the last.
    gate: Arc<Semaphore>,
    next_layer: usize,
    /// Encoded bytes that a path reported as sent.
    pub sent_bytes: usize,
}

impl ComputedBlocks {
    /// These blocks, with all layers available.
    #[must_use]
    pub fn new(hashes: &[BlockHash], slice_bytes: &[u32]) -> ComputedBlocks {
        let frames = hashes.iter().map(|hash| frame_of(*hash, slice_bytes)).collect();
        let gate = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS / 2));
        ComputedBlocks { slice_bytes: slice_bytes.to_vec(), frames, gate, next_layer: 0, sent_bytes: 0 }
    }

    /// The same, with only this many layers available.
    #[must_use]
    pub fn with_layers(self, layers: usize) -> ComputedBlocks {
        ComputedBlocks { gate: Arc::new(Semaphore::new(layers)), ..self }
    }

    /// Adding permits makes layers available: one each, and one for the end.
    #[must_use]
    pub fn gate(&self) -> Arc<Semaphore> {
        Arc::clone(&self.gate)
    }

    /// The whole frame at this position.
    #[must_use]
    pub fn frame(&self, position: usize) -> Frame {
        self.frames[position].clone()
    }

    /// The same, with a wrong byte at the end of the block at this position.
    #[must_use]
    pub fn with_wrong_slice(mut self, position: usize) -> ComputedBlocks {
        let frame = &mut self.frames[position];
        let mut bytes = frame.bytes.to_vec();
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        frame.bytes = bytes.into();
        self
    }

    /// The same, with another block at this position.
    #[must_use]
    pub fn with_other_block(mut self, position: usize, hash: BlockHash) -> ComputedBlocks {
        self.frames[position] = frame_of(hash, &self.slice_bytes);
        self
    }
}

impl LayerSource for ComputedBlocks {
    fn slice_bytes(&self) -> &[u32] {
        &self.slice_bytes
    }

    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            let passed = self.gate.acquire().await.ok()?;
            passed.forget();
            let layer = self.next_layer;
            self.next_layer += 1;
            // `None` after the last layer.
            self.frames.iter().map(|frame| frame.slice(layer)).collect::<Option<_>>()
        })
    }

    fn head(&self, position: usize) -> Bytes {
        let head = FrameHead::read(&self.frames[position].bytes).expect("the suite's frames have headers");
        head.bytes().clone()
    }

    fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes;
    }
}
