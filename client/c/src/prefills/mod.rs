//! `kvf_prefill`: a prefill that overlaps with its load, for a thread without a runtime that polls
//! for the next compute step.
//!
//! It wraps [`Prefill`]. Its buffers are slices of the caller; each block is returned by number,
//! once, when its slices are not written any more. Freeing waits for the last of them in every
//! case. Not here: reading the call (`calls.rs`), and the rules (`kvfleet_client::Prefill`,
//! docs/adr/0035).

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kv_core::pipeline::NextAction;
use kvfleet_client::{BufferReturns, Prefill, PrefillCall, PrefillResult, ReturnedBuffer};
use tokio::sync::watch;

use crate::abi;
use crate::handles::ClientRuntime;
use crate::results::{ResultHandle, micros, size_of_u32};
use crate::slices::{CallerBuffer, ReleaseSignal};
use crate::status::Failure;

/// Longest wait, to avoid overflow of the clock; a longer one would have no effect.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// `kvf_prefill`.
#[derive(Debug)]
pub struct PrefillHandle {
    state: Mutex<PrefillState>,
    /// Blocks of the sources, as numbers in the request.
    blocks: Range<u32>,
    layers: u32,
    read_buffer_bytes: u64,
    /// Wakes waiting threads at the end.
    end_signal: watch::Sender<bool>,
    client_runtime: Arc<ClientRuntime>,
}

#[derive(Debug)]
struct PrefillState {
    /// `None` once it has ended.
    running: Option<Box<Prefill<CallerBuffer>>>,
    /// Returned blocks not yet taken by the caller.
    returned: VecDeque<abi::ReturnedBlock>,
    /// Outstanding buffers, once it has ended.
    pending: Option<BufferReturns<CallerBuffer>>,
    released: ReleaseSignal,
}

impl PrefillHandle {
    /// Starts to fill the read buffer.
    pub(crate) fn begin(
        threads: &Arc<ClientRuntime>,
        call: PrefillCall,
        buffers: Vec<CallerBuffer>,
        released: ReleaseSignal,
    ) -> Result<PrefillHandle, Failure> {
        let (client, runtime) = threads.for_owner()?;
        let _inside = runtime.enter();
        let (first, layers) = (call.fetch.resident_blocks, call.costs.layers);
        let blocks = first..first.saturating_add(u32::try_from(buffers.len()).unwrap_or(u32::MAX));
        let prefill = client.prefill(call, buffers).map_err(|error| Failure::Failed(error.to_string()))?;
        let read_buffer_bytes = prefill.read_buffer_bytes();
        let state = PrefillState {
            running: Some(Box::new(prefill)),
            returned: VecDeque::new(),
            pending: None,
            released,
        };
        Ok(PrefillHandle {
            state: Mutex::new(state),
            blocks,
            layers,
            read_buffer_bytes,
            end_signal: watch::Sender::new(false),
            client_runtime: Arc::clone(threads),
        })
    }

