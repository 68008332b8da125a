//! Moves block bytes between processes: one pair of traits, several paths behind it.
//!
//! A client holds a [`Path`] to a node; a node gives a [`BlockService`] to a path's server side. What
//! goes over a path is a closed list: fetch, save, release, ping. Routing, choosing and retrying are
//! not here (`client/`), nor is what a node does with a request (`node/`), nor are control calls.
//!
//! Normal outcomes (`Hit`, `Partial`, `Busy`, `Miss`) are values; [`PathError`] is for broken things.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{
    BlockHash, Category, Class, Epoch, IdentityDigest, LeaseId, NodeId, RequestId, Seq, TenantId, Tier,
};
use kvfleet_proto::frame::{Frame, SliceLayout, Unsettled};

mod ask;
mod dial;
mod frames;
mod in_flight;
mod layered;
pub mod loopback;
pub mod pick;
mod pieces;
mod progress;
pub mod quic;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod renew;
#[cfg(test)]
mod restart_tests;
mod room;
mod serve;
pub mod shm;
mod silence;
mod slices;
mod stream;
pub mod suite;
pub mod tcp;
mod turns;
mod wire;

pub use frames::Frames;
pub use in_flight::ClassNumbers;
pub use layered::{LayerRoom, LayerSource};
pub use progress::Progress;
pub use room::{Carried, Room};
pub use slices::{AskedLayers, SliceSink};

/// How often leases in use are renewed unless the node says otherwise: a third of the time for which one keeps them.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// A boxed future, so that paths can be chosen at run time.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Who is asking and for what request: the part that fetch and save share.
#[derive(Clone, Debug)]
pub struct Asker {
    /// Lease under which the blocks of this request are held on the node until released.
    pub lease: LeaseId,
    /// The request, for traces and miss reasons.
    pub request: RequestId,
    /// Whose blocks.
    pub tenant: TenantId,
    /// Category of the request, for the eviction policy.
    pub category: Category,
    /// Identity the bytes must have.
    pub identity: IdentityDigest,
    /// W3C `traceparent`, empty when the request is not traced.
    pub traceparent: String,
    /// What it is asked for, where that is something else than the operation's name says.
    pub class: Option<Class>,
}

/// Ask for consecutive blocks of a prefix.
#[derive(Clone, Debug)]
pub struct FetchRequest {
    /// Who asks.
    pub asker: Asker,
    /// Epoch of the node that the caller was told; another epoch is a miss.
    pub epoch: Epoch,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks, in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Time after which recomputing is cheaper than waiting.
    pub deadline: Duration,
    /// How far it is, and over what. Stays at the asker's end.
    pub progress: Progress,
}

impl FetchRequest {
    /// What it is for.
    #[must_use]
    pub fn class(&self) -> Class {
        Class::of_fetch(self.asker.class)
    }
}

/// What the node says before it sends bytes. `blocks` counts from the first block asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchAnswer {
    /// All blocks follow. One tier per block.
    Hit {
        /// Tier each block is read from.
        tiers: Vec<Tier>,
    },
    /// Only the leading blocks follow.
    Partial {
        /// Tier of each block that follows.
        tiers: Vec<Tier>,
        /// Why the rest does not.
        reason: MissReason,
    },
    /// A named limit is reached; ask again after the hint, or recompute.
    Busy {
        /// When asking again makes sense.
        retry_after: Duration,
    },
    /// Nothing follows.
    Miss {
        /// Why.
        reason: MissReason,
    },
}

/// Why a block was not delivered. Closed; numbers are the wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MissReason {
    /// The node does not hold the block (evicted since, or never stored).
    NotHeld = 1,
    /// The caller's epoch is not the node's: the index was stale.
    StaleEpoch = 2,
    /// The identity asked is not the one this node serves.
    IdentityDiffers = 3,
    /// The bytes did not match their checksum, hash or identity.
    Corrupt = 4,
    /// The deadline passed.
    TooLate = 5,
    /// The node could not be reached or broke off.
    NodeLost = 6,
    /// A named limit was reached.
    Busy = 7,
    /// The medium failed to give the bytes.
    MediumFailed = 8,
    /// The node serves the same identity under other weights ([`kv_core::id::Generation`]): either side is behind.
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
    /// This answer when only `delivered` blocks came, because of `reason`. Unchanged when all came.
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

    /// Blocks that follow, or should.
    #[must_use]
    pub fn tiers(&self) -> &[Tier] {
        match self {
            FetchAnswer::Hit { tiers } | FetchAnswer::Partial { tiers, .. } => tiers,
            FetchAnswer::Busy { .. } | FetchAnswer::Miss { .. } => &[],
        }
    }
}

