//! The thread of one device: takes jobs, keeps many operations open, and reports each job once. Reads are
//! cut into pieces that are in flight together, and land where they are wanted; writing is in `writing`.
//!
//! Not here: which record is where (`book`), nor what to do after an error (`store`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use bytes::Bytes;
use kv_core::id::{BlockHash, Generation, IdentityDigest};
use kvfleet_proto::frame::Arriving;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::book::Spot;
use super::buffer::{Landing, LandingOwner, PageBuffer, Pool};
use super::device::Device;
use super::format::{PAGE_BYTES, RecordHeader, SegmentHead, TRAILER_BYTES, record_pages};
use super::mailbox::Mailbox;
use super::ring::{Finished, Op, Ring};
use super::slow::{Kind, Tally};
use super::writing::{Put, Writer};
use crate::arena::SlotMut;

/// Operations open in the ring at once; NVMe devices reach their full rate well below this.
pub(super) const QUEUE_DEPTH: usize = 64;

/// A read is cut into pieces of this many bytes while little is in flight: enough to keep a device busy with
/// one block, of which the first pieces are checked while the others come. Small under test, where blocks are.
const PIECE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// The same once [`BUSY_OPS`] are in flight: more of them would only cost.
const LONG_PIECE_BYTES: usize = if cfg!(test) { 8 << 10 } else { 1 << 20 };

/// Operations in flight that keep a device busy.
const BUSY_OPS: usize = 4;

/// Ends wait for each other while less than this was verified: some ten microseconds.
const TOLD_BYTES: usize = 256 << 10;

/// Work for the thread.
pub(crate) enum Job {
    /// Begin a segment: reserve its room, then its head. What goes into it waits for that.
    Head { job: u64, head: SegmentHead, at: u64, grow_to: u64 },
    /// Write a frame and its trailer.
    Save { job: u64, spot: Spot, at: u64, header: RecordHeader, frame: Bytes },
    /// Write a footer.
    Seal { job: u64, at: u64, footer: Bytes },
    /// Move a record, if it is whole.
    Rescue { job: u64, from: Spot, from_at: u64, to: Spot, to_at: u64 },
    /// Read a record for nobody, to see whether it is whole.
    Check { job: u64, spot: Spot, at: u64 },
    /// Read a frame.
    Read { job: u64, at: u64, hash: BlockHash, generation: Generation, into: SlotMut },
}

/// A job's end, on its way to [`super::Ssd::take_in`].
#[derive(Debug)]
pub struct Report {
    pub(super) lane: usize,
    pub(super) job: u64,
    pub(super) outcome: Outcome,
}

/// How a job ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It is on the medium.
    Put(io::Result<()>),
    /// The frame, verified.
    Got(Result<Bytes, ReadFault>),
    /// The record is at its new place too.
    Moved(Result<RecordHeader, MoveFault>),
}

/// Why a record was not moved.
#[derive(Debug)]
pub(super) enum MoveFault {
    /// It cannot be read any more.
    Read(ReadFault),
    /// It could not be written.
    Write(io::Error),
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
    /// One more than the number of the segment that cannot be read at start; 0 for none.
    pub unreadable_segment: AtomicU32,
    /// The first page of no file can be read at start.
    pub unreadable_heads: AtomicBool,
    /// Every device counts as slow.
    pub slow: AtomicBool,
    /// No device does anything.
    pub hangs: AtomicBool,
}

