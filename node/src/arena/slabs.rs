//! Slab allocation: which slots of an arena are in use, with lists and counts. Pure: no memory
//! access.
//!
//! A class takes an empty slab, and the slab is empty again when its last slot is freed. Slabs with
//! free slots are listed by class and fill level. A slot is taken from the fullest slab, so that
//! the emptiest ones can drain. Every call takes a constant number of steps;
//! [`Slabs::start_vacating`] also scans the slots of a few slabs. Not here: the bytes (`super`) and
//! the time of compaction (`store`).

use super::Purpose;
use super::classes::{SizeClass, SizeClasses};

/// No slab, no slot, no owner.
const NONE: u32 = u32::MAX;

/// Lists per class, by fill level.
const FILL_LEVELS: usize = 4;

/// Maximum slabs of one list examined for one that can be vacated. The next call begins after them.
const CANDIDATES_PER_LIST: usize = 4;

/// A slot: its slab and its index in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SlotId {
    pub(crate) slab: u32,
    pub(crate) slot: u32,
}

/// State of a slot. Slots beyond the highest ever used have none.
#[derive(Clone, Copy, Debug)]
enum SlotState {
    /// Free, with the next free slot.
    Free { next: u32 },
    /// In use, with its owner once known.
    Used { owner: u32 },
}

#[derive(Debug)]
struct Slab {
    class: usize,
    used: u32,
    slots: Vec<SlotState>,
    free: u32,
    /// The list it is in; `None` if it is full, empty or being vacated.
    list: Option<usize>,
    before: u32,
    after: u32,
    /// Provides no slots, because its frames are being moved elsewhere.
    vacating: bool,
}

#[derive(Clone, Copy, Debug)]
struct SlabList {
    first: u32,
    last: u32,
}

/// Usage of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassUse {
    /// Slabs it owns.
    pub slabs: usize,
    /// Slots in use.
    pub used_slots: usize,
    /// Bytes of frames in them.
    pub frame_bytes: usize,
    /// Free slots in a slab being vacated, which cannot be taken.
    vacating_slots: usize,
}

/// All slabs of an arena.
#[derive(Debug)]
pub(crate) struct Slabs {
    classes: Vec<SizeClass>,
    uses: Vec<ClassUse>,
    /// Slabs ever used; more may be created, up to `count`.
    slabs: Vec<Slab>,
    count: usize,
    reserve: usize,
    empty: Vec<u32>,
    /// The slab being vacated; one at a time, so that others stay usable.
    vacating: Option<u32>,
    lists: Vec<SlabList>,
    /// Links changed and slots scanned, for tests of a call's cost.
    #[cfg(test)]
    pub(crate) steps: usize,
}

impl Slabs {
    /// `count` empty slabs; saves leave `reserve` of them.
    pub(crate) fn new(classes: &SizeClasses, count: usize, reserve: usize) -> Slabs {
        let classes = classes.list().to_vec();
        Slabs {
            uses: vec![ClassUse::default(); classes.len()],
            lists: vec![SlabList { first: NONE, last: NONE }; classes.len() * FILL_LEVELS],
            classes,
            slabs: Vec::new(),
            count: count.min(NONE as usize),
            reserve,
            empty: Vec::new(),
            vacating: None,
            #[cfg(test)]
            steps: 0,
        }
    }

    /// Takes a slot of this class for a frame of `len` bytes.
    pub(crate) fn take(&mut self, class: usize, len: usize, purpose: Purpose) -> Option<SlotId> {
        let (may_fill, may_open) = self.permissions(purpose);
        let slab = self.fullest(class).filter(|_| may_fill);
        let slab = slab.or_else(|| may_open.then(|| self.assign_slab(class)).flatten())?;
        self.take_from(slab, len)
    }

    /// Takes a slot of the class's existing slabs: a moved frame must not open another slab.
    pub(crate) fn take_elsewhere(&mut self, class: usize, len: usize) -> Option<SlotId> {
        let slab = self.fullest(class)?;
        self.take_from(slab, len)
    }

    /// Whether [`Self::take`] would return a slot of this class now.
    pub(crate) fn has_room(&self, class: usize, purpose: Purpose) -> bool {
        let (may_fill, may_open) = self.permissions(purpose);
        may_open || (may_fill && self.fullest(class).is_some())
    }

    /// Whether slots of used slabs may be taken, and whether an empty slab may be. Below the
    /// reserve, saves take neither: compaction needs the free slots to restore it.
    fn permissions(&self, purpose: Purpose) -> (bool, bool) {
        let kept = match purpose {
            Purpose::Save => self.reserve,
            Purpose::Prefetch => self.reserve / 2,
            Purpose::Load => 0,
        };
        let left = self.empty_slabs();
        (left >= kept, left > kept)
    }

