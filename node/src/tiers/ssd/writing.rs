//! How an engine writes: what lies one after another goes into chunks, chunks are in flight together, and
//! one flush commits all that was written before it.
//!
//! Nothing is reported before the flush that covers it, and nothing goes into a segment whose head is not
//! on the medium. Not here: reading (`engine`), and what is written where (`book`).

use std::collections::{HashMap, VecDeque};
use std::io;

use bytes::Bytes;

use super::book::Spot;
use super::engine::{Engine, MoveFault, Open, Outcome, SsdFaults};
use super::format::{PAGE_BYTES, RecordHeader, SegmentHead, TRAILER_BYTES, record_pages};
use super::ring::{Gather, Op, is_at_a_page};

/// Size of a chunk, the unit of writing: large enough for the full rate of a device. Small under test, where
/// blocks are, so that many chunks are in flight and a flush among them.
pub(super) const CHUNK_BYTES: usize = if cfg!(test) { 16 << 10 } else { 512 << 10 };

/// Chunks of a device: what is written at most at once, 16 MiB.
pub(super) const CHUNKS: u16 = 32;

/// Memory of all chunks.
pub(super) const POOL_BYTES: usize = CHUNKS as usize * CHUNK_BYTES;

/// While writes are in flight, a flush waits until it commits this much: a device that is busy writing
/// flushes slowly, so what is in flight is let end first.
const FLUSH_BYTES: usize = if cfg!(test) { 24 << 10 } else { 16 << 20 };

/// Whole pages of a frame, where they begin at one, are not copied from here on: the system has to find each piece, which
/// costs about what copying a page or two does.
const SHARED_BYTES_MIN: usize = if cfg!(test) { PAGE_BYTES } else { 16 << 10 };

/// Something to be written in one piece of the medium.
pub(super) struct Put {
    job: u64,
    /// The segment whose head must be there first.
    segment: Option<u32>,
    /// The segment that may be written once this is committed.
    opens: Option<u32>,
    /// What is reported of a record that was moved.
    moved: Option<RecordHeader>,
    at: u64,
    bytes: Bytes,
    /// In the last bytes of the last page.
    trailer: Option<[u8; TRAILER_BYTES]>,
    len: usize,
}

impl Put {
    pub(super) fn head(job: u64, head: SegmentHead, at: u64) -> Put {
        let bytes = Bytes::copy_from_slice(&head.page());
        let opens = Some(head.segment);
        Put { job, segment: None, opens, moved: None, at, bytes, trailer: None, len: PAGE_BYTES }
    }

    pub(super) fn record(
        job: u64,
        spot: Spot,
        at: u64,
        header: RecordHeader,
        frame: Bytes,
        is_moved: bool,
    ) -> Put {
        let mut trailer = [0u8; TRAILER_BYTES];
        header.write(spot.place, &mut trailer);
        let len = record_pages(frame.len()) as usize * PAGE_BYTES;
        let (segment, moved) = (Some(spot.place.head.segment), is_moved.then_some(header));
        Put { job, segment, opens: None, moved, at, bytes: frame, trailer: Some(trailer), len }
    }

    pub(super) fn footer(job: u64, at: u64, footer: Bytes) -> Put {
        let len = footer.len();
        Put { job, segment: None, opens: None, moved: None, at, bytes: footer, trailer: None, len }
    }

    /// Bytes at the front that are written from where they lie: whole pages of nothing but the frame.
    fn shared(&self) -> usize {
        let whole = self.bytes.len() / PAGE_BYTES * PAGE_BYTES;
        if whole >= SHARED_BYTES_MIN && is_at_a_page(&self.bytes) { whole } else { 0 }
    }

    /// Adds what follows from `from`, as far as there is room; gives the count.
    fn fill(&self, from: usize, gather: &mut Gather) -> usize {
        let (count, shared) = (gather.room().min(self.len - from), self.shared());
        if from < shared {
            let count = count.min(shared - from);
            gather.share(self.bytes.slice(from..from + count));
            return count;
        }
        self.copy(from, gather.copy(count));
        count
    }

