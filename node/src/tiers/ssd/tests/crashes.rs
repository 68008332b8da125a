//! What survives a crash, and what a device that breaks or lies can do: whatever it is, nothing wrong is
//! served, and what was committed on an honest device is there.
//!
//! The thread of the device runs beside the test, so a seed gives the same operations and faults, and nearly
//! the same order of writes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::faulty::{FaultyDevice, Plan};
use super::*;

/// Cases of each property.
const CASES: u32 = 200;

/// Writes that wait for their end at once.
const IN_FLIGHT: usize = 5;

#[derive(Clone, Copy, Debug)]
enum Step {
    Save(u8),
    Free(u8),
    Load(u8),
    /// A record is checked though nobody asked.
    Check,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0u8..60).prop_map(Step::Save),
        3 => any::<u8>().prop_map(Step::Free),
        1 => any::<u8>().prop_map(Step::Load),
        1 => Just(Step::Check),
    ];
    prop::collection::vec(step, 1..400)
}

/// Frames of several lengths, from one page to four.
fn frame_of(number: u8) -> Bytes {
    let bytes = 500 + usize::from(number) * 211 % 13_000;
    let payload: Vec<u8> = (0..bytes).map(|at| (at as u8).wrapping_mul(31) ^ number).collect();
    let length = u32::try_from(bytes).unwrap();
    placed(number, seal(IDENTITY, hash(number), KeyForm::Rotated, &[length], &payload).unwrap().bytes)
}

fn header_of(number: u8) -> RecordHeader {
    let mut header = header(number);
    header.traits.bytes = u32::try_from(frame_of(number).len()).unwrap();
    header
}

struct Run {
    bench: Bench,
    device: Arc<FaultyDevice>,
    /// Blocks that were reported committed and not freed since.
    committed: BTreeMap<u8, SsdRecord>,
    writing: BTreeMap<u64, (u8, SsdRecord)>,
    token: u64,
    loads: u64,
}

fn open_on(device: FaultyDevice) -> Run {
    // So few segments that every run of some length has rescues.
    open_with(Arc::new(device), 9)
}

fn open_with(device: Arc<FaultyDevice>, segments: u32) -> Run {
    let frame_bytes_max = 14_000;
    let (send, reports) = unbounded_channel();
    let config = SsdConfig { frame_bytes_max, ..config(Path::new("/nowhere"), false) };
    let shape = Shape { segment_pages: 32, segments, frame_bytes_max };
    let (mut report, mut ssd) = (ScanReport::default(), Ssd::empty());
    let theirs: Arc<dyn Device> = Arc::<FaultyDevice>::clone(&device);
    ssd.open_device(&config, theirs, shape, "faulty".to_owned(), send, &mut report).unwrap();
    ssd.order(Noted::default(), &mut report);
    let arena = Arena::new(ArenaShape::equal(frame_bytes_max, 4, 0)).unwrap();
    let bench = Bench { ssd, reports, report, arena };
    Run { bench, device, committed: BTreeMap::new(), writing: BTreeMap::new(), token: 0, loads: 0 }
}

impl Run {
    fn take_one(&mut self) {
        let report = self.bench.reports.blocking_recv().unwrap();
        let done = self.bench.ssd.take_in(report);
        self.bench.move_all();
        match done {
            Some(Done::Written { token, result }) => {
                let (number, record) = self.writing.remove(&token).expect("reported once");
                if result.is_ok() {
                    self.committed.insert(number, record);
                }
            }
            Some(Done::Lost { record, .. }) => self.committed.retain(|_, kept| *kept != record),
            Some(Done::Read { .. }) => panic!("no read is open"),
            Some(Done::Checked { .. } | Done::Failed { .. }) | None => {}
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Save(number) => self.save(number),
            Step::Free(number) => {
                let count = self.committed.len();
                let nth = self.committed.keys().nth(usize::from(number) % count.max(1)).copied();
                if let Some(record) = nth.and_then(|number| self.committed.remove(&number)) {
                    self.bench.ssd.free(record);
                }
            }
            Step::Load(number) => {
                let count = self.committed.len();
                let nth = self.committed.iter().nth(usize::from(number) % count.max(1));
                if let Some((number, record)) = nth.map(|(number, record)| (*number, *record)) {
                    let _ = self.load(number, record);
                }
            }
            Step::Check => {
                while !self.writing.is_empty() {
                    self.take_one();
                }
                // A pass of its own, so that it is never over.
                self.loads += 1;
                let _ = self.bench.ssd.check_next(self.loads);
            }
        }
    }

