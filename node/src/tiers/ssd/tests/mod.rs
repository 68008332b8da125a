//! The tier against a real directory: round trips, restarts, torn and overwritten bytes, full media. Devices
//! that break are in `faulty`, crashes in `crashes`.
#![allow(clippy::unwrap_used)]

mod book;
mod crashes;
mod faulty;
mod golden;
mod slow;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use kv_core::evict::BlockTraits;
use kv_core::id::{Generation, TenantId};
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::{KeyForm, seal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::lane::{RESCUES_BESIDE_READERS_MAX, RESCUES_MAX};
use super::*;
use crate::arena::{Arena, ArenaShape, Purpose};
use crate::test_log::Log;

const IDENTITY: IdentityDigest = IdentityDigest([7; 16]);

struct Bench {
    ssd: Ssd,
    reports: UnboundedReceiver<Report>,
    report: ScanReport,
    arena: Arena,
}

/// Says clearly when a test that should run on io_uring did not.
fn config(dir: &Path, uring: bool) -> SsdConfig {
    if uring && io_uring::IoUring::new(2).is_err() {
        println!("SKIPPED io_uring: the kernel refuses it here; this test ran on plain calls");
    }
    SsdConfig {
        dirs: vec![dir.to_owned()],
        identity: IDENTITY,
        capacity: Capacity::Blocks(16),
        frame_bytes_max: frame(0).len(),
        depth: Depth::of(frame(0).len()),
        uring,
        seed: 1,
        arena: None,
        faults: Arc::default(),
    }
}

fn open(config: &SsdConfig) -> Bench {
    let (send, reports) = unbounded_channel();
    let (ssd, report) = Ssd::open(config, &send).unwrap();
    Bench { ssd, reports, report, arena: Arena::new(ArenaShape::equal(8192, 16, 0)).unwrap() }
}

fn hash(number: u8) -> BlockHash {
    BlockHash([number; 16])
}

fn frame(number: u8) -> Bytes {
    let payload = vec![number; 6000];
    placed(number, seal(IDENTITY, hash(number), KeyForm::Rotated, &[3000, 3000], &payload).unwrap().bytes)
}

/// Half of all frames begin at a page, as those in the arena do: they are written from where they lie.
fn placed(number: u8, frame: Bytes) -> Bytes {
    if number.is_multiple_of(2) {
        return frame;
    }
    let mut pages = buffer::PageBuffer::new(frame.len());
    pages[..frame.len()].copy_from_slice(&frame);
    // What lies behind a frame is not its own and must not be written.
    pages[frame.len()..].fill(0xee);
    Bytes::from_owner(pages).slice(..frame.len())
}

fn header(number: u8) -> RecordHeader {
    let bytes = u32::try_from(frame(number).len()).unwrap();
    let (offset_blocks, fingerprint) = (u32::from(number), hash(number).fingerprint());
    let traits = BlockTraits { offset_blocks, bytes, fingerprint, ..BlockTraits::default() };
    RecordHeader {
        hash: hash(number),
        parent: None,
        tenant: TenantId(1),
        traits,
        generation: Generation(0),
        sequence: 0,
    }
}

impl Bench {
    /// The end of the next job that was asked for.
    fn done(&mut self) -> Done {
        loop {
            let report = self.reports.blocking_recv().unwrap();
            let done = self.ssd.take_in(report);
            self.move_all();
            match done {
                Some(Done::Checked { .. } | Done::Failed { .. }) | None => {}
                Some(done) => return done,
            }
        }
    }

    /// Everything is worth being moved.
    fn move_all(&mut self) {
        self.ssd.next_to_move();
        self.ssd.go_on();
    }

    fn save(&mut self, number: u8) -> io::Result<SsdRecord> {
        let record = loop {
            match self.ssd.write(u64::from(number), 0, header(number), &frame(number))? {
                Some(record) => break record,
                // Space comes back as rescues end.
                None => {
                    let report = self.reports.blocking_recv().unwrap();
                    assert!(self.ssd.take_in(report).is_none());
                    self.move_all();
                }
            }
        };
        match self.done() {
            Done::Written { token, result } => {
                assert_eq!(token, u64::from(number));
                result.map(|()| record)
            }
            other => panic!("{other:?}"),
        }
    }

    fn load(&mut self, number: u8, record: SsdRecord) -> Result<Bytes, ReadFault> {
        self.load_of(number, record, frame(number).len())
    }

    /// The same of a frame with so many bytes.
    fn load_of(&mut self, number: u8, record: SsdRecord, bytes: usize) -> Result<Bytes, ReadFault> {
        let into = self.arena.take(bytes, Purpose::Load).unwrap();
        self.ssd.read(1, record, (hash(number), Generation(0)), into).unwrap();
        match self.done() {
            Done::Read { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    /// Where a record begins in its file.
    fn at(&self, record: SsdRecord) -> u64 {
        let book = &self.ssd.lanes[usize::from(record.lane)].book;
        let place = book.spot(record.id).unwrap().place;
        book.shape().at(place.head.segment, place.page)
    }

    fn shape(&self) -> Shape {
        self.ssd.lanes[0].book.shape()
    }

    fn found(&self) -> Vec<u8> {
        self.report.blocks.iter().map(|found| found.header.hash.0[0]).collect()
    }
}

fn only_file(dir: &Path) -> PathBuf {
    dir.join("segments.kvs")
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
fn blocks_come_back_as_they_were_and_after_a_restart_too() {
    for uring in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), uring));
        let records: Vec<SsdRecord> = (1..=10).map(|number| bench.save(number).unwrap()).collect();
        assert_eq!(bench.load(3, records[2]).unwrap(), frame(3));
        drop(bench);
        let mut bench = open(&config(dir.path(), uring));
        assert_eq!(bench.found(), (1..=10).collect::<Vec<u8>>(), "in order of writing");
        assert_eq!((bench.report.damaged, bench.report.torn), (0, 0));
        let found = bench.report.blocks[4];
        assert_eq!((found.header.traits, found.header.tenant), (header(5).traits, TenantId(1)));
        bench.save(11).unwrap();
        for found in bench.report.blocks.clone() {
            let number = found.header.hash.0[0];
            assert_eq!(bench.load(number, found.record).unwrap(), frame(number));
        }
    }
}

#[test]
fn as_many_small_blocks_as_a_node_moves_at_once_are_written_and_found() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![dir.path().join("a"), dir.path().join("b")];
    let config = SsdConfig { dirs, depth: Depth::deep(frame(0).len()), ..config(dir.path(), true) };
    let mut bench = open(&config);
    let count = config.depth.moves;
    assert!(count > 700, "{count}");
    let mut records = Vec::new();
    for nth in 0..count {
        let number = (nth % 251) as u8;
        records.extend(bench.ssd.write(nth as u64, 0, header(number), &frame(number)).unwrap());
    }
    assert_eq!(records.len(), count, "all of them have their place at once");
    for _ in 0..count {
        assert!(matches!(bench.done(), Done::Written { result: Ok(()), .. }));
    }
    assert_eq!(bench.load(250, records[250]).unwrap(), frame(250));
    drop(bench);
    assert_eq!(open(&config).report.blocks.len(), 251, "each once, however often it was written");
}