    /// Copies what follows from `from` into `out`, which is no longer than that. Bytes that are nobody's are zero.
    fn copy(&self, from: usize, out: &mut [u8]) {
        let own = self.bytes.get(from..).unwrap_or_default();
        let copied = own.len().min(out.len());
        out[..copied].copy_from_slice(&own[..copied]);
        out[copied..].fill(0);
        if let Some(trailer) = &self.trailer {
            // Chunks are whole pages, so the trailer is in one of them.
            let begin = self.len - TRAILER_BYTES;
            if from + out.len() == self.len {
                out[begin - from..].copy_from_slice(trailer);
            }
        }
    }
}

/// A put of which at least one byte was taken.
#[derive(Default)]
struct Progress {
    open: usize,
    is_taken: bool,
    bytes: usize,
    fault: Option<io::ErrorKind>,
    errno: Option<i32>,
    opens: Option<u32>,
    moved: Option<RecordHeader>,
}

/// A segment whose head is not on the medium.
#[derive(Clone, Copy)]
enum Unopened {
    Waiting,
    Failed(Option<i32>, io::ErrorKind),
}

/// What is being written.
#[derive(Default)]
pub(super) struct Writer {
    queue: VecDeque<Put>,
    queued_bytes: usize,
    /// Bytes of the first of them that were taken already.
    taken: usize,
    puts: HashMap<u64, Progress>,
    unopened: HashMap<u32, Unopened>,
    chunks_open: usize,
    /// Written and not flushed, with their bytes.
    waiting: Vec<u64>,
    waiting_bytes: usize,
    flushing: Vec<u64>,
    is_flushing: bool,
}

impl Writer {
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.puts.is_empty() && !self.is_flushing
    }

    pub(super) fn push(&mut self, put: Put) {
        self.queued_bytes += put.len;
        self.queue.push_back(put);
    }

    /// A segment begins anew; what goes into it waits, or fails with its room.
    pub(super) fn opening(&mut self, segment: u32, fault: Option<&io::Error>) {
        let state = fault.map_or(Unopened::Waiting, Unopened::of);
        self.unopened.insert(segment, state);
    }

    /// A part of a chunk waits while something is written or flushed: what comes meanwhile goes with it.
    fn is_worth_a_chunk(&self) -> bool {
        self.queued_bytes >= CHUNK_BYTES || (self.chunks_open == 0 && !self.is_flushing)
    }

    /// Whether nothing can be written before a head is committed that only has to be flushed.
    fn waits_for_a_head(&self) -> bool {
        let Some(front) = self.queue.front() else { return false };
        matches!(self.state(front), Some(Unopened::Waiting)) && {
            let opens = |job: &u64| self.puts.get(job).is_some_and(|put| put.opens == front.segment);
            self.waiting.iter().any(opens)
        }
    }

    fn state(&self, put: &Put) -> Option<Unopened> {
        self.unopened.get(&put.segment?).copied()
    }
}

impl Unopened {
    fn of(cause: &io::Error) -> Unopened {
        Unopened::Failed(cause.raw_os_error(), cause.kind())
    }
}

fn error(errno: Option<i32>, kind: io::ErrorKind) -> io::Error {
    errno.map_or_else(|| kind.into(), io::Error::from_raw_os_error)
}

impl Engine {
    /// Fills chunks with what waits, and flushes when it is time.
    pub(super) fn write_on(&mut self) {
        while let Some(put) = self.writer.queue.front() {
            match self.writer.state(put) {
                Some(Unopened::Failed(errno, kind)) => {
                    let Some(put) = self.writer.queue.pop_front() else { break };
                    self.writer.queued_bytes -= put.len;
                    self.report_put(put.job, put.moved, Err(error(errno, kind)));
                    continue;
                }
                Some(Unopened::Waiting) => break,
                None => {}
            }
            if !self.pool.has_chunk() || !self.writer.is_worth_a_chunk() {
                break;
            }
            self.fill_chunk();
        }
        self.flush();
    }

