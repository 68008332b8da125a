//! Damage is detected at open and refused by name, unless a second copy is valid: no acknowledged
//! data is lost silently.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kvfleet_errors_doc::says;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tempfile::TempDir;

use super::super::log::{Change, DiskLog, LOG_FOLDER, LogError, RecoveredLog};
use super::super::{Entry, Payload, Proposal, Vote};
use super::{ROUTER, entry, in_memory, log_id, open_disk, owner, replace_folder};

const PAGE: usize = 4096;
const SECTOR: usize = 512;

fn large(index: u64) -> Entry {
    let command = (0..30_000).map(|at: u32| (at.wrapping_mul(7) as u8) ^ (index as u8)).collect::<Vec<u8>>();
    Entry { log_id: log_id(1, index), payload: Payload::Normal(Proposal(command.into())) }
}

/// Batches with last ones of every kind: small, a vote, out-of-line commands, a purge.
fn batches() -> Vec<Vec<(u16, Change)>> {
    vec![
        vec![(0, Change::Vote(Vote::new_committed(1, ROUTER))), (1, Change::Vote(Vote::new(4, ROUTER)))],
        vec![(0, Change::Append((0..5).map(entry).collect()))],
        vec![(1, Change::Append((0..3).map(large).collect())), (0, Change::Append(vec![entry(5)]))],
        vec![(1, Change::Truncate { from: 2 }), (0, Change::Committed(Some(log_id(1, 3))))],
        vec![(1, Change::Append((2..6).map(large).collect()))],
        vec![(0, Change::Purge(log_id(1, 2))), (1, Change::Append(vec![entry(6)]))],
        vec![(0, Change::Vote(Vote::new(7, 2)))],
    ]
}

/// A log with the first `count` batches as a killed process leaves it; its contents, and the range
/// of its last frame.
fn written(directory: &Path, count: usize) -> (Vec<RecoveredLog>, Range<usize>) {
    let (mut disk, _) = open_disk(directory).unwrap();
    for batch in &batches()[..count] {
        disk.commit(batch.iter().map(|(group, change)| (*group, change))).unwrap();
        disk.prepare();
    }
    let last_frame = disk.last_frame.start as usize..disk.last_frame.end as usize;
    drop(disk);
    let copy = in_memory();
    replace_folder(&directory.join(LOG_FOLDER), &copy.path().join(LOG_FOLDER));
    (open_disk(copy.path()).unwrap().1, last_frame)
}

/// The files of the log except reusable ones.
fn files(directory: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(directory.join(LOG_FOLDER)).unwrap().map(|file| file.unwrap().path());
    let is_named = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().parse::<u64>().is_ok();
    let mut files: Vec<PathBuf> = files.filter(is_named).collect();
    files.sort();
    files
}

/// Opens a copy of a log with modified bytes in one file.
struct DamagedLog {
    sound: PathBuf,
    _directory: TempDir,
    held: Vec<RecoveredLog>,
    last_frame: Range<usize>,
}

impl DamagedLog {
    fn new(count: usize) -> DamagedLog {
        let directory = in_memory();
        let (held, last_frame) = written(directory.path(), count);
        DamagedLog { sound: directory.path().join(LOG_FOLDER), _directory: directory, held, last_frame }
    }

    /// The file that is being written.
    fn last(&self) -> (PathBuf, Vec<u8>) {
        let file = files(self.sound.parent().unwrap()).pop().unwrap();
        let bytes = fs::read(&file).unwrap();
        (file, bytes)
    }

    fn open(&self, file: &Path, bytes: &[u8]) -> Result<Vec<RecoveredLog>, LogError> {
        let copy = in_memory();
        let folder = copy.path().join(LOG_FOLDER);
        replace_folder(&self.sound, &folder);
        fs::write(folder.join(file.file_name().unwrap()), bytes).unwrap();
        open_disk(copy.path()).map(|(_, recovered)| recovered)
    }

