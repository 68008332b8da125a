//! Crashes, and devices that fail or lie: wrong bytes are never served, and blocks committed on an
//! honest device survive.
//!
//! The device thread runs beside the test, so a seed reproduces the operations and faults, but only
//! nearly the order of writes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::faulty::{FaultPlan, FaultyDevice};
use super::*;

/// Cases of each property.
const CASES: u32 = 200;

/// Maximum open writes.
const IN_FLIGHT: usize = 5;

#[derive(Clone, Copy, Debug)]
enum CrashStep {
    Save(u8),
    Free(u8),
    Load(u8),
    /// A check by the scrubber.
    Check,
}

fn steps() -> impl Strategy<Value = Vec<CrashStep>> {
    let step = prop_oneof![
        5 => (0u8..60).prop_map(CrashStep::Save),
        3 => any::<u8>().prop_map(CrashStep::Free),
        1 => any::<u8>().prop_map(CrashStep::Load),
        1 => Just(CrashStep::Check),
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

struct CrashRun {
    bench: SsdBench,
    device: Arc<FaultyDevice>,
    /// Blocks reported as committed and not freed since.
    committed: BTreeMap<u8, SsdRecord>,
    writing: BTreeMap<u64, (u8, SsdRecord)>,
    token: u64,
    loads: u64,
}

fn open_on(device: FaultyDevice) -> CrashRun {
    // Few segments, so that every run of some length needs relocations.
    open_with(Arc::new(device), 9)
}

fn open_with(device: Arc<FaultyDevice>, segments: u32) -> CrashRun {
    let frame_bytes_max = 14_000;
    let (send, reports) = unbounded_channel();
    let config = SsdConfig { frame_bytes_max, ..config(Path::new("/nowhere"), false) };
    let shape = SegmentShape { segment_pages: 32, segments, frame_bytes_max };
    let (mut report, mut ssd) = (ScanReport::default(), SsdTier::empty());
    let theirs: Arc<dyn BlockDevice> = Arc::<FaultyDevice>::clone(&device);
    ssd.open_device(&config, theirs, shape, "faulty".to_owned(), send, &mut report).unwrap();
    ssd.merge_recovered(WeightsNote::default(), &mut report);
    let arena = Arena::new(ArenaShape::equal(frame_bytes_max, 4, 0)).unwrap();
    let bench = SsdBench { ssd, reports, report, arena };
    CrashRun { bench, device, committed: BTreeMap::new(), writing: BTreeMap::new(), token: 0, loads: 0 }
}

impl CrashRun {
    fn complete_one(&mut self) {
        let report = self.bench.reports.blocking_recv().unwrap();
        let done = self.bench.ssd.complete(report);
        self.bench.relocate_all();
        match done {
            Some(SsdCompletion::Written { token, result }) => {
                let (number, record) = self.writing.remove(&token).expect("each job must be reported once");
                if result.is_ok() {
                    self.committed.insert(number, record);
                }
            }
            Some(SsdCompletion::Lost { record, .. }) => self.committed.retain(|_, kept| *kept != record),
            Some(SsdCompletion::Read { .. }) => panic!("no read is open"),
            Some(SsdCompletion::Checked { .. } | SsdCompletion::Failed { .. }) | None => {}
        }
    }

    fn step(&mut self, step: CrashStep) {
        match step {
            CrashStep::Save(number) => self.save(number),
            CrashStep::Free(number) => {
                let count = self.committed.len();
                let nth = self.committed.keys().nth(usize::from(number) % count.max(1)).copied();
                if let Some(record) = nth.and_then(|number| self.committed.remove(&number)) {
                    self.bench.ssd.free(record);
                }
            }
            CrashStep::Load(number) => {
                let count = self.committed.len();
                let nth = self.committed.iter().nth(usize::from(number) % count.max(1));
                if let Some((number, record)) = nth.map(|(number, record)| (*number, *record)) {
                    let _ = self.load(number, record);
                }
            }
            CrashStep::Check => {
                while !self.writing.is_empty() {
                    self.complete_one();
                }
                // A new pass each time, so that it never ends.
                self.loads += 1;
                let _ = self.bench.ssd.check_next(self.loads);
            }
        }
    }

    fn save(&mut self, number: u8) {
        let known = self.committed.contains_key(&number);
        // The tier book never holds more than the capacity, here 30 blocks.
        if known || self.writing.values().any(|(other, _)| *other == number) || self.committed.len() > 30 {
            return;
        }
        while self.writing.len() >= IN_FLIGHT {
            self.complete_one();
        }
        loop {
            self.token += 1;
            match self.bench.ssd.write(self.token, 0, header_of(number), &frame_of(number)) {
                Ok(Some(record)) => {
                    self.writing.insert(self.token, (number, record));
                    return;
                }
                // Few blocks are live, thus space becomes free unless no operation is in flight.
                Ok(None) if self.device.is_dead() => return,
                Ok(None) => {
                    assert!(
                        !self.bench.ssd.lanes[0].is_idle(),
                        "there is no space, and none will become free"
                    );
                    self.complete_one();
                }
                Err(_) => return self.bench.ssd.resume(),
            }
        }
    }

    /// Checks that a working device accepts writes after any history.
    fn check_still_writes(&mut self, keep: usize) {
        self.device.set_plan(FaultPlan::default());
        // Earlier errors may still be reported.
        self.bench.ssd.resume();
        while !self.bench.ssd.lanes[0].is_idle() {
            self.complete_one();
            self.bench.ssd.resume();
        }
        while self.committed.len() > keep {
            self.step(CrashStep::Free(77));
        }
        for number in 60..110 {
            self.save(number);
            while !self.writing.is_empty() {
                self.complete_one();
            }
            let record = self.committed.remove(&number).expect("the block is written");
            self.bench.ssd.free(record);
        }
    }

    /// Loads a block, and checks its bytes. Returns whether it was readable.
    fn load(&mut self, number: u8, record: SsdRecord) -> bool {
        while !self.writing.is_empty() {
            self.complete_one();
        }
        let into = self.bench.arena.take(frame_of(number).len(), Purpose::Load).unwrap();
        self.loads += 1;
        if self.bench.ssd.read(1 << 40 | self.loads, record, version(number, 0), into).is_err() {
            return false;
        }
        loop {
            let report = self.bench.reports.blocking_recv().unwrap();
            let done = self.bench.ssd.complete(report);
            self.bench.relocate_all();
            match done {
                Some(SsdCompletion::Read { result: Ok(bytes), .. }) => {
                    assert_eq!(bytes, frame_of(number), "wrong bytes of block {number} were served");
                    return true;
                }
                Some(SsdCompletion::Read { .. }) => return false,
                Some(SsdCompletion::Lost { record, .. }) => self.committed.retain(|_, kept| *kept != record),
                _ => {}
            }
        }
    }

    /// Ends abruptly, and restarts on the medium's content.
    fn crash(self, change: impl FnOnce(&mut [u8])) -> (CrashRun, BTreeMap<u8, SsdRecord>) {
        let CrashRun { bench, device, committed, .. } = self;
        drop(bench);
        let mut image = device.crash();
        change(&mut image);
        (open_on(FaultyDevice::new(image, FaultPlan::default(), 99)), committed)
    }

    fn recovered_records(&self) -> BTreeMap<u8, SsdRecord> {
        self.bench.report.blocks.iter().map(|found| (found.header.hash.0[0], found.record)).collect()
    }
}

/// The seed of this run, printed; set `KVFLEET_SEED` to repeat one.
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
fn committed_blocks_survive_a_crash_at_any_write() {
    let cases = (steps(), steps(), 1u64..400, any::<u64>());
    let result = runner().run(&cases, |(steps, after, dies_at_write, seed)| {
        let plan = FaultPlan { dies_at_write, reorders: true, short: 20, ..FaultPlan::default() };
        let mut run = open_on(FaultyDevice::new(Vec::new(), plan, seed));
        for step in steps {
            if run.device.is_dead() {
                break;
            }
            run.step(step);
        }
        let (mut run, committed) = run.crash(|_| {});
        let found = run.recovered_records();
        for number in committed.keys() {
            let record = found.get(number).copied();
            prop_assert!(record.is_some_and(|record| run.load(*number, record)), "block {} is lost", number);
        }
        // Recovered blocks are served or refused, and the tier keeps working.
        run.committed = found;
        after.into_iter().for_each(|step| run.step(step));
        let kept = run.committed.clone();
        for (number, record) in kept {
            let _ = run.load(number, record);
        }
        run.check_still_writes(20);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn io_errors_lose_no_committed_block() {
    let cases = (steps(), any::<u64>(), 0u8..40, 0u8..40);
    let result = runner().run(&cases, |(steps, seed, write_error, sync_error)| {
        let plan = FaultPlan {
            write_error,
            sync_error,
            read_error: 20,
            short: 30,
            reorders: true,
            ..FaultPlan::default()
        };
        let mut run = open_on(FaultyDevice::new(Vec::new(), plan, seed));
        steps.into_iter().for_each(|step| run.step(step));
        run.device.set_plan(FaultPlan::default());
        run.bench.ssd.resume();
        for (number, record) in run.committed.clone() {
            let served = run.load(number, record);
            prop_assert!(served || !run.committed.contains_key(&number), "block {} is lost", number);
        }
        run.check_still_writes(20);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn lying_or_decaying_device_never_returns_wrong_bytes() {
    let cases = (steps(), any::<u64>(), 0u8..60, 0u8..120, 0usize..200);
    let result = runner().run(&cases, |(steps, seed, lost_write, lost_sync, flips)| {
        let plan = FaultPlan { lost_write, lost_sync, reorders: true, ..FaultPlan::default() };
        let mut run = open_on(FaultyDevice::new(Vec::new(), plan, seed));
        steps.into_iter().for_each(|step| run.step(step));
        let (mut run, _) = run.crash(|image| {
            for flip in 0..flips.min(image.len()) {
                let at = (seed as usize).wrapping_mul(flip * 2 + 1) % image.len();
                image[at] ^= 1 << (flip % 8);
            }
        });
        for (number, record) in run.recovered_records() {
            let _ = run.load(number, record);
        }
        Ok(())
    });
    result.unwrap();
}

#[test]
fn recovered_blocks_of_an_unsealed_segment_are_durable() {
    let mut run = open_on(FaultyDevice::new(Vec::new(), FaultPlan::default(), 5));
    (0..8).for_each(|number| run.save(number));
    while !run.writing.is_empty() {
        run.complete_one();
    }
    let image = run.device.crash();
    drop(run);
    // The process died before any flush; after the next start, power fails before its first write.
    let plan = FaultPlan { dies_at_write: 1, ..FaultPlan::default() };
    let run = open_on(FaultyDevice::unflushed(image, plan, 5));
    let found = run.recovered_records();
    assert_eq!(found.len(), 8);
    let (mut run, _) = run.crash(|_| {});
    let kept = run.recovered_records();
    for number in found.keys() {
        let record = kept.get(number).copied();
        assert!(
            record.is_some_and(|record| run.load(*number, record)),
            "block {number} was announced and is lost"
        );
    }
}

#[test]
fn start_with_smaller_capacity_keeps_working() {
    for segments in [3, 4, 5] {
        let mut run = open_on(FaultyDevice::new(Vec::new(), FaultPlan::default(), 5));
        (29..60).for_each(|number| run.save(number));
        while !run.writing.is_empty() {
            run.complete_one();
        }
        let image = run.device.crash();
        drop(run);
        let mut run = open_with(Arc::new(FaultyDevice::new(image, FaultPlan::default(), 5)), segments);
        run.committed = run.recovered_records();
        assert_eq!(run.committed.len(), 31);
        // A few blocks of each segment stay, so that none becomes empty by itself.
        let dead: Vec<u8> = run.committed.keys().copied().filter(|number| number % 4 != 0).collect();
        for number in dead {
            let record = run.committed.remove(&number).unwrap();
            run.bench.ssd.free(record);
        }
        run.check_still_writes(8);
        for (number, record) in run.committed.clone() {
            assert!(run.load(number, record) || !run.committed.contains_key(&number), "block {number}");
        }
        assert!(run.committed.len() > 4, "only {} of 8 blocks are left", run.committed.len());
    }
}

#[test]
fn full_device_accepts_what_fits_and_keeps_working() {
    let (segment, segments_at) = (32 * 4096, 64 << 10);
    let plan = FaultPlan { room: segments_at + 3 * segment, ..FaultPlan::default() };
    let mut run = open_on(FaultyDevice::new(Vec::new(), plan, 5));
    let save = |run: &mut CrashRun, number: u8| {
        run.step(CrashStep::Save(number));
        while !run.writing.is_empty() {
            run.complete_one();
        }
    };
    (0..60).for_each(|number| save(&mut run, number));
    let count = run.committed.len();
    assert!((12..40).contains(&count), "{count} blocks");
    for (number, record) in run.committed.clone() {
        assert!(run.load(number, record), "block {number}");
    }
    // Half of its blocks are freed, across all segments: it continues to write although the medium
    // is full.
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
    assert!(written > 90, "only {written} of 100 were written to a full device");
    for (number, record) in run.committed.clone() {
        assert!(run.load(number, record) || !run.committed.contains_key(&number), "block {number}");
    }
    run.device.set_plan(FaultPlan::default());
    run.bench.ssd.resume();
    (0..31).for_each(|number| save(&mut run, number));
    assert!(run.committed.len() > 30, "space is free again: {} blocks", run.committed.len());
    run.check_still_writes(20);
}
