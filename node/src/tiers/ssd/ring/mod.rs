//! Reads, writes and flushes of one device: through io_uring with a registered file and registered
//! chunks, many operations per system call, or through plain system calls if io_uring is not
//! permitted. The ring owns an operation's memory until its completion is taken.
//!
//! Not here: the content of operations (`engine`).

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

use super::buffer::{ChunkPool, ReadBuffer};
use super::device::{BlockDevice, write_all};
use super::format::PAGE_BYTES;
use crate::arena::Arena;
pub(super) use op::{GatherWrite, RingOp, is_page_aligned};
use registered::RegisteredBuffers;

/// Marks the completion of the wake-up read.
const WAKE_READ: u64 = u64::MAX;

/// A sleeping thread is woken by this fraction of the operations in flight (one divided by it), or
/// by [`COMPLETIONS_MAX`] of them,
const COMPLETIONS_DIVISOR: usize = 4;
const COMPLETIONS_MAX: usize = 8;

/// or after this many microseconds by the first one: less than a device takes for one of many
/// operations,
const COMPLETIONS_WAIT_US: u32 = 50;

/// or, on a device that does not answer, after this time without any; then it sleeps again.
const WAIT_MAX: types::Timespec = types::Timespec::new().sec(60);

/// A completed operation, with its memory.
#[derive(Debug)]
pub(crate) struct CompletedOp {
    pub(crate) id: u64,
    pub(crate) op: RingOp,
    pub(crate) result: io::Result<()>,
}

/// The I/O backend.
pub(crate) enum Ring {
    Uring(Box<UringIo>),
    Plain(PlainIo),
}

impl Ring {
    /// A ring of `depth` operations, created on the thread that uses it. If the kernel refuses,
    /// logs it once and uses plain system calls.
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        bell: RawFd,
        pool: &ChunkPool,
        arena: Option<&Arena>,
        depth: u32,
        try_uring: bool,
    ) -> Ring {
        let fd = device.fd().filter(|_| try_uring);
        let made = fd.map(|fd| UringIo::new(fd, Arc::clone(&device), bell, pool, arena, depth));
        match made {
            Some(Ok(uring)) => Ring::Uring(Box::new(uring)),
            Some(Err(cause)) => {
                tracing::warn!(%cause, "io_uring is not permitted here; the SSD tier uses plain system calls");
                Ring::Plain(PlainIo { device, ended: VecDeque::new() })
            }
            None => Ring::Plain(PlainIo { device, ended: VecDeque::new() }),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Ring::Uring(_) => "io_uring",
            Ring::Plain(_) => "plain",
        }
    }

    /// Starts an operation. At most the ring's depth may be open.
    pub(crate) fn start(&mut self, id: u64, at: u64, op: RingOp) {
        match self {
            Ring::Uring(uring) => uring.start(id, at, op),
            Ring::Plain(plain) => plain.start(id, at, op),
        }
    }

    /// Submits started operations without waiting.
    pub(crate) fn submit_now(&mut self) {
        if let Ring::Uring(uring) = self {
            uring.submit_now();
        }
    }

    /// Submits started operations and takes completions. With `nap`, waits for a completion or a
    /// wake-up; if only a wake-up can come, `nap` waits for it.
    pub(crate) fn submit_and_reap(&mut self, nap: Option<&dyn Fn()>, ended: &mut Vec<CompletedOp>) {
        match self {
            Ring::Uring(uring) => uring.submit_and_reap(nap.is_some(), ended),
            Ring::Plain(plain) => plain.submit_and_reap(nap, ended),
        }
    }
}

/// System calls, complete when they return.
pub(crate) struct PlainIo {
    device: Arc<dyn BlockDevice>,
    ended: VecDeque<CompletedOp>,
}

impl PlainIo {
    fn start(&mut self, id: u64, at: u64, mut op: RingOp) {
        let result = match &mut op {
            RingOp::Read { landing, range } => self.read(landing, range, at),
            RingOp::Write(gather) => self.write(gather, at),
            RingOp::Sync => self.device.sync(),
        };
        if result.is_ok() {
            op.mark_done();
        }
        self.ended.push_back(CompletedOp { id, op, result });
    }

