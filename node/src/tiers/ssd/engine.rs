//! The thread of one device: accepts jobs, keeps many operations in flight, and reports each job
//! once. Reads are cut into pieces that are in flight together and go straight to their
//! destination; writing is in `writer`.
//!
//! Not here: the location of records (`book`), and handling of errors (`store`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use bytes::Bytes;
use kv_core::id::{BlockHash, Generation, IdentityDigest};
use kvfleet_proto::frame::StreamingVerifier;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::book::RecordExtent;
use super::buffer::{ChunkPool, PageBuffer, ReadBuffer, ReadBufferOwner};
use super::device::BlockDevice;
use super::format::{PAGE_BYTES, RecordHeader, SegmentHead, TRAILER_BYTES, record_pages};
use super::mailbox::Mailbox;
use super::ring::{CompletedOp, Ring, RingOp};
use super::slowness::{DeviceTotals, IoKind};
use super::writer::{WriteRequest, Writer};
use crate::arena::SlotMut;

/// Maximum operations in the ring; NVMe devices reach their full rate well below this.
pub(super) const QUEUE_DEPTH: usize = 64;

/// Length of read pieces while few operations are in flight: one block keeps a device busy, and its
/// first pieces are checked while others arrive. Small under test, like the blocks.
const READ_PIECE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// The same once [`BUSY_OPS`] are in flight: more pieces would only add cost.
const LONG_READ_PIECE_BYTES: usize = if cfg!(test) { 8 << 10 } else { 1 << 20 };

/// Operations in flight that keep a device busy.
const BUSY_OPS: usize = 4;

/// Reports are batched until this many bytes were verified: some tens of microseconds.
const REPORT_BATCH_BYTES: usize = 256 << 10;

/// A job for the thread.
pub(crate) enum DeviceJob {
    /// Begin a segment: reserve its space, then write its head. Its records wait for that.
    Head { job: u64, head: SegmentHead, at: u64, grow_to: u64 },
    /// Write a frame and its trailer.
    Save { job: u64, spot: RecordExtent, at: u64, header: RecordHeader, frame: Bytes },
    /// Write a footer.
    Seal { job: u64, at: u64, footer: Bytes },
    /// Relocate a record, if it is intact.
    Relocate { job: u64, from: RecordExtent, from_at: u64, to: RecordExtent, to_at: u64 },
    /// Read a record only to check whether it is intact.
    Check { job: u64, spot: RecordExtent, at: u64 },
    /// Read a frame.
    Read { job: u64, at: u64, hash: BlockHash, generation: Generation, into: SlotMut },
}

/// The end of a job, for [`super::SsdTier::complete`].
#[derive(Debug)]
pub struct Report {
    pub(super) lane: usize,
    pub(super) job: u64,
    pub(super) outcome: JobOutcome,
}

/// Result of a job.
#[derive(Debug)]
pub(super) enum JobOutcome {
    /// The data is on the medium.
    Written(io::Result<()>),
    /// The verified frame.
    Read(Result<Bytes, ReadFault>),
    /// The record is written at its new position.
    Relocated(Result<RecordHeader, RelocationFault>),
}

/// Error of a relocation.
#[derive(Debug)]
pub(super) enum RelocationFault {
    /// The record cannot be read.
    Read(ReadFault),
    /// The record could not be written.
    Write(io::Error),
}

/// Error of reading a block.
#[derive(Debug, thiserror::Error)]
pub enum ReadFault {
    /// The medium returned an error.
    #[error("the medium failed: {0}")]
    Medium(#[from] io::Error),
    /// The bytes are not the block's.
    #[error("the bytes are wrong: {0}")]
    Corrupt(String),
}

/// Faults injected by tests: error numbers, 0 for none.
#[derive(Debug, Default)]
pub struct SsdFaults {
    /// Every write fails with this error number, including the one that probes the directory at
    /// start.
    pub write_errno: AtomicI32,
    /// Every read fails with this error number.
    pub read_errno: AtomicI32,
    /// One more than the number of the segment that is unreadable at start; 0 for none.
    pub unreadable_segment: AtomicU32,
    /// Whether the first page of every file is unreadable at start.
    pub unreadable_heads: AtomicBool,
    /// Whether every device counts as slow.
    pub slow: AtomicBool,
    /// Whether all devices hang.
    pub hangs: AtomicBool,
}

impl SsdFaults {
    /// Injected result of reading this segment at start.
    pub(crate) fn scan(&self, number: u32) -> io::Result<()> {
        match self.unreadable_segment.load(Ordering::Relaxed) {
            segment if segment == number + 1 => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Ok(()),
        }
    }