    fn save(&mut self, number: u8) {
        let known = self.committed.contains_key(&number);
        // The tier book never holds more than the capacity; here that is 30 blocks.
        if known || self.writing.values().any(|(other, _)| *other == number) || self.committed.len() > 30 {
            return;
        }
        while self.writing.len() >= IN_FLIGHT {
            self.take_one();
        }
        loop {
            self.token += 1;
            match self.bench.ssd.write(self.token, 0, header_of(number), &frame_of(number)) {
                Ok(Some(record)) => {
                    self.writing.insert(self.token, (number, record));
                    return;
                }
                // So few blocks are wanted that room comes, unless nothing is on its way.
                Ok(None) if self.device.is_dead() => return,
                Ok(None) => {
                    assert!(!self.bench.ssd.lanes[0].is_quiet(), "there is no room, and none will come");
                    self.take_one();
                }
                Err(_) => return self.bench.ssd.resume(),
            }
        }
    }

    /// A device that works writes whatever happened before.
    fn goes_on(&mut self, keep: usize) {
        self.device.set_plan(Plan::default());
        // Errors of before may still be told.
        self.bench.ssd.resume();
        while !self.bench.ssd.lanes[0].is_quiet() {
            self.take_one();
            self.bench.ssd.resume();
        }
        while self.committed.len() > keep {
            self.step(Step::Free(77));
        }
        for number in 60..110 {
            self.save(number);
            while !self.writing.is_empty() {
                self.take_one();
            }
            let record = self.committed.remove(&number).expect("it is written");
            self.bench.ssd.free(record);
        }
    }

    /// Loads a block. Whatever comes is right, or nothing comes.
    fn load(&mut self, number: u8, record: SsdRecord) -> bool {
        while !self.writing.is_empty() {
            self.take_one();
        }
        let into = self.bench.arena.take(frame_of(number).len(), Purpose::Load).unwrap();
        self.loads += 1;
        if self.bench.ssd.read(1 << 40 | self.loads, record, (hash(number), Generation(0)), into).is_err() {
            return false;
        }
        loop {
            let report = self.bench.reports.blocking_recv().unwrap();
            let done = self.bench.ssd.take_in(report);
            self.bench.move_all();
            match done {
                Some(Done::Read { result: Ok(bytes), .. }) => {
                    assert_eq!(bytes, frame_of(number), "wrong bytes of block {number} were served");
                    return true;
                }
                Some(Done::Read { .. }) => return false,
                Some(Done::Lost { record, .. }) => self.committed.retain(|_, kept| *kept != record),
                _ => {}
            }
        }
    }

    /// Ends without a word, and starts on what is left on the medium.
    fn crash(self, change: impl FnOnce(&mut [u8])) -> (Run, BTreeMap<u8, SsdRecord>) {
        let Run { bench, device, committed, .. } = self;
        drop(bench);
        let mut image = device.crash();
        change(&mut image);
        (open_on(FaultyDevice::new(image, Plan::default(), 99)), committed)
    }

    fn found_all(&self) -> BTreeMap<u8, SsdRecord> {
        self.bench.report.blocks.iter().map(|found| (found.header.hash.0[0], found.record)).collect()
    }
}