#[test]
fn many_open_writes_share_flushes_and_all_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    for number in 1..=16u8 {
        assert!(bench.ssd.write(u64::from(number), 0, header(number), &frame(number)).unwrap().is_some());
    }
    let mut tokens: Vec<u64> = (0..16)
        .map(|_| match bench.done() {
            Done::Written { token, result: Ok(()) } => token,
            other => panic!("{other:?}"),
        })
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (1..=16).collect::<Vec<u64>>());
}

#[test]
fn overwritten_payload_is_found_when_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let record = bench.save(1).unwrap();
    overwrite(&only_file(dir.path()), bench.at(record) + 4000, b"oops");
    assert!(matches!(bench.load(1, record), Err(ReadFault::Corrupt(_))));
}

#[test]
fn a_record_of_another_block_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let (one, two) = (bench.save(1).unwrap(), bench.save(2).unwrap());
    assert_ne!(one, two);
    assert!(matches!(bench.load(1, two), Err(ReadFault::Corrupt(_))));
}

#[test]
fn a_record_that_is_not_whole_is_left_out_of_a_segment_without_a_footer() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let records: Vec<SsdRecord> = (1..=5).map(|number| bench.save(number).unwrap()).collect();
    let ats: Vec<u64> = records.iter().map(|record| bench.at(*record)).collect();
    drop(bench);
    let file = only_file(dir.path());
    overwrite(&file, ats[0] + 8192 - 100, b"x");
    overwrite(&file, ats[1] + 20, b"x");
    overwrite(&file, ats[3] + 5000, b"x");
    let bench = open(&config(dir.path(), true));
    assert_eq!((bench.found(), bench.report.torn), (vec![3, 5], 2));
}

