//! Which slots of an arena are whose: slabs, their lists, and counts. Pure: places in, places out, no memory.
//!
//! A slab belongs to the class that took it when it was empty, and to nobody again when its last slot comes back.
//! Slabs with room stand in a list for their class and for how full they are; a slot is taken from the fullest,
//! so that the emptiest have a chance to become empty. Every call costs the same few steps whatever the arena's size;
//! [`Slabs::vacate`] also reads the slots of a few slabs. Not here: the bytes (`super`), and when to pack (`store`).

use super::Purpose;
use super::classes::{SizeClass, SizeClasses};

/// No slab, no slot, no owner.
const NONE: u32 = u32::MAX;

/// Lists of each class, by how full their slabs are.
const FILLS: usize = 4;

/// Slabs of one list that are looked at, at most, for one that can be emptied now. The next call begins behind them.
const TRIES: usize = 4;

/// A slot: which slab, which slot of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) slab: u32,
    pub(crate) slot: u32,
}

/// A slot's state; those behind the last that was ever used have none.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// Free, and the free slot after it.
    Free { next: u32 },
    /// Given out, and what it holds, once that is known.
    Used { owner: u32 },
}

#[derive(Debug)]
struct Slab {
    class: usize,
    used: u32,
    slots: Vec<Slot>,
    free: u32,
    /// The list it stands in; none when it is full, empty or being vacated.
    list: Option<usize>,
    before: u32,
    after: u32,
    /// Gives no slots: what it holds is moved elsewhere.
    leaving: bool,
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
}

/// What one class has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassUse {
    /// Slabs that belong to it.
    pub slabs: usize,
    /// Slots that are given out.
    pub used_slots: usize,
    /// Frames in them, in bytes.
    pub frame_bytes: usize,
    /// Slots of slabs being vacated that are free, and cannot be had.
    leaving_slots: usize,
}

/// All slabs of an arena.
#[derive(Debug)]
pub(crate) struct Slabs {
    classes: Vec<SizeClass>,
    uses: Vec<ClassUse>,
    /// Those that were used before; there may be more, up to `count`.
    slabs: Vec<Slab>,
    count: usize,
    reserve: usize,
    empty: Vec<u32>,
    /// The slab that is being vacated; one at a time, so that no others stand idle meanwhile.
    leaving: Option<u32>,
    lists: Vec<List>,
    /// Links changed and slots looked at, so that tests see what a call costs.
    #[cfg(test)]
    pub(crate) steps: usize,
}

impl Slabs {
    /// `count` empty slabs, of which saves leave `reserve` alone.
    pub(crate) fn new(classes: &SizeClasses, count: usize, reserve: usize) -> Slabs {
        let classes = classes.list().to_vec();
        Slabs {
            uses: vec![ClassUse::default(); classes.len()],
            lists: vec![List { first: NONE, last: NONE }; classes.len() * FILLS],
            classes,
            slabs: Vec::new(),
            count: count.min(NONE as usize),
            reserve,
            empty: Vec::new(),
            leaving: None,
            #[cfg(test)]
            steps: 0,
        }
    }

    /// A slot of this class for a frame of `len` bytes.
    pub(crate) fn take(&mut self, class: usize, len: usize, purpose: Purpose) -> Option<Place> {
        let (may_fill, may_open) = self.allowed(purpose);
        let slab = self.fullest(class).filter(|_| may_fill);
        let slab = slab.or_else(|| may_open.then(|| self.open(class)).flatten())?;
        self.fill(slab, len)
    }

    /// A slot of the slabs that the class has already: what is moved there empties another one.
    pub(crate) fn take_elsewhere(&mut self, class: usize, len: usize) -> Option<Place> {
        let slab = self.fullest(class)?;
        self.fill(slab, len)
    }

    /// Whether [`Self::take`] would give a slot of this class now.
    pub(crate) fn has_room(&self, class: usize, purpose: Purpose) -> bool {
        let (may_fill, may_open) = self.allowed(purpose);
        may_open || (may_fill && self.fullest(class).is_some())
    }