    /// Asserts that the log is complete or refused. Returns whether it was opened.
    fn judge(&self, file: &Path, bytes: &[u8], what: &str) -> bool {
        match self.open(file, bytes) {
            Ok(recovered) => {
                assert_eq!(recovered, self.held, "{what}: data was lost silently");
                true
            }
            Err(LogError::Corrupt { path, what: why }) => {
                assert!(path.display().to_string().contains(LOG_FOLDER), "{what}: {why}");
                false
            }
            Err(other) => panic!("{what}: {other}"),
        }
    }
}

#[test]
fn a_flipped_byte_loses_nothing_silently() {
    let seed = 41;
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for count in 1..=batches().len() {
        let damaged = DamagedLog::new(count);
        let (file, sound) = damaged.last();
        let end = damaged.last_frame.end;
        // The used part of the last two pages, the head of every page, and random offsets.
        let heads = (0..end).filter(|at| at % PAGE < 64 || (*at + 2 * PAGE >= end && at % PAGE < 500));
        let others: Vec<usize> = (0..1_000).map(|_| random.random_range(0..end)).collect();
        let mut opened = 0;
        for at in heads.chain(others) {
            let mut bytes = sound.clone();
            bytes[at] ^= random.random_range(1..=255u8);
            opened += u64::from(damaged.judge(&file, &bytes, &format!("batch {count}, byte {at} of {end}")));
        }
        // Small frames have two copies: the other one is used.
        assert!(opened > 100, "batch {count}: {opened}");
    }
}

#[test]
fn a_damaged_page_loses_nothing_silently() {
    let seed = 42;
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for count in 1..=batches().len() {
        let damaged = DamagedLog::new(count);
        let (file, sound) = damaged.last();
        for page in (0..sound.len()).step_by(PAGE) {
            for unit in [SECTOR, PAGE] {
                let mut bytes = sound.clone();
                let at = page + random.random_range(0..PAGE / unit) * unit;
                bytes[at..at + unit].fill(0);
                damaged.judge(&file, &bytes, &format!("batch {count}, zeros at {at}"));
                random.fill(&mut bytes[at..at + unit]);
                damaged.judge(&file, &bytes, &format!("batch {count}, noise at {at}"));
            }
        }
    }
}

#[test]
fn a_truncated_log_loses_nothing_silently() {
    for count in 1..=batches().len() {
        let damaged = DamagedLog::new(count);
        let (file, sound) = damaged.last();
        let end = damaged.last_frame.end;
        let lengths = (0..sound.len()).filter(|length| length % SECTOR < 2 || length % 97 == 0);
        for length in lengths {
            let opened = damaged.judge(&file, &sound[..length], &format!("batch {count}, cut to {length}"));
            assert!(
                !opened || length >= end,
                "batch {count}: cut to {length} of {end} bytes without detection"
            );
        }
    }
}

/// A power loss during an unacknowledged frame is no damage: the frame is complete or absent.
#[test]
fn a_torn_last_frame_is_complete_or_absent() {
    let seed = 43;
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    for count in 2..=batches().len() {
        let (before, after) = (DamagedLog::new(count - 1), DamagedLog::new(count));
        let (file, new) = after.last();
        let Range { start, end } = after.last_frame;
        let copies = 2 * PAGE;
        let mut old = new.clone();
        old[start..].fill(0);
        let sectors = |range: Range<usize>| range.step_by(SECTOR).collect::<Vec<_>>();
        let mut seen = [false; 2];
        for turn in 0..400 {
            let mut torn = old.clone();
            // The out-of-line commands are durable before a copy is written.
            let is_beside_whole = start + copies == end || turn % 2 == 0;
            let share = f64::from(turn % 10 + 1) / 10.0;
            if is_beside_whole {
                torn[start + copies..end].copy_from_slice(&new[start + copies..end]);
            }
            let torn_part = if is_beside_whole { start..start + copies } else { start + copies..end };
            for at in sectors(torn_part) {
                if random.random_bool(share) {
                    torn[at..at + SECTOR].copy_from_slice(&new[at..at + SECTOR]);
                }
            }
            let recovered = after.open(&file, &torn).unwrap_or_else(|error| panic!("{count}: {error}"));
            assert!(recovered == before.held || recovered == after.held, "batch {count}: neither state");
            seen[usize::from(recovered == after.held)] = true;
        }
        assert_eq!(seen, [true, true], "batch {count}");
    }
}

