//! The node's DRAM: memory mapped once at start, cut into slots, and shared with readers without
//! copying.
//!
//! A slot has one writer ([`SlotMut`]) until it is frozen into [`Bytes`]. Its memory is reused only
//! after the last reader dropped its copy. There is a class of slots for each frame length of the
//! node's layout (`classes`), never for lengths that callers choose. A shorter frame takes a slot
//! of the next class and is charged for it. Classes share equal slabs; any class may take an empty
//! slab (`slabs`).
//!
//! A caller that chooses lengths could leave a few small slots in every slab, while the largest
//! class needs whole slabs. So the store moves frames out of the emptiest slab into others of its
//! class ([`Arena::start_vacating`], [`Arena::copy_elsewhere`]). It stops when enough slabs are
//! empty, or when no class has a slab's worth of free slots. Frames are charged their share of a
//! slab, so frames within the node's capacity fit its slabs, and no class starves another. A slab
//! with a frame being read or written stays until that ends. If every slab of a class has such a
//! frame, other classes get none of them, but its own free slots are usable.
//!
//! Not here: the owner of each slot, and the time to move it (`store`).

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

use memory::ArenaMemory;
use slabs::{Slabs, SlotId};

/// Purpose of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Bytes from a client. Does not use the reserve.
    Save,
    /// Bytes from SSD without a waiting reader, or from a GPU. Uses at most half of the reserve.
    Prefetch,
    /// Bytes from SSD for a reader. May use the whole reserve, so that SSD and DRAM can always swap
    /// blocks.
    Load,
}

/// Shape of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaShape {
    /// Its slot classes.
    pub classes: SizeClasses,
    /// Total number of slabs.
    pub slabs: usize,
    /// Empty slabs that saves do not take: a load of any class finds a slot in them.
    pub reserve_slabs: usize,
}

/// Statistics of an arena, for status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaStats {
    /// Length of a slab in bytes.
    pub slab_bytes: usize,
    /// Total number of slabs.
    pub slabs: usize,
    /// Slabs that no class owns now.
    pub empty_slabs: usize,
    /// Empty slabs that saves do not take.
    pub reserve_slabs: usize,
    /// Frames moved by compaction since the start.
    pub moved_frames: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Each class, smallest first, with its usage.
    pub classes: Vec<(SizeClass, ClassUse)>,
}

/// The arena. Clones share it.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<ArenaInner>,
}

#[derive(Debug)]
struct ArenaInner {
    memory: ArenaMemory,
    classes: SizeClasses,
    state: Mutex<ArenaState>,
    freed: Notify,
}

#[derive(Debug)]
struct ArenaState {
    slabs: Slabs,
    moved_frames: u64,
    moved_bytes: u64,
}

impl ArenaShape {
    /// Slots of one class, for frames of up to `frame_bytes_max`; saves leave `reserve_slots` of
    /// them.
    #[must_use]
    pub fn equal(frame_bytes_max: usize, slots: usize, reserve_slots: usize) -> ArenaShape {
        let classes = SizeClasses::new(&[frame_bytes_max]);
        ArenaShape { classes, slabs: slots, reserve_slabs: reserve_slots }
    }

    /// Slabs for a tier of `tier_slabs`, plus `loads` slots of any class that saves do not take,
    /// plus `saves` slots for frames charged elsewhere.
    #[must_use]
    pub fn for_tier(classes: SizeClasses, tier_slabs: usize, loads: usize, saves: usize) -> ArenaShape {
        let reserve_slabs = classes.slabs_for(loads);
        let slabs = tier_slabs.saturating_add(reserve_slabs).saturating_add(classes.slabs_for(saves));
        ArenaShape { classes, slabs, reserve_slabs }
    }

    /// Memory it takes, in bytes; `None` if it overflows.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        self.classes.slab_bytes().checked_mul(self.slabs.max(1))
    }
}