/// Ten blocks: the first seven fill a segment, which has its footer then.
fn sealed(dir: &Path) -> Bench {
    let mut bench = open(&config(dir, true));
    (1..=10).for_each(|number| assert!(bench.save(number).is_ok()));
    bench
}

#[test]
fn a_full_segment_is_known_by_its_footer() {
    let dir = tempfile::tempdir().unwrap();
    let bench = sealed(dir.path());
    let shape = bench.shape();
    drop(bench);
    // A record that the footer names is not looked at before it is read.
    let file = only_file(dir.path());
    overwrite(&file, shape.at(0, 1) + 20, b"x");
    let mut bench = open(&config(dir.path(), true));
    assert_eq!((bench.found(), bench.report.torn), ((1..=10).collect(), 0));
    let found = bench.report.blocks[0];
    assert!(matches!(bench.load(1, found.record), Err(ReadFault::Corrupt(_))));
    drop(bench);
    // Without footer and head, the other segment is still read.
    overwrite(&file, shape.at(0, shape.segment_pages) - 60, b"x");
    let bench = open(&config(dir.path(), true));
    assert_eq!(bench.found(), (2..=10).collect::<Vec<u8>>(), "the records say it too");
    drop(bench);
    overwrite(&file, shape.at(0, shape.segment_pages) - 60, b"x");
    overwrite(&file, shape.at(0, 0) + 9, b"x");
    let log = Log::start();
    let bench = open(&config(dir.path(), true));
    let here = dir.path().display().to_string();
    assert_eq!((bench.found(), bench.report.damaged), ((8..=10).collect(), 1));
    says("a segment with a damaged head and no footer", &log.line("damaged segment"), &[&here]);
}

#[test]
fn a_segment_whose_head_rotted_is_known_by_its_footer() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    overwrite(&only_file(dir.path()), shape.at(0, 0) + 9, b"x");
    assert_eq!(open(&config(dir.path(), true)).found(), (1..=10).collect::<Vec<u8>>());
}

#[test]
fn a_footer_of_an_earlier_use_does_not_speak_for_a_segment_whose_head_rotted() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    let file = only_file(dir.path());
    // Later uses wrote over the first two records, and the last one's head rotted.
    overwrite(&file, shape.at(0, 1), &vec![0; 4 * 4096]);
    overwrite(&file, shape.at(0, 0) + 9, b"x");
    assert_eq!(open(&config(dir.path(), true)).found(), (3..=10).collect::<Vec<u8>>());
}

#[test]
fn a_truncated_file_gives_the_segments_that_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    let file = std::fs::OpenOptions::new().write(true).open(only_file(dir.path())).unwrap();
    file.set_len(shape.at(1, 3)).unwrap();
    let mut bench = open(&config(dir.path(), true));
    assert_eq!(bench.found(), (1..=7).collect::<Vec<u8>>());
    let again = bench.save(9).unwrap();
    assert_eq!(bench.load(9, again).unwrap(), frame(9));
}

