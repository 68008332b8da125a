//! The write path of an engine: adjacent data is combined into chunks, several chunks are in
//! flight, and one flush commits all earlier writes.
//!
//! A write is reported only after a flush that covers it, and a segment is written only after its
//! head is on the medium. Not here: reading (`engine`), and positions (`book`).

use std::collections::{HashMap, VecDeque};
use std::io;

use bytes::Bytes;

use super::book::RecordExtent;
use super::engine::{DeviceEngine, JobOutcome, OpenOperation, RelocationFault, SsdFaults};
use super::format::{PAGE_BYTES, RecordHeader, SegmentHead, TRAILER_BYTES, record_pages};
use super::ring::{GatherWrite, RingOp, is_page_aligned};

/// Size of a chunk, the unit of writing: large enough for the full rate of a device. Small under
/// test, like the blocks, so that many chunks and a flush are in flight.
pub(super) const CHUNK_BYTES: usize = if cfg!(test) { 16 << 10 } else { 512 << 10 };

/// Number of chunks of a device, which bounds the bytes in flight to 16 MiB.
pub(super) const CHUNKS: u16 = 32;

/// Memory of all chunks in bytes.
pub(super) const POOL_BYTES: usize = CHUNKS as usize * CHUNK_BYTES;

/// While writes are in flight, a flush waits until it commits this many bytes: a device that is
/// busy writing flushes slowly, so writes in flight end first.
const FLUSH_BYTES: usize = if cfg!(test) { 24 << 10 } else { 16 << 20 };

/// Minimum length of aligned whole pages to be written without a copy: the kernel must look up each
/// piece, which costs as much as copying a page or two.
const SHARED_BYTES_MIN: usize = if cfg!(test) { PAGE_BYTES } else { 16 << 10 };

/// A contiguous write to the medium.
pub(super) struct WriteRequest {
    job: u64,
    /// The segment that needs its head written first.
    segment: Option<u32>,
    /// The segment that may be written once this is committed.
    opens: Option<u32>,
    /// Metadata to report for a relocated record.
    relocated: Option<RecordHeader>,
    at: u64,
    bytes: Bytes,
    /// Stored in the last bytes of the last page.
    trailer: Option<[u8; TRAILER_BYTES]>,
    len: usize,
}

impl WriteRequest {
    pub(super) fn head(job: u64, head: SegmentHead, at: u64) -> WriteRequest {
        let bytes = Bytes::copy_from_slice(&head.page());
        let opens = Some(head.segment);
        WriteRequest { job, segment: None, opens, relocated: None, at, bytes, trailer: None, len: PAGE_BYTES }
    }

    pub(super) fn record(
        job: u64,
        spot: RecordExtent,
        at: u64,
        header: RecordHeader,
        frame: Bytes,
        is_moved: bool,
    ) -> WriteRequest {
        let mut trailer = [0u8; TRAILER_BYTES];
        header.write(spot.position, &mut trailer);
        let len = record_pages(frame.len()) as usize * PAGE_BYTES;
        let (segment, relocated) = (Some(spot.position.head.segment), is_moved.then_some(header));
        WriteRequest { job, segment, opens: None, relocated, at, bytes: frame, trailer: Some(trailer), len }
    }

    pub(super) fn footer(job: u64, at: u64, footer: Bytes) -> WriteRequest {
        let len = footer.len();
        WriteRequest {
            job,
            segment: None,
            opens: None,
            relocated: None,
            at,
            bytes: footer,
            trailer: None,
            len,
        }
    }

    /// Leading bytes that are written without a copy: whole pages of the frame.
    fn shared_bytes(&self) -> usize {
        let whole = self.bytes.len() / PAGE_BYTES * PAGE_BYTES;
        if whole >= SHARED_BYTES_MIN && is_page_aligned(&self.bytes) { whole } else { 0 }
    }

    /// Appends the bytes from `from` on, as far as they fit; returns the count.
    fn fill(&self, from: usize, gather: &mut GatherWrite) -> usize {
        let (count, shared) = (gather.free_bytes().min(self.len - from), self.shared_bytes());
        if from < shared {
            let count = count.min(shared - from);
            gather.append_shared(self.bytes.slice(from..from + count));
            return count;
        }
        self.copy_to(from, gather.append_copy(count));
        count
    }