    /// Whether slots of slabs in use may be taken, and whether an empty slab may be. Saves also leave slots of slabs in
    /// use alone while the reserve is not whole: what they hold is what packing makes it whole of.
    fn allowed(&self, purpose: Purpose) -> (bool, bool) {
        let kept = match purpose {
            Purpose::Save => self.reserve,
            Purpose::Prefetch => self.reserve / 2,
            Purpose::Load => 0,
        };
        let left = self.empty_slabs();
        (left >= kept, left > kept)
    }

    /// Takes a slot back that held a frame of `len` bytes.
    pub(crate) fn give_back(&mut self, place: Place, len: usize) {
        let Some(slab) = self.slabs.get_mut(place.slab as usize) else { return };
        let Some(slot) = slab.slots.get_mut(place.slot as usize) else { return };
        *slot = Slot::Free { next: slab.free };
        slab.free = place.slot;
        slab.used -= 1;
        let (class, used, leaving) = (slab.class, slab.used, slab.leaving);
        let uses = &mut self.uses[class];
        uses.used_slots -= 1;
        uses.frame_bytes -= len;
        uses.leaving_slots += usize::from(leaving);
        if used == 0 { self.close(place.slab) } else { self.list(place.slab) }
    }

    /// Says what a slot holds.
    pub(crate) fn set_owner(&mut self, place: Place, owner: u32) {
        let slab = self.slabs.get_mut(place.slab as usize);
        if let Some(slot @ Slot::Used { .. }) = slab.and_then(|slab| slab.slots.get_mut(place.slot as usize))
        {
            *slot = Slot::Used { owner };
        }
    }

    /// What a slot holds, as far as it was said.
    pub(crate) fn owner(&self, place: Place) -> Option<u32> {
        match self.slabs.get(place.slab as usize)?.slots.get(place.slot as usize)? {
            Slot::Used { owner } => Some(*owner).filter(|owner| *owner != NONE),
            Slot::Free { .. } => None,
        }
    }

    /// The class of a slab that is in use.
    pub(crate) fn class_of(&self, slab: u32) -> Option<usize> {
        self.slabs.get(slab as usize).filter(|slab| slab.used > 0).map(|slab| slab.class)
    }

    /// The slab whose frames are to be moved elsewhere.
    #[cfg(test)]
    pub(crate) fn leaving(&self) -> Option<u32> {
        self.leaving
    }

    /// When fewer slabs are empty than the reserve and one for a save: chooses one to be emptied, whose frames find
    /// room in other slabs of their class, and says whose they are. Until it is empty it gives no slots.
    ///
    /// `is_movable` says of a slot, its class and its owner whether it comes back as soon as its frame is moved. A slab
    /// with any that does not is left alone: what is read, or still written, would keep all of it from everybody.
    /// A slab that was begun comes first, and stays after all when that has changed.
    pub(crate) fn vacate(&mut self, is_movable: impl Fn(usize, Place, u32) -> bool) -> Option<Vec<u32>> {
        if let Some(slab) = self.leaving {
            if self.empty_slabs() <= self.reserve && self.can_leave(slab, &is_movable) {
                return Some(self.owners(slab));
            }
            self.stay();
        }
        if self.empty_slabs() > self.reserve {
            return None;
        }
        let classes = 0..self.classes.len();
        let candidates: Vec<u32> = classes.filter_map(|class| self.emptiest(class, &is_movable)).collect();
        let slab = candidates.into_iter().min_by_key(|slab| self.move_bytes(*slab))?;
        self.unlist(slab);
        self.leaving = Some(slab);
        let taken = &mut self.slabs[slab as usize];
        taken.leaving = true;
        let free = self.classes[taken.class].slots_per_slab - taken.used as usize;
        self.uses[taken.class].leaving_slots += free;
        Some(self.owners(slab))
    }

    /// The slab is not to be emptied after all.
    pub(crate) fn stay(&mut self) {
        let Some(slab) = self.leaving.take() else { return };
        let Some(taken) = self.slabs.get_mut(slab as usize) else { return };
        taken.leaving = false;
        let free = self.classes[taken.class].slots_per_slab - taken.used as usize;
        self.uses[taken.class].leaving_slots -= free;
        self.list(slab);
    }

    fn owners(&self, slab: u32) -> Vec<u32> {
        let owners = self.slabs[slab as usize].slots.iter().filter_map(|slot| match slot {
            Slot::Used { owner } if *owner != NONE => Some(*owner),
            _ => None,
        });
        owners.collect()
    }

