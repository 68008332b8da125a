//! Memory that a network card reads and writes, and places in it that have one owner at a time.
//!
//! A card writes where it was told to until it said that it is done, or its queue pair is gone. So a [`Place`] goes with
//! the transfer and comes back with its end; nobody has a reference into it meanwhile. Memory that a peer may write at
//! any moment (a node's trays) only ever gets copied out. Not here: registration (`rail.rs`), transfers (`flights.rs`).
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::lend::Room;
use kvfleet_proto::frame::{Copies, Unsettled, copy_from};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use tokio::sync::oneshot;

/// Where places begin: at cache lines, so that two places never share one.
pub(super) const ALIGN_BYTES: u64 = 64;

/// A range of this process's memory that stays where it is.
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    /// Whose it is; nothing when it is unmapped with this value.
    owner: Option<Box<dyn Any + Send + Sync>>,
    /// Parts that belong to a pool, each to one.
    pooled: Mutex<Vec<Range<u64>>>,
}

// SAFETY: plain memory without thread affinity; who touches which bytes follows from places.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.len)
    }
}

impl Memory {
    /// So many zero bytes, in pages of their own.
    ///
    /// # Errors
    /// When the system has none.
    pub fn zeroed(len: usize) -> io::Result<Memory> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Memory { base, len, owner: None, pooled: Mutex::default() };
        // A child must not share pages that the card writes: the parent's next write would move the parent's, not the
        // card's.
        // SAFETY: the range is the mapping, and the advice changes no contents.
        unsafe { madvise(memory.base.as_ptr().cast(), len, Advice::LinuxDontFork)? };
        Ok(memory)
    }

    /// Memory that belongs to something else: a node's arena.
    ///
    /// # Safety
    /// From `base` on so many bytes are mapped, at the same place and readable, as long as `owner` lives.
    #[must_use]
    pub unsafe fn of<T: Send + Sync + 'static>(base: NonNull<u8>, len: usize, owner: T) -> Memory {
        Memory { base, len, owner: Some(Box::new(owner)), pooled: Mutex::default() }
    }

    /// How many bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    fn pooled(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.pooled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it begins, as cards know it.
    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Where bytes lie in it, all of which must; nothing when they lie elsewhere.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.base.as_ptr() as usize)?;
        (at.checked_add(bytes.len())? <= self.len).then_some(at as u64)
    }

    fn at(&self, at: u64, len: usize) -> NonNull<u8> {
        let end = usize::try_from(at).ok().and_then(|at| at.checked_add(len));
        assert!(end.is_some_and(|end| end <= self.len), "{len} bytes at {at} of {}", self.len);
        // SAFETY: inside the range, as was just checked.
        unsafe { self.base.add(at as usize) }
    }

    /// Puts `from` there. Whoever else writes there meanwhile spoils both.
    ///
    /// # Panics
    /// When it does not fit.
    pub(super) fn write(&self, at: u64, from: &[u8]) {
        assert!(self.owner.is_none(), "memory of others is only read");
        let to = self.at(at, from.len());
        // SAFETY: the range is inside the mapping. A place is written by its owner alone; what cards do there is not
        // known to the compiler, and both orders are sound since plain bytes have no invalid values.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
    }

    /// Fills `to` with what is there, each byte loaded once.
    ///
    /// # Panics
    /// When there is less.
    pub(super) fn copy(&self, at: u64, to: &mut [u8]) {
        let from = self.at(at, to.len());
        // SAFETY: so many bytes may be read there; who writes them is another device, or this process by `write`, whose
        // callers keep to places.
        unsafe { copy_from(to, from.as_ptr()) };
    }

    fn copy_crc32c(&self, at: u64, to: &mut [u8], copies: &Copies) -> u32 {
        let from = self.at(at, to.len());
        // SAFETY: as in `copy`.
        unsafe { copies.crc32c_from(to, from.as_ptr()) }
    }

    /// Raises eight bytes at once, a number in little endian, to `value` unless more stands there; after everything that was
    /// written before.
    pub(super) fn raise_word(&self, at: u64, value: u64) {
        assert!(at.is_multiple_of(8) && self.owner.is_none(), "a word is aligned, and ours");
        let word = self.at(at, 8).cast::<AtomicU64>();
        let higher = |stands: u64| (u64::from_le(stands) < value).then_some(value.to_le());
        // SAFETY: aligned, inside the mapping, and touched by atomic accesses and cards alone.
        let word = unsafe { word.as_ref() };
        let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, higher); // what is higher stays
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: base and length of the mapping, to which nothing refers: whatever does holds its `Arc`.
        if let Err(cause) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%cause, "memory of a network card could not be unmapped");
        }
    }
}

