//! Whether a device is slow at one kind of work: what it takes for it while it has any to do, against what it usually
//! takes, or what the other devices take while that is not known. Pure: the time is given in.
//!
//! Work by time tells a slow device from a busy one, of which each operation takes longer because there are many; that
//! each operation takes long besides tells it from one with little to do. Both have to be so, by far and for a while.
//! Reads, writes and flushes are judged apart: one that reads well and writes badly is slow. Not here: what follows
//! (`lane`, `pick`).

use kv_core::id::Timestamp;

/// An operation counts as one unit of work and as one more for each so many bytes.
const UNIT_BYTES: usize = 64 << 10;

/// A window is over after so much time with something in flight, if anything ended in it;
const WINDOW_US: u64 = 500_000;

/// after so many units;
const WINDOW_UNITS: u64 = 256;

/// where nothing ends at all, each time that so much more has passed, and it goes on: what ends at last took all of it.
const HANG_US: u64 = 1_000_000;

/// Slow is so many times what is usual,
const SLOW_TIMES: f64 = 8.0;

/// for so many windows one after another: one alone may be a pause for the medium's own business. As many that are well
/// end it, and twice as many each time that it was slow again soon after, up to a limit.
const WINDOWS: u32 = 3;
const WINDOWS_MAX: u32 = 48;

/// A slow device's window is over after this too, however little was done in it: little that is done well counts.
const SLOW_WINDOW_US: u64 = 5_000_000;

/// One that was not seen to be slow for so long is well, whatever little it did: whoever gives it more finds out.
const FORGIVEN_US: u64 = 60_000_000;

/// Soon after: a device that was well for so long begins anew.
const RELAPSE_US: u64 = 60_000_000;

/// An operation that takes no longer than this is not slow, whatever else is.
const WELL_WAIT_US: f64 = 25_000.0;

/// While the device does much of other kinds, each operation of a slow one takes so long: what it does besides stands
/// before it.
const BUSY_WAIT_US: f64 = 1_000_000.0;

/// Windows after which it is known what is usual.
const USUAL_WINDOWS: u32 = 8;

/// Windows that would be slow ones, if it were known what is usual, before they are taken for usual after all: as long as
/// the other devices need to become known.
const DOUBTED_WINDOWS: u32 = 64;

/// Part that a window has in what is usual, once that is known.
const USUAL_PART: f64 = 1.0 / 16.0;

/// A window above so many times what is usual is not usual.
const USUAL_TIMES: f64 = 2.0;

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
}

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::Read, Kind::Write, Kind::Flush];

    /// As it is said in the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Read => "reads",
            Kind::Write => "writes",
            Kind::Flush => "flushes",
        }
    }

    /// What a unit of work and each operation take at least on a slow device, in microseconds: 16 MB/s and a tenth of a
    /// second; a flush of what is written at once takes a second at that rate.
    fn slow_us_min(self) -> (f64, f64) {
        match self {
            Kind::Read | Kind::Write => (4_000.0, 100_000.0),
            Kind::Flush => (1_000_000.0, 1_000_000.0),
        }
    }
}

/// What a device has done of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Work {
    in_flight: u64,
    /// The time up to which the sums are right.
    at: Timestamp,
    /// Time with something in flight.
    busy_us: u64,
    /// The same, for each operation that was.
    waited_us: u64,
    ops: u64,
    units: u64,
}

impl Work {
    fn up_to(mut self, now: Timestamp) -> Work {
        let span_us = now.0.saturating_sub(self.at.0);
        if self.in_flight > 0 {
            self.busy_us += span_us;
            self.waited_us += span_us.saturating_mul(self.in_flight);
        }
        self.at = now;
        self
    }
}

/// What a device has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally([Work; Kind::ALL.len()]);

impl Tally {
    /// An operation is on its way.
    pub(crate) fn began(&mut self, kind: Kind, now: Timestamp) {
        let work = &mut self.0[kind as usize];
        *work = work.up_to(now);
        work.in_flight += 1;
    }

