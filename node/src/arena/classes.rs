//! Size classes: the slot sizes of an arena, derived from the frame lengths of the node's layout.
//! Arithmetic only.
//!
//! A node stores blocks of one identity, so its frames have one length. A hybrid model with
//! component groups (full attention, sliding window, recurrent state) has a few. Each length is a
//! class. Not here: the use of slots (`slabs`) and the source of lengths (`config`).

/// Slots are whole pages, in bytes, so that SSD reads land in them without a copy.
pub const SLOT_ALIGN_BYTES: usize = 4096;

/// Maximum classes of one arena. Public hybrid models have two to four component groups.
pub const CLASSES_MAX: usize = 8;

/// Inverse of the largest unused share of a slab. A slab has the number of largest slots that
/// leaves at most 1/25 unused for every class. Lengths that differ by no more than this are one
/// class.
const TAIL_PARTS: usize = 25;

/// Maximum slab length in bytes, unless a single slot is longer: an arena has two extra slabs per
/// additional class. If no length meets `TAIL_PARTS`, the one with the smallest unused share is
/// used.
const SLAB_BYTES_MAX: usize = 256 << 20;

/// One size of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClass {
    /// Length of a slot in bytes, whole pages.
    pub slot_bytes: usize,
    /// Slots in one slab.
    pub slots_per_slab: usize,
}

/// The classes of one arena, smallest first, and their common slab length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeClasses {
    slab_bytes: usize,
    classes: Vec<SizeClass>,
}

/// Slot length for frames of up to `frame_bytes`.
#[must_use]
pub fn slot_bytes(frame_bytes: usize) -> usize {
    frame_bytes.max(1).next_multiple_of(SLOT_ALIGN_BYTES)
}

/// Slab length for slots of these lengths: a multiple of the largest.
fn slab_bytes(slots: &[usize], largest: usize) -> usize {
    let counts = 1..=(SLAB_BYTES_MAX / largest).clamp(1, TAIL_PARTS);
    let lengths = counts.map(|count| largest.saturating_mul(count));
    // Compare unused shares by cross-multiplication.
    let tail = |slab: usize| slots.iter().map(|slot| slab % slot).max().unwrap_or(0);
    let fits = |slab: &usize| tail(*slab) <= slab / TAIL_PARTS;
    let shortest = lengths.clone().find(fits);
    let best = lengths.min_by(|a, b| (tail(*a) as u128 * *b as u128).cmp(&(tail(*b) as u128 * *a as u128)));
    shortest.or(best).unwrap_or(largest)
}

impl SizeClasses {
    /// Classes for frames of these lengths in bytes. Similar lengths share a class of the longest;
    /// an empty list gives one page. Beyond [`CLASSES_MAX`], the smallest lengths get no class of
    /// their own.
    #[must_use]
    pub fn new(frame_bytes: &[usize]) -> SizeClasses {
        let mut slots: Vec<usize> = frame_bytes.iter().map(|&bytes| slot_bytes(bytes)).collect();
        slots.sort_unstable_by(|a, b| b.cmp(a));
        // The next larger length is the one kept last.
        slots.dedup_by(|slot, larger| *larger - *slot <= *larger / TAIL_PARTS);
        slots.truncate(CLASSES_MAX);
        slots.reverse();
        let largest = slots.last().copied().unwrap_or(SLOT_ALIGN_BYTES);
        let slab_bytes = slab_bytes(&slots, largest);
        if slots.is_empty() {
            slots.push(largest);
        }
        let class = |slot_bytes| SizeClass { slot_bytes, slots_per_slab: slab_bytes / slot_bytes };
        SizeClasses { slab_bytes, classes: slots.into_iter().map(class).collect() }
    }

    /// Length of a slab in bytes.
    #[must_use]
    pub fn slab_bytes(&self) -> usize {
        self.slab_bytes
    }

    /// The classes, smallest first; at least one.
    #[must_use]
    pub fn list(&self) -> &[SizeClass] {
        &self.classes
    }

    /// Slots of the largest class in one slab, the minimum over all classes.
    #[must_use]
    pub fn largest_per_slab(&self) -> usize {
        self.classes.last().map_or(1, |class| class.slots_per_slab).max(1)
    }

    /// The class for a frame of `len` bytes; `None` if it exceeds every class.
    #[must_use]
    pub fn find(&self, len: usize) -> Option<usize> {
        self.classes.iter().position(|class| len <= class.slot_bytes)
    }

    /// Cost of a frame of `len` bytes: its share of a slab, including the unused tail. If all
    /// shares sum to at most N slabs, those slabs plus one for each further class suffice after
    /// compaction, in any arrangement.
    #[must_use]
    pub fn share_bytes(&self, len: usize) -> usize {
        let class = self.find(len).and_then(|class| self.classes.get(class)).or(self.classes.last());
        class.map_or(self.slab_bytes, |class| self.slab_bytes.div_ceil(class.slots_per_slab.max(1)))
    }

