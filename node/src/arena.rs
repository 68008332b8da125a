//! The node's DRAM: one mapping made at start, cut into slots of a few size classes, shared by readers
//! without copying.
//!
//! A slot has one writer ([`SlotMut`]) until it is frozen into [`Bytes`]; its memory is given out again
//! only after the last reader dropped its copy. Classes are learned from the frame sizes that come, so
//! a node with one frame size can use all of it. A slot never changes its class; a frame whose own
//! class is used up may take a slot of a larger one. Not here: which block has which slot (`store`).

#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Slots are whole cache lines, in bytes.
pub const SLOT_ALIGN_BYTES: usize = 64;

/// Size classes of one arena. Frames of one model have one or two sizes; more classes only spread
/// memory over sizes that are never asked for again.
pub const CLASSES_MAX: usize = 8;

/// Who wants a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Bytes that come from a client. Leaves the reserve alone.
    Save,
    /// Bytes that come from SSD. May use the reserve, so that SSD and DRAM can always trade places.
    Load,
}

/// The arena. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: Mapping,
    reserve_bytes: usize,
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct State {
    carved: usize,
    free_bytes: usize,
    classes: Vec<Class>,
}

#[derive(Debug)]
struct Class {
    slot_bytes: usize,
    free: Vec<usize>,
}

/// Slot size for a frame of `frame_bytes`.
#[must_use]
pub fn slot_bytes(frame_bytes: usize) -> usize {
    frame_bytes.max(1).next_multiple_of(SLOT_ALIGN_BYTES)
}

impl Arena {
    /// Maps `bytes`, of which saves leave `reserve_bytes` alone.
    ///
    /// # Errors
    /// What the system said when it refused the mapping.
    pub fn new(bytes: usize, reserve_bytes: usize) -> std::io::Result<Arena> {
        let memory = Mapping::new(bytes.max(SLOT_ALIGN_BYTES))?;
        let inner =
            Inner { memory, reserve_bytes, state: Mutex::new(State::default()), freed: Notify::new() };
        Ok(Arena { inner: Arc::new(inner) })
    }

    /// A slot for `len` bytes, or nothing while there is none.
    #[must_use]
    pub fn take(&self, len: usize, purpose: Purpose) -> Option<SlotMut> {
        let total = self.inner.memory.len;
        let mut state = self.inner.state.lock();
        let left = total - state.carved + state.free_bytes;
        let keep = if purpose == Purpose::Save { self.inner.reserve_bytes } else { 0 };
        if left < keep + slot_bytes(len) {
            return None;
        }
        let (offset, slot_bytes) = state.take(slot_bytes(len), total)?;
        Some(SlotMut { slot: Slot { inner: Arc::clone(&self.inner), offset, slot_bytes, len } })
    }

    /// Bytes in slots that are given out.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        let state = self.inner.state.lock();
        state.carved - state.free_bytes
    }

    /// Whether a slot for `len` bytes can be had now.
    #[must_use]
    pub fn has_room(&self, len: usize, purpose: Purpose) -> bool {
        let state = self.inner.state.lock();
        let left = self.inner.memory.len - state.carved + state.free_bytes;
        let keep = if purpose == Purpose::Save { self.inner.reserve_bytes } else { 0 };
        left >= keep + slot_bytes(len)
    }

    /// Waits until some slot came back. Ask again after it; it may wake for nothing.
    pub async fn freed(&self) {
        self.inner.freed.notified().await;
    }
}

impl State {
    fn take(&mut self, wanted: usize, total: usize) -> Option<(usize, usize)> {
        let class = self.class_for(wanted);
        if let Some(offset) = class.and_then(|class| self.classes[class].free.pop()) {
            let slot_bytes = class.map_or(wanted, |class| self.classes[class].slot_bytes);
            self.free_bytes -= slot_bytes;
            return Some((offset, slot_bytes));
        }
        let slot_bytes = class.map_or(wanted, |class| self.classes[class].slot_bytes);
        if class.is_some() && self.carved + slot_bytes <= total {
            let offset = self.carved;
            self.carved += slot_bytes;
            return Some((offset, slot_bytes));
        }
        self.take_larger(wanted)
    }

    fn take_larger(&mut self, wanted: usize) -> Option<(usize, usize)> {
        let class = self.classes.iter_mut().filter(|class| class.slot_bytes >= wanted);
        let class = class.filter(|class| !class.free.is_empty()).min_by_key(|class| class.slot_bytes)?;
        let offset = class.free.pop()?;
        self.free_bytes -= class.slot_bytes;
        Some((offset, class.slot_bytes))
    }

    /// The class of this size; learned if there may be another one, else the next larger.
    fn class_for(&mut self, wanted: usize) -> Option<usize> {
        if let Some(found) = self.classes.iter().position(|class| class.slot_bytes == wanted) {
            return Some(found);
        }
        if self.classes.len() < CLASSES_MAX {
            self.classes.push(Class { slot_bytes: wanted, free: Vec::new() });
            return Some(self.classes.len() - 1);
        }
        let larger = self.classes.iter().enumerate().filter(|(_, class)| class.slot_bytes > wanted);
        larger.min_by_key(|(_, class)| class.slot_bytes).map(|(position, _)| position)
    }

    fn give_back(&mut self, offset: usize, slot_bytes: usize) {
        if let Some(class) = self.classes.iter_mut().find(|class| class.slot_bytes == slot_bytes) {
            class.free.push(offset);
            self.free_bytes += slot_bytes;
        }
    }
}

