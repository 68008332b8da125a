//! The tier on a real directory: round trips, restarts, torn and overwritten bytes, full media.
//! Failing devices are in `faulty`, crashes in `crashes`.
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

use super::lane::{RELOCATIONS_MAX, RELOCATIONS_WHILE_READERS_WAIT_MAX};
use super::*;
use crate::arena::{Arena, ArenaShape, Purpose};
use kvfleet_errors_doc::log::Log;

const IDENTITY: IdentityDigest = IdentityDigest([7; 16]);

struct SsdBench {
    ssd: SsdTier,
    reports: UnboundedReceiver<Report>,
    report: ScanReport,
    arena: Arena,
}

/// Logs clearly if a test for io_uring runs without it.
fn config(dir: &Path, uring: bool) -> SsdConfig {
    if uring && io_uring::IoUring::new(2).is_err() {
        println!("SKIPPED io_uring: the kernel refuses it here; this test ran on plain calls");
    }
    SsdConfig {
        dirs: vec![dir.to_owned()],
        identity: IDENTITY,
        capacity: Capacity::Blocks(16),
        frame_bytes_max: frame(0).len(),
        depth: Depth::for_frames(frame(0).len()),
        uring,
        seed: 1,
        arena: None,
        faults: Arc::default(),
    }
}

fn open(config: &SsdConfig) -> SsdBench {
    let (send, reports) = unbounded_channel();
    let (ssd, report) = SsdTier::open(config, &send).unwrap();
    SsdBench { ssd, reports, report, arena: Arena::new(ArenaShape::equal(8192, 16, 0)).unwrap() }
}

fn hash(number: u8) -> BlockHash {
    BlockHash([number; _])
}

fn version(number: u8, generation: u32) -> BlockVersion {
    BlockVersion { hash: hash(number), generation: Generation(generation) }
}

fn frame(number: u8) -> Bytes {
    let payload = vec![number; 6000];
    placed(number, seal(IDENTITY, hash(number), KeyForm::Rotated, &[3000, 3000], &payload).unwrap().bytes)
}