    /// Slabs that hold `slots` slots of any mix of classes.
    #[must_use]
    pub fn slabs_for(&self, slots: usize) -> usize {
        slots.div_ceil(self.largest_per_slab()) + self.classes.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = SLOT_ALIGN_BYTES;

    #[test]
    fn one_frame_length_gives_one_class_with_single_slot_slabs() {
        for len in [1, PAGE - 1, PAGE, PAGE + 1, 2_097_716] {
            let classes = SizeClasses::new(&[len, len]);
            assert_eq!(classes.list(), [SizeClass { slot_bytes: slot_bytes(len), slots_per_slab: 1 }]);
            assert_eq!((classes.slab_bytes(), classes.share_bytes(1)), (slot_bytes(len), slot_bytes(len)));
            assert_eq!(classes.slabs_for(16), 16);
        }
        assert_eq!(SizeClasses::new(&[]).find(PAGE), Some(0));
    }

    #[test]
    fn frame_takes_the_smallest_fitting_slot() {
        let classes = SizeClasses::new(&[10 * PAGE, 3 * PAGE, 3 * PAGE - 5]);
        let slots: Vec<usize> = classes.list().iter().map(|class| class.slot_bytes).collect();
        assert_eq!(slots, [3 * PAGE, 10 * PAGE]);
        let found = [1, 3 * PAGE, 3 * PAGE + 1, 10 * PAGE, 10 * PAGE + 1].map(|len| classes.find(len));
        assert_eq!(found, [Some(0), Some(0), Some(1), Some(1), None]);
    }

    #[test]
    fn slab_tail_waste_is_bounded_for_pairs_of_sizes() {
        for small in 1..=300 {
            for large in small..=300 {
                let classes = SizeClasses::new(&[small * PAGE, large * PAGE]);
                let slab = classes.slab_bytes();
                for class in classes.list() {
                    let tail = slab - class.slot_bytes * class.slots_per_slab;
                    assert!(tail * TAIL_PARTS <= slab, "{small} and {large} pages: {tail} of {slab}");
                    assert!(class.slots_per_slab >= classes.largest_per_slab());
                }
            }
        }
    }

    #[test]
    fn similar_lengths_share_a_class() {
        let slots = |pages: &[usize]| -> Vec<usize> {
            let frames: Vec<usize> = pages.iter().map(|pages| pages * PAGE).collect();
            SizeClasses::new(&frames).list().iter().map(|class| class.slot_bytes / PAGE).collect()
        };
        assert_eq!(slots(&[96, 100]), [100]);
        assert_eq!(slots(&[95, 100]), [95, 100]);
        // Each length is charged at most this share more, so a chain of similar lengths is not one
        // class.
        assert_eq!(slots(&[93, 96, 98, 100]), [93, 100]);
        // Similar lengths do not use up the limited number of classes.
        let many: Vec<usize> = (0..CLASSES_MAX).map(|number| 100 << number).chain([99, 199]).collect();
        assert_eq!(slots(&many).len(), CLASSES_MAX);
    }

    #[test]
    fn slab_bytes_are_bounded_for_all_sizes() {
        const MIB: usize = 1 << 20;
        for largest in [1, 9, 33, 64, 300] {
            for parts in 10..100 {
                let classes = SizeClasses::new(&[largest * MIB, largest * MIB * parts / 100]);
                assert!(classes.slab_bytes() <= SLAB_BYTES_MAX.max(largest * MIB));
                let tail = |class: &SizeClass| classes.slab_bytes() - class.slot_bytes * class.slots_per_slab;
                let lost = classes.list().iter().map(tail).max().unwrap_or(0);
                // With n slots of the largest class, sizes between 1/n and 1/(n + 1) of a slab
                // waste their difference.
                let bound = (SLAB_BYTES_MAX / (largest * MIB) + 1).clamp(2, TAIL_PARTS);
                assert!(lost * bound <= classes.slab_bytes(), "{largest} MiB, {parts} %");
            }
        }
        let near = SizeClasses::new(&[64 * MIB, 64 * MIB - PAGE, 62 * MIB]);
        assert_eq!((near.list().len(), near.slab_bytes()), (1, 64 * MIB));
    }

    #[test]
    fn shares_never_exceed_slab_capacity() {
        let classes = SizeClasses::new(&[3 * PAGE, 7 * PAGE, 16 * PAGE]);
        for class in classes.list() {
            let share = classes.share_bytes(class.slot_bytes);
            assert!(share * class.slots_per_slab >= classes.slab_bytes());
            assert!(share >= class.slot_bytes);
        }
    }
}