/// The seed of this run, printed; `KVFLEET_SEED` brings one back.
fn runner() -> TestRunner {
    let seed = std::env::var("KVFLEET_SEED").ok().and_then(|text| text.parse::<u64>().ok());
    let seed = seed.unwrap_or_else(|| {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(1)
    });
    println!("KVFLEET_SEED={seed}, {CASES} cases");
    let mut bytes = [0u8; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        Config { cases: CASES, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

#[test]
fn what_was_committed_survives_a_crash_at_any_write() {
    let cases = (steps(), steps(), 1u64..400, any::<u64>());
    let result = runner().run(&cases, |(steps, after, dies_at_write, seed)| {
        let plan = Plan { dies_at_write, reorders: true, short: 20, ..Plan::default() };
        let mut run = open_on(FaultyDevice::new(Vec::new(), plan, seed));
        for step in steps {
            if run.device.is_dead() {
                break;
            }
            run.step(step);
        }
        let (mut run, committed) = run.crash(|_| {});
        let found = run.found_all();
        for number in committed.keys() {
            let record = found.get(number).copied();
            prop_assert!(record.is_some_and(|record| run.load(*number, record)), "block {} is lost", number);
        }
        // What came back is served or refused, and the tier goes on.
        run.committed = found;
        after.into_iter().for_each(|step| run.step(step));
        let kept = run.committed.clone();
        for (number, record) in kept {
            let _ = run.load(number, record);
        }
        run.goes_on(20);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn errors_lose_nothing_that_was_committed() {
    let cases = (steps(), any::<u64>(), 0u8..40, 0u8..40);
    let result = runner().run(&cases, |(steps, seed, write_error, sync_error)| {
        let plan =
            Plan { write_error, sync_error, read_error: 20, short: 30, reorders: true, ..Plan::default() };
        let mut run = open_on(FaultyDevice::new(Vec::new(), plan, seed));
        steps.into_iter().for_each(|step| run.step(step));
        run.device.set_plan(Plan::default());
        run.bench.ssd.resume();
        for (number, record) in run.committed.clone() {
            let served = run.load(number, record);
            prop_assert!(served || !run.committed.contains_key(&number), "block {} is lost", number);
        }
        run.goes_on(20);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn a_device_that_lies_or_rots_costs_blocks_and_never_gives_wrong_ones() {
    let cases = (steps(), any::<u64>(), 0u8..60, 0u8..120, 0usize..200);
    let result = runner().run(&cases, |(steps, seed, lost_write, lost_sync, flips)| {
        let plan = Plan { lost_write, lost_sync, reorders: true, ..Plan::default() };
        let mut run = open_on(FaultyDevice::new(Vec::new(), plan, seed));
        steps.into_iter().for_each(|step| run.step(step));
        let (mut run, _) = run.crash(|image| {
            for flip in 0..flips.min(image.len()) {
                let at = (seed as usize).wrapping_mul(flip * 2 + 1) % image.len();
                image[at] ^= 1 << (flip % 8);
            }
        });
        for (number, record) in run.found_all() {
            let _ = run.load(number, record);
        }
        Ok(())
    });
    result.unwrap();
}

#[test]
fn what_a_start_finds_in_a_segment_that_was_not_full_stays_there() {
    let mut run = open_on(FaultyDevice::new(Vec::new(), Plan::default(), 5));
    (0..8).for_each(|number| run.save(number));
    while !run.writing.is_empty() {
        run.take_one();
    }
    let image = run.device.crash();
    drop(run);
    // The process died before any flush; after the next start power fails before its first write.
    let plan = Plan { dies_at_write: 1, ..Plan::default() };
    let run = open_on(FaultyDevice::unflushed(image, plan, 5));
    let found = run.found_all();
    assert_eq!(found.len(), 8);
    let (mut run, _) = run.crash(|_| {});
    let kept = run.found_all();
    for number in found.keys() {
        let record = kept.get(number).copied();
        assert!(
            record.is_some_and(|record| run.load(*number, record)),
            "block {number} was told of and is lost"
        );
    }
}

#[test]
fn a_start_with_less_room_than_before_goes_on() {
    for segments in [3, 4, 5] {
        let mut run = open_on(FaultyDevice::new(Vec::new(), Plan::default(), 5));
        (29..60).for_each(|number| run.save(number));
        while !run.writing.is_empty() {
            run.take_one();
        }
        let image = run.device.crash();
        drop(run);
        let mut run = open_with(Arc::new(FaultyDevice::new(image, Plan::default(), 5)), segments);
        run.committed = run.found_all();
        assert_eq!(run.committed.len(), 31);
        // A little of each segment stays, so that none is empty by itself.
        let dead: Vec<u8> = run.committed.keys().copied().filter(|number| number % 4 != 0).collect();
        for number in dead {
            let record = run.committed.remove(&number).unwrap();
            run.bench.ssd.free(record);
        }
        run.goes_on(8);
        for (number, record) in run.committed.clone() {
            assert!(run.load(number, record) || !run.committed.contains_key(&number), "block {number}");
        }
        assert!(run.committed.len() > 4, "{} of 8 blocks are left", run.committed.len());
    }
}

#[test]
fn a_device_without_room_takes_what_it_has_room_for_and_goes_on() {
    let (segment, segments_at) = (32 * 4096, 64 << 10);
    let plan = Plan { room: segments_at + 3 * segment, ..Plan::default() };
    let mut run = open_on(FaultyDevice::new(Vec::new(), plan, 5));
    let save = |run: &mut Run, number: u8| {
        run.step(Step::Save(number));
        while !run.writing.is_empty() {
            run.take_one();
        }
    };
    (0..60).for_each(|number| save(&mut run, number));
    let count = run.committed.len();
    assert!((12..40).contains(&count), "{count} blocks");
    for (number, record) in run.committed.clone() {
        assert!(run.load(number, record), "block {number}");
    }
    // Half of what it holds is wanted no more, a little of each segment: it writes on while it is full.
    let dead: Vec<u8> = run.committed.keys().copied().filter(|number| number % 2 == 0).collect();
    for number in dead {
        let record = run.committed.remove(&number).unwrap();
        run.bench.ssd.free(record);
    }
    run.bench.ssd.resume();
    let mut written = 0;
    for number in 60..160 {
        save(&mut run, number);
        if let Some(record) = run.committed.remove(&number) {
            written += 1;
            run.bench.ssd.free(record);
        }
    }
    assert!(written > 90, "{written} of 100 were written to a full device");
    for (number, record) in run.committed.clone() {
        assert!(run.load(number, record) || !run.committed.contains_key(&number), "block {number}");
    }
    run.device.set_plan(Plan::default());
    run.bench.ssd.resume();
    (0..31).for_each(|number| save(&mut run, number));
    assert!(run.committed.len() > 30, "room came back: {} blocks", run.committed.len());
    run.goes_on(20);
}
