//! The client for a thread that has no runtime: operations are submitted under a tag, and what becomes of them is
//! polled.
//!
//! [`CompletionQueue::submit`] takes a batch or nothing, and never waits. [`CompletionQueue::poll`] and
//! [`CompletionQueue::wait`] hand out [`Completion`]s: of each operation its progress, and in every case exactly one
//! [`Progress::Ended`], after which nothing of the library refers to its rooms or its frame source any more. That
//! holds by construction: the end is told when the last reference to the operation is dropped (`state.rs`), whether
//! it ran to its end, was cancelled, panicked, or its runtime is gone.
//!
//! Not here: what an operation does (`operation.rs`, and through it the verbs of [`Client`]), and what of a prefix is
//! computed again ([`kv_core::pipeline`], which the engine runs).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{InstanceId, RequestId};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::{
    BlockRoom, Client, ClientError, FetchCall, FetchError, FetchOutcome, HeldLease, LayersCall, MayDecode,
    RouteAnswer, RouteCall, RouteError, SaveAnswer, SaveCall, SaveError, SourceMiss,
};

mod arrivals;
mod operation;
mod state;

use state::Shared;

/// Operations in flight unless said otherwise: several for each request that a busy instance runs.
pub const OPERATIONS_MAX: usize = 1024;

/// Blocks of operations in flight unless said otherwise: prompts of half a billion tokens. A queue keeps for each its
/// hash, its room and what the room holds: from C, eight bytes for each layer.
pub const OPERATION_BLOCKS_MAX: usize = 1 << 20;

/// How much a queue takes before it says [`SubmitError::Busy`]. An operation counts until its end was polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Operations in flight.
    pub operations_max: usize,
    /// Blocks that they name, and leases that they release.
    pub blocks_max: usize,
}

impl Default for QueueLimits {
    fn default() -> QueueLimits {
        QueueLimits { operations_max: OPERATIONS_MAX, blocks_max: OPERATION_BLOCKS_MAX }
    }
}

/// What is done under a tag.
#[derive(Debug)]
pub struct Submission<R> {
    /// The caller's name for it, which no other operation in flight may have.
    pub tag: u64,
    /// What is to be done.
    pub operation: Operation<R>,
}

/// One call of the client.
#[derive(Debug)]
pub enum Operation<R> {
    /// [`Client::route`].
    Route(RouteCall),
    /// [`Client::fetch`]: frames in memory of the library, all at the end.
    Fetch(FetchCall),
    /// [`Client::fetch_layers`]: into rooms of the caller.
    FetchLayers(LayersOperation<R>),
    /// [`Client::save`]. What its frame source refers to is not used after the end.
    Save(SaveCall),
    /// [`Client::release`].
    Release(Vec<HeldLease>),
    /// [`Client::may_decode`].
    MayDecode(MayDecodeCall),
}

/// What [`Client::may_decode`] is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MayDecodeCall {
    /// The request, as its route call had it.
    pub request: RequestId,
    /// Where it is to go on.
    pub instance: InstanceId,
    /// How far apart its tokens may come, in microseconds; 0: as its route call had it.
    pub tbt_max_us: u64,
}

/// A fetch into rooms of the caller.
#[derive(Debug)]
pub struct LayersOperation<R> {
    /// What is fetched. By layers, each is told as soon as all awaited blocks have it: for an engine that goes on when less
    /// comes than it began with, since a layer may be there for fewer blocks than the one before. By blocks, all layers are
    /// told when nothing can be missing any more.
    pub call: LayersCall,
    /// One for each block of the sources, in order. All have the same layers.
    pub rooms: Vec<R>,
    /// Whether its turn is now; else it is at [`CompletionQueue::begin`].
    pub begins: bool,
    /// Whether each block is told as it comes ([`Progress::Arrived`]), with its room; else all rooms come back at
    /// the end.
    pub each_block: bool,
}

/// What became of an operation.
#[derive(Debug)]
pub struct Completion<R> {
    /// Which operation.
    pub tag: u64,
    /// What became of it.
    pub progress: Progress<R>,
}

impl<R> Default for Completion<R> {
    fn default() -> Completion<R> {
        Completion { tag: 0, progress: Progress::Nothing }
    }
}

