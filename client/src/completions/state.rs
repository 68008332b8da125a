//! State of a queue: the operations in flight, and the completions to poll.
//!
//! An [`InFlightOperation`] is shared by everything that may still touch the caller's memory. Its
//! `Drop` reports the end: after the last reference, exactly once, and in every case.
//!
//! Not here: running operations (`operation.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::{
    Completion, Operation, OperationEnd, OperationOutcome, Progress, QueueLimits, Submission, SubmitError,
};
use crate::{HeldLease, SliceBuffer};

/// Longest wait, to avoid overflow of the clock; a longer one would have no effect.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// Requests of the caller to an operation in flight. One task waits for each.
#[derive(Default)]
pub(super) struct OperationSignals {
    pub(super) cancel: Notify,
    pub(super) begin: Notify,
}

struct InFlightEntry {
    signals: Arc<OperationSignals>,
    blocks: usize,
}

struct QueueState<R> {
    /// Completions to poll, the oldest first.
    ready: VecDeque<Completion<R>>,
    /// Operations by tag, until their end is polled.
    in_flight: BTreeMap<u64, InFlightEntry>,
    /// Blocks of the operations in flight.
    blocks: usize,
    /// Operations with an end not yet reported.
    running: usize,
    is_closed: bool,
}

/// A queue as shared with its operations.
pub(super) struct SharedQueue<R> {
    limits: QueueLimits,
    state: Mutex<QueueState<R>>,
    /// Notified when a completion is available, an operation ended, or the queue was closed.
    changed: Condvar,
}

