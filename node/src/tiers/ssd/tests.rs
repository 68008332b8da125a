//! The tier against a real directory: round trips, restarts, torn and overwritten bytes, full media.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use kv_core::evict::BlockTraits;
use kv_core::id::TenantId;
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::{KeyForm, seal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::arena::{Arena, ArenaShape, Purpose};
use crate::test_log::Log;

const IDENTITY: IdentityDigest = IdentityDigest([7; 16]);

struct Bench {
    ssd: Ssd,
    done: UnboundedReceiver<Done>,
    report: ScanReport,
    arena: Arena,
}

/// Says clearly when a test that should run on io_uring did not.
fn config(dir: &Path, uring: bool) -> SsdConfig {
    if uring && Ring::new(2, true).name() != "io_uring" {
        println!("SKIPPED io_uring: the kernel refuses it here; this test ran on plain calls");
    }
    SsdConfig {
        dir: dir.to_owned(),
        identity: IDENTITY,
        capacity: Capacity::Blocks(16),
        frame_bytes_max: frame(0).len(),
        uring,
        faults: Arc::default(),
    }
}

fn open(config: &SsdConfig) -> Bench {
    let (send, done) = unbounded_channel();
    let (ssd, report) = Ssd::open(config, send).unwrap();
    let shape = ArenaShape { frame_bytes_max: 8192, slots: 16, reserve_slots: 0 };
    Bench { ssd, done, report, arena: Arena::new(shape).unwrap() }
}

fn hash(number: u8) -> BlockHash {
    BlockHash([number; 16])
}

fn frame(number: u8) -> Bytes {
    let payload = vec![number; 6000];
    seal(IDENTITY, hash(number), KeyForm::Rotated, &[3000, 3000], &payload).unwrap().bytes
}

fn header(number: u8) -> SlotHeader {
    let bytes = u32::try_from(frame(number).len()).unwrap();
    let (offset_blocks, fingerprint) = (u32::from(number), hash(number).fingerprint());
    let traits = BlockTraits { offset_blocks, bytes, fingerprint, ..BlockTraits::default() };
    SlotHeader { hash: hash(number), parent: None, tenant: TenantId(1), traits, sequence: 0 }
}

impl Bench {
    fn save(&mut self, number: u8) -> io::Result<SlotId> {
        let slot = self.ssd.take(frame(number).len())?.unwrap();
        self.ssd.write(u64::from(number), slot, header(number), frame(number))?;
        match self.done.blocking_recv().unwrap() {
            Done::Written { token, result } => {
                assert_eq!(token, u64::from(number));
                result.map(|()| slot)
            }
            other => panic!("{other:?}"),
        }
    }

    fn load(&mut self, number: u8, slot: SlotId) -> Result<Bytes, ReadFault> {
        let into = self.arena.take(frame(number).len(), Purpose::Load).unwrap();
        self.ssd.read(1, slot, hash(number), into).unwrap();
        match self.done.blocking_recv().unwrap() {
            Done::Read { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }
}

fn only_file(dir: &Path) -> PathBuf {
    dir.join("blocks-8192.kvs")
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn slot_at(slot: SlotId) -> u64 {
    4096 + u64::from(slot.number) * 8192
}

#[test]
fn blocks_come_back_as_they_were_and_after_a_restart_too() {
    for uring in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), uring));
        let slots: Vec<SlotId> = (1..=10).map(|number| bench.save(number).unwrap()).collect();
        assert_eq!(bench.load(3, slots[2]).unwrap(), frame(3));
        drop(bench);
        let mut bench = open(&config(dir.path(), uring));
        let found: Vec<u8> = bench.report.blocks.iter().map(|found| found.header.hash.0[0]).collect();
        assert_eq!(found, (1..=10).collect::<Vec<u8>>(), "in order of writing");
        assert_eq!(bench.report.damaged_slots, 0);
        let found = bench.report.blocks[4];
        assert_eq!((found.header.traits, found.header.tenant), (header(5).traits, TenantId(1)));
        assert_eq!(bench.load(5, found.slot).unwrap(), frame(5));
        let fresh = bench.save(11).unwrap();
        assert!(!slots.contains(&fresh), "a slot in use was given out again");
    }
}

#[test]
fn many_open_writes_share_flushes_and_all_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    for number in 1..=16u8 {
        let slot = bench.ssd.take(frame(number).len()).unwrap().unwrap();
        bench.ssd.write(u64::from(number), slot, header(number), frame(number)).unwrap();
    }
    let mut tokens: Vec<u64> = (0..16)
        .map(|_| match bench.done.blocking_recv().unwrap() {
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
    let slot = bench.save(1).unwrap();
    overwrite(&only_file(dir.path()), slot_at(slot) + 4000, b"oops");
    assert!(matches!(bench.load(1, slot), Err(ReadFault::Corrupt(_))));
}

#[test]
fn a_slot_of_another_block_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let (one, two) = (bench.save(1).unwrap(), bench.save(2).unwrap());
    assert_ne!(one, two);
    assert!(matches!(bench.load(1, two), Err(ReadFault::Corrupt(_))));
}