/// Half of all frames are page-aligned, like those in the arena: they are written without a copy.
fn placed(number: u8, frame: Bytes) -> Bytes {
    if number.is_multiple_of(2) {
        return frame;
    }
    let mut pages = buffer::PageBuffer::new(frame.len());
    pages[..frame.len()].copy_from_slice(&frame);
    // Bytes behind a frame do not belong to it and must not be written.
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

impl SsdBench {
    /// The end of the next requested job.
    fn next_completion(&mut self) -> SsdCompletion {
        loop {
            let report = self.reports.blocking_recv().unwrap();
            let done = self.ssd.complete(report);
            self.relocate_all();
            match done {
                Some(SsdCompletion::Checked { .. } | SsdCompletion::Failed { .. }) | None => {}
                Some(done) => return done,
            }
        }
    }

    /// Keeps all offered records.
    fn relocate_all(&mut self) {
        self.ssd.next_to_relocate();
        self.ssd.relocate_offered();
    }

    fn save(&mut self, number: u8) -> io::Result<SsdRecord> {
        let record = loop {
            match self.ssd.write(u64::from(number), 0, header(number), &frame(number))? {
                Some(record) => break record,
                // Space becomes free as relocations end.
                None => {
                    let report = self.reports.blocking_recv().unwrap();
                    assert!(self.ssd.complete(report).is_none());
                    self.relocate_all();
                }
            }
        };
        match self.next_completion() {
            SsdCompletion::Written { token, result } => {
                assert_eq!(token, u64::from(number));
                result.map(|()| record)
            }
            other => panic!("{other:?}"),
        }
    }

    fn load(&mut self, number: u8, record: SsdRecord) -> Result<Bytes, ReadFault> {
        self.load_of(number, record, frame(number).len())
    }

    /// The same for a frame of `bytes` bytes.
    fn load_of(&mut self, number: u8, record: SsdRecord, bytes: usize) -> Result<Bytes, ReadFault> {
        let into = self.arena.take(bytes, Purpose::Load).unwrap();
        self.ssd.read(1, record, version(number, 0), into).unwrap();
        match self.next_completion() {
            SsdCompletion::Read { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }

    /// Offset of a record in its file.
    fn at(&self, record: SsdRecord) -> u64 {
        let book = &self.ssd.lanes[usize::from(record.lane)].book;
        let place = book.extent(record.id).unwrap().position;
        book.shape().offset(place.head.segment, place.page)
    }

    fn shape(&self) -> SegmentShape {
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
fn blocks_round_trip_and_survive_a_restart() {
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
fn maximum_concurrent_small_blocks_are_written_and_recovered() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![dir.path().join("a"), dir.path().join("b")];
    let config = SsdConfig { dirs, depth: Depth::scaled_for(frame(0).len()), ..config(dir.path(), true) };
    let mut bench = open(&config);
    let count = config.depth.moves;
    assert!(count > 700, "{count}");
    let mut records = Vec::new();
    for nth in 0..count {
        let number = (nth % 251) as u8;
        records.extend(bench.ssd.write(nth as u64, 0, header(number), &frame(number)).unwrap());
    }
    assert_eq!(records.len(), count, "all of them have their position at once");
    for _ in 0..count {
        assert!(matches!(bench.next_completion(), SsdCompletion::Written { result: Ok(()), .. }));
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
        .map(|_| match bench.next_completion() {
            SsdCompletion::Written { token, result: Ok(()) } => token,
            other => panic!("{other:?}"),
        })
        .collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (1..=16).collect::<Vec<u64>>());
}

#[test]
fn overwritten_payload_is_detected_on_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let record = bench.save(1).unwrap();
    overwrite(&only_file(dir.path()), bench.at(record) + 4000, b"oops");
    assert!(matches!(bench.load(1, record), Err(ReadFault::Corrupt(_))));
}

#[test]
fn record_of_another_block_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let (one, two) = (bench.save(1).unwrap(), bench.save(2).unwrap());
    assert_ne!(one, two);
    assert!(matches!(bench.load(1, two), Err(ReadFault::Corrupt(_))));
}

#[test]
fn torn_records_of_an_unsealed_segment_are_skipped() {
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

/// Ten blocks: the first seven fill a segment, which is sealed then.
fn sealed(dir: &Path) -> SsdBench {
    let mut bench = open(&config(dir, true));
    (1..=10).for_each(|number| assert!(bench.save(number).is_ok()));
    bench
}

#[test]
fn full_segment_is_recovered_from_its_footer() {
    let dir = tempfile::tempdir().unwrap();
    let bench = sealed(dir.path());
    let shape = bench.shape();
    drop(bench);
    // A record listed in a footer is not examined before it is read.
    let file = only_file(dir.path());
    overwrite(&file, shape.offset(0, 1) + 20, b"x");
    let mut bench = open(&config(dir.path(), true));
    assert_eq!((bench.found(), bench.report.torn), ((1..=10).collect(), 0));
    let found = bench.report.blocks[0];
    assert!(matches!(bench.load(1, found.record), Err(ReadFault::Corrupt(_))));
    drop(bench);
    // Without footer and head, the other segment is still read.
    overwrite(&file, shape.offset(0, shape.segment_pages) - 60, b"x");
    let bench = open(&config(dir.path(), true));
    assert_eq!(bench.found(), (2..=10).collect::<Vec<u8>>(), "the records contain it too");
    drop(bench);
    overwrite(&file, shape.offset(0, shape.segment_pages) - 60, b"x");
    overwrite(&file, shape.offset(0, 0) + 9, b"x");
    let log = Log::start();
    let bench = open(&config(dir.path(), true));
    let here = dir.path().display().to_string();
    assert_eq!((bench.found(), bench.report.damaged), ((8..=10).collect(), 1));
    says("a segment with a damaged head and no footer", &log.line("damaged segment"), &[&here]);
}

#[test]
fn segment_with_damaged_head_is_recovered_from_its_footer() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    overwrite(&only_file(dir.path()), shape.offset(0, 0) + 9, b"x");
    assert_eq!(open(&config(dir.path(), true)).found(), (1..=10).collect::<Vec<u8>>());
}

#[test]
fn stale_footer_is_not_trusted_after_head_damage() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    let file = only_file(dir.path());
    // Later uses overwrote the first two records, and the last use's head is damaged.
    overwrite(&file, shape.offset(0, 1), &vec![0; 4 * 4096]);
    overwrite(&file, shape.offset(0, 0) + 9, b"x");
    assert_eq!(open(&config(dir.path(), true)).found(), (3..=10).collect::<Vec<u8>>());
}

#[test]
fn truncated_file_keeps_its_whole_segments() {
    let dir = tempfile::tempdir().unwrap();
    let shape = sealed(dir.path()).shape();
    let file = std::fs::OpenOptions::new().write(true).open(only_file(dir.path())).unwrap();
    file.set_len(shape.offset(1, 3)).unwrap();
    let mut bench = open(&config(dir.path(), true));
    assert_eq!(bench.found(), (1..=7).collect::<Vec<u8>>());
    let again = bench.save(9).unwrap();
    assert_eq!(bench.load(9, again).unwrap(), frame(9));
}

#[test]
fn space_is_reclaimed_and_file_size_stays_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let mut here: Vec<(u8, SsdRecord)> = Vec::new();
    for round in 0..1500usize {
        let number = u8::try_from(round % 251).unwrap();
        let record = bench.save(number).unwrap();
        // One record of each segment lives long, the others are freed soon: without relocations all
        // segments would stay in use.
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
    assert!(wear.rewritten_bytes > 0 && wear.rewritten_bytes < wear.saved_bytes, "{wear:?}");
    let bytes = only_file(dir.path()).metadata().unwrap().len();
    assert!(bytes <= bench.shape().bytes_max(), "{bytes} of {}", bench.shape().bytes_max());
}

#[test]
fn file_with_damaged_superblock_is_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    bench.save(1).unwrap();
    drop(bench);
    overwrite(&only_file(dir.path()), 9, b"x");
    let log = Log::start();
    let mut bench = open(&config(dir.path(), true));
    says("an SSD file with a damaged head", &log.line("quarantined"), &[&dir.path().display().to_string()]);
    assert!(bench.report.blocks.is_empty());
    assert_eq!(bench.report.quarantined, vec![dir.path().join("segments.kvs.quarantined")]);
    assert!(bench.report.quarantined[0].exists());
    bench.save(2).unwrap();
    drop(bench);
    assert_eq!(open(&config(dir.path(), true)).report.quarantined.len(), 1, "listed again at every start");
}

#[test]
fn earlier_quarantined_files_are_kept() {
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
fn file_of_an_earlier_release_is_quarantined_and_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("blocks-8192.kvs"), b"slots").unwrap();
    let log = Log::start();
    let bench = open(&config(dir.path(), true));
    says("an SSD file of an earlier release", &log.line("quarantined"), &[&dir.path().display().to_string()]);
    assert_eq!(std::fs::read(&bench.report.quarantined[0]).unwrap(), b"slots");
}

