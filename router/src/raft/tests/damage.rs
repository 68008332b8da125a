//! Damage is found at open, named, and refused: it is never served and never panics.

use std::path::Path;

use kvfleet_errors_doc::says;
use redb::{Database, ReadableDatabase, TableDefinition};
use tempfile::TempDir;

use super::super::disk::{LOG_FILE, LogError};
use super::{ROUTER, log_id, try_open, written};

const ENTRIES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("entries");
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");

/// Changes the log file through redb itself, so that only our own checks can notice.
fn tamper(directory: &Path, change: impl FnOnce(&redb::WriteTransaction)) {
    let database = Database::create(directory.join(LOG_FILE)).unwrap();
    let transaction = database.begin_write().unwrap();
    change(&transaction);
    transaction.commit().unwrap();
}

fn refusal(directory: &Path) -> String {
    let Err(error) = try_open(directory, ROUTER) else { panic!("a damaged log was opened") };
    assert!(matches!(error, LogError::Corrupt { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(LOG_FILE) && text.contains("refuses to start"), "{text}");
    text
}

fn record(directory: &Path, index: u64) -> Vec<u8> {
    let database = Database::create(directory.join(LOG_FILE)).unwrap();
    let table = database.begin_read().unwrap().open_table(ENTRIES).unwrap();
    table.get(index).unwrap().unwrap().value().to_vec()
}

#[tokio::test]
async fn every_flipped_bit_of_a_record_is_found_and_named() {
    let directory = TempDir::new().unwrap();
    written(directory.path(), 9).await;
    let sound = record(directory.path(), 4);
    for byte in 0..sound.len() {
        let mut flipped = sound.clone();
        flipped[byte] ^= 1 << (byte % 8);
        tamper(directory.path(), |transaction| {
            transaction.open_table(ENTRIES).unwrap().insert(4, flipped.as_slice()).unwrap();
        });
        assert!(refusal(directory.path()).contains("entry 4"), "byte {byte}");
    }
    let text = refusal(directory.path());
    let is_checksum = |word: &&str| word.len() == 8 && word.chars().all(|letter| letter.is_ascii_hexdigit());
    let words = text.split(|letter: char| !letter.is_alphanumeric());
    let mut varying: Vec<&str> = words.filter(is_checksum).collect();
    let here = directory.path().display().to_string();
    varying.push(&here);
    says("a flipped bit in the Raft log", &text, &varying);
    tamper(directory.path(), |transaction| {
        transaction.open_table(ENTRIES).unwrap().insert(4, sound.as_slice()).unwrap();
    });
    try_open(directory.path(), ROUTER).map(|_| ()).unwrap();
}

#[tokio::test]
async fn missing_moved_and_short_records_are_found() {
    type Damage = fn(&redb::WriteTransaction);
    let cases: [(&str, Damage); 6] = [
        ("entry 4 of group 0 is missing", |transaction| {
            transaction.open_table(ENTRIES).unwrap().remove(4).unwrap();
        }),
        ("entries 9 to 9 of group 0 are missing", |transaction| {
            transaction.open_table(ENTRIES).unwrap().remove(9).unwrap();
        }),
        ("entry 0 of group 0 is missing", |transaction| {
            transaction.open_table(ENTRIES).unwrap().remove(0).unwrap();
        }),
        ("entry 5 of group 0 has checksum", |transaction| {
            let mut table = transaction.open_table(ENTRIES).unwrap();
            let other = table.remove(4).unwrap().unwrap().value().to_vec();
            table.insert(5, other.as_slice()).unwrap();
            table.insert(4, other.as_slice()).unwrap();
        }),
        ("shorter than its checksum", |transaction| {
            transaction.open_table(ENTRIES).unwrap().insert(4, [1u8, 2].as_slice()).unwrap();
        }),
        ("\"0/vote\"", |transaction| {
            transaction.open_table(META).unwrap().insert("0/vote", [0u8; 12].as_slice()).unwrap();
        }),
    ];
    for (expected, damage) in cases {
        let directory = TempDir::new().unwrap();
        written(directory.path(), 9).await;
        tamper(directory.path(), damage);
        let text = refusal(directory.path());
        assert!(text.contains(expected), "{text:?} does not say {expected:?}");
    }
}

#[tokio::test]
async fn a_damaged_file_never_panics_and_never_loses_an_entry() {
    let directory = TempDir::new().unwrap();
    written(directory.path(), 200).await;
    let path = directory.path().join(LOG_FILE);
    let sound = std::fs::read(&path).unwrap();
    let step = sound.len() / 400;
    for at in (0..sound.len()).step_by(step) {
        let mut damaged = sound.clone();
        damaged[at] ^= 0xff;
        std::fs::write(&path, &damaged).unwrap();
        if let Ok((mut store, guard)) = try_open(directory.path(), ROUTER) {
            use openraft::storage::{RaftLogReader, RaftLogStorage};
            let last = store.get_log_state().await.unwrap().last_log_id;
            assert_eq!(last, Some(log_id(1, 200)), "byte {at} of {} was lost silently", sound.len());
            assert_eq!(store.read_vote().await.unwrap(), Some(super::super::Vote::new_committed(1, ROUTER)));
            super::close(store, guard).await;
        }
    }
    for bytes in [0, 1, 100, sound.len() / 2, sound.len() - 1] {
        std::fs::write(&path, &sound[..bytes]).unwrap();
        let opened = try_open(directory.path(), ROUTER);
        // An empty file is a new one to redb; a voter must not take it for its log.
        assert!(opened.is_err(), "{bytes} of {} bytes were opened", sound.len());
    }
}

#[tokio::test]
async fn a_log_that_was_never_finished_is_made_anew() {
    for left in [&b""[..], b"half of a log"] {
        let directory = TempDir::new().unwrap();
        std::fs::write(directory.path().join("raft.redb.new"), left).unwrap();
        written(directory.path(), 3).await;
        assert!(!record(directory.path(), 3).is_empty());
        assert!(!directory.path().join("raft.redb.new").exists());
    }
}
