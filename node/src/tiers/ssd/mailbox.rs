//! A job queue to the thread of a device, with an eventfd that wakes it: at most one system call
//! for all jobs sent while it sleeps, none while it works.
//!
//! Not here: the jobs (`engine`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

/// A queue that can wake its receiver.
#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    queue: Mutex<JobQueue<T>>,
    sleeping: AtomicBool,
    wake_fd: OwnedFd,
}

#[derive(Debug)]
struct JobQueue<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> io::Result<Mailbox<T>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
        let queue = Mutex::new(JobQueue { jobs: VecDeque::new(), closed: false });
        Ok(Mailbox { queue, sleeping: AtomicBool::new(false), wake_fd: bell })
    }

    /// A read of this descriptor blocks until a wake-up.
    pub(crate) fn wake_fd(&self) -> RawFd {
        self.wake_fd.as_raw_fd()
    }

    /// Sends a job; `false` once the mailbox is closed.
    pub(crate) fn send(&self, job: T) -> bool {
        let mut queue = self.queue.lock();
        if queue.closed {
            return false;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.wake();
        true
    }

    /// Closes the mailbox: no further jobs.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.wake();
    }

    fn wake(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst)
            && let Err(cause) = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes())
        {
            tracing::error!(%cause, "cannot wake the SSD thread");
        }
    }

    /// Moves all jobs to the end of `into`. `true` once the mailbox is closed.
    pub(crate) fn take(&self, into: &mut VecDeque<T>) -> bool {
        let mut queue = self.queue.lock();
        into.append(&mut queue.jobs);
        queue.closed
    }

    /// Announces that the thread is about to sleep. `false` if there is work instead.
    pub(crate) fn prepare_to_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        let queue = self.queue.lock();
        let idle = queue.jobs.is_empty() && !queue.closed;
        if !idle {
            self.sleeping.store(false, Ordering::SeqCst);
        }
        idle
    }

    /// Announces that the thread woke for another reason.
    pub(crate) fn mark_awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    /// Sleeps until a wake-up, for a thread without other events.
    pub(crate) fn wait(&self) {
        let mut count = [0u8; 8];
        while let Err(rustix::io::Errno::INTR) = rustix::io::read(&self.wake_fd, &mut count) {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;

    #[test]
    fn every_job_reaches_a_sleeping_thread() {
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
                if theirs.prepare_to_sleep() {
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
