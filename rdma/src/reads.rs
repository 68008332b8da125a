//! RDMA reads of one fetch at the client's end, spread over all its links and delivered in order.
//!
//! Links of other rail pairs help the link that the fetch uses: they read under its grants, because
//! all reach the same arena. Reads are started while others are delivered. Each is delivered once
//! the epoch word shows that its grant was valid until the bytes arrived; no grant is returned
//! before. Not here: messages to the node (`fetch.rs`), which slices are read (`layers.rs`), which
//! links exist (`path.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kv_core::id::GrantId;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory};
use kvfleet_proto::frame::Frame;
use kvfleet_transport::upgrade::ItemError;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

use super::fetch::{FetchStop, GrantTerms, ReturnSender, malformed};
use super::link::RdmaChannel;
use super::memory::PooledBuffer;
use super::transfers::{PendingTransfer, TransferError};

/// Maximum reads of one fetch that are started and not delivered: more than the queue pairs of
/// eight rails hold in flight.
const PENDING_READS_MAX: usize = 1024;

/// Divisor that gives one fetch's share of the transient buffers, so that other fetches find
/// buffers too.
const BUFFER_SHARE_DIVISOR: u64 = 4;

/// Bytes that count as one unit of that share.
const BUDGET_UNIT_BYTES: u64 = 1 << 10;

/// Maximum reads, and bytes, that one read of the epoch word validates, so that the first ones do
/// not wait for many others.
const VALIDATED_READS_MAX: usize = 32;
const VALIDATED_BYTES_MAX: u64 = 1 << 20;

/// The links that one fetch reads over.
pub(super) struct ReadChannels<'a> {
    /// Channel of the link that was asked: its grants are read, and its epoch word is checked.
    own: &'a RdmaChannel,
    /// Each channel with the bytes in flight over it; `own` is first.
    channels: Vec<(&'a RdmaChannel, AtomicU64)>,
    /// Budget for reads that are started and not delivered.
    budget: Semaphore,
    budget_units: u32,
}

/// A read in flight.
struct PendingRead<'a> {
    transfer: PendingTransfer,
    budget: Option<SemaphorePermit<'a>>,
    /// Index of the channel.
    channel: usize,
    may_retain: bool,
}

/// Bytes that were read.
pub(super) struct ReadBuffer<'a> {
    buffer: PooledBuffer,
    _budget: Option<SemaphorePermit<'a>>,
    /// Whether the bytes may stay in this buffer; otherwise other reads wait for it.
    may_retain: bool,
}

impl ReadBuffer<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// The bytes in a form that the caller may keep for long.
    fn into_bytes(self) -> Bytes {
        if self.may_retain { self.buffer.freeze() } else { Bytes::copy_from_slice(self.buffer.bytes()) }
    }
}

impl<'a> ReadChannels<'a> {
    pub(super) fn new(
        own: &'a RdmaChannel,
        helpers: impl IntoIterator<Item = &'a RdmaChannel>,
    ) -> ReadChannels<'a> {
        let over = std::iter::once(own).chain(helpers.into_iter().filter(|reach| reach.shares_arena(own)));
        let channels = over.map(|reach| (reach, AtomicU64::new(0))).collect();
        let units = own.local.transient.len_bytes() / BUFFER_SHARE_DIVISOR / BUDGET_UNIT_BYTES;
        let budget_units = u32::try_from(units).unwrap_or(u32::MAX).max(1);
        ReadChannels { own, channels, budget: Semaphore::new(budget_units as usize), budget_units }
    }

    /// Starts to read a part of a row's block, over the channel with the fewest bytes in flight.
    async fn start(&self, row: &GrantDescriptor, part: Range<u32>) -> Result<PendingRead<'_>, FetchStop> {
        let len = part.end - part.start;
        let units = u32::try_from(u64::from(len).div_ceil(BUDGET_UNIT_BYTES))
            .unwrap_or(u32::MAX)
            .min(self.budget_units);
        let room = self.budget.acquire_many(units).await.ok();
        // A caller that waits here holds no buffer, and buffers of started reads return without it.
        let local = &self.own.local;
        let place = match local.take_buffer(len) {
            Some(place) => Some(place),
            None => local.transient.wait(len).await.map(|place| (place, false)),
        };
        let (place, may_stay) = place.ok_or_else(|| malformed(&"a block that is too large"))?;
        // Only its own link reaches a bounce buffer.
        let links = if row.memory == GrantMemory::Arena { &self.channels[..] } else { &self.channels[..1] };
        let least = links.iter().enumerate().min_by_key(|(_, (_, bytes))| bytes.load(Ordering::Relaxed));
        let over = least.map_or(0, |(over, _)| over);
        let (reach, bytes) = &self.channels[over];
        bytes.fetch_add(len.into(), Ordering::Relaxed);
        let arriving = reach.read(row.memory, row.offset + u64::from(part.start), place).await?;
        Ok(PendingRead { transfer: arriving, budget: room, channel: over, may_retain: may_stay })
    }

    /// The bytes, once they have arrived.
    async fn finish<'r>(&self, reading: PendingRead<'r>) -> Result<ReadBuffer<'r>, TransferError> {
        let PendingRead { transfer: arriving, budget: room, channel: over, may_retain: may_stay } = reading;
        let place = arriving.wait().await?;
        self.channels[over].1.fetch_sub(place.len_bytes().into(), Ordering::Relaxed);
        Ok(ReadBuffer { buffer: place, _budget: room, may_retain: may_stay })
    }
}