    /// Whether all slots of a slab come back as soon as their frames are moved.
    fn can_leave(&self, number: u32, is_movable: &impl Fn(usize, Place, u32) -> bool) -> bool {
        let slab = &self.slabs[number as usize];
        (0..).zip(&slab.slots).all(|(slot, state)| match state {
            Slot::Used { owner } => {
                *owner != NONE && is_movable(slab.class, Place { slab: number, slot }, *owner)
            }
            Slot::Free { .. } => true,
        })
    }

    /// Slabs that belong to no class.
    pub(crate) fn empty_slabs(&self) -> usize {
        self.count - self.slabs.len() + self.empty.len()
    }

    /// Slabs in all, and how many of them saves leave alone.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.count, self.reserve)
    }

    /// What the classes have, in their order.
    pub(crate) fn uses(&self) -> &[ClassUse] {
        &self.uses
    }

    /// The free slots of a class that can be had would hold all that a slab holds, beside one slab's own.
    fn can_spare_a_slab(&self, class: usize) -> bool {
        let (per_slab, uses) = (self.classes[class].slots_per_slab, self.uses[class]);
        per_slab > 1 && uses.slabs * per_slab - uses.used_slots - uses.leaving_slots >= per_slab
    }

    fn move_bytes(&self, slab: u32) -> usize {
        let slab = &self.slabs[slab as usize];
        slab.used as usize * self.classes[slab.class].slot_bytes
    }

    fn fullest(&self, class: usize) -> Option<u32> {
        self.lists[class * FILLS..][..FILLS].iter().rev().map(|list| list.first).find(|slab| *slab != NONE)
    }

    /// The emptiest slab of a class that can be emptied now. Those that cannot go to the end of their list.
    fn emptiest(&mut self, class: usize, is_movable: &impl Fn(usize, Place, u32) -> bool) -> Option<u32> {
        if !self.can_spare_a_slab(class) {
            return None;
        }
        for list in class * FILLS..(class + 1) * FILLS {
            for _ in 0..TRIES {
                let slab = self.lists[list].first;
                if slab == NONE {
                    break;
                }
                if self.can_leave(slab, is_movable) {
                    return Some(slab);
                }
                self.unlist(slab);
                self.list(slab);
            }
        }
        None
    }

    /// An empty slab becomes one of this class.
    fn open(&mut self, class: usize) -> Option<u32> {
        let slab = self.empty.pop().or_else(|| {
            let fresh = u32::try_from(self.slabs.len()).ok().filter(|_| self.slabs.len() < self.count)?;
            let (slots, list) = (Vec::new(), None);
            let slab =
                Slab { class, used: 0, slots, free: NONE, list, before: NONE, after: NONE, leaving: false };
            self.slabs.push(slab);
            Some(fresh)
        })?;
        self.slabs[slab as usize].class = class;
        self.uses[class].slabs += 1;
        Some(slab)
    }

    /// The last slot came back: the slab is nobody's.
    fn close(&mut self, number: u32) {
        self.unlist(number);
        let slab = &mut self.slabs[number as usize];
        slab.slots.clear();
        slab.free = NONE;
        let uses = &mut self.uses[slab.class];
        uses.slabs -= 1;
        if std::mem::take(&mut slab.leaving) {
            self.leaving = None;
            uses.leaving_slots -= self.classes[slab.class].slots_per_slab;
        }
        self.empty.push(number);
    }

    /// Gives out a slot of a slab that has one.
    fn fill(&mut self, number: u32, len: usize) -> Option<Place> {
        let slab = self.slabs.get_mut(number as usize)?;
        let used = Slot::Used { owner: NONE };
        let slot = match slab.slots.get_mut(slab.free as usize) {
            Some(free) => {
                let Slot::Free { next } = std::mem::replace(free, used) else { return None };
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
        Some(Place { slab: number, slot })
    }

    /// Brings a slab into the list where it belongs now.
    fn list(&mut self, number: u32) {
        let slab = &self.slabs[number as usize];
        let (used, all) = (slab.used as usize, self.classes[slab.class].slots_per_slab);
        let wanted =
            (!slab.leaving && used > 0 && used < all).then(|| slab.class * FILLS + used * FILLS / all);
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