    /// Frees a slot that held a frame of `len` bytes.
    pub(crate) fn release(&mut self, place: SlotId, len: usize) {
        let Some(slab) = self.slabs.get_mut(place.slab as usize) else { return };
        let Some(slot) = slab.slots.get_mut(place.slot as usize) else { return };
        *slot = SlotState::Free { next: slab.free };
        slab.free = place.slot;
        slab.used -= 1;
        let (class, used, leaving) = (slab.class, slab.used, slab.vacating);
        let uses = &mut self.uses[class];
        uses.used_slots -= 1;
        uses.frame_bytes -= len;
        uses.vacating_slots += usize::from(leaving);
        if used == 0 { self.release_slab(place.slab) } else { self.list(place.slab) }
    }

    /// Sets the owner of a slot.
    pub(crate) fn set_owner(&mut self, place: SlotId, owner: u32) {
        let slab = self.slabs.get_mut(place.slab as usize);
        if let Some(slot @ SlotState::Used { .. }) =
            slab.and_then(|slab| slab.slots.get_mut(place.slot as usize))
        {
            *slot = SlotState::Used { owner };
        }
    }

    /// The owner of a slot, if known.
    pub(crate) fn owner(&self, place: SlotId) -> Option<u32> {
        match self.slabs.get(place.slab as usize)?.slots.get(place.slot as usize)? {
            SlotState::Used { owner } => Some(*owner).filter(|owner| *owner != NONE),
            SlotState::Free { .. } => None,
        }
    }

    /// The class of a slab in use.
    pub(crate) fn class_of(&self, slab: u32) -> Option<usize> {
        self.slabs.get(slab as usize).filter(|slab| slab.used > 0).map(|slab| slab.class)
    }

    /// The slab being vacated.
    #[cfg(test)]
    pub(crate) fn vacating(&self) -> Option<u32> {
        self.vacating
    }

    /// If the empty slabs do not exceed the reserve, chooses a slab to vacate and returns its
    /// owners. Its frames fit into other slabs of their class. Until it is empty it provides no
    /// slots.
    ///
    /// `is_movable` tells for a slot, its class and its owner whether the slot is freed as soon as
    /// its frame is moved. A slab with any other slot is skipped: a frame being read or written
    /// would block the whole slab. A slab already chosen comes first, and is cancelled if that has
    /// changed.
    pub(crate) fn start_vacating(
        &mut self,
        is_movable: impl Fn(usize, SlotId, u32) -> bool,
    ) -> Option<Vec<u32>> {
        if let Some(slab) = self.vacating {
            if self.empty_slabs() <= self.reserve && self.can_vacate(slab, &is_movable) {
                return Some(self.owners(slab));
            }
            self.cancel_vacating();
        }
        if self.empty_slabs() > self.reserve {
            return None;
        }
        let classes = 0..self.classes.len();
        let candidates: Vec<u32> = classes.filter_map(|class| self.emptiest(class, &is_movable)).collect();
        let slab = candidates.into_iter().min_by_key(|slab| self.move_bytes(*slab))?;
        self.unlist(slab);
        self.vacating = Some(slab);
        let taken = &mut self.slabs[slab as usize];
        taken.vacating = true;
        let free = self.classes[taken.class].slots_per_slab - taken.used as usize;
        self.uses[taken.class].vacating_slots += free;
        Some(self.owners(slab))
    }

    /// Cancels vacating.
    pub(crate) fn cancel_vacating(&mut self) {
        let Some(slab) = self.vacating.take() else { return };
        let Some(taken) = self.slabs.get_mut(slab as usize) else { return };
        taken.vacating = false;
        let free = self.classes[taken.class].slots_per_slab - taken.used as usize;
        self.uses[taken.class].vacating_slots -= free;
        self.list(slab);
    }

    fn owners(&self, slab: u32) -> Vec<u32> {
        let owners = self.slabs[slab as usize].slots.iter().filter_map(|slot| match slot {
            SlotState::Used { owner } if *owner != NONE => Some(*owner),
            _ => None,
        });
        owners.collect()
    }

    /// Whether all slots of a slab are freed as soon as their frames are moved.
    fn can_vacate(&self, number: u32, is_movable: &impl Fn(usize, SlotId, u32) -> bool) -> bool {
        let slab = &self.slabs[number as usize];
        (0..).zip(&slab.slots).all(|(slot, state)| match state {
            SlotState::Used { owner } => {
                *owner != NONE && is_movable(slab.class, SlotId { slab: number, slot }, *owner)
            }
            SlotState::Free { .. } => true,
        })
    }

    /// Slabs that no class owns.
    pub(crate) fn empty_slabs(&self) -> usize {
        self.count - self.slabs.len() + self.empty.len()
    }