    fn read(&self, landing: &ReadBuffer, range: &Range<usize>, at: u64) -> io::Result<()> {
        let start = landing.piece_start(range);
        // SAFETY: `piece_start` checked that the range is inside. The engine gives each range of a
        // buffer to one operation, and reads it only after all have ended.
        let into = unsafe { std::slice::from_raw_parts_mut(start, range.len()) };
        super::device::read_all(&*self.device, into, at)
    }

    fn write(&self, gather: &GatherWrite, mut at: u64) -> io::Result<()> {
        for part in gather.parts() {
            write_all(&*self.device, part, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn submit_and_reap(&mut self, nap: Option<&dyn Fn()>, ended: &mut Vec<CompletedOp>) {
        if self.ended.is_empty() {
            if let Some(nap) = nap {
                nap();
            }
            return;
        }
        let next = self.device.next_reported(self.ended.len()).min(self.ended.len() - 1);
        ended.extend(self.ended.remove(next));
    }
}

/// An operation in the kernel.
struct PendingOp {
    id: u64,
    op: RingOp,
    at: u64,
    /// Bytes done by earlier submissions.
    done: usize,
    /// The remaining parts of a gather write, for the kernel.
    vectors: Vec<libc::iovec>,
}

pub(crate) struct UringIo {
    ring: IoUring,
    /// Keeps memory alive while the kernel may access it; the index is the operation's mark.
    pending: Vec<Option<PendingOp>>,
    free: Vec<usize>,
    open: usize,
    wake_fd: RawFd,
    wake_count: Box<[u8; 8]>,
    is_wake_armed: bool,
    /// Whether the kernel can wait for several completions with a timeout (Linux 6.12).
    waits_for_several: bool,
    /// Dropped after the ring, like the file.
    registered: RegisteredBuffers,
    _device: Arc<dyn BlockDevice>,
}

impl UringIo {
    fn new(
        fd: RawFd,
        device: Arc<dyn BlockDevice>,
        bell: RawFd,
        pool: &ChunkPool,
        arena: Option<&Arena>,
        depth: u32,
    ) -> io::Result<UringIo> {
        let entries = (depth + 1).next_power_of_two();
        // Completions are delivered only when this thread asks, which avoids interrupts; older
        // kernels lack this.
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(entries)
            .or_else(|_| IoUring::new(entries))?;
        let waits_for_several = ring.params().is_feature_min_timeout();
        ring.submitter().register_files(&[fd])?;
        let registered = RegisteredBuffers::new(&ring, pool, arena);
        Ok(UringIo {
            ring,
            pending: Vec::new(),
            free: Vec::new(),
            open: 0,
            wake_fd: bell,
            wake_count: Box::default(),
            is_wake_armed: false,
            waits_for_several,
            registered,
            _device: device,
        })
    }

    fn start(&mut self, id: u64, at: u64, op: RingOp) {
        let mark = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len() - 1
        });
        self.open += 1;
        self.push(mark, PendingOp { id, op, at, done: 0, vectors: Vec::new() });
    }

    /// Submits an operation, or its remaining part.
    fn push(&mut self, mark: usize, mut pending: PendingOp) {
        let (fd, at) = (types::Fixed(0), pending.at + pending.done as u64);
        let entry = match &pending.op {
            RingOp::Read { landing, range } => {
                let rest = range.start + pending.done..range.end;
                let (start, bytes) = (landing.piece_start(&rest), length(rest.len()));
                match self.registered.buffer_index(start, rest.len()) {
                    Some(number) => opcode::ReadFixed::new(fd, start, bytes, number).offset(at).build(),
                    None => opcode::Read::new(fd, start, bytes).offset(at).build(),
                }
            }
            RingOp::Write(gather) if gather.is_copied() && self.registered.has_chunks => {
                let chunk = gather.chunk();
                let (start, rest) =
                    (chunk.start().wrapping_add(pending.done), length(gather.bytes() - pending.done));
                opcode::WriteFixed::new(fd, start, rest, chunk.number()).offset(at).build()
            }
            RingOp::Write(gather) => {
                pending.vectors.clear();
                pending.vectors.extend(vectors(gather, pending.done));
                match pending.vectors[..] {
                    [one] => match self.registered.buffer_index(one.iov_base.cast(), one.iov_len) {
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
            RingOp::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.pending[mark] = Some(pending);
        self.submit(&entry.user_data(mark as u64));
    }

    fn submit(&mut self, entry: &squeue::Entry) {
        // SAFETY: buffer, chunk, shared bytes, vectors and file stay in `pending`, and `wake_count`
        // in self, until the completion with this mark is taken; `Drop` below waits for all of
        // them.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            if let Err(cause) = self.ring.submit() {
                tracing::error!(%cause, "io_uring does not accept submissions");
                std::thread::yield_now();
            }
        }
    }

    fn arm_wake(&mut self) {
        if !self.is_wake_armed {
            let start = self.wake_count.as_mut_ptr();
            self.submit(&opcode::Read::new(types::Fd(self.wake_fd), start, 8).build().user_data(WAKE_READ));
            self.is_wake_armed = true;
        }
    }

    fn submit_now(&mut self) {
        log_submit_error(self.ring.submit());
    }

    fn submit_and_reap(&mut self, sleep: bool, ended: &mut Vec<CompletedOp>) {
        if sleep {
            self.arm_wake();
        }
        // One wake-up for several completions at a high rate.
        let want = if self.waits_for_several {
            (self.open / COMPLETIONS_DIVISOR).clamp(1, COMPLETIONS_MAX)
        } else {
            1
        };
        log_submit_error(match sleep {
            true if want > 1 => {
                // Without a timeout of its own the wait would end after the first microseconds
                // without a completion.
                let args = SubmitArgs::new().min_wait_usec(COMPLETIONS_WAIT_US).timespec(&WAIT_MAX);
                self.ring.submitter().submit_with_args(want, &args)
            }
            _ => self.ring.submit_and_wait(usize::from(sleep)),
        });
        self.reap(ended);
    }

    fn reap(&mut self, ended: &mut Vec<CompletedOp>) {
        while let Some((mark, code)) = self.next_completion() {
            if mark == WAKE_READ {
                self.is_wake_armed = false;
            } else {
                ended.extend(self.complete(mark as usize, code));
            }
        }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// Completes an operation; a short one is resubmitted.
    fn complete(&mut self, mark: usize, code: i32) -> Option<CompletedOp> {
        let mut pending = self.pending.get_mut(mark)?.take()?;
        let wanted = pending.op.bytes();
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
            pending.op.mark_done();
        }
        self.free.push(mark);
        self.open -= 1;
        Some(CompletedOp { id: pending.id, op: pending.op, result })
    }
}

impl Drop for UringIo {
    fn drop(&mut self) {
        let mut ended = Vec::new();
        while self.open > 0 {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            self.reap(&mut ended);
        }
        // The wake-up read may still be open. The kernel ends it with the ring at an unknown time,
        // so its memory is leaked.
        if self.is_wake_armed {
            std::mem::forget(std::mem::take(&mut self.wake_count));
        }
    }
}

/// Logs a submission error, unless the loop simply tries again.
fn log_submit_error(result: io::Result<usize>) {
    if let Err(cause) = result
        && !matches!(cause.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy)
        && cause.raw_os_error() != Some(rustix::io::Errno::TIME.raw_os_error())
    {
        tracing::error!(%cause, "io_uring wait failed");
    }
}

/// Memory of a write, from its byte `done` on. The kernel only reads it.
fn vectors(gather: &GatherWrite, done: usize) -> impl Iterator<Item = libc::iovec> {
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
    use super::super::buffer::{PageBuffer, ReadBufferOwner};
    use super::super::device::FileDevice;
    use super::super::mailbox::Mailbox;
    use super::*;
    use crate::arena::{ArenaShape, Purpose};

    fn wait_completions(ring: &mut Ring, count: usize) -> Vec<CompletedOp> {
        let mut ended = Vec::new();
        while ended.len() < count {
            ring.submit_and_reap(Some(&|| panic!("no operation is open")), &mut ended);
        }
        ended
    }

    fn read(ring: &mut Ring, id: u64, page: u64) -> (Vec<u8>, io::Result<()>) {
        let landing = Arc::new(ReadBuffer::new(ReadBufferOwner::Pages(PageBuffer::new(PAGE_BYTES))));
        ring.start(id, page * 4096, RingOp::Read { landing: Arc::clone(&landing), range: 0..PAGE_BYTES });
        let finished = wait_completions(ring, 1).pop().unwrap();
        drop(finished.op);
        let ReadBufferOwner::Pages(pages) = Arc::into_inner(landing).unwrap().into_owner() else { panic!() };
        (pages.to_vec(), finished.result)
    }

    fn round_trip(wish_uring: bool) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = Arc::new(FileDevice::open(file.path(), false).unwrap());
        let (bell, mut pool) = (Mailbox::<()>::new().unwrap(), ChunkPool::new(10, 4 * PAGE_BYTES));
        let arena = Arena::new(ArenaShape::equal(PAGE_BYTES, 4, 0)).unwrap();
        let mut ring = Ring::new(device, bell.wake_fd(), &pool, Some(&arena), 16, wish_uring);
        if wish_uring && ring.name() != "io_uring" {
            println!("SKIPPED io_uring: the kernel refuses it here; only plain calls were tested");
        }
        for page in 0..8u8 {
            let mut gather = GatherWrite::new(pool.take().unwrap());
            gather.append_copy(PAGE_BYTES).fill(page);
            ring.start(u64::from(page), u64::from(page) * 4096, RingOp::Write(gather));
        }
        assert!(wait_completions(&mut ring, 8).iter().all(|finished| finished.result.is_ok()));
        ring.start(104, 8 * 4096, RingOp::Write(mixed(pool.take().unwrap())));
        ring.start(105, 12 * 4096, RingOp::Write(shared_only(pool.take().unwrap())));
        assert!(wait_completions(&mut ring, 2).iter().all(|finished| finished.result.is_ok()));
        for page in 8..13 {
            assert!(read(&mut ring, page, page).0.iter().all(|byte| u64::from(*byte) == page), "page {page}");
        }
        ring.start(100, 0, RingOp::Sync);
        assert!(wait_completions(&mut ring, 1)[0].result.is_ok());
        let (bytes, result) = read(&mut ring, 101, 3);
        assert!(result.is_ok() && bytes.iter().all(|byte| *byte == 3));
        let slot = arena.take(PAGE_BYTES, Purpose::Load).unwrap();
        let landing = Arc::new(ReadBuffer::new(ReadBufferOwner::Slot(slot)));
        ring.start(103, 5 * 4096, RingOp::Read { landing: Arc::clone(&landing), range: 0..PAGE_BYTES });
        assert!(wait_completions(&mut ring, 1).pop().unwrap().result.is_ok());
        assert!(
            landing.filled_prefix().len() == PAGE_BYTES
                && landing.filled_prefix().iter().all(|byte| *byte == 5)
        );
        assert!(read(&mut ring, 102, 13).1.is_err(), "read past the end must fail");
    }

    fn page(fill: u8) -> bytes::Bytes {
        let mut page = PageBuffer::new(PAGE_BYTES);
        page.fill(fill);
        bytes::Bytes::from_owner(page)
    }

    /// Pages 8 to 11: shared, copied twice, shared.
    fn mixed(chunk: super::super::buffer::Chunk) -> GatherWrite {
        let mut gather = GatherWrite::new(chunk);
        gather.append_shared(page(8));
        gather.append_copy(PAGE_BYTES).fill(9);
        gather.append_copy(PAGE_BYTES).fill(10);
        gather.append_shared(page(11));
        gather
    }

    fn shared_only(chunk: super::super::buffer::Chunk) -> GatherWrite {
        let mut gather = GatherWrite::new(chunk);
        gather.append_shared(page(12));
        gather
    }

    #[test]
    fn short_gather_write_resumes_where_it_stopped() {
        let mut pool = ChunkPool::new(1, 4 * PAGE_BYTES);
        let gather = mixed(pool.take().unwrap());
        assert_eq!((gather.bytes(), gather.free_bytes()), (4 * PAGE_BYTES, 0));
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
    fn both_backends_behave_alike() {
        round_trip(true);
        round_trip(false);
    }
}
