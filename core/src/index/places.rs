//! Where each listed block is: one entry of the table finds the eight blocks of an octet.
//!
//! The first page that is made with an octet is its *anchor*: the octet's entry in the table names it, and a block
//! is there if its slot lists it. A further page with the same octet (the first page of a run that goes off in the
//! middle of an octet, or of one whose octet is the same by accident or by choice) has an entry for each of its
//! listed blocks. The anchor counts these other pages, so that mostly one look says that a block is not listed. An
//! anchor whose last block goes while there are others stays, as a *stub*: the next page with that octet is made of
//! it, or the last of the others takes it along. Not here: how the table finds an entry (`table.rs`), and whose a
//! page is (`store.rs`).

use super::pages::{Pages, Place};
use super::table::{Key, Sought as Entry, Table};
use crate::id::BlockHash;

/// Place of every listed block.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    table: Table,
    /// Listed blocks.
    blocks: u64,
    /// Anchors that list nothing.
    stubs: u32,
}

/// A hash on the way to its place, step by step, so that several can be on their way at once and wait for
/// the memory together: [`Places::seek`], [`Sought::look`], [`Sought::place`].
pub(super) struct Sought<'a> {
    places: &'a Places,
    hash: BlockHash,
    entry: Entry<'a>,
    /// Where it most likely is.
    guess: Option<Place>,
}

impl Sought<'_> {
    /// Looks into the bucket, and asks the memory for the page. Answers false when the hash is surely not
    /// listed.
    #[inline]
    pub(super) fn look(&mut self, pages: &Pages) -> bool {
        let (may_be, guess) = self.entry.guess();
        self.guess = guess.map(|anchor| Place::of(anchor.page(), self.hash));
        self.guess.inspect(|place| pages.prefetch(*place));
        may_be
    }

    /// Where it is, if it is listed.
    #[inline]
    pub(super) fn place(&self, pages: &Pages) -> Option<Place> {
        match self.guess.filter(|guess| pages.is_anchor_of(guess.page(), self.hash.octet())) {
            Some(place) => self.places.find_from(place.page(), self.hash, pages),
            None => self.places.find(self.hash, pages),
        }
    }
}

impl Places {
    /// So many entries there will be in all, see [`Table::expect`].
    pub(super) fn expect(&mut self, entries: u64) {
        self.table.expect(entries);
    }

    /// Listed blocks.
    pub(super) fn len(&self) -> u64 {
        self.blocks
    }

    /// Anchors that list nothing, and stay because other pages have their octet.
    pub(super) fn stubs(&self) -> u32 {
        self.stubs
    }

    /// Entries of the table: equal on replicas with equal pages.
    pub(super) fn entries(&self) -> u64 {
        self.table.len()
    }

    /// The page that the octet of a hash is found by.
    #[inline]
    pub(super) fn anchor(&self, octet: u64, pages: &Pages) -> Option<u32> {
        Some(self.table.find(Key::Octet(octet), pages)?.page())
    }

    #[inline]
    pub(super) fn find(&self, hash: BlockHash, pages: &Pages) -> Option<Place> {
        let anchor = self.anchor(hash.octet(), pages)?;
        self.find_from(anchor, hash, pages)
    }

    /// Where a hash is, if it is listed, whose octet has this anchor.
    #[inline]
    fn find_from(&self, anchor: u32, hash: BlockHash, pages: &Pages) -> Option<Place> {
        let place = Place::of(anchor, hash);
        if pages.lists(place, hash) {
            return Some(place);
        }
        if pages.others(anchor) == 0 { None } else { self.table.find(Key::Block(hash), pages) }
    }

    /// Asks the memory for the bucket of a hash's octet.
    #[inline]
    pub(super) fn prefetch(&self, hash: BlockHash) {
        self.table.seek(Key::Octet(hash.octet()));
    }

