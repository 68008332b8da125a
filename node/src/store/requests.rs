//! Requests to the store task.
//!
//! Not here: the answers (`mod.rs` and the files beside it).

use std::time::Duration;

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::evict::reuse_stats::ReuseStats;
use kv_core::id::{BlockHash, Epoch, Generation, LeaseId, Seq, TenantId, TtlGroupId};
use kv_core::tier::{HoldingsPage, PinDirective, Requester};
use kvfleet_proto::pb;
use kvfleet_transport::AnnouncePosition;
use tokio::sync::oneshot;

use super::{FetchPlan, OfferPlan};
use crate::announce::outboxes::ShardPositions;

/// A request to the store.
#[derive(Debug)]
pub enum StoreRequest {
    /// Lease and read the leading blocks that are readable.
    Fetch {
        /// The requester.
        asker: Requester,
        /// Weights generation at admission.
        generation: Generation,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// Receives the answer.
        reply: oneshot::Sender<FetchPlan>,
    },
    /// Offer new blocks.
    Offer {
        /// The requester.
        asker: Requester,
        /// Weights generation at admission.
        generation: Generation,
        /// Hash before the first block.
        parent: Option<BlockHash>,
        /// Offset of the first block.
        first_offset_blocks: u32,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// Encoded size of the largest frame.
        frame_bytes: u32,
        /// Receives the answer.
        reply: oneshot::Sender<OfferPlan>,
    },
    /// The verified bytes of a wanted block.
    Put {
        /// The save's lease, which is renewed.
        lease: LeaseId,
        /// The reserved block.
        key: BlockKey,
        /// Its frame, in the arena.
        bytes: Bytes,
    },
    /// Abort wanted blocks that will not arrive.
    Abort {
        /// Their keys.
        keys: Vec<BlockKey>,
    },
    /// Announcement position of all blocks put so far, in the shard that lists one block.
    Position {
        /// The block.
        block: BlockHash,
        /// Receives the answer.
        reply: oneshot::Sender<Option<AnnouncePosition>>,
    },
    /// Announcement positions of all blocks put so far, in every shard.
    Positions {
        /// Receives the answer; `None` before the first join.
        reply: oneshot::Sender<Option<ShardPositions>>,
    },
    /// End a request.
    Release {
        /// Its lease.
        lease: LeaseId,
        /// Confirms.
        reply: oneshot::Sender<()>,
    },
    /// Renew a lease that is still in use.
    Renew {
        /// The lease.
        lease: LeaseId,
    },
    /// The routers assigned a new epoch.
    Joined {
        /// The epoch.
        epoch: Epoch,
        /// Number of index shards.
        shards: u16,
        /// Weights generation in force.
        generation: Generation,
        /// Confirms that the outboxes announce everything, or returns the reason why the epoch was
        /// not applied.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// The routers' directives.
    Directives {
        /// Pins.
        pins: Vec<PinDirective>,
        /// Quotas in bytes.
        quotas: Vec<(TenantId, u64)>,
        /// Times to live.
        ttls: Vec<(TtlGroupId, Duration)>,
    },
    /// The fleet's reuse statistics.
    SetFleetReuseStats {
        /// Merged sums that replace the previous ones.
        fleet: ReuseStats,
    },
    /// Apply the newest windows (`windows`).
    SetWindow,
    /// Announce all blocks of a shard again.
    Reannounce {
        /// The shard.
        shard: u16,
        /// The number the shard's leader expects, if it sent one.
        expected: Option<Seq>,
        /// Confirms.
        reply: oneshot::Sender<()>,
    },
    /// Check which of these blocks are held, and sample held ones.
    Audit {
        /// The shard that lists them.
        shard: u16,
        /// Blocks to check.
        blocks: Vec<BlockHash>,
        /// Number of held blocks to sample.
        sample: usize,
        /// Seed of the sample.
        seed: u64,
        /// Receives the answer; `None` before the first join.
        reply: oneshot::Sender<Option<pb::AuditReply>>,
    },
    /// One page of the held blocks with their value (`Book::holdings`).
    Holdings {
        /// Slot at which the page begins.
        from: usize,
        /// Receives the answer.
        reply: oneshot::Sender<HoldingsPage>,
    },
    /// Status of the node.
    Status {
        /// Receives the answer.
        reply: oneshot::Sender<pb::NodeStatusReply>,
    },
}
