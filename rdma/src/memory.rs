//! Memory that a network card reads and writes, and buffers in it that have one owner at a time.
//!
//! A card may write to a buffer until it reports completion or its queue pair is destroyed. So a
//! [`PooledBuffer`] moves into the transfer and returns with its completion; no reference into it
//! exists meanwhile. Memory that a peer may write at any moment (a node's bounce buffers) is only
//! ever copied out. Not here: registration (`rail.rs`), transfers (`transfers.rs`).
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::lease_grant::SlotAllocator;
use kvfleet_cpu::SharedBytes;
use kvfleet_proto::frame::{CopyBatch, VolatileBytes};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use tokio::sync::oneshot;

/// Alignment of buffers: cache lines, so that two buffers never share one.
pub(super) const ALIGN_BYTES: u64 = 64;

/// A range of this process's memory that does not move.
pub struct RdmaMemory {
    base: NonNull<u8>,
    len: usize,
    /// Keeps the memory mapped; `None` if dropping this value unmaps it.
    owner: Option<Box<dyn Any + Send + Sync>>,
    /// Ranges that belong to pools; no two overlap.
    pool_ranges: Mutex<Vec<Range<u64>>>,
}

// SAFETY: plain memory without thread affinity; buffers decide which thread touches which bytes.
unsafe impl Send for RdmaMemory {}
// SAFETY: as above.
unsafe impl Sync for RdmaMemory {}

impl std::fmt::Debug for RdmaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.len)
    }
}

impl RdmaMemory {
    /// Maps `len` zero bytes in pages of their own.
    ///
    /// # Errors
    /// If the system has no memory.
    pub fn zeroed(len: usize) -> io::Result<RdmaMemory> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = RdmaMemory { base, len, owner: None, pool_ranges: Mutex::default() };
        // A child must not share pages that the card writes. Copy-on-write would move the parent's
        // page at its next write, but the card would keep writing to the old page.
        // SAFETY: the range is the mapping, and the advice changes no contents.
        unsafe { madvise(memory.base.as_ptr().cast(), len, Advice::LinuxDontFork)? };
        Ok(memory)
    }

    /// Wraps memory that another object owns: a node's arena.
    ///
    /// # Safety
    /// `len` bytes from `base` on are mapped, at the same address and readable, as long as `owner`
    /// lives.
    #[must_use]
    pub unsafe fn from_owner<T: Send + Sync + 'static>(
        base: NonNull<u8>,
        len: usize,
        owner: T,
    ) -> RdmaMemory {
        RdmaMemory { base, len, owner: Some(Box::new(owner)), pool_ranges: Mutex::default() }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    fn lock_pool_ranges(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        self.pool_ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Start address, as cards know it.
    pub(super) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Offset of `bytes` in this memory, or `None` unless all of them lie in it.
    #[must_use]
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.base.as_ptr() as usize)?;
        (at.checked_add(bytes.len())? <= self.len).then_some(at as u64)
    }

    fn pointer_at(&self, at: u64, len: usize) -> NonNull<u8> {
        let end = usize::try_from(at).ok().and_then(|at| at.checked_add(len));
        assert!(end.is_some_and(|end| end <= self.len), "{len} bytes at {at} of {}", self.len);
        // SAFETY: inside the range, as was just checked.
        unsafe { self.base.add(at as usize) }
    }

    fn bytes_at(&self, at: u64, len: usize) -> SharedBytes<'_> {
        let start = self.pointer_at(at, len).as_ptr();
        // SAFETY: these bytes are readable. Their writer is another device, or this process by
        // `write`, and callers of `write` keep to their own buffers.
        unsafe { SharedBytes::new(start, len) }
    }

    /// Writes `from` at offset `at`. A concurrent writer to the same bytes corrupts both writes.
    ///
    /// # Panics
    /// If it does not fit.
    pub(super) fn write(&self, at: u64, from: &[u8]) {
        assert!(self.owner.is_none(), "memory with an owner is read-only");
        let to = self.pointer_at(at, from.len());
        // SAFETY: the range is inside the mapping. Only its owner writes a buffer. The compiler
        // does not know about the card's writes; both orders are sound because plain bytes have no
        // invalid values.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
    }

    /// Fills `to` from offset `at` on and loads each byte once.
    ///
    /// # Panics
    /// If the memory is shorter.
    pub(super) fn copy(&self, at: u64, to: &mut [u8]) {
        self.bytes_at(at, to.len()).copy_to(to);
    }

    fn copy_crc32c(&self, at: u64, to: &mut [u8], copies: &CopyBatch) -> u32 {
        copies.crc32c_shared(to, self.bytes_at(at, to.len()))
    }

    /// Atomically raises an aligned little-endian `u64` to `value`, unless it is already higher.
    /// Everything written before becomes visible first.
    pub(super) fn store_max(&self, at: u64, value: u64) {
        assert!(
            at.is_multiple_of(8) && self.owner.is_none(),
            "the word must be aligned, and the memory writable"
        );
        let word = self.pointer_at(at, 8).cast::<AtomicU64>();
        let higher = |stands: u64| (u64::from_le(stands) < value).then_some(value.to_le());
        // SAFETY: aligned, inside the mapping, and touched only by atomic accesses and cards.
        let word = unsafe { word.as_ref() };
        let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, higher); // a higher value stays
    }
}

