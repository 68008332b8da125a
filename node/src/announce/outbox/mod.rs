//! Queue of announcements to one shard: unacknowledged batches with their numbers. Pure.
//!
//! A number never changes its meaning: a batch that may have been sent is never replaced by other
//! changes under the same number. If too many changes pile up without routers, they are discarded,
//! and all held blocks are announced again. Not here: sockets and time (`link`).

use std::collections::VecDeque;

use kv_core::id::{BlockHash, Epoch, Seq};
use kv_core::index::command::Change;
use kv_core::index::digest;

/// Maximum blocks of one batch. Routers apply a batch atomically while readers wait; this many take
/// well under a millisecond. They are 32 KiB of hashes, large against the rest of a message.
pub const BATCH_BLOCKS_MAX: usize = 2_048;

/// Maximum queued blocks while no router listens. Beyond this (4 MiB of hashes) a full announcement
/// is cheaper.
pub const QUEUE_BLOCKS_MAX: usize = 262_144;

/// Maximum unacknowledged batches, to bound a slow leader's buffer.
pub const UNACKED_BATCHES_MAX: u64 = 64;

/// A closed batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnnounceBatch {
    /// Its number.
    pub seq: Seq,
    /// Its changes.
    pub changes: Vec<Change>,
    /// Digest over all changes up to and including this batch; `None` if unknown.
    pub digest: Option<u128>,
}

/// The queue of one shard; see the module.
#[derive(Debug, Default)]
pub struct Outbox {
    epoch: Option<Epoch>,
    closed: VecDeque<AnnounceBatch>,
    open: Vec<Change>,
    open_blocks: usize,
    queued_blocks: usize,
    /// Number of the open batch.
    next_seq: u64,
    /// Highest number sent on the current stream, or acknowledged.
    cursor: u64,
    /// Highest number ever sent in this epoch.
    sent_seq: u64,
    acked_seq: u64,
    /// Highest number given to a saver.
    promised_seq: u64,
    stale: bool,
    /// Digest over all pushed changes.
    digest: u128,
    /// Digest over all acknowledged changes, if known.
    acked_digest: Option<u128>,
    /// Blocks of the last full announcement; they may be queued in addition to
    /// [`QUEUE_BLOCKS_MAX`].
    allowance: usize,
}

impl Outbox {
    /// Starts a new epoch: announces all held blocks from number 1 on.
    pub fn joined(&mut self, epoch: Epoch, everything: Vec<Change>) {
        *self = Outbox { epoch: Some(epoch), next_seq: 1, ..Outbox::default() };
        self.allowance = everything.iter().map(block_count).sum();
        self.push(everything);
    }

    /// Ends the epoch. Changes are dropped, because the next epoch starts with a full announcement.
    pub fn fenced(&mut self) {
        *self = Outbox { epoch: self.epoch, stale: true, next_seq: self.next_seq, ..Outbox::default() };
    }

    /// The current epoch, once the node has joined.
    #[must_use]
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Adds changes in order.
    pub fn push(&mut self, changes: Vec<Change>) {
        if self.epoch.is_none() || self.stale {
            // The next full announcement covers them.
            return;
        }
        for change in changes {
            self.push_parts(change);
        }
        if self.queued_blocks + self.open_blocks > QUEUE_BLOCKS_MAX + self.allowance
            && self.cursor < self.next_seq - 1
        {
            self.discard_queued();
        }
    }

