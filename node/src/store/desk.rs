//! Asking the store: its queue, and the desk where its state lies while nobody works on it.
//!
//! Most answers take microseconds, and to wake the task and be woken by it takes longer. So whoever asks takes the state
//! from the desk for the time of one answer and of what follows from it, if it lies there and nobody waits before him;
//! otherwise the question is queued. Not here: answers (`mod.rs`).

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};

use super::{Ask, Shared, Store};

/// The task's queue is full, or the node is stopping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A way to ask the store.
#[derive(Clone, Debug)]
pub struct StoreHandle {
    pub(super) queue: Queue,
    /// Shared state.
    pub shared: Arc<Shared>,
}

impl StoreHandle {
    /// Asks at once or not at all.
    pub(crate) async fn try_ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T, Full> {
        let (reply, answer) = oneshot::channel();
        if let Err(ask) = self.queue.answered(ask(reply)) {
            self.queue.try_send(ask).map_err(|_| Full)?;
        }
        answer.await.map_err(|_| Full)
    }

    /// Asks and waits for room: for parts of something already accepted.
    pub(crate) async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T, Full> {
        let (reply, answer) = oneshot::channel();
        self.tell(ask(reply)).await?;
        answer.await.map_err(|_| Full)
    }

    pub(crate) async fn tell(&self, ask: Ask) -> Result<(), Full> {
        match self.queue.answered(ask) {
            Ok(()) => Ok(()),
            Err(ask) => self.queue.send(ask).await,
        }
    }

    /// For destructors, which may hold anything: queued at once if there is room, in the background otherwise.
    pub(crate) fn tell_later(&self, ask: Ask) {
        self.queue.tell_later(ask);
    }
}

/// The store's queue, and its desk. Ends with its task.
#[derive(Clone, Debug)]
pub(super) struct Queue {
    asks: mpsc::Sender<Ask>,
    desk: Weak<Desk>,
}

impl Queue {
    pub(super) fn new(asks: mpsc::Sender<Ask>, desk: Weak<Desk>) -> Queue {
        Queue { asks, desk }
    }

    /// Has a question answered here and now; otherwise it comes back, to be queued.
    fn answered(&self, ask: Ask) -> Result<(), Ask> {
        let Some(desk) = self.desk.upgrade() else { return Err(ask) };
        // Somebody else works on it, or came to a bad end with it, which the task finds out.
        let Ok(mut store) = desk.store.try_lock() else { return Err(ask) };
        // What was asked before is answered before: questions leave the queue only under this lock.
        let is_first = self.asks.capacity() == self.asks.max_capacity();
        let Some(store) = store.as_deref_mut().filter(|_| is_first) else { return Err(ask) };
        store.answer(ask);
        // What is asked next finds what followed from it.
        store.pump();
        Ok(())
    }

    pub(super) fn try_send(&self, ask: Ask) -> Result<(), TrySendError<Ask>> {
        self.asks.try_send(ask)?;
        self.call();
        Ok(())
    }

    async fn send(&self, ask: Ask) -> Result<(), Full> {
        self.asks.send(ask).await.map_err(|_| Full)?;
        self.call();
        Ok(())
    }

    pub(super) fn tell_later(&self, ask: Ask) {
        if let Err(TrySendError::Full(ask)) = self.try_send(ask)
            && let Ok(runtime) = Handle::try_current()
        {
            let queue = self.clone();
            runtime.spawn(async move { queue.send(ask).await });
        }
    }

    /// Returns when the task is over.
    pub(super) async fn closed(&self) {
        self.asks.closed().await;
    }

    pub(super) fn downgrade(&self) -> WeakQueue {
        WeakQueue { asks: self.asks.downgrade(), desk: Weak::clone(&self.desk) }
    }

    fn call(&self) {
        if let Some(desk) = self.desk.upgrade() {
            desk.due.notify_one();
        }
    }
}

/// The queue for those that the task itself keeps: it ends with its askers.
#[derive(Clone, Debug)]
pub(super) struct WeakQueue {
    asks: mpsc::WeakSender<Ask>,
    desk: Weak<Desk>,
}

impl WeakQueue {
    pub(super) fn upgrade(&self) -> Option<Queue> {
        Some(Queue { asks: self.asks.upgrade()?, desk: Weak::clone(&self.desk) })
    }
}

