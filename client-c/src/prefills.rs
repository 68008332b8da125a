//! `kvf_prefill`: a prefill beside its load, for a thread that asks what to compute next and has no runtime.
//!
//! What it says is [`Prefill`]'s. Its rooms are slices of the caller, which come back by number: each once, when nothing writes them any
//! more. Freeing waits for the last of them, however it ended. Not here: reading the call (`calls.rs`), and the rules
//! (`kvfleet_client::Prefill`, docs/adr/0035).

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kv_core::pipeline::Next;
use kvfleet_client::{Prefill, PrefillCall, PrefillEnd, RoomBack, RoomsLeft};
use tokio::sync::watch;

use crate::abi;
use crate::handles::Opened;
use crate::results::{ResultHandle, micros, size_of_u32};
use crate::slices::{Gone, Room};
use crate::status::Failure;

/// Longest wait; more is the same as none, and would overflow the clock.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// `kvf_prefill`.
#[derive(Debug)]
pub struct PrefillHandle {
    state: Mutex<State>,
    /// Blocks of the sources, as numbers in the request.
    blocks: Range<u32>,
    layers: u32,
    read_buffer_bytes: u64,
    /// Whoever waits for something to do is woken by the end.
    ending: watch::Sender<bool>,
    threads: Arc<Opened>,
}

#[derive(Debug)]
struct State {
    /// Nothing once it has ended.
    running: Option<Box<Prefill<Room>>>,
    /// Blocks that came back and were not told.
    back: VecDeque<abi::Back>,
    /// Those that are still to come, once it has ended.
    rest: Option<RoomsLeft<Room>>,
    gone: Gone,
}

impl PrefillHandle {
    /// Begins to load what the read buffer takes.
    pub(crate) fn begin(
        threads: &Arc<Opened>,
        (call, rooms, gone): (PrefillCall, Vec<Room>, Gone),
    ) -> Result<PrefillHandle, Failure> {
        let (client, runtime) = threads.here()?;
        let _inside = runtime.enter();
        let (first, layers) = (call.fetch.resident_blocks, call.costs.layers);
        let blocks = first..first.saturating_add(u32::try_from(rooms.len()).unwrap_or(u32::MAX));
        let prefill = client.prefill(call, rooms).map_err(|error| Failure::Failed(error.to_string()))?;
        let read_buffer_bytes = prefill.read_buffer_bytes();
        let state = State { running: Some(Box::new(prefill)), back: VecDeque::new(), rest: None, gone };
        Ok(PrefillHandle {
            state: Mutex::new(state),
            blocks,
            layers,
            read_buffer_bytes,
            ending: watch::Sender::new(false),
            threads: Arc::clone(threads),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks of its sources: as many as one step may name.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn read_buffer_bytes(&self) -> u64 {
        self.read_buffer_bytes
    }

    /// What to compute next, and with which blocks; what was said before is done. It is the job's turn from the first time on. Where there
    /// is nothing to do that is waited for, so long at most.
    pub(crate) fn next(&self, at_most: Duration) -> Result<(abi::Step, Vec<u32>), Failure> {
        let (_, runtime) = self.threads.here()?;
        let _inside = runtime.enter();
        let mut state = self.state();
        let prefill = state.running.as_mut().ok_or(Failure::Ended)?;
        prefill.begin();
        let mut next = prefill.poll();
        if matches!(next, Next::Wait { .. }) && !at_most.is_zero() {
            let mut ending = self.ending.subscribe();
            let heard = block_on(at_most, async {
                tokio::select! {
                    biased;
                    _ = ending.wait_for(|is_ending| *is_ending) => Err(Failure::Ended),
                    next = prefill.next() => Ok(next),
                }
            });
            next = heard.unwrap_or_else(|| Ok(prefill.poll()))?;
        }
        Ok(step(prefill, next))
    }

    /// Nothing more is computed or waited for, also by another thread. Waits for none of its slices.
    pub(crate) fn end(&self) -> Result<ResultHandle, Failure> {
        self.threads.here()?;
        self.ending.send_replace(true);
        let mut state = self.state();
        let end = state.running.take().ok_or(Failure::Ended)?.end();
        let result = ResultHandle::of_prefill(&end, self.blocks.clone());
        let layers = self.layers;
        let PrefillEnd { arrived, absent, rest, .. } = end;
        state.back = arrived.into_keys().map(|block| abi::Back { block, layers }).collect();
        state.back.extend(absent.into_iter().map(told));
        state.rest = Some(rest);
        Ok(result)
    }

    /// Blocks whose slices came back, so many at most; if there are none they are waited for, so long at most.
    pub(crate) fn back(&self, most: usize, at_most: Duration) -> Result<Vec<abi::Back>, Failure> {
        self.threads.here()?;
        let mut state = self.state();
        let State { back, rest, .. } = &mut *state;
        let rest = rest.as_mut().ok_or(Failure::NotEnded)?;
        back.extend(std::iter::from_fn(|| rest.poll()).map(told));
        if back.is_empty() && !at_most.is_zero() && most > 0 {
            back.extend(block_on(at_most, rest.next()).flatten().map(told));
        }
        if back.is_empty() && rest.is_over() {
            return Err(Failure::AllBack);
        }
        let count = most.min(back.len());
        Ok(back.drain(..count).collect())
    }

    /// Ends it, and returns when nothing writes its slices any more; in a forked process at once, and nothing is given back.
    pub(crate) fn free(self) {
        if self.threads.here().is_err() {
            return std::mem::forget(self);
        }
        let State { running, rest, gone, .. } =
            self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        drop((running, rest));
        // Nothing is ever sent: it ends with the last room.
        let _ = gone.recv();
    }
}

/// A room that came back: its memory is the caller's from here on.
fn told<R>(RoomBack { block, layers, room }: RoomBack<R>) -> abi::Back {
    drop(room);
    abi::Back { block, layers }
}

/// A step as C sees it.
fn step<R>(prefill: &Prefill<R>, next: Next) -> (abi::Step, Vec<u32>) {
    let (kind, layer, blocks, wait_us) = match next {
        Next::Layer { layer } => (abi::STEP_LAYER, layer, prefill.pass().collect(), 0),
        Next::CatchUp { blocks, layers } => (abi::STEP_CATCH_UP, layers, blocks, 0),
        Next::Wait { until_ns } => {
            let wait = Duration::from_nanos(until_ns).saturating_sub(prefill.origin().elapsed());
            (abi::STEP_WAIT, 0, Vec::new(), micros(wait))
        }
        Next::Done => (abi::STEP_DONE, 0, Vec::new(), 0),
    };
    let count = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
    (abi::Step { size: size_of_u32::<abi::Step>(), kind, layer, blocks: count, wait_us }, blocks)
}

/// Runs a future on this thread, so long at most; nothing when it is not over by then. The thread may be one of any runtime or of none: a
/// runtime's own way to wait panics on a thread of another, and its clock stands still while its threads copy.
fn block_on<F: Future>(at_most: Duration, future: F) -> Option<F::Output> {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(tokio::task::unconstrained(future));
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = Context::from_waker(&waker);
    let until = Instant::now() + at_most.min(WAIT_MAX);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests;

/// C uses it from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<PrefillHandle>();
};