impl Arena {
    /// Maps and populates all the memory of `shape` now.
    ///
    /// # Errors
    /// The machine has too little memory, or another system error.
    pub fn new(shape: ArenaShape) -> std::io::Result<Arena> {
        let bytes = shape.bytes().ok_or(std::io::ErrorKind::OutOfMemory)?;
        let memory = ArenaMemory::new(bytes)?;
        let slabs = Slabs::new(&shape.classes, shape.slabs, shape.reserve_slabs);
        let state = Mutex::new(ArenaState { slabs, moved_frames: 0, moved_bytes: 0 });
        Ok(Arena {
            inner: Arc::new(ArenaInner { memory, classes: shape.classes, state, freed: Notify::new() }),
        })
    }

    /// A slot for `len` bytes. `None` if none is free, or if `len` exceeds every class.
    #[must_use]
    pub fn take(&self, len: usize, purpose: Purpose) -> Option<SlotMut> {
        let class = self.inner.classes.find(len)?;
        let place = self.inner.state.lock().slabs.take(class, len, purpose)?;
        Some(self.slot(class, place, len))
    }

    /// Bytes in slots in use.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        let state = self.inner.state.lock();
        let uses = state.slabs.uses().iter().zip(self.inner.classes.list());
        uses.map(|(uses, class)| uses.used_slots * class.slot_bytes).sum()
    }

    /// Whether [`Self::take`] would return a slot now, for any length.
    #[must_use]
    pub fn has_room(&self, purpose: Purpose) -> bool {
        let state = self.inner.state.lock();
        (0..self.inner.classes.list().len()).all(|class| state.slabs.has_room(class, purpose))
    }

    /// Address and length of the memory, for devices that keep it mapped as long as this arena
    /// lives. `None` if registration would be too expensive.
    pub(crate) fn registrable(&self) -> Option<(*mut u8, usize)> {
        self.inner.memory.registrable()
    }

    /// Address of the memory, to find nearby devices.
    #[cfg(feature = "rdma")]
    pub(crate) fn address(&self) -> u64 {
        self.inner.memory.range().0.as_ptr() as u64
    }

    /// The whole memory, for network cards that read it: used and free slots of every tenant.
    #[cfg(feature = "rdma")]
    pub(crate) fn as_device_memory(&self) -> kvfleet_rdma::RdmaMemory {
        let (base, len) = self.inner.memory.range();
        // SAFETY: `len` bytes are mapped and readable at `base` until the last clone of this arena
        // is dropped, and the returned value holds a clone.
        unsafe { kvfleet_rdma::RdmaMemory::from_owner(base, len, self.clone()) }
    }

    /// Waits until a slot was freed. May wake up spuriously; try again after it.
    pub async fn freed(&self) {
        self.inner.freed.notified().await;
    }

    /// Cost of a frame of `len` bytes ([`SizeClasses::share_bytes`]).
    #[must_use]
    pub fn share_bytes(&self, len: usize) -> usize {
        self.inner.classes.share_bytes(len)
    }

    /// Counts of all slabs and classes.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let state = self.inner.state.lock();
        let (slabs, reserve_slabs) = state.slabs.counts();
        let classes = self.inner.classes.list().iter().copied().zip(state.slabs.uses().iter().copied());
        ArenaStats {
            slab_bytes: self.inner.classes.slab_bytes(),
            slabs,
            empty_slabs: state.slabs.empty_slabs(),
            reserve_slabs,
            moved_frames: state.moved_frames,
            moved_bytes: state.moved_bytes,
            classes: classes.collect(),
        }
    }

    /// Sets the owner of these bytes.
    pub fn set_owner(&self, bytes: &Bytes, owner: u32) {
        let mut state = self.inner.state.lock();
        if let Some((_, place)) = self.inner.place_of(&state.slabs, bytes) {
            state.slabs.set_owner(place, owner);
        }
    }

    /// If too few slabs are empty, chooses one to vacate, or continues with the current one, and
    /// returns the owners of its slots. `unread` returns an owner's bytes if no reader holds them;
    /// a slab with any other slot in use is skipped.
    #[must_use]
    pub fn start_vacating<'a>(&self, unread: impl Fn(u32) -> Option<&'a Bytes>) -> Option<Vec<u32>> {
        let is_movable = |class: usize, place: SlotId, owner: u32| {
            let start = self.inner.offset(class, place);
            let slot_bytes = self.inner.classes.list()[class].slot_bytes;
            let offset = unread(owner).and_then(|bytes| self.inner.memory.offset_of(bytes.as_ptr()));
            // An owner with bytes elsewhere had these before, and readers still hold them.
            offset.is_some_and(|offset| (start..start + slot_bytes).contains(&offset))
        };
        self.inner.state.lock().slabs.start_vacating(is_movable)
    }

    /// Copies these bytes to another slab of their class, for the same owner. `None` if there is no
    /// slot. The old slot is freed after its last reader.
    #[must_use]
    pub fn copy_elsewhere(&self, bytes: &Bytes) -> Option<Bytes> {
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

    /// Cancels vacating, so that the slab's free slots are usable again.
    pub fn cancel_vacating(&self) {
        self.inner.state.lock().slabs.cancel_vacating();
    }

    fn slot(&self, class: usize, place: SlotId, len: usize) -> SlotMut {
        let slot_bytes = self.inner.classes.list()[class].slot_bytes;
        let offset = self.inner.offset(class, place);
        SlotMut { slot: OwnedSlot { inner: Arc::clone(&self.inner), place, offset, slot_bytes, len } }
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

impl ArenaInner {
    /// Offset of a slot in the arena.
    fn offset(&self, class: usize, place: SlotId) -> usize {
        let slot_bytes = self.classes.list()[class].slot_bytes;
        place.slab as usize * self.classes.slab_bytes() + place.slot as usize * slot_bytes
    }

    /// Class and slot of these bytes; `None` if they are outside the arena.
    fn place_of(&self, slabs: &Slabs, bytes: &Bytes) -> Option<(usize, SlotId)> {
        let offset = self.memory.offset_of(bytes.as_ptr())?;
        let slab = u32::try_from(offset / self.classes.slab_bytes()).ok()?;
        let class = slabs.class_of(slab)?;
        let slot = offset % self.classes.slab_bytes() / self.classes.list().get(class)?.slot_bytes;
        Some((class, SlotId { slab, slot: u32::try_from(slot).ok()? }))
    }
}

/// One slot, freed when dropped.
#[derive(Debug)]
struct OwnedSlot {
    inner: Arc<ArenaInner>,
    place: SlotId,
    /// Offset in the arena.
    offset: usize,
    slot_bytes: usize,
    len: usize,
}

impl OwnedSlot {
    fn start(&self) -> *mut u8 {
        self.inner.memory.at(self.offset)
    }
}

impl Drop for OwnedSlot {
    fn drop(&mut self) {
        self.inner.state.lock().slabs.release(self.place, self.len);
        self.inner.freed.notify_waiters();
    }
}

impl AsRef<[u8]> for OwnedSlot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies inside the mapping. The slot id is of one of its slabs, a slab
        // holds all slots of its class, and `find` ensured that `len` is at most `slot_bytes`. The
        // mapping lives as long as `inner` and is initialised (zero pages). No writer exists: the
        // only writer, `SlotMut`, was consumed when this slot was shared, or owns it exclusively.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

/// A slot with its only writer.
#[derive(Debug)]
pub struct SlotMut {
    slot: OwnedSlot,
}

impl SlotMut {
    /// The whole slot, including the space after the frame: direct I/O reads whole pages.
    #[must_use]
    pub fn whole_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref_mut`; the slot's memory is `slot_bytes` long, and the next slot
        // begins after it.
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
        // SAFETY: as in `OwnedSlot::as_ref`. `&mut self` makes this the only reference. A slot id
        // is given to one slot at a time. Slots of one slab have one class and so do not overlap. A
        // slab changes its class only when none of its slots is in use.
        unsafe { std::slice::from_raw_parts_mut(self.slot.start(), self.slot.len) }
    }
}
