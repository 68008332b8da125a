//! The SSD tier's thread: takes jobs, keeps a bounded number of operations open, flushes in groups, and
//! reports each job once. A write is reported only after the flush that covers it.
//!
//! Not here: which slot is whose (`space`), nor what to do after an error (`store`).

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};

use bytes::Bytes;
use kv_core::id::{BlockHash, IdentityDigest};
use kvfleet_proto::frame::Frame;
use tokio::sync::mpsc::UnboundedSender;

use super::buffer::PageBuffer;
use super::format::{FRAME_AT, SlotHeader};
use super::ring::{Finished, Op, Ring};
use crate::arena::SlotMut;

/// Where a job's slot is.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) file: Arc<File>,
    pub(crate) offset: u64,
    pub(crate) slot_bytes: usize,
}

/// Work for the thread.
pub(crate) enum Job {
    Write { token: u64, target: Target, header: SlotHeader, frame: Bytes },
    Read { token: u64, target: Target, identity: IdentityDigest, hash: BlockHash, into: SlotMut },
}

/// A job's end. Sent on an unbounded channel; the number of open jobs bounds it.
#[derive(Debug)]
pub enum Done {
    /// The block is on the medium.
    Written {
        /// The job.
        token: u64,
        /// Whether it is.
        result: io::Result<()>,
    },
    /// The block is in DRAM again, verified.
    Read {
        /// The job.
        token: u64,
        /// Its frame.
        result: Result<Bytes, ReadFault>,
    },
}

/// Why a block could not be read back.
#[derive(Debug, thiserror::Error)]
pub enum ReadFault {
    /// The medium gave an error.
    #[error("the medium failed: {0}")]
    Medium(#[from] io::Error),
    /// The bytes are not the block's.
    #[error("the bytes are wrong: {0}")]
    Corrupt(String),
}

/// Faults that tests inject: error numbers, 0 for none.
#[derive(Debug, Default)]
pub struct SsdFaults {
    /// Every write fails with this error number, the one that probes the directory at start included.
    pub write_errno: AtomicI32,
    /// Every read fails with this error number.
    pub read_errno: AtomicI32,
    /// One more than the number of the slot that cannot be read at start; 0 for none.
    pub unreadable_slot: AtomicU32,
    /// The first page of no file can be read at start.
    pub unreadable_heads: AtomicBool,
}

impl SsdFaults {
    /// What a test makes of reading the slot with this number at start.
    pub(crate) fn scan(&self, number: u32) -> io::Result<()> {
        match self.unreadable_slot.load(Ordering::Relaxed) {
            slot if slot == number + 1 => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Ok(()),
        }
    }

    /// What a test makes of reading a file's first page at start.
    pub(crate) fn scan_head(&self) -> io::Result<()> {
        match self.unreadable_heads.load(Ordering::Relaxed) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(()),
        }
    }

