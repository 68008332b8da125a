//! Blocks whose layers are computed when a test says so. For tests only.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::BlockHash;
use kvfleet_proto::frame::{Frame, FrameHead};
use tokio::sync::Semaphore;

use super::frame_of;
use crate::{BoxFuture, LayerSource};

/// Blocks with slices of these lengths.
#[derive(Debug)]
pub struct Computed {
    slice_bytes: Vec<u32>,
    frames: Vec<Frame>,
    /// Layers that may still be given, and the end behind the last.
    gate: Arc<Semaphore>,
    given: usize,
    /// Encoded bytes that a path said that it sent.
    pub sent_bytes: usize,
}

impl Computed {
    /// These blocks, of which nothing waits.
    #[must_use]
    pub fn new(hashes: &[BlockHash], slice_bytes: &[u32]) -> Computed {
        let frames = hashes.iter().map(|hash| frame_of(*hash, slice_bytes)).collect();
        let gate = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS / 2));
        Computed { slice_bytes: slice_bytes.to_vec(), frames, gate, given: 0, sent_bytes: 0 }
    }

    /// The same, of which so many layers are there.
    #[must_use]
    pub fn until(self, layers: usize) -> Computed {
        Computed { gate: Arc::new(Semaphore::new(layers)), ..self }
    }

    /// Gives layers when it is given permits: one each, and one for the end.
    #[must_use]
    pub fn gate(&self) -> Arc<Semaphore> {
        Arc::clone(&self.gate)
    }

    /// The whole frame at this position.
    #[must_use]
    pub fn frame(&self, position: usize) -> Frame {
        self.frames[position].clone()
    }

    /// The same with a wrong byte at the end of the block at this position.
    #[must_use]
    pub fn with_wrong_slice(mut self, position: usize) -> Computed {
        let frame = &mut self.frames[position];
        let mut bytes = frame.bytes.to_vec();
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        frame.bytes = bytes.into();
        self
    }

    /// The same with the head of another block, and its slices, at this position.
    #[must_use]
    pub fn with_other_block(mut self, position: usize, hash: BlockHash) -> Computed {
        self.frames[position] = frame_of(hash, &self.slice_bytes);
        self
    }
}

impl LayerSource for Computed {
    fn slice_bytes(&self) -> &[u32] {
        &self.slice_bytes
    }

    fn next(&mut self) -> BoxFuture<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            let passed = self.gate.acquire().await.ok()?;
            passed.forget();
            let layer = self.given;
            self.given += 1;
            // Behind the last layer there is none.
            self.frames.iter().map(|frame| frame.slice(layer)).collect::<Option<_>>()
        })
    }

    fn head(&self, position: usize) -> Bytes {
        let head = FrameHead::read(&self.frames[position].bytes).expect("the suite's frames have heads");
        head.bytes().clone()
    }

    fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes;
    }
}
