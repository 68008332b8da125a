//! The ordered queue of announcements: what is not acknowledged yet, under which numbers. Pure.
//!
//! A number, once given out, keeps its meaning: a batch that may have been sent is never replaced by
//! other changes under the same number. When too much piles up while the routers are away, the changes
//! are forgotten and everything held is announced anew instead. Not here: sockets and time (`link`).

use std::collections::VecDeque;

use kv_core::id::{BlockHash, Epoch, Seq};
use kv_core::index::command::Change;
use kv_core::index::digest;

/// Blocks in one batch. Routers apply a batch in one piece, with readers waiting: 2,048 blocks are well
/// under a millisecond. At 16 bytes each that is 32 KiB, enough to make the rest of a message small.
pub const BATCH_BLOCKS_MAX: usize = 2_048;

/// Blocks kept while no router listens. Beyond this (4 MiB of hashes) announcing all anew is cheaper.
pub const QUEUE_BLOCKS_MAX: usize = 262_144;

/// Batches sent and not acknowledged; bounds what a slow leader has to buffer.
pub const UNACKED_BATCHES_MAX: u64 = 64;

/// One closed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Its number.
    pub seq: Seq,
    /// What changed.
    pub changes: Vec<Change>,
    /// Digest over all that is announced with it and before; none when that is not known any more.
    pub digest: Option<u128>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Outbox {
    epoch: Option<Epoch>,
    closed: VecDeque<Batch>,
    open: Vec<Change>,
    open_blocks: usize,
    queued_blocks: usize,
    /// Number of the open batch.
    next: u64,
    /// Highest number sent on the present stream, or acknowledged.
    cursor: u64,
    /// Highest number ever sent in this epoch.
    sent: u64,
    acked: u64,
    /// Highest number given to a saver.
    promised: u64,
    stale: bool,
    /// Digest over everything pushed.
    digest: u128,
    /// The same over everything acknowledged, if it is known.
    acked_digest: Option<u128>,
    /// Blocks of the last full announcement: they may be queued on top of [`QUEUE_BLOCKS_MAX`].
    allowance: usize,
}

impl Outbox {
    /// A new epoch starts: all that is held goes out from number 1.
    pub fn joined(&mut self, epoch: Epoch, everything: Vec<Change>) {
        *self = Outbox { epoch: Some(epoch), next: 1, ..Outbox::default() };
        self.allowance = everything.iter().map(weight).sum();
        self.push(everything);
    }

    /// The epoch is over; changes wait for the next one, which announces everything anyway.
    pub fn fenced(&mut self) {
        *self = Outbox { epoch: self.epoch, stale: true, next: self.next, ..Outbox::default() };
    }

    /// The present epoch, once the node has joined.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Adds changes in order.
    pub fn push(&mut self, changes: Vec<Change>) {
        if self.epoch.is_none() || self.stale {
            // A full announcement is coming that covers them.
            return;
        }
        for change in changes {
            self.push_parts(change);
        }
        if self.queued_blocks + self.open_blocks > QUEUE_BLOCKS_MAX + self.allowance
            && self.cursor < self.next - 1
        {
            self.forget();
        }
    }

