//! The closed list of commands that may enter the Raft log, and the answers of applying them.
//!
//! Not here: the effect of a command (`index/mod.rs`) and its bytes (`index/codec.rs`). Load and
//! heat never appear in this list: they are ephemeral state of a router.

use crate::id::{BlockHash, Epoch, Generation, InstanceId, NodeId, PinId, Seq, TenantId, Tier, TtlGroupId};

/// Every command that the log may hold. Each one is deterministic: equal logs give equal indexes on
/// every replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A node starts or restarts. It gets a fresh [`Epoch`]; blocks of its earlier epochs stop
    /// counting.
    Join(NodeRecord),
    /// A shard takes over the epoch that the control group gave to a node. Blocks of earlier epochs
    /// stop counting, and announcements start at number 1. Ignored if this epoch or a later one is
    /// known.
    Admit {
        /// The node, as it joined.
        record: NodeRecord,
        /// The epoch that the control group gave it.
        epoch: Epoch,
    },
    /// A node went silent: everything that it announced under `epoch` stops counting, in O(1).
    Fence {
        /// The silent node.
        node: NodeId,
        /// The epoch to end. Ignored if the node has joined again since.
        epoch: Epoch,
    },
    /// A node leaves: like `Fence`, and the node is forgotten. Its last epoch stays known, so
    /// epochs only grow. A fenced node may still leave.
    Leave {
        /// The leaving node.
        node: NodeId,
        /// The epoch it leaves.
        epoch: Epoch,
    },
    /// Ownership changes of one or more nodes, gathered in one batch window.
    Announce(Vec<Announcement>),
    /// Keep these blocks on every holder until an `Unpin` or the end of the pin. Repeating the
    /// command lets the owner change the kind and the end.
    Pin(Pin),
    /// End a pin. Only its owner may.
    Unpin {
        /// The pin to end.
        pin: PinId,
        /// The caller; must be the pin's owner.
        owner: String,
        /// If set, unpin only if the pin still has this end. Protects a pin that its owner renews
        /// at the same moment.
        ends_ms: Option<u64>,
    },
    /// Sets the bytes that a tenant may hold on each node; `None` removes the limit.
    SetQuota {
        /// The tenant.
        tenant: TenantId,
        /// Limit in bytes per node.
        bytes: Option<u64>,
    },
    /// Sets the time to live of a group, in milliseconds since last use; `None` removes it.
    SetTtl {
        /// The group.
        group: TtlGroupId,
        /// Time to live in milliseconds.
        ttl_ms: Option<u64>,
    },
    /// The instances have loaded other weights: every node's epoch ends, in O(nodes), and blocks of
    /// earlier weights stop counting. Each node learns it when it joins again. Refused unless the
    /// generation follows the current one. `Ignored` for the current one, so a caller may retry.
    SetGeneration(Generation),
}

/// What the cluster knows about a node that joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// The node.
    pub node: NodeId,
    /// Address that serves block bytes, `host:port` (QUIC).
    pub data_address: String,
    /// Address that serves control calls, `host:port` (gRPC).
    pub control_address: String,
    /// Host name, to recognise an instance on the same host.
    pub host: String,
    /// The instance that owns this node, if any.
    pub instance: Option<InstanceId>,
    /// Digest of the identity manifest it serves; must equal that of the nodes already known.
    pub identity: crate::id::IdentityDigest,
    /// Size of one block in bytes.
    pub block_bytes: u64,
}

/// One batch of changes of one node, in order of occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The announcing node.
    pub node: NodeId,
    /// Epoch of the node; a batch of an older epoch is ignored.
    pub epoch: Epoch,
    /// Number of this batch: the previous one plus one.
    pub seq: Seq,
    /// The changes.
    pub changes: Vec<Change>,
}

/// A change of ownership on one node. Blocks are listed in prefix order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A run of consecutive blocks became readable in `tier`.
    Stored {
        /// Hash of the block before the first one; `None` at the start of a prefix.
        parent: Option<BlockHash>,
        /// The blocks, each the child of the one before.
        blocks: Vec<BlockHash>,
        /// The tier.
        tier: Tier,
    },
    /// Blocks moved between tiers. Afterwards they are in `to` and not in `from`, whether or not
    /// the index listed them before.
    Moved {
        /// The blocks, in any order.
        blocks: Vec<BlockHash>,
        /// Their previous tier.
        from: Tier,
        /// Their new tier.
        to: Tier,
    },
    /// The copies in `tier` are gone.
    Dropped {
        /// The blocks, in any order.
        blocks: Vec<BlockHash>,
        /// The tier that lost them.
        tier: Tier,
        /// The cause. The index ignores it; a router reports it when asked why a block is missing.
        cause: DropCause,
    },
    /// Everything that this node announced before is invalid; a full re-announcement follows.
    Cleared,
}

