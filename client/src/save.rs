//! Save: writes new blocks to a node, awaited or in the background.
//!
//! The background queue is bounded in calls and bytes. Above a bound the call fails at once: an
//! unsaved block costs a later recompute, an unbounded queue costs the process. Not here: choosing
//! the node (the decision does), and storing the blocks (the node).

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, LeaseId};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::{PathError, RequestContext, SaveAnswer, SaveRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::paths::AcquiredPath;
use crate::{Client, HeldLease};

/// Maximum background saves, running or waiting: a few seconds of a busy instance's requests.
pub const SAVE_QUEUE_CALLS_MAX: usize = 256;

/// Maximum bytes of frames in background saves; they occupy the engine's memory until sent.
pub const SAVE_QUEUE_BYTES_MAX: usize = 256 << 20;

/// Background saves that run concurrently. More would only share one link.
const CONCURRENT_SAVES_MAX: usize = 4;

/// Layer-wise saves that stream slices while they are computed, in addition to those. They last as
/// long as a prefill. Further ones are sent after their last layer.
const STREAMING_SAVES_MAX: usize = 4;

/// Default timeout of a save. A full queue ([`SAVE_QUEUE_BYTES_MAX`]) drains within it over a slow
/// link, even with the maximum of concurrent saves. A longer save is not worth its memory.
pub const SAVE_DEADLINE: Duration = Duration::from_secs(60);

/// Longest deadline of a save, to avoid overflow of the clock; a longer one would have no effect.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Returns the frame of the block at a position of a save; called only when the node requests it.
pub type FrameSource = Arc<dyn Fn(usize) -> Frame + Send + Sync>;

/// A save of a request's new blocks.
#[derive(Clone)]
pub struct SaveCall {
    /// Identity of the caller; the lease is the one of the request's fetch.
    pub asker: RequestContext,
    /// Data address of the node.
    pub address: String,
    /// Epoch under which the router named the node.
    pub epoch: Epoch,
    /// Hash before the first block; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Encoded size of the largest frame, in bytes.
    pub frame_bytes: u64,
    /// Source of the frames.
    pub frame: FrameSource,
    /// Time limit once it runs; use [`SAVE_DEADLINE`] by default.
    pub deadline: Duration,
}

impl std::fmt::Debug for SaveCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SaveCall")
            .field("asker", &self.asker)
            .field("address", &self.address)
            .field("epoch", &self.epoch)
            .field("first_offset_blocks", &self.first_offset_blocks)
            .field("blocks", &self.hashes.len())
            .finish_non_exhaustive()
    }
}

impl SaveCall {
    /// The lease this save holds on its node.
    #[must_use]
    pub fn lease(&self) -> HeldLease {
        HeldLease { address: self.address.clone(), lease: self.asker.lease }
    }

    /// Maximum bytes that the caller keeps for this save.
    fn bytes(&self) -> usize {
        usize::try_from(self.frame_bytes).unwrap_or(usize::MAX).saturating_mul(self.hashes.len())
    }

    fn request(&self) -> SaveRequest {
        SaveRequest {
            context: self.asker.clone(),
            parent: self.parent,
            first_offset_blocks: self.first_offset_blocks,
            hashes: self.hashes.clone(),
            frame_bytes: self.frame_bytes,
        }
    }
}

/// A background save, with the leases to release after it.
#[derive(Clone, Debug)]
pub struct BackgroundSave {
    /// The save.
    pub call: SaveCall,
    /// Leases of the request's fetch; the save's own lease is released too.
    pub then_release: Vec<HeldLease>,
}

/// Error of a save. A node's refusal and `Busy` are answers, not errors.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SaveError {
    /// The save has no blocks.
    #[error("a save without blocks: omit the call")]
    Empty,
    /// The node was unreachable or the connection broke; uncommitted blocks are lost.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The runtime stopped before the background save ended.
    #[error("the client stopped before the save ended: blocks that the node had not committed are not saved")]
    Stopped,
}

/// The background queue is full: [`SAVE_QUEUE_CALLS_MAX`] or [`SAVE_QUEUE_BYTES_MAX`] is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes do not fit the save queue now: drop this save, the blocks can be recomputed")]
pub struct SaveBusy {
    /// Bytes of the rejected save.
    pub bytes: usize,
}

/// Capacity for background saves, and permits to run.
pub(crate) struct SaveQueue {
    calls: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    running: Arc<Semaphore>,
    streaming: Arc<Semaphore>,
}

