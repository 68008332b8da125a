//! The node's DRAM: one piece of memory taken at start, cut into slots, shared by readers without copying.
//!
//! A slot has one writer ([`SlotMut`]) until it is frozen into [`Bytes`]; its memory is given out again
//! only after the last reader dropped its copy. Slots come in a class for each frame length that the node's layout
//! gives (`classes`), never in lengths that callers choose: a shorter frame takes a slot of the next class and is
//! charged for it. Classes share equal slabs, and a slab that is empty is anybody's (`slabs`).
//!
//! Whoever chooses lengths can therefore leave a few small slots in every slab, where the largest class needs whole
//! ones. The store then moves what the emptiest slab holds into others of its class ([`Arena::vacate`],
//! [`Arena::moved`]), until enough slabs are empty or no class has a whole slab's worth of free slots. What is charged
//! for frames is their share of a slab, so frames that are within the node's room are then within its slabs, and no class
//! starves another. Slabs of which anything is being read or written stay as they are until that ends: while there
//! is such a frame in each slab of a class, others get none of them, but its own free slots can be had.
//! Not here: which block has which slot, and when to move any (`store`).

#![allow(unsafe_code)]

mod classes;
mod memory;
pub(crate) mod slabs;
#[cfg(test)]
mod tests;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;
use kvfleet_transport::SharedArena;
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use classes::{CLASSES_MAX, SLOT_ALIGN_BYTES, SizeClass, SizeClasses, slot_bytes};
pub use slabs::ClassUse;

use memory::Memory;
use slabs::{Place, Slabs};

/// Who wants a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Bytes that come from a client. Leaves the reserve alone.
    Save,
    /// Bytes that come from SSD before anybody waits for them, or from a GPU. Leaves half of the reserve to those from SSD
    /// that somebody waits for.
    Prefetch,
    /// Bytes that come from SSD. May use the reserve, so that SSD and DRAM can always trade places.
    Load,
}

/// How an arena is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaShape {
    /// Its slots.
    pub classes: SizeClasses,
    /// Slabs in all.
    pub slabs: usize,
    /// Slabs of these that saves leave empty: a load of any class finds room in them.
    pub reserve_slabs: usize,
}

/// What an arena has, for status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaNumbers {
    /// Length of a slab in bytes.
    pub slab_bytes: usize,
    /// Slabs in all.
    pub slabs: usize,
    /// Slabs that belong to no class now.
    pub empty_slabs: usize,
    /// Slabs that saves leave empty.
    pub reserve_slabs: usize,
    /// Frames that were moved so that a slab became empty, since the start.
    pub moved_frames: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Each class, smallest first, and what it has.
    pub classes: Vec<(SizeClass, ClassUse)>,
}

/// The arena. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: Memory,
    classes: SizeClasses,
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Debug)]
struct State {
    slabs: Slabs,
    moved_frames: u64,
    moved_bytes: u64,
}

impl ArenaShape {
    /// Slots of one class, for frames of up to `frame_bytes_max`, of which saves leave `reserve_slots` alone.
    #[must_use]
    pub fn equal(frame_bytes_max: usize, slots: usize, reserve_slots: usize) -> ArenaShape {
        let classes = SizeClasses::new(&[frame_bytes_max]);
        ArenaShape { classes, slabs: slots, reserve_slabs: reserve_slots }
    }

    /// Room for frames whose shares fill `tier_slabs` slabs, and beside them for `loads` slots of any classes, which
    /// saves leave alone, and for `saves` slots whose frames are charged elsewhere already.
    #[must_use]
    pub fn around(classes: SizeClasses, tier_slabs: usize, loads: usize, saves: usize) -> ArenaShape {
        let reserve_slabs = classes.slabs_for(loads);
        let slabs = tier_slabs.saturating_add(reserve_slabs).saturating_add(classes.slabs_for(saves));
        ArenaShape { classes, slabs, reserve_slabs }
    }

    /// Memory it takes, in bytes; nothing when no machine has so much.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        self.classes.slab_bytes().checked_mul(self.slabs.max(1))
    }
}

