//! Concurrent snapshots: a snapshot shows the index as it was when it began, whatever is applied
//! before it is read, and does not affect the index.
//!
//! Not here: the contents of a snapshot, and its restore (`snapshot.rs`).

use proptest::prelude::*;

use super::random::{Honesty, Intent, intents, tight};
use super::reference::ReferenceIndex;
use super::*;

/// A snapshot action between two commands.
#[derive(Clone, Debug)]
enum SnapshotAction {
    Nothing,
    Begin {
        chunk_bytes: usize,
    },
    Read {
        looks: usize,
    },
    End,
    /// Replaces the index by one restored from its snapshot.
    Replace,
}

fn snapshot_action() -> impl Strategy<Value = SnapshotAction> {
    prop_oneof![
        4 => Just(SnapshotAction::Nothing),
        2 => (16..200usize).prop_map(|chunk_bytes| SnapshotAction::Begin { chunk_bytes }),
        8 => (1..4usize).prop_map(|looks| SnapshotAction::Read { looks }),
        1 => prop::bool::weighted(0.3)
            .prop_map(|ends| if ends { SnapshotAction::End } else { SnapshotAction::Replace }),
    ]
}

/// A snapshot in progress, and the chunks expected if no command were applied meanwhile.
struct SnapshotRun {
    cursor: SnapshotCursor,
    chunks: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
}

impl SnapshotRun {
    fn begin(index: &mut Index, chunk_bytes: usize) -> SnapshotRun {
        let begun = |index: &mut Index| {
            let mut cursor = index.prepare_snapshot();
            index.begin_snapshot(&cursor);
            cursor.chunk_bytes = chunk_bytes;
            SnapshotRun { chunks: vec![cursor.header()], cursor, expected: Vec::new() }
        };
        let mut apart = index.clone();
        let mut at_once = begun(&mut apart);
        at_once.read(&apart, usize::MAX);
        SnapshotRun { expected: at_once.chunks, ..begun(index) }
    }

    /// Reads up to `looks` chunks; returns whether the snapshot is complete.
    fn read(&mut self, index: &Index, looks: usize) -> bool {
        for _ in 0..looks {
            if self.cursor.is_fully_read() {
                self.chunks.push(self.cursor.end());
                return true;
            }
            self.chunks.extend(index.snapshot_chunk(&mut self.cursor).unwrap());
        }
        false
    }
}

/// An index with snapshots in progress between its commands.
struct SnapshottedIndex {
    index: Index,
    current: Option<SnapshotRun>,
    /// Cursors of snapshots that are over.
    ended: Vec<SnapshotCursor>,
}

impl SnapshottedIndex {
    fn step(&mut self, beside: &SnapshotAction) -> Result<(), TestCaseError> {
        match *beside {
            SnapshotAction::Nothing => {}
            SnapshotAction::Begin { chunk_bytes } => {
                self.ended.extend(self.current.take().map(|made| made.cursor));
                self.current = Some(SnapshotRun::begin(&mut self.index, chunk_bytes));
            }
            SnapshotAction::Read { looks } => self.read(looks)?,
            SnapshotAction::End => self.end(),
            SnapshotAction::Replace => {
                self.ended.extend(self.current.take().map(|made| made.cursor));
                self.index = Index::restore(&self.index.snapshot(), tight()).unwrap();
            }
        }
        for cursor in &mut self.ended {
            prop_assert!(
                cursor.is_fully_read() || self.index.snapshot_chunk(cursor) == Err(SnapshotSuperseded)
            );
            self.index.end_snapshot(cursor);
        }
        Ok(())
    }

    fn read(&mut self, looks: usize) -> Result<(), TestCaseError> {
        if let Some(made) = &mut self.current
            && made.read(&self.index, looks)
        {
            prop_assert_eq!(&made.chunks, &made.expected);
            self.end();
        }
        Ok(())
    }

    fn end(&mut self) {
        if let Some(made) = self.current.take() {
            self.index.end_snapshot(&made.cursor);
            self.ended.push(made.cursor);
        }
    }
}

proptest! {
    #[test]
    fn snapshot_shows_the_index_at_its_beginning(
        intents in intents(Honesty::Liars),
        besides in prop::collection::vec(snapshot_action(), 85),
    ) {
        let mut reference = ReferenceIndex::new(tight());
        let mut alone = Index::new(tight());
        let mut snapped = SnapshottedIndex { index: Index::new(tight()), current: None, ended: Vec::new() };
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

/// Blocks that fill several chunks of pages and of runs.
const MANY: u64 = 3_000;

/// Reads a whole snapshot that began before these changes of the only node.
fn read_after(index: &mut Fixture, changes: Vec<Vec<Change>>) {
    let mut made = SnapshotRun::begin(&mut index.0, 100);
    changes.into_iter().for_each(|changes| index.announce_next(1, changes));
    assert!(made.read(&index.0, usize::MAX));
    assert_eq!(made.chunks, made.expected);
    index.0.store.check();
}

#[test]
fn blocks_dropped_meanwhile_are_in_the_snapshot() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(0..MANY, Tier::Dram)]);
    read_after(&mut index, vec![vec![dropped(0..MANY, Tier::Dram)]]);
    assert_eq!(
        (index.0.store.len(), index.0.store.runs.number_limit(), index.0.store.pages.used()),
        (0, 0, 0)
    );
}

#[test]
fn replacement_blocks_are_not_in_the_snapshot() {
    let mut index = Fixture::with_nodes(1);
    index.announce_next(1, vec![stored(0..MANY, Tier::Dram)]);
    let (gone, new) = (dropped(0..MANY, Tier::Dram), stored(9_000..9_000 + 2 * MANY, Tier::Ssd));
    read_after(&mut index, vec![vec![gone], vec![new]]);
    assert_eq!(index.0.store.len(), 2 * MANY);
}

#[test]
fn later_tombstones_are_not_in_the_snapshot() {
    let mut index = Fixture::with_nodes(1);
    let twins = |from: u64| {
        let twins = (from..from + 8).map(sibling_block).collect();
        vec![
            stored(from..from + 8, Tier::Dram),
            Change::Stored { parent: None, blocks: twins, tier: Tier::Dram },
            dropped(from..from + 8, Tier::Dram),
        ]
    };
    // One tombstone page among them, with free pages before and after it.
    index.announce_next(1, vec![stored(0..400, Tier::Dram)]);
    index.announce_next(1, twins(800));
    index.announce_next(
        1,
        vec![stored(400..600, Tier::Dram), dropped(100..200, Tier::Dram), dropped(450..500, Tier::Dram)],
    );
    assert_eq!(index.0.store.group_anomalies().0, 1);
    // The free pages become tombstones, and the earlier tombstone ends.
    let later = (0..8).map(|nth| twins(2_000 + 8 * nth)).collect();
    read_after(&mut index, [vec![vec![stored(800..808, Tier::Dram)]], later].concat());
    assert_eq!(index.0.store.group_anomalies().0, 8);
}