    /// Total number of slabs, and the reserve.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.count, self.reserve)
    }

    /// Usage of the classes, in their order.
    pub(crate) fn uses(&self) -> &[ClassUse] {
        &self.uses
    }

    /// Whether the class's usable free slots amount to a whole slab.
    fn can_spare_a_slab(&self, class: usize) -> bool {
        let (per_slab, uses) = (self.classes[class].slots_per_slab, self.uses[class]);
        per_slab > 1 && uses.slabs * per_slab - uses.used_slots - uses.vacating_slots >= per_slab
    }

    fn move_bytes(&self, slab: u32) -> usize {
        let slab = &self.slabs[slab as usize];
        slab.used as usize * self.classes[slab.class].slot_bytes
    }

    fn fullest(&self, class: usize) -> Option<u32> {
        self.lists[class * FILL_LEVELS..][..FILL_LEVELS]
            .iter()
            .rev()
            .map(|list| list.first)
            .find(|slab| *slab != NONE)
    }

    /// The emptiest slab of a class that can be vacated now. Others move to the end of their list.
    fn emptiest(&mut self, class: usize, is_movable: &impl Fn(usize, SlotId, u32) -> bool) -> Option<u32> {
        if !self.can_spare_a_slab(class) {
            return None;
        }
        for list in class * FILL_LEVELS..(class + 1) * FILL_LEVELS {
            for _ in 0..CANDIDATES_PER_LIST {
                let slab = self.lists[list].first;
                if slab == NONE {
                    break;
                }
                if self.can_vacate(slab, is_movable) {
                    return Some(slab);
                }
                self.unlist(slab);
                self.list(slab);
            }
        }
        None
    }

    /// Assigns an empty slab to this class.
    fn assign_slab(&mut self, class: usize) -> Option<u32> {
        let slab = self.empty.pop().or_else(|| {
            let fresh = u32::try_from(self.slabs.len()).ok().filter(|_| self.slabs.len() < self.count)?;
            let (slots, list) = (Vec::new(), None);
            let slab =
                Slab { class, used: 0, slots, free: NONE, list, before: NONE, after: NONE, vacating: false };
            self.slabs.push(slab);
            Some(fresh)
        })?;
        self.slabs[slab as usize].class = class;
        self.uses[class].slabs += 1;
        Some(slab)
    }

    /// Releases a slab after its last slot was freed.
    fn release_slab(&mut self, number: u32) {
        self.unlist(number);
        let slab = &mut self.slabs[number as usize];
        slab.slots.clear();
        slab.free = NONE;
        let uses = &mut self.uses[slab.class];
        uses.slabs -= 1;
        if std::mem::take(&mut slab.vacating) {
            self.vacating = None;
            uses.vacating_slots -= self.classes[slab.class].slots_per_slab;
        }
        self.empty.push(number);
    }

    /// Takes a slot of a slab that has a free one.
    fn take_from(&mut self, number: u32, len: usize) -> Option<SlotId> {
        let slab = self.slabs.get_mut(number as usize)?;
        let used = SlotState::Used { owner: NONE };
        let slot = match slab.slots.get_mut(slab.free as usize) {
            Some(free) => {
                let SlotState::Free { next } = std::mem::replace(free, used) else { return None };
                std::mem::replace(&mut slab.free, next)
            }
            None => {
                slab.slots.push(used);
                u32::try_from(slab.slots.len() - 1).ok()?
            }
        };
        slab.used += 1;
        let uses = &mut self.uses[slab.class];
        uses.used_slots += 1;
        uses.frame_bytes += len;
        self.list(number);
        Some(SlotId { slab: number, slot })
    }

    /// Moves a slab to the list of its current fill level.
    fn list(&mut self, number: u32) {
        let slab = &self.slabs[number as usize];
        let (used, all) = (slab.used as usize, self.classes[slab.class].slots_per_slab);
        let wanted = (!slab.vacating && used > 0 && used < all)
            .then(|| slab.class * FILL_LEVELS + used * FILL_LEVELS / all);
        if slab.list == wanted {
            return;
        }
        self.unlist(number);
        let Some(list) = wanted else { return };
        let last = std::mem::replace(&mut self.lists[list].last, number);
        match self.slabs.get_mut(last as usize) {
            Some(before) => before.after = number,
            None => self.lists[list].first = number,
        }
        let slab = &mut self.slabs[number as usize];
        (slab.list, slab.before, slab.after) = (wanted, last, NONE);
        #[cfg(test)]
        {
            self.steps += 1;
        }
    }

    fn unlist(&mut self, number: u32) {
        let slab = &mut self.slabs[number as usize];
        let Some(list) = slab.list.take() else { return };
        let (before, after) = (slab.before, slab.after);
        match self.slabs.get_mut(before as usize) {
            Some(slab) => slab.after = after,
            None => self.lists[list].first = after,
        }
        match self.slabs.get_mut(after as usize) {
            Some(slab) => slab.before = before,
            None => self.lists[list].last = before,
        }
        #[cfg(test)]
        {
            self.steps += 1;
        }
    }
}