    /// An operation of so many bytes ended; one that failed did no work.
    pub(crate) fn ended(&mut self, kind: Kind, bytes: Option<usize>, now: Timestamp) {
        let work = &mut self.0[kind as usize];
        *work = work.up_to(now);
        work.in_flight = work.in_flight.saturating_sub(1);
        if let Some(bytes) = bytes {
            work.ops += 1;
            work.units += 1 + (bytes / UNIT_BYTES) as u64;
        }
    }

    /// Units of all kinds.
    fn units(&self) -> u64 {
        self.0.iter().map(|work| work.units).sum()
    }
}

/// What a device took in a window, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Took {
    /// For a unit of work.
    unit_us: f64,
    /// From the beginning of an operation to its end, on the mean.
    wait_us: f64,
    /// For a unit of work of any kind, while there was any of this one.
    any_unit_us: f64,
}

/// What became of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// It is slow: it takes so many microseconds for what usually takes so many.
    Slow { takes_us: f64, usual_us: f64 },
    /// It is as it was.
    Well,
}

/// What is known of one kind of work on one device.
#[derive(Debug)]
pub(crate) struct Watch {
    kind: Kind,
    is_slow: bool,
    /// What was done when the window began, of all kinds, and when that was.
    from: Work,
    from_units: u64,
    began: Timestamp,
    /// Time of the window after which it is judged though nothing has ended.
    hang_us: u64,
    /// Windows one after another that speak for a change.
    windows: u32,
    /// So many have to before a slow device is well again.
    wanted: u32,
    /// Since when it has been as it is.
    since: Timestamp,
    /// When it last was seen to be slow.
    bad: Timestamp,
    usual_us: f64,
    learned: u32,
    doubted: u32,
}

impl Watch {
    pub(crate) fn new(kind: Kind) -> Watch {
        Watch {
            kind,
            is_slow: false,
            from: Work::default(),
            from_units: 0,
            began: Timestamp(0),
            hang_us: HANG_US,
            windows: 0,
            wanted: WINDOWS,
            since: Timestamp(0),
            bad: Timestamp(0),
            usual_us: 0.0,
            learned: 0,
            doubted: 0,
        }
    }

    /// Whether the device is slow at this.
    pub(crate) fn is_slow(&self) -> bool {
        self.is_slow
    }

    /// What a unit of work takes usually, in microseconds, once that is known.
    pub(crate) fn usual_us(&self) -> Option<f64> {
        (self.learned >= USUAL_WINDOWS).then_some(self.usual_us)
    }

    /// Looks at what was done. `others` is what a unit usually takes on the other devices, if that is known. Cheap unless
    /// a window is over.
    pub(crate) fn look(
        &mut self,
        tally: &Tally,
        others: impl FnOnce() -> Option<f64>,
        now: Timestamp,
    ) -> Option<Change> {
        let work = tally.0[self.kind as usize].up_to(now);
        let busy_us = work.busy_us - self.from.busy_us;
        let (ops, units) = (work.ops - self.from.ops, work.units - self.from.units);
        let age_us = now.0.saturating_sub(self.began.0);
        if self.is_slow && units == 0 && work.in_flight == 0 {
            let is_over = age_us >= FORGIVEN_US;
            return is_over.then(|| self.is_well(now));
        }
        let is_over = units >= WINDOW_UNITS
            || busy_us >= if units > 0 { WINDOW_US } else { self.hang_us }
            || (self.is_slow && units > 0 && age_us >= SLOW_WINDOW_US);
        if !is_over {
            return None;
        }
        let per = |sum: u64, count: u64| sum as f64 / count.max(1) as f64;
        let took = Took {
            unit_us: per(busy_us, units),
            wait_us: per(work.waited_us - self.from.waited_us, if units > 0 { ops } else { work.in_flight }),
            any_unit_us: per(busy_us, tally.units() - self.from_units),
        };
        if units > 0 {
            (self.from, self.hang_us) = (work, HANG_US);
            (self.from_units, self.began) = (tally.units(), now);
        } else {
            self.hang_us += HANG_US;
        }
        self.judge(took, others(), now)
    }