    /// One chunk of puts that lie one after another.
    fn fill_chunk(&mut self) {
        let Some(chunk) = self.pool.take() else { return };
        let (mut gather, mut jobs, mut chunk_at) = (Gather::new(chunk), Vec::new(), 0);
        while gather.room() > 0 {
            let Some(put) = self.writer.queue.front() else { break };
            let (filled, next_at) = (gather.bytes() as u64, put.at + self.writer.taken as u64);
            let follows = filled == 0 || (next_at == chunk_at + filled && self.writer.state(put).is_none());
            if !follows {
                break;
            }
            if filled == 0 {
                chunk_at = next_at;
            }
            let count = put.fill(self.writer.taken, &mut gather);
            self.writer.taken += count;
            self.writer.queued_bytes -= count;
            let progress = self.writer.puts.entry(put.job).or_insert_with(|| Progress {
                bytes: put.len,
                opens: put.opens,
                moved: put.moved,
                ..Progress::default()
            });
            if jobs.last() != Some(&put.job) {
                progress.open += 1;
                jobs.push(put.job);
            }
            if self.writer.taken == put.len {
                progress.is_taken = true;
                self.writer.taken = 0;
                self.writer.queue.pop_front();
            }
        }
        self.writer.chunks_open += 1;
        let is_full = gather.room() == 0;
        self.submit(Open::Chunk { jobs }, chunk_at, Op::Write(gather));
        // The device begins with this one while the next is filled.
        if is_full {
            self.submit_now();
        }
    }

    pub(super) fn chunk_ended(&mut self, jobs: &[u64], result: io::Result<()>) {
        self.writer.chunks_open -= 1;
        let result = SsdFaults::apply(&self.parts.faults.write_errno, result);
        for job in jobs {
            let Some(put) = self.writer.puts.get_mut(job) else { continue };
            put.open -= 1;
            if let Err(cause) = &result {
                (put.errno, put.fault) = (cause.raw_os_error(), Some(cause.kind()));
            }
            if put.open == 0 && put.is_taken {
                self.written(*job);
            }
        }
        self.flush();
    }

    /// All bytes of a put were given to the device and taken, or not.
    fn written(&mut self, job: u64) {
        let Some(put) = self.writer.puts.get(&job) else { return };
        match put.fault {
            None => {
                self.writer.waiting_bytes += put.bytes;
                self.writer.waiting.push(job);
            }
            Some(kind) => {
                let cause = error(put.errno, kind);
                self.ended(job, Err(cause));
            }
        }
    }

    /// One flush at a time; what is written meanwhile shares the next one.
    fn flush(&mut self) {
        let writer = &mut self.writer;
        let is_due =
            writer.waiting_bytes >= FLUSH_BYTES || writer.chunks_open == 0 || writer.waits_for_a_head();
        if writer.is_flushing || writer.waiting.is_empty() || !is_due {
            return;
        }
        writer.is_flushing = true;
        writer.waiting_bytes = 0;
        writer.flushing = std::mem::take(&mut writer.waiting);
        self.submit(Open::Flush, 0, Op::Sync);
    }

    /// A flush that fails fails all that was written so far: the system tells of bytes that it could not
    /// write once, and the next flush knows nothing of them.
    pub(super) fn flush_ended(&mut self, result: &io::Result<()>) {
        self.writer.is_flushing = false;
        let mut jobs = std::mem::take(&mut self.writer.flushing);
        if let Err(cause) = result {
            self.writer.waiting_bytes = 0;
            jobs.append(&mut self.writer.waiting);
            for put in self.writer.puts.values_mut() {
                (put.errno, put.fault) = (cause.raw_os_error(), Some(cause.kind()));
            }
        }
        for job in jobs {
            let result = match result {
                Ok(()) => Ok(()),
                Err(cause) => Err(error(cause.raw_os_error(), cause.kind())),
            };
            self.ended(job, result);
        }
        self.write_on();
    }

    fn ended(&mut self, job: u64, result: io::Result<()>) {
        let Some(put) = self.writer.puts.remove(&job) else { return };
        if let Some(segment) = put.opens {
            match &result {
                Ok(()) => self.writer.unopened.remove(&segment),
                Err(cause) => self.writer.unopened.insert(segment, Unopened::of(cause)),
            };
        }
        self.report_put(job, put.moved, result);
    }

    fn report_put(&mut self, job: u64, moved: Option<RecordHeader>, result: io::Result<()>) {
        let outcome = match moved {
            None => Outcome::Put(result),
            Some(header) => Outcome::Moved(result.map(|()| header).map_err(MoveFault::Write)),
        };
        self.report(job, outcome);
    }
}
