//! Tracks the blocks of a fetch that have arrived, and derives reports: complete layers, and the
//! first block to recompute.
//!
//! Layers are reported in one of two ways: once all remaining blocks are whole, so no report is
//! withdrawn; or each as soon as all awaited blocks have it, so that a later layer may cover fewer
//! blocks.
//!
//! Not here: choosing the blocks to wait for, and the duration.

use std::ops::Range;

/// A report about a fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ArrivalEvent {
    /// Blocks from this one on do not all arrive.
    Recompute(u32),
    /// These layers of all blocks before `end` are in their buffers.
    Layers { layers: Range<u32>, end: u32 },
}

/// State of the blocks of a fetch.
pub(super) struct ArrivalTracker {
    first: u32,
    arrived: Vec<bool>,
    /// Number of layers in each block's buffer.
    layers_present: Vec<u32>,
    /// For each layer, the number of blocks before `end` that lack it.
    missing_blocks: Vec<u32>,
    /// All blocks before this one arrived.
    contiguous_end: u32,
    /// Blocks from this one on are not awaited.
    end: u32,
    /// Number of layers reported.
    reported_layers: u32,
    by_layer: bool,
}

impl ArrivalTracker {
    /// Tracks `blocks` blocks from `first` on, with `layers` layers each. `by_layer`: report layers
    /// one by one.
    pub(super) fn new(first: u32, blocks: usize, layers: u32, by_layer: bool) -> ArrivalTracker {
        let count = u32::try_from(blocks).unwrap_or(u32::MAX);
        ArrivalTracker {
            first,
            arrived: vec![false; blocks],
            layers_present: vec![0; blocks],
            missing_blocks: vec![count; layers as usize],
            contiguous_end: first,
            end: first.saturating_add(count),
            reported_layers: 0,
            by_layer,
        }
    }

    /// Records that a block's layers before `until` are in its buffer.
    pub(super) fn record_slices(&mut self, block: u32, until: u32) -> Option<ArrivalEvent> {
        let is_awaited = block < self.end;
        let here = self.layers_present.get_mut(block.checked_sub(self.first)? as usize)?;
        let until = until.min(u32::try_from(self.missing_blocks.len()).unwrap_or(u32::MAX)).max(*here);
        let came = std::mem::replace(here, until)..until;
        if is_awaited {
            self.missing_blocks[came.start as usize..came.end as usize]
                .iter_mut()
                .for_each(|count| *count -= 1);
        }
        self.newly_complete()
    }

    /// Records that a block is completely in its buffer.
    pub(super) fn record_block(&mut self, block: u32) -> Option<ArrivalEvent> {
        *self.arrived.get_mut(block.checked_sub(self.first)? as usize)? = true;
        while self.arrived.get((self.contiguous_end - self.first) as usize).is_some_and(|came| *came) {
            self.contiguous_end += 1;
        }
        self.record_slices(block, u32::MAX)
    }

    /// Records that a block does not arrive. Returns the new end first, then the layers that it
    /// completes.
    pub(super) fn record_missing(&mut self, block: u32) -> [Option<ArrivalEvent>; 2] {
        if block >= self.end {
            return [None, None];
        }
        let first = block.saturating_sub(self.first) as usize;
        for here in &self.layers_present[first..(self.end - self.first) as usize] {
            self.missing_blocks[*here as usize..].iter_mut().for_each(|count| *count -= 1);
        }
        self.end = block;
        [Some(ArrivalEvent::Recompute(block)), self.newly_complete()]
    }

    /// One past the last block of the contiguous prefix, and whether each block arrived.
    pub(super) fn into_parts(self) -> (u32, Vec<bool>) {
        (self.contiguous_end, self.arrived)
    }

