//! Moves block bytes between processes: one pair of traits with several implementations.
//!
//! A client holds a [`Path`] to a node; a node gives a [`BlockService`] to a path's server. A path
//! carries a closed list of operations: fetch, save, release, ping. Not here: routing, choice of
//! sources and retries (`client/`), a node's handling of requests (`node/`), and control calls.
//!
//! Normal outcomes (`Hit`, `Partial`, `Busy`, `Miss`) are values; [`PathError`] is for failures.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{
    BlockHash, Category, Epoch, IdentityDigest, LeaseId, NodeId, RequestId, Seq, TenantId, Tier, TrafficClass,
};
use kvfleet_proto::frame::{Frame, SliceLayout, VolatileBytes};

mod capacity;
mod client_ops;
mod dial;
mod frames;
mod in_flight;
mod layered;
pub mod loopback;
pub mod pick;
mod pieces;
mod progress;
pub mod quic;
pub mod renew;
#[cfg(test)]
mod restart_tests;
mod serve;
pub mod shm;
mod silence;
mod slices;
mod slot_queue;
mod stream;
pub mod suite;
pub mod tcp;
pub mod upgrade;
mod wire;

pub use capacity::{Capacity, TrafficCounters};
pub use frames::Frames;
pub use in_flight::ClassCounts;
pub use layered::{LayerBuffers, LayerSource};
pub use progress::Progress;
pub use slices::{LayerRequest, SliceSink};

/// Default interval of lease renewal: a third of a lease's lifetime.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);

/// A boxed future, so that paths can be chosen at run time.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The context of an operation, common to fetch and save.
#[derive(Clone, Debug)]
pub struct RequestContext {
    /// Lease that holds this request's blocks on the node until released.
    pub lease: LeaseId,
    /// The request, for traces and miss reasons.
    pub request: RequestId,
    /// Tenant that owns the blocks.
    pub tenant: TenantId,
    /// Category of the request, for the eviction policy.
    pub category: Category,
    /// Identity that the bytes must have.
    pub identity: IdentityDigest,
    /// W3C `traceparent`, empty when the request is not traced.
    pub traceparent: String,
    /// Priority class of the operation; `None` means the usual class of the operation.
    pub class: Option<TrafficClass>,
}

/// A request for consecutive blocks of a prefix.
#[derive(Clone, Debug)]
pub struct FetchRequest {
    /// Context of the operation.
    pub context: RequestContext,
    /// Epoch of the node that the caller knows; any other epoch is a miss.
    pub epoch: Epoch,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Time after which recomputing is cheaper than waiting.
    pub deadline: Duration,
    /// Progress of the fetch and the path in use. Not sent to the node.
    pub progress: Progress,
}

impl FetchRequest {
    /// Priority class.
    #[must_use]
    pub fn class(&self) -> TrafficClass {
        TrafficClass::for_fetch(self.context.class)
    }
}

/// The node's answer before it sends bytes. `blocks` counts from the first requested block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchAnswer {
    /// All blocks follow. One tier per block.
    Hit {
        /// Tier that each block is read from.
        tiers: Vec<Tier>,
    },
    /// Only the leading blocks follow.
    Partial {
        /// Tier of each block that follows.
        tiers: Vec<Tier>,
        /// Why the remaining blocks do not follow.
        reason: MissReason,
    },
    /// A named limit is reached; ask again after the hint, or recompute.
    Busy {
        /// Time after which to ask again.
        retry_after: Duration,
    },
    /// No block follows.
    Miss {
        /// Why.
        reason: MissReason,
    },
}

/// Why a block was not delivered. A closed set; the numbers are the wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MissReason {
    /// The node does not hold the block (evicted since, or never stored).
    NotHeld = 1,
    /// The caller's epoch is not the node's: its index was stale.
    StaleEpoch = 2,
    /// The requested identity is not the one that this node serves.
    IdentityDiffers = 3,
    /// The bytes did not match their checksum, hash or identity.
    Corrupt = 4,
    /// The deadline passed.
    TooLate = 5,
    /// The node could not be reached, or the connection failed.
    NodeLost = 6,
    /// A named limit was reached.
    Busy = 7,
    /// The medium failed to deliver the bytes.
    MediumFailed = 8,
    /// The node serves the same identity with other weights ([`kv_core::id::Generation`]): one side
    /// is out of date.
    GenerationDiffers = 9,
}

impl MissReason {
    /// Every reason, in the order of its number.
    pub const ALL: [MissReason; 9] = [
        MissReason::NotHeld,
        MissReason::StaleEpoch,
        MissReason::IdentityDiffers,
        MissReason::Corrupt,
        MissReason::TooLate,
        MissReason::NodeLost,
        MissReason::Busy,
        MissReason::MediumFailed,
        MissReason::GenerationDiffers,
    ];