    /// Injected result of reading a file's first page at start.
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

/// Parts of an engine besides its ring.
pub(super) struct EngineParts {
    pub(super) lane: usize,
    pub(super) identity: IdentityDigest,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) mailbox: Arc<Mailbox<DeviceJob>>,
    pub(super) reports: UnboundedSender<Report>,
    pub(super) faults: Arc<SsdFaults>,
    /// Work done by the device.
    pub(super) totals: Arc<Mutex<DeviceTotals>>,
}

/// State of the thread. `writer` has the other half of its methods.
pub(super) struct DeviceEngine {
    pub(super) parts: EngineParts,
    ring: Ring,
    pub(super) pool: ChunkPool,
    next_id: u64,
    pub(super) open: HashMap<u64, OpenOperation>,
    /// Operations that wait for space in the ring.
    backlog: VecDeque<(u64, u64, RingOp)>,
    in_ring: usize,
    reads: HashMap<u64, PendingRead>,
    pub(super) writer: Writer,
    /// Ends not yet reported, and bytes verified since the last report.
    unreported: Vec<Report>,
    verified_bytes: usize,
}

/// Owner of an operation.
pub(super) enum OpenOperation {
    /// A piece of the read with this number.
    Piece(u64),
    /// A chunk with bytes of these jobs.
    Chunk {
        jobs: Vec<u64>,
    },
    Flush,
}

/// A read with pieces in flight.
struct PendingRead {
    buffer: Arc<ReadBuffer>,
    pieces_left: usize,
    fault: Option<io::Error>,
    /// Verification progress of a block.
    arriving: StreamingVerifier,
    purpose: ReadPurpose,
}

/// Purpose of a read.
#[derive(Clone, Copy)]
enum ReadPurpose {
    Block { job: u64, hash: BlockHash, generation: Generation },
    Relocate { job: u64, from: RecordExtent, to: RecordExtent, to_at: u64 },
    Check { job: u64, spot: RecordExtent },
}

impl DeviceEngine {
    pub(super) fn new(parts: EngineParts, ring: Ring, pool: ChunkPool) -> DeviceEngine {
        DeviceEngine {
            parts,
            ring,
            pool,
            next_id: 0,
            open: HashMap::new(),
            backlog: VecDeque::new(),
            in_ring: 0,
            reads: HashMap::new(),
            writer: Writer::default(),
            unreported: Vec::new(),
            verified_bytes: 0,
        }
    }

    /// Runs until the mailbox is closed and every job is reported.
    pub(super) fn run(mut self) {
        let mailbox = Arc::clone(&self.parts.mailbox);
        let _closes = MailboxCloser(Arc::clone(&mailbox));
        let (mut jobs, mut ended) = (VecDeque::new(), Vec::new());
        loop {
            while self.parts.faults.hangs.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let is_over = mailbox.take(&mut jobs);
            jobs.drain(..).for_each(|job| self.start_job(job));
            self.continue_writes();
            self.send_reports();
            if is_over && self.is_idle() {
                return;
            }
            let nap = || mailbox.wait();
            // After the close no further wake-up comes, and operations in flight end by themselves.
            let sleeps = is_over || mailbox.prepare_to_sleep();
            self.ring.submit_and_reap(sleeps.then_some(&nap as &dyn Fn()), &mut ended);
            mailbox.mark_awake();
            ended.drain(..).for_each(|finished| self.finish_operation(finished));
        }
    }

    fn is_idle(&self) -> bool {
        self.in_ring == 0 && self.backlog.is_empty() && self.reads.is_empty() && self.writer.is_idle()
    }

    fn start_job(&mut self, job: DeviceJob) {
        match job {
            DeviceJob::Read { job, at, hash, generation, into } => {
                let frame_bytes = into.len();
                let landing = ReadBuffer::new(ReadBufferOwner::Slot(into));
                self.read(landing, at, frame_bytes, ReadPurpose::Block { job, hash, generation });
            }
            DeviceJob::Relocate { job, from, from_at, to, to_at } => {
                self.read_record(from, from_at, ReadPurpose::Relocate { job, from, to, to_at });
            }
            DeviceJob::Check { job, spot, at } => {
                self.read_record(spot, at, ReadPurpose::Check { job, spot });
            }
            DeviceJob::Head { job, head, at, grow_to } => {
                let room = SsdFaults::apply(&self.parts.faults.write_errno, self.parts.device.grow(grow_to));
                self.writer.begin_segment(head.segment, room.as_ref().err());
                match room {
                    Ok(()) => self.writer.push(WriteRequest::head(job, head, at)),
                    Err(cause) => self.report(job, JobOutcome::Written(Err(cause))),
                }
            }
            DeviceJob::Save { job, spot, at, header, frame } => {
                self.writer.push(WriteRequest::record(job, spot, at, header, frame, false));
            }
            DeviceJob::Seal { job, at, footer } => self.writer.push(WriteRequest::footer(job, at, footer)),
        }
    }

