//! The client for a thread without a runtime: operations are submitted under a tag, and their
//! progress is polled.
//!
//! [`CompletionQueue::submit`] accepts a whole batch or none of it, and never waits.
//! [`CompletionQueue::poll`] and [`CompletionQueue::wait`] return [`Completion`]s: the progress of
//! each operation, and exactly one [`Progress::Ended`] in every case. After that the library holds
//! no reference to the operation's buffers or frame source. This holds by construction: the end is
//! reported when the last reference to the operation is dropped (`state.rs`), whether it finished,
//! was cancelled, panicked, or lost its runtime.
//!
//! Not here: running an operation (`operation.rs`, which calls [`Client`]), and choosing the blocks
//! to recompute ([`kv_core::pipeline`], run by the engine).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{InstanceId, RequestId};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::{
    Client, ClientError, DecodeAdmission, FetchCall, FetchError, FetchOutcome, HeldLease, LayerFetchCall,
    RouteAnswer, RouteCall, RouteError, SaveAnswer, SaveCall, SaveError, SliceBuffer, SourceMiss,
};

mod arrivals;
mod operation;
mod state;

use state::SharedQueue;

/// Default limit of operations in flight: several for each request of a busy instance.
pub const OPERATIONS_MAX: usize = 1024;

/// Default limit of blocks of operations in flight: prompts of half a billion tokens. For each
/// block a queue keeps its hash, its buffer and the buffer's own data: from C, eight bytes a layer.
pub const OPERATION_BLOCKS_MAX: usize = 1 << 20;

/// Limits above which a queue answers [`SubmitError::Busy`]. An operation counts until its end is
/// polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Operations in flight.
    pub operations_max: usize,
    /// Blocks that they name, plus leases that they release.
    pub blocks_max: usize,
}

impl Default for QueueLimits {
    fn default() -> QueueLimits {
        QueueLimits { operations_max: OPERATIONS_MAX, blocks_max: OPERATION_BLOCKS_MAX }
    }
}

/// An operation and its tag.
#[derive(Debug)]
pub struct Submission<R> {
    /// The caller's name for it; must differ from those of all operations in flight.
    pub tag: u64,
    /// The operation.
    pub operation: Operation<R>,
}

/// One call of the client.
#[derive(Debug)]
pub enum Operation<R> {
    /// [`Client::route`].
    Route(RouteCall),
    /// [`Client::fetch`]: frames in memory of the library, returned together at the end.
    Fetch(FetchCall),
    /// [`Client::fetch_layers`]: into buffers of the caller.
    FetchLayers(FetchLayersOperation<R>),
    /// [`Client::save`]. The frame source is not used after the end.
    Save(SaveCall),
    /// [`Client::release`].
    Release(Vec<HeldLease>),
    /// [`Client::admit_decode`].
    AdmitDecode(AdmitDecodeCall),
}

/// Arguments of [`Client::admit_decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmitDecodeCall {
    /// The request's number in its route call.
    pub request: RequestId,
    /// Instance on which it would decode.
    pub instance: InstanceId,
    /// Limit of the mean time between output tokens, in microseconds; 0 uses that of the route
    /// call.
    pub tbt_max_us: u64,
}

/// A fetch into buffers of the caller.
#[derive(Debug)]
pub struct FetchLayersOperation<R> {
    /// The fetch. By layers, each layer is reported as soon as all awaited blocks have it. This
    /// suits an engine that can drop blocks midway, since a later layer may be there for fewer
    /// blocks. By blocks, all layers are reported when no block can fail any more.
    pub call: LayerFetchCall,
    /// One buffer for each block of the sources, in order. All have the same layers.
    pub buffers: Vec<R>,
    /// Whether the prefill starts now; otherwise it starts at [`CompletionQueue::begin`].
    pub start_now: bool,
    /// Whether each block is reported with its buffer when it arrives ([`Progress::Arrived`]);
    /// otherwise all buffers are returned at the end.
    pub each_block: bool,
}

/// A report about an operation.
#[derive(Debug)]
pub struct Completion<R> {
    /// Tag of the operation.
    pub tag: u64,
    /// The reported progress.
    pub progress: Progress<R>,
}

impl<R> Default for Completion<R> {
    fn default() -> Completion<R> {
        Completion { tag: 0, progress: Progress::Empty }
    }
}

