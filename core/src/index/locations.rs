//! Location of each listed block: one table entry finds the eight blocks of a block group.
//!
//! The first page of a block group is its *canonical page*: the group's table entry names it, and a
//! listed block is found there by its slot. Other pages may share the group: the first page of a
//! run that branches off inside the group, or one with equal shared bytes by accident or design.
//! Such a page has a table entry per listed block. The canonical page counts them, so one probe
//! mostly shows that a block is unlisted.
//!
//! A canonical page that loses its last block while others remain becomes a *tombstone page*. The
//! next page of that group reuses it, or it is released with the last of the others. Not here: the
//! table (`table.rs`) and page owners (`store.rs`).

use super::pages::{PageOwner, PageSlot, Pages};
use super::table::{BucketProbe as Entry, Table, TableKey};
use crate::id::BlockHash;

/// Page slot of every listed block.
#[derive(Clone, Debug, Default)]
pub(super) struct BlockLocations {
    table: Table,
    /// Listed blocks.
    blocks: u64,
    /// Number of tombstone pages.
    tombstones: u32,
}

/// A hash lookup in steps, so that several can run interleaved and share the memory latency:
/// [`BlockLocations::seek`], [`LocationProbe::probe_bucket`], [`LocationProbe::resolve`].
pub(super) struct LocationProbe<'a> {
    places: &'a BlockLocations,
    hash: BlockHash,
    entry: Entry<'a>,
    /// The most likely page slot.
    candidate: Option<PageSlot>,
}

impl LocationProbe<'_> {
    /// Reads the bucket and prefetches the page. Returns false if the hash is certainly unlisted.
    #[inline]
    pub(super) fn probe_bucket(&mut self, pages: &Pages) -> bool {
        let (may_be, guess) = self.entry.first_candidate();
        self.candidate = guess.map(|anchor| PageSlot::of_hash(anchor.page(), self.hash));
        self.candidate.inspect(|place| pages.prefetch(*place));
        may_be
    }

    /// The page slot, if the hash is listed.
    #[inline]
    pub(super) fn resolve(&self, pages: &Pages) -> Option<PageSlot> {
        match self.candidate.filter(|guess| pages.is_canonical_for(guess.page(), self.hash.block_group())) {
            Some(place) => self.places.find_from(place.page(), self.hash, pages),
            None => self.places.find(self.hash, pages),
        }
    }
}

impl BlockLocations {
    /// Announces the total number of entries, see [`Table::expect_entries`].
    pub(super) fn expect_entries(&mut self, entries: u64) {
        self.table.expect_entries(entries);
    }

    /// Listed blocks.
    pub(super) fn len(&self) -> u64 {
        self.blocks
    }

    /// Number of tombstone pages.
    pub(super) fn tombstones(&self) -> u32 {
        self.tombstones
    }

    /// Number of table entries: equal on replicas with equal pages.
    pub(super) fn entries(&self) -> u64 {
        self.table.len()
    }

    /// The canonical page of a block group.
    #[inline]
    pub(super) fn canonical_page(&self, octet: u64, pages: &Pages) -> Option<u32> {
        Some(self.table.find(TableKey::Group(octet), pages)?.page())
    }

    #[inline]
    pub(super) fn find(&self, hash: BlockHash, pages: &Pages) -> Option<PageSlot> {
        let anchor = self.canonical_page(hash.block_group(), pages)?;
        self.find_from(anchor, hash, pages)
    }

    /// Page slot of a listed hash, given the canonical page of its group.
    #[inline]
    fn find_from(&self, anchor: u32, hash: BlockHash, pages: &Pages) -> Option<PageSlot> {
        let place = PageSlot::of_hash(anchor, hash);
        if pages.lists(place, hash) {
            return Some(place);
        }
        if pages.siblings(anchor) == 0 { None } else { self.table.find(TableKey::Block(hash), pages) }
    }

    /// Prefetches the bucket of a hash's block group.
    #[inline]
    pub(super) fn prefetch(&self, hash: BlockHash) {
        self.table.seek(TableKey::Group(hash.block_group()));
    }

