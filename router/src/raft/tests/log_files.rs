//! Many batches over many files: each restart recovers the committed state, and unneeded files are
//! freed.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::log::{Change, LOG_FOLDER, RecoveredLog};
use super::super::{Entry, Payload, Proposal, Vote};
use super::{ROUTER, in_memory, log_id, open_disk};

/// File size in tests, larger than the out-of-line part of a frame.
const FILE_BYTES: u64 = 128 << 10;

fn entry_of(index: u64, bytes: usize) -> Entry {
    let payload = Payload::Normal(Proposal(vec![index as u8; bytes].into()));
    Entry { log_id: log_id(1, index), payload }
}

/// Expected log of one group.
#[derive(Default)]
struct LogModel(RecoveredLog);

impl LogModel {
    fn next(&self) -> u64 {
        let purged = self.0.purged.map_or(0, |purged| purged.index() + 1);
        self.0.entries.back().map_or(purged, |entry| entry.log_id.index() + 1)
    }

    fn apply(&mut self, change: &Change) {
        let RecoveredLog { vote, purged, committed, entries } = &mut self.0;
        match change {
            Change::Vote(given) => *vote = Some(*given),
            Change::Append(new) => entries.extend(new.iter().cloned()),
            Change::Truncate { from } => entries.retain(|entry| entry.log_id.index() < *from),
            Change::Purge(upto) => {
                entries.retain(|entry| entry.log_id.index() > upto.index());
                *purged = Some(*upto);
            }
            Change::Committed(last) => *committed = *last,
            Change::Forget => self.0 = RecoveredLog { vote: *vote, ..RecoveredLog::default() },
        }
    }

    fn change(&self, random: &mut StdRng) -> Change {
        let (first, next) = (self.0.entries.front().map(|entry| entry.log_id.index()), self.next());
        match (random.random_range(0..20), first) {
            (0, _) => Change::Vote(Vote::new(random.random_range(0..9), ROUTER)),
            (1, Some(first)) => Change::Truncate { from: random.random_range(first..=next) },
            (2 | 3, Some(first)) => Change::Purge(log_id(1, random.random_range(first..next))),
            (4, _) if random.random_bool(0.1) => Change::Purge(log_id(1, next + 3)),
            (5, Some(first)) => Change::Committed(Some(log_id(1, first))),
            (6, _) if random.random_bool(0.1) => Change::Forget,
            _ => {
                let bytes = [10, 300, 5_000, 40_000, 150_000][random.random_range(0..5)];
                let count = random.random_range(1..4);
                Change::Append((next..next + count).map(|index| entry_of(index, bytes)).collect())
            }
        }
    }
}

fn files(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory.join(LOG_FOLDER)).unwrap();
    files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
}

fn kept(directory: &Path) -> u64 {
    files(directory).iter().filter(|name| name.parse::<u64>().is_ok()).count() as u64
}

#[test]
fn every_restart_recovers_the_committed_state() {
    for seed in 0..12 {
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let directory = in_memory();
        let mut models = [LogModel::default(), LogModel::default()];
        for _ in 0..15 {
            let (mut disk, recovered) = open_disk(directory.path()).unwrap();
            let expected: Vec<RecoveredLog> = models.iter().map(|model| model.0.clone()).collect();
            assert_eq!(recovered, expected);
            for _ in 0..random.random_range(0..40) {
                let mut batch = Vec::new();
                for _ in 0..random.random_range(1..5) {
                    let group = random.random_range(0..2u16);
                    let model = &mut models[usize::from(group)];
                    let change = model.change(&mut random);
                    model.apply(&change);
                    batch.push((group, change));
                }
                disk.commit(batch.iter().map(|(group, change)| (*group, change))).unwrap();
                disk.prepare();
            }
        }
        // Records are written twice, and so are commands up to 512 bytes.
        let wanted = models.iter().flat_map(|model| &model.0.entries).map(|entry| match &entry.payload {
            Payload::Normal(Proposal(command)) if command.len() > 512 => 128 + command.len() as u64,
            Payload::Normal(Proposal(command)) => 128 + 2 * command.len() as u64,
            _ => 128,
        });
        let bound = 3 + 2 * wanted.sum::<u64>() / FILE_BYTES;
        // A start begins a file and enforces the bound on kept files; files go one by one.
        let (mut disk, _) = open_disk(directory.path()).unwrap();
        (0..100).for_each(|_| disk.prepare());
        assert!(kept(directory.path()) <= bound, "{:?}, {bound}", files(directory.path()));
    }
}

/// An idle group keeps no file, and neither do unread files.
#[test]
fn an_idle_group_keeps_no_files() {
    let directory = in_memory();
    let (mut disk, _) = open_disk(directory.path()).unwrap();
    let idle = Change::Append((0..5).map(|index| entry_of(index, 100)).collect());
    disk.commit([(0, &idle)].into_iter()).unwrap();
    let mut most = 0;
    for index in 0..300 {
        let append = Change::Append(vec![entry_of(index, 30_000)]);
        disk.commit([(1, &append)].into_iter()).unwrap();
        if let Some(gone) = index.checked_sub(4) {
            disk.commit([(1, &Change::Purge(log_id(1, gone)))].into_iter()).unwrap();
        }
        disk.prepare();
        most = most.max(files(directory.path()).len());
    }
    // Three plus the needed files, the current one, and four for reuse.
    assert!(most <= 3 + 2 + 1 + 4, "{most}");
    drop(disk);
    let (_, recovered) = open_disk(directory.path()).unwrap();
    let expected: VecDeque<Entry> = (0..5).map(|index| entry_of(index, 100)).collect();
    assert_eq!(recovered[0].entries, expected);
    assert_eq!(recovered[1].entries.len(), 4);
}

