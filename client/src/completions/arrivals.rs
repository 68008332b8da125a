//! Which blocks of a fetch came, and what of that is told: from where on to compute, and layers that are whole.
//!
//! Frames travel whole (see `layers.rs` of the client), so all layers are there with the last block that still
//! comes. What is told does not say so: layers that come one by one would be told by the same words.
//!
//! Not here: what is waited for, and for how long.

/// What is told of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Blocks from this one on do not all come.
    Recompute(u32),
    /// All layers of all blocks before this one are there.
    Whole(u32),
}

/// The blocks of a fetch.
pub(super) struct Arrivals {
    first: u32,
    came: Vec<bool>,
    /// All before this one came.
    reached: u32,
    /// None from this one on is waited for.
    end: u32,
    is_told: bool,
}

impl Arrivals {
    /// Of so many blocks from `first` on.
    pub(super) fn new(first: u32, blocks: usize) -> Arrivals {
        let end = first.saturating_add(u32::try_from(blocks).unwrap_or(u32::MAX));
        Arrivals { first, came: vec![false; blocks], reached: first, end, is_told: false }
    }

    /// A block is in its room.
    pub(super) fn arrived(&mut self, block: u32) -> Option<Told> {
        if let Some(came) = self.came.get_mut(block.saturating_sub(self.first) as usize) {
            *came = true;
        }
        while self.came.get((self.reached - self.first) as usize).is_some_and(|came| *came) {
            self.reached += 1;
        }
        self.whole()
    }

    /// A block does not come: first what that changes, then what is whole by it.
    pub(super) fn missing(&mut self, block: u32) -> [Option<Told>; 2] {
        if block >= self.end {
            return [None; 2];
        }
        self.end = block;
        [Some(Told::Recompute(block)), self.whole()]
    }

    /// One past the last block that came without a gap, and which came at all.
    pub(super) fn into_parts(self) -> (u32, Vec<bool>) {
        (self.reached, self.came)
    }

    fn whole(&mut self) -> Option<Told> {
        let is_whole = self.reached >= self.end && self.end > self.first && !self.is_told;
        self.is_told |= is_whole;
        is_whole.then_some(Told::Whole(self.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_whole_with_the_last_block_and_told_once() {
        let mut arrivals = Arrivals::new(3, 3);
        assert_eq!([4, 5].map(|block| arrivals.arrived(block)), [None; 2]);
        assert_eq!(arrivals.arrived(3), Some(Told::Whole(6)));
        assert_eq!(arrivals.arrived(3), None);
        assert_eq!(arrivals.into_parts(), (6, vec![true; 3]));
    }

    #[test]
    fn what_is_missing_moves_the_end_and_what_is_before_it_is_whole() {
        let mut arrivals = Arrivals::new(0, 6);
        assert_eq!(arrivals.missing(4), [Some(Told::Recompute(4)), None]);
        assert_eq!(arrivals.missing(5), [None; 2], "that is computed already");
        assert_eq!([0, 1, 3].map(|block| arrivals.arrived(block)), [None; 3]);
        assert_eq!(arrivals.missing(2), [Some(Told::Recompute(2)), Some(Told::Whole(2))]);
        assert_eq!(arrivals.into_parts(), (2, vec![true, true, false, true, false, false]));
    }

    #[test]
    fn of_nothing_no_layer_is_told() {
        let mut arrivals = Arrivals::new(2, 2);
        assert_eq!(arrivals.missing(2), [Some(Told::Recompute(2)), None]);
        assert_eq!(arrivals.into_parts(), (2, vec![false; 2]));
    }

    #[test]
    fn a_block_of_no_source_changes_nothing() {
        let mut arrivals = Arrivals::new(2, 1);
        assert_eq!(arrivals.arrived(9), None);
        assert_eq!(arrivals.missing(9), [None; 2]);
    }
}