/// A part of a memory that is handed out in places.
#[derive(Debug)]
pub struct Pool {
    memory: Arc<Memory>,
    start: u64,
    len: u64,
    shared: Mutex<Shared>,
}

/// What is free, and who waits for it.
#[derive(Debug)]
struct Shared {
    room: Room,
    /// In the order in which they came: what comes back is the first one's.
    waiting: VecDeque<Waiting>,
    /// Of the next who waits.
    number: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    len: u32,
    /// Where the place goes, also to one that is not polled meanwhile: it keeps what is its own, and nobody behind it waits for that.
    to: oneshot::Sender<Place>,
}

impl Shared {
    /// Those in front who have their places now.
    fn grant(&mut self) -> Vec<(Waiting, u64)> {
        let mut granted = Vec::new();
        while let Some(at) = self.waiting.front().and_then(|first| self.room.take(first.len)) {
            granted.extend(self.waiting.pop_front().map(|first| (first, at)));
        }
        granted
    }
}

/// One who waits for a place, until it has it or is dropped.
struct Waits<'a> {
    pool: &'a Arc<Pool>,
    number: u64,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.pool.change(|shared| shared.waiting.retain(|other| other.number != self.number));
    }
}

impl Pool {
    /// The bytes of `range`, which begins at a multiple of 64 and is no other pool's.
    ///
    /// # Panics
    /// When the range is not inside, begins elsewhere, is partly another pool's, or the memory is somebody else's.
    #[must_use]
    pub fn new(memory: &Arc<Memory>, range: Range<u64>) -> Arc<Pool> {
        let (start, end) = (range.start, range.end);
        assert!(start.is_multiple_of(ALIGN_BYTES) && start <= end && end <= memory.len_bytes(), "{range:?}");
        assert!(memory.owner.is_none(), "memory of others is only read");
        let mut pooled = memory.pooled();
        let is_free = pooled.iter().all(|other| other.end <= start || end <= other.start);
        assert!(is_free, "a part of {range:?} is another pool's");
        pooled.push(range);
        drop(pooled);
        let len = end - start;
        let room = Room::new(len, ALIGN_BYTES);
        let shared = Mutex::new(Shared { room, waiting: VecDeque::new(), number: 0 });
        Arc::new(Pool { memory: Arc::clone(memory), start, len, shared })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what is free or who waits, and gives those their places who have them then.
    fn change(self: &Arc<Pool>, change: impl FnOnce(&mut Shared)) {
        let granted = {
            let mut shared = self.shared();
            change(&mut shared);
            shared.grant()
        };
        for (waiting, at) in granted {
            let place = Place { pool: Arc::clone(self), at, len: waiting.len };
            // One who waits no longer gives it back by dropping it, which needs the lock.
            let _ = waiting.to.send(place);
        }
    }

    /// Bytes of the longest place there can be.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// Whether these bytes lie in its memory.
    #[must_use]
    pub fn has(&self, bytes: &[u8]) -> bool {
        self.memory.offset_of(bytes).is_some()
    }

    /// A place of `len` bytes, if there is one now that nobody waits for.
    #[must_use]
    pub fn take(self: &Arc<Pool>, len: u32) -> Option<Place> {
        // Many that need little would take each hole before one that needs much.
        let mut shared = self.shared();
        let at = if shared.waiting.is_empty() { shared.room.take(len) } else { None }?;
        drop(shared);
        Some(Place { pool: Arc::clone(self), at, len })
    }

    /// The same; waits until others give back, behind those who came before. Nothing when it would wait forever.
    pub(super) async fn wait(self: &Arc<Pool>, len: u32) -> Option<Place> {
        if u64::from(len) > self.len {
            return None;
        }
        let (to, place) = oneshot::channel();
        let mut number = 0;
        self.change(|shared| {
            number = shared.number;
            shared.number += 1;
            shared.waiting.push_back(Waiting { number, len, to });
        });
        let _waits = Waits { pool: self, number };
        place.await.ok()
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.shared().room.places()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Places keep their pool, so none is left.
        self.memory.pooled().retain(|range| range.start != self.start || range.end != self.start + self.len);
    }
}

/// Bytes of a pool that nobody else has.
#[derive(Debug)]
pub struct Place {
    pool: Arc<Pool>,
    at: u64,
    len: u32,
}

impl Place {
    /// How many bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u32 {
        self.len
    }