    fn lock(&self) -> MutexGuard<'_, PrefillState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks of its sources: the maximum that one step may name.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn read_buffer_bytes(&self) -> u64 {
        self.read_buffer_bytes
    }

    /// The next compute step and its blocks; the previous step is done. The first call starts the
    /// prefill. If there is no step, waits for one, at most `at_most`.
    pub(crate) fn next(&self, at_most: Duration) -> Result<(abi::Step, Vec<u32>), Failure> {
        let (_, runtime) = self.client_runtime.for_owner()?;
        let _inside = runtime.enter();
        let mut state = self.lock();
        let prefill = state.running.as_mut().ok_or(Failure::PrefillEnded)?;
        prefill.begin();
        let mut next = prefill.poll();
        if matches!(next, NextAction::Wait { .. }) && !at_most.is_zero() {
            let mut ending = self.end_signal.subscribe();
            let heard = block_on(at_most, async {
                tokio::select! {
                    biased;
                    _ = ending.wait_for(|is_ending| *is_ending) => Err(Failure::PrefillEnded),
                    next = prefill.next() => Ok(next),
                }
            });
            next = heard.unwrap_or_else(|| Ok(prefill.poll()))?;
        }
        Ok(step_of(prefill, next))
    }

    /// Ends the prefill, also for threads that wait in it. Does not wait for slices.
    pub(crate) fn end(&self) -> Result<ResultHandle, Failure> {
        self.client_runtime.for_owner()?;
        self.end_signal.send_replace(true);
        let mut state = self.lock();
        let end = state.running.take().ok_or(Failure::PrefillEnded)?.end();
        let result = ResultHandle::of_prefill(&end, self.blocks.clone());
        let layers = self.layers;
        let PrefillResult { arrived, incomplete: absent, pending_buffers: rest, .. } = end;
        state.returned = arrived.into_keys().map(|block| abi::ReturnedBlock { block, layers }).collect();
        state.returned.extend(absent.into_iter().map(release_buffer));
        state.pending = Some(rest);
        Ok(result)
    }

    /// Returned blocks, at most `most`. If there are none, waits for one, at most `at_most`.
    pub(crate) fn returned_blocks(
        &self,
        most: usize,
        at_most: Duration,
    ) -> Result<Vec<abi::ReturnedBlock>, Failure> {
        self.client_runtime.for_owner()?;
        let mut state = self.lock();
        let PrefillState { returned: back, pending: rest, .. } = &mut *state;
        let rest = rest.as_mut().ok_or(Failure::PrefillNotEnded)?;
        back.extend(std::iter::from_fn(|| rest.poll()).map(release_buffer));
        if back.is_empty() && !at_most.is_zero() && most > 0 {
            back.extend(block_on(at_most, rest.next()).flatten().map(release_buffer));
        }
        if back.is_empty() && rest.is_finished() {
            return Err(Failure::AllReturned);
        }
        let count = most.min(back.len());
        Ok(back.drain(..count).collect())
    }

    /// Ends it, and returns when its slices are not written any more. In a forked process it leaks
    /// the prefill and returns at once.
    pub(crate) fn free(self) {
        if self.client_runtime.for_owner().is_err() {
            return std::mem::forget(self);
        }
        let PrefillState { running, pending: rest, released: gone, .. } =
            self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        drop((running, rest));
        // Never receives a value; disconnects when the last buffer is dropped.
        let _ = gone.recv();
    }
}

/// Drops a returned buffer: its memory is the caller's from here on.
fn release_buffer<R>(
    ReturnedBuffer { block, layers, buffer: room }: ReturnedBuffer<R>,
) -> abi::ReturnedBlock {
    drop(room);
    abi::ReturnedBlock { block, layers }
}

/// A step in C form.
fn step_of<R>(prefill: &Prefill<R>, next: NextAction) -> (abi::Step, Vec<u32>) {
    let (kind, layer, blocks, wait_us) = match next {
        NextAction::Layer { layer } => (abi::STEP_LAYER, layer, prefill.wave().collect(), 0),
        NextAction::CatchUp { blocks, layers } => (abi::STEP_CATCH_UP, layers, blocks, 0),
        NextAction::Wait { until_ns } => {
            let wait = Duration::from_nanos(until_ns).saturating_sub(prefill.origin().elapsed());
            (abi::STEP_WAIT, 0, Vec::new(), micros(wait))
        }
        NextAction::Done => (abi::STEP_DONE, 0, Vec::new(), 0),
    };
    let count = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
    (abi::Step { size: size_of_u32::<abi::Step>(), kind, layer, blocks: count, wait_us }, blocks)
}

/// Runs a future on this thread, at most for `at_most`; `None` on timeout. The thread may belong to
/// any runtime or none: a runtime's own blocking wait panics on a thread of another, and its timer
/// stalls while its threads copy.
fn block_on<F: Future>(at_most: Duration, future: F) -> Option<F::Output> {
    struct UnparkWaker(Thread);
    impl Wake for UnparkWaker {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(tokio::task::unconstrained(future));
    let waker = Arc::new(UnparkWaker(std::thread::current())).into();
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

/// C uses this handle from any thread.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<PrefillHandle>();
};
