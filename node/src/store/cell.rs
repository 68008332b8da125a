//! Access to the store: its request queue, and the cell that holds its state while idle.
//!
//! Most answers take microseconds, less than waking the task and being woken by it. So a caller
//! locks the cell and answers its own request, if the state is idle and no request is queued before
//! it. Otherwise the request is queued. Not here: answers (`mod.rs`).

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{SharedState, Store, StoreRequest};

/// The store's queue is full, or the node is stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreBusy;

/// Handle for requests to the store.
#[derive(Clone, Debug)]
pub struct StoreHandle {
    pub(super) queue: StoreQueue,
    /// Shared state.
    pub shared: Arc<SharedState>,
}

impl StoreHandle {
    /// Sends a request and waits for the answer; fails if the queue is full.
    pub(crate) async fn try_request<T>(
        &self,
        ask: impl FnOnce(oneshot::Sender<T>) -> StoreRequest,
    ) -> Result<T, StoreBusy> {
        let (reply, answer) = oneshot::channel();
        if let Err(ask) = self.queue.answer_now(ask(reply)) {
            self.queue.try_send(ask).map_err(|_| StoreBusy)?;
        }
        answer.await.map_err(|_| StoreBusy)
    }

    /// Sends a request, waiting for space in the queue: for parts of an operation already accepted.
    pub(crate) async fn request<T>(
        &self,
        ask: impl FnOnce(oneshot::Sender<T>) -> StoreRequest,
    ) -> Result<T, StoreBusy> {
        let (reply, answer) = oneshot::channel();
        self.send(ask(reply)).await?;
        answer.await.map_err(|_| StoreBusy)
    }

    pub(crate) async fn send(&self, ask: StoreRequest) -> Result<(), StoreBusy> {
        match self.queue.answer_now(ask) {
            Ok(()) => Ok(()),
            Err(ask) => self.queue.send(ask).await,
        }
    }

    /// For destructors, which cannot wait: queues the request at once if there is space, and in a
    /// spawned task otherwise.
    pub(crate) fn send_or_spawn(&self, ask: StoreRequest) {
        self.queue.send_or_spawn(ask);
    }
}

/// The store's queue and cell. Closed when the task ends.
#[derive(Clone, Debug)]
pub(super) struct StoreQueue {
    requests: mpsc::Sender<StoreRequest>,
    cell: Weak<StoreCell>,
}

impl StoreQueue {
    pub(super) fn new(requests: mpsc::Sender<StoreRequest>, cell: Weak<StoreCell>) -> StoreQueue {
        StoreQueue { requests, cell }
    }

    /// Answers a request in the caller's thread, or returns it for queueing.
    fn answer_now(&self, ask: StoreRequest) -> Result<(), StoreRequest> {
        let Some(desk) = self.cell.upgrade() else { return Err(ask) };
        // Another caller holds the state, or panicked while holding it; the task notices the
        // latter.
        let Ok(mut store) = desk.store.try_lock() else { return Err(ask) };
        // Earlier requests are answered first: they leave the queue only under this lock.
        let is_first = self.requests.capacity() == self.requests.max_capacity();
        let Some(store) = store.as_deref_mut().filter(|_| is_first) else { return Err(ask) };
        store.answer(ask);
        // The next request must see the consequences of this one.
        store.pump();
        Ok(())
    }

    pub(super) fn try_send(&self, ask: StoreRequest) -> Result<(), TrySendError<StoreRequest>> {
        self.requests.try_send(ask)?;
        self.notify();
        Ok(())
    }

    async fn send(&self, ask: StoreRequest) -> Result<(), StoreBusy> {
        self.requests.send(ask).await.map_err(|_| StoreBusy)?;
        self.notify();
        Ok(())
    }

    pub(super) fn send_or_spawn(&self, ask: StoreRequest) {
        if let Err(TrySendError::Full(ask)) = self.try_send(ask)
            && let Ok(runtime) = Handle::try_current()
        {
            let queue = self.clone();
            runtime.spawn(async move { queue.send(ask).await });
        }
    }

    /// Returns when the task has ended.
    pub(super) async fn closed(&self) {
        self.requests.closed().await;
    }

    pub(super) fn downgrade(&self) -> WeakStoreQueue {
        WeakStoreQueue { requests: self.requests.downgrade(), cell: Weak::clone(&self.cell) }
    }

    fn notify(&self) {
        if let Some(desk) = self.cell.upgrade() {
            desk.queued.notify_one();
        }
    }
}

/// A queue handle that the store itself keeps; it does not keep the task alive.
#[derive(Clone, Debug)]
pub(super) struct WeakStoreQueue {
    requests: mpsc::WeakSender<StoreRequest>,
    cell: Weak<StoreCell>,
}

