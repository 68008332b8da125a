//! A segment file of each format version, written once and committed beside this file. The current
//! code reads that of version 2, and sets that of version 1 aside.
//!
//! A failure here means that an upgrade would make a running node's blocks unreadable, silently if
//! the version stays the same. A change of the layout needs a new `FILE_VERSION` and a file of its
//! own, and these stay unchanged. Not here: damage of any kind (the parent module, `crashes`).

use kv_core::id::{Category, Generation, RequestKind};

use super::*;

/// Each line is an offset and the bytes there, both in hexadecimal; all other bytes are zero.
const VERSION_1: &str = include_str!("segments-v1.hex");
const VERSION_2: &str = include_str!("segments-long-hashes.hex");

/// Length of such a file: its head and two segments.
const FILE_BYTES: usize = 3 << 16;

/// Its blocks. All but the last two fill a sealed segment; those two are in an unsealed one.
const BLOCKS: std::ops::RangeInclusive<u8> = 1..=9;

/// The block that takes a single page.
const SHORT: u8 = 2;

/// Bytes per line of the fixture.
const LINE_BYTES: usize = 32;

/// Zeros, except for the first bytes of each slice: the fixture lists every non-zero byte.
fn golden_frame(number: u8) -> Bytes {
    let slices = if number == SHORT { [40, 50] } else { [3000, 3000] };
    let mut payload = vec![0; slices[0] as usize + slices[1] as usize];
    payload[..4].fill(number);
    payload[slices[0] as usize..][..4].fill(!number);
    seal(IDENTITY, hash(number), KeyForm::Rotated, &slices, &payload).unwrap().bytes
}

/// Every field has a distinct value.
fn golden_header(number: u8) -> RecordHeader {
    let bytes = u32::try_from(golden_frame(number).len()).unwrap();
    let category = Category { kind: RequestKind::Agent, conversation_turn: number + 3 };
    let fingerprint = hash(number).fingerprint();
    let offset_blocks = 0x0102_0300 + u32::from(number);
    let traits = BlockTraits { category, offset_blocks, bytes, is_partial: false, fingerprint };
    let parent = (number > 1).then(|| hash(number - 1));
    let tenant = TenantId(0x0a0b_0c00 + u32::from(number));
    RecordHeader {
        hash: hash(number),
        parent,
        tenant,
        traits,
        generation: Generation(0),
        sequence: u64::from(number),
    }
}

/// The bytes of a committed file.
fn file_of(listing: &str) -> Vec<u8> {
    let mut file = vec![0; FILE_BYTES];
    for line in listing.lines().filter(|line| !line.starts_with('#')) {
        let (at, hex) = line.split_once(' ').unwrap();
        let at = usize::from_str_radix(at, 16).unwrap();
        for (nth, byte) in file[at..at + hex.len() / 2].iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * nth..2 * nth + 2], 16).unwrap();
        }
    }
    file
}

/// The fixture lines for these bytes.
fn lines(file: &[u8]) -> String {
    let line = |(nth, bytes): (usize, &[u8])| {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{:06x} {hex}\n", nth * LINE_BYTES)
    };
    let is_there = |(_, bytes): &(usize, &[u8])| bytes.iter().any(|byte| *byte != 0);
    file.chunks(LINE_BYTES).enumerate().filter(is_there).map(line).collect()
}

fn with_file(bytes: &[u8]) -> (tempfile::TempDir, SsdConfig) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(only_file(dir.path()), bytes).unwrap();
    let config = config(dir.path(), true);
    (dir, config)
}

#[test]
fn version_2_file_is_read_correctly() {
    let (_dir, config) = with_file(&file_of(VERSION_2));
    let mut bench = open(&config);
    assert!(bench.report.quarantined.is_empty(), "{:?}", bench.report.quarantined);
    assert_eq!((bench.report.damaged, bench.report.torn), (0, 0));
    let found: Vec<RecordHeader> = bench.report.blocks.iter().map(|block| block.header).collect();
    assert_eq!(found, BLOCKS.map(golden_header).collect::<Vec<_>>());
    for block in bench.report.blocks.clone() {
        let number = block.header.hash.0[0];
        let wanted = golden_frame(number);
        let loaded = bench.load_of(number, block.record, wanted.len());
        assert_eq!(loaded.unwrap(), wanted, "block {number}");
    }
}

#[test]
fn current_code_writes_version_2_bytes() {
    for uring in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = open(&config(dir.path(), uring));
        for number in BLOCKS {
            let token = u64::from(number);
            let record = bench.ssd.write(token, 0, golden_header(number), &golden_frame(number)).unwrap();
            assert!(record.is_some());
            assert!(matches!(bench.next_completion(), SsdCompletion::Written { result: Ok(()), .. }));
        }
        drop(bench);
        let mut file = std::fs::read(only_file(dir.path())).unwrap();
        // Behind it is the head of the next, prepared segment.
        file.truncate(FILE_BYTES);
        let (now, before) = (lines(&file), lines(&file_of(VERSION_2)));
        let other = now.lines().zip(before.lines()).find(|(now, before)| now != before);
        assert_eq!(other, None, "the first line that differs, now and before");
        assert_eq!(now.len(), before.len());
    }
}

#[test]
fn file_of_another_version_is_quarantined_unchanged() {
    let other_version = |version: u32| {
        let mut other = file_of(VERSION_2);
        other[8..12].copy_from_slice(&version.to_le_bytes());
        let crc = crc32c::crc32c(&other[..32]);
        other[32..36].copy_from_slice(&crc.to_le_bytes());
        other
    };
    for other in [file_of(VERSION_1), other_version(0), other_version(3), other_version(u32::MAX)] {
        let (dir, config) = with_file(&other);
        let log = Log::start();
        let mut bench = open(&config);
        let here = dir.path().display().to_string();
        says("an SSD file of another version", &log.line("quarantined"), &[&here]);
        assert!(bench.report.blocks.is_empty(), "version {}", other[8]);
        let aside = bench.report.quarantined.clone();
        assert_eq!(aside, vec![dir.path().join("segments.kvs.quarantined")]);
        for number in BLOCKS {
            bench.save(number).unwrap();
        }
        drop(bench);
        let bench = open(&config);
        assert_eq!((bench.found(), &bench.report.quarantined), (BLOCKS.collect(), &aside));
        assert_eq!(std::fs::read(&aside[0]).unwrap(), other, "every byte of it is kept");
    }
}