/// Ask to save consecutive blocks of a prefix.
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// Who asks.
    pub asker: Asker,
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
    /// What it is for.
    #[must_use]
    pub fn class(&self) -> Class {
        Class::of_save(self.asker.class)
    }
}

/// What the node wants of an offered save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveOffer {
    /// Send the frames of the blocks marked `true`, in order.
    Wanted(Vec<bool>),
    /// A named limit is reached.
    Busy {
        /// When offering again makes sense.
        retry_after: Duration,
    },
    /// Nothing of this save can be taken (quota, identity, size).
    Refused(SaveRefusal),
}

/// Why a node takes nothing of a save. Closed; numbers are the wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SaveRefusal {
    /// The tenant's quota is used up.
    Quota = 1,
    /// Identity differs from what the node serves.
    IdentityDiffers = 2,
    /// Frames are larger than the node's largest size class, or empty.
    FrameSize = 3,
    /// No tier admits new blocks (all held, or the medium is full).
    Full = 4,
    /// What would have to leave is worth more to the node: nothing is wrong, and nothing is to be done.
    Worth = 5,
    /// The node serves the same identity under other weights: either side is behind.
    GenerationDiffers = 6,
}

impl SaveRefusal {
    /// Every refusal, in the order of its number.
    pub const ALL: [SaveRefusal; 6] = [
        SaveRefusal::Quota,
        SaveRefusal::IdentityDiffers,
        SaveRefusal::FrameSize,
        SaveRefusal::Full,
        SaveRefusal::Worth,
        SaveRefusal::GenerationDiffers,
    ];
}

/// What became of a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaveDone {
    /// Blocks written and committed.
    pub stored_blocks: u32,
    /// Blocks that were there already.
    pub present_blocks: u32,
    /// Blocks the node did not take (no room, wrong checksum).
    pub refused_blocks: u32,
    /// Encoded bytes written.
    pub stored_bytes: u64,
    /// Where this becomes visible: the announce batch that carries it.
    pub visible_at: Option<VisibleAt>,
}

/// A point in a node's announce stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VisibleAt {
    /// The node.
    pub node: NodeId,
    /// Its epoch.
    pub epoch: Epoch,
    /// The shard that lists the blocks; each shard counts batches by itself.
    pub shard: u16,
    /// The batch.
    pub seq: Seq,
}

/// Result of [`Path::save`]: the offer's refusal, or what was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveAnswer {
    /// The save ran to its end.
    Done(SaveDone),
    /// See [`SaveOffer::Busy`].
    Busy {
        /// When offering again makes sense.
        retry_after: Duration,
    },
    /// See [`SaveOffer::Refused`].
    Refused(SaveRefusal),
}

/// What became of a save by layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Streamed {
    /// The path cannot, or the node has no room for it now or wants nothing of it yet. It knows that no slices come.
    Nothing,
    /// It was sent to its end.
    Answered(SaveAnswer),
    /// It was left before its end, since the node would not have waited so long for the computation. The node may hear of that later than
    /// of what it is asked next.
    Left,
}

impl Streamed {
    /// What the node said of all of it.
    #[must_use]
    pub fn answer(self) -> Option<SaveAnswer> {
        match self {
            Streamed::Answered(answer) => Some(answer),
            Streamed::Nothing | Streamed::Left => None,
        }
    }
}

/// Something is broken between here and the node.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PathError {
    /// The peer could not be reached.
    #[error("cannot reach {peer}: {cause}; check that it runs and that its address is right")]
    Unreachable {
        /// Who.
        peer: String,
        /// What the system said.
        cause: String,
    },
    /// The peer's or our certificate was refused.
    #[error(
        "{peer} and this process do not trust each other: {cause}; both need certificates of the same cluster authority that did not run out"
    )]
    Untrusted {
        /// Who.
        peer: String,
        /// What TLS said.
        cause: String,
    },
    /// The connection broke during the operation.
    #[error("connection to {peer} broke: {cause}")]
    Broken {
        /// Who.
        peer: String,
        /// What happened.
        cause: String,
    },
    /// The peer sent something that is not of this protocol.
    #[error("{peer} sent {what}")]
    Protocol {
        /// Who.
        peer: String,
        /// What was wrong.
        what: String,
    },
    /// Our own request is larger than any peer takes.
    #[error("request has {bytes} bytes, the limit is {limit}: ask for fewer blocks at once")]
    TooLarge {
        /// Its encoded size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The deadline passed.
    #[error("{peer} did not answer within {after:?}; check that it runs and that its port is open")]
    TimedOut {
        /// Who.
        peer: String,
        /// How long we waited.
        after: Duration,
    },
}