impl Drop for RdmaMemory {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: base and length are those of the mapping, and no reference remains: each user
        // holds its `Arc`.
        if let Err(cause) = unsafe { munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%cause, "cannot unmap memory of a network card");
        }
    }
}

/// A range of registered memory that is handed out as buffers.
#[derive(Debug)]
pub struct RdmaBufferPool {
    memory: Arc<RdmaMemory>,
    start: u64,
    len: u64,
    state: Mutex<BufferPoolState>,
}

/// Free space, and the requests that wait for it.
#[derive(Debug)]
struct BufferPoolState {
    free_space: SlotAllocator,
    /// Requests in order of arrival: freed space goes to the first.
    waiters: VecDeque<PoolWaiter>,
    /// Ticket of the next waiter.
    next_ticket: u64,
}

#[derive(Debug)]
struct PoolWaiter {
    ticket: u64,
    len: u32,
    /// Receives the buffer even if its task is not polled, so that waiters behind it are not
    /// delayed.
    sender: oneshot::Sender<PooledBuffer>,
}

impl BufferPoolState {
    /// Waiters at the front that can have their buffers now.
    fn grant_waiters(&mut self) -> Vec<(PoolWaiter, u64)> {
        let mut granted = Vec::new();
        while let Some(at) = self.waiters.front().and_then(|first| self.free_space.allocate(first.len)) {
            granted.extend(self.waiters.pop_front().map(|first| (first, at)));
        }
        granted
    }
}

/// A request that waits for a buffer, until it has it or is dropped.
struct PoolWait<'a> {
    pool: &'a Arc<RdmaBufferPool>,
    ticket: u64,
}

impl Drop for PoolWait<'_> {
    fn drop(&mut self) {
        self.pool.update(|shared| shared.waiters.retain(|other| other.ticket != self.ticket));
    }
}

impl RdmaBufferPool {
    /// A pool of the bytes of `range`, which begins at a multiple of 64 and overlaps no other pool.
    ///
    /// # Panics
    /// If the range is not inside, is not aligned, overlaps another pool, or another object owns
    /// the memory.
    #[must_use]
    pub fn new(memory: &Arc<RdmaMemory>, range: Range<u64>) -> Arc<RdmaBufferPool> {
        let (start, end) = (range.start, range.end);
        assert!(start.is_multiple_of(ALIGN_BYTES) && start <= end && end <= memory.len_bytes(), "{range:?}");
        assert!(memory.owner.is_none(), "memory with an owner is read-only");
        let mut pooled = memory.lock_pool_ranges();
        let is_free = pooled.iter().all(|other| other.end <= start || end <= other.start);
        assert!(is_free, "a part of {range:?} belongs to another pool");
        pooled.push(range);
        drop(pooled);
        let len = end - start;
        let room = SlotAllocator::new(len, ALIGN_BYTES);
        let shared =
            Mutex::new(BufferPoolState { free_space: room, waiters: VecDeque::new(), next_ticket: 0 });
        Arc::new(RdmaBufferPool { memory: Arc::clone(memory), start, len, state: shared })
    }

    fn lock_state(&self) -> MutexGuard<'_, BufferPoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the free space or the waiters, then hands buffers to the waiters that can be served.
    fn update(self: &Arc<RdmaBufferPool>, change: impl FnOnce(&mut BufferPoolState)) {
        let granted = {
            let mut shared = self.lock_state();
            change(&mut shared);
            shared.grant_waiters()
        };
        for (waiting, at) in granted {
            let place = PooledBuffer { pool: Arc::clone(self), start: at, len: waiting.len };
            // If the waiter is gone, dropping the buffer returns it, which needs the lock.
            let _ = waiting.sender.send(place);
        }
    }

    /// Length in bytes of the longest possible buffer.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// Whether these bytes lie in its memory.
    #[must_use]
    pub fn contains(&self, bytes: &[u8]) -> bool {
        self.memory.offset_of(bytes).is_some()
    }

