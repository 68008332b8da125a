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
const WINDOWS_MAX: u32 = 192;

/// Soon after: a device that was well for so long begins anew.
const RELAPSE_US: u64 = 60_000_000;

/// An operation that takes no longer than this is not slow, whatever else is.
const WELL_WAIT_US: f64 = 25_000.0;

/// Windows after which it is known what is usual.
const USUAL_WINDOWS: u32 = 8;

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

    /// An operation of so many bytes ended.
    pub(crate) fn ended(&mut self, kind: Kind, bytes: usize, now: Timestamp) {
        let work = &mut self.0[kind as usize];
        *work = work.up_to(now);
        work.in_flight = work.in_flight.saturating_sub(1);
        work.ops += 1;
        work.units += 1 + (bytes / UNIT_BYTES) as u64;
    }
}

/// What a device took in a window, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Took {
    /// For a unit of work.
    unit_us: f64,
    /// From the beginning of an operation to its end, on the mean.
    wait_us: f64,
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
    /// What was done when the window began.
    from: Work,
    /// Time of the window after which it is judged though nothing has ended.
    hang_us: u64,
    /// Windows one after another that speak for a change.
    windows: u32,
    /// So many have to before a slow device is well again.
    wanted: u32,
    /// Since when it has been as it is.
    since: Timestamp,
    usual_us: f64,
    learned: u32,
}

impl Watch {
    pub(crate) fn new(kind: Kind) -> Watch {
        Watch {
            kind,
            is_slow: false,
            from: Work::default(),
            hang_us: HANG_US,
            windows: 0,
            wanted: WINDOWS,
            since: Timestamp(0),
            usual_us: 0.0,
            learned: 0,
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
        let is_over = units >= WINDOW_UNITS || busy_us >= if units > 0 { WINDOW_US } else { self.hang_us };
        if !is_over {
            return None;
        }
        let per = |sum: u64, count: u64| sum as f64 / count.max(1) as f64;
        let took = Took {
            unit_us: per(busy_us, units),
            wait_us: per(
                work.waited_us - self.from.waited_us,
                ops.max(u64::from(units == 0) * work.in_flight),
            ),
        };
        if units > 0 {
            (self.from, self.hang_us) = (work, HANG_US);
        } else {
            self.hang_us += HANG_US;
        }
        self.judge(took, others(), now)
    }

    fn judge(&mut self, took: Took, others: Option<f64>, now: Timestamp) -> Option<Change> {
        // Its own first: a device of a slower kind is not slow.
        let usual_us = self.usual_us().or(others);
        let (unit_us_min, wait_us_min) = self.kind.slow_us_min();
        let is_unusual = usual_us.is_some_and(|usual_us| took.unit_us >= SLOW_TIMES * usual_us);
        let is_little = is_unusual && took.unit_us >= unit_us_min;
        if self.is_slow {
            // With little to do it may take little for it and be slow still, and that shows when there is more.
            let is_well = !is_little || took.wait_us < WELL_WAIT_US;
            return self.after(is_well, self.wanted).then(|| {
                (self.is_slow, self.since) = (false, now);
                Change::Well
            });
        }
        let is_slow = is_little && took.wait_us >= wait_us_min;
        if !is_slow {
            self.learn(took.unit_us);
        }
        (self.after(is_slow, WINDOWS)).then(|| {
            let is_relapse = self.since > Timestamp(0) && now.0.saturating_sub(self.since.0) < RELAPSE_US;
            self.wanted = if is_relapse { (self.wanted * 2).min(WINDOWS_MAX) } else { WINDOWS };
            (self.is_slow, self.since) = (true, now);
            Change::Slow { takes_us: took.unit_us, usual_us: usual_us.unwrap_or_default() }
        })
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

    fn learn(&mut self, unit_us: f64) {
        if self.usual_us().is_some_and(|usual_us| unit_us > USUAL_TIMES * usual_us) {
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
                (0..in_flight).for_each(|_| self.tally.ended(self.kind, bytes, Timestamp(self.now)));
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
        assert_eq!(wells, [3, 6, 12, 24, 48, 96, 192, 192, 192]);
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
    fn what_does_not_end_is_noticed() {
        for kind in Kind::ALL {
            let mut fake = Fake::new(kind);
            fake.work(20_000, 8, 0, 400);
            fake.tally.began(kind, Timestamp(fake.now));
            assert_eq!(fake.pass(2_900_000), [], "{kind:?}");
            assert!(matches!(fake.pass(700_000)[..], [Change::Slow { .. }]), "{kind:?}");
            assert_eq!(fake.pass(60_000_000), [], "{kind:?}: nothing says that it is well");
            fake.tally.ended(kind, 0, Timestamp(fake.now));
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
