//! Memory for the slices of a fetch that looks at everything it is told. For tests only.

use std::ops::Range;

use kv_core::id::BlockHash;
use kvfleet_proto::content;
use kvfleet_proto::frame::FrameHead;
use tokio::sync::watch;

use super::IDENTITY;
use crate::SliceSink;

/// A room for each block asked.
#[derive(Debug)]
pub struct Rooms {
    hashes: Vec<BlockHash>,
    layers: Range<usize>,
    blocks: Vec<Room>,
    /// What was filled, in order: position and layers.
    pub filled: Vec<(usize, Range<usize>)>,
    /// What was wrong.
    pub wrong: Vec<usize>,
    /// Encoded bytes that came.
    pub received_bytes: usize,
    /// Slices that were filled.
    count: watch::Sender<usize>,
}

#[derive(Debug)]
struct Room {
    slices: Vec<Vec<u8>>,
    /// Layers before this one are there, from the first asked on.
    until: usize,
}

impl Rooms {
    /// For these layers of these blocks.
    #[must_use]
    pub fn new(hashes: &[BlockHash], layers: Range<usize>) -> Rooms {
        Rooms {
            hashes: hashes.to_vec(),
            layers,
            blocks: Vec::new(),
            filled: Vec::new(),
            wrong: Vec::new(),
            received_bytes: 0,
            count: watch::Sender::new(0),
        }
    }

    /// How many of the asked layers of each block came, for the blocks whose heads came.
    #[must_use]
    pub fn layers_there(&self) -> Vec<usize> {
        self.blocks.iter().map(|room| room.until - self.layers.start.min(room.until)).collect()
    }

    /// How many slices are filled, for whoever waits for some.
    #[must_use]
    pub fn count(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }

    /// Bytes of each slice of the blocks whose heads came.
    #[must_use]
    pub fn slice_bytes(&self) -> Vec<Vec<u32>> {
        let bytes = |slice: &Vec<u8>| u32::try_from(slice.len()).unwrap_or(u32::MAX);
        self.blocks.iter().map(|room| room.slices.iter().map(bytes).collect()).collect()
    }

    /// Checks that what is there is the blocks' content.
    pub fn check(&self) {
        for (room, hash) in self.blocks.iter().zip(&self.hashes) {
            let mut whole = vec![0; room.slices.iter().map(Vec::len).sum()];
            content::fill(*hash, &mut whole);
            let mut rest = &whole[..];
            for (layer, slice) in room.slices.iter().enumerate() {
                let (content, behind) = rest.split_at(slice.len());
                rest = behind;
                let is_there = self.layers.start <= layer && layer < room.until;
                assert!(!is_there || slice == content, "layer {layer} of {hash} is not its content");
            }
        }
    }
}

impl SliceSink for Rooms {
    fn head(&mut self, position: usize, head: &FrameHead) -> bool {
        assert_eq!(position, self.blocks.len(), "heads come in order");
        if head.verify(IDENTITY, self.hashes[position]).is_err() {
            self.wrong.push(position);
            return false;
        }
        let slices = (0..head.slice_count()).map(|layer| vec![0; head.slice_bytes(layer).unwrap_or(0)]);
        let until = self.layers.start.min(head.slice_count());
        self.blocks.push(Room { slices: slices.collect(), until });
        true
    }

    fn slice(&mut self, position: usize, layer: usize) -> Option<&mut [u8]> {
        assert!(self.layers.contains(&layer), "layer {layer} was not asked for");
        self.blocks.get_mut(position)?.slices.get_mut(layer).map(|slice| &mut slice[..])
    }

    fn filled(&mut self, position: usize, layers: Range<usize>) {
        assert!(self.wrong.iter().all(|wrong| position < *wrong), "block {position} was wrong");
        assert_eq!(self.blocks[position].until, layers.start, "layers of a block come in order");
        self.blocks[position].until = layers.end;
        self.count.send_modify(|count| *count += layers.len());
        self.filled.push((position, layers));
    }

    fn wrong(&mut self, position: usize) {
        self.wrong.push(position);
    }

    fn received(&mut self, bytes: usize) {
        self.received_bytes += bytes;
    }
}