#[test]
fn unreadable_segment_costs_its_blocks_and_is_not_reused() {
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
    assert!(here.iter().all(|at| *at >= shape.offset(1, 0)), "another segment is used");
}

#[test]
fn segments_are_read_in_parallel_and_kept_in_order() {
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
    let is_there = |at: u64| !(shape.offset(3, 0)..shape.offset(4, 0)).contains(&at);
    let mut wanted: Vec<u8> =
        (0..180).filter(|&number| number != 7 && is_there(places[usize::from(number)])).collect();
    wanted.push(7);
    assert!(wanted.len() < 180 && places.last() > Some(&shape.offset(16, 0)), "too few segments");
    assert_eq!((bench.found(), bench.report.damaged), (wanted, 1));
    for found in bench.report.blocks.clone() {
        let number = found.header.hash.0[0];
        let at = if number == 7 { place_again } else { places[usize::from(number)] };
        assert_eq!((bench.at(found.record), bench.load(number, found.record).unwrap()), (at, frame(number)));
    }
}

#[test]
fn file_with_unreadable_first_page_is_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    let config = config(dir.path(), true);
    config.faults.unreadable_heads.store(true, Ordering::Relaxed);
    let mut bench = open(&config);
    assert_eq!((bench.report.blocks.len(), bench.report.quarantined.len()), (0, 1));
    bench.save(2).unwrap();
}