impl Arena {
    /// Takes the memory of `shape` from the system: all of it, now.
    ///
    /// # Errors
    /// When the machine has not so much, or what the system said when it refused.
    pub fn new(shape: ArenaShape) -> std::io::Result<Arena> {
        let bytes = shape.bytes().ok_or(std::io::ErrorKind::OutOfMemory)?;
        let memory = Memory::new(bytes)?;
        let slabs = Slabs::new(&shape.classes, shape.slabs, shape.reserve_slabs);
        let state = Mutex::new(State { slabs, moved_frames: 0, moved_bytes: 0 });
        Ok(Arena { inner: Arc::new(Inner { memory, classes: shape.classes, state, freed: Notify::new() }) })
    }

    /// A slot for `len` bytes; nothing while there is none, or when no frame may be so long.
    #[must_use]
    pub fn take(&self, len: usize, purpose: Purpose) -> Option<SlotMut> {
        let class = self.inner.classes.find(len)?;
        let place = self.inner.state.lock().slabs.take(class, len, purpose)?;
        Some(self.slot(class, place, len))
    }

    /// Bytes in slots that are given out.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        let state = self.inner.state.lock();
        let uses = state.slabs.uses().iter().zip(self.inner.classes.list());
        uses.map(|(uses, class)| uses.used_slots * class.slot_bytes).sum()
    }

    /// Whether [`Self::take`] would give a slot now, whatever its length.
    #[must_use]
    pub fn has_room(&self, purpose: Purpose) -> bool {
        let state = self.inner.state.lock();
        (0..self.inner.classes.list().len()).all(|class| state.slabs.has_room(class, purpose))
    }

    /// Where the memory lies and how long it is, for devices that keep it mapped as long as this arena lives; none when
    /// that would cost them too much.
    pub(crate) fn registrable(&self) -> Option<(*mut u8, usize)> {
        self.inner.memory.registrable()
    }

    /// Where it lies, for whoever asks what is near.
    #[cfg(feature = "rdma")]
    pub(crate) fn address(&self) -> u64 {
        self.inner.memory.range().0.as_ptr() as u64
    }

    /// All of it, for network cards that read it: slots, whoever has them, and what lies free between.
    #[cfg(feature = "rdma")]
    pub(crate) fn as_device_memory(&self) -> kvfleet_transport::rdma::Memory {
        let (base, len) = self.inner.memory.range();
        // SAFETY: so many bytes are mapped there, readable, at the same place until the last clone of this arena is gone, one
        // of which goes with what is made here.
        unsafe { kvfleet_transport::rdma::Memory::of(base, len, self.clone()) }
    }

    /// Waits until some slot came back. Ask again after it; it may wake for nothing.
    pub async fn freed(&self) {
        self.inner.freed.notified().await;
    }

    /// What a frame of `len` bytes costs ([`SizeClasses::share_bytes`]).
    #[must_use]
    pub fn share_bytes(&self, len: usize) -> usize {
        self.inner.classes.share_bytes(len)
    }

    /// Counts of all slabs and classes.
    #[must_use]
    pub fn numbers(&self) -> ArenaNumbers {
        let state = self.inner.state.lock();
        let (slabs, reserve_slabs) = state.slabs.counts();
        let classes = self.inner.classes.list().iter().copied().zip(state.slabs.uses().iter().copied());
        ArenaNumbers {
            slab_bytes: self.inner.classes.slab_bytes(),
            slabs,
            empty_slabs: state.slabs.empty_slabs(),
            reserve_slabs,
            moved_frames: state.moved_frames,
            moved_bytes: state.moved_bytes,
            classes: classes.collect(),
        }
    }

    /// Says whose bytes these are.
    pub fn set_owner(&self, bytes: &Bytes, owner: u32) {
        let mut state = self.inner.state.lock();
        if let Some((_, place)) = self.inner.place_of(&state.slabs, bytes) {
            state.slabs.set_owner(place, owner);
        }
    }

    /// When there are too few empty slabs to give any class one: marks one to be emptied, or goes on with the one that is
    /// marked, and names the owners of what lies in it. `unread` gives an owner's bytes when nobody reads them; a slab
    /// that holds anything else stays.
    #[must_use]
    pub fn vacate<'a>(&self, unread: impl Fn(u32) -> Option<&'a Bytes>) -> Option<Vec<u32>> {
        let is_movable = |class: usize, place: Place, owner: u32| {
            let start = self.inner.offset(class, place);
            let slot_bytes = self.inner.classes.list()[class].slot_bytes;
            let offset = unread(owner).and_then(|bytes| self.inner.memory.offset_of(bytes.as_ptr()));
            // An owner whose bytes lie elsewhere had these before, and readers have them still.
            offset.is_some_and(|offset| (start..start + slot_bytes).contains(&offset))
        };
        self.inner.state.lock().slabs.vacate(is_movable)
    }

    /// A copy of these bytes in another slab of their class, for the same owner; nothing when there is no slot. The
    /// first one's slot comes back when its last reader is gone.
    #[must_use]
    pub fn moved(&self, bytes: &Bytes) -> Option<Bytes> {
        let (class, place) = {
            let mut state = self.inner.state.lock();
            let (class, from) = self.inner.place_of(&state.slabs, bytes)?;
            let owner = state.slabs.owner(from);
            let place = state.slabs.take_elsewhere(class, bytes.len())?;
            if let Some(owner) = owner {
                state.slabs.set_owner(place, owner);
            }
            state.moved_frames += 1;
            state.moved_bytes += bytes.len() as u64;
            (class, place)
        };
        let mut slot = self.slot(class, place, bytes.len());
        slot.copy_from_slice(bytes);
        Some(slot.freeze())
    }

    /// The slab that is being vacated, if any, gives slots again.
    pub fn stay(&self) {
        self.inner.state.lock().slabs.stay();
    }

    fn slot(&self, class: usize, place: Place, len: usize) -> SlotMut {
        let slot_bytes = self.inner.classes.list()[class].slot_bytes;
        let offset = self.inner.offset(class, place);
        SlotMut { slot: Slot { inner: Arc::clone(&self.inner), place, offset, slot_bytes, len } }
    }
}