    fn push_parts(&mut self, change: Change) {
        let mut rest = Some(change);
        while let Some(change) = rest.take() {
            let room = BATCH_BLOCKS_MAX - self.open_blocks;
            let (first, later) = split(change, room);
            self.open_blocks += weight(&first);
            self.digest = digest::after(self.digest, &first);
            self.open.push(first);
            rest = later;
            if self.open_blocks >= BATCH_BLOCKS_MAX {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        let changes = std::mem::take(&mut self.open);
        self.queued_blocks += std::mem::take(&mut self.open_blocks);
        self.closed.push_back(Batch { seq: Seq(self.next), changes, digest: Some(self.digest) });
        self.next += 1;
    }

    /// Drops what piled up; numbers that may be known to the leader stay, emptied.
    fn forget(&mut self) {
        self.closed.retain(|batch| batch.seq.0 <= self.sent);
        for batch in &mut self.closed {
            batch.changes.clear();
            // Whether the leader took what it held before, nobody knows.
            batch.digest = None;
        }
        self.open.clear();
        (self.open_blocks, self.queued_blocks) = (0, 0);
        self.next = self.sent.max(self.acked) + 1;
        self.stale = true;
    }

    /// Whether everything held must be announced anew; then call [`Self::refill`].
    #[must_use]
    pub fn stale(&self) -> bool {
        self.stale && self.epoch.is_some()
    }

    /// Announces everything anew in the present epoch, after the numbers already used.
    pub fn refill(&mut self, everything: Vec<Change>) {
        if !self.open.is_empty() {
            self.close();
        }
        self.stale = false;
        self.allowance = everything.iter().map(weight).sum();
        self.push_parts(Change::Cleared);
        for change in everything {
            self.push_parts(change);
        }
        self.keep_promises();
    }

    /// The leader misses batches: everything anew, starting with the number it expects.
    pub fn resync(&mut self, expected: Seq, everything: Vec<Change>) {
        self.closed.clear();
        self.open.clear();
        (self.open_blocks, self.queued_blocks) = (0, 0);
        self.next = expected.0.max(1);
        self.acked_digest = None;
        self.cursor = self.next - 1;
        self.sent = self.cursor;
        self.acked = self.cursor;
        self.refill(everything);
    }

    /// Numbers given to savers must come, or a reader who waits for one waits in vain.
    fn keep_promises(&mut self) {
        while self.next <= self.promised {
            self.close();
        }
    }

    /// The number under which everything pushed so far is visible; `None` before the first.
    pub fn position(&mut self) -> Option<(Epoch, Seq)> {
        let epoch = self.epoch?;
        let seq = if self.open.is_empty() && !self.stale { self.next - 1 } else { self.next };
        self.promised = self.promised.max(seq);
        (seq > 0).then_some((epoch, Seq(seq)))
    }

    /// A new stream: send again whatever is not acknowledged.
    pub fn restart(&mut self) {
        self.cursor = self.acked;
    }

    /// The leader had no room for batch `seq`: it comes again.
    pub fn again_from(&mut self, seq: Seq) {
        self.cursor = self.cursor.min(seq.0.saturating_sub(1)).max(self.acked);
    }

    /// The next batch to send, if the window allows one.
    pub fn next_batch(&mut self) -> Option<Batch> {
        if self.cursor.saturating_sub(self.acked) >= UNACKED_BATCHES_MAX {
            return None;
        }
        if !self.stale && !self.open.is_empty() && self.cursor + 1 == self.next {
            self.close();
        }
        let batch = self.closed.iter().find(|batch| batch.seq.0 > self.cursor)?.clone();
        self.cursor = batch.seq.0;
        self.sent = self.sent.max(self.cursor);
        Some(batch)
    }

    /// Everything up to `seq` is committed.
    pub fn ack(&mut self, seq: Seq) {
        self.acked = self.acked.max(seq.0.min(self.sent));
        self.cursor = self.cursor.max(self.acked);
        while self.closed.front().is_some_and(|batch| batch.seq.0 <= self.acked) {
            if let Some(batch) = self.closed.pop_front() {
                self.acked_digest = batch.digest;
                let blocks: usize = batch.changes.iter().map(weight).sum();
                self.queued_blocks = self.queued_blocks.saturating_sub(blocks);
            }
        }
    }

    /// Last acknowledged number.
    #[must_use]
    pub fn acked(&self) -> Seq {
        Seq(self.acked)
    }

    /// Last acknowledged number, with the digest over everything up to it if that is known.
    #[must_use]
    pub fn acked_digest(&self) -> (Seq, Option<u128>) {
        (Seq(self.acked), self.acked_digest)
    }

    /// Last number in use.
    #[must_use]
    pub fn last(&self) -> Seq {
        Seq(if self.open.is_empty() { self.next.saturating_sub(1) } else { self.next })
    }
}

/// Blocks a change names; at least one, so that lists of `Cleared` are bounded too.
fn weight(change: &Change) -> usize {
    match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len().max(1)
        }
        Change::Cleared => 1,
    }
}

/// The first `room` blocks of a change, and the rest.
fn split(change: Change, room: usize) -> (Change, Option<Change>) {
    if weight(&change) <= room {
        return (change, None);
    }
    let cut = |mut blocks: Vec<BlockHash>| {
        let later = blocks.split_off(room);
        (blocks, later)
    };
    match change {
        Change::Stored { parent, blocks, tier } => {
            let (blocks, later) = cut(blocks);
            let rest = Change::Stored { parent: blocks.last().copied(), blocks: later, tier };
            (Change::Stored { parent, blocks, tier }, Some(rest))
        }
        Change::Moved { blocks, from, to } => {
            let (blocks, later) = cut(blocks);
            (Change::Moved { blocks, from, to }, Some(Change::Moved { blocks: later, from, to }))
        }
        Change::Dropped { blocks, tier, cause } => {
            let (blocks, later) = cut(blocks);
            (Change::Dropped { blocks, tier, cause }, Some(Change::Dropped { blocks: later, tier, cause }))
        }
        Change::Cleared => (Change::Cleared, None),
    }
}

#[cfg(test)]
#[path = "outbox_tests.rs"]
mod tests;