/// A client's way to one node. Cheap to share; operations run side by side.
pub trait Path: Send + Sync {
    /// Fetches blocks in prefix order. Every frame whose *header* parses is handed to `sink` as it
    /// arrives (checksums are the caller's to verify); the answer comes back at the end. When the
    /// stream breaks or the deadline passes midway, the frames already delivered stand and the answer
    /// is `Partial`.
    fn fetch<'a>(
        &'a self,
        request: FetchRequest,
        sink: &'a mut (dyn FnMut(Frame) + Send),
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>>;

    /// Fetches these layers of blocks into the caller's memory, in this order as far as blocks are readable and the path can:
    /// one that moves frames whole hands on what it has. Slices are checked against
    /// their sums. What the answer says of blocks counts those of which all came that was asked; when the stream breaks or
    /// the deadline passes midway, the slices that were handed on stand.
    fn fetch_layers<'a>(
        &'a self,
        request: FetchRequest,
        asked: AskedLayers,
        sink: &'a mut dyn SliceSink,
    ) -> BoxFuture<'a, Result<FetchAnswer, PathError>> {
        Box::pin(async move {
            let mut whole = slices::Whole::new(sink, asked);
            let mut take = |frame: Frame| whole.take(&[frame]);
            let answer = self.fetch(request, &mut take).await?;
            Ok(whole.conclude(answer))
        })
    }

    /// Whether [`Path::fetch_layers`] moves the slices that are asked for and no others.
    fn moves_slices(&self) -> bool {
        false
    }

    /// Offers blocks and sends the wanted ones; `source(position)` gives the frame of `hashes[position]`. It may be asked for
    /// blocks that turn out not to be wanted, and for one block twice.
    fn save<'a>(
        &'a self,
        request: SaveRequest,
        source: &'a (dyn Fn(usize) -> Frame + Send + Sync),
    ) -> BoxFuture<'a, Result<SaveAnswer, PathError>>;

    /// Offers blocks that are being computed and sends the slices of the wanted ones as they come, their heads behind the last
    /// layer: the save ends soon after it. Where it does not go that way, whoever has whole frames then saves these.
    fn save_layers<'a>(
        &'a self,
        _request: SaveRequest,
        _layers: &'a mut dyn LayerSource,
    ) -> BoxFuture<'a, Result<Streamed, PathError>> {
        Box::pin(std::future::ready(Ok(Streamed::Nothing)))
    }

    /// Whether [`Path::save_layers`] sends slices before all are there, where the node has room.
    fn streams_saves(&self) -> bool {
        false
    }

    /// Ends a lease; returns once the node has taken note.
    fn release(&self, lease: LeaseId) -> BoxFuture<'_, Result<(), PathError>>;

    /// Why this path is of no more use; nothing while it may work. Answers at once, from what is known.
    fn failure(&self) -> Option<PathError>;

    /// Round trip, for liveness and latency estimates.
    fn ping(&self) -> BoxFuture<'_, Result<Duration, PathError>>;
}

/// Opens paths to nodes by address.
pub trait Dialer: Send + Sync {
    /// A path to the node whose blocks are served at `address` (`host:port`).
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>>;
}

/// Who a connection belongs to, as its transport proved it. Nothing that a request says of itself is in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Caller {
    /// This process.
    Own,
    /// Whoever has the key of this leaf certificate (DER), which the connection proved. All of its connections are one
    /// caller, so that one that is dialled anew goes on with the leases of the one before.
    Certified(Arc<[u8]>),
    /// A process of this host, as the system says.
    Local {
        /// Its user.
        uid: u32,
        /// The process that connected; its number may be another one's after it ended.
        pid: i32,
        /// Told apart by the number of its connection, which no other one ever has at this node.
        connection: u64,
    },
}

/// What a node says of a caller, before the caller asked anything.
pub enum Admission {
    /// It is served as everybody.
    Same,
    /// It is served within limits of its own.
    Scoped {
        /// Answers this caller, and nobody else.
        service: Arc<dyn BlockService>,
        /// Whether it may map the memory of the node's blocks, and so read every tenant's.
        maps: bool,
    },
    /// It is not served.
    Refused,
}

