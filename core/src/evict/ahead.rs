//! Who leaves a queue some places behind whom, known when he comes in: so that memory is asked for many blocks at a
//! time.
//!
//! In a large tier every row of a queue lies in another page of memory, and even to ask for one holds the processor
//! up until the page is found. By their links rows are found one at a time, and that took a third of a decision; to
//! find several pages takes hardly longer than one. So each row names the block that came [`AHEAD`] places later, and
//! after every so many blocks that left as many are asked for. These are hints: a row that names nobody, or somebody
//! who was used since, costs time and changes nothing. Not here: the order of a queue ([`super::queue`]).

use super::BlockKey;
use super::queue::Links;

/// Places between a block and the one its row names. Twice as many gain nothing.
const AHEAD: usize = 8;

/// Whom a row names; at first nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ahead(u32);

impl Ahead {
    const NOBODY: Ahead = Ahead(u32::MAX);
}

impl Default for Ahead {
    fn default() -> Self {
        Ahead::NOBODY
    }
}

/// What is kept of a block and has room for a name.
pub(super) trait NamesAhead: Copy + Default {
    /// Not to be touched but by a [`Trail`].
    fn ahead(&mut self) -> &mut Ahead;
}

/// Who came last into a queue, and how many have led it since memory was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trail {
    /// A ring: who comes next takes the place of the one that is to name him.
    latest: [Ahead; AHEAD],
    next: u8,
    led: u8,
}

impl Default for Trail {
    fn default() -> Self {
        Trail { latest: [Ahead::NOBODY; AHEAD], next: 0, led: 0 }
    }
}

impl Trail {
    /// A block came in, at the warm end as a rule.
    pub(super) fn came<T: NamesAhead>(&mut self, links: &mut Links<T>, key: BlockKey) {
        let mut name = |key: u32, ahead| {
            if let Some(about) = links.about_mut(BlockKey(key)) {
                *about.ahead() = ahead;
            }
        };
        name(key.0, Ahead::NOBODY);
        let place = &mut self.latest[usize::from(self.next) % AHEAD];
        name(place.0, Ahead(key.0));
        *place = Ahead(key.0);
        self.next = (self.next + 1) % AHEAD as u8;
    }

    /// This block is the coldest now: asks the memory for those that will be.
    pub(super) fn leads<T: NamesAhead>(&mut self, links: &Links<T>, coldest: BlockKey) {
        self.led += 1;
        if usize::from(self.led) < AHEAD {
            // Where nobody names him.
            return links.prefetch_behind(coldest);
        }
        self.led = 0;
        named(links, coldest).for_each(|key| links.prefetch(key));
    }
}

/// Those that the [`AHEAD`] coldest blocks name, which were asked for before. Who names nobody gives a key nobody has.
fn named<T: NamesAhead>(links: &Links<T>, coldest: BlockKey) -> impl Iterator<Item = BlockKey> {
    let leading = std::iter::successors(Some(coldest), |&key| links.warmer(key)).take(AHEAD);
    leading.map(|key| BlockKey(links.about(key).ahead().0))
}

#[cfg(test)]
mod tests {
    use super::super::queue::Queue;
    use super::*;

    impl NamesAhead for Ahead {
        fn ahead(&mut self) -> &mut Ahead {
            self
        }
    }

    fn put(links: &mut Links<Ahead>, queue: &mut Queue, trail: &mut Trail, key: u32) {
        links.set_about(BlockKey(key), Ahead(3));
        links.push_warm(queue, BlockKey(key));
        trail.came(links, BlockKey(key));
    }

    #[test]
    fn the_coldest_name_those_that_are_coldest_next() {
        let (mut links, mut queue, mut trail) = (Links::default(), Queue::default(), Trail::default());
        // 37 has no divisor in common with 64: the keys are those below 64 in another order.
        let keys: Vec<u32> = (0..64).map(|at| at * 37 % 64).collect();
        keys.iter().for_each(|&key| put(&mut links, &mut queue, &mut trail, key));
        let after = |links: &Links<Ahead>, at: usize| {
            named(links, BlockKey(keys[at])).map(|key| key.0).collect::<Vec<_>>()
        };
        for at in 0..=64 - 2 * AHEAD {
            assert_eq!(after(&links, at), keys[at + AHEAD..at + 2 * AHEAD], "at {at}");
        }
        // Nobody came behind the last.
        assert_eq!(after(&links, 64 - AHEAD), [u32::MAX; AHEAD]);
    }

    #[test]
    fn who_comes_again_names_those_behind_its_new_place() {
        let (mut links, mut queue, mut trail) = (Links::default(), Queue::default(), Trail::default());
        (0..20).for_each(|key| put(&mut links, &mut queue, &mut trail, key));
        links.unlink(&mut queue, BlockKey(0));
        put(&mut links, &mut queue, &mut trail, 0);
        assert_eq!(links.about(BlockKey(0)), Ahead::NOBODY);
        (20..20 + AHEAD as u32).for_each(|key| put(&mut links, &mut queue, &mut trail, key));
        assert_eq!(links.about(BlockKey(0)), Ahead(20 + AHEAD as u32 - 1));
        // 12 came 8 before it.
        assert_eq!(links.about(BlockKey(20 - AHEAD as u32)), Ahead(0));
    }
}