    /// Reads a whole record into separate memory.
    fn read_record(&mut self, spot: RecordExtent, at: u64, wish: ReadPurpose) {
        let bytes = record_pages(spot.frame_bytes as usize) as usize * PAGE_BYTES;
        let landing = ReadBuffer::new(ReadBufferOwner::Pages(PageBuffer::new(bytes)));
        self.read(landing, at, bytes, wish);
    }

    fn read(&mut self, landing: ReadBuffer, at: u64, bytes: usize, wish: ReadPurpose) {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        if bytes > landing.len() {
            return self.handle_read(Err(io::ErrorKind::InvalidInput.into()), None, wish);
        }
        let landing = Arc::new(landing);
        let piece = if self.in_ring < BUSY_OPS { READ_PIECE_BYTES } else { LONG_READ_PIECE_BYTES };
        let pieces: Vec<Range<usize>> =
            (0..bytes).step_by(piece).map(|start| start..(start + piece).min(bytes)).collect();
        self.next_id += 1;
        let number = self.next_id;
        let reading = PendingRead {
            buffer: Arc::clone(&landing),
            pieces_left: pieces.len(),
            fault: None,
            arriving: StreamingVerifier::default(),
            purpose: wish,
        };
        self.reads.insert(number, reading);
        for range in pieces {
            let piece_at = at + range.start as u64;
            self.submit(
                OpenOperation::Piece(number),
                piece_at,
                RingOp::Read { landing: Arc::clone(&landing), range },
            );
        }
    }

    pub(super) fn submit(&mut self, open: OpenOperation, at: u64, op: RingOp) {
        self.next_id += 1;
        self.open.insert(self.next_id, open);
        if self.in_ring < QUEUE_DEPTH {
            self.in_ring += 1;
            self.start_operation(self.next_id, at, op);
        } else {
            self.backlog.push_back((self.next_id, at, op));
        }
    }

    fn start_operation(&mut self, id: u64, at: u64, op: RingOp) {
        self.parts.totals.lock().record_start(io_kind(&op), self.parts.device.now());
        self.ring.start(id, at, op);
    }

    fn finish_operation(&mut self, finished: CompletedOp) {
        let CompletedOp { id, op, result } = finished;
        let done = result.is_ok().then(|| op.bytes());
        self.parts.totals.lock().record_end(io_kind(&op), done, self.parts.device.now());
        match self.backlog.pop_front() {
            Some((next, at, op)) => self.start_operation(next, at, op),
            None => self.in_ring -= 1,
        }
        match self.open.remove(&id) {
            Some(OpenOperation::Piece(number)) => {
                drop(op);
                self.piece_ended(number, result);
            }
            Some(OpenOperation::Chunk { jobs }) => {
                if let RingOp::Write(gather) = op {
                    self.pool.release(gather.into_chunk());
                }
                self.handle_chunk_end(&jobs, result);
            }
            Some(OpenOperation::Flush) => self.handle_flush_end(&result),
            None => {}
        }
    }

    fn piece_ended(&mut self, number: u64, result: io::Result<()>) {
        let Some(reading) = self.reads.get_mut(&number) else { return };
        reading.pieces_left -= 1;
        if let Err(cause) = result {
            reading.fault.get_or_insert(cause);
        }
        if reading.pieces_left > 0 {
            if let ReadPurpose::Block { .. } = reading.purpose {
                // An error is reported when all pieces have arrived.
                let _ = reading.arriving.advance(reading.buffer.filled_prefix());
            }
            return;
        }
        let Some(PendingRead { buffer: landing, fault, arriving, purpose: wish, .. }) =
            self.reads.remove(&number)
        else {
            return;
        };
        let result = SsdFaults::apply(&self.parts.faults.read_errno, fault.map_or(Ok(()), Err));
        let owner = Arc::into_inner(landing).map(ReadBuffer::into_owner);
        self.handle_read(result.map(|()| arriving), owner, wish);
    }

