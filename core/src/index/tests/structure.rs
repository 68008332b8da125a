//! What every part of the index must say of every other.
//!
//! Not here: what it answers (the other files).

use std::collections::BTreeMap;

use crate::index::run::Hold;
use crate::index::store::{At, Store};

impl Store {
    /// Whether the block before one in its run is listed.
    fn follows_listed(&self, at: At) -> bool {
        let before = at.offset.checked_sub(1).and_then(|before| self.runs.get(at.run).place(before));
        before.is_some_and(|before| self.pages.is_live(before))
    }

    /// How many stubs there are, pages of runs that are no anchors, and runs that begin in the middle of an octet.
    pub(in crate::index) fn odd_octets(&self) -> (usize, usize, usize) {
        let stubs = self.pages.stubs().count();
        let runs = || (0..self.runs.used()).map(|number| self.runs.get(number));
        let pages = runs().flat_map(|run| run.pages().flatten());
        let apart = pages.filter(|page| !self.pages.is_anchor(*page)).count();
        (stubs, apart, runs().filter(|run| run.start() > 0).count())
    }

    /// Panics unless every part agrees with every other.
    pub(in crate::index) fn check(&self) {
        let (mut listed, mut held, mut heads) = (0, 0, 0);
        for number in 0..self.runs.used() {
            let run = self.runs.get(number);
            if run.end() == 0 {
                assert!(run.holds().is_empty());
                continue;
            }
            let gaps = run.uncovered(run.start(), run.end());
            let mut live = 0;
            for offset in run.start()..run.end() {
                let is_held = !gaps.iter().any(|(from, to)| (*from..*to).contains(&offset));
                let at = At { run: number, offset };
                let is_head = self.check_block(at, is_held);
                (live, heads) = (live + u32::from(is_held), heads + usize::from(is_head));
            }
            assert!(!run.holds().is_empty() && live > 0, "run {number} has neither holds nor blocks");
            assert!(run.holds().iter().all(|hold| u32::from(hold.from) >= run.start()), "{run:?}");
            assert!(gaps.iter().all(|(_, to)| *to < run.end()), "the end is held");
            listed += u64::from(live);
            held += run.holds().iter().map(Hold::blocks).sum::<u64>();
        }
        assert_eq!((self.places.len(), self.held(), self.heads.len()), (listed, held, heads));
        self.check_octets();
    }

    /// Answers whether the block is a head.
    fn check_block(&self, at: At, is_held: bool) -> bool {
        let At { run: number, offset } = at;
        let run = self.runs.get(number);
        let Some(place) = run.place(offset) else {
            assert!(!is_held, "{offset} of run {number} is held and has no page");
            return false;
        };
        let is_head = self.pages.heads(place.page()) & 1 << place.slot() != 0;
        let hash = self.pages.hash(place);
        assert_eq!(self.pages.locate(place), (number, offset));
        assert_eq!(self.pages.is_live(place), is_held, "{offset} of run {number}: {run:?}");
        assert_eq!(hash.nth_of_octet() as u32, place.slot());
        let found = self.places.find(hash, &self.pages);
        assert_eq!(found == Some(place), is_held, "{offset} of run {number}: {found:?}");
        let found = self.heads.find(hash);
        assert_eq!(found == Some(at), is_head, "{offset} of run {number}: {found:?}");
        assert!(is_held || !is_head, "{offset} of run {number} is unlisted and a head");
        assert!(!is_held || is_head || self.follows_listed(at), "{offset} of run {number}");
        is_head
    }

    /// Each octet in use has one anchor, which counts the other pages; one that lists nothing has some.
    fn check_octets(&self) {
        let mut others: BTreeMap<u64, u32> = BTreeMap::new();
        let (mut anchors, mut blocks_apart) = (BTreeMap::new(), 0);
        let numbers: Vec<u32> = (0..self.runs.used())
            .flat_map(|number| self.runs.get(number).pages().flatten().collect::<Vec<_>>())
            .collect();
        for page in &numbers {
            let octet = self.pages.octet(*page);
            assert_ne!(self.pages.live(*page), 0, "page {page} is in a run and lists nothing");
            if self.pages.is_anchor(*page) {
                assert_eq!(anchors.insert(octet, *page), None, "octet {octet:x} has two anchors");
            } else {
                *others.entry(octet).or_default() += 1;
                blocks_apart += u64::from(self.pages.live(*page).count_ones());
            }
        }
        let stubs: Vec<u32> = self.pages.stubs().collect();
        assert_eq!(self.places.stubs() as usize, stubs.len());
        for stub in &stubs {
            assert!(self.pages.is_anchor(*stub), "page {stub} lists nothing and is no anchor");
            assert!(self.pages.others(*stub) > 0, "stub {stub} is of no use");
            let octet = self.pages.octet(*stub);
            assert_eq!(anchors.insert(octet, *stub), None, "octet {octet:x} has two anchors");
        }
        for (octet, anchor) in &anchors {
            assert_eq!(self.places.anchor(*octet, &self.pages), Some(*anchor));
            assert_eq!(self.pages.others(*anchor), others.remove(octet).unwrap_or(0), "of {octet:x}");
        }
        assert!(others.is_empty(), "octets without an anchor: {others:x?}");
        assert_eq!(self.places.entries(), anchors.len() as u64 + blocks_apart);
        assert_eq!(self.pages.used() as usize, numbers.len() + stubs.len());
    }
}
