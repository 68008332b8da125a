//! The node's DRAM: one piece of memory taken at start, cut into equal slots, shared by readers without copying.
//!
//! A slot has one writer ([`SlotMut`]) until it is frozen into [`Bytes`]; its memory is given out again
//! only after the last reader dropped its copy. Every slot holds the largest frame of this node: a node
//! keeps blocks of one model, whose frames have one size, and with slots of several sizes whoever chooses
//! lengths could use up the ones that the others need. A shorter frame takes a whole slot and is charged
//! for it. Not here: which block has which slot (`store`).

#![allow(unsafe_code)]

mod memory;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

use memory::Memory;

/// Slots are whole pages, in bytes: what comes from SSD lands in them without a copy.
pub const SLOT_ALIGN_BYTES: usize = 4096;

/// Who wants a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Bytes that come from a client. Leaves the reserve alone.
    Save,
    /// Bytes that come from SSD. May use the reserve, so that SSD and DRAM can always trade places.
    Load,
}

/// How an arena is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaShape {
    /// Length of the largest frame, in bytes.
    pub frame_bytes_max: usize,
    /// Slots in all.
    pub slots: usize,
    /// Slots of these that saves leave alone.
    pub reserve_slots: usize,
}

/// The arena. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: Memory,
    slot_bytes: usize,
    slots: usize,
    reserve_slots: usize,
    state: Mutex<State>,
    freed: Notify,
}

/// Slots from `fresh` on were never given out.
#[derive(Debug, Default)]
struct State {
    fresh: usize,
    free: Vec<usize>,
}

/// Slot size for frames of up to `frame_bytes`.
#[must_use]
pub fn slot_bytes(frame_bytes: usize) -> usize {
    frame_bytes.max(1).next_multiple_of(SLOT_ALIGN_BYTES)
}

impl ArenaShape {
    /// Memory it takes, in bytes; nothing when no machine has so much.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        slot_bytes(self.frame_bytes_max).checked_mul(self.slots.max(1))
    }
}

impl Arena {
    /// Takes the memory of `shape` from the system: all of it, now.
    ///
    /// # Errors
    /// When the machine has not so much, or what the system said when it refused.
    pub fn new(shape: ArenaShape) -> std::io::Result<Arena> {
        let bytes = shape.bytes().ok_or(std::io::ErrorKind::OutOfMemory)?;
        let inner = Inner {
            memory: Memory::new(bytes)?,
            slot_bytes: slot_bytes(shape.frame_bytes_max),
            slots: shape.slots,
            reserve_slots: shape.reserve_slots,
            state: Mutex::new(State::default()),
            freed: Notify::new(),
        };
        Ok(Arena { inner: Arc::new(inner) })
    }

    /// A slot for `len` bytes; nothing while there is none, or when no frame may be so long.
    #[must_use]
    pub fn take(&self, len: usize, purpose: Purpose) -> Option<SlotMut> {
        let inner = &self.inner;
        if len > inner.slot_bytes {
            return None;
        }
        let mut state = inner.state.lock();
        if !inner.has_room(&state, purpose) {
            return None;
        }
        let number = state.free.pop().unwrap_or_else(|| {
            state.fresh += 1;
            state.fresh - 1
        });
        Some(SlotMut { slot: Slot { inner: Arc::clone(inner), number, len } })
    }

    /// Bytes in slots that are given out.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        let state = self.inner.state.lock();
        (state.fresh - state.free.len()) * self.inner.slot_bytes
    }

    /// Whether [`Self::take`] would give a slot now.
    #[must_use]
    pub fn has_room(&self, purpose: Purpose) -> bool {
        self.inner.has_room(&self.inner.state.lock(), purpose)
    }

    /// A handle by which another process of this host can map the arena's memory, to read it.
    ///
    /// # Errors
    /// What the system said.
    #[cfg(not(miri))]
    pub fn reader(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        self.inner.memory.reader()
    }

    /// Waits until some slot came back. Ask again after it; it may wake for nothing.
    pub async fn freed(&self) {
        self.inner.freed.notified().await;
    }
}

impl Inner {
    fn has_room(&self, state: &State, purpose: Purpose) -> bool {
        let left = self.slots - state.fresh + state.free.len();
        left > if purpose == Purpose::Save { self.reserve_slots } else { 0 }
    }
}

/// One slot, given back when dropped.
#[derive(Debug)]
struct Slot {
    inner: Arc<Inner>,
    number: usize,
    len: usize,
}

