//! Reads, writes and flushes of one device: through io_uring with a registered file and registered chunks,
//! many operations a system call, or with plain calls where that is not permitted. The memory of an
//! operation belongs to the ring until its end is taken.
//!
//! Not here: what is read or written (`engine`).

#![allow(unsafe_code)]

mod op;
mod registered;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::types::SubmitArgs;
use io_uring::{IoUring, opcode, squeue, types};

use super::buffer::{Landing, Pool};
use super::device::{Device, write_all};
use super::format::PAGE_BYTES;
use crate::arena::Arena;
pub(super) use op::{Gather, Op, is_at_a_page};
use registered::Registered;

/// Marks the end of the read of the bell.
const BELL: u64 = u64::MAX;

/// A thread that sleeps is woken by one in so many of the operations in flight, or by [`ENDS_MAX`] of them,
const ENDS_PART: usize = 4;
const ENDS_MAX: usize = 8;

/// or after so many microseconds by the first: less than a device takes for one of many operations.
const ENDS_WAIT_US: u32 = 50;

/// or, on a device that does not answer, after so long for nothing; then it sleeps again.
const WAIT_MAX: types::Timespec = types::Timespec::new().sec(60);

/// An operation that ended, with its memory.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) id: u64,
    pub(crate) op: Op,
    pub(crate) result: io::Result<()>,
}

/// Where operations run.
pub(crate) enum Ring {
    Uring(Box<Uring>),
    Plain(Plain),
}

impl Ring {
    /// A ring of `depth` operations, made on the thread that uses it; plain calls, said once in the log, when
    /// the kernel refuses.
    pub(crate) fn new(
        device: Arc<dyn Device>,
        bell: RawFd,
        pool: &Pool,
        arena: Option<&Arena>,
        depth: u32,
        wish_uring: bool,
    ) -> Ring {
        let fd = device.fd().filter(|_| wish_uring);
        let made = fd.map(|fd| Uring::new(fd, Arc::clone(&device), bell, (pool, arena), depth));
        match made {
            Some(Ok(uring)) => Ring::Uring(Box::new(uring)),
            Some(Err(cause)) => {
                tracing::warn!(%cause, "io_uring is not permitted here; the SSD tier uses plain reads and writes");
                Ring::Plain(Plain { device, ended: VecDeque::new() })
            }
            None => Ring::Plain(Plain { device, ended: VecDeque::new() }),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Ring::Uring(_) => "io_uring",
            Ring::Plain(_) => "plain",
        }
    }

    /// Starts an operation. At most the ring's depth may be open.
    pub(crate) fn start(&mut self, id: u64, at: u64, op: Op) {
        match self {
            Ring::Uring(uring) => uring.start(id, at, op),
            Ring::Plain(plain) => plain.start(id, at, op),
        }
    }

    /// Hands over what was started, without waiting for anything.
    pub(crate) fn submit_now(&mut self) {
        if let Ring::Uring(uring) = self {
            uring.submit_now();
        }
    }

    /// Hands over what was started and takes what ended. With `nap`, it waits until something ended or the
    /// bell rang; where only the bell can wake, `nap` waits for it.
    pub(crate) fn turn(&mut self, nap: Option<&dyn Fn()>, ended: &mut Vec<Finished>) {
        match self {
            Ring::Uring(uring) => uring.turn(nap.is_some(), ended),
            Ring::Plain(plain) => plain.turn(nap, ended),
        }
    }
}

/// Calls that have ended when they return.
pub(crate) struct Plain {
    device: Arc<dyn Device>,
    ended: VecDeque<Finished>,
}

impl Plain {
    fn start(&mut self, id: u64, at: u64, mut op: Op) {
        let result = match &mut op {
            Op::Read { landing, range } => self.read(landing, range, at),
            Op::Write(gather) => self.write(gather, at),
            Op::Sync => self.device.sync(),
        };
        if result.is_ok() {
            op.has_ended();
        }
        self.ended.push_back(Finished { id, op, result });
    }

    fn read(&self, landing: &Landing, range: &Range<usize>, at: u64) -> io::Result<()> {
        let start = landing.piece(range);
        // SAFETY: `piece` checked that the range is inside; the engine gives each range of a landing to one
        // operation, and reads it only after all have ended.
        let into = unsafe { std::slice::from_raw_parts_mut(start, range.len()) };
        super::device::read_all(&*self.device, into, at)
    }