impl Default for SaveQueue {
    fn default() -> SaveQueue {
        SaveQueue {
            calls: Arc::new(Semaphore::new(SAVE_QUEUE_CALLS_MAX)),
            bytes: Arc::new(Semaphore::new(SAVE_QUEUE_BYTES_MAX)),
            running: Arc::new(Semaphore::new(CONCURRENT_SAVES_MAX)),
            streaming: Arc::new(Semaphore::new(STREAMING_SAVES_MAX)),
        }
    }
}

impl SaveQueue {
    pub(crate) fn reserve(&self, bytes: usize) -> Result<[OwnedSemaphorePermit; 2], SaveBusy> {
        let busy = SaveBusy { bytes };
        let room = u32::try_from(bytes).map_err(|_| busy)?;
        let call = Arc::clone(&self.calls).try_acquire_owned().map_err(|_| busy)?;
        let room = Arc::clone(&self.bytes).try_acquire_many_owned(room).map_err(|_| busy)?;
        Ok([call, room])
    }

    /// A permit to stream slices while they are computed; `None` if all are taken.
    pub(crate) fn streaming_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.streaming).try_acquire_owned().ok()
    }
}

/// The instant at which a save with this time limit must end.
pub(crate) fn deadline_after(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(DEADLINE_MAX)
}

/// The error of a save that exceeded its time limit.
pub(crate) fn timed_out(address: &str, deadline: Duration) -> SaveError {
    PathError::TimedOut { peer: address.to_owned(), after: deadline }.into()
}

/// Logs the result of a background save.
pub(crate) fn log_save(address: &str, ended: &Result<SaveAnswer, SaveError>) {
    match ended {
        Ok(answer) => tracing::debug!(?answer, address, "saved"),
        Err(error) => tracing::warn!(%error, address, "save failed"),
    }
}

impl Client {
    /// Saves and waits for the commit. The answer names the announcement batch that makes the
    /// blocks visible. The lease stays until released.
    ///
    /// # Errors
    /// If there are no blocks, the node is lost during the save, or the deadline passes.
    pub async fn save(&self, call: &SaveCall) -> Result<SaveAnswer, SaveError> {
        if call.hashes.is_empty() {
            return Err(SaveError::Empty);
        }
        let late = |_| Err(timed_out(&call.address, call.deadline));
        timeout_at(deadline_after(call.deadline), self.save_with_retry(call)).await.unwrap_or_else(late)
    }

    async fn save_with_retry(&self, call: &SaveCall) -> Result<SaveAnswer, SaveError> {
        loop {
            let epoch = Some(call.epoch);
            let AcquiredPath { path, reused: kept } = self.paths.get(&call.address, epoch).await?;
            let saved = path.save(call.request(), &*call.frame).await;
            let Err(error) = saved else { return Ok(saved?) };
            self.paths.note_failure(&call.address, epoch, &path, &error);
            // As with a fetch, a kept path may have failed unnoticed. Saving twice is harmless: a
            // committed block is already present.
            if !kept || !matches!(error, PathError::Broken { .. }) {
                return Err(error.into());
            }
        }
    }

    /// Queues a save in the background and returns at once. When it ends, successfully or not, its
    /// leases are released. Needs a tokio runtime.
    ///
    /// # Errors
    /// If the queue is full; then the save is not queued, and the leases remain the caller's.
    pub fn save_in_background(&self, save: BackgroundSave) -> Result<(), SaveBusy> {
        let room = self.saves.reserve(save.call.bytes())?;
        let client = self.clone();
        tokio::spawn(async move {
            client.run_background_save(save).await;
            drop(room);
        });
        Ok(())
    }

    /// Saves when a permit is available.
    pub(crate) async fn save_throttled(&self, call: &SaveCall) -> Result<SaveAnswer, SaveError> {
        let _turn = self.saves.running.acquire().await;
        self.save(call).await
    }

    /// Runs a queued save when a permit is available.
    async fn run_background_save(&self, save: BackgroundSave) {
        let BackgroundSave { call, then_release } = save;
        log_save(&call.address, &self.save_throttled(&call).await);
        self.release_after(call.asker.lease, &call.address, then_release).await;
    }

    /// Releases the lease of a save and the given leases.
    pub(crate) async fn release_after(&self, lease: LeaseId, address: &str, mut leases: Vec<HeldLease>) {
        let own = HeldLease { address: address.to_owned(), lease };
        if !leases.contains(&own) {
            leases.push(own);
        }
        for (held, error) in self.release(&leases).await {
            tracing::debug!(%error, address = held.address, "lease not released, it will expire");
        }
    }

    /// Waits until every background save queued so far has ended.
    pub async fn wait_for_saves(&self) {
        let all = u32::try_from(SAVE_QUEUE_CALLS_MAX).unwrap_or(u32::MAX);
        // Fails only if the semaphore is closed, which never happens.
        let _ = self.saves.calls.acquire_many(all).await;
    }
}
