//! A node's blocks as one that has them in DRAM gives them out: all frames at once, by reference.
//!
//! Not here: a node. Nothing is leased, and saves are refused.

use std::collections::HashMap;

use kv_core::id::{BlockHash, LeaseId, Tier};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::suite::{self, EPOCH};
use kvfleet_transport::{
    BlockService, BoxFuture, FetchAnswer, FetchReply, FetchRequest, Frames, MissReason, SaveOffer,
    SaveRefusal, SaveRequest, SaveSession,
};

/// Blocks that lie ready.
pub(crate) struct Held(HashMap<BlockHash, Frame>);

impl Held {
    /// So many blocks of this size.
    pub(super) fn new(blocks: u32, block_bytes: u32) -> Self {
        Self::of(suite::hashes(blocks).into_iter().map(|hash| suite::frame(hash, block_bytes)))
    }

    /// These blocks.
    pub(crate) fn of(frames: impl Iterator<Item = Frame>) -> Self {
        Self(frames.map(|frame| (frame.hash, frame)).collect())
    }
}

impl BlockService for Held {
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