impl SharedArena for Arena {
    fn reader(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        self.inner.memory.reader()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.memory.len() as u64
    }

    fn offset_of(&self, bytes: &Bytes) -> Option<u64> {
        let offset = self.inner.memory.offset_of(bytes.as_ptr())?;
        let end = offset.checked_add(bytes.len())?;
        (end <= self.inner.memory.len()).then_some(offset as u64)
    }
}

impl Inner {
    /// Where a slot begins.
    fn offset(&self, class: usize, place: Place) -> usize {
        let slot_bytes = self.classes.list()[class].slot_bytes;
        place.slab as usize * self.classes.slab_bytes() + place.slot as usize * slot_bytes
    }

    /// The class and slot in which bytes lie; none for bytes from elsewhere.
    fn place_of(&self, slabs: &Slabs, bytes: &Bytes) -> Option<(usize, Place)> {
        let offset = self.memory.offset_of(bytes.as_ptr())?;
        let slab = u32::try_from(offset / self.classes.slab_bytes()).ok()?;
        let class = slabs.class_of(slab)?;
        let slot = offset % self.classes.slab_bytes() / self.classes.list().get(class)?.slot_bytes;
        Some((class, Place { slab, slot: u32::try_from(slot).ok()? }))
    }
}

/// One slot, given back when dropped.
#[derive(Debug)]
struct Slot {
    inner: Arc<Inner>,
    place: Place,
    /// Where it begins in the arena.
    offset: usize,
    slot_bytes: usize,
    len: usize,
}

impl Slot {
    fn start(&self) -> *mut u8 {
        self.inner.memory.at(self.offset)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.inner.state.lock().slabs.give_back(self.place, self.len);
        self.inner.freed.notify_waiters();
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping (the place is of one of its slabs, and a slab holds all
        // slots of its class; `len` is at most `slot_bytes`, as `find` saw to), the mapping lives as long as
        // `inner`, it is initialised (zero pages), and nobody writes it: the only writer, `SlotMut`, was consumed
        // when this slot was shared or owns it exclusively.
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
        // SAFETY: as in `deref_mut`; the slot's memory is `slot_bytes` long, and the next slot begins behind it.
        unsafe { std::slice::from_raw_parts_mut(self.slot.start(), self.slot.slot_bytes) }
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
        // SAFETY: as in `Slot::as_ref`; `&mut self` makes this the only reference, because a place is given out to
        // one slot at a time, slots of one slab are all of one class and so do not overlap, and a slab changes its
        // class only when none of its slots is given out.
        unsafe { std::slice::from_raw_parts_mut(self.slot.start(), self.slot.len) }
    }
}