impl<R> SharedQueue<R> {
    pub(super) fn new(limits: QueueLimits) -> Arc<SharedQueue<R>> {
        let state = QueueState {
            ready: VecDeque::new(),
            in_flight: BTreeMap::new(),
            blocks: 0,
            running: 0,
            is_closed: false,
        };
        Arc::new(SharedQueue { limits, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, QueueState<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a whole batch, or none of it.
    pub(super) fn admit(
        self: &Arc<Self>,
        batch: &[Submission<R>],
    ) -> Result<Vec<Arc<InFlightOperation<R>>>, SubmitError> {
        let counts: Vec<usize> = batch.iter().map(|submission| submission.operation.blocks()).collect();
        let (operations, blocks) =
            (batch.len(), counts.iter().fold(0, |sum: usize, one| sum.saturating_add(*one)));
        let limits = self.limits;
        if operations > limits.operations_max || blocks > limits.blocks_max {
            return Err(SubmitError::TooLarge { operations, blocks, limits });
        }
        let mut state = self.lock();
        if state.is_closed {
            return Err(SubmitError::Closed);
        }
        let in_flight = state.in_flight.len();
        if operations + in_flight > limits.operations_max || blocks + state.blocks > limits.blocks_max {
            return Err(SubmitError::Busy { operations, blocks, in_flight });
        }
        let mut tags = std::collections::BTreeSet::new();
        let is_used = |tag: &u64| state.in_flight.contains_key(tag) || !tags.insert(*tag);
        if let Some(tag) = batch.iter().map(|submission| submission.tag).find(is_used) {
            return Err(SubmitError::TagInUse { tag });
        }
        state.blocks += blocks;
        state.running += operations;
        let entered = batch.iter().zip(counts).map(|(Submission { tag, .. }, blocks)| {
            let signals = Arc::<OperationSignals>::default();
            state.in_flight.insert(*tag, InFlightEntry { signals: Arc::clone(&signals), blocks });
            let end = Mutex::new(PendingEnd {
                outcome: OperationOutcome::Lost,
                buffers: Vec::new(),
                leases: Vec::new(),
            });
            Arc::new(InFlightOperation { tag: *tag, signals, shared: Arc::clone(self), end })
        });
        Ok(entered.collect())
    }

    pub(super) fn signal(&self, tag: u64, send: impl Fn(&OperationSignals)) -> bool {
        let state = self.lock();
        let entry = state.in_flight.get(&tag);
        entry.inspect(|entry| send(&entry.signals)).is_some()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.lock().in_flight.len()
    }

    pub(super) fn limits(&self) -> QueueLimits {
        self.limits
    }

    pub(super) fn poll(&self, into: &mut [Completion<R>]) -> usize {
        let taken = self.lock().take(into.len());
        write_into(taken, into)
    }

    /// Also waits while no operation is in flight: another thread may submit. Once the queue is
    /// finished, no completion follows. A thread that waits while another one polls the last end
    /// was woken by that report, and sees this state.
    pub(super) fn wait(&self, into: &mut [Completion<R>], timeout: Duration) -> usize {
        let is_pending = |state: &mut QueueState<R>| state.ready.is_empty() && !state.is_finished();
        let taken = self.wait_while(timeout, is_pending).take(into.len());
        write_into(taken, into)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.lock().is_finished()
    }

    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.in_flight.values().for_each(|entry| entry.signals.cancel.notify_one());
        drop(state);
        self.changed.notify_all();
    }

    /// Whether all operations ended in time.
    pub(super) fn wait_for_ends(&self, timeout: Duration) -> bool {
        self.wait_while(timeout, |state| state.running > 0).running == 0
    }

    fn wait_while(
        &self,
        timeout: Duration,
        mut condition: impl FnMut(&mut QueueState<R>) -> bool,
    ) -> MutexGuard<'_, QueueState<R>> {
        let until = Instant::now() + timeout.min(WAIT_MAX);
        let mut state = self.lock();
        while condition(&mut state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    fn push(&self, completions: impl Iterator<Item = Completion<R>>) {
        let mut state = self.lock();
        for completion in completions {
            state.running -= usize::from(matches!(completion.progress, Progress::Ended(_)));
            state.ready.push_back(completion);
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl<R> QueueState<R> {
    /// Whether no completion is available now or later.
    fn is_finished(&self) -> bool {
        self.is_closed && self.in_flight.is_empty()
    }

    fn take(&mut self, most: usize) -> Vec<Completion<R>> {
        let taken: Vec<_> = self.ready.drain(..self.ready.len().min(most)).collect();
        for completion in taken.iter().filter(|one| matches!(one.progress, Progress::Ended(_))) {
            let entry = self.in_flight.remove(&completion.tag);
            self.blocks -= entry.map_or(0, |entry| entry.blocks);
        }
        taken
    }
}

/// Writes completions to `into`. The overwritten ones belong to the caller and are dropped outside
/// the lock.
fn write_into<R>(taken: Vec<Completion<R>>, into: &mut [Completion<R>]) -> usize {
    let count = taken.len();
    into.iter_mut().zip(taken).for_each(|(place, completion)| *place = completion);
    count
}

impl<R> Operation<R> {
    /// Its count against [`QueueLimits::blocks_max`]: blocks that it names, or leases that it
    /// releases.
    #[must_use]
    pub fn blocks(&self) -> usize {
        match self {
            Operation::Route(call) => call.hashes.len(),
            Operation::Fetch(call) => call.hashes.len().max(call.sources.len()),
            Operation::FetchLayers(layers) => {
                let fetch = &layers.call.fetch;
                fetch.hashes.len().max(fetch.sources.len()).max(layers.buffers.len())
            }
            Operation::Save(call) => call.hashes.len(),
            Operation::Release(leases) => leases.len(),
            Operation::AdmitDecode(_) => 0,
        }
    }
}

/// An operation in flight. Everything that may touch the caller's memory holds a reference.
pub(super) struct InFlightOperation<R> {
    tag: u64,
    pub(super) signals: Arc<OperationSignals>,
    shared: Arc<SharedQueue<R>>,
    end: Mutex<PendingEnd<R>>,
}

struct PendingEnd<R> {
    outcome: OperationOutcome,
    buffers: Vec<(u32, R)>,
    leases: Vec<HeldLease>,
}

impl<R> InFlightOperation<R> {
    fn lock_end(&self) -> MutexGuard<'_, PendingEnd<R>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports all of these at once, with no other report of this operation in between.
    pub(super) fn report(&self, progress: impl IntoIterator<Item = Progress<R>>) {
        self.shared.push(progress.into_iter().map(|progress| Completion { tag: self.tag, progress }));
    }

    /// Sets the leases that nodes may hold from now on.
    pub(super) fn set_leases(&self, leases: Vec<HeldLease>) {
        self.lock_end().leases = leases;
    }

    /// Sets the outcome to report once all references are dropped.
    pub(super) fn set_outcome(&self, outcome: OperationOutcome) {
        self.lock_end().outcome = outcome;
    }
}

impl<R> Drop for InFlightOperation<R> {
    fn drop(&mut self) {
        let end = self.end.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut rooms = std::mem::take(&mut end.buffers);
        rooms.sort_by_key(|(block, _)| *block);
        let leases = std::mem::take(&mut end.leases);
        let outcome = std::mem::replace(&mut end.outcome, OperationOutcome::Lost);
        self.report([Progress::Ended(Box::new(OperationEnd { outcome, buffers: rooms, leases }))]);
    }
}

/// A buffer that returns to its operation when dropped.
pub(super) struct GuardedBuffer<R> {
    block: u32,
    buffer: Option<R>,
    operation: Arc<InFlightOperation<R>>,
}

impl<R> GuardedBuffer<R> {
    pub(super) fn new(block: u32, room: R, operation: Arc<InFlightOperation<R>>) -> GuardedBuffer<R> {
        GuardedBuffer { block, buffer: Some(room), operation }
    }

    /// Takes the buffer out, so that it is not returned on drop.
    pub(super) fn take(mut self) -> Option<R> {
        self.buffer.take()
    }
}

impl<R: SliceBuffer> SliceBuffer for GuardedBuffer<R> {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        self.buffer.as_mut()?.slice(layer)
    }

    fn filled(&mut self, layer: usize) {
        if let Some(room) = &mut self.buffer {
            room.filled(layer);
        }
    }
}

impl<R> Drop for GuardedBuffer<R> {
    fn drop(&mut self) {
        if let Some(room) = self.buffer.take() {
            self.operation.lock_end().buffers.push((self.block, room));
        }
    }
}
