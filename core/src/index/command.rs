//! The closed list of what may enter the Raft log, and what applying it answers.
//!
//! Not here: what a command does (`index/mod.rs`) and its bytes (`index/codec.rs`). Load and heat
//! never appear in this list: they are soft state of a router.

use crate::id::{BlockHash, Epoch, Generation, GroupId, InstanceId, NodeId, PinId, Seq, TenantId, Tier};

/// Everything that can be written to the log. Each command is deterministic: equal logs give equal
/// indexes on every replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A node starts (or starts anew). Gets a fresh [`Epoch`]; blocks of its earlier epochs vanish.
    Join(NodeRecord),
    /// The control group gave this node this epoch: a shard takes it over. Blocks of its earlier epochs
    /// vanish, and its announcements start at number 1. Ignored when the epoch is known already or is
    /// older than the one known.
    Admit {
        /// The node, as it joined.
        record: NodeRecord,
        /// The epoch it was given.
        epoch: Epoch,
    },
    /// A node went silent: everything it announced under `epoch` stops counting, in O(1).
    Fence {
        /// The silent node.
        node: NodeId,
        /// The epoch that is over. Ignored when the node has joined again since.
        epoch: Epoch,
    },
    /// A node says goodbye; like `Fence`, and the node is forgotten (its last epoch is not, so that
    /// epochs only grow). A fenced node may still leave.
    Leave {
        /// The leaving node.
        node: NodeId,
        /// The epoch it leaves.
        epoch: Epoch,
    },
    /// Ownership changes of one or more nodes, gathered in one batch window.
    Announce(Vec<Announcement>),
    /// Keep these blocks wherever they are until unpinned, or until the pin's end. Its owner may change how firmly and
    /// until when by saying it again.
    Pin(Pin),
    /// End a pin. Only its owner may.
    Unpin {
        /// The pin to end.
        pin: PinId,
        /// Who asks; must be the pin's owner.
        owner: String,
        /// Only if this is the pin's end: of a pin that is over, and that its owner may be renewing just now.
        ends_ms: Option<u64>,
    },
    /// Bytes a tenant may hold on each node; `None` lifts the limit.
    SetQuota {
        /// The tenant.
        tenant: TenantId,
        /// Limit in bytes per node.
        bytes: Option<u64>,
    },
    /// Time to live of a group, in milliseconds since last use; `None` lifts it.
    SetTtl {
        /// The group.
        group: GroupId,
        /// Time to live in milliseconds.
        ttl_ms: Option<u64>,
    },
    /// The instances have loaded other weights: what was computed with those before is void on every node, in O(nodes).
    /// Every node's epoch ends, and each learns of it as it joins again. Refused unless it is the generation that follows
    /// the one in force; that one itself changes nothing, so that a caller may repeat a lost call.
    SetGeneration(Generation),
}

/// What the cluster knows about a node that joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// The node.
    pub node: NodeId,
    /// Where block bytes are served, `host:port` (QUIC).
    pub data_address: String,
    /// Where control calls are served, `host:port` (gRPC).
    pub control_address: String,
    /// Host name, to recognise an instance on the same host.
    pub host: String,
    /// The instance that uses this node as its own, if any.
    pub instance: Option<InstanceId>,
    /// Digest of the identity manifest it serves; must equal that of the nodes already known.
    pub identity: crate::id::IdentityDigest,
    /// Size of one block in bytes.
    pub block_bytes: u64,
}

/// One batch of changes of one node, in the order in which they happened there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Who announces.
    pub node: NodeId,
    /// Under which epoch; older ones are ignored.
    pub epoch: Epoch,
    /// Number of this batch, previous one plus one.
    pub seq: Seq,
    /// What changed.
    pub changes: Vec<Change>,
}

/// A change of ownership on one node. Blocks are listed in prefix order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A run of consecutive blocks became readable in `tier`.
    Stored {
        /// Hash before the first block; `None` at the start of a prefix.
        parent: Option<BlockHash>,
        /// The blocks, each the child of the one before.
        blocks: Vec<BlockHash>,
        /// Where.
        tier: Tier,
    },
    /// Blocks went from one tier to another: afterwards they are not in `from` and are in `to`, known
    /// before or not.
    Moved {
        /// The blocks, in any order.
        blocks: Vec<BlockHash>,
        /// Where they were.
        from: Tier,
        /// Where they are now.
        to: Tier,
    },
    /// The copies in `tier` are gone.
    Dropped {
        /// The blocks, in any order.
        blocks: Vec<BlockHash>,
        /// Where they were.
        tier: Tier,
        /// Why. It changes nothing in the index; a router that is asked why a block is missing tells it.
        cause: DropCause,
    },
    /// Everything this node announced before is void (start of a full re-announcement).
    Cleared,
}