    /// From which byte of its memory on.
    pub(super) fn at(&self) -> u64 {
        self.pool.start + self.at
    }

    /// As cards know it.
    pub(super) fn address(&self) -> u64 {
        self.pool.memory.address() + self.at()
    }

    /// Puts `from` at its beginning.
    ///
    /// # Panics
    /// When it is longer.
    pub fn write(&mut self, from: &[u8]) {
        assert!(from.len() <= self.len as usize, "{} bytes into a place of {}", from.len(), self.len);
        self.pool.memory.write(self.at(), from);
    }

    /// What is in it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let start = self.pool.memory.at(self.at(), self.len as usize);
        // SAFETY: inside the mapping, which the pool keeps; nobody else has the place, as no two pools have a byte in common; and
        // as long as a card may write it, it is with the transfer and not here.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.len as usize) }
    }

    /// Its bytes, in place, until they are dropped.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Place {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pool.change(|shared| {
            shared.room.give_back(self.at);
        });
    }
}

/// A frame in memory that a peer may write at any time.
pub(super) struct TrayFrame {
    pub(super) tray: Arc<Memory>,
    pub(super) at: u64,
    pub(super) len: u32,
}

impl TrayFrame {
    fn checked(&self, at: usize, len: usize) -> u64 {
        let end = at.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len as usize), "{len} bytes at {at} of {}", self.len);
        self.at + at as u64
    }
}