impl WeakStoreQueue {
    pub(super) fn upgrade(&self) -> Option<StoreQueue> {
        Some(StoreQueue { requests: self.requests.upgrade()?, cell: Weak::clone(&self.cell) })
    }
}

/// Holds the store's state between steps.
#[derive(Default)]
pub(super) struct StoreCell {
    /// `None` when the task has ended.
    store: Mutex<Option<Box<Store>>>,
    /// Notified when a request is queued.
    pub(super) queued: Notify,
}

impl std::fmt::Debug for StoreCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Desk(..)")
    }
}

impl StoreCell {
    pub(super) fn put(&self, store: Store) {
        *self.lock() = Some(Box::new(store));
    }

    /// Takes the state away for good.
    pub(super) fn take(&self) -> Option<Box<Store>> {
        // Also after a panic: the state is only dropped.
        self.store.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Runs one step of the task on the state.
    ///
    /// # Panics
    /// If an earlier holder panicked, because the state may be inconsistent. The task then ends,
    /// and the node with it.
    pub(super) fn step<T>(&self, step: impl FnOnce(&mut Store) -> T) -> T {
        step(self.lock().as_deref_mut().expect("the state is present until the task ends"))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Box<Store>>> {
        self.store.lock().expect("no earlier holder of the state panicked")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::pin;
    use std::task::Poll;

    use kvfleet_proto::pb;

    use super::super::STORE_QUEUE_MAX;
    use super::super::tests::{StoreFixture, config, open};
    use super::*;

    async fn bench() -> (tempfile::TempDir, StoreFixture) {
        let dir = tempfile::tempdir().unwrap();
        let bench = open(&config(dir.path(), 4, 0)).await;
        (dir, bench)
    }

    fn status(reply: oneshot::Sender<pb::NodeStatusReply>) -> StoreRequest {
        StoreRequest::Status { reply }
    }

    /// Polls once and reports whether the request was answered by the first poll.
    async fn is_answered<T>(
        asked: impl Future<Output = Result<T, StoreBusy>>,
    ) -> (bool, Result<T, StoreBusy>) {
        let mut asked = pin!(asked);
        let mut first = true;
        std::future::poll_fn(|context| match asked.as_mut().poll(context) {
            Poll::Ready(answer) => Poll::Ready((first, answer)),
            Poll::Pending => {
                first = false;
                Poll::Pending
            }
        })
        .await
    }

    #[tokio::test]
    async fn request_on_an_idle_store_is_answered_inline() {
        let (_dir, bench) = bench().await;
        // The task runs on this thread and has not started.
        assert!(matches!(is_answered(bench.store.request(status)).await, (true, Ok(_))));
        assert!(matches!(is_answered(bench.store.try_request(status)).await, (true, Ok(_))));
    }

    #[tokio::test]
    async fn request_behind_others_is_queued() {
        let (_dir, bench) = bench().await;
        bench.store.send_or_spawn(StoreRequest::Abort { keys: Vec::new() });
        assert!(matches!(is_answered(bench.store.request(status)).await, (false, Ok(_))));
        let desk = bench.store.queue.cell.upgrade().unwrap();
        let taken = desk.store.lock().unwrap();
        let (asked, freed) = (bench.store.try_request(status), async { drop(taken) });
        let ((is_first, answer), ()) = tokio::join!(is_answered(asked), freed);
        assert!(!is_first && answer.is_ok(), "the state was locked");
        assert!(
            matches!(is_answered(bench.store.request(status)).await, (true, Ok(_))),
            "all queued requests were answered"
        );
    }

    #[tokio::test]
    async fn busy_queue_does_not_starve_other_tasks() {
        let (_dir, bench) = bench().await;
        let desk = bench.store.queue.cell.upgrade().unwrap();
        let taken = desk.store.lock().unwrap();
        (0..STORE_QUEUE_MAX)
            .for_each(|_| bench.store.send_or_spawn(StoreRequest::Abort { keys: Vec::new() }));
        drop(taken);
        let asks = &bench.store.queue.requests;
        let mut turns = 0;
        while asks.capacity() < asks.max_capacity() {
            tokio::task::yield_now().await;
            turns += 1;
        }
        assert!(turns > 2, "{turns} yields while {STORE_QUEUE_MAX} requests were answered");
    }

    #[tokio::test]
    async fn panicking_answer_ends_the_task() {
        let (_dir, bench) = bench().await;
        let desk = bench.store.queue.cell.upgrade().unwrap();
        let broken = std::thread::spawn(move || desk.step(|_| panic!("a defect, as the test wants it")));
        broken.join().unwrap_err();
        assert!(bench.store.try_request(status).await.is_err());
        bench.store.queue.closed().await;
        assert!(bench.store.request(status).await.is_err());
    }
}