/// Why a node dropped the last copy of blocks. Closed: it takes two bits of a log record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DropCause {
    /// The tier needed space, and the policy or the tenants' shares chose these blocks.
    #[default]
    Capacity = 0,
    /// The quota of their tenant.
    Quota = 1,
    /// The time to live of their group ended.
    Ttl = 2,
    /// Their bytes could not be read or written.
    Failed = 3,
}

impl DropCause {
    /// Every cause, in the order of its number.
    pub const ALL: [DropCause; 4] =
        [DropCause::Capacity, DropCause::Quota, DropCause::Ttl, DropCause::Failed];

    /// The cause of this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<DropCause> {
        DropCause::ALL.get(number as usize).copied()
    }
}

/// A request by an owner that every holder keep these blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The pin.
    pub pin: PinId,
    /// The owner; only the owner may end it.
    pub owner: String,
    /// The pinned blocks.
    pub blocks: Vec<BlockHash>,
    /// Hard or soft.
    pub kind: PinKind,
    /// End in milliseconds of Unix time; in practice always set. The router that accepts the write
    /// chooses it. Applying a command reads no clock, so an expired pin stays until an `Unpin`.
    pub ends_ms: Option<u64>,
}

impl Pin {
    /// Whether the pin has ended at this Unix time in milliseconds.
    #[must_use]
    pub fn is_expired(&self, now_ms: u64) -> bool {
        self.ends_ms.is_some_and(|ends_ms| ends_ms <= now_ms)
    }
}

/// How firmly a pin keeps its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PinKind {
    /// Never evicted.
    #[default]
    Hard,
    /// Evicted only after all blocks that are neither pinned, leased nor awaited, and before a save
    /// is refused for lack of space.
    Soft,
}

/// Answer of applying one [`Command`]. `Announce` answers once per announcement, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// `Join`: the node's new epoch.
    Joined(Epoch),
    /// The command took effect and changed the state.
    Done,
    /// No effect: the command named an older epoch or an absent item, or the state already was as
    /// asked.
    Ignored,
    /// The command was refused, with the reason for the caller.
    Refused(Refusal),
    /// `Announce`: one outcome per announcement.
    Announced(Vec<AnnounceOutcome>),
}

/// Why a command was refused. A refused command leaves the state unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The joining node serves another identity than the cluster.
    #[error(
        "identity {theirs} differs from the cluster's {ours}: start the node with the same model manifest"
    )]
    Identity {
        /// The cluster's identity.
        ours: crate::id::IdentityDigest,
        /// The node's identity.
        theirs: crate::id::IdentityDigest,
    },
    /// The pin belongs to another owner.
    #[error("{pin} belongs to {owner:?}: only its owner may end it")]
    NotOwner {
        /// The pin.
        pin: PinId,
        /// Its owner.
        owner: String,
    },
    /// A pin with this number exists with other blocks or another owner.
    #[error("{0} exists with other blocks or another owner: choose another number")]
    PinExists(PinId),
    /// The generation does not directly follow the current one.
    #[error(
        "{to} does not follow {now}, the generation in force: check which weights the instances have loaded, \
         and name the generation that follows theirs"
    )]
    Generation {
        /// The generation in force.
        now: Generation,
        /// The requested generation.
        to: Generation,
    },
    /// A named limit of the index was exceeded.
    #[error("{what} is {got}, the limit is {limit}: send less")]
    OverLimit {
        /// The limit's name.
        what: String,
        /// The requested amount.
        got: u64,
        /// The limit.
        limit: u64,
    },
}

/// Result of one announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnounceOutcome {
    /// The batch was applied.
    Applied {
        /// Sequence number that the next batch must carry.
        next: Seq,
        /// Blocks that the full index did not list: readers will miss them.
        unlisted: u64,
    },
    /// The batch was applied before and is ignored.
    Duplicate {
        /// Sequence number that the next batch must carry.
        next: Seq,
    },
    /// At least one batch is missing: the node must send `Cleared` and everything it holds, under
    /// number `expected`.
    Gap {
        /// The number that was expected.
        expected: Seq,
    },
    /// The epoch is over: the node must join again.
    Fenced,
}