    /// A buffer of `len` bytes, or `None` if none is free or another request waits.
    #[must_use]
    pub fn take(self: &Arc<RdmaBufferPool>, len: u32) -> Option<PooledBuffer> {
        // Otherwise many small requests would take every gap before a large one.
        let mut shared = self.lock_state();
        let at = if shared.waiters.is_empty() { shared.free_space.allocate(len) } else { None }?;
        drop(shared);
        Some(PooledBuffer { pool: Arc::clone(self), start: at, len })
    }

    /// Like `take`, but waits behind earlier requests. `None` if the buffer can never fit.
    pub(super) async fn wait(self: &Arc<RdmaBufferPool>, len: u32) -> Option<PooledBuffer> {
        if u64::from(len) > self.len {
            return None;
        }
        let (to, place) = oneshot::channel();
        let mut number = 0;
        self.update(|shared| {
            number = shared.next_ticket;
            shared.next_ticket += 1;
            shared.waiters.push_back(PoolWaiter { ticket: number, len, sender: to });
        });
        let _waits = PoolWait { pool: self, ticket: number };
        place.await.ok()
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> &RdmaMemory {
        &self.memory
    }

    #[cfg(test)]
    pub(super) fn buffers_in_use(&self) -> usize {
        self.lock_state().free_space.slot_count()
    }
}

impl Drop for RdmaBufferPool {
    fn drop(&mut self) {
        // Buffers keep their pool alive, so none is left.
        self.memory
            .lock_pool_ranges()
            .retain(|range| range.start != self.start || range.end != self.start + self.len);
    }
}

/// A buffer of a pool, exclusively owned.
#[derive(Debug)]
pub struct PooledBuffer {
    pool: Arc<RdmaBufferPool>,
    start: u64,
    len: u32,
}

impl PooledBuffer {
    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u32 {
        self.len
    }

    /// Offset in its memory.
    pub(super) fn memory_offset(&self) -> u64 {
        self.pool.start + self.start
    }

    /// Address as cards know it.
    pub(super) fn address(&self) -> u64 {
        self.pool.memory.address() + self.memory_offset()
    }

    /// Writes `from` at its start.
    ///
    /// # Panics
    /// If `from` is longer.
    pub fn write(&mut self, from: &[u8]) {
        assert!(
            from.len() <= self.len as usize,
            "cannot write {} bytes into a buffer of {}",
            from.len(),
            self.len
        );
        self.pool.memory.write(self.memory_offset(), from);
    }

    /// Its contents.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let start = self.pool.memory.pointer_at(self.memory_offset(), self.len as usize);
        // SAFETY: inside the mapping, which the pool keeps. No other owner has the buffer, because
        // pools never overlap. While a card may write the buffer, the transfer owns it and it is
        // not here.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.len as usize) }
    }

    /// Its bytes in place; the buffer returns to the pool when they are dropped.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        self.pool.update(|shared| {
            shared.free_space.free(self.start);
        });
    }
}

/// A frame in memory that a peer may write at any time.
pub(super) struct RdmaBounceFrame {
    pub(super) memory: Arc<RdmaMemory>,
    pub(super) at: u64,
    pub(super) len: u32,
}

impl RdmaBounceFrame {
    fn checked_offset(&self, at: usize, len: usize) -> u64 {
        let end = at.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len as usize), "{len} bytes at {at} of {}", self.len);
        self.at + at as u64
    }
}