#[test]
fn space_comes_back_and_the_file_never_outgrows_its_shape() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let mut here: Vec<(u8, SsdRecord)> = Vec::new();
    for round in 0..1500usize {
        let number = u8::try_from(round % 251).unwrap();
        let record = bench.save(number).unwrap();
        // One of each segment stays long, the others go soon: without rescues all segments would be held.
        if !round.is_multiple_of(7) {
            bench.ssd.free(record);
        } else if here.len() < 15 {
            here.push((number, record));
        } else {
            let (_, old) = std::mem::replace(&mut here[round * 31 % 15], (number, record));
            bench.ssd.free(old);
        }
    }
    for (number, record) in here {
        assert_eq!(bench.load(number, record).unwrap(), frame(number));
    }
    let wear = bench.ssd.wear();
    assert!(wear.rescued_bytes > 0 && wear.rescued_bytes < wear.saved_bytes, "{wear:?}");
    let bytes = only_file(dir.path()).metadata().unwrap().len();
    assert!(bytes <= bench.shape().bytes_max(), "{bytes} of {}", bench.shape().bytes_max());
}

#[test]
fn a_damaged_superblock_sets_the_file_aside() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    bench.save(1).unwrap();
    drop(bench);
    overwrite(&only_file(dir.path()), 9, b"x");
    let log = Log::start();
    let mut bench = open(&config(dir.path(), true));
    says("an SSD file with a damaged head", &log.line("set aside"), &[&dir.path().display().to_string()]);
    assert!(bench.report.blocks.is_empty());
    assert_eq!(bench.report.quarantined, vec![dir.path().join("segments.kvs.quarantined")]);
    assert!(bench.report.quarantined[0].exists());
    bench.save(2).unwrap();
    drop(bench);
    assert_eq!(open(&config(dir.path(), true)).report.quarantined.len(), 1, "named again at every start");
}

#[test]
fn files_set_aside_before_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    for number in 1..=3 {
        let mut bench = open(&config(dir.path(), true));
        bench.save(number).unwrap();
        drop(bench);
        overwrite(&only_file(dir.path()), 9, &[number]);
    }
    let aside = open(&config(dir.path(), true)).report.quarantined;
    assert_eq!(aside.len(), 3);
    let mut marks: Vec<u8> = aside.iter().map(|path| std::fs::read(path).unwrap()[9]).collect();
    marks.sort_unstable();
    assert_eq!(marks, [1, 2, 3], "each with its own contents");
}

#[test]
fn a_file_of_an_earlier_release_is_set_aside_and_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("blocks-8192.kvs"), b"slots").unwrap();
    let log = Log::start();
    let bench = open(&config(dir.path(), true));
    says("an SSD file of an earlier release", &log.line("set aside"), &[&dir.path().display().to_string()]);
    assert_eq!(std::fs::read(&bench.report.quarantined[0]).unwrap(), b"slots");
}

#[test]
fn an_unreadable_segment_costs_its_blocks_and_is_not_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    let config = config(dir.path(), true);
    config.faults.unreadable_segment.store(1, Ordering::Relaxed);
    let mut bench = open(&config);
    assert_eq!((bench.found(), bench.report.damaged), ((8..=10).collect(), 1));
    assert!(bench.report.quarantined.is_empty());
    let here: Vec<u64> = (20..100u8)
        .map(|number| {
            let record = bench.save(number).unwrap();
            bench.at(record)
        })
        .collect();
    assert!(here.iter().all(|at| *at >= shape.at(1, 0)), "another one takes its turn");
}

#[test]
fn many_segments_are_read_at_once_and_stand_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let config = SsdConfig { capacity: Capacity::Blocks(120), ..config(dir.path(), true) };
    let mut bench = open(&config);
    let records: Vec<SsdRecord> = (0..180).map(|number| bench.save(number).unwrap()).collect();
    let (shape, again) = (bench.shape(), bench.save(7).unwrap());
    let places: Vec<u64> = records.iter().map(|record| bench.at(*record)).collect();
    let place_again = bench.at(again);
    drop(bench);
    config.faults.unreadable_segment.store(4, Ordering::Relaxed);
    let mut bench = open(&config);
    let is_there = |at: u64| !(shape.at(3, 0)..shape.at(4, 0)).contains(&at);
    let mut wanted: Vec<u8> =
        (0..180).filter(|&number| number != 7 && is_there(places[usize::from(number)])).collect();
    wanted.push(7);
    assert!(wanted.len() < 180 && places.last() > Some(&shape.at(16, 0)), "too few segments");
    assert_eq!((bench.found(), bench.report.damaged), (wanted, 1));
    for found in bench.report.blocks.clone() {
        let number = found.header.hash.0[0];
        let at = if number == 7 { place_again } else { places[usize::from(number)] };
        assert_eq!((bench.at(found.record), bench.load(number, found.record).unwrap()), (at, frame(number)));
    }
}