    /// Copies the bytes from `from` on into `out`, which is no longer than the rest. Padding is
    /// zero.
    fn copy_to(&self, from: usize, out: &mut [u8]) {
        let own = self.bytes.get(from..).unwrap_or_default();
        let copied = own.len().min(out.len());
        out[..copied].copy_from_slice(&own[..copied]);
        out[copied..].fill(0);
        if let Some(trailer) = &self.trailer {
            // Chunks are whole pages, so the trailer lies within one of them.
            let begin = self.len - TRAILER_BYTES;
            if from + out.len() == self.len {
                out[begin - from..].copy_from_slice(trailer);
            }
        }
    }
}

/// Progress of a write with at least one submitted byte.
#[derive(Default)]
struct WriteProgress {
    open: usize,
    is_fully_submitted: bool,
    bytes: usize,
    fault: Option<io::ErrorKind>,
    errno: Option<i32>,
    opens: Option<u32>,
    relocated: Option<RecordHeader>,
}

/// State of a segment's head that is not on the medium.
#[derive(Clone, Copy)]
enum HeadState {
    Waiting,
    Failed(Option<i32>, io::ErrorKind),
}

/// State of the write path.
#[derive(Default)]
pub(super) struct Writer {
    queue: VecDeque<WriteRequest>,
    queued_bytes: usize,
    /// Submitted bytes of the first one.
    submitted_bytes: usize,
    writes: HashMap<u64, WriteProgress>,
    head_states: HashMap<u32, HeadState>,
    chunks_open: usize,
    /// Written but unflushed jobs, with their bytes.
    unflushed: Vec<u64>,
    unflushed_bytes: usize,
    flushing: Vec<u64>,
    is_flushing: bool,
}

impl Writer {
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.writes.is_empty() && !self.is_flushing
    }

    pub(super) fn push(&mut self, put: WriteRequest) {
        self.queued_bytes += put.len;
        self.queue.push_back(put);
    }

    /// Begins a segment: its records wait for the head, or fail if its space could not be reserved.
    pub(super) fn begin_segment(&mut self, segment: u32, fault: Option<&io::Error>) {
        let state = fault.map_or(HeadState::Waiting, HeadState::of);
        self.head_states.insert(segment, state);
    }

    /// A partial chunk waits while a write or flush is in flight, so that later data shares it.
    fn should_fill_chunk(&self) -> bool {
        self.queued_bytes >= CHUNK_BYTES || (self.chunks_open == 0 && !self.is_flushing)
    }

    /// Whether all writes wait for a head that only needs a flush.
    fn waits_for_a_head(&self) -> bool {
        let Some(front) = self.queue.front() else { return false };
        matches!(self.head_state(front), Some(HeadState::Waiting)) && {
            let opens = |job: &u64| self.writes.get(job).is_some_and(|put| put.opens == front.segment);
            self.unflushed.iter().any(opens)
        }
    }

    fn head_state(&self, put: &WriteRequest) -> Option<HeadState> {
        self.head_states.get(&put.segment?).copied()
    }
}

impl HeadState {
    fn of(cause: &io::Error) -> HeadState {
        HeadState::Failed(cause.raw_os_error(), cause.kind())
    }
}

fn error(errno: Option<i32>, kind: io::ErrorKind) -> io::Error {
    errno.map_or_else(|| kind.into(), io::Error::from_raw_os_error)
}

impl DeviceEngine {
    /// Fills chunks with queued writes, and flushes when due.
    pub(super) fn continue_writes(&mut self) {
        while let Some(put) = self.writer.queue.front() {
            match self.writer.head_state(put) {
                Some(HeadState::Failed(errno, kind)) => {
                    let Some(put) = self.writer.queue.pop_front() else { break };
                    self.writer.queued_bytes -= put.len;
                    self.report_write(put.job, put.relocated, Err(error(errno, kind)));
                    continue;
                }
                Some(HeadState::Waiting) => break,
                None => {}
            }
            if !self.pool.has_chunk() || !self.writer.should_fill_chunk() {
                break;
            }
            self.fill_chunk();
        }
        self.flush();
    }