    /// Lower-case name as used in metrics and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MissReason::NotHeld => "not_held",
            MissReason::StaleEpoch => "stale_epoch",
            MissReason::IdentityDiffers => "identity_differs",
            MissReason::Corrupt => "corrupt",
            MissReason::TooLate => "too_late",
            MissReason::NodeLost => "node_lost",
            MissReason::Busy => "busy",
            MissReason::MediumFailed => "medium_failed",
            MissReason::GenerationDiffers => "generation_differs",
        }
    }
}

impl FetchAnswer {
    /// This answer if only `delivered` blocks arrived, because of `reason`. Unchanged if all
    /// arrived.
    #[must_use]
    pub fn cut_short(self, delivered: usize, reason: MissReason) -> FetchAnswer {
        match self {
            FetchAnswer::Hit { mut tiers } | FetchAnswer::Partial { mut tiers, .. }
                if delivered < tiers.len() =>
            {
                tiers.truncate(delivered);
                if tiers.is_empty() {
                    FetchAnswer::Miss { reason }
                } else {
                    FetchAnswer::Partial { tiers, reason }
                }
            }
            complete => complete,
        }
    }

    /// Tiers of the blocks that follow.
    #[must_use]
    pub fn tiers(&self) -> &[Tier] {
        match self {
            FetchAnswer::Hit { tiers } | FetchAnswer::Partial { tiers, .. } => tiers,
            FetchAnswer::Busy { .. } | FetchAnswer::Miss { .. } => &[],
        }
    }
}

/// A request to save consecutive blocks of a prefix.
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// Context of the operation.
    pub context: RequestContext,
    /// Hash before the first block; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Encoded size of the largest frame that will follow, in bytes.
    pub frame_bytes: u64,
}

impl SaveRequest {
    /// Priority class.
    #[must_use]
    pub fn class(&self) -> TrafficClass {
        TrafficClass::for_save(self.context.class)
    }
}

/// The node's answer to an offered save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveOffer {
    /// Send the frames of the blocks marked `true`, in order.
    Wanted(Vec<bool>),
    /// A named limit is reached.
    Busy {
        /// Time after which to offer again.
        retry_after: Duration,
    },
    /// The node takes no block of this save (quota, identity, size).
    Refused(SaveRefusal),
}

/// Why a node takes no block of a save. A closed set; the numbers are the wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SaveRefusal {
    /// The tenant's quota is used up.
    Quota = 1,
    /// Identity differs from what the node serves.
    IdentityDiffers = 2,
    /// Frames are larger than the node's largest size class, or empty.
    FrameSize = 3,
    /// No tier admits new blocks (all are held, or the medium is full).
    Full = 4,
    /// The node would have to evict more valuable blocks. This is normal operation; no action is
    /// needed.
    LowValue = 5,
    /// The node serves the same identity with other weights: one side is out of date.
    GenerationDiffers = 6,
}

impl SaveRefusal {
    /// Every refusal, in the order of its number.
    pub const ALL: [SaveRefusal; 6] = [
        SaveRefusal::Quota,
        SaveRefusal::IdentityDiffers,
        SaveRefusal::FrameSize,
        SaveRefusal::Full,
        SaveRefusal::LowValue,
        SaveRefusal::GenerationDiffers,
    ];
}

/// Result of a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveDone {
    /// Blocks written and committed.
    pub stored_blocks: u32,
    /// Blocks that were already present.
    pub present_blocks: u32,
    /// Blocks that the node did not take (no memory, wrong checksum).
    pub refused_blocks: u32,
    /// Encoded bytes written.
    pub stored_bytes: u64,
    /// Announce batch that makes the blocks visible in the index; `None` if there is none.
    pub visible_at: Option<AnnouncePosition>,
}

/// A position in a node's announce stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnnouncePosition {
    /// The node.
    pub node: NodeId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Shard that lists the blocks; each shard numbers its batches separately.
    pub shard: u16,
    /// Number of the batch.
    pub seq: Seq,
}

/// Result of [`Path::save`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveAnswer {
    /// The save completed.
    Done(SaveDone),
    /// See [`SaveOffer::Busy`].
    Busy {
        /// Time after which to offer again.
        retry_after: Duration,
    },
    /// See [`SaveOffer::Refused`].
    Refused(SaveRefusal),
}

/// Outcome of a layer-wise save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayeredSaveOutcome {
    /// Not streamed: the path cannot, or the node has no memory for it now or wants no block yet.
    /// The node knows that no slices come.
    NotStreamed,
    /// Sent completely.
    Answered(SaveAnswer),
    /// Abandoned, because the node would not have waited long enough for the computation. The node
    /// may learn this only after the next request.
    Abandoned,
}