#[test]
fn a_file_whose_first_page_is_unreadable_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    let config = config(dir.path(), true);
    config.faults.unreadable_heads.store(true, Ordering::Relaxed);
    let mut bench = open(&config);
    assert_eq!((bench.report.blocks.len(), bench.report.quarantined.len()), (0, 1));
    bench.save(2).unwrap();
}

#[test]
fn blocks_of_another_block_size_are_read_where_they_lie() {
    let dir = tempfile::tempdir().unwrap();
    drop(sealed(dir.path()));
    let larger = SsdConfig { frame_bytes_max: 12_000, ..config(dir.path(), true) };
    let mut bench = open(&larger);
    let found = bench.report.blocks[0];
    assert_eq!(bench.load(1, found.record).unwrap(), frame(1));
    let fresh = bench.save(12).unwrap();
    assert_eq!(bench.load(12, fresh).unwrap(), frame(12));
    drop(bench);
    let smaller = SsdConfig { frame_bytes_max: 100, ..config(dir.path(), true) };
    let bench = open(&smaller);
    assert_eq!((bench.report.blocks.len(), bench.report.damaged), (0, 11), "they fit no DRAM slot");
    drop(bench);
    let huge = SsdConfig { frame_bytes_max: 200_000, ..config(dir.path(), true) };
    let bench = open(&huge);
    assert_eq!((bench.report.blocks.len(), bench.report.quarantined.len()), (0, 1), "no segment is so large");
}

#[test]
fn a_file_that_a_crash_left_without_its_head_is_begun_anew() {
    for bytes in [4096, 1 << 20] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(only_file(dir.path()), vec![0; bytes]).unwrap();
        let mut bench = open(&config(dir.path(), true));
        assert!(bench.report.quarantined.is_empty());
        bench.save(1).unwrap();
        drop(bench);
        let bench = open(&config(dir.path(), true));
        assert_eq!((bench.found(), bench.report.quarantined.len()), (vec![1], 0));
    }
    // A head that rotted to zeros is another matter.
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    overwrite(&only_file(dir.path()), 0, &[0; 4096]);
    assert_eq!(open(&config(dir.path(), true)).report.quarantined.len(), 1);
}

/// Sealed segments say it in their footers, and the last one only in its records.
#[test]
fn a_start_brings_back_blocks_of_the_last_weights_and_frees_the_room_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    let weights = |generation: u32, number: u8| {
        let generation = Generation(generation);
        let (identity, payload) = (IDENTITY.of_generation(generation), vec![number; 6000]);
        let sealed = seal(identity, hash(number), KeyForm::Rotated, &[3000, 3000], &payload).unwrap();
        (RecordHeader { generation, ..header(number) }, sealed.bytes)
    };
    let save = |bench: &mut Bench, generation: u32, number: u8| {
        let (header, frame) = weights(generation, number);
        let record = bench.ssd.write(1, 0, header, &frame).unwrap().unwrap();
        assert!(matches!(bench.done(), Done::Written { result: Ok(()), .. }));
        record
    };
    for number in 0..6 {
        save(&mut bench, 0, number);
    }
    bench.ssd.note_weights(Generation(7)).unwrap();
    let of_now: Vec<SsdRecord> = (3..9).map(|number| save(&mut bench, 7, number)).collect();
    let read = |bench: &mut Bench, record, number: u8, generation| {
        let into = bench.arena.take(frame(number).len(), Purpose::Load).unwrap();
        bench.ssd.read(1, record, (hash(number), Generation(generation)), into).unwrap();
        match bench.done() {
            Done::Read { result, .. } => result.ok(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read(&mut bench, of_now[0], 3, 7), Some(weights(7, 3).1));
    assert_eq!(read(&mut bench, of_now[0], 3, 0), None, "its bytes are not those of other weights");
    drop(bench);
    let mut bench = open(&config);
    assert_eq!(bench.found(), [3, 4, 5, 6, 7, 8]);
    assert_eq!((bench.report.generation, bench.report.void, bench.report.torn), (Generation(7), 6, 0));
    for found in bench.report.blocks.clone() {
        let number = found.header.hash.0[0];
        assert_eq!(read(&mut bench, found.record, number, 7), Some(weights(7, number).1));
    }
    // Of sixteen six are taken.
    for number in 20..30 {
        save(&mut bench, 7, number);
    }
}

/// Routers that lost their state count anew: a number then stands for other weights than before.
#[test]
fn a_number_that_is_told_again_brings_nothing_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    (1..=4).for_each(|number| assert!(bench.save(number).is_ok()));
    for generation in [1, 0] {
        bench.ssd.note_weights(Generation(generation)).unwrap();
        drop(bench);
        bench = open(&config);
        assert!(bench.found().is_empty(), "what is of generation 0 is of the weights before");
        assert_eq!(bench.report.generation, Generation(generation));
    }
    (5..=6).for_each(|number| assert!(bench.save(number).is_ok()));
    drop(bench);
    for _ in 0..2 {
        let bench = open(&config);
        assert_eq!(bench.found(), [5, 6], "what was written since, at every start");
    }
}