#[test]
fn blocks_of_another_block_size_remain_readable() {
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
    assert_eq!((bench.report.blocks.len(), bench.report.damaged), (0, 11), "they do not fit a DRAM slot");
    drop(bench);
    let huge = SsdConfig { frame_bytes_max: 200_000, ..config(dir.path(), true) };
    let bench = open(&huge);
    assert_eq!(
        (bench.report.blocks.len(), bench.report.quarantined.len()),
        (0, 1),
        "no segment is that large"
    );
}

#[test]
fn file_without_head_after_a_crash_is_recreated() {
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
    // A head that decayed to zeros is a different case.
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    overwrite(&only_file(dir.path()), 0, &[0; 4096]);
    assert_eq!(open(&config(dir.path(), true)).report.quarantined.len(), 1);
}

/// Sealed segments record it in their footers, and the last one only in its records.
#[test]
fn start_recovers_only_blocks_of_the_current_weights() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    let weights = |generation: u32, number: u8| {
        let generation = Generation(generation);
        let (identity, payload) = (IDENTITY.with_generation(generation), vec![number; 6000]);
        let sealed = seal(identity, hash(number), KeyForm::Rotated, &[3000, 3000], &payload).unwrap();
        (RecordHeader { generation, ..header(number) }, sealed.bytes)
    };
    let save = |bench: &mut SsdBench, generation: u32, number: u8| {
        let (header, frame) = weights(generation, number);
        let record = bench.ssd.write(1, 0, header, &frame).unwrap().unwrap();
        assert!(matches!(bench.next_completion(), SsdCompletion::Written { result: Ok(()), .. }));
        record
    };
    for number in 0..6 {
        save(&mut bench, 0, number);
    }
    bench.ssd.record_weights(Generation(7)).unwrap();
    let of_now: Vec<SsdRecord> = (3..9).map(|number| save(&mut bench, 7, number)).collect();
    let read = |bench: &mut SsdBench, record, number: u8, generation| {
        let into = bench.arena.take(frame(number).len(), Purpose::Load).unwrap();
        bench.ssd.read(1, record, version(number, generation), into).unwrap();
        match bench.next_completion() {
            SsdCompletion::Read { result, .. } => result.ok(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read(&mut bench, of_now[0], 3, 7), Some(weights(7, 3).1));
    assert_eq!(read(&mut bench, of_now[0], 3, 0), None, "its bytes belong to the current weights");
    drop(bench);
    let mut bench = open(&config);
    assert_eq!(bench.found(), [3, 4, 5, 6, 7, 8]);
    assert_eq!((bench.report.generation, bench.report.invalidated, bench.report.torn), (Generation(7), 6, 0));
    for found in bench.report.blocks.clone() {
        let number = found.header.hash.0[0];
        assert_eq!(read(&mut bench, found.record, number, 7), Some(weights(7, number).1));
    }
    // Six of sixteen blocks are in use.
    for number in 20..30 {
        save(&mut bench, 7, number);
    }
}

/// Routers that lost their state count anew: a number then means other weights than before.
#[test]
fn reused_generation_number_recovers_no_old_block() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    (1..=4).for_each(|number| assert!(bench.save(number).is_ok()));
    for generation in [1, 0] {
        bench.ssd.record_weights(Generation(generation)).unwrap();
        drop(bench);
        bench = open(&config);
        assert!(bench.found().is_empty(), "blocks of generation 0 have the previous weights");
        assert_eq!(bench.report.generation, Generation(generation));
    }
    (5..=6).for_each(|number| assert!(bench.save(number).is_ok()));
    drop(bench);
    for _ in 0..2 {
        let bench = open(&config);
        assert_eq!(bench.found(), [5, 6], "blocks written since, at every start");
    }
}

#[test]
fn torn_weights_note_discards_old_blocks_but_allows_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    bench.save(1).unwrap();
    drop(bench);
    std::fs::write(dir.path().join("weights.kvs"), b"torn").unwrap();
    let log = Log::start();
    let mut bench = open(&config);
    says("a torn note of weights", &log.line("which weights"), &[&dir.path().display().to_string()]);
    assert!(bench.found().is_empty());
    bench.save(2).unwrap();
    drop(bench);
    assert_eq!(open(&config).found(), [2]);
}

