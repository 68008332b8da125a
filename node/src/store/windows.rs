//! Windows on their way to the store. Each router has its newest window; they are merged by start
//! time, and applied once for all waiting callers.
//!
//! Not here: the effect of a window (`kv_core::tier`), and authorization (`server`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kv_core::id::BlockHash;
use kv_core::tier::{WINDOW_BLOCKS_MAX, WINDOW_REQUESTS_MAX, WINDOW_SPAN, WindowSummary};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::cell::StoreQueue;
use super::{StoreBusy, StoreHandle, StoreRequest};

/// Maximum callers waiting for one window to be applied; above it they receive `Busy`.
const CALLERS_MAX: usize = 256;

/// Maximum routers with a stored window, above any cluster size. The least recent one is dropped.
const ROUTERS_MAX: usize = 16;

/// A queued request, as a router reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingRequest {
    /// Expected start, relative to the time of the report.
    pub starts_after: Duration,
    /// Blocks it needs on this node, in prefix order.
    pub blocks: Vec<BlockHash>,
}

/// The newest window of a router.
#[derive(Debug)]
struct RouterWindow {
    at: Instant,
    waiting: Vec<WaitingRequest>,
}

#[derive(Debug, Default)]
struct WindowsState {
    by_router: BTreeMap<u64, RouterWindow>,
    /// One for each window received since the last one was applied.
    callers: Vec<oneshot::Sender<WindowSummary>>,
}

/// The windows of all routers, and the callers that wait for them to be applied.
#[derive(Debug, Default)]
pub(super) struct Windows(Mutex<WindowsState>);

/// The merged window.
#[derive(Debug, Default)]
pub(super) struct MergedWindow {
    /// The blocks of each queued request, earliest start first.
    pub(super) requests: Vec<Vec<BlockHash>>,
    /// One for each window received, including replaced ones.
    pub(super) callers: Vec<oneshot::Sender<WindowSummary>>,
}

impl Windows {
    /// Replaces this router's window. Queues a request to the store if none is pending.
    fn put(
        &self,
        router: u64,
        waiting: Vec<WaitingRequest>,
        now: Instant,
        queue: &StoreQueue,
    ) -> Result<oneshot::Receiver<WindowSummary>, StoreBusy> {
        let mut state = self.0.lock();
        if state.callers.is_empty() {
            queue.try_send(StoreRequest::SetWindow).map_err(|_| StoreBusy)?;
        }
        if state.callers.len() >= CALLERS_MAX {
            return Err(StoreBusy);
        }
        let (reply, answer) = oneshot::channel();
        state.by_router.insert(router, RouterWindow { at: now, waiting });
        if state.by_router.len() > ROUTERS_MAX {
            let oldest = state.by_router.iter().min_by_key(|(_, said)| said.at).map(|(router, _)| *router);
            oldest.map(|router| state.by_router.remove(&router));
        }
        state.callers.push(reply);
        Ok(answer)
    }

    /// Whether a router's window expired while others remain: the others must be merged again.
    pub(super) fn any_expired(&self, now: Instant) -> bool {
        let state = self.0.lock();
        let ended = |said: &RouterWindow| now.saturating_duration_since(said.at) >= WINDOW_SPAN;
        state.by_router.len() > 1 && state.by_router.values().any(ended)
    }

    /// Takes the merged window; later windows queue a new request. Expired windows are dropped.
    pub(super) fn take(&self, now: Instant) -> MergedWindow {
        let mut state = self.0.lock();
        state.by_router.retain(|_, said| now.saturating_duration_since(said.at) < WINDOW_SPAN);
        let starts = |said: &RouterWindow, waiting: &WaitingRequest| {
            waiting.starts_after.saturating_sub(now.saturating_duration_since(said.at))
        };
        let all = state.by_router.values();
        let mut all: Vec<(Duration, &WaitingRequest)> = all
            .flat_map(|said| said.waiting.iter().map(move |waiting| (starts(said, waiting), waiting)))
            .collect();
        // Requests of one router with equal start times keep their order.
        all.sort_by_key(|(starts, _)| *starts);
        let mut room = WINDOW_BLOCKS_MAX;
        let fits = |(_, waiting): &(Duration, &WaitingRequest)| {
            let fits = room > 0;
            room = room.saturating_sub(waiting.blocks.len());
            fits
        };
        let newest = all.into_iter().take(WINDOW_REQUESTS_MAX).take_while(fits);
        let newest = newest.map(|(_, waiting)| waiting.blocks.clone()).collect();
        MergedWindow { requests: newest, callers: std::mem::take(&mut state.callers) }
    }
}