/// Entries that are mostly record bytes: their files are kept, and not all moved on with every new
/// file.
#[test]
fn files_of_small_entries_are_not_rewritten_too_often() {
    const BATCHES: u64 = 400;
    let directory = in_memory();
    let (mut disk, _) = open_disk(directory.path()).unwrap();
    for batch in 0..BATCHES {
        let new = batch * 50..(batch + 1) * 50;
        let append = Change::Append(new.map(|index| entry_of(index, 1)).collect());
        disk.commit([(0, &append)].into_iter()).unwrap();
        disk.prepare();
    }
    drop(disk);
    let last = files(directory.path()).iter().filter_map(|name| name.parse::<u64>().ok()).max().unwrap();
    // Two pages per batch, and the marks of the groups.
    assert!(last <= 2 * BATCHES * 2 * 4096 / FILE_BYTES, "{last} files for {BATCHES} batches");
    let (_, recovered) = open_disk(directory.path()).unwrap();
    assert_eq!(recovered[0].entries.len() as u64, BATCHES * 50);
}

/// A start interrupted during its large first frame, and the next one while it freed older files:
/// the oldest remaining file has no marks, and the next one has them.
#[test]
fn two_interrupted_starts_are_recovered() {
    let directory = in_memory();
    let folder = directory.path().join(LOG_FOLDER);
    let read = |name: &str, file: u64| fs::read(folder.join(format!("{name}{file:016}"))).unwrap();
    let (mut disk, _) = open_disk(directory.path()).unwrap();
    // Idle entries, and three files of other entries that are freed: the next file takes the idle
    // ones along.
    let idle = Change::Append((0..5).map(|index| entry_of(index, 10_000)).collect());
    disk.commit([(0, &idle)].into_iter()).unwrap();
    for index in 0.. {
        disk.commit([(1, &Change::Append(vec![entry_of(index, 40_000)]))].into_iter()).unwrap();
        disk.commit([(1, &Change::Purge(log_id(1, index)))].into_iter()).unwrap();
        if kept(directory.path()) == 3 {
            break;
        }
    }
    drop(disk);
    let old = [1, 2].map(|file| read("", file));
    // Sets up the log with these files, and opens it.
    let open_with = |contents: &[(u64, &[u8])]| {
        files(directory.path()).iter().for_each(|file| fs::remove_file(folder.join(file)).unwrap());
        for (file, bytes) in contents {
            fs::write(folder.join(format!("{file:016}")), bytes).unwrap();
        }
        open_disk(directory.path()).unwrap().1
    };
    let expected = open_disk(directory.path()).unwrap().1;
    assert_eq!(
        (expected[0].entries.len(), kept(directory.path())),
        (5, 1),
        "the first three files were freed"
    );
    // The first interruption leaves only the size record of the fourth file's first frame.
    let (third, mut fourth) = (read("free-", 3), read("", 4));
    fourth[16_384..].fill(0);
    assert_eq!(open_with(&[(1, &old[0]), (2, &old[1]), (3, &third), (4, &fourth)]), expected);
    // The second interruption leaves the fourth file and its successor.
    let (fourth, fifth) = (read("free-", 4), read("", 5));
    for _ in 0..2 {
        assert_eq!(open_with(&[(4, &fourth), (5, &fifth)]), expected);
    }
}

/// A start interrupted at any step leaves a log that the next start can read.
#[test]
fn an_interrupted_start_is_recovered() {
    let directory = in_memory();
    let (mut disk, _) = open_disk(directory.path()).unwrap();
    disk.commit([(0, &Change::Append((0..5).map(|index| entry_of(index, 100)).collect()))].into_iter())
        .unwrap();
    drop(disk);
    let folder = directory.path().join(LOG_FOLDER);
    let before = fs::read(folder.join(format!("{:016}", 1))).unwrap();
    let (disk, expected) = open_disk(directory.path()).unwrap();
    drop(disk);
    let [closed, second] = [1, 2].map(|file| fs::read(folder.join(format!("{file:016}"))).unwrap());
    let mut headed = second.clone();
    headed[8_192..].fill(0);
    // The second file was created; then the first one was closed; then the second one was started.
    for (first, second) in [(&before, &headed), (&closed, &headed), (&closed, &second)] {
        for file in files(directory.path()) {
            fs::remove_file(folder.join(file)).unwrap();
        }
        fs::write(folder.join(format!("{:016}", 1)), first).unwrap();
        fs::write(folder.join(format!("{:016}", 2)), second).unwrap();
        fs::write(folder.join("new"), b"half of a head").unwrap();
        for _ in 0..2 {
            let (_, recovered) = open_disk(directory.path()).unwrap();
            assert_eq!(recovered, expected);
        }
    }
}

/// A committed index that reached the disk before its entry: the leader supplies it.
#[test]
fn a_committed_index_beyond_the_log_is_ignored() {
    let directory = in_memory();
    let (mut disk, _) = open_disk(directory.path()).unwrap();
    let append = Change::Append((0..5).map(|index| entry_of(index, 100)).collect());
    for (committed, kept) in [(4, Some(log_id(1, 4))), (5, None)] {
        let committed = Change::Committed(Some(log_id(1, committed)));
        disk.commit([(0, &append), (0, &committed)].into_iter()).unwrap();
        drop(disk);
        let (opened, recovered) = open_disk(directory.path()).unwrap();
        assert_eq!(recovered[0].committed, kept);
        disk = opened;
    }
}
