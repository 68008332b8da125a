//! Windows on their way to the task: each router has one, its newest; they are put together in the order in which requests start, and one is applied
//! for all callers that wait.
//!
//! Not here: what a window does (`kv_core::tier`), and who may say one (`server`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_core::id::BlockHash;
use kv_core::tier::{WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX, WINDOW_SPAN, WindowTaken};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::desk::Queue;
use super::{Ask, Full, StoreHandle};

/// Callers that wait for one window to be applied; beyond it they are told `Busy`.
const CALLERS_MAX: usize = 256;

/// Routers whose windows are kept at once: more than a cluster has. Of more, the one that spoke longest ago is forgotten.
const ROUTERS_MAX: usize = 16;

/// A request that waits, as a router knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// From when the window was said.
    pub starts_after: Duration,
    /// What it needs here, in prefix order.
    pub blocks: Vec<BlockHash>,
}

/// The newest window of a router.
#[derive(Debug)]
struct Said {
    at: Instant,
    waiting: Vec<WaitingRequest>,
}

#[derive(Debug, Default)]
struct State {
    by_router: BTreeMap<u64, Said>,
    /// One for each window that came since one was applied.
    callers: Vec<oneshot::Sender<WindowTaken>>,
}

/// The windows of all routers, and who waits for them to be applied.
#[derive(Debug, Default)]
pub(super) struct Windows(Mutex<State>);

/// What the task takes.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// The blocks of each waiting request, the one that starts first before all others.
    pub(super) newest: Vec<Vec<BlockHash>>,
    /// One for each window that came, also for those that a newer one replaced.
    pub(super) callers: Vec<oneshot::Sender<WindowTaken>>,
}

impl Windows {
    /// Takes the place of this router's window. The task is told of the first one that it has not applied.
    fn put(
        &self,
        (router, waiting): (u64, Vec<WaitingRequest>),
        now: Instant,
        queue: &Queue,
    ) -> Result<oneshot::Receiver<WindowTaken>, Full> {
        let mut state = self.0.lock();
        if state.callers.is_empty() {
            queue.try_send(Ask::SetWindow).map_err(|_| Full)?;
        }
        if state.callers.len() >= CALLERS_MAX {
            return Err(Full);
        }
        let (reply, answer) = oneshot::channel();
        state.by_router.insert(router, Said { at: now, waiting });
        if state.by_router.len() > ROUTERS_MAX {
            let oldest = state.by_router.iter().min_by_key(|(_, said)| said.at).map(|(router, _)| *router);
            oldest.map(|router| state.by_router.remove(&router));
        }
        state.callers.push(reply);
        Ok(answer)
    }

    /// Whether a router was silent for as long as a window counts, and others still speak: theirs are to be put together anew.
    pub(super) fn have_ended(&self, now: Instant) -> bool {
        let state = self.0.lock();
        let ended = |said: &Said| now.saturating_duration_since(said.at) >= WINDOW_SPAN;
        state.by_router.len() > 1 && state.by_router.values().any(ended)
    }

    /// What waits; later ones tell the task again. Of a router that was silent for as long as a window counts, nothing does.
    pub(super) fn take(&self, now: Instant) -> Waiting {
        let mut state = self.0.lock();
        state.by_router.retain(|_, said| now.saturating_duration_since(said.at) < WINDOW_SPAN);
        let starts = |said: &Said, waiting: &WaitingRequest| {
            waiting.starts_after.saturating_sub(now.saturating_duration_since(said.at))
        };
        let all = state.by_router.values();
        let mut all: Vec<(Duration, &WaitingRequest)> = all
            .flat_map(|said| said.waiting.iter().map(move |waiting| (starts(said, waiting), waiting)))
            .collect();
        // Those of one router that start together stay in the order in which it named them.
        all.sort_by_key(|(starts, _)| *starts);
        let mut room = WINDOW_BLOCKS_MAX;
        let fits = |(_, waiting): &(Duration, &WaitingRequest)| {
            let fits = room > 0;
            room = room.saturating_sub(waiting.blocks.len());
            fits
        };
        let newest = all.into_iter().take(WINDOW_REQUESTS_MAX).take_while(fits);
        let newest = newest.map(|(_, waiting)| waiting.blocks.clone()).collect();
        Waiting { newest, callers: std::mem::take(&mut state.callers) }
    }
}

