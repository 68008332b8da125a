//! A node's blocks served from memory: all frames at once, by reference.
//!
//! Not here: a node. There are no leases, and saves are refused.

use std::collections::HashMap;

use kv_core::id::{BlockHash, LeaseId, Tier};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::suite::{self, EPOCH};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, Frames, MissReason, SaveOffer,
    SaveRefusal, SaveRequest, SaveSession,
};

/// Blocks in memory.
pub(crate) struct MemoryBlocks(HashMap<BlockHash, Frame>);

impl MemoryBlocks {
    /// `blocks` blocks of this size.
    pub(super) fn new(blocks: u32, block_bytes: u32) -> Self {
        Self::from_frames(suite::hashes(blocks).into_iter().map(|hash| suite::frame(hash, block_bytes)))
    }

    /// The given blocks.
    pub(crate) fn from_frames(frames: impl Iterator<Item = Frame>) -> Self {
        Self(frames.map(|frame| (frame.hash, frame)).collect())
    }
}

impl BlockService for MemoryBlocks {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let asked = request.hashes.len();
        let found: Vec<Frame> = request.hashes.iter().map_while(|hash| self.0.get(hash).cloned()).collect();
        let hit = FetchAnswer::Hit { tiers: vec![Tier::Dram; asked] };
        let answer = hit.cut_short(found.len(), MissReason::NotHeld);
        let reply = FetchReply { answer, frames: Frames::ready(found), epoch: EPOCH, lendable: Vec::new() };
        Box::pin(std::future::ready(reply))
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        Box::pin(std::future::ready((SaveOffer::Refused(SaveRefusal::Full), None)))
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