#[test]
fn weights_recorded_on_no_device_are_not_applied() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = vec![dir.path().join("a"), dir.path().join("b")];
    let config = SsdConfig { dirs: dirs.clone(), ..config(dir.path(), true) };
    let mut bench = open(&config);
    (1..=2).for_each(|number| assert!(bench.save(number).is_ok()));
    // A directory with the name of the temporary file prevents its creation.
    std::fs::create_dir(dirs[0].join("weights.kvs.new")).unwrap();
    bench.ssd.record_weights(Generation(1)).unwrap();
    std::fs::create_dir(dirs[1].join("weights.kvs.new")).unwrap();
    bench.ssd.record_weights(Generation(2)).unwrap_err();
    drop(bench);
    assert_eq!(open(&config).report.generation, Generation(1), "the working device has the note");
}

#[test]
fn blocks_of_another_identity_are_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    open(&config(dir.path(), true)).save(1).unwrap();
    let other = SsdConfig { identity: IdentityDigest([8; 16]), ..config(dir.path(), true) };
    let log = Log::start();
    assert_eq!(open(&other).report.quarantined.len(), 1);
    says("an SSD file of another identity", &log.line("quarantined"), &[&dir.path().display().to_string()]);
}

#[test]
fn blocks_are_spread_over_devices_and_recovered_from_all() {
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
fn verified_record_wins_over_one_with_the_same_sequence() {
    for read_first in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), true));
        let (read, told) = (bench.save(1).unwrap(), bench.save(1).unwrap());
        let header = RecordHeader { sequence: 7, ..header(1) };
        let found = |record, is_verified| ScannedBlock { record, header, is_verified };
        let mut report =
            ScanReport { blocks: vec![found(read, true), found(told, false)], ..Default::default() };
        if !read_first {
            report.blocks.reverse();
        }
        bench.ssd.merge_recovered(WeightsNote::default(), &mut report);
        assert_eq!(report.blocks, [found(read, true)]);
    }
}

#[test]
fn jobs_fail_if_the_device_thread_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let record = bench.save(1).unwrap();
    bench.ssd.lanes[0].mailbox.close();
    assert_eq!(bench.save(2).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert!(matches!(bench.load(1, record), Err(ReadFault::Medium(_))));
    assert_eq!(bench.ssd.write(3, 0, header(3), &frame(3)).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

impl SsdBench {
    /// Checks all records of a pass, one after another.
    fn check_all(&mut self, pass: u64) -> Vec<SsdCompletion> {
        let mut ends = Vec::new();
        while let Some(bytes) = self.ssd.check_next(pass) {
            assert_eq!(bytes, frame(0).len() as u64);
            // Heads of segments may be reported first; these are not jobs of the store.
            let end = std::iter::repeat_with(|| self.ssd.complete(self.reports.blocking_recv().unwrap()));
            ends.extend({ end }.find_map(|end| end));
        }
        ends
    }
}

#[test]
fn corruption_is_found_by_the_scrubber() {
    for uring in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), uring));
        let records: Vec<SsdRecord> = (0..6).map(|number| bench.save(number).unwrap()).collect();
        bench.ssd.set_owner(records[3], 33);
        overwrite(&only_file(dir.path()), bench.at(records[3]) + 5000, &[0xee; 8]);
        let ends = bench.check_all(1);
        let whole = ends.iter().filter(|end| matches!(end, SsdCompletion::Checked { result: Ok(_) })).count();
        assert_eq!((ends.len(), whole), (6, 5), "{ends:?}");
        let lost = ends.iter().find_map(|end| match end {
            SsdCompletion::Lost { record, owner, fault: ReadFault::Corrupt(_) } => Some((*record, *owner)),
            _ => None,
        });
        assert_eq!(lost, Some((records[3], 33)));
        assert!(bench.check_all(1).is_empty(), "each once in a pass");
        assert_eq!(bench.check_all(2).len(), 5, "the corrupted block is gone");
    }
}