/// Where the state lies while nobody works on it.
#[derive(Default)]
pub(super) struct Desk {
    /// Nothing when the task is over.
    store: Mutex<Option<Box<Store>>>,
    /// Something is in the queue.
    pub(super) due: Notify,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Desk(..)")
    }
}

impl Desk {
    pub(super) fn put(&self, store: Store) {
        *self.lock() = Some(Box::new(store));
    }

    /// Ends it, whoever is about to ask.
    pub(super) fn take(&self) -> Option<Box<Store>> {
        // Also after somebody broke it: it is only dropped.
        self.store.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// One step on the state, by the task.
    ///
    /// # Panics
    /// When somebody who answered did not come to the end of it: nobody knows what state that left. The task ends by it,
    /// and the node with the task.
    pub(super) fn step<T>(&self, step: impl FnOnce(&mut Store) -> T) -> T {
        step(self.lock().as_deref_mut().expect("the task takes it away at its end only"))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Box<Store>>> {
        self.store.lock().expect("whoever worked on it before came to the end of that")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::pin::pin;
    use std::task::Poll;

    use kvfleet_proto::pb;

    use super::super::STORE_QUEUE_MAX;
    use super::super::tests::{Bench, config, open};
    use super::*;

    async fn bench() -> (tempfile::TempDir, Bench) {
        let dir = tempfile::tempdir().unwrap();
        let bench = open(&config(dir.path(), 4, 0)).await;
        (dir, bench)
    }

    fn status(reply: oneshot::Sender<pb::NodeStatusReply>) -> Ask {
        Ask::Status { reply }
    }

    /// Whether a question is answered at its first look.
    async fn is_answered<T>(asked: impl Future<Output = Result<T, Full>>) -> (bool, Result<T, Full>) {
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
    async fn who_asks_while_nobody_works_on_it_has_the_answer_at_once() {
        let (_dir, bench) = bench().await;
        // The task is of this thread, and has not begun.
        assert!(matches!(is_answered(bench.store.ask(status)).await, (true, Ok(_))));
        assert!(matches!(is_answered(bench.store.try_ask(status)).await, (true, Ok(_))));
    }

    #[tokio::test]
    async fn who_asks_behind_others_waits_for_his_turn() {
        let (_dir, bench) = bench().await;
        bench.store.tell_later(Ask::Abort { keys: Vec::new() });
        assert!(matches!(is_answered(bench.store.ask(status)).await, (false, Ok(_))));
        let desk = bench.store.queue.desk.upgrade().unwrap();
        let taken = desk.store.lock().unwrap();
        let (asked, freed) = (bench.store.try_ask(status), async { drop(taken) });
        let ((is_first, answer), ()) = tokio::join!(is_answered(asked), freed);
        assert!(!is_first && answer.is_ok(), "somebody works on it");
        assert!(matches!(is_answered(bench.store.ask(status)).await, (true, Ok(_))), "all was answered");
    }

    #[tokio::test]
    async fn a_queue_that_is_never_empty_keeps_no_other_task_from_its_turn() {
        let (_dir, bench) = bench().await;
        let desk = bench.store.queue.desk.upgrade().unwrap();
        let taken = desk.store.lock().unwrap();
        (0..STORE_QUEUE_MAX).for_each(|_| bench.store.tell_later(Ask::Abort { keys: Vec::new() }));
        drop(taken);
        let asks = &bench.store.queue.asks;
        let mut turns = 0;
        while asks.capacity() < asks.max_capacity() {
            tokio::task::yield_now().await;
            turns += 1;
        }
        assert!(turns > 2, "{turns} turns while {STORE_QUEUE_MAX} questions were answered");
    }

    #[tokio::test]
    async fn an_answer_that_breaks_ends_the_task() {
        let (_dir, bench) = bench().await;
        let desk = bench.store.queue.desk.upgrade().unwrap();
        let broken = std::thread::spawn(move || desk.step(|_| panic!("a defect, as the test wants it")));
        broken.join().unwrap_err();
        assert!(bench.store.try_ask(status).await.is_err());
        bench.store.queue.closed().await;
        assert!(bench.store.ask(status).await.is_err());
    }
}