    /// Starts a lookup: prefetches the bucket of the hash's block group.
    #[inline]
    pub(super) fn seek(&self, hash: BlockHash) -> LocationProbe<'_> {
        LocationProbe {
            places: self,
            hash,
            entry: self.table.seek(TableKey::Group(hash.block_group())),
            candidate: None,
        }
    }

    /// Lists consecutive blocks of one group in a new page with this owner, up to the first that is
    /// listed elsewhere. Returns the page and the number listed. The page is `None` if the first
    /// block is listed; the result is `None` if all pages are taken.
    #[inline]
    pub(super) fn list_in_new_page(
        &mut self,
        hashes: &[BlockHash],
        owner: PageOwner,
        pages: &mut Pages,
    ) -> Option<(Option<u32>, u32)> {
        let page = pages.allocate()?;
        let octet = hashes[0].block_group();
        pages.init_page(page, octet, owner, true);
        if !self.table.insert(TableKey::Group(octet), PageSlot::new(page, 0), pages) {
            return Some(self.list_in_sibling(page, hashes, owner, pages));
        }
        pages.write(PageSlot::of_hash(page, hashes[0]), hashes);
        self.blocks += hashes.len() as u64;
        Some((Some(page), hashes.len() as u32))
    }

    /// Like [`BlockLocations::list_in_new_page`], for a group that has a canonical page; `page` was
    /// initialised as canonical.
    #[cold]
    fn list_in_sibling(
        &mut self,
        page: u32,
        hashes: &[BlockHash],
        owner: PageOwner,
        pages: &mut Pages,
    ) -> (Option<u32>, u32) {
        let Some(anchor) = self.canonical_page(hashes[0].block_group(), pages) else { return (None, 0) };
        if pages.listed(anchor) == 0 {
            pages.free(page);
            pages.assign_to_run(anchor, owner);
            let count = self.list(PageSlot::of_hash(anchor, hashes[0]), hashes, pages);
            self.tombstones -= u32::from(count > 0);
            return ((count > 0).then_some(anchor), count);
        }
        pages.clear_canonical(page);
        pages.add_sibling(anchor);
        let count = self.list(PageSlot::of_hash(page, hashes[0]), hashes, pages);
        if count == 0 {
            self.release_page(page, pages);
        }
        ((count > 0).then_some(page), count)
    }

    /// Lists consecutive blocks of the page's group from a slot on, up to the first that is listed
    /// elsewhere. Returns how many.
    #[inline]
    pub(super) fn list(&mut self, place: PageSlot, hashes: &[BlockHash], pages: &mut Pages) -> u32 {
        let page = place.page();
        let count = match pages.is_canonical(page) {
            true if pages.siblings(page) == 0 => hashes.len(),
            true => hashes.iter().take_while(|hash| self.is_unlisted_in_siblings(**hash, pages)).count(),
            false => self.insert_entries(place, hashes, pages),
        };
        pages.write(place, &hashes[..count]);
        self.blocks += count as u64;
        count as u32
    }

    fn is_unlisted_in_siblings(&self, hash: BlockHash, pages: &Pages) -> bool {
        self.table.find(TableKey::Block(hash), pages).is_none()
    }

    /// Adds a table entry per block, up to the first that is listed elsewhere. Returns how many.
    fn insert_entries(&mut self, place: PageSlot, hashes: &[BlockHash], pages: &mut Pages) -> usize {
        let Some(anchor) = self.canonical_page(pages.block_group(place.page()), pages) else { return 0 };
        let live = pages.listed(place.page());
        // The page must contain the key of an entry before it is added, but an unlisted block must
        // not look listed.
        pages.write(place, hashes);
        pages.set_listed(place.page(), live);
        let table = &mut self.table;
        let mut places = (place.0..).map(PageSlot);
        let enters = |hash: &&BlockHash| {
            !pages.lists(PageSlot::of_hash(anchor, **hash), **hash)
                && places.next().is_some_and(|place| table.insert(TableKey::Block(**hash), place, pages))
        };
        hashes.iter().take_while(enters).count()
    }

    /// Unlists the blocks with set bits and releases a page without listed blocks. Returns whether
    /// the page became empty.
    pub(super) fn unlist(&mut self, page: u32, bits: u8, pages: &mut Pages) -> bool {
        let bits = bits & pages.listed(page);
        if !pages.is_canonical(page) {
            for slot in (0..u8::BITS).filter(|slot| bits & 1 << slot != 0) {
                let place = PageSlot::new(page, slot);
                self.table.remove(TableKey::Block(pages.hash(place)), place, pages);
            }
        }
        self.blocks -= u64::from(bits.count_ones());
        let is_empty = pages.unlist(page, bits);
        if is_empty {
            self.release_page(page, pages);
        }
        is_empty
    }

    /// Releases a page without listed blocks. A canonical page stays while other pages have its
    /// group.
    fn release_page(&mut self, page: u32, pages: &mut Pages) {
        let octet = pages.block_group(page);
        if pages.is_canonical(page) {
            if pages.siblings(page) == 0 {
                self.table.remove(TableKey::Group(octet), PageSlot::new(page, 0), pages);
                pages.free(page);
            } else {
                self.tombstones += 1;
            }
            return;
        }
        pages.free(page);
        let Some(anchor) = self.canonical_page(octet, pages) else { return };
        if pages.remove_sibling(anchor) == 0 && pages.listed(anchor) == 0 {
            self.table.remove(TableKey::Group(octet), PageSlot::new(anchor, 0), pages);
            pages.free(anchor);
            self.tombstones -= 1;
        }
    }

    /// Adds a page from a snapshot, with its hashes from a slot on and the listed bits. Other pages
    /// await [`BlockLocations::attach_to_canonical`], because their canonical page may follow
    /// later. Returns false if the page is invalid.
    pub(super) fn restore_page(
        &mut self,
        place: PageSlot,
        owner: PageOwner,
        is_anchor: bool,
        hashes: &[BlockHash],
        live: u8,
        pages: &mut Pages,
    ) -> bool {
        let page = place.page();
        pages.init_page(page, hashes[0].block_group(), owner, is_anchor);
        pages.write(place, hashes);
        pages.set_listed(page, live);
        self.blocks += u64::from(live.count_ones());
        if is_anchor {
            return self.table.insert(
                TableKey::Group(hashes[0].block_group()),
                PageSlot::new(page, 0),
                pages,
            );
        }
        let mut listed =
            (place.0..).map(PageSlot).zip(hashes).filter(|(place, _)| live & 1 << place.slot() != 0);
        listed.all(|(place, hash)| self.table.insert(TableKey::Block(*hash), place, pages))
    }

    /// Adds a tombstone page from a snapshot. Returns false if it is invalid.
    pub(super) fn restore_tombstone(&mut self, page: u32, octet: u64, pages: &mut Pages) -> bool {
        if !pages.allocate_exact(page) {
            return false;
        }
        pages.init_page(page, octet, PageOwner::default(), true);
        self.tombstones += 1;
        self.table.insert(TableKey::Group(octet), PageSlot::new(page, 0), pages)
    }

    /// Counts a page at its canonical page. Returns false if there is none, or if both list the
    /// same block.
    pub(super) fn attach_to_canonical(&self, page: u32, pages: &mut Pages) -> bool {
        let Some(anchor) = self.canonical_page(pages.block_group(page), pages) else { return false };
        let both = pages.listed(page) & pages.listed(anchor);
        let is_twice =
            |slot: u32| pages.hash(PageSlot::new(page, slot)) == pages.hash(PageSlot::new(anchor, slot));
        if (0..u8::BITS).any(|slot| both & 1 << slot != 0 && is_twice(slot)) {
            return false;
        }
        pages.add_sibling(anchor);
        true
    }
}

#[cfg(test)]
impl BlockLocations {
    /// Entries in the overflow map.
    pub(super) fn overflow(&self) -> usize {
        self.table.overflow()
    }

    /// Buckets of the table.
    pub(super) fn buckets(&self) -> usize {
        self.table.buckets()
    }
}