/// Progress of an operation.
#[derive(Debug)]
pub enum Progress<R> {
    /// Initial value of the elements passed to [`CompletionQueue::poll`].
    Empty,
    /// All slices of a block are in its buffer. Only if `each_block` is set. For blocks behind the
    /// `end_block` of reported layers, this may follow the layers.
    Arrived {
        /// Number of the block in the request.
        block: u32,
        /// Its buffer.
        buffer: R,
    },
    /// Blocks from this one on do not all arrive: the engine computes them, except those reported
    /// by [`Progress::Arrived`]. Reported again if an earlier block fails; after a layer only if
    /// layers arrive first.
    Recompute {
        /// The first block that does not arrive.
        from_block: u32,
    },
    /// This layer of all blocks, from the first of the sources up to an end, is in the buffers.
    /// Layers are reported in order, once each.
    Layer {
        /// The layer.
        layer: u32,
        /// One past the last block.
        end_block: u32,
    },
    /// The last report of this operation; the library holds no reference to the caller's memory any
    /// more.
    Ended(Box<OperationEnd<R>>),
}

/// The end of an operation.
#[derive(Debug)]
pub struct OperationEnd<R> {
    /// The outcome.
    pub outcome: OperationOutcome,
    /// Buffers not handed out before, with their block's number in the request, in order.
    pub buffers: Vec<(u32, R)>,
    /// Leases that nodes may hold now; release them when the request ends.
    pub leases: Vec<HeldLease>,
}

/// Outcome of an operation.
#[derive(Debug)]
pub enum OperationOutcome {
    /// A route call.
    Routed(Result<RouteAnswer, RouteError>),
    /// A fetch.
    Fetched(Result<FetchOutcome, FetchError>),
    /// A fetch into buffers.
    LayersFetched(Result<LayerFetchResult, FetchError>),
    /// A save.
    Saved(Result<SaveAnswer, SaveError>),
    /// A release, with the leases that could not be released; they expire.
    Released(Vec<(HeldLease, kvfleet_transport::PathError)>),
    /// A decode admission check.
    DecodeAdmission(DecodeAdmission),
    /// Cancelled, or the queue was closed. Ignore buffers that were not reported.
    Cancelled,
    /// Its runtime stopped, or it panicked. Ignore buffers that were not reported.
    Lost,
}

/// Result of a fetch into buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerFetchResult {
    /// End of the contiguous prefix: all blocks of the sources before this one arrived.
    pub end_block: u32,
    /// Whether each block arrived, starting with the first of the sources.
    pub arrived: Vec<bool>,
    /// Sources that delivered less than they should have.
    pub misses: Vec<SourceMiss>,
    /// Encoded bytes of all received frames, usable or not.
    pub received_bytes: u64,
    /// Received frames that are not the requested block, are damaged, or do not fit their buffer.
    pub wrong_blocks: u32,
}

/// Reason why a whole batch was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// It does not fit beside the operations in flight.
    #[error(
        "{operations} operations of {blocks} blocks do not fit beside {in_flight} in flight: poll \
         completions and submit again"
    )]
    Busy {
        /// Operations of the batch.
        operations: usize,
        /// Blocks that they name.
        blocks: usize,
        /// Operations in flight.
        in_flight: usize,
    },
    /// It exceeds the queue's limits even with no operation in flight.
    #[error(
        "{operations} operations of {blocks} blocks never fit a queue of {} and {}: submit fewer at once",
        limits.operations_max, limits.blocks_max
    )]
    TooLarge {
        /// Operations of the batch.
        operations: usize,
        /// Blocks that they name.
        blocks: usize,
        /// The queue's limits.
        limits: QueueLimits,
    },
    /// An operation in flight, or another one of the batch, has this tag.
    #[error("tag {tag} is in flight: use another one, or poll its end first")]
    TagInUse {
        /// The tag.
        tag: u64,
    },
    /// The queue is being closed.
    #[error("the queue is closed: create another one")]
    Closed,
}

/// A rejected batch.
#[derive(Debug)]
pub struct RejectedBatch<R> {
    /// The reason.
    pub error: SubmitError,
    /// The whole batch.
    pub batch: Vec<Submission<R>>,
}

/// Error of creating a queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The system could not start threads.
    #[error("cannot start the threads of a queue: {0}")]
    Threads(io::Error),
    /// The client could not be created.
    #[error(transparent)]
    Client(#[from] ClientError),
}