#[test]
fn where_the_note_of_weights_is_torn_nothing_is_served_and_what_comes_is() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    bench.save(1).unwrap();
    drop(bench);
    std::fs::write(dir.path().join("weights.kvs"), b"torn").unwrap();
    let log = Log::start();
    let mut bench = open(&config);
    says("a torn note of weights", &log.line("of which weights"), &[&dir.path().display().to_string()]);
    assert!(bench.found().is_empty());
    bench.save(2).unwrap();
    drop(bench);
    assert_eq!(open(&config).found(), [2]);
}

#[test]
fn weights_that_no_device_notes_do_not_take_force() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![dir.path().join("a"), dir.path().join("b")];
    let config = SsdConfig { dirs: dirs.clone(), ..config(dir.path(), true) };
    let mut bench = open(&config);
    (1..=2).for_each(|number| assert!(bench.save(number).is_ok()));
    // Where the new file would be is a folder: it cannot be made.
    std::fs::create_dir(dirs[0].join("weights.kvs.new")).unwrap();
    bench.ssd.note_weights(Generation(1)).unwrap();
    std::fs::create_dir(dirs[1].join("weights.kvs.new")).unwrap();
    bench.ssd.note_weights(Generation(2)).unwrap_err();
    drop(bench);
    assert_eq!(open(&config).report.generation, Generation(1), "the device that could tells it");
}

#[test]
fn blocks_of_another_identity_are_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    let other = SsdConfig { identity: IdentityDigest([8; 16]), ..config(dir.path(), true) };
    let log = Log::start();
    assert_eq!(open(&other).report.quarantined.len(), 1);
    says("an SSD file of another identity", &log.line("set aside"), &[&dir.path().display().to_string()]);
}

#[test]
fn blocks_are_spread_over_several_devices_and_found_on_all() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![dir.path().join("a"), dir.path().join("b"), dir.path().join("c")];
    let config = SsdConfig { dirs, ..config(dir.path(), true) };
    let mut bench = open(&config);
    let records: Vec<SsdRecord> = (1..=9).map(|number| bench.save(number).unwrap()).collect();
    for (number, record) in (1..=9).zip(records) {
        assert_eq!(bench.load(number, record).unwrap(), frame(number));
    }
    drop(bench);
    let mut bench = open(&config);
    assert_eq!(bench.found(), (1..=9).collect::<Vec<u8>>());
    for lane in 0..3 {
        assert_eq!(bench.report.blocks.iter().filter(|found| found.record.lane == lane).count(), 3);
    }
    let found = bench.report.blocks[7];
    assert_eq!(bench.load(8, found.record).unwrap(), frame(8));
}

#[test]
fn media_errors_are_reported_once_per_job() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    let record = bench.save(1).unwrap();
    config.faults.write_errno.store(libc::ENOSPC, Ordering::Relaxed);
    assert_eq!(bench.save(2).unwrap_err().kind(), io::ErrorKind::StorageFull);
    config.faults.read_errno.store(libc::EIO, Ordering::Relaxed);
    assert!(matches!(bench.load(1, record), Err(ReadFault::Medium(_))));
    config.faults.read_errno.store(0, Ordering::Relaxed);
    assert_eq!(bench.load(1, record).unwrap(), frame(1));
}

