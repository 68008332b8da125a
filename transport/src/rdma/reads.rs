//! Reads of one fetch at the client's end: begun over all links that it has, and handed on in order.
//!
//! Links of other lanes read beside the one that was asked, under its loans: the arena is the same over all of them. Reads are
//! begun while others are handed on, each once the board says that the node lent it until it was there; no loan is given back
//! before. Not here: words with the node (`fetch.rs`), what slices are read (`layers.rs`), which links there are (`path.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kv_core::id::LoanId;
use kv_core::lend::{Descriptor, Place as LentIn};
use kvfleet_proto::frame::Frame;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

use super::fetch::{Signs, Stop, Terms, nonsense};
use super::flights::{Arriving, TransferError};
use super::link::Reach;
use super::memory::Place;
use crate::stream::ItemError;

/// Reads of one fetch that are begun and not handed on: more than the queue pairs of eight rails have under way.
const BEGUN_MAX: usize = 1024;

/// Part of the memory for what is under way that the reads of one fetch have: others are to find places, too.
const BEGUN_PART: u64 = 4;

/// What of that is counted as one, in bytes.
const BEGUN_UNIT: u64 = 1 << 10;

/// Reads, and their bytes, that one look at the board vouches for: the first are not to wait for many others.
const VOUCHED_MAX: usize = 32;
const VOUCHED_BYTES_MAX: u64 = 1 << 20;

/// The links that one fetch reads over.
pub(super) struct Reaches<'a> {
    /// Of the link that was asked: its loans are read, and its board is looked at.
    own: &'a Reach,
    /// Each with the bytes that are being read over it, that one first.
    over: Vec<(&'a Reach, AtomicU64)>,
    /// For what is begun and not handed on.
    room: Semaphore,
    room_units: u32,
}

/// Bytes that are being read.
struct Reading<'a> {
    arriving: Arriving,
    room: Option<SemaphorePermit<'a>>,
    /// Over which link.
    over: usize,
    may_stay: bool,
}

/// Bytes that were read.
pub(super) struct Came<'a> {
    place: Place,
    _room: Option<SemaphorePermit<'a>>,
    /// They may stay where they are; else others wait for the place.
    may_stay: bool,
}

impl Came<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        self.place.bytes()
    }

    /// To be kept for long.
    fn keep(self) -> Bytes {
        if self.may_stay { self.place.freeze() } else { Bytes::copy_from_slice(self.place.bytes()) }
    }
}

impl<'a> Reaches<'a> {
    pub(super) fn new(own: &'a Reach, beside: impl IntoIterator<Item = &'a Reach>) -> Reaches<'a> {
        let over = std::iter::once(own).chain(beside.into_iter().filter(|reach| reach.shares_arena(own)));
        let over = over.map(|reach| (reach, AtomicU64::new(0))).collect();
        let units = own.local.passing.len_bytes() / BEGUN_PART / BEGUN_UNIT;
        let room_units = u32::try_from(units).unwrap_or(u32::MAX).max(1);
        Reaches { own, over, room: Semaphore::new(room_units as usize), room_units }
    }

    /// Begins to read a part of what a row names, over the link that has the least to do.
    async fn begin(&self, row: &Descriptor, part: Range<u32>) -> Result<Reading<'_>, Stop> {
        let len = part.end - part.start;
        let units =
            u32::try_from(u64::from(len).div_ceil(BEGUN_UNIT)).unwrap_or(u32::MAX).min(self.room_units);
        let room = self.room.acquire_many(units).await.ok();
        // Whoever waits here holds no place: those of reads that were begun come back without this one.
        let local = &self.own.local;
        let place = match local.take(len) {
            Some(place) => Some(place),
            None => local.passing.wait(len).await.map(|place| (place, false)),
        };
        let (place, may_stay) = place.ok_or_else(|| nonsense(&"a block that is too large"))?;
        // What was copied into a tray is reached by its own link alone.
        let links = if row.place == LentIn::Arena { &self.over[..] } else { &self.over[..1] };
        let least = links.iter().enumerate().min_by_key(|(_, (_, bytes))| bytes.load(Ordering::Relaxed));
        let over = least.map_or(0, |(over, _)| over);
        let (reach, bytes) = &self.over[over];
        bytes.fetch_add(len.into(), Ordering::Relaxed);
        let arriving = reach.read(row.place, row.at + u64::from(part.start), place).await?;
        Ok(Reading { arriving, room, over, may_stay })
    }

    /// The bytes, once they are there.
    async fn end<'r>(&self, reading: Reading<'r>) -> Result<Came<'r>, TransferError> {
        let Reading { arriving, room, over, may_stay } = reading;
        let place = arriving.end().await?;
        self.over[over].1.fetch_sub(place.len_bytes().into(), Ordering::Relaxed);
        Ok(Came { place, _room: room, may_stay })
    }
}

/// Something to be read: for what, where it is, and which bytes of that, if any.
pub(super) type Wanted<T> = (T, Descriptor, Range<u32>);

/// Reads one after the other, and hands each on in this order once the node is known to have lent it until it was there. Who takes
/// it says which loan nobody reads any more.
pub(super) async fn read_all<T: Send>(
    reaches: &Reaches<'_>,
    terms: &Terms,
    signs: &mut Signs<'_>,
    mut wanted: impl FnMut() -> Option<Wanted<T>> + Send,
    mut take: impl FnMut(T, Option<Came<'_>>) -> Result<Option<LoanId>, Stop> + Send,
) -> Result<(), Stop> {
    let (begun, mut reading) = mpsc::channel(BEGUN_MAX);
    let begins = async move {
        while let Some((what, row, part)) = wanted() {
            let read = if part.is_empty() { None } else { Some(reaches.begin(&row, part).await?) };
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
                    Some(read) => Some(reaches.end(read).await?),
                    None => None,
                };
                bytes += came.as_ref().map_or(0, |came| u64::from(came.place.len_bytes()));
                there.push_back((what, came));
                let goes_on = there.len() < VOUCHED_MAX && bytes < VOUCHED_BYTES_MAX;
                next = if goes_on { reading.try_recv().ok() } else { None };
            }
            reaches.own.vouch(terms).await?;
            for (what, came) in there.drain(..) {
                if let Some(loan) = take(what, came)? {
                    signs.is_read(loan);
                }
            }
            signs.progress().await?;
        }
        Ok(())
    };
    tokio::try_join!(begins, ends).map(|_| ())
}

/// Reads whole frames.
pub(super) async fn read_frames(
    rows: &[Descriptor],
    reaches: &Reaches<'_>,
    terms: &Terms,
    signs: &mut Signs<'_>,
    mut sink: impl FnMut(Frame) + Send,
) -> Result<(), Stop> {
    let mut next = rows.iter();
    let wanted = || next.next().map(|row| (row.loan, *row, 0..row.len));
    let take = |loan, came: Option<Came<'_>>| {
        // No row is empty.
        let bytes = came.map(Came::keep).unwrap_or_default();
        sink(Frame::parse(bytes).map_err(ItemError::from)?);
        Ok(Some(loan))
    };
    read_all(reaches, terms, signs, wanted, take).await
}