    /// Begins to find a hash: asks the memory for the bucket of its octet.
    #[inline]
    pub(super) fn seek(&self, hash: BlockHash) -> Sought<'_> {
        Sought { places: self, hash, entry: self.table.seek(Key::Octet(hash.octet())), guess: None }
    }

    /// Lists blocks in a new page, up to the first that is listed elsewhere; all are of one octet, one after the
    /// other, and the page is told whose it is. Answers the page and how many; no page if the first is listed, and
    /// nothing when all pages are taken.
    #[inline]
    pub(super) fn list_in_new(
        &mut self,
        hashes: &[BlockHash],
        whose: (u32, u32),
        pages: &mut Pages,
    ) -> Option<(Option<u32>, u32)> {
        let page = pages.take()?;
        let octet = hashes[0].octet();
        pages.begin(page, octet, whose, true);
        if !self.table.insert(Key::Octet(octet), Place::new(page, 0), pages) {
            return Some(self.list_in_other(page, hashes, whose, pages));
        }
        pages.write(Place::of(page, hashes[0]), hashes);
        self.blocks += hashes.len() as u64;
        Some((Some(page), hashes.len() as u32))
    }

    /// The same where the octet has an anchor; for a page that was begun as one.
    #[cold]
    fn list_in_other(
        &mut self,
        page: u32,
        hashes: &[BlockHash],
        whose: (u32, u32),
        pages: &mut Pages,
    ) -> (Option<u32>, u32) {
        let Some(anchor) = self.anchor(hashes[0].octet(), pages) else { return (None, 0) };
        if pages.live(anchor) == 0 {
            pages.free(page);
            pages.adopt(anchor, whose);
            let count = self.list(Place::of(anchor, hashes[0]), hashes, pages);
            self.stubs -= u32::from(count > 0);
            return ((count > 0).then_some(anchor), count);
        }
        pages.stand_apart(page);
        pages.gain_other(anchor);
        let count = self.list(Place::of(page, hashes[0]), hashes, pages);
        if count == 0 {
            self.give_back(page, pages);
        }
        ((count > 0).then_some(page), count)
    }

    /// Lists blocks from a place on, whose octet is that of the page, up to the first that is listed elsewhere;
    /// answers how many.
    #[inline]
    pub(super) fn list(&mut self, place: Place, hashes: &[BlockHash], pages: &mut Pages) -> u32 {
        let page = place.page();
        let count = match pages.is_anchor(page) {
            true if pages.others(page) == 0 => hashes.len(),
            true => hashes.iter().take_while(|hash| self.is_new_to_others(**hash, pages)).count(),
            false => self.enter_each(place, hashes, pages),
        };
        pages.write(place, &hashes[..count]);
        self.blocks += count as u64;
        count as u32
    }

    fn is_new_to_others(&self, hash: BlockHash, pages: &Pages) -> bool {
        self.table.find(Key::Block(hash), pages).is_none()
    }

    /// Puts entries of blocks into the table, up to the first that is listed elsewhere; answers how many.
    fn enter_each(&mut self, place: Place, hashes: &[BlockHash], pages: &mut Pages) -> usize {
        let Some(anchor) = self.anchor(pages.octet(place.page()), pages) else { return 0 };
        let live = pages.live(place.page());
        // An entry's page must say what its key is, and a block that is not listed must not look listed.
        pages.write(place, hashes);
        pages.list(place.page(), live);
        let table = &mut self.table;
        let mut places = (place.0..).map(Place);
        let enters = |hash: &&BlockHash| {
            !pages.lists(Place::of(anchor, **hash), **hash)
                && places.next().is_some_and(|place| table.insert(Key::Block(**hash), place, pages))
        };
        hashes.iter().take_while(enters).count()
    }

    /// Unlists the blocks of a page whose bits are set, and gives the page back when none is left; answers whether
    /// that was so.
    pub(super) fn unlist(&mut self, page: u32, bits: u8, pages: &mut Pages) -> bool {
        let bits = bits & pages.live(page);
        if !pages.is_anchor(page) {
            for slot in (0..u8::BITS).filter(|slot| bits & 1 << slot != 0) {
                let place = Place::new(page, slot);
                self.table.remove(Key::Block(pages.hash(place)), place, pages);
            }
        }
        self.blocks -= u64::from(bits.count_ones());
        let is_empty = pages.unlist(page, bits);
        if is_empty {
            self.give_back(page, pages);
        }
        is_empty
    }

    /// Gives a page without listed blocks back; an anchor stays while other pages have its octet.
    fn give_back(&mut self, page: u32, pages: &mut Pages) {
        let octet = pages.octet(page);
        if pages.is_anchor(page) {
            if pages.others(page) == 0 {
                self.table.remove(Key::Octet(octet), Place::new(page, 0), pages);
                pages.free(page);
            } else {
                self.stubs += 1;
            }
            return;
        }
        pages.free(page);
        let Some(anchor) = self.anchor(octet, pages) else { return };
        if pages.lose_other(anchor) == 0 && pages.live(anchor) == 0 {
            self.table.remove(Key::Octet(octet), Place::new(anchor, 0), pages);
            pages.free(anchor);
            self.stubs -= 1;
        }
    }

    /// Takes in a page as a snapshot describes it, with the hashes from a slot on and which of them are listed.
    /// One that is no anchor waits for [`Places::join_anchor`], because its anchor may come later. Answers false when
    /// it cannot be.
    pub(super) fn restore(
        &mut self,
        place: Place,
        (whose, is_anchor): ((u32, u32), bool),
        (hashes, live): (&[BlockHash], u8),
        pages: &mut Pages,
    ) -> bool {
        let page = place.page();
        pages.begin(page, hashes[0].octet(), whose, is_anchor);
        pages.write(place, hashes);
        pages.list(page, live);
        self.blocks += u64::from(live.count_ones());
        if is_anchor {
            return self.table.insert(Key::Octet(hashes[0].octet()), Place::new(page, 0), pages);
        }
        let mut listed =
            (place.0..).map(Place).zip(hashes).filter(|(place, _)| live & 1 << place.slot() != 0);
        listed.all(|(place, hash)| self.table.insert(Key::Block(*hash), place, pages))
    }

    /// Takes in an anchor that lists nothing.
    pub(super) fn restore_stub(&mut self, page: u32, octet: u64, pages: &mut Pages) -> bool {
        if !pages.take_exactly(page) {
            return false;
        }
        pages.begin(page, octet, (0, 0), true);
        self.stubs += 1;
        self.table.insert(Key::Octet(octet), Place::new(page, 0), pages)
    }

    /// Counts a page that is no anchor with its anchor. Answers false when there is none, or when that lists one of
    /// its blocks.
    pub(super) fn join_anchor(&self, page: u32, pages: &mut Pages) -> bool {
        let Some(anchor) = self.anchor(pages.octet(page), pages) else { return false };
        let both = pages.live(page) & pages.live(anchor);
        let is_twice = |slot: u32| pages.hash(Place::new(page, slot)) == pages.hash(Place::new(anchor, slot));
        if (0..u8::BITS).any(|slot| both & 1 << slot != 0 && is_twice(slot)) {
            return false;
        }
        pages.gain_other(anchor);
        true
    }
}

#[cfg(test)]
impl Places {
    /// Entries that found no room in the table.
    pub(super) fn strays(&self) -> usize {
        self.table.strays()
    }

    /// Buckets of the table.
    pub(super) fn buckets(&self) -> usize {
        self.table.buckets()
    }
}