    /// Complete layers that are not reported yet.
    fn newly_complete(&mut self) -> Option<ArrivalEvent> {
        let told = self.reported_layers as usize;
        let there = self.missing_blocks[told..].iter().take_while(|count| **count == 0).count();
        let is_due = self.by_layer || told + there == self.missing_blocks.len();
        if self.end <= self.first || there == 0 || !is_due {
            return None;
        }
        let layers = self.reported_layers..self.reported_layers + u32::try_from(there).unwrap_or(u32::MAX);
        self.reported_layers = layers.end;
        Some(ArrivalEvent::Layers { layers, end: self.end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(end: u32) -> Option<ArrivalEvent> {
        Some(ArrivalEvent::Layers { layers: 0..3, end })
    }

    fn layers(layers: Range<u32>, end: u32) -> Option<ArrivalEvent> {
        Some(ArrivalEvent::Layers { layers, end })
    }

    #[test]
    fn all_layers_complete_with_last_block_and_are_reported_once() {
        let mut arrivals = ArrivalTracker::new(3, 3, 3, false);
        assert_eq!([4, 5].map(|block| arrivals.record_block(block)), [None, None]);
        assert_eq!(arrivals.record_slices(3, 2), None);
        assert_eq!(arrivals.record_block(3), whole(6));
        assert_eq!(arrivals.record_block(3), None);
        assert_eq!(arrivals.into_parts(), (6, vec![true; 3]));
    }

    #[test]
    fn missing_block_lowers_end_and_completes_earlier_blocks() {
        let mut arrivals = ArrivalTracker::new(0, 6, 3, false);
        assert_eq!(arrivals.record_missing(4), [Some(ArrivalEvent::Recompute(4)), None]);
        assert_eq!(arrivals.record_missing(5), [None, None], "block 5 is to be recomputed already");
        assert_eq!([0, 1, 3].map(|block| arrivals.record_block(block)), [None, None, None]);
        assert_eq!(arrivals.record_missing(2), [Some(ArrivalEvent::Recompute(2)), whole(2)]);
        assert_eq!(arrivals.into_parts(), (2, vec![true, true, false, true, false, false]));
    }

    #[test]
    fn layer_is_reported_when_all_awaited_blocks_have_it() {
        let mut arrivals = ArrivalTracker::new(1, 3, 3, true);
        assert_eq!([arrivals.record_slices(1, 1), arrivals.record_slices(2, 2)], [None, None]);
        assert_eq!(arrivals.record_slices(3, 1), layers(0..1, 4));
        assert_eq!(arrivals.record_block(1), None);
        assert_eq!(arrivals.record_slices(3, 1), None, "known");
        assert_eq!(arrivals.record_missing(3), [Some(ArrivalEvent::Recompute(3)), layers(1..2, 3)]);
        assert_eq!(arrivals.record_slices(3, 3), None, "the block is not awaited any more");
        assert_eq!(arrivals.record_block(2), layers(2..3, 3));
        assert_eq!(arrivals.record_missing(1), [Some(ArrivalEvent::Recompute(1)), None], "no block is left");
        assert_eq!(arrivals.into_parts(), (3, vec![true, true, false]));
    }

    #[test]
    fn no_layer_is_reported_without_blocks_or_layers() {
        for by_layer in [false, true] {
            let mut arrivals = ArrivalTracker::new(2, 2, 3, by_layer);
            assert_eq!(arrivals.record_missing(2), [Some(ArrivalEvent::Recompute(2)), None]);
            assert_eq!(arrivals.into_parts(), (2, vec![false; 2]));
            let mut none = ArrivalTracker::new(2, 1, 0, by_layer);
            assert_eq!([none.record_slices(2, 4), none.record_block(2)], [None, None], "no layers");
        }
    }

    #[test]
    fn block_outside_the_sources_is_ignored() {
        let mut arrivals = ArrivalTracker::new(2, 1, 3, true);
        assert_eq!(
            [arrivals.record_block(9), arrivals.record_block(1), arrivals.record_slices(1, 2)],
            [None, None, None]
        );
        assert_eq!(arrivals.record_missing(9), [None, None]);
    }
}
