//! A thread with a runtime of its own, for what must answer within microseconds.
//!
//! Tasks on it take turns and never move, so one that tells another something wakes no thread. What computes or copies for
//! long runs elsewhere. Not here: what runs on it ([`crate::host`]).

use std::thread::{self, JoinHandle};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// Ends with its value, and what runs on it with it: nothing of that is left when the value is gone.
#[derive(Debug)]
pub(crate) struct QuickThread {
    handle: Handle,
    ends: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl QuickThread {
    /// Starts it.
    ///
    /// # Errors
    /// What the system said: there is no thread left, most likely.
    pub(crate) fn start(name: &str) -> std::io::Result<QuickThread> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (handle, ends) = (runtime.handle().clone(), CancellationToken::new());
        let ended = ends.clone();
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || runtime.block_on(ended.cancelled()))?;
        Ok(QuickThread { handle, ends, thread: Some(thread) })
    }

    /// To spawn on it.
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Ends it, and waits for it without holding up other tasks.
    pub(crate) async fn end(self) {
        // Fails only where the runtime ends too, and then it was dropped.
        let _ = tokio::task::spawn_blocking(move || drop(self)).await;
    }
}

impl Drop for QuickThread {
    fn drop(&mut self) {
        self.ends.cancel();
        // One that ends itself cannot wait for that.
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
    async fn what_runs_on_it_has_its_name_and_ends_with_it() {
        let quick = QuickThread::start("quick-test").unwrap();
        let name = || thread::current().name().map(str::to_owned);
        assert_eq!(quick.handle().spawn(async move { name() }).await.unwrap().as_deref(), Some("quick-test"));
        let endless = quick.handle().spawn(std::future::pending::<()>());
        quick.end().await;
        assert!(endless.await.unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn nothing_of_it_is_left_when_it_is_dropped() {
        let quick = QuickThread::start("quick-test").unwrap();
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
