//! Save: new blocks to a node, awaited or in the background.
//!
//! The background queue is bounded in calls and bytes; above that the caller is told at once and keeps
//! nothing waiting: a block that is not saved costs a recompute later, a queue without end costs the
//! process. Not here: which node (the decision says), and what the node does with the blocks.

use std::sync::Arc;
use std::time::Duration;

use kv_core::id::{BlockHash, Epoch, LeaseId};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::{Asker, PathError, SaveAnswer, SaveRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::paths::Found;
use crate::{Client, HeldLease};

/// Saves in the background, running or waiting: a few seconds of a busy instance's requests.
pub const SAVE_QUEUE_CALLS_MAX: usize = 256;

/// Frames of saves in the background, in bytes: they are the engine's memory until sent.
pub const SAVE_QUEUE_BYTES_MAX: usize = 256 << 20;

/// Background saves that run at once. More would only share one link.
const SAVES_AT_ONCE: usize = 4;

/// Saves by layer whose slices leave while they are computed, beside those: they last as long as a prefill. Others leave behind
/// their last layer.
const STREAMING_AT_ONCE: usize = 4;

/// How long a save may take unless its caller says otherwise: all of [`SAVE_QUEUE_BYTES_MAX`] need less over a slow network of one
/// gigabit a second, with as many others beside it as run at once. What takes longer is not worth its room.
pub const SAVE_DEADLINE: Duration = Duration::from_secs(60);

/// Longest deadline of a save; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Gives the frame of the block at a position of a save, when the node wants it and not before.
pub type FrameSource = Arc<dyn Fn(usize) -> Frame + Send + Sync>;

/// Save new blocks of a request.
#[derive(Clone)]
pub struct SaveCall {
    /// Who saves; the lease is the one of the request's fetch.
    pub asker: Asker,
    /// Data address of the node.
    pub address: String,
    /// Epoch in which the router named the node.
    pub epoch: Epoch,
    /// Hash before the first block; `None` at the start of a prefix.
    pub parent: Option<BlockHash>,
    /// Offset of the first block in its prefix, in blocks.
    pub first_offset_blocks: u32,
    /// The blocks in prefix order.
    pub hashes: Vec<BlockHash>,
    /// Encoded size of the largest frame, in bytes.
    pub frame_bytes: u64,
    /// Where the frames come from.
    pub frame: FrameSource,
    /// How long it may take once it runs; [`SAVE_DEADLINE`] unless there is a reason.
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

    /// What the caller keeps for this save at most.
    fn bytes(&self) -> usize {
        usize::try_from(self.frame_bytes).unwrap_or(usize::MAX).saturating_mul(self.hashes.len())
    }

    fn request(&self) -> SaveRequest {
        SaveRequest {
            asker: self.asker.clone(),
            parent: self.parent,
            first_offset_blocks: self.first_offset_blocks,
            hashes: self.hashes.clone(),
            frame_bytes: self.frame_bytes,
        }
    }
}

/// A save nobody waits for, with the leases that end after it.
#[derive(Clone, Debug)]
pub struct BackgroundSave {
    /// What is saved.
    pub call: SaveCall,
    /// Leases of the request's fetch; the save's own is released too.
    pub then_release: Vec<HeldLease>,
}

/// Why a save has no answer. A node's refusal and `Busy` are answers, not errors.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SaveError {
    /// There is nothing to save.
    #[error("a save without blocks: leave it out")]
    Empty,
    /// The node could not be reached or broke off; what it had not committed is gone.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The runtime that saves in the background ended before the save did.
    #[error("the client was stopped before the save was over: what the node had not committed is not saved")]
    Stopped,
}

/// The background queue is full: [`SAVE_QUEUE_CALLS_MAX`] or [`SAVE_QUEUE_BYTES_MAX`] is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes do not fit the save queue now: drop this save, the blocks can be computed again")]
pub struct SaveBusy {
    /// What was offered.
    pub bytes: usize,
}

/// Room for background saves, and how many run.
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
            running: Arc::new(Semaphore::new(SAVES_AT_ONCE)),
            streaming: Arc::new(Semaphore::new(STREAMING_AT_ONCE)),
        }
    }
}

