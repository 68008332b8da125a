//! A thread with its own runtime, for tasks that must answer within microseconds.
//!
//! Its tasks never move to another thread, so a task that notifies another wakes no thread. Long
//! computations and copies run elsewhere. Not here: the tasks it runs ([`crate::host`]).

use std::thread::{self, JoinHandle};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// A runtime thread. Dropping the value ends the thread and all its tasks.
#[derive(Debug)]
pub(crate) struct LowLatencyThread {
    handle: Handle,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl LowLatencyThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's error, typically that the thread limit is reached.
    pub(crate) fn start(name: &str) -> std::io::Result<LowLatencyThread> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (handle, ends) = (runtime.handle().clone(), CancellationToken::new());
        let ended = ends.clone();
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || runtime.block_on(ended.cancelled()))?;
        Ok(LowLatencyThread { handle, stop: ends, thread: Some(thread) })
    }

    /// Handle for spawning tasks on the thread.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Ends the thread and waits for it without blocking other tasks.
    pub(crate) async fn end(self) {
        // Fails only if the runtime ends too, and then `self` was dropped.
        let _ = tokio::task::spawn_blocking(move || drop(self)).await;
    }
}

impl Drop for LowLatencyThread {
    fn drop(&mut self) {
        self.stop.cancel();
        // A thread cannot join itself.
        let other = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id());
        if other.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a thread of the node ended with a panic");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn tasks_run_on_the_named_thread_and_end_with_it() {
        let quick = LowLatencyThread::start("quick-test").unwrap();
        let name = || thread::current().name().map(str::to_owned);
        assert_eq!(quick.handle().spawn(async move { name() }).await.unwrap().as_deref(), Some("quick-test"));
        let endless = quick.handle().spawn(std::future::pending::<()>());
        quick.end().await;
        assert!(endless.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn drop_ends_the_thread_and_its_tasks() {
        let quick = LowLatencyThread::start("quick-test").unwrap();
        let held = std::sync::Arc::new(());
        let weak = std::sync::Arc::downgrade(&held);
        quick.handle().spawn(async move {
            std::future::pending::<()>().await;
            drop(held);
        });
        drop(quick);
        assert!(weak.upgrade().is_none());
    }
}