    fn write(&self, gather: &Gather, mut at: u64) -> io::Result<()> {
        for part in gather.parts() {
            write_all(&*self.device, part, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn turn(&mut self, nap: Option<&dyn Fn()>, ended: &mut Vec<Finished>) {
        if self.ended.is_empty() {
            if let Some(nap) = nap {
                nap();
            }
            return;
        }
        let next = self.device.next_told(self.ended.len()).min(self.ended.len() - 1);
        ended.extend(self.ended.remove(next));
    }
}

/// What the kernel is doing.
struct Pending {
    id: u64,
    op: Op,
    at: u64,
    /// Bytes of it that were done in earlier parts.
    done: usize,
    /// What is left of a write in several places, for the kernel.
    vectors: Vec<libc::iovec>,
}

pub(crate) struct Uring {
    ring: IoUring,
    /// Keeps memory alive while the kernel may touch it; the position is the operation's mark.
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    open: usize,
    bell: RawFd,
    bell_count: Box<[u8; 8]>,
    bell_armed: bool,
    /// Whether the kernel can wait for more than one end, up to a time (Linux 6.12).
    waits_for_several: bool,
    /// Dropped after the ring, as the file is.
    registered: Registered,
    _device: Arc<dyn Device>,
}

impl Uring {
    fn new(
        fd: RawFd,
        device: Arc<dyn Device>,
        bell: RawFd,
        (pool, arena): (&Pool, Option<&Arena>),
        depth: u32,
    ) -> io::Result<Uring> {
        let entries = (depth + 1).next_power_of_two();
        // Ends are told when this thread asks, which spares interrupts; older kernels cannot.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(entries)
            .or_else(|_| IoUring::new(entries))?;
        let waits_for_several = ring.params().is_feature_min_timeout();
        ring.submitter().register_files(&[fd])?;
        let registered = Registered::new(&ring, pool, arena);
        Ok(Uring {
            ring,
            pending: Vec::new(),
            free: Vec::new(),
            open: 0,
            bell,
            bell_count: Box::default(),
            bell_armed: false,
            waits_for_several,
            registered,
            _device: device,
        })
    }

    fn start(&mut self, id: u64, at: u64, op: Op) {
        let mark = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        self.open += 1;
        self.push(mark, Pending { id, op, at, done: 0, vectors: Vec::new() });
    }

    /// Hands an operation, or what is left of it, to the ring.
    fn push(&mut self, mark: usize, mut pending: Pending) {
        let (fd, at) = (types::Fixed(0), pending.at + pending.done as u64);
        let entry = match &pending.op {
            Op::Read { landing, range } => {
                let rest = range.start + pending.done..range.end;
                let (start, bytes) = (landing.piece(&rest), length(rest.len()));
                match self.registered.number(start, rest.len()) {
                    Some(number) => opcode::ReadFixed::new(fd, start, bytes, number).offset(at).build(),
                    None => opcode::Read::new(fd, start, bytes).offset(at).build(),
                }
            }
            Op::Write(gather) if gather.is_copied() && self.registered.has_chunks => {
                let chunk = gather.chunk();
                let (start, rest) =
                    (chunk.start().wrapping_add(pending.done), length(gather.bytes() - pending.done));
                opcode::WriteFixed::new(fd, start, rest, chunk.number()).offset(at).build()
            }
            Op::Write(gather) => {
                pending.vectors.clear();
                pending.vectors.extend(vectors(gather, pending.done));
                match pending.vectors[..] {
                    [one] => match self.registered.number(one.iov_base.cast(), one.iov_len) {
                        Some(number) => {
                            let (start, bytes) = (one.iov_base.cast(), length(one.iov_len));
                            opcode::WriteFixed::new(fd, start, bytes, number).offset(at).build()
                        }
                        None => {
                            let (start, bytes) = (one.iov_base.cast(), length(one.iov_len));
                            opcode::Write::new(fd, start, bytes).offset(at).build()
                        }
                    },
                    ref many => opcode::Writev::new(fd, many.as_ptr(), length(many.len())).offset(at).build(),
                }
            }
            Op::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.pending[mark] = Some(pending);
        self.submit(&entry.user_data(mark as u64));
    }

    fn submit(&mut self, entry: &squeue::Entry) {
        // SAFETY: landing, chunk, shared bytes, vectors and file stay in `pending`, `bell_count` in self, until the end with this
        // mark is taken; `Drop` below waits for all of them.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            if let Err(cause) = self.ring.submit() {
                tracing::error!(%cause, "io_uring does not take submissions");
                std::thread::yield_now();
            }
        }
    }

    fn arm_bell(&mut self) {
        if !self.bell_armed {
            let start = self.bell_count.as_mut_ptr();
            self.submit(&opcode::Read::new(types::Fd(self.bell), start, 8).build().user_data(BELL));
            self.bell_armed = true;
        }
    }

    fn submit_now(&mut self) {
        said(self.ring.submit());
    }

    fn turn(&mut self, sleep: bool, ended: &mut Vec<Finished>) {
        if sleep {
            self.arm_bell();
        }
        // One wakeup for several ends, where they come thick and fast.
        let want = if self.waits_for_several { (self.open / ENDS_PART).clamp(1, ENDS_MAX) } else { 1 };
        said(match sleep {
            true if want > 1 => {
                // Without an end of its own the wait would be over after the first microseconds, with nothing to show.
                let args = SubmitArgs::new().min_wait_usec(ENDS_WAIT_US).timespec(&WAIT_MAX);
                self.ring.submitter().submit_with_args(want, &args)
            }
            _ => self.ring.submit_and_wait(usize::from(sleep)),
        });
        self.reap(ended);
    }

    fn reap(&mut self, ended: &mut Vec<Finished>) {
        while let Some((mark, code)) = self.next_end() {
            if mark == BELL {
                self.bell_armed = false;
            } else {
                ended.extend(self.take(mark as usize, code));
            }
        }
    }

    fn next_end(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// The end of an operation; one that was cut short goes on.
    fn take(&mut self, mark: usize, code: i32) -> Option<Finished> {
        let mut pending = self.pending.get_mut(mark)?.take()?;
        let wanted = pending.op.wanted();
        let result = match usize::try_from(code) {
            Err(_) => Err(io::Error::from_raw_os_error(-code)),
            Ok(got) if pending.done + got >= wanted => Ok(()),
            Ok(got) if got < PAGE_BYTES => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => {
                pending.done += got - got % PAGE_BYTES;
                self.push(mark, pending);
                return None;
            }
        };
        if result.is_ok() {
            pending.op.has_ended();
        }
        self.free.push(mark);
        self.open -= 1;
        Some(Finished { id: pending.id, op: pending.op, result })
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.open > 0 {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            self.reap(&mut ended);
        }
        // The read of the bell may still be open: the kernel ends it with the ring, but at its own time, so
        // its memory is left to it.
        if self.bell_armed {
            std::mem::forget(std::mem::take(&mut self.bell_count));
        }
    }
}

/// Logs what a submission said, unless it means only that the loop goes round once more.
fn said(result: io::Result<usize>) {
    if let Err(cause) = result
        && !matches!(cause.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy)
        && cause.raw_os_error() != Some(rustix::io::Errno::TIME.raw_os_error())
    {
        tracing::error!(%cause, "io_uring wait failed");
    }
}

/// Where the bytes of a write lie, from its byte `done` on. The kernel only reads them.
fn vectors(gather: &Gather, done: usize) -> impl Iterator<Item = libc::iovec> {
    let mut skip = done;
    gather.parts().filter_map(move |part| {
        let from = skip.min(part.len());
        skip -= from;
        let rest = &part[from..];
        let iov_base = rest.as_ptr().cast_mut().cast();
        (!rest.is_empty()).then_some(libc::iovec { iov_base, iov_len: rest.len() })
    })
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("pieces and chunks are far below 4 GiB")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::buffer::{LandingOwner, PageBuffer};
    use super::super::device::FileDevice;
    use super::super::mailbox::Mailbox;
    use super::*;
    use crate::arena::{ArenaShape, Purpose};

    fn ends(ring: &mut Ring, count: usize) -> Vec<Finished> {
        let mut ended = Vec::new();
        while ended.len() < count {
            ring.turn(Some(&|| panic!("nothing is open")), &mut ended);
        }
        ended
    }

    fn read(ring: &mut Ring, id: u64, page: u64) -> (Vec<u8>, io::Result<()>) {
        let landing = Arc::new(Landing::new(LandingOwner::Pages(PageBuffer::new(PAGE_BYTES))));
        ring.start(id, page * 4096, Op::Read { landing: Arc::clone(&landing), range: 0..PAGE_BYTES });
        let finished = ends(ring, 1).pop().unwrap();
        drop(finished.op);
        let LandingOwner::Pages(pages) = Arc::into_inner(landing).unwrap().into_owner() else { panic!() };
        (pages.to_vec(), finished.result)
    }

    fn round_trip(wish_uring: bool) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = Arc::new(FileDevice::open(file.path(), false).unwrap());
        let (bell, mut pool) = (Mailbox::<()>::new().unwrap(), Pool::new(10, 4 * PAGE_BYTES));
        let arena = Arena::new(ArenaShape::equal(PAGE_BYTES, 4, 0)).unwrap();
        let mut ring = Ring::new(device, bell.bell(), &pool, Some(&arena), 16, wish_uring);
        if wish_uring && ring.name() != "io_uring" {
            println!("SKIPPED io_uring: the kernel refuses it here; only plain calls were tested");
        }
        for page in 0..8u8 {
            let mut gather = Gather::new(pool.take().unwrap());
            gather.copy(PAGE_BYTES).fill(page);
            ring.start(u64::from(page), u64::from(page) * 4096, Op::Write(gather));
        }
        assert!(ends(&mut ring, 8).iter().all(|finished| finished.result.is_ok()));
        ring.start(104, 8 * 4096, Op::Write(mixed(pool.take().unwrap())));
        ring.start(105, 12 * 4096, Op::Write(shared_only(pool.take().unwrap())));
        assert!(ends(&mut ring, 2).iter().all(|finished| finished.result.is_ok()));
        for page in 8..13 {
            assert!(read(&mut ring, page, page).0.iter().all(|byte| u64::from(*byte) == page), "page {page}");
        }
        ring.start(100, 0, Op::Sync);
        assert!(ends(&mut ring, 1)[0].result.is_ok());
        let (bytes, result) = read(&mut ring, 101, 3);
        assert!(result.is_ok() && bytes.iter().all(|byte| *byte == 3));
        let slot = arena.take(PAGE_BYTES, Purpose::Load).unwrap();
        let landing = Arc::new(Landing::new(LandingOwner::Slot(slot)));
        ring.start(103, 5 * 4096, Op::Read { landing: Arc::clone(&landing), range: 0..PAGE_BYTES });
        assert!(ends(&mut ring, 1).pop().unwrap().result.is_ok());
        assert!(landing.front().len() == PAGE_BYTES && landing.front().iter().all(|byte| *byte == 5));
        assert!(read(&mut ring, 102, 13).1.is_err(), "read past the end must fail");
    }

    fn page(fill: u8) -> bytes::Bytes {
        let mut page = PageBuffer::new(PAGE_BYTES);
        page.fill(fill);
        bytes::Bytes::from_owner(page)
    }

    /// Pages 8 to 11: shared, copied twice, shared.
    fn mixed(chunk: super::super::buffer::Chunk) -> Gather {
        let mut gather = Gather::new(chunk);
        gather.share(page(8));
        gather.copy(PAGE_BYTES).fill(9);
        gather.copy(PAGE_BYTES).fill(10);
        gather.share(page(11));
        gather
    }

    fn shared_only(chunk: super::super::buffer::Chunk) -> Gather {
        let mut gather = Gather::new(chunk);
        gather.share(page(12));
        gather
    }

    #[test]
    fn a_write_in_several_places_goes_on_where_it_was_cut_short() {
        let mut pool = Pool::new(1, 4 * PAGE_BYTES);
        let gather = mixed(pool.take().unwrap());
        assert_eq!((gather.bytes(), gather.room()), (4 * PAGE_BYTES, 0));
        let starts: Vec<usize> = gather.parts().map(|part| part.as_ptr().addr()).collect();
        let rest = |done: usize| -> Vec<(usize, usize)> {
            vectors(&gather, done * PAGE_BYTES).map(|one| (one.iov_base.addr(), one.iov_len)).collect()
        };
        let page = PAGE_BYTES;
        assert_eq!(rest(0), [(starts[0], page), (starts[1], 2 * page), (starts[2], page)]);
        assert_eq!(rest(1), [(starts[1], 2 * page), (starts[2], page)]);
        assert_eq!(rest(2), [(starts[1] + page, page), (starts[2], page)]);
        assert_eq!(rest(3), [(starts[2], page)]);
        assert!(rest(4).is_empty());
    }

    #[test]
    fn both_backends_do_the_same() {
        round_trip(true);
        round_trip(false);
    }
}
