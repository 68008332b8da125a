//! The account of the write buffer: what asynchronous saving may leave behind when a job ends.
//!
//! Slices are written out in the order in which they were computed, first of all those of earlier jobs, while
//! compute goes on. What is not out when its job ends moves from the engine's own memory into the write buffer,
//! so that the next job may use that memory at once. It never waits unless the buffer is full: then
//! [`JobEnd::Full`] names how many bytes must be out first. Who does not want to wait gives them up, whole
//! blocks from the tail on ([`WriteBuffer::give_up`]): a block that was not saved costs a recompute later, a
//! job that waits costs everyone behind it now.
//!
//! Not here: writing, copying into the buffer, and what is in it.

use super::NS_PER_S;

/// Whether the next job may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// Now: everything that is not out has moved into the buffer.
    Free,
    /// The buffer is full: so many bytes are still in the engine's memory.
    Full {
        /// Bytes that must be written out, or given up, first.
        over_bytes: u64,
    },
}

/// Bytes that are computed and not written out yet, by where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteBuffer {
    bytes_max: u64,
    /// In the buffer: of jobs that have ended.
    buffered: u64,
    /// In the engine's own memory: of the job that runs, or that ended and did not fit.
    own: u64,
    is_ended: bool,
}

impl WriteBuffer {
    /// An empty buffer of so many bytes. With none, each job's end waits for its last byte.
    #[must_use]
    pub fn new(bytes_max: u64) -> WriteBuffer {
        WriteBuffer { bytes_max, buffered: 0, own: 0, is_ended: false }
    }

    /// A layer of the running job was computed: so many bytes wait to be written out.
    pub fn computed(&mut self, bytes: u64) {
        self.is_ended = false;
        self.own = self.own.saturating_add(bytes);
    }

    /// So many bytes are out, the oldest. Gives what became of the job that ended, if it waits for this.
    pub fn written(&mut self, bytes: u64) -> JobEnd {
        let older = bytes.min(self.buffered);
        self.buffered -= older;
        self.own = self.own.saturating_sub(bytes - older);
        self.move_in()
    }

    /// The running job has computed its last layer.
    pub fn end_job(&mut self) -> JobEnd {
        self.is_ended = true;
        self.move_in()
    }

    /// What does not fit is not saved: of the job that ended, in whole blocks of `block_bytes` (at least a
    /// byte) from the tail. Gives how many blocks that are; the next job may begin.
    pub fn give_up(&mut self, block_bytes: u64) -> u64 {
        let block_bytes = block_bytes.max(1);
        let JobEnd::Full { over_bytes } = self.move_in() else { return 0 };
        let blocks = over_bytes.div_ceil(block_bytes);
        // The rest of a block that is only partly over is dropped from where it had moved to.
        let rest = blocks.saturating_mul(block_bytes).saturating_sub(over_bytes);
        self.buffered = self.buffered.saturating_sub(rest);
        self.own = 0;
        blocks
    }

    /// Bytes that are computed and not out, wherever they are.
    #[must_use]
    pub fn unwritten_bytes(&self) -> u64 {
        self.buffered + self.own
    }

    /// Bytes in the buffer; never more than it has.
    #[must_use]
    pub fn buffered_bytes(&self) -> u64 {
        self.buffered
    }

    fn move_in(&mut self) -> JobEnd {
        if !self.is_ended {
            return JobEnd::Free;
        }
        let moved = self.own.min(self.bytes_max - self.buffered);
        self.buffered += moved;
        self.own -= moved;
        if self.own == 0 { JobEnd::Free } else { JobEnd::Full { over_bytes: self.own } }
    }
}

/// The write buffer that one job needs for the next not to wait, in bytes: what is computed and not out at its
/// end, when each layer takes `layer_ns` nanoseconds, then has these bytes to be written, and `bytes_per_s` go
/// out. At least the last layer, of which nothing can be out.
#[must_use]
pub fn write_buffer_bytes(layer_bytes: &[u64], layer_ns: u64, bytes_per_s: u64) -> u64 {
    let out = u128::from(bytes_per_s) * u128::from(layer_ns);
    // In units of bytes times nanoseconds of a second, so that nothing is lost between two layers.
    let left = |queue: u128, bytes: &u64| queue.saturating_sub(out) + u128::from(*bytes) * NS_PER_S;
    let queue = layer_bytes.iter().fold(0, left);
    u64::try_from(queue.div_ceil(NS_PER_S)).unwrap_or(u64::MAX)
}
