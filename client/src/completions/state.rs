//! What a queue knows: the operations in flight, and what is to be polled.
//!
//! An [`Operating`] is shared by everything that may still touch what the caller gave. Its end is told by its `Drop`,
//! so after the last of them, once, and whatever happened to them.
//!
//! Not here: what operations do (`operation.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::{Completion, Ended, Operation, Outcome, Progress, QueueLimits, Submission, SubmitError};
use crate::{BlockRoom, HeldLease};

/// Longest wait; more is the same as none, and would overflow the clock.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// What the caller says to an operation in flight. One task hears each.
#[derive(Default)]
pub(super) struct Signals {
    pub(super) cancel: Notify,
    pub(super) begin: Notify,
}

struct Entry {
    signals: Arc<Signals>,
    blocks: usize,
}

struct State<R> {
    /// To be polled, the oldest first.
    ready: VecDeque<Completion<R>>,
    /// By tag, until the end was polled.
    in_flight: BTreeMap<u64, Entry>,
    /// Blocks of those.
    blocks: usize,
    /// Operations whose end was not told yet.
    running: usize,
    is_closed: bool,
}

/// A queue, as its operations know it.
pub(super) struct Shared<R> {
    limits: QueueLimits,
    state: Mutex<State<R>>,
    /// Something is to be polled, an operation ended, or the queue was closed.
    changed: Condvar,
}