/// How far an operation is.
#[derive(Debug)]
pub enum Progress<R> {
    /// Nothing was written here: what is given to [`CompletionQueue::poll`] begins so.
    Nothing,
    /// All slices of a block are in its room. Only where each block is to be told; behind the end of what layers were
    /// told of, also after them.
    Arrived {
        /// Which block of the request.
        block: u32,
        /// Its room.
        room: R,
    },
    /// Blocks from this one on do not come all: they are the engine's to compute, but for those that arrived
    /// one by one. Told again when an earlier one is found missing; after a layer only where layers come first.
    Recompute {
        /// The first that does not come.
        from_block: u32,
    },
    /// This layer of all blocks from the first of the sources up to an end is in the rooms. Layers come in order,
    /// each once.
    Layer {
        /// Which layer.
        layer: u32,
        /// One past the last block.
        end_block: u32,
    },
    /// Nothing more comes of this operation, and nothing refers to what its caller gave.
    Ended(Box<Ended<R>>),
}

/// The end of an operation.
#[derive(Debug)]
pub struct Ended<R> {
    /// How it ended.
    pub outcome: Outcome,
    /// Rooms that were not handed out before, by the block of the request, in order.
    pub rooms: Vec<(u32, R)>,
    /// Leases that nodes may hold now, to be released when the request ends.
    pub leases: Vec<HeldLease>,
}

/// How an operation ended.
#[derive(Debug)]
pub enum Outcome {
    /// A route call.
    Routed(Result<RouteAnswer, RouteError>),
    /// A fetch.
    Fetched(Result<FetchOutcome, FetchError>),
    /// A fetch into rooms.
    Layers(Result<LayersCame, FetchError>),
    /// A save.
    Saved(Result<SaveAnswer, SaveError>),
    /// A release: what could not be released expires by itself.
    Released(Vec<(HeldLease, kvfleet_transport::PathError)>),
    /// Whether a request may decode.
    MayDecode(MayDecode),
    /// It was cancelled, or the queue was closed. What is in rooms that were not told of is of no use.
    Cancelled,
    /// Its runtime ended, or it panicked. As with one that was cancelled.
    Lost,
}

/// What came of a fetch into rooms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayersCame {
    /// All blocks of the sources before this one came.
    pub end_block: u32,
    /// Which blocks came, the first of the sources first.
    pub came: Vec<bool>,
    /// Sources that delivered less than they should have.
    pub misses: Vec<SourceMiss>,
    /// Encoded bytes of all frames that arrived, usable or not.
    pub received_bytes: u64,
    /// Frames that arrived and were not the block asked, whole, or did not fit their room.
    pub wrong_blocks: u32,
}

/// Why a batch was not taken. Nothing of it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// It does not fit beside what is in flight.
    #[error(
        "{operations} operations of {blocks} blocks do not fit beside {in_flight} in flight: poll their ends and submit again"
    )]
    Busy {
        /// Operations of the batch.
        operations: usize,
        /// Blocks that they name.
        blocks: usize,
        /// Operations in flight.
        in_flight: usize,
    },
    /// It would not fit if nothing were in flight.
    #[error(
        "{operations} operations of {blocks} blocks never fit a queue of {} and {}: submit fewer at once",
        limits.operations_max, limits.blocks_max
    )]
    TooLarge {
        /// Operations of the batch.
        operations: usize,
        /// Blocks that they name.
        blocks: usize,
        /// What the queue takes.
        limits: QueueLimits,
    },
    /// An operation in flight, or another one of the batch, has this tag.
    #[error("tag {tag} is in flight: give another one, or poll its end first")]
    TagInUse {
        /// Which.
        tag: u64,
    },
    /// The queue is being closed.
    #[error("the queue is closed: make another one")]
    Closed,
}

/// A batch that was not taken.
#[derive(Debug)]
pub struct Refused<R> {
    /// Why.
    pub why: SubmitError,
    /// All of it.
    pub batch: Vec<Submission<R>>,
}

/// Why a queue cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The system gives no threads.
    #[error("cannot start the threads of a queue: {0}")]
    Threads(io::Error),
    /// The client cannot be made.
    #[error(transparent)]
    Client(#[from] ClientError),
}

/// Operations of a client that are submitted and polled. Every method may be called from any thread, and several at
/// once. Dropping it cancels what is in flight and waits for nothing: whoever lends memory by address closes it first.
pub struct CompletionQueue<R> {
    client: Client,
    shared: Arc<Shared<R>>,
    runtime: Handle,
    /// Where the threads are its own.
    own: Option<Runtime>,
}

