//! Everything the store's task is asked, one word each.
//!
//! Not here: how it answers (`mod.rs` and the situations beside it).

use std::time::Duration;

use bytes::Bytes;
use kv_core::evict::BlockKey;
use kv_core::evict::statistics::Statistics;
use kv_core::id::{BlockHash, Epoch, Generation, GroupId, LeaseId, Seq, TenantId};
use kv_core::tier::{Asker, Holdings, PinOrder};
use kvfleet_proto::pb;
use kvfleet_transport::VisibleAt;
use tokio::sync::oneshot;

use super::{FetchPlan, OfferPlan};
use crate::announce::outboxes::Point;

/// What the task is asked.
#[derive(Debug)]
pub enum Ask {
    /// Which of these blocks can be read, and their bytes.
    Fetch {
        /// Who asks.
        asker: Asker,
        /// The weights under which it was let in.
        generation: Generation,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// The answer.
        reply: oneshot::Sender<FetchPlan>,
    },
    /// Which of these blocks are wanted.
    Offer {
        /// Who asks.
        asker: Asker,
        /// The weights under which it was let in.
        generation: Generation,
        /// Hash before the first one.
        parent: Option<BlockHash>,
        /// Offset of the first one.
        first_offset_blocks: u32,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// Encoded size of the largest frame.
        frame_bytes: u32,
        /// The answer.
        reply: oneshot::Sender<OfferPlan>,
    },
    /// The verified bytes of a wanted block.
    Put {
        /// The save's lease, kept alive.
        lease: LeaseId,
        /// The reserved block.
        key: BlockKey,
        /// Its frame, in the arena.
        bytes: Bytes,
    },
    /// Wanted blocks that will not come.
    Abort {
        /// Their keys.
        keys: Vec<BlockKey>,
    },
    /// Where everything put so far becomes visible in the shard that lists a block.
    Position {
        /// The block.
        block: BlockHash,
        /// The answer.
        reply: oneshot::Sender<Option<VisibleAt>>,
    },
    /// Where everything put so far becomes visible in every shard.
    Positions {
        /// The answer.
        reply: oneshot::Sender<Option<Point>>,
    },
    /// A request ended.
    Release {
        /// Its lease.
        lease: LeaseId,
        /// Note taken.
        reply: oneshot::Sender<()>,
    },
    /// Somebody still reads what a lease holds.
    Renew {
        /// The lease.
        lease: LeaseId,
    },
    /// The routers gave a new epoch.
    Joined {
        /// The epoch.
        epoch: Epoch,
        /// Shards of the index.
        shards: u16,
        /// The weights in force.
        generation: Generation,
        /// Note taken: the outboxes announce everything. Or why not, and nothing has changed.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// The routers' directives.
    Directives {
        /// Pins.
        pins: Vec<PinOrder>,
        /// Quotas in bytes.
        quotas: Vec<(TenantId, u64)>,
        /// Times to live.
        ttls: Vec<(GroupId, Duration)>,
    },
    /// What the whole fleet saw of categories of blocks.
    Inform {
        /// Merged sums, in place of what was said before.
        fleet: Statistics,
    },
    /// Waiting requests need what the newest window says (`windows`).
    SetWindow,
    /// Announce everything that a shard lists anew; from `expected` on when its leader said so.
    Reannounce {
        /// The shard.
        shard: u16,
        /// The number the leader expects.
        expected: Option<Seq>,
        /// Note taken.
        reply: oneshot::Sender<()>,
    },
    /// Which of these blocks are held, and some that are.
    Audit {
        /// The shard that lists them.
        shard: u16,
        /// Blocks asked about.
        blocks: Vec<BlockHash>,
        /// How many held ones to name.
        sample: usize,
        /// Where to look for them.
        seed: u64,
        /// The answer; none before the first join.
        reply: oneshot::Sender<Option<pb::AuditReply>>,
    },
    /// A step through what is held and what it is worth (`Book::holdings`).
    Holdings {
        /// Where the step begins.
        from: usize,
        /// The answer.
        reply: oneshot::Sender<Holdings>,
    },
    /// Everything there is to know.
    Status {
        /// The answer.
        reply: oneshot::Sender<pb::NodeStatusReply>,
    },
}