    /// Fills one chunk with adjacent writes.
    fn fill_chunk(&mut self) {
        let Some(chunk) = self.pool.take() else { return };
        let (mut gather, mut jobs, mut chunk_at) = (GatherWrite::new(chunk), Vec::new(), 0);
        while gather.free_bytes() > 0 {
            let Some(put) = self.writer.queue.front() else { break };
            let (filled, next_at) = (gather.bytes() as u64, put.at + self.writer.submitted_bytes as u64);
            let follows =
                filled == 0 || (next_at == chunk_at + filled && self.writer.head_state(put).is_none());
            if !follows {
                break;
            }
            if filled == 0 {
                chunk_at = next_at;
            }
            let count = put.fill(self.writer.submitted_bytes, &mut gather);
            self.writer.submitted_bytes += count;
            self.writer.queued_bytes -= count;
            let progress = self.writer.writes.entry(put.job).or_insert_with(|| WriteProgress {
                bytes: put.len,
                opens: put.opens,
                relocated: put.relocated,
                ..WriteProgress::default()
            });
            if jobs.last() != Some(&put.job) {
                progress.open += 1;
                jobs.push(put.job);
            }
            if self.writer.submitted_bytes == put.len {
                progress.is_fully_submitted = true;
                self.writer.submitted_bytes = 0;
                self.writer.queue.pop_front();
            }
        }
        self.writer.chunks_open += 1;
        let is_full = gather.free_bytes() == 0;
        self.submit(OpenOperation::Chunk { jobs }, chunk_at, RingOp::Write(gather));
        // The device starts this one while the next is filled.
        if is_full {
            self.submit_now();
        }
    }

    pub(super) fn handle_chunk_end(&mut self, jobs: &[u64], result: io::Result<()>) {
        self.writer.chunks_open -= 1;
        let result = SsdFaults::apply(&self.parts.faults.write_errno, result);
        for job in jobs {
            let Some(put) = self.writer.writes.get_mut(job) else { continue };
            put.open -= 1;
            if let Err(cause) = &result {
                (put.errno, put.fault) = (cause.raw_os_error(), Some(cause.kind()));
            }
            if put.open == 0 && put.is_fully_submitted {
                self.handle_written(*job);
            }
        }
        self.flush();
    }

    /// All bytes of a write were completed, successfully or not.
    fn handle_written(&mut self, job: u64) {
        let Some(put) = self.writer.writes.get(&job) else { return };
        match put.fault {
            None => {
                self.writer.unflushed_bytes += put.bytes;
                self.writer.unflushed.push(job);
            }
            Some(kind) => {
                let cause = error(put.errno, kind);
                self.finish_write(job, Err(cause));
            }
        }
    }

    /// Only one flush at a time; writes completed meanwhile share the next one.
    fn flush(&mut self) {
        let writer = &mut self.writer;
        let is_due =
            writer.unflushed_bytes >= FLUSH_BYTES || writer.chunks_open == 0 || writer.waits_for_a_head();
        if writer.is_flushing || writer.unflushed.is_empty() || !is_due {
            return;
        }
        writer.is_flushing = true;
        writer.unflushed_bytes = 0;
        writer.flushing = std::mem::take(&mut writer.unflushed);
        self.submit(OpenOperation::Flush, 0, RingOp::Sync);
    }

    /// A failed flush fails all writes so far: the system reports lost bytes only once, and the
    /// next flush would succeed without them.
    pub(super) fn handle_flush_end(&mut self, result: &io::Result<()>) {
        self.writer.is_flushing = false;
        let mut jobs = std::mem::take(&mut self.writer.flushing);
        if let Err(cause) = result {
            self.writer.unflushed_bytes = 0;
            jobs.append(&mut self.writer.unflushed);
            for put in self.writer.writes.values_mut() {
                (put.errno, put.fault) = (cause.raw_os_error(), Some(cause.kind()));
            }
        }
        for job in jobs {
            let result = match result {
                Ok(()) => Ok(()),
                Err(cause) => Err(error(cause.raw_os_error(), cause.kind())),
            };
            self.finish_write(job, result);
        }
        self.continue_writes();
    }

    fn finish_write(&mut self, job: u64, result: io::Result<()>) {
        let Some(put) = self.writer.writes.remove(&job) else { return };
        if let Some(segment) = put.opens {
            match &result {
                Ok(()) => self.writer.head_states.remove(&segment),
                Err(cause) => self.writer.head_states.insert(segment, HeadState::of(cause)),
            };
        }
        self.report_write(job, put.relocated, result);
    }

    fn report_write(&mut self, job: u64, moved: Option<RecordHeader>, result: io::Result<()>) {
        let outcome = match moved {
            None => JobOutcome::Written(result),
            Some(header) => JobOutcome::Relocated(result.map(|()| header).map_err(RelocationFault::Write)),
        };
        self.report(job, outcome);
    }
}
