//! Memory for the slices of a fetch that checks every call. For tests only.

use std::ops::Range;

use kv_core::content;
use kv_core::id::BlockHash;
use kvfleet_proto::frame::FrameHead;
use tokio::sync::watch;

use super::IDENTITY;
use crate::SliceSink;

/// Memory for each requested block.
#[derive(Debug)]
pub struct CheckedSlices {
    hashes: Vec<BlockHash>,
    layers: Range<usize>,
    blocks: Vec<BlockSlices>,
    /// Filled slices, in order: position and layers.
    pub filled: Vec<(usize, Range<usize>)>,
    /// Positions of rejected blocks.
    pub wrong: Vec<usize>,
    /// Encoded bytes received.
    pub received_bytes: usize,
    /// Number of filled slices.
    slice_count: watch::Sender<usize>,
}

#[derive(Debug)]
struct BlockSlices {
    slices: Vec<Vec<u8>>,
    /// Layers before this one are filled, from the first requested on.
    next_layer: usize,
}

impl CheckedSlices {
    /// For these layers of these blocks.
    #[must_use]
    pub fn new(hashes: &[BlockHash], layers: Range<usize>) -> CheckedSlices {
        CheckedSlices {
            hashes: hashes.to_vec(),
            layers,
            blocks: Vec::new(),
            filled: Vec::new(),
            wrong: Vec::new(),
            received_bytes: 0,
            slice_count: watch::Sender::new(0),
        }
    }

    /// Number of requested layers received of each block with a header.
    #[must_use]
    pub fn layers_received(&self) -> Vec<usize> {
        self.blocks.iter().map(|room| room.next_layer - self.layers.start.min(room.next_layer)).collect()
    }

    /// A watch on the number of filled slices.
    #[must_use]
    pub fn slice_count(&self) -> watch::Receiver<usize> {
        self.slice_count.subscribe()
    }

    /// Slice lengths of the blocks with a header, in bytes.
    #[must_use]
    pub fn slice_bytes(&self) -> Vec<Vec<u32>> {
        let bytes = |slice: &Vec<u8>| u32::try_from(slice.len()).unwrap_or(u32::MAX);
        self.blocks.iter().map(|room| room.slices.iter().map(bytes).collect()).collect()
    }

    /// Checks that the received slices have the blocks' content.
    pub fn check(&self) {
        for (room, hash) in self.blocks.iter().zip(&self.hashes) {
            let mut whole = vec![0; room.slices.iter().map(Vec::len).sum()];
            content::fill(*hash, &mut whole);
            let mut rest = &whole[..];
            for (layer, slice) in room.slices.iter().enumerate() {
                let (content, behind) = rest.split_at(slice.len());
                rest = behind;
                let is_there = self.layers.start <= layer && layer < room.next_layer;
                assert!(!is_there || slice == content, "layer {layer} of {hash} has wrong content");
            }
        }
    }
}

impl SliceSink for CheckedSlices {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        assert_eq!(position, self.blocks.len(), "headers must come in order");
        if head.verify(IDENTITY, self.hashes[position]).is_err() {
            self.wrong.push(position);
            return false;
        }
        let slices = (0..head.slice_count()).map(|layer| vec![0; head.slice_bytes(layer).unwrap_or(0)]);
        let until = self.layers.start.min(head.slice_count());
        self.blocks.push(BlockSlices { slices: slices.collect(), next_layer: until });
        true
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        assert!(self.layers.contains(&layer), "layer {layer} was not requested");
        self.blocks.get_mut(position)?.slices.get_mut(layer).map(|slice| &mut slice[..])
    }

    fn slices_filled(&mut self, position: usize, layers: Range<usize>) {
        assert!(self.wrong.iter().all(|wrong| position < *wrong), "block {position} was rejected before");
        assert_eq!(
            self.blocks[position].next_layer, layers.start,
            "the layers of a block must come in order"
        );
        self.blocks[position].next_layer = layers.end;
        self.slice_count.send_modify(|count| *count += layers.len());
        self.filled.push((position, layers));
    }

    fn slice_rejected(&mut self, position: usize) {
        self.wrong.push(position);
    }

    fn count_received(&mut self, bytes: usize) {
        self.received_bytes += bytes;
    }
}