    fn handle_read(
        &mut self,
        result: io::Result<StreamingVerifier>,
        owner: Option<ReadBufferOwner>,
        wish: ReadPurpose,
    ) {
        match wish {
            ReadPurpose::Block { job, hash, generation } => {
                let identity = self.parts.identity.with_generation(generation);
                let checked = result.map_err(ReadFault::from).and_then(|arriving| match owner {
                    Some(ReadBufferOwner::Slot(slot)) => {
                        verify_frame(arriving, slot.freeze(), identity, hash)
                    }
                    _ => Err(ReadFault::Corrupt("no data was read".to_owned())),
                });
                self.verified_bytes += checked.as_ref().map_or(0, Bytes::len);
                self.report(job, JobOutcome::Read(checked));
                if self.verified_bytes >= REPORT_BATCH_BYTES {
                    self.send_reports();
                }
            }
            ReadPurpose::Relocate { job, from, to, to_at } => {
                match self.checked_record(result, owner, from) {
                    Ok((header, frame)) => {
                        self.writer.push(WriteRequest::record(job, to, to_at, header, frame, true));
                        self.continue_writes();
                    }
                    Err(fault) => self.report(job, JobOutcome::Relocated(Err(RelocationFault::Read(fault)))),
                }
            }
            ReadPurpose::Check { job, spot } => {
                let checked = self.checked_record(result, owner, spot).map(|(_, frame)| frame);
                self.report(job, JobOutcome::Read(checked));
            }
        }
    }

    fn checked_record(
        &self,
        result: io::Result<StreamingVerifier>,
        owner: Option<ReadBufferOwner>,
        spot: RecordExtent,
    ) -> Result<(RecordHeader, Bytes), ReadFault> {
        result?;
        match owner {
            Some(ReadBufferOwner::Pages(pages)) => check_record(pages, spot, self.parts.identity),
            _ => Err(ReadFault::Corrupt("no data was read".to_owned())),
        }
    }

    /// Submits prepared operations now, because further work precedes the next turn.
    pub(super) fn submit_now(&mut self) {
        self.ring.submit_now();
    }

    pub(super) fn report(&mut self, job: u64, outcome: JobOutcome) {
        self.unreported.push(Report { lane: self.parts.lane, job, outcome });
    }

    /// Sends all reports at once, so that the receiver is woken once; a wake-up costs about as much
    /// as verifying 64 KiB.
    fn send_reports(&mut self) {
        self.verified_bytes = 0;
        for report in self.unreported.drain(..) {
            // The store is gone only at shutdown, when it needs no reports.
            let _ = self.parts.reports.send(report);
        }
    }
}

fn io_kind(op: &RingOp) -> IoKind {
    match op {
        RingOp::Read { .. } => IoKind::Read,
        RingOp::Write(_) => IoKind::Write,
        RingOp::Sync => IoKind::Flush,
    }
}

/// Closes the mailbox when the thread ends for any reason, so that no caller waits for it.
struct MailboxCloser(Arc<Mailbox<DeviceJob>>);

impl Drop for MailboxCloser {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Verifies a frame: header, identity, hash, every slice checksum.
fn verify_frame(
    arriving: StreamingVerifier,
    bytes: Bytes,
    identity: IdentityDigest,
    hash: BlockHash,
) -> Result<Bytes, ReadFault> {
    let frame = arriving.finish(bytes, identity, hash);
    frame.map(|frame| frame.bytes).map_err(|cause| ReadFault::Corrupt(cause.to_string()))
}

/// Verifies a whole record: its trailer and its frame.
pub(super) fn check_record(
    pages: PageBuffer,
    spot: RecordExtent,
    identity: IdentityDigest,
) -> Result<(RecordHeader, Bytes), ReadFault> {
    let trailer = pages.len().checked_sub(TRAILER_BYTES).and_then(|at| pages.get(at..)).unwrap_or_default();
    let header =
        RecordHeader::read(trailer, spot.position).map_err(|cause| ReadFault::Corrupt(cause.to_owned()))?;
    if header.traits.bytes != spot.frame_bytes {
        return Err(ReadFault::Corrupt("the record has another length".to_owned()));
    }
    let frame = Bytes::from_owner(pages).slice(..spot.frame_bytes as usize);
    let identity = identity.with_generation(header.generation);
    Ok((header, verify_frame(StreamingVerifier::default(), frame, identity, header.hash)?))
}