fn refusal(directory: &Path) -> String {
    let Err(error) = open_disk(directory) else { panic!("a damaged log was opened") };
    assert!(matches!(error, LogError::Corrupt { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(LOG_FOLDER) && text.contains("refuses to start"), "{text}");
    text
}

/// Offsets of both copies of a frame with this text in its records.
fn copies_with(bytes: &[u8], text: &[u8]) -> Vec<usize> {
    let pages = (0..bytes.len()).step_by(PAGE);
    pages.filter(|at| bytes[*at..*at + PAGE].windows(text.len()).any(|window| window == text)).collect()
}

#[test]
fn damage_without_a_valid_copy_is_named() {
    let directory = in_memory();
    written(directory.path(), 7);
    let of_last = |text: &[u8]| {
        let found = files(directory.path()).into_iter().rev().find_map(|file| {
            let bytes = fs::read(&file).unwrap();
            let at = bytes.windows(text.len()).rposition(|window| window == text)?;
            Some((file, bytes, at))
        });
        found.unwrap()
    };
    let here = directory.path().display().to_string();

    let Payload::Normal(Proposal(command)) = large(3).payload else { panic!("it is a command") };
    let (file, sound, at) = of_last(&command[1_000..1_100]);
    let mut damaged = sound.clone();
    damaged[at] ^= 1;
    fs::write(&file, &damaged).unwrap();
    let text = refusal(directory.path());
    let is_checksum = |word: &&str| word.len() == 8 && word.chars().all(|letter| letter.is_ascii_hexdigit());
    let mut varying: Vec<&str> =
        text.split(|letter: char| !letter.is_alphanumeric()).filter(is_checksum).collect();
    varying.push(&here);
    says("a flipped bit in a large command of the Raft log", &text, &varying);
    fs::write(&file, &sound).unwrap();

    let file = files(directory.path()).pop().unwrap();
    let sound = fs::read(&file).unwrap();
    let mut damaged = sound.clone();
    let frame = FIRST_FRAME..FIRST_FRAME + 2 * PAGE;
    assert_eq!(copies_with(&sound[frame.clone()], b"kvfr"), [0, PAGE]);
    for copy in frame.step_by(PAGE) {
        damaged[copy + 10] ^= 1;
    }
    fs::write(&file, &damaged).unwrap();
    says("a frame of the Raft log that is damaged in both copies", &refusal(directory.path()), &[&here]);

    for length in [0, 1, PAGE, PAGE + 7, 2 * PAGE, sound.len() - 1] {
        fs::write(&file, &sound[..length]).unwrap();
        refusal(directory.path());
    }
    fs::remove_file(&file).unwrap();
    refusal(directory.path());
}

/// After the two copies of the head, and the frame that starts the file.
const FIRST_FRAME: usize = 4 * PAGE;

#[test]
fn a_partially_created_log_is_recreated() {
    let directory = in_memory();
    let new = directory.path().join("raft-log.new");
    fs::create_dir(&new).unwrap();
    fs::write(new.join("new"), b"half of a head").unwrap();
    written(directory.path(), 1);
    assert!(!new.exists());
}

#[test]
fn a_log_of_an_earlier_release_is_refused() {
    let directory = in_memory();
    fs::write(directory.path().join("raft.redb"), b"redb").unwrap();
    let Err(error) = DiskLog::open(directory.path(), &owner(ROUTER, "test", 1)) else {
        panic!("must be refused")
    };
    let here = directory.path().display().to_string();
    says("a Raft log of an earlier release", &error, &[&here]);
    assert!(!directory.path().join(LOG_FOLDER).exists());
}