#[test]
fn of_two_records_with_one_number_the_one_that_was_read_stays() {
    for read_first in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), true));
        let (read, told) = (bench.save(1).unwrap(), bench.save(1).unwrap());
        let header = RecordHeader { sequence: 7, ..header(1) };
        let found = |record, is_verified| FoundBlock { record, header, is_verified };
        let mut report =
            ScanReport { blocks: vec![found(read, true), found(told, false)], ..Default::default() };
        if !read_first {
            report.blocks.reverse();
        }
        bench.ssd.order(Noted::default(), &mut report);
        assert_eq!(report.blocks, [found(read, true)]);
    }
}

#[test]
fn without_its_thread_every_job_ends_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let record = bench.save(1).unwrap();
    bench.ssd.lanes[0].mailbox.close();
    assert_eq!(bench.save(2).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert!(matches!(bench.load(1, record), Err(ReadFault::Medium(_))));
    assert_eq!(bench.ssd.write(3, 0, header(3), &frame(3)).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

impl Bench {
    /// Checks what there is in a pass, one record after another.
    fn check_all(&mut self, pass: u64) -> Vec<Done> {
        let mut ends = Vec::new();
        while let Some(bytes) = self.ssd.check_next(pass) {
            assert_eq!(bytes, frame(0).len() as u64);
            // Heads of segments may be reported first, which is nobody's end.
            let end = std::iter::repeat_with(|| self.ssd.take_in(self.reports.blocking_recv().unwrap()));
            ends.extend({ end }.find_map(|end| end));
        }
        ends
    }
}

#[test]
fn what_rots_is_found_before_anybody_asks() {
    for uring in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), uring));
        let records: Vec<SsdRecord> = (0..6).map(|number| bench.save(number).unwrap()).collect();
        bench.ssd.set_owner(records[3], 33);
        overwrite(&only_file(dir.path()), bench.at(records[3]) + 5000, &[0xee; 8]);
        let ends = bench.check_all(1);
        let whole = ends.iter().filter(|end| matches!(end, Done::Checked { result: Ok(_) })).count();
        assert_eq!((ends.len(), whole), (6, 5), "{ends:?}");
        let lost = ends.iter().find_map(|end| match end {
            Done::Lost { record, owner, fault: ReadFault::Corrupt(_) } => Some((*record, *owner)),
            _ => None,
        });
        assert_eq!(lost, Some((records[3], 33)));
        assert!(bench.check_all(1).is_empty(), "each once in a pass");
        assert_eq!(bench.check_all(2).len(), 5, "what is lost is not there any more");
    }
}

#[test]
fn checks_wait_for_readers_and_spare_what_the_medium_does_not_give_once() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    let record = bench.save(1).unwrap();
    let into = bench.arena.take(frame(1).len(), Purpose::Load).unwrap();
    bench.ssd.read(1, record, (hash(1), Generation(0)), into).unwrap();
    assert_eq!(bench.ssd.check_next(1), None, "somebody waits for the device");
    assert!(matches!(bench.done(), Done::Read { result: Ok(_), .. }));
    config.faults.read_errno.store(libc::EIO, Ordering::Relaxed);
    assert!(matches!(bench.check_all(1)[..], [Done::Checked { result: Err(_) }]));
    config.faults.read_errno.store(0, Ordering::Relaxed);
    assert_eq!(bench.load(1, record).unwrap(), frame(1));
}