impl Unsettled for TrayFrame {
    fn len_bytes(&self) -> usize {
        self.len as usize
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        self.tray.copy(self.checked(at, to.len()), to);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &Copies) -> u32 {
        self.tray.copy_crc32c(self.checked(at, to.len()), to, copies)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_proto::frame::{KeyForm, settle};

    use super::*;
    use crate::suite;

    fn memory(len: usize) -> Arc<Memory> {
        Arc::new(Memory::zeroed(len).unwrap())
    }

    #[tokio::test]
    async fn a_place_has_one_owner_and_comes_back() {
        let pool = Pool::new(&memory(8192), 4096..8192);
        let mut first = pool.take(4000).unwrap();
        assert!(pool.take(100).is_none());
        first.write(b"bytes");
        assert_eq!((first.at(), &first.bytes()[..6]), (4096, &b"bytes\0"[..]));
        let frozen = first.freeze();
        assert_eq!(pool.memory.offset_of(&frozen), Some(4096));
        let waits = tokio::spawn({
            let pool = Arc::clone(&pool);
            async move { pool.wait(4096).await.unwrap().len_bytes() }
        });
        tokio::task::yield_now().await;
        drop(frozen);
        assert_eq!(waits.await.unwrap(), 4096);
        let never = tokio::time::timeout(suite::PATIENCE, pool.wait(4097)).await;
        assert!(never.unwrap().is_none(), "what never fits is not waited for");
        assert_eq!(pool.places(), 0);
    }

    #[tokio::test]
    async fn who_waits_for_much_is_not_passed_by_those_who_need_little() {
        let pool = Pool::new(&memory(4096), 0..4096);
        let (first, second) = (pool.take(2048).unwrap(), pool.take(2048).unwrap());
        let mut much = Box::pin(pool.wait(4096));
        let mut little = Box::pin(pool.wait(64));
        let mut given_up = Box::pin(pool.wait(64));
        assert!(!is_there(&mut much).await && !is_there(&mut little).await && !is_there(&mut given_up).await);
        drop(first);
        assert!(
            pool.take(64).is_none() && !is_there(&mut little).await,
            "there is room, and it is another's"
        );
        assert!(!is_there(&mut much).await);
        drop((given_up, second));
        let much = much.await.unwrap();
        assert!(!is_there(&mut little).await);
        drop(much);
        little.await.unwrap();
        assert!(pool.take(4096).is_some(), "nobody waits any more");
        // One that is not polled any more when its place came keeps that, and nobody behind it waits for it.
        let held = pool.take(2048).unwrap();
        let (mut idle, mut next) = (Box::pin(pool.wait(4096 - 64)), Box::pin(pool.wait(64)));
        assert!(!is_there(&mut idle).await && !is_there(&mut next).await);
        drop(held);
        next.await.unwrap();
        drop(idle);
        assert!(pool.take(4096).is_some(), "what it kept came back with it");
        // Who gives up in front of others leaves them the room.
        let held = pool.take(2048).unwrap();
        let (mut much, mut little) = (Box::pin(pool.wait(4096)), Box::pin(pool.wait(64)));
        assert!(!is_there(&mut much).await && !is_there(&mut little).await);
        drop(much);
        little.await.unwrap();
        assert!(pool.take(2048).is_some());
        drop(held);
    }

    /// Whether a place is there already.
    async fn is_there<F: Future<Output = Option<Place>>>(waits: &mut std::pin::Pin<Box<F>>) -> bool {
        std::future::poll_fn(|context| std::task::Poll::Ready(waits.as_mut().poll(context).is_ready())).await
    }

    #[test]
    fn no_two_pools_have_a_byte_in_common() {
        let memory = memory(8192);
        let refused = |range: Range<u64>| {
            let pool = std::panic::AssertUnwindSafe(|| Pool::new(&memory, range));
            std::panic::catch_unwind(pool).is_err()
        };
        let first = Pool::new(&memory, 0..4096);
        assert!(refused(0..64) && refused(4032..8192) && refused(0..8192));
        let backwards = Range { start: 64, end: 0 };
        assert!(refused(backwards) && refused(1..64) && refused(4096..8193), "what is no part of it");
        let _second = Pool::new(&memory, 4096..8192);
        let place = first.take(64).unwrap();
        drop(first);
        assert!(refused(0..64), "a place keeps its pool");
        drop(place);
        assert!(!refused(0..64));
    }

    #[test]
    fn a_word_only_grows() {
        let memory = memory(4096);
        let word = || {
            let mut bytes = [0; 8];
            memory.copy(64, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        for (raised, stands) in [(5, 5), (6, 6), (5, 6), (u64::MAX, u64::MAX), (7, u64::MAX)] {
            memory.raise_word(64, raised);
            assert_eq!(word(), stands);
        }
    }

    #[test]
    fn what_lies_elsewhere_has_no_offset() {
        let memory = memory(4096);
        assert_eq!(memory.offset_of(b"elsewhere"), None);
    }

    #[test]
    fn memory_of_an_owner_is_kept_as_long_as_it_is_used() {
        let owner = Arc::new(vec![7_u8; 100]);
        let base = NonNull::new(owner.as_ptr().cast_mut()).unwrap();
        // SAFETY: the vector is never changed, and its clone keeps it.
        let memory = unsafe { Memory::of(base, 100, Arc::clone(&owner)) };
        assert_eq!(memory.offset_of(&owner[40..100]), Some(40));
        let mut to = [0; 2];
        memory.copy(98, &mut to);
        assert_eq!((to, Arc::strong_count(&owner)), ([7, 7], 2));
        drop(memory);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn a_frame_in_a_tray_is_settled_like_any_other() {
        let tray = memory(8192);
        let frame = suite::frame(suite::hash(1), 5000);
        let len = u32::try_from(frame.bytes.len()).unwrap();
        tray.write(128, &frame.bytes);
        let place = TrayFrame { tray: Arc::clone(&tray), at: 128, len };
        let mut to = vec![0; frame.bytes.len()];
        settle(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).unwrap();
        assert_eq!(to, frame.bytes);
        tray.write(128 + u64::from(len) - 1, &[!frame.bytes[frame.bytes.len() - 1]]);
        assert!(settle(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).is_err());
    }
}