    fn push_parts(&mut self, change: Change) {
        let mut rest = Some(change);
        while let Some(change) = rest.take() {
            let room = BATCH_BLOCKS_MAX - self.open_blocks;
            let (first, later) = split_at(change, room);
            self.open_blocks += block_count(&first);
            self.digest = digest::digest_after(self.digest, &first);
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
        self.closed.push_back(AnnounceBatch { seq: Seq(self.next_seq), changes, digest: Some(self.digest) });
        self.next_seq += 1;
    }

    /// Discards queued changes. Batches with numbers that the leader may know stay, emptied.
    fn discard_queued(&mut self) {
        self.closed.retain(|batch| batch.seq.0 <= self.sent_seq);
        for batch in &mut self.closed {
            batch.changes.clear();
            // It is unknown whether the leader applied its former contents.
            batch.digest = None;
        }
        self.open.clear();
        (self.open_blocks, self.queued_blocks) = (0, 0);
        self.next_seq = self.sent_seq.max(self.acked_seq) + 1;
        self.stale = true;
    }

    /// Whether a full announcement is needed; then call [`Self::refill`].
    #[must_use]
    pub fn stale(&self) -> bool {
        self.stale && self.epoch.is_some()
    }

    /// Announces all held blocks again in the current epoch, after the numbers already used.
    pub fn refill(&mut self, everything: Vec<Change>) {
        if !self.open.is_empty() {
            self.close();
        }
        self.stale = false;
        self.allowance = everything.iter().map(block_count).sum();
        self.push_parts(Change::Cleared);
        for change in everything {
            self.push_parts(change);
        }
        self.keep_promises();
    }

    /// The leader misses batches: announces all held blocks again, starting with the number it
    /// expects.
    pub fn resync(&mut self, expected: Seq, everything: Vec<Change>) {
        self.closed.clear();
        self.open.clear();
        (self.open_blocks, self.queued_blocks) = (0, 0);
        self.next_seq = expected.0.max(1);
        self.acked_digest = None;
        self.cursor = self.next_seq - 1;
        self.sent_seq = self.cursor;
        self.acked_seq = self.cursor;
        self.refill(everything);
    }

    /// Every number given to a saver must be sent, because readers may wait for it.
    fn keep_promises(&mut self) {
        while self.next_seq <= self.promised_seq {
            self.close();
        }
    }

    /// The number that makes all changes pushed so far visible; `None` before the first.
    pub fn position(&mut self) -> Option<(Epoch, Seq)> {
        let epoch = self.epoch?;
        let seq = if self.open.is_empty() && !self.stale { self.next_seq - 1 } else { self.next_seq };
        self.promised_seq = self.promised_seq.max(seq);
        (seq > 0).then_some((epoch, Seq(seq)))
    }

    /// A new stream: unacknowledged batches are sent again.
    pub fn restart(&mut self) {
        self.cursor = self.acked_seq;
    }

    /// The leader refused batch `seq` as busy: it is sent again.
    pub fn rewind_to(&mut self, seq: Seq) {
        self.cursor = self.cursor.min(seq.0.saturating_sub(1)).max(self.acked_seq);
    }

    /// The next batch to send, if the send window allows one.
    pub fn next_batch(&mut self) -> Option<AnnounceBatch> {
        if self.cursor.saturating_sub(self.acked_seq) >= UNACKED_BATCHES_MAX {
            return None;
        }
        if !self.stale && !self.open.is_empty() && self.cursor + 1 == self.next_seq {
            self.close();
        }
        let batch = self.closed.iter().find(|batch| batch.seq.0 > self.cursor)?.clone();
        self.cursor = batch.seq.0;
        self.sent_seq = self.sent_seq.max(self.cursor);
        Some(batch)
    }

    /// All batches up to `seq` are committed.
    pub fn ack(&mut self, seq: Seq) {
        self.acked_seq = self.acked_seq.max(seq.0.min(self.sent_seq));
        self.cursor = self.cursor.max(self.acked_seq);
        while self.closed.front().is_some_and(|batch| batch.seq.0 <= self.acked_seq) {
            if let Some(batch) = self.closed.pop_front() {
                self.acked_digest = batch.digest;
                let blocks: usize = batch.changes.iter().map(block_count).sum();
                self.queued_blocks = self.queued_blocks.saturating_sub(blocks);
            }
        }
    }

    /// Last acknowledged number.
    #[must_use]
    pub fn acked(&self) -> Seq {
        Seq(self.acked_seq)
    }

    /// Last acknowledged number, and the digest up to it if known.
    #[must_use]
    pub fn acked_digest(&self) -> (Seq, Option<u128>) {
        (Seq(self.acked_seq), self.acked_digest)
    }

    /// Last number in use.
    #[must_use]
    pub fn last(&self) -> Seq {
        Seq(if self.open.is_empty() { self.next_seq.saturating_sub(1) } else { self.next_seq })
    }
}

/// Number of blocks in a change; at least one, so that lists of `Cleared` are bounded too.
fn block_count(change: &Change) -> usize {
    match change {
        Change::Stored { blocks, .. } | Change::Moved { blocks, .. } | Change::Dropped { blocks, .. } => {
            blocks.len().max(1)
        }
        Change::Cleared => 1,
    }
}

/// Splits a change after `room` blocks.
fn split_at(change: Change, room: usize) -> (Change, Option<Change>) {
    if block_count(&change) <= room {
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
mod tests;
