//! Jobs on their way to the thread of a device, and the bell that wakes it: at most one system call for all
//! jobs that come while it sleeps, none while it works.
//!
//! Not here: what a job is (`engine`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

/// A queue with a bell.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    queue: Mutex<Queue<T>>,
    sleeping: AtomicBool,
    bell: OwnedFd,
}

#[derive(Debug)]
struct Queue<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> io::Result<Mailbox<T>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), closed: false });
        Ok(Mailbox { queue, sleeping: AtomicBool::new(false), bell })
    }

    /// Reads of this block until the bell has rung.
    pub(crate) fn bell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// `false` once the thread has gone.
    pub(crate) fn send(&self, job: T) -> bool {
        let mut queue = self.queue.lock();
        if queue.closed {
            return false;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.ring();
        true
    }

    /// No more jobs come.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.ring();
    }

    fn ring(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst)
            && let Err(cause) = rustix::io::write(&self.bell, &1u64.to_ne_bytes())
        {
            tracing::error!(%cause, "the SSD thread cannot be woken");
        }
    }

    /// Moves all jobs to the end of `into`. `true` once no more come.
    pub(crate) fn take(&self, into: &mut VecDeque<T>) -> bool {
        let mut queue = self.queue.lock();
        into.append(&mut queue.jobs);
        queue.closed
    }

    /// Says that the thread is about to sleep. `false` when there is something to do instead.
    pub(crate) fn may_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        let queue = self.queue.lock();
        let idle = queue.jobs.is_empty() && !queue.closed;
        if !idle {
            self.sleeping.store(false, Ordering::SeqCst);
        }
        idle
    }

    /// Says that the thread is awake for another reason than the bell.
    pub(crate) fn woke(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Sleeps until the bell rings, for a thread that waits for nothing else.
    pub(crate) fn wait(&self) {
        let mut count = [0u8; 8];
        while let Err(rustix::io::Errno::INTR) = rustix::io::read(&self.bell, &mut count) {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;

    #[test]
    fn every_job_reaches_a_thread_that_sleeps_when_it_may() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let theirs = Arc::clone(&mailbox);
        let thread = std::thread::spawn(move || {
            let (mut jobs, mut sum) = (VecDeque::new(), 0u64);
            loop {
                let over = theirs.take(&mut jobs);
                sum += jobs.drain(..).sum::<u64>();
                if over {
                    return sum;
                }
                if theirs.may_sleep() {
                    theirs.wait();
                }
            }
        });
        assert!((1..=10_000u64).all(|number| mailbox.send(number)));
        mailbox.close();
        assert_eq!(thread.join().unwrap(), 10_000 * 10_001 / 2);
        assert!(!mailbox.send(1));
    }
}
