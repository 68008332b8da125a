//! A snapshot is what the index was when it was begun, whatever is applied before it is read, and nobody but who reads
//! it notices.
//!
//! Not here: what a snapshot is made of, and how it is restored (`snapshot.rs`).

use proptest::prelude::*;

use super::random::{Intent, Speakers, intents, tight};
use super::reference::Reference;
use super::*;

/// What is done beside a command.
#[derive(Clone, Debug)]
enum Beside {
    Nothing,
    Begin {
        chunk_bytes: usize,
    },
    Read {
        looks: usize,
    },
    End,
    /// By one that was restored from its snapshot.
    Replace,
}

fn beside() -> impl Strategy<Value = Beside> {
    prop_oneof![
        4 => Just(Beside::Nothing),
        2 => (16..200usize).prop_map(|chunk_bytes| Beside::Begin { chunk_bytes }),
        8 => (1..4usize).prop_map(|looks| Beside::Read { looks }),
        1 => prop::bool::weighted(0.3).prop_map(|ends| if ends { Beside::End } else { Beside::Replace }),
    ]
}

/// A snapshot that is being made, and what it would be if nothing were applied meanwhile.
struct Made {
    cursor: SnapshotCursor,
    chunks: Vec<Vec<u8>>,
    wanted: Vec<Vec<u8>>,
}

impl Made {
    fn begin(index: &mut Index, chunk_bytes: usize) -> Made {
        let begun = |index: &mut Index| {
            let mut cursor = index.prepare_snapshot();
            index.begin_snapshot(&cursor);
            cursor.chunk_bytes = chunk_bytes;
            Made { chunks: vec![cursor.head()], cursor, wanted: Vec::new() }
        };
        let mut apart = index.clone();
        let mut at_once = begun(&mut apart);
        at_once.read(&apart, usize::MAX);
        Made { wanted: at_once.chunks, ..begun(index) }
    }

    /// Looks so often, or until all is read; answers whether it is.
    fn read(&mut self, index: &Index, looks: usize) -> bool {
        for _ in 0..looks {
            if self.cursor.is_read() {
                self.chunks.push(self.cursor.end());
                return true;
            }
            self.chunks.extend(index.snapshot_chunk(&mut self.cursor).unwrap());
        }
        false
    }
}

/// An index beside whose commands snapshots are made.
struct Snapped {
    index: Index,
    making: Option<Made>,
    /// Cursors of snapshots that are not made any more.
    over: Vec<SnapshotCursor>,
}

impl Snapped {
    fn step(&mut self, beside: &Beside) -> Result<(), TestCaseError> {
        match *beside {
            Beside::Nothing => {}
            Beside::Begin { chunk_bytes } => {
                self.over.extend(self.making.take().map(|made| made.cursor));
                self.making = Some(Made::begin(&mut self.index, chunk_bytes));
            }
            Beside::Read { looks } => self.read(looks)?,
            Beside::End => self.end(),
            Beside::Replace => {
                self.over.extend(self.making.take().map(|made| made.cursor));
                self.index = Index::restore(&self.index.snapshot(), tight()).unwrap();
            }
        }
        for cursor in &mut self.over {
            prop_assert!(cursor.is_read() || self.index.snapshot_chunk(cursor) == Err(Superseded));
            self.index.end_snapshot(cursor);
        }
        Ok(())
    }

    fn read(&mut self, looks: usize) -> Result<(), TestCaseError> {
        if let Some(made) = &mut self.making
            && made.read(&self.index, looks)
        {
            prop_assert_eq!(&made.chunks, &made.wanted);
            self.end();
        }
        Ok(())
    }

    fn end(&mut self) {
        if let Some(made) = self.making.take() {
            self.index.end_snapshot(&made.cursor);
            self.over.push(made.cursor);
        }
    }
}

proptest! {
    #[test]
    fn a_snapshot_is_what_was_when_it_was_begun(
        intents in intents(Speakers::Liars),
        besides in prop::collection::vec(beside(), 85),
    ) {
        let mut reference = Reference::new(tight());
        let mut alone = Index::new(tight());
        let mut snapped = Snapped { index: Index::new(tight()), making: None, over: Vec::new() };
        for (intent, beside) in intents.iter().zip(&besides) {
            let command = Intent::command(intent, &reference);
            let answer = reference.apply(&command);
            prop_assert_eq!(&alone.apply(&command), &answer);
            prop_assert_eq!(&snapped.index.apply(&command), &answer);
            snapped.step(beside)?;
            prop_assert_eq!(snapped.index.digest(), alone.digest());
        }
        snapped.read(usize::MAX)?;
        snapped.index.store.check();
        prop_assert_eq!(snapped.index.snapshot(), alone.snapshot());
    }
}

/// Blocks of several chunks of pages and of runs.
const MANY: u64 = 3_000;

/// Reads all of a snapshot that was begun before these changes of the only node.
fn read_after(index: &mut Fixture, changes: Vec<Vec<Change>>) {
    let mut made = Made::begin(&mut index.0, 100);
    changes.into_iter().for_each(|changes| index.say(1, changes));
    assert!(made.read(&index.0, usize::MAX));
    assert_eq!(made.chunks, made.wanted);
    index.0.store.check();
}

#[test]
fn what_is_all_gone_is_in_the_snapshot() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored(0..MANY, Tier::Dram)]);
    read_after(&mut index, vec![vec![dropped(0..MANY, Tier::Dram)]]);
    assert_eq!((index.0.store.len(), index.0.store.runs.used(), index.0.store.pages.used()), (0, 0, 0));
}

#[test]
fn what_took_the_place_of_something_else_is_not_in_the_snapshot() {
    let mut index = Fixture::with_nodes(1);
    index.say(1, vec![stored(0..MANY, Tier::Dram)]);
    let (gone, new) = (dropped(0..MANY, Tier::Dram), stored(9_000..9_000 + 2 * MANY, Tier::Ssd));
    read_after(&mut index, vec![vec![gone], vec![new]]);
    assert_eq!(index.0.store.len(), 2 * MANY);
}

#[test]
fn pages_that_were_free_and_stubs_that_came_later_are_not_in_the_snapshot() {
    let mut index = Fixture::with_nodes(1);
    let twins = |from: u64| {
        let twins = (from..from + 8).map(twin).collect();
        vec![
            stored(from..from + 8, Tier::Dram),
            Change::Stored { parent: None, blocks: twins, tier: Tier::Dram },
            dropped(from..from + 8, Tier::Dram),
        ]
    };
    // One stub among them, free pages before it, and after it.
    index.say(1, vec![stored(0..400, Tier::Dram)]);
    index.say(1, twins(800));
    index.say(
        1,
        vec![stored(400..600, Tier::Dram), dropped(100..200, Tier::Dram), dropped(450..500, Tier::Dram)],
    );
    assert_eq!(index.0.store.odd_octets().0, 1);
    // The free ones become stubs, and the one that was there is none any more.
    let later = (0..8).map(|nth| twins(2_000 + 8 * nth)).collect();
    read_after(&mut index, [vec![vec![stored(800..808, Tier::Dram)]], later].concat());
    assert_eq!(index.0.store.odd_octets().0, 8);
}