impl LayeredSaveOutcome {
    /// The node's answer to the whole save; `None` if it was not sent completely.
    #[must_use]
    pub fn answer(self) -> Option<SaveAnswer> {
        match self {
            LayeredSaveOutcome::Answered(answer) => Some(answer),
            LayeredSaveOutcome::NotStreamed | LayeredSaveOutcome::Abandoned => None,
        }
    }
}

/// A failure between this process and the node.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PathError {
    /// The peer could not be reached.
    #[error("cannot reach {peer}: {cause}; check that it runs and that its address is right")]
    Unreachable {
        /// Address of the peer.
        peer: String,
        /// Error of the system.
        cause: String,
    },
    /// The peer's or our certificate was refused.
    #[error(
        "{peer} and this process do not trust each other: {cause}; both need unexpired certificates signed \
         by the same cluster CA"
    )]
    Untrusted {
        /// Address of the peer.
        peer: String,
        /// Error of the TLS library.
        cause: String,
    },
    /// The connection failed during the operation.
    #[error("connection to {peer} broke: {cause}")]
    Broken {
        /// Address of the peer.
        peer: String,
        /// Cause.
        cause: String,
    },
    /// The peer violated the protocol.
    #[error("{peer} sent {what}")]
    Protocol {
        /// Address of the peer.
        peer: String,
        /// The violation.
        what: String,
    },
    /// The request is larger than any peer accepts.
    #[error("request has {bytes} bytes, the limit is {limit}: ask for fewer blocks at once")]
    TooLarge {
        /// Encoded size in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The deadline passed.
    #[error("{peer} did not answer within {after:?}; check that it runs and that its port is open")]
    TimedOut {
        /// Address of the peer.
        peer: String,
        /// Time waited.
        after: Duration,
    },
}

/// A client's connection to one node. Cheap to share; operations run concurrently.
pub trait Path: Send + Sync {
    /// Fetches blocks in prefix order. Every frame with a valid header goes to `sink` on arrival;
    /// the caller verifies the checksums. The answer comes at the end. If the connection fails or
    /// the deadline passes midway, the delivered frames stay valid and the answer is `Partial`.
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>>;

    /// Fetches these layers of blocks into the caller's memory. They arrive in the requested order
    /// if the blocks are readable and the path supports it; a path that moves whole frames passes
    /// on each frame's layers at once. Slices are checked against their checksums. The answer
    /// counts the blocks with all requested layers. Slices delivered before a failure or the
    /// deadline stay valid.
    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: LayerRequest,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let mut whole = slices::FrameSplitter::new(sink, asked);
            let mut take = |frame: Frame| whole.split(&[frame]);
            let answer = self.fetch(request, &mut take).await?;
            Ok(whole.finish(answer))
        })
    }

    /// Whether [`Path::fetch_layers`] transfers only the requested slices.
    fn fetches_slices(&self) -> bool {
        false
    }

    /// Offers blocks and sends the wanted ones; `source(position)` returns the frame of
    /// `hashes[position]`. It may be called for blocks that are not wanted, and twice for one
    /// block.
    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>>;

    /// Offers blocks while they are computed. Sends the slices of the wanted ones as they are
    /// ready, and the frame headers after the last layer, so the save ends soon after the
    /// computation. If this is not possible, the caller saves the whole frames later.
    fn save_layers<'a>(
        &'a self,
        _request: SaveRequest,
        _layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<LayeredSaveOutcome, PathError>> {
        Box::pin(std::future::ready(Ok(LayeredSaveOutcome::NotStreamed)))
    }

    /// Whether [`Path::save_layers`] sends slices before the last layer is computed, if the node
    /// has memory for them.
    fn streams_saves(&self) -> bool {
        false
    }

    /// Ends a lease; returns once the node has recorded it.
    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>>;

    /// Why this path has failed; `None` while it may work. Returns at once, from known state.
    fn failure(&self) -> Option<PathError>;

    /// Round trip time, for liveness and latency estimates.
    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>>;
}

/// Opens paths to nodes by address.
pub trait Dialer: Send + Sync {
    /// Opens a path to the node that serves blocks at `address` (`host:port`).
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>>;
}

/// The owner of a connection, as proved by its transport. Contains no claim of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    /// This process.
    ThisProcess,
    /// The holder of the key of this leaf certificate (DER), as the handshake proved. All its
    /// connections are one caller, so a redialed connection can use the leases of the previous one.
    Certified(Arc<[u8]>),
    /// A process of this host, as reported by the kernel.
    Local {
        /// Its user.
        uid: u32,
        /// The process that connected. The number may be reused after it ends.
        pid: i32,
        /// Number of the connection, never reused at this node.
        connection: u64,
    },
}