impl<R> std::fmt::Debug for CompletionQueue<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let in_flight = self.shared.in_flight();
        f.debug_struct("CompletionQueue").field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

impl<R: BlockRoom> CompletionQueue<R> {
    /// A queue whose operations run on this runtime.
    #[must_use]
    pub fn new(client: Client, limits: QueueLimits, runtime: Handle) -> CompletionQueue<R> {
        CompletionQueue { client, shared: Shared::new(limits), runtime, own: None }
    }

    /// A queue with so many threads of its own, for the client that is made on them.
    ///
    /// # Errors
    /// When the system gives no threads, or the client cannot be made.
    pub fn with_threads(
        threads: usize,
        limits: QueueLimits,
        make: impl FnOnce() -> Result<Client, ClientError>,
    ) -> Result<CompletionQueue<R>, QueueError> {
        let own = Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .thread_name("kvfleet-queue")
            .enable_all()
            .build()
            .map_err(QueueError::Threads)?;
        let runtime = own.handle().clone();
        let made = {
            let _inside = runtime.enter();
            make()
        };
        let client = match made {
            Ok(client) => client,
            Err(error) => {
                // The caller may be on a thread of another runtime, where this one may only be dropped so.
                own.shutdown_background();
                return Err(error.into());
            }
        };
        let mut queue = CompletionQueue::new(client, limits, runtime);
        queue.own = Some(own);
        Ok(queue)
    }

    /// Starts all of these, or nothing. Never waits.
    ///
    /// # Errors
    /// When they do not fit, a tag is in flight, or the queue is closed; the batch comes back.
    pub fn submit(&self, batch: Vec<Submission<R>>) -> Result<(), Refused<R>> {
        let operations = match self.shared.enter(&batch) {
            Ok(operations) => operations,
            Err(why) => return Err(Refused { why, batch }),
        };
        for (submission, operating) in batch.into_iter().zip(operations) {
            let operation = operation::bind(submission.operation, &operating);
            // A runtime that is gone drops it at once, which ends it as lost.
            self.runtime.spawn(operation::run(self.client.clone(), operation, operating));
        }
        Ok(())
    }

    /// Writes what became of operations so far into the first places, as far as they go, and says how many. Waits for
    /// nothing.
    pub fn poll(&self, into: &mut [Completion<R>]) -> usize {
        self.shared.poll(into)
    }

    /// The same, but waits until there is something; at most so long and at most an hour. Also while nothing is in
    /// flight, since another thread may submit; not once [`CompletionQueue::is_over`].
    ///
    /// Of several threads that poll one queue each gets other completions, and one may be done with an end while
    /// another still holds an earlier word of the same tag: let one poll, or put them in order by tag.
    pub fn wait(&self, into: &mut [Completion<R>], timeout: Duration) -> usize {
        self.shared.wait(into, timeout)
    }

    /// It is this fetch's turn ([`crate::LayerFetch::begin`]). `false` when no operation in flight has the tag.
    pub fn begin(&self, tag: u64) -> bool {
        self.shared.signal(tag, |signals| signals.begin.notify_one())
    }

    /// Asks an operation to end; one that is about to end may do so as if nothing had been said. `false` when no operation
    /// in flight has the tag.
    pub fn cancel(&self, tag: u64) -> bool {
        self.shared.signal(tag, |signals| signals.cancel.notify_one())
    }

    /// Operations whose end was not polled yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight()
    }

    /// Whether the queue is closed and all that it ever tells was polled.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.shared.is_over()
    }

    /// How much it takes.
    #[must_use]
    pub fn limits(&self) -> QueueLimits {
        self.shared.limits()
    }

    /// Takes nothing more, cancels what is in flight, and waits until nothing refers to what callers gave; `false` when
    /// that takes longer than so long or an hour, and it may be called again. Ends can still be polled after it. Not to be
    /// called on a thread of its runtime, which it would stop.
    pub fn close(&self, timeout: Duration) -> bool {
        self.shared.close();
        self.shared.wait_for_ends(timeout)
    }
}

impl<R> Drop for CompletionQueue<R> {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(own) = self.own.take() {
            // A runtime may be dropped on a thread of another one only so.
            own.shutdown_background();
        }
    }
}