    fn judge(&mut self, took: Took, others: Option<f64>, now: Timestamp) -> Option<Change> {
        // Its own first: a device of a slower kind is not slow.
        let usual_us = self.usual_us().or(others);
        let (unit_us_min, wait_us_min) = self.kind.slow_us_min();
        let is_unusual = usual_us.is_none_or(|usual_us| took.unit_us >= SLOW_TIMES * usual_us);
        let is_little = is_unusual && took.unit_us >= unit_us_min;
        let does_much = took.any_unit_us < unit_us_min;
        if self.is_slow {
            // With little to do it may take little for it and be slow still, and that shows when there is more.
            let is_well = !is_little || took.wait_us < if does_much { BUSY_WAIT_US } else { WELL_WAIT_US };
            if !is_well {
                self.bad = now;
            }
            let is_over = is_well && now.0.saturating_sub(self.bad.0) >= FORGIVEN_US;
            return (self.after(is_well, self.wanted) || is_over).then(|| self.is_well(now));
        }
        let wait_us_min = if does_much { wait_us_min.max(BUSY_WAIT_US) } else { wait_us_min };
        let seems_slow = is_little && took.wait_us >= wait_us_min;
        self.learn(took.unit_us, seems_slow);
        let is_slow = seems_slow && usual_us.is_some();
        self.after(is_slow, WINDOWS).then(|| {
            let is_relapse = self.since > Timestamp(0) && now.0.saturating_sub(self.since.0) < RELAPSE_US;
            self.wanted = if is_relapse { (self.wanted * 2).min(WINDOWS_MAX) } else { WINDOWS };
            (self.is_slow, self.since, self.began, self.bad) = (true, now, now, now);
            Change::Slow { takes_us: took.unit_us, usual_us: usual_us.unwrap_or_default() }
        })
    }

    fn is_well(&mut self, now: Timestamp) -> Change {
        (self.is_slow, self.since, self.windows) = (false, now, 0);
        Change::Well
    }

    /// Counts a window that speaks for a change or against it; `true` when so many did one after another.
    fn after(&mut self, speaks_for: bool, wanted: u32) -> bool {
        self.windows = if speaks_for { self.windows + 1 } else { 0 };
        let is_enough = self.windows >= wanted;
        if is_enough {
            self.windows = 0;
        }
        is_enough
    }