impl StoreHandle {
    /// Which blocks the requests need that wait by what this router knows. Answers what was taken of the windows of all routers.
    ///
    /// # Errors
    /// [`Full`] when the task has too much to do.
    pub async fn set_window(&self, router: u64, window: Vec<WaitingRequest>) -> Result<WindowTaken, Full> {
        let answer = self.shared.windows.put((router, window), Instant::now(), &self.queue)?;
        // A task that ended answers nobody, and the callers are not its own to let go.
        tokio::select! {
            biased;
            taken = answer => taken.map_err(|_| Full),
            () = self.queue.closed() => Err(Full),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Weak;

    use tokio::sync::mpsc;

    use super::*;

    /// Of router 1, one request with so many blocks.
    fn window(blocks: usize) -> (u64, Vec<WaitingRequest>) {
        (1, vec![starting(0, blocks)])
    }

    fn starting(after_ms: u64, blocks: usize) -> WaitingRequest {
        let starts_after = Duration::from_millis(after_ms);
        WaitingRequest { starts_after, blocks: vec![BlockHash([blocks as u8; 16]); blocks] }
    }

    fn lengths(windows: &Windows, now: Instant) -> Vec<usize> {
        windows.take(now).newest.iter().map(Vec::len).collect()
    }

    #[test]
    fn windows_of_several_routers_are_one_queue_and_end_with_their_routers() {
        let (asks, _inbox) = mpsc::channel(9);
        let asks = Queue::new(asks, Weak::new());
        let (windows, begin) = (Windows::default(), Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        let put = |router, waiting, ms| drop(windows.put((router, waiting), at(ms), &asks).unwrap());
        put(1, vec![starting(100, 1), starting(900, 2), starting(900, 3)], 0);
        put(2, vec![starting(0, 4), starting(500, 5)], 300);
        // The first of the one began 200 ms ago, as the first of the other does now.
        assert_eq!(lengths(&windows, at(300)), [1, 4, 5, 2, 3]);
        put(2, vec![starting(700, 6)], 1_900);
        assert_eq!(lengths(&windows, at(1_900)), [1, 2, 3, 6]);
        assert_eq!([1_999, 2_000].map(|ms| windows.have_ended(at(ms))), [false, true]);
        assert_eq!(lengths(&windows, at(2_000)), [6], "the first was silent for two seconds");
        assert!(!windows.have_ended(at(9_000)), "one alone ends by itself");
        (3..3 + ROUTERS_MAX as u64).for_each(|router| put(router, vec![starting(0, 7)], 2_001));
        assert_eq!(lengths(&windows, at(2_001)), [7; ROUTERS_MAX], "the one that spoke before is forgotten");
    }

    #[test]
    fn of_several_windows_the_newest_is_taken_once_and_all_callers_wait_for_it() {
        let (asks, mut inbox) = mpsc::channel(2);
        let asks = Queue::new(asks, Weak::new());
        let windows = Windows::default();
        let mut answers: Vec<_> =
            (1..=3).map(|blocks| windows.put(window(blocks), Instant::now(), &asks).unwrap()).collect();
        assert!(matches!(inbox.try_recv(), Ok(Ask::SetWindow)));
        assert!(inbox.try_recv().is_err(), "the task is told once");
        let taken = windows.take(Instant::now());
        assert_eq!((taken.newest, taken.callers.len()), (vec![window(3).1[0].blocks.clone()], 3));
        let told = WindowTaken { blocks: 3, ..WindowTaken::default() };
        taken.callers.into_iter().for_each(|caller| caller.send(told).unwrap());
        assert!(answers.iter_mut().all(|answer| answer.try_recv() == Ok(told)));
        drop(windows.put(window(4), Instant::now(), &asks).unwrap());
        assert!(matches!(inbox.try_recv(), Ok(Ask::SetWindow)), "and again for the next one");
    }

    #[test]
    fn a_task_that_has_too_much_to_do_is_not_told_and_callers_are_bounded() {
        let (asks, mut inbox) = mpsc::channel(1);
        let asks = Queue::new(asks, Weak::new());
        asks.try_send(Ask::SetWindow).unwrap();
        let windows = Windows::default();
        assert_eq!(windows.put(window(1), Instant::now(), &asks).unwrap_err(), Full);
        inbox.try_recv().unwrap();
        let answers: Vec<_> =
            (0..CALLERS_MAX).map(|_| windows.put(window(1), Instant::now(), &asks).unwrap()).collect();
        assert_eq!(windows.put(window(1), Instant::now(), &asks).unwrap_err(), Full);
        assert_eq!((windows.take(Instant::now()).callers.len(), answers.len()), (CALLERS_MAX, CALLERS_MAX));
    }
}