/// Why a node dropped the last copy of blocks. Closed: two bits of a log record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DropCause {
    /// Room was needed, and the policy or the shares of tenants chose them.
    #[default]
    Room = 0,
    /// Their tenant's quota.
    Quota = 1,
    /// The time to live of their group was over.
    Ttl = 2,
    /// Their bytes could not be read or written.
    Failed = 3,
}

impl DropCause {
    /// Every cause, in the order of its number.
    pub const ALL: [DropCause; 4] = [DropCause::Room, DropCause::Quota, DropCause::Ttl, DropCause::Failed];

    /// The cause of this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<DropCause> {
        DropCause::ALL.get(number as usize).copied()
    }
}

/// A hold on blocks, with an owner, kept by every node that has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The pin.
    pub pin: PinId,
    /// Who may end it.
    pub owner: String,
    /// What it holds.
    pub blocks: Vec<BlockHash>,
    /// How firmly.
    pub kind: PinKind,
    /// When it is over, in milliseconds of Unix time; never without. Chosen where the write is accepted: applying a
    /// command reads no clock, so the index keeps a pin that is over until an `Unpin` ends it.
    pub ends_ms: Option<u64>,
}

impl Pin {
    /// Whether the pin is over at this Unix time in milliseconds.
    #[must_use]
    pub fn is_over(&self, now_ms: u64) -> bool {
        self.ends_ms.is_some_and(|ends_ms| ends_ms <= now_ms)
    }
}

/// How firmly a pin keeps its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PinKind {
    /// They leave for nobody.
    #[default]
    Hard,
    /// They leave after everything that nobody pinned, leased or waits for, and before anybody is refused room.
    Soft,
}

/// Answer of applying one [`Command`]. `Announce` answers once per announcement, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applied {
    /// `Join`: the node's new epoch.
    Joined(Epoch),
    /// The command took effect: the state is another one.
    Done,
    /// The command named something that is not so (older epoch, already gone) or asked for what is so
    /// already: no effect.
    Ignored,
    /// The command was refused, with the reason for the caller.
    Refused(Refusal),
    /// `Announce`: one outcome per announcement.
    Announced(Vec<AnnounceOutcome>),
}

/// Why a command was refused. Refusals change nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The joining node serves bytes of another identity than the cluster.
    #[error(
        "identity {theirs} differs from the cluster's {ours}: start the node with the same model manifest"
    )]
    Identity {
        /// The cluster's identity.
        ours: crate::id::IdentityDigest,
        /// The node's identity.
        theirs: crate::id::IdentityDigest,
    },
    /// The pin belongs to someone else.
    #[error("{pin} belongs to {owner:?}: only its owner may end it")]
    NotOwner {
        /// The pin.
        pin: PinId,
        /// Its owner.
        owner: String,
    },
    /// A pin with this number exists with other contents.
    #[error("{0} exists with other blocks or another owner: choose another number")]
    PinExists(PinId),
    /// Generations follow each other one by one.
    #[error(
        "{to} does not follow {now}, which is in force: look which weights the instances have loaded, and name the \
         generation that follows the one they had"
    )]
    Generation {
        /// The generation in force.
        now: Generation,
        /// The one that was asked for.
        to: Generation,
    },
    /// A named limit of the index was exceeded.
    #[error("{what} is {got}, the limit is {limit}: send less")]
    OverLimit {
        /// Which limit.
        what: String,
        /// What was asked.
        got: u64,
        /// The limit.
        limit: u64,
    },
}

/// What became of one announcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnounceOutcome {
    /// Applied; the next one must carry this sequence number.
    Applied {
        /// Next expected number.
        next: Seq,
        /// Blocks that the index, being full, did not list: readers will miss them.
        unlisted: u64,
    },
    /// Seen before; nothing changed.
    Duplicate {
        /// Next expected number.
        next: Seq,
    },
    /// One or more batches are missing: the node must send `Cleared` and everything it holds, under
    /// number `expected`.
    Gap {
        /// The number that was expected.
        expected: Seq,
    },
    /// The epoch is over: the node must join again.
    Fenced,
}