#[test]
fn a_damaged_slot_header_is_skipped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let slots: Vec<SlotId> = (1..=3).map(|number| bench.save(number).unwrap()).collect();
    drop(bench);
    let file = only_file(dir.path());
    overwrite(&file, slot_at(slots[0]) + 20, b"x");
    overwrite(&file, slot_at(slots[1]) + 128 + 20, b"x");
    let log = Log::start();
    let bench = open(&config(dir.path(), true));
    assert_eq!(bench.report.damaged_slots, 2);
    assert_eq!(bench.report.blocks.len(), 1);
    assert_eq!(bench.report.blocks[0].header.hash, hash(3));
    let here = dir.path().display().to_string();
    assert_eq!(log.count("damaged slot"), 2);
    says("a damaged slot header", &log.line("slot=0"), &[&here]);
    says("a damaged frame header in a slot", &log.line("slot=1"), &[&here]);
}

#[test]
fn a_truncated_file_gives_the_slots_that_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let slots: Vec<SlotId> = (1..=3).map(|number| bench.save(number).unwrap()).collect();
    drop(bench);
    let file = std::fs::OpenOptions::new().write(true).open(only_file(dir.path())).unwrap();
    file.set_len(slot_at(slots[2]) + 4096).unwrap();
    let mut bench = open(&config(dir.path(), true));
    assert_eq!(bench.report.blocks.len(), 2);
    let again = bench.save(9).unwrap();
    assert_eq!(bench.load(9, again).unwrap(), frame(9));
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
    assert_eq!(bench.report.quarantined, vec![dir.path().join("blocks-8192.kvs.quarantined")]);
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
fn an_unreadable_slot_costs_that_slot_and_is_not_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = open(&config(dir.path(), true));
    let slots: Vec<SlotId> = (1..=3).map(|number| bench.save(number).unwrap()).collect();
    drop(bench);
    let config = config(dir.path(), true);
    config.faults.unreadable_slot.store(slots[1].number + 1, Ordering::Relaxed);
    let mut bench = open(&config);
    assert_eq!((bench.report.blocks.len(), bench.report.damaged_slots), (2, 1));
    assert!(bench.report.quarantined.is_empty());
    let all = usize::try_from(16 + STAGING_SLOTS).unwrap();
    let fresh: Vec<SlotId> = std::iter::from_fn(|| bench.ssd.take(frame(0).len()).unwrap()).collect();
    assert_eq!(fresh.len(), all - 2, "another one takes its turn");
    assert!(fresh.iter().all(|slot| slot.number != slots[1].number));
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
    let mut bench = open(&config(dir.path(), true));
    bench.save(1).unwrap();
    drop(bench);
    let larger = SsdConfig { frame_bytes_max: 20_000, ..config(dir.path(), true) };
    let mut bench = open(&larger);
    let found = bench.report.blocks[0];
    assert_eq!(bench.load(1, found.slot).unwrap(), frame(1));
    let fresh = bench.save(2).unwrap();
    assert_eq!(bench.load(2, fresh).unwrap(), frame(2));
    drop(bench);
    let smaller = SsdConfig { frame_bytes_max: 100, ..config(dir.path(), true) };
    let bench = open(&smaller);
    assert_eq!((bench.report.blocks.len(), bench.report.damaged_slots), (0, 2), "they fit no DRAM slot");
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
fn media_errors_are_reported_once_per_job() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), true);
    let mut bench = open(&config);
    let slot = bench.save(1).unwrap();
    config.faults.write_errno.store(libc::ENOSPC, Ordering::Relaxed);
    assert_eq!(bench.save(2).unwrap_err().kind(), io::ErrorKind::StorageFull);
    config.faults.read_errno.store(libc::EIO, Ordering::Relaxed);
    assert!(matches!(bench.load(1, slot), Err(ReadFault::Medium(_))));
    config.faults.read_errno.store(0, Ordering::Relaxed);
    assert_eq!(bench.load(1, slot).unwrap(), frame(1));
}

#[test]
fn a_directory_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&config(dir.path(), true));
    let (send, _done) = unbounded_channel();
    let cause = Ssd::open(&config(dir.path(), true), send).unwrap_err();
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
    let cause = Ssd::open(&config(&file.join("sub"), true), send).unwrap_err();
    says("an SSD directory that cannot be made", &cause, &[&dir.path().display().to_string()]);
}

#[test]
fn a_directory_that_is_full_at_start_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let slot = open(&config(dir.path(), true)).save(1).unwrap();
    let full = config(dir.path(), true);
    full.faults.write_errno.store(libc::ENOSPC, Ordering::Relaxed);
    let log = Log::start();
    let mut bench = open(&full);
    says(
        "an SSD directory that is full at start",
        &log.line("is full"),
        &[&dir.path().display().to_string()],
    );
    assert_eq!(bench.load(1, slot).unwrap(), frame(1));
    assert_eq!(bench.save(2).unwrap_err().kind(), io::ErrorKind::StorageFull);
}