/// What a node answers to a fetch: the answer first, then the frames as they become readable.
#[derive(Debug)]
pub struct FetchReply {
    /// The answer; its tiers say how many frames should follow.
    pub answer: FetchAnswer,
    /// The frames in prefix order. Ends early when the medium fails; the path then reports `Partial`.
    pub frames: Frames,
    /// The node's epoch, checked by the caller against the one it asked for.
    pub epoch: Epoch,
    /// By position: the block has its place in DRAM under this lease, so that its bytes may be lent to another process.
    /// Empty: none may.
    pub lendable: Vec<bool>,
}

/// A save under way on the node's side. Dropping it without `finish` aborts what was not committed.
pub trait SaveSession: Send {
    /// Takes the frame of the next wanted block, whose turn it uses up whatever it is.
    fn put(&mut self, frame: Frame) -> BoxFuture<'_, ()>;

    /// The same of a frame that another process may be writing still: what counts is what a copy of it says. Done when
    /// nothing of `frame` is read any more.
    fn put_unsettled(&mut self, frame: Arc<dyn Unsettled>) -> BoxFuture<'_, ()> {
        let mut bytes = vec![0; frame.len_bytes()];
        frame.copy(0, &mut bytes);
        let bytes = Bytes::from(bytes);
        // What is no frame is put as it is, and refused: the next one must not be taken for this block's.
        let no_frame =
            Frame { bytes: bytes.clone(), identity: IdentityDigest::default(), hash: BlockHash::default() };
        self.put(Frame::parse(bytes).unwrap_or(no_frame))
    }

    /// Memory for all wanted blocks, taken at once and without waiting, so that their slices can come before their heads. Asked
    /// before anything is put, and then nothing else is. Nothing when there is none: frames come whole.
    fn layers(&mut self, _layout: &SliceLayout) -> Option<&mut dyn LayerRoom> {
        None
    }

    /// Commits and answers.
    fn finish(self: Box<Self>) -> BoxFuture<'static, SaveDone>;
}

/// The node's side of a path.
pub trait BlockService: Send + Sync + 'static {
    /// Answers a fetch.
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply>;

    /// Answers a save's offer; with a session when the offer is `Wanted`.
    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)>;

    /// Ends a lease.
    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()>;

    /// How this caller is served. Asked once for each connection, before anything that comes over it is answered.
    fn admit(&self, _caller: &Caller) -> Admission {
        Admission::Same
    }

    /// Starts a lease's time anew, for whoever still uses what it holds; nothing when it ended. Answers at once.
    fn renew(&self, _lease: LeaseId) {}

    /// How often a lease is renewed while an operation under it is under way: well before its time is over.
    fn renew_every(&self) -> Duration {
        RENEW_EVERY
    }
}

/// Memory in which a node's blocks lie and which processes of its host can map, to read it.
pub trait SharedArena: Send + Sync + 'static {
    /// A handle by which the memory can be mapped and only be read, whoever has it and whatever is done with it.
    ///
    /// # Errors
    /// What the system said; and when it cannot keep a reader from writing.
    fn reader(&self) -> io::Result<OwnedFd>;

    /// How long the memory is, in bytes.
    fn len_bytes(&self) -> u64;

    /// Where in the memory these bytes begin, all of which lie there; nothing when they lie elsewhere.
    fn offset_of(&self, bytes: &Bytes) -> Option<u64>;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::suite::{MemoryService, frame, hash, hashes, save_request};

    #[tokio::test]
    async fn what_is_put_unsettled_is_taken_like_a_frame_and_what_is_none_uses_up_its_turn() {
        let service = MemoryService::default();
        let (_, session) = service.save(save_request(&hashes(4))).await;
        let mut session = session.unwrap();
        let bytes = |number| frame(hash(number), 1000).bytes;
        let mut flipped = bytes(3).to_vec();
        *flipped.last_mut().unwrap() ^= 1;
        for sent in [bytes(0), Bytes::from_static(b"no frame"), bytes(2), flipped.into()] {
            session.put_unsettled(Arc::new(sent)).await;
        }
        let done = session.finish().await;
        assert_eq!((done.stored_blocks, done.refused_blocks), (2, 2));
        assert_eq!([0, 1, 2, 3].map(|number| service.holds(hash(number))), [true, false, true, false]);
    }
}