/// A node's decision about a caller, before any request.
pub enum CallerAdmission {
    /// Served by the common service.
    Unscoped,
    /// Served within limits of its own.
    Scoped {
        /// The service for this caller alone.
        service: Arc<dyn BlockService>,
        /// Whether the caller may map the memory of the node's blocks, and so read every tenant's
        /// blocks.
        may_map: bool,
    },
    /// Not served.
    Refused,
}

/// A node's reply to a fetch: the answer, then the frames as they become readable.
#[derive(Debug)]
pub struct FetchReply {
    /// The answer; its tiers give the number of frames.
    pub answer: FetchAnswer,
    /// The frames in prefix order. Ends early if the medium fails; the path then reports `Partial`.
    pub frames: Frames,
    /// The node's epoch; the client compares it with the requested one.
    pub epoch: Epoch,
    /// By position: whether the block lies in DRAM under this lease, so that its bytes may be
    /// shared with another process. Empty: none may.
    pub lendable: Vec<bool>,
}

/// A save in progress at the node. Dropping it without `finish` aborts the uncommitted blocks.
pub trait SaveSession: Send {
    /// Takes the frame of the next wanted block. A bad frame also uses up that block's position.
    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()>;

    /// Like [`Self::put`], for a frame that another process may still be writing: a copy of it
    /// decides. Done when `frame` is no longer read.
    fn put_volatile(&mut self, frame: Arc<dyn VolatileBytes>) -> BoxFuture<'_, ()> {
        let mut bytes = vec![0; frame.len_bytes()];
        frame.copy(0, &mut bytes);
        let bytes = Bytes::from(bytes);
        // Invalid bytes are put as an empty frame and refused, so that the next frame is not taken
        // for this block.
        let no_frame =
            Frame { bytes: bytes.clone(), identity: IdentityDigest::default(), hash: BlockHash::default() };
        self.put(Frame::parse(bytes).unwrap_or(no_frame))
    }

    /// Memory for all wanted blocks, taken at once and without waiting, so that their slices can
    /// arrive before their headers. Called before any `put`, and instead of it. `None` if there is
    /// no memory: frames then arrive whole.
    fn layer_buffers(&mut self, _layout: &SliceLayout) -> Option<&mut dyn LayerBuffers> {
        None
    }

    /// Commits and returns the result.
    fn finish(self: Box<Self>) -> BoxFuture<'static, SaveDone>;
}

/// The node's side of a path.
pub trait BlockService: Send + Sync + 'static {
    /// Answers a fetch.
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply>;

    /// Answers an offer; with a session if the answer is `Wanted`.
    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)>;

    /// Ends a lease.
    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()>;

    /// Decides how to serve this caller. Called once per connection, before any request.
    fn admit(&self, _caller: &Caller) -> CallerAdmission {
        CallerAdmission::Unscoped
    }

    /// Restarts a lease's lifetime while it is in use; no effect after its end. Returns at once.
    fn renew(&self, _lease: LeaseId) {}

    /// Interval of lease renewal during an operation, well below a lease's lifetime.
    fn renew_interval(&self) -> Duration {
        RENEW_INTERVAL
    }
}

/// Memory of a node's blocks that processes of its host can map for reading.
pub trait SharedArena: Send + Sync + 'static {
    /// A handle that maps the memory read-only for any holder.
    ///
    /// # Errors
    /// The error of the system; also when it cannot prevent a reader from writing.
    fn reader(&self) -> io::Result<OwnedFd>;

    /// Length of the memory in bytes.
    fn len_bytes(&self) -> u64;

    /// Offset of these bytes within the memory; `None` if they do not all lie there.
    fn offset_of(&self, bytes: &Bytes) -> Option<u64>;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite::{MemoryService, frame, hash, hashes, save_request};

    #[tokio::test]
    async fn put_volatile_stores_valid_frames_and_refuses_others() {
        let service = MemoryService::default();
        let (_, session) = service.save(save_request(&hashes(4))).await;
        let mut session = session.unwrap();
        let bytes = |number| frame(hash(number), 1000).bytes;
        let mut flipped = bytes(3).to_vec();
        *flipped.last_mut().unwrap() ^= 1;
        for sent in [bytes(0), Bytes::from_static(b"no frame"), bytes(2), flipped.into()] {
            session.put_volatile(Arc::new(sent)).await;
        }
        let done = session.finish().await;
        assert_eq!((done.stored_blocks, done.refused_blocks), (2, 2));
        assert_eq!([0, 1, 2, 3].map(|number| service.holds(hash(number))), [true, false, true, false]);
    }
}