/// A client's queue of submitted operations. Every method may be called from any thread and
/// concurrently. Dropping it cancels the operations without waiting; a caller that lends memory by
/// address must close it first.
pub struct CompletionQueue<R> {
    client: Client,
    shared: Arc<SharedQueue<R>>,
    runtime: Handle,
    /// The runtime, if the queue has its own threads.
    own_runtime: Option<Runtime>,
}

impl<R> std::fmt::Debug for CompletionQueue<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let in_flight = self.shared.in_flight();
        f.debug_struct("CompletionQueue").field("in_flight", &in_flight).finish_non_exhaustive()
    }
}

impl<R: SliceBuffer> CompletionQueue<R> {
    /// A queue that runs its operations on this runtime.
    #[must_use]
    pub fn new(client: Client, limits: QueueLimits, runtime: Handle) -> CompletionQueue<R> {
        CompletionQueue { client, shared: SharedQueue::new(limits), runtime, own_runtime: None }
    }

    /// A queue with its own threads, on which `make` creates the client.
    ///
    /// # Errors
    /// If the system cannot start threads, or the client cannot be created.
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
                // The caller may be on a thread of another runtime, where only a background
                // shutdown is allowed.
                own.shutdown_background();
                return Err(error.into());
            }
        };
        let mut queue = CompletionQueue::new(client, limits, runtime);
        queue.own_runtime = Some(own);
        Ok(queue)
    }

    /// Starts all operations of a batch, or none. Never waits.
    ///
    /// # Errors
    /// If they exceed the limits, a tag is in flight, or the queue is closed; returns the batch.
    pub fn submit(&self, batch: Vec<Submission<R>>) -> Result<(), RejectedBatch<R>> {
        let operations = match self.shared.admit(&batch) {
            Ok(operations) => operations,
            Err(why) => return Err(RejectedBatch { error: why, batch }),
        };
        for (submission, operating) in batch.into_iter().zip(operations) {
            let operation = operation::bind(submission.operation, &operating);
            // If the runtime has stopped, it drops the task at once, and the operation ends as
            // lost.
            self.runtime.spawn(operation::run(self.client.clone(), operation, operating));
        }
        Ok(())
    }

    /// Writes available completions to the first elements of `into` and returns their number. Never
    /// waits.
    pub fn poll(&self, into: &mut [Completion<R>]) -> usize {
        self.shared.poll(into)
    }

    /// The same, but waits for a completion, up to `timeout` and at most an hour. It also waits
    /// while no operation is in flight, since another thread may submit; not once
    /// [`CompletionQueue::is_finished`].
    ///
    /// If several threads poll one queue, each gets other completions. One may process an end while
    /// another still holds an earlier report of the same tag: poll from one thread, or order
    /// reports by tag.
    pub fn wait(&self, into: &mut [Completion<R>], timeout: Duration) -> usize {
        self.shared.wait(into, timeout)
    }

    /// Starts the prefill of this fetch ([`crate::LayerFetch::begin`]). `false` if no operation in
    /// flight has the tag.
    pub fn begin(&self, tag: u64) -> bool {
        self.shared.signal(tag, |signals| signals.begin.notify_one())
    }

    /// Requests cancellation of an operation; one that is about to end may still end normally.
    /// `false` if no operation in flight has the tag.
    pub fn cancel(&self, tag: u64) -> bool {
        self.shared.signal(tag, |signals| signals.cancel.notify_one())
    }

    /// Number of operations with an end not yet polled.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.in_flight()
    }

    /// Whether the queue is closed and all completions were polled.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.shared.is_finished()
    }

    /// The queue's limits.
    #[must_use]
    pub fn limits(&self) -> QueueLimits {
        self.shared.limits()
    }

    /// Rejects new operations, cancels those in flight, and waits until the library holds no
    /// reference to callers' memory. `false` on timeout (at most an hour); the call may be
    /// repeated. Ends can still be polled after it. Do not call it on a thread of the queue's
    /// runtime, which it would block.
    pub fn close(&self, timeout: Duration) -> bool {
        self.shared.close();
        self.shared.wait_for_ends(timeout)
    }
}

impl<R> Drop for CompletionQueue<R> {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(own) = self.own_runtime.take() {
            // The only shutdown that is allowed on a thread of another runtime.
            own.shutdown_background();
        }
    }
}