#[test]
fn while_a_reader_waits_few_records_are_moved_unless_there_is_no_room_to_write() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), false));
    let record = bench.save(1).unwrap();
    assert_eq!(bench.ssd.lanes[0].rescues_max(), RESCUES_MAX);
    let into = bench.arena.take(frame(1).len(), Purpose::Load).unwrap();
    bench.ssd.read(1, record, (hash(1), Generation(0)), into).unwrap();
    assert_eq!(bench.ssd.lanes[0].rescues_max(), RESCUES_BESIDE_READERS_MAX);
    // What is written meanwhile takes all room there is; nothing that ended is taken in, so none comes back.
    let mut number = 1;
    while bench.ssd.has_room() {
        number += 1;
        assert!(bench.ssd.write(number.into(), 0, header(number), &frame(number)).unwrap().is_some());
        bench.move_all();
        let lane = &bench.ssd.lanes[0];
        assert!(lane.rescues() <= lane.rescues_max());
    }
    assert_eq!(bench.ssd.lanes[0].rescues_max(), RESCUES_MAX);
    while !matches!(bench.done(), Done::Read { .. }) {}
    assert_eq!(bench.ssd.lanes[0].rescues_max(), RESCUES_MAX);
}

/// Blocks that come and go everywhere, under owners of their own, and what is said of those to be written again.
struct Churn {
    bench: Bench,
    records: std::collections::BTreeMap<u32, SsdRecord>,
    lets_go: bool,
    asked: usize,
}

impl Churn {
    fn free(&mut self, owner: u32) {
        self.bench.ssd.free(self.records.remove(&owner).unwrap());
    }

    /// Takes in the next report, as a node does: then it is asked.
    fn step(&mut self) -> bool {
        let report = self.bench.reports.blocking_recv().unwrap();
        let is_written = matches!(self.bench.ssd.take_in(report), Some(Done::Written { .. }));
        for owner in self.bench.ssd.next_to_move() {
            self.asked += 1;
            // One that is just being saved has no owner yet.
            if self.lets_go && self.records.contains_key(&owner) {
                self.free(owner);
            }
        }
        self.bench.ssd.go_on();
        is_written
    }

    fn save(&mut self, owner: u32) {
        let number = (owner % 200) as u8;
        let record = loop {
            match self.bench.ssd.write(1, owner, header(number), &frame(number)).unwrap() {
                Some(record) => break record,
                None => assert!(!self.step()),
            }
        };
        while !self.step() {}
        self.records.insert(owner, record);
    }
}

#[test]
fn what_is_let_go_before_its_segment_is_emptied_is_not_written_again() {
    let rescued = |lets_go: bool| {
        let dir = tempfile::tempdir().unwrap();
        let bench = open(&SsdConfig { capacity: Capacity::Blocks(410), ..config(dir.path(), false) });
        let mut churn = Churn { bench, records: Default::default(), lets_go, asked: 0 };
        for owner in 0..1500 {
            churn.save(owner);
            if churn.records.len() > 400 {
                let gone = *churn.records.keys().nth(owner as usize * 7 % 400).unwrap();
                churn.free(gone);
            }
        }
        assert!(churn.asked > 100, "there were segments to be emptied");
        churn.bench.ssd.wear().rescued_bytes
    };
    let (all, few) = (rescued(false), rescued(true));
    assert!(few < all / 2, "{few} of {all}");
}

#[test]
fn a_directory_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&config(dir.path(), true));
    let (send, _done) = unbounded_channel();
    let cause = Ssd::open(&config(dir.path(), true), &send).unwrap_err();
    says("an SSD directory that another node uses", &cause, &[&dir.path().display().to_string()]);
    drop(first);
    open(&config(dir.path(), true));
}

#[test]
fn an_unusable_directory_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a-file");
    std::fs::write(&file, b"").unwrap();
    let (send, _done) = unbounded_channel();
    let cause = Ssd::open(&config(&file.join("sub"), true), &send).unwrap_err();
    says("an SSD directory that cannot be made", &cause, &[&dir.path().display().to_string()]);
}

#[test]
fn a_directory_that_is_full_at_start_is_served() {
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    let full = config(dir.path(), true);
    full.faults.write_errno.store(libc::ENOSPC, Ordering::Relaxed);
    let log = Log::start();
    let mut bench = open(&full);
    says(
        "an SSD directory that is full at start",
        &log.line("is full"),
        &[&dir.path().display().to_string()],
    );
    let record = bench.report.blocks[0].record;
    assert_eq!(bench.load(1, record).unwrap(), frame(1));
    assert_eq!(bench.save(2).unwrap_err().kind(), io::ErrorKind::StorageFull);
}