/// A read to start: its purpose, the block's location, and the byte range, which may be empty.
pub(super) type ReadRequest<T> = (T, GrantDescriptor, Range<u32>);

/// Reads in order, and delivers each result in the same order after the epoch word confirms its
/// grant. `take` returns a grant that is no longer read, if any.
pub(super) async fn read_all<T: Send>(
    reaches: &ReadChannels<'_>,
    terms: &GrantTerms,
    signs: &mut ReturnSender<'_>,
    mut wanted: impl FnMut() -> Option<ReadRequest<T>> + Send,
    mut take: impl FnMut(T, Option<ReadBuffer<'_>>) -> Result<Option<GrantId>, FetchStop> + Send,
) -> Result<(), FetchStop> {
    let (begun, mut reading) = mpsc::channel(PENDING_READS_MAX);
    let begins = async move {
        while let Some((what, row, part)) = wanted() {
            let read = if part.is_empty() { None } else { Some(reaches.start(&row, part).await?) };
            if begun.send((what, read)).await.is_err() {
                break;
            }
        }
        Ok(())
    };
    let ends = async {
        let mut there = VecDeque::new();
        while let Some(next) = reading.recv().await {
            let (mut next, mut bytes) = (Some(next), 0);
            while let Some((what, read)) = next {
                let came = match read {
                    Some(read) => Some(reaches.finish(read).await?),
                    None => None,
                };
                bytes += came.as_ref().map_or(0, |came| u64::from(came.buffer.len_bytes()));
                there.push_back((what, came));
                let goes_on = there.len() < VALIDATED_READS_MAX && bytes < VALIDATED_BYTES_MAX;
                next = if goes_on { reading.try_recv().ok() } else { None };
            }
            reaches.own.validate(terms).await?;
            for (what, came) in there.drain(..) {
                if let Some(loan) = take(what, came)? {
                    signs.release(loan);
                }
            }
            signs.report_progress().await?;
        }
        Ok(())
    };
    tokio::try_join!(begins, ends).map(|_| ())
}

/// Reads whole frames.
pub(super) async fn read_frames(
    rows: &[GrantDescriptor],
    reaches: &ReadChannels<'_>,
    terms: &GrantTerms,
    signs: &mut ReturnSender<'_>,
    mut sink: impl FnMut(Frame) + Send,
) -> Result<(), FetchStop> {
    let mut next = rows.iter();
    let wanted = || next.next().map(|row| (row.grant, *row, 0..row.len));
    let take = |loan, came: Option<ReadBuffer<'_>>| {
        // No row is empty.
        let bytes = came.map(ReadBuffer::into_bytes).unwrap_or_default();
        sink(Frame::parse(bytes).map_err(ItemError::from)?);
        Ok(Some(loan))
    };
    read_all(reaches, terms, signs, wanted, take).await
}