impl SsdFaults {
    /// What a test makes of reading the segment with this number at start.
    pub(crate) fn scan(&self, number: u32) -> io::Result<()> {
        match self.unreadable_segment.load(Ordering::Relaxed) {
            segment if segment == number + 1 => Err(io::Error::from_raw_os_error(libc::EIO)),
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

/// What an engine is made of, besides its ring.
pub(super) struct Parts {
    pub(super) lane: usize,
    pub(super) identity: IdentityDigest,
    pub(super) device: Arc<dyn Device>,
    pub(super) mailbox: Arc<Mailbox<Job>>,
    pub(super) reports: UnboundedSender<Report>,
    pub(super) faults: Arc<SsdFaults>,
    /// What the device has done.
    pub(super) tally: Arc<Mutex<Tally>>,
}

/// The state of the thread. `writing` has the other half of its methods.
pub(super) struct Engine {
    pub(super) parts: Parts,
    ring: Ring,
    pub(super) pool: Pool,
    next_id: u64,
    pub(super) open: HashMap<u64, Open>,
    /// Operations that wait for the ring to have room.
    backlog: VecDeque<(u64, u64, Op)>,
    in_ring: usize,
    reads: HashMap<u64, Reading>,
    pub(super) writer: Writer,
    /// Ends that were not told yet, and bytes verified since the last telling.
    untold: Vec<Report>,
    verified_bytes: usize,
}

/// What an operation is part of.
pub(super) enum Open {
    /// A piece of the read with this number.
    Piece(u64),
    /// A chunk with bytes of these jobs.
    Chunk {
        jobs: Vec<u64>,
    },
    Flush,
}

/// A read with pieces in flight.
struct Reading {
    landing: Arc<Landing>,
    left: usize,
    fault: Option<io::Error>,
    /// What of a block was checked.
    arriving: Arriving,
    wish: Wish,
}

/// What a read is for.
#[derive(Clone, Copy)]
enum Wish {
    Block { job: u64, hash: BlockHash, generation: Generation },
    Rescue { job: u64, from: Spot, to: Spot, to_at: u64 },
    Check { job: u64, spot: Spot },
}

impl Engine {
    pub(super) fn new(parts: Parts, ring: Ring, pool: Pool) -> Engine {
        Engine {
            parts,
            ring,
            pool,
            next_id: 0,
            open: HashMap::new(),
            backlog: VecDeque::new(),
            in_ring: 0,
            reads: HashMap::new(),
            writer: Writer::default(),
            untold: Vec::new(),
            verified_bytes: 0,
        }
    }

    /// Runs until the other side closed the mailbox and every job is reported.
    pub(super) fn run(mut self) {
        let mailbox = Arc::clone(&self.parts.mailbox);
        let _closes = Closes(Arc::clone(&mailbox));
        let (mut jobs, mut ended) = (VecDeque::new(), Vec::new());
        loop {
            while self.parts.faults.hangs.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let is_over = mailbox.take(&mut jobs);
            jobs.drain(..).for_each(|job| self.start(job));
            self.write_on();
            self.tell();
            if is_over && self.is_idle() {
                return;
            }
            let nap = || mailbox.wait();
            // Once closed the bell rings no more, and what is open ends by itself.
            let sleeps = is_over || mailbox.may_sleep();
            self.ring.turn(sleeps.then_some(&nap as &dyn Fn()), &mut ended);
            mailbox.woke();
            ended.drain(..).for_each(|finished| self.finish(finished));
        }
    }

    fn is_idle(&self) -> bool {
        self.in_ring == 0 && self.backlog.is_empty() && self.reads.is_empty() && self.writer.is_idle()
    }

    fn start(&mut self, job: Job) {
        match job {
            Job::Read { job, at, hash, generation, into } => {
                let frame_bytes = into.len();
                let landing = Landing::new(LandingOwner::Slot(into));
                self.read(landing, at, frame_bytes, Wish::Block { job, hash, generation });
            }
            Job::Rescue { job, from, from_at, to, to_at } => {
                self.read_record(from, from_at, Wish::Rescue { job, from, to, to_at });
            }
            Job::Check { job, spot, at } => self.read_record(spot, at, Wish::Check { job, spot }),
            Job::Head { job, head, at, grow_to } => {
                let room = SsdFaults::apply(&self.parts.faults.write_errno, self.parts.device.grow(grow_to));
                self.writer.opening(head.segment, room.as_ref().err());
                match room {
                    Ok(()) => self.writer.push(Put::head(job, head, at)),
                    Err(cause) => self.report(job, Outcome::Put(Err(cause))),
                }
            }
            Job::Save { job, spot, at, header, frame } => {
                self.writer.push(Put::record(job, spot, at, header, frame, false));
            }
            Job::Seal { job, at, footer } => self.writer.push(Put::footer(job, at, footer)),
        }
    }

    /// The whole record, into memory of its own.
    fn read_record(&mut self, spot: Spot, at: u64, wish: Wish) {
        let bytes = record_pages(spot.frame_bytes as usize) as usize * PAGE_BYTES;
        let landing = Landing::new(LandingOwner::Pages(PageBuffer::new(bytes)));
        self.read(landing, at, bytes, wish);
    }

    fn read(&mut self, landing: Landing, at: u64, bytes: usize, wish: Wish) {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        if bytes > landing.len() {
            return self.got(Err(io::ErrorKind::InvalidInput.into()), None, wish);
        }
        let landing = Arc::new(landing);
        let piece = if self.in_ring < BUSY_OPS { PIECE_BYTES } else { LONG_PIECE_BYTES };
        let pieces: Vec<Range<usize>> =
            (0..bytes).step_by(piece).map(|start| start..(start + piece).min(bytes)).collect();
        self.next_id += 1;
        let number = self.next_id;
        let reading = Reading {
            landing: Arc::clone(&landing),
            left: pieces.len(),
            fault: None,
            arriving: Arriving::default(),
            wish,
        };
        self.reads.insert(number, reading);
        for range in pieces {
            let piece_at = at + range.start as u64;
            self.submit(Open::Piece(number), piece_at, Op::Read { landing: Arc::clone(&landing), range });
        }
    }

    pub(super) fn submit(&mut self, open: Open, at: u64, op: Op) {
        self.next_id += 1;
        self.open.insert(self.next_id, open);
        if self.in_ring < QUEUE_DEPTH {
            self.in_ring += 1;
            self.hand_over(self.next_id, at, op);
        } else {
            self.backlog.push_back((self.next_id, at, op));
        }
    }

    fn hand_over(&mut self, id: u64, at: u64, op: Op) {
        self.parts.tally.lock().began(kind(&op), self.parts.device.now());
        self.ring.start(id, at, op);
    }

    fn finish(&mut self, finished: Finished) {
        let Finished { id, op, result } = finished;
        let done = result.is_ok().then(|| op.wanted());
        self.parts.tally.lock().ended(kind(&op), done, self.parts.device.now());
        match self.backlog.pop_front() {
            Some((next, at, op)) => self.hand_over(next, at, op),
            None => self.in_ring -= 1,
        }
        match self.open.remove(&id) {
            Some(Open::Piece(number)) => {
                drop(op);
                self.piece_ended(number, result);
            }
            Some(Open::Chunk { jobs }) => {
                if let Op::Write(gather) = op {
                    self.pool.give_back(gather.into_chunk());
                }
                self.chunk_ended(&jobs, result);
            }
            Some(Open::Flush) => self.flush_ended(&result),
            None => {}
        }
    }

    fn piece_ended(&mut self, number: u64, result: io::Result<()>) {
        let Some(reading) = self.reads.get_mut(&number) else { return };
        reading.left -= 1;
        if let Err(cause) = result {
            reading.fault.get_or_insert(cause);
        }
        if reading.left > 0 {
            if let Wish::Block { .. } = reading.wish {
                // What is wrong is said when all is there.
                let _ = reading.arriving.advance(reading.landing.front());
            }
            return;
        }
        let Some(Reading { landing, fault, arriving, wish, .. }) = self.reads.remove(&number) else { return };
        let result = SsdFaults::apply(&self.parts.faults.read_errno, fault.map_or(Ok(()), Err));
        let owner = Arc::into_inner(landing).map(Landing::into_owner);
        self.got(result.map(|()| arriving), owner, wish);
    }

    fn got(&mut self, result: io::Result<Arriving>, owner: Option<LandingOwner>, wish: Wish) {
        match wish {
            Wish::Block { job, hash, generation } => {
                let identity = self.parts.identity.of_generation(generation);
                let checked = result.map_err(ReadFault::from).and_then(|arriving| match owner {
                    Some(LandingOwner::Slot(slot)) => finish(arriving, slot.freeze(), identity, hash),
                    _ => Err(ReadFault::Corrupt("nothing was read".to_owned())),
                });
                self.verified_bytes += checked.as_ref().map_or(0, Bytes::len);
                self.report(job, Outcome::Got(checked));
                if self.verified_bytes >= TOLD_BYTES {
                    self.tell();
                }
            }
            Wish::Rescue { job, from, to, to_at } => match self.checked_record(result, owner, from) {
                Ok((header, frame)) => {
                    self.writer.push(Put::record(job, to, to_at, header, frame, true));
                    self.write_on();
                }
                Err(fault) => self.report(job, Outcome::Moved(Err(MoveFault::Read(fault)))),
            },
            Wish::Check { job, spot } => {
                let checked = self.checked_record(result, owner, spot).map(|(_, frame)| frame);
                self.report(job, Outcome::Got(checked));
            }
        }
    }

    fn checked_record(
        &self,
        result: io::Result<Arriving>,
        owner: Option<LandingOwner>,
        spot: Spot,
    ) -> Result<(RecordHeader, Bytes), ReadFault> {
        result?;
        match owner {
            Some(LandingOwner::Pages(pages)) => check_record(pages, spot, self.parts.identity),
            _ => Err(ReadFault::Corrupt("nothing was read".to_owned())),
        }
    }

    /// What is on its way to the ring goes to the device now: there is work to do here before the next turn.
    pub(super) fn submit_now(&mut self) {
        self.ring.submit_now();
    }

    pub(super) fn report(&mut self, job: u64, outcome: Outcome) {
        self.untold.push(Report { lane: self.parts.lane, job, outcome });
    }

    /// Tells what ended, all at once: whoever waits is woken once for it, which costs about what checking 64 KiB does.
    fn tell(&mut self) {
        self.verified_bytes = 0;
        for report in self.untold.drain(..) {
            // The store is gone only while the process stops; nobody waits then.
            let _ = self.parts.reports.send(report);
        }
    }
}

fn kind(op: &Op) -> Kind {
    match op {
        Op::Read { .. } => Kind::Read,
        Op::Write(_) => Kind::Write,
        Op::Sync => Kind::Flush,
    }
}

/// Closes the mailbox when the thread ends, however it ends: nobody waits for one that is gone.
struct Closes(Arc<Mailbox<Job>>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A frame that was read: header, identity, hash, every slice checksum.
fn finish(
    arriving: Arriving,
    bytes: Bytes,
    identity: IdentityDigest,
    hash: BlockHash,
) -> Result<Bytes, ReadFault> {
    let frame = arriving.finish(bytes, identity, hash);
    frame.map(|frame| frame.bytes).map_err(|cause| ReadFault::Corrupt(cause.to_string()))
}

/// A record that was read whole: its trailer and its frame.
pub(super) fn check_record(
    pages: PageBuffer,
    spot: Spot,
    identity: IdentityDigest,
) -> Result<(RecordHeader, Bytes), ReadFault> {
    let trailer = pages.len().checked_sub(TRAILER_BYTES).and_then(|at| pages.get(at..)).unwrap_or_default();
    let header =
        RecordHeader::read(trailer, spot.place).map_err(|cause| ReadFault::Corrupt(cause.to_owned()))?;
    if header.traits.bytes != spot.frame_bytes {
        return Err(ReadFault::Corrupt("the record has another length".to_owned()));
    }
    let frame = Bytes::from_owner(pages).slice(..spot.frame_bytes as usize);
    let identity = identity.of_generation(header.generation);
    Ok((header, finish(Arriving::default(), frame, identity, header.hash)?))
}