impl VolatileBytes for RdmaBounceFrame {
    fn len_bytes(&self) -> usize {
        self.len as usize
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        self.memory.copy(self.checked_offset(at, to.len()), to);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &CopyBatch) -> u32 {
        self.memory.copy_crc32c(self.checked_offset(at, to.len()), to, copies)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_proto::frame::{KeyForm, copy_and_verify};

    use super::*;
    use kvfleet_transport::suite;

    fn memory(len: usize) -> Arc<RdmaMemory> {
        Arc::new(RdmaMemory::zeroed(len).unwrap())
    }

    #[tokio::test]
    async fn a_buffer_has_one_owner_and_returns_to_its_pool() {
        let pool = RdmaBufferPool::new(&memory(8192), 4096..8192);
        let mut first = pool.take(4000).unwrap();
        assert!(pool.take(100).is_none());
        first.write(b"bytes");
        assert_eq!((first.memory_offset(), &first.bytes()[..6]), (4096, &b"bytes\0"[..]));
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
        assert!(never.unwrap().is_none(), "a request that can never fit must not wait");
        assert_eq!(pool.buffers_in_use(), 0);
    }

    #[tokio::test]
    async fn small_requests_do_not_overtake_a_large_waiting_one() {
        let pool = RdmaBufferPool::new(&memory(4096), 0..4096);
        let (first, second) = (pool.take(2048).unwrap(), pool.take(2048).unwrap());
        let mut much = Box::pin(pool.wait(4096));
        let mut little = Box::pin(pool.wait(64));
        let mut given_up = Box::pin(pool.wait(64));
        assert!(!is_ready(&mut much).await && !is_ready(&mut little).await && !is_ready(&mut given_up).await);
        drop(first);
        assert!(
            pool.take(64).is_none() && !is_ready(&mut little).await,
            "the free space belongs to the waiter in front"
        );
        assert!(!is_ready(&mut much).await);
        drop((given_up, second));
        let much = much.await.unwrap();
        assert!(!is_ready(&mut little).await);
        drop(much);
        little.await.unwrap();
        assert!(pool.take(4096).is_some(), "no request waits any more");
        // A waiter that is not polled when its buffer arrives keeps the buffer, and waiters behind
        // it go on.
        let held = pool.take(2048).unwrap();
        let (mut idle, mut next) = (Box::pin(pool.wait(4096 - 64)), Box::pin(pool.wait(64)));
        assert!(!is_ready(&mut idle).await && !is_ready(&mut next).await);
        drop(held);
        next.await.unwrap();
        drop(idle);
        assert!(pool.take(4096).is_some(), "the idle waiter's buffer returned with it");
        // A waiter that gives up leaves the space to those behind it.
        let held = pool.take(2048).unwrap();
        let (mut much, mut little) = (Box::pin(pool.wait(4096)), Box::pin(pool.wait(64)));
        assert!(!is_ready(&mut much).await && !is_ready(&mut little).await);
        drop(much);
        little.await.unwrap();
        assert!(pool.take(2048).is_some());
        drop(held);
    }

    /// Whether the buffer is already available.
    async fn is_ready<F: Future<Output = Option<PooledBuffer>>>(waits: &mut std::pin::Pin<Box<F>>) -> bool {
        std::future::poll_fn(|context| std::task::Poll::Ready(waits.as_mut().poll(context).is_ready())).await
    }

    #[test]
    fn pools_never_overlap() {
        let memory = memory(8192);
        let refused = |range: Range<u64>| {
            let pool = std::panic::AssertUnwindSafe(|| RdmaBufferPool::new(&memory, range));
            std::panic::catch_unwind(pool).is_err()
        };
        let first = RdmaBufferPool::new(&memory, 0..4096);
        assert!(refused(0..64) && refused(4032..8192) && refused(0..8192));
        let backwards = Range { start: 64, end: 0 };
        assert!(refused(backwards) && refused(1..64) && refused(4096..8193), "a range outside the memory");
        let _second = RdmaBufferPool::new(&memory, 4096..8192);
        let place = first.take(64).unwrap();
        drop(first);
        assert!(refused(0..64), "a buffer keeps its pool alive");
        drop(place);
        assert!(!refused(0..64));
    }

    #[test]
    fn a_stored_word_only_grows() {
        let memory = memory(4096);
        let word = || {
            let mut bytes = [0; 8];
            memory.copy(64, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        for (raised, stands) in [(5, 5), (6, 6), (5, 6), (u64::MAX, u64::MAX), (7, u64::MAX)] {
            memory.store_max(64, raised);
            assert_eq!(word(), stands);
        }
    }

    #[test]
    fn bytes_outside_the_memory_have_no_offset() {
        let memory = memory(4096);
        assert_eq!(memory.offset_of(b"elsewhere"), None);
    }

    #[test]
    fn owned_memory_lives_as_long_as_it_is_used() {
        let owner = Arc::new(vec![7_u8; 100]);
        let base = NonNull::new(owner.as_ptr().cast_mut()).unwrap();
        // SAFETY: the vector is never changed, and its clone keeps it.
        let memory = unsafe { RdmaMemory::from_owner(base, 100, Arc::clone(&owner)) };
        assert_eq!(memory.offset_of(&owner[40..100]), Some(40));
        let mut to = [0; 2];
        memory.copy(98, &mut to);
        assert_eq!((to, Arc::strong_count(&owner)), ([7, 7], 2));
        drop(memory);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn a_frame_in_a_bounce_buffer_is_settled_like_any_other() {
        let tray = memory(8192);
        let frame = suite::frame(suite::hash(1), 5000);
        let len = u32::try_from(frame.bytes.len()).unwrap();
        tray.write(128, &frame.bytes);
        let place = RdmaBounceFrame { memory: Arc::clone(&tray), at: 128, len };
        let mut to = vec![0; frame.bytes.len()];
        copy_and_verify(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).unwrap();
        assert_eq!(to, frame.bytes);
        tray.write(128 + u64::from(len) - 1, &[!frame.bytes[frame.bytes.len() - 1]]);
        assert!(copy_and_verify(&place, suite::IDENTITY, KeyForm::Rotated, suite::hash(1), &mut to).is_err());
    }
}
