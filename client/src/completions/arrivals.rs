//! Which blocks of a fetch came, and what of that is told: from where on to compute, and which layers are there.
//!
//! Either layers are told when all blocks that still come are whole, so that nothing that was told is taken back; or each
//! as soon as all blocks that are still awaited have it, and then fewer blocks may have the next.
//!
//! Not here: what is waited for, and for how long.

use std::ops::Range;

/// What is told of a fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Blocks from this one on do not all come.
    Recompute(u32),
    /// These layers of all blocks before `end` are there.
    Layers { layers: Range<u32>, end: u32 },
}

/// The blocks of a fetch.
pub(super) struct Arrivals {
    first: u32,
    came: Vec<bool>,
    /// Layers of each block that are there.
    here: Vec<u32>,
    /// For each layer, blocks before `end` that do not have it.
    missing: Vec<u32>,
    /// All before this one came.
    reached: u32,
    /// None from this one on is waited for.
    end: u32,
    /// Layers that were told.
    told: u32,
    by_layer: bool,
}

impl Arrivals {
    /// Of so many blocks from `first` on, with so many layers. `by_layer`: they are told one by one.
    pub(super) fn new(first: u32, blocks: usize, layers: u32, by_layer: bool) -> Arrivals {
        let count = u32::try_from(blocks).unwrap_or(u32::MAX);
        Arrivals {
            first,
            came: vec![false; blocks],
            here: vec![0; blocks],
            missing: vec![count; layers as usize],
            reached: first,
            end: first.saturating_add(count),
            told: 0,
            by_layer,
        }
    }

    /// Layers of a block before this one are in its room.
    pub(super) fn slices(&mut self, block: u32, until: u32) -> Option<Told> {
        let is_awaited = block < self.end;
        let here = self.here.get_mut(block.checked_sub(self.first)? as usize)?;
        let until = until.min(u32::try_from(self.missing.len()).unwrap_or(u32::MAX)).max(*here);
        let came = std::mem::replace(here, until)..until;
        if is_awaited {
            self.missing[came.start as usize..came.end as usize].iter_mut().for_each(|count| *count -= 1);
        }
        self.there()
    }

    /// A block is in its room.
    pub(super) fn arrived(&mut self, block: u32) -> Option<Told> {
        *self.came.get_mut(block.checked_sub(self.first)? as usize)? = true;
        while self.came.get((self.reached - self.first) as usize).is_some_and(|came| *came) {
            self.reached += 1;
        }
        self.slices(block, u32::MAX)
    }

    /// A block does not come: first what that changes, then what is there because of it.
    pub(super) fn missing(&mut self, block: u32) -> [Option<Told>; 2] {
        if block >= self.end {
            return [None, None];
        }
        let first = block.saturating_sub(self.first) as usize;
        for here in &self.here[first..(self.end - self.first) as usize] {
            self.missing[*here as usize..].iter_mut().for_each(|count| *count -= 1);
        }
        self.end = block;
        [Some(Told::Recompute(block)), self.there()]
    }

    /// One past the last block that came without a gap, and which came at all.
    pub(super) fn into_parts(self) -> (u32, Vec<bool>) {
        (self.reached, self.came)
    }

    /// Layers that are there and were not told.
    fn there(&mut self) -> Option<Told> {
        let told = self.told as usize;
        let there = self.missing[told..].iter().take_while(|count| **count == 0).count();
        let is_due = self.by_layer || told + there == self.missing.len();
        if self.end <= self.first || there == 0 || !is_due {
            return None;
        }
        let layers = self.told..self.told + u32::try_from(there).unwrap_or(u32::MAX);
        self.told = layers.end;
        Some(Told::Layers { layers, end: self.end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(end: u32) -> Option<Told> {
        Some(Told::Layers { layers: 0..3, end })
    }

    fn layers(layers: Range<u32>, end: u32) -> Option<Told> {
        Some(Told::Layers { layers, end })
    }

    #[test]
    fn all_is_whole_with_the_last_block_and_told_once() {
        let mut arrivals = Arrivals::new(3, 3, 3, false);
        assert_eq!([4, 5].map(|block| arrivals.arrived(block)), [None, None]);
        assert_eq!(arrivals.slices(3, 2), None);
        assert_eq!(arrivals.arrived(3), whole(6));
        assert_eq!(arrivals.arrived(3), None);
        assert_eq!(arrivals.into_parts(), (6, vec![true; 3]));
    }

    #[test]
    fn what_is_missing_moves_the_end_and_what_is_before_it_is_whole() {
        let mut arrivals = Arrivals::new(0, 6, 3, false);
        assert_eq!(arrivals.missing(4), [Some(Told::Recompute(4)), None]);
        assert_eq!(arrivals.missing(5), [None, None], "that is computed already");
        assert_eq!([0, 1, 3].map(|block| arrivals.arrived(block)), [None, None, None]);
        assert_eq!(arrivals.missing(2), [Some(Told::Recompute(2)), whole(2)]);
        assert_eq!(arrivals.into_parts(), (2, vec![true, true, false, true, false, false]));
    }

    #[test]
    fn by_layer_is_told_once_all_awaited_blocks_have_it() {
        let mut arrivals = Arrivals::new(1, 3, 3, true);
        assert_eq!([arrivals.slices(1, 1), arrivals.slices(2, 2)], [None, None]);
        assert_eq!(arrivals.slices(3, 1), layers(0..1, 4));
        assert_eq!(arrivals.arrived(1), None);
        assert_eq!(arrivals.slices(3, 1), None, "known");
        assert_eq!(arrivals.missing(3), [Some(Told::Recompute(3)), layers(1..2, 3)]);
        assert_eq!(arrivals.slices(3, 3), None, "not awaited any more");
        assert_eq!(arrivals.arrived(2), layers(2..3, 3));
        assert_eq!(arrivals.missing(1), [Some(Told::Recompute(1)), None], "nothing is left of it");
        assert_eq!(arrivals.into_parts(), (3, vec![true, true, false]));
    }

    #[test]
    fn of_nothing_no_layer_is_told() {
        for by_layer in [false, true] {
            let mut arrivals = Arrivals::new(2, 2, 3, by_layer);
            assert_eq!(arrivals.missing(2), [Some(Told::Recompute(2)), None]);
            assert_eq!(arrivals.into_parts(), (2, vec![false; 2]));
            let mut none = Arrivals::new(2, 1, 0, by_layer);
            assert_eq!([none.slices(2, 4), none.arrived(2)], [None, None], "no layers");
        }
    }

    #[test]
    fn a_block_of_no_source_changes_nothing() {
        let mut arrivals = Arrivals::new(2, 1, 3, true);
        assert_eq!([arrivals.arrived(9), arrivals.arrived(1), arrivals.slices(1, 2)], [None, None, None]);
        assert_eq!(arrivals.missing(9), [None, None]);
    }
}