/// One slot, given back when dropped.
#[derive(Debug)]
struct Slot {
    inner: Arc<Inner>,
    offset: usize,
    slot_bytes: usize,
    len: usize,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.inner.state.lock().give_back(self.offset, self.slot_bytes);
        self.inner.freed.notify_waiters();
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping (it was carved there), the mapping lives as long as
        // `inner`, it is initialised (zero pages), and nobody writes it: the only writer, `SlotMut`, was
        // consumed when this slot was shared or owns it exclusively.
        unsafe { std::slice::from_raw_parts(self.inner.memory.at(self.offset), self.len) }
    }
}

/// A slot with its only writer.
#[derive(Debug)]
pub struct SlotMut {
    slot: Slot,
}

impl SlotMut {
    /// Ends writing: from now on the bytes are shared and never change.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(self.slot)
    }
}

impl Deref for SlotMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.slot.as_ref()
    }
}

impl DerefMut for SlotMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `Slot::as_ref`; `&mut self` makes this the only reference, because a slot's
        // range overlaps no other slot that is given out.
        unsafe { std::slice::from_raw_parts_mut(self.slot.inner.memory.at(self.slot.offset), self.slot.len) }
    }
}

/// Private anonymous memory, zeroed, given back when dropped.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory without thread affinity; who may touch which range is governed
// by the slots.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    #[cfg(not(miri))]
    fn new(len: usize) -> std::io::Result<Mapping> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice aliases nothing.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags)? };
        // SAFETY: the range is the mapping just made; the advice changes no contents.
        if let Err(cause) = unsafe { madvise(base, len, Advice::LinuxHugepage) } {
            tracing::debug!(%cause, "huge pages are not available for the arena");
        }
        let base = NonNull::new(base.cast()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len })
    }

    #[cfg(miri)]
    fn new(len: usize) -> std::io::Result<Mapping> {
        let memory = Box::leak(vec![0u8; len].into_boxed_slice());
        Ok(Mapping { base: NonNull::from(memory).cast(), len })
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        // SAFETY: callers pass offsets of carved slots, which lie inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(not(miri))]
        // SAFETY: base and len are those of the mapping, and no slot is left: each holds the `Arc`.
        if let Err(cause) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%cause, "the arena could not be unmapped");
        }
        #[cfg(miri)]
        // SAFETY: made by `Box::leak` of a boxed slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len)) });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn one_frame_size_uses_the_whole_arena() {
        let arena = Arena::new(128 * 10, 0).unwrap();
        let slots: Vec<SlotMut> = std::iter::from_fn(|| arena.take(100, Purpose::Save)).collect();
        assert_eq!(slots.len(), 10);
        assert_eq!(arena.used_bytes(), 1280);
        drop(slots);
        assert_eq!(arena.used_bytes(), 0);
        let again: Vec<SlotMut> = std::iter::from_fn(|| arena.take(128, Purpose::Save)).collect();
        assert_eq!(again.len(), 10);
    }

    #[test]
    fn memory_is_reused_only_after_the_last_reader_is_gone() {
        let arena = Arena::new(64, 0).unwrap();
        let mut slot = arena.take(3, Purpose::Save).unwrap();
        slot.copy_from_slice(b"abc");
        let first = slot.freeze();
        let second = first.slice(1..);
        drop(first);
        assert!(arena.take(3, Purpose::Save).is_none());
        assert_eq!(&second[..], b"bc");
        drop(second);
        let mut slot = arena.take(3, Purpose::Save).unwrap();
        slot.copy_from_slice(b"xyz");
        assert_eq!(&slot.freeze()[..], b"xyz");
    }

    #[test]
    fn slots_never_overlap() {
        let arena = Arena::new(64 * 64, 0).unwrap();
        let mut slots = Vec::new();
        for round in 0u8..40 {
            let len = usize::from(round) * 7 % 190 + 1;
            if let Some(mut slot) = arena.take(len, Purpose::Save) {
                slot.fill(round);
                slots.push((round, slot.freeze()));
            }
            if round % 3 == 0 && !slots.is_empty() {
                slots.remove(usize::from(round) % slots.len());
            }
        }
        assert!(slots.len() > 5);
        assert!(slots.iter().all(|(round, bytes)| bytes.iter().all(|byte| byte == round)));
    }

    #[test]
    fn saves_leave_the_reserve_to_loads() {
        let arena = Arena::new(64 * 4, 64 * 2).unwrap();
        let saves: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Save)).collect();
        assert_eq!(saves.len(), 2);
        assert!(!arena.has_room(64, Purpose::Save));
        let loads: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Load)).collect();
        assert_eq!(loads.len(), 2);
    }

    #[test]
    fn a_full_class_borrows_from_a_larger_one() {
        let arena = Arena::new(64 + 256, 0).unwrap();
        let small = arena.take(64, Purpose::Save).unwrap();
        drop(arena.take(256, Purpose::Save).unwrap());
        let borrowed = arena.take(64, Purpose::Save).unwrap();
        assert_eq!(borrowed.len(), 64);
        assert!(arena.take(64, Purpose::Save).is_none());
        drop((small, borrowed));
        assert!(arena.take(256, Purpose::Save).is_some());
    }

    #[test]
    fn readers_on_other_threads_see_what_was_written() {
        let arena = Arena::new(64 * 8, 0).unwrap();
        let mut slot = arena.take(64, Purpose::Save).unwrap();
        slot.fill(7);
        let bytes = slot.freeze();
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let bytes = bytes.clone();
                std::thread::spawn(move || bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>())
            })
            .collect();
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() == 64 * 7));
    }
}