    fn learn(&mut self, unit_us: f64, seems_slow: bool) {
        let is_far = self.usual_us().is_some_and(|usual_us| unit_us > USUAL_TIMES * usual_us);
        // What nobody can judge yet may be a slow device from its first day on, and others may soon say so.
        self.doubted += u32::from(seems_slow);
        if is_far || (seems_slow && self.doubted <= DOUBTED_WINDOWS) {
            return;
        }
        self.learned = self.learned.saturating_add(1);
        let part = USUAL_PART.max(1.0 / f64::from(self.learned));
        self.usual_us += (unit_us - self.usual_us) * part;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that does one kind of work.
    struct Fake {
        kind: Kind,
        tally: Tally,
        watch: Watch,
        now: u64,
        others: Option<f64>,
    }

    impl Fake {
        fn new(kind: Kind) -> Fake {
            Fake { kind, tally: Tally::default(), watch: Watch::new(kind), now: 1_000_000, others: None }
        }

        /// So many operations of so many bytes, so many of them in flight, each round of which takes so long.
        fn work(&mut self, ops: u64, in_flight: u64, bytes: usize, takes_us: u64) -> Vec<Change> {
            let mut changes = Vec::new();
            for _ in 0..ops / in_flight {
                (0..in_flight).for_each(|_| self.tally.began(self.kind, Timestamp(self.now)));
                changes.extend(self.pass(takes_us));
                (0..in_flight).for_each(|_| self.tally.ended(self.kind, Some(bytes), Timestamp(self.now)));
                changes.extend(self.pass(10));
            }
            changes
        }

        /// Time passes, and somebody looks every 20 ms.
        fn pass(&mut self, mut time_us: u64) -> Vec<Change> {
            let mut changes = Vec::new();
            while time_us > 0 {
                let step = time_us.min(20_000);
                (self.now, time_us) = (self.now + step, time_us - step);
                changes.extend(self.watch.look(&self.tally, || self.others, Timestamp(self.now)));
            }
            changes
        }

        /// As it usually is: 64 KiB, 8 in flight, 400 us: 25 us a unit.
        fn usual(&mut self) {
            assert_eq!(self.work(20_000, 8, UNIT_BYTES, 400), []);
        }
    }

    #[test]
    fn a_device_that_becomes_slow_is_told_once_and_again_when_it_is_well() {
        let mut fake = Fake::new(Kind::Write);
        fake.usual();
        let changes = fake.work(100, 1, UNIT_BYTES, 200_000);
        assert!(
            matches!(changes[..], [Change::Slow { takes_us, usual_us }]
            if takes_us > 99_000.0 && (20.0..60.0).contains(&usual_us)),
            "{changes:?}"
        );
        assert!(fake.watch.is_slow());
        assert_eq!(fake.work(4_000, 8, UNIT_BYTES, 400), [Change::Well]);
        assert!(!fake.watch.is_slow());
        let changes = fake.work(100, 1, UNIT_BYTES, 200_000);
        assert!(matches!(changes[..], [Change::Slow { .. }]), "what is usual was not forgotten");
    }

    #[test]
    fn one_that_is_slow_again_soon_has_to_be_well_for_longer_each_time() {
        let mut fake = Fake::new(Kind::Write);
        fake.usual();
        let mut wells = Vec::new();
        for _ in 0..9 {
            while !fake.watch.is_slow() {
                fake.work(1, 1, UNIT_BYTES, 200_000);
            }
            let mut well = 0;
            while fake.watch.is_slow() {
                fake.work(8, 8, UNIT_BYTES, 400);
                well += 8;
            }
            wells.push(well / (WINDOW_UNITS / 2));
        }
        assert_eq!(wells, [3, 6, 12, 24, 48, 48, 48, 48, 48]);
        // After a minute that is forgotten.
        fake.pass(RELAPSE_US);
        fake.usual();
        assert_eq!(fake.work(100, 1, UNIT_BYTES, 200_000).len(), 1);
        assert_eq!(fake.work(WINDOW_UNITS / 2 * 4, 8, UNIT_BYTES, 400), [Change::Well]);
    }

    #[test]
    fn a_busy_device_is_not_slow_and_neither_is_a_pause() {
        let mut fake = Fake::new(Kind::Read);
        fake.usual();
        // Three hundred times as long for each, with sixty-four times as many in flight: 1 ms a unit.
        assert_eq!(fake.work(6_400, 64, UNIT_BYTES, 128_000), []);
        // Little to do, and what else the device does stands before it: 10 ms a unit.
        assert_eq!(fake.work(400, 1, UNIT_BYTES, 20_000), []);
        assert_eq!(fake.work(2, 1, UNIT_BYTES, 700_000), []);
        fake.usual();
    }

    #[test]
    fn a_slow_device_with_little_to_do_is_well_and_slow_again_when_there_is_more() {
        let mut fake = Fake::new(Kind::Write);
        fake.usual();
        // 5 MB/s.
        assert_eq!(fake.work(640, 16, UNIT_BYTES, 200_000).len(), 1);
        assert!(fake.watch.is_slow());
        assert_eq!(fake.work(200, 1, UNIT_BYTES, 13_000), [Change::Well]);
        assert!(matches!(fake.work(640, 16, UNIT_BYTES, 200_000)[..], [Change::Slow { .. }]));
        // As much as is given to a slow device tells, and so it stays.
        assert_eq!(fake.work(1_600, 16, UNIT_BYTES, 200_000), []);
    }

    #[test]
    fn a_device_that_was_always_slow_is_found_by_its_siblings_alone() {
        let slow = |others| {
            let mut fake = Fake::new(Kind::Read);
            fake.others = others;
            !fake.work(400, 8, UNIT_BYTES, 800_000).is_empty()
        };
        assert_eq!([None, Some(100.0)].map(slow), [false, true], "there may be nothing to compare it with");
        assert!(!slow(Some(10_000.0)), "nor is one that is five times slower");
    }

    #[test]
    fn one_that_is_slow_before_anybody_knows_is_found_once_the_others_are_known() {
        let mut fake = Fake::new(Kind::Write);
        // 5 MB/s from the start, for as long as a busy one takes to be known.
        assert_eq!(fake.work(640, 16, UNIT_BYTES, 400_000), []);
        fake.others = Some(25.0);
        assert_eq!(fake.work(320, 16, UNIT_BYTES, 400_000).len(), 1);
        // Alone it is what it is, in the end.
        let mut fake = Fake::new(Kind::Write);
        assert_eq!(fake.work(3_200, 16, UNIT_BYTES, 400_000), []);
        fake.others = Some(25.0);
        assert_eq!(fake.work(320, 16, UNIT_BYTES, 400_000), []);
    }

    #[test]
    fn reads_that_stand_behind_many_writes_are_not_slow() {
        let mut fake = Fake::new(Kind::Read);
        fake.usual();
        let mut reads = |wait_us: u64, chunks_each: u64| {
            let mut changes = Vec::new();
            for _ in 0..20 {
                fake.tally.began(Kind::Read, Timestamp(fake.now));
                for _ in 0..chunks_each {
                    fake.tally.began(Kind::Write, Timestamp(fake.now));
                    changes.extend(fake.pass(wait_us / chunks_each));
                    fake.tally.ended(Kind::Write, Some(512 << 10), Timestamp(fake.now));
                }
                fake.tally.ended(Kind::Read, Some(UNIT_BYTES), Timestamp(fake.now));
                changes.extend(fake.pass(10));
            }
            changes
        };
        assert_eq!(reads(134_000, 32), [], "125 MB/s are written meanwhile");
        assert_eq!(reads(134_000, 2).len(), 1, "8 MB/s are not much");
    }

    #[test]
    fn what_fails_is_no_work() {
        let mut fake = Fake::new(Kind::Read);
        fake.usual();
        assert_eq!(fake.work(100, 1, UNIT_BYTES, 200_000).len(), 1);
        for _ in 0..10_000 {
            fake.tally.began(Kind::Read, Timestamp(fake.now));
            assert_eq!(fake.pass(50), []);
            fake.tally.ended(Kind::Read, None, Timestamp(fake.now));
        }
        assert!(fake.watch.is_slow());
    }

    #[test]
    fn little_that_is_done_well_is_enough_and_nothing_at_all_after_a_while() {
        let slow = || {
            let mut fake = Fake::new(Kind::Flush);
            assert_eq!(fake.work(4_000, 1, 0, 1_000), []);
            assert_eq!(fake.work(10, 1, 0, 1_500_000).len(), 1);
            fake
        };
        let mut fake = slow();
        let mut changes = Vec::new();
        for _ in 0..20 {
            changes.extend(fake.work(1, 1, 0, 1_000));
            changes.extend(fake.pass(1_000_000));
        }
        assert_eq!(changes, [Change::Well], "one flush a second");
        let mut fake = slow();
        assert_eq!(fake.pass(FORGIVEN_US - 1_000_000), []);
        assert_eq!(fake.pass(2_000_000), [Change::Well]);
    }

    #[test]
    fn what_does_not_end_is_noticed() {
        for kind in Kind::ALL {
            let mut fake = Fake::new(kind);
            fake.work(20_000, 8, 0, 400);
            fake.tally.began(kind, Timestamp(fake.now));
            assert_eq!(fake.pass(2_900_000), [], "{kind:?}");
            assert!(matches!(fake.pass(700_000)[..], [Change::Slow { .. }]), "{kind:?}");
            assert_eq!(fake.pass(2 * FORGIVEN_US), [], "{kind:?}: nothing says that it is well");
            fake.tally.ended(kind, Some(0), Timestamp(fake.now));
            assert_eq!(fake.work(2_000, 8, 0, 400), [Change::Well], "{kind:?}");
        }
    }

    #[test]
    fn a_flush_of_much_is_not_slow_beside_one_of_little() {
        let mut fake = Fake::new(Kind::Flush);
        assert_eq!(fake.work(4_000, 1, 0, 1_000), []);
        assert_eq!(fake.work(100, 1, 0, 300_000), []);
        assert!(matches!(fake.work(10, 1, 0, 1_500_000)[..], [Change::Slow { .. }]));
    }
}