#[test]
fn scrubbing_yields_to_readers_and_tolerates_one_read_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    let record = bench.save(1).unwrap();
    let into = bench.arena.take(frame(1).len(), Purpose::Load).unwrap();
    bench.ssd.read(1, record, version(1, 0), into).unwrap();
    assert_eq!(bench.ssd.check_next(1), None, "a reader uses the device");
    assert!(matches!(bench.next_completion(), SsdCompletion::Read { result: Ok(_), .. }));
    config.faults.read_errno.store(libc::EIO, Ordering::Relaxed);
    assert!(matches!(bench.check_all(1)[..], [SsdCompletion::Checked { result: Err(_) }]));
    config.faults.read_errno.store(0, Ordering::Relaxed);
    assert_eq!(bench.load(1, record).unwrap(), frame(1));
}

#[test]
fn relocations_are_limited_while_readers_wait() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), false));
    let record = bench.save(1).unwrap();
    assert_eq!(bench.ssd.lanes[0].relocations_max(), RELOCATIONS_MAX);
    let into = bench.arena.take(frame(1).len(), Purpose::Load).unwrap();
    bench.ssd.read(1, record, version(1, 0), into).unwrap();
    assert_eq!(bench.ssd.lanes[0].relocations_max(), RELOCATIONS_WHILE_READERS_WAIT_MAX);
    // New writes take all space; no completion is processed, so no space becomes free.
    let mut number = 1;
    while bench.ssd.has_room() {
        number += 1;
        assert!(bench.ssd.write(number.into(), 0, header(number), &frame(number)).unwrap().is_some());
        bench.relocate_all();
        let lane = &bench.ssd.lanes[0];
        assert!(lane.relocations() <= lane.relocations_max());
    }
    assert_eq!(bench.ssd.lanes[0].relocations_max(), RELOCATIONS_MAX);
    while !matches!(bench.next_completion(), SsdCompletion::Read { .. }) {}
    assert_eq!(bench.ssd.lanes[0].relocations_max(), RELOCATIONS_MAX);
}

/// Blocks that are saved and freed everywhere under their own owners, and handling of relocation
/// offers.
struct ChurnBench {
    bench: SsdBench,
    records: std::collections::BTreeMap<u32, SsdRecord>,
    lets_go: bool,
    asked: usize,
}

impl ChurnBench {
    fn free(&mut self, owner: u32) {
        self.bench.ssd.free(self.records.remove(&owner).unwrap());
    }

    /// Processes the next report, then asks for offers, as a node does.
    fn step(&mut self) -> bool {
        let report = self.bench.reports.blocking_recv().unwrap();
        let is_written = matches!(self.bench.ssd.complete(report), Some(SsdCompletion::Written { .. }));
        for owner in self.bench.ssd.next_to_relocate() {
            self.asked += 1;
            // A record that is being saved has no owner yet.
            if self.lets_go && self.records.contains_key(&owner) {
                self.free(owner);
            }
        }
        self.bench.ssd.relocate_offered();
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
fn records_freed_when_offered_are_not_rewritten() {
    let rescued = |lets_go: bool| {
        let dir = tempfile::tempdir().unwrap();
        let bench = open(&SsdConfig { capacity: Capacity::Blocks(410), ..config(dir.path(), false) });
        let mut churn = ChurnBench { bench, records: Default::default(), lets_go, asked: 0 };
        for owner in 0..1500 {
            churn.save(owner);
            if churn.records.len() > 400 {
                let gone = *churn.records.keys().nth(owner as usize * 7 % 400).unwrap();
                churn.free(gone);
            }
        }
        assert!(churn.asked > 100, "segments were drained");
        churn.bench.ssd.wear().rewritten_bytes
    };
    let (all, few) = (rescued(false), rescued(true));
    assert!(few < all / 2, "{few} of {all}");
}

#[test]
fn directory_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&config(dir.path(), true));
    let (send, _done) = unbounded_channel();
    let cause = SsdTier::open(&config(dir.path(), true), &send).unwrap_err();
    says("an SSD directory that another node uses", &cause, &[&dir.path().display().to_string()]);
    drop(first);
    open(&config(dir.path(), true));
}

#[test]
fn unusable_directory_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a-file");
    std::fs::write(&file, b"").unwrap();
    let (send, _done) = unbounded_channel();
    let cause = SsdTier::open(&config(&file.join("sub"), true), &send).unwrap_err();
    says("an SSD directory that cannot be made", &cause, &[&dir.path().display().to_string()]);
}

#[test]
fn full_directory_is_served_at_start() {
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