impl<R> Shared<R> {
    pub(super) fn new(limits: QueueLimits) -> Arc<Shared<R>> {
        let state = State {
            ready: VecDeque::new(),
            in_flight: BTreeMap::new(),
            blocks: 0,
            running: 0,
            is_closed: false,
        };
        Arc::new(Shared { limits, state: Mutex::new(state), changed: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a batch into flight, or nothing of it.
    pub(super) fn enter(
        self: &Arc<Self>,
        batch: &[Submission<R>],
    ) -> Result<Vec<Arc<Operating<R>>>, SubmitError> {
        let counts: Vec<usize> = batch.iter().map(|submission| submission.operation.blocks()).collect();
        let (operations, blocks) =
            (batch.len(), counts.iter().fold(0, |sum: usize, one| sum.saturating_add(*one)));
        let limits = self.limits;
        if operations > limits.operations_max || blocks > limits.blocks_max {
            return Err(SubmitError::TooLarge { operations, blocks, limits });
        }
        let mut state = self.state();
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
            let signals = Arc::<Signals>::default();
            state.in_flight.insert(*tag, Entry { signals: Arc::clone(&signals), blocks });
            let end = Mutex::new(End { outcome: Outcome::Lost, rooms: Vec::new(), leases: Vec::new() });
            Arc::new(Operating { tag: *tag, signals, shared: Arc::clone(self), end })
        });
        Ok(entered.collect())
    }

    pub(super) fn signal(&self, tag: u64, say: impl Fn(&Signals)) -> bool {
        let state = self.state();
        let entry = state.in_flight.get(&tag);
        entry.inspect(|entry| say(&entry.signals)).is_some()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.state().in_flight.len()
    }

    pub(super) fn limits(&self) -> QueueLimits {
        self.limits
    }

    pub(super) fn poll(&self, into: &mut [Completion<R>]) -> usize {
        let taken = self.state().take(into.len());
        put(taken, into)
    }

    /// Also while nothing is in flight: another thread may submit. Nothing comes any more once it is over; whoever
    /// waits beside the thread that polled the last end was woken when that was told, and sees it.
    pub(super) fn wait(&self, into: &mut [Completion<R>], timeout: Duration) -> usize {
        let nothing_yet = |state: &mut State<R>| state.ready.is_empty() && !state.is_over();
        let taken = self.wait_while(timeout, nothing_yet).take(into.len());
        put(taken, into)
    }

    pub(super) fn is_over(&self) -> bool {
        self.state().is_over()
    }

    pub(super) fn close(&self) {
        let mut state = self.state();
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
        mut condition: impl FnMut(&mut State<R>) -> bool,
    ) -> MutexGuard<'_, State<R>> {
        let until = Instant::now() + timeout.min(WAIT_MAX);
        let mut state = self.state();
        while condition(&mut state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    fn tell(&self, completions: impl Iterator<Item = Completion<R>>) {
        let mut state = self.state();
        for completion in completions {
            state.running -= usize::from(matches!(completion.progress, Progress::Ended(_)));
            state.ready.push_back(completion);
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl<R> State<R> {
    /// Nothing is to be polled now or later.
    fn is_over(&self) -> bool {
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

/// Writes what was taken; what was there before is the caller's, and is not dropped under the lock.
fn put<R>(taken: Vec<Completion<R>>, into: &mut [Completion<R>]) -> usize {
    let count = taken.len();
    into.iter_mut().zip(taken).for_each(|(place, completion)| *place = completion);
    count
}

impl<R> Operation<R> {
    /// What it counts as against [`QueueLimits::blocks_max`]: blocks that it names, or leases that it ends.
    #[must_use]
    pub fn blocks(&self) -> usize {
        match self {
            Operation::Route(call) => call.hashes.len(),
            Operation::Fetch(call) => call.hashes.len().max(call.sources.len()),
            Operation::FetchLayers(layers) => {
                let fetch = &layers.call.fetch;
                fetch.hashes.len().max(fetch.sources.len()).max(layers.rooms.len())
            }
            Operation::Save(call) => call.hashes.len(),
            Operation::Release(leases) => leases.len(),
            Operation::MayDecode(_) => 0,
        }
    }
}

/// An operation in flight. Whatever may touch what its caller gave has a reference.
pub(super) struct Operating<R> {
    tag: u64,
    pub(super) signals: Arc<Signals>,
    shared: Arc<Shared<R>>,
    end: Mutex<End<R>>,
}

struct End<R> {
    outcome: Outcome,
    rooms: Vec<(u32, R)>,
    leases: Vec<HeldLease>,
}

impl<R> Operating<R> {
    fn end(&self) -> MutexGuard<'_, End<R>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of it at once, with nothing of this operation in between.
    pub(super) fn tell(&self, progress: impl IntoIterator<Item = Progress<R>>) {
        self.shared.tell(progress.into_iter().map(|progress| Completion { tag: self.tag, progress }));
    }

    /// Nodes may hold these from now on.
    pub(super) fn may_hold(&self, leases: Vec<HeldLease>) {
        self.end().leases = leases;
    }

    /// How it ends, once all references are gone.
    pub(super) fn conclude(&self, outcome: Outcome) {
        self.end().outcome = outcome;
    }
}

impl<R> Drop for Operating<R> {
    fn drop(&mut self) {
        let end = self.end.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut rooms = std::mem::take(&mut end.rooms);
        rooms.sort_by_key(|(block, _)| *block);
        let leases = std::mem::take(&mut end.leases);
        let outcome = std::mem::replace(&mut end.outcome, Outcome::Lost);
        self.tell([Progress::Ended(Box::new(Ended { outcome, rooms, leases }))]);
    }
}

/// A room that comes back when whoever fills it lets go of it, whyever that is.
pub(super) struct LentRoom<R> {
    block: u32,
    room: Option<R>,
    operating: Arc<Operating<R>>,
}

impl<R> LentRoom<R> {
    pub(super) fn new(block: u32, room: R, operating: Arc<Operating<R>>) -> LentRoom<R> {
        LentRoom { block, room: Some(room), operating }
    }

    /// The room, which is not to come back by itself.
    pub(super) fn take(mut self) -> Option<R> {
        self.room.take()
    }
}

impl<R: BlockRoom> BlockRoom for LentRoom<R> {
    fn slice(&mut self, layer: usize) -> Option<&mut [u8]> {
        self.room.as_mut()?.slice(layer)
    }

    fn filled(&mut self, layer: usize) {
        if let Some(room) = &mut self.room {
            room.filled(layer);
        }
    }
}

impl<R> Drop for LentRoom<R> {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            self.operating.end().rooms.push((self.block, room));
        }
    }
}