impl SaveQueue {
    pub(crate) fn enter(&self, bytes: usize) -> Result<[OwnedSemaphorePermit; 2], SaveBusy> {
        let busy = SaveBusy { bytes };
        let room = u32::try_from(bytes).map_err(|_| busy)?;
        let call = Arc::clone(&self.calls).try_acquire_owned().map_err(|_| busy)?;
        let room = Arc::clone(&self.bytes).try_acquire_many_owned(room).map_err(|_| busy)?;
        Ok([call, room])
    }

    /// A turn for a save whose slices leave while they are computed; nothing where others have them all.
    pub(crate) fn streaming_turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.streaming).try_acquire_owned().ok()
    }
}

/// When a save that may take so long has to be over.
pub(crate) fn deadline_of(deadline: Duration) -> Instant {
    Instant::now() + deadline.min(DEADLINE_MAX)
}

/// What is said of a save that took longer than it may.
pub(crate) fn too_late(address: &str, deadline: Duration) -> SaveError {
    PathError::TimedOut { peer: address.to_owned(), after: deadline }.into()
}

/// Says what became of a save that nobody waits for.
pub(crate) fn said(address: &str, ended: &Result<SaveAnswer, SaveError>) {
    match ended {
        Ok(answer) => tracing::debug!(?answer, address, "saved"),
        Err(error) => tracing::warn!(%error, address, "save failed"),
    }
}

impl Client {
    /// Saves and waits for the commit: the answer says from which announce batch on the blocks are
    /// visible. The lease stays until released.
    ///
    /// # Errors
    /// When there is nothing to save, the node is lost on the way, or the deadline passes.
    pub async fn save(&self, call: &SaveCall) -> Result<SaveAnswer, SaveError> {
        if call.hashes.is_empty() {
            return Err(SaveError::Empty);
        }
        let late = |_| Err(too_late(&call.address, call.deadline));
        timeout_at(deadline_of(call.deadline), self.save_to_its_end(call)).await.unwrap_or_else(late)
    }

    async fn save_to_its_end(&self, call: &SaveCall) -> Result<SaveAnswer, SaveError> {
        loop {
            let epoch = Some(call.epoch);
            let Found { path, kept } = self.paths.get(&call.address, epoch).await?;
            let saved = path.save(call.request(), &*call.frame).await;
            let Err(error) = saved else { return Ok(saved?) };
            self.paths.failed(&call.address, epoch, &path, &error);
            // As with a fetch: a kept path may have died unnoticed. Saving twice is harmless, a block
            // that was committed is simply present.
            if !kept || !matches!(error, PathError::Broken { .. }) {
                return Err(error.into());
            }
        }
    }

    /// Takes a save into the background and returns at once. When it ended, well or not, its leases are
    /// released. Needs a tokio runtime.
    ///
    /// # Errors
    /// When the queue is full; nothing was taken, and the leases are still the caller's.
    pub fn save_in_background(&self, save: BackgroundSave) -> Result<(), SaveBusy> {
        let room = self.saves.enter(save.call.bytes())?;
        let client = self.clone();
        tokio::spawn(async move {
            client.run_in_turn(save).await;
            drop(room);
        });
        Ok(())
    }

    /// Saves once few others run.
    pub(crate) async fn save_in_turn(&self, call: &SaveCall) -> Result<SaveAnswer, SaveError> {
        let _turn = self.saves.running.acquire().await;
        self.save(call).await
    }

    /// Runs a save for which there is room, once few others run.
    async fn run_in_turn(&self, save: BackgroundSave) {
        let BackgroundSave { call, then_release } = save;
        said(&call.address, &self.save_in_turn(&call).await);
        self.release_after(call.asker.lease, &call.address, then_release).await;
    }

    /// Ends the lease of a save and those that were to end after it.
    pub(crate) async fn release_after(&self, lease: LeaseId, address: &str, mut leases: Vec<HeldLease>) {
        let own = HeldLease { address: address.to_owned(), lease };
        if !leases.contains(&own) {
            leases.push(own);
        }
        for (held, error) in self.release(&leases).await {
            tracing::debug!(%error, address = held.address, "lease left to expire");
        }
    }

    /// Waits until every background save that was taken so far has ended.
    pub async fn saves_ended(&self) {
        let all = u32::try_from(SAVE_QUEUE_CALLS_MAX).unwrap_or(u32::MAX);
        // Fails only when the semaphore is closed, which nothing does.
        let _ = self.saves.calls.acquire_many(all).await;
    }
}