impl StoreHandle {
    /// Sets the window of one router. Returns a summary of the merged windows of all routers.
    ///
    /// # Errors
    /// [`StoreBusy`] if the store has too much to do.
    pub async fn set_window(
        &self,
        router: u64,
        window: Vec<WaitingRequest>,
    ) -> Result<WindowSummary, StoreBusy> {
        let answer = self.shared.windows.put(router, window, Instant::now(), &self.queue)?;
        // After the task ended no reply comes, and the stored senders are not dropped by it.
        tokio::select! {
            biased;
            taken = answer => taken.map_err(|_| StoreBusy),
            () = self.queue.closed() => Err(StoreBusy),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Weak;

    use tokio::sync::mpsc;

    use super::*;

    /// Router 1, one request with this number of blocks.
    fn window(blocks: usize) -> Vec<WaitingRequest> {
        vec![starting(0, blocks)]
    }

    fn starting(after_ms: u64, blocks: usize) -> WaitingRequest {
        let starts_after = Duration::from_millis(after_ms);
        WaitingRequest { starts_after, blocks: vec![BlockHash([blocks as u8; _]); blocks] }
    }

    fn lengths(windows: &Windows, now: Instant) -> Vec<usize> {
        windows.take(now).requests.iter().map(Vec::len).collect()
    }

    #[test]
    fn router_windows_are_merged_and_expire_per_router() {
        let (asks, _inbox) = mpsc::channel(9);
        let asks = StoreQueue::new(asks, Weak::new());
        let (windows, begin) = (Windows::default(), Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        let put = |router, waiting, ms| drop(windows.put(router, waiting, at(ms), &asks).unwrap());
        put(1, vec![starting(100, 1), starting(900, 2), starting(900, 3)], 0);
        put(2, vec![starting(0, 4), starting(500, 5)], 300);
        // The first router's request started 200 ms ago, the second router's starts now.
        assert_eq!(lengths(&windows, at(300)), [1, 4, 5, 2, 3]);
        put(2, vec![starting(700, 6)], 1_900);
        assert_eq!(lengths(&windows, at(1_900)), [1, 2, 3, 6]);
        assert_eq!([1_999, 2_000].map(|ms| windows.any_expired(at(ms))), [false, true]);
        assert_eq!(lengths(&windows, at(2_000)), [6], "the first router was silent for two seconds");
        assert!(!windows.any_expired(at(9_000)), "a single window expires by itself");
        (3..3 + ROUTERS_MAX as u64).for_each(|router| put(router, vec![starting(0, 7)], 2_001));
        assert_eq!(lengths(&windows, at(2_001)), [7; ROUTERS_MAX], "the oldest router is dropped");
    }

    #[test]
    fn newest_window_is_applied_once_for_all_callers() {
        let (asks, mut inbox) = mpsc::channel(2);
        let asks = StoreQueue::new(asks, Weak::new());
        let windows = Windows::default();
        let mut answers: Vec<_> =
            (1..=3).map(|blocks| windows.put(1, window(blocks), Instant::now(), &asks).unwrap()).collect();
        assert!(matches!(inbox.try_recv(), Ok(StoreRequest::SetWindow)));
        assert!(inbox.try_recv().is_err(), "the store is notified once");
        let taken = windows.take(Instant::now());
        assert_eq!((taken.requests, taken.callers.len()), (vec![window(3)[0].blocks.clone()], 3));
        let told = WindowSummary { blocks: 3, ..WindowSummary::default() };
        taken.callers.into_iter().for_each(|caller| caller.send(told).unwrap());
        assert!(answers.iter_mut().all(|answer| answer.try_recv() == Ok(told)));
        drop(windows.put(1, window(4), Instant::now(), &asks).unwrap());
        assert!(matches!(inbox.try_recv(), Ok(StoreRequest::SetWindow)), "the next window notifies it again");
    }

    #[test]
    fn full_queue_and_too_many_callers_are_refused() {
        let (asks, mut inbox) = mpsc::channel(1);
        let asks = StoreQueue::new(asks, Weak::new());
        asks.try_send(StoreRequest::SetWindow).unwrap();
        let windows = Windows::default();
        assert_eq!(windows.put(1, window(1), Instant::now(), &asks).unwrap_err(), StoreBusy);
        inbox.try_recv().unwrap();
        let answers: Vec<_> =
            (0..CALLERS_MAX).map(|_| windows.put(1, window(1), Instant::now(), &asks).unwrap()).collect();
        assert_eq!(windows.put(1, window(1), Instant::now(), &asks).unwrap_err(), StoreBusy);
        assert_eq!((windows.take(Instant::now()).callers.len(), answers.len()), (CALLERS_MAX, CALLERS_MAX));
    }
}