impl Slot {
    fn start(&self) -> *mut u8 {
        self.inner.memory.at(self.number * self.inner.slot_bytes)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.inner.state.lock().free.push(self.number);
        self.inner.freed.notify_waiters();
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping (`number` is below `slots` and `len` is at most
        // `slot_bytes`, both checked in `take`), the mapping lives as long as `inner`, it is initialised
        // (zero pages), and nobody writes it: the only writer, `SlotMut`, was consumed when this slot was
        // shared or owns it exclusively.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

/// A slot with its only writer.
#[derive(Debug)]
pub struct SlotMut {
    slot: Slot,
}

impl SlotMut {
    /// The whole slot, behind the frame's end too: direct I/O reads whole pages.
    #[must_use]
    pub fn whole_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref_mut`; the slot's memory reaches to the next slot's start, which is
        // `slot_bytes` away.
        unsafe { std::slice::from_raw_parts_mut(self.slot.start(), self.slot.inner.slot_bytes) }
    }

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
        // SAFETY: as in `Slot::as_ref`; `&mut self` makes this the only reference, because a number is
        // given out to one slot at a time and the ranges of different numbers do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.slot.start(), self.slot.len) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn arena(slots: usize, reserve_slots: usize) -> Arena {
        Arena::new(ArenaShape { frame_bytes_max: 128, slots, reserve_slots }).unwrap()
    }

    #[test]
    fn every_slot_can_be_had_whatever_lengths_came_before() {
        let arena = arena(10, 0);
        // Lengths of every kind, each held for a while: none of them may cost the largest its place.
        for len in 1..=128 {
            let slots: Vec<SlotMut> = std::iter::from_fn(|| arena.take(len, Purpose::Save)).collect();
            assert_eq!(slots.len(), 10, "frames of {len} bytes");
        }
        let small: Vec<SlotMut> = (1..=9).map(|len| arena.take(len, Purpose::Save).unwrap()).collect();
        assert_eq!(arena.used_bytes(), 9 * SLOT_ALIGN_BYTES);
        assert_eq!(arena.take(128, Purpose::Save).unwrap().len(), 128);
        drop(small);
        assert_eq!(arena.used_bytes(), 0);
    }

    #[test]
    fn room_is_what_taking_gives() {
        let arena = arena(3, 1);
        let mut slots = Vec::new();
        for purpose in [Purpose::Save, Purpose::Save, Purpose::Save, Purpose::Load, Purpose::Load] {
            let room = arena.has_room(purpose);
            let slot = arena.take(100, purpose);
            assert_eq!(room, slot.is_some());
            slots.extend(slot);
        }
        assert_eq!(slots.len(), 3);
        assert!(arena.take(SLOT_ALIGN_BYTES + 1, Purpose::Load).is_none(), "no frame is so long");
    }

    #[test]
    #[cfg(not(miri))]
    fn memory_that_the_machine_lacks_is_refused_at_start() {
        let shape = ArenaShape { frame_bytes_max: 1 << 20, slots: 1 << 24, reserve_slots: 0 };
        let cause = Arena::new(shape).unwrap_err().to_string();
        assert!(cause.contains("bytes available"), "{cause}");
    }

    #[test]
    #[cfg(not(miri))]
    fn memory_is_there_from_the_start() {
        let bytes = 32 << 20;
        let resident = || {
            // Huge pages that were set aside count apart.
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let rows =
                status.lines().filter(|line| line.starts_with("VmRSS") || line.starts_with("HugetlbPages"));
            let kib = rows.map(|row| row.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap());
            kib.sum::<usize>() << 10
        };
        let before = resident();
        let _arena = Arena::new(ArenaShape { frame_bytes_max: bytes, slots: 1, reserve_slots: 0 }).unwrap();
        assert!(resident() >= before + bytes * 3 / 4, "only an address range was taken");
    }

    #[test]
    fn memory_is_reused_only_after_the_last_reader_is_gone() {
        let arena = arena(1, 0);
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
        let arena = arena(30, 0);
        let mut slots = Vec::new();
        for round in 0u8..40 {
            let len = usize::from(round) * 7 % 128 + 1;
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
        let arena = arena(4, 2);
        let saves: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Save)).collect();
        assert_eq!(saves.len(), 2);
        assert!(!arena.has_room(Purpose::Save));
        let loads: Vec<SlotMut> = std::iter::from_fn(|| arena.take(64, Purpose::Load)).collect();
        assert_eq!(loads.len(), 2);
    }

    #[test]
    fn readers_on_other_threads_see_what_was_written() {
        let arena = arena(8, 0);
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
