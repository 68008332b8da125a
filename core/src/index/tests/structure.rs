//! Consistency checks between all parts of the index.
//!
//! Not here: the answers of the index (the other files).

use std::collections::BTreeMap;

use crate::index::run::Extent;
use crate::index::store::{RunPosition, Store};

impl Store {
    /// Whether the previous block of the run is listed.
    fn follows_listed(&self, at: RunPosition) -> bool {
        let before = at.offset.checked_sub(1).and_then(|before| self.runs.get(at.run).page_slot(before));
        before.is_some_and(|before| self.pages.is_listed(before))
    }

    /// Numbers of tombstone pages, of run pages that are not canonical, and of runs that start
    /// inside a block group.
    pub(in crate::index) fn group_anomalies(&self) -> (usize, usize, usize) {
        let stubs = self.pages.tombstones().count();
        let runs = || (0..self.runs.number_limit()).map(|number| self.runs.get(number));
        let pages = runs().flat_map(|run| run.pages().flatten());
        let apart = pages.filter(|page| !self.pages.is_canonical(*page)).count();
        (stubs, apart, runs().filter(|run| run.start() > 0).count())
    }

    /// Panics unless all parts are consistent.
    pub(in crate::index) fn check(&self) {
        let (mut listed, mut held, mut heads) = (0, 0, 0);
        for number in 0..self.runs.number_limit() {
            let run = self.runs.get(number);
            if run.end() == 0 {
                assert!(run.extents().is_empty());
                continue;
            }
            let gaps = run.uncovered(run.start(), run.end());
            let mut live = 0;
            for offset in run.start()..run.end() {
                let is_held = !gaps.iter().any(|(from, to)| (*from..*to).contains(&offset));
                let at = RunPosition { run: number, offset };
                let is_head = self.check_block(at, is_held);
                (live, heads) = (live + u32::from(is_held), heads + usize::from(is_head));
            }
            assert!(!run.extents().is_empty() && live > 0, "run {number} has neither extents nor blocks");
            assert!(run.extents().iter().all(|hold| u32::from(hold.from) >= run.start()), "{run:?}");
            assert!(gaps.iter().all(|(_, to)| *to < run.end()), "the end of the run has no holder");
            listed += u64::from(live);
            held += run.extents().iter().map(Extent::blocks).sum::<u64>();
        }
        assert_eq!(
            (self.locations.len(), self.total_copies(), self.entry_points.len()),
            (listed, held, heads)
        );
        self.check_block_groups();
    }

    /// Returns whether the block is an entry point.
    fn check_block(&self, at: RunPosition, is_held: bool) -> bool {
        let RunPosition { run: number, offset } = at;
        let run = self.runs.get(number);
        let Some(place) = run.page_slot(offset) else {
            assert!(!is_held, "{offset} of run {number} has a holder and no page");
            return false;
        };
        let is_head = self.pages.entry_points(place.page()) & 1 << place.slot() != 0;
        let hash = self.pages.hash(place);
        assert_eq!(self.pages.locate(place), (number, offset));
        assert_eq!(self.pages.is_listed(place), is_held, "{offset} of run {number}: {run:?}");
        assert_eq!(hash.position_in_group() as u32, place.slot());
        let found = self.locations.find(hash, &self.pages);
        assert_eq!(found == Some(place), is_held, "{offset} of run {number}: {found:?}");
        let found = self.entry_points.find(hash);
        assert_eq!(found == Some(at), is_head, "{offset} of run {number}: {found:?}");
        assert!(is_held || !is_head, "{offset} of run {number} is unlisted and an entry point");
        assert!(!is_held || is_head || self.follows_listed(at), "{offset} of run {number}");
        is_head
    }

    /// Each block group in use has one canonical page, which counts the other pages; a tombstone
    /// page has at least one other.
    fn check_block_groups(&self) {
        let mut others: BTreeMap<u64, u32> = BTreeMap::new();
        let (mut anchors, mut blocks_apart) = (BTreeMap::new(), 0);
        let numbers: Vec<u32> = (0..self.runs.number_limit())
            .flat_map(|number| self.runs.get(number).pages().flatten().collect::<Vec<_>>())
            .collect();
        for page in &numbers {
            let octet = self.pages.block_group(*page);
            assert_ne!(self.pages.listed(*page), 0, "page {page} is in a run and lists no block");
            if self.pages.is_canonical(*page) {
                assert_eq!(anchors.insert(octet, *page), None, "group {octet:x} has two canonical pages");
            } else {
                *others.entry(octet).or_default() += 1;
                blocks_apart += u64::from(self.pages.listed(*page).count_ones());
            }
        }
        let stubs: Vec<u32> = self.pages.tombstones().collect();
        assert_eq!(self.locations.tombstones() as usize, stubs.len());
        for stub in &stubs {
            assert!(self.pages.is_canonical(*stub), "page {stub} lists no block and is not canonical");
            assert!(self.pages.siblings(*stub) > 0, "no page depends on tombstone page {stub}");
            let octet = self.pages.block_group(*stub);
            assert_eq!(anchors.insert(octet, *stub), None, "group {octet:x} has two canonical pages");
        }
        for (octet, anchor) in &anchors {
            assert_eq!(self.locations.canonical_page(*octet, &self.pages), Some(*anchor));
            assert_eq!(
                self.pages.siblings(*anchor),
                others.remove(octet).unwrap_or(0),
                "other pages of {octet:x}"
            );
        }
        assert!(others.is_empty(), "groups without a canonical page: {others:x?}");
        assert_eq!(self.locations.entries(), anchors.len() as u64 + blocks_apart);
        assert_eq!(self.pages.used() as usize, numbers.len() + stubs.len());
    }
}