    pub(super) fn apply(fault: &AtomicI32, result: io::Result<()>) -> io::Result<()> {
        match fault.load(Ordering::Relaxed) {
            0 => result,
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

pub(crate) struct Engine {
    jobs: Receiver<Job>,
    done: UnboundedSender<Done>,
    ring: Ring,
    depth: usize,
    next_id: u64,
    open: HashMap<u64, Open>,
    flushes: HashMap<i32, Flush>,
    /// Files with a flush running.
    files: HashMap<i32, Arc<File>>,
    faults: Arc<SsdFaults>,
}

enum Open {
    Write { token: u64, file: Arc<File> },
    Read { token: u64, identity: IdentityDigest, hash: BlockHash, into: SlotMut },
    Flush { fd: i32 },
}

/// Writes of one file on their way to the medium.
#[derive(Default)]
struct Flush {
    running: Vec<u64>,
    waiting: Vec<u64>,
}

impl Engine {
    pub(crate) fn new(
        jobs: Receiver<Job>,
        done: UnboundedSender<Done>,
        ring: Ring,
        depth: usize,
        faults: Arc<SsdFaults>,
    ) -> Engine {
        Engine {
            jobs,
            done,
            ring,
            depth,
            next_id: 0,
            open: HashMap::new(),
            flushes: HashMap::new(),
            files: HashMap::new(),
            faults,
        }
    }

    /// Runs until the other side hung up and every open job is reported.
    pub(crate) fn run(mut self) {
        let mut hung_up = false;
        while !(hung_up && self.open.is_empty()) {
            if !hung_up {
                hung_up = self.take_jobs();
            }
            for finished in self.ring.wait() {
                self.finish(finished);
            }
        }
    }

    /// Starts what there is, waiting only when nothing is open. `true` once nobody can send any more.
    fn take_jobs(&mut self) -> bool {
        if self.open.is_empty() {
            match self.jobs.recv() {
                Ok(job) => self.start(job),
                Err(_) => return true,
            }
        }
        while self.open.len() < self.depth {
            match self.jobs.try_recv() {
                Ok(job) => self.start(job),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        false
    }

    fn start(&mut self, job: Job) {
        match job {
            Job::Write { token, target, header, frame } => {
                let mut buffer = PageBuffer::new(target.slot_bytes);
                header.write(&mut buffer);
                buffer[FRAME_AT..FRAME_AT + frame.len()].copy_from_slice(&frame);
                let open = Open::Write { token, file: Arc::clone(&target.file) };
                self.submit(open, &target.file, target.offset, Op::Write { buffer });
            }
            Job::Read { token, target, identity, hash, into } => {
                let buffer = PageBuffer::new(target.slot_bytes);
                let open = Open::Read { token, identity, hash, into };
                self.submit(open, &target.file, target.offset, Op::Read { buffer });
            }
        }
    }

    fn submit(&mut self, open: Open, file: &Arc<File>, offset: u64, op: Op) {
        self.next_id += 1;
        self.open.insert(self.next_id, open);
        self.ring.start(self.next_id, file, offset, op);
    }

    fn finish(&mut self, finished: Finished) {
        match self.open.remove(&finished.id) {
            Some(Open::Write { token, file }) => self.written(token, &file, finished.result),
            Some(Open::Read { token, identity, hash, into }) => {
                let result = SsdFaults::apply(&self.faults.read_errno, finished.result);
                let result = check(result, &finished.op, identity, hash, into);
                self.report(Done::Read { token, result });
            }
            Some(Open::Flush { fd }) => self.flushed(fd, &finished.result),
            None => {}
        }
    }

    fn written(&mut self, token: u64, file: &Arc<File>, result: io::Result<()>) {
        match SsdFaults::apply(&self.faults.write_errno, result) {
            Ok(()) => {
                self.flushes.entry(file.as_raw_fd()).or_default().waiting.push(token);
                self.flush(file);
            }
            Err(cause) => self.report(Done::Written { token, result: Err(cause) }),
        }
    }

    /// One flush per file at a time; writes that end meanwhile share the next one.
    fn flush(&mut self, file: &Arc<File>) {
        let fd = file.as_raw_fd();
        let flush = self.flushes.entry(fd).or_default();
        if flush.running.is_empty() && !flush.waiting.is_empty() {
            flush.running = std::mem::take(&mut flush.waiting);
            self.submit(Open::Flush { fd }, file, 0, Op::Sync);
            self.files.insert(fd, Arc::clone(file));
        }
    }

    fn flushed(&mut self, fd: i32, result: &io::Result<()>) {
        let Some(flush) = self.flushes.get_mut(&fd) else { return };
        for token in std::mem::take(&mut flush.running) {
            let result = match result {
                Ok(()) => Ok(()),
                Err(cause) => Err(io::Error::from(cause.kind())),
            };
            self.report(Done::Written { token, result });
        }
        if let Some(file) = self.files.remove(&fd) {
            self.flush(&file);
        }
    }

    fn report(&self, done: Done) {
        // The store is gone only while the process stops; nobody waits then.
        let _ = self.done.send(done);
    }
}

/// The checks of a read: medium, slot header, frame, every slice checksum.
fn check(
    result: io::Result<()>,
    op: &Op,
    identity: IdentityDigest,
    hash: BlockHash,
    mut into: SlotMut,
) -> Result<Bytes, ReadFault> {
    result?;
    let Op::Read { buffer } = op else { return Err(ReadFault::Corrupt("not a read".to_owned())) };
    let header = SlotHeader::read(buffer).map_err(|cause| ReadFault::Corrupt(cause.to_owned()))?;
    let here = header.filter(|header| header.hash == hash && header.traits.bytes as usize == into.len());
    if here.is_none() {
        return Err(ReadFault::Corrupt("the slot holds another block".to_owned()));
    }
    let end = FRAME_AT + into.len();
    let stored =
        buffer.get(FRAME_AT..end).ok_or_else(|| ReadFault::Corrupt("frame is cut off".to_owned()))?;
    into.copy_from_slice(stored);
    let bytes = into.freeze();
    let frame = Frame::parse(bytes.clone()).map_err(|cause| ReadFault::Corrupt(cause.to_string()))?;
    frame.verify(identity, hash).map_err(|cause| ReadFault::Corrupt(cause.to_string()))?;
    Ok(bytes)
}
