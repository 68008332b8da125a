//! Runs and pages as a snapshot describes them, taken in one by one: what agrees with all the others, or nothing.
//!
//! A snapshot may be forged, so everything is checked that the living index relies on. Not here: bytes, and who holds
//! what (`snapshot.rs`).

use smallvec::SmallVec;

use super::pages::{PAGE_BLOCKS, Place};
use super::run::{Hold, Run};
use super::store::{At, Store};
use crate::id::BlockHash;

/// A page of a run.
#[derive(Clone, Debug)]
pub(super) struct RestoredPage {
    pub(super) number: u32,
    /// Whether its octet is found by it.
    pub(super) is_anchor: bool,
    /// One for each offset of the run that falls into it, listed or not.
    pub(super) hashes: SmallVec<[BlockHash; PAGE_BLOCKS as usize]>,
}

/// Pages of which it shows only at the end whether they are what they say.
#[derive(Clone, Debug, Default)]
pub(super) struct Unproven {
    /// Pages whose octets are found by others.
    others: Vec<u32>,
    /// Anchors that list nothing.
    stubs: Vec<u32>,
}

impl Store {
    /// Takes in a run, with those of its pages that were not given back, in order, and the offsets of heads. Answers
    /// false when it cannot be.
    pub(super) fn restore_run(
        &mut self,
        run: Run,
        pages: &[RestoredPage],
        heads: &[u32],
        unproven: &mut Unproven,
    ) -> bool {
        let number = self.runs.restore(run);
        for page in pages {
            if !self.pages.take_exactly(page.number) {
                return false;
            }
            page.hashes.first().inspect(|hash| self.places.prefetch(**hash));
        }
        let run = self.runs.get(number).clone();
        let gaps = run.uncovered(run.start(), run.end());
        let mut pages = pages.iter();
        for nth in 0..run.end().div_ceil(PAGE_BLOCKS) {
            let first = run.start().max(nth * PAGE_BLOCKS);
            let last = run.end().min((nth + 1) * PAGE_BLOCKS);
            let is_held = |offset: &u32| !gaps.iter().any(|(from, to)| (from..to).contains(&offset));
            let live = (first..last).filter(is_held).fold(0u8, |bits, at| bits | 1 << (at % PAGE_BLOCKS));
            if run.page(nth).is_none() {
                if live != 0 {
                    return false;
                }
                continue;
            }
            let Some(page) = pages.next() else { return false };
            let place = Place::new(page.number, first % PAGE_BLOCKS);
            let whose = ((number, nth), page.is_anchor);
            if live == 0 || !self.places.restore(place, whose, (&page.hashes, live), &mut self.pages) {
                return false;
            }
            unproven.others.extend((!page.is_anchor).then_some(page.number));
        }
        self.held += run.holds().iter().map(Hold::blocks).sum::<u64>();
        self.restore_heads(number, heads)
    }

    fn restore_heads(&mut self, number: u32, heads: &[u32]) -> bool {
        if !heads.is_sorted_by(|one, next| one < next) {
            return false;
        }
        for &offset in heads {
            let place = self.runs.get(number).place(offset).filter(|place| self.pages.make_head(*place));
            let Some(place) = place else { return false };
            self.heads.insert(self.pages.hash(place), At { run: number, offset });
        }
        true
    }

    /// Takes in an anchor that lists nothing; they come by ascending number. Answers false when it cannot be.
    pub(super) fn restore_stub(&mut self, number: u32, octet: u64, unproven: &mut Unproven) -> bool {
        let in_order = unproven.stubs.last().is_none_or(|last| *last < number);
        unproven.stubs.push(number);
        in_order && self.places.restore_stub(number, octet, &mut self.pages)
    }

    /// Joins pages with their anchors, when all are there. Answers false when they do not fit together.
    pub(super) fn prove(&mut self, unproven: &Unproven) -> bool {
        let Unproven { others, stubs } = unproven;
        others.iter().all(|page| self.places.join_anchor(*page, &mut self.pages))
            && stubs.iter().all(|stub| self.pages.others(*stub) > 0)
    }
}
