//! Windows on their way to the task: of several that wait only the newest counts, and one is applied for all.
//!
//! Not here: what a window does (`kv_core::tier`), and who may say one (`server`).

use kv_core::id::BlockHash;
use kv_core::tier::WindowTaken;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::desk::Queue;
use super::{Ask, Full, StoreHandle};

/// Callers that wait for one window to be applied; beyond it they are told `Busy`.
const CALLERS_MAX: usize = 256;

/// The newest window that was not applied yet, and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Windows(Mutex<Waiting>);

/// What the task takes.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// The blocks of each waiting request, in the order of the queue.
    pub(super) newest: Vec<Vec<BlockHash>>,
    /// One for each window that came, also for those that a newer one replaced.
    pub(super) callers: Vec<oneshot::Sender<WindowTaken>>,
}

impl Windows {
    /// Takes the place of the window that waits. The task is told of the first one.
    fn put(
        &self,
        window: Vec<Vec<BlockHash>>,
        queue: &Queue,
    ) -> Result<oneshot::Receiver<WindowTaken>, Full> {
        let mut waiting = self.0.lock();
        if waiting.callers.is_empty() {
            queue.try_send(Ask::SetWindow).map_err(|_| Full)?;
        }
        if waiting.callers.len() >= CALLERS_MAX {
            return Err(Full);
        }
        let (reply, answer) = oneshot::channel();
        waiting.newest = window;
        waiting.callers.push(reply);
        Ok(answer)
    }

    /// What waits; later ones tell the task again.
    pub(super) fn take(&self) -> Waiting {
        std::mem::take(&mut *self.0.lock())
    }
}

impl StoreHandle {
    /// Which blocks the waiting requests need. Answers what was taken of the newest window that was said meanwhile.
    ///
    /// # Errors
    /// [`Full`] when the task has too much to do.
    pub async fn set_window(&self, window: Vec<Vec<BlockHash>>) -> Result<WindowTaken, Full> {
        let answer = self.shared.windows.put(window, &self.queue)?;
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

    fn window(blocks: usize) -> Vec<Vec<BlockHash>> {
        vec![vec![BlockHash([blocks as u8; 16]); blocks]]
    }

    #[test]
    fn of_several_windows_the_newest_is_taken_once_and_all_callers_wait_for_it() {
        let (asks, mut inbox) = mpsc::channel(2);
        let asks = Queue::new(asks, Weak::new());
        let windows = Windows::default();
        let mut answers: Vec<_> = (1..=3).map(|blocks| windows.put(window(blocks), &asks).unwrap()).collect();
        assert!(matches!(inbox.try_recv(), Ok(Ask::SetWindow)));
        assert!(inbox.try_recv().is_err(), "the task is told once");
        let taken = windows.take();
        assert_eq!((taken.newest, taken.callers.len()), (window(3), 3));
        let told = WindowTaken { blocks: 3, ..WindowTaken::default() };
        taken.callers.into_iter().for_each(|caller| caller.send(told).unwrap());
        assert!(answers.iter_mut().all(|answer| answer.try_recv() == Ok(told)));
        drop(windows.put(window(4), &asks).unwrap());
        assert!(matches!(inbox.try_recv(), Ok(Ask::SetWindow)), "and again for the next one");
    }

    #[test]
    fn a_task_that_has_too_much_to_do_is_not_told_and_callers_are_bounded() {
        let (asks, mut inbox) = mpsc::channel(1);
        let asks = Queue::new(asks, Weak::new());
        asks.try_send(Ask::SetWindow).unwrap();
        let windows = Windows::default();
        assert_eq!(windows.put(window(1), &asks).unwrap_err(), Full);
        inbox.try_recv().unwrap();
        let answers: Vec<_> = (0..CALLERS_MAX).map(|_| windows.put(window(1), &asks).unwrap()).collect();
        assert_eq!(windows.put(window(1), &asks).unwrap_err(), Full);
        assert_eq!((windows.take().callers.len(), answers.len()), (CALLERS_MAX, CALLERS_MAX));
    }
}
