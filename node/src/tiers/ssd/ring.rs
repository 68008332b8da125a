//! Reads, writes and flushes on open files: through io_uring, or with plain calls where that is not
//! permitted. The bytes of one operation belong to the ring until its completion is taken.
//!
//! Not here: what is read or written (`engine`).

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use io_uring::{IoUring, opcode, types};

use super::buffer::PageBuffer;

/// One operation. Buffers are whole pages and offsets page-aligned, as direct I/O wants.
#[derive(Debug)]
pub(crate) enum Op {
    Read {
        buffer: PageBuffer,
    },
    Write {
        buffer: PageBuffer,
    },
    /// Flushes the file's data.
    Sync,
}

/// A finished operation with its buffer.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) id: u64,
    pub(crate) op: Op,
    pub(crate) result: io::Result<()>,
}

/// Where operations run.
pub(crate) enum Ring {
    Uring(Box<Uring>),
    Plain(VecDeque<Finished>),
}

impl Ring {
    /// A ring of `depth` entries; plain calls, said once in the log, when the kernel refuses.
    pub(crate) fn new(depth: u32, wish_uring: bool) -> Ring {
        if !wish_uring {
            return Ring::Plain(VecDeque::new());
        }
        match IoUring::new(depth.next_power_of_two()) {
            Ok(ring) => Ring::Uring(Box::new(Uring { ring, pending: HashMap::new() })),
            Err(cause) => {
                tracing::warn!(%cause, "io_uring is not permitted here; the SSD tier uses plain reads and writes");
                Ring::Plain(VecDeque::new())
            }
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Ring::Uring(_) => "io_uring",
            Ring::Plain(_) => "plain",
        }
    }

    /// Starts an operation. At most the ring's depth may be open.
    pub(crate) fn start(&mut self, id: u64, file: &Arc<File>, offset: u64, op: Op) {
        match self {
            Ring::Uring(uring) => uring.start(id, file, offset, op),
            Ring::Plain(done) => done.push_back(run_plain(id, file, offset, op)),
        }
    }

    /// Waits for at least one completion and takes all there are. Empty when none is open.
    pub(crate) fn wait(&mut self) -> Vec<Finished> {
        match self {
            Ring::Uring(uring) => uring.wait(),
            Ring::Plain(done) => done.drain(..).collect(),
        }
    }
}

fn run_plain(id: u64, file: &File, offset: u64, mut op: Op) -> Finished {
    let result = match &mut op {
        Op::Read { buffer } => file.read_exact_at(buffer, offset),
        Op::Write { buffer } => file.write_all_at(buffer, offset),
        Op::Sync => file.sync_data(),
    };
    Finished { id, op, result }
}

pub(crate) struct Uring {
    ring: IoUring,
    /// Keeps buffer and file alive while the kernel may touch them.
    pending: HashMap<u64, (Op, Arc<File>)>,
}

impl Uring {
    fn start(&mut self, id: u64, file: &Arc<File>, offset: u64, mut op: Op) {
        let fd = types::Fd(file.as_raw_fd());
        let entry = match &mut op {
            Op::Read { buffer } => {
                opcode::Read::new(fd, buffer.as_mut_ptr(), length(buffer)).offset(offset).build()
            }
            Op::Write { buffer } => {
                opcode::Write::new(fd, buffer.as_ptr(), length(buffer)).offset(offset).build()
            }
            Op::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.pending.insert(id, (op, Arc::clone(file)));
        // SAFETY: the buffer's heap memory and the open file stay in `pending` until the completion with
        // this id is taken; `Drop` below waits for all of them.
        while unsafe { self.ring.submission().push(&entry.clone().user_data(id)) }.is_err() {
            if let Err(cause) = self.ring.submit() {
                tracing::error!(%cause, "io_uring does not take submissions");
                std::thread::yield_now();
            }
        }
    }

    fn wait(&mut self) -> Vec<Finished> {
        if self.pending.is_empty() {
            return Vec::new();
        }
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(cause)
                if matches!(cause.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ResourceBusy) => {}
            Err(cause) => tracing::error!(%cause, "io_uring wait failed"),
        }
        let completions: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        completions.into_iter().filter_map(|(id, code)| self.take(id, code)).collect()
    }

    fn take(&mut self, id: u64, code: i32) -> Option<Finished> {
        let (op, _file) = self.pending.remove(&id)?;
        let wanted = match &op {
            Op::Read { buffer } | Op::Write { buffer } => buffer.len(),
            Op::Sync => 0,
        };
        let result = match usize::try_from(code) {
            Err(_) => Err(io::Error::from_raw_os_error(-code)),
            Ok(got) if got < wanted => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(()),
        };
        Some(Finished { id, op, result })
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        while !self.pending.is_empty() {
            self.wait();
        }
    }
}

fn length(buffer: &PageBuffer) -> u32 {
    u32::try_from(buffer.len()).expect("a slot is far below 4 GiB: frames are bounded by FRAME_BYTES_MAX")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn round_trip(mut ring: Ring) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        for page in 0..8u8 {
            let mut buffer = PageBuffer::new(4096);
            buffer.fill(page);
            ring.start(u64::from(page), &file, u64::from(page) * 4096, Op::Write { buffer });
        }
        let mut done = 0;
        while done < 8 {
            done += ring.wait().iter().inspect(|finished| assert!(finished.result.is_ok())).count();
        }
        ring.start(100, &file, 0, Op::Sync);
        assert!(ring.wait()[0].result.is_ok());
        ring.start(101, &file, 3 * 4096, Op::Read { buffer: PageBuffer::new(4096) });
        let finished = ring.wait().pop().unwrap();
        let Op::Read { buffer } = finished.op else { panic!("not a read") };
        assert!(buffer.iter().all(|byte| *byte == 3));
        ring.start(102, &file, 8 * 4096, Op::Read { buffer: PageBuffer::new(4096) });
        assert!(ring.wait().pop().unwrap().result.is_err(), "read past the end must fail");
        assert!(ring.wait().is_empty());
    }

    #[test]
    fn both_backends_do_the_same() {
        let uring = Ring::new(16, true);
        if uring.name() != "io_uring" {
            println!("SKIPPED io_uring: the kernel refuses it here; only plain calls were tested");
        }
        round_trip(uring);
        round_trip(Ring::new(16, false));
    }
}
